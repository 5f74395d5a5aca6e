"""A function of a tile as an expression of one of its pairs, for kernels with operations of their
own.

The functions of `jattn.tile`, and the derivatives that JAX takes of them, are functions of arrays
that broadcast, with axes of size 1. Kernels need their entry at one row and one column: each number
in it depends on the row, on the column, on both or on neither.
"""

import functools
import math
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import numpy as np

from jattn.functions.nodes import Node, values
from jattn.functions.operations import is_reference
from jattn.functions.read import Entries, ProgramReader, operation


class TileFunction(NamedTuple):
    """The entries of a function's results, the tables that they index, and the results' types.

    The `param` of an `input` node is a pair: the number of an argument, and the axes of the tile
    ("t", "s", "ts" or "") that index it. If the number is −1, the entry is the index.
    """

    results: list[Node]
    tables: list[Any]
    out: Any


class _TileProgramReader(ProgramReader):
    """Reads programs of arrays `[t, s]`, `[t]` and `[s]` at one row and one column.

    `known` names further primitives that are computed entry by entry. A reduction along an axis of
    `tile`, a shape, is a node with the name of the reduction; its `param` holds the axes and the
    shape.
    """

    def __init__(self, known: dict[Any, str], tile: tuple[int, ...]):
        super().__init__()
        self.known, self.tile = known, tile
        self.places = [self.shared(Node("input", (), np.dtype(np.int32), (-1, x))) for x in "ts"]

    def argument(self, number: int, aval: Any) -> Entries:
        """Returns the entries of an argument, readable only at the pair's row and column."""

        def entry(places: tuple[Any, ...]) -> Node:
            wide = [x for x, size in zip(places, aval.shape, strict=True) if size != 1]
            axes = [axis for x in wide for axis, y in zip("ts", self.places, strict=True) if x is y]
            if len(axes) < len(wide) or axes != sorted(set(axes), reverse=True):
                raise NotImplementedError("another part of an array than a tile has")
            return self.node("input", (), aval.dtype, (number, "".join(axes)))

        return Entries(aval.shape, aval.dtype, entry)

    def result(self, x: Entries) -> Node:
        """Returns the entry of a result. An array of one axis may run along either axis."""
        try:
            return self.shared(x.entry(self._at(x.shape, self.places)))
        except NotImplementedError:
            if len(x.shape) != 1:
                raise
            return self.shared(x.entry(self._at(x.shape, self.places[1:])))

    @staticmethod
    def _at(shape: tuple[int, ...], places: list[Node]) -> tuple[Any, ...]:
        return tuple(0 if n == 1 else x for n, x in zip(shape, places, strict=False))

    def interpret(self, equation: Any, values: list[Entries]) -> list[Entries] | None:
        name = self.known.get(equation.primitive)
        if name is None:
            return super().interpret(equation, values)
        aval = equation.outvars[0].aval
        return [self.entries(name, values, aval, equation.params.get("which"))]

    def with_rule(self, equation: Any, n: int, result: Entries, values: list[Entries]) -> Entries:
        return result  # derivatives have been taken

    def by_jax(self, equation: Any, values: list[Entries]) -> list[Entries]:
        return [self.unknown(x.aval, operation(equation)) for x in equation.outvars]

    def folded(self, op: str, x: Entries, axes: Any, result: Any) -> list[Entries] | None:
        wide = [axis for axis in axes if x.shape[axis] != 1]
        if x.shape != self.tile or not wide or op not in ("add", "max", "min"):
            is_of_tile = any(x.shape[axis] in self.tile for axis in wide)
            return None if is_of_tile else super().folded(op, x, axes, result)
        param = "".join("ts"[axis] for axis in sorted(wide)), x.shape

        def entry(places: tuple[Any, ...]) -> Node:
            rest = iter(places)
            outer = (0 if axis in axes else next(rest) for axis in range(2))
            inner = (self.places[axis] if axis in wide else x for axis, x in enumerate(outer))
            return self.node(f"reduce_{op}", (x.entry(tuple(inner)),), result.dtype, param)

        return [Entries(result.shape, x.dtype, entry)]


def read(
    function: Callable[..., Any], arguments: Any, expected: Any, known: dict[Any, str]
) -> TileFunction:
    """Returns `function(*arguments)`, traced for the types `expected`, at one row and one column.

    Arguments that are references to memory become tables. `known` names primitives that are
    computed entry by entry.

    Raises NotImplementedError for operations that are not computed entry by entry.
    """
    program, out = jax.make_jaxpr(function, return_shape=True)(*expected)
    if any(math.prod(np.shape(x)) > 1 for x in program.consts):
        raise NotImplementedError("a captured array")
    effect = next((operation(x) for x in program.eqns if x.effects), None)
    if effect is not None:
        raise NotImplementedError(effect)
    leaves = jax.tree.leaves(arguments, is_leaf=is_reference)
    pairs = zip(leaves, program.in_avals, strict=True)
    avals = *(aval for x, aval in pairs if not is_reference(x)), *program.out_avals
    shapes = [x.shape for x in avals if x.ndim == 2]
    reader = _TileProgramReader(known, max(shapes, key=math.prod, default=()))
    inputs = [
        reader.table(x) if is_reference(x) else reader.argument(number, aval)
        for number, (x, aval) in enumerate(zip(leaves, program.in_avals, strict=True))
    ]
    results = reader.run(program.jaxpr, [*map(reader.table, program.consts), *inputs])
    return TileFunction(values([*map(reader.result, results)]), reader.tables, out)


def unsupported(one_tile: Callable[..., Any], *sizes: Hashable, spec: Any) -> str | None:
    """Returns why a kernel cannot run `one_tile(*sizes, spec)`, which is traced; None if it can.

    It is traced once for specs of one structure whose arrays have the same shapes and dtypes.
    """
    leaves, structure = jax.tree.flatten(spec)
    return _unsupported(one_tile, sizes, structure, tuple((x.shape, x.dtype) for x in leaves))


@functools.lru_cache(maxsize=1024)
def _unsupported(
    one_tile: Callable[..., Any], sizes: tuple[Any, ...], structure: Any, avals: tuple[Any, ...]
) -> str | None:
    spec = jax.tree.unflatten(structure, [jax.ShapeDtypeStruct(*x) for x in avals])
    try:
        jax.eval_shape(functools.partial(one_tile, *sizes), spec)
    except NotImplementedError as error:
        return f"a function of mask or score needs {error}"
    except ValueError as error:  # JAX's, for instance if a loop has no derivative
        return f"a function of mask or score cannot be differentiated: {error}"
    return None
