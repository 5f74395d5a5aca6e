"""Short sequences: all heads at once, each in one piece, with the derivative by formula.

Where a mask selects scores one by one, XLA cannot fuse the products with the softmax between them.
So without a score function a mask is first *added*, 0 or −inf, which is the same unless something
masked is not finite or overflows; that makes every row NaN that it reaches. Only then all is
computed again: as before with such queries and keys set to 0, which is right for all rows that do
not attend to them, and with selection for the others.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap
from jaxtyping import Array

from jattn import softmax, tile
from jattn._types import accumulation
from jattn.masks import Span
from jattn.spec import Spec, has_mask, parameters, scaled, with_parameters


Spans = tuple[Span, Span]  # of queries and keys


def _scores(
    exact: bool, spec: Spec, b: Any, h: Any, spans: Spans, q: Array, k: Array, v: Array
) -> tuple[Array, Any]:
    """Scores of a head, and the function from their cotangent to those of products and parameters.

    `exact` selects what is masked, and lets keys reach those who attend to them if their values
    are not finite; otherwise the mask is added.
    """
    products = tile.product(q, k, spec.precision)
    if exact:
        products = products + tile.lost(v)[None, :]

    def modify(products: Array, values: Any) -> Array:
        replaced = with_parameters(spec, values)
        return tile.modify(replaced, products, b, h, *spans, select=exact)

    return jax.vjp(modify, products, parameters(spec))


def _clean(exact: bool, *arrays: Array) -> list[Array]:
    wide = [x.astype(accumulation(x.dtype)) for x in arrays]
    return [tile.finite(x) for x in wide] if exact else wide


def _forward_head(
    exact: bool, spec: Spec, b: Any, h: Any, spans: Spans, q: Array, k: Array, v: Array
) -> tuple[Array, Array]:
    """`(out [T, V], lse [T])`."""
    spec, q, _ = scaled(spec, q)
    # Barriers, so that XLA makes the same of it, to the last bit, when all is computed again.
    q, k, v = lax.optimization_barrier((q, k, v))
    score, _ = _scores(exact, spec, b, h, spans, q, k, v)
    (values,) = _clean(exact, v)

    def weigh(weights: Array) -> Array:
        dropped = tile.drop(spec, weights, b, h, *spans)
        return jnp.dot(dropped, values, precision=spec.precision)

    out, lse = softmax.quotient(softmax.of(score, weigh, differentiable=False))
    return lax.optimization_barrier(out), lax.optimization_barrier(lse)


def _backward_head(
    exact: bool,
    spec: Spec,
    b: Any,
    h: Any,
    spans: Spans,
    q: Array,
    d_out: Array,
    delta: Array,
    k: Array,
    v: Array,
) -> tuple[Array, Array, Array, Any]:
    """Gradients of q, k, v and parameters, with p = softmax(s) and ds = p (d_out vᵀ − delta)."""
    spec, q, scale = scaled(spec, q)
    q, d_out, delta, k, v = lax.optimization_barrier((q, d_out, delta, k, v))
    score, pull = _scores(exact, spec, b, h, spans, q, k, v)
    queries, keys, values = _clean(exact, q, k, v)

    def contract(pattern: str, x: Array, y: Array) -> Array:
        return jnp.einsum(pattern, x, y, precision=spec.precision)

    part = softmax.of(score, lambda w: w, differentiable=exact)
    weights = part.weighted / softmax.denominator(part)[:, None]
    d_dropped = contract("tv,sv->ts", d_out, values)
    d_weights = tile.drop(spec, d_dropped, b, h, *spans)
    d_products, d_params = pull(weights * (d_weights - delta[:, None]))
    dropped = tile.drop(spec, weights, b, h, *spans)
    d_q = contract("ts,sh->th", d_products, keys) * scale
    d_k = contract("st,th->sh", _turned(d_products), queries)
    d_v = contract("st,tv->sv", _turned(dropped), d_out)
    d_q, d_k, d_v = (lax.optimization_barrier(x) for x in (d_q, d_k, d_v))
    return d_q, d_k, d_v, d_params


def _turned(x: Array) -> Array:
    """x transposed in memory: products with a transposed left side run at half the speed on CPUs,
    and without the barrier XLA would make such products of these."""
    return lax.optimization_barrier(x.T)


def _odd(x: Array) -> Array:
    """Which rows of x hold NaN, infinities, or numbers whose products may overflow."""
    largest = jnp.max(jnp.abs(x.astype(accumulation(x.dtype))), axis=-1, initial=0)
    # A maximum may pass NaN over, a sum does not.
    return jnp.isnan(tile.lost(x)) | (largest >= jnp.finfo(largest.dtype).max ** 0.5 / x.shape[-1])


def _blank(odd: Array, x: Array) -> Array:
    return jnp.where(odd.reshape(-1, *[1] * (x.ndim - 1)), 0, x)


def _touched(
    spec: Spec, b: Any, h: Any, spans: Spans, q: Array, k: Array, v: Array
) -> tuple[Array, ...]:
    """`(allowed [T, S], rows [T], keys [S])`: which keys are odd, and which rows see odd ones."""
    allowed = spec.mask.evaluate(b, h, *spans)
    allowed = jnp.broadcast_to(allowed, (q.shape[0], k.shape[0]))
    keys = _odd(k) | _odd(v)
    return allowed, _odd(q) | jnp.any(allowed & keys[None, :], axis=1), keys


def _forward_safely(
    spec: Spec, b: Any, h: Any, spans: Spans, q: Array, k: Array, v: Array
) -> tuple[Array, Array]:
    """As `_forward_head`, whatever is masked."""
    _, rows, keys = _touched(spec, b, h, spans, q, k, v)
    selected = _forward_head(True, spec, b, h, spans, q, k, v)
    blank = _blank(rows, q), _blank(keys, k), _blank(keys, v)
    added = _forward_head(False, spec, b, h, spans, *blank)
    out, lse = (
        jnp.where(rows.reshape(-1, *[1] * (x.ndim - 1)), x, y)
        for x, y in zip(selected, added, strict=True)
    )
    return out, lse


def _backward_safely(
    spec: Spec,
    b: Any,
    h: Any,
    spans: Spans,
    q: Array,
    d_out: Array,
    delta: Array,
    k: Array,
    v: Array,
) -> tuple[Array, Array, Array, Any]:
    """As `_backward_head` for no score function, whatever is masked."""
    allowed, rows, odd = _touched(spec, b, h, spans, q, k, v)
    rows = rows | ~jnp.isfinite(delta)
    keys = odd | jnp.any(allowed & rows[:, None], axis=0)
    selected = _backward_head(True, spec, b, h, spans, q, d_out, delta, k, v)
    blank = [_blank(rows, x) for x in (q, d_out, delta)] + [_blank(odd, x) for x in (k, v)]
    added = _backward_head(False, spec, b, h, spans, *blank)
    d_q, d_k, d_v = (
        jnp.where(which[:, None], x, y)
        for which, x, y in zip((rows, keys, keys), selected, added, strict=False)
    )
    return d_q, d_k, d_v, []


def agreed(ok: Array, yes: Callable[..., Any], no: Callable[..., Any], *arguments: Any) -> Any:
    """`lax.cond` that stays a branch under `vmap`: one decision, `yes` only where all are ok."""

    @custom_vmap
    def decide(ok: Array, arguments: Any) -> Any:
        return lax.cond(ok, yes, no, *arguments)

    @decide.def_vmap
    def decide_for_all(size: int, mapped: Any, ok: Array, arguments: Any) -> Any:
        axes = jax.tree.map(lambda one: 0 if one else None, mapped[1])
        every_yes, every_no = (jax.vmap(f, axes, axis_size=size) for f in (yes, no))
        results = agreed(jnp.all(ok), every_yes, every_no, *arguments)
        return results, jax.tree.map(lambda _: True, results)

    return decide(ok, arguments)


def _unless(ok: Array, found: Any, again: Callable[..., Any], *operands: Any) -> Any:
    """`found` where all is ok, else `again(*operands)`.

    Heads are joined, and so copied back between tokens, within the branch: a result that only
    passes through a branch would be copied once more.
    """

    def joined(results: Any) -> Any:
        return jax.tree.map(lambda x: x.reshape(*x.shape[:2], -1), results)

    yes, no = lambda one, *_: joined(one), lambda _, *x: joined(again(*x))
    results = agreed(ok, yes, no, found, *operands)
    return jax.tree.map(lambda x, like: x.reshape(like.shape), results, found)


class Pass(NamedTuple):
    """Forward or backward of one head: `head(exact, spec, ...)`, the same whatever is masked, and
    what tells from the results that adding the mask was enough."""

    head: Callable[..., Any]
    safely: Callable[..., Any]
    enough: Callable[[Any], Any]


def attempt(
    which: Pass, run: Callable[..., Any], operands: tuple[Any, ...], spec: Spec, optimistic: bool
) -> tuple[Any, Any]:
    """The results of many pieces, and whether adding the mask was enough.

    `run(head, *operands)` maps a function of one head over the pieces; where memory counts more
    than time it is told `over_batch=tile.in_turn`. `optimistic=False` selects from the start.
    """
    adding, selecting = (functools.partial(which.head, exact) for exact in (False, True))
    if not has_mask(spec):
        return run(adding, *operands), np.True_
    if not optimistic or spec.score is not None:
        return run(selecting, *operands), np.False_
    found = run(adding, *operands)
    enough = which.enough(found)
    again = functools.partial(run, which.safely, over_batch=tile.in_turn)
    return _unless(enough, found, again, *operands), enough


# Scores that are not finite make their rows NaN, and so do 0 × NaN and 0 × inf in every row.
FORWARD = Pass(_forward_head, _forward_safely, lambda found: jnp.isfinite(jnp.sum(found[0])))


def _everywhere(head: Callable[..., Any]) -> Callable[..., Any]:
    """`head` for all queries and keys of one head."""

    def one(spec: Spec, b: Any, h: Any, *operands: Array) -> Any:
        spans = tile.spans(spec, operands[0].shape[0], operands[-1].shape[0])
        return head(spec, b, h, spans, *operands)

    return one


def forward(
    spec: Spec, query: Array, key: Array, value: Array, optimistic: bool
) -> tuple[Array, Array, Any]:
    """`(out [B, T, N, V], lse [B, T, N], plain)`; `plain` is for `backward`."""

    def run(head: Callable[..., Any], spec: Spec, *operands: Array, **how: Any) -> Any:
        one = _everywhere(head)
        return tile.over_heads(one, spec, operands[:1], operands[1:], out_axes=(1, 1), **how)

    results, plain = attempt(FORWARD, run, (spec, query, key, value), spec, optimistic)
    return *results, plain


def backward(
    spec: Spec, per_head: Any, key: Array, value: Array, plain: Any, optimistic: bool
) -> Any:
    """Gradients of parameters, query, key and value; `per_head` is a tuple of query, d_out, lse
    and delta, each `[B, T, N, ...]`, and `plain` comes from `forward`.

    The softmax is computed again from the scores: the lse would be a second result of the forward
    pass, which then were no longer one fused kernel.
    """
    query, d_out, _, delta = per_head
    axes = (1, 1, 1, [0] * len(parameters(spec)))

    def run(head: Callable[..., Any], spec: Spec, *operands: Array, **how: Any) -> Any:
        one = _everywhere(head)
        found = tile.over_heads(one, spec, operands[:3], operands[3:], out_axes=axes, **how)
        return tile.gather_gradients(spec, key.shape[2], *found)

    def enough(found: Any) -> Array:
        # Where a masked value overflows in a product with d_out, its row of d_query is NaN.
        return plain & jnp.all(jnp.isfinite(delta)) & jnp.isfinite(jnp.sum(found[1]))

    operands = (spec, query, d_out, delta, key, value)
    which = Pass(_backward_head, _backward_safely, enough)
    return attempt(which, run, operands, spec, optimistic)[0]
