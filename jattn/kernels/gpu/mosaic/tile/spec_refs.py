"""A spec's arrays as a warpgroup reads them in a kernel."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.typing import DTypeLike
from jaxtyping import Array

from jattn._types import Index, Tree
from jattn.kernels.common import slicing
from jattn.kernels.gpu.mosaic.tile import kernel_refs, mosaic_interpreter
from jattn.kernels.gpu.mosaic.tile.kernel_refs import TileIndex
from jattn.kernels.gpu.mosaic.tile.lookup import Table
from jattn.masks import Span
from jattn.spec import Spec, Tiling


class SpecRefs(kernel_refs.SpecRefs):
    """A spec as a warpgroup reads it. Booleans are bytes, as they are in memory; arrays along T and
    S are transposed where tiles are; those that functions index, `tables`, are flat."""

    def __init__(self, spec: Spec, tiling: Tiling, transposed: bool = False):
        super().__init__(spec, tiling)
        self.boolean = [x.dtype == bool for x in self.arrays]
        self.arrays = [x.astype(jnp.int8) if x.dtype == bool else x for x in self.arrays]
        self.turned = [transposed and {"T", "S"} <= set(x) for x in self.letters]
        self.tables: dict[int, tuple[Table, list[str]]] = {}
        for i, (x, index) in enumerate(self.parts(self.arrays, TileIndex(0, 0, 0, 0))):
            if None in index:
                self._flatten(i, x)
            elif self.turned[i]:
                self._turn(i)

    def _flatten(self, i: int, x: Array) -> None:
        if {"T", "S"} & set(self.letters[i]):
            raise NotImplementedError("to look up entries of an array along T or S")
        if x.size > np.iinfo(np.int32).max:
            raise NotImplementedError(f"to look up entries of an array of {x.size} numbers")
        self.tables[i] = Table(i, x.shape, x.dtype), self.letters[i]
        self.arrays[i], self.letters[i] = x.reshape(-1), ["entries"]

    def _turn(self, i: int) -> None:
        names = self.letters[i]
        t, s = names.index("T"), names.index("S")
        self.arrays[i] = self.arrays[i].swapaxes(t, s)
        self.letters[i] = [{"T": "S", "S": "T"}.get(x, x) for x in names]

    def at(
        self, leaves: list[Any], b: Index, h: Index, rows: Array, columns: Array
    ) -> slicing.HeadTile:
        """The tile of these parts of the arrays, at these places. Of tables there are no parts."""
        pairs = zip(leaves, self.boolean, strict=True)
        leaves = [x != 0 if boolean and x is not None else x for x, boolean in pairs]
        for i, (table, letters) in self.tables.items():
            selected = self._index(table, letters, TileIndex(b, h, 0, 0))
            leaves[i] = table.seen(selected, self.boolean[i])
        found = self.assembled(leaves, b, h, rows, columns)
        if self.tables:  # which may be read by the diagonals of whole matrices
            return found
        if found.spec.q_positions is None and found.spec.kv_positions is None:
            return found._replace(rows=Span(rows, rows), columns=Span(columns, columns))
        return found

    def example(self) -> tuple[Callable[..., Any], Any]:
        """A function from a tile's products to scores and their derivative, and operands of it, to
        be traced."""
        rows, columns = (jnp.arange(size, dtype=jnp.int32) for size in self.sizes.values())
        zero = jnp.zeros((), jnp.int32)
        place = TileIndex(zero, zero, zero, zero)
        parts = [_part(x, index) for x, index in self.parts(self.arrays, place)]
        parts = [x if x is None or not y else x.T for x, y in zip(parts, self.turned, strict=True)]
        products = jnp.zeros(tuple(self.sizes.values()), jnp.float32)

        def modify(*operands: Tree) -> Tree:
            *at, products = operands
            score, pull = jax.vjp(lambda x: self.at(*at).modify(x, True), products)
            return score, pull(score)

        return modify, (parts, zero, zero, rows, columns, products)

    def run_example(self, function: Callable[..., Any], operands: Tree) -> Tree:
        """A function of the operands of `example`, in registers."""
        given = jax.tree.map(jnp.squeeze, operands)

        def zeros(dtype: DTypeLike, at: Array, axes: str) -> Array:
            return jnp.zeros(at.shape, dtype)

        tables = {i: functools.partial(zeros, x.dtype) for i, (x, _) in self.tables.items()}
        shapes = types(operands)
        return mosaic_interpreter.run(function, *given, tables=tables, shapes=shapes)

    def differs_by_key(self) -> bool:
        """Whether a tile reads numbers for each of its keys."""
        return bool(self.tables) or any("S" in x for x in self.letters)

    @property
    def varying(self) -> list[int]:
        """Which arrays tiles of a head read different parts of."""
        parts = {"T", "S", "entries"}
        return [i for i, letters in enumerate(self.letters) if parts & set(letters)]

    def along(self, letter: str) -> list[int]:
        """Which arrays run along a letter only, of each batch row and head: a tile's part of them
        can be copied as it is. Their numbers have 4 bytes, so that parts start at multiples of
        128."""
        return [
            i
            for i, (x, letters) in enumerate(zip(self.arrays, self.letters, strict=True))
            if letters[-1:] == [letter]
            and set(letters) <= {"*B", "N", letter}
            and x.shape[-1] > 1
            and x.dtype.itemsize == 4
        ]


def _part(memory: Array, index: tuple[Any, ...]) -> Array | None:
    if None in index:
        return None
    return jnp.zeros([x.size for x in index if isinstance(x, pl.Slice)], memory.dtype)


def types(operands: Tree, transposed: bool = False) -> Any:
    step = -1 if transposed else 1
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[::step], x.dtype), operands)
