"""A tile as a warpgroup of a GPU holds it: 64 rows of products, spread over the registers of 128
threads, with the part of a spec that belongs to them.

The layout is that of the matrix units: a thread has rows r and r + 8 of a tile, and of each eight
columns two. Out of Blackwell's tensor memory come 128 rows, one for each thread. Functions of masks
and scores run on such arrays through `mosaic_interpreter`.
"""

import dataclasses
import enum
import functools
import importlib
import inspect
import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from jattn import dropout, masks, scores
from jattn._pytree import is_static, number
from jattn.kernels.common import block_mask, slicing
from jattn.kernels.gpu import kernel_refs, mosaic_interpreter
from jattn.kernels.gpu.kernel_refs import TileIndex
from jattn.kernels.gpu.lookup import Table, gather
from jattn.masks import Span
from jattn.spec import Shapes, Spec, Tiling


WIDTH = 64  # head sizes are multiples of it: a row of a tile in shared memory is 128 bytes
ROWS = 64  # queries of a warpgroup: what one instruction multiplies
TENSOR_ROWS = 128  # the same where products leave to tensor memory


class SpecRefs(kernel_refs.SpecRefs):
    """A spec as a warpgroup reads it. Booleans are bytes, as they are in memory; arrays along T and
    S are transposed where tiles are; those that functions index, `tables`, are flat."""

    def __init__(self, spec: Spec, tiling: Tiling, transposed: bool = False):
        super().__init__(spec, tiling)
        self.boolean = [x.dtype == bool for x in self.arrays]
        self.arrays = [x.astype(jnp.int8) if x.dtype == bool else x for x in self.arrays]
        self.turned = [transposed and {"T", "S"} <= set(x) for x in self.letters]
        self.tables: dict[int, tuple[Table, list[str]]] = {}
        for i, (x, index) in enumerate(self.parts(self.arrays, TileIndex(0, 0, 0, 0))):
            if None in index:
                self._flatten(i, x)
            elif self.turned[i]:
                self._turn(i)

    def _flatten(self, i: int, x: Array) -> None:
        if {"T", "S"} & set(self.letters[i]):
            raise NotImplementedError("to look up entries of an array along T or S")
        if x.size > np.iinfo(np.int32).max:
            raise NotImplementedError(f"to look up entries of an array of {x.size} numbers")
        self.tables[i] = Table(i, x.shape, x.dtype), self.letters[i]
        self.arrays[i], self.letters[i] = x.reshape(-1), ["entries"]

    def _turn(self, i: int) -> None:
        names = self.letters[i]
        t, s = names.index("T"), names.index("S")
        self.arrays[i] = self.arrays[i].swapaxes(t, s)
        self.letters[i] = [{"T": "S", "S": "T"}.get(x, x) for x in names]

    def at(self, leaves: list[Any], b: Any, h: Any, rows: Any, columns: Any) -> slicing.Tile:
        """The tile of these parts of the arrays, at these places. Of tables there are no parts."""
        pairs = zip(leaves, self.boolean, strict=True)
        leaves = [x != 0 if boolean and x is not None else x for x, boolean in pairs]
        for i, (table, letters) in self.tables.items():
            selected = self._index(table, letters, TileIndex(b, h, 0, 0))
            leaves[i] = table.seen(selected, self.boolean[i])
        found = self.assembled(leaves, b, h, rows, columns)
        if self.tables:  # which may be read by the diagonals of whole matrices
            return found
        if found.spec.q_positions is None and found.spec.kv_positions is None:
            return found._replace(rows=Span(rows, rows), columns=Span(columns, columns))
        return found

    def example(self) -> tuple[Callable[..., Any], Any]:
        """A function from a tile's products to scores and their derivative, and operands of it, to
        be traced."""
        rows, columns = (jnp.arange(size, dtype=jnp.int32) for size in self.sizes.values())
        zero = jnp.zeros((), jnp.int32)
        place = TileIndex(zero, zero, zero, zero)
        parts = [_part(x, index) for x, index in self.parts(self.arrays, place)]
        parts = [x if x is None or not y else x.T for x, y in zip(parts, self.turned, strict=True)]
        products = jnp.zeros(tuple(self.sizes.values()), jnp.float32)

        def modify(*operands: Any) -> Any:
            *at, products = operands
            score, pull = jax.vjp(lambda x: self.at(*at).modify(x, True), products)
            return score, pull(score)

        return modify, (parts, zero, zero, rows, columns, products)

    def run_example(self, function: Callable[..., Any], operands: Any) -> Any:
        """A function of the operands of `example`, in registers."""
        given = jax.tree.map(jnp.squeeze, operands)

        def zeros(dtype: Any, at: Array, axes: str) -> Array:
            return jnp.zeros(at.shape, dtype)

        tables = {i: functools.partial(zeros, x.dtype) for i, (x, _) in self.tables.items()}
        shapes = types(operands)
        return mosaic_interpreter.run(function, *given, tables=tables, shapes=shapes)

    def differs_by_key(self) -> bool:
        """Whether a tile reads numbers for each of its keys."""
        return bool(self.tables) or any("S" in x for x in self.letters)

    @property
    def varying(self) -> list[int]:
        """Which arrays tiles of a head read different parts of."""
        parts = {"T", "S", "entries"}
        return [i for i, letters in enumerate(self.letters) if parts & set(letters)]

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


def _part(memory: Array, index: tuple[Any, ...]) -> Array | None:
    if None in index:
        return None
    return jnp.zeros([x.size for x in index if isinstance(x, pl.Slice)], memory.dtype)


def types(operands: Any, transposed: bool = False) -> Any:
    step = -1 if transposed else 1
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[::step], x.dtype), operands)


class _Value(NamedTuple):
    """An array in registers, without axes of size 1, and its type with them; `axes` are those of a
    tile along which it runs."""

    value: Any
    expected: Any
    axes: str


def _is_value(x: Any) -> bool:
    return isinstance(x, _Value)


class _InMemory(NamedTuple):
    """A table, of which a tile looks up what it needs."""

    memory: Any


class Products(enum.Enum):
    """What multiplies: a warpgroup together, as on Hopper; single warps, as on all GPUs since
    Ampere; or Blackwell's matrix units, which leave products in a memory of their own."""

    WARPGROUP = enum.auto()
    WARP = enum.auto()
    TENSOR_MEMORY = enum.auto()


class Unit(NamedTuple):
    """What a warpgroup computes with, and how arrays lie in its registers: `axes` names the axes
    of a tile "ts" along which they run; rows of a transposed tile are keys.

    JAX's interpreter knows neither layouts nor all operands of products: there XLA multiplies.
    `apart`: a row out of tensor memory lies in four threads, as rows of other products do. Each has
    a quarter of the columns then.
    """

    interpreted: bool
    transposed: bool = False
    by: Products = Products.WARPGROUP
    apart: bool = False

    @property
    def by_warp(self) -> bool:
        return self.by is Products.WARP

    @property
    def rows(self) -> int:
        """Queries of a warpgroup, or keys."""
        return TENSOR_ROWS if self.by is Products.TENSOR_MEMORY else ROWS

    def lay(self, x: Any, axes: str) -> Any:
        if self.interpreted or not axes:
            return x
        return mosaic().layout_cast(x, self.layout(axes))

    def layout(self, axes: str) -> Any:
        of_tile, along_rows = self._layout_of_tile(), "s" if self.transposed else "t"
        if len(axes) == 2:
            return of_tile
        return of_tile.reduce(1 if axes == along_rows else 0)

    def _layout_of_tile(self) -> Any:
        layouts = mosaic().Layout
        if self.by is not Products.TENSOR_MEMORY:
            return layouts.WGMMA
        return layouts.TCGEN05 if self.apart else layouts.TCGEN05_TMEM_NATIVE

    def look_up(self, memory: Any, places: Array, axes: str) -> Array:
        """Entries of a flat array in global memory."""
        if self.interpreted:
            return memory[...][places]
        if not axes:
            return memory[places]
        return gather(mosaic(), memory, self.lay(places, axes), self.layout(axes))

    def spread(self, along: Array, size: int) -> Array:
        """A tile that is the same along keys, of which there are so many."""
        t = along.shape[0]
        shape, axis = ((size, t), 1) if self.transposed else ((t, size), 0)
        return self.lay(lax.broadcast_in_dim(along, shape, (axis,)), "ts")

    def places(self, start: Any, size: int, axis: str) -> Array:
        return start + self.lay(lax.iota(jnp.int32, size), axis)

    def read(self, memory: Any, index: tuple[Any, ...], letters: list[str]) -> _Value:
        """A part of an array in global memory."""
        runs = [isinstance(x, pl.Slice) for x in index]
        sizes = [x.size for x, run in zip(index, runs, strict=True) if run]
        wide = [run and x.size > 1 for x, run in zip(index, runs, strict=True)]
        axes = "".join(x.lower() for x, run in zip(letters, wide, strict=False) if run)
        index = tuple(0 if x > y else z for x, y, z in zip(runs, wide, index, strict=True))
        turned = self.transposed and {"T", "S"} <= set(letters)
        expected = jax.ShapeDtypeStruct(tuple(sizes[:: -1 if turned else 1]), memory.dtype)
        if self.interpreted or not axes:
            return _Value(memory[index], expected, axes)
        part, load = memory.at[index], mosaic().load
        older = [()] if "idx" in inspect.signature(load).parameters else []
        return _Value(self.lay(load(part, *older, optimized=False), axes), expected, axes)

    def held(self) -> mosaic_interpreter.Held:
        """How functions of tiles hold arrays: what two rows of a thread share, once."""
        lay = functools.partial(self.lay, axes="ts")
        if self.interpreted or (self.by is Products.TENSOR_MEMORY and not self.apart):
            return mosaic_interpreter.Held(lay)  # there a thread has one row
        shared = functools.partial(self._named, change=_share, axes="t")
        diagonals = functools.partial(self._named, change=_share_diagonals, axes="ts")
        return mosaic_interpreter.Held(lay, shared, diagonals)

    def _named(self, x: Array, change: Callable[[Any], None], axes: str) -> Array:
        """The same array, some of whose registers, which are equal, have other names."""
        lower = importlib.import_module("jax.experimental.mosaic.gpu")
        layout = self.layout(axes)
        result = mosaic().ShapeDtypeStruct(x.shape, x.dtype, layout=layout)

        @mosaic().inline_mgpu(arg_types=(layout,), return_type=result)
        def named(_: Any, x: Any) -> Any:
            registers = x.registers.copy()
            change(registers)
            how = {"_layout": x.layout, "_is_signed": x.is_signed}
            return lower.FragmentedArray(_registers=registers, **how)

        return named(x)

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
        if self.by_warp:
            onto = [None for _ in pairs] if onto is None else onto
            return [self._by_warp(a, b, x) for (a, b), x in zip(pairs, onto, strict=True)]

        def multiply(totals: Any) -> None:
            for total, pair in zip(totals, pairs, strict=True):
                mosaic().wgmma(total, *pair)

        if onto is not None:
            return pl.run_state(multiply)([mosaic().ACC.init(x) for x in onto])

        def fresh(*totals: Any) -> list[Array]:
            multiply(totals)
            started()
            return [total[...] for total in totals]

        shapes = [(a.shape[0], b.shape[1]) for a, b in pairs]
        return pl.run_scoped(fresh, *[mosaic().ACC(shape, jnp.float32) for shape in shapes])

    def _by_warp(self, a: Any, b: Any, total: Array | None) -> Array:
        zeros = jnp.zeros((a.shape[0], b.shape[1]), jnp.float32)
        found = self.lay(zeros, "ts") if total is None else total
        runs = [pl.ds(start, WIDTH) for start in range(0, a.shape[1], WIDTH)]
        # What is in memory comes to registers by parts.
        pairs = [(a, b)] if isinstance(a, jax.Array) else [(a.at[:, x], b.at[x]) for x in runs]
        for left, other in pairs:
            right = mosaic().load(other, layout=mosaic().Layout.MMA_RHS(other.dtype))
            found = mosaic().mma(found, _as_left(left), right)
        return found


def _share(registers: Any) -> None:
    """Those of rows that are 8 apart, or of columns."""
    registers.flat[1::2] = registers.flat[::2]


def _share_diagonals(registers: Any) -> None:
    """Those of rows and columns that are both 8 further on."""
    by_place = registers.reshape(registers.shape[1], registers.shape[4])
    for row in range(1, by_place.shape[1]):
        by_place[1:, row] = by_place[:-1, row - 1]


def _as_left(x: Any) -> Array:
    """From shared memory, or from what products have left in registers, where it is already."""
    layout = mosaic().Layout.MMA_LHS(x.dtype)
    if not isinstance(x, jax.Array):
        return mosaic().load(x, layout=layout)
    lower = importlib.import_module("jax.experimental.mosaic.gpu")
    result = mosaic().ShapeDtypeStruct(x.shape, x.dtype, layout=layout)

    @mosaic().inline_mgpu(arg_types=(mosaic().Layout.WGMMA,), return_type=result)
    def renamed(_: Any, x: Any) -> Any:
        # Registers of sums come by eight columns and halves of the rows, those of the left side of
        # a product by sixteen columns, halves of the rows and halves of the columns.
        pairs = x.registers.reshape(-1, 2, 2).swapaxes(1, 2)
        to = layout.to_mgpu()
        registers = pairs.reshape(to.registers_shape(x.shape))
        return lower.FragmentedArray(_registers=registers, _layout=to, _is_signed=None)

    return renamed(x)


@functools.cache
def mosaic() -> Any:
    # Not with the library: this takes longer to import than all of it.
    return importlib.import_module("jax.experimental.pallas.mosaic_gpu")


def knows_ampere() -> bool:
    """Whether this version of JAX has products of single warps; older ones have not."""
    return hasattr(mosaic(), "mma")


def few() -> bool:
    """Whether the threads of three warpgroups have 168 registers each, as none can be moved to
    those that compute: JAX since 0.12 has nvJitLink compile kernels, which ignores `setmaxnreg`."""
    return knows_ampere()


# Formulas of many operations, or maybe so.
_LONG = masks.Predicate, masks.Dilated, masks.Global, scores.Score


def needs_many(spec: Spec) -> bool:
    """Whether a tile's scores need more registers than products and a mask or function of few
    operations that reads no array along T or S; without dropout."""
    nodes = jax.tree.leaves((spec.mask, spec.score), is_leaf=lambda x: isinstance(x, _LONG))
    is_long = any(isinstance(x, _LONG) for x in nodes)
    arrays = any(jnp.ndim(x) > 1 for x in jax.tree.leaves(spec.score))
    return is_long or arrays


def interpreter() -> Any:
    """Parameters of the interpreter, which older versions do not export."""
    name = "jax._src.pallas.mosaic_gpu.interpret.params"
    home = mosaic() if hasattr(mosaic(), "InterpretGPUParams") else importlib.import_module(name)
    return home.InterpretGPUParams()


class Factors(NamedTuple):
    """Numbers out of the way of the loops over tiles, of a scale that is known and positive, and of
    dropout. Score functions take products times `before`. The softmax takes scores times `after`,
    in the same operation in which it subtracts the maximum. One of the two is 1: `before`, where
    score functions can count in units of products. Sums are multiplied with `kept` at the end
    instead of the weights that dropout keeps."""

    before: float = 1.0
    after: float = 1.0
    kept: float = 1.0

    @classmethod
    def of(cls, spec: Spec) -> tuple["Factors", Spec]:
        """The factors, and the spec without its scale."""
        scale, found = number(spec.scale), cls(kept=1 / (1 - spec.dropout_rate))
        if not is_static(spec.scale) or not 0 < scale < math.inf:
            return found, spec
        spec = dataclasses.replace(spec, scale=1.0)
        if spec.score is None:
            return found._replace(after=scale), spec
        score = spec.score.per(scale)
        if score is None:
            return found._replace(before=scale), spec
        return found._replace(after=scale), dataclasses.replace(spec, score=score)

    @property
    def gradient(self) -> float:
        """What sums of the scores' cotangents still lack."""
        return self.before * self.after * self.kept


class Problem(NamedTuple):
    """The sizes of a call in whole tiles, the tiles of a program and the spec as its warpgroups
    read it: each has some of the program's queries, or of its keys if `by_key`."""

    shapes: Shapes
    tiling: Tiling
    rules: SpecRefs
    unit: Unit
    factors: Factors
    approximate: bool
    special: bool
    drops: bool
    unmodified: bool
    most_beside: int | None = None

    @classmethod
    def of(
        cls,
        spec: Spec,
        shapes: Shapes,
        tiling: Tiling,
        unit: Unit,
        refs: Callable[..., SpecRefs] = SpecRefs,
        columns: int | None = None,
    ) -> "Problem":
        """A warpgroup computes so many `columns` of a tile at once, or all."""
        by_key = unit.transposed
        (q, kv), rows = (x if columns is None else min(x, columns) for x in tiling), unit.rows
        own = Tiling(q, rows) if by_key else Tiling(rows, kv)
        # Rows that come by have their hashes with them, others make theirs once.
        spec = dropout.hashed(spec, shapes, rows=by_key)
        factors, spec = Factors.of(spec)
        rules, drops = refs(spec, own, by_key), spec.dropout_rate > 0
        unit = unit._replace(apart=by_key or rules.differs_by_key())
        operations, unmodified = _operations(spec, rules), is_unmodified(spec)
        how = _approximate(spec, operations), bool(operations & _SPECIAL), drops, unmodified
        return cls(shapes, tiling, rules, unit, factors, *how)

    @property
    def by_key(self) -> bool:
        return self.unit.transposed

    @property
    def streamed(self) -> int:
        """Queries of a tile if `by_key`, else keys: of those that come by."""
        return self.tiling[0 if self.by_key else 1]

    @property
    def share(self) -> int:
        """Columns of a tile that a warpgroup computes at once."""
        return self.rules.sizes["T" if self.by_key else "S"]

    @property
    def shares(self) -> int:
        """Parts of so many columns of one tile."""
        return self.streamed // self.share

    @property
    def groups(self) -> int:
        """Warpgroups of a program that keep queries, or keys if `by_key`."""
        return self.tiling[1 if self.by_key else 0] // self.unit.rows

    @property
    def blocks(self) -> tuple[int, int]:
        """How many of queries and of keys."""
        return self.shapes.T // self.tiling.block_q, self.shapes.S // self.tiling.block_kv

    @property
    def heads(self) -> int:
        """Query heads that share what a program keeps."""
        return self.shapes.G if self.by_key else 1

    def visits(self, spec: Spec) -> block_mask.BlockMask:
        """The tiles that each block of queries visits, or of keys if `by_key`."""
        return block_mask.of(self.kinds(spec), by_key=self.by_key).compact()

    def kinds(self, spec: Spec) -> Any:
        """The tile maps `[B or 1, N or 1, n, m]`."""
        return block_mask.kinds(spec, self.shapes.T, self.shapes.S, self.tiling)

    @property
    def beside(self) -> list[int]:
        """Which of the spec's arrays come by in shared memory, beside a tile of keys (queries):
        `most_beside` of them, or all."""
        along = self.rules.along("T" if self.by_key else "S")
        return [] if self.unit.by_warp else along[: self.most_beside]

    def scratch_beside(self, *places: int) -> list[Any]:
        """Shared memory for these, for so many tiles."""
        arrays = [self.rules.arrays[i] for i in self.beside]
        return [mosaic().SMEM((*places, self.share), x.dtype) for x in arrays]

    def parts_beside(self, leaves: list[Any], place: TileIndex) -> list[Any]:
        """A tile's parts of these in global memory."""
        parts = self.rules.parts(leaves, place)
        return [memory.at[index] for memory, index in (parts[i] for i in self.beside)]

    def numbers(self, leaves: list[Any], b: Any, h: Any) -> dict[int, "_Value"]:
        """Those of the spec's arrays that are a number for all tiles of a head."""
        place = TileIndex(b, h, 0, 0)
        parts = enumerate(zip(self.rules.parts(leaves, place), self.rules.letters, strict=True))
        alike = ((i, x, y) for i, (x, y) in parts if i not in self.rules.varying)
        return {i: self.unit.read(*x, y) for i, x, y in alike}

    def tile(self, leaves: list[Any], place: TileIndex, numbers: dict[int, "_Value"]) -> "Tile":
        """What a tile needs beside `numbers`, read before the products that are waited for, but for
        what comes by in shared memory."""
        unit, tables = self.unit, {i: _InMemory(leaves[i]) for i in self.rules.tables}
        known = dict.fromkeys(self.beside) | tables | numbers
        parts = enumerate(zip(self.rules.parts(leaves, place), self.rules.letters, strict=True))
        read = [known[i] if i in known else unit.read(*x, letters) for i, (x, letters) in parts]
        return Tile(unit, self.shapes, self.rules, read, place)


# What is only approximated by the instructions for it, too roughly for functions of positions; the
# error of tanh is 5e-4, about what rounding to 16 bits is.
_ROUGH = frozenset("sin cos tan log log1p".split())
# What the unit that computes 2^x computes too.
_SPECIAL = _ROUGH | frozenset("erf exp exp2 logistic rsqrt sqrt tanh".split())


def _operations(spec: Spec, rules: SpecRefs) -> frozenset[str]:
    """What score functions and their derivatives are made of."""
    if spec.score is None:
        return frozenset()
    function, operands = rules.example()
    return frozenset(kernel_refs.primitives(jax.make_jaxpr(function)(*operands).jaxpr))


def _approximate(spec: Spec, operations: frozenset[str]) -> bool:
    """Whether approximate instructions will do; that for exp2 always would."""
    exact = spec.precision in ("highest", "float32", lax.Precision.HIGHEST)
    return not operations & (_ROUGH | {"tanh", "logistic"} if exact else _ROUGH)


def is_unmodified(spec: Spec) -> bool:
    """Whether scores are products of queries and keys, but for the mask."""
    return spec.score is None and is_static(spec.scale) and spec.scale == 1


class Tile(NamedTuple):
    """A spec in registers."""

    unit: Unit
    shapes: Shapes
    rules: SpecRefs
    leaves: list[_Value | _InMemory | None]
    place: TileIndex

    def completed(self, beside: Any) -> "Tile":
        """With what came by in shared memory."""
        letter = "T" if self.unit.transposed else "S"
        run, left = (pl.ds(0, self.rules.sizes[letter]),), iter(beside)
        leaves = [
            self.unit.read(next(left), run, [letter]) if x is None else x for x in self.leaves
        ]
        return self._replace(leaves=leaves)

    def run(self, function: Callable[..., Any], *operands: Any) -> Any:
        """`function(tile, *operands)`."""
        found = self.run_typed(function, *operands)
        return jax.tree.map(lambda x: x.value, found, is_leaf=_is_value)

    def run_typed(self, function: Callable[..., Any], *operands: Any) -> Any:
        """The same with types, as other calls take operands that lack axes of size 1."""
        unit, shapes, (b, h, row, column) = self.unit, self.shapes, self.place
        rows, columns = self.rules.sizes.values()
        at = b, h, unit.places(row, rows, "t"), unit.places(column, columns, "s")

        def here(leaves: Any, at: Any, operands: Any) -> Any:
            return function(self.rules.at(leaves, *at), *operands)

        values = [x if isinstance(x, _Value) else None for x in self.leaves]
        typed = jax.tree.map(self._typed, operands, is_leaf=_is_value)
        operands, expected = (
            jax.tree.map(operator.attrgetter(x), typed, is_leaf=_is_value)
            for x in ("value", "expected")
        )
        given = [x and x.value for x in values], at, operands
        expected = [x and x.expected for x in values], types(at), expected
        found, out = mosaic_interpreter.run_typed(
            here,
            *given,
            shapes=expected,
            transposed=unit.transposed,
            held=unit.held(),
            runs=(mosaic_interpreter.Run(row, at[2]), mosaic_interpreter.Run(column, at[3])),
            below=[*zip(at, (shapes.B, shapes.N, shapes.T, shapes.S), strict=True)],
            tables={
                i: functools.partial(unit.look_up, x.memory)
                for i, x in enumerate(self.leaves)
                if isinstance(x, _InMemory)
            },
        )
        return jax.tree.map(lambda x, expected: _Value(x, expected, ""), found, out)

    def _typed(self, x: Any) -> "_Value":
        return x if _is_value(x) else _Value(x, types(x, self.unit.transposed), "")
