"""The arrays of caches: how tokens are written to slots and pages, and how pages are read.

`Stored` keys or values are one array, or the two arrays of a `Quantized`: the axes of `[B, K, S]`
come first in each of them.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jattn._explicit import partition_spec_of, partitioned_by_xla, sharding_of
from jattn._types import Shape, Size
from jattn.cache.quantized import Quantized, as_floats, converted, storage_dtype, zeros
from jattn.checks import check_flag, check_size


Stored = Float[Array, "B K S H"] | Quantized


def _shardings(stored: Stored, *_: Any) -> Any:
    return jax.tree.map(partition_spec_of, stored)


@jax.jit
@partitioned_by_xla(_shardings)
def write(buffer: Stored, tokens: Any, slots: Int[Array, "B T"]) -> Stored:
    """Writes tokens `[B, T, K, H]` to slots of their batch rows; leaves out tokens with slot S."""
    tokens = jax.tree.map(lambda x: jnp.swapaxes(x, 1, 2), converted(tokens, buffer.dtype))

    def write_head(buffer: Stored, tokens: Stored, slots: Array) -> Stored:
        # drop: leaves out slots beyond the end
        return jax.tree.map(lambda x, y: x.at[slots].set(y, mode="drop"), buffer, tokens)

    # `vmap` over batch rows, not an index, shows XLA that batch rows on different devices are
    # independent. `vmap` over heads keeps the layout: for an index XLA for TPUs would copy the
    # buffer into a layout in which the heads of a token are adjacent, and back.
    slots = jnp.broadcast_to(slots[:, None], tokens.shape[:3])
    return jax.vmap(jax.vmap(write_head))(buffer, tokens, slots)


def empty(
    shape: Shape, head_size: int, value_size: int | None, dtype: Any
) -> tuple[Stored, Stored]:
    """Returns the keys and values of an empty cache: zeros `[*shape, H]` and `[*shape, V]`."""
    value_size = head_size if value_size is None else value_size
    check_size("head_size", head_size)
    check_size("value_size", value_size, 0)  # 0 in a `LatentCache`
    dtype = storage_dtype("dtype", dtype, head_size=head_size, value_size=value_size)
    return zeros((*shape, head_size), dtype), zeros((*shape, value_size), dtype)


def positions_of(positions: bool, shape: Shape) -> Array | None:
    """Returns zeros for the positions in slots `[B, S]` or pages `[P, p]`, or None without them."""
    check_flag("positions", positions)
    return jnp.zeros(shape, jnp.int32) if positions else None


def write_positions(write: Any, buffer: Any, positions: Any, *indices: Any) -> Any:
    """Writes positions `[B, T]` as `write` or `write_pages` writes keys with one head of size 1."""
    if buffer is None:
        return None
    by_head = write(buffer[:, None, :, None], positions[:, :, None, None], *indices)
    return by_head[:, 0, :, 0]


def no_tokens(batch: Size) -> tuple[Array, Array]:
    """Returns the lengths and overflow flags of empty batch rows."""
    return jnp.zeros(batch, jnp.int32), jnp.zeros(batch, bool)


@jax.jit
@partitioned_by_xla(_shardings)
def write_pages(
    pool: Stored,
    tokens: Float[Array, "B T K H"],
    index: Int[Array, "B T 2"],
    copies: tuple[Int[Array, " B"], Int[Array, " B"]],
) -> Stored:
    """Copies pages within the pool, then writes tokens.

    `copies` are the pages to copy from, and the pages to copy to. `index` is the page of each token
    and its slot there. Nothing is written to page P, which does not exist.

    As in `write`, heads are a batch axis of the scatter. The scatter is written out, because `at[]`
    under `vmap` would transpose the pool `[P, K, p, H]` to make K its first axis.
    """
    sources, destinations = copies
    index = jnp.broadcast_to(index[:, :, None], (*tokens.shape[:3], 2))

    def write_array(pool: Array, tokens: Array) -> Array:
        pool = pool.at[destinations].set(pool.at[sources].get(mode="clip"), mode="drop")
        axes = jax.lax.ScatterDimensionNumbers(
            update_window_dims=tuple(range(3, pool.ndim)),
            inserted_window_dims=(0, 2),
            scatter_dims_to_operand_dims=(0, 2),
            operand_batching_dims=(1,),
            scatter_indices_batching_dims=(2,),
        )
        drop = jax.lax.GatherScatterMode.FILL_OR_DROP
        return jax.lax.scatter(pool, index, tokens, axes, mode=drop)

    return jax.tree.map(write_array, pool, converted(tokens, pool.dtype))


def _read_shardings(pool: Stored, table: Array) -> PartitionSpec:
    (heads,) = {sharding_of(x)[1] for x in jax.tree.leaves(pool)}
    return PartitionSpec(sharding_of(table)[0], heads, None, None)


@jax.jit
@partitioned_by_xla(_read_shardings)
def read_pages(pool: Stored, table: Int[Array, "B m"]) -> Float[Array, "B K S H"]:
    """Gathers the pages of a table and concatenates the pages of each batch row: S = m · p."""

    def read_array(pool: Array) -> Array:
        pages = jnp.swapaxes(pool.at[table].get(mode="clip"), 1, 2)  # [B, K, m, p, ...]
        B, K, m, p, *rest = pages.shape
        return pages.reshape(B, K, m * p, *rest)

    return as_floats(jax.tree.map(read_array, pool))
