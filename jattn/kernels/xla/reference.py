"""Attention by the formula: one head as it is written in the paper, mapped over heads and batch.

    out = dropout(softmax(mask(score(q kᵀ × scale)))) v

Vaswani et al. 2017, equation 1. Memory grows with T × S. Differentiable in every mode and order,
and what every other implementation is compared with.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from jattn import dropout, softmax, tile
from jattn._types import LogSumExp, Output, Weights
from jattn.kernels.common import reverse_mode
from jattn.spec import Shapes, Spec


def supports(spec: Spec, shapes: Shapes) -> str | None:
    """None: the reference computes everything."""
    return None


def _one_head(spec: Spec, b: Any, h: Any, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
    rows, columns = tile.spans(spec, q.shape[0], k.shape[0])
    score = tile.scores(spec, q, k, b, h, rows, columns, v)
    factor = softmax.headroom(softmax.greatest(tile.finite(v.astype(score.dtype))), v.shape[0])

    def weigh(weights: Array) -> Array:
        dropped = dropout.drop(spec, weights, b, h, rows, columns)
        return tile.weigh(dropped, v.astype(score.dtype) * factor, spec.precision)

    out, normalizer = softmax.finish(softmax.of(score, weigh))
    return (out / factor).astype(q.dtype), normalizer.lse


def attend(spec: Spec, query: Array, key: Array, value: Array) -> tuple[Output, LogSumExp]:
    """`(out [B, T, N, V], lse [B, N, T])` for one flat batch axis."""
    found = tile.over_heads(_one_head, spec, (query,), (key, value), out_axes=(1, 0))
    return reverse_mode.varied_like(
        found, (spec, query, key, value)
    )  # without keys it reads nothing


def _one_head_scores(spec: Spec, b: Any, h: Any, q: Array, k: Array) -> Array:
    rows, columns = tile.spans(spec, q.shape[0], k.shape[0])
    return tile.scores(spec, q, k, b, h, rows, columns)


def scores(spec: Spec, query: Array, key: Array) -> Weights:
    """Masked scores `[B, N, T, S]`."""
    return tile.over_heads(_one_head_scores, spec, (query,), (key,), out_axes=0)


def _one_head_weights(spec: Spec, b: Any, h: Any, q: Array, k: Array) -> Array:
    rows, columns = tile.spans(spec, q.shape[0], k.shape[0])
    score = tile.scores(spec, q, k, b, h, rows, columns)
    part = softmax.of(score, lambda weights: weights)
    return dropout.drop(spec, softmax.finish(part)[0], b, h, rows, columns)


def lse(spec: Spec, query: Array, key: Array) -> LogSumExp:
    """The log of the denominator `[B, N, T]`."""
    return attend(spec, query, key, jnp.zeros((*key.shape[:-1], 0), key.dtype))[1]


def weights(spec: Spec, query: Array, key: Array) -> Weights:
    """Weights after softmax and dropout `[B, N, T, S]`; a row without keys is 0."""
    return tile.over_heads(_one_head_weights, spec, (query,), (key,), out_axes=0)
