"""The model of a run as pure functions of its parameters.

`Model` splits the Flax module once into graph and parameters. The parameters are a flat dict from
names such as `decoder/layers/0/cross_attention/query/kernel` to arrays; optimiser, checkpoints and
messages use the same names.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import Mesh

import jattn.nn
from experiments.translation.architectures import ARCHITECTURES, Architecture, Ids
from experiments.translation.batches import AnyBatch, Packed
from experiments.translation.losses import Projection
from experiments.translation.presets import Config


Params = dict[str, Array]


@dataclasses.dataclass(frozen=True)
class Model:
    """A model from source and target ids to logits, which takes its parameters as an argument.

    Source ids `[B, S]` come with their lengths `[B]`; places beyond a length are padding, which no
    position attends to. Padding behind the target needs no mask: no earlier position sees it.

    Models of equal configuration and sizes are equal and share their compiled functions.

    Attributes:
        config: the architecture and its sizes.
        source_size: tokens in the source vocabulary.
        target_size: tokens in the target vocabulary.
        mesh: the device mesh whose axis `context` shards the sequences, or None.
    """

    config: Config
    source_size: int
    target_size: int
    mesh: Mesh | None = None

    @functools.cached_property
    def _parts(self) -> tuple[nnx.GraphDef, list[tuple[Any, nnx.Variable]]]:
        """The module's graph without parameters, and its parameters by path, as shapes only."""
        abstract = nnx.eval_shape(lambda: self._create_module(nnx.Rngs(params=0)))
        graph, parameters = nnx.split(abstract, nnx.Param)
        return graph, list(nnx.to_flat_state(parameters))

    def init(self, seed: int) -> Params:
        """Initializes the parameters."""
        module = self._create_module(nnx.Rngs(params=seed))
        variables = nnx.to_flat_state(nnx.state(module, nnx.Param))
        return {_name(path): variable[...] for path, variable in variables}

    @property
    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The shape and dtype of each parameter."""
        return {
            _name(path): jax.ShapeDtypeStruct(variable.shape, variable.dtype)
            for path, variable in self._parts[1]
        }

    @property
    def size(self) -> int:
        """The number of parameters, each number counted."""
        return sum(math.prod(shape.shape) for shape in self.shapes.values())

    @property
    def axes(self) -> dict[str, tuple[str | None, ...]]:
        """The logical names of each parameter's axes, as `jattn.nn` gives them."""
        return {
            _name(path): tuple(variable.get_metadata("out_sharding"))
            for path, variable in self._parts[1]
        }

    def module(self, params: Params) -> Any:
        """Returns the Flax module with these parameters."""
        graph, variables = self._parts
        filled = [(path, variable.replace(params[_name(path)])) for path, variable in variables]
        return nnx.merge(graph, nnx.from_flat_state(filled))

    def features(
        self, params: Params, batch: AnyBatch, *, dropout_key: Array | None = None
    ) -> tuple[Array, Projection]:
        """Returns the decoder's features `[B, T, D]` and the projection from them to logits over
        the target vocabulary. There is no dropout without a key."""
        module = self.module(params)
        features = module.features(
            batch.source,
            batch.target_in,
            **self._masks(batch),
            deterministic=dropout_key is None,
            rngs=None if dropout_key is None else nnx.Rngs(dropout=dropout_key),
        )
        return features, Projection(*module.projection)

    def logits(self, params: Params, batch: AnyBatch) -> Array:
        """Returns the logits of the token after each target position, `[B, T, target vocabulary]`,
        without dropout."""
        features, projection = self.features(params, batch)
        return projection.logits(features)

    def start(
        self,
        params: Params,
        source: Ids,
        source_lengths: Ids,
        length: int,
        copies: int = 1,
        cache_dtype: str | None = None,
    ) -> Any:
        """Encodes the source and returns the state from which `step` decodes up to `length` tokens.

        Each sentence has `copies` rows in the state, whose caches store keys and values in
        `cache_dtype`, by default the dtype in which the model computes.

        Raises:
            ValueError: `cache_dtype` is not None, and the state has no caches.
        """
        self.check_cache_dtype(cache_dtype)
        module = self.module(params)
        state = self._architecture.start(module, source, source_lengths, length, cache_dtype)
        rows = jnp.repeat(jnp.arange(len(source), dtype=jnp.int32), copies)
        return state if copies == 1 else self._architecture.reorder(state, rows, memory=True)

    def check_cache_dtype(self, cache_dtype: str | None) -> None:
        """Raises ValueError if a dtype is chosen for caches that the model does not have."""
        if cache_dtype is not None and not self._architecture.has_caches:
            raise ValueError(
                f"cache_dtype: expected none with architecture={self.config.architecture}, which "
                f"has no caches, got {cache_dtype}"
            )

    def step(self, params: Params, state: Any, tokens: Ids) -> tuple[Array, Any]:
        """Decodes one more token of each of R rows.

        Returns:
            The logits of the tokens after `tokens` `[R]`, `[R, target vocabulary]`, and the new
            state.
        """
        logits, state = self.module(params).step(tokens[:, None], state, deterministic=True)
        return logits[:, 0], state

    def reorder(self, state: Any, rows: Array) -> Any:
        """Selects rows of a state; each new row comes from a beam of the same sentence."""
        return self._architecture.reorder(state, rows, memory=False)

    @property
    def alignment(self) -> str:
        """The key in `weights` of the attention that aligns target tokens with source tokens."""
        return self._architecture.alignment(self.config)

    @functools.partial(jax.jit, static_argnums=0)
    def weights(
        self, params: Params, source: Ids, source_lengths: Ids, target: Ids
    ) -> dict[str, Array]:
        """Returns the weights `[B, N, T, S]` of every attention, by the name of its module."""
        return jattn.nn.capture_weights(
            self.module(params),
            source,
            target,
            **self._architecture.padding(source_lengths),
            deterministic=True,
        )

    def _masks(self, batch: AnyBatch) -> dict[str, Any]:
        """Returns the arguments that mask padding and the other pairs of a packed row."""
        if isinstance(batch, Packed):
            return self._architecture.packing(batch)
        return self._architecture.padding(batch.source_lengths)

    @property
    def _architecture(self) -> Architecture:
        return ARCHITECTURES[self.config.architecture]

    def _create_module(self, rngs: nnx.Rngs) -> Any:
        sizes = self.source_size, self.target_size
        return self._architecture.make(self.config, *sizes, rngs, self.mesh)


def _name(path: Iterable[Any]) -> str:
    return "/".join(map(str, path))
