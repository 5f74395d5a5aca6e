"""`Cache`, the base class of caches, and what all of them check."""

import dataclasses
import math
from typing import Any, TypedDict, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jattn._explicit import as_rows, partition_spec_of, partitioned_by_xla
from jattn._types import Size, Tree
from jattn.cache.paths import checked_path, read_slots
from jattn.cache.quantized import Quantized, as_floats
from jattn.cache.rows import chosen, picked_rows, put_rows, shorter
from jattn.cache.storage import Stored
from jattn.checks import check_array, check_size, shown
from jattn.functions import integers
from jattn.functions.integers import is_known
from jattn.masks import Lengths, Mask


Valid = Bool[Array | np.ndarray, "B T"] | None
Positions = Int[Array | np.ndarray, "..."] | None  # [B, T] or [T]
SomeCache = TypeVar("SomeCache", bound="Cache")


class CacheOptions(TypedDict, total=False):
    """The options of the classes of `jattn.cache`, besides their sizes."""

    chunk: int | None  # of a RollingCache
    page_size: int  # of a PagedCache
    num_pages: int | None  # of a PagedCache
    positions: bool  # of a DenseCache or a PagedCache


class Cache:
    """The base class of caches.

    `lengths` is the number of tokens of each batch row, without padding. `overflowed` is true for
    batch rows whose tokens did not all fit.

    >>> cache = jattn.cache.DenseCache.of(k, v, lengths=jnp.array([7, 3]))
    >>> cache.capacity, cache.reorder(jnp.array([1, 1])).lengths.tolist()
    (7, [3, 3])
    """

    keys: Any
    values: Any
    lengths: Int[Array, " B"]
    overflowed: Bool[Array, " B"]
    positions: Any = None  # of the token in each slot, if the cache keeps them
    slots_in_order = True  # whether tokens lie in slots in the order in which they were appended
    is_kind = False  # whether the class may be passed as `kind` to layers, which call its `create`

    @property
    def capacity(self) -> Size:
        """S: the number of slots that attention reads."""
        return self.keys.shape[2]

    @property
    def num_kv_heads(self) -> int:
        """K: the number of key/value heads."""
        return self.keys.shape[1]

    @property
    def bytes_per_token(self) -> int:
        """The bytes of a token's keys and values, with their scales if they are quantised."""
        arrays = jax.tree.leaves((self.keys, self.values))
        return sum(math.prod((x.shape[1], *x.shape[3:])) * x.dtype.itemsize for x in arrays)

    def axis_names_by_value(self) -> dict[str, Any]:
        """Returns the letters of the axes of quantised arrays, by field."""
        letters = {x.name: x.metadata.get("letters", "") for x in dataclasses.fields(self)}  # pyright: ignore[reportArgumentType]
        quantized = (x for x in letters if isinstance(getattr(self, x), Quantized))
        return {x: Quantized(letters[x], letters[x].rpartition(" ")[0]) for x in quantized}

    @property
    def value_size(self) -> int:
        """V: the size of a value."""
        return self.values.shape[-1]

    @property
    def kv_positions(self) -> Int[Array, "B S"] | None:
        """The position of the token in each slot; None if slot i holds position i."""
        return self.positions

    def mask(self) -> Mask:
        """Returns the mask of the slots that hold tokens to attend to."""
        return Lengths(kv=self.lengths)

    def read(self) -> tuple[Float[Array, "B K S H"], Float[Array, "B K S V"]]:
        """Returns the keys and values of all slots; in float32 if they are quantised."""
        return as_floats(self.keys), as_floats(self.values)

    def nan_if_overflowed(self, results: Tree) -> Tree:
        """Returns a tree of results `[B, ...]`, with NaN for the batch rows that overflowed."""
        flag = lambda x: self.overflowed.reshape(-1, *(1,) * (x.ndim - 1))  # noqa: E731
        return jax.tree.map(lambda x: jnp.where(flag(x), jnp.nan, x), results)

    def pages(self) -> tuple[Stored, Stored, Int[Array, "B M"]]:
        """Returns the stored keys and values as P pages of p slots, and a table of M page numbers
        for each batch row.

        The table holds P where a batch row has no page. In this base class, all slots of a batch
        row are one page. In a `LatentCache` the two arrays are the same one, and values are the
        first V numbers of its rows.
        """
        return self.keys, self.values, jnp.arange(self.lengths.shape[0], dtype=jnp.int32)[:, None]

    def block(
        self, start: Any, size: int
    ) -> tuple[Float[Array, "B K s H"], Float[Array, "B K s V"]]:
        """Returns the keys and values of the `size` slots from `start` on, as `read` does. In a
        paged cache both are multiples of the page size."""
        slice_slots = lambda x: jax.lax.dynamic_slice_in_dim(x, start, size, axis=2)  # noqa: E731
        keys, values = jax.tree.map(slice_slots, (self.keys, self.values))
        return as_floats(keys), as_floats(values)

    def append(
        self: SomeCache, key: Any, value: Any, valid: Valid = None, positions: Positions = None
    ) -> SomeCache:
        """Returns the cache with T more tokens in each batch row.

        Args:
            key: `[B, T, K, H]`; cast to the cache's dtype.
            value: `[B, T, K, V]`; cast to the cache's dtype.
            valid: bool `[B, T]`, False for padding, which is not appended. Padding may stand at
                the start or at the end of a batch row.
            positions: integers `[B, T]` or `[T]`, for a cache created with `positions=True`; by
                default each token's number in its batch row.

        Raises ValueError for wrong shapes, for positions if the cache does not keep any, and if the
        lengths are concrete and the tokens do not fit.
        """
        self._check(key, value, valid)
        return self._extended(key, value, valid, positions)

    def reorder(self: SomeCache, indices: Int[Array, " R"]) -> SomeCache:
        """Returns the cache of R batch rows selected by index, for beam search.

        A batch row may be selected repeatedly or not at all. Raises ValueError for concrete indices
        outside 0..B−1; for such indices a compiled program sets `overflowed` of the result's row.
        """
        return self._selected(*picked_rows("indices", indices, len(self.lengths)))

    def fork(self: SomeCache, row: Any, n: int) -> SomeCache:
        """Returns a cache of n batch rows, all of which continue the batch row `row`, an integer or
        an integer scalar, which may be traced. In a paged cache they share its pages.

        Raises ValueError for a concrete row outside 0..B−1; for a traced one the result's rows are
        flagged as `overflowed`.

        >>> jattn.cache.DenseCache.of(k, v, lengths=jnp.array([7, 3])).fork(1, 4).lengths.tolist()
        [3, 3, 3, 3]
        """
        check_size("n", n)
        row, outside = picked_rows("row", row, len(self.lengths), (0,))
        return self._selected(jnp.broadcast_to(row, n), jnp.broadcast_to(outside, n))

    def _selected(self: SomeCache, rows: Array, out_of_range: Array) -> SomeCache:
        """Returns the cache of these batch rows; rows that are out of range are flagged."""
        return select_rows(self, rows, out_of_range)

    def truncate(self: SomeCache, lengths: Any) -> SomeCache:
        """Returns the cache without the tokens after the first `lengths` of each batch row, as if
        they had not been appended. `lengths` is an integer, or an integer array `[B]`.

        A batch row that had overflowed stays flagged: which of its tokens were lost is not known.

        Raises ValueError for negative lengths and, if the cache is concrete too, for lengths above
        its own. Traced lengths outside this range are clamped, and flagged as `overflowed`.

        >>> jattn.cache.DenseCache.of(k, v).truncate(jnp.array([5, 0])).lengths.tolist()
        [5, 0]
        """
        return self._shortened("lengths", lengths)

    def _shortened(self: SomeCache, name: str, lengths: Any) -> SomeCache:
        """Computes `truncate`; error messages call the lengths `name`."""
        lengths, outside = shorter(name, lengths, self.lengths)
        return self.with_lengths(lengths, self.overflowed | outside)

    def keep(self: SomeCache, start: Any, places: Any, counts: Any = None) -> SomeCache:
        """Returns the cache with only the accepted path of a tree of drafts behind the first
        `start` tokens, as if no other draft had been appended; see `masks.Tree`.

        Args:
            start: integers `[B]`, the lengths before the tree was appended.
            places: integers `[B, A]`, the indices of the accepted tokens among the tokens of the
                tree, in the order of the path, from the root if it was appended with the tree.
            counts: integers `[B]`, how many of the A indices are valid; by default all. The others
                may be any number.

        Keys, values and positions move unchanged: position-dependent models need a cache that was
        created with `positions=True`, because a token's position in the tree is not its slot.

        Raises TypeError and ValueError for wrong arrays, and for concrete indices out of range;
        traced ones set `overflowed`. Raises NotImplementedError for a `RollingCache`.

        >>> cache, places = jattn.cache.DenseCache.of(k, v), jnp.array([[0, 2], [0, 1]])
        >>> cache.keep(jnp.array([4, 5]), places).lengths.tolist()
        [6, 7]
        """
        if not self.slots_in_order:
            raise NotImplementedError(
                f"keep: expected a cache with slots in the order of tokens, got a "
                f"{type(self).__name__}; for drafts in sequence use truncate"
            )
        truncated = self._shortened("start", start)
        slots, is_kept, wrong = checked_path(truncated.lengths, self.lengths, places, counts)
        key, value, positions = self._tokens_at(slots)
        cache = truncated._extended(key, value, is_kept, positions)
        return cache.with_lengths(cache.lengths, cache.overflowed | wrong)

    def _tokens_at(self, slots: Int[Array, "B A"]) -> tuple[Any, Any, Any]:
        """Returns the stored keys, values and positions, or None, in slots of each batch row."""
        positions = self.positions
        if positions is not None:
            positions = jnp.take_along_axis(positions, slots, axis=1, mode="clip")
        return *read_slots((self.keys, self.values), slots), positions

    def _extended(
        self: SomeCache, key: Any, value: Any, valid: Valid, positions: Positions
    ) -> SomeCache:
        """Returns the cache with more tokens, whose shapes have been checked, see `append`."""
        raise NotImplementedError

    def reset(self: SomeCache, rows: Any) -> SomeCache:
        """Returns the cache with empty batch rows in place of `rows`, for new sequences: without
        tokens, and no longer flagged as `overflowed`.

        `rows` is boolean `[B]`, true for rows to reset, or their indices: integers `[R]` or one
        integer. Raises ValueError for concrete indices outside 0..B−1; traced ones are ignored.

        >>> jattn.cache.DenseCache.of(k, v).reset(1).lengths.tolist()
        [7, 0]
        """
        is_chosen = chosen(rows, len(self.lengths))
        lengths = jnp.where(is_chosen, 0, self.lengths)
        return self.with_lengths(lengths, self.overflowed & ~is_chosen)

    def admit(self: SomeCache, rows: Any, other: Any) -> SomeCache:
        """Returns the cache with the R batch rows of another cache in place of its batch rows
        `rows`, such as a prompt in place of a sequence that has ended.

        A server can thus read prompts with a cache of few rows, in time that does not grow with B.
        Both caches have the same class and sizes, except capacities and numbers of pages.
        Each admitted row of a paged cache gets pages of its own; `reorder` shares them.

        Args:
            rows: integers `[R]` or one integer, all different. The row of `other` for a traced
                integer outside 0..B−1 is left out.
            other: a cache of R batch rows.

        Raises TypeError and ValueError for caches that do not match and for concrete rows outside
        0..B−1, and if the lengths are concrete and do not fit. Traced lengths that do not fit are
        flagged as `overflowed`.

        >>> prompt = jattn.cache.DenseCache.of(k[:1, :4], v[:1, :4])
        >>> jattn.cache.DenseCache.of(k, v).admit(1, prompt).lengths.tolist()
        [7, 4]
        """
        check_admission(self, other)
        indices, outside = jnp.atleast_1d(*picked_rows("rows", rows, len(self.lengths), (0, 1)))
        if len(indices) != len(other.lengths):
            raise ValueError(
                f"rows: expected one for each of the other cache's {len(other.lengths)} batch "
                f"rows, got {len(indices)}"
            )
        if is_known(rows) and len(np.unique(rows)) < len(indices):
            raise ValueError(f"rows: expected different rows, got {np.asarray(rows).tolist()}")
        check_counts(other.lengths, self._max_length, "capacity", "admit")
        return admitted(self, jnp.where(outside, len(self.lengths), indices), other)

    @property
    def _max_length(self) -> Any:
        """The largest length of a batch row."""
        return self.capacity

    def _admitted(self: SomeCache, rows: Int[Array, " R"], other: Any) -> SomeCache:
        """Computes `admit` for batch rows that fit; row B means none."""
        return put_rows(self, rows, other)

    def with_lengths(self: SomeCache, lengths: Array, overflowed: Array) -> SomeCache:
        """Returns the cache with shorter batch rows and other flags."""
        cache: Any = self
        return dataclasses.replace(cache, lengths=lengths, overflowed=overflowed)

    def next_positions(
        self, T: int, valid: Valid = None, positions: Positions = None
    ) -> Int[Array, "B T"]:
        """Returns the positions of the next T tokens: the numbers of the tokens before them or, in
        a cache that keeps positions, `positions [B, T]` or `[T]` if these are passed. At padding
        the numbers have no meaning."""
        self._check_valid(valid, T)
        if positions is not None:
            self._check_positions(positions, T)
            as_int32, _ = integers.positions("positions", positions)
            return jnp.broadcast_to(jnp.asarray(as_int32), (len(self.lengths), T))
        if valid is None:
            return self.lengths[:, None] + jnp.arange(T, dtype=jnp.int32)[None, :]
        counts = jnp.cumsum(jnp.asarray(valid), axis=1, dtype=jnp.int32)
        return jnp.maximum(self.lengths[:, None] + counts - 1, 0)

    def last_positions(self, T: int) -> Int[Array, "B T"]:
        """Returns the positions of the T tokens that were appended last."""
        check_size("T", T, 0)
        slots = self.lengths[:, None] + jnp.arange(-T, 0, dtype=jnp.int32)[None, :]
        if self.positions is None:
            return slots
        positions: Any = self.kv_positions
        stored = jnp.take_along_axis(positions, jnp.maximum(slots, 0), axis=1, mode="clip")
        return jnp.where(slots < 0, slots, stored)

    def _lost(self, positions: Positions) -> Bool[Array, " B"]:
        """Returns which batch rows overflow whatever their lengths: those that already had or, if a
        position does not fit int32, all of them."""
        outside = None if positions is None else integers.positions("positions", positions)[1]
        return self.overflowed if outside is None else self.overflowed | outside

    def _fits(self, slots: Int[Array, "B T"], valid: Valid) -> Bool[Array, "B T"]:
        """Returns which tokens are not padding and have a slot within the capacity."""
        fits = slots < self.capacity
        return fits if valid is None else fits & valid

    def _check(self, key: Any, value: Any, valid: Valid) -> None:
        """Checks the shapes of appended keys and values."""
        B, K = self.lengths.shape[0], self.num_kv_heads
        for name, array, stored in (("key", key, self.keys), ("value", value, self.values)):
            size, letters = stored.shape[-1], f"[B, T, K, {'H' if name == 'key' else 'V'}]"
            check_array(f"append: {name}", array, letters)
            fits = len(array.shape) == 4 and (*array.shape[::2], array.shape[3]) == (B, K, size)
            if not fits or array.shape[:2] != key.shape[:2]:
                raise ValueError(
                    f"append: expected {name} {letters} = [{B}, T, {K}, {size}], "
                    f"got {list(array.shape)}"
                )
        self._check_valid(valid, key.shape[1])

    def _check_positions(self, positions: Any, T: int) -> None:
        if self.positions is None:
            raise ValueError(
                "positions: expected None, as this cache numbers its tokens; one created with "
                "positions=True keeps positions"
            )
        check_array("positions", positions, "[B, T] or [T]", "integer")
        wanted = (len(self.lengths), T)
        if positions.shape not in (wanted, wanted[1:]):
            got = list(positions.shape)
            raise ValueError(f"positions: expected [B, T] = {list(wanted)} or [T], got {got}")

    def _check_valid(self, valid: Valid, T: Any) -> None:
        check_size("T", T, 0)
        if valid is not None:
            check_array("valid", valid, "[B, T]", "boolean")
            wanted = [len(self.lengths), T]
            if list(valid.shape) != wanted:
                got = list(valid.shape)
                raise ValueError(f"append: expected valid [B, T] = {wanted}, got {got}")


def check_cache(name: str, value: Any) -> None:
    """Raises TypeError unless the value is a cache."""
    if not isinstance(value, Cache):
        raise TypeError(f"{name}: expected a cache of jattn.cache, got {type(value).__name__}")


def check_kind(kind: Any) -> type[Cache]:
    """Returns the argument; raises TypeError unless it is a class of caches."""
    if not (isinstance(kind, type) and issubclass(kind, Cache) and kind.is_kind):
        raise TypeError(
            f"kind: expected DenseCache, RollingCache or PagedCache of jattn.cache, got {kind!r}"
        )
    return kind


@jax.jit
@partitioned_by_xla(lambda cache, rows, _: jax.tree.map(lambda x: as_rows(x, len(rows)), cache))
def select_rows(cache: Any, rows: Int[Array, " R"], out_of_range: Bool[Array, " R"]) -> Any:
    """Selects batch rows of a cache, whose arrays all have a batch axis. Rows that are out of range
    are flagged."""
    selected = jax.tree.map(lambda x: x[rows], cache)
    return dataclasses.replace(selected, overflowed=selected.overflowed | out_of_range)


@jax.jit
@partitioned_by_xla(lambda cache, *_: jax.tree.map(partition_spec_of, cache))
def admitted(cache: Any, rows: Int[Array, " R"], other: Any) -> Any:
    """Returns a cache with the batch rows of another in place of its own, see `Cache.admit`."""
    lengths = jnp.minimum(other.lengths, cache._max_length)
    other = other.with_lengths(lengths, other.overflowed | (lengths < other.lengths))
    return cache._admitted(rows, other)


def check_admission(cache: Any, other: Any) -> None:
    """Raises TypeError or ValueError unless `cache.admit` can take the rows of the other cache."""

    def layout(cache: Any) -> Any:
        """Returns the class, static fields and dtypes, and the sizes of tokens."""
        arrays = jax.tree.leaves((cache.keys, cache.values))
        sizes = [x.shape[1:2] + x.shape[3:] for x in arrays]
        return jax.tree.structure(cache), [x.dtype for x in arrays], sizes

    check_cache("other", other)
    if cache.keys.dtype != other.keys.dtype:
        got, wanted = other.keys.dtype, cache.keys.dtype
        raise TypeError(f"other: expected dtype {wanted} as in the cache, got {got}")
    if (cache.positions is None) != (other.positions is None):
        raise ValueError(f"other: expected positions={cache.positions is not None} as in the cache")
    if layout(cache) != layout(other):
        raise TypeError(
            "other: expected a cache of the same class, dtype, numbers of heads and head sizes, "
            f"got {shown(other)} for {shown(cache)}"
        )
    for name in ("page_size", "chunk"):
        if getattr(cache, name, None) != getattr(other, name, None):
            size, got = getattr(cache, name), getattr(other, name)
            raise ValueError(f"other: expected {name} = {size} as in the cache, got {got}")


def count_tokens(T: int, valid: Valid) -> Any:
    """Returns the number of tokens appended to each batch row, `[B]`; T if there is no padding."""
    return T if valid is None else jnp.sum(jnp.asarray(valid), axis=1, dtype=jnp.int32)


def check_counts(counts: Any, limit: Any, limit_name: str, owner: str = "append") -> None:
    """Raises ValueError if counts of tokens `[B]` are concrete and exceed a limit."""
    if is_known(counts) and np.any(np.asarray(counts) > limit):
        row = int(np.argmax(np.asarray(counts) > limit))
        raise ValueError(
            f"{owner}: expected at most {limit_name} = {int(limit)} tokens in each batch row, got "
            f"{int(counts[row])} in batch row {row}"
        )
