"""`Quantized`: numbers of 8 or 4 bits with a scale for each token and head.

A token's vector x of one head is stored as `round(x / scale)`, where `scale` is its largest
absolute value divided by the largest number of the dtype (Dettmers et al. 2022, "LLM.int8()",
section 2.1).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jattn._pytree import array_field, pytree_dataclass
from jattn._types import Shape, Size
from jattn.checks import shown


LARGEST = {np.dtype(jnp.int8): 127.0, np.dtype(jnp.float8_e4m3fn): 448.0, np.dtype(jnp.int4): 7.0}
"""The largest absolute value that is stored in each dtype."""

SMALLEST = 1e-30
"""Vectors without a larger number are stored as zeros: their scale might not be a normal number."""


@pytree_dataclass
class Quantized:
    """Keys or values of a cache in int8, float8_e4m3fn or int4: `number × scale`.

    `numbers` are `[..., H]`. Two numbers of int4 share a byte of `[..., H/2]`, in uint8: byte h
    holds number h in its low and number H/2 + h in its high half. `scales [...]` are float32, one
    for each token and head. A vector that is not finite is stored with the scale NaN.

    >>> cache = jattn.cache.DenseCache.create(2, 16, 2, 8, dtype=jnp.int8).append(k, v)
    >>> cache.keys.shape, cache.keys.dtype, cache.keys.scales.shape, cache.bytes_per_token
    ((2, 2, 16, 8), dtype('int8'), (2, 2, 16), 48)
    """

    numbers: Any = array_field("... H")
    scales: Any = array_field("...")

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the numbers: int8, float8_e4m3fn or int4."""
        return np.dtype(jnp.int4) if self._is_packed else self.numbers.dtype

    @property
    def shape(self) -> Shape:
        """The shape `[..., H]` of the vectors."""
        *rest, size = self.numbers.shape
        return (*rest, 2 * size if self._is_packed else size)

    @property
    def _is_packed(self) -> bool:
        return self.numbers.dtype == jnp.uint8

    def dequantized(self, dtype: DTypeLike = jnp.float32) -> Float[Array, "... H"]:
        """Returns `number × scale` in a floating-point dtype."""
        numbers = _unpacked(self.numbers) if self._is_packed else self.numbers
        return numbers.astype(dtype) * self.scales[..., None].astype(dtype)


def storage_dtype(name: str, dtype: Any, **sizes: Size) -> np.dtype:
    """Returns the dtype in which a cache stores vectors of these sizes.

    Raises TypeError unless it is a floating-point dtype of at least 16 bits, float8_e4m3fn, int8 or
    int4, and ValueError for an odd size in int4.
    """
    try:
        is_dtype = isinstance(dtype, str | type | np.dtype)
        stored_as = jnp.dtype(dtype) if is_dtype else np.dtype(np.object_)
    except TypeError:
        stored_as = np.dtype(np.object_)
    is_wide = jnp.issubdtype(stored_as, jnp.floating) and stored_as.itemsize > 1
    if not is_wide and stored_as not in LARGEST:
        raise TypeError(
            f"{name}: expected a floating-point dtype of at least 16 bits or, for a quantised "
            f"cache, {', '.join(x.name for x in LARGEST)}, got {shown(dtype)}"
        )
    if stored_as == jnp.int4 and (odd := [x for x in sizes.items() if x[1] % 2]):
        raise ValueError(f"{odd[0][0]}: expected an even number for int4, got {odd[0][1]}")
    return stored_as


def zeros(shape: Shape, dtype: np.dtype) -> Any:
    """Returns vectors `shape = [..., H]` of zeros in a storage dtype."""
    if dtype not in LARGEST:
        return jnp.zeros(shape, dtype)
    if shape[-1] == 0:  # as the values of a `LatentCache`: without scales
        return jnp.zeros(shape, jnp.float32)
    if dtype == jnp.int4:
        dtype, shape = np.dtype(jnp.uint8), (*shape[:-1], shape[-1] // 2)
    return Quantized(jnp.zeros(shape, dtype), jnp.zeros(shape[:-1], jnp.float32))


def converted(x: Any, dtype: Any) -> Any:
    """Returns vectors in a storage dtype; a `Quantized` unchanged. Quantising has no derivative."""
    if isinstance(x, Quantized):
        return x
    x = jnp.asarray(x)
    return _quantized(dtype, x) if dtype in LARGEST else x.astype(dtype)


def as_floats(stored: Any) -> Any:
    """Returns stored vectors as an array of floats: in float32 if they are quantised."""
    return stored.dequantized() if isinstance(stored, Quantized) else stored


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _quantized(dtype: np.dtype, x: Array) -> Quantized:
    x, largest = x.astype(jnp.float32), LARGEST[dtype]
    most = jnp.max(jnp.abs(x), axis=-1, initial=0)
    # A product, because XLA turns a division by a constant into it, but not everywhere.
    scales = jnp.where(most < SMALLEST, 0, most * (1 / largest))
    # XLA's maximum of vectors with NaN is not always NaN on a CPU.
    scales = jnp.where(jnp.all(jnp.isfinite(x), axis=-1), scales, jnp.nan)
    has_scale = (scales > 0)[..., None]
    numbers = jnp.where(has_scale, x / jnp.where(has_scale, scales[..., None], 1), 0)
    if jnp.issubdtype(dtype, jnp.integer):
        numbers = jnp.round(numbers).astype(jnp.int8)  # to nearest, halves to even
    else:
        numbers = jnp.clip(numbers, -largest, largest).astype(dtype)
    return Quantized(_packed(numbers) if dtype == jnp.int4 else numbers, scales)


@_quantized.defjvp
def _(*_: Any) -> Any:
    raise NotImplementedError(
        "append: quantised keys and values have no derivatives; use a cache of a floating-point "
        "dtype, or jax.lax.stop_gradient(key)"
    )


def _packed(numbers: Array) -> Array:
    low, high = jnp.split(lax.bitcast_convert_type(numbers, jnp.uint8), 2, axis=-1)
    return (low & 15) | (high << 4)


def _unpacked(packed: Array) -> Array:
    shifted = (lax.bitcast_convert_type(x, jnp.int8) for x in (packed << 4, packed))
    return jnp.concatenate([x >> 4 for x in shifted], axis=-1)
