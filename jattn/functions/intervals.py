"""The interval of the values of an expression, given intervals of its scalars.

A mask function is evaluated like this for a tile, whose queries and keys are intervals of
positions: if it is certainly false, the tile is empty and is skipped. An operation without an
interval rule gives the interval of all values of its dtype.

A node that depends on a single scalar is evaluated at each integer of the scalar's interval, if
that is static, so that the interval of `clip(x // 8, 2, 5) * 8 + x % 8` is exact.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from jattn.functions import operations, table_ranges
from jattn.functions.interval_rules import RULES, Interval, anything, checked, is_static, kind_of
from jattn.functions.nodes import Expression, Node, fold


def of(expression: Expression, scalars: Sequence[Interval]) -> Interval:
    """Returns the interval of an expression's only result, given intervals of its scalars."""
    with np.errstate(all="ignore"), jax.numpy_dtype_promotion("standard"):
        exact_nodes = _NodesOfOneScalar(expression, scalars)

        def interval(node: Node, args: list[Interval]) -> Interval:
            if node in exact_nodes:
                return exact_nodes.interval(node)
            return _of_node(node, args, scalars, expression.tables)

        results = fold(expression.results, interval)
    (result,) = expression.results
    return results[id(result)]


def of_operation(op: str, dtype: Any, args: Sequence[Interval], param: Any = None) -> Interval:
    """Returns the interval of a single operation, given intervals of its operands."""
    operands = tuple(Node("input", (), x.lo.dtype) for x in args)
    with np.errstate(all="ignore"), jax.numpy_dtype_promotion("standard"):
        return _of_node(Node(op, operands, np.dtype(dtype), param), [*args], (), [])


_MOST_INTEGERS = 2**20  # the most integers of a scalar's intervals that are enumerated
# Stands for traced tables, and for traced scalars with one value such as the index of a batch row,
# among the numbers of the scalars on which a node depends.
_TRACED = -1


class _NodesOfOneScalar:
    """The nodes that depend on one scalar with static integer intervals, and on nothing else that
    varies. They are evaluated at each integer: in advance, as intervals that hold one number, or,
    if a `primitive` depends on traced arrays, in the program."""

    def __init__(self, expression: Expression, scalars: Sequence[Interval]):
        self.tables = expression.tables
        self.scalars = scalars
        self.integers = [_integers(x) for x in scalars]  # `[..., integers]` or None, by scalar
        self.scalars_of: dict[int, set[int]] = {}  # the numbers of the scalars, by id of a node
        self.values: dict[int, Interval] = {}  # the results of `at_integers`, by id of a node
        is_constant = [_is_static_point(x) for x in scalars]
        is_one_value = [x.lo is x.hi and not np.shape(x.lo) for x in scalars]
        for node in expression.nodes:
            self.scalars_of[id(node)] = set().union(*(self.scalars_of[id(x)] for x in node.args))
            number: Any = node.param
            if node.op == "input" and not is_constant[number]:
                self.scalars_of[id(node)] = {_TRACED if is_one_value[number] else number}
            if node.op in operations.READS_TABLE and isinstance(self.tables[number], Tracer):
                self.scalars_of[id(node)] |= {_TRACED}

    def __contains__(self, node: Node) -> bool:
        numbers = self.scalars_of[id(node)]
        if node.op == "primitive" and kind_of(node.dtype) in "bi":
            numbers = numbers - {_TRACED}
        is_one_scalar = len(numbers) == 1 and numbers != {_TRACED}
        return is_one_scalar and self.integers[min(numbers)] is not None

    def interval(self, node: Node) -> Interval:
        """Returns the interval of a node's values at the integers of each of the intervals."""
        numbers = self.scalars_of[id(node)]
        if _TRACED in numbers:
            scalars = [x.lo for x in self._inputs()]
            (values,) = operations.evaluated([node], scalars, self.tables)
            return Interval(values.min(axis=-1), values.max(axis=-1))
        lo, hi, nan = self.at_integers(node)
        shape = np.shape(self.integers[min(numbers)])  # pyright: ignore
        lo, hi = (np.broadcast_to(x, shape) for x in (lo, hi))
        return Interval(lo.min(axis=-1), hi.max(axis=-1), np.broadcast_to(nan, shape).any(axis=-1))

    def at_integers(self, node: Node) -> Interval:
        """Returns the interval of a node at each integer, `[..., integers]`."""
        if id(node) not in self.values:
            args = [self.at_integers(x) for x in node.args]
            of_node = _of_primitive if node.op == "primitive" else _of_node
            self.values[id(node)] = of_node(node, args, self._inputs(), self.tables)
        return self.values[id(node)]

    def _inputs(self) -> list[Interval]:
        pairs = zip(self.integers, self.scalars, strict=True)
        return [x if integers is None else Interval(integers, integers) for integers, x in pairs]


def _integers(x: Interval) -> np.ndarray | None:
    """Returns the integers in each of several intervals, `[..., integers]`; shorter intervals
    repeat their last integer. None if they are traced, too many, or a single number."""
    if not is_static(x) or kind_of(np.asarray(x.lo).dtype) != "i" or _is_static_point(x):
        return None
    lo, hi = np.broadcast_arrays(x.lo, x.hi)
    widths = hi.astype(np.float64) - lo + 1
    if not lo.size or lo.size * widths.max() > _MOST_INTEGERS or widths.min() < 1:
        return None
    offsets = np.arange(int(widths.max()), dtype=lo.dtype)
    return lo[..., None] + np.minimum(offsets, (hi - lo)[..., None])


def _is_static_point(x: Interval) -> bool:
    """Returns whether an interval is one static number, the same for all tiles."""
    return is_static(x) and not np.shape(x.lo) and bool(np.all(x.lo == x.hi))


def _of_primitive(node: Node, args: list[Interval], *_: Any) -> Interval:
    """Returns the value of a `primitive` node, which JAX computes from operands that are known."""
    is_exact = is_static(args) and kind_of(node.dtype) in "bi"
    if not is_exact or any(np.any((x.lo != x.hi) | x.nan) for x in args):
        return anything(node.dtype)
    with jax.ensure_compile_time_eval():
        compute = jax.jit(functools.partial(operations.apply, node))
        result = np.asarray(compute([x.lo for x in args]))
    return Interval(result, result)


def _of_node(node: Node, args: list[Interval], scalars: Any, tables: list[Any]) -> Interval:
    """Returns the interval of a node, given those of its operands and of the scalars."""
    if node.op == "input":
        return scalars[node.param]
    if node.op == "const":
        value = np.asarray(node.param, node.dtype)
        return checked(Interval(value, value), node.dtype)
    if node.op in operations.READS_TABLE and kind_of(node.dtype) != "?":
        return checked(table_ranges.looked_up(tables[node.param], args), node.dtype)  # pyright: ignore
    rule = RULES.get(node.op)
    is_ordered = all(kind_of(x.dtype) != "?" for x in (node, *node.args))  # not complex, no key
    if rule is None or not is_ordered:
        return anything(node.dtype)
    are_numbers = bool(args) and all(x.lo is x.hi for x in args)
    if are_numbers and not is_static(args) and kind_of(node.dtype) in "bi":
        # Each operand is one traced number, such as the index of a batch row or a head.
        exact = operations.apply(node, [x.lo for x in args])
        return Interval(exact, exact)
    return checked(rule(node, *args), node.dtype)
