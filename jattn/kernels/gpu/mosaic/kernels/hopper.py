"""Attention on Hopper GPUs for most masks, by asynchronous copies and tensor cores (wgmma).

FlashAttention-3 (Shah et al. 2024) in Pallas's Mosaic GPU, modelled on Pallas's documentation and
`jax.experimental.pallas.ops.gpu.attention_mgpu`. A program usually has three warpgroups. One
streams tiles of keys or queries into rings of `_BUFFERS` buffers in shared memory. The other two
compute, each for 64 queries or keys. In the forward pass they alternate: the tensor cores compute
the products of one while the other computes its softmax. Barriers synchronize the two, and signal
when a buffer is filled and when it is free again. A program numbers its streamed tiles 0, 1, 2 and
so on; each uses the buffer `tile_number % _BUFFERS`.

If blocks of queries visit different numbers of tiles, as with a causal mask, and registers suffice,
programs are persistent: one starts for each multiprocessor, and computes several blocks of
queries. The keys of the next block are copied while the last tiles of the current one are computed.

Index arrays tell which tiles to visit, and which of them need no mask, see `block_mask`. The
functions of `jattn.tile` compute the scores of a tile; `mosaic_interpreter` translates them to
operations on registers. On a CPU, Pallas's own interpreter runs the same kernels.
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
from jattn.kernels.gpu.mosaic.machine.versions import has_few_registers, mosaic
from jattn.kernels.gpu.mosaic.machine.warpgroups import (
    WarpgroupMemory,
    by_group,
    hidden,
    store,
    tiles_in_memory,
)
from jattn.kernels.gpu.mosaic.tile import hoisted, mosaic_interpreter
from jattn.kernels.gpu.mosaic.tile.gradients import RowStatistics, add_gradients, finished
from jattn.kernels.gpu.mosaic.tile.online_softmax import finish, initial, online
from jattn.kernels.gpu.mosaic.tile.problem import GPUProblem, RegisterTile
from jattn.kernels.gpu.mosaic.tile.spec_refs import TileIndex
from jattn.kernels.protocol import Kernel, Reader
from jattn.spec import Shapes, Spec, Tiling


CAPABILITY = (9, 0)  # GPUs of other compute capabilities have no wgmma
_BUFFERS = 2  # in shared memory, for streamed tiles

# CUDA 12.8.0 to 12.9.0 miscompiles masks: JAX's `attention_mgpu` refuses causal masks there. The
# runtime version is the same for CUDA 12.9.0 and 12.9.1, so the compilers' versions decide.
_MISCOMPILING_RUNTIMES = range(12080, 12100)
_FIRST_CORRECT_COMPILER = (12, 9, 86)

# The packages of these compilers: JAX before 0.11 uses the first, later versions the second.
_COMPILERS = "nvidia-cuda-nvcc-cu12", "nvidia-nvjitlink-cu12"


def supports(call: Call) -> str | None:
    """Returns why the kernel cannot compute a call; None if it can."""
    reason = device.unfit(lambda x: x == CAPABILITY, "9.0") or _miscompiled()
    return reason or mosaic_call.unsupported(_FORWARD, call)


def _miscompiled() -> str | None:
    """Returns an error message if the installed CUDA miscompiles masks, else None."""
    if device.device() is None or _cuda_version() not in _MISCOMPILING_RUNTIMES:
        return None
    versions = _compilers()
    if versions and min(versions.values()) >= _FIRST_CORRECT_COMPILER:
        return None
    installed = [f"{name} {'.'.join(map(str, version))}" for name, version in versions.items()]
    return (
        "CUDA 12.8.0 to 12.9.0 miscompiles masks; expected the compilers of CUDA 12.9.1 or later, "
        f"packages {' and '.join(_COMPILERS)} 12.9.86 or later, "
        f"got {' and '.join(installed) or 'neither'}"
    )


def _cuda_version() -> int:
    """Returns the version of the CUDA runtime as CUDA encodes it (12090 for 12.9.0 and 12.9.1), or
    0 if JAX has no CUDA runtime."""
    versions = importlib.import_module("jax._src.lib").cuda_versions
    return versions.cuda_runtime_get_version() if versions else 0


def _compilers() -> dict[str, tuple[int, ...]]:
    """Returns the versions of CUDA's compilers that are installed as Python packages."""
    versions = {}
    for name in _COMPILERS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = tuple(map(int, importlib.metadata.version(name).split(".")[:3]))
    return versions


class _HopperForward(NamedTuple):
    """A program of the forward pass. It computes one work item, or several one after another.

    A work item (part, b, h, i) is query block i of head (b, h), with one of `parts` equal parts of
    the key tiles that the block visits.

    `fold_items(function, state)` folds `function(read_item, state)` over the program's work items,
    and `read_item(n)` reads the (part, b, h, i) of the current work item. The argument n does not
    affect the result. It is there for the compiler: if n is a number that the compiler does not
    know, such as a tile's number, the compiler cannot move the read to an earlier point of the
    program. `leaves` are the spec's arrays, and `visits_ref` the arrays of `visits`, in global
    memory.
    """

    problem: GPUProblem
    visits: block_mask.BlockMask
    parts: int
    fold_items: Callable[[Any, Any], Any]
    memory: WarpgroupMemory
    query: Ref
    key: Ref
    value: Ref
    leaves: list[Any]
    visits_ref: Tree
    results: Ref

    def fold(self, item: tuple[Any, ...], visit: Callable[..., Any], state: Tree) -> Tree:
        """Folds `visit(j, masked, state)` over the key tiles j that a work item visits."""
        part, *block = item
        return self.visits.fold(self.visits_ref, tuple(block), visit, state, (part, self.parts))

    def copy(self) -> None:
        """Copies the tiles of keys and values of all work items, and waits until they are used. The
        copying warpgroup runs this."""
        self.memory.drain(self.fold_items(self.copy_tiles, jnp.int32(0)))

    def copy_tiles(self, read_item: Callable[..., Any], tile_number: Array) -> Array:
        """Copies the tiles of one work item, numbered from `tile_number` on. Returns the number of
        the next tile."""
        rows, columns = self.problem.tiling
        part, b, h, i = read_item(0)
        kv = lax.div(h, np.int32(self.problem.shapes.G))

        def visit(j: Array, masked: bool, tile_number: Array) -> Array:
            keys = pl.ds(j * columns, columns)
            index = TileIndex(b, h, i * rows, j * columns)
            spec_parts = self.problem.streamed_parts(self.leaves, index)
            self.memory.streams[0].fill(tile_number, self.key.at[b, keys, kv], *spec_parts)
            self.memory.streams[1].fill(tile_number, self.value.at[b, keys, kv])
            return tile_number + 1

        return self.fold((part, b, h, i), visit, tile_number)

    def compute(self, group: Array) -> None:
        """Computes 64 queries of each work item. The computing warpgroup `group` runs this."""
        self.fold_items(functools.partial(self.attend, group), jnp.int32(0))

    def attend(self, group: Array, read_item: Callable[..., Any], tile_number: Array) -> Array:
        """Computes the queries of this warpgroup in one work item, whose tiles are numbered from
        `tile_number` on. Returns the number of the next tile."""
        problem, memory = self.problem, self.memory
        rows, columns = problem.tiling
        part, b, h, i = read_item(0)
        memory.load(0, group, self.query.at[b, pl.ds(i * rows + group * ROWS, ROWS), h])
        constants = problem.constants(self.leaves, b, h)

        def visit(j: Array, masked: bool, state: Tree) -> Tree:
            tile_number, sums = state
            # `hidden_group` equals `group`, but the compiler does not know that. So it computes
            # addresses anew for each tile instead of keeping them in registers.
            needs_most = _needs_most_registers(problem, masked)
            hidden_group = hidden(group, tile_number) if needs_most else group
            # Read again for each tile, because keeping these numbers would take registers.
            _, b, h, i = read_item(tile_number)
            index = TileIndex(b, h, i * rows + hidden_group * ROWS, j * columns)
            read = functools.partial(problem.tile, self.leaves, index, constants)
            return tile_number + 1, self.add_tile(hidden_group, masked, read, tile_number, sums)

        # Warpgroup 1 starts, and ends, half a step after warpgroup 0, so that they alternate.
        pl.when(group == 1)(memory.alternate_warpgroups)
        state = tile_number, initial(problem.unit, ROWS, problem.shapes.V)
        tile_number, sums = self.fold((part, b, h, i), visit, state)
        pl.when(group == 0)(memory.alternate_warpgroups)
        part, b, h, i = read_item(tile_number)
        block = part, b, h, pl.ds(i * rows + group * ROWS, ROWS)
        self.write_results(group, sums, block)
        return tile_number

    def add_tile(
        self,
        group: Array,
        masked: bool,
        read: Callable[[], RegisterTile],
        tile_number: Array,
        sums: softmax.Partial,
    ) -> softmax.Partial:
        """Returns the sums with one more tile.

        `read` loads the tile's slices of the spec's arrays into registers, except the streamed
        ones, and returns the tile.
        """
        problem, memory, unit = self.problem, self.memory, self.problem.unit
        # A masked tile takes many registers, so it is read only after the products.
        early_tile = None if masked else read()

        def multiply_keys(k: Ref, *streamed: Ref) -> Tree:
            pairs, alternate = [(memory.resident[0].at[group], k)], memory.alternate_warpgroups
            (products,) = matrix_units.multiply(unit, pairs, transposed=True, on_started=alternate)
            return products, (early_tile or read()).completed(*streamed)

        products, tile = memory.streams[0].use(tile_number, multiply_keys)
        weights, sums = online(problem, masked, tile, products, sums)
        weights = weights.astype(problem.shapes.dtype)
        memory.alternate_warpgroups()  # now the other warpgroup computes its softmax

        def add_values(v: Ref) -> list[Array]:
            return matrix_units.multiply(unit, [(weights, v)], onto=[sums.weighted])

        (weighted,) = memory.streams[1].use(tile_number, add_values)
        return sums._replace(weighted=weighted)

    def write_results(self, group: Array, sums: softmax.Partial, block: Tree) -> None:
        """Writes the output and the normalizer of a warpgroup's queries to global memory.

        Both pass through the warpgroup's resident arrays in shared memory. If the keys are split
        into parts, the output is float32 and does not fit there: it is written directly.
        """
        part, b, h, rows = block
        queries, *resident = (x.at[group] for x in self.memory.resident)
        finished_sums = functools.partial(finish, self.problem.factors)
        out, normalizer = mosaic_interpreter.run(finished_sums, sums)
        result = self.results[0].at[part, b, rows, h]
        is_part = result.dtype != queries.dtype
        target = result if is_part else queries  # the queries are no longer needed
        target[...] = out.astype(target.dtype)
        copies = [] if is_part else [(queries, result)]
        for array, x, x_result in zip(resident, normalizer, self.results[1:], strict=True):
            array[...] = x
            copies.append((array, x_result.at[part, b, h, rows]))
        store(copies)


def _forward(problem: GPUProblem, spec: Spec, query: Array, key: Array, value: Array) -> Tree:
    """Computes output `[B, T, N, V]` and normalizer `[B, T, N]`.

    There is a work item for each block of 128 or 64 queries and each part of its keys (Dao et al.
    2023, "Flash-Decoding").
    """
    shapes, visits, parts = problem.shapes, problem.visits(spec), problem.parts()

    def kernel(fold_items: Callable[..., Any], operands: Ref, results: Ref, memory: Ref) -> None:
        program = _HopperForward(
            problem, visits, parts, fold_items, memory, *operands, results=results
        )
        by_group(problem.groups, program.copy, program.compute)

    operands = query, key, value, problem.refs.arrays, visits.arrays
    # In shared memory: for each computing warpgroup its queries (later their output) and the two
    # numbers of the normalizer of each query; and streams of keys and of values.
    groups, columns = problem.groups, problem.tiling.block_kv
    queries = tiles_in_memory(groups, ROWS, shapes.H, shapes.dtype)
    resident = queries, *[mosaic().SMEM((groups, ROWS), jnp.float32)] * 2
    tiles = tiles_in_memory(_BUFFERS, columns, shapes.H, shapes.dtype)
    streams = (tiles, *problem.streamed_scratch(_BUFFERS)), (tiles,)
    scratch = WarpgroupMemory.scratch(groups, resident, *streams)
    order, name = Order.of(problem, visits, shapes.N, parts), "jattn_hopper_forward"
    # With a score function, dropout or a list of key tiles to visit (`visits.order`), too few
    # registers are left for several work items.
    is_persistent = spec.score is None and not spec.dropout_rate and visits.order is None
    rounds = order.rounds(device.multiprocessors()) if is_persistent else None
    rest = operands, forward_results(shapes, parts), scratch, groups + 1
    return joined(*launch_in_rounds(name, problem, order, rounds, kernel, *rest))


def _needs_most_registers(problem: GPUProblem, masked: bool) -> bool:
    """Returns whether a tile needs nearly all registers: if it is masked, if score functions
    compute exponentials or the like, if masks or score functions read a different part of an array
    for each tile, or if heads are wide."""
    return masked or problem.special or bool(problem.refs.varying) or problem.shapes.H > 128


class _HopperGradients(backward.GradientProgram):
    """A gradient program in which each computing warpgroup keeps 64 queries or, with `by_key`, 64
    keys."""

    def run(self) -> None:
        by_group(self.problem.groups, self.copy, self.compute)

    def copy(self) -> None:
        """Copies all streamed tiles, in the copying warpgroup."""
        b, _, i = self.place

        def visit(h: Array, block: Array, masked: bool, tile_number: Array) -> Array:
            first_kept = i * self.problem.groups * ROWS
            index = self.tile_index(h, first_kept, block * self.problem.streamed)
            statistics = [self.statistics.at[b, h, block]] if self.problem.by_key else []
            spec_parts = self.problem.streamed_parts(self.leaves, index)
            tiles = self.tiles(h, block)
            self.memory.streams[0].fill(tile_number, *tiles, *statistics, *spec_parts)
            return tile_number + 1

        self.memory.drain(self.fold(visit, jnp.int32(0)))

    def compute(self, group: Array) -> None:
        """Computes the gradients of 64 queries or keys, in a computing warpgroup."""
        problem, memory, (b, kept_head, i) = self.problem, self.memory, self.place
        kept_block = i * problem.groups + group
        start = kept_block * ROWS
        resident_index = self.part(start, ROWS, kept_head)
        resident = [memory.load(n, group, self.resident[n].at[resident_index]) for n in range(2)]
        unit, by_key = problem.unit, problem.by_key
        # With `by_key` the statistics are streamed with the queries, see `add`.
        statistics = self.kept_statistics(unit, b, kept_head, kept_block)

        def visit_head(h: Any) -> Callable[..., Any]:
            constants = problem.constants(self.leaves, b, h)

            def visit(block: Array, masked: bool, state: Tree) -> Tree:
                tile_number, totals = state
                index = self.tile_index(h, start, block * problem.streamed)
                read = functools.partial(problem.tile, self.leaves, index, constants)
                # A masked tile needs more registers, so it is passed as a function and read later.
                tile = read if masked else read()
                needs_most = by_key or _needs_most_registers(problem, masked)
                hidden_group = hidden(group, tile_number) if needs_most else group
                arrays = [array.at[hidden_group] for array in memory.resident]
                add = functools.partial(self.add, tile, masked, statistics, arrays, totals)
                return tile_number + 1, memory.streams[0].use(tile_number, add)

            return visit

        zeros = {x: unit.zeros(ROWS, problem.shapes.H) for x in self.which}
        _, totals = self.fold_heads(visit_head, (jnp.int32(0), zeros))
        gradients = finished(problem, totals, statistics)
        for array, gradient in zip(resident, gradients, strict=False):
            array[...] = gradient.astype(array.dtype)
        store([(x, y.at[resident_index]) for x, y in zip(resident, self.results, strict=False)])

    def add(
        self, tile: Any, masked: bool, statistics: Any, resident: Any, totals: Any, *arrays: Ref
    ) -> dict[int, Array]:
        """Adds a streamed tile to the totals.

        `arrays` are references to shared memory. First come the tile's keys and values or,
        with `by_key`, its queries, d_out and statistics. In both cases its parts of the spec's
        arrays follow.
        """
        tiles, rest = arrays[:2], arrays[2:]
        if statistics is None:
            statistics = functools.partial(RowStatistics.read, self.problem.unit, rest[0])
            rest = rest[1:]
        operands = {"masked": masked, "statistics": statistics, "resident": resident, "tile": tile}
        return add_gradients(self.problem, totals, tiles, **operands, streamed_arrays=rest)


def _gradients(problem: GPUProblem, *inputs: Any) -> list[Array]:
    """Computes gradients, see `mosaic_call.GradientKernels.run`."""
    shapes, by_key, size = problem.shapes, problem.by_key, problem.streamed
    groups, call = problem.groups, (problem, *inputs)
    tiles = functools.partial(tiles_in_memory, width=shapes.H, dtype=shapes.dtype, least=size)
    resident = [tiles(groups, ROWS) for _ in range(2)]
    statistics = [mosaic().SMEM((_BUFFERS, 3 * size), jnp.float32)] if by_key else []
    stream = *[tiles(_BUFFERS, size)] * 2, *statistics, *problem.streamed_scratch(_BUFFERS)
    scratch = WarpgroupMemory.scratch(groups, tuple(resident), stream)
    name = "jattn_hopper_d_keys" if by_key else "jattn_hopper_d_queries"
    statistics_size = size if by_key else ROWS
    return backward.launched(name, _HopperGradients, call, statistics_size, scratch, groups + 1)


def _tiling(spec: Spec, shapes: Shapes) -> Tiling:
    """Returns the number of queries of a block and the number of keys of a tile.

    With these sizes two tiles of keys and two of values fit in shared memory (227 KiB), and the
    scores of one tile in the registers of a warpgroup.
    """
    has_dropout = spec.dropout_rate > 0
    # Windows compare each key with up to two limits; combined with another mask, they need many
    # registers.
    is_window = isinstance(spec.mask, masks.Window)
    has_combined_window = _contains(spec.mask, masks.Window) and not is_window
    needs_many_registers = has_dropout or _scores_need_many_registers(spec) or has_combined_window
    needs_small_tile = (
        needs_many_registers
        if has_few_registers()
        else has_dropout and _derivative_needs_many_registers(spec)
    )
    width = max(shapes.H, shapes.V)
    return Tiling(_rows(width), 128 if width <= 128 and not needs_small_tile else 64)


def _contains(tree: Tree, *kinds: type) -> bool:
    """Returns whether a mask or score function contains an instance of these classes."""
    nodes = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kinds))
    return any(isinstance(x, kinds) for x in nodes)


def _rows(width: int) -> int:
    """Returns the number of queries, or of keys, of a block: 64 for each computing warpgroup.

    A program has a copying warpgroup and usually two computing ones. If the copying one cannot give
    registers to the others (`has_few_registers`), each of the three has a third of all registers.
    That is too few to compute heads wider than 128, so in that case a program has only one
    computing warpgroup.
    """
    return ROWS if has_few_registers() and width > 128 else 2 * ROWS


_FORWARD = mosaic_call.ForwardKernel(tiling=_tiling, products=Products.WARPGROUP, run=_forward)


def _streamed(spec: Spec, width: int) -> tuple[int, int]:
    """Returns the largest sizes of streamed tiles that fit the registers: first the number of keys
    in a tile, for gradients of queries; then the number of queries, for gradients of keys."""
    has_score_or_dense = spec.score is not None or (
        has_few_registers() and _contains(spec.mask, masks.Dense)
    )
    if has_few_registers():
        needs_small_tiles = _scores_need_many_registers(spec)
    else:
        needs_small_tiles = _derivative_needs_many_registers(spec) or width > 128
    needs_small_tiles = needs_small_tiles or (has_score_or_dense and spec.dropout_rate > 0)
    return (32, 32) if needs_small_tiles else (64, 64)


def _scores_need_many_registers(spec: Spec) -> bool:
    """Returns whether the scores of a tile need more registers than its products leave free.

    The free registers suffice if masks and score functions have few operations and score functions
    read no array of several axes. Dropout, which needs registers too, is not considered.
    """
    # Users' functions, and formulas of many operations.
    long_formulas = masks.Predicate, masks.Dilated, masks.Global, scores.Score
    reads_arrays = any(jnp.ndim(x) > 1 for x in jax.tree.leaves(spec.score))
    return _contains((spec.mask, spec.score), *long_formulas) or reads_arrays


def _derivative_needs_many_registers(spec: Spec) -> bool:
    """Returns whether the scores of a tile and their derivative need more registers than the
    gradients of keys and of values leave free.

    More are needed for a chain of more than two score functions, for T5's bias in calls with
    positions, and for a user's function whose derivative depends on the score.
    """
    chain = scores.in_order(spec.score)
    has_positions = not hoisted.positions_are_places(spec)
    user_functions = [x for x in chain if isinstance(x, scores.Score)]
    return (
        len(chain) > 2
        or (has_positions and any(isinstance(x, scores.RelativeBias) for x in chain))
        or any(hoisted.depends_on_score(jax.grad(x._scalar)) for x in user_functions)
    )


def functions(platform: str) -> AttentionVJP:
    """Returns the forward and backward functions; they are interpreted on a CPU."""
    gradients = mosaic_call.GradientKernels(
        rows=_rows,
        streamed=_streamed,
        products=Products.WARPGROUP,
        run=_gradients,
        max_joint_head_size=64 if has_few_registers() else 128,
    )
    return mosaic_call.functions(_FORWARD, gradients, platform)


READER = Reader(
    functools.partial(gpu_decode.unreadable, _FORWARD),
    functools.partial(gpu_decode.attend, _FORWARD),
)
KERNEL = Kernel(supports, functions, reader=READER)
