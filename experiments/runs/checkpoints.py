"""A run's checkpoints, of which damage is noticed.

    checkpoints/N    the state after N steps, written by orbax
    digests/N.json   the SHA-256 of each file of that checkpoint, written last

All of it is data: nothing is unpickled or executed. A checkpoint whose files do not give their
digests is incomplete or damaged; it is not read, and the one before it is taken. Shapes are looked
at before arrays are read.
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
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from experiments.runs.files import check_plain, parsed, replace, sync_folder, writing
from experiments.runs.folder import Folder


class Checkpoints(Folder):
    """A run's folder with checkpoints in it."""

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

    def write_checkpoint(self, state: Any, step: int) -> None:
        """Writes a checkpoint of a tree of arrays.

        Later ones are dropped first: a run that has gone back before them found them damaged.

        Raises:
            Unwritten: the system refuses it. Those before it are as they were.
        """
        named = {name: np.asarray(array) for name, array in _named(state).items()}
        with writing(f"{self.directory}: checkpoint {step}"):
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

    def last_whole_step(self) -> int | None:
        """The step of the latest checkpoint that is whole."""
        return next(filter(self._has_digests, reversed(self.steps())), None)

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
            expected = parsed(self._digest(step).read_text("utf-8"))
            return expected == _digests(self._checkpoints / str(step))
        except (OSError, ValueError):
            return False

    def _is_whole(self, step: int) -> bool:
        if self._has_digests(step):
            return True
        warnings.warn(f"checkpoint {step} is incomplete or damaged: left out", stacklevel=2)
        return False


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
    logger, loops = logging.getLogger("absl"), logging.getLogger("asyncio")
    before, hook = logger.level, sys.unraisablehook

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
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


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
