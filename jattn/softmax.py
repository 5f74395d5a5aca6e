"""Softmax-weighted sums as a monoid, so that attention can be computed in parts.

The contribution of a subset of the keys to one query is a `Partial`. For scores s and values v it
consists of the maximum m of the scores (at least the lowest finite number), the total
l = Σ exp(s − m) and the weighted sum a = Σ exp(s − m) v. Contributions combine into one, in any
order and grouping (Milakov and Gimelshein 2018, "Online normalizer calculation for softmax"). The
contribution of no keys has l = 0, and is the identity. A finished part is a contribution after the
division. It consists of out = a / l, and of either the log-sum-exp lse = m + log l or the two
numbers m and log l. These functions merge contributions or finished parts:

* `combine`: two contributions (m, l, a);
* `join`: several finished parts (out, m, log l), stacked along an axis;
* `join_pair`: two finished parts (out, m, log l);
* `join_sink`: one finished part (out, m, log l) and a sink;
* `merge`: several finished parts (out, lse) that users pass.

The maximum only shifts the exponents: results do not depend on it, so it needs no gradient. A
backward pass receives m and log l as two numbers, a `Normalizer`. At large m their sum, the lse,
would lose log l to rounding, and all weights of the query would be wrong by the same factor.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jattn._debugging import may_be_minus_infinity
from jattn._explicit import typed_like
from jattn._types import AnyArray, LogSumExp, Output, Scores, Size, Tree, accumulation
from jattn.checks import check_array, check_number, shown
from jattn.functions.integers import is_known


class Partial(NamedTuple):
    """The contribution of some of the keys to t queries: m, l and a of the module's docstring."""

    maximum: Float[Array, " t"]
    total: Float[Array, " t"]
    weighted: Float[Array, "t V"]


class Normalizer(NamedTuple):
    """The softmax normalizer of each query: its weights are exp((score − maximum) − log_total).

    A query that attends to no key has maximum −inf, a query that attends to NaN has maximum NaN;
    log_total is 0 for both.
    """

    maximum: Float[Array, "..."]
    log_total: Float[Array, "..."]

    def by_head(self) -> "Normalizer":
        """Swaps the last two axes of both arrays: from `[B, T, N]` to `[B, N, T]`, or back."""
        return Normalizer(*(jnp.swapaxes(x, -1, -2) for x in self))

    @property
    def lse(self) -> Float[Array, "..."]:
        """The log of the softmax's denominator."""
        return self.maximum + self.log_total

    def without_minus_infinity(self) -> "Normalizer":
        """Returns the normalizer with maximum 0 instead of −inf: −inf − (−inf) would be NaN."""
        return self._replace(maximum=jnp.where(self.maximum == -jnp.inf, 0, self.maximum))


def _lowest(dtype: DTypeLike) -> float:
    """Returns the initial value of a running maximum. It is finite, as −inf − (−inf) is NaN."""
    return float(jnp.finfo(dtype).min)


def keep_rounding(scores: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns the scores unchanged, but so that compilers cannot fuse them with a subtraction.

    Compilers turn a multiplication and a later subtraction into one operation that does not round
    the product. The maximum that is subtracted, however, is a rounded score. So the greatest score
    minus the maximum would not be 0 but the error of this rounding, and for large logits the error
    is so large that its exponential is 0 or infinite. A `where` between the two operations prevents
    this on every platform. An `optimization_barrier` does not, as XLA for CPUs removes barriers
    before it fuses, nor does a `reduce_precision` to the dtype's own precision, as LLVM removes it.
    """
    return jnp.where(jnp.isnan(scores), jnp.nan, scores)


def weights(
    scores: Scores, maximum: Float[Array, " t"], log_total: Float[Array, " t"], masked: bool = True
) -> Float[Array, "t s"]:
    """Computes the softmax weights of a tile from the normalizers of its queries.

    `maximum` must not be −inf; see `Normalizer.without_minus_infinity`. Masked pairs have weight 0
    even if the query's normalizer is NaN. `masked=False` is for tiles in which no pair is masked.
    """
    exponentials = jnp.exp((scores - maximum[:, None]) - log_total[:, None])
    return jnp.where(scores == -jnp.inf, 0, exponentials) if masked else exponentials


def empty(rows: int, width: int, dtype: DTypeLike) -> Partial:
    """Returns the contribution of no keys to `rows` queries, the identity of `combine`. `width` is
    the size V of values."""
    return Partial(
        jnp.full((rows,), _lowest(dtype), dtype),
        jnp.zeros((rows,), dtype),
        jnp.zeros((rows, width), dtype),
    )


def contribution(
    scores: Scores,
    weigh: Callable[[Float[Array, "t s"]], Float[Array, "t V"]],
    differentiable: bool = True,
) -> Partial:
    """Computes the contribution of the keys that have these scores.

    `weigh(x)` returns x · v for the values v of the keys. A masked key has the score −inf, so that
    its exponential is exactly 0. With `differentiable`, a maximum of NaN is replaced by 0, so that
    the exponentials of masked keys are 0 and not NaN, and their derivatives too. Pass False if no
    derivative is taken: without the `where` that replaces NaN, XLA fuses maximum, exponential and
    sum with the products before and after them.
    """
    maximum = jnp.max(jax.lax.stop_gradient(scores), axis=-1, initial=_lowest(scores.dtype))
    if differentiable:
        maximum = jnp.where(jnp.isnan(maximum), 0, maximum)
    exponential = jnp.exp(scores - maximum[:, None])
    return Partial(maximum, jnp.sum(exponential, axis=-1), weigh(exponential))


def combine(a: Partial, b: Partial) -> Partial:
    """Combines two contributions. The operation is associative and commutative."""
    maximum = jnp.maximum(a.maximum, b.maximum)
    scale_a, scale_b = jnp.exp(a.maximum - maximum), jnp.exp(b.maximum - maximum)
    return Partial(
        maximum,
        a.total * scale_a + b.total * scale_b,
        a.weighted * scale_a[:, None] + b.weighted * scale_b[:, None],
    )


def denominator(partial: Partial) -> Float[Array, " t"]:
    """Returns the divisor for each query: its total, or 1 if the total is 0 or NaN.

    Dividing by NaN would also turn the weights of masked keys, which are 0, into NaN.
    """
    return jnp.where((partial.total == 0) | jnp.isnan(partial.total), 1, partial.total)


def finish(partial: Partial) -> tuple[Float[Array, "t V"], Normalizer]:
    """Returns the output and the normalizer of each query.

    If a query attends to no key, its output is 0 and its maximum −inf. The output of a query that
    attends to NaN is set to NaN by a `where`, so that no gradient flows back from it.
    """
    is_nan, total = jnp.isnan(partial.total), denominator(partial)
    out = jnp.where(is_nan[:, None], jnp.nan, partial.weighted / total[:, None])
    maximum = jnp.where(partial.total == 0, -jnp.inf, partial.maximum)
    return out, Normalizer(jnp.where(is_nan, jnp.nan, maximum), jnp.log(total))


def finish_without_gradient(partial: Partial) -> tuple[Float[Array, "t V"], Normalizer]:
    """Computes the results of `finish`, for programs that are not differentiated.

    It has no `where` between sum and division, so that XLA fuses both with the product.
    """
    total = jnp.maximum(partial.total, jnp.finfo(partial.total.dtype).tiny)
    is_empty = partial.total == 0
    maximum = jnp.where(is_empty, -jnp.inf, partial.maximum)
    log_total = jnp.where(is_empty, 0, jnp.log(total))
    return partial.weighted / total[:, None], Normalizer(maximum, log_total)


@jax.custom_jvp
def quotient(numerator: Float[Array, "..."], total: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns numerator / total; 0, without gradients, where the total is 0.

    JAX's derivative of a division contains the square of the divisor, which underflows if the
    divisor is less than 1e-19.
    """
    is_zero = total == 0
    return jnp.where(is_zero, 0, numerator / jnp.where(is_zero, 1, total))


@quotient.defjvp
def _quotient_jvp(primals: Any, tangents: Any) -> tuple[Array, Array]:
    out, (d_numerator, d_total) = quotient(*primals), tangents
    return out, quotient(d_numerator - out * d_total, primals[1])


def greatest(values: Float[Array, "..."]) -> Float[Array, ""]:
    """Returns the greatest absolute value, without a gradient, in the accumulation dtype; NaN if
    any value is NaN."""
    magnitude = jnp.max(jnp.abs(jax.lax.stop_gradient(values)), initial=0)
    return magnitude.astype(accumulation(values.dtype))


def overflow_safe_factor(greatest: Float[Array, ""], terms: Size) -> Float[Array, ""]:
    """Returns a factor for values, so that a weighted sum of `terms` of them cannot overflow.

    `greatest` is the greatest absolute value. The factor is 1 if no sum can overflow anyway;
    otherwise it is a power of two, so that it does not round.
    """
    terms = max(1, terms) if isinstance(terms, int) else 2**31  # a symbolic size may have any value
    limit = float(jnp.finfo(greatest.dtype).max) / (2 * terms)
    factor = 2.0 ** -math.ceil(math.log2(2 * terms))
    return jnp.where(greatest > limit, factor, 1).astype(greatest.dtype)


def join(out: Float[Array, "P *t V"], normalizer: Normalizer) -> tuple[Array, Normalizer]:
    """Merges P finished parts, whose outputs and normalizers are stacked along the first axis.

    Maxima and logs of totals stay separate, so that the weights of the parts are exact at any
    logits.
    """
    if len(out) == 1:
        return out[0], Normalizer(*(x[0] for x in normalizer))
    maximum = jnp.max(normalizer.maximum, axis=0, keepdims=True)
    shift = jnp.where(maximum == -jnp.inf, 0, maximum)
    part_totals = jnp.exp((normalizer.maximum - shift) + normalizer.log_total)
    total = jnp.sum(part_totals, axis=0, keepdims=True)
    total = jnp.where(total == 0, 1, total)
    merged = jnp.sum((part_totals / total)[..., None] * out, axis=0)
    return merged, Normalizer(maximum[0], jnp.log(total[0]))


def _shares(parts: Sequence[Normalizer]) -> tuple[list[Array], Normalizer]:
    """Returns the share of each part in the softmax over all keys, and the softmax's normalizer.

    No gradient flows through the normalizer's `maximum`; all of it flows through `log_total`.
    """
    maxima = [jax.lax.stop_gradient(x.maximum) for x in parts]
    maximum = functools.reduce(jnp.maximum, maxima)
    shift = jnp.where(maximum == -jnp.inf, 0, maximum)
    totals = [jnp.exp((x.maximum - shift) + x.log_total) for x in parts]
    total = functools.reduce(jnp.add, totals)
    total = jnp.where(total == 0, 1, total)
    return [x / total for x in totals], Normalizer(maximum, jnp.log(total))


def join_pair(a: tuple[Array, Normalizer], b: tuple[Array, Normalizer]) -> tuple[Array, Normalizer]:
    """Merges two finished parts like `join`, each a pair `(out [..., V], normalizer [...])`."""
    (share_a, share_b), normalizer = _shares((a[1], b[1]))
    return share_a[..., None] * a[0] + share_b[..., None] * b[0], normalizer


def _check_part(name: str, out: Any, lse: Any) -> None:
    check_array(f"{name}: out", out, "[*B, T, N, V]")
    check_array(f"{name}: lse", lse, "[*B, N, T]")
    *batch, queries, heads, _ = out.shape if out.ndim >= 3 else (0, 0, 0)
    if out.ndim < 3 or lse.shape != (*batch, heads, queries):
        raise ValueError(
            f"{name}: expected out [*B, T, N, V] and lse [*B, N, T], "
            f"got out {list(out.shape)} and lse {list(lse.shape)}"
        )


@may_be_minus_infinity(1)
def merge(*parts: tuple[Output, LogSumExp]) -> tuple[Output, LogSumExp]:
    """Merges attention over disjoint parts of the keys into attention over all keys.

    Each part is a pair `(out [*B, T, N, V], lse [*B, N, T])`, the results of
    `attention(..., return_lse=True)` with the softmax. Other normalizers have no lse; outputs of a
    pointwise normalizer are merged by adding them. For a query without keys in a part, out is 0 and
    lse is −inf there. The function is differentiable in all inputs. The results have the dtypes of
    the first part; sums are computed in float32, or in float64 if any input is float64. The share
    of a part is as exact as its lse, which in float32 is rounded by up to 6e-8 of its magnitude.

    Raises ValueError for no parts or parts whose shapes do not fit together.

    >>> first = jattn.attention(q, k[:, :3], v[:, :3], return_lse=True)
    >>> rest = jattn.attention(q, k[:, 3:], v[:, 3:], return_lse=True)
    >>> bool(jnp.allclose(jattn.merge(first, rest)[0], jattn.attention(q, k, v), atol=1e-5))
    True
    """
    if not parts:
        raise ValueError("merge: expected at least one part (out, lse), got none")
    for i, part in enumerate(parts):
        if not isinstance(part, tuple | list) or len(part) != 2:
            kind = type(part).__name__
            raise TypeError(f"merge: part {i}: expected a pair (out, lse), got {kind}")
        out, lse = part
        _check_part(f"merge: part {i}", out, lse)
        if out.shape != parts[0][0].shape:
            raise ValueError(
                f"merge: part {i}: expected out {list(parts[0][0].shape)} as in part 0, "
                f"got {list(out.shape)}"
            )
    # Compiled even under `jax_disable_jit`: otherwise `jax_debug_nans` would check each operation,
    # and stop at an intermediate NaN that a later `where` replaces.
    with jax.disable_jit(False):
        return _merged(parts)


@jax.jit
def _merged(parts: tuple[tuple[Output, LogSumExp], ...]) -> tuple[Output, LogSumExp]:
    dtype = _dtype_of_sums(parts)
    shares, normalizer = _shares([_normalizer_of_lse(lse.astype(dtype)) for _, lse in parts])
    summands = [_scaled(out.astype(dtype), x) for x, (out, _) in zip(shares, parts, strict=True)]
    out, lse = parts[0]
    merged = functools.reduce(jnp.add, summands)
    return merged.astype(out.dtype), normalizer.lse.astype(lse.dtype)


def _dtype_of_sums(arrays: Tree) -> DTypeLike:
    any_float64 = any(x.dtype == jnp.float64 for x in jax.tree.leaves(arrays))
    return jnp.float64 if any_float64 else jnp.float32


def _normalizer_of_lse(lse: LogSumExp) -> Normalizer:
    return Normalizer(keep_rounding(lse), jnp.zeros_like(lse))


def _scaled(out: Output, share: Float[Array, "*B N T"]) -> Output:
    """Multiplies the outputs `[*B, T, N, V]` by a share for each query and head."""
    return out * jnp.swapaxes(share, -1, -2)[..., None]


@may_be_minus_infinity(1)
def with_sink(
    out: Output, lse: LogSumExp, sink: float | Float[AnyArray, "..."]
) -> tuple[Output, LogSumExp]:
    """Adds an attention sink to each head's softmax: the learned logit of a key without a value.

    Only the softmax has sinks. The weights of a query then sum to less than 1. The results are
    out × σ(lse − sink) and log(exp lse + exp sink). `sink` is `[N]`, or a number for all heads, in
    the units of the scores after scaling; −inf changes nothing. Used in gpt-oss (2025); Xiao et al.
    2023 explain why it helps. The sink's share is as exact as lse, which in float32 is rounded by
    up to 6e-8 of its magnitude; `attention(..., sink=sink)` does not round it.

    Raises TypeError or ValueError for wrong dtypes or shapes, and for static sinks of NaN or +inf.

    >>> jattn.with_sink(jnp.ones((1, 1, 1)), jnp.zeros((1, 1)), 0.0)[0].item()
    0.5
    """
    _check_part("with_sink", out, lse)
    by_head = sink_by_head("with_sink: sink", sink, out.shape[-2])
    with jax.disable_jit(False):  # as in `merge`
        return _with_sink(out, lse, by_head)


@jax.jit
def _with_sink(out: Output, lse: LogSumExp, sink: Float[Array, " N"]) -> tuple[Output, LogSumExp]:
    attended = _normalizer_of_lse(lse.astype(_dtype_of_sums((out, lse))))
    out, normalizer = join_sink(out, attended, sink)
    return out, normalizer.lse.astype(lse.dtype)


def join_sink(
    out: Output, normalizer: Normalizer, sink: Float[Array, " N"]
) -> tuple[Output, Normalizer]:
    """Adds a sink to attention with outputs `[*B, T, N, V]` and normalizers of `[*B, N, T]`.

    Maxima and logs of totals stay separate, so that the share of the sink is exact at any logits.
    """
    (share, _), normalizer = _shares((normalizer, _normalizer_of_sink(normalizer, sink)))
    return _scaled(out.astype(share.dtype), share).astype(out.dtype), normalizer


def _normalizer_of_sink(like: Normalizer, sink: Float[Array, " N"]) -> Normalizer:
    """Returns the normalizer of a softmax over the sink only, with `like`'s shape `[*B, N, T]`."""
    by_head = keep_rounding(sink.astype(like.maximum.dtype))
    by_head = by_head.reshape((1,) * (like.maximum.ndim - 2) + (-1, 1))
    sinks = typed_like(jnp.broadcast_to(by_head, like.maximum.shape), like.maximum)
    return Normalizer(sinks, jnp.zeros_like(sinks))


def sink_by_head(name: str, sink: Any, N: int) -> Float[Array, " N"]:
    """Returns a sink, a number or `[N]`, as an array of one logit for each head.

    Raises TypeError and ValueError for other values, and for static sinks of NaN or +inf.
    """
    is_number = isinstance(sink, int | float) and not hasattr(sink, "dtype")
    if not is_number:
        check_array(name, sink, "[N] or without axes")
    elif sink != -math.inf:
        check_number(name, sink)
    if np.shape(sink) not in ((), (N,)):
        got = list(np.shape(sink))
        raise ValueError(f"{name}: expected [N] = [{N}] or a scalar, got shape {got}")
    # A Python number keeps its digits for calls in float64.
    dtype = getattr(sink, "dtype", np.dtype(np.float64))
    dtype = np.dtype(jax.dtypes.canonicalize_dtype(dtype))
    # The least number that float32 rounds to infinity; numbers of narrower dtypes are smaller.
    too_large = np.inf if dtype == np.float64 and not is_number else 2.0**128 - 2.0**103
    if (is_number or is_known(sink)) and not np.all(np.asarray(sink, np.float64) < too_large):
        raise ValueError(f"{name}: expected finite logits or -inf, got {shown(sink)}")
    return jnp.broadcast_to(jnp.asarray(sink, dtype), (N,))


@jax.jit
def with_sink_in_weights(
    weights: Float[Array, "*B N T S"], normalizer: Normalizer, sink: Float[Array, " N"]
) -> Float[Array, "*B N T S"]:
    """Scales attention weights by the share of the softmax that a sink leaves to the keys.

    `normalizer` is the softmax normalizer of these weights, which excludes the sink.
    """
    (share, _), _ = _shares((normalizer, _normalizer_of_sink(normalizer, sink)))
    return weights * share[..., None].astype(weights.dtype)
