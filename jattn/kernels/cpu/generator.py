"""Masks and score functions as C++ for the kernel's own vectors, with their derivatives.

A spec is one function of scalars: `(score, b, h, i, j) -> (modified score, allowed)`, in the one
order of `jattn.tile`. It is read as an expression (`jattn.functions.read`), and cut in two. What
depends on the query alone, on the key alone, on their distance or on the head becomes an array that
JAX computes once per call; for these T + S numbers any operation will do, and their derivative is
JAX's. The rest, the core, is what each pair needs, and becomes vector code: lanes are queries.

The derivative of the core is that of JAX too: the core is a function again, whose pullback is read
like it. Only operations, numbers and names of ours stand in the text that is compiled.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jattn._pytree import select_head, take_tile
from jattn._types import Shape
from jattn.functions import dependence, nodes, operations
from jattn.functions.dependence import BATCH_ROW, HEAD, KEY, QUERY, SCORE
from jattn.functions.nodes import Node
from jattn.functions.read import read
from jattn.kernels.cpu.text import COTANGENT, FIRST, function_of, kind
from jattn.masks import Span
from jattn.scores import in_order
from jattn.spec import Shapes, Spec


class Operand(NamedTuple):
    """An array that the core reads: `[B or 1, N or 1, size]`.

    Of kind `query` it has an entry for each query, `key` for each key, `distance` for each distance
    (entry i − j + S − 1), `head` one, and of kind `table` the core says which.
    """

    kind: str
    dtype: Any  # bool, an integer or a float dtype
    shape: Shape = ()  # of a table


class Rule(NamedTuple):
    """What a spec is for the kernel: the text of its core, and what goes with it."""

    text: str
    operands: tuple[Operand, ...]
    differentiated: tuple[int, ...]  # operands whose gradients the core gives
    modifies: bool  # whether scores change other than by the mask
    keeps: bool  # whether its derivative needs the scores before
    by_row: bool  # whether the mask depends on the batch row
    by_head: bool  # and on the head


def spec_function(spec: Spec) -> tuple[Callable[..., Any], list[Any]]:
    """`(run, leaves)`: `run(score, b, h, i, j, *leaves)` gives the modified score of a pair, and
    whether it is allowed."""
    own = dataclasses.replace(
        spec, scale=1.0, dropout_key=None, dropout_rate=0.0, precision=None, lse=False, origin=None
    )
    leaves, structure = jax.tree.flatten(own)

    def run(score: Any, b: Any, h: Any, i: Any, j: Any, *leaves: Any) -> Any:
        places = i[None], j[None]
        here = take_tile(select_head(jax.tree.unflatten(structure, leaves), b, h), *places)
        rows, columns = (
            Span((place + 0 if given is None else given).astype(jnp.int32), place)
            for place, given in zip(places, (here.q_positions, here.kv_positions), strict=True)
        )
        modified = score[None, None]
        for function in in_order(here.score):
            modified = function.evaluate(modified, b, h, rows, columns)
        allowed = jnp.broadcast_to(here.mask.evaluate(b, h, rows, columns), (1, 1))
        return modified[0, 0], allowed[0, 0]

    return run, leaves


# --- cutting ------------------------------------------------------------------------------------


class _Core(NamedTuple):
    """The part for each pair: `results` in terms of inputs, of which those from `first` on are
    operands, one for each of `cuts`: a node to be computed outside, or a table."""

    results: list[Node]
    cuts: list[tuple[Operand, Any]]
    mask_on: frozenset[int]  # inputs on which the mask depends


class _Cutter:
    """Replaces what is computed outside with inputs."""

    def __init__(self, results: Sequence[Node], tables: list[Any]):
        self.depends = dependence.of_nodes(results)
        self.tables = tables
        self.cuts: list[tuple[Operand, Any]] = []
        self._new: dict[int, Node] = {}
        self._made: list[Node] = []
        self._table_cuts: dict[Any, Node] = {}

    def replaced(self, node: Node) -> Node:
        if id(node) not in self._new:
            self._new[id(node)] = self._replace(node)
        return self._new[id(node)]

    def _replace(self, node: Node) -> Node:
        if node.op == "const" or (node.op == "input" and node.param in (SCORE, QUERY, KEY)):
            return node
        kind = self.depends[id(node)].kind
        if kind != "pair":
            return self._operand(Operand(kind, node.dtype), node)
        if node.op == "look_up":
            return self._look_up(node, node.dtype)
        if _widens(node) and node.args[0].op == "look_up":
            return self._look_up(node.args[0], node.dtype)
        if _widens(node) and node.args[0].op == "select_n":
            which, *cases = node.args[0].args
            cases = (self._widened(x, node.dtype) for x in cases)
            return Node("select_n", (self.replaced(which), *cases), node.dtype)
        return dataclasses.replace(node, args=tuple(map(self.replaced, node.args)))

    def _widened(self, node: Node, dtype: Any) -> Node:
        if node.op == "const":
            return nodes.const(node.param, dtype)
        wide = Node("convert_element_type", (node,), np.dtype(dtype))
        self.depends[id(wide)] = self.depends[id(node)]
        self._made.append(wide)  # as long as its id is
        return self.replaced(wide)

    def _operand(self, operand: Operand, cut: Any) -> Node:
        self.cuts.append((operand, cut))
        return Node("input", (), operand.dtype, FIRST + len(self.cuts) - 1)

    def _look_up(self, node: Node, dtype: Any) -> Node:
        """An entry, in a dtype, of a table that each pair chooses; places that the head chooses
        come first."""
        outer = 0
        while self.depends[id(node.args[outer])].kind == "head":
            outer += 1
        head, inner = node.args[:outer], node.args[outer:]
        shape = np.shape(self.tables[node.param])[outer:]  # pyright: ignore
        key = node.param, tuple(map(id, head)), dtype
        if key not in self._table_cuts:
            operand = Operand("table", dtype, shape)
            self._table_cuts[key] = self._operand(operand, (node.param, head))
        table = self._table_cuts[key]
        return Node("entry", (table, *map(self.replaced, inner)), dtype, shape)


def _widens(node: Node) -> bool:
    """Whether it is a float with more bits, which holds all numbers of its type: then what it is
    chosen from may be converted, and whole tables."""
    if node.op != "convert_element_type":
        return False
    narrow, wide = np.dtype(node.args[0].dtype), np.dtype(node.dtype)
    return _is_float(narrow) and _is_float(wide) and narrow.itemsize < wide.itemsize


def _is_float(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating)


_MOST_IN_A_ROW = 200  # operations; Python's own recursion bears some more


def _cut(results: list[Node], tables: list[Any]) -> _Core:
    def in_a_row(node: Node, before: list[int]) -> int:
        if node.op == "unknown":
            raise NotImplementedError(f"functions of pairs have no operation {node.param}")
        if 1 + max(before, default=0) > _MOST_IN_A_ROW:
            raise NotImplementedError(
                f"functions of pairs have at most {_MOST_IN_A_ROW} operations in a row"
            )
        return 1 + max(before, default=0)

    nodes.fold(results, in_a_row)
    cutter = _Cutter(results, tables)
    mask_on = cutter.depends[id(results[1])].on
    return _Core([cutter.replaced(x) for x in results], cutter.cuts, mask_on)


# --- evaluation by JAX --------------------------------------------------------------------------


def arrays(spec: Spec, shapes: Shapes, dtype: Any) -> list[Any]:
    """What a spec's rule reads, in the order of its operands and in the types of its text: a
    function of the spec's arrays."""
    core, tables = _core_of(spec, dtype)
    T, S = shapes.T, shapes.S
    along = {
        "head": (0, 0, 1),
        "query": (jnp.arange(T), 0, T),
        "key": (0, jnp.arange(S), S),
        # Of a place on a diagonal: any query and key that lie on it.
        "distance": (
            jnp.maximum(jnp.arange(T + S - 1) - (S - 1), 0),
            jnp.maximum((S - 1) - jnp.arange(T + S - 1), 0),
            T + S - 1,
        ),
    }
    found = []
    for operand, cut in core.cuts:
        if operand.kind == "table":
            number, head = cut
            found.append(_table_of(tables, number, head, shapes, operand))
            continue
        i, j, size = along[operand.kind]
        inputs = _places(i, j, shapes)
        (value,) = operations.evaluated([cut], inputs, tables)
        lead = (1,) * (3 - value.ndim) + value.shape
        value = jnp.broadcast_to(value.reshape(lead), (*lead[:2], size))
        found.append(_padded(value, operand.kind))
    whole = np.int32 if dtype == np.float32 else np.int64
    return [x.astype(whole) if kind(x.dtype, dtype) in "ib" else x for x in found]


def _places(i: Any, j: Any, shapes: Shapes) -> dict[Any, Any]:
    """Inputs that broadcast to `[B, N, size]`."""
    as_row = lambda x: jnp.asarray(x, jnp.int32).reshape(1, 1, -1)  # noqa: E731
    return {
        BATCH_ROW: jnp.arange(shapes.B, dtype=jnp.int32)[:, None, None],
        HEAD: jnp.arange(shapes.N, dtype=jnp.int32)[None, :, None],
        QUERY: as_row(i),
        KEY: as_row(j),
    }


_MARGIN = 64  # more entries than any vector has lanes, for lanes without a query


def _padded(x: Any, kind: str) -> Any:
    if kind in ("head", "key"):
        return x
    return jnp.pad(x, ((0, 0), (0, 0), (0, _MARGIN)), mode="edge" if x.shape[-1] else "constant")


def _table_of(tables: list[Any], number: int, head: Any, shapes: Shapes, operand: Operand) -> Any:
    """The entries of a table that heads choose, `[B or 1, N or 1, size]`."""
    table = jnp.asarray(tables[number]).astype(operand.dtype)
    if not head:
        return table.reshape(1, 1, -1)
    places = operations.evaluated(head, _places(0, 0, shapes), tables)
    shape = np.broadcast_shapes(*map(np.shape, places), (1, 1, 1))
    places = [jnp.broadcast_to(x, shape)[..., 0] for x in places]
    chosen = table.at[tuple(places)].get(mode="clip")
    return chosen.reshape(*chosen.shape[:2], -1)


# --- the rule -----------------------------------------------------------------------------------


def _core_of(spec: Spec, dtype: Any) -> tuple[_Core, list[Any]]:
    run, leaves = spec_function(spec)
    with jax.numpy_dtype_promotion("standard"):
        expression = read(run, (dtype, *[np.int32] * 4), leaves)
    if expression.effect:
        raise NotImplementedError(f"functions of pairs have no operation {expression.effect}")
    return _cut(expression.results, expression.tables), expression.tables


def rule_of(spec: Spec, dtype: Any, gradients: bool) -> Rule:
    """The rule of a spec whose arrays have one batch axis.

    Raises NotImplementedError with the reason for what vector code does not know.
    """
    core, _ = _core_of(spec, dtype)
    operands = tuple(operand for operand, _ in core.cuts)
    score, _ = core.results
    modifies = not (score.op == "input" and score.param == SCORE)
    pull = _pullback(core, operands, np.dtype(dtype)) if modifies else None
    text = function_of(nodes.values(core.results), operands, dtype)
    keeps = False
    differentiated: tuple[int, ...] = ()
    if pull is not None:
        d_score, d_operands = pull
        d_operands = d_operands if gradients else []
        differentiated = tuple(sorted({n for n, _ in d_operands}))
        backward = nodes.values([d_score, *(node for _, node in d_operands)])
        keeps = any(x.op == "input" and x.param == SCORE for x in nodes.in_order(backward))
        gradients_of = [(n, operands[n]) for n, _ in d_operands]
        text += function_of(backward, operands, dtype, gradients_of)
    if len(operands) > MOST_OPERANDS:
        raise NotImplementedError(f"its functions read {len(operands)} arrays, at most 32 fit")
    by_row, by_head = (x in core.mask_on for x in (BATCH_ROW, HEAD))
    return Rule(text, operands, differentiated, modifies, keeps, by_row, by_head)


MOST_OPERANDS = 31


def _pullback(
    core: _Core, operands: tuple[Operand, ...], dtype: Any
) -> tuple[Node, list[tuple[int, Node]]]:
    """Nodes of the cotangents of the score and of float operands, given that of the result; of a
    table there may be several."""
    score = core.results[0]
    pairs = nodes.in_order([score])
    entries = [x for x in pairs if x.op == "entry"]
    floats = [n for n, x in enumerate(operands) if _is_float(x.dtype) and x.kind != "table"]
    looked_up = [x for x in entries if _is_float(x.dtype)]
    others = [x for x in pairs if x.op == "input" and not _is_float(x.dtype)]
    given = [x for x in entries if not _is_float(x.dtype)]

    # What is differentiated comes first, then what is not, as scalars.
    def value(own: Sequence[Any], rest: Sequence[Any]) -> Any:
        inputs = dict.fromkeys(x.param for x in pairs if x.op == "input") | {SCORE: own[0]}
        inputs |= {FIRST + n: x for n, x in zip(floats, own[1:], strict=False)}
        inputs |= {node.param: x for node, x in zip(others, rest, strict=False)}
        known = dict(zip(map(id, looked_up), own[1 + len(floats) :], strict=True))
        known |= dict(zip(map(id, given), rest[len(others) :], strict=True))
        return operations.evaluated([score], inputs, (), known)[0]

    count = 1 + len(floats) + len(looked_up)
    wanted = [operands[n].dtype for n in floats] + [x.dtype for x in looked_up]

    def pullback(*scalars: Any) -> Any:
        own, rest, cotangent = scalars[:count], scalars[count:-1], scalars[-1]
        _, pull = jax.vjp(lambda *own: value(own, rest), *own)
        return [x.astype(dtype) for x in pull(cotangent)]

    dtypes = [dtype, *wanted, *(x.dtype for x in (*others, *given)), dtype]
    expression = read(pullback, dtypes)
    if expression.tables:
        raise NotImplementedError("the derivative of a score function needs an array of its own")
    numbers: list[Any] = [Node("input", (), dtype, SCORE)]
    numbers += [Node("input", (), operands[n].dtype, FIRST + n) for n in floats]
    numbers += [*looked_up, *others, *given, Node("input", (), dtype, COTANGENT)]
    renamed = nodes.replaced(
        expression.results,
        lambda node, _: numbers[node.param] if node.op == "input" else None,  # pyright: ignore
    )
    found = list(zip(floats, renamed[1:], strict=False))
    for node, d_node in zip(looked_up, renamed[1 + len(floats) :], strict=True):
        number: Any = node.args[0].param
        scattered = Node("scatter", (d_node, *node.args[1:]), dtype, node.param)
        found.append((number - FIRST, scattered))
    return renamed[0], found
