"""Attention of a sequence that several devices share: what users call.

`attention_shard` is for within the user's own `jax.shard_map`, `attention` for whole arrays and a
mesh. Both check their arguments and hand a spec to one of the schemes.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Unpack, overload

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from jattn._advised import advised
from jattn._debugging import may_be_minus_infinity
from jattn._pytree import axis_names
from jattn._types import Keys, LogSumExp, Output, Queries, Values
from jattn.checks import check_choice, check_flag
from jattn.kernels import registry
from jattn.kernels.common import slicing
from jattn.options import Options
from jattn.parallel import exchange, pieces, placement, ring
from jattn.parallel.axes import Axes, AxisName, bound_size, check_axis_names
from jattn.parallel.meshes import check_mesh, check_shared, devices_of, partition, typed
from jattn.softmax import add_sink, sink_by_head
from jattn.spec import (
    Shapes,
    Spec,
    check_shapes,
    compiled,
    make_spec,
    nan_if_overflowed,
    prepare,
)


SCHEMES: dict[str, Callable[..., tuple[Array, Array]]] = {
    "ring": ring.attend,
    "all_to_all": exchange.all_to_all_attend,
    "gather": exchange.gathered_attend,
}
"""The ways to bring queries and keys of several devices together, by name."""


class _ShardOptions(Options, total=False):
    """How a call is cut, beside the options of `jattn.attention`."""

    scheme: Literal["ring", "all_to_all", "gather"]
    order: Literal["contiguous", "zigzag"]
    batch_axis: AxisName | None
    head_axis: AxisName | None


class _MeshOptions(_ShardOptions, total=False):
    """The options of a call on whole arrays."""

    pad: bool


class _Cut(NamedTuple):
    """How a call is cut: the scheme, the axes, and what computes."""

    scheme: str
    axes: Axes
    implementation: str | None

    def check(self, shapes: Shapes) -> None:
        """Raises ValueError and NotImplementedError for whole sizes that cannot be cut so."""
        axes = self.axes
        for name, size in (("query", shapes.T), ("key", shapes.S)):
            placement.check_divisible(name, size, axes.devices, axes.order)
        if self.scheme == "ring":
            pieces.check_implementation(self.implementation)

    def attend(self, spec: Spec, query: Array, key: Array, value: Array, shapes: Shapes) -> Any:
        """`out`, or `(out, lse)` if the spec asks for it, of this device's shards."""
        flat = (x.reshape(shapes.B, *x.shape[-3:]) for x in (query, key, value))
        prepared, scheme = prepare(spec, shapes), SCHEMES[self.scheme]
        results = scheme(prepared, *flat, self.axes, self.implementation)
        if spec.overflowed is not None:  # on any device: the keys of all are attended
            anywhere = lax.pmax(spec.overflowed.astype(jnp.int32), self.axes.name) > 0
            spec = dataclasses.replace(spec, overflowed=anywhere)
        out, lse = nan_if_overflowed(spec, *results)
        out = out.reshape(*shapes.batch, *out.shape[1:])
        return (out, lse.reshape(*shapes.batch, *lse.shape[1:])) if spec.lse else out


def _check_shapes(query: Any, key: Any, value: Any) -> Shapes:
    if value is None:
        raise TypeError("value: expected an array [*B, S, K, V], got None")
    return check_shapes(query, key, value)


def _check_cut(scheme: Any, order: Any, axis_name: Any, batch_axis: Any, head_axis: Any) -> None:
    check_choice("scheme", scheme, tuple(SCHEMES))
    placement.check_order(order)
    check_axis_names(axis_name, batch_axis, head_axis)


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

    As `jattn.attention` of the whole arrays, of which each device has a shard along T and S: equal
    values and gradients, equal decisions of dropout.

    Args:
        query, key, value: `[*B, T, N, H]`, `[*B, S, K, H]`, `[*B, S, K, V]`: this device's tokens.
        axis_name: the axis of the mesh along which the tokens are cut.
        scheme: "ring": keys go round while others are computed with, memory is linear in a device's
            own tokens; GPUs before Hopper need
            `XLA_FLAGS=--xla_gpu_enable_latency_hiding_scheduler=true` for it. "all_to_all": tokens
            are exchanged for heads, of which the devices share N evenly. "gather": each device gets
            a copy of all keys.
        order: in which order the devices hold the tokens, see `shard_tokens`.
        batch_axis, head_axis: the axis, or axes, of the mesh along which the batch and the heads
            are cut, if they are: functions and dropout then see batch rows and heads of the whole.
        mask: arrays along T or S are this device's, in the order of its tokens; those along both
            T and S are cut along T and have the keys of all devices, shard after shard. Lengths and
            layouts of blocks count places in the sequence as it was before `shard_tokens`.
        score, sink: as for the mask; a logit for each of this device's heads.
        q_positions, kv_positions: by default where this device's tokens were before
            `shard_tokens`. While they are given, every shard is sent.
        return_lse, and other options: as in `jattn.attention`; the same on all devices.

    Returns:
        `out [*B, T, N, V]`, and with `return_lse` also `lse [*B, N, T]`, of this device's queries.

    Raises:
        TypeError, ValueError: for arguments that do not fit, also outside `shard_map`.
        NotImplementedError: if the named implementation cannot, with its reason.
    """
    _check_cut(scheme, order, axis_name, batch_axis, head_axis)
    check_flag("return_lse", return_lse)
    devices = bound_size("axis_name", axis_name)
    for name, value_of in (("batch_axis", batch_axis), ("head_axis", head_axis)):
        if value_of is not None:
            bound_size(name, value_of)
    shapes = _check_shapes(query, key, value)
    whole = shapes._replace(T=shapes.T * devices, S=shapes.S * devices)
    spec, implementation, sink = _checked(shapes, return_lse, options, (whole.T, whole.S))
    axes = Axes(axis_name, devices, order, batch_axis, head_axis)
    cut = _Cut(scheme, axes, implementation)
    cut.check(whole)
    results = cut.attend(spec, query, key, value, shapes)
    return results if sink is None else add_sink(results, sink, bool(return_lse))


def _checked(
    shapes: Shapes, return_lse: bool, options: Options, global_sizes: tuple[int, int] | None
) -> tuple[Spec, str | None, Array | None]:
    """The spec, the implementation that is named, and the sink of each head."""
    sink = options.get("sink")
    sink = None if sink is None else sink_by_head("sink", sink, shapes.N)
    implementation = options.pop("implementation", None)
    spec = make_spec(shapes, lse=return_lse, **options, global_sizes=global_sizes)
    registry.check_name(implementation)
    return spec, implementation, sink


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
    """`jattn.attention` of whole arrays, cut over the devices of a mesh.

    Args:
        query: `[*B, T, N, H]`.
        key: `[*B, S, K, H]`.
        value: `[*B, S, K, V]`.
        mesh: the mesh; over axes that are not named here everything is the same.
        axis_name: the axis of the mesh along which T and S are cut.
        scheme: "ring", "all_to_all" or "gather", see `attention_shard`.
        order: how the tokens stand in the arrays: "contiguous" as in the sequence, "zigzag" as
            `shard_tokens` has placed them for this axis, and with them every array along T and S.
        batch_axis: the axis, or axes, along which the first batch axis is cut, if it is.
        head_axis: the axis, or axes, along which query and key heads are cut.
        options, return_lse: as in `jattn.attention`. Positions are by default where tokens were
            before `shard_tokens`; while they are given, every shard is sent.
        pad: in contiguous order, pads T and S to what the devices can share evenly; results are
            those without.

    Returns:
        `out [*B, T, N, V]`, and with `return_lse` also `lse [*B, N, T]`, cut in the same way.

    Raises:
        TypeError, ValueError: for arguments that do not fit, and for sizes that the devices cannot
            share evenly, with both numbers.
        NotImplementedError: if the named implementation cannot, with its reason.
    """
    _check_cut(scheme, order, axis_name, batch_axis, head_axis)
    check_flag("return_lse", return_lse)
    check_mesh(mesh, axis_name, batch_axis, head_axis)
    shapes = _check_shapes(query, key, value)
    spec, implementation, sink = _checked(shapes, return_lse, options, None)
    check_flag("pad", pad)
    axes = Axes(axis_name, devices_of(mesh, axis_name), order, batch_axis, head_axis)
    cut = _Cut(scheme, axes, implementation)
    if pad and order == "contiguous":
        results = _padded(spec, query, key, value, mesh=mesh, cut=cut, shapes=shapes)
    else:
        cut.check(shapes)
        check_shared(shapes, mesh, axes)
        results = _on_mesh(spec, query, key, value, mesh=mesh, cut=cut, shapes=shapes)
    return results if sink is None else add_sink(results, sink, bool(return_lse))


def _padded(
    spec: Spec, query: Array, key: Array, value: Array, *, mesh: Any, cut: _Cut, shapes: Shapes
) -> Any:
    """As `_on_mesh` of what the devices cannot share evenly: more queries and keys are added, which
    nothing attends to, and their results are taken away."""
    n = cut.axes.devices
    T, S = (-(-size // n) * n for size in (shapes.T, shapes.S))

    def wider(x: Array, size: int) -> Array:
        rows = (0, size - x.shape[-3])
        return jnp.pad(x, [*[(0, 0)] * (x.ndim - 3), rows, (0, 0), (0, 0)])

    spec = slicing.pad_spec(spec, shapes.T, shapes.S, T, S)
    whole = shapes._replace(T=T, S=S)
    cut.check(whole)
    check_shared(whole, mesh, cut.axes)
    arrays = (wider(query, T), wider(key, S), wider(value, S))
    found = _on_mesh(spec, *arrays, mesh=mesh, cut=cut, shapes=whole)
    if spec.lse:
        return found[0][..., : shapes.T, :, :], found[1][..., : shapes.T]
    return found[..., : shapes.T, :, :]


def _along(letters: str, axes: Axes) -> dict[str, Any]:
    """The axes of a mesh by letter; arrays along T and S keep all keys beside their queries."""
    return {"T": axes.name, "S": axes.name if ring.travels(letters) else None, "N": axes.heads}


@compiled("mesh", "cut", "shapes")
def _on_mesh(
    spec: Spec, query: Array, key: Array, value: Array, *, mesh: Any, cut: _Cut, shapes: Shapes
) -> Any:
    axes, lead = cut.axes, len(shapes.batch)
    batch = [axes.batch, *[None] * (lead - 1)] if lead else []
    tokens = P(*batch, axes.name, axes.heads, None)
    of_spec = jax.tree.map(
        lambda letters, leaf: partition(letters, leaf, _along(letters, axes), axes.batch, lead),
        axis_names(spec),
        spec,
    )

    def local(spec: Spec, query: Array, key: Array, value: Array) -> Any:
        own = check_shapes(query, key, value)
        return cut.attend(spec, query, key, value, own)

    lse, cuts = P(*batch, axes.heads, axes.name), (of_spec, tokens, tokens, tokens)
    out_specs = (tokens, lse) if spec.lse else tokens
    run = jax.shard_map(local, mesh=mesh, in_specs=cuts, out_specs=out_specs)
    return run(*typed(mesh, cuts, (spec, query, key, value)))
