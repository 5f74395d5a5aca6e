"""Attention on Hopper GPUs for any mask, asynchronous from memory to matrix units.

FlashAttention-3 (Shah et al. 2024) in Pallas's Mosaic GPU form, learned from the documentation of
that and from `jax.experimental.pallas.ops.gpu.attention_mgpu`. A program has three warpgroups: one
only copies tiles of keys and values to shared memory, a few ahead of their use; the other two hold
64 queries each and compute, so that the matrix units have products of one while the other is at
its softmax. Barriers say which place in shared memory is filled, and which is free again.

What is visited, and what needs no mask, comes from index arrays as in `pallas_gpu`; the scores of a
tile from `jattn.tile`, through `registers`. On a CPU the same kernels run in JAX's interpreter.
"""

import dataclasses
import functools
import importlib
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from jattn import softmax, tile
from jattn._types import LogSumExp, Output, is_static
from jattn.kernels import lookup, pallas_gpu, registers, reverse, tiles, walks
from jattn.spec import Shapes, Spec, Tiling, has_mask, prepare


MAX_HEAD_SIZE = 256
_WIDTH = 64  # head sizes are multiples of it: a row of a tile in shared memory is 128 bytes
_ROWS = 64  # queries of a warpgroup: what one instruction multiplies
_GROUPS = 2  # warpgroups that compute
_STAGES = 2  # tiles of keys and values in shared memory


def supports(spec: Spec, shapes: Shapes) -> str | None:
    """None or why not."""
    if shapes.dtype not in (jnp.bfloat16, jnp.float16):
        return f"expected bfloat16 or float16, got {shapes.dtype}"
    if max(shapes.H, shapes.V) > MAX_HEAD_SIZE:
        return f"expected head sizes up to {MAX_HEAD_SIZE}, got {max(shapes.H, shapes.V)}"
    if 0 in (shapes.B, shapes.T, shapes.S):
        return None
    leaves, structure = jax.tree.flatten(dataclasses.replace(spec, dropout_key=None))
    return _obstacle(structure, tuple((x.shape, x.dtype) for x in leaves), shapes)


@functools.lru_cache(maxsize=1024)
def _obstacle(structure: Any, avals: tuple[Any, ...], shapes: Shapes) -> str | None:
    """What mask or score function do that registers cannot, found by tracing them for one tile."""
    tiling = choose_tiling(shapes)

    def one_tile(leaves: Any) -> Any:
        spec = prepare(jax.tree.unflatten(structure, leaves), shapes)
        spec = dataclasses.replace(spec, dropout_rate=0.0)
        spec = tiles.pad_spec(spec, shapes.T, shapes.S, *tiles.whole(shapes.T, shapes.S, tiling))
        rules = _Rules(spec, Tiling(_ROWS, tiling.block_kv))
        rows, columns = (jnp.arange(size, dtype=jnp.int32) for size in rules.sizes.values())
        zero = jnp.zeros((), jnp.int32)
        place = lookup.Place(zero, zero, zero, zero)
        parts = [_part(x, index) for x, index in rules.parts(rules.arrays, place)]
        products = jnp.zeros((_ROWS, tiling.block_kv), jnp.float32)
        modify = lambda *x: rules.at(*x[:-1]).modify(x[-1], True)  # noqa: E731
        operands = parts, zero, zero, rows, columns, products
        return registers.run(modify, *jax.tree.map(jnp.squeeze, operands), shapes=_types(operands))

    try:
        jax.eval_shape(one_tile, [jax.ShapeDtypeStruct(*x) for x in avals])
    except NotImplementedError as error:
        return f"a function of mask or score needs {error}"
    return None


def _types(operands: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), operands)


def choose_tiling(shapes: Shapes) -> Tiling:
    """Tiles of which two fit shared memory (227 KiB) and one the registers of a warpgroup."""
    return Tiling(_GROUPS * _ROWS, 128 if max(shapes.H, shapes.V) <= 128 else 64)


# ---------------------------------------------------------------------------------------------
# A spec in registers
# ---------------------------------------------------------------------------------------------


class _Rules(lookup.Rules):
    """A spec as a warpgroup reads it. Booleans are bytes, as they are in memory."""

    def __init__(self, spec: Spec, tiling: Tiling):
        super().__init__(spec, tiling)
        self.boolean = [x.dtype == bool for x in self.arrays]
        self.arrays = [x.astype(jnp.int8) if x.dtype == bool else x for x in self.arrays]

    def at(self, leaves: list[Any], b: Any, h: Any, rows: Any, columns: Any) -> tiles.Tile:
        """The tile of these parts of the arrays, at these places."""
        pairs = zip(leaves, self.boolean, strict=True)
        return self.assembled(
            [x != 0 if boolean else x for x, boolean in pairs], b, h, rows, columns
        )


def _part(memory: Array, index: tuple[Any, ...]) -> Array:
    if any(x is None for x in index):
        raise NotImplementedError("to look up entries of an array")
    return jnp.zeros([x.size for x in index if isinstance(x, pl.Slice)], memory.dtype)


class _Unit(NamedTuple):
    """What a warpgroup computes with, and how arrays lie in its registers: `axes` names the axes
    of a tile "ts" along which they run.

    JAX's interpreter knows neither layouts nor all operands of products: there XLA multiplies.
    """

    interpreted: bool

    def lay(self, x: Any, axes: str) -> Any:
        if self.interpreted or not axes:
            return x
        whole = _mosaic().Layout.WGMMA
        return _mosaic().layout_cast(
            x, {"ts": whole, "t": whole.reduce(1), "s": whole.reduce(0)}[axes]
        )

    def places(self, start: Any, size: int, axis: str) -> Array:
        return start + self.lay(lax.iota(jnp.int32, size), axis)

    def full(self, value: float, shape: tuple[int, ...], axes: str) -> Array:
        return self.lay(jnp.full(shape, value, jnp.float32), axes)

    def read(self, memory: Any, index: tuple[Any, ...], names: list[str]) -> tuple[Any, Any]:
        """A part of an array in global memory, without axes of size 1, and its type with them."""
        sizes = [x.size for x in index if isinstance(x, pl.Slice)]
        wide = [isinstance(x, pl.Slice) and x.size > 1 for x in index]
        axes = "".join(name.lower() for name, run in zip(names, wide, strict=False) if run)
        index = tuple(
            x if run or not isinstance(x, pl.Slice) else 0
            for x, run in zip(index, wide, strict=True)
        )
        expected = jax.ShapeDtypeStruct(tuple(sizes), memory.dtype)
        if self.interpreted or not axes:
            return memory[index], expected
        return self.lay(_mosaic().load(memory, index, optimized=False), axes), expected

    def product(self, a: Any, b: Any, transposed: bool = False, onto: Any = None) -> Array:
        """a · b or a · bᵀ, added to `onto`; a in shared memory or registers, b in shared memory."""
        if self.interpreted:
            a, b = a[...], b[...].T if transposed else b[...]
            found = jnp.dot(a, b, preferred_element_type=jnp.float32)
            return found if onto is None else onto + found
        b = _mosaic().transpose_ref(b, (1, 0)) if transposed else b
        multiply = lambda total: _mosaic().wgmma(total, a, b)  # noqa: E731
        if onto is not None:
            return pl.run_state(multiply)(_mosaic().ACC.init(onto))

        def fresh(total: Any) -> Array:
            multiply(total)
            return total[...]

        return pl.run_scoped(fresh, _mosaic().ACC((a.shape[0], b.shape[1]), jnp.float32))


@functools.cache
def _mosaic() -> Any:
    # Not with the library: this takes longer to import than all of it.
    return importlib.import_module("jax.experimental.pallas.mosaic_gpu")


def _interpreted() -> bool:
    """Whether programs are for a CPU. Known while tracing: the interpreter has effects, which
    `lax.platform_dependent` would leave in programs for GPUs. On a machine without GPU an abstract
    device in the mesh says that there will be one."""
    return jax.sharding.get_abstract_mesh().abstract_device is None and (
        jax.default_backend() == "cpu"
    )


def _interpreter() -> Any:
    """Parameters of the interpreter, which older versions do not export."""
    name = "jax._src.pallas.mosaic_gpu.interpret.params"
    home = _mosaic() if hasattr(_mosaic(), "InterpretGPUParams") else importlib.import_module(name)
    return home.InterpretGPUParams()


class _Problem(NamedTuple):
    """The sizes of a call in whole tiles, its tiles, and its spec as kernels read it."""

    shapes: Shapes
    tiling: Tiling
    rules: _Rules

    @property
    def blocks(self) -> tuple[int, int]:
        """How many of queries and of keys."""
        return self.shapes.T // self.tiling.block_q, self.shapes.S // self.tiling.block_kv

    def kinds(self, spec: Spec) -> Any:
        """The tile maps `[B or 1, N or 1, n, m]`."""
        return walks.kinds(spec, self.shapes.T, self.shapes.S, self.tiling)

    def at_tile(
        self,
        unit: _Unit,
        function: Callable[..., Any],
        leaves: list[Any],
        place: lookup.Place,
        *operands: Any,
    ) -> Any:
        """`function(tile, *operands)` in registers, for 64 queries and a block of keys."""
        parts = self.rules.parts(leaves, place)
        read = [unit.read(*part, x) for part, x in zip(parts, self.rules.letters, strict=True)]
        rows = unit.places(place.row, _ROWS, "t")
        columns = unit.places(place.column, self.tiling.block_kv, "s")
        given = ([x for x, _ in read], place.b, place.h, rows, columns, operands)
        expected = ([x for _, x in read], *_types(given[1:]))

        def at(leaves: Any, b: Any, h: Any, rows: Any, columns: Any, operands: Any) -> Any:
            return function(self.rules.at(leaves, b, h, rows, columns), *operands)

        return registers.run(at, *given, shapes=expected)


def _launch(
    name: str, grid: tuple[int, int, int], kernel: Any, operands: Any, results: Any, scratch: Any
) -> list[Array]:
    """`kernel(unit, place, operands, results, scratch)` in a grid of programs (b, h, i) of three
    warpgroups, interpreted on a CPU."""
    operands, _ = walks.varying(jax.tree.map(jnp.asarray, operands))
    flat, structure = jax.tree.flatten(operands)

    def call(unit: _Unit) -> Any:
        def body(*refs: Any) -> None:
            n, m = len(flat), len(flat) + len(results)
            place = [lax.axis_index(x) for x in ("b", "h", "i")]
            kernel(unit, place, jax.tree.unflatten(structure, refs[:n]), refs[n:m], refs[m:])

        return _mosaic().kernel(
            body,
            out_type=[jax.ShapeDtypeStruct(*x) for x in results],
            scratch_types=scratch,
            grid=grid,
            grid_names=("b", "h", "i"),
            num_threads=_GROUPS + 1,
            thread_name="warpgroup",
            kernel_name=name,
            interpret=_interpreter() if unit.interpreted else False,
            compiler_params=_mosaic().CompilerParams(approx_math=True),
        )

    return list(call(_Unit(_interpreted()))(*flat))


# ---------------------------------------------------------------------------------------------
# Shared memory
# ---------------------------------------------------------------------------------------------


def _tiles_in_memory(count: int, rows: int, width: int, dtype: Any) -> Any:
    """Tiles in shared memory as matrix units read them, without conflicts between its banks."""
    mosaic = _mosaic()
    swizzled = mosaic.TilingTransform((8, _WIDTH)), mosaic.SwizzleTransform(128)
    return mosaic.SMEM((count, rows, width), dtype, transforms=swizzled)


class _Ring(NamedTuple):
    """Places in shared memory that one warpgroup fills and the others use up, in turn."""

    tiles: Any
    filled: Any
    free: Any

    @classmethod
    def scratch(cls, rows: int, width: int, dtype: Any) -> "_Ring":
        return cls(
            _tiles_in_memory(_STAGES, rows, width, dtype),
            _mosaic().Barrier(num_barriers=_STAGES),
            _mosaic().Barrier(num_barriers=_STAGES, num_arrivals=_GROUPS),
        )

    def fill(self, turn: Any, source: Any) -> None:
        """Copies a tile to the place of this turn, once that is free."""
        place = lax.rem(turn, np.int32(_STAGES))

        @pl.when(turn >= _STAGES)
        def _() -> None:
            _mosaic().barrier_wait(self.free.at[place])

        _mosaic().copy_gmem_to_smem(source, self.tiles.at[place], self.filled.at[place])

    def drain(self, turns: Any) -> None:
        """Waits until all that was filled in so many turns is used up."""
        for place in range(_STAGES):

            @pl.when(turns > place)
            def _(place: int = place) -> None:
                _mosaic().barrier_wait(self.free.at[place])

    def use(self, turn: Any, function: Callable[[Any], Any]) -> Any:
        """`function(tile)` of this turn, once it is there; its place is free afterwards."""
        place = lax.rem(turn, np.int32(_STAGES))
        _mosaic().barrier_wait(self.filled.at[place])
        found = function(self.tiles.at[place])
        _mosaic().barrier_arrive(self.free.at[place])
        return found


# ---------------------------------------------------------------------------------------------
# The kernels
# ---------------------------------------------------------------------------------------------


_LOG2E = math.log2(math.e)
_LOWEST = float(jnp.finfo(jnp.float32).min) / 2  # times log₂ e it is finite


def _online(
    here: tiles.Tile, products: Array, part: softmax.Partial, masked: bool
) -> tuple[Array, softmax.Partial]:
    """The weights of more keys, and what there is so far, both relative to a new maximum."""
    score = here.modify(products, masked)
    maximum = jnp.maximum(part.maximum, jnp.max(score, axis=-1))
    weights = jnp.exp2(score * _LOG2E - (maximum * _LOG2E)[:, None])
    scale = jnp.exp2((part.maximum - maximum) * _LOG2E)
    total = part.total * scale + jnp.sum(weights, axis=-1)
    return here.drop(weights), softmax.Partial(maximum, total, part.weighted * scale[:, None])


class _Forward(NamedTuple):
    """Shared memory of the forward pass. Results leave it where queries came in."""

    q: Any
    q_filled: Any
    lse: Any
    keys: _Ring
    values: _Ring

    @classmethod
    def scratch(cls, problem: _Problem) -> "_Forward":
        shapes, mosaic = problem.shapes, _mosaic()
        ring = functools.partial(_Ring.scratch, problem.tiling.block_kv, shapes.H, shapes.dtype)
        return cls(
            _tiles_in_memory(_GROUPS, _ROWS, shapes.H, shapes.dtype),
            mosaic.Barrier(num_barriers=_GROUPS),
            mosaic.SMEM((_GROUPS, _ROWS), jnp.float32),
            ring(),
            ring(),
        )


class _Program(NamedTuple):
    """One program of a kernel: where it is (b, h, i), and what it visits there."""

    unit: _Unit
    problem: _Problem
    at: tuple[Any, Any, Any]
    walk: walks.Walk
    walked: Any

    def fold(self, step: Callable[..., Any], state: Any) -> Any:
        """Folds `step(j, masked, state)` over the blocks that it visits."""
        return self.walk.fold(self.walked, self.at, step, state)


def _forward(problem: _Problem, spec: Spec, query: Array, key: Array, value: Array) -> Any:
    """`(out [B, T, N, V], lse [B, T, N])`; a program for every 128 queries."""
    shapes, walk = problem.shapes, walks.walk(problem.kinds(spec))

    def kernel(unit: _Unit, at: Any, operands: Any, results: Any, scratch: Any) -> None:
        query, key, value, leaves, walked = operands
        program = _Program(unit, problem, at, walk, walked)
        memory, group = _Forward(*scratch), lax.axis_index("warpgroup")

        @pl.when(group == _GROUPS)
        def _() -> None:
            _mosaic().set_max_registers(40, action="decrease")
            _copy_keys(program, memory, key, value)

        @pl.when(group < _GROUPS)
        def _() -> None:
            _mosaic().set_max_registers(232, action="increase")
            _attend(program, memory, group, query, leaves, results)

    operands = query, key, value, problem.rules.arrays, walk.arrays
    out = (shapes.B, shapes.T, shapes.N, shapes.V), shapes.dtype
    lse = (shapes.B, shapes.N, shapes.T), jnp.float32
    grid = shapes.B, shapes.N, problem.blocks[0]
    scratch = _Forward.scratch(problem)
    found = _launch("jattn_hopper_forward", grid, kernel, operands, (out, lse), scratch)
    return found[0], jnp.swapaxes(found[1], 1, 2)


def _copy_keys(program: _Program, memory: _Forward, key: Any, value: Any) -> None:
    """What the warpgroup does that only copies."""
    (b, h, _), block = program.at, program.problem.tiling.block_kv
    kv = lax.div(h, np.int32(program.problem.shapes.G))

    def step(j: Any, masked: bool, turn: Any) -> Any:
        run = pl.ds(j * block, block)
        memory.keys.fill(turn, key.at[b, run, kv])
        memory.values.fill(turn, value.at[b, run, kv])
        return turn + 1

    turns = program.fold(step, jnp.int32(0))
    memory.keys.drain(turns)
    memory.values.drain(turns)


def _attend(
    program: _Program, memory: _Forward, group: Any, query: Any, leaves: Any, results: Any
) -> None:
    """What a warpgroup does that computes, for its 64 queries."""
    (b, h, i), unit, problem, mosaic = program.at, program.unit, program.problem, _mosaic()
    shapes, block = problem.shapes, problem.tiling.block_kv
    row, q = i * problem.tiling.block_q + group * _ROWS, memory.q.at[group]
    own = pl.ds(row, _ROWS)
    mosaic.copy_gmem_to_smem(query.at[b, own, h], q, memory.q_filled.at[group])
    mosaic.barrier_wait(memory.q_filled.at[group])

    def step(j: Any, masked: bool, state: Any) -> Any:
        turn, part = state
        products = memory.keys.use(turn, lambda k: unit.product(q, k, transposed=True))
        place, online = (
            lookup.Place(b, h, row, j * block),
            functools.partial(_online, masked=masked),
        )
        weights, part = problem.at_tile(unit, online, leaves, place, products, part)
        weigh = lambda v: unit.product(weights.astype(shapes.dtype), v, onto=part.weighted)  # noqa: E731
        return turn + 1, part._replace(weighted=memory.values.use(turn, weigh))

    maximum, total = (unit.full(x, (_ROWS,), "t") for x in (_LOWEST, 0))
    nothing = softmax.Partial(maximum, total, unit.full(0, (_ROWS, shapes.V), "ts"))
    _, found = program.fold(step, (jnp.int32(0), nothing))
    out, memory.lse[group] = registers.run(softmax.finish, found)
    q[...] = out.astype(shapes.dtype)
    mosaic.commit_smem()
    mosaic.copy_smem_to_gmem(q, results[0].at[b, own, h])
    mosaic.copy_smem_to_gmem(memory.lse.at[group], results[1].at[b, h, own])
    mosaic.wait_smem_to_gmem(0)


# ---------------------------------------------------------------------------------------------
# The call
# ---------------------------------------------------------------------------------------------


def _padded(x: Array, length: int, width: int) -> Array:
    """`[B, T, N, H]` as whole tiles."""
    return jnp.pad(x, ((0, 0), (0, length - x.shape[1]), (0, 0), (0, width - x.shape[3])))


def attend(
    spec: Spec, query: Array, key: Array, value: Array, tiling: Tiling | None = None
) -> tuple[Output, LogSumExp]:
    """`(out [B, T, N, V], lse [B, N, T])` for one flat batch axis."""
    (B, T, N, H), (S, K, V) = query.shape, value.shape[1:]
    if 0 in (B, T, S):
        return jnp.zeros((B, T, N, V), query.dtype), jnp.full((B, N, T), -jnp.inf, jnp.float32)
    if not is_static(spec.scale):
        query = (query.astype(spec.scale.dtype) * spec.scale).astype(query.dtype)
        spec = dataclasses.replace(spec, scale=1.0)
    if spec.dropout_rate:
        spec = dataclasses.replace(spec, dropout_key=tile.key_words(spec.dropout_key))
    shapes = Shapes((B,), T, S, N, K, H, V, query.dtype)
    tiling = tiling or choose_tiling(shapes)
    whole_T, whole_S = tiles.whole(T, S, tiling)
    spec = tiles.pad_spec(spec, T, S, whole_T, whole_S)
    width = -(-max(H, V) // _WIDTH) * _WIDTH
    query, key, value = (
        _padded(x, length, width)
        for x, length in ((query, whole_T), (key, whole_S), (value, whole_S))
    )
    shapes = shapes._replace(T=whole_T, S=whole_S, H=width, V=width)

    def forward(spec: Spec, query: Array, key: Array, value: Array) -> Any:
        problem = _Problem(shapes, tiling, _Rules(spec, Tiling(_ROWS, tiling.block_kv)))
        if has_mask(spec):
            # What is masked does not exist: NaN reaches who attends to it through the scores.
            lost = jax.vmap(jax.vmap(tile.lost))(value)[..., None]
            key, value = key + lost.astype(key.dtype), tile.finite(value)
        return _forward(problem, spec, query, key, value)

    out, lse = reverse.attention(forward, pallas_gpu.gradients, spec, query, key, value)
    return out[:, :T, :, :V], jnp.swapaxes(lse, 1, 2)[:, :, :T]
