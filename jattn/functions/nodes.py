"""Expressions: functions of scalars as graphs of operations.

A `Node` is one operation on scalars; an `Expression` is the results of a function with the arrays
that they index. `read` makes the expression of a function. Bounds, dependence on arguments and
generated code are all derived from these nodes.
"""

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Node:
    """A scalar: the result of an operation, with its operands `args` and its dtype.

    Operations have the names of JAX's primitives. Further operations are

    * `input`, with its number as `param`, and `const`, with its value;
    * `look_up`: the entry of table `param` at the places `args`, which are clamped to its sizes;
    * `floor_divide` and `remainder` of integers, with Python's meaning;
    * `custom`: the node `args[0]`, which is the function `param` of the other nodes; JAX takes its
      derivative from this function;
    * `unknown`, with the name of the operation.
    """

    op: str
    args: tuple["Node", ...]
    dtype: Any
    param: Hashable = None


class Expression(NamedTuple):
    """The results of a program, the arrays that it indexes, and the name of an operation with side
    effects, such as printing, if there is one."""

    results: list[Node]
    tables: list[Any]
    effect: str | None = None

    @property
    def nodes(self) -> list[Node]:
        """All nodes of the results, each after its operands."""
        return in_order(self.results)


def in_order(roots: Sequence[Node]) -> list[Node]:
    """Returns the nodes of an expression with these roots, each once and after its operands."""
    results: dict[int, Node] = {}
    remaining = [(node, False) for node in reversed(roots)]
    while remaining:
        node, is_ready = remaining.pop()
        if id(node) in results:
            continue
        if is_ready:
            results[id(node)] = node
        else:
            remaining.append((node, True))
            remaining.extend((x, False) for x in reversed(node.args))
    return list(results.values())


def fold(roots: Sequence[Node], rule: Callable[[Node, list[Any]], Any]) -> dict[int, Any]:
    """Returns `rule(node, results of its operands)` for each node below the roots, by node id."""
    results: dict[int, Any] = {}
    for node in in_order(roots):
        results[id(node)] = rule(node, [results[id(x)] for x in node.args])
    return results


def replaced(roots: Sequence[Node], rule: Callable[[Node, list[Node]], Node | None]) -> list[Node]:
    """Returns the roots with each node replaced by `rule(node, replaced operands)`, unless None."""

    def replacement(node: Node, args: list[Node]) -> Node:
        new = rule(node, args)
        if new is not None:
            return new
        unchanged = all(x is y for x, y in zip(args, node.args, strict=True))
        return node if unchanged else replace(node, args=tuple(args))

    results = fold(roots, replacement)
    return [results[id(x)] for x in roots]


def values(roots: Sequence[Node]) -> list[Node]:
    """Returns the roots with each `custom` node replaced by its first operand, its value."""
    return replaced(roots, lambda node, args: args[0] if node.op == "custom" else None)


def const(value: Any, dtype: Any) -> Node:
    """Returns the node of a known number."""
    return Node("const", (), np.dtype(dtype), np.asarray(value, dtype).item())
