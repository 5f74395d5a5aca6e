"""The arrays of a spec inside a kernel whose tiles have rows of several heads.

In decoding each head has few queries. The query heads of a group share their keys, so one product
computes several heads: the rows of a tile are all queries of the first head, then all queries of
the second, and so on. Masks and score functions are evaluated for the head, query and position of
one row, and mapped over the rows by `jax.vmap`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jattn._types import Index
from jattn.kernels.common import slicing
from jattn.kernels.gpu.mosaic.machine.registers import ROWS
from jattn.kernels.gpu.mosaic.tile.spec_refs import SpecRefs
from jattn.spec import Spec, Tiling


class Grouping(NamedTuple):
    """The rows of a tile: T queries of each of `heads` query heads, and padding to 64 rows."""

    T: int
    heads: int

    @classmethod
    def of(cls, T: int, group: int) -> "Grouping":
        """Returns the grouping with the most heads that divide the `group` of query heads and have
        at most 64 queries together."""
        max_heads = max(1, ROWS // T)
        return cls(T, max(x for x in range(1, group + 1) if group % x == 0 and x <= max_heads))

    @property
    def rows(self) -> int:
        """The number of rows of a tile that are queries, not padding."""
        return self.T * self.heads

    def to_rows(self, x: Array, N: int, axis: int) -> Array:
        """Converts the axes N and T of x to N / heads and 64 rows; they start at `axis`, and may
        have size 1."""
        outer, inner = x.shape[:axis], x.shape[axis + 2 :]
        heads = N if x.shape[axis] > 1 else self.heads
        x = jnp.broadcast_to(x, (*outer, heads, self.T, *inner))
        x = x.reshape(*outer, heads // self.heads, self.rows, *inner)
        widths = [(0, 0)] * x.ndim
        widths[axis + 1] = (0, ROWS - self.rows)
        return jnp.pad(x, widths, mode="edge")

    def from_rows(self, x: Array, axis: int) -> Array:
        """Converts the axes N / heads and 64 rows of x to N and T; they start at `axis`."""
        x = lax.slice_in_dim(x, 0, self.rows, axis=axis + 1)
        return x.reshape(*x.shape[:axis], x.shape[axis] * self.heads, self.T, *x.shape[axis + 2 :])


class GroupedRefs(SpecRefs):
    """The arrays of a spec, with N / heads and rows in place of their axes N and T."""

    def __init__(
        self, grouping: Grouping, N: int, spec: Spec, tiling: Tiling, transposed: bool = False
    ):
        assert not transposed  # decoding computes no gradients
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
        missing = [len(batch) + axis for axis, y in enumerate("NT") if y not in letters]
        x = jnp.expand_dims(x, missing)
        self.arrays[i] = self.grouping.to_rows(x, N, len(batch))
        self.letters[i] = [*batch, "N", "T", *keys]

    def tile(self, leaves: list[Any], b: Index, h: Index, rows: Any, columns: Any) -> Any:
        """Returns the tile of `rows` of group h of the heads."""
        heads, queries = self.grouping.heads, jnp.full_like(rows, self.grouping.T)
        head = jnp.minimum(lax.div(rows, queries), heads - 1)  # rows of padding have the last head
        return _GroupedTile(self, leaves, b, h * heads + head, lax.rem(rows, queries), columns)

    def of_row(
        self, leaves: list[Any], b: Index, h: Index, query: Any, columns: Any
    ) -> slicing.HeadTile:
        """Returns the tile of one row; `leaves` are sliced to the row where they run along rows."""
        leaves = [
            jnp.expand_dims(x, 0) if i in self.grouped and self.by_query[i] else x
            for i, x in enumerate(leaves)
        ]
        return super().tile(leaves, b, h, query[None], columns)


class _GroupedTile(NamedTuple):
    """A tile like `slicing.HeadTile`, with the head and the query of each row."""

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
        """Returns the weights unchanged: decoding has no dropout."""
        return weights
