"""A run's checkpoints, with digests that reveal damage.

    checkpoints/N    the state after N steps, written by orbax
    digests/N.json   the SHA-256 of each file of that checkpoint, written last

Reading unpickles and executes nothing. A checkpoint whose files do not match their digests is
incomplete or damaged; it is skipped, and the checkpoint before it is read. Shapes are checked
before arrays are read.
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
        """Returns the steps that have checkpoints, in order."""
        if not self._checkpoints.is_dir():
            return []
        names = [path.name for path in self._checkpoints.iterdir()]
        return sorted(int(name) for name in names if re.fullmatch("0|[1-9][0-9]*", name))

    def has_checkpoint(self) -> bool:
        """Returns whether a checkpoint was ever completed, even if it is damaged now; of several
        checkpoints, all but the last must have been completed."""
        steps = self.steps()
        return len(steps) > 1 or any(self._digest(step).exists() for step in steps)

    def write_checkpoint(self, state: Any, step: int) -> None:
        """Writes a checkpoint of a tree of arrays.

        Checkpoints of this and later steps are deleted first: a run that resumed before them found
        them damaged.

        Raises:
            Unwritten: the system refuses to write. Earlier checkpoints are unchanged.
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
        """Reads the latest checkpoint that is whole, and returns it and its step.

        Args:
            like: a tree of arrays or of their shapes, like the saved tree or a part of it.
            prefix: the path of that part in the saved tree.

        Raises:
            FileNotFoundError: there is no checkpoint.
            ValueError: no checkpoint is whole, or its arrays differ from those of `like`; the
                message names them.
        """
        (step,) = self._whole(reversed(self.steps()), 1)
        return self._read(step, like, prefix), step

    def last_whole_step(self) -> int | None:
        """Returns the step of the latest checkpoint that is whole, or None."""
        return next(filter(self._has_digests, reversed(self.steps())), None)

    def _whole(self, steps: Iterable[int], count: int) -> list[int]:
        """Returns the first `count` of these steps whose checkpoints are whole, or fewer."""
        if not self.has_checkpoint():
            raise FileNotFoundError(f"{self.directory}: no checkpoint yet")
        whole = list(itertools.islice(filter(self._is_whole, steps), count))
        if not whole:
            raise ValueError(f"{self.directory}: every checkpoint is damaged")
        return whole

    def _read(self, step: int, like: Any, prefix: str) -> Any:
        """Returns the tree `like` with its arrays replaced by the saved ones."""
        leaves = {prefix + name: leaf for name, leaf in _named(like).items()}
        with _as_written(step), _manager(self._checkpoints, read_only=True) as manager:
            saved = manager.item_metadata(step).tree
            _check_kinds({n: kind for n, kind in saved.items() if n.startswith(prefix)}, leaves)
            as_numpy = dict.fromkeys(leaves, ocp.RestoreArgs(restore_type=np.ndarray))
            arguments = ocp.args.PyTreeRestore(leaves, as_numpy, partial_restore=True)
            arrays = manager.restore(step, args=arguments)
        return jax.tree.unflatten(jax.tree.structure(like), [arrays[name] for name in leaves])

    def _drop(self, steps: Iterable[int]) -> None:
        """Deletes checkpoints, digests first, so that a partly deleted checkpoint is not whole."""
        for step in list(steps):
            self._digest(step).unlink(missing_ok=True)
            shutil.rmtree(self._checkpoints / str(step))

    @property
    def _checkpoints(self) -> Path:
        return self.path("checkpoints").resolve()

    def _digest(self, step: int) -> Path:
        return self.path(f"digests/{step}.json")

    def _has_digests(self, step: int) -> bool:
        """Returns whether the files of a checkpoint match their digests."""
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
    with without_tracebacks():
        process = jax.process_index()  # each of several processes saves and reads independently
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
            cleanup_tmp_directories=not read_only,  # left by interrupted saves
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
def without_tracebacks() -> Iterator[None]:
    """Silences the tracebacks of orbax's threads, whose errors are raised in this thread as well.

    If one array fails, the writes of others fail too or call back too late, some even after the
    context. So after an error their messages stay silenced.
    """
    logger, loops = logging.getLogger("absl"), logging.getLogger("asyncio")
    level, hook = logger.level, sys.unraisablehook

    def is_awaited(record: logging.LogRecord) -> bool:
        return "exception was never retrieved" not in record.getMessage()

    def without_late_calls(unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            hook(unraisable)

    logger.setLevel(logging.CRITICAL)
    loops.addFilter(is_awaited)
    sys.unraisablehook = without_late_calls
    try:
        yield
        sys.unraisablehook = hook
        loops.removeFilter(is_awaited)
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def _as_written(step: int) -> Iterator[None]:
    """Raises ValueError within the context if a checkpoint has unexpected keys or types."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"checkpoint {step}: expected what training writes") from error


def _named(tree: Any) -> dict[str, Any]:
    """Returns the arrays of a tree by their paths in it."""
    leaves, _ = jax.tree.flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def _check_kinds(saved: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    wrong = [
        f"{name}: {_kind(saved.get(name))}, not {_kind(expected.get(name))}"
        for name in sorted(expected.keys() | saved.keys())
        if _kind(saved.get(name)) != _kind(expected.get(name))
    ]
    if wrong:
        rest = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise ValueError(f"the checkpoint is of another model: {'; '.join(wrong[:3])}{rest}")


def _kind(array: Any) -> str:
    return "nothing" if array is None else f"{array.dtype}{list(array.shape)}"


def _digests(directory: Path) -> dict[str, str]:
    """Returns the SHA-256 of each file, by its path in the directory.

    Raises:
        ValueError: there is something other than files and folders.
    """
    check_plain(directory)
    return {
        str(file.relative_to(directory)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(directory.rglob("*"))
        if file.is_file()
    }
