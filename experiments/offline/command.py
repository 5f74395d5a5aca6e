"""Compiles attention for a GPU or TPU that is not here, and says what the compilers made of it.

    python -m experiments.benchmark offline --target h100
    python -m experiments.benchmark offline --target h100 --cases causal bias --head 64 128
    python -m experiments.benchmark offline --target v5e --implementation tpu --out v5e.jsonl
    python -m experiments.benchmark offline --target h100 --cases full --lengths 4096 8192

It needs no device, but the compilers: `pip install -e ".[offline]"`, several GB. For a GPU there
is a line for each kernel: registers, bytes spilled, bytes of shared memory, and of the loop over
tiles that need no mask the instructions, those that a vote may jump over (+), the cycles that
matrix units, the special function unit (exp2) and shared memory are busy, and the least and most
TFLOP/s that a model of these predicts. For a TPU there is a line for each program: temporary
memory, bytes moved, kernels and loops. It shows what does not compile, does not fit, spills or is
slow by its instructions; not wrong results, races or times. Rows go to `--out` as JSON lines.
`jax_splash` and `jax_mgpu` are JAX's own kernels, for the few cases that they know. `--against`
compares with rows that were kept, and compiles what those are of. `--lengths` shows how temporary
memory grows, by `blockwise` unless told; that of a TPU's VMEM counts too.

The exit status is 1 where a case does not compile without the implementation saying why, or is
worse than it was, and 2 where the command is wrong or the compilers are missing.
"""

import argparse
import json
import pathlib
from typing import Any

from tqdm import tqdm

from experiments.offline import calls, job, kept, targets
from experiments.offline.job import Job
from experiments.offline.machine_code import Loop
from experiments.runs import bounds
from experiments.runs.ending import Failure, UserError, interruptible
from experiments.runs.files import append, replace


DTYPES = ("bfloat16", "float16", "float32")
_COLUMNS = ("instr", "+", "matrix", "special", "smem")
_COUNTS = ("instructions", "sometimes", "matrix_cycles", "special_cycles", "shared_cycles")
_CASE = "{case:<18} {implementation:<9} {head:>4} {dtype:<8} {pass:<9}"
_CASE_TITLES = f"{'case':<18} {'kernels':<9} {'H':>4} {'dtype':<8} {'pass':<9}"
_KERNEL = "{:<22} {:>5} {:>6} {:>7} {:>6} {:>4} {:>7} {:>7} {:>7} {:>9}"
_KERNEL_TITLES = ("kernel", "regs", "spill", "shared", *_COLUMNS, "TFLOP/s")
_PROGRAM = "{:>9} {:>9} {:>7} {:>6}"
_PROGRAM_TITLES = ("temp MiB", "moved GB", "kernels", "loops")


def main(argv: list[str]) -> None:
    """Compiles what is asked for, prints a table and writes JSON lines.

    Raises:
        UserError: an unknown name, or the compilers are missing.
        Failure: something does not compile.
    """
    given = arguments(argv)
    target = targets.TARGETS[given.target]
    before = kept.read(given.against, target.name) if given.against else {}
    jobs = list(before) or chosen(given, target)
    reason = targets.missing(target)
    if reason:
        raise UserError(reason)
    replace(given.out, "")
    print(titles(target, bool(given.lengths)))
    failed = unsupported = spilled = worse = 0
    for each in interruptible(tqdm(jobs, disable=None, leave=False)):
        row = job.run(each, given.seconds)
        append(given.out, json.dumps(row, allow_nan=False))
        tqdm.write("\n".join(lines(row)))
        for said in kept.worse(before[each], row) if before else ():
            tqdm.write(f"    worse than it was: {said}")
            worse += 1
        failed += row["status"] == job.FAILED
        unsupported += row["status"] == job.UNSUPPORTED
        spilled += any(kernel["spill_bytes"] for kernel in row.get("kernels", ()))
    spills = f", {spilled} with spills" if target.is_gpu else ""
    print(f"{len(jobs)} programs: {failed} failed, {unsupported} not supported{spills}")
    print(f"results: {given.out}")
    if failed:
        raise Failure(f"{failed} of {len(jobs)} programs do not compile for {target.name}")
    if worse:
        raise Failure(f"{worse} figures are worse than those of {given.against}")


def arguments(argv: list[str]) -> argparse.Namespace:
    """The command's arguments; what argparse refuses ends with status 2."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.benchmark offline",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    known = ", ".join(calls.CALLS)
    parser.add_argument("--target", required=True, choices=list(targets.TARGETS))
    parser.add_argument("--cases", nargs="+", choices=list(calls.CALLS), metavar="CASE", help=known)
    kernels = "; ".join(f"{x.name}: {', '.join(x.implementations)}" for x in _targets())
    usual = "; ".join(f"{x.name}: {' '.join(x.usual)}" for x in _targets())
    parser.add_argument(
        "--implementation", nargs="+", metavar="NAME", help=f"{kernels} (default {usual})"
    )
    parser.add_argument("--head", nargs="+", type=bounds.count, default=[128], metavar="H")
    parser.add_argument(
        "--lengths",
        nargs="+",
        type=bounds.count,
        default=[],
        metavar="T",
        help="of queries and keys",
    )
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=[DTYPES[0]])
    parser.add_argument(
        "--pass",
        dest="which",
        choices=[*job.PASSES, "both"],
        default="both",
        help="gradients holds the forward kernel too",
    )
    parser.add_argument(
        "--seconds", type=bounds.seconds, default=600.0, help="at most, for one program"
    )
    parser.add_argument("--out", type=pathlib.Path, help="default: runs/offline/TARGET.jsonl")
    parser.add_argument("--against", type=pathlib.Path, help="an --out of before")
    given = parser.parse_args(argv)
    given.out = given.out or pathlib.Path("runs/offline") / f"{given.target}.jsonl"
    return given


def _targets() -> tuple[targets.Target, ...]:
    return tuple(targets.TARGETS.values())


def chosen(given: argparse.Namespace, target: targets.Target) -> list[Job]:
    """What the arguments ask for.

    Raises:
        UserError: an implementation that the target has not, or a case that has one length.
    """
    usual = ("blockwise",) if given.lengths else target.usual
    implementations = given.implementation or usual
    for name in implementations:
        if name not in target.implementations:
            there = ", ".join(target.implementations)
            raise UserError(f"no implementation {name!r} for {target.name}; there are {there}")
    passes = job.PASSES if given.which == "both" else (given.which,)
    names = given.cases or (("full", "causal") if given.lengths else calls.CALLS)
    for name in names:
        if given.lengths and not calls.CALLS[name].has_any_length:
            raise UserError(f"--lengths: the case {name} has arrays of one length")
    return [
        Job(target.name, name, implementation, head, dtype, which, length)
        for implementation in implementations
        for name in names
        for head in given.head
        for dtype in given.dtype
        for which in passes
        for length in given.lengths or [0]
    ]


def titles(target: targets.Target, lengths: bool = False) -> str:
    """The table's first line."""
    if target.is_gpu and not lengths:
        return f"{_CASE_TITLES} {_KERNEL.format(*_KERNEL_TITLES)}"
    return f"{_CASE_TITLES} {_PROGRAM.format(*_PROGRAM_TITLES)}"


def lines(row: dict[str, Any]) -> list[str]:
    """What the table says of a row: a line for each kernel of a GPU, or for a TPU's program."""
    length = row.get("length", 0)
    start = _CASE.format(**row | {"case": f"{row['case']} {length}" if length else row["case"]})
    if row["status"] != job.COMPILED:
        return [f"{start} {row['status'].upper()} {row['message']}"]
    target = targets.TARGETS[row["target"]]
    if target.is_gpu and not length:
        said = [_of_kernel(kernel, target) for kernel in row["kernels"]]
        return [f"{start} {line}" for line in said or ["no kernel of its own"]]
    moved = "-" if row["bytes_moved"] is None else f"{row['bytes_moved'] / 1e9:.2f}"
    memory = row["temporary_bytes"]
    shown = "-" if memory is None else f"{memory / 2**20:.1f}"
    counts = ("-" if row[x] is None else row[x] for x in ("custom_kernels", "loops"))
    return [f"{start} {_PROGRAM.format(shown, moved, *counts)}"]


def _of_kernel(kernel: dict[str, Any], target: targets.Target) -> str:
    loop = kernel["main_loop"] and Loop(**kernel["main_loop"])
    counts = ["-" if loop is None else getattr(loop, name) for name in _COUNTS]
    used = (kernel["kernel"], kernel["registers"], kernel["spill_bytes"], kernel["shared_bytes"])
    warned = "".join(f" warning: {x}" for x in kernel["warnings"])
    return _KERNEL.format(*used, *counts, _predicted(loop, target)) + warned


def _predicted(loop: Loop | None, target: targets.Target) -> str:
    """The TFLOP/s of a loop by the model of `machine_code`."""
    if loop is None or target.peak is None:
        return "-"
    per_cycle, teraflops = target.peak
    least, most = (teraflops * x / per_cycle for x in loop.products_per_cycle)
    return f"{least:.0f}-{most:.0f}"
