"""Sigmoid attention.

Each weight is the sigmoid of its own score, so that keys do not compete and no sum over the keys is
needed. The bias −log S, for S keys, makes the weights of a query sum to about 1 at first:

    w_(ij) = σ((q_i · k_j) / √H − log S)

Ramapuram, Danieli, Dhekane et al. 2024, Theory, Analysis, and Best Practices for Sigmoid
Self-Attention. arXiv:2409.04431
"""

import jax.numpy as jnp

import jattn
from experiments.gallery import plain
from experiments.gallery.variant import Language, Variant, causal
from jattn import masks, normalizers


def attention(q: plain.Queries, k: plain.Keys, v: plain.Values) -> plain.Output:
    return jattn.attention(q, k, v, mask=masks.Causal(), normalizer=normalizers.Sigmoid())


def dense(q: plain.Queries, k: plain.Keys, v: plain.Values) -> plain.Output:
    weights = 1 / (1 + len(k) * jnp.exp(-plain.scores(q, k)))
    return plain.mean(jnp.where(plain.causal(len(q)), weights, 0), v)


VARIANT = Variant(__doc__, plain.heads, attention, dense, Language(), causal)
