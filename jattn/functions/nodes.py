"""Expressions: functions of scalars as graphs of operations.

A `Node` is one operation on one scalar each; an `Expression` is the results of a function with the
arrays in which they look numbers up. `read` makes one of a function, and everything that asks about
a function, its bounds, its dependence on each argument, its code, walks these nodes.
"""

import dataclasses
from collections.abc import Hashable, Sequence
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


def values(roots: Sequence[Node]) -> list[Node]:
    """Returns the nodes as they are computed: without the functions of `custom` nodes."""
    plain: dict[int, Node] = {}
    for node in in_order(roots):
        args = tuple(plain[id(x)] for x in node.args)
        unchanged = all(x is y for x, y in zip(args, node.args, strict=True))
        is_custom = node.op == "custom"
        plain[id(node)] = args[0] if is_custom else node if unchanged else replace(node, args=args)
    return [plain[id(x)] for x in roots]


def const(value: Any, dtype: Any) -> Node:
    """A number that is known."""
    return Node("const", (), np.dtype(dtype), np.asarray(value, dtype).item())
