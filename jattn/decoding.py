"""`cached_attention`: one step of decoding, which appends to a cache and attends to it."""

import dataclasses
from typing import Any, Literal, TypeVar, Unpack, overload

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jattn._advised import advised
from jattn._debugging import may_be_minus_infinity
from jattn._pytree import axis_names, axis_of
from jattn._types import AnyArray, Keys, LogSumExp, Output, Queries, Values, accumulation
from jattn.attention import attention
from jattn.cache.base import Cache, check_cache
from jattn.checks import check_array
from jattn.functions.integers import clamped
from jattn.masks import Blocks, Lengths, Mask, Tree, as_mask
from jattn.normalizers import as_normalizer
from jattn.options import CachedOptions
from jattn.scores import Score, as_score


SomeCache = TypeVar("SomeCache", bound=Cache)


@overload
def cached_attention(
    query: Queries,
    key: Keys,
    value: Values | None,
    cache: SomeCache,
    *,
    valid: Bool[AnyArray, "B T"] | None = None,
    positions: Int[AnyArray, "..."] | None = None,
    return_lse: Literal[False] = False,
    **options: Unpack[CachedOptions],
) -> tuple[Output, SomeCache]: ...
@overload
def cached_attention(
    query: Queries,
    key: Keys,
    value: Values | None,
    cache: SomeCache,
    *,
    valid: Bool[AnyArray, "B T"] | None = None,
    positions: Int[AnyArray, "..."] | None = None,
    return_lse: Literal[True],
    **options: Unpack[CachedOptions],
) -> tuple[tuple[Output, LogSumExp], SomeCache]: ...
@advised(CachedOptions)
@may_be_minus_infinity(1)
def cached_attention(
    query: Queries,
    key: Keys,
    value: Values | None,
    cache: Cache,
    *,
    valid: Bool[AnyArray, "B T"] | None = None,
    positions: Int[AnyArray, "..."] | None = None,
    return_lse: bool = False,
    **options: Unpack[CachedOptions],
) -> Any:
    """Appends keys and values to a cache and attends to it: returns `(out [B, T, N, V], cache)`.

    T is any number of tokens. If it exceeds the `chunk` of a `RollingCache`, they are appended in
    several steps.

    Args:
        query: `[B, T, N, H]`.
        key: `[B, T, K, H]`.
        value: `[B, T, K, V]`; None for a `LatentCache`.
        cache: a cache of `jattn.cache` for B batch rows.
        valid: bool `[B, T]`, False for padding, as in prompts of different lengths. Padding is not
            appended, and its `out` has no meaning. A mask would not keep it out of the cache.
        positions: integers `[B, T]` or `[T]`, for a cache created with `positions=True`, which
            keeps them; by default each token's number in its batch row.
        return_lse: whether to return `(out, lse [B, N, T])` in place of `out`, as `attention` does.
        options: as in `attention`, except for the positions of keys, which come from the cache. The
            size S of a mask is the cache's capacity.

    Raises the errors of `append` and `attention`, and NotImplementedError for dropout and
    `masks.Blocks` if the tokens are appended in several steps.

    >>> cache = jattn.cache.DenseCache.create(2, 16, 2, 8)
    >>> out, cache = jattn.cached_attention(q, k[:, :5], v[:, :5], cache, mask=masks.Causal())
    >>> out.shape, cache.lengths.tolist()
    ((2, 5, 4, 8), [5, 5])
    """
    check_cache("cache", cache)
    check_array("query", query, "[B, T, N, H]", rank=4)
    arguments: dict[str, Any] = {**options, "return_lse": return_lse}
    T, chunk = query.shape[1], getattr(cache, "chunk", query.shape[1])
    new_positions = cache.next_positions(T, valid, positions)
    if positions is None and cache.positions is not None and _has_tree(options.get("mask")):
        raise ValueError(
            "positions: expected those of the drafts, start[:, None] + tree.depths, as the mask "
            "has a Tree and the cache keeps positions; got None"
        )
    if T > chunk:
        return _in_chunks(query, key, value, cache, valid, arguments)
    appended: Any = cache.append(key, value, valid, positions)
    return attention(query, appended, q_positions=new_positions, **arguments), appended


def _has_tree(mask: Any) -> bool:
    nodes = jax.tree.leaves(mask, is_leaf=lambda x: isinstance(x, Tree))
    return any(isinstance(x, Tree) for x in nodes)


def _mask_of_chunk(mask: Mask, start: Array) -> Mask:
    """Returns the mask for a chunk of queries that starts at place `start` of the call: in the
    chunk, places count from 0 again."""

    def shifted(node: Any) -> Any:
        if isinstance(node, Blocks):
            raise NotImplementedError(
                "mask: expected no more tokens than the cache's chunk with masks.Blocks, which "
                "cannot be split among several chunks of queries"
            )
        if isinstance(node, Lengths) and node.q is not None:
            length = jnp.asarray(clamped(node.q), jnp.int32)
            return dataclasses.replace(node, q=jnp.maximum(length - start, 0))
        return node

    return jax.tree.map(shifted, mask, is_leaf=lambda x: isinstance(x, Blocks | Lengths))


def _in_chunks(
    query: Queries, key: Keys, value: Any, cache: Any, valid: Any, arguments: dict[str, Any]
) -> tuple[Any, Any]:
    """Computes `cached_attention` for `cache.chunk` tokens at a time."""
    if arguments.get("dropout_rate"):
        raise NotImplementedError(
            f"dropout_rate: expected 0 for more than the cache's chunk of {cache.chunk} tokens, "
            f"got {query.shape[1]} tokens and a rate of {arguments['dropout_rate']}"
        )
    (B, T), chunk = query.shape[:2], cache.chunk
    num_chunks = -(-T // chunk)

    def split(x: Any, axis: int = 1) -> Array:
        """Pads T to whole chunks and splits it: `[…, T, …]` to `[num_chunks, …, chunk, …]`."""
        x = jnp.moveaxis(jnp.asarray(x), axis, 0)
        x = jnp.pad(x, ((0, num_chunks * chunk - T), *((0, 0),) * (x.ndim - 1)))
        return jnp.moveaxis(x.reshape(num_chunks, chunk, *x.shape[1:]), 1, axis + 1)

    def traced(x: Any) -> Any:
        """Traces a function before the loop, so that its operations that do not depend on the pair
        run once, not once for each chunk."""
        return x.traced(accumulation(query.dtype)) if isinstance(x, Score) else x

    # Arrays of these that have an axis T are split like the queries.
    is_leaf = lambda x: isinstance(x, Score)  # noqa: E731
    score = jax.tree.map(traced, as_score(arguments.get("score")), is_leaf=is_leaf)
    normalizer = as_normalizer(arguments.get("normalizer"))
    normalizer = jax.tree.map(traced, normalizer, is_leaf=is_leaf)
    trees = {"mask": as_mask(arguments.get("mask")), "score": score, "normalizer": normalizer}
    leaves, structure = jax.tree.flatten(trees)
    letters = jax.tree.leaves([axis_names(tree) for tree in trees.values()])
    axes = [axis_of("T", names, x.ndim) for names, x in zip(letters, leaves, strict=True)]
    split_leaves = [
        None if axis is None or x.shape[axis] == 1 else split(x, axis)
        for axis, x in zip(axes, leaves, strict=True)
    ]

    def attend_chunk(cache: Cache, operands: Any) -> tuple[Cache, Any]:
        start, query, key, value, valid, split_leaves = operands
        chunk_leaves = [x if y is None else y for x, y in zip(leaves, split_leaves, strict=True)]
        chunk_arguments = arguments | jax.tree.unflatten(structure, chunk_leaves)
        chunk_arguments["mask"] = _mask_of_chunk(chunk_arguments["mask"], start)
        out, cache = cached_attention(query, key, value, cache, valid=valid, **chunk_arguments)
        return cache, out

    valid = jnp.ones((B, T), bool) if valid is None else valid  # `split` pads it with False
    starts = jnp.arange(num_chunks, dtype=jnp.int32) * chunk
    tokens = jax.tree.map(split, (query, key, value, valid))
    cache, results = jax.lax.scan(attend_chunk, cache, (starts, *tokens, split_leaves))

    def joined(x: Array, axis: int) -> Array:
        """Undoes `split`: `[num_chunks, …, chunk, …]` to `[…, T, …]`, with T at `axis`."""
        x = jnp.moveaxis(x, 0, axis)
        x = x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
        return jax.lax.slice_in_dim(x, 0, T, axis=axis)

    if not isinstance(results, tuple):
        return joined(results, 1), cache
    out, *by_head = results
    return (joined(out, 1), *(joined(x, 2) for x in by_head)), cache
