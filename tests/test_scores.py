"""Properties of score functions that the cases of the contract do not test."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn import scores
from tests.cases import bucket
from tests.test_masks import assert_frozen_pytree


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
    """The library's modified scores of RAW, at positions that differ from places."""
    positions = {"q_positions": Q_POSITIONS, "kv_positions": KV_POSITIONS}
    arguments = {name: jnp.asarray(x) for name, x in positions.items()} | arguments
    query, key = jnp.asarray(QUERY), jnp.asarray(KEY)
    return np.asarray(jattn.attention_scores(query, key, score=score, scale=SCALE, **arguments))


def assert_equal(got: Any, want: Any) -> None:
    """Scores are equal to float64 rounding, and differ much from the unmodified scores."""
    np.testing.assert_allclose(got, np.broadcast_to(want, RAW.shape), rtol=0, atol=1e-13)
    assert np.abs(np.asarray(got) - RAW).max() > 0.1


def test_caps_of_heads_may_be_beyond_float32():
    np.testing.assert_allclose(scored(scores.SoftCap(np.full(N, 1e300))), RAW, atol=1e-15)
    with pytest.raises(ValueError, match="cap: expected a finite number > 0"):
        scores.SoftCap(np.full(N, np.inf))


def test_alibi_takes_a_list_of_slopes():
    slopes = [0.5, 0.25, 0.125, 1.0, 2.0, 4.0]  # exact in float32
    assert_equal(scored(scores.Alibi(slopes)), scored(scores.Alibi(jnp.asarray(slopes))))


def test_slopes_of_the_paper():
    # Press et al. 2022: for 8 heads 1/2 ... 1/2^8; for 16 heads the square roots between them.
    # Other numbers: those of the power of two below, then every other one of the power above.
    for powers in (
        [8],
        [4, 8, 2],
        [2, 4, 6, 8, 1, 3],
        [*range(1, 9)],
        [*range(1, 9), 0.5, 1.5, 2.5, 3.5],
        [n / 2 for n in range(1, 17)],
    ):
        want = [2.0**-n for n in powers]
        np.testing.assert_allclose(scores.alibi_slopes(len(powers)), want, rtol=1e-7)
    assert all(scores.alibi_slopes(n).shape == (n,) for n in range(1, 40))


@pytest.mark.parametrize(
    "buckets, bidirectional, max_distance",
    [
        *((32, True, 128), (32, False, 128), (12, True, 20), (10, False, 30), (4, True, 64)),
        *((6, True, 100), (20, False, 1000), (51, False, 64)),  # with distances that are boundaries
    ],
)
def test_t5_buckets(buckets, bidirectional, max_distance):
    distances, rules = range(-1100, 301), {"bidirectional": bidirectional}
    rules["max_distance"] = max_distance
    got = scores.relative_bucket(jnp.array(distances), buckets, **rules)
    want = [bucket(x, buckets, **rules) for x in distances]
    assert got.tolist() == want
    assert set(want) == set(range(buckets)) - ({buckets // 2} if bidirectional else set())


@pytest.mark.parametrize(("buckets", "max_distance"), [(1, 128), (3, 128), (32, 8)])
def test_t5_buckets_that_do_not_exist(buckets, max_distance):
    with pytest.raises(
        ValueError, match=r"relative_bucket: expected at least 4 buckets, and max_d"
    ):
        options: Any = {"bidirectional": True, "max_distance": max_distance}
        scores.relative_bucket(jnp.arange(3), buckets, **options)


def test_t5_buckets_that_are_known():
    # 32 buckets to 128: 8 exact ones a side, then doubling distances every two buckets.
    behind = {0: 0, -1: 1, -7: 7, -8: 8, -11: 8, -12: 9, -16: 10, -32: 12, -64: 14, -91: 15}
    both = {**behind, -128: 15, -10000: 15, 1: 17, 7: 23, 8: 24, 16: 26, 10000: 31}
    for ahead, number in both.items():
        assert bucket(ahead, 32, True, 128) == number
        got = scores.relative_bucket(jnp.array([ahead]), 32, bidirectional=True, max_distance=128)
        assert got.tolist() == [number]


def test_score_gets_scalars_and_flat_batch_rows():
    seen = set()

    def spy(score, b, h, q_idx, kv_idx):
        seen.add(tuple((x.shape, str(x.dtype)) for x in (score, b, h, q_idx, kv_idx)))
        return score + b.astype(score.dtype)

    zero = jnp.zeros((2, 3, T, 1, 4), jnp.float32), jnp.zeros((2, 3, S, 1, 4), jnp.float32)
    got = jattn.attention_scores(*zero, score=scores.Score(spy))
    np.testing.assert_array_equal(got[..., 0, 0, 0], [[0, 1, 2], [3, 4, 5]])
    assert seen == {(((), "float32"), *(((), "int32"),) * 4)}


def test_grouping_of_functions_does_not_matter():
    a, b, c = scores.SoftCap(1.5), scores.Bias(jnp.asarray(BIAS)), scores.Alibi(jnp.asarray(SLOPES))
    np.testing.assert_array_equal(scored((a >> b) >> c), scored(a >> (b >> c)))


def test_constants_are_structure_and_arrays_are_parameters():
    leaves = jax.tree.leaves
    assert leaves(scores.SoftCap(2.0) >> scores.Temperature(3) >> scores.SoftCap(1.5)) == []
    assert len(leaves(scores.SoftCap(jnp.asarray(2.0)) >> scores.Alibi(jnp.asarray(SLOPES)))) == 2
    structures = [jax.tree.structure(scores.SoftCap(x)) for x in (2.0, 2.0, 3.0)]
    assert structures[0] == structures[1] != structures[2]
    two, three = (jax.tree.structure(scores.SoftCap(jnp.asarray(x))) for x in (2.0, 3.0))
    assert two == three


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


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_scores_and_weights_are_float32_whatever_the_arguments_are(dtype):
    query, key = jnp.asarray(QUERY, dtype), jnp.asarray(KEY, dtype)
    score = (
        scores.SoftCap(jnp.asarray(2.0, jnp.float64))
        >> scores.Bias(jnp.asarray(BIAS, dtype))
        >> scores.Alibi(jnp.asarray(SLOPES, jnp.float32))
        >> scores.Temperature(2)
        >> scores.Score(lambda s, b, h, q, kv, x: s.astype(x.dtype) + x, jnp.asarray(1, dtype))
    )
    for function in (jattn.attention_scores, jattn.attention_weights):
        result = jax.eval_shape(functools.partial(function, score=score), query, key)
        assert result.dtype == jnp.float32


@pytest.mark.parametrize(
    "score",
    [scores.SoftCap(1.0), scores.Bias(jnp.asarray(BIAS)) >> scores.SoftCap(jnp.asarray(1.0))],
)
def test_score_functions_are_frozen_pytrees(score):
    assert_frozen_pytree(score)
