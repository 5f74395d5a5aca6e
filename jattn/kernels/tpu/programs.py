"""What kernels of `tiled` for TPUs share: the problem, its tiles in turn, and the launch.

Which tiles a block visits are lists made from the tile map, of a static mask or computed in the
program, which are fetched before a kernel begins: so that the next tile is on its way while one is
computed.
"""

import functools
import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jattn import masks, softmax, tile, tuning
from jattn._types import Ref, Tree
from jattn.kernels.common import block_mask, reverse_mode, slicing
from jattn.kernels.tpu import operands
from jattn.kernels.tpu.operands import TileIndex
from jattn.spec import Shapes, Spec, Tiling, has_mask


def choose_tiling(shapes: Shapes) -> Tiling:
    """Tiles of whole registers of which all that a step needs fits into a core's memory."""
    most_q, most_kv = tuning.current().tpu_tile
    whole = lambda size: -(-size // operands.LANES) * operands.LANES  # noqa: E731
    return Tiling(min(most_q, whole(shapes.T)), min(most_kv, whole(shapes.S)))


def head_width(size: int) -> int:
    """What a head size becomes: whole or half registers."""
    return size if size % 64 == 0 else -(-size // operands.LANES) * operands.LANES


class TiledCall(NamedTuple):
    """The sizes of a call in whole tiles, its spec as kernels take it, its tile maps
    `[B or 1, N or 1, n, m]`, and whether the kernels are interpreted."""

    spec: Spec
    shapes: Shapes
    tiling: Tiling
    rules: Any
    kinds: Any
    interpret: bool

    @classmethod
    def of(cls, platform: str, spec: Spec, rows: Tree, key: Array, value: Array) -> Tree:
        """And the padded call, its `[B, N, T, ·]` and `[B, N, 1, T]`, and its `[B, K, S, ·]`."""
        tiling = choose_tiling(Shapes.of(rows[0], value))
        call = slicing.PaddedCall.of(tiling, head_width, spec, rows, key, value)
        kinds = block_mask.kinds(call.spec, call.shapes.T, call.shapes.S, tiling)
        rules = operands.SpecOperands(call.spec, tiling)
        problem = cls(call.spec, call.shapes, tiling, rules, kinds, platform == "cpu")
        heads = lambda x: jnp.moveaxis(x, 2, 1)  # noqa: E731
        rows = [heads(x) if x.ndim == 4 else heads(x)[:, :, None] for x in call.rows]
        return problem, call, rows, heads(call.key), heads(call.value)


class Visits(NamedTuple):
    """The lists of tiles that blocks visit, in a kernel's scalar memory."""

    order: Ref
    ends: Ref

    def tile(self, b: Array, h: Array, block: Array, step: Array) -> Array:
        """Which tile a block visits at a step. Behind the last tile it is the last again, so
        that nothing is fetched."""
        row = *block_mask.clamped(self.order, b, h), block
        last = jnp.maximum(self.ends[(*row, 1)] - 1, 0)
        return self.order[(*row, jnp.minimum(step, last))]

    def kind(self, b: Array, h: Array, block: Array, step: Array) -> tuple[Any, Any]:
        """Whether it visits at this step a tile that needs no mask, or one that does."""
        row = *block_mask.clamped(self.order, b, h), block
        full, visited = self.ends[(*row, 0)], self.ends[(*row, 1)]
        return step < full, (step >= full) & (step < visited)


class BlockOperand(NamedTuple):
    """An array `[B, heads, ·, ·]` and the blocks in which a kernel takes or gives it: at the tile
    of queries (or of keys), whole along all other axes."""

    shape: tuple[int, ...]
    dtype: DTypeLike
    block: int
    keys: bool
    axis: int = 2

    def spec(self, place: Callable[..., Any], group: int, tiling: Tiling) -> pl.BlockSpec:
        sizes = list(self.shape[2:])
        sizes[self.axis - 2] = self.block

        def index(*at: Ref) -> tuple[Any, ...]:
            b, h, i, j = place(*at)
            inner = [0, 0]
            inner[self.axis - 2] = j if self.keys else i
            head = lax.div(h, jnp.int32(group)) if self.keys else h
            return b, head, *inner

        return pl.BlockSpec((None, None, *sizes), index)


class TileResult(NamedTuple):
    """A result `[B or 1, N or 1, T, S]` in float32, given in tiles."""

    shape: tuple[int, ...]
    own: tuple[int, int]

    @property
    def dtype(self) -> DTypeLike:
        return jnp.float32

    def spec(self, place: Callable[..., Any], group: int, tiling: Tiling) -> pl.BlockSpec:
        def index(*at: Ref) -> tuple[Any, ...]:
            outer = at[:2]  # the first axes of the grid
            _, _, i, j = place(*at)
            return *outer, i, j

        return pl.BlockSpec((None, None, *tiling), index)


def launch(
    name: str,
    problem: TiledCall,
    grid: tuple[int, ...],
    place: Callable[..., Any],
    kernel: Callable[..., None],
    visits: block_mask.BlockMask,
    arrays: Tree,
    results: Sequence[BlockOperand | TileResult],
    scratch: list[tuple[int, ...]],
) -> list[Array]:
    """`kernel(visits, leaves, arrays, results, scratch)` for every place of the grid, whose last
    axis is that of the steps of a block."""
    pltpu = importlib.import_module("jax.experimental.pallas.tpu")
    group, tiling = problem.shapes.G, problem.tiling
    inputs = [block_of(x, tiling, keys) for x, keys in arrays]
    flat, over = reverse_mode.varying_alike(
        [*map(jnp.asarray, visits.arrays), *problem.rules.arrays, *(x for x, _ in arrays)]
    )
    leaves = len(problem.rules.arrays)

    def at(*indices: Ref) -> TileIndex:
        *here, order, ends = indices
        return place(Visits(order, ends), *here)

    def body(order: Ref, ends: Ref, *refs: Ref) -> None:
        first, second = leaves + len(inputs), leaves + len(inputs) + len(results)
        kernel(
            Visits(order, ends),
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
            in_specs=[*problem.rules.blocks(at), *(x.spec(at, group, tiling) for x in inputs)],
            out_specs=[x.spec(at, group, tiling) for x in results],
            scratch_shapes=[pltpu.VMEM(x, jnp.float32) for x in scratch],
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=over) for x in results],
        compiler_params=pltpu.CompilerParams(dimension_semantics=parallel),
        name=name,
        interpret=problem.interpret,
    )
    return list(call(*flat))


def block_of(x: Array, tiling: Tiling, keys: bool) -> BlockOperand:
    axis = 3 if x.shape[2] == 1 else 2  # statistics of rows
    return BlockOperand(x.shape, x.dtype, tiling[keys], keys, axis)


def dot(x: Array, y: Array, axes: tuple[int, int], spec: Spec) -> Array:
    """The sum over an axis of each, in float32; x takes the dtype of y."""
    return lax.dot_general(
        x.astype(y.dtype),
        y,
        (((axes[0],), (axes[1],)), ((), ())),
        precision=spec.precision,
        preferred_element_type=jnp.float32,
    )


def finite(spec: Spec, x: Array) -> Array:
    """`tile.finite` by way of float32, the only dtype that older TPUs compare."""
    if not has_mask(spec):
        return x
    return tile.finite(x.astype(jnp.float32)).astype(x.dtype)


def query_key_products(spec: Spec, q: Array, k: Array, v: Array) -> Float[Array, "t s"]:
    """q kᵀ, NaN for keys whose values are not finite."""
    if has_mask(spec):
        wide = v.astype(jnp.float32)
        marks = jnp.sum(wide - wide, axis=1, keepdims=True)
        k = (k.astype(jnp.float32) + marks).astype(k.dtype)
    return dot(q, k, (1, 1), spec)


def headroom(S: int) -> float:
    """What weights are multiplied with, so that no sum of S weighted values overflows whose mean
    does not."""
    return 2.0 ** -math.ceil(math.log2(2 * S))


def no_keys(rows: int, V: int) -> tuple[Array, Array, Array]:
    """Maximum `[R, 1]`, sum of weights `[R, 1]` and weighted values `[R, V]` before any key."""
    zeros = functools.partial(jnp.zeros, dtype=jnp.float32)
    least = jnp.full((rows, 1), float(jnp.finfo(jnp.float32).min))
    return least, zeros((rows, 1)), zeros((rows, V))


def more_keys(
    score: Float[Array, "R s"], maximum: Array, total: Array
) -> tuple[Array, Array, Array, Array]:
    """Weights, the factor to those of the keys before, and maximum and sum with these keys."""
    top = jnp.maximum(maximum, jnp.max(score, axis=1, keepdims=True))
    weights, factor = jnp.exp(score - top), jnp.exp(maximum - top)
    return weights, factor, top, total * factor + jnp.sum(weights, axis=1, keepdims=True)


def all_keys(
    maximum: Array, total: Array, weighted: Array, headroom: float
) -> tuple[Array, Array, Array]:
    """The output `[R, V]`, and the maximum and the log of the sum `[R, 1]`."""
    broken, dead = jnp.isnan(total), total == 0
    by = jnp.where(broken | dead, 1.0, total)
    out = jnp.where(broken, jnp.nan, weighted / by * (1 / headroom))
    top = jnp.where(dead, -jnp.inf, jnp.where(broken, jnp.nan, maximum))
    return out, top, jnp.log(by)


def lists(problem: TiledCall, by_key: bool = False) -> tuple[block_mask.BlockMask, int]:
    """What blocks visit, and how many steps they take at most."""
    visits = block_mask.of(problem.kinds, by_key=by_key)
    return visits, visits.order.shape[-1]


def at_tile(
    visits: Visits, at: tuple[Any, ...], body: Callable[[bool], None], kinds: tuple[int, ...]
) -> None:
    """`body(masked)` if there is a tile to visit."""
    full, masked = visits.kind(*at)
    if masks.FULL in kinds:
        pl.when(full)(functools.partial(body, False))
    if masks.MIXED in kinds:
        pl.when(masked)(functools.partial(body, True))


def d_products_and_weights(
    problem: TiledCall,
    leaves: Tree,
    at: TileIndex,
    masked: bool,
    rows: list[Array],
    k: Array,
    v: Array,
) -> tuple[Array, Array]:
    """The cotangent of q kᵀ, and the weights after dropout. With weights p and dp = d_out vᵀ, that
    of the scores is p (dp − delta)."""
    q, d_out, *statistics = rows

    def found(
        here: slicing.HeadTile,
        products: Array,
        d_weights: Array,
        top: Array,
        log: Array,
        delta: Array,
    ) -> tuple[Array, Array]:
        score, pull = jax.vjp(lambda x: here.modify(x, masked), products)
        weights = softmax.weights(score, top, log, masked)
        d_score = weights * (here.drop(d_weights) - delta[:, None])
        return pull(d_score)[0], here.drop(weights)

    products = query_key_products(problem.spec, q, k, v)
    d_weights = dot(d_out, finite(problem.spec, v), (1, 1), problem.spec)
    columns = map(operands.column, statistics)
    both = problem.rules.run(found, leaves, at, products, d_weights, *columns)
    d_products, weights = (jnp.broadcast_to(x, problem.tiling) for x in both)
    return d_products, weights
