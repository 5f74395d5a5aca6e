"""Quantised caches: attention to the numbers that NumPy quantises, close to that of exact ones."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jattn
from jattn import masks, scores
from jattn.cache import Cache, DenseCache, PagedCache, Quantized, RollingCache
from tests import oracle
from tests.conftest import assert_trees_close, expect, normal_arrays, quick_jit


B, K, H, V = 3, 2, 16, 6
LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0, "int4": 7.0}
KINDS = {
    "dense": lambda dtype: DenseCache.create(B, 24, K, H, V, dtype),
    "rolling": lambda dtype: RollingCache.create(B, 9, K, H, V, dtype, chunk=4),
    "paged": lambda dtype: PagedCache.create(B, 24, K, H, V, dtype, page_size=4),
}
every_dtype = pytest.mark.parametrize("dtype", LARGEST)
every_kind = pytest.mark.parametrize("kind", KINDS)


def quantised(x: Any, dtype: str) -> np.ndarray:
    """Float32 vectors as a cache stores them, by NumPy: `[..., H]` in float64."""
    x = np.asarray(x, np.float32)
    scale = np.abs(x).max(axis=-1, keepdims=True) * np.float32(1 / LARGEST[dtype])
    numbers = np.divide(x, scale, out=np.zeros_like(x), where=scale > 0)
    if dtype.startswith("int"):
        numbers = np.rint(numbers)
    else:
        numbers = numbers.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    return numbers.astype(np.float64) * scale.astype(np.float64)


def tokens(T: int, seed: int = 0, N: int = 4) -> list[jax.Array]:
    """`query [B, T, N, H]` whose logits are spread by 3 and more, keys and values."""
    shapes = ((B, T, N, H), (B, T, K, H), (B, T, K, V))
    query, key, value = normal_arrays(*shapes, dtype=jnp.float32, seed=seed)
    return [4 * query, key, value]


@quick_jit
def attend_once(cache: Cache, query: Any, key: Any, value: Any, valid: Any) -> Any:
    positions = cache.next_positions(query.shape[1], valid)
    appended = cache.append(key, value, valid)
    options: Any = {"mask": masks.Causal(), "q_positions": positions, "return_lse": True}
    return jattn.attention(query, appended, **options), appended


@pytest.mark.one_in(6)
@every_kind
@every_dtype
@pytest.mark.parametrize("seed", range(4))
def test_random_histories_are_attention_to_what_numpy_quantises(kind, dtype, seed):
    """Random chunks and orders of rows, compared with the oracle."""
    random, cache = np.random.default_rng(seed), KINDS[kind](dtype)
    rows: list[Any] = [([], []) for _ in range(B)]
    for i in range(6):
        query, key, value = tokens(4, seed=100 * seed + i)
        valid = np.arange(4) < random.integers(0, 5, (B, 1))
        valid = valid & (np.cumsum(valid, axis=1) + np.array([[len(x[0])] for x in rows]) <= 24)
        key, value = (jnp.where(valid[..., None, None], x, jnp.nan) for x in (key, value))
        (out, lse), cache = attend_once(cache, query, key, value, valid)
        for b, t in np.argwhere(valid):
            for stored, x in zip(rows[b], (key, value), strict=True):
                stored.append(quantised(x[b, t], dtype))
            first = len(rows[b][0]) - 10 if kind == "rolling" else 0
            keys, values = (np.stack(x[max(first, 0) :])[None] for x in rows[b])
            arrays = np.asarray(query[b, t], np.float64)[None, None], keys, values
            want = oracle.attend(oracle.OracleProblem(*arrays))
            got = out[b, t], lse[b, :, t]
            assert_trees_close(got, (want.out[0, 0], want.lse[0, :, 0]), rtol=2e-6, atol=2e-5)
        indices = random.integers(0, B, B)
        cache, rows = cache.reorder(jnp.asarray(indices)), [rows[r] for r in indices]
        rows = [(list(keys), list(values)) for keys, values in rows]


@pytest.mark.one_in(6)
@every_kind
@every_dtype
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_token_that_is_not_finite_makes_only_those_nan_that_see_it(kind, dtype, poison):
    query, key, value = tokens(4)
    (clean, _), _ = attend_once(KINDS[kind](dtype), query, key, value, None)
    seen = np.zeros(clean.shape[:-1], bool)
    seen[1, 2:, :2] = True  # the heads of key head 0
    bad_key, bad_value = (x.at[1, 2, 0, 3].set(poison) for x in (key, value))
    for arrays in ((bad_key, value), (key, bad_value)):
        (out, lse), _ = attend_once(KINDS[kind](dtype), query, *arrays, None)
        bad = np.isnan(out).any(axis=-1)
        np.testing.assert_array_equal(bad, seen)
        np.testing.assert_allclose(out[~bad], clean[~bad], rtol=0, atol=1e-6)
        np.testing.assert_array_equal(np.swapaxes(np.isnan(lse), 1, 2), seen)


@every_dtype
def test_small_and_large_vectors_are_kept(dtype):
    key = jnp.stack([jnp.zeros(H), jnp.full(H, 1e-38), jnp.full(H, 3e38), -jnp.ones(H)])
    stored = DenseCache.of(*(jnp.broadcast_to(key[None, :, None], (B, 4, K, H)),) * 2, dtype=dtype)
    np.testing.assert_allclose(stored.read()[0][0, 0], key.at[1].set(0), rtol=1e-6, atol=0)


@pytest.mark.one_in(9)
@every_kind
@every_dtype
def test_gradients_are_those_of_a_float_cache_with_these_numbers(kind, dtype):
    query, key, value = tokens(4)
    cache = KINDS[kind](dtype).append(key, value)
    keys, values = (jnp.asarray(quantised(x, dtype), jnp.float32) for x in (key, value))
    exact = KINDS[kind]("float32").append(keys, values)

    @functools.partial(quick_jit, static_argnums=3)
    def gradients(query: Any, slopes: Any, cache: Any, implementation: str | None) -> Any:
        def loss(query: Any, slopes: Any) -> Any:
            options: Any = {"score": scores.Alibi(slopes), "implementation": implementation}
            out, lse = jattn.attention(query, cache, **options, return_lse=True)
            return jnp.sum(jnp.sin(out)) + jnp.sum(lse)

        return jax.grad(loss, (0, 1))(query, slopes)

    want = gradients(query, jnp.arange(4.0) / 4, exact, "reference")
    for implementation in (None, "blockwise"):
        got = gradients(query, jnp.arange(4.0) / 4, cache, implementation)
        assert_trees_close(got, want, rtol=1e-5, atol=2e-5)


def test_the_numbers_have_no_gradient_and_the_scales_theirs():
    query, key, value = tokens(4)
    cache = DenseCache.of(key, value, dtype=jnp.int8)
    loss = lambda cache: jnp.sum(jattn.attention(query, cache) ** 2)  # noqa: E731
    gradient = jax.grad(loss, allow_int=True)(cache)
    assert gradient.keys.numbers.dtype == jax.dtypes.float0
    floats = DenseCache.of(*(jnp.swapaxes(x, 1, 2) for x in cache.read()))
    by_value = jax.grad(loss, allow_int=True)(floats).values
    want = jnp.sum(by_value * cache.values.numbers.astype(jnp.float32), axis=-1)
    np.testing.assert_allclose(gradient.values.scales, want, rtol=1e-4, atol=1e-3)
    with pytest.raises(NotImplementedError, match=r"quantised.*have no derivatives.*stop_gradient"):
        jax.grad(lambda key: jnp.sum(DenseCache.of(key, value, dtype="int8").read()[0]))(key)


@pytest.mark.default_tiles
@pytest.mark.one_in(8)
@every_dtype
@pytest.mark.parametrize("heads", [2, 4, 12, 40])
@pytest.mark.parametrize("kind", ["dense", "paged"])
def test_long_caches_are_read_where_they_lie(dtype, heads, kind):
    S, size, lengths = 1200, 32, np.array([1200, 700, 33])
    shapes = ((B, 1, heads, size), (B, S, K, size), (B, S, K, size))
    query, key, value = normal_arrays(*shapes, dtype=jnp.float32, seed=5)
    paged: Any = functools.partial(PagedCache.create, page_size=48)
    cache: Any = (paged if kind == "paged" else DenseCache.create)(B, S, K, size, dtype=dtype)
    cache = cache.append(key, value, np.arange(S) < lengths[:, None])
    out = jattn.attention(3 * query, cache)
    np.testing.assert_allclose(out, exact(3 * query, cache, lengths), rtol=0, atol=5e-6)


def exact(query: Any, cache: Any, lengths: Any) -> np.ndarray:
    """The oracle's attention to what the first tokens of each row are stored as."""
    stored = (np.swapaxes(np.float64(x), 1, 2) for x in cache.read())
    arrays: Any = (np.asarray(query, np.float64), *stored)
    seen = lambda pair: pair.j < lengths[pair.b]  # noqa: E731
    return oracle.attend(oracle.OracleProblem(*arrays, allowed=seen)).out


@pytest.mark.default_tiles
@pytest.mark.one_in(3)
@every_dtype
@pytest.mark.parametrize(("heads", "size"), [(2, 64), (6, 72), (12, 160)])
def test_rows_of_any_magnitude_are_exact(dtype, heads, size):
    """The greatest number of a query or value must not cost others their digits."""
    S, V, magnitudes = 150, 32, np.array([3, 1e-30, 0, 1e-42], np.float32)
    shapes = (B, 1, heads, size), (B, S, K, size), (B, S, K, V)
    query, key, value = map(np.asarray, normal_arrays(*shapes, dtype=jnp.float32, seed=6))
    query = jnp.asarray(query * magnitudes[np.arange(heads) % 4][:, None])
    powers = np.array(10.0 ** np.arange(-12, 12, 2), np.float32).repeat(13)[:S]
    value = value * powers[:, None, None]
    cache = DenseCache.create(B, S + 9, K, size, V, dtype=dtype).append(key, value)
    mask = masks.Predicate(lambda b, h, q, kv: kv < 30 + 40 * b)  # up to 1e-8, 1e-2 and 1e4
    out = np.asarray(jattn.attention(query, cache, mask=mask), np.float64)
    want = exact(query, cache, [30, 70, 110])
    error = np.abs(out - want).max(axis=-1) / np.abs(want).max(axis=-1)
    assert error.max() < 2e-6


@pytest.mark.one_in(3)
@every_dtype
@pytest.mark.parametrize("outlier", [1e4, 1e6, 1e37])
def test_an_outlier_costs_a_query_no_digits(dtype, outlier):
    """All keys multiply the outlier by 0, so the output does not depend on it."""
    query, key, value = tokens(8)
    key = key.at[..., 3].set(0)
    cache = DenseCache.create(B, 8, K, H, V, dtype).append(key, value)
    out, expected = (
        jattn.attention(query[:, :1].at[..., 3].set(x), cache, scale=1.0) for x in (outlier, 1)
    )
    np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-5)


@every_dtype
def test_scales_of_values_may_be_close_to_overflow(dtype):
    query, key, value = tokens(1)
    cache = DenseCache.create(B, 1, K, H, V, dtype).append(key, value)
    stored: Any = cache.values
    large = dataclasses.replace(cache, values=Quantized(stored.numbers, 0 * stored.scales + 5e35))
    expected = np.asarray(large.read()[1])[:, None, [0, 0, 1, 1], 0]
    np.testing.assert_allclose(jattn.attention(query, large), expected, rtol=1e-6)


def test_scales_may_be_negative():
    query, key, value = tokens(8)
    cache = DenseCache.create(B, 8, K, H, V, "int8").append(key, value)
    stored: Any = cache.values
    negated = dataclasses.replace(cache, values=Quantized(-stored.numbers, -stored.scales))
    out, expected = (jattn.attention(query[:, :1], x) for x in (negated, cache))
    np.testing.assert_allclose(out, expected, rtol=1e-6, atol=1e-6)


def test_bytes_per_token_are_those_on_paper():
    sizes = {"float32": 4 * (H + V), "bfloat16": 2 * (H + V), "int8": H + V + 8}
    sizes |= {"float8_e4m3fn": H + V + 8, "int4": (H + V) // 2 + 8}
    for dtype, size in sizes.items():
        for create in KINDS.values():
            assert create(dtype).bytes_per_token == K * size
    cache = KINDS["paged"]("int4")
    assert isinstance(cache.keys, Quantized) and cache.keys.shape == (18, K, 4, H)
    explained = jattn.explain(tokens(1)[0], cache)
    assert explained.runs == "decode" and explained["blockwise"] is explained["reference"] is None
    assert f"{K * sizes['int4']} bytes of int4 per token" in str(explained)


def test_wrong_dtypes_are_refused():
    for dtype in (jnp.int16, jnp.float8_e5m2, "float8", None, np.zeros(3)):
        says = "dtype: | 16 bits or, | int8, float8_e4m3fn, int4"
        expect(TypeError, says, DenseCache.create, B, 8, K, H, dtype=dtype)
    for dtype in (jnp.int4, "int4"):
        says = "value_size: expected an even number for int4, got 5"
        expect(ValueError, says, PagedCache.create, B, 8, K, H, 5, dtype)
    assert DenseCache.create(B, 8, K, H, dtype="int8").keys.dtype == jnp.int8
