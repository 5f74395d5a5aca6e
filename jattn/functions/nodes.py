"""Expressions: functions of scalars as graphs of operations.

A `Node` is one operation on scalars. An `Expression` holds the results of a function, and the
arrays that they index. `read` makes the expression of a function; bounds, dependence on arguments
and generated code are derived from it.
"""

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Node:
    """A scalar: the result of operation `op` on the operands `args`, with its dtype.

    Operations have the names of JAX's primitives. Further operations are

    * `input`: the argument of the function with the number `param`;
    * `const`: the constant `param`;
    * `look_up`: the entry of table number `param` at the index `args`, clamped to its sizes;
    * `floor_divide` and `remainder` of integers, as `//` and `%` in Python;
    * `custom`: the value of `args[0]`, with the derivatives of the function `param` of `args[1:]`;
    * `primitive`: `param(*args)`, computed by a primitive of JAX that is not an operation of nodes;
    * `table`: the array that is table number `param`, an operand of `primitive` nodes only;
    * `unknown`: the result of an operation that has no node; `param` is the operation's name.
    """

    op: str
    args: tuple["Node", ...]
    dtype: Any
    param: Hashable = None

    @property
    def name(self) -> str:
        """The operation's name in messages."""
        return str(self.param) if self.op in ("primitive", "unknown") else self.op


class Expression(NamedTuple):
    """The results of a function.

    results: the nodes of the results.
    tables: the arrays that `look_up` nodes index.
    effect: the name of an operation with side effects, such as printing; None if there is none.
    """

    results: list[Node]
    tables: list[Any]
    effect: str | None = None

    @property
    def nodes(self) -> list[Node]:
        """The results and all nodes that they use, each after its operands."""
        return in_order(self.results)


def in_order(roots: Sequence[Node]) -> list[Node]:
    """Returns the roots and all nodes that they use, each once and after its operands."""
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
    """Returns `rule(node, operands' results)` of the roots and all nodes that they use, by id."""
    results: dict[int, Any] = {}
    for node in in_order(roots):
        results[id(node)] = rule(node, [results[id(x)] for x in node.args])
    return results


def replaced(roots: Sequence[Node], rule: Callable[[Node, list[Node]], Node | None]) -> list[Node]:
    """Returns the roots with each node replaced by `rule(node, operands)`, where the operands are
    replaced already. A node for which the rule returns None keeps its operation."""

    def replacement(node: Node, args: list[Node]) -> Node:
        new_node = rule(node, args)
        if new_node is not None:
            return new_node
        unchanged = all(x is y for x, y in zip(args, node.args, strict=True))
        return node if unchanged else replace(node, args=tuple(args))

    results = fold(roots, replacement)
    return [results[id(x)] for x in roots]


def values(roots: Sequence[Node]) -> list[Node]:
    """Returns the roots with each `custom` node replaced by its first operand, its value."""
    return replaced(roots, lambda node, args: args[0] if node.op == "custom" else None)


def const(value: Any, dtype: Any) -> Node:
    """Returns the node of a constant."""
    return Node("const", (), np.dtype(dtype), np.asarray(value, dtype).item())
