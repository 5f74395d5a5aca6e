"""Stick-breaking attention.

Each key takes a share β of what the later keys have left of a stick of length 1. As near keys
come first, a model needs no other positions:

    w_(ij) = β_(ij) Π_(l = j + 1)^i (1 − β_(il))
    β_(ij) = σ((q_i · k_j) / √H)

In the paper, the keys of a query are those before it; here its own is one of them.

Tan, Yang, Courville, Panda, Shen 2024, Scaling Stick-Breaking Attention: An Efficient
Implementation and In-depth Study. arXiv:2410.17980
"""

import jax
import jax.numpy as jnp

import jattn
from experiments.gallery import plain
from experiments.gallery.variant import Language, Variant, causal
from jattn import masks, normalizers


def attention(q: plain.Queries, k: plain.Keys, v: plain.Values) -> plain.Output:
    return jattn.attention(q, k, v, mask=masks.Causal(), normalizer=normalizers.StickBreaking())


def dense(q: plain.Queries, k: plain.Keys, v: plain.Values) -> plain.Output:
    scores, allowed = plain.scores(q, k), plain.causal(len(q))
    rest = jnp.where(allowed, -jax.nn.softplus(scores), 0)
    later = jnp.flip(jnp.cumsum(jnp.flip(rest, -1), axis=-1), -1) - rest
    return plain.mean(jnp.where(allowed, jnp.exp(scores + rest + later), 0), v)


VARIANT = Variant(__doc__, plain.heads, attention, dense, Language(is_rotary=False), causal)
