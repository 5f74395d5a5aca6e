"""Entries of arrays that functions of masks and scores index, in kernels in Mosaic.

Functions are traced before they run on registers. So to look up is an operation of its own in what
was traced; `mosaic_interpreter` gives it the places, and each thread reads the entries for those
that it holds.
"""

import dataclasses
import importlib
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax._src.core import Primitive
from jax.core import ShapedArray
from jax.interpreters import batching
from jaxtyping import Array

from jattn.kernels.gpu.mosaic.tile.kernel_refs import GatherRef


lookup_p = Primitive("lookup")


@lookup_p.def_abstract_eval
def _(place: Any, *, which: int, dtype: Any) -> Any:
    return ShapedArray(place.shape, dtype)


batching.defvectorized(lookup_p)


@dataclasses.dataclass(frozen=True)
class Table:
    """An array that functions index, in memory one entry after another. `which` of a spec's arrays
    it is, and the dtype that it has in memory."""

    which: int
    shape: tuple[int, ...]
    dtype: Any

    def __getitem__(self, index: tuple[Any, ...]) -> Array:
        """Entries at non-negative integers for all axes, as `mosaic_interpreter` reads them."""
        place = jnp.zeros((), jnp.int32)
        for x, size in zip(index, self.shape, strict=True):
            place = place * np.int32(size) + x
        return lookup_p.bind(place, which=self.which, dtype=self.dtype)

    def seen(self, selected: tuple[Any, ...], boolean: bool) -> GatherRef:
        """What a function sees of it, with the index of each axis that is already selected."""
        found = GatherRef(self, selected)
        if boolean:
            found = found.wrapped(lambda entry, _: entry != 0)
            found.dtype = jnp.dtype(bool)
        return found


def gather(gpu: Any, memory: Any, places: Array, layout: Any) -> Array:
    """The entries of global memory at places that lie in registers by a layout; `gpu` is Mosaic's
    module."""
    result = gpu.ShapeDtypeStruct(places.shape, memory.dtype, layout=layout)

    @gpu.inline_mgpu(arg_types=(gpu.RefType(), layout), return_type=result)
    def read(_: Any, memory: Any, places: Any) -> Any:
        lower, utils = (
            importlib.import_module(f"jax.experimental.mosaic.gpu{x}") for x in ("", ".utils")
        )
        ir, llvm, vector = (
            importlib.import_module(f"jaxlib.mlir.{x}")
            for x in ("ir", "dialects.llvm", "dialects.vector")
        )
        entry, start = utils.dtype_to_ir_type(result.dtype), utils.memref_ptr(memory)

        def of_register(places: Any) -> Any:
            size = ir.VectorType(places.type).shape[0]
            found = llvm.mlir_undef(ir.VectorType.get((size,), entry))
            for i in range(size):
                place = vector.extract(places, [], [i])
                value = llvm.load(entry, utils.getelementptr(start, [place], entry))
                found = vector.insert(value, found, [], [i])
            return found

        registers = np.empty_like(places.registers)
        for index, x in np.ndenumerate(places.registers):
            registers[index] = of_register(x)
        signed = utils.is_signed(result.dtype)
        return lower.FragmentedArray(_registers=registers, _layout=places.layout, _is_signed=signed)

    return read(memory, places)
