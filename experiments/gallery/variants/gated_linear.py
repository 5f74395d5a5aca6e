"""Gated linear attention (GLA).

Each token sets how much of every channel of the state S of a head is kept, by gates between 0 and 1
that are computed from the token:

    S_i = σ(g_i)^(1/16) ⊙ S_(i − 1) + k_i v_i^T
    O_i = S_i^T q_i / √H

The plain formula is this loop over the tokens; jattn multiplies matrices of many tokens.

Yang, Wang, Shen, Panda, Kim 2024, Gated Linear Attention Transformers with Hardware-Efficient
Training. arXiv:2312.06635
"""

import jax
import jax.numpy as jnp
from jax import Array

import jattn
from experiments.gallery import plain
from experiments.gallery.variant import Arrays, Language, Variant


def inputs(key: Array, T: int) -> Arrays:
    return plain.heads(key, T, gates=(T, plain.HEADS, plain.SIZE))


def attention(q: plain.Queries, k: plain.Keys, v: plain.Values, gates: Array) -> plain.Output:
    log_decay = jax.nn.log_sigmoid(gates) / 16
    options = {"feature_map": lambda x: x, "log_decay": log_decay, "normalize": False}
    return jattn.linear_attention(q / q.shape[-1] ** 0.5, k, v, **options)


def dense(q: plain.Queries, k: plain.Keys, v: plain.Values, gates: Array) -> plain.Output:
    def step(state: Array, token: tuple[Array, ...]) -> tuple[Array, Array]:
        q, k, v, kept = token
        state = kept[:, :, None] * state + k[:, :, None] * v[:, None]
        return state, jnp.einsum("nh,nhv->nv", q, state)

    kept = jax.nn.sigmoid(gates) ** (1 / 16)
    empty = jnp.zeros((*k.shape[1:], v.shape[-1]))
    return jax.lax.scan(step, empty, (q, k, v, kept))[1] / q.shape[-1] ** 0.5


LANGUAGE = Language(per_token=lambda N, H: {"gates": (N, H)})
VARIANT = Variant(__doc__, inputs, attention, dense, LANGUAGE)
