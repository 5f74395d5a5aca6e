"""Linear attention.

Weights are products of positive features φ of queries and keys, here φ(x) = elu(x) + 1. Sums
over the keys then replace the pairs, so that time is linear in the tokens:

    O_i = (Σ_(j ≤ i) (φ(q_i) · φ(k_j)) v_j) / (Σ_(j ≤ i) φ(q_i) · φ(k_j))

A model that generates text keeps the sums of φ(k_j) v_j^T and of φ(k_j) as its state.

Katharopoulos, Vyas, Pappas, Fleuret 2020, Transformers are RNNs: Fast Autoregressive Transformers
with Linear Attention. arXiv:2006.16236
"""

import jax
import jax.numpy as jnp

import jattn
from experiments.gallery import plain
from experiments.gallery.variant import Language, Variant


def attention(q: plain.Queries, k: plain.Keys, v: plain.Values) -> plain.Output:
    return jattn.linear_attention(q, k, v)


def dense(q: plain.Queries, k: plain.Keys, v: plain.Values) -> plain.Output:
    products = jnp.einsum("tnh,snh->nts", *(jax.nn.elu(x) + 1 for x in (q, k)))
    weights = jnp.where(plain.causal(len(q)), products, 0)
    return plain.mean(weights / weights.sum(axis=-1, keepdims=True), v)


VARIANT = Variant(__doc__, plain.heads, attention, dense, Language())
