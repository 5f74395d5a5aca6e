"""Stored results of earlier runs, and comparisons of new results with them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from experiments.offline.job import COMPILED, Job
from experiments.runs.ending import UserError


_FOLDER = Path(__file__).parent / "kept"
_MORE_MEMORY = 1.1  # a larger ratio is worse
_MORE_INSTRUCTIONS = 1.02
_FEW_BYTES = 2**20


def path(target: str) -> Path:
    """Returns the file of stored rows for the installed version of JAX, or for the newest version
    that has rows."""
    installed = _FOLDER / f"jax-{'.'.join(jax.__version__.split('.')[:2])}" / f"{target}.jsonl"
    return installed if installed.exists() else max(_FOLDER.glob(f"jax-*/{target}.jsonl"))


def read(path: Path, target: str) -> dict[Job, dict[str, Any]]:
    """Reads the rows of a file, by job.

    Raises:
        UserError: the file is missing or invalid, or has rows of another target.
    """
    names = ("target", "case", "implementation", "head", "dtype", "pass")
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        rows_by_job = {Job(*(row[name] for name in names)): row for row in rows}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"--against: expected an --out of before, got {path}: {error}") from error
    if {job.target for job in rows_by_job} != {target}:
        raise UserError(f"--against: expected rows of {target} in {path}")
    return rows_by_job


def worse(old: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    """Yields a short text for each figure of a row that is worse than before."""
    if old["status"] == COMPILED != new["status"]:
        yield f"compiled before, now {new['status']}: {new['message']}"
    if old["status"] != COMPILED or new["status"] != COMPILED:
        return
    for name in ("temporary_bytes", "bytes_moved"):
        if (new[name] or 0) > _MORE_MEMORY * (old[name] or 0) + _FEW_BYTES:
            yield f"{name} {old[name]}, now {new[name]}"
    old_kernels = _kernels(old)
    for key, kernel in _kernels(new).items():
        yield from _worse_kernel(old_kernels.get(key), kernel)


def _worse_kernel(old: dict[str, Any] | None, new: dict[str, Any]) -> Iterator[str]:
    """Yields what is worse in a kernel; a new kernel is worse if it spills or has warnings."""
    name, old_spills = new["kernel"], old["spill_bytes"] if old else 0
    if new["spill_bytes"] > old_spills:
        yield f"{name} spills {old_spills}, now {new['spill_bytes']} bytes"
    for warning in new["warnings"]:
        if not old or warning not in old["warnings"]:
            yield f"{name} has a new warning: {warning}"
    if old and (instructions := _instructions(new)) > _MORE_INSTRUCTIONS * _instructions(old):
        yield f"{name} has a loop of {_instructions(old)}, now {instructions} instructions"


def _kernels(row: dict[str, Any]) -> dict[tuple[str, int], dict[str, Any]]:
    """Returns a row's kernels by name and by the number of earlier kernels with the same name."""
    kernels: dict[tuple[str, int], dict[str, Any]] = {}
    for kernel in row.get("kernels", ()):
        kernels[kernel["kernel"], sum(name == kernel["kernel"] for name, _ in kernels)] = kernel
    return kernels


def _instructions(kernel: dict[str, Any]) -> int:
    loop = kernel.get("main_loop")
    return loop["instructions"] if loop else 0
