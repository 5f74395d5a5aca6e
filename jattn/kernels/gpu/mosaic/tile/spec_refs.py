"""The arrays of a spec inside a kernel, and the part of each that a tile reads.

Masks and score functions are the same inside and outside of kernels. In a kernel their arrays are
references to memory: of an array along B, N, T or S a warpgroup reads the part for its head and
tile. Arrays that functions index stay in memory, each as a `Table`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jaxtyping import Array

from jattn._pytree import axis_names, split_letters
from jattn._types import Index, Tree
from jattn.functions.interval_rules import Interval
from jattn.kernels.common import slicing
from jattn.kernels.gpu.mosaic.tile import mosaic_interpreter
from jattn.kernels.gpu.mosaic.tile.mosaic_interpreter import Table
from jattn.masks import Span
from jattn.spec import Spec, Tiling


class TileIndex(NamedTuple):
    """The index of a tile: batch row, head, first query and first key."""

    b: Any
    h: Any
    row: Any
    column: Any


class SpecRefs:
    """The arrays of a spec in the form in which a kernel receives them.

    arrays: the operands of the kernel. Booleans are bytes; arrays along both T and S are transposed
        if tiles are; arrays that functions index are flat.
    letters: the axis names of each array.
    sizes: the number of queries, "T", and of keys, "S", of a tile.
    tables: the types that functions see of the arrays that they index, by number of the array.
    """

    def __init__(self, spec: Spec, tiling: Tiling, transposed: bool = False):
        leaves, self._structure = jax.tree.flatten(spec)
        self.letters = [*map(split_letters, jax.tree.leaves(axis_names(spec)))]
        self.sizes = dict(zip("TS", tiling, strict=True))
        self.is_boolean = [x.dtype == bool for x in leaves]
        self.is_transposed = [transposed and {"T", "S"} <= set(x) for x in self.letters]
        self.tables: dict[int, jax.ShapeDtypeStruct] = {}
        self._table_letters: dict[int, list[str]] = {}
        self._is_scalar = [x.ndim == 0 for x in leaves]
        arrays = [x.reshape(1) if x.ndim == 0 else x for x in leaves]
        self.arrays = [x.astype(jnp.int8) if x.dtype == bool else x for x in arrays]
        for i, (x, index) in enumerate(self.parts(self.arrays, TileIndex(0, 0, 0, 0))):
            if None in index:
                self._flatten(i, x)
            elif self.is_transposed[i]:
                self._transpose(i)

    def _flatten(self, i: int, x: Array) -> None:
        """Makes array number i a table."""
        if {"T", "S"} & set(self.letters[i]):
            raise NotImplementedError("to look up entries of an array along T or S")
        if x.size > np.iinfo(np.int32).max:
            raise NotImplementedError(
                f"to look up entries of an array of {x.size} entries; expected at most 2147483647"
            )
        self.tables[i] = jax.ShapeDtypeStruct(x.shape, bool if self.is_boolean[i] else x.dtype)
        self._table_letters[i] = self.letters[i]
        self.arrays[i], self.letters[i] = x.reshape(-1), ["entries"]

    def _transpose(self, i: int) -> None:
        """Transposes the axes T and S of array number i."""
        letters = self.letters[i]
        t, s = letters.index("T"), letters.index("S")
        self.arrays[i] = self.arrays[i].swapaxes(t, s)
        self.letters[i] = [{"T": "S", "S": "T"}.get(x, x) for x in letters]

    def parts(self, memory: list[Any], index: TileIndex) -> list[tuple[Any, tuple[Any, ...]]]:
        """Returns each array and the index of a tile's part: None along axes that are looked up."""
        triples = zip(memory, self.letters, self._is_scalar, strict=True)
        return [(x, (0,) if is_scalar else self._index(x, y, index)) for x, y, is_scalar in triples]

    def _index(self, array: Any, letters: list[str], tile: TileIndex) -> tuple[Any, ...]:
        letters = letters or ["captured"] * len(array.shape)
        starts = {"*B": tile.b, "N": tile.h, "T": tile.row, "S": tile.column}
        index: list[Any] = []
        for letter, size in zip(letters, array.shape, strict=True):
            start = starts.get(letter)
            if start is not None and size == 1:
                start = 0
            if start is not None and letter in self.sizes:
                start = pl.ds(start, min(size, self.sizes[letter]))
            index.append(start)
        return tuple(index)

    def tile(
        self, leaves: list[Any], b: Index, h: Index, rows: Array, columns: Array
    ) -> slicing.HeadTile:
        """Returns the tile of `rows` queries and `columns` keys; `leaves` are the arrays' parts for
        it, and whole tables."""
        pairs = enumerate(zip(leaves, self.is_boolean, strict=True))
        leaves = [x != 0 if boolean and i not in self.tables else x for i, (x, boolean) in pairs]
        for i, letters in self._table_letters.items():
            index = self._index(leaves[i], letters, TileIndex(b, h, 0, 0))
            if any(x is not None for x in index):
                leaves[i] = entries_of(leaves[i], *(slice(None) if x is None else x for x in index))
        spec = jax.tree.unflatten(self._structure, leaves)
        if not self.tables and spec.q_positions is None and spec.kv_positions is None:
            return slicing.HeadTile(spec, b, h, Span(rows, rows), Span(columns, columns))
        # With these spans functions do not slice tables by diagonals, see `span_in_kernel`.
        pairs = (spec.q_positions, rows), (spec.kv_positions, columns)
        return slicing.HeadTile(spec, b, h, *(slicing.span_in_kernel(*x) for x in pairs))

    def example(self) -> tuple[Callable[..., Any], Any]:
        """Returns a function that computes the scores of a tile and their derivative, and the types
        of its operands, with which to trace it."""
        number = jax.ShapeDtypeStruct((), jnp.int32)
        rows, columns = (jax.ShapeDtypeStruct((n,), jnp.int32) for n in self.sizes.values())
        parts = self.parts(self.arrays, TileIndex(0, 0, 0, 0))
        leaves = [self.tables.get(i, self._part(i, *part)) for i, part in enumerate(parts)]
        products = jax.ShapeDtypeStruct(tuple(self.sizes.values()), jnp.float32)

        def modify(*operands: Tree) -> Tree:
            *tile, products = operands
            score, pull = jax.vjp(lambda x: self.tile(*tile).modify(x, True), products)
            return score, pull(score)

        return modify, (leaves, number, number, rows, columns, products)

    def _part(self, i: int, array: Array, index: tuple[Any, ...]) -> jax.ShapeDtypeStruct:
        sizes = [x.size for x in index if isinstance(x, pl.Slice)]
        return jax.ShapeDtypeStruct(
            tuple(sizes[:: -1 if self.is_transposed[i] else 1]), array.dtype
        )

    def run_example(self, function: Callable[..., Any], operands: Tree) -> Tree:
        """Computes a function of the operands of `example` by `mosaic_interpreter`, on zeros."""

        def zeros(x: jax.ShapeDtypeStruct) -> Array:
            return jnp.zeros([size for size in x.shape if size != 1], x.dtype)

        def table(x: jax.ShapeDtypeStruct) -> Table:
            stored = jnp.int8 if x.dtype == bool else x.dtype
            return Table(x.shape, x.dtype, lambda places, axes: jnp.zeros(places.shape, stored))

        leaves, *numbers = operands
        parts = [table(x) if i in self.tables else zeros(x) for i, x in enumerate(leaves)]
        return mosaic_interpreter.run(
            function, parts, *jax.tree.map(zeros, numbers), shapes=operands
        )

    def interval(self, i: int) -> Interval | None:
        """Returns the interval that holds the entries of table number i, if it is known.

        It is known for `hoisted.ByBucket.buckets`, which are indices into another table.
        """
        if self._table_letters[i] != ["distances"] or self.tables[i].dtype != jnp.int32:
            return None
        pairs = zip(self._table_letters.values(), self.tables.values(), strict=True)
        buckets = [
            x.shape[letters.index("buckets")] for letters, x in pairs if "buckets" in letters
        ]
        return Interval(np.int32(0), np.int32(max(buckets) - 1))

    def differs_by_key(self) -> bool:
        """Returns whether a tile may read different numbers for each of its keys."""
        return bool(self.tables) or any("S" in x for x in self.letters)

    @property
    def varying(self) -> list[int]:
        """The indices of the arrays of which the tiles of one head read different parts."""
        within_head = {"T", "S", "entries"}
        return [i for i, letters in enumerate(self.letters) if within_head & set(letters)]

    def along(self, letter: str) -> list[int]:
        """Returns the indices of the arrays that run along only one of T and S, named by `letter`.

        A tile's part of such an array can be copied to shared memory: it is contiguous, and as
        numbers have 4 bytes, it starts at a multiple of 128 bytes.
        """
        return [
            i
            for i, (x, letters) in enumerate(zip(self.arrays, self.letters, strict=True))
            if letters[-1:] == [letter]
            and set(letters) <= {"*B", "N", letter}
            and x.shape[-1] > 1
            and x.dtype.itemsize == 4
        ]


def entries_of(table: Array, *index: Any) -> Array:
    """Returns the entries of an array at indices that are known to be inside it."""
    return table.at[index].get(mode="promise_in_bounds", wrap_negative_indices=False)
