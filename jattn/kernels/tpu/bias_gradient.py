"""The gradient of a bias along T and S on TPUs: each of its tiles is written once.

The program of a tile visits the batch rows and heads that share the tile, one after another, and
sums the cotangents of their scores, so that no array larger than the gradient is needed.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jattn import masks
from jattn._pytree import split_letters
from jattn.kernels.common import block_mask, slicing
from jattn.kernels.tpu import programs
from jattn.kernels.tpu.operands import TileIndex
from jattn.spec import parameter_letters, parameters, with_parameters


def of(call: programs.TiledCall, which: int, rows: list[Array], k: Array, v: Array) -> Array | None:
    """Returns the gradient of a parameter `[B or 1, N or 1, T, S]` in float32; None if the
    parameter has other axes."""
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
        (tile_kinds, _), (b, h, i, j) = arrays, tile_at(None, *place)
        kind = tile_kinds[(*block_mask.clamped(tile_kinds, b, h), i, j)]
        return {masks.MIXED: kind != masks.EMPTY}

    def visit(masked: bool, run: Callable[..., Any], arrays: Any, state: Any) -> tuple[Array]:
        *rows, k, v = arrays

        def d_bias(tile: slicing.HeadTile, products: Array, cotangent: Any) -> Array:
            values = parameters(tile.spec)

            def scores(x: Array) -> Array:
                replaced = with_parameters(tile.spec, [*values[:which], x, *values[which + 1 :]])
                return tile._replace(spec=replaced).modify(products, masked)

            score, pull = jax.vjp(scores, values[which])
            return pull(cotangent(score, masked)[1])[0]

        return (state[0] + programs.score_gradient(call, run, d_bias, rows, k, v),)

    kinds = call.kinds.astype(jnp.int32)
    lists = block_mask.BlockMask(kinds, kinds[..., :1, :1], ())  # the tile map itself
    grid = (*outer, shapes.T // t, shapes.S // s, math.prod(shared))
    return programs.launch(
        "jattn_d_bias",
        call,
        programs.Traversal(grid, lists, tile_at, kinds_at),
        visit,
        lambda total: (total,),
        [*((x, False) for x in rows), (k, True), (v, True)],
        [(jax.ShapeDtypeStruct(leaf.shape, jnp.float32), None)],
        [((t, s), 0.0)],
    )[0]
