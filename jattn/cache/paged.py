"""`PagedCache`: tokens in pages of a pool that all batch rows share."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jattn._explicit import typed_like
from jattn._pytree import array_field, pytree_dataclass
from jattn._types import Size
from jattn.cache.base import Cache, Positions, Valid, check_counts, count_tokens, select_rows
from jattn.cache.pages import allocate, count_pages
from jattn.cache.paths import read_pooled
from jattn.cache.rows import chosen, put_rows
from jattn.cache.storage import (
    Stored,
    empty,
    no_tokens,
    positions_of,
    read_pages,
    write_pages,
    write_positions,
)
from jattn.checks import check_size, check_sizes
from jattn.functions.integers import is_known


@pytree_dataclass
class PagedCache(Cache):
    """A cache of tokens in pages of a common pool (Kwon et al. 2023, PagedAttention).

    The pool, `keys [P, K, p, H]` and `values [P, K, p, V]`, has P pages of p tokens for all batch
    rows together; page `table[b, m]` holds the tokens m · p to (m + 1) · p − 1 of batch row b.
    After `reorder` batch rows may share pages, as beams of one prompt do. A batch row that appends
    to a shared page copies the page first; if all batch rows that share a page append to it, one of
    them needs no copy. A page that no batch row holds is free.

    >>> cache = jattn.cache.PagedCache.create(2, 16, 2, 8, page_size=4).append(k, v)
    >>> cache.num_pages, cache.pages_held().tolist()
    (8, [1, 1, 1, 1, 0, 0, 0, 0])
    """

    keys: Any = array_field("P K p H")
    values: Any = array_field("P K p V")
    table: Any = array_field("B M")
    lengths: Any = array_field("B")
    overflowed: Any = array_field("B")
    positions: Any = array_field("P p", default=None)
    is_kind = True

    @classmethod
    def create(
        cls,
        batch: Size,
        length: int,
        num_kv_heads: int,
        head_size: int,
        value_size: int | None = None,
        dtype: Any = jnp.float32,
        page_size: int = 16,
        num_pages: int | None = None,
        positions: bool = False,
    ) -> "PagedCache":
        """Creates an empty cache for `batch` rows of up to `length` tokens, in pages of `page_size`
        tokens.

        `num_pages` is the number of pages in the pool, by default as many as all batch rows need
        when they are full. Fewer suffice if batch rows are shorter or share pages. With
        `positions=True` the cache keeps the position of each token, for `append(..., positions=)`.
        """
        check_sizes(batch=batch, length=length, num_kv_heads=num_kv_heads, page_size=page_size)
        per_row = -(-length // page_size)
        pages = batch * per_row if num_pages is None else num_pages
        check_size("num_pages", pages)
        shape = (pages, num_kv_heads, page_size)
        table = jnp.full((batch, per_row), pages, jnp.int32)
        stored_positions = positions_of(positions, (pages, page_size))
        return cls(
            *empty(shape, head_size, value_size, dtype), table, *no_tokens(batch), stored_positions
        )

    @property
    def page_size(self) -> int:
        """The number of tokens in a page."""
        return self.keys.shape[2]

    @property
    def num_pages(self) -> Size:
        """P: the number of pages in the pool."""
        return self.keys.shape[0]

    @property
    def capacity(self) -> Size:
        return self.table.shape[1] * self.page_size

    @property
    def kv_positions(self) -> Int[Array, "B S"] | None:
        if self.positions is None:
            return None
        return read_pages(self.positions[:, None, :, None], self.table)[:, 0, :, 0]

    def pages_held(self) -> Int[Array, " P"]:
        """Returns the number of batch rows that hold each page."""
        return count_pages(self._table_in_use(), size=self.num_pages)

    @property
    def num_free_pages(self) -> Int[Array, ""]:
        """The number of pages that no batch row holds."""
        return jnp.sum(self.pages_held() == 0, dtype=jnp.int32)

    def _in_use(self) -> Bool[Array, "B M"]:
        """Returns which pages of the table hold tokens of the batch row."""
        m = jnp.arange(self.table.shape[1], dtype=jnp.int32)[None, :]
        return m * self.page_size < self.lengths[:, None]

    def _table_in_use(self) -> Int[Array, "B M"]:
        """Returns the table, with P in place of pages in which a batch row has no tokens."""
        return jnp.where(self._in_use(), self.table, self.num_pages)

    def read(self) -> tuple[Float[Array, "B K S H"], Float[Array, "B K S V"]]:
        return self._gather(self.table)

    def pages(self) -> tuple[Stored, Stored, Int[Array, "B M"]]:
        return self.keys, self.values, self._table_in_use()

    def block(
        self, start: Any, size: int
    ) -> tuple[Float[Array, "B K s H"], Float[Array, "B K s V"]]:
        first_page, count = start // self.page_size, size // self.page_size
        return self._gather(jax.lax.dynamic_slice_in_dim(self.table, first_page, count, axis=1))

    def _gather(self, table: Int[Array, "B m"]) -> tuple[Array, Array]:
        return read_pages(self.keys, table), read_pages(self.values, table)

    def _tokens_at(self, slots: Int[Array, "B A"]) -> tuple[Any, Any, Any]:
        pages = jnp.take_along_axis(self.table, slots // self.page_size, axis=1, mode="clip")
        positions = None if self.positions is None else self.positions[:, None]
        pools = self.keys, self.values, positions
        key, value, positions = read_pooled(pools, pages, slots % self.page_size)
        return key, value, None if positions is None else positions[:, :, 0]

    def _extended(self, key: Any, value: Any, valid: Valid, positions: Positions) -> "PagedCache":
        T = key.shape[1]
        uncapped_lengths = self.lengths + count_tokens(T, valid)
        check_counts(uncapped_lengths, self.capacity, "capacity")
        lengths = jnp.minimum(uncapped_lengths, self.capacity)
        page_size = self.page_size
        table, copies, lacks_pages = allocate(
            self.pages_held(), self.table, self.lengths, lengths, page_size=page_size
        )
        self._check_pages(lacks_pages, "append")
        slots = self.next_positions(T, valid)
        m = jnp.minimum(slots // page_size, table.shape[1] - 1)
        pages = jnp.take_along_axis(table, m, axis=1)
        pages = jnp.where(self._fits(slots, valid), pages, self.num_pages)
        index = jnp.stack([pages, slots % page_size], axis=-1)
        new_positions = self.next_positions(T, valid, positions)
        overflowed = self._lost(positions) | (uncapped_lengths > self.capacity) | lacks_pages
        keys = write_pages(self.keys, key, index, copies)
        values = write_pages(self.values, value, index, copies)
        stored = write_positions(write_pages, self.positions, new_positions, index, copies)
        return typed_like(PagedCache(keys, values, table, lengths, overflowed, stored), self)

    def _check_pages(self, lacks_pages: Bool[Array, " B"], owner: str) -> None:
        """Raises ValueError if a batch row lacks a free page, unless this is traced."""
        if is_known(lacks_pages) and np.any(np.asarray(lacks_pages)):
            raise ValueError(
                f"{owner}: no free page for batch row {int(np.argmax(np.asarray(lacks_pages)))}, "
                f"all num_pages = {self.num_pages} are in use"
            )

    def admit(self, rows: Any, other: Any) -> "PagedCache":
        """Returns the cache with other batch rows in place of its own, see `Cache.admit`. If pages
        are lacking, ValueError is raised or, in a compiled program, batch rows are flagged."""
        admitted = super().admit(rows, other)
        is_lacking = admitted._in_use() & (admitted.table == self.num_pages)
        self._check_pages(chosen(rows, len(self.lengths)) & jnp.any(is_lacking, axis=1), "admit")
        return admitted

    def _admitted(self, rows: Int[Array, " R"], other: Any) -> "PagedCache":
        emptied = put_rows(self.lengths, rows, jnp.zeros_like(other.lengths))
        lengths = put_rows(self.lengths, rows, other.lengths)
        overflowed = put_rows(self.overflowed, rows, other.overflowed)
        holders = dataclasses.replace(self, lengths=emptied).pages_held()
        table, _, lacks_pages = allocate(
            holders, self.table, emptied, lengths, page_size=self.page_size
        )
        M = min(self.table.shape[1], other.table.shape[1])
        sources = other._table_in_use()[:, :M]
        is_used = (sources < other.num_pages) & (rows < len(self.lengths))[:, None]
        pages = jnp.where(is_used, table.at[rows, :M].get(mode="clip"), self.num_pages)

        def copy(pool: Array, other_pool: Array) -> Array:
            return pool.at[pages].set(other_pool.at[sources].get(mode="clip"), mode="drop")

        pools, other_pools = ((x.keys, x.values, x.positions) for x in (self, other))
        keys, values, positions = jax.tree.map(copy, pools, other_pools)
        return PagedCache(keys, values, table, lengths, overflowed | lacks_pages, positions)

    def _selected(self, rows: Array, out_of_range: Array) -> "PagedCache":
        # The pool has no batch axis, and stays unchanged.
        without_pool = dataclasses.replace(self, keys=None, values=None, positions=None)
        selected = select_rows(without_pool, rows, out_of_range)
        pool: Any = {name: getattr(self, name) for name in ("keys", "values", "positions")}
        return dataclasses.replace(selected, **pool)
