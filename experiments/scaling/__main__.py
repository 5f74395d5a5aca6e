"""Measures or estimates the cost of attention over one sequence on several devices.

    python -m experiments.scaling measure                    on virtual devices of the CPU
    python -m experiments.scaling measure --platform gpu     on the available GPUs
    python -m experiments.scaling measure --schemes ring --devices 8 --lengths 1048576 \\
        --window 4096 --documents 2048 --key-heads 2 --order contiguous    a million tokens
    python -m experiments.scaling plan --length 10000000 --devices 1024 --memory 80 \\
        --teraflops 400 --link 50                            on paper
    python -m experiments.scaling ahead --target v5e         compiled without the devices

`measure` writes JSON lines and a plot of the time, the temporary memory of each device and the
bytes that each device sends, for each scheme of `jattn.parallel`, number of devices and length.
`plan` estimates which scheme fits a length and how long it takes at given rates. `ahead` compiles
for eight TPUs or GPUs (`pip install -e ".[offline]"`, several GB), and reports the bytes that the
program sends, and how many of them it sends while it computes.
"""

import argparse
import io
import json
import os
import pathlib
import sys
from typing import Any

import jax
from matplotlib.figure import Figure
from tqdm import tqdm

from experiments.offline import targets
from experiments.runs import bounds
from experiments.runs.command_line import Parser
from experiments.runs.console import speak_utf8
from experiments.runs.ending import UserError, exit_status, interruptible
from experiments.runs.files import ResultsFile, replace
from experiments.scaling import job, plan
from experiments.scaling.cases import DTYPES, ORDERS, SCHEMES, ScalingCase


def main(argv: list[str] | None = None) -> int:
    """Runs a command and returns its exit status."""
    speak_utf8()
    arguments = _parser().parse_args(sys.argv[1:] if argv is None else argv)
    return exit_status(lambda: arguments.command(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m experiments.scaling",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    measure = commands.add_parser("measure", help="time, memory and bytes sent, on this machine")
    measure.set_defaults(command=_measure)
    measure.add_argument("--lengths", type=bounds.count, nargs="+", default=[4096, 8192, 16384])
    measure.add_argument("--devices", type=bounds.count, nargs="+", default=[1, 2, 4, 8])
    measure.add_argument("--schemes", nargs="+", choices=SCHEMES, default=list(SCHEMES))
    measure.add_argument("--documents", type=bounds.count, help="average tokens of a document")
    measure.add_argument("--platform", choices=("cpu", "gpu", "tpu"), default="cpu")
    measure.add_argument(
        "--seconds", type=bounds.seconds, default=2.0, help="for each row; 0: compile"
    )
    measure.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/scaling"))

    planned = commands.add_parser("plan", help="memory and time on paper")
    planned.set_defaults(command=_plan)
    planned.add_argument("--length", type=bounds.count, required=True, help="tokens")
    planned.add_argument("--devices", type=bounds.count, required=True)
    planned.add_argument("--memory", type=bounds.positive, required=True, help="GB of a device")
    planned.add_argument(
        "--teraflops", type=bounds.positive, required=True, help="that attention reaches"
    )
    planned.add_argument(
        "--link", type=bounds.positive, required=True, help="GB/s that a device can send"
    )

    ahead = commands.add_parser("ahead", help="compile for eight devices without having them")
    ahead.set_defaults(command=_ahead)
    ahead.add_argument("--target", choices=list(targets.TARGETS), required=True)
    ahead.add_argument("--scheme", choices=SCHEMES, default="ring")
    ahead.add_argument("--length", type=bounds.count, default=65_536, help="tokens")

    for command in (measure, planned, ahead):
        command.add_argument("--heads", type=bounds.count, default=8)
        command.add_argument("--key-heads", type=bounds.count, help="default: as many as heads")
        command.add_argument("--head-size", type=bounds.count, default=64)
        command.add_argument(
            "--window", type=bounds.count, help="keys that a query sees, itself included"
        )
        command.add_argument("--order", choices=ORDERS, default="zigzag")
        command.add_argument("--dtype", choices=DTYPES, default="float32")
        command.add_argument("--forward", action="store_true", help="without gradients")
    return parser


def _case(arguments: argparse.Namespace, **fields: Any) -> ScalingCase:
    """Builds a case from the options that the commands share and the fields of one command.

    Raises:
        UserError: the number of key heads does not divide the number of heads.
    """
    key_heads = arguments.key_heads or arguments.heads
    if arguments.heads % key_heads:
        raise UserError(f"--key-heads {key_heads}: expected a divisor of --heads {arguments.heads}")
    return ScalingCase(
        heads=arguments.heads,
        key_heads=key_heads,
        head_size=arguments.head_size,
        window=arguments.window,
        order=arguments.order,
        dtype=arguments.dtype,
        backward=not arguments.forward,
        **fields,
    )


# --- measured -----------------------------------------------------------------------------------

_ROW = "{:<11} {:>7} {:>10} {:>9} {:>9} {:>9} {:>9}"
_TITLES = ("scheme", "devices", "tokens", "ms", "temp MB", "sent MB", "formula")


def _measure(arguments: argparse.Namespace) -> None:
    """Measures the cases, prints a table, and writes JSON lines and a plot."""
    cases = [
        _case(
            arguments, scheme=scheme, devices=devices, length=length, documents=arguments.documents
        )
        for length in arguments.lengths
        for devices in arguments.devices
        for scheme in arguments.schemes
    ]
    impossible = {case: reason for case in cases if (reason := plan.impossible(case))}
    if impossible.keys() >= set(cases):
        raise UserError(f"no case is possible: {'; '.join(dict.fromkeys(impossible.values()))}")
    results = ResultsFile(arguments.out / "results.jsonl")
    print(_ROW.format(*_TITLES))
    rows = []
    for case in interruptible(tqdm(cases, disable=None, leave=False)):
        if case in impossible:
            tqdm.write(f"{case.scheme:<11} {case.devices:>7} {case.length:>10} {impossible[case]}")
            continue
        row = job.run(case, arguments.seconds, arguments.platform)
        results.add(row)
        rows.append(row)
        tqdm.write(_line(row))
    picture = arguments.out / "scaling.png"
    replace(picture, _picture(rows))
    print(f"plot: {picture}")
    print(f"results: {results.path}")


def _line(row: dict[str, Any]) -> str:
    time = f"{row['milliseconds']:.1f}" if "milliseconds" in row else "-"
    sizes = (row[x] / 1e6 for x in ("temporary_bytes", "sent_bytes", "formula_bytes"))
    return _ROW.format(
        row["scheme"], row["devices"], row["length"], time, *(f"{x:.1f}" for x in sizes)
    )


def _picture(rows: list[dict[str, Any]]) -> bytes:
    """Plots time, temporary memory and bytes sent against the number of devices; a line for each
    scheme and length."""
    figure = Figure(figsize=(13, 4), layout="constrained")
    kinds = (
        ("milliseconds", "milliseconds", 1),
        ("temporary_bytes", "temporary MB of a device", 1e6),
        ("sent_bytes", "MB that a device sends", 1e6),
    )
    devices = sorted({row["devices"] for row in rows})
    lines = dict.fromkeys((row["scheme"], row["length"]) for row in rows)
    panels = figure.subplots(1, 3)
    for axis, (name, label, unit) in zip(panels, kinds, strict=True):
        for scheme, length in lines:
            points = [
                (row["devices"], row[name] / unit)
                for row in rows
                if (row["scheme"], row["length"]) == (scheme, length) and row.get(name)
            ]
            if points:
                axis.loglog(*zip(*points, strict=True), marker="o", label=f"{scheme}, {length:,}")
        axis.set_xticks(devices, [str(x) for x in devices])
        axis.minorticks_off()
        axis.set_xlabel("devices")
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
    panels[-1].legend(fontsize="small")
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=120)
    return content.getvalue()


# --- on paper -----------------------------------------------------------------------------------

_PLAN = "{:<11} {:>10} {:>10} {:>11} {:>11} {:>11}  {}"
_PLAN_TITLES = ("scheme", "GB", "sent GB", "compute s", "send s", "together s", "")


def _plan(arguments: argparse.Namespace) -> None:
    """Prints the estimated cost of each scheme, with the fastest that fits first."""
    length = plan.padded(arguments.length, arguments.devices, arguments.order)
    if length != arguments.length:
        print(f"{length:,} tokens, so that {arguments.devices} devices can share them evenly")
    case = _case(arguments, devices=arguments.devices, length=length)
    device = plan.DeviceRates(
        arguments.memory * 1e9, arguments.teraflops * 1e12, arguments.link * 1e9
    )
    print(_PLAN.format(*_PLAN_TITLES).rstrip())
    for scheme_plan in plan.plans(case, device):
        figures = (scheme_plan.memory / 1e9, scheme_plan.sent / 1e9, *scheme_plan[3:6])
        cells = ("-" if scheme_plan.impossible else f"{x:.3g}" for x in figures)
        print(_PLAN.format(scheme_plan.scheme, *cells, scheme_plan.reason or "fits"))


# --- compiled ahead of time ---------------------------------------------------------------------


def _ahead(arguments: argparse.Namespace) -> None:
    """Prints the memory and exchanges of the program for eight devices, as a line of JSON."""
    jax.config.update("jax_platforms", "cpu")  # nothing runs
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # do not query the cloud's metadata server
    os.environ.setdefault(
        "ALLOW_MULTIPLE_LIBTPU_LOAD", "1"
    )  # no TPU is opened, so nothing conflicts
    case = _case(arguments, devices=8, length=arguments.length, scheme=arguments.scheme)
    reason = plan.impossible(case)
    if reason:
        raise UserError(reason)
    print(json.dumps(job.described(case, targets.devices(targets.TARGETS[arguments.target]))[1]))


if __name__ == "__main__":
    sys.exit(main())
