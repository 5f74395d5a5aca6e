"""A tile of a spec in registers, on which functions of masks and scores run."""

import functools
import importlib
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.experimental import pallas as pl
from jaxtyping import Array

from jattn._types import Ref, Tree
from jattn.kernels.gpu.mosaic.machine.registers import Products, Unit, Value
from jattn.kernels.gpu.mosaic.machine.versions import mosaic
from jattn.kernels.gpu.mosaic.tile import mosaic_interpreter
from jattn.kernels.gpu.mosaic.tile.kernel_refs import TileIndex
from jattn.kernels.gpu.mosaic.tile.lookup import gather
from jattn.kernels.gpu.mosaic.tile.spec_refs import SpecRefs, types
from jattn.spec import Shapes


class InMemory(NamedTuple):
    """A table, of which a tile looks up what it needs."""

    memory: Ref


class RegisterTile(NamedTuple):
    """A spec in registers."""

    unit: Unit
    shapes: Shapes
    rules: SpecRefs
    leaves: list[Value | InMemory | None]
    place: TileIndex

    def completed(self, beside: Tree) -> "RegisterTile":
        """With what came by in shared memory."""
        letter = "T" if self.unit.transposed else "S"
        run, left = (pl.ds(0, self.rules.sizes[letter]),), iter(beside)
        leaves = [
            self.unit.read(next(left), run, [letter]) if x is None else x for x in self.leaves
        ]
        return self._replace(leaves=leaves)

    def run(self, function: Callable[..., Any], *operands: Tree) -> Tree:
        """`function(tile, *operands)`."""
        found = self.run_typed(function, *operands)
        return jax.tree.map(lambda x: x.value, found, is_leaf=_is_value)

    def run_typed(self, function: Callable[..., Any], *operands: Tree) -> Tree:
        """The same with types, as other calls take operands that lack axes of size 1."""
        unit, shapes, (b, h, row, column) = self.unit, self.shapes, self.place
        rows, columns = self.rules.sizes.values()
        at = b, h, unit.places(row, rows, "t"), unit.places(column, columns, "s")

        def here(leaves: Tree, at: tuple[Array, ...], operands: Tree) -> Tree:
            return function(self.rules.at(leaves, *at), *operands)

        values = [x if isinstance(x, Value) else None for x in self.leaves]
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
            held=register_layout(unit),
            runs=(mosaic_interpreter.Run(row, at[2]), mosaic_interpreter.Run(column, at[3])),
            below=[*zip(at, (shapes.B, shapes.N, shapes.T, shapes.S), strict=True)],
            tables={
                i: functools.partial(look_up, unit, x.memory)
                for i, x in enumerate(self.leaves)
                if isinstance(x, InMemory)
            },
        )
        return jax.tree.map(lambda x, expected: Value(x, expected, ""), found, out)

    def _typed(self, x: Tree) -> Value:
        return x if _is_value(x) else Value(x, types(x, self.unit.transposed), "")


def _is_value(x: Tree) -> bool:
    return isinstance(x, Value)


def look_up(unit: Unit, memory: Ref, places: Array, axes: str) -> Array:
    """Entries of a flat array in global memory."""
    if unit.interpreted:
        return memory[...][places]
    if not axes:
        return memory[places]
    return gather(mosaic(), memory, unit.lay(places, axes), unit.layout(axes))


def register_layout(unit: Unit) -> mosaic_interpreter.Held:
    """How functions of tiles hold arrays: what two rows of a thread share, once."""
    lay = functools.partial(unit.lay, axes="ts")
    if unit.interpreted or (unit.by is Products.TENSOR_MEMORY and not unit.apart):
        return mosaic_interpreter.Held(lay)  # there a thread has one row
    shared = functools.partial(_named, unit, change=_share, axes="t")
    diagonals = functools.partial(_named, unit, change=_share_diagonals, axes="ts")
    return mosaic_interpreter.Held(lay, shared, diagonals)


def _named(unit: Unit, x: Array, change: Callable[[Any], None], axes: str) -> Array:
    """The same array, some of whose registers, which are equal, have other names."""
    lower = importlib.import_module("jax.experimental.mosaic.gpu")
    layout = unit.layout(axes)
    result = mosaic().ShapeDtypeStruct(x.shape, x.dtype, layout=layout)

    @mosaic().inline_mgpu(arg_types=(layout,), return_type=result)
    def named(_: Any, x: Any) -> Any:
        registers = x.registers.copy()
        change(registers)
        how = {"_layout": x.layout, "_is_signed": x.is_signed}
        return lower.FragmentedArray(_registers=registers, **how)

    return named(x)


def _share(registers: Any) -> None:
    """Those of rows that are 8 apart, or of columns."""
    registers.flat[1::2] = registers.flat[::2]


def _share_diagonals(registers: Any) -> None:
    """Those of rows and columns that are both 8 further on."""
    by_place = registers.reshape(registers.shape[1], registers.shape[4])
    for row in range(1, by_place.shape[1]):
        by_place[1:, row] = by_place[:-1, row - 1]
