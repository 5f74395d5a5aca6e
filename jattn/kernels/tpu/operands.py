"""A spec's arrays in the form that Pallas kernels for TPUs receive.

Arrays along T or S are sliced to the tile. Numbers of a batch row and head, and arrays that
functions index, are in scalar memory. In a kernel `SpecOperands.run` calls a function with the
tile, in the form that Mosaic compiles: every array has two axes. A TPU's registers hold blocks of
8 × 128 numbers, and its compiler supports few arrays with one axis. Values that differ by query are
`[t, 1]`, values that differ by key `[1, s]`, and a value that broadcasts stays small until it meets
a larger one. Arrays that a function indexes stay in memory, see `LookUp`.
"""

import functools
import importlib
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike
from jaxtyping import Array

from jattn._pytree import axis_names, split_letters
from jattn._types import Index, Ref, Tree
from jattn.functions import operations
from jattn.functions.nodes import Node
from jattn.kernels.common import entries, slicing
from jattn.spec import Spec, Tiling


LANES = 128  # the width of a register, along the last axis of an array


class TileIndex(NamedTuple):
    """The place of a tile: batch row, head, block of queries and block of keys."""

    b: Index
    h: Index
    i: Index
    j: Index


def round_up(size: int, multiple: int) -> int:
    """Returns the smallest multiple that is at least `size`."""
    return -(-size // multiple) * multiple


def column(row: Array) -> Array:
    """Transposes `[1, t]` to `[t, 1]`."""
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T[:, :1]


def row(column: Array) -> Array:
    """Transposes `[t, 1]` to `[1, t]`."""
    return jnp.broadcast_to(column, (column.shape[0], LANES)).T[:1]


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


def _run(function: Callable[..., Any], arguments: Any, expected: Any, tile: tuple[int, int]) -> Any:
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
        raise NotImplementedError(node.name)
    shape = jnp.broadcast_shapes(*map(jnp.shape, args))
    return operations.apply(node, [_broadcast(x, shape) for x in args])


def _broadcast(x: Any, shape: tuple[int, ...]) -> Any:
    """Broadcasts x; booleans as integers, because masks of registers do not broadcast."""
    if jnp.shape(x) == shape:
        return x
    if jnp.result_type(x) == jnp.bool_:
        return jnp.broadcast_to(jnp.where(x, jnp.int32(1), jnp.int32(0)), shape) != 0
    return jnp.broadcast_to(x, shape)


class _SpecArray(NamedTuple):
    """One array of a spec.

    outer: the number of batch rows and of heads with separate entries.
    inner: the other axes; with `heads_last` all axes.
    at_tile: the axes of the part that a tile receives.
    along: whether the array runs along T, and along S.
    is_indexed: whether functions may read any of its entries.
    """

    outer: tuple[int, int]
    inner: tuple[int, ...]
    at_tile: tuple[int, ...]
    along: tuple[bool, bool]
    dtype: DTypeLike
    is_indexed: bool

    @classmethod
    def of(cls, leaf: Array, letters: str, tiling: Tiling) -> "_SpecArray":
        names = split_letters(letters) or [""] * leaf.ndim
        axes = list(zip(names, leaf.shape, strict=True))
        sizes, tile_sizes = dict(axes), dict(zip("TS", tiling, strict=True))
        # The axis of heads is the first, except in a table of buckets, which is indexed as a whole.
        heads_last = "N" in names[1:] and names[0] != "*B"
        inner = [(x, n) for x, n in axes if x not in ("*B", "N")]
        return cls(
            (sizes.get("*B", 1), 1 if heads_last else sizes.get("N", 1)),
            tuple(n for _, n in (axes if heads_last else inner)),
            tuple(n if heads_last else min(n, tile_sizes.get(x, n)) for x, n in inner),
            (sizes.get("T", 1) > 1, sizes.get("S", 1) > 1),
            leaf.dtype,
            bool(leaf.ndim) and not set(names) <= {"*B", "N", "T", "S"},
        )

    @property
    def heads_last(self) -> bool:
        return len(self.inner) > len(self.at_tile)

    @property
    def in_blocks(self) -> bool:
        return any(self.along)

    def passed(self, leaf: Array) -> Array:
        """Returns the array that the kernel receives: `[B or 1, N or 1, t, s]` if it is sliced to
        tiles, else all entries in one axis."""
        both = all(self.along)
        last = self.inner[-2:] if both else (1, math.prod(self.inner))
        leaf = leaf.reshape(*self.outer, *last) if self.in_blocks else leaf.reshape(-1)
        return leaf.astype(jnp.int8 if both else jnp.int32) if leaf.dtype == bool else leaf

    def block(
        self, tiling: Tiling, tile_at: Callable[..., TileIndex], every_head: bool
    ) -> pl.BlockSpec:
        if not self.in_blocks:
            # Imported here because its import takes longer than that of all of jattn.
            tpu = importlib.import_module("jax.experimental.pallas.tpu")
            return pl.BlockSpec(memory_space=tpu.SMEM)

        def index(*at: Ref) -> tuple[Any, ...]:
            b, h, i, j = tile_at(*at)
            outer = b if self.outer[0] > 1 else 0, h if self.outer[1] > 1 and not every_head else 0
            return *outer, *((i, j) if all(self.along) else (0, i if self.along[0] else j))

        heads = self.outer[1] if every_head else None
        return pl.BlockSpec((None, heads, *self.block_shape(tiling)), index)

    def block_shape(self, tiling: Tiling) -> tuple[int, int]:
        return (tiling.block_q, tiling.block_kv) if all(self.along) else (1, tiling[self.along[1]])

    def value(self, ref: Ref, at: TileIndex) -> Tree:
        """Returns, within a kernel, the part that a tile receives, with two axes."""
        b, h = (x if size > 1 else 0 for x, size in zip((at.b, at.h), self.outer, strict=True))
        if self.in_blocks:
            block = ref[h] if len(ref.shape) > 2 else ref[...]
            if self.dtype == bool:
                block = block.astype(jnp.int32) != 0
            return block if self.along[1] else column(block)

        def read(place: Index) -> Array:
            entry = ref[place]
            return entry != 0 if self.dtype == bool else entry

        size = math.prod(self.at_tile)
        start, stride = (b * self.outer[1] + h) * size, 1
        if self.heads_last:  # [buckets, N]
            stride = self.inner[1]
            start = at.h if stride > 1 else 0
        elif size == 1 and not self.is_indexed:
            return read(start)
        return LookUp(self.at_tile, self.dtype, lambda place: read(start + place * stride))


class SpecOperands:
    """A spec as a kernel receives it: `arrays` to pass, sliced to `blocks`, and `run`, which
    computes with them.

    With `every_head` the blocks of a program have all heads, else one head.
    """

    def __init__(self, spec: Spec, tiling: Tiling, every_head: bool = False):
        leaves, self._treedef = jax.tree.flatten(spec)
        letters = jax.tree.leaves(axis_names(spec))
        self._tiling, self._every_head = tiling, every_head
        self._arrays = [_SpecArray.of(*x, tiling) for x in zip(leaves, letters, strict=True)]
        self.arrays = [x.passed(leaf) for x, leaf in zip(self._arrays, leaves, strict=True)]

    @property
    def scalar_entries(self) -> int:
        """The number of entries in scalar memory."""
        pairs = zip(self._arrays, self.arrays, strict=True)
        return sum(x.size for array, x in pairs if not array.in_blocks)

    @property
    def block_entries(self) -> int:
        """The number of entries of a program's blocks, in whole registers of 32 bits."""
        shapes = [
            (x.outer[1] if self._every_head else 1, *x.block_shape(self._tiling))
            for x in self._arrays
            if x.in_blocks
        ]
        return sum(heads * max(t, 8) * s for heads, t, s in shapes)

    def blocks(self, tile_at: Callable[..., TileIndex]) -> list[pl.BlockSpec]:
        """Returns the blocks of the arrays, for programs with the tile `tile_at(*indices)`."""
        return [x.block(self._tiling, tile_at, self._every_head) for x in self._arrays]

    def traced(self, function: Callable[..., Any], *operands: Array) -> Tree:
        """Computes `run` at the first tile, outside of a kernel."""
        refs = [
            jnp.zeros(array.block_shape(self._tiling), x.dtype) if array.in_blocks else x
            for array, x in zip(self._arrays, self.arrays, strict=True)
        ]
        return self.run(refs, TileIndex(*[jnp.zeros((), jnp.int32)] * 4), function, *operands)

    def run(
        self, refs: Tree, at: TileIndex, function: Callable[..., Any], *operands: Array
    ) -> Tree:
        """Computes `function(tile, *operands)`.

        Operands and results are `[t, s]`, or `[t, 1]` for arrays that the function sees as `[t]`.
        """
        values = [array.value(x, at) for array, x in zip(self._arrays, refs, strict=True)]
        t, s = self._tiling
        rows = at.i * t + lax.broadcasted_iota(jnp.int32, (t, 1), 0)
        columns = at.j * s + lax.broadcasted_iota(jnp.int32, (1, s), 1)
        number = jax.ShapeDtypeStruct((), jnp.int32)
        places = [jax.ShapeDtypeStruct((n,), jnp.int32) for n in (t, s)]
        seen = [
            jax.ShapeDtypeStruct(x.shape[:1] if x.shape[1] == 1 else x.shape, x.dtype)
            for x in operands
        ]
        parts = [jax.ShapeDtypeStruct(x.at_tile, x.dtype) for x in self._arrays]

        def at_tile(
            leaves: list[Array], b: Array, h: Array, rows: Array, columns: Array, *operands: Array
        ) -> Tree:
            spec = jax.tree.unflatten(self._treedef, leaves)
            pairs = (spec.q_positions, rows), (spec.kv_positions, columns)
            spans = (slicing.span_in_kernel(*x) for x in pairs)
            return function(slicing.HeadTile(spec, b, h, *spans), *operands)

        return _run(
            at_tile,
            (values, at.b, at.h, rows, columns, *operands),
            (parts, number, number, *places, *seen),
            self._tiling,
        )
