"""The derivative functions that no kernel has: tile by tile, in memory linear in T and S.

From tangents of parameters, queries and keys comes ds, the tangent of the scores s: the derivative
of the same `jattn.tile` that makes s. With the weights p = softmax(s) of the rows

    d_lse = Σ p ds        d_out = Σ drop(p) (ds v + dv) − d_lse out

so that one visit of each tile is enough. Second derivatives are derivatives in forward mode, taken
by JAX, of this function and of `blockwise`'s backward function.

Both compute the normalizer of their own scores. A kernel may round scores differently; where these
are large, its normalizer does not make weights of ours.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jattn import softmax, tile, tuning
from jattn._pytree import pytree_dataclass, select_head
from jattn._types import Index, LogSumExp, Output, Tree, accumulation
from jattn.kernels.common import slicing, tile_schedule, vjp
from jattn.kernels.common.derivatives import DerivativeFunctions, PerQuery, TangentInputs
from jattn.kernels.xla import blockwise
from jattn.kernels.xla.blockwise import Problem, Values, take_head, write_head
from jattn.spec import Spec, Tiling, parameters, scaled, with_parameters


@pytree_dataclass
class _SpecAndTangent:
    """A spec, and the same with the tangents of its parameters in place of these: what is cut out
    of one is cut out of the other."""

    spec: Spec
    tangent: Spec


class _HeadSchedule(NamedTuple):
    """In which order the tiles of a head are visited: in blocks of so many `rows`.

    `visit(i, step, state)` folds over the keys that block i visits. `map(block)` stacks the results
    of all blocks.
    """

    rows: int
    visit: Callable[..., Any]
    map: Callable[[Callable[[Any], Any]], Any]

    @classmethod
    def of(cls, problem: Problem, spec: Spec, b: Any, h: Any) -> "_HeadSchedule":
        (T, S), tiling, block_loop = problem.padded, problem.tiling, problem.block_loop
        unrolled = block_loop.unrolled
        schedule = tile_schedule.schedule(spec, b, h, T, S, tiling, unrolled=unrolled)

        def over_blocks(block: Callable[[Any], Any]) -> Any:
            return tile_schedule.map_blocks(schedule, T // tiling.block_q, block, block_loop.map)

        return cls(tiling.block_q, functools.partial(tile_schedule.visit, schedule), over_blocks)

    @classmethod
    def of_band(cls, band: tile_schedule.Band) -> "_HeadSchedule":
        """Of a mask that leaves a band: each block sees one run of keys, and some go together."""
        starts = jnp.asarray(band.starts)

        def visit(i: Index, step: Callable[..., Any], state: Tree) -> Any:
            return step(tile_schedule.TileRun(starts[i], band.width, True), state)

        indices = jnp.arange(len(starts), dtype=jnp.int32)
        together = min(len(starts), tuning.current().band_blocks)
        return cls(band.rows, visit, lambda block: lax.map(block, indices, batch_size=together))


def _head(
    specs: _SpecAndTangent,
    b: Index,
    h: Index,
    operands: TangentInputs,
    keys: tuple[Array, ...],
    schedule: _HeadSchedule,
) -> tuple[Array, Array]:
    """`(d_out [T, V], d_lse [T])` of one head; sizes are whole tiles."""
    (spec, q, _), (tangent, dq, _) = (
        scaled(*x) for x in ((specs.spec, operands.query), (specs.tangent, operands.tangent))
    )
    specs, operands = _SpecAndTangent(spec, tangent), operands._replace(query=q, tangent=dq)
    k, dk, v, dv = keys
    values, d_values = Values.of(spec, v), dv.astype(accumulation(v.dtype))
    d_values = jnp.where(jnp.isfinite(v), d_values, 0)
    rows = schedule.rows

    def block(i: Index) -> tuple[Array, Array]:
        own = TangentInputs(*(slicing.take(x, i * rows, rows) for x in operands))

        def step(run: tile_schedule.TileRun, state: softmax.Partial) -> softmax.Partial:
            here = slicing.HeadTile.at(specs.spec, b, h, i * rows, rows, run)
            d_params = parameters(
                slicing.slice_tile(specs.tangent, i * rows, rows, run.start, run.size)
            )
            k_j, dk_j, dv_j = (slicing.take(x, run.start, run.size) for x in (k, dk, d_values))
            v_j = values.at(run)

            def score(params: list[Array], q: Array, k: Array) -> Array:
                own = here._replace(spec=with_parameters(here.spec, params))
                return own.modify(blockwise.products(own, q, k, v_j), run.masked)

            at = (parameters(here.spec), own.query, k_j)
            s, ds = jax.jvp(score, at, (d_params, own.tangent, dk_j))

            def weigh(weights: Array) -> Array:
                weighted_ds = weights * ds
                d_out = _dot(here.drop(weighted_ds), v_j.finite, spec)
                d_out = d_out + _dot(here.drop(weights), dv_j, spec)
                return jnp.append(d_out, jnp.sum(weighted_ds, axis=-1)[:, None], axis=1)

            return softmax.combine(state, softmax.of(s, weigh))

        nothing = softmax.empty(rows, own.out.shape[1] + 1, own.out.dtype)
        tangents, _ = softmax.finish(schedule.visit(i, step, nothing))
        d_out, d_lse = tangents[:, :-1], tangents[:, -1]
        return d_out - d_lse[:, None] * own.out, d_lse

    d_out, d_lse = map(tile_schedule.join, schedule.map(block))
    return d_out, d_lse


def _dot(a: Array, b: Array, spec: Spec) -> Array:
    return jnp.dot(a, b, precision=spec.precision)


def _tangent(
    tiling: Tiling | None,
    platform: str,
    spec: Spec,
    d_params: list[Array],
    inputs: TangentInputs,
    *keys: Array,
) -> tuple[Array, Array]:
    """As `DerivativeFunctions.tangent`."""
    query, tangent, *wide = _widened(inputs.query, inputs.tangent, *keys)
    keys = tuple(wide)
    inputs = inputs._replace(query=query, tangent=tangent)
    problem = Problem.of(platform, spec, query, keys[2], tiling)
    specs = _SpecAndTangent(*(problem.pad(x) for x in (spec, with_parameters(spec, d_params))))
    if problem.way == "loop":
        return _in_turn(specs, inputs, tuple(keys), problem)
    T, S = problem.padded

    def one(specs: Any, b: Index, h: Index, *operands: Array) -> tuple[Array, Array]:
        rows = TangentInputs(*(slicing.pad_to(x, T) for x in operands[: len(inputs)]))
        columns = tuple(slicing.pad_to(x, S) for x in operands[len(inputs) :])
        schedule = _HeadSchedule.of(problem, specs.spec, b, h)
        found = _head(specs, b, h, rows, columns, schedule)
        return jax.tree.map(lambda x: x[: problem.shapes.T], found)

    over_batch = _over_batch(platform, problem)
    return tile.over_heads(one, specs, inputs, tuple(keys), out_axes=1, over_batch=over_batch)


def _widened(*arrays: Array) -> list[Array]:
    """In the dtype of sums. XLA's CPU code for derivatives of products of 16-bit numbers that are
    summed in 32 has given numbers of no meaning."""
    return [x.astype(accumulation(x.dtype)) for x in arrays]


def _over_batch(platform: str, problem: Problem) -> Any:
    """Single tiles of a batch row at a time where those of all take memory and save no time."""
    in_turn = problem.way == "single tile" and tuning.sizes(platform).in_turn
    return tile.in_turn if in_turn else jax.vmap


def _in_turn(
    specs: _SpecAndTangent, inputs: TangentInputs, keys: tuple[Array, ...], problem: Problem
) -> tuple[Array, Array]:
    """Head after head."""
    shapes, (T, S) = problem.shapes, problem.padded
    band = None
    if specs.spec.pair is None:
        band = tile_schedule.band(select_head(specs.spec, 0, 0), T, S, problem.tiling)

    def body(n: Any, total: Any) -> Any:
        b, h = (lax.convert_element_type(x, jnp.int32) for x in divmod(n, shapes.N))
        rows = TangentInputs(*(take_head(x, b, h, T) for x in inputs))
        columns = tuple(take_head(x, b, h // shapes.G, S) for x in keys)
        own = select_head(specs, b, h)
        schedule = (
            _HeadSchedule.of_band(band) if band else _HeadSchedule.of(problem, own.spec, b, h)
        )
        results = _head(own, b, h, rows, columns, schedule)
        return jax.tree.map(lambda x, y: write_head(x, y, b, h), total, results)

    total = (jnp.zeros_like(inputs.out), jnp.zeros_like(inputs.out[..., 0]))
    return tile_schedule.repeat(0, shapes.B * shapes.N, body, total)


def _backward(
    tiling: Tiling | None, platform: str, spec: Spec, per_query: PerQuery, key: Array, value: Array
) -> Any:
    """As `DerivativeFunctions.backward`: that of blockwise for several tiles, for JAX to
    differentiate."""
    query, key, value = _widened(per_query[0], key, value)
    per_query = per_query._replace(query=query)
    problem = Problem.of(platform, spec, query, value, tiling)
    if problem.way == "loop":
        forward, run = blockwise.forward_loop, blockwise.backward_loop
    else:
        forward, run = blockwise.forward_vmap, blockwise.backward_vmap
    constants = lax.stop_gradient((problem.pad(spec), query, key, value))
    per_query = per_query.with_normalizer(forward(*constants, problem)[1])
    if problem.way == "single tile":
        return _backward_single(platform, spec, per_query, key, value, problem)
    d_params, *found = run(problem.pad(spec), per_query, key, value, problem)
    return slicing.unpadded_parameters(d_params, spec), *found


def _backward_single(
    platform: str, spec: Spec, per_query: Any, key: Array, value: Array, problem: Problem
) -> Any:
    def one(spec: Spec, b: Any, h: Any, *operands: Array) -> Any:
        *rows, k, v = operands
        part = blockwise.backward_head(spec, b, h, rows, k, v, problem.tiling, problem.block_loop)
        return part.query, part.key.T, part.value.T, part.params

    axes = (1, 1, 1, [0] * len(parameters(spec)))
    over_batch = _over_batch(platform, problem)
    found = tile.over_heads(one, spec, per_query, (key, value), axes, over_batch)
    return tile.gather_gradients(spec, key.shape[2], *found)


def functions(tiling: Tiling | None = None) -> DerivativeFunctions:
    """Both, with the tiles of `blockwise.functions(platform, tiling)`."""
    return DerivativeFunctions(*(functools.partial(f, tiling) for f in (_tangent, _backward)))


def attend(spec: Spec, query: Array, key: Array, value: Array) -> tuple[Output, LogSumExp]:
    """`(out [B, T, N, V], lse [B, N, T])` for one flat batch axis, by `blockwise`."""
    kernel = vjp.Functions(blockwise.functions)
    return vjp.attention(kernel, functions(), spec, query, key, value)
