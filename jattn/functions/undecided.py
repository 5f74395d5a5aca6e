"""Tiles about which bounds say nothing certain: where they are few, they are looked into.

This is for masks that are functions of positions alone and hold no arrays, and happens while a
program is traced. `by_parts` asks the bounds about parts of a tile: a rule of rows and columns,
`i // 17` and `i % 17`, is certain of each run within a row. `truths` evaluates all pairs of a tile;
the answer is kept with the mask. The number of undecided tiles decides what it costs, not T × S.
"""

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
    """Returns the undecided tiles of `[n, m]` as int32 `[u, 4]`: least and greatest position of the
    queries, then of the keys. None if they are too few of the visited tiles for an exact evaluation
    to pay. `ends` are these positions for all tiles, and broadcast to `[n, m]`."""
    if 8 * undecided.sum() <= visited or not all(isinstance(x, np.ndarray) for x in ends):
        return None
    each = [np.broadcast_to(x, undecided.shape)[undecided] for x in ends]
    return np.stack(each, axis=1).astype(np.int32)


Bounds = Callable[[np.ndarray], tuple[Any, Any]]
_MOST_PARTS = 2**14


def by_parts(ends: np.ndarray, bounds: Bounds) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`(maybe_any, surely_all, known)` of boxes, of each of which `bounds` tells too little.

    A box is known once one part of it is all allowed and another is not at all, or all its parts
    are alike. Parts are a few pairs of each box at first, then its quarters, then theirs, until
    there are too many to ask about.
    """
    some, lacks = np.zeros((2, len(ends)), bool)  # a pair that is allowed, one that is not
    owner = np.arange(len(ends))

    def ask(ends: np.ndarray, owner: np.ndarray) -> np.ndarray:
        """Asks about these parts. Returns which of them still matter and are undecided."""
        maybe_any, surely_all = (np.broadcast_to(x, len(ends)) for x in bounds(ends))
        some[owner[maybe_any & surely_all]] = True
        lacks[owner[~maybe_any]] = True
        return maybe_any & ~surely_all & ~(some & lacks)[owner]

    if len(ends) <= _MOST_PARTS // 16:
        ask(*_pairs(ends))
        ends, owner = ends[~(some & lacks)], owner[~(some & lacks)]
    while len(ends) and 4 * len(ends) <= _MOST_PARTS and (ends[:, ::2] < ends[:, 1::2]).any():
        ends, owner = _quarters(ends, owner)
        matters = ask(ends, owner)
        ends, owner = ends[matters], owner[matters]
    some[owner] = lacks[owner] = True
    known = np.ones(len(some), bool)
    known[owner] = False
    return some, ~lacks, known


def _pairs(ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Four queries of each box with four of its keys, as boxes, and whose they are."""
    q_lo, q_hi, kv_lo, kv_hi = ends.astype(np.int64).T[..., None, None]
    thirds = np.arange(4)
    q = q_lo + (q_hi - q_lo) * thirds[:, None] // 3
    kv = kv_lo + (kv_hi - kv_lo) * thirds // 3
    pairs = np.stack(np.broadcast_arrays(q, q, kv, kv), axis=-1)
    return pairs.reshape(-1, 4).astype(np.int32), np.repeat(np.arange(len(ends)), 16)


def _quarters(ends: np.ndarray, owner: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The halves of the queries with the halves of the keys of each box, and whose they are."""
    for lo, hi in ((0, 1), (2, 3)):
        width = ends[:, hi].astype(np.int64) - ends[:, lo]
        middle = (ends[:, lo] + width // 2).astype(np.int32)
        first, second = ends.copy(), ends.copy()
        first[:, hi], second[:, lo] = middle, middle + 1
        cut = width > 0
        ends, owner = np.concatenate([first, second[cut]]), np.concatenate([owner, owner[cut]])
    return ends, owner


Rule = Callable[[Array, Array], Array]


def truths(
    key: Any, rule: Rule, ends: np.ndarray, tiles: int
) -> tuple[np.ndarray, np.ndarray] | None:
    """`(any, all)` of `rule(q, kv) -> bool [t, s]` for each box, which are kept for `key`, that
    stands for the rule; None where the boxes have too many pairs, or all `tiles` too few."""
    sizes = tuning.current()
    wide = ends.astype(np.int64)
    rows, columns = (int((wide[:, n + 1] - wide[:, n]).max()) + 1 for n in (0, 2))
    if tiles * rows * columns < sizes.min_exact_pairs:
        return None
    if len(ends) * rows * columns > sizes.max_exact_pairs:
        return None
    return _kept(_Keyed(key, rule), ends.tobytes(), rows, columns)


class _Keyed:
    """A rule that is equal to those with the same key."""

    def __init__(self, key: Any, rule: Rule):
        self.key, self.rule = key, rule

    def __eq__(self, other: Any) -> bool:
        return self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


@functools.lru_cache(maxsize=64)
def _kept(keyed: _Keyed, ends: bytes, rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    def look(box: Array) -> tuple[Bool[Array, ""], Bool[Array, ""]]:
        q = jnp.minimum(box[0] + jnp.arange(rows, dtype=jnp.int32), box[1])
        kv = jnp.minimum(box[2] + jnp.arange(columns, dtype=jnp.int32), box[3])
        allowed = keyed.rule(q, kv)
        return allowed.any(), allowed.all()

    with jax.ensure_compile_time_eval():
        each = np.frombuffer(ends, np.int32).reshape(-1, 4)
        found = jax.jit(lambda x: lax.map(look, x, batch_size=16))(each)
        return np.asarray(found[0]), np.asarray(found[1])
