"""Exact evaluation of the tiles that bounds leave undecided, if there are few.

This is for masks that are functions of positions alone and hold no arrays, and happens while a
program is traced. `by_parts` computes bounds of parts of a tile: a rule of rows and columns,
`i // 17` and `i % 17`, is certain in each run within a row. `truths` evaluates all pairs of a tile
and caches the result for the mask. The cost depends on the number of undecided tiles, not on T × S.
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
    """Returns `(maybe_any, surely_all, known)` of boxes that `bounds` leaves undecided.

    A box is known if it has both an allowed and a masked part, or if all its parts are decided
    alike. Parts are a few pairs of each box at first, then its quarters, then the quarters of
    these, until there are too many.
    """
    some, lacks = np.zeros((2, len(ends)), bool)  # has an allowed pair, has a masked pair
    owner = np.arange(len(ends))

    def decide(ends: np.ndarray, owner: np.ndarray) -> np.ndarray:
        """Computes bounds of parts. Returns which parts are undecided in boxes not yet known."""
        maybe_any, surely_all = (np.broadcast_to(x, len(ends)) for x in bounds(ends))
        some[owner[maybe_any & surely_all]] = True
        lacks[owner[~maybe_any]] = True
        return maybe_any & ~surely_all & ~(some & lacks)[owner]

    if len(ends) <= _MOST_PARTS // 16:
        decide(*_pairs(ends))
        ends, owner = ends[~(some & lacks)], owner[~(some & lacks)]
    while len(ends) and 4 * len(ends) <= _MOST_PARTS and (ends[:, ::2] < ends[:, 1::2]).any():
        ends, owner = _quarters(ends, owner)
        matters = decide(ends, owner)
        ends, owner = ends[matters], owner[matters]
    some[owner] = lacks[owner] = True
    known = np.ones(len(some), bool)
    known[owner] = False
    return some, ~lacks, known


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
        cut = width > 0
        ends, owner = np.concatenate([first, second[cut]]), np.concatenate([owner, owner[cut]])
    return ends, owner


Rule = Callable[[Array, Array], Array]


def truths(
    key: Any, rule: Rule, ends: np.ndarray, tiles: int
) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns `(any, all)` of `rule(q, kv) -> bool [t, s]` for each box; None if the boxes have too
    many pairs, or all `tiles` too few. Results are cached for `key`, which stands for the rule."""
    sizes = tuning.current()
    wide = ends.astype(np.int64)
    rows, columns = (int((wide[:, n + 1] - wide[:, n]).max()) + 1 for n in (0, 2))
    if tiles * rows * columns < sizes.min_exact_pairs:
        return None
    if len(ends) * rows * columns > sizes.max_exact_pairs:
        return None
    return _evaluated(_Keyed(key, rule), ends.tobytes(), rows, columns)


class _Keyed:
    """A rule, equal to other rules with the same key."""

    def __init__(self, key: Any, rule: Rule):
        self.key, self.rule = key, rule

    def __eq__(self, other: Any) -> bool:
        return self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


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
        each = np.frombuffer(ends, np.int32).reshape(-1, 4)
        some, every = jax.jit(lambda x: lax.map(evaluate, x, batch_size=16))(each)
        return np.asarray(some), np.asarray(every)
