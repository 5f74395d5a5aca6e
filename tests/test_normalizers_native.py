"""Pointwise normalizers in the kernel in C++ with tiny tiles, against reference and NumPy."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn import masks, normalizers, scores, tuning
from jattn.kernels.cpu import built_in, native
from jattn.spec import Shapes
from tests.arrays import assert_accurate, assert_equal
from tests.conftest import attention_arrays, out_and_gradients
from tests.kernels import made
from tests.oracle import error


B, T, S, N, K, H, V = SIZES = (2, 37, 29, 6, 3, 10, 4)
BIASES = np.linspace(-2.0, 1.0, N)
PAIR = np.array([0.7, -0.2])


@pytest.fixture(autouse=True)
def _tiny_tiles():
    """Tiles of 16 queries and 8 keys, sums over runs of 16."""
    with tuning.using(cpu_tiles="16, 8, 16", generated_pairs=0):
        yield


def _softsign(score: Any, pair: Any) -> Any:
    return score * pair[0] / (1 + jnp.abs(score)) + pair[1]


# Normalizers, and their formulas for scores [B, N, T, S].
BUILT_IN: dict[str, tuple[Any, Any]] = {
    "identity": (normalizers.Identity(), lambda x: x),
    "sigmoid": (normalizers.Sigmoid(), lambda x: 1 / (1 + S * np.exp(-x))),
    "relu": (normalizers.Relu(), lambda x: np.maximum(x, 0)),
    "squared relu": (
        normalizers.Relu(2, count_power=0.5),
        lambda x: np.maximum(x, 0) ** 2 / S**0.5,
    ),
    "exp": (normalizers.Exp(), np.exp),
}
GENERATED: dict[str, tuple[Any, Any]] = {
    "sigmoid by head": (
        normalizers.Sigmoid(BIASES),
        lambda x: 1 / (1 + np.exp(-x - BIASES[:, None, None])),
    ),
    "cubed relu": (normalizers.Relu(3), lambda x: np.maximum(x, 0) ** 3),
    "function": (
        normalizers.Pointwise(_softsign, PAIR),
        lambda x: x * PAIR[0] / (1 + abs(x)) + PAIR[1],
    ),
}
NORMALIZERS = {name: normalizer for name, (normalizer, _) in (BUILT_IN | GENERATED).items()}

IDS = np.arange(T) // 9, np.arange(S) // 9
MASKS: dict[str, Any] = {
    "full": masks.Full(),
    "causal": masks.Causal(),
    "window": masks.Window(left=6, right=3),
    "segments": masks.Causal() & masks.Segments(*IDS),
    "dead rows": masks.Lengths(q=np.array([20, 0]), kv=np.array([29, 11])),
    "function": masks.Predicate(lambda b, h, q, kv: (q + 2 * kv + h) % 5 < 2),
}
DROPOUT = {"dropout_rate": 0.3, "dropout_key": jax.random.key(1)}
OPTIONS = {name: {"mask": mask} for name, mask in MASKS.items()} | {
    "dropout": {"mask": masks.Full(), **DROPOUT},
    "causal dropout": {"mask": masks.Causal(), **DROPOUT},
}


def _results(implementation: str, arguments: Any, **options: Any) -> Any:
    """Out and all gradients for a normalizer, a score function, q, k, v and a cotangent."""

    def attend(normalizer: Any, score: Any, *qkv: Any) -> Any:
        call = functools.partial(jattn.attention, implementation=implementation, **options)
        return call(*qkv, normalizer=normalizer, score=score)

    *differentiated, d_out = arguments
    return out_and_gradients(attend, differentiated, d_out)


def _both(arguments: Any, **options: Any) -> tuple[Any, Any]:
    native, reference = (_results(name, arguments, **options) for name in ("native", "reference"))
    return native, reference


@pytest.mark.one_in(12)
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
@pytest.mark.parametrize("name", NORMALIZERS)
def test_out_is_that_of_the_formula(name, dtype):
    """Compares with NumPy in float64 from the rounded inputs, also if lse is not needed."""
    q, k, v, _ = attention_arrays(SIZES, dtype)
    keys, values = (np.repeat(np.float64(x), N // K, axis=2) for x in (k, v))
    _, formula = (BUILT_IN | GENERATED)[name]
    weights = formula(np.einsum("btnh,bsnh->bnts", np.float64(q), keys) / H**0.5)
    weights = np.where(np.arange(T)[:, None] >= np.arange(S), weights, 0)
    want = np.einsum("bnts,bsnv->btnv", weights, values)
    attend = functools.partial(
        jattn.attention, mask=masks.Causal(), normalizer=NORMALIZERS[name], implementation="native"
    )
    limit = 1e-14 if dtype == "float64" else 3 * float(jnp.finfo(dtype).eps)
    out, _ = jax.vjp(attend, q, k, v)
    assert out.dtype == dtype
    assert error(attend(q, k, v), want) <= limit
    assert error(out, want) <= limit


@pytest.mark.one_in(8)
@pytest.mark.parametrize("label", OPTIONS)
@pytest.mark.parametrize("name", NORMALIZERS)
def test_gradients_are_those_of_the_reference(name, label):
    arguments = NORMALIZERS[name], None, *attention_arrays(SIZES, seed=1)
    got, want = _both(arguments, **OPTIONS[label])
    assert_accurate(got, want, 2e-14)
    if label == "dead rows":
        assert not got[0][1].any()


@pytest.mark.one_in(6)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["identity", "sigmoid", "relu", "function"])
def test_gradients_of_narrow_dtypes(name, dtype):
    arrays = attention_arrays(SIZES, dtype, seed=1)
    exact = [x.astype(jnp.float64) for x in arrays]
    got, want = (
        _results(implementation, (NORMALIZERS[name], None, *x), mask=masks.Causal())
        for implementation, x in (("native", arrays), ("reference", exact))
    )
    assert_accurate(got, want, 4 * float(jnp.finfo(dtype).eps))


@pytest.mark.one_in(8, slow=True)
@pytest.mark.parametrize("name", ["sigmoid", "relu", "sigmoid by head", "function"])
def test_score_functions_come_first(name):
    alibi = scores.Alibi(np.linspace(0.01, 0.5, N))
    q, k, v, d_out = attention_arrays(SIZES, seed=2)
    for score in (scores.SoftCap(np.array(2.0)) >> alibi, scores.SoftCap(2.0), alibi):
        arguments = NORMALIZERS[name], score, q, k, v, d_out
        assert_accurate(*_both(arguments, mask=masks.Causal()), 2e-14)

    def attend(scale: Any, implementation: str) -> Any:
        options = {"scale": scale, "normalizer": NORMALIZERS[name]}
        return jattn.attention(q, k, v, implementation=implementation, **options)

    scale = jnp.linspace(-0.5, 0.5, N)
    got, want = (
        out_and_gradients(functools.partial(attend, implementation=x), [scale], d_out)
        for x in ("native", "reference")
    )
    assert_accurate(got, want, 2e-14)


@pytest.mark.one_in(8)
@pytest.mark.parametrize("name", ["identity", "sigmoid", "relu", "exp", "function"])
@pytest.mark.parametrize("label", ["segments", "function"])
def test_what_is_masked_does_not_exist(name, label):
    """NaN in queries without keys and in keys without queries changes nothing, bit for bit."""
    q, k, v, d_out = attention_arrays(SIZES, "float32", seed=4)
    mask = MASKS[label] & masks.Lengths(q=np.array([T - 4] * B), kv=np.array([S - 6] * B))
    run = lambda *x: _results("native", (NORMALIZERS[name], None, *x, d_out), mask=mask)  # noqa: E731
    clean = run(q, k, v)
    for poison in (np.nan, np.inf, 1e38):
        bad_k, bad_v = (x.at[:, S - 6 :].set(poison) for x in (k, v))
        assert_equal(run(q.at[:, T - 4 :].set(poison), bad_k, bad_v), clean)


@pytest.mark.one_in(8)
@pytest.mark.parametrize("name", [*BUILT_IN, "function"])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_who_attends_to_a_value_that_is_not_finite_gets_nan(name, poison):
    """Whatever its weight is, also in dropped pairs; nobody else does."""
    q, k, v, _ = attention_arrays(SIZES, "float32", seed=5)
    v = v.at[:, 11].set(poison)
    for first, options in ((0, {}), (11, {"mask": masks.Causal(), **DROPOUT})):
        attend = functools.partial(jattn.attention, implementation="native", **options)
        out = np.asarray(attend(q, k, v, normalizer=NORMALIZERS[name]))
        assert np.isnan(out[:, first:]).all()
        assert np.isfinite(out[:, :first]).all()


@pytest.mark.parametrize("name", ["softmax", "exp", "sigmoid"])
def test_weights_have_the_digits_of_float32(name):
    """Weights at scores of both signs and around the multiples of log 2 / 32, the steps of the
    kernel's table of powers. For keys with scores x and 0, the softmax of x is sigmoid(x)."""
    steps = np.float32(np.arange(-2700, 2700) * np.log(2) / 32)
    edges = [steps, np.nextafter(steps, np.float32(-np.inf)), np.nextafter(steps, np.float32(1e9))]
    x = np.concatenate([*edges, np.random.default_rng(0).uniform(-58, 58, 4000)], dtype=np.float32)
    normalizer = {"softmax": None, "exp": normalizers.Exp(), "sigmoid": normalizers.Sigmoid(0.0)}
    out: Any = jattn.attention(
        jnp.asarray(x).reshape(1, -1, 1, 1),
        jnp.array([1.0, 0.0], jnp.float32).reshape(1, 2, 1, 1),
        jnp.array([1.0, 0.0], jnp.float32).reshape(1, 2, 1, 1),
        normalizer=normalizer[name],
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
    sigmoids = attend(normalizer=normalizers.Sigmoid(0.0))[0, :, 0, 0]
    exponentials = attend(normalizer=normalizers.Exp())[0, :, 0, 0]
    np.testing.assert_array_equal(sigmoids[:2], [0, np.inf])
    np.testing.assert_array_equal(exponentials[:2], [0, np.inf])
    np.testing.assert_array_equal(sigmoids[2:], v[0, 0, 0])


def test_what_needs_no_compiler():
    """The built-in normalizers with a range of keys; others, and score functions, are generated."""
    shapes = Shapes((B,), T, S, N, K, H, V, np.dtype("float32"))

    def generated(normalizer: Any, **options: Any) -> bool:
        spec = made(shapes, normalizer=normalizer, **options).spec
        return native.not_built_in(built_in.separated(spec), shapes) is not None

    for name, normalizer in NORMALIZERS.items():
        assert generated(normalizer, mask=masks.Causal()) == (name in GENERATED)
        assert generated(normalizer, score=scores.SoftCap(2.0))
