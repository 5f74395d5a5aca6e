"""Statistics of weights, compared with their formulas on dense weights in NumPy."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn import masks, normalizers, scores, tuning
from jattn.kernels import registry
from tests.arrays import temporaries
from tests.conftest import assert_trees_close, quick_jit, users_jit


B, T, S, N, K, H = 2, 37, 53, 4, 2, 6
RNG = np.random.default_rng(0)
QUERY = RNG.normal(size=(B, T, N, H)) * 1.5
KEY = RNG.normal(size=(B, S, K, H))
KEYS = RNG.random((B, S)) < 0.4
SLOPES = np.array([0.5, 0.1, 0.0, 0.02])
IDS = np.sort(RNG.integers(0, 4, (B, S)))
TOKENS = (np.arange(S) >= np.array([[0], [20]])) * 1
THRESHOLD = 0.07
DISTANCE = np.abs(np.arange(T)[:, None] - np.arange(S)[None, :])


def dense_weights(query: Any, key: Any, allowed: Any, slopes: Any) -> np.ndarray:
    """`[B, N, T, S]` by the formula, in float64."""
    logits = np.einsum("btnh,bsnh->bnts", query, np.repeat(key, N // K, axis=2)) / np.sqrt(H)
    logits = np.where(allowed, logits - slopes[:, None, None] * DISTANCE, -np.inf)
    top = logits.max(axis=-1, keepdims=True)
    exponential = np.exp(logits - np.where(top == -np.inf, 0, top))
    total = exponential.sum(axis=-1, keepdims=True)
    return exponential / np.where(total == 0, 1, total)


def by_definition(
    weights: np.ndarray, allowed: np.ndarray, on: np.ndarray, threshold: float
) -> dict[str, np.ndarray]:
    """The statistics of weights `[B, N, T, S]`, of which some have the sum 0 or another than 1."""
    total = weights.sum(axis=-1, keepdims=True)
    shares = np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)
    logs = np.log(shares, out=np.zeros_like(weights), where=shares > 0)
    T, S = weights.shape[2:]
    distances = abs(np.arange(T)[:, None] - np.arange(S))
    allowed = np.broadcast_to(allowed, weights.shape)
    first = np.where(allowed, weights, -np.inf).argmax(axis=-1)
    return {
        "entropy": -(shares * logs).sum(axis=-1),
        "greatest": weights.max(axis=-1),
        "place": np.where(allowed.any(axis=-1), first, -1),
        "distance": (shares * distances).sum(axis=-1),
        "on_keys": (weights * on).sum(axis=-1),
        "above": np.where(weights > threshold, weights, 0).sum(axis=-1),
        "received": weights.sum(axis=-2),
    }


CAUSAL = np.arange(S)[None, :] <= np.arange(T)[:, None]
NEAR = np.abs(np.arange(T)[:, None] - 2 - np.arange(S)[None, :]) <= 1
NEAR[11:20] = False
MASKS: dict[str, tuple[Any, np.ndarray]] = {
    "full": (None, np.ones((1, 1, T, S), bool)),
    "causal": (masks.Causal(), CAUSAL[None, None]),
    "function": (
        lambda b, h, q, kv: (q * 7 + kv * 3 + h) % 5 != 0,
        (np.add.outer(np.arange(T) * 7, np.arange(S) * 3) + np.arange(N)[:, None, None])[None] % 5
        != 0,
    ),
    "padding": (masks.Padding(TOKENS) & masks.Causal(), (TOKENS == 1)[:, None, None] & CAUSAL),
    "dead rows": (masks.Dense(NEAR[None, None]), NEAR[None, None]),
}


def query_and_key(dtype: Any = jnp.float64) -> tuple[jax.Array, jax.Array]:
    return jnp.asarray(QUERY, dtype), jnp.asarray(KEY, dtype)


@contextlib.contextmanager
def computed(how: str) -> Iterator[None]:
    """A context for the kernel in C++ in tiles of 16 queries, or pure JAX in tiles or one."""
    size = 16 if how == "tiles" else 1000
    row = tuning.TABLE["cpu"]._replace(max_untiled=0, small=size, large=size, largest=size)
    options: Any = {"row": row, "max_width": 2 * size}
    if how == "native":
        options = {"cpu_tiles": "16, 8, 16", "generated_pairs": 1}
    with pytest.MonkeyPatch.context() as patch, tuning.using(**options):
        patch.setattr(registry, "SUMS", registry.SUMS[how != "native" :])
        yield


HOW = ["native", "tiles", "one tile"]


@pytest.mark.one_in(5)
@pytest.mark.parametrize("how", HOW[:2])
@pytest.mark.parametrize("name", MASKS)
def test_statistics_are_the_formulas(name, how):
    mask, allowed = MASKS[name]
    on = IDS[:, None, :T, None] == IDS[:, None, None, :]
    want = by_definition(dense_weights(QUERY, KEY, allowed, SLOPES), allowed, on, THRESHOLD)
    rules: Any = {"mask": mask, "score": scores.Alibi(jnp.asarray(SLOPES))}
    keys = masks.Segments(IDS[:, :T], IDS)
    call = functools.partial(jattn.statistics, keys=keys, threshold=THRESHOLD, **rules)
    dtypes = {jnp.float64: 1e-13} | ({jnp.float32: 2e-5} if how == "native" else {})
    for dtype, tolerance in dtypes.items():
        with computed(how):
            program = quick_jit(call).lower(*query_and_key(dtype)).compile()
        assert ("jattn_statistics" in program.as_text()) == (how == "native")
        result = program(*query_and_key(dtype))
        for field, value in want.items():
            got = np.asarray(getattr(result, field))
            differs = ~(abs(got - value) <= tolerance * (1 + abs(value)))
            either = field == "above" and dtype == jnp.float32  # is right near the threshold
            assert differs.mean() <= 0.01 * either, field
        assert result.entropy.dtype == dtype and result.place.dtype == jnp.int32


MIXED = masks.Causal() | masks.Prefix(2)
COEFFICIENTS = RNG.normal(size=(4, B, N, T))


@functools.cache
def dense_derivatives() -> Any:
    def dense(query: Any, key: Any, slopes: Any) -> Any:
        w = jattn.attention_weights(query, key, mask=MIXED, score=scores.Alibi(slopes))
        logs = jnp.log(jnp.where(w > 0, w, 1))
        on = jnp.asarray(KEYS)[:, None, None, :]
        parts = (
            -(w * logs).sum(-1),
            w.max(-1),
            (w * DISTANCE[None, None].astype(w.dtype)).sum(-1),
            jnp.where(on, w, 0).sum(-1),
        )
        return sum(jnp.sum(x * y) for x, y in zip(COEFFICIENTS, parts, strict=True))

    return quick_jit(jax.grad(dense, (0, 1, 2)))(*query_and_key(), jnp.asarray(SLOPES))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("how", HOW)
def test_statistics_are_differentiated(how):
    def ours(query: Any, key: Any, slopes: Any) -> Any:
        rules: Any = {"mask": MIXED, "score": scores.Alibi(slopes)}
        result = jattn.statistics(query, key, keys=jnp.asarray(KEYS), **rules)
        parts = (result.entropy, result.greatest, result.distance, result.on_keys)
        return sum(jnp.sum(x * y) for x, y in zip(COEFFICIENTS, parts, strict=True))

    with computed(how):
        result = quick_jit(jax.grad(ours, (0, 1, 2)))(*query_and_key(), jnp.asarray(SLOPES))
    assert_trees_close(result, dense_derivatives(), atol=1e-11, rtol=1e-11)


def test_gradients_of_statistics_of_small_weights():
    """Their sums are about 1e-25, whose squares are 0 in float32."""

    def gradient(dtype: Any) -> Any:
        query, key = (jnp.asarray(x, dtype) for x in query_and_key())
        options: Any = {"normalizer": normalizers.Exp(), "score": lambda s, b, h, i, j: s - 60}
        return jax.grad(lambda q: jnp.sum(jattn.statistics(q, key, **options).entropy))(query)

    assert_trees_close(gradient(jnp.float32), gradient(jnp.float64), rtol=1e-4, atol=1e-5)


def test_second_derivatives_raise_and_what_has_no_derivative_is_constant():
    query, key = query_and_key()
    slope = jax.grad(lambda x: jnp.sum(jattn.statistics(x, key).entropy ** 2))

    def constants(query: Any) -> Any:
        result: Any = jattn.statistics(query, key, threshold=0.1)
        values, _ = jattn.top_weights(query, key, 2)
        return result.received.sum() + result.above.sum() + values.sum()

    with pytest.raises(NotImplementedError, match="first derivatives in reverse mode only"):
        jax.grad(lambda query: jnp.sum(slope(query) ** 2))(query)
    assert not np.any(quick_jit(jax.grad(constants))(query))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", MASKS)
def test_top_weights_are_the_greatest(name):
    mask, allowed = MASKS[name]
    weights = dense_weights(QUERY, KEY, allowed, SLOPES)
    with computed("tiles"):
        call = functools.partial(jattn.top_weights, n=5, mask=mask, score=scores.Alibi(SLOPES))
        values, places = quick_jit(call)(*query_and_key())
    order = np.argsort(-weights, axis=-1, kind="stable")[..., :5]
    want = np.take_along_axis(weights, order, axis=-1)
    np.testing.assert_allclose(values, want, atol=1e-13)
    np.testing.assert_array_equal(places, np.where(want > 0, order, -1))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("how", HOW[:2])
def test_the_first_of_equals_is_the_greatest(how):
    query, key = jnp.zeros((T, 1, H), jnp.float32), jnp.ones((S, 1, H), jnp.float32)
    mask = masks.Prefix(40) & ~masks.Prefix(3)
    with computed(how):
        call = functools.partial(jattn.statistics, mask=mask, keys=masks.Prefix(10))
        result: Any = quick_jit(call)(query, key)
    np.testing.assert_array_equal(result.place, np.full((1, T), 3))
    np.testing.assert_allclose(result.entropy, np.full((1, T), np.log(37)), rtol=1e-6)
    np.testing.assert_allclose(result.on_keys, np.full((1, T), 7 / 37), rtol=1e-6)
    attended = (np.arange(S) >= 3) & (np.arange(S) < 40)
    np.testing.assert_allclose(result.received, attended[None] * T / 37, rtol=1e-5)


# One score is by far the largest, or the log of the sum is below the precision.
HUGE = {
    "sharp": scores.Temperature(jnp.array([1e-12, 2e-12, 3e-12, 1e-11], jnp.float32)),
    "equal": scores.Score(lambda s, b, h, i, j: s * 0 + 1.1e12),
}


@pytest.mark.one_in(8, slow=True)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("mask", [None, masks.Causal()])
@pytest.mark.parametrize("which", HUGE)
@pytest.mark.parametrize("how", HOW[:2])
def test_weights_sum_to_one_at_logits_of_1e12(how, which, mask, dtype):
    query, key = query_and_key(dtype)
    rules: Any = {"mask": mask, "score": HUGE[which]}

    @users_jit
    def everything(query: Any) -> Any:
        def total(query: Any) -> Any:
            result = jattn.statistics(query, key, **rules)
            return jnp.sum(result.entropy), result

        top, _ = jattn.top_weights(query, key, 1, **rules)
        return *jax.grad(total, has_aux=True)(query), top

    with computed(how):
        d_query, result, top = everything(query)
    np.testing.assert_allclose(result.received.sum(axis=-1), T, rtol=1e-5)
    np.testing.assert_allclose(top[..., 0], result.greatest, rtol=1e-5)
    assert np.all(np.isfinite(np.asarray(d_query, np.float32)))
    if which == "equal":
        attended = np.minimum(np.arange(T) + 1, S) if mask is not None else np.full(T, S)
        want = np.broadcast_to(np.log(attended), result.entropy.shape)
        np.testing.assert_allclose(result.entropy, want, rtol=1e-5, atol=1e-6)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("how", HOW[:2])
def test_masked_nan_does_not_exist_and_attended_nan_is_seen(how):
    query, key = query_and_key(jnp.float32)
    key = key.at[0, S - 1].set(jnp.nan).at[1, 0].set(jnp.nan)

    def entropy(query: Any, key: Any) -> Any:
        values = jattn.statistics(query, key, mask=masks.Causal(), threshold=0.1)
        return jnp.sum(values.entropy[0]), values

    with computed(how):
        gradients, every = quick_jit(jax.grad(entropy, (0, 1), has_aux=True))(query, key)
    for values in (every.entropy, every.greatest, every.distance, every.above):
        assert np.isfinite(values[0]).all() and np.isnan(values[1]).all()
    assert np.isfinite(every.received[0]).all() and np.isnan(every.received[1, :, 0]).all()
    assert np.isfinite(gradients[0]).all() and np.isfinite(gradients[1]).all()
    assert not np.any(gradients[1][0, S - 1])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("how", HOW[:2])
def test_positions_and_wide_distances(how):
    query, key = query_and_key()
    far = np.arange(S) * 10_000_000
    places = {"kv_positions": far, "q_positions": -np.arange(T) * 50_000_000}
    with computed(how):
        result = quick_jit(functools.partial(jattn.statistics, **places))(query, key)
    weights = dense_weights(QUERY, KEY, np.ones((1, 1, T, S), bool), 0 * SLOPES)
    distance = far[None, :] + 50_000_000 * np.arange(T)[:, None]
    np.testing.assert_allclose(result.distance, (weights * distance).sum(-1), rtol=1e-12)


@pytest.mark.slow
@pytest.mark.default_tiles
def test_memory_is_linear():
    def loss(query: Any, key: Any) -> Any:
        result = jattn.statistics(query, key, mask=masks.Causal(), threshold=0.1)
        return result.entropy.sum(), (result, jattn.top_weights(query, key, 4, mask=masks.Causal()))

    gradient = jax.grad(loss, (0, 1), has_aux=True)
    few, many = (temporaries(gradient, *[(size, 2, 16)] * 2) for size in (4096, 8 * 4096))
    assert many < 10 * few
    assert many < 0.1 * 4 * 2 * (8 * 4096) ** 2


@pytest.mark.usefixtures("unchecked")
def test_mistakes_raise():
    wrong: list[tuple[Any, Any, str]] = [
        ({"keys": np.ones((B, S))}, TypeError, "keys: expected a boolean array"),
        ({"keys": np.ones((B, T), bool)}, ValueError, r"keys: expected \[\*B, S\]"),
        ({"threshold": 1.5}, ValueError, r"threshold: expected a number in \[0, 1\)"),
        ({"is_causal": True}, TypeError, "write mask=masks.Causal"),
    ]
    for changes, error, message in wrong:
        with pytest.raises(error, match=message):
            jattn.statistics(*query_and_key(), **changes)
    with pytest.raises(ValueError, match="n: expected at most S = 53, got 54"):
        jattn.top_weights(*query_and_key(), 54)


@pytest.mark.parametrize(("B", "T", "S"), [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
def test_without_rows_queries_or_keys(B, T, S):
    q, k = jnp.ones((B, T, 4, 8)), jnp.ones((B, S, 2, 8))
    segments = masks.Segments(jnp.zeros((B, T), jnp.int32), jnp.zeros((B, S), jnp.int32))
    calls: Any = ({}, {"mask": masks.Causal(), "threshold": 0.1}, {"keys": segments})
    w = jnp.ones((8, 3))

    @quick_jit
    def everything(q: Any, k: Any) -> Any:
        entropy = lambda q, k: jattn.statistics(q, k).entropy.sum()  # noqa: E731
        return (
            [jattn.statistics(q, k, **options) for options in calls],
            jax.grad(entropy, (0, 1))(q, k),
            jattn.statistics(q[:, :, :0], k),
            [jattn.top_weights(x, k, 2) for x in (q, q[:, :, :0]) if S],
            jattn.additive_attention(q[:, :, 0], k[:, :, 0], k[:, :, 0], w, w, jnp.ones(3)),
        )

    results, (d_q, d_k), no_heads, top, out = everything(q, k)
    for result in results:
        assert result.received.shape == (B, 4, S)
        rows = [x for name, x in result._asdict().items() if name != "received" and x is not None]
        assert all(x.shape == (B, 4, T) for x in rows)
        assert not result.greatest.any() and (result.place == -1).all()
    assert (d_q.shape, d_k.shape) == (q.shape, k.shape) and not d_q.any()
    assert no_heads.entropy.shape == (B, 0, T) and no_heads.received.shape == (B, 0, S)
    for (weights, places), heads in zip(top, (4, 0), strict=bool(S)):
        assert weights.shape == places.shape == (B, heads, T, 2)
    assert out.shape == (B, T, 8)
