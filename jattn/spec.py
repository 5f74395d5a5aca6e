"""The configuration of a call: what is computed (`Spec`), its sizes (`Shapes`), its tiles
(`Tiling`)."""

import dataclasses
import math
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jattn._pytree import (
    array_field,
    axis_names,
    is_static,
    letters_by_head,
    number,
    pytree_dataclass,
    static_field,
)
from jattn._types import Shape, Size, accumulation
from jattn.masks import Full, Mask
from jattn.scores import ScoreFunction


Shaped = Array | jax.ShapeDtypeStruct  # any value with a shape and a dtype


class PairScore(Protocol):
    """A score of a query and a key in place of their product: a pytree; float arrays are
    parameters."""

    def products(self, query: Array, key: Array) -> Array:
        """Computes `[t, s]` from queries `[t, H]` and keys `[s, H]`, in the dtype of sums.

        A non-finite query or key makes its row or column NaN, and does not contribute to gradients.
        """
        ...


@pytree_dataclass
class Origin:
    """The place of a piece in a larger call, on which dropout depends.

    It holds the first batch row and head of the piece, and the places of its queries and keys; None
    where the piece has all of them.
    """

    b: Any
    h: Any
    q: Any = array_field("T", default=None)
    kv: Any = array_field("S", default=None)


@pytree_dataclass
class Spec:
    """The computation of attention: everything but query, key and value. One head's formula is

    dropout(softmax(mask(score(q kᵀ × scale)))) v

    with the products of `pair` in place of q kᵀ if it is given.
    """

    mask: Mask
    score: ScoreFunction | None
    scale: Any
    q_positions: Any = array_field("*B T")
    kv_positions: Any = array_field("*B S")
    dropout_key: Any = None
    dropout_rate: float = static_field(default=0.0)
    precision: Any = static_field(default=None)
    lse: bool = static_field(default=False)  # whether the call returns the lse too
    pair: Any = None  # a PairScore
    origin: Origin | None = None  # None: the call is not a piece of a larger one
    # Whether softmax runs over more keys than these: the backward pass then uses the normalizer.
    partial: bool = static_field(default=False)

    def axis_names_by_value(self) -> dict[str, str]:
        """The letters of the scale: one number, or one for each head."""
        return {"scale": letters_by_head(self.scale)}


class Tiling(NamedTuple):
    """The sizes of a tile: how an implementation cuts queries and keys."""

    block_q: int
    block_kv: int


class Shapes(NamedTuple):
    """The sizes of one call, by letter; `batch` holds the leading axes."""

    batch: Shape
    T: int
    S: int
    N: int
    K: int
    H: int
    V: int
    dtype: Any

    @classmethod
    def of(cls, query: Shaped, value: Shaped) -> "Shapes":
        """The sizes of a call with `query [B, T, N, H]` and `value [B, S, K, V]`."""
        (B, T, N, H), (_, S, K, V) = query.shape, value.shape
        return cls((B,), T, S, N, K, H, V, query.dtype)

    @property
    def B(self) -> Size:
        """The number of batch rows, all leading axes together."""
        return math.prod(self.batch)

    @property
    def cuttable(self) -> bool:
        """Whether T and S are numbers; they are symbols in a program exported for any size."""
        return isinstance(self.T, int) and isinstance(self.S, int)

    @property
    def G(self) -> int:
        """The number of query heads for each key/value head."""
        return self.N // self.K


def has_mask(spec: Spec) -> bool:
    """Returns whether anything may be masked."""
    return not isinstance(spec.mask, Full)


def _learned(spec: Spec) -> tuple[Any, Any, Any]:
    """Returns the parts of a spec whose float arrays are differentiable."""
    return spec.score, spec.scale, spec.pair


def _is_param(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating)


def parameters(spec: Spec) -> list[Any]:
    """Returns the differentiable arrays of a spec: the float arrays of its score function, its
    scale if that is an array, and the float arrays of its pair score."""
    return [leaf for leaf in jax.tree.leaves(_learned(spec)) if _is_param(leaf)]


def parameter_letters(spec: Spec) -> list[str]:
    """Returns the letters of the axes of each of `parameters`."""
    letters = jax.tree.leaves(_learned(axis_names(spec)))
    leaves = jax.tree.leaves(_learned(spec))
    return [x for x, leaf in zip(letters, leaves, strict=True) if _is_param(leaf)]


def with_parameters(spec: Spec, values: list[Any]) -> Spec:
    """Returns the spec with other values for `parameters`."""
    leaves, treedef = jax.tree.flatten(_learned(spec))
    new = iter(values)
    replaced = [next(new) if _is_param(x) else x for x in leaves]
    score, scale, pair = jax.tree.unflatten(treedef, replaced)
    return dataclasses.replace(spec, score=score, scale=scale, pair=pair)


def scaled(spec: Spec, query: Array) -> tuple[Spec, Array, float]:
    """Returns a spec without the scale, the scaled queries, and the factor for their gradient.

    This takes one pass over the queries instead of one over the scores. It is done only where it
    does not round more. A scale that is an array stays in the spec, as a parameter.
    """
    if query.dtype != accumulation(query.dtype) or not is_static(spec.scale):
        return spec, query, 1.0
    scale = number(spec.scale)
    return dataclasses.replace(spec, scale=1.0), query * scale, scale
