"""Attention of a few queries to a cache: each key and value is read once, in memory order.

A decoding step does two operations for each number that it reads, so its time is the time of
reading the cache. All heads are computed at once, and the query heads of a group share one product
with their keys. A long cache is read in blocks if the mask excludes at least half of them. Blocks
in which no query attends to any key are skipped, and the online softmax of `jattn.softmax` merges
the results of the others (after Dao et al. 2023, "Flash-Decoding").
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jattn import masks, softmax, tile, tuning
from jattn._explicit import in_context_mesh
from jattn._types import Index, Output, Shape, Tree, accumulation
from jattn.cache import Cache, Quantized
from jattn.kernels.common import lowering, partition, reverse_mode, slicing, tile_schedule
from jattn.kernels.common.branches import unbatched_cond
from jattn.kernels.protocol import Reader
from jattn.kernels.xla import tangents
from jattn.softmax import Normalizer
from jattn.spec import Spec, Tiling, parameters, scaled, with_parameters


CacheForward = Callable[[Spec, Array, Any], tuple[Array, Normalizer]]
"""Maps `(spec, query, cache)` to `out [B, T, N, V]` in the accumulation dtype and the normalizer
`[B, T, N]`."""


def _over_heads(function: Callable[..., Any]) -> Callable[..., Any]:
    """Maps a function of one key head over arrays `[B, K, ...]`."""
    return jax.vmap(jax.vmap(function))


def _product(spec: Spec, q: Float[Array, "R H"], k: Float[Array, "s H"]) -> Float[Array, "R s"]:
    """Computes q kᵀ.

    A single query is multiplied as a vector: on CPUs XLA copies the operands of matrix products.
    """
    if len(q) > 1:
        return tile.dot_products(q, k, spec.precision)
    dtype = accumulation(q.dtype)
    return jnp.dot(k, q[0], precision=spec.precision, preferred_element_type=dtype)[None]


def _weigh(spec: Spec, v: Float[Array, "s V"], weights: Float[Array, "R s"]) -> Array:
    """Computes weights · v; the weights of a single query are multiplied as a vector."""
    if len(weights) > 1:
        return jnp.dot(weights, v, precision=spec.precision)
    return jnp.dot(weights[0], v, precision=spec.precision)[None]


def _attend_to_run(
    spec: Spec,
    T: int,
    queries: Float[Array, "B K R H"],
    key: Float[Array, "B K s H"],
    value: Float[Array, "B K s V"],
    run: tile_schedule.TileRun,
    factor: Array | None,
) -> softmax.Partial:
    """Attends from R = G × T queries of each key head to the consecutive keys of `run`.

    Masked values have weight 0, but 0 × NaN is NaN. So with `factor` values that are not finite are
    replaced by 0, and the scores of their keys are NaN for the queries that attend to them, which
    reads the values twice. All values are multiplied by the factor, so that no sum overflows.
    """
    dtype = accumulation(queries.dtype)
    key, value = key.astype(queries.dtype), value.astype(dtype)
    products = _over_heads(functools.partial(_product, spec))(queries, key)
    if factor is not None:
        products = products + _over_heads(tile.nan_where_nonfinite)(value)[:, :, None, :]
        value = tile.finite(value) * factor

    def partial_of_head(scores: Array, value: Array) -> softmax.Partial:
        weigh = functools.partial(_weigh, spec, value)
        return softmax.contribution(scores, weigh, differentiable=False)

    return _over_heads(partial_of_head)(_modified(spec, T, products, run), value)


def _modified(
    spec: Spec, T: int, products: Float[Array, "B K R s"], run: tile_schedule.TileRun
) -> Array:
    """Computes scores from products by scale, score functions and mask, for each query head."""
    B, K, R, s = products.shape

    def modify(spec: Spec, b: Index, h: Index, products: Array) -> Array:
        return slicing.HeadTile.at(spec, b, h, 0, T, run).modify(products, True)

    by_query = jnp.swapaxes(products.reshape(B, K * R // T, T, s), 1, 2)
    return tile.over_heads(modify, spec, (by_query,), (), out_axes=0).reshape(B, K, R, s)


def _visited(spec: Spec, shape: Shape, T: int, S: int, size: int) -> Bool[Array, " n"]:
    """Returns which blocks of keys a query of any head may attend to; `shape` is (B, N)."""

    def kinds(spec: Spec, b: Index, h: Index, _: Array) -> Array:
        return jnp.asarray(tile_schedule.kinds(spec, T, S, Tiling(T, size), b, h))[0]

    B, N = shape
    tile_kinds = tile.over_heads(kinds, spec, (jnp.zeros((B, 1, N, 1)),), (), out_axes=0)
    return jnp.any(tile_kinds != masks.EMPTY, axis=(0, 1))


def _block_size(cache: Cache) -> int:
    """Returns the largest block size, at most `tuning.decode_block`, that divides the capacity.

    A block has whole pages, and at least one.
    """
    page = getattr(cache, "page_size", 1)
    pages = cache.capacity // page
    max_pages = max(1, tuning.current().decode_block // page)
    return page * max(d for d in range(1, min(max_pages, pages) + 1) if pages % d == 0)


def _attend_by_xla(exact: bool, spec: Spec, query: Array, cache: Cache) -> tuple[Array, Normalizer]:
    """Computes `out [B, T, N, V]` in the accumulation dtype and the normalizer `[B, T, N]`.

    `exact` results are right even if masked values are not finite or sums of values overflow, see
    `_attend_to_run`.
    """
    B, T, N, H = query.shape
    K, S, size = cache.num_kv_heads, cache.capacity, _block_size(cache)
    greatest = jnp.asarray(jnp.finfo(accumulation(query.dtype)).max)
    factor = softmax.overflow_safe_factor(greatest, S) if exact else None
    spec, query, _ = scaled(spec, query)
    queries = jnp.swapaxes(query, 1, 2).reshape(B, K, N * T // K, H)

    def finished(sums: softmax.Partial) -> tuple[Array, Normalizer]:
        out, normalizer = _over_heads(softmax.finish_without_gradient)(sums)
        return out if factor is None else out / factor, normalizer

    def at_once(spec: Spec, queries: Array, cache: Cache) -> tuple[Array, Normalizer]:
        run = tile_schedule.TileRun(0, S, True)
        return finished(_attend_to_run(spec, T, queries, *cache.read(), run, factor))

    def in_blocks(spec: Spec, queries: Array, cache: Cache) -> tuple[Array, Normalizer]:
        def add_block(i: Any, state: softmax.Partial) -> softmax.Partial:
            run = tile_schedule.TileRun(order[i] * size, size, True)
            block = cache.block(run.start, size)
            partial = _attend_to_run(spec, T, queries, *block, run, factor)
            return _over_heads(softmax.combine)(state, partial)

        empty = softmax.empty(queries.shape[2], cache.value_size, accumulation(queries.dtype))
        state = jax.tree.map(lambda x: jnp.broadcast_to(x, (B, K, *x.shape)), empty)
        return finished(tile_schedule.repeat(0, count, add_block, state))

    is_paged = hasattr(cache, "page_size")
    is_small = size < tuning.current().decode_block // 4
    if size == S or (is_small and not is_paged):
        return _by_token(query, *at_once(spec, queries, cache))
    order, count = (
        x[0] for x in tile_schedule.where_true(jnp, _visited(spec, (B, N), T, S, size)[None])
    )
    # Pages and quantised numbers are copied by any read, so they are always read in blocks.
    is_always_copied = is_paged or isinstance(cache.keys, Quantized)
    if exact or is_always_copied:
        return _by_token(query, *in_blocks(spec, queries, cache))
    # A block is copied before it is read, which doubles its time: blocks pay if half are skipped.
    most_are_visited = 2 * count > S // size
    return _by_token(
        query, *unbatched_cond(most_are_visited, at_once, in_blocks, spec, queries, cache)
    )


def _by_token(query: Array, *results: Tree) -> Tree:
    """Reorders arrays `[B, K, R, V]` and `[B, K, R]` to `[B, T, N, V]` and `[B, T, N]`."""
    B, T, N, _ = query.shape
    return jax.tree.map(lambda x: jnp.swapaxes(x.reshape(B, N, T, *x.shape[3:]), 1, 2), results)


def or_exact(results: Tree, spec: Spec, query: Array, cache: Cache) -> tuple[Array, Normalizer]:
    """Returns the results or, if they are not finite, the exact results of `_attend_by_xla`."""
    unchanged = lambda results, *_: results  # noqa: E731
    recomputed = lambda _, *operands: _attend_by_xla(True, *operands)  # noqa: E731
    is_finite = jnp.isfinite(jnp.sum(results[0]))
    return unbatched_cond(is_finite, unchanged, recomputed, results, spec, query, cache)


def _read(_: str, spec: Spec, query: Array, cache: Cache) -> tuple[Array, Normalizer]:
    return or_exact(_attend_by_xla(False, spec, query, cache), spec, query, cache)


# There is no reason against any cache: this reader supports all of them.
READER = Reader(lambda platform, call, cache: None, _read)


def attend_part(
    read: Callable[..., Any], spec: Spec, query: Array, cache: Cache
) -> tuple[Output, Normalizer]:
    """Computes the attention to one part of a cache, without a derivative, by `Reader.read`.

    Returns `out [B, T, N, V]` in the accumulation dtype and the normalizer `[B, T, N]`, by which
    the caller merges the parts.
    """
    (*shape, _), dtype = query.shape, accumulation(query.dtype)
    row = jax.ShapeDtypeStruct(shape, dtype)
    out = jax.ShapeDtypeStruct((*shape, cache.value_size), dtype)
    like = (out, Normalizer(row, row))  # pyright: ignore[reportArgumentType]
    read = partition.partitioned_on_cache(read, spec, query, cache)
    return lowering.platform_dependent(read, like, spec, query, cache)


def _attend_to_contents(
    spec: Spec, cache: Cache, params: list[Array], query: Array, contents: list[Any]
) -> tuple[Output, Normalizer]:
    """Computes the results of `attend` by blockwise attention to the contents of the cache."""
    key, value = (
        jnp.swapaxes(x, 1, 2).astype(query.dtype) for x in _with_contents(cache, contents).read()
    )
    return tangents.attend(with_parameters(spec, params), query, key, value)


def _is_differentiable(x: Array) -> bool:
    """Returns whether an array of a cache is differentiable; float8 is for quantised numbers."""
    return jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize > 1


def _contents(cache: Cache) -> list[Array]:
    """Returns the arrays of a cache that are differentiable."""
    return list(filter(_is_differentiable, jax.tree.leaves(cache)))


def _with_contents(cache: Any, contents: list[Array]) -> Any:
    """Returns the cache with other arrays in place of those of `_contents`."""
    arrays = iter(contents)
    return jax.tree.map(lambda x: next(arrays) if _is_differentiable(x) else x, cache)


def attend(
    spec: Spec, query: Array, cache: Cache, forward: CacheForward
) -> tuple[Output, Normalizer]:
    """Computes `(out [B, T, N, V], normalizer of [B, N, T])` of `query [B, T, N, H]` and a cache of
    B rows.

    `forward` reads the cache, see `registry.reader`. The derivative is the derivative of
    `_attend_to_contents`.
    """

    def without_derivative(spec: Spec, query: Array, cache: Cache) -> tuple[Array, Normalizer]:
        out, normalizer = forward(spec, query, cache)
        return out, normalizer.by_head()

    @jax.custom_vjp
    def run(
        params: list[Array], query: Array, contents: list[Any], rest: Tree
    ) -> tuple[Array, Normalizer]:
        spec, cache = rest
        cache = _with_contents(cache, contents)
        attend_once = reverse_mode.nondifferentiable(without_derivative)
        return attend_once(with_parameters(spec, params), query, cache)

    def with_residuals(*operands: Tree) -> Tree:
        return run(*operands), operands

    def backward(operands: Tree, cotangents: tuple[Array, Normalizer]) -> Tree:
        (*differentiable, (spec, cache)), cotangents = in_context_mesh((operands, cotangents))
        results, pull = jax.vjp(
            functools.partial(_attend_to_contents, spec, cache), *differentiable
        )
        return *pull(jax.tree.map(lambda d, x: d.astype(x.dtype), cotangents, results)), None

    run.defvjp(with_residuals, backward)
    contents, params = _contents(cache), parameters(spec)
    query, *arrays = reverse_mode.inputs((query, *contents, *params), (spec, cache))
    contents, params = arrays[: len(contents)], arrays[len(contents) :]
    out, normalizer = run(params, query, contents, (spec, cache))
    return out.astype(query.dtype), normalizer
