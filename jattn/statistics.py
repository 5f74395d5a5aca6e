"""Statistics of attention weights, computed without the T × S matrix.

`statistics` computes a few numbers from the weights of each query, `top_weights` selects the
greatest weights of each query. Both compute every tile of the scores twice: first for the
denominators of the softmax, then for the weights. With another normalizer, they compute the weights
of all keys of a block of queries at once.
"""

import dataclasses
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jattn._advised import advised
from jattn._explicit import QuerySharding, joined, partitioned_by_xla, sharding_of
from jattn._types import AnyArray, Keys, LogSumExp, Queries, accumulation
from jattn.call import Call, compiled, make, of_shapes
from jattn.checks import check_array, check_number, check_size
from jattn.kernels import registry
from jattn.kernels.common import partition, reverse_mode
from jattn.kernels.protocol import QueryStatistics, StatisticsRequest
from jattn.kernels.xla import statistics as tiled_statistics
from jattn.masks import Mask, Padding
from jattn.options import StatisticsOptions


class Statistics(NamedTuple):
    """Statistics of the weights of each query and head, and of each key.

    entropy: −Σ w log w with the natural logarithm, `[*B, N, T]`: 0 for one key, log S for S equal
        weights.
    greatest: the greatest weight, `[*B, N, T]`.
    place: the index of the key with the greatest weight, the lowest if several are equal, int32
        `[*B, N, T]`; −1 if all keys are masked or the weights are NaN.
    distance: Σ w |q − kv|, the mean distance of positions, `[*B, N, T]`.
    on_keys: the sum of the weights on the requested `keys`, `[*B, N, T]`; None if not requested.
    above: the sum of the weights above the `threshold`, `[*B, N, T]`; None if not requested.
    received: the sum over queries of the weights on each key, `[*B, N, S]`.

    With a normalizer whose weights do not sum to 1, entropy and distance are those of the weights
    divided by their sum, 0 if all weights are 0, and all other statistics are those of the weights
    themselves. The entropy of negative weights is NaN.

    All but `place` are float32 (float64). `entropy`, `greatest`, `distance` and `on_keys` have
    first derivatives in reverse mode; the others are constants.
    """

    entropy: LogSumExp
    greatest: LogSumExp
    place: Int[Array, "*B N T"]
    distance: LogSumExp
    on_keys: LogSumExp | None
    above: LogSumExp | None
    received: Float[Array, "*B N S"]


@advised(StatisticsOptions)
def statistics(
    query: Queries,
    key: Keys,
    *,
    keys: Mask | Bool[AnyArray, "*B S"] | None = None,
    threshold: float | None = None,
    **options: Unpack[StatisticsOptions],
) -> Statistics:
    """Returns entropy, greatest weight, expected distance and more of the weights of attention.

    Args:
        query: `[*B, T, N, H]`.
        key: `[*B, S, K, H]`.
        keys: the keys whose weights `on_keys` sums: bool `[*B, S]`, such as `jnp.arange(S) == 0`
            for the first token, or a mask, such as `masks.Segments(ids)` for the keys of each
            query's segment.
        threshold: a number in [0, 1): `above` sums the weights above it.
        options: mask, score, scale, precision, positions and normalizer, as in `attention`.

    Returns:
        `Statistics` of the weights before any dropout. Memory is linear in T and S, forward and
        backward. For a query whose keys are all masked, `place` is -1 and all else is 0.

    Raises the errors of `attention_weights`.

    >>> print(jattn.statistics(0 * q, k, mask=masks.Causal()).entropy[0, 0].round(2))
    [0.   0.69 1.1  1.39 1.61]
    """
    call = _call("statistics", query, key, options)
    if threshold is not None:
        check_number("threshold", threshold)
        if not isinstance(threshold, int | float) or not 0 <= threshold < 1:
            raise ValueError(f"threshold: expected a number in [0, 1), got {threshold!r}")
        threshold = float(threshold)
    on_keys = _on_keys(keys, call)
    if on_keys and on_keys.transient:
        call = dataclasses.replace(call, transient=True)
    return _statistics(call, query, key, on_keys, threshold=threshold)


@advised(StatisticsOptions)
def top_weights(
    query: Queries, key: Keys, n: int, **options: Unpack[StatisticsOptions]
) -> tuple[Float[Array, "*B N T n"], Int[Array, "*B N T n"]]:
    """Returns the n greatest weights of each query and head, and the indices of their keys.

    `query [*B, T, N, H]`, `key [*B, S, K, H]`, n at most S; options as in `statistics`.

    Returns:
        The weights `[*B, N, T, n]` in float32 (float64), greatest first, and the keys' indices,
        int32 `[*B, N, T, n]`. If fewer than n keys are allowed, the remaining weights are 0 and
        their indices −1. Equal weights are in no particular order. Memory grows with T × n, never
        T × S. Both results are constants, without derivatives.

    Raises the errors of `attention_weights`, TypeError and ValueError for n.

    >>> weights, places = jattn.top_weights(q, k, 2, mask=masks.Causal())
    >>> weights.shape, places[0, 0, 0].tolist()
    ((2, 4, 5, 2), [0, -1])
    """
    call = _call("top_weights", query, key, options)
    check_size("n", n)
    if n > call.shapes.S:
        raise ValueError(f"n: expected at most S = {call.shapes.S}, got {n}")
    return _top(call, query, key, n=int(n))


def _call(name: str, query: Any, key: Any, options: StatisticsOptions) -> Call:
    """Makes a `Call`; raises NotImplementedError for symbolic T or S in an exported program."""
    check_array("key", key, "[*B, S, K, H]")  # refuses a cache, which `make` accepts
    call = make(query, key, **options).sink_as_normalizer()
    shapes = call.shapes
    if not shapes.has_static_lengths:
        raise NotImplementedError(
            f"{name}: expected integers T and S, got the symbols T = {shapes.T}, S = {shapes.S} of "
            "an exported program; write attention_weights, which supports them"
        )
    return call


def _on_keys(keys: Any, call: Call) -> Call | None:
    """Returns a call whose mask allows the requested keys, which evaluates them like a mask."""
    if keys is None:
        return None
    spec, shapes = call.spec, call.shapes
    if not isinstance(keys, Mask):
        wanted = (*shapes.batch, shapes.S)
        check_array("keys", keys, "[*B, S]", "boolean")
        if keys.shape not in (wanted, wanted[-1:]):
            raise ValueError(f"keys: expected [*B, S] = {list(wanted)}, got {list(keys.shape)}")
        keys = Padding(keys)
    positions = {"q_positions": spec.q_positions, "kv_positions": spec.kv_positions}
    return of_shapes(shapes, mask=keys, scale=1.0, **positions)


def _constant(x: Any) -> Any:
    return jax.lax.stop_gradient(x) if hasattr(x, "dtype") else x


def _shardings(
    _: Call, query: Array, key: Array, on_keys: Call | None, *, threshold: float | None
) -> Statistics:
    """Returns the shardings of the results on a mesh with explicit axes: that of the queries, and
    for `received` that of the keys."""
    query_sharding = QuerySharding.of(query)
    by_query: Any = query_sharding.by_head
    received: Any = joined((*query_sharding.batch, query_sharding.N), sharding_of(key)[-3:-2])
    shardings = Statistics(*[by_query] * 6, received=received)
    above = None if threshold is None else by_query
    return shardings._replace(on_keys=on_keys and by_query, above=above)


@compiled("threshold")
@partitioned_by_xla(_shardings)
def _statistics(
    call: Call, query: Array, key: Array, on_keys: Call | None, *, threshold: float | None
) -> Statistics:
    keys = on_keys and on_keys.prepared().spec
    request = StatisticsRequest(call.prepared().spec, keys, threshold)
    operands, shapes = call.flattened(query, key), call.shapes
    if 0 in (shapes.B, shapes.T, shapes.S, shapes.N):
        by_query, received = _without_pairs(request, *operands)
    else:
        by_query, received = tiled_statistics.statistics(_by_platform, request, *operands)
    if by_query.above is not None:  # no weight that is NaN is above the threshold
        above = jnp.where(jnp.isnan(by_query.greatest), jnp.nan, by_query.above)
        by_query = by_query._replace(above=_constant(above))
    return jax.tree.map(call.unflattened, Statistics(**by_query._asdict(), received=received))


def _without_pairs(
    request: StatisticsRequest, query: Array, key: Array
) -> tuple[QueryStatistics, Array]:
    """Returns the statistics if there are no queries or no keys."""
    (B, T, N, _), S, dtype = query.shape, key.shape[1], accumulation(query.dtype)
    zeros = jnp.zeros((B, N, T), dtype)
    place = jnp.full((B, N, T), -1, jnp.int32)
    on_keys, above = (None if x is None else zeros for x in (request.keys, request.threshold))
    by_query = QueryStatistics(zeros, zeros, place, zeros, on_keys, above)
    return reverse_mode.varied_like((by_query, jnp.zeros((B, N, S), dtype)), (request, query, key))


def _by_platform(request: StatisticsRequest, query: Array, key: Array) -> Any:
    """Computes the statistics with the platform's kernel, chosen when the program is lowered."""
    like = jax.eval_shape(tiled_statistics.by_tiles, request, query, key)
    dims = (*[partition.BY_HEAD] * len(jax.tree.leaves(like[0])), partition.RECEIVED)
    return tiled_statistics.by_share(registry.sum_weights, like, dims, request, query, key)


@compiled("n")
@partitioned_by_xla(lambda _, query, *__, **___: (QuerySharding.of(query).matrix,) * 2)
def _top(call: Call, query: Array, key: Array, *, n: int) -> tuple[Array, Array]:
    query, key = call.flattened(*jax.lax.stop_gradient((query, key)))
    spec, shapes = jax.tree.map(_constant, call.prepared().spec), call.shapes
    if 0 in (shapes.B, shapes.T, shapes.N):
        size = (shapes.B, shapes.N, shapes.T, n)
        top = jnp.zeros(size, accumulation(query.dtype)), jnp.zeros(size, jnp.int32)
    else:
        top = tiled_statistics.top(spec, query, key, n)
    return call.unflattened(top[0]), call.unflattened(top[1])
