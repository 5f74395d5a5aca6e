"""Talking heads.

Heads mix their scores before the softmax, and their weights after it, by learned matrices P and R:

    S_m = Σ_n P_(nm) (Q_n K_n^T) / √H
    O_r = Σ_m R_(mr) softmax(S_m) V_r

A mixed score is one product of the joined queries and keys of all N heads, and each softmax weighs
the values of all heads. So linear memory costs N times as many multiplications.

Shazeer, Lan, Cheng, Ding, Hou 2020, Talking-Heads Attention. arXiv:2003.02436
"""

import jax.numpy as jnp
from jax import Array

import jattn
from experiments.gallery import plain
from experiments.gallery.variant import Arrays, Language, Variant, causal
from jattn import masks


def inputs(key: Array, T: int) -> Arrays:
    return plain.heads(key, T, p=(plain.HEADS,) * 2, r=(plain.HEADS,) * 2)


def attention(q: plain.Queries, k: plain.Keys, v: plain.Values, p: Array, r: Array) -> plain.Output:
    T, N, H = q.shape
    queries = jnp.einsum("nm,tnh->tmnh", p, q).reshape(T, N, N * H)
    keys, values = k.reshape(T, 1, N * H), v.reshape(T, 1, -1)
    out = jattn.attention(queries, keys, values, mask=masks.Causal(), scale=H**-0.5)
    return jnp.einsum("mr,tmrv->trv", r, out.reshape(T, N, N, -1))


def dense(q: plain.Queries, k: plain.Keys, v: plain.Values, p: Array, r: Array) -> plain.Output:
    mixed = jnp.einsum("nm,nts->mts", p, plain.scores(q, k))
    weights = plain.softmax(mixed, plain.causal(len(q)))
    return plain.mean(jnp.einsum("mr,mts->rts", r, weights), v)


LANGUAGE = Language(lambda N, H: {"p": jnp.eye(N), "r": jnp.eye(N)})
VARIANT = Variant(__doc__, inputs, attention, dense, LANGUAGE, causal)
