"""The derivative rule of attention, written once for all kernels.

A kernel is two functions: forward from q, k and v to out and lse, backward from these and the
cotangents to the gradients. Which kernel's functions a program holds is settled when it is lowered.
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
from jattn.softmax import Normalizer
from jattn.spec import Shapes, Spec, has_mask, parameters, with_parameters


class PerQuery(NamedTuple):
    """What a backward pass is given along the queries, each `[B, T, N, ...]`.

    With s the scores and p = exp((s − maximum) − log_total) the weights before dropout, the
    cotangent of s is p (drop(d_out vᵀ) − delta), where delta = rowsum(d_out · out) − d_lse.
    `maximum` and `log_total` are those of the `Normalizer`, but 0 in place of −inf.
    """

    query: Any
    d_out: Any
    maximum: Any
    log_total: Any
    delta: Any

    @classmethod
    def of(cls, query: Array, d_out: Array, normalizer: Normalizer, delta: Array) -> "PerQuery":
        maximum, log_total = normalizer
        return cls(query, d_out, jnp.where(maximum == -jnp.inf, 0, maximum), log_total, delta)


class AttentionVJP(NamedTuple):
    """The forward and the backward function of a kernel, for one flat batch axis, in the dtype of
    sums.

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
    """

    forward: Callable[..., Any]
    backward: Callable[..., Any]
    forward_with_weights: Callable[..., Any] | None = None
    forward_alone: Callable[..., Any] | None = None

    def run(self, which: str, *operands: Any) -> Any:
        """One of the functions by its name; a kernel that keeps no weights gives and gets none."""
        match which:
            case "forward":
                return self.forward(*operands)
            case "forward_alone":
                return (self.forward_alone or self.forward)(*operands)
            case "forward_with_weights" if self.forward_with_weights:
                return self.forward_with_weights(*operands)
            case "forward_with_weights":
                return *self.forward(*operands), no_weights(*operands[1:])
            case "backward":
                return self.backward(*(operands if self.forward_with_weights else operands[:5]))
        raise ValueError(f"no function {which!r}")


def keeps_weights(shapes: Shapes) -> bool:
    """Whether the backward pass may be handed the weights: those of short sequences, which take no
    more memory than the queries."""
    return shapes.S <= shapes.H and shapes.T * shapes.S <= tuning.DEFAULT.max_untiled


def attention(
    functions: AttentionVJP | Callable[[str], AttentionVJP],
    spec: Spec,
    query: Array,
    key: Array,
    value: Array,
    traced: Mapping[str, AttentionVJP] = MappingProxyType({}),
) -> tuple[Output, LogSumExp]:
    """`(out [B, T, N, V], lse [B, N, T])`, differentiable, by `functions(platform)`.

    The spec's `parameters` take part in derivatives. Functions of a platform in `traced` are traced
    with the program, in place of those by `functions(platform)`; and so are `functions` that are
    the same for all platforms.
    """
    (B, T, N, _), (S, V) = query.shape, (key.shape[1], value.shape[-1])
    dtype = accumulation(query.dtype)
    if 0 in (B, T, S):
        nothing = jnp.zeros((B, T, N, V), query.dtype), jnp.full((B, N, T), -jnp.inf, dtype)
        return reverse_mode.varied_like(nothing, (query, key, value, spec))
    keep = keeps_weights(Shapes.of(query, value))
    row = jax.ShapeDtypeStruct((B, T, N), dtype)
    results = [
        jax.ShapeDtypeStruct((B, T, N, V), dtype),
        Normalizer(row, row),  # pyright: ignore[reportArgumentType]
        jax.ShapeDtypeStruct((), jnp.bool_),
        jax.ShapeDtypeStruct((B, N, T, S), dtype),
    ]
    run_one = functools.partial(_run_one, functions, traced)

    @jax.custom_vjp
    def run(params: list[Array], spec: Spec, *qkv: Array) -> Any:
        operands = (with_parameters(spec, params), *qkv)
        which = "forward" if spec.lse else "forward_alone"
        out, normalizer, _ = run_one(which, tuple(results[:3]), *operands)
        return out, normalizer.lse

    def run_forward(params: list[Array], spec: Spec, *qkv: Array) -> Any:
        which, types = ("forward_with_weights", results) if keep else ("forward", results[:3])
        operands = (with_parameters(spec, params), *qkv)
        out, normalizer, *kept = run_one(which, tuple(types), *operands)
        return (out, normalizer.lse), (params, spec, *qkv, out, normalizer, kept)

    def run_backward(residuals: Any, cotangents: Any) -> Any:
        params, spec, query, key, value, out, normalizer, kept = residuals
        d_out, d_lse = cotangents
        delta = jnp.sum(d_out * out, axis=-1) - d_lse
        per_query = PerQuery.of(query, d_out, normalizer, delta)
        gradients = (params, *(jax.ShapeDtypeStruct(x.shape, dtype) for x in (query, key, value)))
        operands = (with_parameters(spec, params), per_query, key, value, *kept)
        d_params, *found = run_one("backward", gradients, *operands)
        cast = [x.astype(y.dtype) for x, y in zip(found, (query, key, value), strict=True)]
        return d_params, None, *cast

    run.defvjp(run_forward, run_backward)
    query, key, value, *params = reverse_mode.inputs((query, key, value, *parameters(spec)), spec)
    out, lse = run(params, spec, query, key, value)
    return out.astype(query.dtype), jnp.swapaxes(lse, 1, 2)


def _run_one(
    functions: AttentionVJP | Callable[[str], AttentionVJP],
    traced: Mapping[str, AttentionVJP],
    which: str,
    like: Any,
    *operands: Any,
) -> Any:
    """One of the functions, by name: that of the platform."""
    if isinstance(functions, AttentionVJP):
        return reverse_mode.nondifferentiable(functools.partial(functions.run, which))(*operands)

    def when_lowered(*operands: Any) -> Any:
        function = functools.partial(_run_on, functions, which)
        function = partition.partitioned(which, function, like, operands)
        return lowering.platform_dependent(function, like, *operands)

    if not traced:
        return when_lowered(*operands)
    others = {name: functools.partial(one.run, which) for name, one in traced.items()}
    return jax.lax.platform_dependent(*operands, default=when_lowered, **others)


def _run_on(
    functions: Callable[[str], AttentionVJP], which: str, platform: str, *operands: Any
) -> Any:
    return functions(platform).run(which, *operands)


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
