"""Entmax-1.5.

A weight is the square of what of half a score exceeds a threshold τ, which makes the weights of a
query sum to 1. More keys have a weight than with sparsemax, fewer than with softmax:

    w_(ij) = max(s_(ij) / 2 − τ_i, 0)²

The plain formula finds τ by bisection; a step of Newton's method then gives it its derivative.

Peters, Niculae, Martins 2019, Sparse Sequence-to-Sequence Models. arXiv:1905.05702
"""

import jax
import jax.numpy as jnp

import jattn
from experiments.gallery import plain
from experiments.gallery.variant import Language, Variant, causal
from jattn import masks, normalizers


def attention(q: plain.Queries, k: plain.Keys, v: plain.Values) -> plain.Output:
    return jattn.attention(q, k, v, mask=masks.Causal(), normalizer=normalizers.Entmax(1.5))


def dense(q: plain.Queries, k: plain.Keys, v: plain.Values) -> plain.Output:
    halves = jnp.where(plain.causal(len(q)), plain.scores(q, k) / 2, -1e9)

    def halve(n: int, low: plain.Scores) -> plain.Scores:
        middle = low + 0.5 ** (n + 1.0)
        total = jnp.sum(jnp.maximum(fixed - middle, 0) ** 2, axis=-1, keepdims=True)
        return jnp.where(total >= 1, middle, low)

    fixed = jax.lax.stop_gradient(halves)
    low = jax.lax.fori_loop(0, 22, halve, jnp.max(fixed, axis=-1, keepdims=True) - 1)
    above = jnp.maximum(halves - low, 0)
    total, slope = (jnp.sum(x, axis=-1, keepdims=True) for x in (above**2, 2 * above))
    return plain.mean(jnp.maximum(halves - low - (total - 1) / slope, 0) ** 2, v)


VARIANT = Variant(__doc__, plain.heads, attention, dense, Language(), causal)
