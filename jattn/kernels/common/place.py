"""The spec of a piece of a call: of some of its batch rows, heads, queries and keys.

Formulas see absolute positions, and arrays along T and S are already sliced with the tokens.
Everything else that depends on the place of a piece is rewritten here: lengths and layouts, which
count places, and functions, which receive the batch row and the head of the whole call. Dropout
reads the `Origin` of the piece.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jattn import masks, normalizers, scores
from jattn._pytree import axis_names, axis_of, is_static, number, pytree_dataclass
from jattn._types import Index, Tree
from jattn.functions import dependence
from jattn.functions.integers import is_below
from jattn.masks import And, Mask, Not, Or, Span
from jattn.normalizers import NormalizerFunction
from jattn.scores import ScoreFunction, Then
from jattn.spec import Origin, Spec


class Place(NamedTuple):
    """The place of a piece: its first batch row and head, and the places `[T]` and `[S]` of its
    queries and keys; None if it has all of them.

    `runs` are the lengths of the runs of consecutive places in `q` and in `kv`; 0 for all places of
    the call. `keys_from` is the place of the first key if all keys are consecutive, else None.
    """

    b: Any = 0
    h: Any = 0
    q: Any = None
    kv: Any = None
    runs: tuple[int, int] = (1, 1)
    keys_from: Any = None

    @property
    def origin(self) -> Origin:
        """The place in the form that a spec holds."""
        return Origin(self.b, self.h, self.q, self.kv)

    @property
    def is_first(self) -> bool:
        """Whether batch rows and heads have the same numbers as in the whole call."""
        return all(is_static(x) and x == 0 for x in (self.b, self.h))


def at_place(spec: Spec, place: Place) -> Spec:
    """Returns the spec of a piece, from a prepared spec with arrays along T and S sliced to it."""
    mask, score = _moved_mask(spec.mask, place), _moved_score(spec.score, place)
    normalizer = _moved_normalizer(spec.normalizer, place)
    q, kv = _positions(spec, mask, score, place)
    origin = place.origin if spec.dropout_rate else None
    rules = {"mask": mask, "score": score, "normalizer": normalizer}
    return dataclasses.replace(spec, **rules, q_positions=q, kv_positions=kv, origin=origin)


def only_head(
    rules: tuple[Mask | None, ScoreFunction | None, NormalizerFunction | None], h: int, heads: int
) -> tuple[Mask | None, ScoreFunction | None, NormalizerFunction | None]:
    """Returns the mask, score function and normalizer of head `h` alone of a call with `heads`.

    Raises ValueError for an array with another number of heads.
    """

    def sliced(path: Any, letters: str, leaf: Any) -> Any:
        axis = axis_of("N", letters, leaf.ndim)
        if axis is None or (leaf.shape[axis] == 1 and "#N" in letters):
            return leaf
        if leaf.shape[axis] != heads:
            name = ("mask", "score", "normalizer")[path[0].idx] + jax.tree_util.keystr(path[1:])
            raise ValueError(f"{name}: expected N = {heads}, got shape {list(leaf.shape)}")
        return leaf[(slice(None),) * axis + (slice(h, h + 1),)]

    rules = jax.tree_util.tree_map_with_path(sliced, axis_names(rules), rules)
    mask, score, normalizer = rules
    place = Place(h=h)
    mask = None if mask is None else _moved_mask(mask, place)
    return mask, _moved_score(score, place), _moved_normalizer(normalizer, place)


def _positions(
    spec: Spec, mask: Mask, score: ScoreFunction | None, place: Place
) -> tuple[Any, Any]:
    """Returns positions `[1, T]` and `[1, S]`; None for defaults and if nothing reads them."""
    q, kv = spec.q_positions, spec.kv_positions
    without_positions = spec.normalizer is None or isinstance(spec.normalizer, _OF_ROWS)
    by_place = without_positions and _consists_of(mask, score, _BY_PLACE)
    if by_place or place.q is None:
        return (None, None) if by_place else (q, kv)
    default = q is None and kv is None and place.keys_from is not None
    if default and without_positions and _consists_of(mask, score, _BY_DISTANCE):
        return (place.q - place.keys_from)[None], None  # kernels are fastest if keys start at 0
    q = place.q[None] if q is None else q
    if kv is None and is_static(place.keys_from) and place.keys_from == 0:
        return q, None
    return q, place.kv[None] if kv is None else kv


_BY_PLACE = (masks.Full, masks.Empty, masks.Segments, masks.Dense, masks.Blocks)
_BY_DISTANCE = (*_BY_PLACE, masks.Causal, masks.Window)
_POINTWISE = (normalizers.Identity, normalizers.Sigmoid, normalizers.Relu, normalizers.Exp)
_OF_SCORES = (scores.SoftCap, scores.Temperature, scores.Bias, *_POINTWISE)
_OF_ROWS = (
    normalizers.Identity,
    normalizers.Entmax,
    normalizers.Sparsemax,
    normalizers.TopK,
    normalizers.StickBreaking,
)


def _consists_of(mask: Mask, score: ScoreFunction | None, leaves: tuple[type, ...]) -> bool:
    is_leaf = lambda x: isinstance(x, Mask) and not isinstance(x, And | Or | Not)  # noqa: E731
    of_mask = jax.tree.leaves(mask, is_leaf=is_leaf)
    of_score = all(isinstance(x, _OF_SCORES) for x in scores.in_order(score))
    return of_score and all(isinstance(x, leaves) for x in of_mask)


def _moved_mask(mask: Mask, place: Place) -> Mask:
    match mask:
        case And() | Or() | Not():
            is_part = lambda x: isinstance(x, Mask) and x is not mask  # noqa: E731
            return jax.tree.map(lambda x: _moved_mask(x, place), mask, is_leaf=is_part)
        case masks.Predicate():
            return masks.Predicate(*_with_offsets(mask, place)) if _depends(mask, place) else mask
        case masks.Lengths() if place.q is not None:
            return _moved_lengths(mask, place)
        case masks.Blocks() if place.q is not None:
            return _moved_blocks(mask, place)
    is_sliced = isinstance(mask, masks.Segments | masks.Dense | masks.Lengths | masks.Blocks)
    return mask if is_sliced or mask.ignores_places else _MovedMask(mask, place.origin)


def _depends(function: masks.Predicate | scores.Score, place: Place) -> bool:
    """Returns whether a function depends on the batch row or head at which its piece begins."""

    floats = [x.dtype for x in jax.tree.leaves(function) if jnp.issubdtype(x.dtype, jnp.floating)]
    score = jnp.zeros((), floats[0] if floats else jnp.float32)  # they have the dtype of scores

    def scalar(b: Index, h: Index, q: Array, kv: Index) -> Array:
        if isinstance(function, scores.Score):
            return function._scalar(score, b, h, q, kv)
        return function._scalar(b, h, q, kv)

    return not place.is_first and bool(dependence.reads(scalar, 4) & {0, 1})


def _with_offsets(function: masks.Predicate | scores.Score, place: Place) -> tuple[Any, ...]:
    """Returns the function of a `Predicate` or a `Score` with operands that add the offsets of
    batch row and head.

    (A user's own bounds are dropped: the function implies them.)
    """
    fn, n_scores = function.fn, 1 if isinstance(function, scores.Score) else 0

    def with_offsets(*arguments: Array) -> Array:
        score, (b, h, q, kv, of_b, of_h, *operands) = arguments[:n_scores], arguments[n_scores:]
        return fn(*score, b + of_b, h + of_h, q, kv, *operands)

    return with_offsets, jnp.int32(place.b), jnp.int32(place.h), *function.operands


def _moved_lengths(mask: masks.Lengths, place: Place) -> Mask:
    """Returns lengths as segment ids, equal if query and key are both within their length."""

    def ids(places: Array, length: Tree, outside: int) -> Array:
        if length is None:
            return jnp.zeros((1, len(places)), jnp.int32)
        lengths = number(length) if is_static(length) else jnp.reshape(length, (-1, 1))
        return jnp.where(is_below(places[None, :], lengths), 0, outside).astype(jnp.int32)

    return masks.Segments(ids(place.q, mask.q, 1), ids(place.kv, mask.kv, 2))


def _moved_blocks(mask: masks.Blocks, place: Place) -> Mask:
    """Returns the layout of a piece's blocks, if the ends of the piece split no block."""
    if any(run % size for run, size in zip(place.runs, mask.sizes, strict=True)):
        return _MovedMask(mask, place.origin)
    layout = jnp.asarray(mask.layout)
    for axis, size, places in zip((-2, -1), mask.sizes, (place.q, place.kv), strict=True):
        layout = jnp.take(layout, places[::size] // size, axis=axis)
    return masks.Blocks(layout, mask.block)


def _moved_score(score: ScoreFunction | None, place: Place) -> ScoreFunction | None:
    match score:
        case Then():
            first, second = (_moved_score(x, place) for x in (score.first, score.second))
            return Then(first, second)  # pyright: ignore[reportArgumentType]
        case scores.Score():
            return scores.Score(*_with_offsets(score, place)) if _depends(score, place) else score
    if score is None or isinstance(score, (scores.Alibi, scores.RelativeBias, *_OF_SCORES)):
        return score
    return _MovedScore(score, place.origin)


def _moved_normalizer(
    normalizer: NormalizerFunction | None, place: Place
) -> NormalizerFunction | None:
    if normalizer is None or isinstance(normalizer, _OF_ROWS):
        return normalizer
    return _MovedNormalizer(normalizer, place.origin)


@pytree_dataclass
class _MovedMask(Mask):
    """A mask that may read places, evaluated at the place of a piece; no tile of it is certain."""

    inner: Mask
    origin: Origin

    def evaluate(self, b, h, rows, columns):
        return self.inner.evaluate(*_at(self.origin, b, h, rows, columns))

    def bounds(self, tile):
        return np.True_, np.False_


@pytree_dataclass
class _MovedScore(ScoreFunction):
    """A score function that may read places, evaluated at the place of a piece."""

    inner: ScoreFunction
    origin: Origin

    def evaluate(self, score, b, h, rows, columns):
        return self.inner.evaluate(score, *_at(self.origin, b, h, rows, columns))


@pytree_dataclass
class _MovedNormalizer(NormalizerFunction):
    """A normalizer that may read places, evaluated at the place of a piece."""

    inner: NormalizerFunction
    origin: Origin

    def weights(self, score, b, h, rows, columns):
        return self.inner.weights(score, *_at(self.origin, b, h, rows, columns))


def _at(
    origin: Origin, b: Index, h: Index, rows: Span, columns: Span
) -> tuple[Any, Any, Span, Span]:
    if origin.q is not None:
        rows = Span(rows.positions, origin.q)
    if origin.kv is not None:
        columns = Span(columns.positions, origin.kv)
    return b + number(origin.b), h + number(origin.h), rows, columns
