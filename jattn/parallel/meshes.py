"""The mesh of a call: checks that its axes can shard the arrays, and the sharding of each array."""

import math
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from jattn._types import Tree
from jattn.parallel.axes import Axes, AxisName
from jattn.spec import Shapes


def _names(axis: AxisName | None) -> tuple[str, ...]:
    return axis if isinstance(axis, tuple) else () if axis is None else (axis,)


def devices_of(mesh: Any, axis: AxisName | None) -> int:
    """Returns the number of devices along an axis, or along several together."""
    return math.prod(mesh.shape[name] for name in _names(axis))


def check_mesh(mesh: Any, *axes: AxisName | None) -> None:
    """Raises TypeError for a value that is not a mesh, ValueError for missing or repeated axes."""
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise TypeError(f"mesh: expected a jax.sharding.Mesh, got {type(mesh).__name__}")
    used = [name for axis in axes for name in _names(axis)]
    for name in used:
        if name not in mesh.shape:
            raise ValueError(f"mesh: expected an axis {name!r}, got {dict(mesh.shape)}")
        if used.count(name) > 1:
            raise ValueError(
                f"mesh: expected axis {name!r} to shard one axis of the arrays, got two"
            )


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
