"""The architectures of the experiment: how to construct, call and decode with each.

All of them map source ids `[B, S]` with lengths `[B]` and target ids `[B, T]` to logits, and decode
with `module.step(ids, state)`. This file is the only place that knows their other differences.
"""

import functools
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh

import jattn.nn
from experiments.translation.batches import Packed
from experiments.translation.presets import Config
from jattn import masks, parallel


Ids = Array | np.ndarray  # int32

_EMBEDDING_INITS = {
    "normal": nnx.initializers.variance_scaling(1.0, "fan_out", "normal"),
    "glorot": nnx.initializers.xavier_uniform(),
}


class Architecture(Protocol):
    """The interface of an architecture."""

    has_caches: bool
    """Whether the state of decoding has caches of keys and values."""

    def make(
        self,
        config: Config,
        source_size: int,
        target_size: int,
        rngs: nnx.Rngs,
        mesh: Mesh | None = None,
    ) -> Any:
        """Creates the Flax module for vocabularies of these sizes and this device mesh.

        Raises:
            ValueError: the architecture cannot shard sequences over the devices of the mesh.
        """
        ...

    def padding(self, source_lengths: Ids) -> dict[str, Any]:
        """Returns the keyword arguments that mask the source's padding in a call."""
        ...

    def packing(self, batch: Packed) -> dict[str, Any]:
        """Returns the keyword arguments that hide packed pairs from each other in a call.

        Raises:
            ValueError: the architecture does not support packed pairs.
        """
        ...

    def start(
        self, module: Any, source: Ids, source_lengths: Ids, length: int, dtype: str | None
    ) -> Any:
        """Returns the state from which `module.step` decodes up to `length` tokens; `dtype` is that
        of the caches, by default the module's. It is None if the state has no caches."""
        ...

    def reorder(self, state: Any, rows: Array, *, memory: bool) -> Any:
        """Selects rows of a state.

        Without `memory` the encoded source stays in place, because each new row has the same source
        as the row it replaces.
        """
        ...

    def alignment(self, config: Config) -> str:
        """Returns the name of the attention that aligns target tokens with source tokens."""
        ...


class _SharedAttention(jattn.nn.MultiHeadAttention):
    """Multi-head attention over sequences that the mesh's axis `context` shards over devices."""

    def __init__(self, *sizes: Any, mesh: Mesh, **options: Any):
        super().__init__(*sizes, **options)
        self.mesh = mesh

    def _attention(self, query: Array, key: Array, value: Array, **options: Any) -> Any:
        axes = {"axis_name": "context", "batch_axis": "data", "head_axis": "model"}
        return parallel.attention(query, key, value, mesh=self.mesh, **axes, **options)


class _Transformer:
    """The architecture of `jattn.nn.Transformer`."""

    has_caches = True

    def make(
        self,
        config: Config,
        source_size: int,
        target_size: int,
        rngs: nnx.Rngs,
        mesh: Mesh | None = None,
    ) -> jattn.nn.Transformer:
        attention: Any = jattn.nn.MultiHeadAttention
        if mesh is not None and mesh.shape["context"] > 1:
            attention = functools.partial(_SharedAttention, mesh=mesh)
        return jattn.nn.Transformer(
            source_size,
            target_size,
            features=config.features,
            num_heads=config.num_heads,
            feed_forward=config.feed_forward,
            encoder_layers=config.encoder_layers,
            decoder_layers=config.decoder_layers,
            max_length=config.max_length,
            dropout_rate=config.dropout_rate,
            norm=config.norm,
            positions=config.positions,
            self_attention=functools.partial(attention, rotary=config.rotary),
            cross_attention=attention,
            embedding_init=_EMBEDDING_INITS[config.embedding_init],
            tie_embeddings=config.tie_embeddings,
            dtype=jnp.dtype(config.dtype),
            rngs=rngs,
        )

    def padding(self, source_lengths: Ids) -> dict[str, Any]:
        mask = masks.Lengths(kv=source_lengths)
        return {"source_mask": mask, "cross_mask": mask}

    def packing(self, batch: Packed) -> dict[str, Any]:
        return {
            "source_mask": masks.Segments(batch.source_segment_ids),
            "target_mask": masks.Segments(batch.target_segment_ids),
            "cross_mask": masks.Segments(batch.target_segment_ids, batch.source_segment_ids),
            "source_positions": batch.source_positions,
            "target_positions": batch.target_positions,
        }

    def start(
        self,
        module: jattn.nn.Transformer,
        source: Ids,
        source_lengths: Ids,
        length: int,
        dtype: str | None,
    ) -> list[jattn.nn.LayerCache]:
        mask = masks.Lengths(kv=source_lengths)
        memory = module.encode(source, mask=mask, deterministic=True)
        return module.decoder.start(memory, length, memory_lengths=source_lengths, dtype=dtype)

    def reorder(
        self, state: list[jattn.nn.LayerCache], rows: Array, *, memory: bool
    ) -> list[jattn.nn.LayerCache]:
        return [cache.reorder(rows, memory=memory) for cache in state]

    def alignment(self, config: Config) -> str:
        return f"decoder/layers/{config.decoder_layers - 1}/cross_attention"


class _RNNsearch:
    """The architecture of `jattn.nn.RNNsearch`."""

    has_caches = False

    def make(
        self,
        config: Config,
        source_size: int,
        target_size: int,
        rngs: nnx.Rngs,
        mesh: Mesh | None = None,
    ) -> jattn.nn.RNNsearch:
        return jattn.nn.RNNsearch(
            source_size,
            target_size,
            features=config.features,
            hidden=config.hidden,
            dropout_rate=config.dropout_rate,
            embedding_init=_EMBEDDING_INITS[config.embedding_init],
            dtype=jnp.dtype(config.dtype),
            rngs=rngs,
        )

    def padding(self, source_lengths: Ids) -> dict[str, Any]:
        return {"source_lengths": source_lengths}

    def packing(self, batch: Packed) -> dict[str, Any]:
        raise ValueError("packed_width: expected 0 with architecture='rnnsearch': a state runs on")

    def start(
        self,
        module: jattn.nn.RNNsearch,
        source: Ids,
        source_lengths: Ids,
        length: int,
        dtype: str | None,
    ) -> jattn.nn.RecurrentState:
        memory = module.encode(source, source_lengths=source_lengths, deterministic=True)
        return module.decoder.start(memory, memory_lengths=source_lengths)

    def reorder(
        self, state: jattn.nn.RecurrentState, rows: Array, *, memory: bool
    ) -> jattn.nn.RecurrentState:
        return state.reorder(rows, memory=memory)

    def alignment(self, config: Config) -> str:
        return "decoder/attention"


ARCHITECTURES: dict[str, Architecture] = {
    "transformer": _Transformer(),
    "rnnsearch": _RNNsearch(),
}
