"""`Cache.keep`: the accepted path of a tree of drafts moves to the place where the tree began."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Int

from jattn._explicit import partitioned_by_xla, sharding_of
from jattn.checks import check_array
from jattn.functions import integers


def _token_shardings(stored: Any, index: Any, *_: Any) -> Any:
    by_row = sharding_of(index)[0]
    return jax.tree.map(lambda x: PartitionSpec(by_row, None, sharding_of(x)[1]), stored)


@jax.jit
@partitioned_by_xla(_token_shardings)
def read_slots(buffers: Any, slots: Int[Array, "B A"]) -> Any:
    """Returns the tokens `[B, A, K, ...]` in slots of a tree of arrays `[B, K, S, ...]`."""

    def read(x: Array) -> Array:
        index = slots.reshape(slots.shape[0], 1, slots.shape[1], *(1,) * (x.ndim - 3))
        return jnp.swapaxes(jnp.take_along_axis(x, index, axis=2, mode="clip"), 1, 2)

    return jax.tree.map(read, buffers)


@jax.jit
@partitioned_by_xla(_token_shardings)
def read_pooled(pools: Any, pages: Int[Array, "B A"], places: Int[Array, "B A"]) -> Any:
    """Returns the tokens `[B, A, K, ...]` at `places` within `pages` of a tree of arrays
    `[P, K, p, ...]`."""
    return jax.tree.map(lambda x: x.at[pages, :, places].get(mode="clip"), pools)


def checked_path(
    start: Int[Array, " B"], lengths: Int[Array, " B"], places: Any, counts: Any
) -> tuple[Int[Array, "B A"], Bool[Array, "B A"], Bool[Array, " B"]]:
    """Returns the slots of accepted drafts, which of them count, and which batch rows have slots
    or counts out of range, see `Cache.keep`.

    Raises TypeError and ValueError for wrong arrays, and for such slots and counts if they are
    concrete.
    """
    B = len(lengths)
    check_array("places", places, "[B, A]", "integer", rank=2)
    if places.shape[0] != B:
        raise ValueError(f"places: expected [B, A] with B = {B}, got {list(places.shape)}")
    A = places.shape[1]
    counts = np.full(B, A, np.int32) if counts is None else counts
    check_array("counts", counts, "[B]", "integer", shape=(B,))
    least, most = integers.known_range(counts) or (0, 0)
    if least < 0 or most > A:
        got = least if least < 0 else most
        raise ValueError(f"counts: expected 0 <= counts <= A = {A}, got {got}")
    counts, places = (jnp.asarray(integers.clamped(x)) for x in (counts, places))
    clamped = jnp.clip(counts, 0, A)
    is_kept = jnp.arange(A, dtype=jnp.int32)[None, :] < clamped[:, None]
    num_drafts = (lengths - start)[:, None]
    is_wrong = is_kept & ((places < 0) | (places >= num_drafts))
    if integers.is_known(is_wrong) and np.any(np.asarray(is_wrong)):
        row = int(np.argmax(np.asarray(is_wrong).any(axis=1)))
        raise ValueError(
            f"places: expected indices of the {int(num_drafts[row, 0])} tokens from start on in "
            f"batch row {row}, got {np.asarray(places)[row].tolist()}"
        )
    return start[:, None] + places, is_kept, jnp.any(is_wrong, axis=1) | (clamped != counts)
