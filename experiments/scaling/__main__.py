"""Attention of one sequence over several devices: what it costs here, and what it would elsewhere.

    python -m experiments.scaling measure                    on virtual devices of the CPU
    python -m experiments.scaling measure --platform gpu     on those that are there
    python -m experiments.scaling measure --schemes ring --devices 8 --lengths 1048576 \\
        --window 4096 --documents 2048 --key-heads 2 --order contiguous    a million tokens
    python -m experiments.scaling plan --length 10000000 --devices 1024 --memory 80 \\
        --teraflops 400 --link 50                            on paper
    python -m experiments.scaling ahead --target v5e         compiled for devices that are not here

`measure` gives time, temporary memory of each device and bytes that each sends, for each scheme of
`jattn.parallel`, against devices and length, as JSON lines and a plot. `plan` says which scheme
fits a length and how long it takes at given rates. `ahead` compiles for eight TPUs or GPUs
(`pip install -e ".[offline]"`, several GB), and says what the program sends, and how much of that
while it computes.
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
from experiments.runs.ending import UserError, exit_status, interruptible
from experiments.runs.files import append, replace
from experiments.scaling import job, plan
from experiments.scaling.cases import DTYPES, ORDERS, SCHEMES, Case


def main(argv: list[str] | None = None) -> int:
    """Runs a command and returns its exit status."""
    given = _parser().parse_args(sys.argv[1:] if argv is None else argv)
    return exit_status(lambda: given.command(given))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.scaling",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    measure = commands.add_parser("measure", help="time, memory and bytes sent, here")
    measure.set_defaults(command=_measure)
    measure.add_argument("--lengths", type=bounds.count, nargs="+", default=[4096, 8192, 16384])
    measure.add_argument("--devices", type=bounds.count, nargs="+", default=[1, 2, 4, 8])
    measure.add_argument("--schemes", nargs="+", choices=SCHEMES, default=list(SCHEMES))
    measure.add_argument("--documents", type=bounds.count, help="so many tokens each, on average")
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

    ahead = commands.add_parser("ahead", help="compiled for eight devices that are not here")
    ahead.set_defaults(command=_ahead)
    ahead.add_argument("--target", choices=list(targets.TARGETS), required=True)
    ahead.add_argument("--scheme", choices=SCHEMES, default="ring")
    ahead.add_argument("--length", type=bounds.count, default=65_536, help="tokens")

    for each in (measure, planned, ahead):
        each.add_argument("--heads", type=bounds.count, default=8)
        each.add_argument("--key-heads", type=bounds.count, help="default: as many as heads")
        each.add_argument("--head-size", type=bounds.count, default=64)
        each.add_argument(
            "--window", type=bounds.count, help="keys that a query sees, itself included"
        )
        each.add_argument("--order", choices=ORDERS, default="zigzag")
        each.add_argument("--dtype", choices=DTYPES, default="float32")
        each.add_argument("--forward", action="store_true", help="without gradients")
    return parser


def _case(given: argparse.Namespace, **more: Any) -> Case:
    """The case of the options that the commands share.

    Raises:
        UserError: sizes do not fit together.
    """
    key_heads = given.key_heads or given.heads
    if given.heads % key_heads:
        raise UserError(f"--key-heads {key_heads}: expected a divisor of --heads {given.heads}")
    return Case(
        heads=given.heads,
        key_heads=key_heads,
        head_size=given.head_size,
        window=given.window,
        order=given.order,
        dtype=given.dtype,
        backward=not given.forward,
        **more,
    )


# --- measured -----------------------------------------------------------------------------------

_ROW = "{:<11} {:>7} {:>10} {:>9} {:>9} {:>9} {:>9}"
_TITLES = ("scheme", "devices", "tokens", "ms", "temp MB", "sent MB", "formula")


def _measure(given: argparse.Namespace) -> None:
    """Measures, prints a table, writes JSON lines and a plot."""
    cases = [
        _case(given, scheme=scheme, devices=devices, length=length, documents=given.documents)
        for length in given.lengths
        for devices in given.devices
        for scheme in given.schemes
    ]
    impossible = {case: reason for case in cases if (reason := plan.impossible(case))}
    results = given.out / "results.jsonl"
    replace(results, "")
    print(_ROW.format(*_TITLES))
    rows = []
    for case in interruptible(tqdm(cases, disable=None, leave=False)):
        if case in impossible:
            tqdm.write(f"{case.scheme:<11} {case.devices:>7} {case.length:>10} {impossible[case]}")
            continue
        row = job.run(case, given.seconds, given.platform)
        append(results, json.dumps(row, allow_nan=False))
        rows.append(row)
        tqdm.write(_line(row))
    if rows:
        picture = given.out / "scaling.png"
        replace(picture, _picture(rows))
        print(f"plot: {picture}")
    print(f"results: {results}")


def _line(row: dict[str, Any]) -> str:
    time = f"{row['milliseconds']:.1f}" if "milliseconds" in row else "-"
    sizes = (row[x] / 1e6 for x in ("temporary_bytes", "sent_bytes", "formula_bytes"))
    return _ROW.format(
        row["scheme"], row["devices"], row["length"], time, *(f"{x:.1f}" for x in sizes)
    )


def _picture(rows: list[dict[str, Any]]) -> bytes:
    """Time, temporary memory and bytes sent over devices; a line for each scheme and length."""
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


def _plan(given: argparse.Namespace) -> None:
    """Prints what each scheme takes, the quickest that fits first."""
    length = plan.padded(given.length, given.devices, given.order)
    if length != given.length:
        print(f"{length:,} tokens, so that {given.devices} devices can share them evenly")
    case = _case(given, devices=given.devices, length=length)
    device = plan.Device(given.memory * 1e9, given.teraflops * 1e12, given.link * 1e9)
    print(_PLAN.format(*_PLAN_TITLES).rstrip())
    for each in plan.plans(case, device):
        figures = (each.memory / 1e9, each.sent / 1e9, *each[3:6])
        cells = ("-" if each.impossible else f"{x:.3g}" for x in figures)
        print(_PLAN.format(each.scheme, *cells, each.reason or "fits"))


# --- compiled ahead of time ---------------------------------------------------------------------


def _ahead(given: argparse.Namespace) -> None:
    """Prints what the program for eight devices takes and sends, as a line of JSON."""
    jax.config.update("jax_platforms", "cpu")  # nothing runs
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # ask no cloud which machine this is
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # there is no device to share
    case = _case(given, devices=8, length=given.length, scheme=given.scheme)
    reason = plan.impossible(case)
    if reason:
        raise UserError(reason)
    print(json.dumps(job.described(case, targets.devices(targets.TARGETS[given.target]))[1]))


if __name__ == "__main__":
    sys.exit(main())
