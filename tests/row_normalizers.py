"""Normalizers by definition, one query at a time, with derivatives in closed form.

The weights of a query are computed from the scores `[n]` of its allowed keys, in the dtype of the
scores: float64 or complex128 for the truth of `tests.oracle`, float32 for the textbook formula.
Like the oracle, this file imports neither the library nor JAX.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.oracle import At, Modifier, OracleNormalizer, ParameterTerms


Row = Any  # an array [n], one number for each allowed key


def _array(values: list[Any], like: Row) -> Row:
    return np.array(values, like.dtype)


def logistic(x: Any) -> Any:
    """1 / (1 + exp(−x)) without overflow."""
    return 1 / (1 + np.exp(-x)) if x.real > 0 else np.exp(x) / (1 + np.exp(x))


def parameter_terms(
    modifier: Modifier, scores: Row, cotangents: Any, pairs: list[At]
) -> ParameterTerms:
    """Returns the terms of the parameters of a function that maps each score to a number."""
    terms = []
    for name, rule in modifier.by_parameter.items():
        for score, cotangent, pair in zip(scores, cotangents, pairs, strict=True):
            index, slope = rule(score, pair)
            terms.append((name, index, cotangent * slope))
    return terms


def pointwise(modifier: Modifier) -> OracleNormalizer:
    """The normalizer whose weights are a function of the score of their pair."""

    def weights(scores: Row, pairs: list[At]) -> Row:
        return _array([modifier.value(*x) for x in zip(scores, pairs, strict=True)], scores)

    def pull(scores: Row, w: Row, dw: Row, pairs: list[At]) -> Any:
        slopes = [modifier.by_score(*x) for x in zip(scores, pairs, strict=True)]
        return dw * _array(slopes, scores), parameter_terms(modifier, scores, dw, pairs)

    return OracleNormalizer(weights, pull)


def _pull_softmax(scores: Row, w: Row, dw: Row, pairs: list[At]) -> Any:
    return w * (dw - np.sum(w * dw)), []


def softmax(plus_one: bool = False) -> OracleNormalizer:
    """exp(s) / Σ exp(s), with 1 added to the sum if `plus_one`."""

    def weights(scores: Row, pairs: list[At]) -> Row:
        top = max(scores.real.max(), 0) if plus_one else scores.real.max()
        exponentials = np.exp(scores - top)
        return exponentials / (np.sum(exponentials) + (np.exp(-top) if plus_one else 0))

    return OracleNormalizer(weights, _pull_softmax)


def top_k(k: int) -> OracleNormalizer:
    """The softmax over the scores that are at least as great as the k-th in decreasing order."""

    def weights(scores: Row, pairs: list[At]) -> Row:
        least = sorted(scores.real)[-min(k, len(scores))]
        chosen = scores.real >= least
        exponentials = np.where(chosen, np.exp(scores - scores.real.max()), 0)
        return exponentials / np.sum(exponentials)

    return OracleNormalizer(weights, _pull_softmax)


def _pull_entmax(alpha: float) -> Any:
    def pull(scores: Row, w: Row, dw: Row, pairs: list[At]) -> Any:
        shares = np.zeros_like(w)
        shares[w > 0] = w[w > 0] ** (2 - alpha)
        return shares * (dw - np.sum(shares * dw) / np.sum(shares)), []

    return pull


def sparsemax() -> OracleNormalizer:
    """max(s − τ, 0), where τ comes from the scores in decreasing order."""

    def weights(scores: Row, pairs: list[At]) -> Row:
        scores = scores - scores.real.max()  # as 1 + 10³⁰ is 10³⁰
        decreasing = scores[np.argsort(-scores.real, kind="stable")]
        sums: Row = np.cumsum(decreasing)
        counts = np.arange(1, len(scores) + 1, dtype=scores.real.dtype)
        support = int(np.sum(1 + counts * decreasing.real > sums.real))
        threshold: Row = (sums[support - 1] - 1) / counts[support - 1]
        return np.where(scores.real > threshold.real, scores - threshold, 0)

    return OracleNormalizer(weights, _pull_entmax(2.0))


def entmax(alpha: float) -> OracleNormalizer:
    """[(α − 1) s − τ]₊^{1/(α − 1)}, with τ by bisection.

    A last step of Newton's method gives τ the derivative along an imaginary step.
    """
    power = 1 / (alpha - 1)

    def weights(scores: Row, pairs: list[At]) -> Row:
        z = (alpha - 1) * (scores - scores.real.max())
        low, high = z.real.dtype.type(-1), z.real.dtype.type(0)
        while low < (middle := (low + high) / 2) < high:
            above = np.maximum(z.real - middle, 0)
            low, high = (middle, high) if np.sum(above**power) >= 1 else (low, middle)
        support = z.real > low
        above = z[support] - low
        step = (np.sum(above**power) - 1) / (power * np.sum(above ** (power - 1)))
        result = np.zeros_like(z)
        result[support] = np.where(above.real > step.real, above - step, 0) ** power
        return result

    return OracleNormalizer(weights, _pull_entmax(alpha))


def stick_breaking() -> OracleNormalizer:
    """β_j Π_{k>j} (1 − β_k) with β = 1 / (1 + exp(−s)), by products from the last key on."""

    def weights(scores: Row, pairs: list[At]) -> Row:
        result, rest = np.zeros_like(scores), scores.dtype.type(1)
        for j in reversed(range(len(scores))):
            result[j] = rest * logistic(scores[j])
            rest = rest * logistic(-scores[j])
        return result

    def pull(scores: Row, w: Row, dw: Row, pairs: list[At]) -> Any:
        ds, sum_before = np.zeros_like(scores), scores.dtype.type(0)
        for j, score in enumerate(scores):
            ds[j] = dw[j] * w[j] * logistic(-score) - logistic(score) * sum_before
            sum_before = sum_before + dw[j] * w[j]
        return ds, []

    return OracleNormalizer(weights, pull)


Operation = tuple[Callable[[Any, Any], Any], Callable[[Any, Any], tuple[Any, Any]]]
"""An operation of `running`, and its derivatives by both operands."""


def _choice(first: Callable[[Any, Any], bool]) -> Operation:
    """Takes the first operand if the function says so, else the second."""
    return (
        lambda a, b: a if first(a, b) else b,
        lambda a, b: (1, 0) if first(a, b) else (0, 1),
    )


OPERATIONS: dict[str, Operation] = {
    "add": (lambda a, b: a + b, lambda a, b: (1, 1)),
    "multiply": (lambda a, b: a * b, lambda a, b: (b, a)),
    "maximum": _choice(lambda a, b: a.real >= b.real),
    "minimum": _choice(lambda a, b: a.real <= b.real),
    "first_above_1": _choice(lambda a, b: abs(a.real) > 1),  # associative, but not commutative
}


def running(
    term: Modifier, first: Modifier, normalizer: OracleNormalizer, combine: str
) -> OracleNormalizer:
    """The normalizer of first_j ∘ term_{j+1} ∘ … ∘ term_n, by a loop from the last key on."""
    operate, derivatives = OPERATIONS[combine]

    def combined(scores: Row, pairs: list[At]) -> tuple[Row, list[Any]]:
        """Returns the combined scores, and for each key the combination of the later terms."""
        result, laters, later = [], [], None
        for score, pair in zip(scores[::-1], pairs[::-1], strict=True):
            number, own_term = first.value(score, pair), term.value(score, pair)
            laters.append(later)
            result.append(number if later is None else operate(number, later))
            later = own_term if later is None else operate(own_term, later)
        return _array(result[::-1], scores), laters[::-1]

    def weights(scores: Row, pairs: list[At]) -> Row:
        return normalizer.weights(combined(scores, pairs)[0], pairs)

    def pull(scores: Row, w: Row, dw: Row, pairs: list[At]) -> Any:
        sums, laters = combined(scores, pairs)
        d_sums, terms = normalizer.pull(sums, w, dw, pairs)
        ds, d_first, d_term, d_later = *(np.zeros_like(scores) for _ in range(3)), 0.0
        for j, (score, pair, later) in enumerate(zip(scores, pairs, laters, strict=True)):
            a, b = (1, 0), (1, 0)
            if later is not None:
                a = derivatives(first.value(score, pair), later)
                b = derivatives(term.value(score, pair), later)
            d_first[j], d_term[j] = d_sums[j] * a[0], d_later * b[0]
            d_later = d_sums[j] * a[1] + d_later * b[1]
            ds[j] = d_first[j] * first.by_score(score, pair)
            ds[j] += d_term[j] * term.by_score(score, pair)
        terms = [*terms, *parameter_terms(first, scores, d_first, pairs)]
        return ds, [*terms, *parameter_terms(term, scores, d_term, pairs)]

    return OracleNormalizer(weights, pull)


def sigmoid(bias: Callable[[At], Any], by_parameter: Any = None) -> OracleNormalizer:
    """1 / (1 + exp(−s − bias)); `by_parameter` gives the index of a pair's bias, by name."""
    value = lambda s, pair: logistic(s + bias(pair))  # noqa: E731
    slope = lambda s, pair: logistic(s + bias(pair)) * logistic(-s - bias(pair))  # noqa: E731
    rules = {
        name: lambda score, pair, index=index: (index(pair), slope(score, pair))
        for name, index in (by_parameter or {}).items()
    }
    return pointwise(Modifier(value, slope, rules))


def relu(power: float, divisor: float = 1.0) -> OracleNormalizer:
    """max(s, 0)^power / divisor."""
    value = lambda s, pair: s**power / divisor if s.real > 0 else 0 * s  # noqa: E731
    slope = lambda s, pair: power * s ** (power - 1) / divisor if s.real > 0 else 0 * s  # noqa: E731
    return pointwise(Modifier(value, slope))


def exp() -> OracleNormalizer:
    return pointwise(Modifier(lambda s, pair: np.exp(s), lambda s, pair: np.exp(s)))
