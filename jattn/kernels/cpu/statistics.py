"""What weights look like, on CPUs by the kernel in C++: its scores and its masks, with sums over
rows and columns of weights in place of the product with values."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jattn import masks
from jattn._types import Keys, Queries
from jattn.call import Call
from jattn.kernels.cpu import native
from jattn.kernels.protocol import QueryStatistics, StatisticsRequest, WeightSums
from jattn.softmax import Normalizer
from jattn.spec import Shapes, Spec


def unsupported(asked: StatisticsRequest, shapes: Shapes) -> str | None:
    """Why the kernel cannot answer here, or does not pay; None if it can."""
    if 0 in (shapes.B, shapes.T, shapes.S):
        return "there are no pairs of queries and keys"
    for spec in (asked.spec, _on_keys(asked)):
        if spec is None:
            continue
        call = Call(spec, shapes)
        if reason := native.supports(call) or native.too_small(call):
            return reason
    return native.unavailable(shapes, False)


def statistics(
    asked: StatisticsRequest, query: Queries, key: Keys
) -> tuple[QueryStatistics, Float[Array, "B N S"]]:
    """Returns the statistics `[B, N, T]` of each query and the weight `[B, N, S]` of each key.

    Raises CompilationFailed if the code for the call cannot be compiled.
    """
    (B, T, N, _), S = query.shape, key.shape[1]
    spec, query = native.static_scale(asked.spec, query)
    operands = native.operands_of(spec, query, key, _no_values(key))
    marks, least = _marks(asked, operands.dtype), asked.threshold
    rows = jax.ShapeDtypeStruct((B, T, N), operands.dtype)
    nobody = jax.ShapeDtypeStruct((0, T, N), operands.dtype)
    like = [
        rows,
        rows,
        jax.ShapeDtypeStruct((B, T, N), jnp.int32),
        rows,
        rows if marks.size else nobody,
        nobody if least is None else rows,
        jax.ShapeDtypeStruct((B, N, S), operands.dtype),
    ]
    positions = (_positions(x) for x in (spec.q_positions, spec.kv_positions))
    normalizer = _normalizer(operands)
    arrays = *normalizer, *positions, marks
    changed = {} if least is None else {"least": float(least)}
    *found, received = native.call("statistics", like, operands, *arrays, **changed)
    found = QueryStatistics(*(jnp.swapaxes(x, 1, 2) if x.shape[0] else None for x in found))
    if other := _on_keys(asked):
        found = found._replace(on_keys=_share(other, query, key, normalizer))
    return found, received


def _no_values(key: Array) -> Array:
    return jnp.zeros((*key.shape[:-1], 0), key.dtype)


def _positions(given: Array | None) -> Array:
    """`[B or 1, 1, T or S]`; of size 0 where they are places."""
    if given is None:
        return jnp.zeros((1, 1, 0), jnp.int32)
    return jnp.atleast_2d(given.astype(jnp.int32))[:, None, :]


def _marks(asked: StatisticsRequest, dtype: DTypeLike) -> Array:
    """1 for the keys asked for, `[B or 1, 1, S]`; of size 0 if they are not the same for all
    queries, or nobody asks."""
    if asked.keys is None or not isinstance(asked.keys.mask, masks.Padding):
        return jnp.zeros((1, 1, 0), dtype)
    return jnp.atleast_2d(asked.keys.mask.attention_mask).astype(dtype)[:, None, :]


def _on_keys(asked: StatisticsRequest) -> Spec | None:
    """Attention to nothing but the pairs asked for, where each query has its own."""
    if asked.keys is None or isinstance(asked.keys.mask, masks.Padding):
        return None
    return dataclasses.replace(asked.spec, mask=asked.spec.mask & asked.keys.mask)


def _normalizer(operands: native.Operands) -> Normalizer:
    """The normalizer of each row, `[B, T, N]`, by the same kernel."""
    B, T, N, _ = operands.arrays.query.shape
    rows = jax.ShapeDtypeStruct((B, T, N), operands.dtype)
    like = [jax.ShapeDtypeStruct((B, T, N, 0), operands.dtype), rows, rows]
    return Normalizer(*native.call("forward", like, operands)[1:])


def _share(spec: Spec, query: Array, key: Array, whole: Normalizer) -> Array:
    """The part `[B, N, T]` of each row's weights that a spec leaves."""
    spec, query = native.static_scale(spec, query)
    part = _normalizer(native.operands_of(spec, query, key, _no_values(key)))
    log = (part.maximum - whole.maximum) + (part.log_total - whole.log_total)
    return jnp.swapaxes(jnp.where(part.maximum == -jnp.inf, 0, jnp.exp(log)), 1, 2)


SUMS = WeightSums(unsupported, statistics)
