"""A tile's parts of a spec's arrays in registers, where masks and score functions are computed."""

import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.experimental import pallas as pl
from jaxtyping import Array

from jattn._types import Tree
from jattn.kernels.gpu.mosaic.machine.registers import Products, RegisterValue, Unit
from jattn.kernels.gpu.mosaic.machine.versions import lowering, mosaic
from jattn.kernels.gpu.mosaic.tile import mosaic_interpreter
from jattn.kernels.gpu.mosaic.tile.mosaic_interpreter import IntegerRun, RegisterLayout
from jattn.kernels.gpu.mosaic.tile.spec_refs import SpecRefs, TileIndex
from jattn.spec import Shapes


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

    def completed(self, streamed: Tree) -> "RegisterTile":
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

        Arrays in registers have no axes of size 1. The types tell a later call, whose operands the
        results may be, where these axes are.
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
        return jax.tree.map(lambda x, expected: RegisterValue(x, expected, ""), results, types)

    def _typed(self, x: Tree) -> RegisterValue:
        return x if _is_value(x) else RegisterValue(x, _types(x, self.unit.transposed), "")


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
    if unit.interpreted or (unit.by is Products.TENSOR_MEMORY and not unit.splits_rows):
        return RegisterLayout(to_layout)
    shared = functools.partial(_aliased, unit, alias=_share_rows, axes="t")
    diagonals = functools.partial(_aliased, unit, alias=_share_diagonals, axes="ts")
    return RegisterLayout(to_layout, shared, diagonals)


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
