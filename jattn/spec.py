"""What a call computes (`Spec`), the sizes of its arrays (`Shapes`) and of its tiles (`Tiling`)."""

import dataclasses
import math
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
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
from jattn._types import Shape, Size, Tree, accumulation
from jattn.masks import Full, Mask
from jattn.normalizers import Identity, NormalizerFunction, PointwiseNormalizer
from jattn.scores import ScoreFunction


Shaped = Array | jax.ShapeDtypeStruct  # any value with a shape and a dtype


class PairScore(Protocol):
    """A score of a query and a key in place of their product. It is a pytree, whose float arrays
    are parameters."""

    def products(self, query: Array, key: Array) -> Array:
        """Computes the scores `[t, s]` of queries `[t, H]` and keys `[s, H]`, in the accumulation
        dtype.

        A query that is not finite makes its row of scores NaN, a key its column; neither
        contributes to gradients.
        """
        ...


@pytree_dataclass
class Origin:
    """The indices of a call's arrays in the larger call of which it is part; for dropout.

    b: the index of its first batch row.
    h: the index of its first query head.
    q: the indices of its queries, `[T]`; None if it has all queries.
    kv: the indices of its keys, `[S]`; None if it has all keys.
    """

    b: Any
    h: Any
    q: Any = array_field("T", default=None)
    kv: Any = array_field("S", default=None)


@pytree_dataclass
class AsScore(ScoreFunction):
    """A pointwise normalizer as the last score function of a call, which returns the weights."""

    normalizer: PointwiseNormalizer

    def evaluate(self, score, b, h, rows, columns):
        return self.normalizer.evaluate(score, b, h, rows, columns)


@pytree_dataclass
class Spec:
    """The computation of attention: everything but query, key and value. One head computes

        dropout(softmax(mask(score(q kᵀ × scale)))) v

    with `pair.products(q, k)` in place of q kᵀ if there is a pair score, and `normalizer` in place
    of the softmax if it is not None. A pointwise normalizer is the last function of `score`, and
    `normalizer` is then the `Identity`: the scores are the weights.
    """

    mask: Mask
    score: ScoreFunction | None
    scale: Any
    q_positions: Any = array_field("*B T")
    kv_positions: Any = array_field("*B S")
    dropout_key: Any = None
    dropout_rate: float = static_field(default=0.0)
    precision: Any = static_field(default=None)
    normalizer: NormalizerFunction | None = None
    lse: bool = static_field(default=False)  # whether the call returns the lse too
    pair: Any = None  # a PairScore
    origin: Origin | None = None  # None: the call is not part of a larger one
    # Whether the softmax has further keys, in other calls. The backward pass then uses the
    # normalizer that it is passed, which is of all keys.
    partial: bool = static_field(default=False)
    # The classes in the mask, the score function and the normalizer, see `node_classes`.
    classes: tuple[type, ...] = static_field(default=())

    def axis_names_by_value(self) -> dict[str, str]:
        """The axis names of the scale: "N" for one number per head, else "" for a scalar."""
        return {"scale": letters_by_head(self.scale)}


class Tiling(NamedTuple):
    """The numbers of queries and of keys in one tile."""

    block_q: int
    block_kv: int


class Shapes(NamedTuple):
    """The sizes of one call, by axis name; `batch` is the shape of the leading axes."""

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
        """Returns the sizes of a call with `query [B, T, N, H]` and `value [B, S, K, V]`."""
        (B, T, N, H), (_, S, K, V) = query.shape, value.shape
        return cls((B,), T, S, N, K, H, V, query.dtype)

    @property
    def B(self) -> Size:
        """The number of batch rows: the product of all leading axes."""
        return math.prod(self.batch)

    @property
    def has_static_lengths(self) -> bool:
        """Whether T and S are integers, not the symbols of a program that is exported for all
        sizes. Kernels need integers to divide queries and keys into tiles."""
        return isinstance(self.T, int) and isinstance(self.S, int)

    @property
    def G(self) -> int:
        """The number of query heads for each key/value head."""
        return self.N // self.K


def has_mask(spec: Spec) -> bool:
    """Returns whether the mask may forbid a pair."""
    return not isinstance(spec.mask, Full)


def scores_are_weights(spec: Spec) -> bool:
    """Returns whether the weights are the scores, see `Spec`. Masked scores are then 0."""
    return isinstance(spec.normalizer, Identity)


def refusal_of_normalizer(spec: Spec) -> str | None:
    """Returns why an implementation that computes only the softmax refuses a spec, or None."""
    if spec.normalizer is None:
        return None
    pointwise = scores_are_weights(spec)
    name = "a pointwise normalizer" if pointwise else type(spec.normalizer).__name__
    return f"normalizer: has only the softmax, got {name}"


def copy_numpy_arrays(tree: Tree) -> Tree:
    """Returns a tree with copies of its NumPy arrays.

    JAX may use the memory of a NumPy array instead of copying it. The backward pass of a call would
    then see what a program has written into the array since the forward pass.
    """
    if not any(isinstance(x, np.ndarray) for x in jax.tree.leaves(tree)):
        return tree
    return jax.tree.map(lambda x: x.copy() if isinstance(x, np.ndarray) else x, tree)


_DIFFERENTIABLE = ("score", "scale", "normalizer", "pair")  # fields whose arrays are parameters


def _differentiable_fields(spec: Spec) -> list[Any]:
    return [getattr(spec, name) for name in _DIFFERENTIABLE]


def _is_param(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating)


def parameters(spec: Spec) -> list[Any]:
    """Returns the differentiable arrays of a spec: the float arrays of its score function,
    pair score and normalizer, and its scale if that is an array."""
    return [leaf for leaf in jax.tree.leaves(_differentiable_fields(spec)) if _is_param(leaf)]


def parameter_letters(spec: Spec) -> list[str]:
    """Returns the axis names of each parameter, in the order of `parameters`."""
    letters = jax.tree.leaves(_differentiable_fields(axis_names(spec)))
    leaves = jax.tree.leaves(_differentiable_fields(spec))
    return [x for x, leaf in zip(letters, leaves, strict=True) if _is_param(leaf)]


def with_parameters(spec: Spec, values: list[Any]) -> Spec:
    """Returns the spec with other parameters, in the order of `parameters`."""
    leaves, treedef = jax.tree.flatten(_differentiable_fields(spec))
    remaining = iter(values)
    replaced = [next(remaining) if _is_param(x) else x for x in leaves]
    fields = dict(zip(_DIFFERENTIABLE, jax.tree.unflatten(treedef, replaced), strict=True))
    return dataclasses.replace(spec, **fields)


def scaled(spec: Spec, query: Array) -> tuple[Spec, Array, float]:
    """Returns a spec without the scale, the scaled queries, and the factor that converts gradients
    of the scaled queries to gradients of the queries.

    This scales T × H numbers in place of T × S scores. Queries in a narrower dtype than scores are
    returned unscaled, with the factor 1, because scaling would round them. A scale that is an array
    stays in the spec too, as a parameter.
    """
    if query.dtype != accumulation(query.dtype) or not is_static(spec.scale):
        return spec, query, 1.0
    scale = number(spec.scale)
    return dataclasses.replace(spec, scale=1.0), query * scale, scale
