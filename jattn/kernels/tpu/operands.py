"""A spec's arrays as kernels in Pallas take them on TPUs.

What runs along T or S comes cut to the tile; numbers of a batch row and head, and arrays that
functions look up, lie in scalar memory. In a kernel `SpecOperands.run` calls a function with the
tile; it computes on arrays of two axes, see `tile_functions`.
"""

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

from jattn._pytree import axis_names
from jattn._types import Index, Ref, Tree
from jattn.kernels.common import slicing
from jattn.kernels.tpu import tile_functions
from jattn.spec import Spec, Tiling


LANES = 128  # of a register: along them lies the last axis of an array


class TileIndex(NamedTuple):
    """Where a tile is: batch row, head, block of queries and block of keys."""

    b: Index
    h: Index
    i: Index
    j: Index


def column(row: Array) -> Array:
    """`[1, t]` as `[t, 1]`."""
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T[:, :1]


def row(column: Array) -> Array:
    """The inverse."""
    return jnp.broadcast_to(column, (column.shape[0], LANES)).T[:1]


class _Part(NamedTuple):
    """One array of a spec: how many batch rows and heads have their own, its other axes, of these
    what a tile is given, and whether it runs along T and along S."""

    outer: tuple[int, int]
    own: tuple[int, ...]
    at_tile: tuple[int, ...]
    along: tuple[bool, bool]
    dtype: DTypeLike
    looked_up: bool  # by functions, which may index it as they like

    @classmethod
    def of(cls, leaf: Array, letters: str, tiling: Tiling) -> "_Part":
        names = letters.replace("#", "").split() or [""] * leaf.ndim
        sizes = dict(zip(names, leaf.shape, strict=True))
        own = [(x, n) for x, n in zip(names, leaf.shape, strict=True) if x not in ("*B", "N")]
        cut = dict(zip("TS", tiling, strict=True))
        # Heads stand first, but in a table of buckets: that one is looked up whole.
        behind = "N" in names[1:] and names[0] != "*B"
        return cls(
            (sizes.get("*B", 1), 1 if behind else sizes.get("N", 1)),
            tuple(leaf.shape) if behind else tuple(n for _, n in own),
            tuple(n for _, n in own) if behind else tuple(min(n, cut.get(x, n)) for x, n in own),
            (sizes.get("T", 1) > 1, sizes.get("S", 1) > 1),
            leaf.dtype,
            bool(leaf.ndim) and not set(names) <= {"*B", "N", "T", "S"},
        )

    @property
    def by_head_behind(self) -> bool:
        return len(self.own) > len(self.at_tile)

    @property
    def in_blocks(self) -> bool:
        return any(self.along)

    def array(self, leaf: Array) -> Array:
        """As it is passed: `[B or 1, N or 1, t, s]` in blocks, else all numbers in a row."""
        if self.in_blocks:
            both = all(self.along)
            last = self.own[-2:] if both else (1, math.prod(self.own))
            leaf = leaf.reshape(*self.outer, *last)
            small = jnp.int8 if both else jnp.int32
        else:
            leaf, small = leaf.reshape(-1), jnp.int32
        return leaf.astype(small) if leaf.dtype == bool else leaf

    def block(self, tiling: Tiling, place: Callable[..., TileIndex], every: bool) -> pl.BlockSpec:
        if not self.in_blocks:
            # Not with the library: this takes longer to import than all of it.
            tpu = importlib.import_module("jax.experimental.pallas.tpu")
            return pl.BlockSpec(memory_space=tpu.SMEM)

        def index(*at: Ref) -> tuple[Any, ...]:
            b, h, i, j = place(*at)
            outer = b if self.outer[0] > 1 else 0, h if self.outer[1] > 1 and not every else 0
            return *outer, *((i, j) if all(self.along) else (0, i if self.along[0] else j))

        heads = self.outer[1] if every else None
        return pl.BlockSpec((None, heads, *self.block_shape(tiling)), index)

    def block_shape(self, tiling: Tiling) -> tuple[int, int]:
        return (tiling.block_q, tiling.block_kv) if all(self.along) else (1, tiling[self.along[1]])

    def value(self, ref: Ref, at: TileIndex) -> Tree:
        """In a kernel: what a tile is given, on two axes."""
        if self.in_blocks:
            every = len(ref.shape) > 2
            found = ref[at.h if self.outer[1] > 1 else 0] if every else ref[...]
            if self.dtype == bool:
                found = found.astype(jnp.int32) != 0
            return found if self.along[1] else column(found)

        def read(place: Index) -> Array:
            found = ref[place]
            return found != 0 if self.dtype == bool else found

        size = math.prod(self.at_tile)
        if self.by_head_behind:  # [buckets, N]
            heads = self.own[1]
            own = at.h if heads > 1 else 0
            return tile_functions.LookUp(self.at_tile, self.dtype, lambda x: read(x * heads + own))
        place = (at.b if self.outer[0] > 1 else 0) * self.outer[1]
        start = (place + (at.h if self.outer[1] > 1 else 0)) * size
        if size == 1 and not self.looked_up:
            return read(start)
        return tile_functions.LookUp(self.at_tile, self.dtype, lambda x: read(start + x))

    @property
    def expected(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.at_tile, self.dtype)


class SpecOperands:
    """A spec as a kernel takes it: `arrays` to pass in `blocks`, and `run` to compute with them.

    A program has one head, or `every_head`; the blocks of that have all heads.
    """

    def __init__(self, spec: Spec, tiling: Tiling, every_head: bool = False):
        leaves, self._treedef = jax.tree.flatten(spec)
        letters = jax.tree.leaves(axis_names(spec))
        self._tiling, self._every_head = tiling, every_head
        self._parts = [_Part.of(*x, tiling) for x in zip(leaves, letters, strict=True)]
        self.arrays = [x.array(leaf) for x, leaf in zip(self._parts, leaves, strict=True)]

    @property
    def scalar_entries(self) -> int:
        """How many numbers lie in scalar memory."""
        parts = zip(self._parts, self.arrays, strict=True)
        return sum(x.size for part, x in parts if not part.in_blocks)

    @property
    def block_entries(self) -> int:
        """How many numbers a program is given in blocks, in whole registers of 32 bits."""
        shapes = [
            (x.outer[1] if self._every_head else 1, *x.block_shape(self._tiling))
            for x in self._parts
            if x.in_blocks
        ]
        return sum(heads * max(t, 8) * s for heads, t, s in shapes)

    def blocks(self, place: Callable[..., TileIndex]) -> list[pl.BlockSpec]:
        """How the arrays are cut for a program whose tile `place(*indices)` gives."""
        return [part.block(self._tiling, place, self._every_head) for part in self._parts]

    def traced(self, function: Callable[..., Any], *operands: Array) -> Tree:
        """`run` at the first tile, outside of a kernel."""
        refs = [
            jnp.zeros(part.block_shape(self._tiling), x.dtype) if part.in_blocks else x
            for part, x in zip(self._parts, self.arrays, strict=True)
        ]
        zero = jnp.zeros((), jnp.int32)
        return self.run(function, refs, TileIndex(zero, zero, zero, zero), *operands)

    def run(
        self, function: Callable[..., Any], refs: Tree, at: TileIndex, *operands: Array
    ) -> Tree:
        """`function(tile, *operands)`. Operands are `[t, s]`, or `[t, 1]` for what the function
        sees as `[t]`; so are the results."""
        values = [part.value(x, at) for part, x in zip(self._parts, refs, strict=True)]
        t, s = self._tiling
        rows = at.i * t + lax.broadcasted_iota(jnp.int32, (t, 1), 0)
        columns = at.j * s + lax.broadcasted_iota(jnp.int32, (1, s), 1)
        number = jax.ShapeDtypeStruct((), jnp.int32)
        places = [jax.ShapeDtypeStruct((n,), jnp.int32) for n in (t, s)]
        seen = [
            jax.ShapeDtypeStruct(x.shape[:1] if x.shape[1] == 1 else x.shape, x.dtype)
            for x in operands
        ]
        expected = [x.expected for x in self._parts], number, number, *places, *seen
        given = values, at.b, at.h, rows, columns, *operands

        def here(
            leaves: list[Array], b: Array, h: Array, rows: Array, columns: Array, *operands: Array
        ) -> Tree:
            spec = jax.tree.unflatten(self._treedef, leaves)
            pairs = (spec.q_positions, rows), (spec.kv_positions, columns)
            spans = (slicing.span_in_kernel(*x) for x in pairs)
            return function(slicing.HeadTile(spec, b, h, *spans), *operands)

        return tile_functions.run(here, given, expected, self._tiling)
