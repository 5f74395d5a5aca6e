"""The masked scores of one head for a block of queries and keys.

`modify` applies scale, score functions and mask in this order, and gradients of score functions are
derivatives of `modify`. The reference calls it once for all pairs; kernels in JAX and Pallas call
it tile by tile. Some of these kernels multiply the queries by the scale beforehand (`spec.scaled`)
and pass `modify` a spec whose scale is 1. The kernel in C++ implements the same order in its own
code. This file also holds the two products before and after the softmax, and the mapping of a
one-head function over heads and batch.

A masked key has no influence, even if it or its value is NaN. Its weight 0 alone does not ensure
this, as 0 × NaN is NaN. So the sums over queries or keys use 0 in place of NaN and infinities
(`finite`). But NaN and infinities must still reach the queries that attend to them. If a key has
them, the score q · k passes them on, as it is computed without `finite`. If a value has them,
`finite` removes them from the weighted sum; so NaN is added to the scores of its key
(`nan_where_nonfinite`). The mask then replaces the scores of masked pairs, NaN or not, by −inf.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jattn._pytree import axis_names, number, split_letters
from jattn._types import Index, Scores, Size, accumulation
from jattn.masks import Span, span
from jattn.scores import in_order
from jattn.softmax import keep_rounding
from jattn.spec import Spec, has_mask, parameter_letters, parameters, scores_are_weights


def finite(x: Array) -> Array:
    """Returns x with 0 in place of NaN and infinities."""
    return jnp.where(jnp.isfinite(x), x, 0)


_MIN_MATMUL_SIZE = 16  # for smaller H, XLA may compile q kᵀ to elementwise operations


def dot_products(
    q: Float[Array, "t H"], k: Float[Array, "s H"], precision: Any = None
) -> Float[Array, "t s"]:
    """Computes q kᵀ, summed in float32 (float64 for float64).

    Each element depends on one query and one key, so NaN and infinities affect only pairs that
    contain them. Derivatives sum over all queries or keys, and so use 0 in place of NaN and
    infinities.
    """
    dtype = accumulation(q.dtype)

    @jax.custom_jvp
    def dot(q: Array, k: Array) -> Array:
        return jnp.einsum("th,sh->ts", q, k, precision=precision, preferred_element_type=dtype)

    @dot.defjvp
    def dot_jvp(primals: Any, tangents: Any) -> tuple[Array, Array]:
        (q, k), (dq, dk) = primals, tangents
        return dot(q, k), dot(dq, finite(k)) + dot(finite(q), dk)

    # If H is small, XLA may compute the products elementwise and fuse them with the subtraction of
    # the maximum that follows. The greatest product minus the rounded maximum would then not be 0.
    return keep_rounding(dot(q, k)) if q.shape[-1] < _MIN_MATMUL_SIZE else dot(q, k)


def pair_products(spec: Spec, q: Float[Array, "t H"], k: Float[Array, "s H"]) -> Scores:
    """Computes q kᵀ, or the scores that `spec.pair` defines instead, such as additive ones."""
    return dot_products(q, k, spec.precision) if spec.pair is None else spec.pair.products(q, k)


def weighted_values(
    weights: Float[Array, "t s"], v: Float[Array, "s V"], precision: Any = None
) -> Float[Array, "t V"]:
    """Computes weights · finite(v), in the dtype of the weights.

    Queries that attend to a NaN or an infinity of v get NaN through `nan_where_nonfinite`.
    """
    return jnp.einsum("ts,sv->tv", weights, finite(v).astype(weights.dtype), precision=precision)


def nan_where_nonfinite(v: Float[Array, "s V"]) -> Float[Array, " s"]:
    """Returns a term to add to the scores of each key: NaN if its value is not finite, else 0.

    The mask is applied later and replaces masked scores by −inf, so that only queries that attend
    to the key get NaN.
    """
    # v − v is NaN for NaN and infinities, else 0. Summing it is faster than reducing `isfinite`.
    return jax.lax.stop_gradient(jnp.sum((v - v).astype(accumulation(v.dtype)), axis=-1))


def add_nan_of_values(spec: Spec, v: Float[Array, "s V"], x: Array) -> Array:
    """Adds NaN to the results x of all queries if any value is not finite, for specs without mask.

    Without a mask, every query attends to that value. With a mask, returns x unchanged, because
    `scores` or the kernel has added NaN to the scores already.
    """
    return x if has_mask(spec) else x + jnp.sum(nan_where_nonfinite(v))


def modify(
    spec: Spec,
    products: Scores,
    b: Any,
    h: Any,
    rows: Span,
    columns: Span,
    masked: bool = True,
    select: bool = True,
) -> Scores:
    """Applies scale, score functions and mask to the products.

    Scores of masked pairs are −inf, or 0 if the scores are the weights (`scores_are_weights`).
    The arrays of the spec must be selected for (b, h) and sliced to rows and columns.
    `masked=False` leaves the mask out, for tiles that are known to be full. `select=False` adds the
    mask as a bias of 0 and −inf, which gives the same softmax if all scores are finite.
    """
    allowed = None
    if masked and has_mask(spec):
        allowed = spec.mask.evaluate(b, h, rows, columns)

    def zero_masked(score: Scores) -> Scores:
        # A score function's derivative at a masked score may be NaN, and 0 × NaN would reach the
        # gradients. So functions see masked scores as 0; the mask is applied at the end.
        return score if allowed is None or not select else jnp.where(allowed, score, 0)

    score, scale = products, number(spec.scale)
    if not isinstance(scale, float):
        score = keep_rounding(zero_masked(score) * jnp.asarray(scale, score.dtype))
    elif scale != 1:
        score = score * jnp.asarray(scale, score.dtype)
        is_power_of_two = abs(math.frexp(scale)[0]) == 0.5  # then the product is exact
        score = score if is_power_of_two else keep_rounding(score)
    for function in in_order(spec.score):
        score = keep_rounding(function.evaluate(zero_masked(score), b, h, rows, columns))
    if allowed is None:
        return score
    if not select:
        # XLA fuses products and softmax if an addition stands between them, but not if a `where`
        # does. The barrier separates the addition from the `where` that computes the bias.
        bias = jnp.where(allowed, 0, -jnp.inf).astype(score.dtype)
        return score + jax.lax.optimization_barrier(bias)
    return jnp.where(allowed, score, 0 if scores_are_weights(spec) else -jnp.inf)


def scores(
    spec: Spec,
    q: Float[Array, "t H"],
    k: Float[Array, "s H"],
    b: Any,
    h: Any,
    rows: Span,
    columns: Span,
    v: Float[Array, "s V"] | None = None,
) -> Scores:
    """Computes one head's masked scores `[t, s]` for queries at `rows` and keys at `columns`.

    If `v` is given, a key whose value is not finite has the score NaN for queries that attend to
    it.
    """
    score = pair_products(spec, q, k)
    if v is not None:
        score = score + nan_where_nonfinite(v)[None, :]
    return modify(spec, score, b, h, rows, columns)


class _MappableArrays:
    """The arrays of a spec, with the axis N of query heads split into K × G: K key heads, each with
    a group of G query heads. Without grouping, K is N and there is no axis G.

    Batch and head axes of size 1 are removed, as all batch rows or heads share such an array. So
    if an array has an axis B, K or G, that axis is mapped. Axes such as T and S stay.
    """

    def __init__(self, spec: Any, groups: tuple[int, ...]):
        names, self.treedef = jax.tree.flatten(axis_names(spec))
        self.arrays: list[Array] = []
        self.axis_names: list[tuple[str, ...]] = []
        for axes, leaf in zip(names, jax.tree.leaves(spec), strict=True):
            array, new_axes = self._split_heads(leaf, split_letters(axes), groups)
            self.arrays.append(array)
            self.axis_names.append(new_axes)

    @staticmethod
    def _split_heads(array: Any, axes: list[str], groups: tuple[int, ...]) -> Any:
        if "*B" in axes:
            if array.shape[0] == 1:
                array, axes = array[0], axes[1:]
            else:
                axes = ["B", *axes[1:]]
        if "N" in axes:
            axis = axes.index("N")
            if array.shape[axis] == 1:
                array, axes = jnp.squeeze(array, axis), [x for x in axes if x != "N"]
            else:
                array = array.reshape(*array.shape[:axis], *groups, *array.shape[axis + 1 :])
                axes = [*axes[:axis], *"KG"[: len(groups)], *axes[axis + 1 :]]
        return array, tuple(axes)

    def in_axes(self, name: str) -> list[int | None]:
        """Returns the arrays' `in_axes` for the vmap along B, K or G.

        The vmap along B is outermost, the one along G innermost: each sees the arrays without the
        axes that the outer vmaps already map.
        """
        outer = "BKG"[: "BKG".index(name)]
        visible_axes = [[x for x in axes if x not in outer] for axes in self.axis_names]
        return [axes.index(name) if name in axes else None for axes in visible_axes]


def map_in_sequence(function: Callable[..., Any], in_axes: Any) -> Callable[..., Any]:
    """Maps a function over leading axes like `jax.vmap`, but with one call after the other, so that
    it needs the memory of one call only. `in_axes` may contain 0 and None."""

    def mapped(*arguments: Any) -> Any:
        def map_with_axes(choose: Any, *trees: Any) -> Any:
            """Calls `choose(axis, *parts)` for each axis in `in_axes`; returns a tree."""
            return jax.tree.map(choose, in_axes, *trees, is_leaf=lambda x: x is None)

        def call_with_slices(slices: Any) -> Any:
            choose = lambda axis, whole, sliced: whole if axis is None else sliced  # noqa: E731
            return function(*map_with_axes(choose, arguments, slices))

        mapped_arguments = map_with_axes(lambda axis, x: None if axis is None else x, arguments)
        if all(x.shape[0] == 1 for x in jax.tree.leaves(mapped_arguments)):
            # A loop of one call saves no memory, and XLA might round its body differently.
            return jax.vmap(call_with_slices)(mapped_arguments)
        return jax.lax.map(call_with_slices, mapped_arguments)

    return mapped


def over_heads(
    one_head: Callable[..., Any],
    spec: Any,
    per_head: tuple[Array, ...],
    shared: tuple[Array, ...],
    out_axes: Any,
    over_batch: Callable[..., Any] = jax.vmap,
    first: Any = 0,
) -> Any:
    """Maps `one_head(spec, b, h, *per_head [T, ...], *shared [S, ...])` over batch and heads.

    The arrays in `per_head`, such as the queries, are `[B, T, N, ...]`; those in `shared`, such as
    keys and values, are `[B, S, K, ...]`. Each group of N / K query heads shares one key head,
    which is not copied. `out_axes` is the index of the axis N in the results, not counting B, as an
    integer or a tree of integers: with 1, results `[T, ...]` of one head become `[B, T, N, ...]`.
    `over_batch` maps the batch: `jax.vmap` or `map_in_sequence`. `first` is the index b of the
    first batch row, for calls with a part of the batch.
    """
    B, _, N = per_head[0].shape[:3]
    K = shared[0].shape[2] if shared else N
    group = () if N == K else (N // K,)
    spec_arrays = _MappableArrays(spec, (K, *group))

    def call(arrays: list[Any], b: Index, h: Index, *operands: Array) -> Any:
        return one_head(jax.tree.unflatten(spec_arrays.treedef, arrays), b, h, *operands)

    # The axis of heads is moved in front of the axis of tokens here, once: with the heads behind
    # tokens, XLA would copy the operands and the result of each product. If N = K, there is no axis
    # G: even of size 1, it would keep XLA from fusing products and softmax.
    grouped = [jnp.moveaxis(x, 2, 1) for x in per_head]
    grouped = [x.reshape(B, K, *group, *x.shape[2:]) for x in grouped]
    by_key_head = [jnp.moveaxis(x, 2, 1) for x in shared]
    all_axes = [0] * len(grouped + by_key_head)
    mapped = call
    if group:
        group_axes = [0] * len(grouped) + [None] * len(by_key_head)
        mapped = jax.vmap(mapped, (spec_arrays.in_axes("G"), None, 0, *group_axes))
    mapped = jax.vmap(mapped, (spec_arrays.in_axes("K"), None, 0, *all_axes))
    mapped = over_batch(mapped, (spec_arrays.in_axes("B"), 0, None, *all_axes))
    heads = jnp.arange(N, dtype=jnp.int32).reshape(K, *group)
    batch_rows = first + jnp.arange(B, dtype=jnp.int32)
    results = mapped(spec_arrays.arrays, batch_rows, heads, *grouped, *by_key_head)

    def merge_heads(axis: int, result: Array) -> Array:
        result = result.reshape(B, N, *result.shape[2 + len(group) :])
        return jnp.moveaxis(result, 1, 1 + axis)

    if isinstance(out_axes, int):
        return jax.tree.map(functools.partial(merge_heads, out_axes), results)
    return jax.tree.map(merge_heads, out_axes, results)


def sum_shared_gradients(
    spec: Spec, K: int, d_query: Array, d_key: Array, d_value: Array, d_params: list[Array]
) -> tuple[list[Array], Array, Array, Array]:
    """Sums the gradients of parameters, keys and values over the query heads that share them.

    `d_key` and `d_value` are `[B, S, N, ...]` and become `[B, S, K, ...]`; the gradients of
    parameters are `[B, N, ...]`. Returns all in the order parameters, query, key, value.
    """

    def sum_group(x: Array) -> Array:
        return x.reshape(*x.shape[:2], K, x.shape[2] // K, -1).sum(axis=3)

    summed = [
        sum_heads(*arguments)
        for arguments in zip(d_params, parameters(spec), parameter_letters(spec), strict=True)
    ]
    return summed, d_query, sum_group(d_key), sum_group(d_value)


def sum_heads(gradient: Array, parameter: Array, axes: str) -> Array:
    """Sums the gradient `[B, N, ...]` of a parameter over the batch rows and heads that share it.

    `axes` names the axes of the parameter. The result has the parameter's shape.
    """
    names = split_letters(axes)
    if "N" not in names or parameter.shape[names.index("N")] == 1:
        gradient = gradient.sum(axis=1)
    elif names.index("N") > 1 or "*B" not in names:
        gradient = jnp.moveaxis(gradient, 1, 1 + [x for x in names if x != "*B"].index("N"))
    if "*B" not in names or parameter.shape[0] == 1:
        gradient = gradient.sum(axis=0)
    return gradient.reshape(parameter.shape)


def spans(spec: Spec, T: Size, S: Size) -> tuple[Span, Span]:
    """Returns the spans of all T queries and all S keys, with the spec's positions."""
    return span(T, spec.q_positions), span(S, spec.kv_positions)
