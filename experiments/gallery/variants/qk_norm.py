"""QK-norm: normalised queries and keys.

Each head normalises its queries and keys before their product, with learned factors γ and δ for
each channel, so that long vectors do not make the softmax saturate:

    s_(ij) = ((γ ⊙ n(q_i)) · (δ ⊙ n(k_j))) / √H
    n(x) = x / √(|x|² / H + ε)

The paper uses layer normalisation; OLMo 2 and Qwen 3 use the root mean square, as here.

Dehghani, Djolonga, Mustafa et al. 2023, Scaling Vision Transformers to 22 Billion Parameters.
arXiv:2302.05442
"""

import jax
import jax.numpy as jnp
from jax import Array

import jattn
from experiments.gallery import plain
from experiments.gallery.variant import Arrays, Language, Variant, causal
from jattn import masks


def inputs(key: Array, T: int) -> Arrays:
    return plain.heads(key, T, q_gain=(plain.SIZE,), k_gain=(plain.SIZE,))


def attention(
    q: plain.Queries, k: plain.Keys, v: plain.Values, q_gain: Array, k_gain: Array
) -> plain.Output:
    q, k = (x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) for x in (q, k))
    return jattn.attention(q * q_gain, k * k_gain, v, mask=masks.Causal())


def dense(
    q: plain.Queries, k: plain.Keys, v: plain.Values, q_gain: Array, k_gain: Array
) -> plain.Output:
    lengths = [jnp.sqrt(jnp.einsum("tnh,tnh->nt", x, x) / x.shape[-1] + 1e-6) for x in (q, k)]
    normalised = plain.scores(q * q_gain, k * k_gain) / lengths[0][:, :, None] / lengths[1][:, None]
    return plain.mean(plain.softmax(normalised, plain.causal(len(q))), v)


LANGUAGE = Language(lambda N, H: {"q_gain": jnp.ones(H), "k_gain": jnp.ones(H)})
VARIANT = Variant(__doc__, inputs, attention, dense, LANGUAGE, causal)
