"""Attention on CPUs by a kernel in C++, `src/attention.cc`, called from XLA.

XLA's products on CPUs are fast for large matrices and far from it for those of attention, and it
does not keep the scores of a tile in the caches between the products and the softmax. The kernel
does. For the masks that leave each query one run of keys, and the score functions that `rules`
knows, its code is built in; for others, `generator` writes a rule. Beside the results it needs
a few tiles for each thread, about a megabyte with heads of 64.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array

from jattn import dropout, tile, tuning
from jattn._pytree import is_static, number, select_head
from jattn._types import AnyArray, Tree, accumulation
from jattn.call import Call
from jattn.kernels.common import lowering, tile_schedule
from jattn.kernels.common.derivatives import PerQuery
from jattn.kernels.common.vjp import AttentionVJP
from jattn.kernels.cpu import decode, generator, library, rules
from jattn.kernels.cpu.generator import Rule
from jattn.kernels.cpu.rules import QueryBlock, Runs
from jattn.kernels.protocol import Kernel
from jattn.softmax import Normalizer
from jattn.spec import Shapes, Spec, Tiling, parameters, with_parameters


_NO_PAIRS = "it computes products of queries and keys"


def supports(call: Call) -> str | None:
    """Calls whose rule is built into the kernel, see `not_built_in`, or can be generated for it."""
    spec, shapes = call.spec, call.shapes
    if spec.origin is not None and (spec.origin.q is not None or spec.origin.kv is not None):
        return "dropout of a piece counts places of the whole, it knows those of the piece"
    if not not_built_in(spec, shapes):
        return None
    if spec.pair is not None:
        return _NO_PAIRS
    if shapes.T == 0 or shapes.S == 0:
        return "there are no pairs of queries and keys to compile functions for"
    try:
        jax.eval_shape(functools.partial(_check_generated, accumulation(shapes.dtype)), spec)
    except NotImplementedError as reason:
        return str(reason)
    return None


def too_small(call: Call) -> str | None:
    """Where a rule would have to be generated: calls that compiling it does not pay for."""
    spec, shapes = call.spec, call.shapes
    if not isinstance(shapes.B, int):  # of an exported program, which goes without
        return None
    pairs, least = shapes.B * shapes.N * shapes.T * shapes.S, tuning.current().generated_pairs
    if pairs >= least or not not_built_in(spec, shapes):
        return None
    return (
        f"{pairs:,} pairs of queries and keys are too few to compile its functions for: it takes "
        f"{least:,} unless it is named"
    )


def not_built_in(spec: Spec, shapes: Shapes) -> str | None:
    """Why a rule has to be generated for a call; None where `attention.cc` has it built in."""
    if spec.pair is not None:
        return _NO_PAIRS
    if spec.kv_positions is not None:
        return "positions of keys are given, it knows those of queries only"
    try:
        jax.eval_shape(lambda spec: _runs(spec, shapes), spec)
        terms = rules.as_terms(spec.score)
    except NotImplementedError as reason:
        return str(reason)
    if terms.by_distance and spec.q_positions is not None:
        return "positions are given, it counts distances from 0"
    return None


def _check_generated(dtype: Any, spec: Spec) -> None:
    """Raises NotImplementedError where no rule can be generated."""
    generator.rule_of(spec, dtype, gradients=bool(parameters(spec)))


def unavailable(shapes: Shapes, wait: bool) -> str | None:
    """Why it cannot run on this machine, or in a program for any."""
    if lowering.exported():
        return "an exported program may run where its library is not"
    return library.unavailable("forward", accumulation(shapes.dtype), wait=wait)


def unbuilt(call: Call) -> str | None:
    """Why the rule of a call could not be compiled, if that was tried."""
    spec, shapes = call.spec, call.shapes
    if not not_built_in(spec, shapes):
        return None
    dtype, found = accumulation(shapes.dtype), list[str]()

    def look(spec: Spec) -> None:
        found.append(generator.rule_of(spec, dtype, gradients=bool(parameters(spec))).text)

    jax.eval_shape(look, spec)
    return library.rule_unavailable(found[0], dtype)


def _runs(spec: Spec, shapes: Shapes) -> Runs:
    positions = jnp.arange(shapes.T) if spec.q_positions is None else spec.q_positions
    place = QueryBlock(jnp.atleast_2d(positions.astype(jnp.int32)), shapes.S)
    return rules.as_runs(spec.mask, place)


def _distances(shapes: Shapes) -> Array:
    """kv − q along the diagonals in the kernel's order, and at least as many more as its vectors
    have lanes, which nobody looks at."""
    size = (shapes.T + shapes.S) // 64 * 64 + 128
    return shapes.S - 1 - jnp.arange(size, dtype=jnp.int32)


def _diagonals(spec: Spec, shapes: Shapes, dtype: DTypeLike) -> Array:
    """What is added to scores, `[1, N, d]`; of size 0 if nothing."""
    if not rules.as_terms(spec.score).by_distance:
        return jnp.zeros((1, 1, 0), dtype)
    distances = _distances(shapes)
    return rules.along_diagonals(spec.score, shapes.N, distances, dtype)[None]


class Arrays(NamedTuple):
    """The arrays that every function of the kernel is called with, in this order (`call.h`).

    query, key, value: `[B, T or S, N or K, size]`.
    start, stop: the first key that each query sees and the end of its keys, `[B or 1, 1, T]`.
    q_ids, kv_ids: ids, of which a query sees its own, `[B or 1, 1, T or S]`.
    bias: what is added to scores along the diagonals, `[1, N, diagonals]`.
    seeds: the seeds of dropout, `[B, N, 1]`.

    All but the first three have size 0 where a call has no such thing.
    """

    query: Array
    key: Array
    value: Array
    start: Array
    stop: Array
    q_ids: Array
    kv_ids: Array
    bias: Array
    seeds: Array


class Operands(NamedTuple):
    """What the functions of the kernel take.

    arrays: the arrays that all of them are called with.
    attributes: the numbers that all of them are called with, `Attributes` in `call.h`.
    rule: the generated rule, if the call has one.
    read: the arrays that the rule reads, the tile map first.
    """

    dtype: Any
    arrays: Arrays
    attributes: dict[str, float | np.int64]
    rule: Rule | None = None
    read: tuple[Array, ...] = ()


def operands_of(spec: Spec, query: Array, key: Array, value: Array) -> Operands:
    shapes, dtype = Shapes.of(query, value), accumulation(query.dtype)
    query, key, value = (
        x if _is_read(x.dtype, spec) else x.astype(dtype) for x in (query, key, value)
    )
    empty = jnp.zeros((1, 1, 0), jnp.int32)
    no_bias = jnp.zeros((1, 1, 0), dtype)
    seeds = _seeds(spec, shapes)
    arrays = Arrays(query, key, value, empty, empty, empty, empty, no_bias, seeds)
    attributes = {
        "scale": float(number(spec.scale)),
        "cap": 0.0,
        "dropout_scale": 1 / (1 - spec.dropout_rate),
        "threshold": np.int64(dropout.threshold(spec.dropout_rate) if spec.dropout_rate else 0),
        "rule": np.int64(0),
        "row": np.int64(0),
        "chunk": np.int64(0),
        "differentiated": np.int64(0),
        "least": -1.0,
    }
    if not_built_in(spec, shapes):
        rule = generator.rule_of(spec, dtype, gradients=bool(parameters(spec)))
        (row, chunk), tile_map = _tile_map(spec, shapes, rule)
        attributes |= {"row": np.int64(row), "chunk": np.int64(chunk)}
        number_of_rule = library.add_rule(rule.text, dtype, rule.modifies, rule.keeps)
        attributes["rule"] = np.int64(number_of_rule)
        read = tile_map, *generator.arrays(spec, shapes, dtype)
        return Operands(dtype, arrays, attributes, rule, read)
    runs = _runs(spec, shapes)
    ends = (jnp.clip(jnp.atleast_2d(jnp.asarray(x, jnp.int32)), 0, shapes.S) for x in runs[:2])
    start, stop = (jnp.broadcast_to(x, (len(x), shapes.T))[:, None, :] for x in ends)
    arrays = arrays._replace(start=start, stop=stop, bias=_diagonals(spec, shapes, dtype))
    if runs.ids:
        q_ids, kv_ids = (x[:, None, :] for x in runs.ids)
        arrays = arrays._replace(q_ids=q_ids, kv_ids=kv_ids)
    attributes["cap"] = rules.as_terms(spec.score).cap
    return Operands(dtype, arrays, attributes)


def _seeds(spec: Spec, shapes: Shapes) -> Array:
    """The seed of each head's dropout, `[B, N, 1]`, or an array of size 0."""
    if not spec.dropout_rate:
        return jnp.zeros((1, 1, 0), jnp.uint32)
    of_heads = jax.vmap(lambda b, h: dropout.seed(spec.dropout_key, b, h), (None, 0))
    b, h = (spec.origin.b, spec.origin.h) if spec.origin else (0, 0)
    rows, heads = (
        number(x) + jnp.arange(n, dtype=jnp.int32) for x, n in ((b, shapes.B), (h, shapes.N))
    )
    return jax.vmap(of_heads, (0, None))(rows, heads)[..., None]


def _tile_map(spec: Spec, shapes: Shapes, rule: Rule) -> tuple[Tiling, Array]:
    """Queries in a row, half of those in a tile, and keys in a chunk; and what the mask leaves of
    each, `[B or 1, N or 1, n m]`."""
    block, keys, _ = (int(x) for x in tuning.current().cpu_tiles.split(","))
    row, chunk = block // 2, keys
    rows = -(-shapes.T // row)
    while chunk > 16 and keys % (chunk // 2) == 0 and rows * -(-shapes.S // chunk) < 2**18:
        chunk //= 2
    tiling = Tiling(row, chunk)

    def one(b: Array | None, h: Array | None) -> AnyArray:
        own = b if rule.by_row else None, h if rule.by_head else None
        found = select_head(spec, *(0 if x is None else x for x in own))
        kinds = tile_schedule.kinds(found, shapes.T, shapes.S, tiling, *own)
        return kinds.reshape(-1).astype(np.int8)

    if not rule.by_row and not rule.by_head:
        return tiling, jnp.asarray(one(None, None))[None, None]
    every = jax.vmap(jax.vmap(lambda b, h: jnp.asarray(one(b, h)), (None, 0)), (0, None))
    rows, heads = shapes.B if rule.by_row else 1, shapes.N if rule.by_head else 1
    return tiling, every(jnp.arange(rows, dtype=jnp.int32), jnp.arange(heads, dtype=jnp.int32))


def _is_read(dtype: DTypeLike, spec: Spec) -> bool:
    """Whether the kernel reads numbers of a dtype as they are. It multiplies those of bfloat16 as
    such where the machine can, which is not the highest precision."""
    highest = spec.precision in ("highest", jax.lax.Precision.HIGHEST)
    return dtype == accumulation(dtype) or (dtype in (jnp.bfloat16, jnp.float16) and not highest)


def call(
    function: str,
    results: Sequence[jax.ShapeDtypeStruct],
    operands: Operands,
    *more_arrays: Array,
    **changed: float | np.int64,
) -> Sequence[Array]:
    """Calls a function of the kernel, with more arrays and with attributes that are changed."""
    name = library.target(function, operands.dtype)
    run = jax.ffi.ffi_call(name, results, vmap_method="broadcast_all")
    attributes = operands.attributes | changed
    return run(*operands.arrays, *more_arrays, *operands.read, **attributes)


def static_scale(spec: Spec, query: Array) -> tuple[Spec, Array]:
    """A call whose scale is a number, as the kernel takes it. A scale that is an array, a scalar or
    `[N]`, is multiplied with the queries, in the dtype of sums; the spec's is 1 then."""
    if is_static(spec.scale):
        return spec, query
    wide = query.astype(accumulation(query.dtype))
    return dataclasses.replace(spec, scale=1.0), wide * _by_head(spec.scale)


def _by_head(scale: Array) -> Array:
    """A scale, a scalar or `[N]`, as it is multiplied with queries `[B, T, N, H]`."""
    return scale.reshape(1, 1, -1, 1) if scale.ndim else scale


def _forward(
    spec: Spec, query: Array, key: Array, value: Array, *, normalized: bool = True
) -> tuple[Array, Normalizer, Array]:
    """Both results; without `normalized` the normalizer is zeros, which cost nothing."""
    own, scaled = static_scale(spec, query)
    if decode.pays(own, Shapes.of(query, value)):
        wide = scaled.astype(accumulation(query.dtype))
        out, normalizer = decode.attend(own, wide, decode.as_paged(key, value))
        return out, normalizer, jnp.zeros((), bool)
    operands = operands_of(own, scaled, key, value)
    (B, T, N), dtype = query.shape[:3], operands.dtype
    rows = (B, T, N) if normalized else (0, T, N)
    like = [jax.ShapeDtypeStruct(x, dtype) for x in ((B, T, N, value.shape[-1]), rows, rows)]
    out, *normalizer = call("forward", like, operands)
    if not normalized:
        normalizer = [jnp.zeros((B, T, N), dtype)] * 2
    return out, Normalizer(*normalizer), jnp.zeros((), bool)


def _backward(spec: Spec, per_query: PerQuery, key: Array, value: Array, _: Array) -> Tree:
    given, scale = per_query.query, spec.scale
    spec, query = static_scale(spec, given)
    shapes = Shapes.of(query, value)
    operands = operands_of(spec, query, key, value)
    dtype, rule = operands.dtype, operands.rule
    differentiated = rule.differentiated if rule else ()
    sums = [(shapes.B, shapes.N, operands.arrays.bias.shape[-1])]
    sums += [(shapes.B, shapes.N, operands.read[1 + n].shape[-1]) for n in differentiated]
    shapes_of = (query.shape, key.shape, value.shape, *sums)
    like = [jax.ShapeDtypeStruct(x, dtype) for x in shapes_of]
    bits = np.int64(sum(1 << n for n in differentiated))
    results = call("backward", like, operands, *per_query[1:], differentiated=bits)
    d_query, d_key, d_value, *d_sums = results

    def again(params: list[Array]) -> list[Array]:
        own = with_parameters(spec, params)
        if not rule:
            return [_diagonals(own, shapes, dtype)]
        read = generator.arrays(own, shapes, dtype)
        return [read[n] for n in differentiated]

    read, pull = jax.vjp(again, parameters(spec))
    totals = [_summed(x, like) for x, like in zip(d_sums[bool(rule) :], read, strict=True)]
    (d_params,) = pull(totals)
    if not is_static(scale):
        by_head = jnp.einsum("btnh,btnh->n", d_query, tile.finite(given.astype(dtype)))
        d_params = [*d_params, by_head if scale.ndim else by_head.sum()]
        d_query = d_query * _by_head(scale)
    return d_params, d_query, d_key, d_value


def _summed(x: Array, like: Array) -> Array:
    """Gradients `[B, N, size]` of an operand, in which axes of size 1 stand for all."""
    if not like.size:
        return like
    axes = tuple(axis for axis in (0, 1) if like.shape[axis] == 1)
    return x.sum(axis=axes, keepdims=True).astype(like.dtype)


def functions(platform: str) -> AttentionVJP:
    """Forward, backward, and forward without a normalizer.

    Each is one call of the kernel in `attention.cc`. Forward, a few queries on many keys are a call
    of the one in `decode.cc` instead.
    """
    alone = functools.partial(_forward, normalized=False)
    return AttentionVJP(_forward, _backward, forward_alone=alone)


KERNEL = Kernel(supports, functions, too_small, unavailable, unbuilt)
