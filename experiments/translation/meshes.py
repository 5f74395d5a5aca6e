"""Where the arrays of training lie: a mesh of devices, and what is cut along which of its axes.

    data       rows of the batches
    model      heads, the inner width of feed-forward networks, and vocabularies
    context    the positions of the sentences; attention is `jattn.parallel`'s, whose keys go round

Which axes a parameter has is told by its module, in the words of `jattn.nn`'s logical axes. The
optimiser keeps its memory of a parameter where the parameter lies. A mesh changes no number but by
rounding: batches are filled up with empty rows to what the devices can share.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from experiments.runs.command_line import nearest
from experiments.translation.batches import AnyBatch, Shape, filled_up
from experiments.translation.model import Model
from experiments.translation.presets import Config


_Tree = TypeVar("_Tree")

AXES = ("data", "model", "context")
_CUT_ALONG = {"heads": "model", "kv_heads": "model", "mlp": "model", "vocabulary": "model"}


def parse_mesh(text: str) -> dict[str, int]:
    """The sizes of the axes in a text such as `data=4,model=2`, in the order of `AXES`.

    Raises:
        ValueError: an unknown axis, one given twice, or a size that is no positive number.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, separator, size = part.strip().partition("=")
        if separator and name not in AXES:
            known = ", ".join(AXES)
            raise ValueError(f"--mesh: expected axes of {known}, got {name!r}{nearest(name, AXES)}")
        if not separator or not size.isdecimal() or int(size) < 1:
            raise ValueError(f"--mesh: expected AXIS=SIZE,... such as data=4,model=2, got {text!r}")
        if name in sizes:
            raise ValueError(f"--mesh: axis {name!r} is given twice in {text!r}")
        sizes[name] = int(size)
    return {name: sizes.get(name, 1) for name in AXES}


def usual_mesh() -> dict[str, int]:
    """What a run gets that asks for no mesh: batches are cut over all accelerators there are.

    The virtual devices that a single process can have on CPUs share the cores that one device uses
    alone, so there it is one.
    """
    alone = jax.default_backend() == "cpu" and jax.process_count() == 1
    return {"data": 1 if alone else jax.device_count(), "model": 1, "context": 1}


def check_mesh(sizes: Mapping[str, int], config: Config) -> None:
    """Makes sure that a mesh fits the devices and the model.

    Raises:
        ValueError: it is for another number of devices, or the devices of an axis cannot share
            evenly what is cut along it.
    """
    wanted, found = math.prod(sizes.values()), jax.device_count()
    given = ",".join(f"{name}={size}" for name, size in sizes.items())
    if wanted != found and sizes != usual_mesh():
        raise ValueError(f"--mesh: {given} takes {wanted} devices, but there are {found}")
    if config.architecture == "rnnsearch":
        if sizes["context"] > 1:
            raise ValueError("--mesh: expected context=1 with architecture=rnnsearch")
        return
    for name in ("num_heads", "feed_forward"):
        if getattr(config, name) % sizes["model"]:
            raise ValueError(
                f"--mesh: expected a divisor of {name}={getattr(config, name)} for model, "
                f"got {sizes['model']}"
            )


@dataclass(frozen=True)
class Placement:
    """Places arrays on a mesh; without one they stay where JAX has them.

    Attributes:
        mesh: with the axes of `AXES`, or None for a single device.
        logical_axes: the names of each parameter's axes, by the parameter's name.
    """

    mesh: Mesh | None = None
    logical_axes: Mapping[str, Sequence[str | None]] = field(default_factory=dict)

    @classmethod
    def of(cls, sizes: Mapping[str, int], model: Model) -> "Placement":
        """Of this model, on all devices as a mesh of these sizes."""
        if math.prod(sizes.values()) == 1:
            return cls()
        names = tuple(sizes)
        types = (AxisType.Auto,) * len(names)
        mesh = jax.make_mesh(tuple(sizes.values()), names, axis_types=types)
        return cls(mesh, model.axes)

    @property
    def num_shards(self) -> tuple[int, int]:
        """Into how many shards the rows of a batch are cut, and its positions."""
        if self.mesh is None:
            return 1, 1
        return self.mesh.shape["data"], self.mesh.shape["context"]

    def model(self, model: Model) -> Model:
        """The model as it is called on the mesh."""
        return model if self.num_shards[1] == 1 else dataclasses.replace(model, mesh=self.mesh)

    def check_shapes(self, shapes: Sequence[Shape]) -> None:
        """Makes sure that the devices can share the positions of batches of these shapes.

        Raises:
            ValueError: they cannot; the message names the width.
        """
        for width in (width for shape in shapes for width in shape[1:]):
            if width % self.num_shards[1]:
                raise ValueError(
                    f"--mesh: expected a divisor of all widths of batches for context, "
                    f"got {self.num_shards[1]} and a width of {width}"
                )

    def batch(self, batch: AnyBatch, micro_batches: int = 1) -> AnyBatch:
        """A batch on the devices, its rows shared evenly.

        Where it is to be cut into `micro_batches`, the rows of each are shared evenly, and empty
        rows fill up the end of each.
        """
        if self.mesh is None:
            return batch
        whole = filled_up(batch, self.num_shards[0], micro_batches)
        return jax.tree.map(lambda x: self._put_as(x, self._of_batch(x)), whole)

    def state(self, state: _Tree) -> _Tree:
        """A tree of arrays on the devices: parameters, and what the optimiser has under the same
        names, are cut as their axes say; the rest is whole on each."""
        if self.mesh is None:
            return state
        return jax.tree.map(self._put_as, state, self._shardings(state))

    def constrained(self, state: _Tree) -> _Tree:
        """Within a compiled function: the tree, constrained to be cut as `state` cuts it."""
        if self.mesh is None:
            return state
        return jax.lax.with_sharding_constraint(state, self._shardings(state))

    def micro_batches(self, batch: AnyBatch, count: int) -> AnyBatch:
        """Within a compiled function: a batch cut into `count` equal ones, stacked."""

        def cut(x: Any) -> Any:
            x = jnp.reshape(x, (count, -1, *x.shape[1:]))
            if self.mesh is None:
                return x
            return jax.lax.with_sharding_constraint(x, self._of_batch(x, 1))

        return jax.tree.map(cut, batch)

    def _of_batch(self, x: Any, before: int = 0) -> NamedSharding:
        """Of an array `[rows]` or `[rows, positions]`, after so many other axes."""
        return self._sharding(P(*[None] * before, *("data", "context")[: x.ndim - before]))

    def whole(self, tree: _Tree) -> _Tree:
        """A tree whose arrays are whole on a device of this process."""
        if self.mesh is None:
            return tree
        return jax.tree.map(lambda array: array.addressable_data(0), self._on_each(tree))

    def host(self, tree: _Tree) -> _Tree:
        """A tree as NumPy arrays."""
        return jax.device_get(tree if self.mesh is None else self._on_each(tree))

    def _on_each(self, tree: Any) -> Any:
        """A tree that is whole on every device; all processes have to ask for it."""
        return jax.jit(lambda tree: tree, out_shardings=self._sharding(P()))(tree)

    def _shardings(self, tree: Any) -> Any:
        def sharding(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
            last = path[-1]
            name = last.key if isinstance(last, jax.tree_util.DictKey) else ""
            return self._sharding(self._spec(self.logical_axes.get(str(name), ()), leaf.shape))

        return jax.tree.map_with_path(sharding, tree)

    def _spec(self, axes: Sequence[str | None], shape: Sequence[int]) -> P:
        """Of a parameter; an axis that the devices cannot share evenly, such as that of a
        vocabulary, stays whole."""
        names = [_CUT_ALONG.get(axis or "") for axis in axes]
        sizes = [1 if name is None else self._size(name) for name in names]
        fitting = zip(names, sizes, shape, strict=False)
        return P(*(name if length % size == 0 else None for name, size, length in fitting))

    def _size(self, name: str) -> int:
        assert self.mesh is not None
        return self.mesh.shape[name]

    def _sharding(self, spec: P) -> NamedSharding:
        assert self.mesh is not None
        return NamedSharding(self.mesh, spec)

    def _put_as(self, array: Any, sharding: NamedSharding) -> Any:
        """Each process gives its own devices what they shall have; none asks another."""
        host = np.asarray(array)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


ONE_DEVICE = Placement()
