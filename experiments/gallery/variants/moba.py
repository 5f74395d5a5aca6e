"""Mixture of block attention (MoBA).

The text is cut into blocks, here 16. Queries attend to their own block, and to the three
earlier blocks whose means m of the keys have the greatest products with them:

    "query" i "prefers block" b "to" c "if" q_i · m_b > q_i · m_c

In the paper each query chooses for itself. Here the first query of a block chooses for its block,
so that kernels skip all others.

Lu, Jiang, Liu et al. 2025, MoBA: Mixture of Block Attention for Long-Context LLMs. arXiv:2502.13189
"""

import jax
import jax.numpy as jnp

import jattn
from experiments.gallery import blocks, plain
from experiments.gallery.variant import Language, Variant
from jattn import masks


def mask_for(q: plain.Queries, k: plain.Keys) -> masks.Mask:
    size = max(1, len(k) // 16)
    return masks.Causal() & jattn.chosen_blocks(q, k, size, count=4, causal=True)


def attention(q: plain.Queries, k: plain.Keys, v: plain.Values) -> plain.Output:
    return jattn.attention(q, k, v, mask=mask_for(q, k))


def dense(q: plain.Queries, k: plain.Keys, v: plain.Values) -> plain.Output:
    means = blocks.means(k)
    importance = jnp.einsum("rnh,bnh->nrb", q[:: len(q) // 16], means)
    return plain.mean(plain.softmax(plain.scores(q, k), blocks.allowed(importance, 4, len(q))), v)


def mask(T: int) -> masks.Mask:
    drawn = plain.heads(jax.random.key(0), T)
    return mask_for(drawn["q"], drawn["k"])


VARIANT = Variant(__doc__, plain.heads, attention, dense, Language(), mask)
