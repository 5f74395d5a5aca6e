"""Masks: which query attends to which key, as an algebra.

A mask is a frozen pytree; masks combine with `&`, `|` and `~`. Every mask has exactly two
operations, from which the dense form, the tile map and the pictures are derived:

* `mask(b, h, rows, columns) -> bool [t, s]` evaluates the mask for t queries (rows) and s keys
  (columns) of batch row b and head h: True where the query may attend to the key. (Classes define
  it as `evaluate`.)
* `mask.bounds(tile) -> (maybe_any, surely_all)` bounds the mask over a tile, without evaluating it.
  If `maybe_any` is False, no pair of the tile is allowed; if `surely_all` is True, all pairs are.
  Any other answer is uncertain: bounds may be loose, but never wrong.

Each token has a *position*, which users may set and which formulas such as `Causal` compare, and a
*place*, its index in the arrays. They are equal by default. `Causal`, `Window`, `Prefix`,
`Dilated`, `Global` and `Predicate` use positions; `Segments`, `Lengths`, `Padding`, `Dense`,
`Blocks` and `Tree` use places.
"""

import contextlib
import functools
import inspect
import itertools
import math
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jattn._named_axes import without_named_axes
from jattn._pytree import (
    HoldsTree,
    StaticInt,
    array_field,
    axis_names,
    axis_of,
    flatten_batch,
    leading,
    letters_by_head,
    number,
    pytree_dataclass,
    select_head,
    static_field,
    take_tile,
)
from jattn._types import Allowed, AnyArray, Index, Indices, Positions, Shape, Size
from jattn.checks import (
    check_array,
    check_function,
    check_operands,
    check_pytree,
    check_returned,
    check_rule,
    check_size,
    check_sizes,
    explained,
    function_name,
    shown,
    type_name,
)
from jattn.functions import dependence, integers, intervals, undecided
from jattn.functions.integers import is_below, is_integer, is_known
from jattn.functions.interval_rules import Interval
from jattn.functions.nodes import Expression
from jattn.functions.programs import TracedFunction, as_new_function, program_of
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
    "Tree",
    "Window",
    "as_mask",
    "check_bounds",
    "tile_map",
]
__dir__ = __all__.copy


_M = TypeVar("_M", bound="Mask")
Truth = Any  # one boolean per tile, broadcastable to the grid [n, m]; NumPy if inputs are static


class Span(NamedTuple):
    """The queries or the keys of a block: their positions, and their places in the arrays.

    >>> last = masks.Span(positions=jnp.array([4]), places=jnp.array([0]))
    >>> print(masks.Causal()(0, 0, last, jnp.arange(6)).astype(int))
    [[1 1 1 1 1 0]]
    """

    positions: Indices
    places: Indices

    @property
    def has_default_positions(self) -> bool:
        """Whether the positions are the default: equal to the places, and therefore consecutive.
        False for positions that a user set, even to the same numbers."""
        return self.positions is self.places


class Extent(NamedTuple):
    """The range of queries or of keys of a tile. If its fields are arrays, one range for each tile.

    Positions lie in `lo..hi`, both inclusive; places are `start..start + size - 1`.

    >>> queries, keys = masks.Extent(0, 1, start=0, size=2), masks.Extent(2, 3, start=2, size=2)
    >>> [bool(x) for x in masks.Causal().bounds(masks.Tile(queries, keys))]
    [False, False]
    """

    lo: Any
    hi: Any
    start: Any
    size: int


class Tile(NamedTuple("_Box", [("rows", Extent), ("columns", Extent)])):
    """The pair `(rows, columns)`: one rectangle of queries × keys, or a grid of n × m rectangles.

    In a grid the fields of `rows` are `[n, 1]` and those of `columns` `[1, m]`, so that operations
    on both broadcast to `[n, m]`. `b` and `h` are the batch row and the head; None means any.

    >>> last, first = masks.Extent(2, 3, start=2, size=2), masks.Extent(0, 1, start=0, size=2)
    >>> [bool(x) for x in masks.Causal().bounds(masks.Tile(rows=last, columns=first))]
    [True, True]
    """

    b: Any = None  # attributes, not tuple items: a tile unpacks into (rows, columns)
    h: Any = None

    @classmethod
    def grid(cls, rows: Extent, columns: Extent, b: Any = None, h: Any = None) -> "Tile":
        """Builds an n × m grid from n ranges of queries and m of keys.

        The fields of `rows` are `[n]`, those of `columns` are `[m]`.
        """
        as_n1, as_1m = np.s_[:, None], np.s_[None, :]
        tile = cls(
            rows._replace(lo=rows.lo[as_n1], hi=rows.hi[as_n1], start=rows.start[as_n1]),
            columns._replace(
                lo=columns.lo[as_1m], hi=columns.hi[as_1m], start=columns.start[as_1m]
            ),
        )
        tile.b, tile.h = b, h
        return tile

    @property
    def shape(self) -> Shape:
        """The shape `(n, m)` of a grid; `()` for a single tile."""
        fields = (*self.rows[:3], *self.columns[:3])
        return np.broadcast_shapes(*map(np.shape, fields))


def _position_limits(tile: Tile) -> tuple[Any, Any, Any, Any]:
    """Returns the least and greatest position of the queries, then of the keys."""
    return tile.rows.lo, tile.rows.hi, tile.columns.lo, tile.columns.hi


def _difference_may_overflow(a: Any, b: Any) -> Any:
    """Returns whether a − b may overflow int32. It tests a/2 − b/2, which cannot overflow."""
    return abs((a >> 1) - (b >> 1)) >= 2**30 - 1


def _as_truth(value: Any) -> Truth:
    """Returns a JAX array unchanged, any other value as a NumPy array, which has `&`, `|`, `~`."""
    return value if isinstance(value, jax.Array) else np.asarray(value, bool)


class Mask:
    """The base class of masks: operators, and all that is derived from `evaluate` and `bounds`.

    Methods of a subclass may read its fields only: a program compiled for one mask serves all masks
    with equal fields. Only the functions of a `Predicate` may read other variables.

    >>> print((~masks.Causal() | masks.Window(left=0)).dense(3, 3).astype(int))
    [[1 1 1]
     [0 1 1]
     [0 0 1]]
    """

    __array_ufunc__ = None  # so that `array & mask` calls the mask's operator, not NumPy's
    # True in masks that read no places. `And`, `Or` and `Not` leave it False even if their operands
    # read no places: callers look inside them and test the operands.
    ignores_places = False

    def evaluate(self, b: Index, h: Index, rows: Span, columns: Span) -> Allowed:
        """Returns the mask of queries `rows` and keys `columns`, broadcastable to `[t, s]`.

        The caller has replaced array fields by their slices for b, h, `rows` and `columns`.
        """
        raise NotImplementedError

    def bounds(self, tile: Tile) -> tuple[Truth, Truth]:
        """Returns `(maybe_any, surely_all)`: if the first is False, no pair of the tile is allowed;
        if the second is True, all are. The caller has selected array fields for one (b, h)."""
        raise NotImplementedError

    def __call__(
        self, b: Index, h: Index, rows: Indices | Span, columns: Indices | Span
    ) -> Bool[Array, "t s"]:
        """Evaluates the mask for batch row `b` and head `h`.

        With several batch axes, `b` is the row-major index over all of them.
        `rows` and `columns` are spans, or arrays of indices that are both positions and places.
        """
        i, j = as_span(rows), as_span(columns)
        if i.positions.dtype != j.positions.dtype:  # so that formulas can compare them
            i, j = (x._replace(positions=x.positions.astype(jnp.int64)) for x in (i, j))
        _check_head(*leading(self), b, h)
        flattened = flatten_batch(self, leading(self)[0])
        allowed = take_tile(select_head(flattened, b, h), i.places, j.places).evaluate(b, h, i, j)
        return jnp.broadcast_to(allowed, (len(i.places), len(j.places)))

    def __and__(self, other: Any) -> "Mask":
        return _joined(And, self, as_mask(other))

    def __or__(self, other: Any) -> "Mask":
        return _joined(Or, self, as_mask(other))

    def __invert__(self) -> "Mask":
        return Not(self)

    __rand__ = __and__
    __ror__ = __or__

    def __jax_array__(self) -> "_NotAnArray":
        return _NotAnArray(self)

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        return _NotAnArray(self).__array__()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            advice = f"; got {_NotAnArray(self)}" if name in ("astype", "ndim", "reshape") else ""
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}{advice}")

    def __bool__(self) -> bool:
        raise TypeError(
            "a mask is neither true nor false: combine masks with `&`, `|` and `~` instead of "
            "`and`, `or` and `not`; to test whether a mask was passed, write `mask is None`"
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
        """The mask as a boolean array, `[T, S]` or `[*B, N, T, S]`.

        It has the axes *B and N if `batch` or `heads` is given or an array of the mask has *B or N.
        `q_positions [T]` and `kv_positions [S]` are `arange` by default.
        """
        for name, size in (("T", T), ("S", S)):
            check_size(name, size, 0)
        _check_axis_lengths(self, T, S)
        mask_batch, mask_heads = leading(self)
        B, N = _batch_shape(batch) or mask_batch, mask_heads if heads is None else heads
        check_size("heads", N, 0)
        flattened = flatten_batch(self, B)
        q, kv = _checked_positions(T, S, positions)
        i, j = span(T, q), span(S, kv)

        def one_head(b: Index, h: Index) -> Array:
            head_mask = take_tile(select_head(flattened, b, h), i.places, j.places)
            return jnp.broadcast_to(head_mask.evaluate(b, h, i, j), (T, S))

        if not B and not N:
            return one_head(0, 0)
        all_heads = jax.vmap(jax.vmap(one_head, (None, 0)), (0, None))
        allowed = all_heads(jnp.arange(math.prod(B)), jnp.arange(N or 1))
        return allowed.reshape(*B, N or 1, T, S)

    def _repr_html_(self) -> str | None:
        """The picture that a notebook shows: at most 32 × 32 tiles of batch row 0 and head 0.

        T and S are the sizes of the mask's arrays, or 32. Returns None if the mask is traced or its
        arrays disagree about T or S.
        """
        from jattn._svg import tile_picture  # noqa: PLC0415  importing jattn must be fast

        T, S = _length_along(self, "T"), _length_along(self, "S")
        T, S = T or S or 32, S or T or 32
        block_q, block_kv = -(-T // 32), -(-S // 32)
        try:
            kinds = np.asarray(tile_map(self, T, S, block_q, block_kv))
        except (TypeError, ValueError):  # the mask is traced, or its arrays disagree
            return None
        empty, mixed, full = (int((kinds == kind).sum()) for kind in (EMPTY, MIXED, FULL))
        return tile_picture(
            kinds,
            f"{T} queries × {S} keys in tiles of {block_q} × {block_kv}: "
            f"{empty} empty, {mixed} mixed, {full} full",
        )


class _NotAnArray:
    """The object that `Mask.__jax_array__` returns when a mask is used as an array.

    It has no dtype, so JAX raises an error that contains its repr, which tells the user what to
    write. For `array & mask`, JAX instead calls the mask's operator.
    """

    def __init__(self, mask: Mask):
        self.mask = mask

    def __repr__(self) -> str:
        new_axes = "" if any(leading(self.mask)) else "[None, None]"
        return (
            f"{self.mask!r}, a jattn mask and not an array: pass it as `mask` to jattn.attention "
            f"or a layer of jattn.nn; where another library expects an array [*B, N, T, S], "
            f"write mask=mask.dense(T, S){new_axes}"
        )

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        raise TypeError(f"mask: expected an array, got {self!r}")


MaskLike = Callable[[Any, Any, Any, Any], Any] | Mask | AnyArray | HoldsTree | None
"""Values accepted as `mask`; see `as_mask`."""


def as_mask(value: Any) -> Mask:
    """Converts a value to a mask.

    Masks are returned unchanged; a boolean array becomes `Dense`, a function `Predicate` and None
    `Full`. A layer of `jattn.nn` keeps its mask inside an NNX module, `layer.mask`; given that
    module, `as_mask` returns the mask that it holds. Raises TypeError for anything else.

    >>> masks.as_mask(None), type(masks.as_mask(lambda b, h, q, kv: q >= kv)).__name__
    (Full(), 'Predicate')
    """
    if value is None:
        return _FULL
    if not isinstance(value, Mask | types.FunctionType) and isinstance(value, HoldsTree):
        value = value.held_tree()
    if isinstance(value, Mask):
        check_pytree("mask", value)
        return value
    if hasattr(value, "dtype"):
        return Dense(value)
    if inspect.isfunction(value) or isinstance(value, functools.partial | types.MethodType):
        return Predicate(value)
    raise TypeError(
        f"mask: expected a jattn mask, a boolean array [*B, N, T, S], a function "
        f"(b, h, q_idx, kv_idx) or None, got {_described(value)}"
    )


def _described(value: Any) -> str:
    """Describes a value that is not a mask; for a class or a known name, says what to write."""
    if isinstance(value, type) and issubclass(value, Mask):
        return f"the class {value.__name__}; write masks.{value.__name__}(...)"
    if isinstance(value, str):
        suggestion = _BY_NAME.get(value.lower())
        return f"the str {shown(value)}" + (f"; write {suggestion}" if suggestion else "")
    name = type(value).__name__
    return f"{name}; write masks.Predicate(function)" if callable(value) else name


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
    """Returns a `Span` unchanged; an array becomes both the positions and the places of a span."""
    if isinstance(value, Span):
        return value
    positions = jnp.asarray(integers.wide_positions("rows, columns", value))
    # A copy, so that `has_default_positions` is False: these indices need not be consecutive.
    return Span(positions, jnp.copy(positions))


def span(size: Size, positions: Indices | None = None) -> Span:
    """Returns the span of a whole axis; positions `[size]` equal the places by default."""
    places = jnp.arange(size, dtype=jnp.int32)
    return Span(places if positions is None else jnp.asarray(positions), places)


def _batch_shape(batch: Any) -> Shape:
    """Returns the sizes of the batch axes as a tuple, from a tuple, one size or None."""
    batch = (batch,) if is_integer(batch) else () if batch is None else batch
    if not isinstance(batch, list | tuple):
        raise TypeError(f"batch: expected a tuple of sizes, got {shown(batch)}")
    for size in batch:
        check_size("batch", size, 0)
    return tuple(batch)


def _checked_positions(T: int, S: int, positions: Positions) -> tuple[Any, Any]:
    """Checks and returns `q_positions` and `kv_positions`.

    If either needs int64, both are returned as int64, and `arange` replaces a missing one.
    Otherwise a missing one stays None.
    """
    names = ("q_positions", "kv_positions")
    if unknown := positions.keys() - {*names}:
        raise TypeError(
            f"no argument {min(unknown)!r}; write {' or '.join(names)} to set positions"
        )
    arrays: list[Any] = []
    for name, letters, size in zip(names, ("[T]", "[S]"), (T, S), strict=True):
        x = positions.get(name)
        if x is not None:
            check_array(name, x, letters, "integer", shape=(size,))
            x = integers.wide_positions(name, x)
        arrays.append(x)
    q, kv = arrays
    if all(x is None or integers.is_narrow(x) for x in arrays):
        return q, kv
    q, kv = (np.arange(n) if x is None else x.astype(jnp.int64) for n, x in ((T, q), (S, kv)))
    return q, kv


def _check_axis_lengths(mask: Mask, T: int, S: int) -> None:
    """Raises ValueError unless axes T and S of the mask's arrays fit T and S.

    JAX would not raise an error for indices beyond the array's end, but clamp them.
    """
    leaves = jax.tree_util.tree_leaves_with_path(mask)
    for (path, leaf), axes in zip(leaves, jax.tree.leaves(axis_names(mask)), strict=True):
        for axis_name, size in (("T", T), ("S", S)):
            axis = axis_of(axis_name, axes, leaf.ndim)
            length = size if axis is None else leaf.shape[axis]
            if length != size and not (length == 1 and f"#{axis_name}" in axes.split()):
                name, shape = f"mask{jax.tree_util.keystr(path)}", list(leaf.shape)
                raise ValueError(f"{name}: expected {axis_name} = {size}, got shape {shape}")
    for blocks in _parts_of(mask, Blocks):
        blocks.check_block_counts(T, S)


def _parts_of(mask: Any, kind: type[_M]) -> list[_M]:
    """Returns the parts of a mask that are instances of `kind`, such as `Blocks`."""
    leaves = jax.tree.leaves(mask, is_leaf=lambda x: isinstance(x, kind))
    return [x for x in leaves if isinstance(x, kind)]


def _length_along(mask: Mask, axis_name: str) -> int:
    """Returns the greatest length of the mask's arrays along the axis "T" or "S"; 0 if none."""
    length = 0
    for leaf, axes in zip(jax.tree.leaves(mask), jax.tree.leaves(axis_names(mask)), strict=True):
        axis = axis_of(axis_name, axes, leaf.ndim)
        length = max(length, 0 if axis is None else leaf.shape[axis])
    side = "TS".index(axis_name)  # 0 for queries, 1 for keys
    return max(
        length, 0, *(x.layout.shape[-2:][side] * x.sizes[side] for x in _parts_of(mask, Blocks))
    )


def _check_head(batch: Shape, heads: int, b: Index, h: Index) -> None:
    """Raises ValueError for a batch row or head that is out of range, unless it is traced."""
    for name, index, size in (("b", b, math.prod(batch)), ("h", h, heads)):
        if not is_integer(index):
            check_array(name, index, "without axes", "integer", shape=())
        least, most = integers.known_range(index) or (0, 0)
        end = size if size > 1 else integers.MOST  # a missing axis or size 1 fits any index
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


_MOST_LEVELS = 16


def _joined(kind: type[And | Or], left: Mask, right: Mask) -> Mask:
    """Returns `kind(left, right)`. A longer chain than `_MOST_LEVELS` becomes a balanced tree: JAX
    and Python limit the depth of recursion, and a loop may combine hundreds of masks."""
    parts: list[Mask] = []
    deepest = 0
    stack: list[tuple[Mask, int]] = [(kind(left, right), 0)]
    while stack:
        mask, level = stack.pop()
        if isinstance(mask, kind):
            stack += [(mask.right, level + 1), (mask.left, level + 1)]
        else:
            parts.append(mask)
            deepest = max(deepest, level)
    if deepest <= _MOST_LEVELS:
        return kind(left, right)
    while len(parts) > 1:
        last = parts[-1:] if len(parts) % 2 else []
        parts = [*map(kind, parts[::2], parts[1::2]), *last]
    return parts[0]


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

    ignores_places = True

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

    ignores_places = True

    def evaluate(self, b, h, rows, columns):
        return jnp.zeros((1, 1), bool)

    def bounds(self, tile):
        return np.False_, np.False_


_LEAST, _GREATEST = integers.LEAST, integers.MOST


def shifted(positions: Any, by: Any) -> Any:
    """Returns positions + by, clamped to int32 or, for JAX arrays of a wider dtype, to that dtype.
    `by` is an integer, or a broadcastable array."""
    if not isinstance(by, int):
        return _shifted_by_array(positions, by)
    # Attention has int32 positions; `dense` and `tile_map` may have int64.
    if isinstance(positions, jax.Array) and not integers.is_narrow(positions):
        limits = jnp.iinfo(positions.dtype)
        return _shifted_wide(positions, limits.dtype.type(min(abs(by), limits.max)), by < 0)
    by = min(max(by, _LEAST - _GREATEST), _GREATEST - _LEAST)
    if not isinstance(positions, jax.Array):
        exact = np.asarray(positions, np.int64) + by
        return np.clip(exact, _LEAST, _GREATEST).astype(np.int32)
    while by:  # JAX has no int64 by default, so `by` is added in int32 steps, usually a single one
        summand = min(max(by, -_GREATEST), _GREATEST)
        moved = positions + np.int32(summand)
        overflows = positions > _GREATEST - summand if summand > 0 else positions < _LEAST - summand
        positions = jnp.where(overflows, np.int32(_GREATEST if summand > 0 else _LEAST), moved)
        by -= summand
    return positions


def _shifted_by_array(positions: Any, by: Any) -> Any:
    """Computes `shifted` for an array `by`."""
    positions = np.int32(positions) if isinstance(positions, int) else positions
    if not integers.is_narrow(positions):
        return _shifted_wide(positions, abs(by).astype(positions.dtype), by < 0)
    # A shift across all int32 positions, by 2³² − 1, takes three int32 steps.
    for _ in range(1 if integers.is_narrow(by) else 3):
        summand = integers.clamped(by)
        moved = jnp.asarray(positions, jnp.int32) + summand
        overflows = (summand > 0) & (moved < positions)
        underflows = (summand < 0) & (moved > positions)
        moved = jnp.where(overflows, np.int32(_GREATEST), moved)
        positions = jnp.where(underflows, np.int32(_LEAST), moved)
        by = by - summand.astype(by.dtype)
    return positions


def _shifted_wide(positions: Any, distance: Any, is_left: Any) -> Any:
    """Computes `shifted` for positions wider than int32 and a distance of their dtype."""
    limits = jnp.iinfo(positions.dtype)
    least, greatest = (limits.dtype.type(x) for x in (limits.min, limits.max))
    left = jnp.maximum(positions, least + distance) - distance
    right = jnp.minimum(positions, greatest - distance) + distance
    return jnp.where(is_left, left, right)


def _checked_distance(name: str, value: Any) -> Any:
    """Checks one side of a window and returns it: None, an integer, or an int32 or int64 array."""
    if value is None or is_integer(value):
        if value is not None and value < 0:
            raise ValueError(f"Window: {name} must be None or an integer >= 0, got {value!r}")
        return value
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
        raise ValueError(f"Window: {name} must be >= 0 and fit int32, got {shown_value}")
    if value.dtype == np.uint64:
        value = jnp.minimum(value, np.uint64(2**63 - 1))
    return value.astype(jnp.int64)


@pytree_dataclass
class Window(Mask):
    """A window around each query: q − left ≤ kv ≤ q + right by position, both inclusive.

    Each side is None (unbounded), an integer, or an integer array, which may be traced: a scalar,
    or `[N]` with one distance for each head.

    Raises ValueError for negative or non-integer distances.

    >>> print(masks.Window(left=1, right=0).dense(3, 3).astype(int))
    [[1 0 0]
     [1 1 0]
     [0 1 1]]
    """

    ignores_places = True

    left: Any = None
    right: Any = None

    def __post_init__(self):
        for name in ("left", "right"):
            object.__setattr__(self, name, _checked_distance(name, getattr(self, name)))

    def axis_names_by_value(self) -> dict[str, str]:
        """The axis names of each side: none for a scalar, `N` for one distance per head."""
        return {name: letters_by_head(getattr(self, name)) for name in ("left", "right")}

    def _key_limits(self, query_for_start: Any, query_for_end: Any) -> tuple[Any, Any]:
        """Returns the position where the window of `query_for_start` starts and the position where
        the window of `query_for_end` ends; None for an unbounded side."""
        left, right = number(self.left), number(self.right)
        first_key = None if left is None else shifted(query_for_start, -left)
        return first_key, None if right is None else shifted(query_for_end, right)

    def evaluate(self, b, h, rows, columns):
        q, kv = rows.positions, columns.positions[None, :]
        allowed = jnp.ones((1, 1), bool)
        first_key, last_key = self._key_limits(q, q)
        if first_key is not None:
            allowed = allowed & (kv >= first_key[:, None])
        if last_key is not None:
            allowed = allowed & (kv <= last_key[:, None])
        return allowed

    def bounds(self, tile):
        q_lo, q_hi, kv_lo, kv_hi = _position_limits(tile)
        union_start, union_end = self._key_limits(q_lo, q_hi)  # the union of the windows
        intersection_start, intersection_end = self._key_limits(q_hi, q_lo)  # their intersection
        maybe_any, surely_all = np.True_, np.True_
        if union_start is not None:
            maybe_any = maybe_any & (kv_hi >= union_start)
            surely_all = surely_all & (kv_lo >= intersection_start)
        if union_end is not None:
            maybe_any = maybe_any & (kv_lo <= union_end)
            surely_all = surely_all & (kv_hi <= intersection_end)
        return maybe_any, surely_all


@pytree_dataclass
class Causal(Mask):
    """The causal mask, kv ≤ q by position: no query attends to a later key.

    With default positions the first query attends to the first key only, whatever T and S are. If
    the last query should attend to all keys, pass `q_positions`, for example
    `jattn.positions.aligned_to_end(T, S)`; `cached_attention` passes them by itself.

    >>> print(masks.Causal().dense(3, 3).astype(int))
    [[1 0 0]
     [1 1 0]
     [1 1 1]]
    """

    ignores_places = True

    def evaluate(self, b, h, rows, columns):
        return columns.positions[None, :] <= rows.positions[:, None]

    def bounds(self, tile):
        q_lo, q_hi, kv_lo, kv_hi = _position_limits(tile)
        return _as_truth(kv_lo <= q_hi), _as_truth(kv_hi <= q_lo)


@pytree_dataclass
class Prefix(Mask):
    """A prefix of keys to which all queries attend: kv < length by position.

    `Causal() | Prefix(n)` is a prefix LM. `length` is an integer or an integer array, scalar or
    `[*B]`.

    >>> print(masks.Prefix(2).dense(2, 3).astype(int))
    [[1 1 0]
     [1 1 0]]
    """

    ignores_places = True

    length: Any = array_field("*B")

    def __post_init__(self):
        _check_integers("Prefix", "length", self.length)
        object.__setattr__(self, "length", integers.lengths("Prefix: length", self.length))

    def evaluate(self, b, h, rows, columns):
        return is_below(columns.positions[None, :], self.length)

    def bounds(self, tile):
        limits = tile.columns.lo, tile.columns.hi
        maybe_any, surely_all = (is_below(x, self.length) for x in limits)
        return _as_truth(maybe_any), _as_truth(surely_all)


@pytree_dataclass
class Dilated(Mask):
    """The mask of keys whose distance q − kv, by position, is a multiple of `step`.

    The strided pattern of Child et al. 2019.

    >>> print(masks.Dilated(2).dense(3, 3).astype(int))
    [[1 0 1]
     [0 1 0]
     [1 0 1]]
    """

    ignores_places = True

    step: int = static_field()

    def __post_init__(self):
        if not (is_integer(self.step) and self.step >= 1):
            raise ValueError(f"Dilated: step must be an integer >= 1, got {shown(self.step)}")

    def evaluate(self, b, h, rows, columns):
        q, kv = rows.positions[:, None], columns.positions[None, :]
        limits = jnp.iinfo(q.dtype)
        if self.step < 2 ** (limits.bits - 1):
            return q % self.step == kv % self.step
        if self.step >= 2**limits.bits:
            return q == kv
        # Twice the step exceeds every distance, so only the distances 0 and step are multiples. The
        # distance may exceed the dtype of the positions, so it is unsigned.
        distance = (jnp.maximum(q, kv) - jnp.minimum(q, kv)).astype(f"uint{limits.bits}")
        return (distance == 0) | (distance == distance.dtype.type(self.step))

    def bounds(self, tile):
        q_lo, q_hi, kv_lo, kv_hi = _position_limits(tile)
        if self.step > _GREATEST:
            return np.True_, np.False_
        is_one_pair = (q_lo == q_hi) & (kv_lo == kv_hi)
        is_allowed_pair = is_one_pair & (q_lo % self.step == kv_lo % self.step)
        lo, hi = kv_lo - q_hi, kv_hi - q_lo
        may_overflow = _difference_may_overflow(kv_lo, q_hi)
        may_overflow = may_overflow | _difference_may_overflow(kv_hi, q_lo)
        # hi − hi % step is the greatest multiple of step up to hi.
        maybe_any = (hi - hi % self.step >= lo) | may_overflow
        return _as_truth(maybe_any), _as_truth((self.step == 1) | is_allowed_pair)


@pytree_dataclass
class Global(Mask):
    """Global positions: the first `n` attend to all, and all attend to them (Beltagy et al.
    2020).

    >>> print(masks.Global(1).dense(3, 3).astype(int))
    [[1 1 1]
     [1 0 0]
     [1 0 0]]
    """

    ignores_places = True

    n: int = static_field()

    def __post_init__(self):
        if not (is_integer(self.n) and self.n >= 0):
            raise ValueError(f"Global: n must be an integer >= 0, got {self.n!r}")

    def evaluate(self, b, h, rows, columns):
        is_global_query = is_below(rows.positions[:, None], self.n)
        return is_global_query | is_below(columns.positions[None, :], self.n)

    def bounds(self, tile):
        maybe_any = is_below(tile.rows.lo, self.n) | is_below(tile.columns.lo, self.n)
        surely_all = is_below(tile.rows.hi, self.n) | is_below(tile.columns.hi, self.n)
        return _as_truth(maybe_any), _as_truth(surely_all)


def _check_integers(owner: str, name: str, value: Any) -> None:
    """Raises TypeError unless the value is an integer or an integer array."""
    if is_integer(value):
        return
    if not jnp.issubdtype(getattr(value, "dtype", np.object_), jnp.integer):
        kind = getattr(value, "dtype", type_name(value))
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
                _check_integers("Lengths", name, value)
            if hasattr(value, "astype"):  # clamping to int32 changes no result, as places are int32
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
    """Returns the places in each of n ranges, clipped to the last place of an axis of `size`."""
    xp = jnp if isinstance(extent.start, jax.Array) else np
    start = xp.asarray(extent.start, np.int32).reshape(-1)
    offsets = np.arange(extent.size, dtype=np.int32)
    return xp.clip(start[:, None] + offsets[None, :], 0, size - 1)


class _Ids(NamedTuple):
    """The segment ids of each tile's queries or keys, summarised: the two least and two greatest
    ids, and the range `lo..hi` of all other ids (lo > hi if there are none). So a few ids far from
    the others, such as a padding id of −1, do not widen the range."""

    extremes: list[Any]
    lo: Any
    hi: Any

    @classmethod
    def summarise(cls, ids: AnyArray, extent: Extent) -> "_Ids":
        """Summarises the ids `[size]` in each range of an extent."""
        is_static = is_known(ids) and not isinstance(extent.start, jax.Array)
        xp, shape = np if is_static else jnp, np.shape(extent.start)
        ids_of_tile = xp.asarray(ids)[_places(extent, ids.shape[0])]
        least, greatest = ids_of_tile.min(axis=1), ids_of_tile.max(axis=1)

        def range_between(below: Any, above: Any) -> tuple[Any, Any]:
            """Returns the least and greatest of each tile's ids strictly between two ids."""
            is_between = (ids_of_tile > below[:, None]) & (ids_of_tile < above[:, None])
            lo = xp.where(is_between, ids_of_tile, integers.MOST).min(axis=1)
            return lo, xp.where(is_between, ids_of_tile, integers.LEAST).max(axis=1)

        second_least, second_greatest = range_between(least, greatest)
        other_ids = range_between(second_least, second_greatest)
        exists = second_least <= second_greatest  # else the tile has at most two different ids
        second = [xp.where(exists, x, least) for x in (second_least, second_greatest)]
        extremes = [least, greatest, *second]
        return cls([x.reshape(shape) for x in extremes], *(x.reshape(shape) for x in other_ids))

    def is_in_range(self, x: Any) -> Truth:
        """Returns whether `lo <= x <= hi`. If so, x may be one of the ids."""
        return (self.lo <= x) & (x <= self.hi)

    def may_share_an_id(self, other: "_Ids") -> Truth:
        """Returns whether queries and keys of a tile may have an id in common."""
        may_share = (self.lo <= other.hi) & (other.lo <= self.hi)
        for x in self.extremes:
            may_share = may_share | other.is_in_range(x)
        for y in other.extremes:
            may_share = may_share | self.is_in_range(y)
        for x, y in itertools.product(self.extremes, other.extremes):
            may_share = may_share | (x == y)
        return may_share

    def are_all_equal(self, other: "_Ids") -> Truth:
        """Returns whether all queries and keys of a tile have the same id."""
        (least, greatest, *_), (other_least, other_greatest, *_) = self.extremes, other.extremes
        return (least == greatest) & (other_least == other_greatest) & (least == other_least)


@pytree_dataclass
class Segments(Mask):
    """Segments, such as documents, packed in one sequence: a query attends to keys with its id.

    `q_ids` is an integer array `[*B, T]`, or `[T]` for all batch rows, and `kv_ids` is `[*B, S]`
    or `[S]`. With `kv_ids=None`, queries and keys are the same tokens and have the same ids.

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
        q = _Ids.summarise(self.q_ids, tile.rows)
        kv = _Ids.summarise(self.kv_ids, tile.columns)
        return q.may_share_an_id(kv), q.are_all_equal(kv)


@pytree_dataclass
class Padding(Mask):
    """The mask of keys that are not padding: the `attention_mask [*B, S]` of tokenizers.

    1 or True is a token, 0 or False is padding, on either side or in the middle; `[S]` holds for
    all batch rows. Queries are not masked, so the mask serves both self- and cross-attention. The
    output of a query that is padding has no meaning.

    Raises TypeError for arrays that are neither integer nor boolean, ValueError for integers other
    than 0 and 1.

    >>> print(masks.Padding(jnp.array([[1, 1, 0], [0, 1, 1]])).dense(1, 3).astype(int)[:, 0, 0])
    [[1 1 0]
     [0 1 1]]
    """

    attention_mask: Any = array_field("*B S")

    def __post_init__(self):
        array, name = self.attention_mask, "Padding: attention_mask"
        check_array(name, array, "[*B, S]", "integer or boolean", ndim=1)
        if array.dtype != jnp.bool_:
            least, most = integers.known_range(array) or (0, 1)
            if least < 0 or most > 1:
                got = shown(least if least < 0 else most)
                raise ValueError(f"{name}: expected 1 for tokens and 0 for padding, got {got}")
            object.__setattr__(self, "attention_mask", array != 0)

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
        n_rows = min(tile.rows.size, self.array.shape[0])
        n_columns = min(tile.columns.size, self.array.shape[1])
        if not n_rows or not n_columns:
            return np.False_, np.True_
        q = _places(tile.rows, self.array.shape[0])  # [n, t]
        kv = _places(tile.columns, self.array.shape[1])  # [m, s]
        by_row = self.array[q]  # [n, t, S]
        any_row, all_row = by_row.any(axis=1)[:, kv], by_row.all(axis=1)[:, kv]  # [n, m, s]
        return any_row.any(axis=-1), all_row.all(axis=-1)


_TO_FULL_RANK = (
    "mask[None, None, None, None], or masks.Full() for True and masks.Empty() for False",
    "mask[None, None, None] if it is [S], mask[None, None, :, None] if it is [T]",
    "mask[None, None] if it is [T, S], mask[:, None, None] if it is [B, S]",
)


def _check_bool(owner: str, name: str, value: Any) -> None:
    """Raises TypeError, with what to write instead, unless the value is a boolean array."""
    if not hasattr(value, "dtype") or value.dtype != jnp.bool_:
        kind = getattr(value, "dtype", type_name(value))
        raise TypeError(
            f"{owner}: {name} must be a boolean array (True = attend), got {kind}; for a "
            f"tokenizer's [B, S] array of 0 and 1, write mask=masks.Padding(array); for values to "
            f"add to the scores, write score=scores.Bias(array); otherwise write array != 0"
        )


@pytree_dataclass
class Blocks(Mask):
    """A mask of whole blocks: `layout[q_place // block, kv_place // block]`.

    `layout` is boolean `[T/block, S/block]`, or `[*B, N, T/block, S/block]` (sizes rounded up;
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
                f"got shape {list(self.layout.shape)}"
            )
        block = self.block if isinstance(self.block, tuple) else (self.block, self.block)
        if len(block) != 2 or not all(is_integer(x) and x >= 1 for x in block):
            raise ValueError(
                f"Blocks: block must be an integer >= 1 or a pair (queries, keys) of integers "
                f">= 1, got {self.block!r}"
            )

    def axis_names_by_value(self) -> dict[str, str]:
        """The axis names of the layout, without batch and heads if it has only two axes."""
        return {"layout": "Tb Sb" if self.layout.ndim == 2 else "*#B #N Tb Sb"}

    @property
    def sizes(self) -> tuple[int, int]:
        """The number of queries and of keys of a block."""
        block = self.block if isinstance(self.block, tuple) else (self.block, self.block)
        return min(block[0], integers.MOST), min(block[1], integers.MOST)

    def check_block_counts(self, T: int, S: int) -> None:
        """Raises ValueError unless the layout has exactly the blocks of T × S."""
        wanted = [-(-T // self.sizes[0]), -(-S // self.sizes[1])]
        if list(self.layout.shape[-2:]) != wanted:
            raise ValueError(
                f"Blocks: expected layout [..., T/block, S/block] = {wanted} for T = {T}, "
                f"S = {S}, block = {self.block}, got shape {list(self.layout.shape)}"
            )

    def evaluate(self, b, h, rows, columns):
        q_block, kv_block = self.sizes
        layout = jnp.asarray(self.layout) if isinstance(self.layout, np.ndarray) else self.layout
        return layout[(rows.places // q_block)[:, None], (columns.places // kv_block)[None, :]]

    def bounds(self, tile):
        """Counts the True entries of the layout under each tile, by two-dimensional prefix sums."""
        q_begin, q_end = _layout_ranges(tile.rows, self.sizes[0], self.layout.shape[0])
        kv_begin, kv_end = _layout_ranges(tile.columns, self.sizes[1], self.layout.shape[1])
        prefix_sums = jnp.pad(
            jnp.cumsum(jnp.cumsum(self.layout, 0, jnp.int32), 1, jnp.int32), ((1, 0), (1, 0))
        )
        sums_of_rows = prefix_sums[q_end] - prefix_sums[q_begin]  # [n, S/block + 1]
        count = sums_of_rows[..., kv_end] - sums_of_rows[..., kv_begin]  # [n, m]
        size = (q_end - q_begin)[:, None] * (kv_end - kv_begin)[None, :]
        return count > 0, count == size


def _layout_ranges(extent: Extent, block: int, n_blocks: int) -> tuple[Array, Array]:
    """Returns the half-open range of blocks, along one axis, that each tile overlaps."""
    begin = jnp.asarray(extent.start, jnp.int32).reshape(-1)
    end = jnp.minimum((begin + extent.size - 1) // block + 1, n_blocks)
    return jnp.minimum(begin // block, end), end


@pytree_dataclass
class Tree(Mask):
    """A tree of tokens, such as drafts that are verified together (Miao et al. 2024, SpecInfer).

    Each of the T queries attends to itself, to its ancestors, and to all keys before place `start`;
    query t is key `start + t`. `parents` is an integer array `[*B, T]`, or `[T]` for all batch
    rows: the index, among the T tokens, of each token's parent, which comes before it; −1 for a
    root. `start` is an integer or an integer array, scalar or `[*B]`: for a cache, its lengths
    before the tokens are appended.

    A token's position in its sequence is not its place but `start` plus its depth. Rotary
    embeddings, ALiBi and other functions of positions need caches with `positions=True`. Below,
    row b of `accepted [B, A]` begins with the indices of its `counts[b]` accepted tokens:

        caches = model.start(B, length, positions=True)
        ...
        start = caches[0].lengths
        tree = masks.Tree(parents, start)
        positions = start[:, None] + tree.depths
        logits, caches = model.step(drafts, caches, mask=tree, positions=positions)
        caches = [cache.keep(start, accepted, counts) for cache in caches]

    Raises TypeError unless `parents` and `start` are integers, ValueError for a parent that does
    not come before its child. If `parents` is traced, such a parent counts as −1 instead.

    >>> print(masks.Tree(jnp.array([-1, 0, 0, 1]), start=1).dense(4, 5).astype(int))
    [[1 1 0 0 0]
     [1 1 1 0 0]
     [1 1 0 1 0]
     [1 1 1 0 1]]
    """

    ancestors: Any = array_field("*B T D")  # [t, d]: whether token t sees token d; D = T
    start: Any = array_field("*B", default=0)

    def __init__(self, parents: Any, start: Any = 0):
        check_array("Tree: parents", parents, "[*B, T]", "integer", ndim=1)
        _check_integers("Tree", "start", start)
        least, _ = integers.known_range(start) or (0, 0)
        if least < 0:
            raise ValueError(f"Tree: start must be >= 0, got {least}")
        start = integers.clamped(start)
        start = StaticInt(start) if is_integer(start) else start
        vars(self).update(ancestors=_ancestors(parents), start=start)

    @property
    def depths(self) -> Int[AnyArray, "*B T"]:
        """The number of ancestors of each token."""
        return self.ancestors.sum(axis=-1, dtype=np.int32) - np.int32(1)

    def evaluate(self, b, h, rows, columns):
        start, D = number(self.start), self.ancestors.shape[-1]
        is_before = is_below(columns.places, self.start)[None, :]
        if not D:
            return is_before
        drafts = columns.places - start
        is_draft = (drafts >= 0) & (drafts < D)
        seen = jnp.take(jnp.asarray(self.ancestors), jnp.clip(drafts, 0, D - 1), axis=1)
        return is_before | (is_draft[None, :] & seen)

    def bounds(self, tile):
        # Query t attends to no key after place start + t.
        last_query = tile.rows.start + (tile.rows.size - 1)
        last_key = tile.columns.start + (tile.columns.size - 1)
        maybe_any = tile.columns.start - last_query <= number(self.start)
        return _as_truth(maybe_any), _as_truth(is_below(last_key, self.start))


def _ancestors(parents: Int[AnyArray, "*B T"]) -> Bool[AnyArray, "*B T T"]:
    """Returns `[*B, t, d]`: whether token d is token t itself or one of its ancestors."""
    T = parents.shape[-1]
    places = np.arange(T)
    if is_known(parents):
        parents = np.asarray(parents)
        wrong = np.argwhere((parents < -1) | (parents >= places))
        if len(wrong):
            *_, t = index = tuple(map(int, wrong[0]))
            raise ValueError(
                f"Tree: parents must be -1 or the index of an earlier token, got "
                f"{int(parents[index])} for token {t}"
            )
        ancestors = np.broadcast_to(np.eye(T, dtype=bool), (*parents.shape, T)).copy()
        for t in range(1, T):
            parent = np.asarray(parents[..., t, None, None], np.int64)
            inherited = np.take_along_axis(ancestors, np.maximum(parent, 0), axis=-2)[..., 0, :]
            ancestors[..., t, :] |= inherited & (parent[..., 0] >= 0)
        return ancestors
    child = places.astype(np.int32).reshape(*(1,) * (parents.ndim - 1), T)
    parents = jnp.asarray(integers.clamped(parents))
    parents = jnp.where(parents < child, parents, -1)
    identity = np.eye(T, dtype=bool).reshape(*child.shape[:-1], T, T)
    reached = ((parents[..., None] == child[..., None, :]) | identity).astype(jnp.float32)
    for _ in range(max(T - 1, 1).bit_length()):  # each product doubles the length of the paths
        reached = jnp.minimum(reached @ reached, 1)
    return reached > 0


_EXAMPLES = (jax.ShapeDtypeStruct((), jnp.int32),) * 4  # a batch row, a head, a query, a key


@pytree_dataclass
class Predicate(Mask):
    """A mask given by a function of scalars, as in FlexAttention.

    `fn(b, h, q_idx, kv_idx, *operands) -> bool` gets a batch row, a head, and the positions of a
    query and a key; with several batch axes, b is the row-major index over all of them. Operands
    are passed whole, so the function may index them. It may also read other variables: each call of
    attention uses their current values. If all of these are numbers, strings, arrays, or functions
    that read only such values, the function is traced again only after one of them changed. If it
    reads lists, dicts or attributes of objects, each call traces it again, but compiles again only
    if the traced program differs.

    Empty and full tiles are found by interval arithmetic on the function's operations, as far as
    `functions.interval_rules` has rules for these. `bounds`, a function from a grid of n × m tiles
    (see `Tile`) to `(maybe_any, surely_all)`, replaces this analysis. It is called once for a grid,
    not for each tile, and both results broadcast to `[n, m]`. The bounds of
    `kv_idx > q_idx + 200` are

        lambda tile: (
            tile.columns.hi > tile.rows.lo + 200, tile.columns.lo > tile.rows.hi + 200
        )

    `check_bounds` compares such bounds with the function. The bounds may read outer numbers and
    arrays, `jnp` and `np`. If they read outer lists, outer dicts or attributes of outer objects,
    which may change before gradients are computed, attention analyses the function instead.

    >>> print(masks.Predicate(lambda b, h, q, kv: (q + kv) % 2 == 0).dense(3, 3).astype(int))
    [[1 0 1]
     [0 1 0]
     [1 0 1]]
    """

    ignores_places = True

    fn: Callable[..., Any] = static_field()
    operands: tuple[Any, ...] = ()
    bounds_fn: Callable[[Tile], tuple[Truth, Truth]] | None = static_field(default=None)

    def __init__(
        self,
        fn: Callable[..., Any],
        *operands: Any,
        bounds: Callable[[Tile], tuple[Truth, Truth]] | None = None,
    ):
        check_rule("mask", fn, ("b", "h", "q_idx", "kv_idx"), operands)
        if bounds is not None:
            check_function("Predicate: bounds", bounds)
        check_operands("Predicate", operands)
        vars(self).update(fn=fn, operands=operands, bounds_fn=bounds)

    def traced(self) -> "Predicate":
        """Returns this mask with its function traced.

        The traced function keeps the present values of other variables that the function reads.

        Raises:
            TypeError: the function does not return a boolean scalar.
        """
        if isinstance(self.fn, TracedFunction):
            return self
        with explained("mask", self.fn):
            axisless_fn = without_named_axes("mask", self.fn, *_EXAMPLES, *self.operands)
        if axisless_fn is not self.fn:  # the function reads a named axis, as in `shard_map`
            return Predicate(axisless_fn, *self.operands, bounds=self.bounds_fn).traced()
        name, bounds = function_name(self.fn), self.bounds_fn and frozen(self.bounds_fn)
        fn, operands = program_of(name, self.fn, self._scalar, self.operands, *_EXAMPLES)
        traced = object.__new__(Predicate)  # __init__ would check the signature again
        # Bounds whose variables may change are dropped, as bounds only save time.
        bounds = bounds if bounds and is_frozen(bounds) else None
        vars(traced).update(fn=fn, operands=operands, bounds_fn=bounds)
        return traced

    def _scalar(self, b: Index, h: Index, q: Any, kv: Any, *operands: Any) -> Bool[Array, ""]:
        with explained("mask", self.fn):
            truth = self.fn(b, h, q, kv, *(operands or self.operands))
        return check_returned("mask", self.fn, truth, "boolean")

    def evaluate(self, b, h, rows, columns):
        b, h = jnp.asarray(b, jnp.int32), jnp.asarray(h, jnp.int32)
        over_keys = jax.vmap(self._scalar, (None, None, None, 0))
        over_pairs = jax.vmap(over_keys, (None, None, 0, None))
        with _promotion(rows.positions.dtype):
            return over_pairs(b, h, rows.positions, columns.positions)

    def analysed(self, tile: Tile) -> "Predicate | _AnalysedFunction":
        """Returns an object whose method `bounds` computes bounds from the function's expression;
        or this mask, if the user passed bounds."""
        if self.bounds_fn is not None:
            return self
        q, _, kv, _ = _as_one_dtype(_position_limits(tile))
        with _promotion(q.dtype):
            dtypes = np.int32, np.int32, q.dtype, kv.dtype
            return _AnalysedFunction(read(as_new_function(self._scalar), dtypes, self.operands))

    def bounds(self, tile):
        if self.bounds_fn is None:
            return self.analysed(tile).bounds(tile)
        returned = self.bounds_fn(tile)
        if not isinstance(returned, tuple | list) or len(returned) != 2:
            raise TypeError(
                f"Predicate: bounds must return a pair (maybe_any, surely_all), got "
                f"{shown(returned)}"
            )
        names = ("maybe_any", "surely_all")
        maybe_any, surely_all = map(_checked_truth, names, returned, [tile.shape] * 2)
        return maybe_any, surely_all


class _AnalysedFunction:
    """The expression of a `Predicate`'s function, with bounds by interval arithmetic."""

    def __init__(self, expression: Expression):
        self.expression = expression

    def bounds(self, tile: Tile) -> tuple[Truth, Truth]:
        """Returns `(maybe_any, surely_all)`, see `Mask.bounds`."""
        q_lo, q_hi, kv_lo, kv_hi = _as_one_dtype(_position_limits(tile))
        row_and_head = _index_interval(tile.b), _index_interval(tile.h)
        indices = (*row_and_head, Interval(q_lo, q_hi), Interval(kv_lo, kv_hi))
        with _promotion(q_lo.dtype):
            truth = intervals.of(self.expression, indices)
        return truth.hi, truth.lo


def _as_one_dtype(limits: tuple[Any, ...]) -> list[Any]:
    """Returns limits of positions as int32 arrays, or all as int64 if one needs 64 bits."""
    limits = tuple(x if isinstance(x, jax.Array) else np.asarray(x) for x in limits)
    is_int32 = all(map(integers.fits, limits))
    return [x.astype(np.int32 if is_int32 else np.int64) for x in limits]


def _promotion(dtype: Any) -> Any:
    """Returns a context in which user functions may combine int32 numbers and int64 positions."""
    is_narrow = np.dtype(dtype).itemsize <= 4
    return contextlib.nullcontext() if is_narrow else jax.numpy_dtype_promotion("standard")


def _index_interval(index: Any) -> Interval:
    """Returns the interval of one batch row or head, or of all of them if `index` is None."""
    if index is None:
        return Interval(np.int32(0), np.int32(_GREATEST))
    index = index.astype(jnp.int32) if isinstance(index, jax.Array) else np.int32(index)
    return Interval(index, index)


def _checked_truth(name: str, value: Any, shape: Shape) -> Truth:
    """Returns a result of a user's bounds as a boolean array that broadcasts to `[n, m]`."""
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
            f"shape {list(np.shape(value))}; the fields of tile.rows are already [n, 1] and "
            f"those of tile.columns [1, m]"
        )
    return _as_truth(value)


EMPTY = 0
"""The value of `tile_map` for a tile without allowed pairs."""
MIXED = 1
"""The value of `tile_map` for a tile that is not known to be empty or full."""
FULL = 2
"""The value of `tile_map` for a tile in which all pairs are allowed."""


def extents(size: int, block: int, positions: Indices | None = None) -> Extent:
    """Splits an axis of `size` into tiles of `block`.

    If `block` does not divide `size`, the last tile still has the size `block`: its places run past
    the end of the axis, but its limits `lo..hi` ignore positions past the end.
    """
    starts = np.arange(0, size, block, dtype=np.int32)
    if positions is None:
        return Extent(starts, np.minimum(starts + block, size) - 1, starts, block)
    # Places past the end repeat the last position, which changes neither minimum nor maximum.
    by_tile = positions[np.minimum(starts[:, None] + np.arange(block), size - 1)]
    return Extent(by_tile.min(axis=1), by_tile.max(axis=1), starts, block)


def kinds(mask: Mask, tile: Tile) -> Int[Array | np.ndarray, "n m"]:
    """Returns EMPTY, MIXED or FULL for each tile. The caller has selected array fields for one
    (b, h).

    Bounds decide first. Then `_refined_bounds` examines the mixed tiles, under three conditions:
    many tiles are mixed; bounds and positions are static; and the mask contains functions, but no
    arrays and no parts that depend on places.
    """
    analysed = _map_functions(lambda x: x.analysed(tile), mask)
    maybe_any, surely_all = analysed.bounds(tile)
    kind = maybe_any.astype(np.int8) + (maybe_any & surely_all).astype(np.int8)
    if isinstance(kind, jax.Array):
        return jnp.broadcast_to(kind, tile.shape)
    kind = np.broadcast_to(kind, tile.shape)
    limits = undecided.boxes(_position_limits(tile), kind == MIXED, int(np.count_nonzero(kind)))
    if limits is None:  # positions are traced, or few tiles are mixed
        return kind
    mask = _map_functions(lambda x: x.traced(), mask)
    functions = _functions_to_evaluate(mask)
    if not functions:
        return kind
    maybe_any, surely_all = _refined_bounds(mask, analysed, functions, tile, limits)
    decided = kind.copy()
    decided[kind == MIXED] = np.where(surely_all, FULL, np.where(maybe_any, MIXED, EMPTY))
    return decided


def _map_functions(change: Callable[["Predicate"], Any], mask: Mask) -> Any:
    """Returns the mask with `change` applied to each of its predicates."""
    is_function = lambda x: isinstance(x, Predicate)  # noqa: E731
    return jax.tree.map(lambda x: change(x) if is_function(x) else x, mask, is_leaf=is_function)


def _refined_bounds(
    mask: Mask, analysed: Any, functions: list[Predicate], tile: Tile, limits: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Computes `(maybe_any, surely_all)` of undecided tiles.

    First it computes bounds of smaller parts of each tile, then evaluates all pairs of the tiles
    that are still undecided. `limits [u, 4]` are the position limits of the u undecided tiles. The
    tiles are treated as if they contained every position within their limits.
    """

    def bounds_of(limits: np.ndarray) -> tuple[Truth, Truth]:
        q_lo, q_hi, kv_lo, kv_hi = limits.T
        parts = Tile(Extent(q_lo, q_hi, q_lo, 1), Extent(kv_lo, kv_hi, kv_lo, 1))
        parts.b, parts.h = tile.b, tile.h
        return analysed.bounds(parts)

    is_decided = np.zeros(len(limits), bool)
    maybe_any, surely_all = ~is_decided, is_decided
    # A Predicate left in `analysed` has a bounds function that the user passed. That function
    # expects a grid, with fields [n, 1] and [1, m], but `bounds_of` passes a list of p parts, with
    # all fields [p]. So parts are tried only if no such Predicate is left.
    if not _parts_of(analysed, Predicate):
        maybe_any, surely_all, is_decided = undecided.by_parts(limits, bounds_of)
    b, h = (int(x) if isinstance(x, int | np.integer) else 0 for x in (tile.b, tile.h))
    is_one_head = all(isinstance(x, int | np.integer) for x in (tile.b, tile.h))
    # All pairs are evaluated for a single (b, h). This is valid if the tile has integers b and h,
    # or if no function reads b or h, its first two arguments.
    if is_decided.all() or not (
        is_one_head or not any(dependence.reads(x._scalar, 4) & {0, 1} for x in functions)
    ):
        return maybe_any, surely_all

    def evaluate(q: Array, kv: Array) -> Array:
        allowed = mask.evaluate(b, h, Span(q, q), Span(kv, kv))
        return jnp.broadcast_to(allowed, (q.size, kv.size))

    exact = undecided.truths((mask, b, h), evaluate, limits[~is_decided], math.prod(tile.shape))
    if exact is not None:
        maybe_any[~is_decided], surely_all[~is_decided] = exact
    return maybe_any, surely_all


def _functions_to_evaluate(mask: Mask) -> list[Predicate]:
    """Returns the predicates of a mask, or [] if the mask has arrays or depends on places."""
    is_leaf = lambda x: isinstance(x, Mask) and not isinstance(x, And | Or | Not)  # noqa: E731
    leaves = jax.tree.leaves(mask, is_leaf=is_leaf)
    if jax.tree.leaves(mask) or not all(x.ignores_places for x in leaves):
        return []
    return [x for x in leaves if isinstance(x, Predicate)]


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

    Returns int8 `[⌈T/block_q⌉, ⌈S/block_kv⌉]`, a NumPy array if mask and positions are static. Time
    and memory grow with the number of tiles, the sizes of the mask's arrays and, for functions, the
    query-key pairs in tiles that bounds leave undecided.

    >>> print(masks.tile_map(masks.Causal(), 8, 8, 2, 4))
    [[1 0]
     [1 0]
     [2 1]
     [2 1]]
    """
    for name, size in (("T", T), ("S", S), ("block_q", block_q), ("block_kv", block_kv)):
        check_size(name, size, 0 if name in "TS" else 1)
    mask = as_mask(mask)
    _check_axis_lengths(mask, T, S)
    _check_head(*leading(mask), b, h)
    q, kv = _checked_positions(T, S, positions)
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
    """Checks the bounds of a mask against the mask itself, evaluated for all pairs.

    Use it for bounds written by hand, in a `Predicate` or in a mask class of your own: attention
    trusts them, and wrong bounds make it skip allowed keys or attend to masked ones. Tiles are
    `[block_q, block_kv]`. The mask is evaluated for one row of tiles at a time, T × S pairs in all,
    for each batch row and head. For the other arguments see `Mask.dense`.

    Raises ValueError for the first tile whose bounds are wrong, naming a pair in it.

    >>> bounds = lambda tile: (tile.columns.hi > tile.rows.lo, tile.columns.lo > tile.rows.hi)
    >>> mask = masks.Predicate(lambda b, h, q, kv: kv > q, bounds=bounds)
    >>> masks.check_bounds(mask, 32, 32, block_q=8, block_kv=8)
    """
    mask, (mask_batch, mask_heads) = as_mask(mask), leading(as_mask(mask))
    heads = (mask_heads or 1) if heads is None else heads
    check_sizes(T=T, S=S, block_q=block_q, block_kv=block_kv, heads=heads)
    B = _batch_shape(batch) or mask_batch
    with jax.ensure_compile_time_eval():
        q, kv = _checked_positions(T, S, positions)
        both_positions: Positions = {"q_positions": q, "kv_positions": kv}
        i, j = (np.asarray(x.positions) for x in (span(T, q), span(S, kv)))
        flattened, columns = flatten_batch(mask, B), Span(j, np.arange(S))
        for b, h in np.ndindex(math.prod(B), heads):
            tile_kinds = np.asarray(
                tile_map(flattened, T, S, block_q, block_kv, b=b, h=h, **both_positions)
            )
            for n, kinds_of_row in enumerate(tile_kinds):
                places = np.arange(n * block_q, min(T, (n + 1) * block_q))
                allowed = np.asarray(flattened(b, h, Span(i[places], places), columns))
                for m, kind in enumerate(kinds_of_row):
                    in_tile = allowed[:, m * block_kv : (m + 1) * block_kv]
                    wrongly_empty = kind == EMPTY and in_tile.any()
                    if wrongly_empty or (kind == FULL and not in_tile.all()):
                        _raise_wrong_bounds(int(kind), in_tile, (b, h), (n * block_q, m * block_kv))


def _raise_wrong_bounds(
    kind: int, allowed: np.ndarray, head: tuple[int, int], start: tuple[int, int]
) -> None:
    """Raises the error for a tile whose bounds wrongly say that it is empty or full; `allowed`
    `[t, s]` is the mask of its pairs."""
    i, j = np.argwhere(allowed if kind == EMPTY else ~allowed)[0] + start
    claim, verb = ("no pair", "is") if kind == EMPTY else ("every pair", "is not")
    rows, columns = (f"{x}..{x + size - 1}" for x, size in zip(start, allowed.shape, strict=True))
    raise ValueError(
        f"bounds: they say that {claim} is allowed in the tile of queries {rows} and keys "
        f"{columns} of batch row {head[0]} and head {head[1]}, but query {i} {verb} allowed to "
        f"attend to key {j} (numbers are indices in the arrays, not positions)"
    )
