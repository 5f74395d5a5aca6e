"""Multi-head latent attention (MLA).

The keys U c and values W c of all heads are made from one short vector c per token. It is cached,
with a rotated key r that all heads share. The heads' queries can read both without U and W:

    q · (U c) + p · r = [U^T q, p] · [c, r]

DeepSeek-AI 2024, DeepSeek-V2: A Strong, Economical, and Efficient Mixture-of-Experts Language
Model. arXiv:2405.04434
"""

import jax.numpy as jnp
import numpy as np
from jax import Array

import jattn
from experiments.gallery import plain
from experiments.gallery.variant import Arrays, Variant, causal
from jattn import masks, positions


N, H, C, R = plain.HEADS, plain.SIZE, 128, 32
SCALE = (H + R) ** -0.5


def inputs(key: Array, T: int) -> Arrays:
    drawn = plain.heads(key, T, p=(T, N, R), c=(T, 1, C), r=(T, 1, R), u=(N, C, H), w=(N, C, H))
    return {x: drawn[x] * (0.1 if x in "uw" else 1) for x in "qpcruw"}


def absorbed(q: plain.Queries, p: Array, c: Array, r: Array, u: Array) -> tuple[Array, Array]:
    p, r = (positions.rotary(x, jnp.arange(len(q))) for x in (p, r))
    return jnp.append(jnp.einsum("tnh,nch->tnc", q, u), p, -1), jnp.append(c, r, -1)


def attention(q: plain.Queries, p: Array, c: Array, r: Array, u: Array, w: Array) -> plain.Output:
    out = jattn.attention(*absorbed(q, p, c, r, u), c, mask=masks.Causal(), scale=SCALE)
    return jnp.einsum("tnc,nch->tnh", out, w)


def weights(w: Array, **inputs: Array) -> plain.Scores:
    return jattn.attention_weights(*absorbed(**inputs), mask=masks.Causal(), scale=SCALE)


def dense(q: plain.Queries, p: Array, c: Array, r: Array, u: Array, w: Array) -> plain.Output:
    p, r = (plain.rotated(x, np.arange(len(q))) for x in (p, jnp.repeat(r, N, axis=1)))
    k, v = jnp.einsum("smc,nch->snh", c, u), jnp.einsum("smc,nch->snh", c, w)
    scores = plain.scores(jnp.append(q, p, -1), jnp.append(k, r, -1))
    return plain.mean(plain.softmax(scores, plain.causal(len(q))), v)


REASON = "its layer needs a latent vector for each token"
VARIANT = Variant(__doc__, inputs, attention, dense, REASON, causal, weights)
