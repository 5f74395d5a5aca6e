"""Relations that attention must satisfy whatever its values are, in float64 to 1e-12.

No oracle is needed: two calls of the library that must agree, or one whose answer is known. Inputs
are drawn at random with masks that have dead rows; shapes come from a small fixed set, so that each
relation is compiled a few times only.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jattn
from jattn import masks, scores
from tests.arrays import assert_accurate
from tests.cases import GENERAL, CaseSizes
from tests.conftest import quick_jit


TOLERANCE = 1e-12
SHAPES = (
    CaseSizes(),
    CaseSizes(batch=(), T=3, S=4, N=2, K=1, H=5, V=3),
    CaseSizes(batch=(1,), T=6, S=6, N=3, K=3, H=3, V=6),
)

every_implementation = pytest.mark.parametrize("implementation", GENERAL)
shapes = st.sampled_from(SHAPES)
seeds = st.integers(0, 2**32 - 1)


class RandomCall(NamedTuple):
    """Random arguments: arrays, a mask with dead rows, a bias, and a generator for more."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    mask: np.ndarray
    bias: np.ndarray
    rng: np.random.Generator


def draw(sizes: CaseSizes, seed: int) -> RandomCall:
    rng = np.random.default_rng(seed)
    batch, T, S, N, K, H, V = sizes
    mask = rng.random((*batch, N, T, S)) < 0.7
    mask[..., 0, T - 1, :] = False
    return RandomCall(
        2 * rng.standard_normal((*batch, T, N, H)),
        2 * rng.standard_normal((*batch, S, K, H)),
        rng.standard_normal((*batch, S, K, V)),
        mask,
        rng.standard_normal((*batch, N, T, S)),
        rng,
    )


def call(
    implementation: str,
    q: Any,
    k: Any,
    v: Any,
    mask: Any = None,
    bias: Any = None,
) -> Any:
    """`(out, lse)` of the library, with a bias where one is given."""
    score = None if bias is None else scores.Bias(bias)
    return jattn.attention(
        q, k, v, mask=mask, score=score, return_lse=True, implementation=implementation
    )


@functools.cache
def attention(implementation: str) -> Any:
    """`call` as a function of `(q, k, v, mask, bias)` that is compiled once per shape."""
    return quick_jit(functools.partial(call, implementation))


@functools.cache
def gradients(implementation: str) -> Any:
    """Gradients with respect to q, k, v and bias, for cotangents of out and lse."""

    def pull(q: Any, k: Any, v: Any, bias: Any, mask: Any, d_out: Any, d_lse: Any) -> Any:
        attend = lambda q, k, v, bias: call(implementation, q, k, v, mask, bias)  # noqa: E731
        return jax.vjp(attend, q, k, v, bias)[1]((d_out, d_lse))

    return quick_jit(pull)


def cotangents(x: RandomCall) -> tuple[np.ndarray, np.ndarray]:
    """Random cotangents of out and lse."""
    out = (*x.q.shape[:-1], x.v.shape[-1])
    return x.rng.standard_normal(out), x.rng.standard_normal(x.mask.shape[:-1])


same = functools.partial(assert_accurate, limit=TOLERANCE)


@pytest.mark.one_in(2)
@every_implementation
@given(shapes, seeds)
def test_masked_keys_are_as_good_as_removed(implementation, sizes, seed):
    x = draw(sizes, seed)
    gone = x.rng.choice(sizes.S, 2, replace=False)
    left = np.setdiff1d(np.arange(sizes.S), gone)
    mask = x.mask.copy()
    mask[..., gone] = False
    d_out, d_lse = cotangents(x)
    attend, pull = attention(implementation), gradients(implementation)
    cut = [a[..., left, :, :] for a in (x.k, x.v)]
    without = attend(x.q, *cut, x.mask[..., left], x.bias[..., left])
    same(without, attend(x.q, x.k, x.v, mask, x.bias))
    dq, dk, dv, d_bias = pull(x.q, x.k, x.v, x.bias, mask, d_out, d_lse)
    want = pull(x.q, *cut, x.bias[..., left], x.mask[..., left], d_out, d_lse)
    same((dq, dk[..., left, :, :], dv[..., left, :, :], d_bias[..., left]), want)
    for gradient in (dk[..., gone, :, :], dv[..., gone, :, :], d_bias[..., gone]):
        assert not np.any(gradient)


@pytest.mark.one_in(2)
@every_implementation
@given(shapes, seeds)
def test_padding_changes_nothing(implementation, sizes, seed):
    """Queries and keys padded to a bucket with garbage, and lengths in the mask."""
    x = draw(sizes, seed)
    room = lambda a, axis, size: np.concatenate(  # noqa: E731
        [a, np.full_like(np.take(a, [0] * size, axis), np.nan)], axis
    )
    padded_mask = np.pad(x.mask, [(0, 0)] * (x.mask.ndim - 2) + [(0, 3), (0, 4)], mode="edge")
    mask = masks.Dense(padded_mask) & masks.Lengths(q=sizes.T, kv=sizes.S)
    attend = attention(implementation)
    out, lse = attend(room(x.q, -3, 3), room(x.k, -3, 4), room(x.v, -3, 4), mask)
    same((out[..., : sizes.T, :, :], lse[..., : sizes.T]), attend(x.q, x.k, x.v, x.mask))
    assert not np.any(out[..., sizes.T :, :, :])
    assert np.all(np.isneginf(lse[..., sizes.T :]))


@every_implementation
@given(seeds, st.sampled_from([np.nan, np.inf, 1e300]))
def test_batch_rows_do_not_see_each_other(implementation, seed, poison):
    x = draw(SHAPES[0], seed)
    d_out, d_lse = cotangents(x)
    q, k, v, bias = (a.copy() for a in (x.q, x.k, x.v, x.bias))
    for array in (q, k, v, bias):
        array[1] = poison
    attend, pull = attention(implementation), gradients(implementation)
    same([a[0] for a in attend(q, k, v, x.mask, bias)], [a[0] for a in attend(*x[:5])], limit=0)
    got = pull(q, k, v, bias, x.mask, d_out, d_lse)
    want = pull(x.q, x.k, x.v, x.bias, x.mask, d_out, d_lse)
    same([a[0] for a in got], [a[0] for a in want], limit=0)


@pytest.mark.one_in(8)
@every_implementation
@pytest.mark.parametrize("S", [1, 2, 3, 7, 17, 31, 32, 33, 64, 65, 129])
def test_no_key_beyond_the_end_is_counted(implementation, S):
    """Lengths around multiples of blocks: with queries of zero, out is the mean of the values."""
    v = jnp.arange(1.0, S + 1)[:, None, None]
    for T in (1, 16):
        out, lse = attention(implementation)(jnp.zeros((T, 1, 1)), jnp.ones((S, 1, 1)), v)
        np.testing.assert_allclose(out, (S + 1) / 2, rtol=1e-14)
        np.testing.assert_allclose(lse, np.log(S), rtol=1e-14)
