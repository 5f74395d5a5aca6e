"""Attention of short sequences: all heads at once, each as one tile, differentiated by formula.

If a mask selects scores one by one, XLA cannot fuse the products with the softmax between them. So
without a score function the mask is first *added*, as 0 or −inf, which is the same unless something
masked is not finite or overflows, and then every row that it reaches is NaN. Only in that case is
everything computed again: with such queries and keys set to 0, for the rows that do not attend to
them, and with selection for the others. With jax 0.12 the two ways differ by rounding: XLA compiles
them separately, and to compile them alike would take up to twice the time.

Batch rows are computed in groups that fit into the caches. Weights that are no larger than the
queries are kept for the backward pass; others are computed again.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from jattn import softmax, tile
from jattn._types import Index, Size, Tree, accumulation
from jattn.kernels.common import slicing, tile_schedule
from jattn.kernels.common.branches import unbatched_cond
from jattn.spec import Shapes, Spec, has_mask, parameters, scaled
from jattn.tuning import Sizes


def _scores(
    select: bool, part: slicing.HeadTile, q: Array, k: Array, v: Array
) -> tuple[Array, Any]:
    """Computes the scores of a head, and the pullback to the cotangents of products and parameters.

    With `select` the mask selects scores, and keys whose values are not finite make the queries
    that attend to them NaN; otherwise the mask is added.
    """
    products = tile.product(q, k, part.spec.precision)
    if select:
        products = products + tile.nan_where_nonfinite(v)[None, :]
    return part.modified(products, True, select)


def _widened(select: bool, *arrays: Array) -> list[Array]:
    wide = [x.astype(accumulation(x.dtype)) for x in arrays]
    return [tile.finite(x) for x in wide] if select else wide


def _forward_head(
    select: bool, part: slicing.HeadTile, q: Array, k: Array, v: Array, keep: bool = False
) -> tuple[Any, ...]:
    """Computes output `[T, V]` and normalizer `[T]` and, with `keep`, the weights `[T, S]`."""
    spec, q, _ = scaled(part.spec, q)
    part = part._replace(spec=spec)
    (values,) = _widened(select, v)
    greatest = softmax.greatest(values)
    factor = softmax.headroom(greatest, len(v))
    values = values * factor
    score, _ = _scores(select, part, q, k, v)

    def weigh(weights: Array) -> Array:
        return jnp.dot(part.drop(weights), values, precision=spec.precision)

    if keep:
        weights, normalizer = lax.optimization_barrier(_weights(select, score))
        out, *rest = weigh(weights), weights
    else:
        out, normalizer, *rest = softmax.quotient(softmax.of(score, weigh, differentiable=False))
    out = out / factor
    if not has_mask(spec):  # all queries attend to non-finite values, which make them NaN
        reach = greatest - greatest
        out, normalizer = out + reach, normalizer._replace(maximum=normalizer.maximum + reach)
    return tuple(map(lax.optimization_barrier, (out, normalizer, *rest)))


def _weights(select: bool, score: Array) -> tuple[Array, softmax.Normalizer]:
    """Computes the weights `[T, S]` and the normalizer `[T]`."""
    part = softmax.of(score, lambda weights: weights, differentiable=select)
    weights, normalizer = softmax.quotient(part)
    if select:  # NaN in a row must not reach the keys that are masked for it
        weights = part.weighted / softmax.denominator(part)[:, None]
    return weights, normalizer


def _backward_head(
    select: bool, part: slicing.HeadTile, rows: tuple[Array, ...], k: Array, v: Array
) -> tuple[Array, Array, Array, Any]:
    """Computes the gradients of q, k, v and parameters, with p = softmax(s) and
    ds = p (d_out vᵀ − delta).

    `rows` are q, d_out, delta and, if the forward pass kept them, p.
    """
    q, d_out, delta, *weights = rows
    spec, q, scale = scaled(part.spec, q)
    part = part._replace(spec=spec)
    score, pull = _scores(select, part, q, k, v)
    queries, keys, values = _widened(select or not has_mask(spec), q, k, v)

    def contract(pattern: str, x: Array, y: Array) -> Array:
        return jnp.einsum(pattern, x, y, precision=spec.precision)

    p = weights[0] if weights else _weights(select, score)[0]
    d_p = part.drop(contract("tv,sv->ts", d_out, values))
    d_products, d_params = pull(p * (d_p - delta[:, None]))
    dropped = part.drop(p)
    d_q = contract("ts,sh->th", d_products, keys) * scale
    d_k = contract("st,th->sh", _transposed(d_products), queries)
    d_v = contract("st,tv->sv", _transposed(dropped), d_out)
    d_q, d_k, d_v = (lax.optimization_barrier(x) for x in (d_q, d_k, d_v))
    return d_q, d_k, d_v, d_params


def _transposed(x: Array) -> Array:
    """Transposes x in memory, which the barrier ensures.

    Products with a transposed left side run at half the speed on CPUs.
    """
    return lax.optimization_barrier(x.T)


def _overflow_rows(x: Array) -> Array:
    """Returns which rows of x hold NaN, infinities, or numbers whose products may overflow."""
    largest = jnp.max(jnp.abs(x.astype(accumulation(x.dtype))), axis=-1, initial=0)
    # A maximum may ignore NaN, a sum does not.
    overflows = largest >= jnp.finfo(largest.dtype).max ** 0.5 / x.shape[-1]
    return jnp.isnan(tile.nan_where_nonfinite(x)) | overflows


def _where(rows: Array, x: Array | int, y: Array) -> Array:
    """Returns x in these rows, and y in all others."""
    return jnp.where(rows.reshape(-1, *[1] * (y.ndim - 1)), x, y)


def _zeroed(rows: Array, x: Array) -> Array:
    """Returns x with 0 in these rows; with the barrier, XLA rounds its products as those of x."""
    return lax.optimization_barrier(_where(rows, 0, x))


def _affected(part: slicing.HeadTile, q: Array, k: Array, v: Array) -> tuple[Array, ...]:
    """Returns `(allowed [T, S], rows [T], keys [S])`: the keys that `_overflow_rows` marks, and the
    rows that it marks or that see such a key."""
    allowed = part.spec.mask.evaluate(part.b, part.h, part.rows, part.columns)
    allowed = jnp.broadcast_to(allowed, (q.shape[0], k.shape[0]))
    keys = _overflow_rows(k) | _overflow_rows(v)
    return allowed, _overflow_rows(q) | jnp.any(allowed & keys[None, :], axis=1), keys


def _forward_fallback(
    part: slicing.HeadTile, q: Array, k: Array, v: Array, keep: bool = False
) -> tuple[Any, ...]:
    """Computes output and normalizer as `_forward_head`, whatever is masked."""
    _, rows, keys = _affected(part, q, k, v)
    selected = _forward_head(True, part, q, k, v, keep)
    zeroed = _zeroed(rows, q), _zeroed(keys, k), _zeroed(keys, v)
    added = _forward_head(False, part, *zeroed, keep)
    return jax.tree.map(functools.partial(_where, rows), selected[:2], added[:2])


def _backward_fallback(
    part: slicing.HeadTile, rows: tuple[Array, ...], k: Array, v: Array
) -> tuple[Array, Array, Array, Any]:
    """Computes the gradients of `_backward_head` without a score function, whatever is masked."""
    q, d_out, delta, *_ = rows
    allowed, affected, overflow = _affected(part, q, k, v)
    affected = affected | ~jnp.isfinite(delta)
    keys = overflow | jnp.any(allowed & affected[:, None], axis=0)
    selected = _backward_head(True, part, (q, d_out, delta), k, v)
    zeroed = tuple(_zeroed(affected, x) for x in (q, d_out, delta))
    added = _backward_head(False, part, zeroed, _zeroed(overflow, k), _zeroed(overflow, v))
    d_q, d_k, d_v = map(_where, (affected, keys, keys), selected, added)
    return d_q, d_k, d_v, []


class OneHead(NamedTuple):
    """The forward or backward pass of one head.

    head: the function `head(select, tile, ...)`.
    fallback: the same function `fallback(tile, ...)`, right whatever is masked.
    enough: returns whether results of `head` are right although the mask was added.
    extra: the number of last results that are only used if they are, and else 0.
    """

    head: Callable[..., Any]
    fallback: Callable[..., Any]
    enough: Callable[[Any], Any]
    extra: int = 0


def attempt(
    which: OneHead,
    run: Callable[..., Any],
    finish: Callable[..., Any],
    operands: tuple[Any, ...],
    spec: Spec,
    optimistic: bool,
) -> tuple[Any, Any]:
    """Returns the results of many pieces, and whether adding the mask was enough.

    `run(head, *operands)` maps a function of one head over the pieces; to save memory rather than
    time, `attempt` passes it `over_batch=tile.in_turn`. `finish` returns the final form of all but
    the extra results. `optimistic=False` selects from the start.
    """
    adding, selecting = (functools.partial(which.head, select) for select in (False, True))
    optimistic = optimistic and spec.score is None and not parameters(spec)
    results = run(selecting if has_mask(spec) and not optimistic else adding, *operands)
    last = len(results) - which.extra
    if not has_mask(spec) or not optimistic:
        return (*finish(results[:last]), *results[last:]), np.bool_(not has_mask(spec))
    enough = which.enough(results)

    # Heads are joined, and so copied back between tokens, within the branch: a result that only
    # passes through a branch would be copied once more.
    def joined(results: Tree) -> Tree:
        return jax.tree.map(lambda x: x.reshape(*x.shape[:2], -1), finish(results))

    def again(_: Tree, *operands: Tree) -> Tree:
        return joined(run(which.fallback, *operands, over_batch=tile.in_turn))

    first = lambda results, *_: joined(results)  # noqa: E731
    final = unbatched_cond(enough, first, again, results[:last], *operands)
    shapes = jax.eval_shape(finish, results[:last])
    final = jax.tree.map(lambda x, y: x.reshape(y.shape), final, shapes)
    extra = (jnp.where(enough, x, 0) for x in results[last:])  # no NaN that is masked
    return (*final, *extra), enough


# Scores that are not finite make their rows NaN, and so do 0 × NaN and 0 × inf in every row.
FORWARD = OneHead(
    _forward_head, _forward_fallback, lambda results: jnp.isfinite(jnp.sum(results[0]))
)
_KEEPING = OneHead(
    functools.partial(_forward_head, keep=True),
    functools.partial(_forward_fallback, keep=True),
    FORWARD.enough,
    extra=1,
)


def _by_token(results: Tree) -> tuple[Any, ...]:
    """Returns arrays `[B, N, T, ...]` as `[B, T, N, ...]`."""
    return jax.tree.map(lambda x: jnp.swapaxes(x, 1, 2), tuple(results))


def _rows(shapes: Shapes, together: int) -> Size:
    """Returns the number of batch rows in a group, if possible one that divides them all.

    The operands, results and scores of a group have about `together` numbers.
    """
    _, T, S, N, _, H, V, _ = shapes
    if not isinstance(shapes.B, int):  # a dimension of an exported program, known when it runs
        return shapes.B
    most = max(1, together // (N * (T * S + (T + S) * (H + V))))
    if shapes.B <= 2 * most:  # slicing and joining two groups would take longer than it saves
        return shapes.B
    even = next(n for n in range(most, 0, -1) if shapes.B % n == 0)
    return even if 2 * even > most else -(-shapes.B // -(-shapes.B // most))


def _in_groups(
    run: Callable[..., Any], rows: Size, spec: Spec, start: Tree, operands: tuple[Array, ...]
) -> tuple[Any, Any]:
    """Folds `run(total, size, first, spec, *operands) -> (total, results)` over groups of batch
    rows, which it slices with `_group`.

    All rows at once would write and read each [T, S] before the next step; those of a group stay in
    the caches, in memory that is not allocated anew in every call. A lone group has no total before
    it: None.
    """
    B = operands[0].shape[0]
    if rows == B:
        return run(None, B, jnp.int32(0), spec, *operands)
    steps, rest = divmod(B, rows)
    starts = rows * jnp.arange(steps, dtype=jnp.int32)
    total, results = lax.scan(
        lambda total, first: run(total, rows, first, spec, *operands), start, starts
    )
    results = jax.tree.map(tile_schedule.join, results)
    if rest:
        total, last = run(total, rest, jnp.int32(B - rest), spec, *operands)
        results = jax.tree.map(lambda x, y: jnp.concatenate([x, y]), results, last)
    return total, results


def _group(size: Size, first: Array, spec: Spec, *operands: Array) -> Tree:
    """Slices some batch rows, where they are used: a branch would copy them."""
    return slicing.slice_batch(spec, first, size), *(slicing.take(x, first, size) for x in operands)


def forward(
    spec: Spec,
    query: Array,
    key: Array,
    value: Array,
    sizes: Sizes,
    keep: bool,
) -> tuple[Any, ...]:
    """Computes `(out [B, T, N, V], normalizer of [B, T, N], all_finite)` and, with `keep`, the
    weights `[B, N, T, S]`; `backward` receives `all_finite` and the weights.

    Groups of batch rows hold about `sizes.together` numbers.
    """

    def group(total: Any, size: Size, *operands: Tree) -> Tree:
        def run(head: Callable[..., Any], first: Array, *operands: Tree, **how: Any) -> Tree:
            def one_head(spec: Spec, b: Array, h: Array, q: Array, k: Array, v: Array) -> Tree:
                return head(slicing.HeadTile.whole(spec, b, h, len(q), len(k)), q, k, v)

            spec, query, *keys = _group(size, first, *operands)
            return tile.over_heads(one_head, spec, (query,), tuple(keys), 0, first=first, **how)

        which = _KEEPING if keep else FORWARD
        results, all_finite = attempt(which, run, _by_token, operands, spec, sizes.add_masks)
        return (all_finite if total is None else total & all_finite), results

    rows = _rows(Shapes.of(query, value), sizes.together)
    all_finite, results = _in_groups(group, rows, spec, jnp.ones((), bool), (query, key, value))
    return *results[:2], jnp.asarray(all_finite), *results[2:]


def backward(
    spec: Spec,
    per_head: Tree,
    key: Array,
    value: Array,
    forward_results: tuple[Array, ...],
    sizes: Sizes,
) -> Tree:
    """Computes the gradients of parameters, query, key and value; `per_head` is a `PerQuery`, and
    `forward_results` are `all_finite` and the weights, if they were kept.

    Otherwise weights are computed again from the scores: with the normalizer as a second result the
    forward pass would not be one fused kernel. A group has half as many rows as there, as each
    holds twice as much.
    """
    query, d_out, _, _, delta = per_head
    all_finite, *weights = forward_results
    all_finite = all_finite & jnp.all(jnp.isfinite(delta))

    def group(total: Any, size: Size, *operands: Any) -> Tree:
        def enough(results: Tree) -> Array:
            # If a masked value overflows in a product with d_out, its row of d_key is NaN.
            return all_finite & jnp.isfinite(jnp.sum(results[1]))

        def run(head: Callable[..., Any], first: Any, *operands: Any, **how: Any) -> Tree:
            def one_head(spec: Spec, b: Index, h: Index, *arrays: Array) -> Tree:
                *rows, k, v = arrays
                whole = slicing.HeadTile.whole(spec, b, h, len(rows[0]), len(k))
                return head(whole, tuple(rows), k, v)

            spec, query, d_out, delta, key, value, *weights = _group(size, first, *operands)
            rows = (query, d_out, delta, *(jnp.swapaxes(x, 1, 2) for x in weights))
            axes = (0, 0, 0, [0] * len(parameters(spec)))
            return tile.over_heads(one_head, spec, rows, (key, value), axes, first=first, **how)

        def finish(results: Tree) -> Tree:
            *by_head, d_params = results
            d_query, d_key, d_value = _by_token(by_head)
            return tile.gather_gradients(spec, key.shape[2], d_query, d_key, d_value, d_params)

        first, spec, *_ = operands
        spec = slicing.slice_batch(spec, first, size)
        which = OneHead(_backward_head, _backward_fallback, enough)
        (d_params, *gradients), _ = attempt(which, run, finish, operands, spec, sizes.add_masks)
        return _add_rows(total, d_params, first), gradients

    rows = _rows(Shapes.of(query, value), sizes.together // 2)
    zeros = jax.tree.map(jnp.zeros_like, parameters(spec))
    operands = (query, d_out, delta, key, value, *weights)
    d_params, gradients = _in_groups(group, rows, spec, zeros, operands)
    return d_params, *gradients


def _add_rows(total: Any, parts: list[Array], first: Index) -> list[Array]:
    """Adds the gradients of parameters of batch rows from `first` on to the total."""
    if total is None:
        return parts
    pairs = zip(total, parts, strict=True)
    return [slicing.add_at(x, y, first, 0) if x.ndim else x + y for x, y in pairs]
