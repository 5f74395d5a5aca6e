"""A spec as a warpgroup reads it if the rows of a tile belong to several heads.

Decoding has few queries of each head. The query heads of a group share keys, so one product serves
them all: its rows are all queries of the first head, then those of the second, and so on. Masks and
score functions are evaluated for one row at a time, at its head, query and position; `jax.vmap`
makes functions of rows of these.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jattn.kernels.common import slicing
from jattn.kernels.gpu.mosaic.machine.registers import ROWS
from jattn.kernels.gpu.mosaic.tile.spec_refs import SpecRefs
from jattn.spec import Spec, Tiling


class Grouping(NamedTuple):
    """T queries of each of `heads` query heads, whose rows are in one tile."""

    T: int
    heads: int

    @classmethod
    def of(cls, T: int, group: int) -> "Grouping":
        """Takes the most heads of a group that have at most 64 queries together and divide it."""
        most = max(1, ROWS // T)
        return cls(T, max(x for x in range(1, group + 1) if group % x == 0 and x <= most))

    @property
    def rows(self) -> int:
        """The number of rows of a tile that are queries."""
        return self.T * self.heads

    def to_rows(self, x: Array, N: int, axis: int) -> Array:
        """Converts axes N and T of an array, which may have size 1, to N / heads and 64 rows."""
        outer, inner = x.shape[:axis], x.shape[axis + 2 :]
        heads = N if x.shape[axis] > 1 else self.heads
        x = jnp.broadcast_to(x, (*outer, heads, self.T, *inner))
        x = x.reshape(*outer, heads // self.heads, self.rows, *inner)
        widths = [(0, 0)] * x.ndim
        widths[axis + 1] = (0, ROWS - self.rows)
        return jnp.pad(x, widths, mode="edge")

    def from_rows(self, x: Array, axis: int) -> Array:
        """Converts axes N / heads and 64 rows of an array to N and T."""
        x = lax.slice_in_dim(x, 0, self.rows, axis=axis + 1)
        return x.reshape(*x.shape[:axis], x.shape[axis] * self.heads, self.T, *x.shape[axis + 2 :])


class GroupedRefs(SpecRefs):
    """A spec as a warpgroup reads it; arrays along N and T run along N / heads and rows."""

    def __init__(
        self, grouping: Grouping, N: int, spec: Spec, tiling: Tiling, transposed: bool = False
    ):
        assert not transposed  # there are gradients of keys in training only
        super().__init__(spec, tiling)
        self.grouping, self.by_query = grouping, [x.count("T") > 0 for x in self.letters]
        self.grouped = [i for i in range(len(self.arrays)) if self._runs_along_rows(i)]
        for i in self.grouped:
            self._group(i, N)

    def _runs_along_rows(self, i: int) -> bool:
        sizes = zip(self.letters[i], self.arrays[i].shape, strict=False)
        return i not in self.tables and any(x in ("N", "T") and size > 1 for x, size in sizes)

    def _group(self, i: int, N: int) -> None:
        x, letters = self.arrays[i], self.letters[i]
        batch, keys = ([y for y in letters if y == z] for z in ("*B", "S"))
        missing = [len(batch) + place for place, y in enumerate("NT") if y not in letters]
        x = jnp.expand_dims(x, missing)
        self.arrays[i] = self.grouping.to_rows(x, N, len(batch))
        self.letters[i] = [*batch, "N", "T", *keys]

    def tile(self, leaves: list[Any], b: Any, h: Any, rows: Any, columns: Any) -> Any:
        """Returns the tile of these rows of the h-th group of heads."""
        heads, queries = self.grouping.heads, jnp.full_like(rows, self.grouping.T)
        head = jnp.minimum(lax.div(rows, queries), heads - 1)  # the last for rows of padding
        return _GroupedTile(self, leaves, b, h * heads + head, lax.rem(rows, queries), columns)

    def of_row(
        self, leaves: list[Any], b: Any, h: Any, query: Any, columns: Any
    ) -> slicing.HeadTile:
        """Returns the tile of one row, from that row of arrays that run along rows."""
        leaves = [
            jnp.expand_dims(x, 0) if i in self.grouped and self.by_query[i] else x
            for i, x in enumerate(leaves)
        ]
        return super().tile(leaves, b, h, query[None], columns)


class _GroupedTile(NamedTuple):
    """A tile like `slicing.HeadTile`, each of whose rows has its head and query."""

    refs: GroupedRefs
    leaves: list[Any]
    b: Any
    heads: Array
    queries: Array
    columns: Array

    def modify(self, products: Array, masked: bool) -> Array:
        """Computes scores from products of queries and keys."""

        def row(head: Any, query: Any, products: Array, grouped: list[Any]) -> Array:
            parts = dict(zip(self.refs.grouped, grouped, strict=True))
            leaves = [parts.get(i, x) for i, x in enumerate(self.leaves)]
            tile = self.refs.of_row(leaves, self.b, head, query, self.columns)
            return tile.modify(products[None], masked)[0]

        grouped = [self.leaves[i] for i in self.refs.grouped]
        return jax.vmap(row)(self.heads, self.queries, products, grouped)

    def drop_unscaled(self, weights: Array) -> Array:
        """Returns the weights unchanged: dropout is for training."""
        return weights
