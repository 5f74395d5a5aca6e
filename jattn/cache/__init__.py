"""Caches of keys and values for decoding: frozen pytrees; `append` returns the extended cache.

    cache = DenseCache.create(B, 512, num_kv_heads, head_size)
    cache = cache.append(key, value)                         # [B, T, K, H], [B, T, K, V]
    out = jattn.attention(query, cache, mask=masks.Causal())

Each batch row holds its own number of tokens, so that prompts of different lengths decode together.
Arrays have the layout that is fastest to read, `[B, K, S, H]`. A token's position is the number of
tokens before it in its batch row, without padding, whatever slot it lies in, unless the cache was
created with `positions=True` and the token was appended with another position.

Sequences begin, end and go back without recompilation: `reset` empties batch rows, `admit` moves
rows of another cache in, `append` with `valid` gives each row its own number of new tokens, and
`truncate` removes the last ones. `fork` and `reorder` continue one row in several ways.

Appending more tokens than fit raises an error if the lengths are concrete arrays. In a compiled
program the tokens that do not fit are left out, the batch row's flag `overflowed` is set, and
attention to that batch row gives NaN.
"""

from jattn.cache.base import Cache
from jattn.cache.dense import DenseCache
from jattn.cache.paged import PagedCache
from jattn.cache.rolling import RollingCache


__all__ = ["Cache", "DenseCache", "PagedCache", "RollingCache"]
__dir__ = __all__.copy
