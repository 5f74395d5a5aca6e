"""Attention: arguments are checked, an implementation is chosen, one compiled pure function runs.

`attention` checks its arguments and makes a `Spec` of them, which says what is computed. `_attend`
is compiled once for each kind of call. `run` prepares the spec and hands it to the reference, or
with the kernels that can compute it to `vjp.attention`, which all kernels share.
"""

import functools
from typing import Any, Literal, TypeVar, overload

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int

from jattn._advice import advised
from jattn._debugging import may_be_minus_infinity
from jattn._explicit import Cuts, left_to_xla
from jattn._pytree import axis_names, axis_of
from jattn._types import AnyArray, Keys, LogSumExp, Output, Queries, Values, Weights
from jattn.cache import Cache
from jattn.checks import check_array, check_choice, check_flag
from jattn.explanation import Explanation
from jattn.kernels import registry
from jattn.kernels.common import lowering, vjp
from jattn.kernels.xla import decode, reference, tangents
from jattn.masks import MaskLike, as_mask
from jattn.scores import ScoreLike, as_score
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


SomeCache = TypeVar("SomeCache", bound=Cache)

IMPLEMENTATIONS = registry.NAMES
"""What `implementation` may name."""


@overload
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
    return_lse: Literal[False] = False,
    return_weights: Literal[False] = False,
) -> Output: ...
@overload
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
    return_lse: Literal[True],
    return_weights: Literal[False] = False,
) -> tuple[Output, LogSumExp]: ...
@overload
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
    return_lse: Literal[False] = False,
    return_weights: Literal[True],
) -> tuple[Output, Weights]: ...
@overload
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
    return_lse: Literal[True],
    return_weights: Literal[True],
) -> tuple[Output, LogSumExp, Weights]: ...
@advised
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
    return_weights: bool = False,
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
        return_weights: also return the weights, last; for looking at, as memory grows with T × S.

    Returns:
        `out [*B, T, N, V]` in the query's dtype, and with `return_lse` also `lse [*B, N, T]`, the
        natural log Σ exp(score) in float32 (float64 for float64). Sums run in float32 (float64).
        With `return_weights` also the `[*B, N, T, S]` of `attention_weights`.
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
    check_flag("return_weights", return_weights)
    meaning = {
        "mask": mask,
        "score": score,
        "scale": scale,
        "q_positions": q_positions,
        "kv_positions": kv_positions,
        "dropout_rate": dropout_rate,
        "dropout_key": dropout_key,
        "precision": precision,
        "lse": return_lse or sink is not None,
    }
    if isinstance(key, Cache):
        shapes, spec = check_cache(query, key, value, meaning)
    elif value is None:
        raise TypeError("value: expected an array [*B, S, K, V] to go with key, got None")
    else:
        shapes = check_shapes(query, key, value)
        spec = make_spec(shapes, **meaning)
    sink = None if sink is None else sink_by_head("sink", sink, shapes.N)
    results = _results(spec, query, key, value, implementation, shapes)
    found = results if sink is None else add_sink(results, sink, bool(return_lse))
    if not return_weights:
        return found
    weights = _weights(spec, query, key, shapes)
    if sink is not None:
        weights = with_sink_in_weights(weights, results[1], sink)
    return (*found, weights) if isinstance(found, tuple) else (found, weights)


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
        return _attend(spec, query, key, value, implementation=implementation, shapes=shapes)
    registry.check_name(implementation, "decode")
    if implementation == "decode":
        registry.refuse(implementation, decode.supports(spec, shapes))
    elif implementation is not None:
        registry.check_supported(implementation, spec, shapes)
    return _attend_cache(spec, query, key, implementation=implementation, shapes=shapes)


def _weights(spec: Spec, query: Array, key: Any, shapes: Shapes) -> Array:
    """`[*B, N, T, S]`, over the slots of a cache if `key` is one."""
    if isinstance(key, Cache):
        return _weights_of_cache(spec, query, key, shapes=shapes)
    return _matrix(spec, query, key, what="weights", shapes=shapes)


def _cuts(spec: Spec, query: Array, *_: Any, **__: Any) -> Any:
    """How results are cut where that is part of types: as queries are."""
    cuts = Cuts.of(query)
    return (cuts.out, cuts.by_head) if spec.lse else cuts.out


def _matrix_cut(_: Spec, query: Array, *__: Any, **___: Any) -> Any:
    return Cuts.of(query).matrix


@compiled("implementation", "shapes")
@left_to_xla(_cuts)
def _attend(
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


@compiled("shapes")
@left_to_xla(_matrix_cut)
def _weights_of_cache(spec: Spec, query: Array, cache: Cache, *, shapes: Shapes) -> Array:
    """`[B, N, T, S]` over the cache's slots, NaN in rows that overflowed."""
    key = jnp.swapaxes(cache.read()[0], 1, 2).astype(query.dtype)
    weights = _matrix(spec, query, key, what="weights", shapes=shapes)
    return jnp.where(cache.overflowed[:, None, None, None], jnp.nan, weights)


@compiled("implementation", "shapes")
@left_to_xla(_cuts)
def _attend_cache(
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
    query: Queries, cache: Cache, value: Any, meaning: dict[str, Any]
) -> tuple[Shapes, Spec]:
    """The sizes of a call on a cache, and its spec with the cache's own mask and positions."""
    for name, given in (("value", value), ("kv_positions", meaning.get("kv_positions"))):
        if given is not None:
            raise ValueError(f"{name}: a cache brings its own, expected None, got an array")
    B, K, S = cache.lengths.shape[0], cache.num_kv_heads, cache.capacity
    sizes = (cache.keys.shape[-1], cache.values.shape[-1])
    key, value = (jax.ShapeDtypeStruct((B, S, K, size), query.dtype) for size in sizes)
    shapes = check_shapes(query, key, value)
    own, mask = cache.mask(), meaning.get("mask")
    meaning = meaning | {
        "mask": own if mask is None else own & as_mask(mask),
        "kv_positions": cache.kv_positions,
    }
    if meaning.get("q_positions") is None:
        meaning["q_positions"] = cache.last_positions(shapes.T)
    return shapes, make_spec(shapes, **meaning)


@overload
def cached_attention(
    query: Queries,
    key: Keys,
    value: Values,
    cache: SomeCache,
    *,
    valid: Bool[AnyArray, "B T"] | None = None,
    mask: MaskLike = None,
    score: ScoreLike = None,
    scale: float | Array | None = None,
    sink: float | Float[AnyArray, "..."] | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Array | None = None,
    precision: Any = None,
    implementation: str | None = None,
    return_lse: Literal[False] = False,
    return_weights: Literal[False] = False,
) -> tuple[Output, SomeCache]: ...
@overload
def cached_attention(
    query: Queries,
    key: Keys,
    value: Values,
    cache: SomeCache,
    *,
    valid: Bool[AnyArray, "B T"] | None = None,
    mask: MaskLike = None,
    score: ScoreLike = None,
    scale: float | Array | None = None,
    sink: float | Float[AnyArray, "..."] | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Array | None = None,
    precision: Any = None,
    implementation: str | None = None,
    return_lse: Literal[True],
    return_weights: Literal[False] = False,
) -> tuple[tuple[Output, LogSumExp], SomeCache]: ...
@overload
def cached_attention(
    query: Queries,
    key: Keys,
    value: Values,
    cache: SomeCache,
    *,
    valid: Bool[AnyArray, "B T"] | None = None,
    mask: MaskLike = None,
    score: ScoreLike = None,
    scale: float | Array | None = None,
    sink: float | Float[AnyArray, "..."] | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Array | None = None,
    precision: Any = None,
    implementation: str | None = None,
    return_lse: Literal[False] = False,
    return_weights: Literal[True],
) -> tuple[tuple[Output, Weights], SomeCache]: ...
@overload
def cached_attention(
    query: Queries,
    key: Keys,
    value: Values,
    cache: SomeCache,
    *,
    valid: Bool[AnyArray, "B T"] | None = None,
    mask: MaskLike = None,
    score: ScoreLike = None,
    scale: float | Array | None = None,
    sink: float | Float[AnyArray, "..."] | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Array | None = None,
    precision: Any = None,
    implementation: str | None = None,
    return_lse: Literal[True],
    return_weights: Literal[True],
) -> tuple[tuple[Output, LogSumExp, Weights], SomeCache]: ...
@advised
@may_be_minus_infinity(1)
def cached_attention(
    query: Queries,
    key: Keys,
    value: Values,
    cache: Cache,
    *,
    valid: Bool[AnyArray, "B T"] | None = None,
    mask: MaskLike = None,
    score: ScoreLike = None,
    scale: float | Array | None = None,
    sink: float | Float[AnyArray, "..."] | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Array | None = None,
    precision: Any = None,
    implementation: str | None = None,
    return_lse: bool = False,
    return_weights: bool = False,
) -> Any:
    """Appends keys and values to a cache and attends to it: `(out [B, T, N, V], cache)`.

    Any number of tokens; what a `RollingCache` cannot take at once goes in pieces.

    Args:
        query: `[B, T, N, H]`.
        key: `[B, T, K, H]`.
        value: `[B, T, K, V]`.
        cache: a cache of `jattn.cache` for B rows.
        valid: bool `[B, T]`, False for padding, which is not appended and whose `out` means
            nothing.
        mask, score, scale, sink, dropout_rate, dropout_key, precision, implementation: as in
            `attention`. The cache knows the positions.
        return_lse: give `(out, lse [B, N, T])` in place of `out`, as `attention` does.
        return_weights: give `(out, weights [B, N, T, S])` in place of `out`, or `(out, lse,
            weights)`. S are the slots of the cache that is returned; where tokens go in pieces,
            those of the cache that their piece saw.

    Raises what `append` and `attention` raise, and NotImplementedError for dropout in pieces.
    """
    arguments: dict[str, Any] = {
        "mask": mask,
        "score": score,
        "scale": scale,
        "sink": sink,
        "dropout_rate": dropout_rate,
        "dropout_key": dropout_key,
        "precision": precision,
        "implementation": implementation,
        "return_lse": return_lse,
        "return_weights": return_weights,
    }
    if not isinstance(cache, Cache):
        raise TypeError(f"cache: expected a cache of jattn.cache, got {type(cache).__name__}")
    check_array("query", query, "[B, T, N, H]")
    if len(query.shape) != 4:
        raise ValueError(f"query: expected [B, T, N, H], got {list(query.shape)}")
    T, chunk = query.shape[1], getattr(cache, "chunk", query.shape[1])
    if T > chunk:
        return _in_pieces(query, key, value, cache, valid, arguments)
    positions = cache.next_positions(T, valid)
    grown: Any = cache.append(key, value, valid)
    return attention(query, grown, q_positions=positions, **arguments), grown


def _in_pieces(
    query: Queries, key: Keys, value: Values, cache: Any, valid: Any, arguments: dict[str, Any]
) -> tuple[Any, Any]:
    """`cached_attention` of as many tokens at a time as the cache takes."""
    if arguments.get("dropout_rate"):
        raise NotImplementedError(
            f"dropout of more tokens at a time than the cache takes ({cache.chunk})"
        )
    (B, T), chunk = query.shape[:2], cache.chunk
    pieces = -(-T // chunk)

    def split(x: Any, axis: int = 1) -> Array:
        x = jnp.moveaxis(jnp.asarray(x), axis, 0)
        x = jnp.pad(x, ((0, pieces * chunk - T), *((0, 0),) * (x.ndim - 1)))
        return jnp.moveaxis(x.reshape(pieces, chunk, *x.shape[1:]), 1, axis + 1)

    # Arrays of mask and score along T are split with the queries.
    rules = {"mask": as_mask(arguments.get("mask")), "score": as_score(arguments.get("score"))}
    leaves, structure = jax.tree.flatten(rules)
    letters = jax.tree.leaves([axis_names(rule) for rule in rules.values()])
    axes = [axis_of("T", name, x.ndim) for name, x in zip(letters, leaves, strict=True)]
    own = [
        None if axis is None or x.shape[axis] == 1 else split(x, axis)
        for axis, x in zip(axes, leaves, strict=True)
    ]

    def piece(cache: Cache, operands: Any) -> tuple[Cache, Any]:
        query, key, value, valid, own = operands
        here = [x if y is None else y for x, y in zip(leaves, own, strict=True)]
        given = arguments | jax.tree.unflatten(structure, here)
        out, cache = cached_attention(query, key, value, cache, valid=valid, **given)
        return cache, out

    valid = jnp.ones((B, T), bool) if valid is None else valid
    cache, results = jax.lax.scan(piece, cache, (*map(split, (query, key, value, valid)), own))

    def joined(x: Array, axis: int) -> Array:
        """Pieces `[pieces, B, …, chunk, …]`, with the chunk at this axis of a piece, in one."""
        x = jnp.moveaxis(x, 0, axis)
        x = x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
        return jax.lax.slice_in_dim(x, 0, T, axis=axis)

    if not isinstance(results, tuple):
        return joined(results, 1), cache
    out, *by_head = results
    return (joined(out, 1), *(joined(x, 2) for x in by_head)), cache


@advised
def explain(
    query: Queries,
    key: Keys | Cache,
    value: Values | None = None,
    *,
    platform: str | None = None,
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
    return_weights: bool = False,
) -> Explanation:
    """Which implementations can run `attention` with these arguments on a platform, how much of the
    scores they compute, and the memory that it takes.

    Maps each name to None where it can, else to its reason. `implementation=None` takes the first
    that can. Printed, it tells too which tiles the mask leaves, operations, bytes, temporaries of
    the compiled program, and what would be faster, see `jattn.explanation`. `platform` is "cpu",
    "cuda" or "gpu", "rocm" or "tpu": what the program is lowered for; by default where the query
    lies or, while tracing, where JAX puts arrays. The other arguments are those of `attention`;
    `implementation` and `return_weights` change nothing.
    """
    check_flag("return_lse", return_lse)
    check_flag("return_weights", return_weights)
    arguments = {
        "mask": mask,
        "score": score,
        "scale": scale,
        "q_positions": q_positions,
        "kv_positions": kv_positions,
        "dropout_rate": dropout_rate,
        "dropout_key": dropout_key,
        "precision": precision,
        "lse": return_lse or sink is not None,
    }
    check_choice("platform", platform, (None, "gpu", *lowering.PLATFORMS))
    platform = "cuda" if platform == "gpu" else platform or _platform_of(query)
    if isinstance(key, Cache):
        shapes, spec = check_cache(query, key, value, arguments)
        more = {"decode": decode.supports(spec, shapes)}
        program, operands = _attend_cache, (query, key)
    else:
        shapes = check_shapes(query, key, value)
        spec, more = make_spec(shapes, **arguments), {}
        program, operands = _attend, (query, key, value)
    if sink is not None:
        sink_by_head("sink", sink, shapes.N)
    lower = functools.partial(program.lower, implementation=None, shapes=shapes)
    here = platform == _platform_of(query)
    return Explanation(spec, shapes, platform, operands, lower if here else None, more)


def _platform_of(x: Any) -> str:
    """Where an array lies, or else would be put."""
    if isinstance(x, jax.Array) and not isinstance(x, Tracer):
        device = next(iter(x.devices()))
    else:
        device = getattr(jax.config, "jax_default_device", None) or jax.devices()[0]
    platform = device if isinstance(device, str) else device.platform
    if platform != "gpu":
        return platform
    from jax.extend.backend import get_backend  # noqa: PLC0415  it imports all of Pallas

    version = get_backend(platform).platform_version
    return "rocm" if "rocm" in version else "cuda"


@compiled("what", "shapes")
@left_to_xla(_matrix_cut)
def _matrix(spec: Spec, query: Array, key: Array, *, what: str, shapes: Shapes) -> Array:
    flat = [x.reshape(shapes.B, *x.shape[-3:]) for x in (query, key)]
    result = getattr(reference, what)(prepare(spec, shapes), *flat)
    (result,) = nan_if_overflowed(spec, result)
    return result.reshape(*shapes.batch, *result.shape[1:])


@advised
@may_be_minus_infinity(0)
def attention_scores(
    query: Queries,
    key: Keys,
    *,
    mask: MaskLike = None,
    score: ScoreLike = None,
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


@advised
@may_be_minus_infinity(0)  # the log of the denominator, on the way to a sink
def attention_weights(
    query: Queries,
    key: Keys,
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
) -> Weights:
    """Weights after softmax and dropout, `[*B, N, T, S]` in float32 (float64): those that
    `attention` multiplies values with, to the same dropout_key.

    Without dropout and sink rows sum to 1; a query whose keys are all masked has weights 0.
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
        dropout_rate=dropout_rate,
        dropout_key=dropout_key,
        precision=precision,
    )
    weights = _matrix(spec, query, key, what="weights", shapes=shapes)
    if sink is None:
        return weights
    sink = sink_by_head("sink", sink, shapes.N)
    return with_sink_in_weights(weights, _matrix(spec, query, key, what="lse", shapes=shapes), sink)
