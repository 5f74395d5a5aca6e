"""Functions with a derivative rule that JAX keeps through partial evaluation.

JAX drops the rule of a `jax.custom_jvp` when it separates the known part of a program from the
rest, as for reverse mode in a loop; a second derivative then finds the function without its rule.
Here the function is one operation of the program, and its rule stays with it.
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
from jax._src import checkify
from jax._src.core import Primitive
from jax.core import eval_jaxpr
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array

from jattn._debugging import as_operation, may_be_minus_infinity
from jattn._types import Tree


_call = Primitive("jattn_attention")
_call.multiple_results = True
# For JAX 0.12: a program with primitives such as that of `searchsorted` is lowered as any other.
_call.is_high = lambda *_, **__: False


def with_derivative(
    function: Callable[..., Any], derivative: Callable[..., Any]
) -> Callable[..., Any]:
    """Attaches a forward-mode rule to a function of trees that closes over nothing traced.

    derivative(operands, tangents) -> (results, their tangents), with None for a tangent that is 0.
    """

    def run(*operands: Tree) -> Tree:
        flat, structure = jax.tree.flatten(operands)
        like: Any = None

        def on_leaves(*flat: Array) -> list[Any]:
            nonlocal like
            results, like = jax.tree.flatten(function(*jax.tree.unflatten(structure, flat)))
            return results

        def rule(flat: list[Any], tangents: list[Any]) -> tuple[list[Any], list[Any]]:
            trees = (jax.tree.unflatten(structure, x) for x in (flat, tangents))
            results, out_tangents = derivative(*trees)
            return jax.tree.leaves(results), like.flatten_up_to(out_tangents)

        with wide_types_for(flat):
            program = jax.make_jaxpr(on_leaves)(*flat)
            return jax.tree.unflatten(like, _call.bind(*flat, program=program, rule=rule))

    return run


def wide_types_for(operands: list[Any]) -> AbstractContextManager[Any]:
    """Returns a context in which JAX has 64-bit types if any operand has.

    A backward pass may run after the end of the context in which the forward pass had them.
    """
    is_wide = any(jax.typeof(x).dtype == jnp.float64 for x in operands)
    return jax.enable_x64(True) if is_wide else nullcontext()


def compile_and_run(primitive: Primitive, *operands: Tree, **params: Any) -> Any:
    """Runs one operation outside of any program, compiled even under `jax_disable_jit`.

    Its results may contain −inf, for queries without keys.
    """
    with jax.disable_jit(False):
        run = as_operation(functools.partial(primitive.bind, **params), primitive.name)
        return may_be_minus_infinity(None)(run)(*operands)


def register_eager_run(primitive: Primitive) -> None:
    """Registers the eager run of an operation, and its check of NaN for `checkify`."""
    primitive.def_impl(functools.partial(compile_and_run, primitive))
    checkify.error_checks[primitive] = functools.partial(checkify.nan_error_check, primitive)


def none_for_zero(tangents: Tree) -> list[Any]:
    """Returns tangents in the form that rules take: None for tangents that are 0."""
    is_zero = lambda x: isinstance(x, ad.Zero) or x.dtype == jax.dtypes.float0  # noqa: E731
    return [None if is_zero(x) else x for x in tangents]


def _run(program: Any, *operands: Array) -> list[Any]:
    return eval_jaxpr(program.jaxpr, program.consts, *operands)


def _lower(context: Any, *values: Any, program: Any, rule: Callable[..., Any]) -> Tree:
    return mlir.lower_fun(functools.partial(_run, program))(context, *values)


@_call.def_effectful_abstract_eval
def _types(*_: Any, program: Any, rule: Callable[..., Any]) -> Tree:
    return list(program.out_avals), program.effects


def _jvp(
    operands: tuple[Array, ...], tangents: Tree, *, program: Any, rule: Callable[..., Any]
) -> Tree:
    results, out_tangents = rule(list(operands), none_for_zero(tangents))
    zeros = [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in results]
    return results, [y if x is None else x for x, y in zip(out_tangents, zeros, strict=True)]


def _batch(
    operands: tuple[Array, ...], axes: Tree, *, program: Any, rule: Callable[..., Any]
) -> Tree:
    size = next(x.shape[a] for x, a in zip(operands, axes, strict=True) if a is not None)
    mapped = jax.vmap(functools.partial(_run, program), tuple(axes), axis_size=size)
    results = _call.bind(
        *operands,
        program=jax.make_jaxpr(mapped)(*operands),
        rule=jax.vmap(rule, (list(axes), list(axes)), axis_size=size),
    )
    return results, [0] * len(results)


register_eager_run(_call)
batching.primitive_batchers[_call] = _batch
ad.primitive_jvps[_call] = _jvp
mlir.register_lowering(_call, _lower)
