"""Functions that stand as one operation in a program, with derivatives of every order and mode.

JAX's flags for debugging, and `checkify`, look at the results of each operation. What is masked may
be NaN or −inf within a formula and is selected away at its end, so that the formula is one
operation, and so is each of its derivatives: only their results are looked at.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax

from jattn._types import Tree
from jattn.kernels.common import lowering
from jattn.kernels.common.custom_derivative import with_derivative
from jattn.kernels.common.derivatives import filled, wanted, where_given


def as_one_operation(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """`function(constants, inputs)`, of trees of arrays, as one operation. It closes over nothing
    traced, and has derivatives by `inputs`, JAX's own."""

    def rule(operands: Tree, tangents: Tree) -> tuple[Any, Any]:
        constants, inputs = operands
        results = run(constants, inputs)
        return results, _tangents(function, results, constants, inputs, tangents[1])

    run = with_derivative(function, rule)
    return run


def _tangents(
    function: Callable[[Any, Any], Any],
    results: Tree,
    constants: Tree,
    inputs: Tree,
    tangents: Tree,
) -> Tree:
    """The tangents of the function's results as one operation, linear in those of its inputs, of
    which None stands for 0."""
    nonzero = where_given(tangents)

    def push(constants: Any, operands: Tree) -> Any:
        inputs, tangents = operands
        at = functools.partial(function, constants)
        return jax.jvp(at, (inputs,), (filled(tangents, inputs),))[1]

    def pull(constants: Tree, operands: Tree) -> Tree:
        inputs, cotangents = operands
        _, vjp = jax.vjp(functools.partial(function, constants), inputs)
        return vjp(cotangents)[0]

    def run(_: str, constants: Any, *operands: Tree) -> Any:
        return push(constants, operands)

    def transpose(rest: Tree, cotangents: Tree) -> Tree:
        constants, inputs = rest
        return wanted(as_one_operation(pull)(constants, (inputs, cotangents)), nonzero)

    def derivative(rest: Any, tangents: Any, d_rest: Any, d_tangents: Any) -> Any:
        constants, inputs = rest
        at = (inputs, filled(tangents, inputs))
        return _tangents(push, results_like, constants, at, (d_rest[1], d_tangents))

    results_like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), results)
    rules = lowering.Linear(transpose, derivative)
    return lowering.linear(run, results_like, rules, constants, inputs, tangents)
