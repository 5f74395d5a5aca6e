"""Normalizers beyond the rows of the table: their limits, memory, published packages."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn import masks, normalizers, scores, tuning
from jattn.kernels.xla import normalized
from jattn.spec import Shapes
from tests import oracle
from tests.cases import (
    CASES,
    CAUSAL,
    LONG,
    NORMALIZERS,
    ONE_OF_EACH_NORMALIZER,
    CallCase,
    CaseSizes,
    bias,
    entmax,
    inputs,
)
from tests.conftest import quick_jit, users_jit
from tests.oracle import error
from tests.test_contract import CEILINGS, attend, on_device, run, truth


RULES = {name: CASES[name].normalizer for name in ONE_OF_EACH_NORMALIZER}
each_normalizer = pytest.mark.parametrize("name", RULES)


def built(name: str) -> Any:
    """The normalizer of a case."""
    case = CASES[name]
    assert case.normalizer is not None
    return case.normalizer.build(jax.tree.map(jnp.asarray, dict(case.parameters)))


@pytest.mark.one_in(4)
@each_normalizer
@pytest.mark.parametrize("implementation", ["blockwise", "reference"])
def test_no_fill_constant_decides(name, implementation):
    """Scores far above and far below any constant that could stand for minus infinity."""
    case = CallCase(name, mask=CAUSAL, score=bias((1, 1, 1, 7)), scale=0.5, normalizer=RULES[name])
    x = inputs(case, "float32")
    call = quick_jit(functools.partial(attend, implementation, case))
    for offset in (-1e30, -1e6) if name == "exp" else (-1e30, -1e6, 1e6):
        rounded = {label: np.round(p) for label, p in x.parameters.items()}  # for sums with offsets
        parameters = rounded | {"bias": np.full((1, 1, 1, 7), offset, np.float32)}
        moved = x._replace(q=0 * x.q, parameters=parameters)
        want = oracle.attend(case.problem(moved)).out
        assert error(call(on_device(moved))[0], want) <= CEILINGS["float32"]


@pytest.mark.one_in(8)
@each_normalizer
@pytest.mark.parametrize("implementation", ["blockwise", "reference"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_large_logits_stay_finite(name, implementation, dtype):
    """Products of about 10⁴ per channel would overflow float16 before the normalizer."""
    if name == "exp":
        return
    case = CallCase(name, CaseSizes(H=64), CAUSAL, normalizer=RULES[name])
    x = inputs(case, dtype)
    loud = x._replace(q=x.q * x.q.dtype.type(50), k=x.k * x.k.dtype.type(50))
    out, _ = attend(implementation, case, on_device(loud))
    want = oracle.attend(case.problem(loud)).out
    finite = np.abs(want) <= float(jnp.finfo(dtype).max)
    got = np.asarray(out, np.float64)
    assert error(got[finite], want[finite]) <= CEILINGS[dtype] + 0.01 * (dtype == "float32")


def test_nothing_comes_from_no_keys_and_no_queries():
    """The output and all gradients are 0, or empty."""

    @quick_jit
    def gradients_of_all(q: Any, k: Any) -> Any:
        def total(q: Any, k: Any, name: str) -> Any:
            out = jattn.attention(q, k, k, normalizer=built(name), implementation="blockwise")
            return jnp.sum(out + 1), out

        grad = functools.partial(jax.grad(total, (0, 1), has_aux=True), q, k)
        return [grad(name) for name in RULES]

    for T, S in ((3, 0), (0, 3)):
        q, k = jnp.ones((2, T, 6, 5)), jnp.ones((2, S, 3, 5))
        for (dq, dk), out in gradients_of_all(q, k):
            assert out.shape == dq.shape == q.shape
            assert not any(np.any(x) for x in (out, dq, dk))


def test_blocks_of_queries_are_several_in_the_long_cases():
    """The table then compares several blocks, with a last one that is padded, with the oracle."""
    batch, T, S, N, K, H, V = LONG
    shapes = Shapes(batch or (1,), T, S, N, K, H, V, jnp.dtype("float32"))
    assert normalized._tiling(shapes, "cpu").block_q == 8
    assert T > 4 * 8 and T % 8


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", [x.name for x in NORMALIZERS if x.sizes == LONG])
def test_one_block_gives_the_same_as_several(name):
    x = inputs(CASES[name])
    several = run("blockwise", name, x)
    with tuning.using(row_scores=2**21):
        whole = quick_jit(functools.partial(attend, "blockwise", CASES[name]))(on_device(x))
    assert error(several.out, whole[0]) <= 1e-14


def test_running_combines_from_left_to_right():
    x, term = on_device(inputs(CASES["plain"])), scores.SoftCap(1.5)
    first = lambda left, right: jnp.where((abs(left) > 1) | (right == 0), left, right)  # noqa: E731
    normalizer = normalizers.Running(term, combine=first, identity=0.0)
    score = np.asarray(jattn.attention_scores(x.q, x.k))
    combined, later = score.copy(), np.zeros_like(score[..., 0])
    for j in reversed(range(score.shape[-1])):
        combined[..., j] = first(score[..., j], later)
        later = first(1.5 * np.tanh(score[..., j] / 1.5), later)
    got = jattn.attention_weights(x.q, x.k, normalizer=normalizer)
    assert error(got, np.asarray(jax.nn.softmax(combined))) <= 1e-14


def test_traced_once(monkeypatch):
    """New numbers in operands compile nothing again."""
    traces, ask = [], scores.Score._scalar
    monkeypatch.setattr(scores.Score, "_scalar", lambda *x: traces.append(x) or ask(*x))

    def bend(score: Any, slope: Any) -> Any:
        return jnp.tanh(score) * slope

    def gate(score: Any, b: Any, h: Any, q: Any, kv: Any, gates: Any) -> Any:
        return gates[kv]

    x = on_device(inputs(CASES["plain"]))
    for build in (
        lambda by: normalizers.Pointwise(bend, 1.0 * by),
        lambda by: normalizers.Running(scores.Score(gate, by * jnp.arange(7.0))),
    ):

        def gradient(by: float, build: Any = build) -> Any:
            call = lambda q, by: jattn.attention(q, x.k, x.v, normalizer=build(by)).sum()  # noqa: E731
            return jax.grad(call)(x.q, by)

        first = gradient(jnp.float64(1))
        count = len(traces)
        assert count > 0
        assert error(gradient(jnp.float64(2)), first) > 0.01
        assert len(traces) == count
        traces.clear()


def test_an_operation_of_running_has_the_values_that_its_function_reads_now():
    rate, term = [0.5], scores.SoftCap(1.5)
    x = on_device(inputs(CASES["plain"]))

    def weights(rate: Any) -> Any:
        combine = lambda left, right: left + right + rate[0] * left * right  # noqa: E731
        normalizer = normalizers.Running(term, combine=combine, identity=0.0)
        return jattn.attention_weights(x.q, x.k, normalizer=normalizer)

    score = np.asarray(jattn.attention_scores(x.q, x.k))
    for rate[0] in (0.5, -0.25):  # (1 + c a)(1 + c b) = 1 + c (a ∘ b)
        factors = np.flip(1 + rate[0] * 1.5 * np.tanh(score / 1.5), -1)
        later = np.cumprod(factors, -1)[..., -2::-1]
        later = np.concatenate([later, np.ones_like(later[..., :1])], -1)
        combined = ((1 + rate[0] * score) * later - 1) / rate[0]
        assert error(weights(rate), np.asarray(jax.nn.softmax(combined))) <= 1e-14
    d_weight = jax.grad(lambda c: weights([c])[0, 0, 0, 0])(0.5)
    epsilon = 1e-6
    slope = (weights([0.5 + epsilon]) - weights([0.5 - epsilon]))[0, 0, 0, 0] / (2 * epsilon)
    assert abs(d_weight - slope) <= 1e-7 * abs(slope) + 1e-8


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


@pytest.mark.parametrize("alpha", [1.001, 1.05, 4.0, 12.0])
def test_entmax_of_scores_that_are_nearly_equal(alpha):
    """Checks thresholds that are closer to the greatest score than 10⁻¹⁵, as with α = 12."""
    case = CallCase(
        "entmax", CaseSizes((), 2, 29, 1, 1, 3, 2), scale=1e-3, normalizer=entmax(alpha)
    )
    x = inputs(case)
    got = attend("blockwise", case, on_device(x))[0]
    assert error(got, truth(case, x).out) <= 1e-11


def weights_of(normalizer: Any, score: Any) -> Any:
    """The weights of scores `[t, S]`, by `attention` with one-hot keys and values."""
    eye = jnp.eye(score.shape[1])[:, None]
    call = functools.partial(jattn.attention, scale=1.0, normalizer=normalizer)
    return call(score[:, None], eye, eye, implementation="blockwise")[:, 0]


@pytest.mark.parametrize("alpha", [2.0, 1.5, 1.3, 2.5])
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
    got, pull = jax.vjp(functools.partial(weights_of, ours), jnp.asarray(3 * score))
    assert 0 < np.mean(np.asarray(got) == 0) < 1
    assert error(got, want.detach().numpy()) <= 1e-12
    assert error(pull(jnp.asarray(cotangent))[0], leaf.grad.numpy()) <= 1e-11


def temporaries(normalizer: Any, T: int, which: str) -> int:
    """The bytes of temporary arrays of a causal call of two heads."""
    call = functools.partial(
        jattn.attention, mask=masks.Causal(), normalizer=normalizer, implementation="blockwise"
    )
    function: Any = call
    if which == "gradient":
        function = jax.grad(lambda *qkv: jnp.sum(call(*qkv)), (0, 1, 2))
    shape = jax.ShapeDtypeStruct((1, T, 2, 16), jnp.float32)
    analysis: Any = users_jit(function).lower(shape, shape, shape).compile().memory_analysis()
    return analysis.temp_size_in_bytes


MEASURED = ("sigmoid", "sparsemax", "entmax", "top_k", "stick_breaking", "forgetting")
FREE = {
    "sigmoid": normalizers.Sigmoid(-9.0),
    "forgetting": normalizers.Running(scores.SoftCap(3.0)),
}


@pytest.mark.default_tiles
@pytest.mark.one_in(12)
@pytest.mark.parametrize("name", MEASURED)
@pytest.mark.parametrize("which", ["forward", "gradient"])
def test_memory_is_linear(name, which):
    """Checks that 4 times the tokens need 4 times the memory, not 16 times as for T × S scores."""
    normalizer = FREE[name] if name in FREE else built(name)
    short, long = (temporaries(normalizer, T, which) for T in (4096, 16384))
    assert long <= 4.5 * short
    assert long < 16384**2 * 4 / 4
