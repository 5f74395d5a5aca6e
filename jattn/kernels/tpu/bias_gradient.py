"""The gradient of a bias along T and S on TPUs: each of its tiles is written once.

A tile's programs go through the batch rows and heads that share it, one after another, and add up
the cotangents of their scores; nothing larger than the gradient itself is ever held.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from jattn import masks, softmax
from jattn._types import Ref, Tree
from jattn.kernels.common import block_mask, slicing
from jattn.kernels.tpu import operands, programs
from jattn.kernels.tpu.operands import TileIndex
from jattn.spec import parameter_letters, parameters, with_parameters


def of(
    problem: programs.TiledCall, which: int, rows: list[Array], k: Array, v: Array
) -> Array | None:
    """The gradient of a parameter `[B or 1, N or 1, T, S]` in its own shape, in float32; None if it
    is another."""
    leaf = parameters(problem.spec)[which]
    names = parameter_letters(problem.spec)[which].replace("#", "").split()
    shapes, (t, s) = problem.shapes, problem.tiling
    if names != ["*B", "N", "T", "S"] or leaf.shape[2:] != (shapes.T, shapes.S):
        return None
    own = leaf.shape[:2]
    shared = [1 if n > 1 else size for n, size in zip(own, (shapes.B, shapes.N), strict=True)]
    grid = (*own, shapes.T // t, shapes.S // s, math.prod(shared))

    def place(_: Tree, b: Array, h: Array, i: Array, j: Array, step: Array) -> TileIndex:
        each = jnp.int32(shared[1])
        return TileIndex(b + lax.div(step, each), h + lax.rem(step, each), i, j)

    def kernel(kinds: Tree, leaves: Ref, arrays: Ref, results: Ref, scratch: Ref) -> None:
        *rows_refs, k_ref, v_ref = arrays
        (total,) = scratch
        index = list(map(pl.program_id, range(5)))
        at = place(None, *index)

        @pl.when(index[4] == 0)
        def _start() -> None:
            total[...] = jnp.zeros((t, s), jnp.float32)

        kind = kinds.order[(*block_mask.clamped(kinds.order, at.b, at.h), at.i, at.j)]

        @pl.when(kind != masks.EMPTY)
        def _visit() -> None:
            rows = [x[...] for x in rows_refs]
            total[...] += _at_tile(problem, which, leaves, at, rows, k_ref[...], v_ref[...])

        @pl.when(index[4] == pl.num_programs(4) - 1)
        def _end() -> None:
            results[0][...] = total[...]

    kinds = problem.kinds.astype(jnp.int32)
    tiles = block_mask.BlockMask(kinds, kinds[..., :1, :1], ())
    arrays = [*((x, False) for x in rows), (k, True), (v, True)]
    result = programs.TileResult(leaf.shape, own)
    return programs.launch(
        "jattn_d_bias", problem, grid, place, kernel, tiles, arrays, [result], [(t, s)]
    )[0]


def _at_tile(
    problem: programs.TiledCall,
    which: int,
    leaves: Ref,
    at: TileIndex,
    rows: list[Array],
    k: Array,
    v: Array,
) -> Array:
    """What a tile adds."""
    q, d_out, *statistics = rows

    def found(
        here: slicing.HeadTile,
        products: Array,
        d_weights: Array,
        top: Array,
        log: Array,
        delta: Array,
    ) -> Array:
        values = parameters(here.spec)

        def scores(x: Array) -> Array:
            replaced = with_parameters(here.spec, [*values[:which], x, *values[which + 1 :]])
            return here._replace(spec=replaced).modify(products, True)

        score, pull = jax.vjp(scores, values[which])
        weights = softmax.weights(score, top, log)
        (d_leaf,) = pull(weights * (here.drop(d_weights) - delta[:, None]))
        return d_leaf

    products = programs.query_key_products(problem.spec, q, k, v)
    d_weights = programs.dot(d_out, programs.finite(problem.spec, v), (1, 1), problem.spec)
    columns = map(operands.column, statistics)
    d_leaf = problem.rules.run(found, leaves, at, products, d_weights, *columns)
    return jnp.broadcast_to(d_leaf, problem.tiling)
