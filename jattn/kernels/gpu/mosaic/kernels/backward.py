"""A program of a backward pass on GPUs: some queries, or some keys, which it keeps, while tiles of
what they attend to, or are attended by, come by.

There are two kernels: one by queries gives their gradients, one by keys those of keys and values.
No two programs add to the same numbers, so that all runs give the same.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from jattn._types import Ref, Tree
from jattn.kernels.common import block_mask, tile_schedule
from jattn.kernels.gpu.mosaic.kernels.launch import Order, launch
from jattn.kernels.gpu.mosaic.machine.streams import heads_first
from jattn.kernels.gpu.mosaic.tile.gradients import Rows
from jattn.kernels.gpu.mosaic.tile.problem import GPUProblem
from jattn.kernels.gpu.mosaic.tile.spec_refs import TileIndex
from jattn.spec import Spec


class Program(NamedTuple):
    """`at` is (b, h, i), where h is a key head if `by_key`; `per_query` are query and d_out,
    `per_key` key and value, `rows` what `Rows` stacks. `which` gradients are asked for: 0 is that
    of queries or keys, 1 that of values."""

    problem: GPUProblem
    which: tuple[int, ...]
    visits: block_mask.BlockMask
    at: Any
    per_query: Tree
    per_key: Tree
    rows: Ref
    leaves: list[Any]
    visits_ref: Tree

    @property
    def kept(self) -> Ref:
        return self.per_key if self.problem.by_key else self.per_query

    @property
    def streamed(self) -> Ref:
        return self.per_query if self.problem.by_key else self.per_key

    def fold(self, step: Callable[..., Any], state: Array) -> Array:
        """Folds `step(h, x, masked, state)` over the heads that share what is kept, and over the
        blocks x that each of them visits."""
        return self.fold_heads(lambda h: functools.partial(step, h), state)

    def fold_heads(self, of_head: Callable[[Any], Callable[..., Any]], state: Tree) -> Tree:
        """The same, where `of_head(h)` does what is done once for a head, and returns
        `step(x, masked, state)`."""
        heads = self.problem.heads

        def one(g: Array, state: Tree) -> Tree:
            h = self.at[1] * heads + g
            return self.visits.fold(self.visits_ref, (self.at[0], h, self.at[2]), of_head(h), state)

        return tile_schedule.repeat(0, heads, one, state)

    def tiles(self, h: Array, x: Array) -> list[Any]:
        """Block x of what comes by of a query head, in global memory."""
        head = h if self.problem.by_key else lax.div(h, np.int32(self.problem.shapes.G))
        size = self.problem.streamed
        return [source.at[self.part(x * size, size, head)] for source in self.streamed]

    def part(self, start: Array, size: int, head: Array) -> tuple[Any, Any, Any]:
        """The index of some rows of a head. Products of single warps take heads first: threads copy
        rows that follow one another in memory."""
        run = pl.ds(start, size)
        return (self.at[0], head, run) if self.problem.unit.by_warp else (self.at[0], run, head)

    def place(self, h: Array, start: Array, other: Array) -> TileIndex:
        """That of the tile of what is kept and what comes by."""
        row, column = (other, start) if self.problem.by_key else (start, other)
        return TileIndex(self.at[0], h, row, column)


def launched(
    name: str,
    kind: Any,
    call: tuple[GPUProblem, Spec, Any, Array, Array, tuple[int, ...]],
    size: int,
    run: Callable[..., None],
    scratch: Tree,
    warpgroups: int,
) -> list[Array]:
    """`run(program, results, scratch)` in programs of a `kind`, each of so many warpgroups, for a
    call of `mosaic_call.Backward.run`; rows are stacked in blocks of a size."""
    problem, spec, (query, d_out, *rows), key, value, which = call
    shapes, by_key, visits = problem.shapes, problem.by_key, problem.visits(spec)
    rows, far = Rows.stacked(problem.factors, rows, size)
    if by_key:
        visits = visits.without_full(far)

    def kernel(place: tuple[Array, ...], operands: Ref, results: Ref, scratch: Ref) -> None:
        run(kind(problem, which, visits, place[1:], *operands), results, scratch)

    laid = heads_first if problem.unit.by_warp else lambda *arrays: list(arrays)
    per_query, per_key = laid(query, d_out), laid(key, value)
    operands = per_query, per_key, rows, problem.refs.arrays, visits.arrays
    kept = per_key if by_key else per_query
    results = [(kept[i].shape, shapes.dtype) for i in which]
    order = Order.of(problem, visits, shapes.K if by_key else shapes.N)
    return laid(*launch(name, problem, order, kernel, operands, results, scratch, warpgroups))
