"""Gradients of the parameters of score functions, by the products of kernels in Mosaic.

A program is one warpgroup, which recomputes weights and their cotangents and sums them for each
entry of the parameter:

- for a parameter along T, or along neither T nor S, it sums 64 queries over the keys that they
  attend to;
- for one along S, it sums 64 keys over the queries that attend to them;
- for one along both, it sums a tile over the batch rows and heads that share it, and holds no
  larger array;
- for one by the distance of queries and keys, it sums a diagonal of tiles, in each of which the
  same entries belong to the same places.

XLA omits the kernel of a gradient that is not used. Entries that functions look up are such
parameters if `hoisted` makes arrays of them. For other tables XLA computes the gradient, because it
can scatter.
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
from jattn.kernels.gpu.mosaic.machine.streams import Stream, copied_order, put, rows_of_head
from jattn.kernels.gpu.mosaic.machine.warpgroups import tiles_in_memory
from jattn.kernels.gpu.mosaic.tile import hoisted
from jattn.kernels.gpu.mosaic.tile.gradients import Derivation, Parameter, RowStatistics, of_tile
from jattn.kernels.gpu.mosaic.tile.problem import Factors, GPUProblem
from jattn.kernels.gpu.mosaic.tile.spec_refs import TileIndex
from jattn.kernels.xla import blockwise
from jattn.spec import Spec, parameter_letters, parameters, with_parameters


_NAME = "jattn_mosaic_d_parameter"
# Shared memory for tiles by whether warps multiply: on Hopper, and on all GPUs since Ampere.
_MOST_BYTES = {False: 200 * 1024, True: 96 * 1024}


def of(
    by_query: GPUProblem, by_key: GPUProblem, spec: Spec, per_query: Any, key: Array, value: Array
) -> list[Array]:
    """Computes the gradients of all parameters of a padded call, in float32 and their shapes."""

    def in_kernels(values: list[Array]) -> Spec:
        hoisted_spec = hoisted.replaced(with_parameters(spec, values), by_query.shapes)
        return Factors.of(hoisted_spec)[1]

    values = [x.astype(jnp.float32) for x in parameters(spec)]
    derived, pull = jax.vjp(lambda values: parameters(in_kernels(values)), values)
    kernel_spec = in_kernels(values)
    kinds, sums = [Parameter.of(kernel_spec, which) for which in range(len(derived))], []
    for parameter, leaf, letters in zip(
        kinds, derived, parameter_letters(kernel_spec), strict=True
    ):
        if _is_scattered(parameter):
            sums.append(jnp.zeros_like(leaf))
            continue
        compute, problem = _kernel(parameter, by_query, by_key)
        parts = compute(problem, spec, parameter, (per_query, key, value))
        factor = problem.factors.score_factor * problem.factors.dropout_scale
        sums.append(tile.sum_heads(parts * factor, leaf, letters))
    (gradients,) = pull(sums)
    # A parameter whose gradient XLA computes is the same array in both specs.
    pairs = zip(parameters(kernel_spec), kinds, strict=True)
    scattered = [x for x, kind in pairs if _is_scattered(kind)]
    assert all(any(x is y for x in values) for y in scattered)
    if scattered:
        every = blockwise.parameter_gradients(spec, per_query, key, value, by_query.tiling)
        is_scattered = [any(x is y for y in scattered) for x in values]
        triples = zip(is_scattered, every, gradients, strict=True)
        gradients = [y if x else z for x, y, z in triples]
    return gradients


def _is_scattered(parameter: Parameter) -> bool:
    """Returns whether XLA computes the gradient."""
    return parameter.looked_up and not parameter.by_distance


def _kernel(
    parameter: Parameter, by_query: GPUProblem, by_key: GPUProblem
) -> tuple[Callable[..., Array], GPUProblem]:
    """Returns the function that computes the gradient, and its problem, by queries or by keys."""
    if parameter.by_distance:
        return _by_diagonal, by_query
    along_keys, along_queries = map(parameter.runs_along, "ST")
    if along_keys and along_queries:
        return _by_tile, by_query
    return _by_block, by_key if along_keys else by_query


class _ParameterProgram(NamedTuple):
    """A program for one parameter, with references to its operands, and places in shared memory for
    tiles of queries and keys. `tensors` are query, d_out, key and value in `copied_order`;
    `statistics` are stacked `RowStatistics`."""

    problem: GPUProblem
    parameter: Parameter
    tensors: Any
    statistics: Any
    leaves: list[Any]
    stream: Stream

    def tile_index(self, b: Index, h: Index, i: Index, j: Index) -> TileIndex:
        """The index of the tile of blocks i of queries and j of keys."""
        rows, columns = self.problem.refs.sizes.values()
        return TileIndex(b, h, i * rows, j * columns)

    def fetch(self, turn: Index, index: TileIndex) -> None:
        """Starts to copy the arrays of a tile: its `tensors` and its parts of the spec's arrays."""
        rows, columns = self.problem.refs.sizes.values()
        (query, d_out, key, value), unit = self.tensors, self.problem.unit
        queries = rows_of_head(unit, index.b, index.h, index.row, rows)
        key_head = lax.div(index.h, np.int32(self.problem.shapes.G))
        keys = rows_of_head(unit, index.b, key_head, index.column, columns)
        tiles = query.at[queries], d_out.at[queries], key.at[keys], value.at[keys]
        self.stream.fill(turn, *tiles, *self.problem.streamed_parts(self.leaves, index))

    def fold(
        self,
        visits: block_mask.BlockMask,
        memory: Ref,
        block: tuple[Any, Any, Any],
        index: Callable[[Any], TileIndex],
        zeros: Array,
    ) -> Array:
        """Sums the contributions of the tiles `index(x)` that a block visits."""

        def fetch(x: Array, turn: Index) -> None:
            self.fetch(turn, index(x))

        def visit(x: Array, masked: bool, turn: Array, fetch_next: Any, total: Array) -> Array:
            place, arrays = index(x), self.stream.wait(turn)
            has_two_places = self.stream.places > 1
            if has_two_places:
                fetch_next()
            part = self.of_tile(masked, place, *arrays)
            if not has_two_places:
                self.stream.release()
                fetch_next()
            return total + part

        return visits.fold_ahead(memory, block, fetch, visit, (jnp.int32(0), zeros))[1]

    def of_tile(self, masked: bool, index: TileIndex, *arrays: Ref) -> Array:
        """Returns a tile's contribution; `arrays` are those that `fetch` copies."""
        problem, pairs = self.problem, (arrays[:2], arrays[2:4])
        resident, other = pairs[::-1] if problem.by_key else pairs
        tile = problem.tile(self.leaves, index, {})
        block = lax.div(index.row, np.int32(problem.refs.sizes["T"]))
        return of_tile(
            problem,
            masked=masked,
            statistics=functools.partial(
                RowStatistics.read, problem.unit, self.statistics, index.b, index.h, block
            ),
            resident=resident,
            streamed=other,
            tile=tile,
            streamed_arrays=arrays[4:],
            derive=functools.partial(Derivation.d_parameter, parameter=self.parameter),
        )


def _run(
    problem: GPUProblem,
    parameter: Parameter,
    order: Order,
    of_place: Callable[..., tuple[Any, Callable[..., TileIndex], Any]],
    arrays: tuple[Any, Any, Any],
    visits: block_mask.BlockMask,
    shape: tuple[int, ...],
    axes: str = "ts",
) -> Tree:
    """Computes the sums of all programs, an array of a shape, for the arrays of a padded call.

    `of_place(program, *place)` returns the block of a program in `visits`, the index of tile x that
    it visits as a function of x, and the part of the array that it writes, along `axes` of a tile.
    """
    (query, d_out, *numbers), key, value = arrays
    sizes, unit = problem.refs.sizes, problem.unit

    def kernel(read_item: Callable[[], Any], operands: Ref, results: Ref, scratch: Tree) -> None:
        tensors, statistics, leaves, visits_ref = operands
        _, *block = read_item()
        program = _ParameterProgram(problem, parameter, tensors, statistics, leaves, scratch[0])
        block, index, part = of_place(program, *block)
        zeros = jnp.zeros([sizes[x.upper()] for x in axes], jnp.float32)
        total = program.fold(visits, visits_ref, block, index, unit.to_layout(zeros, axes))
        put(unit, results[0].at[part], total)

    statistics, _ = RowStatistics.stacked(problem.factors, numbers, sizes["T"])
    tensors = copied_order(unit, query, d_out, key, value)
    width, dtype = problem.shapes.H, problem.shapes.dtype
    tile_bytes = 2 * (sizes["T"] + sizes["S"]) * width * dtype.itemsize
    places = 2 if 2 * tile_bytes <= _MOST_BYTES[unit.by_warp] else 1
    tiles = [tiles_in_memory(places, sizes[x], width, dtype) for x in "TTSS"]
    scratch = [Stream.scratch(unit, *tiles, *problem.streamed_scratch(places))]
    operands = tensors, statistics, problem.refs.arrays, visits.arrays
    return launch(_NAME, problem, order, kernel, operands, [(shape, jnp.float32)], scratch, 1)[0]


def _by_block(problem: GPUProblem, spec: Spec, parameter: Parameter, arrays: Tree) -> Array:
    """Computes the gradient of a parameter that does not run along both T and S, for each head
    `[B, N, ...]`, in a program for every 64 queries, or keys with `problem.by_key`."""
    shapes, by_key = problem.shapes, problem.by_key
    visits = problem.visits(spec)
    _, is_large = RowStatistics.stacked(problem.factors, arrays[0][2:], problem.refs.sizes["T"])
    visits = visits.without_full(is_large)

    def of_place(program: _ParameterProgram, b: Index, h: Index, x: Index) -> Any:
        def index(y: Array) -> TileIndex:
            return program.tile_index(b, h, *((y, x) if by_key else (x, y)))

        return (b, h, x), index, (b, h, pl.ds(x * ROWS, ROWS))

    order = Order.of(problem, visits, shapes.N)
    shape = shapes.B, shapes.N, shapes.S if by_key else shapes.T
    axes = "s" if by_key else "t"
    sums = _run(problem, parameter, order, of_place, arrays, visits, shape, axes)
    return parameter.of_heads(sums)


def _by_tile(problem: GPUProblem, spec: Spec, parameter: Parameter, arrays: Tree) -> Array:
    """Computes the gradient of a parameter along T and S, `[B or 1, N or 1, T, S]`, in a program
    for each of its tiles."""
    shapes, (n, m), (rows, columns) = problem.shapes, problem.blocks, problem.tiling
    heads, shared = parameter.separate, parameter.shared(shapes.B, shapes.N)
    visits = block_mask.of_heads(problem.kinds(spec), heads, shared)

    def of_place(program: _ParameterProgram, b: Index, h: Index, number: Index) -> Any:
        i, j = (f(number, np.int32(m)) for f in (lax.div, lax.rem))

        def index(x: Array) -> TileIndex:
            row, head = (f(x, np.int32(shared[1])) for f in (lax.div, lax.rem))
            return program.tile_index(b + row, h + head, i, j)

        part = b, h, pl.ds(i * rows, rows), pl.ds(j * columns, columns)
        return (b, h, number), index, part

    order = Order(heads, (math.prod(heads), n * m, 1), None)
    shape = (*heads, shapes.T, shapes.S)
    return _run(problem, parameter, order, of_place, arrays, visits, shape)


def _by_diagonal(problem: GPUProblem, spec: Spec, parameter: Parameter, arrays: Tree) -> Array:
    """Computes the gradient of a parameter by distance, for each head `[1, N, distances]`: a
    program sums a diagonal of tiles, and leaves the sums along the tile's diagonals to XLA."""
    shapes, (n, m), (rows, columns) = problem.shapes, problem.blocks, problem.tiling
    ratio = rows // columns
    visits = block_mask.of_diagonals(problem.kinds(spec), ratio, shapes.B)
    diagonals = m + (n - 1) * ratio

    def of_place(program: _ParameterProgram, _: Index, h: Index, d: Index) -> Any:
        def index(x: Array) -> TileIndex:
            b, i = (f(x, np.int32(n)) for f in (lax.div, lax.rem))
            return program.tile_index(b, h, i, d + (i - (n - 1)) * ratio)

        return (0, h, d), index, (h, d)

    longest = visits.longest_first(visits.ends.shape[1])
    order = Order((1, shapes.N), (shapes.N, diagonals, 1), longest)
    shape = shapes.N, diagonals, rows, columns
    return _of_distances(_run(problem, parameter, order, of_place, arrays, visits, shape))[None]


def _of_distances(sums: Array) -> Array:
    """Sums tiles `[N, diagonals, t, s]`, each the sum of one diagonal of tiles, by distance from
    that of the last query and the first key on."""
    N, diagonals, t, s = sums.shape
    # Each row starts one place after the row below, so that distances stand in columns.
    wide = jnp.pad(sums[:, :, ::-1], ((0, 0), (0, 0), (0, 0), (0, t)))
    rows = wide.reshape(N, diagonals, t * (s + t))[:, :, : t * (s + t - 1)]
    along = rows.reshape(N, diagonals, t, s + t - 1).sum(axis=2)
    along = jnp.pad(along, ((0, 0), (0, 0), (0, 1))).reshape(N, diagonals, t // s + 1, s)
    # Diagonals overlap: the second part of each belongs to the first part of the next.
    parts = [jnp.pad(along[:, :, x], ((0, 0), (x, t // s - x), (0, 0))) for x in range(t // s + 1)]
    return sum(parts[1:], parts[0]).reshape(N, -1)[:, :-1]
