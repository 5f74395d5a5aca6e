"""What a function of pairs depends on: which of its inputs, and whether by a distance alone."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jattn.functions.nodes import Node, fold
from jattn.functions.read import read


SCORE, BATCH_ROW, HEAD, QUERY, KEY = range(5)  # inputs of a function of pairs
_COMPARISONS = frozenset("eq ge gt le lt ne".split())


class Dependence(NamedTuple):
    """The inputs on which a node depends, and by how much it grows where query and key both grow by
    one, also where 32 bits are too few; None where that is not known."""

    on: frozenset[int]
    growth: int | None

    @property
    def kind(self) -> str:
        """`head` (or batch row), `query` or `key` if it is the same for all others, `distance` if
        the distance of query and key decides, else `pair`."""
        on = self.on - {BATCH_ROW, HEAD}
        kinds = {(): "head", (QUERY,): "query", (KEY,): "key"}
        if on == {QUERY, KEY} and self.growth == 0:
            return "distance"
        return kinds.get(tuple(on), "pair")


def of_nodes(roots: Sequence[Node]) -> dict[int, Dependence]:
    """The dependence of each node that these are made of, by its id; what is not known depends on
    everything."""

    def one(node: Node, args: list[Dependence]) -> Dependence:
        own: Any = {"input": [node.param], "unknown": range(KEY + 1)}.get(node.op, ())
        return Dependence(frozenset(own).union(*(x.on for x in args)), _growth(node, args))

    return fold(roots, one)


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
    found = of_nodes(expression.results)
    return set().union(*(found[id(x)].on for x in expression.results))
