"""Persistent memory: learned keys and values.

Queries also attend to M keys and values that are parameters, and replace feed-forward networks:

    O = softmax([Q K^T, Q K_M^T] / √H) [V, V_M]

`jattn.merge` joins the outputs of both parts by their denominators. It copies no keys.

Sukhbaatar, Grave, Lample, Jegou, Joulin 2019, Augmenting Self-attention with Persistent Memory.
arXiv:1907.01470
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import jattn
from experiments.gallery import plain
from experiments.gallery.variant import Arrays, Language, Variant, causal
from jattn import masks


def inputs(key: Array, T: int) -> Arrays:
    shape = (16, plain.HEADS, plain.SIZE)
    return plain.heads(key, T, memory_k=shape, memory_v=shape)


def attention(
    q: plain.Queries, k: Array, v: Array, memory_k: plain.Keys, memory_v: plain.Values
) -> plain.Output:
    tokens = jattn.attention(q, k, v, mask=masks.Causal(), return_lse=True)
    return jattn.merge(tokens, jattn.attention(q, memory_k, memory_v, return_lse=True))[0]


def dense(
    q: plain.Queries, k: Array, v: Array, memory_k: plain.Keys, memory_v: plain.Values
) -> plain.Output:
    keys, values = jnp.concatenate([k, memory_k]), jnp.concatenate([v, memory_v])
    allowed = np.pad(plain.causal(len(q)), ((0, 0), (0, len(memory_k))), constant_values=True)
    return plain.mean(plain.softmax(plain.scores(q, keys), allowed), values)


def weights(q: plain.Queries, k: plain.Keys, memory_k: plain.Keys, **_: Array) -> plain.Scores:
    mask = masks.Causal() | ~masks.Prefix(len(k))
    return jattn.attention_weights(q, jnp.concatenate([k, memory_k]), mask=mask)


def initial(N: int, H: int) -> Arrays:
    return dict.fromkeys(("memory_k", "memory_v"), jax.random.normal(jax.random.key(0), (16, N, H)))


VARIANT = Variant(__doc__, inputs, attention, dense, Language(initial), causal, weights)
