"""Products of activations with parameters, in the form whose gradients are fast."""

import math
from typing import Any

import jax
from jax import lax
from jaxtyping import Array

from jattn._explicit import cuts_of, joined


def product(
    inputs: Array,
    kernel: Array,
    dimension_numbers: Any,
    *,
    out_sharding: Any = None,
    **options: Any,
) -> Array:
    """`lax.dot_general` of the last axes of `inputs` with the first ones of `kernel`.

    On a CPU it is a product of two matrices: the kernel's gradient sums over the rows, and if these
    are several axes, XLA transposes the other factor first, which takes longer than the product.
    Axes that are explicitly sharded over devices are not merged.
    """
    (contracted, _), (batch, _) = dimension_numbers
    inner = len(contracted)
    rows, columns = inputs.shape[: inputs.ndim - inner], kernel.shape[inner:]
    keep_axes = jax.default_backend() != "cpu" or out_sharding is not None or batch or not rows
    if keep_axes or _is_sharded(inputs) or _is_sharded(kernel):
        if out_sharding is None and not batch and jax.typeof(inputs).sharding.mesh.explicit_axes:
            out_sharding = joined(cuts_of(inputs)[: len(rows)], cuts_of(kernel)[inner:])
        options["out_sharding"] = out_sharding
        return lax.dot_general(inputs, kernel, dimension_numbers, **options)
    size = math.prod(kernel.shape[:inner])
    left = inputs.reshape(math.prod(rows), size)
    right = kernel.reshape(size, math.prod(columns))
    out = lax.dot_general(left, right, (((1,), (0,)), ((), ())), **options)
    return out.reshape(*rows, *columns)


def _is_sharded(x: Array) -> bool:
    """Returns whether the type of an array says that it is sharded over devices."""
    return any(axis is not None for axis in jax.typeof(x).sharding.spec)
