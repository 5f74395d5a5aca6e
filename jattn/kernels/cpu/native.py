"""Attention on CPUs by a kernel in C++, `src/attention.cc`, called from XLA.

XLA's products on CPUs are fast for large matrices and far from it for those of attention, and it
does not keep the scores of a tile in the caches between the products and the softmax. The kernel
does, for the masks that leave each query one run of keys and the score functions that
`rules` knows; blockwise takes the rest. Beside the results it needs a few tiles for each
thread, about a megabyte with heads of 64.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jattn import tile
from jattn._pytree import flatten_batch, is_static, number
from jattn._types import accumulation
from jattn.kernels.common import lowering
from jattn.kernels.common.vjp import AttentionVJP, PerQuery
from jattn.kernels.cpu import decode, library, rules
from jattn.kernels.cpu.rules import QueryBlock, Runs
from jattn.softmax import Normalizer
from jattn.spec import Shapes, Spec, parameters, with_parameters


def supports(spec: Spec, shapes: Shapes) -> str | None:
    """Masks that are runs of keys, by place or by position of the queries, and a few scores."""
    if spec.kv_positions is not None:
        return "positions of keys are given, it knows those of queries only"
    try:
        jax.eval_shape(lambda spec: _runs(flatten_batch(spec, shapes.batch), shapes), spec)
        terms = rules.as_terms(spec.score)
    except NotImplementedError as reason:
        return str(reason)
    if terms.by_distance and spec.q_positions is not None:
        return "positions are given, it counts distances from 0"
    return None


def unavailable(shapes: Shapes, wait: bool) -> str | None:
    """Why it cannot run on this machine, or in a program for any."""
    if lowering.exported():
        return "an exported program may run where its library is not"
    return library.unavailable("forward", accumulation(shapes.dtype), wait=wait)


def _runs(spec: Spec, shapes: Shapes) -> Runs:
    positions = jnp.arange(shapes.T) if spec.q_positions is None else spec.q_positions
    place = QueryBlock(jnp.atleast_2d(positions.astype(jnp.int32)), shapes.S)
    return rules.as_runs(spec.mask, place)


def _distances(shapes: Shapes) -> Array:
    """kv − q along the diagonals in the kernel's order, and at least as many more as its vectors
    have lanes, which nobody looks at."""
    size = (shapes.T + shapes.S) // 64 * 64 + 128
    return shapes.S - 1 - jnp.arange(size, dtype=jnp.int32)


def _diagonals(spec: Spec, shapes: Shapes, dtype: Any) -> Array:
    """What is added to scores, `[1, N, d]`; of size 0 if nothing."""
    if not rules.as_terms(spec.score).by_distance:
        return jnp.zeros((1, 1, 0), dtype)
    distances = _distances(shapes)
    return rules.along_diagonals(spec.score, shapes.N, distances, dtype)[None]


def _operands(spec: Spec, query: Array, key: Array, value: Array) -> tuple[list[Array], dict]:
    """What both functions of the kernel take, and its numbers."""
    shapes, dtype = Shapes.of(query, value), accumulation(query.dtype)
    nothing = jnp.zeros((1, 1, 0), jnp.int32)
    runs = _runs(spec, shapes)
    ends = (jnp.clip(jnp.atleast_2d(jnp.asarray(x, jnp.int32)), 0, shapes.S) for x in runs[:2])
    ends = (jnp.broadcast_to(x, (len(x), shapes.T))[:, None, :] for x in ends)
    ids = (x[:, None, :] for x in runs.ids) if runs.ids else (nothing, nothing)
    seeds, threshold = jnp.zeros((1, 1, 0), jnp.uint32), 0
    if spec.dropout_rate:
        threshold = tile.threshold(spec.dropout_rate)
        each = jax.vmap(lambda b, h: tile.seed(spec.dropout_key, b, h), (None, 0))
        every = jax.vmap(each, (0, None))
        seeds = every(jnp.arange(shapes.B), jnp.arange(shapes.N))[..., None]
    wide = (x.astype(dtype) for x in (query, key, value))
    attributes = {
        "scale": float(number(spec.scale)),
        "cap": rules.as_terms(spec.score).cap,
        "grown": 1 / (1 - spec.dropout_rate),
        "threshold": np.int64(threshold),
    }
    return [*wide, *ends, *ids, _diagonals(spec, shapes, dtype), seeds], attributes


def _call(which: str, results: Any, operands: list[Array], attributes: dict[str, Any]) -> Any:
    name = library.target(which, operands[0].dtype)
    run = jax.ffi.ffi_call(name, results, vmap_method="broadcast_all")
    return run(*operands, **attributes)


def _static_scale(spec: Spec, query: Array) -> tuple[Spec, Array]:
    """A call whose scale is a number, as the kernel takes it: an array is multiplied with the
    queries, in the dtype of sums."""
    wide = query.astype(accumulation(query.dtype))
    if is_static(spec.scale):
        return spec, wide
    return dataclasses.replace(spec, scale=1.0), wide * spec.scale


def _forward(
    spec: Spec, query: Array, key: Array, value: Array, *, normalized: bool = True
) -> tuple[Array, Normalizer, Array]:
    """Both results; without `normalized` the normalizer is zeros, which cost nothing."""
    own, wide = _static_scale(spec, query)
    if decode.pays(own, Shapes.of(query, value)):
        out, normalizer = decode.attend(own, wide, decode.as_held(key, value))
        return out, normalizer, jnp.zeros((), bool)
    operands, attributes = _operands(own, wide, key, value)
    (B, T, N), dtype = query.shape[:3], operands[0].dtype
    rows = (B, T, N) if normalized else (0, T, N)
    like = [jax.ShapeDtypeStruct(x, dtype) for x in ((B, T, N, value.shape[-1]), rows, rows)]
    out, *normalizer = _call("forward", like, operands, attributes)
    if not normalized:
        normalizer = [jnp.zeros((B, T, N), dtype)] * 2
    return out, Normalizer(*normalizer), jnp.zeros((), bool)


def _backward(spec: Spec, per_query: PerQuery, key: Array, value: Array, _: Array) -> Any:
    given, scale = per_query.query, spec.scale
    spec, query = _static_scale(spec, given)
    shapes = Shapes.of(query, value)
    operands, attributes = _operands(spec, query, key, value)
    dtype, diagonals = operands[0].dtype, operands[7]
    sums = (shapes.B, shapes.N, diagonals.shape[-1])
    like = [jax.ShapeDtypeStruct(x, dtype) for x in (query.shape, key.shape, value.shape, sums)]
    d_query, *found, d_diagonals = _call("backward", like, [*operands, *per_query[1:]], attributes)

    def again(params: list[Array]) -> Array:
        return _diagonals(with_parameters(spec, params), shapes, dtype)

    _, pull = jax.vjp(again, parameters(spec))
    total = d_diagonals.sum(axis=0, keepdims=True) if diagonals.size else diagonals
    (d_params,) = pull(total)
    if not is_static(scale):
        d_params = [*d_params, jnp.sum(d_query * tile.finite(given.astype(dtype)))]
        d_query = d_query * scale
    return d_params, d_query, *found


def functions(platform: str) -> AttentionVJP:
    """Forward and backward, each one call."""
    alone = functools.partial(_forward, normalized=False)
    return AttentionVJP(_forward, _backward, forward_alone=alone)
