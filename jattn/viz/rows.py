"""Attention weights of selected queries and heads, where the full matrix would be too large."""

from collections.abc import Sequence
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jattn import softmax, tile
from jattn._advised import advised
from jattn._pytree import axis_names, axis_of, select_head
from jattn._types import AnyArray, Keys, LogSumExp, Queries
from jattn.call import Call, compiled, make
from jattn.checks import check_array, check_size, shown
from jattn.functions.integers import is_integer, known_range
from jattn.kernels.xla.normalized import masked_weights
from jattn.masks import Span
from jattn.options import StatisticsOptions
from jattn.spec import Spec


__all__ = ["weights_at"]


Places = int | Sequence[int] | Int[AnyArray, "_"]


@advised(StatisticsOptions)
def weights_at(
    query: Queries,
    key: Keys,
    lse: LogSumExp | None = None,
    *,
    rows: Places,
    heads: Places | None = None,
    **options: Unpack[StatisticsOptions],
) -> Float[Array, "*B n t S"]:
    """Computes the attention weights of selected queries and heads from queries, keys and lse.

    Memory and work grow with the n × t × S weights returned and never with T × S, unless the mask
    or the score function holds an array of that size.

    Args:
        query: `[*B, T, N, H]`, as passed to `attention`.
        key: `[*B, S, K, H]`.
        lse: `[*B, N, T]` as returned by `attention`. It may include a sink or more keys than
            `key`: the weights are then shares of that larger total. Weights have a relative
            rounding error of about |lse| × 1e-7. None: each row is divided by its own sum, which
            is accurate for any logits. Normalizers other than the softmax have no lse.
        rows: indices of t queries, an integer or several.
        heads: indices of n query heads; None: all.
        options: as in `attention`.

    Returns:
        `[*B, n, t, S]` in float32 (float64 for float64 inputs), before any dropout. A query whose
        keys are all masked has weights 0.

    Raises:
        TypeError, ValueError: for invalid arguments, before compilation.

    >>> out, lse = jattn.attention(q, k, v, return_lse=True)
    >>> jattn.viz.weights_at(q, k, lse, rows=[0, 4], heads=[3]).shape
    (2, 1, 2, 7)
    """
    call = make(query, key, **options).sink_as_normalizer()
    shapes = call.shapes
    if lse is not None:
        if (normalizer := call.spec.normalizer) is not None:
            name = type(normalizer).__name__
            raise ValueError(f"lse: expected None with the normalizer {name}, got an array")
        lse_shape = (*shapes.batch, shapes.N, shapes.T)
        check_array("lse", lse, "[*B, N, T]", shape=lse_shape)
    return _weights(
        call,
        query,
        key,
        lse,
        _places("rows", rows, shapes.T, "T"),
        _places("heads", np.arange(shapes.N) if heads is None else heads, shapes.N, "N"),
    )


@compiled()
def _weights(
    call: Call, query: Array, key: Array, lse: Array | None, rows: Array, heads: Array
) -> Array:
    query, key = call.flattened(query, key)
    shapes = call.shapes
    scores = _scores(call, query, key, rows, heads)
    if call.spec.normalizer is not None:
        return call.unflattened(scores)
    flat = scores.reshape(shapes.B * len(heads) * len(rows), shapes.S)
    if lse is None:
        weights, _ = softmax.finish(softmax.contribution(flat, lambda unnormalized: unnormalized))
    else:
        row_lse = lse.reshape(shapes.B, shapes.N, shapes.T)[:, heads][:, :, rows].reshape(len(flat))
        finite_lse = jnp.where(row_lse == -jnp.inf, 0, row_lse).astype(flat.dtype)
        weights = softmax.weights(flat, finite_lse, jnp.zeros_like(finite_lse))
    return call.unflattened(weights.reshape(scores.shape))


def _scores(call: Call, query: Array, key: Array, rows: Array, heads: Array) -> Array:
    """Computes the masked scores `[B, n, t, S]`; with a normalizer the weights."""
    spec, shapes = _with_rows(call.prepared().spec, rows), call.shapes
    columns = jnp.arange(shapes.S, dtype=jnp.int32)

    def head_scores(b: Array, h: Array, q: Array, k: Array) -> Array:
        head_spec = select_head(spec, b, h)
        q_span, kv_span = (
            Span(places if positions is None else positions, places)
            for positions, places in (
                (head_spec.q_positions, rows),
                (head_spec.kv_positions, columns),
            )
        )
        masked = tile.scores(head_spec, q, k, b, h, q_span, kv_span)
        if head_spec.normalizer is None:
            return masked
        return masked_weights(head_spec, masked, b, h, q_span, kv_span)[0]

    q = jnp.moveaxis(query[:, rows][:, :, heads], 2, 1)
    k = jnp.moveaxis(key[:, :, heads // shapes.G], 2, 1)
    all_scores = jax.vmap(jax.vmap(head_scores, (None, 0, 0, 0)), (0, None, 0, 0))
    return all_scores(jnp.arange(shapes.B, dtype=jnp.int32), heads, q, k)


def _with_rows(spec: Spec, rows: Array) -> Spec:
    """Returns the spec with its arrays along T indexed by `rows`."""

    def select_rows(letters: str, leaf: Any) -> Any:
        axis = axis_of("T", letters, leaf.ndim)
        broadcast = axis is not None and leaf.shape[axis] == 1 and "#T" in letters
        return leaf if axis is None or broadcast else jnp.take(leaf, rows, axis=axis)

    return jax.tree.map(select_rows, axis_names(spec), spec)


def _places(name: str, value: Any, size: int, letter: str) -> Array:
    """Returns indices as int32 `[n]`, after checking that each is in [0, size)."""
    value = [value] if is_integer(value) else value
    if isinstance(value, range | list | tuple):
        if not value or not all(is_integer(x) for x in value):
            raise TypeError(f"{name}: expected an integer or several, got {shown(value)}")
        value = np.asarray(value)
    check_array(name, value, "[n]", "integer")
    if len(value.shape) != 1:
        raise ValueError(f"{name}: expected an integer or [n], got {list(value.shape)}")
    check_size(f"{name}: count", value.shape[0])
    least, most = known_range(value) or (0, 0)
    if not 0 <= least <= most < size:
        wrong = least if least < 0 else most
        raise ValueError(f"{name}: expected 0 <= place < {letter} = {size}, got {wrong}")
    return jnp.asarray(value, jnp.int32)
