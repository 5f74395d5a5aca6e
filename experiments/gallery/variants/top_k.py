"""Top-k attention.

Each query attends to the k keys with the greatest scores, and ignores all others:

    w_(ij) = softmax(s_(ij)) "over the" k "greatest" s_(ij) "of query" i

The keys that are kept differ from query to query; here k is 8.

Zhao, Lin, Zhang et al. 2019, Explicit Sparse Transformer: Concentrated Attention Through Explicit
Selection. arXiv:1912.11637
"""

import jax.numpy as jnp

import jattn
from experiments.gallery import plain
from experiments.gallery.variant import Language, Variant, causal
from jattn import masks, normalizers


def attention(q: plain.Queries, k: plain.Keys, v: plain.Values) -> plain.Output:
    return jattn.attention(q, k, v, mask=masks.Causal(), normalizer=normalizers.TopK(8))


def dense(q: plain.Queries, k: plain.Keys, v: plain.Values) -> plain.Output:
    scores = jnp.where(plain.causal(len(q)), plain.scores(q, k), -jnp.inf)
    ordered = jnp.sort(scores, axis=-1)
    return plain.mean(plain.softmax(scores, scores >= ordered[..., -8:-7]), v)


VARIANT = Variant(__doc__, plain.heads, attention, dense, Language(), causal)
