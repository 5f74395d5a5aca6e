"""Linear attention: weights that are products of features, with a running state for decoding.

The weight of key j for query i is φ(q_i)·φ(k_j), so the sums over keys do not depend on the query,
and time and memory are linear in the tokens (Katharopoulos et al. 2020). With decays it is the
recurrence of RetNet (Sun et al. 2023), Mamba-2 (Dao and Gu 2024) and gated linear attention (Yang
et al. 2024). The main function is `linear_attention`. F is the number of features.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, Literal, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from jattn import tuning
from jattn._advised import advised
from jattn._explicit import partitioned_by_xla, sharding_of, varied_like
from jattn._pytree import pytree_dataclass
from jattn._types import AnyArray, Keys, Output, Queries, Shape, Values, accumulation
from jattn.checks import (
    check_array,
    check_dtype,
    check_flag,
    check_function,
    check_key,
    check_like,
    check_size,
    check_sizes,
    function_name,
)
from jattn.functions.integers import is_known
from jattn.kernels import registry
from jattn.kernels.common.lowering import platform_dependent
from jattn.kernels.common.partition import partitioned_linear
from jattn.kernels.xla.linear import Formula, Sums, attend, elu_plus_one
from jattn.softmax import quotient


__all__ = ["LinearState", "RandomFeatures", "linear_attention"]
__dir__ = __all__.copy

FeatureMap = Callable[[Array], Array]
Decays = Float[AnyArray, " K"] | Float[AnyArray, "*B S K"] | Float[AnyArray, "*B S K F"]


@pytree_dataclass
class LinearState:
    """The state of linear attention after some tokens: sums of fixed size.

    `values [*B, K, F, V]` is the decayed sum of φ(key) ⊗ value, `keys [*B, K, F]` that of φ(key),
    in float32 (float64 for float64), and `segment [*B]` the id of the last token's document.

    >>> jattn.LinearState.create(3, 8, 5, batch=(2,)).values.shape
    (2, 3, 8, 5)
    """

    values: Float[Array, "*B K F V"]
    keys: Float[Array, "*B K F"]
    segment: Int[Array, "*B"]

    @classmethod
    def create(
        cls,
        num_kv_heads: int,
        num_features: int,
        value_size: int,
        *,
        batch: Shape = (),
        dtype: Any = jnp.float32,
    ) -> "LinearState":
        """Returns the state before the first token, for queries of this dtype.

        Raises TypeError or ValueError unless the sizes are positive integers.
        """
        check_sizes(num_kv_heads=num_kv_heads, num_features=num_features, value_size=value_size)
        check_dtype("dtype", dtype)
        keys = jnp.zeros((*batch, num_kv_heads, num_features), accumulation(dtype))
        values = jnp.zeros((*keys.shape, value_size), keys.dtype)
        return cls(values, keys, jnp.zeros(batch, jnp.int32))


@pytree_dataclass
class RandomFeatures:
    """Random features of the softmax kernel (FAVOR+, Choromanski et al. 2021, section 2).

    A feature map φ with E[φ(q)·φ(k)] = exp(q·k / √H), so that `linear_attention` approximates
    `attention`: φ(x)_f = exp(w_f·y − |y|²/2) / √F with y = x / H^(1/4). The rows w of
    `projection [F, H]` are orthogonal in groups of H, with the lengths of Gaussian vectors. The
    error falls as 1/√F, and grows exponentially with the scores q·k / √H. If |x|² is greater than
    about 170 √H, features may underflow to 0 in float32, and tokens lose their weights.

    >>> features = jattn.RandomFeatures.create(jax.random.key(0), 64, 8)
    >>> jattn.linear_attention(q, k, v, feature_map=features, causal=False).shape
    (2, 5, 4, 8)
    """

    projection: Float[Array, "F H"]

    @classmethod
    def create(
        cls, key: Array, num_features: int, head_size: int, *, dtype: Any = jnp.float32
    ) -> "RandomFeatures":
        """Draws F = `num_features` rows for queries and keys of H = `head_size` numbers.

        Raises TypeError or ValueError for a key that is not a JAX random key, and for sizes that
        are not positive integers.
        """
        check_key("key", key)
        check_sizes(num_features=num_features, head_size=head_size)
        check_dtype("dtype", dtype)
        directions, lengths = jax.random.split(key)
        blocks = -(-num_features // head_size)
        rows = jax.random.orthogonal(directions, head_size, (blocks,), dtype=dtype)
        normal = jax.random.normal(lengths, (num_features, head_size), dtype)
        length = jnp.linalg.norm(normal, axis=-1, keepdims=True)
        return cls(rows.reshape(-1, head_size)[:num_features] * length)

    def __call__(self, x: Float[Array, "*B H"]) -> Float[Array, "*B F"]:
        """Returns the features of vectors `[..., H]`, `[..., F]` in their dtype.

        Raises ValueError for vectors of another size.
        """
        F, H = self.projection.shape
        check_array("x", x, f"[..., H = {H}]", ndim=1)
        if x.shape[-1] != H:
            raise ValueError(f"x: expected [..., H = {H}], got {list(x.shape)}")
        x = x * H**-0.25
        projection = self.projection.astype(x.dtype)
        logits = jnp.einsum("...h,fh->...f", x, projection, precision="highest")
        return jnp.exp(logits - jnp.sum(x * x, axis=-1, keepdims=True) / 2) * F**-0.5


class _Options(TypedDict, total=False):
    """The options of `linear_attention` except `return_state`."""

    feature_map: FeatureMap | None
    log_decay: Decays | None
    causal: bool
    normalize: bool
    segments: Int[AnyArray, "*B S"] | None
    valid: Bool[AnyArray, "*B S"] | None
    state: LinearState | None
    chunk: int | None


@overload
def linear_attention(
    query: Queries,
    key: Keys,
    value: Values,
    *,
    return_state: Literal[False] = False,
    **options: Unpack[_Options],
) -> Output: ...
@overload
def linear_attention(
    query: Queries,
    key: Keys,
    value: Values,
    *,
    return_state: Literal[True],
    **options: Unpack[_Options],
) -> tuple[Output, LinearState]: ...
@advised()
def linear_attention(
    query: Queries,
    key: Keys,
    value: Values,
    *,
    feature_map: FeatureMap | None = None,
    log_decay: Decays | None = None,
    causal: bool = True,
    normalize: bool = True,
    segments: Int[AnyArray, "*B S"] | None = None,
    valid: Bool[AnyArray, "*B S"] | None = None,
    state: LinearState | None = None,
    return_state: bool = False,
    chunk: int | None = None,
) -> Any:
    """Linear attention (Katharopoulos et al. 2020), in time and memory linear in the tokens.

        out_i = Σ_j w_ij value_j / Σ_j w_ij,   w_ij = φ(query_i)·φ(key_j)

    With causal=True the sums go over j ≤ i, and `log_decay` g multiplies the weights:
    w_ij = Σ_f φ(query_i)_f φ(key_j)_f exp(g_(j+1)f + ... + g_if).

    Args:
        query: `[*B, T, N, H]`, float16, bfloat16, float32 or float64.
        key: `[*B, S, K, H]`, of the same dtype. K divides N; query head n reads head n // (N / K).
        value: `[*B, S, K, V]`, of the same dtype.
        feature_map: φ, a function of arrays `[..., H]` in float32 (float64) that returns
            `[..., F]`, such as `RandomFeatures` or `lambda x: x`. The default is elu(x) + 1.
        log_decay: natural logs of decays, at most 0, −inf to forget: `[K]` for each head (RetNet,
            Sun et al. 2023), `[*B, S, K]` for each token (Mamba-2, Dao and Gu 2024), or
            `[*B, S, K, F]` for each feature (gated linear attention, Yang et al. 2024). The decay
            of a token multiplies the sums of the tokens before it. Logs above 0 raise an error only
            in a concrete `[K]`; elsewhere they may make results overflow.
        causal: whether query i sees keys up to i only; requires T = S.
        normalize: whether to divide by the sum of the weights; False for RetNet and gated linear
            attention. Without weights the output is 0.
        segments: integer ids `[*B, S]` of documents packed into a sequence; requires T = S. A token
            whose id differs from that of the token before it begins a new document, and tokens see
            their own document only. Ids are compared as 32-bit integers.
        valid: boolean `[*B, S]`. Tokens at False are padding: as if they were removed from key,
            value, log_decay and segments. If causal, or with segments, query i belongs to token i,
            so queries that are padding have output 0.
        state: the state after earlier tokens, from `return_state=True`: calls for parts of the
            tokens, in order, equal one call. The first token continues the state's document;
            with `segments`, only if it has the same id.
        return_state: whether to return the state after the S tokens too.
        chunk: the number of tokens whose weights one matrix product computes, a power of two. By
            default it is the fastest one measured, and a kernel in C++ computes the results on
            CPUs. It changes results by rounding only.

    Returns:
        `out [*B, T, N, V]` in the query's dtype, and with `return_state` also a `LinearState`.
        Features and sums are computed in float32 (float64 for float64).

    Raises:
        TypeError, ValueError: for wrong arguments.

    Derivatives of any order are available in forward and reverse mode. A valid token that is not
    finite, or whose products overflow, may make the outputs of its chunk and of all later ones NaN.

    >>> out, state = jattn.linear_attention(k, k, v, return_state=True)
    >>> step = k[:, :1], k[:, :1], v[:, :1]
    >>> jattn.linear_attention(*step, state=state).shape
    (2, 1, 2, 8)
    """
    _check(query, key, value, causal=causal, segments=segments, valid=valid)
    _check_options(feature_map, normalize=normalize, return_state=return_state, chunk=chunk)
    query, key, value = (jnp.asarray(x) for x in (query, key, value))
    dtype = accumulation(query.dtype)
    by_token = causal or segments is not None
    maps = by_token and feature_map is None and valid is None
    if maps:
        features = query.astype(dtype), key.astype(dtype)
    else:
        features = (
            _features("query", feature_map, query, valid if by_token else None, dtype),
            _features("key", feature_map, key, valid, dtype),
        )
    F, (*batch, _, K, V) = features[1].shape[-1], value.shape
    if features[0].shape[-1] != F:
        raise ValueError(
            f"feature_map: expected as many features of queries as of keys, got "
            f"{features[0].shape[-1]} and {F}"
        )
    if log_decay is not None:
        _check_decay(log_decay, causal, (*batch, key.shape[-3], K, F))
    if state is None:
        state = LinearState.create(K, F, V, batch=tuple(batch), dtype=dtype)
    else:
        _check_state(state, (*batch, K, F, V), dtype)
    operands = (*features, value, log_decay, segments, valid, state)
    how = {"causal": causal, "normalize": normalize, "maps": maps, "chunk": chunk}
    out, state = _attend(*operands, **how)
    out = out.astype(query.dtype)
    return (out, state) if return_state else out


def _check(query: Any, key: Any, value: Any, *, causal: Any, segments: Any, valid: Any) -> None:
    """Raises TypeError or ValueError unless the arrays of tokens fit one another."""
    check_flag("causal", causal)
    check_array("query", query, "[*B, T, N, H]", ndim=3)
    *batch, T, N, H = query.shape
    for name, array, letters in (("key", key, "[*B, S, K, H]"), ("value", value, "[*B, S, K, V]")):
        check_array(name, array, letters, rank=query.ndim)
        check_like(name, array, query)
        _check_shape(name, f"{letters} with *B = {batch}", array, [*batch, *array.shape[-3:]])
    S, K = key.shape[-3:-1]
    _check_shape("key", f"[*B, S, K, H = {H}]", key, [*batch, S, K, H])
    _check_shape("value", f"[*B, S = {S}, K = {K}, V]", value, [*batch, S, K, value.shape[-1]])
    for name, letter, size in (("query", "H", H), ("value", "V", value.shape[-1])):
        if size == 0:
            raise ValueError(f"{name}: expected {letter} >= 1, got 0")
    if K == 0 or N % K:
        raise ValueError(f"key: expected K that divides N = {N}, got K = {K}")
    if (causal or segments is not None) and T != S:
        reason = "causal=True" if causal else "segments"
        raise ValueError(f"key: expected S = T = {T} with {reason}, got S = {S}")
    for name, array, kind in (("segments", segments, "integer"), ("valid", valid, "boolean")):
        if array is not None:
            check_array(name, array, "[*B, S]", kind, shape=(*batch, S))


def _check_shape(name: str, wanted: str, array: Any, shape: list[Any]) -> None:
    if list(array.shape) != shape:
        raise ValueError(f"{name}: expected {wanted}, got {list(array.shape)}")


def _check_options(feature_map: Any, *, normalize: Any, return_state: Any, chunk: Any) -> None:
    check_flag("normalize", normalize)
    check_flag("return_state", return_state)
    if feature_map is not None:
        check_function("feature_map", feature_map)
    if chunk is not None:
        check_size("chunk", chunk)
        if chunk & (chunk - 1):
            raise ValueError(f"chunk: expected a power of two, got {chunk}")


def _check_decay(log_decay: Any, causal: bool, sizes: Shape) -> None:
    """Raises TypeError or ValueError unless the log decays fit `[*B, S, K, F]`."""
    letters = "[K], [*B, S, K] or [*B, S, K, F]"
    check_array("log_decay", log_decay, letters)
    if not causal:
        raise ValueError("log_decay: expected None with causal=False, got an array")
    shape = tuple(log_decay.shape)
    if shape not in ((sizes[-2],), sizes[:-1], sizes):
        wanted = f"{[sizes[-2]]}, {[*sizes[:-1]]} or {[*sizes]}"
        raise ValueError(f"log_decay: expected {letters} = {wanted}, got {[*shape]}")
    if len(shape) == 1 and is_known(log_decay) and max(log_decay.tolist()) > 0:
        raise ValueError(
            f"log_decay: expected natural logs of decays, at most 0, got {max(log_decay.tolist())}"
        )


def _check_state(state: Any, sizes: Shape, dtype: Any) -> None:
    """Raises TypeError or ValueError unless this is a state `[*B, K, F, V]` of this dtype."""
    if not isinstance(state, LinearState):
        raise TypeError(f"state: expected a LinearState, got {type(state).__name__}")
    check_array("state.values", state.values, "[*B, K, F, V]", shape=sizes)
    check_array("state.keys", state.keys, "[*B, K, F]", shape=sizes[:-1])
    check_array("state.segment", state.segment, "[*B]", "integer", shape=sizes[:-3])
    for name, array in (("values", state.values), ("keys", state.keys)):
        if array.dtype != dtype:
            raise TypeError(f"state.{name}: expected {jnp.dtype(dtype)}, got {array.dtype}")


def _features(
    name: str, feature_map: FeatureMap | None, x: Any, exists: Any, dtype: Any
) -> Float[Array, "*B T N F"]:
    """Returns the features of queries or keys, computed in this dtype; 0 for padding."""
    feature_map = feature_map or elu_plus_one
    x = _or_zero(jnp.asarray(x).astype(dtype), exists)
    features = feature_map(x)
    check_array(f"feature_map({name})", features, "[..., F]")
    if features.shape[:-1] != x.shape[:-1]:
        raise ValueError(
            f"feature_map: expected {function_name(feature_map)} to return "
            f"{[*x.shape[:-1], 'F']} for {list(x.shape)}, got {list(features.shape)}"
        )
    return _or_zero(features.astype(dtype), exists)


@partitioned_by_xla(lambda x, _: PartitionSpec(*sharding_of(x)))
def _or_zero(x: Float[Array, "*B T N F"], exists: Any) -> Float[Array, "*B T N F"]:
    """Replaces padding, whatever its numbers, by 0."""
    return x if exists is None else jnp.where(jnp.asarray(exists)[..., None, None], x, 0)


def _shardings(query: Array, key: Array, *_: Any, **__: Any) -> Any:
    """Returns the shardings of the output and of the state on meshes with explicit axes."""
    *batch, _, K, _ = sharding_of(key)
    by_key = PartitionSpec(*batch, K, None)
    state = LinearState(PartitionSpec(*by_key, None), by_key, PartitionSpec(*batch))  # pyright: ignore[reportArgumentType]
    return PartitionSpec(*sharding_of(query)[:-1], None), state


@functools.partial(jax.jit, static_argnames=("causal", "normalize", "maps", "chunk"))
@partitioned_by_xla(_shardings)
def _attend(
    query: Float[Array, "*B T N F"],
    key: Float[Array, "*B S K F"],
    value: Values,
    log_decay: Any,
    segments: Any,
    valid: Any,
    state: LinearState,
    *,
    causal: bool,
    normalize: bool,
    maps: bool,
    chunk: int | None,
) -> tuple[Output, LinearState]:
    """Computes `linear_attention` in the dtype of queries and keys, which are features unless
    `maps`."""
    (*batch, S, K, V), F = value.shape, query.shape[-1]
    value = _or_zero(value.astype(key.dtype), valid)
    logs, segment = _log_decays(log_decay, segments, valid, state.segment, (*batch, S, K))
    B = math.prod(batch)
    q, k, v = (x.reshape(B, *x.shape[-3:]) for x in (query, key, value))
    logs = None if logs is None else logs.astype(key.dtype).reshape(B, S, K, logs.shape[-1])
    sums: Sums = (state.values.reshape(B, K, F, V), state.keys.reshape(B, K, F))
    # The carry of a scan must vary over the same mesh axes before and after each step.
    q, k, v, logs, sums = varied_like((q, k, v, logs, sums), ())
    if causal:
        out, _, sums = _sum_earlier(Formula(chunk or 0, maps, normalize), q, k, v, logs, sums)
    else:
        if segments is None:
            sums = sums[0] + jnp.einsum("bjkf,bjkv->bkfv", k, v), sums[1] + jnp.sum(k, axis=1)
            grouped = q.reshape(B, q.shape[1], K, q.shape[2] // K, F)
            numerator = jnp.einsum("bikgf,bkfv->bikgv", grouped, sums[0])
            denominator = jnp.einsum("bikgf,bkf->bikg", grouped, sums[1])
        else:
            formula = Formula(chunk or 0, maps, divides=False)
            numerator, denominator, sums = _sum_earlier(formula, q, k, v, logs, sums)
            later = _sum_later(formula._replace(strict=True), q, k, v, logs)
            numerator, denominator = numerator + later[0], denominator + later[1]
        out = quotient(numerator, denominator[..., None]) if normalize else numerator
    values, keys = sums[0].reshape(*batch, K, F, V), sums[1].reshape(*batch, K, F)
    return out.reshape(*query.shape[:-1], V), LinearState(values, keys, segment)


def _sum_earlier(formula: Formula, *operands: Any) -> tuple[Array, Array, Sums]:
    """Computes `xla.linear.attend`, by a kernel unless the formula has a size of chunks."""
    sizes = tuning.current()
    T = operands[0].shape[1]
    if formula.chunk or not isinstance(T, int) or T < sizes.linear_tokens:
        return attend(formula._replace(chunk=formula.chunk or sizes.linear_chunk), *operands)
    return _sum_by_kernel(formula._replace(chunk=sizes.linear_chunk), operands)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _sum_by_kernel(formula: Formula, operands: Any) -> tuple[Array, Array, Sums]:
    """Computes `xla.linear.attend` by the first of the registry's kernels that is available."""
    like = jax.eval_shape(functools.partial(attend, formula), *operands)
    run = lambda platform, *operands: registry.linear(platform, formula, *operands)  # noqa: E731
    return platform_dependent(partitioned_linear(run, operands), like, (), *operands)


@_sum_by_kernel.defjvp
def _derive(formula: Formula, primals: Any, tangents: Any) -> Any:
    """Derives XLA's form, which then computes the results too."""
    return jax.jvp(lambda operands: attend(formula, *operands), primals, tangents)


def _sum_later(formula: Formula, q: Array, k: Array, v: Array, logs: Any) -> tuple[Array, Array]:
    """Returns the numerators and denominators of the later tokens of each token's document."""
    # The first token of a document forgets all tokens before it. In reverse order these follow it,
    # so the next token must forget instead: decays shift by one token.
    logs = jnp.pad(jnp.flip(logs, 1), ((0, 0), (1, 0), (0, 0), (0, 0)))[:, : q.shape[1]]
    keys, values = (jnp.zeros_like(jnp.sum(x, axis=1)) for x in (k, v))
    sums = keys[..., None] * values[:, :, None], keys
    tokens = (jnp.flip(x, 1) for x in (q, k, v))
    numerator, denominator, _ = _sum_earlier(formula, *tokens, logs, sums)
    return jnp.flip(numerator, 1), jnp.flip(denominator, 1)


def _log_decays(
    log_decay: Any, segments: Any, valid: Any, segment: Array, sizes: Shape
) -> tuple[Float[Array, "*B S K _"] | None, Int[Array, "*B"]]:
    """Returns the log decays of each token, −inf where a document begins, and the last id.

    Tokens at False in `valid` do not decay; `segment` is the id before the first token.
    """
    if log_decay is None and segments is None:
        return None, segment
    logs = jnp.zeros((), jnp.float32) if log_decay is None else jnp.asarray(log_decay)
    logs = jnp.broadcast_to(logs, sizes)[..., None] if logs.ndim < len(sizes) else logs
    logs = logs[..., None] if logs.ndim == len(sizes) else logs
    exists = jnp.ones(sizes[:-1], bool) if valid is None else jnp.asarray(valid)
    if segments is not None:
        ids = jnp.concatenate([segment[..., None], jnp.asarray(segments).astype(jnp.int32)], -1)
        places = jnp.where(exists, jnp.arange(1, sizes[-2] + 1), 0)
        places = jnp.pad(places, [(0, 0)] * (places.ndim - 1) + [(1, 0)])
        latest = jnp.take_along_axis(ids, jax.lax.cummax(places, axis=places.ndim - 1), axis=-1)
        starts = ids[..., 1:] != latest[..., :-1]
        logs, segment = jnp.where(starts[..., None, None], -jnp.inf, logs), latest[..., -1]
    return jnp.where(exists[..., None, None], logs, 0), segment
