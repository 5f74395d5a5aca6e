"""Softmax-weighted sums as a monoid, so that attention can be computed in parts.

One part of the keys contributes to a row of queries a maximum m (at least the lowest finite
number), a total l = Σ exp(s − m) and a weighted sum a = Σ exp(s − m) v. Two parts combine into one
of the same form (Milakov and Gimelshein 2018, "Online normalizer calculation for softmax"), in any
order and grouping; the part without keys, l = 0, is the identity. Normalised parts are passed as
`(out, lse)`, with out = a / l and lse = m + log l, which `merge` combines.

The maximum only shifts: results do not depend on it, so no gradient flows through it. A backward
pass receives m and log l as two numbers, a `Normalizer`: at large logits their sum has no digits
left for log l, and all weights of a row would be wrong by one factor.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jattn._debugging import may_be_minus_infinity
from jattn._types import AnyArray, LogSumExp, Output, Scores, Size, accumulation
from jattn.checks import check_array, check_number, shown
from jattn.functions.integers import is_known


class Partial(NamedTuple):
    """The contribution of some of the keys to a row of queries."""

    maximum: Float[Array, " t"]
    total: Float[Array, " t"]
    weighted: Float[Array, "t V"]


class Normalizer(NamedTuple):
    """The softmax normalizer of each row: its weights are exp((score − maximum) − log_total).

    A row without keys has maximum −inf, a row that attends to NaN has maximum NaN; log_total is 0
    in both.
    """

    maximum: Float[Array, "..."]
    log_total: Float[Array, "..."]

    @property
    def lse(self) -> Float[Array, "..."]:
        """The log of the softmax's denominator."""
        return self.maximum + self.log_total

    def finite(self) -> "Normalizer":
        """Returns the normalizer with a maximum of 0 in place of −inf, for derivatives."""
        return self._replace(maximum=jnp.where(self.maximum == -jnp.inf, 0, self.maximum))


def _lowest(dtype: DTypeLike) -> float:
    """Returns a shift with which a row without keys stays 0 instead of −inf − (−inf)."""
    return float(jnp.finfo(dtype).min)


def rounded(scores: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns the scores such that no compiler fuses their last product with a later subtraction.

    Compilers fuse a product and a difference into one operation without intermediate rounding. The
    maximum of a row, however, is a rounded number: at large logits the largest score minus the
    maximum would be up to half a unit in the last place instead of 0, and its exponential 0 or
    infinite. A selection separates product and difference on every platform. XLA for CPUs drops
    barriers before it fuses, and LLVM drops a `reduce_precision` to the number's own digits.
    """
    return jnp.where(jnp.isnan(scores), jnp.nan, scores)


def weights(
    scores: Scores, maximum: Float[Array, " t"], log_total: Float[Array, " t"], masked: bool = True
) -> Float[Array, "t s"]:
    """Computes the weights of a tile from the normalizers of its rows; `maximum` must not be −inf.

    Masked pairs have weight 0 even in a row that is NaN. `masked=False` is for tiles in which
    nothing is masked.
    """
    unmasked = jnp.exp((scores - maximum[:, None]) - log_total[:, None])
    return jnp.where(scores == -jnp.inf, 0, unmasked) if masked else unmasked


def empty(rows: int, width: int, dtype: DTypeLike) -> Partial:
    """Returns the identity: the contribution of no keys."""
    return Partial(
        jnp.full((rows,), _lowest(dtype), dtype),
        jnp.zeros((rows,), dtype),
        jnp.zeros((rows, width), dtype),
    )


def of(
    scores: Scores,
    weigh: Callable[[Float[Array, "t s"]], Float[Array, "t V"]],
    differentiable: bool = True,
) -> Partial:
    """Computes the contribution of the keys with `scores` [t, s]; `weigh` multiplies by the values.

    A score of −inf is a masked key: its weight is exp(−inf), exactly 0. Derivatives need this even
    in rows that hold NaN, hence the selection if `differentiable`; without it XLA fuses maximum,
    exponential and sum with the products around them.
    """
    maximum = jnp.max(jax.lax.stop_gradient(scores), axis=-1, initial=_lowest(scores.dtype))
    if differentiable:
        maximum = jnp.where(jnp.isnan(maximum), 0, maximum)
    exponential = jnp.exp(scores - maximum[:, None])
    return Partial(maximum, jnp.sum(exponential, axis=-1), weigh(exponential))


def combine(a: Partial, b: Partial) -> Partial:
    """Combines two contributions. Associative and commutative, with `empty` as identity."""
    maximum = jnp.maximum(a.maximum, b.maximum)
    scale_a, scale_b = jnp.exp(a.maximum - maximum), jnp.exp(b.maximum - maximum)
    return Partial(
        maximum,
        a.total * scale_a + b.total * scale_b,
        a.weighted * scale_a[:, None] + b.weighted * scale_b[:, None],
    )


def denominator(partial: Partial) -> Float[Array, " t"]:
    """Returns the divisor of a row: its total, or 1 for a row without keys or with NaN.

    A quotient by NaN would also reach the keys that are masked for the row.
    """
    return jnp.where((partial.total == 0) | jnp.isnan(partial.total), 1, partial.total)


def finish(partial: Partial) -> tuple[Float[Array, "t V"], Normalizer]:
    """Returns the output of a row and its normalizer; 0 and −inf without keys.

    A row that attends to NaN is set to NaN by selection, which cuts its cotangent.
    """
    broken, total = jnp.isnan(partial.total), denominator(partial)
    out = jnp.where(broken[:, None], jnp.nan, partial.weighted / total[:, None])
    maximum = jnp.where(partial.total == 0, -jnp.inf, partial.maximum)
    return out, Normalizer(jnp.where(broken, jnp.nan, maximum), jnp.log(total))


def quotient(partial: Partial) -> tuple[Float[Array, "t V"], Normalizer]:
    """Computes the results of `finish` where no derivative is taken.

    Nothing stands between sum and quotient, so that XLA fuses them with the product.
    """
    total = jnp.maximum(partial.total, jnp.finfo(partial.total.dtype).tiny)
    dead = partial.total == 0
    maximum = jnp.where(dead, -jnp.inf, partial.maximum)
    log_total = jnp.where(dead, 0, jnp.log(total))
    return partial.weighted / total[:, None], Normalizer(maximum, log_total)


def greatest(values: Float[Array, "..."]) -> Float[Array, ""]:
    """Returns the greatest magnitude, in the dtype of sums, as a constant; NaN if any is NaN."""
    most = jnp.max(jnp.abs(jax.lax.stop_gradient(values)), initial=0)
    return most.astype(accumulation(values.dtype))


def headroom(greatest: Float[Array, ""], terms: Size) -> Float[Array, ""]:
    """Returns a factor for values with which a sum of this number of terms cannot overflow.

    A power of two; 1 if the sum cannot overflow without it.
    """
    terms = max(1, terms) if isinstance(terms, int) else 2**31  # a symbol is any number
    limit = float(jnp.finfo(greatest.dtype).max) / (2 * terms)
    factor = 2.0 ** -math.ceil(math.log2(2 * terms))
    return jnp.where(greatest > limit, factor, 1).astype(greatest.dtype)


def join(out: Float[Array, "P *t V"], normalizer: Normalizer) -> tuple[Array, Normalizer]:
    """Merges P normalised parts of the keys, `[P, ...]` each.

    With maxima and logs kept separate, the shares are exact at any logits.
    """
    if len(out) == 1:
        return out[0], Normalizer(*(x[0] for x in normalizer))
    top = jnp.max(normalizer.maximum, axis=0, keepdims=True)
    shift = jnp.where(top == -jnp.inf, 0, top)
    shares = jnp.exp((normalizer.maximum - shift) + normalizer.log_total)
    total = jnp.sum(shares, axis=0, keepdims=True)
    total = jnp.where(total == 0, 1, total)
    weighted = jnp.sum((shares / total)[..., None] * out, axis=0)
    return weighted, Normalizer(top[0], jnp.log(total[0]))


def join_pair(a: tuple[Array, Normalizer], b: tuple[Array, Normalizer]) -> tuple[Array, Normalizer]:
    """Merges two parts like `join`, but unstacked: `(out [..., V], normalizer [...])` each."""
    top = jnp.maximum(a[1].maximum, b[1].maximum)
    shift = jnp.where(top == -jnp.inf, 0, top)
    shares = [jnp.exp((x.maximum - shift) + x.log_total) for _, x in (a, b)]
    total = shares[0] + shares[1]
    total = jnp.where(total == 0, 1, total)
    first, second = (
        (share / total)[..., None] * out for share, (out, _) in zip(shares, (a, b), strict=True)
    )
    return first + second, Normalizer(top, jnp.log(total))


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

    Each part is `(out [*B, T, N, V], lse [*B, N, T])`, as `attention(..., return_lse=True)` returns
    it. A part without keys, `(0, −inf)`, changes nothing. Differentiable in all inputs. The results
    have the dtypes of the first part; sums run in float32, or in float64 if any input is float64.

    Raises ValueError for no parts or parts whose shapes do not fit together.

    >>> first = jattn.attention(q, k[:, :3], v[:, :3], return_lse=True)
    >>> rest = jattn.attention(q, k[:, 3:], v[:, 3:], return_lse=True)
    >>> bool(jnp.allclose(jattn.merge(first, rest)[0], jattn.attention(q, k, v), atol=1e-5))
    True
    """
    if not parts:
        raise ValueError("merge: expected at least one part (out, lse), got none")
    for place, part in enumerate(parts):
        if not isinstance(part, tuple | list) or len(part) != 2:
            kind = type(part).__name__
            raise TypeError(f"merge: part {place}: expected a pair (out, lse), got {kind}")
        out, lse = part
        _check_part(f"merge: part {place}", out, lse)
        if out.shape != parts[0][0].shape:
            raise ValueError(
                f"merge: part {place} has out {list(out.shape)}, "
                f"part 0 has {list(parts[0][0].shape)}"
            )
    with jax.disable_jit(False):  # NaN and −inf arise before the selection: compile them away
        return _merged(parts)


@jax.jit
def _merged(parts: tuple[tuple[Output, LogSumExp], ...]) -> tuple[Output, LogSumExp]:
    doubles = any(x.dtype == jnp.float64 for x in jax.tree.leaves(parts))
    wide = jnp.float64 if doubles else jnp.float32
    lses = [rounded(lse.astype(wide)) for _, lse in parts]
    top = jax.lax.stop_gradient(functools.reduce(jnp.maximum, lses, _lowest(wide)))
    weights = [jnp.exp(lse - top) for lse in lses]
    total = sum(weights[1:], start=weights[0])
    dead = total == 0
    total = jnp.where(dead, 1, total)
    shares = [jnp.swapaxes(w / total, -1, -2)[..., None] for w in weights]  # [*B, T, N, 1]
    first, *rest = (
        share * out.astype(share.dtype) for share, (out, _) in zip(shares, parts, strict=True)
    )
    merged = jnp.where(dead, -jnp.inf, top + jnp.log(total))
    out, lse = parts[0]
    return sum(rest, start=first).astype(out.dtype), merged.astype(lse.dtype)


@may_be_minus_infinity(1)
def with_sink(
    out: Output, lse: LogSumExp, sink: float | Float[AnyArray, "..."]
) -> tuple[Output, LogSumExp]:
    """Adds to each head's softmax a learned logit without a value ("attention sink").

    The weights of a row then sum to less than one: out × σ(lse − sink) and lse = log(exp lse + exp
    sink). `sink` is `[N]`, or a number for all heads, in the units of the scores after scaling;
    −inf changes nothing. After gpt-oss (2025); Xiao et al. 2023 show the need.

    Raises TypeError and ValueError for inputs that do not fit, and for known sinks of NaN or +inf.

    >>> jattn.with_sink(jnp.ones((1, 1, 1)), jnp.zeros((1, 1)), 0.0)[0].item()
    0.5
    """
    _check_part("with_sink", out, lse)
    by_head = sink_by_head("with_sink: sink", sink, out.shape[-2]).astype(lse.dtype)
    by_head = by_head.reshape((1,) * (lse.ndim - 2) + (-1, 1))
    return merge((out, lse), (jnp.zeros_like(out), jnp.broadcast_to(by_head, lse.shape)))


def sink_by_head(name: str, sink: Any, N: int) -> Float[Array, " N"]:
    """Returns a sink as one logit for each head.

    Raises TypeError and ValueError for anything that is not a sink.
    """
    is_number = isinstance(sink, int | float) and not hasattr(sink, "dtype")
    if not is_number:
        check_array(name, sink, "[N] or without axes")
    elif sink != -math.inf:
        check_number(name, sink)
    if np.shape(sink) not in ((), (N,)):
        got = list(np.shape(sink))
        raise ValueError(f"{name}: expected [N] = [{N}] or a scalar, got {got}")
    if is_known(sink) and not np.all(np.asarray(sink) < np.inf):
        raise ValueError(f"{name}: expected finite logits or -inf, got {shown(sink)}")
    return jnp.broadcast_to(jnp.asarray(sink, jnp.float32 if is_number else None), (N,))


@jax.jit
def with_sink_in_weights(
    weights: Float[Array, "*B N T S"], lse: LogSumExp, sink: Float[Array, " N"]
) -> Float[Array, "*B N T S"]:
    """Adds a sink to weights with log-sum-exp `lse`; a row then sums to less than 1."""
    nothing = jnp.zeros((*jnp.swapaxes(lse, -1, -2).shape, 0), lse.dtype)
    _, total = with_sink(nothing, lse, sink)
    dead = lse == -jnp.inf
    share = jnp.exp(jnp.where(dead, -jnp.inf, lse - jnp.where(dead, 0, total)))
    return weights * share[..., None].astype(weights.dtype)
