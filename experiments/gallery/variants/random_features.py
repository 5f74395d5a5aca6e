"""Random features (Performer, FAVOR+).

Linear attention approximates softmax attention if its features are F random ones whose products are
on average the exponential. Each H of the directions w are orthogonal:

    E(φ(q) · φ(k)) = e^((q · k)/√H)
    φ(x)_f = e^(w_f · y − |y|²/2) / √F "with" y = x / H^(1/4)

Here F is 128, both formulas use the same directions, and training does not draw them again.

Choromanski, Likhosherstov, Dohan et al. 2021, Rethinking Attention with Performers.
arXiv:2009.14794
"""

import jax
import jax.numpy as jnp
from jax import Array

import jattn
from experiments.gallery import plain
from experiments.gallery.variant import Arrays, Language, Variant


def inputs(key: Array, T: int) -> Arrays:
    drawn = plain.heads(key, T)
    return {**drawn, "q": drawn["q"] / 3}


def drawn_features(H: int) -> jattn.RandomFeatures:
    return jattn.RandomFeatures.create(jax.random.key(0), 128, H)


def attention(q: plain.Queries, k: plain.Keys, v: plain.Values) -> plain.Output:
    return jattn.linear_attention(q, k, v, feature_map=drawn_features(q.shape[-1]))


def dense(q: plain.Queries, k: plain.Keys, v: plain.Values) -> plain.Output:
    w, root = drawn_features(q.shape[-1]).projection, q.shape[-1] ** 0.5
    features = [
        jnp.exp(x @ w.T / root**0.5 - (x * x).sum(-1)[..., None] / root / 2) for x in (q, k)
    ]
    weights = jnp.where(plain.causal(len(q)), jnp.einsum("tnf,snf->nts", *features), 0)
    return plain.mean(weights / weights.sum(axis=-1, keepdims=True), v)


VARIANT = Variant(__doc__, inputs, attention, dense, Language())
