"""Normalizers in the C++ kernel, against definitions in float64 and the reference."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn import masks, normalizers, scores, tuning
from jattn.kernels.cpu import built_in, native
from jattn.normalizers import Entmax, Exp, Relu, Sigmoid, Sparsemax, StickBreaking, TopK
from jattn.spec import Shapes
from tests import oracle, row_normalizers
from tests.arrays import assert_accurate, assert_equal
from tests.conftest import attention_arrays, normal_arrays, out_and_gradients
from tests.kernels import made


def _softsign(score: Any, pair: Any) -> Any:
    return score * pair[0] / (1 + jnp.abs(score)) + pair[1]


BUILT_IN: dict[str, Any] = {
    "identity": normalizers.Identity(),
    "sigmoid": Sigmoid(),
    "relu": Relu(),
    "squared relu": Relu(2, count_power=0.5),
    "exp": Exp(),
}
GENERATED: dict[str, Any] = {
    "sigmoid by head": Sigmoid(np.linspace(-2.0, 1.0, 4)),
    "cubed relu": Relu(3),
    "function": normalizers.Pointwise(_softsign, np.array([0.7, -0.2])),
}
POINTWISE = BUILT_IN | GENERATED
WITH_DEFINITIONS: dict[str, Any] = {
    "sparsemax": (Sparsemax(), row_normalizers.sparsemax()),
    **{f"entmax {x}": (Entmax(x), row_normalizers.entmax(x)) for x in (1.5, 1.2, 3)},
    **{f"top {k}": (TopK(k), row_normalizers.top_k(k)) for k in (1, 20, 1000)},
    "stick-breaking": (StickBreaking(), row_normalizers.stick_breaking()),
}
OF_ROWS = {name: normalizer for name, (normalizer, _) in WITH_DEFINITIONS.items()}
NORMALIZERS = POINTWISE | OF_ROWS
TINY = {"cpu_tiles": "16, 8, 16", "generated_pairs": 0}  # of 16 queries and 8 keys
DROPOUT = {"dropout_rate": 0.3, "dropout_key": jax.random.key(3)}


def results(
    implementation: str,
    normalizer: Any,
    arrays: Any,
    score: Any = None,
    scale: Any = None,
    **options: Any,
) -> tuple[Any, ...]:
    """Out and the gradients of q, k, v, the normalizer, the score function and the scale."""

    def attend(q: Any, k: Any, v: Any, normalizer: Any, score: Any, scale: Any) -> Any:
        call = functools.partial(jattn.attention, implementation=implementation, **options)
        return call(q, k, v, normalizer=normalizer, score=score, scale=scale)

    *qkv, d_out = arrays
    return out_and_gradients(attend, (*qkv, normalizer, score, scale), d_out)


def as_float64(arrays: Any) -> list[Any]:
    return [x.astype(jnp.float64) for x in arrays]


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    ("dtype", "name"),
    [*itertools.product(["float32", "float64", "bfloat16", "float16"], POINTWISE)],
)
def test_pointwise_normalizers_round_little(name, dtype):
    """Out is the same if no gradient is needed."""
    arrays = attention_arrays((2, 37, 29, 4, 2, 10, 4), dtype, seed=1)
    options: Any = {"mask": masks.Causal()}
    with tuning.using(**TINY):
        got = results("native", POINTWISE[name], arrays, **options)
        options |= {"normalizer": POINTWISE[name], "implementation": "native"}
        assert_equal(jattn.attention(*arrays[:3], **options), got[0])
    want = results("reference", POINTWISE[name], as_float64(arrays), mask=masks.Causal())
    eps = float(jnp.finfo(dtype).eps)
    assert_accurate(got[0], want[0], 1e-14 if dtype == "float64" else 3 * eps)
    assert_accurate(got, want, 2e-14 if dtype == "float64" else 4 * eps)
    assert got[0].dtype == dtype


def formula(name: str, allowed: np.ndarray, arrays: Any) -> list[np.ndarray]:
    """Out and the gradients of q, k and v by definition, for a mask `[T, S]` of all heads."""
    q, k, v, d_out = (np.asarray(x, np.float64) for x in arrays)
    sees: Any = lambda pair: allowed[pair.i, pair.j]  # noqa: E731
    definition: Any = lambda parameters: WITH_DEFINITIONS[name][1]  # noqa: E731
    problem = oracle.OracleProblem(q, k, v, allowed=sees, normalizer=definition)
    forward, (backward,) = oracle.plain(problem, d_out, np.zeros(1), np.float64)
    return [forward.out, backward.q, backward.k, backward.v]


LIMITS = {"float64": 1e-12, "float32": 2e-5, "bfloat16": 3e-2, "float16": 3e-3}


@pytest.mark.one_in(12)
@pytest.mark.parametrize("name", OF_ROWS)
@pytest.mark.parametrize("dtype", LIMITS)
def test_values_and_gradients(name, dtype):
    """Many tiles; queries of one key, of several and of none; scores far apart, with sharp rows.
    Threads share the queries of the key head."""
    arrays = attention_arrays((1, 197, 163, 3, 1, 10, 7), dtype, seed=1)
    arrays[0] = 3 * arrays[0]
    i, j = np.arange(197)[:, None], np.arange(163)
    want = formula(name, (j <= i) & (i <= j + 140) & (i != 50), arrays)
    mask = masks.Causal() & masks.Window(left=140)
    ids = np.where(np.arange(197) == 50, 1, 0), np.zeros(163, int)
    got = results("native", OF_ROWS[name], arrays, mask=mask & masks.Segments(*ids))
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
    assert_accurate(results("native", OF_ROWS[name], arrays), want, 1e-5)


def _table(*shape: int) -> jax.Array:
    return normal_arrays(shape, seed=5)[0]


ALIBI = scores.Alibi(jnp.linspace(0.01, 0.5, 4))
CASES: dict[str, Any] = {
    "full": lambda T, S: {},
    "segments": lambda T, S: {"mask": masks.Segments(np.arange(T) // 30, np.arange(S) // 25)},
    "dead rows": lambda T, S: {
        "mask": masks.Lengths(q=jnp.array([T, 9]), kv=jnp.array([S - 40, 0]))
    },
    "predicate": lambda T, S: {"mask": masks.Predicate(lambda b, h, q, kv: (q + 2 * kv) % 3 < h)},
    "window": lambda T, S: {"mask": masks.Window(left=6, right=3)},
    "soft cap": lambda T, S: {"score": scores.SoftCap(2.0), "mask": masks.Causal()},
    "cap, alibi": lambda T, S: {"score": scores.SoftCap(jnp.array(2.0)) >> ALIBI},
    "alibi": lambda T, S: {"score": ALIBI},
    "scale by head": lambda T, S: {"scale": jnp.linspace(-0.5, 0.5, 4)},
    "bias": lambda T, S: {"score": scores.Bias(_table(1, 4, T, S)), "mask": masks.Causal()},
    "tanh": lambda T, S: {
        "score": scores.Score(lambda s, b, h, q, kv, x: jnp.tanh(s) * x[kv], _table(S))
    },
    "dropout": lambda T, S: {**DROPOUT, "mask": masks.Causal()},
    "dropout in float32": lambda T, S: {**DROPOUT, "mask": masks.Causal()},
}


@pytest.mark.one_in(37)
@pytest.mark.parametrize(
    ("tiles", "case", "name"), [*itertools.product(("usual", "tiny"), CASES, NORMALIZERS)]
)
def test_masks_and_scores(name, case, tiles):
    """float32 has vector code of its own for dropout."""
    T, S = (45, 83) if tiles == "tiny" else (313, 149)
    options, dtype = CASES[case](T, S), "float32" if case == "dropout in float32" else "float64"
    arrays = attention_arrays((2, T, S, 4, 2, 11, 6), dtype, seed=4)
    with tuning.using(**(TINY if tiles == "tiny" else {})):
        got = results("native", NORMALIZERS[name], arrays, **options)
        want = results("reference", NORMALIZERS[name], as_float64(arrays), **options)
    of_float64 = 2e-14 if name in POINTWISE else 1e-11
    assert_accurate(got, want, of_float64 if dtype == "float64" else 1e-5)
    if case == "dead rows":
        assert not got[0][1].any()


POISONED: dict[str, Any] = {
    "window": {"mask": masks.Causal() & masks.Window(left=60)},
    "function": {
        "mask": masks.Predicate(lambda b, h, q, kv: (q >= kv) & (q - kv <= 60)),
        **DROPOUT,
    },
}


@pytest.mark.one_in(29)
@pytest.mark.parametrize(
    ("poison", "dtype", "label", "name"),
    [*itertools.product((np.nan, np.inf, 1e38), ("float32", "bfloat16"), POISONED, NORMALIZERS)],
)
def test_poison(name, label, dtype, poison):
    """Masked numbers change nothing, bit for bit. A value that is not finite makes outputs NaN for
    the queries that attend to it alone, whatever its weight is, also in dropped pairs. A NaN of a
    key does so in pairs that are not dropped."""
    options = POISONED[label] | {"mask": POISONED[label]["mask"] & masks.Lengths(q=140)}
    run = functools.partial(results, "native", NORMALIZERS[name], **options)
    *qkv, d_out = attention_arrays((1, 150, 170, 4, 2, 8, 5), dtype, seed=7)
    q, k, v = qkv
    clean = run((*qkv, d_out))
    assert_equal(run((*(x.at[:, 140:].set(poison) for x in qkv), d_out)), clean)
    if poison == 1e38:
        return
    sees, channels = slice(40, 101), 3 if name in OF_ROWS else slice(None)
    changed = [(q, k, v.at[:, 40, :, channels].set(poison))]
    if label != "function":
        changed.append((q, k.at[:, 40].set(np.nan), v))
    for arrays in changed:
        out, dq, dk, dv, *_ = run((*arrays, d_out))
        assert np.isnan(out[:, sees]).all()
        for got, want in ((out, clean[0]), (dq, clean[1])):
            assert_equal(np.delete(got, sees, 1), np.delete(want, sees, 1))
        assert_equal((dk[:, 101:], dv[:, 101:]), tuple(x[:, 101:] for x in clean[2:4]))


@pytest.mark.parametrize("name", ["softmax", "exp", "sigmoid"])
def test_weights_have_the_digits_of_float32(name):
    """Weights at scores of both signs and around the multiples of log 2 / 32, the steps of the
    kernel's table of powers. For keys with scores x and 0, the softmax of x is sigmoid(x)."""
    steps = np.float32(np.arange(-2700, 2700) * np.log(2) / 32)
    edges = [steps, np.nextafter(steps, np.float32(-np.inf)), np.nextafter(steps, np.float32(1e9))]
    x = np.concatenate([*edges, np.random.default_rng(0).uniform(-58, 58, 4000)], dtype=np.float32)
    one_hot = jnp.array([1.0, 0.0], jnp.float32).reshape(1, 2, 1, 1)
    out: Any = jattn.attention(
        jnp.asarray(x).reshape(1, -1, 1, 1),
        one_hot,
        one_hot,
        normalizer={"softmax": None, "exp": Exp(), "sigmoid": Sigmoid(0.0)}[name],
        scale=1.0,
        implementation="native",
    )
    exact = np.exp(np.float64(x)) if name == "exp" else 1 / (1 + np.exp(-np.float64(x)))
    units = abs(np.asarray(out, np.float64)[0, :, 0, 0] / exact - 1) * 2**24
    assert (units <= 6 + 1.6 * abs(x)).all()
    assert np.sqrt(np.mean(units[abs(x) < 1] ** 2)) < 1.5


def test_weights_of_large_scores():
    v = jnp.full((1, 2, 1, 1), 3e38, jnp.float32)
    k = jnp.full((1, 2, 1, 1), 1.0, jnp.float32)
    q = jnp.array([-200.0, 200.0, 0.0], jnp.float32).reshape(1, 3, 1, 1)
    attend = functools.partial(jattn.attention, q, k, v, implementation="native")
    sigmoids = attend(normalizer=Sigmoid(0.0))[0, :, 0, 0]
    exponentials = attend(normalizer=Exp())[0, :, 0, 0]
    np.testing.assert_array_equal(sigmoids[:2], [0, np.inf])
    np.testing.assert_array_equal(exponentials[:2], [0, np.inf])
    np.testing.assert_array_equal(sigmoids[2:], v[0, 0, 0])


def test_few_small_parts_of_a_stick():
    """Thousands of parts, each less than a rounding error of the stick."""
    q, v = jnp.full((1, 1, 1, 1), -17, jnp.float32), 1e7 * normal_arrays((1, 4000, 1, 3))[0]
    v = v.astype(jnp.float32)
    k, d_out = jnp.ones((1, 4000, 1, 1), jnp.float32), jnp.ones((1, 1, 1, 3), jnp.float32)
    got = results("native", StickBreaking(), (q, k, v, d_out))
    beta = 1 / (1 + np.exp(17.0))
    weights = beta * (1 - beta) ** np.arange(3999, -1, -1)
    assert_accurate(got[0][0, 0, 0], weights @ np.asarray(v, np.float64)[0, :, 0], 1e-5)
    assert np.ptp(np.asarray(got[3])) > 1e-4 * np.max(np.abs(got[3]))


@pytest.mark.parametrize("normalizer", [Sparsemax(), StickBreaking()])
def test_no_queries_or_no_keys(normalizer):
    for sizes in ((1, 0, 5), (1, 5, 0), (0, 5, 5)):
        arrays = attention_arrays((*sizes, 2, 1, 4, 3), "float32")
        for array in jax.tree.leaves(results("native", normalizer, arrays)):
            assert not array.any()


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
    for alpha in (1.05, 5.5):
        assert "alpha" in str(jattn.explain(q, k, v, normalizer=Entmax(alpha))["native"])
    assert jattn.explain(q, k, v, normalizer=TopK(2))["native"] is None


def test_what_needs_no_compiler():
    """The built-in normalizers with a range of keys; others, and score functions, are generated."""
    shapes = Shapes((2,), T=37, S=29, N=4, K=2, H=10, V=4, dtype=np.dtype("float32"))

    def generated(normalizer: Any, **options: Any) -> bool:
        spec = made(shapes, normalizer=normalizer, **options).spec
        return native.not_built_in(built_in.separated(spec), shapes) is not None

    for name, normalizer in POINTWISE.items():
        assert generated(normalizer, mask=masks.Causal()) == (name in GENERATED)
        assert generated(normalizer, score=scores.SoftCap(2.0))
