"""The tiles that each program of a Pallas kernel visits, as index arrays that the program reads.

The tile map lists the non-empty tiles of each block of queries (or of keys): as constants for
static masks, computed in the same program before the kernel for other masks.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from jattn import masks, tuning
from jattn._pytree import leading, select_head
from jattn._types import AnyArray, Index, Ref, Tree
from jattn.kernels.common import tile_schedule
from jattn.spec import Spec, Tiling


class BlockMask(NamedTuple):
    """The tiles that each block visits.

    `order [B, N, n, m]` lists them, tiles that need no mask first, or is None if all blocks visit
    0, 1, 2 and so on; `ends [B, N, n, 2]` holds the number of tiles that need no mask and the
    number of all. Axes B and N have size 1 if all entries are equal. `kinds` are the kinds of tile
    that may occur.
    """

    order: Any
    ends: Any
    kinds: tuple[int, ...]

    @property
    def arrays(self) -> tuple[Any, Any]:
        """The arrays that a kernel receives and passes to `fold` as `memory`."""
        return self.order, self.ends

    def compact(self) -> "BlockMask":
        """Returns the same without an order that is known to be 0, 1, 2 and so on."""
        if not isinstance(self.order, np.ndarray):
            return self
        places = np.arange(self.order.shape[-1])
        is_ordered = (self.order == places) | (places >= self.ends[..., 1:])
        return self._replace(order=None) if is_ordered.all() else self

    def without_full(self, heads: Array) -> "BlockMask":
        """Returns the same, except that `heads [B, N]` treat all tiles as if they needed a mask."""
        full, visited = self.ends[..., 0], self.ends[..., 1]
        full = jnp.where(heads[..., None], 0, full)
        ends = jnp.stack([full, jnp.broadcast_to(visited, full.shape)], axis=-1)
        return self._replace(ends=ends, kinds=tuple(sorted({*self.kinds, masks.MIXED})))

    def longest_first(self, heads: int) -> AnyArray | None:
        """Returns the blocks `[B, heads, n]` of each of `heads`, by falling number of tiles.

        B and heads have size 1 if all are equal. None if all blocks visit the same number.
        """
        visited = self.ends[..., 1]
        B, N, n = visited.shape
        if heads < N:  # key heads visit the tiles of all query heads of their group
            visited = visited.reshape(B, heads, N // heads, n).sum(axis=2)
        if isinstance(visited, np.ndarray):
            order = np.argsort(-visited, axis=-1, stable=True)
            return None if (visited == visited[..., :1]).all() else order.astype(np.int32)
        return jnp.argsort(-visited, axis=-1, stable=True).astype(np.int32)

    def fold(
        self,
        memory: Ref,
        block: tuple[Any, Any, Any],
        step: Callable[..., Any],
        state: Tree,
        part: tuple[Any, int] = (0, 1),
    ) -> Tree:
        """Folds `step(j, masked, state)` over the tiles that `block` (b, h, i) visits.

        `part` selects one of several equal parts of them.
        """
        run = _VisitedTiles.of(memory, block, part)
        return self._over(run, lambda j, masked, _, state: step(j, masked, state), state)

    def fold_ahead(
        self,
        memory: Ref,
        block: tuple[Any, Any, Any],
        fetch: Callable[[Any, Any], None],
        turn: Array,
        step: Callable[..., Any],
        state: Tree,
        part: tuple[Any, int] = (0, 1),
    ) -> Tree:
        """Folds like `fold`, with copies that start one step ahead.

        `fetch(j, turn)` starts to copy the data of block j. It is called for the first block before
        all steps, and `step(j, masked, fetch_next, state)` calls `fetch_next(turn)` for the next
        block.
        """
        run = _VisitedTiles.of(memory, block, part)

        def fetch_at(place: Any, turn: Array) -> None:
            lax.cond(place < run.stop, lambda: fetch(run.tile(place), turn), lambda: None)

        def ahead(j: Array, masked: bool, place: Array, state: Tree) -> Tree:
            return step(j, masked, functools.partial(fetch_at, place + 1), state)

        fetch_at(run.start, turn)
        return self._over(run, ahead, state)

    def _over(self, run: "_VisitedTiles", step: Callable[..., Any], state: Tree) -> Tree:
        """Folds `step(j, masked, place, state)` over a run."""

        def visit(masked: bool, place: Array, state: Tree) -> Tree:
            return step(run.tile(place), masked, place, state)

        if masks.FULL in self.kinds:
            ends = jnp.minimum(run.start, run.full), jnp.minimum(run.stop, run.full)
            state = tile_schedule.repeat(*ends, functools.partial(visit, False), state)
        if masks.MIXED in self.kinds:
            ends = jnp.maximum(run.start, run.full), jnp.maximum(run.stop, run.full)
            state = tile_schedule.repeat(*ends, functools.partial(visit, True), state)
        return state


class _VisitedTiles(NamedTuple):
    """The tiles that a block (b, h, i) visits: entries start .. stop - 1 of its list in `order`.
    Entries below `full` need no mask."""

    order: Any
    place: tuple[Any, Any, Any]
    start: AnyArray
    stop: AnyArray
    full: AnyArray

    @classmethod
    def of(cls, memory: Ref, place: tuple[Any, Any, Any], part: tuple[Any, int]) -> "_VisitedTiles":
        order, ends = memory
        full, visited = (ends[(*clamped(ends, *place[:2]), place[2], x)] for x in (0, 1))
        part_size = lax.div(visited + part[1] - 1, np.int32(part[1]))
        start, stop = (jnp.minimum(x * part_size, visited) for x in (part[0], part[0] + 1))
        return cls(order, place, start, stop, full)

    def tile(self, entry: Array) -> Array:
        if self.order is None:
            return entry
        return self.order[(*clamped(self.order, *self.place[:2]), self.place[2], entry)]


def clamped(x: Any, *index: Index) -> tuple[Any, ...]:
    """Returns indices of the first axes of an array in which axes of size 1 broadcast."""
    return tuple(i if size > 1 else 0 for i, size in zip(index, x.shape, strict=False))


def of(kinds: AnyArray, *, by_key: bool = False) -> BlockMask:
    """Returns for each block of queries the keys that it visits, or with `by_key` the other way
    round, from tile maps `[B, N, n, m]`."""
    kinds = kinds.swapaxes(-1, -2) if by_key else kinds
    static = isinstance(kinds, np.ndarray)
    xp: Any = np if static else jnp
    order = xp.argsort(-kinds, axis=-1, stable=True)  # full, mixed, empty
    ends = xp.stack([xp.sum(kinds >= least, axis=-1) for least in (masks.FULL, masks.MIXED)], -1)
    if static:
        order = order[..., : max(1, ends.max())]
    occurring = tuple(np.unique(kinds).tolist()) if static else (masks.MIXED, masks.FULL)
    return BlockMask(order.astype(np.int32), ends.astype(np.int32), occurring)


def of_heads(kinds: AnyArray, separate: tuple[int, int], shared: tuple[int, int]) -> BlockMask:
    """Returns for each tile, in the order of rows, the heads that visit it, all with the mask.

    `kinds` are tile maps `[B or 1, N or 1, n, m]`. There are `separate` batch rows and heads with
    lists of their own; each list covers `shared` batch rows and heads, numbered batch row by batch
    row; one of the two is 1.
    """
    xp: Any = np if isinstance(kinds, np.ndarray) else jnp
    (B, N), tiles = map(min, separate, kinds.shape), kinds.shape[2] * kinds.shape[3]
    visited = xp.minimum(kinds, masks.MIXED).reshape(*kinds.shape[:2], tiles)
    visited = xp.broadcast_to(visited, (B * shared[0], N * shared[1], tiles))
    visited = visited.reshape(B, shared[0], N, shared[1], tiles).transpose(0, 2, 4, 1, 3)
    block_mask = of(visited.reshape(B, N, tiles, -1)).compact()
    return block_mask._replace(kinds=(masks.MIXED,))


def of_diagonals(kinds: AnyArray, step: int, batch: int) -> BlockMask:
    """Returns for each diagonal of tiles the (b, i) that visit it, all with the mask.

    `kinds` are tile maps `[B or 1, N or 1, n, m]`. Diagonals begin at the last queries and the
    first keys; (b, i) are numbered batch row by batch row. A block of queries is as long as `step`
    blocks of keys.
    """
    xp: Any = np if isinstance(kinds, np.ndarray) else jnp
    _, N, n, m = kinds.shape
    last = (n - 1) * step
    i, d = np.arange(n), np.arange(m + last)[:, None]
    j = d - last + i * step
    outside = (j < 0) | (j >= m)
    visited = xp.minimum(kinds, masks.MIXED)[:, :, i, np.clip(j, 0, m - 1)]
    visited = xp.where(outside, masks.EMPTY, visited)  # [B, N, diagonals, n]
    visited = xp.broadcast_to(visited, (batch, N, m + last, n)).transpose(1, 2, 0, 3)
    block_mask = of(visited.reshape(1, N, m + last, batch * n)).compact()
    return block_mask._replace(kinds=(masks.MIXED,))


def parts(programs: int, tiles: int) -> int:
    """Returns the number of parts into which tiles of keys are split on a GPU.

    With few queries, as in decoding, each part has a program of its own beside `programs` others.
    """
    sizes = tuning.current()
    return max(1, min(sizes.gpu_programs // programs, tiles // sizes.gpu_tiles_each))


def kinds(spec: Spec, T: int, S: int, tiling: Tiling) -> Any:
    """Returns the tile maps `[B or 1, N or 1, n, m]`, as NumPy arrays if the mask is static."""
    spec = dataclasses.replace(spec, score=None, dropout_key=None)
    batch, heads = leading(spec)
    B, N = max((1, *batch)), max(1, heads)

    def of_head(b: Any, h: Any) -> Any:
        head = b if B > 1 else None, h if N > 1 else None  # None: a map for all heads
        return tile_schedule.kinds(select_head(spec, b, h), T, S, tiling, *head)

    if B == N == 1:
        return of_head(0, 0)[None, None]
    all_heads = jax.vmap(jax.vmap(of_head, (None, 0)), (0, None))
    return all_heads(jnp.arange(B, dtype=jnp.int32), jnp.arange(N, dtype=jnp.int32))
