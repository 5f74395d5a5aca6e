"""The static description of a call for a kernel: sizes in whole tiles, tiling, spec, and the
constant factors that kernels apply outside of their loops over tiles; and its tiles in registers.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.extend.core import jaxprs_in_params
from jaxtyping import Array

from jattn import dropout
from jattn._pytree import is_static, number
from jattn._types import AnyArray, Index, Ref, Tree
from jattn.kernels.common import block_mask
from jattn.kernels.gpu.mosaic.machine.registers import Products, RegisterValue, Unit
from jattn.kernels.gpu.mosaic.machine.versions import lowering, mosaic
from jattn.kernels.gpu.mosaic.tile import mosaic_interpreter
from jattn.kernels.gpu.mosaic.tile.mosaic_interpreter import IntegerRun, RegisterLayout, Table
from jattn.kernels.gpu.mosaic.tile.spec_refs import SpecRefs, TileIndex
from jattn.spec import Shapes, Spec, Tiling


LOG2E = math.log2(math.e)

# Sums are rescaled once a running maximum (in units of log 2) exceeds the shift by more than this.
# Weights are then at most 2^8, which float16 holds without loss of digits.
SLACK = 8.0


class Factors(NamedTuple):
    """The constant factors that replace a static positive scale and the scale of dropout.

    product_factor: multiplies products before score functions; it is the scale if there are any.
    score_factor: multiplies scores in the softmax; it is the scale if scores are products.
    modified: whether there are score functions or a traced scale. They can make scores so large
        that score · log2(e) has no digits behind the point, so the exponent of a weight is
        (score − maximum) · log2(e). Otherwise it is score · `score_units` − maximum, one operation,
        with the maximum in the units of the product.
    dropout_scale: 1 / (1 − dropout rate). It multiplies sums of weighted values once at the end,
        instead of each weight that dropout keeps.
    headroom: the exponent e of the power 2^e by which weights are divided in a forward pass, so
        that no weighted sum overflows.
    """

    product_factor: float = 1.0
    score_factor: float = 1.0
    modified: bool = False
    dropout_scale: float = 1.0
    headroom: int = 0

    @classmethod
    def of(cls, spec: Spec) -> tuple["Factors", Spec]:
        """Returns the factors, and the spec without its scale."""
        is_modified = spec.score is not None or not is_static(spec.scale)
        factors = cls(modified=is_modified, dropout_scale=1 / (1 - spec.dropout_rate))
        scale = number(spec.scale)
        if not is_static(spec.scale) or not 0 < scale < math.inf:
            return factors, spec
        spec = dataclasses.replace(spec, scale=1.0)
        name = "score_factor" if spec.score is None else "product_factor"
        return factors._replace(**{name: scale}), spec

    def with_headroom(self, shapes: Shapes) -> "Factors":
        """Adds the headroom of sums of S values; those of float16 need none."""
        if shapes.dtype != jnp.bfloat16:
            return self
        return self._replace(headroom=math.ceil(math.log2(shapes.S) + SLACK) + 1)

    @property
    def score_units(self) -> float:
        """The factor from scores to the units in which maxima are kept."""
        return 1.0 if self.modified else self.score_factor * LOG2E

    @property
    def log2_units(self) -> float:
        """The factor from the units in which maxima are kept to exponents of 2."""
        return LOG2E if self.modified else 1.0

    @property
    def gradient(self) -> float:
        """The factor by which the gradients of queries and keys are multiplied at the end."""
        return self.product_factor * self.score_factor * self.dropout_scale


def is_unmodified(spec: Spec) -> bool:
    """Returns whether scores are products of queries and keys, except for the mask."""
    return spec.score is None and is_static(spec.scale) and spec.scale == 1


class RegisterTile(NamedTuple):
    """A tile's parts of the arrays of a spec, in registers, and the index of the tile.

    `leaves` are None for arrays whose part still has to be read from shared memory, see
    `completed`.
    """

    unit: Unit
    shapes: Shapes
    refs: SpecRefs
    leaves: list[RegisterValue | None]
    place: TileIndex

    def completed(self, *streamed: Ref) -> "RegisterTile":
        """Returns the tile with the parts `streamed`, which are in shared memory."""
        letter = "T" if self.unit.transposed else "S"
        index, rest = (pl.ds(0, self.refs.sizes[letter]),), iter(streamed)
        leaves = [
            self.unit.read(next(rest), index, [letter]) if x is None else x for x in self.leaves
        ]
        return self._replace(leaves=leaves)

    def run(self, function: Callable[..., Any], *operands: Tree) -> Tree:
        """Computes `function(head_tile, *operands)` in registers, with this tile's `HeadTile`."""
        results = self.run_typed(function, *operands)
        return jax.tree.map(lambda x: x.value, results, is_leaf=_is_value)

    def run_typed(self, function: Callable[..., Any], *operands: Tree) -> Tree:
        """Returns the results of `run` with their types.

        Arrays in registers have no axes of size 1. A later call that takes the results as operands
        reads from the types where these axes are.
        """
        unit, shapes, (b, h, row, column) = self.unit, self.shapes, self.place
        rows, columns = self.refs.sizes.values()
        indices = b, h, unit.places(row, rows, "t"), unit.places(column, columns, "s")

        def with_tile(leaves: Tree, indices: tuple[Array, ...], operands: Tree) -> Tree:
            return function(self.refs.tile(leaves, *indices), *operands)

        typed = jax.tree.map(self._typed, operands, is_leaf=_is_value)
        operands, expected = (
            jax.tree.map(operator.attrgetter(x), typed, is_leaf=_is_value)
            for x in ("value", "expected")
        )
        results, types = mosaic_interpreter.run_typed(
            with_tile,
            [x and x.value for x in self.leaves],
            indices,
            operands,
            shapes=([x and x.expected for x in self.leaves], _types(indices), expected),
            transposed=unit.transposed,
            layout=register_layout(unit),
            runs=(IntegerRun(row, indices[2]), IntegerRun(column, indices[3])),
            below=[*zip(indices, (shapes.B, shapes.N, shapes.T, shapes.S), strict=True)],
        )
        return jax.tree.map(RegisterValue, results, types)

    def _typed(self, x: Tree) -> RegisterValue:
        return x if _is_value(x) else RegisterValue(x, _types(x, self.unit.transposed))


def _is_value(x: Tree) -> bool:
    return isinstance(x, RegisterValue)


def _types(operands: Tree, transposed: bool = False) -> Any:
    order = -1 if transposed else 1
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[::order], x.dtype), operands)


def register_layout(unit: Unit) -> RegisterLayout:
    """Returns the layout of tiles in registers.

    Where a thread has two rows of a tile, numbers that are equal in both share a register.
    """
    to_layout = functools.partial(unit.to_layout, axes="ts")
    if unit.interpreted:
        return RegisterLayout(to_layout)
    if unit.by is Products.TENSOR_MEMORY and not unit.splits_rows:
        return RegisterLayout(to_layout, rounded=_rounded)
    shared = functools.partial(_aliased, unit, alias=_share_rows, axes="t")
    diagonals = functools.partial(_aliased, unit, alias=_share_diagonals, axes="ts")
    return RegisterLayout(to_layout, shared, diagonals, _rounded)


def _rounded(x: Array) -> Array:
    """Returns x, by one instruction that the compiler neither fuses nor removes."""
    return jnp.minimum(x, np.float32(np.inf).astype(x.dtype))


def _aliased(unit: Unit, x: Array, alias: Callable[[Any], None], axes: str) -> Array:
    """Returns x; `alias` replaces some of its registers by others that hold equal numbers."""
    layout = unit.layout(axes)
    result = mosaic().ShapeDtypeStruct(x.shape, x.dtype, layout=layout)

    @mosaic().inline_mgpu(arg_types=(layout,), return_type=result)
    def aliased(_: Any, x: Any) -> Any:
        registers = x.registers.copy()
        alias(registers)
        return lowering().FragmentedArray(
            _registers=registers, _layout=x.layout, _is_signed=x.is_signed
        )

    return aliased(x)


def _share_rows(registers: Any) -> None:
    """Uses the registers of row r, or column r, of a thread for r + 8 too."""
    registers.flat[1::2] = registers.flat[::2]


def _share_diagonals(registers: Any) -> None:
    """Uses the register of entry (r, c) of a thread for entry (r + 8, c + 8) too."""
    by_entry = registers.reshape(registers.shape[1], registers.shape[4])
    for row in range(1, by_entry.shape[1]):
        by_entry[1:, row] = by_entry[:-1, row - 1]


class GPUProblem(NamedTuple):
    """The sizes of a call in whole tiles, the tiles of a program, and the spec.

    Each warpgroup keeps some of the program's queries, and tiles of keys are streamed through
    shared memory; with `by_key` it keeps keys, and queries are streamed.

    tiling: the queries of a program and the keys of a streamed tile, or the other way round.
    refs: the arrays of the spec, and the part of each that a tile reads.
    approximate: whether approximate instructions suffice for score functions.
    special: whether score functions use the special function unit, which computes 2^x.
    drops: whether there is dropout.
    unmodified: whether scores are products of queries and keys, except for the mask.
    max_streamed_arrays: limits the number of the spec's arrays that are streamed with a tile.
    """

    shapes: Shapes
    tiling: Tiling
    refs: SpecRefs
    unit: Unit
    factors: Factors
    approximate: bool
    special: bool
    drops: bool
    unmodified: bool
    max_streamed_arrays: int | None = None

    @classmethod
    def of(
        cls,
        spec: Spec,
        shapes: Shapes,
        tiling: Tiling,
        unit: Unit,
        refs: Callable[..., SpecRefs] = SpecRefs,
        columns: int | None = None,
    ) -> "GPUProblem":
        """Makes the problem of a spec; a warpgroup computes `columns` of a tile at once, by default
        all."""
        by_key = unit.transposed
        q, kv = (x if columns is None else min(x, columns) for x in tiling)
        # The dropout hashes of streamed queries are computed before the kernel and streamed too; a
        # program computes the hashes of queries that it keeps once.
        spec = dropout.hashed(spec, shapes, rows=by_key)
        factors, spec = Factors.of(spec)
        tile = Tiling(q, unit.rows) if by_key else Tiling(unit.rows, kv)
        spec_refs = refs(spec, tile, by_key)
        operations = _operations(spec, spec_refs)
        return cls(
            shapes,
            tiling,
            spec_refs,
            unit._replace(splits_rows=by_key or spec_refs.differs_by_key()),
            factors.with_headroom(shapes),
            not operations & _ROUGH,
            bool(operations & _SPECIAL),
            spec.dropout_rate > 0,
            is_unmodified(spec),
        )

    @property
    def by_key(self) -> bool:
        return self.unit.transposed

    @property
    def streamed(self) -> int:
        """The number of keys of a streamed tile, or of queries with `by_key`."""
        return self.tiling[0 if self.by_key else 1]

    @property
    def share(self) -> int:
        """The number of columns of a tile that a warpgroup computes at once."""
        return self.refs.sizes["T" if self.by_key else "S"]

    @property
    def shares(self) -> int:
        """The number of shares of a tile that a warpgroup computes one after another."""
        return self.streamed // self.share

    @property
    def groups(self) -> int:
        """The number of computing warpgroups of a program."""
        return self.tiling[1 if self.by_key else 0] // self.unit.rows

    @property
    def blocks(self) -> tuple[int, int]:
        """The number of query blocks and of key blocks."""
        return self.shapes.T // self.tiling.block_q, self.shapes.S // self.tiling.block_kv

    def parts(self) -> int:
        """Returns the number of parts into which the keys are split, one work item for each."""
        query_blocks, key_blocks = self.blocks
        return block_mask.parts(self.shapes.B * self.shapes.N * query_blocks, key_blocks)

    @property
    def heads(self) -> int:
        """The number of query heads that a program computes: 1, or with `by_key` the group's."""
        return self.shapes.G if self.by_key else 1

    def visits(self, spec: Spec) -> block_mask.BlockMask:
        """Returns the tiles that each block of queries visits, or of keys with `by_key`."""
        return block_mask.of(self.kinds(spec), by_key=self.by_key).compact()

    def kinds(self, spec: Spec) -> AnyArray:
        """Returns the tile maps `[B or 1, N or 1, n, m]`."""
        return block_mask.kinds(spec, self.shapes.T, self.shapes.S, self.tiling)

    @property
    def streamed_arrays(self) -> list[int]:
        """The indices of the spec's arrays that are streamed with a tile."""
        along = self.refs.along("T" if self.by_key else "S")
        return [] if self.unit.by_warp else along[: self.max_streamed_arrays]

    def streamed_scratch(self, *buffers: int) -> list[Any]:
        """Allocates shared memory `[*buffers, share]` for each of the streamed arrays."""
        arrays = [self.refs.arrays[i] for i in self.streamed_arrays]
        return [mosaic().SMEM((*buffers, self.share), x.dtype) for x in arrays]

    def streamed_parts(self, leaves: list[Any], index: TileIndex) -> list[Any]:
        """Returns a tile's parts of the streamed arrays, in global memory."""
        parts = self.refs.parts(leaves, index)
        return [memory.at[part] for memory, part in (parts[i] for i in self.streamed_arrays)]

    def constants(self, leaves: list[Any], b: Index, h: Index) -> dict[int, RegisterValue]:
        """Reads the arrays of the spec that have a single number for all tiles of a head."""
        return self._read(leaves, TileIndex(b, h, 0, 0), self.refs.varying)

    def tile(
        self, leaves: list[Any], index: TileIndex, constants: dict[int, RegisterValue]
    ) -> RegisterTile:
        """Reads a tile's parts of the spec's arrays to registers, except those that are streamed.

        Kernels call it before they wait for products, so that reads and products overlap.
        """
        # Streamed arrays are None, until `RegisterTile.completed`.
        leaves_so_far: dict[int, Any] = dict.fromkeys(self.streamed_arrays) | constants
        for i, x in self.refs.tables.items():
            look_up = functools.partial(self.unit.look_up, leaves[i])
            table = Table(x.shape, x.dtype, look_up, self.refs.interval(i))
            leaves_so_far[i] = RegisterValue(table, x)
        parts = leaves_so_far | self._read(leaves, index, [*leaves_so_far])
        return RegisterTile(
            self.unit, self.shapes, self.refs, [parts[i] for i in range(len(leaves))], index
        )

    def _read(
        self, leaves: list[Any], index: TileIndex, omitted: list[int]
    ) -> dict[int, RegisterValue]:
        pairs = enumerate(zip(self.refs.parts(leaves, index), self.refs.letters, strict=True))
        return {i: self.unit.read(*x, letters) for i, (x, letters) in pairs if i not in omitted}


# Operations whose approximate instructions are too inaccurate for large arguments, like positions;
# that of exp2 always suffices.
_ROUGH = frozenset("sin cos tan log log1p".split())

# Operations of the special function unit, which also computes 2^x.
_SPECIAL = _ROUGH | frozenset("erf exp exp2 logistic rsqrt sqrt tanh".split())


def _operations(spec: Spec, refs: SpecRefs) -> set[str]:
    """Returns the names of the operations of score functions and their derivatives."""
    if spec.score is None:
        return set()
    function, operands = refs.example()
    return _primitives(jax.make_jaxpr(function)(*operands).jaxpr)


def _primitives(jaxpr: Any) -> set[str]:
    """Returns the names of the operations of a jaxpr, and of all jaxprs inside of it."""
    operations = {equation.primitive.name for equation in jaxpr.eqns}
    inner_jaxprs = [x for equation in jaxpr.eqns for x in jaxprs_in_params(equation.params)]
    return operations.union(*map(_primitives, inner_jaxprs))
