"""A few queries against a cache: every key and value is read once, in the order it lies in memory.

A step of decoding does two operations for each number that it reads, so reading is all that
counts. All heads go at once, those of a group by one product with the keys they share. Long
caches are read in blocks, put together by the online softmax of `jattn.softmax` (after Dao et al.
2023, "Flash-Decoding"), where the mask empties at least half of them; blocks that it empties for
all rows are not read.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jattn import masks, scores, softmax, tile
from jattn._types import LogSumExp, Output, Shape, accumulation, is_static, number
from jattn.cache import Cache, PagedCache
from jattn.kernels import blockwise, lowering, native_library, reverse, tiles, whole
from jattn.spec import Shapes, Spec, Tiling, has_mask, parameters, scaled, with_parameters


MAX_QUERIES = 8
_BLOCK = 512  # keys of a block at most


def supports(spec: Spec, shapes: Shapes) -> str | None:
    """Few queries without dropout, of a cache; the derivative is that of blockwise."""
    if shapes.T > MAX_QUERIES:
        return f"expected at most {MAX_QUERIES} queries at a time, got {shapes.T}"
    if spec.dropout_rate:
        return "dropout is for training"
    return None


def _over_heads(function: Callable[..., Any]) -> Callable[..., Any]:
    """Maps a function of one key head over `[B, K]`."""
    return jax.vmap(jax.vmap(function))


def _product(spec: Spec, q: Float[Array, "R H"], k: Float[Array, "s H"]) -> Float[Array, "R s"]:
    """q kᵀ. One query goes as a vector: XLA copies what a product of matrices reads on CPUs."""
    if len(q) > 1:
        return tile.product(q, k, spec.precision)
    dtype = accumulation(q.dtype)
    return jnp.dot(k, q[0], precision=spec.precision, preferred_element_type=dtype)[None]


def _weigh(spec: Spec, v: Float[Array, "s V"], weights: Float[Array, "R s"]) -> Array:
    """weights · v, of one query as a vector too."""
    if len(weights) > 1:
        return jnp.dot(weights, v, precision=spec.precision)
    return jnp.dot(weights[0], v, precision=spec.precision)[None]


def _part(
    spec: Spec,
    queries: Float[Array, "B K R H"],
    key: Float[Array, "B K s H"],
    value: Float[Array, "B K s V"],
    run: tiles.Run,
    exact: bool,
) -> softmax.Partial:
    """What a run of keys contributes to R = G × T queries of each key head.

    Masked values have weight 0, and 0 × NaN is NaN: `exact` takes values that are not finite as 0,
    for which it reads them twice, and lets NaN reach those who attend to them by the scores.
    """
    dtype = accumulation(queries.dtype)
    key, value = key.astype(queries.dtype), value.astype(dtype)
    products = _over_heads(functools.partial(_product, spec))(queries, key)
    if exact:
        products = products + _over_heads(tile.lost)(value)[:, :, None, :]
        value = tile.finite(value)

    def part(scores: Array, value: Array) -> softmax.Partial:
        weigh = functools.partial(_weigh, spec, value)
        return softmax.of(scores, weigh, differentiable=False)

    return _over_heads(part)(_modified(spec, products, run), value)


def _modified(spec: Spec, products: Float[Array, "B K R s"], run: tiles.Run) -> Array:
    """Scores after scale, score functions and mask, which may differ between a group's heads."""
    B, K, R, s = products.shape
    T = spec.q_positions.shape[-1]

    def modify(spec: Spec, b: Any, h: Any, products: Array) -> Array:
        here = tiles.Tile.at(spec, b, h, 0, T, run)
        return tile.modify(here.spec, products, b, h, here.rows, here.columns)

    by_query = jnp.swapaxes(products.reshape(B, K * R // T, T, s), 1, 2)
    return tile.over_heads(modify, spec, (by_query,), (), out_axes=0).reshape(B, K, R, s)


def _visited(spec: Spec, shape: Shape, T: int, S: int, size: int) -> Bool[Array, " n"]:
    """Which blocks of keys any of `[B, N]` heads sees."""

    def kinds(spec: Spec, b: Any, h: Any, _: Array) -> Array:
        return jnp.asarray(tiles.kinds(spec, T, S, Tiling(T, size)))[0]

    B, N = shape
    found = tile.over_heads(kinds, spec, (jnp.zeros((B, 1, N, 1)),), (), out_axes=0)
    return jnp.any(found != masks.EMPTY, axis=(0, 1))


def _block_size(cache: Cache) -> int:
    """The most keys of a block that divides the cache, in whole pages."""
    page = cache.page_size if isinstance(cache, PagedCache) else 1
    pages = cache.capacity // page
    most = max(1, _BLOCK // page)
    return page * max(d for d in range(1, min(most, pages) + 1) if pages % d == 0)


def _portable(exact: bool, spec: Spec, query: Array, cache: Cache) -> tuple[Array, Array]:
    """`(out [B, T, N, V], lse [B, N, T])` by XLA."""
    B, T, N, H = query.shape
    K, S, size = cache.num_kv_heads, cache.capacity, _block_size(cache)
    spec, query, _ = scaled(spec, query)
    queries = jnp.swapaxes(query, 1, 2).reshape(B, K, N * T // K, H)

    def finished(part: softmax.Partial) -> tuple[Array, Array]:
        out, normalizer = _over_heads(softmax.quotient)(part)
        return out, normalizer.lse

    def at_once(spec: Spec, queries: Array, cache: Cache) -> tuple[Array, Array]:
        part = _part(spec, queries, *cache.read(), tiles.Run(0, S, True), exact)
        return finished(part)

    def in_blocks(spec: Spec, queries: Array, cache: Cache) -> tuple[Array, Array]:
        def step(place: Any, state: softmax.Partial) -> softmax.Partial:
            run = tiles.Run(order[place] * size, size, True)
            part = _part(spec, queries, *cache.block(run.start, size), run, exact)
            return _over_heads(softmax.combine)(state, part)

        V = cache.values.shape[-1]
        nothing = softmax.empty(queries.shape[2], V, accumulation(queries.dtype))
        state = jax.tree.map(lambda x: jnp.broadcast_to(x, (B, K, *x.shape)), nothing)
        return finished(tiles.repeat(0, count, step, state))

    if size == S or (size < _BLOCK // 4 and not isinstance(cache, PagedCache)):
        return _by_token(query, *at_once(spec, queries, cache))
    order, count = (x[0] for x in tiles.where_true(jnp, _visited(spec, (B, N), T, S, size)[None]))
    if exact or isinstance(cache, PagedCache):  # exact takes copies, which blocks keep small
        return _by_token(query, *in_blocks(spec, queries, cache))
    # A block is copied before it is read, which takes as long again.
    enough = 2 * count > S // size
    return _by_token(query, *whole.agreed(enough, at_once, in_blocks, spec, queries, cache))


def _by_token(query: Array, out: Array, lse: Array) -> tuple[Array, Array]:
    """`[B, K, R, V]` and `[B, K, R]` as `[B, T, N, V]` and `[B, N, T]`."""
    B, T, N, _ = query.shape
    return jnp.swapaxes(out.reshape(B, N, T, out.shape[-1]), 1, 2), lse.reshape(B, N, T)


def _is_added(score: Any) -> bool:
    kinds = (scores.Alibi, scores.RelativeBias, scores.Bias)
    return all(isinstance(one, kinds) for one in scores.in_order(score))


def _by_head(mask: Any) -> bool:
    """Whether heads may see different keys."""
    every = jax.tree.leaves(mask, is_leaf=lambda x: isinstance(x, masks.Predicate))
    return masks.leading(mask)[1] > 1 or any(isinstance(x, masks.Predicate) for x in every)


def _runs_native(platform: str, spec: Spec, query: Array, cache: Cache) -> bool:
    """Whether `native_decode.cc` can: its cache holds what is summed in, its scores are sums."""
    dtype = accumulation(query.dtype)
    ours = platform == "cpu" and not lowering.exported() and _is_added(spec.score)
    ours = ours and is_static(spec.scale)
    ours = ours and cache.keys.dtype == cache.values.dtype == dtype
    return ours and native_library.unavailable("decode", dtype) is None


def _native(spec: Spec, query: Array, cache: Cache) -> tuple[Array, Array]:
    """As `_portable`, by `native_decode.cc`."""
    B, T, N, _ = query.shape
    S, dtype = cache.capacity, accumulation(query.dtype)

    def of_heads(spec: Spec, n: int, kind: Any, one: Callable[[tiles.Tile], Array]) -> Array:
        def head(spec: Spec, b: Any, h: Any, _: Array) -> Array:
            here = tiles.Tile.at(spec, b, h, 0, T, tiles.Run(0, S, True))
            return jnp.broadcast_to(one(here), (T, S))

        if not n:
            return jnp.zeros((1, 1, 1, 0), kind)
        nothing = jnp.zeros((B, T, n, 1), kind)
        return tile.over_heads(head, spec, (nothing,), (), out_axes=0)

    def allowed(here: tiles.Tile) -> Array:
        return jnp.asarray(here.spec.mask.evaluate(here.b, here.h, here.rows, here.columns))

    heads = (N if _by_head(spec.mask) else 1) if has_mask(spec) else 0
    zeros = jnp.zeros((T, S), dtype)
    bias = of_heads(
        spec, 0 if spec.score is None else N, dtype, lambda here: here.modify(zeros, False)
    )
    rule = of_heads(dataclasses.replace(spec, score=None), heads, bool, allowed)
    like = [jax.ShapeDtypeStruct(x, dtype) for x in ((B, T, N, cache.values.shape[-1]), (B, N, T))]
    name = native_library.target("decode", dtype)
    run = jax.ffi.ffi_call(name, like, vmap_method="sequential")
    operands = (query.astype(dtype), *cache.pages(), rule, bias)
    out, lse = run(*operands, scale=float(number(spec.scale)))
    return out, lse


def _forward(platform: str, spec: Spec, query: Array, cache: Cache) -> tuple[Array, Array]:
    if _runs_native(platform, spec, query, cache):
        return _native(spec, query, cache)
    return _portable(False, spec, query, cache)


def _attend(spec: Spec, query: Array, cache: Cache) -> tuple[Output, LogSumExp]:
    """As `attend`, in the dtype of sums and without a derivative."""
    like = jax.eval_shape(functools.partial(_portable, False), spec, query, cache)
    out, lse = lowering.by_platform(_forward, like, spec, query, cache)
    finite = jnp.isfinite(jnp.sum(out))
    first = lambda spec, query, cache, out, lse: (out, lse)  # noqa: E731
    again = lambda spec, query, cache, out, lse: _portable(True, spec, query, cache)  # noqa: E731
    return whole.agreed(finite, first, again, spec, query, cache, out, lse)


def _as_arrays(
    spec: Spec, cache: Any, params: Any, query: Array, keys: Array, values: Array
) -> tuple[Output, LogSumExp]:
    """The same by `blockwise`."""
    held = dataclasses.replace(cache, keys=keys, values=values).read()
    key, value = (jnp.swapaxes(x, 1, 2).astype(query.dtype) for x in held)
    return blockwise.attend(with_parameters(spec, params), query, key, value)


def attend(spec: Spec, query: Array, cache: Cache) -> tuple[Output, LogSumExp]:
    """`(out [B, T, N, V], lse [B, N, T])` of `query [B, T, N, H]` and a cache of B rows.

    The derivative is that of blockwise attention to what the cache holds.
    """

    @jax.custom_vjp
    def run(params: Any, query: Array, keys: Array, values: Array, rest: Any) -> Any:
        spec, cache = rest
        cache = dataclasses.replace(cache, keys=keys, values=values)
        return reverse.sealed(_attend)(with_parameters(spec, params), query, cache)

    def forward(*operands: Any) -> Any:
        out, lse = run(*operands)
        return (out, lse), operands

    def backward(operands: Any, cotangents: Any) -> Any:
        *differentiable, (spec, cache) = operands
        found, pull = jax.vjp(functools.partial(_as_arrays, spec, cache), *differentiable)
        cast = [d.astype(x.dtype) for d, x in zip(cotangents, found, strict=True)]
        return *pull(tuple(cast)), None

    run.defvjp(forward, backward)
    differentiable = (query, cache.keys, cache.values, *parameters(spec))
    query, keys, values, *params = reverse.inputs(differentiable, (spec, cache))
    out, lse = run(params, query, keys, values, (spec, cache))
    return out.astype(query.dtype), lse
