"""Caches of keys and values for decoding: frozen pytrees; `append` returns the extended cache.

    cache = DenseCache.create(B, 512, num_kv_heads, head_size)
    cache = cache.append(key, value)                         # [B, T, K, H], [B, T, K, V]
    out = jattn.attention(query, cache, mask=masks.Causal())

Each batch row holds its own number of tokens, so that prompts of different lengths decode together.
Arrays have the layout that is fastest to read, `[B, K, S, H]`. A token's position is the number of
tokens before it in its batch row, without padding, whatever slot it lies in.

Appending more tokens than fit raises an error if the lengths are concrete arrays. In a compiled
program the tokens that do not fit are left out, the batch row's flag `overflowed` is set, and
attention to that batch row gives NaN.
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

from jattn._explicit import as_rows, partition_spec_of, partitioned_by_xla, sharding_of, typed_like
from jattn._pytree import array_field, pytree_dataclass, static_field
from jattn._types import Shape, Size, Tree
from jattn.checks import check_array, check_dtype, check_size, check_sizes
from jattn.functions import integers
from jattn.masks import Lengths, Mask, Window


__all__ = ["Cache", "DenseCache", "PagedCache", "RollingCache"]
__dir__ = __all__.copy


Valid = Bool[Array | np.ndarray, "B T"] | None
SomeCache = TypeVar("SomeCache", bound="Cache")


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
        """The position of the token in each slot; None if slot i holds position i."""
        return None

    def mask(self) -> Mask:
        """Returns the mask of the slots that hold tokens to attend to."""
        return Lengths(kv=self.lengths)

    def read(self) -> tuple[Float[Array, "B K S H"], Float[Array, "B K S V"]]:
        """Returns the keys and values of all slots."""
        return self.keys, self.values

    def nan_if_overflowed(self, results: Tree) -> Tree:
        """Returns a tree of results `[B, ...]`, with NaN for the batch rows that overflowed."""
        flag = lambda x: self.overflowed.reshape(-1, *(1,) * (x.ndim - 1))  # noqa: E731
        return jax.tree.map(lambda x: jnp.where(flag(x), jnp.nan, x), results)

    def pages(self) -> tuple[Float[Array, "P K p H"], Float[Array, "P K p V"], Int[Array, "B M"]]:
        """Returns the stored keys and values as P pages of p slots, and a table of M page numbers
        for each batch row.

        The table holds P where a batch row has no page. In this base class, all slots of a batch
        row are one page.
        """
        return self.keys, self.values, jnp.arange(self.lengths.shape[0], dtype=jnp.int32)[:, None]

    def block(
        self, start: Any, size: int
    ) -> tuple[Float[Array, "B K s H"], Float[Array, "B K s V"]]:
        """Returns the keys and values of the `size` slots from `start` on. In a paged cache both
        are multiples of the page size."""
        keys, values = (
            jax.lax.dynamic_slice_in_dim(x, start, size, axis=2) for x in (self.keys, self.values)
        )
        return keys, values

    def append(self, key: Any, value: Any, valid: Valid = None) -> "Cache":
        """Returns the cache with T more tokens in each batch row.

        Args:
            key: `[B, T, K, H]`; cast to the cache's dtype.
            value: `[B, T, K, V]`; cast to the cache's dtype.
            valid: bool `[B, T]`, False for padding, which is not appended. Padding may stand at
                the start or at the end of a batch row.

        Raises ValueError for wrong shapes, and if the lengths are concrete and the tokens do not
        fit.
        """
        raise NotImplementedError

    def reorder(self: SomeCache, indices: Int[Array, " R"]) -> SomeCache:
        """Returns the cache of R batch rows selected by index, for beam search.

        A batch row may be selected repeatedly or not at all. Raises ValueError for concrete indices
        outside 0..B−1; for such indices a compiled program sets `overflowed` of the result's row.
        """
        rows, out_of_range = picked_rows(indices, len(self.lengths))
        return _select_rows(self, rows, out_of_range)

    def next_positions(self, T: int, valid: Valid = None) -> Int[Array, "B T"]:
        """Returns the positions of the next T tokens; at padding the numbers have no meaning."""
        self._check_valid(valid, T)
        if valid is None:
            return self.lengths[:, None] + jnp.arange(T, dtype=jnp.int32)[None, :]
        counts = jnp.cumsum(jnp.asarray(valid), axis=1, dtype=jnp.int32)
        return jnp.maximum(self.lengths[:, None] + counts - 1, 0)

    def last_positions(self, T: int) -> Int[Array, "B T"]:
        """Returns the positions of the T tokens that were appended last."""
        check_size("T", T, 0)
        return self.lengths[:, None] + jnp.arange(-T, 0, dtype=jnp.int32)[None, :]

    def _fits(self, slots: Int[Array, "B T"], valid: Valid) -> Bool[Array, "B T"]:
        """Returns which tokens are not padding and have a slot within the capacity."""
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
    """Returns indices clamped to 0..B−1, and a boolean for each, true if it was out of range.

    Raises TypeError for indices that are not integers, and ValueError for concrete indices that are
    out of range.
    """
    check_array("indices", indices, "[R]", "integer", rank=1)
    least, most = integers.known_range(indices) or (0, 0)
    if least < 0 or most >= B:
        wrong = least if least < 0 else most
        raise ValueError(f"indices: expected 0 <= indices < B = {B}, got {wrong}")
    rows = jnp.asarray(integers.clamped(indices))
    return jnp.clip(rows, 0, B - 1), (rows < 0) | (rows >= B)


@jax.jit
@partitioned_by_xla(lambda cache, rows, _: jax.tree.map(lambda x: as_rows(x, len(rows)), cache))
def _select_rows(cache: Any, rows: Int[Array, " R"], out_of_range: Bool[Array, " R"]) -> Any:
    """Selects batch rows of a cache, whose arrays all have a batch axis.

    The pool of a paged cache has no batch axis: `PagedCache.reorder` passes a dense cache with the
    table in place of values and without keys.
    """
    selected = jax.tree.map(lambda x: x[rows], cache)
    return dataclasses.replace(selected, overflowed=selected.overflowed | out_of_range)


def _count_tokens(T: int, valid: Valid) -> Any:
    """Returns the number of tokens appended to each batch row, `[B]`; T if there is no padding."""
    return T if valid is None else jnp.sum(jnp.asarray(valid), axis=1, dtype=jnp.int32)


def _check_counts(counts: Any, limit: Any, limit_name: str) -> None:
    """Raises ValueError if counts of tokens are concrete and exceed a limit. `counts` is an array
    `[B]`, or one number for all batch rows."""
    if isinstance(counts, Tracer) or not np.any(np.asarray(counts) > limit):
        return
    counts = np.atleast_1d(np.asarray(counts))
    row = int(np.argmax(counts > limit))
    raise ValueError(
        f"append: expected at most {limit_name} = {int(limit)} tokens in each batch row, got "
        f"{int(counts[row])} in batch row {row}"
    )


@jax.jit
@partitioned_by_xla(lambda buffer, *_: partition_spec_of(buffer))
def write(
    buffer: Float[Array, "B K S H"], tokens: Any, slots: Int[Array, "B T"]
) -> Float[Array, "B K S H"]:
    """Writes tokens `[B, T, K, H]` to slots of their batch rows; leaves out tokens with slot S."""
    tokens = jnp.swapaxes(jnp.asarray(tokens).astype(buffer.dtype), 1, 2)

    def write_head(buffer: Array, tokens: Array, slots: Array) -> Array:
        return buffer.at[slots].set(tokens, mode="drop")  # drop: leaves out slots beyond the end

    # `vmap` over batch rows, not an index, shows XLA that batch rows on different devices are
    # independent. `vmap` over heads keeps the layout: for an index XLA for TPUs would copy the
    # buffer into a layout in which the heads of a token are adjacent, and back.
    slots = jnp.broadcast_to(slots[:, None], tokens.shape[:3])
    return jax.vmap(jax.vmap(write_head))(buffer, tokens, slots)


def _empty(shape: Shape, head_size: int, value_size: int | None, dtype: Any) -> tuple[Array, Array]:
    """Returns the keys and values of an empty cache: zeros `[*shape, H]` and `[*shape, V]`."""
    sizes = (head_size, head_size if value_size is None else value_size)
    check_size("head_size", sizes[0])
    check_size("value_size", sizes[1])
    check_dtype("dtype", dtype)
    keys, values = (jnp.zeros((*shape, size), dtype) for size in sizes)
    return keys, values


def _no_tokens(batch: Size) -> tuple[Array, Array]:
    """Returns the lengths and overflow flags of empty batch rows."""
    return jnp.zeros(batch, jnp.int32), jnp.zeros(batch, bool)


@pytree_dataclass
class DenseCache(Cache):
    """A cache that stores the token at position p in slot p.

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
        """Creates an empty cache for `batch` rows of up to `length` tokens."""
        check_sizes(batch=batch, length=length, num_kv_heads=num_kv_heads)
        shape = (batch, num_kv_heads, length)
        return cls(*_empty(shape, head_size, value_size, dtype), *_no_tokens(batch))

    @classmethod
    def of(cls, key: Any, value: Any, lengths: Any = None) -> "DenseCache":
        """Creates a cache that holds `key [B, S, K, H]` and `value [B, S, K, V]`, such as those of
        an encoder's output.

        `lengths [B]` is the number of tokens of each batch row without padding, which is on the
        right; by default S.

        Raises TypeError and ValueError for wrong arrays and for concrete lengths outside 0..S;
        traced lengths outside 0..S set `overflowed`.
        """
        for name, array, size in (("key", key, "H"), ("value", value, "V")):
            letters = f"[B, S, K, {size}]"
            check_array(name, array, letters, rank=4)
            if array.shape[:3] != key.shape[:3]:
                raise ValueError(
                    f"{name}: expected {letters} with [B, S, K] = {list(key.shape[:3])} as in key, "
                    f"got {list(array.shape)}"
                )
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
        """Returns the slots `[B, T]` of the tokens to append, and the cache with its new lengths,
        to which the tokens are not yet written. The slot of a token to leave out is S.

        Takes the arguments of `append` and raises the same errors.
        """
        T = self._check(key, value, valid)
        lengths = self.lengths + _count_tokens(T, valid)
        _check_counts(lengths, self.capacity, "capacity")
        slots = self.next_positions(T, valid)
        slots = jnp.where(self._fits(slots, valid), slots, self.capacity)
        overflowed = self.overflowed | (lengths > self.capacity)
        lengths = jnp.minimum(lengths, self.capacity)
        return slots, typed_like(DenseCache(self.keys, self.values, lengths, overflowed), self)


@pytree_dataclass
class RollingCache(Cache):
    """A cache of the last tokens only, for `Window(left=window)`: old tokens are overwritten.

    The token at position p is stored in slot p mod S, with S = `window + chunk`: after an append of
    `chunk` tokens, the cache still holds the `window` tokens before the first of them.

    >>> cache = jattn.cache.RollingCache.create(2, 4, 2, 8, chunk=3).append(k[:, :3], v[:, :3])
    >>> cache.capacity, cache.lengths.tolist()
    (7, [3, 3])
    """

    keys: Any = array_field("B K S H")
    values: Any = array_field("B K S V")
    lengths: Any = array_field("B")  # all tokens appended so far, also overwritten ones
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
        """Creates an empty cache. `chunk` is the largest number of tokens in one `append`, by
        default `window`. With `window=0` each token attends to itself only."""
        check_size("window", window, 0)
        chunk = max(window, 1) if chunk is None else chunk
        check_sizes(batch=batch, num_kv_heads=num_kv_heads, chunk=chunk)
        shape = (batch, num_kv_heads, window + chunk)
        return cls(*_empty(shape, head_size, value_size, dtype), *_no_tokens(batch), window)

    @property
    def chunk(self) -> int:
        """The most tokens that one `append` accepts for a batch row."""
        return self.capacity - self.window

    @property
    def kv_positions(self) -> Int[Array, "B S"]:
        """The position of the token in each slot; negative for a slot without a token."""
        slots = jnp.arange(self.capacity, dtype=jnp.int32)
        last = self.lengths[:, None] - 1
        return last - (last - slots[None, :]) % self.capacity

    def mask(self) -> Mask:
        return Lengths(kv=jnp.minimum(self.lengths, self.capacity)) & Window(left=self.window)

    def append(self, key: Any, value: Any, valid: Valid = None) -> "RollingCache":
        T = self._check(key, value, valid)
        counts = _count_tokens(T, valid)
        if valid is None and self.chunk < T:
            raise ValueError(
                f"append: expected T <= chunk = {self.chunk} tokens at a time, got {T}; "
                "`cached_attention` takes any number"
            )
        _check_counts(counts, self.chunk, "chunk")
        slots = self.next_positions(T, valid) % self.capacity
        if valid is not None:
            slots = jnp.where(valid, slots, self.capacity)
        lengths = self.lengths + counts  # int32 wraps around: a negative length has overflowed
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

    The pool, `keys [P, K, p, H]` and `values [P, K, p, V]`, has P pages of p tokens for all batch
    rows together; page `table[b, m]` holds the tokens m · p to (m + 1) · p − 1 of batch row b.
    After `reorder` batch rows may share pages, as beams of one prompt do. A batch row that appends
    to a shared page copies the page first; if all batch rows that share a page append to it, one of
    them needs no copy. A page that no batch row holds is free.

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
        """Creates an empty cache for `batch` rows of up to `length` tokens, in pages of `page_size`
        tokens.

        `num_pages` is the number of pages in the pool, by default as many as all batch rows need
        when they are full. Fewer suffice if batch rows are shorter or share pages.
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
        """Returns the number of batch rows that hold each page."""
        return _count_pages(self._table_in_use(), size=self.num_pages)

    def _table_in_use(self) -> Int[Array, "B M"]:
        """Returns the table, with P in place of pages in which a batch row has no tokens."""
        m = jnp.arange(self.table.shape[1], dtype=jnp.int32)[None, :]
        in_use = m * self.page_size < self.lengths[:, None]
        return jnp.where(in_use, self.table, self.num_pages)

    def read(self) -> tuple[Float[Array, "B K S H"], Float[Array, "B K S V"]]:
        return self._gather(self.table)

    def pages(self) -> tuple[Float[Array, "P K p H"], Float[Array, "P K p V"], Int[Array, "B M"]]:
        return self.keys, self.values, self._table_in_use()

    def block(
        self, start: Any, size: int
    ) -> tuple[Float[Array, "B K s H"], Float[Array, "B K s V"]]:
        first_page, count = start // self.page_size, size // self.page_size
        return self._gather(jax.lax.dynamic_slice_in_dim(self.table, first_page, count, axis=1))

    def _gather(self, table: Int[Array, "B m"]) -> tuple[Array, Array]:
        return _read_pages(self.keys, table), _read_pages(self.values, table)

    def append(self, key: Any, value: Any, valid: Valid = None) -> "PagedCache":
        T = self._check(key, value, valid)
        uncapped_lengths = self.lengths + _count_tokens(T, valid)
        _check_counts(uncapped_lengths, self.capacity, "capacity")
        lengths = jnp.minimum(uncapped_lengths, self.capacity)
        page_size = self.page_size
        table, copies, lacks_pages = _allocate(
            self.pages_held(), self.table, self.lengths, lengths, page_size=page_size
        )
        if not isinstance(lacks_pages, Tracer) and np.any(np.asarray(lacks_pages)):
            raise ValueError(
                f"append: no free page for batch row {int(np.argmax(np.asarray(lacks_pages)))}, "
                f"all num_pages = {self.num_pages} are in use"
            )
        slots = self.next_positions(T, valid)
        m = jnp.minimum(slots // page_size, table.shape[1] - 1)
        pages = jnp.take_along_axis(table, m, axis=1)
        pages = jnp.where(self._fits(slots, valid), pages, self.num_pages)
        index = jnp.stack([pages, slots % page_size], axis=-1)
        overflowed = self.overflowed | (uncapped_lengths > self.capacity) | lacks_pages
        keys, values = (
            _write_pages(pool, jnp.asarray(tokens), index, copies)
            for pool, tokens in ((self.keys, key), (self.values, value))
        )
        return typed_like(PagedCache(keys, values, table, lengths, overflowed), self)

    def reorder(self, indices: Int[Array, " R"]) -> "PagedCache":
        rows, out_of_range = picked_rows(indices, len(self.lengths))
        # The pool stays as it is. The arrays with a batch axis are selected as a dense cache, whose
        # `values` are the table.
        by_row = DenseCache(None, self.table, self.lengths, self.overflowed)
        by_row = _select_rows(by_row, rows, out_of_range)
        return PagedCache(self.keys, self.values, by_row.values, by_row.lengths, by_row.overflowed)


@jax.jit
@partitioned_by_xla(lambda pool, *_: partition_spec_of(pool))
def _write_pages(
    pool: Float[Array, "P K p H"],
    tokens: Float[Array, "B T K H"],
    index: Int[Array, "B T 2"],
    copies: tuple[Int[Array, " B"], Int[Array, " B"]],
) -> Float[Array, "P K p H"]:
    """Copies pages within the pool, then writes tokens.

    `copies` are the pages to copy from, and the pages to copy to. `index` is the page of each token
    and its slot there. Nothing is written to page P, which does not exist.

    As in `write`, heads are a batch axis of the scatter. The scatter is written out, because `at[]`
    under `vmap` would transpose the pool `[P, K, p, H]` to make K its first axis.
    """
    sources, destinations = copies
    pool = pool.at[destinations].set(pool.at[sources].get(mode="clip"), mode="drop")
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
@partitioned_by_xla(lambda *_, **__: PartitionSpec(None))
def _count_pages(pages: Int[Array, "B M"], *, size: Size) -> Int[Array, " P"]:
    """Counts how often each page number below `size` occurs in the table."""
    return jnp.zeros(size, jnp.int32).at[pages].add(1, mode="drop")


@jax.jit
@partitioned_by_xla(
    lambda pool, table: PartitionSpec(sharding_of(table)[0], sharding_of(pool)[1], None, None)
)
def _read_pages(pool: Float[Array, "P K p H"], table: Int[Array, "B m"]) -> Float[Array, "B K S H"]:
    """Gathers the pages of a table and concatenates the pages of each batch row: S = m · p."""
    pages = jnp.swapaxes(pool.at[table].get(mode="clip"), 1, 2)  # [B, K, m, p, H]
    return pages.reshape(*pages.shape[:2], -1, pages.shape[-1])


def _allocation_shardings(holders: Array, table: Array, lengths: Array, *_: Any, **__: Any) -> Any:
    by_row = partition_spec_of(lengths)
    return partition_spec_of(table), (by_row, by_row), by_row


@functools.partial(jax.jit, static_argnames="page_size")
@partitioned_by_xla(_allocation_shardings)
def _allocate(
    holders: Int[Array, " P"],
    table: Int[Array, "B M"],
    old_lengths: Int[Array, " B"],
    lengths: Int[Array, " B"],
    *,
    page_size: int,
) -> tuple[Int[Array, "B M"], tuple[Int[Array, " B"], Int[Array, " B"]], Bool[Array, " B"]]:
    """Allocates pages for batch rows that grow from `old_lengths` to `lengths` tokens.

    `holders` is the number of batch rows that hold each page. Returns the new table, for each batch
    row the page to copy from and the page to copy to (both P for no copy), and which batch rows
    lack a free page.
    """
    P = holders.shape[0]
    num_old, num_new = (-(-x // page_size) for x in (old_lengths, lengths))  # numbers of pages
    last_page = jnp.take_along_axis(table, jnp.maximum(num_old - 1, 0)[:, None], axis=1)[:, 0]
    writes_to_last = (lengths > old_lengths) & (old_lengths % page_size > 0)
    appended_page = jnp.where(writes_to_last, last_page, P)
    writers = jnp.zeros(P, jnp.int32).at[appended_page].add(1, mode="drop")
    rows = jnp.arange(lengths.shape[0], dtype=jnp.int32)
    first_writer = jnp.full(P, rows.shape[0], jnp.int32).at[appended_page].min(rows, mode="drop")
    # A batch row that appends to a shared page copies it. But if all batch rows that hold a page
    # append to it, the first of them may keep it.
    last_page = jnp.minimum(last_page, P - 1)
    keeps = (writers[last_page] == holders[last_page]) & (first_writer[last_page] == rows)
    copies = writes_to_last & (holders[last_page] > 1) & ~keeps
    num_copies = copies.astype(jnp.int32)  # 0 or 1 for each batch row
    num_wanted = num_copies + num_new - num_old
    # Batch row b gets `num_wanted[b]` free pages, from `free[offset[b]]` on: first the page for its
    # copy, if it copies one, then its new pages.
    offset = jnp.cumsum(num_wanted, dtype=jnp.int32) - num_wanted
    free = jnp.argsort(holders > 0, stable=True).astype(jnp.int32)  # free pages come first
    num_free = jnp.sum(holders == 0, dtype=jnp.int32)

    def free_page(index: Array) -> Array:
        return jnp.where(index < num_free, free[jnp.minimum(index, P - 1)], P)

    m = jnp.arange(table.shape[1], dtype=jnp.int32)[None, :]
    is_copy = (m == num_old[:, None] - 1) & copies[:, None]
    is_new = (m >= num_old[:, None]) & (m < num_new[:, None])
    free_index = (offset + num_copies - num_old)[:, None] + m
    table = jnp.where(is_copy, free_page(offset)[:, None], table)
    table = jnp.where(is_new, free_page(free_index), table)
    copy_from_to = jnp.where(copies, last_page, P), jnp.where(copies, free_page(offset), P)
    return table, copy_from_to, (num_wanted > 0) & (offset + num_wanted > num_free)
