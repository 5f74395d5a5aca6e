"""A program of a backward pass on GPUs. It keeps some queries, or some keys, and streams the tiles
of keys that these attend to, or of queries that attend to them.

There are two kernels: one by queries for their gradients, one by keys for those of keys and values.
No two programs add to the same numbers, so that all runs give the same results.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from jax import lax
from jaxtyping import Array

from jattn._types import Index, Ref, Tree
from jattn.kernels.common import block_mask, tile_schedule
from jattn.kernels.gpu.mosaic.kernels.launch import Order, launch
from jattn.kernels.gpu.mosaic.machine.registers import Unit
from jattn.kernels.gpu.mosaic.machine.streams import copied_order, rows_of_head
from jattn.kernels.gpu.mosaic.tile.gradients import RowStatistics
from jattn.kernels.gpu.mosaic.tile.problem import GPUProblem
from jattn.kernels.gpu.mosaic.tile.spec_refs import TileIndex
from jattn.spec import Spec


class GradientProgram(NamedTuple):
    """A program for block `place` (b, h, i), where h is a key head with `by_key`.

    `per_query` are query and d_out, `per_key` key and value, `statistics` stacked `RowStatistics`.
    `which` lists the gradients to compute: 0 of queries or keys, 1 of values. `memory` is the
    scratch of `launched`.
    """

    problem: GPUProblem
    which: tuple[int, ...]
    visits: block_mask.BlockMask
    place: Any
    per_query: Tree
    per_key: Tree
    statistics: Ref
    leaves: list[Any]
    visits_ref: Tree
    results: Ref
    memory: Any

    def run(self) -> None:
        """Computes the gradients that the program keeps, and writes them to `results`."""
        raise NotImplementedError

    @property
    def resident(self) -> Ref:
        return self.per_key if self.problem.by_key else self.per_query

    @property
    def streamed(self) -> Ref:
        return self.per_query if self.problem.by_key else self.per_key

    def fold(self, visit: Callable[..., Any], state: Array) -> Array:
        """Folds `visit(h, x, masked, state)` over the query heads that share what is kept, and the
        blocks x that each of them visits."""
        return self.fold_heads(lambda h: functools.partial(visit, h), state)

    def fold_heads(self, of_head: Callable[[Any], Callable[..., Any]], state: Tree) -> Tree:
        """Folds in the same way, where `of_head(h)` does the work that a head needs once, and
        returns `visit(x, masked, state)`."""
        b, h, i = self.place

        def fold_head(g: Array, state: Tree) -> Tree:
            head = h * self.problem.heads + g
            return self.visits.fold(self.visits_ref, (b, head, i), of_head(head), state)

        return tile_schedule.repeat(0, self.problem.heads, fold_head, state)

    def tiles(self, h: Array, x: Array) -> list[Any]:
        """Block x of the streamed arrays of a query head, in global memory."""
        head = h if self.problem.by_key else lax.div(h, np.int32(self.problem.shapes.G))
        size = self.problem.streamed
        return [source.at[self.part(x * size, size, head)] for source in self.streamed]

    def part(self, start: Array, size: int, head: Array) -> tuple[Any, Any, Any]:
        """The index of some rows of a head."""
        return rows_of_head(self.problem.unit, self.place[0], head, start, size)

    def kept_statistics(self, unit: Unit, *block: Index) -> RowStatistics | None:
        """Reads the statistics of a block of kept queries; None if keys are kept."""
        return None if self.problem.by_key else RowStatistics.read(unit, self.statistics, *block)

    def tile_index(self, h: Array, start: Array, other: Array) -> TileIndex:
        """The index of the tile that starts at a kept row and at a streamed one."""
        row, column = (other, start) if self.problem.by_key else (start, other)
        return TileIndex(self.place[0], h, row, column)


def launched(
    name: str,
    kind: type[GradientProgram],
    call: tuple[GPUProblem, Spec, Any, Array, Array, tuple[int, ...]],
    size: int,
    scratch: Tree,
    warpgroups: int,
) -> list[Array]:
    """Runs programs of a `kind`, a class of `GradientProgram`, each with `warpgroups`.

    `call` has the arguments of `mosaic_call.GradientKernels.run`. Statistics are stacked in blocks
    of `size` queries.
    """
    problem, spec, (query, d_out, *numbers), key, value, which = call
    shapes, by_key, visits = problem.shapes, problem.by_key, problem.visits(spec)
    statistics, is_large = RowStatistics.stacked(problem.factors, numbers, size)
    if by_key:
        visits = visits.without_full(is_large)

    def kernel(read_item: Any, operands: Ref, results: Ref, memory: Ref) -> None:
        place = read_item()[1:]
        kind(problem, which, visits, place, *operands, results=results, memory=memory).run()

    ordered = functools.partial(copied_order, problem.unit)
    per_query, per_key = ordered(query, d_out), ordered(key, value)
    operands = per_query, per_key, statistics, problem.refs.arrays, visits.arrays
    resident = per_key if by_key else per_query
    results = [(resident[i].shape, shapes.dtype) for i in which]
    order = Order.of(problem, visits, shapes.K if by_key else shapes.N)
    return ordered(*launch(name, problem, order, kernel, operands, results, scratch, warpgroups))
