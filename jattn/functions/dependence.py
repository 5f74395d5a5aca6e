"""The arguments on which a mask or score function depends, and whether it depends on query and key
positions only by their distance."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jattn.functions.nodes import Node, fold
from jattn.functions.read import read


SCORE, BATCH_ROW, HEAD, QUERY, KEY = range(5)  # numbers of the `input` nodes of such a function
_COMPARISONS = frozenset("eq ge gt le lt ne".split())


class Dependence(NamedTuple):
    """The dependence of a node on the function's inputs.

    on: the numbers of the inputs on which it depends.
    growth: the difference in its value when the positions of query and key both increase by one,
        modulo 2**32; None if that is not constant or not determined.
    """

    on: frozenset[int]
    growth: int | None

    @property
    def kind(self) -> str:
        """The inputs besides batch row and head: "head" for none, "query", "key", "distance" for
        query and key by their distance only, else "pair"."""
        on = self.on - {BATCH_ROW, HEAD}
        kinds = {(): "head", (QUERY,): "query", (KEY,): "key"}
        if on == {QUERY, KEY} and self.growth == 0:
            return "distance"
        return kinds.get(tuple(on), "pair")


def of_nodes(roots: Sequence[Node]) -> dict[int, Dependence]:
    """Returns the dependence of the roots and of all nodes that they use, by id of the node. A node
    `unknown` depends on every input."""

    def dependence(node: Node, args: list[Dependence]) -> Dependence:
        inputs: Any = {"input": [node.param], "unknown": range(KEY + 1)}.get(node.op, ())
        return Dependence(frozenset(inputs).union(*(x.on for x in args)), _growth(node, args))

    return fold(roots, dependence)


def _growth(node: Node, args: list[Dependence]) -> int | None:
    """Returns `Dependence.growth` of a node, given the dependences of its operands."""
    growths = [x.growth for x in args]
    if node.op == "input":
        return int(node.param in (QUERY, KEY))
    if node.op == "unknown" or None in growths:
        return None
    left, right = (*growths, 0, 0)[:2]
    if node.op in ("add", "sub"):
        return left + right if node.op == "add" else left - right  # pyright: ignore
    if node.op in _COMPARISONS and all(x.op == "input" for x in node.args):
        return 0 if left == right else None
    return None if any(growths) else 0


def reads(function: Callable[..., Any], arguments: int) -> set[int]:
    """Returns the numbers of the arguments on which a function of int32 scalars depends."""
    expression = read(function, [np.int32] * arguments)
    dependences = of_nodes(expression.results)
    return set().union(*(dependences[id(x)].on for x in expression.results))
