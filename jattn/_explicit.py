"""Support for meshes with explicit axes, such as `jax.make_mesh` makes by default.

There the type of an array includes its sharding, and every operation must determine the sharding
of its result. `partitioned_by_xla` declares the shardings of a function's results only: within the
function XLA's partitioner decides, as it does under other meshes.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

import jax
from jax._src.ad_checkpoint import remat_p
from jax._src.config import _check_vma as check_varying
from jax._src.core import Literal
from jax._src.core import pvary_p as vary_p
from jax._src.pjit import jit_p
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec


_Function = TypeVar("_Function", bound=Callable[..., Any])


def partitioned_by_xla(results: Callable[..., Any]) -> Callable[[_Function], _Function]:
    """Returns a decorator that leaves the sharding within a function of trees of arrays to XLA.

    `results` gives the sharding of the results: it takes the function's arguments and returns a
    tree of `PartitionSpec`s, or a function that returns one for each array of the results.
    """

    def decorate(function: _Function) -> _Function:
        @functools.wraps(function)
        def run(*operands: Any, **options: Any) -> Any:
            mesh = _mesh_of(operands)
            if not mesh.explicit_axes:
                return function(*operands, **options)
            auto = mesh.update_axis_types(dict.fromkeys(mesh.explicit_axes, AxisType.Auto))
            placed = _placed(operands, mesh)
            with jax.sharding.use_abstract_mesh(auto):
                outputs = function(*in_context_mesh(placed), **options)
            specs = results(*operands, **options)
            if callable(specs):
                specs = jax.tree.map(specs, outputs)
            typed = lambda x, spec: jax.sharding.reshard(x, NamedSharding(mesh, spec))  # noqa: E731
            return jax.tree.map(typed, outputs, specs)

        return run  # pyright: ignore[reportReturnType]

    return decorate


def _placed(arrays: Any, mesh: AbstractMesh) -> Any:
    """Returns a tree of arrays, in which float arrays that belong to no mesh by their type become
    replicated over `mesh`, so that their gradients have the types that JAX expects of them."""

    def placed(x: Any) -> Any:
        is_float = isinstance(x, jax.Array) and jax.numpy.issubdtype(x.dtype, jax.numpy.floating)
        if not is_float or not jax.typeof(x).sharding.mesh.empty:
            return x
        return jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec(*[None] * x.ndim)))

    return jax.tree.map(placed, arrays)


def is_bound(x: Any) -> bool:
    """Returns whether a value is an array that belongs to a trace, or to a mesh by its type: a
    function that closes over it cannot be called in another context."""
    return isinstance(x, Tracer) or has_explicit_sharding(x)


def has_explicit_sharding(x: Any) -> bool:
    """Returns whether a value is an array that belongs to a mesh with explicit axes by its type."""
    return isinstance(x, jax.Array) and bool(jax.typeof(x).sharding.mesh.explicit_axes)


def without_sharding(arrays: Any) -> Any:
    """Returns a tree of arrays, with types in place of those that have an explicit sharding: the
    same types without it."""

    def unsharded(x: Any) -> Any:
        if not has_explicit_sharding(x):
            return x
        return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type)

    return jax.tree.map(unsharded, arrays)


@contextlib.contextmanager
def without_mesh() -> Iterator[None]:
    """A context without the surrounding mesh, if that has explicit axes."""
    typed = jax.sharding.get_abstract_mesh().explicit_axes
    empty = AbstractMesh((), ())
    with jax.sharding.use_abstract_mesh(empty) if typed else contextlib.nullcontext():
        yield


CALLS = (jit_p, remat_p)
"""The operations that call a program, which `evaluated` inlines."""


def evaluated(jaxpr: Any, arrays: Any, arguments: Any) -> list[Any]:
    """Evaluates a jaxpr in the context of the caller.

    Unlike `jax.core.eval_jaxpr` it uses the caller's mesh, not the one in which the program was
    traced, and within `shard_map` its operands may vary over other axes.
    """
    variables = (*jaxpr.constvars, *jaxpr.invars)
    bindings = dict(zip(variables, (*arrays, *arguments), strict=True))
    values = with_results(jaxpr.eqns, bindings)
    return [value_of(x, values) for x in jaxpr.outvars]


def without_constants(program: Any, constvars: Any = None) -> Any:
    """Returns the jaxpr of a closed program, to be evaluated with other values of its constants.

    `constvars` are by default the program's own. From version 0.12 on, JAX keeps the constants,
    which may be tracers, in the jaxpr itself; replacing `constvars` makes their variables the first
    arguments.
    """
    return program.jaxpr.replace(constvars=constvars or program.jaxpr.constvars)


def with_results(equations: Any, values: dict[Any, Any]) -> dict[Any, Any]:
    """Returns the values of a program's variables together with the results of its equations."""
    values = dict(values)
    for equation in equations:
        operands = varied_like([value_of(x, values) for x in equation.invars], ())
        if equation.primitive is vary_p:
            axes = frozenset(equation.params["axes"] if check_varying.value else ())
            results = [vary(axes, x) for x in operands]
        elif equation.primitive in CALLS:
            inner = equation.params["jaxpr"]
            results = evaluated(
                getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), operands
            )
        else:
            params = {name: _retraced(x) for name, x in equation.params.items()}
            was_retraced = params.get("call_jaxpr") is not equation.params.get("call_jaxpr")
            if was_retraced and "jvp_jaxpr_fun" in params:
                params["jvp_jaxpr_fun"] = _RetracedRule(params["jvp_jaxpr_fun"])
            options = equation.primitive.get_bind_params(params)
            results = equation.primitive.bind(*operands, **options)
            results = results if equation.primitive.multiple_results else [results]
        values |= zip(equation.outvars, results, strict=True)
    return values


def _retraced(param: Any) -> Any:
    """Returns a parameter of an operation; programs in it that were traced for explicit axes, as in
    a loop, are traced again for the caller's mesh. Explicit shardings become None."""
    if isinstance(param, NamedSharding):
        return None if param.mesh.abstract_mesh.explicit_axes else param
    if isinstance(param, tuple):
        return tuple(map(_retraced, param)) if all(map(_is_program, param)) else param
    if not _is_program(param) or not any(x.sharding.mesh.explicit_axes for x in _arrays(param)):
        return param
    operands = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type) for x in param.in_avals
    ]

    def run(*operands: Any) -> list[Any]:
        return evaluated(getattr(param, "jaxpr", param), param.consts, operands)

    return jax.make_jaxpr(run)(*operands)


class _RetracedRule:
    """The rule of a `custom_jvp` call, in the form that JAX keeps it in, traced again like other
    programs."""

    def __init__(self, rule: Any):
        self._rule, self.debug_info = rule, rule.debug_info

    def call_wrapped(self, *zeros: bool) -> tuple[Any, Any, Any]:
        """Returns the jaxpr of the rule, its constants, and which tangents of results are 0."""
        jaxpr, consts, out_zeros = self._rule.call_wrapped(*zeros)
        program = _retraced(ClosedJaxpr(jaxpr, consts))
        return getattr(program, "jaxpr", program), program.consts, out_zeros


def _is_program(param: Any) -> bool:
    return hasattr(param, "in_avals") and hasattr(param, "eqns")


def _arrays(program: Any) -> list[Any]:
    """Returns the types of a program's arrays: operands and results."""
    return [x for x in (*program.in_avals, *program.out_avals) if hasattr(x, "sharding")]


def value_of(x: Any, values: dict[Any, Any]) -> Any:
    """Returns the value of a variable or of a literal."""
    return x.val if isinstance(x, Literal) else values[x]


def varied_like(results: Any, operands: Any) -> Any:
    """Returns results that each vary over all mesh axes of the results and operands."""
    leaves = jax.tree.leaves((results, operands))
    axes = frozenset[str]().union(*map(varying, leaves))
    return jax.tree.map(lambda x: vary(axes, x), results)


def varying(x: Any) -> frozenset[str]:
    """Returns the axes of a mesh over which an array varies, within `shard_map`."""
    return jax.typeof(x).manual_axis_type.varying


def vary(axes: frozenset[str], x: Any) -> Any:
    """Returns x, varying over these axes of a mesh too."""
    missing = tuple(sorted(axes - varying(x)))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def _mesh_of(operands: Any) -> AbstractMesh:
    """Returns the mesh of the context, or else the mesh of the arrays' types."""
    mesh = jax.sharding.get_abstract_mesh()
    for x in jax.tree.leaves(operands):
        if mesh.empty:
            mesh = jax.typeof(x).sharding.mesh
    return mesh


def in_context_mesh(arrays: Any) -> Any:
    """Returns a tree of arrays with types of the context's mesh, as within `partitioned_by_xla`.

    JAX keeps residuals outside of a compiled program, and passes them to the backward pass with
    explicit shardings. Our own backward rules begin with this function.
    """
    mesh = jax.sharding.get_abstract_mesh()

    def restored(x: Any) -> Any:
        array_mesh = jax.typeof(x).sharding.mesh
        if not array_mesh.explicit_axes or mesh.empty or mesh == array_mesh:
            return x
        return jax.sharding.reshard(x, PartitionSpec(*[None] * x.ndim))

    return jax.tree.map(restored, arrays)


def typed_like(arrays: Any, others: Any) -> Any:
    """Reshards a tree of arrays like others of the same shapes, if their shardings are explicit."""

    def resharded(x: Any, y: Any) -> Any:
        sharding = jax.typeof(y).sharding
        return jax.sharding.reshard(x, sharding) if sharding.mesh.explicit_axes else x

    return jax.tree.map(resharded, arrays, others)


def sharding_of(array: Any) -> tuple[Any, ...]:
    """Returns the explicit mesh axes that shard each axis of an array: tuples of names, or None."""
    sharding = jax.typeof(array).sharding
    explicit = set(sharding.mesh.explicit_axes)

    def explicit_names(entry: Any) -> Any:
        names = entry if isinstance(entry, tuple) else (entry,)
        return tuple(x for x in names if x in explicit) or None

    spec = sharding.spec
    return tuple(map(explicit_names, (*spec, *[None] * (array.ndim - len(spec)))))


def partition_spec_of(array: Any) -> PartitionSpec:
    """Returns the explicit sharding of an array as a `PartitionSpec`."""
    return PartitionSpec(*sharding_of(array))


def joined(first: Iterable[Any], second: Iterable[Any]) -> PartitionSpec:
    """Returns the sharding of an array with the axes of two others.

    Mesh axes that shard the first do not shard the second's axes again.
    """
    first = tuple(first)
    used = {x for names in first for x in names or ()}
    free = (tuple(x for x in names or () if x not in used) or None for names in second)
    return PartitionSpec(*first, *free)


def as_rows(array: Any, rows: Any) -> PartitionSpec:
    """Returns the sharding of an array after its rows are replaced by `rows` others: along rows
    only if the devices can share them evenly."""
    first, *rest = sharding_of(array)
    sizes = jax.typeof(array).sharding.mesh.shape
    if rows % math.prod(sizes[x] for x in first or ()):
        first = None
    return PartitionSpec(first, *rest)


class QuerySharding(NamedTuple):
    """The mesh axes that shard the axes of queries `[*B, T, N, H]`, and of results for them."""

    batch: tuple[Any, ...]
    T: Any
    N: Any

    @classmethod
    def of(cls, query: Any) -> "QuerySharding":
        """Returns the axes that shard queries `[*B, T, N, H]`."""
        *batch, T, N, _ = sharding_of(query)
        return cls(tuple(batch), T, N)

    @property
    def out(self) -> PartitionSpec:
        """The sharding of an output `[*B, T, N, V]`."""
        return PartitionSpec(*self.batch, self.T, self.N, None)

    @property
    def by_head(self) -> PartitionSpec:
        """The sharding of `[*B, N, T]`."""
        return PartitionSpec(*self.batch, self.N, self.T)

    @property
    def matrix(self) -> PartitionSpec:
        """The sharding of `[*B, N, T, S]`, never along the keys."""
        return PartitionSpec(*self.batch, self.N, self.T, None)
