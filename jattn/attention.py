"""Attention: arguments checked, an implementation chosen, one compiled pure function run."""

import functools
from types import ModuleType
from typing import Any, Literal, overload

import jax
from jaxtyping import Array, Int

from jattn._types import AnyArray, Keys, LogSumExp, Output, Queries, Values, Weights
from jattn.kernels import blockwise, reference
from jattn.masks import Mask
from jattn.scores import ScoreFunction
from jattn.spec import Shapes, Spec, check_shapes, make_spec, prepare


IMPLEMENTATIONS: dict[str, ModuleType] = {"blockwise": blockwise, "reference": reference}
"""By name, in the order in which `implementation=None` tries them."""


def _choose(implementation: str | None, spec: Spec, shapes: Shapes) -> str:
    if implementation is None:
        return next(
            name for name, kernel in IMPLEMENTATIONS.items() if not kernel.supports(spec, shapes)
        )
    if implementation not in IMPLEMENTATIONS:
        known = ", ".join(repr(name) for name in IMPLEMENTATIONS)
        raise ValueError(f"implementation: expected None or one of {known}, got {implementation!r}")
    reason = IMPLEMENTATIONS[implementation].supports(spec, shapes)
    if reason:
        raise NotImplementedError(f"implementation {implementation!r}: {reason}")
    return implementation


@functools.partial(jax.jit, static_argnames=("implementation", "shapes", "return_lse"))
def _attend(
    spec: Spec,
    query: Array,
    key: Array,
    value: Array,
    *,
    implementation: str,
    shapes: Shapes,
    return_lse: bool,
) -> Any:
    flat = [x.reshape(shapes.B, *x.shape[-3:]) for x in (query, key, value)]
    out, lse = IMPLEMENTATIONS[implementation].attend(prepare(spec, shapes), *flat)
    out = out.reshape(*shapes.batch, *out.shape[1:])
    return (out, lse.reshape(*shapes.batch, *lse.shape[1:])) if return_lse else out


@overload
def attention(
    query: Queries,
    key: Keys,
    value: Values,
    *,
    mask: Mask | AnyArray | None = None,
    score: ScoreFunction | None = None,
    scale: float | Array | None = None,
    q_positions: Int[AnyArray, "..."] | None = None,
    kv_positions: Int[AnyArray, "..."] | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Array | None = None,
    precision: Any = None,
    implementation: str | None = None,
    return_lse: Literal[False] = False,
) -> Output: ...
@overload
def attention(
    query: Queries,
    key: Keys,
    value: Values,
    *,
    mask: Mask | AnyArray | None = None,
    score: ScoreFunction | None = None,
    scale: float | Array | None = None,
    q_positions: Int[AnyArray, "..."] | None = None,
    kv_positions: Int[AnyArray, "..."] | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Array | None = None,
    precision: Any = None,
    implementation: str | None = None,
    return_lse: Literal[True],
) -> tuple[Output, LogSumExp]: ...
def attention(
    query: Queries,
    key: Keys,
    value: Values,
    *,
    mask: Mask | AnyArray | None = None,
    score: ScoreFunction | None = None,
    scale: float | Array | None = None,
    q_positions: Int[AnyArray, "..."] | None = None,
    kv_positions: Int[AnyArray, "..."] | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Array | None = None,
    precision: Any = None,
    implementation: str | None = None,
    return_lse: bool = False,
) -> Any:
    """Scaled dot-product attention (Vaswani et al. 2017, equation 1), for any mask and score.

        out = dropout(softmax(mask(score(query keyᵀ × scale)))) value

    Args:
        query: `[*B, T, N, H]`, float16, bfloat16, float32 or float64.
        key: `[*B, S, K, H]`, of the same dtype. K divides N; query head n reads head n // (N / K).
        value: `[*B, S, K, V]`, of the same dtype.
        mask: a mask of `jattn.masks`, or a boolean array `[*B, N, T, S]` in which True attends and
            axes of size 1 broadcast.
        score: a score function of `jattn.scores`, applied after the scale and before the mask.
        scale: what query·key is multiplied with, by default 1/√H.
        q_positions: integer `[T]` or `[*B, T]`, by default arange(T): what formulas in masks and
            scores see. T and S are unrelated; with the default, Causal is top-left aligned.
        kv_positions: integer `[S]` or `[*B, S]`, by default arange(S).
        dropout_rate: in [0, 1). Acts on the normalised weights; kept ones grow by 1/(1 − rate).
        dropout_key: a JAX random key, needed if the rate is above 0.
        precision: of the matrix products, as in `jax.lax.Precision`.
        implementation: a name from `explain`, which then runs or raises; None takes the first that
            supports the call.
        return_lse: also return the log of the softmax's denominator.

    Returns:
        `out [*B, T, N, V]` in the query's dtype, and with `return_lse` also `lse [*B, N, T]`, the
        natural log Σ exp(score) in float32 (float64 for float64). Sums run in float32 (float64).
        A query whose keys are all masked has out 0, lse −inf and gradient 0. What is masked does
        not exist: NaN in it reaches neither results nor gradients.

    Raises:
        TypeError, ValueError: for arguments that do not fit, before compilation.
        NotImplementedError: if the named implementation cannot, with its reason; for forward mode
            and second derivatives, which only implementation="reference" has.
    """
    shapes = check_shapes(query, key, value)
    spec = make_spec(
        shapes,
        mask=mask,
        score=score,
        scale=scale,
        q_positions=q_positions,
        kv_positions=kv_positions,
        dropout_rate=dropout_rate,
        dropout_key=dropout_key,
        precision=precision,
    )
    name = _choose(implementation, spec, shapes)
    return _attend(
        spec, query, key, value, implementation=name, shapes=shapes, return_lse=return_lse
    )


def explain(query: Queries, key: Keys, value: Values, **arguments: Any) -> dict[str, str | None]:
    """Which implementations can run `attention(query, key, value, **arguments)`.

    Maps each name to None where it can, else to its reason. `implementation=None` takes the first
    that can.
    """
    shapes = check_shapes(query, key, value)
    arguments.pop("return_lse", None)
    arguments.pop("implementation", None)
    spec = make_spec(shapes, **arguments)
    return {name: kernel.supports(spec, shapes) for name, kernel in IMPLEMENTATIONS.items()}


@functools.partial(jax.jit, static_argnames=("what", "shapes"))
def _matrix(spec: Spec, query: Array, key: Array, *, what: str, shapes: Shapes) -> Array:
    flat = [x.reshape(shapes.B, *x.shape[-3:]) for x in (query, key)]
    result = getattr(reference, what)(prepare(spec, shapes), *flat)
    return result.reshape(*shapes.batch, *result.shape[1:])


def attention_scores(
    query: Queries,
    key: Keys,
    *,
    mask: Mask | AnyArray | None = None,
    score: ScoreFunction | None = None,
    scale: float | Array | None = None,
    q_positions: Int[AnyArray, "..."] | None = None,
    kv_positions: Int[AnyArray, "..."] | None = None,
    precision: Any = None,
) -> Weights:
    """Scores before the softmax, `[*B, N, T, S]` in float32 (float64), −inf where masked.

    Arguments and errors as in `attention`. Memory grows with T × S.
    """
    shapes = check_shapes(query, key)
    spec = make_spec(
        shapes,
        mask=mask,
        score=score,
        scale=scale,
        q_positions=q_positions,
        kv_positions=kv_positions,
        precision=precision,
    )
    return _matrix(spec, query, key, what="scores", shapes=shapes)


def attention_weights(
    query: Queries,
    key: Keys,
    *,
    mask: Mask | AnyArray | None = None,
    score: ScoreFunction | None = None,
    scale: float | Array | None = None,
    q_positions: Int[AnyArray, "..."] | None = None,
    kv_positions: Int[AnyArray, "..."] | None = None,
    precision: Any = None,
) -> Weights:
    """Weights after the softmax, `[*B, N, T, S]` in float32 (float64), before any dropout.

    Rows sum to 1; a query whose keys are all masked has weights 0. Arguments and errors as in
    `attention`. Memory grows with T × S.
    """
    shapes = check_shapes(query, key)
    spec = make_spec(
        shapes,
        mask=mask,
        score=score,
        scale=scale,
        q_positions=q_positions,
        kv_positions=kv_positions,
        precision=precision,
    )
    return _matrix(spec, query, key, what="weights", shapes=shapes)
