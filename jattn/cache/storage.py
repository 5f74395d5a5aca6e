"""The arrays of caches: how tokens are written to slots and pages, and how pages are read."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jattn._explicit import partition_spec_of, partitioned_by_xla, sharding_of
from jattn._types import Shape, Size
from jattn.checks import check_dtype, check_flag, check_size


@jax.jit
@partitioned_by_xla(lambda buffer, *_: partition_spec_of(buffer))
def write(
    buffer: Float[Array, "B K S H"], tokens: Any, slots: Int[Array, "B T"]
) -> Float[Array, "B K S H"]:
    """Writes tokens `[B, T, K, H]` to slots of their batch rows; leaves out tokens with slot S."""
    tokens = jnp.swapaxes(jnp.asarray(tokens).astype(buffer.dtype), 1, 2)

    def write_head(buffer: Array, tokens: Array, slots: Array) -> Array:
        return buffer.at[slots].set(tokens, mode="drop")  # drop: leaves out slots beyond the end

    # `vmap` over batch rows, not an index, shows XLA that batch rows on different devices are
    # independent. `vmap` over heads keeps the layout: for an index XLA for TPUs would copy the
    # buffer into a layout in which the heads of a token are adjacent, and back.
    slots = jnp.broadcast_to(slots[:, None], tokens.shape[:3])
    return jax.vmap(jax.vmap(write_head))(buffer, tokens, slots)


def empty(shape: Shape, head_size: int, value_size: int | None, dtype: Any) -> tuple[Array, Array]:
    """Returns the keys and values of an empty cache: zeros `[*shape, H]` and `[*shape, V]`."""
    sizes = (head_size, head_size if value_size is None else value_size)
    check_size("head_size", sizes[0])
    check_size("value_size", sizes[1])
    check_dtype("dtype", dtype)
    keys, values = (jnp.zeros((*shape, size), dtype) for size in sizes)
    return keys, values


def positions_of(positions: bool, shape: Shape) -> Array | None:
    """Returns the positions of empty slots `[B, S]` or of pages `[P, p]`; None unless wanted."""
    check_flag("positions", positions)
    return jnp.zeros(shape, jnp.int32) if positions else None


def write_positions(write: Any, buffer: Any, positions: Any, *where: Any) -> Any:
    """Writes positions `[B, T]` as `write` or `write_pages` writes keys with one head of size 1."""
    if buffer is None:
        return None
    by_head = write(buffer[:, None, :, None], positions[:, :, None, None], *where)
    return by_head[:, 0, :, 0]


def no_tokens(batch: Size) -> tuple[Array, Array]:
    """Returns the lengths and overflow flags of empty batch rows."""
    return jnp.zeros(batch, jnp.int32), jnp.zeros(batch, bool)


@jax.jit
@partitioned_by_xla(lambda pool, *_: partition_spec_of(pool))
def write_pages(
    pool: Float[Array, "P K p H"],
    tokens: Float[Array, "B T K H"],
    index: Int[Array, "B T 2"],
    copies: tuple[Int[Array, " B"], Int[Array, " B"]],
) -> Float[Array, "P K p H"]:
    """Copies pages within the pool, then writes tokens.

    `copies` are the pages to copy from, and the pages to copy to. `index` is the page of each token
    and its slot there. Nothing is written to page P, which does not exist.

    As in `write`, heads are a batch axis of the scatter. The scatter is written out, because `at[]`
    under `vmap` would transpose the pool `[P, K, p, H]` to make K its first axis.
    """
    sources, destinations = copies
    pool = pool.at[destinations].set(pool.at[sources].get(mode="clip"), mode="drop")
    tokens = tokens.astype(pool.dtype)
    index = jnp.broadcast_to(index[:, :, None], (*tokens.shape[:3], 2))
    axes = jax.lax.ScatterDimensionNumbers(
        update_window_dims=(3,),
        inserted_window_dims=(0, 2),
        scatter_dims_to_operand_dims=(0, 2),
        operand_batching_dims=(1,),
        scatter_indices_batching_dims=(2,),
    )
    drop = jax.lax.GatherScatterMode.FILL_OR_DROP
    return jax.lax.scatter(pool, index, tokens, axes, mode=drop)


@jax.jit
@partitioned_by_xla(
    lambda pool, table: PartitionSpec(sharding_of(table)[0], sharding_of(pool)[1], None, None)
)
def read_pages(pool: Float[Array, "P K p H"], table: Int[Array, "B m"]) -> Float[Array, "B K S H"]:
    """Gathers the pages of a table and concatenates the pages of each batch row: S = m · p."""
    pages = jnp.swapaxes(pool.at[table].get(mode="clip"), 1, 2)  # [B, K, m, p, H]
    return pages.reshape(*pages.shape[:2], -1, pages.shape[-1])
