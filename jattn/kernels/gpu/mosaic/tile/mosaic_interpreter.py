"""Functions of tiles as Mosaic GPU computes them: without axes of size 1.

Its arrays lie spread over the registers of 128 threads, whole tiles `[t, s]`, rows `[t]` or columns
`[s]` of them; there is no place for `[t, 1]`, through which array code broadcasts. A function is
traced for the shapes it expects and its operations run on arrays that lack these axes.
"""

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
from jattn.functions import intervals
from jattn.functions.interval_rules import Interval
from jattn.functions.read import called_program, division_in, operation


# What is computed entry by entry, and what Mosaic GPU knows of that.
_ELEMENTWISE = frozenset(
    """abs add add_any and bitcast_convert_type clamp convert_element_type copy cos div eq erf exp
    exp2 floor_divide ge gt integer_pow le log logistic lt max min mul ne neg not one_minus_square
    or rem remainder round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign
    sin square sub tanh xor""".split()
)
_COMPARISONS = frozenset("eq ge gt le lt ne".split())
_ANY_WIDTH = frozenset("and convert_element_type copy not or select_n xor".split())
_NARROW = jnp.dtype("int8"), jnp.dtype("uint8")
_REDUCTIONS: Any = {"reduce_sum": jnp.sum, "reduce_max": jnp.max, "reduce_min": jnp.min}
# Of what is never negative.
_CALLED_DIVISIONS: Any = {"floor_divide": lax.div, "remainder": lax.rem}
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
    lines: Any = (),
    below: Any = (),
    tables: Any = None,
    held: Held = _AS_THEY_ARE,
) -> tuple[Any, Any]:
    """`function(*arguments)` and its results' types, where `shapes` are those that it expects:
    arguments and results lack their axes of size 1, and are `[s, t]` in place of `[t, s]` if
    transposed; types do not and are not.

    `runs` says of which arguments more is known, `lines` along which axis of a tile "ts" arguments
    run, `below` which arguments are integers from 0 to less than a size, and `tables` how entries
    are looked up: `tables[which](places, axes)`.

    Raises NotImplementedError for what registers cannot do.
    """
    values = jax.tree.leaves(arguments)
    expected = jax.tree.map(jax.typeof, arguments) if shapes is None else shapes
    program, out = jax.make_jaxpr(function, return_shape=True)(*expected)
    known: list[Any] = [(x, _Line(axis)) for x, axis in lines if len(axis) == 1]
    known += [(x, Interval(np.int32(0), np.int32(size - 1))) for x, size in below]
    registers = _Registers(transposed, runs, known, tables or {}, held)
    found = registers.evaluate(program.jaxpr, program.consts, values)
    return jax.tree.unflatten(jax.tree.structure(out), found), out


class _Line(NamedTuple):
    """Of rows or columns: along which axis of a tile "ts" they run."""

    axis: str


class _Same(NamedTuple):
    """Of rows or columns: all this number. As such it is spread to a tile."""

    value: Any


class _Along(NamedTuple):
    """Of a tile: the same along one axis, these values along the other."""

    values: Array
    axis: int


# Of the columns of a tile a thread has those whose places differ in other bits than these.
_OF_THREADS = 6


class _Apart(NamedTuple):
    """Of a tile: a difference, or its absolute value."""

    left: _Along
    right: _Along
    absolute: bool = False

    def as_float(
        self,
        runs: tuple[Run, ...],
        transposed: bool,
        converted: Array,
        held: Held,
    ) -> Array:
        """The difference as `converted` has it where columns follow one another. All is counted
        from the first column, so that the floats are exact where converted integers are."""
        rows, columns = sorted((self.left, self.right), key=lambda x: x.axis)
        starts = [self.first(runs, x.values) for x in (rows, columns)]
        if None in starts:
            return converted

        def spread(x: Array, axis: int) -> Array:
            return held.lay(lax.broadcast_in_dim(x.astype(jnp.float32), converted.shape, (axis,)))

        column = columns.values - starts[1]
        of_thread = column & np.int32(_OF_THREADS)
        near, own = spread(column - of_thread, 1), spread(of_thread, 1)
        if transposed:  # registers are scarce there
            far = spread(rows.values - starts[1], 0) - own
        else:
            far = (spread(rows.values - starts[0], 0) - own) + jnp.float32(starts[0] - starts[1])
        apart = held.diagonals(far - near if self.left is rows else near - far)
        return jnp.abs(apart) if self.absolute else apart

    @staticmethod
    def first(runs: tuple[Run, ...], values: Array) -> Any:
        return next((run.first for run in runs if run.values is values), None)


def _widened(name: str, values: list[Any]) -> list[Any]:
    """Integers of 8 bits as Mosaic GPU takes them, which can do hardly anything with them."""
    if name in _COMPARISONS:
        return [lax.convert_element_type(x, jnp.int32) for x in values]
    if name not in _ANY_WIDTH:
        raise NotImplementedError(f"{name} of integers of 8 bits")
    return values


def _power(x: Array, exponent: int) -> Array:
    """x to the power of an integer, of which Mosaic GPU knows the square only."""
    if exponent < 0:
        return 1 / _power(x, -exponent)
    if exponent < 2:
        return x if exponent else jnp.ones_like(x)
    half = lax.square(_power(x, exponent // 2))
    return half * x if exponent % 2 else half


def _operation(equation: Any) -> str:
    """Its name, also where it calls a program that divides integers."""
    called = called_program(equation)
    return (called and division_in(called)) or operation(equation)


def _unsigned(divide: Callable[..., Any], dtype: Any, x: Any, by: Any) -> Any:
    """Integers that are not negative, divided as unsigned ones: half as many instructions."""
    shape = jnp.broadcast_shapes(jnp.shape(x), jnp.shape(by))
    operands = [lax.convert_element_type(y, f"uint{8 * dtype.itemsize}") for y in (x, by)]
    spread = [y if jnp.shape(y) == shape else lax.broadcast_in_dim(y, shape, ()) for y in operands]
    return lax.convert_element_type(divide(*spread), dtype)


class _Registers(NamedTuple):
    """How arrays lie that a traced function computes, and what is known of some of them: that they
    are one number, spread from one axis, or the difference of two that are; where integers lie."""

    transposed: bool
    runs: tuple[Run, ...]
    noted: list[tuple[Any, Any]]
    tables: dict[int, Callable[..., Array]]
    held: Held

    def shape(self, expected: tuple[int, ...]) -> tuple[int, ...]:
        narrow = tuple(size for size in expected if size != 1)
        return narrow[::-1] if self.transposed else narrow

    def axes(self, expected: tuple[int, ...], axes: Any) -> tuple[int, ...]:
        """Where these axes of an expected shape are."""
        wide = [axis for axis, size in enumerate(expected) if size != 1]
        wide = wide[::-1] if self.transposed else wide
        return tuple(sorted(wide.index(axis) for axis in axes if axis in wide))

    def evaluate(self, program: Any, consts: Any, values: Any) -> list[Any]:
        if any(math.prod(jnp.shape(x)) > 1 for x in consts):
            raise NotImplementedError("a captured array")
        known = dict(zip(program.constvars, (jnp.reshape(x, ()) for x in consts), strict=True))
        known |= dict(zip(program.invars, values, strict=True))

        def read(x: Any) -> Any:
            return x.val if hasattr(x, "val") else known[x]

        for equation in program.eqns:
            found = self.apply(equation, [read(x) for x in equation.invars])
            known |= dict(zip(equation.outvars, found, strict=True))
        return [read(x) for x in program.outvars]

    def apply(self, equation: Any, values: list[Any]) -> list[Any]:
        called = called_program(equation)
        if equation.primitive is dropout.shared_p:
            return [self.held.shared(values[0])]
        if called is None:
            return [self.compute(equation, values)]
        if division_in(called) and self.never_negative(equation, values):
            return [self.compute(equation, values)]
        return self.evaluate(called.jaxpr, called.consts, values)

    def compute(self, equation: Any, values: list[Any]) -> Any:
        name, params = _operation(equation), equation.params
        shapes = [x.aval.shape for x in equation.invars]
        (result, *_) = (x.aval for x in equation.outvars)
        if name == "broadcast_in_dim":
            return self.spread(values[0], shapes[0], params["broadcast_dimensions"], result.shape)
        if name in ("reshape", "squeeze") and self.shape(shapes[0]) == self.shape(result.shape):
            return values[0]
        if name in _REDUCTIONS:
            axes = self.axes(shapes[0], params["axes"])
            return _REDUCTIONS[name](values[0], axis=axes) if axes else values[0]
        if name == "iota" and result.size == 1:
            return jnp.zeros((), result.dtype)
        if name == "lookup":
            return self.looked_up(values[0], result.shape, params["which"])
        if name not in _ELEMENTWISE:
            raise NotImplementedError(_OTHER_WORDS.get(name, name))
        found = self.elementwise(equation, values, shapes, result.shape)
        if jnp.issubdtype(result.dtype, jnp.integer):
            operands = self.intervals(equation, values)
            of = intervals.of_operation(name, result.dtype, operands, params.get("y"))
            self.noted.append((found, of))
        return found

    def intervals(self, equation: Any, values: list[Any]) -> list[Interval]:
        """Where operands lie, as far as that is known."""
        found = []
        for x, variable in zip(values, equation.invars, strict=True):
            noted, number = self.noted_of(x, Interval), self.number(x)
            if number is not None and not isinstance(number, jax.Array):  # it is known already
                value = np.asarray(number, variable.aval.dtype)
                noted = Interval(value, value)
            found.append(intervals.anything(variable.aval.dtype) if noted is None else noted)
        return found

    def never_negative(self, equation: Any, values: list[Any]) -> bool:
        """Whether it divides integers of at least 0 by such of at least 1."""
        x, by = self.intervals(equation, values)
        return bool(x.lo >= 0 and by.lo >= 1)

    def looked_up(self, places: Any, shape: tuple[int, ...], which: int) -> Any:
        """Entries of a table, one for all places that are the same."""
        one = self.number(places)
        if one is not None:
            return self.spread(self.tables[which](one, ""), (), (), shape)
        axes = self.axes_of(places, shape)
        found = self.tables[which](places, axes)
        if len(axes) == 1:
            self.noted.append((found, _Line(axes)))
        return found

    def axes_of(self, x: Any, shape: tuple[int, ...]) -> str:
        """The axes of a tile "ts" along which x runs, which is expected in this shape."""
        wide = [size != 1 for size in shape]
        if sum(wide) == 2:
            return "ts"
        if len(shape) == 2:
            return "".join(axis for axis, runs in zip("ts", wide, strict=True) if runs)
        line = self.noted_of(x, _Line)
        if line is None:
            raise NotImplementedError("to look up entries at places that come from a table's axis")
        return line.axis

    def elementwise(self, equation: Any, values: Any, shapes: Any, result: Any) -> Any:
        numbers = [self.number(x) for x in values]
        if self.shape(result) and None not in numbers:
            found = self.elementwise(equation, numbers, [()] * len(numbers), ())
            return self.spread(found, (), (), result)
        # Axes of size 1 broadcast, and numbers do.
        values = [
            self.spread(x, shape, range(len(result)), result) if self.shape(shape) else x
            for x, shape in zip(values, shapes, strict=True)
        ]
        found = self.entry_by_entry(equation, values, shapes, result)
        line = next((y for x in values if (y := self.noted_of(x, _Line)) is not None), None)
        if jnp.ndim(found) == 1 and line is not None:
            self.noted.append((found, line))
        return found

    def entry_by_entry(self, equation: Any, values: Any, shapes: Any, result: Any) -> Any:
        if any(x.aval.dtype in _NARROW for x in equation.invars):
            values = _widened(operation(equation), values)
        divide = self.unsigned_division(equation, values)
        if divide is not None:
            return _unsigned(divide, equation.outvars[0].aval.dtype, *values)
        if operation(equation) in ("add_any", "copy"):
            return functools.reduce(lax.add, values)
        if operation(equation) == "one_minus_square":
            return 1 - lax.square(values[0])
        if operation(equation) == "integer_pow":
            return _power(values[0], equation.params["y"])
        if operation(equation) == "div" and self.shape(shapes[0]) and not shapes[1]:
            return self.quotient(values, shapes, result)
        return self.noticed(equation, values, equation.primitive.bind(*values, **equation.params))

    def unsigned_division(self, equation: Any, values: list[Any]) -> Callable[..., Array] | None:
        """Of unsigned integers, if that divides these as well; of a call this is known before."""
        if equation.primitive in (lax.div_p, lax.rem_p):
            return equation.primitive.bind if self.never_negative(equation, values) else None
        return _CALLED_DIVISIONS.get(_operation(equation))

    def noticed(self, equation: Any, values: list[Any], found: Any) -> Any:
        """What was found, or the same in fewer operations: the distance of two places as a float
        is one, made of what each thread knows of them; the distance converted is two."""
        name, apart = operation(equation), self.noted_of(values[0], _Apart)
        if name == "sub" and jnp.ndim(found) == 2:
            pair = [self.noted_of(x, _Along) for x in values]
            if None not in pair and pair[0].axis != pair[1].axis:
                self.noted.append((found, _Apart(*pair)))
        elif apart is None:
            return found
        elif name == "abs":
            self.noted.append((found, apart._replace(absolute=True)))
        elif found.dtype == jnp.float32:
            return apart.as_float(self.runs, self.transposed, found, self.held)
        return found

    def noted_of(self, x: Any, kind: type) -> Any:
        """What is known of this kind, or None."""
        known = (noted for array, noted in self.noted if array is x and isinstance(noted, kind))
        return next(known, None)

    def number(self, x: Any) -> Any:
        """The one number that x is, or None."""
        alike = self.noted_of(x, _Same)
        return x if jnp.ndim(x) == 0 else None if alike is None else alike.value

    def quotient(self, values: Any, shapes: Any, result: Any) -> Array:
        """A tile divided by one number: of floats multiplied with its reciprocal, which is one
        instruction where a division is ten."""
        x, by = values
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return lax.div(x, lax.broadcast_in_dim(by, x.shape, ()))
        return x * (1 / by)

    def spread(self, x: Any, before: tuple[int, ...], axes: Any, after: tuple[int, ...]) -> Any:
        """x, expected in the shape `before`, whose axes are those of `after`."""
        if self.shape(before) == self.shape(after):
            return x
        kept = [axis for axis, size in zip(axes, before, strict=True) if size != 1]
        axes, number = self.axes(after, kept), self.number(x)
        if number is not None:
            x, axes = number, ()
        found = lax.broadcast_in_dim(x, self.shape(after), axes)
        if number is not None:
            self.noted.append((found, _Same(x)))
        interval = self.noted_of(x, Interval)
        if interval is not None:
            self.noted.append((found, interval))
        if len(axes) == 1 and jnp.ndim(found) == 2:
            found = self.held.lay(found)
            self.noted.append((found, _Along(x, axes[0])))
        return found
