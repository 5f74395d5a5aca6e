"""Linear attention by chunks of tokens: matrix products within a chunk, running sums between.

`attend` computes, for query i and the keys j ≤ i,

    numerator_i = Σ_j w_ij value_j,   denominator_i = Σ_j w_ij,
    w_ij = Σ_f query_if key_jf exp(Σ_{j < l ≤ i} log_decay_lf),

in time and memory linear in the tokens. The sums of log decays, which are at most 0, are built from
the sums of halves of a chunk, by additions only. So no exponential exceeds 1, no difference of long
sums loses digits, and a log decay of −inf, which forgets all earlier tokens, is exact.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jattn.kernels.protocol import LinearKernel
from jattn.softmax import quotient


Sums = tuple[Float[Array, "B K F V"], Float[Array, "B K F"]]
"""The decayed sums of key ⊗ value, and of the keys."""


class Formula(NamedTuple):
    """The rules by which a kernel computes linear attention.

    chunk: the number of tokens of a chunk, a power of two.
    maps: whether the queries and keys given are mapped to their features elu(x) + 1.
    divides: whether the results are numerator / denominator, and 0 if the denominator is 0.
    strict: whether the pairs i = j are left out.
    """

    chunk: int
    maps: bool
    divides: bool
    strict: bool = False


def elu_plus_one(x: Array) -> Array:
    """Returns elu(x) + 1, computed as exp(x) for x ≤ 0, which loses no digits."""
    return jnp.where(x > 0, x + 1, jnp.exp(jnp.where(x > 0, 0, x)))


def attend(
    formula: Formula,
    query: Float[Array, "B T N F"],
    key: Float[Array, "B T K F"],
    value: Float[Array, "B T K V"],
    log_decay: Float[Array, "B T K d"] | None,
    sums: Sums,
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"], Sums]:
    """Returns the results or numerators, the denominators, and the sums after the last token.

    `log_decay` has one number for each token (d = 1) or for each token and feature (d = F). `sums`
    are those of earlier tokens.
    """
    if formula.maps:
        query, key = elu_plus_one(query), elu_plus_one(key)
    (B, T, N, F), K = query.shape, key.shape[2]
    size = formula.chunk
    if isinstance(T, int):  # else a symbol of an exported program
        size = min(size, 1 << max(T - 1, 0).bit_length())
    chunks = -(-T // size)

    def cut(x: Any) -> Any:
        """Cuts tokens `[B, T, K, ...]` into chunks `[chunks, B * K, ..., C, _]`."""
        x = jnp.pad(x, [(0, 0), (0, chunks * size - T), *[(0, 0)] * (x.ndim - 2)])
        x = jnp.moveaxis(x.reshape(B, chunks, size, *x.shape[2:]), (1, 2), (0, -2))
        return x.reshape(chunks, B * K, *x.shape[3:])

    def joined(x: Any) -> Any:
        """Returns the tokens `[B, T, N, _]` of chunks `[chunks, B * K, G, C, _]`."""
        x = jnp.moveaxis(x.reshape(chunks, B, N, size, x.shape[-1]), (0, -2), (1, 2))
        return x.reshape(B, chunks * size, N, x.shape[-1])[:, :T]

    step = jax.checkpoint(functools.partial(_chunk, strict=formula.strict), prevent_cse=False)
    by_head = jax.tree.map(lambda x: x.reshape(B * K, *x.shape[2:]), sums)
    tokens = query.reshape(B, T, K, N // K, F), key, value, log_decay
    by_head, results = lax.scan(step, by_head, jax.tree.map(cut, tokens))
    numerator, denominator = joined(results[0]), joined(results[1][..., None])[..., 0]
    sums = jax.tree.map(lambda x, like: x.reshape(like.shape), by_head, sums)
    out = quotient(numerator, denominator[..., None]) if formula.divides else numerator
    return out, denominator, sums


def _chunk(sums: Any, tokens: Any, *, strict: bool) -> tuple[Any, tuple[Array, Array]]:
    """Returns the sums after a chunk, and the numerators and denominators of its queries.

    Queries are `[r, G, C, F]`, keys `[r, C, F]`, for r key heads of all batch rows.
    """
    query, key, value, log_decay = tokens
    r, C, _ = key.shape
    product = functools.partial(jnp.einsum, "rgif,rjf->rgij", query, key)
    if log_decay is None:
        weights = jnp.where(jnp.tri(C, k=-strict, dtype=bool), product(), 0)
        return _with_earlier(sums, query, key, value, weights)
    before, after, levels = _sums_of_logs(log_decay)
    if log_decay.shape[-1] == 1:
        decays = (jnp.exp(right + jnp.swapaxes(left, -1, -2)) for right, left in levels)
        diagonal = jnp.full((r, C), 0 if strict else 1, key.dtype)
        weights = product() * _lower_triangle(diagonal, decays)[:, None]
    else:
        pairs = (_pairs(query, key, *level) for level in levels)
        diagonal = jnp.einsum("rgif,rif->rgi", query, key)
        weights = _lower_triangle(jnp.zeros_like(diagonal) if strict else diagonal, pairs)
    total = jnp.exp(before[:, -1])
    decayed = sums[0] * total[..., None], sums[1] * total
    query, key = query * jnp.exp(before)[:, None], key * jnp.exp(after)
    return _with_earlier(sums, query, key, value, weights, decayed)


def _with_earlier(
    sums: Any, query: Array, key: Array, value: Array, weights: Array, decayed: Any = None
) -> tuple[Any, tuple[Array, Array]]:
    """Returns the results of `_chunk`. `query` includes the decay since the chunk's start; `key`
    and `decayed`, the earlier sums, include the decay to its end."""
    numerator = jnp.einsum("rgij,rjv->rgiv", weights, value)
    numerator += jnp.einsum("rgif,rfv->rgiv", query, sums[0])
    denominator = jnp.sum(weights, axis=-1) + jnp.einsum("rgif,rf->rgi", query, sums[1])
    by_value, by_key = sums if decayed is None else decayed
    by_value += jnp.einsum("rjf,rjv->rfv", key, value)
    return (by_value, by_key + jnp.sum(key, axis=1)), (numerator, denominator)


def _sums_of_logs(
    logs: Float[Array, "r C d"],
) -> tuple[Float[Array, "r C d"], Float[Array, "r C d"], list[tuple[Array, Array]]]:
    """Returns for each token the sum of the logs up to and including it, and the sum of those after
    it; and the sums of each level.

    Level m = 1, 2, 4, ... has blocks of 2m tokens. Its sums `[r, C/2m, m, d]` are: for tokens of
    the right half of a block, from the middle to the token; for the left half, from behind the
    token to the middle.
    """
    before, after = logs[:, :, None], jnp.zeros_like(logs)[:, :, None]
    levels: list[tuple[Array, Array]] = []
    while before.shape[1] > 1:
        (left_before, right_before), (left_after, right_after) = map(_halves, (before, after))
        levels.append((right_before, left_after))
        left_total, right_total = left_before[..., -1:, :], right_before[..., -1:, :]
        before = jnp.concatenate([left_before, right_before + left_total], axis=-2)
        after = jnp.concatenate([left_after + right_total, right_after], axis=-2)
    return before[:, 0], after[:, 0], levels


def _halves(blocks: Float[Array, "... n m d"]) -> tuple[Array, Array]:
    """Returns the first and the second of each two blocks."""
    *lead, n, m, d = blocks.shape
    pairs = blocks.reshape(*lead, n // 2, 2, m, d)
    return pairs[..., 0, :, :], pairs[..., 1, :, :]


def _pairs(
    query: Float[Array, "r G C F"],
    key: Float[Array, "r C F"],
    right: Float[Array, "r n m F"],
    left: Float[Array, "r n m F"],
) -> Float[Array, "r G n m m"]:
    """Computes the weights of queries in right halves and keys in left halves of blocks."""
    r, G, C, F = query.shape
    m = right.shape[2]
    _, queries = _halves(query.reshape(r, G, C // m, m, F))
    keys, _ = _halves(key.reshape(r, C // m, m, F))
    queries, keys = queries * jnp.exp(right)[:, None], keys * jnp.exp(left)
    return jnp.einsum("rgnif,rnjf->rgnij", queries, keys)


def _lower_triangle(diagonal: Float[Array, "... C"], blocks: Any) -> Float[Array, "... C C"]:
    """Builds triangular matrices from their diagonals and the blocks `[..., n, m, m]` below them,
    for m = 1, 2, 4, ..."""
    matrix = diagonal[..., None, None]
    for block in blocks:
        first, second = _halves(matrix)
        upper = jnp.concatenate([first, jnp.zeros_like(block)], axis=-1)
        lower = jnp.concatenate([block, second], axis=-1)
        matrix = jnp.concatenate([upper, lower], axis=-2)
    return matrix[..., 0, :, :]


KERNEL = LinearKernel(lambda operands: None, attend)
