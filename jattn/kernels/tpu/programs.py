"""The parts that the kernels of `tiled` for TPUs share: the padded call, the traversal of its tiles
and the launch.

The lists of the tiles that each block visits are made from the tile map, which is static or
computed in the program. They are copied into scalar memory before the kernel begins, so that the
next tile is copied while one is computed.
"""

import functools
import importlib
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from jattn import masks, softmax, tile, tuning
from jattn._types import Ref, Tree
from jattn.kernels.common import block_mask, reverse_mode, slicing
from jattn.kernels.tpu import operands
from jattn.kernels.tpu.operands import TileIndex
from jattn.spec import Shapes, Spec, Tiling, has_mask


def choose_tiling(shapes: Shapes) -> Tiling:
    """Returns tiles of whole registers, so small that a step fits into a core's memory."""
    most_q, most_kv = tuning.current().tpu_tile
    sizes = (operands.round_up(size, operands.LANES) for size in (shapes.T, shapes.S))
    return Tiling(*map(min, (most_q, most_kv), sizes))


def head_width(size: int) -> int:
    """Returns a head size padded to whole or half registers."""
    return size if size % 64 == 0 else operands.round_up(size, operands.LANES)


class TiledCall(NamedTuple):
    """A call in whole tiles: its spec, sizes and tiling, the spec's arrays as kernels receive them,
    its tile maps `[B or 1, N or 1, n, m]`, and whether the kernels are interpreted."""

    spec: Spec
    shapes: Shapes
    tiling: Tiling
    spec_operands: operands.SpecOperands
    kinds: Any
    interpret: bool

    @classmethod
    def of(cls, platform: str, spec: Spec, rows: Tree, key: Array, value: Array) -> Tree:
        """Returns the call, the padded call, its arrays along queries `[B, N, T, ·]` or
        `[B, N, 1, T]`, and its keys and values `[B, K, S, ·]`."""
        tiling = choose_tiling(Shapes.of(rows[0], value))
        padded = slicing.PaddedCall.of(tiling, head_width, spec, rows, key, value)
        kinds = block_mask.kinds(padded.spec, padded.shapes.T, padded.shapes.S, tiling)
        spec_operands = operands.SpecOperands(padded.spec, tiling)
        call = cls(padded.spec, padded.shapes, tiling, spec_operands, kinds, platform == "cpu")
        heads = lambda x: jnp.moveaxis(x, 2, 1)  # noqa: E731
        rows = [heads(x) if x.ndim == 4 else heads(x)[:, :, None] for x in padded.rows]
        return call, padded, rows, heads(padded.key), heads(padded.value)


class Traversal(NamedTuple):
    """The tiles that the programs of a kernel visit.

    grid: the sizes of the grid, whose last axis counts the steps of a block.
    arrays: lists of tiles, or tile maps, which a kernel receives in scalar memory.
    tile: returns the `TileIndex` of a step, given these arrays and the place in the grid.
    kinds: returns, given the same, for each kind of tile whether the step visits such a tile.
    """

    grid: tuple[int, ...]
    arrays: tuple[Any, ...]
    tile: Callable[..., TileIndex]
    kinds: Callable[..., dict[int, Any]]


def traversal(call: TiledCall, *, by_key: bool = False) -> Traversal:
    """Returns the traversal in which each block of queries visits keys or, with `by_key`, each
    block of keys visits the queries of all heads of its group, head after head."""
    lists, shapes = block_mask.of(call.kinds, by_key=by_key), call.shapes
    blocks = shapes.S // call.tiling.block_kv if by_key else shapes.T // call.tiling.block_q
    steps = lists.order.shape[-1]

    def row(order: Ref, b: Array, head: Array, block: Array, step: Array) -> tuple[Any, ...]:
        """Returns the query head, the index of the block's list, and the place in the list."""
        if by_key:
            size = jnp.int32(steps)
            head, step = head * shapes.G + lax.div(step, size), lax.rem(step, size)
        return head, (*block_mask.clamped(order, b, head), block), step

    def tile_at(arrays: Ref, *place: Array) -> TileIndex:
        (order, ends), (b, _, block, _) = arrays, place
        h, index, step = row(order, *place)
        # After the last tile this stays the last tile, so that nothing is copied.
        last = jnp.maximum(ends[(*index, 1)] - 1, 0)
        visited = order[(*index, jnp.minimum(step, last))]
        return TileIndex(b, h, *((visited, block) if by_key else (block, visited)))

    def kinds_at(arrays: Ref, *place: Array) -> dict[int, Any]:
        order, ends = arrays
        _, index, step = row(order, *place)
        full, visited = ends[(*index, 0)], ends[(*index, 1)]
        conditions = {masks.FULL: step < full, masks.MIXED: (step >= full) & (step < visited)}
        return {kind: x for kind, x in conditions.items() if kind in lists.kinds}

    heads, steps_each = (shapes.K, shapes.G * steps) if by_key else (shapes.N, steps)
    return Traversal((shapes.B, heads, blocks, steps_each), lists.arrays, tile_at, kinds_at)


def launch(
    name: str,
    call: TiledCall,
    traversal: Traversal,
    visit: Callable[..., Any],
    finish: Callable[..., Any],
    arrays: Sequence[tuple[Array, bool]],
    results: Sequence[tuple[jax.ShapeDtypeStruct, bool | None]],
    state: Sequence[tuple[tuple[int, int], float]],
) -> list[Array]:
    """Computes the results of all blocks.

    Args:
        visit: `visit(masked, run, arrays, state)` returns the state after a tile;
            `run(function, *operands)` computes a function of the tile, see `SpecOperands.run`.
        finish: `finish(*state)` returns the results of a block.
        arrays: arrays `[B, heads, ·, ·]`, and whether each is along keys rather than queries.
        results: the types of the results, and whether each is along keys; None for
            `[B or 1, N or 1, T, S]`, in tiles.
        state: the shapes of the parts of the state, in float32, and their initial values.
    """
    pltpu = importlib.import_module("jax.experimental.pallas.tpu")

    def tile_at(*indices: Ref) -> TileIndex:
        place, arrays = indices[: len(traversal.grid)], indices[len(traversal.grid) :]
        return traversal.tile(arrays, *place)

    block = functools.partial(_block, call, tile_at)

    def run_step(lists: Ref, leaves: Ref, *refs: Ref) -> None:
        array_refs, result_refs, state_refs = refs
        place = list(map(pl.program_id, range(len(traversal.grid))))
        run = functools.partial(call.spec_operands.run, leaves, traversal.tile(lists, *place))

        @pl.when(place[-1] == 0)
        def _start() -> None:
            for ref, (shape, value) in zip(state_refs, state, strict=True):
                ref[...] = jnp.full(shape, value, jnp.float32)

        for kind, condition in traversal.kinds(lists, *place).items():

            @pl.when(condition)
            def _visit(masked: bool = kind == masks.MIXED) -> None:
                blocks, parts = ([x[...] for x in refs] for refs in (array_refs, state_refs))
                for ref, value in zip(state_refs, visit(masked, run, blocks, parts), strict=True):
                    ref[...] = value

        @pl.when(place[-1] == pl.num_programs(len(place) - 1) - 1)
        def _finish() -> None:
            values = finish(*(x[...] for x in state_refs))
            for ref, value in zip(result_refs, values, strict=True):
                ref[...] = value.astype(ref.dtype)

    return launch_steps(
        name,
        run_step,
        traversal.grid,
        ("parallel",) * 3 + ("arbitrary",) * (len(traversal.grid) - 3),
        [jnp.asarray(x) for x in traversal.arrays],
        (call.spec_operands, tile_at),
        [(x, block(x, by_key)) for x, by_key in arrays],
        [(x, block(x, by_key)) for x, by_key in results],
        [pltpu.VMEM(shape, jnp.float32) for shape, _ in state],
        call.interpret,
    )


def launch_steps(
    name: str,
    run_step: Callable[..., None],
    grid: tuple[Any, ...],
    semantics: tuple[str, ...],
    scalars: Sequence[Array],
    spec_operands: tuple[operands.SpecOperands, Callable[..., TileIndex]],
    arrays: Sequence[tuple[Array, pl.BlockSpec]],
    results: Sequence[tuple[jax.ShapeDtypeStruct, pl.BlockSpec]],
    scratch: Sequence[Any],
    interpret: bool,
) -> list[Array]:
    """Runs `run_step(scalars, leaves, arrays, results, scratch)` at each place of a grid.

    scalars: arrays that are copied into scalar memory before the first step.
    spec_operands: the spec, whose arrays are the `leaves`, and a function that returns the tile of
        a step, given the place in the grid and the scalars.
    arrays, results: arrays, or types, and the block of each that belongs to a step.
    """
    pltpu = importlib.import_module("jax.experimental.pallas.tpu")
    spec, tile_at = spec_operands
    groups = scalars, spec.arrays, [x for x, _ in arrays], results, scratch
    ends = [*itertools.accumulate(map(len, groups))]

    def body(*refs: Ref) -> None:  # a function: newer versions of JAX keep weak references to it
        run_step(*(refs[start:end] for start, end in zip([0, *ends], ends, strict=False)))

    flat, over = reverse_mode.varying_alike([*scalars, *spec.arrays, *groups[2]])
    run_kernel = pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=grid,
            in_specs=[*spec.blocks(tile_at), *(block for _, block in arrays)],
            out_specs=[block for _, block in results],
            scratch_shapes=list(scratch),
        ),
        out_shape=[
            jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=over) for x, _ in results
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=semantics),
        name=name,
        interpret=interpret,
    )
    return list(run_kernel(*flat))


def _block(
    call: TiledCall, tile_at: Callable[..., TileIndex], x: Any, by_key: bool | None
) -> pl.BlockSpec:
    """Returns the block of an array or result of `launch` that belongs to a step."""
    if by_key is None:
        shape = (None, None, *call.tiling)
        return pl.BlockSpec(shape, lambda *at: (*at[:2], tile_at(*at).i, tile_at(*at).j))
    axis = int(x.shape[2] == 1)  # 1 for the statistics of rows, [B, N, 1, T]
    sizes = list(x.shape[2:])
    sizes[axis] = call.tiling[by_key]

    def index(*at: Ref) -> tuple[Any, ...]:
        b, h, i, j = tile_at(*at)
        inner: list[Any] = [0, 0]
        inner[axis] = j if by_key else i
        return b, lax.div(h, jnp.int32(call.shapes.G)) if by_key else h, *inner

    return pl.BlockSpec((None, None, *sizes), index)


def dot(x: Array, y: Array, axes: tuple[int, int], spec: Spec) -> Array:
    """Sums x · y over an axis of each, in float32; x is cast to the dtype of y."""
    return lax.dot_general(
        x.astype(y.dtype),
        y,
        (((axes[0],), (axes[1],)), ((), ())),
        precision=spec.precision,
        preferred_element_type=jnp.float32,
    )


def finite(spec: Spec, x: Array) -> Array:
    """Computes `tile.finite` in float32, the only dtype that older TPUs can compare."""
    if not has_mask(spec):
        return x
    return tile.finite(x.astype(jnp.float32)).astype(x.dtype)


def query_key_products(spec: Spec, q: Array, k: Array, v: Array) -> Float[Array, "t s"]:
    """Computes q kᵀ, with NaN for keys whose values are not finite."""
    if has_mask(spec):
        wide = v.astype(jnp.float32)
        marks = jnp.sum(wide - wide, axis=1, keepdims=True)
        k = (k.astype(jnp.float32) + marks).astype(k.dtype)
    return dot(q, k, (1, 1), spec)


def overflow_safe_factor(S: int) -> float:
    """Returns a factor for weights with which no sum of S weighted values overflows if their mean
    does not."""
    return 2.0 ** -math.ceil(math.log2(2 * S))


def no_keys(rows: int, V: int) -> list[tuple[tuple[int, int], float]]:
    """Returns shapes and initial values of the maximum `[R, 1]`, the sum of weights `[R, 1]` and
    the weighted values `[R, V]`."""
    return [((rows, 1), float(jnp.finfo(jnp.float32).min)), ((rows, 1), 0.0), ((rows, V), 0.0)]


def more_keys(
    score: Float[Array, "R s"], maximum: Array, total: Array
) -> tuple[Array, Array, Array, Array]:
    """Returns weights, the factor that rescales earlier weights, and the new maximum and sum."""
    top = jnp.maximum(maximum, jnp.max(score, axis=1, keepdims=True))
    weights, factor = jnp.exp(score - top), jnp.exp(maximum - top)
    return weights, factor, top, total * factor + jnp.sum(weights, axis=1, keepdims=True)


def all_keys(
    maximum: Array, total: Array, weighted: Array, safe_factor: float
) -> tuple[Array, Array, Array]:
    """Returns the output `[R, V]`, the maximum `[R, 1]` and the log of the sum `[R, 1]`."""
    broken, dead = jnp.isnan(total), total == 0
    divisor = jnp.where(broken | dead, 1.0, total)
    out = jnp.where(broken, jnp.nan, weighted / divisor * (1 / safe_factor))
    top = jnp.where(dead, -jnp.inf, jnp.where(broken, jnp.nan, maximum))
    return out, top, jnp.log(divisor)


def score_gradient(
    call: TiledCall,
    run: Callable[..., Any],
    function: Callable[..., Any],
    rows: Sequence[Array],
    k: Array,
    v: Array,
) -> Tree:
    """Computes `function(tile, products, cotangent)` of the tile's products q kᵀ.

    `cotangent(score, masked)` returns the weights p before dropout and the cotangent of the scores,
    p (drop(d_out vᵀ) − delta). `rows` are the tile's arrays of a `PerQuery`.
    """
    q, d_out, *statistics = rows

    def at_tile(tile: slicing.HeadTile, products: Array, *rest: Array) -> Tree:
        d_weights, maximum, log_total, delta = rest

        def cotangent(score: Array, masked: bool) -> tuple[Array, Array]:
            weights = softmax.weights(score, maximum, log_total, masked)
            return weights, weights * (tile.drop(d_weights) - delta[:, None])

        return function(tile, products, cotangent)

    products = query_key_products(call.spec, q, k, v)
    d_weights = dot(d_out, finite(call.spec, v), (1, 1), call.spec)
    results = run(at_tile, products, d_weights, *map(operands.column, statistics))
    return jax.tree.map(lambda x: jnp.broadcast_to(x, call.tiling), results)
