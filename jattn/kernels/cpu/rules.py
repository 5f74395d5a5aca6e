"""Masks and score functions in the terms of `src/attention.cc`.

The kernel knows no mask by name. It reads two arrays, `start` and `stop`: each query sees the keys
j with start <= j < stop. `as_runs` makes them of a mask. Causal, for example, is the run from 0 to
the query's own position. `as_terms` says what a score function becomes. Both are open functions:
register a class of your own to have it run there.

    @as_runs.register
    def _(mask: MyMask, place: QueryBlock) -> Runs: ...
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jattn import masks, scores
from jattn._pytree import is_static, number, select_head
from jattn._types import Index, Tree
from jattn.functions import integers
from jattn.masks import Span


class QueryBlock(NamedTuple):
    """The queries that masks are asked about, and how many keys there are.

    Positions `[1, T]` or `[B, T]`; those of keys are their places.
    """

    positions: Int[Array, "b T"]
    S: int

    @property
    def T(self) -> int:
        """How many queries there are."""
        return self.positions.shape[-1]


class Runs(NamedTuple):
    """Which keys each query sees: `start <= place < stop`, of them those whose ids are its own.

    Integers or int32 arrays `[1 or B, 1 or T]`; ids are a pair `[1 or B, T]`, `[1 or B, S]`.
    """

    start: Index
    stop: Index
    ids: tuple[Any, Any] | None = None


@functools.singledispatch
def as_runs(mask: Tree, place: QueryBlock) -> Runs:
    """What a mask leaves; raises NotImplementedError with the reason."""
    raise NotImplementedError(f"{type(mask).__name__} does not leave one run of keys to a query")


@as_runs.register
def _(mask: masks.Full, place: QueryBlock) -> Runs:
    return Runs(0, place.S)


@as_runs.register
def _(mask: masks.Empty, place: QueryBlock) -> Runs:
    return Runs(0, 0)


def _until(positions: Int[Array, "b T"], right: int, S: int) -> Int[Array, "b T"]:
    """The end of the keys up to `right` after a query; no sum overflows."""
    last = masks.shifted(positions, right)
    return jnp.where(last >= S - 1, S, last + 1)


@as_runs.register
def _(mask: masks.Causal, place: QueryBlock) -> Runs:
    return Runs(0, _until(place.positions, 0, place.S))


@as_runs.register
def _(mask: masks.Window, place: QueryBlock) -> Runs:
    q, S = place.positions, place.S
    left, right = number(mask.left), number(mask.right)
    if not all(x is None or isinstance(x, int) for x in (left, right)):
        raise NotImplementedError("the sides of Window are arrays")
    start = 0 if left is None else masks.shifted(jnp.maximum(q, 0), -left)
    return Runs(start, S if right is None else _until(q, right, S))


def _by_row(length: Tree) -> Index:
    length = integers.clamped(number(length))  # no place is beyond
    return length if is_static(length) else length.reshape(length.size, 1)


@as_runs.register
def _(mask: masks.Prefix, place: QueryBlock) -> Runs:
    return Runs(0, _by_row(mask.length))


@as_runs.register
def _(mask: masks.Lengths, place: QueryBlock) -> Runs:
    stop = place.S if mask.kv is None else _by_row(mask.kv)
    if mask.q is not None:
        places = jnp.arange(place.T, dtype=jnp.int32)[None, :]
        stop = jnp.where(places < _by_row(mask.q), stop, 0)
    return Runs(0, stop)


@as_runs.register
def _(mask: masks.Segments, place: QueryBlock) -> Runs:
    q_ids, kv_ids = (jnp.atleast_2d(jnp.asarray(x, jnp.int32)) for x in (mask.q_ids, mask.kv_ids))
    return Runs(0, place.S, (q_ids, kv_ids))


@as_runs.register
def _(mask: masks.Padding, place: QueryBlock) -> Runs:
    is_padding = ~jnp.atleast_2d(jnp.asarray(mask.attention_mask))
    queries = jnp.zeros((1, place.T), jnp.int32)
    return Runs(0, place.S, (queries, is_padding.astype(jnp.int32)))


@as_runs.register
def _(mask: masks.And, place: QueryBlock) -> Runs:
    left, right = as_runs(mask.left, place), as_runs(mask.right, place)
    if left.ids and right.ids:
        raise NotImplementedError("it compares one pair of ids, not two")
    starts, stops = zip(left[:2], right[:2], strict=True)
    from_start = all(isinstance(x, int) and x <= 0 for x in starts)
    start = 0 if from_start else jnp.maximum(*starts)
    return Runs(start, jnp.minimum(*stops), left.ids or right.ids)


@as_runs.register
def _(mask: masks.Or, place: QueryBlock) -> Runs:
    left, right = as_runs(mask.left, place), as_runs(mask.right, place)
    if left.ids or right.ids or not all(isinstance(x.start, int) for x in (left, right)):
        raise NotImplementedError("of two masks one of which must allow, it knows prefixes only")
    return Runs(0, jnp.maximum(left.stop, right.stop))


class Terms(NamedTuple):
    """A score function: cap × tanh(score / cap) if `cap` is not 0, or something added that depends
    on head and distance alone."""

    cap: float = 0.0
    by_distance: bool = False


@functools.singledispatch
def as_terms(score: Tree) -> Terms:
    """What a score function does; raises NotImplementedError with the reason."""
    raise NotImplementedError(f"it has no {type(score).__name__}")


@as_terms.register
def _(score: None) -> Terms:
    return Terms()


@as_terms.register
def _(score: scores.SoftCap) -> Terms:
    if not is_static(score.cap):
        raise NotImplementedError("the cap is an array, expected a number")
    cap = float(number(score.cap))
    limits = jnp.finfo(jnp.float32)
    if not float(limits.tiny) <= cap <= float(limits.max):
        raise NotImplementedError(f"the cap {cap} is no number of float32")
    return Terms(cap=cap)


@as_terms.register(scores.Alibi)
@as_terms.register(scores.RelativeBias)
def _(score: Tree) -> Terms:
    return Terms(by_distance=True)


_CHUNK = 16  # distances whose gradients are summed before those of other chunks are added


def along_diagonals(score: Tree, N: int, distances: Array, dtype: DTypeLike) -> Array:
    """What a function by distance adds, `[N, d]` for distances kv − q `[d]`, whole chunks."""
    zero = jnp.zeros(1, jnp.int32)

    def one(score: Tree, h: Array, distances: Array) -> Float[Array, " d"]:
        selected = select_head(score, 0, h)
        rows, columns = Span(zero, zero + 0), Span(distances, distances + 0)
        return selected.evaluate(jnp.zeros((1, _CHUNK), dtype), 0, h, rows, columns)[0]

    chunks = distances.reshape(-1, _CHUNK)
    scores = jax.tree.map(lambda x: jnp.broadcast_to(x, (len(chunks), *x.shape)), score)
    every = jax.vmap(jax.vmap(one, (0, None, 0)), (None, 0, None))
    return every(scores, jnp.arange(N, dtype=jnp.int32), chunks).reshape(N, -1)
