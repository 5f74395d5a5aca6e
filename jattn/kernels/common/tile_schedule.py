"""The schedule of a head's tiles: which tiles there are, and which of them are visited.

The tile map determines loop bounds. Empty tiles are skipped: no step of a loop visits them. Full
tiles are visited without the mask. Kernels define the computation of a tile; this file does not
depend on softmax or products.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from jattn import masks, tuning
from jattn._types import AnyArray, Index, Tree
from jattn.spec import Spec, Tiling


def kinds(
    spec: Spec, T: int, S: int, tiling: Tiling, b: Array | None = None, h: Array | None = None
) -> AnyArray:
    """Returns the tile map of one head, or, if b and h are None, a map that holds for all heads."""
    box = masks.Tile.grid(
        masks.extents(T, tiling.block_q, spec.q_positions),
        masks.extents(S, tiling.block_kv, spec.kv_positions),
        b,
        h,
    )
    return masks.kinds(spec.mask, box)


class TileRun(NamedTuple):
    """Consecutive tiles of keys of one kind, computed together as one wide tile."""

    start: Index
    size: int
    masked: bool


class Schedule(NamedTuple):
    """The keys that each block of queries visits, or the queries that each block of keys visits.

    `runs[i]` lists them if the tile map is known while tracing and the program stays short; a
    single list is for all blocks. Otherwise `tiles` holds, by width in tiles and kind, the columns
    `[n, m]` to visit and the number of columns that each block of queries visits `[n]`.
    """

    block: int
    runs: list[list[TileRun]] | None
    tiles: list[tuple[int, bool, Any, Any]]

    def of(self, i: Index) -> list[TileRun]:
        """Returns the runs of query block i; an empty list if they are not known."""
        return [] if self.runs is None else self.runs[0 if len(self.runs) == 1 else i]

    def unrolled(self, blocks: int) -> bool:
        """Returns whether the loop over blocks is unrolled: for one, or if each has its own
        runs."""
        return blocks == 1 or (self.runs is not None and len(self.runs) > 1)


def widest(tiling: Tiling) -> int:
    """Returns the most scores that a step of a schedule computes."""
    rows, columns = tiling
    width = tuning.current().max_width
    return max(rows * max(width, columns), columns * max(width, rows))


def schedule(
    spec: Spec,
    b: Array,
    h: Array,
    T: int,
    S: int,
    tiling: Tiling,
    *,
    by_key: bool = False,
    unrolled: bool = True,
) -> Schedule:
    """Returns the schedule of head (b, h); known while tracing if the mask is static.

    With `by_key` it lists, for each block of keys, the queries that it visits. `unrolled` allows
    several runs to be unrolled; otherwise, and if there are more than `tuning.max_written_out` of
    them, the program loops over them.
    """
    kinds_of_tiles, block = kinds(spec, T, S, tiling, b, h), tiling.block_kv
    if by_key:
        kinds_of_tiles, block = kinds_of_tiles.T, tiling.block_q
    columns = kinds_of_tiles.shape[1]
    if isinstance(kinds_of_tiles, np.ndarray):
        runs = [_runs_of(row, block) for row in kinds_of_tiles]
        if all(row == runs[0] for row in runs):
            runs = runs[:1]
        if sum(map(len, runs)) <= (tuning.current().max_written_out if unrolled else 1):
            return Schedule(block, runs, [])
    if columns == 1:
        return Schedule(block, [[TileRun(0, block, True)]], [])  # a check costs as much as the tile
    xp = np if isinstance(kinds_of_tiles, np.ndarray) else jnp
    full = kinds_of_tiles == masks.FULL
    wanted = [(1, True, kinds_of_tiles == masks.MIXED)]
    # Never all columns: XLA would move loop-invariant computations out of the loop and always run
    # them.
    wide = min(tuning.current().max_width // block, columns - 1)
    if wide > 1:
        groups = columns // wide
        grouped = xp.all(full[:, : groups * wide].reshape(-1, groups, wide), axis=2)
        rest = columns - groups * wide
        full = full & ~xp.pad(xp.repeat(grouped, wide, axis=1), ((0, 0), (0, rest)))
        wanted.append((wide, False, grouped))
    wanted.append((1, False, full))
    return Schedule(
        block, None, [(size, masked, *where_true(xp, which)) for size, masked, which in wanted]
    )


def _runs_of(kinds: np.ndarray, block: int) -> list[TileRun]:
    """Returns the runs of one block of queries, of at most `tuning.max_width` keys each."""
    runs: list[TileRun] = []
    for j, kind in enumerate(kinds):
        run = TileRun(j * block, block, bool(kind == masks.MIXED))
        last = runs[-1] if runs else TileRun(-1, 0, False)
        joins = last.start + last.size == run.start and last.masked == run.masked
        if kind != masks.EMPTY and joins and last.size + block <= tuning.current().max_width:
            runs[-1] = last._replace(size=last.size + block)
        elif kind != masks.EMPTY:
            runs.append(run)
    return runs


def where_true(xp: Any, which: AnyArray) -> tuple[Any, Any]:
    """Returns the True columns of bool `[n, m]`, first in each row, and their number."""
    order = xp.argsort(~which, axis=1, stable=True).astype(np.int32)
    count = which.sum(axis=1).astype(np.int32)
    return (order if xp is jnp else order[:, : max(1, count.max(initial=0))]), count


def visit(schedule: Schedule, i: Index, step: Callable[[TileRun, Any], Any], state: Tree) -> Tree:
    """Folds `step(run, state)` over the runs that block i visits."""
    state = functools.reduce(lambda state, run: step(run, state), schedule.of(i), state)
    for width, masked, order, count in schedule.tiles:
        if not isinstance(count, np.ndarray) or count.any():
            run, columns = TileRun(0, width * schedule.block, masked), jnp.asarray(order)[i]

            def body(
                place: Array, state: Tree, run: TileRun = run, columns: Array = columns
            ) -> Tree:
                return step(run._replace(start=columns[place] * run.size), state)

            state = repeat(0, jnp.asarray(count)[i], body, state)
    return state


class Band(NamedTuple):
    """A schedule in which block i of `rows` queries sees `width` keys, from `starts[i]` on."""

    rows: int
    width: int
    starts: np.ndarray


def band(spec: Spec, T: int, S: int, tiling: Tiling) -> Band | None:
    """Returns the band, if the unmasked tiles form one and fill most of it.

    Each block of queries then has a short sequence of keys: one fused kernel, no online softmax.
    """
    double = 2 * tiling.block_q <= 256 and T % (2 * tiling.block_q) == 0
    rows = tiling.block_q * (1 + double)
    tile_kinds = kinds(spec, T, S, Tiling(rows, tiling.block_kv))
    if spec.score is not None or spec.dropout_rate or not isinstance(tile_kinds, np.ndarray):
        return None
    visited = tile_kinds != masks.EMPTY
    seen = visited.any(axis=1)
    first = np.where(seen, visited.argmax(axis=1), 0)
    last = np.where(seen, visited.shape[1] - visited[:, ::-1].argmax(axis=1), 0)
    tiles = int(max(1, (last - first).max()))
    width = tiles * tiling.block_kv
    if rows * width > tuning.current().max_band or visited.sum() <= 0.75 * len(tile_kinds) * tiles:
        return None
    starts = np.minimum(first, visited.shape[1] - tiles) * tiling.block_kv
    return Band(rows, width, starts.astype(np.int32))


def map_blocks(
    schedule: Schedule,
    n: int,
    block: Callable[[Any], Any],
    over_blocks: Callable[..., Any] = lax.map,
) -> Tree:
    """Returns `block(i)` for all n blocks, stacked: computed sequentially, or by `over_blocks`."""
    if schedule.unrolled(n):
        parts = [block(np.int32(i)) for i in range(n)]
        return jax.tree.map(lambda *x: jnp.stack(x), *parts)
    return over_blocks(block, jnp.arange(n, dtype=jnp.int32))


def join(x: Array) -> Array:
    """Joins stacked blocks `[n, t, ...]` to `[T, ...]`."""
    return x.reshape(-1, *x.shape[2:])


def fold_blocks(schedule: Schedule, n: int, block: Callable[[Any, Any], Any], total: Tree) -> Tree:
    """Folds `block(i, total)` over all n blocks of queries."""
    if schedule.unrolled(n):
        return functools.reduce(lambda total, i: block(np.int32(i), total), range(n), total)
    return repeat(0, n, block, total)


def repeat(start: Index, stop: Index, body: Callable[[Any, Any], Any], state: Tree) -> Tree:
    """`lax.fori_loop` with an int32 index, even if 64-bit types are enabled."""
    as_int32 = lambda i, state: body(lax.convert_element_type(i, jnp.int32), state)  # noqa: E731
    return lax.fori_loop(jnp.int32(start), jnp.int32(stop), as_int32, state)


def even(size: int, target: int) -> int:
    """Returns the size of blocks near the target that split an axis evenly.

    It is the whole size for one block, else a multiple of 8.
    """
    blocks = -(-size // target)
    return size if blocks == 1 else -(-size // (8 * blocks)) * 8
