"""Numbers that say in one line how a head attends."""

from typing import Any

import numpy as np

from jattn._types import AnyArray
from jattn.viz.inputs import checked_values


__all__ = ["head_numbers"]


def __dir__() -> list[str]:
    return __all__


_NAMES = ("entropy", "coverage", "monotonicity", "distance", "first", "previous")


def head_numbers(weights: AnyArray) -> dict[str, np.ndarray]:
    """How each head attends, as numbers in float64.

    * `entropy`: of a query's weights, −Σ w ln w, in nats; the mean over queries. 0 is one key only,
      ln S all alike.
    * `coverage`: Σ over keys of min(1, Σ over queries of w), divided by S. 1: every key is read as
      much as one query can read (after Wu et al. 2016).
    * `monotonicity`: of the steps from a query to the next, the share in which the mean place that
      is read does not move back.
    * `distance`: Σ w |query place − key place|, the mean over queries.
    * `first`: the weight on the first key, the mean over queries.
    * `previous`: the weight on the key just before the query's place, the mean over queries after
      the first. It has a meaning where queries and keys are the same tokens. NaN unless T = S.

    Queries whose weights are all 0 are left out. A head without others has NaN, and so have the
    monotonicity and `previous` of a single query.

    Args:
        weights: `[..., T, S]`, at least 0, in which the rows of a head sum to 1 or are 0.

    Returns:
        For each name an array `[...]`, a number for each head.

    Raises:
        TypeError, ValueError: for anything else.
    """
    ndims = (getattr(weights, "ndim", 2),) if getattr(weights, "ndim", 2) >= 2 else (2,)
    array = checked_values("weights", weights, "[..., T, S]", ndims)
    if array.min() < 0:
        raise ValueError(f"weights: expected numbers >= 0, got {array.min()}")
    heads = array.reshape(-1, *array.shape[-2:])
    found = [_numbers(head) for head in heads]
    return {
        name: np.array([numbers[name] for numbers in found]).reshape(array.shape[:-2])
        for name in found[0]
    }


def _numbers(weights: np.ndarray) -> dict[str, float]:
    """Of one head `[T, S]`."""
    T, S = weights.shape
    alive = np.flatnonzero(weights.any(axis=1))
    rows = weights[alive].astype(np.float64)
    if not len(rows):
        return dict.fromkeys(_NAMES, np.nan)
    places = np.arange(S)
    mean_place = rows @ places / rows.sum(axis=1)
    logs = np.log(rows, out=np.zeros_like(rows), where=rows > 0)
    steps: Any = np.diff(mean_place) >= -1e-6
    before = np.diagonal(weights, -1)[alive[alive > 0] - 1] if T == S else np.empty(0)
    return {
        "entropy": float(-(rows * logs).sum(axis=1).mean()) + 0.0,
        "coverage": float(np.minimum(1, rows.sum(axis=0)).sum() / S),
        "monotonicity": float(steps.mean()) if len(steps) else np.nan,
        "distance": float((rows * abs(alive[:, None] - places)).sum(axis=1).mean()),
        "first": float(rows[:, 0].mean()),
        "previous": float(before.mean(dtype=np.float64)) if len(before) else np.nan,
    }
