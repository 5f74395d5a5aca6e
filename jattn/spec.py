"""What is to be computed (`Spec`), of which sizes (`Shapes`), and how it is cut (`Tiling`)."""

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


Shaped = Array | jax.ShapeDtypeStruct  # what has a shape and a dtype


class PairScore(Protocol):
    """What makes a score of a query and a key in place of their product: a pytree whose float
    arrays are differentiable."""

    def products(self, query: Array, key: Array) -> Array:
        """`[t, s]` of queries `[t, H]` and keys `[s, H]`, in the dtype of sums. What is not finite
        makes its row or column NaN, and has no part in gradients."""
        ...


@pytree_dataclass
class Origin:
    """Where in a larger call a piece of it lies: its first batch row and head, and the places of
    its queries and keys; None where these are all there are. Dropout decides by it."""

    b: Any
    h: Any
    q: Any = array_field("T", default=None)
    kv: Any = array_field("S", default=None)


@pytree_dataclass
class Spec:
    """What attention computes: everything but query, key and value. One head's formula is

    dropout(softmax(mask(score(q kᵀ × scale)))) v

    with the products of `pair` in place of q kᵀ where it is given.
    """

    mask: Mask
    score: ScoreFunction | None
    scale: Any
    q_positions: Any = array_field("*B T")
    kv_positions: Any = array_field("*B S")
    dropout_key: Any = None
    dropout_rate: float = static_field(default=0.0)
    precision: Any = static_field(default=None)
    lse: bool = static_field(default=False)  # whether the log of the denominator is asked for too
    pair: Any = None  # a PairScore
    origin: Origin | None = None  # None: the call is no piece of another
    # Whether softmax runs over more keys than these: the backward pass goes by the normalizer.
    partial: bool = static_field(default=False)

    def axis_names_by_value(self) -> dict[str, str]:
        """A scale is one number, or one for each head."""
        return {"scale": letters_by_head(self.scale)}


class Tiling(NamedTuple):
    """How an implementation cuts queries and keys: the sizes of a tile."""

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
        """Of `[B, T, N, H]` and `[B, S, K, V]`."""
        (B, T, N, H), (_, S, K, V) = query.shape, value.shape
        return cls((B,), T, S, N, K, H, V, query.dtype)

    @property
    def B(self) -> Size:
        """The number of batch rows, all leading axes together."""
        return math.prod(self.batch)

    @property
    def cuttable(self) -> bool:
        """Whether T and S are numbers. They are symbols in a program that is exported for any."""
        return isinstance(self.T, int) and isinstance(self.S, int)

    @property
    def G(self) -> int:
        """Query heads for each key/value head."""
        return self.N // self.K


def has_mask(spec: Spec) -> bool:
    """Whether anything is masked at all."""
    return not isinstance(spec.mask, Full)


def _learned(spec: Spec) -> tuple[Any, Any, Any]:
    """The parts of a spec whose float arrays are differentiable."""
    return spec.score, spec.scale, spec.pair


def _with_learned(spec: Spec, learned: tuple[Any, Any, Any]) -> Spec:
    return dataclasses.replace(spec, **dict(zip(("score", "scale", "pair"), learned, strict=True)))


def _is_param(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating)


def parameters(spec: Spec) -> list[Any]:
    """The differentiable arrays of a spec: the float ones of its score function, its scale where
    that is an array, and those of its pair score."""
    return [leaf for leaf in jax.tree.leaves(_learned(spec)) if _is_param(leaf)]


def parameter_letters(spec: Spec) -> list[str]:
    """Along which letters each of `parameters` runs."""
    letters = jax.tree.leaves(_learned(axis_names(spec)))
    leaves = jax.tree.leaves(_learned(spec))
    return [x for x, leaf in zip(letters, leaves, strict=True) if _is_param(leaf)]


def with_parameters(spec: Spec, values: list[Any]) -> Spec:
    """The spec with other values for `parameters`."""
    leaves, treedef = jax.tree.flatten(_learned(spec))
    new = iter(values)
    replaced = [next(new) if _is_param(x) else x for x in leaves]
    return _with_learned(spec, jax.tree.unflatten(treedef, replaced))


def scaled(spec: Spec, query: Array) -> tuple[Spec, Array, float]:
    """A spec without the scale, queries times the scale, and the factor to their gradient.

    A pass over the queries instead of one over the scores, where that rounds no more. A scale that
    is an array stays, as a parameter.
    """
    if query.dtype != accumulation(query.dtype) or not is_static(spec.scale):
        return spec, query, 1.0
    scale = number(spec.scale)
    return dataclasses.replace(spec, scale=1.0), query * scale, scale
