"""Operations of a user's function that all pairs of a call share, computed once before the call.

A `custom_vjp` rule may be applied to operands alone, as in `score + clip_gradient(table)[i - j]`.
JAX gives the rule the sum of the cotangents of all pairs. A kernel differentiates one tile at a
time, and would give the rule the sum over a tile: the results differ if the rule is not linear. So
these operations are taken out of the program, and their results become its operands.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var
from jax.extend.core.primitives import custom_vjp_call_p

from jattn._explicit import CALLS, evaluated, value_of, with_results


class SharedOperations(NamedTuple):
    """The shared equations of a program.

    `inputs` are the variables that they may read, `results` those of their variables that the rest
    of the program reads.
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
    """Returns a program of these arguments in which rules stand in no jitted or checkpointed
    function: operations of such a function may be shared even if others are not."""
    if not any(x.primitive in CALLS and _has_rule(x) for x in program.jaxpr.eqns):
        return program

    def run(*arguments: Any) -> list[Any]:
        return evaluated(program.jaxpr, program.consts, jax.tree.leaves(arguments))

    return jax.make_jaxpr(run)(*examples)


def split(
    jaxpr: Any, constants: Sequence[Var], operands: Sequence[Var]
) -> tuple[SharedOperations, list[JaxprEqn]]:
    """Returns the shared operations of a program, and the equations of the rest.

    An equation is shared if it depends on operands and constants alone, and is a `custom_vjp` call
    on operands or an equation that such a call needs. The rest includes the shared equations that
    depend on constants alone.
    """
    same_for_all_pairs, from_operands = {*constants, *operands}, {*operands}
    candidates = list[JaxprEqn]()
    for equation in jaxpr.eqns:
        if same_for_all_pairs.issuperset(_variables_read(equation)):
            same_for_all_pairs.update(equation.outvars)
            candidates.append(equation)
            if from_operands.intersection(_variables_read(equation)):
                from_operands.update(equation.outvars)
    needed, shared, moved = set[Var](), list[JaxprEqn](), set[Var]()
    for equation in reversed(candidates):
        reads_operands = from_operands.intersection(_variables_read(equation))
        if needed.intersection(equation.outvars) or (reads_operands and _has_rule(equation)):
            needed.update(_variables_read(equation))
            shared.insert(0, equation)
            moved.update(equation.outvars if reads_operands else ())
    rest = [x for x in jaxpr.eqns if not moved.intersection(x.outvars)]
    outputs = (x for x in jaxpr.outvars if not isinstance(x, Literal))
    exported = moved & set(outputs).union(*map(_variables_read, rest))
    results = [x for equation in shared for x in equation.outvars if x in exported]
    return SharedOperations(shared, (*constants, *operands), results), rest


def _variables_read(equation: JaxprEqn) -> set[Var]:
    return {x for x in equation.invars if not isinstance(x, Literal)}


def _has_rule(equation: Any) -> bool:
    """Returns whether an equation is a `custom_vjp` call, or a call of a program that has one."""
    programs = jax.tree.leaves([*equation.params.values()])
    inner = (e for x in programs for e in getattr(getattr(x, "jaxpr", x), "eqns", ()))
    return equation.primitive is custom_vjp_call_p or any(map(_has_rule, inner))
