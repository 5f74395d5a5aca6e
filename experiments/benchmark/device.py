"""Measures attention on a GPU: jattn, cuDNN, `jax.nn`, FlexAttention and JAX's own kernel.

    python -m experiments.benchmark device
    python -m experiments.benchmark device --implementations hopper --lengths 16384 --heads 128
    python -m experiments.benchmark device --patterns causal window --peers "cudnn flags"

A batch has 16,384 tokens in sequences of each length, and 2,048 features in heads of each size, as
in the papers on FlashAttention; the masks are full, causal, a causal window and eight documents.
The two passes are timed separately: `backward` uses the residuals of an earlier forward pass.
Competitors run alternately; a turn launches many calls without waiting, so that launch overhead is
hidden, and waits for the last one. TFLOP/s count the products of allowed pairs, 2 forward and 5
backward. A ratio is the competitor's time divided by jattn's, with the first of `--implementations`
that runs. Predictions are those of `experiments/offline` for an H100.

Competitors that cannot run are left out, with the reason. cuDNN's gradients are nondeterministic
here, which is faster; jattn's "cudnn" runs only with `XLA_FLAGS=--xla_gpu_deterministic_ops=true`,
which slows both. The last lines say which of the project's performance floors are reached. On a
CPU, use small sizes: `--tokens 128 --lengths 64 --heads 16`.
"""

import argparse
import functools
import importlib.metadata
import math
import os
import pathlib
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from tqdm import tqdm

import jattn
from experiments.benchmark import timing
from experiments.benchmark.cases import BenchmarkCase
from experiments.benchmark.device_peers import CUDNN, DENSE, FLEX, PEERS, Calls, Peer, Task, ours
from experiments.benchmark.peers import Runnable
from experiments.benchmark.predictions import predicted
from experiments.runs import bounds
from experiments.runs.command_line import Parser
from experiments.runs.ending import UserError, interruptible, one_line
from experiments.runs.files import ResultsFile


PATTERNS = ("full", "causal", "window", "documents")
IMPLEMENTATIONS = {
    "cpu": ("native", "blockwise"),
    "gpu": ("hopper", "blackwell", "ampere", "blockwise"),
    "tpu": ("tpu", "blockwise"),
}
_TURN = 0.02  # least seconds of a turn on a device
_MOST_CALLS = 1000
_LONGEST = 200  # most characters of a printed reason


class Floor(NamedTuple):
    """A performance floor for one pass and some patterns: a ratio to a peer or, if `peer` is None,
    TFLOP/s. `kind`, `T` and `H`, if set, restrict it to a device, a length and a head size."""

    backward: bool
    patterns: tuple[str, ...]
    peer: str | None
    least: float
    kind: str = ""
    T: int | None = None
    H: int | None = None

    def figure(self, row: dict[str, Any]) -> float | None:
        """Returns a row's figure; None if the floor excludes the row or its competitor did not
        run."""
        applies = (row["pass"] == "backward") is self.backward and row["pattern"] in self.patterns
        applies = applies and self.kind in row["device"]
        if not applies or self.T not in (None, row["T"]) or self.H not in (None, row["H"]):
            return None
        if self.peer:
            return row["ratio"].get(self.peer)
        return row["teraflops"].get(row["ours"])

    def __str__(self) -> str:
        conditions = "".join(
            text
            for text, value in (
                (f" at T = {self.T}", self.T),
                (f" for heads of {self.H}", self.H),
                (f" on an {self.kind}", self.kind),
            )
            if value
        )
        least = f"{self.least:g} × {self.peer}" if self.peer else f"{self.least:g} TFLOP/s"
        pass_name = "backward" if self.backward else "forward"
        return f"{pass_name}, {' and '.join(self.patterns)}: at least {least}{conditions}"


_DENSE, _SPARSE = PATTERNS[:2], PATTERNS[2:]
FLOORS = (
    Floor(False, _DENSE, CUDNN, 0.9),
    Floor(False, _DENSE, None, 600, "H200", 16384, 128),
    Floor(True, _DENSE, CUDNN, 0.85),
    *(Floor(backward, _SPARSE, DENSE, 3) for backward in (False, True)),
    *(Floor(backward, _SPARSE, FLEX, 1.2) for backward in (False, True)),
)


def floor_lines(rows: list[dict[str, Any]]) -> list[str]:
    """Says for each floor whether it is reached, with the least figure and its case."""
    lines = []
    for floor in FLOORS:
        figures = [(floor.figure(row), row["case"]) for row in rows]
        measured = [(figure, case) for figure, case in figures if figure is not None]
        if not measured:
            lines.append(f"not measured  {floor}")
            continue
        figure, case = min(measured)
        verdict = "reached      " if figure >= floor.least else "not reached  "
        lines.append(f"{verdict} {floor}: {figure:.2f} in {case}, the least of {len(measured)}")
    return lines


# ---------------------------------------------------------------------------------------------
# Measuring
# ---------------------------------------------------------------------------------------------


def cases_of(arguments: argparse.Namespace) -> list[BenchmarkCase]:
    """Builds the cases: `tokens` tokens in a batch, `width` features in all heads of a token."""
    return [
        BenchmarkCase(
            f"{pattern}-{T}-{H}",
            max(1, arguments.tokens // T),
            max(1, arguments.width // H),
            T,
            H,
            pattern=pattern,
            window=arguments.window,
        )
        for H in arguments.heads
        for T in arguments.lengths
        for pattern in arguments.patterns
    ]


def _repeated(competitor: Calls) -> tuple[Runnable, int]:
    """Returns a turn of a competitor and its number of calls; on a CPU one, as nothing is
    launched."""
    competitor.wait(competitor.start())  # compiles
    start = time.perf_counter()
    competitor.wait(competitor.start())
    seconds = time.perf_counter() - start
    on_cpu = jax.default_backend() == "cpu"
    calls = 1 if on_cpu else max(1, min(_MOST_CALLS, math.ceil(_TURN / seconds)))

    def run() -> None:
        last = None
        for _ in range(calls):
            last = competitor.start()
        competitor.wait(last)

    return Runnable(run), calls


def _milliseconds(
    task: Task, competitors: dict[str, Peer], seconds: float
) -> tuple[dict[str, float], dict[str, str]]:
    """Returns the median milliseconds of each competitor, and the reasons of those left out."""
    turns: dict[str, tuple[Runnable, int]] = {}
    reasons: dict[str, str] = {}
    for name, make in competitors.items():
        try:
            turns[name] = _repeated(make(task))
        except Exception as error:  # compilers and libraries raise errors of many kinds
            kind = "" if isinstance(error, NotImplementedError) else f"{type(error).__name__}: "
            reasons[name] = f"{kind}{one_line(error)}"[:_LONGEST]
    medians, _ = timing.in_turn({name: run for name, (run, _) in turns.items()}, seconds)
    return {name: value / turns[name][1] for name, value in medians.items()}, reasons


def measure(
    task: Task, implementations: Iterable[str], peers: Iterable[str], seconds: float
) -> dict[str, Any]:
    """Measures a task and returns one row of the results."""
    case = task.case
    competitors: dict[str, Peer] = {x: functools.partial(ours, x) for x in implementations}
    competitors |= {name: PEERS[name] for name in peers}
    milliseconds, left_out = _milliseconds(task, competitors, seconds)
    first = next((name for name in implementations if name in milliseconds), None)
    work = case.flops(backward=False) * (5 / 2 if task.backward else 1)
    kind = jax.devices()[0].device_kind
    predictions = {x: predicted(x, kind, case, task.backward) for x in implementations}
    return {
        "case": case.name,
        "pass": "backward" if task.backward else "forward",
        **{name: getattr(case, name) for name in ("pattern", "B", "N", "T", "H")},
        "window": case.window if case.pattern == "window" else None,
        "dtype": task.dtype,
        "ours": first,
        "milliseconds": milliseconds,
        "teraflops": {name: work / value / 1e9 for name, value in milliseconds.items()},
        "ratio": {x: value / milliseconds[first] for x, value in milliseconds.items()}
        if first
        else {},
        "predicted_teraflops": {name: x for name, x in predictions.items() if x},
        "left_out": left_out,
        "device": kind,
        "versions": versions(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


@functools.cache
def versions() -> dict[str, str]:
    """Returns the versions of the competitors' and compilers' packages that are installed."""
    packages = {}
    for name in ("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "torch", "triton"):
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    backend: Any = jax.devices()[0].client
    return {
        "jattn": jattn.__version__,
        **packages,
        "platform": " ".join(backend.platform_version.split()),
    }


_TITLES = (
    f"{'case':<22} {'pass':<9} {'competitor':<12} {'ms':>9} {'TFLOP/s':>8} "
    f"{'ratio':>6} {'predicted':>11}"
)


def lines(row: dict[str, Any]) -> list[str]:
    """Formats a row: a line for each competitor that ran."""
    formatted = []
    for name, value in row["milliseconds"].items():
        range_ = row["predicted_teraflops"].get(name)
        prediction = f"{range_[0]:.0f}-{range_[1]:.0f}" if range_ else "-"
        ratio = f"{row['ratio'][name]:.2f}" if row["ratio"] else "-"
        formatted.append(
            f"{row['case']:<22} {row['pass']:<9} {name:<12} {value:>9.3f} "
            f"{row['teraflops'][name]:>8.1f} {ratio:>6} {prediction:>11}"
        )
    return formatted


# ---------------------------------------------------------------------------------------------
# The command
# ---------------------------------------------------------------------------------------------


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = Parser(
        prog="python -m experiments.benchmark device",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    usual = "; ".join(f"{platform}: {' '.join(x)}" for platform, x in IMPLEMENTATIONS.items())
    parser.add_argument("--implementations", nargs="+", metavar="NAME", help=f"default: {usual}")
    parser.add_argument("--peers", nargs="*", choices=list(PEERS), metavar="PEER", default=[*PEERS])
    parser.add_argument("--patterns", nargs="+", choices=PATTERNS, default=PATTERNS)
    parser.add_argument("--lengths", type=bounds.count, nargs="+", default=[2048, 8192, 16384])
    parser.add_argument(
        "--heads", type=bounds.count, nargs="+", default=[64, 128, 256], metavar="H"
    )
    parser.add_argument(
        "--tokens", type=bounds.count, default=16384, help="in all sequences of a batch"
    )
    parser.add_argument(
        "--width", type=bounds.count, default=2048, help="numbers in all heads of a token"
    )
    parser.add_argument("--window", type=bounds.count, default=256, help="keys before a query")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--pass", dest="which", choices=["forward", "backward", "both"])
    parser.add_argument("--seconds", type=bounds.seconds, default=2.0, help="for each row")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/device"))
    return parser.parse_args(argv)


def _implementations(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Returns the implementations that the user named, or the platform's default ones.

    Raises:
        UserError: a name is unknown.
    """
    names = arguments.implementations or IMPLEMENTATIONS.get(jax.default_backend(), ("blockwise",))
    tiny = jnp.ones((1, 2, 1, 8))
    known = [*jattn.explain(tiny, tiny, tiny)]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UserError(f"unknown implementations {unknown}; there are {', '.join(known)}")
    return tuple(dict.fromkeys(names))


def main(argv: list[str]) -> None:
    """Runs the measurements, prints a table, writes JSON lines and prints the floors reached.

    Raises:
        UserError: a named implementation is unknown.
    """
    arguments = _arguments(argv)
    implementations = _implementations(arguments)
    results, rows, reported = ResultsFile(arguments.out / "results.jsonl"), [], set()
    print(f"{jax.devices()[0].device_kind}, {arguments.dtype}, {versions()}")
    print(_TITLES, flush=True)
    passes = {"forward": [False], "backward": [True]}.get(arguments.which, [False, True])
    for case in interruptible(tqdm(cases_of(arguments), disable=None, leave=False)):
        inputs = *case.inputs(), case.inputs(seed=1)[0]
        for backward in passes:
            task = Task(case, backward, arguments.dtype, inputs)
            row = measure(task, implementations, arguments.peers, arguments.seconds)
            results.add(row)
            rows.append(row)
            for name, reason in row["left_out"].items():
                if (name, reason) not in reported:
                    tqdm.write(f"{case.name:<22} {row['pass']:<9} {name} is left out: {reason}")
            reported |= set(row["left_out"].items())
            tqdm.write("\n".join(lines(row)))
    print("\n".join(["", *floor_lines(rows), f"results: {results.path}"]))
