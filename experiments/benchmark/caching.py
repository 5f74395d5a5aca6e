"""Measures decoding with quantised caches beside a float32 cache.

    python -m experiments.benchmark caches
    python -m experiments.benchmark caches --heads 32 --tokens 8192

One query of each of 8 sequences attends to a cache with 8 key heads of 64: for each dtype the bytes
of a token, the time of the float32 cache divided by its time, and the root mean square of
the difference from the output of the float32 cache, divided by the output's standard deviation.
Keys and queries are normal with standard deviation 2, so that weights are far from equal.
"""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jattn
from experiments.benchmark import peers, timing
from experiments.runs import bounds
from experiments.runs.command_line import Parser
from jattn.cache import DenseCache


DTYPES = ("float32", "bfloat16", "int8", "float8_e4m3fn", "int4")
BATCH, KEY_HEADS, HEAD_SIZE = 8, 8, 64


def filled(dtype: str, tokens: int) -> DenseCache:
    """Returns a full cache; the same keys and values for each dtype, but for rounding."""
    keys, values = jax.random.normal(jax.random.key(0), (2, BATCH, tokens, KEY_HEADS, HEAD_SIZE))
    return DenseCache.of(2 * keys, values, dtype=jnp.dtype(dtype))


def _measure(arguments: argparse.Namespace) -> None:
    query = 2 * jax.random.normal(jax.random.key(1), (BATCH, 1, arguments.heads, HEAD_SIZE))
    caches = {dtype: filled(dtype, arguments.tokens) for dtype in DTYPES}
    competitors = {name: peers.compiled(jattn.attention, query, x) for name, x in caches.items()}
    medians, rounds = timing.in_turn(competitors, arguments.seconds)
    outputs: dict[str, Any] = {name: np.asarray(x.run()) for name, x in competitors.items()}
    exact = outputs["float32"]
    print(f"float32 {medians['float32']:.2f} ms, {rounds} rounds")
    print(f"{'dtype':<14} {'bytes':>6} {'speed':>6} {'error':>8}")
    for name, cache in caches.items():
        error = np.sqrt(np.mean((outputs[name] - exact) ** 2)) / exact.std()
        speed = medians["float32"] / medians[name]
        print(f"{name:<14} {cache.bytes_per_token:>6,} {speed:>6.2f} {error:>8.1e}")


def main(argv: list[str]) -> None:
    """Measures all dtypes alternately, and prints a table."""
    parser = Parser(
        prog="python -m experiments.benchmark caches",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--heads", type=bounds.count, default=8, help="query heads (default: 8)")
    parser.add_argument("--tokens", type=bounds.count, default=4096, help="default: 4096")
    parser.add_argument("--seconds", type=bounds.seconds, default=20.0)
    options = parser.parse_args(argv)
    if options.heads % KEY_HEADS:
        parser.error(f"argument --heads: expected a multiple of {KEY_HEADS}, got {options.heads}")
    _measure(options)
