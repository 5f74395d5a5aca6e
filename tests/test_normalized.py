"""Normalizers beyond the rows of the table: their limits, memory, published packages."""

import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn import masks, normalizers, scores
from jattn.kernels.xla import normalized
from jattn.spec import Shapes
from tests import oracle, row_normalizers
from tests.arrays import temporaries
from tests.cases import (
    CASES,
    CAUSAL,
    LONG,
    ONE_OF_EACH_NORMALIZER,
    CallCase,
    CaseSizes,
    bias,
    entmax,
    inputs,
)
from tests.conftest import attention_arrays, out_and_gradients, quick_jit
from tests.oracle import error
from tests.test_contract import CEILINGS, attend, on_device, truth


RULES = {name: CASES[name].normalizer for name in ONE_OF_EACH_NORMALIZER}


def built(name: str) -> Any:
    case = CASES[name]
    assert case.normalizer is not None
    return case.normalizer.build(jax.tree.map(jnp.asarray, dict(case.parameters)))


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, "float32") for name in RULES), ("softmax", "bfloat16"), ("softmax", "float16")],
)
@pytest.mark.parametrize("implementation", ["blockwise", "reference"])
def test_no_fill_constant_decides(name, dtype, implementation):
    """Scores far above and far below any constant that could stand for minus infinity."""
    case = CallCase(name, mask=CAUSAL, score=bias((1, 1, 1, 7)), scale=0.5, normalizer=RULES[name])
    x = inputs(case, dtype)
    call = quick_jit(functools.partial(attend, implementation, case))
    for offset in (-1e30, -1e6) if name == "exp" else (-1e30, -1e6, 1e6):
        rounded = {label: np.round(p) for label, p in x.parameters.items()}  # for sums with offsets
        parameters = rounded | {"bias": np.full((1, 1, 1, 7), offset, np.float32)}
        moved = x._replace(q=0 * x.q, parameters=parameters)
        want, device = oracle.attend(case.problem(moved)), on_device(moved)
        assert error(call(device)[0], want.out) <= CEILINGS[dtype]
        if name == "softmax":
            rules = case.rules(device.operands, device.parameters)
            weights = jattn.attention_weights(device.q, device.k, **rules)
            np.testing.assert_allclose(weights, want.weights, rtol=1e-6)


@pytest.mark.one_in(8)
@pytest.mark.parametrize("name", [name for name in RULES if name != "exp"])
@pytest.mark.parametrize("implementation", ["blockwise", "reference"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_large_logits_stay_finite(name, implementation, dtype):
    """Products of about 10⁴ per channel would overflow float16 before the normalizer."""
    case = CallCase(name, CaseSizes(H=64), CAUSAL, normalizer=RULES[name])
    x = inputs(case, dtype)
    loud = x._replace(q=x.q * x.q.dtype.type(50), k=x.k * x.k.dtype.type(50))
    out, _ = attend(implementation, case, on_device(loud))
    want = oracle.attend(case.problem(loud)).out
    finite = np.abs(want) <= float(jnp.finfo(dtype).max)
    got = np.asarray(out, np.float64)
    assert error(got[finite], want[finite]) <= CEILINGS[dtype] + 0.01 * (dtype == "float32")


def test_nothing_comes_from_no_keys_and_no_queries():
    @quick_jit
    def results(q: Any, k: Any) -> Any:
        def attend(q: Any, k: Any, name: str) -> Any:
            return jattn.attention(q, k, k, normalizer=built(name), implementation="blockwise")

        calls = [functools.partial(attend, name=name) for name in RULES]
        return [out_and_gradients(call, (q, k), jnp.ones_like(q)) for call in calls]

    for T, S in ((3, 0), (0, 3)):
        q, k = jnp.ones((2, T, 6, 5)), jnp.ones((2, S, 3, 5))
        for out, dq, dk in results(q, k):
            assert out.shape == dq.shape == q.shape and dk.shape == k.shape
            assert not any(np.any(x) for x in (out, dq, dk))


def test_blocks_of_queries_are_several_in_the_long_cases():
    """The table then compares several blocks, with a last one that is padded, with the oracle."""
    batch, T, S, N, K, H, V = LONG
    shapes = Shapes(batch or (1,), T, S, N, K, H, V, jnp.dtype("float32"))
    assert normalized._tiling(shapes, "cpu").block_q == 8 and T > 4 * 8 and T % 8


def test_traced_once(monkeypatch):
    traces, ask = [], scores.Score._scalar
    monkeypatch.setattr(scores.Score, "_scalar", lambda *x: traces.append(x) or ask(*x))
    bend = lambda score, slope: jnp.tanh(score) * slope  # noqa: E731
    gate = lambda score, b, h, q, kv, gates: gates[kv]  # noqa: E731
    x = on_device(inputs(CASES["plain"]))
    for build in (
        lambda by: normalizers.Pointwise(bend, 1.0 * by),
        lambda by: normalizers.Running(scores.Score(gate, by * jnp.arange(7.0))),
    ):
        call = lambda q, by, b=build: jattn.attention(q, x.k, x.v, normalizer=b(by)).sum()  # noqa: E731
        first, count = jax.grad(call)(x.q, jnp.float64(1)), len(traces)
        assert error(jax.grad(call)(x.q, jnp.float64(2)), first) > 0.01
        assert len(traces) == count > 0
        traces.clear()


def test_an_operation_of_running_has_the_values_that_its_function_reads_now():
    rate, x = [0.5], on_device(inputs(CASES["plain"]))

    @quick_jit
    def jitted(rate: Any) -> Any:
        return weights([rate])[0, 0, 0, 0]

    def weights(rate: Any) -> Any:
        combine = lambda left, right: left + right + rate[0] * left * right  # noqa: E731
        normalizer = normalizers.Running(scores.SoftCap(1.5), combine=combine, identity=0.0)
        return jattn.attention_weights(x.q, x.k, normalizer=normalizer)

    score = np.asarray(jattn.attention_scores(x.q, x.k))
    for rate[0] in (0.5, -0.25):  # (1 + c a)(1 + c b) = 1 + c (a ∘ b)
        factors = np.flip(1 + rate[0] * 1.5 * np.tanh(score / 1.5), -1)
        later = np.cumprod(factors, -1)[..., -2::-1]
        later = np.concatenate([later, np.ones_like(later[..., :1])], -1)
        combined = ((1 + rate[0] * score) * later - 1) / rate[0]
        assert error(weights(rate), np.asarray(jax.nn.softmax(combined))) <= 1e-14
    slope = (jitted(0.5 + 1e-6) - jitted(0.5 - 1e-6)) / 2e-6
    assert abs(jax.grad(jitted)(0.5) - slope) <= 1e-7 * abs(slope) + 1e-8


def test_every_derivative_of_an_operation_with_an_infinite_identity():
    """JAX's derivative of logaddexp(−inf, −inf), as of masked keys, is NaN."""
    terms: Any = {"combine": jnp.logaddexp, "identity": -np.inf}
    normalizer = normalizers.Running(scores.Score(lambda s, *_: 0.3 * s), **terms)
    x = on_device(inputs(CASES["plain"]))

    def loss(q: Any) -> Any:
        out = jattn.attention(q, x.k, x.v, mask=masks.Causal(), normalizer=normalizer)
        return jnp.sum(jnp.sin(out))

    gradient = jax.grad(loss)(x.q)
    _, tangent = jax.jvp(loss, (x.q,), (gradient,))
    np.testing.assert_allclose(tangent, jnp.vdot(gradient, gradient), rtol=1e-12)
    second = jax.grad(lambda q: jnp.vdot(jax.grad(loss)(q), gradient))(x.q)
    step = 1e-5 * gradient
    change = jax.grad(loss)(x.q + step) - jax.grad(loss)(x.q - step)
    np.testing.assert_allclose(second, change / 2e-5, rtol=0, atol=1e-8)


def test_a_relu_has_no_slope_at_zero():
    """Also the second derivative of a power between 1 and 2, which grows without bound near 0."""
    for power in (1, 1.5, 2):
        relu = normalizers.Relu(power)
        weight: Any = relu.evaluate
        slope = jax.grad(lambda s, weight=weight: weight(s, 0, 0, None, None))
        for s in (0.0, -1.0):
            assert slope(s) == 0 == jax.grad(slope)(s)
        assert slope(1.0) == power
    assert jnp.isnan(normalizers.Relu().evaluate(jnp.array(jnp.nan), 0, 0, None, None))


@pytest.mark.parametrize("alpha", [1.001, 12.0])
def test_entmax_of_scores_that_are_nearly_equal(alpha):
    """Checks thresholds that are closer to the greatest score than 10⁻¹⁵, as with α = 12."""
    sizes = CaseSizes((), 2, 29, 1, 1, 3, 2)
    case = CallCase("entmax", sizes, scale=1e-3, normalizer=entmax(alpha))
    x = inputs(case)
    assert error(attend("blockwise", case, on_device(x))[0], truth(case, x).out) <= 1e-11


@pytest.mark.parametrize("above_1", [1e-10, 1e-4, 0.3])
def test_entmax_near_1_has_the_digits_of_float32(above_1):
    """Below 1e-6 the definition has no digits left, and the weights are those of the softmax."""
    q, k, v, _ = attention_arrays((1, 9, 40, 1, 1, 8, 5), "float32")
    scores_of_rows = np.asarray(jattn.attention_scores(q, k)[0, 0], np.float64)
    definition = row_normalizers.entmax(1 + above_1).weights
    truth = [definition(row, []) for row in scores_of_rows]
    if above_1 < 1e-6:
        truth = np.exp(scores_of_rows) / np.exp(scores_of_rows).sum(1, keepdims=True)
    normalizer = normalizers.Entmax(1 + above_1)
    got = jattn.attention_weights(q, k, normalizer=normalizer)[0, 0]
    np.testing.assert_allclose(got, truth, atol=1e-6)
    out = jattn.attention(q, k, v, normalizer=normalizer)
    np.testing.assert_allclose(out[0, :, 0], got @ v[0, :, 0], atol=4e-6)


@pytest.mark.parametrize(
    ("alpha", "implementation"),
    [(3.0, "native"), (5.0, "native"), (5.0, "blockwise"), (9.0, "reference")],
)
def test_entmax_of_large_alphas_has_the_digits_of_float32(alpha, implementation):
    """The power of 1/(α − 1) amplifies the rounding of a threshold that is one number."""
    rng = np.random.default_rng(0)
    factors = np.array([0.01, 0.05, 0.2, 1, -1], np.float32)
    scores_of_keys = np.asarray(rng.normal(size=40) + 10, np.float32)
    q: Any = factors[None, :, None, None]
    k: Any = scores_of_keys[None, :, None, None]
    v: Any = np.eye(40, dtype=np.float32)[None, :, None]
    definition = row_normalizers.entmax(alpha).weights
    truth = [definition((x * scores_of_keys).astype(np.longdouble), []) for x in factors]
    normalizer = normalizers.Entmax(alpha)
    options: Any = {"normalizer": normalizer, "scale": 1.0, "implementation": implementation}
    got = jattn.attention(q, k, v, **options)[0, :, 0]
    np.testing.assert_allclose(got, truth, rtol=0, atol=2e-7)


@pytest.mark.parametrize("alpha", [1.2, 1.9])
def test_entmax_has_the_digits_of_float64(alpha):
    """XLA's log1p has fewer."""
    logits = np.random.default_rng(0).normal(size=(40, 11)) * 2
    definition = row_normalizers.entmax(alpha).weights
    truth = [definition(row.astype(np.longdouble), []) for row in logits]
    weights: Any = jax.jit(normalizers.Entmax(alpha).weights)
    np.testing.assert_allclose(weights(logits, 0, 0, None, None), truth, rtol=0, atol=6e-16)


@jax.tree_util.register_static
class OfScores(normalizers.NormalizerFunction):
    def __init__(self, function: Any):
        self.function = function

    def weights(self, score, b, h, rows, columns):
        return self.function(score)


@pytest.mark.parametrize("implementation", [None, "reference"])
def test_weights_of_a_users_class_are_floats_of_all_pairs(implementation):
    q, k, v, _ = attention_arrays((1, 5, 7, 1, 1, 8, 5), "float32")

    def attend(function: Any) -> Any:
        normalizer = OfScores(function)
        return jattn.attention(q, k, v, normalizer=normalizer, implementation=implementation)

    softmax = functools.partial(jax.nn.softmax, axis=-1)
    np.testing.assert_allclose(attend(softmax), jattn.attention(q, k, v), atol=1e-6)
    narrow = attend(lambda score: softmax(score).astype(jnp.bfloat16))
    np.testing.assert_allclose(narrow, jattn.attention(q, k, v), atol=1e-2)
    wrong = {
        r"float32 \[5, 1\]": lambda score: softmax(score)[:, :1],
        r"float32 \[7\]": lambda score: softmax(score)[0],
        r"bool \[5, 7\]": lambda score: score > 0,
        "NoneType": lambda score: None,
    }
    for got, function in wrong.items():
        with pytest.raises(TypeError, match=rf"OfScores.weights must .*\[5, 7\], got {got}"):
            attend(function)


def test_weights_of_masked_pairs_are_zero_whatever_a_class_returns():
    q, k, v, _ = attention_arrays((1, 4, 4, 1, 1, 8, 4), "float32")
    options: Any = {"mask": masks.Causal(), "normalizer": OfScores(lambda x: jnp.full_like(x, 0.5))}
    want = np.tri(4, dtype=np.float32) / 2
    np.testing.assert_array_equal(jattn.attention_weights(q, k, **options)[0, 0], want)
    rows = jattn.viz.weights_at(q, k, rows=range(4), **options)
    np.testing.assert_array_equal(rows[0, 0], want)
    statistics = jattn.statistics(q, k, keys=jnp.ones(4, bool), **options)
    np.testing.assert_array_equal(statistics.received[0, 0], want.sum(0))
    assert statistics.on_keys is not None
    np.testing.assert_array_equal(statistics.on_keys[0, 0], want.sum(1))
    np.testing.assert_allclose(jattn.attention(q, k, v, **options)[0, :, 0], want @ v[0, :, 0])


def test_the_alpha_of_entmax_is_not_learned():
    with pytest.raises(TypeError, match="Entmax: alpha: expected a Python number, got an"):
        jax.grad(normalizers.Entmax)(1.5)


def test_classes_that_are_no_pytrees_are_refused():
    bases = masks.Mask, scores.ScoreFunction, normalizers.NormalizerFunction
    for name, base in zip(("mask", "score", "normalizer"), bases, strict=True):
        q, options = jnp.ones((1, 5, 1, 8)), cast(Any, {name: type("Own", (base,), {})()})
        with pytest.raises(TypeError, match=f"^{name}: expected a registered pytree.*register_sta"):
            jattn.attention(q, q, q, **options)


@pytest.mark.parametrize("alpha", [2.0, 1.5, 2.5])
def test_the_published_package_agrees(alpha):
    torch, entmax = pytest.importorskip("torch"), pytest.importorskip("entmax")
    theirs = {2.0: entmax.sparsemax, 1.5: entmax.entmax15}.get(
        alpha, lambda x, dim: entmax.entmax_bisect(x, alpha, dim, n_iter=100)
    )
    ours = normalizers.Sparsemax() if alpha == 2 else normalizers.Entmax(alpha)
    score, cotangent = np.random.default_rng(1).standard_normal((2, 5, 11))
    leaf = torch.tensor(3 * score, requires_grad=True)
    want = theirs(leaf, dim=-1)
    want.backward(torch.tensor(cotangent))

    def weights_of(score: Any) -> Any:
        eye = jnp.eye(score.shape[1])[:, None]
        call = functools.partial(jattn.attention, scale=1.0, normalizer=ours)
        return call(score[:, None], eye, eye, implementation="blockwise")[:, 0]

    got, pull = jax.vjp(weights_of, jnp.asarray(3 * score))
    assert 0 < np.mean(np.asarray(got) == 0) < 1
    assert error(got, want.detach().numpy()) <= 1e-12
    assert error(pull(jnp.asarray(cotangent))[0], leaf.grad.numpy()) <= 1e-11


MEASURED = ("sparsemax", "sigmoid", "entmax", "top_k", "stick_breaking", "forgetting")
FREE = {"sigmoid": normalizers.Sigmoid(-9.0)}
FREE |= {"forgetting": normalizers.Running(scores.SoftCap(3.0))}


@pytest.mark.default_tiles
@pytest.mark.one_in(12, slow=True)
@pytest.mark.parametrize("name", MEASURED)
@pytest.mark.parametrize("which", ["gradient", "forward"])
def test_memory_is_linear(name, which):
    rules: Any = {"mask": masks.Causal(), "normalizer": FREE.get(name) or built(name)}
    call = functools.partial(jattn.attention, implementation="blockwise", **rules)
    gradient = jax.grad(lambda *qkv: jnp.sum(call(*qkv)), (0, 1, 2))
    function = gradient if which == "gradient" else call
    sizes = [[(1, T, 2, 16)] * 3 for T in (1024, 16384)]
    short, long = (temporaries(function, *x) for x in sizes)
    assert long <= 18 * short
    assert long < 16384**2 * 4 / 4
