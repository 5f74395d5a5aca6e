"""Additive attention: blockwise attention whose pair score is w · tanh(query + key).

The hidden layer of all pairs, T × S × A numbers, never exists at once.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from jattn import tile, tuning
from jattn._explicit import partitioned_by_xla, sharding_of
from jattn._pytree import array_field, pytree_dataclass
from jattn._types import accumulation
from jattn.call import Call, compiled
from jattn.kernels.common import tile_schedule, vjp
from jattn.kernels.xla import blockwise, reference, tangents
from jattn.spec import Tiling


@pytree_dataclass
class AdditiveScore:
    """w · tanh(query + key), of projected queries and keys `[A]` (Bahdanau et al. 2015)."""

    w_score: Float[Array, " A"] = array_field("A")

    def products(self, query: Float[Array, "t A"], key: Float[Array, "s A"]) -> Float[Array, "t s"]:
        """Computes the scores of all pairs, a block of keys at a time, in the dtype of sums."""
        q, k = (tile.finite(x.astype(accumulation(x.dtype))) for x in (query, key))
        rows, columns = (tile.nan_where_nonfinite(x) for x in (query, key))
        return self._blocks(q, k) + (rows[:, None] + columns[None, :])

    def _blocks(self, query: Array, key: Array) -> Array:
        (t, A), s, sizes = query.shape, len(key), tuning.current()
        size = max(1, min(s, max(sizes.additive_keys, sizes.additive_pairs // max(1, t))))
        blocks = -(-s // size)
        padded = jnp.pad(key, ((0, blocks * size - s), (0, 0)))

        @jax.checkpoint
        def block(keys: Float[Array, "n A"]) -> Float[Array, "t n"]:
            hidden = jnp.tanh(query[:, None, :] + keys[None, :, :])
            return jnp.einsum("tna,a->tn", hidden, self.w_score)

        by_block = jax.lax.map(block, padded.reshape(blocks, size, A))
        return jnp.moveaxis(by_block, 0, 1).reshape(t, blocks * size)[:, :s]


def choose_tiling(T: int, S: int) -> Tiling:
    """Returns tiles of about the size that is fastest on CPUs; one tile for short inputs."""
    about = tuning.current().additive_tile
    return Tiling(*(tile_schedule.even(max(1, size), about) for size in (T, S)))


def _sharding(_: Call, query: Array, *__: Any, **___: Any) -> Any:
    """Returns the sharding of results on explicit meshes: that of the queries."""
    return PartitionSpec(*sharding_of(query)[:-1], None)


@compiled()
@partitioned_by_xla(_sharding)
def weights(call: Call, query: Array, key: Array, w_score: Array) -> Array:
    """Computes the weights `[*B, T, S]` after softmax and dropout, from projected arrays."""
    spec, q, k = _prepared(call, w_score, query, key)
    return call.unflattened(reference.weights(spec, q, k)[:, 0])


def _prepared(call: Call, w_score: Array, *arrays: Array) -> tuple[Any, ...]:
    """Returns the prepared spec with its pair score, and arrays `[*B, X, D]` as `[B, X, 1, D]`."""
    pair = dataclasses.replace(call.spec, pair=AdditiveScore(w_score))
    prepared = dataclasses.replace(call, spec=pair).prepared()
    return prepared.spec, *call.flattened(*(x[..., None, :] for x in arrays))


@compiled("tiling")
@partitioned_by_xla(_sharding)
def attend(
    call: Call, query: Array, key: Array, value: Array, w_score: Array, *, tiling: Tiling
) -> Array:
    """Computes `[*B, T, V]` from projected `query [*B, T, A]`, `key [*B, S, A]`,
    `value [*B, S, V]` and `w_score [A]`.

    A single tile is computed as the formula, which has all derivatives.
    """
    spec, q, k, v = _prepared(call, w_score, query, key, value)
    shapes = call.shapes
    if tiling == (shapes.T, shapes.S) or 0 in (shapes.T, shapes.S):
        out, _ = reference.attend(spec, q, k, v)
    else:
        kernel = vjp.Functions(functools.partial(blockwise.functions, tiling=tiling))
        out, _ = vjp.attention(kernel, tangents.functions(tiling), spec, q, k, v, lse=False)
    return call.unflattened(out[:, :, 0])
