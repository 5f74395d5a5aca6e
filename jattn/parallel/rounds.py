"""Rounds of a ring: heads take turns, so that a device holds shards of a few heads at a time.

In each round the shards of keys and values of an equal share of the key heads go round, with the
queries that read them. Of a long shard a chunk of the keys goes round after another.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jattn import tuning
from jattn._pytree import axis_names, axis_of
from jattn._types import Index, Tree
from jattn.kernels.common import slicing
from jattn.spec import Shapes, Spec


def moved(move: Callable[[Array], Array], x: Array) -> Array:
    """`move(x)` for what moves numbers and does not change them."""
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return move(x)
    bits = lax.bitcast_convert_type(x, jnp.uint16)  # XLA would move float32 on CPUs
    return lax.bitcast_convert_type(move(bits), x.dtype)


def count(shapes: Shapes) -> int:
    """In how many rounds the heads of a device's shards go: as many as leave each enough queries to
    keep the device busy. Few would save nothing, as each holds a copy of its own queries."""
    least, fewest = tuning.sizes(jax.default_backend()).ring_queries, tuning.current().ring_rounds
    rows = shapes.B if isinstance(shapes.B, int) else 1  # symbolic where a program is exported
    queries = rows * shapes.T * shapes.N
    fine = (x for x in range(fewest, shapes.K + 1) if shapes.K % x == 0 and queries // x >= least)
    return max(fine, default=1)


def chunks(keys: int) -> int:
    """In how many chunks a run of so many keys of each shard goes round, one after another: as many
    as leave each enough keys to keep the device busy."""
    least, count = tuning.sizes(jax.default_backend()).ring_keys, tuning.current().ring_chunks
    while count > 1 and (keys % count or keys // count < least):
        count //= 2
    return count


_HEADS = 2  # the axis of heads in arrays `[B, T, N, ...]` and `[B, S, K, ...]`


class Round(NamedTuple):
    """The heads that go round together: the share number `share` of `shares` equal ones."""

    share: Index = 0
    shares: int = 1

    @staticmethod
    def axis(letters: str, leaf: Array) -> int | None:
        """The axis of an array along which each head has its own part."""
        axis = axis_of("N", letters, leaf.ndim)
        return axis if axis is not None and leaf.shape[axis] > 1 else None

    def cut(
        self, x: Array, axis: int | None = _HEADS, keys: tuple[Index, int] | None = None
    ) -> Array:
        """The share of an array, one that is the same for all heads as it is; and of `[B, S, ...]`
        the `keys`, which are the first one and their number."""
        start: list[Any] = [0] * x.ndim
        size = list(x.shape)
        if axis is not None:
            size[axis] //= self.shares
            start[axis] = self.share * size[axis]
        if keys is not None:
            start[1], size[1] = keys
        if size == [*x.shape]:
            return x
        return moved(lambda y: lax.dynamic_slice(y, list(map(jnp.int32, start)), size), x)

    def cut_spec(self, spec: Spec) -> Spec:
        """The spec with its arrays along N cut to the share."""
        cut = lambda letters, leaf: self.cut(leaf, self.axis(letters, leaf))  # noqa: E731
        return jax.tree.map(cut, axis_names(spec), spec)

    def put(self, total: Array, found: Array) -> Array:
        """`total` with what this round has found for its heads."""
        start = self.share * found.shape[_HEADS]
        return lax.dynamic_update_slice_in_dim(total, found, start, _HEADS)

    def add(self, letters: str, total: Array, found: Array, first_key: Index = 0) -> Array:
        """`total` with what this round has found, for a run of keys, added where it belongs."""
        start: list[Any] = [0] * total.ndim
        for letter, first in (("N", None), ("S", first_key)):
            axis = axis_of(letter, letters, total.ndim)
            if axis is not None and found.shape[axis] < total.shape[axis]:
                start[axis] = self.share * found.shape[axis] if first is None else first
        return slicing.add_block(total, found.astype(total.dtype), start)


def run(rounds: int, compute: Callable[..., Any], total: Tree) -> Tree:
    """`total` after `compute(round, total)` of all rounds."""
    if rounds == 1:
        return compute(Round(), total)

    def body(i: Array, total: Tree) -> Tree:
        return compute(Round(lax.convert_element_type(i, jnp.int32), rounds), total)

    return lax.fori_loop(0, rounds, body, total)
