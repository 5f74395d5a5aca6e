"""Sparsemax.

A weight is what of a score exceeds a threshold τ, which makes the weights of a query sum to 1. Most
of them are exactly 0:

    w_(ij) = max(s_(ij) − τ_i, 0)

With the scores in descending order, τ = (s_1 + … + s_n − 1) / n for the greatest n for which s_n
exceeds this number.

Martins, Astudillo 2016, From Softmax to Sparsemax: A Sparse Model of Attention and Multi-Label
Classification. arXiv:1602.02068
"""

import jax.numpy as jnp

import jattn
from experiments.gallery import plain
from experiments.gallery.variant import Language, Variant, causal
from jattn import masks, normalizers


def attention(q: plain.Queries, k: plain.Keys, v: plain.Values) -> plain.Output:
    return jattn.attention(q, k, v, mask=masks.Causal(), normalizer=normalizers.Sparsemax())


def dense(q: plain.Queries, k: plain.Keys, v: plain.Values) -> plain.Output:
    scores = jnp.where(plain.causal(len(q)), plain.scores(q, k), -1e9)
    descending = jnp.sort(scores, descending=True)
    thresholds = (jnp.cumsum(descending, axis=-1) - 1) / (1.0 + jnp.arange(len(k)))
    count = jnp.sum(descending > thresholds, axis=-1, keepdims=True)
    threshold = jnp.take_along_axis(thresholds, count - 1, axis=-1)
    return plain.mean(jnp.maximum(scores - threshold, 0), v)


VARIANT = Variant(__doc__, plain.heads, attention, dense, Language(), causal)
