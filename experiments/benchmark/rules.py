"""Masks and score functions as users of FlexAttention write them, for both libraries at once.

A rule is built for an array library, `jax.numpy` or `torch`, and a length; the same function body
serves both. Most rules come from attention-gym, FlexAttention's collection of examples, or from the
papers named here. Two-dimensional rules take the T positions as the pixels of a square picture, row
by row.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np


HEADS = 8


@dataclasses.dataclass(frozen=True)
class BenchmarkRule:
    """A mask or a score function.

    make: `make(xp, T)` returns `fn(b, h, q, kv) -> bool`, or with `is_score`
        `fn(score, b, h, q, kv, *operands) -> score`.
    operands: maps T to a score function's float32 operands, whose gradients are computed too.
    causal: whether a score function is measured with the causal mask, or without a mask.
    """

    name: str
    summary: str
    make: Callable[[Any, int], Callable[..., Any]]
    is_score: bool = False
    lengths: tuple[int, ...] = (2048, 8192)
    operands: Callable[[int], tuple[np.ndarray, ...]] = lambda T: ()
    causal: bool = True


# --- masks --------------------------------------------------------------------------------------


def _causal(xp: Any, T: int) -> Callable[..., Any]:
    return lambda b, h, q, kv: q >= kv


def _window(xp: Any, T: int) -> Callable[..., Any]:
    return lambda b, h, q, kv: (q >= kv) & (q - kv <= 256)


def _prefix(xp: Any, T: int) -> Callable[..., Any]:
    prefix = T // 4
    return lambda b, h, q, kv: (kv < prefix) | (q >= kv)


def parts(T: int, count: int, seed: int = 0) -> np.ndarray:
    """Splits T positions into `count` parts of unequal lengths; returns their indices, int32
    `[T]`."""
    ends = np.sort(np.random.default_rng(seed).choice(np.arange(1, T), count - 1, replace=False))
    return np.searchsorted(ends, np.arange(T), side="right").astype(np.int32)


def _documents(xp: Any, T: int) -> Callable[..., Any]:
    document = xp.asarray(parts(T, 8))
    return lambda b, h, q, kv: (document[q] == document[kv]) & (q >= kv)


def _jagged(xp: Any, T: int) -> Callable[..., Any]:
    """Builds a causal mask within packed sequences, by local position, as attention-gym does for
    nested tensors."""
    sequence_of_position = parts(T, 16, seed=1)
    first = np.searchsorted(sequence_of_position, np.arange(16)).astype(np.int32)
    sequence, start = xp.asarray(sequence_of_position), xp.asarray(first)

    def rule(b: Any, h: Any, q: Any, kv: Any) -> Any:
        same_sequence = sequence[q] == sequence[kv]
        return same_sequence & (q - start[sequence[q]] >= kv - start[sequence[kv]])

    return rule


def _neighbourhood(size: int) -> Callable[..., Callable[..., Any]]:
    """Builds a mask of a square around each query of a picture, moved inwards at the picture's
    edges (NATTEN)."""

    def make(xp: Any, T: int) -> Callable[..., Any]:
        side, reach = math.isqrt(T), size // 2

        def rule(b: Any, h: Any, q: Any, kv: Any) -> Any:
            row = xp.clip(q // side, reach, side - 1 - reach)
            column = xp.clip(q % side, reach, side - 1 - reach)
            near_row = abs(row - kv // side) <= reach
            near_column = abs(column - kv % side) <= reach
            return near_row & near_column

        return rule

    return make


def _dilated(xp: Any, T: int) -> Callable[..., Any]:
    return lambda b, h, q, kv: (q >= kv) & (q - kv <= 512) & ((q - kv) % 4 == 0)


def _tree(xp: Any, T: int) -> Callable[..., Any]:
    """Builds the mask of a tree of branches of up to 64 tokens in depth-first order; a token
    attends to its ancestors and itself."""
    end = xp.asarray(_ends_of_subtrees(T))
    return lambda b, h, q, kv: (kv <= q) & (q < end[kv])


def _ends_of_subtrees(T: int) -> np.ndarray:
    """Returns the end of each token's subtree, int32 `[T]`."""
    rng = np.random.default_rng(2)
    end = np.full(T, T, np.int32)
    open_branches = []  # (first token, end) of the branches that may get a child
    start = 0
    while start < T:
        length = int(rng.integers(8, 65))
        depth = int(rng.integers(1, len(open_branches) + 1)) if open_branches else 0
        for first, stop in open_branches[depth:]:
            end[first:stop] = start
        open_branches = [*open_branches[:depth], (start, min(start + length, T))]
        start += length
    return end


def _shared_prefix(xp: Any, T: int) -> Callable[..., Any]:
    """Builds the mask of eight answers to one prompt, which is half of all tokens."""
    prompt, answer = T // 2, T // 16

    def rule(b: Any, h: Any, q: Any, kv: Any) -> Any:
        same = (q - prompt) // answer == (kv - prompt) // answer
        return ((kv < prompt) | same) & (q >= kv)

    return rule


def _global_window(xp: Any, T: int) -> Callable[..., Any]:
    """Builds a mask of 16 global tokens and a window for all others (Longformer)."""
    return lambda b, h, q, kv: (abs(q - kv) <= 128) | (q < 16) | (kv < 16)


# --- score functions ----------------------------------------------------------------------------


def _normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def _alibi(xp: Any, T: int) -> Callable[..., Any]:
    slopes = xp.asarray(2.0 ** -np.arange(1, HEADS + 1, dtype=np.float32))
    return lambda score, b, h, q, kv: score + slopes[h] * (kv - q)


def _buckets(T: int) -> np.ndarray:
    """Returns T5's bucket of each distance, of 32 buckets, int32 `[T]` (Raffel et al. 2020)."""
    distance = np.arange(T)
    far = 16 + (np.log(np.maximum(distance, 16) / 16) / np.log(128 / 16) * 16).astype(np.int32)
    return np.where(distance < 16, distance, np.minimum(far, 31)).astype(np.int32)


def _t5(xp: Any, T: int) -> Callable[..., Any]:
    bucket = xp.asarray(_buckets(T))
    return lambda score, b, h, q, kv, table: score + table[bucket[abs(q - kv)], h]


def _relative(xp: Any, T: int) -> Callable[..., Any]:
    """Adds a learned number for each distance, clipped to 128 (Shaw et al. 2018)."""
    return lambda score, b, h, q, kv, table: score + table[h, xp.clip(q - kv, -128, 128) + 128]


def _soft_cap(xp: Any, T: int) -> Callable[..., Any]:
    return lambda score, b, h, q, kv: 30.0 * xp.tanh(score / 30.0)


def _temperature(xp: Any, T: int) -> Callable[..., Any]:
    return lambda score, b, h, q, kv, temperature: score * temperature[h]


def _swin(xp: Any, T: int) -> Callable[..., Any]:
    """Adds a learned number for each difference of rows and columns of a picture (Liu et al.
    2021)."""
    side = math.isqrt(T)

    def rule(score: Any, b: Any, h: Any, q: Any, kv: Any, table: Any) -> Any:
        rows = q // side - kv // side + side - 1
        columns = q % side - kv % side + side - 1
        return score + table[h, rows, columns]

    return rule


def _product(xp: Any, T: int) -> Callable[..., Any]:
    """Halves the scores between different pages of 100 tokens."""

    def rule(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        same = q // 100 == kv // 100
        return 0.5 * score + 0.5 * score * same

    return rule


def _stick_breaking(xp: Any, T: int) -> Callable[..., Any]:
    """Computes the logarithm of a score's sigmoid, as stick-breaking attention does before it sums
    (Tan et al. 2024)."""

    def rule(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (score - abs(score)) / 2 - xp.log1p(xp.exp(-abs(score)))

    return rule


PICTURE = (4096,)
CAUSAL = BenchmarkRule("causal", "kv ≤ q", _causal)

RULES = (
    CAUSAL,
    BenchmarkRule("window", "the last 256", _window),
    BenchmarkRule("prefix", "causal, or in the first quarter", _prefix),
    BenchmarkRule("documents", "causal within eight", _documents),
    BenchmarkRule(
        "neighbourhood-7", "7 × 7 of a 64 × 64 picture", _neighbourhood(7), lengths=PICTURE
    ),
    BenchmarkRule("neighbourhood-13", "13 × 13", _neighbourhood(13), lengths=PICTURE),
    BenchmarkRule("dilated", "every fourth of the last 512", _dilated),
    BenchmarkRule("tree", "ancestors in a tree of branches", _tree),
    BenchmarkRule("shared-prefix", "a prompt and one of eight answers", _shared_prefix),
    BenchmarkRule("jagged", "causal within sixteen sequences", _jagged),
    BenchmarkRule("global-window", "128 to each side, 16 global tokens", _global_window),
    BenchmarkRule("alibi", "s + slope[h] · (kv − q)", _alibi, is_score=True),
    BenchmarkRule(
        "t5",
        "s + table[bucket[|q − kv|], h]",
        _t5,
        is_score=True,
        operands=lambda T: (_normal(3, 32, HEADS),),
    ),
    BenchmarkRule(
        "relative",
        "s + table[h, clip(q − kv)]",
        _relative,
        is_score=True,
        operands=lambda T: (_normal(4, HEADS, 257),),
    ),
    BenchmarkRule("soft-cap", "30 · tanh(s / 30)", _soft_cap, is_score=True),
    BenchmarkRule(
        "temperature",
        "s · t[h]",
        _temperature,
        is_score=True,
        operands=lambda T: (1 + 0.1 * abs(_normal(5, HEADS)),),
    ),
    BenchmarkRule(
        "swin",
        "s + table[h, Δrow, Δcolumn]",
        _swin,
        is_score=True,
        lengths=PICTURE,
        operands=lambda T: (_normal(6, HEADS, *[2 * math.isqrt(T) - 1] * 2),),
        causal=False,
    ),
    BenchmarkRule("product", "s · (½ + ½ · same page)", _product, is_score=True),
    BenchmarkRule("stick-breaking", "log σ(s)", _stick_breaking, is_score=True),
)
