"""The layout of arrays in the registers of a warpgroup: 64 rows of products, over 128 threads.

The layout is that of tensor cores: a thread has rows r and r + 8 of a tile, and two of each eight
columns. Blackwell's tensor memory gives 128 rows, one for each thread.
"""

import enum
import importlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from jattn._types import Index, Ref
from jattn.kernels.gpu.mosaic.machine.versions import load, lowering, mlir, mosaic


WIDTH = 64  # head sizes are multiples of it: a row of a tile in shared memory is 128 bytes
ROWS = 64  # queries of a warpgroup: the rows that one instruction multiplies
TENSOR_ROWS = 128  # the same if products go to tensor memory


class Products(enum.Enum):
    """The threads or units that multiply: a whole warpgroup, as on Hopper; single warps, as on all
    GPUs since Ampere; or Blackwell's tensor cores, which write products to tensor memory."""

    WARPGROUP = enum.auto()
    WARP = enum.auto()
    TENSOR_MEMORY = enum.auto()


class RegisterValue(NamedTuple):
    """An array in registers, without axes of size 1, or a table in memory; and its type with all
    axes."""

    value: Any
    expected: jax.ShapeDtypeStruct


class Unit(NamedTuple):
    """The computing unit of a warpgroup, and the layout of arrays in its registers.

    Axes of a tile are named "t" and "s"; rows of a transposed tile are keys. JAX's interpreter
    knows neither layouts nor all operands of products: there XLA multiplies. If `splits_rows`, a
    row out of tensor memory lies in four threads, each with a quarter of the columns, as rows of
    other products do.
    """

    interpreted: bool
    transposed: bool = False
    by: Products = Products.WARPGROUP
    splits_rows: bool = False

    @property
    def by_warp(self) -> bool:
        return self.by is Products.WARP

    @property
    def rows(self) -> int:
        """The number of queries, or keys, of a warpgroup."""
        return TENSOR_ROWS if self.by is Products.TENSOR_MEMORY else ROWS

    def to_layout(self, x: Array, axes: str) -> Array:
        """Converts an array to the layout of arrays along these axes of a tile."""
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
        return layouts.TCGEN05 if self.splits_rows else layouts.TCGEN05_TMEM_NATIVE

    def zeros(self, *shape: int) -> Array:
        """A tile of zeros in float32."""
        return self.to_layout(jnp.zeros(shape, jnp.float32), "ts")

    def spread(self, along: Array, size: int) -> Array:
        """Broadcasts one number for each query to a tile of `size` keys."""
        t = along.shape[0]
        shape, axis = ((size, t), 1) if self.transposed else ((t, size), 0)
        return self.to_layout(lax.broadcast_in_dim(along, shape, (axis,)), "ts")

    def places(self, start: Index, size: int, axis: str) -> Array:
        return start + self.to_layout(lax.iota(jnp.int32, size), axis)

    def read(self, memory: Ref, index: tuple[Any, ...], letters: list[str]) -> RegisterValue:
        """Reads a part of an array in shared or global memory."""
        runs = [isinstance(x, pl.Slice) for x in index]
        sizes = [x.size for x, run in zip(index, runs, strict=True) if run]
        wide = [run and x.size > 1 for x, run in zip(index, runs, strict=True)]
        axes = "".join(x.lower() for x, run in zip(letters, wide, strict=False) if run)
        index = tuple(0 if x > y else z for x, y, z in zip(runs, wide, index, strict=True))
        order = -1 if self.transposed and {"T", "S"} <= set(letters) else 1
        expected = jax.ShapeDtypeStruct(tuple(sizes[::order]), memory.dtype)
        if self.interpreted or not axes:
            return RegisterValue(memory[index], expected)
        value = load(memory.at[index], optimized=False)
        return RegisterValue(self.to_layout(value, axes), expected)

    def look_up(self, memory: Ref, places: Array, axes: str) -> Array:
        """Reads the entries of a flat array in global memory at places along axes of a tile."""
        if self.interpreted:
            return memory[...][places]
        if not axes:
            return memory[places]
        return _gather(memory, self.to_layout(places, axes), self.layout(axes))


def _gather(memory: Ref, places: Array, layout: Any) -> Array:
    """Reads entries of global memory: each thread those at the places in its registers."""
    result = mosaic().ShapeDtypeStruct(places.shape, memory.dtype, layout=layout)

    @mosaic().inline_mgpu(arg_types=(mosaic().RefType(), layout), return_type=result)
    def read(_: Any, memory: Any, places: Any) -> Any:
        utils = importlib.import_module("jax.experimental.mosaic.gpu.utils")
        ir, llvm, vector = map(mlir, ("ir", "llvm", "vector"))
        entry, start = utils.dtype_to_ir_type(result.dtype), utils.memref_ptr(memory)

        def of_register(places: Any) -> Any:
            size = ir.VectorType(places.type).shape[0]
            entries = llvm.mlir_undef(ir.VectorType.get((size,), entry))
            for i in range(size):
                place = vector.extract(places, [], [i])
                value = llvm.load(entry, utils.getelementptr(start, [place], entry))
                entries = vector.insert(value, entries, [], [i])
            return entries

        registers = np.empty_like(places.registers)
        for index, x in np.ndenumerate(places.registers):
            registers[index] = of_register(x)
        return lowering().FragmentedArray(
            _registers=registers, _layout=places.layout, _is_signed=utils.is_signed(result.dtype)
        )

    return read(memory, places)
