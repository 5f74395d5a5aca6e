"""Normalizers of whole rows in the C++ kernel, against definitions in float64 and the reference."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn import masks, normalizers, scores, tuning
from jattn.normalizers import Entmax, Sparsemax, StickBreaking, TopK
from tests import oracle, row_normalizers
from tests.arrays import assert_accurate, assert_equal
from tests.conftest import attention_arrays, normal_arrays, out_and_gradients


WITH_DEFINITIONS: dict[str, Any] = {
    "sparsemax": (Sparsemax(), row_normalizers.sparsemax()),
    **{f"entmax {x}": (Entmax(x), row_normalizers.entmax(x)) for x in (1.5, 1.2, 3)},
    **{f"top {k}": (TopK(k), row_normalizers.top_k(k)) for k in (1, 20, 1000)},
    "stick-breaking": (StickBreaking(), row_normalizers.stick_breaking()),
}
NORMALIZERS = {name: normalizer for name, (normalizer, _) in WITH_DEFINITIONS.items()}
LIMITS = {"float64": 1e-12, "float32": 2e-5, "bfloat16": 3e-2, "float16": 3e-3}
every_normalizer = pytest.mark.parametrize("name", NORMALIZERS)


def formula(name: str, allowed: np.ndarray, arrays: Any) -> list[np.ndarray]:
    """Out and the gradients of q, k and v by definition, for a mask `[T, S]` of all heads."""
    q, k, v, d_out = (np.asarray(x, np.float64) for x in arrays)
    sees: Any = lambda pair: allowed[pair.i, pair.j]  # noqa: E731
    definition: Any = lambda parameters: WITH_DEFINITIONS[name][1]  # noqa: E731
    problem = oracle.OracleProblem(q, k, v, allowed=sees, normalizer=definition)
    forward, (backward,) = oracle.plain(problem, d_out, np.zeros(1), np.float64)
    return [forward.out, backward.q, backward.k, backward.v]


def native(normalizer: Any, arrays: Any, **options: Any) -> tuple[Any, ...]:
    *qkv, d_out = arrays
    attend = functools.partial(jattn.attention, normalizer=normalizer, implementation="native")
    return out_and_gradients(functools.partial(attend, **options), qkv, d_out)


@pytest.mark.one_in(12)
@every_normalizer
@pytest.mark.parametrize("dtype", LIMITS)
def test_values_and_gradients(name, dtype):
    """Many tiles; queries of one key, of several and of none; scores far apart, with sharp rows."""
    arrays = attention_arrays((1, 197, 163, 3, 1, 10, 7), dtype, seed=1)
    arrays[0] = 3 * arrays[0]
    i, j = np.arange(197)[:, None], np.arange(163)
    want = formula(name, (j <= i) & (i <= j + 140) & (i != 50), arrays)
    mask = masks.Causal() & masks.Window(left=140)
    ids = np.where(np.arange(197) == 50, 1, 0), np.zeros(163, int)
    got = native(NORMALIZERS[name], arrays, mask=mask & masks.Segments(*ids))
    assert_accurate(got, want, LIMITS[dtype])
    assert not got[0][:, 50].any()
    assert not got[1][:, 50].any()


@pytest.mark.parametrize(
    "name", ["sparsemax", "entmax 1.5", "entmax 1.2", "top 20", "stick-breaking"]
)
def test_tied_scores(name):
    """Products of small integers: many keys have the k-th greatest score."""
    rng = np.random.default_rng(2)
    shapes = (2, 37, 2, 4), (2, 71, 2, 4), (2, 71, 2, 5), (2, 37, 2, 5)
    arrays = [jnp.asarray(rng.integers(-2, 3, x), jnp.float32) for x in shapes]
    want = formula(name, np.ones((37, 71), bool), arrays)
    assert_accurate(native(NORMALIZERS[name], arrays), want, 1e-5)


def _table(*shape: int) -> jax.Array:
    return normal_arrays(shape, seed=5)[0]


DROPOUT = {"dropout_rate": 0.3, "dropout_key": jax.random.key(3)}
CASES: dict[str, Any] = {
    "full": lambda T, S: {},
    "segments": lambda T, S: {"mask": masks.Segments(np.arange(T) // 30, np.arange(S) // 25)},
    "lengths": lambda T, S: {"mask": masks.Lengths(q=jnp.array([T, 9]), kv=jnp.array([S - 40, 0]))},
    "predicate": lambda T, S: {"mask": masks.Predicate(lambda b, h, q, kv: (q + 2 * kv) % 3 < h)},
    "soft cap": lambda T, S: {"score": scores.SoftCap(2.0), "mask": masks.Causal()},
    "alibi": lambda T, S: {"score": scores.Alibi(jnp.linspace(0.01, 0.5, 4))},
    "bias": lambda T, S: {"score": scores.Bias(_table(1, 4, T, S)), "mask": masks.Causal()},
    "tanh": lambda T, S: {
        "score": scores.Score(lambda s, b, h, q, kv, x: jnp.tanh(s) * x[kv], _table(S))
    },
    "dropout": lambda T, S: {**DROPOUT, "mask": masks.Causal()},
}


@pytest.mark.one_in(24)
@pytest.mark.parametrize(
    ("case", "dtype"), [*((case, "float64") for case in CASES), ("dropout", "float32")]
)
@every_normalizer
@pytest.mark.parametrize("tiles", [None, "16, 8, 16"])
def test_masks_and_scores(name, case, dtype, tiles):
    """float32 has vector code of its own for dropout."""
    T, S = (313, 149) if tiles is None else (45, 83)
    options = CASES[case](T, S)
    score = options.pop("score", None)

    def both(implementation: str, dtype: str) -> Any:
        call = functools.partial(jattn.attention, implementation=implementation, **options)
        attend = lambda q, k, v, score: call(  # noqa: E731
            q, k, v, score=score, normalizer=NORMALIZERS[name]
        )
        *qkv, d_out = (x.astype(dtype) for x in arrays)
        return jax.tree.leaves(out_and_gradients(attend, (*qkv, score), d_out))

    arrays = attention_arrays((2, T, S, 4, 2, 11, 6), dtype, seed=4)
    with tuning.using(**({"cpu_tiles": tiles} if tiles else {})):
        limit = 1e-11 if dtype == "float64" else 1e-5
        assert_accurate(both("native", dtype), both("reference", "float64"), limit)


@pytest.mark.one_in(8)
@every_normalizer
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("poison", [np.nan, np.inf, 1e38])
def test_poison(name, dtype, poison):
    mask = masks.Causal() & masks.Window(left=60)
    arrays = attention_arrays((1, 150, 170, 2, 2, 8, 5), dtype, seed=7)
    clean = native(NORMALIZERS[name], arrays, mask=mask)
    q, k, v, d_out = arrays
    masked = (x.at[:, 150:].set(poison) for x in (k, v))
    assert_equal(native(NORMALIZERS[name], (q, *masked, d_out), mask=mask), clean)
    if poison == 1e38:
        return
    sees = slice(40, 101)
    for changed in ((q, k.at[:, 40].set(np.nan), v), (q, k, v.at[:, 40, :, 3].set(poison))):
        out, dq, dk, dv = native(NORMALIZERS[name], (*changed, d_out), mask=mask)
        assert np.isnan(out[:, sees]).all()
        for got, want in ((out, clean[0]), (dq, clean[1])):
            assert_equal(np.delete(got, sees, 1), np.delete(want, sees, 1))
        assert_equal((dk[:, 101:], dv[:, 101:]), tuple(x[:, 101:] for x in clean[2:]))


@pytest.mark.one_in(6)
@every_normalizer
@pytest.mark.parametrize("heads", [1, 2])
def test_threads_share_the_queries_of_a_key_head(name, heads):
    arrays = attention_arrays((1, 213, 60, 2, heads, 8, 8), seed=8)
    want = formula(name, np.ones((213, 60), bool), arrays)
    assert_accurate(native(NORMALIZERS[name], arrays), want, 1e-12)


def test_few_small_parts_of_a_stick():
    """Thousands of parts, each less than a rounding error of the stick."""
    q, v = jnp.full((1, 1, 1, 1), -17, jnp.float32), 1e7 * normal_arrays((1, 4000, 1, 3))[0]
    v = v.astype(jnp.float32)
    k, d_out = jnp.ones((1, 4000, 1, 1), jnp.float32), jnp.ones((1, 1, 1, 3), jnp.float32)
    got = native(StickBreaking(), (q, k, v, d_out))
    beta = 1 / (1 + np.exp(17.0))
    weights = beta * (1 - beta) ** np.arange(3999, -1, -1)
    assert_accurate(got[0][0, 0, 0], weights @ np.asarray(v, np.float64)[0, :, 0], 1e-5)
    assert np.ptp(np.asarray(got[3])) > 1e-4 * np.max(np.abs(got[3]))


@pytest.mark.one_in(8)
@pytest.mark.parametrize("sizes", [(1, 0, 5), (1, 5, 0), (0, 5, 5)])
def test_no_queries_or_no_keys(sizes):
    B, T, S = sizes
    arrays = attention_arrays((B, T, S, 2, 1, 4, 3), "float32")
    for normalizer in NORMALIZERS.values():
        assert not any(x.any() for x in native(normalizer, arrays))


def test_vmap_and_checkpoint():
    *qkv, d_out = attention_arrays((3, 20, 30, 2, 2, 4, 4), "float32")
    attend = functools.partial(
        jattn.attention, normalizer=Entmax(1.5), mask=masks.Causal(), implementation="native"
    )
    want = out_and_gradients(attend, qkv, d_out)
    over_rows = jax.vmap(lambda *x: out_and_gradients(jax.checkpoint(attend), x[:3], x[3]))
    assert_equal(over_rows(*qkv, d_out), want)


def test_other_normalizers_are_refused():
    q, k, v, _ = attention_arrays((1, 5, 6, 2, 2, 4, 4), "float32")
    term = scores.Score(lambda score, b, h, q_idx, kv_idx: -jnp.abs(score))
    assert "Running" in str(jattn.explain(q, k, v, normalizer=normalizers.Running(term))["native"])
    assert "alpha" in str(jattn.explain(q, k, v, normalizer=Entmax(1.05))["native"])
    assert jattn.explain(q, k, v, normalizer=TopK(2))["native"] is None
