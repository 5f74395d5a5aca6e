"""Statistics of the weights of a normalizer other than the softmax, by blocks of queries.

A block of queries has the weights of all its keys at once, see `normalized`. Derivatives are JAX's
own.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jattn.kernels.common.slicing import HeadTile
from jattn.kernels.protocol import QueryStatistics, StatisticsRequest
from jattn.kernels.xla import normalized
from jattn.scores import distance
from jattn.softmax import quotient
from jattn.spec import Spec, parameters, with_parameters


def _of_block(
    threshold: float | None, tiles: Sequence[HeadTile], q: Array, k: Array
) -> tuple[QueryStatistics, Float[Array, " S"]]:
    """Computes the statistics of a block of queries, and the weight that each key receives."""
    tile, *of_keys = tiles
    weights, allowed = normalized.weights_and_mask(tile, q, k)
    shares = quotient(weights, jnp.sum(weights, axis=1, keepdims=True))
    logs = jnp.log(jnp.where(shares == 0, 1, shares))
    distances = distance(tile.rows, tile.columns, weights.dtype)
    first = jnp.argmax(jnp.where(allowed, weights, -jnp.inf), axis=1, keepdims=True)
    greatest = jnp.take_along_axis(weights, first, axis=1)[:, 0]
    is_known = jnp.any(allowed, axis=1) & ~jnp.isnan(greatest)
    on_keys = above = None
    for x in of_keys:
        on_keys = jnp.sum(jnp.where(x.spec.mask.evaluate(*x[1:]), weights, 0), axis=1)
    if threshold is not None:
        above = jnp.sum(jnp.where(weights > threshold, weights, 0), axis=1)
    by_query = QueryStatistics(
        -jnp.sum(shares * logs, axis=1),
        greatest,
        jnp.where(is_known, tile.columns.places[first[:, 0]], -1),
        jnp.sum(shares * distances, axis=1),
        on_keys,
        above,
    )
    return by_query, jax.lax.stop_gradient(jnp.sum(weights, axis=0))


def by_rows(
    question: StatisticsRequest, query: Array, key: Array
) -> tuple[QueryStatistics, Float[Array, "B N S"]]:
    """Computes the statistics of `[B, N, T]` and the weight `[B, N, S]` that each key receives."""
    specs = (question.spec,) if question.keys is None else (question.spec, question.keys)
    of_block = functools.partial(_of_block, question.threshold)
    platform = jax.default_backend()
    by_query, received = normalized.by_blocks(
        of_block, platform, specs, query, key, out_axes=0, sums_keys=True
    )
    assert received is not None
    return by_query, received


def gradients(
    question: StatisticsRequest, query: Array, key: Array, cotangents: QueryStatistics
) -> tuple[list[Array], Array, Array]:
    """Computes the gradients of the spec's parameters, queries and keys; `cotangents` has zeros or
    None for statistics without derivative."""

    def differentiable(params: list[Array], query: Array, key: Array) -> tuple[Array, ...]:
        spec = with_parameters(question.spec, params)
        rows, _ = by_rows(StatisticsRequest(spec, question.keys), query, key)
        return _differentiable(rows)

    _, pull = jax.vjp(differentiable, parameters(question.spec), query, key)
    return pull(_differentiable(cotangents))


def _differentiable(rows: QueryStatistics) -> tuple[Any, ...]:
    return rows.entropy, rows.greatest, rows.distance, rows.on_keys


def top(
    n: int, spec: Spec, query: Array, key: Array
) -> tuple[Float[Array, "B N T n"], Int[Array, "B N T n"]]:
    """Returns the n greatest weights of each query, greatest first, and their places."""

    def of_block(tiles: Sequence[HeadTile], q: Array, k: Array) -> Any:
        weights, allowed = normalized.weights_and_mask(tiles[0], q, k)
        missing = max(0, n - weights.shape[1])
        candidates = jnp.where(allowed, weights, -jnp.inf)
        candidates = jnp.pad(candidates, ((0, 0), (0, missing)), constant_values=-jnp.inf)
        greatest, which = jax.lax.top_k(candidates, n)
        exists = greatest != -jnp.inf
        places = jnp.pad(tiles[0].columns.places, (0, missing))[which]
        return (jnp.where(exists, greatest, 0), jnp.where(exists, places, -1)), None

    platform = jax.default_backend()
    return normalized.by_blocks(of_block, platform, (spec,), query, key, out_axes=0)[0]
