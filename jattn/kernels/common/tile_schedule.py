"""The schedule of a head: the tiles that each block of queries, or of keys, visits.

The schedule comes from the tile map, which says for each tile whether the mask allows all of its
pairs (full), some (mixed) or none (empty). Empty tiles are skipped: no step of a loop visits them.
Full tiles are visited without the mask. The functions of this file call a kernel's function for
each tile, and do not depend on the softmax or on products.
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
    spec: Spec, T: int, S: int, tiling: Tiling, b: Index | None = None, h: Index | None = None
) -> AnyArray:
    """Returns the tile map `[n, m]` of head (b, h); where b or h is None, the map is valid for all
    batch rows or all heads. It is a NumPy array if the mask is static."""
    grid = masks.Tile.grid(
        masks.extents(T, tiling.block_q, spec.q_positions),
        masks.extents(S, tiling.block_kv, spec.kv_positions),
        b,
        h,
    )
    return masks.kinds(spec.mask, grid)


class TileRun(NamedTuple):
    """Consecutive tiles of keys that are computed together, as one tile of `size` keys.

    All are full, or all are computed with the mask (`masked`). With `by_key` they are queries.
    """

    start: Index
    size: int
    masked: bool


class Schedule(NamedTuple):
    """The keys that each block of queries visits, or the queries that each block of keys visits.

    If the mask is static and the program stays short, loops are unrolled: `runs[i]` lists the runs
    of block i, or a single `runs[0]` the runs of every block. Otherwise `runs` is None, and each
    entry `(width, masked, order, count)` of `tiles` is a loop over tiles that are `width` blocks
    wide: block i visits the first `count[i]` tiles of `order[i]`. `block` is the size of a block.
    """

    block: int
    runs: list[list[TileRun]] | None
    tiles: list[tuple[int, bool, Any, Any]]

    def unrolled_runs(self, i: Index) -> list[TileRun]:
        """Returns the runs of block i if they are unrolled, else an empty list."""
        return [] if self.runs is None else self.runs[0 if len(self.runs) == 1 else i]

    def unrolled(self, blocks: int) -> bool:
        """Returns whether the loop over `blocks` is unrolled: if there is only one, or if blocks
        have different runs."""
        return blocks == 1 or (self.runs is not None and len(self.runs) > 1)


def widest(tiling: Tiling) -> int:
    """Returns the largest number of scores that a step of a schedule computes."""
    block_q, block_kv = tiling
    width = tuning.current().max_width
    return max(block_q * max(width, block_kv), block_kv * max(width, block_q))


def schedule(
    spec: Spec,
    b: Index,
    h: Index,
    T: int,
    S: int,
    tiling: Tiling,
    *,
    by_key: bool = False,
    unrolled: bool = True,
) -> Schedule:
    """Returns the schedule of head (b, h).

    With `by_key` it lists, for each block of keys, the queries that it visits. With `unrolled`, up
    to `tuning.max_unrolled_runs` runs of a static mask are unrolled, else only a single one. In all
    other cases the program loops over tiles.
    """
    tile_kinds, block = kinds(spec, T, S, tiling, b, h), tiling.block_kv
    if by_key:
        tile_kinds, block = tile_kinds.T, tiling.block_q
    columns = tile_kinds.shape[1]
    if isinstance(tile_kinds, np.ndarray):
        runs = [_runs_of(row, block) for row in tile_kinds]
        if all(row == runs[0] for row in runs):
            runs = runs[:1]
        if sum(map(len, runs)) <= (tuning.current().max_unrolled_runs if unrolled else 1):
            return Schedule(block, runs, [])
    if columns == 1:
        # To check whether the only tile is empty would take as long as to compute it.
        return Schedule(block, [[TileRun(0, block, True)]], [])
    xp = np if isinstance(tile_kinds, np.ndarray) else jnp
    full = tile_kinds == masks.FULL
    loops = [(1, True, tile_kinds == masks.MIXED)]
    # Where a group of `width` tiles is full, they are computed as one. A group never has all
    # columns: a loop over one group would always compute the same tile, which XLA would move out of
    # the loop and compute even if the loop has no step.
    width = min(tuning.current().max_width // block, columns - 1)
    if width > 1:
        groups = columns // width
        full_groups = xp.all(full[:, : groups * width].reshape(-1, groups, width), axis=2)
        rest = columns - groups * width
        full = full & ~xp.pad(xp.repeat(full_groups, width, axis=1), ((0, 0), (0, rest)))
        loops.append((width, False, full_groups))
    loops.append((1, False, full))
    return Schedule(
        block, None, [(width, masked, *where_true(xp, visited)) for width, masked, visited in loops]
    )


def _runs_of(kinds: np.ndarray, block: int) -> list[TileRun]:
    """Returns the runs of one row of a tile map, each of at most `tuning.max_width` keys."""
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


def where_true(xp: Any, condition: AnyArray) -> tuple[Any, Any]:
    """Returns, for each row of a boolean `[n, m]`, its columns with the True ones first, and the
    number of True columns."""
    order = xp.argsort(~condition, axis=1, stable=True).astype(np.int32)
    count = condition.sum(axis=1).astype(np.int32)
    return (order if xp is jnp else order[:, : max(1, count.max(initial=0))]), count


def visit(schedule: Schedule, i: Index, step: Callable[[TileRun, Any], Any], state: Tree) -> Tree:
    """Folds `step(run, state)` over the runs that block i visits."""
    state = functools.reduce(lambda state, run: step(run, state), schedule.unrolled_runs(i), state)
    for width, masked, order, count in schedule.tiles:
        if not isinstance(count, np.ndarray) or count.any():
            run, columns = TileRun(0, width * schedule.block, masked), jnp.asarray(order)[i]

            def body(
                entry: Array, state: Tree, run: TileRun = run, columns: Array = columns
            ) -> Tree:
                return step(run._replace(start=columns[entry] * run.size), state)

            state = repeat(0, jnp.asarray(count)[i], body, state)
    return state


class Band(NamedTuple):
    """A schedule in which block i of `rows` queries visits `width` keys, from `starts[i]` on."""

    rows: int
    width: int
    starts: np.ndarray


def band(spec: Spec, T: int, S: int, tiling: Tiling) -> Band | None:
    """Returns the band of a static mask whose non-empty tiles fill most of it, else None.

    The keys of a block of queries are then one tile, which XLA computes in one fused kernel without
    the online softmax. Masks with a score function or dropout have no band.
    """
    double = 2 * tiling.block_q <= 256 and T % (2 * tiling.block_q) == 0
    rows = tiling.block_q * (1 + double)
    tile_kinds = kinds(spec, T, S, Tiling(rows, tiling.block_kv))
    if spec.score is not None or spec.dropout_rate or not isinstance(tile_kinds, np.ndarray):
        return None
    visited = tile_kinds != masks.EMPTY
    has_tiles = visited.any(axis=1)
    first = np.where(has_tiles, visited.argmax(axis=1), 0)
    stop = np.where(has_tiles, visited.shape[1] - visited[:, ::-1].argmax(axis=1), 0)
    tiles = int(max(1, (stop - first).max()))
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
    """Returns the results of `block(i)` for each i < n, stacked.

    They are unrolled if the schedule is, else computed by `over_blocks(block, indices)`.
    """
    if schedule.unrolled(n):
        results = [block(np.int32(i)) for i in range(n)]
        return jax.tree.map(lambda *x: jnp.stack(x), *results)
    return over_blocks(block, jnp.arange(n, dtype=jnp.int32))


def concatenate_blocks(x: Array) -> Array:
    """Concatenates stacked blocks `[n, t, ...]` to `[T, ...]`."""
    return x.reshape(-1, *x.shape[2:])


def fold_blocks(schedule: Schedule, n: int, block: Callable[[Any, Any], Any], total: Tree) -> Tree:
    """Folds `block(i, total)` over the blocks i < n."""
    if schedule.unrolled(n):
        return functools.reduce(lambda total, i: block(np.int32(i), total), range(n), total)
    return repeat(0, n, block, total)


def repeat(start: Index, stop: Index, body: Callable[[Any, Any], Any], state: Tree) -> Tree:
    """Runs `lax.fori_loop` with an int32 index, even if 64-bit types are enabled."""
    as_int32 = lambda i, state: body(lax.convert_element_type(i, jnp.int32), state)  # noqa: E731
    return lax.fori_loop(jnp.int32(start), jnp.int32(stop), as_int32, state)


def even(size: int, target: int) -> int:
    """Returns a block size of about `target` that splits an axis of `size` into blocks of nearly
    equal size: `size` itself if that is one block, else a multiple of 8."""
    blocks = -(-size // target)
    return size if blocks == 1 else -(-size // (8 * blocks)) * 8
