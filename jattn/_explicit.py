"""Functions under a mesh whose axes are part of types, such as `jax.make_mesh` makes by default.

There the type of an array says how it is cut, and JAX asks of every operation how its result is.
`left_to_xla` gives types to the results of a function alone: within it XLA decides, as it does
under other meshes.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

import jax
from jax._src.config import _check_vma as check_varying
from jax._src.core import Literal
from jax._src.core import pvary_p as vary_p
from jax._src.pjit import jit_p
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec


_Function = TypeVar("_Function", bound=Callable[..., Any])


def left_to_xla(results: Callable[..., Any]) -> Callable[[_Function], _Function]:
    """Makes a function of trees of arrays one whose results are cut as `results` says.

    That is a function of the same arguments, which gives a tree of `PartitionSpec`s, or a function
    that gives one for each array of the results.
    """

    def decorate(function: _Function) -> _Function:
        @functools.wraps(function)
        def run(*operands: Any, **options: Any) -> Any:
            mesh = _mesh_of(operands)
            if not mesh.explicit_axes:
                return function(*operands, **options)
            auto = mesh.update_axis_types(dict.fromkeys(mesh.explicit_axes, AxisType.Auto))
            with jax.sharding.use_abstract_mesh(auto):
                found = function(*left_again(operands), **options)
            cuts = results(*operands, **options)
            if callable(cuts):
                cuts = jax.tree.map(cuts, found)
            typed = lambda x, cut: jax.sharding.reshard(x, NamedSharding(mesh, cut))  # noqa: E731
            return jax.tree.map(typed, found, cuts)

        return run  # pyright: ignore[reportReturnType]

    return decorate


def is_bound(x: Any) -> bool:
    """Whether a value is an array that belongs to a trace, or to a mesh by its type: a function
    that closes over it cannot be called in another context."""
    if isinstance(x, Tracer):
        return True
    return isinstance(x, jax.Array) and bool(jax.typeof(x).sharding.mesh.explicit_axes)


@contextlib.contextmanager
def without_mesh() -> Iterator[None]:
    """A context without the mesh around it, if its axes are part of types."""
    typed = jax.sharding.get_abstract_mesh().explicit_axes
    empty = AbstractMesh((), ())
    with jax.sharding.use_abstract_mesh(empty) if typed else contextlib.nullcontext():
        yield


def evaluated(jaxpr: Any, arrays: Any, arguments: Any) -> list[Any]:
    """As `jax.core.eval_jaxpr`, in the context of the caller: of its mesh, and not of that in which
    the program was traced; of operands that may vary over other axes, within `shard_map`."""
    variables = (*jaxpr.constvars, *jaxpr.invars)
    given = dict(zip(variables, (*arrays, *arguments), strict=True))
    values = with_results(jaxpr.eqns, given)
    return [value_of(x, values) for x in jaxpr.outvars]


def with_results(equations: Any, values: dict[Any, Any]) -> dict[Any, Any]:
    """The values of a program's variables, together with those that its equations compute."""
    values = dict(values)
    for equation in equations:
        operands = varied_like([value_of(x, values) for x in equation.invars], ())
        if equation.primitive is vary_p:
            axes = frozenset(equation.params["axes"] if check_varying.value else ())
            results = [vary(axes, x) for x in operands]
        elif equation.primitive is jit_p:
            inner = equation.params["jaxpr"]
            results = evaluated(inner.jaxpr, inner.consts, operands)
        else:
            options = equation.primitive.get_bind_params(equation.params)
            results = equation.primitive.bind(*operands, **options)
            results = results if equation.primitive.multiple_results else [results]
        values |= zip(equation.outvars, results, strict=True)
    return values


def value_of(x: Any, values: dict[Any, Any]) -> Any:
    """The value of a variable, or of a literal."""
    return x.val if isinstance(x, Literal) else values[x]


def varied_like(results: Any, operands: Any) -> Any:
    """A tree of results, of which each varies over every axis of the mesh over which one of them or
    an operand does."""
    leaves = jax.tree.leaves((results, operands))
    axes = frozenset[str]().union(*map(varying, leaves))
    return jax.tree.map(lambda x: vary(axes, x), results)


def varying(x: Any) -> frozenset[str]:
    """The axes of a mesh over which an array varies, within `shard_map`."""
    return jax.typeof(x).manual_axis_type.varying


def vary(axes: frozenset[str], x: Any) -> Any:
    """x as one that varies over these axes of a mesh, too."""
    missing = tuple(sorted(axes - varying(x)))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def _mesh_of(operands: Any) -> AbstractMesh:
    """The mesh of the context, or else that of the arrays' types."""
    found = jax.sharding.get_abstract_mesh()
    for x in jax.tree.leaves(operands):
        if found.empty:
            found = jax.typeof(x).sharding.mesh
    return found


def left_again(arrays: Any) -> Any:
    """A tree of arrays as they were within `left_to_xla`.

    What JAX keeps there for a backward pass outside of a program comes back with types that say how
    it is cut. Rules of our own for backward passes begin with this.
    """
    mesh = jax.sharding.get_abstract_mesh()

    def one(x: Any) -> Any:
        own = jax.typeof(x).sharding.mesh
        if not own.explicit_axes or mesh.empty or mesh == own:
            return x
        return jax.sharding.reshard(x, PartitionSpec(*[None] * x.ndim))

    return jax.tree.map(one, arrays)


def typed_like(arrays: Any, others: Any) -> Any:
    """A tree of arrays cut as others of the same shapes are, where that is part of types."""

    def one(x: Any, y: Any) -> Any:
        sharding = jax.typeof(y).sharding
        return jax.sharding.reshard(x, sharding) if sharding.mesh.explicit_axes else x

    return jax.tree.map(one, arrays, others)


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


def joined(first: Iterable[Any], second: Iterable[Any]) -> PartitionSpec:
    """How an array is cut whose axes are those of two others: those of the second by what does not
    cut the first yet."""
    first = tuple(first)
    used = {x for names in first for x in names or ()}
    free = (tuple(x for x in names or () if x not in used) or None for names in second)
    return PartitionSpec(*first, *free)


def as_rows(array: Any, rows: Any) -> PartitionSpec:
    """How an array is cut that has so many rows in place of its own: along rows only where devices
    can share these."""
    first, *rest = cuts_of(array)
    sizes = jax.typeof(array).sharding.mesh.shape
    if rows % math.prod(sizes[x] for x in first or ()):
        first = None
    return PartitionSpec(first, *rest)


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
