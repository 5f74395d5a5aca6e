"""Masks and score functions as C++ for the kernel's own vectors, with their derivatives.

A spec is one function of scalars: `(score, b, h, i, j) -> (modified score, allowed)`, in the order
of `jattn.tile`. `jattn.functions.read` makes an expression of it, which this file cuts in two. The
parts that depend on the query alone, the key alone, their distance or the head become arrays that
JAX computes once per call; for these T + S numbers it may use any operation, and it differentiates
them. The remainder, the core, is computed for each pair by vector code whose lanes are queries.

JAX also differentiates the core: the pullback of the core is a function again, and is read in the
same way. The compiled text contains only operations, numbers and names of this package.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jattn._pytree import select_head, take_tile
from jattn._types import Index, Shape
from jattn.functions import dependence, nodes, operations
from jattn.functions.dependence import BATCH_ROW, HEAD, KEY, QUERY, SCORE
from jattn.functions.nodes import Node
from jattn.functions.read import read
from jattn.kernels.cpu.text import COTANGENT, FIRST, function_of, is_narrow, kind
from jattn.masks import Span
from jattn.scores import in_order
from jattn.spec import Shapes, Spec, parameters


class Operand(NamedTuple):
    """An array that the core reads: `[B or 1, N or 1, size]`.

    An array of kind `query` has an entry for each query, `key` for each key, `distance` for each
    distance (entry i − j + S − 1), `head` a single entry; of a `table`, the core chooses entries.
    """

    kind: str
    dtype: Any  # bool, an integer or a float dtype
    shape: Shape = ()  # the shape of a table


class GeneratedRule(NamedTuple):
    """The mask and score function of a spec for the kernel, as text of C++.

    differentiated: the operands whose gradients the core computes.
    modifies: whether the rule changes scores other than by the mask.
    keeps: whether its derivative needs the unmodified scores.
    by_row, by_head: whether the mask depends on the batch row, or on the head.
    """

    text: str
    operands: tuple[Operand, ...]
    differentiated: tuple[int, ...]
    modifies: bool
    keeps: bool
    by_row: bool
    by_head: bool


def spec_function(spec: Spec) -> tuple[Callable[..., Any], list[Any]]:
    """Returns `(run, leaves)`: `run(score, b, h, i, j, *leaves)` computes the modified score of a
    pair, and whether the pair is allowed."""
    mask_and_score = dataclasses.replace(
        spec,
        scale=1.0,
        dropout_key=None,
        dropout_rate=0.0,
        precision=None,
        normalizer=None,
        lse=False,
        origin=None,
    )
    leaves, structure = jax.tree.flatten(mask_and_score)

    def run(score: Any, b: Index, h: Index, i: Any, j: Any, *leaves: Any) -> Any:
        places = i[None], j[None]
        pair = take_tile(select_head(jax.tree.unflatten(structure, leaves), b, h), *places)
        rows, columns = (
            Span((place + 0 if positions is None else positions).astype(jnp.int32), place)
            for place, positions in zip(places, (pair.q_positions, pair.kv_positions), strict=True)
        )
        modified = score[None, None]
        for function in in_order(pair.score):
            modified = function.evaluate(modified, b, h, rows, columns)
        allowed = jnp.broadcast_to(pair.mask.evaluate(b, h, rows, columns), (1, 1))
        return modified[0, 0], allowed[0, 0]

    return run, leaves


# --- cutting ------------------------------------------------------------------------------------


class _Core:
    """The part of an expression that is computed for each pair; JAX computes the rest in advance.

    results: the modified score and whether the pair is allowed, in terms of inputs.
    cuts: the operands, which are the inputs from `FIRST` on, each with the node that JAX computes
        or, for a table, its number and the places that the head chooses.
    mask_on: the inputs on which the mask depends.
    tables: the arrays in which the expression looks up entries.
    """

    def __init__(self, results: Sequence[Node], tables: list[Any]):
        self.depends = dependence.of_nodes(results)
        self.tables = tables
        self.cuts: list[tuple[Operand, Any]] = []
        self._new: dict[int, Node] = {}
        self._table_cuts: dict[Any, Node] = {}
        self.mask_on = self.depends[id(results[1])].on
        self.results = [self.replaced(x) for x in results]

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
        if node.op in ("primitive", "unknown"):
            raise NotImplementedError(f"functions of pairs have no operation {node.name}")
        if node.op == "look_up":
            return self._look_up(node)
        return dataclasses.replace(node, args=tuple(map(self.replaced, node.args)))

    def _operand(self, operand: Operand, cut: Any) -> Node:
        self.cuts.append((operand, cut))
        return Node("input", (), operand.dtype, FIRST + len(self.cuts) - 1)

    def _look_up(self, node: Node) -> Node:
        """Returns the entry that each pair chooses in a table.

        The places that depend on the head alone must come first; JAX indexes the table with them.
        """
        outer = 0
        while self.depends[id(node.args[outer])].kind == "head":
            outer += 1
        head, inner = node.args[:outer], node.args[outer:]
        shape = np.shape(self.tables[node.param])[outer:]  # pyright: ignore
        key = node.param, tuple(map(id, head))
        if key not in self._table_cuts:
            operand = Operand("table", node.dtype, shape)
            self._table_cuts[key] = self._operand(operand, (node.param, head))
        table = self._table_cuts[key]
        return Node("entry", (table, *map(self.replaced, inner)), node.dtype, shape)


def _is_float(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating)


_MAX_DEPTH = 200  # operations; Python's own recursion limit allows a few more


def _core(spec: Spec, dtype: Any) -> _Core:
    """Reads a spec and cuts it; raises NotImplementedError for an unknown operation."""

    def depth(node: Node, depths: list[int]) -> int:
        if len(depths) and max(depths) >= _MAX_DEPTH:
            raise NotImplementedError(
                f"functions of pairs have at most {_MAX_DEPTH} operations in a row"
            )
        return 1 + max(depths, default=0)

    run, leaves = spec_function(spec)
    with jax.numpy_dtype_promotion("standard"):
        results, tables, effect = read(run, (dtype, *[np.int32] * 4), leaves)
    if effect:
        raise NotImplementedError(f"functions of pairs have no operation {effect}")
    nodes.fold(results, depth)
    return _Core(results, tables)


# --- evaluation by JAX --------------------------------------------------------------------------


def arrays(spec: Spec, shapes: Shapes, dtype: Any) -> list[Any]:
    """Computes the operands of a spec's rule from its arrays, in the dtypes of the rule's text."""
    core, (T, S) = _core(spec, dtype), shapes[1:3]
    distances = jnp.arange(T + S - 1) - (S - 1)
    places = {
        "head": (0, 0),
        "query": (jnp.arange(T), 0),
        "key": (0, jnp.arange(S)),
        # Any query and key that have this distance.
        "distance": (jnp.maximum(distances, 0), jnp.maximum(-distances, 0)),
    }
    sizes = {"head": 1, "query": T, "key": S, "distance": T + S - 1}

    def array(operand: Operand, cut: Any) -> Any:
        if operand.kind == "table":
            table, head = cut
            return _table(core.tables, table, head, shapes, operand)
        i, j = places[operand.kind]
        inputs = _inputs(i, j, shapes)
        (value,) = operations.evaluated([cut], inputs, core.tables)
        lead = (1,) * (3 - value.ndim) + value.shape
        value = jnp.broadcast_to(value.reshape(lead), (*lead[:2], sizes[operand.kind]))
        if operand.kind in ("head", "key"):
            return value
        mode = "edge" if value.shape[-1] else "constant"
        return jnp.pad(value, ((0, 0), (0, 0), (0, _MARGIN)), mode=mode)

    return [_as_lanes(array(*x), dtype) for x in core.cuts]


def _as_lanes(x: Any, working: Any) -> Any:
    """Converts an array to the dtype of which the text reads its elements."""
    if is_narrow(x.dtype):
        x = jax.lax.optimization_barrier(x)  # XLA would not round what it widens at once
    integer = np.int32 if working == np.float32 else np.int64
    elements = {"f": working, "i": integer, "b": integer}
    return x.astype(elements.get(kind(x.dtype, working), x.dtype))


_MARGIN = 64  # more entries than any vector has lanes, for lanes without a query


def _inputs(i: Any, j: Any, shapes: Shapes) -> dict[Any, Any]:
    """Returns inputs that broadcast to `[B, N, size]`, for queries i and keys j."""
    as_row = lambda x: jnp.asarray(x, jnp.int32).reshape(1, 1, -1)  # noqa: E731
    return {
        BATCH_ROW: jnp.arange(shapes.B, dtype=jnp.int32)[:, None, None],
        HEAD: jnp.arange(shapes.N, dtype=jnp.int32)[None, :, None],
        QUERY: as_row(i),
        KEY: as_row(j),
    }


def _table(tables: list[Any], number: int, head: Any, shapes: Shapes, operand: Operand) -> Any:
    """Returns the entries of a table that heads choose, `[B or 1, N or 1, size]`."""
    table = jnp.asarray(tables[number]).astype(operand.dtype)
    if not head:
        return table.reshape(1, 1, -1)
    places = operations.evaluated(head, _inputs(0, 0, shapes), tables)
    shape = np.broadcast_shapes(*map(np.shape, places), (1, 1, 1))
    places = [jnp.broadcast_to(x, shape)[..., 0] for x in places]
    chosen = table.at[tuple(places)].get(mode="clip")
    return chosen.reshape(*chosen.shape[:2], -1)


# --- the rule -----------------------------------------------------------------------------------


MOST_OPERANDS = 31


def generate(spec: Spec, dtype: Any, gradients: bool = True) -> GeneratedRule:
    """Generates the rule of a spec whose arrays have one batch axis.

    Raises NotImplementedError with the reason if vector code lacks an operation.
    """
    core = _core(spec, dtype)
    operands = tuple(operand for operand, _ in core.cuts)
    score, _ = core.results
    modifies = not (score.op == "input" and score.param == SCORE)
    pull = _pullback(core, operands, np.dtype(dtype)) if modifies else None
    text = function_of(nodes.values(core.results), operands, dtype)
    keeps, differentiated = False, ()
    if pull is not None:
        d_score, d_operands = pull if gradients and parameters(spec) else (pull[0], [])
        differentiated = tuple(sorted({n for n, _ in d_operands}))
        backward = nodes.values([d_score, *(node for _, node in d_operands)])
        keeps = any(x.op == "input" and x.param == SCORE for x in nodes.in_order(backward))
        gradients_of = [(n, operands[n]) for n, _ in d_operands]
        text += function_of(backward, operands, dtype, gradients_of)
    if len(operands) > MOST_OPERANDS:
        raise NotImplementedError(
            f"its functions read {len(operands)} arrays, at most {MOST_OPERANDS} fit"
        )
    by_row, by_head = (x in core.mask_on for x in (BATCH_ROW, HEAD))
    return GeneratedRule(text, operands, differentiated, modifies, keeps, by_row, by_head)


def _pullback(
    core: _Core, operands: tuple[Operand, ...], dtype: Any
) -> tuple[Node, list[tuple[int, Node]]]:
    """Returns the cotangent of the score, and those of float operands with their numbers, as nodes
    in terms of the cotangent of the result. A table has one for each entry that the core reads."""
    score = core.results[0]
    pairs = nodes.in_order([score])
    entries = [x for x in pairs if x.op == "entry"]
    floats = [n for n, x in enumerate(operands) if _is_float(x.dtype) and x.kind != "table"]
    float_entries = [x for x in entries if _is_float(x.dtype)]
    constants = [x for x in pairs if x.op == "input" and not _is_float(x.dtype)]
    constant_entries = [x for x in entries if not _is_float(x.dtype)]

    # Differentiable scalars come first: the score, float operands, float entries.
    def value(differentiable: Sequence[Any], rest: Sequence[Any]) -> Any:
        inputs = dict.fromkeys(x.param for x in pairs if x.op == "input")
        inputs |= {SCORE: differentiable[0]}
        inputs |= {FIRST + n: x for n, x in zip(floats, differentiable[1:], strict=False)}
        inputs |= {node.param: x for node, x in zip(constants, rest, strict=False)}
        known = dict(zip(map(id, float_entries), differentiable[1 + len(floats) :], strict=True))
        known |= dict(zip(map(id, constant_entries), rest[len(constants) :], strict=True))
        return operations.evaluated([score], inputs, (), known)[0]

    count = 1 + len(floats) + len(float_entries)

    def pullback(*scalars: Any) -> Any:
        rest, cotangent = scalars[count:-1], scalars[-1]
        _, pull = jax.vjp(lambda *x: value(x, rest), *scalars[:count])
        return [x.astype(dtype) for x in pull(cotangent)]

    inputs: list[Any] = [Node("input", (), dtype, SCORE)]
    inputs += [Node("input", (), operands[n].dtype, FIRST + n) for n in floats]
    inputs += [*float_entries, *constants, *constant_entries, Node("input", (), dtype, COTANGENT)]
    expression = read(pullback, [x.dtype for x in inputs])
    if expression.tables:
        raise NotImplementedError("the derivative of a score function needs an array of its own")
    d_score, *gradients = nodes.replaced(
        expression.results,
        lambda node, _: inputs[node.param] if node.op == "input" else None,  # pyright: ignore
    )
    results = list(zip(floats, gradients, strict=False))
    for node, d_node in zip(float_entries, gradients[len(floats) :], strict=True):
        number: Any = node.args[0].param
        scattered = Node("scatter", (d_node, *node.args[1:]), dtype, node.param)
        results.append((number - FIRST, scattered))
    return d_score, results
