"""Masks, score functions and normalizers in a module, with their arrays as its variables."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jattn._pytree import node_classes
from jattn.masks import Predicate
from jattn.nn.layers import sharded
from jattn.nn.module import Module
from jattn.normalizers import NormalizerFunction, as_normalizer
from jattn.scores import Score, ScoreFunction, as_score
from jattn.spec import copy_numpy_arrays


class Constant(nnx.Variable):
    """An array that a module owns and no optimiser trains."""


class PytreeVariables(Module):
    """The arrays of a pytree, such as a mask, as variables of a module; a call returns it."""

    def __init__(self, tree: Any, trained: bool = False):
        arrays, self.structure = jax.tree.flatten(tree)
        self.classes = node_classes(tree)  # part of the module's graph definition
        self.arrays = nnx.List(
            (nnx.Param if trained and jnp.issubdtype(array.dtype, jnp.inexact) else Constant)(
                jnp.asarray(copy_numpy_arrays(array)), **sharded(*(None,) * array.ndim)
            )
            for array in arrays
        )

    def __call__(self) -> Any:
        return self.held_tree()

    def held_tree(self) -> Any:
        """Returns the pytree; `masks.as_mask` calls it for `attention(..., mask=layer.mask)`."""
        return jax.tree.unflatten(self.structure, [array[...] for array in self.arrays])


def lasting_functions(module: Any) -> tuple[Any, ...]:
    """Returns snapshots of the functions in a module's masks, scores and normalizers, for keys of
    programs."""
    parts = [x() for _, x in nnx.iter_modules(module) if isinstance(x, PytreeVariables)]
    leaves = jax.tree.leaves(parts, is_leaf=lambda x: isinstance(x, Predicate | Score))
    masks = [x.traced().fn for x in leaves if isinstance(x, Predicate)]
    return (*masks, *(x.traced(jnp.float32).fn for x in leaves if isinstance(x, Score)))


class LearnedScore(PytreeVariables):
    """A score function whose float arrays are trained, as in T5's relative position bias.

    Without this wrapper the arrays of a score function are constant, as ALiBi needs.

    >>> score = nn.LearnedScore(scores.RelativeBias(jnp.zeros((32, 2))))
    >>> layer = nn.MultiHeadAttention(2, 8, score=score, rngs=nnx.Rngs(0))
    >>> [*nnx.state(layer, nnx.Param)]
    ['key', 'out', 'query', 'score', 'value']
    """

    def __init__(self, score: ScoreFunction):
        if score is None:
            raise TypeError("score: expected a jattn score function, got None")
        super().__init__(as_score(score), trained=True)

    def __call__(self) -> ScoreFunction:
        return super().__call__()


class LearnedNormalizer(PytreeVariables):
    """A normalizer whose float arrays are trained, such as the bias of a sigmoid.

    Without this wrapper the arrays of a normalizer are constant.

    >>> normalizer = nn.LearnedNormalizer(normalizers.Sigmoid(jnp.full(2, -1.5)))
    >>> layer = nn.MultiHeadAttention(2, 8, normalizer=normalizer, rngs=nnx.Rngs(0))
    >>> [*nnx.state(layer, nnx.Param)]
    ['key', 'normalizer', 'out', 'query', 'value']
    """

    def __init__(self, normalizer: NormalizerFunction):
        converted = as_normalizer(normalizer)
        if converted is None:
            raise TypeError("normalizer: expected a normalizer other than the softmax, got None")
        super().__init__(converted, trained=True)

    def __call__(self) -> NormalizerFunction:
        return super().__call__()
