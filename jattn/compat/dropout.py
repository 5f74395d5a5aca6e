"""Dropout with a given keep mask, for attention that never holds the weights."""

from typing import Any

import jax.numpy as jnp
from jax import Array

from jattn import masks
from jattn.attention import attention


def attention_of_kept(
    query: Array, key: Array, value: Array, rules: Any, keep: Array, rate: Any
) -> Array:
    """Computes Σ keep w v / (1 − rate), where w are the weights of `attention` with `rules`.

    `keep` is boolean, of the rank of `[*B, N, T, S]` and broadcastable to it. Attention over the
    kept keys alone has the same numerator over a smaller denominator, so the result is rescaled by
    the ratio of the two denominators.
    """
    mask = masks.Dense(keep) if rules["mask"] is None else rules["mask"] & masks.Dense(keep)
    kept_rules = {**rules, "mask": mask}
    out, kept_lse = attention(query, key, value, **kept_rules, return_lse=True)
    empty_value = jnp.zeros((*key.shape[:-1], 1), query.dtype)
    _, full_lse = attention(query, key, empty_value, **rules, return_lse=True)
    dead = kept_lse == -jnp.inf
    log_share = jnp.where(dead, 0, kept_lse - jnp.where(dead, 0, full_lse))
    kept_share = jnp.where(dead, 0, jnp.exp(log_share))
    factor = jnp.swapaxes(kept_share / (1.0 - rate), -1, -2)[..., None]
    return (out.astype(factor.dtype) * factor).astype(out.dtype)
