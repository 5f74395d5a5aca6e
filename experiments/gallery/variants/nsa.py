"""Native sparse attention (NSA).

Three attentions are summed, with gates g that are computed from the token. The first attends to
compressed keys, here the means of 16 blocks. The second attends to the tokens of four blocks: the
first, the query's own, the one before, and that with the greatest weight in the first attention.
The third attends to a sliding window:

    O = Σ_c σ(g_c) ⊙ softmax((Q K_c^T) / √H) V_c

In the paper each query chooses for itself; here the first query of a block chooses for its block.

Yuan, Gao, Dai et al. 2025, Native Sparse Attention: Hardware-Aligned and Natively Trainable Sparse
Attention. arXiv:2502.11089
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import jattn
from experiments.gallery import blocks, plain
from experiments.gallery.variant import Arrays, Language, Variant, causal


def inputs(key: Array, T: int) -> Arrays:
    return plain.heads(key, T, gates=(T, plain.HEADS, 3))


def attention(q: plain.Queries, k: plain.Keys, v: plain.Values, gates: Array) -> plain.Output:
    factors, block, window = jax.nn.sigmoid(gates), max(1, len(q) // 16), len(q) // 8
    return jattn.native_sparse_attention(q, k, v, factors, block=block, count=4, window=window)


def dense(q: plain.Queries, k: plain.Keys, v: plain.Values, gates: Array) -> plain.Output:
    T, key_c, value_c = len(q), blocks.means(k), blocks.means(v)
    ended = np.arange(1, 17) * (T // 16) <= 1 + np.arange(T)[:, None]
    exponentials = jnp.where(ended, jnp.exp(plain.scores(q, key_c)), 0)
    compressed = exponentials / jnp.maximum(exponentials.sum(-1, keepdims=True), 1e-30)
    importance = jnp.where(blocks.FIRST | blocks.BEFORE, 1, compressed[:, :: T // 16])
    scores, near = plain.scores(q, k), plain.causal(T) & (plain.distance(T) < T // 8)
    parts = [plain.softmax(scores, x) for x in (blocks.allowed(importance, 4, T), near)]
    outputs = [plain.mean(compressed, value_c), *(plain.mean(x, v) for x in parts)]
    return jnp.sum(jax.nn.sigmoid(gates)[..., None, :] * jnp.stack(outputs, -1), -1)


LANGUAGE = Language(per_token=lambda N, H: {"gates": (N, 3)})
VARIANT = Variant(__doc__, inputs, attention, dense, LANGUAGE, causal)
