"""A run's directory: its configuration, vocabularies, metrics and checkpoints.

    config.json      the configuration, and which text it was trained on
    source.json      the vocabularies
    target.json
    metrics.jsonl    a line for each report while training
    checkpoints/N    the state after N steps, written by orbax
    digests/N.json   the SHA-256 of each file of that checkpoint, written last
    pictures/        what `pictures` draws
    lock             who trains, or did last (`locking`)

All of it is data: nothing is unpickled or executed. It may come from somebody else, so nothing in
it is a link, a pipe or a device, which would lead elsewhere. A checkpoint whose files do not give
their digests is incomplete or damaged; it is not read, and the one before it is taken. Shapes are
looked at before arrays are read.
"""

import contextlib
import hashlib
import itertools
import json
import logging
import re
import shutil
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from experiments.runs import locking, stopping
from experiments.runs.console import json_line
from experiments.runs.ending import Failure
from experiments.runs.files import (
    append,
    check_plain,
    inside,
    parsed,
    replace,
    sync_folder,
    writing,
)
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
class Run:
    """A run that was begun in `directory`."""

    directory: Path
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

    def path(self, name: str) -> Path:
        """The path of a file or folder of the run.

        Raises:
            ValueError: it leads elsewhere, as a link does.
        """
        return inside(self.directory, name)

    def write(self, name: str, text: str) -> None:
        """Writes a file of the run.

        Raises:
            Unwritten: the system refuses it.
        """
        replace(self.path(name), text)

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

    # ---------------------------------------------------------------------------------- metrics

    def report(self, record: dict[str, Any]) -> None:
        """Appends a line to the metrics; a number that JSON has not got becomes null.

        Raises:
            Unwritten: the system refuses it.
        """
        append(self.path("metrics.jsonl"), json_line(record))

    def metrics(self) -> list[dict[str, Any]]:
        """The records reported so far, without a last line cut short."""
        path = self.path("metrics.jsonl")
        lines = path.read_text("utf-8").split("\n") if path.exists() else [""]
        return [_record(line, f"{path}:{at}") for at, line in enumerate(lines[:-1], start=1)]

    def forget_metrics_after(self, step: int) -> None:
        """Drops the records of steps that will be made again, and a last line cut short."""
        kept = [record for record in self.metrics() if record["step"] <= step]
        lines = "".join(json_line(record) + "\n" for record in kept)
        self.write("metrics.jsonl", lines)

    # ------------------------------------------------------------------------------ checkpoints

    def steps(self) -> list[int]:
        """The steps of which there are checkpoints, in order."""
        if not self._checkpoints.is_dir():
            return []
        names = [path.name for path in self._checkpoints.iterdir()]
        return sorted(int(name) for name in names if re.fullmatch("0|[1-9][0-9]*", name))

    def has_checkpoint(self) -> bool:
        """Whether a checkpoint was ever finished, however damaged it may be now: where there are
        two, all but the last were."""
        steps = self.steps()
        return len(steps) > 1 or any(self._digest(step).exists() for step in steps)

    def save(self, state: Any, step: int) -> None:
        """Writes a checkpoint of a tree of arrays, and drops all but the latest few and the best.

        Later ones are dropped first: a run that has gone back before them found them damaged.

        Raises:
            Unwritten: the system refuses it. Those before it are as they were.
        """
        named = {name: np.asarray(array) for name, array in _named(state).items()}
        with writing(f"{self.directory}: checkpoint {step}"):
            self._write(named, step)
        latest = self.steps()[-max(_KEPT, self.config.averaged_checkpoints) :]
        self._drop(set(self.steps()).difference(latest, [self._best_step()]))

    def _write(self, named: Mapping[str, np.ndarray], step: int) -> None:
        self._drop(later for later in self.steps() if later >= step)
        with _manager(self._checkpoints) as manager:
            if not manager.save(step, args=ocp.args.PyTreeSave(named)):
                raise OSError("it was not saved")
        sync_folder(self._checkpoints / str(step))
        replace(self._digest(step), json.dumps(_digests(self._checkpoints / str(step))))

    def restore(self, like: Any, *, prefix: str = "") -> tuple[Any, int]:
        """The latest checkpoint that is whole, and its step.

        Args:
            like: a tree of arrays or of their shapes, such as was saved or a part of it.
            prefix: where that part is in what was saved.

        Raises:
            FileNotFoundError: there is no checkpoint.
            ValueError: none is whole, or the arrays are others than those of `like`; the message
                names them.
        """
        (step,) = self._whole(reversed(self.steps()), 1)
        return self._read(step, like, prefix), step

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

    def last_whole_step(self) -> int | None:
        """The step of the latest checkpoint that is whole."""
        return next(filter(self._has_digests, reversed(self.steps())), None)

    def _best_step(self) -> int | None:
        """The step of the lowest validation loss, where that is what counts."""
        found = stopping.best(self.metrics()) if self.config.patience > 0 else None
        return None if found is None else found["step"]

    def _whole(self, steps: Iterable[int], count: int) -> list[int]:
        """The first `count` of these steps whose checkpoints are whole, or as many as there are."""
        if not self.has_checkpoint():
            raise FileNotFoundError(f"{self.directory}: no checkpoint yet")
        found = list(itertools.islice(filter(self._is_whole, steps), count))
        if not found:
            raise ValueError(f"{self.directory}: every checkpoint is damaged")
        return found

    def _read(self, step: int, like: Any, prefix: str) -> Any:
        """The tree `like` with the saved arrays in place of its own."""
        wanted = {prefix + name: leaf for name, leaf in _named(like).items()}
        with _as_written(step), _manager(self._checkpoints, read_only=True) as manager:
            saved = manager.item_metadata(step).tree
            _check_kinds({n: kind for n, kind in saved.items() if n.startswith(prefix)}, wanted)
            as_numpy = dict.fromkeys(wanted, ocp.RestoreArgs(restore_type=np.ndarray))
            arguments = ocp.args.PyTreeRestore(wanted, as_numpy, partial_restore=True)
            arrays = manager.restore(step, args=arguments)
        return jax.tree.unflatten(jax.tree.structure(like), [arrays[name] for name in wanted])

    def _drop(self, steps: Iterable[int]) -> None:
        """Deletes checkpoints, their digests first, so that what is left of one is not whole."""
        for step in list(steps):
            self._digest(step).unlink(missing_ok=True)
            shutil.rmtree(self._checkpoints / str(step))

    @property
    def _checkpoints(self) -> Path:
        return self.path("checkpoints").resolve()

    def _digest(self, step: int) -> Path:
        return self.path(f"digests/{step}.json")

    def _has_digests(self, step: int) -> bool:
        """Whether the files of a checkpoint are those that were written."""
        try:
            expected = _read_json(self._digest(step))
            return expected == _digests(self._checkpoints / str(step))
        except (OSError, ValueError):
            return False

    def _is_whole(self, step: int) -> bool:
        if self._has_digests(step):
            return True
        warnings.warn(f"checkpoint {step} is incomplete or damaged: left out", stacklevel=2)
        return False


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


def free_directory(directory: Path) -> Path:
    """The first of DIRECTORY, DIRECTORY-2, DIRECTORY-3, ... that does not exist."""
    number, free = 1, directory
    while free.exists():
        number += 1
        free = directory.with_name(f"{directory.name}-{number}")
    return free


# ------------------------------------------------------------------------------------- arrays


@contextlib.contextmanager
def _manager(directory: Path, *, read_only: bool = False) -> Iterator[ocp.CheckpointManager]:
    with _without_tracebacks():
        process = jax.process_index()  # of several, each is on its own here
        alone = ocp.options.MultiprocessingOptions(
            primary_host=process, active_processes={process}, barrier_sync_key_prefix=str(process)
        )
        several: dict[str, Any]
        several = {"multiprocessing_options": alone} if jax.process_count() > 1 else {}
        if several and not read_only:
            directory.mkdir(parents=True, exist_ok=True)
        options = ocp.CheckpointManagerOptions(
            enable_async_checkpointing=False,
            read_only=read_only,
            create=not read_only and not several,
            cleanup_tmp_directories=not read_only,  # what saves that did not end have left
            **several,
        )
        manager = ocp.CheckpointManager(
            directory, options=options, item_handlers=ocp.PyTreeCheckpointHandler(**several)
        )
        try:
            yield manager
        finally:
            manager.close()


@contextlib.contextmanager
def _without_tracebacks() -> Iterator[None]:
    """What fails in orbax's threads is raised here as well; there it would be told at length.

    Where one array fails, the writes of others fail or call back too late, some when all is over:
    that is not told from then on.
    """
    logger, loops, hook = (
        logging.getLogger("absl"),
        logging.getLogger("asyncio"),
        sys.unraisablehook,
    )
    before = logger.level

    def is_awaited(record: logging.LogRecord) -> bool:
        return "exception was never retrieved" not in record.getMessage()

    def without_late_calls(told: Any) -> None:
        if str(told.exc_value) != "Event loop is closed":
            hook(told)

    logger.setLevel(logging.CRITICAL)
    loops.addFilter(is_awaited)
    sys.unraisablehook = without_late_calls
    try:
        yield
        sys.unraisablehook = hook
        loops.removeFilter(is_awaited)
    finally:
        logger.setLevel(before)


@contextlib.contextmanager
def _as_written(step: int) -> Iterator[None]:
    """Around reading what may have other keys and types than training writes."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"checkpoint {step}: expected what training writes") from error


def _named(tree: Any) -> dict[str, Any]:
    """The arrays of a tree by their paths in it."""
    leaves, _ = jax.tree.flatten_with_path(tree)
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
    return {name: leaf for name, (_, leaf) in zip(names, leaves, strict=True)}


def _mean(trees: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The mean of each array, taken in float64; a single tree as it is."""
    if len(trees) == 1:
        return trees[0]
    return {
        name: np.mean([tree[name].astype(np.float64) for tree in trees], axis=0).astype(array.dtype)
        for name, array in trees[0].items()
    }


def _check_kinds(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    wrong = [
        f"{name}: {_kind(saved.get(name))}, not {_kind(wanted.get(name))}"
        for name in sorted(wanted.keys() | saved.keys())
        if _kind(saved.get(name)) != _kind(wanted.get(name))
    ]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise ValueError(f"the checkpoint is of another model: {'; '.join(wrong[:3])}{more}")


def _kind(array: Any) -> str:
    return "nothing" if array is None else f"{array.dtype}{list(array.shape)}"


def _digests(directory: Path) -> dict[str, str]:
    """The SHA-256 of each file, by its path in the directory.

    Raises:
        ValueError: there is something else than files and folders.
    """
    check_plain(directory)
    return {
        str(file.relative_to(directory)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(directory.rglob("*"))
        if file.is_file()
    }


def _record(line: str, place: str) -> dict[str, Any]:
    try:
        record = parsed(line)
    except ValueError:
        record = None
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        raise ValueError(f"{place}: expected a record of metrics, got {line[:40]!r}")
    return record


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
