"""ALiBi: attention with linear biases.

The score falls linearly with the distance, with a fixed slope m for each head. Nothing else tells
the model about positions, so that it also works on longer texts than it was trained on:

    s_(ij) = (q_i · k_j) / √H − m_n (i − j)
    m_n = 2^(−8n/N)

Press, Smith, Lewis 2022, Train Short, Test Long: Attention with Linear Biases Enables Input Length
Extrapolation. arXiv:2108.12409
"""

import jax.numpy as jnp
import numpy as np

import jattn
from experiments.gallery import plain
from experiments.gallery.variant import Language, Variant, causal
from jattn import masks, scores


def attention(q: plain.Queries, k: plain.Keys, v: plain.Values) -> plain.Output:
    bias = scores.Alibi(scores.alibi_slopes(q.shape[1]))
    return jattn.attention(q, k, v, mask=masks.Causal(), score=bias)


def dense(q: plain.Queries, k: plain.Keys, v: plain.Values) -> plain.Output:
    T, N, _ = q.shape
    slopes = np.float32(2.0) ** (-8 * np.arange(1, N + 1, dtype=np.float32) / np.float32(N))
    places = jnp.arange(T, dtype=jnp.float32)
    biased = plain.scores(q, k) - slopes[:, None, None] * (places[:, None] - places)
    return plain.mean(plain.softmax(biased, plain.causal(T)), v)


VARIANT = Variant(__doc__, plain.heads, attention, dense, Language(is_rotary=False), causal)
