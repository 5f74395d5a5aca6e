"""The directory of a run, which `TranslationRun` reads and writes:

config.json      the configuration and the origin of the training text
source.json      the vocabularies
target.json
metrics.jsonl    one line for each report during training
checkpoints/N    the state after N steps
digests/N.json   the SHA-256 of each file of that checkpoint
pictures/        the pictures that `pictures` draws
lock             the process that trains, or trained last (`experiments.runs.locking`)
"""

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.runs import locking, stopping
from experiments.runs.checkpoints import Checkpoints
from experiments.runs.ending import Failure
from experiments.runs.files import check_plain, inside, parsed
from experiments.translation.presets import Config, differences
from experiments.translation.text import EncodedPairs
from experiments.translation.vocabulary import Vocabulary


_FORMAT = "jattn-translation-run"
_KEPT = 3  # checkpoints: enough to resume from an earlier one if the last is damaged
_WRITTEN_FIRST = ("source.json", "target.json")


@dataclass(frozen=True)
class TextOrigin:
    """The origin of the text that a run was trained on.

    Attributes:
        path: the path of the files, or None for the built-in corpus.
        languages: the languages of source and target.
        fingerprint: the digest of the encoded training pairs.
    """

    path: str | None
    languages: tuple[str, str]
    fingerprint: str


def fingerprint(pairs: EncodedPairs) -> str:
    """Returns a digest of the encoded pairs and their order."""
    digest = hashlib.sha256()
    for side in (pairs.source, pairs.target):
        digest.update(np.ascontiguousarray(side.values, "<i4").tobytes())
        digest.update(np.ascontiguousarray(side.offsets, "<i8").tobytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class TranslationRun(Checkpoints):
    """A run, whose files are in `directory`."""

    config: Config
    source: Vocabulary
    target: Vocabulary
    origin: TextOrigin

    @classmethod
    def open(cls, directory: str | Path) -> "TranslationRun":
        """Reads a run's directory.

        Raises:
            FileNotFoundError: there is no run.
            ValueError: a file is not as `create` writes it, or is a link, a pipe or a device.
        """
        directory = Path(directory)
        check_is_run(directory)
        saved = _read_json(directory / "config.json")
        if not isinstance(saved, dict) or set(saved) != {"format", "config", "text"}:
            raise ValueError(f"{directory / 'config.json'}: expected what training writes there")
        return cls(
            directory,
            Config.from_json(saved["config"]),
            Vocabulary.from_json((directory / "source.json").read_text("utf-8")),
            Vocabulary.from_json((directory / "target.json").read_text("utf-8")),
            _origin(saved["text"], directory / "config.json"),
        )

    def create(self) -> None:
        """Creates the directory with the files that `open` reads.

        Raises:
            FileExistsError: the directory exists and is not vacant.
            Unwritten: the system refuses to write.
        """
        if not is_vacant(self.directory):
            raise FileExistsError(f"run: {self.directory} exists already and is not empty")
        self.write("source.json", self.source.to_json())
        self.write("target.json", self.target.to_json())
        saved = {"format": _FORMAT, "config": asdict(self.config), "text": asdict(self.origin)}
        self.write("config.json", json.dumps(saved, indent=2) + "\n")

    def check_same(self, other: "TranslationRun") -> None:
        """Checks that another run has the configuration and the text of this one.

        Raises:
            ValueError: something differs; the message names it.
        """
        changed = differences(self.config, other.config)
        if self.source != other.source or self.target != other.target:
            changed.append("the vocabularies")
        elif self.origin.fingerprint != other.origin.fingerprint:
            changed.append("the training text")
        if changed:
            raise ValueError(f"{self.directory} was started differently: {'; '.join(changed)}")

    def save(self, state: Any, step: int) -> None:
        """Writes a checkpoint of a tree of arrays, and deletes all but the latest few and the best.

        Raises:
            Unwritten: the system refuses to write. Earlier checkpoints are unchanged.
        """
        self.write_checkpoint(state, step)
        latest = self.steps()[-max(_KEPT, self.config.averaged_checkpoints) :]
        self._drop(set(self.steps()).difference(latest, [self._best_step()]))

    def parameters(self, like: Mapping[str, Any]) -> tuple[dict[str, Any], list[int]]:
        """Returns the parameters of this run, and the steps after which they were saved.

        By the configuration these are the parameters with the lowest validation loss, the mean of
        the last checkpoints, or the parameters of the last checkpoint.

        Args:
            like: the shapes of the model's parameters.

        Raises:
            FileNotFoundError, ValueError: for the same reasons as `restore`.
            Failure: some parameter is not a finite number.
        """
        best = self._best_step()
        preferred = sorted(self.steps(), key=lambda step: (step == best, step), reverse=True)
        steps = self._whole(preferred, self.config.averaged_checkpoints)
        params = _mean([self._read(step, like, "params/") for step in steps])
        for name, array in params.items():
            if not np.all(np.isfinite(array)):
                raise Failure(f"{self.directory}: parameters are not finite, such as {name}")
        return params, sorted(steps)

    def _best_step(self) -> int | None:
        """Returns the step with the lowest validation loss, or None without early stopping."""
        record = stopping.best(self.metrics()) if self.config.patience > 0 else None
        return None if record is None else record["step"]


def is_run(directory: Path) -> bool:
    """Returns whether there is a run in this directory.

    Raises:
        ValueError: its configuration is a link, a pipe or a device.
    """
    path = inside(directory, "config.json")
    try:
        saved = _read_json(path)
    except (OSError, ValueError):
        return False
    return isinstance(saved, dict) and saved.get("format") == _FORMAT


def check_is_run(directory: Path) -> None:
    """Checks that there is a run in this directory, with no links, pipes or devices.

    Raises:
        FileNotFoundError: there is no run.
        ValueError: there are links, pipes or devices.
    """
    if not is_run(directory):
        raise FileNotFoundError(f"run: expected a run's directory, found none at {directory}")
    check_plain(directory)


def is_vacant(directory: Path) -> bool:
    """Returns whether a new run can use this directory; see `locking.is_vacant`."""
    return locking.is_vacant(directory, _WRITTEN_FIRST)


def check_removable(directory: Path) -> None:
    """Checks that a directory holds a run, before it is deleted.

    Raises:
        ValueError: it holds something else.
    """
    if not is_run(directory):
        raise ValueError(f"run: {directory} is not a run's directory, so it is not overwritten")


def remove(directory: Path) -> None:
    """Deletes all files of a run except its lock, which this process may hold.

    Raises:
        ValueError: the directory does not hold a run.
    """
    check_removable(directory)
    last = directory / "config.json"  # marks a run, so that an interrupted deletion can be repeated
    for path in [*(set(directory.iterdir()) - {last, directory / locking.NAME}), last]:
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _mean(trees: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the mean of each array, computed in float64; a single tree is returned unchanged."""
    if len(trees) == 1:
        return trees[0]
    return {
        name: np.mean([tree[name].astype(np.float64) for tree in trees], axis=0).astype(array.dtype)
        for name, array in trees[0].items()
    }


def _read_json(path: Path) -> Any:
    return parsed(path.read_text("utf-8"))


def _origin(fields: Any, path: Path) -> TextOrigin:
    match fields:
        case {
            "path": (str() | None) as text,
            "languages": [str(first), str(second)],
            "fingerprint": str(fingerprint),
        }:
            return TextOrigin(text, (first, second), fingerprint)
    raise ValueError(f"{path}: text: expected path, languages and fingerprint")
