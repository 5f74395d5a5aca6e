"""Multi-head attention as a list of heads."""

from typing import Unpack

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jattn._advice import LAYER_ADVICE
from jattn._advised import advised_by
from jattn.nn._types import CallOptions
from jattn.nn.attention import MultiHeadAttention
from jattn.nn.module import Module


class SingleHeads(Module):
    """Multi-head attention as textbooks draw it: a list of heads, concatenated and projected.

    It is made from a `MultiHeadAttention`, holds copies of its weights, and maps `[*B, T, D]` to
    `[*B, T, out_features]` too. The results differ by rounding, and by dropout, which each head
    draws separately. It is slower: it computes a product for each head, the packed form one for
    all. It does not take a cache.

    Each head takes its part of arrays with an axis N in masks, score functions and normalizers, and
    functions receive its number as h.

    >>> layer = nn.SingleHeads(nn.MultiHeadAttention(2, 8, rngs=nnx.Rngs(0)))
    >>> len(layer.heads), layer(jnp.ones((2, 5, 8))).shape
    (2, (2, 5, 8))
    """

    def __init__(self, packed: MultiHeadAttention):
        if not isinstance(packed, MultiHeadAttention):
            kind = type(packed).__name__
            raise TypeError(f"packed: expected a MultiHeadAttention, got {kind}")
        streams = nnx.clone(packed.dropout.rngs)
        self.heads = nnx.List(_single_head(packed, n) for n in range(packed.num_heads))
        if streams is not None:
            for head in self.heads:
                head.dropout.rngs = streams.fork()
        self.out = nnx.clone(packed.out)

    @advised_by(LAYER_ADVICE, CallOptions)
    def __call__(
        self,
        inputs_q: Float[Array, "..."],
        inputs_k: Float[Array, "..."] | None = None,
        inputs_v: Float[Array, "..."] | None = None,
        **options: Unpack[CallOptions],
    ) -> Float[Array, "*B T out"]:
        """The arguments are those of `MultiHeadAttention`."""
        heads: list[MultiHeadAttention] = list(self.heads)
        results = [head(inputs_q, inputs_k, inputs_v, **options) for head in heads]
        return self.out(jnp.concatenate(results, axis=-2))


def _single_head(packed: MultiHeadAttention, n: int) -> MultiHeadAttention:
    head = nnx.clone(packed)
    head.query = _only_head(packed.query, n)
    group = packed.num_heads // packed.num_kv_heads
    head.key = _only_head(packed.key, n // group)
    head.value = _only_head(packed.value, n // group)
    head.num_heads = head.num_kv_heads = 1
    head._head_of_list = n, packed.num_heads
    head.qkv_features = head.head_dim
    if packed.sinks is not None:
        head.sinks = _like(packed.sinks, packed.sinks[n : n + 1])
    head.out = nnx.static(_identity)  # pyright: ignore[reportAttributeAccessIssue]
    return head


def _only_head(projection: nnx.LinearGeneral, n: int) -> nnx.LinearGeneral:
    part = nnx.clone(projection)
    part.out_features = (1, projection.out_features[-1])
    part.kernel = _like(projection.kernel, projection.kernel[..., n : n + 1, :])
    if projection.bias is not None:
        part.bias = _like(projection.bias, projection.bias[n : n + 1])
    return part


def _like(parameter: nnx.Param[Array], value: Array) -> nnx.Param[Array]:
    return nnx.Param(value, **parameter.get_metadata())


def _identity(x: Array) -> Array:
    return x
