"""The mesh axes over which a call is sharded, their checks, and the sharding of each array."""

import math
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int

from jattn import _explicit
from jattn._types import Tree
from jattn.checks import shown
from jattn.parallel import placement
from jattn.spec import Shapes


AxisName = str | tuple[str, ...]


class Axes(NamedTuple):
    """The mesh axes of a call."""

    name: str  # the axis over which tokens are sharded
    devices: int  # the number of devices along it
    order: str  # the order in which the devices hold the tokens, "contiguous" or "zigzag"
    batch: AxisName | None = None  # the axes over which batch rows are sharded
    heads: AxisName | None = None  # the axes over which heads are sharded

    @property
    def device_index(self) -> Int[Array, ""]:
        """The index of this device along the axis of tokens."""
        return lax.axis_index(self.name)

    def first_row_and_head(self, rows: int, heads: int) -> tuple[Any, Any]:
        """Returns the indices of this device's first batch row and head in the whole call."""
        b = 0 if self.batch is None else lax.axis_index(self.batch) * rows
        h = 0 if self.heads is None else lax.axis_index(self.heads) * heads
        return b, h

    def places(self, size: int, index: Any = None) -> Int[Array, " size"]:
        """Returns the places of the `size` tokens of device `index`, by default this one."""
        index = self.device_index if index is None else index
        return placement.local_places(index, size, self.devices, self.order)

    def range_size(self, size: int) -> int:
        """Returns the length of each range of consecutive tokens, of `size` tokens of a device."""
        return size // placement.token_ranges(1, self.order).size

    def vary(self, tree: Any, operands: Any = ()) -> Any:
        """Returns the tree with its arrays marked, for `shard_map`, as varying over the axis of
        tokens and over every axis over which an array of the tree or of `operands` varies."""
        leaves = jax.tree.leaves((tree, operands))
        names = frozenset({self.name}).union(*map(_explicit.varying, leaves))
        return jax.tree.map(lambda x: _explicit.vary(names, x), tree)


def check_axis_names(axis_name: Any, batch_axis: Any, head_axis: Any) -> None:
    """Raises TypeError for values that cannot name the mesh axes of tokens, batch and heads."""
    if not isinstance(axis_name, str):
        raise TypeError(f"axis_name: expected the name of a mesh axis, got {shown(axis_name)}")
    for name, value in (("batch_axis", batch_axis), ("head_axis", head_axis)):
        names = value if isinstance(value, tuple) and value else (value,)
        if value is not None and not all(isinstance(x, str) for x in names):
            raise TypeError(
                f"{name}: expected the name of a mesh axis or a tuple of names, got {shown(value)}"
            )


def bound_size(name: str, value: Any) -> int:
    """Returns the number of devices along the axis or axes `value` of the enclosing `shard_map`."""
    try:
        return int(lax.axis_size(value))
    except NameError:
        raise ValueError(
            f"{name}: expected a mesh axis of the enclosing jax.shard_map, got {value!r}; "
            "call this within a jax.shard_map over that axis"
        ) from None


def _names(axis: AxisName | None) -> tuple[str, ...]:
    return axis if isinstance(axis, tuple) else () if axis is None else (axis,)


def devices_of(mesh: Any, axis: AxisName | None) -> int:
    """Returns the number of devices along an axis, or along several together."""
    return math.prod(mesh.shape[name] for name in _names(axis))


def mesh_axes(mesh: Any, axis_name: Any, order: str, batch_axis: Any, head_axis: Any) -> Axes:
    """Returns the axes of a call on whole arrays, after checking the mesh and their names."""
    check_axis_names(axis_name, batch_axis, head_axis)
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise TypeError(f"mesh: expected a jax.sharding.Mesh, got {type(mesh).__name__}")
    used = [name for axis in (axis_name, batch_axis, head_axis) for name in _names(axis)]
    for name in used:
        if name not in mesh.shape:
            raise ValueError(f"mesh: expected an axis {name!r}, got {dict(mesh.shape)}")
        if used.count(name) > 1:
            raise ValueError(
                f"mesh: expected axis {name!r} to shard one axis of the arrays, got two"
            )
    return Axes(axis_name, devices_of(mesh, axis_name), order, batch_axis, head_axis)


def check_shared(shapes: Shapes, mesh: Any, axes: Axes) -> None:
    """Raises ValueError if the devices cannot share batch or heads evenly."""
    if axes.batch is not None and not shapes.batch:
        raise ValueError("batch_axis: expected a query with a batch axis, got [T, N, H]")
    rows = shapes.batch[0] if shapes.batch else 1
    pairs = (("batch", rows, axes.batch), ("N", shapes.N, axes.heads), ("K", shapes.K, axes.heads))
    for letter, size, axis in pairs:
        devices = devices_of(mesh, axis)
        if size % devices:
            raise ValueError(
                f"mesh: axis {axis!r} has {devices} devices, which cannot share {letter} = {size} "
                f"evenly"
            )


def partition(
    letters: str, leaf: Array, along: dict[str, Any], batch_axis: AxisName | None, batch: int
) -> P:
    """Returns the sharding of an array of a spec, whose axes have these letters.

    `along` maps letters to mesh axes. In calls with `batch` leading axes, the array's first axis is
    sharded over `batch_axis` if the array has them all.
    """
    named = [x for x in letters.split() if "*" not in x]
    lead = leaf.ndim - len(named) if "B" in letters.replace("#", "") else 0
    first = leaf.shape[0] if lead else 1
    entries: list[Any] = [None] * leaf.ndim
    if lead == batch and first > 1:
        entries[0] = batch_axis
    for axis, letter in enumerate(named, leaf.ndim - len(named)):
        broadcast = letter.startswith("#") and leaf.shape[axis] == 1
        entries[axis] = None if broadcast else along.get(letter.lstrip("#"))
    return P(*entries)


def reshard(mesh: Any, in_specs: Tree, arrays: Tree) -> Tree:
    """Reshards the arrays to the `in_specs` of a `jax.shard_map`, along the mesh's explicit axes.

    On meshes with explicit axes, such as those of `jax.make_mesh`, `jax.shard_map` rejects arrays
    that are not sharded yet.
    """
    axis_types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    explicit = {name for name, axis_type in axis_types if axis_type == AxisType.Explicit}
    if not explicit:
        return arrays

    def reshard_tree(in_spec: P, tree: Array) -> Array:
        spec = P(*(tuple(x for x in _names(axis) if x in explicit) or None for axis in in_spec))
        sharding = NamedSharding(mesh, spec)
        return jax.tree.map(lambda x: jax.sharding.reshard(x, sharding), tree)

    return jax.tree.map(reshard_tree, in_specs, arrays)
