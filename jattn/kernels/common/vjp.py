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
from jattn.call import Call
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


class AttentionVJP:
    """The functions of a kernel, for one flat batch axis, in the dtype of sums.

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
        the normalizer. By default it is `forward`.
    of_piece(call) -> AttentionVJP
        The functions for a piece of the call, whose places are traced. Raises NotImplementedError
        where none can. None: these.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        backward: Callable[..., Any],
        forward_with_weights: Callable[..., Any] | None = None,
        forward_alone: Callable[..., Any] | None = None,
        of_piece: Callable[[Call], "AttentionVJP"] | None = None,
    ):
        def with_no_weights(spec: Spec, *qkv: Array) -> Any:
            return *forward(spec, *qkv), no_weights(*qkv)

        def backward_alone(*operands: Any) -> Any:
            return backward(*operands[:5])

        self.forward = forward
        self.forward_alone = forward_alone or forward
        self.forward_with_weights = forward_with_weights or with_no_weights
        self.backward = backward if forward_with_weights else backward_alone
        self.of_piece = of_piece
        self._has_weights = forward_with_weights is not None

    def or_else(
        self,
        otherwise: Callable[[Unbuilt], "AttentionVJP"],
        of_piece: Callable[[Call], "AttentionVJP"],
    ) -> "AttentionVJP":
        """The same functions, but where what one needs cannot be built, that of others."""

        def tried(select: Select) -> Callable[..., Any]:
            def run(*operands: Any) -> Any:
                try:
                    return select(self)(*operands)
                except Unbuilt as reason:
                    return select(otherwise(reason))(*operands)

            return run

        weights = tried(lambda own: own.forward_with_weights) if self._has_weights else None
        alone = tried(lambda own: own.forward_alone)
        forward, backward = tried(lambda own: own.forward), tried(lambda own: own.backward)
        return AttentionVJP(forward, backward, weights, alone, of_piece)


Select = Callable[[AttentionVJP], Callable[..., Any]]
"""Gives one of a kernel's functions."""


class Functions(NamedTuple):
    """The functions of the kernel that a program gets.

    own: the functions, which are traced with the program, or a function that gives those of the
        platform that the program is lowered for.
    traced: those of platforms for which they are traced with the program all the same.
    """

    own: AttentionVJP | Callable[[str], AttentionVJP]
    traced: Mapping[str, AttentionVJP] = MappingProxyType({})

    def on(self, platform: str) -> AttentionVJP:
        """Those of a platform."""
        return self.own if isinstance(self.own, AttentionVJP) else self.own(platform)

    def run(self, select: Select, like: Any, *operands: Any, backward: bool = False) -> Any:
        """One of the functions, which is the `backward` one or another; its results are like
        these."""
        if isinstance(self.own, AttentionVJP):
            return select(self.own)(*operands)

        def on_platform(platform: str, *operands: Any) -> Any:
            return select(self.on(platform))(*operands)

        def of_piece(platform: str, spec: Spec, *operands: Any) -> Callable[..., Any]:
            """What can compute a piece of the call."""
            per_query, _, value, *_ = operands
            functions, query = self.on(platform), jax.tree.leaves(per_query)[0]
            if functions.of_piece:
                functions = functions.of_piece(Call(spec, Shapes.of(query, value)))
            return select(functions)

        def when_lowered(*operands: Any) -> Any:
            function = partition.partitioned(on_platform, of_piece, like, operands, backward)
            return lowering.platform_dependent(function, like, *operands)

        if not self.traced:
            return when_lowered(*operands)
        others = {name: select(functions) for name, functions in self.traced.items()}
        return jax.lax.platform_dependent(*operands, default=when_lowered, **others)


def keeps_weights(shapes: Shapes) -> bool:
    """Whether the backward pass may be handed the weights: those of short sequences, which take no
    more memory than the queries."""
    return shapes.S <= shapes.H and shapes.T * shapes.S <= tuning.DEFAULT.max_untiled


def attention(
    functions: Functions,
    derivatives: DerivativeFunctions,
    spec: Spec,
    query: Array,
    key: Array,
    value: Array,
    *,
    lse: bool = True,
) -> tuple[Output, LogSumExp]:
    """`(out [B, T, N, V], lse [B, N, T])` of a prepared spec, by these functions, differentiable.

    Their backward function is for reverse mode; `derivatives` are for all else. The spec's
    `parameters` take part in derivatives. Without `lse`, nobody will look at it.
    """
    (B, T, N, _), (S, V) = query.shape, (key.shape[1], value.shape[-1])
    dtype = accumulation(query.dtype)
    if 0 in (B, T, S):
        nothing = jnp.zeros((B, T, N, V), query.dtype), jnp.full((B, N, T), -jnp.inf, dtype)
        return reverse_mode.varied_like(nothing, (query, key, value, spec))
    qkv = (query, key, value)
    query, key, value, *params = reverse_mode.varied_like((*qkv, *parameters(spec)), spec)
    shapes, inputs = Shapes.of(query, value), Inputs(params, query, key, value)
    out, log = _with_derivatives(functions, derivatives, shapes, lse)(spec, inputs)
    return out.astype(query.dtype), jnp.swapaxes(log, 1, 2)


def _with_derivatives(
    functions: Functions, derivatives: DerivativeFunctions, shapes: Shapes, lse: bool
) -> Attention:
    """Attention by the functions of a kernel."""
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
        select: Select = lambda own: own.forward if lse else own.forward_alone  # noqa: E731
        out, normalizer, _ = functions.run(select, like, spec, *qkv)
        return out, normalizer.lse

    def forward(spec: Spec, *qkv: Array) -> Residuals:
        select: Select = lambda own: own.forward_with_weights if keep else own.forward  # noqa: E731
        results = (*like, weights) if keep else like
        out, normalizer, all_finite, *kept = functions.run(select, results, spec, *qkv)
        return Residuals(out, out.astype(shapes.dtype), normalizer, all_finite, kept)

    def backward(spec: Spec, per_query: PerQuery, *rest: Array) -> Any:
        operands = (per_query.query, *rest[:2])
        results = parameters(spec), *(jax.ShapeDtypeStruct(x.shape, dtype) for x in operands)
        select: Select = lambda own: own.backward  # noqa: E731
        return functions.run(select, results, spec, per_query, *rest, backward=True)

    return Attention(value, forward, backward, derivatives)


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
