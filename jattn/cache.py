"""Caches of keys and values for decoding: frozen pytrees; `append` returns the extended cache.

    cache = DenseCache.create(B, 512, num_kv_heads, head_size)
    cache = cache.append(key, value)                         # [B, T, K, H], [B, T, K, V]
    out = jattn.attention(query, cache, mask=masks.Causal())

Each row of the batch holds its own number of tokens, so that prompts of different lengths decode
together. Arrays have the layout that reads fastest, `[B, K, S, H]`. A token's position is the
number of real tokens before it in its row, whatever slot it lies in.

A write past the end raises if the lengths are known. In a compiled program the tokens that do not
fit are left out, the row's flag `overflowed` is set, and attention to the row gives NaN.
"""

import dataclasses
import functools
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from jattn._explicit import as_operand, as_rows, cuts_of, left_to_xla, typed_like
from jattn._pytree import array_field, pytree_dataclass, static_field
from jattn._types import Shape, Size
from jattn.checks import check_array, check_dtype, check_size, check_sizes
from jattn.functions import integers
from jattn.masks import Lengths, Mask, Window


__all__ = ["Cache", "DenseCache", "PagedCache", "RollingCache"]


def __dir__() -> list[str]:
    return __all__


Valid = Bool[Array | np.ndarray, "B T"] | None
Same = TypeVar("Same", bound="Cache")


class Cache:
    """The base class of caches: the number of tokens of each row, and the rows that lost some.

    >>> cache = jattn.cache.DenseCache.of(k, v, lengths=jnp.array([7, 3]))
    >>> cache.capacity, cache.reorder(jnp.array([1, 1])).lengths.tolist()
    (7, [3, 3])
    """

    keys: Any
    values: Any
    lengths: Int[Array, " B"]
    overflowed: Bool[Array, " B"]

    @property
    def capacity(self) -> Size:
        """S: the number of slots that attention reads."""
        return self.keys.shape[2]

    @property
    def num_kv_heads(self) -> int:
        """K: the number of key/value heads."""
        return self.keys.shape[1]

    @property
    def kv_positions(self) -> Int[Array, "B S"] | None:
        """The position of each slot; None if they are 0, 1, 2, …"""
        return None

    def mask(self) -> Mask:
        """Returns the mask of the slots that hold tokens to attend to."""
        return Lengths(kv=self.lengths)

    def read(self) -> tuple[Float[Array, "B K S H"], Float[Array, "B K S V"]]:
        """Returns the keys and values of all slots."""
        return self.keys, self.values

    def nan_if_overflowed(self, *results: Array) -> tuple[Array, ...]:
        """Returns results `[B, ...]` with NaN in the rows that overflowed."""
        flags = (self.overflowed.reshape(-1, *(1,) * (x.ndim - 1)) for x in results)
        return tuple(jnp.where(flag, jnp.nan, x) for flag, x in zip(flags, results, strict=True))

    def pages(self) -> tuple[Float[Array, "P K p H"], Float[Array, "P K p V"], Int[Array, "B M"]]:
        """Returns keys and values as stored in memory, and a table of the pages of each row.

        The table holds P where a row has no page.
        """
        return self.keys, self.values, jnp.arange(self.lengths.shape[0], dtype=jnp.int32)[:, None]

    def block(
        self, start: Any, size: int
    ) -> tuple[Float[Array, "B K s H"], Float[Array, "B K s V"]]:
        """Returns the keys and values of `size` slots, in whole pages."""
        keys, values = (
            jax.lax.dynamic_slice_in_dim(x, start, size, axis=2) for x in (self.keys, self.values)
        )
        return keys, values

    def append(self, key: Any, value: Any, valid: Valid = None) -> "Cache":
        """Returns the cache with T further tokens in each row.

        Args:
            key: `[B, T, K, H]`; cast to the cache's dtype.
            value: `[B, T, K, V]`.
            valid: bool `[B, T]`, False for padding (on whichever side), which is left out.

        Raises ValueError for shapes that do not fit, and for tokens known to exceed the capacity.
        """
        raise NotImplementedError

    def reorder(self: Same, indices: Int[Array, " R"]) -> Same:
        """Returns rows picked by index, for beams; a row may be picked repeatedly, or not at all.

        Raises ValueError for rows known not to exist; a compiled program sets `overflowed` of the
        rows picked instead.
        """
        rows, missing = picked_rows(indices, len(self.lengths))
        return _picked(self, rows, missing)

    def next_positions(self, T: int, valid: Valid = None) -> Int[Array, "B T"]:
        """Returns the positions of the next T tokens; those of padding have no meaning."""
        self._check_valid(valid, T)
        if valid is None:
            return self.lengths[:, None] + jnp.arange(T, dtype=jnp.int32)[None, :]
        counts = jnp.cumsum(jnp.asarray(valid), axis=1, dtype=jnp.int32)
        return jnp.maximum(self.lengths[:, None] + counts - 1, 0)

    def last_positions(self, T: int) -> Int[Array, "B T"]:
        """Returns the positions of the T tokens that were appended last."""
        check_size("T", T, 0)
        return self.lengths[:, None] + jnp.arange(-T, 0, dtype=jnp.int32)[None, :]

    def _kept(self, slots: Int[Array, "B T"], valid: Valid) -> Bool[Array, "B T"]:
        """Returns which tokens are real and fit into the cache."""
        fits = slots < self.capacity
        return fits if valid is None else fits & valid

    def _check(self, key: Any, value: Any, valid: Valid) -> int:
        """Checks the shapes of appended keys and values, and returns T."""
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
        return key.shape[1]

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


def picked_rows(indices: Any, B: int) -> tuple[Int[Array, " R"], Bool[Array, " R"]]:
    """Returns indices of B rows in range, and which of the given indices were out of range.

    Raises TypeError and ValueError for indices known to be wrong, which indexing would clamp.
    """
    check_array("indices", indices, "[R]", "integer", rank=1)
    least, most = integers.known_range(indices) or (0, 0)
    if least < 0 or most >= B:
        wrong = least if least < 0 else most
        raise ValueError(f"indices: expected 0 <= indices < B = {B}, got {wrong}")
    rows = jnp.asarray(integers.clamped(indices))
    return jnp.clip(rows, 0, B - 1), (rows < 0) | (rows >= B)


@jax.jit
@left_to_xla(lambda cache, rows, _: jax.tree.map(lambda x: as_rows(x, len(rows)), cache))
def _picked(cache: Any, rows: Int[Array, " R"], missing: Bool[Array, " R"]) -> Any:
    """Returns these rows of a cache, or of the part of it that is not a pool."""
    picked = jax.tree.map(lambda x: x[rows], cache)
    return dataclasses.replace(picked, overflowed=picked.overflowed | missing)


def _counts(T: int, valid: Valid) -> Any:
    """Returns the number of tokens appended to each row."""
    return T if valid is None else jnp.sum(jnp.asarray(valid), axis=1, dtype=jnp.int32)


def _known(array: Any) -> bool:
    return not isinstance(array, Tracer)


def _check_room(wanted: Any, room: Any, what: str) -> None:
    """Raises ValueError if rows are known to get more than their room."""
    if _known(wanted) and _known(room) and np.any(np.asarray(wanted) > np.asarray(room)):
        wanted, room = np.broadcast_arrays(np.asarray(wanted), np.asarray(room))
        row = int(np.argmax(wanted > room))
        raise ValueError(
            f"append: row {row} would hold {int(wanted[row])} {what}, "
            f"there is room for {int(room[row])}"
        )


@jax.jit
@left_to_xla(lambda buffer, *_: as_operand(buffer))
def write(
    buffer: Float[Array, "B K S H"], tokens: Any, slots: Int[Array, "B T"]
) -> Float[Array, "B K S H"]:
    """Writes tokens `[B, T, K, H]` to their rows' slots; tokens at slot S are left out."""
    tokens = jnp.swapaxes(jnp.asarray(tokens).astype(buffer.dtype), 1, 2)

    def head(buffer: Array, tokens: Array, slots: Array) -> Array:
        # "drop" leaves out writes beyond the end; the default would move them to the last slot.
        return buffer.at[slots].set(tokens, mode="drop")

    # Rows are mapped, not indexed, so that XLA sees that rows on different devices are independent.
    # Heads are mapped too, or XLA for TPUs copies the buffer into a layout in which the heads of a
    # token are adjacent, and back.
    slots = jnp.broadcast_to(slots[:, None], tokens.shape[:3])
    return jax.vmap(jax.vmap(head))(buffer, tokens, slots)


def _empty(shape: Shape, head_size: int, value_size: int | None, dtype: Any) -> tuple[Array, Array]:
    """Returns keys and values of an empty cache."""
    sizes = (head_size, head_size if value_size is None else value_size)
    check_size("head_size", sizes[0])
    check_size("value_size", sizes[1])
    check_dtype("dtype", dtype)
    keys, values = (jnp.zeros((*shape, size), dtype) for size in sizes)
    return keys, values


def _no_tokens(batch: Size) -> tuple[Array, Array]:
    """Returns the lengths and overflow flags of empty rows."""
    return jnp.zeros(batch, jnp.int32), jnp.zeros(batch, bool)


@pytree_dataclass
class DenseCache(Cache):
    """A cache with tokens at the slots of their positions: `[B, K, S, H]` and `[B, K, S, V]`.

    >>> cache = jattn.cache.DenseCache.create(2, 16, 2, 8).append(k, v)
    >>> cache.keys.shape, cache.lengths.tolist()
    ((2, 2, 16, 8), [7, 7])
    """

    keys: Any = array_field("B K S H")
    values: Any = array_field("B K S V")
    lengths: Any = array_field("B")
    overflowed: Any = array_field("B")

    @classmethod
    def create(
        cls,
        batch: Size,
        length: int,
        num_kv_heads: int,
        head_size: int,
        value_size: int | None = None,
        dtype: Any = jnp.float32,
    ) -> "DenseCache":
        """Creates an empty cache for up to `length` tokens in each of `batch` rows."""
        check_sizes(batch=batch, length=length, num_kv_heads=num_kv_heads)
        shape = (batch, num_kv_heads, length)
        return cls(*_empty(shape, head_size, value_size, dtype), *_no_tokens(batch))

    @classmethod
    def of(cls, key: Any, value: Any, lengths: Any = None) -> "DenseCache":
        """Creates a full cache of `key [B, S, K, H]` and `value [B, S, K, V]`, the memory of an
        encoder.

        `lengths [B]` is the number of real tokens of each row, by default S.

        Raises TypeError and ValueError for arrays that do not fit, and for lengths that are known
        to be outside 0..S; traced lengths outside set `overflowed`.
        """
        for name, array, size in (("key", key, "H"), ("value", value, "V")):
            letters = f"[B, S, K, {size}]"
            check_array(name, array, letters, rank=4)
            if array.shape[:3] != key.shape[:3]:
                raise ValueError(f"{name}: expected {letters}, got {list(array.shape)}")
        keys, values = (jnp.swapaxes(x, 1, 2) for x in (key, value))
        B, S = key.shape[:2]
        tokens, overflowed = _no_tokens(B)
        if lengths is None:
            return cls(keys, values, tokens + S, overflowed)
        check_array("lengths", lengths, "[B]", "integer", shape=(B,))
        least, most = integers.known_range(lengths) or (0, 0)
        if least < 0 or most > S:
            raise ValueError(f"lengths: expected 0 <= lengths <= S = {S}, got {least} to {most}")
        tokens = jnp.asarray(integers.clamped(lengths))
        return cls(keys, values, jnp.clip(tokens, 0, S), (tokens < 0) | (tokens > S))

    def append(self, key: Any, value: Any, valid: Valid = None) -> "DenseCache":
        slots, extended = self.reserve(key, value, valid)
        keys, values = write(self.keys, key, slots), write(self.values, value, slots)
        return dataclasses.replace(extended, keys=keys, values=values)

    def reserve(
        self, key: Any, value: Any, valid: Valid = None
    ) -> tuple[Int[Array, "B T"], "DenseCache"]:
        """Returns the slots `[B, T]` of appended tokens, S for those left out, and the extended
        cache, to which nothing is written yet. Arguments and errors as in `append`."""
        T = self._check(key, value, valid)
        lengths = self.lengths + _counts(T, valid)
        _check_room(lengths, self.capacity, "tokens")
        slots = self.next_positions(T, valid)
        slots = jnp.where(self._kept(slots, valid), slots, self.capacity)
        overflowed = self.overflowed | (lengths > self.capacity)
        lengths = jnp.minimum(lengths, self.capacity)
        return slots, typed_like(DenseCache(self.keys, self.values, lengths, overflowed), self)


@pytree_dataclass
class RollingCache(Cache):
    """A cache of the last tokens only, for `Window(left=window)`: old tokens are overwritten.

    Token p lies at slot p mod S. There are `window + chunk` slots, so that with up to `chunk`
    tokens appended at a time the first of them still finds all tokens of its window.

    >>> cache = jattn.cache.RollingCache.create(2, 4, 2, 8, chunk=3).append(k[:, :3], v[:, :3])
    >>> cache.capacity, cache.lengths.tolist()
    (7, [3, 3])
    """

    keys: Any = array_field("B K S H")
    values: Any = array_field("B K S V")
    lengths: Any = array_field("B")  # tokens ever appended
    overflowed: Any = array_field("B")
    window: int = static_field()

    @classmethod
    def create(
        cls,
        batch: Size,
        window: int,
        num_kv_heads: int,
        head_size: int,
        value_size: int | None = None,
        dtype: Any = jnp.float32,
        chunk: int | None = None,
    ) -> "RollingCache":
        """Creates an empty cache; `chunk`, by default `window`, is the most tokens of one append.
        With a window of 0 each token sees itself alone."""
        check_size("window", window, 0)
        chunk = max(window, 1) if chunk is None else chunk
        check_sizes(batch=batch, num_kv_heads=num_kv_heads, chunk=chunk)
        shape = (batch, num_kv_heads, window + chunk)
        return cls(*_empty(shape, head_size, value_size, dtype), *_no_tokens(batch), window)

    @property
    def chunk(self) -> int:
        """The most tokens of one append."""
        return self.capacity - self.window

    @property
    def kv_positions(self) -> Int[Array, "B S"]:
        """The position last written to each slot, negative for a slot that was never written."""
        slots = jnp.arange(self.capacity, dtype=jnp.int32)
        last = self.lengths[:, None] - 1
        return last - (last - slots[None, :]) % self.capacity

    def mask(self) -> Mask:
        return Lengths(kv=jnp.minimum(self.lengths, self.capacity)) & Window(left=self.window)

    def append(self, key: Any, value: Any, valid: Valid = None) -> "RollingCache":
        T = self._check(key, value, valid)
        counts = _counts(T, valid)
        if valid is None and self.chunk < T:
            raise ValueError(
                f"append: expected T <= chunk = {self.chunk} tokens at a time, got {T}; "
                "`cached_attention` takes any number"
            )
        _check_room(counts, self.chunk, "new tokens at a time")
        slots = self.next_positions(T, valid) % self.capacity
        if valid is not None:
            slots = jnp.where(valid, slots, self.capacity)
        lengths = self.lengths + counts  # negative after an overflow of int32
        extended = RollingCache(
            write(self.keys, key, slots),
            write(self.values, value, slots),
            lengths,
            self.overflowed | (counts > self.chunk) | (lengths < 0),
            self.window,
        )
        return typed_like(extended, self)


@pytree_dataclass
class PagedCache(Cache):
    """A cache of tokens in pages of a common pool (Kwon et al. 2023, PagedAttention).

    `keys [P, K, page, H]` and `values [P, K, page, V]` belong to all rows; `table [B, M]` holds the
    page of tokens m · page … of a row. Rows may share pages after `reorder`, as beams and prompts
    with a common beginning do. They copy only the last page, if both continue writing to it, at the
    time of the write. A page that no row holds is free again.

    >>> cache = jattn.cache.PagedCache.create(2, 16, 2, 8, page_size=4).append(k, v)
    >>> cache.num_pages, cache.pages_held().tolist()
    (8, [1, 1, 1, 1, 0, 0, 0, 0])
    """

    keys: Any = array_field("P K p H")
    values: Any = array_field("P K p V")
    table: Any = array_field("B M")
    lengths: Any = array_field("B")
    overflowed: Any = array_field("B")

    @classmethod
    def create(
        cls,
        batch: Size,
        length: int,
        num_kv_heads: int,
        head_size: int,
        value_size: int | None = None,
        dtype: Any = jnp.float32,
        page_size: int = 16,
        num_pages: int | None = None,
    ) -> "PagedCache":
        """Creates an empty cache for up to `length` tokens in each row, in pages of `page_size`.

        `num_pages`, by default enough for all rows to be full, may be fewer if rows share pages.
        """
        check_sizes(batch=batch, length=length, num_kv_heads=num_kv_heads, page_size=page_size)
        per_row = -(-length // page_size)
        pages = batch * per_row if num_pages is None else num_pages
        check_size("num_pages", pages)
        shape = (pages, num_kv_heads, page_size)
        table = jnp.full((batch, per_row), pages, jnp.int32)
        return cls(*_empty(shape, head_size, value_size, dtype), table, *_no_tokens(batch))

    @property
    def page_size(self) -> int:
        """The number of tokens in a page."""
        return self.keys.shape[2]

    @property
    def num_pages(self) -> Size:
        """P: the number of pages in the pool."""
        return self.keys.shape[0]

    @property
    def capacity(self) -> Size:
        return self.table.shape[1] * self.page_size

    def pages_held(self) -> Int[Array, " P"]:
        """Returns the number of rows that hold each page."""
        return _counted(self._held(), size=self.num_pages)

    def _held(self) -> Int[Array, "B M"]:
        """Returns the table, with P for pages that a row has not reached yet."""
        place = jnp.arange(self.table.shape[1], dtype=jnp.int32)[None, :]
        begun = place * self.page_size < self.lengths[:, None]
        return jnp.where(begun, self.table, self.num_pages)

    def read(self) -> tuple[Float[Array, "B K S H"], Float[Array, "B K S V"]]:
        return self._gather(self.table)

    def pages(self) -> tuple[Float[Array, "P K p H"], Float[Array, "P K p V"], Int[Array, "B M"]]:
        return self.keys, self.values, self._held()

    def block(
        self, start: Any, size: int
    ) -> tuple[Float[Array, "B K s H"], Float[Array, "B K s V"]]:
        first, pages = start // self.page_size, size // self.page_size
        return self._gather(jax.lax.dynamic_slice_in_dim(self.table, first, pages, axis=1))

    def _gather(self, table: Int[Array, "B m"]) -> tuple[Array, Array]:
        return _read_pages(self.keys, table), _read_pages(self.values, table)

    def append(self, key: Any, value: Any, valid: Valid = None) -> "PagedCache":
        T = self._check(key, value, valid)
        wanted = self.lengths + _counts(T, valid)
        _check_room(wanted, self.capacity, "tokens")
        lengths = jnp.minimum(wanted, self.capacity)
        holders, page = self.pages_held(), self.page_size
        table, copied, short = _allocate(holders, self.table, self.lengths, lengths, page=page)
        if _known(short) and np.any(np.asarray(short)):
            raise ValueError(
                f"append: row {int(np.argmax(np.asarray(short)))} needs another page, "
                f"all {self.num_pages} are held"
            )
        slots = self.next_positions(T, valid)
        place = jnp.minimum(slots // self.page_size, table.shape[1] - 1)
        pages = jnp.where(
            self._kept(slots, valid), jnp.take_along_axis(table, place, axis=1), self.num_pages
        )

        index = jnp.stack([pages, slots % self.page_size], axis=-1)
        overflowed = self.overflowed | (wanted > self.capacity) | short
        keys, values = (
            _write_pages(pool, jnp.asarray(tokens), index, copied)
            for pool, tokens in ((self.keys, key), (self.values, value))
        )
        return typed_like(PagedCache(keys, values, table, lengths, overflowed), self)

    def reorder(self, indices: Int[Array, " R"]) -> "PagedCache":
        rows, missing = picked_rows(indices, len(self.lengths))
        picked = _picked(DenseCache(None, self.table, self.lengths, self.overflowed), rows, missing)
        return PagedCache(self.keys, self.values, picked.values, picked.lengths, picked.overflowed)


@jax.jit
@left_to_xla(lambda pool, *_: as_operand(pool))
def _write_pages(
    pool: Float[Array, "P K p H"],
    tokens: Float[Array, "B T K H"],
    index: Int[Array, "B T 2"],
    copied: tuple[Int[Array, " B"], Int[Array, " B"]],
) -> Float[Array, "P K p H"]:
    """Copies pages from the first of `copied` to the second, then writes tokens to their pages and
    slots; tokens of page P are left out.

    Heads are a batch axis, as in `write`; `at[]` and `vmap` allow a batch axis only in front.
    """
    pool = pool.at[copied[1]].set(pool.at[copied[0]].get(mode="clip"), mode="drop")
    tokens = tokens.astype(pool.dtype)
    index = jnp.broadcast_to(index[:, :, None], (*tokens.shape[:3], 2))
    axes = jax.lax.ScatterDimensionNumbers(
        update_window_dims=(3,),
        inserted_window_dims=(0, 2),
        scatter_dims_to_operand_dims=(0, 2),
        operand_batching_dims=(1,),
        scatter_indices_batching_dims=(2,),
    )
    drop = jax.lax.GatherScatterMode.FILL_OR_DROP
    return jax.lax.scatter(pool, index, tokens, axes, mode=drop)


@functools.partial(jax.jit, static_argnames="size")
@left_to_xla(lambda *_, **__: PartitionSpec(None))
def _counted(pages: Int[Array, "B M"], *, size: Size) -> Int[Array, " P"]:
    """Counts how often each of `size` pages occurs."""
    return jnp.zeros(size, jnp.int32).at[pages].add(1, mode="drop")


@jax.jit
@left_to_xla(lambda pool, table: PartitionSpec(cuts_of(table)[0], cuts_of(pool)[1], None, None))
def _read_pages(pool: Float[Array, "P K p H"], table: Int[Array, "B m"]) -> Float[Array, "B K S H"]:
    """Gathers these pages, those of each row concatenated."""
    rows = jnp.swapaxes(pool.at[table].get(mode="clip"), 1, 2)
    return rows.reshape(*rows.shape[:2], -1, rows.shape[-1])


def _cuts_of_allocation(holders: Array, table: Array, lengths: Array, *_: Any, **__: Any) -> Any:
    row = as_operand(lengths)
    return as_operand(table), (row, row), row


@functools.partial(jax.jit, static_argnames="page")
@left_to_xla(_cuts_of_allocation)
def _allocate(
    holders: Array, table: Array, old_lengths: Array, lengths: Array, *, page: int
) -> tuple[Array, tuple[Array, Array], Array]:
    """Allocates pages for rows that grow from `old_lengths` to `lengths` tokens.

    Returns the new table, the pages to copy from and to (P: none), and which rows found no free
    page. `holders` is the number of rows that hold each page.
    """
    P = holders.shape[0]
    begun, needed = (-(-x // page) for x in (old_lengths, lengths))
    last = jnp.take_along_axis(table, jnp.maximum(begun - 1, 0)[:, None], axis=1)[:, 0]
    writes = (lengths > old_lengths) & (old_lengths % page > 0)
    writers = jnp.zeros(P, jnp.int32).at[jnp.where(writes, last, P)].add(1, mode="drop")
    rows = jnp.arange(lengths.shape[0], dtype=jnp.int32)
    first = jnp.full(P, rows.shape[0], jnp.int32)
    first = first.at[jnp.where(writes, last, P)].min(rows, mode="drop")
    # If all rows that hold a page write to it, one of them keeps it: the others get copies.
    at_last = jnp.minimum(last, P - 1)
    keeps = (writers[at_last] == holders[at_last]) & (first[at_last] == rows)
    copies = writes & (holders[at_last] > 1) & ~keeps
    copied = copies.astype(jnp.int32)
    new = copied + needed - begun
    offset = jnp.cumsum(new, dtype=jnp.int32) - new
    free = jnp.argsort(holders > 0, stable=True).astype(jnp.int32)
    count = jnp.sum(holders == 0, dtype=jnp.int32)

    def taken(index: Array) -> Array:
        return jnp.where(index < count, free[jnp.minimum(index, P - 1)], P)

    place = jnp.arange(table.shape[1], dtype=jnp.int32)[None, :]
    copy = (place == begun[:, None] - 1) & copies[:, None]
    fresh = (place >= begun[:, None]) & (place < needed[:, None])
    index = (offset + copied - begun)[:, None] + place
    table = jnp.where(copy, taken(offset)[:, None], table)
    table = jnp.where(fresh, taken(index), table)
    pages = jnp.where(copies, last, P), jnp.where(copies, taken(offset), P)
    return table, pages, (new > 0) & (offset + new > count)
