"""Functions of tiles as Mosaic GPU computes them: without axes of size 1.

Its arrays lie spread over the registers of 128 threads, whole tiles `[t, s]`, rows `[t]` or columns
`[s]` of them; there is no place for `[t, 1]`, through which array code broadcasts. A function is
traced for the shapes it expects and its operations run on arrays that lack these axes.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array


# What is computed entry by entry, and what Mosaic GPU knows of that.
_ELEMENTWISE = frozenset(
    """abs add add_any and clamp convert_element_type copy cos div eq erf exp exp2 ge gt integer_pow
    le log logistic lt max min mul ne neg not or rem round rsqrt select_n shift_left
    shift_right_arithmetic shift_right_logical sign sin square sub tanh xor""".split()
)
_CALLS = ("jaxpr", "call_jaxpr", "fun_jaxpr")


def run(function: Callable[..., Any], *arguments: Any, shapes: Any = None) -> Any:
    """`function(*arguments)`, where `shapes` are those that it expects: arguments and results lack
    their axes of size 1.

    Raises NotImplementedError for what registers cannot do.
    """
    values, _ = jax.tree.flatten(arguments)
    expected = jax.tree.map(jax.typeof, arguments) if shapes is None else shapes
    program, out = jax.make_jaxpr(function, return_shape=True)(*expected)
    found = _evaluate(program.jaxpr, program.consts, values)
    return jax.tree.unflatten(jax.tree.structure(out), found)


def _narrow(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def _places(shape: tuple[int, ...], axes: Any) -> tuple[int, ...]:
    """Where these axes of a shape are once those of size 1 are gone."""
    return tuple(len(_narrow(shape[:axis])) for axis in axes if shape[axis] != 1)


def _evaluate(program: Any, consts: Any, values: Any) -> list[Any]:
    if any(math.prod(jnp.shape(x)) > 1 for x in consts):
        raise NotImplementedError("a captured array")
    known = dict(zip(program.constvars, (jnp.reshape(x, ()) for x in consts), strict=True))
    known |= dict(zip(program.invars, values, strict=True))

    def read(x: Any) -> Any:
        return x.val if hasattr(x, "val") else known[x]

    for equation in program.eqns:
        found = _apply(equation, [read(x) for x in equation.invars])
        known |= dict(zip(equation.outvars, found, strict=True))
    return [read(x) for x in program.outvars]


def _apply(equation: Any, values: list[Any]) -> list[Any]:
    name, params = equation.primitive.name, equation.params
    before = [x.aval.shape for x in equation.invars]
    (after, *_) = (x.aval.shape for x in equation.outvars)
    inner = next((params[x] for x in _CALLS if x in params), None)
    if inner is not None and name not in ("scan", "while", "cond"):
        closed = getattr(inner, "jaxpr", inner)
        return _evaluate(closed, getattr(inner, "consts", ()), values)
    if name in ("broadcast_in_dim", "reshape", "squeeze") and _narrow(before[0]) == _narrow(after):
        return [values[0]]
    if name == "broadcast_in_dim":
        return [_spread(values[0], before[0], params["broadcast_dimensions"], after)]
    if name in ("reduce_sum", "reduce_max", "reduce_min"):
        axes = _places(before[0], params["axes"])
        reduce: Any = getattr(jnp, name.removeprefix("reduce_"))
        return [reduce(values[0], axis=axes) if axes else values[0]]
    if name == "iota" and math.prod(after) == 1:
        return [jnp.zeros((), params["dtype"])]
    if name not in _ELEMENTWISE:
        raise NotImplementedError(name)
    # Axes of size 1 broadcast, and numbers do.
    values = [
        _spread(x, shape, range(len(after)), after) if len(_narrow(shape)) else x
        for x, shape in zip(values, before, strict=True)
    ]
    if name in ("add_any", "copy"):
        return [functools.reduce(lax.add, values)]
    return [equation.primitive.bind(*values, **params)]


def _spread(x: Array, before: tuple[int, ...], axes: Any, after: tuple[int, ...]) -> Array:
    """x, of the shape `before`, whose axes are those of `after`."""
    if _narrow(before) == _narrow(after):
        return x
    kept = [axis for axis, size in zip(axes, before, strict=True) if size != 1]
    return lax.broadcast_in_dim(x, _narrow(after), _places(after, kept))
