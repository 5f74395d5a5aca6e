"""Gradients of the parameters of score functions, by the products of kernels in Mosaic.

A program is one warpgroup, which computes weights and their cotangents once more and sums what a
parameter's entries get of them:

- a parameter along T, or along neither T nor S: for 64 queries, over the keys that they see;
- one along S: for 64 keys, over the queries that see them;
- one along both: for a tile, over the batch rows and heads that share it. Nothing larger is held;
- one by the distance of queries and keys: for a diagonal of tiles, in each of which the same
  entries belong to the same places.

Where nobody asks for a gradient XLA leaves out its kernel. What functions look up is such a
parameter where `hoisted` makes it one. Other tables that they index have XLA's: it can scatter.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from jattn import tile
from jattn._types import Index, Ref, Tree
from jattn.kernels.common import block_mask
from jattn.kernels.gpu.mosaic.kernels.launch import Order, launch
from jattn.kernels.gpu.mosaic.machine.registers import ROWS
from jattn.kernels.gpu.mosaic.machine.streams import Stream, heads_first, put
from jattn.kernels.gpu.mosaic.machine.warpgroups import tiles_in_memory
from jattn.kernels.gpu.mosaic.tile import hoisted
from jattn.kernels.gpu.mosaic.tile.factors import Factors
from jattn.kernels.gpu.mosaic.tile.gradients import Rows, d_parameter, of_tile
from jattn.kernels.gpu.mosaic.tile.parameter import Parameter
from jattn.kernels.gpu.mosaic.tile.problem import GPUProblem
from jattn.kernels.gpu.mosaic.tile.spec_refs import TileIndex
from jattn.kernels.xla import blockwise
from jattn.spec import Spec, parameter_letters, parameters, with_parameters


_NAME = "jattn_mosaic_d_parameter"
# Of shared memory for tiles: on Hopper, and where all GPUs since Ampere have so much.
_MOST_BYTES = {False: 200 * 1024, True: 96 * 1024}


def of(
    by_query: GPUProblem, by_key: GPUProblem, spec: Spec, per_query: Any, key: Array, value: Array
) -> list[Array]:
    """Those of all parameters of a padded call, in float32, each in its own shape."""

    def in_kernels(values: list[Array]) -> Spec:
        own = hoisted.replaced(with_parameters(spec, values), by_query.shapes)
        return Factors.of(own)[1]

    values = [x.astype(jnp.float32) for x in parameters(spec)]
    derived, pull = jax.vjp(lambda values: parameters(in_kernels(values)), values)
    own = in_kernels(values)
    kinds, found = [Parameter.of(own, which) for which in range(len(derived))], []
    for parameter, leaf, letters in zip(kinds, derived, parameter_letters(own), strict=True):
        if _scattered(parameter):
            found.append(jnp.zeros_like(leaf))
            continue
        find, problem = _kernel(parameter, by_query, by_key)
        parts = find(problem, spec, parameter, (per_query, key, value))
        found.append(
            tile.sum_heads(parts * (problem.factors.after * problem.factors.kept), leaf, letters)
        )
    (found,) = pull(found)
    # What is left to XLA is the same array in both specs.
    left = [x for x, kind in zip(parameters(own), kinds, strict=True) if _scattered(kind)]
    assert all(any(x is y for x in values) for y in left)
    if left:
        every = blockwise.parameter_gradients(spec, per_query, key, value, by_query.tiling)
        scattered = [any(x is y for y in left) for x in values]
        found = [y if x else z for x, y, z in zip(scattered, every, found, strict=True)]
    return found


def _scattered(parameter: Parameter) -> bool:
    """Whether its gradient is XLA's."""
    return parameter.looked_up and not parameter.by_distance


def _kernel(
    parameter: Parameter, by_query: GPUProblem, by_key: GPUProblem
) -> tuple[Callable[..., Array], GPUProblem]:
    """What finds its gradient, in a call by queries or by keys."""
    if parameter.by_distance:
        return _by_diagonal, by_query
    along_keys, along_queries = map(parameter.runs_along, "ST")
    if along_keys and along_queries:
        return _by_tile, by_query
    return _by_block, by_key if along_keys else by_query


class _Program(NamedTuple):
    """What a program works with: which parameter, references to all that it reads, and a place in
    shared memory for the tiles of some queries and some keys."""

    problem: GPUProblem
    parameter: Parameter
    tensors: Any  # query, d_out, key and value, heads first for products by warps
    rows: Any  # what `Rows` stacks
    leaves: list[Any]
    stream: Stream

    def at(self, b: Index, h: Index, i: Index, j: Index) -> TileIndex:
        """The tile of blocks i of queries and j of keys."""
        rows, columns = self.problem.refs.sizes.values()
        return TileIndex(b, h, i * rows, j * columns)

    def fetch(self, turn: Index, at: TileIndex) -> None:
        """Starts to copy what a tile needs."""
        rows, columns = self.problem.refs.sizes.values()
        query, d_out, key, value = self.tensors
        own = self._index(at.b, at.h, pl.ds(at.row, rows))
        group = lax.div(at.h, np.int32(self.problem.shapes.G))
        seen = self._index(at.b, group, pl.ds(at.column, columns))
        tiles = query.at[own], d_out.at[own], key.at[seen], value.at[seen]
        self.stream.fill(turn, *tiles, *self.problem.streamed_parts(self.leaves, at))

    def _index(self, b: Index, h: Index, run: Any) -> tuple[Any, Any, Any]:
        return (b, h, run) if self.problem.unit.by_warp else (b, run, h)

    def fold(
        self,
        visits: block_mask.BlockMask,
        memory: Ref,
        place: tuple[Any, Any, Any],
        at: Callable[[Any], TileIndex],
        zeros: Array,
    ) -> Array:
        """What all tiles `at(x)` add that a place visits."""

        def fetch(x: Array, turn: Index) -> None:
            self.fetch(turn, at(x))

        def step(
            x: Array, masked: bool, fetch_next: Callable[..., Any], state: tuple[Array, ...]
        ) -> tuple[Array, ...]:
            turn, total = state
            ahead = functools.partial(fetch_next, turn + 1)
            return turn + 1, self.add(total, turn, masked, at(x), ahead)

        first = jnp.int32(0)
        return visits.fold_ahead(memory, place, fetch, first, step, (first, zeros))[1]

    def add(
        self, total: Array, turn: Index, masked: bool, at: TileIndex, fetch_next: Callable[..., Any]
    ) -> Array:
        """The sum with what a tile adds."""
        problem, unit, parameter = self.problem, self.problem.unit, self.parameter
        *tensors, beside = self._tiles(turn)
        ahead = self.stream.places > 1
        if ahead:
            fetch_next()
        here = problem.tile(self.leaves, at, {})
        kept, others = tensors[::-1] if problem.by_key else tensors
        block = lax.div(at.row, np.int32(problem.refs.sizes["T"]))
        rows = functools.partial(Rows.read, unit, self.rows, at.b, at.h, block)
        derive = functools.partial(d_parameter, parameter.which, parameter.axes)
        found = of_tile(problem, masked, rows, kept, others, here, beside, derive)
        if not ahead:
            self.stream.release()
            fetch_next()
        return total + found

    def _tiles(self, turn: Index) -> tuple[Any, Any, Any]:
        query, d_out, key, value, *beside = self.stream.wait(turn)
        return (query, d_out), (key, value), beside


def _run(
    problem: GPUProblem,
    parameter: Parameter,
    order: Order,
    body: Callable[[_Program, Any, Any, Any], None],
    arrays: tuple[Any, Any, Any],
    index: Tree,
    result: tuple[int, ...],
) -> Tree:
    """`body(program, place, index, result)` in all programs, for the arrays of a padded call."""
    (query, d_out, *rows), key, value = arrays

    def kernel(place: tuple[Array, ...], operands: Ref, results: Ref, scratch: Tree) -> None:
        tensors, rows, leaves, index = operands
        program = _Program(problem, parameter, tensors, rows, leaves, scratch[0])
        body(program, place, index, results[0])

    sizes = problem.refs.sizes
    rows, _ = Rows.stacked(problem.factors, rows, sizes["T"])
    tensors = query, d_out, key, value
    tensors = heads_first(*tensors) if problem.unit.by_warp else tensors
    width, dtype = problem.shapes.H, problem.shapes.dtype
    each = 2 * (sizes["T"] + sizes["S"]) * width * dtype.itemsize
    places = 2 if 2 * each <= _MOST_BYTES[problem.unit.by_warp] else 1
    tiles = [tiles_in_memory(places, sizes[x], width, dtype) for x in "TTSS"]
    scratch = [Stream.scratch(problem.unit, places, *tiles, *problem.streamed_scratch(places))]
    operands, results = (tensors, rows, problem.refs.arrays, index), [(result, jnp.float32)]
    return launch(_NAME, problem, order, kernel, operands, results, scratch, 1)[0]


def _by_block(problem: GPUProblem, spec: Spec, parameter: Parameter, arrays: Tree) -> Array:
    """Of a parameter that does not run along both T and S, for each head `[B, N, ...]`; a program
    for every 64 queries, or keys where `problem.by_key`."""
    shapes, by_key = problem.shapes, problem.by_key
    visits = problem.visits(spec)
    _, far = Rows.stacked(problem.factors, arrays[0][2:], problem.refs.sizes["T"])
    visits = visits.without_full(far)

    def body(program: _Program, place: tuple[Array, ...], visits_ref: Ref, result: Ref) -> None:
        _, b, h, x = place

        def at(y: Array) -> TileIndex:
            return program.at(b, h, *((y, x) if by_key else (x, y)))

        zeros = problem.unit.to_layout(jnp.zeros((ROWS,), jnp.float32), "s" if by_key else "t")
        total = program.fold(visits, visits_ref, (b, h, x), at, zeros)
        put(problem.unit, result.at[b, h, pl.ds(x * ROWS, ROWS)], total)

    order = Order.of(problem, visits, shapes.N)
    result = shapes.B, shapes.N, shapes.S if by_key else shapes.T
    return parameter.of_heads(_run(problem, parameter, order, body, arrays, visits.arrays, result))


def _by_tile(problem: GPUProblem, spec: Spec, parameter: Parameter, arrays: Tree) -> Array:
    """Of a parameter along T and S, `[B or 1, N or 1, T, S]`; a program for each of its tiles."""
    shapes, (n, m), (rows, columns) = problem.shapes, problem.blocks, problem.tiling
    heads, shared = parameter.own, parameter.shared(shapes.B, shapes.N)
    visits = block_mask.of_heads(problem.kinds(spec), heads, shared)

    def body(program: _Program, place: tuple[Array, ...], visits_ref: Ref, result: Ref) -> None:
        _, b, h, tile_index = place
        i, j = (f(tile_index, np.int32(m)) for f in (lax.div, lax.rem))

        def at(index: Array) -> TileIndex:
            first, second = (f(index, np.int32(shared[1])) for f in (lax.div, lax.rem))
            return program.at(b + first, h + second, i, j)

        zeros = problem.unit.to_layout(jnp.zeros((rows, columns), jnp.float32), "ts")
        total = program.fold(visits, visits_ref, (b, h, tile_index), at, zeros)
        own = pl.ds(i * rows, rows), pl.ds(j * columns, columns)
        put(problem.unit, result.at[b, h, *own], total)

    order = Order(heads, (math.prod(heads), n * m, 1), None)
    result = (*heads, shapes.T, shapes.S)
    return _run(problem, parameter, order, body, arrays, visits.arrays, result)


def _by_diagonal(problem: GPUProblem, spec: Spec, parameter: Parameter, arrays: Tree) -> Array:
    """Of a parameter by distance, for each head `[1, N, distances]`; a program for each diagonal of
    tiles, which adds them up, and leaves its 64 rows to XLA."""
    shapes, (n, m), (rows, columns) = problem.shapes, problem.blocks, problem.tiling
    step = rows // columns
    visits = block_mask.of_diagonals(problem.kinds(spec), step, shapes.B)
    diagonals = m + (n - 1) * step

    def body(program: _Program, place: tuple[Array, ...], visits_ref: Ref, result: Ref) -> None:
        _, _, h, d = place

        def at(index: Array) -> TileIndex:
            b, i = (f(index, np.int32(n)) for f in (lax.div, lax.rem))
            return program.at(b, h, i, d + (i - (n - 1)) * step)

        zeros = problem.unit.to_layout(jnp.zeros((rows, columns), jnp.float32), "ts")
        put(problem.unit, result.at[h, d], program.fold(visits, visits_ref, (0, h, d), at, zeros))

    longest = visits.longest_first(visits.ends.shape[1])
    order = Order((1, shapes.N), (shapes.N, diagonals, 1), longest)
    result = shapes.N, diagonals, rows, columns
    sums = _run(problem, parameter, order, body, arrays, visits.arrays, result)
    return _of_distances(sums)[None]


def _of_distances(sums: Array) -> Array:
    """Tiles `[N, diagonals, t, s]`, each the sum of one diagonal's, summed by distance. Distances
    are counted from that of the last query and the first key."""
    N, diagonals, t, s = sums.shape
    # Each row starts one place later than the one below, so that distances stand in columns.
    wide = jnp.pad(sums[:, :, ::-1], ((0, 0), (0, 0), (0, 0), (0, t)))
    rows = wide.reshape(N, diagonals, t * (s + t))[:, :, : t * (s + t - 1)]
    along = rows.reshape(N, diagonals, t, s + t - 1).sum(axis=2)
    along = jnp.pad(along, ((0, 0), (0, 0), (0, 1))).reshape(N, diagonals, t // s + 1, s)
    # Diagonals overlap: what one has in its second part belongs to the first part of the next.
    parts = [jnp.pad(along[:, :, x], ((0, 0), (x, t // s - x), (0, 0))) for x in range(t // s + 1)]
    return sum(parts[1:], parts[0]).reshape(N, -1)[:, :-1]
