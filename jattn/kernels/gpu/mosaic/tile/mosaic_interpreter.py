"""Computes functions of tiles by the operations of Mosaic GPU, on arrays without axes of size 1.

Mosaic GPU spreads arrays over the registers of 128 threads: tiles `[t, s]`, numbers of rows `[t]`
and numbers of columns `[s]`. It has no arrays `[t, 1]`, by which array code broadcasts. So `run`
traces a function for the shapes that it expects, reads it as an expression of the entry at one row
and one column, and computes the operations of the expression on arrays without axes of size 1.
"""

import dataclasses
import functools
import math
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
from jattn.functions.nodes import Node, const, fold, in_order, replaced
from jattn.functions.read import read_division
from jattn.kernels.common import entries


# The operations that Mosaic GPU computes entry by entry.
_OPERATIONS = frozenset(
    """abs add and bitcast_convert_type clamp convert_element_type cos div eq erf exp exp2
    floor_divide ge gt integer_pow le log logistic lt max min mul ne neg not or rem remainder round
    rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin square sub tanh
    xor""".split()
)
_FURTHER_PRIMITIVES = {dropout.shared_p: "shared"}
_COMPARISONS = frozenset("eq ge gt le lt ne".split())
_NARROW_OPERATIONS = frozenset("and convert_element_type not or select_n xor".split())
_NARROW_DTYPES = jnp.dtype("int8"), jnp.dtype("uint8")
_REDUCTIONS: Any = {"reduce_add": jnp.sum, "reduce_max": jnp.max, "reduce_min": jnp.min}
_SPECIAL_OPERATIONS = frozenset(("look_up", "rounded", "shared", *_REDUCTIONS))
_DIVISIONS = {"div": lax.div, "floor_divide": lax.div, "rem": lax.rem, "remainder": lax.rem}
_DESCRIPTIONS = {"custom_lin": "a derivative in forward mode, which a `custom_vjp` does not have"}


@dataclasses.dataclass(eq=False)
class Table:
    """An array in memory that functions index.

    `inside(indices, axes)` reads entries by row-major indices into the flat array; `indices` run
    along `axes` of a tile. Booleans are read as bytes. `interval` contains all entries, if known.
    """

    shape: tuple[int, ...]
    dtype: Any
    inside: Callable[[Any, str], Array]
    interval: Interval | None = None


def _with_flat_index(tables: list[Any], node: Node, args: list[Node]) -> Node | None:
    """Returns a look-up node with one row-major index; None for other nodes."""
    if node.op != "look_up":
        return None
    table: Any = tables[node.param]  # pyright: ignore
    if not operations.is_reference(table):
        raise NotImplementedError("entries of a captured array, which is not one of its operands")
    flat_index, int32 = None, np.dtype(np.int32)
    for x, size in zip(args, table.shape, strict=True):
        index = x if x.dtype == int32 else Node("convert_element_type", (x,), int32)
        if flat_index is not None:
            start = Node("mul", (flat_index, const(size, int32)), int32)
            index = Node("add", (start, index), int32)
        flat_index = index
    assert flat_index is not None
    if table.dtype != bool:
        return Node("look_up", (flat_index,), node.dtype, node.param)
    byte = np.dtype(np.int8)
    entry = Node("look_up", (flat_index,), byte, node.param)
    return Node("ne", (entry, const(0, byte)), node.dtype)


class IntegerRun(NamedTuple):
    """An argument whose `values` are consecutive integers from `first` on."""

    first: Any
    values: Array


def _unchanged(x: Array) -> Array:
    return x


class RegisterLayout(NamedTuple):
    """Functions that `run` applies to arrays in registers, to set or exploit their layout.

    to_layout: applied to tiles broadcast from rows or columns; converts to the layout of tiles.
    shared: applied to row hashes, some of which are equal, see `dropout.shared_p`.
    diagonals: applied to tiles whose entries are equal along each diagonal.
    rounded: replaces the selection of `softmax.keep_rounding`, if not None.
    """

    to_layout: Callable[[Array], Array] = _unchanged
    shared: Callable[[Array], Array] = _unchanged
    diagonals: Callable[[Array], Array] = _unchanged
    rounded: Callable[[Array], Array] | None = None


_NO_LAYOUT = RegisterLayout()


def run(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Computes `function(*arguments)`; `options` are those of `run_typed`."""
    return run_typed(function, *arguments, **options)[0]


def run_typed(
    function: Callable[..., Any],
    *arguments: Any,
    shapes: Any = None,
    transposed: bool = False,
    runs: tuple[IntegerRun, ...] = (),
    below: Any = (),
    layout: RegisterLayout = _NO_LAYOUT,
) -> tuple[Any, Any]:
    """Computes `function(*arguments)`, and returns the results and their types.

    Arguments and results are arrays without axes of size 1, `[s, t]` in place of `[t, s]` if
    `transposed`. Arguments that a function indexes are of class `Table`.

    shapes: the types of the arguments that the function expects, with all axes, `[t, s]`; by
        default the types of `arguments`.
    runs: arguments of consecutive integers.
    below: pairs (argument, size) of integer arguments from 0 to size − 1.
    layout: functions that are applied to some arrays.

    Raises NotImplementedError for operations that Mosaic GPU does not have.
    """
    expected = jax.tree.map(jax.typeof, arguments) if shapes is None else shapes
    read = entries.read(function, arguments, expected, _FURTHER_PRIMITIVES)
    leaves = jax.tree.leaves(arguments, is_leaf=operations.is_reference)
    registers = _Registers(leaves, transposed, runs, below, read.tables, layout, {})
    nodes = replaced(read.results, functools.partial(_with_flat_index, read.tables))
    if layout.rounded is not None:
        nodes = _without_selections(nodes)
    values = fold(nodes, registers.value)
    results = [
        registers.spread(values[id(node)], _axes_of_result(values[id(node)], x), x.shape)
        for node, x in zip(nodes, jax.tree.leaves(read.out), strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(read.out), results), read.out


def _axes_of_result(x: "_NodeValue", aval: Any) -> str:
    """Returns the axes of a tile along which a result of type `aval` must run, even if all of its
    entries along these axes are equal."""
    if len(aval.shape) == 1:
        return "" if aval.shape == (1,) else x.axes or "t"
    return "".join(axis for axis, size in zip("ts", aval.shape, strict=False) if size != 1)


class _Distance(NamedTuple):
    """The difference `left − right` of an array along rows and one along columns, or its absolute
    value."""

    left: "_NodeValue"
    right: "_NodeValue"
    absolute: bool = False


class _NodeValue(NamedTuple):
    """The value of a node.

    array: a number, or an array in registers.
    axes: the axes of a tile along which it runs, of "ts".
    interval: an interval that contains all entries, if they are integers and it is known.
    distance: the distance that the value is, if it is one.
    """

    array: Any
    axes: str
    interval: Interval | None = None
    distance: _Distance | None = None


# The bits of a column's index that are equal in all columns of one thread.
_THREAD_BITS = 0b110


class _Registers(NamedTuple):
    """Computes the nodes of an expression on arrays in registers.

    `leaves` are the arguments. `tiles` holds the arrays that have been broadcast, by their ids and
    axes. The other fields are arguments of `run_typed`.
    """

    leaves: list[Any]
    transposed: bool
    runs: tuple[IntegerRun, ...]
    below: Any
    tables: list[Any]
    layout: RegisterLayout
    tiles: dict[tuple[int, str], Any]

    def value(self, node: Node, args: list[_NodeValue]) -> _NodeValue:
        """Computes one node from the values of its arguments."""
        if node.op in ("input", "const"):
            return self._input(node)
        if node.op == "clamp" and _is_inside(*args):
            return args[1]
        special = node.op in _SPECIAL_OPERATIONS
        value = self._special(node, *args) if special else self._computed(node, args)
        if not jnp.issubdtype(node.dtype, jnp.integer) or node.op == "look_up":
            return value
        pairs = zip(args, node.args, strict=True)
        arg_intervals = [x.interval or intervals.anything(y.dtype) for x, y in pairs]
        interval = intervals.of_operation(node.op, node.dtype, arg_intervals, node.param)
        return value._replace(interval=interval)

    def _input(self, node: Node) -> _NodeValue:
        """Returns an argument or a constant."""
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

    def _special(self, node: Node, x: _NodeValue) -> _NodeValue:
        """Computes a look-up, a reduction, `dropout.shared_p` or `RegisterLayout.rounded`."""
        param: Any = node.param
        if node.op == "rounded":
            assert self.layout.rounded is not None
            return _NodeValue(self.layout.rounded(x.array), x.axes)
        if node.op == "look_up":
            table = self.tables[param]
            return _NodeValue(table.inside(x.array, x.axes), x.axes, table.interval)
        if node.op == "shared":
            return _NodeValue(self.layout.shared(x.array), x.axes)
        over, shape = param
        axes = "".join(axis for axis in "ts" if axis in x.axes or axis in over)
        array = self.spread(x, axes, shape)
        order = axes[::-1] if self.transposed else axes
        reduced = _REDUCTIONS[node.op](array, axis=tuple(order.index(axis) for axis in over))
        return _NodeValue(reduced, "".join(axis for axis in axes if axis not in over))

    def _computed(self, node: Node, args: list[_NodeValue]) -> _NodeValue:
        """Computes an operation entry by entry, or the conversion of a distance to floats."""
        if node.op not in _OPERATIONS:
            raise NotImplementedError(_DESCRIPTIONS.get(node.name, node.name))
        distance = _distance(node, args)
        if distance is not None and node.op == "convert_element_type":
            tile = self._float_distance(distance, args[0])
            if tile is not None:
                return _NodeValue(tile, "ts")
        return self._by_entry(node, args)._replace(distance=distance)

    def _by_entry(self, node: Node, args: list[_NodeValue]) -> _NodeValue:
        """Computes an operation entry by entry.

        Arrays along fewer axes than the result are broadcast. A number is broadcast only if it is a
        case of a selection: Mosaic GPU's other operations accept a number beside an array.
        """
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
        if any(x.dtype in _NARROW_DTYPES for x in node.args):
            arrays = _widened(node.op, arrays)
        is_integer = jnp.issubdtype(node.dtype, jnp.integer)
        if node.op in _DIVISIONS and is_integer:
            if _never_negative(args):
                return _NodeValue(
                    _divided_as_unsigned(_DIVISIONS[node.op], node.dtype, *arrays), axes
                )
            if node.op in ("floor_divide", "remainder"):
                return self._as_program(node, args)
        if node.op == "integer_pow":
            return _NodeValue(_power(arrays[0], node.param), axes)
        if node.op == "tanh":
            return _NodeValue(_tanh(arrays[0]), axes)
        if node.op == "div" and arrays[0].shape and not arrays[1].shape:
            return _NodeValue(_divided_by_number(*arrays), axes)
        return _NodeValue(operations.compute(node, arrays), axes)

    def _as_program(self, node: Node, args: list[_NodeValue]) -> _NodeValue:
        """Computes a floor division or remainder by JAX's program for it."""
        program = read_division(node.op, node.dtype)

        def value(inner: Node, inner_args: list[_NodeValue]) -> _NodeValue:
            number: Any = inner.param
            return args[number] if inner.op == "input" else self.value(inner, inner_args)

        return fold([program], value)[id(program)]

    def _float_distance(self, distance: _Distance, converted: _NodeValue) -> Array | None:
        """Returns a distance as floats; None unless rows and columns are runs of integers.

        A difference of integers and its conversion take two operations for each entry; a difference
        of rows and columns that are floats already takes one. Both are counted from the first
        column before they become floats: so the result is exact if the converted integer is.
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

        # The bits `_THREAD_BITS` of a column are subtracted from the rows; the other bits, the
        # offsets, are the same numbers in each thread.
        column = columns.array - first_column
        shared_part = column & np.int32(_THREAD_BITS)
        offset, start = spread(column - shared_part, 1), spread(shared_part, 1)
        if self.transposed:  # registers are scarce in these kernels: one operation fewer
            row = spread(rows.array - first_column, 0) - start
        else:
            row = spread(rows.array - first_row, 0) - start
            row = row + jnp.float32(first_row - first_column)
        tile = row - offset if distance.left is rows else offset - row
        tile = self.layout.diagonals(tile)
        return jnp.abs(tile) if distance.absolute else tile

    @property
    def _first(self) -> str:
        """The axis of a tile, "t" or "s", that is the first axis of its array in registers."""
        return "s" if self.transposed else "t"

    def spread(self, x: _NodeValue, axes: str, sizes: Any) -> Any:
        """Broadcasts an array to `axes` of a tile; `sizes` are the sizes of all axes."""
        if x.axes == axes:
            return x.array
        if (id(x.array), axes) not in self.tiles:
            larger_sizes = [size for size in sizes if size != 1]
            shape = tuple(larger_sizes[::-1] if self.transposed else larger_sizes)
            if len(axes) == 1:
                shape = tuple(size for axis, size in zip("ts", sizes, strict=False) if axis in axes)
                shape = shape or tuple(larger_sizes)
            array_axes = () if not x.axes else (0 if x.axes == self._first else 1,)
            tile = lax.broadcast_in_dim(x.array, shape, array_axes)
            # The array is kept alive, so that no other array gets its id.
            self.tiles[id(x.array), axes] = (
                self.layout.to_layout(tile) if x.axes else tile,
                x.array,
            )
        return self.tiles[id(x.array), axes][0]


def _distance(node: Node, args: list[_NodeValue]) -> _Distance | None:
    """Returns the distance that a node computes or converts to floats; None for other nodes."""
    if node.op == "sub" and {x.axes for x in args} == {"t", "s"}:
        return _Distance(args[0], args[1])
    if not args or args[0].distance is None:
        return None
    if node.op == "abs":
        return args[0].distance._replace(absolute=True)
    is_float = node.op == "convert_element_type" and node.dtype == jnp.float32
    return args[0].distance if is_float else None


def _never_negative(args: list[_NodeValue]) -> bool:
    """Returns whether a division is known to divide integers ≥ 0 by integers ≥ 1."""
    dividend, divisor = (x.interval for x in args)
    if dividend is None or divisor is None:
        return False
    return bool(dividend.lo >= 0 and divisor.lo >= 1)


def _is_inside(low: _NodeValue, x: _NodeValue, high: _NodeValue) -> bool:
    """Returns whether integers are known to lie between two others."""
    if x.interval is None or low.interval is None or high.interval is None:
        return False
    return bool(low.interval.hi <= x.interval.lo and x.interval.hi <= high.interval.lo)


def _widened(name: str, values: list[Any]) -> list[Any]:
    """Returns the operands of an operation of 8-bit integers in a dtype that Mosaic GPU supports.

    Raises NotImplementedError for operations other than comparisons and bitwise ones.
    """
    if name in _COMPARISONS:
        return [lax.convert_element_type(x, jnp.int32) for x in values]
    if name not in _NARROW_OPERATIONS:
        raise NotImplementedError(f"{name} of 8-bit integers")
    return values


def _kept(node: Node) -> Node | None:
    """Returns x if a node is the selection of `softmax.keep_rounding`, NaN where x is NaN and else
    x; None if it is not."""
    if node.op != "select_n" or len(node.args) != 3:
        return None
    is_nan, x, nan = node.args
    param: Any = nan.param
    selects = _tested(is_nan) is x and nan.op == "const" and np.isnan(param)
    return x if selects else None


def _tested(node: Node) -> Node | None:
    """Returns x if a node is true where x is NaN."""
    return node.args[0] if node.op == "ne" and node.args[0] is node.args[1] else None


def _without_selections(roots: list[Node]) -> list[Node]:
    """Returns the roots with the selections of `keep_rounding` replaced by "rounded" nodes, and
    without those of its derivative."""
    kept = {id(_kept(node)) for node in in_order(roots)}

    def rule(node: Node, args: list[Node]) -> Node | None:
        if _kept(node) is not None:
            # No compiler fuses a sum with a subtraction.
            is_sum = args[1].op in ("add", "sub")
            return args[1] if is_sum else Node("rounded", (args[1],), node.dtype)
        if node.op == "select_n" and (x := _tested(node.args[0])) is not None and id(x) in kept:
            return args[1]
        return None

    return replaced(roots, rule)


def _tanh(x: Array) -> Array:
    """Returns 1 − 2 / (e^(2x) + 1), with an absolute error of 3e-7.

    The approximate instruction for tanh has a relative error of 5e-4, and a division takes ten
    instructions more than the square of an approximate inverse root.
    """
    root = lax.rsqrt(jnp.exp2(x.astype(jnp.float32) * (2 * math.log2(math.e))) + 1)
    return (1 - 2 * root * root).astype(x.dtype)


def _power(x: Array, exponent: Any) -> Array:
    """Returns x to the power of an integer by squares: Mosaic GPU has no other power."""
    if exponent < 0:
        return 1 / _power(x, -exponent)
    if exponent < 2:
        return x if exponent else jnp.ones_like(x)
    half = lax.square(_power(x, exponent // 2))
    return half * x if exponent % 2 else half


def _divided_as_unsigned(divide: Callable[..., Any], dtype: Any, x: Any, by: Any) -> Any:
    """Divides non-negative integers as unsigned ones, which takes half the instructions."""
    shape = jnp.broadcast_shapes(jnp.shape(x), jnp.shape(by))
    operands = [lax.convert_element_type(y, f"uint{8 * dtype.itemsize}") for y in (x, by)]
    operands = [
        y if jnp.shape(y) == shape else lax.broadcast_in_dim(y, shape, ()) for y in operands
    ]
    return lax.convert_element_type(divide(*operands), dtype)


def _divided_by_number(x: Array, by: Any) -> Array:
    """Divides an array by one number; floats are multiplied by its reciprocal, which takes one
    instruction instead of ten."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return lax.div(x, lax.broadcast_in_dim(by, x.shape, ()))
    return x * (1 / by)
