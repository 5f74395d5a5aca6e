"""A spec's arrays inside of a kernel: what a tile needs is read, what is captured is indexed.

Masks and score functions do not know where they run. In a kernel their arrays are references to
memory: those declared along B, N, T or S are read for one head and cut to the tile; what a
function takes whole stays in memory, behind an object that reads the entries that are asked for.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.extend.core import jaxprs_in_params
from jaxtyping import Array

from jattn._pytree import axis_names, select_head
from jattn._types import Index
from jattn.kernels.common import slicing, tile_schedule
from jattn.spec import Shapes, Spec, Tiling


_MAX_HEAD_SIZE = 256


def too_wide(shapes: Shapes) -> str | None:
    """Why registers do not hold such heads, or None."""
    width = max(shapes.H, shapes.V)
    expected = f"expected head sizes up to {_MAX_HEAD_SIZE}"
    return f"{expected}, got {width}" if width > _MAX_HEAD_SIZE else None


class GatherRef:
    """An array in memory, as functions in a kernel see it: `array[i, j]` reads these entries.

    One integer or array of integers for each axis; from the end if negative, clamped if outside,
    as for any array. `selected` gives the index of each axis that is already selected, else None.
    """

    def __init__(
        self, memory: Any, selected: tuple[Any, ...], wrap: Callable[..., Any] | None = None
    ):
        self.memory, self.selected = memory, selected
        self.wrap = wrap or (lambda entry, place: entry)
        left = [size for size, x in zip(memory.shape, selected, strict=True) if x is None]
        self.shape, self.dtype, self.ndim = tuple(left), memory.dtype, len(left)
        self.size = math.prod(left)

    def __getitem__(self, index: Any) -> Array:
        index = index if isinstance(index, tuple) else (index,)
        if len(index) != self.ndim or not all(map(_is_index, index)):
            raise TypeError(f"an integer for each of {self.ndim} axes")
        return self.inside(*[_inside(x, size) for x, size in zip(index, self.shape, strict=True)])

    def inside(self, *index: Index) -> Array:
        """The entries at integers of int32 that are known to be places of the array."""
        inside = list(jnp.broadcast_arrays(*index))
        places = iter(inside)
        entry = self.memory[tuple(next(places) if x is None else x for x in self.selected)]
        flat = jnp.zeros((), jnp.int32)
        for x, size in zip(inside, self.shape, strict=True):
            flat = flat * np.int32(size) + x
        return self.wrap(entry, flat)

    def astype(self, dtype: Any) -> "GatherRef":
        """The same with entries of another dtype."""
        converted = self.wrapped(lambda entry, place: entry.astype(dtype))
        converted.dtype = jnp.dtype(dtype)
        return converted

    def wrapped(self, wrap: Callable[..., Any]) -> "GatherRef":
        """The same with `wrap(entry, place)` of each entry; places count row-major."""
        inner = self.wrap
        return GatherRef(self.memory, self.selected, lambda entry, x: wrap(inner(entry, x), x))


def _is_index(x: Any) -> bool:
    return not isinstance(x, bool) and jnp.issubdtype(jnp.result_type(x), jnp.integer)


def _inside(x: Any, size: int) -> Array:
    x = jnp.asarray(x).astype(jnp.int32)
    return jnp.clip(jnp.where(x < 0, x + size, x), 0, size - 1)


class TileIndex(NamedTuple):
    """Where a tile is: batch row, head, first query and first key."""

    b: Any
    h: Any
    row: Any
    column: Any


class SpecRefs:
    """A spec as a kernel takes it: `arrays` to pass, and the parts of them that a tile reads."""

    def __init__(self, spec: Spec, tiling: Tiling):
        leaves, self.treedef = jax.tree.flatten(spec)
        self.letters = [x.replace("#", "").split() for x in jax.tree.leaves(axis_names(spec))]
        self.scalar = [x.ndim == 0 for x in leaves]
        self.arrays = [x.reshape(1) if x.ndim == 0 else x for x in leaves]
        self.sizes = dict(zip("TS", tiling, strict=True))

    def parts(self, memory: list[Any], place: TileIndex) -> list[tuple[Any, tuple[Any, ...]]]:
        """Each array and the index of its part at a place: None for axes that are looked up."""
        pairs = zip(memory, self.letters, self.scalar, strict=True)
        return [(x, (0,) if scalar else self._index(x, y, place)) for x, y, scalar in pairs]

    def _index(self, memory: Any, names: list[str], place: TileIndex) -> tuple[Any, ...]:
        names = names or ["captured"] * len(memory.shape)
        starts = {"*B": place.b, "N": place.h, "T": place.row, "S": place.column}
        index: list[Any] = []
        for name, size in zip(names, memory.shape, strict=True):
            start = starts.get(name)
            if start is not None and size == 1:
                start = 0
            if start is not None and name in self.sizes:
                start = pl.ds(start, min(size, self.sizes[name]))
            index.append(start)
        return tuple(index)

    def assembled(
        self, leaves: list[Any], b: Any, h: Any, rows: Any, columns: Any
    ) -> slicing.HeadTile:
        """The tile of these parts of the arrays, at these places."""
        spec = jax.tree.unflatten(self.treedef, leaves)
        pairs = (spec.q_positions, rows), (spec.kv_positions, columns)
        spans = (slicing.span_in_kernel(*x) for x in pairs)
        return slicing.HeadTile(spec, b, h, *spans)


ONLY_INDEXED = "a function in a kernel can only index its operands, and captures no array: {}"


def raise_if_wrong_everywhere(
    structure: Any, leaves: list[Any], shapes: Shapes, tiling: Tiling
) -> None:
    """Raises what a spec raises outside of kernels too; `leaves` are shapes and dtypes."""

    def outside(leaves: Any, products: Array) -> Array:
        spec = select_head(padded(structure, leaves, shapes, tiling), 0, 0)
        run = tile_schedule.TileRun(0, tiling.block_kv, True)
        return slicing.HeadTile.at(spec, 0, 0, 0, tiling.block_q, run).modify(products, True)

    jax.eval_shape(outside, leaves, _products(tiling))


def _products(tiling: Tiling) -> Any:
    return jax.ShapeDtypeStruct(tiling, jnp.float32)


def padded(structure: Any, leaves: Any, shapes: Shapes, tiling: Tiling) -> Spec:
    """The spec of these leaves, for whole tiles."""
    spec, (T, S) = jax.tree.unflatten(structure, leaves), (shapes.T, shapes.S)
    return slicing.pad_spec(spec, T, S, *slicing.round_up(T, S, tiling))


def primitives(jaxpr: Any) -> set[str]:
    """The names of all primitives in a traced function and in those that it calls."""
    found = {equation.primitive.name for equation in jaxpr.eqns}
    inner = [x for equation in jaxpr.eqns for x in jaxprs_in_params(equation.params)]
    return found.union(*map(primitives, inner))
