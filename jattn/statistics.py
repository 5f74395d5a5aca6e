"""Statistics of attention weights, computed without the T × S matrix.

`statistics` reduces each row of weights to a few numbers, `top_weights` to its greatest weights.
Both go over the tiles of the scores twice, the first time for the denominators of the softmax.
"""

import dataclasses
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jattn._advised import advised
from jattn._explicit import Cuts, cuts_of, joined, left_to_xla
from jattn._types import AnyArray, Keys, LogSumExp, Queries, accumulation
from jattn.call import Call, compiled, make, of_shapes
from jattn.checks import check_array, check_number, check_size
from jattn.kernels import registry
from jattn.kernels.common import partition, reverse_mode
from jattn.kernels.protocol import QueryStatistics, StatisticsRequest
from jattn.kernels.xla import statistics as tiles
from jattn.masks import Mask, Padding
from jattn.options import ScoreOptions


class Statistics(NamedTuple):
    """Statistics of the weights of each query and head, and of each key.

    entropy: −Σ w log w, `[*B, N, T]`, natural; 0 for one key, log S for S equal weights.
    greatest: the greatest weight, `[*B, N, T]`.
    place: the place of the greatest weight, int32 `[*B, N, T]`, the first of several; −1 without
        keys.
    distance: Σ w |q − kv| by position, `[*B, N, T]`.
    on_keys: the sum of the weights on the requested `keys`, `[*B, N, T]`, or None.
    above: the sum of the weights that are above the `threshold`, `[*B, N, T]`, or None.
    received: the sum over queries of the weights on each key, `[*B, N, S]`.

    In float32 (float64). Entropy, greatest, distance and on_keys are differentiable, once and in
    reverse mode; the others are constants.
    """

    entropy: LogSumExp
    greatest: LogSumExp
    place: Int[Array, "*B N T"]
    distance: LogSumExp
    on_keys: LogSumExp | None
    above: LogSumExp | None
    received: Float[Array, "*B N S"]


@advised(ScoreOptions)
def statistics(
    query: Queries,
    key: Keys,
    *,
    keys: Mask | Bool[AnyArray, "*B S"] | None = None,
    threshold: float | None = None,
    **options: Unpack[ScoreOptions],
) -> Statistics:
    """Returns entropy, greatest weight, expected distance and more of the weights of attention.

    Args:
        query: `[*B, T, N, H]`.
        key: `[*B, S, K, H]`.
        keys: the keys whose weights `on_keys` sums: bool `[*B, S]`, such as `jnp.arange(S) == 0`
            for the first token, or a mask, such as `masks.Segments(ids)` for each query's own
            segment.
        threshold: in [0, 1): `above` sums the weights above it.
        options: as in `attention`.

    Returns:
        `Statistics` of the weights before any dropout. Memory is linear in T and S, forward and
        backward. For a query whose keys are all masked every statistic is 0.

    Raises the errors of `attention_weights`.
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


@advised(ScoreOptions)
def top_weights(
    query: Queries, key: Keys, n: int, **options: Unpack[ScoreOptions]
) -> tuple[Float[Array, "*B N T n"], Int[Array, "*B N T n"]]:
    """Returns the n greatest weights of each query and head, and the places of their keys.

    `query [*B, T, N, H]`, `key [*B, S, K, H]`, n at most S; options as in `attention`.

    Returns:
        Weights `[*B, N, T, n]` in float32 (float64), greatest first, and places int32
        `[*B, N, T, n]`; if fewer keys are attended, weights 0 at place −1. Equal weights are in no
        particular order. Memory grows with T × n, never T × S. Both are constants without
        derivatives.

    Raises the errors of `attention_weights`, TypeError and ValueError for n.
    """
    call = _call("top_weights", query, key, options)
    check_size("n", n)
    if n > call.shapes.S:
        raise ValueError(f"n: expected at most S = {call.shapes.S}, got {n}")
    return _top(call, query, key, n=int(n))


def _call(name: str, query: Any, key: Any, options: ScoreOptions) -> Call:
    """Makes a `Call`; raises NotImplementedError in a program that is exported for any T or S."""
    check_array("key", key, "[*B, S, K, H]")  # a cache has no statistics
    call = make(query, key, **options)
    shapes = call.shapes
    if not shapes.has_static_lengths:
        raise NotImplementedError(
            f"{name}: it cuts queries and keys into tiles, which needs numbers, and the program is "
            f"exported for any T = {shapes.T}, S = {shapes.S}; attention_weights needs none"
        )
    return call


def _on_keys(keys: Any, call: Call) -> Call | None:
    """Returns the requested keys as the mask of a separate call."""
    if keys is None:
        return None
    spec, shapes = call.spec, call.shapes
    if not isinstance(keys, Mask):
        wanted = (*shapes.batch, shapes.S)
        check_array("keys", keys, "[*B, S]", "boolean")
        if keys.shape not in (wanted, wanted[-1:]):
            raise ValueError(f"keys: expected [*B, S] = {list(wanted)}, got {list(keys.shape)}")
        keys = Padding(keys)
    places = {"q_positions": spec.q_positions, "kv_positions": spec.kv_positions}
    return of_shapes(shapes, mask=keys, scale=1.0, **places)


def _constant(x: Any) -> Any:
    return jax.lax.stop_gradient(x) if hasattr(x, "dtype") else x


def _cuts(
    _: Call, query: Array, key: Array, on_keys: Call | None, *, threshold: float | None
) -> Statistics:
    """Returns the sharding of the results, if explicit: as the queries, `received` as the keys."""
    cuts = Cuts.of(query)
    row: Any = cuts.by_head
    received: Any = joined((*cuts.batch, cuts.N), cuts_of(key)[-3:-2])
    sharded = Statistics(*[row] * 6, received=received)
    return sharded._replace(on_keys=on_keys and row, above=None if threshold is None else row)


@compiled("threshold")
@left_to_xla(_cuts)
def _statistics(
    call: Call, query: Array, key: Array, on_keys: Call | None, *, threshold: float | None
) -> Statistics:
    on = on_keys and on_keys.prepared().spec
    question = StatisticsRequest(call.prepared().spec, on, threshold)
    flat, shapes = call.flattened(query, key), call.shapes
    if 0 in (shapes.B, shapes.T, shapes.S, shapes.N):
        rows, received = _of_no_pairs(question, *flat)
    else:
        rows, received = tiles.statistics(_by_platform, question, *flat)
    return jax.tree.map(call.unflattened, Statistics(**rows._asdict(), received=received))


def _of_no_pairs(
    question: StatisticsRequest, query: Array, key: Array
) -> tuple[QueryStatistics, Array]:
    """Returns the statistics if there are no queries or no keys."""
    (B, T, N, _), S, dtype = query.shape, key.shape[1], accumulation(query.dtype)
    row = jnp.zeros((B, N, T), dtype)
    on_keys, above = (None if x is None else row for x in (question.keys, question.threshold))
    rows = QueryStatistics(row, row, jnp.full((B, N, T), -1, jnp.int32), row, on_keys, above)
    return reverse_mode.varied_like((rows, jnp.zeros((B, N, S), dtype)), (question, query, key))


def _by_platform(question: StatisticsRequest, query: Array, key: Array) -> Any:
    """Computes the statistics with the platform's kernel, chosen when the program is lowered."""
    like = jax.eval_shape(tiles.by_tiles, question, query, key)
    dims = (*[partition.BY_HEAD] * len(jax.tree.leaves(like[0])), partition.RECEIVED)
    return tiles.by_share(registry.sum_weights, like, dims, question, query, key)


@compiled("n")
@left_to_xla(lambda _, query, *__, **___: (Cuts.of(query).matrix,) * 2)
def _top(call: Call, query: Array, key: Array, *, n: int) -> tuple[Array, Array]:
    query, key = call.flattened(*jax.lax.stop_gradient((query, key)))
    spec, shapes = jax.tree.map(_constant, call.prepared().spec), call.shapes
    if 0 in (shapes.B, shapes.T, shapes.N):
        size = (shapes.B, shapes.N, shapes.T, n)
        top = jnp.zeros(size, accumulation(query.dtype)), jnp.zeros(size, jnp.int32)
    else:
        top = tiles.top(spec, query, key, n)
    return call.unflattened(top[0]), call.unflattened(top[1])
