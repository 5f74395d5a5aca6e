"""The interval of an expression, given intervals of its scalars.

Masks use it for tiles, whose queries and keys are intervals of positions: a rule that is certainly
false in a tile empties the tile. The result of an unknown operation may be anything.

A node that depends on one scalar alone is evaluated for each integer of the scalar's interval, if
that is known while tracing, so that `clip(x // 8, 2, 5) * 8 + x % 8` is exact.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from jattn.functions import operations, table_ranges
from jattn.functions.interval_rules import (
    RULES,
    Interval,
    anything,
    checked,
    is_static,
    kind_of,
)
from jattn.functions.nodes import Expression, Node, fold


def of(expression: Expression, scalars: Sequence[Interval]) -> Interval:
    """Returns the interval of an expression's single result, given intervals of its scalars."""
    with np.errstate(all="ignore"), jax.numpy_dtype_promotion("standard"):
        alone = _OneScalar(expression, scalars)

        def interval(node: Node, args: list[Interval]) -> Interval:
            if id(node) in alone:
                return alone.over_runs(node)
            return _of_node(node, args, scalars, expression.tables)

        results = fold(expression.results, interval)
    (result,) = expression.results
    return results[id(result)]


def of_operation(op: str, dtype: Any, args: Sequence[Interval], param: Any = None) -> Interval:
    """Returns the interval of one operation of `nodes.Node`, given intervals of its operands."""
    operands = tuple(Node("input", (), x.lo.dtype) for x in args)
    with np.errstate(all="ignore"), jax.numpy_dtype_promotion("standard"):
        return _of_node(Node(op, operands, np.dtype(dtype), param), [*args], (), [])


_MOST_NUMBERS = 2**20  # the most values of a scalar that are enumerated
_TRACED = -1  # stands, in place of a scalar, for a table whose values are traced


class _OneScalar:
    """The nodes that depend on one scalar, whose integers are all known, and on nothing else that
    varies. They are evaluated for single numbers, which are intervals of one number."""

    def __init__(self, expression: Expression, scalars: Sequence[Interval]):
        self.tables = expression.tables
        self.points = [_numbers(x) for x in scalars]
        self.fixed = [_is_static_point(x) for x in scalars]
        self.scalars = scalars
        self.of: dict[int, set[int]] = {}
        self.found: dict[int, Interval] = {}
        for node in expression.nodes:
            self.of[id(node)] = set().union(*(self.of[id(x)] for x in node.args))
            number: Any = node.param
            if node.op == "input" and not self.fixed[number]:
                self.of[id(node)] = {number}
            if node.op == "look_up" and isinstance(self.tables[number], Tracer):
                self.of[id(node)] |= {_TRACED}

    def __contains__(self, node: int) -> bool:
        on = self.of[node]
        return len(on) == 1 and on != {_TRACED} and self.points[min(on)] is not None

    def over_runs(self, node: Node) -> Interval:
        """Returns the interval of a node over each run of integers."""
        lo, hi, nan = self.at_points(node)
        shape = np.shape(self.points[min(self.of[id(node)])])  # pyright: ignore
        lo, hi = (np.broadcast_to(x, shape) for x in (lo, hi))
        return Interval(lo.min(axis=-1), hi.max(axis=-1), np.broadcast_to(nan, shape).any(axis=-1))

    def at_points(self, node: Node) -> Interval:
        """Returns the interval of a node at each integer of the runs, `[..., numbers]`."""
        if id(node) not in self.found:
            args = [self.at_points(x) for x in node.args]
            self.found[id(node)] = _of_node(node, args, self._inputs(), self.tables)
        return self.found[id(node)]

    def _inputs(self) -> list[Interval]:
        pairs = zip(self.points, self.scalars, strict=True)
        return [x if points is None else Interval(points, points) for points, x in pairs]


def _numbers(x: Interval) -> np.ndarray | None:
    """Returns the integers of each run, `[..., numbers]`, the last repeated; None if they are not
    known or too many."""
    if not is_static(x) or kind_of(np.asarray(x.lo).dtype) != "i" or _is_static_point(x):
        return None
    lo, hi = np.broadcast_arrays(x.lo, x.hi)
    widths = hi.astype(np.float64) - lo + 1
    if not lo.size or lo.size * widths.max() > _MOST_NUMBERS or widths.min() < 1:
        return None
    offsets = np.arange(int(widths.max()), dtype=lo.dtype)
    return lo[..., None] + np.minimum(offsets, (hi - lo)[..., None])


def _is_static_point(x: Interval) -> bool:
    """Returns whether an interval is one known number, the same for all tiles."""
    return is_static(x) and not np.shape(x.lo) and bool(np.all(x.lo == x.hi))


def _of_node(node: Node, args: list[Interval], scalars: Any, tables: list[Any]) -> Interval:
    if node.op == "input":
        return scalars[node.param]
    if node.op == "const":
        value = np.asarray(node.param, node.dtype)
        return checked(Interval(value, value), node.dtype)
    if node.op == "look_up":
        return checked(table_ranges.looked_up(tables[node.param], args), node.dtype)  # pyright: ignore
    rule = RULES.get(node.op)
    if (
        rule is None
        or not _is_number(node.dtype)
        or not all(_is_number(x.dtype) for x in node.args)
    ):
        return anything(node.dtype)
    if (
        args
        and not is_static(args)
        and kind_of(node.dtype) in "bi"
        and all(x.lo is x.hi for x in args)
    ):
        exact = operations.apply(node, [x.lo for x in args])  # a batch row or a head
        return Interval(exact, exact)
    return checked(rule(node, *args), node.dtype)


def _is_number(dtype: Any) -> bool:
    return isinstance(dtype, np.dtype)
