"""Attention with any normalizer other than the softmax, by blocks of queries.

A block of queries has the scores of all its keys at once, so that a normalizer sees whole rows, and
memory is linear in T and S. Derivatives of all modes and orders are JAX's own; the backward pass
computes each block again (`jax.checkpoint`).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float

from jattn import masks, tile, tuning
from jattn._pytree import axis_names
from jattn._types import Index, Scores, Tree, accumulation
from jattn.kernels.common import slicing, tile_schedule
from jattn.kernels.common.derivatives import PerQuery, TangentInputs
from jattn.kernels.common.tile_schedule import TileRun
from jattn.softmax import Normalizer
from jattn.spec import Shapes, Spec, Tiling, parameters, scores_are_weights, with_parameters


def weights_and_mask(
    head_tile: slicing.HeadTile, q: Float[Array, "t H"], k: Float[Array, "S H"]
) -> tuple[Float[Array, "t S"], Bool[Array, "t S"]]:
    """Computes the weights of t queries of one head for all their keys, before dropout, and which
    keys they may attend to."""
    spec, *indices = head_tile
    score = head_tile.modify(tile.pair_products(spec, q, k), True)
    return masked_weights(spec, score, *indices)


def weighted_rows(
    head_tile: slicing.HeadTile, q: Float[Array, "t H"], k: Float[Array, "S H"], v: Any
) -> Float[Array, "t V"]:
    """Computes the output of t queries of one head from all keys that they may attend to.

    A query that attends to a value that is not finite gets NaN, whatever the weight.
    """
    weights, allowed = weights_and_mask(head_tile, q, k)
    out = tile.weighted_values(head_tile.drop(weights), v, head_tile.spec.precision)
    nonfinite = jnp.isnan(tile.nan_where_nonfinite(v))[None, :]
    return jnp.where(jnp.any(allowed & nonfinite, axis=1)[:, None], jnp.nan, out)


def masked_weights(
    spec: Spec, score: Scores, b: Index, h: Index, rows: Any, columns: Any
) -> tuple[Scores, Bool[Array, "t S"]]:
    """Computes the weights before dropout, 0 for masked pairs, and which pairs the mask allows."""
    allowed = jnp.broadcast_to(spec.mask.evaluate(b, h, rows, columns), score.shape)
    # The cotangent of a masked weight may be infinite, and infinity × 0 would be NaN.
    weights = _weights_of_scores(spec, score, b, h, rows, columns)
    return jnp.where(allowed, weights, 0), allowed


def _weights_of_scores(
    spec: Spec, score: Scores, b: Index, h: Index, rows: Any, columns: Any
) -> Scores:
    """Computes the weights before dropout from the scores `[t, S]` that `tile.modify` returns.

    Raises TypeError if the normalizer does not return floats `[t, S]`.
    """
    if scores_are_weights(spec):
        return score
    normalizer: Any = spec.normalizer
    weights = normalizer.weights(score, b, h, rows, columns)
    is_array = isinstance(weights, jax.Array)
    is_float = is_array and jnp.issubdtype(weights.dtype, jnp.floating)
    if not is_float or weights.shape != score.shape:
        got = f"{weights.dtype} {list(weights.shape)}" if is_array else type(weights).__name__
        raise TypeError(
            f"normalizer: {type(normalizer).__name__}.weights must return floats [t, S] = "
            f"{list(score.shape)}, got {got}"
        )
    return weights.astype(score.dtype)


def no_normalizer(zeros: Array) -> Normalizer:
    """Returns zeros in place of the normalizer of a softmax."""
    return Normalizer(jnp.zeros_like(zeros), jnp.zeros_like(zeros))


class _BlockRun(NamedTuple):
    """A run: consecutive blocks of queries, each with the same number of consecutive keys.

    first: the number of the first block.
    starts: the first key of each block.
    width: the number of keys of a block.
    """

    first: int
    starts: np.ndarray
    width: int


_MAX_RUNS = 4  # each run is compiled separately


def _runs(spec: Spec, T: int, S: int, tiling: Tiling) -> list[_BlockRun]:
    """Returns runs of blocks whose keys include all that the queries may attend to."""
    n = -(-T // tiling.block_q)
    if jax.tree.leaves((spec.mask, spec.q_positions, spec.kv_positions)):
        return [_BlockRun(0, np.zeros(n, np.int32), S)]
    visited = np.asarray(tile_schedule.kinds(spec, T, S, tiling)) != masks.EMPTY
    has_keys = visited.any(axis=1)
    first = np.where(has_keys, visited.argmax(axis=1), 0) * tiling.block_kv
    stop = np.where(has_keys, visited.shape[1] - visited[:, ::-1].argmax(axis=1), 0)
    stop = stop * tiling.block_kv
    runs = []
    for blocks in np.array_split(np.arange(n), min(n, _MAX_RUNS)):
        low, high = first[blocks], np.minimum(stop[blocks], S)
        width = int(min(S, max(1, (high - low).max())))
        starts = np.minimum(low, S - width).astype(np.int32)
        runs.append(_BlockRun(int(blocks[0]), starts, width))
    return runs


def _tiling(shapes: Shapes, platform: str) -> Tiling:
    """Returns blocks of queries whose scores of all heads that run at once have about
    `tuning.row_scores` entries."""
    heads = shapes.N * (1 if tuning.sizes(platform).in_turn else shapes.B)
    rows = max(1, tuning.current().row_scores // max(1, heads * shapes.S))
    block_q = tile_schedule.even(shapes.T, max(8, rows))
    return Tiling(block_q, min(shapes.S, 128))


def _by_block(letters: str, leaf: Array, n: int) -> Array | None:
    """Returns an array of one head with its axis T split into n leading blocks; None without T."""
    for axis, letter in slicing.token_axes(letters, leaf):
        if letter == "T":
            split = leaf.reshape(*leaf.shape[:axis], n, -1, *leaf.shape[axis + 1 :])
            return jnp.moveaxis(split, axis, 0)
    return None


BlockFunction = Callable[..., tuple[Tree, Array | None]]
"""A function `(tiles, q [t, H], *by_key [s, ...])` of a block of t queries and s keys; `tiles` has
one for each spec. It returns a tree of arrays `[t, ...]`, and an array `[s]` to sum over the
blocks, or None."""


def _one_head(
    of_block: BlockFunction,
    runs: Sequence[_BlockRun],
    block_q: int,
    specs: tuple[Spec, ...],
    b: Index,
    h: Index,
    q: Array,
    *by_key: Array,
    total: Array | None,
) -> tuple[Tree, Array | None]:
    """Computes `by_blocks` of one head; the specs are padded to whole blocks."""
    n = -(-len(q) // block_q)
    leaves, structure = jax.tree.flatten(specs)
    names = jax.tree.leaves(axis_names(specs))
    split = [_by_block(x, leaf, n) for x, leaf in zip(names, leaves, strict=True)]
    queries = slicing.pad_to(q, n * block_q).reshape(n, block_q, -1)

    def run(total: Array | None, blocks: _BlockRun) -> tuple[Array | None, Tree]:
        @jax.checkpoint
        def block(operands: Any) -> Any:
            i, start, q, split = operands
            block_leaves = [x if y is None else y for x, y in zip(leaves, split, strict=True)]
            keys = TileRun(start, blocks.width, True)
            tiles = [
                slicing.HeadTile.at(spec, b, h, i * block_q, block_q, keys)
                for spec in jax.tree.unflatten(structure, block_leaves)
            ]
            return of_block(tiles, q, *(slicing.take(x, start, blocks.width) for x in by_key))

        def step(total: Array | None, operands: Any) -> tuple[Array | None, Tree]:
            by_query, key_sums = block(operands)
            if total is not None:
                total = slicing.add_at(total, key_sums, operands[1], 0)
            return total, by_query

        stop = blocks.first + len(blocks.starts)
        i = jnp.arange(blocks.first, stop, dtype=jnp.int32)
        run_arrays = jax.tree.map(lambda x: x[blocks.first : stop], (queries, split))
        return lax.scan(step, total, (i, jnp.asarray(blocks.starts), *run_arrays))

    results = []
    for blocks in runs:
        total, by_query = run(total, blocks)
        results.append(jax.tree.map(tile_schedule.concatenate_blocks, by_query))
    return jax.tree.map(lambda *x: jnp.concatenate(x)[: len(q)], *results), total


def by_blocks(
    of_block: BlockFunction,
    platform: str,
    specs: tuple[Spec, ...],
    query: Array,
    *by_key: Array,
    out_axes: Any,
    sums_keys: bool = False,
) -> tuple[Tree, Array | None]:
    """Computes the results of `of_block` for all blocks of queries of all heads, joined.

    The first spec decides which keys a block has. For `out_axes` see `tile.over_heads`. With
    `sums_keys`, the second result is the sum over the blocks; else None.
    """
    shapes, dtype = Shapes.of(query, by_key[-1]), accumulation(query.dtype)
    tiling = _tiling(shapes, platform)
    T = -(-shapes.T // tiling.block_q) * tiling.block_q
    padded = tuple(slicing.pad_spec(x, shapes.T, shapes.S, T, shapes.S) for x in specs)
    runs = _runs(padded[0], T, shapes.S, tiling)
    total = jnp.zeros(shapes.S, dtype) if sums_keys else None
    one_head = functools.partial(_one_head, of_block, runs, tiling.block_q, total=total)
    over_batch = tile.map_in_sequence if tuning.sizes(platform).in_turn else jax.vmap
    operands = (query, *by_key)
    if specs[0].pair is None:
        operands = tuple(x.astype(dtype) for x in operands)
    return tile.over_heads(one_head, padded, operands[:1], operands[1:], out_axes, over_batch)


def attend(platform: str, spec: Spec, query: Array, key: Array, value: Array) -> Array:
    """Computes `out [B, T, N, V]` in the accumulation dtype."""

    def of_block(tiles: Sequence[slicing.HeadTile], q: Array, k: Array, v: Array) -> Any:
        return weighted_rows(tiles[0], q, k, v), None

    return by_blocks(of_block, platform, (spec,), query, key, value, out_axes=1)[0]


def _attend_with(spec: Spec, platform: str, params: list[Array], *qkv: Array) -> Array:
    return attend(platform, with_parameters(spec, params), *qkv)


def forward(platform: str, spec: Spec, *qkv: Array) -> tuple[Array, Normalizer, Array]:
    """Computes the results of the forward function of an `AttentionVJP`."""
    out = attend(platform, spec, *qkv)
    return out, no_normalizer(out[..., 0]), jnp.zeros((), bool)


def backward(
    platform: str, spec: Spec, per_query: PerQuery, key: Array, value: Array
) -> tuple[Any, Array, Array, Array]:
    """Computes the gradients of parameters, query, key and value."""
    operands = [x.astype(accumulation(x.dtype)) for x in (per_query.query, key, value)]
    _, pull = jax.vjp(functools.partial(_attend_with, spec, platform), parameters(spec), *operands)
    return pull(per_query.d_out)


def tangent(
    platform: str, spec: Spec, d_params: list[Array], inputs: TangentInputs, *keys: Array
) -> tuple[Array, Array]:
    """Computes the tangents `[B, T, N, V]` of out, and zeros for those of lse."""
    arrays = (inputs.query, inputs.tangent, *keys)
    q, dq, k, dk, v, dv = (x.astype(accumulation(x.dtype)) for x in arrays)
    function = functools.partial(_attend_with, spec, platform)
    _, d_out = jax.jvp(function, (parameters(spec), q, k, v), (d_params, dq, dk, dv))
    return d_out, jnp.zeros(d_out.shape[:-1], d_out.dtype)
