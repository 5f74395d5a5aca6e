"""Attention: arguments are checked, an implementation is chosen, one compiled pure function runs.

`attention` checks its arguments and makes a `Spec` of them, which says what is computed. `attend`
is compiled once for each kind of call. `run` prepares the spec and hands it to the reference, or
with the kernels that can compute it to `vjp.attention`, which all kernels share.
"""

from typing import Any, Literal, Unpack, overload

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jattn._advised import advised
from jattn._debugging import may_be_minus_infinity
from jattn._explicit import Cuts, left_to_xla
from jattn._types import AnyArray, Keys, LogSumExp, Output, Queries, Values, Weights
from jattn.cache import Cache
from jattn.checks import check_flag
from jattn.kernels import registry
from jattn.kernels.common import vjp
from jattn.kernels.xla import decode, reference, tangents
from jattn.masks import MaskLike, as_mask
from jattn.options import Options, ScoreOptions, WeightOptions
from jattn.scores import ScoreLike
from jattn.softmax import add_sink, sink_by_head, with_sink_in_weights
from jattn.spec import (
    Shapes,
    Spec,
    check_shapes,
    compiled,
    make_spec,
    nan_if_overflowed,
    prepare,
)


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
    check_flag("return_lse", return_lse)
    options: WeightOptions = {
        "mask": mask,
        "score": score,
        "scale": scale,
        "sink": sink,
        "q_positions": q_positions,
        "kv_positions": kv_positions,
        "dropout_rate": dropout_rate,
        "dropout_key": dropout_key,
        "precision": precision,
    }
    shapes, spec = check_call(query, key, value, lse=return_lse, **options)
    sink = None if sink is None else sink_by_head("sink", sink, shapes.N)
    results = _results(spec, query, key, value, implementation, shapes)
    return results if sink is None else add_sink(results, sink, bool(return_lse))


def check_call(
    query: Any, key: Any, value: Any, *, lse: bool, **options: Unpack[WeightOptions]
) -> tuple[Shapes, Spec]:
    """Returns the sizes of a call on keys and values, or on a cache, and its spec.

    Raises TypeError and ValueError, naming the argument.
    """
    if isinstance(key, Cache):
        return check_cache(query, key, value, lse=lse, **options)
    if value is None:
        raise TypeError("value: expected an array [*B, S, K, V] to go with key, got None")
    shapes = check_shapes(query, key, value)
    return shapes, make_spec(shapes, lse=lse, **options)


def _results(
    spec: Spec,
    query: Array,
    key: Any,
    value: Any,
    implementation: str | None,
    shapes: Shapes,
) -> Any:
    """`out`, or `(out, lse)` if the spec asks for it, of keys and values or of a cache."""
    if not isinstance(key, Cache):
        registry.check_name(implementation)
        if implementation is not None:
            registry.check_supported(implementation, spec, shapes)
        return attend(spec, query, key, value, implementation=implementation, shapes=shapes)
    registry.check_name(implementation, "decode")
    if implementation == "decode":
        registry.refuse(implementation, decode.supports(spec, shapes))
    elif implementation is not None:
        registry.check_supported(implementation, spec, shapes)
    return attend_cache(spec, query, key, implementation=implementation, shapes=shapes)


def _cuts(spec: Spec, query: Array, *_: Any, **__: Any) -> Any:
    """How results are cut where that is part of types: as queries are."""
    cuts = Cuts.of(query)
    return (cuts.out, cuts.by_head) if spec.lse else cuts.out


def _matrix_cut(_: Spec, query: Array, *__: Any, what: str, **___: Any) -> Any:
    return Cuts.of(query).by_head if what == "lse" else Cuts.of(query).matrix


@compiled("implementation", "shapes")
@left_to_xla(_cuts)
def attend(
    spec: Spec,
    query: Array,
    key: Array,
    value: Array,
    *,
    implementation: str | None,
    shapes: Shapes,
) -> Any:
    """`out`, or `(out, lse)` if the spec asks for it."""
    query, key, value = (x.reshape(shapes.B, *x.shape[-3:]) for x in (query, key, value))
    results = run(implementation, spec, query, key, value, shapes)
    out, lse = nan_if_overflowed(spec, *results)
    out = out.reshape(*shapes.batch, *out.shape[1:])
    return (out, lse.reshape(*shapes.batch, *lse.shape[1:])) if spec.lse else out


def run(
    implementation: str | None, spec: Spec, query: Array, key: Array, value: Array, shapes: Shapes
) -> tuple[Array, Array]:
    """`(out [B, T, N, V], lse [B, N, T])` for one flat batch axis."""
    named = implementation is not None
    names = [implementation] if named else registry.candidates(spec, shapes)
    spec = prepare(spec, shapes)
    if names == ["reference"]:
        return reference.attend(spec, query, key, value)
    functions, traced = registry.functions(names, shapes, named=named)
    return vjp.attention(functions, tangents.functions(), spec, query, key, value, traced)


@compiled("what", "shapes")
@left_to_xla(_matrix_cut)
def _matrix_of_cache(spec: Spec, query: Array, cache: Cache, *, what: str, shapes: Shapes) -> Array:
    """`_matrix` over the slots of a cache, NaN in rows that overflowed."""
    key = jnp.swapaxes(cache.read()[0], 1, 2).astype(query.dtype)
    matrix = _matrix(spec, query, key, what=what, shapes=shapes)
    overflowed = cache.overflowed.reshape(-1, *(1,) * (matrix.ndim - 1))
    return jnp.where(overflowed, jnp.nan, matrix)


@compiled("implementation", "shapes")
@left_to_xla(_cuts)
def attend_cache(
    spec: Spec, query: Array, cache: Cache, *, implementation: str | None, shapes: Shapes
) -> Any:
    if implementation is None and not decode.supports(spec, shapes):
        implementation = "decode"
    own = prepare(spec, shapes)
    if implementation == "decode":
        out, lse = decode.attend(own, query, cache)
    elif forward := registry.decoder(implementation, own, shapes, cache):
        out, lse = decode.attend(own, query, cache, forward)
    else:
        key, value = (jnp.swapaxes(x, 1, 2).astype(query.dtype) for x in cache.read())
        out, lse = run(implementation, spec, query, key, value, shapes)
    return cache_results(spec, cache.overflowed, out, lse)


def cache_results(spec: Spec, overflowed: Array, out: Array, lse: Array) -> Any:
    """`out`, or `(out, lse)` if the spec asks for it, NaN in rows of a cache that overflowed."""
    out, lse = nan_if_overflowed(spec, out, lse)
    out = jnp.where(overflowed[:, None, None, None], jnp.nan, out)
    return (out, jnp.where(overflowed[:, None, None], jnp.nan, lse)) if spec.lse else out


def check_cache(
    query: Any, cache: Cache, value: Any, *, lse: bool = False, **options: Unpack[WeightOptions]
) -> tuple[Shapes, Spec]:
    """Returns the sizes of a call on a cache, and its spec with the cache's mask and positions."""
    for name, given in (("value", value), ("kv_positions", options.get("kv_positions"))):
        if given is not None:
            raise ValueError(f"{name}: a cache brings its own, expected None, got an array")
    B, K, S = cache.lengths.shape[0], cache.num_kv_heads, cache.capacity
    sizes = (cache.keys.shape[-1], cache.values.shape[-1])
    keys, values = (jax.ShapeDtypeStruct((B, S, K, size), query.dtype) for size in sizes)
    shapes = check_shapes(query, keys, values)
    held, mask = cache.mask(), options.get("mask")
    options["mask"] = held if mask is None else held & as_mask(mask)
    options["kv_positions"] = cache.kv_positions
    if options.get("q_positions") is None:
        options["q_positions"] = cache.last_positions(shapes.T)
    return shapes, make_spec(shapes, lse=lse, **options)


@compiled("what", "shapes")
@left_to_xla(_matrix_cut)
def _matrix(spec: Spec, query: Array, key: Array, *, what: str, shapes: Shapes) -> Array:
    flat = [x.reshape(shapes.B, *x.shape[-3:]) for x in (query, key)]
    result = getattr(reference, what)(prepare(spec, shapes), *flat)
    (result,) = nan_if_overflowed(spec, result)
    return result.reshape(*shapes.batch, *result.shape[1:])


@advised(ScoreOptions)
@may_be_minus_infinity(0)
def attention_scores(query: Queries, key: Keys, **options: Unpack[ScoreOptions]) -> Weights:
    """Returns the scores before the softmax, `[*B, N, T, S]` in float32 (float64), −inf where
    masked.

    Options and errors as in `attention`. Memory grows with T × S.
    """
    shapes = check_shapes(query, key)
    return _matrix(make_spec(shapes, **options), query, key, what="scores", shapes=shapes)


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
    sink = options.get("sink")
    if isinstance(key, Cache):
        shapes, spec = check_cache(query, key, None, **options)
        matrix = _matrix_of_cache
    else:
        shapes = check_shapes(query, key)
        spec, matrix = make_spec(shapes, **options), _matrix
    weights = matrix(spec, query, key, what="weights", shapes=shapes)
    if sink is None:
        return weights
    lse = matrix(spec, query, key, what="lse", shapes=shapes)
    return with_sink_in_weights(weights, lse, sink_by_head("sink", sink, shapes.N))
