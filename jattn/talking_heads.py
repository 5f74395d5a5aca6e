"""Talking-heads attention: heads are mixed before and after the softmax.

Shazeer, Lan, Cheng, Ding and Hou 2020, "Talking-Heads Attention". A weight of one head depends on
the scores of all heads, so the heads cannot be computed one after another. They are computed
together instead, for a block of queries and all keys: each score is computed once, and only the
N × S numbers of a few queries exist at a time.
"""

import dataclasses
from typing import Unpack

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jattn import softmax, tile
from jattn._advised import advised
from jattn._explicit import QuerySharding, partitioned_by_xla, varied_like
from jattn._pytree import number
from jattn._types import Index, Keys, Output, Queries, Values, accumulation
from jattn.call import Call, compiled, make
from jattn.checks import check_array
from jattn.kernels.common import slicing, tile_schedule
from jattn.options import ScoreOptions
from jattn.spec import Spec


__all__ = ["talking_heads_attention"]
__dir__ = __all__.copy

# The approximate number of scores of a block of queries, over all heads, which fit a CPU's caches.
_BLOCK_SCORES = 2**20


@advised(ScoreOptions)
def talking_heads_attention(
    query: Queries,
    key: Keys,
    value: Values,
    mix_logits: Float[Array, "N N"],
    mix_weights: Float[Array, "N N"],
    **options: Unpack[ScoreOptions],
) -> Output:
    """Attention whose heads are mixed before and after the softmax (Shazeer et al. 2020).

        logits'[m] = Σ_n logits[n] mix_logits[n, m]
        weights'[m] = Σ_n softmax(mask(score(logits')))[n] mix_weights[n, m]

    Args:
        query: `[*B, T, N, H]`.
        key, value: `[*B, S, K, H]` and `[*B, S, K, V]`, of the same dtype; K divides N.
        mix_logits, mix_weights: `[N, N]`, from each head to each mixed head; differentiable
            parameters. With two identity matrices the result is that of `attention`.
        options: as in `attention_scores`. The mask and the score function apply to mixed heads.

    Returns `[*B, T, N, V]` in the query's dtype. A NaN in a value makes all heads NaN for the
    queries that attend to it. Memory is linear in T and S, also for gradients, of every order and
    mode. To the products of attention, the mixtures add 2 N² multiplications for each pair: 8 heads
    of 64 and 2,048 tokens take 1.5 times as long as `attention` with `implementation="blockwise"`
    on two CPU cores, and 2.1 times with gradients. XLA computes the call on every platform, and
    masks save no time.

    Raises the errors of `attention`.

    >>> jattn.talking_heads_attention(q, k, v, jnp.eye(4), jnp.ones((4, 4)) / 4).shape
    (2, 5, 4, 8)
    """
    call = make(query, key, value, **options)
    N = call.shapes.N
    check_array("mix_logits", mix_logits, "[N, N]", shape=(N, N))
    check_array("mix_weights", mix_weights, "[N, N]", shape=(N, N))
    return _attend(call, query, key, value, mix_logits, mix_weights)


@compiled()
@partitioned_by_xla(lambda _, query, *__: QuerySharding.of(query).out)
def _attend(
    call: Call, query: Array, key: Array, value: Array, mix_logits: Array, mix_weights: Array
) -> Output:
    shapes, dtype = call.shapes, accumulation(query.dtype)
    spec = call.prepared().spec
    if 0 in (shapes.B, shapes.T, shapes.N):
        nothing = jnp.zeros((shapes.B, shapes.T, shapes.N, shapes.V), query.dtype)
        operands = (spec, query, key, value, mix_logits, mix_weights)
        return call.unflattened(varied_like(nothing, operands))
    scale = jnp.asarray(number(spec.scale), dtype)
    mixtures = mix_logits.astype(dtype) * scale.reshape(-1, 1), mix_weights.astype(dtype)
    T, S = shapes.T, shapes.S
    rows = tile_schedule.even(max(1, T), max(8, _BLOCK_SCORES // (shapes.N * max(1, S))))
    blocks = -(-T // rows)
    spec = slicing.pad_arrays(dataclasses.replace(spec, scale=1.0), blocks * rows, S)

    def batch_row(b: Array, query: Array, key: Array, value: Array) -> Array:
        """Computes `[T, N, V]`, a block of queries at a time."""
        row_spec = slicing.slice_batch(spec, b, 1)
        key, value = (jnp.swapaxes(x, 0, 1) for x in (key, value))

        @jax.checkpoint
        def block(block_queries: tuple[Array, Array]) -> Array:
            return _block(row_spec, b, *block_queries, key, value, *mixtures)

        starts = jnp.arange(blocks, dtype=jnp.int32) * rows
        padded = jnp.pad(query, ((0, blocks * rows - T), (0, 0), (0, 0)))
        out = jax.lax.map(block, (starts, padded.reshape(blocks, rows, *query.shape[1:])))
        return out.reshape(blocks * rows, *out.shape[2:])[:T]

    by_row = tile.map_in_sequence(batch_row, (0, 0, 0, 0))
    batch_rows = jnp.arange(shapes.B, dtype=jnp.int32)
    return call.unflattened(by_row(batch_rows, *call.flattened(query, key, value)))


def _block(
    spec: Spec,
    b: Index,
    start: Index,
    query: Float[Array, "t N H"],
    key: Float[Array, "K S H"],
    value: Float[Array, "K S V"],
    mix_logits: Float[Array, "N N"],
    mix_weights: Float[Array, "N N"],
) -> Float[Array, "t N V"]:
    """Computes the output of the queries from `start` on. The spec is of one batch row."""
    (t, N, _), (K, S, V) = query.shape, value.shape
    dtype = accumulation(query.dtype)

    def weigh(spec: Spec, b: Index, h: Index, logits: Float[Array, "t S"]) -> Float[Array, "t S"]:
        run = tile_schedule.TileRun(0, S, masked=True)
        scores = slicing.HeadTile.at(spec, b, h, start, t, run).modify(logits, masked=True)
        return softmax.finish(softmax.contribution(scores, lambda weights: weights))[0]

    by_head = jnp.moveaxis(query, 1, 0).reshape(K, N // K, t, -1)
    products = jax.vmap(jax.vmap(tile.dot_products, (0, None, None)), (0, 0, None))
    logits = products(by_head, key, spec.precision).reshape(N, t, S)
    logits = (
        logits + tile.nan_where_nonfinite(jnp.moveaxis(value, 0, 1).reshape(S, K * V))[None, None]
    )
    # As in products of queries and keys, NaN of one pair must not reach gradients of the others.
    mixed = tile.dot_products(mix_logits.T, logits.reshape(N, t * S).T).reshape(N, t, S)
    by_query = jnp.moveaxis(mixed, 0, 1)[None]
    weights = tile.over_heads(weigh, spec, (by_query,), (), out_axes=0, first=b)[0]
    weights = jnp.einsum("nts,nm->mts", weights, mix_weights).reshape(K, N // K, t, S)
    values = tile.finite(value).astype(dtype)
    out = jnp.einsum("kgts,ksv->kgtv", weights, values, precision=spec.precision)
    return jnp.moveaxis(out.reshape(N, t, V), 0, 1).astype(query.dtype)
