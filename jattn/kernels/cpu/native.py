"""Attention on CPUs by a kernel in C++, `src/attention.cc`, called from XLA.

XLA's products on CPUs are slow for the small matrices of attention, and XLA does not keep the
scores of a tile in the caches between the products and the softmax. The kernel does both. It has
built-in code for masks that leave each query one range of keys, and for the score functions in
`built_in`; `generator` writes rules for all others. Besides the results, each thread needs memory
for a few tiles, about a megabyte with heads of 64.

With a pointwise normalizer the normalizers of the results are zeros. Functions that begin with a
`Spec` here take it as `built_in.separated` returns it.
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
from jattn._types import Tree, accumulation
from jattn.call import Call
from jattn.kernels.common import lowering, tile_schedule
from jattn.kernels.common.derivatives import PerQuery
from jattn.kernels.common.vjp import AttentionVJP
from jattn.kernels.cpu import built_in, decode, generator, library
from jattn.kernels.cpu.built_in import KeyRanges, QueryBlock
from jattn.kernels.cpu.generator import GeneratedRule
from jattn.kernels.protocol import Kernel
from jattn.softmax import Normalizer
from jattn.spec import (
    Shapes,
    Spec,
    Tiling,
    parameters,
    with_parameters,
)


def supports(call: Call) -> str | None:
    """Returns why a call's masks and scores are neither built in nor can be generated, or None."""
    spec, shapes = built_in.separated(call.spec), call.shapes
    if spec.origin is not None and (spec.origin.q is not None or spec.origin.kv is not None):
        return "dropout of a piece counts places of the whole, it knows those of the piece"
    if spec.pair is not None:
        return "it computes products of queries and keys"
    if not not_built_in(spec, shapes):
        return None
    if shapes.T == 0 or shapes.S == 0:
        return "there are no pairs of queries and keys to compile functions for"
    try:
        _abstract_rule(spec, shapes)
    except NotImplementedError as reason:
        return str(reason)
    return None


def normalizers(call: Call) -> str | None:
    """Returns why the kernel cannot compute the call's normalizer, or None."""
    try:
        built_in.as_weights(call.spec.normalizer)
    except NotImplementedError as reason:
        return f"normalizer {type(call.spec.normalizer).__name__}: {reason}"
    return None


def too_small(call: Call) -> str | None:
    """Returns why compiling a call's rule would take longer than it saves; None if it would not."""
    spec, shapes = built_in.separated(call.spec), call.shapes
    if not isinstance(shapes.B, int):  # an exported program, for which nothing is compiled
        return None
    pairs, least = shapes.B * shapes.N * shapes.T * shapes.S, tuning.current().generated_pairs
    if pairs >= least or not not_built_in(spec, shapes):
        return None
    return (
        f"{pairs:,} pairs of queries and keys are too few to compile C++ for the call's functions: "
        f"{least:,} are needed, unless the call names the implementation"
    )


def not_built_in(spec: Spec, shapes: Shapes) -> str | None:
    """Returns why a call needs a generated rule; None if `attention.cc` has its mask and score."""
    if spec.kv_positions is not None:
        return "positions of keys are given, it knows those of queries only"
    try:
        jax.eval_shape(lambda spec: _key_ranges(spec, shapes), spec)
        terms = built_in.as_terms(spec.score)
    except NotImplementedError as reason:
        return str(reason)
    if spec.normalizer is not None and spec.score is not None:
        return "it has score functions for the softmax only"
    if terms.by_distance and spec.q_positions is not None:
        return "positions are given, it counts distances from 0"
    return None


def _abstract_rule(spec: Spec, shapes: Shapes) -> GeneratedRule:
    """Generates the rule of a spec while nothing is traced."""
    rules: list[GeneratedRule] = []
    dtype = accumulation(shapes.dtype)
    jax.eval_shape(lambda spec: rules.append(generator.generate(spec, dtype)), spec)
    return rules[0]


def unavailable(shapes: Shapes, wait: bool) -> str | None:
    """Returns why the kernel cannot run on this machine, or in an exported program, or None."""
    if lowering.exported():
        return "an exported program may run where its library is not"
    return library.unavailable("forward", accumulation(shapes.dtype), wait=wait)


def compilation_failure(call: Call) -> str | None:
    """Returns why an earlier attempt to compile the call's rule failed, or None."""
    spec = built_in.separated(call.spec)
    if not not_built_in(spec, call.shapes):
        return None
    rule = _abstract_rule(spec, call.shapes)
    return library.rule_unavailable(rule.text, accumulation(call.shapes.dtype))


def _key_ranges(spec: Spec, shapes: Shapes) -> KeyRanges:
    positions = jnp.arange(shapes.T) if spec.q_positions is None else spec.q_positions
    queries = QueryBlock(jnp.atleast_2d(positions.astype(jnp.int32)), shapes.S)
    return built_in.as_key_ranges(spec.mask, queries)


def _diagonals(spec: Spec, shapes: Shapes, dtype: DTypeLike) -> Array:
    """The terms added to scores along the diagonals, `[1, N, d]`; of size 0 if there are none.

    The kernel counts distances kv − q downwards. They are padded by more than a vector's lanes.
    """
    if not built_in.as_terms(spec.score).by_distance:
        return jnp.zeros((1, 1, 0), dtype)
    size = (shapes.T + shapes.S) // 64 * 64 + 128
    distances = shapes.S - 1 - jnp.arange(size, dtype=jnp.int32)
    return built_in.along_diagonals(spec.score, shapes.N, distances, dtype)[None]


class KernelArrays(NamedTuple):
    """The arrays that every function of the kernel takes, in this order (`call.h`).

    query, key, value: `[B, T or S, N or K, size]`.
    start, stop: the first key that each query sees, and the end of its keys, `[B or 1, 1, T]`.
    q_ids, kv_ids: a query sees only keys with its own id, `[B or 1, 1, T or S]`.
    bias: the terms added to scores along the diagonals, `[1, N, diagonals]`.
    seeds: the seeds of dropout, `[B, N, 1]`.

    All but the first three have size 0 if a call does not need them.
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


class KernelOperands(NamedTuple):
    """The operands that every function of the kernel takes.

    attributes: the numbers, `Attributes` in `call.h`.
    rule: the generated rule, if the call has one.
    rule_arrays: the arrays that the rule reads, the tile map first.
    """

    dtype: Any
    arrays: KernelArrays
    attributes: dict[str, float | np.int64]
    rule: GeneratedRule | None = None
    rule_arrays: tuple[Array, ...] = ()


def operands_of(spec: Spec, query: Array, key: Array, value: Array) -> KernelOperands:
    """Returns the operands of a call; raises CompilationFailed if its rule cannot be compiled."""
    shapes, dtype = Shapes.of(query, value), accumulation(query.dtype)
    query, key, value = (
        x if _reads(x.dtype, spec) else x.astype(dtype) for x in (query, key, value)
    )
    empty, no_bias = jnp.zeros((1, 1, 0), jnp.int32), jnp.zeros((1, 1, 0), dtype)
    seeds = _seeds(spec, shapes)
    arrays = KernelArrays(query, key, value, empty, empty, empty, empty, no_bias, seeds)
    weights = built_in.as_weights(spec.normalizer)
    attributes = {
        "scale": float(number(spec.scale)),
        "cap": 0.0,
        "dropout_scale": 1 / (1 - spec.dropout_rate),
        "threshold": np.int64(dropout.threshold(spec.dropout_rate) if spec.dropout_rate else 0),
        "least": -1.0,
        "normalizer": np.int64(weights.number),
        "constant": weights.constant,
        **dict.fromkeys(("rule", "row", "chunk", "differentiated"), np.int64(0)),
    }
    if not_built_in(spec, shapes):
        rule = generator.generate(spec, dtype)
        (row, chunk), tile_map = _tile_map(spec, shapes, rule)
        rule_number = library.add_rule(rule.text, dtype, rule.modifies, rule.keeps)
        numbers = {"row": row, "chunk": chunk, "rule": rule_number}
        attributes |= {name: np.int64(x) for name, x in numbers.items()}
        rule_arrays = tile_map, *generator.arrays(spec, shapes, dtype)
        return KernelOperands(dtype, arrays, attributes, rule, rule_arrays)
    ranges = _key_ranges(spec, shapes)
    ends = (jnp.clip(jnp.atleast_2d(jnp.asarray(x, jnp.int32)), 0, shapes.S) for x in ranges[:2])
    start, stop = (jnp.broadcast_to(x, (len(x), shapes.T))[:, None, :] for x in ends)
    arrays = arrays._replace(start=start, stop=stop, bias=_diagonals(spec, shapes, dtype))
    if ranges.ids:
        q_ids, kv_ids = (x[:, None, :] for x in ranges.ids)
        arrays = arrays._replace(q_ids=q_ids, kv_ids=kv_ids)
    attributes["cap"] = built_in.as_terms(spec.score).cap
    return KernelOperands(dtype, arrays, attributes)


def _seeds(spec: Spec, shapes: Shapes) -> Array:
    """The seed of each head's dropout, `[B, N, 1]`, or an array of size 0."""
    if not spec.dropout_rate:
        return jnp.zeros((1, 1, 0), jnp.uint32)
    over_heads = jax.vmap(lambda b, h: dropout.seed(spec.dropout_key, b, h), (None, 0))
    first = (spec.origin.b, spec.origin.h) if spec.origin else (0, 0)
    rows, heads = (
        number(x) + jnp.arange(n, dtype=jnp.int32)
        for x, n in zip(first, (shapes.B, shapes.N), strict=True)
    )
    return jax.vmap(over_heads, (0, None))(rows, heads)[..., None]


def _tile_map(spec: Spec, shapes: Shapes, rule: GeneratedRule) -> tuple[Tiling, Array]:
    """Returns the tiles of the map and the kind of each, `[B or 1, N or 1, n m]`.

    A tile of the map has half as many queries as a tile of the kernel, and as many keys or fewer.
    """
    block, keys, _ = (int(x) for x in tuning.current().cpu_tiles.split(","))
    row, chunk = block // 2, keys
    rows = -(-shapes.T // row)
    while chunk > 16 and keys % (chunk // 2) == 0 and rows * -(-shapes.S // chunk) < 2**18:
        chunk //= 2
    tiling = Tiling(row, chunk)

    def head_map(b: Array | None, h: Array | None) -> Array:
        b, h = b if rule.by_row else None, h if rule.by_head else None
        selected = select_head(spec, 0 if b is None else b, 0 if h is None else h)
        kinds = tile_schedule.kinds(selected, shapes.T, shapes.S, tiling, b, h)
        return jnp.asarray(kinds.reshape(-1).astype(np.int8))

    if not rule.by_row and not rule.by_head:
        return tiling, head_map(None, None)[None, None]
    over_heads = jax.vmap(jax.vmap(head_map, (None, 0)), (0, None))
    sizes = shapes.B if rule.by_row else 1, shapes.N if rule.by_head else 1
    return tiling, over_heads(*(jnp.arange(x, dtype=jnp.int32) for x in sizes))


def _reads(dtype: DTypeLike, spec: Spec) -> bool:
    """Returns whether the kernel reads numbers of a dtype without a conversion.

    Machines with the instructions multiply bfloat16 directly, which is not the highest precision.
    """
    highest = spec.precision in ("highest", jax.lax.Precision.HIGHEST)
    return dtype == accumulation(dtype) or (dtype in (jnp.bfloat16, jnp.float16) and not highest)


def call(
    function: str,
    results: Sequence[jax.ShapeDtypeStruct],
    operands: KernelOperands,
    *more_arrays: Array,
    **changed: float | np.int64,
) -> Sequence[Array]:
    """Calls a function of the kernel, with more arrays and with `changed` attributes."""
    name = library.target(function, operands.dtype)
    run = jax.ffi.ffi_call(name, results, vmap_method="broadcast_all")
    attributes = operands.attributes | changed
    return run(*operands.arrays, *more_arrays, *operands.rule_arrays, **attributes)


def forward(
    operands: KernelOperands, normalized: bool, dtype: DTypeLike | None = None
) -> Sequence[Array]:
    """Returns the output, which the kernel rounds to `dtype`, and the two arrays of the normalizer,
    without rows unless `normalized`."""
    (B, T, N, _), V = operands.arrays.query.shape, operands.arrays.value.shape[-1]
    row = jax.ShapeDtypeStruct((B if normalized else 0, T, N), operands.dtype)
    out = jax.ShapeDtypeStruct((B, T, N, V), dtype or operands.dtype)
    return call("forward", [out, row, row], operands)


def static_scale(spec: Spec, query: Array) -> tuple[Spec, Array]:
    """Returns the call with a scale that is a number, as the kernel requires.

    A scale that is an array, a scalar or `[N]`, is multiplied with the queries, in the dtype of
    sums; the spec's scale is then 1.
    """
    if is_static(spec.scale):
        return spec, query
    wide = query.astype(accumulation(query.dtype))
    return dataclasses.replace(spec, scale=1.0), wide * _by_head(spec.scale)


def _by_head(scale: Array) -> Array:
    """A scale, a scalar or `[N]`, with axes that broadcast to queries `[B, T, N, H]`."""
    return scale.reshape(1, 1, -1, 1) if scale.ndim else scale


def _forward(
    spec: Spec, query: Array, key: Array, value: Array, *, normalized: bool = True
) -> tuple[Array, Normalizer, Array]:
    """Computes output and normalizer; without `normalized` the normalizer is zeros, at no cost.

    Without it, the kernel rounds the output to 16 bits for such queries, and so writes less; XLA
    removes the conversions back and forth.
    """
    spec, scaled = static_scale(built_in.separated(spec), query)
    if decode.pays(spec, Shapes.of(query, value)):
        wide = scaled.astype(accumulation(query.dtype))
        out, normalizer = decode.attend(spec, wide, decode.as_paged(key, value))
        return out, normalizer, jnp.zeros((), bool)
    operands = operands_of(spec, scaled, key, value)
    is_half = query.dtype in (jnp.bfloat16, jnp.float16)
    dtype = query.dtype if is_half and not normalized else None
    normalized = normalized and spec.normalizer is None
    out, *normalizer = forward(operands, normalized, dtype)
    if not normalized:
        normalizer = [jnp.zeros(query.shape[:3], operands.dtype)] * 2
    return out.astype(operands.dtype), Normalizer(*normalizer), jnp.zeros((), bool)


def _backward(spec: Spec, per_query: PerQuery, key: Array, value: Array, _: Array) -> Tree:
    unscaled, scale = per_query.query, spec.scale
    spec, query = static_scale(built_in.separated(spec), unscaled)
    shapes = Shapes.of(query, value)
    operands = operands_of(spec, query, key, value)
    dtype, rule = operands.dtype, operands.rule
    differentiated = rule.differentiated if rule else ()
    sums = [(shapes.B, shapes.N, operands.arrays.bias.shape[-1])]
    sums += [(shapes.B, shapes.N, operands.rule_arrays[1 + n].shape[-1]) for n in differentiated]
    result_shapes = (query.shape, key.shape, value.shape, *sums)
    like = [jax.ShapeDtypeStruct(x, dtype) for x in result_shapes]
    bits = np.int64(sum(1 << n for n in differentiated))
    results = call("backward", like, operands, *per_query[1:], differentiated=bits)
    d_query, d_key, d_value, *d_sums = results

    def score_arrays(params: list[Array]) -> list[Array]:
        """Returns the arrays whose gradients the kernel sums, from the spec's parameters."""
        changed = with_parameters(spec, params)
        if not rule:
            return [_diagonals(changed, shapes, dtype)]
        arrays = generator.arrays(changed, shapes, dtype)
        return [arrays[n] for n in differentiated]

    arrays, pull = jax.vjp(score_arrays, parameters(spec))
    totals = [_summed(x, like) for x, like in zip(d_sums[bool(rule) :], arrays, strict=True)]
    (d_params,) = pull(totals)
    if not is_static(scale):
        by_head = jnp.einsum("btnh,btnh->n", d_query, tile.finite(unscaled.astype(dtype)))
        d_params = [*d_params, by_head if scale.ndim else by_head.sum()]
        d_query = d_query * _by_head(scale)
    return d_params, d_query, d_key, d_value


def _summed(x: Array, like: Array) -> Array:
    """Sums gradients `[B, N, size]` of an operand over its axes of size 1."""
    if not like.size:
        return like
    axes = tuple(axis for axis in (0, 1) if like.shape[axis] == 1)
    return x.sum(axis=axes, keepdims=True).astype(like.dtype)


def functions(platform: str) -> AttentionVJP:
    """Returns the forward and backward functions, and forward without a normalizer.

    Each is one call of the kernel in `attention.cc`. Forward, few queries on many keys use the
    kernel in `decode.cc` instead.
    """
    alone = functools.partial(_forward, normalized=False)
    return AttentionVJP(_forward, _backward, forward_alone=alone)


KERNEL = Kernel(
    supports, functions, too_small, unavailable, compilation_failure, normalizers=normalizers
)
