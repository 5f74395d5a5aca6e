"""Tiles that the only warpgroup of a program copies to shared memory ahead of their use, and what
it leaves in global memory.

Before Hopper each thread copies its share and all wait for one another; since Hopper a unit of its
own copies, and a barrier says when a tile is there.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from jattn._types import Index, Ref
from jattn.kernels.gpu.mosaic.machine import device
from jattn.kernels.gpu.mosaic.machine.registers import WIDTH, Unit
from jattn.kernels.gpu.mosaic.machine.versions import mosaic


_COPYING_UNIT = (9, 0)  # compute capability since which there is one


def _copies_by_unit(unit: Unit) -> bool:
    """Whether the device that the program is for has a unit that copies; the interpreter has."""
    found = None if unit.interpreted else device.capability()
    return found is None or found >= _COPYING_UNIT


def least_rows(unit: Unit, width: int) -> int:
    """Rows of so many numbers that a copy has at least: where threads copy, each warp takes runs of
    8 rows and 64 columns."""
    return 8 if _copies_by_unit(unit) else max(8, 4 * 8 * WIDTH // width)


class Stream(NamedTuple):
    """Places in shared memory, filled and used in turn; each holds arrays that come and go
    together. `filled` is a barrier for each place, None where threads copy themselves."""

    arrays: tuple[Any, ...]
    filled: Ref | None

    @classmethod
    def scratch(cls, unit: Unit, places: int, *arrays: Any, copies: int | None = None) -> "Stream":
        """Of arrays in shared memory `[places, ...]`, which so many copies fill, by default one
        each."""
        if not _copies_by_unit(unit):
            return cls(arrays, None)
        copies = len(arrays) if copies is None else copies
        return cls(arrays, mosaic().Barrier(num_barriers=places, num_arrivals=copies))

    @property
    def places(self) -> int:
        return self.arrays[0].shape[0]

    def _place(self, turn: Index) -> Array:
        return lax.rem(turn, np.int32(self.places))

    def fill(self, turn: Index, *sources: Ref) -> None:
        """Starts to copy to the place of this turn. All threads must be done with what it held, and
        are where they have waited for another copy since, or in `release`. Where a unit copies they
        wait here.

        A source is a part of an array in global memory, or a list of parts that follow one another
        in shared memory."""
        place = self._place(turn)
        if self.filled is not None:
            mosaic().commit_smem()
        for source, array in zip(sources, self.arrays, strict=True):
            if not isinstance(source, list):
                self._copy(source, array.at[place], place)
                continue
            size = array.shape[1] // len(source)
            for x, part in enumerate(source):
                self._copy(part, array.at[place, pl.ds(x * size, size)], place)

    def _copy(self, source: Ref, to: Ref, place: Index) -> None:
        if self.filled is None:
            inside = mosaic().OOBFillMode.PROMISE_IN_BOUNDS
            mosaic().copy_gmem_to_smem(source, to, oob_mode=inside)
        else:
            mosaic().copy_gmem_to_smem(source, to, self.filled.at[place])

    def wait(self, turn: Index) -> list[Any]:
        """The arrays of this turn, once they are there and all threads have come here."""
        place = self._place(turn)
        if self.filled is None:
            mosaic().wait_gmem_to_smem(0)
        else:
            mosaic().barrier_wait(self.filled.at[place])
        return [x.at[place] for x in self.arrays]

    def release(self) -> None:
        """All threads are done with what they have read, so that even the only place may be filled
        again."""
        if self.filled is None:
            mosaic().wait_gmem_to_smem(0)


def put(unit: Unit, memory: Ref, value: Array) -> None:
    """From registers to global memory."""
    if unit.interpreted or not hasattr(mosaic(), "store"):
        memory[...] = value
    else:
        mosaic().store(memory, value, optimized=False)


def heads_first(*arrays: Array) -> list[Array]:
    """Threads copy rows that follow one another in memory."""
    return [jnp.swapaxes(x, 1, 2) for x in arrays]
