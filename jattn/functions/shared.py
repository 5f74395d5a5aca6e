"""Operations of a user's function that do not depend on the pair, computed once before the call.

In `score + clip_gradient(table)[i - j]`, a function with a `custom_vjp` rule is applied to an
operand. JAX calls the rule once, with the cotangent of the whole table, summed over all pairs. A
kernel differentiates one tile at a time, and would call the rule with the sum over each tile: the
gradients would differ if the rule is not linear. So `split` takes these operations out of the
program, and their results become operands of the rest.

`clip_gradient(table[h])` depends on the pair, but not on all of batch row, head, query and key. A
rule that is not linear would get sums over tiles there too; `refused` finds the operands that reach
such a rule, and their gradients raise an error.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var
from jax.extend.core.primitives import custom_vjp_call_p
from jaxtyping import Array

from jattn._explicit import CALLS, evaluated, value_of, with_results


class SharedOperations(NamedTuple):
    """The shared equations of a program.

    `inputs` are the variables that the equations may read, `results` the variables that the
    equations compute and the rest of the program reads.
    """

    equations: list[JaxprEqn]
    inputs: Sequence[Any]
    results: list[Var]

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        """Computes the results from the values of `inputs`."""
        if not self.results:
            return []
        values = dict(zip(self.inputs, inputs, strict=True))
        for variable in values.keys() & set[Any]().union(*map(_variables_read, self.equations)):
            if values[variable].dtype != variable.aval.dtype:
                values[variable] = values[variable].astype(variable.aval.dtype)
        values = with_results(self.equations, values)
        return [value_of(x, values) for x in self.results]


def inlined(program: ClosedJaxpr, *examples: Any) -> ClosedJaxpr:
    """Returns the program with its jitted and checkpointed functions inlined if one of them has a
    `custom_vjp` call, so that `split` can share the call without the rest of the function.

    `examples` are arguments of the program.
    """
    if not any(x.primitive in CALLS and _rules(x) for x in program.jaxpr.eqns):
        return program

    def run(*arguments: Any) -> list[Any]:
        return evaluated(program.jaxpr, program.consts, jax.tree.leaves(arguments))

    return jax.make_jaxpr(run)(*examples)


def split(
    jaxpr: Any, constants: Sequence[Var], operands: Sequence[Var]
) -> tuple[SharedOperations, list[JaxprEqn]]:
    """Returns the shared operations of a program, and the equations of the rest.

    An equation is shared if it depends only on operands and constants, and is a `custom_vjp` call
    that depends on operands or computes an argument of such a call. Shared equations that depend
    only on constants also stay in the rest.
    """
    pair_independent, operand_dependent = {*constants, *operands}, {*operands}
    candidates = list[JaxprEqn]()
    for equation in jaxpr.eqns:
        if pair_independent.issuperset(_variables_read(equation)):
            pair_independent.update(equation.outvars)
            candidates.append(equation)
            if operand_dependent.intersection(_variables_read(equation)):
                operand_dependent.update(equation.outvars)
    needed, shared, moved = set[Var](), list[JaxprEqn](), set[Var]()
    for equation in reversed(candidates):
        depends_on_operands = operand_dependent.intersection(_variables_read(equation))
        if needed.intersection(equation.outvars) or (depends_on_operands and _rules(equation)):
            needed.update(_variables_read(equation))
            shared.insert(0, equation)
            moved.update(equation.outvars if depends_on_operands else ())
    rest = [x for x in jaxpr.eqns if not moved.intersection(x.outvars)]
    outputs = (x for x in jaxpr.outvars if not isinstance(x, Literal))
    exported = moved & set(outputs).union(*map(_variables_read, rest))
    results = [x for equation in shared for x in equation.outvars if x in exported]
    return SharedOperations(shared, (*constants, *operands), results), rest


def refused(
    equations: Sequence[JaxprEqn], scalars: Sequence[Var], operands: Sequence[Var]
) -> set[Var]:
    """Returns the float operands that reach a rule that is not linear, unless an argument of the
    rule's function depends on the score. (The score is the only float in `scalars`.)"""
    on_score = {x for x in scalars if _is_float(x.aval)}
    sources = {x: {x} for x in operands if _is_float(x.aval)}
    results = set[Var]()
    for equation in equations:
        read = _variables_read(equation)
        reached = set[Var]().union(*(sources[x] for x in read if x in sources))
        on_score.update(equation.outvars if on_score & read else ())
        sources |= dict.fromkeys(equation.outvars, reached) if reached else {}
        if reached and not on_score & read and not all(map(_is_linear, _rules(equation))):
            results |= reached
    return results


@jax.custom_vjp
def without_gradient(x: Array) -> Array:
    """Returns x; its gradient raises NotImplementedError."""
    return x


def _refuse(_: None, cotangent: Array) -> NoReturn:
    raise NotImplementedError(
        "the derivative rule of a custom_vjp function that is not linear in the cotangent, such as "
        "one that clips gradients, is applied to a part of an operand, as in clip(table[h]): it "
        "would get cotangents summed over one tile, not over all pairs; apply the function to the "
        "whole operand, as in clip(table)[h], or to the score"
    )


without_gradient.defvjp(lambda x: (x, None), _refuse)


def _rules(equation: JaxprEqn) -> list[JaxprEqn]:
    """Returns the `custom_vjp` calls of an equation and of the programs that it calls."""
    if equation.primitive is custom_vjp_call_p:
        return [equation]
    programs = jax.tree.leaves([*equation.params.values()])
    inner = (e for x in programs for e in getattr(getattr(x, "jaxpr", x), "eqns", ()))
    return [*itertools.chain.from_iterable(map(_rules, inner))]


def _is_linear(call: JaxprEqn) -> bool:
    """Returns whether the rule of a `custom_vjp` call is linear in the cotangents."""

    def transposed(arguments: list[Array]) -> Any:
        def run(*floats: Array) -> Any:
            values = iter(floats)
            return call.primitive.bind(
                *(next(values) if _is_float(x) else x for x in arguments),
                **call.primitive.get_bind_params(call.params),
            )

        floats = [x for x in arguments if _is_float(x)]
        results, pull = jax.vjp(run, *floats)
        return jax.linear_transpose(pull, results)(tuple(floats))

    try:
        jax.eval_shape(transposed, [x.aval for x in call.invars])
    except Exception:  # an operation that has no transpose is not linear
        return False
    return True


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _variables_read(equation: JaxprEqn) -> set[Var]:
    return {x for x in equation.invars if not isinstance(x, Literal)}
