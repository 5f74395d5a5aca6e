"""Attention as TPU kernels for any mask and score function, in memory linear in T and S.

FlashAttention-2 (Dao 2023) in Pallas: each program visits, for a batch row, a head and a block of
queries, the tiles of keys that the mask does not empty, and folds them into an online softmax in
the core's memory. The backward pass computes the weights again: once by blocks of queries, for the
gradients of the queries, and once by blocks of keys, over the queries and heads of their group, for
the gradients of keys and values.

The scores of a tile come from `jattn.tile`, so that the kernels depend on no mask and no score
function. Gradients of biases along T and S have a kernel, `blockwise` computes those of other
parameters.

On a CPU the same kernels are interpreted. They compile for TPUs, and have not run on one.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jattn import masks
from jattn._pytree import split_letters
from jattn._types import Tree
from jattn.call import Call
from jattn.kernels.common import block_mask, entries, slicing
from jattn.kernels.common.derivatives import PerQuery
from jattn.kernels.common.vjp import AttentionVJP, cast_cotangent
from jattn.kernels.protocol import Kernel
from jattn.kernels.tpu import operands, programs
from jattn.kernels.tpu.decode import READER
from jattn.kernels.tpu.operands import TileIndex
from jattn.kernels.tpu.programs import TiledCall, dot, finite
from jattn.kernels.xla import blockwise
from jattn.softmax import Normalizer
from jattn.spec import Shapes, Spec, Tiling, parameter_letters, parameters


MAX_HEAD_SIZE = 256
_MOST_SCALARS = 2**16  # numbers in the memory of the scalar core
_PRECISIONS = (None, "default", "highest")


def supports(call: Call) -> str | None:
    """Returns why the kernels cannot compute a call: a dtype that TPUs do not have, or an operation
    that a tile cannot compute; None if they can."""
    spec, shapes = call.spec, call.shapes
    if shapes.dtype not in (jnp.float32, jnp.bfloat16):
        return f"expected float32 or bfloat16, got {shapes.dtype}"
    if max(shapes.H, shapes.V) > MAX_HEAD_SIZE:
        return f"expected head sizes up to {MAX_HEAD_SIZE}, got {max(shapes.H, shapes.V)}"
    if spec.precision is not None and str(spec.precision).lower() not in _PRECISIONS:
        return f"expected the default precision or the highest, got {spec.precision}"
    if 0 in (shapes.B, shapes.T, shapes.S):
        return None
    tiling = programs.choose_tiling(shapes)
    T, S = slicing.round_up(shapes.T, shapes.S, tiling)
    tiles = (T // tiling.block_q) * (S // tiling.block_kv)
    tiles *= shapes.B if jax.tree.leaves(spec.mask) else 1
    if tiles > _MOST_SCALARS:
        return f"lists of {tiles} tiles do not fit into scalar memory"
    spec = dataclasses.replace(spec, dropout_key=None, dropout_rate=0.0)
    return entries.unsupported(_one_tile, shapes, tiling, spec=spec)


def _one_tile(shapes: Shapes, tiling: Tiling, spec: Spec) -> Tree:
    """Computes scores and their derivative for one tile."""
    T, S = shapes.T, shapes.S
    spec = slicing.pad_spec(spec, T, S, *slicing.round_up(T, S, tiling))
    spec_operands = operands.SpecOperands(spec, tiling)
    if spec_operands.scalar_entries > _MOST_SCALARS:
        raise NotImplementedError(f"{spec_operands.scalar_entries} numbers in scalar memory")

    def modify(tile: slicing.HeadTile, products: Array) -> Tree:
        score, pull = jax.vjp(lambda x: tile.modify(x, True), products)
        return score, pull(score)

    return spec_operands.traced(modify, jnp.zeros(tiling, jnp.float32))


def _forward(call: TiledCall, q: Array, k: Array, v: Array, statistics: bool) -> list[Array]:
    """Returns the output `[B, N, T, V]` in the query's dtype or, with `statistics`, in float32 with
    the maximum and the log of the sum `[B, N, 1, T]`."""
    shapes, spec = call.shapes, call.spec
    safe_factor = programs.overflow_safe_factor(shapes.S)

    def visit(masked: bool, run: Callable[..., Any], arrays: Any, state: Any) -> tuple[Array, ...]:
        (q, k, v), (maximum, total, weighted) = arrays, state
        products = programs.query_key_products(spec, q, k, v)
        score = run(lambda tile, x: tile.modify(x, masked), products)
        score = jnp.broadcast_to(score, call.tiling)
        weights, factor, maximum, total = programs.more_keys(score, maximum, total)
        dropped = run(lambda tile, x: tile.drop(x), weights)
        part = dot(dropped * safe_factor, finite(spec, v), (1, 0), spec)
        return maximum, total, weighted * factor + part

    def finish(maximum: Array, total: Array, weighted: Array) -> list[Array]:
        out, *columns = programs.all_keys(maximum, total, weighted, safe_factor)
        return [out, *map(operands.row, columns if statistics else ())]

    B, N, T = shapes.B, shapes.N, shapes.T
    row = jax.ShapeDtypeStruct((B, N, 1, T), jnp.float32)
    dtype = jnp.float32 if statistics else q.dtype
    results = [jax.ShapeDtypeStruct((B, N, T, shapes.V), dtype), *[row] * (2 * statistics)]
    return programs.launch(
        "jattn_forward",
        call,
        programs.traversal(call),
        visit,
        finish,
        [(q, False), (k, True), (v, True)],
        [(x, False) for x in results],
        programs.no_keys(call.tiling.block_q, shapes.V),
    )


def _gradients(
    call: TiledCall, rows: list[Array], k: Array, v: Array, *, by_key: bool
) -> list[Array]:
    """Returns the gradient `[B, N, T, H]` of the queries or, with `by_key`, the gradients
    `[B, K, S, H]` and `[B, K, S, V]` of keys and values."""
    shapes, spec = call.shapes, call.spec

    def visit(masked: bool, run: Callable[..., Any], arrays: Any, state: Any) -> tuple[Array, ...]:
        *rows, k, v = arrays

        def function(tile: slicing.HeadTile, products: Array, cotangent: Any) -> Tree:
            score, pull = jax.vjp(lambda x: tile.modify(x, masked), products)
            weights, d_score = cotangent(score, masked)
            return pull(d_score)[0], tile.drop(weights)

        d_products, weights = programs.score_gradient(call, run, function, rows, k, v)
        if not by_key:
            return (state[0] + dot(d_products, finite(spec, k), (1, 0), spec),)
        d_key = dot(d_products, finite(spec, rows[0]), (0, 0), spec)
        return state[0] + d_key, state[1] + dot(weights, rows[1], (0, 0), spec)

    B, N, K, T, S = shapes.B, shapes.N, shapes.K, shapes.T, shapes.S
    outer, sizes = ((B, K, S), (shapes.H, shapes.V)) if by_key else ((B, N, T), (shapes.H,))
    return programs.launch(
        "jattn_d_keys" if by_key else "jattn_d_queries",
        call,
        programs.traversal(call, by_key=by_key),
        visit,
        lambda *totals: totals,
        [*((x, False) for x in rows), (k, True), (v, True)],
        [(jax.ShapeDtypeStruct((*outer, size), k.dtype), by_key) for size in sizes],
        [((call.tiling[by_key], size), 0.0) for size in sizes],
    )


def _bias_gradient(
    call: TiledCall, which: int, rows: list[Array], k: Array, v: Array
) -> Array | None:
    """Returns the gradient of a parameter `[B or 1, N or 1, T, S]` in float32; None if the
    parameter has other axes.

    Each of its tiles is written once: the program of a tile visits the batch rows and heads that
    share it, one after another, and sums the cotangents of their scores, so that no array larger
    than the gradient is needed.
    """
    leaf = parameters(call.spec)[which]
    names = split_letters(parameter_letters(call.spec)[which])
    shapes, (t, s) = call.shapes, call.tiling
    if names != ["*B", "N", "T", "S"] or leaf.shape[2:] != (shapes.T, shapes.S):
        return None
    outer = leaf.shape[:2]
    shared = [1 if n > 1 else size for n, size in zip(outer, (shapes.B, shapes.N), strict=True)]

    def tile_at(_: Any, b: Array, h: Array, i: Array, j: Array, step: Array) -> TileIndex:
        heads = jnp.int32(shared[1])
        return TileIndex(b + lax.div(step, heads), h + lax.rem(step, heads), i, j)

    def kinds_at(arrays: Any, *place: Array) -> dict[int, Any]:
        (tile_kinds,), (b, h, i, j) = arrays, tile_at(None, *place)
        kind = tile_kinds[(*block_mask.clamped(tile_kinds, b, h), i, j)]
        return {masks.MIXED: kind != masks.EMPTY}

    def visit(masked: bool, run: Callable[..., Any], arrays: Any, state: Any) -> tuple[Array]:
        *rows, k, v = arrays

        def d_bias(tile: slicing.HeadTile, products: Array, cotangent: Any) -> Array:
            score, pull = tile.modified(products, masked)
            return pull(cotangent(score, masked)[1])[1][which]

        return (state[0] + programs.score_gradient(call, run, d_bias, rows, k, v),)

    kinds = call.kinds.astype(jnp.int32)
    grid = (*outer, shapes.T // t, shapes.S // s, math.prod(shared))
    return programs.launch(
        "jattn_d_bias",
        call,
        programs.Traversal(grid, (kinds,), tile_at, kinds_at),
        visit,
        lambda total: (total,),
        [*((x, False) for x in rows), (k, True), (v, True)],
        [(jax.ShapeDtypeStruct(leaf.shape, jnp.float32), None)],
        [((t, s), 0.0)],
    )[0]


def _tokens_first(x: Array, shape: tuple[int, ...]) -> Array:
    """Returns `[B, N, T, ·]` or `[B, N, 1, T]` as `[B, T, N, ·]` of a shape, without padding."""
    x = jnp.moveaxis(x, 1, 2) if len(shape) == 4 else jnp.swapaxes(x[:, :, 0], 1, 2)
    return slicing.unpadded(x, shape)


def _forward_pass(
    platform: str, lse: bool, spec: Spec, query: Array, key: Array, value: Array
) -> tuple[Array, Normalizer, Array]:
    """Computes the output and, with `lse`, the normalizer. Without it the normalizer is 0, and the
    kernel writes the output in the query's dtype."""
    call, _, (q,), k, v = TiledCall.of(platform, spec, (query,), key, value)
    out, *statistics = _forward(call, q, k, v, lse)
    shape = query.shape[:3]
    out = _tokens_first(out, (*shape, value.shape[3])).astype(jnp.float32)
    rows = [_tokens_first(x, shape) for x in statistics] or [jnp.zeros(shape, jnp.float32)] * 2
    return out, Normalizer(*rows), jnp.zeros((), bool)


def _backward_pass(
    platform: str, spec: Spec, per_query: PerQuery, key: Array, value: Array, _: Array
) -> tuple[list[Array], Array, Array, Array]:
    call, padded, rows, k, v = TiledCall.of(platform, spec, cast_cotangent(per_query), key, value)
    gradients = [x for by_key in (False, True) for x in _gradients(call, rows, k, v, by_key=by_key)]
    d_query, d_key, d_value = (
        _tokens_first(d, x.shape).astype(jnp.float32)
        for d, x in zip(gradients, (per_query.query, key, value), strict=True)
    )
    d_parameters: list[Any] = [
        _bias_gradient(call, which, rows, k, v) for which in range(len(parameters(spec)))
    ]
    if any(x is None for x in d_parameters):  # XLA sums these, as it can scatter
        summed = blockwise.parameter_gradients(
            padded.spec, PerQuery(*padded.rows), padded.key, padded.value, call.tiling
        )
        d_parameters = [y if x is None else x for x, y in zip(d_parameters, summed, strict=True)]
    return slicing.unpadded_parameters(d_parameters, spec), d_query, d_key, d_value


def functions(platform: str) -> AttentionVJP:
    """Returns the kernel's functions; on a CPU they are interpreted."""
    return AttentionVJP(
        functools.partial(_forward_pass, platform, True),
        functools.partial(_backward_pass, platform),
        forward_alone=functools.partial(_forward_pass, platform, False),
    )


KERNEL = Kernel(supports, functions, reader=READER)
