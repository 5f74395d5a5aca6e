"""Attention of short sequences: all heads at once, each as one tile, with its own derivative.

A mask can select scores (`where(allowed, score, -inf)`) or be added to them as 0 or −inf. XLA fuses
an addition with the products and the softmax around it, but not a selection. So without a score
function the mask is first added. This gives the right result unless a masked query, key or value is
not finite or overflows; the queries that it reaches then become NaN. Only then are all results
computed again, see `_forward_fallback`: by selection for the queries that attend to such a key, and
by addition, with such queries and keys set to 0, for all others. With JAX 0.12 the results of the
two computations may differ by rounding, because XLA compiles them separately; compiling them alike
would take up to twice the time.

Batch rows are computed in groups that fit into the caches. Weights that are no larger than the
queries are kept for the backward pass, larger ones are recomputed.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from jattn import softmax, tile
from jattn._types import Index, Size, Tree, accumulation
from jattn.kernels.common import slicing, tile_schedule
from jattn.kernels.common.branches import unbatched_cond
from jattn.spec import Shapes, Spec, has_mask, parameters, scaled
from jattn.tuning import Sizes


def _products(
    select: bool, head_tile: slicing.HeadTile, q: Array, k: Array, v: Array
) -> Float[Array, "T S"]:
    """Computes the products of a head's queries and keys.

    With `select` the mask selects scores, and a value that is not finite makes the queries that
    attend to it NaN; otherwise the mask is added.
    """
    products = tile.dot_products(q, k, head_tile.spec.precision)
    return products + tile.nan_where_nonfinite(v)[None, :] if select else products


def _widened(select: bool, *arrays: Array) -> list[Array]:
    """Returns arrays in the accumulation dtype; with `select`, 0 in place of NaN and infinities."""
    arrays = tuple(x.astype(accumulation(x.dtype)) for x in arrays)
    return [tile.finite(x) for x in arrays] if select else [*arrays]


def _forward_head(
    select: bool, head_tile: slicing.HeadTile, q: Array, k: Array, v: Array, keep: bool = False
) -> tuple[Any, ...]:
    """Computes output `[T, V]` and normalizer `[T]` and, with `keep`, the weights `[T, S]`."""
    spec, q, _ = scaled(head_tile.spec, q)
    head_tile = head_tile._replace(spec=spec)
    (values,) = _widened(select, v)
    greatest = softmax.greatest(values)
    factor = softmax.overflow_safe_factor(greatest, len(v))
    values = values * factor
    score = head_tile.modify(_products(select, head_tile, q, k, v), True, select)

    def weigh(weights: Array) -> Array:
        return jnp.dot(head_tile.drop(weights), values, precision=spec.precision)

    if keep:
        weights, normalizer = lax.optimization_barrier(_weights(select, score))
        out, *rest = weigh(weights), weights
    else:
        out, normalizer, *rest = softmax.finish_without_gradient(
            softmax.contribution(score, weigh, differentiable=False)
        )
    out = out / factor
    if not has_mask(spec):  # all queries attend to a value that is not finite
        zero_or_nan = greatest - greatest
        out = out + zero_or_nan
        normalizer = normalizer._replace(maximum=normalizer.maximum + zero_or_nan)
    return tuple(map(lax.optimization_barrier, (out, normalizer, *rest)))


def _weights(select: bool, score: Array) -> tuple[Array, softmax.Normalizer]:
    """Returns the weights `[T, S]` and the normalizer `[T]`."""
    partial = softmax.contribution(score, lambda weights: weights, differentiable=select)
    weights, normalizer = softmax.finish_without_gradient(partial)
    if select:  # masked pairs of a query that is NaN keep the weight 0
        weights = partial.weighted / softmax.denominator(partial)[:, None]
    return weights, normalizer


def _backward_head(
    select: bool, head_tile: slicing.HeadTile, per_query: tuple[Array, ...], k: Array, v: Array
) -> tuple[Array, Array, Array, Any]:
    """Computes the gradients of q, k, v and parameters.

    With the weights p = softmax(s), the cotangent of the scores is ds = p (d_out vᵀ − delta).
    `per_query` holds q, d_out, delta and, if the forward pass kept them, the weights p.
    """
    q, d_out, delta, *weights = per_query
    spec, q, scale = scaled(head_tile.spec, q)
    head_tile = head_tile._replace(spec=spec)
    score, pull = head_tile.modified(_products(select, head_tile, q, k, v), True, select)
    queries, keys, values = _widened(select or not has_mask(spec), q, k, v)

    def contract(pattern: str, x: Array, y: Array) -> Array:
        return jnp.einsum(pattern, x, y, precision=spec.precision)

    p = weights[0] if weights else _weights(select, score)[0]
    d_p = head_tile.drop(contract("tv,sv->ts", d_out, values))
    d_products, d_params = pull(p * (d_p - delta[:, None]))
    dropped = head_tile.drop(p)
    d_q = contract("ts,sh->th", d_products, keys) * scale
    d_k = contract("st,th->sh", _transposed(d_products), queries)
    d_v = contract("st,tv->sv", _transposed(dropped), d_out)
    d_q, d_k, d_v = (lax.optimization_barrier(x) for x in (d_q, d_k, d_v))
    return d_q, d_k, d_v, d_params


def _transposed(x: Array) -> Array:
    """Transposes x in memory: without the barrier XLA would fuse the transposition with a product.

    Products whose left operand is transposed run at half the speed on CPUs.
    """
    return lax.optimization_barrier(x.T)


def _overflow_rows(x: Array) -> Array:
    """Returns which rows of `x [t, H]` hold NaN, infinities or numbers whose products may overflow,
    as booleans `[t]`."""
    largest = jnp.max(jnp.abs(x.astype(accumulation(x.dtype))), axis=-1, initial=0)
    # A maximum may ignore NaN, a sum does not.
    overflows = largest >= jnp.finfo(largest.dtype).max ** 0.5 / x.shape[-1]
    return jnp.isnan(tile.nan_where_nonfinite(x)) | overflows


def _where(rows: Array, x: Array | int, y: Array) -> Array:
    """Returns x where `rows [t]` is True, else y `[t, ...]`."""
    return jnp.where(rows.reshape(-1, *[1] * (y.ndim - 1)), x, y)


def _zeroed(rows: Array, x: Array) -> Array:
    """Returns x with 0 in the rows where `rows` is True.

    The barrier keeps XLA from fusing the selection with products, which it would round differently.
    """
    return lax.optimization_barrier(_where(rows, 0, x))


def _affected(head_tile: slicing.HeadTile, q: Array, k: Array, v: Array) -> tuple[Array, ...]:
    """Returns `(allowed [T, S], queries [T], keys [S])`.

    `allowed` is the mask. `keys` are the keys that `_overflow_rows` marks by themselves or their
    values. `queries` are the queries that it marks or that may attend to one of these keys.
    """
    allowed = head_tile.spec.mask.evaluate(
        head_tile.b, head_tile.h, head_tile.rows, head_tile.columns
    )
    allowed = jnp.broadcast_to(allowed, (q.shape[0], k.shape[0]))
    keys = _overflow_rows(k) | _overflow_rows(v)
    return allowed, _overflow_rows(q) | jnp.any(allowed & keys[None, :], axis=1), keys


def _forward_fallback(
    head_tile: slicing.HeadTile, q: Array, k: Array, v: Array, keep: bool = False
) -> tuple[Any, ...]:
    """Computes output and normalizer, right even if masked queries, keys or values are not finite.

    The queries that `_affected` returns have the result of selection. For all others, adding the
    mask is right once the overflowing queries, keys and values are 0.
    """
    _, queries, keys = _affected(head_tile, q, k, v)
    selected = _forward_head(True, head_tile, q, k, v, keep)
    zeroed = _zeroed(queries, q), _zeroed(keys, k), _zeroed(keys, v)
    added = _forward_head(False, head_tile, *zeroed, keep)
    return jax.tree.map(functools.partial(_where, queries), selected[:2], added[:2])


def _backward_fallback(
    head_tile: slicing.HeadTile, per_query: tuple[Array, ...], k: Array, v: Array
) -> tuple[Array, Array, Array, Any]:
    """Computes the gradients of `_backward_head`, right even if masked queries, keys or values are
    not finite. There are no parameters: calls with a score function select from the start."""
    q, d_out, delta, *_ = per_query
    allowed, affected, overflow = _affected(head_tile, q, k, v)
    affected = affected | ~jnp.isfinite(delta)
    keys = overflow | jnp.any(allowed & affected[:, None], axis=0)
    selected = _backward_head(True, head_tile, (q, d_out, delta), k, v)
    zeroed = tuple(_zeroed(affected, x) for x in (q, d_out, delta))
    added = _backward_head(False, head_tile, zeroed, _zeroed(overflow, k), _zeroed(overflow, v))
    d_q, d_k, d_v = map(_where, (affected, keys, keys), selected, added)
    return d_q, d_k, d_v, []


class OneHead(NamedTuple):
    """The forward or backward pass of one head.

    head: the function `head(select, head_tile, ...)`, whose mask selects scores or is added.
    fallback: the function `fallback(head_tile, ...)`, with right results even if masked arrays are
        not finite.
    enough: returns whether results of `head` with an added mask are right.
    extra: the number of last results that only `head` has; they are set to 0 if they are not right.
    """

    head: Callable[..., Any]
    fallback: Callable[..., Any]
    enough: Callable[[Any], Any]
    extra: int = 0


def attempt(
    one_head: OneHead,
    run: Callable[..., Any],
    finish: Callable[..., Any],
    operands: tuple[Any, ...],
    spec: Spec,
    optimistic: bool,
) -> tuple[Any, Any]:
    """Returns the results of many tiles, and whether adding the mask was enough.

    `run(function, *operands)` maps a function of one head over all tiles; the fallback is run with
    `over_batch=tile.map_in_sequence`, which takes less memory but more time. `finish` returns the
    final form of all but the extra results. With `optimistic=False` the mask selects at once.
    """
    adding, selecting = (functools.partial(one_head.head, select) for select in (False, True))
    optimistic = optimistic and spec.score is None and not parameters(spec)
    results = run(selecting if has_mask(spec) and not optimistic else adding, *operands)
    n = len(results) - one_head.extra
    if not has_mask(spec) or not optimistic:
        return (*finish(results[:n]), *results[n:]), np.bool_(not has_mask(spec))
    enough = one_head.enough(results)

    # `finish` transposes the results, and the reshape makes XLA copy them, within the branch: a
    # result that only passed through the branch would be copied once more.
    def joined(results: Tree) -> Tree:
        return jax.tree.map(lambda x: x.reshape(*x.shape[:2], -1), finish(results))

    def finished(results: Tree, *_: Tree) -> Tree:
        return joined(results)

    def recomputed(_: Tree, *operands: Tree) -> Tree:
        return joined(run(one_head.fallback, *operands, over_batch=tile.map_in_sequence))

    final = unbatched_cond(enough, finished, recomputed, results[:n], *operands)
    shapes = jax.eval_shape(finish, results[:n])
    final = jax.tree.map(lambda x, y: x.reshape(y.shape), final, shapes)
    # Unless adding was enough, nothing uses these, and they may hold NaN of masked pairs.
    extra = (jnp.where(enough, x, 0) for x in results[n:])
    return (*final, *extra), enough


# The output of a query is NaN if one of its scores is NaN or +inf, also of a masked key, and all
# outputs of a head are NaN if a value is NaN or infinite. So finite outputs are right.
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
    """Transposes arrays `[B, N, T, ...]` to `[B, T, N, ...]`."""
    return jax.tree.map(lambda x: jnp.swapaxes(x, 1, 2), tuple(results))


def _rows(shapes: Shapes, together: int) -> Size:
    """Returns the number of batch rows in a group, if possible a divisor of B.

    The operands, results and scores of a group have about `together` entries.
    """
    _, T, S, N, _, H, V, _ = shapes
    if not isinstance(shapes.B, int):  # a symbolic dimension of an exported program
        return shapes.B
    max_rows = max(1, together // (N * (T * S + (T + S) * (H + V))))
    if shapes.B <= 2 * max_rows:  # slicing and joining two groups would take longer than it saves
        return shapes.B
    divisor = next(n for n in range(max_rows, 0, -1) if shapes.B % n == 0)
    return divisor if 2 * divisor > max_rows else -(-shapes.B // -(-shapes.B // max_rows))


def _in_groups(
    run: Callable[..., Any], rows: Size, spec: Spec, start: Tree, operands: tuple[Array, ...]
) -> tuple[Any, Any]:
    """Folds `run(total, size, first, spec, *operands) -> (total, results)` over groups of batch
    rows; a group has `size` batch rows from `first` on, which `run` slices by `_group`.

    The `[T, S]` arrays of a group stay in the caches, and the groups share their memory; those of
    all batch rows at once would be written to main memory and read again. The first total is
    `start`, or None if all batch rows are one group.
    """
    B = operands[0].shape[0]
    if rows == B:
        return run(None, B, jnp.int32(0), spec, *operands)
    groups, rest = divmod(B, rows)
    starts = rows * jnp.arange(groups, dtype=jnp.int32)
    total, results = lax.scan(
        lambda total, first: run(total, rows, first, spec, *operands), start, starts
    )
    results = jax.tree.map(tile_schedule.concatenate_blocks, results)
    if rest:
        total, last = run(total, rest, jnp.int32(B - rest), spec, *operands)
        results = jax.tree.map(lambda x, y: jnp.concatenate([x, y]), results, last)
    return total, results


def _group(size: Size, first: Array, spec: Spec, *operands: Array) -> Tree:
    """Returns the spec and the operands of `size` batch rows from `first` on.

    It is called inside of branches: slices that are passed to a branch are copied.
    """
    return slicing.slice_batch(spec, first, size), *(slicing.take(x, first, size) for x in operands)


def forward(
    spec: Spec, query: Array, key: Array, value: Array, sizes: Sizes, keep: bool
) -> tuple[Any, ...]:
    """Returns `out [B, T, N, V]`, the normalizer `[B, T, N]`, `all_finite` and, with `keep`, the
    weights `[B, N, T, S]`.

    `all_finite` tells `backward` whether adding the mask was enough. Groups of batch rows have
    about `sizes.together` numbers.
    """

    def group(total: Any, size: Size, *operands: Tree) -> Tree:
        def run(head: Callable[..., Any], first: Array, *operands: Tree, **options: Any) -> Tree:
            def whole_head(spec: Spec, b: Index, h: Index, *qkv: Array) -> Tree:
                q, k, v = _widened(False, *qkv) if sizes.widen else qkv
                return head(slicing.HeadTile.whole(spec, b, h, len(q), len(k)), q, k, v)

            spec, query, *keys = _group(size, first, *operands)
            return tile.over_heads(
                whole_head, spec, (query,), tuple(keys), 0, first=first, **options
            )

        one_head = _KEEPING if keep else FORWARD
        results, all_finite = attempt(one_head, run, _by_token, operands, spec, sizes.add_masks)
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
    """Computes the gradients of parameters, query, key and value.

    `per_head` is a `PerQuery` of all heads. `forward_results` are `all_finite` and, if the forward
    pass kept them, the weights; otherwise the weights are recomputed from the scores. They are not
    computed from the normalizer: if the program used it, XLA would not compile the forward pass to
    one fused kernel. A group has half as many batch rows as in the forward pass, because a batch
    row takes twice the memory.
    """
    query, d_out, _, _, delta = per_head
    all_finite, *weights = forward_results
    all_finite = all_finite & jnp.all(jnp.isfinite(delta))

    def group(total: Any, size: Size, *operands: Any) -> Tree:
        def enough(results: Tree) -> Array:
            # If the product of d_out and a masked value overflows, d_key is NaN for that key.
            return all_finite & jnp.isfinite(jnp.sum(results[1]))

        def run(head: Callable[..., Any], first: Any, *operands: Any, **options: Any) -> Tree:
            def whole_head(spec: Spec, b: Index, h: Index, *arrays: Array) -> Tree:
                q, *per_query, k, v = arrays
                q, k, v = _widened(False, q, k, v) if sizes.widen else (q, k, v)
                head_tile = slicing.HeadTile.whole(spec, b, h, len(q), len(k))
                return head(head_tile, (q, *per_query), k, v)

            spec, query, d_out, delta, key, value, *weights = _group(size, first, *operands)
            per_query = (query, d_out, delta, *(jnp.swapaxes(x, 1, 2) for x in weights))
            axes, keys = (0, 0, 0, [0] * len(parameters(spec))), (key, value)
            return tile.over_heads(whole_head, spec, per_query, keys, axes, first=first, **options)

        def finish(results: Tree) -> Tree:
            *by_head, d_params = results
            d_query, d_key, d_value = _by_token(by_head)
            return tile.sum_shared_gradients(spec, key.shape[2], d_query, d_key, d_value, d_params)

        first, spec, *_ = operands
        spec = slicing.slice_batch(spec, first, size)
        one_head = OneHead(_backward_head, _backward_fallback, enough)
        (d_params, *gradients), _ = attempt(one_head, run, finish, operands, spec, sizes.add_masks)
        return _add_rows(total, d_params, first), gradients

    rows = _rows(Shapes.of(query, value), sizes.together // 2)
    zeros = jax.tree.map(jnp.zeros_like, parameters(spec))
    operands = (query, d_out, delta, key, value, *weights)
    d_params, gradients = _in_groups(group, rows, spec, zeros, operands)
    return d_params, *gradients


def _add_rows(total: Any, parts: list[Array], first: Index) -> list[Array]:
    """Adds gradients of parameters, of the batch rows from `first` on, to the total."""
    if total is None:
        return parts
    pairs = zip(total, parts, strict=True)
    return [slicing.add_at(x, y, first, 0) if x.ndim else x + y for x, y in pairs]
