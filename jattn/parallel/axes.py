"""The mesh axes over which a call is sharded, for use within `shard_map`."""

from typing import Any, NamedTuple

import jax
from jax import lax
from jaxtyping import Array, Int

from jattn import _explicit
from jattn.checks import shown
from jattn.parallel import placement


AxisName = str | tuple[str, ...]


class Axes(NamedTuple):
    """The mesh axes of a call.

    name: the axis over which tokens are sharded.
    devices: the number of devices along it.
    order: the order in which the devices hold the tokens, "contiguous" or "zigzag".
    batch, heads: the axes over which batch rows and heads are sharded, if they are.
    """

    name: str
    devices: int
    order: str
    batch: AxisName | None = None
    heads: AxisName | None = None

    @property
    def device_index(self) -> Int[Array, ""]:
        """The index of this device along the axis of tokens."""
        return lax.axis_index(self.name)

    def first_row_and_head(self, rows: int, heads: int) -> tuple[Any, Any]:
        """Returns the indices, in the whole call, of this device's first batch row and first head,
        where each device has this many rows and heads; 0 if they are not sharded."""
        b = 0 if self.batch is None else lax.axis_index(self.batch) * rows
        h = 0 if self.heads is None else lax.axis_index(self.heads) * heads
        return b, h

    def places(self, size: int, index: Any = None) -> Int[Array, " size"]:
        """Returns the places in the sequence of the `size` tokens of device `index`, by default
        this one."""
        index = self.device_index if index is None else index
        return placement.local_places(index, size, self.devices, self.order)

    def range_size(self, size: int) -> int:
        """Returns the number of tokens in each range of consecutive tokens, of `size` tokens that a
        device holds."""
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
    """Returns the number of devices along the mesh axis or axes `value`, within `shard_map`.

    Raises ValueError, naming the argument `name`, outside a `shard_map` over them.
    """
    try:
        return int(lax.axis_size(value))
    except NameError:
        raise ValueError(
            f"{name}: expected a mesh axis of the enclosing jax.shard_map, got {value!r}; "
            "call this within a jax.shard_map over that axis"
        ) from None
