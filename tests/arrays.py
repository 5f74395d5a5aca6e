"""Comparisons of trees of arrays."""

from typing import Any

import jax
import numpy as np

from tests.oracle import error


def _pairs(got: Any, want: Any) -> Any:
    return zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)


def assert_equal(got: Any, want: Any) -> None:
    """Two trees have one structure, and equal arrays; NaN equals NaN."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for x, y in _pairs(got, want):
        np.testing.assert_array_equal(x, y)


def temporaries(function: Any, *shapes: tuple[int, ...]) -> int:
    """The bytes of temporary arrays of a compiled function of float32 arrays of these shapes."""
    arrays = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
    analysis: Any = jax.jit(function).lower(*arrays).compile().memory_analysis()
    return analysis.temp_size_in_bytes


def assert_accurate(got: Any, want: Any, limit: float) -> None:
    """The `error` of every array of a tree is at most the limit."""
    for x, y in _pairs(got, want):
        assert error(x, y) <= limit
