"""Which tiles the programs of a kernel in Pallas visit, as index arrays that they read.

The tile map lists for each block of queries (or of keys) what is not empty: constants for static
masks, computed beforehand in the same program for others.
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
    """Which tiles each block visits: `order [B, N, n, m]` lists them, those without need of a mask
    first, or is None where all visit 0, 1, 2 and so on; `ends [B, N, n, 2]` says how many of these
    there are, and how many in all. Axes B and N have size 1 where all are alike. `kinds` are the
    kinds of tile that may occur.
    """

    order: Any
    ends: Any
    kinds: tuple[int, ...]

    @property
    def arrays(self) -> tuple[Any, Any]:
        """What is passed to a kernel, and comes back to `fold` as `memory`."""
        return self.order, self.ends

    def compact(self) -> "BlockMask":
        """The same without an order that is known to be 0, 1, 2 and so on."""
        if not isinstance(self.order, np.ndarray):
            return self
        places = np.arange(self.order.shape[-1])
        in_turn = (self.order == places) | (places >= self.ends[..., 1:])
        return self._replace(order=None) if in_turn.all() else self

    def without_full(self, heads: Array) -> "BlockMask":
        """The same, but `heads [B, N]` treat all tiles as if they needed a mask."""
        full, visited = self.ends[..., 0], self.ends[..., 1]
        full = jnp.where(heads[..., None], 0, full)
        ends = jnp.stack([full, jnp.broadcast_to(visited, full.shape)], axis=-1)
        return self._replace(ends=ends, kinds=tuple(sorted({*self.kinds, masks.MIXED})))

    def longest_first(self, heads: int) -> AnyArray | None:
        """For each of `heads` its blocks `[B, heads, n]` in falling order of the tiles that they
        visit; B and heads have size 1 where all are alike. None where all visit as many."""
        visited = self.ends[..., 1]
        B, N, n = visited.shape
        if heads < N:  # of key heads, which go through what all heads of their group visit
            visited = visited.reshape(B, heads, N // heads, n).sum(axis=2)
        if isinstance(visited, np.ndarray):
            order = np.argsort(-visited, axis=-1, stable=True)
            return None if (visited == visited[..., :1]).all() else order.astype(np.int32)
        return jnp.argsort(-visited, axis=-1, stable=True).astype(np.int32)

    def fold(
        self,
        memory: Ref,
        at: tuple[Any, Any, Any],
        step: Callable[..., Any],
        state: Tree,
        part: tuple[Any, int] = (0, 1),
    ) -> Tree:
        """Folds `step(j, masked, state)` over what block `at` (b, h, i) visits, or over one of
        several parts of that."""
        run = _Run.of(memory, at, part)
        return self._over(run, lambda j, masked, _, state: step(j, masked, state), state)

    def fold_ahead(
        self,
        memory: Ref,
        at: tuple[Any, Any, Any],
        fetch: Callable[[Any, Any], None],
        turn: Array,
        step: Callable[..., Any],
        state: Tree,
        part: tuple[Any, int] = (0, 1),
    ) -> Tree:
        """As `fold`, where `fetch(j, turn)` starts to copy what block j needs. It is called for the
        first one before all steps, and `step(j, masked, fetch_next, state)` calls
        `fetch_next(turn)` for the one that follows."""
        run = _Run.of(memory, at, part)

        def fetch_at(place: Any, turn: Array) -> None:
            lax.cond(place < run.stop, lambda: fetch(run.block(place), turn), lambda: None)

        def ahead(j: Array, masked: bool, place: Array, state: Tree) -> Tree:
            return step(j, masked, functools.partial(fetch_at, place + 1), state)

        fetch_at(run.start, turn)
        return self._over(run, ahead, state)

    def _over(self, run: "_Run", step: Callable[..., Any], state: Tree) -> Tree:
        """Folds `step(j, masked, place, state)`."""

        def visit(masked: bool, place: Array, state: Tree) -> Tree:
            return step(run.block(place), masked, place, state)

        if masks.FULL in self.kinds:
            ends = jnp.minimum(run.start, run.full), jnp.minimum(run.stop, run.full)
            state = tile_schedule.repeat(*ends, functools.partial(visit, False), state)
        if masks.MIXED in self.kinds:
            ends = jnp.maximum(run.start, run.full), jnp.maximum(run.stop, run.full)
            state = tile_schedule.repeat(*ends, functools.partial(visit, True), state)
        return state


class _Run(NamedTuple):
    """What block `at` (b, h, i) visits: places start .. stop - 1 of its list in `order`, of which
    those below `full` need no mask."""

    order: Any
    at: tuple[Any, Any, Any]
    start: AnyArray
    stop: AnyArray
    full: AnyArray

    @classmethod
    def of(cls, memory: Ref, at: tuple[Any, Any, Any], part: tuple[Any, int]) -> "_Run":
        order, ends = memory
        full, visited = (ends[(*clamped(ends, *at[:2]), at[2], x)] for x in (0, 1))
        each = lax.div(visited + part[1] - 1, np.int32(part[1]))
        start, stop = (jnp.minimum(x * each, visited) for x in (part[0], part[0] + 1))
        return cls(order, at, start, stop, full)

    def block(self, place: Array) -> Array:
        if self.order is None:
            return place
        return self.order[(*clamped(self.order, *self.at[:2]), self.at[2], place)]


def clamped(x: Any, *index: Index) -> tuple[Any, ...]:
    """Indices of the first axes of an array in which axes of size 1 broadcast."""
    return tuple(i if size > 1 else 0 for i, size in zip(index, x.shape, strict=False))


def of(kinds: AnyArray, *, by_key: bool = False) -> BlockMask:
    """From tile maps `[B, N, n, m]`: for each block of queries the keys, or the other way round."""
    kinds = kinds.swapaxes(-1, -2) if by_key else kinds
    static = isinstance(kinds, np.ndarray)
    xp: Any = np if static else jnp
    order = xp.argsort(-kinds, axis=-1, stable=True)  # full, mixed, empty
    ends = xp.stack([xp.sum(kinds >= least, axis=-1) for least in (masks.FULL, masks.MIXED)], -1)
    if static:
        order = order[..., : max(1, ends.max())]
    occurring = tuple(np.unique(kinds).tolist()) if static else (masks.MIXED, masks.FULL)
    return BlockMask(order.astype(np.int32), ends.astype(np.int32), occurring)


def of_heads(kinds: AnyArray, own: tuple[int, int], shared: tuple[int, int]) -> BlockMask:
    """From tile maps `[B or 1, N or 1, n, m]`: for each tile, in the order of rows, which heads
    visit it; all do with the mask. There are `own` batch rows and heads with lists of their own,
    and `shared` that each list is of, numbered batch row by batch row; one of the two is 1."""
    xp: Any = np if isinstance(kinds, np.ndarray) else jnp
    (B, N), tiles = map(min, own, kinds.shape), kinds.shape[2] * kinds.shape[3]
    visited = xp.minimum(kinds, masks.MIXED).reshape(*kinds.shape[:2], tiles)
    visited = xp.broadcast_to(visited, (B * shared[0], N * shared[1], tiles))
    visited = visited.reshape(B, shared[0], N, shared[1], tiles).transpose(0, 2, 4, 1, 3)
    found = of(visited.reshape(B, N, tiles, -1)).compact()
    return found._replace(kinds=(masks.MIXED,))


def of_diagonals(kinds: AnyArray, step: int, batch: int) -> BlockMask:
    """From tile maps `[B or 1, N or 1, n, m]`: for each diagonal of tiles, from the last queries
    and the first keys on, which (b, i) visit it, numbered batch row by batch row; all do with the
    mask. Of a block of queries `step` blocks of keys are as long."""
    xp: Any = np if isinstance(kinds, np.ndarray) else jnp
    _, N, n, m = kinds.shape
    last = (n - 1) * step
    i, d = np.arange(n), np.arange(m + last)[:, None]
    j = d - last + i * step
    outside = (j < 0) | (j >= m)
    visited = xp.minimum(kinds, masks.MIXED)[:, :, i, np.clip(j, 0, m - 1)]
    visited = xp.where(outside, masks.EMPTY, visited)  # [B, N, diagonals, n]
    visited = xp.broadcast_to(visited, (batch, N, m + last, n)).transpose(1, 2, 0, 3)
    found = of(visited.reshape(1, N, m + last, batch * n)).compact()
    return found._replace(kinds=(masks.MIXED,))


def parts(programs: int, tiles: int) -> int:
    """Into how many parts so many tiles of keys are split on a GPU, where there are few queries, as
    in decoding: each has a program of its own then, beside so many."""
    sizes = tuning.current()
    return max(1, min(sizes.gpu_programs // programs, tiles // sizes.gpu_tiles_each))


def kinds(spec: Spec, T: int, S: int, tiling: Tiling) -> Any:
    """The tile maps `[B or 1, N or 1, n, m]`; NumPy's if the mask is static."""
    spec = dataclasses.replace(spec, score=None, dropout_key=None)
    batch, heads = leading(spec)
    B, N = max((1, *batch)), max(1, heads)

    def one(b: Any, h: Any) -> Any:
        own = b if B > 1 else None, h if N > 1 else None  # one map for all must hold for all
        return tile_schedule.kinds(select_head(spec, b, h), T, S, tiling, *own)

    if B == N == 1:
        return one(0, 0)[None, None]
    every = jax.vmap(jax.vmap(one, (None, 0)), (0, None))
    return every(jnp.arange(B, dtype=jnp.int32), jnp.arange(N, dtype=jnp.int32))
