"""The softmax as a monoid: parts of the keys, in any order and grouping, make the whole."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jattn
from jattn import masks, softmax
from tests.arrays import assert_accurate, assert_equal
from tests.conftest import quick_jit
from tests.oracle import error


T, S, N, K, H, V = 5, 7, 4, 2, 3, 6
NEGATIVE = -jnp.inf


def arrays(dtype: Any = jnp.float64, seed: int = 0) -> tuple[jax.Array, ...]:
    """Queries, keys and values whose logits spread over several units."""
    rng = np.random.default_rng(seed)
    shapes = (2, T, N, H), (2, S, K, H), (2, S, K, V)
    return tuple(jnp.asarray(2 * rng.standard_normal(shape), dtype) for shape in shapes)


def some_mask(seed: int = 0) -> np.ndarray:
    """A random mask with a dead row, and rows that live on the first or the last keys only."""
    dense = np.random.default_rng(seed).random((2, N, T, S)) < 0.6
    dense[0, :, 1] = False
    dense[1, :, 2, : S // 2] = False
    dense[1, :, 3, S // 2 :] = False
    return dense


def in_parts(q: Any, k: Any, v: Any, dense: Any, cuts: tuple[int, ...]) -> list[Any]:
    """Attention over the keys between the cuts, part by part."""
    edges = (0, *cuts, k.shape[1])
    pieces = [slice(*x) for x in itertools.pairwise(edges)]
    kvs = [(k[:, x], v[:, x], masks.Dense(dense[..., x])) for x in pieces]
    return [jattn.attention(q, k, v, mask=mask, return_lse=True) for k, v, mask in kvs]


def a_part(seed: int, dtype: Any = jnp.float64) -> Any:
    rng = np.random.default_rng(seed)
    gone = rng.random((2, N, T)) < 0.3
    lse = np.where(gone, -np.inf, 5 * rng.standard_normal((2, N, T)))
    out = rng.standard_normal((2, T, N, V))
    out[np.swapaxes(gone, 1, 2)] = 0
    wide = jnp.float64 if dtype == jnp.float64 else jnp.float32
    return jnp.asarray(out, dtype), jnp.asarray(lse, wide)


def no_keys(dtype: Any = jnp.float64) -> Any:
    wide = jnp.float64 if dtype == jnp.float64 else jnp.float32
    return jnp.zeros((2, T, N, V), dtype), jnp.full((2, N, T), NEGATIVE, wide)


merge = quick_jit(jattn.merge)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_no_keys_is_the_identity(dtype):
    part, nothing = a_part(1, dtype), no_keys(dtype)
    for parts in ((part,), (part, nothing), (nothing, part), (nothing, part, nothing)):
        out, lse = merge(*parts)
        assert out.dtype == dtype
        assert_equal((out, lse), part)


def test_nothing_and_nothing_is_nothing_and_has_no_gradient():
    parts = (no_keys(), no_keys())
    (out, lse), pull = jax.vjp(jattn.merge, *parts)
    assert not np.any(out)
    assert np.all(lse == NEGATIVE)
    for gradient in jax.tree.leaves(pull((jnp.ones_like(out), jnp.ones_like(lse)))):
        assert not np.any(gradient)


@given(st.integers(0, 10**6), st.permutations(range(4)))
def test_any_order_and_any_grouping(seed, order):
    parts = [a_part(seed + i) for i in range(4)]
    whole = merge(*parts)
    a, b, c, d = (parts[i] for i in order)
    for regrouped in (
        merge(a, b, c, d),
        merge(merge(a, b), merge(c, d)),
        merge(a, merge(b, merge(c, d))),
        merge(merge(merge(a, b), c), d),
    ):
        assert_accurate(regrouped, whole, 1e-14)


CUTS = [(0,), (1,), (3,), (6,), (7,), (2, 2, 5), (1, 2, 3, 4, 5, 6)]


@pytest.mark.one_in(14)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("cuts", CUTS)
def test_parts_merge_to_the_whole_with_their_gradients(cuts, dtype):
    """The whole is computed in float64 from the same inputs.

    Measured in float32: values 2e-7, gradients 2.1e-6 (1.5e-6 without splitting).
    """
    x, dense = arrays(dtype), some_mask()
    rng = np.random.default_rng(5)
    cotangents = rng.standard_normal((2, T, N, V)), rng.standard_normal((2, N, T))
    cotangents = [jnp.asarray(c, dtype) for c in cotangents]

    def pulled(attend: Any, kind: Any) -> Any:
        results, pull = jax.vjp(attend, *(a.astype(kind) for a in x))
        return *results, *pull(tuple(c.astype(kind) for c in cotangents))

    @quick_jit
    def both() -> Any:
        whole = lambda q, k, v: jattn.attention(q, k, v, mask=dense, return_lse=True)  # noqa: E731
        parts = lambda q, k, v: jattn.merge(*in_parts(q, k, v, dense, cuts))  # noqa: E731
        return pulled(parts, dtype), pulled(whole, "float64")

    of_values, of_gradients = {"float64": (1e-14, 1e-14), "float32": (5e-7, 4e-6)}[dtype]
    for place, (got, want) in enumerate(zip(*both(), strict=True)):
        assert got.dtype == dtype
        assert error(got, want) <= (of_values if place < 2 else of_gradients)


@pytest.mark.slow
def test_the_lse_of_bfloat16_is_good_enough_to_merge_by():
    """Rounded to bfloat16, an lse of 30 is off by a tenth and the shares with it."""
    q, k, v = (x.astype(jnp.bfloat16) for x in arrays())
    dense = some_mask()
    parts = in_parts(q * 2, k, v, dense, (1, 3, 5))
    want = jattn.attention(
        *(x.astype(jnp.float64) for x in (q * 2, k, v)), mask=dense, return_lse=True
    )
    out, lse = jattn.merge(*parts)
    assert lse.dtype == jnp.float32
    assert out.dtype == jnp.bfloat16
    assert error(lse, want[1]) <= 1e-6
    assert error(out, want[0]) <= 8e-3  # each part was rounded, and their merger again


SINK = jnp.array([0.5, -2.0, 4.0, -jnp.inf])


def test_a_sink_of_minus_infinity_changes_nothing():
    part = a_part(3)
    nowhere = jnp.full((N,), NEGATIVE)
    (out, lse), pull = jax.vjp(jattn.with_sink, *part, nowhere)
    assert_equal((out, lse), part)
    d_out, d_lse, d_sink = pull((jnp.ones_like(out), jnp.ones_like(lse)))
    live = np.isfinite(part[1])
    np.testing.assert_array_equal(d_out[np.swapaxes(live, 1, 2)], 1)
    np.testing.assert_allclose(d_lse, np.where(live, 1, 0), rtol=1e-15)
    assert not np.any(d_sink)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_sink_keeps_dtypes_and_accepts_others(dtype):
    out, lse = a_part(3, dtype)
    got, total = jattn.with_sink(out, lse, SINK.astype(jnp.float32))
    assert got.dtype == dtype
    assert total.dtype == jnp.float32
    exponential, sink = np.exp(np.asarray(lse, np.float64)), np.exp(np.asarray(SINK))[:, None]
    share = np.where(exponential == 0, 0, exponential / np.maximum(exponential + sink, 1e-300))
    want = np.asarray(out, np.float64) * np.swapaxes(share, 1, 2)[..., None]
    assert error(got, want) <= 2 * float(jnp.finfo(dtype).eps)


def partial_of(x: Any, v: Any) -> softmax.Partial:
    """The contribution of some keys to every row."""
    return softmax.contribution(x, lambda weights: weights @ v)


def logits(seed: int) -> tuple[jax.Array, jax.Array]:
    """Scores `[T, S]` with masked ones and a dead row, and values `[S, V]`."""
    rng = np.random.default_rng(seed)
    x = 5 * rng.standard_normal((T, S))
    x[rng.random((T, S)) < 0.4] = -np.inf
    x[1] = -np.inf
    return jnp.asarray(x), jnp.asarray(rng.standard_normal((S, V)))


def finished(part: softmax.Partial) -> tuple[Any, Any]:
    """`(out, lse)`."""
    out, normalizer = softmax.finish(part)
    return out, normalizer.lse


@quick_jit
def _finished(x: Any, v: Any) -> Any:
    halves = [partial_of(x[:, i:j], v[i:j]) for i, j in ((0, 2), (2, 3), (3, S))]
    a, b, c = halves
    nothing = softmax.empty(T, V, jnp.float64)
    ways = (
        partial_of(x, v),
        softmax.combine(softmax.combine(a, b), c),
        softmax.combine(a, softmax.combine(b, c)),
        softmax.combine(softmax.combine(c, nothing), softmax.combine(a, b)),
    )
    with_nothing = [(softmax.combine(a, nothing), a), (softmax.combine(nothing, a), a)]
    return [finished(part) for part in ways], with_nothing, finished(nothing)


@given(st.integers(0, 10**6))
def test_contributions_combine_in_any_way(seed):
    x, v = logits(seed)
    ways, with_nothing, nothing = _finished(x, v)
    with np.errstate(over="raise", invalid="raise"):
        weights = np.where(np.isinf(x), 0, np.exp(np.asarray(x)))
    total = weights.sum(axis=-1, keepdims=True)
    with np.errstate(divide="ignore"):
        want = (weights @ np.asarray(v) / np.where(total, total, 1), np.log(total[:, 0]))
    for result in ways:
        assert_accurate(result, want, 1e-14)
    for changed, same in with_nothing:
        assert_equal(changed, same)
    assert not np.any(nothing[0])
    assert np.all(nothing[1] == NEGATIVE)


def test_contributions_of_dead_rows_have_no_gradient():
    x, v = logits(0)

    def total(x: Any, v: Any) -> Any:
        parts = softmax.combine(partial_of(x[:, :3], v[:3]), partial_of(x[:, 3:], v[3:]))
        out, lse = finished(parts)
        return jnp.sum(out) + jnp.sum(jnp.where(jnp.isfinite(lse), lse, 0))

    dx, dv = quick_jit(jax.grad(total, (0, 1)))(x, v)
    assert np.all(np.isfinite(dv))
    assert not np.any(np.asarray(dx)[np.isinf(x)])
    assert np.any(dx)
