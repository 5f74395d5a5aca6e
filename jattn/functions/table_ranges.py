"""The least and greatest entry of a table over runs of places, in memory linear in the table."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jattn.functions.interval_rules import Interval, is_static, numpy_of, where


def looked_up(table: Any, places: list[Interval]) -> Interval:
    """Returns the interval of a table's entries at places in these intervals."""
    if isinstance(table, jax.Array) and not isinstance(table, Tracer):
        with jax.ensure_compile_time_eval():
            table = np.asarray(table)
    if jnp.issubdtype(table.dtype, jnp.bool_):
        table = table.astype(np.int8)
    while places and not np.shape(places[0].lo) and _is_point(places[0]):
        place, places = places[0].lo, places[1:]
        table = (table if is_static(place) else jnp.asarray(table))[place]
    if not places:
        return Interval(table, table)
    if is_static(table, places) and all(_is_point(x) for x in places):
        sizes = zip(places, table.shape, strict=True)
        entries = table[tuple(np.clip(x.lo, 0, n - 1) for x, n in sizes)]
        return Interval(entries, entries)
    least = most = table
    shapes = [np.broadcast_shapes(np.shape(x.lo), np.shape(x.hi)) for x in places]
    if len(places) == 1:
        return Interval(*(x.reshape(shapes[0]) for x in _extremes(least, most, places[0])))
    rows = _side_of_rows(shapes)
    if len(places) > 2 or rows is None:
        xp = numpy_of(table)
        return Interval(xp.min(table), xp.max(table))
    if rows == 1:
        least = most = table.T
        places = places[::-1]
    least, most = (x.T for x in _extremes(least, most, places[0]))  # [S, n]
    least, most = (x.T for x in _extremes(least, most, places[1]))  # [n, m]
    return Interval(least, most)


def _side_of_rows(shapes: list[Any]) -> int | None:
    """Returns which of two intervals runs along the rows of tiles, if the other runs along the
    columns; None otherwise."""
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


def _extremes(least: Any, most: Any, places: Interval) -> tuple[Any, Any]:
    """Returns the minimum of `least` and the maximum of `most`, `[n, ...]`, over each of p runs of
    places, `[p, ...]`. Doubling gives them for runs of a power of two; two of these cover any
    run."""
    n = least.shape[0]
    shape = np.broadcast_shapes(np.shape(places.lo), np.shape(places.hi))
    xp = numpy_of(least, most, places)
    least, most = xp.asarray(least), xp.asarray(most)
    lo, hi = (xp.clip(xp.broadcast_to(x, shape).reshape(-1), 0, n - 1) for x in places[:2])
    lo, hi = lo.astype(np.int32), hi.astype(np.int32)
    level = _floor_log2(xp, hi - lo + 1)
    levels = int(level.max(initial=0)) + 1 if xp is np else (n - 1).bit_length() + 1

    def double(k: Any, state: Any) -> Any:
        least, most, *results = state
        width = xp.asarray(1 << k, np.int32)
        is_level = (level == k).reshape(-1, *[1] * (least.ndim - 1))
        ends = lo, xp.maximum(hi - width + 1, 0)
        extremes = xp.minimum(*(least[x] for x in ends)), xp.maximum(*(most[x] for x in ends))
        results = [where(is_level, x, y) for x, y in zip(extremes, results, strict=True)]
        next_one = xp.minimum(xp.arange(n, dtype=np.int32) + width, n - 1)
        return xp.minimum(least, least[next_one]), xp.maximum(most, most[next_one]), *results

    state = least, most, least[lo], most[lo]
    if xp is np:
        for k in range(levels):
            state = double(k, state)
    else:
        state = jax.lax.fori_loop(np.int32(0), np.int32(levels), double, state)
    return state[2], state[3]


def _floor_log2(xp: Any, x: Any) -> Any:
    return 31 - jax.lax.clz(x) if xp is jnp else np.frexp(x.astype(np.float64))[1] - 1
