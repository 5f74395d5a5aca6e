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

With `dtype=jnp.int8`, `jnp.float8_e4m3fn` or `jnp.int4`, each token is quantised when it is
appended, with a float32 scale for each head, see `Quantized`:

>>> cache = jattn.cache.DenseCache.create(2, 16, 2, 8, dtype=jnp.int8).append(k, v)
>>> exact = jattn.cache.DenseCache.create(2, 16, 2, 8).append(k, v)
>>> cache.bytes_per_token, exact.bytes_per_token
(48, 128)

In int8 each number of a key k is off by at most max|k| / 254, in int4 by max|k| / 14. In
float8_e4m3fn number x is off by at most |x| / 16 or max|k| / 458,752, whichever is larger. With
such a bound ε a score is off by at most δ = scale · ‖q‖₁ · ε. The output is off by at most the
bound ε of the values plus (exp(2 δ) − 1) · max|v|.

Appending more tokens than fit raises an error if the lengths are concrete arrays. In a compiled
program the tokens that do not fit are left out, the batch row's flag `overflowed` is set, and
attention to that batch row gives NaN.
"""

from jattn.cache.base import Cache
from jattn.cache.dense import DenseCache
from jattn.cache.latent import LatentCache
from jattn.cache.paged import PagedCache
from jattn.cache.quantized import Quantized
from jattn.cache.rolling import RollingCache


__all__ = ["Cache", "DenseCache", "LatentCache", "PagedCache", "Quantized", "RollingCache"]
__dir__ = __all__.copy
