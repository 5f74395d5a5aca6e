"""Tensor memory, in which Blackwell's matrix units leave products, and from which they take left
sides: 128 rows of up to 512 columns. Each of a warpgroup's warps reads and writes 32 rows.

Products run while the threads go on. A barrier that is committed to says when all before are done.
JAX before 0.12 cannot interpret any of this: there shared memory is in its place, and XLA
multiplies at once.
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
    """`[128, columns]`; of numbers of 16 bits two share a column of the memory."""
    shape = TENSOR_ROWS, columns
    if _in_shared_memory(unit):
        return mosaic().SMEM(shape, dtype)
    return mosaic().TMEM(shape, dtype, packed=jnp.dtype(dtype).itemsize == 2)


def alternatives(unit: Unit, *arrays: Any) -> Tree:
    """Arrays in one place, of which one is in use."""
    return arrays if _in_shared_memory(unit) else mosaic().RefUnion(*arrays)


def barrier(unit: Unit, count: int, arrivals: int = 1) -> Any:
    """For what the matrix units or other warpgroups do with this memory."""
    ordered = not _in_shared_memory(unit)
    return mosaic().Barrier(num_barriers=count, num_arrivals=arrivals, orders_tensor_core=ordered)


def multiply(unit: Unit, total: Ref, a: Ref, b: Ref, transposed: bool = False) -> None:
    """Starts to compute a · b or, `transposed`, a · bᵀ alone, or to add a · b to the total, in this
    memory; b in shared memory."""
    if _in_shared_memory(unit):
        left, right = a[...], b[...].T if transposed else b[...]
        product = jnp.dot(left, right, preferred_element_type=jnp.float32)
        total[...] = product if transposed else total[...] + product
        return
    b = b.transpose((1, 0)) if transposed else b
    mosaic().tcgen05_mma(total, a, b, accumulate=not transposed)


def commit(unit: Unit, *barriers: Ref) -> None:
    """Arrives at these when all products that were started are computed."""
    for each in barriers:
        if _in_shared_memory(unit):
            mosaic().barrier_arrive(each)
        else:
            mosaic().tcgen05_commit_arrive(each)


def load(unit: Unit, memory: Ref, layout: Any = None) -> Array:
    """To registers, as tiles lie there if no other layout is named."""
    if _in_shared_memory(unit):
        return memory[...]
    if unit.interpreted:
        return mosaic().async_load_tmem(memory)
    return mosaic().async_load_tmem(memory, layout=layout or unit.layout("ts"))


# Columns that one instruction moves: they take up registers that follow one another. Larger runs of
# them are hard to find where registers are scarce, and numbers are spilled.
_LOADED, _STORED = 32, 16


def _parts(memory: Ref, columns: int) -> list[Any]:
    return [memory.at[:, pl.ds(first, columns)] for first in range(0, memory.shape[1], columns)]


def load_by_parts(unit: Unit, memory: Ref) -> Array:
    """`load` of a tile that fills most registers."""
    return jnp.concatenate([load(unit, part) for part in _parts(memory, _LOADED)], axis=1)


def wait_for_loads(unit: Unit) -> None:
    """Others may write then to what was read."""
    if not _in_shared_memory(unit):
        mosaic().wait_load_tmem()


def store(unit: Unit, memory: Ref, value: Array) -> None:
    if _in_shared_memory(unit):
        memory[...] = value
    else:
        mosaic().async_store_tmem(memory, value)


def store_by_parts(unit: Unit, memory: Ref, value: Array) -> None:
    """`store` of a tile that fills most registers."""
    for i, part in enumerate(_parts(memory, _STORED)):
        first = i * _STORED
        store(unit, part, lax.slice(value, (0, first), (value.shape[0], first + _STORED)))


def wait_for_stores(unit: Unit) -> None:
    """Others may read then what was written, and the matrix units may."""
    if not _in_shared_memory(unit):
        mosaic().commit_tmem()


def warpgroups(unit: Unit, computing: int) -> int:
    """How many a program has in which so many compute; see `by_role`."""
    return computing + (2 if unit.interpreted else 1)


def by_role(
    unit: Unit,
    computing: int,
    copy: Callable[[], None],
    multiply: Callable[[], None],
    compute: Callable[[Any], None],
) -> None:
    """What the warpgroups of a program do: most `compute(group)`. Of one more a warp copies and
    another starts products; of those that are interpreted, two more."""
    role = lax.axis_index("warpgroup")

    def serve(which: Index) -> None:
        pl.when(which == 0)(copy)
        pl.when(which == 1)(multiply)

    @pl.when(role >= computing)
    def _() -> None:
        if unit.interpreted:
            serve(role - computing)
        else:
            mosaic().warp_map(serve)

    @pl.when(role < computing)
    def _() -> None:
        compute(role if computing > 1 else 0)
