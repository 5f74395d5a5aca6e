"""Additive attention as a module."""

import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype, Initializer
from jaxtyping import Array, Float

from jattn._advice import ADDITIVE_ADVICE
from jattn._advised import advised_by
from jattn.checks import check_array
from jattn.masks import MaskLike
from jattn.mechanisms import additive_attention, additive_keys
from jattn.nn.capture import WeightsTap
from jattn.nn.layers import LECUN, promote, sharded
from jattn.nn.module import Module, check_features, check_module


class AdditiveAttention(Module):
    """Attention by a small network (Bahdanau, Cho and Bengio 2014), as in RNNsearch.

    Scores are `score · tanh(query W + key U)`. Keys that do not change while a decoder runs are
    projected once: `attention.attend(state, attention.project_keys(memory), memory)`.

    Args:
        query_features, key_features: widths of the queries and of the keys.
        alignment_features: A, the width of the network's hidden layer.

    >>> attention = nn.AdditiveAttention(8, 8, 6, rngs=nnx.Rngs(0))
    >>> attention(jnp.ones((2, 5, 8)), jnp.ones((2, 7, 8))).shape
    (2, 5, 8)
    """

    def __init__(
        self,
        query_features: int,
        key_features: int,
        alignment_features: int,
        *,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        kernel_init: Initializer = LECUN,
        rngs: nnx.Rngs,
    ):
        check_module(
            rngs,
            dtype=dtype,
            param_dtype=param_dtype,
            functions={"kernel_init": kernel_init},
            query_features=query_features,
            key_features=key_features,
            alignment_features=alignment_features,
        )

        def parameter(*shape: int, axes: tuple[str | None, ...]) -> nnx.Param[Array]:
            return nnx.Param(kernel_init(rngs.params(), shape, param_dtype), **sharded(*axes))

        self.query_features = query_features
        self.key_features = key_features
        self.dtype = dtype
        self.query = parameter(query_features, alignment_features, axes=("embed", "alignment"))
        self.key = parameter(key_features, alignment_features, axes=("embed", "alignment"))
        score = kernel_init(rngs.params(), (alignment_features, 1), param_dtype)[:, 0]
        self.score = nnx.Param(score, **sharded("alignment"))
        self.weights_tap = WeightsTap()

    def project_keys(self, key: Float[Array, "..."]) -> Float[Array, "*B S A"]:
        """Projects keys `[*B, S, key_features]` to `[*B, S, A]`."""
        check_features("key", key, "S, E", "key_features", self.key_features)
        key, kernel = promote((key, self.key[...]), dtype=self.dtype)
        return additive_keys(key, kernel)

    def attend(
        self,
        query: Float[Array, "..."],
        projected_key: Float[Array, "*B S A"],
        value: Float[Array, "*B S V"],
        *,
        mask: MaskLike = None,
    ) -> Float[Array, "*B T V"]:
        """Computes the call with keys from `project_keys`."""
        check_features("query", query, "T, D", "query_features", self.query_features)
        check_array("value", value, "[*B, S, V]", ndim=2)
        arrays = (query, projected_key, value, self.query[...], self.score[...])
        query, key, value, w_query, w_score = promote(arrays, dtype=self.dtype)
        operands = (query, key, value, w_query, None, w_score)
        if not self.weights_tap.is_open:
            return additive_attention(*operands, mask=mask)
        out, weights = additive_attention(*operands, mask=mask, return_weights=True)
        self.weights_tap(weights[..., None, :, :])
        return out

    @advised_by(ADDITIVE_ADVICE)
    def __call__(
        self,
        query: Float[Array, "..."],
        key: Float[Array, "..."],
        value: Float[Array, "..."] | None = None,
        *,
        mask: MaskLike = None,
    ) -> Float[Array, "*B T V"]:
        """Maps query `[*B, T, D]`, key `[*B, S, E]` and value `[*B, S, V]` (by default the keys) to
        `[*B, T, V]`."""
        return self.attend(
            query, self.project_keys(key), key if value is None else value, mask=mask
        )
