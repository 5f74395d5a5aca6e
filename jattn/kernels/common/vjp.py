"""Attention by a kernel's functions, differentiable; written once for all kernels.

A kernel is an `AttentionVJP`: a forward function from q, k and v to out and lse, a backward
function from these and the cotangents to the gradients, and two optional forward functions, for
calls that need more or fewer results. The kernel whose functions a program contains is chosen when
the program is lowered. `derivatives` makes other derivatives of these functions.
"""

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jattn import tuning
from jattn._types import Output, accumulation
from jattn.call import Call
from jattn.kernels.common import lowering, partition, reverse_mode
from jattn.kernels.common.branches import unbatched_cond
from jattn.kernels.common.derivatives import (
    AttentionInputs,
    DerivativeFunctions,
    DifferentiableAttention,
    PerQuery,
    Residuals,
)
from jattn.kernels.common.errors import CompilationFailed
from jattn.softmax import Normalizer
from jattn.spec import Shapes, Spec, has_mask, parameters


FunctionName = Literal["forward", "forward_alone", "forward_with_weights", "backward"]


class AttentionVJP:
    """The functions of a kernel, for one flat batch axis, in the dtype of sums.

    forward(spec, query, key, value) -> (out [B, T, N, V], normalizer of [B, T, N], all_finite [])
        `all_finite` is a boolean for the backward function: true if every value that the kernel saw
        is finite. A kernel that does not use it returns False.
    backward(spec, per_query, key, value, all_finite) -> (d_parameters, d_query, d_key, d_value)
        `per_query` is a `PerQuery`.
    forward_with_weights(spec, query, key, value) -> (out, normalizer, all_finite, weights)
        The forward function if a derivative is taken and `keeps_weights` holds: the weights before
        dropout `[B, N, T, S]` are then the last operand of `backward`. A kernel without this
        function computes them again.
    forward_alone(spec, query, key, value) -> (out, normalizer, all_finite)
        The forward function if neither a derivative is taken nor lse returned: the normalizer is
        not used. By default it is `forward`.
    of_piece(call) -> AttentionVJP
        Returns the functions for a piece of the call, whose places are traced. Raises
        NotImplementedError if no kernel can compute it. None: the same functions.
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
        otherwise: Callable[[CompilationFailed], "AttentionVJP"],
        of_piece: Callable[[Call], "AttentionVJP"],
    ) -> "AttentionVJP":
        """Returns the same functions; `otherwise` replaces any that cannot be compiled."""

        def tried(name: FunctionName) -> Callable[..., Any]:
            def run(*operands: Any) -> Any:
                try:
                    return getattr(self, name)(*operands)
                except CompilationFailed as reason:
                    return getattr(otherwise(reason), name)(*operands)

            return run

        with_weights = tried("forward_with_weights") if self._has_weights else None
        alone = tried("forward_alone")
        return AttentionVJP(tried("forward"), tried("backward"), with_weights, alone, of_piece)


class Functions(NamedTuple):
    """The functions of the kernel that a program contains.

    chosen: the functions, which are traced with the program, or a function that returns those of
        the platform that the program is lowered for.
    traced: the functions of platforms for which they are traced with the program in any case.
    """

    chosen: AttentionVJP | Callable[[str], AttentionVJP]
    traced: Mapping[str, AttentionVJP] = MappingProxyType({})

    def on(self, platform: str) -> AttentionVJP:
        """Returns the functions of a platform."""
        return self.chosen if isinstance(self.chosen, AttentionVJP) else self.chosen(platform)

    def run(self, name: FunctionName, like: Any, *operands: Any) -> Any:
        """Runs the function with this name, whose results have the types of `like`."""
        if isinstance(self.chosen, AttentionVJP):
            return getattr(self.chosen, name)(*operands)

        def on_platform(platform: str, *operands: Any) -> Any:
            return getattr(self.on(platform), name)(*operands)

        def of_piece(platform: str, spec: Spec, *operands: Any) -> Callable[..., Any]:
            """Returns the function of a kernel that can compute a piece of the call."""
            per_query, _, value, *_ = operands
            functions, query = self.on(platform), jax.tree.leaves(per_query)[0]
            if functions.of_piece:
                functions = functions.of_piece(Call(spec, Shapes.of(query, value)))
            return getattr(functions, name)

        def when_lowered(*operands: Any) -> Any:
            is_backward = name == "backward"
            function = partition.partitioned(on_platform, of_piece, like, operands, is_backward)
            return lowering.platform_dependent(function, like, *operands)

        if not self.traced:
            return when_lowered(*operands)
        of_platforms = {platform: getattr(x, name) for platform, x in self.traced.items()}
        return jax.lax.platform_dependent(*operands, default=when_lowered, **of_platforms)


def keeps_weights(shapes: Shapes) -> bool:
    """Returns whether the backward pass receives the weights: for short sequences, whose weights
    take no more memory than the queries."""
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
) -> tuple[Output, Normalizer]:
    """Computes `(out [B, T, N, V], normalizer of [B, N, T])` of a prepared spec, differentiable.

    The kernel's backward function is for reverse mode; `derivatives` are for all else. The spec's
    `parameters` take part in derivatives. Without `lse`, the normalizer is not used.
    """
    (B, T, N, _), (S, V) = query.shape, (key.shape[1], value.shape[-1])
    dtype = accumulation(query.dtype)
    if 0 in (B, T, S):
        zeros = jnp.zeros((B, N, T), dtype)
        nothing = jnp.zeros((B, T, N, V), query.dtype), Normalizer(zeros - jnp.inf, zeros)
        return reverse_mode.varied_like(nothing, (query, key, value, spec))
    qkv = (query, key, value)
    query, key, value, *params = reverse_mode.varied_like((*qkv, *parameters(spec)), spec)
    shapes, inputs = Shapes.of(query, value), AttentionInputs(params, query, key, value)
    out, normalizer = _with_derivatives(functions, derivatives, shapes, lse)(spec, inputs)
    return out.astype(query.dtype), normalizer.by_head()


def _with_derivatives(
    functions: Functions, derivatives: DerivativeFunctions, shapes: Shapes, lse: bool
) -> DifferentiableAttention:
    """Returns attention by the functions of a kernel, with its derivatives."""
    (B,), T, S, N, *_ = shapes
    dtype, keep = accumulation(shapes.dtype), keeps_weights(shapes)
    row = jax.ShapeDtypeStruct((B, T, N), dtype)
    like = (
        jax.ShapeDtypeStruct((B, T, N, shapes.V), dtype),
        Normalizer(row, row),  # pyright: ignore[reportArgumentType]
        jax.ShapeDtypeStruct((), jnp.bool_),
    )
    like_weights = jax.ShapeDtypeStruct((B, N, T, S), dtype)

    def value(spec: Spec, *qkv: Array) -> tuple[Array, Normalizer]:
        name = "forward" if lse else "forward_alone"
        return functions.run(name, like, spec, *qkv)[:2]

    def forward(spec: Spec, *qkv: Array) -> Residuals:
        name = "forward_with_weights" if keep else "forward"
        results = (*like, like_weights) if keep else like
        out, normalizer, all_finite, *weights = functions.run(name, results, spec, *qkv)
        return Residuals(out, out.astype(shapes.dtype), normalizer, all_finite, weights)

    def backward(spec: Spec, per_query: PerQuery, *rest: Array) -> Any:
        operands = (per_query.query, *rest[:2])
        results = parameters(spec), *(jax.ShapeDtypeStruct(x.shape, dtype) for x in operands)
        return functions.run("backward", results, spec, per_query, *rest)

    return DifferentiableAttention(value, forward, backward, derivatives)


def no_weights(query: Array, key: Array, value: Array) -> Array:
    """Returns zeros in place of weights `[B, N, T, S]` that are not used."""
    (B, T, N, _), S = query.shape, key.shape[1]
    return jnp.zeros((B, N, T, S), accumulation(query.dtype))


def cast_cotangent(per_query: PerQuery) -> PerQuery:
    """Returns `per_query` with d_out in the query's dtype, its original one, for tensor cores."""
    return per_query._replace(d_out=per_query.d_out.astype(per_query.query.dtype))


def fallback_if_nonfinite(fast: AttentionVJP, exact: AttentionVJP) -> AttentionVJP:
    """Returns the functions `fast`, followed by `exact` if their results are not finite.

    For kernels that multiply masked values by 0: 0 × NaN and 0 × inf are NaN, so that a result
    affected by a masked value is NaN itself. There is one decision for the whole call, also under
    `vmap`.
    """

    def forward(spec: Spec, *qkv: Array) -> tuple[Array, Normalizer, Array]:
        out, normalizer, all_finite = fast.forward(spec, *qkv)
        if not has_mask(spec):
            return out, normalizer, all_finite
        all_finite = jnp.isfinite(jnp.sum(out))
        again = lambda results, *operands: exact.forward(*operands)[:2]  # noqa: E731
        return *unbatched_cond(all_finite, _first, again, (out, normalizer), spec, *qkv), all_finite

    def backward(spec: Spec, per_query: Any, *rest: Any) -> Any:
        results = fast.backward(spec, per_query, *rest)
        if not has_mask(spec):
            return results
        again = lambda results, *operands: tuple(exact.backward(*operands))  # noqa: E731
        finite = [jnp.isfinite(jnp.sum(x)) for x in jax.tree.leaves(results)]
        enough = functools.reduce(jnp.logical_and, finite, rest[-1])
        return unbatched_cond(enough, _first, again, tuple(results), spec, per_query, *rest)

    return AttentionVJP(forward, backward)


def _first(results: Any, *_: Any) -> Any:
    return results
