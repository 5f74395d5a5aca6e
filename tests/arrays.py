"""Random arrays, functions with their gradients, and comparisons of trees of arrays."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.oracle import error


def normals(*shapes: tuple[int, ...], seed: int = 0, dtype: Any = jnp.float64) -> list[jax.Array]:
    """Arrays of these shapes with normally distributed numbers."""
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def with_pullback(function: Callable[..., Any], arrays: Any, cotangents: Any) -> tuple[Any, ...]:
    """`function(*arrays)`, followed by the gradient of each array."""
    out, pull = jax.vjp(function, *arrays)
    return out, *pull(cotangents)


def _pairs(got: Any, want: Any) -> Any:
    return zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)


def assert_close(got: Any, want: Any, rtol: float = 0.0, atol: float = 0.0) -> None:
    """All arrays of two trees are close, as `numpy.allclose` defines it."""
    for x, y in _pairs(got, want):
        np.testing.assert_allclose(x, y, rtol=rtol, atol=atol)


def assert_equal(got: Any, want: Any) -> None:
    """All arrays of two trees are equal; NaN equals NaN."""
    for x, y in _pairs(got, want):
        np.testing.assert_array_equal(x, y)


def assert_accurate(got: Any, want: Any, limit: float) -> None:
    """The `error` of every array of a tree is at most the limit."""
    for x, y in _pairs(got, want):
        assert error(x, y) <= limit
