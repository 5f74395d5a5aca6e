"""The inputs on which a function of pairs depends, and whether only their distance matters."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jattn.functions.nodes import Node, fold
from jattn.functions.read import read


SCORE, BATCH_ROW, HEAD, QUERY, KEY = range(5)  # inputs of a function of pairs
_COMPARISONS = frozenset("eq ge gt le lt ne".split())


class Dependence(NamedTuple):
    """The inputs on which a node depends, and its growth if query and key both grow by one, also if
    it overflows 32 bits; None for an unknown growth."""

    on: frozenset[int]
    growth: int | None

    @property
    def kind(self) -> str:
        """The kind of dependence: `head` (or batch row), `query` or `key` if the node depends on
        nothing else, `distance` if it depends on the distance of query and key, else `pair`."""
        on = self.on - {BATCH_ROW, HEAD}
        kinds = {(): "head", (QUERY,): "query", (KEY,): "key"}
        if on == {QUERY, KEY} and self.growth == 0:
            return "distance"
        return kinds.get(tuple(on), "pair")


def of_nodes(roots: Sequence[Node]) -> dict[int, Dependence]:
    """Returns the dependence of each node below the roots, by the node's id. Unknown operations
    depend on everything."""

    def dependence(node: Node, args: list[Dependence]) -> Dependence:
        inputs: Any = {"input": [node.param], "unknown": range(KEY + 1)}.get(node.op, ())
        return Dependence(frozenset(inputs).union(*(x.on for x in args)), _growth(node, args))

    return fold(roots, dependence)


def _growth(node: Node, args: list[Dependence]) -> int | None:
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
    """Returns the numbers of the arguments, int32 scalars, that may change a function's result."""
    expression = read(function, [np.int32] * arguments)
    dependences = of_nodes(expression.results)
    return set().union(*(dependences[id(x)].on for x in expression.results))
