"""Expressions of functions of scalars, made from their jaxprs.

Masks and score functions are programs for one query and one key. `read` traces such a program and
returns its result as a graph of `Node`s on scalars; arrays are tables, which the expression
indexes. Nothing is evaluated entry by entry: an array within the program is a function from places
to nodes, and only the places that are read become nodes. Arrays that depend on the operands alone
are evaluated by JAX, also by operations that cannot be read (sorting, long sums), and become
tables too.

An unknown operation becomes a node `unknown`, so that the rest can still be read.
"""

import bisect
import contextlib
import functools
import itertools
import math
import operator
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax._src.core import pvary_p
from jax._src.pjit import reshard_p
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Primitive, primitives

from jattn._types import Shape
from jattn.functions.nodes import Expression, Node, const
from jattn.functions.operations import ELEMENTWISE, is_reference


def read(function: Callable[..., Any], scalars: Sequence[Any], operands: Any = ()) -> Expression:
    """Returns `function(*scalars, *operands)` as an expression; `scalars` are their dtypes.

    The function returns numbers. Arrays that it closes over become tables, like operands.
    """
    like = [jax.ShapeDtypeStruct((), np.dtype(dtype)) for dtype in scalars]
    program = jax.make_jaxpr(function)(*like, *operands)
    reader = ProgramReader()
    inputs = [reader.input(number, dtype) for number, dtype in enumerate(scalars)]
    arrays = [reader.table(x) for x in jax.tree.leaves(operands)]
    constants = [reader.table(x) for x in program.consts]
    results = reader.run(program.jaxpr, [*constants, *inputs, *arrays])
    nodes = [reader.shared(x.entry((0,) * len(x.shape))) for x in results]
    effect = next((operation(x) for x in program.eqns if x.effects), None)
    return Expression(nodes, reader.tables, effect)


# --- arrays as functions ------------------------------------------------------------------------

Place = int | Node  # an index along an axis


class Entries(NamedTuple):
    """An array within a program.

    `entry` returns the node at a place. `evaluate` returns the array; None if it depends on the
    scalars.
    """

    shape: Shape
    dtype: Any
    entry: Callable[[tuple[Place, ...]], Node]
    evaluate: Callable[[], Any] | None = None


def _scalar(node: Node) -> Entries:
    return Entries((), node.dtype, lambda _: node)


def _as_node(place: Place) -> Node:
    return place if isinstance(place, Node) else const(place, np.int32)


def _as_place(node: Place) -> Place:
    """Returns a place in a dtype that can hold sizes of arrays; an integer if it is known."""
    if isinstance(node, int):
        return node
    if node.op == "const" and isinstance(node.param, int):
        return int(node.param)
    return _converted(node, np.int32) if node.dtype.itemsize < 4 else node


def _plus(a: Place, b: Place) -> Place:
    if isinstance(a, int) and isinstance(b, int):
        return a + b
    if a == 0 or b == 0:
        return a if b == 0 else b
    a, b = _alike(_as_node(a), _as_node(b))
    return Node("add", (a, b), a.dtype)


def _alike(a: Node, b: Node) -> tuple[Node, Node]:
    """Returns both nodes in one dtype, that of a node that is not a constant."""
    dtype = b.dtype if a.op == "const" else a.dtype
    return _converted(a, dtype), _converted(b, dtype)


def _converted(node: Node, dtype: Any) -> Node:
    if node.dtype == dtype:
        return node
    if node.op == "const":
        return const(node.param, dtype)
    return Node("convert_element_type", (node,), np.dtype(dtype))


def _clamped(place: Place, last: int) -> Place:
    """Returns a place clamped to 0..last."""
    place = _as_place(place)
    if isinstance(place, int):
        return min(max(place, 0), last)
    if last == 0:
        return const(0, place.dtype)
    if place.op == "clamp" and [_as_place(x) for x in place.args[::2]] == [0, last]:
        return place
    ends = (const(0, place.dtype), place, const(last, place.dtype))
    return Node("clamp", ends, place.dtype)


_MOST_UNROLLED = 64  # entries of a reduction over an array that depends on the scalars

_PRIMITIVES: dict[str, Primitive] = {
    x.name: x
    for x in (*vars(lax).values(), *vars(primitives).values(), pvary_p, reshard_p)
    if isinstance(x, Primitive)
}


def operation(equation: Any) -> str:
    """Returns the name of an equation's primitive.

    A user's primitive with the name of one of JAX's may mean something else. For it this is a
    phrase that is not a name.
    """
    primitive = equation.primitive
    is_unique = _PRIMITIVES.get(primitive.name, primitive) is primitive
    return primitive.name if is_unique else f"{primitive.name!r} (not a primitive of JAX's)"


def called_program(equation: Any) -> ClosedJaxpr | None:
    """Returns the program that an equation calls, without its derivative rule if it has one."""
    if operation(equation) not in (*_CALLS, *_WITH_RULES):
        return None
    params = equation.params
    program = params["jaxpr"] if "jaxpr" in params else params["call_jaxpr"]
    return program if isinstance(program, ClosedJaxpr) else ClosedJaxpr(program, ())


_SAME = ("copy", "name", "optimization_barrier", "pvary", "reshard")
_FOLDED = {
    "reduce_sum": "add",
    "reduce_prod": "mul",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_and": "and",
    "reduce_or": "or",
}
_PARAMS: dict[str, Callable[..., Hashable]] = {
    "integer_pow": operator.itemgetter("y"),
    "round": operator.itemgetter("rounding_method"),
    "reduce_precision": operator.itemgetter("exponent_bits", "mantissa_bits"),
}
# The values that equal the maximum share its derivative equally; in a chain of `max` they do not.
_SHARED_BY_EQUALS: dict[str, Callable[..., Any]] = {
    "max": lambda *x: jax.numpy.stack(x).max(),
    "min": lambda *x: jax.numpy.stack(x).min(),
}
_CALLS = ("jit", "remat2", "closed_call")
_WITH_RULES = ("custom_jvp_call", "custom_vjp_call")  # calls with their own derivatives


@functools.cache
def _division(name: str, dtype: Any) -> ClosedJaxpr:
    """Returns the program of `x // y` or `x % y`."""
    function = {"floor_divide": jax.numpy.floor_divide, "remainder": jax.numpy.remainder}[name]
    return jax.make_jaxpr(function)(*[jax.ShapeDtypeStruct((), dtype)] * 2)


def read_division(name: str, dtype: Any) -> Node:
    """Returns `floor_divide` or `remainder` of two inputs in JAX's own operations."""
    reader = ProgramReader()
    return reader.division(name, reader.input(0, dtype), reader.input(1, dtype))


class ProgramReader:
    """Makes nodes of equations. Equal nodes are one object."""

    def __init__(self) -> None:
        self.tables: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._nodes: dict[Hashable, Node] = {}
        self._known: set[int] = set()  # ids of these nodes
        self._divides = False

    def input(self, number: int, dtype: Any) -> Entries:
        """Returns the entries of a scalar argument."""
        return _scalar(Node("input", (), np.dtype(dtype), number))

    def table(self, value: Any) -> Entries:
        """Returns the entries of a known array, or of a reference to memory."""
        shape, dtype = np.shape(value), _dtype(getattr(value, "dtype", type(value)))
        if not isinstance(dtype, np.dtype):
            return self.unknown(jax.typeof(value), f"arrays of {dtype}")
        if not shape and not isinstance(value, Tracer):
            return _scalar(const(value, dtype))._replace(evaluate=lambda: value)

        def entry(places: tuple[Place, ...]) -> Node:
            if id(value) not in self._numbers:
                self._numbers[id(value)] = len(self.tables)
                self.tables.append(value)
            index = (_clamped(place, size - 1) for place, size in zip(places, shape, strict=True))
            return self.node("look_up", map(_as_node, index), dtype, self._numbers[id(value)])

        return Entries(shape, dtype, entry, None if is_reference(value) else lambda: value)

    def node(self, op: str, args: Any, dtype: Any, param: Hashable = None) -> Node:
        """Returns a new node, or the equal node if there is one."""
        return self.shared(Node(op, tuple(args), _dtype(dtype), param))

    def shared(self, node: Node) -> Node:
        """Returns the simplified node, or the equal node if there is one."""
        if id(node) in self._known:
            return node
        args = tuple(map(self.shared, node.args))
        node = _simplified(replace(node, args=args))
        if id(node) in self._known:
            return node
        node = self.divided(node)
        if id(node) in self._known:
            return node
        args = node.args
        # 0, 0.0 and False are equal, as are 0.0 and −0.0; NaN is equal to nothing.
        param = node.param if callable(node.param) else repr(node.param)
        key = node.op, tuple(map(id, args)), node.dtype, param
        if key not in self._nodes:
            self._nodes[key] = replace(node, args=args)
            self._known.add(id(self._nodes[key]))
        return self._nodes[key]

    def divided(self, node: Node) -> Node:
        """Returns a floor division or remainder of integers in place of JAX's program for it."""
        if node.op != "select_n" or not np.issubdtype(_plain(node.dtype), np.integer):
            return node
        _, case, *_ = node.args
        is_wide = node.dtype.itemsize > 4  # GCC 12 cannot compile some of these
        if self._divides or is_wide or case.op not in ("div", "rem"):
            return node
        x, y = case.args
        name = "floor_divide" if case.op == "div" else "remainder"
        if name == "remainder" and y.op == "select_n":
            y = y.args[1]  # JAX selects 1 if the divisor is 0
        same = self.division(name, _scalar(x), _scalar(y))
        is_same = same.op == node.op and all(map(operator.is_, same.args, node.args))
        return self.node(name, (x, y), node.dtype) if is_same else node

    def division(self, name: str, x: Entries, y: Entries) -> Node:
        """Returns `x // y` or `x % y` in the operations of its program."""
        self._divides = True  # the division itself ends with a selection
        (result,) = self.closed(_division(name, x.dtype), [x, y])
        node = self.shared(result.entry(()))
        self._divides = False
        return node

    def run(self, program: Any, values: Sequence[Entries]) -> list[Entries]:
        """Returns the results of a jaxpr, given its constants and arguments."""
        known = dict(zip((*program.constvars, *program.invars), values, strict=True))

        def value(x: Any) -> Entries:
            return self.table(x.val) if hasattr(x, "val") else known[x]

        for equation in program.eqns:
            results = self.apply(equation, [value(x) for x in equation.invars])
            # Each place is read once, and scalars in the order of the program, so that long
            # programs take linear time and no deep recursion.
            results = [x._replace(entry=functools.cache(x.entry)) for x in results]
            for x in results:
                if math.prod(x.shape) == 1 and x.evaluate is None:
                    x.entry((0,) * len(x.shape))
            known |= dict(zip(equation.outvars, results, strict=True))
        return [value(x) for x in program.outvars]

    def closed(self, program: Any, values: Sequence[Entries]) -> list[Entries]:
        """Returns the results of a program with its constants."""
        return self.run(program.jaxpr, [*map(self.table, program.consts), *values])

    def apply(self, equation: Any, values: list[Entries]) -> list[Entries]:
        """Returns the results of an equation. If all operands are known, JAX can evaluate them."""
        is_known = all(x.evaluate for x in values)
        has_rule = operation(equation) in _WITH_RULES
        results = None if is_known and has_rule else self.interpret(equation, values)
        if is_known:

            @functools.cache
            def evaluated() -> list[Any]:
                operands = [x.evaluate() for x in values if x.evaluate]
                return _evaluated(equation, operands)

            def known_entries(number: int) -> Entries:
                aval = equation.outvars[number].aval
                evaluate = lambda: evaluated()[number]  # noqa: E731
                looked_up = lambda places: self.table(evaluate()).entry(places)  # noqa: E731
                entry = results[number].entry if results else looked_up
                return Entries(aval.shape, _dtype(aval.dtype), entry, evaluate)

            return [known_entries(n) for n in range(len(equation.outvars))]
        if results is None:
            return [self.unknown(x.aval, operation(equation)) for x in equation.outvars]
        return results

    def unknown(self, aval: Any, name: str) -> Entries:
        dtype = _dtype(aval.dtype)
        return Entries(aval.shape, dtype, lambda _: Node("unknown", (), dtype, name))

    def interpret(self, equation: Any, values: list[Entries]) -> list[Entries] | None:
        """Returns the results of an equation; None if its operation is unknown."""
        name, params = operation(equation), equation.params
        program = called_program(equation)
        if program is not None:
            return self.call(equation, program, values)
        if name == "cond":
            return self.cond(params["branches"], values)
        if name == "unstack":
            return self.unstacked(values[0], params["axis"])
        if name in _SAME:
            return values
        if len(equation.outvars) != 1:
            return None
        return self.array(name, params, values, equation.outvars[0].aval)

    def call(self, equation: Any, program: ClosedJaxpr, values: list[Entries]) -> list[Entries]:
        """Returns the results of the program that an equation calls."""
        name = operation(equation)
        results = self.closed(program, values)
        if name not in _WITH_RULES:
            return results
        return [self.with_rule(equation, n, x, values) for n, x in enumerate(results)]

    def with_rule(self, equation: Any, n: int, result: Entries, values: list[Entries]) -> Entries:
        """Returns result n of a call with a derivative rule; its nodes keep the rule."""

        def entry(places: tuple[Place, ...]) -> Node:
            value = result.entry(places)
            size = sum(math.prod(x.shape) for x in values)
            if size > _MOST_UNROLLED or not all(isinstance(x, int) for x in places):
                return self.node("custom", (value, value), value.dtype, _without_rule)
            entries = [x.entry(place) for x in values for place in np.ndindex(x.shape)]
            function = functools.partial(_entry_of_call, equation, n, places)
            return self.node("custom", (value, *entries), value.dtype, function)

        return Entries(result.shape, result.dtype, entry)

    def array(
        self, name: str, params: Any, values: list[Entries], result: Any
    ) -> list[Entries] | None:
        """Returns the single result of an operation; None if the operation is unknown."""
        name = {"add_any": "add"}.get(name, name)
        if name in ELEMENTWISE and (name != "bitcast_convert_type" or _is_alike(values[0], result)):
            param = _PARAMS[name](params) if name in _PARAMS else None
            if name == "reduce_precision" and _keeps_all_bits(result.dtype, **params):
                return values
            return [self.entries(name, values, result, param)]
        if name == "stop_gradient":
            return [self.entries("custom", values * 2, result, lax.stop_gradient)]
        if name == "one_minus_square":  # of newer versions of JAX
            unit = _scalar(const(1, result.dtype))
            square = self.entries("square", values, result, None)
            return [self.entries("sub", [unit, square], result, None)]
        if name in _FOLDED:
            return self.folded(_FOLDED[name], values[0], params["axes"], result)
        moved = getattr(self, f"_{name}", None)
        entry = moved and moved(values, params, result)
        return entry and [Entries(result.shape, _dtype(result.dtype), entry)]

    def entries(self, op: str, values: list[Entries], result: Any, param: Any) -> Entries:
        """Returns the results of an operation entry by entry; scalars broadcast."""

        def entry(places: tuple[Place, ...]) -> Node:
            args = (x.entry(places if x.shape else ()) for x in values)
            return self.node(op, args, result.dtype, param)

        return Entries(result.shape, _dtype(result.dtype), entry)

    def cond(self, branches: Any, values: list[Entries]) -> list[Entries]:
        """Reads all branches and selects among their results."""
        which, *operands = values
        results = [self.closed(x, operands) for x in branches]
        last = _scalar(_clamped(which.entry(()), len(branches) - 1))  # pyright: ignore[reportArgumentType]
        if len(branches) == 2:
            last = _scalar(self.node("ne", (last.entry(()), const(0, last.dtype)), bool))
        return [
            self.entries("select_n", [last, *each], each[0], None)
            for each in zip(*results, strict=True)
        ]

    def folded(self, op: str, x: Entries, axes: Any, result: Any) -> list[Entries] | None:
        """Returns a reduction of few entries, unrolled; None for many."""
        sizes = [x.shape[axis] for axis in axes]
        if not 0 < math.prod(sizes) <= _MOST_UNROLLED:
            return None

        def entry(places: tuple[Place, ...]) -> Node:
            def inner_entry(inner: tuple[int, ...]) -> Node:
                inside, rest = dict(zip(axes, inner, strict=True)), iter(places)
                index = (inside[a] if a in inside else next(rest) for a in range(len(x.shape)))
                return x.entry(tuple(index))

            each = [*map(inner_entry, np.ndindex(*sizes))]
            value = functools.reduce(lambda a, b: self.node(op, (a, b), result.dtype), each)
            if op not in _SHARED_BY_EQUALS:
                return value
            return self.node("custom", (value, *each), value.dtype, _SHARED_BY_EQUALS[op])

        return [Entries(result.shape, _dtype(result.dtype), entry)]

    def unstacked(self, x: Entries, axis: int) -> list[Entries]:
        """Returns the parts of an array along an axis."""
        shape = (*x.shape[:axis], *x.shape[axis + 1 :])

        def part(n: int) -> Entries:
            return Entries(
                shape, x.dtype, lambda places: x.entry((*places[:axis], n, *places[axis:]))
            )

        return [part(n) for n in range(x.shape[axis])]

    # Each `_name` returns a function from places in the result of that primitive to nodes.

    def _broadcast_in_dim(self, values: Any, params: Any, result: Any) -> Any:
        axes, x = params["broadcast_dimensions"], values[0]
        return lambda places: x.entry(
            tuple(0 if n == 1 else places[a] for a, n in zip(axes, x.shape, strict=True))
        )

    def _reshape(self, values: Any, params: Any, result: Any) -> Any:
        narrow = [[n for n in shape if n != 1] for shape in (values[0].shape, result.shape)]
        return _of_same_order(values[0], result.shape) if narrow[0] == narrow[1] else None

    _squeeze = _reshape

    def _transpose(self, values: Any, params: Any, result: Any) -> Any:
        order = params["permutation"]
        return lambda places: values[0].entry(
            tuple(places[order.index(a)] for a in range(len(order)))
        )

    def _iota(self, values: Any, params: Any, result: Any) -> Any:
        axis = params["dimension"]
        return lambda places: _converted(_as_node(places[axis]), _dtype(result.dtype))

    def _slice(self, values: Any, params: Any, result: Any) -> Any:
        starts, strides = params["start_indices"], params["strides"]
        if strides and any(x != 1 for x in strides):
            return None
        return lambda places: values[0].entry(tuple(map(_plus, places, starts)))

    def _dynamic_slice(self, values: Any, params: Any, result: Any) -> Any:
        x, *starts = values
        room = [n - size for n, size in zip(x.shape, params["slice_sizes"], strict=True)]

        def entry(places: tuple[Place, ...]) -> Node:
            first = (
                _clamped(start.entry(()), last) for start, last in zip(starts, room, strict=True)
            )
            return x.entry(tuple(map(_plus, places, first)))

        return entry

    def _concatenate(self, values: Any, params: Any, result: Any) -> Any:
        axis = params["dimension"]
        starts = [0, *itertools.accumulate(x.shape[axis] for x in values)]

        def entry(places: tuple[Place, ...]) -> Node:
            place = places[axis]

            def part(x: Entries, start: int) -> Node:
                inside = _clamped(_plus(place, -start), x.shape[axis] - 1)
                return x.entry((*places[:axis], inside, *places[axis + 1 :]))

            if isinstance(place, int):
                which = bisect.bisect_right(starts, place) - 1
                return part(values[which], starts[which])
            selected = part(values[-1], starts[-2])
            for x, start, end in reversed(
                list(zip(values[:-1], starts, starts[1:-1], strict=False))
            ):
                inside = self.node("lt", (place, const(end, place.dtype)), bool)
                cases = selected, part(x, start)
                selected = self.node("select_n", (inside, *cases), result.dtype)
            return selected

        return entry if all(x.shape[axis] for x in values) else None

    def _stack(self, values: Any, params: Any, result: Any) -> Any:
        axis = params["axis"]

        def widened(x: Entries) -> Entries:
            shape = (*x.shape[:axis], 1, *x.shape[axis:])
            return Entries(
                shape, x.dtype, lambda places: x.entry((*places[:axis], *places[axis + 1 :]))
            )

        return self._concatenate([*map(widened, values)], {"dimension": axis}, result)

    def _gather(self, values: Any, params: Any, result: Any) -> Any:
        x, indices = values
        how, sizes = params["dimension_numbers"], params["slice_sizes"]
        if not all(x.shape):
            return None
        room = [n - size for n, size in zip(x.shape, sizes, strict=True)]
        without = *how.collapsed_slice_dims, *how.operand_batching_dims
        sliced = [a for a in range(len(x.shape)) if a not in without]
        pairs = list(zip(how.operand_batching_dims, how.start_indices_batching_dims, strict=True))
        fills = params["mode"] == lax.GatherScatterMode.FILL_OR_DROP

        def entry(places: tuple[Place, ...]) -> Node:
            batch = tuple(p for a, p in enumerate(places) if a not in how.offset_dims)
            offsets = dict(zip(sliced, (places[a] for a in how.offset_dims), strict=True))
            starts = {a: indices.entry((*batch, n)) for n, a in enumerate(how.start_index_map)}
            offsets |= {a: batch[n] for a, n in pairs}
            inside = [
                _plus(_clamped(starts.get(a, 0), room[a]), offsets.get(a, 0))
                for a in range(len(x.shape))
            ]
            selected = x.entry(tuple(inside))
            if not fills:
                return selected
            for a, start in starts.items():
                low = self.node("ge", (start, const(0, start.dtype)), bool)
                high = self.node("le", (start, const(room[a], start.dtype)), bool)
                is_inside = self.node("and", (low, high), bool)
                missing = const(_fill(params["fill_value"], result.dtype), result.dtype)
                cases = missing, selected
                selected = self.node("select_n", (is_inside, *cases), result.dtype)
            return selected

        return entry


def _is_alike(x: Entries, result: Any) -> bool:
    return x.shape == result.shape and x.dtype.itemsize == result.dtype.itemsize


def _fill(value: Any, dtype: Any) -> Any:
    """Returns the value that JAX gives for an index outside an array."""
    kind = np.dtype(dtype).kind
    if value is None and kind in "iu":
        return np.iinfo(dtype).min or np.iinfo(dtype).max
    return value if value is not None else True if kind == "b" else math.nan


def _of_same_order(x: Entries, shape: Shape) -> Any:
    """Returns the entries of x in a shape that differs in axes of size 1."""

    def entry(places: tuple[Place, ...]) -> Node:
        wide = iter(place for place, size in zip(places, shape, strict=True) if size != 1)
        return x.entry(tuple(0 if size == 1 else next(wide) for size in x.shape))

    return entry


def _simplified(node: Node) -> Node:
    """Returns an equal node with fewer operations: without sums with 0, products with 1, and
    conversions of constants, which are frequent in programs."""
    args = node.args
    values = [x.param if x.op == "const" else None for x in args]
    if node.op == "convert_element_type":
        (x,) = args
        safe = isinstance(x.param, bool | int) or np.issubdtype(_plain(node.dtype), np.floating)
        is_constant = x.op == "const" and safe and _fits(x.param, node.dtype)
        converted = const(x.param, node.dtype) if is_constant else node
        return x if x.dtype == node.dtype else converted
    if node.op == "sub" and values[1] == 0:  # in floats too: −0.0 − 0 is −0.0
        return args[0]
    if not np.issubdtype(_plain(node.dtype), np.integer):
        return node
    if node.op == "add" and 0 in values:
        return args[1 - values.index(0)]
    if node.op == "mul" and 1 in values:
        return args[1 - values.index(1)]
    return node


def _plain(dtype: Any) -> Any:
    return dtype if isinstance(dtype, np.dtype) else np.dtype(object)


def _fits(value: Any, dtype: Any) -> bool:
    """Returns whether a dtype can hold a constant, rounded at most once."""
    if np.issubdtype(dtype, np.integer):
        limits = np.iinfo(dtype)
        return limits.min <= value <= limits.max
    return True


def _keeps_all_bits(dtype: Any, exponent_bits: int, mantissa_bits: int) -> bool:
    """Returns whether rounding to these bits leaves every float of a dtype unchanged."""
    limits = jax.numpy.finfo(dtype)
    return exponent_bits >= limits.nexp and mantissa_bits >= limits.nmant


def _dtype(dtype: Any) -> Any:
    """NumPy's form of a dtype; dtypes of JAX alone, such as random keys, are unchanged."""
    return dtype if jax.numpy.issubdtype(dtype, jax.dtypes.extended) else np.dtype(dtype)


def _entry_of_call(equation: Any, n: int, place: Any, *entries: Any) -> Any:
    """Returns the entry at a place of result n of an equation, given its operands' entries."""
    rest = iter(entries)
    operands = [
        jax.numpy.stack([next(rest) for _ in range(x.aval.size)]).reshape(x.aval.shape)
        for x in equation.invars
    ]
    params = equation.primitive.get_bind_params(equation.params)
    return equation.primitive.bind(*operands, **params)[n][place]


def _without_rule(*_: Any) -> Any:
    raise NotImplementedError("functions of pairs have no derivative rules of long arrays")


def _evaluated(equation: Any, operands: list[Any]) -> list[Any]:
    """Evaluates an equation, immediately if all operands are known while tracing."""
    params = equation.primitive.get_bind_params(equation.params)
    traced = any(isinstance(x, Tracer) for x in operands)
    with contextlib.nullcontext() if traced else jax.ensure_compile_time_eval():
        results = equation.primitive.bind(*operands, **params)
    return list(results) if equation.primitive.multiple_results else [results]
