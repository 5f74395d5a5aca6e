"""Shards the arrays of training over a device mesh (`Placement`). The mesh axes shard:

    data       the rows of the batches
    model      heads, the inner width of feed-forward networks, and vocabularies
    context    the positions of the sentences; attention is the ring attention of `jattn.parallel`

The modules of `jattn.nn` name the logical axes of each parameter. The optimiser's state is sharded
like its parameters. A mesh changes results by rounding only: empty rows are added to a batch until
its rows divide evenly over the devices.
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
_MESH_AXES = {"heads": "model", "kv_heads": "model", "mlp": "model", "vocabulary": "model"}


def parse_mesh(text: str) -> dict[str, int]:
    """Parses a text such as `data=4,model=2` to the sizes of all axes, in the order of `AXES`.

    Raises:
        ValueError: an axis is unknown or given twice, or a size is not a positive number.
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
    """Returns the sizes of the default mesh, which shards batches over all accelerators.

    A single process on CPUs uses one device, because further virtual devices would only share the
    same cores.
    """
    single_cpu = jax.default_backend() == "cpu" and jax.process_count() == 1
    return {"data": 1 if single_cpu else jax.device_count(), "model": 1, "context": 1}


def check_mesh(sizes: Mapping[str, int], config: Config) -> None:
    """Checks that a mesh fits the devices and the model.

    Raises:
        ValueError: the mesh needs another number of devices, or an axis does not divide evenly the
            sizes that it shards.
    """
    needed, available = math.prod(sizes.values()), jax.device_count()
    text = ",".join(f"{name}={size}" for name, size in sizes.items())
    if needed != available and sizes != usual_mesh():
        raise ValueError(f"--mesh: {text} takes {needed} devices, but there are {available}")
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
    """A placement of arrays on a device mesh; without a mesh, arrays stay where JAX puts them.

    Attributes:
        mesh: a mesh with the axes of `AXES`, or None for a single device.
        logical_axes: the names of each parameter's axes, by the parameter's name.
    """

    mesh: Mesh | None = None
    logical_axes: Mapping[str, Sequence[str | None]] = field(default_factory=dict)

    @classmethod
    def of(cls, sizes: Mapping[str, int], model: Model) -> "Placement":
        """Creates the placement of a model on a mesh of these sizes over all devices."""
        if math.prod(sizes.values()) == 1:
            return cls()
        names = tuple(sizes)
        types = (AxisType.Auto,) * len(names)
        mesh = jax.make_mesh(tuple(sizes.values()), names, axis_types=types)
        return cls(mesh, model.axes)

    @property
    def num_shards(self) -> tuple[int, int]:
        """The numbers of shards of a batch's rows and of its positions."""
        if self.mesh is None:
            return 1, 1
        return self.mesh.shape["data"], self.mesh.shape["context"]

    def model(self, model: Model) -> Model:
        """Returns the model to call on the mesh."""
        return model if self.num_shards[1] == 1 else dataclasses.replace(model, mesh=self.mesh)

    def check_shapes(self, shapes: Sequence[Shape]) -> None:
        """Checks that the widths of batches of these shapes divide evenly over the devices.

        Raises:
            ValueError: a width does not divide evenly; the message names it.
        """
        for width in (width for shape in shapes for width in shape[1:]):
            if width % self.num_shards[1]:
                raise ValueError(
                    f"--mesh: expected a divisor of all widths of batches for context, "
                    f"got {self.num_shards[1]} and a width of {width}"
                )

    def batch(self, batch: AnyBatch, micro_batches: int = 1) -> AnyBatch:
        """Puts a batch on the devices, with its rows sharded evenly.

        If the batch will be split into `micro_batches`, empty rows are added at the end of each,
        so that the rows of each are sharded evenly.
        """
        if self.mesh is None:
            return batch
        filled = filled_up(batch, self.num_shards[0], micro_batches)
        return jax.tree.map(lambda x: self._put_as(x, self._batch_sharding(x)), filled)

    def state(self, state: _Tree) -> _Tree:
        """Puts a tree of arrays on the devices: parameters, and the optimiser's arrays of the same
        names, are sharded by their logical axes; all other arrays are replicated."""
        if self.mesh is None:
            return state
        return jax.tree.map(self._put_as, state, self._shardings(state))

    def constrained(self, state: _Tree) -> _Tree:
        """Constrains a tree, within a compiled function, to the sharding of `state`."""
        if self.mesh is None:
            return state
        return jax.lax.with_sharding_constraint(state, self._shardings(state))

    def micro_batches(self, batch: AnyBatch, count: int) -> AnyBatch:
        """Splits a batch, within a compiled function, into `count` equal ones, stacked."""

        def split(x: Any) -> Any:
            x = jnp.reshape(x, (count, -1, *x.shape[1:]))
            if self.mesh is None:
                return x
            return jax.lax.with_sharding_constraint(x, self._batch_sharding(x, 1))

        return jax.tree.map(split, batch)

    def _batch_sharding(self, x: Any, leading_axes: int = 0) -> NamedSharding:
        """Returns the sharding of an array `[rows]` or `[rows, positions]` with `leading_axes` more
        axes in front."""
        axes = ("data", "context")[: x.ndim - leading_axes]
        return self._sharding(P(*[None] * leading_axes, *axes))

    def whole(self, tree: _Tree) -> _Tree:
        """Returns a tree whose arrays are whole on one device of this process."""
        if self.mesh is None:
            return tree
        return jax.tree.map(lambda array: array.addressable_data(0), self._on_each(tree))

    def host(self, tree: _Tree) -> _Tree:
        """Returns a tree as NumPy arrays."""
        return jax.device_get(tree if self.mesh is None else self._on_each(tree))

    def _on_each(self, tree: Any) -> Any:
        """Replicates a tree on every device; all processes must call this."""
        return jax.jit(lambda tree: tree, out_shardings=self._sharding(P()))(tree)

    def _shardings(self, tree: Any) -> Any:
        def sharding(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
            last = path[-1]
            name = last.key if isinstance(last, jax.tree_util.DictKey) else ""
            return self._sharding(self._spec(self.logical_axes.get(str(name), ()), leaf.shape))

        return jax.tree.map_with_path(sharding, tree)

    def _spec(self, axes: Sequence[str | None], shape: Sequence[int]) -> P:
        """Returns the partition spec of a parameter; axes that do not divide evenly over the
        devices, such as a vocabulary's may not, stay whole."""
        names = [_MESH_AXES.get(axis or "") for axis in axes]
        sizes = [1 if name is None else self._size(name) for name in names]
        dimensions = zip(names, sizes, shape, strict=False)
        return P(*(name if length % size == 0 else None for name, size, length in dimensions))

    def _size(self, name: str) -> int:
        assert self.mesh is not None
        return self.mesh.shape[name]

    def _sharding(self, spec: P) -> NamedSharding:
        assert self.mesh is not None
        return NamedSharding(self.mesh, spec)

    def _put_as(self, array: Any, sharding: NamedSharding) -> Any:
        """Puts an array on the devices; each process fills its own, without communication."""
        host = np.asarray(array)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


ONE_DEVICE = Placement()
