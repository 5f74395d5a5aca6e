"""Attention: checks the arguments, chooses an implementation, runs one compiled pure function.

`attention` makes a `Call` of its arguments. `attend` is compiled once for each kind of call: `run`
passes the call to the reference, or to `vjp.attention`, which all kernels share, with the kernels
that `registry` chooses.
"""

from typing import Any, Literal, Unpack, overload

import jax.numpy as jnp
from jaxtyping import Array

from jattn._advised import advised
from jattn._debugging import may_be_minus_infinity
from jattn._explicit import Cuts, left_to_xla
from jattn._types import Keys, LogSumExp, Output, Queries, Values, Weights
from jattn.cache import Cache
from jattn.call import Call, compiled, make
from jattn.kernels import registry
from jattn.kernels.common import vjp
from jattn.kernels.xla import decode, reference, tangents
from jattn.options import Options, ScoreOptions, WeightOptions
from jattn.softmax import with_sink_in_weights


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
@advised(Options)
@may_be_minus_infinity(1)
def attention(
    query: Queries,
    key: Keys | Cache,
    value: Values | None = None,
    *,
    return_lse: bool = False,
    **options: Unpack[Options],
) -> Any:
    """Scaled dot-product attention (Vaswani et al. 2017, equation 1), for any mask and score.

        out = dropout(softmax(mask(score(query keyᵀ × scale)))) value

    Args:
        query: `[*B, T, N, H]`, float16, bfloat16, float32 or float64.
        key: `[*B, S, K, H]`, of the same dtype. K divides N; query head n reads head n // (N / K).
        value: `[*B, S, K, V]`, of the same dtype. A cache of `jattn.cache` may replace key and
            value: its slots are the keys, with their positions and the cache's mask, and
            q_positions default to those of the T tokens appended last.
        mask: a mask of `jattn.masks`, or a boolean array `[*B, N, T, S]` in which True attends and
            axes of size 1 broadcast.
        score: a score function of `jattn.scores`, applied after the scale and before the mask.
        scale: the factor of query·key, by default 1/√H; a number, or a float array, scalar or
            `[N]` with one factor for each head, which is then a parameter.
        sink: a logit for each head, a float array `[N]` or a scalar, that joins the softmax without
            a value and is a parameter: results are those of `with_sink`.
        q_positions: integer `[T]` or `[*B, T]`, by default arange(T): the positions that formulas
            in masks and scores see. T and S are unrelated; with the default, Causal is top-left
            aligned.
        kv_positions: integer `[S]` or `[*B, S]`, by default arange(S).
        dropout_rate: in [0, 1). Acts on the normalised weights; kept weights are multiplied by
            1/(1 − rate).
        dropout_key: a JAX random key, needed if the rate is above 0.
        precision: of the matrix products, as in `jax.lax.Precision`.
        implementation: a name from `explain`, which then runs or raises; None takes the first that
            supports the call on the platform that the program is lowered for. "decode", which None
            takes for a few queries, reads a cache in place; so do "tpu", "pallas", "ampere" and
            "hopper" if it has the query's dtype and pages of whole tiles. Other kernels read a
            copy.
        return_lse: also return the log of the softmax's denominator.

    Returns:
        `out [*B, T, N, V]` in the query's dtype, and with `return_lse` also `lse [*B, N, T]`, the
        natural log Σ exp(score) in float32 (float64 for float64). Sums run in float32 (float64).
        A query whose keys are all masked has out 0, lse −inf and gradient 0. What is masked does
        not exist: NaN in it reaches neither results nor gradients.

    Raises:
        TypeError, ValueError: for arguments that do not fit, before compilation.
        NotImplementedError: if the named implementation cannot, with its reason; for third
            derivatives and, in calls that "decode" a cache, for all but the first in reverse mode;
            implementation="reference" has all of them.

    First and second derivatives come in every mode, in memory linear in T and S.

    >>> jattn.attention(q, k, v, mask=masks.Causal(), score=scores.SoftCap(30.0)).shape
    (2, 5, 4, 8)
    """
    call = make(query, key, value, lse=return_lse, **options)
    registry.check_name(call.implementation, cached=isinstance(key, Cache))
    if isinstance(key, Cache):
        return attend_cache(call, query, key)
    return attend(call, query, key, value)


def _cuts(call: Call, query: Array, *_: Any) -> Any:
    """Returns how the results are sharded if types say so: like the queries."""
    cuts = Cuts.of(query)
    return (cuts.out, cuts.by_head) if call.lse else cuts.out


@compiled()
@left_to_xla(_cuts)
def attend(call: Call, query: Array, key: Array, value: Array) -> Any:
    """Returns `out`, or `(out, lse)` if the call returns lse."""
    return call.finish(*run(call.prepared(), *call.flat(query, key, value)))


def run(call: Call, query: Array, key: Array, value: Array) -> tuple[Array, Array]:
    """Computes `(out [B, T, N, V], lse [B, N, T])` of a prepared call."""
    functions = registry.functions(call)
    if functions is None:
        return reference.attend(call.spec, query, key, value)
    operands = (call.spec, query, key, value)
    return vjp.attention(functions, tangents.functions(), *operands, lse=call.needs_lse)


@compiled()
@left_to_xla(_cuts)
def attend_cache(call: Call, query: Array, cache: Cache) -> Any:
    """Computes attention to the slots of a cache; results of rows that overflowed are NaN."""
    prepared = call.prepared()
    if read := registry.reader(prepared, cache):
        out, lse = decode.attend(prepared.spec, query, cache, read)
    else:
        key, value = (jnp.swapaxes(x, 1, 2).astype(query.dtype) for x in cache.read())
        out, lse = run(prepared, query, key, value)
    return call.finish(*cache.nan_if_overflowed(out, lse))


@compiled("what")
@left_to_xla(lambda _, query, *__, **___: Cuts.of(query).matrix)
def _matrix(
    call: Call, query: Array, key: Array | Cache, *, what: Literal["scores", "weights"]
) -> Array:
    """Computes scores or weights `[*B, N, T, S]` for keys, or for the slots of a cache; rows of the
    cache that overflowed are NaN."""
    keys = jnp.swapaxes(key.read()[0], 1, 2).astype(query.dtype) if isinstance(key, Cache) else key
    spec, flat = call.prepared().spec, call.flat(query, keys)
    matrix = (reference.scores if what == "scores" else reference.weights)(spec, *flat)
    if what == "weights" and call.sink is not None:
        matrix = with_sink_in_weights(matrix, reference.lse(spec, *flat), call.sink)
    if isinstance(key, Cache):
        (matrix,) = key.nan_if_overflowed(matrix)
    return call.shaped(matrix)


@advised(ScoreOptions)
@may_be_minus_infinity(0)
def attention_scores(query: Queries, key: Keys, **options: Unpack[ScoreOptions]) -> Weights:
    """Returns the scores before the softmax, `[*B, N, T, S]` in float32 (float64); −inf if masked.

    Options and errors as in `attention`. Memory grows with T × S.

    >>> print(jattn.attention_scores(0 * q, k, mask=masks.Causal())[0, 0, :2])
    [[  0. -inf -inf -inf -inf -inf -inf]
     [  0.   0. -inf -inf -inf -inf -inf]]
    """
    return _matrix(make(query, key, **options), query, key, what="scores")


@advised(WeightOptions)
@may_be_minus_infinity(0)  # the log of the denominator, an intermediate result with a sink
def attention_weights(
    query: Queries, key: Keys | Cache, **options: Unpack[WeightOptions]
) -> Weights:
    """Returns the weights after softmax and dropout, `[*B, N, T, S]` in float32 (float64): those
    with which `attention` multiplies values, given the same dropout_key.

    Without dropout and sink rows sum to 1; a query whose keys are all masked has weights 0. The
    keys of a cache are its slots. Options and errors as in `attention`. Memory grows with T × S.

    >>> print(jattn.attention_weights(0 * q, k, mask=masks.Causal())[0, 0, :2])
    [[1.  0.  0.  0.  0.  0.  0. ]
     [0.5 0.5 0.  0.  0.  0.  0. ]]
    """
    return _matrix(make(query, key, **options), query, key, what="weights")
