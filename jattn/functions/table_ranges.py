"""The least and greatest entry of a table over ranges of indices, in memory linear in the table."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jattn.functions.interval_rules import Interval, is_static, numpy_of, where


def looked_up(table: Any, indices: list[Interval]) -> Interval:
    """Returns the interval of a table's entries at indices in these intervals, one per axis; the
    interval of each entry without indices."""
    if isinstance(table, jax.Array) and not isinstance(table, Tracer):
        with jax.ensure_compile_time_eval():
            table = np.asarray(table)
    if jnp.issubdtype(table.dtype, jnp.bool_):
        table = table.astype(np.int8)
    numbers = [x.lo if _is_number(x) else slice(None) for x in indices]
    indices = [x for x in indices if not _is_number(x)]
    if len(indices) < len(numbers):
        table = (table if is_static(numbers) else jnp.asarray(table))[tuple(numbers)]
    if not indices:
        return Interval(table, table)
    if is_static(table, indices) and all(_is_point(x) for x in indices):
        sizes = zip(indices, table.shape, strict=True)
        entries = table[tuple(np.clip(x.lo, 0, n - 1) for x, n in sizes)]
        return Interval(entries, entries)
    least = most = table
    shapes = [np.broadcast_shapes(np.shape(x.lo), np.shape(x.hi)) for x in indices]
    if len(indices) == 1:
        return Interval(*(x.reshape(shapes[0]) for x in _extremes(least, most, indices[0])))
    rows = _side_of_rows(shapes)
    if len(indices) > 2 or rows is None:
        xp = numpy_of(table)
        return Interval(xp.min(table), xp.max(table))
    if rows == 1:
        least = most = table.T
        indices = indices[::-1]
    least, most = (x.T for x in _extremes(least, most, indices[0]))  # [S, n]
    least, most = (x.T for x in _extremes(least, most, indices[1]))  # [n, m]
    return Interval(*(x.reshape(np.broadcast_shapes(*shapes)) for x in (least, most)))


def _side_of_rows(shapes: list[Any]) -> int | None:
    """Returns 0 or 1: which of two intervals varies only along the first axis of the grid of tiles,
    while the other varies only along the second. Returns None if neither order fits, or for a list
    of tiles instead of a grid."""
    if any(len(shape) == 1 for shape in shapes):
        return None
    sides = [
        {n for n, size in enumerate((1,) * (2 - len(shape)) + shape) if size > 1}
        for shape in shapes
    ]
    for rows in (0, 1):
        if len(sides) == 2 and sides[rows] <= {0} and sides[1 - rows] <= {1}:
            return rows
    return None


def _is_point(x: Interval) -> bool:
    return x.lo is x.hi or (is_static(x) and bool(np.all(x.lo == x.hi)))


def _is_number(x: Interval) -> bool:
    """Returns whether an interval is one number, the same for all tiles."""
    return not np.shape(x.lo) and _is_point(x)


def _extremes(least: Any, most: Any, indices: Interval) -> tuple[Any, Any]:
    """Returns the minimum of `least` and the maximum of `most`, `[n, ...]`, over each of p ranges
    of indices, as `[p, ...]`.

    Step k combines neighbouring ranges of 2**k indices to ranges of 2**(k + 1). A range of any size
    is the union of two overlapping ranges whose size is a power of two.
    """
    n = least.shape[0]
    shape = np.broadcast_shapes(np.shape(indices.lo), np.shape(indices.hi))
    xp = numpy_of(least, most, indices)
    least, most = xp.asarray(least), xp.asarray(most)
    lo, hi = (xp.clip(xp.broadcast_to(x, shape).reshape(-1), 0, n - 1) for x in indices[:2])
    lo, hi = lo.astype(np.int32), hi.astype(np.int32)
    level = _floor_log2(xp, hi - lo + 1)  # the step with the two ranges that cover lo..hi
    levels = int(level.max(initial=0)) + 1 if xp is np else (n - 1).bit_length() + 1

    def double(k: Any, state: Any) -> Any:
        least, most, *results = state
        width = xp.asarray(1 << k, np.int32)
        is_level = (level == k).reshape(-1, *[1] * (least.ndim - 1))
        ends = lo, xp.maximum(hi - width + 1, 0)
        extremes = xp.minimum(*(least[x] for x in ends)), xp.maximum(*(most[x] for x in ends))
        results = [where(is_level, x, y) for x, y in zip(extremes, results, strict=True)]
        neighbour = xp.minimum(xp.arange(n, dtype=np.int32) + width, n - 1)
        return xp.minimum(least, least[neighbour]), xp.maximum(most, most[neighbour]), *results

    state = least, most, least[lo], most[lo]
    if xp is np:
        for k in range(levels):
            state = double(k, state)
    else:
        state = jax.lax.fori_loop(np.int32(0), np.int32(levels), double, state)
    return state[2], state[3]


def _floor_log2(xp: Any, x: Any) -> Any:
    return 31 - jax.lax.clz(x) if xp is jnp else np.frexp(x.astype(np.float64))[1] - 1
