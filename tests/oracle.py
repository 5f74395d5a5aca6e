"""Attention by definition: float64 loops over batch, head, query and key.

Imports neither the library nor JAX. A mask is a function of `At`, a score function a `Modifier`
with its derivatives written out, and masked pairs are never read, so their values cannot matter.
Sums are exact (`math.fsum`) where that is cheap.

`attend` and `gradients` are the truth. Values may be complex, which gives derivatives of `attend`
to the last digit without a formula (imaginary part of f(x + ih) / h for a tiny h) and so a check
of `gradients` that shares nothing with it. `plain` is the textbook formula on whole arrays in any
dtype: an implementation's error is compared with the error of `plain`.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np


class At(NamedTuple):
    """The place of a score: flat batch index, query head, indices and positions."""

    b: Any
    h: Any
    i: Any
    j: Any
    q: Any
    kv: Any


Allowed = Callable[[At], bool]
Keep = Callable[[At], bool]
ByParameter = Callable[[Any, At], tuple[tuple[Any, ...], Any]]


@dataclasses.dataclass(frozen=True)
class Modifier:
    """A score function and its derivatives in closed form.

    `by_parameter` gives, for each named parameter, the index of the one element that the score of
    this pair depends on, and the derivative of the score with respect to it.
    """

    value: Callable[[Any, At], Any] = lambda score, pair: score
    by_score: Callable[[Any, At], Any] = lambda score, pair: 1.0
    by_parameter: Mapping[str, ByParameter] = dataclasses.field(default_factory=dict)

    def then(self, following: "Modifier") -> "Modifier":
        """Returns this modifier followed by another; derivatives by the chain rule."""

        def earlier(rule: ByParameter) -> ByParameter:
            def chained(score: Any, pair: At) -> tuple[tuple[Any, ...], Any]:
                index, slope = rule(score, pair)
                return index, slope * following.by_score(self.value(score, pair), pair)

            return chained

        def later(rule: ByParameter) -> ByParameter:
            return lambda score, pair: rule(self.value(score, pair), pair)

        return Modifier(
            value=lambda score, pair: following.value(self.value(score, pair), pair),
            by_score=lambda score, pair: (
                following.by_score(self.value(score, pair), pair) * self.by_score(score, pair)
            ),
            by_parameter={name: earlier(rule) for name, rule in self.by_parameter.items()}
            | {name: later(rule) for name, rule in following.by_parameter.items()},
        )


ParameterTerms = list[tuple[str, tuple[Any, ...], Any]]
"""Terms of gradients of parameters: a parameter's name, the index of its element, and a number."""


@dataclasses.dataclass(frozen=True)
class OracleNormalizer:
    """A normalizer and its derivative in closed form.

    `weights` maps the scores `[n]` of a query's allowed keys, in order, to their weights. `pull`
    maps scores, weights and cotangents of weights to cotangents of the scores, and terms of the
    gradients of parameters. Both receive the pair of each key as well.
    """

    weights: Callable[[np.ndarray, list[At]], np.ndarray]
    pull: Callable[[np.ndarray, np.ndarray, np.ndarray, list[At]], tuple[Any, ParameterTerms]]


@dataclasses.dataclass(frozen=True)
class OracleProblem:
    """One call of attention: arrays in the library's layout, masks and scores as plain functions.

    Queries `[*B, T, N, H]`, keys `[*B, S, K, H]`, values `[*B, S, K, V]`; positions `[T]` or
    `[*B, T]`, and `[S]` or `[*B, S]`, counted from 0 by default.
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    parameters: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    allowed: Allowed = lambda pair: True
    modifier: Callable[[Mapping[str, np.ndarray]], Modifier] = lambda parameters: Modifier()
    normalizer: Callable[[Mapping[str, np.ndarray]], OracleNormalizer] | None = None
    scale: float | None = None
    q_positions: np.ndarray | None = None
    kv_positions: np.ndarray | None = None
    keep: Keep = lambda pair: True
    rate: float = 0.0

    @property
    def sizes(self) -> tuple[int, int, int, int, int, int, int]:
        """B (flat), T, S, N, K, H, V."""
        *batch, queries, heads, width = self.q.shape
        keys, kv_heads = self.k.shape[-3:-1]
        return math.prod(batch), queries, keys, heads, kv_heads, width, self.v.shape[-1]

    @property
    def factor(self) -> float:
        """The scale of the dot products."""
        return 1 / math.sqrt(self.q.shape[-1]) if self.scale is None else self.scale

    @property
    def weighting(self) -> OracleNormalizer:
        """The normalizer, by default the softmax."""
        return SOFTMAX if self.normalizer is None else self.normalizer(self.parameters)

    def dropout_factor(self, pair: At) -> float:
        """Returns the factor by which dropout multiplies a weight: 0 or 1 / (1 - rate)."""
        if not self.rate:
            return 1.0
        return 1 / (1 - self.rate) if self.keep(pair) else 0.0

    def positions(self) -> tuple[np.ndarray, np.ndarray]:
        """Positions `[B, T]` and `[B, S]`."""
        flat, queries, keys, *_ = self.sizes
        q = np.arange(queries) if self.q_positions is None else self.q_positions
        kv = np.arange(keys) if self.kv_positions is None else self.kv_positions
        rows = lambda x: x.reshape(math.prod(x.shape[:-1]), x.shape[-1])  # noqa: E731
        return np.broadcast_to(rows(q), (flat, queries)), np.broadcast_to(rows(kv), (flat, keys))


class OracleForward(NamedTuple):
    """Results `[*B, T, N, V]`, `[*B, N, T]`, and `[*B, N, T, S]` for weights and scores.

    Weights are after dropout; scores are −inf where masked. With a normalizer other than the
    softmax, lse is 0.
    """

    out: np.ndarray
    lse: np.ndarray
    weights: np.ndarray
    scores: np.ndarray


class OracleGradients(NamedTuple):
    """Gradients, each in the shape of its input."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    parameters: dict[str, np.ndarray]


def _flat(array: np.ndarray) -> np.ndarray:
    return array.reshape(math.prod(array.shape[:-3]), *array.shape[-3:])


def _sum(terms: list[Any]) -> Any:
    try:
        return math.fsum(terms)
    except TypeError:  # of complex numbers
        return complex(math.fsum(x.real for x in terms), math.fsum(x.imag for x in terms))


def _dot(x: list[Any], y: list[Any]) -> Any:
    return _sum([a * b for a, b in zip(x, y, strict=True)])


def _exponentials(scores: Any) -> tuple[Any, Any, Any]:
    """Returns exp(score − top) for the greatest score top, their exact sum, and top."""
    top = scores.real.max()
    exponentials = np.exp(scores - top)
    return exponentials, _sum(exponentials.tolist()), top


def _softmax_weights(scores: np.ndarray, pairs: list[At]) -> np.ndarray:
    exponentials, total, _ = _exponentials(scores)
    return exponentials / total


def _pull_softmax(scores: Any, weights: Any, cotangents: Any, pairs: list[At]) -> Any:
    return weights * (cotangents - _dot(weights.tolist(), cotangents.tolist())), []


SOFTMAX = OracleNormalizer(_softmax_weights, _pull_softmax)


def _rows(problem: OracleProblem):
    """Yields for each query with keys: its indices and kv head, the pairs that the mask allows, and
    arrays with the raw scores and the scores of these pairs."""
    flat, queries, keys, heads, kv_heads, *_ = problem.sizes
    q, k = _flat(problem.q).tolist(), _flat(problem.k).tolist()
    q_positions, kv_positions = problem.positions()
    modifier = problem.modifier(problem.parameters)
    for b, h, i in np.ndindex(flat, heads, queries):
        g, position = h // (heads // kv_heads), int(q_positions[b, i])
        pairs = [At(b, h, i, j, position, int(kv_positions[b, j])) for j in range(keys)]
        pairs = [pair for pair in pairs if problem.allowed(pair)]
        raw = [_dot(q[b][i][h], k[b][pair.j][g]) * problem.factor for pair in pairs]
        scores = [modifier.value(x, pair) for x, pair in zip(raw, pairs, strict=True)]
        if pairs:
            yield (b, h, i, g), pairs, np.array(raw), np.array(scores)


def attend(problem: OracleProblem) -> OracleForward:
    """Attention in float64 (or complex128). A row without keys gives out 0 and lse −inf."""
    flat, queries, keys, heads, _, _, width = problem.sizes
    parameters = list(problem.parameters.values())
    kind = np.result_type(problem.q, problem.k, problem.v, *parameters, np.float64)
    out = np.zeros((flat, heads, queries, width), kind)
    lse = np.full((flat, heads, queries), -np.inf if problem.normalizer is None else 0, kind)
    weights = np.zeros((flat, heads, queries, keys), kind)
    masked = np.full_like(weights, -np.inf)
    v = _flat(problem.v).tolist()
    for (b, h, i, g), pairs, _, scores in _rows(problem):
        factors = [problem.dropout_factor(pair) for pair in pairs]
        row = problem.weighting.weights(scores, pairs) * factors
        if problem.normalizer is None:
            _, total, top = _exponentials(scores)
            lse[b, h, i] = top + np.log(total)
        places = [pair.j for pair in pairs]
        masked[b, h, i, places], weights[b, h, i, places] = scores, row
        for x in range(width):
            out[b, h, i, x] = _dot(row.tolist(), [v[b][j][g][x] for j in places])
    return _unflat(problem, out, lse, weights, masked)


def gradients(problem: OracleProblem, d_out: np.ndarray, d_lse: np.ndarray) -> OracleGradients:
    """Gradients of Σ d_out · out + Σ d_lse · lse, by the formula, in float64.

    With weights p, dropped weights w and dp = d_out · v: ds = p (dp − Σ p dp + d_lse). The lse of
    a row without keys is a constant, so its cotangent goes nowhere.
    """
    flat, queries, _, heads, *_ = problem.sizes
    dq, dk, dv = (np.zeros(_flat(x).shape) for x in (problem.q, problem.k, problem.v))
    d_parameters = {name: np.zeros(value.shape) for name, value in problem.parameters.items()}
    q, k, v, d_o = (_flat(x) for x in (problem.q, problem.k, problem.v, d_out))
    d_l = d_lse.reshape(flat, heads, queries)
    modifier = problem.modifier(problem.parameters)
    for (b, h, i, g), pairs, raw, scores in _rows(problem):
        factors = np.array([problem.dropout_factor(pair) for pair in pairs])
        dw = np.array([_dot(d_o[b, i, h].tolist(), v[b, pair.j, g].tolist()) for pair in pairs])
        p = problem.weighting.weights(scores, pairs)
        ds, terms = problem.weighting.pull(scores, p, factors * dw, pairs)
        if problem.normalizer is None:
            ds = ds + p * d_l[b, h, i]
        for name, index, term in terms:
            d_parameters[name][index] += term
        dropped = p * factors
        for n, pair in enumerate(pairs):
            dv[b, pair.j, g] += dropped[n] * d_o[b, i, h]
            d_raw = ds[n] * modifier.by_score(raw[n], pair) * problem.factor
            dq[b, i, h] += d_raw * k[b, pair.j, g]
            dk[b, pair.j, g] += d_raw * q[b, i, h]
            for name, rule in modifier.by_parameter.items():
                index, slope = rule(raw[n], pair)
                d_parameters[name][index] += ds[n] * slope
    q, k, v = problem.q.shape, problem.k.shape, problem.v.shape
    return OracleGradients(dq.reshape(q), dk.reshape(k), dv.reshape(v), d_parameters)


def slope(
    problem: OracleProblem, direction: Mapping[str, Any], d_out: np.ndarray, d_lse: np.ndarray
):
    """Derivative of Σ d_out · out + Σ d_lse · lse along a direction, by a complex step.

    `direction` has the entries "q", "k", "v" and "parameters". Exact to rounding, and independent
    of the formulas in `gradients`.
    """
    tiny, along = 1e-100j, direction["parameters"]
    arrays: Any = {name: getattr(problem, name) + tiny * direction[name] for name in "qkv"}
    parameters = {name: value + tiny * along[name] for name, value in problem.parameters.items()}
    result = attend(dataclasses.replace(problem, **arrays, parameters=parameters))
    live = np.isfinite(np.real(result.lse))
    through_lse = np.where(live, d_lse * np.where(live, np.imag(result.lse), 0), 0)
    total = np.sum(d_out * np.imag(result.out)) + np.sum(through_lse)
    return total / tiny.imag


def error(got: Any, want: Any) -> float:
    """Greatest difference, relative to the greatest magnitude or 1; infinities must be equal."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    infinite = np.isinf(want)
    np.testing.assert_array_equal(got[infinite], want[infinite])
    got, want = got[~infinite], want[~infinite]
    if not want.size:
        return 0.0
    assert np.isfinite(got).all()
    return float(np.max(np.abs(got - want)) / max(1.0, np.max(np.abs(want))))


def allowed_everywhere(problem: OracleProblem) -> np.ndarray:
    """The mask as bool `[B, N, T, S]`, batch axes flattened, evaluated pair by pair."""
    flat, queries, keys, heads, *_ = problem.sizes
    dense = np.zeros((flat, heads, queries, keys), bool)
    q_positions, kv_positions = problem.positions()
    for b, h, i, j in np.ndindex(dense.shape):
        pair = At(b, h, i, j, int(q_positions[b, i]), int(kv_positions[b, j]))
        dense[b, h, i, j] = problem.allowed(pair)
    return dense


def plain(
    problem: OracleProblem, d_out: np.ndarray, d_lse: np.ndarray, dtype: Any, products: Any = None
) -> tuple[OracleForward, list[OracleGradients]]:
    """The textbook formula on whole arrays, computed in `dtype`: forward and gradients.

    Repeats key heads, builds everything of size T × S, and sums in NumPy's order. The gradients
    come twice, for the two ways of writing the mean of dp that are equal except for rounding:
    Σ p dp over the keys, and d_out · out over the channels, which needs no second pass.

    `products` is the dtype to which weights, their cotangents and out are rounded before they enter
    a product, as tensor cores take them.
    """

    def rounded(x: np.ndarray) -> np.ndarray:
        return x if products is None else x.astype(products).astype(dtype)

    flat, queries, _, heads, kv_heads, *_ = problem.sizes
    cast = [_flat(np.asarray(x, dtype)) for x in (problem.q, problem.k, problem.v, d_out)]
    q, k, v, d_o = (np.swapaxes(x, 1, 2) for x in cast)  # [B, N, T, H] and so on
    k, v = (np.repeat(x, heads // kv_heads, axis=1) for x in (k, v))
    parameters = {name: np.asarray(x, dtype) for name, x in problem.parameters.items()}
    modifier = problem.modifier(parameters)
    allowed = allowed_everywhere(problem)
    pair = _grid(problem, allowed.shape)
    factor = np.asarray(problem.factor, dtype)
    places = (At(b, h, i, j, None, None) for b, h, i, j in np.ndindex(allowed.shape))
    factors = np.array([problem.dropout_factor(x) for x in places], dtype).reshape(allowed.shape)

    raw = (q @ np.swapaxes(k, -1, -2)) * factor
    scores = np.where(allowed, modifier.value(raw, pair), np.asarray(-np.inf, dtype))
    dp = (d_o @ np.swapaxes(v, -1, -2)) * factors
    if problem.normalizer is None:
        p, lse = _softmax(scores)
        out = rounded(p * factors) @ v
        means = (p * dp).sum(axis=-1), (d_o * rounded(out)).sum(axis=-1)
        by_row = np.asarray(d_lse, dtype).reshape(flat, heads, queries)
        pulled = [(p * (dp + (by_row - mean)[..., None]), []) for mean in means]
    else:
        p, *ds_and_terms = _normalized(problem.normalizer(parameters), scores, dp, pair)
        lse, pulled = np.zeros(p.shape[:-1], dtype), [ds_and_terms]
        out = rounded(p * factors) @ v

    backwards = []
    for ds, terms in pulled:
        d_raw = rounded(ds * modifier.by_score(raw, pair) * factor)
        dk, dv = np.swapaxes(d_raw, -1, -2) @ q, np.swapaxes(rounded(p * factors), -1, -2) @ d_o
        d_parameters = _parameter_gradients(modifier, parameters, raw, ds, pair)
        for name, index, term in terms:
            d_parameters[name][index] += term
        backwards.append(
            OracleGradients(
                np.swapaxes(d_raw @ k, 1, 2).reshape(problem.q.shape),
                _by_kv_head(dk, kv_heads).reshape(problem.k.shape),
                _by_kv_head(dv, kv_heads).reshape(problem.v.shape),
                d_parameters,
            )
        )
    return _unflat(problem, out, lse, p * factors, scores), backwards


def _normalized(
    normalizer: OracleNormalizer, scores: np.ndarray, dp: np.ndarray, pair: At
) -> tuple[np.ndarray, np.ndarray, ParameterTerms]:
    """Weights, cotangents of the scores, and terms of parameters, in the dtype of the scores."""
    p, ds, all_terms = np.zeros_like(scores), np.zeros_like(scores), []
    places = At(*(np.broadcast_to(x, scores.shape) for x in pair))
    for row in np.ndindex(scores.shape[:-1]):
        allowed = scores[row] > -np.inf
        if not allowed.any():
            continue
        pairs = [At(*(int(x[(*row, j)]) for x in places)) for j in np.flatnonzero(allowed)]
        p[row][allowed] = weights = normalizer.weights(scores[row][allowed], pairs)
        ds[row][allowed], terms = normalizer.pull(
            scores[row][allowed], weights, dp[row][allowed], pairs
        )
        all_terms += terms
    return p, ds, all_terms


def _softmax(scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Weights and log of the denominator along the last axis; rows of −inf give 0 and −inf."""
    top = np.max(scores, axis=-1, keepdims=True, initial=-np.inf)
    top = np.where(np.isfinite(top), top, np.zeros((), scores.dtype))
    exponentials = np.exp(scores - top)
    total = exponentials.sum(axis=-1, keepdims=True)
    dead = total == 0
    p = exponentials / np.where(dead, np.ones((), scores.dtype), total)
    with np.errstate(divide="ignore"):
        lse = np.where(dead, np.asarray(-np.inf, scores.dtype), top + np.log(total))
    return p, lse[..., 0]


def _by_kv_head(by_head: np.ndarray, kv_heads: int) -> np.ndarray:
    """Sums `[B, N, S, ·]` over each group and moves heads after keys, `[B, S, K, ·]`."""
    flat, heads, *rest = by_head.shape
    return np.swapaxes(by_head.reshape(flat, kv_heads, heads // kv_heads, *rest).sum(axis=2), 1, 2)


def _grid(problem: OracleProblem, shape: tuple[int, ...]) -> At:
    b, h, i, j = np.ix_(*(np.arange(size) for size in shape))
    q_positions, kv_positions = problem.positions()
    return At(b, h, i, j, q_positions[:, None, :, None], kv_positions[:, None, None, :])


def _parameter_gradients(
    modifier: Modifier, parameters: Mapping[str, np.ndarray], raw: Any, ds: Any, pair: At
) -> dict[str, np.ndarray]:
    result = {name: np.zeros_like(value) for name, value in parameters.items()}
    for name, rule in modifier.by_parameter.items():
        index, slopes = rule(raw, pair)
        terms = ds * slopes
        if index:
            np.add.at(result[name], tuple(np.broadcast_to(x, terms.shape) for x in index), terms)
        else:
            result[name] = terms.sum()
    return result


def _unflat(problem: OracleProblem, out: Any, lse: Any, weights: Any, scores: Any) -> OracleForward:
    batch = problem.q.shape[:-3]
    return OracleForward(
        np.swapaxes(out, 1, 2).reshape(*problem.q.shape[:-1], problem.v.shape[-1]),
        lse.reshape(*batch, *lse.shape[1:]),
        weights.reshape(*batch, *weights.shape[1:]),
        scores.reshape(*batch, *scores.shape[1:]),
    )
