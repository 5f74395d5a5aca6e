"""Reverse mode only: kernels with a derivative rule of their own say so, wherever they are used.

JAX notices forward mode through such a kernel late, when an enclosing `jit` is compiled, and names
functions that a user has never heard of. Inputs that pass through `only` raise with the way out.
"""

from collections.abc import Callable
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


def only(x: Array) -> Array:
    """x, whose tangents raise NotImplementedError when they are computed."""
    return _input.bind(x)


def sealed(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, whose derivatives raise NotImplementedError: for a backward pass."""
    run = jax.custom_vjp(function)
    run.defvjp(lambda *arguments: (function(*arguments), None), refuse)
    return run
