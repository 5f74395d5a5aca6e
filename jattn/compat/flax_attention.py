"""Attention for Flax's modules, to pass as their `attention_fn`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx
from jax import Array

from jattn import masks, scores
from jattn._types import AnyArray
from jattn.attention import attention, attention_weights
from jattn.checks import check_rate
from jattn.compat.dropout import attention_of_kept
from jattn.compat.jax_attention import with_rank


def flax_attention_fn(
    query: Any,
    key: Any,
    value: Any,
    bias: AnyArray | None = None,
    mask: AnyArray | None = None,
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
    input_positions: AnyArray | None = None,
    einsum_dot_general: Any = None,
    qk_attn_weights_einsum: Any = None,
    attn_weights_value_einsum: Any = None,
) -> Array:
    """Attention for `flax.nnx.MultiHeadAttention` and `flax.linen.MultiHeadDotProductAttention`.

    Args as in Flax's `dot_product_attention`, but:
        key, value: `[*B, S, K, H]`, `[*B, S, K, V]`; K divides N (Flax's `num_kv_heads`).
        broadcast_dropout: True drops the weights that Flax drops, drawn as one array `[T, S]`;
            False drops those that `jattn.attention` drops, which takes no memory.
        module: a module that sows the T × S weights before dropout as `attention_weights`.
        input_positions: `[T]` or `[*B, T]`, the positions of both queries and keys, for `rope`.
        einsum_dot_general, qk_attn_weights_einsum, attn_weights_value_einsum: not supported.

    Returns `[*B, T, N, V]`. A query whose keys are all masked gets 0, where Flax returns the mean
    of all values. Complex inputs are passed to Linen's function, which supports them.
    Raises ValueError for invalid arguments, and NotImplementedError for custom products.

    >>> options = {"attention_fn": jattn.compat.flax_attention_fn, "decode": False}
    >>> nnx.MultiHeadAttention(2, 8, **options, rngs=nnx.Rngs(0))(jnp.ones((2, 5, 8))).shape
    (2, 5, 8)
    """
    einsums = qk_attn_weights_einsum, attn_weights_value_einsum
    _check_products(precision, einsum_dot_general, *einsums)
    if rope is not None:
        query, key = (_rotated(rope, x, input_positions) for x in (query, key))
    elif input_positions is not None:
        raise ValueError("input_positions: expected rope to go with it, got None")
    query, key, value = _promoted((query, key, value), dtype, promote_dtype)
    rate = 0.0 if deterministic else dropout_rate
    if jnp.iscomplexobj(query):
        if is_causal:
            raise NotImplementedError("is_causal: expected a mask for complex numbers, got True")
        # Linen's function takes the softmax of complex scores.
        dropout = broadcast_dropout, dropout_rng, rate
        weights = linen.dot_product_attention_weights(
            query, key, bias, mask, *dropout, precision=precision, module=module
        )
        return jnp.einsum("...hqk,...khd->...qhd", weights, value, precision=precision)
    score = None if bias is None else scores.Bias(with_rank(bias, query.ndim))
    rules = {"mask": _mask(mask, is_causal, query.ndim), "score": score, "precision": precision}
    wide = jnp.promote_types(query.dtype, jnp.float32)
    if module is not None:
        weights = attention_weights(query, key, **rules)
        weights = weights.astype(wide if force_fp32_for_softmax else query.dtype)
        collection = nnx.Intermediate if isinstance(module, nnx.Module) else "intermediates"
        module.sow(collection, "attention_weights", weights)
    out = _dropping(broadcast_dropout, dropout_rng, rate, (query, key, value), rules)
    return out.astype(wide) if force_fp32_for_softmax else out


def _dropping(
    broadcast: bool, rng: Array | None, rate: float, qkv: tuple[Array, ...], rules: dict[str, Any]
) -> Array:
    """Computes attention with dropout as Flax means it."""
    if rate == 0.0:
        return attention(*qkv, **rules)
    if rng is None:
        raise ValueError(f"dropout_rng: needed for dropout_rate = {rate}, got None")
    if not broadcast:
        return attention(*qkv, **rules, dropout_rate=rate, dropout_key=rng)
    check_rate("dropout_rate", rate)
    query, key, value = qkv
    shape = (1,) * (query.ndim - 2) + (query.shape[-3], key.shape[-3])
    keep = jax.random.bernoulli(rng, 1.0 - rate, shape)
    return attention_of_kept(query, key, value, rules, keep, rate)


def _check_products(precision: Any, dot_general: Any, scores: Any, values: Any) -> None:
    """Raises Flax's errors for custom products that exclude each other, and rejects all others."""
    if (scores is None) != (values is None):
        raise ValueError(
            "qk_attn_weights_einsum, attn_weights_value_einsum: expected both or neither, got one"
        )
    if scores is not None and (precision is not None or dot_general is not None):
        raise ValueError(
            "qk_attn_weights_einsum: expected neither precision nor einsum_dot_general beside it"
        )
    if scores is not None or dot_general is not None:
        raise NotImplementedError("flax_attention_fn: products are those of jattn.attention")


def _rotated(rope: Callable[..., Any], x: AnyArray, positions: AnyArray | None) -> Array:
    """Applies `rope` to each head of `[*B, T, N, H]` and, for positions `[*B, T]`, to each row."""
    if positions is None:
        return jax.vmap(rope, in_axes=-2, out_axes=-2)(x)
    apply = jax.vmap(rope, in_axes=(-2, None), out_axes=-2)
    for _ in range(positions.ndim - 1):
        apply = jax.vmap(apply)
    return apply(x, positions)


def _promoted(arrays: tuple[Array, ...], dtype: Any, promote: Any) -> Any:
    if promote is not None:
        return promote(arrays, dtype=dtype)
    dtype = jnp.result_type(*arrays) if dtype is None else dtype
    return tuple(jnp.asarray(x, dtype) for x in arrays)


def _mask(mask: AnyArray | None, is_causal: bool, ndim: int) -> masks.Mask | None:
    if mask is None:
        return masks.Causal() if is_causal else None
    dense = masks.Dense(with_rank(mask, ndim) != 0)
    return masks.Causal() & dense if is_causal else dense
