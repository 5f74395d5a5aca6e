"""Exact evaluation of the tiles that bounds leave undecided, while a program is traced.

This is for masks that are functions of positions alone and hold no arrays. `by_parts` computes
bounds of parts of a tile: for a mask function of `i // 17` and `i % 17`, bounds are exact on ranges
between multiples of 17. `truths` evaluates all pairs of a tile, and caches the result for the mask.
The cost depends on the number of undecided tiles, not on T × S.

A box is a rectangle of pairs: int32 `[4]`, the least and greatest query position, then the least
and greatest key position.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool

from jattn import tuning


def boxes(ends: tuple[Any, ...], undecided: np.ndarray, visited: int) -> np.ndarray | None:
    """Returns the boxes of the tiles, of a grid `[n, m]`, that are `undecided`, as `[u, 4]`.

    `ends` are the four numbers of the boxes of all tiles; each broadcasts to `[n, m]`. Returns None
    if `ends` are traced, or if at most an eighth of the `visited` tiles are undecided, so that an
    exact evaluation would save little.
    """
    if 8 * undecided.sum() <= visited or not all(isinstance(x, np.ndarray) for x in ends):
        return None
    undecided_ends = [np.broadcast_to(x, undecided.shape)[undecided] for x in ends]
    return np.stack(undecided_ends, axis=1).astype(np.int32)


Bounds = Callable[[np.ndarray], tuple[Any, Any]]
_MOST_PARTS = 2**14


def by_parts(ends: np.ndarray, bounds: Bounds) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns `(maybe_any, surely_all, decided)` of the boxes `ends [u, 4]`, by bounds of parts.

    `bounds(boxes)` returns for each box whether it may have an allowed pair, and whether all of its
    pairs are certainly allowed. A box is decided if all its parts are allowed, if all are masked,
    or if it has both kinds. Its parts are at first a few of its pairs, then its quarters, then
    their quarters, until there are too many.
    """
    some, lacks = np.zeros((2, len(ends)), bool)  # has an allowed pair, has a masked pair
    owner = np.arange(len(ends))  # the box of each part

    def decide(ends: np.ndarray, owner: np.ndarray) -> np.ndarray:
        """Computes bounds of parts; returns which parts are undecided and in undecided boxes."""
        maybe_any, surely_all = (np.broadcast_to(x, len(ends)) for x in bounds(ends))
        some[owner[maybe_any & surely_all]] = True
        lacks[owner[~maybe_any]] = True
        return maybe_any & ~surely_all & ~(some & lacks)[owner]

    if len(ends) <= _MOST_PARTS // 16:
        decide(*_pairs(ends))
        ends, owner = ends[~(some & lacks)], owner[~(some & lacks)]
    while len(ends) and 4 * len(ends) <= _MOST_PARTS and (ends[:, ::2] < ends[:, 1::2]).any():
        ends, owner = _quarters(ends, owner)
        undecided = decide(ends, owner)
        ends, owner = ends[undecided], owner[undecided]
    some[owner] = lacks[owner] = True
    decided = np.ones(len(some), bool)
    decided[owner] = False
    return some, ~lacks, decided


def _pairs(ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns four queries of each box with four of its keys, as boxes, and their owners."""
    q_lo, q_hi, kv_lo, kv_hi = ends.astype(np.int64).T[..., None, None]
    thirds = np.arange(4)
    q = q_lo + (q_hi - q_lo) * thirds[:, None] // 3
    kv = kv_lo + (kv_hi - kv_lo) * thirds // 3
    pairs = np.stack(np.broadcast_arrays(q, q, kv, kv), axis=-1)
    return pairs.reshape(-1, 4).astype(np.int32), np.repeat(np.arange(len(ends)), 16)


def _quarters(ends: np.ndarray, owner: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the halves of each box's queries with the halves of its keys, and their owners."""
    for lo, hi in ((0, 1), (2, 3)):
        width = ends[:, hi].astype(np.int64) - ends[:, lo]
        middle = (ends[:, lo] + width // 2).astype(np.int32)
        first, second = ends.copy(), ends.copy()
        first[:, hi], second[:, lo] = middle, middle + 1
        has_halves = width > 0
        ends = np.concatenate([first, second[has_halves]])
        owner = np.concatenate([owner, owner[has_halves]])
    return ends, owner


Rule = Callable[[Array, Array], Array]


def truths(
    key: Any, rule: Rule, ends: np.ndarray, tiles: int
) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns whether any and whether all pairs of each box are allowed, by `rule(q, kv)`, which
    returns bool `[t, s]`.

    Returns None if the boxes have more than `max_exact_pairs` pairs, or if all `tiles` of the call
    together have fewer than `min_exact_pairs`. Results are cached by `key`, which must differ for
    different rules.
    """
    sizes = tuning.current()
    ends_64 = ends.astype(np.int64)  # differences may overflow 32 bits
    rows, columns = (int((ends_64[:, n + 1] - ends_64[:, n]).max()) + 1 for n in (0, 2))
    if tiles * rows * columns < sizes.min_exact_pairs:
        return None
    if len(ends) * rows * columns > sizes.max_exact_pairs:
        return None
    return _evaluated(_Keyed(key, rule), ends.tobytes(), rows, columns)


@dataclasses.dataclass(frozen=True)
class _Keyed:
    """A rule, equal to other rules with the same key."""

    key: Any
    rule: Rule = dataclasses.field(compare=False)


@functools.lru_cache(maxsize=64)
def _evaluated(
    keyed: _Keyed, ends: bytes, rows: int, columns: int
) -> tuple[np.ndarray, np.ndarray]:
    def evaluate(box: Array) -> tuple[Bool[Array, ""], Bool[Array, ""]]:
        q = jnp.minimum(box[0] + jnp.arange(rows, dtype=jnp.int32), box[1])
        kv = jnp.minimum(box[2] + jnp.arange(columns, dtype=jnp.int32), box[3])
        allowed = keyed.rule(q, kv)
        return allowed.any(), allowed.all()

    with jax.ensure_compile_time_eval():
        boxes = np.frombuffer(ends, np.int32).reshape(-1, 4)
        some, every = jax.jit(lambda x: lax.map(evaluate, x, batch_size=16))(boxes)
        return np.asarray(some), np.asarray(every)
