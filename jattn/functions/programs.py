"""Users' functions as traced programs, which are part of JAX's cache keys for compiled programs.

`program_of` traces a function only once if it can take a snapshot of the function, see `snapshots`.
It traces other functions in each call, but returns the same object whenever it gets an equal
program, so that these calls share compiled programs.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import jax
import numpy as np
from jax._src.config import trace_context
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal
from jax.extend.core.primitives import custom_jvp_call_p, custom_vjp_call_p

from jattn._explicit import (
    evaluated,
    is_bound,
    without_constants,
    without_mesh,
    without_sharding,
)
from jattn.functions import shared, snapshots
from jattn.functions.read import called_program, operation
from jattn.functions.snapshots import Key, Same, Unsure


class TracedFunction:
    """A function of scalars and operands, with the state that it had when it was traced."""

    def __init__(self, name: str, program: ClosedJaxpr, n_scalars: int, n_arguments: int):
        if any(isinstance(x, jax.Ref) for x in program.consts):
            raise TypeError(f"{name}: expected no jax.Ref; pass its value, ref[...], as an operand")
        jaxpr: Any = program.jaxpr
        # None for traced arrays, which are passed as operands.
        constants = [None if is_bound(x) else _with_copies(x) for x in program.consts]
        traced = [x for x, y in zip(jaxpr.constvars, constants, strict=True) if y is None]
        static = [x for x in jaxpr.constvars if x not in traced]
        operands = (*jaxpr.invars[n_scalars:], *traced)
        self._shared, rest = shared.split(jaxpr, static, operands)
        operands = (*operands, *self._shared.results)
        refused = shared.refused(rest, jaxpr.invars[:n_scalars], operands)
        self.__name__, self._n_arguments = name, n_arguments
        self._first = jaxpr.invars[0]
        self._dtypes = [x.aval.dtype for x in jaxpr.invars]
        self._constants = [*constants, *[None for _ in self._shared.results]]
        constvars = [*jaxpr.constvars, *self._shared.results]
        self._refused = [x in refused for x in (*constvars, *jaxpr.invars)]
        self._jaxpr = _with_copies(without_constants(program, constvars).replace(eqns=rest))

    @property
    def key(self) -> Hashable:
        """A key that is equal only for programs with the same results and derivatives."""
        return self.__name__, self._n_arguments, _program_key(self._jaxpr, self._constants)

    @functools.cached_property
    def useless_reduction(self) -> str | None:
        """The name of the first reduction of a value that depends on the first argument and is one
        number, None if there is none. It has no effect: the function was written for an array."""
        return _useless_reduction(self._jaxpr, {self._first})

    def shared_results(self, operands: Any) -> list[Any]:
        """Computes the results of the shared operations, see `shared`. `operands` are the user's
        operands, then the traced arrays that the function reads."""
        return self._shared(
            [x for x in self._constants if x is not None] + jax.tree.leaves(operands)
        )

    def __call__(self, *arguments: Any) -> Any:
        n = self._n_arguments
        leaves, further_operands = jax.tree.leaves(arguments[:n]), iter(arguments[n:])
        typed = [
            x if x.dtype == y else x.astype(y) for x, y in zip(leaves, self._dtypes, strict=True)
        ]
        constants = [next(further_operands) if x is None else x for x in self._constants]
        values = zip([*constants, *typed], self._refused, strict=True)
        values = [shared.without_gradient(x) if y else x for x, y in values]
        (result,) = evaluated(self._jaxpr, values[: len(constants)], values[len(constants) :])
        return result


def program_of(
    name: str,
    function: Callable[..., Any],
    scalar: Callable[..., Any],
    operands: tuple[Any, ...],
    *scalars: Any,
) -> tuple[TracedFunction, tuple[Any, ...]]:
    """Returns the program of `scalar(*scalars, *operands)` and the operands that it takes.

    `scalar` calls `function`, a user's function; `name` is the name of the program. The program
    holds the current values of everything that the function reads, except for traced arrays: these
    become further operands, so that they are differentiable and the program holds no tracers. The
    results of operations that do not depend on the pair become operands too, see `shared`.
    """
    snapshot = snapshots.frozen(function)
    if snapshots.is_frozen(snapshot):
        traced = _trace_snapshot(name, snapshot, scalar, operands, *scalars)
        return traced, (*operands, *traced.shared_results(operands))
    with without_mesh():  # the program may run under a mesh with other axis types
        examples = *scalars, *without_sharding(operands)
        program = jax.make_jaxpr(as_new_function(scalar))(*examples)
        program = shared.inlined(program, *examples)
        traced = TracedFunction(name, program, len(scalars), len(scalars) + len(operands))
    operands = *operands, *(x for x in program.consts if is_bound(x))
    operands = *operands, *traced.shared_results(operands)
    return snapshots.kept(("program", traced.key), traced, transient=True), operands


def _trace_snapshot(
    name: str,
    snapshot: Callable[..., Any],
    scalar: Callable[..., Any],
    operands: tuple[Any, ...],
    *scalars: Any,
) -> TracedFunction:
    """Returns the program of a snapshot, traced once for operands of these shapes and dtypes."""
    leaves, structure = jax.tree.flatten(operands)
    scalar_types, types = (tuple((x.shape, x.dtype) for x in y) for y in (scalars, leaves))
    key = "snapshot", Same(snapshot), scalar_types, structure, types, trace_context()
    traced = snapshots.known(key)
    if traced is None:
        operand_types = jax.tree.unflatten(structure, [jax.ShapeDtypeStruct(*x) for x in types])
        with without_mesh():
            program = jax.make_jaxpr(as_new_function(scalar))(*scalars, *operand_types)
            program = shared.inlined(program, *scalars, *operand_types)
        traced = TracedFunction(name, program, len(scalars), len(scalars) + len(operands))
        traced = snapshots.kept(key, traced, transient=snapshots.is_transient(snapshot))
    return traced


_REDUCTIONS = {"argmax", "argmin", "cumsum", "sort"}
_REDUCTIONS |= {f"reduce_{x}" for x in ("and", "max", "min", "or", "prod", "sum")}


def _useless_reduction(jaxpr: Any, dependent: set[Any]) -> str | None:
    """Returns the name of the first reduction of one number that depends on the variables."""
    for equation in jaxpr.eqns:
        reads = [not hasattr(x, "val") and x in dependent for x in equation.invars]
        if not any(reads):
            continue
        if (program := called_program(equation)) is not None:
            arguments = set(itertools.compress(program.jaxpr.invars, reads))
            if name := _useless_reduction(program.jaxpr, arguments):
                return name
        elif operation(equation) in _REDUCTIONS and equation.invars[0].aval.size == 1:
            return operation(equation)
        dependent |= set(equation.outvars)
    return None


def as_new_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function as a new object, so that JAX traces it and uses no cached trace."""

    def call(*arguments: Any) -> Any:
        return function(*arguments)

    return call


def _with_copies(value: Any) -> Any:
    """Returns a program, or a parameter of one, with copies of its NumPy arrays.

    JAX copies a NumPy array to the device once and looks the copy up by the array's identity. If
    programs held the user's array, JAX would miss changes that the user makes to its entries.
    """
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, Literal):
        return Literal(_with_copies(value.val), value.aval)
    if type(value) in (list, tuple):
        return type(value)(map(_with_copies, value))
    if isinstance(value, JaxprEqn):
        params = {name: _with_copies(x) for name, x in value.params.items()}
        return value.replace(invars=_with_copies(value.invars), params=params)
    if isinstance(value, ClosedJaxpr | Jaxpr):
        program: Any = getattr(value, "jaxpr", value)
        eqns, outvars = _with_copies(program.eqns), _with_copies(program.outvars)
        program = program.replace(eqns=eqns, outvars=outvars)
        consts = getattr(value, "consts", None)
        return program if consts is None else ClosedJaxpr(program, _with_copies(consts))
    return value


_ORDERS = 3  # the orders of derivatives that a key covers: one more than attention supports


def _program_key(jaxpr: Any, constants: Iterable[Any], orders: int = _ORDERS) -> Hashable:
    """Returns a key that is equal only for programs with the same results, and with the same
    derivatives up to order `orders`. A constant that is passed as an operand is None."""
    numbers = {x: n for n, x in enumerate((*jaxpr.constvars, *jaxpr.invars))}
    avals = tuple(x.aval for x in numbers)

    def operand_key(x: Any) -> Hashable:
        return (x.aval, _parameter_key(x.val, orders)) if hasattr(x, "val") else numbers[x]

    equations = []
    for equation in jaxpr.eqns:
        operands = tuple(map(operand_key, equation.invars))
        results = tuple(x.aval for x in equation.outvars)
        params = _parameters_key(equation, orders)
        numbers |= {x: len(numbers) + n for n, x in enumerate(equation.outvars)}
        equations.append((equation.primitive, operands, results, params))
    results = tuple(map(operand_key, jaxpr.outvars))
    constant_keys = tuple(_parameter_key(x, orders) for x in constants)
    return avals, constant_keys, tuple(equations), results


def _parameters_key(equation: JaxprEqn, orders: int) -> Hashable:
    """Returns a key of an equation's parameters. In place of a derivative rule, which is a new
    object in each trace, the key contains the program of the derivative."""
    params = equation.params
    if equation.primitive in (custom_jvp_call_p, custom_vjp_call_p):
        with contextlib.suppress(Exception):  # an error in a rule is raised where the rule is used
            program = _derivative(equation) if orders else None
            derivative = program and _program_key(program.jaxpr, program.consts, orders - 1)
            return _parameter_key(params["call_jaxpr"], orders), derivative
    return tuple((name, _parameter_key(x, orders)) for name, x in sorted(params.items()))


def _derivative(equation: JaxprEqn) -> ClosedJaxpr:
    """Returns the derivative of a `custom_jvp` or `custom_vjp` call as a program."""
    primitive = equation.primitive
    avals: list[Any] = [x.aval for x in equation.invars]
    is_float = [jax.numpy.issubdtype(x.dtype, np.inexact) for x in avals]

    def derivative(operands: list[Any], tangents_or_cotangents: Any) -> Any:
        def call(floats: list[Any]) -> Any:
            values = iter(floats)
            arguments = [next(values) if x else y for x, y in zip(is_float, operands, strict=True)]
            return primitive.bind(*arguments, **primitive.get_bind_params(equation.params))

        floats = list(itertools.compress(operands, is_float))
        if primitive is custom_jvp_call_p:
            return jax.jvp(call, (floats,), (tangents_or_cotangents,))
        results, pull_back = jax.vjp(call, floats)
        return results, pull_back(tangents_or_cotangents)

    if primitive is custom_jvp_call_p:
        types = list(itertools.compress(avals, is_float))  # of tangents
    else:
        types = [x.aval for x in equation.outvars]  # of cotangents
    return jax.make_jaxpr(derivative)(avals, types)


def _parameter_key(value: Any, orders: int) -> Hashable:
    """Returns a key of a constant or a parameter: a value, a program, or a tuple of these."""
    program = getattr(value, "jaxpr", value)
    if hasattr(program, "eqns"):
        return _program_key(program, getattr(value, "consts", ()), orders)
    if isinstance(value, dict):
        value = tuple(value.items())
    if isinstance(value, list | tuple):
        return type(value), tuple(_parameter_key(x, orders) for x in value)
    try:
        if hasattr(value, "dtype") and not isinstance(value, Tracer):
            return Key().memory(np.asarray(value))
        key = type(value), repr(value) if isinstance(value, float | complex) else value
        hash(key)
    except (Unsure, TypeError):  # for instance an array of random keys
        return Same(value)
    return key
