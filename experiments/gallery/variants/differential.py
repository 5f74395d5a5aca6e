"""Differential attention.

Each head has two queries and two keys, and subtracts λ times the second softmax from the first, so
that weights on unimportant tokens cancel:

    O = (W_1 − λ W_2) V
    W_n = softmax((Q_n K_n^T) / √H)
    λ = e^(a · b) − e^(c · d) + λ_0

The paper also normalises the output of each head.

Ye, Dong, Xia et al. 2025, Differential Transformer. arXiv:2410.05258
"""

import jax.numpy as jnp
from jax import Array

import jattn
from experiments.gallery import plain
from experiments.gallery.variant import Arrays, Language, Variant, causal
from jattn import masks


def inputs(key: Array, T: int) -> Arrays:
    N, H = plain.HEADS, plain.SIZE // 2
    pairs = plain.heads(key, T, 2 * N, H, abcd=(4, H))
    return {**pairs, "v": pairs["v"][:, :N], "abcd": 0.2 * pairs["abcd"]}


def attention(q: plain.Queries, k: plain.Keys, v: Array, abcd: Array) -> plain.Output:
    a, b, c, d = abcd
    both = jattn.attention(q, k, jnp.repeat(v, 2, axis=1), mask=masks.Causal())
    return both[:, ::2] - (jnp.exp(a @ b) - jnp.exp(c @ d) + 0.8) * both[:, 1::2]


def dense(q: plain.Queries, k: plain.Keys, v: Array, abcd: Array) -> plain.Output:
    factor = jnp.exp(jnp.sum(abcd[0] * abcd[1])) - jnp.exp(jnp.sum(abcd[2] * abcd[3])) + 0.8
    weights = plain.softmax(plain.scores(q, k), plain.causal(len(q)))
    return plain.mean(weights[::2] - factor * weights[1::2], v)


LANGUAGE = Language(lambda N, H: {"abcd": jnp.full((4, H), 0.1)}, q_heads=2)
VARIANT = Variant(__doc__, inputs, attention, dense, LANGUAGE, causal)
