"""Errors for functions whose derivative rule is for reverse mode only.

JAX notices forward mode through such a kernel late, when an enclosing `jit` is compiled, and names
functions that the user does not know. Arrays that pass through `inputs` raise an error that names
an implementation which has the derivative. Within `shard_map` such rules need operands that vary
over the same axes of a mesh; the functions for that are here too.
"""

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import jax
from jax._src.core import Primitive
from jax.interpreters import ad, batching, mlir

from jattn._explicit import varied_like
from jattn._types import Tree


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


def inputs(arrays: Iterable[Tree], context: Tree = ()) -> list[Any]:
    """Returns arrays, or trees of them, as operands of a function with a reverse-mode rule only.

    A forward-mode derivative by one of them raises NotImplementedError. `context` is a tree of all
    else that the function reads.

    Within `shard_map`, each array is returned varying over all axes of the mesh over which any of
    `arrays` and `context` varies. The results and their cotangents vary over the same axes. If an
    array was the same on several devices, its gradient is the sum over these.
    """
    return jax.tree.map(_input.bind, varied_like(list(arrays), context))


def varying_alike(operands: Tree) -> tuple[Any, Any]:
    """Returns a tree of operands that all vary over the same axes of a mesh, within `shard_map`,
    and their `manual_axis_type`, with which results of Pallas's calls are declared."""
    alike = varied_like(operands, ())
    return alike, jax.typeof(jax.tree.leaves(alike)[0]).manual_axis_type


def nondifferentiable(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function with derivatives that raise NotImplementedError, for a backward pass."""
    run = jax.custom_vjp(function)
    run.defvjp(lambda *arguments: (function(*arguments), None), refuse)
    return run
