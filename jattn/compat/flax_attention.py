"""Attention for Flax's own modules, as their `attention_fn`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jattn import masks, scores
from jattn.attention import attention, attention_weights


def flax_attention_fn(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    mask: Array | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: Any = None,
    *,
    is_causal: bool = False,
    force_fp32_for_softmax: bool = False,
    promote_dtype: Callable[..., Any] | None = None,
    rope: Callable[..., Any] | None = None,
    einsum_dot_general: Any = None,
    qk_attn_weights_einsum: Any = None,
    attn_weights_value_einsum: Any = None,
) -> Array:
    """Attention for `flax.nnx.MultiHeadAttention` and `flax.linen.MultiHeadDotProductAttention`.

        nnx.MultiHeadAttention(8, 512, attention_fn=jattn.compat.flax_attention_fn, rngs=rngs)

    Args:
        query: `[*B, T, N, H]`.
        key: `[*B, S, K, H]`; K divides N (Flax's `num_kv_heads`).
        value: `[*B, S, K, V]`.
        bias: added to scores, broadcastable to `[*B, N, T, S]`.
        mask: broadcastable to `[*B, N, T, S]`, boolean or a number; what is not 0 attends.
        broadcast_dropout: drop the same weights in all rows and heads. Which ones is decided as
            Flax does, by one array `[T, S]`, so that they are the same ones. Without it decisions
            are those of `jattn.attention`, in no memory, and other ones than Flax's.
        dropout_rng, dropout_rate, deterministic: as in Flax.
        dtype: that everything is cast to; by default what the three promote to.
        precision: as in `attention`.
        module: sows its weights before dropout, `attention_weights`, T × S of them.
        is_causal: mask keys that come after the query.
        force_fp32_for_softmax: the softmax is computed in float32 anyhow; the result is, too.
        promote_dtype: called as Flax's modules do, with a tuple.
        rope: Flax's `RoPE` or a function alike, of `[*B, T, H]` for each head.
        einsum_dot_general, qk_attn_weights_einsum, attn_weights_value_einsum: not taken.

    Returns:
        `[*B, T, N, V]`.

    A query whose keys are all masked gets 0, there the mean of all values.

    Raises:
        ValueError: for shapes that do not fit, a rate without a key.
        NotImplementedError: for products of the caller's own.
    """
    products = (einsum_dot_general, qk_attn_weights_einsum, attn_weights_value_einsum)
    if any(x is not None for x in products):
        raise NotImplementedError("flax_attention_fn: products are those of jattn.attention")
    if rope is not None:
        query, key = (jax.vmap(rope, in_axes=-2, out_axes=-2)(x) for x in (query, key))
    query, key, value = _promoted((query, key, value), dtype, promote_dtype)
    rules = {
        "mask": _mask(mask, is_causal, query.ndim),
        "score": None if bias is None else scores.Bias(_full_rank(bias, query.ndim)),
        "precision": precision,
    }
    if module is not None:
        _sow(module, attention_weights(query, key, **rules).astype(query.dtype))
    if deterministic or dropout_rate == 0.0:
        out = attention(query, key, value, **rules)
    elif dropout_rng is None:
        raise ValueError(f"dropout_rng: needed for dropout_rate = {dropout_rate}, got None")
    elif broadcast_dropout:
        out = _with_broadcast_dropout(query, key, value, rules, dropout_rng, dropout_rate)
    else:
        dropout = {"dropout_rate": dropout_rate, "dropout_key": dropout_rng}
        out = attention(query, key, value, **rules, **dropout)
    wide = jnp.promote_types(out.dtype, jnp.float32)
    return out.astype(wide) if force_fp32_for_softmax else out


def _promoted(arrays: tuple[Array, ...], dtype: Any, promote: Any) -> Any:
    if promote is not None:
        return promote(arrays, dtype=dtype)
    dtype = jnp.result_type(*arrays) if dtype is None else dtype
    return tuple(jnp.asarray(x, dtype) for x in arrays)


def _full_rank(x: Array, ndim: int) -> Array:
    """With axes of size 1 before those that it has, as arrays broadcast."""
    x = jnp.asarray(x)
    return x.reshape((1,) * (ndim - x.ndim) + x.shape)


def _mask(mask: Array | None, is_causal: bool, ndim: int) -> masks.Mask | None:
    causal = masks.Causal() if is_causal else None
    if mask is None:
        return causal
    given = masks.Dense(_full_rank(mask, ndim) != 0)
    return given if causal is None else causal & given


def _sow(module: Any, weights: Array) -> None:
    where = nnx.Intermediate if isinstance(module, nnx.Module) else "intermediates"
    module.sow(where, "attention_weights", weights)


def _with_broadcast_dropout(
    query: Array, key: Array, value: Array, rules: dict[str, Any], rng: Array, rate: float
) -> Array:
    """Σ keep w v / (1 − rate), with one `keep [T, S]` for all rows and heads.

    Attention to the kept keys alone has these terms over a smaller denominator: the two
    denominators put it right.
    """
    T, S = query.shape[-3], key.shape[-3]
    shape = (1,) * (query.ndim - 2) + (T, S)
    kept = masks.Dense(jax.random.bernoulli(rng, 1.0 - rate, shape))
    mask = kept if rules["mask"] is None else rules["mask"] & kept
    out, lse = attention(query, key, value, **{**rules, "mask": mask}, return_lse=True)
    nothing = jnp.zeros((*key.shape[:-1], 1), query.dtype)
    _, whole = attention(query, key, nothing, **rules, return_lse=True)
    dead = lse == -jnp.inf
    share = jnp.where(dead, 0, jnp.exp(jnp.where(dead, 0, lse - jnp.where(dead, 0, whole))))
    factor = jnp.swapaxes(share / (1.0 - rate), -1, -2)[..., None]
    return (out.astype(factor.dtype) * factor).astype(out.dtype)
