"""`DenseCache`: the token at position p is in slot p."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int

from jattn._explicit import typed_like
from jattn._pytree import array_field, pytree_dataclass
from jattn._types import Size
from jattn.cache.base import Cache, Positions, Valid, check_counts, count_tokens
from jattn.cache.quantized import converted, storage_dtype
from jattn.cache.storage import empty, no_tokens, positions_of, write, write_positions
from jattn.checks import check_array, check_sizes
from jattn.functions import integers


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
    positions: Any = array_field("B S", default=None)
    is_kind = True

    @classmethod
    def create(
        cls,
        batch: Size,
        length: int,
        num_kv_heads: int,
        head_size: int,
        value_size: int | None = None,
        dtype: Any = jnp.float32,
        positions: bool = False,
    ) -> "DenseCache":
        """Creates an empty cache for `batch` rows of up to `length` tokens.

        With `positions=True` it keeps the position of each token, for `append(..., positions=)`.
        """
        check_sizes(batch=batch, length=length, num_kv_heads=num_kv_heads)
        shape = (batch, num_kv_heads, length)
        stored_positions = positions_of(positions, (batch, length))
        return cls(*empty(shape, head_size, value_size, dtype), *no_tokens(batch), stored_positions)

    @classmethod
    def of(
        cls,
        key: Any,
        value: Any,
        lengths: Any = None,
        dtype: Any = None,
        positions: Positions = None,
    ) -> "DenseCache":
        """Creates a cache that holds `key [B, S, K, H]` and `value [B, S, K, V]`, such as those of
        an encoder's output.

        `lengths [B]` is the number of tokens of each batch row without padding, which is on the
        right; by default S. `dtype` is by default that of the arrays. `positions`, integers
        `[B, S]` or `[S]`, are the positions that masks and score functions see, which the cache
        keeps; by default the token in slot i has position i.

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
        if dtype is not None:
            dtype = storage_dtype("dtype", dtype, key=key.shape[-1], value=value.shape[-1])
            keys, values = converted(keys, dtype), converted(values, dtype)
        B, S = key.shape[:2]
        tokens, overflowed = no_tokens(B)
        if lengths is None:
            tokens = tokens + S
        else:
            check_array("lengths", lengths, "[B]", "integer", shape=(B,))
            least, most = integers.known_range(lengths) or (0, 0)
            if least < 0 or most > S:
                got = f"{least} to {most}"
                raise ValueError(f"lengths: expected 0 <= lengths <= S = {S}, got {got}")
            tokens = jnp.asarray(integers.clamped(lengths))
            tokens, overflowed = jnp.clip(tokens, 0, S), (tokens < 0) | (tokens > S)
        cache = cls(keys, values, tokens, overflowed, positions_of(positions is not None, (B, S)))
        if positions is None:
            return cache
        as_int32 = cache.next_positions(S, positions=positions)
        return dataclasses.replace(cache, positions=as_int32, overflowed=cache._lost(positions))

    def _extended(self, key: Any, value: Any, valid: Valid, positions: Positions) -> "DenseCache":
        slots, extended = self._reserved(key.shape[1], valid, positions)
        keys, values = write(self.keys, key, slots), write(self.values, value, slots)
        return dataclasses.replace(extended, keys=keys, values=values)

    def reserve(
        self, key: Any, value: Any, valid: Valid = None, positions: Positions = None
    ) -> tuple[Int[Array, "B T"], "DenseCache"]:
        """Returns the slots `[B, T]` of the tokens to append, and the cache with its new lengths
        and positions, to which keys and values are not yet written. The slot of a token to leave
        out is S.

        Takes the arguments of `append` and raises the same errors.
        """
        self._check(key, value, valid)
        return self._reserved(key.shape[1], valid, positions)

    def _reserved(
        self, T: int, valid: Valid, positions: Positions
    ) -> tuple[Int[Array, "B T"], "DenseCache"]:
        lengths = self.lengths + count_tokens(T, valid)
        check_counts(lengths, self.capacity, "capacity")
        slots = self.next_positions(T, valid)
        slots = jnp.where(self._fits(slots, valid), slots, self.capacity)
        new_positions = self.next_positions(T, valid, positions)
        extended = dataclasses.replace(
            self,
            lengths=jnp.minimum(lengths, self.capacity),
            overflowed=self._lost(positions) | (lengths > self.capacity),
            positions=write_positions(write, self.positions, new_positions, slots),
        )
        return slots, typed_like(extended, self)
