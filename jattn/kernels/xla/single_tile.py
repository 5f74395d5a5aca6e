"""Short sequences: all heads at once, each in one piece, with the derivative by formula.

Where a mask selects scores one by one, XLA cannot fuse the products with the softmax between them.
So without a score function a mask is first *added*, 0 or −inf, which is the same unless something
masked is not finite or overflows; that makes every row NaN that it reaches. Only then all is
computed again: as before with such queries and keys set to 0, which is right for all rows that do
not attend to them, and with selection for the others. With jax 0.12 both ways differ by rounding:
XLA compiles them apart, and made to compile them alike it takes up to twice the time.

Many batch rows go in groups that fit into the caches. Weights that are no larger than the queries
are kept for the backward pass, which computes others again.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from jattn import dropout, softmax, tile
from jattn._types import Index, Size, Tree, accumulation
from jattn.kernels.common import slicing, tile_schedule
from jattn.kernels.common.branches import unbatched_cond
from jattn.masks import Span
from jattn.spec import Shapes, Spec, has_mask, parameters, scaled, with_parameters
from jattn.tuning import Sizes


Spans = tuple[Span, Span]  # of queries and keys
Rows = tuple[Array, ...]  # of the query and what goes with it


def _scores(
    select: bool, spec: Spec, b: Array, h: Array, spans: Spans, q: Array, k: Array, v: Array
) -> tuple[Array, Any]:
    """Scores of a head, and the function from their cotangent to those of products and parameters.

    With `select` the mask selects scores, and keys whose values are not finite reach the
    queries that attend to them; otherwise the mask is added.
    """
    products = tile.product(q, k, spec.precision)
    if select:
        products = products + tile.nan_where_nonfinite(v)[None, :]

    def modify(products: Array, values: Tree) -> Array:
        replaced = with_parameters(spec, values)
        return tile.modify(replaced, products, b, h, *spans, select=select)

    return jax.vjp(modify, products, parameters(spec))


def _widened(select: bool, *arrays: Array) -> list[Array]:
    wide = [x.astype(accumulation(x.dtype)) for x in arrays]
    return [tile.finite(x) for x in wide] if select else wide


def _forward_head(
    select: bool,
    spec: Spec,
    b: Array,
    h: Array,
    spans: Spans,
    q: Array,
    k: Array,
    v: Array,
    keep: bool = False,
) -> tuple[Any, ...]:
    """Output `[T, V]` and normalizer `[T]`, and if wanted the weights `[T, S]`."""
    spec, q, _ = scaled(spec, q)
    (values,) = _widened(select, v)
    greatest = softmax.greatest(values)
    factor = softmax.headroom(greatest, len(v))
    values = values * factor
    score, _ = _scores(select, spec, b, h, spans, q, k, v)

    def weigh(weights: Array) -> Array:
        dropped = dropout.drop(spec, weights, b, h, *spans)
        return jnp.dot(dropped, values, precision=spec.precision)

    if keep:
        weights, normalizer = lax.optimization_barrier(_weights(select, score))
        out, *rest = weigh(weights), weights
    else:
        out, normalizer, *rest = softmax.quotient(softmax.of(score, weigh, differentiable=False))
    out = out / factor
    if not has_mask(spec):  # all attend to what is not finite, and get NaN from it
        reach = greatest - greatest
        out, normalizer = out + reach, normalizer._replace(maximum=normalizer.maximum + reach)
    return tuple(map(lax.optimization_barrier, (out, normalizer, *rest)))


def _weights(select: bool, score: Array) -> tuple[Array, softmax.Normalizer]:
    """The weights `[T, S]` and the normalizer `[T]`."""
    part = softmax.of(score, lambda weights: weights, differentiable=select)
    weights, normalizer = softmax.quotient(part)
    if select:  # NaN in a row must not reach the keys that are masked for it
        weights = part.weighted / softmax.denominator(part)[:, None]
    return weights, normalizer


def _backward_head(
    select: bool, spec: Spec, b: Any, h: Any, spans: Spans, rows: Rows, k: Array, v: Array
) -> tuple[Array, Array, Array, Any]:
    """Gradients of q, k, v and parameters, with p = softmax(s) and ds = p (d_out vᵀ − delta).

    `rows` are q, d_out, delta, and p if it was kept.
    """
    q, d_out, delta, *kept = rows
    spec, q, scale = scaled(spec, q)
    score, pull = _scores(select, spec, b, h, spans, q, k, v)
    queries, keys, values = _widened(select or not has_mask(spec), q, k, v)

    def contract(pattern: str, x: Array, y: Array) -> Array:
        return jnp.einsum(pattern, x, y, precision=spec.precision)

    weights = kept[0] if kept else _weights(select, score)[0]
    d_dropped = contract("tv,sv->ts", d_out, values)
    d_weights = dropout.drop(spec, d_dropped, b, h, *spans)
    d_products, d_params = pull(weights * (d_weights - delta[:, None]))
    dropped = dropout.drop(spec, weights, b, h, *spans)
    d_q = contract("ts,sh->th", d_products, keys) * scale
    d_k = contract("st,th->sh", _transposed(d_products), queries)
    d_v = contract("st,tv->sv", _transposed(dropped), d_out)
    d_q, d_k, d_v = (lax.optimization_barrier(x) for x in (d_q, d_k, d_v))
    return d_q, d_k, d_v, d_params


def _transposed(x: Array) -> Array:
    """x transposed in memory: products with a transposed left side run at half the speed on CPUs,
    and without the barrier XLA would make such products of these."""
    return lax.optimization_barrier(x.T)


def _overflow_rows(x: Array) -> Array:
    """Which rows of x hold NaN, infinities, or numbers whose products may overflow."""
    largest = jnp.max(jnp.abs(x.astype(accumulation(x.dtype))), axis=-1, initial=0)
    # A maximum may pass NaN over, a sum does not.
    overflows = largest >= jnp.finfo(largest.dtype).max ** 0.5 / x.shape[-1]
    return jnp.isnan(tile.nan_where_nonfinite(x)) | overflows


def _zeroed(rows: Array, x: Array) -> Array:
    """x with 0 in these rows. By a barrier XLA makes the same of it as of x, to the last bit."""
    return lax.optimization_barrier(jnp.where(rows.reshape(-1, *[1] * (x.ndim - 1)), 0, x))


def _affected(
    spec: Spec, b: Array, h: Array, spans: Spans, q: Array, k: Array, v: Array
) -> tuple[Array, ...]:
    """`(allowed [T, S], rows [T], keys [S])`: of the keys those that
    `_overflow_rows` finds, and the rows that see one of them."""
    allowed = spec.mask.evaluate(b, h, *spans)
    allowed = jnp.broadcast_to(allowed, (q.shape[0], k.shape[0]))
    keys = _overflow_rows(k) | _overflow_rows(v)
    return allowed, _overflow_rows(q) | jnp.any(allowed & keys[None, :], axis=1), keys


def _forward_fallback(
    spec: Spec, b: Array, h: Array, spans: Spans, q: Array, k: Array, v: Array, keep: bool = False
) -> tuple[Any, ...]:
    """As `_forward_head` without the weights, whatever is masked."""
    _, rows, keys = _affected(spec, b, h, spans, q, k, v)
    selected = _forward_head(True, spec, b, h, spans, q, k, v, keep)
    zeroed = _zeroed(rows, q), _zeroed(keys, k), _zeroed(keys, v)
    added = _forward_head(False, spec, b, h, spans, *zeroed, keep)

    def choose(x: Array, y: Array) -> Array:
        return jnp.where(rows.reshape(-1, *[1] * (x.ndim - 1)), x, y)

    return jax.tree.map(choose, selected[:2], added[:2])


def _backward_fallback(
    spec: Spec, b: Any, h: Any, spans: Spans, rows: Rows, k: Array, v: Array
) -> tuple[Array, Array, Array, Any]:
    """As `_backward_head` for no score function, whatever is masked."""
    q, d_out, delta, *_ = rows
    allowed, affected, overflow = _affected(spec, b, h, spans, q, k, v)
    affected = affected | ~jnp.isfinite(delta)
    keys = overflow | jnp.any(allowed & affected[:, None], axis=0)
    selected = _backward_head(True, spec, b, h, spans, (q, d_out, delta), k, v)
    zeroed = tuple(_zeroed(affected, x) for x in (q, d_out, delta))
    added = _backward_head(
        False, spec, b, h, spans, zeroed, _zeroed(overflow, k), _zeroed(overflow, v)
    )
    d_q, d_k, d_v = (
        jnp.where(which[:, None], x, y)
        for which, x, y in zip((affected, keys, keys), selected, added, strict=False)
    )
    return d_q, d_k, d_v, []


def _unless(
    ok: Array, found: Tree, finish: Callable[..., Any], again: Callable[..., Any], *operands: Tree
) -> Tree:
    """`finish(found)` where all is ok, else `finish(again(*operands))`.

    Heads are joined, and so copied back between tokens, within the branch: a result that only
    passes through a branch would be copied once more.
    """

    def joined(results: Tree) -> Tree:
        return jax.tree.map(lambda x: x.reshape(*x.shape[:2], -1), finish(results))

    yes, no = lambda one, *_: joined(one), lambda _, *x: joined(again(*x))
    results = unbatched_cond(ok, yes, no, found, *operands)
    return jax.tree.map(lambda x, y: x.reshape(y.shape), results, jax.eval_shape(finish, found))


class OneHead(NamedTuple):
    """Forward or backward of one head: `head(select, spec, ...)`, the same whatever is masked, and
    what tells from the results that adding the mask was enough."""

    head: Callable[..., Any]
    fallback: Callable[..., Any]
    enough: Callable[[Any], Any]
    extra: int = 0  # last results that are of use only where it was enough, and else 0


def attempt(
    which: OneHead,
    run: Callable[..., Any],
    finish: Callable[..., Any],
    operands: tuple[Any, ...],
    spec: Spec,
    optimistic: bool,
) -> tuple[Any, Any]:
    """The results of many pieces, and whether adding the mask was enough.

    `run(head, *operands)` maps a function of one head over the pieces, `finish` makes of that what
    is wanted; where memory counts more than time `run` is told `over_batch=tile.in_turn`.
    `optimistic=False` selects from the start.
    """
    adding, selecting = (functools.partial(which.head, select) for select in (False, True))
    optimistic = optimistic and spec.score is None and not parameters(spec)
    found = run(selecting if has_mask(spec) and not optimistic else adding, *operands)
    last = len(found) - which.extra
    if not has_mask(spec) or not optimistic:
        return (*finish(found[:last]), *found[last:]), np.bool_(not has_mask(spec))
    enough = which.enough(found)
    again = functools.partial(run, which.fallback, over_batch=tile.in_turn)
    extra = (jnp.where(enough, x, 0) for x in found[last:])  # no NaN that is masked
    return (*_unless(enough, found[:last], finish, again, *operands), *extra), enough


# Scores that are not finite make their rows NaN, and so do 0 × NaN and 0 × inf in every row.
FORWARD = OneHead(_forward_head, _forward_fallback, lambda found: jnp.isfinite(jnp.sum(found[0])))
_KEEPING = OneHead(
    functools.partial(_forward_head, keep=True),
    functools.partial(_forward_fallback, keep=True),
    FORWARD.enough,
    extra=1,
)


def _by_token(results: Tree) -> tuple[Any, ...]:
    """`[B, N, T, ...]` as `[B, T, N, ...]`."""
    return jax.tree.map(lambda x: jnp.swapaxes(x, 1, 2), tuple(results))


def _rows(shapes: Shapes, together: int) -> Size:
    """How many batch rows to take at a time, of which one reads and writes as many numbers as its
    operands, results and scores have; if possible a number that divides them all."""
    _, T, S, N, _, H, V, _ = shapes
    if not isinstance(shapes.B, int):  # a dimension of an exported program, known when it runs
        return shapes.B
    most = max(1, together // (N * (T * S + (T + S) * (H + V))))
    if shapes.B <= 2 * most:  # taking groups out and putting them back must be worth its time
        return shapes.B
    even = next(n for n in range(most, 0, -1) if shapes.B % n == 0)
    return even if 2 * even > most else -(-shapes.B // -(-shapes.B // most))


def _in_groups(
    run: Callable[..., Any], rows: Size, spec: Spec, start: Tree, operands: tuple[Array, ...]
) -> tuple[Any, Any]:
    """Folds `run(total, size, first, spec, *operands) -> (total, results)` over groups of batch
    rows, which it cuts out with `_group`.

    All at once would write and read each [T, S] of all rows before the next step; a group's stay in
    the caches, and in memory that is not asked for anew in every call. A single group has no total
    before it: None.
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
    """Some batch rows of everything. Cut where they are used: a branch would copy them."""
    return slicing.slice_batch(spec, first, size), *(slicing.take(x, first, size) for x in operands)


def forward(
    spec: Spec,
    query: Array,
    key: Array,
    value: Array,
    sizes: Sizes,
    keep: bool,
) -> tuple[Any, ...]:
    """`(out [B, T, N, V], normalizer of [B, T, N], all_finite)`, and if wanted the weights
    `[B, N, T, S]`, which go with `all_finite` to `backward`. Groups of batch rows hold about
    `sizes.together` numbers."""

    def some(total: Any, size: Size, *operands: Tree) -> Tree:
        def run(head: Callable[..., Any], first: Array, *operands: Tree, **how: Any) -> Tree:
            def one(spec: Spec, b: Array, h: Array, q: Array, k: Array, v: Array) -> Tree:
                return head(spec, b, h, tile.spans(spec, len(q), len(k)), q, k, v)

            spec, query, *keys = _group(size, first, *operands)
            return tile.over_heads(one, spec, (query,), tuple(keys), 0, first=first, **how)

        which = _KEEPING if keep else FORWARD
        results, all_finite = attempt(which, run, _by_token, operands, spec, sizes.add_masks)
        return (all_finite if total is None else total & all_finite), results

    rows = _rows(Shapes.of(query, value), sizes.together)
    all_finite, found = _in_groups(some, rows, spec, jnp.ones((), bool), (query, key, value))
    return *found[:2], jnp.asarray(all_finite), *found[2:]


def backward(
    spec: Spec,
    per_head: Tree,
    key: Array,
    value: Array,
    kept: tuple[Array, ...],
    sizes: Sizes,
) -> Tree:
    """Gradients of parameters, query, key and value; `per_head` is a `PerQuery`, and what was kept
    comes from `forward`.

    Weights that were not kept are computed again from the scores: the normalizer would be a second
    result of the forward pass, which then were no longer one fused kernel. A group has half as many
    rows as there, as each holds twice as much.
    """
    query, d_out, _, _, delta = per_head
    all_finite, *weights = kept
    all_finite = all_finite & jnp.all(jnp.isfinite(delta))

    def some(total: Any, size: Size, *operands: Any) -> Tree:
        def enough(found: Tree) -> Array:
            # Where a masked value overflows in a product with d_out, its row of d_key is NaN.
            return all_finite & jnp.isfinite(jnp.sum(found[1]))

        def run(head: Callable[..., Any], first: Any, *operands: Any, **how: Any) -> Tree:
            def one(spec: Spec, b: Index, h: Index, *own: Array) -> Tree:
                *rows, k, v = own
                return head(spec, b, h, tile.spans(spec, len(rows[0]), len(k)), tuple(rows), k, v)

            spec, query, d_out, delta, key, value, *weights = _group(size, first, *operands)
            rows = (query, d_out, delta, *(jnp.swapaxes(x, 1, 2) for x in weights))
            axes = (0, 0, 0, [0] * len(parameters(spec)))
            return tile.over_heads(one, spec, rows, (key, value), axes, first=first, **how)

        def finish(found: Tree) -> Tree:
            *by_head, d_params = found
            d_query, d_key, d_value = _by_token(by_head)
            return tile.gather_gradients(spec, key.shape[2], d_query, d_key, d_value, d_params)

        first, spec, *_ = operands
        spec = slicing.slice_batch(spec, first, size)
        which = OneHead(_backward_head, _backward_fallback, enough)
        (d_params, *found), _ = attempt(which, run, finish, operands, spec, sizes.add_masks)
        return _add_rows(total, d_params, first), found

    rows = _rows(Shapes.of(query, value), sizes.together // 2)
    zeros = jax.tree.map(jnp.zeros_like, parameters(spec))
    operands = (query, d_out, delta, key, value, *weights)
    d_params, found = _in_groups(some, rows, spec, zeros, operands)
    return d_params, *found


def _add_rows(total: Any, parts: list[Array], first: Index) -> list[Array]:
    """Gradients of parameters with those of batch rows from `first` on added."""
    if total is None:
        return parts
    pairs = zip(total, parts, strict=True)
    return [slicing.add_at(x, y, first, 0) if x.ndim else x + y for x, y in pairs]
