"""A few queries on many keys in arrays, which the decoding kernel in C++ reads like a cache."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn import masks, scores, tuning
from jattn.cache import DenseCache, PagedCache
from tests.arrays import assert_accurate, assert_equal
from tests.conftest import normal_arrays
from tests.oracle import error


S = tuning.current().many_keys + 77  # whole tiles, and a rest that is no whole vector
SIZES = {  # T, N, K, H, V: heads that lie side by side, groups, many rows, odd widths
    "heads": (1, 8, 8, 16, 32),
    "grouped": (4, 6, 2, 32, 16),
    "many rows": (8, 8, 2, 16, 16),
    "one key head": (1, 8, 1, 64, 64),
    "odd sizes": (3, 4, 4, 5, 7),
    "wide": (8, 4, 4, 144, 96),
}


def arrays(size: str, dtype: str = "float32", B: int = 2) -> list[jax.Array]:
    T, N, K, H, V = SIZES[size]
    return normal_arrays((B, T, N, H), (B, S, K, H), (B, S, K, V), seed=5, dtype=dtype)


def rules(T: int, N: int) -> dict[str, dict[str, Any]]:
    at_end = jnp.arange(S - T, S, dtype=jnp.int32)
    by_row = at_end[None] - jnp.asarray([[0], [300]], jnp.int32)
    ids = jnp.arange(S, dtype=jnp.int32) // 100
    table = jnp.asarray(np.random.default_rng(1).normal(size=(32, N)))
    window = masks.Causal() & masks.Window(left=40)

    lengths = lambda *real: masks.Lengths(kv=jnp.asarray(real, jnp.int32))  # noqa: E731
    return {
        "full": {},
        "causal": {"mask": masks.Causal(), "q_positions": at_end},
        "window": {"mask": window, "q_positions": at_end},
        "rows of positions": {"mask": masks.Causal(), "q_positions": by_row},
        "lengths": {"mask": lengths(S // 2, 3)},
        "dead row": {"mask": lengths(0, 200)},
        "segments": {"mask": masks.Segments(ids[:T] + 2, ids)},
        "relative": {"score": scores.RelativeBias(table)},
        "alibi": {"score": scores.Alibi(jnp.linspace(0.01, 0.05, N)), "mask": masks.Prefix(500)},
    }


def truth(*qkv: Any, **rules: Any) -> Any:
    """Output and lse of the reference in float64, which computes the formula on all pairs."""
    wide = (x.astype("float64") for x in qkv)
    return jattn.attention(*wide, implementation="reference", return_lse=True, **rules)


def runs_short(call: Any, *operands: Any) -> bool:
    return "jattn_decode" in jax.jit(call).lower(*operands).as_text()


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_floats_of_8_bits_are_no_quantised_numbers(dtype):
    narrow = [x.astype(dtype) for x in arrays("grouped")]
    assert runs_short(jattn.attention, *narrow)
    out, lse = jattn.attention(*narrow, return_lse=True)
    want_out, want_lse = jattn.attention(*(x.astype("float32") for x in narrow), return_lse=True)
    assert_equal(out, want_out.astype(dtype))
    assert_equal(lse, want_lse)


@pytest.mark.one_in(18)
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("name", rules(1, 1))
@pytest.mark.parametrize("size", SIZES)
def test_short_queries_are_what_the_formula_says(size, name, dtype):
    q, k, v = arrays(size, dtype)
    options = rules(*q.shape[1:3])[name]
    call = functools.partial(jattn.attention, return_lse=True, **options)
    assert runs_short(call, q, k, v)
    out, lse = call(q, k, v)
    want_out, want_lse = truth(q, k, v, **options)
    sums = "float64" if dtype == "float64" else "float32"
    assert (out.dtype, lse.dtype) == (dtype, sums)
    rounding = float(jnp.finfo(dtype).eps) + 40 * float(jnp.finfo(sums).eps)
    assert error(out, want_out) <= rounding
    np.testing.assert_allclose(lse, want_lse, rtol=0, atol=80 * float(jnp.finfo(sums).eps))
    if name == "dead row":
        assert not out[0].any()
        assert (lse[0] == -jnp.inf).all()


@pytest.mark.one_in(8)
@pytest.mark.parametrize(
    ("dtype", "scale", "limit"), [("float32", 0.3, 2e-5), ("float64", 30, 1e-10)]
)
@pytest.mark.parametrize("size", SIZES)
def test_gradients_of_short_queries_are_those_of_the_formula(size, dtype, scale, limit):
    """Different kernels run forward and backward, and the residuals of one fit the other."""
    q, k, v = arrays(size, dtype)
    options = rules(*q.shape[1:3])["lengths"]

    def loss(implementation: str | None, scale: Any, *qkv: Any) -> Any:
        attend = functools.partial(jattn.attention, implementation=implementation, **options)
        out, lse = attend(*qkv, scale=scale, return_lse=True)
        return jnp.sum(jnp.sin(3 * out)) + jnp.sum(lse)

    def gradients(implementation: str | None, dtype: str) -> Any:
        operands = [x.astype(dtype) for x in (jnp.asarray(scale, "float64"), q, k, v)]
        return jax.grad(functools.partial(loss, implementation), (0, 1, 2, 3))(*operands)

    assert_accurate(gradients(None, dtype), gradients("reference", "float64"), limit)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("poison", [np.nan, np.inf, 1e38])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", ["heads", "many rows", "odd sizes"])
def test_masked_keys_do_not_reach_short_queries(size, dtype, poison):
    q, k, v = arrays(size, dtype)
    options = rules(*q.shape[1:3])["lengths"]
    call = functools.partial(jattn.attention, return_lse=True, **options)
    masked = (jnp.arange(S)[None] >= jnp.asarray([S // 2, 3])[:, None])[:, :, None, None]
    bad_k, bad_v = (jnp.where(masked, jnp.asarray(poison).astype(dtype), x) for x in (k, v))
    assert_equal(call(q, bad_k, bad_v), call(q, k, v))


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_what_is_not_finite_reaches_those_who_attend_to_it(poison):
    """Rows of the same tile that do not attend to it are unchanged, bit for bit."""
    q, k, v = arrays("grouped")
    T = q.shape[1]
    options = rules(*q.shape[1:3])["causal"]
    place = S - T + 1  # seen from the second query on
    out, lse = jattn.attention(q, k, v.at[0, place, 1, 3].set(poison), return_lse=True, **options)
    want, want_lse = jattn.attention(q, k, v, return_lse=True, **options)
    lost = np.zeros(out.shape[:3], bool)
    lost[0, 1:, q.shape[2] // k.shape[2] :] = True
    for x, y in ((out, want), (np.swapaxes(lse, 1, 2), np.swapaxes(want_lse, 1, 2))):
        assert np.isnan(x[lost]).all()
        np.testing.assert_array_equal(x[~lost], y[~lost])


def test_a_mean_of_large_values_is_finite():
    q, k, v = arrays("heads")
    large = 0.9 * float(jnp.finfo("float32").max)
    np.testing.assert_allclose(jattn.attention(q, k, jnp.full_like(v, large)), large, rtol=1e-5)


def test_large_logits_keep_their_digits():
    q, k, v = arrays("heads")
    out = jattn.attention(1e4 * q, k, v)
    assert error(out, truth(1e4 * q, k, v)[0]) <= 1e-2  # rounding of scores around 4e4


def test_many_parts_are_one():
    """A single row of the batch is split into parts for all threads."""
    q, k, v = normal_arrays((1, 2, 2, 64), *[(1, 30_001, 2, 64)] * 2, seed=3, dtype="float32")
    k = k * (1 + jnp.cos(jnp.arange(30_001) / 700)).astype("float32")[None, :, None, None]
    out, lse = jattn.attention(q, k, v, return_lse=True)
    want = truth(q, k, v)
    assert error(out, want[0]) <= 1e-5
    np.testing.assert_allclose(lse, want[1], rtol=1e-6)


@pytest.mark.parametrize("axes", [(0, 0, 0), (0, None, None), (None, 0, 0)])
def test_vmap_of_short_queries_is_a_loop(axes):
    q, k, v = arrays("grouped", B=6)
    split = [x.reshape(3, 2, *x.shape[1:]) for x in (q, k, v)]
    operands = [x if axis == 0 else x[0] for x, axis in zip(split, axes, strict=True)]
    call = functools.partial(jattn.attention, **rules(4, 6)["lengths"])
    got = jax.vmap(call, axes)(*operands)
    for i in range(3):
        example = [x[i] if axis == 0 else x for x, axis in zip(operands, axes, strict=True)]
        np.testing.assert_array_equal(got[i], call(*example))


@pytest.mark.slow
def test_vmap_of_caches_is_a_loop():
    q, k, v = arrays("grouped", B=6)
    split = [x.reshape(3, 2, *x.shape[1:]) for x in (q, k[:, :90], v[:, :90])]
    empty = PagedCache.create(2, 96, 2, 32, 16, page_size=8)

    call = lambda q, k, v, valid: jattn.attention(q, empty.append(k, v, valid))  # noqa: E731
    valid = jnp.arange(90)[None, None] < jnp.asarray([[90, 3], [41, 60], [7, 8]])[..., None]
    got = jax.jit(jax.vmap(call))(*split, valid)
    for i in range(3):
        q, k, v = (x[i] for x in split)
        np.testing.assert_allclose(got[i], call(q, k, v, valid[i]), rtol=0, atol=1e-6)


def test_other_calls_go_where_they_went():
    q, k, v = arrays("grouped")
    dropped = functools.partial(jattn.attention, dropout_rate=0.1, dropout_key=jax.random.key(0))
    capped = functools.partial(jattn.attention, score=scores.SoftCap(3.0))
    short = tuning.current().many_keys - 1
    for call, operands in (
        (dropped, (q, k, v)),
        (capped, (q, k, v)),
        (jattn.attention, (jnp.concatenate([q, q, q], axis=1), k, v)),
        (jattn.attention, (q, k[:, :short], v[:, :short])),
    ):
        assert not runs_short(call, *operands)
    assert jattn.explain(q, k, v)["native"] is None


@pytest.mark.one_in(6)
@pytest.mark.parametrize("query", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", SIZES)
def test_a_cache_of_bfloat16_is_widened_on_the_way(size, query):
    q, k, v = arrays(size, "bfloat16")
    q = q.astype(query)
    cache = DenseCache.of(k, v, jnp.asarray([S, 111]))
    assert runs_short(jattn.attention, q, cache)
    want = truth(q, k, v, mask=masks.Lengths(kv=jnp.asarray([S, 111], jnp.int32)))[0]
    assert error(jattn.attention(q, cache), want) <= float(jnp.finfo(query).eps) + 1e-5
