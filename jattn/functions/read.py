"""Translates functions of scalars, such as mask and score functions, to expressions.

A mask or score function is a program for one query and one key. `read` traces it to a jaxpr and
returns the result as a graph of scalar operations, `Node`s. Arrays that the function closes over or
gets as operands become tables, which `look_up` nodes index.

An array within the program is a function from an index to a `Node`, so that only the entries that
the result needs become nodes. Arrays that do not depend on the scalars are evaluated by JAX, also
with operations that have no nodes, such as sorting, and become tables as well. An operation without
a node that depends on the scalars becomes a node `primitive`, which JAX computes. If too many of
the numbers that it reads depend on the scalars, it becomes a node `unknown`; the rest is still
translated.
"""

import bisect
import contextlib
import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax._src.core import pvary_p
from jax._src.pjit import reshard_p
from jax.core import ShapedArray, Tracer
from jax.extend.core import ClosedJaxpr, JaxprEqn, Primitive, primitives

from jattn._types import Shape
from jattn.functions.nodes import Expression, Node, const
from jattn.functions.operations import ELEMENTWISE, is_reference


def read(function: Callable[..., Any], scalars: Sequence[Any], operands: Any = ()) -> Expression:
    """Returns the expression of `function(*scalars, *operands)`, whose results are scalars.

    `scalars` are the dtypes of the scalar arguments. Operands, and arrays that the function closes
    over, become tables.
    """
    types = [jax.ShapeDtypeStruct((), np.dtype(dtype)) for dtype in scalars]
    program = jax.make_jaxpr(function)(*types, *operands)
    reader = ProgramReader()
    inputs = [reader.input(number, dtype) for number, dtype in enumerate(scalars)]
    arrays = [reader.table(x) for x in jax.tree.leaves(operands)]
    constants = [reader.table(x) for x in program.consts]
    results = reader.run(program.jaxpr, [*constants, *inputs, *arrays])
    nodes = [reader.shared(x.entry((0,) * len(x.shape))) for x in results]
    effect = next((operation(x) for x in program.eqns if x.effects), None)
    return Expression(nodes, reader.tables, effect)


# --- arrays as functions ------------------------------------------------------------------------

Index = int | Node  # an index along one axis: static, or computed by the expression
EntryAt = Callable[[tuple[Index, ...]], Node]  # the node of the entry at an index
Params = Mapping[str, Any]  # of a primitive


class Entries(NamedTuple):
    """An array within a program.

    entry: returns the node of the entry at an index, a tuple with an `Index` for each axis.
    evaluate: returns the array itself; None if it depends on the scalars.
    """

    shape: Shape
    dtype: Any
    entry: EntryAt
    evaluate: Callable[[], Any] | None = None


def _scalar(node: Node) -> Entries:
    return Entries((), node.dtype, lambda _: node)


def _as_node(i: Index) -> Node:
    return i if isinstance(i, Node) else const(i, np.int32)


def _as_index(node: Index) -> Index:
    """Returns an index as an integer if it is constant, else as a node of at least 32 bits, so that
    indices of large arrays fit."""
    if isinstance(node, int):
        return node
    if node.op == "const" and isinstance(node.param, int):
        return int(node.param)
    return _converted(node, np.int32) if node.dtype.itemsize < 4 else node


def _plus(a: Index, b: Index) -> Index:
    if isinstance(a, int) and isinstance(b, int):
        return a + b
    if a == 0 or b == 0:
        return a if b == 0 else b
    a, b = _alike(_as_node(a), _as_node(b))
    return Node("add", (a, b), a.dtype)


def _alike(a: Node, b: Node) -> tuple[Node, Node]:
    """Converts two nodes to one dtype: that of `a`, unless `a` is a constant."""
    dtype = b.dtype if a.op == "const" else a.dtype
    return _converted(a, dtype), _converted(b, dtype)


def _converted(node: Node, dtype: Any) -> Node:
    if node.dtype == dtype:
        return node
    if node.op == "const":
        return const(node.param, dtype)
    return Node("convert_element_type", (node,), np.dtype(dtype))


def _clamped(i: Index, last: int) -> Index:
    """Returns an index clamped to 0..last."""
    i = _as_index(i)
    if isinstance(i, int):
        return min(max(i, 0), last)
    if last == 0:
        return const(0, i.dtype)
    if i.op == "clamp" and [_as_index(x) for x in i.args[::2]] == [0, last]:
        return i
    ends = (const(0, i.dtype), i, const(last, i.dtype))
    return Node("clamp", ends, i.dtype)


_MOST_UNROLLED = 64  # the most entries of an array whose reduction becomes a chain of nodes

_PRIMITIVES: dict[str, Primitive] = {
    x.name: x
    for x in (*vars(lax).values(), *vars(primitives).values(), pvary_p, reshard_p)
    if isinstance(x, Primitive)
}


def operation(equation: JaxprEqn) -> str:
    """Returns the name of an equation's primitive.

    A user's primitive may have the name of a primitive of JAX. The result is then a phrase that is
    no primitive's name, so that the two are not confused.
    """
    primitive = equation.primitive
    is_unique = _PRIMITIVES.get(primitive.name, primitive) is primitive
    return primitive.name if is_unique else f"{primitive.name!r} (not a primitive of JAX's)"


def called_program(equation: JaxprEqn) -> ClosedJaxpr | None:
    """Returns the program that an equation calls, None if it calls none. The program leaves out the
    derivative rule of a `custom_jvp` or `custom_vjp` call."""
    if operation(equation) not in (*_CALLS, *_CALLS_WITH_RULES):
        return None
    params = equation.params
    program = params["jaxpr"] if "jaxpr" in params else params["call_jaxpr"]
    return program if isinstance(program, ClosedJaxpr) else ClosedJaxpr(program, ())


_IDENTITIES = ("copy", "name", "optimization_barrier", "pvary", "reshard")
_REDUCTIONS = {
    "reduce_sum": "add",
    "reduce_prod": "mul",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_and": "and",
    "reduce_or": "or",
}
# The `param` of a node, from the parameters of the primitive.
_PARAMS: dict[str, Callable[..., Hashable]] = {
    "integer_pow": operator.itemgetter("y"),
    "round": operator.itemgetter("rounding_method"),
    "reduce_precision": operator.itemgetter("exponent_bits", "mantissa_bits"),
}
# Functions whose derivatives replace those of a chain of `max` or `min`: JAX divides the derivative
# of a reduction equally among all operands that equal the result, a chain does not.
_REDUCTIONS_OF_EQUALS: dict[str, Callable[..., Any]] = {
    "max": lambda *x: jax.numpy.stack(x).max(),
    "min": lambda *x: jax.numpy.stack(x).min(),
}
_CALLS = ("jit", "remat2", "closed_call")
_CALLS_WITH_RULES = ("custom_jvp_call", "custom_vjp_call")  # calls with their own derivatives


@functools.cache
def _division(name: str, dtype: Any) -> ClosedJaxpr:
    """Returns JAX's program of `x // y` or `x % y` for scalars of a dtype."""
    function = {"floor_divide": jax.numpy.floor_divide, "remainder": jax.numpy.remainder}[name]
    return jax.make_jaxpr(function)(*[jax.ShapeDtypeStruct((), dtype)] * 2)


def read_division(name: str, dtype: Any) -> Node:
    """Returns `floor_divide` or `remainder` of inputs 0 and 1 as nodes of JAX's primitives."""
    reader = ProgramReader()
    return reader.division(name, reader.input(0, dtype), reader.input(1, dtype))


class ProgramReader:
    """Translates the equations of a program to nodes. Equal nodes are one object."""

    def __init__(self) -> None:
        self.tables: list[Any] = []
        self._table_numbers: dict[int, int] = {}  # by the id of an array in `tables`
        self._nodes: dict[Hashable, Node] = {}
        self._shared_ids: set[int] = set()  # the ids of the nodes in `_nodes`
        self._is_dividing = False

    def input(self, number: int, dtype: Any) -> Entries:
        """Returns the entries of scalar argument number `number`."""
        return _scalar(Node("input", (), np.dtype(dtype), number))

    def table(self, value: Any) -> Entries:
        """Returns the entries of an array or, in a kernel, of a reference to memory."""
        shape, dtype = np.shape(value), _dtype(getattr(value, "dtype", type(value)))
        if not isinstance(dtype, np.dtype):
            return self.unknown(jax.typeof(value), f"arrays of {dtype}")
        if not shape and not isinstance(value, Tracer):
            return _scalar(const(value, dtype))._replace(evaluate=lambda: value)

        def entry(index: tuple[Index, ...]) -> Node:
            clamped = (_clamped(i, size - 1) for i, size in zip(index, shape, strict=True))
            return self.node("look_up", map(_as_node, clamped), dtype, self._table_number(value))

        return Entries(shape, dtype, entry, None if is_reference(value) else lambda: value)

    def _table_number(self, value: Any) -> int:
        """Returns the number of an array in `tables`, to which it is added."""
        if id(value) not in self._table_numbers:
            self._table_numbers[id(value)] = len(self.tables)
            self.tables.append(value)
        return self._table_numbers[id(value)]

    def node(self, op: str, args: Iterable[Node], dtype: Any, param: Hashable = None) -> Node:
        """Returns a node with these operands, as `shared` does."""
        return self.shared(Node(op, tuple(args), _dtype(dtype), param))

    def shared(self, node: Node) -> Node:
        """Returns the node simplified; the same object for all nodes that are then equal."""
        if id(node) in self._shared_ids:
            return node
        args = tuple(map(self.shared, node.args))
        node = _simplified(dataclasses.replace(node, args=args))
        if id(node) in self._shared_ids:
            return node
        node = self._without_division_program(node)
        if id(node) in self._shared_ids:
            return node
        args = node.args
        # By its text, a constant of NaN equals itself, and −0.0 differs from 0.0.
        param = node.param if callable(node.param) else repr(node.param)
        key = node.op, tuple(map(id, args)), node.dtype, param
        if key not in self._nodes:
            self._nodes[key] = dataclasses.replace(node, args=args)
            self._shared_ids.add(id(self._nodes[key]))
        return self._nodes[key]

    def _without_division_program(self, node: Node) -> Node:
        """Returns one node `floor_divide` or `remainder` if the node is the result of JAX's program
        for the floor division or remainder of integers; any other node unchanged."""
        if node.op != "select_n" or not np.issubdtype(_numpy_dtype(node.dtype), np.integer):
            return node
        _, case, *_ = node.args
        is_64_bit = node.dtype.itemsize > 4  # GCC 12 fails to compile some 64-bit divisions
        if self._is_dividing or is_64_bit or case.op not in ("div", "rem"):
            return node
        x, y = case.args
        name = "floor_divide" if case.op == "div" else "remainder"
        if name == "remainder" and y.op == "select_n":
            y = y.args[1]  # JAX's program replaces a divisor of 0 by 1
        expected = self.division(name, _scalar(x), _scalar(y))
        is_same = expected.op == node.op and all(map(operator.is_, expected.args, node.args))
        return self.node(name, (x, y), node.dtype) if is_same else node

    def division(self, name: str, x: Entries, y: Entries) -> Node:
        """Returns `x // y` or `x % y` as nodes of the primitives in JAX's program."""
        self._is_dividing = True  # keeps these nodes from becoming one division again
        (result,) = self.closed(_division(name, x.dtype), [x, y])
        node = self.shared(result.entry(()))
        self._is_dividing = False
        return node

    def run(self, program: Any, values: Sequence[Entries]) -> list[Entries]:
        """Returns the results of a jaxpr; `values` are its constants, then its arguments."""
        variables = dict(zip((*program.constvars, *program.invars), values, strict=True))

        def value(x: Any) -> Entries:
            return self.table(x.val) if hasattr(x, "val") else variables[x]

        for equation in program.eqns:
            results = self.apply(equation, [value(x) for x in equation.invars])
            # Caching the entries makes the time linear in the program; making scalars' nodes now,
            # in the order of the program, keeps the recursion shallow.
            results = [x._replace(entry=functools.cache(x.entry)) for x in results]
            for x in results:
                if math.prod(x.shape) == 1 and x.evaluate is None:
                    x.entry((0,) * len(x.shape))
            variables |= dict(zip(equation.outvars, results, strict=True))
        return [value(x) for x in program.outvars]

    def closed(self, program: Any, values: Sequence[Entries]) -> list[Entries]:
        """Returns the results of a program that holds its constants; `values` are its arguments."""
        return self.run(program.jaxpr, [*map(self.table, program.consts), *values])

    def apply(self, equation: Any, values: list[Entries]) -> list[Entries]:
        """Returns an equation's results. JAX can evaluate them if no operand depends on scalars."""
        is_evaluable = all(x.evaluate for x in values)
        has_rule = operation(equation) in _CALLS_WITH_RULES
        results = None if is_evaluable and has_rule else self.interpret(equation, values)
        if is_evaluable:

            @functools.cache
            def evaluate_all() -> list[Any]:
                operands = [x.evaluate() for x in values if x.evaluate]
                return _evaluated(equation, operands)

            def evaluable_entries(number: int) -> Entries:
                aval = equation.outvars[number].aval
                evaluate = lambda: evaluate_all()[number]  # noqa: E731
                looked_up = lambda index: self.table(evaluate()).entry(index)  # noqa: E731
                entry = results[number].entry if results else looked_up
                return Entries(aval.shape, _dtype(aval.dtype), entry, evaluate)

            return [evaluable_entries(n) for n in range(len(equation.outvars))]
        return self.by_jax(equation, values) if results is None else results

    def by_jax(self, equation: JaxprEqn, values: list[Entries]) -> list[Entries]:
        """Returns the results of an operation that has no node, as nodes `primitive`."""
        unknown = [self.unknown(x.aval, operation(equation)) for x in equation.outvars]
        whole = (*(x.evaluate is not None and x.shape != () for x in values),)
        pairs = list(zip(values, whole, strict=True))
        count = sum(math.prod(x.shape) for x, is_whole in pairs if not is_whole)

        def entry(n: int, index: tuple[Index, ...]) -> Node:
            if count > _MOST_UNROLLED or not all(isinstance(i, int) for i in index):
                return unknown[n].entry(index)
            args = list[Node]()
            for x, is_whole in pairs:
                if is_whole and x.evaluate:
                    args.append(Node("table", (), x.dtype, self._table_number(x.evaluate())))
                else:
                    args.extend(map(x.entry, np.ndindex(x.shape)))
            function = ResultEntry(equation, n, index, whole)
            return self.node("primitive", args, unknown[n].dtype, function)

        return [x._replace(entry=functools.partial(entry, n)) for n, x in enumerate(unknown)]

    def unknown(self, aval: Any, name: str) -> Entries:
        """Returns the entries of a result of the operation `name`, which has no node."""
        dtype = _dtype(aval.dtype)
        return Entries(aval.shape, dtype, lambda _: Node("unknown", (), dtype, name))

    def interpret(self, equation: Any, values: list[Entries]) -> list[Entries] | None:
        """Returns the results of an equation; None if its operation has no node."""
        name, params = operation(equation), equation.params
        program = called_program(equation)
        if program is not None:
            results = self.closed(program, values)
            with_rules = (self.with_rule(equation, n, x, values) for n, x in enumerate(results))
            return list(with_rules) if name in _CALLS_WITH_RULES else results
        if name == "cond":
            return self.cond(params["branches"], values)
        if name == "unstack":
            return self.unstacked(values[0], params["axis"])
        if name in _IDENTITIES:
            return values
        if len(equation.outvars) != 1:
            return None
        return self.array(name, params, values, equation.outvars[0].aval)

    def with_rule(
        self, equation: JaxprEqn, n: int, result: Entries, values: list[Entries]
    ) -> Entries:
        """Returns result n of a call with a derivative rule, as `custom` nodes with this rule."""

        def entry(index: tuple[Index, ...]) -> Node:
            value = result.entry(index)
            size = sum(math.prod(x.shape) for x in values)
            if size > _MOST_UNROLLED or not all(isinstance(x, int) for x in index):
                return self.node("custom", (value, value), value.dtype, _without_rule)
            entries = [x.entry(i) for x in values for i in np.ndindex(x.shape)]
            function = ResultEntry(equation, n, index, (False,) * len(values))
            return self.node("custom", (value, *entries), value.dtype, function)

        return Entries(result.shape, result.dtype, entry)

    def array(
        self, name: str, params: Params, values: list[Entries], result: ShapedArray
    ) -> list[Entries] | None:
        """Returns the only result of an operation, in a list; None if the operation has no node."""
        name = {"add_any": "add"}.get(name, name)
        if name in ELEMENTWISE and (name != "bitcast_convert_type" or _is_alike(values[0], result)):
            param = _PARAMS[name](params) if name in _PARAMS else None
            if name == "reduce_precision" and _keeps_all_bits(result.dtype, **params):
                return values
            return [self.entries(name, values, result, param)]
        if name == "stop_gradient":
            return [self.entries("custom", values * 2, result, lax.stop_gradient)]
        if name == "one_minus_square":  # a primitive of newer versions of JAX
            one = _scalar(const(1, result.dtype))
            square = self.entries("square", values, result, None)
            return [self.entries("sub", [one, square], result, None)]
        if name in _REDUCTIONS:
            return self.folded(_REDUCTIONS[name], values[0], params["axes"], result)
        make_entry = getattr(self, f"_{name}", None)
        entry = make_entry and make_entry(values, params, result)
        return entry and [Entries(result.shape, _dtype(result.dtype), entry)]

    def entries(
        self, op: str, values: list[Entries], result: ShapedArray, param: Hashable
    ) -> Entries:
        """Returns the result of an elementwise operation; scalars broadcast."""

        def entry(index: tuple[Index, ...]) -> Node:
            args = (x.entry(index if x.shape else ()) for x in values)
            return self.node(op, args, result.dtype, param)

        return Entries(result.shape, _dtype(result.dtype), entry)

    def cond(self, branches: Any, values: list[Entries]) -> list[Entries]:
        """Translates all branches, and selects among their results."""
        branch, *operands = values
        results = [self.closed(x, operands) for x in branches]
        which = _scalar(_clamped(branch.entry(()), len(branches) - 1))  # pyright: ignore[reportArgumentType]
        if len(branches) == 2:  # `select_n` of two cases takes a boolean
            which = _scalar(self.node("ne", (which.entry(()), const(0, which.dtype)), bool))
        return [
            self.entries("select_n", [which, *cases], cases[0], None)
            for cases in zip(*results, strict=True)
        ]

    def folded(
        self, op: str, x: Entries, axes: Sequence[int], result: ShapedArray
    ) -> list[Entries] | None:
        """Returns a reduction along `axes` as a chain of nodes; None for too many entries."""
        sizes = [x.shape[axis] for axis in axes]
        if not 0 < math.prod(sizes) <= _MOST_UNROLLED:
            return None

        def entry(index: tuple[Index, ...]) -> Node:
            def operand_entry(reduced: tuple[int, ...]) -> Node:
                by_axis, kept = dict(zip(axes, reduced, strict=True)), iter(index)
                whole = (by_axis[a] if a in by_axis else next(kept) for a in range(len(x.shape)))
                return x.entry(tuple(whole))

            operands = [*map(operand_entry, np.ndindex(*sizes))]
            value = functools.reduce(lambda a, b: self.node(op, (a, b), result.dtype), operands)
            if op not in _REDUCTIONS_OF_EQUALS:
                return value
            return self.node("custom", (value, *operands), value.dtype, _REDUCTIONS_OF_EQUALS[op])

        return [Entries(result.shape, _dtype(result.dtype), entry)]

    def unstacked(self, x: Entries, axis: int) -> list[Entries]:
        """Returns the slices of an array at each index along an axis, without this axis."""
        shape = (*x.shape[:axis], *x.shape[axis + 1 :])

        def slice_at(n: int) -> Entries:
            return Entries(shape, x.dtype, lambda index: x.entry((*index[:axis], n, *index[axis:])))

        return [slice_at(n) for n in range(x.shape[axis])]

    # `_name` makes the function `entry` of the result of the primitive `name`, or returns None.

    def _broadcast_in_dim(
        self, values: list[Entries], params: Params, result: ShapedArray
    ) -> EntryAt:
        axes, x = params["broadcast_dimensions"], values[0]
        return lambda index: x.entry(
            tuple(0 if n == 1 else index[a] for a, n in zip(axes, x.shape, strict=True))
        )

    def _reshape(
        self, values: list[Entries], params: Params, result: ShapedArray
    ) -> EntryAt | None:
        x = values[0]
        if [n for n in x.shape if n != 1] != [n for n in result.shape if n != 1]:
            return None

        def entry(index: tuple[Index, ...]) -> Node:
            rest = iter(i for i, size in zip(index, result.shape, strict=True) if size != 1)
            return x.entry(tuple(0 if size == 1 else next(rest) for size in x.shape))

        return entry

    _squeeze = _reshape

    def _transpose(self, values: list[Entries], params: Params, result: ShapedArray) -> EntryAt:
        order = params["permutation"]
        return lambda index: values[0].entry(
            tuple(index[order.index(a)] for a in range(len(order)))
        )

    def _iota(self, values: list[Entries], params: Params, result: ShapedArray) -> EntryAt:
        axis = params["dimension"]
        return lambda index: _converted(_as_node(index[axis]), _dtype(result.dtype))

    def _slice(self, values: list[Entries], params: Params, result: ShapedArray) -> EntryAt | None:
        starts, strides = params["start_indices"], params["strides"]
        if strides and any(x != 1 for x in strides):
            return None
        return lambda index: values[0].entry(tuple(map(_plus, index, starts)))

    def _dynamic_slice(self, values: list[Entries], params: Params, result: ShapedArray) -> EntryAt:
        x, *starts = values
        last_starts = [n - size for n, size in zip(x.shape, params["slice_sizes"], strict=True)]

        def entry(index: tuple[Index, ...]) -> Node:
            pairs = zip(starts, last_starts, strict=True)
            clamped = (_clamped(start.entry(()), last) for start, last in pairs)
            return x.entry(tuple(map(_plus, index, clamped)))

        return entry

    def _concatenate(
        self, values: list[Entries], params: Params, result: ShapedArray
    ) -> EntryAt | None:
        axis = params["dimension"]
        starts = [0, *itertools.accumulate(x.shape[axis] for x in values)]

        def entry(index: tuple[Index, ...]) -> Node:
            i = index[axis]

            def operand_entry(x: Entries, start: int) -> Node:
                inside = _clamped(_plus(i, -start), x.shape[axis] - 1)
                return x.entry((*index[:axis], inside, *index[axis + 1 :]))

            if isinstance(i, int):
                which = bisect.bisect_right(starts, i) - 1
                return operand_entry(values[which], starts[which])
            selected = operand_entry(values[-1], starts[-2])
            for x, start, end in reversed(
                list(zip(values[:-1], starts, starts[1:-1], strict=False))
            ):
                is_before_end = self.node("lt", (i, const(end, i.dtype)), bool)
                cases = selected, operand_entry(x, start)
                selected = self.node("select_n", (is_before_end, *cases), result.dtype)
            return selected

        return entry if all(x.shape[axis] for x in values) else None

    def _stack(self, values: list[Entries], params: Params, result: ShapedArray) -> EntryAt | None:
        axis = params["axis"]

        def with_axis(x: Entries) -> Entries:
            shape = (*x.shape[:axis], 1, *x.shape[axis:])
            return Entries(
                shape, x.dtype, lambda index: x.entry((*index[:axis], *index[axis + 1 :]))
            )

        return self._concatenate([*map(with_axis, values)], {"dimension": axis}, result)

    def _gather(self, values: list[Entries], params: Params, result: ShapedArray) -> EntryAt | None:
        x, indices = values
        dims, sizes = params["dimension_numbers"], params["slice_sizes"]
        if not all(x.shape):
            return None
        last_starts = [n - size for n, size in zip(x.shape, sizes, strict=True)]
        removed = *dims.collapsed_slice_dims, *dims.operand_batching_dims
        sliced = [a for a in range(len(x.shape)) if a not in removed]
        pairs = list(zip(dims.operand_batching_dims, dims.start_indices_batching_dims, strict=True))
        fills = params["mode"] == lax.GatherScatterMode.FILL_OR_DROP

        def entry(index: tuple[Index, ...]) -> Node:
            batch = tuple(p for a, p in enumerate(index) if a not in dims.offset_dims)
            offsets = dict(zip(sliced, (index[a] for a in dims.offset_dims), strict=True))
            starts = {a: indices.entry((*batch, n)) for n, a in enumerate(dims.start_index_map)}
            offsets |= {a: batch[n] for a, n in pairs}
            inside = [
                _plus(_clamped(starts.get(a, 0), last_starts[a]), offsets.get(a, 0))
                for a in range(len(x.shape))
            ]
            selected = x.entry(tuple(inside))
            if not fills:
                return selected
            for a, start in starts.items():
                low = self.node("ge", (start, const(0, start.dtype)), bool)
                high = self.node("le", (start, const(last_starts[a], start.dtype)), bool)
                is_inside = self.node("and", (low, high), bool)
                missing = const(_fill(params["fill_value"], result.dtype), result.dtype)
                cases = missing, selected
                selected = self.node("select_n", (is_inside, *cases), result.dtype)
            return selected

        return entry


def _is_alike(x: Entries, result: ShapedArray) -> bool:
    return x.shape == result.shape and x.dtype.itemsize == result.dtype.itemsize


def _fill(value: Any, dtype: Any) -> Any:
    """Returns the value that `lax.gather` gives for an index outside the array."""
    kind = np.dtype(dtype).kind
    if value is None and kind in "iu":
        return np.iinfo(dtype).min or np.iinfo(dtype).max
    return value if value is not None else True if kind == "b" else math.nan


def _simplified(node: Node) -> Node:
    """Returns a node of equal value without sums with 0, products with 1, converted constants."""
    args = node.args
    values = [x.param if x.op == "const" else None for x in args]
    if node.op == "convert_element_type":
        (x,) = args
        # Conversions of floats to integers are left to JAX.
        is_exact = isinstance(x.param, bool | int) or np.issubdtype(
            _numpy_dtype(node.dtype), np.floating
        )
        is_constant = x.op == "const" and is_exact and _fits(x.param, node.dtype)
        converted = const(x.param, node.dtype) if is_constant else node
        return x if x.dtype == node.dtype else converted
    if node.op == "sub" and values[1] == 0:  # also of floats, unlike x + 0: −0.0 + 0 is 0.0
        return args[0]
    if not np.issubdtype(_numpy_dtype(node.dtype), np.integer):
        return node
    if node.op == "add" and 0 in values:
        return args[1 - values.index(0)]
    if node.op == "mul" and 1 in values:
        return args[1 - values.index(1)]
    return node


def _numpy_dtype(dtype: Any) -> Any:
    """Returns the dtype; object for dtypes that NumPy does not have, such as random keys."""
    return dtype if isinstance(dtype, np.dtype) else np.dtype(object)


def _fits(value: Any, dtype: Any) -> bool:
    """Returns whether a constant is in the range of a dtype; any is in that of floats."""
    if np.issubdtype(dtype, np.integer):
        limits = np.iinfo(dtype)
        return limits.min <= value <= limits.max
    return True


def _keeps_all_bits(dtype: Any, exponent_bits: int, mantissa_bits: int) -> bool:
    """Returns whether rounding to this many bits leaves every float of a dtype unchanged."""
    limits = jax.numpy.finfo(dtype)
    return exponent_bits >= limits.nexp and mantissa_bits >= limits.nmant


def _dtype(dtype: Any) -> Any:
    """Returns a dtype as an `np.dtype`; dtypes that only JAX has, such as keys, unchanged."""
    return dtype if jax.numpy.issubdtype(dtype, jax.dtypes.extended) else np.dtype(dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class ResultEntry:
    """The entry at `index` of result `number` of an equation, as a function of its operands.

    An operand is given as an array if `whole` is true for it, else by its entries.
    """

    equation: Any
    number: int
    index: tuple[Index, ...]
    whole: tuple[bool, ...]

    def __str__(self) -> str:
        return operation(self.equation)

    def __call__(self, *arguments: Any) -> Any:
        rest = iter(arguments)
        operands = []
        for x, is_whole in zip(self.equation.invars, self.whole, strict=True):
            entries = [next(rest) for _ in range(1 if is_whole else x.aval.size)]
            operands += entries if is_whole else [jax.numpy.stack(entries).reshape(x.aval.shape)]
        return _evaluated(self.equation, operands)[self.number][self.index]


def _without_rule(*_: Any) -> Any:
    raise NotImplementedError(
        "a function with a derivative rule of its own, inside a mask or score function, has no "
        f"derivatives if its operands have more than {_MOST_UNROLLED} numbers or if an index into "
        "its result is computed; call it on scalars"
    )


def _evaluated(equation: JaxprEqn, operands: list[Any]) -> list[Any]:
    """Evaluates an equation, at once if all operands are concrete."""
    params = equation.primitive.get_bind_params(equation.params)
    is_traced = any(isinstance(x, Tracer) for x in operands)
    with contextlib.nullcontext() if is_traced else jax.ensure_compile_time_eval():
        results = equation.primitive.bind(*operands, **params)
    return list(results) if equation.primitive.multiple_results else [results]
