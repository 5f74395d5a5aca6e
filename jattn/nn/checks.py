"""Checks of arguments that several modules make; their errors name the argument."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from jattn.checks import check_array, check_dtype, check_function, check_sizes


def check_module(
    rngs: Any,
    *,
    dtype: Any = None,
    param_dtype: Any = jnp.float32,
    functions: dict[str, Any] | None = None,
    **sizes: Any,
) -> None:
    """Checks the random streams, dtypes, functions and sizes of which a module is made.

    Raises TypeError and ValueError, naming the argument.
    """
    if not isinstance(rngs, nnx.Rngs):
        raise TypeError(f"rngs: expected an nnx.Rngs, got {type(rngs).__name__}")
    if dtype is not None:
        check_dtype("dtype", dtype)
    check_dtype("param_dtype", param_dtype)
    for name, function in (functions or {}).items():
        check_function(name, function)
    check_sizes(**sizes)


def check_integers(name: str, x: Any) -> None:
    """Raises TypeError unless `x` is an integer array."""
    dtype = getattr(x, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.integer):
        raise TypeError(f"{name}: expected integers, got {dtype or type(x).__name__}")


def check_features(name: str, x: Array, letters: str, features: str, size: int) -> None:
    """Raises unless `x` is a float array `[*B, letters]` and its last axis has this size."""
    check_array(name, x, f"[*B, {letters}]")
    if len(x.shape) < 2 or x.shape[-1] != size:
        raise ValueError(f"{name}: expected [*B, {letters}] with {features}={size}, got {x.shape}")
