"""Attention on Blackwell GPUs for any mask, by fifth-generation tensor cores and tensor memory.

The forward pass has the form of FlashAttention-4 (Zadouri et al. 2026) and of CUTLASS's attention
for Blackwell, in Pallas's Mosaic GPU. One warpgroup of a program has a warp that copies tiles of
keys and values to shared memory, and a warp that starts products. Two others keep 128 queries each.
Scores are loaded from tensor memory to registers, a row for each thread, so that no thread needs
another one for a row's maximum and sum. Weights are written in their place, and the weighted sum
stays in tensor memory. The tensor cores multiply for one warpgroup while the other computes its
softmax (FlashAttention-3, Shah et al. 2024). As in FlashAttention-4 the sum is rescaled only if a
maximum has increased by much: until then it stays relative to the previous maximum.

Two parts of FlashAttention-4 are missing: powers of two by products, and pairs of multiprocessors.

Index arrays say which tiles are visited and which need no mask, see `block_mask`; the scores of a
tile come from `jattn.tile`, through `mosaic_interpreter`. The gradients are `blackwell_gradients`.
The kernels are compiled for such GPUs and interpreted on a CPU, but have not yet run on one.
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

from jattn._types import Index, Ref, Tree
from jattn.call import Call
from jattn.kernels.common import block_mask
from jattn.kernels.common.vjp import AttentionVJP
from jattn.kernels.gpu.mosaic.kernels import ampere, blackwell_gradients, mosaic_call
from jattn.kernels.gpu.mosaic.kernels.launch import Order, forward_results, joined, launch
from jattn.kernels.gpu.mosaic.machine import device, tensor_memory
from jattn.kernels.gpu.mosaic.machine.registers import TENSOR_ROWS, Products
from jattn.kernels.gpu.mosaic.machine.streams import Stream
from jattn.kernels.gpu.mosaic.machine.versions import mosaic
from jattn.kernels.gpu.mosaic.machine.warpgroups import hidden, store, tiles_in_memory
from jattn.kernels.gpu.mosaic.tile import mosaic_interpreter
from jattn.kernels.gpu.mosaic.tile.online_softmax import LOWEST, finish_factor, online_softmax_step
from jattn.kernels.gpu.mosaic.tile.problem import GPUProblem, RegisterTile
from jattn.kernels.gpu.mosaic.tile.spec_refs import TileIndex
from jattn.kernels.protocol import Kernel
from jattn.spec import Shapes, Spec, Tiling


CAPABILITY = 10  # before the point: others have no such matrix units
_CHUNK = 64  # columns of the weighted sum that are in registers at a time


def supports(call: Call) -> str | None:
    """Returns why the kernel cannot compute a call; None if it can."""
    reason = device.unfit(lambda x: x[0] == CAPABILITY, f"{CAPABILITY}.x") or ampere.old()
    return reason or mosaic_call.unsupported(_FORWARD, call)


class _ForwardMemory(NamedTuple):
    """The memory of a program with some groups of 128 queries.

    In shared memory: `queries`, through which the output also passes, and `numbers` of each row;
    streamed tiles of `keys` and `values`, and the spec's `arrays` for keys. In tensor memory, for
    each group: `scores`, in whose place are `weights`, and `sums`.

    Barriers of each group: its queries are `loaded`; the tensor cores have `scored` a tile, `added`
    weighted values, and are `done` with all; the group has `weighed` the scores of a tile.
    """

    queries: Ref
    numbers: tuple[Any, ...]
    keys: Stream
    values: Stream
    arrays: tuple[Stream, ...]
    tile: Ref
    sums: Ref
    loaded: Ref
    scored: Ref
    weighed: Ref
    added: Ref
    done: Ref

    @classmethod
    def scratch(cls, problem: GPUProblem) -> "_ForwardMemory":
        shapes, columns, unit = problem.shapes, problem.tiling.block_kv, problem.unit
        groups, ahead = problem.groups, 2 if shapes.H > 64 else 4
        tensors = functools.partial(tensor_memory.scratch, unit)
        barrier = functools.partial(tensor_memory.barrier, unit)
        tiles = tiles_in_memory(ahead, columns, shapes.H, shapes.dtype)
        arrays = problem.streamed_scratch(ahead)
        used = mosaic().Barrier(num_barriers=ahead, num_arrivals=groups)
        # Weights take half the columns of scores, and begin where these do.
        scores, weights = tensors(groups * columns), tensors(2 * groups * columns, shapes.dtype)
        return cls(
            queries=tiles_in_memory(groups, TENSOR_ROWS, shapes.H, shapes.dtype),
            numbers=(mosaic().SMEM((groups, TENSOR_ROWS), "float32"),) * 3,
            keys=Stream.ring(tiles, free=barrier(ahead, groups)),
            values=Stream.ring(tiles, free=barrier(ahead, groups)),
            arrays=(Stream.ring(*arrays, free=used),) if arrays else (),
            tile=tensor_memory.alternatives(unit, scores, weights),
            sums=tensors(groups * shapes.V),
            loaded=mosaic().Barrier(num_barriers=groups),
            scored=barrier(groups),
            weighed=barrier(groups),
            added=barrier(groups),
            done=barrier(groups),
        )

    def scores_of(self, group: Index, columns: int) -> Ref:
        return self.tile[0].at[:, pl.ds(group * columns, columns)]

    def weights_of(self, group: Index, columns: int) -> Ref:
        return self.tile[1].at[:, pl.ds(group * 2 * columns, columns)]

    def sum_of(self, group: Index, start: int, size: int) -> Ref:
        width = self.sums.shape[1] // self.queries.shape[0]
        return self.sums.at[:, pl.ds(group * width + start, size)]


class _ForwardProgram(NamedTuple):
    """A program for some groups of 128 queries of a head, or for each of them and each part of the
    keys (Dao et al. 2023, "Flash-Decoding"). `read_item()` reads (part, b, h, i) where it is used:
    no role keeps it for another."""

    problem: GPUProblem
    visits: block_mask.BlockMask
    memory: _ForwardMemory
    read_item: Callable[[], Any]
    parts: int
    operands: Tree
    results: Ref

    def run(self) -> None:
        roles = self.copy, self.multiply, self.compute
        tensor_memory.by_role(self.problem.unit, self.problem.groups, *roles)

    def fold(self, visit: Any, state: Any) -> Any:
        (part, *block), visits_ref = self.read_item(), self.operands[-1]
        return self.visits.fold(visits_ref, tuple(block), visit, state, part=(part, self.parts))

    def first_row(self, group: Index) -> Array:
        """The first query of a group."""
        return self.read_item()[3] * self.problem.tiling.block_q + group * TENSOR_ROWS

    def copy(self) -> None:
        """Copies queries, and the tiles of keys and values, in one warp."""
        (query, key, value, leaves, _), memory = self.operands, self.memory
        _, b, h, _ = self.read_item()
        kv, columns = lax.div(h, np.int32(self.problem.shapes.G)), self.problem.tiling.block_kv
        for group in range(self.problem.groups):
            part = query.at[b, pl.ds(self.first_row(group), TENSOR_ROWS), h]
            mosaic().copy_gmem_to_smem(part, memory.queries.at[group], memory.loaded.at[group])

        def visit(j: Array, masked: bool, turn: Array) -> Array:
            run = pl.ds(j * columns, columns)
            memory.keys.fill(turn, key.at[b, run, kv])
            parts = self.problem.streamed_parts(leaves, TileIndex(b, h, 0, j * columns))
            for ring in memory.arrays:
                ring.fill(turn, *parts)
            memory.values.fill(turn, value.at[b, run, kv])
            return turn + 1

        turns = self.fold(visit, jnp.int32(0))
        for ring in (memory.keys, memory.values, *memory.arrays):
            ring.drain(turns)

    def multiply(self) -> None:
        """Starts all products, in one warp. Those of one group are computed while the other group
        computes weights."""
        memory, groups, unit = self.memory, range(self.problem.groups), self.problem.unit
        for group in groups:
            mosaic().barrier_wait(memory.loaded.at[group])

        def visit(j: Array, masked: bool, turn: Array) -> Array:
            for group in groups:

                @pl.when(turn > 0)
                def _(group: int = group) -> None:
                    self.add(group, turn - 1)
                    # Scores will be written in the place of weights.
                    tensor_memory.commit(unit, memory.added.at[hidden(group, turn)])
                    mosaic().barrier_wait(memory.added.at[group])

                self.score(group, turn)
            return turn + 1

        turns = self.fold(visit, jnp.int32(0))
        for group in groups:
            pl.when(turns > 0)(functools.partial(self.add, group, turns - 1))
            tensor_memory.commit(unit, memory.done.at[hidden(group, turns)])

    def score(self, group: int, turn: Array) -> None:
        """Starts the products of a group's queries and the keys of a turn."""
        memory, unit = self.memory, self.problem.unit
        if group == 0:
            memory.keys.wait(turn)
        (keys,) = memory.keys.of_turn(turn)
        scores = memory.scores_of(group, self.problem.tiling.block_kv)
        tensor_memory.multiply(unit, scores, memory.queries.at[group], keys, transposed=True)
        scored = memory.scored.at[hidden(group, turn)]
        tensor_memory.commit(unit, memory.keys.freed(turn), scored)

    def add(self, group: int, turn: Array) -> None:
        """Starts to add the weighted values of a turn."""
        memory, unit = self.memory, self.problem.unit
        mosaic().barrier_wait(memory.weighed.at[group])
        if group == 0:
            memory.values.wait(turn)
        (values,) = memory.values.of_turn(turn)
        weights = memory.weights_of(group, self.problem.tiling.block_kv)
        total = memory.sum_of(group, 0, self.problem.shapes.V)
        tensor_memory.multiply(unit, total, weights, values)
        tensor_memory.commit(unit, memory.values.freed(turn))

    def compute(self, group: Index) -> None:
        """Computes the weights and results of a group, in a warpgroup."""
        (*_, leaves, _), memory, unit = self.operands, self.memory, self.problem.unit
        (_, b, h, _), columns = self.read_item(), self.problem.tiling.block_kv
        row, constants = self.first_row(group), self.problem.constants(leaves, b, h)
        # A single group has registers for what rows determine; dropout's hashes take long.
        scarce = self.problem.groups > 1 and not self.problem.drops
        zeros = unit.zeros(TENSOR_ROWS, _CHUNK)
        for start in range(0, self.problem.shapes.V, _CHUNK):
            tensor_memory.store(unit, memory.sum_of(group, start, _CHUNK), zeros)
        tensor_memory.wait_for_stores(unit)

        def visit(j: Array, masked: bool, state: tuple[Array, ...]) -> tuple[Array, ...]:
            turn, *sums = state
            number = hidden(group, turn)
            first = hidden(row, turn) if masked and scarce else row
            tile = self.problem.tile(leaves, TileIndex(b, h, first, j * columns), constants)
            mosaic().barrier_wait(memory.scored.at[number])
            products = tensor_memory.load_by_parts(unit, memory.scores_of(number, columns))
            tensor_memory.wait_for_loads(unit)
            for ring in memory.arrays:
                tile = ring.use(turn, tile.completed)
            sums = self.weigh(number, masked, tile, products, *sums)
            tensor_memory.wait_for_stores(unit)
            mosaic().barrier_arrive(memory.weighed.at[number])
            return turn + 1, *sums

        total = jnp.zeros(TENSOR_ROWS, jnp.float32)
        shift = jnp.full(TENSOR_ROWS, LOWEST, jnp.float32)
        state = jnp.int32(0), unit.to_layout(shift, "t"), unit.to_layout(total, "t")
        _, shift, total = self.fold(visit, state)
        mosaic().barrier_wait(memory.done.at[group])
        self.write_results(group, row, shift, total)

    def weigh(
        self, group: Array, masked: bool, tile: RegisterTile, products: Array, *sums: Array
    ) -> tuple[Array, Array]:
        """Writes a tile's weights in the place of its scores; returns the new shift and total."""
        unit, problem = self.problem.unit, self.problem
        new = online_softmax_step(problem, masked, tile, products, *sums)
        place = self.memory.weights_of(group, problem.tiling.block_kv)
        tensor_memory.store_by_parts(unit, place, new.weights.astype(problem.shapes.dtype))
        pl.when(new.rescales)(functools.partial(self.rescale, group, new.factor))
        return new.shift, new.total

    def rescale(self, group: Array, factor: Array) -> None:
        """Multiplies the rows of a group's weighted sum by factors."""
        unit = self.problem.unit
        for start in range(0, self.problem.shapes.V, _CHUNK):
            part = self.memory.sum_of(group, start, _CHUNK)
            chunk = tensor_memory.load(unit, part)
            tensor_memory.wait_for_loads(unit)
            tensor_memory.store(unit, part, chunk * unit.spread(factor, _CHUNK))

    def write_results(self, group: Index, row: Array, shift: Array, total: Array) -> None:
        """Writes output and normalizer of a group, whose first query is `row`; the output of a part
        of the keys in float32."""
        (part, b, h, _), memory = self.read_item(), self.memory
        finish = functools.partial(finish_factor, self.problem.factors)
        factor, normalizer = mosaic_interpreter.run(finish, shift, total)
        numbers = [place.at[group] for place in memory.numbers]
        for place, x in zip(numbers, (factor, *normalizer), strict=True):
            place[...] = x
        rows = pl.ds(row, TENSOR_ROWS)
        queries, result = memory.queries.at[group], self.results[0].at[part, b, rows, h]
        is_part = result.dtype != queries.dtype
        for start in range(0, self.problem.shapes.V, _CHUNK):
            place = (result if is_part else queries).at[:, pl.ds(start, _CHUNK)]
            place[...] = self.output(group, start, numbers[0]).astype(place.dtype)
        pairs = zip(numbers[1:], self.results[1:], strict=True)
        along = [(x, y.at[part, b, h, rows]) for x, y in pairs]
        store(along if is_part else [(queries, result), *along])

    def output(self, group: Index, start: int, factor: Ref) -> Array:
        """Columns of the normalized sum, in a layout without bank conflicts in shared memory."""
        unit, total = self.problem.unit, self.memory.sum_of(group, start, _CHUNK)
        if unit.interpreted:
            return tensor_memory.load(unit, total) * factor[...][:, None]
        layout = mosaic().Layout.TCGEN05
        out = tensor_memory.load(unit, total, layout)
        factor = mosaic().load(factor, layout=layout.reduce(1))
        return out * mosaic().layout_cast(lax.broadcast_in_dim(factor, out.shape, (0,)), layout)


def _forward(problem: GPUProblem, spec: Spec, query: Array, key: Array, value: Array) -> Tree:
    """Computes output `[B, T, N, V]` and normalizer `[B, T, N]`."""
    visits, parts, unit = problem.visits(spec), problem.parts(), problem.unit

    def kernel(read_item: Callable[..., Any], operands: Ref, results: Ref, memory: Ref) -> None:
        _ForwardProgram(problem, visits, memory, read_item, parts, operands, results).run()

    operands = query, key, value, problem.refs.arrays, visits.arrays
    results, scratch = forward_results(problem.shapes, parts), _ForwardMemory.scratch(problem)
    order = Order.of(problem, visits, problem.shapes.N, parts)
    rest = operands, results, scratch, tensor_memory.warpgroups(unit, problem.groups)
    return joined(*launch("jattn_blackwell_forward", problem, order, kernel, *rest))


def _tiling(spec: Spec, shapes: Shapes) -> Tiling:
    """Chooses the tiles that fit tensor memory and registers.

    Scores and sums of two groups fill tensor memory, which has 512 columns, for heads of 128.
    Registers hold long tiles that read no arrays, but not the tiles of two groups with both dropout
    and score functions.
    """
    wide = max(shapes.H, shapes.V) > 128
    both = spec.score is not None and spec.dropout_rate > 0
    groups = 1 if wide or both or shapes.T <= TENSOR_ROWS else 2
    rules = spec.mask, spec.score, spec.q_positions, spec.kv_positions
    arrays = any(jnp.ndim(x) > 1 for x in jax.tree.leaves(rules))
    short = wide or arrays or spec.dropout_rate > 0
    return Tiling(groups * TENSOR_ROWS, 64 if short else 128)


_FORWARD = mosaic_call.ForwardKernel(_tiling, Products.TENSOR_MEMORY, _forward)


def functions(platform: str) -> AttentionVJP:
    """Returns the forward and backward functions; they are interpreted on a CPU."""
    ampere.check_version("blackwell", platform)
    return mosaic_call.functions(_FORWARD, blackwell_gradients.BACKWARD, platform)


KERNEL = Kernel(supports, functions, reader=ampere.READER)  # reading is all that counts
