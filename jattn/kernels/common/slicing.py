"""Slices of a call: a tile of a head, batch rows, padding to whole tiles; and gradients added up.

Arrays of masks and score functions say by their axis names where they lie along B, N, T and S. So
they are cut without knowing which mask or score function they belong to. Padding adds a mask of its
own: `masks.Lengths`, which leaves out the padded queries and keys.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jattn import dropout, masks, tile
from jattn._pytree import axis_names, axis_of
from jattn._types import Index, Shape, Size
from jattn.kernels.common.tile_schedule import Run
from jattn.masks import Span
from jattn.spec import Shapes, Spec, Tiling, parameters, with_parameters


def round_up(T: int, S: int, tiling: Tiling) -> tuple[int, int]:
    """T and S as whole tiles."""
    block_q, block_kv = tiling
    return -(-T // block_q) * block_q, -(-S // block_kv) * block_kv


@runtime_checkable
class Scored(Protocol):
    """What makes scores and weights of products: a tile of one head, or of rows of several."""

    def modify(self, products: Array, masked: bool) -> Array:
        """Scores from products of queries and keys."""
        ...

    def drop_unscaled(self, weights: Array) -> Array:
        """Dropout on weights; those that it keeps stay as they are."""
        ...


class Tile(NamedTuple):
    """One tile of one head: the spec cut to it, and where it is."""

    spec: Spec
    b: Any
    h: Any
    rows: Span
    columns: Span

    @classmethod
    def at(cls, spec: Spec, b: Index, h: Index, row: Index, rows: int, run: Run) -> "Tile":
        own = slice_tile(spec, row, rows, run.start, run.size)
        span = _span(own.q_positions, row, rows)
        return cls(own, b, h, span, _span(own.kv_positions, run.start, run.size))

    def modify(self, products: Array, masked: bool) -> Array:
        """Scores from products of queries and keys."""
        return tile.modify(self.spec, products, self.b, self.h, self.rows, self.columns, masked)

    def modified(self, products: Array, masked: bool) -> tuple[Array, Any]:
        """Scores, and the function from their cotangent to those of products and parameters."""

        def modify(products: Array, params: list[Array]) -> Array:
            here = self._replace(spec=with_parameters(self.spec, params))
            return here.modify(products, masked)

        return jax.vjp(modify, products, parameters(self.spec))

    def drop(self, weights: Array) -> Array:
        return dropout.drop(self.spec, weights, self.b, self.h, self.rows, self.columns)

    def drop_unscaled(self, weights: Array) -> Array:
        """Dropout by `dropout.Hashes` on weights; those that it keeps stay as they are."""
        if self.spec.dropout_rate == 0:
            return weights
        return jnp.where(self.keeps(), weights, self.spec.dropout_key.dropped)

    def keeps(self) -> Array:
        """Which weights dropout keeps."""
        return dropout.keeps(self.spec, self.b, self.h, self.rows, self.columns)


def _axes(letters: str, leaf: Array) -> list[tuple[int, str]]:
    """The axes of an array of one head along T and S, unless they broadcast."""
    named = [x for x in letters.replace("#", "").split() if x not in ("*B", "N")]
    return [(a, x) for a, x in enumerate(named) if x in ("T", "S") and leaf.shape[a] > 1]


def slice_tile(spec: Spec, row: Index, rows: int, column: Index, columns: int) -> Spec:
    """The spec of one head with its arrays along T and S cut to a tile."""

    def one(letters: str, leaf: Any) -> Array:
        for axis, letter in _axes(letters, leaf):
            start, size = (row, rows) if letter == "T" else (column, columns)
            leaf = take(leaf, start, size, axis)
        return leaf

    return jax.tree.map(one, axis_names(spec), spec)


def slice_batch(spec: Spec, first: Array, rows: Size) -> Spec:
    """The spec with its arrays along B cut to some batch rows."""

    def one(letters: str, leaf: Any) -> Array:
        batched = "*B" in letters.replace("#", "").split() and leaf.shape[0] != 1
        return take(leaf, first, rows) if batched else leaf

    return jax.tree.map(one, axis_names(spec), spec)


def _span(positions: Array | None, start: Index, size: int) -> Span:
    places = start + jnp.arange(size, dtype=jnp.int32)
    return Span(places if positions is None else positions.astype(jnp.int32), places)


def span_in_kernel(positions: Array | None, places: Array) -> Span:
    """Of a tile whose places are given. Positions are one where T or S is 1.

    Never one object for both: positions that are known to be consecutive invite slicing by
    diagonals, which is for whole matrices."""
    if positions is None:
        return Span(places + 0, places)
    return Span(jnp.broadcast_to(positions.astype(jnp.int32), places.shape), places)


def pad_arrays(spec: Spec, T: int, S: int) -> Spec:
    """The spec with its arrays along T and S as long as that; the last entry is repeated."""

    def one(letters: str, leaf: Any) -> Array:
        for letter, size in (("T", T), ("S", S)):
            axis = axis_of(letter, letters, leaf.ndim)
            if axis is not None and 1 < leaf.shape[axis] < size:
                widths = [(0, 0)] * leaf.ndim
                widths[axis] = (0, size - leaf.shape[axis])
                leaf = jnp.pad(leaf, widths, mode="edge")
        return leaf

    return jax.tree.map(one, axis_names(spec), spec)


def pad_spec(spec: Spec, T: int, S: int, T_padded: int, S_padded: int) -> Spec:
    """The spec for sizes that are whole tiles; queries past T and keys past S are masked."""
    spec = pad_arrays(spec, T_padded, S_padded)
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
    """x without what was padded behind."""
    return x[tuple(map(slice, shape))]


def unpadded_parameters(gradients: list[Array], spec: Spec) -> list[Array]:
    """Gradients of parameters, of which those of a padded array are longer than it."""
    return [unpadded(d, x.shape) for d, x in zip(gradients, parameters(spec), strict=True)]


def pad_to(x: Array, size: int) -> Array:
    return x if len(x) == size else jnp.pad(x, [(0, size - len(x))] + [(0, 0)] * (x.ndim - 1))


def take(x: Array, start: Index, size: Size, axis: int = 0) -> Array:
    """A run of `size` along an axis; the array itself if it is no longer than that."""
    if x.shape[axis] == size:
        return x
    return lax.dynamic_slice_in_dim(x, start, size, axis)


def add_at(x: Array, value: Array, start: Index, axis: int) -> Array:
    """x with `value` added to a run along an axis."""
    starts: list[Any] = [0] * x.ndim
    starts[axis] = start
    return add_block(x, value, starts)


def add_block(x: Array, value: Array, starts: list[Any]) -> Array:
    """x with `value`, which has as many axes, added from these places on."""
    if x.shape == value.shape:
        return x + value
    starts = [jnp.int32(start) for start in starts]
    old = lax.dynamic_slice(x, starts, value.shape)
    return lax.dynamic_update_slice(x, old + value, starts)


def add_leaves(
    totals: list[Array], parts: list[Array], letters: list[str], starts: dict[str, Any]
) -> list[Array]:
    """Gradients of parameters with a tile's parts of them added where they belong."""
    return [_add_leaf(*x, starts) for x in zip(totals, parts, letters, strict=True)]


def _add_leaf(total: Array, part: Array, letters: str, starts: dict[str, Any]) -> Array:
    start: list[Any] = [0] * total.ndim
    for axis, letter in _axes(letters, part):
        start[axis] = starts[letter]
    return add_block(total, part, start)


def join_leaves(stacked: list[Array], leaves: list[Array], letters: list[str]) -> list[Array]:
    """Gradients of parameters from those of each block of queries, `[n, ...]`."""
    return [_join_leaf(*x) for x in zip(stacked, leaves, letters, strict=True)]


def _join_leaf(stacked: Array, leaf: Array, letters: str) -> Array:
    by_query = [axis for axis, letter in _axes(letters, leaf) if letter == "T"]
    if by_query:
        return jnp.moveaxis(stacked, 0, by_query[0]).reshape(leaf.shape)
    return stacked.sum(axis=0)


def add_params(
    totals: list[Array], parts: list[Array], letters: list[str], b: Array, h: Array
) -> list[Array]:
    """Gradients of parameters with one head's added at its batch row and head."""
    return [_add_param(*x, b, h) for x in zip(totals, parts, letters, strict=True)]


def _add_param(total: Array, part: Array, letters: str, b: Array, h: Array) -> Array:
    named = letters.replace("#", "").split()
    start: list[Any] = [0] * total.ndim
    for name, index in (("*B", b), ("N", h)):
        if name in named:
            axis = named.index(name)
            part = jnp.expand_dims(part, axis)
            start[axis] = index if total.shape[axis] != 1 else 0
    return add_block(total, part, start)
