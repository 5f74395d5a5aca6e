"""Dropout that another library has decided, by attention that never holds the weights."""

from typing import Any

import jax.numpy as jnp
from jax import Array

from jattn import masks
from jattn.attention import attention


def attention_of_kept(
    query: Array, key: Array, value: Array, rules: Any, kept: Array, rate: Any
) -> Array:
    """Σ keep w v / (1 − rate), with weights w by the `rules` of `attention`.

    `kept` is boolean, broadcastable to `[*B, N, T, S]` and of its rank. Attention to the kept keys
    alone has these terms over a smaller denominator: the two denominators put it right.
    """
    own = masks.Dense(kept)
    mask = own if rules["mask"] is None else rules["mask"] & own
    of_kept = {**rules, "mask": mask}
    out, lse = attention(query, key, value, **of_kept, return_lse=True)
    nothing = jnp.zeros((*key.shape[:-1], 1), query.dtype)
    _, whole = attention(query, key, nothing, **rules, return_lse=True)
    dead = lse == -jnp.inf
    share = jnp.where(dead, 0, jnp.exp(jnp.where(dead, 0, lse - jnp.where(dead, 0, whole))))
    factor = jnp.swapaxes(share / (1.0 - rate), -1, -2)[..., None]
    return (out.astype(factor.dtype) * factor).astype(out.dtype)
