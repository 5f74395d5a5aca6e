"""Functions of tiles in the form that Mosaic compiles for TPUs: every array has two axes.

A TPU's registers hold blocks of 8 × 128 numbers, and its compiler supports few arrays with one
axis. Values that differ by query are `[t, 1]`, values that differ by key `[1, s]`, and a value that
broadcasts stays small until it meets a larger one. Arrays that a function indexes stay in memory,
see `LookUp`.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jattn.functions import operations
from jattn.functions.nodes import Node
from jattn.kernels.common import entries


# The operations that Mosaic supports on TPUs.
_OPERATIONS = frozenset(
    """abs add and ceil clamp convert_element_type cos div eq erf exp exp2 expm1 floor floor_divide
    ge gt integer_pow is_finite le log log1p logistic lt max min mul ne neg not or pow rem remainder
    round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin sqrt square
    sub tan tanh xor""".split()
)
MOST_LOOKED_UP = 64  # the most entries among which a tile selects one for each of its pairs


class LookUp:
    """An array of which `read(place)` reads the entry at a row-major place."""

    def __init__(self, shape: tuple[int, ...], dtype: Any, read: Callable[[Any], Any]):
        self.shape, self.dtype, self.read = shape, jnp.dtype(dtype), read

    def inside(self, *index: Any) -> Any:
        """Returns the entries at places of the array: one read, or selected among all candidates
        if the places differ within the tile."""
        strides = [math.prod(self.shape[axis + 1 :]) for axis in range(len(self.shape))]
        axes = list(zip(index, self.shape, strides, strict=True))
        start = sum((x * stride for x, _, stride in axes if not jnp.shape(x)), jnp.int32(0))
        varying = [x for x in axes if jnp.shape(x[0])]
        if not varying:
            return self.read(start)
        count = math.prod(size for _, size, _ in varying)
        if count > MOST_LOOKED_UP:
            raise NotImplementedError(f"one of {count} entries for each pair")
        chosen = functools.reduce(lambda place, x: place * x[1] + x[0], varying, jnp.int32(0))

        def select(candidate: Any, selected: Array) -> Array:
            place, rest = start, candidate
            for _, size, stride in reversed(varying):
                place = place + lax.rem(rest, jnp.int32(size)) * stride
                rest = lax.div(rest, jnp.int32(size))
            return jnp.where(chosen == candidate, self.read(place).astype(selected.dtype), selected)

        # A loop cannot carry masks of registers.
        carried = jnp.int32 if self.dtype == jnp.bool_ else self.dtype
        zeros = jnp.zeros(chosen.shape, carried)
        selected = lax.fori_loop(jnp.int32(0), jnp.int32(count), select, zeros)
        return selected != 0 if self.dtype == jnp.bool_ else selected


def run(function: Callable[..., Any], arguments: Any, expected: Any, tile: tuple[int, int]) -> Any:
    """Computes `function(*arguments)`, traced for the types `expected`, on the two axes of a tile.

    Results broadcast to the function's results, and have two axes too.

    Raises NotImplementedError for operations that a tile cannot compute.
    """
    leaves = jax.tree.leaves(arguments, is_leaf=operations.is_reference)
    read = entries.read(function, arguments, expected, {})
    places = {
        (-1, axis): lax.broadcasted_iota(jnp.int32, (size, 1)[:: 1 if axis == "t" else -1], number)
        for number, (axis, size) in enumerate(zip("ts", tile, strict=True))
    }
    values = {(n, _axes(x)): x for n, x in enumerate(leaves)}
    results = operations.evaluated(read.results, places | values, read.tables, apply=_apply)
    return jax.tree.unflatten(jax.tree.structure(read.out), results)


def _axes(x: Any) -> str:
    """Returns the axes of the tile, "t" and "s", along which an array varies."""
    sizes = x.shape if len(x.shape) == 2 else (1, 1)
    return "".join(axis for axis, size in zip("ts", sizes, strict=True) if size > 1)


def _apply(node: Node, args: list[Any]) -> Any:
    if node.op not in _OPERATIONS:
        raise NotImplementedError(node.param if node.op == "unknown" else node.op)
    shape = jnp.broadcast_shapes(*map(jnp.shape, args))
    return operations.apply(node, [_broadcast(x, shape) for x in args])


def _broadcast(x: Any, shape: tuple[int, ...]) -> Any:
    """Broadcasts x; booleans as integers, because masks of registers do not broadcast."""
    if jnp.shape(x) == shape:
        return x
    if jnp.result_type(x) == jnp.bool_:
        return jnp.broadcast_to(jnp.where(x, jnp.int32(1), jnp.int32(0)), shape) != 0
    return jnp.broadcast_to(x, shape)
