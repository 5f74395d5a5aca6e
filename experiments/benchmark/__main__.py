"""Measures the speed and memory of attention on this machine, for jattn and its peers.

    python -m experiments.benchmark                      every case, forward and with gradients
    python -m experiments.benchmark --cases page long-window --peers jax.nn
    python -m experiments.benchmark --peers              beside OpenVINO, ONNX Runtime and PyTorch
    python -m experiments.benchmark --growing            time and memory over T, with plots
    python -m experiments.benchmark --gym                masks and scores of FlexAttention's users
    python -m experiments.benchmark normalizers          normalizers beside the softmax
    python -m experiments.benchmark linear               linear attention beside a scan
    python -m experiments.benchmark caches               quantised caches beside float32
    python -m experiments.benchmark training             steps of the translation experiment
    python -m experiments.benchmark tune                 the row of `jattn.tuning` for this machine
    python -m experiments.benchmark device               a GPU, with cuDNN, FlexAttention and floors
    python -m experiments.benchmark offline --target h100    kernels compiled without the device

Competitors run alternately in one process, so that changes of the machine's speed affect all of
them. Figures are medians, and a ratio is a peer's median divided by ours (above 1: jattn is
faster). Results are written to `<out>/results.jsonl`, and plots to `<out>/*.png`.
"""

import argparse
import importlib
import importlib.util
import io
import pathlib
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
from matplotlib.figure import Figure
from tqdm import tqdm

from experiments.benchmark import (
    caching,
    cases,
    device,
    engines,
    gym,
    normalizing,
    options,
    peers,
    recurrent,
    timing,
    training,
    tune,
)
from experiments.benchmark.rules import RULES
from experiments.offline import command as offline
from experiments.runs import bounds
from experiments.runs.command_line import Parser, nearest
from experiments.runs.console import speak_utf8
from experiments.runs.ending import UserError, exit_status, interruptible
from experiments.runs.files import ResultsFile, replace


_LENGTHS = 512, 1024, 2048, 4096, 8192


def available(names: list[str] | None) -> dict[str, peers.Peer]:
    """Returns the competitors by name; torch's only if torch is installed."""
    known: dict[str, peers.Peer] = {
        "jattn": peers.ours,
        "blockwise": peers.blockwise,
        "jax.nn": peers.jax_nn,
        "flax.nnx": peers.flax_nnx,
    }
    if importlib.util.find_spec("torch"):
        torch_peers = importlib.import_module("experiments.benchmark.torch_peers")
        known |= {"torch sdpa": torch_peers.sdpa, "torch flex": torch_peers.flex}
    if names is None:
        return {name: peer for name, peer in known.items() if name != "blockwise"}
    unknown = set(names) - set(known)
    if unknown:
        raise ValueError(f"unknown peers {sorted(unknown)}; there are {', '.join(known)}")
    return {name: known[name] for name in known if name in {"jattn", *names}}


def measure(
    case: cases.BenchmarkCase,
    backward: bool,
    competitors: dict[str, peers.Peer],
    seconds: float,
    peak: float,
) -> dict[str, Any]:
    """Measures one row: median milliseconds of each competitor, run alternately for `seconds`.

    `gflops` counts the products of the allowed pairs; `peak` is the rate of one large product.
    """
    runnable = {name: make(case, backward) for name, make in competitors.items()}
    present = {name: run for name, run in runnable.items() if run is not None}
    medians, rounds = timing.in_turn(present, seconds)
    return {
        "case": case.name,
        "pass": "forward+backward" if backward else "forward",
        "milliseconds": medians,
        "ratio": {name: value / medians["jattn"] for name, value in medians.items()},
        "gflops": case.flops(backward) / medians["jattn"] / 1e6,
        "peak_gflops": peak,
        "temporary_bytes": {name: run.temporary_bytes for name, run in present.items()},
        "compile_seconds": {name: run.compile_seconds for name, run in present.items()},
        "rounds": rounds,
    }


def matrix_peak(size: int = 2048) -> float:
    """Returns the GFLOP/s of a product of two large float32 matrices: the best of ten runs."""
    matrix = jnp.ones((size, size))
    product = jax.jit(jnp.dot)
    jax.block_until_ready(product(matrix, matrix))
    times = []
    for _ in range(10):
        start = time.perf_counter()
        jax.block_until_ready(product(matrix, matrix))
        times.append(time.perf_counter() - start)
    return 2 * size**3 / min(times) / 1e9


def copy_bandwidth(size: int = 2**24) -> float:
    """Returns the GB/s of a pass over one large array: the best of ten runs."""
    scale = jax.jit(lambda x: x * 1.0000001, donate_argnums=0)
    array = jax.block_until_ready(scale(jnp.ones(size)))
    times = []
    for _ in range(10):
        start = time.perf_counter()
        array = jax.block_until_ready(scale(array))
        times.append(time.perf_counter() - start)
    return 4 * size / min(times) / 1e9


def _line(row: dict[str, Any], names: list[str]) -> str:
    ratios = [row["ratio"].get(name) for name in names if name != "jattn"]
    cells = " ".join(f"{'-' if x is None else f'{x:.2f}':>11}" for x in ratios)
    memory = (row["temporary_bytes"]["jattn"] or 0) / 2**20
    return (
        f"{row['case']:<16} {row['pass']:<17} {row['milliseconds']['jattn']:>9.2f} "
        f"{row['gflops']:>8.0f} {row['gflops'] / row['peak_gflops']:>7.0%} {memory:>8.1f} {cells}"
    )


def _plot(rows: list[dict[str, Any]], out: pathlib.Path) -> list[pathlib.Path]:
    """Plots time and temporary memory over T, in one picture for each measured pass."""
    written, lengths = [], sorted({row["T"] for row in rows})
    names = sorted({name for row in rows for name in row["milliseconds"]})
    for pass_name in dict.fromkeys(row["pass"] for row in rows):
        chosen = [row for row in rows if row["pass"] == pass_name]
        figure = Figure(figsize=(10, 4), layout="constrained")
        axes = figure.subplots(1, 2)
        for axis, key, unit, scale in (
            (axes[0], "milliseconds", "milliseconds", 1),
            (axes[1], "temporary_bytes", "temporary memory, MiB", 2**20),
        ):
            for number, name in enumerate(names):
                points = [(row["T"], row[key].get(name)) for row in chosen]
                scaled = [(x, y / scale) for x, y in points if y]
                if scaled:
                    axis.loglog(
                        *zip(*scaled, strict=True), marker="o", color=f"C{number}", label=name
                    )
            axis.set_xticks(lengths, [f"{x:,}" for x in lengths])
            axis.minorticks_off()
            axis.set_xlabel("T")
            axis.set_ylabel(unit)
            axis.grid(alpha=0.3)
        axes[0].legend()
        figure.suptitle(f"causal, 8 heads of 64, {pass_name}")
        written.append(out / f"{pass_name.replace('+', '-')}.png")
        content = io.BytesIO()
        figure.savefig(content, format="png", dpi=120)
        replace(written[-1], content.getvalue())
    return written


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="python -m experiments.benchmark",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    known = list(cases.NAMED)
    parser.add_argument("--cases", nargs="+", choices=known, metavar="CASE", help=", ".join(known))
    parser.add_argument(
        "--peers",
        nargs="*",
        help="competitors of jattn; blockwise is jattn's own XLA path; default: all others; "
        "without a name: OpenVINO, ONNX Runtime and PyTorch, in a table of their own",
    )
    parser.add_argument("--dtype", choices=engines.DTYPES, help="of --peers without a name")
    parser.add_argument("--pass", dest="which", choices=["forward", "backward", "both"])
    parser.add_argument("--growing", action="store_true", help="causal attention over T")
    rules = [rule.name for rule in RULES]
    parser.add_argument("--gym", action="store_true", help="rules of FlexAttention's users")
    parser.add_argument("--only", nargs="+", choices=rules, metavar="RULE", help=", ".join(rules))
    parser.add_argument(
        "--lengths", type=bounds.count, nargs="+", metavar="T", help="of --growing and --gym"
    )
    parser.add_argument("--seconds", type=bounds.seconds, default=5.0, help="for each row")
    parser.add_argument("--device", default=None, help="cpu, gpu or tpu; default: JAX's own")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/benchmark"))
    return parser.parse_args(argv)


_COMMANDS = {
    "normalizers": normalizing.main,
    "caches": caching.main,
    "linear": recurrent.main,
    "training": training.main,
    "tune": tune.main,
    "device": device.main,
    "offline": offline.main,
}


def main(argv: list[str] | None = None) -> int:
    """Runs a command and returns its exit status."""
    speak_utf8()
    words = sys.argv[1:] if argv is None else argv
    if not words or words[0].startswith("-"):
        return exit_status(lambda: _measure_all(_arguments(words)))
    if words[0] in _COMMANDS:
        return exit_status(lambda: _COMMANDS[words[0]](words[1:]))
    print(f"error: unknown command {words[0]!r}{nearest(words[0], _COMMANDS)}", file=sys.stderr)
    return 2


def _measure_all(arguments: argparse.Namespace) -> None:
    """Runs the measurements, prints a table, and writes JSON lines and plots."""
    options.check_together(arguments)
    options.use_device(arguments.device)
    arguments.lengths = arguments.lengths or _LENGTHS
    if arguments.gym:
        return gym.measure_all(arguments)
    if arguments.peers == [] and not arguments.growing:
        return engines.measure_all(arguments)
    try:
        competitors = available(arguments.peers)
    except ValueError as error:
        raise UserError(str(error)) from error
    chosen = cases.named(arguments.cases, cases.CASES)
    if arguments.growing:
        chosen = cases.growing(tuple(arguments.lengths))
    work = cases.with_passes(chosen, arguments.which)
    results = ResultsFile(arguments.out / "results.jsonl")
    names = list(competitors)
    peer_titles = " ".join(f"{name:>11}" for name in names if name != "jattn")
    peak = matrix_peak()
    print(
        f"peak: {peak:,.0f} GFLOP/s, measured as one product of float32 matrices of 2,048 x 2,048"
    )
    titles = f"{'jattn ms':>9} {'GFLOP/s':>8} {'of peak':>7} {'temp MiB':>8}"
    print(f"{'case':<16} {'pass':<17} {titles} {peer_titles}")
    rows = []
    bandwidth = copy_bandwidth()
    for case, backward in interruptible(tqdm(work, disable=None, leave=False)):
        row: dict[str, Any] = measure(case, backward, competitors, arguments.seconds, peak) | {
            "T": case.T
        }
        if case.S:
            row["gigabytes_per_second"] = case.bytes_held() / row["milliseconds"]["jattn"] / 1e6
            row["copy_gigabytes_per_second"] = bandwidth
        results.add(row)
        rows.append(row)
        tqdm.write(_line(row, names))
        if case.S:
            rate = row["gigabytes_per_second"]
            share = rate / bandwidth
            tqdm.write(f"  reads {rate:.1f} GB/s, {share:.0%} of the {bandwidth:.1f} of a copy")
    if arguments.growing:
        for path in _plot(rows, arguments.out):
            print(f"plot: {path}")
    print(f"results: {results.path}")


if __name__ == "__main__":
    raise SystemExit(main())
