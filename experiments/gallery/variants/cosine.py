"""Cosine attention.

The score is the cosine of the angle between query and key, multiplied by a factor that each head
learns, and that is at most 100:

    s_(ij) = min(e^(a_n), 100) cos(q_i, k_j)

Liu, Hu, Lin et al. 2022, Swin Transformer V2: Scaling Up Capacity and Resolution. arXiv:2111.09883
"""

import jax.numpy as jnp
from jax import Array

import jattn
from experiments.gallery import plain
from experiments.gallery.variant import Arrays, Language, Variant, causal
from jattn import masks


def inputs(key: Array, T: int) -> Arrays:
    return plain.heads(key, T, log_scale=(plain.HEADS,))


def attention(
    q: plain.Queries, k: plain.Keys, v: plain.Values, log_scale: plain.PerHead
) -> plain.Output:
    q, k = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    scale = jnp.minimum(jnp.exp(log_scale), 100.0)
    return jattn.attention(q, k, v, mask=masks.Causal(), scale=scale)


def dense(
    q: plain.Queries, k: plain.Keys, v: plain.Values, log_scale: plain.PerHead
) -> plain.Output:
    lengths = [jnp.sqrt(jnp.einsum("tnh,tnh->nt", x, x)) for x in (q, k)]
    cosines = jnp.einsum("tnh,snh->nts", q, k) / lengths[0][:, :, None] / lengths[1][:, None]
    scaled = jnp.minimum(jnp.exp(log_scale), 100.0)[:, None, None] * cosines
    return plain.mean(plain.softmax(scaled, plain.causal(len(q))), v)


LANGUAGE = Language(lambda N, H: {"log_scale": jnp.full(N, jnp.log(10.0))})
VARIANT = Variant(__doc__, inputs, attention, dense, LANGUAGE, causal)
