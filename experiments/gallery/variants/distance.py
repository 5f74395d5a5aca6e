"""L2 attention: the score is a negative squared distance.

A query attends to the keys near it, whereas the product of the usual score also prefers long keys:

    s_(ij) = −|q_i − k_j|² / √H

|q − k|² = |q|² − 2 q · k + |k|², and the softmax cancels |q|², which is the same for all keys. So a
score function that reads |k|² is enough.

Kim, Papamakarios, Mnih 2021, The Lipschitz Constant of Self-Attention. arXiv:2006.04710
"""

import jax.numpy as jnp

import jattn
from experiments.gallery import plain
from experiments.gallery.variant import Language, Variant, causal
from jattn import masks, scores


def attention(q: plain.Queries, k: plain.Keys, v: plain.Values) -> plain.Output:
    lengths = jnp.sum(k * k, axis=-1) / jnp.sqrt(jnp.float32(k.shape[-1]))
    negative = scores.Score(lambda s, b, h, q, kv, lengths: 2 * s - lengths[kv, h], lengths)
    return jattn.attention(q, k, v, mask=masks.Causal(), score=negative)


def dense(q: plain.Queries, k: plain.Keys, v: plain.Values) -> plain.Output:
    squares = [jnp.einsum("tnh,tnh->nt", x, x) for x in (q, k)]
    distances = squares[0][:, :, None] + squares[1][:, None] - 2 * jnp.einsum("tnh,snh->nts", q, k)
    negative = -distances / jnp.sqrt(jnp.float32(q.shape[-1]))
    return plain.mean(plain.softmax(negative, plain.causal(len(q))), v)


VARIANT = Variant(__doc__, plain.heads, attention, dense, Language(), causal)
