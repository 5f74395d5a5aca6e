"""Attention as TPU kernels for any mask and score function, in memory linear in T and S.

FlashAttention-2 (Dao 2023) in Pallas: programs run over batch rows, heads, blocks of queries and
the tiles of keys that the mask leaves, one after another, and fold these into an online softmax
that lies in the core's memory. Backward, weights are computed again, once with the keys as inner
axis for the gradients of queries, once with the queries, and the heads of a group, for those of
keys and values.

Which tiles a block visits are lists made from the tile map, of a static mask or computed in the
program, which are fetched before a kernel begins: so that the next tile is on its way while one is
computed. The scores of a tile are those of `jattn.tile`, so that kernels know no mask and no score
function. Gradients of parameters are left to blockwise.

On a CPU the same kernels are interpreted. They compile for TPUs, and have not run on one.
"""

import dataclasses
import functools
import importlib
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from jattn import masks, softmax, tile, tuning
from jattn.kernels.common import block_mask, slicing
from jattn.kernels.common.derivatives import PerQuery
from jattn.kernels.common.vjp import AttentionVJP, cast_cotangent
from jattn.kernels.tpu import operands
from jattn.kernels.tpu.operands import Place
from jattn.kernels.xla import blockwise
from jattn.softmax import Normalizer
from jattn.spec import Shapes, Spec, Tiling, has_mask, parameters, prepare


MAX_HEAD_SIZE = 256
_LANES = operands.LANES
_MOST_SCALARS = 2**16  # numbers in the memory of the scalar core
_PRECISIONS = (None, "default", "highest")


# ---------------------------------------------------------------------------------------------
# What it can do
# ---------------------------------------------------------------------------------------------


def supports(spec: Spec, shapes: Shapes) -> str | None:
    """None or why not: dtypes that TPUs have not, and what lies in no tile."""
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

    def one_tile(leaves: Any) -> Any:
        spec = prepare(jax.tree.unflatten(structure, leaves), shapes)
        T, S = shapes.T, shapes.S
        spec = slicing.pad_spec(spec, T, S, *slicing.round_up(T, S, tiling))
        rules = operands.SpecOperands(spec, tiling)
        if rules.scalar_entries > _MOST_SCALARS:
            raise NotImplementedError(f"{rules.scalar_entries} numbers in scalar memory")

        def modify(here: slicing.Tile, products: Array) -> Any:
            score, pull = jax.vjp(lambda x: here.modify(x, True), products)
            return score, pull(score)

        return rules.traced(modify, jnp.zeros(tiling, jnp.float32))

    try:
        jax.eval_shape(one_tile, [jax.ShapeDtypeStruct(*x) for x in avals])
    except NotImplementedError as error:
        return f"a function of mask or score needs {error}"
    return None


def choose_tiling(shapes: Shapes) -> Tiling:
    """Tiles of whole registers of which all that a step needs fits into a core's memory."""
    most_q, most_kv = tuning.current().tpu_tile
    whole = lambda size: -(-size // _LANES) * _LANES  # noqa: E731
    return Tiling(min(most_q, whole(shapes.T)), min(most_kv, whole(shapes.S)))


def _width(size: int) -> int:
    """What a head size becomes: whole or half registers."""
    return size if size % 64 == 0 else -(-size // _LANES) * _LANES


# ---------------------------------------------------------------------------------------------
# What all kernels share
# ---------------------------------------------------------------------------------------------


class _Problem(NamedTuple):
    """The sizes of a call in whole tiles, its spec as kernels take it, its tile maps
    `[B or 1, N or 1, n, m]`, and whether the kernels are interpreted."""

    spec: Spec
    shapes: Shapes
    tiling: Tiling
    rules: Any
    kinds: Any
    interpret: bool

    @classmethod
    def of(cls, platform: str, spec: Spec, rows: Any, key: Any, value: Any) -> Any:
        """And the padded call, its `[B, N, T, ·]` and `[B, N, 1, T]`, and its `[B, K, S, ·]`."""
        tiling = choose_tiling(Shapes.of(rows[0], value))
        call = slicing.Call.of(tiling, _width, spec, rows, key, value)
        kinds = block_mask.kinds(call.spec, call.shapes.T, call.shapes.S, tiling)
        rules = operands.SpecOperands(call.spec, tiling)
        problem = cls(call.spec, call.shapes, tiling, rules, kinds, platform == "cpu")
        heads = lambda x: jnp.moveaxis(x, 2, 1)  # noqa: E731
        rows = [heads(x) if x.ndim == 4 else heads(x)[:, :, None] for x in call.rows]
        return problem, call, rows, heads(call.key), heads(call.value)


class _Visits(NamedTuple):
    """The lists of tiles that blocks visit, in a kernel's scalar memory."""

    order: Any
    ends: Any

    def tile(self, b: Any, h: Any, block: Any, step: Any) -> Any:
        """Which tile a block visits at a step; behind the last one it again, so that nothing is
        fetched."""
        row = *block_mask.clamped(self.order, b, h), block
        last = jnp.maximum(self.ends[(*row, 1)] - 1, 0)
        return self.order[(*row, jnp.minimum(step, last))]

    def kind(self, b: Any, h: Any, block: Any, step: Any) -> tuple[Any, Any]:
        """Whether it visits at this step a tile that needs no mask, or one that does."""
        row = *block_mask.clamped(self.order, b, h), block
        full, visited = self.ends[(*row, 0)], self.ends[(*row, 1)]
        return step < full, (step >= full) & (step < visited)


class _Block(NamedTuple):
    """An array `[B, heads, ·, ·]` and the blocks in which a kernel takes or gives it: at the tile
    of queries (or of keys), whole along all other axes."""

    shape: tuple[int, ...]
    dtype: Any
    block: int
    keys: bool
    axis: int = 2

    def spec(self, place: Callable[..., Any], group: int) -> pl.BlockSpec:
        sizes = list(self.shape[2:])
        sizes[self.axis - 2] = self.block

        def index(*at: Any) -> tuple[Any, ...]:
            b, h, i, j = place(*at)
            inner = [0, 0]
            inner[self.axis - 2] = j if self.keys else i
            head = lax.div(h, jnp.int32(group)) if self.keys else h
            return b, head, *inner

        return pl.BlockSpec((None, None, *sizes), index)


def _run(
    name: str,
    problem: _Problem,
    grid: tuple[int, ...],
    place: Callable[..., Any],
    kernel: Callable[..., None],
    visits: block_mask.BlockMask,
    arrays: Any,
    results: list[_Block],
    scratch: list[tuple[int, ...]],
) -> list[Array]:
    """`kernel(visits, leaves, arrays, results, scratch)` for every place of the grid, whose last
    axis is that of the steps of a block."""
    pltpu = importlib.import_module("jax.experimental.pallas.tpu")
    group, tiling = problem.shapes.G, problem.tiling
    inputs = [_block(x, tiling, keys) for x, keys in arrays]
    flat, over = block_mask.varying(
        [*map(jnp.asarray, visits.arrays), *problem.rules.arrays, *(x for x, _ in arrays)]
    )
    leaves = len(problem.rules.arrays)

    def at(*indices: Any) -> Any:
        *here, order, ends = indices
        return place(_Visits(order, ends), *here)

    def body(order: Any, ends: Any, *refs: Any) -> None:
        first, second = leaves + len(inputs), leaves + len(inputs) + len(results)
        kernel(
            _Visits(order, ends),
            refs[:leaves],
            refs[leaves:first],
            refs[first:second],
            refs[second:],
        )

    parallel = ("parallel",) * 3 + ("arbitrary",) * (len(grid) - 3)
    call = pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=grid,
            in_specs=[*problem.rules.blocks(at), *(x.spec(at, group) for x in inputs)],
            out_specs=[x.spec(at, group) for x in results],
            scratch_shapes=[pltpu.VMEM(x, jnp.float32) for x in scratch],
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=over) for x in results],
        compiler_params=pltpu.CompilerParams(dimension_semantics=parallel),
        name=name,
        interpret=problem.interpret,
    )
    return list(call(*flat))


def _block(x: Any, tiling: Tiling, keys: bool) -> _Block:
    axis = 3 if x.shape[2] == 1 else 2  # statistics of rows
    return _Block(x.shape, x.dtype, tiling[keys], keys, axis)


def _dot(x: Array, y: Array, axes: tuple[int, int], spec: Spec) -> Array:
    """The sum over an axis of each, in float32; x takes the dtype of y."""
    return lax.dot_general(
        x.astype(y.dtype),
        y,
        (((axes[0],), (axes[1],)), ((), ())),
        precision=spec.precision,
        preferred_element_type=jnp.float32,
    )


def _finite(spec: Spec, x: Array) -> Array:
    """`tile.finite` by way of float32, the only dtype that older TPUs compare."""
    if not has_mask(spec):
        return x
    return tile.finite(x.astype(jnp.float32)).astype(x.dtype)


def _products(spec: Spec, q: Array, k: Array, v: Array) -> Float[Array, "t s"]:
    """q kᵀ, NaN for keys whose values are not finite."""
    if has_mask(spec):
        wide = v.astype(jnp.float32)
        marks = jnp.sum(wide - wide, axis=1, keepdims=True)
        k = (k.astype(jnp.float32) + marks).astype(k.dtype)
    return _dot(q, k, (1, 1), spec)


# ---------------------------------------------------------------------------------------------
# The kernels
# ---------------------------------------------------------------------------------------------


def _lists(problem: _Problem, by_key: bool = False) -> tuple[block_mask.BlockMask, int]:
    """What blocks visit, and how many steps they take at most."""
    visits = block_mask.of(problem.kinds, by_key=by_key)
    return visits, visits.order.shape[-1]


def _at_tile(
    visits: _Visits, at: tuple[Any, ...], body: Callable[[bool], None], kinds: tuple[int, ...]
) -> None:
    """`body(masked)` if there is a tile to visit."""
    plain, masked = visits.kind(*at)
    if masks.FULL in kinds:
        pl.when(plain)(functools.partial(body, False))
    if masks.MIXED in kinds:
        pl.when(masked)(functools.partial(body, True))


def _forward(
    problem: _Problem, q: Array, k: Array, v: Array, dtype: Any, statistics: bool
) -> list[Array]:
    """Output `[B, N, T, V]` in a dtype and, if asked for, maximum and log of the sum
    `[B, N, 1, T]`."""
    shapes, tiling, spec = problem.shapes, problem.tiling, problem.spec
    (visits, steps), rows = _lists(problem), tiling.block_q
    # So that no sum of weighted values overflows whose mean does not.
    headroom = 2.0 ** -math.ceil(math.log2(2 * shapes.S))

    def kernel(visits_at: _Visits, leaves: Any, arrays: Any, results: Any, scratch: Any) -> None:
        q_ref, k_ref, v_ref = arrays
        maximum, total, weighted = scratch
        b, h, i, step = map(pl.program_id, range(4))
        at = Place(b, h, i, visits_at.tile(b, h, i, step))

        @pl.when(step == 0)
        def _start() -> None:
            maximum[...] = jnp.full((rows, 1), float(jnp.finfo(jnp.float32).min))
            total[...] = jnp.zeros((rows, 1), jnp.float32)
            weighted[...] = jnp.zeros((rows, shapes.V), jnp.float32)

        def visit(masked: bool) -> None:
            k, v, before = k_ref[...], v_ref[...], maximum[...]
            found = _products(spec, q_ref[...], k, v)
            score = problem.rules.run(lambda here, x: here.modify(x, masked), leaves, at, found)
            score = jnp.broadcast_to(score, tiling)
            top = jnp.maximum(before, jnp.max(score, axis=1, keepdims=True))
            weights, factor = jnp.exp(score - top), jnp.exp(before - top)
            total[...] = total[...] * factor + jnp.sum(weights, axis=1, keepdims=True)
            kept = problem.rules.run(lambda here, x: here.drop(x), leaves, at, weights)
            part = _dot(kept * headroom, _finite(spec, v), (1, 0), spec)
            maximum[...], weighted[...] = top, weighted[...] * factor + part

        _at_tile(visits_at, (b, h, i, step), visit, visits.kinds)

        @pl.when(step == pl.num_programs(3) - 1)
        def _end() -> None:
            summed = total[...]
            broken, dead = jnp.isnan(summed), summed == 0
            by = jnp.where(broken | dead, 1.0, summed)
            out = weighted[...] / by * (1 / headroom)
            results[0][...] = jnp.where(broken, jnp.nan, out).astype(dtype)
            if statistics:
                top = jnp.where(dead, -jnp.inf, jnp.where(broken, jnp.nan, maximum[...]))
                results[1][...] = operands.row(top)
                results[2][...] = operands.row(jnp.log(by))

    B, N, T = shapes.B, shapes.N, shapes.T
    results = [_Block((B, N, T, shapes.V), dtype, rows, False)]
    if statistics:
        results += [_Block((B, N, 1, T), jnp.float32, rows, False, 3)] * 2
    return _run(
        "jattn_forward",
        problem,
        (B, N, T // rows, steps),
        lambda visits, b, h, i, step: Place(b, h, i, visits.tile(b, h, i, step)),
        kernel,
        visits,
        [(q, False), (k, True), (v, True)],
        results,
        [(rows, 1), (rows, 1), (rows, shapes.V)],
    )


def _d_products(
    problem: _Problem, leaves: Any, at: Place, masked: bool, rows: Any, k: Array, v: Array
) -> tuple[Array, Array]:
    """The cotangent of q kᵀ, and the weights after dropout. With weights p and dp = d_out vᵀ, that
    of the scores is p (dp − delta)."""
    q, d_out, *statistics = rows

    def found(
        here: slicing.Tile, products: Array, d_weights: Array, top: Array, log: Array, delta: Array
    ) -> tuple[Array, Array]:
        score, pull = jax.vjp(lambda x: here.modify(x, masked), products)
        weights = softmax.weights(score, top, log, masked)
        d_score = weights * (here.drop(d_weights) - delta[:, None])
        return pull(d_score)[0], here.drop(weights)

    products = _products(problem.spec, q, k, v)
    d_weights = _dot(d_out, _finite(problem.spec, v), (1, 1), problem.spec)
    columns = map(operands.column, statistics)
    both = problem.rules.run(found, leaves, at, products, d_weights, *columns)
    d_products, weights = (jnp.broadcast_to(x, problem.tiling) for x in both)
    return d_products, weights


def _d_queries(problem: _Problem, rows: Any, k: Array, v: Array, dtype: Any) -> Array:
    """The gradient `[B, N, T, H]`."""
    shapes, (block, _) = problem.shapes, problem.tiling
    visits, steps = _lists(problem)

    def kernel(visits_at: _Visits, leaves: Any, arrays: Any, results: Any, scratch: Any) -> None:
        *rows_refs, k_ref, v_ref = arrays
        (total,) = scratch
        b, h, i, step = map(pl.program_id, range(4))
        at = Place(b, h, i, visits_at.tile(b, h, i, step))

        @pl.when(step == 0)
        def _start() -> None:
            total[...] = jnp.zeros((block, shapes.H), jnp.float32)

        def visit(masked: bool) -> None:
            k, rows = k_ref[...], [x[...] for x in rows_refs]
            d_products, _ = _d_products(problem, leaves, at, masked, rows, k, v_ref[...])
            total[...] += _dot(d_products, _finite(problem.spec, k), (1, 0), problem.spec)

        _at_tile(visits_at, (b, h, i, step), visit, visits.kinds)

        @pl.when(step == pl.num_programs(3) - 1)
        def _end() -> None:
            results[0][...] = total[...].astype(dtype)

    B, N, T = shapes.B, shapes.N, shapes.T
    return _run(
        "jattn_d_queries",
        problem,
        (B, N, T // block, steps),
        lambda visits, b, h, i, step: Place(b, h, i, visits.tile(b, h, i, step)),
        kernel,
        visits,
        [*((x, False) for x in rows), (k, True), (v, True)],
        [_Block((B, N, T, shapes.H), dtype, block, False)],
        [(block, shapes.H)],
    )[0]


def _d_keys(problem: _Problem, rows: Any, k: Array, v: Array, dtype: Any) -> list[Array]:
    """The gradients `[B, K, S, H]` and `[B, K, S, V]`; the steps go through a group's heads."""
    shapes, (_, block) = problem.shapes, problem.tiling
    visits, steps = _lists(problem, by_key=True)

    def split(kv: Any, step: Any) -> tuple[Any, Any]:
        """The head, and its step."""
        each = jnp.int32(steps)
        return kv * shapes.G + lax.div(step, each), lax.rem(step, each)

    def kernel(visits_at: _Visits, leaves: Any, arrays: Any, results: Any, scratch: Any) -> None:
        *rows_refs, k_ref, v_ref = arrays
        b, kv, j, step = map(pl.program_id, range(4))
        h, own = split(kv, step)
        at = Place(b, h, visits_at.tile(b, h, j, own), j)

        @pl.when(step == 0)
        def _start() -> None:
            for total, width in zip(scratch, (shapes.H, shapes.V), strict=True):
                total[...] = jnp.zeros((block, width), jnp.float32)

        def visit(masked: bool) -> None:
            rows = [x[...] for x in rows_refs]
            found = _d_products(problem, leaves, at, masked, rows, k_ref[...], v_ref[...])
            d_products, weights = found
            scratch[0][...] += _dot(
                d_products, _finite(problem.spec, rows[0]), (0, 0), problem.spec
            )
            scratch[1][...] += _dot(weights, rows[1], (0, 0), problem.spec)

        _at_tile(visits_at, (b, h, j, own), visit, visits.kinds)

        @pl.when(step == pl.num_programs(3) - 1)
        def _end() -> None:
            for result, total in zip(results, scratch, strict=True):
                result[...] = total[...].astype(dtype)

    def place(visits: _Visits, b: Any, kv: Any, j: Any, step: Any) -> Place:
        h, own = split(kv, step)
        return Place(b, h, visits.tile(b, h, j, own), j)

    B, K, S = shapes.B, shapes.K, shapes.S
    return _run(
        "jattn_d_keys",
        problem,
        (B, K, S // block, shapes.G * steps),
        place,
        kernel,
        visits,
        [*((x, False) for x in rows), (k, True), (v, True)],
        [_Block((B, K, S, x), dtype, block, True) for x in (shapes.H, shapes.V)],
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
    problem, _, (q,), k, v = _Problem.of(platform, spec, (query,), key, value)
    out, *statistics = _forward(problem, q, k, v, jnp.float32, True)
    rows = query.shape[:3]
    normalizer = Normalizer(*(_tokens_first(x, rows) for x in statistics))
    return _tokens_first(out, (*rows, value.shape[3])), normalizer, jnp.zeros((), bool)


def _values(
    platform: str, spec: Spec, query: Array, key: Array, value: Array
) -> tuple[Array, Normalizer, Array]:
    """As `_forward_pass`, without the normalizer and with digits for the dtype of the query."""
    problem, _, (q,), k, v = _Problem.of(platform, spec, (query,), key, value)
    (out,) = _forward(problem, q, k, v, query.dtype, False)
    out = _tokens_first(out, (*query.shape[:3], value.shape[3])).astype(jnp.float32)
    nothing = jnp.zeros(query.shape[:3], jnp.float32)
    return out, Normalizer(nothing, nothing), jnp.zeros((), bool)


def _backward_pass(
    platform: str, spec: Spec, per_query: PerQuery, key: Array, value: Array, _: Array
) -> tuple[list[Array], Array, Array, Array]:
    given = cast_cotangent(per_query)
    problem, call, rows, k, v = _Problem.of(platform, spec, given, key, value)
    d_query = _d_queries(problem, rows, k, v, key.dtype)
    d_key, d_value = _d_keys(problem, rows, k, v, key.dtype)
    d_query, d_key, d_value = (
        _tokens_first(d, x.shape).astype(jnp.float32)
        for d, x in zip((d_query, d_key, d_value), (per_query.query, key, value), strict=True)
    )
    return _d_parameters(problem, call, spec), d_query, d_key, d_value


def _d_parameters(problem: _Problem, call: slicing.Call, spec: Spec) -> list[Array]:
    """Those of parameters, summed by XLA: it can scatter."""
    if not parameters(spec):
        return []
    found = blockwise.parameter_gradients(
        call.spec, PerQuery(*call.rows), call.key, call.value, problem.tiling
    )
    return slicing.unpadded_parameters(found, spec)


def functions(platform: str) -> AttentionVJP:
    """Forward and backward; interpreted on a CPU."""
    forward, backward, values = (
        functools.partial(f, platform) for f in (_forward_pass, _backward_pass, _values)
    )
    return AttentionVJP(forward, backward, forward_alone=values)
