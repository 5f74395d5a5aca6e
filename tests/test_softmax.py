"""The softmax as a monoid: parts of the keys, in any order and grouping, make the whole."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jattn
from tests.arrays import assert_accurate, assert_equal
from tests.conftest import attention_arrays, out_and_gradients, quick_jit
from tests.oracle import error


T, S, N, K, H, V = 5, 7, 4, 2, 3, 6

# A random mask with a dead row, and rows that live on the first or the last keys only.
DENSE = np.random.default_rng(0).random((2, N, T, S)) < 0.6
DENSE[0, :, 1] = DENSE[1, :, 2, : S // 2] = DENSE[1, :, 3, S // 2 :] = False


def arrays(dtype: Any = jnp.float64) -> list[Any]:
    """Queries, keys and values whose logits spread over several units, and cotangents of `out`."""
    q, k, v, d_out = attention_arrays((2, T, S, N, K, H, V))
    return [x.astype(dtype) for x in (2 * q, 2 * k, 2 * v, d_out)]


def a_part(seed: int, dtype: Any = jnp.float64) -> Any:
    rng = np.random.default_rng(seed)
    gone = rng.random((2, N, T)) < 0.3
    lse = np.where(gone, -np.inf, 5 * rng.standard_normal((2, N, T)))
    out = rng.standard_normal((2, T, N, V))
    out[np.swapaxes(gone, 1, 2)] = 0
    wide = jnp.float64 if dtype == jnp.float64 else jnp.float32
    return jnp.asarray(out, dtype), jnp.asarray(lse, wide)


def no_keys(dtype: Any = jnp.float64) -> Any:
    out, lse = a_part(0, dtype)
    return 0 * out, jnp.full_like(lse, -jnp.inf)


merge = quick_jit(jattn.merge)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_no_keys_is_the_identity(dtype):
    part, nothing = a_part(1, dtype), no_keys(dtype)
    for parts in ((part,), (part, nothing), (nothing, part), (nothing, part, nothing)):
        out, lse = merge(*parts)
        assert out.dtype == dtype
        assert_equal((out, lse), part)


def test_nothing_and_nothing_is_nothing_and_has_no_gradient():
    results, pull = jax.vjp(jattn.merge, no_keys(), no_keys())
    assert_equal(results, no_keys())
    for gradient in jax.tree.leaves(pull(jax.tree.map(jnp.ones_like, results))):
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


CUTS = [(2, 2, 5), (0,), (3,), (7,), (1, 2, 3, 4, 5, 6)]


@pytest.mark.one_in(5)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("cuts", CUTS)
def test_parts_merge_to_the_whole_with_their_gradients(cuts, dtype):
    """The whole is computed in float64 from the same inputs.

    Measured in float32: values 2e-7, gradients 2.1e-6 (1.5e-6 without splitting).
    """
    *qkv, d_out = arrays(dtype)
    operands = [*qkv, d_out, jnp.swapaxes(d_out.sum(-1), 1, 2)]
    pieces = [slice(*x) for x in itertools.pairwise((0, *cuts, S))]  # the keys between the cuts
    attend = functools.partial(jattn.attention, return_lse=True)

    def in_parts(q: Any, k: Any, v: Any) -> Any:
        return jattn.merge(*(attend(q, k[:, x], v[:, x], mask=DENSE[..., x]) for x in pieces))

    def pulled(attend: Any, kind: Any) -> Any:
        *x, d_out, d_lse = (a.astype(kind) for a in operands)
        return out_and_gradients(attend, x, d_out, d_lse)

    @quick_jit
    def both() -> Any:
        whole = functools.partial(attend, mask=DENSE)
        return pulled(in_parts, dtype), pulled(whole, "float64")

    of_values, of_gradients = {"float64": (1e-14, 1e-14), "float32": (5e-7, 4e-6)}[dtype]
    for place, (got, want) in enumerate(zip(*both(), strict=True)):
        assert got.dtype == dtype
        assert error(got, want) <= (of_values if place < 2 else of_gradients)


SINK = jnp.array([0.5, -2.0, 4.0, -jnp.inf])


def test_a_sink_of_minus_infinity_changes_nothing():
    part = a_part(3)
    results, pull = jax.vjp(jattn.with_sink, *part, jnp.full((N,), -jnp.inf))
    assert_equal(results, part)
    d_out, d_lse, d_sink = pull(jax.tree.map(jnp.ones_like, results))
    live = np.isfinite(part[1])
    np.testing.assert_array_equal(d_out[np.swapaxes(live, 1, 2)], 1)
    np.testing.assert_allclose(d_lse, np.where(live, 1, 0), rtol=1e-15)
    assert not np.any(d_sink)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_sink_keeps_dtypes_and_accepts_others(dtype):
    out, lse = a_part(3, dtype)
    got, total = jattn.with_sink(out, lse, SINK.astype(jnp.float32))
    assert (got.dtype, total.dtype) == (dtype, jnp.float32)
    exponential, sink = np.exp(np.asarray(lse, np.float64)), np.exp(np.asarray(SINK))[:, None]
    share = np.where(exponential == 0, 0, exponential / np.maximum(exponential + sink, 1e-300))
    want = np.asarray(out, np.float64) * np.swapaxes(share, 1, 2)[..., None]
    assert error(got, want) <= 2 * float(jnp.finfo(dtype).eps)
