"""The numbers printed in documents 000 to 004, with random numbers drawn in their order."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from experiments.walkthrough import printed
from jattn import masks


# Document 004, "Understanding the attention mechanism": everything from np.random.seed(0)


T, E, H1, H2 = 4, 5, 6, 7


def assert_prints(got: Any, text: str) -> None:
    """Every digit is the printed one: eight decimals, or eight of a mantissa where it has an e."""
    got = np.asarray(got)
    rows = [line.split() for line in text.split("\n") if line.strip()]
    assert got.dtype == np.float64
    assert got.shape == (len(rows), len(rows[0]))
    for row, numbers in zip(rows, got, strict=True):
        for token, number in zip(row, numbers, strict=True):
            style = ".8e" if "e" in token else ".8f"
            assert format(number + 0.0, style) == format(float(token), style)


@pytest.fixture(scope="module")
def drawn() -> dict[str, Any]:
    """All random numbers of document 004, in its order."""
    draw = np.random.RandomState(0).randn
    shapes: dict[str, Any] = {"x": (T, E), "L": (T, T), "L to normalise": (T, T), "R": (E, H1)}
    shapes |= {"sizes X": (T, E), "sizes Q": (E, H2), "sizes K": (E, H2), "sizes V": (E, H1)}
    for name in ("square", "masked"):
        shapes |= {f"{name} {letter}": (T if letter == "X" else E, E) for letter in "XQKV"}
    return {name: jnp.asarray(draw(*shape)) for name, shape in shapes.items()}


def test_document_004_interactions(drawn):
    """Document 004: L mixes tokens, R mixes channels and chooses their new number, H1 = 6."""
    x, triangle = drawn["x"], jattn.causal_interaction(T, jnp.float64)
    normalised = jattn.normalised_interaction(drawn["L to normalise"])
    for left, text in (
        (None, printed.X),
        (jnp.eye(T), printed.X),
        (jnp.ones((T, T)), printed.ONES_X),
        (triangle, printed.TRIANGULAR_X),
        (drawn["L"], printed.RANDOM_L_X),
        (normalised, printed.NORMALISED_L_X),
    ):
        assert_prints(jattn.interaction(x, left), text)
    assert_prints(jattn.interaction(x, None, drawn["R"]), printed.X_R)
    for drawn_or_made, text in (
        (x, printed.X),
        (triangle, printed.TRIANGULAR),
        (drawn["L"], printed.RANDOM_L),
        (normalised, printed.NORMALISED_L),
        (drawn["R"], printed.R),
    ):
        assert_prints(drawn_or_made, text)


@pytest.mark.parametrize(
    "name, mask", [("sizes", None), ("square", None), ("masked", masks.Causal())]
)
def test_document_004_attention(drawn, name, mask):
    """Document 004: softmax(Q Kᵀ) V, unscaled; E=5, H1=6, H2=7, then all 5, then masked."""
    x, w_query, w_key, w_value = (drawn[f"{name} {letter}"] for letter in "XQKV")
    query, key = (x @ w for w in (w_query, w_key))
    weights, values, out = (getattr(printed, f"{name.upper()}_{x}") for x in ("L", "V", "LV"))
    got = jattn.attention_weights(query[:, None], key[:, None], mask=mask, scale=1.0)
    assert_prints(got[0], weights)
    assert_prints(jattn.interaction(x, None, w_value), values)
    got = jattn.self_attention(x, w_query, w_key, w_value, mask=mask, scale=1.0)
    assert_prints(got, out)
    # L X R, with L the normalised products: attention is an interaction.
    left = jattn.normalised_interaction(query @ key.T, mask)
    assert_prints(left, weights)
    assert_prints(jattn.interaction(x, left, w_value), out)


# Document 001, "Coding attention mechanism, part 1": 6 × 6 weights, masked


HALF_A_DIGIT = 5e-5
SIX = 6


def assert_misprints(name: str, rows: list[list[float]], right: np.ndarray, tolerance: Any) -> None:
    """A printed table differs from the right one by more than the tolerance only where a misprint
    is known. Missing entries count as 0, and more than six in a row are dropped."""
    differences: dict[tuple[str, int, Any], tuple[Any, Any]] = {
        (name, i, "entries"): (len(row), SIX) for i, row in enumerate(rows) if len(row) != SIX
    }
    squared = np.array([(row + [0.0] * SIX)[:SIX] for row in rows])
    off = np.abs(squared - right) > np.broadcast_to(tolerance, right.shape)
    for i, j in np.argwhere(off).tolist():
        differences[name, i, j] = (rows[i][j], round(float(right[i, j]), 4))
    assert differences == {x: value for x, value in printed.MISPRINTS.items() if x[0] == name}


def weights_of(scores: Any, **arguments: Any) -> np.ndarray:
    """The library's weights for given scores: queries are their rows, keys the unit vectors."""
    query = jnp.asarray(scores)[:, None, :]
    key = jnp.eye(query.shape[-1])[:, None, :]
    return np.asarray(jattn.attention_weights(query, key, **arguments))[0]


def test_document_001_masked_weights():
    """Document 001: weights times the triangle of ones; three rows are printed too short."""
    triangle = np.asarray(jattn.causal_interaction(SIX, jnp.float64))
    assert_misprints("masked", printed.MASKED, np.array(printed.WEIGHTS) * triangle, 0)


def test_document_001_renormalised_weights():
    """Document 001: rows divided by their sums; one number is misprinted.

    The weights are known to half a digit each, so a quotient p = w / Σ w of n of them is known
    to (1 + n p) half digits / Σ w, and it is printed to half a digit.
    """
    got = np.asarray(jattn.renormalised_causal(jnp.asarray(printed.WEIGHTS)))
    triangle = np.tril(np.ones((SIX, SIX)))
    sums = np.sum(np.array(printed.WEIGHTS) * triangle, axis=1, keepdims=True)
    counts = triangle.sum(axis=1, keepdims=True)
    tolerance = triangle * HALF_A_DIGIT * (1 + (1 + counts * got) / sums)
    assert_misprints("renormalised", printed.RENORMALISED, got, tolerance)
    np.testing.assert_allclose(got.sum(axis=1), 1, rtol=0, atol=1e-15)


def test_document_001_masking_by_minus_infinity():
    """Document 001: the softmax of the −inf masked scores / √2 is the renormalised table.

    Scores are known to half a digit, weights change by at most p (1 − p) times the change of the
    difference of two scores, and are printed to half a digit.
    """
    scores = np.array(printed.MASKED_SCORES)
    np.testing.assert_array_equal(np.isfinite(scores), np.tril(np.ones((SIX, SIX), bool)))
    finite = np.where(np.isfinite(scores), scores, 0.25)
    got = weights_of(finite, mask=masks.Causal(), scale=0.5**0.5)
    tolerance = HALF_A_DIGIT * (1 + 2 * got * (1 - got) / math.sqrt(2))
    assert_misprints("renormalised", printed.RENORMALISED, got, tolerance)


# Document 003, "Attention is all you need", with a kernel in C++


def test_document_003_representation_before_the_softmax():
    """Document 003: R(i) = Σ_j ⟨Q(i), K(j)⟩ V(j), symmetric if K is Q and not otherwise."""
    n, d = 6, 4
    q, k, v = np.random.default_rng(8).normal(size=(3, n, d))
    for keys, symmetric in ((q, True), (k, False)):
        query, key = (jnp.asarray(x)[:, None] for x in (q, keys))
        products = jattn.attention_scores(query, key, scale=1.0)[0]
        assert np.allclose(products, products.T, rtol=0, atol=1e-14) == symmetric
        want = [
            [math.fsum(math.fsum(q[i] * keys[j]) * v[j, c] for j in range(n)) for c in range(d)]
            for i in range(n)
        ]
        got = jattn.interaction(jnp.asarray(v), products)
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-13)
