"""Attention on Hopper GPUs for any mask, asynchronous from memory to matrix units.

FlashAttention-3 (Shah et al. 2024) in Pallas's Mosaic GPU form, learned from the documentation of
that and from `jax.experimental.pallas.ops.gpu.attention_mgpu`. A program has three warpgroups: one
only copies tiles of keys and values to shared memory, a few ahead of their use; the other two hold
64 queries each and compute, in the forward pass by turns: the matrix units have products of one
while the other is at its softmax. Barriers say whose turn it is, which place in shared memory is
filled, and which is free again.

What is visited, and what needs no mask, comes from index arrays, see `block_mask`; the scores of a
tile from `jattn.tile`, through `mosaic_interpreter`. On a CPU the same kernels run in JAX's
interpreter.
"""

import dataclasses
import functools
import importlib
import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from jattn import softmax, tile, tuning
from jattn._pytree import axis_names, axis_of, is_static, number
from jattn.kernels.common import block_mask, reverse_mode, slicing, tile_schedule
from jattn.kernels.common.vjp import AttentionVJP, cast_cotangent, with_headroom
from jattn.kernels.gpu import kernel_refs, mosaic_interpreter, triton
from jattn.masks import Span
from jattn.spec import Shapes, Spec, Tiling, has_mask, prepare


_CAPABILITY = "9.0"  # others have no wgmma
_MISCOMPILING = (12080, 12091)  # `ptxas` of these: JAX's `attention_mgpu` refuses causal masks
_WIDTH = 64  # head sizes are multiples of it: a row of a tile in shared memory is 128 bytes
_ROWS = 64  # queries of a warpgroup: what one instruction multiplies
_GROUPS = 2  # warpgroups that compute
_WIDEST_BACKWARD = 128  # head size of which two gradients fit registers beside a tile
_STAGES = 2  # places for tiles that come by in shared memory, a power of two


def supports(spec: Spec, shapes: Shapes) -> str | None:
    """None or why not."""
    if shapes.dtype not in (jnp.bfloat16, jnp.float16):
        return f"expected bfloat16 or float16, got {shapes.dtype}"
    if max(shapes.H, shapes.V) > triton.MAX_HEAD_SIZE:
        return f"expected head sizes up to {triton.MAX_HEAD_SIZE}, got {max(shapes.H, shapes.V)}"
    if 0 in (shapes.B, shapes.T, shapes.S):
        return None
    leaves, structure = jax.tree.flatten(dataclasses.replace(spec, dropout_key=None))
    return _other_machine() or _unsupported_reason(
        structure, tuple((x.shape, x.dtype) for x in leaves), shapes
    )


def _other_machine() -> str | None:
    try:
        device, *_ = jax.local_devices(backend="cuda")
    except RuntimeError:  # there is none, and the program for another machine
        return None
    if device.compute_capability != _CAPABILITY:
        return f"expected compute capability {_CAPABILITY}, got {device.compute_capability}"
    version = _cuda_version()
    if _MISCOMPILING[0] <= version < _MISCOMPILING[1]:
        found = f"{version // 1000}.{version % 1000 // 10}.{version % 10}"
        return f"CUDA {found} compiles masks wrongly; expected CUDA 12.9.1 or later"
    return None


def _cuda_version() -> int:
    """That of the CUDA runtime: 12091 is 12.9.1; 0 where JAX knows of none."""
    versions = importlib.import_module("jax._src.lib").cuda_versions
    return versions.cuda_runtime_get_version() if versions else 0


@functools.lru_cache(maxsize=1024)
def _unsupported_reason(structure: Any, avals: tuple[Any, ...], shapes: Shapes) -> str | None:
    """What mask or score function do that registers cannot, found by tracing them for one tile."""
    tiling = choose_tiling(shapes)

    def one_tile(leaves: Any) -> Any:
        spec = prepare(jax.tree.unflatten(structure, leaves), shapes)
        spec = dataclasses.replace(spec, dropout_rate=0.0)
        spec = slicing.pad_spec(
            spec, shapes.T, shapes.S, *slicing.round_up(shapes.T, shapes.S, tiling)
        )
        rules = _SpecRefs(spec, Tiling(_ROWS, tiling.block_kv))
        modify, operands = rules.example()
        return mosaic_interpreter.run(
            modify, *jax.tree.map(jnp.squeeze, operands), shapes=_types(operands)
        )

    try:
        jax.eval_shape(one_tile, [jax.ShapeDtypeStruct(*x) for x in avals])
    except NotImplementedError as error:
        return f"a function of mask or score needs {error}"
    return None


def _types(operands: Any, transposed: bool = False) -> Any:
    step = -1 if transposed else 1
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[::step], x.dtype), operands)


def choose_tiling(shapes: Shapes) -> Tiling:
    """Tiles of which two fit shared memory (227 KiB) and one the registers of a warpgroup."""
    return Tiling(_GROUPS * _ROWS, 128 if max(shapes.H, shapes.V) <= 128 else 64)


# ---------------------------------------------------------------------------------------------
# A spec in registers
# ---------------------------------------------------------------------------------------------


class _SpecRefs(kernel_refs.SpecRefs):
    """A spec as a warpgroup reads it. Booleans are bytes, as they are in memory."""

    def __init__(self, spec: Spec, tiling: Tiling):
        super().__init__(spec, tiling)
        self.boolean = [x.dtype == bool for x in self.arrays]
        self.arrays = [x.astype(jnp.int8) if x.dtype == bool else x for x in self.arrays]

    def at(self, leaves: list[Any], b: Any, h: Any, rows: Any, columns: Any) -> slicing.Tile:
        """The tile of these parts of the arrays, at these places."""
        pairs = zip(leaves, self.boolean, strict=True)
        found = self.assembled(
            [x != 0 if boolean else x for x, boolean in pairs], b, h, rows, columns
        )
        if found.spec.q_positions is None and found.spec.kv_positions is None:
            return found._replace(rows=Span(rows, rows), columns=Span(columns, columns))
        return found

    def example(self) -> tuple[Callable[..., Any], Any]:
        """A function from a tile's products to scores and their derivative, and operands of it, to
        be traced."""
        rows, columns = (jnp.arange(size, dtype=jnp.int32) for size in self.sizes.values())
        zero = jnp.zeros((), jnp.int32)
        place = kernel_refs.TileIndex(zero, zero, zero, zero)
        parts = [_part(x, index) for x, index in self.parts(self.arrays, place)]
        products = jnp.zeros(tuple(self.sizes.values()), jnp.float32)

        def modify(*operands: Any) -> Any:
            *at, products = operands
            score, pull = jax.vjp(lambda x: self.at(*at).modify(x, True), products)
            return score, pull(score)

        return modify, (parts, zero, zero, rows, columns, products)

    def along(self, letter: str) -> list[int]:
        """Which arrays run along a letter only, of each batch row and head: a tile's part of them
        can be copied as it is. Their numbers have 4 bytes, so that parts start at multiples of
        128."""
        return [
            i
            for i, (x, letters) in enumerate(zip(self.arrays, self.letters, strict=True))
            if letters[-1:] == [letter]
            and set(letters) <= {"*B", "N", letter}
            and x.shape[-1] > 1
            and x.dtype.itemsize == 4
        ]


def _part(memory: Array, index: tuple[Any, ...]) -> Array:
    if any(x is None for x in index):
        raise NotImplementedError("to look up entries of an array")
    return jnp.zeros([x.size for x in index if isinstance(x, pl.Slice)], memory.dtype)


class _Value(NamedTuple):
    """An array in registers, without axes of size 1, and its type with them."""

    value: Any
    expected: Any


class _Unit(NamedTuple):
    """What a warpgroup computes with, and how arrays lie in its registers: `axes` names the axes
    of a tile "ts" along which they run; rows of a transposed tile are keys.

    JAX's interpreter knows neither layouts nor all operands of products: there XLA multiplies.
    """

    interpreted: bool
    transposed: bool = False

    def lay(self, x: Any, axes: str) -> Any:
        if self.interpreted or not axes:
            return x
        tile_layout, along_rows = _mosaic().Layout.WGMMA, "s" if self.transposed else "t"
        one = tile_layout.reduce(1 if axes == along_rows else 0)
        return _mosaic().layout_cast(x, tile_layout if axes == "ts" else one)

    def spread(self, row: Array, axis: str) -> Array:
        """A square tile, the same along the other axis."""
        square, kept = (row.shape[0],) * 2, axis == ("s" if self.transposed else "t")
        return self.lay(lax.broadcast_in_dim(row, square, (0 if kept else 1,)), "ts")

    def places(self, start: Any, size: int, axis: str) -> Array:
        places = self.lay(lax.iota(jnp.int32, size), axis)
        second = places & np.int32(tile.SHARED)
        # In this order, so that the compiler finds what two rows of a thread share.
        return (start + (places - second)) + second

    def read(self, memory: Any, index: tuple[Any, ...], letters: list[str]) -> _Value:
        """A part of an array in global memory."""
        runs = [isinstance(x, pl.Slice) for x in index]
        sizes = [x.size for x, run in zip(index, runs, strict=True) if run]
        wide = [run and x.size > 1 for x, run in zip(index, runs, strict=True)]
        axes = "".join(x.lower() for x, run in zip(letters, wide, strict=False) if run)
        index = tuple(0 if x > y else z for x, y, z in zip(runs, wide, index, strict=True))
        expected = jax.ShapeDtypeStruct(tuple(sizes), memory.dtype)
        if self.interpreted or not axes:
            return _Value(memory[index], expected)
        part, load = memory.at[index], _mosaic().load
        older = [()] if "idx" in inspect.signature(load).parameters else []
        return _Value(self.lay(load(part, *older, optimized=False), axes), expected)

    def products(
        self,
        pairs: Any,
        transposed: bool = False,
        onto: Any = None,
        started: Callable[[], None] = lambda: None,
    ) -> list[Array]:
        """a · b or a · bᵀ for each pair, added to what `onto` holds for it, in flight together; a
        in shared memory or registers, b in shared memory. `started()` runs before the wait for
        products that are added to nothing."""
        if self.interpreted:
            started()
            pairs = [(a[...], b[...].T if transposed else b[...]) for a, b in pairs]
            found = [jnp.dot(a, b, preferred_element_type=jnp.float32) for a, b in pairs]
            return found if onto is None else [x + y for x, y in zip(onto, found, strict=True)]
        pairs = [(a, b.transpose((1, 0)) if transposed else b) for a, b in pairs]

        def multiply(totals: Any) -> None:
            for total, pair in zip(totals, pairs, strict=True):
                _mosaic().wgmma(total, *pair)

        if onto is not None:
            return pl.run_state(multiply)([_mosaic().ACC.init(x) for x in onto])

        def fresh(*totals: Any) -> list[Array]:
            multiply(totals)
            started()
            return [total[...] for total in totals]

        shapes = [(a.shape[0], b.shape[1]) for a, b in pairs]
        return pl.run_scoped(fresh, *[_mosaic().ACC(shape, jnp.float32) for shape in shapes])


@functools.cache
def _mosaic() -> Any:
    # Not with the library: this takes longer to import than all of it.
    return importlib.import_module("jax.experimental.pallas.mosaic_gpu")


def _interpreter() -> Any:
    """Parameters of the interpreter, which older versions do not export."""
    name = "jax._src.pallas.mosaic_gpu.interpret.params"
    home = _mosaic() if hasattr(_mosaic(), "InterpretGPUParams") else importlib.import_module(name)
    return home.InterpretGPUParams()


class _Scale(NamedTuple):
    """A scale that is known and positive, out of the way of the loops over tiles: score functions
    take products times `before`, the softmax takes scores times `after`, in the same operation in
    which it subtracts the maximum. One of the two is 1: `before`, where score functions can count
    in units of products."""

    before: float = 1.0
    after: float = 1.0

    @classmethod
    def of(cls, spec: Spec) -> tuple["_Scale", Spec]:
        """The scale, and the spec without it."""
        scale = number(spec.scale)
        if not is_static(spec.scale) or not 0 < scale < math.inf:
            return cls(), spec
        spec = dataclasses.replace(spec, scale=1.0)
        if spec.score is None:
            return cls(after=scale), spec
        score = spec.score.per(scale)
        if score is None:
            return cls(before=scale), spec
        return cls(after=scale), dataclasses.replace(spec, score=score)

    @property
    def gradient(self) -> float:
        """What sums of the scores' cotangents still lack."""
        return self.before * self.after


class _Problem(NamedTuple):
    """The sizes of a call in whole tiles, the tiles of a program and the spec as its warpgroups
    read it: each has 64 of the program's queries, or of its keys if `by_key`."""

    shapes: Shapes
    tiling: Tiling
    rules: _SpecRefs
    unit: _Unit
    scale: _Scale
    approximate: bool
    special: bool
    drops: bool
    unmodified: bool

    @classmethod
    def of(
        cls, spec: Spec, shapes: Shapes, tiling: Tiling, interpreted: bool, by_key: bool = False
    ) -> "_Problem":
        own = Tiling(tiling.block_q, _ROWS) if by_key else Tiling(_ROWS, tiling.block_kv)
        unit = _Unit(interpreted, transposed=by_key)
        # Rows that come by have their hashes with them, others make theirs once.
        scale, spec = _Scale.of(tile.hashed(spec, shapes, rows=by_key))
        rules, drops = _SpecRefs(spec, own), spec.dropout_rate > 0
        operations, unmodified = _operations(spec, rules), _is_unmodified(spec)
        how = _approximate(spec, operations), bool(operations & _SPECIAL), drops, unmodified
        return cls(shapes, tiling, rules, unit, scale, *how)

    @property
    def by_key(self) -> bool:
        return self.unit.transposed

    @property
    def drops_alone(self) -> bool:
        """Whether dropout is all that happens to weights of products."""
        return self.drops and self.unmodified

    @property
    def blocks(self) -> tuple[int, int]:
        """How many of queries and of keys."""
        return self.shapes.T // self.tiling.block_q, self.shapes.S // self.tiling.block_kv

    @property
    def heads(self) -> int:
        """Query heads that share what a program keeps."""
        return self.shapes.G if self.by_key else 1

    def kinds(self, spec: Spec) -> Any:
        """The tile maps `[B or 1, N or 1, n, m]`."""
        return block_mask.kinds(spec, self.shapes.T, self.shapes.S, self.tiling)

    @property
    def beside(self) -> list[int]:
        """Which of the spec's arrays come by in shared memory, beside a tile of keys (queries)."""
        return self.rules.along("T" if self.by_key else "S")

    def scratch_beside(self) -> list[Any]:
        """Shared memory for these."""
        size = self.rules.sizes["T" if self.by_key else "S"]
        arrays = [self.rules.arrays[i] for i in self.beside]
        return [_mosaic().SMEM((_STAGES, size), x.dtype) for x in arrays]

    def parts_beside(self, leaves: list[Any], place: kernel_refs.TileIndex) -> list[Any]:
        """A tile's parts of these in global memory."""
        parts = self.rules.parts(leaves, place)
        return [memory.at[index] for memory, index in (parts[i] for i in self.beside)]

    def numbers(self, leaves: list[Any], b: Any, h: Any) -> dict[int, "_Value"]:
        """Those of the spec's arrays that are a number for all tiles of a head."""
        place = kernel_refs.TileIndex(b, h, 0, 0)
        parts = enumerate(zip(self.rules.parts(leaves, place), self.rules.letters, strict=True))
        alike = ((i, x, y) for i, (x, y) in parts if not {"T", "S"} & set(y))
        return {i: self.unit.read(*x, y) for i, x, y in alike}

    def tile(
        self, leaves: list[Any], place: kernel_refs.TileIndex, numbers: dict[int, "_Value"]
    ) -> "_Tile":
        """What a tile needs beside `numbers`, read before the products that are waited for, but for
        what comes by in shared memory."""
        unit, known = self.unit, dict.fromkeys(self.beside) | numbers
        parts = enumerate(zip(self.rules.parts(leaves, place), self.rules.letters, strict=True))
        read = [known[i] if i in known else unit.read(*x, letters) for i, (x, letters) in parts]
        return _Tile(unit, self.rules, read, place)


# What is only approximated by the instructions for it, too roughly for functions of positions; the
# error of tanh is 5e-4, about what rounding to 16 bits is.
_ROUGH = frozenset("sin cos tan log log1p".split())


# What the unit that computes 2^x computes too.
_SPECIAL = _ROUGH | frozenset("erf exp exp2 logistic rsqrt sqrt tanh".split())


def _operations(spec: Spec, rules: _SpecRefs) -> frozenset[str]:
    """What score functions and their derivatives are made of."""
    if spec.score is None:
        return frozenset()
    function, operands = rules.example()
    return frozenset(kernel_refs.primitives(jax.make_jaxpr(function)(*operands).jaxpr))


def _approximate(spec: Spec, operations: frozenset[str]) -> bool:
    """Whether approximate instructions will do; that for exp2 always would."""
    exact = spec.precision in ("highest", "float32", lax.Precision.HIGHEST)
    return not operations & (_ROUGH | {"tanh", "logistic"} if exact else _ROUGH)


class _Tile(NamedTuple):
    """A spec in registers."""

    unit: _Unit
    rules: _SpecRefs
    leaves: list[_Value | None]
    place: kernel_refs.TileIndex

    def completed(self, beside: Any) -> "_Tile":
        """With what came by in shared memory."""
        letter = "T" if self.unit.transposed else "S"
        run, left = (pl.ds(0, self.rules.sizes[letter]),), iter(beside)
        leaves = [
            self.unit.read(next(left), run, [letter]) if x is None else x for x in self.leaves
        ]
        return self._replace(leaves=leaves)

    def run(self, function: Callable[..., Any], *operands: Any) -> Any:
        """`function(tile, *operands)`."""
        unit, (b, h, row, column) = self.unit, self.place
        rows, columns = self.rules.sizes.values()
        at = b, h, unit.places(row, rows, "t"), unit.places(column, columns, "s")

        def here(leaves: Any, at: Any, operands: Any) -> Any:
            return function(self.rules.at(leaves, *at), *operands)

        leaves = [x for x in self.leaves if x is not None]
        given = [x.value for x in leaves], at, operands
        expected = [x.expected for x in leaves], *_types(given[1:], unit.transposed)
        runs = mosaic_interpreter.Run(row, at[2]), mosaic_interpreter.Run(column, at[3])
        return mosaic_interpreter.run(
            here, *given, shapes=expected, transposed=unit.transposed, runs=runs
        )


class _Order(NamedTuple):
    """The programs (part, b, h, i) of a launch in the order in which they start.

    Those that visit most tiles start first, so that all end at about the same time: the last ones
    of a causal mask would else go on alone. Of heads, those start together whose keys and values
    the second cache holds.
    """

    sizes: tuple[int, int]  # batch rows, heads of each
    grid: tuple[int, int, int]  # sections, blocks of each head, heads of a section; these in a row
    longest_first: Any  # the blocks, [B or 1, heads or 1, blocks], or None where all are as long

    @classmethod
    def of(
        cls, problem: _Problem, visits: block_mask.BlockMask, heads: int, parts: int = 1
    ) -> "_Order":
        """`parts` of what each block visits have programs of their own."""
        shapes, longest_first = problem.shapes, visits.longest_first(heads)
        each, units = 2 * shapes.S * shapes.H * shapes.dtype.itemsize, parts * shapes.B * heads
        most = 1 if longest_first is None else tuning.current().gpu_cached_bytes // each
        together = max(x for x in range(1, units + 1) if units % x == 0 and x <= max(1, most))
        grid = units // together, problem.blocks[problem.by_key], together
        return cls((shapes.B, heads), grid, longest_first)

    def place(self, index: tuple[Any, Any, Any], longest_first: Any) -> tuple[Any, Any, Any, Any]:
        """(part, b, h, i) of the program at this place of the grid."""
        section, rank, unit = index
        unit, (rows, heads) = section * np.int32(self.grid[2]) + unit, map(np.int32, self.sizes)
        row, h = lax.div(unit, heads), lax.rem(unit, heads)
        part, b = lax.div(row, rows), lax.rem(row, rows)
        if longest_first is None:
            return part, b, h, rank
        return part, b, h, longest_first[(*block_mask.clamped(longest_first, b, h), rank)]


def _launch(
    name: str,
    problem: _Problem,
    order: _Order,
    kernel: Any,
    operands: Any,
    results: Any,
    scratch: Any,
) -> list[Array]:
    """`kernel(place, operands, results, scratch)` in programs (part, b, h, i) of three warpgroups,
    interpreted on a CPU."""
    given = jax.tree.map(jnp.asarray, (order.longest_first, operands))
    given, over = reverse_mode.varying_alike(given)
    flat, structure = jax.tree.flatten(given)
    names = "section", "rank", "unit"

    def body(*refs: Any) -> None:
        n, m = len(flat), len(flat) + len(results)
        longest_first, operands = jax.tree.unflatten(structure, refs[:n])
        place = order.place(tuple(map(lax.axis_index, names)), longest_first)
        kernel(place, operands, refs[n:m], refs[m:])

    call = _mosaic().kernel(
        body,
        out_type=[jax.ShapeDtypeStruct(*x) for x in results],
        scratch_types=scratch,
        grid=order.grid,
        grid_names=names,
        num_threads=_GROUPS + 1,
        thread_name="warpgroup",
        kernel_name=name,
        interpret=_interpreter() if problem.unit.interpreted else False,
        compiler_params=_mosaic().CompilerParams(
            approx_math=problem.approximate,
            lowering_semantics=_mosaic().LoweringSemantics.Lane,
        ),
    )
    return [reverse_mode.vary(over.varying, x) for x in call(*flat)]


# ---------------------------------------------------------------------------------------------
# Shared memory
# ---------------------------------------------------------------------------------------------


def _tiles_in_memory(count: int, rows: int, width: int, dtype: Any) -> Any:
    """Tiles in shared memory as matrix units read them, without conflicts between its banks."""
    mosaic = _mosaic()
    swizzled = mosaic.TilingTransform((8, _WIDTH)), mosaic.SwizzleTransform(128)
    return mosaic.SMEM((count, rows, width), dtype, transforms=swizzled)


class _Ring(NamedTuple):
    """Places in shared memory that one warpgroup fills and the others use up, in turn; each holds a
    tile, or a few arrays that come and go together."""

    arrays: tuple[Any, ...]
    filled: Any
    free: Any

    @classmethod
    def scratch(cls, *arrays: Any) -> "_Ring":
        """Of arrays in shared memory `[places, ...]`."""
        return cls(
            arrays,
            _mosaic().Barrier(num_barriers=_STAGES, num_arrivals=len(arrays)),
            _mosaic().Barrier(num_barriers=_STAGES, num_arrivals=_GROUPS),
        )

    def fill(self, turn: Any, *sources: Any) -> None:
        """Copies to the place of this turn, once that is free."""
        place = _place(turn)

        @pl.when(turn >= _STAGES)
        def _() -> None:
            _mosaic().barrier_wait(self.free.at[place])

        for source, array in zip(sources, self.arrays, strict=True):
            _mosaic().copy_gmem_to_smem(source, array.at[place], self.filled.at[place])

    def drain(self, turns: Any) -> None:
        """Waits until all that was filled in so many turns is used up."""
        for place in range(_STAGES):

            @pl.when(turns > place)
            def _(place: int = place) -> None:
                _mosaic().barrier_wait(self.free.at[place])

    def use(self, turn: Any, function: Callable[..., Any]) -> Any:
        """`function(*arrays)` of this turn, once they are there; their place is free afterwards."""
        place = _place(turn)
        _mosaic().barrier_wait(self.filled.at[place])
        found = function(*[x.at[place] for x in self.arrays])
        _mosaic().barrier_arrive(self.free.at[place])
        return found


def _place(turn: Any) -> Any:
    return lax.bitwise_and(turn, np.int32(_STAGES - 1))


# ---------------------------------------------------------------------------------------------
# The kernels
# ---------------------------------------------------------------------------------------------


_LOG2E = math.log2(math.e)
_NEAR = 256.0  # numbers below have 15 digits behind the binary point, and more
_LOWEST = float(jnp.finfo(jnp.float32).min) / 2  # times log₂ e it is finite


def _online(
    masked: bool,
    factors: _Scale,
    special: bool,
    here: slicing.Tile,
    products: Array,
    part: softmax.Partial,
) -> tuple[Array, softmax.Partial]:
    """The weights of more keys, and what there is so far, both relative to a new maximum. The unit
    for 2^x computes weights alone where it has `special` functions of scores to compute."""
    exp2 = _exp2_by_products if special else jnp.exp2
    score = here.modify(_times(products, factors.before), masked)
    maximum = jnp.maximum(part.maximum, _times(jnp.max(score, axis=-1), factors.after))
    shift = maximum * _LOG2E
    weights = jnp.exp2(_exponent(score, factors, shift))
    scale = exp2(part.maximum * _LOG2E - shift)
    total = part.total * scale + jnp.sum(weights, axis=-1)
    return here.drop(weights), softmax.Partial(maximum, total, part.weighted * scale[:, None])


# Of 2^r for |r| of at most a half, from r^5 down: relative error 9e-8, and none at 0, where a
# maximum stays what it was.
_POWERS = 1.32647272e-3, 9.67151268e-3, 5.55073374e-2, 2.40222421e-1, 6.93146978e-1, 1.0


def _exp2_by_products(x: Array) -> Array:
    """2^x for x of at most 0, and 2^-126 below -126."""
    x = jnp.maximum(x, -126.0)
    magic = np.float32(1.5 * 2**23)  # adding it rounds, and leaves an integer in the lowest bits
    bits = lax.bitcast_convert_type(x + magic, jnp.int32)
    rest = x - (bits - magic.view(np.int32)).astype(jnp.float32)
    power = functools.reduce(lambda found, one: found * rest + one, _POWERS, jnp.zeros_like(x))
    power = lax.bitcast_convert_type(power, jnp.int32) + lax.shift_left(bits, np.int32(23))
    return lax.bitcast_convert_type(power, jnp.float32)


def _exponent(score: Array, factors: _Scale, shift: Array) -> Array:
    """To the base 2, relative to a shift, in one operation for each score.

    What that rounds differs from what `shift` was rounded to, by a factor for each row; so the
    backward pass computes the same from the same maximum.
    """
    return score * (factors.after * _LOG2E) - shift[:, None]


def _times(x: Array, factor: float) -> Array:
    return x if factor == 1 else x * factor


class _Memory(NamedTuple):
    """Shared memory: what each computing warpgroup keeps, where its results leave too, and what
    comes by in turn."""

    own: Any
    filled: Any
    streams: tuple[_Ring, ...]
    turns: Any

    @classmethod
    def scratch(cls, own: Any, *streams: Any) -> "_Memory":
        """Of the arrays of each stream."""
        filled = _mosaic().Barrier(num_barriers=2 * _GROUPS)
        turns = _mosaic().Barrier(num_arrivals=_GROUPS)
        return cls(own, filled, tuple(_Ring.scratch(*arrays) for arrays in streams), turns)

    def change_turns(self) -> None:
        """Waits until the other computing warpgroup comes here too: one is at its products then,
        the other at its softmax, and after the next call the other way round."""
        _mosaic().barrier_arrive(self.turns)
        _mosaic().barrier_wait(self.turns)

    def load(self, which: int, group: Any, source: Any) -> Any:
        """One of the arrays that a warpgroup keeps."""
        mosaic, own, filled = _mosaic(), self.own[which].at[group], 2 * group + which
        mosaic.copy_gmem_to_smem(source, own, self.filled.at[filled])
        mosaic.barrier_wait(self.filled.at[filled])
        return own

    def drain(self, turns: Any) -> None:
        """Waits until all that came by in so many turns is used up."""
        for stream in self.streams:
            stream.drain(turns)


def _store(pairs: Any) -> None:
    """Results from shared memory to global memory."""
    _mosaic().commit_smem()
    for source, result in pairs:
        _mosaic().copy_smem_to_gmem(source, result)
    _mosaic().wait_smem_to_gmem(0)


def _by_group(copy: Callable[[], None], compute: Callable[[Any], None]) -> None:
    """What the warpgroups of a program do: `compute(group)` most, `copy()` one, with registers to
    match."""
    group = lax.axis_index("warpgroup")

    @pl.when(group == _GROUPS)
    def _() -> None:
        _mosaic().set_max_registers(24, action="decrease")
        copy()

    @pl.when(group < _GROUPS)
    def _() -> None:
        _mosaic().set_max_registers(240, action="increase")
        compute(group)


def _forward(problem: _Problem, spec: Spec, query: Array, key: Array, value: Array) -> Any:
    """Output `[B, T, N, V]` and normalizer `[B, T, N]`; a program for every 128 queries, or for
    each of them and each part of the keys (Dao et al. 2023, "Flash-Decoding")."""
    shapes, (rows, columns), unit = problem.shapes, problem.tiling, problem.unit
    visits = block_mask.of(problem.kinds(spec))
    parts = block_mask.parts(shapes.B * shapes.N * problem.blocks[0], problem.blocks[1])

    def kernel(place: Any, operands: Any, results: Any, scratch: Any) -> None:
        (query, key, value, leaves, visits_ref), memory = operands, _Memory(*scratch)
        (part, b, h, i), kv = place, lax.div(place[2], np.int32(shapes.G))
        fold = functools.partial(visits.fold, visits_ref, (b, h, i), part=(part, parts))

        def copy() -> None:
            def step(j: Any, masked: bool, turn: Any) -> Any:
                run = pl.ds(j * columns, columns)
                place = kernel_refs.TileIndex(b, h, i * rows, j * columns)
                beside = problem.parts_beside(leaves, place)
                memory.streams[0].fill(turn, key.at[b, run, kv], *beside)
                memory.streams[1].fill(turn, value.at[b, run, kv])
                return turn + 1

            memory.drain(fold(step, jnp.int32(0)))

        def compute(group: Any) -> None:
            row = i * rows + group * _ROWS
            own = pl.ds(row, _ROWS)
            q = memory.load(0, group, query.at[b, own, h])
            numbers = problem.numbers(leaves, b, h)

            def step(j: Any, masked: bool, state: Any) -> Any:
                turn, before = state
                here = problem.tile(leaves, kernel_refs.TileIndex(b, h, row, j * columns), numbers)

                def by_key(k: Any, *beside: Any) -> Any:
                    pair, change = [(q, k)], memory.change_turns
                    (products,) = unit.products(pair, transposed=True, started=change)
                    return products, here.completed(beside)

                products, here = memory.streams[0].use(turn, by_key)
                online = functools.partial(_online, masked, problem.scale, problem.special)
                weights, found = here.run(online, products, before)
                weights = weights.astype(shapes.dtype)
                memory.change_turns()
                weigh = lambda v: unit.products([(weights, v)], onto=[found.weighted])  # noqa: E731
                (weighted,) = memory.streams[1].use(turn, weigh)
                return turn + 1, found._replace(weighted=weighted)

            laid = map(unit.lay, _nothing(shapes.V), ("t", "t", "ts"))
            state = jnp.int32(0), softmax.Partial(*laid)
            pl.when(group == 1)(memory.change_turns)
            _, found = fold(step, state)
            pl.when(group == 0)(memory.change_turns)
            _leave(memory, group, found, (part, b, h, own), results)

        _by_group(copy, compute)

    operands = query, key, value, problem.rules.arrays, visits.arrays
    order, name = _Order.of(problem, visits, shapes.N, parts), "jattn_hopper_forward"
    results, scratch = _forward_results(shapes, parts), _forward_scratch(problem)
    out, *along = _launch(name, problem, order, kernel, operands, results, scratch)
    return softmax.join(out, softmax.Normalizer(*(jnp.swapaxes(x, 2, 3) for x in along)))


def _forward_results(shapes: Shapes, parts: int) -> list[Any]:
    """Of each part of the keys; outputs that are yet to be joined are in float32."""
    heads = (parts, shapes.B, shapes.N, shapes.T), jnp.float32
    out = parts, shapes.B, shapes.T, shapes.N, shapes.V
    return [(out, jnp.float32 if parts > 1 else shapes.dtype), heads, heads]


def _forward_scratch(problem: _Problem) -> _Memory:
    shapes, columns = problem.shapes, problem.tiling.block_kv
    queries = _tiles_in_memory(_GROUPS, _ROWS, shapes.H, shapes.dtype)
    kept = queries, *[_mosaic().SMEM((_GROUPS, _ROWS), jnp.float32)] * 2
    tiles = _tiles_in_memory(_STAGES, columns, shapes.H, shapes.dtype)
    return _Memory.scratch(kept, (tiles, *problem.scratch_beside()), (tiles,))


def _leave(memory: _Memory, group: Any, found: softmax.Partial, at: Any, results: Any) -> None:
    """Output and normalizer of a warpgroup's queries, through the memory that it keeps; the output
    of a part of the keys as it is, in float32."""
    (part, b, h, own), (queries, *kept) = at, (place.at[group] for place in memory.own)
    out, normalizer = mosaic_interpreter.run(softmax.finish, found)
    result = results[0].at[part, b, own, h]
    apart = result.dtype != queries.dtype
    if apart:
        result[...] = out
    else:
        queries[...] = out.astype(queries.dtype)
    for place, x in zip(kept, normalizer, strict=True):
        place[...] = x
    along = [(x, to.at[part, b, h, own]) for x, to in zip(kept, results[1:], strict=True)]
    _store(along if apart else [(queries, result), *along])


def _nothing(width: int) -> softmax.Partial:
    """What no keys contribute."""
    total, weighted = (jnp.zeros(shape, jnp.float32) for shape in ((_ROWS,), (_ROWS, width)))
    return softmax.Partial(jnp.full((_ROWS,), _LOWEST, jnp.float32), total, weighted)


class _Rows(NamedTuple):
    """What the backward pass knows of a row of queries: the softmax's shift and the log of its
    total, both to the base 2, and the sum of output times its cotangent."""

    shift: Any
    log_total: Any
    delta: Any

    @classmethod
    def stacked(cls, per_query: Any) -> tuple[Array, Array]:
        """`[B, N, blocks of 64, 3 · 64]`, of maximum, log_total and delta `[B, T, N]`; and the
        heads `[B, N]` in which shift and log of the total cannot be one number, which would have
        too few digits. In others it is the shift, and the log is 0."""
        maximum, log_total, delta = (jnp.swapaxes(x, 1, 2) for x in per_query)
        shift, log_total = maximum * _LOG2E, log_total * _LOG2E
        near = jnp.abs(shift + log_total) < _NEAR
        far = jnp.any(~near, axis=2)
        apart = far[..., None]
        shift, log_total = (
            jnp.where(apart, shift, shift + log_total),
            jnp.where(apart, log_total, 0),
        )
        rows = jnp.stack(cls(shift, log_total, delta), axis=2)
        blocks = rows.reshape(*rows.shape[:3], -1, _ROWS).swapaxes(2, 3)
        return blocks.reshape(*blocks.shape[:3], 3 * _ROWS), far

    @classmethod
    def read(cls, unit: _Unit, memory: Any, *block: Any) -> "_Rows":
        """Of a block of queries, from shared or global memory."""
        letters = [""] * len(block) + ["t"]
        runs = [pl.ds(i * _ROWS, _ROWS) for i in range(3)]
        return cls(*(unit.read(memory, (*block, run), letters).value for run in runs))


def _d_products(
    masked: bool,
    factors: _Scale,
    here: slicing.Tile,
    products: Array,
    d_weights: Array,
    rows: _Rows,
) -> tuple[Array, Array]:
    """The cotangent of q kᵀ from that of the weights, d_out vᵀ, less `factors.gradient`; and the
    weights after dropout.

    With weights p, the scores' cotangent is p (d_weights − delta). Without dropout `d_weights` come
    without delta, from which their sum started.
    """
    spec = here.spec
    if spec.dropout_rate:
        d_weights = here.drop(d_weights) - rows.delta[:, None]
    products = _times(products, factors.before)
    if _is_unmodified(spec):
        weights = _unmodified_weights(masked, factors, here, products, rows)
        return _d_unmodified(masked, here, weights, d_weights), here.drop(weights)
    score, pull = jax.vjp(lambda x: here.modify(x, masked), products)
    weights = _weights(masked, factors, score, rows)
    if masked:  # also in a row that is NaN
        weights = jnp.where(score == -jnp.inf, 0, weights)
    return pull(weights * d_weights)[0], here.drop(weights)


def _is_unmodified(spec: Spec) -> bool:
    """Whether scores are products of queries and keys, but for the mask."""
    return spec.score is None and is_static(spec.scale) and spec.scale == 1


def _unmodified_weights(
    masked: bool, factors: _Scale, here: slicing.Tile, products: Array, rows: _Rows
) -> Array:
    """Those of products, 0 where masked also in a row that is NaN."""
    spec, weights = here.spec, _weights(masked, factors, products, rows)
    if not masked or not has_mask(spec):
        return weights
    return jnp.where(spec.mask.evaluate(here.b, here.h, here.rows, here.columns), weights, 0)


def _d_unmodified(masked: bool, here: slicing.Tile, weights: Array, d_weights: Array) -> Array:
    found = weights * d_weights
    return jnp.where(weights == 0, 0, found) if masked and has_mask(here.spec) else found


def _signed(
    masked: bool, factors: _Scale, here: slicing.Tile, products: Array, rows: _Rows
) -> Array:
    """Weights, and in their sign whether dropout drops them: one number each in registers."""
    weights = _unmodified_weights(masked, factors, here, products, rows)
    return jnp.where(here.keeps(), weights, -weights)


def _d_signed(
    masked: bool,
    factors: _Scale,
    here: slicing.Tile,
    signed: Array,
    d_weights: Array,
    rows: _Rows,
) -> tuple[Array, Array]:
    """`_d_products` from what `_signed` gives."""
    dropped, weights = signed < 0, jnp.abs(signed)
    kept = jnp.where(dropped, 0, 1 / (1 - here.spec.dropout_rate)).astype(jnp.float32)
    d_weights = d_weights * kept - rows.delta[:, None]
    return _d_unmodified(masked, here, weights, d_weights), weights * kept


def _weights(masked: bool, factors: _Scale, score: Array, rows: _Rows) -> Array:
    """Those of a tile. Where no mask is needed, a log of the total is part of the shift, or left to
    the end."""
    exponent = _exponent(score, factors, rows.shift)
    if masked and rows.log_total is not None:
        exponent = exponent - rows.log_total[:, None]
    return jnp.exp2(exponent)


class _Backward(NamedTuple):
    """A program of a backward pass: 128 queries or, `by_key`, 128 keys, of which each computing
    warpgroup keeps 64 and goes through what they attend to, or are attended by.

    `per_query` are query and d_out, `per_key` key and value, `rows` what `_Rows` stacks.
    """

    problem: _Problem
    visits: block_mask.BlockMask
    at: Any
    per_query: Any
    per_key: Any
    rows: Any
    leaves: list[Any]
    visits_ref: Any

    @property
    def kept(self) -> Any:
        return self.per_key if self.problem.by_key else self.per_query

    @property
    def streamed(self) -> Any:
        return self.per_query if self.problem.by_key else self.per_key

    def fold(self, step: Callable[..., Any], state: Any) -> Any:
        """Folds `step(h, x, masked, state)` over the heads that share what is kept, and over the
        blocks x that each of them visits."""
        heads = self.problem.heads

        def of_head(g: Any, state: Any) -> Any:
            h = self.at[1] * heads + g
            place = self.at[0], h, self.at[2]
            return self.visits.fold(self.visits_ref, place, functools.partial(step, h), state)

        return tile_schedule.repeat(0, heads, of_head, state)

    def copy(self, memory: _Memory) -> None:
        """What the warpgroup does that only copies."""
        group, by_key = np.int32(self.problem.shapes.G), self.problem.by_key

        def step(h: Any, x: Any, masked: bool, turn: Any) -> Any:
            head = h if by_key else lax.div(h, group)
            index = self.at[0], pl.ds(x * _ROWS, _ROWS), head
            tiles = [source.at[index] for source in self.streamed]
            place = self.place(h, self.at[2] * _GROUPS * _ROWS, x * _ROWS)
            rows = [self.rows.at[self.at[0], h, x]] if by_key else []
            beside = self.problem.parts_beside(self.leaves, place)
            memory.streams[0].fill(turn, *tiles, *rows, *beside)
            return turn + 1

        memory.drain(self.fold(step, jnp.int32(0)))

    def compute(self, memory: _Memory, results: Any, group: Any) -> None:
        """What a warpgroup does that computes."""
        block = self.at[2] * _GROUPS + group
        start, unit, by_key = block * _ROWS, self.problem.unit, self.problem.by_key
        own = self.at[0], pl.ds(start, _ROWS), self.at[1]
        kept = [memory.load(x, group, self.kept[x].at[own]) for x in range(2)]
        mine = None if by_key else _Rows.read(unit, self.rows, *self.at[:2], block)

        numbers = {} if self.problem.heads > 1 else self.problem.numbers(self.leaves, *self.at[:2])

        def step(h: Any, x: Any, masked: bool, state: Any) -> Any:
            turn, *totals = state
            here = self.problem.tile(self.leaves, self.place(h, start, x * _ROWS), numbers)

            # Always 0, which the compiler does not know: addresses of what is kept are computed
            # where they are used, and take up no registers.
            zero = lax.shift_right_logical(turn, np.int32(30)) if by_key else 0
            near = [x.at[group + zero] for x in memory.own]
            add = functools.partial(self.add, here, masked, mine, near, totals)
            return turn + 1, *memory.streams[0].use(turn, add)

        zeros = [jnp.zeros((_ROWS, self.problem.shapes.H), jnp.float32) for _ in results]
        _, *found = self.fold(step, (jnp.int32(0), *(unit.lay(x, "ts") for x in zeros)))
        found = self.finished(found, mine)
        for place, total in zip(kept, found, strict=False):
            place[...] = total.astype(place.dtype)
        _store([(x, y.at[own]) for x, y in zip(kept, results, strict=False)])

    def place(self, h: Any, start: Any, other: Any) -> kernel_refs.TileIndex:
        """That of the tile of what is kept and what comes by."""
        row, column = (other, start) if self.problem.by_key else (start, other)
        return kernel_refs.TileIndex(self.at[0], h, row, column)

    def add(
        self, here: "_Tile", masked: bool, mine: Any, kept: Any, totals: Any, *arrays: Any
    ) -> list[Array]:
        """The totals with what a tile adds, whose arrays came by."""
        unit, problem, streamed, beside = self.problem.unit, self.problem, arrays[:2], arrays[2:]
        (products,), (d_weights,) = ([pair] for pair in zip(kept, streamed, strict=True))
        (products,) = unit.products([products], transposed=True)
        if mine is None:
            rows, here = _Rows.read(unit, beside[0]), here.completed(beside[1:])
        else:
            rows, here = mine._replace(log_total=None), here.completed(beside)
        if problem.drops_alone:
            products = here.run(functools.partial(_signed, masked, problem.scale), products, rows)
        onto = None if problem.drops else [unit.spread(-rows.delta, "t")]
        (d_weights,) = unit.products([d_weights], transposed=True, onto=onto)
        d_products = _d_signed if problem.drops_alone else _d_products
        d_products = functools.partial(d_products, masked, problem.scale)
        found = here.run(d_products, products, d_weights, rows)
        factors = [(x.astype(y.dtype), y) for x, y in zip(found, streamed, strict=True)]
        return unit.products(factors[: len(totals)], onto=totals)

    def finished(self, totals: list[Array], rows: _Rows | None) -> list[Array]:
        """The gradients from the totals."""
        factor = self.problem.scale.gradient
        first, *others = totals
        if rows is None:
            return [_times(first, factor), *others]

        def normalized(total: Array, log_total: Array) -> Array:
            return total * _times(jnp.exp2(-log_total), factor)[:, None]

        return [mosaic_interpreter.run(normalized, first, rows.log_total)]


def _gradients(
    problem: _Problem, spec: Spec, per_head: Any, key: Array, value: Array
) -> list[Array]:
    """Those of queries, or of keys and values where `problem.by_key`."""
    shapes, by_key = problem.shapes, problem.by_key
    visits = block_mask.of(problem.kinds(spec), by_key=by_key)
    query, d_out, *rows = per_head
    rows, far = _Rows.stacked(rows)
    if by_key:
        visits = visits.without_full(far)

    def kernel(place: Any, operands: Any, results: Any, scratch: Any) -> None:
        program = _Backward(problem, visits, place[1:], *operands)
        memory = _Memory(*scratch)
        _by_group(
            functools.partial(program.copy, memory),
            functools.partial(program.compute, memory, results),
        )

    operands = (query, d_out), (key, value), rows, problem.rules.arrays, visits.arrays
    results = [(x.shape, shapes.dtype) for x in ((key, value) if by_key else (query,))]
    kept = [_tiles_in_memory(_GROUPS, _ROWS, shapes.H, shapes.dtype) for _ in range(2)]
    beside = [_mosaic().SMEM((_STAGES, 3 * _ROWS), jnp.float32)] if by_key else []
    tiles = _tiles_in_memory(_STAGES, _ROWS, shapes.H, shapes.dtype)
    stream = tiles, tiles, *beside, *problem.scratch_beside()
    scratch = _Memory.scratch(tuple(kept), stream)
    name = "jattn_hopper_d_keys" if by_key else "jattn_hopper_d_queries"
    heads = shapes.K if by_key else shapes.N
    order = _Order.of(problem, visits, heads)
    return _launch(name, problem, order, kernel, operands, results, scratch)


# ---------------------------------------------------------------------------------------------
# The call
# ---------------------------------------------------------------------------------------------


def _width(H: int, V: int) -> int:
    """The one head size of a call as kernels take it, of keys and values alike."""
    return -(-max(H, V) // _WIDTH) * _WIDTH


def _padded(
    tiling: Tiling, spec: Spec, rows: tuple[Array, ...], key: Array, value: Array
) -> slicing.Call:
    width = _width(key.shape[3], value.shape[3])
    return slicing.Call.of(tiling, lambda _: width, spec, rows, key, value)


def _unpadded(x: Array, shape: tuple[int, ...]) -> Array:
    return slicing.unpadded(x, shape).astype(jnp.float32)


def _forward_pass(
    platform: str, spec: Spec, query: Array, key: Array, value: Array
) -> tuple[Array, softmax.Normalizer, Array]:
    tiling = choose_tiling(Shapes.of(query, value))
    spec, shapes, (q,), k, v = _padded(tiling, spec, (query,), key, value)
    if has_mask(spec):
        # What is masked does not exist: NaN reaches those that attend to it through the scores.
        marks = jax.vmap(jax.vmap(tile.nan_where_nonfinite))(v)[..., None]
        k, v = k + marks.astype(k.dtype), tile.finite(v)
    problem = _Problem.of(spec, shapes, tiling, platform == "cpu")
    out, normalizer = _forward(problem, spec, q, k, v)
    rows = query.shape[:3]
    normalizer = jax.tree.map(lambda x: _unpadded(x, rows), normalizer)
    return _unpadded(out, (*rows, value.shape[3])), normalizer, jnp.zeros((), bool)


def _backward_pass(
    platform: str, spec: Spec, per_query: Any, key: Array, value: Array, all_finite: Array
) -> tuple[list[Array], Array, Array, Array]:
    """Those of parameters by `triton`, and all where heads are too wide for shared memory or
    arrays along T and S would have to be transposed."""
    if _width(key.shape[3], value.shape[3]) > _WIDEST_BACKWARD or _runs_along_both(spec):
        return triton.functions(platform).backward(spec, per_query, key, value, all_finite)
    d_params = triton.parameter_gradients(platform, spec, per_query, key, value)
    small, wide = _ROWS, _GROUPS * _ROWS
    call = _padded(Tiling(wide, wide), spec, cast_cotangent(per_query), key, value)
    (query, d_out, *rows), keys = call.rows, (call.key, call.value)
    if has_mask(spec):
        # Rows with NaN in them reach those that attend to them through maximum and delta.
        query, d_out, *keys = map(tile.finite, (query, d_out, *keys))
    operands = (query, d_out, *rows), *keys
    by_query, by_key = (
        _Problem.of(call.spec, call.shapes, Tiling(*sizes), platform == "cpu", transposed)
        for sizes, transposed in (((wide, small), False), ((small, wide), True))
    )
    (d_query,) = _gradients(by_query, call.spec, *operands)
    d_key, d_value = _gradients(by_key, call.spec, *operands)
    pairs = (d_query, per_query[0]), (d_key, key), (d_value, value)
    d_query, d_key, d_value = (_unpadded(d, x.shape) for d, x in pairs)
    return d_params, d_query, d_key, d_value


def _runs_along_both(spec: Spec) -> bool:
    def one(letters: str, leaf: Any) -> bool:
        axes = [axis_of(x, letters, leaf.ndim) for x in "TS"]
        return all(axis is not None and leaf.shape[axis] > 1 for axis in axes)

    return any(jax.tree.leaves(jax.tree.map(one, axis_names(spec), spec)))


def functions(platform: str) -> AttentionVJP:
    """Forward and backward; interpreted on a CPU."""
    forward, backward = (functools.partial(f, platform) for f in (_forward_pass, _backward_pass))
    return AttentionVJP(with_headroom(forward), backward)
