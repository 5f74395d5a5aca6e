"""Look-ups of score functions that are moved out of the kernel.

A user's function may index its operands, as in FlexAttention (Dong et al. 2024):
`score * gate[h] + by_key[b, kv] + table[h, q - kv + 5]`. The expression of the function tells on
which of batch row b, head h, query q and key kv each index depends. If it does not depend on both q
and kv, or only on their distance, there are few different entries. They are gathered before the
kernel, into one array for each look-up: along T, along S, along the distances, or without these
axes. The kernel reads the array by tile, and computes its gradient; the derivative of the gather
adds that to the gradient of the operand.

An operand that is also looked up with any other index is left to the kernel.

T5's bias computes a logarithm for each pair of a query and a key. Without positions, a distance is
the difference of two indices: the biases for all T + S − 1 distances are computed before the
kernel. With positions, only the buckets are computed before it, for distances up to
±`max_distance`, beyond which they do not change.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jattn import scores
from jattn._pytree import array_field, pytree_dataclass, static_field
from jattn.functions import dependence, nodes, operations
from jattn.functions.dependence import BATCH_ROW, HEAD, KEY, QUERY, SCORE
from jattn.functions.nodes import Node
from jattn.functions.read import read
from jattn.kernels.gpu.mosaic.tile.spec_refs import entries_of
from jattn.spec import Shapes, Spec


_INPUTS = (np.float32, *[np.int32] * 4)  # a score, b, h, q and kv


def replaced(spec: Spec, shapes: Shapes) -> Spec:
    """Returns the spec with gathered arrays in place of look-ups; `shapes` are whole tiles."""
    if spec.score is None:
        return spec
    chain = [_replaced(x, spec, shapes) for x in scores.in_order(spec.score)]
    return dataclasses.replace(spec, score=functools.reduce(operator.rshift, chain))


def _replaced(score: scores.ScoreFunction, spec: Spec, shapes: Shapes) -> scores.ScoreFunction:
    """Returns one score function of a chain with gathered arrays in place of look-ups."""
    if isinstance(score, scores.RelativeBias):
        if positions_are_places(spec):
            return _of_places(score, shapes)
        return _of_positions(score)
    return _of_function(score, spec, shapes) if isinstance(score, scores.Score) else score


def positions_are_places(spec: Spec) -> bool:
    """Returns whether the position of a query or key is its index along T or S."""
    return spec.q_positions is None and spec.kv_positions is None


@pytree_dataclass
class ByDistance(scores.ScoreFunction):
    """The score function score + values[h, kv − q + zero], for distances kv − q ≥ −zero."""

    values: Any = array_field("#N distances")
    zero: int = static_field()

    def evaluate(self, score, b, h, rows, columns):
        index = (columns.positions + self.zero)[None, :] - rows.positions[:, None]
        return score + entries_of(self.values, index).astype(score.dtype)


@pytree_dataclass
class ByBucket(scores.ScoreFunction):
    """The score function score + table[buckets[kv − q + far], h], with kv − q clamped to ±far."""

    table: Any = array_field("buckets N")
    buckets: Any = array_field("distances")
    far: int = static_field()

    def evaluate(self, score, b, h, rows, columns):
        q, kv = rows.positions[:, None], columns.positions[None, :]
        # kv − q may overflow int32, but its absolute value fits uint32.
        distance = (jnp.maximum(q, kv) - jnp.minimum(q, kv)).astype(jnp.uint32)
        clamped = jnp.minimum(distance, np.uint32(self.far)).astype(jnp.int32)
        index = self.far + jnp.where(kv > q, clamped, -clamped)
        bucket = entries_of(self.buckets, index)
        return score + entries_of(self.table, bucket).astype(score.dtype)


def _of_places(score: scores.RelativeBias, shapes: Shapes) -> ByDistance:
    """Returns the score function of a call without positions."""
    zero = shapes.T - 1
    distance = jnp.arange(zero + shapes.S, dtype=jnp.int32) - zero
    return ByDistance(score.table[score.bucket(distance)].T, zero)


_MAX_DISTANCE = 2**16  # the greatest distance for which buckets are computed in advance


def _of_positions(score: scores.RelativeBias) -> scores.ScoreFunction:
    """Returns the score function for any positions, unchanged if its buckets differ beyond
    `_MAX_DISTANCE`."""
    far = score.max_distance
    if far > _MAX_DISTANCE:
        return score
    distance = jnp.arange(2 * far + 1, dtype=jnp.int32) - far
    return ByBucket(score.table, score.bucket(distance), far)


@pytree_dataclass
class Hoisted(scores.ScoreFunction):
    """A user's score function, with gathered arrays in place of some look-ups.

    tables: the operands whose look-ups remain in the kernel.
    by_head, by_query, by_key, by_distance: the gathered arrays, by the kind of their look-ups.
    result: the expression of the function, in which look-up n is input number `KEY + 1 + n`.
    sites: the kind of each look-up, and the index of its array among the arrays of the kind.
    zero: the index of the distance kv − q = 0 along the arrays by distance.
    """

    tables: tuple[Any, ...]
    by_head: Any = array_field("*B N")
    by_query: Any = array_field("*B N T")
    by_key: Any = array_field("*B N S")
    by_distance: Any = array_field("#N distances")
    result: Node = static_field()
    sites: tuple[tuple[str, int], ...] = static_field()
    zero: int = static_field()

    def evaluate(self, score, b, h, rows, columns):
        per_key = jax.vmap(self._scalar, (0, None, None, None, 0, None, 0))
        per_query = jax.vmap(per_key, (0, None, None, 0, None, 0, None))
        b, h = jnp.asarray(b, jnp.int32), jnp.asarray(h, jnp.int32)
        q, kv = rows.positions, columns.positions
        return per_query(score, b, h, q, kv, self.by_query, self.by_key)

    def _scalar(self, score, b, h, q, kv, by_query, by_key):
        arrays = {"head": self.by_head, "query": by_query, "key": by_key}
        index = (kv - q) + self.zero  # compiled in this order it needs fewer registers

        def value(kind: str, which: int) -> Any:
            if kind == "distance":
                return entries_of(self.by_distance[which], index)
            return arrays[kind][which]

        inputs = score, b, h, q, kv, *(value(*site) for site in self.sites)
        return operations.evaluated([self.result], inputs, self.tables)[0]


def depends_on_score(function: Callable[..., Any]) -> bool:
    """Returns whether a function of score, b, h, q and kv depends on the score."""
    (result,) = read(function, _INPUTS).results
    return SCORE in dependence.of_nodes([result])[id(result)].on


def _of_function(score: scores.Score, spec: Spec, shapes: Shapes) -> scores.ScoreFunction:
    """Returns the function with gathered arrays for each operand whose look-ups all allow it."""
    leaves, structure = jax.tree.flatten(score)

    def scalar(*arguments: Any) -> Any:
        inputs, operands = arguments[: len(_INPUTS)], arguments[len(_INPUTS) :]
        return jax.tree.unflatten(structure, operands)._scalar(*inputs)

    expression = read(scalar, _INPUTS, leaves)
    depends = dependence.of_nodes(expression.results)
    look_ups = [x for x in expression.nodes if x.op == "look_up" and _is_float_table(x, expression)]
    kinds = [_kind(depends[id(x)], positions_are_places(spec)) for x in look_ups]
    remaining = {x.param for x, kind in zip(look_ups, kinds, strict=True) if kind == "pair"}
    pairs = zip(look_ups, kinds, strict=True)
    hoisted = {id(x): (x, kind) for x, kind in pairs if x.param not in remaining}
    # Kernels compute gradients of operands, not of a table that the function computes from these.
    computed = any(
        all(expression.tables[n] is not leaf for leaf in leaves)  # pyright: ignore
        for n in remaining
    )
    if computed or not hoisted:
        return score
    arrays: dict[str, list[Array]] = {kind: [] for kind in ("head", "query", "key", "distance")}
    sites = []
    for node, kind in hoisted.values():
        sites.append((kind, len(arrays[kind])))
        arrays[kind].append(_values(node, kind, expression.tables, spec, shapes))
    result, tables = _without_look_ups(expression, [*hoisted])
    return Hoisted(
        tables=tables,
        **{f"by_{kind}": tuple(values) for kind, values in arrays.items()},
        result=result,
        sites=tuple(sites),
        zero=shapes.T - 1,
    )


def _is_float_table(node: Node, expression: nodes.Expression) -> bool:
    """Returns whether a look-up reads an array of floats that has axes and entries."""
    table: Any = expression.tables[node.param]  # pyright: ignore
    return jnp.issubdtype(table.dtype, jnp.floating) and table.ndim > 0 and table.size > 0


def _kind(dependent: dependence.Dependence, positions_are_places: bool) -> str:
    """Returns what the entries of a look-up depend on: "head", "query", "key", "distance" or, in
    all other cases, "pair"."""
    by_distance = positions_are_places and BATCH_ROW not in dependent.on
    return "pair" if dependent.kind == "distance" and not by_distance else dependent.kind


def _without_look_ups(
    expression: nodes.Expression, look_ups: Sequence[int]
) -> tuple[Node, tuple[Any, ...]]:
    """Returns the result with inputs in place of the nodes with the ids `look_ups`, and the tables
    that it still reads."""
    numbers = {look_up: KEY + 1 + n for n, look_up in enumerate(look_ups)}

    def as_input(node: Node, _: Any) -> Node | None:
        is_replaced = id(node) in numbers
        return Node("input", (), node.dtype, numbers[id(node)]) if is_replaced else None

    (result,) = nodes.replaced(expression.results, as_input)
    reading = (x for x in nodes.in_order([result]) if x.op in operations.READS_TABLE)
    still_read = sorted({x.param for x in reading})  # pyright: ignore

    def renumbered(node: Node, args: list[Node]) -> Node | None:
        if node.op not in operations.READS_TABLE:
            return None
        param: Any = node.param
        return Node(node.op, tuple(args), node.dtype, still_read.index(param))

    (result,) = nodes.replaced([result], renumbered)
    return result, tuple(expression.tables[n] for n in still_read)  # pyright: ignore


def _values(node: Node, kind: str, tables: list[Any], spec: Spec, shapes: Shapes) -> Array:
    """Returns the entries of a look-up for all batch rows, heads, queries, keys or distances, with
    size 1 along axes on which it does not depend."""
    if kind == "distance":
        distance = jnp.arange(shapes.T + shapes.S - 1, dtype=jnp.int32) - (shapes.T - 1)
        q, kv = jnp.maximum(-distance, 0), jnp.maximum(distance, 0)
    else:
        q = _positions(spec.q_positions, shapes.T)[:, None]
        kv = _positions(spec.kv_positions, shapes.S)[:, None]
    b, h = (jnp.arange(size, dtype=jnp.int32) for size in (shapes.B, shapes.N))
    inputs = {BATCH_ROW: b[:, None, None], HEAD: h[:, None], QUERY: q, KEY: kv}
    (values,) = operations.evaluated([node], inputs, tables)
    values = values.reshape((1,) * (3 - values.ndim) + values.shape)
    if kind == "distance":
        return values[0]
    return values[..., 0] if kind == "head" else values


def _positions(positions: Array | None, size: int) -> Array:
    """Returns positions as `[B or 1, size]`."""
    if positions is None:
        return jnp.arange(size, dtype=jnp.int32)[None]
    return jnp.broadcast_to(positions.astype(jnp.int32), (positions.shape[0], size))
