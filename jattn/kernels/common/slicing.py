"""Slices of a call: a tile of a head, batch rows, padding to whole tiles; and sums of gradients.

The axis names of arrays of masks and score functions tell their axes B, N, T and S, so the arrays
are sliced without knowing which mask or score function they belong to. Padding adds the mask
`masks.Lengths`, which masks the padded queries and keys.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jattn import dropout, masks, tile
from jattn._pytree import axis_names, axis_of, split_letters
from jattn._types import Index, Shape, Size
from jattn.kernels.common.tile_schedule import TileRun
from jattn.masks import Span
from jattn.spec import Shapes, Spec, Tiling, parameters, with_parameters


def round_up(T: int, S: int, tiling: Tiling) -> tuple[int, int]:
    """Rounds T and S up to whole tiles."""
    block_q, block_kv = tiling
    return -(-T // block_q) * block_q, -(-S // block_kv) * block_kv


@runtime_checkable
class Scored(Protocol):
    """A maker of scores and weights from products: a tile of one head, or rows of several."""

    def modify(self, products: Array, masked: bool) -> Array:
        """Computes scores from products of queries and keys."""
        ...

    def drop_unscaled(self, weights: Array) -> Array:
        """Applies dropout to weights without scaling those that it keeps."""
        ...


class HeadTile(NamedTuple):
    """One tile of one head: the spec sliced to it, and its place."""

    spec: Spec
    b: Any
    h: Any
    rows: Span
    columns: Span

    @classmethod
    def at(cls, spec: Spec, b: Index, h: Index, row: Index, rows: int, run: TileRun) -> "HeadTile":
        tile_spec = slice_tile(spec, row, rows, run.start, run.size)
        span = _span(tile_spec.q_positions, row, rows)
        return cls(tile_spec, b, h, span, _span(tile_spec.kv_positions, run.start, run.size))

    @classmethod
    def whole(cls, spec: Spec, b: Index, h: Index, T: Size, S: Size) -> "HeadTile":
        """Returns a whole head as one tile."""
        return cls(spec, b, h, *tile.spans(spec, T, S))

    def modify(self, products: Array, masked: bool, select: bool = True) -> Array:
        """Computes scores from products of queries and keys, see `tile.modify`."""
        return tile.modify(
            self.spec, products, self.b, self.h, self.rows, self.columns, masked, select
        )

    def modified(self, products: Array, masked: bool, select: bool = True) -> tuple[Array, Any]:
        """Returns scores, and the map of their cotangent to those of products and parameters."""

        def modify(products: Array, params: list[Array]) -> Array:
            changed = self._replace(spec=with_parameters(self.spec, params))
            return changed.modify(products, masked, select)

        return jax.vjp(modify, products, parameters(self.spec))

    def drop(self, weights: Array) -> Array:
        return dropout.drop(self.spec, weights, self.b, self.h, self.rows, self.columns)

    def drop_unscaled(self, weights: Array) -> Array:
        """Applies dropout by `dropout.Hashes` to weights without scaling those that it keeps."""
        if self.spec.dropout_rate == 0:
            return weights
        return jnp.where(self.keeps(), weights, self.spec.dropout_key.dropped)

    def keeps(self) -> Array:
        """Returns which weights dropout keeps."""
        return dropout.keeps(self.spec, self.b, self.h, self.rows, self.columns)


def _axes(letters: str, leaf: Array) -> list[tuple[int, str]]:
    """Returns the axes along T and S of an array of one head, except those that broadcast."""
    named = [x for x in split_letters(letters) if x not in ("*B", "N")]
    return [(a, x) for a, x in enumerate(named) if x in ("T", "S") and leaf.shape[a] > 1]


def slice_tile(spec: Spec, row: Index, rows: int, column: Index, columns: int) -> Spec:
    """Returns the spec of one head with its arrays along T and S sliced to a tile."""

    def sliced(letters: str, leaf: Any) -> Array:
        for axis, letter in _axes(letters, leaf):
            start, size = (row, rows) if letter == "T" else (column, columns)
            leaf = take(leaf, start, size, axis)
        return leaf

    return jax.tree.map(sliced, axis_names(spec), spec)


def slice_batch(spec: Spec, first: Array, rows: Size) -> Spec:
    """Returns the spec with its arrays along B sliced to some batch rows."""

    def sliced(letters: str, leaf: Any) -> Array:
        batched = "*B" in split_letters(letters) and leaf.shape[0] != 1
        return take(leaf, first, rows) if batched else leaf

    return jax.tree.map(sliced, axis_names(spec), spec)


def _span(positions: Array | None, start: Index, size: int) -> Span:
    places = start + jnp.arange(size, dtype=jnp.int32)
    return Span(places if positions is None else positions.astype(jnp.int32), places)


def span_in_kernel(positions: Array | None, places: Array) -> Span:
    """Returns the span of a tile at these places. If T or S is 1, there is one position.

    Positions and places are never the same object, which would mark positions as consecutive: that
    allows slicing by diagonals, which is for whole matrices.
    """
    if positions is None:
        return Span(places + 0, places)
    return Span(jnp.broadcast_to(positions.astype(jnp.int32), places.shape), places)


def pad_arrays(spec: Spec, T: int, S: int) -> Spec:
    """Pads the spec's arrays along T and S to these lengths by repeating the last entry."""

    def padded(letters: str, leaf: Any) -> Array:
        for letter, size in (("T", T), ("S", S)):
            axis = axis_of(letter, letters, leaf.ndim)
            if axis is not None and 1 < leaf.shape[axis] < size:
                widths = [(0, 0)] * leaf.ndim
                widths[axis] = (0, size - leaf.shape[axis])
                leaf = jnp.pad(leaf, widths, mode="edge")
        return leaf

    return jax.tree.map(padded, axis_names(spec), spec)


def pad_spec(spec: Spec, T: int, S: int, T_padded: int, S_padded: int) -> Spec:
    """Pads the spec to sizes that are whole tiles; queries past T and keys past S are masked."""
    spec = pad_arrays(spec, T_padded, S_padded)
    if T_padded > T or S_padded > S:
        exist = masks.Lengths(T if T_padded > T else None, S if S_padded > S else None)
        spec = dataclasses.replace(spec, mask=spec.mask & exist)
    return spec


class PaddedCall(NamedTuple):
    """A call in the sizes of a kernel: whole tiles, wider heads, words for a random key.

    `rows` are the query and, backward, the other arrays along queries, each `[B, T, N, ...]`.
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
    ) -> "PaddedCall":
        """Pads a call; `width` maps a head size to its padded size."""
        shapes = Shapes.of(rows[0], value)
        T, S = round_up(shapes.T, shapes.S, tiling)

        def padded(x: Array, length: int) -> Array:
            wide = [(0, width(size) - size) for size in x.shape[3:]]
            return jnp.pad(x, ((0, 0), (0, length - x.shape[1]), (0, 0), *wide))

        if spec.dropout_rate:
            spec = dataclasses.replace(spec, dropout_key=dropout.key_words(spec.dropout_key))
        return cls(
            pad_spec(spec, shapes.T, shapes.S, T, S),
            shapes._replace(T=T, S=S, H=width(shapes.H), V=width(shapes.V)),
            tuple(padded(x, T) for x in rows),
            padded(key, S),
            padded(value, S),
        )


def unpadded(x: Array, shape: Shape) -> Array:
    """Removes the padding at the end of each axis of x."""
    return x[tuple(map(slice, shape))]


def unpadded_parameters(gradients: list[Array], spec: Spec) -> list[Array]:
    """Removes the padding from gradients of parameters, which may be padded along T and S."""
    return [unpadded(d, x.shape) for d, x in zip(gradients, parameters(spec), strict=True)]


def pad_to(x: Array, size: int) -> Array:
    return x if len(x) == size else jnp.pad(x, [(0, size - len(x))] + [(0, 0)] * (x.ndim - 1))


def take(x: Array, start: Index, size: Size, axis: int = 0) -> Array:
    """Slices a run of `size` along an axis; returns the array itself if it has that size."""
    if x.shape[axis] == size:
        return x
    return lax.dynamic_slice_in_dim(x, start, size, axis)


def add_at(x: Array, value: Array, start: Index, axis: int) -> Array:
    """Adds `value` to a run of x along an axis."""
    starts: list[Any] = [0] * x.ndim
    starts[axis] = start
    return add_block(x, value, starts)


def add_block(x: Array, value: Array, starts: list[Any]) -> Array:
    """Adds `value`, which has as many axes as x, to the block of x that begins at `starts`."""
    if x.shape == value.shape:
        return x + value
    starts = [jnp.int32(start) for start in starts]
    old = lax.dynamic_slice(x, starts, value.shape)
    return lax.dynamic_update_slice(x, old + value, starts)


def add_leaves(
    totals: list[Array], parts: list[Array], letters: list[str], starts: dict[str, Any]
) -> list[Array]:
    """Adds a tile's gradients of parameters to the totals, at the tile's place."""

    def add(total: Array, part: Array, letters: str) -> Array:
        start: list[Any] = [0] * total.ndim
        for axis, letter in _axes(letters, part):
            start[axis] = starts[letter]
        return add_block(total, part, start)

    return list(map(add, totals, parts, letters))


def join_leaves(stacked: list[Array], leaves: list[Array], letters: list[str]) -> list[Array]:
    """Returns gradients of parameters from those of each block of queries, `[n, ...]`."""

    def join(stacked: Array, leaf: Array, letters: str) -> Array:
        by_query = [axis for axis, letter in _axes(letters, leaf) if letter == "T"]
        if by_query:
            return jnp.moveaxis(stacked, 0, by_query[0]).reshape(leaf.shape)
        return stacked.sum(axis=0)

    return list(map(join, stacked, leaves, letters))


def add_params(
    totals: list[Array], parts: list[Array], letters: list[str], b: Array, h: Array
) -> list[Array]:
    """Adds one head's gradients of parameters to the totals, at its batch row and head."""

    def add(total: Array, part: Array, letters: str) -> Array:
        named, start = split_letters(letters), list[Any]([0] * total.ndim)
        for name, index in (("*B", b), ("N", h)):
            if name in named:
                axis = named.index(name)
                part = jnp.expand_dims(part, axis)
                start[axis] = index if total.shape[axis] != 1 else 0
        return add_block(total, part, start)

    return list(map(add, totals, parts, letters))
