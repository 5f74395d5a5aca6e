"""Measures normalizers beside the softmax.

    python -m experiments.benchmark normalizers
    python -m experiments.benchmark normalizers --lengths 4096 --seconds 10

One sequence, 8 heads of 64, float32, causal: the time of each normalizer divided by that of the
softmax, forward and with gradients.
"""

import argparse
from typing import Any

import jattn
from experiments.benchmark import peers, timing
from experiments.benchmark.cases import BenchmarkCase
from experiments.runs import bounds
from experiments.runs.command_line import Parser
from experiments.runs.ending import interruptible
from jattn import masks, normalizers


NORMALIZERS = {
    "softmax": normalizers.Softmax(),
    "sigmoid": normalizers.Sigmoid(),
    "relu": normalizers.Relu(),
    "relu squared": normalizers.Relu(2),
    "exp": normalizers.Exp(),
    "sparsemax": normalizers.Sparsemax(),
    "entmax 1.5": normalizers.Entmax(1.5),
    "top 64": normalizers.TopK(64),
    "stick-breaking": normalizers.StickBreaking(),
}


def runnable(normalizer: Any, T: int, backward: bool) -> peers.Runnable:
    """Compiles causal attention with a normalizer over T tokens."""
    case = BenchmarkCase("causal", 1, 8, T, 64)

    def attend(q: Any, k: Any, v: Any) -> Any:
        return jattn.attention(q, k, v, mask=masks.Causal(), normalizer=normalizer)

    arguments = list(case.inputs())
    if backward:
        return peers.with_gradients(case, attend, arguments, (0, 1, 2))
    return peers.compiled(attend, *arguments)


def _measure(arguments: argparse.Namespace) -> None:
    work = [(T, backward) for T in arguments.lengths for backward in (False, True)]
    for T, backward in interruptible(work):
        competitors = {name: runnable(x, T, backward) for name, x in NORMALIZERS.items()}
        medians, rounds = timing.in_turn(competitors, arguments.seconds)
        title = f"{T:,} {'with gradients' if backward else 'forward'}"
        print(f"\n{title}: softmax {medians['softmax']:.1f} ms, {rounds} rounds")
        for name, milliseconds in medians.items():
            print(f"{name:<16} {milliseconds / medians['softmax']:.2f}")


def main(argv: list[str]) -> None:
    """Measures each length, and prints the ratios."""
    parser = Parser(
        prog="python -m experiments.benchmark normalizers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--lengths", type=bounds.count, nargs="+", default=[2048, 8192])
    parser.add_argument("--seconds", type=bounds.seconds, default=30.0, help="for each length")
    _measure(parser.parse_args(argv))
