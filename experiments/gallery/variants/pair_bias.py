"""Gated attention with pair bias (AlphaFold).

Each row m of an alignment of proteins attends along its residues. The scores of all rows get one
bias B from the representation of pairs of residues, and a gate g multiplies the output:

    O_m = σ(g_m) ⊙ softmax((Q_m K_m^T) / √H + B) V_m

Jumper, Evans, Pritzel et al. 2021, Highly Accurate Protein Structure Prediction with AlphaFold,
supplement, algorithm 7. doi:10.1038/s41586-021-03819-2
"""

import jax
from jax import Array

import jattn
from experiments.gallery import plain
from experiments.gallery.variant import Arrays, Variant
from jattn import scores


def inputs(key: Array, T: int) -> Arrays:
    shape, N = (2, T, plain.HEADS, plain.SIZE), plain.HEADS
    return plain.heads(key, T, q=shape, k=shape, v=shape, g=shape, bias=(N, T, T))


def attention(q: Array, k: Array, v: Array, g: Array, bias: plain.Scores) -> Array:
    return jax.nn.sigmoid(g) * jattn.attention(q, k, v, score=scores.Bias(bias[None]))


def dense(q: Array, k: Array, v: Array, g: Array, bias: plain.Scores) -> Array:
    def row(q: plain.Queries, k: plain.Keys, v: plain.Values, g: plain.Output) -> plain.Output:
        return plain.mean(plain.softmax(plain.scores(q, k) + bias), v) / (1 + jax.numpy.exp(-g))

    return jax.vmap(row)(q, k, v, g)


def weights(q: Array, k: Array, bias: plain.Scores, **_: Array) -> plain.Scores:
    return jattn.attention_weights(q, k, score=scores.Bias(bias[None]))[0]


VARIANT = Variant(
    __doc__, inputs, attention, dense, "it attends along proteins, not text", weights=weights
)
