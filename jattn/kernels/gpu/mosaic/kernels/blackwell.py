"""Attention on Blackwell GPUs for any mask, by their fifth matrix units and tensor memory.

The forward pass has the form of FlashAttention-4 (Zadouri et al. 2026) and of CUTLASS's attention
for Blackwell, in Pallas's Mosaic GPU. Of a program's warpgroups one has a warp that copies tiles of
keys and values to shared memory, and a warp that starts products. Two others hold 128 queries each.
Scores come from tensor memory to registers, a row for each thread, so that no thread needs another
one for a row's maximum and sum. Weights go back in their place, and the weighted sum stays in
tensor memory: the matrix units multiply for one warpgroup while the other is at its softmax
(FlashAttention-3, Shah et al. 2024). As in FlashAttention-4 the sum is only rescaled where a
maximum has moved far: until then all stays relative to the maximum before.

Of FlashAttention-4 two things are missing: powers of two by products, and pairs of multiprocessors.

What is visited, and what needs no mask, comes from index arrays, see `block_mask`; the scores of a
tile from `jattn.tile`, through `mosaic_interpreter`. The gradients are `blackwell_gradients`. The
kernels are compiled for such GPUs and interpreted on a CPU, but have not yet run on one.
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
from jattn.kernels.gpu.mosaic.kernels.launch import Order, forward_results, joined, launch_by_role
from jattn.kernels.gpu.mosaic.machine import device, tensor_memory
from jattn.kernels.gpu.mosaic.machine.registers import TENSOR_ROWS, Products
from jattn.kernels.gpu.mosaic.machine.versions import knows_ampere, mosaic
from jattn.kernels.gpu.mosaic.machine.warpgroups import Ring, store, tiles_in_memory
from jattn.kernels.gpu.mosaic.tile import mosaic_interpreter
from jattn.kernels.gpu.mosaic.tile.online_softmax import finish_apart, nothing, soften
from jattn.kernels.gpu.mosaic.tile.problem import GPUProblem
from jattn.kernels.gpu.mosaic.tile.register_tile import RegisterTile
from jattn.kernels.gpu.mosaic.tile.spec_refs import TileIndex
from jattn.kernels.protocol import Kernel
from jattn.spec import Shapes, Spec, Tiling


CAPABILITY = 10  # before the point: others have no such matrix units
_CHUNK = 64  # columns of the weighted sum that are in registers at a time


def supports(call: Call) -> str | None:
    """None or why not."""
    return _other_machine() or mosaic_call.unsupported(_FORWARD, call)


def _other_machine() -> str | None:
    return device.unfit(lambda x: x[0] == CAPABILITY, f"{CAPABILITY}.x") or ampere.old()


class _Memory(NamedTuple):
    """Of a program with some groups of 128 queries.

    In shared memory: `queries`, where the output leaves too, and numbers of each row, `kept`; tiles
    of `keys` and `values` that come by, and the spec's arrays `beside` keys. In tensor memory, of
    each group beside another: `scores`, an alternative of which are `weights`, and `sums`.

    Barriers of each group: its queries are `loaded`; the matrix units have `scored` a tile, `added`
    weighted values, and are `done` with all; a group has `softened` the scores of a tile.
    """

    queries: Ref
    kept: tuple[Any, ...]
    keys: Ring
    values: Ring
    beside: tuple[Ring, ...]
    tile: Ref
    sums: Ref
    loaded: Ref
    scored: Ref
    softened: Ref
    added: Ref
    done: Ref

    @classmethod
    def scratch(cls, problem: GPUProblem) -> "_Memory":
        shapes, columns, unit = problem.shapes, problem.tiling.block_kv, problem.unit
        groups, ahead = problem.groups, 2 if shapes.H > 64 else 4
        tensors = functools.partial(tensor_memory.scratch, unit)
        barrier = functools.partial(tensor_memory.barrier, unit)
        tiles = tiles_in_memory(ahead, columns, shapes.H, shapes.dtype)
        arrays, rows = (
            problem.streamed_scratch(ahead),
            mosaic().SMEM((groups, TENSOR_ROWS), "float32"),
        )
        used = mosaic().Barrier(num_barriers=ahead, num_arrivals=groups)
        # Weights take half the columns of scores, and begin where these do.
        scores, weights = tensors(groups * columns), tensors(2 * groups * columns, shapes.dtype)
        return cls(
            queries=tiles_in_memory(groups, TENSOR_ROWS, shapes.H, shapes.dtype),
            kept=(rows,) * 3,
            keys=Ring.scratch(tiles, free=barrier(ahead, groups)),
            values=Ring.scratch(tiles, free=barrier(ahead, groups)),
            beside=(Ring.scratch(*arrays, free=used),) if arrays else (),
            tile=tensor_memory.alternatives(unit, scores, weights),
            sums=tensors(groups * shapes.V),
            loaded=mosaic().Barrier(num_barriers=groups),
            scored=barrier(groups),
            softened=barrier(groups),
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


def _hidden(number: Index, turn: Array) -> Array:
    """The number of a group, or of its first row. The compiler does not know that it is the same in
    each turn: what follows from it is computed where it is used, and takes up no registers. Where
    matrix units arrive at a barrier whose address is known, ptxas even keeps that of all shared
    memory, and spills it."""
    return number + lax.shift_right_logical(turn, np.int32(30))


class _Program(NamedTuple):
    """A program for some groups of 128 queries of a head, or for each of them and each part of the
    keys (Dao et al. 2023, "Flash-Decoding")."""

    problem: GPUProblem
    visits: block_mask.BlockMask
    memory: _Memory
    place: Any  # reads part, b, h, i
    parts: int
    operands: Tree

    @property
    def at(self) -> Any:
        """Read where they are used: no role keeps them for another."""
        return self.place()

    def fold(self, step: Any, state: Any) -> Any:
        (part, *at), visits_ref = self.at, self.operands[-1]
        return self.visits.fold(visits_ref, tuple(at), step, state, part=(part, self.parts))

    def rows(self, group: Index) -> Array:
        """Where the queries of a group start."""
        return self.at[3] * self.problem.tiling.block_q + group * TENSOR_ROWS

    def copy(self) -> None:
        """What the warp does that only copies."""
        (query, key, value, leaves, _), memory = self.operands, self.memory
        _, b, h, _ = self.at
        kv, columns = lax.div(h, np.int32(self.problem.shapes.G)), self.problem.tiling.block_kv
        for group in range(self.problem.groups):
            own = query.at[b, pl.ds(self.rows(group), TENSOR_ROWS), h]
            mosaic().copy_gmem_to_smem(own, memory.queries.at[group], memory.loaded.at[group])

        def step(j: Array, masked: bool, turn: Array) -> Array:
            run = pl.ds(j * columns, columns)
            memory.keys.fill(turn, key.at[b, run, kv])
            parts = self.problem.streamed_parts(leaves, TileIndex(b, h, 0, j * columns))
            for ring in memory.beside:
                ring.fill(turn, *parts)
            memory.values.fill(turn, value.at[b, run, kv])
            return turn + 1

        turns = self.fold(step, jnp.int32(0))
        for ring in (memory.keys, memory.values, *memory.beside):
            ring.drain(turns)

    def multiply(self) -> None:
        """What the warp does that starts products. Those of one group are under way while the
        other one's weights are computed."""
        memory, groups, unit = self.memory, range(self.problem.groups), self.problem.unit
        for group in groups:
            mosaic().barrier_wait(memory.loaded.at[group])

        def step(j: Array, masked: bool, turn: Array) -> Array:
            for group in groups:

                @pl.when(turn > 0)
                def _(group: int = group) -> None:
                    self.add(group, turn - 1)
                    # Weights lie where scores are written now.
                    tensor_memory.commit(unit, memory.added.at[_hidden(group, turn)])
                    mosaic().barrier_wait(memory.added.at[group])

                self.score(group, turn)
            return turn + 1

        turns = self.fold(step, jnp.int32(0))
        for group in groups:
            pl.when(turns > 0)(functools.partial(self.add, group, turns - 1))
            tensor_memory.commit(unit, memory.done.at[_hidden(group, turns)])

    def score(self, group: int, turn: Array) -> None:
        """Starts the products of a group's queries and the keys of a turn."""
        memory, unit = self.memory, self.problem.unit
        if group == 0:
            memory.keys.wait(turn)
        (keys,) = memory.keys.at(turn)
        scores = memory.scores_of(group, self.problem.tiling.block_kv)
        tensor_memory.multiply(unit, scores, memory.queries.at[group], keys, transposed=True)
        scored = memory.scored.at[_hidden(group, turn)]
        tensor_memory.commit(unit, memory.keys.freed(turn), scored)

    def add(self, group: int, turn: Array) -> None:
        """Starts to add the weighted values of a turn."""
        memory, unit = self.memory, self.problem.unit
        mosaic().barrier_wait(memory.softened.at[group])
        if group == 0:
            memory.values.wait(turn)
        (values,) = memory.values.at(turn)
        weights = memory.weights_of(group, self.problem.tiling.block_kv)
        total = memory.sum_of(group, 0, self.problem.shapes.V)
        tensor_memory.multiply(unit, total, weights, values)
        tensor_memory.commit(unit, memory.values.freed(turn))

    def compute(self, results: Ref, group: Index) -> None:
        """What a warpgroup does that computes weights."""
        (*_, leaves, _), memory, unit = self.operands, self.memory, self.problem.unit
        (_, b, h, _), columns = self.at, self.problem.tiling.block_kv
        row, numbers = self.rows(group), self.problem.constants(leaves, b, h)
        # One group has registers for what follows from rows; dropout's hashes take long to compute.
        scarce = self.problem.groups > 1 and not self.problem.drops
        zeros = unit.to_layout(jnp.zeros((TENSOR_ROWS, _CHUNK), jnp.float32), "ts")
        for start in range(0, self.problem.shapes.V, _CHUNK):
            tensor_memory.store(unit, memory.sum_of(group, start, _CHUNK), zeros)
        tensor_memory.wait_for_stores(unit)

        def step(j: Array, masked: bool, state: tuple[Array, ...]) -> tuple[Array, ...]:
            turn, *sums = state
            own = _hidden(group, turn)
            first = _hidden(row, turn) if masked and scarce else row
            here = self.problem.tile(leaves, TileIndex(b, h, first, j * columns), numbers)
            mosaic().barrier_wait(memory.scored.at[own])
            products = tensor_memory.load_by_parts(unit, memory.scores_of(own, columns))
            tensor_memory.wait_for_loads(unit)
            for ring in memory.beside:
                ring.wait(turn)
                here = here.completed(ring.at(turn))
                mosaic().commit_smem()  # copies may write then to what was read
                mosaic().barrier_arrive(ring.freed(turn))
            sums = self.soften(own, masked, here, products, *sums)
            tensor_memory.wait_for_stores(unit)
            mosaic().barrier_arrive(memory.softened.at[own])
            return turn + 1, *sums

        shift, total, _ = nothing(TENSOR_ROWS, 1)
        state = jnp.int32(0), unit.to_layout(shift, "t"), unit.to_layout(total, "t")
        _, shift, total = self.fold(step, state)
        mosaic().barrier_wait(memory.done.at[group])
        self.leave(group, row, shift, total, results)

    def soften(
        self,
        group: Array,
        masked: bool,
        here: RegisterTile,
        products: Array,
        shift: Array,
        total: Array,
    ) -> tuple[Array, Array]:
        """Leaves a tile's weights where its scores were; the new shift and total."""
        unit, problem = self.problem.unit, self.problem
        found = soften(problem, masked, here, products, shift, total)
        place = self.memory.weights_of(group, problem.tiling.block_kv)
        tensor_memory.store_by_parts(unit, place, found.weights.astype(problem.shapes.dtype))
        pl.when(found.far)(functools.partial(self.rescale, group, found.factor))
        return found.shift, found.total

    def rescale(self, group: Array, factor: Array) -> None:
        """The weighted sum of a group, by rows."""
        unit = self.problem.unit
        for start in range(0, self.problem.shapes.V, _CHUNK):
            part = self.memory.sum_of(group, start, _CHUNK)
            found = tensor_memory.load(unit, part)
            tensor_memory.wait_for_loads(unit)
            tensor_memory.store(unit, part, found * unit.spread(factor, _CHUNK))

    def leave(self, group: Index, row: Array, shift: Array, total: Array, results: Ref) -> None:
        """Output and normalizer of a group, whose first query is in a row; the output of a part of
        the keys in float32."""
        (part, b, h, _), memory = self.at, self.memory
        factor, normalizer = mosaic_interpreter.run(
            functools.partial(finish_apart, self.problem.factors), shift, total
        )
        kept = [place.at[group] for place in memory.kept]
        for place, x in zip(kept, (factor, *normalizer), strict=True):
            place[...] = x
        own = pl.ds(row, TENSOR_ROWS)
        queries, result = memory.queries.at[group], results[0].at[part, b, own, h]
        apart = result.dtype != queries.dtype
        for start in range(0, self.problem.shapes.V, _CHUNK):
            place = (result if apart else queries).at[:, pl.ds(start, _CHUNK)]
            place[...] = self.output(group, start, kept[0]).astype(place.dtype)
        along = [(x, y.at[part, b, h, own]) for x, y in zip(kept[1:], results[1:], strict=True)]
        store(along if apart else [(queries, result), *along])

    def output(self, group: Index, start: int, factor: Ref) -> Array:
        """Columns of the normalised sum, as shared memory takes them without conflicts between its
        banks."""
        unit, total = self.problem.unit, self.memory.sum_of(group, start, _CHUNK)
        if unit.interpreted:
            return tensor_memory.load(unit, total) * factor[...][:, None]
        layout = mosaic().Layout.TCGEN05
        out = tensor_memory.load(unit, total, layout)
        factor = mosaic().load(factor, layout=layout.reduce(1))
        return out * mosaic().layout_cast(lax.broadcast_in_dim(factor, out.shape, (0,)), layout)

    def run(self, results: Ref) -> None:
        compute = functools.partial(self.compute, results)
        groups, unit = self.problem.groups, self.problem.unit
        tensor_memory.by_role(unit, groups, self.copy, self.multiply, compute)


def _forward(problem: GPUProblem, spec: Spec, query: Array, key: Array, value: Array) -> Tree:
    """Output `[B, T, N, V]` and normalizer `[B, T, N]`."""
    visits, parts = problem.visits(spec), problem.parts()

    def kernel(place: Callable[..., Any], operands: Ref, results: Ref, scratch: Ref) -> None:
        memory = _Memory(*scratch)
        _Program(problem, visits, memory, place, parts, operands).run(results)

    operands = query, key, value, problem.refs.arrays, visits.arrays
    results = forward_results(problem.shapes, parts)
    order = Order.of(problem, visits, problem.shapes.N, parts)
    warpgroups = tensor_memory.warpgroups(problem.unit, problem.groups)
    name, scratch = "jattn_blackwell_forward", _Memory.scratch(problem)
    given = operands, results, scratch, warpgroups
    return joined(*launch_by_role(name, problem, order, kernel, *given))


def _tiling(spec: Spec, shapes: Shapes) -> Tiling:
    """Scores and sums of two groups fill tensor memory where heads are of 128: it has 512
    columns. Registers hold long tiles where these read no arrays, and those of two groups no tiles
    with dropout beside score functions."""
    wide = max(shapes.H, shapes.V) > 128
    both = spec.score is not None and spec.dropout_rate > 0
    groups = 1 if wide or both or shapes.T <= TENSOR_ROWS else 2
    rules = spec.mask, spec.score, spec.q_positions, spec.kv_positions
    arrays = any(jnp.ndim(x) > 1 for x in jax.tree.leaves(rules))
    short = wide or arrays or spec.dropout_rate > 0
    return Tiling(groups * TENSOR_ROWS, 64 if short else 128)


_FORWARD = mosaic_call.Forward(
    tiling=_tiling,
    products=Products.TENSOR_MEMORY,
    run=_forward,
)


def functions(platform: str) -> AttentionVJP:
    """Forward and backward; interpreted on a CPU."""
    if platform != "cpu" and not knows_ampere():
        raise NotImplementedError(f"implementation 'blackwell': {ampere.OLD}")
    return mosaic_call.functions(_FORWARD, blackwell_gradients.BACKWARD, platform)


KERNEL = Kernel(supports, functions, reader=ampere.READER)  # reading is all that counts
