"""Programs of warpgroups, of which one copies tiles to shared memory, a few ahead of their use: how
they wait for one another.
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
from jattn.kernels.gpu.mosaic.machine.registers import ROWS, WIDTH
from jattn.kernels.gpu.mosaic.machine.versions import few, mosaic


def later(count: Index) -> Array:
    """0, where the compiler does not know it: what is computed from it is not computed before, and
    takes up no registers until then. Counts are from 0 to 2^30."""
    return lax.shift_right_logical(jnp.int32(count), np.int32(30))


def tiles_in_memory(count: int, rows: int, width: int, dtype: Any, least: int = ROWS) -> Any:
    """Tiles in shared memory as matrix units read them, without conflicts between its banks. Those
    that other tiles of `least` rows are multiplied with lie in runs of as many columns."""
    gpu, run = mosaic(), min(least, WIDTH)
    swizzled = gpu.TilingTransform((8, run)), gpu.SwizzleTransform(run * dtype.itemsize)
    return gpu.SMEM((count, rows, width), dtype, transforms=swizzled)


class Ring(NamedTuple):
    """Places in shared memory that one warpgroup fills and the others use up, in turn; each holds a
    tile, or a few arrays that come and go together."""

    arrays: tuple[Any, ...]
    filled: Ref
    free: Ref

    @classmethod
    def scratch(cls, *arrays: Any, free: Any, copies: int | None = None) -> "Ring":
        """Of arrays in shared memory `[places, ...]`, which so many copies fill, by default one
        each; places are a power of two. `free` are its barriers."""
        places = arrays[0].shape[0]
        copies = len(arrays) if copies is None else copies
        return cls(
            arrays,
            mosaic().Barrier(num_barriers=places, num_arrivals=copies),
            free,
        )

    @property
    def places(self) -> int:
        return self.arrays[0].shape[0]

    def _place(self, turn: Index) -> Array:
        return lax.bitwise_and(turn, np.int32(self.places - 1))

    def fill(self, turn: Index, *sources: Ref) -> None:
        """Copies to the place of this turn, once that is free. A source is a part of an array in
        global memory, or a list of the parts of a tile."""
        place = self._place(turn)

        @pl.when(turn >= self.places)
        def _() -> None:
            mosaic().barrier_wait(self.free.at[place])

        for source, array in zip(sources, self.arrays, strict=True):
            whole = not isinstance(source, list)
            parts = [((), source)] if whole else [((x,), y) for x, y in enumerate(source)]
            for index, part in parts:
                mosaic().copy_gmem_to_smem(part, array.at[place, *index], self.filled.at[place])

    def drain(self, turns: Array) -> None:
        """Waits until all that was filled in so many turns is used up."""
        for place in range(self.places):

            @pl.when(turns > place)
            def _(place: int = place) -> None:
                mosaic().barrier_wait(self.free.at[place])

    def use(self, turn: Index, function: Callable[..., Any]) -> Tree:
        """`function(*arrays)` of this turn, once they are there; their place is free afterwards."""
        self.wait(turn)
        found = function(*self.at(turn))
        if any(len(x.shape) == 2 for x in self.arrays):  # numbers, which threads read
            mosaic().commit_smem()  # copies may write then to what was read
        mosaic().barrier_arrive(self.freed(turn))
        return found

    def wait(self, turn: Index) -> None:
        """Until the arrays of this turn are there."""
        mosaic().barrier_wait(self.filled.at[self._place(turn)])

    def at(self, turn: Index) -> list[Any]:
        """The arrays of this turn."""
        place = self._place(turn)
        return [x.at[place] for x in self.arrays]

    def freed(self, turn: Index) -> Ref:
        """The barrier at which those arrive that are done with them."""
        return self.free.at[self._place(turn)]


class Memory(NamedTuple):
    """Shared memory: what each computing warpgroup keeps, where its results leave too, and what
    comes by in turn."""

    own: Tree
    filled: Ref
    streams: tuple[Ring, ...]
    turns: Ref

    @classmethod
    def scratch(cls, groups: int, own: Tree, *streams: Tree) -> "Memory":
        """Of so many computing warpgroups, and of the arrays of each stream."""
        barrier = functools.partial(mosaic().Barrier, num_arrivals=groups)
        rings = [Ring.scratch(*x, free=barrier(num_barriers=x[0].shape[0])) for x in streams]
        filled = mosaic().Barrier(num_barriers=2 * groups)
        return cls(own, filled, tuple(rings), barrier())

    def change_turns(self) -> None:
        """Waits until the other computing warpgroup comes here too: one is at its products then,
        the other at its softmax, and after the next call the other way round. One that is alone
        goes on."""
        mosaic().barrier_arrive(self.turns)
        mosaic().barrier_wait(self.turns)

    def load(self, which: int, group: Index, source: Ref) -> Ref:
        """One of the arrays that a warpgroup keeps."""
        gpu, own, filled = mosaic(), self.own[which].at[group], 2 * group + which
        gpu.copy_gmem_to_smem(source, own, self.filled.at[filled])
        gpu.barrier_wait(self.filled.at[filled])
        return own

    def drain(self, turns: Array) -> None:
        """Waits until all that came by in so many turns is used up."""
        for stream in self.streams:
            stream.drain(turns)


def store(pairs: Ref) -> None:
    """Results from shared memory to global memory."""
    mosaic().commit_smem()
    for source, result in pairs:
        mosaic().copy_smem_to_gmem(source, result)
    mosaic().wait_smem_to_gmem(0)


def limit_registers(count: int, action: str) -> None:
    """Of each thread of a warpgroup, where that has an effect."""
    if not few():
        mosaic().set_max_registers(count, action=action)


def by_group(groups: int, copy: Callable[[], None], compute: Callable[[Any], None]) -> None:
    """What the warpgroups of a program do: so many `compute(group)`, and one does `copy()`, with
    registers to match."""
    group = lax.axis_index("warpgroup")

    @pl.when(group == groups)
    def _() -> None:
        limit_registers(24, "decrease")
        copy()

    @pl.when(group < groups)
    def _() -> None:
        limit_registers(240, "increase")
        compute(group)
