"""The axes of a mesh over which a call is sharded, seen from within `shard_map`."""

from typing import Any, NamedTuple

import jax
from jax import lax
from jaxtyping import Array, Int

from jattn import _explicit
from jattn.checks import shown
from jattn.parallel import placement


AxisName = str | tuple[str, ...]


class Axes(NamedTuple):
    """The axis over which tokens are sharded, its number of devices and their order of tokens; and
    the axes over which batch rows and heads are sharded, if any."""

    name: str
    devices: int
    order: str
    batch: AxisName | None = None
    heads: AxisName | None = None

    @property
    def place(self) -> Int[Array, ""]:
        """The index of this device along the axis."""
        return lax.axis_index(self.name)

    def first(self, rows: int, heads: int) -> tuple[Any, Any]:
        """Returns the numbers of this device's first batch row and head; 0 if not sharded."""
        b = 0 if self.batch is None else lax.axis_index(self.batch) * rows
        h = 0 if self.heads is None else lax.axis_index(self.heads) * heads
        return b, h

    def places(self, size: int, index: Any = None) -> Int[Array, " size"]:
        """Returns the places in the sequence of the tokens of a device, by default this one."""
        index = self.place if index is None else index
        return placement.local_places(index, size, self.devices, self.order)

    def run(self, size: int) -> int:
        """Returns the number of consecutive tokens among a device's `size` tokens."""
        return size // placement.runs(1, self.order).size

    def vary(self, tree: Any, operands: Any = ()) -> Any:
        """Returns the tree with arrays that vary over the axis, and over every axis over which any
        array of the tree or of `operands` varies."""
        leaves = jax.tree.leaves((tree, operands))
        names = frozenset({self.name}).union(*map(_explicit.varying, leaves))
        return jax.tree.map(lambda x: _explicit.vary(names, x), tree)


def check_axis_names(axis_name: Any, batch_axis: Any, head_axis: Any) -> None:
    """Raises TypeError for values that cannot name the mesh axes of tokens, batch and heads."""
    if not isinstance(axis_name, str):
        raise TypeError(f"axis_name: expected a name of axes of a mesh, got {shown(axis_name)}")
    for name, value in (("batch_axis", batch_axis), ("head_axis", head_axis)):
        names = value if isinstance(value, tuple) and value else (value,)
        if value is not None and not all(isinstance(x, str) for x in names):
            raise TypeError(
                f"{name}: expected a name or a tuple of names of axes of a mesh, got {shown(value)}"
            )


def bound_size(name: str, value: Any) -> int:
    """Returns the number of devices along an axis, within `shard_map`.

    Raises ValueError if no such axis is bound.
    """
    try:
        return int(lax.axis_size(value))
    except NameError:
        raise ValueError(
            f"{name}: {value!r} is no axis of a mesh here; call this within jax.shard_map over it"
        ) from None
