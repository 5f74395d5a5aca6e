"""Sparse attention by content: the queries choose which blocks of keys they attend to.

`chosen_blocks` returns the choice as a mask, so that every implementation skips the other blocks.
Blocks are chosen by the products of queries with the mean key of each block (MoBA, Lu et al. 2025,
"Mixture of Block Attention for Long-Context LLMs", section 2.2). `native_sparse_attention` adds
attention to compressed keys and to a sliding window (NSA, Yuan et al. 2025, "Native Sparse
Attention", section 3).

A choice has no gradient: the gradients of attention flow through the chosen blocks only.
"""

import functools
from typing import Any, TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from jattn._advised import advised
from jattn._explicit import QuerySharding, partitioned_by_xla
from jattn._types import AnyArray, Keys, Output, Queries, Shape, Values, accumulation
from jattn.attention import attention, attention_weights
from jattn.call import checked_scale
from jattn.checks import check_array, check_flag, check_like, check_size, shown
from jattn.functions import integers
from jattn.masks import Blocks, Causal, Window


__all__ = ["chosen_blocks", "native_sparse_attention"]
__dir__ = __all__.copy

BlockScores = Float[Array, "*B N Tb Sb"]
Choice = Bool[Array, "*B N Tb Sb"]


def chosen_blocks(
    query: Queries,
    key: Keys,
    block: int | tuple[int, int],
    count: int,
    *,
    causal: bool = False,
    valid: Bool[AnyArray, "*B S"] | None = None,
    q_positions: Int[AnyArray, "..."] | None = None,
) -> Blocks:
    """The mask in which each block of queries attends to the `count` best blocks of keys.

    A block of keys is scored by the product of the queries with the mean of its keys. Each head has
    its own layout, in `[*B, N, T/block, S/block]`.

    Args:
        query: `[*B, T, N, H]`.
        key: `[*B, S, K, H]`, of the same dtype; K divides N.
        block: the size of the blocks, or a pair (queries, keys). With `(1, size)` every query
            chooses for itself, as in MoBA. The kernel for CPUs computes tiles of 64 queries, and
            skips a block of keys only if none of the 64 chose it; so blocks of 64 queries or more
            save most.
        count: the number of blocks of keys that are kept, all if there are fewer.
        causal: whether the choice must not depend on later tokens; combine the result with
            `masks.Causal()`. If True, the first query of each block chooses among the key blocks
            before its own, and the key block at a query's own position is always kept, as one of
            the `count`. If False, the mean of the queries chooses among all key blocks.
        valid: `[*B, S]`, False for keys that are padding: they are not part of means, and a block
            of padding only is not chosen.
        q_positions: integer `[T]` or `[*B, T]`, ascending, by default arange(T); for `causal`. The
            positions of the keys are arange(S).

    Raises TypeError or ValueError for arrays of the wrong shape or dtype, and for wrong sizes.

    >>> mask = masks.Causal() & jattn.chosen_blocks(q, k, (1, 2), count=2, causal=True)
    >>> jattn.attention(q, k, v, mask=mask).shape
    (2, 5, 4, 8)
    """
    sizes = _block_sizes(block)
    check_size("count", count)
    check_flag("causal", causal)
    *batch, T, _, _ = _check_queries_and_keys(query, key)
    tokens = (*batch, key.shape[-3])
    if valid is not None:
        check_array("valid", valid, "[*B, S]", "boolean", shape=tokens)
    if q_positions is not None:
        if not causal:
            raise ValueError("q_positions: expected None without causal=True, got an array")
        check_array("q_positions", q_positions, "[T] or [*B, T]", "integer")
        if q_positions.shape not in ((T,), (*batch, T)):
            wanted, got = f"[T] or [*B, T] = {[*batch, T]}", list(q_positions.shape)
            raise ValueError(f"q_positions: expected {wanted}, got {got}")
    valid = jnp.ones(tokens, bool) if valid is None else jnp.asarray(valid)
    positions = jnp.arange(T, dtype=jnp.int32) if q_positions is None else q_positions
    positions = _with_batch_axes(integers.wide_positions("q_positions", positions), len(batch))
    layout = _choose(query, key, valid, positions, sizes=sizes, count=count, causal=causal)
    return Blocks(layout, block)


def _block_sizes(block: Any) -> tuple[int, int]:
    return Blocks(np.ones((0, 0), bool), block).sizes


def _check_queries_and_keys(query: Any, key: Any) -> Shape:
    """Returns the shape of the queries; raises TypeError or ValueError unless the keys match."""
    check_array("query", query, "[*B, T, N, H]", ndim=3)
    check_array("key", key, "[*B, S, K, H]", ndim=3)
    check_like("key", key, query)
    (*batch, _, N, H), (*key_batch, _, K, width) = query.shape, key.shape
    if key_batch != batch or width != H or not K or N % K:
        wanted = f"[*B, S, K, H] with *B = {batch}, H = {H} and K that divides N = {N}"
        raise ValueError(f"key: expected {wanted}, got {list(key.shape)}")
    return query.shape


def _with_batch_axes(positions: Any, batch_axes: int) -> Int[Array, "*#B T"]:
    positions = jnp.asarray(positions)
    return positions if positions.ndim > 1 else positions.reshape(*(1,) * batch_axes, -1)


def _by_blocks(query: Array, *_: Any, **__: Any) -> PartitionSpec:
    """Returns the sharding of a layout on meshes with explicit axes: along batch and heads."""
    sharding = QuerySharding.of(query)
    return PartitionSpec(*sharding.batch, sharding.N, None, None)


@functools.partial(jax.jit, static_argnames=("sizes", "count", "causal"))
@partitioned_by_xla(_by_blocks)
def _choose(
    query: Queries,
    key: Keys,
    valid: Bool[Array, "*B S"],
    positions: Int[Array, "*#B T"],
    *,
    sizes: tuple[int, int],
    count: int,
    causal: bool,
) -> Choice:
    q_block, kv_block = sizes
    query, key = jax.lax.stop_gradient((query, key))
    means, choosable = _block_means(key, kv_block, valid)
    if causal:
        pooled = query[..., ::q_block, :, :].astype(means.dtype)
    else:
        pooled, _ = _block_means(query, q_block, jnp.ones(query.shape[:-2], bool))
    scores = _products(pooled, means)
    choosable = choosable[..., None, None, :]
    own_blocks = jnp.zeros((), bool)
    if causal:
        own_blocks, earlier = _own_and_earlier(positions, q_block, kv_block, scores.shape[-1])
        choosable = choosable & earlier
    return _top(scores, choosable, own_blocks, count)


def _block_means(
    x: Float[Array, "*B S K H"], size: int, valid: Bool[Array, "*B S"]
) -> tuple[Float[Array, "*B Sb K H"], Bool[Array, "*B Sb"]]:
    """Returns the mean over the valid tokens of each block, and whether it has any."""
    *batch, tokens, heads, width = x.shape
    blocks = -(-tokens // size)
    size = min(size, tokens)  # so that padding to whole blocks stays small
    padding = [(0, 0)] * len(batch) + [(0, blocks * size - tokens)]
    valid = jnp.pad(valid, padding).reshape(*batch, blocks, size)
    x = jnp.pad(x, [*padding, (0, 0), (0, 0)]).astype(accumulation(x.dtype))
    number = jnp.maximum(1, valid.sum(-1, keepdims=True)).astype(x.dtype)
    x = x.reshape(*batch, blocks, size, heads, width) / number[..., None, None]
    means = jnp.where(valid[..., None, None], x, 0).sum(-3)
    return means, valid.any(-1)


def _products(
    query: Float[Array, "*B Tb N H"], key: Float[Array, "*B Sb K H"]
) -> Float[Array, "*B N Tb Sb"]:
    *batch, T, N, H = query.shape
    S, K = key.shape[-3:-1]
    by_group = query.reshape(*batch, T, K, N // K, H)
    return jnp.einsum("...tkgh,...skh->...kgts", by_group, key).reshape(*batch, N, T, S)


def _own_and_earlier(
    positions: Int[Array, "*#B T"], q_block: int, kv_block: int, kv_blocks: int
) -> tuple[Bool[Array, "*#B 1 Tb Sb"], Bool[Array, "*#B 1 Tb Sb"]]:
    """Returns, for each block of queries and each block of keys, whether any of the queries is at a
    position in the block of keys, and whether all of the queries are at positions after it."""
    *batch, T = positions.shape
    blocks = -(-T // q_block)
    q_block = min(q_block, T)
    # Places past the end repeat the last query.
    own_blocks = jnp.pad(
        positions // kv_block, [(0, 0)] * len(batch) + [(0, blocks * q_block - T)], "edge"
    )
    own_blocks = own_blocks.reshape(*batch, 1, blocks, q_block, 1)
    columns = jnp.arange(kv_blocks, dtype=own_blocks.dtype)
    columns = columns.reshape((1,) * (own_blocks.ndim - 1) + (kv_blocks,))
    is_earlier = columns < own_blocks
    return (columns == own_blocks).any(-2), is_earlier.all(-2)


def _top(scores: BlockScores, choosable: Any, own_blocks: Any, count: int) -> Choice:
    """Returns a layout with the `count` choosable blocks of each row that have the highest scores.

    Own blocks come first, and all of them are kept, even if they are more than `count`."""
    ranked = jnp.where(own_blocks, jnp.inf, jnp.where(choosable, scores, -jnp.inf))
    _, places = jax.lax.top_k(ranked, min(count, scores.shape[-1]))
    chosen = jnp.zeros(scores.shape, bool)
    chosen = jnp.put_along_axis(chosen, places, True, axis=-1, inplace=False)
    return (chosen & choosable) | own_blocks


class _BranchOptions(TypedDict, total=False):
    """The options of `native_sparse_attention` that each of its three calls takes."""

    scale: float | Array | None
    precision: Any
    implementation: str | None


@advised(_BranchOptions)
def native_sparse_attention(
    query: Queries,
    key: Keys,
    value: Values,
    gates: Float[Array, "*B T N 3"],
    *,
    block: int | tuple[int, int],
    count: int,
    window: int,
    compressed: tuple[Float[Array, "*B C K H"], Float[Array, "*B C K V"]] | None = None,
    **options: Unpack[_BranchOptions],
) -> Output:
    """NSA (Yuan et al. 2025, section 3): a gated sum of three causal attentions.

    The first attends to one compressed key for each whole block, the second to the tokens of the
    `count` blocks with the greatest weights in the first, the third to a sliding window. Queries
    and keys are at positions arange(T) and arange(S).

    Args:
        query: `[*B, T, N, H]`.
        key, value: `[*B, S, K, H]` and `[*B, S, K, V]`, of the same dtype. The heads that share a
            key head choose together, by the sum of their weights.
        gates: `[*B, T, N, 3]`, the factors of the three outputs; in the paper a sigmoid of a
            projection of the tokens.
        block: the size of a block, or a pair (queries, keys); `(1, size)` as in the paper. The
            first query of a block chooses for all; `chosen_blocks` says which sizes save time.
        count: the number of blocks that are kept; a query's own block, the one before it and the
            first block take precedence.
        window: the number of tokens in the window, each query's own included.
        compressed: the keys `[*B, C, K, H]` and values `[*B, C, K, V]` of the C = S // block whole
            blocks, from a network for instance; by default the means of each block.
        scale, precision, implementation: as in `attention`.

    Returns `[*B, T, N, V]` in the query's dtype. Raises TypeError or ValueError for arrays of the
    wrong shape or dtype, and for wrong sizes. Memory grows with T × S / block².

    >>> gates = jnp.full((2, 5, 4, 3), 1 / 3)
    >>> jattn.native_sparse_attention(q, k, v, gates, block=2, count=2, window=2).shape
    (2, 5, 4, 8)
    """
    q_block, kv_block = _block_sizes(block)
    check_size("count", count)
    check_size("window", window)
    shape = _check_queries_and_keys(query, key)
    check_array("value", value, "[*B, S, K, V]", ndim=3)
    check_array("value", value, "[*B, S, K, V]", shape=(*key.shape[:-1], value.shape[-1]))
    check_array("gates", gates, "[*B, T, N, 3]", shape=(*shape[:-1], 3))
    check_like("value", value, query)
    checked_scale(options.get("scale"), shape[-1])
    blocks = key.shape[-3] // kv_block
    if compressed is not None:
        if not isinstance(compressed, tuple | list) or len(compressed) != 2:
            got = shown(compressed)
            raise TypeError(f"compressed: expected a pair of keys and values, got {got}")
        tokens = (*key.shape[:-3], blocks, key.shape[-2])
        for n, x in enumerate((key, value)):
            letters = f"[*B, C, K, {'HV'[n]}]"
            check_array(f"compressed[{n}]", compressed[n], letters, shape=(*tokens, x.shape[-1]))
            check_like(f"compressed[{n}]", compressed[n], query)
    rest: Any = {name: x for name, x in options.items() if name != "scale"}
    rest |= {"sizes": (q_block, kv_block), "count": count, "window": window}
    return _gated_sum(query, key, value, gates, compressed, options.get("scale"), **rest)


@partitioned_by_xla(lambda query, *_, **__: QuerySharding.of(query).out)
def _gated_sum(
    query: Queries,
    key: Keys,
    value: Values,
    gates: Float[Array, "*B T N 3"],
    compressed: Any,
    scale: Any,
    *,
    sizes: tuple[int, int],
    count: int,
    window: int,
    **options: Any,
) -> Output:
    """Computes `native_sparse_attention`."""
    q_block, kv_block = sizes
    blocks, options = key.shape[-3] // kv_block, {"scale": scale, **options}
    key_c, value_c = _compressed(key, value, kv_block) if compressed is None else compressed
    ends = jnp.arange(1, blocks + 1, dtype=jnp.int32) * kv_block - 1
    weight_options: Any = {x: y for x, y in options.items() if x != "implementation"}
    weights = attention_weights(
        *jax.lax.stop_gradient((query[..., ::q_block, :, :], key_c)),
        mask=Causal(),
        q_positions=jnp.arange(0, query.shape[-3], q_block, dtype=jnp.int32),
        kv_positions=ends,
        **weight_options,
    )
    layout = _important(weights, query.shape[-3], key.shape[-3:-1], sizes, count)
    branches = (
        attention(query, key_c, value_c, mask=Causal(), kv_positions=ends, **options),
        attention(query, key, value, mask=Causal() & Blocks(layout, sizes), **options),
        attention(query, key, value, mask=Causal() & Window(left=window - 1), **options),
    )
    wide = accumulation(query.dtype)
    terms = [x.astype(wide) * gates[..., n, None].astype(wide) for n, x in enumerate(branches)]
    return sum(terms[1:], terms[0]).astype(query.dtype)


def _compressed(
    key: Keys, value: Values, size: int
) -> tuple[Float[Array, "*B C K H"], Float[Array, "*B C K V"]]:
    """Returns the means of the keys and of the values of each whole block."""

    def means(x: Float[Array, "*B S K H"]) -> Float[Array, "*B C K H"]:
        whole = x[..., : x.shape[-3] // size * size, :, :]
        return _block_means(whole, size, jnp.ones(whole.shape[:-2], bool))[0].astype(x.dtype)

    return means(key), means(value)


def _important(
    weights: Float[Array, "*B N Tb C"],
    T: int,
    key_sizes: Shape,
    sizes: tuple[int, int],
    count: int,
) -> Choice:
    """Returns the layout of the blocks with the greatest weights, the same for all heads that share
    one of the key heads. `key_sizes` are S and K; a last, partial block of keys has no weight."""
    (S, K), (*batch, N, rows, whole) = key_sizes, weights.shape
    columns = -(-S // sizes[1])
    by_group = weights.reshape(*batch, K, N // K, rows, whole).sum(-3)
    importance = jnp.pad(by_group, [(0, 0)] * (by_group.ndim - 1) + [(0, columns - whole)])
    positions = _with_batch_axes(jnp.arange(T, dtype=jnp.int32), len(batch))
    own_blocks, earlier = _own_and_earlier(positions, *sizes, columns)
    before_own, _ = _own_and_earlier(positions - sizes[1], *sizes, columns)
    always = before_own.at[..., :1].set(True)
    most = jnp.finfo(importance.dtype).max  # only own blocks, at infinity, come before `always`
    chosen = _top(jnp.where(always, most, importance), earlier, own_blocks, count)
    return jnp.repeat(chosen, N // K, axis=-3)
