"""Finds the fastest tile sizes on this machine.

    python -m experiments.benchmark tune
    python -m experiments.benchmark tune --seconds 10 --device cpu

Each number of `jattn.tuning.Sizes` is tried at a few values, with the best values found so far for
the other numbers, on the cases in which it matters. The value with the least time (the geometric
mean over cases, forward and with gradients) is chosen. The result is a row for the table in
`jattn/tuning.py`.
"""

import argparse
import statistics
from typing import NamedTuple

import jax
from tqdm import tqdm

from experiments.benchmark import peers, timing
from experiments.benchmark.cases import BenchmarkCase
from experiments.benchmark.options import use_device
from experiments.runs import bounds
from experiments.runs.command_line import Parser
from experiments.runs.ending import interruptible
from jattn import tuning
from jattn.tuning import Sizes


class TuningQuestion(NamedTuple):
    """One number of `Sizes`, its candidate values, and the cases in which it matters."""

    name: str
    values: tuple[int, ...]
    cases: tuple[BenchmarkCase, ...]


def _window(T: int, window: int) -> BenchmarkCase:
    return BenchmarkCase(f"window-{window}", 1, 8, T, 64, pattern="window", window=window)


def _causal(T: int, B: int = 1) -> BenchmarkCase:
    return BenchmarkCase(f"causal-{T}", B, 8, T, 64, pattern="causal")


QUESTIONS = (
    TuningQuestion(
        "large", (128, 256, 512, 1024), (_causal(2048), BenchmarkCase("full", 1, 8, 1024, 64))
    ),
    TuningQuestion(
        "largest", (512, 1024, 2048), (_causal(8192), BenchmarkCase("full", 1, 8, 2048, 64))
    ),
    TuningQuestion(
        "wide",
        (1024, 2048, 4096),
        (*(_causal(T) for T in (2048, 4096, 8192)), BenchmarkCase("full", 1, 8, 2048, 64)),
    ),
    TuningQuestion("small", (64, 128, 256), tuple(_window(8192, w) for w in (128, 256, 512))),
    # The causal mask is wider than all windows: without it, the largest value would seem free.
    TuningQuestion(
        "narrow",
        (256, 512, 1024, 2048),
        (*(_window(8192, w) for w in (256, 512, 1024)), _causal(2048)),
    ),
    TuningQuestion(
        "max_untiled",
        tuple(T * T for T in (128, 256, 512, 1024)),
        tuple(_causal(T, B=2) for T in (256, 512, 1024)),
    ),
    TuningQuestion(
        "together",
        (800_000, 1_600_000, 3_200_000, 6_400_000, 2**28),
        (_causal(32, B=256), _causal(64, B=64), _causal(128, B=8), _causal(128, B=32)),
    ),
)


def _compiled(row: Sizes, case: BenchmarkCase, backward: bool) -> peers.Runnable:
    with tuning.using(row=row):
        return peers.ours(case, backward, "blockwise")


def answer(question: TuningQuestion, row: Sizes, seconds: float) -> tuple[Sizes, dict[int, float]]:
    """Returns the row with the fastest value, and each value's mean time relative to the
    fastest."""
    candidates = {str(value): row._replace(**{question.name: value}) for value in question.values}
    times: dict[str, list[float]] = {value: [] for value in candidates}
    for case in interruptible(tqdm(question.cases, desc=question.name, disable=None, leave=False)):
        for backward in (False, True):
            programs = {
                value: _compiled(candidate, case, backward)
                for value, candidate in candidates.items()
            }
            medians, _ = timing.in_turn(programs, seconds)
            for value, milliseconds in medians.items():
                times[value].append(milliseconds)
    means = {value: statistics.geometric_mean(values) for value, values in times.items()}
    best = min(means, key=lambda value: means[value])
    return candidates[best], {int(value): mean / means[best] for value, mean in means.items()}


def main(argv: list[str]) -> int:
    """Tunes all numbers and prints the row."""
    parser = Parser(
        prog="python -m experiments.benchmark tune",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--seconds", type=bounds.seconds, default=3.0, help="for each case and pass"
    )
    parser.add_argument("--device", default=None, help="cpu, gpu or tpu; default: JAX's own")
    arguments = parser.parse_args(argv)
    use_device(arguments.device)
    kind = jax.devices()[0].device_kind
    row = tuning.TABLE.get(kind, tuning.DEFAULT)
    for question in QUESTIONS:
        row, relative = answer(question, row, arguments.seconds)
        shown = "  ".join(f"{value}: {mean:.2f}" for value, mean in relative.items())
        print(f"{question.name:<8} {shown}", flush=True)
    print(f'    "{kind}": {row},')
    return 0
