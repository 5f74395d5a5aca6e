"""`dot_product_attention` with the signature and semantics of `jax.nn.dot_product_attention`."""

import functools
import operator
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from jattn import masks, scores
from jattn._debugging import may_be_minus_infinity
from jattn._types import Index
from jattn.attention import attention
from jattn.masks import Mask


IMPLEMENTATIONS = {None: None, "xla": None, "cudnn": "cudnn"}
"""Our implementation for each name of jax.nn's. "xla" runs everywhere there, so it means any."""


@may_be_minus_infinity(1)
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: Any = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: Any = None,
    implementation: Literal["xla", "cudnn"] | None = None,
    return_residual: bool = False,
) -> Any:
    """Attention as `jax.nn.dot_product_attention` defines it, in memory linear in T and S.

    Args:
        query: `[B, T, N, H]` or `[T, N, H]`.
        key: `[B, S, K, H]` or `[S, K, H]`, of the same dtype; K divides N.
        value: as key.
        bias: added to scores, broadcastable to `[B, N, T, S]`.
        mask: boolean, broadcastable to `[B, N, T, S]`; True attends.
        scale: by default 1/√H.
        is_causal: a query attends to keys up to its own index.
        query_seq_lengths, key_value_seq_lengths: int32 `[B]`; outputs of later queries are 0, and
            later keys are masked.
        local_window_size: the number of keys before and after a query's index that it attends to,
            inclusive, as a pair; one integer means both.
        implementation: "cudnn" is our "cudnn"; None and "xla" mean the first supported one.
        return_residual: also return the log-sum-exp, as a constant.

    Returns:
        `out`, of the query's shape and dtype; with `return_residual` also `[B, T, N]` or `[T, N]`.

    The results differ only where jax.nn's are undefined or less precise:
        A query whose keys are all masked gets 0 and residual −inf; jax.nn returns a mean of values.
        Masked keys and values have no effect, also if they are NaN or infinite.
        Residuals of queries past their length are −inf.
        float64 inputs are computed in float64; jax.nn's softmax is float32.

    Raises:
        ValueError: for invalid shapes, dtypes and names.
        NotImplementedError: if the named implementation does not support the call.

    >>> jattn.compat.dot_product_attention(q, k, v, is_causal=True).shape
    (2, 5, 4, 8)
    """
    lengths = query_seq_lengths, key_value_seq_lengths
    named = is_causal, *lengths, local_window_size, implementation
    rules = rules_of(query, key, value, bias, mask, *named)
    return computed(rules, np.shape(query), scale=scale, return_residual=return_residual)


def computed(
    rules: dict[str, Any], shape: tuple[int, ...], *, scale: Any, return_residual: bool
) -> Any:
    """Computes the result of a call from its `rules_of` and the query's shape."""
    if not return_residual:
        return attention(**rules, scale=scale).reshape(shape)
    out, lse = attention(**rules, scale=scale, return_lse=True)
    residual = lax.stop_gradient(jnp.swapaxes(lse, -1, -2)).astype(out.dtype)
    return out.reshape(shape), residual.reshape(shape[:-1])


def rules_of(
    query: Any,
    key: Any,
    value: Any,
    bias: Any,
    mask: Any,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: Any = None,
    implementation: Any = None,
) -> dict[str, Any]:
    """Translates a call of jax.nn's into arguments of `attention`. Raises ValueError."""
    if not isinstance(implementation, str | None) or implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation: expected None, 'xla' or 'cudnn', got {implementation!r}")
    query, key, value = (with_rank(x, 4) for x in (query, key, value))
    _check_shapes(query, key, value)
    B = query.shape[0]
    parts: list[Mask] = []
    if mask is not None:
        parts.append(_dense(mask, (B, query.shape[2], query.shape[1], key.shape[1])))
    if is_causal:
        parts.append(masks.Causal())
    if local_window_size is not None:
        parts.append(_window(local_window_size))
    q = _lengths("query_seq_lengths", query_seq_lengths, B)
    kv = _lengths("key_value_seq_lengths", key_value_seq_lengths, B)
    if q is not None or kv is not None:
        parts.append(masks.Lengths(q=q, kv=kv))
    return {
        "query": query,
        "key": key,
        "value": value,
        "mask": functools.reduce(operator.and_, parts) if parts else None,
        "score": None if bias is None else _bias(bias, query.dtype),
        "implementation": IMPLEMENTATIONS[implementation],
    }


def with_rank(x: Any, ndim: int) -> Array:
    """Returns `x` with leading axes of size 1 added up to `ndim` axes."""
    x = jnp.asarray(x)
    return x.reshape((1,) * (ndim - x.ndim) + x.shape)


def _check_shapes(query: Array, key: Array, value: Array) -> None:
    """Raises ValueError for shapes and dtypes that do not match."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.ndim != 4:
            raise ValueError(f"{name}: expected 3 or 4 axes, got {list(x.shape)}")
        if x.dtype != key.dtype:
            raise ValueError(f"{name}: expected the key's dtype {key.dtype}, got {x.dtype}")
    if value.shape != key.shape:
        raise ValueError(f"value: expected the key's shape {key.shape}, got {value.shape}")


def _dense(mask: Any, shape: tuple[int, ...]) -> Mask:
    """Returns the mask of an array that broadcasts to `shape`, the sizes B, N, T and S."""
    array = with_rank(mask, 4)
    fits = array.ndim == 4 and all(
        n in (1, size) for n, size in zip(array.shape, shape, strict=True)
    )
    if array.dtype != jnp.bool_ or not fits:
        raise ValueError(
            f"mask: expected bool [B, N, T, S] = {list(shape)} or 1 in place of a size, got "
            f"{array.dtype} {list(np.shape(mask))}; write mask != 0 for an array of integers, "
            f"mask[:, None, None, :] for one of shape [B, S]"
        )
    return masks.Dense(array)


def _bias(bias: Any, dtype: Any) -> scores.ScoreFunction:
    bias = with_rank(bias, 4)
    if not jnp.issubdtype(bias.dtype, jnp.floating):
        bias = bias.astype(dtype)
    return scores.Bias(bias)


def _lengths(name: str, x: Any, B: int) -> Any:
    if x is None:
        return None
    x = jnp.asarray(x)
    if x.shape != (B,) or x.dtype != jnp.int32:
        raise ValueError(f"{name}: expected int32 [B] = [{B}], got {x.dtype} {list(x.shape)}")
    return x


def _window(size: Any) -> Mask:
    """Returns the mask of keys within `size` places of the query, or within a pair of sizes."""
    left, right = (size, size) if isinstance(size, int) else size
    if all(not isinstance(x, int) or x >= 0 for x in (left, right)):
        return masks.Window(left=left, right=right)

    def within(b: Index, h: Index, q: Any, kv: Any) -> Any:
        return (q <= kv + left) & (q >= kv - right)

    return masks.Predicate(within)
