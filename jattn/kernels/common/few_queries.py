"""The requirements of every kernel for a few queries on many keys."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from jattn import tuning
from jattn._types import Size
from jattn.cache import Cache, Quantized
from jattn.cache.storage import read_pages
from jattn.spec import Shapes, Spec, refusal_of_normalizer


def unsupported(spec: Spec, shapes: Shapes) -> str | None:
    """Returns why no such kernel can compute a call; None if some may."""
    if not shapes.has_static_lengths:
        return f"expected integers T and S, got the symbols T = {shapes.T}, S = {shapes.S}"
    most = tuning.current().few_queries
    if shapes.T > most:
        return f"expected at most {most} queries at a time, got {shapes.T}"
    if spec.dropout_rate:
        return "dropout is for training"
    return refusal_of_normalizer(spec)


def shapes(query: Array, cache: Cache) -> Shapes:
    """The sizes of a call of `query [B, T, N, H]` on a cache of B rows."""
    B, T, N, H = query.shape
    S, K, V = cache.capacity, cache.num_kv_heads, cache.value_size
    return Shapes((B,), T, S, N, K, H, V, query.dtype)


def scales(cache: Cache, capacity: Size) -> list[Array]:
    """Returns the scales of keys and of values, padded to `[B, K, capacity]`; none if the cache is
    not quantised.

    They are gathered from pages, because a page has too few scales to be copied alone.
    """
    *stored, table = cache.pages()
    arrays: list[Any] = [x.scales for x in stored if isinstance(x, Quantized)]
    if hasattr(cache, "page_size"):
        arrays = [read_pages(x[..., None], table)[..., 0] for x in arrays]
    return [jnp.pad(x, ((0, 0), (0, 0), (0, capacity - x.shape[2]))) for x in arrays]
