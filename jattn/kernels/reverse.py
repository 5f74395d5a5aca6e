"""Reverse mode only: kernels with a derivative rule of their own say so, wherever they are used.

JAX notices forward mode through such a kernel late, when an enclosing `jit` is compiled, and names
functions that a user has never heard of. Inputs that pass through `only` raise with the way out.
"""

from collections.abc import Callable
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array

from jattn.spec import Spec, parameters, with_parameters


_input = Primitive("reverse_only")
_tangent = Primitive("reverse_only_tangent")


def _refuse(*_: Any, **__: Any) -> NoReturn:
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
_tangent.def_impl(_refuse)
mlir.register_lowering(_tangent, _refuse)
batching.primitive_batchers[_tangent] = _refuse


def only(x: Array) -> Array:
    """x, whose tangents raise NotImplementedError when they are computed."""
    return _input.bind(x)


def sealed(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, whose derivatives raise NotImplementedError: for a backward pass."""
    run = jax.custom_vjp(function)
    run.defvjp(lambda *arguments: (function(*arguments), None), _refuse)
    return run


def attention(
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    spec: Spec,
    query: Array,
    key: Array,
    value: Array,
) -> tuple[Array, Array]:
    """`(out [B, T, N, V], lse [B, T, N])` with the derivative rule, in which only float arrays of
    the score take part.

    `forward(spec, query, key, value)` gives out, lse and what else `backward` is to have;
    `backward(spec, (query, d_out, lse, delta), key, value, *kept)` gives the gradients of
    parameters, query, key and value, where `delta` is rowsum(d_out · out) − d_lse (Dao et al. 2022,
    FlashAttention, appendix B.2).
    """
    forward, backward = sealed(forward), sealed(backward)

    @jax.custom_vjp
    def run(params: list[Array], spec: Spec, *qkv: Array) -> Any:
        return forward(with_parameters(spec, params), *qkv)[:2]

    def run_forward(params: list[Array], spec: Spec, *qkv: Array) -> Any:
        out, lse, *kept = forward(with_parameters(spec, params), *qkv)
        return (out, lse), (params, spec, *qkv, out, lse, kept)

    def run_backward(residuals: Any, cotangents: Any) -> Any:
        params, spec, query, key, value, out, lse, kept = residuals
        d_out, d_lse = cotangents
        delta = jnp.sum(d_out.astype(lse.dtype) * out.astype(lse.dtype), axis=-1) - d_lse
        per_head = (query, d_out, lse, delta)
        d_params, *d_qkv = backward(with_parameters(spec, params), per_head, key, value, *kept)
        cast = [x.astype(y.dtype) for x, y in zip(d_qkv, (query, key, value), strict=True)]
        return d_params, None, *cast

    run.defvjp(run_forward, run_backward)
    query, key, value, *params = map(only, (query, key, value, *parameters(spec)))
    return run(params, spec, query, key, value)
