"""Checks of arguments that several modules make."""

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
    """Checks the random streams, dtypes, functions and sizes with which a module is constructed.

    Raises TypeError and ValueError that name the argument.
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


def check_features(name: str, x: Array, axes: str, features: str, size: int) -> None:
    """Raises TypeError or ValueError unless `x` is a float array `[*B, {axes}]`, for instance with
    `axes="T, D"`, whose last axis has the size that the argument `features` set."""
    check_array(name, x, f"[*B, {axes}]")
    if len(x.shape) < 2 or x.shape[-1] != size:
        raise ValueError(f"{name}: expected [*B, {axes}] with {features}={size}, got {x.shape}")
