"""The masked scores of one head for a block of queries and keys: what a score means.

`modify` applies scale, score functions and mask in this order, for every kernel in JAX. The
reference calls it once for all pairs, other implementations tile by tile; gradients of score
functions are derivatives of this same function. Two exceptions: some kernels multiply the queries
by the scale beforehand (`spec.scaled`, `native.static_scale`) and pass `modify` a spec whose scale
is 1, and the kernel in C++ implements the same order in its own code. This file also holds the two
products around the softmax, and the mapping of a one-head function over heads and batch.

What is masked does not exist. In sums over rows of q, k or v a masked row has weight 0, but 0 × NaN
is NaN; so the products replace non-finite rows by 0 wherever such a sum runs, and a query that does
attend to one becomes NaN through its scores, which the mask selects.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jattn._pytree import axis_names, number, split_letters
from jattn._types import Scores, Size, accumulation
from jattn.masks import Span, span
from jattn.scores import in_order
from jattn.softmax import rounded
from jattn.spec import Spec, has_mask, parameter_letters, parameters


def finite(x: Array) -> Array:
    """Returns x with 0 in place of NaN and infinities."""
    return jnp.where(jnp.isfinite(x), x, 0)


_FEW = 16  # channels; tiles of matrix products have at least this number


def product(
    q: Float[Array, "t H"], k: Float[Array, "s H"], precision: Any = None
) -> Float[Array, "t s"]:
    """Computes q kᵀ, summed in float32 (float64 for float64).

    An element of the result depends on one query and one key only, so non-finite inputs may stay;
    derivatives sum over queries or keys and replace non-finite inputs by 0.
    """
    dtype = accumulation(q.dtype)

    @jax.custom_jvp
    def dot(q: Array, k: Array) -> Array:
        return jnp.einsum("th,sh->ts", q, k, precision=precision, preferred_element_type=dtype)

    @dot.defjvp
    def dot_jvp(primals: Any, tangents: Any) -> tuple[Array, Array]:
        (q, k), (dq, dk) = primals, tangents
        return dot(q, k), dot(dq, finite(k)) + dot(finite(q), dk)

    # XLA computes products of few channels by multiplications, which it may fuse with a difference.
    return rounded(dot(q, k)) if q.shape[-1] < _FEW else dot(q, k)


def products(spec: Spec, q: Float[Array, "t H"], k: Float[Array, "s H"]) -> Float[Array, "t s"]:
    """Computes q kᵀ, or the products of the spec's pair score."""
    return product(q, k, spec.precision) if spec.pair is None else spec.pair.products(q, k)


def weigh(
    weights: Float[Array, "t s"], v: Float[Array, "s V"], precision: Any = None
) -> Float[Array, "t V"]:
    """Computes weights · v over the finite rows of v, summed in float32 (float64 for float64).

    NaN and infinities of v reach the queries that attend to them through `nan_where_nonfinite`.
    """
    return jnp.einsum("ts,sv->tv", weights, finite(v).astype(weights.dtype), precision=precision)


def nan_where_nonfinite(v: Float[Array, "s V"]) -> Float[Array, " s"]:
    """Returns the term to add to the scores of each key: NaN if its value is not finite, else 0.

    The mask then selects masked scores away, so that NaN stays only in the rows of queries that
    attend to the key.
    """
    # x − x is NaN for NaN and infinities: one plain sum, where a reduction of booleans is slow.
    return jax.lax.stop_gradient(jnp.sum((v - v).astype(accumulation(v.dtype)), axis=-1))


def reach_all(spec: Spec, v: Float[Array, "s V"], x: Array) -> Array:
    """Returns x, or NaN if the spec has no mask and a value is not finite."""
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
    """Applies scale → score functions → mask; −inf where masked.

    The arrays of the spec must be selected for (b, h) and sliced to rows and columns.
    `masked=False` leaves the mask out, for tiles that are known to be full. `select=False` adds the
    mask as a bias, which gives the same result if all scores are finite.
    """
    allowed = None
    if masked and has_mask(spec):
        allowed = spec.mask.evaluate(b, h, rows, columns)

    def selected(score: Scores) -> Scores:
        # Selected before as well as after: the derivative of a score function, or of a scale, at
        # the score of a masked key may be NaN, and 0 × NaN would reach the gradients.
        return score if allowed is None or not select else jnp.where(allowed, score, 0)

    score, scale = products, number(spec.scale)
    if not isinstance(scale, float):
        score = rounded(selected(score) * jnp.asarray(scale, score.dtype))
    elif scale != 1:
        score = score * jnp.asarray(scale, score.dtype)
        score = (
            score if abs(math.frexp(scale)[0]) == 0.5 else rounded(score)
        )  # powers of 2 are exact
    for function in in_order(spec.score):
        score = rounded(function.evaluate(selected(score), b, h, rows, columns))
    if allowed is None:
        return score
    if not select:
        # XLA fuses the sum of two arrays with products and softmax, but not a selection.
        bias = jnp.where(allowed, 0, -jnp.inf).astype(score.dtype)
        return score + jax.lax.optimization_barrier(bias)
    return jnp.where(allowed, score, -jnp.inf)


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

    If values are given, the scores of keys whose value is not finite are NaN.
    """
    score = products(spec, q, k)
    if v is not None:
        score = score + nan_where_nonfinite(v)[None, :]
    return modify(spec, score, b, h, rows, columns)


class _Leaves:
    """The arrays of a spec, with the letters of the axes that each still has."""

    def __init__(self, spec: Any, groups: tuple[int, ...]):
        letters, self.treedef = jax.tree.flatten(axis_names(spec))
        self.arrays: list[Array] = []
        self.letters: list[tuple[str, ...]] = []
        for name, leaf in zip(letters, jax.tree.leaves(spec), strict=True):
            array, axes = self._prepare(leaf, split_letters(name), groups)
            self.arrays.append(array)
            self.letters.append(axes)

    @staticmethod
    def _prepare(array: Any, named: list[str], groups: tuple[int, ...]) -> Any:
        if "*B" in named:
            if array.shape[0] == 1:
                array, named = array[0], named[1:]
            else:
                named = ["B", *named[1:]]
        if "N" in named:
            axis = named.index("N")
            if array.shape[axis] == 1:
                array, named = jnp.squeeze(array, axis), [x for x in named if x != "N"]
            else:
                array = array.reshape(*array.shape[:axis], *groups, *array.shape[axis + 1 :])
                named = [*named[:axis], *"KG"[: len(groups)], *named[axis + 1 :]]
        return array, tuple(named)

    def axes(self, letter: str) -> list[int | None]:
        """Returns the axis of each array along `letter`, after earlier letters are mapped away."""
        outer = "BKG"[: "BKG".index(letter)]
        left = [[x for x in letters if x not in outer] for letters in self.letters]
        return [x.index(letter) if letter in x else None for x in left]


def in_turn(function: Callable[..., Any], in_axes: Any) -> Callable[..., Any]:
    """Maps a function along leading axes sequentially, in the memory of one call."""

    def mapped(*arguments: Any) -> Any:
        def by_axis(pick: Any, *trees: Any) -> Any:
            return jax.tree.map(pick, in_axes, *trees, is_leaf=lambda x: x is None)

        def of_part(part: Any) -> Any:
            return function(*by_axis(lambda a, x, y: x if a is None else y, arguments, part))

        parts = by_axis(lambda a, x: None if a is None else x, arguments)
        if all(x.shape[0] == 1 for x in jax.tree.leaves(parts)):
            # A loop saves nothing for one part, and XLA might round its body differently.
            return jax.vmap(of_part)(parts)
        return jax.lax.map(of_part, parts)

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
    """Maps `one_head(spec, b, h, *per_head [T, ·], *shared [S, ·])` over batch, heads and groups.

    Arrays `per_head` are `[B, T, N, ...]`, arrays `shared` `[B, S, K, ...]`; all query heads of a
    group read the same key head, which is never repeated. `out_axes` is the head axis of one head's
    results, one for all or a tree: results have shape `[B, ...]` with N at that axis. `over_batch`
    maps the batch: `jax.vmap` or `in_turn`. `first` is the number of the first batch row.
    """
    B, _, N = per_head[0].shape[:3]
    K = shared[0].shape[2] if shared else N
    group = () if N == K else (N // K,)
    leaves = _Leaves(spec, (K, *group))

    def call(arrays: list[Any], b: Any, h: Any, *operands: Array) -> Any:
        return one_head(jax.tree.unflatten(leaves.treedef, arrays), b, h, *operands)

    # Heads are moved before tokens once, in advance: with the heads in the middle, XLA would copy
    # operands and result of each product. An axis of one group is not mapped, because it would
    # stand between products and softmax and keep XLA from fusing them.
    grouped = [jnp.moveaxis(x, 2, 1) for x in per_head]
    grouped = [x.reshape(B, K, *group, *x.shape[2:]) for x in grouped]
    keys = [jnp.moveaxis(x, 2, 1) for x in shared]
    head_axes, all_axes = [0] * len(grouped), [0] * len(grouped + keys)
    mapped = call
    if group:
        mapped = jax.vmap(mapped, (leaves.axes("G"), None, 0, *head_axes, *[None] * len(keys)))
    mapped = jax.vmap(mapped, (leaves.axes("K"), None, 0, *all_axes))
    mapped = over_batch(mapped, (leaves.axes("B"), 0, None, *all_axes))
    heads = jnp.arange(N, dtype=jnp.int32).reshape(K, *group)
    rows = first + jnp.arange(B, dtype=jnp.int32)
    results = mapped(leaves.arrays, rows, heads, *grouped, *keys)

    def join(axis: int, result: Array) -> Array:
        result = result.reshape(B, N, *result.shape[2 + len(group) :])
        return jnp.moveaxis(result, 1, 1 + axis)

    if isinstance(out_axes, int):
        return jax.tree.map(functools.partial(join, out_axes), results)
    return jax.tree.map(join, out_axes, results)


def gather_gradients(
    spec: Spec, K: int, d_query: Array, d_key: Array, d_value: Array, d_params: list[Array]
) -> tuple[list[Array], Array, Array, Array]:
    """Sums the gradients of each query head to those of parameters, query, key and value.

    `d_key` and `d_value` are `[B, S, N, ...]`, the gradients of parameters `[B, N, ...]`.
    """

    def over_group(x: Array) -> Array:
        return x.reshape(*x.shape[:2], K, x.shape[2] // K, -1).sum(axis=3)

    summed = [
        sum_heads(*parts)
        for parts in zip(d_params, parameters(spec), parameter_letters(spec), strict=True)
    ]
    return summed, d_query, over_group(d_key), over_group(d_value)


def sum_heads(parts: Array, leaf: Array, letters: str) -> Array:
    """Sums gradients `[B, N, ...]` of a parameter to the parameter's own shape."""
    named = split_letters(letters)
    if "N" not in named or leaf.shape[named.index("N")] == 1:
        parts = parts.sum(axis=1)
    elif named.index("N") > 1 or "*B" not in named:
        parts = jnp.moveaxis(parts, 1, 1 + [x for x in named if x != "*B"].index("N"))
    if "*B" not in named or leaf.shape[0] == 1:
        parts = parts.sum(axis=0)
    return parts.reshape(leaf.shape)


def spans(spec: Spec, T: Size, S: Size) -> tuple[Span, Span]:
    """Returns all queries and all keys of one head, at the spec's positions."""
    return span(T, spec.q_positions), span(S, spec.kv_positions)
