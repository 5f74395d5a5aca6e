"""Functions of tiles as Mosaic GPU computes them: without axes of size 1.

Its arrays are spread over the registers of 128 threads: whole tiles `[t, s]`, and `[t]` or `[s]`
for rows or columns. It has no `[t, 1]`, through which array code broadcasts. A function is traced
for the shapes that it expects and read as an expression of one row and one column. Its operations
then run on arrays without axes of size 1.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from jattn import dropout
from jattn.functions import intervals, operations
from jattn.functions.interval_rules import Interval
from jattn.functions.nodes import Node, const, fold, replaced
from jattn.functions.read import read_division
from jattn.kernels.common import entries


# The operations of Mosaic GPU.
_OPERATIONS = frozenset(
    """abs add and bitcast_convert_type clamp convert_element_type cos div eq erf exp exp2
    floor_divide ge gt integer_pow le log logistic lt max min mul ne neg not or rem remainder round
    rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin square sub tanh
    xor""".split()
)
_KNOWN = {dropout.shared_p: "shared"}
_COMPARISONS = frozenset("eq ge gt le lt ne".split())
_ANY_WIDTH = frozenset("and convert_element_type not or select_n xor".split())
_NARROW = jnp.dtype("int8"), jnp.dtype("uint8")
_REDUCTIONS: Any = {"reduce_add": jnp.sum, "reduce_max": jnp.max, "reduce_min": jnp.min}
_MOVES = frozenset(("look_up", "shared", *_REDUCTIONS))
_DIVISIONS = {"div": lax.div, "floor_divide": lax.div, "rem": lax.rem, "remainder": lax.rem}
_OTHER_WORDS = {"custom_lin": "a parameter's derivative in forward mode, which custom_vjp has not"}


class Table:
    """An array in memory that functions index, one entry after another.

    `inside(places, axes)` reads the entries at row-major places, which lie along `axes` of a tile.
    Booleans are bytes. `interval`, if known, holds all entries.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: Any,
        inside: Callable[[Any, str], Array],
        interval: Interval | None = None,
    ):
        self.shape, self.dtype, self.inside = shape, jnp.dtype(dtype), inside
        self.interval = interval


def _at_one_place(tables: list[Any], node: Node, args: list[Node]) -> Node | None:
    """A look-up by the row-major place of its entry; None for other nodes."""
    if node.op != "look_up":
        return None
    table: Any = tables[node.param]  # pyright: ignore
    if not operations.is_reference(table):
        raise NotImplementedError("a captured array")
    place, int32 = None, np.dtype(np.int32)
    for x, size in zip(args, table.shape, strict=True):
        index = x if x.dtype == int32 else Node("convert_element_type", (x,), int32)
        if place is not None:
            start = Node("mul", (place, const(size, int32)), int32)
            index = Node("add", (start, index), int32)
        place = index
    assert place is not None
    if table.dtype != bool:
        return Node("look_up", (place,), node.dtype, node.param)
    byte = np.dtype(np.int8)
    entry = Node("look_up", (place,), byte, node.param)
    return Node("ne", (entry, const(0, byte)), node.dtype)


class IntegerRun(NamedTuple):
    """An argument of consecutive integers, of which the first is `first`."""

    first: Any
    values: Array


def _unchanged(x: Array) -> Array:
    return x


class RegisterLayout(NamedTuple):
    """The layout of arrays in registers.

    to_layout: converts a tile that was broadcast from rows or columns to the layout of other tiles.
    shared: converts row hashes, see `dropout.shared_p`.
    diagonals: converts a tile that is the same along each of its diagonals.
    """

    to_layout: Callable[[Array], Array] = _unchanged
    shared: Callable[[Array], Array] = _unchanged
    diagonals: Callable[[Array], Array] = _unchanged


_PLAIN = RegisterLayout()


def run(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Computes `function(*arguments)`; `options` as in `run_typed`."""
    return run_typed(function, *arguments, **options)[0]


def run_typed(
    function: Callable[..., Any],
    *arguments: Any,
    shapes: Any = None,
    transposed: bool = False,
    runs: tuple[IntegerRun, ...] = (),
    below: Any = (),
    layout: RegisterLayout = _PLAIN,
) -> tuple[Any, Any]:
    """Computes `function(*arguments)`, and returns the results and their types.

    `shapes` are the types that the function expects. Arguments and results lack their axes of size
    1, and are `[s, t]` in place of `[t, s]` if transposed; types have all axes and are `[t, s]`.

    `runs` lists arguments of consecutive integers, and `below` pairs of arguments with sizes: these
    are integers from 0 to size − 1. Arguments that are a `Table` are looked up.

    Raises NotImplementedError for what registers cannot compute.
    """
    expected = jax.tree.map(jax.typeof, arguments) if shapes is None else shapes
    read = entries.read(function, arguments, expected, _KNOWN)
    leaves = jax.tree.leaves(arguments, is_leaf=operations.is_reference)
    registers = _Registers(leaves, transposed, runs, below, read.tables, layout, {})
    nodes = replaced(read.results, functools.partial(_at_one_place, read.tables))
    values = fold(nodes, registers.value)
    results = [
        registers.spread(values[id(node)], _axes_of_result(values[id(node)], x), x.shape)
        for node, x in zip(nodes, jax.tree.leaves(read.out), strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(read.out), results), read.out


def _axes_of_result(x: "_NodeValue", aval: Any) -> str:
    """The axes of a tile along which a result runs; it may have the same number along these."""
    if len(aval.shape) == 1:
        return "" if aval.shape == (1,) else x.axes or "t"
    return "".join(axis for axis, size in zip("ts", aval.shape, strict=False) if size != 1)


class _Distance(NamedTuple):
    """The difference of two values of a tile, of which one runs along its rows and one along its
    columns, or its absolute value."""

    left: "_NodeValue"
    right: "_NodeValue"
    absolute: bool = False


class _NodeValue(NamedTuple):
    """The value of a node: a number, or an array along axes of a tile; the interval of integers;
    and, if the value is the tile of a distance, that."""

    array: Any
    axes: str
    interval: Interval | None = None
    distance: _Distance | None = None


# A thread has the columns of a tile whose numbers differ in bits other than these.
_THREAD_BITS = 6


class _Registers(NamedTuple):
    """Computes nodes of an expression, on arrays in registers."""

    leaves: list[Any]
    transposed: bool
    runs: tuple[IntegerRun, ...]
    below: Any
    tables: list[Any]
    layout: RegisterLayout
    tiles: dict[tuple[int, str], Any]  # arrays that have been spread, by their ids

    def value(self, node: Node, args: list[_NodeValue]) -> _NodeValue:
        """Computes one node from the values of its arguments."""
        if node.op in ("input", "const"):
            return self._known(node)
        if node.op == "clamp" and _is_inside(*args):
            return args[1]
        value = self._moved(node, *args) if node.op in _MOVES else self._computed(node, args)
        if not jnp.issubdtype(node.dtype, jnp.integer) or node.op == "look_up":
            return value
        pairs = zip(args, node.args, strict=True)
        of_args = [x.interval or intervals.anything(y.dtype) for x, y in pairs]
        interval = intervals.of_operation(node.op, node.dtype, of_args, node.param)
        return value._replace(interval=interval)

    def _known(self, node: Node) -> _NodeValue:
        """An argument or a constant."""
        param: Any = node.param
        if node.op == "const":
            value = np.asarray(param, node.dtype)
            return _NodeValue(value, "", Interval(value, value))
        number, axes = param
        if number < 0:
            raise NotImplementedError("iota")
        x = self.leaves[number]
        size = next((size for leaf, size in self.below if leaf is x), None)
        return _NodeValue(x, axes, size and Interval(np.int32(0), np.int32(size - 1)))

    def _moved(self, node: Node, x: _NodeValue) -> _NodeValue:
        """An operation that is not computed entry by entry."""
        param: Any = node.param
        if node.op == "look_up":
            table = self.tables[param]
            return _NodeValue(table.inside(x.array, x.axes), x.axes, table.interval)
        if node.op == "shared":
            return _NodeValue(self.layout.shared(x.array), x.axes)
        return self._reduced(node, x)

    def _computed(self, node: Node, args: list[_NodeValue]) -> _NodeValue:
        param: Any = node.param
        if node.op not in _OPERATIONS:
            name = param if node.op == "unknown" else node.op
            raise NotImplementedError(_OTHER_WORDS.get(name, name))
        distance = _distance(node, args)
        if distance is not None and node.op == "convert_element_type":
            tile = self._float_distance(distance, args[0])
            if tile is not None:
                return _NodeValue(tile, "ts")
        return self._by_entry(node, args)._replace(distance=distance)

    def _reduced(self, node: Node, x: _NodeValue) -> _NodeValue:
        along, shape = node.param  # pyright: ignore
        axes = "".join(axis for axis in "ts" if axis in x.axes or axis in along)
        array = self.spread(x, axes, shape)
        order = axes[::-1] if self.transposed else axes
        reduced = _REDUCTIONS[node.op](array, axis=tuple(order.index(axis) for axis in along))
        return _NodeValue(reduced, "".join(axis for axis in axes if axis not in along))

    def _by_entry(self, node: Node, args: list[_NodeValue]) -> _NodeValue:
        """Computes an operation entry by entry. Numbers may stand beside arrays, except as cases of
        a selection."""
        axes = "".join(axis for axis in "ts" if any(axis in x.axes for x in args))
        sizes = {}
        for x in args:
            order = x.axes[::-1] if self.transposed else x.axes
            sizes |= zip(order, jnp.shape(x.array), strict=True)
        shape = sizes.get("t", 1), sizes.get("s", 1)
        cases = args[1:] if node.op == "select_n" else ()
        arrays = [
            self.spread(x, axes, shape) if x.axes or any(x is y for y in cases) else x.array
            for x in args
        ]
        if any(x.dtype in _NARROW for x in node.args):
            arrays = _widened(node.op, arrays)
        is_integer = jnp.issubdtype(node.dtype, jnp.integer)
        if node.op in _DIVISIONS and is_integer:
            if _never_negative(args):
                return _NodeValue(_unsigned(_DIVISIONS[node.op], node.dtype, *arrays), axes)
            if node.op in ("floor_divide", "remainder"):
                return self._as_program(node, args)
        if node.op == "integer_pow":
            return _NodeValue(_power(arrays[0], node.param), axes)
        if node.op == "div" and arrays[0].shape and not arrays[1].shape:
            return _NodeValue(_quotient(*arrays), axes)
        return _NodeValue(operations.compute(node, arrays), axes)

    def _as_program(self, node: Node, args: list[_NodeValue]) -> _NodeValue:
        """A floor division or remainder by the operations that JAX has for it."""
        raw = read_division(node.op, node.dtype)

        def value(inner: Node, inner_args: list[_NodeValue]) -> _NodeValue:
            number: Any = inner.param
            return args[number] if inner.op == "input" else self.value(inner, inner_args)

        return fold([raw], value)[id(raw)]

    def _float_distance(self, distance: _Distance, converted: _NodeValue) -> Array | None:
        """The difference of places as floats, in fewer operations than converting the difference of
        integers, which takes two. None if rows or columns are not known to be consecutive.

        It adds numbers that each thread knows of rows and of columns. All count from the first
        column, so that the floats are exact where converted integers are.
        """
        pair = distance.left, distance.right
        rows, columns = sorted(pair, key=lambda x: x.axes != self._first)
        first_row, first_column = (
            next((run.first for run in self.runs if run.values is x.array), None)
            for x in (rows, columns)
        )
        if first_row is None or first_column is None:
            return None
        shape = jnp.shape(converted.array)

        def spread(x: Array, axis: int) -> Array:
            tile = lax.broadcast_in_dim(x.astype(jnp.float32), shape, (axis,))
            return self.layout.to_layout(tile)

        column = columns.array - first_column
        of_thread = column & np.int32(_THREAD_BITS)
        offset, start = spread(column - of_thread, 1), spread(of_thread, 1)
        if self.transposed:  # registers are scarce there
            row = spread(rows.array - first_column, 0) - start
        else:
            row = spread(rows.array - first_row, 0) - start
            row = row + jnp.float32(first_row - first_column)
        tile = row - offset if distance.left is rows else offset - row
        tile = self.layout.diagonals(tile)
        return jnp.abs(tile) if distance.absolute else tile

    @property
    def _first(self) -> str:
        """The axis of a tile along which its first axis in registers runs."""
        return "s" if self.transposed else "t"

    def spread(self, x: _NodeValue, axes: str, sizes: Any) -> Any:
        """Broadcasts an array along these axes of a tile; `sizes` are those of all its axes."""
        if x.axes == axes:
            return x.array
        if (id(x.array), axes) not in self.tiles:
            wide = [size for size in sizes if size != 1]
            shape = tuple(wide[::-1] if self.transposed else wide)
            if len(axes) == 1:
                shape = tuple(size for axis, size in zip("ts", sizes, strict=False) if axis in axes)
                shape = shape or tuple(wide)
            places = () if not x.axes else (0 if x.axes == self._first else 1,)
            tile = lax.broadcast_in_dim(x.array, shape, places)
            # With the array, so that its id stays its own.
            self.tiles[id(x.array), axes] = (
                self.layout.to_layout(tile) if x.axes else tile,
                x.array,
            )
        return self.tiles[id(x.array), axes][0]


def _distance(node: Node, args: list[_NodeValue]) -> _Distance | None:
    """The distance whose tile a node is, or which it converts to floats; None for other nodes."""
    if node.op == "sub" and {x.axes for x in args} == {"t", "s"}:
        return _Distance(args[0], args[1])
    if not args or args[0].distance is None:
        return None
    if node.op == "abs":
        return args[0].distance._replace(absolute=True)
    is_float = node.op == "convert_element_type" and node.dtype == jnp.float32
    return args[0].distance if is_float else None


def _never_negative(args: list[_NodeValue]) -> bool:
    """Returns whether a division is of integers that are at least 0 by integers of at least 1."""
    x, by = (x.interval for x in args)
    return x is not None and by is not None and bool(x.lo >= 0 and by.lo >= 1)


def _is_inside(low: _NodeValue, x: _NodeValue, high: _NodeValue) -> bool:
    """Returns whether integers are known to lie between two others."""
    if x.interval is None or low.interval is None or high.interval is None:
        return False
    return bool(low.interval.hi <= x.interval.lo and x.interval.hi <= high.interval.lo)


def _widened(name: str, values: list[Any]) -> list[Any]:
    """Converts integers of 8 bits to what Mosaic GPU can compute with."""
    if name in _COMPARISONS:
        return [lax.convert_element_type(x, jnp.int32) for x in values]
    if name not in _ANY_WIDTH:
        raise NotImplementedError(f"{name} of integers of 8 bits")
    return values


def _power(x: Array, exponent: Any) -> Array:
    """x to the power of an integer; of powers Mosaic GPU has the square only."""
    if exponent < 0:
        return 1 / _power(x, -exponent)
    if exponent < 2:
        return x if exponent else jnp.ones_like(x)
    half = lax.square(_power(x, exponent // 2))
    return half * x if exponent % 2 else half


def _unsigned(divide: Callable[..., Any], dtype: Any, x: Any, by: Any) -> Any:
    """Divides integers that are not negative as unsigned ones, in half as many instructions."""
    shape = jnp.broadcast_shapes(jnp.shape(x), jnp.shape(by))
    operands = [lax.convert_element_type(y, f"uint{8 * dtype.itemsize}") for y in (x, by)]
    spread = [y if jnp.shape(y) == shape else lax.broadcast_in_dim(y, shape, ()) for y in operands]
    return lax.convert_element_type(divide(*spread), dtype)


def _quotient(x: Array, by: Any) -> Array:
    """A tile divided by one number. Floats are multiplied by its reciprocal: that is one
    instruction instead of ten."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return lax.div(x, lax.broadcast_in_dim(by, x.shape, ()))
    return x * (1 / by)
