"""Users' functions that read named axes of `shard_map` and `vmap`.

Within `shard_map` and within `vmap` with an `axis_name`, a mask or a score may read the index of
its device or example. The program that contains the function is compiled in a context without the
name, so the index is computed in the context in which the function was passed.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax._src.core import Literal, NamedAxisEffect, nonempty_axis_env

from jattn._explicit import evaluated, value_of, with_results
from jattn.checks import function_name
from jattn.functions.programs import as_new_function


def without_named_axes(
    what: str, function: Callable[..., Any], *examples: Any
) -> Callable[..., Any]:
    """Returns a function that closes over its results of operations on named axes.

    A function without such operations is returned unchanged. `examples` are arguments of the
    function; `what` names it in errors.

    Raises NotImplementedError if such a result depends on the arguments.
    """
    if not nonempty_axis_env():
        return function
    program = jax.make_jaxpr(as_new_function(function))(*examples)
    if not _axes(program.jaxpr):
        return function
    # Trace again to inline the jitted functions within it.
    run = lambda *arguments: evaluated(program.jaxpr, program.consts, jax.tree.leaves(arguments))  # noqa: E731
    flat = jax.make_jaxpr(run)(*examples)
    jaxpr = flat.jaxpr
    known, first, rest = {*jaxpr.constvars}, list[Any](), list[Any]()
    for equation in jaxpr.eqns:
        is_known = all(isinstance(x, Literal) or x in known for x in equation.invars)
        (first if is_known else rest).append(equation)
        known.update(equation.outvars if is_known else ())
    name = function_name(function)
    for equation in rest:
        if axes := _axes(equation):
            raise NotImplementedError(
                f"{what}: {name} calls {equation.primitive} over the axis {', '.join(axes)} with "
                "what depends on its arguments, which differ between tiles; call it before, as in "
                "index = jax.lax.axis_index(name), and let the function close over the result"
            )
    answers = with_results(first, dict(zip(jaxpr.constvars, flat.consts, strict=True)))

    def with_answers(*arguments: Any) -> Any:
        operands = dict(zip(jaxpr.invars, jax.tree.leaves(arguments), strict=True))
        (result,) = jaxpr.outvars
        return value_of(result, with_results(rest, answers | operands))

    with_answers.__name__ = name
    return with_answers


def _axes(program: Any) -> list[str]:
    """Returns the named axes that a program, or one of its operations, uses."""
    return sorted(repr(x.name) for x in program.effects if isinstance(x, NamedAxisEffect))
