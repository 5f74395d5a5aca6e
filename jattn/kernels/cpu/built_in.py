"""Masks and score functions in the terms of `src/attention.cc`.

The kernel knows no mask by name. It reads two arrays, `start` and `stop`: each query sees the keys
j with start <= j < stop. `as_key_ranges` returns them for a mask; for Causal they are 0 and the
place after the query's own. `as_terms` returns the terms of a score function, and `as_weights` the
number of a pointwise normalizer. All three are open functions: to run a class of your own in the
kernel, register it.

    @as_key_ranges.register
    def _(mask: MyMask, queries: QueryBlock) -> KeyRanges: ...
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jattn import masks, normalizers, scores
from jattn._pytree import is_static, number, select_head
from jattn._types import Index, Tree
from jattn.functions import integers
from jattn.masks import Span
from jattn.spec import AsScore, Spec


class QueryBlock(NamedTuple):
    """The positions of all queries, `[1, T]` or `[B, T]`, and the number of keys.

    The positions of keys are their places.
    """

    positions: Int[Array, "b T"]
    S: int


class KeyRanges(NamedTuple):
    """The keys that each query sees: `start <= place < stop` and, with `ids`, an id equal to its
    own.

    Integers or int32 arrays `[1 or B, 1 or T]`; ids are a pair `[1 or B, T]`, `[1 or B, S]`.
    """

    start: Index
    stop: Index
    ids: tuple[Any, Any] | None = None


@functools.singledispatch
def as_key_ranges(mask: Tree, queries: QueryBlock) -> KeyRanges:
    """Returns the keys that a mask allows; raises NotImplementedError with the reason."""
    raise NotImplementedError(f"{type(mask).__name__} does not leave one run of keys to a query")


def _until(positions: Int[Array, "b T"], right: int, S: int) -> Int[Array, "b T"]:
    """Returns the end of the keys up to `right` after a query; no sum overflows."""
    last = masks.shifted(positions, right)
    return jnp.where(last >= S - 1, S, last + 1)


def _by_row(length: Tree) -> Index:
    length = integers.clamped(number(length))  # no place is beyond
    return length if is_static(length) else length.reshape(length.size, 1)


as_key_ranges.register(masks.Full, lambda mask, queries: KeyRanges(0, queries.S))
as_key_ranges.register(masks.Empty, lambda mask, queries: KeyRanges(0, 0))
as_key_ranges.register(masks.Prefix, lambda mask, queries: KeyRanges(0, _by_row(mask.length)))


@as_key_ranges.register
def _(mask: masks.Causal, queries: QueryBlock) -> KeyRanges:
    return KeyRanges(0, _until(queries.positions, 0, queries.S))


@as_key_ranges.register
def _(mask: masks.Window, queries: QueryBlock) -> KeyRanges:
    q, S = queries.positions, queries.S
    left, right = number(mask.left), number(mask.right)
    if not all(x is None or isinstance(x, int) for x in (left, right)):
        raise NotImplementedError("the sides of Window are arrays")
    start = 0 if left is None else masks.shifted(jnp.maximum(q, 0), -left)
    return KeyRanges(start, S if right is None else _until(q, right, S))


@as_key_ranges.register
def _(mask: masks.Lengths, queries: QueryBlock) -> KeyRanges:
    stop = queries.S if mask.kv is None else _by_row(mask.kv)
    if mask.q is not None:
        places = jnp.arange(queries.positions.shape[-1], dtype=jnp.int32)[None, :]
        stop = jnp.where(places < _by_row(mask.q), stop, 0)
    return KeyRanges(0, stop)


@as_key_ranges.register
def _(mask: masks.Segments, queries: QueryBlock) -> KeyRanges:
    q_ids, kv_ids = (jnp.atleast_2d(jnp.asarray(x, jnp.int32)) for x in (mask.q_ids, mask.kv_ids))
    return KeyRanges(0, queries.S, (q_ids, kv_ids))


@as_key_ranges.register
def _(mask: masks.Padding, queries: QueryBlock) -> KeyRanges:
    is_padding = ~jnp.atleast_2d(jnp.asarray(mask.attention_mask))
    q_ids = jnp.zeros((1, queries.positions.shape[-1]), jnp.int32)
    return KeyRanges(0, queries.S, (q_ids, is_padding.astype(jnp.int32)))


@as_key_ranges.register
def _(mask: masks.And, queries: QueryBlock) -> KeyRanges:
    left, right = as_key_ranges(mask.left, queries), as_key_ranges(mask.right, queries)
    if left.ids and right.ids:
        raise NotImplementedError("it compares one pair of ids, not two")
    starts, stops = zip(left[:2], right[:2], strict=True)
    from_start = all(isinstance(x, int) and x <= 0 for x in starts)
    start = 0 if from_start else jnp.maximum(*starts)
    return KeyRanges(start, jnp.minimum(*stops), left.ids or right.ids)


@as_key_ranges.register
def _(mask: masks.Or, queries: QueryBlock) -> KeyRanges:
    left, right = as_key_ranges(mask.left, queries), as_key_ranges(mask.right, queries)
    if left.ids or right.ids or not all(isinstance(x.start, int) for x in (left, right)):
        raise NotImplementedError("of two masks one of which must allow, it knows prefixes only")
    return KeyRanges(0, jnp.maximum(left.stop, right.stop))


class Terms(NamedTuple):
    """A score function: cap × tanh(score / cap) if `cap` is not 0, or a term that depends on head
    and distance alone and is added to the score."""

    cap: float = 0.0
    by_distance: bool = False


@functools.singledispatch
def as_terms(score: Tree) -> Terms:
    """Returns the terms of a score function; raises NotImplementedError with the reason."""
    raise NotImplementedError(f"it has no {type(score).__name__}")


as_terms.register(type(None), lambda score: Terms())
as_terms.register(scores.Alibi, lambda score: Terms(by_distance=True))
as_terms.register(scores.RelativeBias, lambda score: Terms(by_distance=True))


@as_terms.register
def _(score: scores.SoftCap) -> Terms:
    if not is_static(score.cap):
        raise NotImplementedError("the cap is an array, expected a number")
    cap = float(number(score.cap))
    limits = jnp.finfo(jnp.float32)
    if not float(limits.tiny) <= cap <= float(limits.max):
        raise NotImplementedError(f"the cap {cap} is no number of float32")
    return Terms(cap=cap)


class Weights(NamedTuple):
    """A normalizer: its number in `src/pointwise.h`, and the constant that its function reads."""

    number: int
    constant: float = 0.0


@functools.singledispatch
def as_weights(normalizer: Tree) -> Weights:
    """Returns the number of a normalizer; raises NotImplementedError with the reason."""
    raise NotImplementedError("the kernel does not have it")


as_weights.register(type(None), lambda normalizer: Weights(0))
as_weights.register(normalizers.Identity, lambda normalizer: Weights(1))
as_weights.register(normalizers.Exp, lambda normalizer: Weights(5))
as_weights.register(normalizers.Sparsemax, lambda normalizer: Weights(6, 2.0))
as_weights.register(normalizers.TopK, lambda normalizer: Weights(7, float(normalizer.k)))
as_weights.register(normalizers.StickBreaking, lambda normalizer: Weights(8))


@as_weights.register
def _(normalizer: normalizers.Entmax) -> Weights:
    if not 1.1 <= normalizer.alpha <= 5:  # its thresholds lose digits beyond
        raise NotImplementedError(f"expected an alpha from 1.1 to 5, got {normalizer.alpha}")
    return Weights(6, float(normalizer.alpha))


@as_weights.register
def _(normalizer: normalizers.Sigmoid) -> Weights:
    if not is_static(normalizer.bias):
        raise NotImplementedError("the bias is an array, expected a number")
    return Weights(2, float(number(normalizer.bias)))


@as_weights.register
def _(normalizer: normalizers.Relu) -> Weights:
    if normalizer.power not in (1, 2):
        raise NotImplementedError(f"expected a power of 1 or 2, got {normalizer.power}")
    return Weights(2 + int(normalizer.power), 1 / float(number(normalizer.divisor)))


def separated(spec: Spec) -> Spec:
    """Returns the spec with a built-in pointwise normalizer, the last function of its score, as its
    `normalizer`."""
    if not isinstance(spec.normalizer, normalizers.Identity):
        return spec
    *first, last = scores.in_order(spec.score)
    if not isinstance(last, AsScore):  # in a part of a call, see `place`
        return spec
    try:
        as_weights(last.normalizer)
    except NotImplementedError:
        return spec
    score = functools.reduce(scores.Then, first) if first else None
    return dataclasses.replace(spec, score=score, normalizer=last.normalizer)


_CHUNK = 16  # distances whose gradients are summed before those of other chunks are added


def along_diagonals(score: Tree, N: int, distances: Array, dtype: DTypeLike) -> Array:
    """Returns the terms of a function by distance, `[N, d]` for distances kv − q `[d]`.

    The number of distances is a multiple of `_CHUNK`.
    """
    zero = jnp.zeros(1, jnp.int32)

    def chunk_terms(score: Tree, h: Array, distances: Array) -> Float[Array, " d"]:
        selected = select_head(score, 0, h)
        rows, columns = Span(zero, zero + 0), Span(distances, distances + 0)
        return selected.evaluate(jnp.zeros((1, _CHUNK), dtype), 0, h, rows, columns)[0]

    chunks = distances.reshape(-1, _CHUNK)
    copies = jax.tree.map(lambda x: jnp.broadcast_to(x, (len(chunks), *x.shape)), score)
    over_heads = jax.vmap(jax.vmap(chunk_terms, (0, None, 0)), (None, 0, None))
    return over_heads(copies, jnp.arange(N, dtype=jnp.int32), chunks).reshape(N, -1)
