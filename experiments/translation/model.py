"""The model of a run as pure functions of its parameters.

The Flax module is taken apart once. Its parameters are a flat dict from name to array, such as
`decoder/layers/0/cross_attention/query/kernel`, which optimiser, checkpoint and messages share.
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
    """A translator from source and target ids to logits, whose parameters are an argument.

    Source ids `[B, S]` come with their lengths `[B]`; what is beyond a length is padding and is
    attended to by nobody. Padding behind the target needs no mask: no earlier position sees it.

    Models of equal configuration and sizes are equal, and share what is compiled for them.

    Attributes:
        config: says which architecture, and its sizes.
        source_size: tokens in the source vocabulary.
        target_size: tokens in the target vocabulary.
        mesh: where sequences are cut along its axis `context`, if they are.
    """

    config: Config
    source_size: int
    target_size: int
    mesh: Mesh | None = None

    @functools.cached_property
    def _parts(self) -> tuple[nnx.GraphDef, list[tuple[Any, nnx.Variable]]]:
        """The module without its parameters, and where in it they belong, by their paths."""
        abstract = nnx.eval_shape(lambda: self._made(nnx.Rngs(params=0)))
        graph, parameters = nnx.split(abstract, nnx.Param)
        return graph, list(nnx.to_flat_state(parameters))

    def init(self, seed: int) -> Params:
        """Fresh parameters."""
        module = self._made(nnx.Rngs(params=seed))
        variables = nnx.to_flat_state(nnx.state(module, nnx.Param))
        return {_name(path): variable[...] for path, variable in variables}

    @property
    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape and dtype of each parameter."""
        return {
            _name(path): jax.ShapeDtypeStruct(variable.shape, variable.dtype)
            for path, variable in self._parts[1]
        }

    @property
    def size(self) -> int:
        """How many numbers the parameters are."""
        return sum(math.prod(shape.shape) for shape in self.shapes.values())

    @property
    def axes(self) -> dict[str, tuple[str | None, ...]]:
        """The logical names of each parameter's axes, as `jattn.nn` gives them."""
        return {
            _name(path): tuple(variable.get_metadata("out_sharding"))
            for path, variable in self._parts[1]
        }

    def module(self, params: Params) -> Any:
        """The Flax module with these parameters."""
        graph, variables = self._parts
        filled = [(path, variable.replace(params[_name(path)])) for path, variable in variables]
        return nnx.merge(graph, nnx.from_flat_state(filled))

    def features(
        self, params: Params, batch: AnyBatch, *, dropout_key: Array | None = None
    ) -> tuple[Array, Projection]:
        """What is known at each target position about what follows it, `[B, T, D]`, and what makes
        logits over the target vocabulary of it; without a key no dropout."""
        module = self.module(params)
        features = module.features(
            batch.source,
            batch.target_in,
            **self._kept_apart(batch),
            deterministic=dropout_key is None,
            rngs=None if dropout_key is None else nnx.Rngs(dropout=dropout_key),
        )
        return features, Projection(*module.projection)

    def logits(self, params: Params, batch: AnyBatch) -> Array:
        """What follows each target position, `[B, T, target vocabulary]`, without dropout."""
        features, projection = self.features(params, batch)
        return projection.logits(features)

    def start(
        self, params: Params, source: Ids, source_lengths: Ids, length: int, copies: int = 1
    ) -> Any:
        """What `step` says up to `length` tokens from, each sentence in `copies` rows."""
        module = self.module(params)
        state = self._architecture.start(module, source, source_lengths, length)
        rows = jnp.repeat(jnp.arange(len(source), dtype=jnp.int32), copies)
        return state if copies == 1 else self._architecture.reorder(state, rows, memory=True)

    def step(self, params: Params, state: Any, tokens: Ids) -> tuple[Array, Any]:
        """What follows the next token of each row `[R]`, `[R, target vocabulary]`, and the state
        after it."""
        logits, state = self.module(params).step(tokens[:, None], state, deterministic=True)
        return logits[:, 0], state

    def reorder(self, state: Any, rows: Array) -> Any:
        """The state of these rows: each takes the place of another beam of its own sentence."""
        return self._architecture.reorder(state, rows, memory=False)

    @property
    def alignment(self) -> str:
        """The name, in `weights`, of the attention that says where a target token looks."""
        return self._architecture.alignment(self.config)

    @functools.partial(jax.jit, static_argnums=0)
    def weights(
        self, params: Params, source: Ids, source_lengths: Ids, target: Ids
    ) -> dict[str, Array]:
        """Every attention's weights `[B, N, T, S]`, by the module that made them."""
        return jattn.nn.capture_weights(
            self.module(params),
            source,
            target,
            **self._architecture.padding(source_lengths),
            deterministic=True,
        )

    def _kept_apart(self, batch: AnyBatch) -> dict[str, Any]:
        """What keeps pairs apart from each other and from padding."""
        if isinstance(batch, Packed):
            return self._architecture.packing(batch)
        return self._architecture.padding(batch.source_lengths)

    @property
    def _architecture(self) -> Architecture:
        return ARCHITECTURES[self.config.architecture]

    def _made(self, rngs: nnx.Rngs) -> Any:
        sizes = self.source_size, self.target_size
        return self._architecture.make(self.config, *sizes, rngs, self.mesh)


def _name(path: Iterable[Any]) -> str:
    return "/".join(map(str, path))
