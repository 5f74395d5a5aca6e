"""Attention as TPU kernels for any mask and score function, in memory linear in T and S.

FlashAttention-2 (Dao 2023) in Pallas: programs run over batch rows, heads, blocks of queries and
the tiles of keys that the mask leaves, one after another, and fold these into an online softmax
that lies in the core's memory. Backward, weights are computed again, once with the keys as inner
axis for the gradients of queries, once with the queries, and the heads of a group, for those of
keys and values.

The scores of a tile are those of `jattn.tile`, so that kernels know no mask and no score
function. Gradients of biases along T and S are those of `bias_gradient`, those of other parameters
are left to blockwise.

On a CPU the same kernels are interpreted. They compile for TPUs, and have not run on one.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike
from jaxtyping import Array

from jattn._types import Ref, Tree
from jattn.call import Call
from jattn.kernels.common import slicing
from jattn.kernels.common.derivatives import PerQuery
from jattn.kernels.common.vjp import AttentionVJP, cast_cotangent
from jattn.kernels.protocol import Kernel
from jattn.kernels.tpu import bias_gradient, operands, programs
from jattn.kernels.tpu.decode import READER
from jattn.kernels.tpu.operands import TileIndex
from jattn.kernels.tpu.programs import (
    BlockOperand,
    TiledCall,
    Visits,
    at_tile,
    choose_tiling,
    d_products_and_weights,
    dot,
    finite,
    launch,
    lists,
    query_key_products,
)
from jattn.kernels.xla import blockwise
from jattn.softmax import Normalizer
from jattn.spec import Shapes, Spec, parameters


MAX_HEAD_SIZE = 256
_MOST_SCALARS = 2**16  # numbers in the memory of the scalar core
_PRECISIONS = (None, "default", "highest")


# ---------------------------------------------------------------------------------------------
# What it can do
# ---------------------------------------------------------------------------------------------


def supports(call: Call) -> str | None:
    """None or why not: dtypes that TPUs have not, and what lies in no tile."""
    spec, shapes = call.spec, call.shapes
    if shapes.dtype not in (jnp.float32, jnp.bfloat16):
        return f"expected float32 or bfloat16, got {shapes.dtype}"
    if max(shapes.H, shapes.V) > MAX_HEAD_SIZE:
        return f"expected head sizes up to {MAX_HEAD_SIZE}, got {max(shapes.H, shapes.V)}"
    if spec.precision is not None and str(spec.precision).lower() not in _PRECISIONS:
        return f"expected the default precision or the highest, got {spec.precision}"
    if 0 in (shapes.B, shapes.T, shapes.S):
        return None
    leaves, structure = jax.tree.flatten(
        dataclasses.replace(spec, dropout_key=None, dropout_rate=0.0)
    )
    avals = tuple((x.shape, x.dtype) for x in leaves)
    return _scalars_reason(spec, shapes) or _unsupported_reason(structure, avals, shapes)


def _scalars_reason(spec: Spec, shapes: Shapes) -> str | None:
    """Whether the lists of tiles fit into scalar memory."""
    tiling = choose_tiling(shapes)
    T, S = slicing.round_up(shapes.T, shapes.S, tiling)
    each = (T // tiling.block_q) * (S // tiling.block_kv)
    own = (shapes.B if jax.tree.leaves(spec.mask) else 1) * each
    if own <= _MOST_SCALARS:
        return None
    return f"lists of {own} tiles do not fit into scalar memory"


@functools.lru_cache(maxsize=1024)
def _unsupported_reason(structure: Any, avals: tuple[Any, ...], shapes: Shapes) -> str | None:
    """What mask or score function do that a tile cannot, found by tracing them for one."""
    tiling = choose_tiling(shapes)

    def one_tile(leaves: list[Array]) -> Tree:
        spec = jax.tree.unflatten(structure, leaves)
        T, S = shapes.T, shapes.S
        spec = slicing.pad_spec(spec, T, S, *slicing.round_up(T, S, tiling))
        rules = operands.SpecOperands(spec, tiling)
        if rules.scalar_entries > _MOST_SCALARS:
            raise NotImplementedError(f"{rules.scalar_entries} numbers in scalar memory")

        def modify(here: slicing.HeadTile, products: Array) -> Tree:
            score, pull = jax.vjp(lambda x: here.modify(x, True), products)
            return score, pull(score)

        return rules.traced(modify, jnp.zeros(tiling, jnp.float32))

    try:
        jax.eval_shape(one_tile, [jax.ShapeDtypeStruct(*x) for x in avals])
    except NotImplementedError as error:
        return f"a function of mask or score needs {error}"
    return None


# ---------------------------------------------------------------------------------------------
# The kernels
# ---------------------------------------------------------------------------------------------


def _forward(
    problem: TiledCall, q: Array, k: Array, v: Array, dtype: DTypeLike, statistics: bool
) -> list[Array]:
    """Output `[B, N, T, V]` in a dtype and, if asked for, maximum and log of the sum
    `[B, N, 1, T]`."""
    shapes, tiling, spec = problem.shapes, problem.tiling, problem.spec
    (visits, steps), rows = lists(problem), tiling.block_q
    headroom = programs.headroom(shapes.S)

    def kernel(visits_at: Visits, leaves: Tree, arrays: Ref, results: Ref, scratch: Ref) -> None:
        q_ref, k_ref, v_ref = arrays
        maximum, total, weighted = scratch
        b, h, i, step = map(pl.program_id, range(4))
        at = TileIndex(b, h, i, visits_at.tile(b, h, i, step))

        @pl.when(step == 0)
        def _start() -> None:
            maximum[...], total[...], weighted[...] = programs.no_keys(rows, shapes.V)

        def visit(masked: bool) -> None:
            k, v = k_ref[...], v_ref[...]
            found = query_key_products(spec, q_ref[...], k, v)
            score = problem.rules.run(lambda here, x: here.modify(x, masked), leaves, at, found)
            score = jnp.broadcast_to(score, tiling)
            weights, factor, *new = programs.more_keys(score, maximum[...], total[...])
            kept = problem.rules.run(lambda here, x: here.drop(x), leaves, at, weights)
            part = dot(kept * headroom, finite(spec, v), (1, 0), spec)
            (maximum[...], total[...]), weighted[...] = new, weighted[...] * factor + part

        at_tile(visits_at, (b, h, i, step), visit, visits.kinds)

        @pl.when(step == pl.num_programs(3) - 1)
        def _end() -> None:
            out, *both = programs.all_keys(maximum[...], total[...], weighted[...], headroom)
            results[0][...] = out.astype(dtype)
            for result, column in zip(results[1:], both, strict=statistics):
                result[...] = operands.row(column)

    B, N, T = shapes.B, shapes.N, shapes.T
    results = [BlockOperand((B, N, T, shapes.V), dtype, rows, False)]
    if statistics:
        results += [BlockOperand((B, N, 1, T), jnp.float32, rows, False, 3)] * 2
    return launch(
        "jattn_forward",
        problem,
        (B, N, T // rows, steps),
        lambda visits, b, h, i, step: TileIndex(b, h, i, visits.tile(b, h, i, step)),
        kernel,
        visits,
        [(q, False), (k, True), (v, True)],
        results,
        [(rows, 1), (rows, 1), (rows, shapes.V)],
    )


def _d_queries(
    problem: TiledCall, rows: list[Array], k: Array, v: Array, dtype: DTypeLike
) -> Array:
    """The gradient `[B, N, T, H]`."""
    shapes, (block, _) = problem.shapes, problem.tiling
    visits, steps = lists(problem)

    def kernel(visits_at: Visits, leaves: Tree, arrays: Ref, results: Ref, scratch: Ref) -> None:
        *rows_refs, k_ref, v_ref = arrays
        (total,) = scratch
        b, h, i, step = map(pl.program_id, range(4))
        at = TileIndex(b, h, i, visits_at.tile(b, h, i, step))

        @pl.when(step == 0)
        def _start() -> None:
            total[...] = jnp.zeros((block, shapes.H), jnp.float32)

        def visit(masked: bool) -> None:
            k, rows = k_ref[...], [x[...] for x in rows_refs]
            d_products, _ = d_products_and_weights(problem, leaves, at, masked, rows, k, v_ref[...])
            total[...] += dot(d_products, finite(problem.spec, k), (1, 0), problem.spec)

        at_tile(visits_at, (b, h, i, step), visit, visits.kinds)

        @pl.when(step == pl.num_programs(3) - 1)
        def _end() -> None:
            results[0][...] = total[...].astype(dtype)

    B, N, T = shapes.B, shapes.N, shapes.T
    return launch(
        "jattn_d_queries",
        problem,
        (B, N, T // block, steps),
        lambda visits, b, h, i, step: TileIndex(b, h, i, visits.tile(b, h, i, step)),
        kernel,
        visits,
        [*((x, False) for x in rows), (k, True), (v, True)],
        [BlockOperand((B, N, T, shapes.H), dtype, block, False)],
        [(block, shapes.H)],
    )[0]


def _d_keys(
    problem: TiledCall, rows: list[Array], k: Array, v: Array, dtype: DTypeLike
) -> list[Array]:
    """The gradients `[B, K, S, H]` and `[B, K, S, V]`; the steps go through a group's heads."""
    shapes, (_, block) = problem.shapes, problem.tiling
    visits, steps = lists(problem, by_key=True)

    def split(kv: Array, step: Array) -> tuple[Any, Any]:
        """The head, and its step."""
        each = jnp.int32(steps)
        return kv * shapes.G + lax.div(step, each), lax.rem(step, each)

    def kernel(visits_at: Visits, leaves: Tree, arrays: Ref, results: Ref, scratch: Ref) -> None:
        *rows_refs, k_ref, v_ref = arrays
        b, kv, j, step = map(pl.program_id, range(4))
        h, own = split(kv, step)
        at = TileIndex(b, h, visits_at.tile(b, h, j, own), j)

        @pl.when(step == 0)
        def _start() -> None:
            for total, width in zip(scratch, (shapes.H, shapes.V), strict=True):
                total[...] = jnp.zeros((block, width), jnp.float32)

        def visit(masked: bool) -> None:
            rows = [x[...] for x in rows_refs]
            found = d_products_and_weights(
                problem, leaves, at, masked, rows, k_ref[...], v_ref[...]
            )
            d_products, weights = found
            scratch[0][...] += dot(d_products, finite(problem.spec, rows[0]), (0, 0), problem.spec)
            scratch[1][...] += dot(weights, rows[1], (0, 0), problem.spec)

        at_tile(visits_at, (b, h, j, own), visit, visits.kinds)

        @pl.when(step == pl.num_programs(3) - 1)
        def _end() -> None:
            for result, total in zip(results, scratch, strict=True):
                result[...] = total[...].astype(dtype)

    def place(visits: Visits, b: Array, kv: Array, j: Array, step: Array) -> TileIndex:
        h, own = split(kv, step)
        return TileIndex(b, h, visits.tile(b, h, j, own), j)

    B, K, S = shapes.B, shapes.K, shapes.S
    return launch(
        "jattn_d_keys",
        problem,
        (B, K, S // block, shapes.G * steps),
        place,
        kernel,
        visits,
        [*((x, False) for x in rows), (k, True), (v, True)],
        [BlockOperand((B, K, S, x), dtype, block, True) for x in (shapes.H, shapes.V)],
        [(block, x) for x in (shapes.H, shapes.V)],
    )


# ---------------------------------------------------------------------------------------------
# The call
# ---------------------------------------------------------------------------------------------


def _tokens_first(x: Array, shape: tuple[int, ...]) -> Array:
    """`[B, N, T, ·]` or `[B, N, 1, T]` as `[B, T, N, ·]`, without what was padded."""
    x = jnp.moveaxis(x, 1, 2) if len(shape) == 4 else jnp.swapaxes(x[:, :, 0], 1, 2)
    return slicing.unpadded(x, shape)


def _forward_pass(
    platform: str, spec: Spec, query: Array, key: Array, value: Array
) -> tuple[Array, Normalizer, Array]:
    problem, _, (q,), k, v = TiledCall.of(platform, spec, (query,), key, value)
    out, *statistics = _forward(problem, q, k, v, jnp.float32, True)
    rows = query.shape[:3]
    normalizer = Normalizer(*(_tokens_first(x, rows) for x in statistics))
    return _tokens_first(out, (*rows, value.shape[3])), normalizer, jnp.zeros((), bool)


def _values(
    platform: str, spec: Spec, query: Array, key: Array, value: Array
) -> tuple[Array, Normalizer, Array]:
    """As `_forward_pass`, without the normalizer and with digits for the dtype of the query."""
    problem, _, (q,), k, v = TiledCall.of(platform, spec, (query,), key, value)
    (out,) = _forward(problem, q, k, v, query.dtype, False)
    out = _tokens_first(out, (*query.shape[:3], value.shape[3])).astype(jnp.float32)
    nothing = jnp.zeros(query.shape[:3], jnp.float32)
    return out, Normalizer(nothing, nothing), jnp.zeros((), bool)


def _backward_pass(
    platform: str, spec: Spec, per_query: PerQuery, key: Array, value: Array, _: Array
) -> tuple[list[Array], Array, Array, Array]:
    given = cast_cotangent(per_query)
    problem, call, rows, k, v = TiledCall.of(platform, spec, given, key, value)
    d_query = _d_queries(problem, rows, k, v, key.dtype)
    d_key, d_value = _d_keys(problem, rows, k, v, key.dtype)
    d_query, d_key, d_value = (
        _tokens_first(d, x.shape).astype(jnp.float32)
        for d, x in zip((d_query, d_key, d_value), (per_query.query, key, value), strict=True)
    )
    return _d_parameters(problem, call, spec, rows, k, v), d_query, d_key, d_value


def _d_parameters(
    problem: TiledCall, call: slicing.PaddedCall, spec: Spec, rows: list[Array], k: Array, v: Array
) -> list[Array]:
    """Each written tile by tile if it runs along T and S; the others are summed by XLA, which can
    scatter."""
    found: list[Any] = [
        bias_gradient.of(problem, which, rows, k, v) for which in range(len(parameters(spec)))
    ]
    if any(x is None for x in found):
        per_query = PerQuery(*call.rows)
        summed = blockwise.parameter_gradients(
            call.spec, per_query, call.key, call.value, problem.tiling
        )
        found = [y if x is None else x for x, y in zip(found, summed, strict=True)]
    return slicing.unpadded_parameters(found, spec)


def functions(platform: str) -> AttentionVJP:
    """Forward and backward; interpreted on a CPU."""
    forward, backward, values = (
        functools.partial(f, platform) for f in (_forward_pass, _backward_pass, _values)
    )
    return AttentionVJP(forward, backward, forward_alone=values)


KERNEL = Kernel(supports, functions, reader=READER)
