"""Attention on Hopper GPUs for any mask, asynchronous from memory to matrix units.

FlashAttention-3 (Shah et al. 2024) in Pallas's Mosaic GPU, learned from its documentation and from
`jax.experimental.pallas.ops.gpu.attention_mgpu`. A program has three warpgroups. One only copies
tiles of keys and values to shared memory, a few ahead of their use. The other two keep 64 queries
each and compute; in the forward pass they alternate: the tensor cores compute products of one while
the other computes its softmax. Barriers say whose turn it is, which place in shared memory is
filled, and which is free again. With a causal mask there are as many programs as run at once, if
registers suffice: each continues with other queries, whose keys are copied before it has finished.

Index arrays say which tiles are visited and which need no mask, see `block_mask`; the scores of a
tile come from `jattn.tile`, through `mosaic_interpreter`. On a CPU the same kernels run in JAX's
interpreter.
"""

import contextlib
import functools
import importlib.metadata
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from jattn import masks, scores, softmax
from jattn._types import Ref, Tree
from jattn.call import Call
from jattn.kernels.common import block_mask
from jattn.kernels.common.vjp import AttentionVJP
from jattn.kernels.gpu.mosaic.kernels import backward, mosaic_call
from jattn.kernels.gpu.mosaic.kernels import decode as gpu_decode
from jattn.kernels.gpu.mosaic.kernels.launch import Order, forward_results, joined, launch_in_rounds
from jattn.kernels.gpu.mosaic.machine import device, matrix_units
from jattn.kernels.gpu.mosaic.machine.registers import ROWS, Products
from jattn.kernels.gpu.mosaic.machine.versions import few, mosaic
from jattn.kernels.gpu.mosaic.machine.warpgroups import (
    WarpgroupMemory,
    by_group,
    later,
    store,
    tiles_in_memory,
)
from jattn.kernels.gpu.mosaic.tile import hoisted, mosaic_interpreter
from jattn.kernels.gpu.mosaic.tile.factors import Factors
from jattn.kernels.gpu.mosaic.tile.gradients import RowStatistics, add_gradients, finished
from jattn.kernels.gpu.mosaic.tile.online_softmax import finish, initial, online
from jattn.kernels.gpu.mosaic.tile.problem import GPUProblem
from jattn.kernels.gpu.mosaic.tile.register_tile import RegisterTile
from jattn.kernels.gpu.mosaic.tile.spec_refs import TileIndex
from jattn.kernels.protocol import Kernel, Reader
from jattn.spec import Shapes, Spec, Tiling


CAPABILITY = (9, 0)  # others have no wgmma
_AHEAD = 2  # places in shared memory for streamed tiles
# CUDA 12.8.0 to 12.9.0 compile masks wrongly: JAX's `attention_mgpu` refuses causal ones there. The
# compilers of 12.9.0 and 12.9.1 differ in their version, and their CUDA runtimes do not.
_MISCOMPILING, _MENDED = range(12080, 12100), (12, 9, 86)
_COMPILERS = "nvidia-cuda-nvcc-cu12", "nvidia-nvjitlink-cu12"  # the first with JAX before 0.12


def supports(call: Call) -> str | None:
    """Returns why the kernel cannot compute a call; None if it can."""
    reason = device.unfit(lambda x: x == CAPABILITY, "9.0") or _miscompiled()
    return reason or mosaic_call.unsupported(_FORWARD, call)


def _miscompiled() -> str | None:
    if device.device() is None or _cuda_version() not in _MISCOMPILING:
        return None
    versions = _compilers()
    if versions and min(versions.values()) >= _MENDED:
        return None
    named = [f"{name} {'.'.join(map(str, version))}" for name, version in versions.items()]
    return (
        "CUDA 12.8.0 to 12.9.0 compile masks wrongly; expected CUDA 12.9.1 or later, which is "
        f"{' and '.join(_COMPILERS)} 12.9.86, got {' and '.join(named) or 'neither'}"
    )


def _cuda_version() -> int:
    """The version of the CUDA runtime as CUDA encodes it: 12090 is 12.9.0 or 12.9.1; 0 if JAX has
    none."""
    versions = importlib.import_module("jax._src.lib").cuda_versions
    return versions.cuda_runtime_get_version() if versions else 0


def _compilers() -> dict[str, tuple[int, ...]]:
    """The versions of CUDA's compilers that are installed as packages."""
    versions = {}
    for name in _COMPILERS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = tuple(map(int, importlib.metadata.version(name).split(".")[:3]))
    return versions


# ---------------------------------------------------------------------------------------------
# The kernels
# ---------------------------------------------------------------------------------------------


class _HopperForward(NamedTuple):
    """A program of the forward pass: some queries, and all their keys or one of `parts` of them.

    `each_place(visit, state)` folds `visit(place, state)` over the places whose queries the program
    computes one after another; `place(count)` reads (part, b, h, i), see `launch_in_rounds`.
    """

    problem: GPUProblem
    visits: block_mask.BlockMask
    parts: int
    each_place: Callable[[Any, Any], Any]
    memory: WarpgroupMemory
    query: Ref
    key: Ref
    value: Ref
    leaves: list[Any]
    visits_ref: Tree

    def fold(self, place: tuple[Any, ...], visit: Callable[..., Any], state: Tree) -> Tree:
        """Folds `visit(j, masked, state)` over the tiles j of keys that a place visits."""
        part, *block = place
        return self.visits.fold(self.visits_ref, tuple(block), visit, state, (part, self.parts))

    def copy(self) -> None:
        """Copies the tiles of keys and values of all places, in one warpgroup."""
        self.memory.drain(self.each_place(self.copy_tiles, jnp.int32(0)))

    def copy_tiles(self, place: Callable[..., Any], turn: Array) -> Array:
        """Copies the tiles of one place, and returns the next turn."""
        rows, columns = self.problem.tiling
        part, b, h, i = place(0)
        kv = lax.div(h, np.int32(self.problem.shapes.G))

        def visit(j: Array, masked: bool, turn: Array) -> Array:
            run = pl.ds(j * columns, columns)
            index = TileIndex(b, h, i * rows, j * columns)
            parts = self.problem.streamed_parts(self.leaves, index)
            self.memory.streams[0].fill(turn, self.key.at[b, run, kv], *parts)
            self.memory.streams[1].fill(turn, self.value.at[b, run, kv])
            return turn + 1

        return self.fold((part, b, h, i), visit, turn)

    def compute(self, results: Ref, group: Array) -> None:
        """Attends from a warpgroup's queries of all places, in each of the other warpgroups."""
        self.each_place(functools.partial(self.attend, results, group), jnp.int32(0))

    def attend(self, results: Ref, group: Array, place: Callable[..., Any], turn: Array) -> Array:
        """Attends from a warpgroup's queries of one place, and returns the next turn."""
        problem, memory = self.problem, self.memory
        rows, columns = problem.tiling
        part, b, h, i = place(0)
        memory.load(0, group, self.query.at[b, pl.ds(i * rows + group * ROWS, ROWS), h])
        constants = problem.constants(self.leaves, b, h)

        def visit(j: Array, masked: bool, state: Tree) -> Tree:
            turn, sums = state
            hidden = _hidden(group, turn, _has_much_to_keep(problem, masked))
            _, b, h, i = place(turn)
            index = TileIndex(b, h, i * rows + hidden * ROWS, j * columns)
            read = functools.partial(problem.tile, self.leaves, index, constants)
            return turn + 1, _attend_to_tile(problem, memory, hidden, masked, read, turn, sums)

        pl.when(group == 1)(memory.change_turns)
        state = turn, initial(problem.unit, ROWS, problem.shapes.V)
        turn, sums = self.fold((part, b, h, i), visit, state)
        pl.when(group == 0)(memory.change_turns)
        part, b, h, i = place(turn)
        block = part, b, h, pl.ds(i * rows + group * ROWS, ROWS)
        _write_results(problem.factors, memory, group, sums, block, results)
        return turn


def _forward(problem: GPUProblem, spec: Spec, query: Array, key: Array, value: Array) -> Tree:
    """Computes output `[B, T, N, V]` and normalizer `[B, T, N]`.

    There is a program for every 128 queries and each part of the keys (Dao et al. 2023,
    "Flash-Decoding").
    """
    shapes, visits, parts = problem.shapes, problem.visits(spec), problem.parts()

    def kernel(fold: Callable[..., Any], operands: Ref, results: Ref, scratch: Ref) -> None:
        program = _HopperForward(problem, visits, parts, fold, WarpgroupMemory(*scratch), *operands)
        by_group(problem.groups, program.copy, functools.partial(program.compute, results))

    operands = query, key, value, problem.refs.arrays, visits.arrays
    order, name = Order.of(problem, visits, shapes.N, parts), "jattn_hopper_forward"
    rounds = order.rounds(device.multiprocessors()) if _has_registers(spec, visits) else None
    rest = operands, forward_results(shapes, parts), _forward_scratch(problem), problem.groups + 1
    return joined(*launch_in_rounds(name, problem, order, rounds, kernel, *rest))


def _attend_to_tile(
    problem: GPUProblem,
    memory: WarpgroupMemory,
    group: Array,
    masked: bool,
    read: Callable[[], RegisterTile],
    turn: Array,
    sums: softmax.Partial,
) -> softmax.Partial:
    """Adds one more tile of keys and values to the sums of a warpgroup; `read` reads its spec."""
    unit = problem.unit
    # A tile that needs a mask is read where registers are free.
    early = None if masked else read()

    def of_keys(k: Ref, *streamed: Ref) -> Tree:
        pair, change = [(memory.resident[0].at[group], k)], memory.change_turns
        (products,) = matrix_units.multiply(unit, pair, transposed=True, started=change)
        return products, (early or read()).completed(streamed)

    products, tile = memory.streams[0].use(turn, of_keys)
    weights, sums = online(problem, masked, tile, products, sums)
    weights = weights.astype(problem.shapes.dtype)
    memory.change_turns()

    def of_values(v: Ref) -> list[Array]:
        return matrix_units.multiply(unit, [(weights, v)], onto=[sums.weighted])

    (weighted,) = memory.streams[1].use(turn, of_values)
    return sums._replace(weighted=weighted)


def _has_registers(spec: Spec, visits: block_mask.BlockMask) -> bool:
    """Returns whether tiles leave registers for what a program keeps between two places: with score
    functions and dropout not all do."""
    return spec.score is None and not spec.dropout_rate and visits.order is None


def _has_much_to_keep(problem: GPUProblem, masked: bool) -> bool:
    """Returns whether a tile needs nearly all registers."""
    return masked or problem.shapes.H > 128 or bool(problem.refs.varying)


def _hidden(group: Array, turn: Array, scarce: bool) -> Array:
    """Returns the number of a warpgroup, hidden from the compiler if registers are scarce: it then
    computes addresses where they are used."""
    return group + later(turn) if scarce else group


def _forward_scratch(problem: GPUProblem) -> WarpgroupMemory:
    shapes, columns, groups = problem.shapes, problem.tiling.block_kv, problem.groups
    queries = tiles_in_memory(groups, ROWS, shapes.H, shapes.dtype)
    resident = queries, *[mosaic().SMEM((groups, ROWS), jnp.float32)] * 2
    tiles = tiles_in_memory(_AHEAD, columns, shapes.H, shapes.dtype)
    return WarpgroupMemory.scratch(
        groups, resident, (tiles, *problem.streamed_scratch(_AHEAD)), (tiles,)
    )


def _write_results(
    factors: Factors,
    memory: WarpgroupMemory,
    group: Array,
    sums: softmax.Partial,
    block: Tree,
    results: Ref,
) -> None:
    """Writes output and normalizer of a warpgroup's queries, through the memory that it keeps; the
    output of a part of the keys directly, in float32."""
    (part, b, h, rows), (queries, *resident) = block, (place.at[group] for place in memory.resident)
    out, normalizer = mosaic_interpreter.run(functools.partial(finish, factors), sums)
    result = results[0].at[part, b, rows, h]
    is_part = result.dtype != queries.dtype
    if is_part:
        result[...] = out
    else:
        queries[...] = out.astype(queries.dtype)
    for place, x in zip(resident, normalizer, strict=True):
        place[...] = x
    along = [(x, to.at[part, b, h, rows]) for x, to in zip(resident, results[1:], strict=True)]
    store(along if is_part else [(queries, result), *along])


class _HopperGradients(backward.GradientProgram):
    """128 queries or, with `by_key`, 128 keys, of which each computing warpgroup keeps 64."""

    def copy(self, memory: WarpgroupMemory) -> None:
        """Copies all tiles, in one warpgroup."""
        b, _, i = self.place

        def visit(h: Array, x: Array, masked: bool, turn: Array) -> Array:
            first = i * self.problem.groups * ROWS
            index = self.tile_index(h, first, x * self.problem.streamed)
            rows = [self.rows.at[b, h, x]] if self.problem.by_key else []
            parts = self.problem.streamed_parts(self.leaves, index)
            memory.streams[0].fill(turn, *self.tiles(h, x), *rows, *parts)
            return turn + 1

        memory.drain(self.fold(visit, jnp.int32(0)))

    def compute(self, memory: WarpgroupMemory, results: Ref, group: Array) -> None:
        """Computes the gradients of 64 queries or keys, in each of the other warpgroups."""
        problem, (b, key_head, i) = self.problem, self.place
        block = i * problem.groups + group
        start = block * ROWS
        part = b, pl.ds(start, ROWS), key_head
        resident = [memory.load(x, group, self.resident[x].at[part]) for x in range(2)]
        unit, by_key = problem.unit, problem.by_key
        rows = None if by_key else RowStatistics.read(unit, self.rows, b, key_head, block)

        def of_head(h: Any) -> Callable[..., Any]:
            constants = problem.constants(self.leaves, b, h)

            def visit(x: Array, masked: bool, state: tuple[Array, ...]) -> tuple[Array, ...]:
                turn, *totals = state
                index = self.tile_index(h, start, x * problem.streamed)
                read = functools.partial(problem.tile, self.leaves, index, constants)
                tile = read if masked else read()
                hidden = _hidden(group, turn, by_key or _has_much_to_keep(problem, masked))
                arrays = [x.at[hidden] for x in memory.resident]
                totals = dict(zip(self.which, totals, strict=True))
                add = functools.partial(self.add, tile, masked, rows, arrays, totals)
                return turn + 1, *memory.streams[0].use(turn, add)

            return visit

        zeros = [unit.zeros(ROWS, problem.shapes.H) for _ in results]
        _, *totals = self.fold_heads(of_head, (jnp.int32(0), *zeros))
        gradients = finished(problem, dict(zip(self.which, totals, strict=True)), rows)
        for place, gradient in zip(resident, gradients, strict=False):
            place[...] = gradient.astype(place.dtype)
        store([(x, y.at[part]) for x, y in zip(resident, results, strict=False)])

    def add(
        self, tile: Any, masked: bool, rows: Any, resident: Any, totals: Any, *arrays: Ref
    ) -> list[Array]:
        """Adds a streamed tile to the totals."""
        tiles, rest = arrays[:2], arrays[2:]
        if rows is None:
            rows, rest = functools.partial(RowStatistics.read, self.problem.unit, rest[0]), rest[1:]
        operands = {"masked": masked, "rows": rows, "resident": resident, "tile": tile}
        return add_gradients(self.problem, totals, tiles, **operands, streamed_arrays=rest)


def _gradients(problem: GPUProblem, *call: Any) -> list[Array]:
    """Computes gradients as `mosaic_call.GradientKernels.run`."""
    shapes, by_key, size = problem.shapes, problem.by_key, problem.streamed
    groups = problem.groups

    def run(program: _HopperGradients, results: Ref, scratch: Ref) -> None:
        memory = WarpgroupMemory(*scratch)
        compute = functools.partial(program.compute, memory, results)
        by_group(groups, functools.partial(program.copy, memory), compute)

    tiles = functools.partial(tiles_in_memory, width=shapes.H, dtype=shapes.dtype, least=size)
    resident = [tiles(groups, ROWS) for _ in range(2)]
    rows = [mosaic().SMEM((_AHEAD, 3 * size), jnp.float32)] if by_key else []
    stream = *[tiles(_AHEAD, size)] * 2, *rows, *problem.streamed_scratch(_AHEAD)
    scratch = WarpgroupMemory.scratch(groups, tuple(resident), stream)
    name = "jattn_hopper_d_keys" if by_key else "jattn_hopper_d_queries"
    block = size if by_key else ROWS
    call = problem, *call
    return backward.launched(name, _HopperGradients, call, block, run, scratch, groups + 1)


def _tiling(spec: Spec, shapes: Shapes) -> Tiling:
    """Two tiles fit shared memory (227 KiB), and one the registers of a warpgroup."""
    drops = spec.dropout_rate > 0
    # Beside another mask, keys are compared with both ends of a window.
    windowed = _has(spec.mask, masks.Window) and not isinstance(spec.mask, masks.Window)
    many = drops or _needs_many(spec) or windowed
    scarce = many if few() else drops and _is_long(spec)
    widest = 0 if scarce else 128  # head size that has long tiles
    width = max(shapes.H, shapes.V)
    return Tiling(_rows(width), 128 if width <= widest else 64)


def _has(tree: Tree, *kinds: type) -> bool:
    """Returns whether a mask or score function contains an instance of these classes."""
    nodes = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kinds))
    return any(isinstance(x, kinds) for x in nodes)


def _rows(width: int) -> int:
    """The number of rows of a program: those of two computing warpgroups. If registers cannot be
    moved, wide heads need more than these and a copying one have, and one computes."""
    return ROWS if few() and width > 128 else 2 * ROWS


_FORWARD = mosaic_call.ForwardKernel(tiling=_tiling, products=Products.WARPGROUP, run=_forward)


def _streamed(spec: Spec, width: int) -> tuple[int, int]:
    reads = spec.score is not None or (few() and _has(spec.mask, masks.Dense))
    many = _needs_many(spec) if few() else _is_long(spec) or width > 128
    scarce = many or (reads and spec.dropout_rate > 0)
    return (32, 32) if scarce else (64, 64)


def _needs_many(spec: Spec) -> bool:
    """Returns whether a tile's scores need more registers than products leave them.

    Products leave enough for a mask or function of few operations that reads no array along T or S,
    without dropout.
    """
    formulas = masks.Predicate, masks.Dilated, masks.Global, scores.Score  # perhaps long ones
    arrays = any(jnp.ndim(x) > 1 for x in jax.tree.leaves(spec.score))
    return _has((spec.mask, spec.score), *formulas) or arrays


def _is_long(spec: Spec) -> bool:
    """Returns whether a tile's scores and their derivative need more registers than gradients of
    keys and of values leave.

    These are a chain of more than two functions, T5's bias by positions, and a user's function
    whose derivative depends on the score.
    """
    chain = scores.in_order(spec.score)
    by_positions = not hoisted.positions_are_places(spec)
    functions = [x for x in chain if isinstance(x, scores.Score)]
    return (
        len(chain) > 2
        or (by_positions and any(isinstance(x, scores.RelativeBias) for x in chain))
        or any(hoisted.depends_on_score(jax.grad(x._scalar)) for x in functions)
    )


def functions(platform: str) -> AttentionVJP:
    """Returns the forward and backward functions; they are interpreted on a CPU."""
    gradients = mosaic_call.GradientKernels(
        rows=_rows,
        streamed=_streamed,
        products=Products.WARPGROUP,
        run=_gradients,
        widest_together=64 if few() else 128,
    )
    return mosaic_call.functions(_FORWARD, gradients, platform)


READER = Reader(
    functools.partial(gpu_decode.unreadable, _FORWARD),
    functools.partial(gpu_decode.attend, _FORWARD),
)
KERNEL = Kernel(supports, functions, reader=READER)
