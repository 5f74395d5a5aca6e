"""A spec as a warpgroup reads it where the rows of a tile belong to several heads.

In decoding there are few queries of each head. The query heads of a group read the same keys, so
one product serves them all: its rows are all queries of the first head, then those of the second,
and so on. Masks and score functions are still asked for one row at a time, at its own head, query
and position; `jax.vmap` makes one function of rows of that.
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
    """T queries of each of `heads` query heads that are together in a tile."""

    T: int
    heads: int

    @classmethod
    def of(cls, T: int, group: int) -> "Grouping":
        """As many heads of a group as have at most 64 queries in all, and divide the group."""
        most = max(1, ROWS // T)
        return cls(T, max(x for x in range(1, group + 1) if group % x == 0 and x <= most))

    @property
    def rows(self) -> int:
        """Rows of a tile that mean something."""
        return self.T * self.heads

    def apart(self, x: Array, N: int, axis: int) -> Array:
        """Axes N and T of an array, of which each may have size 1, as N / heads and 64 rows."""
        before, after = x.shape[:axis], x.shape[axis + 2 :]
        heads = N if x.shape[axis] > 1 else self.heads
        x = jnp.broadcast_to(x, (*before, heads, self.T, *after))
        x = x.reshape(*before, heads // self.heads, self.rows, *after)
        widths = [(0, 0)] * x.ndim
        widths[axis + 1] = (0, ROWS - self.rows)
        return jnp.pad(x, widths, mode="edge")

    def together(self, x: Array, axis: int) -> Array:
        """Axes N / heads and 64 rows of an array as N and T."""
        x = lax.slice_in_dim(x, 0, self.rows, axis=axis + 1)
        before, after = x.shape[:axis], x.shape[axis + 2 :]
        return x.reshape(*before, x.shape[axis] * self.heads, self.T, *after)


class GroupedRefs(SpecRefs):
    """A spec as a warpgroup reads it: arrays along N and T run along N / heads and rows."""

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
        before, after = ([y for y in letters if y == z] for z in ("*B", "S"))
        missing = [len(before) + place for place, y in enumerate("NT") if y not in letters]
        x = jnp.expand_dims(x, missing)
        self.arrays[i] = self.grouping.apart(x, N, len(before))
        self.letters[i] = [*before, "N", "T", *after]

    def tile(self, leaves: list[Any], b: Any, h: Any, rows: Any, columns: Any) -> Any:
        """The tile of these rows of the h-th heads that are together."""
        each, queries = self.grouping.heads, jnp.full_like(rows, self.grouping.T)
        head = jnp.minimum(lax.div(rows, queries), each - 1)  # of rows that mean nothing, the last
        return _Tile(self, leaves, b, h * each + head, lax.rem(rows, queries), columns)

    def at_row(self, leaves: list[Any], b: Any, h: Any, query: Any, columns: Any) -> slicing.Tile:
        """The tile of one row, from that row of arrays that run along rows."""
        leaves = [
            jnp.expand_dims(x, 0) if i in self.grouped and self.by_query[i] else x
            for i, x in enumerate(leaves)
        ]
        return super().tile(leaves, b, h, query[None], columns)


class _Tile(NamedTuple):
    """As `slicing.Tile`, of rows at heads and queries of their own."""

    refs: GroupedRefs
    leaves: list[Any]
    b: Any
    heads: Array
    queries: Array
    columns: Array

    def modify(self, products: Array, masked: bool) -> Array:
        """Scores from products of queries and keys."""
        own = [self.leaves[i] for i in self.refs.grouped]

        def row(head: Any, query: Any, products: Array, own: list[Any]) -> Array:
            given = dict(zip(self.refs.grouped, own, strict=True))
            leaves = [given.get(i, x) for i, x in enumerate(self.leaves)]
            here = self.refs.at_row(leaves, self.b, head, query, self.columns)
            return here.modify(products[None], masked)[0]

        return jax.vmap(row)(self.heads, self.queries, products, own)

    def drop_unscaled(self, weights: Array) -> Array:
        """Dropout is for training."""
        return weights
