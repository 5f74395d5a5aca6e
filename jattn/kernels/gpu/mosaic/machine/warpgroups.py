"""Programs of several warpgroups, of which one copies tiles to shared memory ahead of their use."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from jattn._types import Index, Ref, Tree
from jattn.kernels.gpu.mosaic.machine.registers import ROWS, WIDTH
from jattn.kernels.gpu.mosaic.machine.streams import Stream
from jattn.kernels.gpu.mosaic.machine.versions import has_few_registers, mosaic


def later(count: Index) -> Array:
    """Returns 0, computed from a count below 2^30 so that the compiler does not know it.

    Values that depend on it are not computed before the count, and take up no registers earlier.
    """
    return lax.shift_right_logical(jnp.int32(count), np.int32(30))


def hidden(number: Index, count: Array) -> Array:
    """Returns the number of a warpgroup, or of its first row, in a form that the compiler does not
    know; for `count` see `later`.

    Addresses that depend on it are then computed where they are used, not kept in registers. If
    tensor cores arrive at a barrier whose address is known, ptxas even keeps the address of all
    shared memory, and spills it.
    """
    return number + later(count)


def tiles_in_memory(count: int, rows: int, width: int, dtype: Any, least: int = ROWS) -> Any:
    """Allocates tiles in shared memory in the layout of tensor cores, without bank conflicts.

    The layout consists of runs of at most 64 columns, and at most `least`, the smallest number of
    rows of the tiles with which these are multiplied.
    """
    gpu, run = mosaic(), min(least, WIDTH)
    swizzled = gpu.TilingTransform((8, run)), gpu.SwizzleTransform(run * dtype.itemsize)
    return gpu.SMEM((count, rows, width), dtype, transforms=swizzled)


class WarpgroupMemory(NamedTuple):
    """Shared memory: the arrays that each computing warpgroup keeps, which its results also pass
    through, and the streams of tiles."""

    resident: Tree
    filled: Ref
    streams: tuple[Stream, ...]
    alternation: Ref

    @classmethod
    def scratch(cls, groups: int, resident: Tree, *streams: Tree) -> "WarpgroupMemory":
        """Allocates it for a number of computing warpgroups, and for the arrays of each stream."""
        barrier = functools.partial(mosaic().Barrier, num_arrivals=groups)
        rings = [Stream.ring(*x, free=barrier(num_barriers=x[0].shape[0])) for x in streams]
        filled = mosaic().Barrier(num_barriers=2 * groups)
        return cls(resident, filled, tuple(rings), barrier())

    def alternate_warpgroups(self) -> None:
        """Waits until the other computing warpgroup calls this too: one then computes products, the
        other its softmax, and after the next call the other way round. A single one continues."""
        mosaic().barrier_arrive(self.alternation)
        mosaic().barrier_wait(self.alternation)

    def load(self, which: int, group: Index, source: Ref) -> Ref:
        """Copies one of the arrays that a warpgroup keeps, and returns it."""
        gpu, resident, barrier = mosaic(), self.resident[which].at[group], 2 * group + which
        gpu.copy_gmem_to_smem(source, resident, self.filled.at[barrier])
        gpu.barrier_wait(self.filled.at[barrier])
        return resident

    def drain(self, n_tiles: Array) -> None:
        """Waits until all of the `n_tiles` tiles that each stream received have been used."""
        for stream in self.streams:
            stream.drain(n_tiles)


def store(pairs: Ref) -> None:
    """Copies results from shared memory to global memory, and waits until they are there."""
    mosaic().commit_smem()
    for source, result in pairs:
        mosaic().copy_smem_to_gmem(source, result)
    mosaic().wait_smem_to_gmem(0)


def by_group(groups: int, copy: Callable[[], None], compute: Callable[[Any], None]) -> None:
    """Assigns the warpgroups of a program: `groups` of them run `compute(group)`, and one more runs
    `copy()`, with fewer registers if that can be chosen."""
    group = lax.axis_index("warpgroup")

    @pl.when(group == groups)
    def _() -> None:
        if not has_few_registers():
            mosaic().set_max_registers(24, action="decrease")
        copy()

    @pl.when(group < groups)
    def _() -> None:
        if not has_few_registers():
            mosaic().set_max_registers(240, action="increase")
        compute(group)
