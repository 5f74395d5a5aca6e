"""Attention by the formula: one head as the paper writes it, mapped over heads and batch.

    out = dropout(softmax(mask(score(q kᵀ × scale)))) v

Vaswani et al. 2017, equation 1. Memory grows with T × S. It has derivatives of every mode and
order, and all other implementations are compared with it.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from jattn import dropout, softmax, tile
from jattn._types import Index, Output, Tree, Weights
from jattn.kernels.common import reverse_mode, slicing
from jattn.kernels.common.one_operation import as_one_operation
from jattn.kernels.xla import normalized
from jattn.softmax import Normalizer
from jattn.spec import Spec, parameters, with_parameters


def _one_head(
    spec: Spec, b: Index, h: Index, q: Array, k: Array, v: Array
) -> tuple[Array, Normalizer]:
    rows, columns = tile.spans(spec, q.shape[0], k.shape[0])
    if spec.normalizer is not None:
        out = normalized.weighted_rows(slicing.HeadTile(spec, b, h, rows, columns), q, k, v)
        return out.astype(q.dtype), normalized.no_normalizer(out[:, 0])
    score = tile.scores(spec, q, k, b, h, rows, columns, v)
    greatest = softmax.greatest(tile.finite(v.astype(score.dtype)))
    factor = softmax.overflow_safe_factor(greatest, v.shape[0])

    def weigh(weights: Array) -> Array:
        dropped = dropout.drop(spec, weights, b, h, rows, columns)
        return tile.weighted_values(dropped, v.astype(score.dtype) * factor, spec.precision)

    out, normalizer = softmax.finish(softmax.contribution(score, weigh))
    return (out / factor).astype(q.dtype), normalizer


def _over_heads(
    one_head: Callable[..., Any], out_axes: Any, spec: Spec, query: Array, *keys: Array
) -> Tree:
    """Maps `one_head` over heads and batch as one operation, which hides NaN and infinities of
    masked numbers from JAX's debugging checks."""

    def formula(spec: Spec, inputs: Tree) -> Tree:
        params, query, keys = inputs
        spec = with_parameters(spec, params)
        results = tile.over_heads(one_head, spec, (query,), keys, out_axes=out_axes)
        return reverse_mode.varied_like(results, (spec, inputs))  # without keys they would not

    inputs = reverse_mode.varied_like((parameters(spec), query, keys), spec)
    return as_one_operation(formula)(spec, inputs)


def attend(spec: Spec, query: Array, key: Array, value: Array) -> tuple[Output, Normalizer]:
    """Computes `(out [B, T, N, V], normalizer of [B, N, T])` for one flat batch axis."""
    axes_of_heads = 1, Normalizer(0, 0)  # pyright: ignore[reportArgumentType]
    return _over_heads(_one_head, axes_of_heads, spec, query, key, value)


def _one_head_scores(spec: Spec, b: Index, h: Index, q: Array, k: Array) -> Array:
    rows, columns = tile.spans(spec, q.shape[0], k.shape[0])
    return tile.scores(spec, q, k, b, h, rows, columns)


def scores(spec: Spec, query: Array, key: Array) -> Weights:
    """Masked scores `[B, N, T, S]`."""
    return _over_heads(_one_head_scores, 0, spec, query, key)


def _one_head_weights(spec: Spec, b: Index, h: Index, q: Array, k: Array) -> Array:
    rows, columns = tile.spans(spec, q.shape[0], k.shape[0])
    score = tile.scores(spec, q, k, b, h, rows, columns)
    if spec.normalizer is not None:
        weights, _ = normalized.masked_weights(spec, score, b, h, rows, columns)
        return dropout.drop(spec, weights, b, h, rows, columns)
    part = softmax.contribution(score, lambda weights: weights)
    return dropout.drop(spec, softmax.finish(part)[0], b, h, rows, columns)


def normalizer(spec: Spec, query: Array, key: Array) -> Normalizer:
    """Computes the normalizer of each query, of `[B, N, T]`."""
    return attend(spec, query, key, jnp.zeros((*key.shape[:-1], 0), key.dtype))[1]


def weights(spec: Spec, query: Array, key: Array) -> Weights:
    """Weights after softmax and dropout `[B, N, T, S]`; a row without keys is 0."""
    return _over_heads(_one_head_weights, 0, spec, query, key)
