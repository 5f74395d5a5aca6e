"""Slicing a call to tiles or batch rows, padding it to whole tiles, and summing its gradients.

Masks and score functions name the axes B, N, T and S of their arrays. So their arrays are sliced
without knowing which mask or score function they belong to. Padding adds the mask `masks.Lengths`,
which excludes padded queries and keys.
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
    """Returns T and S, rounded up to multiples of the tiling."""
    block_q, block_kv = tiling
    return -(-T // block_q) * block_q, -(-S // block_kv) * block_kv


@runtime_checkable
class Scored(Protocol):
    """A tile that computes scores and weights from products, of one head or of several."""

    def modify(self, products: Array, masked: bool) -> Array:
        """Computes scores from products of queries and keys."""
        ...

    def drop_unscaled(self, weights: Array) -> Array:
        """Applies dropout to weights, but does not scale the weights that it keeps."""
        ...


class HeadTile(NamedTuple):
    """A tile of head (b, h): the spec, sliced to the tile, and the spans of its queries (`rows`)
    and of its keys (`columns`)."""

    spec: Spec
    b: Any
    h: Any
    rows: Span
    columns: Span

    @classmethod
    def at(cls, spec: Spec, b: Index, h: Index, row: Index, rows: int, run: TileRun) -> "HeadTile":
        """Returns the tile of `rows` queries, from query `row` on, and of the keys of `run`."""
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
        """Returns scores, and a function from their cotangent to the cotangents of products and
        parameters."""

        def modify(products: Array, params: list[Array]) -> Array:
            changed = self._replace(spec=with_parameters(self.spec, params))
            return changed.modify(products, masked, select)

        return jax.vjp(modify, products, parameters(self.spec))

    def drop(self, weights: Array) -> Array:
        """Applies dropout to weights."""
        return dropout.drop(self.spec, weights, self.b, self.h, self.rows, self.columns)

    def drop_unscaled(self, weights: Array) -> Array:
        """Applies dropout by `dropout.Hashes`, but does not scale the weights that it keeps."""
        if self.spec.dropout_rate == 0:
            return weights
        return jnp.where(self.keeps(), weights, self.spec.dropout_key.dropped)

    def keeps(self) -> Array:
        """Returns which weights `[t, s]` dropout keeps, as booleans."""
        return dropout.keeps(self.spec, self.b, self.h, self.rows, self.columns)


def token_axes(letters: str, leaf: Array) -> list[tuple[int, str]]:
    """Returns the axes along T and S of an array of one head, with their names; axes of size 1,
    which broadcast, are omitted."""
    by_head = [x for x in split_letters(letters) if x not in ("*B", "N")]
    return [(axis, x) for axis, x in enumerate(by_head) if x in ("T", "S") and leaf.shape[axis] > 1]


def slice_tile(spec: Spec, row: Index, rows: int, column: Index, columns: int) -> Spec:
    """Slices the arrays of the spec of one head to `rows` queries, from query `row` on, and
    `columns` keys, from key `column` on."""

    def sliced(letters: str, leaf: Any) -> Array:
        for axis, letter in token_axes(letters, leaf):
            start, size = (row, rows) if letter == "T" else (column, columns)
            leaf = take(leaf, start, size, axis)
        return leaf

    return jax.tree.map(sliced, axis_names(spec), spec)


def slice_batch(spec: Spec, first: Array, rows: Size) -> Spec:
    """Slices the arrays of a spec along B to `rows` batch rows, from batch row `first` on."""

    def sliced(letters: str, leaf: Any) -> Array:
        batched = "*B" in split_letters(letters) and leaf.shape[0] != 1
        return take(leaf, first, rows) if batched else leaf

    return jax.tree.map(sliced, axis_names(spec), spec)


def _span(positions: Array | None, start: Index, size: int) -> Span:
    """Returns the span of `size` places from `start` on; `positions` are sliced to it already."""
    places = start + jnp.arange(size, dtype=jnp.int32)
    return Span(places if positions is None else positions.astype(jnp.int32), places)


def span_in_kernel(positions: Array | None, places: Array) -> Span:
    """Returns the span of a tile at `places`, the indices of its queries or keys.

    `positions` has one entry for each place, or a single one. Without them, positions equal places
    but must be another object: a span of twice the same object allows masks and score functions to
    slice their arrays by diagonals, which a kernel cannot.
    """
    if positions is None:
        return Span(places + 0, places)
    return Span(jnp.broadcast_to(positions.astype(jnp.int32), places.shape), places)


def pad_arrays(spec: Spec, T: int, S: int) -> Spec:
    """Pads the spec's arrays along T and S to lengths T and S by repeating the last entry."""

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
    """Pads the spec to `T_padded` queries and `S_padded` keys, and masks those beyond T and S."""
    spec = pad_arrays(spec, T_padded, S_padded)
    if T_padded > T or S_padded > S:
        lengths = masks.Lengths(T if T_padded > T else None, S if S_padded > S else None)
        spec = dataclasses.replace(spec, mask=spec.mask & lengths)
    return spec


class PaddedCall(NamedTuple):
    """A call, padded to the sizes of a kernel: T and S to whole tiles, H and V to its head sizes.

    The dropout key of `spec` is its words, as integers. `rows` are the query and, in the backward
    pass, the other arrays along queries, each `[B, T, N, ...]`.
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
            channels = [(0, width(size) - size) for size in x.shape[3:]]
            return jnp.pad(x, ((0, 0), (0, length - x.shape[1]), (0, 0), *channels))

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
    """Returns the first entries of x along each axis, in the given shape: x without padding."""
    return x[tuple(map(slice, shape))]


def unpadded_parameters(gradients: list[Array], spec: Spec) -> list[Array]:
    """Returns the gradients of parameters without their padding along T and S."""
    return [unpadded(d, x.shape) for d, x in zip(gradients, parameters(spec), strict=True)]


def pad_to(x: Array, size: int) -> Array:
    """Pads x with zeros along its first axis to `size`."""
    return x if len(x) == size else jnp.pad(x, [(0, size - len(x))] + [(0, 0)] * (x.ndim - 1))


def take(x: Array, start: Index, size: Size, axis: int = 0) -> Array:
    """Returns `size` entries of x along an axis, from `start` on; x itself if it has that size."""
    if x.shape[axis] == size:
        return x
    return lax.dynamic_slice_in_dim(x, start, size, axis)


def add_at(x: Array, value: Array, start: Index, axis: int) -> Array:
    """Adds `value` to the entries of x along an axis, from `start` on."""
    starts: list[Any] = [0] * x.ndim
    starts[axis] = start
    return add_block(x, value, starts)


def add_block(x: Array, value: Array, starts: list[Any]) -> Array:
    """Adds `value`, which has as many axes as x, to the block of x that starts at `starts`."""
    if x.shape == value.shape:
        return x + value
    starts = [jnp.int32(start) for start in starts]
    old = lax.dynamic_slice(x, starts, value.shape)
    return lax.dynamic_update_slice(x, old + value, starts)


def add_leaves(
    totals: list[Array], gradients: list[Array], letters: list[str], starts: dict[str, Any]
) -> list[Array]:
    """Adds a tile's gradients of parameters to the totals of a head.

    `starts` are the tile's first query and first key, `{"T": ..., "S": ...}`.
    """

    def add(total: Array, gradient: Array, letters: str) -> Array:
        start: list[Any] = [0] * total.ndim
        for axis, letter in token_axes(letters, gradient):
            start[axis] = starts[letter]
        return add_block(total, gradient, start)

    return list(map(add, totals, gradients, letters))


def join_leaves(stacked: list[Array], leaves: list[Array], letters: list[str]) -> list[Array]:
    """Returns gradients of parameters from the stacked gradients `[n, ...]` of n blocks of queries.

    Blocks are joined along T in parameters that run along T, and summed in all others.
    """

    def join(stacked: Array, leaf: Array, letters: str) -> Array:
        by_query = [axis for axis, letter in token_axes(letters, leaf) if letter == "T"]
        if by_query:
            return jnp.moveaxis(stacked, 0, by_query[0]).reshape(leaf.shape)
        return stacked.sum(axis=0)

    return list(map(join, stacked, leaves, letters))


def add_params(
    totals: list[Array], gradients: list[Array], letters: list[str], b: Index, h: Index
) -> list[Array]:
    """Adds the gradients of parameters of head (b, h) to the totals of all heads."""

    def add(total: Array, gradient: Array, letters: str) -> Array:
        axis_letters, start = split_letters(letters), list[Any]([0] * total.ndim)
        for letter, index in (("*B", b), ("N", h)):
            if letter in axis_letters:
                axis = axis_letters.index(letter)
                gradient = jnp.expand_dims(gradient, axis)
                start[axis] = index if total.shape[axis] != 1 else 0
        return add_block(total, gradient, start)

    return list(map(add, totals, gradients, letters))
