"""Evaluation of expressions on arrays, by JAX."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jax import lax

from jattn.functions.nodes import Node, fold


# JAX's elementwise primitives that are operations of nodes, besides those that `nodes.Node` lists.
ELEMENTWISE = frozenset(
    """
    abs acos acosh add and asin asinh atan atan2 atanh bitcast_convert_type cbrt ceil clamp
    convert_element_type cos cosh div eq erf erfc erf_inv exp exp2 expm1 floor ge gt integer_pow
    is_finite le log log1p logistic lt max min mul ne neg nextafter not or pow reduce_precision rem
    round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt
    square sub tan tanh xor
    """.split()
)

READS_TABLE = ("look_up", "table")  # operations whose `param` is the number of a table

_NOTHING: Mapping[int, Any] = MappingProxyType({})


def is_reference(x: Any) -> bool:
    """Returns whether an operand is not an array but a kernel's reference to memory."""
    return hasattr(x, "inside")


def apply(node: Node, args: Sequence[Any]) -> Any:
    """Computes an operation on arrays that broadcast, by JAX.

    Raises NotImplementedError for an unknown operation.
    """
    if node.op == "unknown":
        raise NotImplementedError(f"functions of pairs have no operation {node.param}")
    if node.op == "primitive":
        whole = {n for n, x in enumerate(node.args) if x.op == "table"}
        return jax.numpy.vectorize(node.param, excluded=whole)(*args)  # pyright: ignore
    shape = np.broadcast_shapes(*map(np.shape, args))
    return compute(node, [jax.numpy.broadcast_to(x, shape) for x in args])


def compute(node: Node, args: Sequence[Any]) -> Any:
    """Computes an operation on arrays of one shape, by JAX."""
    special: dict[str, Callable[..., Any]] = {
        "convert_element_type": lambda x: lax.convert_element_type(x, node.dtype),
        "bitcast_convert_type": lambda x: lax.bitcast_convert_type(x, node.dtype),
        "integer_pow": lambda x: lax.integer_pow(x, node.param),  # pyright: ignore
        "round": lambda x: lax.round(x, node.param),  # pyright: ignore
        "reduce_precision": lambda x: lax.reduce_precision(x, *node.param),  # pyright: ignore
        "custom": lambda _, *inputs: jax.numpy.vectorize(node.param)(*inputs),  # pyright: ignore
        "floor_divide": jax.numpy.floor_divide,
        "remainder": jax.numpy.remainder,
        "select_n": lax.select_n,
        "and": lax.bitwise_and,
        "or": lax.bitwise_or,
        "xor": lax.bitwise_xor,
        "not": lax.bitwise_not,
    }
    return special.get(node.op, getattr(lax, node.op, None))(*args)  # pyright: ignore


def _looked_up(table: Any, index: list[Any]) -> Any:
    if is_reference(table):
        return table.inside(*(x.astype(jax.numpy.int32) for x in index))
    places = jax.numpy.asarray(table).at[tuple(index)]
    return places.get(mode="clip", wrap_negative_indices=False)


def evaluated(
    roots: Sequence[Node],
    scalars: Any,
    tables: Sequence[Any],
    known: Mapping[int, Any] = _NOTHING,
    apply: Callable[[Node, list[Any]], Any] = apply,
) -> list[Any]:
    """Returns the values of the roots, for inputs that are arrays and broadcast.

    `scalars[n]` is the value of input n, `known` holds values of other nodes by id of the node, and
    `apply` computes the other operations.
    """

    def value(node: Node, args: list[Any]) -> Any:
        if id(node) in known:
            return known[id(node)]
        if node.op == "input":
            return scalars[node.param]
        if node.op == "const":
            return np.asarray(node.param, node.dtype)
        if node.op not in READS_TABLE:
            return apply(node, args)
        table: Any = tables[node.param]  # pyright: ignore
        if not args:
            return table if node.op == "table" else jax.numpy.asarray(table)
        return _looked_up(table, args)

    results = fold(roots, value)
    return [results[id(x)] for x in roots]
