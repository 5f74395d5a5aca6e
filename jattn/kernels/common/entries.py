"""A function of a tile as an expression of one of its pairs, which kernels write in operations of
their own.

What `jattn.tile` makes of a tile, and the derivative that JAX takes of it, are functions of arrays
that broadcast, with axes of size 1. Of these kernels need the entry of one row and one column: each
number in it then depends on the row, on the column, on both or on neither.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jattn.functions.nodes import Node, values
from jattn.functions.operations import is_reference
from jattn.functions.read import Entries, Reader, operation


ROW, COLUMN = range(2)  # inputs of such an expression; the function's own arguments follow
FIRST = 2


class TileFunction(NamedTuple):
    """The entries of a function's results, what they look numbers up in, and the types of the
    results."""

    results: list[Node]
    tables: list[Any]
    out: Any


def read(
    function: Callable[..., Any], arguments: Any, expected: Any, axes: Sequence[str]
) -> TileFunction:
    """`function(*arguments)`, traced for the types `expected`, at one row and one column.

    `axes` says of the leaves of the arguments along which axes of the tile "ts" they run. Those
    that are references to memory are looked up.

    Raises NotImplementedError for what is not computed entry by entry.
    """
    program, out = jax.make_jaxpr(function, return_shape=True)(*expected)
    if any(math.prod(np.shape(x)) > 1 for x in program.consts):
        raise NotImplementedError("a captured array")
    effect = next((operation(x) for x in program.eqns if x.effects), None)
    if effect is not None:
        raise NotImplementedError(effect)
    reader = Reader()
    place = {"t": reader.input(ROW, np.int32).at(()), "s": reader.input(COLUMN, np.int32).at(())}
    leaves = jax.tree.leaves(arguments, is_leaf=is_reference)
    given = [
        reader.table(x)
        if is_reference(x)
        else _along(reader, FIRST + n, aval, [place[axis] for axis in runs])
        for n, (x, aval, runs) in enumerate(zip(leaves, program.in_avals, axes, strict=True))
    ]
    results = reader.run(program.jaxpr, [*map(reader.table, program.consts), *given])
    rows = place["t"], place["s"]
    nodes = [
        reader.shared(x.at(tuple(0 if n == 1 else y for n, y in zip(x.shape, rows, strict=False))))
        for x in results
    ]
    return TileFunction(values(nodes), reader.tables, out)


def _along(reader: Reader, number: int, aval: Any, wanted: list[Node]) -> Entries:
    """An argument that is read at these places only, along its axes of more than one entry."""
    node = reader.input(number, aval.dtype).at(())

    def at(places: tuple[Any, ...]) -> Node:
        wide = [x for x, size in zip(places, aval.shape, strict=True) if size != 1]
        if len(wide) != len(wanted) or any(x is not y for x, y in zip(wide, wanted, strict=True)):
            raise NotImplementedError("another part of an array than a tile has")
        return node

    return Entries(aval.shape, aval.dtype, at)
