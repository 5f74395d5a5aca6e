"""Reverse mode only: kernels with a derivative rule of their own say so, wherever they are used.

JAX notices forward mode through such a kernel late, when an enclosing `jit` is compiled, and names
functions that a user has never heard of. What passes through `inputs` raises with the way out.
"""

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array


_input = Primitive("reverse_only")
_tangent = Primitive("reverse_only_tangent")


def refuse(*_: Any, **__: Any) -> NoReturn:
    raise NotImplementedError(
        "here are first derivatives in reverse mode only; "
        "jattn.attention(..., implementation='reference') differentiates in every mode and order"
    )


def _same(x: Any, **_: Any) -> Any:
    return x


_input.def_abstract_eval(_same)
_input.def_impl(_same)
mlir.register_lowering(_input, lambda _, x: [x])
batching.defvectorized(_input)
ad.defjvp(_input, lambda tangent, _: _tangent.bind(tangent))

# Reverse mode transposes the tangent's path and never computes along it.
_tangent.def_abstract_eval(_same)
ad.deflinear2(_tangent, lambda cotangent, _: [cotangent])
_tangent.def_impl(refuse)
mlir.register_lowering(_tangent, refuse)
batching.primitive_batchers[_tangent] = refuse


def inputs(arrays: Iterable[Array], others: Any = ()) -> list[Array]:
    """The arrays that a kernel's own derivative rule is for; it reads a tree of `others` beside.

    Their tangents raise NotImplementedError when they are computed. Within `shard_map` each comes
    back as one that varies over every axis of the mesh over which any operand does: so do the
    results and the cotangents, and what was the same on several devices gets the sum of theirs.
    """
    every = list(arrays)
    return [_input.bind(x) for x in varied_like(every, others)]


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


def nondifferentiable(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, whose derivatives raise NotImplementedError: for a backward pass."""
    run = jax.custom_vjp(function)
    run.defvjp(lambda *arguments: (function(*arguments), None), refuse)
    return run
