"""Functions with a derivative rule that JAX keeps through partial evaluation.

`jax.custom_jvp` has its rule dropped where JAX takes the known part of a program from the rest, as
it does for reverse mode in a loop; a second derivative then finds the function without it. Here the
function is one operation of the program, and its rule stays with it.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax._src import checkify
from jax._src.core import Primitive
from jax.core import eval_jaxpr
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array

from jattn._debugging import as_operation, may_be_minus_infinity
from jattn._types import Tree


_call = Primitive("jattn_attention")
_call.multiple_results = True


def with_derivative(
    function: Callable[..., Any], derivative: Callable[..., Any]
) -> Callable[..., Any]:
    """A function of trees of arrays, which closes over nothing traced, with its rule in forward
    mode:

    derivative(operands, tangents) -> (results, their tangents), with None for a tangent that is 0.
    """

    def run(*operands: Tree) -> Tree:
        flat, structure = jax.tree.flatten(operands)
        like: Any = None

        def on_leaves(*flat: Array) -> list[Any]:
            nonlocal like
            found, like = jax.tree.flatten(function(*jax.tree.unflatten(structure, flat)))
            return found

        def rule(flat: list[Any], tangents: list[Any]) -> tuple[list[Any], list[Any]]:
            given = (jax.tree.unflatten(structure, x) for x in (flat, tangents))
            results, found = derivative(*given)
            return jax.tree.leaves(results), like.flatten_up_to(found)

        program = jax.make_jaxpr(on_leaves)(*flat)
        return jax.tree.unflatten(like, _call.bind(*flat, program=program, rule=rule))

    return run


def compile_and_run(primitive: Primitive, *operands: Tree, **params: Any) -> Any:
    """Runs one operation outside of any program, compiled also where users have switched that
    off. Its results may be those of queries without keys."""
    with jax.disable_jit(False):
        run = as_operation(functools.partial(primitive.bind, **params), primitive.name)
        return may_be_minus_infinity(None)(run)(*operands)


def register_eager_run(primitive: Primitive) -> None:
    """Tells JAX how to run an operation outside of any program, and `checkify` that its results may
    be NaN."""
    primitive.def_impl(functools.partial(compile_and_run, primitive))
    checkify.error_checks[primitive] = functools.partial(checkify.nan_error_check, primitive)


def none_for_zero(tangents: Tree) -> list[Any]:
    """Tangents as a rule takes them: None stands for those that are 0."""
    return [None if _is_zero(x) else x for x in tangents]


def _is_zero(tangent: Any) -> bool:
    return isinstance(tangent, ad.Zero) or tangent.dtype == jax.dtypes.float0


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
    results, found = rule(list(operands), none_for_zero(tangents))
    zeros = [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in results]
    return results, [y if x is None else x for x, y in zip(found, zeros, strict=True)]


def _batch(
    operands: tuple[Array, ...], axes: Tree, *, program: Any, rule: Callable[..., Any]
) -> Tree:
    size = next(x.shape[a] for x, a in zip(operands, axes, strict=True) if a is not None)
    mapped = jax.vmap(functools.partial(_run, program), tuple(axes), axis_size=size)
    found = _call.bind(
        *operands,
        program=jax.make_jaxpr(mapped)(*operands),
        rule=jax.vmap(rule, (list(axes), list(axes)), axis_size=size),
    )
    return found, [0] * len(found)


register_eager_run(_call)
batching.primitive_batchers[_call] = _batch
ad.primitive_jvps[_call] = _jvp
mlir.register_lowering(_call, _lower)
