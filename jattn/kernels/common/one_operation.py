"""Functions that stand as one operation in a program, with derivatives of every order and mode.

JAX's debugging flags, and `checkify`, check the results of each operation. Masked values may be NaN
or −inf within a formula, which selects them away at its end. So the formula is one operation, and
so is each of its derivatives: JAX checks only their results.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax

from jattn._types import Tree
from jattn.kernels.common import lowering
from jattn.kernels.common.custom_derivative import with_derivative
from jattn.kernels.common.derivatives import filled


def as_one_operation(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Makes `function(constants, inputs)`, of trees of arrays, one operation.

    The function closes over nothing traced, and is differentiable by `inputs`, with JAX's
    derivatives.
    """

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
    """Computes the tangents of the function's results as one operation.

    It is linear in the tangents of the inputs, of which None stands for 0.
    """

    def push(constants: Any, operands: Tree) -> Any:
        inputs, tangents = operands
        of_inputs = functools.partial(function, constants)
        return jax.jvp(of_inputs, (inputs,), (filled(tangents, inputs),))[1]

    def pull(constants: Tree, operands: Tree) -> Tree:
        inputs, cotangents = operands
        _, vjp = jax.vjp(functools.partial(function, constants), inputs)
        return vjp(cotangents)[0]

    def run(_: str, constants: Any, *operands: Tree) -> Any:
        return push(constants, operands)

    def transpose(rest: Tree, cotangents: Tree) -> Tree:
        constants, inputs = rest
        return as_one_operation(pull)(constants, (inputs, cotangents))

    def derivative(rest: Any, tangents: Any, d_rest: Any, d_tangents: Any) -> Any:
        constants, inputs = rest
        of_inputs = (inputs, filled(tangents, inputs))
        return _tangents(push, results_like, constants, of_inputs, (d_rest[1], d_tangents))

    results_like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), results)
    rules = lowering.LinearRules(transpose, derivative)
    return lowering.linear(run, results_like, rules, constants, inputs, tangents)
