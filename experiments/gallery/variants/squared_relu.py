"""Squared ReLU.

Negative scores have no weight, and the other weights grow with the square of the score. They
are divided by the number of keys S, not by a sum of weights:

    w_(ij) = max(s_(ij), 0)² / S

ReLU without the square is the same call with power 1. So et al. (2021, arXiv:2109.08668) found the
square for feed-forward networks; the paper below tries it, among others, for attention.

Wortsman, Lee, Gilmer, Kornblith 2023, Replacing Softmax with ReLU in Vision Transformers.
arXiv:2309.08586
"""

import jax.numpy as jnp

import jattn
from experiments.gallery import plain
from experiments.gallery.variant import Language, Variant, causal
from jattn import masks, normalizers


def attention(q: plain.Queries, k: plain.Keys, v: plain.Values) -> plain.Output:
    squared = normalizers.Relu(2, count_power=1)
    return jattn.attention(q, k, v, mask=masks.Causal(), normalizer=squared)


def dense(q: plain.Queries, k: plain.Keys, v: plain.Values) -> plain.Output:
    scores = plain.scores(q, k)
    counts = plain.causal(len(q)) & (scores > 0)
    return plain.mean(jnp.where(counts, scores * scores / len(k), 0), v)


VARIANT = Variant(__doc__, plain.heads, attention, dense, Language(), causal)
