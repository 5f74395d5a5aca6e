"""Attention: arguments are checked, an implementation is chosen, one compiled pure function runs.

`attention` makes a `Call` of its arguments. `attend` is compiled once for each kind of call: `run`
hands the call to the reference, or with the kernels that `registry` chooses to `vjp.attention`,
which all kernels share.
"""

from typing import Any, Literal, Unpack, overload

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jattn._advised import advised
from jattn._debugging import may_be_minus_infinity
from jattn._explicit import Cuts, left_to_xla
from jattn._types import AnyArray, Keys, LogSumExp, Output, Queries, Values, Weights
from jattn.cache import Cache
from jattn.call import Call, compiled, make
from jattn.kernels import registry
from jattn.kernels.common import vjp
from jattn.kernels.xla import decode, reference, tangents
from jattn.masks import MaskLike
from jattn.options import Options, ScoreOptions, WeightOptions
from jattn.scores import ScoreLike
from jattn.softmax import with_sink_in_weights


IMPLEMENTATIONS = registry.NAMES
"""What `implementation` may name."""


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
    implementation: str | None = None,
    return_lse: bool = False,
) -> Any:
    """Scaled dot-product attention (Vaswani et al. 2017, equation 1), for any mask and score.

        out = dropout(softmax(mask(score(query keyᵀ × scale)))) value

    Args:
        query: `[*B, T, N, H]`, float16, bfloat16, float32 or float64.
        key: `[*B, S, K, H]`, of the same dtype. K divides N; query head n reads head n // (N / K).
        value: `[*B, S, K, V]`, of the same dtype. In place of key and value a cache of
            `jattn.cache`: its slots are the keys, it brings their positions and its own mask, and
            q_positions are by default those of the T tokens appended last.
        mask: a mask of `jattn.masks`, or a boolean array `[*B, N, T, S]` in which True attends and
            axes of size 1 broadcast.
        score: a score function of `jattn.scores`, applied after the scale and before the mask.
        scale: what query·key is multiplied with, by default 1/√H; a number, or a float array, a
            scalar or `[N]` with one for each head, which is then a parameter.
        sink: a logit for each head, a float array `[N]` or a scalar, that joins the softmax without
            a value and is a parameter: results are those of `with_sink`.
        q_positions: integer `[T]` or `[*B, T]`, by default arange(T): what formulas in masks and
            scores see. T and S are unrelated; with the default, Causal is top-left aligned.
        kv_positions: integer `[S]` or `[*B, S]`, by default arange(S).
        dropout_rate: in [0, 1). Acts on the normalised weights; kept ones grow by 1/(1 − rate).
        dropout_key: a JAX random key, needed if the rate is above 0.
        precision: of the matrix products, as in `jax.lax.Precision`.
        implementation: a name from `explain`, which then runs or raises; None takes the first that
            supports the call on the platform that the program is lowered for. A cache is read
            where it lies by "decode", which None takes for a few queries, and by "tpu", "pallas",
            "ampere" and "hopper" where it has the query's dtype and pages of whole tiles; other
            kernels read a copy.
        return_lse: also return the log of the softmax's denominator.

    Returns:
        `out [*B, T, N, V]` in the query's dtype, and with `return_lse` also `lse [*B, N, T]`, the
        natural log Σ exp(score) in float32 (float64 for float64). Sums run in float32 (float64).
        A query whose keys are all masked has out 0, lse −inf and gradient 0. What is masked does
        not exist: NaN in it reaches neither results nor gradients.

    Raises:
        TypeError, ValueError: for arguments that do not fit, before compilation.
        NotImplementedError: if the named implementation cannot, with its reason; for third
            derivatives, and for all but the first in reverse mode where a cache is decoded from,
            which implementation="reference" has.

    First and second derivatives come in every mode, in memory linear in T and S.
    """
    call = make(
        query,
        key,
        *(() if isinstance(key, Cache) and value is None else (value,)),
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
    )
    registry.check_name(implementation, cached=isinstance(key, Cache))
    if isinstance(key, Cache):
        return attend_cache(call, query, key)
    return attend(call, query, key, value)


def _cuts(call: Call, query: Array, *_: Any) -> Any:
    """How results are cut where that is part of types: as queries are."""
    cuts = Cuts.of(query)
    return (cuts.out, cuts.by_head) if call.lse else cuts.out


@compiled()
@left_to_xla(_cuts)
def attend(call: Call, query: Array, key: Array, value: Array) -> Any:
    """`out`, or `(out, lse)` if the call asks for it."""
    return call.finish(*run(call.prepared(), *call.flat(query, key, value)))


def run(call: Call, query: Array, key: Array, value: Array) -> tuple[Array, Array]:
    """`(out [B, T, N, V], lse [B, N, T])` of a prepared call."""
    functions = registry.functions(call)
    if functions is None:
        return reference.attend(call.spec, query, key, value)
    operands = (call.spec, query, key, value)
    return vjp.attention(functions, tangents.functions(), *operands, lse=call.needs_lse)


@compiled()
@left_to_xla(_cuts)
def attend_cache(call: Call, query: Array, cache: Cache) -> Any:
    """As `attend`, of the slots of a cache; NaN in its rows that overflowed."""
    prepared = call.prepared()
    if read := registry.reader(prepared, cache):
        out, lse = decode.attend(prepared.spec, query, cache, read)
    else:
        key, value = (jnp.swapaxes(x, 1, 2).astype(query.dtype) for x in cache.read())
        out, lse = run(prepared, query, key, value)
    return call.finish(*cache.nan_if_overflowed(out, lse))


def _matrix_cut(_: Call, query: Array, *__: Any, **___: Any) -> Any:
    return Cuts.of(query).matrix


@compiled("what")
@left_to_xla(_matrix_cut)
def _matrix(
    call: Call, query: Array, key: Array | Cache, *, what: Literal["scores", "weights"]
) -> Array:
    """`[*B, N, T, S]` of keys, or of the slots of a cache: NaN in its rows that overflowed."""
    keys = jnp.swapaxes(key.read()[0], 1, 2).astype(query.dtype) if isinstance(key, Cache) else key
    spec, flat = call.prepared().spec, call.flat(query, keys)
    if what == "scores":
        matrix = reference.scores(spec, *flat)
    else:
        matrix = reference.weights(spec, *flat)
    if what == "weights" and call.sink is not None:
        matrix = with_sink_in_weights(matrix, reference.lse(spec, *flat), call.sink)
    if isinstance(key, Cache):
        (matrix,) = key.nan_if_overflowed(matrix)
    return call.shaped(matrix)


@advised(ScoreOptions)
@may_be_minus_infinity(0)
def attention_scores(query: Queries, key: Keys, **options: Unpack[ScoreOptions]) -> Weights:
    """Returns the scores before the softmax, `[*B, N, T, S]` in float32 (float64), −inf where
    masked.

    Options and errors as in `attention`. Memory grows with T × S.
    """
    return _matrix(make(query, key, **options), query, key, what="scores")


@advised(WeightOptions)
@may_be_minus_infinity(0)  # the log of the denominator, on the way to a sink
def attention_weights(
    query: Queries, key: Keys | Cache, **options: Unpack[WeightOptions]
) -> Weights:
    """Returns the weights after softmax and dropout, `[*B, N, T, S]` in float32 (float64): those
    that `attention` multiplies values with, to the same dropout_key.

    Without dropout and sink rows sum to 1; a query whose keys are all masked has weights 0. The
    keys of a cache are its slots. Options and errors as in `attention`. Memory grows with T × S.
    """
    return _matrix(make(query, key, **options), query, key, what="weights")
