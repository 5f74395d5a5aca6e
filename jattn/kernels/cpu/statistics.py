"""Statistics of weights on CPUs by the kernel in C++: its scores and masks, followed by sums over
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
from jattn.kernels.protocol import QueryStatistics, StatisticsRequest, WeightSums, softmax_only
from jattn.softmax import Normalizer
from jattn.spec import Shapes, Spec


def unsupported(question: StatisticsRequest, shapes: Shapes) -> str | None:
    """Returns why the kernel cannot answer a question here, or is not faster; None if it can."""
    if 0 in (shapes.B, shapes.T, shapes.S):
        return "there are no pairs of queries and keys"
    for spec in filter(None, (question.spec, _on_keys(question))):
        call = Call(spec, shapes)
        if reason := softmax_only(call) or native.supports(call) or native.too_small(call):
            return reason
    return native.unavailable(shapes, False)


def statistics(
    question: StatisticsRequest, query: Queries, key: Keys
) -> tuple[QueryStatistics, Float[Array, "B N S"]]:
    """Computes the statistics of each query, `[B, N, T]`, and the weight `[B, N, S]` that each key
    receives; raises `CompilationFailed` if the rule of the call cannot be compiled."""
    (B, T, N, _), S = query.shape, key.shape[1]
    spec, query = native.static_scale(question.spec, query)
    operands = native.operands_of(spec, query, key, key[..., :0])
    marks, least = _marks(question, operands.dtype), question.threshold
    rows = jax.ShapeDtypeStruct((B, T, N), operands.dtype)
    no_rows = jax.ShapeDtypeStruct((0, T, N), operands.dtype)
    places = jax.ShapeDtypeStruct((B, T, N), jnp.int32)
    received = jax.ShapeDtypeStruct((B, N, S), operands.dtype)
    on_keys, above = rows if marks.size else no_rows, no_rows if least is None else rows
    like = [rows, rows, places, rows, on_keys, above, received]
    positions = (_positions(x) for x in (spec.q_positions, spec.kv_positions))
    normalizer = _normalizer(operands)
    arrays = *normalizer, *positions, marks
    least = -1.0 if least is None else float(least)
    *columns, received = native.call("statistics", like, operands, *arrays, least=least)
    answers = (jnp.swapaxes(x, 1, 2) if x.shape[0] else None for x in columns)
    result = QueryStatistics(*answers)
    if other := _on_keys(question):
        result = result._replace(on_keys=_share(other, query, key, normalizer))
    return result, received


def _positions(positions: Array | None) -> Array:
    """Returns positions as `[B or 1, 1, T or S]`; of size 0 if they are places."""
    if positions is None:
        return jnp.zeros((1, 1, 0), jnp.int32)
    return jnp.atleast_2d(positions.astype(jnp.int32))[:, None, :]


def _marks(question: StatisticsRequest, dtype: DTypeLike) -> Array:
    """Returns 1 for the question's keys, `[B or 1, 1, S]`; of size 0 if they depend on the query,
    or the question has none."""
    if question.keys is None or not isinstance(question.keys.mask, masks.Padding):
        return jnp.zeros((1, 1, 0), dtype)
    return jnp.atleast_2d(question.keys.mask.attention_mask).astype(dtype)[:, None, :]


def _on_keys(question: StatisticsRequest) -> Spec | None:
    """Returns attention to the question's keys alone, if they depend on the query."""
    if question.keys is None or isinstance(question.keys.mask, masks.Padding):
        return None
    return dataclasses.replace(question.spec, mask=question.spec.mask & question.keys.mask)


def _normalizer(operands: native.KernelOperands) -> Normalizer:
    """Computes the normalizer of each row, `[B, T, N]`, by the same kernel."""
    return Normalizer(*native.forward(operands, normalized=True)[1:])


def _share(spec: Spec, query: Array, key: Array, whole: Normalizer) -> Array:
    """Returns the part `[B, N, T]` of each row's weights that a spec leaves."""
    spec, query = native.static_scale(spec, query)
    part = _normalizer(native.operands_of(spec, query, key, key[..., :0]))
    log = (part.maximum - whole.maximum) + (part.log_total - whole.log_total)
    return jnp.swapaxes(jnp.where(part.maximum == -jnp.inf, 0, jnp.exp(log)), 1, 2)


SUMS = WeightSums(unsupported, statistics)
