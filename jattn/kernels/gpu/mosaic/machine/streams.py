"""Tiles that the only warpgroup of a program, or one of several, copies to shared memory ahead of
their use, and the results that it writes to global memory.

Before Hopper each thread copies its share and all wait for one another; since Hopper a separate
unit copies, and a barrier says when a tile has arrived.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from jattn._types import Index, Ref, Tree
from jattn.kernels.gpu.mosaic.machine import device
from jattn.kernels.gpu.mosaic.machine.registers import WIDTH, Unit
from jattn.kernels.gpu.mosaic.machine.versions import mosaic


_COPYING_UNIT = (9, 0)  # compute capability since which there is one


def _copies_by_unit(unit: Unit) -> bool:
    """Returns whether the program's device has a unit that copies; the interpreter has one."""
    capability = None if unit.interpreted else device.capability()
    return capability is None or capability >= _COPYING_UNIT


def least_rows(unit: Unit, width: int) -> int:
    """The fewest rows of a copy, of `width` numbers each: if threads copy, each warp copies runs of
    8 rows and 64 columns."""
    return 8 if _copies_by_unit(unit) else max(8, 4 * 8 * WIDTH // width)


class Stream(NamedTuple):
    """Places in shared memory; each holds arrays that are copied together, such as one tile. Turn n
    of a program fills and uses place n % places.

    `filled` has a barrier for each place; it is None if threads copy. If one warpgroup copies and
    others compute, these arrive at the barriers `free` when they have used a place; else it is
    None.
    """

    arrays: tuple[Any, ...]
    filled: Ref | None
    free: Ref = None

    @classmethod
    def scratch(cls, unit: Unit, *arrays: Any, copies: int | None = None) -> "Stream":
        """Makes a stream of arrays in shared memory `[places, ...]`, in which the only warpgroup
        copies; places are a power of two. `copies` fill a place, by default one for each array."""
        if not _copies_by_unit(unit):
            return cls(arrays, None)
        return cls.ring(*arrays, free=None, copies=copies)

    @classmethod
    def ring(cls, *arrays: Any, free: Any, copies: int | None = None) -> "Stream":
        """Makes a stream in which one warpgroup copies for others; `free` are their barriers."""
        copies = len(arrays) if copies is None else copies
        places = arrays[0].shape[0]
        return cls(arrays, mosaic().Barrier(num_barriers=places, num_arrivals=copies), free)

    @property
    def places(self) -> int:
        return self.arrays[0].shape[0]

    def _place(self, turn: Index) -> Array:
        return lax.bitwise_and(turn, np.int32(self.places - 1))

    def fill(self, turn: Index, *sources: Ref) -> None:
        """Starts to copy to the place of this turn.

        If threads copy, the caller must first have called `wait` or `release`, after all uses of
        the previous contents; otherwise this method waits for these uses. A source is a part of an
        array in global memory, or a list of parts, which are consecutive in shared memory.
        """
        place = self._place(turn)
        if self.free is not None:
            pl.when(turn >= self.places)(lambda: mosaic().barrier_wait(self.free.at[place]))
        elif self.filled is not None:
            mosaic().commit_smem()
        for source, array in zip(sources, self.arrays, strict=True):
            if not isinstance(source, list):
                self._copy(source, array.at[place], place)
                continue
            size = array.shape[1] // len(source)
            for x, part in enumerate(source):
                rows = x if size == 1 else pl.ds(x * size, size)
                self._copy(part, array.at[place, rows], place)

    def _copy(self, source: Ref, to: Ref, place: Index) -> None:
        if self.filled is None:
            inside = mosaic().OOBFillMode.PROMISE_IN_BOUNDS
            mosaic().copy_gmem_to_smem(source, to, oob_mode=inside)
        else:
            mosaic().copy_gmem_to_smem(source, to, self.filled.at[place])

    def wait(self, turn: Index) -> list[Any]:
        """Waits for the arrays of this turn, and for all threads if these copy; returns the
        arrays."""
        place = self._place(turn)
        if self.filled is None:
            mosaic().wait_gmem_to_smem(0)
        else:
            mosaic().barrier_wait(self.filled.at[place])
        return [x.at[place] for x in self.arrays]

    def of_turn(self, turn: Index) -> list[Any]:
        """The arrays of this turn."""
        place = self._place(turn)
        return [x.at[place] for x in self.arrays]

    def freed(self, turn: Index) -> Ref:
        """The barrier at which warpgroups arrive when they have used the arrays of this turn."""
        return self.free.at[self._place(turn)]

    def use(self, turn: Index, function: Callable[..., Any]) -> Tree:
        """Returns `function(*arrays)` of this turn, after waiting for the arrays; frees the place
        afterwards."""
        result = function(*self.wait(turn))
        if any(len(x.shape) == 2 for x in self.arrays):  # numbers, which threads read
            mosaic().commit_smem()  # copies may then overwrite what was read
        mosaic().barrier_arrive(self.freed(turn))
        return result

    def drain(self, turns: Array) -> None:
        """Waits until the places of all turns have been used."""
        for place in range(self.places):
            wait = functools.partial(mosaic().barrier_wait, self.free.at[place])
            pl.when(turns > place)(wait)

    def release(self) -> None:
        """Waits until all threads have used what they read: the only place may then be refilled."""
        if self.filled is None:
            mosaic().wait_gmem_to_smem(0)


def put(unit: Unit, memory: Ref, value: Array) -> None:
    """Writes an array from registers to global memory."""
    if unit.interpreted or not hasattr(mosaic(), "store"):
        memory[...] = value
    else:
        mosaic().store(memory, value, optimized=False)


def copied_order(unit: Unit, *arrays: Array) -> list[Array]:
    """Returns arrays `[B, tokens, heads, ...]` as programs copy them: if single warps multiply,
    with heads first, as threads copy rows that are consecutive in memory."""
    return [jnp.swapaxes(x, 1, 2) for x in arrays] if unit.by_warp else list(arrays)


def rows_of_head(unit: Unit, b: Any, h: Any, start: Any, size: int) -> tuple[Any, Any, Any]:
    """Returns the index of `size` tokens of a head in an array in `copied_order`."""
    rows = pl.ds(start, size)
    return (b, h, rows) if unit.by_warp else (b, rows, h)
