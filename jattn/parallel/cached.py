"""Decoding with a cache that is sharded along its tokens.

Each device holds a range of consecutive slots of each batch row, and writes the new tokens whose
slots it holds. It attends to its own slots, and the results of all devices are merged by their
normalizers: "Flash-Decoding" (Dao et al. 2023) with devices in place of blocks of keys. For each
query and head V + 2 numbers are reduced over the devices; keys and values are not sent.
"""

import dataclasses
from typing import Any, Literal, NoReturn, Unpack, overload

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Int

from jattn._advised import advised
from jattn._debugging import may_be_minus_infinity
from jattn._pytree import axis_names
from jattn._types import AnyArray, Keys, LogSumExp, Output, Queries, Values, accumulation
from jattn.cache import Cache, DenseCache
from jattn.cache.storage import write
from jattn.call import Call, compiled, make
from jattn.checks import check_array, check_flag
from jattn.kernels import registry
from jattn.kernels.common import few_queries
from jattn.kernels.common.place import Place, at_place
from jattn.kernels.xla import decode
from jattn.options import RulesAndSink
from jattn.parallel import ring
from jattn.parallel.axes import Axes, AxisName, check_shared, mesh_axes, partition, reshard
from jattn.softmax import Normalizer
from jattn.spec import Shapes, scores_are_weights


@overload
def cached_attention(
    query: Queries,
    key: Keys,
    value: Values,
    cache: DenseCache,
    *,
    mesh: Mesh | AbstractMesh,
    axis_name: str,
    batch_axis: AxisName | None = None,
    head_axis: AxisName | None = None,
    valid: Bool[AnyArray, "B T"] | None = None,
    positions: Int[AnyArray, "..."] | None = None,
    return_lse: Literal[False] = False,
    **options: Unpack[RulesAndSink],
) -> tuple[Output, DenseCache]: ...
@overload
def cached_attention(
    query: Queries,
    key: Keys,
    value: Values,
    cache: DenseCache,
    *,
    mesh: Mesh | AbstractMesh,
    axis_name: str,
    batch_axis: AxisName | None = None,
    head_axis: AxisName | None = None,
    valid: Bool[AnyArray, "B T"] | None = None,
    positions: Int[AnyArray, "..."] | None = None,
    return_lse: Literal[True],
    **options: Unpack[RulesAndSink],
) -> tuple[tuple[Output, LogSumExp], DenseCache]: ...
@advised(RulesAndSink)
@may_be_minus_infinity(1)
def cached_attention(
    query: Queries,
    key: Keys,
    value: Values,
    cache: DenseCache,
    *,
    mesh: Mesh | AbstractMesh,
    axis_name: str,
    batch_axis: AxisName | None = None,
    head_axis: AxisName | None = None,
    valid: Bool[AnyArray, "B T"] | None = None,
    positions: Int[AnyArray, "..."] | None = None,
    return_lse: bool = False,
    **options: Unpack[RulesAndSink],
) -> Any:
    """`jattn.cached_attention` with a cache that is sharded along its tokens.

    Returns `(out [B, T, N, V], cache)`, with return_lse `((out, lse [B, N, T]), cache)`. The cache
    has `keys [B, K, S, H]` and `values [B, K, S, V]` sharded over
    `(batch_axis, head_axis, axis_name)` and `lengths [B]` over `batch_axis`; a cache that is
    already sharded like this is not moved. A device sends V + 2 numbers for each query and head.

    Args:
        query: `[B, T, N, H]`; T may be any number, and is not sharded.
        key: `[B, T, K, H]`.
        value: `[B, T, K, V]`.
        cache: a `DenseCache` for B rows; the number of devices must divide its number of slots.
        mesh: the mesh; arrays are replicated over axes that are not named here.
        axis_name: the axis of the mesh over which the cache's slots are sharded.
        batch_axis: the axis, or axes, over which the batch is sharded, if it is.
        head_axis: the axis, or axes, over which query and key heads are sharded.
        valid, positions, return_lse, and other options: as in `jattn.cached_attention`; arrays
            along S have an entry for each slot of the whole cache. There is no dropout.

    Raises:
        TypeError, ValueError: for invalid arguments, for more tokens than there is space for, if
            the lengths are concrete, and for sizes that the devices cannot share evenly.
        NotImplementedError: for caches of other classes, for normalizers of whole rows, and for
            derivatives.

    >>> cache, mesh = jattn.cache.DenseCache.create(2, 16, 2, 8), jax.make_mesh((1,), ("slots",))
    >>> options = {"mesh": mesh, "axis_name": "slots", "mask": masks.Causal()}
    >>> jattn.parallel.cached_attention(q, k[:, :5], v[:, :5], cache, **options)[0].shape
    (2, 5, 4, 8)
    """
    _check_dense(cache)
    check_flag("return_lse", return_lse)
    axes = mesh_axes(mesh, axis_name, "contiguous", batch_axis, head_axis)
    check_array("query", query, "[B, T, N, H]", rank=4)
    new_positions = cache.next_positions(query.shape[1], valid, positions)
    slots, extended = cache.reserve(key, value, valid, positions)
    call = make(query, extended, lse=return_lse, q_positions=new_positions, **options)
    if cache.capacity % axes.devices:
        raise ValueError(
            f"cache: expected a multiple of {axes.devices} slots for the devices of axis "
            f"{axis_name!r}, got S = {cache.capacity}"
        )
    ring.check_normalizer(call.spec, "jattn.cached_attention")
    check_shared(call.shapes, mesh, axes)
    return _on_mesh(call, query, (key, value), slots, extended, mesh=mesh, axes=axes)


_REASONS = {
    "RollingCache": "it reuses its slots, so that a window would be on one device at a time",
    "PagedCache": "its pages are in no order, and each may belong to any row",
}


def _check_dense(cache: Any) -> None:
    name = type(cache).__name__
    if not isinstance(cache, Cache):
        raise TypeError(f"cache: expected a DenseCache, got {name}")
    if not isinstance(cache, DenseCache):
        reason = _REASONS.get(name, "its slots may not be in the order of positions")
        raise NotImplementedError(
            f"cache: expected a DenseCache: a {name} cannot be sharded along its tokens: {reason}"
        )


@compiled("mesh", "axes")
def _on_mesh(
    call: Call,
    query: Array,
    new: tuple[Array, Array],
    slots: Array,
    cache: DenseCache,
    *,
    mesh: Any,
    axes: Axes,
) -> tuple[Any, DenseCache]:
    """Writes new keys and values to these slots of an extended cache, and attends to it."""
    pool, batch = P(axes.batch, axes.heads, axes.name), P(axes.batch)
    tokens = P(axes.batch, None, axes.heads)
    along = {"S": axes.name, "N": axes.heads}
    call_specs = jax.tree.map(
        lambda letters, leaf: partition(letters, leaf, along, axes.batch, 1), axis_names(call), call
    )
    by_slot = None if cache.positions is None else P(axes.batch, axes.name)
    cache_specs = DenseCache(pool, pool, batch, batch, by_slot)

    def local(call: Call, query: Array, new: Any, slots: Array, cache: DenseCache) -> Any:
        local_slots = slots - axes.device_index * cache.capacity
        is_local = (local_slots >= 0) & (local_slots < cache.capacity)
        local_slots = jnp.where(is_local, local_slots, cache.capacity)  # `write` drops the others
        keys, values = (
            write(x, tokens, local_slots)
            for x, tokens in zip((cache.keys, cache.values), new, strict=True)
        )
        cache = dataclasses.replace(cache, keys=keys, values=values)
        out, normalizer = _attend_locally(axes, call, query, cache)
        if scores_are_weights(call.spec):
            out, normalizer = lax.psum((out, normalizer), axes.name)
        else:
            out, normalizer = _merged(axes, out, normalizer)
        return (out.astype(query.dtype), normalizer.by_head()), cache

    in_specs = (call_specs, tokens, tokens, batch, cache_specs)
    out_specs = ((tokens, P(axes.batch, axes.heads)), cache_specs)
    run = jax.custom_jvp(jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs))
    run.defjvp(_refuse)
    results, cache = run(*reshard(mesh, in_specs, (call, query, new, slots, cache)))
    return call.finish(*cache.nan_if_overflowed(results)), cache


def _refuse(*_: Any) -> NoReturn:
    raise NotImplementedError(
        "parallel.cached_attention has no derivatives; use parallel.attention for training"
    )


def _attend_locally(
    axes: Axes, call: Call, query: Array, cache: DenseCache
) -> tuple[Output, Normalizer]:
    """Computes `out [B, T, N, V]` and normalizers `[B, T, N]` over this device's slots only."""
    (B, T, N, H), (_, K, S, V) = query.shape, cache.values.shape
    shapes = Shapes((B,), T, S, N, K, H, V, query.dtype)
    queries, start = jnp.arange(T, dtype=jnp.int32), axes.device_index * S
    place = Place(*axes.first_row_and_head(B, N), queries, axes.places(S), (T, S), start)
    spec = dataclasses.replace(call, shapes=shapes).prepared().spec
    local_spec = dataclasses.replace(at_place(spec, place), partial=True)
    if few_queries.unsupported(local_spec, shapes) is None:
        return decode.attend_part(registry.read_cache, local_spec, query, cache)
    key, value = (jnp.swapaxes(x, 1, 2).astype(query.dtype) for x in cache.read())
    dtype = accumulation(query.dtype)
    row = jax.ShapeDtypeStruct((B, T, N), dtype)
    out, finite = jax.ShapeDtypeStruct((B, T, N, V), dtype), jax.ShapeDtypeStruct((), jnp.bool_)
    like = (out, Normalizer(row, row), finite)  # pyright: ignore[reportArgumentType]
    operands = (local_spec, query, key, value)
    return ring.run_part("forward", like, None, *operands, shapes=shapes)[:2]


def _merged(axes: Axes, out: Output, normalizer: Normalizer) -> tuple[Output, Normalizer]:
    """Merges the results of all devices: `out [B, T, N, V]` and normalizers of `[B, T, N]`.

    The weight of a device is exp(lse − greatest lse) / devices. lse is not rounded before the
    difference: the maximum and the logarithm are added to it one by one, as in `softmax.join`. The
    division by the number of devices keeps the sums from overflowing.
    """
    greatest = lax.pmax(normalizer.lse, axes.name)
    shift = jnp.where(greatest == -jnp.inf, 0, greatest)  # −∞ − (−∞) would be NaN
    weights = jnp.exp((normalizer.maximum - shift) + normalizer.log_total) / axes.devices
    weighted, total = lax.psum((weights[..., None] * out, weights), axes.name)
    has_no_keys = total == 0
    total = jnp.where(has_no_keys, 1, total)
    log_total = jnp.where(has_no_keys, 0, jnp.log(total * axes.devices))
    return weighted / total[..., None], Normalizer(greatest, log_total)
