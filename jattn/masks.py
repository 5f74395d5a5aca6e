"""Masks: which query attends to which key, as an algebra.

A mask is a frozen pytree. Leaves combine with `&`, `|` and `~`. Every mask has exactly two
operations, from which the dense form, the tile map and the pictures are derived:

* `mask(b, h, rows, columns) -> bool [t, s]` evaluates the mask for a block of queries and keys:
  True where a query may attend;
* `mask.bounds(tile) -> (maybe_any, surely_all)` states what is certain about a whole tile, by
  interval arithmetic in the leaves and three-valued logic in the nodes. Bounds may be loose, never
  wrong.

There are two coordinates, equal by default. *Positions* are what formulas see (Causal, Window,
Prefix, Dilated, Global, Predicate). *Places* index the arrays (Segments, Lengths, Dense, Blocks).
"""

import contextlib
import functools
import inspect
import itertools
import math
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jattn._named_axes import without_named_axes
from jattn._pytree import (
    HoldsTree,
    array_field,
    axis_names,
    axis_of,
    flatten_batch,
    held_by_module,
    leading,
    letters_by_head,
    number,
    pytree_dataclass,
    select_head,
    static_field,
    take_tile,
)
from jattn._types import Allowed, AnyArray, Indices, Positions, Shape, Size
from jattn.checks import (
    check_array,
    check_function,
    check_operands,
    check_returned,
    check_rule,
    check_size,
    check_sizes,
    explained,
    function_name,
    shown,
)
from jattn.functions import dependence, integers, intervals, undecided
from jattn.functions.integers import is_below, is_integer, is_known
from jattn.functions.interval_rules import Interval
from jattn.functions.nodes import Expression
from jattn.functions.programs import TracedFunction, program_of, unseen
from jattn.functions.read import read
from jattn.functions.snapshots import frozen, is_frozen


__all__ = [
    "EMPTY",
    "FULL",
    "MIXED",
    "And",
    "Blocks",
    "Causal",
    "Dense",
    "Dilated",
    "Empty",
    "Extent",
    "Full",
    "Global",
    "Lengths",
    "Mask",
    "Not",
    "Or",
    "Padding",
    "Predicate",
    "Prefix",
    "Segments",
    "Span",
    "Tile",
    "Window",
    "as_mask",
    "check_bounds",
    "tile_map",
]


def __dir__() -> list[str]:
    return __all__


Truth = Any  # bool [n_rows, n_columns]; a NumPy array if its inputs are known while tracing


class Span(NamedTuple):
    """A run of queries or keys: their positions, and their places in the arrays.

    >>> last = masks.Span(positions=jnp.array([4]), places=jnp.array([0]))
    >>> print(masks.Causal()(0, 0, last, jnp.arange(6)).astype(int))
    [[1 1 1 1 1 0]]
    """

    positions: Indices
    places: Indices

    @property
    def consecutive(self) -> bool:
        """Whether the positions are known to be consecutive; if False, they may still be."""
        return self.positions is self.places


class Extent(NamedTuple):
    """The run of queries or keys that a tile covers; with array fields, the runs of several tiles.

    Positions lie in `lo..hi`, both inclusive; places are `start..start + size - 1`.

    >>> queries, keys = masks.Extent(0, 1, start=0, size=2), masks.Extent(2, 3, start=2, size=2)
    >>> [bool(x) for x in masks.Causal().bounds(masks.Tile(queries, keys))]
    [False, False]
    """

    lo: Any
    hi: Any
    start: Any
    size: int


class _Box(NamedTuple):
    rows: Extent
    columns: Extent


class Tile(_Box):
    """A box of queries × keys, `(rows, columns)`, or n × m of them at once.

    For n × m boxes the extents of rows are `[n, 1]` and those of columns `[1, m]`, so that formulas
    of both broadcast to `[n, m]`. `b` and `h` are the batch row and the head; None means any.

    >>> last, first = masks.Extent(2, 3, start=2, size=2), masks.Extent(0, 1, start=0, size=2)
    >>> [bool(x) for x in masks.Causal().bounds(masks.Tile(rows=last, columns=first))]
    [True, True]
    """

    b: Any = None
    h: Any = None

    @classmethod
    def grid(cls, rows: Extent, columns: Extent, b: Any = None, h: Any = None) -> "Tile":
        """Pairs each of n extents `[n]` of queries with each of m extents `[m]` of keys."""
        q, kv = (np.s_[:, None], np.s_[None, :])
        tile = cls(
            rows._replace(lo=rows.lo[q], hi=rows.hi[q], start=rows.start[q]),
            columns._replace(lo=columns.lo[kv], hi=columns.hi[kv], start=columns.start[kv]),
        )
        tile.b, tile.h = b, h
        return tile

    @property
    def shape(self) -> Shape:
        """The shape `(n, m)` of the boxes; `()` for one box."""
        parts = (*self.rows[:3], *self.columns[:3])
        return np.broadcast_shapes(*map(np.shape, parts))


def _ends(tile: Tile) -> tuple[Any, Any, Any, Any]:
    """Returns the least and greatest position of the rows, then of the columns."""
    return tile.rows.lo, tile.rows.hi, tile.columns.lo, tile.columns.hi


def _far_apart(a: Any, b: Any) -> Any:
    """Returns whether a − b may need more than 32 bits, by the difference of their halves."""
    return abs((a >> 1) - (b >> 1)) >= 2**30 - 1


def _as_truth(value: Any) -> Truth:
    return value if isinstance(value, jax.Array) else np.asarray(value, bool)


class Mask:
    """The base class of masks: the operators, and the methods derived from the two operations.

    A subclass must compute with its fields alone: a program compiled for one mask serves all masks
    with equal fields. A mask that reads anything else must be a `Predicate`, whose function may.

    >>> print((~masks.Causal() | masks.Window(left=0)).dense(3, 3).astype(int))
    [[1 1 1]
     [0 1 1]
     [0 0 1]]
    """

    __array_ufunc__ = None  # so that `array & mask` calls the mask's operator, not NumPy's
    of_positions = False  # whether the mask is a formula of positions alone

    def evaluate(self, b: Any, h: Any, rows: Span, columns: Span) -> Allowed:
        """Returns the mask for rows and columns; arrays are already selected and sliced for them.

        Axes may have size 1 and broadcast.
        """
        raise NotImplementedError

    def bounds(self, tile: Tile) -> tuple[Truth, Truth]:
        """Returns `(maybe_any, surely_all)`: False in the first means that nothing in the tile is
        allowed, True in the second that everything is. Arrays must be selected for one (b, h)."""
        raise NotImplementedError

    def __call__(
        self, b: Any, h: Any, rows: Indices | Span, columns: Indices | Span
    ) -> Bool[Array, "t s"]:
        """Evaluates the mask, bool `[t, s]`, for batch row `b` (flat) and head `h`.

        Plain arrays are positions and places at once; a `Span` gives both.
        """
        i, j = _alike(as_span(rows), as_span(columns))
        _check_head(*leading(self), b, h)
        flat = flatten_batch(self, leading(self)[0])
        allowed = take_tile(select_head(flat, b, h), i.places, j.places).evaluate(b, h, i, j)
        return jnp.broadcast_to(allowed, (len(i.places), len(j.places)))

    def __and__(self, other: Any) -> "Mask":
        return And(self, as_mask(other))

    def __or__(self, other: Any) -> "Mask":
        return Or(self, as_mask(other))

    def __invert__(self) -> "Mask":
        return Not(self)

    __rand__ = __and__
    __ror__ = __or__

    def __jax_array__(self) -> "_NoArray":
        return _NoArray(self)

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        return _NoArray(self).__array__()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            about = f"; {_NoArray(self)}" if name in ("astype", "ndim", "reshape") else ""
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}{about}")

    def __bool__(self) -> bool:
        raise TypeError(
            "a mask is neither true nor false: combine masks with &, | and ~ instead of and, or "
            "and not, and compare with `is None` to see whether one is given"
        )

    def dense(
        self,
        T: int,
        S: int,
        *,
        batch: tuple[int, ...] | None = None,
        heads: int | None = None,
        **positions: Unpack[Positions],
    ) -> Bool[Array, "*B T S"] | Bool[Array, "*B N T S"]:
        """The mask as a boolean array `[T, S]`, or `[*B, N, T, S]` if it depends on row or head.

        `batch` and `heads` default to the axes of the mask's own arrays. Positions, `[T]` and
        `[S]`, are `arange` by default.
        """
        for name, size in (("T", T), ("S", S)):
            check_size(name, size, 0)
        _check_covers(self, T, S)
        mask_batch, mask_heads = leading(self)
        lead, N = _leading_axes(batch) or mask_batch, mask_heads if heads is None else heads
        check_size("heads", N, 0)
        flat = flatten_batch(self, lead)
        q, kv = _given(T, S, positions)
        i, j = span(T, q), span(S, kv)

        def one_head(b: Any, h: Any) -> Array:
            allowed = take_tile(select_head(flat, b, h), i.places, j.places).evaluate(b, h, i, j)
            return jnp.broadcast_to(allowed, (T, S))

        if not lead and not N:
            return one_head(0, 0)
        all_heads = jax.vmap(jax.vmap(one_head, (None, 0)), (0, None))
        allowed = all_heads(jnp.arange(math.prod(lead)), jnp.arange(N or 1))
        return allowed.reshape(*lead, N or 1, T, S)

    def _repr_html_(self) -> str | None:
        """A notebook's picture: at most 32 × 32 tiles of the first batch row and head, for the
        sizes of the mask's arrays, or else 32 queries and keys. None where these sizes are not
        known."""
        from jattn._svg import tile_picture  # noqa: PLC0415  importing jattn must cost nothing

        T, S = _own_size(self, "T"), _own_size(self, "S")
        T, S = T or S or 32, S or T or 32
        block_q, block_kv = -(-T // 32), -(-S // 32)
        try:
            kinds = np.asarray(tile_map(self, T, S, block_q, block_kv))
        except (TypeError, ValueError):  # traced, or of several sizes
            return None
        empty, mixed, full = (int((kinds == kind).sum()) for kind in (EMPTY, MIXED, FULL))
        return tile_picture(
            kinds,
            f"{T} queries × {S} keys in tiles of {block_q} × {block_kv}: "
            f"{empty} empty, {mixed} mixed, {full} full",
        )


class _NoArray:
    """Stands for a mask where an array is expected. JAX shows its repr in errors about non-arrays,
    and leaves `array & mask` to the mask."""

    def __init__(self, mask: Mask):
        self.mask = mask

    def __repr__(self) -> str:
        rank = "" if any(leading(self.mask)) else "[None, None]"
        return (
            f"{self.mask!r}, which is a rule and no array: it goes to jattn.attention and the "
            f"layers of jattn.nn; where Flax's layers, or others, want an array [*B, N, T, S], "
            f"write mask=mask.dense(T, S){rank}"
        )

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        raise TypeError(f"mask: expected an array, got {self!r}")


MaskLike = Callable[[Any, Any, Any, Any], Any] | Mask | AnyArray | HoldsTree | None
"""Values accepted as `mask`; see `as_mask`."""


def as_mask(value: Any) -> Mask:
    """Converts a value to a mask.

    Masks are returned unchanged; a boolean array becomes `Dense`, a function `Predicate` and None
    `Full`. The state in which a module holds its mask (`layer.mask`) gives that mask. Raises
    TypeError for anything else.

    >>> masks.as_mask(None), type(masks.as_mask(lambda b, h, q, kv: q >= kv)).__name__
    (Full(), 'Predicate')
    """
    if value is None:
        return _FULL
    if not isinstance(value, Mask | types.FunctionType):
        value = held_by_module(value)
    if isinstance(value, Mask):
        return value
    if hasattr(value, "dtype"):
        return Dense(value)
    if inspect.isfunction(value) or isinstance(value, functools.partial | types.MethodType):
        return Predicate(value)
    raise TypeError(
        f"mask: expected a jattn mask, a boolean array [*B, N, T, S], a function "
        f"(b, h, q_idx, kv_idx) or None, got {_meant(value)}"
    )


def _meant(value: Any) -> str:
    """Describes a value passed in place of a mask, with the mask that its name may mean."""
    if isinstance(value, type) and issubclass(value, Mask):
        return f"the class {value.__name__}; write masks.{value.__name__}(...)"
    if isinstance(value, str):
        suggestion = _BY_NAME.get(value.lower())
        return f"the str {shown(value)}" + (f"; write {suggestion}" if suggestion else "")
    return type(value).__name__


_BY_NAME = {
    "causal": "masks.Causal()",
    "full": "masks.Full()",
    "none": "None",
    "local": "masks.Window(left=...)",
    "window": "masks.Window(left=...)",
    "sliding_window": "masks.Window(left=...)",
    "padding": "masks.Padding(attention_mask)",
    "prefix": "masks.Causal() | masks.Prefix(length)",
    "document": "masks.Segments(ids)",
    "segments": "masks.Segments(ids)",
}


def as_span(value: Indices | Span) -> Span:
    """Returns a `Span` unchanged, and positions as a span whose places equal them."""
    if isinstance(value, Span):
        return value
    indices = jnp.asarray(integers.of_formula("rows, columns", value))
    return Span(indices, indices)


def span(size: Size, positions: Indices | None = None) -> Span:
    """Returns all places of an axis, at the given positions (by default equal to the places)."""
    places = jnp.arange(size, dtype=jnp.int32)
    return Span(places if positions is None else jnp.asarray(positions), places)


def _leading_axes(batch: Any) -> Shape:
    """Returns the sizes of the batch axes as a tuple, from a tuple, one size or None.

    Raises TypeError and ValueError for anything else.
    """
    batch = (batch,) if is_integer(batch) else () if batch is None else batch
    if not isinstance(batch, list | tuple):
        raise TypeError(f"batch: expected a tuple of sizes, got {shown(batch)}")
    for size in batch:
        check_size("batch", size, 0)
    return tuple(batch)


def _alike(i: Span, j: Span) -> tuple[Span, Span]:
    """Returns both spans with positions of the wider dtype, so that formulas can compare them."""
    if i.positions.dtype == j.positions.dtype:
        return i, j
    i, j = (x._replace(positions=x.positions.astype(jnp.int64)) for x in (i, j))
    return i, j


def _given(T: int, S: int, positions: Positions) -> tuple[Any, Any]:
    """Returns the positions of queries and keys, or None; both in 64 bits if either needs them.

    Raises TypeError for other names.
    """
    names = ("q_positions", "kv_positions")
    if unknown := positions.keys() - {*names}:
        raise TypeError(f"no argument {min(unknown)!r}; there are {' and '.join(names)}")
    q, kv = (
        None if (x := positions.get(name)) is None else _of_formula(name, x, size)
        for name, size in zip(names, (T, S), strict=True)
    )
    if all(x is None or integers.is_narrow(x) for x in (q, kv)):
        return q, kv
    q, kv = (np.arange(n) if x is None else x.astype(jnp.int64) for n, x in ((T, q), (S, kv)))
    return q, kv


def _of_formula(name: str, x: Any, size: int) -> Any:
    """Checks a user's positions `[size]` and returns them in the dtype of formulas.

    Raises TypeError and ValueError for anything else.
    """
    check_array(name, x, "[T]" if name[0] == "q" else "[S]", "integer", shape=(size,))
    return integers.of_formula(name, x)


def _check_covers(mask: Mask, T: int, S: int) -> None:
    """Raises ValueError if an array along T or S has another length, which indexing would clamp."""
    leaves = jax.tree_util.tree_leaves_with_path(mask)
    for (path, leaf), letters in zip(leaves, jax.tree.leaves(axis_names(mask)), strict=True):
        for letter, size in (("T", T), ("S", S)):
            axis = axis_of(letter, letters, leaf.ndim)
            got = size if axis is None else leaf.shape[axis]
            if got != size and not (got == 1 and f"#{letter}" in letters.split()):
                name = f"mask{jax.tree_util.keystr(path)}"
                raise ValueError(f"{name}: expected {letter} = {size}, got {list(leaf.shape)}")
    for blocks in _blocks(mask):
        blocks.check_covers(T, S)


def _blocks(mask: Mask) -> list["Blocks"]:
    """Returns the coarse masks in a mask."""
    leaves = jax.tree.leaves(mask, is_leaf=lambda x: isinstance(x, Blocks))
    return [x for x in leaves if isinstance(x, Blocks)]


def _own_size(mask: Mask, letter: str) -> int:
    """Returns the length of the mask's arrays along T or S; 0 if it has none."""
    length = 0
    for leaf, letters in zip(jax.tree.leaves(mask), jax.tree.leaves(axis_names(mask)), strict=True):
        axis = axis_of(letter, letters, leaf.ndim)
        length = max(length, 0 if axis is None else leaf.shape[axis])
    place = "TS".index(letter)
    return max(length, 0, *(x.layout.shape[-2:][place] * x.sizes[place] for x in _blocks(mask)))


def _check_head(batch: Shape, heads: int, b: Any, h: Any) -> None:
    """Raises ValueError for a batch row or head known to be out of range."""
    for name, index, size in (("b", b, math.prod(batch)), ("h", h, heads)):
        if not is_integer(index):
            check_array(name, index, "without axes", "integer", shape=())
        least, most = integers.known_range(index) or (0, 0)
        end = size if size > 1 else integers.MOST  # functions accept any index
        if not 0 <= least <= most < end:
            raise ValueError(f"{name}: expected 0 <= {name} < {end}, got {shown(index)}")


@pytree_dataclass
class And(Mask):
    """The intersection of two masks: pairs that both allow.

    >>> print((masks.Causal() & masks.Window(left=1)).dense(3, 3).astype(int))
    [[1 0 0]
     [1 1 0]
     [0 1 1]]
    """

    left: Mask
    right: Mask

    def evaluate(self, b, h, rows, columns):
        return self.left.evaluate(b, h, rows, columns) & self.right.evaluate(b, h, rows, columns)

    def bounds(self, tile):
        (any_l, all_l), (any_r, all_r) = self.left.bounds(tile), self.right.bounds(tile)
        return any_l & any_r, all_l & all_r


@pytree_dataclass
class Or(Mask):
    """The union of two masks: pairs that either allows.

    >>> print((masks.Causal() | masks.Prefix(2)).dense(3, 3).astype(int))
    [[1 1 0]
     [1 1 0]
     [1 1 1]]
    """

    left: Mask
    right: Mask

    def evaluate(self, b, h, rows, columns):
        return self.left.evaluate(b, h, rows, columns) | self.right.evaluate(b, h, rows, columns)

    def bounds(self, tile):
        (any_l, all_l), (any_r, all_r) = self.left.bounds(tile), self.right.bounds(tile)
        return any_l | any_r, all_l | all_r


@pytree_dataclass
class Not(Mask):
    """The complement of a mask: pairs that it does not allow.

    >>> print((~masks.Causal()).dense(3, 3).astype(int))
    [[0 1 1]
     [0 0 1]
     [0 0 0]]
    """

    inner: Mask

    def evaluate(self, b, h, rows, columns):
        return ~self.inner.evaluate(b, h, rows, columns)

    def bounds(self, tile):
        maybe_any, surely_all = self.inner.bounds(tile)
        return ~surely_all, ~maybe_any


@pytree_dataclass
class Full(Mask):
    """The mask with which every query attends to every key.

    >>> print(masks.Full().dense(2, 3).astype(int))
    [[1 1 1]
     [1 1 1]]
    """

    of_positions = True

    def evaluate(self, b, h, rows, columns):
        return jnp.ones((1, 1), bool)

    def bounds(self, tile):
        return np.True_, np.True_


_FULL = Full()


@pytree_dataclass
class Empty(Mask):
    """The mask with which no query attends to any key.

    >>> print(masks.Empty().dense(2, 3).astype(int))
    [[0 0 0]
     [0 0 0]]
    """

    of_positions = True

    def evaluate(self, b, h, rows, columns):
        return jnp.zeros((1, 1), bool)

    def bounds(self, tile):
        return np.False_, np.False_


_LEAST, _GREATEST = -(2**31), 2**31 - 1  # positions have 32 bits, their differences 33


def shifted(positions: Any, by: Any) -> Any:
    """Returns positions + by, clamped to 32 bits; `by` is an integer, or a broadcastable array."""
    if not isinstance(by, int):
        return _shifted_by_array(positions, by)
    if not isinstance(positions, jax.Array):
        wide = np.asarray(positions, np.int64) + by
        return np.clip(wide, _LEAST, _GREATEST).astype(np.int32)
    if not integers.is_narrow(positions):  # traced 64-bit positions occur only in formulas
        return positions + by
    while by:  # in summands of 32 bits; one is nearly always enough
        summand = min(max(by, -_GREATEST), _GREATEST)
        moved = positions + np.int32(summand)
        over = positions > _GREATEST - summand if summand > 0 else positions < _LEAST - summand
        positions = jnp.where(over, np.int32(_GREATEST if summand > 0 else _LEAST), moved)
        by -= summand
    return positions


def _shifted_by_array(positions: Any, by: Any) -> Any:
    if not integers.is_narrow(positions):
        return positions + by.astype(positions.dtype)
    for _ in range(1 if integers.is_narrow(by) else 3):
        summand = integers.clamped(by)
        moved = jnp.asarray(positions, jnp.int32) + summand
        over, under = (summand > 0) & (moved < positions), (summand < 0) & (moved > positions)
        moved = jnp.where(over, np.int32(_GREATEST), moved)
        positions = jnp.where(under, np.int32(_LEAST), moved)
        by = by - summand.astype(by.dtype)
    return positions


def _checked_distance(name: str, value: Any) -> Any:
    """Checks one side of a window and returns it: None, an integer, or an int32 array."""
    if value is None or is_integer(value):
        if value is not None and value < 0:
            raise ValueError(f"Window: {name} must be None or an integer >= 0, got {value!r}")
        # No two positions differ by 2³² or more.
        return value if value is None or value < 2**32 else None
    wanted = "None, an integer >= 0 or an integer array, scalar or [N]"
    if not jnp.issubdtype(getattr(value, "dtype", np.object_), jnp.integer):
        raise ValueError(f"Window: {name} must be {wanted}, got {shown(value)}")
    if len(np.shape(value)) > 1 or 0 in np.shape(value):
        raise ValueError(f"Window: {name} must be {wanted}, got shape {list(np.shape(value))}")
    least, most = integers.known_range(value) or (0, 0)
    if integers.fits(value) and least >= 0:
        return integers.as_int32(value)
    if is_known(value) or not jax.config.read("jax_enable_x64"):
        shown_value = value.dtype if not is_known(value) else least if least < 0 else most
        raise ValueError(f"Window: {name} must be >= 0 and of 32 bits, got {shown_value}")
    if value.dtype == np.uint64:
        value = jnp.minimum(value, np.uint64(2**33))
    return jnp.minimum(value.astype(jnp.int64), 2**33)


@pytree_dataclass
class Window(Mask):
    """A window around each query: q − left ≤ kv ≤ q + right by position, both inclusive.

    Each side is None, which is unbounded, an integer, or an integer array, which may be traced: a
    scalar, or `[N]` with one distance for each head.

    Raises ValueError for negative or non-integer distances.

    >>> print(masks.Window(left=1, right=0).dense(3, 3).astype(int))
    [[1 0 0]
     [1 1 0]
     [0 1 1]]
    """

    of_positions = True

    left: Any = None
    right: Any = None

    def __post_init__(self):
        for name in ("left", "right"):
            object.__setattr__(self, name, _checked_distance(name, getattr(self, name)))

    def axis_names_by_value(self) -> dict[str, str]:
        """The letters of each side: a scalar, or one distance for each head."""
        return {name: letters_by_head(getattr(self, name)) for name in ("left", "right")}

    def _ends(self, least: Any, greatest: Any) -> tuple[Any, Any]:
        """Returns the first key that a query at `least` sees and the last key that a query at
        `greatest` sees; None for an unbounded side."""
        left, right = number(self.left), number(self.right)
        first = None if left is None else shifted(least, -left)
        return first, None if right is None else shifted(greatest, right)

    def evaluate(self, b, h, rows, columns):
        q, kv = rows.positions, columns.positions[None, :]
        allowed = jnp.ones((1, 1), bool)
        first, last = self._ends(q, q)
        if first is not None:
            allowed = allowed & (kv >= first[:, None])
        if last is not None:
            allowed = allowed & (kv <= last[:, None])
        return allowed

    def bounds(self, tile):
        q_lo, q_hi, kv_lo, kv_hi = _ends(tile)
        first, last = self._ends(q_lo, q_hi)  # seen by some query
        last_first, first_last = self._ends(q_hi, q_lo)
        maybe_any, surely_all = np.True_, np.True_
        if first is not None:
            maybe_any = maybe_any & (kv_hi >= first)
            surely_all = surely_all & (kv_lo >= last_first)
        if last is not None:
            maybe_any = maybe_any & (kv_lo <= last)
            surely_all = surely_all & (kv_hi <= first_last)
        return maybe_any, surely_all


@pytree_dataclass
class Causal(Mask):
    """The causal mask, kv ≤ q by position: no query sees the future.

    With default positions the first query sees the first key only, whatever T and S are. For the
    last query to see all keys, as in decoding, pass `q_positions`, for example
    `jattn.positions.aligned_to_end(T, S)`.

    >>> print(masks.Causal().dense(3, 3).astype(int))
    [[1 0 0]
     [1 1 0]
     [1 1 1]]
    """

    of_positions = True

    def evaluate(self, b, h, rows, columns):
        return columns.positions[None, :] <= rows.positions[:, None]

    def bounds(self, tile):
        q_lo, q_hi, kv_lo, kv_hi = _ends(tile)
        return _as_truth(kv_lo <= q_hi), _as_truth(kv_hi <= q_lo)


@pytree_dataclass
class Prefix(Mask):
    """A prefix that every query sees: kv < length by position.

    `Causal() | Prefix(n)` is a prefix LM. `length` is an integer or an integer array, scalar or
    `[*B]`.

    >>> print(masks.Prefix(2).dense(2, 3).astype(int))
    [[1 1 0]
     [1 1 0]]
    """

    of_positions = True

    length: Any = array_field("*B")

    def __post_init__(self):
        _check_lengths("Prefix", "length", self.length)
        object.__setattr__(self, "length", integers.lengths("Prefix: length", self.length))

    def evaluate(self, b, h, rows, columns):
        return is_below(columns.positions[None, :], self.length)

    def bounds(self, tile):
        some, every = (is_below(x, self.length) for x in (tile.columns.lo, tile.columns.hi))
        return _as_truth(some), _as_truth(every)


@pytree_dataclass
class Dilated(Mask):
    """Keys at distances q − kv that are multiples of `step`, by position.

    The strided pattern of Child et al. 2019.

    >>> print(masks.Dilated(2).dense(3, 3).astype(int))
    [[1 0 1]
     [0 1 0]
     [1 0 1]]
    """

    of_positions = True

    step: int = static_field()

    def __post_init__(self):
        if not (is_integer(self.step) and self.step >= 1):
            raise ValueError(f"Dilated: step must be an integer >= 1, got {shown(self.step)}")

    def evaluate(self, b, h, rows, columns):
        q, kv = rows.positions[:, None], columns.positions[None, :]
        if self.step >= 2**32:
            return q == kv
        if self.step > _GREATEST:  # q − kv is 0 or ±step, which needs 32 bits
            distance = (jnp.maximum(q, kv) - jnp.minimum(q, kv)).astype(jnp.uint32)
            return (distance == 0) | (distance == np.uint32(self.step))
        return q % self.step == kv % self.step

    def bounds(self, tile):
        q_lo, q_hi, kv_lo, kv_hi = _ends(tile)
        if self.step > _GREATEST:
            return np.True_, np.False_
        alone = (q_lo == q_hi) & (kv_lo == kv_hi) & (q_lo % self.step == kv_lo % self.step)
        lo, hi = kv_lo - q_hi, kv_hi - q_lo
        unknown = _far_apart(kv_lo, q_hi) | _far_apart(kv_hi, q_lo)
        some = (hi - hi % self.step >= lo) | unknown
        return _as_truth(some), _as_truth((self.step == 1) | alone)


@pytree_dataclass
class Global(Mask):
    """Global positions: the first `n` attend to all, and all attend to them (Beltagy et al.
    2020).

    >>> print(masks.Global(1).dense(3, 3).astype(int))
    [[1 1 1]
     [1 0 0]
     [1 0 0]]
    """

    of_positions = True

    n: int = static_field()

    def __post_init__(self):
        if not (is_integer(self.n) and self.n >= 0):
            raise ValueError(f"Global: n must be an integer >= 0, got {self.n!r}")

    def evaluate(self, b, h, rows, columns):
        by_query = is_below(rows.positions[:, None], self.n)
        return by_query | is_below(columns.positions[None, :], self.n)

    def bounds(self, tile):
        some = is_below(tile.rows.lo, self.n) | is_below(tile.columns.lo, self.n)
        every = is_below(tile.rows.hi, self.n) | is_below(tile.columns.hi, self.n)
        return _as_truth(some), _as_truth(every)


def _check_lengths(owner: str, name: str, value: Any) -> None:
    if is_integer(value):
        return
    if not jnp.issubdtype(getattr(value, "dtype", np.object_), jnp.integer):
        kind = getattr(value, "dtype", type(number(value)).__name__)
        raise TypeError(f"{owner}: {name} must be an integer or an integer array, got {kind}")


@pytree_dataclass
class Lengths(Mask):
    """Lengths of queries, keys or both: places < length are allowed, padding at the end is not.

    `q` and `kv` are integers or integer arrays, scalar or `[*B]`; None is unbounded.

    >>> print(masks.Lengths(kv=jnp.array([1, 2])).dense(1, 3).astype(int)[:, 0, 0])
    [[1 0 0]
     [1 1 0]]
    """

    q: Any = array_field("*B", default=None)
    kv: Any = array_field("*B", default=None)

    def __post_init__(self):
        for name in ("q", "kv"):
            value = getattr(self, name)
            if value is not None:
                _check_lengths("Lengths", name, value)
            if hasattr(value, "astype"):  # places never exceed the greatest int32
                object.__setattr__(self, name, integers.clamped(value))

    def evaluate(self, b, h, rows, columns):
        allowed = jnp.ones((1, 1), bool)
        if self.q is not None:
            allowed = allowed & is_below(rows.places[:, None], self.q)
        if self.kv is not None:
            allowed = allowed & is_below(columns.places[None, :], self.kv)
        return allowed

    def bounds(self, tile):
        maybe_any, surely_all = np.True_, np.True_
        for length, extent in ((self.q, tile.rows), (self.kv, tile.columns)):
            if length is not None:
                maybe_any = maybe_any & is_below(extent.start, length)
                surely_all = surely_all & is_below(extent.start + (extent.size - 1), length)
        return maybe_any, surely_all


def _places(extent: Extent, size: int) -> Int[Array | np.ndarray, "n t"]:
    """Returns the places of each tile in an array of this size, clipped to its last entry."""
    xp = jnp if isinstance(extent.start, jax.Array) else np
    start = xp.asarray(extent.start, np.int32).reshape(-1)
    offsets = np.arange(extent.size, dtype=np.int32)
    return xp.clip(start[:, None] + offsets[None, :], 0, size - 1)


class _Ids(NamedTuple):
    """The segment ids of each tile, summarised: the two least and the two greatest ids exactly, and
    the range of the ids between them, `MOST..LEAST` if there are none. A padding id thus does not
    widen the range of the other ids."""

    ends: list[Any]
    lo: Any
    hi: Any

    @classmethod
    def of(cls, ids: AnyArray, extent: Extent) -> "_Ids":
        """Summarises the ids `[size]` under each tile of an extent."""
        is_static = is_known(ids) and not isinstance(extent.start, jax.Array)
        xp, shape = np if is_static else jnp, np.shape(extent.start)
        taken = xp.asarray(ids)[_places(extent, ids.shape[0])]
        least, greatest = taken.min(axis=1), taken.max(axis=1)

        def between(lo: Any, hi: Any) -> tuple[Any, Any]:
            inner = (taken > lo[:, None]) & (taken < hi[:, None])
            lo = xp.where(inner, taken, integers.MOST).min(axis=1)
            return lo, xp.where(inner, taken, integers.LEAST).max(axis=1)

        second = between(least, greatest)
        rest = between(*second)
        exists = second[0] <= second[1]
        ends = [least, greatest, *(xp.where(exists, x, least) for x in second)]
        return cls([x.reshape(shape) for x in ends], *(x.reshape(shape) for x in rest))

    def may_hold(self, x: Any) -> Truth:
        """Returns whether an id may be in the range."""
        return (self.lo <= x) & (x <= self.hi)

    def may_meet(self, other: "_Ids") -> Truth:
        """Returns whether two tiles may have an id in common."""
        meets = (self.lo <= other.hi) & (other.lo <= self.hi)
        for x in self.ends:
            meets = meets | other.may_hold(x)
        for y in other.ends:
            meets = meets | self.may_hold(y)
        for x, y in itertools.product(self.ends, other.ends):
            meets = meets | (x == y)
        return meets

    def is_only(self, other: "_Ids") -> Truth:
        """Returns whether both tiles have a single id, the same one."""
        (least, greatest, *_), (x, y, *_) = self.ends, other.ends
        return (least == greatest) & (x == y) & (least == x)


@pytree_dataclass
class Segments(Mask):
    """Segments packed in one row, such as documents or sentences: equal ids attend to each other.

    `q_ids` is an integer array `[*B, T]` (or `[T]` for all rows), `kv_ids` `[*B, S]`; None: the
    same.

    >>> print(masks.Segments(jnp.array([0, 0, 1])).dense(3, 3).astype(int))
    [[1 1 0]
     [1 1 0]
     [0 0 1]]
    """

    q_ids: Any = array_field("*B T")
    kv_ids: Any = array_field("*B S", default=None)

    def __post_init__(self):
        kv_ids = self.q_ids if self.kv_ids is None else self.kv_ids
        check_array("Segments: q_ids", self.q_ids, "[*B, T]", "integer", ndim=1)
        check_array("Segments: kv_ids", kv_ids, "[*B, S]", "integer", ndim=1)
        q_ids, kv_ids = integers.ids("Segments", self.q_ids, kv_ids)
        object.__setattr__(self, "q_ids", q_ids)
        object.__setattr__(self, "kv_ids", kv_ids)

    def evaluate(self, b, h, rows, columns):
        return self.q_ids[:, None] == self.kv_ids[None, :]

    def bounds(self, tile):
        if not tile.rows.size or not tile.columns.size:
            return np.False_, np.True_
        q, kv = _Ids.of(self.q_ids, tile.rows), _Ids.of(self.kv_ids, tile.columns)
        return q.may_meet(kv), q.is_only(kv)


@pytree_dataclass
class Padding(Mask):
    """The keys that are tokens, by place: the `attention_mask [*B, S]` that tokenisers give.

    1 or True is a token, 0 or False is padding, on either side or in the middle; `[S]` is for all
    rows. Queries are not masked, so that it serves self- and cross-attention alike: the output of a
    query that is padding has no meaning.

    Raises TypeError for arrays that are neither integer nor boolean, ValueError for other integers.

    >>> print(masks.Padding(jnp.array([[1, 1, 0], [0, 1, 1]])).dense(1, 3).astype(int)[:, 0, 0])
    [[1 1 0]
     [0 1 1]]
    """

    attention_mask: Any = array_field("*B S")

    def __post_init__(self):
        array, name = self.attention_mask, "Padding: attention_mask"
        if getattr(array, "dtype", None) != jnp.bool_:
            check_array(name, array, "[*B, S]", "integer", ndim=1)
            least, most = integers.known_range(array) or (0, 1)
            if least < 0 or most > 1:
                got = shown(least if least < 0 else most)
                raise ValueError(f"{name}: expected 1 for tokens and 0 for padding, got {got}")
            object.__setattr__(self, "attention_mask", array != 0)
        check_array(name, self.attention_mask, "[*B, S]", "boolean", ndim=1)

    def evaluate(self, b, h, rows, columns):
        return self.attention_mask[None, :]

    def bounds(self, tile):
        if not tile.columns.size:
            return np.False_, np.True_
        is_token = self.attention_mask[_places(tile.columns, self.attention_mask.shape[0])]
        shape = np.shape(tile.columns.start)
        return is_token.any(axis=1).reshape(shape), is_token.all(axis=1).reshape(shape)


@pytree_dataclass
class Dense(Mask):
    """A mask given as a boolean array of full rank `[*B, N, T, S]`; axes of size 1 broadcast.

    Raises TypeError for arrays that are not boolean.

    >>> jattn.attention(q, k, v, mask=masks.Dense(jnp.tri(5, 7, dtype=bool)[None, None])).shape
    (2, 5, 4, 8)
    """

    array: Any = array_field("*#B #N #T #S")

    def __post_init__(self):
        _check_bool("Dense", "mask", self.array)
        if self.array.ndim < 3:
            raise ValueError(
                f"Dense: expected a mask of full rank [*B, N, T, S], got {list(self.array.shape)}; "
                f"write {_TO_FULL_RANK[self.array.ndim]}"
            )

    def evaluate(self, b, h, rows, columns):
        return self.array

    def bounds(self, tile):
        rows = min(tile.rows.size, self.array.shape[0])
        columns = min(tile.columns.size, self.array.shape[1])
        if not rows or not columns:
            return np.False_, np.True_
        q = _places(tile.rows, self.array.shape[0])  # [n, t]
        kv = _places(tile.columns, self.array.shape[1])  # [m, s]
        by_row = self.array[q]  # [n, t, S]
        any_row, all_row = by_row.any(axis=1)[:, kv], by_row.all(axis=1)[:, kv]  # [n, m, s]
        return any_row.any(axis=-1), all_row.all(axis=-1)


_TO_FULL_RANK = (
    "mask[None, None, None, None] for the one truth, or masks.Full() and masks.Empty()",
    "mask[None, None, None] if it is [S], mask[None, None, :, None] if it is [T]",
    "mask[None, None] if it is [T, S], mask[:, None, None] if it is [B, S]",
)


def _check_bool(owner: str, name: str, value: Any) -> None:
    if not hasattr(value, "dtype") or value.dtype != jnp.bool_:
        kind = getattr(value, "dtype", type(value).__name__)
        raise TypeError(
            f"{owner}: {name} must be a boolean array (True = attend), got {kind}; compare with "
            f"!= 0 if what is not 0 attends; masks.Padding takes [B, S] of 0 and 1, and "
            f"scores.Bias what is added to scores"
        )


@pytree_dataclass
class Blocks(Mask):
    """A coarse mask: `layout[q_place // block, kv_place // block]`.

    `layout` is boolean, `[T/block, S/block]` for all or `[*B, N, T/block, S/block]` (rounded up;
    batch and head axes of size 1 broadcast); `block` is an integer or a pair (queries, keys).

    >>> print(masks.Blocks(jnp.eye(2, dtype=bool), block=2).dense(4, 4).astype(int))
    [[1 1 0 0]
     [1 1 0 0]
     [0 0 1 1]
     [0 0 1 1]]
    """

    layout: Any
    block: int | tuple[int, int] = static_field()

    def __post_init__(self):
        _check_bool("Blocks", "layout", self.layout)
        if self.layout.ndim < 2:
            raise ValueError(
                f"Blocks: expected layout [T/block, S/block] or [*B, N, T/block, S/block], "
                f"got {list(self.layout.shape)}"
            )
        block = self.block if isinstance(self.block, tuple) else (self.block, self.block)
        if len(block) != 2 or not all(is_integer(x) and x >= 1 for x in block):
            raise ValueError(f"Blocks: block must be an integer >= 1 or two, got {self.block!r}")

    def axis_names_by_value(self) -> dict[str, str]:
        """The letters of the layout: it is shared by all heads, or else has full rank."""
        return {"layout": "Tb Sb" if self.layout.ndim == 2 else "*#B #N Tb Sb"}

    @property
    def sizes(self) -> tuple[int, int]:
        """The number of queries and of keys of a block."""
        block = self.block if isinstance(self.block, tuple) else (self.block, self.block)
        return min(block[0], integers.MOST), min(block[1], integers.MOST)

    def check_covers(self, T: int, S: int) -> None:
        """Raises ValueError unless the layout has exactly the blocks of T × S."""
        wanted = [-(-T // self.sizes[0]), -(-S // self.sizes[1])]
        if list(self.layout.shape[-2:]) != wanted:
            raise ValueError(
                f"Blocks: expected layout [..., T/block, S/block] = {wanted} for T = {T}, "
                f"S = {S}, block = {self.block}, got {list(self.layout.shape)}"
            )

    def evaluate(self, b, h, rows, columns):
        q_block, kv_block = self.sizes
        layout = jnp.asarray(self.layout) if isinstance(self.layout, np.ndarray) else self.layout
        return layout[(rows.places // q_block)[:, None], (columns.places // kv_block)[None, :]]

    def bounds(self, tile):
        """Counts allowed cells of the layout under each tile, by two-dimensional prefix sums."""
        lo_q, hi_q = _cells(tile.rows, self.sizes[0], self.layout.shape[0])
        lo_kv, hi_kv = _cells(tile.columns, self.sizes[1], self.layout.shape[1])
        sums = jnp.pad(
            jnp.cumsum(jnp.cumsum(self.layout, 0, jnp.int32), 1, jnp.int32), ((1, 0), (1, 0))
        )
        by_row = sums[hi_q] - sums[lo_q]
        count = by_row[..., hi_kv] - by_row[..., lo_kv]
        size = (hi_q - lo_q)[:, None] * (hi_kv - lo_kv)[None, :]
        return count > 0, count == size


def _cells(extent: Extent, block: int, cells: int) -> tuple[Array, Array]:
    """Returns the half-open range of layout cells that each extent touches."""
    start = jnp.asarray(extent.start, jnp.int32).reshape(-1)
    stop = jnp.minimum((start + extent.size - 1) // block + 1, cells)
    return jnp.minimum(start // block, stop), stop


_EXAMPLES = (jax.ShapeDtypeStruct((), jnp.int32),) * 4  # a batch row, a head, a query, a key


@pytree_dataclass
class Predicate(Mask):
    """A mask given by a function of scalars, as in FlexAttention.

    `fn(b, h, q_idx, kv_idx, *operands) -> bool` sees positions; `b` counts batch rows row-major.
    Operands are passed whole and may be indexed. Each call of attention uses the current values of
    whatever the function reads. A function that reads only numbers, strings, arrays and other such
    functions is traced when one of them changes; a function that reads lists, dicts or attributes
    is traced in each call, and compiled if its program changed.

    Empty and full tiles are found by interval arithmetic on the function itself, as far as its
    operations are known in `functions.interval_rules`. `bounds(tile) -> (maybe_any, surely_all)`
    replaces this analysis. It is called for n × m tiles at once, with rows `[n, 1]` and columns
    `[1, m]` (see `Tile`), and returns two booleans that broadcast to `[n, m]`: for
    `kv_idx > q_idx + 200`

        lambda tile: (
            tile.columns.hi > tile.rows.lo + 200, tile.columns.lo > tile.rows.hi + 200
        )

    `check_bounds` compares such bounds with the function. Attention ignores bounds that read lists,
    dicts or attributes, as these may change before the call is differentiated.

    >>> print(masks.Predicate(lambda b, h, q, kv: (q + kv) % 2 == 0).dense(3, 3).astype(int))
    [[1 0 1]
     [0 1 0]
     [1 0 1]]
    """

    of_positions = True

    fn: Callable[..., Any] = static_field()
    operands: tuple[Any, ...] = ()
    bounds_fn: Callable[[Tile], tuple[Truth, Truth]] | None = static_field(default=None)

    def __init__(
        self,
        fn: Callable[..., Any],
        *operands: Any,
        bounds: Callable[[Tile], tuple[Truth, Truth]] | None = None,
    ):
        check_rule("Predicate", fn, ("b", "h", "q_idx", "kv_idx"), operands)
        if bounds is not None:
            check_function("Predicate: bounds", bounds)
        check_operands("Predicate", operands)
        self._set(fn, operands, bounds)

    def _set(self, fn: Any, operands: tuple[Any, ...], bounds: Any) -> None:
        object.__setattr__(self, "fn", fn)
        object.__setattr__(self, "operands", operands)
        object.__setattr__(self, "bounds_fn", bounds)

    @classmethod
    def _checked(cls, fn: Any, operands: tuple[Any, ...], bounds: Any) -> "Predicate":
        """Returns the mask of a function that is known to accept these arguments."""
        self = object.__new__(cls)
        self._set(fn, operands, bounds)
        return self

    def lasting(self) -> "Predicate":
        """The same mask, with functions that do not change: see `functions.programs`.

        Raises:
            TypeError: the function does not return a boolean scalar.
        """
        if isinstance(self.fn, TracedFunction):
            return self
        with explained("Predicate", self.fn):
            unnamed = without_named_axes("Predicate", self.fn, *_EXAMPLES, *self.operands)
        if unnamed is not self.fn:
            return Predicate(unnamed, *self.operands).lasting()
        name, bounds = function_name(self.fn), self.bounds_fn and frozen(self.bounds_fn)
        fn, operands = program_of(name, self.fn, self._scalar, self.operands, *_EXAMPLES)
        # Bounds only save time: without them the predicate is evaluated.
        return Predicate._checked(fn, operands, bounds if bounds and is_frozen(bounds) else None)

    def _scalar(self, b: Any, h: Any, q: Any, kv: Any, *operands: Any) -> Bool[Array, ""]:
        with explained("Predicate", self.fn):
            truth = self.fn(b, h, q, kv, *(operands or self.operands))
        return check_returned("Predicate", self.fn, truth, "boolean")

    def evaluate(self, b, h, rows, columns):
        b, h = jnp.asarray(b, jnp.int32), jnp.asarray(h, jnp.int32)
        per_key = jax.vmap(functools.partial(self._scalar), (None, None, None, 0))
        every = jax.vmap(per_key, (None, None, 0, None))
        with _promotion(rows.positions.dtype):
            return every(b, h, rows.positions, columns.positions)

    def read(self, tile: Tile) -> "Predicate | _Rule":
        """Returns the function as an expression with bounds, or this mask if the user gave
        bounds."""
        if self.bounds_fn is not None:
            return self
        q, _, kv, _ = _of_one_dtype(_ends(tile))

        with _promotion(q.dtype):
            dtypes = np.int32, np.int32, q.dtype, kv.dtype
            return _Rule(read(unseen(self._scalar), dtypes, self.operands))

    def bounds(self, tile):
        if self.bounds_fn is None:
            return self.read(tile).bounds(tile)
        answer = self.bounds_fn(tile)
        if not isinstance(answer, tuple | list) or len(answer) != 2:
            raise TypeError(
                f"Predicate: bounds must return a pair (maybe_any, surely_all), got {shown(answer)}"
            )
        names = ("maybe_any", "surely_all")
        maybe_any, surely_all = map(_checked_truth, names, answer, [tile.shape] * 2)
        return maybe_any, surely_all


class _Rule:
    """The function of a `Predicate` as an expression whose bounds interval arithmetic computes."""

    def __init__(self, expression: Expression):
        self.expression = expression

    def bounds(self, tile: Tile) -> tuple[Truth, Truth]:
        """Returns `(maybe_any, surely_all)`, see `Mask.bounds`."""
        q_lo, q_hi, kv_lo, kv_hi = _of_one_dtype(_ends(tile))
        indices = (_index(tile.b), _index(tile.h), Interval(q_lo, q_hi), Interval(kv_lo, kv_hi))
        with _promotion(q_lo.dtype):
            truth = intervals.of(self.expression, indices)
        return truth.hi, truth.lo


def _of_one_dtype(ends: tuple[Any, ...]) -> list[Any]:
    """Returns ends of positions as int32 arrays, or as int64 where some need 64 bits."""
    ends = tuple(x if isinstance(x, jax.Array) else np.asarray(x) for x in ends)
    narrow = all(integers.is_narrow(x) or _is_small(x) for x in ends)
    return [x.astype(np.int32 if narrow else np.int64) for x in ends]


def _is_small(x: Any) -> bool:
    return isinstance(x, np.ndarray) and bool(np.all((x >= _LEAST) & (x <= _GREATEST)))


def _promotion(dtype: Any) -> Any:
    """Returns a context in which 64-bit positions may promote the numbers of a function."""
    narrow = np.dtype(dtype).itemsize <= 4
    return contextlib.nullcontext() if narrow else jax.numpy_dtype_promotion("standard")


def _index(place: Any) -> Interval:
    """The interval of a batch row or a head; None means any."""
    if place is None:
        return Interval(np.int32(0), np.int32(_GREATEST))
    place = place.astype(jnp.int32) if isinstance(place, jax.Array) else np.int32(place)
    return Interval(place, place)


def _checked_truth(name: str, value: Any, shape: Shape) -> Truth:
    """Returns an answer of a user's bounds as an array.

    Raises TypeError and ValueError unless it is boolean and broadcasts to the tiles.
    """
    dtype = np.dtype(bool) if isinstance(value, bool) else getattr(value, "dtype", None)
    if dtype != np.dtype(bool):
        raise TypeError(
            f"Predicate: bounds must return {name} as booleans [n, m], got {dtype or shown(value)}"
        )
    try:
        fits = np.broadcast_shapes(np.shape(value), shape) == shape
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(
            f"Predicate: bounds must return {name} that broadcasts to [n, m] = {list(shape)}, got "
            f"{list(np.shape(value))}; rows of the tile are [n, 1] and columns [1, m] already"
        )
    return _as_truth(value)


EMPTY = 0
"""The number of a tile without allowed pairs, see `tile_map`."""
MIXED = 1
"""The number of a tile in which some pairs are allowed."""
FULL = 2
"""The number of a tile in which all pairs are allowed."""


def extents(size: int, block: int, positions: Indices | None = None) -> Extent:
    """Cuts an axis of `size` into tiles of `block`, the last one possibly shorter.

    A short last tile has the full size, with places past the end. Its positions are those of the
    rows that exist.
    """
    starts = np.arange(0, size, block, dtype=np.int32)
    if positions is None:
        return Extent(starts, np.minimum(starts + block, size) - 1, starts, block)
    by_tile = positions[np.minimum(starts[:, None] + np.arange(block), size - 1)]
    return Extent(by_tile.min(axis=1), by_tile.max(axis=1), starts, block)


def kinds(mask: Mask, tile: Tile) -> Int[Array | np.ndarray, "n m"]:
    """Returns EMPTY, MIXED or FULL for each tile; arrays must be selected for one (b, h)."""
    is_function = lambda x: isinstance(x, Predicate)  # noqa: E731
    read = jax.tree.map(lambda x: x.read(tile) if is_function(x) else x, mask, is_leaf=is_function)
    maybe_any, surely_all = read.bounds(tile)
    kind = maybe_any.astype(np.int8) + (maybe_any & surely_all).astype(np.int8)
    if isinstance(kind, jax.Array):
        return jnp.broadcast_to(kind, tile.shape)
    kind = np.broadcast_to(kind, tile.shape)
    ends = undecided.boxes(_ends(tile), kind == MIXED, int(np.count_nonzero(kind)))
    if ends is None:
        return kind
    mask = jax.tree.map(lambda x: x.lasting() if is_function(x) else x, mask, is_leaf=is_function)
    functions = _functions(mask)
    if not functions:
        return kind
    some, every = _refined(mask, read, functions, tile, ends)
    decided = kind.copy()
    decided[kind == MIXED] = np.where(every, FULL, np.where(some, MIXED, EMPTY))
    return decided


def _refined(
    mask: Mask, read: Any, functions: list[Predicate], tile: Tile, ends: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Computes `(maybe_any, surely_all)` of undecided tiles by their parts, then by their pairs.

    It considers all positions between a tile's ends, so their order in the tile does not matter.
    """

    def bounds_of(ends: np.ndarray) -> tuple[Truth, Truth]:
        q_lo, q_hi, kv_lo, kv_hi = ends.T
        parts = Tile(Extent(q_lo, q_hi, q_lo, 1), Extent(kv_lo, kv_hi, kv_lo, 1))
        parts.b, parts.h = tile.b, tile.h
        return read.bounds(parts)

    known = np.zeros(len(ends), bool)
    some, every = ~known, known
    is_function = lambda x: isinstance(x, Predicate)  # noqa: E731  with the user's bounds
    if not any(map(is_function, jax.tree.leaves(read, is_leaf=is_function))):
        some, every, known = undecided.by_parts(ends, bounds_of)
    if known.all() or not _may_be_evaluated(functions, tile):
        return some, every
    b, h = (int(x) if isinstance(x, int | np.integer) else 0 for x in (tile.b, tile.h))

    def rule(q: Array, kv: Array) -> Array:
        allowed = mask.evaluate(b, h, Span(q, q), Span(kv, kv))
        return jnp.broadcast_to(allowed, (q.size, kv.size))

    exact = undecided.truths((mask, b, h), rule, ends[~known], math.prod(tile.shape))
    if exact is not None:
        some[~known], every[~known] = exact
    return some, every


def _functions(mask: Mask) -> list[Predicate]:
    """Returns the functions of a mask of positions without arrays; no functions for other masks."""
    is_leaf = lambda x: isinstance(x, Mask) and not isinstance(x, And | Or | Not)  # noqa: E731
    leaves = jax.tree.leaves(mask, is_leaf=is_leaf)
    if jax.tree.leaves(mask) or not all(x.of_positions for x in leaves):
        return []
    return [x for x in leaves if isinstance(x, Predicate)]


def _may_be_evaluated(functions: list[Predicate], tile: Tile) -> bool:
    """Returns whether the functions are the same for all heads, or the tile is of one head."""
    is_one_head = all(isinstance(x, int | np.integer) for x in (tile.b, tile.h))
    return is_one_head or not any(dependence.reads(x._scalar, 4) & {0, 1} for x in functions)


def tile_map(
    mask: Mask,
    T: int,
    S: int,
    block_q: int,
    block_kv: int,
    *,
    b: int = 0,
    h: int = 0,
    **positions: Unpack[Positions],
) -> Int[Array | np.ndarray, "n m"]:
    """Classifies each tile for batch row b and head h: 0 empty, 1 mixed, 2 full.

    int8 `[⌈T/block_q⌉, ⌈S/block_kv⌉]`. Work and memory grow with the number of tiles (and with T +
    S for masks with arrays), never with T × S, except for a `Dense` mask, which is that large
    itself. The result is a NumPy array if mask and positions are static.

    >>> print(masks.tile_map(masks.Causal(), 8, 8, 2, 4))
    [[1 0]
     [1 0]
     [2 1]
     [2 1]]
    """
    for name, size in (("T", T), ("S", S), ("block_q", block_q), ("block_kv", block_kv)):
        check_size(name, size, 0 if name in "TS" else 1)
    mask = as_mask(mask)
    _check_covers(mask, T, S)
    _check_head(*leading(mask), b, h)
    q, kv = _given(T, S, positions)
    tile = Tile.grid(extents(T, block_q, q), extents(S, block_kv, kv), b, h)
    return kinds(select_head(flatten_batch(mask, leading(mask)[0]), b, h), tile)


def check_bounds(
    mask: Mask,
    T: int,
    S: int,
    *,
    block_q: int = 64,
    block_kv: int = 64,
    batch: tuple[int, ...] | None = None,
    heads: int | None = None,
    **positions: Unpack[Positions],
) -> None:
    """Compares the bounds of a mask for whole tiles with the mask of each pair in them.

    Use it for bounds written by hand, in a `Predicate` or in a mask class of your own: attention
    trusts them, and wrong bounds make it skip allowed keys or attend to masked ones. Tiles are
    `[block_q, block_kv]`; the function evaluates one row of tiles at a time, T × S pairs in all,
    for each batch row and head. For the other arguments see `Mask.dense`.

    Raises ValueError for the first tile whose bounds are wrong, naming a pair in it.

    >>> bounds = lambda tile: (tile.columns.hi > tile.rows.lo, tile.columns.lo > tile.rows.hi)
    >>> mask = masks.Predicate(lambda b, h, q, kv: kv > q, bounds=bounds)
    >>> masks.check_bounds(mask, 32, 32, block_q=8, block_kv=8)
    """
    mask, (mask_batch, mask_heads) = as_mask(mask), leading(as_mask(mask))
    heads = (mask_heads or 1) if heads is None else heads
    check_sizes(T=T, S=S, block_q=block_q, block_kv=block_kv, heads=heads)
    lead = _leading_axes(batch) or mask_batch
    with jax.ensure_compile_time_eval():
        q, kv = _given(T, S, positions)
        both_positions: Positions = {"q_positions": q, "kv_positions": kv}
        i, j = (np.asarray(x.positions) for x in (span(T, q), span(S, kv)))
        flat, columns = flatten_batch(mask, lead), Span(j, np.arange(S))
        for b, h in np.ndindex(math.prod(lead), heads):
            tile_kinds = np.asarray(
                tile_map(flat, T, S, block_q, block_kv, b=b, h=h, **both_positions)
            )
            for n, kinds_of_row in enumerate(tile_kinds):
                places = np.arange(n * block_q, min(T, (n + 1) * block_q))
                allowed = np.asarray(flat(b, h, Span(i[places], places), columns))
                for m, kind in enumerate(kinds_of_row):
                    part = allowed[:, m * block_kv : (m + 1) * block_kv]
                    if part.any() if kind == EMPTY else kind == FULL and not part.all():
                        _raise_wrong(int(kind), part, (b, h), (n * block_q, m * block_kv))


def _raise_wrong(
    kind: int, part: np.ndarray, head: tuple[int, int], start: tuple[int, int]
) -> None:
    """Raises the error about a tile whose bounds wrongly say that it is empty or full."""
    i, j = np.argwhere(part if kind == EMPTY else ~part)[0] + start
    said, is_so = ("nothing", "is") if kind == EMPTY else ("everything", "is not")
    rows, columns = (f"{x}..{x + size - 1}" for x, size in zip(start, part.shape, strict=True))
    raise ValueError(
        f"bounds: {said} is said to be allowed in the tile of queries {rows} and keys {columns} "
        f"of batch row {head[0]} and head {head[1]}, but query {i} {is_so} allowed key {j} (places)"
    )
