"""Compiles attention for a GPU or TPU without the device, and reports on the compiled programs.

    python -m experiments.benchmark offline --target h100
    python -m experiments.benchmark offline --target h100 --cases causal bias --head 64 128
    python -m experiments.benchmark offline --target v5e --implementation tpu --out v5e.jsonl
    python -m experiments.benchmark offline --target h100 --cases full --lengths 4096 8192

The command needs no device, but the compilers: `pip install -e ".[offline]"`, several GB. For a GPU
the table has a line for each kernel: registers, bytes spilled and bytes of shared memory. For the
kernel's loop over tiles without a mask it has the number of instructions, the number of
instructions that a vote may skip (+), the cycles in which the matrix units, the special function
unit (exp2) and shared memory are busy, and the least and greatest TFLOP/s that a model of these
predicts. For a TPU there is a line for each program: temporary memory, bytes moved, kernels and
loops.

The table shows programs that do not compile, do not fit, spill or have slow code; it does not show
wrong results, races or times. Rows are written to `--out` as JSON lines. `jax_splash` and
`jax_mgpu` are JAX's own kernels, for the few cases that they support. `--against` compiles the
cases of an earlier `--out` again and compares the rows. `--lengths` shows how temporary memory
grows, by default of `blockwise`; for a TPU it includes VMEM.

The exit status is 1 if a case does not compile and the implementation gave no reason, or if a
figure is worse than in `--against`, and 2 if the command is wrong or the compilers are missing.
"""

import argparse
import pathlib
from typing import Any

from tqdm import tqdm

from experiments.offline import calls, job, kept, targets
from experiments.offline.job import Job
from experiments.offline.machine_code import MachineLoop
from experiments.runs import bounds
from experiments.runs.command_line import Parser
from experiments.runs.ending import Failure, UserError, interruptible
from experiments.runs.files import ResultsFile


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
    """Compiles the chosen jobs, prints a table and writes JSON lines.

    Raises:
        UserError: a name is unknown, or the compilers are missing.
        Failure: a program does not compile, or a figure is worse than before.
    """
    options = arguments(argv)
    target = targets.TARGETS[options.target]
    old_rows = kept.read(options.against, target.name) if options.against else {}
    jobs = list(old_rows) or chosen(options, target)
    reason = targets.missing(target)
    if reason:
        raise UserError(reason)
    results = ResultsFile(options.out)
    print(titles(target, bool(options.lengths)))
    failed = unsupported = spilled = worse = 0
    for each_job in interruptible(tqdm(jobs, disable=None, leave=False)):
        row = job.run(each_job, options.seconds)
        results.add(row)
        tqdm.write("\n".join(lines(row)))
        for difference in kept.worse(old_rows[each_job], row) if old_rows else ():
            tqdm.write(f"    worse than it was: {difference}")
            worse += 1
        failed += row["status"] == job.FAILED
        unsupported += row["status"] == job.UNSUPPORTED
        spilled += any(kernel["spill_bytes"] for kernel in row.get("kernels", ()))
    spills = f", {spilled} with spills" if target.is_gpu else ""
    print(f"{len(jobs)} programs: {failed} failed, {unsupported} not supported{spills}")
    print(f"results: {options.out}")
    if failed:
        raise Failure(f"{failed} of {len(jobs)} programs do not compile for {target.name}")
    if worse:
        raise Failure(f"{worse} figures are worse than those of {options.against}")


def arguments(argv: list[str]) -> argparse.Namespace:
    """Parses the command's arguments; argparse ends the process with status 2 on errors."""
    parser = Parser(
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
        "--implementation", nargs="+", metavar="NAME", help=f"{kernels} (default: {usual})"
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
    options = parser.parse_args(argv)
    options.out = options.out or pathlib.Path("runs/offline") / f"{options.target}.jsonl"
    return options


def _targets() -> tuple[targets.Target, ...]:
    return tuple(targets.TARGETS.values())


def chosen(options: argparse.Namespace, target: targets.Target) -> list[Job]:
    """Returns the jobs that the arguments choose.

    Raises:
        UserError: the target lacks an implementation, or a case has a fixed length.
    """
    usual = ("blockwise",) if options.lengths else target.usual
    implementations = options.implementation or usual
    for name in implementations:
        if name not in target.implementations:
            known = ", ".join(target.implementations)
            raise UserError(f"no implementation {name!r} for {target.name}; there are {known}")
    passes = job.PASSES if options.which == "both" else (options.which,)
    names = options.cases or (("full", "causal") if options.lengths else calls.CALLS)
    for name in names:
        if options.lengths and not calls.CALLS[name].has_any_length:
            raise UserError(f"--lengths: the case {name} has arrays of one length")
    return [
        Job(target.name, name, implementation, head, dtype, pass_name, length)
        for implementation in implementations
        for name in names
        for head in options.head
        for dtype in options.dtype
        for pass_name in passes
        for length in options.lengths or [0]
    ]


def titles(target: targets.Target, lengths: bool = False) -> str:
    """Returns the table's first line."""
    if target.is_gpu and not lengths:
        return f"{_CASE_TITLES} {_KERNEL.format(*_KERNEL_TITLES)}"
    return f"{_CASE_TITLES} {_PROGRAM.format(*_PROGRAM_TITLES)}"


def lines(row: dict[str, Any]) -> list[str]:
    """Formats a row: a line for each kernel of a GPU, or one for a TPU's program."""
    length = row.get("length", 0)
    start = _CASE.format(**row | {"case": f"{row['case']} {length}" if length else row["case"]})
    if row["status"] != job.COMPILED:
        return [f"{start} {row['status'].upper()} {row['message']}"]
    target = targets.TARGETS[row["target"]]
    if target.is_gpu and not length:
        kernel_lines = [_of_kernel(kernel, target) for kernel in row["kernels"]]
        return [f"{start} {line}" for line in kernel_lines or ["no kernel of its own"]]
    moved = "-" if row["bytes_moved"] is None else f"{row['bytes_moved'] / 1e9:.2f}"
    memory = row["temporary_bytes"]
    temporary_mib = "-" if memory is None else f"{memory / 2**20:.1f}"
    counts = ("-" if row[x] is None else row[x] for x in ("custom_kernels", "loops"))
    return [f"{start} {_PROGRAM.format(temporary_mib, moved, *counts)}"]


def _of_kernel(kernel: dict[str, Any], target: targets.Target) -> str:
    loop = kernel["main_loop"] and MachineLoop(**kernel["main_loop"])
    counts = ["-" if loop is None else getattr(loop, name) for name in _COUNTS]
    used = (kernel["kernel"], kernel["registers"], kernel["spill_bytes"], kernel["shared_bytes"])
    warned = "".join(f" warning: {x}" for x in kernel["warnings"])
    return _KERNEL.format(*used, *counts, _predicted(loop, target)) + warned


def _predicted(loop: MachineLoop | None, target: targets.Target) -> str:
    """Formats the TFLOP/s of a loop that the model of `machine_code` predicts."""
    if loop is None or target.peak is None:
        return "-"
    per_cycle, teraflops = target.peak
    least, most = (teraflops * x / per_cycle for x in loop.products_per_cycle)
    return f"{least:.0f}-{most:.0f}"
