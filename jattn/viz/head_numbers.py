"""Summary statistics of each head's attention weights, and the head that aligns tokens best."""

from typing import Any

import numpy as np

from jattn._types import AnyArray
from jattn.viz.inputs import checked_values


__all__ = ["clearest_head", "head_numbers"]


_NAMES = ("entropy", "coverage", "monotonicity", "distance", "first", "previous")


def head_numbers(weights: AnyArray) -> dict[str, np.ndarray]:
    """Computes summary statistics of each head's attention weights, in float64.

    * `entropy`: −Σ w ln w of a query's weights, in nats; mean over queries. 0 means a single key,
      ln S means uniform weights.
    * `coverage`: Σ over keys of min(1, Σ over queries of w), divided by S. 1 means that every key
      gets at least the weight that one query gives (after Wu et al. 2016).
    * `monotonicity`: the share of steps from one query to the next in which the weighted mean key
      index does not decrease.
    * `distance`: Σ w |query index − key index|; mean over queries.
    * `first`: the weight on the first key; mean over queries.
    * `previous`: the weight on the key just before the query's index; mean over queries after the
      first. It is meaningful if queries and keys are the same tokens, and NaN unless T = S.

    Entropy and distance are those of weights that are divided by their sum. Queries whose weights
    are all 0 are left out. A head with only such queries gives NaN, and so do
    `monotonicity` and `previous` for a single query.

    Args:
        weights: `[..., T, S]`, at least 0.

    Returns:
        A dictionary with an array `[...]` for each name, one number for each head.

    Raises:
        TypeError, ValueError: for any other input.

    >>> print(jattn.viz.head_numbers(jattn.attention_weights(0 * q, k)[0])["entropy"].round(2))
    [1.95 1.95 1.95 1.95]
    """
    array = _checked(weights)
    heads = array.reshape(-1, *array.shape[-2:])
    statistics = [_numbers(head) for head in heads]
    return {
        name: np.array([numbers[name] for numbers in statistics]).reshape(array.shape[:-2])
        for name in statistics[0]
    }


def clearest_head(weights: AnyArray) -> tuple[int, ...]:
    """Returns the index of the head that aligns the tokens best: where the greatest weight of a key
    is largest in the mean over keys. Such a head is sharp and leaves few keys out.

    Args:
        weights: `[..., T, S]`, at least 0; usually `[L, N, T, S]`.

    Returns:
        The index of a head in the leading axes; usually a layer and a head.

    Raises:
        TypeError, ValueError: for any other input.

    >>> two_heads = jnp.stack([jnp.full((3, 3), 1 / 3), jnp.eye(3)])
    >>> jattn.viz.clearest_head(two_heads)
    (1,)
    """
    clearness = _checked(weights).max(axis=-2).mean(axis=-1)
    return tuple(int(index) for index in np.unravel_index(clearness.argmax(), clearness.shape))


def _checked(weights: AnyArray) -> np.ndarray:
    """Returns weights `[..., T, S]` as an array; raises unless they are at least 0."""
    ndims = (getattr(weights, "ndim", 2),) if getattr(weights, "ndim", 2) >= 2 else (2,)
    array = checked_values("weights", weights, "[..., T, S]", ndims)
    if array.min() < 0:
        raise ValueError(f"weights: expected numbers >= 0, got {array.min()}")
    return array


def _numbers(weights: np.ndarray) -> dict[str, float]:
    """Computes the statistics of one head's weights `[T, S]`."""
    T, S = weights.shape
    attending = np.flatnonzero(weights.any(axis=1))
    rows = weights[attending].astype(np.float64)
    if not len(rows):
        return dict.fromkeys(_NAMES, np.nan)
    key_indices = np.arange(S)
    mean_keys = rows @ key_indices / rows.sum(axis=1)
    shares = rows / rows.sum(axis=1, keepdims=True)
    logs = np.log(shares, out=np.zeros_like(shares), where=shares > 0)
    not_back: Any = np.diff(mean_keys) >= -1e-6
    previous = np.diagonal(weights, -1)[attending[attending > 0] - 1] if T == S else np.empty(0)
    return {
        "entropy": float(-(shares * logs).sum(axis=1).mean()) + 0.0,
        "coverage": float(np.minimum(1, rows.sum(axis=0)).sum() / S),
        "monotonicity": float(not_back.mean()) if len(not_back) else np.nan,
        "distance": float((shares * abs(attending[:, None] - key_indices)).sum(axis=1).mean()),
        "first": float(rows[:, 0].mean()),
        "previous": float(previous.mean(dtype=np.float64)) if len(previous) else np.nan,
    }
