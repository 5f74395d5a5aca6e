"""Tensor memory: Blackwell's tensor cores write products to it, and read left sides from it.

It has 128 rows of up to 512 columns; each of a warpgroup's warps reads and writes 32 rows. Products
are computed while the threads continue; a barrier is passed when all earlier products are computed.
JAX before 0.12 cannot interpret it: shared memory then takes its place, and XLA multiplies at once.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike
from jaxtyping import Array

from jattn._types import Index, Ref, Tree
from jattn.kernels.gpu.mosaic.machine.registers import TENSOR_ROWS, Unit
from jattn.kernels.gpu.mosaic.machine.versions import knows_ampere, mosaic


def _in_shared_memory(unit: Unit) -> bool:
    return unit.interpreted and not knows_ampere()


def scratch(unit: Unit, columns: int, dtype: DTypeLike = jnp.float32) -> Any:
    """Allocates `[128, columns]`; two numbers of 16 bits share a column of the memory."""
    shape = TENSOR_ROWS, columns
    if _in_shared_memory(unit):
        return mosaic().SMEM(shape, dtype)
    return mosaic().TMEM(shape, dtype, packed=jnp.dtype(dtype).itemsize == 2)


def alternatives(unit: Unit, *arrays: Any) -> Tree:
    """Puts arrays in one place, of which one is used at a time."""
    return arrays if _in_shared_memory(unit) else mosaic().RefUnion(*arrays)


def barrier(unit: Unit, count: int, arrivals: int = 1) -> Any:
    """Allocates barriers for operations of tensor cores or other warpgroups on this memory."""
    ordered = not _in_shared_memory(unit)
    return mosaic().Barrier(num_barriers=count, num_arrivals=arrivals, orders_tensor_core=ordered)


def multiply(unit: Unit, total: Ref, a: Ref, b: Ref, transposed: bool = False) -> None:
    """Starts to add a · b to the total in tensor memory or, if `transposed`, to replace it by
    a · bᵀ; b is in shared memory."""
    if _in_shared_memory(unit):
        left, right = a[...], b[...].T if transposed else b[...]
        product = jnp.dot(left, right, preferred_element_type=jnp.float32)
        total[...] = product if transposed else total[...] + product
        return
    b = b.transpose((1, 0)) if transposed else b
    mosaic().tcgen05_mma(total, a, b, accumulate=not transposed)


def commit(unit: Unit, *barriers: Ref) -> None:
    """Arrives at barriers when all products that were started are computed."""
    for barrier in barriers:
        if _in_shared_memory(unit):
            mosaic().barrier_arrive(barrier)
        else:
            mosaic().tcgen05_commit_arrive(barrier)


def load(unit: Unit, memory: Ref, layout: Any = None) -> Array:
    """Loads an array to registers, by default in the layout of tiles."""
    if _in_shared_memory(unit):
        return memory[...]
    if unit.interpreted:
        return mosaic().async_load_tmem(memory)
    return mosaic().async_load_tmem(memory, layout=layout or unit.layout("ts"))


# The number of columns that one instruction moves to or from consecutive registers. For more, the
# compiler finds too few consecutive registers if these are scarce, and spills numbers.
_LOADED, _STORED = 32, 16


def _parts(memory: Ref, columns: int) -> list[Any]:
    return [memory.at[:, pl.ds(first, columns)] for first in range(0, memory.shape[1], columns)]


def load_by_parts(unit: Unit, memory: Ref) -> Array:
    """Loads a tile that fills most registers."""
    return jnp.concatenate([load(unit, part) for part in _parts(memory, _LOADED)], axis=1)


def wait_for_loads(unit: Unit) -> None:
    """Waits for loads: others may then overwrite what was read."""
    if not _in_shared_memory(unit):
        mosaic().wait_load_tmem()


def store(unit: Unit, memory: Ref, value: Array) -> None:
    if _in_shared_memory(unit):
        memory[...] = value
    else:
        mosaic().async_store_tmem(memory, value)


def store_by_parts(unit: Unit, memory: Ref, value: Array) -> None:
    """Stores a tile that fills most registers."""
    for i, part in enumerate(_parts(memory, _STORED)):
        first = i * _STORED
        store(unit, part, lax.slice(value, (0, first), (value.shape[0], first + _STORED)))


def wait_for_stores(unit: Unit) -> None:
    """Waits for stores: other warpgroups and the tensor cores may then read what was written."""
    if not _in_shared_memory(unit):
        mosaic().commit_tmem()


def warpgroups(unit: Unit, computing: int) -> int:
    """The number of warpgroups of a program, of which `computing` compute; see `by_role`."""
    return computing + (2 if unit.interpreted else 1)


def by_role(
    unit: Unit,
    computing: int,
    copy: Callable[[], None],
    multiply: Callable[[], None],
    compute: Callable[[Any], None],
) -> None:
    """Assigns the warpgroups of a program: most run `compute(group)`. In one more, one warp copies
    and another starts products; interpreted programs have two more, one for each."""
    group = lax.axis_index("warpgroup")

    def serve(which: Index) -> None:
        pl.when(which == 0)(copy)
        pl.when(which == 1)(multiply)

    @pl.when(group >= computing)
    def _() -> None:
        if unit.interpreted:
            serve(group - computing)
        else:
            mosaic().warp_map(serve)

    @pl.when(group < computing)
    def _() -> None:
        compute(group if computing > 1 else 0)
