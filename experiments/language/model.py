"""The model, a decoder-only Transformer like Llama with a sliding window, and its loss."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from experiments.language.settings import LanguageSettings
from experiments.translation.losses import Projection, cross_entropy
from jattn import cache, masks
from jattn.nn import DecoderOnly, MultiHeadAttention


def make(settings: LanguageSettings, vocabulary: int, **options: Any) -> DecoderOnly:
    """Builds a new model with a vocabulary of `vocabulary` characters; `options` replace those of
    `DecoderOnly`.

    Each position attends to itself and the `length` − 1 positions before it, in training and in
    generation, so a text of any length is generated with a cache of one window.
    """
    window = masks.Window(left=settings.length - 1)
    usual: dict[str, Any] = {
        "features": settings.features,
        "num_heads": settings.heads,
        "num_kv_heads": settings.kv_heads,
        "num_layers": settings.layers,
        "feed_forward": settings.feed_forward,
        "dropout_rate": settings.dropout_rate,
        "normalization": "rms",
        "activation": nnx.silu,
        "gated": True,
        "use_bias": False,
        "self_attention": functools.partial(MultiHeadAttention, mask=window),
    }
    return DecoderOnly(vocabulary, rngs=nnx.Rngs(params=settings.seed), **{**usual, **options})


def size(settings: LanguageSettings, vocabulary: int) -> int:
    """Returns the number of parameters.

    Raises:
        ValueError: the settings' sizes do not match.
    """
    abstract = nnx.eval_shape(lambda: make(settings, vocabulary))
    return sum(x.size for x in jax.tree.leaves(nnx.state(abstract, nnx.Param)))


def start(
    model: DecoderOnly, settings: LanguageSettings, dtype: str | None = None
) -> list[cache.Cache]:
    """Returns caches with which `jattn.generate` writes one text of any length; `dtype` is that of
    keys and values, by default the model's."""
    return model.start(1, settings.length, cache.RollingCache, dtype)


def loss(model: DecoderOnly, rows: Array, key: Array | None = None) -> Array:
    """Computes the mean loss in nats of predicting the next character in rows `[B, length + 1]`;
    without a key there is no dropout."""
    rngs = None if key is None else nnx.Rngs(dropout=key)
    features = model.features(rows[:, :-1], deterministic=key is None, rngs=rngs)
    labels = rows[:, 1:]
    projection = Projection(*model.projection)
    return cross_entropy(features, projection, labels, jnp.ones_like(labels, bool)) / labels.size


@functools.partial(jax.jit, static_argnums=0)
def mean_loss(definition: Any, variables: Any, rows: Array) -> Array:
    """Computes `loss` without dropout, for a model split into definition and variables."""
    return loss(nnx.merge(definition, variables), rows)
