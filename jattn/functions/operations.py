"""Operations of expressions on arrays, by JAX."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from jattn.functions.nodes import Node


def apply(node: Node, args: Sequence[Any]) -> Any:
    """An operation on arrays that broadcast, by JAX.

    Raises NotImplementedError for one that is not known.
    """
    if node.op == "unknown":
        raise NotImplementedError(f"functions of pairs have no operation {node.param}")
    shape = np.broadcast_shapes(*map(np.shape, args))
    args = [jax.numpy.broadcast_to(x, shape) for x in args]
    special: dict[str, Callable[..., Any]] = {
        "convert_element_type": lambda x: x.astype(node.dtype),
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
