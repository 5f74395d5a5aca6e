"""Who may attend to whom: an algebra of masks.

A mask is a frozen pytree. Leaves combine with `&`, `|` and `~`, and every mask has exactly two
operations; the dense form, the tile map and the pictures are derived from them.

* `mask(b, h, rows, columns) -> bool [t, s]`: the truth for a block of queries and keys, True
  where a query may attend;
* `mask.bounds(tile) -> (maybe_any, surely_all)`: what is certain about a whole tile, by interval
  arithmetic in the leaves and three-valued logic in the nodes. It may be vague, never wrong.

There are two coordinates, equal by default. *Positions* are what formulas see (Causal, Window,
Prefix, Dilated, Global, Predicate). *Places* index the arrays (Segments, Lengths, Dense, Blocks).
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jattn._types import (
    Allowed,
    Indices,
    Shape,
    along,
    declared,
    is_static,
    node,
    number,
    opened,
    static,
)


Truth = Any  # bool [n_rows, n_columns], NumPy's where all is known while tracing


class Span(NamedTuple):
    """A run of queries or keys: their positions, and their places in the arrays."""

    positions: Indices
    places: Indices

    @property
    def consecutive(self) -> bool:
        """Whether positions are known to follow one another; others may do so by chance."""
        return self.positions is self.places


class Extent(NamedTuple):
    """The run of queries or keys that a tile covers; arrays `[n]` describe n tiles at once.

    Positions lie in `lo..hi`, both inclusive; places are `start..start + size - 1`.
    """

    lo: Any
    hi: Any
    start: Any
    size: int


class Tile(NamedTuple):
    """A box of queries × keys."""

    rows: Extent
    columns: Extent


def _column(value: Any) -> Any:
    return value[:, None] if getattr(value, "ndim", 0) else value


def _row(value: Any) -> Any:
    return value[None, :] if getattr(value, "ndim", 0) else value


def _ends(tile: Tile) -> tuple[Any, Any, Any, Any]:
    """Least and greatest position of the rows, then of the columns."""
    rows, columns = tile
    return _column(rows.lo), _column(rows.hi), _row(columns.lo), _row(columns.hi)


def _far_apart(a: Any, b: Any) -> Any:
    """Whether a − b may have more than 32 bits, by the difference of their halves."""
    return abs((a >> 1) - (b >> 1)) >= 2**30 - 1


def _as_truth(value: Any) -> Truth:
    return value if isinstance(value, jax.Array) else np.asarray(value, bool)


class Mask:
    """The base of all masks: operators, and what follows from the two operations."""

    __array_ufunc__ = None  # so that `array & mask` asks the mask, not NumPy

    def evaluate(self, b: Any, h: Any, rows: Span, columns: Span) -> Allowed:
        """The truth where arrays are already picked for (b, h) and cut to rows and columns.

        Sizes of 1 broadcast.
        """
        raise NotImplementedError

    def bounds(self, tile: Tile) -> tuple[Truth, Truth]:
        """`(maybe_any, surely_all)`: False in the first means nothing in the tile is allowed,
        True in the second that everything is. Arrays must be picked for one (b, h)."""
        raise NotImplementedError

    def __call__(
        self, b: Any, h: Any, rows: Indices | Span, columns: Indices | Span
    ) -> Bool[Array, "t s"]:
        """bool `[t, s]` for batch row `b` (flat), head `h` and any queries and keys.

        Plain arrays are positions and places at once; a `Span` gives both.
        """
        i, j = as_span(rows), as_span(columns)
        flat = flatten_batch(self, leading(self)[0])
        allowed = cut(pick(flat, b, h), i.places, j.places).evaluate(b, h, i, j)
        return jnp.broadcast_to(allowed, (len(i.places), len(j.places)))

    def __and__(self, other: Any) -> "Mask":
        return And(self, as_mask(other))

    def __or__(self, other: Any) -> "Mask":
        return Or(self, as_mask(other))

    def __invert__(self) -> "Mask":
        return Not(self)

    __rand__ = __and__
    __ror__ = __or__

    def dense(
        self,
        T: int,
        S: int,
        *,
        batch: tuple[int, ...] | None = None,
        heads: int | None = None,
        q_positions: Indices | None = None,
        kv_positions: Indices | None = None,
    ) -> Bool[Array, "*B T S"] | Bool[Array, "*B N T S"]:
        """The mask as an array: bool `[T, S]`, or `[*B, N, T, S]` where batch or heads matter.

        `batch` and `heads` are taken from the mask's own arrays unless given. Positions, `[T]` and
        `[S]`, are `arange` by default.
        """
        own_batch, own_heads = leading(self)
        lead, N = batch or own_batch, heads or own_heads
        flat = flatten_batch(self, lead)
        i, j = span(T, q_positions), span(S, kv_positions)

        def one(b: Any, h: Any) -> Array:
            allowed = cut(pick(flat, b, h), i.places, j.places).evaluate(b, h, i, j)
            return jnp.broadcast_to(allowed, (T, S))

        if not lead and not N:
            return one(0, 0)
        every = jax.vmap(jax.vmap(one, (None, 0)), (0, None))
        allowed = every(jnp.arange(math.prod(lead)), jnp.arange(N or 1))
        return allowed.reshape(*lead, N or 1, T, S)


def as_mask(value: Any) -> Mask:
    """A mask as it is, a boolean array as `Dense`, None as `Full`.

    Raises TypeError for anything else.
    """
    if value is None:
        return Full()
    if isinstance(value, Mask):
        return value
    if hasattr(value, "dtype"):
        return Dense(value)
    raise TypeError(
        f"mask: expected a jattn mask, a boolean array [*B, N, T, S] or None, "
        f"got {type(value).__name__}"
    )


def as_span(value: Indices | Span) -> Span:
    """Positions that are places too, or a `Span` as it is."""
    if isinstance(value, Span):
        return value
    indices = jnp.asarray(value, jnp.int32)
    return Span(indices, indices)


def span(size: int, positions: Indices | None = None) -> Span:
    """All places of an axis, at the given positions (by default the same)."""
    places = jnp.arange(size, dtype=jnp.int32)
    return Span(places if positions is None else jnp.asarray(positions, jnp.int32), places)


def leading(tree: Any) -> tuple[Shape, int]:
    """The batch axes and the number of heads that the arrays of a mask or a spec show."""
    batch: Shape = ()
    heads = 0
    for leaf, letters in zip(jax.tree.leaves(tree), jax.tree.leaves(declared(tree)), strict=True):
        named, lead = _split(letters, leaf)
        batch = jnp.broadcast_shapes(batch, leaf.shape[:lead])
        if "N" in named and leaf.shape[lead + named.index("N")] > 1:
            heads = leaf.shape[lead + named.index("N")]
    return batch, heads


def _split(letters: str, leaf: Any) -> tuple[list[str], int]:
    """The letters of an array's own axes, and how many batch axes stand before them."""
    named = [x for x in letters.replace("#", "").split() if x != "*B"]
    return named, leaf.ndim - len(named) if "*B" in letters.replace("#", "") else 0


def flatten_batch(tree: Any, batch: Shape) -> Any:
    """The tree with the batch axes of its arrays as one leading axis, of size B or 1."""

    def one(letters: str, leaf: Any) -> Any:
        if "B" not in letters:
            return leaf
        _, lead = _split(letters, leaf)
        own, rest = leaf.shape[:lead], leaf.shape[lead:]
        if math.prod(own) == 1:
            return leaf.reshape(1, *rest)
        return jnp.broadcast_to(leaf, (*batch, *rest)).reshape(math.prod(batch), *rest)

    return jax.tree.map(one, declared(tree), tree)


def pick(tree: Any, b: Any, h: Any) -> Any:
    """The tree for one (b, h): batch and head axes of its arrays indexed away.

    Its arrays have one batch axis, see `flatten_batch`, or none.
    """

    def one(letters: str, leaf: Any) -> Any:
        named, lead = _split(letters, leaf)
        if lead:
            leaf = leaf[b if leaf.shape[0] != 1 else 0]
        if "N" in named:
            axis = named.index("N")
            leaf = jnp.take(leaf, h if leaf.shape[axis] > 1 else 0, axis=axis)
        return leaf

    return jax.tree.map(one, declared(tree), tree)


def cut(tree: Any, rows: Indices, columns: Indices) -> Any:
    """The picked tree with arrays along T and S taken at these places."""

    def one(letters: str, leaf: Any) -> Any:
        named = [x for x in letters.replace("#", "").split() if x not in ("*B", "N")]
        for letter, places in (("T", rows), ("S", columns)):
            if letter in named and leaf.shape[named.index(letter)] > 1:
                leaf = jnp.take(leaf, places, axis=named.index(letter))
        return leaf

    return jax.tree.map(one, declared(tree), tree)


@node
class And(Mask):
    """Both allow."""

    left: Mask
    right: Mask

    def evaluate(self, b, h, rows, columns):
        return self.left.evaluate(b, h, rows, columns) & self.right.evaluate(b, h, rows, columns)

    def bounds(self, tile):
        (any_l, all_l), (any_r, all_r) = self.left.bounds(tile), self.right.bounds(tile)
        return any_l & any_r, all_l & all_r


@node
class Or(Mask):
    """One of the two allows."""

    left: Mask
    right: Mask

    def evaluate(self, b, h, rows, columns):
        return self.left.evaluate(b, h, rows, columns) | self.right.evaluate(b, h, rows, columns)

    def bounds(self, tile):
        (any_l, all_l), (any_r, all_r) = self.left.bounds(tile), self.right.bounds(tile)
        return any_l | any_r, all_l | all_r


@node
class Not(Mask):
    """The other does not allow."""

    inner: Mask

    def evaluate(self, b, h, rows, columns):
        return ~self.inner.evaluate(b, h, rows, columns)

    def bounds(self, tile):
        maybe_any, surely_all = self.inner.bounds(tile)
        return ~surely_all, ~maybe_any


@node
class Full(Mask):
    """Every query attends to every key."""

    def evaluate(self, b, h, rows, columns):
        return jnp.ones((1, 1), bool)

    def bounds(self, tile):
        return np.True_, np.True_


@node
class Empty(Mask):
    """No query attends to any key."""

    def evaluate(self, b, h, rows, columns):
        return jnp.zeros((1, 1), bool)

    def bounds(self, tile):
        return np.False_, np.False_


def _is_integer(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


_LEAST, _GREATEST = -(2**31), 2**31 - 1  # positions have 32 bits, their differences 33


def shifted(positions: Any, by: int) -> Any:
    """positions + by, held within 32 bits."""
    if not isinstance(positions, jax.Array):
        wide = np.asarray(positions, np.int64) + by
        return np.clip(wide, _LEAST, _GREATEST).astype(np.int32)
    while by:  # in steps of 32 bits, of which nearly always one is enough
        step = min(max(by, -_GREATEST), _GREATEST)
        moved = positions + np.int32(step)
        over = positions > _GREATEST - step if step > 0 else positions < _LEAST - step
        positions = jnp.where(over, np.int32(_GREATEST if step > 0 else _LEAST), moved)
        by -= step
    return positions


@node
class Window(Mask):
    """q − left ≤ kv ≤ q + right by position, both inclusive; None is unbounded.

    Raises ValueError for negative or non-integer distances.
    """

    left: int | None = static(default=None)
    right: int | None = static(default=None)

    def __post_init__(self):
        for name in ("left", "right"):
            value = getattr(self, name)
            if value is not None and not (_is_integer(value) and value >= 0):
                raise ValueError(f"Window: {name} must be None or an integer >= 0, got {value!r}")
            if value is not None and value >= 2**32:  # no two positions are further apart
                object.__setattr__(self, name, None)

    def evaluate(self, b, h, rows, columns):
        q, kv = rows.positions, columns.positions[None, :]
        allowed = jnp.ones((1, 1), bool)
        if self.left is not None:
            allowed = allowed & (kv >= shifted(q, -self.left)[:, None])
        if self.right is not None:
            allowed = allowed & (kv <= shifted(q, self.right)[:, None])
        return allowed

    def bounds(self, tile):
        q_lo, q_hi, kv_lo, kv_hi = _ends(tile)
        maybe_any, surely_all = np.True_, np.True_
        if self.left is not None:
            maybe_any = maybe_any & (kv_hi >= shifted(q_lo, -self.left))
            surely_all = surely_all & (kv_lo >= shifted(q_hi, -self.left))
        if self.right is not None:
            maybe_any = maybe_any & (kv_lo <= shifted(q_hi, self.right))
            surely_all = surely_all & (kv_hi <= shifted(q_lo, self.right))
        return maybe_any, surely_all


@node
class Causal(Mask):
    """kv ≤ q by position: no query sees the future.

    With default positions the first query sees the first key only, whatever T and S are; for
    decoding, pass `q_positions`.
    """

    def evaluate(self, b, h, rows, columns):
        return columns.positions[None, :] <= rows.positions[:, None]

    def bounds(self, tile):
        q_lo, q_hi, kv_lo, kv_hi = _ends(tile)
        return _as_truth(kv_lo <= q_hi), _as_truth(kv_hi <= q_lo)


@node
class Prefix(Mask):
    """kv < length by position: everybody sees the prefix. `Causal() | Prefix(n)` is a prefix LM.

    `length` is an integer or an integer array, scalar or `[*B]`.
    """

    length: Any = along("*B")

    def __post_init__(self):
        _check_lengths("Prefix", "length", self.length)

    def evaluate(self, b, h, rows, columns):
        return columns.positions[None, :] < _length(self.length)

    def bounds(self, tile):
        length = _length(self.length)
        return (
            _as_truth(_row(tile.columns.lo) < length),
            _as_truth(_row(tile.columns.hi) < length),
        )


@node
class Dilated(Mask):
    """(q − kv) is a multiple of `step`, by position (Child et al. 2019, strided pattern)."""

    step: int = static()

    def __post_init__(self):
        if not (_is_integer(self.step) and self.step >= 1):
            raise ValueError(f"Dilated: step must be an integer >= 1, got {self.step!r}")

    def evaluate(self, b, h, rows, columns):
        q, kv = rows.positions[:, None], columns.positions[None, :]
        if self.step >= 2**32:
            return q == kv
        if self.step > _GREATEST:  # equal, or at a distance of as many bits
            apart = (jnp.maximum(q, kv) - jnp.minimum(q, kv)).astype(jnp.uint32)
            return (apart == 0) | (apart == np.uint32(self.step))
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


@node
class Global(Mask):
    """The first `n` positions attend to all and are attended by all (Beltagy et al. 2020)."""

    n: int = static()

    def __post_init__(self):
        if not (_is_integer(self.n) and self.n >= 0):
            raise ValueError(f"Global: n must be an integer >= 0, got {self.n!r}")

    def evaluate(self, b, h, rows, columns):
        return (rows.positions[:, None] < self.n) | (columns.positions[None, :] < self.n)

    def bounds(self, tile):
        q_lo, q_hi, kv_lo, kv_hi = _ends(tile)
        some = (q_lo < self.n) | (kv_lo < self.n)
        return _as_truth(some), _as_truth((q_hi < self.n) | (kv_hi < self.n))


def _check_lengths(owner: str, name: str, value: Any) -> None:
    if value is None or _is_integer(value):
        return
    if not jnp.issubdtype(getattr(value, "dtype", np.object_), jnp.integer):
        kind = getattr(value, "dtype", type(number(value)).__name__)
        raise TypeError(f"{owner}: {name} must be an integer or an integer array, got {kind}")


def _length(value: Any) -> Any:
    return number(value) if is_static(value) else value.astype(np.int32)


def _check_ids(owner: str, name: str, value: Any) -> None:
    if not hasattr(value, "ndim") or not jnp.issubdtype(value.dtype, jnp.integer):
        kind = getattr(value, "dtype", type(value).__name__)
        raise TypeError(f"{owner}: {name} must be an integer array, got {kind}")


@node
class Lengths(Mask):
    """Place < length, for queries, keys or both: what padding leaves.

    `q` and `kv` are integers or integer arrays, scalar or `[*B]`; None is unbounded.
    """

    q: Any = along("*B", default=None)
    kv: Any = along("*B", default=None)

    def __post_init__(self):
        _check_lengths("Lengths", "q", self.q)
        _check_lengths("Lengths", "kv", self.kv)

    def evaluate(self, b, h, rows, columns):
        allowed = jnp.ones((1, 1), bool)
        if self.q is not None:
            allowed = allowed & (rows.places[:, None] < _length(self.q))
        if self.kv is not None:
            allowed = allowed & (columns.places[None, :] < _length(self.kv))
        return allowed

    def bounds(self, tile):
        maybe_any, surely_all = np.True_, np.True_
        for length, extent, turn in ((self.q, tile.rows, _column), (self.kv, tile.columns, _row)):
            if length is not None:
                start = turn(extent.start)
                maybe_any = maybe_any & (start < _length(length))
                surely_all = surely_all & (start + extent.size <= _length(length))
        return maybe_any, surely_all


def _places(extent: Extent, size: int) -> Int[Array | np.ndarray, "n t"]:
    """Places of each tile in an array of this size; those past the end repeat the last."""
    start = jnp.atleast_1d(jnp.asarray(extent.start, jnp.int32))
    offsets = jnp.arange(extent.size, dtype=jnp.int32)
    return jnp.clip(start[:, None] + offsets[None, :], 0, size - 1)


def _range_of(ids: Array, extent: Extent) -> tuple[Any, Any]:
    """Least and greatest of ids over each extent; places past the end repeat the last."""
    taken = ids[_places(extent, ids.shape[0])]
    return taken.min(axis=1), taken.max(axis=1)


@node
class Segments(Mask):
    """Equal ids attend: several documents or sentences packed in one row.

    `q_ids` is an integer array `[*B, T]` (or `[T]` for all), `kv_ids` `[*B, S]`; None: the same.
    """

    q_ids: Any = along("*B T")
    kv_ids: Any = along("*B S", default=None)

    def __post_init__(self):
        if self.kv_ids is None:
            object.__setattr__(self, "kv_ids", self.q_ids)
        _check_ids("Segments", "q_ids", self.q_ids)
        _check_ids("Segments", "kv_ids", self.kv_ids)

    def evaluate(self, b, h, rows, columns):
        return self.q_ids[:, None] == self.kv_ids[None, :]

    def bounds(self, tile):
        if not tile.rows.size or not tile.columns.size:
            return np.False_, np.True_
        q_lo, q_hi = map(_column, _range_of(self.q_ids, tile.rows))
        kv_lo, kv_hi = map(_row, _range_of(self.kv_ids, tile.columns))
        same = (q_lo == q_hi) & (kv_lo == kv_hi) & (q_lo == kv_lo)
        return (q_lo <= kv_hi) & (kv_lo <= q_hi), same


@node
class Dense(Mask):
    """Any mask, as a boolean array of full rank `[*B, N, T, S]`; axes of size 1 broadcast.

    Raises TypeError for arrays that are not boolean.
    """

    array: Any = along("*#B #N #T #S")

    def __post_init__(self):
        _check_bool("Dense", "mask", self.array)
        if self.array.ndim < 3:
            raise ValueError(
                f"Dense: expected a mask of full rank [*B, N, T, S], got {list(self.array.shape)}"
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


def _check_bool(owner: str, name: str, value: Any) -> None:
    if not hasattr(value, "dtype") or value.dtype != jnp.bool_:
        kind = getattr(value, "dtype", type(value).__name__)
        raise TypeError(
            f"{owner}: {name} must be a boolean array (True = attend), got {kind}; "
            f"compare with != 0 if True in it means attend"
        )


@node
class Blocks(Mask):
    """A coarse mask: `layout[q_place // block, kv_place // block]`.

    `layout` is boolean, `[T/block, S/block]` for all or `[*B, N, T/block, S/block]` (rounded up;
    batch and head axes of size 1 broadcast); `block` is an integer or a pair (queries, keys).
    """

    layout: Any
    block: int | tuple[int, int] = static()

    def __post_init__(self):
        _check_bool("Blocks", "layout", self.layout)
        if self.layout.ndim < 2:
            raise ValueError(
                f"Blocks: expected layout [T/block, S/block] or [*B, N, T/block, S/block], "
                f"got {list(self.layout.shape)}"
            )
        if not all(_is_integer(x) and x >= 1 for x in self._sizes):
            raise ValueError(f"Blocks: block must be an integer >= 1 or two, got {self.block!r}")

    def declared_letters(self) -> dict[str, str]:
        """A layout without leading axes is shared by all; any other has full rank."""
        return {"layout": "Tb Sb" if self.layout.ndim == 2 else "*#B #N Tb Sb"}

    @property
    def _sizes(self) -> tuple[int, int]:
        return self.block if isinstance(self.block, tuple) else (self.block, self.block)

    def check_covers(self, T: int, S: int) -> None:
        """Raises ValueError unless the layout has exactly the blocks of T × S."""
        wanted = [-(-T // self._sizes[0]), -(-S // self._sizes[1])]
        if list(self.layout.shape[-2:]) != wanted:
            raise ValueError(
                f"Blocks: expected layout [..., T/block, S/block] = {wanted} for T = {T}, "
                f"S = {S}, block = {self.block}, got {list(self.layout.shape)}"
            )

    def evaluate(self, b, h, rows, columns):
        q_block, kv_block = self._sizes
        layout = jnp.asarray(self.layout) if isinstance(self.layout, np.ndarray) else self.layout
        return layout[(rows.places // q_block)[:, None], (columns.places // kv_block)[None, :]]

    def bounds(self, tile):
        """Counts allowed cells of the layout under each tile, by two-dimensional prefix sums."""
        lo_q, hi_q = _cells(tile.rows, self._sizes[0], self.layout.shape[0])
        lo_kv, hi_kv = _cells(tile.columns, self._sizes[1], self.layout.shape[1])
        sums = jnp.pad(
            jnp.cumsum(jnp.cumsum(self.layout, 0, jnp.int32), 1, jnp.int32), ((1, 0), (1, 0))
        )
        by_row = sums[hi_q] - sums[lo_q]
        count = by_row[..., hi_kv] - by_row[..., lo_kv]
        size = (hi_q - lo_q)[:, None] * (hi_kv - lo_kv)[None, :]
        return count > 0, count == size


def _cells(extent: Extent, block: int, cells: int) -> tuple[Array, Array]:
    """The half-open range of layout cells that each extent touches."""
    start = jnp.atleast_1d(jnp.asarray(extent.start, jnp.int32))
    stop = jnp.minimum((start + extent.size - 1) // block + 1, cells)
    return jnp.minimum(start // block, stop), stop


@node
class Predicate(Mask):
    """Any rule: `fn(b, h, q_idx, kv_idx, *operands) -> bool`, on scalars, as in FlexAttention.

    Positions are what the function sees; `b` counts batch rows row-major. Operands are passed
    whole and may be indexed. `bounds(tile) -> (maybe_any, surely_all)` is optional and lets tiles
    be skipped. Compiled once per function object: define the function once, outside the call.
    """

    fn: Callable[..., Any] = static()
    operands: tuple[Any, ...] = ()
    bounds_fn: Callable[[Tile], tuple[Truth, Truth]] | None = static(default=None)

    def __init__(
        self,
        fn: Callable[..., Any],
        *operands: Any,
        bounds: Callable[[Tile], tuple[Truth, Truth]] | None = None,
    ):
        if not callable(fn):
            raise TypeError(f"Predicate: expected a function, got {type(fn).__name__}")
        object.__setattr__(self, "fn", fn)
        object.__setattr__(self, "operands", operands)
        object.__setattr__(self, "bounds_fn", bounds)

    def opened(self) -> "Predicate":
        """The same mask; traced arrays that its function closes over are operands."""
        fn, operands = opened(self.fn, self.operands, *[jnp.int32(0)] * 4)
        return Predicate(fn, *operands, bounds=self.bounds_fn)

    def _scalar(self, b: Any, h: Any, q: Any, kv: Any) -> Bool[Array, ""]:
        truth = jnp.asarray(self.fn(b, h, q, kv, *self.operands))
        if truth.dtype != jnp.bool_ or truth.shape:
            raise TypeError(
                f"Predicate: {getattr(self.fn, '__name__', self.fn)} must return a boolean "
                f"scalar, got {truth.dtype} {list(truth.shape)}"
            )
        return truth

    def evaluate(self, b, h, rows, columns):
        b, h = jnp.asarray(b, jnp.int32), jnp.asarray(h, jnp.int32)
        per_key = jax.vmap(functools.partial(self._scalar), (None, None, None, 0))
        return jax.vmap(per_key, (None, None, 0, None))(b, h, rows.positions, columns.positions)

    def bounds(self, tile):
        if self.bounds_fn is None:
            return np.True_, np.False_
        maybe_any, surely_all = self.bounds_fn(tile)
        return _as_truth(maybe_any), _as_truth(surely_all)


EMPTY, MIXED, FULL = 0, 1, 2  # the kinds of tile in a tile map


def extents(size: int, block: int, positions: Indices | None = None) -> Extent:
    """The tiles of `block` along an axis of `size`, the last one possibly shorter.

    A short last tile is described as if it were whole, with places past the end. Its positions
    are those of the rows that exist.
    """
    starts = np.arange(0, size, block, dtype=np.int32)
    if positions is None:
        return Extent(starts, np.minimum(starts + block, size) - 1, starts, block)
    by_tile = positions.astype(np.int32)[np.minimum(starts[:, None] + np.arange(block), size - 1)]
    return Extent(by_tile.min(axis=1), by_tile.max(axis=1), starts, block)


def kinds(mask: Mask, tile: Tile) -> Int[Array | np.ndarray, "n m"]:
    """EMPTY, MIXED or FULL for each tile; arrays of the mask must be picked for one (b, h)."""
    maybe_any, surely_all = mask.bounds(tile)
    kind = maybe_any.astype(np.int8) + (maybe_any & surely_all).astype(np.int8)
    shape = (np.size(tile.rows.start), np.size(tile.columns.start))
    return (jnp if isinstance(kind, jax.Array) else np).broadcast_to(kind, shape)


def tile_map(
    mask: Mask,
    T: int,
    S: int,
    block_q: int,
    block_kv: int,
    *,
    b: int = 0,
    h: int = 0,
    q_positions: Indices | None = None,
    kv_positions: Indices | None = None,
) -> Int[Array | np.ndarray, "n m"]:
    """What each tile is for batch row b and head h: 0 empty, 1 mixed, 2 full.

    int8 `[⌈T/block_q⌉, ⌈S/block_kv⌉]`. Costs work and memory in the number of tiles (and in T + S
    for masks with arrays), never T × S, except for a `Dense` mask, which is that large itself. A
    NumPy array where mask and positions are static.
    """
    tile = Tile(extents(T, block_q, q_positions), extents(S, block_kv, kv_positions))
    return kinds(pick(flatten_batch(mask, leading(mask)[0]), b, h), tile)
