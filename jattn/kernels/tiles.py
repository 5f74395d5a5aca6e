"""How a head is walked tile by tile: which tiles there are, which are visited, and what each sees.

The tile map decides the walk through loop bounds: empty tiles are not visited, full ones leave the
mask out. Kernels say what is done at a tile; here stands nothing about softmax or products.
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

from jattn import masks, tile
from jattn._types import Shape, Size, axis_along, declared
from jattn.masks import Span
from jattn.spec import Shapes, Spec, Tiling, parameters, with_parameters


def kinds(spec: Spec, T: int, S: int, tiling: Tiling) -> Any:
    """The tile map of one head."""
    box = masks.Tile.grid(
        masks.extents(T, tiling.block_q, spec.q_positions),
        masks.extents(S, tiling.block_kv, spec.kv_positions),
    )
    return masks.kinds(spec.mask, box)


class Run(NamedTuple):
    """Consecutive tiles of keys of one kind, taken together as one wide tile."""

    start: Any
    size: int
    masked: bool


class Walk(NamedTuple):
    """Which keys each block of queries visits, or the other way round.

    `runs[i]` lists them where the tile map is known while tracing and the program stays short; a
    single list is for all. Otherwise `tiles` holds, by width in tiles and kind, the columns
    `[n, m]` to visit and how many of them each block of queries visits `[n]`.
    """

    block: int
    runs: list[list[Run]] | None
    tiles: list[tuple[int, bool, Any, Any]]

    def of(self, i: Any) -> list[Run]:
        """The runs of query block i; none where they are not known."""
        return [] if self.runs is None else self.runs[0 if len(self.runs) == 1 else i]

    def unrolled(self, blocks: int) -> bool:
        """Whether the program is written out block by block."""
        return blocks == 1 or (self.runs is not None and len(self.runs) > 1)


_RUNS = 8  # longest program written out run by run: side by side, more of them take memory and time
_WIDE = 1024  # keys in a run or a wide tile at most: they bound the memory


def plan(spec: Spec, T: int, S: int, tiling: Tiling, *, by_key: bool = False) -> Walk:
    """The walk of one head; known while tracing if the mask is static. `by_key` walks over the
    queries of each block of keys."""
    kinds_of_tiles, block = kinds(spec, T, S, tiling), tiling.block_kv
    if by_key:
        kinds_of_tiles, block = kinds_of_tiles.T, tiling.block_q
    columns = kinds_of_tiles.shape[1]
    if isinstance(kinds_of_tiles, np.ndarray):
        runs = [_runs_of(row, block) for row in kinds_of_tiles]
        if all(row == runs[0] for row in runs):
            runs = runs[:1]
        if sum(map(len, runs)) <= _RUNS:
            return Walk(block, runs, [])
    if columns == 1:
        return Walk(block, [[Run(0, block, True)]], [])  # looking is no cheaper than computing
    xp = np if isinstance(kinds_of_tiles, np.ndarray) else jnp
    full = kinds_of_tiles == masks.FULL
    wanted = [(1, True, kinds_of_tiles == masks.MIXED)]
    # Never all columns: what does not depend on the loop is moved out of it, and always computed.
    wide = min(_WIDE // block, columns - 1)
    if wide > 1:
        groups = columns // wide
        grouped = xp.all(full[:, : groups * wide].reshape(-1, groups, wide), axis=2)
        rest = columns - groups * wide
        full = full & ~xp.pad(xp.repeat(grouped, wide, axis=1), ((0, 0), (0, rest)))
        wanted.append((wide, False, grouped))
    wanted.append((1, False, full))
    return Walk(
        block, None, [(size, masked, *where_true(xp, which)) for size, masked, which in wanted]
    )


def _runs_of(kinds: np.ndarray, block: int) -> list[Run]:
    """The runs of one block of queries, of at most `_WIDE` keys each."""
    runs: list[Run] = []
    for j, kind in enumerate(kinds):
        here = Run(j * block, block, bool(kind == masks.MIXED))
        last = runs[-1] if runs else Run(-1, 0, False)
        joins = last.start + last.size == here.start and last.masked == here.masked
        if kind != masks.EMPTY and joins and last.size + block <= _WIDE:
            runs[-1] = last._replace(size=last.size + block)
        elif kind != masks.EMPTY:
            runs.append(here)
    return runs


def where_true(xp: Any, which: Any) -> tuple[Any, Any]:
    """Of bool `[n, m]`: the columns that are True, first in each row, and how many they are."""
    order = xp.argsort(~which, axis=1, stable=True).astype(np.int32)
    count = which.sum(axis=1).astype(np.int32)
    return (order if xp is jnp else order[:, : max(1, count.max(initial=0))]), count


def visit(walk: Walk, i: Any, step: Callable[[Run, Any], Any], state: Any) -> Any:
    """Folds `step(run, state)` over what block i visits."""
    state = functools.reduce(lambda state, run: step(run, state), walk.of(i), state)
    for width, masked, order, count in walk.tiles:
        if not isinstance(count, np.ndarray) or count.any():
            size = width * walk.block
            body = functools.partial(_visit_one, step, jnp.asarray(order)[i], size, masked)
            state = repeat(0, jnp.asarray(count)[i], body, state)
    return state


def _visit_one(step: Any, order: Array, size: int, masked: bool, place: Any, state: Any) -> Any:
    return step(Run(order[place] * size, size, masked), state)


class Band(NamedTuple):
    """A walk in which each block of `rows` queries sees one run of `width` keys, at `starts[i]`."""

    rows: int
    width: int
    starts: np.ndarray


_BAND = 256 * 1280  # T × S of a piece of a band at most


def band(spec: Spec, T: int, S: int, tiling: Tiling) -> Band | None:
    """The band, if what the mask leaves is one and fills most of it.

    Then each block of queries is a short sequence: one fused kernel, no online softmax.
    """
    double = 2 * tiling.block_q <= 256 and T % (2 * tiling.block_q) == 0
    rows = tiling.block_q * (1 + double)
    found = kinds(spec, T, S, Tiling(rows, tiling.block_kv))
    if spec.score is not None or spec.dropout_rate or not isinstance(found, np.ndarray):
        return None
    visited = found != masks.EMPTY
    seen = visited.any(axis=1)
    first = np.where(seen, visited.argmax(axis=1), 0)
    last = np.where(seen, visited.shape[1] - visited[:, ::-1].argmax(axis=1), 0)
    tiles = int(max(1, (last - first).max()))
    width = tiles * tiling.block_kv
    if rows * width > _BAND or visited.sum() <= 0.75 * len(found) * tiles:
        return None
    starts = np.minimum(first, visited.shape[1] - tiles) * tiling.block_kv
    return Band(rows, width, starts.astype(np.int32))


def map_blocks(
    walk: Walk, n: int, block: Callable[[Any], Any], over_blocks: Callable[..., Any] = lax.map
) -> Any:
    """`block(i)` for all n blocks, stacked: one after another, or by `over_blocks`."""
    if walk.unrolled(n):
        parts = [block(np.int32(i)) for i in range(n)]
        return jax.tree.map(lambda *x: jnp.stack(x), *parts)
    return over_blocks(block, jnp.arange(n, dtype=jnp.int32))


def join(x: Array) -> Array:
    """`[n, t, ...]`, stacked blocks, as `[T, ...]`."""
    return x.reshape(-1, *x.shape[2:])


def fold_blocks(walk: Walk, n: int, block: Callable[[Any, Any], Any], total: Any) -> Any:
    """Folds `block(i, total)` over all n blocks of queries."""
    if walk.unrolled(n):
        return functools.reduce(lambda total, i: block(np.int32(i), total), range(n), total)
    return repeat(0, n, block, total)


def repeat(start: Any, stop: Any, body: Callable[[Any, Any], Any], state: Any) -> Any:
    """`lax.fori_loop` whose index is int32, also with 64-bit types enabled."""
    as_int32 = lambda i, state: body(lax.convert_element_type(i, jnp.int32), state)  # noqa: E731
    return lax.fori_loop(jnp.int32(start), jnp.int32(stop), as_int32, state)


def even(size: int, target: int) -> int:
    """The size of blocks near the target that split an axis evenly; a multiple of 8 if several."""
    blocks = -(-size // target)
    return size if blocks == 1 else -(-size // (8 * blocks)) * 8


def whole(T: int, S: int, tiling: Tiling) -> tuple[int, int]:
    """T and S as whole tiles."""
    block_q, block_kv = tiling
    return -(-T // block_q) * block_q, -(-S // block_kv) * block_kv


class Tile(NamedTuple):
    """One tile of one head: the spec cut to it, and where it is."""

    spec: Spec
    b: Any
    h: Any
    rows: Span
    columns: Span

    @classmethod
    def at(cls, spec: Spec, b: Any, h: Any, row: Any, rows: int, run: Run) -> "Tile":
        own = cut(spec, row, rows, run.start, run.size)
        span = _span(own.q_positions, row, rows)
        return cls(own, b, h, span, _span(own.kv_positions, run.start, run.size))

    def modify(self, products: Array, masked: bool) -> Array:
        """Scores from products of queries and keys."""
        return tile.modify(self.spec, products, self.b, self.h, self.rows, self.columns, masked)

    def modified(self, products: Array, masked: bool) -> tuple[Array, Any]:
        """Scores, and the function from their cotangent to those of products and parameters."""

        def modify(products: Array, params: Any) -> Array:
            here = self._replace(spec=with_parameters(self.spec, params))
            return here.modify(products, masked)

        return jax.vjp(modify, products, parameters(self.spec))

    def drop(self, weights: Array) -> Array:
        return tile.drop(self.spec, weights, self.b, self.h, self.rows, self.columns)


def _axes(letters: str, leaf: Any) -> list[tuple[int, str]]:
    """The axes of a picked array along T and S, unless they broadcast."""
    named = [x for x in letters.replace("#", "").split() if x not in ("*B", "N")]
    return [(a, x) for a, x in enumerate(named) if x in ("T", "S") and leaf.shape[a] > 1]


def cut(spec: Spec, row: Any, rows: int, column: Any, columns: int) -> Spec:
    """The picked spec with its arrays along T and S cut to a tile."""

    def one(letters: str, leaf: Any) -> Any:
        for axis, letter in _axes(letters, leaf):
            start, size = (row, rows) if letter == "T" else (column, columns)
            leaf = take(leaf, start, size, axis)
        return leaf

    return jax.tree.map(one, declared(spec), spec)


def cut_rows(spec: Spec, first: Any, rows: Size) -> Spec:
    """The spec with its arrays along B cut to some batch rows."""

    def one(letters: str, leaf: Any) -> Any:
        batched = "*B" in letters.replace("#", "").split() and leaf.shape[0] != 1
        return take(leaf, first, rows) if batched else leaf

    return jax.tree.map(one, declared(spec), spec)


def _span(positions: Any, start: Any, size: int) -> Span:
    places = start + jnp.arange(size, dtype=jnp.int32)
    return Span(places if positions is None else positions.astype(jnp.int32), places)


def pad_spec(spec: Spec, T: int, S: int, T_padded: int, S_padded: int) -> Spec:
    """The spec for sizes that are whole tiles; queries past T and keys past S are masked."""

    def one(letters: str, leaf: Any) -> Any:
        for letter, size in (("T", T_padded), ("S", S_padded)):
            axis = axis_along(letter, letters, leaf.ndim)
            if axis is not None and 1 < leaf.shape[axis] < size:
                widths = [(0, 0)] * leaf.ndim
                widths[axis] = (0, size - leaf.shape[axis])
                leaf = jnp.pad(leaf, widths, mode="edge")
        return leaf

    spec = jax.tree.map(one, declared(spec), spec)
    if T_padded > T or S_padded > S:
        exist = masks.Lengths(T if T_padded > T else None, S if S_padded > S else None)
        spec = dataclasses.replace(spec, mask=spec.mask & exist)
    return spec


class Call(NamedTuple):
    """A call in sizes that kernels take: whole tiles, wider heads, words for a random key.

    `rows` are the query, and backward also what goes with it, each `[B, T, N, ...]`.
    """

    spec: Spec
    shapes: Shapes
    rows: Any
    key: Array
    value: Array

    @classmethod
    def of(
        cls,
        tiling: Tiling,
        width: Callable[[int], int],
        spec: Spec,
        rows: tuple[Array, ...],
        key: Array,
        value: Array,
    ) -> "Call":
        """Pads a call; `width` gives what a head size becomes."""
        shapes = Shapes.of(rows[0], value)
        T, S = whole(shapes.T, shapes.S, tiling)

        def padded(x: Array, length: int) -> Array:
            wide = [(0, width(size) - size) for size in x.shape[3:]]
            return jnp.pad(x, ((0, 0), (0, length - x.shape[1]), (0, 0), *wide))

        if spec.dropout_rate:
            spec = dataclasses.replace(spec, dropout_key=tile.key_words(spec.dropout_key))
        return cls(
            pad_spec(spec, shapes.T, shapes.S, T, S),
            shapes._replace(T=T, S=S, H=width(shapes.H), V=width(shapes.V)),
            tuple(padded(x, T) for x in rows),
            padded(key, S),
            padded(value, S),
        )


def unpadded(x: Array, shape: Shape) -> Array:
    """x without what was padded behind."""
    return x[tuple(map(slice, shape))]


def unpadded_parameters(gradients: list[Array], spec: Spec) -> list[Array]:
    """Gradients of parameters, of which those of a padded array are longer than it."""
    return [unpadded(d, x.shape) for d, x in zip(gradients, parameters(spec), strict=True)]


def pad_to(x: Array, size: int) -> Array:
    return x if len(x) == size else jnp.pad(x, [(0, size - len(x))] + [(0, 0)] * (x.ndim - 1))


def take(x: Array, start: Any, size: Size, axis: int = 0) -> Array:
    """A run of `size` along an axis; the array itself if it is no longer than that."""
    if x.shape[axis] == size:
        return x
    return lax.dynamic_slice_in_dim(x, start, size, axis)


def put(x: Array, value: Array, start: Any, axis: int) -> Array:
    """x with `value` added to a run along an axis."""
    size = value.shape[axis]
    if x.shape[axis] == size:
        return x + value
    old = lax.dynamic_slice_in_dim(x, start, size, axis)
    return lax.dynamic_update_slice_in_dim(x, old + value, start, axis)


def put_leaves(
    totals: list[Array], parts: list[Array], letters: list[str], starts: dict[str, Any]
) -> list[Array]:
    """Gradients of parameters with a tile's parts of them added where they belong."""
    return [_put_leaf(*x, starts) for x in zip(totals, parts, letters, strict=True)]


def _put_leaf(total: Array, part: Array, letters: str, starts: dict[str, Any]) -> Array:
    start: list[Any] = [np.int32(0)] * total.ndim
    for axis, letter in _axes(letters, part):
        start[axis] = jnp.int32(starts[letter])
    if total.shape == part.shape:
        return total + part
    old = lax.dynamic_slice(total, start, part.shape)
    return lax.dynamic_update_slice(total, old + part, start)


def join_leaves(stacked: list[Array], leaves: list[Array], letters: list[str]) -> list[Array]:
    """Gradients of parameters from those of each block of queries, `[n, ...]`."""
    return [_join_leaf(*x) for x in zip(stacked, leaves, letters, strict=True)]


def _join_leaf(stacked: Array, leaf: Array, letters: str) -> Array:
    by_query = [axis for axis, letter in _axes(letters, leaf) if letter == "T"]
    if by_query:
        return jnp.moveaxis(stacked, 0, by_query[0]).reshape(leaf.shape)
    return stacked.sum(axis=0)


def put_params(
    totals: list[Array], parts: list[Array], letters: list[str], b: Any, h: Any
) -> list[Array]:
    """Gradients of parameters with one head's added at its batch row and head."""
    return [_put_param(*x, b, h) for x in zip(totals, parts, letters, strict=True)]


def _put_param(total: Array, part: Array, letters: str, b: Any, h: Any) -> Array:
    named = letters.replace("#", "").split()
    start = [np.int32(0)] * total.ndim
    for name, index in (("*B", b), ("N", h)):
        if name in named:
            axis = named.index(name)
            part = jnp.expand_dims(part, axis)
            start[axis] = index if total.shape[axis] != 1 else np.int32(0)
    old = lax.dynamic_slice(total, start, part.shape)
    return lax.dynamic_update_slice(total, old + part, start)
