"""Programs of warpgroups, of which one copies tiles to shared memory, a few ahead of their use: how
they are launched, and how they wait for one another.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from jattn import tuning
from jattn.kernels.common import block_mask, reverse_mode
from jattn.kernels.gpu.registers import ROWS, WIDTH, Problem, few, interpreter, mosaic


class Order(NamedTuple):
    """The programs (part, b, h, i) of a launch in the order in which they start.

    Those that visit most tiles start first, so that all end at about the same time: the last ones
    of a causal mask would else go on alone. Of heads, those start together whose keys and values
    the second cache holds.
    """

    sizes: tuple[int, int]  # batch rows, heads of each
    grid: tuple[int, int, int]  # sections, blocks of each head, heads of a section; these in a row
    longest_first: Any  # the blocks, [B or 1, heads or 1, blocks], or None where all are as long

    @classmethod
    def of(
        cls, problem: Problem, visits: block_mask.BlockMask, heads: int, parts: int = 1
    ) -> "Order":
        """`parts` of what each block visits have programs of their own."""
        shapes, longest_first = problem.shapes, visits.longest_first(heads)
        each, units = 2 * shapes.S * shapes.H * shapes.dtype.itemsize, parts * shapes.B * heads
        most = 1 if longest_first is None else tuning.current().gpu_cached_bytes // each
        together = max(x for x in range(1, units + 1) if units % x == 0 and x <= max(1, most))
        grid = units // together, problem.blocks[problem.by_key], together
        return cls((shapes.B, heads), grid, longest_first)

    def place(self, index: tuple[Any, Any, Any], longest_first: Any) -> tuple[Any, Any, Any, Any]:
        """(part, b, h, i) of the program at this place of the grid."""
        section, rank, unit = index
        unit, (rows, heads) = section * np.int32(self.grid[2]) + unit, map(np.int32, self.sizes)
        row, h = lax.div(unit, heads), lax.rem(unit, heads)
        part, b = lax.div(row, rows), lax.rem(row, rows)
        if longest_first is None:
            return part, b, h, rank
        return part, b, h, longest_first[(*block_mask.clamped(longest_first, b, h), rank)]


def launch(name: str, problem: Problem, order: Order, kernel: Any, *rest: Any) -> list[Array]:
    """`kernel(place, operands, results, scratch)` in programs (part, b, h, i), otherwise as
    `launch_by_role`."""

    def placed(place: Callable[[], Any], *given: Any) -> None:
        kernel(place(), *given)

    return launch_by_role(name, problem, order, placed, *rest)


def launch_by_role(
    name: str,
    problem: Problem,
    order: Order,
    kernel: Any,
    operands: Any,
    results: Any,
    scratch: Any,
    warpgroups: int,
) -> list[Array]:
    """`kernel(place, operands, results, scratch)` in programs of so many warpgroups, where
    `place()` reads (part, b, h, i): what all warpgroups share takes up registers in each of them.
    Interpreted on a CPU."""
    given = jax.tree.map(jnp.asarray, (order.longest_first, operands))
    given, over = reverse_mode.varying_alike(given)
    flat, structure = jax.tree.flatten(given)
    names = "section", "rank", "unit"

    def body(*refs: Any) -> None:
        n, m = len(flat), len(flat) + len(results)
        longest_first, operands = jax.tree.unflatten(structure, refs[:n])

        def place() -> Any:
            return order.place(tuple(map(lax.axis_index, names)), longest_first)

        kernel(place, operands, refs[n:m], refs[m:])

    call = mosaic().kernel(
        body,
        out_type=[jax.ShapeDtypeStruct(*x) for x in results],
        scratch_types=scratch,
        grid=order.grid,
        grid_names=names,
        num_threads=warpgroups,
        thread_name="warpgroup",
        kernel_name=name,
        interpret=interpreter() if problem.unit.interpreted else False,
        compiler_params=mosaic().CompilerParams(
            approx_math=problem.approximate,
            lowering_semantics=mosaic().LoweringSemantics.Lane,
        ),
    )
    return [reverse_mode.vary(over.varying, x) for x in call(*flat)]


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
    filled: Any
    free: Any

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

    def _place(self, turn: Any) -> Any:
        return lax.bitwise_and(turn, np.int32(self.places - 1))

    def fill(self, turn: Any, *sources: Any) -> None:
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

    def drain(self, turns: Any) -> None:
        """Waits until all that was filled in so many turns is used up."""
        for place in range(self.places):

            @pl.when(turns > place)
            def _(place: int = place) -> None:
                mosaic().barrier_wait(self.free.at[place])

    def use(self, turn: Any, function: Callable[..., Any]) -> Any:
        """`function(*arrays)` of this turn, once they are there; their place is free afterwards."""
        self.wait(turn)
        found = function(*self.at(turn))
        if any(len(x.shape) == 2 for x in self.arrays):  # numbers, which threads read
            mosaic().commit_smem()  # copies may write then to what was read
        mosaic().barrier_arrive(self.freed(turn))
        return found

    def wait(self, turn: Any) -> None:
        """Until the arrays of this turn are there."""
        mosaic().barrier_wait(self.filled.at[self._place(turn)])

    def at(self, turn: Any) -> list[Any]:
        """The arrays of this turn."""
        place = self._place(turn)
        return [x.at[place] for x in self.arrays]

    def freed(self, turn: Any) -> Any:
        """The barrier at which those arrive that are done with them."""
        return self.free.at[self._place(turn)]


class Memory(NamedTuple):
    """Shared memory: what each computing warpgroup keeps, where its results leave too, and what
    comes by in turn."""

    own: Any
    filled: Any
    streams: tuple[Ring, ...]
    turns: Any

    @classmethod
    def scratch(cls, groups: int, own: Any, *streams: Any) -> "Memory":
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

    def load(self, which: int, group: Any, source: Any) -> Any:
        """One of the arrays that a warpgroup keeps."""
        gpu, own, filled = mosaic(), self.own[which].at[group], 2 * group + which
        gpu.copy_gmem_to_smem(source, own, self.filled.at[filled])
        gpu.barrier_wait(self.filled.at[filled])
        return own

    def drain(self, turns: Any) -> None:
        """Waits until all that came by in so many turns is used up."""
        for stream in self.streams:
            stream.drain(turns)


def store(pairs: Any) -> None:
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
