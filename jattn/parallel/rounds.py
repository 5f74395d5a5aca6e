"""Rounds of a ring, which process a few heads at a time so that a device holds only their shards.

In each round the shards of keys and values of an equal share of the key heads go around the ring,
with the queries that read them. A long shard goes around in chunks of its keys, one after another.
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
    """Returns `move(x)` for an operation that moves numbers and does not change them."""
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return move(x)
    bits = lax.bitcast_convert_type(x, jnp.uint16)  # XLA for CPUs would convert to float32
    return lax.bitcast_convert_type(move(bits), x.dtype)


def count(shapes: Shapes) -> int:
    """Returns the number of rounds for the heads of a device's shards: the most that leave each
    round enough queries to keep the device busy. A few rounds would save nothing, as each holds a
    copy of its own queries."""
    least, fewest = tuning.sizes(jax.default_backend()).ring_queries, tuning.current().ring_rounds
    rows = shapes.B if isinstance(shapes.B, int) else 1  # symbolic where a program is exported
    queries = rows * shapes.T * shapes.N
    fine = (x for x in range(fewest, shapes.K + 1) if shapes.K % x == 0 and queries // x >= least)
    return max(fine, default=1)


def chunks(keys: int) -> int:
    """Returns the number of chunks in which a run of each shard's keys goes around: the most that
    leave each chunk enough keys to keep the device busy."""
    least, count = tuning.sizes(jax.default_backend()).ring_keys, tuning.current().ring_chunks
    while count > 1 and (keys % count or keys // count < least):
        count //= 2
    return count


_HEADS = 2  # the axis of heads in arrays `[B, T, N, ...]` and `[B, S, K, ...]`


class Round(NamedTuple):
    """The heads that go around together: number `share` of `shares` equal shares."""

    share: Index = 0
    shares: int = 1

    @staticmethod
    def axis(letters: str, leaf: Array) -> int | None:
        """Returns the axis of an array along which each head has its own part, or None."""
        axis = axis_of("N", letters, leaf.ndim)
        return axis if axis is not None and leaf.shape[axis] > 1 else None

    def cut(
        self, x: Array, axis: int | None = _HEADS, keys: tuple[Index, int] | None = None
    ) -> Array:
        """Slices an array to its share of heads, and to the `keys` (first, number) if given.

        An array that all heads share is returned unchanged.
        """
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
        """Returns the spec with its arrays along N sliced to the share."""
        cut = lambda letters, leaf: self.cut(leaf, self.axis(letters, leaf))  # noqa: E731
        return jax.tree.map(cut, axis_names(spec), spec)

    def put(self, total: Array, part: Array) -> Array:
        """Writes this round's result for its heads into `total`."""
        start = self.share * part.shape[_HEADS]
        return lax.dynamic_update_slice_in_dim(total, part, start, _HEADS)

    def add(self, letters: str, total: Array, part: Array, first_key: Index = 0) -> Array:
        """Adds this round's result, for its heads and a run of keys, to `total`."""
        start: list[Any] = [0] * total.ndim
        for letter, first in (("N", None), ("S", first_key)):
            axis = axis_of(letter, letters, total.ndim)
            if axis is not None and part.shape[axis] < total.shape[axis]:
                start[axis] = self.share * part.shape[axis] if first is None else first
        return slicing.add_block(total, part.astype(total.dtype), start)


def run(rounds: int, compute: Callable[..., Any], total: Tree) -> Tree:
    """Folds `compute(round, total)` over all rounds."""
    if rounds == 1:
        return compute(Round(), total)

    def body(i: Array, total: Tree) -> Tree:
        return compute(Round(lax.convert_element_type(i, jnp.int32), rounds), total)

    return lax.fori_loop(0, rounds, body, total)
