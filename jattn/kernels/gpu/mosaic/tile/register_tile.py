"""A tile of a spec in registers, on which functions of masks and scores run."""

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
    """A spec in registers: `leaves` are None where parts are streamed through shared memory."""

    unit: Unit
    shapes: Shapes
    refs: SpecRefs
    leaves: list[RegisterValue | None]
    place: TileIndex

    def completed(self, streamed: Tree) -> "RegisterTile":
        """Returns the tile with the parts that were streamed through shared memory."""
        letter = "T" if self.unit.transposed else "S"
        run, rest = (pl.ds(0, self.refs.sizes[letter]),), iter(streamed)
        leaves = [
            self.unit.read(next(rest), run, [letter]) if x is None else x for x in self.leaves
        ]
        return self._replace(leaves=leaves)

    def run(self, function: Callable[..., Any], *operands: Tree) -> Tree:
        """Computes `function(tile, *operands)`."""
        results = self.run_typed(function, *operands)
        return jax.tree.map(lambda x: x.value, results, is_leaf=_is_value)

    def run_typed(self, function: Callable[..., Any], *operands: Tree) -> Tree:
        """Returns the same with types: later calls take operands that lack axes of size 1."""
        unit, shapes, (b, h, row, column) = self.unit, self.shapes, self.place
        rows, columns = self.refs.sizes.values()
        at_tile = b, h, unit.places(row, rows, "t"), unit.places(column, columns, "s")

        def of_tile(leaves: Tree, place: tuple[Array, ...], operands: Tree) -> Tree:
            return function(self.refs.tile(leaves, *place), *operands)

        typed = jax.tree.map(self._typed, operands, is_leaf=_is_value)
        operands, expected = (
            jax.tree.map(operator.attrgetter(x), typed, is_leaf=_is_value)
            for x in ("value", "expected")
        )
        results, types = mosaic_interpreter.run_typed(
            of_tile,
            [x and x.value for x in self.leaves],
            at_tile,
            operands,
            shapes=([x and x.expected for x in self.leaves], _types(at_tile), expected),
            transposed=unit.transposed,
            layout=register_layout(unit),
            runs=(IntegerRun(row, at_tile[2]), IntegerRun(column, at_tile[3])),
            below=[*zip(at_tile, (shapes.B, shapes.N, shapes.T, shapes.S), strict=True)],
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
    """Returns the layout of tiles in registers. If a thread has two rows, these share registers
    where they are equal."""
    to_layout = functools.partial(unit.to_layout, axes="ts")
    if unit.interpreted or (unit.by is Products.TENSOR_MEMORY and not unit.splits_rows):
        return RegisterLayout(to_layout)
    shared = functools.partial(_aliased, unit, alias=_share_rows, axes="t")
    diagonals = functools.partial(_aliased, unit, alias=_share_diagonals, axes="ts")
    return RegisterLayout(to_layout, shared, diagonals)


def _aliased(unit: Unit, x: Array, alias: Callable[[Any], None], axes: str) -> Array:
    """Returns the same array; `alias` replaces registers by others that hold equal numbers."""
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
    """Shares the registers of rows, or columns, with a distance of 8."""
    registers.flat[1::2] = registers.flat[::2]


def _share_diagonals(registers: Any) -> None:
    """Shares the registers of entries with a distance of 8 rows and 8 columns."""
    by_place = registers.reshape(registers.shape[1], registers.shape[4])
    for row in range(1, by_place.shape[1]):
        by_place[1:, row] = by_place[:-1, row - 1]
