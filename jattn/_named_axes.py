"""Named axes of `shard_map` and `vmap`: arrays that vary over them, functions that ask about them.

Within `shard_map` and within `vmap` with an `axis_name`, a mask or a score may ask which device or
which example it is for. The program that the function becomes a part of is compiled where the name
means nothing, so the question is asked where the function is given.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax._src.config import _check_vma as check_varying
from jax._src.core import Literal, NamedAxisEffect, nonempty_axis_env
from jax._src.core import pvary_p as vary_p
from jax._src.pjit import jit_p
from jaxtyping import Array


def without_named_axes(
    what: str, function: Callable[..., Any], *examples: Any
) -> Callable[..., Any]:
    """A function that closes over the answers that it would get about named axes, or the function
    itself if it asks nothing. `examples` are arguments of it; `what` it is stands in errors.

    Raises NotImplementedError where an answer depends on the arguments.
    """
    if not nonempty_axis_env():
        return function
    program, like = jax.make_jaxpr(function, return_shape=True)(*examples)
    if not _axes(program.jaxpr):
        return function
    # Once more, without the functions within it that are compiled apart.
    run = functools.partial(evaluate, program.jaxpr, program.consts)
    program, structure = jax.make_jaxpr(run)(*examples), jax.tree.structure(like)
    jaxpr = program.jaxpr
    known, first, rest = {*jaxpr.constvars}, list[Any](), list[Any]()
    for equation in jaxpr.eqns:
        is_known = all(isinstance(x, Literal) or x in known for x in equation.invars)
        (first if is_known else rest).append(equation)
        known.update(equation.outvars if is_known else ())
    name = getattr(function, "__name__", type(function).__name__)
    for equation in rest:
        if axes := _axes(equation):
            raise NotImplementedError(
                f"{what}: {name} calls {equation.primitive} over the axis {', '.join(axes)} with "
                "what depends on its arguments, which differ between tiles; call it before, as in "
                "index = jax.lax.axis_index(name), and let the function close over the result"
            )
    values = _run(first, dict(zip(jaxpr.constvars, program.consts, strict=True)))

    def told_answers(*arguments: Any) -> Any:
        operands = dict(zip(jaxpr.invars, jax.tree.leaves(arguments), strict=True))
        results = map(functools.partial(_read, _run(rest, values | operands)), jaxpr.outvars)
        return jax.tree.unflatten(structure, results)

    told_answers.__name__ = name
    return told_answers


def _axes(program: Any) -> list[str]:
    """The named axes that a program, or an operation of one, asks about."""
    return sorted(repr(x.name) for x in program.effects if isinstance(x, NamedAxisEffect))


def evaluate(jaxpr: Any, constants: Any, *operands: Any) -> list[Any]:
    """Computes what a jaxpr says of operands that may vary over other axes of a mesh than those
    that it was traced with."""
    variables = (*jaxpr.constvars, *jaxpr.invars)
    values = _run(jaxpr.eqns, dict(zip(variables, (*constants, *operands), strict=True)))
    return [_read(values, x) for x in jaxpr.outvars]


def _run(equations: list[Any], values: dict[Any, Any]) -> dict[Any, Any]:
    """The values of variables, with those that the equations give to more of them."""
    values = dict(values)
    for equation in equations:
        given = varied_like([_read(values, x) for x in equation.invars], ())
        if equation.primitive is vary_p:
            axes = frozenset(equation.params["axes"] if check_varying.value else ())
            results = [vary(axes, x) for x in given]
        elif equation.primitive is jit_p:
            inner = equation.params["jaxpr"]
            results = evaluate(inner.jaxpr, inner.consts, *given)
        else:
            params = equation.primitive.get_bind_params(equation.params)
            with equation.ctx.manager:
                results = equation.primitive.bind(*given, **params)
            results = results if equation.primitive.multiple_results else [results]
        values.update(zip(equation.outvars, results, strict=True))
    return values


def _read(values: dict[Any, Any], x: Any) -> Any:
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


def vary(axes: frozenset[str], x: Array) -> Array:
    """x as one that varies over these axes of a mesh, too."""
    missing = tuple(sorted(axes - varying(x)))
    return jax.lax.pcast(x, missing, to="varying") if missing else x
