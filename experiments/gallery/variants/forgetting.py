"""Forgetting Transformer (FoX).

Each token and head has a forget gate f between 0 and 1, which is computed from the token. The
influence of a key is multiplied by the gates of all later tokens up to the query:

    s_(ij) = (q_i · k_j) / √H + Σ_(l = j + 1)^i log f_l "for" j ≤ i

With c_i = log f_1 + … + log f_i, the sum is c_i − c_j: two vectors replace a matrix.

Lin, Nikishin, He, Courville 2025, Forgetting Transformer: Softmax Attention with a Forget Gate.
arXiv:2503.02130
"""

import jax
import jax.numpy as jnp
from jax import Array

import jattn
from experiments.gallery import plain
from experiments.gallery.variant import Arrays, Language, Variant, causal
from jattn import masks, scores


def inputs(key: Array, T: int) -> Arrays:
    return plain.heads(key, T, gates=(T, plain.HEADS))


def attention(
    q: plain.Queries, k: plain.Keys, v: plain.Values, gates: plain.PerToken
) -> plain.Output:
    c = jnp.cumsum(jax.nn.log_sigmoid(gates), axis=0)
    decay = scores.Score(lambda s, b, h, q, kv, c: s + c[q, h] - c[kv, h], c)
    return jattn.attention(q, k, v, mask=masks.Causal(), score=decay)


def dense(q: plain.Queries, k: plain.Keys, v: plain.Values, gates: plain.PerToken) -> plain.Output:
    later = jnp.where(plain.distance(len(q)) > 0, jax.nn.log_sigmoid(gates).T[:, :, None], 0)
    decayed = plain.scores(q, k) + jnp.cumsum(later, axis=1)
    return plain.mean(plain.softmax(decayed, plain.causal(len(q))), v)


LANGUAGE = Language(per_token=lambda N, H: {"gates": (N,)})
VARIANT = Variant(__doc__, inputs, attention, dense, LANGUAGE, causal)
