"""`jax.nn.dot_product_attention`, by its own arguments."""

from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from jattn import masks, scores
from jattn._debugging import may_be_minus_infinity
from jattn.attention import attention
from jattn.masks import Mask


IMPLEMENTATIONS = {None: None, "xla": None, "cudnn": "cudnn"}
"""What jax.nn's names stand for here. "xla" is what jax.nn has everywhere, and so means any."""


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
        is_causal: key places up to the query's.
        query_seq_lengths, key_value_seq_lengths: int32 `[B]`; later queries are 0, later keys
            masked.
        local_window_size: keys before and after a query's place that it attends to, inclusive; one
            integer for both.
        implementation: "cudnn" is our "cudnn"; None and "xla" take the first that can run the call.
        return_residual: also return the log of the denominator, as a constant.

    Returns:
        `out`, of the query's shape and dtype; with `return_residual` also `[B, T, N]` or `[T, N]`.

    Differences, all where jax.nn is not defined or loses digits:
        A query whose keys are all masked gets 0 and residual −inf; there a mean of all values.
        What is masked does not exist: NaN and infinities in masked keys and values do nothing.
        Residuals of queries past their length are −inf.
        float64 is computed in float64; there the softmax is float32.

    Raises:
        ValueError: for shapes, dtypes and names that do not fit.
        NotImplementedError: if the named implementation cannot.
    """
    rules = rules_of(
        query,
        key,
        value,
        bias,
        mask,
        is_causal=is_causal,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        local_window_size=local_window_size,
        implementation=implementation,
    )
    return computed(rules, np.shape(query), scale=scale, return_residual=return_residual)


def computed(
    rules: dict[str, Any], shape: tuple[int, ...], *, scale: Any, return_residual: bool
) -> Any:
    """What `dot_product_attention` returns for a query of a shape and the `rules_of` its call."""
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
    *,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: Any = None,
    implementation: Any = None,
) -> dict[str, Any]:
    """The arguments of `attention` that mean the same. Raises ValueError."""
    if not isinstance(implementation, str | None) or implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation: expected None, 'xla' or 'cudnn', got {implementation!r}")
    query, key, value = (_of_four_axes(x) for x in (query, key, value))
    _check_shapes(query, key, value)
    B = query.shape[0]
    parts: list[Mask] = []
    if mask is not None:
        mask = _of_four_axes(mask)
        if mask.dtype != jnp.bool_ or mask.ndim != 4:
            raise ValueError(f"mask: expected bool [B, N, T, S], got {mask.dtype} {mask.shape}")
        parts.append(masks.Dense(mask))
    if is_causal:
        parts.append(masks.Causal())
    if local_window_size is not None:
        parts.append(_window(local_window_size))
    q, kv = (
        _lengths(name, x, B)
        for name, x in (
            ("query_seq_lengths", query_seq_lengths),
            ("key_value_seq_lengths", key_value_seq_lengths),
        )
    )
    if q is not None or kv is not None:
        parts.append(masks.Lengths(q=q, kv=kv))
    together: Mask | None = None
    for part in parts:
        together = part if together is None else together & part
    return {
        "query": query,
        "key": key,
        "value": value,
        "mask": together,
        "score": None if bias is None else _bias(bias, query.dtype),
        "implementation": IMPLEMENTATIONS[implementation],
    }


def _of_four_axes(x: Any) -> Array:
    x = jnp.asarray(x)
    return x.reshape((1,) * (4 - x.ndim) + x.shape) if x.ndim < 4 else x


def _check_shapes(query: Array, key: Array, value: Array) -> None:
    """Raises ValueError."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.ndim != 4:
            raise ValueError(f"{name}: expected 3 or 4 axes, got {list(x.shape)}")
        if x.dtype != key.dtype:
            raise ValueError(f"{name}: expected the key's dtype {key.dtype}, got {x.dtype}")
    if value.shape != key.shape:
        raise ValueError(f"value: expected the key's shape {key.shape}, got {value.shape}")


def _bias(bias: Any, dtype: Any) -> scores.ScoreFunction:
    bias = _of_four_axes(bias)
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
    """Keys that are at most so many places before and after a query."""
    left, right = (size, size) if isinstance(size, int) else size
    if all(not isinstance(x, int) or x >= 0 for x in (left, right)):
        return masks.Window(left=left, right=right)

    def apart(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q <= kv + left) & (q >= kv - right)

    return masks.Predicate(apart)
