"""Score functions: each against its formula in NumPy, and gradients against differences."""

import dataclasses
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn import masks, scores
from jattn._pytree import select_head


B, T, S, N, K, H, V = 2, 5, 7, 6, 3, 10, 4
Q_POSITIONS = np.array([30, 9, 0, 4, 12])
KV_POSITIONS = np.array([0, 11, 2, 35, 3, 8, 6])
SCALE = 0.3
RNG = np.random.default_rng(0)
QUERY, KEY, VALUE = (RNG.normal(size=(B, *rest)) for rest in ((T, N, H), (S, K, H), (S, K, V)))
RAW = SCALE * np.einsum("btnh,bsnh->bnts", QUERY, np.repeat(KEY, N // K, axis=2))
SLOPES = RNG.normal(size=N)
TABLE = RNG.normal(size=(12, N))
BIAS = RNG.normal(size=(B, N, T, S))


def scored(score: Any, **arguments: Any) -> np.ndarray:
    """What the library makes of RAW, at positions that are not places."""
    arguments = {
        "q_positions": jnp.asarray(Q_POSITIONS),
        "kv_positions": jnp.asarray(KV_POSITIONS),
        **arguments,
    }
    query, key = jnp.asarray(QUERY), jnp.asarray(KEY)
    return np.asarray(jattn.attention_scores(query, key, score=score, scale=SCALE, **arguments))


def assert_equal(got: Any, want: Any) -> None:
    """Equal to float64 rounding, and nothing like the untouched scores."""
    np.testing.assert_allclose(got, np.broadcast_to(want, RAW.shape), rtol=0, atol=1e-13)
    assert np.abs(np.asarray(got) - RAW).max() > 0.1


def test_without_a_score_function():
    np.testing.assert_allclose(scored(None), RAW, rtol=0, atol=1e-14)
    assert np.std(RAW) > 0.5


# Formulas


@pytest.mark.parametrize("cap", [0.7, 3, np.float64(1.5)])
def test_soft_cap(cap):
    got = scored(scores.SoftCap(cap))
    assert_equal(got, float(cap) * np.tanh(RAW / float(cap)))
    assert np.abs(got).max() <= cap
    assert_equal(scored(scores.SoftCap(jnp.asarray(float(cap)))), got)


@pytest.mark.parametrize("t", [0.5, 4, np.float64(1.7)])
def test_temperature(t):
    assert_equal(scored(scores.Temperature(t)), RAW / float(t))
    assert_equal(scored(scores.Temperature(jnp.asarray(float(t)))), RAW / float(t))


def test_caps_of_heads_may_be_beyond_float32():
    np.testing.assert_allclose(scored(scores.SoftCap(np.full(N, 1e300))), RAW, atol=1e-15)
    with pytest.raises(ValueError, match="cap: expected a finite number > 0"):
        scores.SoftCap(np.full(N, np.inf))


@pytest.mark.parametrize(
    "score",
    [
        scores.SoftCap(2.0),
        scores.SoftCap(jnp.asarray(2.0, jnp.bfloat16)),
        scores.Alibi(jnp.asarray([0.3], jnp.bfloat16)),
        scores.SoftCap(3.0) >> scores.Alibi([0.25]),
    ],
    ids=["cap", "learned cap", "alibi", "both"],
)
def test_scores_may_be_counted_in_another_unit(score):
    unit = 0.17
    rows, columns = masks.span(5), masks.span(7)
    given = jnp.asarray(np.random.default_rng(0).normal(size=(5, 7)) * 3)
    head = select_head(score, 0, 0), select_head(score.per(unit), 0, 0)
    plain, counted = (
        f.evaluate(x, 0, 0, rows, columns) for f, x in zip(head, (given, given / unit), strict=True)
    )
    np.testing.assert_allclose(counted * unit, plain, rtol=1e-6)


def test_functions_without_units_say_so():
    anything = scores.Score(lambda s, b, h, q, kv: s * s)
    assert anything.per(2.0) is None
    assert (scores.Alibi([0.5]) >> anything).per(2.0) is None
    assert scores.SoftCap(1e300).per(1e-30) is None


def test_alibi_is_linear_in_the_distance_of_positions():
    distance = np.abs(Q_POSITIONS[:, None] - KV_POSITIONS[None, :])
    want = RAW - SLOPES[None, :, None, None] * distance
    assert_equal(scored(scores.Alibi(jnp.asarray(SLOPES))), want)
    by_place = np.abs(np.arange(T)[:, None] - np.arange(S)[None, :])
    got = scored(scores.Alibi(jnp.asarray(SLOPES)), q_positions=None, kv_positions=None)
    assert_equal(got, RAW - SLOPES[None, :, None, None] * by_place)


def test_alibi_takes_a_list_of_slopes():
    slopes = [0.5, 0.25, 0.125, 1.0, 2.0, 4.0]  # exact in float32
    assert_equal(scored(scores.Alibi(slopes)), scored(scores.Alibi(jnp.asarray(slopes))))


def test_slopes_of_the_paper():
    # Press et al. 2022: for 8 heads 1/2 ... 1/2^8; for 16 heads the square roots between them.
    assert scores.alibi_slopes(8).tolist() == [2.0**-n for n in range(1, 9)]
    assert scores.alibi_slopes(1).tolist() == [2.0**-8]
    sixteen = [2.0 ** (-n / 2) for n in range(1, 17)]
    np.testing.assert_allclose(scores.alibi_slopes(16), sixteen, rtol=1e-7)
    # Other numbers: those of the power of two below, then every other one of the power above.
    assert scores.alibi_slopes(6).tolist() == [1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 2, 1 / 8]
    assert scores.alibi_slopes(3).tolist() == [1 / 16, 1 / 256, 1 / 4]
    np.testing.assert_allclose(
        scores.alibi_slopes(12)[8:], [2.0**-0.5, 2.0**-1.5, 2.0**-2.5, 2.0**-3.5], rtol=1e-7
    )
    assert all(scores.alibi_slopes(n).shape == (n,) for n in range(1, 40))


def t5_bucket(ahead: int, buckets: int, bidirectional: bool, max_distance: int) -> int:
    """Raffel et al. 2020, section 2.1, in exact arithmetic: the bucket of kv − q.

    With m exact buckets of k in all for a direction and a far distance d, the bucket is m plus the
    largest n < k − m for which log(d / m) / log(max / m) ≥ n / (k − m).
    """
    first = 0
    if bidirectional:
        buckets //= 2
        first = buckets if ahead > 0 else 0
        distance = abs(ahead)
    else:
        distance = max(-ahead, 0)
    exact = buckets // 2
    if distance < exact:
        return first + distance
    steps = buckets - exact
    reached = Fraction(distance, exact) ** steps
    growth = Fraction(max_distance, exact)
    n = 0
    while n < steps - 1 and reached >= growth ** (n + 1):
        n += 1
    return first + exact + n


T5_SETTINGS = [(32, True, 128), (32, False, 128), (12, True, 20), (10, False, 30), (4, True, 64)]


@pytest.mark.parametrize("buckets, bidirectional, max_distance", T5_SETTINGS)
def test_t5_buckets(buckets, bidirectional, max_distance):
    reach = 300
    positions = jnp.arange(-reach, reach + 1)
    numbered = jnp.broadcast_to(jnp.arange(float(buckets))[:, None], (buckets, 1))
    relative = scores.RelativeBias(numbered, bidirectional=bidirectional, max_distance=max_distance)
    zero = jnp.zeros((1, 1, 1)), jnp.zeros((2 * reach + 1, 1, 1))
    got = jattn.attention_scores(
        *zero, score=relative, q_positions=jnp.array([0]), kv_positions=positions
    )
    want = [
        t5_bucket(ahead, buckets, bidirectional, max_distance) for ahead in range(-reach, reach + 1)
    ]
    assert got[0, 0].astype(int).tolist() == want
    assert set(want) == set(range(buckets)) - ({buckets // 2} if bidirectional else set())


def test_t5_buckets_that_are_known():
    # 32 buckets to 128: 8 exact ones a side, then doubling distances every two buckets.
    near = {0: 0, -1: 1, -7: 7, -8: 8, -11: 8, -12: 9, -16: 10, -32: 12, -64: 14, -91: 15}
    both = {**near, -128: 15, -10000: 15, 1: 17, 7: 23, 8: 24, 16: 26, 10000: 31}
    for ahead, bucket in both.items():
        assert t5_bucket(ahead, 32, True, 128) == bucket
        got = scores.relative_bucket(jnp.array([ahead]), 32, bidirectional=True, max_distance=128)
        assert got.tolist() == [bucket]


@pytest.mark.parametrize("bidirectional", [True, False])
def test_relative_bias_adds_the_bucket_of_each_head(bidirectional):
    relative = scores.RelativeBias(jnp.asarray(TABLE), bidirectional=bidirectional, max_distance=20)
    want = RAW.copy()
    for b, h, i, j in np.ndindex(RAW.shape):
        ahead = int(KV_POSITIONS[j] - Q_POSITIONS[i])
        want[b, h, i, j] += TABLE[t5_bucket(ahead, 12, bidirectional, 20), h]
    assert_equal(scored(relative), want)


@pytest.mark.parametrize(
    "cut",
    [np.s_[:], np.s_[:1], np.s_[:, :1], np.s_[:, :, :1], np.s_[..., :1], np.s_[:1, :1, :1, 2:3]],
)
def test_bias_goes_by_place_and_broadcasts(cut):
    array = BIAS[cut]
    assert_equal(scored(scores.Bias(jnp.asarray(array))), RAW + array)


def test_score_sees_everything_that_flex_functions_see():
    def strange(score, b, h, q_idx, kv_idx, table, factor):
        where = 1000 * b + 100 * h + 10 * q_idx + kv_idx
        return score * factor + table[h] * where.astype(score.dtype)

    got = scored(scores.Score(strange, jnp.asarray(SLOPES), jnp.asarray(2.0)))
    b, h = np.arange(B)[:, None, None, None], np.arange(N)[:, None, None]
    where = 1000 * b + 100 * h + 10 * Q_POSITIONS[:, None] + KV_POSITIONS
    want = 2 * RAW + SLOPES[:, None, None] * where
    np.testing.assert_allclose(got, want, rtol=1e-14, atol=1e-13)


def test_score_gets_scalars_and_flat_batch_rows():
    seen = set()

    def spy(score, b, h, q_idx, kv_idx):
        seen.add(tuple((x.shape, str(x.dtype)) for x in (score, b, h, q_idx, kv_idx)))
        return score + b.astype(score.dtype)

    zero = jnp.zeros((2, 3, T, 1, 4), jnp.float32), jnp.zeros((2, 3, S, 1, 4), jnp.float32)
    got = jattn.attention_scores(*zero, score=scores.Score(spy))
    np.testing.assert_array_equal(got[..., 0, 0, 0], [[0, 1, 2], [3, 4, 5]])
    assert seen == {(((), "float32"), *(((), "int32"),) * 4)}


def _distance_from_home(score, b, h, q_idx, kv_idx):
    return score - 0.5 * jnp.abs(q_idx - kv_idx).astype(score.dtype)


def test_score_equals_the_built_in_functions():
    pairs = [
        (scores.Score(_distance_from_home), scores.Alibi([0.5] * N)),
        (scores.Score(lambda s, b, h, q, kv: 2 * jnp.tanh(s / 2)), scores.SoftCap(2.0)),
        (scores.Score(lambda s, b, h, q, kv, t: s / t, jnp.asarray(3.0)), scores.Temperature(3.0)),
    ]
    for own, built_in in pairs:
        np.testing.assert_allclose(scored(own), scored(built_in), rtol=0, atol=1e-14)


# Order


def test_the_left_function_comes_first():
    bias, cap, warm = scores.Bias(jnp.asarray(BIAS)), scores.SoftCap(1.5), scores.Temperature(0.5)
    orders = {
        "bias, cap": (bias >> cap, 1.5 * np.tanh((RAW + BIAS) / 1.5)),
        "cap, bias": (cap >> bias, 1.5 * np.tanh(RAW / 1.5) + BIAS),
        "warm, cap, bias": (warm >> cap >> bias, 1.5 * np.tanh(RAW / 0.5 / 1.5) + BIAS),
        "bias, warm, cap": (bias >> (warm >> cap), 1.5 * np.tanh((RAW + BIAS) / 0.5 / 1.5)),
        "bias twice": (bias >> bias, RAW + 2 * BIAS),
    }
    for score, want in orders.values():
        assert_equal(scored(score), want)
    results = [scored(score) for score, _ in orders.values()]
    for n, one in enumerate(results):
        assert all(np.abs(one - other).max() > 0.1 for other in results[:n])


def test_grouping_of_functions_does_not_matter():
    a, b, c = scores.SoftCap(1.5), scores.Bias(jnp.asarray(BIAS)), scores.Alibi(jnp.asarray(SLOPES))
    np.testing.assert_array_equal(scored((a >> b) >> c), scored(a >> (b >> c)))


def test_functions_come_after_the_scale_and_before_the_mask():
    score = scores.SoftCap(0.5) >> scores.Bias(jnp.asarray(100 + BIAS))
    got = scored(score, mask=masks.Lengths(kv=3))
    want = np.where(np.arange(S) < 3, 0.5 * np.tanh(RAW / 0.5) + 100 + BIAS, -np.inf)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-12)


# Parameters and gradients


SOME_IDS = jnp.asarray(np.arange(50) % 3, jnp.int32)


def _by_id(score, b, h, q_idx, kv_idx, table, ids, gain):
    own = table[ids[q_idx], ids[kv_idx]]
    return score * gain + own * jnp.sin(score)


PARAMETERS: dict[str, tuple[Callable[[Any], Any], np.ndarray]] = {
    "cap": (scores.SoftCap, np.asarray(1.3)),
    "temperature": (scores.Temperature, np.asarray(0.7)),
    "slopes": (scores.Alibi, 0.1 * SLOPES),
    "table": (lambda x: scores.RelativeBias(x, max_distance=20), TABLE),
    "causal table": (
        lambda x: scores.RelativeBias(x, bidirectional=False, max_distance=20),
        TABLE,
    ),
    "bias": (scores.Bias, BIAS[:, :2, :, :1].repeat(3, axis=1)),
    "shared bias": (scores.Bias, BIAS[:1, :1]),
    "row bias": (scores.Bias, BIAS[:, :, :1, :]),
    "operand": (
        lambda x: scores.Score(_by_id, x, SOME_IDS, jnp.asarray(1.5)),
        RNG.normal(size=(3, 3)),
    ),
    "second operand": (
        lambda x: scores.Score(_by_id, jnp.asarray(TABLE[:3, :3]), SOME_IDS, x),
        np.asarray(0.8),
    ),
    "in a chain": (
        lambda x: scores.Bias(jnp.asarray(BIAS)) >> scores.SoftCap(x) >> scores.Temperature(0.5),
        np.asarray(2.0),
    ),
    "late in a chain": (
        lambda x: scores.SoftCap(2.0) >> scores.Alibi(0.1 * x) >> scores.Alibi(x),
        0.1 * SLOPES,
    ),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", PARAMETERS)
def test_parameter_gradients_are_differences(name):
    build, start = PARAMETERS[name]
    arrays = [jnp.asarray(x) for x in (QUERY, KEY, VALUE)]
    d_out = jnp.asarray(np.random.default_rng(1).normal(size=(B, T, N, V)))
    d_lse = jnp.asarray(np.random.default_rng(2).normal(size=(B, N, T)))

    @jax.jit
    def loss(x):
        out, lse = jattn.attention(
            *arrays,
            mask=masks.Window(9, 9) & masks.Lengths(q=T - 1),  # the last row is dead
            score=build(x),
            scale=SCALE,
            q_positions=jnp.asarray(Q_POSITIONS),
            kv_positions=jnp.asarray(KV_POSITIONS),
            return_lse=True,
        )
        return jnp.sum(out * d_out) + jnp.sum(jnp.where(lse == -jnp.inf, 0, lse) * d_lse)

    start = jnp.asarray(start)
    got = jax.jit(jax.grad(loss))(start)
    step = 1e-5
    want = np.zeros(start.shape)
    for index in np.ndindex(start.shape):
        ahead, back = (loss(start.at[index].add(sign * step)) for sign in (1, -1))
        want[index] = (ahead - back) / (2 * step)
    assert got.dtype == start.dtype
    np.testing.assert_allclose(got, want, rtol=1e-7, atol=1e-8)
    assert np.abs(want).max() > 1e-2


def test_constants_are_structure_and_arrays_are_parameters():
    leaves = jax.tree.leaves
    assert leaves(scores.SoftCap(2.0) >> scores.Temperature(3) >> scores.SoftCap(1.5)) == []
    assert len(leaves(scores.SoftCap(jnp.asarray(2.0)) >> scores.Alibi(jnp.asarray(SLOPES)))) == 2
    structure = jax.tree.structure
    assert structure(scores.SoftCap(2.0)) == structure(scores.SoftCap(2.0))
    assert structure(scores.SoftCap(2.0)) != structure(scores.SoftCap(3.0))
    assert structure(scores.SoftCap(jnp.asarray(2.0))) == structure(
        scores.SoftCap(jnp.asarray(3.0))
    )


def test_one_trace_for_all_values_of_a_parameter():
    traces = []
    query, key = jnp.asarray(QUERY), jnp.asarray(KEY)

    @jax.jit
    def compiled(score):
        traces.append(score)
        return jattn.attention_scores(query, key, score=score)

    for cap in (1.0, 2.0, 3.0):
        compiled(scores.SoftCap(jnp.asarray(cap)) >> scores.Temperature(2.0))
    assert len(traces) == 1
    compiled(scores.SoftCap(jnp.asarray(1.0)) >> scores.Temperature(3.0))
    assert len(traces) == 2


def test_gradient_of_a_score_function_is_a_score_function():
    score = scores.SoftCap(jnp.asarray(2.0)) >> scores.Bias(jnp.asarray(BIAS))
    arrays = [jnp.asarray(x) for x in (QUERY, KEY, VALUE)]
    slope = jax.grad(lambda f: jattn.attention(*arrays, score=f).sum())(score)
    assert jax.tree.structure(slope) == jax.tree.structure(score)
    assert jax.tree.map(jnp.shape, jax.tree.leaves(slope)) == [(), (B, N, T, S)]
    # A row's bias shifts all of its logits alike, so its gradients cancel.
    d_bias = np.asarray(jax.tree.leaves(slope)[1])
    assert np.abs(d_bias).max() > 1e-3
    np.testing.assert_allclose(d_bias.sum(axis=-1), 0, atol=1e-14)


def test_vmap_over_parameters():
    caps = jnp.asarray([0.5, 1.0, 2.0])
    got = jax.vmap(
        lambda cap: jattn.attention_scores(
            jnp.asarray(QUERY), jnp.asarray(KEY), score=scores.SoftCap(cap), scale=SCALE
        )
    )(caps)
    for cap, one in zip(caps, got, strict=True):
        np.testing.assert_allclose(one, cap * np.tanh(RAW / cap), rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_scores_are_float32_whatever_the_parameters_are(dtype):
    query, key = jnp.asarray(QUERY, dtype), jnp.asarray(KEY, dtype)
    score = (
        scores.SoftCap(jnp.asarray(2.0, jnp.float64))
        >> scores.Bias(jnp.asarray(BIAS, dtype))
        >> scores.Alibi(jnp.asarray(SLOPES, jnp.float32))
        >> scores.Temperature(2)
        >> scores.Score(lambda s, b, h, q, kv, x: s.astype(x.dtype) + x, jnp.asarray(1, dtype))
    )
    got = jattn.attention_scores(query, key, score=score)
    assert got.dtype == jnp.float32


@pytest.mark.parametrize(
    "score",
    [scores.SoftCap(1.0), scores.Bias(jnp.asarray(BIAS)) >> scores.SoftCap(jnp.asarray(1.0))],
)
def test_score_functions_are_frozen_pytrees(score):
    for field in dataclasses.fields(score):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(score, field.name, 1)
    for stand_in in (object(), "T S", 0):
        mapped = jax.tree.map(lambda _, x=stand_in: x, score)
        assert jax.tree.structure(mapped) == jax.tree.structure(score)
    assert type(jax.tree.map(lambda _: None, score)) is type(score)


# Errors


def _attended(score: Any) -> Any:
    return jattn.attention_scores(jnp.asarray(QUERY), jnp.asarray(KEY), score=score)


untyped: Any = scores  # to write down what a type checker would refuse

WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "cap 0": (lambda: scores.SoftCap(0.0), ValueError, "SoftCap: cap.*> 0, got 0.0"),
    "negative cap": (lambda: scores.SoftCap(-2), ValueError, "SoftCap: cap.*> 0, got -2"),
    "NaN cap": (lambda: scores.SoftCap(math.nan), ValueError, "SoftCap: cap.* got nan"),
    "infinite cap": (lambda: scores.SoftCap(math.inf), ValueError, "SoftCap: cap.* got inf"),
    "int cap": (lambda: scores.SoftCap(jnp.asarray(2)), TypeError, "SoftCap: cap.*float.* int64"),
    "wide cap": (lambda: scores.SoftCap(jnp.ones((2, S))), ValueError, r"SoftCap: cap.*\[2, 7\]"),
    "text": (lambda: scores.Temperature("1"), TypeError, "Temperature: t.* got '1'"),
    "wide t": (lambda: scores.Temperature(jnp.ones((S, 1))), ValueError, r"t.*\[7, 1\]"),
    "no temperature": (lambda: scores.Temperature(0), ValueError, "Temperature: t.* got 0"),
    "int slopes": (lambda: scores.Alibi(jnp.arange(N)), TypeError, "Alibi: slopes.*float.* int64"),
    "five slopes": (
        lambda: _attended(scores.Alibi(jnp.ones(5))),
        ValueError,
        r"slopes: expected \[N\] = \[6\].* got \[5\]",
    ),
    "no heads": (lambda: scores.alibi_slopes(0), ValueError, "num_heads .*>= 1, got 0"),
    "flat table": (
        lambda: scores.RelativeBias(jnp.ones(12)),
        ValueError,
        r"RelativeBias: expected table \[buckets, N\], got \[12\]",
    ),
    "int table": (lambda: scores.RelativeBias(jnp.ones((12, N), int)), TypeError, "table.* int64"),
    "few buckets": (lambda: scores.RelativeBias(jnp.ones((3, N))), ValueError, "3 buckets"),
    "near maximum": (
        lambda: scores.RelativeBias(jnp.ones((32, N)), max_distance=8),
        ValueError,
        "max_distance 8",
    ),
    "table of other heads": (
        lambda: _attended(scores.RelativeBias(jnp.ones((12, 5)))),
        ValueError,
        r"table: expected \[buckets, N\] = \[any, 6\].* got \[12, 5\]",
    ),
    "bool bias": (lambda: scores.Bias(jnp.ones((1, 1, T, S), bool)), TypeError, "Bias: .* bool"),
    "flat bias": (
        lambda: _attended(scores.Bias(jnp.ones((T, S)))),
        ValueError,
        r"\[\*B, N, T, S\].* got \[5, 7\]",
    ),
    "bias without batch": (
        lambda: _attended(scores.Bias(jnp.ones((N, T, S)))),
        ValueError,
        r"\[\*B, N, T, S\] = \[2, 6, 5, 7\].* got \[6, 5, 7\]",
    ),
    "turned bias": (
        lambda: _attended(scores.Bias(jnp.ones((B, N, S, T)))),
        ValueError,
        r"\[\*B, N, T, S\] = \[2, 6, 5, 7\].* got \[2, 6, 7, 5\]",
    ),
    "second in a chain": (
        lambda: _attended(scores.SoftCap(1.0) >> scores.Alibi(jnp.ones(5))),
        ValueError,
        r"score.second.slopes: expected \[N\]",
    ),
    "no function": (lambda: untyped.Score(3), TypeError, "Score: .* got int"),
    "truth": (
        lambda: _attended(scores.Score(lambda s, b, h, q, kv: q < kv)),
        TypeError,
        "float scalar, got bool",
    ),
    "vector": (
        lambda: _attended(scores.Score(lambda s, b, h, q, kv, x: s + x, jnp.ones(3))),
        TypeError,
        r"float scalar, got float64 \[3\]",
    ),
    "then a number": (lambda: untyped.SoftCap(1.0) >> 3, TypeError, "unsupported operand"),
    "a bare array": (lambda: _attended(jnp.asarray(BIAS)), TypeError, "scores.Bias"),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.usefixtures("unchecked")
def test_wrong_score_functions_raise(name):
    build, error, message = WRONG[name]
    with jax.numpy_rank_promotion("allow"), pytest.raises(error, match=message):
        build()
