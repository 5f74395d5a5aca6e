"""Forward-mode derivatives and second derivatives, tile by tile, in memory linear in T and S.

All kernels share these functions. JAX's forward mode computes ds, the tangent of the scores s,
through the functions of `jattn.tile`. With the weights p = softmax(s), and sums over the keys of a
query, the tangents of lse and out are

    d_lse = Σ p ds        d_out = Σ drop(p) (ds v + dv) − d_lse out

so that each tile is visited once. A number that is subtracted from all ds of a query adds to d_lse
and changes nothing else. So the tangent of the greatest score is subtracted: with large logits ds
is large too, and what ds leaves of d_out would be lost in rounding.

For second derivatives, JAX differentiates `_tangent` and `_backward` in forward mode.

Both functions recompute the normalizer from their own scores: the kernel of the forward pass may
have rounded scores differently, and with large logits its normalizer would not fit.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jattn import softmax, tile, tuning
from jattn._pytree import pytree_dataclass, select_head
from jattn._types import Index, Output, Scores, Tree, accumulation
from jattn.kernels.common import slicing, tile_schedule, vjp
from jattn.kernels.common.derivatives import DerivativeFunctions, PerQuery, TangentInputs
from jattn.kernels.xla import blockwise, normalized
from jattn.kernels.xla.blockwise import BlockwiseCall, Values, dot, take_head, write_head
from jattn.spec import Spec, Tiling, parameters, scaled, with_parameters


@pytree_dataclass
class _SpecAndTangent:
    """A spec, and a second one with tangents in place of parameters, to slice both alike."""

    spec: Spec
    tangent: Spec


class _BlockOrder(NamedTuple):
    """The order in which the tiles of a head are visited, by blocks of `block_q` queries.

    `visit(i, add_run, state)` folds over the runs of keys that block i visits. `map(block)` returns
    the results of `block(i)` for all blocks, stacked.
    """

    block_q: int
    visit: Callable[..., Any]
    map: Callable[[Callable[[Any], Any]], Any]

    @classmethod
    def of(cls, call: BlockwiseCall, spec: Spec, b: Index, h: Index) -> "_BlockOrder":
        schedule, (block_q, _) = call.schedule(spec, b, h), call.tiling
        over_blocks = functools.partial(call.map_blocks, schedule, call.padded[0] // block_q)
        return cls(block_q, functools.partial(tile_schedule.visit, schedule), over_blocks)

    @classmethod
    def of_band(cls, band: tile_schedule.Band) -> "_BlockOrder":
        """Returns the order for a band: each block visits one run of keys, and several blocks are
        computed at once."""
        starts = jnp.asarray(band.starts)

        def visit(i: Index, add_run: Callable[..., Any], state: Tree) -> Any:
            return add_run(tile_schedule.TileRun(starts[i], band.width, True), state)

        indices = jnp.arange(len(starts), dtype=jnp.int32)
        batch_size = min(len(starts), tuning.current().band_blocks)
        return cls(band.rows, visit, lambda block: lax.map(block, indices, batch_size=batch_size))


def _subtrahend(
    s: Scores, ds: Scores, maximum: Float[Array, " t"], earlier: Float[Array, " t"]
) -> Float[Array, " t"]:
    """Returns what is subtracted from the tangents of a tile's scores: for each query that of the
    greatest score.

    It is `earlier`, the result for earlier tiles, unless the score exceeds their `maximum` by so
    much that they have no weight: sums of tangents relative to different numbers cannot be added.
    """
    s, ds = lax.stop_gradient((s, ds))
    greatest = jnp.max(s, axis=-1, initial=-jnp.inf)
    tangent = jnp.max(ds, axis=-1, initial=-jnp.inf, where=s == greatest[:, None])
    is_alone = greatest - maximum > -2 * math.log(jnp.finfo(s.dtype).eps)
    return jnp.where(is_alone & jnp.isfinite(tangent), tangent, earlier)


def _head_tangents(
    specs: _SpecAndTangent,
    b: Index,
    h: Index,
    operands: TangentInputs,
    keys: tuple[Array, ...],
    order: _BlockOrder,
) -> tuple[Array, Array]:
    """Computes `d_out [T, V]` and `d_lse [T]` of one head, padded to whole tiles.

    `keys` are the key, its tangent, the value and its tangent.
    """
    (spec, q, _), (tangent, dq, _) = (
        scaled(*x) for x in ((specs.spec, operands.query), (specs.tangent, operands.tangent))
    )
    operands = operands._replace(query=q, tangent=dq)
    k, dk, v, dv = keys
    values, d_values = Values.of(spec, v), dv.astype(accumulation(v.dtype))
    d_values = jnp.where(jnp.isfinite(v), d_values, 0)
    block_q = order.block_q

    def block(i: Index) -> tuple[Array, Array]:
        block_inputs = TangentInputs(*(slicing.take(x, i * block_q, block_q) for x in operands))

        def add_run(
            run: tile_schedule.TileRun, state: tuple[softmax.Partial, Array]
        ) -> tuple[softmax.Partial, Array]:
            sums, subtrahend = state
            head_tile = slicing.HeadTile.at(spec, b, h, i * block_q, block_q, run)
            d_params = parameters(
                slicing.slice_tile(tangent, i * block_q, block_q, run.start, run.size)
            )
            k_j, dk_j, dv_j = (slicing.take(x, run.start, run.size) for x in (k, dk, d_values))
            v_j = values.slice_keys(run)

            def score(params: list[Array], q: Array, k: Array) -> Array:
                changed = head_tile._replace(spec=with_parameters(head_tile.spec, params))
                return changed.modify(blockwise.tile_products(changed, q, k, v_j), run.masked)

            primals = (parameters(head_tile.spec), block_inputs.query, k_j)
            s, ds = jax.jvp(score, primals, (d_params, block_inputs.tangent, dk_j))

            subtrahend = _subtrahend(s, ds, sums.maximum, subtrahend)

            def weigh(weights: Array) -> Array:
                # d_out + d_lse out, and in the last column d_lse, so that one fold sums both.
                weighted_ds = weights * (ds - subtrahend[:, None])
                d_out = dot(head_tile.drop(weighted_ds), v_j.finite, spec)
                d_out = d_out + dot(head_tile.drop(weights), dv_j, spec)
                return jnp.append(d_out, jnp.sum(weighted_ds, axis=-1)[:, None], axis=1)

            return softmax.combine(sums, softmax.contribution(s, weigh)), subtrahend

        out = block_inputs.out
        empty = softmax.empty(block_q, out.shape[1] + 1, out.dtype)
        sums, subtrahend = order.visit(i, add_run, (empty, jnp.zeros_like(empty.total)))
        tangents, _ = softmax.finish(sums)
        d_out, d_lse = tangents[:, :-1], tangents[:, -1]
        return d_out - d_lse[:, None] * out, d_lse + subtrahend

    d_out, d_lse = map(tile_schedule.concatenate_blocks, order.map(block))
    return d_out, d_lse


def _tangent(
    tiling: Tiling | None,
    platform: str,
    spec: Spec,
    d_params: list[Array],
    inputs: TangentInputs,
    *keys: Array,
) -> tuple[Array, Array]:
    """Computes `DerivativeFunctions.tangent`.

    `keys` are the key, its tangent, the value and its tangent.
    """
    if spec.normalizer is not None:
        return normalized.tangent(platform, spec, d_params, inputs, *keys)
    query, tangent, *converted = _to_accumulation(inputs.query, inputs.tangent, *keys)
    keys = tuple(converted)
    inputs = inputs._replace(query=query, tangent=tangent)
    call = BlockwiseCall.of(platform, spec, query, keys[2], tiling)
    specs = _SpecAndTangent(*(call.pad(x) for x in (spec, with_parameters(spec, d_params))))
    if call.strategy == "loop":
        return _tangent_loop(specs, inputs, keys, call)
    T, S = call.padded

    def one_head(specs: Any, b: Index, h: Index, *operands: Array) -> tuple[Array, Array]:
        head_inputs = TangentInputs(*(slicing.pad_to(x, T) for x in operands[: len(inputs)]))
        head_keys = tuple(slicing.pad_to(x, S) for x in operands[len(inputs) :])
        order = _BlockOrder.of(call, specs.spec, b, h)
        results = _head_tangents(specs, b, h, head_inputs, head_keys, order)
        return jax.tree.map(lambda x: x[: call.shapes.T], results)

    over_batch = _over_batch(platform, call)
    return tile.over_heads(one_head, specs, inputs, keys, out_axes=1, over_batch=over_batch)


def _to_accumulation(*arrays: Array) -> list[Array]:
    """Returns arrays in the accumulation dtype.

    XLA on CPUs has returned wrong derivatives of products of 16-bit numbers summed in 32 bits.
    """
    return [x.astype(accumulation(x.dtype)) for x in arrays]


def _over_batch(platform: str, call: BlockwiseCall) -> Any:
    """Returns the map over batch rows: sequential for single tiles on a CPU, else `jax.vmap`.

    All batch rows at once would take more memory there and no less time.
    """
    in_turn = call.strategy == "single tile" and tuning.sizes(platform).in_turn
    return tile.map_in_sequence if in_turn else jax.vmap


def _tangent_loop(
    specs: _SpecAndTangent, inputs: TangentInputs, keys: tuple[Array, ...], call: BlockwiseCall
) -> tuple[Array, Array]:
    """Computes `_tangent`, one head after another."""
    shapes, (T, S) = call.shapes, call.padded
    band = None
    if specs.spec.pair is None:
        band = tile_schedule.band(select_head(specs.spec, 0, 0), T, S, call.tiling)

    def body(n: Any, total: Any) -> Any:
        b, h = (lax.convert_element_type(x, jnp.int32) for x in divmod(n, shapes.N))
        head_inputs = TangentInputs(*(take_head(x, b, h, T) for x in inputs))
        head_keys = tuple(take_head(x, b, h // shapes.G, S) for x in keys)
        selected = select_head(specs, b, h)
        order = _BlockOrder.of_band(band) if band else _BlockOrder.of(call, selected.spec, b, h)
        results = _head_tangents(selected, b, h, head_inputs, head_keys, order)
        return jax.tree.map(lambda x, y: write_head(x, y, b, h), total, results)

    total = (jnp.zeros_like(inputs.out), jnp.zeros_like(inputs.out[..., 0]))
    return tile_schedule.repeat(0, shapes.B * shapes.N, body, total)


def _backward(
    tiling: Tiling | None, platform: str, spec: Spec, per_query: PerQuery, key: Array, value: Array
) -> Any:
    """Computes `DerivativeFunctions.backward` by `blockwise`, also if heads are single tiles."""
    if spec.normalizer is not None:
        return normalized.backward(platform, spec, per_query, key, value)
    query, key, value = _to_accumulation(per_query[0], key, value)
    per_query = per_query._replace(query=query)
    call = BlockwiseCall.of(platform, spec, query, value, tiling)
    is_loop, padded = call.strategy == "loop", call.pad(spec)
    forward = blockwise.forward_loop if is_loop else blockwise.forward_vmap
    constants = lax.stop_gradient((padded, query, key, value))
    per_query = per_query.with_normalizer(forward(*constants, call)[1])
    operands = (padded, per_query, key, value, call)
    d_params, *gradients = (
        blockwise.backward_loop(*operands)
        if is_loop
        else blockwise.backward_vmap(*operands, over_batch=_over_batch(platform, call))
    )
    return slicing.unpadded_parameters(d_params, spec), *gradients


def functions(tiling: Tiling | None = None) -> DerivativeFunctions:
    """Returns the derivative functions; `tiling` is as in `blockwise.functions`."""
    return DerivativeFunctions(*(functools.partial(f, tiling) for f in (_tangent, _backward)))


def attend(spec: Spec, query: Array, key: Array, value: Array) -> tuple[Output, softmax.Normalizer]:
    """Computes `(out [B, T, N, V], normalizer of [B, N, T])` by `blockwise`, for a single batch
    axis."""
    kernel = vjp.Functions(blockwise.functions)
    return vjp.attention(kernel, functions(), spec, query, key, value)
