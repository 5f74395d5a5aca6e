"""The figures printed in the documents that jattn grew from, out of the library.

Five texts on attention, numbered 000 to 004, print numbers or say what must come out. What they
print is typed in here. Where a text draws random numbers, the draws are made in its order.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn import masks, tile


# Document 004, "Understanding the attention mechanism": everything from np.random.seed(0)


T, E, H1, H2 = 4, 5, 6, 7

X = """
 1.76405235  0.40015721  0.97873798  2.2408932   1.86755799
-0.97727788  0.95008842 -0.15135721 -0.10321885  0.4105985
 0.14404357  1.45427351  0.76103773  0.12167502  0.44386323
 0.33367433  1.49407907 -0.20515826  0.3130677  -0.85409574
"""
ONES_X = "1.26449236 4.29859821 1.38326024 2.57241707 1.86792399\n" * 4
TRIANGULAR = """
1. 0. 0. 0.
1. 1. 0. 0.
1. 1. 1. 0.
1. 1. 1. 1.
"""
TRIANGULAR_X = """
1.76405235 0.40015721 0.97873798 2.2408932  1.86755799
0.78677447 1.35024563 0.82738078 2.13767435 2.27815649
0.93081804 2.80451913 1.5884185  2.25934936 2.72201972
1.26449236 4.29859821 1.38326024 2.57241707 1.86792399
"""
RANDOM_L = """
-2.55298982  0.6536186   0.8644362  -0.74216502
 2.26975462 -1.45436567  0.04575852 -0.18718385
 1.53277921  1.46935877  0.15494743  0.37816252
-0.88778575 -1.98079647 -0.34791215  0.15634897
"""
RANDOM_L_X = """
-5.26549961 -0.25232838 -1.78750815 -5.91561089 -3.48191029
 5.36941815 -0.68663938  2.51485007  5.18336211  3.82192147
 1.41643325  2.79971404  1.31812887  3.42037269  3.21165905
 0.37174317 -2.50954735 -0.86595236 -1.77836191 -2.75926583
"""
NORMALISED_L = """
0.41896738 0.40743534 0.08311088 0.09048641
0.04488369 0.03095732 0.02325121 0.90090777
0.16201575 0.17403762 0.07705739 0.58688924
0.0689366  0.27987549 0.14140365 0.50978426
"""
NORMALISED_L_X = """
 0.38306743  0.8108122   0.39307749  0.93524704  0.90934403
 0.35288226  1.4272138  -0.12788986  0.3822584  -0.6626072
 0.32265065  1.21910435  0.07046752  0.53820807 -0.09302326
 0.03856185  1.26078951  0.02813675  0.30239341 -0.12898112
"""
R = """
-0.51080514 -1.18063218 -0.02818223  0.42833187  0.06651722  0.3024719
-0.63432209 -0.36274117 -0.67246045 -0.35955316 -0.81314628 -1.7262826
 0.17742614 -0.40178094 -1.63019835  0.46278226 -0.90729836  0.0519454
 0.72909056  0.12898291  1.13940068 -1.23482582  0.40234164 -0.68481009
-0.87079715 -0.57884966 -0.31155253  0.05616534 -1.16514984  0.90082649
"""
X_R = """
-0.97371195 -3.41308712  0.05709096 -1.59755613 -2.3704341   0.04139219
-0.56312213  0.61899371 -0.61014338 -0.67973328 -1.22017855 -1.50301919
-1.15883076 -1.24459388 -2.22229344 -0.23431315 -2.33165625 -2.11086604
-0.18257152 -0.31870854 -0.05685886 -0.92377577  0.11453969 -3.47271662
"""

SIZES_L = """
9.99996706e-01 3.28680000e-06 7.50610498e-09 2.85006607e-14
9.78226751e-01 1.28560219e-03 2.02652246e-02 2.22422213e-04
3.07277486e-05 1.29535875e-01 8.07295984e-01 6.31374132e-02
2.82603173e-01 6.82619752e-03 7.10526096e-01 4.45339485e-05
"""
SIZES_V = """
 0.48796236 -1.23724751  0.89411441  1.86818403  0.0708713   4.78357836
 2.45759555 -0.6918528   2.06088201  3.50938285 -0.60840164  3.90835192
-0.94901715 -0.49210324 -0.95973845 -1.99359209 -0.69361156 -1.88892325
-1.75111978 -2.41142737 -5.32539656 -2.93730234 -0.33078805 -0.89377003
"""
SIZES_LV = """
 0.48796882 -1.23724571  0.89411823  1.86818939  0.07086906  4.78357544
 0.46087579 -1.221707    0.85666231  1.79096535  0.05441627  4.64597066
-0.55833713 -0.63918203 -0.84403913 -1.34022418 -0.65964259 -1.07493171
-0.5197037  -0.70413238 -0.41540882 -0.86471954 -0.47696846  0.03636454
"""
SQUARE_L = """
4.17764387e-09 2.57135620e-06 9.99997419e-01 5.39037660e-09
8.83647632e-01 3.61057169e-02 1.10946675e-05 8.02355563e-02
3.27298619e-01 1.62202688e-02 4.33976229e-01 2.22504884e-01
8.16727896e-01 2.61363556e-04 1.81996886e-01 1.01385435e-03
"""
SQUARE_V = """
-0.38265795 -1.0078002  -1.28306344  0.87532503  1.31775286
 0.42510411 -0.71553386  2.17308255 -0.01319503 -0.38305383
 1.70990215 -0.46195207 -2.27786996 -0.59268283  1.09518226
-1.44638454 -4.79764402  3.20740801 -0.21663068  2.96228223
"""
SQUARE_LV = """
 1.70989882 -0.46195275 -2.27785848 -0.59268133  1.09517847
-0.4388186  -1.30132189 -0.79799237  0.75561442  1.38829128
 0.30188115 -1.60943321 -0.65957438 -0.019133    1.55949079
-0.00268587 -0.9122235  -1.45865913  0.60681286  1.27846849
"""
MASKED_L = """
1.00000000e+00 0.00000000e+00 0.00000000e+00 0.00000000e+00
8.73730868e-01 1.26269132e-01 0.00000000e+00 0.00000000e+00
8.75161032e-02 4.22552421e-01 4.89931476e-01 0.00000000e+00
2.44179030e-04 2.07785297e-03 1.42193742e-02 9.83458594e-01
"""
MASKED_V = """
-0.64112576  3.93575956 -0.12979446  2.44301203  0.22577084
 1.43055231 -1.6645132   0.44924118 -1.49425456  0.68901062
 0.0815931   2.13348808  1.5848282   1.0688065   1.61374919
 0.28371997  0.39761655  0.89286344 -0.20351501  0.41637134
"""
MASKED_LV = """
-0.64112576  3.93575956 -0.12979446  2.44301203  0.22577084
-0.37953677  3.22861798 -0.05668014  1.94585679  0.28426373
 0.58834954  0.68636122  0.95492606  0.10604396  1.10152821
 0.28300297  0.4188787   0.90153125 -0.18745914  0.43391727
"""


def assert_prints(got: Any, printed: str) -> None:
    """Every digit is the printed one: eight decimals, or eight of a mantissa where it has an e."""
    got = np.asarray(got)
    rows = [line.split() for line in printed.split("\n") if line.strip()]
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
    shapes = {
        "x": (T, E),
        "L": (T, T),
        "L to normalise": (T, T),
        "R": (E, H1),
        **{"sizes X": (T, E), "sizes Q": (E, H2), "sizes K": (E, H2), "sizes V": (E, H1)},
        **{"square X": (T, E), "square Q": (E, E), "square K": (E, E), "square V": (E, E)},
        **{"masked X": (T, E), "masked Q": (E, E), "masked K": (E, E), "masked V": (E, E)},
    }
    return {name: jnp.asarray(draw(*shape)) for name, shape in shapes.items()}


def test_document_004_identity_interaction(drawn):
    """Document 004: a diagonal L leaves every token as it is."""
    assert_prints(drawn["x"], X)
    assert_prints(jattn.interaction(drawn["x"], jnp.eye(T)), X)
    assert_prints(jattn.interaction(drawn["x"]), X)


def test_document_004_interaction_of_all_ones(drawn):
    """Document 004: L of ones sums up all tokens, for each token."""
    assert_prints(jattn.interaction(drawn["x"], jnp.ones((T, T))), ONES_X)


def test_document_004_triangular_interaction(drawn):
    """Document 004: a lower triangular L lets tokens see what came before."""
    left = jattn.causal_interaction(T, jnp.float64)
    assert_prints(left, TRIANGULAR)
    assert_prints(jattn.interaction(drawn["x"], left), TRIANGULAR_X)


def test_document_004_random_interaction(drawn):
    """Document 004: L may be any matrix."""
    assert_prints(drawn["L"], RANDOM_L)
    assert_prints(jattn.interaction(drawn["x"], drawn["L"]), RANDOM_L_X)


def test_document_004_normalised_interaction(drawn):
    """Document 004: exponentials, then rows divided by their sums."""
    left = jattn.normalised_interaction(drawn["L to normalise"])
    assert_prints(left, NORMALISED_L)
    assert_prints(jattn.interaction(drawn["x"], left), NORMALISED_L_X)


def test_document_004_right_interaction(drawn):
    """Document 004: R mixes channels and chooses the new size H1 = 6."""
    assert_prints(drawn["R"], R)
    assert_prints(jattn.interaction(drawn["x"], None, drawn["R"]), X_R)


@pytest.mark.parametrize(
    "name, printed, mask",
    [
        ("sizes", (SIZES_L, SIZES_V, SIZES_LV), None),
        ("square", (SQUARE_L, SQUARE_V, SQUARE_LV), None),
        ("masked", (MASKED_L, MASKED_V, MASKED_LV), masks.Causal()),
    ],
)
def test_document_004_attention(drawn, name, printed, mask):
    """Document 004: softmax(Q Kᵀ) V, unscaled; E=5, H1=6, H2=7, then all 5, then masked."""
    x, w_query, w_key, w_value = (drawn[f"{name} {letter}"] for letter in "XQKV")
    query, key = (x @ w for w in (w_query, w_key))
    weights, values, out = printed
    got = jattn.attention_weights(query[:, None], key[:, None], mask=mask, scale=1.0)
    assert_prints(got[0], weights)
    assert_prints(jattn.interaction(x, None, w_value), values)
    got = jattn.self_attention(x, w_query, w_key, w_value, mask=mask, scale=1.0)
    assert_prints(got, out)
    # L X R, with L the normalised products: attention is an interaction.
    left = jattn.normalised_interaction(query @ key.T, mask)
    assert_prints(left, weights)
    assert_prints(jattn.interaction(x, left, w_value), out)


def test_document_004_digits_are_looked_at(drawn):
    """Document 004: one unit in the last printed digit is noticed."""
    for shift in (2e-8, -2e-8):
        with pytest.raises(AssertionError):
            assert_prints(drawn["x"] + shift, X)


# Document 001, "Coding attention mechanism, part 1": 6 × 6 weights, masked


WEIGHTS = [
    [0.1690, 0.1607, 0.1609, 0.1706, 0.1710, 0.1677],
    [0.1615, 0.1555, 0.1563, 0.1762, 0.1844, 0.1662],
    [0.1614, 0.1558, 0.1566, 0.1759, 0.1841, 0.1661],
    [0.1636, 0.1596, 0.1601, 0.1727, 0.1776, 0.1664],
    [0.1602, 0.1651, 0.1655, 0.1693, 0.1748, 0.1652],
    [0.1649, 0.1559, 0.1565, 0.1752, 0.1805, 0.1670],
]
MASKED = [
    [0.1690, 0.0000, 0.0000, 0.0000, 0.0000],
    [0.1615, 0.1555, 0.0000, 0.0000, 0.0000],
    [0.1614, 0.1558, 0.1566, 0.0000, 0.0000],
    [0.1636, 0.1596, 0.1601, 0.1727, 0.0000, 0.0000],
    [0.1602, 0.1651, 0.1655, 0.1693, 0.1748, 0.0000],
    [0.1649, 0.1559, 0.1565, 0.1752, 0.1805, 0.1670],
]
RENORMALISED = [
    [1.0000, 0.0000, 0.0000, 0.0000, 0.0000],
    [0.5096, 0.4904, 0.0000, 0.0000, 0.0000],
    [0.3406, 0.3289, 0.3305, 0.0000, 0.0000],
    [0.2494, 0.2433, 0.2441, 0.2633, 0.0000, 0.0000],
    [0.1919, 0.1978, 0.1982, 0.2028, 0.2093, 0.0000],
    [0.1649, 0.1559, 0.1555, 0.1752, 0.1805, 0.1670],
]
NO = -math.inf
MASKED_SCORES = [
    [-0.1193, NO],
    [-0.3330, -0.3871, NO, NO, NO, NO, NO, NO],
    [-0.3263, -0.3761, -0.3691, NO, NO, NO],
    [-0.2094, -0.2444, -0.2400, -0.1329, NO, NO],
    [-0.1138, -0.0713, -0.0680, -0.0359, 0.0092, NO],
    [-0.2850, -0.3639, -0.3583, -0.1993, -0.1564, -0.2669],
]
# What is printed wrong: (table, row, column or "entries") -> (printed, right).
MISPRINTS = {
    ("masked", 0, "entries"): (5, 6),
    ("masked", 1, "entries"): (5, 6),
    ("masked", 2, "entries"): (5, 6),
    ("renormalised", 0, "entries"): (5, 6),
    ("renormalised", 1, "entries"): (5, 6),
    ("renormalised", 2, "entries"): (5, 6),
    ("renormalised", 5, 2): (0.1555, 0.1565),
    ("scores", 0, "entries"): (2, 6),
    ("scores", 1, "entries"): (8, 6),
}
HALF_A_DIGIT = 5e-5
SIX = 6


def squared(rows: list[list[float]], fill: float) -> np.ndarray:
    """A printed table with each row at six entries: missing ones added, extra ones dropped."""
    return np.array([(row + [fill] * SIX)[:SIX] for row in rows])


def misprints(name: str, rows: list[list[float]], right: np.ndarray, tolerance: Any) -> dict:
    """Where a printed table differs from what is right by more than the tolerance."""
    found: dict[tuple[str, int, Any], tuple[Any, Any]] = {}
    for i, row in enumerate(rows):
        if len(row) != SIX:
            found[name, i, "entries"] = (len(row), SIX)
    off = np.abs(squared(rows, 0.0) - right) > np.broadcast_to(tolerance, right.shape)
    for i, j in np.argwhere(off).tolist():
        found[name, i, j] = (rows[i][j], round(float(right[i, j]), 4))
    return found


def weights_of(scores: Any, **arguments: Any) -> np.ndarray:
    """The library's weights for given scores: queries are their rows, keys the unit vectors."""
    query = jnp.asarray(scores)[:, None, :]
    key = jnp.eye(query.shape[-1])[:, None, :]
    return np.asarray(jattn.attention_weights(query, key, **arguments))[0]


def test_document_001_printed_weights_are_a_softmax():
    """Document 001: rows of the weights sum to 1, up to the rounding of six numbers."""
    sums = np.sum(WEIGHTS, axis=1)
    np.testing.assert_allclose(sums, 1, rtol=0, atol=6 * HALF_A_DIGIT)


def test_document_001_masked_weights():
    """Document 001: weights times the triangle of ones; three rows are printed too short."""
    triangle = np.asarray(jattn.causal_interaction(SIX, jnp.float64))
    found = misprints("masked", MASKED, np.array(WEIGHTS) * triangle, 0)
    assert found == {key: value for key, value in MISPRINTS.items() if key[0] == "masked"}


def test_document_001_renormalised_weights():
    """Document 001: rows divided by their sums; one number is misprinted.

    The weights are known to half a digit each, so a quotient p = w / Σ w of n of them is known
    to (1 + n p) half digits / Σ w, and it is printed to half a digit.
    """
    got = np.asarray(jattn.renormalised_causal(jnp.asarray(WEIGHTS)))
    kept = np.tril(np.ones((SIX, SIX)))
    sums = np.sum(np.array(WEIGHTS) * kept, axis=1, keepdims=True)
    counts = kept.sum(axis=1, keepdims=True)
    tolerance = kept * HALF_A_DIGIT * (1 + (1 + counts * got) / sums)
    found = misprints("renormalised", RENORMALISED, got, tolerance)
    assert found == {key: value for key, value in MISPRINTS.items() if key[0] == "renormalised"}
    np.testing.assert_allclose(got.sum(axis=1), 1, rtol=0, atol=1e-15)


def test_document_001_masking_by_minus_infinity():
    """Document 001: the softmax of the −inf masked scores / √2 is the renormalised table.

    Scores are known to half a digit, weights change by at most p (1 − p) times the change of the
    difference of two scores, and are printed to half a digit.
    """
    scores = squared(MASKED_SCORES, NO)
    np.testing.assert_array_equal(np.isfinite(scores), np.tril(np.ones((SIX, SIX), bool)))
    got = weights_of(
        np.where(np.isfinite(scores), scores, 0.25), mask=masks.Causal(), scale=0.5**0.5
    )
    tolerance = HALF_A_DIGIT * (1 + 2 * got * (1 - got) / math.sqrt(2))
    found = misprints("renormalised", RENORMALISED, got, tolerance)
    assert found == {key: value for key, value in MISPRINTS.items() if key[0] == "renormalised"}
    wrong = {("scores", i, "entries"): (len(row), SIX) for i, row in enumerate(MASKED_SCORES)}
    wrong = {key: value for key, value in wrong.items() if value[0] != value[1]}
    assert wrong == {key: value for key, value in MISPRINTS.items() if key[0] == "scores"}


def test_document_001_both_derivations_agree():
    """Document 001: multiply and renormalise equals masking by −inf, to the last bits."""
    scores = jnp.log(jnp.asarray(WEIGHTS))
    by_infinity = weights_of(scores, mask=masks.Causal(), scale=1.0)
    by_quotient = jattn.renormalised_causal(jnp.asarray(weights_of(scores, scale=1.0)))
    np.testing.assert_allclose(by_quotient, by_infinity, rtol=0, atol=1e-15)
    np.testing.assert_allclose(
        by_quotient, jattn.renormalised_causal(jnp.asarray(WEIGHTS)), rtol=0, atol=1e-15
    )


def test_document_001_shapes_of_a_batch():
    """Document 001: two texts of 6 tokens and 3 channels give context vectors [2, 6, 2]."""
    rng = np.random.default_rng(1)
    inputs = rng.random((6, 3))
    batch = jnp.asarray(np.stack([inputs, inputs]))
    projections = [jnp.asarray(rng.random((3, 2))) for _ in range(3)]
    got = jattn.self_attention(batch, *projections, mask=masks.Causal())
    assert got.shape == (2, 6, 2)
    alone = jattn.self_attention(jnp.asarray(inputs), *projections, mask=masks.Causal())
    for one in got:
        np.testing.assert_allclose(one, alone, rtol=0, atol=1e-15)


@pytest.mark.parametrize("rate, factor", [(0.5, 2.0), (0.2, 1.25)])
def test_document_001_dropout_scales_what_is_left(rate, factor):
    """Document 001: at a rate of 50 % the remaining weights double (1 / (1 − p))."""
    rng = np.random.default_rng(2)
    query, key = (jnp.asarray(rng.normal(size=(60, 1, 8))) for _ in range(2))
    value = jnp.eye(60)[:, None, :]  # so that the output is the weights themselves
    weights = jattn.attention_weights(query, key, mask=masks.Causal())[0]
    dropped = jattn.attention(
        query,
        key,
        value,
        mask=masks.Causal(),
        dropout_rate=rate,
        dropout_key=jax.random.key(3),
    )[:, 0]
    kept = np.asarray(dropped != 0)
    causal = np.tril(np.ones((60, 60), bool))
    np.testing.assert_allclose(dropped, factor * np.where(kept, weights, 0), rtol=1e-14)
    assert not kept[~causal].any()
    count, share = causal.sum(), 1 - rate
    assert abs(kept.sum() - count * share) < 5 * math.sqrt(count * rate * share)


# Document 000, "LLMs part 2: attention mechanism"


def test_document_000_dropout_example():
    """Document 000: a weight of 0.3 at rate 0.2 becomes 0.3 × 1.25 = 0.375, or 0."""
    rows, weights = 500, np.array([0.3, 0.6, 0.1])
    query = jnp.asarray(np.broadcast_to(np.log(weights), (rows, 1, 3)))
    eye = jnp.eye(3)[:, None, :]  # keys that pick the scores and values that show the weights
    seed = jax.random.key(20241228)
    got = np.asarray(
        jattn.attention(query, eye, eye, scale=1.0, dropout_rate=0.2, dropout_key=seed)
    )[:, 0]
    assert sorted(set(np.round(got[:, 0], 12))) == [0, 0.375]
    assert sorted(set(np.round(got[:, 1], 12))) == [0, 0.75]
    assert sorted(set(np.round(got[:, 2], 12))) == [0, 0.125]
    kept = np.asarray(tile.keep(seed, 0.2, 0, 0, jnp.arange(rows), jnp.arange(3)))
    np.testing.assert_array_equal(got != 0, kept)
    assert abs(kept.mean() - 0.8) < 5 * math.sqrt(0.8 * 0.2 / kept.size)
    # "The sum of the weights over all inputs may not be exactly 1."
    assert np.abs(got.sum(axis=1) - 1).max() > 0.1
    assert abs(got.sum(axis=1).mean() - 1) < 0.05


def test_document_000_causal_matrix():
    """Document 000: ones on and below the diagonal."""
    want = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
    assert np.asarray(masks.Causal().dense(4, 4)).astype(int).tolist() == want


def test_document_000_simple_self_attention():
    """Document 000: the softmax of X Xᵀ weighs X, token by token."""
    x = np.random.default_rng(4).normal(size=(6, 4))
    want = np.zeros_like(x)
    for i in range(6):
        similarity = [math.exp(math.fsum(x[i] * x[j])) for j in range(6)]
        for j in range(6):
            want[i] += similarity[j] / math.fsum(similarity) * x[j]
    np.testing.assert_allclose(jattn.simple_self_attention(jnp.asarray(x)), want, rtol=1e-13)


def test_document_000_packed_heads_are_the_list_of_heads():
    """Document 000: three causal heads side by side in one matrix equal three alone."""
    batch, tokens, d_in, heads, size = 2, 6, 9, 3, 4
    rng = np.random.default_rng(5)
    x = jnp.asarray(rng.normal(size=(batch, tokens, d_in)))
    projections = [jnp.asarray(rng.normal(size=(d_in, heads * size))) for _ in range(3)]
    packed = [(x @ w).reshape(batch, tokens, heads, size) for w in projections]
    together = jattn.attention(*packed, mask=masks.Causal()).reshape(batch, tokens, heads * size)
    alone = [
        jattn.self_attention(
            x, *(w[:, n * size : (n + 1) * size] for w in projections), mask=masks.Causal()
        )
        for n in range(heads)
    ]
    np.testing.assert_allclose(together, jnp.concatenate(alone, axis=-1), rtol=0, atol=1e-13)


# Document 002, "Mechanisms of attention and transformers": the sizes of the 2017 paper


def test_document_002_eight_heads_of_64_in_a_width_of_512():
    """Document 002: d_model 512 = 8 heads of 64, scaled by √64, then projected by W_o."""
    length, width, heads, size = 7, 512, 8, 64
    rng = np.random.default_rng(6)
    x = rng.normal(size=(length, width))
    w_query, w_key, w_value = (rng.normal(size=(heads, width, size)) / 12 for _ in range(3))
    w_out = rng.normal(size=(heads * size, width)) / 22

    by_head = []
    for n in range(heads):
        q, k, v = x @ w_query[n], x @ w_key[n], x @ w_value[n]
        scores = q @ k.T / 8
        exponential = np.exp(scores - scores.max(axis=1, keepdims=True))
        by_head.append(exponential / exponential.sum(axis=1, keepdims=True) @ v)
        assert scores.std() > 3
    assert [head.shape for head in by_head] == [(length, 64)] * 8
    want = np.concatenate(by_head, axis=1) @ w_out

    packed = [
        jnp.asarray(x) @ jnp.asarray(w.transpose(1, 0, 2).reshape(width, width))
        for w in (w_query, w_key, w_value)
    ]
    split = [projected.reshape(length, heads, size) for projected in packed]
    out = jattn.attention(*split)
    assert out.shape == (length, 8, 64)
    got = out.reshape(length, width) @ jnp.asarray(w_out)
    assert got.shape == (length, 512)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-12)
    for n in range(heads):
        arguments = (jnp.asarray(w[n]) for w in (w_query, w_key, w_value))
        alone = jattn.self_attention(jnp.asarray(x), *arguments)
        np.testing.assert_allclose(out[:, n], alone, rtol=0, atol=1e-12)


# Document 003, "Attention is all you need", with a kernel in C++


MAXFLOAT = float(np.finfo(np.float64).max)


def kernel(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The loops of document 003: products, ÷ √d, row maxima, sums of exponentials, weighted sum."""
    n, d = q.shape
    scores, result = np.zeros((n, n)), np.zeros((n, d))
    for i in range(n):
        for j in range(n):
            for c in range(d):
                scores[i, j] += q[i, c] * k[j, c]
            scores[i, j] /= math.sqrt(d)
    for i in range(n):
        row_max, row_sum = -MAXFLOAT, 0.0
        for j in range(n):
            row_max = max(row_max, scores[i, j])
        for j in range(n):
            row_sum += math.exp(scores[i, j] - row_max)
        for j in range(n):
            scores[i, j] = math.exp(scores[i, j] - row_max) / row_sum
    for i in range(n):
        for j in range(n):
            for c in range(d):
                result[i, c] += scores[i, j] * v[j, c]
    return scores, result


@pytest.mark.parametrize("n, d", [(1, 1), (4, 3), (11, 5), (9, 16)])
def test_document_003_kernel(n, d):
    """Document 003: softmax(Q Kᵀ / √d) V on random N × d."""
    q, k, v = np.random.default_rng(7).normal(size=(3, n, d)) * 2
    weights, result = kernel(q, k, v)
    arrays = [jnp.asarray(x)[:, None, :] for x in (q, k, v)]
    np.testing.assert_allclose(jattn.attention_weights(*arrays[:2])[0], weights, atol=1e-14)
    np.testing.assert_allclose(jattn.attention(*arrays)[:, 0], result, rtol=0, atol=1e-13)
    assert n == 1 or np.abs(result - v.mean(axis=0)).max() > 0.3


def test_document_003_representation_before_the_softmax():
    """Document 003: R(i) = Σ_j ⟨Q(i), K(j)⟩ V(j), symmetric if K is Q and not otherwise."""
    n, d = 6, 4
    q, k, v = np.random.default_rng(8).normal(size=(3, n, d))
    for keys, symmetric in ((q, True), (k, False)):
        products = jattn.attention_scores(
            jnp.asarray(q)[:, None], jnp.asarray(keys)[:, None], scale=1.0
        )[0]
        assert np.allclose(products, products.T, rtol=0, atol=1e-14) == symmetric
        want = [
            [math.fsum(math.fsum(q[i] * keys[j]) * v[j, c] for j in range(n)) for c in range(d)]
            for i in range(n)
        ]
        got = jattn.interaction(jnp.asarray(v), products)
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-13)
