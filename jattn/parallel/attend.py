"""`attention` and `attention_shard`: attention to a sequence that is sharded over several devices.

`attention` takes whole arrays and a mesh; `attention_shard` is for use within your own
`jax.shard_map`. Both check their arguments and call the function of the scheme.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Unpack, overload

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from jattn._advised import advised
from jattn._debugging import may_be_minus_infinity
from jattn._explicit import has_explicit_sharding
from jattn._pytree import axis_names
from jattn._types import Keys, LogSumExp, Output, Queries, Values
from jattn.call import Call, check_shapes, compiled, make
from jattn.checks import check_choice, check_flag
from jattn.kernels import registry
from jattn.kernels.common import slicing
from jattn.options import Options
from jattn.parallel import exchange, placement, ring
from jattn.parallel.axes import (
    Axes,
    AxisName,
    bound_size,
    check_axis_names,
    check_shared,
    mesh_axes,
    partition,
    reshard,
)
from jattn.softmax import Normalizer
from jattn.spec import Shapes


SCHEMES: dict[str, Callable[..., tuple[Output, Normalizer]]] = {
    "ring": ring.attend,
    "all_to_all": exchange.all_to_all_attend,
    "gather": exchange.gathered_attend,
}
"""The schemes of communication between devices, by name."""


class _ShardOptions(Options, total=False):
    """The options of `attention_shard`: of `jattn.attention`, the scheme and the mesh axes."""

    scheme: Literal["ring", "all_to_all", "gather"]
    order: Literal["contiguous", "zigzag"]
    batch_axis: AxisName | None
    head_axis: AxisName | None


class _MeshOptions(_ShardOptions, total=False):
    """The options of `attention` on whole arrays."""

    pad: bool


class _Sharding(NamedTuple):
    """The scheme and the mesh axes of a call."""

    scheme: str
    axes: Axes

    def check(self, call: Call, shapes: Shapes) -> None:
        """Raises ValueError if these whole sizes cannot be sharded like this, NotImplementedError
        for an implementation or a normalizer that needs all keys at once, which "ring" does not
        have."""
        axes = self.axes
        placement.check_shards(shapes.T, shapes.S, axes.devices, axes.order)
        if self.scheme == "ring":
            ring.check_implementation(call.implementation)
            ring.check_normalizer(call.spec, 'scheme="all_to_all" or scheme="gather"')

    def attend(self, call: Call, query: Array, key: Array, value: Array) -> Any:
        """Returns `out`, or `(out, lse)` if the call returns lse, of this device's shards."""
        flat, scheme = call.flattened(query, key, value), SCHEMES[self.scheme]
        results = scheme(call.prepared(), *flat, self.axes)
        if call.overflowed is not None:  # an overflow on any device affects the keys of all
            anywhere = lax.pmax(call.overflowed.astype(jnp.int32), self.axes.name) > 0
            call = dataclasses.replace(call, overflowed=anywhere)
        return call.finish(*results)


@overload
def attention_shard(
    query: Queries,
    key: Keys,
    value: Values,
    *,
    axis_name: str,
    return_lse: Literal[False] = False,
    **options: Unpack[_ShardOptions],
) -> Output: ...
@overload
def attention_shard(
    query: Queries,
    key: Keys,
    value: Values,
    *,
    axis_name: str,
    return_lse: Literal[True],
    **options: Unpack[_ShardOptions],
) -> tuple[Output, LogSumExp]: ...
@advised(Options)
@may_be_minus_infinity(1)
def attention_shard(
    query: Queries,
    key: Keys,
    value: Values,
    *,
    axis_name: str,
    scheme: Literal["ring", "all_to_all", "gather"] = "ring",
    order: Literal["contiguous", "zigzag"] = "contiguous",
    batch_axis: AxisName | None = None,
    head_axis: AxisName | None = None,
    return_lse: bool = False,
    **options: Unpack[Options],
) -> Any:
    """Attention of this device's queries to the keys of all devices, within `jax.shard_map`.

    Results, gradients and dropout decisions are those of `jattn.attention` of the whole arrays, of
    which each device holds a shard along T and S.

    Args:
        query, key, value: `[*B, T, N, H]`, `[*B, S, K, H]`, `[*B, S, K, V]`: this device's tokens.
        axis_name: the axis of the mesh over which the tokens are sharded.
        scheme: "ring": shards of keys pass from device to device while each device computes with
            the shard that it holds; memory is linear in a device's own number of tokens. GPUs
            before Hopper need `XLA_FLAGS=--xla_gpu_enable_latency_hiding_scheduler=true` for the
            overlap. "all_to_all": devices exchange tokens for heads; the number of devices must
            divide N. "gather": each device gets a copy of all keys.
        order: the order in which the devices hold the tokens, see `shard_tokens`.
        batch_axis, head_axis: the axis, or axes, of the mesh over which the batch and the heads are
            sharded, if they are: mask and score functions, and dropout, then receive the indices
            of batch rows and heads in the whole arrays.
        mask: arrays along T or S are this device's, in the order of its tokens; arrays along both T
            and S are this device's along T and have the keys of all devices along S, shard after
            shard. Lengths and block layouts refer to the sequence before `shard_tokens`.
        score: its arrays are as in `mask`.
        sink: a logit for each of this device's heads.
        q_positions, kv_positions: by default the indices of this device's tokens in the sequence
            before `shard_tokens`. If they are given, every shard is sent to every device.
        return_lse, and other options: as in `jattn.attention`; the same on all devices.

    Returns:
        `out [*B, T, N, V]`, and with `return_lse` also `lse [*B, N, T]`, of this device's queries.

    Raises:
        TypeError, ValueError: for invalid arguments, and outside a `shard_map` over the axes.
        NotImplementedError: if the named implementation cannot compute the call; says why. Also
            for normalizers of whole rows with scheme "ring".

    >>> mesh, tokens = jax.sharding.Mesh(jax.devices()[:1], ("tokens",)), jax.P(None, "tokens")
    >>> attend = lambda q, k, v: jattn.parallel.attention_shard(q, k, v, axis_name="tokens")
    >>> jax.jit(jax.shard_map(attend, mesh=mesh, in_specs=tokens, out_specs=tokens))(q, k, v).shape
    (2, 5, 4, 8)
    """
    check_choice("scheme", scheme, tuple(SCHEMES))
    check_choice("order", order, placement.ORDERS)
    check_axis_names(axis_name, batch_axis, head_axis)
    devices = bound_size("axis_name", axis_name)
    for name, axis in (("batch_axis", batch_axis), ("head_axis", head_axis)):
        if axis is not None:
            bound_size(name, axis)
    axes = Axes(axis_name, devices, order, batch_axis, head_axis)
    call = make(query, key, value, lse=return_lse, shards=devices, **options)
    registry.check_name(call.implementation)
    sharding, (T, S) = _Sharding(scheme, axes), (call.shapes.T * devices, call.shapes.S * devices)
    sharding.check(call, call.shapes._replace(T=T, S=S))
    return sharding.attend(call, query, key, value)


@overload
def attention(
    query: Queries,
    key: Keys,
    value: Values,
    *,
    mesh: Mesh | AbstractMesh,
    axis_name: str,
    return_lse: Literal[False] = False,
    **options: Unpack[_MeshOptions],
) -> Output: ...
@overload
def attention(
    query: Queries,
    key: Keys,
    value: Values,
    *,
    mesh: Mesh | AbstractMesh,
    axis_name: str,
    return_lse: Literal[True],
    **options: Unpack[_MeshOptions],
) -> tuple[Output, LogSumExp]: ...
@advised(Options)
@may_be_minus_infinity(1)
def attention(
    query: Queries,
    key: Keys,
    value: Values,
    *,
    mesh: Mesh | AbstractMesh,
    axis_name: str,
    scheme: Literal["ring", "all_to_all", "gather"] = "ring",
    order: Literal["contiguous", "zigzag"] = "contiguous",
    batch_axis: AxisName | None = None,
    head_axis: AxisName | None = None,
    return_lse: bool = False,
    pad: bool = False,
    **options: Unpack[Options],
) -> Any:
    """`jattn.attention` of whole arrays, sharded over the devices of a mesh.

    Args:
        query: `[*B, T, N, H]`.
        key: `[*B, S, K, H]`.
        value: `[*B, S, K, V]`.
        mesh: the mesh; arrays are replicated over axes that are not named here.
        axis_name: the axis of the mesh over which T and S are sharded.
        scheme: "ring", "all_to_all" or "gather", see `attention_shard`.
        order: the order of the tokens in the arrays: "contiguous" as in the sequence, "zigzag" as
            `shard_tokens` orders them for this number of devices. It is the same in every array
            along T or S.
        batch_axis: the axis, or axes, over which the first batch axis is sharded, if it is.
        head_axis: the axis, or axes, over which query and key heads are sharded.
        options, return_lse: as in `jattn.attention`. Positions are by default the indices of the
            tokens before `shard_tokens`; if they are given, every shard is sent to every device.
        pad: whether T and S are padded to multiples of the number of devices, only in contiguous
            order; the padding is removed from the results.

    Returns:
        `out [*B, T, N, V]`, and with `return_lse` also `lse [*B, N, T]`, with the same sharding.

    Raises:
        TypeError, ValueError: for invalid arguments, and for sizes that the devices cannot share
            evenly.
        NotImplementedError: if the named implementation cannot compute the call; says why. Also
            for normalizers of whole rows with scheme "ring".

    >>> mesh = jax.make_mesh((1,), ("tokens",))
    >>> jattn.parallel.attention(q, k, v, mesh=mesh, axis_name="tokens", mask=masks.Causal()).shape
    (2, 5, 4, 8)
    """
    check_choice("scheme", scheme, tuple(SCHEMES))
    check_choice("order", order, placement.ORDERS)
    axes = mesh_axes(mesh, axis_name, order, batch_axis, head_axis)
    call = make(query, key, value, lse=return_lse, **options)
    registry.check_name(call.implementation)
    check_flag("pad", pad)
    if pad and order != "contiguous":
        raise ValueError(f"pad: expected False in {order} order, got True")
    sharding = _Sharding(scheme, axes)
    if pad:
        return _padded(call, query, key, value, mesh=mesh, sharding=sharding)
    sharding.check(call, call.shapes)
    check_shared(call.shapes, mesh, axes)
    return _on_mesh(call, query, key, value, mesh=mesh, sharding=sharding)


def _padded(
    call: Call, query: Array, key: Array, value: Array, *, mesh: Any, sharding: _Sharding
) -> Any:
    """Computes the call with T and S padded for the devices, and the padding masked and removed."""
    n, shapes = sharding.axes.devices, call.shapes
    T, S = (-(-size // n) * n for size in (shapes.T, shapes.S))

    def pad_tokens(x: Array, size: int) -> Array:
        padding = (0, size - x.shape[-3])
        return jnp.pad(x, [*[(0, 0)] * (x.ndim - 3), padding, (0, 0), (0, 0)])

    spec = slicing.pad_spec(call.spec, shapes.T, shapes.S, T, S)
    padded_call = dataclasses.replace(call, spec=spec, shapes=shapes._replace(T=T, S=S))
    sharding.check(call, padded_call.shapes)
    check_shared(padded_call.shapes, mesh, sharding.axes)
    arrays = (pad_tokens(query, T), pad_tokens(key, S), pad_tokens(value, S))
    results = _on_mesh(padded_call, *arrays, mesh=mesh, sharding=sharding)
    if call.lse:
        return _first_tokens(results[0], shapes.T, -3), _first_tokens(results[1], shapes.T, -1)
    return _first_tokens(results, shapes.T, -3)


def _first_tokens(x: Array, count: int, axis: int) -> Array:
    """Returns the first tokens along an axis; a number that the devices of a mesh with explicit
    axes cannot share is replicated."""
    place = x.ndim + axis
    if x.shape[place] != count and has_explicit_sharding(x):
        sharding = jax.typeof(x).sharding
        spec = P(*(None if n == place else name for n, name in enumerate(sharding.spec)))
        x = jax.sharding.reshard(x, NamedSharding(sharding.mesh, spec))
    return lax.slice_in_dim(x, 0, count, axis=place)


@compiled("mesh", "sharding")
def _on_mesh(
    call: Call, query: Array, key: Array, value: Array, *, mesh: Any, sharding: _Sharding
) -> Any:
    """Computes the call with `shard_map`."""
    axes, ndim = sharding.axes, len(call.shapes.batch)
    batch = [axes.batch, *[None] * (ndim - 1)] if ndim else []
    tokens = P(*batch, axes.name, axes.heads, None)

    def partition_leaf(letters: str, leaf: Array) -> P:
        # Arrays along both T and S have all keys of the device's queries.
        keys = axes.name if ring.travels(letters) else None
        along = {"T": axes.name, "S": keys, "N": axes.heads}
        return partition(letters, leaf, along, axes.batch, ndim)

    def local(call: Call, query: Array, key: Array, value: Array) -> Any:
        local_call = dataclasses.replace(call, shapes=check_shapes(query, key, value))
        return sharding.attend(local_call, query, key, value)

    call_specs = jax.tree.map(partition_leaf, axis_names(call), call)
    in_specs, lse = (call_specs, tokens, tokens, tokens), P(*batch, axes.heads, axes.name)
    out_specs = (tokens, lse) if call.lse else tokens
    run = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
    return run(*reshard(mesh, in_specs, (call, query, key, value)))
