"""What is certain about an expression whose scalars lie in intervals.

Masks ask it about tiles: their queries and keys are intervals of positions, and a rule that is
certainly false in a tile empties it. An operation that is not known may give anything.

What depends on one of the scalars alone is not left to intervals where its run of integers is known
while tracing: it is found for each of them, so that `clip(x // 8, 2, 5) * 8 + x % 8` is exact.
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
    """The interval of an expression of one result whose scalars lie in these."""
    with np.errstate(all="ignore"), jax.numpy_dtype_promotion("standard"):
        alone = _OneScalar(expression, scalars)

        def one(node: Node, args: list[Interval]) -> Interval:
            if id(node) in alone:
                return alone.over_runs(node)
            return _of_node(node, args, scalars, expression.tables)

        found = fold(expression.results, one)
    (result,) = expression.results
    return found[id(result)]


def of_operation(op: str, dtype: Any, args: Sequence[Interval], param: Any = None) -> Interval:
    """The interval of one operation of `expressions.Node`, whose operands lie in these."""
    operands = tuple(Node("input", (), x.lo.dtype) for x in args)
    with np.errstate(all="ignore"), jax.numpy_dtype_promotion("standard"):
        return _of_node(Node(op, operands, np.dtype(dtype), param), [*args], (), [])


_MOST_NUMBERS = 2**20  # values of a scalar that are enumerated
_TRACED = -1  # in place of a scalar: a table that only the program knows


class _OneScalar:
    """The nodes that depend on one scalar of which each number is known, and on nothing else that
    varies: intervals of single numbers are as good as the numbers."""

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
        """The least and greatest over each run."""
        lo, hi, nan = self.at_points(node)
        shape = np.shape(self.points[min(self.of[id(node)])])  # pyright: ignore
        lo, hi = (np.broadcast_to(x, shape) for x in (lo, hi))
        return Interval(lo.min(axis=-1), hi.max(axis=-1), np.broadcast_to(nan, shape).any(axis=-1))

    def at_points(self, node: Node) -> Interval:
        """The interval for each number of the runs, `[..., numbers]`."""
        if id(node) not in self.found:
            args = [self.at_points(x) for x in node.args]
            self.found[id(node)] = _of_node(node, args, self._inputs(), self.tables)
        return self.found[id(node)]

    def _inputs(self) -> list[Interval]:
        pairs = zip(self.points, self.scalars, strict=True)
        return [x if points is None else Interval(points, points) for points, x in pairs]


def _numbers(x: Interval) -> np.ndarray | None:
    """Each number of runs of integers, `[..., numbers]`; the last are repeated. None where they are
    not known, or many."""
    if not is_static(x) or kind_of(np.asarray(x.lo).dtype) != "i" or _is_static_point(x):
        return None
    lo, hi = np.broadcast_arrays(x.lo, x.hi)
    widths = hi.astype(np.float64) - lo + 1
    if not lo.size or lo.size * widths.max() > _MOST_NUMBERS or widths.min() < 1:
        return None
    offsets = np.arange(int(widths.max()), dtype=lo.dtype)
    return lo[..., None] + np.minimum(offsets, (hi - lo)[..., None])


def _is_static_point(x: Interval) -> bool:
    """Whether it is one number, the same for all tiles."""
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
