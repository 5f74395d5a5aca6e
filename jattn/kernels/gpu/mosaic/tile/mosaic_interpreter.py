"""Functions of tiles as Mosaic GPU computes them: without axes of size 1.

Its arrays lie spread over the registers of 128 threads, whole tiles `[t, s]`, rows `[t]` or columns
`[s]` of them; there is no place for `[t, 1]`, through which array code broadcasts. A function is
traced for the shapes it expects, read as an expression of one row and one column, and its
operations run on arrays that lack these axes.
"""

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
from jattn.functions.nodes import Node, fold
from jattn.functions.read import read_division
from jattn.kernels.common import entries
from jattn.kernels.gpu.mosaic.tile.lookup import lookup_p


# What Mosaic GPU knows.
_OPERATIONS = frozenset(
    """abs add and bitcast_convert_type clamp convert_element_type cos div eq erf exp exp2
    floor_divide ge gt integer_pow le log logistic lt max min mul ne neg not or rem remainder round
    rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin square sub tanh
    xor""".split()
)
_KNOWN = {lookup_p: "look_up_in_memory", dropout.shared_p: "shared"}
_COMPARISONS = frozenset("eq ge gt le lt ne".split())
_ANY_WIDTH = frozenset("and convert_element_type not or select_n xor".split())
_NARROW = jnp.dtype("int8"), jnp.dtype("uint8")
_REDUCTIONS: Any = {"reduce_add": jnp.sum, "reduce_max": jnp.max, "reduce_min": jnp.min}
_MOVES = frozenset(("look_up_in_memory", "shared", *_REDUCTIONS))
_DIVISIONS = {"div": lax.div, "floor_divide": lax.div, "rem": lax.rem, "remainder": lax.rem}
_OTHER_WORDS = {"custom_lin": "a parameter's derivative in forward mode, which custom_vjp has not"}


class Run(NamedTuple):
    """An argument of integers that follow one another from `first` on."""

    first: Any
    values: Array


def _unchanged(x: Array) -> Array:
    return x


class Held(NamedTuple):
    """How arrays are held in registers. `lay` puts a tile where others lie that was spread from
    rows or columns. `shared` is what becomes of `dropout.shared_p`, and `diagonals` of a tile
    that is the same along each of its diagonals."""

    lay: Callable[[Array], Array] = _unchanged
    shared: Callable[[Array], Array] = _unchanged
    diagonals: Callable[[Array], Array] = _unchanged


_AS_THEY_ARE = Held()


def run(function: Callable[..., Any], *arguments: Any, **known: Any) -> Any:
    """`function(*arguments)`; `known` as in `run_typed`."""
    return run_typed(function, *arguments, **known)[0]


def run_typed(
    function: Callable[..., Any],
    *arguments: Any,
    shapes: Any = None,
    transposed: bool = False,
    runs: tuple[Run, ...] = (),
    below: Any = (),
    tables: Any = None,
    held: Held = _AS_THEY_ARE,
) -> tuple[Any, Any]:
    """`function(*arguments)` and its results' types, where `shapes` are those that it expects:
    arguments and results lack their axes of size 1, and are `[s, t]` in place of `[t, s]` if
    transposed; types do not and are not.

    `runs` says of which arguments more is known, `below` which arguments are integers from 0 to
    less than a size, and `tables` how entries are looked up: `tables[which](places, axes)`.

    Raises NotImplementedError for what registers cannot do.
    """
    expected = jax.tree.map(jax.typeof, arguments) if shapes is None else shapes
    read = entries.read(function, arguments, expected, _KNOWN)
    leaves = jax.tree.leaves(arguments)
    registers = _Registers(leaves, transposed, runs, below, tables or {}, held, {})
    found = fold(read.results, registers.value)
    results = [
        registers.spread(found[id(node)], _of_result(found[id(node)], x), x.shape)
        for node, x in zip(read.results, jax.tree.leaves(read.out), strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(read.out), results), read.out


def _of_result(x: "_Value", aval: Any) -> str:
    """The axes of a result, along which it may be the same."""
    if len(aval.shape) == 1:
        return "" if aval.shape == (1,) else x.axes or "t"
    return "".join(axis for axis, size in zip("ts", aval.shape, strict=False) if size != 1)


class _Value(NamedTuple):
    """A number, or an array along axes of a tile, and where integers lie. `apart` are the rows and
    columns of whose difference, or of its absolute value, this is the tile."""

    array: Any
    axes: str
    interval: Interval | None = None
    apart: "_Apart | None" = None


# Of the columns of a tile a thread has those whose places differ in other bits than these.
_OF_THREADS = 6


class _Apart(NamedTuple):
    """Two values of a tile, of which one runs along its rows and one along its columns."""

    left: _Value
    right: _Value
    absolute: bool = False


class _Registers(NamedTuple):
    """Computes nodes of an expression, on arrays as they lie in registers."""

    leaves: list[Any]
    transposed: bool
    runs: tuple[Run, ...]
    below: Any
    tables: dict[int, Callable[..., Array]]
    held: Held
    tiles: dict[tuple[int, str], Any]  # arrays that have been spread, by their ids

    def value(self, node: Node, args: list[_Value]) -> _Value:
        """One node, of its arguments."""
        if node.op in ("input", "const"):
            return self._given(node)
        value = self._moved(node, *args) if node.op in _MOVES else self._computed(node, args)
        if not jnp.issubdtype(node.dtype, jnp.integer):
            return value
        pairs = zip(args, node.args, strict=True)
        given = [x.interval or intervals.anything(y.dtype) for x, y in pairs]
        found = intervals.of_operation(node.op, node.dtype, given, node.param)
        return value._replace(interval=found)

    def _given(self, node: Node) -> _Value:
        """An argument or a constant."""
        param: Any = node.param
        if node.op == "const":
            value = np.asarray(param, node.dtype)
            return _Value(value, "", Interval(value, value))
        number, axes = param
        if number < 0:
            raise NotImplementedError("iota")
        x = self.leaves[number]
        size = next((size for leaf, size in self.below if leaf is x), None)
        return _Value(x, axes, size and Interval(np.int32(0), np.int32(size - 1)))

    def _moved(self, node: Node, x: _Value) -> _Value:
        """What is not computed entry by entry."""
        param: Any = node.param
        if node.op == "look_up_in_memory":
            return _Value(self.tables[param](x.array, x.axes), x.axes)
        if node.op == "shared":
            return _Value(self.held.shared(x.array), x.axes)
        return self._reduced(node, x)

    def _computed(self, node: Node, args: list[_Value]) -> _Value:
        param: Any = node.param
        if node.op not in _OPERATIONS:
            name = param if node.op == "unknown" else node.op
            raise NotImplementedError(_OTHER_WORDS.get(name, name))
        apart = _apart(node, args)
        if apart is not None and node.op == "convert_element_type":
            found = self._distance(apart, args[0])
            if found is not None:
                return _Value(found, "ts")
        return self._by_entry(node, args)._replace(apart=apart)

    def _reduced(self, node: Node, x: _Value) -> _Value:
        along, shape = node.param  # pyright: ignore
        axes = "".join(axis for axis in "ts" if axis in x.axes or axis in along)
        array = self.spread(x, axes, shape)
        order = axes[::-1] if self.transposed else axes
        found = _REDUCTIONS[node.op](array, axis=tuple(order.index(axis) for axis in along))
        return _Value(found, "".join(axis for axis in axes if axis not in along))

    def _by_entry(self, node: Node, args: list[_Value]) -> _Value:
        """An operation entry by entry. Numbers go with arrays, but in a selection."""
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
                return _Value(_unsigned(_DIVISIONS[node.op], node.dtype, *arrays), axes)
            if node.op in ("floor_divide", "remainder"):
                return self._as_program(node, args)
        if node.op == "integer_pow":
            return _Value(_power(arrays[0], node.param), axes)
        if node.op == "div" and arrays[0].shape and not arrays[1].shape:
            return _Value(_quotient(*arrays), axes)
        return _Value(operations.compute(node, arrays), axes)

    def _as_program(self, node: Node, args: list[_Value]) -> _Value:
        """A floor division or remainder by the operations that JAX has for it."""
        raw = read_division(node.op, node.dtype)

        def value(inner: Node, given: list[_Value]) -> _Value:
            number: Any = inner.param
            return args[number] if inner.op == "input" else self.value(inner, given)

        return fold([raw], value)[id(raw)]

    def _distance(self, apart: _Apart, converted: _Value) -> Array | None:
        """The difference of places as floats in fewer operations, made of what each thread knows of
        them, where columns follow one another: the distance converted is two. All is counted from
        the first column, so that the floats are exact where converted integers are."""
        rows, columns = sorted((apart.left, apart.right), key=lambda x: x.axes != self._first)
        starts = [
            next((run.first for run in self.runs if run.values is x.array), None)
            for x in (rows, columns)
        ]
        first_row, first_column = starts
        if first_row is None or first_column is None:
            return None
        shape = jnp.shape(converted.array)

        def spread(x: Array, axis: int) -> Array:
            return self.held.lay(lax.broadcast_in_dim(x.astype(jnp.float32), shape, (axis,)))

        column = columns.array - first_column
        of_thread = column & np.int32(_OF_THREADS)
        near, own = spread(column - of_thread, 1), spread(of_thread, 1)
        if self.transposed:  # registers are scarce there
            far = spread(rows.array - first_column, 0) - own
        else:
            far = spread(rows.array - first_row, 0) - own
            far = far + jnp.float32(first_row - first_column)
        found = self.held.diagonals(far - near if apart.left is rows else near - far)
        return jnp.abs(found) if apart.absolute else found

    @property
    def _first(self) -> str:
        """The axis along which the first axis of a tile in registers runs."""
        return "s" if self.transposed else "t"

    def spread(self, x: _Value, axes: str, sizes: Any) -> Any:
        """The array along these axes of a tile, of which `sizes` are those of all its axes."""
        if x.axes == axes:
            return x.array
        if (id(x.array), axes) not in self.tiles:
            wide = [size for size in sizes if size != 1]
            shape = tuple(wide[::-1] if self.transposed else wide)
            if len(axes) == 1:
                shape = tuple(size for axis, size in zip("ts", sizes, strict=False) if axis in axes)
                shape = shape or tuple(wide)
            places = () if not x.axes else (0 if x.axes == self._first else 1,)
            found = lax.broadcast_in_dim(x.array, shape, places)
            # With the array, so that its id stays its own.
            self.tiles[id(x.array), axes] = self.held.lay(found) if x.axes else found, x.array
        return self.tiles[id(x.array), axes][0]


def _apart(node: Node, args: list[_Value]) -> _Apart | None:
    """The rows and columns of whose difference, or its absolute value, a node is the tile, or, if
    it converts to floats, of which it is the difference as such."""
    if node.op == "sub" and {x.axes for x in args} == {"t", "s"}:
        return _Apart(args[0], args[1])
    if not args or args[0].apart is None:
        return None
    if node.op == "abs":
        return args[0].apart._replace(absolute=True)
    is_float = node.op == "convert_element_type" and node.dtype == jnp.float32
    return args[0].apart if is_float else None


def _never_negative(args: list[_Value]) -> bool:
    """Whether integers of at least 0 are divided by such of at least 1."""
    x, by = (x.interval for x in args)
    return x is not None and by is not None and bool(x.lo >= 0 and by.lo >= 1)


def _widened(name: str, values: list[Any]) -> list[Any]:
    """Integers of 8 bits as Mosaic GPU takes them, which can do hardly anything with them."""
    if name in _COMPARISONS:
        return [lax.convert_element_type(x, jnp.int32) for x in values]
    if name not in _ANY_WIDTH:
        raise NotImplementedError(f"{name} of integers of 8 bits")
    return values


def _power(x: Array, exponent: Any) -> Array:
    """x to the power of an integer, of which Mosaic GPU knows the square only."""
    if exponent < 0:
        return 1 / _power(x, -exponent)
    if exponent < 2:
        return x if exponent else jnp.ones_like(x)
    half = lax.square(_power(x, exponent // 2))
    return half * x if exponent % 2 else half


def _unsigned(divide: Callable[..., Any], dtype: Any, x: Any, by: Any) -> Any:
    """Integers that are not negative, divided as unsigned ones: half as many instructions."""
    shape = jnp.broadcast_shapes(jnp.shape(x), jnp.shape(by))
    operands = [lax.convert_element_type(y, f"uint{8 * dtype.itemsize}") for y in (x, by)]
    spread = [y if jnp.shape(y) == shape else lax.broadcast_in_dim(y, shape, ()) for y in operands]
    return lax.convert_element_type(divide(*spread), dtype)


def _quotient(x: Array, by: Any) -> Array:
    """A tile divided by one number: of floats multiplied with its reciprocal, which is one
    instruction where a division is ten."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return lax.div(x, lax.broadcast_in_dim(by, x.shape, ()))
    return x * (1 / by)
