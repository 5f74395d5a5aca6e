"""Checks and conversions of the arguments `rows` and `lengths` of caches."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jattn._types import Size
from jattn.checks import check_array
from jattn.functions import integers


def shorter(
    name: str, lengths: Any, present: Int[Array, " B"]
) -> tuple[Int[Array, " B"], Bool[Array, " B"]]:
    """Returns lengths `[B]`, from an array `[B]` or one integer, clamped to 0..present; and a
    boolean for each, true if it was outside.

    Raises TypeError unless they are integers, ValueError for wrong shapes and for concrete lengths
    outside.
    """
    B = len(present)
    if integers.is_integer(lengths):
        lengths = np.full(B, integers.clamped(int(lengths)), np.int32)
    check_array(name, lengths, "[B]", "integer", shape=None if np.ndim(lengths) == 0 else (B,))
    least, _ = integers.known_range(lengths) or (0, 0)
    if least < 0:
        raise ValueError(f"{name}: expected {name} >= 0, got {least}")
    lengths = integers.clamped(lengths)
    if integers.is_known(lengths) and integers.is_known(present):
        too_long = np.broadcast_to(np.asarray(lengths), B) > np.asarray(present)
        if too_long.any():
            row = int(np.argmax(too_long))
            got = np.broadcast_to(np.asarray(lengths), B)[row]
            raise ValueError(
                f"{name}: expected at most the present lengths, {int(present[row])} in batch row "
                f"{row}, got {got}"
            )
    clipped = jnp.clip(jnp.asarray(lengths), 0, present)
    return clipped, clipped != lengths


def picked_rows(
    name: str, rows: Any, B: Size, ranks: tuple[int, ...] = (1,)
) -> tuple[Int[Array, "..."], Bool[Array, "..."]]:
    """Returns indices of batch rows clamped to 0..B−1, and a boolean for each, true if it was
    outside. The rank of `rows` is one of `ranks`; a Python integer has rank 0.

    Raises TypeError for indices that are not integers, and ValueError for other ranks and for
    concrete indices outside.
    """
    if integers.is_integer(rows) and 0 in ranks:
        rows = np.array(integers.clamped(int(rows)), np.int32)
    rank = None if np.ndim(rows) in ranks else ranks[-1]
    check_array(name, rows, "[R]" if 1 in ranks else "[]", "integer", rank=rank)
    least, most = integers.known_range(rows) or (0, -1)
    if least < 0 or most >= B:
        wrong = least if least < 0 else most
        raise ValueError(f"{name}: expected 0 <= {name} < B = {B}, got {wrong}")
    indices = jnp.asarray(integers.clamped(rows))
    return jnp.clip(indices, 0, B - 1), (indices < 0) | (indices >= B)


def chosen(rows: Any, B: Size) -> Bool[Array, " B"]:
    """Returns which of B batch rows are chosen by booleans `[B]`, indices `[R]` or one index.
    Traced indices outside 0..B−1 choose none.

    Raises TypeError and ValueError for other values.
    """
    if jnp.issubdtype(getattr(rows, "dtype", np.object_), jnp.bool_):
        check_array("rows", rows, "[B]", "boolean", shape=(B,))
        return jnp.asarray(rows)
    indices, outside = picked_rows("rows", rows, B, (0, 1))
    is_row = indices.reshape(-1, 1) == jnp.arange(B, dtype=jnp.int32)[None, :]
    return jnp.any(is_row & ~outside.reshape(-1, 1), axis=0)


def put_rows(tree: Any, rows: Int[Array, " R"], other: Any) -> Any:
    """Writes arrays `[R, ...]` to `rows` of a tree of arrays `[B, ...]`. Along other axes, the
    shorter size counts. Row B is left out."""

    def put(x: Array, y: Array) -> Array:
        part = tuple(map(slice, map(min, x.shape[1:], y.shape[1:])))
        return x.at[(rows, *part)].set(y[(slice(None), *part)], mode="drop")

    return jax.tree.map(put, tree, other)
