"""Decoding with a cache whose tokens several devices share.

Each device holds a run of slots of each row. A new token is written by the device that holds its
slot. All devices attend to their own slots, with positions of the whole, and what they find is put
together by its normalizers: "Flash-Decoding" (Dao et al. 2023) with devices in place of blocks.
For each query and head V + 2 numbers are sent, summed over the devices; keys and values stay.
"""

import dataclasses
from typing import Any, Literal, NoReturn, Unpack, overload

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from jattn._advised import advised
from jattn._debugging import may_be_minus_infinity
from jattn._pytree import axis_names
from jattn._types import AnyArray, Keys, LogSumExp, Output, Queries, Values, accumulation
from jattn.attention import cache_results, check_cache
from jattn.cache import Cache, DenseCache, write
from jattn.checks import check_array, check_flag
from jattn.kernels.common.place import Place, at_place
from jattn.kernels.xla import decode
from jattn.options import RulesAndSink
from jattn.parallel import pieces
from jattn.parallel.axes import Axes, AxisName, check_axis_names
from jattn.parallel.meshes import check_mesh, check_shared, devices_of, partition, typed
from jattn.softmax import Normalizer, add_sink, sink_by_head
from jattn.spec import Shapes, Spec, compiled, prepare


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
    return_lse: bool = False,
    **options: Unpack[RulesAndSink],
) -> Any:
    """`jattn.cached_attention` with a cache that is cut along its tokens: `(out [B, T, N, V],
    cache)`.

    The cache that comes back is cut as `keys [B, K, S, H]` and `values [B, K, S, V]` over
    `(batch_axis, head_axis, axis_name)` and `lengths [B]` over `batch_axis`; one that goes in cut
    like this is not moved. Each device adds to the output what its tokens contribute, and sends
    V + 2 numbers for each query and head.

    Args:
        query: `[B, T, N, H]`; T may be any number, and is not cut.
        key: `[B, T, K, H]`.
        value: `[B, T, K, V]`.
        cache: a `DenseCache` for B rows, with as many slots for each as the devices share evenly.
        mesh: the mesh; over axes that are not named here everything is the same.
        axis_name: the axis of the mesh along which the cache's slots are cut, in equal runs.
        batch_axis: the axis, or axes, along which the batch is cut, if it is.
        head_axis: the axis, or axes, along which query and key heads are cut.
        valid, return_lse, and other options: as in `jattn.cached_attention`; arrays along S count
            slots of the whole. There is no dropout.

    Raises:
        TypeError, ValueError: for arguments that do not fit, for more tokens than there is room for
            where that is known, and for sizes that the devices cannot share evenly.
        NotImplementedError: for caches of other kinds, and for derivatives.
    """
    _check_kind(cache)
    check_flag("return_lse", return_lse)
    check_axis_names(axis_name, batch_axis, head_axis)
    check_mesh(mesh, axis_name, batch_axis, head_axis)
    check_array("query", query, "[B, T, N, H]")
    if len(query.shape) != 4:
        raise ValueError(f"query: expected [B, T, N, H], got {list(query.shape)}")
    positions = cache.next_positions(query.shape[1], valid)
    slots, grown = cache.reserve(key, value, valid)
    shapes, spec = check_cache(query, grown, None, lse=return_lse, q_positions=positions, **options)
    axes = Axes(axis_name, devices_of(mesh, axis_name), "contiguous", batch_axis, head_axis)
    if cache.capacity % axes.devices:
        raise ValueError(
            f"cache: expected a multiple of {axes.devices} slots for the devices of axis "
            f"{axis_name!r}, got S = {cache.capacity}"
        )
    check_shared(shapes, mesh, axes)
    sink = options.get("sink")
    sink = None if sink is None else sink_by_head("sink", sink, shapes.N)
    results, grown = _on_mesh(spec, query, (key, value), slots, grown, mesh=mesh, axes=axes)
    return results if sink is None else add_sink(results, sink, bool(return_lse)), grown


_REASONS = {
    "RollingCache": "its slots are used in turn: a window would be on one device, then on another",
    "PagedCache": "its pages belong to all rows, and lie in no order",
}


def _check_kind(cache: Any) -> None:
    if not isinstance(cache, Cache):
        raise TypeError(f"cache: expected a DenseCache, got {type(cache).__name__}")
    if not isinstance(cache, DenseCache):
        kind = type(cache).__name__
        reason = _REASONS.get(kind, "only there a slot is a position")
        raise NotImplementedError(f"cache: a {kind} is not cut along its tokens: {reason}")


@compiled("mesh", "axes")
def _on_mesh(
    spec: Spec,
    query: Array,
    new: tuple[Array, Array],
    slots: Array,
    cache: DenseCache,
    *,
    mesh: Any,
    axes: Axes,
) -> tuple[Any, DenseCache]:
    """What a call gives back, of new keys and values for these slots of a cache that has grown."""
    held, rows = P(axes.batch, axes.heads, axes.name), P(axes.batch)
    tokens = P(axes.batch, None, axes.heads)
    along = {"S": axes.name, "N": axes.heads}
    of_spec = jax.tree.map(
        lambda letters, leaf: partition(letters, leaf, along, axes.batch, 1), axis_names(spec), spec
    )
    of_cache = DenseCache(held, held, rows, rows)

    def local(spec: Spec, query: Array, new: Any, slots: Array, cache: DenseCache) -> Any:
        cache = _written(axes, cache, new, slots)
        out, lse = _joined(axes, *_attend_part(axes, spec, query, cache))
        return out.astype(query.dtype), jnp.swapaxes(lse, 1, 2), cache

    cuts = (of_spec, tokens, tokens, rows, of_cache)
    out_specs = (tokens, P(axes.batch, axes.heads), of_cache)
    run = jax.shard_map(local, mesh=mesh, in_specs=cuts, out_specs=out_specs)
    constant = jax.custom_jvp(run)
    constant.defjvp(_refuse)
    out, lse, cache = constant(*typed(mesh, cuts, (spec, query, new, slots, cache)))
    return cache_results(spec, cache.overflowed, out, lse), cache


def _refuse(*_: Any) -> NoReturn:
    raise NotImplementedError(
        "cached_attention over several devices has no derivatives; parallel.attention has them"
    )


def _written(
    axes: Axes, cache: DenseCache, new: tuple[Array, Array], slots: Int[Array, "B T"]
) -> DenseCache:
    """This device's part of a cache, with those of the new tokens whose slots it holds."""
    size = cache.capacity
    own = slots - axes.place * size
    own = jnp.where((own >= 0) & (own < size), own, size)
    keys, values = (
        write(x, tokens, own) for x, tokens in zip((cache.keys, cache.values), new, strict=True)
    )
    return dataclasses.replace(cache, keys=keys, values=values)


def _attend_part(
    axes: Axes, spec: Spec, query: Array, cache: DenseCache
) -> tuple[Output, Normalizer]:
    """`out [B, T, N, V]` and the normalizers `[B, T, N]` of this device's slots alone."""
    (B, T, N, H), (_, K, S, V) = query.shape, cache.values.shape
    shapes = Shapes((B,), T, S, N, K, H, V, query.dtype)
    every, first = jnp.arange(T, dtype=jnp.int32), axes.place * S
    place = Place(*axes.first(B, N), every, axes.places(S), (T, S), first)
    own = dataclasses.replace(at_place(prepare(spec, shapes), place), partial=True)
    if decode.supports(own, shapes) is None:
        return decode.attend_part(own, query, cache)
    key, value = (jnp.swapaxes(x, 1, 2).astype(query.dtype) for x in cache.read())
    sums = accumulation(query.dtype)
    row = jax.ShapeDtypeStruct((B, T, N), sums)
    out, finite = jax.ShapeDtypeStruct((B, T, N, V), sums), jax.ShapeDtypeStruct((), jnp.bool_)
    like = (out, Normalizer(row, row), finite)  # pyright: ignore[reportArgumentType]
    return pieces.run("forward", like, None, own, query, key, value, shapes=shapes)[:2]


def _joined(
    axes: Axes, out: Output, normalizer: Normalizer
) -> tuple[Output, Float[Array, "B T N"]]:
    """The parts of all devices as one, with lse `[B, T, N]`.

    As `softmax.join`, with maxima and logs apart: shares are exact at any logits. They are of a
    mean, at most 1 / devices each, so that no sum overflows.
    """
    top = lax.pmax(normalizer.lse, axes.name)
    shift = jnp.where(top == -jnp.inf, 0, top)
    shares = jnp.exp((normalizer.maximum - shift) + normalizer.log_total) / axes.devices
    weighted, total = lax.psum((shares[..., None] * out, shares), axes.name)
    dead = total == 0
    total = jnp.where(dead, 1, total)
    lse = jnp.where(dead, -jnp.inf, shift + jnp.log(total * axes.devices))
    return weighted / total[..., None], lse
