"""`LatentCache`: one vector for each token, from which keys and values are both read."""

import dataclasses
import functools
from typing import Any, Unpack

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jattn._pytree import pytree_dataclass, static_field
from jattn._types import Size
from jattn.cache.base import Cache, CacheOptions, Positions, Valid, check_admission, check_kind
from jattn.cache.dense import DenseCache
from jattn.cache.quantized import Quantized, storage_dtype
from jattn.checks import check_array, check_size
from jattn.masks import Mask


def _delegated(name: str) -> Any:
    """Returns a method that replaces `stored` by the result of the method `name` of `stored`."""

    @functools.wraps(getattr(Cache, name))
    def method(self: "LatentCache", *arguments: Any, **options: Any) -> "LatentCache":
        return self._with(getattr(self.stored, name)(*arguments, **options))

    return method


@pytree_dataclass
class LatentCache(Cache):
    """A cache of one latent vector for each token (DeepSeek-AI 2024, DeepSeek-V2, section 2.1).

    It has one key head. A key has C + R numbers: the token's latent vector, and the rotated part
    that all query heads share. The value is the latent vector: the first C numbers of the key,
    which are stored once. So a token takes C + R numbers, and attention maps queries
    `[B, T, N, C + R]` to `[B, T, N, C]`, see `nn.MultiHeadLatentAttention`. By default scores are
    multiplied by 1/√(C + R); a model trained with keys of size H + R must pass its `scale`.

    The keys are stored in another cache, `stored`, whose values have size 0; attributes that only
    the class of `stored` has are available here too.

    >>> cache = jattn.cache.LatentCache.create(2, 16, latent_size=6, rotary_size=2)
    >>> cache = cache.append(k[:, :, :1])                    # [B, T, 1, C + R]
    >>> jattn.attention(q, cache, mask=masks.Causal(), q_positions=jnp.arange(5)).shape
    (2, 5, 4, 6)
    """

    stored: Any
    latent_size: int = static_field()

    @classmethod
    def create(
        cls,
        batch: Size,
        length: int,
        latent_size: int,
        rotary_size: int = 0,
        dtype: Any = jnp.float32,
        kind: type[Cache] = DenseCache,
        **options: Unpack[CacheOptions],
    ) -> "LatentCache":
        """Creates an empty cache of latent vectors of size C and rotated parts of size R.

        `kind` is the class of `stored`, and `options` are further options of its `create`; for a
        `RollingCache` the length is that of its window. int4 is refused: it packs numbers
        h and (C + R)/2 + h into a byte, so that a value could not be read alone.
        """
        check_size("latent_size", latent_size)
        check_size("rotary_size", rotary_size, 0)
        if storage_dtype("dtype", dtype) == jnp.int4:
            raise ValueError("dtype: expected a dtype of floats, int8 or float8_e4m3fn, got int4")
        cache_class: Any = check_kind(kind)
        sizes = (1, latent_size + rotary_size, 0)
        return cls(cache_class.create(batch, length, *sizes, dtype=dtype, **options), latent_size)

    def __getattr__(self, name: str) -> Any:
        if name == "stored" or name.startswith("__"):  # not yet set, as in a copy
            raise AttributeError(name)
        return getattr(self.stored, name)

    @property
    def values(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The first C numbers of the keys."""
        return self._view(self.stored.keys)

    @property
    def value_size(self) -> int:
        return self.latent_size

    @property
    def capacity(self) -> Size:
        return self.stored.capacity

    @property
    def slots_in_order(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether tokens lie in slots in the order in which they were appended."""
        return self.stored.slots_in_order

    @property
    def kv_positions(self) -> Int[Array, "B S"] | None:
        return self.stored.kv_positions

    @property
    def positions(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The position of the token in each slot, if the cache keeps them."""
        return self.stored.positions

    def mask(self) -> Mask:
        return self.stored.mask()

    def read(self) -> tuple[Float[Array, "B 1 S H"], Float[Array, "B 1 S V"]]:
        keys, _ = self.stored.read()
        return keys, self._view(keys)

    def pages(self) -> tuple[Any, Any, Int[Array, "B M"]]:
        keys, _, table = self.stored.pages()
        return keys, keys, table

    def block(
        self, start: Any, size: int
    ) -> tuple[Float[Array, "B 1 s H"], Float[Array, "B 1 s V"]]:
        keys, _ = self.stored.block(start, size)
        return keys, self._view(keys)

    def _view(self, keys: Any) -> Any:
        if isinstance(keys, Quantized):
            return dataclasses.replace(keys, numbers=self._view(keys.numbers))
        return keys[..., : self.latent_size]

    @property
    def bytes_per_token(self) -> int:
        return self.stored.bytes_per_token

    def append(
        self, key: Any, value: None = None, valid: Valid = None, positions: Positions = None
    ) -> "LatentCache":
        """Returns the cache with T more tokens in each batch row.

        `key` is `[B, T, 1, C + R]`: the latent vectors, and after them the rotated parts. `value`
        must be None. The other arguments and the errors are those of `Cache.append`.
        """
        if value is not None:
            raise ValueError(
                f"value: expected None: the values of a LatentCache are the first "
                f"{self.latent_size} numbers of its keys; got an array"
            )
        check_array("append: key", key, "[B, T, K, H]", rank=4)
        return self._with(self.stored.append(key, key[..., :0], valid, positions))

    reorder = _delegated("reorder")
    fork = _delegated("fork")
    truncate = _delegated("truncate")
    keep = _delegated("keep")
    reset = _delegated("reset")
    with_lengths = _delegated("with_lengths")

    def admit(self, rows: Any, other: Any) -> "LatentCache":
        check_admission(self, other)
        return self._with(self.stored.admit(rows, other.stored))

    def _with(self, stored: Any) -> "LatentCache":
        return dataclasses.replace(self, stored=stored)
