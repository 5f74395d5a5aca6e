"""The tiles that each program of a Pallas kernel visits, as index arrays that the program reads.

The arrays list the non-empty tiles of each block of queries, or of each block of keys. They are
constants if the mask is static; for other masks operations before the kernel compute them.
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
    """The tiles that each of n blocks visits, for example the blocks of keys of each query block.

    order: `[B, N, n, m]`, the indices of the tiles in the order in which a block visits them: full
        tiles, which need no mask, before mixed ones. None if each block visits 0, 1, 2 and so on.
    ends: `[B, N, n, 2]`, the number of full tiles and the number of all tiles that a block visits.
    kinds: the kinds of tile that may occur, `masks.FULL`, `MIXED` or `EMPTY`.

    B and N are 1 where the arrays are the same for all batch rows or heads.
    """

    order: Any
    ends: Any
    kinds: tuple[int, ...]

    @property
    def arrays(self) -> tuple[Any, Any]:
        """The arrays that a kernel receives as operands and passes to `fold` as `memory`."""
        return self.order, self.ends

    def compact(self) -> "BlockMask":
        """Returns the block mask without its order if that is static and 0, 1, 2 and so on."""
        if not isinstance(self.order, np.ndarray):
            return self
        entries = np.arange(self.order.shape[-1])
        is_ordered = (self.order == entries) | (entries >= self.ends[..., 1:])
        return self._replace(order=None) if is_ordered.all() else self

    def without_full(self, heads: Array) -> "BlockMask":
        """Returns a block mask in which the heads that are True in `heads [B, N]` treat all tiles
        as if they needed a mask."""
        full, visited = self.ends[..., 0], self.ends[..., 1]
        full = jnp.where(heads[..., None], 0, full)
        ends = jnp.stack([full, jnp.broadcast_to(visited, full.shape)], axis=-1)
        return self._replace(ends=ends, kinds=tuple(sorted({*self.kinds, masks.MIXED})))

    def longest_first(self, heads: int) -> AnyArray | None:
        """Returns the blocks of each head, `[B, heads, n]`, by decreasing number of tiles.

        `heads` is the number of query heads, or of key heads. An axis has size 1 if its entries are
        equal. Returns None if all blocks of a head visit the same number of tiles.
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
        """Folds `step(j, masked, state)` over the tiles j that `block` (b, h, i) visits.

        With `part` (p, parts), the tiles are split into equal parts, and part p is visited.
        """
        tiles = _VisitedTiles.of(memory, block, part)
        return self._over(tiles, lambda j, masked, _, state: step(j, masked, state), state)

    def fold_ahead(
        self,
        memory: Ref,
        block: tuple[Any, Any, Any],
        fetch: Callable[[Any, Any], None],
        step: Callable[..., Any],
        turn_and_state: tuple[Array, Tree],
        part: tuple[Any, int] = (0, 1),
    ) -> tuple[Array, Tree]:
        """Folds like `fold`, with copies that start one step ahead, and counts the tiles as turns.

        `fetch(j, turn)` starts to copy the data of tile j. It is called for the first tile before
        all steps. `step(j, masked, turn, fetch_next, state)` must call `fetch_next()`, which starts
        to copy the data of the next tile, if there is one.
        """
        tiles = _VisitedTiles.of(memory, block, part)

        def fetch_entry(entry: Any, turn: Array) -> None:
            lax.cond(entry < tiles.stop, lambda: fetch(tiles.tile(entry), turn), lambda: None)

        def step_with_fetch(j: Array, masked: bool, entry: Array, turn_and_state: Tree) -> Tree:
            turn, state = turn_and_state
            following = turn + 1
            fetch_next = functools.partial(fetch_entry, entry + 1, following)
            return following, step(j, masked, turn, fetch_next, state)

        fetch_entry(tiles.start, turn_and_state[0])
        return self._over(tiles, step_with_fetch, turn_and_state)

    def _over(self, tiles: "_VisitedTiles", step: Callable[..., Any], state: Tree) -> Tree:
        """Folds `step(j, masked, entry, state)` over the entries of a list of tiles."""

        def visit(masked: bool, entry: Array, state: Tree) -> Tree:
            return step(tiles.tile(entry), masked, entry, state)

        if masks.FULL in self.kinds:
            ends = jnp.minimum(tiles.start, tiles.full), jnp.minimum(tiles.stop, tiles.full)
            state = tile_schedule.repeat(*ends, functools.partial(visit, False), state)
        if masks.MIXED in self.kinds:
            ends = jnp.maximum(tiles.start, tiles.full), jnp.maximum(tiles.stop, tiles.full)
            state = tile_schedule.repeat(*ends, functools.partial(visit, True), state)
        return state


class _VisitedTiles(NamedTuple):
    """The tiles that a block (b, h, i) visits: entries `start` to `stop` − 1 of its list `order`.

    The entries below `full` are tiles that need no mask.
    """

    order: Any
    block: tuple[Any, Any, Any]
    start: AnyArray
    stop: AnyArray
    full: AnyArray

    @classmethod
    def of(cls, memory: Ref, block: tuple[Any, Any, Any], part: tuple[Any, int]) -> "_VisitedTiles":
        order, ends = memory
        full, visited = (ends[(*clamped(ends, *block[:2]), block[2], x)] for x in (0, 1))
        part_size = lax.div(visited + part[1] - 1, np.int32(part[1]))
        start, stop = (jnp.minimum(x * part_size, visited) for x in (part[0], part[0] + 1))
        return cls(order, block, start, stop, full)

    def tile(self, entry: Array) -> Array:
        """Returns the index j of the tile at an entry of the list."""
        if self.order is None:
            return entry
        return self.order[(*clamped(self.order, *self.block[:2]), self.block[2], entry)]


def clamped(x: Any, *index: Index) -> tuple[Any, ...]:
    """Returns `index` into the first axes of x, with 0 along axes of size 1, which broadcast."""
    return tuple(i if size > 1 else 0 for i, size in zip(index, x.shape, strict=False))


def of(kinds: AnyArray, *, by_key: bool = False) -> BlockMask:
    """Returns the block mask of tile maps `kinds [B, N, n, m]`.

    It lists the key blocks that each query block visits or, with `by_key`, the query blocks that
    each key block visits.
    """
    kinds = kinds.swapaxes(-1, -2) if by_key else kinds
    static = isinstance(kinds, np.ndarray)
    xp: Any = np if static else jnp
    order = xp.argsort(-kinds, axis=-1, stable=True)  # full, mixed, empty
    ends = xp.stack([xp.sum(kinds >= kind, axis=-1) for kind in (masks.FULL, masks.MIXED)], -1)
    if static:
        order = order[..., : max(1, ends.max())]
    occurring = tuple(np.unique(kinds).tolist()) if static else (masks.MIXED, masks.FULL)
    return BlockMask(order.astype(np.int32), ends.astype(np.int32), occurring)


def of_heads(kinds: AnyArray, separate: tuple[int, int], shared: tuple[int, int]) -> BlockMask:
    """Returns a block mask whose blocks are the n × m tiles, numbered row by row, and whose entries
    are the batch rows and heads that visit each tile, all with the mask.

    `kinds` are tile maps `[B or 1, N or 1, n, m]`. `separate` and `shared` are numbers of batch
    rows and of heads; along each of these two axes one of them is 1. Each of the `separate` rows
    and heads has lists of its own, which cover the `shared` rows and heads: an entry is row ×
    number of shared heads + head.
    """
    xp: Any = np if isinstance(kinds, np.ndarray) else jnp
    (B, N), tiles = map(min, separate, kinds.shape), kinds.shape[2] * kinds.shape[3]
    visited = xp.minimum(kinds, masks.MIXED).reshape(*kinds.shape[:2], tiles)
    visited = xp.broadcast_to(visited, (B * shared[0], N * shared[1], tiles))
    visited = visited.reshape(B, shared[0], N, shared[1], tiles).transpose(0, 2, 4, 1, 3)
    block_mask = of(visited.reshape(B, N, tiles, -1)).compact()
    return block_mask._replace(kinds=(masks.MIXED,))


def of_diagonals(kinds: AnyArray, step: int, batch: int) -> BlockMask:
    """Returns a block mask whose blocks are the diagonals of tiles, and whose entries are the batch
    rows b and query blocks i with a tile on the diagonal, all with the mask.

    `kinds` are tile maps `[B or 1, N or 1, n, m]`. Diagonal 0 has the last query block and the
    first key block. An entry is b n + i. A block of queries is as long as `step` blocks of keys.
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
    """Returns the number of parts into which `tiles` of keys are split on a GPU.

    Each of `programs` becomes one program for each part. If there are few, as in decoding with few
    queries, more of them keep the device busy.
    """
    sizes = tuning.current()
    return max(1, min(sizes.gpu_programs // programs, tiles // sizes.gpu_tiles_each))


def kinds(spec: Spec, T: int, S: int, tiling: Tiling) -> Any:
    """Returns the tile maps `[B or 1, N or 1, n, m]`, as NumPy arrays if the mask is static."""
    spec = dataclasses.replace(spec, score=None, dropout_key=None)
    batch, heads = leading(spec)
    B, N = max((1, *batch)), max(1, heads)

    def of_head(b: Index, h: Index) -> Any:
        # None: the map is the same for all batch rows, or all heads.
        index = b if B > 1 else None, h if N > 1 else None
        return tile_schedule.kinds(select_head(spec, b, h), T, S, tiling, *index)

    if B == N == 1:
        return of_head(0, 0)[None, None]
    all_heads = jax.vmap(jax.vmap(of_head, (None, 0)), (0, None))
    return all_heads(jnp.arange(B, dtype=jnp.int32), jnp.arange(N, dtype=jnp.int32))
