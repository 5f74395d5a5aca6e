"""Attention on Hopper GPUs for any mask, asynchronous from memory to matrix units.

FlashAttention-3 (Shah et al. 2024) in Pallas's Mosaic GPU form, learned from the documentation of
that and from `jax.experimental.pallas.ops.gpu.attention_mgpu`. A program has three warpgroups: one
only copies tiles of keys and values to shared memory, a few ahead of their use; the other two hold
64 queries each and compute, in the forward pass by turns: the matrix units have products of one
while the other is at its softmax. Barriers say whose turn it is, which place in shared memory is
filled, and which is free again. Of a causal mask there are as many programs as run at once, if
registers suffice: each goes on with other queries, whose keys are copied before it is done.

What is visited, and what needs no mask, comes from index arrays, see `block_mask`; the scores of a
tile from `jattn.tile`, through `mosaic_interpreter`. On a CPU the same kernels run in JAX's
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
    Memory,
    by_group,
    later,
    store,
    tiles_in_memory,
)
from jattn.kernels.gpu.mosaic.tile import hoisted, mosaic_interpreter
from jattn.kernels.gpu.mosaic.tile.factors import Factors
from jattn.kernels.gpu.mosaic.tile.gradients import Rows, add_gradients, finished
from jattn.kernels.gpu.mosaic.tile.online_softmax import finish, nothing, online
from jattn.kernels.gpu.mosaic.tile.problem import GPUProblem
from jattn.kernels.gpu.mosaic.tile.register_tile import RegisterTile
from jattn.kernels.gpu.mosaic.tile.spec_refs import TileIndex
from jattn.kernels.protocol import Kernel, Reader
from jattn.spec import Shapes, Spec, Tiling


CAPABILITY = (9, 0)  # others have no wgmma
_AHEAD = 2  # places in shared memory for tiles that come by
# CUDA 12.8.0 to 12.9.0 compile masks wrongly: JAX's `attention_mgpu` refuses causal ones there. The
# compilers of 12.9.0 and 12.9.1 differ in their version, and their CUDA runtimes do not.
_MISCOMPILING, _MENDED = range(12080, 12100), (12, 9, 86)
_COMPILERS = "nvidia-cuda-nvcc-cu12", "nvidia-nvjitlink-cu12"  # the first with JAX before 0.12


def supports(call: Call) -> str | None:
    """None or why not."""
    return _other_machine() or mosaic_call.unsupported(_FORWARD, call)


def _other_machine() -> str | None:
    return device.unfit(lambda x: x == CAPABILITY, "9.0") or _miscompiled()


def _miscompiled() -> str | None:
    if device.device() is None or _cuda_version() not in _MISCOMPILING:
        return None
    found = _compilers()
    if found and min(found.values()) >= _MENDED:
        return None
    named = [f"{name} {'.'.join(map(str, version))}" for name, version in found.items()]
    return (
        "CUDA 12.8.0 to 12.9.0 compile masks wrongly; expected CUDA 12.9.1 or later, which is "
        f"{' and '.join(_COMPILERS)} 12.9.86, got {' and '.join(named) or 'neither'}"
    )


def _cuda_version() -> int:
    """That of the CUDA runtime: 12090 is 12.9.0 or 12.9.1; 0 where JAX knows of none."""
    versions = importlib.import_module("jax._src.lib").cuda_versions
    return versions.cuda_runtime_get_version() if versions else 0


def _compilers() -> dict[str, tuple[int, ...]]:
    """The versions of CUDA's compilers that are installed as packages."""
    found = {}
    for name in _COMPILERS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = tuple(map(int, importlib.metadata.version(name).split(".")[:3]))
    return found


# ---------------------------------------------------------------------------------------------
# The kernels
# ---------------------------------------------------------------------------------------------


class _Forward(NamedTuple):
    """A program of the forward pass: some queries, and all their keys or one of `parts` of them.

    `each(step, state)` folds `step(place, state)` over the places whose queries the program takes
    one after another; `place(count)` reads (part, b, h, i), see `launch_in_rounds`.
    """

    problem: GPUProblem
    visits: block_mask.BlockMask
    parts: int
    each: Callable[[Any, Any], Any]
    memory: Memory
    query: Ref
    key: Ref
    value: Ref
    leaves: list[Any]
    visits_ref: Tree

    def fold(self, place: tuple[Any, ...], step: Callable[..., Any], state: Tree) -> Tree:
        """Folds `step(j, masked, state)` over the tiles j of keys that a place visits."""
        part, *at = place
        return self.visits.fold(self.visits_ref, tuple(at), step, state, (part, self.parts))

    def produce(self) -> None:
        """Copies the tiles of keys and values of all places: what one warpgroup does."""
        self.memory.drain(self.each(self.copy_tiles, jnp.int32(0)))

    def copy_tiles(self, place: Callable[..., Any], turn: Array) -> Array:
        """Copies the tiles of one place, and returns the next turn."""
        rows, columns = self.problem.tiling
        part, b, h, i = place(0)
        kv = lax.div(h, np.int32(self.problem.shapes.G))

        def step(j: Array, masked: bool, turn: Array) -> Array:
            run = pl.ds(j * columns, columns)
            tile = TileIndex(b, h, i * rows, j * columns)
            beside = self.problem.streamed_parts(self.leaves, tile)
            self.memory.streams[0].fill(turn, self.key.at[b, run, kv], *beside)
            self.memory.streams[1].fill(turn, self.value.at[b, run, kv])
            return turn + 1

        return self.fold((part, b, h, i), step, turn)

    def consume(self, results: Ref, group: Array) -> None:
        """Attends from a warpgroup's queries of all places: what the other warpgroups do."""
        self.each(functools.partial(self.attend, results, group), jnp.int32(0))

    def attend(self, results: Ref, group: Array, place: Callable[..., Any], turn: Array) -> Array:
        """Attends from a warpgroup's queries of one place, and returns the next turn."""
        problem, memory, unit = self.problem, self.memory, self.problem.unit
        rows, columns = problem.tiling
        own = lambda i: pl.ds(i * rows + group * ROWS, ROWS)  # noqa: E731
        part, b, h, i = place(0)
        memory.load(0, group, self.query.at[b, own(i), h])
        numbers = problem.constants(self.leaves, b, h)

        def step(j: Array, masked: bool, state: Tree) -> Tree:
            turn, before = state
            near = _near(group, turn, _has_much_to_keep(problem, masked))
            _, b, h, i = place(turn)
            index = TileIndex(b, h, i * rows + near * ROWS, j * columns)
            read = functools.partial(problem.tile, self.leaves, index, numbers)
            return turn + 1, _online(problem, memory, near, masked, read, turn, before)

        laid = map(unit.to_layout, nothing(ROWS, problem.shapes.V), ("t", "t", "ts"))
        pl.when(group == 1)(memory.change_turns)
        turn, part_sums = self.fold((part, b, h, i), step, (turn, softmax.Partial(*laid)))
        pl.when(group == 0)(memory.change_turns)
        part, b, h, i = place(turn)
        _leave(problem.factors, memory, group, part_sums, (part, b, h, own(i)), results)
        return turn


def _forward(problem: GPUProblem, spec: Spec, query: Array, key: Array, value: Array) -> Tree:
    """Output `[B, T, N, V]` and normalizer `[B, T, N]`; a program for every 128 queries, or for
    each of them and each part of the keys (Dao et al. 2023, "Flash-Decoding")."""
    shapes, visits, parts = problem.shapes, problem.visits(spec), problem.parts()

    def kernel(each: Callable[..., Any], operands: Ref, results: Ref, scratch: Ref) -> None:
        program = _Forward(problem, visits, parts, each, Memory(*scratch), *operands)
        by_group(problem.groups, program.produce, functools.partial(program.consume, results))

    operands = query, key, value, problem.refs.arrays, visits.arrays
    order, name = Order.of(problem, visits, shapes.N, parts), "jattn_hopper_forward"
    results, scratch = forward_results(shapes, parts), _forward_scratch(problem)
    rounds = order.rounds(device.multiprocessors()) if _has_registers(spec, visits) else None
    given = operands, results, scratch, problem.groups + 1
    return joined(*launch_in_rounds(name, problem, order, rounds, kernel, *given))


def _online(
    problem: GPUProblem,
    memory: Memory,
    near: Array,
    masked: bool,
    read: Callable[[], RegisterTile],
    turn: Array,
    before: softmax.Partial,
) -> softmax.Partial:
    """What a warpgroup has so far with one more tile of keys and values, which `read` describes."""
    unit, dtype = problem.unit, problem.shapes.dtype
    # What a tile that needs a mask reads is read where registers are free.
    early = None if masked else read()

    def by_key(k: Ref, *beside: Ref) -> Tree:
        pair, change = [(memory.own[0].at[near], k)], memory.change_turns
        (products,) = matrix_units.multiply(unit, pair, transposed=True, started=change)
        return products, (early or read()).completed(beside)

    products, here = memory.streams[0].use(turn, by_key)
    weights, found = online(problem, masked, here, products, before)
    weights = weights.astype(dtype)
    memory.change_turns()
    weigh = lambda v: matrix_units.multiply(unit, [(weights, v)], onto=[found.weighted])  # noqa: E731
    (weighted,) = memory.streams[1].use(turn, weigh)
    return found._replace(weighted=weighted)


def _has_registers(spec: Spec, visits: block_mask.BlockMask) -> bool:
    """Whether tiles leave registers for what a program keeps between two places: with score
    functions and dropout not all do."""
    return spec.score is None and not spec.dropout_rate and visits.order is None


def _has_much_to_keep(problem: GPUProblem, masked: bool) -> bool:
    """Whether a tile needs about all registers there are."""
    return masked or problem.shapes.H > 128 or bool(problem.refs.varying)


def _near(group: Array, turn: Array, scarce: bool) -> Array:
    """The number of a warpgroup, where registers are scarce so that the compiler does not know it:
    addresses are computed where they are used then."""
    return group + later(turn) if scarce else group


def _forward_scratch(problem: GPUProblem) -> Memory:
    shapes, columns = problem.shapes, problem.tiling.block_kv
    groups = problem.groups
    queries = tiles_in_memory(groups, ROWS, shapes.H, shapes.dtype)
    kept = queries, *[mosaic().SMEM((groups, ROWS), jnp.float32)] * 2
    tiles = tiles_in_memory(_AHEAD, columns, shapes.H, shapes.dtype)
    return Memory.scratch(groups, kept, (tiles, *problem.streamed_scratch(_AHEAD)), (tiles,))


def _leave(
    factors: Factors, memory: Memory, group: Array, found: softmax.Partial, at: Tree, results: Ref
) -> None:
    """Output and normalizer of a warpgroup's queries, through the memory that it keeps; the output
    of a part of the keys as it is, in float32."""
    (part, b, h, own), (queries, *kept) = at, (place.at[group] for place in memory.own)
    out, normalizer = mosaic_interpreter.run(functools.partial(finish, factors), found)
    result = results[0].at[part, b, own, h]
    apart = result.dtype != queries.dtype
    if apart:
        result[...] = out
    else:
        queries[...] = out.astype(queries.dtype)
    for place, x in zip(kept, normalizer, strict=True):
        place[...] = x
    along = [(x, to.at[part, b, h, own]) for x, to in zip(kept, results[1:], strict=True)]
    store(along if apart else [(queries, result), *along])


class _Backward(backward.Program):
    """128 queries or, `by_key`, 128 keys, of which each computing warpgroup keeps 64."""

    def copy(self, memory: Memory) -> None:
        """What the warpgroup does that only copies."""

        def step(h: Array, x: Array, masked: bool, turn: Array) -> Array:
            place = self.place(
                h, self.at[2] * self.problem.groups * ROWS, x * self.problem.streamed
            )
            rows = [self.rows.at[self.at[0], h, x]] if self.problem.by_key else []
            beside = self.problem.streamed_parts(self.leaves, place)
            memory.streams[0].fill(turn, *self.tiles(h, x), *rows, *beside)
            return turn + 1

        memory.drain(self.fold(step, jnp.int32(0)))

    def compute(self, memory: Memory, results: Ref, group: Array) -> None:
        """What a warpgroup does that computes."""
        block = self.at[2] * self.problem.groups + group
        start, unit, by_key = block * ROWS, self.problem.unit, self.problem.by_key
        own = self.at[0], pl.ds(start, ROWS), self.at[1]
        kept = [memory.load(x, group, self.kept[x].at[own]) for x in range(2)]
        mine = None if by_key else Rows.read(unit, self.rows, *self.at[:2], block)

        def of_head(h: Any) -> Callable[..., Any]:
            numbers = self.problem.constants(self.leaves, self.at[0], h)

            def step(x: Array, masked: bool, state: tuple[Array, ...]) -> tuple[Array, ...]:
                turn, *totals = state
                at = self.place(h, start, x * self.problem.streamed)
                read = functools.partial(self.problem.tile, self.leaves, at, numbers)
                here = read if masked else read()
                place = _near(group, turn, by_key or _has_much_to_keep(self.problem, masked))
                near = [x.at[place] for x in memory.own]
                totals = dict(zip(self.which, totals, strict=True))
                add = functools.partial(self.add, here, masked, mine, near, totals)
                return turn + 1, *memory.streams[0].use(turn, add)

            return step

        zeros = [jnp.zeros((ROWS, self.problem.shapes.H), jnp.float32) for _ in results]
        _, *found = self.fold_heads(
            of_head, (jnp.int32(0), *(unit.to_layout(x, "ts") for x in zeros))
        )
        found = finished(self.problem, dict(zip(self.which, found, strict=True)), mine)
        for place, total in zip(kept, found, strict=False):
            place[...] = total.astype(place.dtype)
        store([(x, y.at[own]) for x, y in zip(kept, results, strict=False)])

    def add(
        self, here: Any, masked: bool, mine: Any, kept: Any, totals: Any, *arrays: Ref
    ) -> list[Array]:
        """The totals with what a tile adds, whose arrays came by."""
        streamed, beside = arrays[:2], arrays[2:]
        if mine is not None:
            return add_gradients(self.problem, masked, mine, kept, streamed, totals, here, beside)
        read = functools.partial(Rows.read, self.problem.unit, beside[0])
        return add_gradients(self.problem, masked, read, kept, streamed, totals, here, beside[1:])


def _gradients(
    problem: GPUProblem,
    spec: Spec,
    per_query: tuple[Array, ...],
    key: Array,
    value: Array,
    which: tuple[int, ...],
) -> list[Array]:
    """Those of queries, or `which` of keys and values where `problem.by_key`."""
    shapes, by_key, size = problem.shapes, problem.by_key, problem.streamed
    groups = problem.groups

    def run(program: _Backward, results: Ref, scratch: Ref) -> None:
        memory = Memory(*scratch)
        by_group(
            groups,
            functools.partial(program.copy, memory),
            functools.partial(program.compute, memory, results),
        )

    tiles = functools.partial(tiles_in_memory, width=shapes.H, dtype=shapes.dtype, least=size)
    kept = [tiles(groups, ROWS) for _ in range(2)]
    beside = [mosaic().SMEM((_AHEAD, 3 * size), jnp.float32)] if by_key else []
    stream = *[tiles(_AHEAD, size)] * 2, *beside, *problem.streamed_scratch(_AHEAD)
    scratch = Memory.scratch(groups, tuple(kept), stream)
    name = "jattn_hopper_d_keys" if by_key else "jattn_hopper_d_queries"
    call = problem, spec, per_query, key, value, which
    return backward.launched(
        name, _Backward, call, size if by_key else ROWS, run, scratch, groups + 1
    )


def _tiling(spec: Spec, shapes: Shapes) -> Tiling:
    """Of tiles two fit shared memory (227 KiB) and one the registers of a warpgroup."""
    drops = spec.dropout_rate > 0
    # Beside another mask, keys are compared with both ends of a window.
    windowed = _has(spec.mask, masks.Window) and not isinstance(spec.mask, masks.Window)
    many = drops or _needs_many(spec) or windowed
    scarce = many if few() else drops and _is_long(spec)
    widest = 0 if scarce else 128  # of heads that have long tiles
    width = max(shapes.H, shapes.V)
    return Tiling(_rows(width), 128 if width <= widest else 64)


def _has(mask: masks.Mask, kind: type) -> bool:
    """Whether such a mask is in it."""
    nodes = jax.tree.leaves(mask, is_leaf=lambda x: isinstance(x, kind))
    return any(isinstance(x, kind) for x in nodes)


def _rows(width: int) -> int:
    """Of a program. Where registers cannot be moved, and wide heads need more than two computing
    warpgroups and a copying one have, one computes."""
    return ROWS if few() and width > 128 else 2 * ROWS


_FORWARD = mosaic_call.Forward(tiling=_tiling, products=Products.WARPGROUP, run=_forward)


def _streamed(spec: Spec, width: int) -> tuple[int, int]:
    beside = spec.score is not None or (few() and _has(spec.mask, masks.Dense))
    many = _needs_many(spec) if few() else _is_long(spec) or width > 128
    scarce = many or (beside and spec.dropout_rate > 0)
    return (32, 32) if scarce else (64, 64)


# Formulas of many operations, or maybe so.
_LONG = masks.Predicate, masks.Dilated, masks.Global, scores.Score


def _needs_many(spec: Spec) -> bool:
    """Whether a tile's scores need more registers than products and a mask or function of few
    operations that reads no array along T or S; without dropout."""
    nodes = jax.tree.leaves((spec.mask, spec.score), is_leaf=lambda x: isinstance(x, _LONG))
    is_long = any(isinstance(x, _LONG) for x in nodes)
    arrays = any(jnp.ndim(x) > 1 for x in jax.tree.leaves(spec.score))
    return is_long or arrays


def _is_long(spec: Spec) -> bool:
    """Whether a tile's scores and their derivative need more registers than gradients of keys and
    of values leave: of a chain of more than two, of T5's bias by positions, or of a user's function
    whose derivative depends on the score."""
    chain = scores.in_order(spec.score)
    by_positions = not hoisted.positions_are_places(spec)
    functions = [x for x in chain if isinstance(x, scores.Score)]
    return (
        len(chain) > 2
        or (by_positions and any(isinstance(x, scores.RelativeBias) for x in chain))
        or any(hoisted.depends_on_score(jax.grad(x._scalar)) for x in functions)
    )


def _backward() -> mosaic_call.Backward:
    return mosaic_call.Backward(
        rows=_rows,
        streamed=_streamed,
        products=Products.WARPGROUP,
        run=_gradients,
        widest_together=64 if few() else 128,
    )


def functions(platform: str) -> AttentionVJP:
    """Forward and backward; interpreted on a CPU."""
    return mosaic_call.functions(_FORWARD, _backward(), platform)


READER = Reader(
    functools.partial(gpu_decode.unreadable, _FORWARD),
    functools.partial(gpu_decode.attend, _FORWARD),
)
KERNEL = Kernel(supports, functions, reader=READER)
