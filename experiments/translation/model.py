"""The model of a run as pure functions of its parameters.

The Flax module is taken apart once. Its parameters are a flat dict from name to array, such as
`decoder/layers/0/cross_attention/query/kernel`, which optimiser, checkpoint and messages share.
"""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

import jattn.nn
from experiments.translation.batches import AnyBatch, Packed
from experiments.translation.losses import Projection
from experiments.translation.presets import Config
from jattn import masks
from jattn.nn import LayerCache


Params = dict[str, Array]
Ids = Array | np.ndarray  # int32

_EMBEDDING_INITS = {
    "normal": nnx.initializers.variance_scaling(1.0, "fan_out", "normal"),
    "glorot": nnx.initializers.xavier_uniform(),
}


@dataclasses.dataclass(frozen=True)
class Model:
    """A Transformer from source and target ids to logits, whose parameters are an argument.

    Source ids `[B, S]` come with their lengths `[B]`; what is beyond a length is padding and is
    attended to by nobody. Padding behind the target needs no mask: no earlier place sees it.

    Models of equal configuration and sizes are equal, and share what is compiled for them.

    Attributes:
        config: says which Transformer.
        source_size: tokens in the source vocabulary.
        target_size: tokens in the target vocabulary.
    """

    config: Config
    source_size: int
    target_size: int

    @functools.cached_property
    def _parts(self) -> tuple[nnx.GraphDef, list[tuple[Any, nnx.Variable]]]:
        """The module without its parameters, and where in it they belong, by their paths."""
        abstract = nnx.eval_shape(lambda: self._transformer(nnx.Rngs(params=0)))
        graph, parameters = nnx.split(abstract, nnx.Param)
        return graph, list(nnx.to_flat_state(parameters))

    def init(self, seed: int) -> Params:
        """Fresh parameters."""
        module = self._transformer(nnx.Rngs(params=seed))
        variables = nnx.to_flat_state(nnx.state(module, nnx.Param))
        return {_name(path): variable[...] for path, variable in variables}

    @property
    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape and dtype of each parameter."""
        return {
            _name(path): jax.ShapeDtypeStruct(variable.shape, variable.dtype)
            for path, variable in self._parts[1]
        }

    def module(self, params: Params) -> jattn.nn.Transformer:
        """The Flax module with these parameters."""
        graph, variables = self._parts
        filled = [(path, variable.replace(params[_name(path)])) for path, variable in variables]
        return nnx.merge(graph, nnx.from_flat_state(filled))

    def features(
        self, params: Params, batch: AnyBatch, *, dropout_key: Array | None = None
    ) -> tuple[Array, Projection]:
        """What is known at each target place about what follows it, `[B, T, D]`, and what makes
        logits over the target vocabulary of it; without a key no dropout."""
        module = self.module(params)
        features = module.features(
            batch.source,
            batch.target_in,
            **_kept_apart(batch),
            deterministic=dropout_key is None,
            rngs=None if dropout_key is None else nnx.Rngs(dropout=dropout_key),
        )
        return features, Projection(*module.projection)

    def logits(self, params: Params, batch: AnyBatch) -> Array:
        """What follows each target place, `[B, T, target vocabulary]`, without dropout."""
        features, projection = self.features(params, batch)
        return projection.logits(features)

    def encode(self, params: Params, source: Ids, source_lengths: Ids) -> Array:
        """The memory `[B, S, D]` that the decoder reads."""
        padding = masks.Lengths(kv=source_lengths)
        return self.module(params).encode(source, mask=padding, deterministic=True)

    def start(
        self, params: Params, source: Ids, source_lengths: Ids, length: int, copies: int = 1
    ) -> list[LayerCache]:
        """Caches for `step` over up to `length` target places, each sentence in `copies` rows."""
        module = self.module(params)
        memory = self.encode(params, source, source_lengths)
        caches = module.decoder.start(memory, length, memory_lengths=source_lengths)
        rows = jnp.repeat(jnp.arange(len(memory), dtype=jnp.int32), copies)
        return caches if copies == 1 else [cache.reorder(rows) for cache in caches]

    def step(
        self, params: Params, caches: list[LayerCache], tokens: Ids
    ) -> tuple[Array, list[LayerCache]]:
        """What follows the next token of each row `[R]`, `[R, target vocabulary]`, and the caches
        that hold it."""
        logits, caches = self.module(params).step(tokens[:, None], caches, deterministic=True)
        return logits[:, 0], caches

    @functools.partial(jax.jit, static_argnums=0)
    def weights(
        self, params: Params, source: Ids, source_lengths: Ids, target: Ids
    ) -> dict[str, Array]:
        """Every attention's weights `[B, N, T, S]`, by the module that made them."""
        padding = masks.Lengths(kv=source_lengths)
        return jattn.nn.capture_weights(
            self.module(params),
            source,
            target,
            source_mask=padding,
            cross_mask=padding,
            deterministic=True,
        )

    def _transformer(self, rngs: nnx.Rngs) -> jattn.nn.Transformer:
        config = self.config
        return jattn.nn.Transformer(
            self.source_size,
            self.target_size,
            features=config.features,
            num_heads=config.num_heads,
            feed_forward=config.feed_forward,
            encoder_layers=config.encoder_layers,
            decoder_layers=config.decoder_layers,
            max_length=config.max_length,
            dropout_rate=config.dropout_rate,
            norm=config.norm,
            positions=config.positions,
            self_attention=functools.partial(jattn.nn.MultiHeadAttention, rotary=config.rotary),
            embedding_init=_EMBEDDING_INITS[config.embedding_init],
            tie_embeddings=config.tie_embeddings,
            rngs=rngs,
        )


def _kept_apart(batch: AnyBatch) -> dict[str, Any]:
    """The masks and positions that keep pairs apart from each other and from padding."""
    if isinstance(batch, Packed):
        return {
            "source_mask": masks.Segments(batch.source_pairs),
            "target_mask": masks.Segments(batch.target_pairs),
            "cross_mask": masks.Segments(batch.target_pairs, batch.source_pairs),
            "source_positions": batch.source_positions,
            "target_positions": batch.target_positions,
        }
    padding = masks.Lengths(kv=batch.source_lengths)
    return {"source_mask": padding, "cross_mask": padding}


def _name(path: Iterable[Any]) -> str:
    return "/".join(map(str, path))
