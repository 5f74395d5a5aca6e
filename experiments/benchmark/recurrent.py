"""Measures linear attention beside a scan over tokens.

    python -m experiments.benchmark linear
    python -m experiments.benchmark linear --lengths 8192 --seconds 20

One sequence, 8 heads of 64, float32, for each kind of decays, forward and with gradients: the time
of a scan over tokens, and of `linear_attention` with the fastest `chunk`, divided by that of
`linear_attention` as it is called without `chunk`.
"""

import argparse
from typing import Any

import jax
import jax.numpy as jnp

import jattn
from experiments.benchmark import peers, timing
from experiments.benchmark.cases import BenchmarkCase
from experiments.runs import bounds
from experiments.runs.command_line import Parser
from experiments.runs.ending import interruptible


HEADS, SIZE = 8, 64
DECAYS = {"none": None, "by token": (HEADS,), "by feature": (HEADS, SIZE)}
CHUNKS = (16, 32, 64, 128, 256)


def scanned(query: Any, key: Any, value: Any, log_decay: Any = None) -> Any:
    """Computes linear attention by one step for each token."""
    query, key = jax.nn.elu(query) + 1, jax.nn.elu(key) + 1
    logs = jnp.zeros(key.shape[:3]) if log_decay is None else log_decay
    decays = jnp.exp(logs.reshape(*logs.shape[:3], -1))

    def step(sums: Any, token: Any) -> Any:
        q, k, v, decay = token
        values = k[..., None] * v[..., None, :]
        if log_decay is not None:
            sums = sums[0] * decay[..., None], sums[1] * decay
        sums = sums[0] + values, sums[1] + k
        total = jnp.einsum("bnf,bnf->bn", q, sums[1])
        return sums, jnp.einsum("bnf,bnfv->bnv", q, sums[0]) / total[..., None]

    tokens = tuple(jnp.moveaxis(x, 1, 0) for x in (query, key, value, decays))
    start = jnp.zeros((1, HEADS, SIZE, SIZE)), jnp.zeros((1, HEADS, SIZE))
    _, outputs = jax.lax.scan(step, start, tokens)
    return jnp.moveaxis(outputs, 0, 1)


def competitors(T: int, decay: tuple[int, ...] | None, backward: bool) -> dict[str, peers.Runnable]:
    """Compiles linear attention over T tokens, with each size of chunks, and the scan."""
    case = BenchmarkCase("causal", 1, HEADS, T, SIZE)
    inputs: list[Any] = list(case.inputs())
    if decay:
        inputs.append(-0.1 * jax.random.exponential(jax.random.key(0), (1, T, *decay)))

    def linear(chunk: int | None) -> Any:
        def attend(q: Any, k: Any, v: Any, *logs: Any) -> Any:
            return jattn.linear_attention(q, k, v, chunk=chunk, log_decay=logs[0] if logs else None)

        return attend

    functions = {"scan": scanned, "jattn": linear(None), **{str(x): linear(x) for x in CHUNKS}}
    if not backward:
        return {name: peers.compiled(x, *inputs) for name, x in functions.items()}
    places = tuple(range(len(inputs)))
    return {n: peers.with_gradients(case, x, inputs, places) for n, x in functions.items()}


def _measure(arguments: argparse.Namespace) -> None:
    work = [(T, backward) for T in arguments.lengths for backward in (False, True)]
    for T, backward in interruptible(work):
        print(f"\n{T:,} tokens, {'with gradients' if backward else 'forward'}")
        print(f"{'decays':<12} {'ms':>6} {'scan':>6} {'best chunk':>16}")
        for name, decay in DECAYS.items():
            medians, _ = timing.in_turn(competitors(T, decay, backward), arguments.seconds)
            best = min(map(str, CHUNKS), key=medians.__getitem__)
            ratios = {x: medians[x] / medians["jattn"] for x in ("scan", best)}
            chunk = f"{ratios[best]:.2f} ({best})"
            print(f"{name:<12} {medians['jattn']:>6.1f} {ratios['scan']:>6.1f} {chunk:>16}")


def main(argv: list[str]) -> None:
    """Measures each length and kind of decays, and prints the ratios."""
    parser = Parser(
        prog="python -m experiments.benchmark linear",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--lengths", type=bounds.count, nargs="+", default=[2048, 8192])
    parser.add_argument("--seconds", type=bounds.seconds, default=10.0, help="for each row")
    _measure(parser.parse_args(argv))
