"""Talking-heads attention against loops, with all gradients, and its memory."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn import masks, scores, talking_heads
from tests.arrays import temporaries
from tests.conftest import (
    assert_trees_close,
    attention_arrays,
    expect,
    out_and_gradients,
    quick_jit,
)
from tests.test_mechanisms import assert_values_and_gradients


B, T, S, N, K, H, V = 2, 5, 7, 6, 3, 4, 3
SCALE = np.full(N, 1 / math.sqrt(H))
SIZES = (B, T, S, N, K, H, V)
MIXTURES = np.random.default_rng(7).normal(size=(2, N, N))
BY_HEAD = np.random.default_rng(8).random((B, N, T, S)) < 0.6
SLOPES = np.linspace(0.1, 0.9, N)


@pytest.fixture(autouse=True)
def _several_blocks(monkeypatch):
    monkeypatch.setattr(talking_heads.tile_schedule, "even", lambda size, _: min(size, 2))


def oracle(
    query: Any,
    key: Any,
    value: Any,
    mix_logits: Any,
    mix_weights: Any,
    allowed: Any = lambda b, h, i, j: True,
    bias: Any = lambda h, i, j: 0.0,
    scale: Any = SCALE,
) -> Any:
    """Talking heads in loops; complex numbers give derivatives."""
    key, value = (np.repeat(x, N // K, axis=2) for x in (key, value))
    kind = np.result_type(query, key, value, mix_logits, mix_weights)
    out = np.zeros((*query.shape[:3], value.shape[-1]), kind)
    for b, i in np.ndindex(*query.shape[:2]):
        weights = np.zeros((N, S), kind)
        for m in range(N):
            keys = [j for j in range(S) if allowed(b, m, i, j)]
            logits = {j: np.sum(query[b, i] * key[b, j], -1) * scale for j in keys}
            mixed = {j: np.sum(logits[j] * mix_logits[:, m]) + bias(m, i, j) for j in keys}
            top = max((x.real for x in mixed.values()), default=0.0)
            total = sum(np.exp(x - top) for x in mixed.values())
            for j, x in mixed.items():
                weights[m, j] = np.exp(x - top) / total
        for n, j, m in np.ndindex(N, S, N):
            out[b, i, n] += weights[m, j] * mix_weights[m, n] * value[b, j, n]
    return out


# The options of a call, and those of the oracle.
RULES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "none": ({}, {}),
    "causal": (
        {"mask": masks.Causal(), "q_positions": np.arange(T) - 1},
        {"allowed": lambda b, h, i, j: j <= i - 1},
    ),
    "function": (
        {"mask": lambda b, h, q, kv: (q + kv + b * (h + 1)) % 3 > 0, "scale": jnp.asarray(SLOPES)},
        {"allowed": lambda b, h, i, j: (i + j + b * (h + 1)) % 3 > 0, "scale": SLOPES},
    ),
    "by head": (
        {"mask": jnp.asarray(BY_HEAD), "score": scores.Alibi(jnp.asarray(SLOPES))},
        {
            "allowed": lambda b, h, i, j: BY_HEAD[b, h, i, j],
            "bias": lambda h, i, j: -SLOPES[h] * abs(i - j),
        },
    ),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("rule", RULES)
def test_values_and_gradients(rule):
    options, definition = RULES[rule]
    names = ("query", "key", "value", "mix_logits", "mix_weights")
    arrays = map(np.asarray, (*attention_arrays(SIZES)[:3], *MIXTURES))
    attend = functools.partial(jattn.talking_heads_attention, **options)
    truth = functools.partial(oracle, **definition)
    assert_values_and_gradients(attend, truth, dict(zip(names, arrays, strict=True)))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("scale", [np.linspace(0.1, 0.8, N), 0.3])
def test_without_mixtures_it_is_attention(scale):
    q, k, v, d_out = attention_arrays(SIZES)
    score = scores.Alibi(jnp.asarray(SLOPES)) >> scores.SoftCap(2.0)
    rules: Any = {"mask": masks.Causal(), "score": score}
    rules["scale"] = jnp.asarray(scale) if isinstance(scale, np.ndarray) else scale
    eye = {"mix_logits": jnp.eye(N), "mix_weights": jnp.eye(N)}
    mixed = functools.partial(jattn.talking_heads_attention, **eye, **rules)
    plain = functools.partial(jattn.attention, implementation="reference", **rules)
    both = quick_jit(lambda *x: [out_and_gradients(f, x[:3], x[3]) for f in (mixed, plain)])
    assert_trees_close(*both(q, k, v, d_out), rtol=0, atol=1e-13)


def test_what_is_masked_does_not_exist():
    q, k, v, d_out = attention_arrays(SIZES)
    mixtures = [jnp.asarray(x) for x in MIXTURES]
    mask = masks.Lengths(kv=jnp.array([4, 0]))
    beyond = ~mask.dense(T, S)[:, 0, 0, :, None, None]
    attend = functools.partial(jattn.talking_heads_attention, mask=mask)
    both = quick_jit(lambda x, d: out_and_gradients(attend, x, d))
    want = both((q, k, v, *mixtures), d_out)
    assert not want[0][1].any() and want[0][0].all()
    for poison in (jnp.nan, jnp.inf, 1e300):
        poisoned: Any = (q, *(jnp.where(beyond, poison, x) for x in (k, v)), *mixtures)
        for x, y in zip(both(poisoned, d_out), want, strict=True):
            np.testing.assert_array_equal(x, y)
    nan = jattn.talking_heads_attention(q, k, v.at[0, 0, 0, 0].set(jnp.nan), *mixtures)
    assert jnp.isnan(nan[0]).all() and jnp.isfinite(nan[1]).all()


@pytest.mark.parametrize("sizes", [(0, T, S, N), (B, 0, S, N), (B, T, 0, N), (B, T, S, 0)])
def test_an_axis_may_be_empty(sizes):
    B, T, S, N = sizes
    mask = jnp.ones((B, N, T, S), bool)
    q, k, v, d_out = attention_arrays((B, T, S, N, K, H, V))
    attend = functools.partial(jattn.talking_heads_attention, mask=mask)
    results = out_and_gradients(attend, (q, k, v, *jnp.ones((2, N, N))), d_out)
    assert results[0].shape == d_out.shape
    assert not any(x.any() for x in results)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_dtypes_and_batch_axes(dtype):
    arrays: Any = attention_arrays(SIZES, dtype)[:3]
    mixtures = [jnp.asarray(x, dtype) for x in MIXTURES]
    out = jattn.talking_heads_attention(*arrays, *mixtures)
    assert out.dtype == dtype
    want = oracle(*(np.asarray(x, np.float64) for x in (*arrays, *mixtures)))
    bound = 4 * float(jnp.finfo(dtype).eps) * np.abs(want).max()
    np.testing.assert_allclose(np.asarray(out, np.float64), want, rtol=0, atol=bound)
    attend = quick_jit(lambda *x: jattn.talking_heads_attention(*x, *mixtures))
    single, paired = attend(*(x[1] for x in arrays)), attend(*(x[None] for x in arrays))
    results = single, paired[0], jax.vmap(attend)(*arrays)
    assert_trees_close(results, (out[1], out, out), rtol=0, atol=bound)


def test_second_derivatives():
    q, k, v, d_out = attention_arrays(SIZES)
    left, right = map(jnp.asarray, MIXTURES)

    loss = lambda mix: (jattn.talking_heads_attention(q, k, v, mix, right) * d_out).sum()  # noqa: E731
    gradient, step = jax.grad(loss), 1e-5 * jnp.asarray(MIXTURES[1])
    _, forward = quick_jit(lambda x: jax.jvp(gradient, (x,), (step,)))(left)
    want = (gradient(left + step) - gradient(left - step)) / 2
    np.testing.assert_allclose(forward, want, rtol=1e-6, atol=1e-13)


def test_memory_is_linear(monkeypatch):
    monkeypatch.undo()
    gradient = jax.grad(lambda *x: jattn.talking_heads_attention(*x).sum(), (0, 1))
    few, many = (
        temporaries(gradient, *[(1, tokens, 2, 8)] * 3, (2, 2), (2, 2)) for tokens in (8192, 16_384)
    )
    assert many < 3 * few < 8192**2 * 4


def test_errors_name_what_was_expected(unchecked):
    q, k, v, _ = attention_arrays(SIZES)
    wrong, eye = functools.partial(jattn.talking_heads_attention, q, k, v), jnp.eye(6)
    says = "mix_logits: expected [N, N] = [6, 6], got [6, 5]"
    expect(ValueError, says, wrong, jnp.ones((6, 5)), eye)
    says = "mix_weights: expected a floating-point array [N, N]"
    expect(TypeError, says, wrong, eye, np.eye(6, dtype=int))
    expect(TypeError, "dropout_rate", wrong, eye, eye, dropout_rate=0.5)
