"""Attention: checks the arguments, chooses an implementation, runs one compiled pure function.

`attention` checks its arguments and packs them into a `Call`, for which `attend` is compiled. There
`run` calls the kernel that `registry` chooses, through `vjp.attention`, the differentiable
operation that all kernels share; implementation="reference" is computed without a kernel.
"""

from typing import Any, Literal, Unpack, overload

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jattn._advised import advised
from jattn._debugging import may_be_minus_infinity
from jattn._explicit import QuerySharding, partitioned_by_xla
from jattn._types import AnyArray, Keys, LogSumExp, Output, Queries, Values, Weights
from jattn.cache import Cache
from jattn.call import Call, compiled, make
from jattn.kernels import registry
from jattn.kernels.common import vjp
from jattn.kernels.xla import decode, reference, tangents
from jattn.masks import MaskLike
from jattn.normalizers import NormalizerLike
from jattn.options import Options, ScoreOptions, WeightOptions
from jattn.scores import ScoreLike
from jattn.softmax import Normalizer, with_sink_in_weights


IMPLEMENTATIONS = registry.NAMES
"""Names accepted as `implementation`."""


@overload
def attention(
    query: Queries,
    key: Keys | Cache,
    value: Values | None = None,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[Options],
) -> Output: ...
@overload
def attention(
    query: Queries,
    key: Keys | Cache,
    value: Values | None = None,
    *,
    return_lse: Literal[True],
    **options: Unpack[Options],
) -> tuple[Output, LogSumExp]: ...
@advised()
@may_be_minus_infinity(1)
def attention(
    query: Queries,
    key: Keys | Cache,
    value: Values | None = None,
    *,
    mask: MaskLike = None,
    score: ScoreLike = None,
    scale: float | Array | None = None,
    sink: float | Float[AnyArray, "..."] | None = None,
    q_positions: Int[AnyArray, "..."] | None = None,
    kv_positions: Int[AnyArray, "..."] | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Array | None = None,
    precision: Any = None,
    normalizer: NormalizerLike = None,
    implementation: str | None = None,
    return_lse: bool = False,
) -> Any:
    """Scaled dot-product attention (Vaswani et al. 2017, equation 1), for any mask and score.

        out = dropout(softmax(mask(score(query keyᵀ × scale)))) value

    Args:
        query: `[*B, T, N, H]`, float16, bfloat16, float32 or float64.
        key: `[*B, S, K, H]`, of the same dtype. K divides N; query head n reads head n // (N / K).
        value: `[*B, S, K, V]`, of the same dtype. A cache of `jattn.cache` may replace key and
            value. The S keys are then its slots, and kv_positions the positions of the tokens in
            them; `mask` applies in addition to the cache's own mask; and q_positions are by default
            the positions of the T tokens appended last.
        mask: a mask of `jattn.masks`, or a boolean array `[*B, N, T, S]` in which True attends and
            axes of size 1 broadcast. In a call on a cache, S is the cache's capacity.
        score: a score function of `jattn.scores`, applied after the scale and before the mask.
        scale: the factor of query·key, by default 1/√H: a number; or a float array, a scalar or
            `[N]` with one factor for each head, which is a differentiable parameter. Each
            new number compiles a new program, here and in masks and scores; an array does not.
        sink: the logit of an additional key without a value: a float scalar, or `[N]` with one for
            each head. It is a differentiable parameter; see `jattn.softmax.with_sink`.
        q_positions: integer `[T]` or `[*B, T]`, by default arange(T): the positions with which
            masks and scores are computed. T and S may differ: by default the first query and the
            first key are both at position 0, so that Causal is aligned at the top left.
        kv_positions: integer `[S]` or `[*B, S]`, by default arange(S).
        dropout_rate: in [0, 1). Dropout sets normalised weights to 0, and multiplies the remaining
            ones by 1/(1 − rate).
        dropout_key: a JAX random key, needed if the rate is above 0.
        precision: the precision of matrix products, as in `jax.lax.Precision`.
        normalizer: a normalizer of `jattn.normalizers`, in place of the softmax; or a function of a
            score that returns its weight. Only the softmax has an lse and sinks.
        implementation: a name that `explain` lists: the call runs that implementation, or raises an
            error. None selects the first implementation that supports the call on the platform for
            which the program is lowered. In calls on a cache with few queries, None selects
            "decode", which reads the cache in place. "tpu", "pallas", "ampere", "hopper" and
            "blackwell", if named, also read it in place if there are few queries, the cache has the
            query's dtype or, on a Hopper or a TPU, is quantised, and its page and head sizes fit
            the kernel's tiles. In all other calls keys and values are copied out of the cache.
        return_lse: whether to return the log of the softmax's denominator too.

    Returns:
        `out [*B, T, N, V]` in the query's dtype, and with `return_lse` also `lse [*B, N, T]`, the
        natural log Σ exp(score) in float32 (float64 for float64). Sums are accumulated in float32
        (float64). A query whose keys are all masked has out 0, gradient 0, and lse −inf or, with a
        sink, its head's sink. A masked key has no influence: even if it or its value is NaN,
        results and gradients are unchanged.

    Raises:
        TypeError, ValueError: for wrong arguments, before compilation.
        NotImplementedError: if the named implementation does not support the call, with the reason.
            Also for third derivatives; and, if a cache is read in place, for all derivatives except
            the first in reverse mode. implementation="reference" supports all derivatives.

    First and second derivatives are available in forward and reverse mode, in memory linear in T
    and S.

    >>> jattn.attention(q, k, v, mask=masks.Causal(), score=scores.SoftCap(30.0)).shape
    (2, 5, 4, 8)
    """
    call = make(
        query,
        key,
        value,
        lse=return_lse,
        implementation=implementation,
        mask=mask,
        score=score,
        scale=scale,
        sink=sink,
        q_positions=q_positions,
        kv_positions=kv_positions,
        dropout_rate=dropout_rate,
        dropout_key=dropout_key,
        precision=precision,
        normalizer=normalizer,
    )
    registry.check_name(implementation, cached=isinstance(key, Cache))
    if isinstance(key, Cache):
        return attend_cache(call, query, key)
    return attend(call, query, key, value)


def _shardings(call: Call, query: Array, *_: Any) -> Any:
    """Returns the shardings of out and normalizer on a mesh with explicit axes. They are sharded
    along batch, T and N as the queries are."""
    sharding = QuerySharding.of(query)
    return sharding.out, Normalizer(sharding.by_head, sharding.by_head)  # pyright: ignore[reportArgumentType]


@compiled()
def attend(call: Call, query: Array, key: Array, value: Array) -> Any:
    """Returns `out`, or `(out, lse)` if the call returns lse."""
    # The sink is applied outside of `partitioned_by_xla`, because residuals saved within it reach
    # the backward pass with explicit shardings. jattn's derivative rules convert these
    # (`in_context_mesh`); JAX's rules, which differentiate `with_sink`, do not.
    return call.with_sink(*_attend(call, query, key, value))


@partitioned_by_xla(_shardings)
def _attend(call: Call, query: Array, key: Array, value: Array) -> tuple[Output, Normalizer]:
    return call.unflattened(run(call.prepared(), *call.flattened(query, key, value)))


def run(call: Call, query: Array, key: Array, value: Array) -> tuple[Output, Normalizer]:
    """Computes `(out [B, T, N, V], normalizer of [B, N, T])`; see `Call.prepared` for the call."""
    functions = registry.functions(call)
    if functions is None:
        return reference.attend(call.spec, query, key, value)
    operands = (call.spec, query, key, value)
    return vjp.attention(functions, tangents.functions(), *operands, lse=call.needs_lse)


@compiled()
def attend_cache(call: Call, query: Array, cache: Cache) -> Any:
    """Computes attention to the slots of a cache. Batch rows that overflowed it get NaN."""
    return call.with_sink(*_attend_cache(call, query, cache))


@partitioned_by_xla(_shardings)
def _attend_cache(call: Call, query: Array, cache: Cache) -> tuple[Output, Normalizer]:
    prepared = call.prepared()
    if read_in_place := registry.reader(prepared, cache):
        results = decode.attend(prepared.spec, query, cache, read_in_place)
    else:
        key, value = (jnp.swapaxes(x, 1, 2).astype(query.dtype) for x in cache.read())
        results = run(prepared, query, key, value)
    return call.unflattened(cache.nan_if_overflowed(results))


@compiled("result")
@partitioned_by_xla(lambda _, query, *__, **___: QuerySharding.of(query).matrix)
def _matrix(
    call: Call, query: Array, key: Array | Cache, *, result: Literal["scores", "weights"]
) -> Array:
    """Computes scores or weights `[*B, N, T, S]` for keys, or for the slots of a cache. All are NaN
    in batch rows that overflowed the cache."""
    keys = jnp.swapaxes(key.read()[0], 1, 2).astype(query.dtype) if isinstance(key, Cache) else key
    spec, operands = call.prepared().spec, call.flattened(query, keys)
    matrix = (reference.scores if result == "scores" else reference.weights)(spec, *operands)
    if result == "weights" and call.sink is not None:
        matrix = with_sink_in_weights(matrix, reference.normalizer(spec, *operands), call.sink)
    if isinstance(key, Cache):
        matrix = key.nan_if_overflowed(matrix)
    return call.unflattened(matrix)


@advised(ScoreOptions)
@may_be_minus_infinity(0)
def attention_scores(query: Queries, key: Keys, **options: Unpack[ScoreOptions]) -> Weights:
    """Returns the scores before the softmax, `[*B, N, T, S]` in float32 (float64); −inf if masked.

    The options are mask, score, scale, precision and positions; they and the errors are those of
    `attention`. Memory grows with T × S.

    >>> print(jattn.attention_scores(0 * q, k, mask=masks.Causal())[0, 0, :2])
    [[  0. -inf -inf -inf -inf -inf -inf]
     [  0.   0. -inf -inf -inf -inf -inf]]
    """
    return _matrix(make(query, key, **options), query, key, result="scores")


@advised(WeightOptions)
@may_be_minus_infinity(0)  # with a sink, the log of the denominator is an intermediate result
def attention_weights(
    query: Queries, key: Keys | Cache, **options: Unpack[WeightOptions]
) -> Weights:
    """Returns the weights after softmax and dropout, `[*B, N, T, S]` in float32 (float64).

    `attention` with the same options and dropout_key multiplies the values by these weights. The
    weights of a query sum to 1 with the softmax, without dropout and sink; they are 0 if all its
    keys are masked. The keys of a cache are its slots. Options and errors as in `attention`. Memory
    grows with T × S.

    >>> print(jattn.attention_weights(0 * q, k, mask=masks.Causal())[0, 0, :2])
    [[1.  0.  0.  0.  0.  0.  0. ]
     [0.5 0.5 0.  0.  0.  0.  0. ]]
    """
    return _matrix(make(query, key, **options), query, key, result="weights")
