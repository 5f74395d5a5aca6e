"""The allocation of a pool's pages to batch rows."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Int

from jattn._explicit import partition_spec_of, partitioned_by_xla
from jattn._types import Size


@functools.partial(jax.jit, static_argnames="size")
@partitioned_by_xla(lambda *_, **__: PartitionSpec(None))
def count_pages(pages: Int[Array, "B M"], *, size: Size) -> Int[Array, " P"]:
    """Counts how often each page number below `size` occurs in the table."""
    return jnp.zeros(size, jnp.int32).at[pages].add(1, mode="drop")


def _allocation_shardings(holders: Array, table: Array, lengths: Array, *_: Any, **__: Any) -> Any:
    by_row = partition_spec_of(lengths)
    return partition_spec_of(table), (by_row, by_row), by_row


@functools.partial(jax.jit, static_argnames="page_size")
@partitioned_by_xla(_allocation_shardings)
def allocate(
    holders: Int[Array, " P"],
    table: Int[Array, "B M"],
    old_lengths: Int[Array, " B"],
    lengths: Int[Array, " B"],
    *,
    page_size: int,
) -> tuple[Int[Array, "B M"], tuple[Int[Array, " B"], Int[Array, " B"]], Bool[Array, " B"]]:
    """Allocates pages for batch rows that grow from `old_lengths` to `lengths` tokens.

    `holders` is the number of batch rows that hold each page. Returns the new table, for each batch
    row the page to copy from and the page to copy to (both P for no copy), and which batch rows
    lack a free page.
    """
    P = holders.shape[0]
    num_old, num_new = (-(-x // page_size) for x in (old_lengths, lengths))  # numbers of pages
    last_page = jnp.take_along_axis(table, jnp.maximum(num_old - 1, 0)[:, None], axis=1)[:, 0]
    writes_to_last = (lengths > old_lengths) & (old_lengths % page_size > 0)
    target_page = jnp.where(writes_to_last, last_page, P)
    writers = jnp.zeros(P, jnp.int32).at[target_page].add(1, mode="drop")
    rows = jnp.arange(lengths.shape[0], dtype=jnp.int32)
    first_writer = jnp.full(P, rows.shape[0], jnp.int32).at[target_page].min(rows, mode="drop")
    # A batch row that appends to a shared page copies it. But if all batch rows that hold a page
    # append to it, the first of them may keep it.
    last_page = jnp.minimum(last_page, P - 1)
    keeps = (writers[last_page] == holders[last_page]) & (first_writer[last_page] == rows)
    copies = writes_to_last & (holders[last_page] > 1) & ~keeps
    num_copies = copies.astype(jnp.int32)  # 0 or 1 for each batch row
    num_wanted = num_copies + num_new - num_old
    # Batch row b gets `num_wanted[b]` free pages, from `free[offset[b]]` on: first the page for its
    # copy, if it copies one, then its new pages.
    offset = jnp.cumsum(num_wanted, dtype=jnp.int32) - num_wanted
    free = jnp.argsort(holders > 0, stable=True).astype(jnp.int32)  # free pages come first
    num_free = jnp.sum(holders == 0, dtype=jnp.int32)

    def free_page(index: Array) -> Array:
        return jnp.where(index < num_free, free[jnp.minimum(index, P - 1)], P)

    m = jnp.arange(table.shape[1], dtype=jnp.int32)[None, :]
    is_copy = (m == num_old[:, None] - 1) & copies[:, None]
    is_new = (m >= num_old[:, None]) & (m < num_new[:, None])
    free_index = (offset + num_copies - num_old)[:, None] + m
    table = jnp.where(is_copy, free_page(offset)[:, None], table)
    table = jnp.where(is_new, free_page(free_index), table)
    copy_from_to = jnp.where(copies, last_page, P), jnp.where(copies, free_page(offset), P)
    return table, copy_from_to, (num_wanted > 0) & (offset + num_wanted > num_free)
