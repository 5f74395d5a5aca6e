"""Operations of a user's function that all pairs of a call share, computed once before the call.

A `custom_vjp` rule may be applied to operands alone, as in `score + clip_gradient(table)[i - j]`.
JAX gives the rule the sum of the cotangents of all pairs. A kernel differentiates one tile at a
time, and would give the rule the sum over a tile: the results differ if the rule is not linear. So
these operations are taken out of the program, and their results become its operands.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.extend.core import JaxprEqn, Literal, Var
from jax.extend.core.primitives import custom_vjp_call_p

from jattn._explicit import value_of, with_results


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
        typed = (x.astype(y.aval.dtype) for x, y in zip(inputs, self.inputs, strict=True))
        values = with_results(self.equations, dict(zip(self.inputs, typed, strict=True)))
        return [value_of(x, values) for x in self.results]


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
    read_by_rest = {*jaxpr.outvars}.union(*map(_variables_read, rest))
    results = [x for equation in shared for x in equation.outvars if x in moved & read_by_rest]
    return SharedOperations(shared, (*constants, *operands), results), rest


def _variables_read(equation: JaxprEqn) -> set[Var]:
    return {x for x in equation.invars if not isinstance(x, Literal)}


def _has_rule(equation: Any) -> bool:
    """Returns whether an equation is a `custom_vjp` call, or a call of a program that has one."""
    programs = (getattr(x, "jaxpr", x) for x in equation.params.values())
    inner = (e for x in programs for e in getattr(x, "eqns", ()))
    return equation.primitive is custom_vjp_call_p or any(map(_has_rule, inner))
