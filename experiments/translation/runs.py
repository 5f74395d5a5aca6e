"""A run's directory: its configuration, vocabularies, metrics and checkpoints.

config.json      the configuration, and which text it was trained on
source.json      the vocabularies
target.json
metrics.jsonl    a line for each report while training
checkpoints/N    the state after N steps
digests/N.json   the SHA-256 of each file of that checkpoint
pictures/        what `pictures` draws
lock             who trains, or did last (`experiments.runs.locking`)
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
_KEPT = 3  # checkpoints: enough to go back behind a damaged one
_WRITTEN_FIRST = ("source.json", "target.json")


@dataclass(frozen=True)
class TextOrigin:
    """Which text a run was trained on.

    Attributes:
        path: of the files, or None for the built-in corpus.
        languages: of source and target.
        fingerprint: of the encoded training pairs.
    """

    path: str | None
    languages: tuple[str, str]
    fingerprint: str


def fingerprint(pairs: EncodedPairs) -> str:
    """A digest of the encoded pairs and their order."""
    digest = hashlib.sha256()
    for side in (pairs.source, pairs.target):
        digest.update(np.ascontiguousarray(side.values, "<i4").tobytes())
        digest.update(np.ascontiguousarray(side.offsets, "<i8").tobytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class Run(Checkpoints):
    """A run that was begun in `directory`."""

    config: Config
    source: Vocabulary
    target: Vocabulary
    origin: TextOrigin

    @classmethod
    def open(cls, directory: str | Path) -> "Run":
        """Reads a run's directory.

        Raises:
            FileNotFoundError: there is no run.
            ValueError: its files are not what `create` writes, or there are links, pipes or devices
                among them.
        """
        directory = Path(directory)
        check_is_run(directory)
        about = _read_json(directory / "config.json")
        if not isinstance(about, dict) or set(about) != {"format", "config", "text"}:
            raise ValueError(f"{directory / 'config.json'}: expected what training writes there")
        return cls(
            directory,
            Config.from_json(about["config"]),
            Vocabulary.from_json((directory / "source.json").read_text("utf-8")),
            Vocabulary.from_json((directory / "target.json").read_text("utf-8")),
            _origin(about["text"], directory / "config.json"),
        )

    def create(self) -> None:
        """Makes the directory and writes what `open` reads.

        Raises:
            FileExistsError: there is something already.
            Unwritten: the system refuses it.
        """
        if not is_vacant(self.directory):
            raise FileExistsError(f"run: {self.directory} exists already and is not empty")
        self.write("source.json", self.source.to_json())
        self.write("target.json", self.target.to_json())
        about = {"format": _FORMAT, "config": asdict(self.config), "text": asdict(self.origin)}
        self.write("config.json", json.dumps(about, indent=2) + "\n")

    def check_same(self, other: "Run") -> None:
        """Makes sure that another run has the configuration and the text of this one.

        Raises:
            ValueError: something differs; the message names it.
        """
        changed = differences(self.config, other.config)
        if self.source != other.source or self.target != other.target:
            changed.append("the vocabularies")
        elif self.origin.fingerprint != other.origin.fingerprint:
            changed.append("the training text")
        if changed:
            raise ValueError(f"{self.directory} was begun differently: {'; '.join(changed)}")

    def save(self, state: Any, step: int) -> None:
        """Writes a checkpoint of a tree of arrays, and drops all but the latest few and the best.

        Raises:
            Unwritten: the system refuses it. Those before it are as they were.
        """
        self.write_checkpoint(state, step)
        latest = self.steps()[-max(_KEPT, self.config.averaged_checkpoints) :]
        self._drop(set(self.steps()).difference(latest, [self._best_step()]))

    def parameters(self, like: Mapping[str, Any]) -> tuple[dict[str, Any], list[int]]:
        """The parameters of this run, and the steps after which they were saved: those of the
        lowest validation loss, or the mean of the last checkpoints', or those of the last.

        Args:
            like: the shapes of the model's parameters.

        Raises:
            FileNotFoundError, ValueError: as `restore`.
            Failure: some parameter is no finite number.
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
        """The step of the lowest validation loss, where that is what counts."""
        found = stopping.best(self.metrics()) if self.config.patience > 0 else None
        return None if found is None else found["step"]


def is_run(directory: Path) -> bool:
    """Whether there is a run in this directory.

    Raises:
        ValueError: its configuration is a link, a pipe or a device.
    """
    path = inside(directory, "config.json")
    try:
        about = _read_json(path)
    except (OSError, ValueError):
        return False
    return isinstance(about, dict) and about.get("format") == _FORMAT


def check_is_run(directory: Path) -> None:
    """Makes sure that there is a run in this directory, and nothing that leads elsewhere.

    Raises:
        FileNotFoundError: there is no run.
        ValueError: there are links, pipes or devices.
    """
    if not is_run(directory):
        raise FileNotFoundError(f"run: expected a run's directory, found none at {directory}")
    check_plain(directory)


def is_vacant(directory: Path) -> bool:
    """Whether a run can begin in this directory: it does not exist, or is empty, or holds what is
    left of a run that did not come to begin. Such a one has a lock, which only vacant directories
    and runs are given."""
    if not directory.is_dir():
        return not directory.exists()
    found = {path.name for path in directory.iterdir()}
    ours = {name for name in found if name.endswith(".draft")} | {locking.NAME, *_WRITTEN_FIRST}
    return not found or (locking.NAME in found and found <= ours)


def check_removable(directory: Path) -> None:
    """Makes sure that a directory holds a run and not something else.

    Raises:
        ValueError: it holds something else.
    """
    if not is_run(directory):
        raise ValueError(f"run: {directory} is not a run's directory, so it is not overwritten")


def remove(directory: Path) -> None:
    """Deletes a run with all that is in its directory but its lock, which may be held.

    Raises:
        ValueError: the directory holds something else than a run.
    """
    check_removable(directory)
    last = directory / "config.json"  # until then it is a run, and can be deleted once more
    for path in [*(set(directory.iterdir()) - {last, directory / locking.NAME}), last]:
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _mean(trees: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The mean of each array, taken in float64; a single tree as it is."""
    if len(trees) == 1:
        return trees[0]
    return {
        name: np.mean([tree[name].astype(np.float64) for tree in trees], axis=0).astype(array.dtype)
        for name, array in trees[0].items()
    }


def _read_json(path: Path) -> Any:
    return parsed(path.read_text("utf-8"))


def _origin(about: Any, path: Path) -> TextOrigin:
    match about:
        case {
            "path": (str() | None) as text,
            "languages": [str(first), str(second)],
            "fingerprint": str(fingerprint),
        }:
            return TextOrigin(text, (first, second), fingerprint)
    raise ValueError(f"{path}: text: expected path, languages and fingerprint")
