"""Rounds of a ring, each with a few heads, so that a device holds only their keys and values.

In each round an equal share of the key heads goes around the ring, and each device computes the
query heads that read them. A long shard goes around in chunks of its keys, one after another.
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
    """Returns `move(x)`, for an operation that only moves elements, such as a slice.

    16-bit floats are moved as integers: XLA for CPUs would convert them to float32 and back.
    """
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return move(x)
    bits = lax.bitcast_convert_type(x, jnp.uint16)
    return lax.bitcast_convert_type(move(bits), x.dtype)


def count(shapes: Shapes) -> int:
    """Returns the number of rounds for the heads of a device's shards: the largest that leaves each
    round enough queries to keep the device busy. Fewer than `ring_rounds` would not save memory, as
    each round copies its queries; then there is one round."""
    least = tuning.sizes(jax.default_backend()).ring_queries
    fewest = tuning.current().ring_rounds
    batch = shapes.B if isinstance(shapes.B, int) else 1  # symbolic where a program is exported
    queries = batch * shapes.T * shapes.N
    counts = (x for x in range(fewest, shapes.K + 1) if shapes.K % x == 0 and queries // x >= least)
    return max(counts, default=1)


def chunks(keys: int) -> int:
    """Returns the largest number of chunks of these keys that each keep the device busy."""
    least, count = tuning.sizes(jax.default_backend()).ring_keys, tuning.current().ring_chunks
    while count > 1 and (keys % count or keys // count < least):
        count //= 2
    return count


_HEADS = 2  # the axis of heads in arrays `[B, T, N, ...]` and `[B, S, K, ...]`


class Round(NamedTuple):
    """The heads that go around together: share `number` of `num_rounds` equal shares."""

    number: Index = 0
    num_rounds: int = 1

    @staticmethod
    def axis(letters: str, leaf: Array) -> int | None:
        """Returns the axis of heads of an array; None if it has none or heads share entries."""
        axis = axis_of("N", letters, leaf.ndim)
        return axis if axis is not None and leaf.shape[axis] > 1 else None

    def slice_heads(
        self, x: Array, axis: int | None = _HEADS, keys: tuple[Index, int] | None = None
    ) -> Array:
        """Returns this share of the heads (all for None), and `keys` (first, count) of axis 1."""
        start: list[Any] = [0] * x.ndim
        size = list(x.shape)
        if axis is not None:
            size[axis] //= self.num_rounds
            start[axis] = self.number * size[axis]
        if keys is not None:
            start[1], size[1] = keys
        if size == [*x.shape]:
            return x
        return moved(lambda y: lax.dynamic_slice(y, list(map(jnp.int32, start)), size), x)

    def slice_spec(self, spec: Spec) -> Spec:
        """Returns the spec with its arrays along N sliced to this share of the heads."""

        def slice_leaf(letters: str, leaf: Array) -> Array:
            return self.slice_heads(leaf, self.axis(letters, leaf))

        return jax.tree.map(slice_leaf, axis_names(spec), spec)

    def put(self, total: Array, result: Array) -> Array:
        """Returns `total`, of all heads, with the result of this share written to it."""
        start = self.number * result.shape[_HEADS]
        return lax.dynamic_update_slice_in_dim(total, result, start, _HEADS)

    def add(self, letters: str, total: Array, gradient: Array, first_key: Index = 0) -> Array:
        """Returns `total` plus the gradient of this share of the heads, and of keys from
        `first_key` on. Both arrays have axes with these letters."""
        start: list[Any] = [0] * total.ndim
        heads, keys = (axis_of(letter, letters, total.ndim) for letter in "NS")
        if heads is not None and gradient.shape[heads] < total.shape[heads]:
            start[heads] = self.number * gradient.shape[heads]
        if keys is not None and gradient.shape[keys] < total.shape[keys]:
            start[keys] = first_key
        return slicing.add_block(total, gradient.astype(total.dtype), start)


def repeat(count: int, body: Callable[..., Any], state: Tree) -> Tree:
    """Folds `body(i, state)` over i in range(count); without a loop if `count` is at most 1."""
    if count <= 1:
        return body(0, state) if count else state
    return lax.fori_loop(
        0, count, lambda i, x: body(lax.convert_element_type(i, jnp.int32), x), state
    )
