"""Expressions: functions of scalars as graphs of operations.

A `Node` is one operation on one scalar each; an `Expression` is the results of a function with the
arrays in which they look numbers up. `read` makes one of a function, and everything that asks about
a function, its bounds, its dependence on each argument, its code, walks these nodes.
"""

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Node:
    """One scalar: an operation, the nodes that it takes, the dtype of its result.

    Operations have the names of JAX's primitives, and besides these there are

    * `input`, with its number as `param`, and `const`, with its value;
    * `look_up`: the entry of table `param` at the places `args`, which are held within its sizes;
    * `floor_divide` and `remainder` of integers, as Python has them;
    * `custom`: the node `args[0]`, which is the function `param` of the other nodes. Its derivative
      is the one that JAX takes of this function;
    * `unknown`, with the name of what it was.
    """

    op: str
    args: tuple["Node", ...]
    dtype: Any
    param: Hashable = None


class Expression(NamedTuple):
    """The results of a program, the arrays in which it looks numbers up, and which operation of it
    has effects, such as printing, if any."""

    results: list[Node]
    tables: list[Any]
    effect: str | None = None

    @property
    def nodes(self) -> list[Node]:
        """All nodes of the results, each after those that it takes."""
        return in_order(self.results)


def in_order(roots: Sequence[Node]) -> list[Node]:
    """All nodes that these are made of, each once and after those that it takes."""
    found: dict[int, Node] = {}
    left = [(node, False) for node in reversed(roots)]
    while left:
        node, is_ready = left.pop()
        if id(node) in found:
            continue
        if is_ready:
            found[id(node)] = node
        else:
            left.append((node, True))
            left.extend((x, False) for x in reversed(node.args))
    return list(found.values())


def fold(roots: Sequence[Node], rule: Callable[[Node, list[Any]], Any]) -> dict[int, Any]:
    """`rule(node, results of its arguments)` for each node that these are made of, by its id."""
    found: dict[int, Any] = {}
    for node in in_order(roots):
        found[id(node)] = rule(node, [found[id(x)] for x in node.args])
    return found


def replaced(roots: Sequence[Node], rule: Callable[[Node, list[Node]], Node | None]) -> list[Node]:
    """The nodes with what `rule` gives for each, of its replaced arguments; None: the same node."""

    def one(node: Node, args: list[Node]) -> Node:
        new = rule(node, args)
        if new is not None:
            return new
        unchanged = all(x is y for x, y in zip(args, node.args, strict=True))
        return node if unchanged else replace(node, args=tuple(args))

    found = fold(roots, one)
    return [found[id(x)] for x in roots]


def values(roots: Sequence[Node]) -> list[Node]:
    """The nodes that compute values: a `custom` node is replaced by its first operand."""
    return replaced(roots, lambda node, args: args[0] if node.op == "custom" else None)


def const(value: Any, dtype: Any) -> Node:
    """A number that is known."""
    return Node("const", (), np.dtype(dtype), np.asarray(value, dtype).item())
