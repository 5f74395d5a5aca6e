"""Functions under a mesh whose axes are part of types, such as `jax.make_mesh` makes by default.

There the type of an array says how it is cut, and JAX asks of every operation how its result is.
`left_to_xla` gives types to the results of a function alone: within it XLA decides, as it does
under other meshes.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec


_Function = TypeVar("_Function", bound=Callable[..., Any])


def left_to_xla(results: Callable[..., Any]) -> Callable[[_Function], _Function]:
    """Makes a function of arrays one whose results are cut as `results` says, of the same
    arguments: a tree of `PartitionSpec`s."""

    def decorate(function: _Function) -> _Function:
        @functools.wraps(function)
        def run(*operands: Any, **options: Any) -> Any:
            mesh = _mesh_of(operands)
            if not mesh.explicit_axes:
                return function(*operands, **options)
            shardings = jax.tree.map(
                lambda spec: NamedSharding(mesh, spec),
                results(*operands, **options),
                is_leaf=lambda x: isinstance(x, PartitionSpec),
            )
            inner = functools.partial(function, **options)
            axes = mesh.explicit_axes
            return jax.sharding.auto_axes(inner, axes=axes, out_sharding=shardings)(*operands)

        return run  # pyright: ignore[reportReturnType]

    return decorate


def _mesh_of(operands: Any) -> AbstractMesh:
    """The mesh of the context, or else that of the arrays' types."""
    found = jax.sharding.get_abstract_mesh()
    for x in jax.tree.leaves(operands):
        if found.empty:
            found = jax.typeof(x).sharding.mesh
    return found


def cuts_of(array: Any) -> tuple[Any, ...]:
    """What cuts each axis of an array, by its type: names of axes of a mesh, or None."""
    sharding = jax.typeof(array).sharding
    explicit = set(sharding.mesh.explicit_axes)

    def one(entry: Any) -> Any:
        names = entry if isinstance(entry, tuple) else (entry,)
        return tuple(x for x in names if x in explicit) or None

    spec = sharding.spec
    return tuple(map(one, (*spec, *[None] * (array.ndim - len(spec)))))


def as_operand(array: Any) -> PartitionSpec:
    """How an array is cut."""
    return PartitionSpec(*cuts_of(array))


class Cuts(NamedTuple):
    """What cuts the axes of queries `[*B, T, N, H]`, and of what is computed for them."""

    batch: tuple[Any, ...]
    T: Any
    N: Any

    @classmethod
    def of(cls, query: Any) -> "Cuts":
        *batch, T, N, _ = cuts_of(query)
        return cls(tuple(batch), T, N)

    @property
    def out(self) -> PartitionSpec:
        """`[*B, T, N, V]`"""
        return PartitionSpec(*self.batch, self.T, self.N, None)

    @property
    def by_head(self) -> PartitionSpec:
        """`[*B, N, T]`"""
        return PartitionSpec(*self.batch, self.N, self.T)

    @property
    def matrix(self) -> PartitionSpec:
        """`[*B, N, T, S]`, of which no device has a part of the keys."""
        return PartitionSpec(*self.batch, self.N, self.T, None)
