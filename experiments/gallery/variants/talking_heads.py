"""Talking heads.

Heads mix their scores before the softmax, and their weights after it, by learned matrices P and R:

    S_m = Σ_n P_(nm) (Q_n K_n^T) / √H
    O_r = Σ_m R_(mr) softmax(S_m) V_r

All heads of a block of queries are computed together, so that each score is computed only once, and
memory stays linear. The mixtures add 2 N² multiplications for each pair to 2 N H of its products.

Shazeer, Lan, Cheng, Ding, Hou 2020, Talking-Heads Attention. arXiv:2003.02436
"""

import jax.numpy as jnp
from jax import Array

import jattn
from experiments.gallery import plain
from experiments.gallery.variant import Arrays, Language, Variant
from jattn import masks


def inputs(key: Array, T: int) -> Arrays:
    return plain.heads(key, T, p=(plain.HEADS,) * 2, r=(plain.HEADS,) * 2)


def attention(q: plain.Queries, k: plain.Keys, v: plain.Values, p: Array, r: Array) -> plain.Output:
    return jattn.talking_heads_attention(q, k, v, p, r, mask=masks.Causal())


def dense(q: plain.Queries, k: plain.Keys, v: plain.Values, p: Array, r: Array) -> plain.Output:
    mixed = jnp.einsum("nm,nts->mts", p, plain.scores(q, k))
    weights = plain.softmax(mixed, plain.causal(len(q)))
    return plain.mean(jnp.einsum("mr,mts->rts", r, weights), v)


LANGUAGE = Language(lambda N, H: {"p": jnp.eye(N), "r": jnp.eye(N)})
VARIANT = Variant(__doc__, inputs, attention, dense, LANGUAGE)
