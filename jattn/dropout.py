"""Dropout masks, decided by a hash of (key, b, h, query place, key place).

A decision depends on nothing else, so that it is the same for every implementation, tiling and
sharding, and in forward and backward passes. `drop` applies it to weights; `hashed` computes once
the part of the hashes that all tiles of a kernel share.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.core import Primitive
from jax.interpreters import batching, mlir
from jaxtyping import Array, Bool, Float, UInt32

from jattn._pytree import array_field, number, pytree_dataclass
from jattn._types import Index, Indices, Tree
from jattn.masks import Span, span
from jattn.spec import Shapes, Spec


def _mix(x: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """Returns a bijection of 32-bit words in which each input bit flips about half of the output.

    Two rounds of multiply and xor-shift, with the constants of Wellons's "lowbias32" (2018).
    """
    x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
    return x ^ (x >> 16)


def key_words(key: Array | tuple[Array, ...]) -> tuple[UInt32[Array, ""], ...]:
    """Returns the words of a random key, or words unchanged, because kernels cannot unwrap keys."""
    if isinstance(key, tuple):
        return key
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    words = jax.random.key_data(key) if typed else key
    return tuple(words.reshape(-1).astype(jnp.uint32))


def seed(key: Tree, b: Index, h: Index) -> UInt32[Array, ""]:
    """Returns a hash of (key, b, h), from which the dropout of one head is computed."""
    first, *rest = key_words(key)
    seed = _mix(first)
    for word in (*rest, b, h):
        seed = _mix(seed + np.uint32(0x9E3779B9) ^ jnp.asarray(word).astype(jnp.uint32))
    return seed


def threshold(rate: float) -> int:
    """Returns the threshold: a weight is dropped if the 32 bits of its hash are below it."""
    return min(round(rate * 2**32), 2**32 - 1)


def keep(
    key: Tree, rate: float, b: Index, h: Index, q_places: Indices, kv_places: Indices
) -> Bool[Array, "t s"]:
    """Returns which weights dropout keeps, `[t, s]`: each with probability 1 − rate."""
    rows = _row_hash(seed(key, b, h), q_places)
    return _kept(rate, rows, q_places, _column_hash(kv_places))


def _row_hash(seed: UInt32[Array, ""], places: Indices) -> UInt32[Array, " t"]:
    shared = jnp.asarray(places).astype(jnp.uint32) & np.uint32(2**32 - 1 - SHARED)
    return _mix(seed ^ _mix(shared))


def _column_hash(places: Indices) -> UInt32[Array, " s"]:
    return _mix(jnp.asarray(places).astype(jnp.uint32) + np.uint32(0x85EBCA6B))


# Queries whose places differ only in this bit share a hash up to its last multiplication: in the
# results of a GPU's tensor cores, the same thread holds both queries.
SHARED = 8
# The second number is the first times 2891336453, a multiplier whose successive pairs are spread
# most evenly (L'Ecuyer 1999, table 4).
_LAST = 0x846CA68B, 0x846CA68B * 2891336453 % 2**32


def _kept(
    rate: float, rows: UInt32[Array, " t"], q_places: Indices, columns: UInt32[Array, " s"]
) -> Bool[Array, "t s"]:
    """Returns whether the sum of two hashes, mixed as in `_mix`, reaches the threshold."""
    x = rows[:, None] + columns[None, :]
    x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
    second = jnp.asarray(q_places).astype(jnp.uint32) & np.uint32(SHARED)
    first, other = map(np.uint32, _LAST)
    last = jnp.where(second == 0, first, other)
    return (x ^ (x >> 15)) * last[:, None] >= np.uint32(threshold(rate))


# The identity on row hashes, which marks them as equal for places that differ only in the bit
# `SHARED`: GPU kernels compute what follows from two such hashes once.
shared_p = Primitive("jattn_shared")
shared_p.def_impl(lambda rows: rows)
shared_p.def_abstract_eval(lambda rows: rows)
batching.defvectorized(shared_p)
mlir.register_lowering(shared_p, lambda _, rows: [rows])


@pytree_dataclass
class Hashes:
    """The hashes that are computed once for all tiles, and replace a spec's dropout key.

    `rows` are the hashes of queries, or `seeds` those from which each tile computes them; `places`
    are the queries' places in the larger call of which this is a piece, None for a whole call.
    `dropped` is 0, the value of dropped weights: it is an operand because compilers that knew it
    would select among narrow numbers one by one.
    """

    rows: Any = array_field("*B N T")
    seeds: Any = array_field("*B N")
    columns: Any = array_field("S")
    places: Any = array_field("T")
    dropped: Any = array_field("")


def hashed(spec: Spec, shapes: Shapes, *, rows: bool) -> Spec:
    """Returns a spec of one batch axis with `Hashes`, of rows or of seeds, as its dropout key."""
    if spec.dropout_rate == 0:
        return spec
    places_of = functools.partial(
        _places, spec, rows=span(shapes.T, None), columns=span(shapes.S, None)
    )

    def head_hash(b: Array, h: Array) -> Array:
        b, h, places, _ = places_of(b, h)
        head_seed = seed(spec.dropout_key, b, h)
        return _row_hash(head_seed, places) if rows else head_seed

    all_heads = jax.vmap(jax.vmap(head_hash, (None, 0)), (0, None))
    computed = all_heads(*(jnp.arange(size, dtype=jnp.int32) for size in (shapes.B, shapes.N)))
    hashes = Hashes(
        computed if rows else None,
        None if rows else computed,
        _column_hash(places_of(0, 0)[3]),
        None if spec.origin is None else spec.origin.q,
        jnp.zeros((), jnp.float32),
    )
    return dataclasses.replace(spec, dropout_key=hashes, origin=None)


def drop(
    spec: Spec, weights: Float[Array, "t s"], b: Index, h: Index, rows: Span, columns: Span
) -> Float[Array, "t s"]:
    """Applies dropout to weights: kept weights are scaled by 1 / (1 − rate), dropped ones are 0."""
    if spec.dropout_rate == 0:
        return weights
    is_kept = keeps(spec, b, h, rows, columns)
    return weights * jnp.where(is_kept, 1 / (1 - spec.dropout_rate), 0).astype(weights.dtype)


def keeps(spec: Spec, b: Index, h: Index, rows: Span, columns: Span) -> Bool[Array, "t s"]:
    """Returns which weights the dropout of a spec keeps."""
    key, rate = spec.dropout_key, spec.dropout_rate
    if isinstance(key, Hashes):
        places = rows.places if key.places is None else key.places
        row_hashes = _row_hash(key.seeds, places) if key.rows is None else key.rows
        row_hashes = shared_p.bind(row_hashes) if key.places is None else row_hashes
        return _kept(rate, row_hashes, places, key.columns)
    return keep(key, rate, *_places(spec, b, h, rows, columns))


def _places(spec: Spec, b: Index, h: Index, rows: Span, columns: Span) -> tuple[Any, Any, Any, Any]:
    """Returns batch row, head and places in the whole call, of which this may be a piece."""
    if spec.origin is None:
        return b, h, rows.places, columns.places
    first_b, first_h = number(spec.origin.b), number(spec.origin.h)
    q = rows.places if spec.origin.q is None else spec.origin.q
    kv = columns.places if spec.origin.kv is None else spec.origin.kv
    return b + first_b, h + first_h, q, kv
