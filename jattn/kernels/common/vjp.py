"""Attention by a kernel's functions, differentiable; written once for all kernels.

A kernel is an `AttentionVJP`: a forward function from q, k and v to out and lse, a backward
function from these and the cotangents to the gradients, and two more forward functions that it may
have, for calls that want more or less of the results. Which kernel's functions a program holds is
decided when it is lowered. How other derivatives are made of them is written in `derivatives`.
"""

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jattn import softmax, tuning
from jattn._types import LogSumExp, Output, accumulation
from jattn.kernels.common import lowering, partition, reverse_mode
from jattn.kernels.common.branches import unbatched_cond
from jattn.kernels.common.derivatives import (
    Attention,
    DerivativeFunctions,
    Inputs,
    PerQuery,
    Residuals,
)
from jattn.kernels.common.unbuilt import Unbuilt
from jattn.softmax import Normalizer
from jattn.spec import Shapes, Spec, has_mask, parameters


class AttentionVJP(NamedTuple):
    """The functions of a kernel, for one flat batch axis, in the dtype of sums. The last three
    may be None.

    forward(spec, query, key, value) -> (out [B, T, N, V], normalizer of [B, T, N], all_finite [])
        `all_finite` is a boolean for the backward function: nothing was found that is not finite. A
        kernel that has no use for it says False.
    backward(spec, per_query, key, value, all_finite) -> (d_parameters, d_query, d_key, d_value)
        `per_query` is a `PerQuery`.
    forward_with_weights(spec, query, key, value) -> (out, normalizer, all_finite, weights)
        As `forward`, for where a derivative is taken and `keeps_weights`: the weights before
        dropout `[B, N, T, S]` are then the last operand of `backward`. A kernel without it computes
        them again.
    forward_alone(spec, query, key, value) -> (out, normalizer, all_finite)
        As `forward`, for where neither a derivative is taken nor lse asked for: nobody will look at
        the normalizer.
    of_piece(spec, shapes) -> AttentionVJP
        The functions for a piece of the call, whose places are traced. Raises NotImplementedError
        where none can.
    """

    forward: Callable[..., Any]
    backward: Callable[..., Any]
    forward_with_weights: Callable[..., Any] | None = None
    forward_alone: Callable[..., Any] | None = None
    of_piece: Callable[[Spec, Shapes], "AttentionVJP"] | None = None

    def run(self, which: str, *operands: Any) -> Any:
        """One of the functions by its name; a kernel that keeps no weights gives and gets none."""
        match which:
            case "forward":
                return self.forward(*operands)
            case "forward_alone":
                return (self.forward_alone or self.forward)(*operands)
            case "forward_with_weights":
                return (self.forward_with_weights or self._with_no_weights)(*operands)
            case "backward":
                return self.backward(*(operands if self.forward_with_weights else operands[:5]))
        raise ValueError(f"no function {which!r}")

    def _with_no_weights(self, spec: Spec, *qkv: Array) -> Any:
        return *self.forward(spec, *qkv), no_weights(*qkv)

    def or_else(self, otherwise: Callable[[Unbuilt], "AttentionVJP"]) -> "AttentionVJP":
        """The same functions, but where what one needs cannot be built, that of others."""

        def tried(which: str) -> Callable[..., Any]:
            def run(*operands: Any) -> Any:
                try:
                    return self.run(which, *operands)
                except Unbuilt as reason:
                    return otherwise(reason).run(which, *operands)

            return run

        weights = tried("forward_with_weights") if self.forward_with_weights else None
        return AttentionVJP(tried("forward"), tried("backward"), weights, tried("forward_alone"))


def keeps_weights(shapes: Shapes) -> bool:
    """Whether the backward pass may be handed the weights: those of short sequences, which take no
    more memory than the queries."""
    return shapes.S <= shapes.H and shapes.T * shapes.S <= tuning.DEFAULT.max_untiled


def attention(
    functions: AttentionVJP | Callable[[str], AttentionVJP],
    derivatives: DerivativeFunctions,
    spec: Spec,
    query: Array,
    key: Array,
    value: Array,
    traced: Mapping[str, AttentionVJP] = MappingProxyType({}),
) -> tuple[Output, LogSumExp]:
    """`(out [B, T, N, V], lse [B, N, T])`, by `functions(platform)`, and differentiable.

    Their backward function is for reverse mode; `derivatives` are for all else. The spec's
    `parameters` take part in derivatives. Functions of a platform in `traced` are traced with the
    program, in place of those by `functions(platform)`; and so are `functions` that are the same
    for all platforms.
    """
    (B, T, N, _), (S, V) = query.shape, (key.shape[1], value.shape[-1])
    dtype = accumulation(query.dtype)
    if 0 in (B, T, S):
        nothing = jnp.zeros((B, T, N, V), query.dtype), jnp.full((B, N, T), -jnp.inf, dtype)
        return reverse_mode.varied_like(nothing, (query, key, value, spec))
    run = functools.partial(_run_one, functions, traced)
    qkv = (query, key, value)
    query, key, value, *params = reverse_mode.varied_like((*qkv, *parameters(spec)), spec)
    inputs = Inputs(params, query, key, value)
    out, lse = _with_derivatives(run, derivatives, Shapes.of(query, value))(spec, inputs)
    return out.astype(query.dtype), jnp.swapaxes(lse, 1, 2)


def _with_derivatives(
    run: Callable[..., Any], derivatives: DerivativeFunctions, shapes: Shapes
) -> Attention:
    """Attention by `run(which, like, *operands)`: a function of a kernel by its name, with what is
    like its results."""
    (B,), T, S, N, *_ = shapes
    dtype, keep = accumulation(shapes.dtype), keeps_weights(shapes)
    row = jax.ShapeDtypeStruct((B, T, N), dtype)
    like = (
        jax.ShapeDtypeStruct((B, T, N, shapes.V), dtype),
        Normalizer(row, row),  # pyright: ignore[reportArgumentType]
        jax.ShapeDtypeStruct((), jnp.bool_),
    )
    weights = jax.ShapeDtypeStruct((B, N, T, S), dtype)

    def value(spec: Spec, *qkv: Array) -> tuple[Array, Array]:
        which = "forward" if spec.lse else "forward_alone"
        out, normalizer, _ = run(which, like, spec, *qkv)
        return out, normalizer.lse

    def forward(spec: Spec, *qkv: Array) -> Residuals:
        which, results = ("forward_with_weights", (*like, weights)) if keep else ("forward", like)
        out, normalizer, all_finite, *kept = run(which, results, spec, *qkv)
        return Residuals(out, out.astype(shapes.dtype), normalizer, all_finite, kept)

    def backward(spec: Spec, per_query: PerQuery, *rest: Array) -> Any:
        operands = (per_query.query, *rest[:2])
        sums = [jax.ShapeDtypeStruct(x.shape, dtype) for x in operands]
        return run("backward", (parameters(spec), *sums), spec, per_query, *rest)

    return Attention(value, forward, backward, derivatives)


def _run_one(
    functions: AttentionVJP | Callable[[str], AttentionVJP],
    traced: Mapping[str, AttentionVJP],
    which: str,
    like: Any,
    *operands: Any,
) -> Any:
    """One of the functions, by name: that of the platform."""
    if isinstance(functions, AttentionVJP):
        return functions.run(which, *operands)

    def when_lowered(*operands: Any) -> Any:
        function = functools.partial(run_on, functions, which)
        choose = functools.partial(_of_piece, functions, which)
        function = partition.partitioned(which, function, choose, like, operands)
        return lowering.platform_dependent(function, like, *operands)

    if not traced:
        return when_lowered(*operands)
    others = {name: functools.partial(one.run, which) for name, one in traced.items()}
    return jax.lax.platform_dependent(*operands, default=when_lowered, **others)


def run_on(
    functions: Callable[[str], AttentionVJP], which: str, platform: str, *operands: Any
) -> Any:
    """One of the functions that a platform has, by name."""
    return functions(platform).run(which, *operands)


def _of_piece(
    functions: Callable[[str], AttentionVJP], which: str, platform: str, spec: Spec, *operands: Any
) -> Callable[..., Any]:
    """As `run_on`, but the function alone, of what can compute a piece of a call."""
    per_query, _, value, *_ = operands
    own, query = functions(platform), jax.tree.leaves(per_query)[0]
    if own.of_piece:
        own = own.of_piece(spec, Shapes.of(query, value))
    return functools.partial(own.run, which)


def no_weights(query: Array, key: Array, value: Array) -> Array:
    """In place of weights `[B, N, T, S]` that nobody will look at."""
    (B, T, N, _), S = query.shape, key.shape[1]
    return jnp.zeros((B, N, T, S), accumulation(query.dtype))


def cast_cotangent(per_query: PerQuery) -> PerQuery:
    """`per_query` with d_out in the dtype of the query, in which it came: nothing is lost, and
    matrix units take it."""
    return per_query._replace(d_out=per_query.d_out.astype(per_query.query.dtype))


def with_headroom(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward pass in which no sum of weighted values overflows whose mean does not."""

    def run(spec: Spec, query: Array, key: Array, value: Array) -> Any:
        factor = softmax.headroom(softmax.greatest(value), key.shape[1])
        out, *rest = forward(spec, query, key, value * factor.astype(value.dtype))
        return out / factor.astype(out.dtype), *rest

    return run


def fallback_if_nonfinite(fast: AttentionVJP, exact: AttentionVJP) -> AttentionVJP:
    """The functions `fast`, and `exact` after them where their results are not finite.

    For kernels that multiply what is masked with 0: 0 × NaN and 0 × inf are NaN, so that whatever
    something masked has reached tells by itself. One decision for the whole call, also under
    `vmap`.
    """

    def forward(spec: Spec, *qkv: Array) -> tuple[Array, Normalizer, Array]:
        out, normalizer, all_finite = fast.forward(spec, *qkv)
        if not has_mask(spec):
            return out, normalizer, all_finite
        all_finite = jnp.isfinite(jnp.sum(out))
        again = lambda found, *operands: exact.forward(*operands)[:2]  # noqa: E731
        return *unbatched_cond(all_finite, _first, again, (out, normalizer), spec, *qkv), all_finite

    def backward(spec: Spec, per_query: Any, *rest: Any) -> Any:
        found = fast.backward(spec, per_query, *rest)
        if not has_mask(spec):
            return found
        again = lambda found, *operands: tuple(exact.backward(*operands))  # noqa: E731
        finite = [jnp.isfinite(jnp.sum(x)) for x in jax.tree.leaves(found)]
        enough = functools.reduce(jnp.logical_and, finite, rest[-1])
        return unbatched_cond(enough, _first, again, tuple(found), spec, per_query, *rest)

    return AttentionVJP(forward, backward)


def _first(found: Any, *_: Any) -> Any:
    return found
