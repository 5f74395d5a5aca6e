"""Tiles about which bounds say nothing certain: where they are few, their pairs are looked at.

This is for masks that are functions of positions alone and hold no arrays. It happens once, while
a program is traced; the answer is kept with the mask. The number of undecided tiles decides what it
costs, not T × S.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src.core import Literal
from jaxtyping import Array, Bool

from jattn import tuning


class Boxes(NamedTuple):
    """Queries × keys of several tiles, int32 `[n, 4]`: the least and the greatest position of the
    queries, then of the keys. None spans more than `rows` queries or `columns` keys."""

    ends: np.ndarray
    rows: int
    columns: int

    @property
    def pairs(self) -> int:
        return len(self.ends) * self.rows * self.columns


def boxes(ends: tuple[Any, ...], undecided: np.ndarray, visited: int) -> Boxes | None:
    """Those of tiles `[n, m]` that are undecided, of all that are visited, if to look at them may
    pay and costs little. `ends` are as in `Boxes`, and broadcast to `[n, m]`."""
    least, most = tuning.current().looked_at
    if 8 * undecided.sum() <= visited or not all(isinstance(x, np.ndarray) for x in ends):
        return None
    q_lo, q_hi, kv_lo, kv_hi = (x.astype(np.int64) for x in ends)
    sizes = int((q_hi - q_lo).max()) + 1, int((kv_hi - kv_lo).max()) + 1
    each = np.stack([np.broadcast_to(x, undecided.shape)[undecided] for x in ends], axis=1)
    found = Boxes(each.astype(np.int32), *sizes)
    return found if undecided.size * sizes[0] * sizes[1] >= least and found.pairs <= most else None


Rule = Callable[[Array, Array], Array]


def truths(key: Any, rule: Rule, found: Boxes) -> tuple[np.ndarray, np.ndarray]:
    """`(any, all)` of `rule(q, kv) -> bool [t, s]`, for each box `[n]`; they are kept for `key`,
    which stands for the rule."""
    return _kept(_Keyed(key, rule), found.ends.tobytes(), found.rows, found.columns)


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


def reads(function: Callable[..., Any], arguments: int) -> set[int]:
    """Which of its arguments, int32 scalars, may change what a function gives."""
    program = jax.make_jaxpr(function)(*[jax.ShapeDtypeStruct((), jnp.int32)] * arguments).jaxpr
    needed = {x for x in program.outvars if not isinstance(x, Literal)}
    for equation in reversed(program.eqns):
        if not needed.isdisjoint(equation.outvars):
            needed.update(x for x in equation.invars if not isinstance(x, Literal))
    return {n for n, x in enumerate(program.invars) if x in needed}
