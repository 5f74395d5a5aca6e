"""Tiles of quantised keys and values, see `jattn.cache.Quantized`.

Their numbers are copied to shared memory, and converted there, through registers, to the query's
dtype, which represents all of them. The scales of keys multiply the columns of products, and the
scales of values multiply the columns of weights.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from jattn._types import Ref
from jattn.kernels.gpu.mosaic.machine.registers import Unit
from jattn.kernels.gpu.mosaic.machine.versions import load, mosaic


MAX_SIZE = 128  # the largest head size for which registers suffice


class Dequantizer(NamedTuple):
    """Converts one tile of keys and one of values; returns all arguments unchanged if there are no
    scales.

    converted: shared memory for both tiles in the query's dtype.
    scales: the scales of both tiles, in shared memory.

    All threads wait for one another in `keys` and in `values`. Each step must call `keys`, multiply
    queries with them, call `values`, and multiply weights with them: all threads have then used the
    keys of a step before the next step overwrites them, and the values likewise.
    """

    unit: Unit
    converted: list[Ref]
    scales: list[Ref]

    def keys(self, stored: Ref) -> Ref:
        return _converted(self.unit, stored, self.converted[0]) if self.scales else stored

    def values(self, stored: Ref) -> Ref:
        return _converted(self.unit, stored, self.converted[1]) if self.scales else stored

    def products(self, products: Array) -> Array:
        """Returns products of queries and keys times the scales of keys.

        If the scale of a value is not finite they are NaN, which has no effect where the mask
        excludes the pair.
        """
        if not self.scales:
            return products
        keys, values = map(self._read, self.scales)
        return products * self._over_rows(keys + (values - values), products)

    def weights(self, weights: Array) -> Array:
        """Returns weights times those scales of values that are finite, and 0 for the others."""
        if not self.scales:
            return weights
        values = self._read(self.scales[1])
        finite = jnp.where(values - values == 0, values, 0.0)
        return weights * self._over_rows(finite, weights)

    def _read(self, scales: Ref) -> Any:
        return self.unit.read(scales, (pl.ds(0, scales.shape[0]),), ["S"]).value

    def _over_rows(self, scales: Array, tile: Array) -> Array:
        return self.unit.to_layout(lax.broadcast_in_dim(scales, tile.shape, (1,)), "ts")


def _converted(unit: Unit, stored: Ref, converted: Ref) -> Ref:
    """Converts a tile of `stored` numbers to the dtype of `converted`, which it returns.

    Bytes of dtype uint8 hold two numbers of int4.
    """
    if unit.interpreted:
        numbers = stored[...]
    else:  # each thread has four adjacent bytes of a row, which it loads at once
        numbers = load(stored, layout=mosaic().Layout.WGMMA_UPCAST_2X)
    if numbers.dtype == jnp.uint8:
        half = numbers.shape[1]
        low, high = _unpacked(numbers)
        converted[:, :half] = low.astype(converted.dtype)
        converted[:, half:] = high.astype(converted.dtype)
    elif jnp.issubdtype(numbers.dtype, jnp.floating):  # no instruction converts them to bfloat16
        converted[...] = numbers.astype(jnp.float32).astype(converted.dtype)
    else:
        converted[...] = numbers.astype(converted.dtype)
    mosaic().commit_smem()
    return converted


def _unpacked(packed: Array) -> tuple[Array, Array]:
    """Returns the numbers in the low and in the high halves of bytes, in float32.

    The lowest bits of the float32 number 2^23 + n are those of n. So bitwise operations and a
    subtraction convert n, which is faster than the instruction that converts integers.
    """
    integers, zero = packed.astype(jnp.int32), np.float32(2**23 + 8)

    def signed(half: Array) -> Array:
        # Inverts bit 3, which adds 8 to a number from −8 to 7, and sets the exponent of 2^23.
        bits = lax.bitwise_xor(half, zero.view(np.int32))
        return lax.bitcast_convert_type(bits, jnp.float32) - zero

    return signed(integers & 15), signed(lax.shift_right_logical(integers, np.int32(4)))
