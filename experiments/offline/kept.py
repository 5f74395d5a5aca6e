"""Results that were kept, and what is worse now: the cases that compile and what they take."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from experiments.offline.job import COMPILED, Job
from experiments.runs.ending import UserError


_FOLDER = Path(__file__).parent / "kept"
_MORE_MEMORY = 1.1  # times as much is worse
_MORE_INSTRUCTIONS = 1.02
_FEW_BYTES = 2**20


def path(target: str) -> Path:
    """Where rows are that were kept with the installed version of JAX; those of the newest if there
    are none of it."""
    here = _FOLDER / f"jax-{'.'.join(jax.__version__.split('.')[:2])}" / f"{target}.jsonl"
    return here if here.exists() else max(_FOLDER.glob(f"jax-*/{target}.jsonl"))


def read(path: Path, target: str) -> dict[Job, dict[str, Any]]:
    """The rows of a file by what they are of.

    Raises:
        UserError: there is no such file, or it holds no rows of the target.
    """
    names = ("target", "case", "implementation", "head", "dtype", "pass")
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        found = {Job(*(row[name] for name in names)): row for row in rows}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"--against: expected an --out of before, got {path}: {error}") from error
    if {each.target for each in found} != {target}:
        raise UserError(f"--against: expected rows of {target} in {path}")
    return found


def worse(before: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    """What is worse in a row than it was: each in a few words."""
    if before["status"] == COMPILED != now["status"]:
        yield f"compiled before, now {now['status']}: {now['message']}"
    if before["status"] != COMPILED or now["status"] != COMPILED:
        return
    for name in ("temporary_bytes", "bytes_moved"):
        if (now[name] or 0) > _MORE_MEMORY * (before[name] or 0) + _FEW_BYTES:
            yield f"{name} {before[name]}, now {now[name]}"
    kernels = _kernels(before)
    for at, one in _kernels(now).items():
        yield from _worse_kernel(kernels.get(at), one)


def _worse_kernel(old: dict[str, Any] | None, one: dict[str, Any]) -> Iterator[str]:
    """A kernel that was not there is worse where it spills or the compiler warns of it."""
    name, spilled = one["kernel"], old["spill_bytes"] if old else 0
    if one["spill_bytes"] > spilled:
        yield f"{name} spills {spilled}, now {one['spill_bytes']} bytes"
    for said in one["warnings"]:
        if not old or said not in old["warnings"]:
            yield f"{name} has a new warning: {said}"
    if old and (now_has := _instructions(one)) > _MORE_INSTRUCTIONS * _instructions(old):
        yield f"{name} has a loop of {_instructions(old)}, now {now_has} instructions"


def _kernels(row: dict[str, Any]) -> dict[tuple[str, int], dict[str, Any]]:
    """By name and, as two may have one, by how many of that name come before."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for one in row.get("kernels", ()):
        found[one["kernel"], sum(name == one["kernel"] for name, _ in found)] = one
    return found


def _instructions(kernel: dict[str, Any]) -> int:
    loop = kernel.get("main_loop")
    return loop["instructions"] if loop else 0
