"""How arrays lie in the registers of a warpgroup: 64 rows of products, spread over 128 threads.

The layout is that of the matrix units: a thread has rows r and r + 8 of a tile, and of each eight
columns two. Out of Blackwell's tensor memory come 128 rows, one for each thread.
"""

import enum
import inspect
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from jattn._types import Index, Ref
from jattn.kernels.gpu.mosaic.machine.versions import mosaic


WIDTH = 64  # head sizes are multiples of it: a row of a tile in shared memory is 128 bytes


ROWS = 64  # queries of a warpgroup: what one instruction multiplies


TENSOR_ROWS = 128  # the same where products leave to tensor memory


class Products(enum.Enum):
    """What multiplies: a warpgroup together, as on Hopper; single warps, as on all GPUs since
    Ampere; or Blackwell's matrix units, which leave products in a memory of their own."""

    WARPGROUP = enum.auto()
    WARP = enum.auto()
    TENSOR_MEMORY = enum.auto()


class Value(NamedTuple):
    """An array in registers, without axes of size 1, and its type with them; `axes` are those of a
    tile along which it runs."""

    value: Array
    expected: jax.ShapeDtypeStruct
    axes: str


class Unit(NamedTuple):
    """What a warpgroup computes with, and how arrays lie in its registers: `axes` names the axes
    of a tile "ts" along which they run; rows of a transposed tile are keys.

    JAX's interpreter knows neither layouts nor all operands of products: there XLA multiplies.
    `apart`: a row out of tensor memory lies in four threads, as rows of other products do. Each has
    a quarter of the columns then.
    """

    interpreted: bool
    transposed: bool = False
    by: Products = Products.WARPGROUP
    apart: bool = False

    @property
    def by_warp(self) -> bool:
        return self.by is Products.WARP

    @property
    def rows(self) -> int:
        """Queries of a warpgroup, or keys."""
        return TENSOR_ROWS if self.by is Products.TENSOR_MEMORY else ROWS

    def lay(self, x: Array, axes: str) -> Array:
        if self.interpreted or not axes:
            return x
        return mosaic().layout_cast(x, self.layout(axes))

    def layout(self, axes: str) -> Any:
        of_tile, along_rows = self._layout_of_tile(), "s" if self.transposed else "t"
        if len(axes) == 2:
            return of_tile
        return of_tile.reduce(1 if axes == along_rows else 0)

    def _layout_of_tile(self) -> Any:
        layouts = mosaic().Layout
        if self.by is not Products.TENSOR_MEMORY:
            return layouts.WGMMA
        return layouts.TCGEN05 if self.apart else layouts.TCGEN05_TMEM_NATIVE

    def spread(self, along: Array, size: int) -> Array:
        """A tile that is the same along keys, of which there are so many."""
        t = along.shape[0]
        shape, axis = ((size, t), 1) if self.transposed else ((t, size), 0)
        return self.lay(lax.broadcast_in_dim(along, shape, (axis,)), "ts")

    def places(self, start: Index, size: int, axis: str) -> Array:
        return start + self.lay(lax.iota(jnp.int32, size), axis)

    def read(self, memory: Ref, index: tuple[Any, ...], letters: list[str]) -> Value:
        """A part of an array in global memory."""
        runs = [isinstance(x, pl.Slice) for x in index]
        sizes = [x.size for x, run in zip(index, runs, strict=True) if run]
        wide = [run and x.size > 1 for x, run in zip(index, runs, strict=True)]
        axes = "".join(x.lower() for x, run in zip(letters, wide, strict=False) if run)
        index = tuple(0 if x > y else z for x, y, z in zip(runs, wide, index, strict=True))
        turned = self.transposed and {"T", "S"} <= set(letters)
        expected = jax.ShapeDtypeStruct(tuple(sizes[:: -1 if turned else 1]), memory.dtype)
        if self.interpreted or not axes:
            return Value(memory[index], expected, axes)
        part, load = memory.at[index], mosaic().load
        older = [()] if "idx" in inspect.signature(load).parameters else []
        return Value(self.lay(load(part, *older, optimized=False), axes), expected, axes)
