"""`RollingCache`: the last tokens only, for attention in a window."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jattn._explicit import typed_like
from jattn._pytree import array_field, pytree_dataclass, static_field
from jattn._types import Size
from jattn.cache.base import Cache, Positions, Valid, check_counts, count_tokens
from jattn.cache.storage import empty, no_tokens, write
from jattn.checks import check_flag, check_size, check_sizes
from jattn.functions.integers import MOST, is_known
from jattn.masks import Lengths, Mask, Window


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
    oldest: Any = array_field("B")  # the position of the oldest token that was not overwritten
    window: int = static_field()
    slots_in_order = False
    is_kind = True

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
        positions: bool = False,
    ) -> "RollingCache":
        """Creates an empty cache. `chunk` is the largest number of tokens in one `append`, by
        default `window`. With `window=0` each token attends to itself only.

        Raises ValueError for `positions=True`: slots and window depend on the order of tokens.
        """
        check_flag("positions", positions)
        if positions:
            raise ValueError(
                "positions: expected False for a RollingCache, whose slots depend on the order of "
                "tokens; a DenseCache or a PagedCache keeps positions"
            )
        check_size("window", window, 0)
        chunk = max(window, 1) if chunk is None else chunk
        check_sizes(batch=batch, num_kv_heads=num_kv_heads, chunk=chunk)
        shape = (batch, num_kv_heads, window + chunk)
        lengths, overflowed = no_tokens(batch)
        buffers = empty(shape, head_size, value_size, dtype)
        return cls(*buffers, lengths, overflowed, jnp.zeros_like(lengths), window)

    @property
    def chunk(self) -> int:
        """The most tokens that one `append` accepts for a batch row."""
        return self.capacity - self.window

    @property
    def kv_positions(self) -> Int[Array, "B S"]:
        """The position of the token in each slot; negative for a slot without a token, or with
        one that was truncated."""
        slots = jnp.arange(self.capacity, dtype=jnp.int32)
        last = self.lengths[:, None] - 1
        positions = last - (last - slots[None, :]) % self.capacity
        # No window of a query at a position >= 0 reaches back to −2S.
        return jnp.where(positions < self.oldest[:, None], -2 * self.capacity, positions)

    @property
    def _max_length(self) -> int:
        return MOST

    def mask(self) -> Mask:
        return Lengths(kv=jnp.minimum(self.lengths, self.capacity)) & Window(left=self.window)

    def _extended(self, key: Any, value: Any, valid: Valid, positions: Positions) -> "RollingCache":
        T = key.shape[1]
        counts = count_tokens(T, valid)
        if valid is None and self.chunk < T:
            raise ValueError(
                f"append: expected T <= chunk = {self.chunk} tokens at a time, got {T}; "
                "`cached_attention` takes any number"
            )
        check_counts(counts, self.chunk, "chunk")
        slots = self.next_positions(T, valid, positions) % self.capacity
        if valid is not None:
            slots = jnp.where(valid, slots, self.capacity)
        lengths = self.lengths + counts  # int32 wraps around: a negative length has overflowed
        extended = RollingCache(
            write(self.keys, key, slots),
            write(self.values, value, slots),
            lengths,
            self.overflowed | (counts > self.chunk) | (lengths < 0),
            jnp.maximum(self.oldest, lengths - self.capacity),
            self.window,
        )
        return typed_like(extended, self)

    def truncate(self, lengths: Any) -> "RollingCache":
        """Returns the cache without the tokens after the first `lengths` of each batch row, see
        `Cache.truncate`.

        That is possible while the cache holds the `window` tokens before the new end: if the batch
        row becomes at most `chunk` tokens shorter than it has ever been, if no slot was overwritten
        yet, or if no token is left. Otherwise concrete lengths raise ValueError, and traced ones
        are flagged as `overflowed`.
        """
        truncated = super().truncate(lengths)
        is_lost = jnp.maximum(truncated.lengths - self.window, 0) < truncated.oldest
        if is_known(is_lost) and np.any(np.asarray(is_lost)):
            row = int(np.argmax(np.asarray(is_lost)))
            raise ValueError(
                f"lengths: expected at least {int(self.oldest[row]) + self.window} in batch row "
                f"{row}, as earlier tokens of its window were overwritten, got "
                f"{int(truncated.lengths[row])}; a cache with a larger `chunk` keeps more"
            )
        return truncated.with_lengths(truncated.lengths, truncated.overflowed | is_lost)

    def with_lengths(self, lengths: Array, overflowed: Array) -> "RollingCache":
        changed = super().with_lengths(lengths, overflowed)
        oldest = jnp.where(lengths == 0, 0, self.oldest)
        return typed_like(dataclasses.replace(changed, oldest=oldest), self)
