"""Logits up to 1e12 and values so large that rounding, overflow or infinity could decide."""

import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn import masks, scores
from jattn.cache import DenseCache
from jattn.kernels import registry
from tests import cases, oracle
from tests.cases import GENERAL, IMPLEMENTATIONS
from tests.conftest import attention_arrays, normal_arrays, out_and_gradients, quick_jit, users_jit


# cuDNN needs a GPU, kernels in Mosaic take 16 bits.
FOR_DEVICES = "cudnn", "hopper", "ampere", "blackwell", "pallas"
KERNELS = [name for name in IMPLEMENTATIONS if name not in FOR_DEVICES]

every_kernel = pytest.mark.parametrize("implementation", KERNELS)


def call(implementation: str, *qkv: Any, **options: Any) -> Any:
    return jattn.attention(*qkv, implementation=implementation, return_lse=True, **options)


def drawn(T: int = 5, S: int = 40, H: int = 8) -> list[jax.Array]:
    return attention_arrays((1, T, S, 2, 2, H, 4), "float32")[:3]


def assert_weights_sum_to_one(implementation: str, size: float, T: int, S: int, mask: Any) -> None:
    """Sums the gradients of the values: for d_out of ones, the number of queries with keys."""
    q, k, v = drawn(T=T, S=S)
    # Logits of about `size` whose differences are a few units: rounding leaves several keys alive.
    q, k = q * 0 + 1, jnp.round(k) + jnp.float32(size / 8)
    if size == 1e8:
        k = k * 0 + jnp.float32(size / 8)

    total = lambda v, q, k: jnp.sum(call(implementation, q, k, v, mask=mask, scale=1.0)[0])  # noqa: E731
    d_value = np.asarray(quick_jit(jax.grad(total))(v, q, k), np.float64)
    np.testing.assert_allclose(d_value.sum(axis=(0, 1)), T, rtol=2e-6)


@pytest.mark.one_in(20)
@pytest.mark.parametrize("mask", [None, masks.Causal()])
@pytest.mark.parametrize("size", [1e3, 1e5, 1e6, 1e7, 1e8])
@pytest.mark.parametrize("implementation", KERNELS)
def test_the_weights_of_the_backward_pass_sum_to_one(implementation, size, mask):
    assert_weights_sum_to_one(implementation, size, 37, 40, mask)


@pytest.mark.default_tiles
@pytest.mark.one_in(2)
@pytest.mark.parametrize("implementation", ["blockwise", "native"])
@pytest.mark.parametrize("size", [1e5, 1e7])
def test_the_weights_of_the_backward_pass_sum_to_one_over_tiles(implementation, size):
    assert_weights_sum_to_one(implementation, size, 600, 700, masks.Window(left=300, right=300))


@pytest.mark.one_in(24)
@pytest.mark.parametrize("T", [1, 9])
@pytest.mark.parametrize("H", [1, 2, 16])
@pytest.mark.parametrize("size", [1e4, 1e12, 1e30])
@pytest.mark.parametrize("implementation", KERNELS)
def test_a_row_with_keys_is_alive_at_any_size_of_equal_logits(implementation, size, H, T):
    """A product of two numbers rounds alike for all keys, so that they share the weight; sums of
    several products may differ by their last digit, which then decides."""
    q = jnp.full((1, T, 1, H), 1.1 * math.sqrt(size) / H, jnp.float32)
    k = jnp.full((1, 37, 1, H), 1.3 * math.sqrt(size), jnp.float32)
    places = jnp.arange(37, dtype=jnp.float32)[:, None, None]
    v = jnp.broadcast_to(jnp.concatenate([places, places * 0 + 1], axis=-1), (1, 37, 1, 2))
    for mask in (None, masks.Lengths(kv=jnp.array([37]))):
        out, lse = quick_jit(functools.partial(call, implementation, mask=mask))(q, k, v)
        np.testing.assert_allclose(out[..., 1], 1, rtol=1e-6)
        assert np.all((out[..., 0] >= 0) & (out[..., 0] <= 36))
        if H == 1:
            np.testing.assert_allclose(out[..., 0], 18, rtol=1e-6)
        np.testing.assert_allclose(lse, 1.43 * size / math.sqrt(H) + math.log(37), rtol=1e-3)


STEEP = jnp.array([1e9, -1.23456e9], jnp.float32)


def as_score(function: Any) -> Any:
    """Returns the options of a call with this score function, which has no parameter."""
    return lambda _: {"score": scores.Score(function)}


# Functions from an array, the parameter, to the options of a call; and the array.
HUGE: dict[str, tuple[Any, jax.Array]] = {
    "temperature": (
        lambda t: {"score": scores.Temperature(t)},
        jnp.array([1e-10, 2e-10], jnp.float32),
    ),
    "temperature of 1e-12": (lambda _: {"score": scores.Temperature(1e-12)}, STEEP),
    "square": (as_score(lambda s, b, h, i, j: s * s * 1e9), STEEP),
    "product": (as_score(lambda s, b, h, i, j: s * 1e12), STEEP),
    "exponential": (as_score(lambda s, b, h, i, j: jnp.exp(s) * 1e10), STEEP),
    "sum": (as_score(lambda s, b, h, i, j: s * 1.37e10 * s + j.astype(s.dtype) * s * 1.1e9), STEEP),
    "cap": (
        lambda a: {
            "score": scores.SoftCap(2.0)
            >> scores.Score(lambda s, b, h, i, j, a: s * a[h] - j.astype(s.dtype) * a[h], a)
        },
        STEEP,
    ),
    "alibi": (lambda slopes: {"score": scores.Alibi(slopes)}, STEEP),
    "chain": (lambda a: {"score": scores.Temperature(1e-10) >> scores.Alibi(a)}, STEEP),
    "bias": (
        lambda a: {"score": scores.Bias(a)},
        jnp.asarray(1e12 * np.random.default_rng(5).standard_normal((1, 2, 20, 24)), jnp.float32),
    ),
    "scale": (lambda _: {"scale": 1.1e10}, STEEP),
    "scale as an array": (lambda a: {"scale": a}, jnp.float32(1.1e10)),
}


OF_16_BITS = ["temperature", "square", "alibi", "scale", "scale as an array"]
HUGE_CALLS = [
    *itertools.product(
        HUGE, [None, masks.Causal(), masks.Lengths(kv=jnp.array([20]))], ["float32"], KERNELS
    ),
    *itertools.product(OF_16_BITS, [masks.Causal()], ["bfloat16", "float16"], KERNELS),
]


@pytest.mark.one_in(47)
@pytest.mark.parametrize(("what", "mask", "dtype", "implementation"), HUGE_CALLS)
def test_weights_sum_to_one_at_logits_up_to_1e12(implementation, what, mask, dtype):
    """A row has the value of its largest score, and its weights sum to one: in the output, in the
    gradients of the values and in tangents. Products are exact for kernels whose interpreted
    backward pass adds them in another order."""
    lacking = {"native": "bias", "tpu": "float16"}.get(implementation)
    if lacking in (what, dtype):
        pytest.skip(f"it has no {lacking}")
    is_consistent = implementation in (*GENERAL, "native")  # weights of its own products
    H = 24 if dtype != "float32" else 8 if is_consistent else 16
    q, k, v = (x.astype(dtype) for x in drawn(T=20, S=24, H=H))
    if dtype == "float32" and not is_consistent:
        q, k = jnp.round(4 * q) / 4, jnp.round(4 * k) / 4
    options, array = HUGE[what]

    run = lambda q, k, v, array: call(implementation, q, k, v, mask=mask, **options(array))  # noqa: E731

    @users_jit
    def everything(*operands: Any) -> Any:
        """Results, the gradients of the output's sum, and tangents along all and along values."""
        q, k, v, _ = operands
        (out, lse), pull = jax.vjp(run, *operands)
        every = (q, k, jnp.ones_like(v), jnp.ones_like(array))
        of_values = jax.jvp(lambda v: run(q, k, v, array)[0], (v,), (jnp.ones_like(v),))[1]
        gradients = pull((jnp.ones_like(out), jnp.zeros_like(lse)))
        return (out, lse), gradients, jax.jvp(run, operands, every)[1], of_values

    double = lambda *x: [np.asarray(y, np.float64) for y in jax.tree.leaves(x)]  # noqa: E731
    tolerance = 1e-5 if q.dtype == jnp.float32 else 1e-2
    logits = jattn.attention_scores(q, k, mask=mask, **options(array))
    results, gradients, tangents, of_values = everything(q, k, v, array)
    out, lse = double(results)
    logits, values = double(logits, jnp.moveaxis(v, 1, 2))
    assert np.max(np.abs(logits[np.isfinite(logits)])) > 1e9
    first, second = (np.sort(logits)[..., -n] for n in (1, 2))
    clear = np.swapaxes(~(first - second < 1e-2 * np.abs(first)), 1, 2)  # not decided by rounding
    assert np.mean(clear) > 0.2
    largest = np.take_along_axis(values, np.argmax(logits, axis=-1)[..., None], axis=2)
    np.testing.assert_allclose(out[clear], np.swapaxes(largest, 1, 2)[clear], rtol=tolerance)
    np.testing.assert_allclose(lse, first, rtol=1e-5)
    d = double(gradients)
    assert [bool(np.all(np.isfinite(x))) for x in d] == [True] * 4
    np.testing.assert_allclose(d[2].sum(axis=1), q.shape[1], rtol=tolerance)
    assert all(np.all(np.isfinite(x)) for x in double(tangents))
    np.testing.assert_allclose(double(of_values)[0], 1, rtol=tolerance)


@pytest.mark.one_in(2)
@every_kernel
@pytest.mark.parametrize("mask", [None, masks.Causal()], ids=["full", "causal"])
def test_means_of_large_values_are_finite_and_small_values_keep_their_digits(implementation, mask):
    q, k, v = drawn(T=40)
    run = quick_jit(lambda v: call(implementation, q, k, v, mask=mask)[0])
    large, small = np.float32(3e38), np.float32(2.0**-100)
    np.testing.assert_allclose(np.float64(run(v * 0 + large)), large, rtol=1e-5)
    np.testing.assert_array_equal(run(v * small), run(v) * small)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int8])
@pytest.mark.parametrize("readers", [registry.READERS, registry.READERS[1:]], ids=["all", "xla"])
def test_a_mean_of_a_cache_that_is_finite_is_finite(readers, dtype, monkeypatch):
    monkeypatch.setattr(registry, "READERS", readers)
    q, k, v = drawn(T=1, S=40 + len(readers))  # a program for each case
    cache = DenseCache.of(k, v * 0 + jnp.float32(3e38), dtype=dtype)
    np.testing.assert_allclose(jattn.attention(q, cache), 3e38, rtol=1e-5)


def gradients_of(implementation: str, mask: Any, q: Any, k: Any, v: Any) -> Any:
    """Returns out, lse and the gradients of q, k and v, for cotangents of ones on out."""
    run = functools.partial(call, implementation, mask=mask)
    d_out = jnp.ones((*q.shape[:-1], v.shape[-1]), q.dtype)
    d_lse = jnp.zeros((q.shape[0], q.shape[2], q.shape[1]), jnp.float32)
    everything = quick_jit(lambda *qkv: out_and_gradients(run, qkv, d_out, d_lse))
    return [np.asarray(x) for x in everything(q, k, v)]


KEY = 7  # the key that is changed
# Values of a key, and whether its score is NaN or +inf, which makes queries that attend to it NaN.
# q is positive: a key of infinities has an infinite score, and one of -inf has no weight.
KEYS: dict[str, tuple[float, bool]] = {
    "overflow": (3e38, True),
    "underflow": (-3e38, False),
    "inf": (math.inf, True),
    "minus inf": (-math.inf, False),
    "nan": (math.nan, True),
}


@pytest.mark.one_in(8)
@pytest.mark.parametrize("mask", [None, masks.Causal()])
@pytest.mark.parametrize("what", KEYS)
@pytest.mark.parametrize("implementation", KERNELS)
def test_one_meaning_of_scores_beyond_all_numbers(implementation, what, mask):
    """+inf and NaN make the outputs of queries that attend to them NaN, −inf masks; other queries,
    and keys that none of these queries attends to, are unaffected."""
    q, k, v = drawn(T=20)
    q, (poison, broken) = jnp.abs(q) + 2, KEYS[what]
    out, lse, d_q, d_k, d_v = gradients_of(implementation, mask, q, k.at[:, KEY].set(poison), v)
    without = jnp.arange(40)[None, None, None, :] != KEY
    rest = masks.Dense(without) if mask is None else mask & masks.Dense(without)
    want = gradients_of("reference", rest, q, k, v)
    touched = np.ones(20, bool) if mask is None else np.arange(20) >= KEY
    touched = touched & broken
    seen = np.zeros(40, bool)  # by rows that are NaN
    if broken:
        seen = np.ones(40, bool) if mask is None else np.arange(40) < 20
    for got, right in ((out, want[0]), (np.swapaxes(lse, 1, 2), np.swapaxes(want[1], 1, 2))):
        assert np.all(np.isnan(got[:, touched]))
        np.testing.assert_allclose(got[:, ~touched], right[:, ~touched], rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(d_q[:, ~touched], want[2][:, ~touched], rtol=2e-4, atol=2e-5)
    for got, right in ((d_k, want[3]), (d_v, want[4])):
        np.testing.assert_allclose(got[:, ~seen], right[:, ~seen], rtol=2e-4, atol=2e-5)


@pytest.mark.one_in(7)
@every_kernel
@pytest.mark.parametrize("poison", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize(("T", "S"), [(12, 12), (20, 40)], ids=["one-tile", "tiles"])
def test_values_that_are_not_finite_make_outputs_nan(implementation, poison, T, S):
    q, k, v = drawn(T=T, S=S)
    v = v.at[:, KEY, :, 1].set(poison)
    for mask in (None, masks.Causal()):
        out, lse, d_q, *_ = gradients_of(implementation, mask, q, k, v)
        touched = np.arange(T) >= (0 if mask is None else KEY)
        for got in (out, np.swapaxes(lse, 1, 2)):
            assert np.all(np.isnan(got[:, touched]))
            assert np.all(np.isfinite(got[:, ~touched]))
        assert np.all(np.isfinite(d_q[:, ~touched]))


# Score functions that add up to ±1e4, and their parameters.
BIASES: dict[str, tuple[cases.ScoreRule, np.ndarray]] = {
    "slopes": (cases.alibi(()), np.array([-1.0, -0.5])),
    "table": (
        cases.relative_bias(32, 2, bidirectional=True, max_distance=128),
        np.full((32, 2), 88.6),
    ),
    "bias": (cases.bias(()), 1e4 * np.cos(np.arange(200.0))[None, None, None, :]),
}


@pytest.mark.one_in(8)
@pytest.mark.parametrize("mask", [None, masks.Window(left=3, right=150)])
@pytest.mark.parametrize("what", BIASES)
@pytest.mark.parametrize("implementation", KERNELS)
def test_gradients_of_large_biases(implementation, what, mask):
    """T is no multiple of the vector width: exp(bias) overflows in lanes without a query."""
    rule, numbers = BIASES[what]
    if implementation == "native" and what == "bias":
        pytest.skip("it has no Bias")
    q, k, v = drawn(T=5, S=200)
    parameters = {what: jnp.asarray(numbers, jnp.float32)}
    (cotangent,) = normal_arrays((1, 5, 2, 4), dtype="float32", seed=1)

    @quick_jit
    def d_parameters(parameters: Any) -> Any:
        run = functools.partial(call, implementation, q, k, v, mask=mask)
        return jax.grad(lambda p: jnp.vdot(cotangent, run(score=rule.build(p))[0]))(parameters)

    problem = oracle.OracleProblem(
        *(np.asarray(x, np.float64) for x in (q, k, v)),
        parameters={what: np.asarray(parameters[what], np.float64)},
        allowed=lambda pair: mask is None or -3 <= pair.kv - pair.q <= 150,
        modifier=rule.modifier,
    )
    d_out = np.asarray(cotangent, np.float64)
    want = oracle.gradients(problem, d_out, np.zeros((1, 2, 5))).parameters[what]
    got = np.asarray(d_parameters(parameters)[what], np.float64)
    assert np.all(np.isfinite(got))
    np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-4 * np.abs(want).max() + 1e-6)


@pytest.mark.one_in(5, slow=True)
@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize("implementation", KERNELS)
def test_a_scale_that_is_an_array_rounds_nothing(implementation, dtype, jitted):
    """It multiplies scores in the dtype of sums, and its gradient is that of one number."""
    if dtype == "float64" and implementation == "tpu":
        pytest.skip("it has no float64")
    q, k, v = (3 * x.astype(dtype) for x in drawn(T=20))
    number = 0.4375  # the same in all dtypes
    wrap = quick_jit if jitted else lambda f: f
    scaled = wrap(lambda s: call(implementation, q, k, v, mask=masks.Causal(), scale=s))
    fixed = wrap(lambda: call(implementation, q, k, v, mask=masks.Causal(), scale=number))()
    limit = 1e-13 if dtype == "float64" else 1e-5
    for kind in ("float32", "bfloat16", "float64"):
        out, lse = scaled(jnp.asarray(number, kind))
        np.testing.assert_allclose(lse, fixed[1], rtol=limit, atol=limit)
        assert out.dtype == q.dtype
    total = lambda s: jnp.sum(call(implementation, q, k, v, scale=s)[1])  # noqa: E731
    slope = wrap(jax.grad(total))(jnp.float32(number))
    s64 = np.einsum("btnh,bsnh->bnts", *(np.asarray(x, np.float64) for x in (q, k)))
    p = np.exp(number * s64 - (number * s64).max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    assert slope.dtype == jnp.float32
    np.testing.assert_allclose(slope, (p * s64).sum(), rtol=1e-5)


@pytest.mark.one_in(2)
@every_kernel
def test_caps_outside_the_range_of_the_scores_dtype(implementation):
    """A cap near 0 makes all scores equal, a cap that overflows leaves them unchanged."""
    q, k, v = drawn(T=20)
    q = q.at[:, 0].set(0)  # scores of exactly 0 as well
    options: dict[str, Any] = {"mask": masks.Causal(), "implementation": implementation}

    @quick_jit
    def pairs(q: Any) -> Any:
        run = lambda q, score=None: jattn.attention(q, k, v, score=score, **options)  # noqa: E731
        caps = (1e-50, q * 0), (1e50, q)
        return [(run(q, scores.SoftCap(cap)), run(same)) for cap, same in caps]

    for capped, want in pairs(q):
        np.testing.assert_allclose(capped, want, rtol=1e-6, atol=1e-6)
