"""Normalizers: functions from the scores of a query to its weights. The default is the softmax.

There are two kinds. The weight of a *pointwise* normalizer depends on the score of its pair only,
so that kernels compute it tile by tile, as a last score function (`PointwiseNormalizer`). Any other
normalizer needs all scores of a query (`NormalizerFunction.weights`).

A masked pair has the weight 0. A query whose keys are all masked has the output 0. Like masks and
score functions, normalizers are frozen pytrees: numbers are part of the structure, and float arrays
are differentiable parameters.
"""

import dataclasses
import functools
import math
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jattn._pytree import (
    HoldsTree,
    in_dtype,
    letters_by_head,
    number,
    pytree_dataclass,
    static_field,
)
from jattn._types import Index, Scores, Size
from jattn.checks import (
    check_choice,
    check_number,
    check_operands,
    check_pytree,
    check_rule,
    check_size,
    function_name,
    shown,
)
from jattn.scores import Score, ScoreFunction, as_score
from jattn.softmax import quotient


__all__ = [
    "Entmax",
    "Exp",
    "Identity",
    "NormalizerFunction",
    "Pointwise",
    "PointwiseNormalizer",
    "Relu",
    "Running",
    "Sigmoid",
    "Softmax",
    "SoftmaxPlusOne",
    "Sparsemax",
    "StickBreaking",
    "TopK",
]
__dir__ = __all__.copy


class NormalizerFunction:
    """The base class of normalizers.

    A subclass is registered as a pytree: with `jax.tree_util.register_static` if it has no float
    arrays, else with `jax.tree_util.register_dataclass`. Its arrays are passed whole. This is a
    softmax with a temperature for each head:

    >>> import dataclasses
    >>> @jax.tree_util.register_dataclass
    ... @dataclasses.dataclass(frozen=True)
    ... class Tempered(normalizers.NormalizerFunction):
    ...     temperatures: jax.Array  # [N]
    ...
    ...     def weights(self, score, b, h, rows, columns):
    ...         allowed = score != -jnp.inf
    ...         scaled = jnp.where(allowed, score, 0) / self.temperatures[h]
    ...         return jax.nn.softmax(scaled, axis=-1, where=allowed)
    >>> tempered = Tempered(jnp.ones(4))
    >>> out = jattn.attention(q, k, v, mask=masks.Causal(), normalizer=tempered)

    The first `where` is for the gradient of the temperatures, which would be −inf × 0 = NaN.

    A subclass whose weights depend on the order of the keys sets `needs_order = True`, so that
    caches that store keys in another order are refused.
    """

    needs_order = False

    def weights(self, score: Scores, b: Index, h: Index, rows: Any, columns: Any) -> Scores:
        """Returns the weights `[t, S]` of the scores `[t, S]` of all keys of t queries.

        The score of a masked pair is −inf, and its weight must be 0. No derivative may multiply
        this score: replace it before arithmetic with parameters. The arguments after `score` are
        those of `ScoreFunction.evaluate`.
        """
        raise NotImplementedError

    def for_keys(self, count: Size | None) -> "NormalizerFunction":
        """Returns the normalizer to use in a call with `count` keys.

        In calls on a cache `count` is None, and a normalizer that depends on it raises ValueError.
        """
        return self

    def __bool__(self) -> bool:
        raise TypeError("a normalizer is neither true nor false; write `normalizer is None`")


class PointwiseNormalizer(NormalizerFunction):
    """The base class of normalizers whose weights depend on the score of their pair only."""

    def evaluate(self, score: Scores, b: Index, h: Index, rows: Any, columns: Any) -> Scores:
        """Maps scores to weights, with the arguments of `ScoreFunction.evaluate`."""
        raise NotImplementedError

    def weights(self, score, b, h, rows, columns):
        # A derivative at a masked score may be NaN, and 0 × NaN would reach the gradients.
        masked = score == -jnp.inf
        weights = self.evaluate(jnp.where(masked, 0, score), b, h, rows, columns)
        return jnp.where(masked, 0, weights)


def as_normalizer(value: Any) -> NormalizerFunction | None:
    """Converts a value to a normalizer; None stands for the softmax.

    Normalizers are returned unchanged, except that a `Softmax` becomes None. A function becomes a
    `Pointwise`. The attribute `layer.normalizer` of a layer of `jattn.nn`, an NNX module that wraps
    the layer's normalizer, becomes this normalizer. Raises TypeError for anything else.
    """
    may_be_module = not isinstance(value, NormalizerFunction | types.FunctionType | None)
    if may_be_module and isinstance(value, HoldsTree):
        value = value.held_tree()
    if value is None or isinstance(value, Softmax):
        return None
    if isinstance(value, NormalizerFunction):
        check_pytree("normalizer", value)
        return value
    if callable(value) and not isinstance(value, type):
        return Pointwise(value)
    hint = ""
    if isinstance(value, type) and issubclass(value, NormalizerFunction):
        hint = f"; write {value.__name__}(...), an instance"
    raise TypeError(
        "normalizer: expected a jattn normalizer, a function of a score or None, got "
        f"{shown(value)}{hint}"
    )


NormalizerLike = NormalizerFunction | Callable[..., Any] | HoldsTree | None
"""Values accepted as `normalizer`; see `as_normalizer`."""


# --- pointwise ----------------------------------------------------------------------------------


@pytree_dataclass
class Identity(PointwiseNormalizer):
    """The scores as weights: linear attention, `out = (q kᵀ × scale) v`. The weight of a score of
    −inf is 0.

    >>> w = jattn.attention_weights(q, k, normalizer=normalizers.Identity())
    >>> bool((w == jattn.attention_scores(q, k)).all())
    True
    """

    def evaluate(self, score, b, h, rows, columns):
        return jnp.where(score == -jnp.inf, 0, score)


@pytree_dataclass
class Sigmoid(PointwiseNormalizer):
    """The weights sigmoid(score + bias) (Ramapuram et al. 2024, "Theory, analysis, and best
    practices for sigmoid self-attention").

    `bias` is a number, or a float array: a scalar or `[N]`. By default it is −log S for S keys, the
    masked ones included, so that weights of scores near 0 sum to about 1. Calls on a cache must
    pass a bias, because a cache has more slots than keys.

    >>> w = jattn.attention_weights(0 * q, k, normalizer=normalizers.Sigmoid())
    >>> w[0, 0, 0, 0].round(3).item()
    0.125
    """

    bias: Any = None

    def __post_init__(self):
        if self.bias is not None:
            check_number("Sigmoid: bias", self.bias, per_head=True)

    def axis_names_by_value(self) -> dict[str, str]:
        """The axis names of `bias`: none for a scalar, `N` for one number per head."""
        return {} if self.bias is None else {"bias": letters_by_head(self.bias)}

    def for_keys(self, count):
        if self.bias is not None:
            return self
        advice = (
            "; the default, -log S, depends on the number of keys: pass a number, as in "
            "Sigmoid(-4.0)"
        )
        return Sigmoid(-math.log(_known_count("Sigmoid: bias", "a bias", count, advice)))

    def evaluate(self, score, b, h, rows, columns):
        return jax.nn.sigmoid(score + in_dtype(self.bias, score.dtype))


@pytree_dataclass
class Relu(PointwiseNormalizer):
    """The weights max(score, 0)^power / (divisor × S^count_power), for S keys, the masked ones
    included.

    All three are numbers; `power` is at least 1. Wortsman et al. 2023, "Replacing softmax with ReLU
    in vision transformers", use count_power 1; So et al. 2021, "Primer", use power 2. Calls on a
    cache need count_power 0, because a cache has more slots than keys.

    >>> jattn.attention(q, k, v, normalizer=normalizers.Relu(2, count_power=1)).shape
    (2, 5, 4, 8)
    """

    power: Any = 1
    count_power: Any = 0
    divisor: Any = 1.0

    def __post_init__(self):
        for name in ("power", "count_power"):
            check_number(f"Relu: {name}", getattr(self, name))
        check_number("Relu: divisor", self.divisor, positive=True)
        for name in ("power", "count_power", "divisor"):
            if not isinstance(getattr(self, name), int | float):
                raise TypeError(f"Relu: {name}: expected a number, got an array")
        if not self.power >= 1:
            raise ValueError(f"Relu: power: expected a number of at least 1, got {self.power!r}")

    def for_keys(self, count):
        if not self.count_power:
            return self
        known = _known_count("Relu: count_power", "count_power 0", count)
        return Relu(self.power, divisor=self.divisor * known**self.count_power)

    def evaluate(self, score, b, h, rows, columns):
        # `where` keeps NaN, and makes all derivatives at 0 zero, even the second one of a power
        # between 1 and 2.
        is_zero = score <= 0
        power, base = number(self.power), jnp.where(is_zero, 1, score)
        powered = jnp.where(is_zero, 0, base if power == 1 else base**power)
        return powered if self.divisor == 1 else powered / number(self.divisor)


@pytree_dataclass
class Exp(PointwiseNormalizer):
    """The weights exp(score): a softmax without the division.

    >>> w = jattn.attention_weights(q, k, normalizer=normalizers.Exp())
    >>> bool(jnp.allclose(jnp.log(w), jattn.attention_scores(q, k), atol=1e-5))
    True
    """

    def evaluate(self, score, b, h, rows, columns):
        return jnp.exp(score)


def Pointwise(fn: Callable[..., Any], *operands: Any) -> PointwiseNormalizer:
    """Returns the normalizer with the weights `fn(score, *operands)`, for scalars.

    Operands are passed whole; the float ones are differentiable parameters. Other variables that
    the function reads are treated as in `scores.Score`. A function may be passed as the
    normalizer itself:

    >>> jattn.attention(q, k, v, normalizer=jax.nn.softplus).shape
    (2, 5, 4, 8)

    Raises TypeError if `fn` does not take these arguments. Calls of attention raise TypeError if it
    does not return a float scalar, or sums or otherwise reduces the score.
    """
    check_rule("normalizer", fn, ("score",), operands)
    check_operands("Pointwise", operands)

    def weight(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, *operands: Any) -> Any:
        return fn(score, *operands)

    weight.__name__ = function_name(fn)
    return _ByScore(_Weight(weight, *operands))


@pytree_dataclass
class _Weight(Score):
    """A weight, given by a function with the arguments of a score function."""

    owner = "normalizer"
    __init__ = Score.__init__  # `dataclass` would make one without checks


@pytree_dataclass
class _ByScore(PointwiseNormalizer):
    """The pointwise normalizer whose weights are the values of a score function."""

    score: ScoreFunction

    def evaluate(self, score, b, h, rows, columns):
        return self.score.evaluate(score, b, h, rows, columns)


def _known_count(name: str, expected: str, count: Size | None, advice: str = "") -> int:
    """Returns the number of keys, at least 1; raises ValueError if it is not known."""
    if not isinstance(count, int):
        call = f"with symbolic S = {count}"
        if count is None:
            call = "on a cache, which has more slots than keys"
        raise ValueError(f"{name}: expected {expected} in a call {call}{advice}")
    return max(1, count)


# --- whole rows ---------------------------------------------------------------------------------


@pytree_dataclass
class Softmax(NormalizerFunction):
    """The softmax, which `normalizer=None` stands for.

    >>> bool((jattn.attention(q, k, v, normalizer=normalizers.Softmax()) == out).all())
    True
    """

    def weights(self, score, b, h, rows, columns):
        allowed = score > -jnp.inf
        greatest = _greatest(score)
        weights = jnp.exp(jnp.where(allowed | jnp.isnan(score), score, greatest) - greatest)
        weights = jnp.where(allowed | jnp.isnan(score), weights, 0)
        return quotient(weights, weights.sum(axis=-1, keepdims=True))


@pytree_dataclass
class SoftmaxPlusOne(NormalizerFunction):
    """The weights exp(score) / (1 + Σ exp(score)) (Miller 2023, "Attention is off by one").

    It is the softmax with a sink of 0: `attention(..., sink=0.0)`.

    >>> w = jattn.attention_weights(0 * q, k, normalizer=normalizers.SoftmaxPlusOne())
    >>> w[0, 0, 0, 0].round(3).item()
    0.125
    """

    def weights(self, score, b, h, rows, columns):
        greatest = jnp.maximum(_greatest(score), 0)
        weights = jnp.exp(score - greatest)
        return weights / (jnp.exp(-greatest) + weights.sum(axis=-1, keepdims=True))


@pytree_dataclass
class Entmax(NormalizerFunction):
    """The weights [(α − 1) score − τ]₊^{1/(α − 1)}, with the τ of each query for which they sum to
    1 (Peters et al. 2019, "Sparse sequence-to-sequence models").

    α is a number above 1. Near 1 the weights are those of the softmax; the greater α is, the fewer
    keys have a weight above 0. α = 2 is `Sparsemax`. τ is computed up to rounding, by Newton's
    method for α ≤ 2 and by bisection for larger α. The power of a large α also amplifies the
    rounding of scores, and in float32 weights below 10^(−38/(α − 1)) are 0. Gradients are those of
    the implicit function: only keys with a weight above 0 have one.

    >>> w = jattn.attention_weights(q, k, normalizer=normalizers.Entmax(1.5))
    >>> w.sum(-1).round(5).min().item()
    1.0
    """

    alpha: Any = 1.5

    def __post_init__(self):
        check_number("Entmax: alpha", self.alpha)
        if not isinstance(self.alpha, int | float):
            raise TypeError(
                "Entmax: alpha: expected a Python number, got an array; alpha cannot be learned"
            )
        if not 1 < self.alpha < math.inf:
            raise ValueError(f"Entmax: alpha: expected a number above 1, got {self.alpha!r}")

    def weights(self, score, b, h, rows, columns):
        return _entmax(float(number(self.alpha)), score)


@pytree_dataclass
class Sparsemax(NormalizerFunction):
    """The weights max(score − τ, 0), with the τ of each query for which they sum to 1 (Martins and
    Astudillo 2016, "From softmax to sparsemax").

    >>> w = jattn.attention_weights(9 * q, k, normalizer=normalizers.Sparsemax())
    >>> (w > 0).sum(-1).max().item() < 7
    True
    """

    def weights(self, score, b, h, rows, columns):
        return _entmax(2.0, score)


@pytree_dataclass
class TopK(NormalizerFunction):
    """The softmax over the k greatest scores of each query.

    All scores that equal the k-th greatest are included, so there may be more than k. Gradients
    flow through the included scores only.

    >>> w = jattn.attention_weights(q, k, normalizer=normalizers.TopK(3))
    >>> (w > 0).sum(-1).max().item()
    3
    """

    k: int = static_field()

    def __post_init__(self):
        check_size("k", self.k)

    def for_keys(self, count):
        if not isinstance(count, int | None):
            raise ValueError(f"TopK: expected an integer S, got the symbol {count}")
        return self

    def weights(self, score, b, h, rows, columns):
        if self.k < score.shape[-1]:
            least = jax.lax.stop_gradient(jax.lax.top_k(score, self.k)[0][..., -1:])
            score = jnp.where(score < least, -jnp.inf, score)
        return Softmax().weights(score, b, h, rows, columns)


@pytree_dataclass
class Running(NormalizerFunction):
    """A normalizer of scores that are combined with the terms of all later keys.

    For an associative operation ∘, key j of a query has the weight that `normalizer` computes from

        score_j ∘ term_{j+1} ∘ term_{j+2} ∘ … ∘ term_S      over the allowed keys

    in the order in which the keys are stored. Calls on a `RollingCache` raise NotImplementedError.

    term: a score function, or a function with its arguments, that maps a score to a term.
    score: the same for score_j in the formula; by default the score itself.
    normalizer: the normalizer of the combined scores.
    combine: the operation: "add", "multiply", "maximum", "minimum", or an associative function of
        two scalars, such as `jnp.logaddexp`.
    identity: the number e with e ∘ x = x ∘ e = x, required if `combine` is a function, such as −inf
        for `logaddexp`.

    The forgetting transformer (Lin et al. 2025) adds the logs of the forget gates between a key and
    the query:

    >>> log_gates = jax.nn.log_sigmoid(jnp.ones((2, 4, 7)))
    >>> term = scores.Score(lambda score, b, h, q, kv, gates: gates[b, h, kv], log_gates)
    >>> fox = normalizers.Running(term)
    >>> jattn.attention(q, k, v, mask=masks.Causal(), normalizer=fox).shape
    (2, 5, 4, 8)
    """

    term: Any
    score: Any = None
    normalizer: Any = Softmax()
    combine: Any = "add"
    identity: Any = None
    needs_order = True

    def __post_init__(self):
        if self.term is None:
            raise TypeError("Running: term: expected a score function, got None")
        term, score = as_score(self.term, "Running: term"), as_score(self.score, "Running: score")
        normalizer = as_normalizer(self.normalizer)
        softmax = Softmax() if normalizer is None else normalizer
        vars(self).update(term=term, score=score, normalizer=softmax)
        vars(self).update(combine=self._checked_operation())
        if isinstance(normalizer, SoftmaxPlusOne):
            raise ValueError("Running: normalizer: expected one without a sink, got SoftmaxPlusOne")

    def _checked_operation(self) -> Any:
        operation, identity = self.combine, self.identity
        is_function = callable(operation)
        if not is_function:
            check_choice("Running: combine", operation, tuple(_OPERATIONS))
        is_number = isinstance(identity, int | float) and not math.isnan(identity)
        if is_number != is_function or (identity is not None and not is_number):
            expected = "a number, as combine is a function" if is_function else "None"
            raise ValueError(f"Running: identity: expected {expected}, got {shown(identity)}")
        if not callable(operation):
            return _OperationName(operation)
        return operation if isinstance(operation, _Operation) else _Operation(operation)

    def for_keys(self, count):
        return dataclasses.replace(self, normalizer=self.normalizer.for_keys(count))

    def weights(self, score, b, h, rows, columns):
        allowed, indices = score > -jnp.inf, (b, h, rows, columns)
        allowed = allowed | jnp.isnan(score)
        zeroed = jnp.where(allowed, score, 0)
        combine, identity = _OPERATIONS.get(self.combine, (self.combine, self.identity))
        if callable(self.combine) and math.isinf(identity):
            combine = functools.partial(_combine_finite, combine, identity)
        first = zeroed if self.score is None else self.score.evaluate(zeroed, *indices)
        terms = jnp.where(allowed, self.term.evaluate(zeroed, *indices), identity)
        combined = combine(first, _later(combine, identity, terms))
        return self.normalizer.weights(jnp.where(allowed, combined, -jnp.inf), *indices)


@jax.tree_util.register_static
class _OperationName(str):
    """The name of an operation, as a part of a pytree's structure."""


@pytree_dataclass
class _Operation(Score):
    """An operation given by a function of two scalars."""

    owner = "Running: combine"
    arguments = ("left", "right")
    __init__ = Score.__init__  # `dataclass` would make one without checks

    def _examples(self, dtype: Any) -> tuple[Any, ...]:
        return (jax.ShapeDtypeStruct((), dtype),) * 2

    def __call__(self, left: Scores, right: Scores) -> Scores:
        return jnp.vectorize(self._scalar)(left, right)


_OPERATIONS: dict[Any, tuple[Callable[[Any, Any], Any], float]] = {
    "add": (jnp.add, 0.0),
    "multiply": (jnp.multiply, 1.0),
    "maximum": (jnp.maximum, -math.inf),
    "minimum": (jnp.minimum, math.inf),
}
"""The operations of `Running`, each with its identity."""


def _combine_finite(
    combine: Callable[[Any, Any], Any], identity: float, left: Scores, right: Scores
) -> Scores:
    """Combines scores; where one is the identity, which is infinite, returns the other.

    Derivatives at infinite numbers may be NaN, such as those of `logaddexp(-inf, -inf)`.
    """
    is_left, is_right = left == identity, right == identity
    finite_left, finite_right = (jnp.where(is_left | is_right, 0, x) for x in (left, right))
    combined = combine(finite_left, finite_right)
    return jnp.where(is_left, right, jnp.where(is_right, left, combined))


def _later(combine: Callable[[Any, Any], Any], identity: float, terms: Scores) -> Scores:
    """Combines, for each key of `[t, S]`, the terms of all later keys."""
    if combine is jnp.add:
        inclusive = jax.lax.cumsum(terms, axis=1, reverse=True)
    else:
        # A reverse scan calls its function with the later terms first.
        inclusive = jax.lax.associative_scan(
            lambda later, term: combine(term, later), terms, reverse=True, axis=1
        )
    return jnp.pad(inclusive, ((0, 0), (0, 1)), constant_values=identity)[:, 1:]


@pytree_dataclass
class StickBreaking(NormalizerFunction):
    """The weights β_j Π_{k>j} (1 − β_k) with β = sigmoid(score), over the allowed keys (Tan et al.
    2024, "Scaling stick-breaking attention").

    The last key takes its share β of a stick of length 1, the key before it its share of the rest,
    and so on. Keys count in the order in which they are stored; use it with `masks.Causal`. It is
    `Running` with sums of log(1 − β) and the normalizer `Exp`. Calls on a `RollingCache` raise
    NotImplementedError.

    >>> w = jattn.attention_weights(0 * q, k, normalizer=normalizers.StickBreaking())
    >>> print(w[0, 0, 0, -3:])
    [0.125 0.25  0.5  ]
    """

    needs_order = True

    def weights(self, score, b, h, rows, columns):
        allowed = (score > -jnp.inf) | jnp.isnan(score)
        overflows = jnp.any(score == jnp.inf, axis=-1, keepdims=True)  # then the row is NaN
        zeroed = jnp.where(allowed, jnp.where(overflows, jnp.nan, score), 0)
        rest = _later(jnp.add, 0.0, jnp.where(allowed, jax.nn.log_sigmoid(-zeroed), 0))
        return jnp.where(allowed, jnp.exp(jax.nn.log_sigmoid(zeroed) + rest), 0)


# --- numbers ------------------------------------------------------------------------------------


def _greatest(score: Scores) -> Float[Array, "t 1"]:
    """Returns the greatest score of each query, 0 without keys."""
    greatest = jax.lax.stop_gradient(jnp.max(score, axis=-1, keepdims=True, initial=-jnp.inf))
    return jnp.where(greatest == -jnp.inf, 0, greatest)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _entmax(alpha: float, score: Scores) -> Scores:
    """Computes the weights of `Entmax`.

    With p = 1/(α − 1), the weights are ((α − 1)(score − greatest) − τ)₊^p. Scores that are p or
    more below the greatest have no influence. For α ≤ 2 the weights are computed as
    (1 + (α − 1)(score − greatest − t))₊^p, because near α = 1 the unknown t = (τ + 1) p keeps the
    digits that τ loses. For α > 2 the power p < 1 amplifies the rounding of τ. So τ is a sum of
    numbers, each of which is subtracted before the next is solved for. They have the digits of
    (α − 1)(score − greatest) − τ for weights down to 0.001.
    """
    power = 1 / (alpha - 1)
    # The least score is −2 p, as −p could be rounded up, and would then have a weight.
    score_below = jnp.maximum(score - _greatest(score), -2 * power)
    if alpha <= 2:
        weights = _raised((alpha - 1) * (score_below - _newton(score_below, alpha)), power)
    else:
        dtype = jnp.finfo(score.dtype)
        bits = min(10 * (alpha - 1), -int(dtype.minexp))
        for _ in range(1 + math.ceil(bits / dtype.nmant)):
            score_below = score_below - _bisection(score_below, alpha)
        weights = _powered(score_below, alpha)
    has_keys = jnp.any((score > -jnp.inf) | jnp.isnan(score), axis=-1, keepdims=True)
    weights = jnp.where(has_keys, weights, 0)
    # The sum is 1 up to the rounding of τ, which the power may amplify.
    total = weights.sum(axis=-1, keepdims=True)
    return weights / jnp.where(has_keys, total, 1)


def _raised(x: Scores, power: float) -> Scores:
    """Computes (1 + x)₊^power, also for large powers and small x; it is 0 at −1."""
    is_zero = x <= -1
    x = jnp.where(is_zero, 0, x)
    if power in (0, 1, 2):
        return jnp.where(is_zero, 0, (1 + x) ** power)
    # XLA's log1p in float64 loses two digits between −0.415 and −0.29.
    log = jnp.where(x < -0.25, jnp.log(1 + x), jnp.log1p(x))
    return jnp.where(is_zero, 0, jnp.exp(power * log))


_MAX_STEPS = 100  # of Newton's method, which takes about 10, and log S more near α = 1


def _newton(score_below: Scores, alpha: float) -> Float[Array, "t 1"]:
    """Solves Σ (1 + (α − 1)(score_below − t))₊^{1/(α − 1)} = 1 by Newton's method, for α ≤ 2.

    The sum is at least 1 at t = 0 and a convex function of t, so that no step passes the solution.
    """
    power = 1 / (alpha - 1)

    def step(state: tuple[Array, Array, Any]) -> tuple[Array, Array, Any]:
        shift, _, n = state
        x = (alpha - 1) * (score_below - shift)
        slopes = _raised(x, power - 1)
        total = jnp.sum(slopes * (1 + x), axis=-1, keepdims=True)
        slope = jnp.sum(slopes, axis=-1, keepdims=True)
        following = shift + (total - 1) / jnp.where(slope > 0, slope, 1)
        following = jnp.clip(following, shift, power)
        return following, jnp.any(following > shift), n + 1

    initial = (jnp.zeros_like(score_below[..., :1]), jnp.array(True), 0)
    return jax.lax.while_loop(lambda x: x[1] & (x[2] < _MAX_STEPS), step, initial)[0]


def _powered(x: Scores, alpha: float) -> Scores:
    """Computes ((α − 1) x)₊^{1/(α − 1)}."""
    return jnp.maximum((alpha - 1) * x, 0) ** (1 / (alpha - 1))


def _bisection(score: Scores, alpha: float) -> Float[Array, "t 1"]:
    """Solves Σ ((α − 1)(score − t))₊^{1/(α − 1)} = 1 for t in [−2, 2] by bisection, to the last
    bit.

    It bisects the bits of t, as integers in the order of the floats: t may be so close to 0
    that bisection of its value would take hundreds of steps.
    """
    integers = jnp.dtype(f"int{jnp.finfo(score.dtype).bits}")
    most = jnp.iinfo(integers).max

    def turned(x: Array, dtype: Any) -> Array:
        """Converts floats to integers in the same order, or back."""
        bits = jax.lax.bitcast_convert_type(x, integers)
        return jax.lax.bitcast_convert_type(jnp.where(bits < 0, bits ^ most, bits), dtype)

    def step(_: Any, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = (low & high) + ((low ^ high) >> 1)  # the mean, without overflow
        weights = _powered(score - turned(middle, score.dtype), alpha)
        is_low = jnp.sum(weights, axis=-1, keepdims=True) >= 1
        return jnp.where(is_low, middle, low), jnp.where(is_low, high, middle)

    two = jnp.full_like(score[..., :1], 2)
    bounds = turned(-two, integers), turned(two, integers)
    low, _ = jax.lax.fori_loop(0, jnp.iinfo(integers).bits, step, bounds)
    return turned(low, score.dtype)


@_entmax.defjvp
def _entmax_jvp(alpha: float, primals: Any, tangents: Any) -> tuple[Scores, Scores]:
    """Computes the derivative by the implicit function theorem: dw = u (ds − Σ u ds / Σ u), with
    u = w^(2 − α) for keys with a weight above 0 and u = 0 for all others."""
    (score,), (d_score,) = primals, tangents
    weights = _entmax(alpha, score)
    has_weight = weights != 0  # true for NaN
    shares = jnp.where(has_weight, jnp.where(has_weight, weights, 1) ** (2 - alpha), 0)
    total = shares.sum(axis=-1, keepdims=True)
    d_score = jnp.where(has_weight, d_score, 0)
    mean = quotient(jnp.sum(shares * d_score, axis=-1, keepdims=True), total)
    return weights, shares * (d_score - mean)
