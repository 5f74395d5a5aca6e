"""`sink`: a learned logit for each head joins the softmax without a value."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jattn
from jattn import masks, parallel
from jattn.cache import Cache, DenseCache, PagedCache, RollingCache
from tests.conftest import assert_trees_close, normal_arrays, quick_jit
from tests.devices import mesh_of


B, T, N, K, H = 2, 6, 4, 2, 8
Q, KEY, VALUE = normal_arrays((B, T, N, H), (B, T, K, H), (B, T, K, 3))
SINK: Any = jnp.asarray([0.5, -1.0, 3.0, -np.inf])
MASK = masks.Causal() & masks.Lengths(kv=jnp.array([0, T]))  # the first row sees nothing


def formula(sink: Any) -> tuple[Any, Any, Any]:
    """`(out, lse, weights)` of all heads, by a column of its own for the sink."""
    k, v = (jnp.repeat(x, N // K, axis=2) for x in (KEY, VALUE))
    scores = jnp.einsum("btnh,bsnh->bnts", Q, k) / np.sqrt(H)
    allowed = np.tril(np.ones((T, T), bool)) & np.array([False, True])[:, None, None, None]
    scores = jnp.where(allowed, scores, -jnp.inf)
    column = jnp.broadcast_to(jnp.reshape(sink, (-1, 1, 1)), (B, N, T, 1))
    lse = jax.nn.logsumexp(jnp.concatenate([scores, column], -1), axis=-1)
    weights = jnp.where(allowed, jnp.exp(scores - jnp.where(lse == -jnp.inf, 0, lse)[..., None]), 0)
    return jnp.einsum("bnts,bsnv->btnv", weights, v), lse, weights


@pytest.mark.one_in(4)
@pytest.mark.parametrize("implementation", [None, "reference", "blockwise", "native"])
@pytest.mark.parametrize("sink", [SINK, np.asarray(SINK), jnp.float32(0.3), 0.3, -np.inf])
def test_a_sink_is_a_column_without_a_value(implementation, sink):
    call: Any = {"mask": MASK, "sink": sink, "implementation": implementation}
    want = formula(jnp.asarray(sink, jnp.float64))
    out, lse = jattn.attention(Q, KEY, VALUE, **call, return_lse=True)
    weights = jattn.attention_weights(Q, KEY, mask=MASK, sink=sink)
    assert_trees_close((out, lse, weights), want, atol=1e-6)
    np.testing.assert_allclose(jattn.attention(Q, KEY, VALUE, **call), out, atol=1e-14)
    del call["sink"]
    plain = jattn.attention(Q, KEY, VALUE, **call, return_lse=True)
    assert_trees_close((out, lse), jattn.with_sink(*plain, sink), rtol=1e-14, atol=1e-14)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("implementation", [None, "reference", "blockwise"])
def test_gradients_reach_the_sink(implementation):
    call: Any = functools.partial(jattn.attention, mask=masks.Causal(), return_lse=True)

    def loss(sink: Any, q: Any) -> Any:
        out, lse = call(q, KEY, VALUE, sink=sink, implementation=implementation)
        return (out**2).sum() + lse.sum()

    def want(sink: Any, q: Any) -> Any:
        out, lse = call(q, KEY, VALUE, implementation="reference")
        total = jnp.logaddexp(lse, sink[None, :, None])
        share = jnp.swapaxes(jnp.exp(lse - total), 1, 2)[..., None]
        return ((out * share) ** 2).sum() + total.sum()

    @quick_jit
    def slopes(sink: Any) -> Any:
        weights = lambda x: jattn.attention_weights(Q, KEY, mask=MASK, sink=x).sum()  # noqa: E731
        by_loss = jax.grad(loss, (0, 1))(sink, Q), jax.grad(lambda x: loss(x, Q))(sink[0])
        by_want = jax.grad(want, (0, 1))(sink, Q), jax.grad(want)(jnp.full(N, sink[0]), Q).sum()
        want_weights = jax.grad(lambda x: formula(x)[2].sum())(sink)
        return [*by_loss, jax.grad(weights)(sink)], [*by_want, want_weights]

    assert_trees_close(*slopes(jnp.asarray([0.5, -1.0, 3.0, 0.0])), atol=1e-12)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("how", ["reference", "blockwise", "native", "cache", "ring", "all_to_all"])
def test_at_large_logits(how):
    """Shares of the sink are exact where float32 has no digits left for the sum."""
    q = jnp.full((1, 4, 2, 4), 2.0**13, jnp.float32)
    keys = jnp.asarray(np.random.default_rng(0).integers(0, 2, (1, 4, 2, 4)), jnp.float32)
    keys = keys.at[:, :3].set(1.0)  # float32 has no digits left for log 3
    (value,) = normal_arrays((1, 4, 2, 3), dtype="float32")
    call: Any = {"scale": 2.0**12, "return_lse": True}  # the greatest logit is 2 ** 27
    if how in ("ring", "all_to_all"):
        mesh: Any = {"mesh": mesh_of(t=2), "axis_name": "t", "scheme": how}
        function: Any = functools.partial(parallel.attention, **mesh, **call)
    elif how == "cache":
        cache = DenseCache.create(1, 4, 2, 4, 3)
        cached: Any = functools.partial(jattn.cached_attention, cache=cache, **call)
        function = lambda *qkv, sink: cached(*qkv, sink=sink)[0]  # noqa: E731
    else:
        function = functools.partial(jattn.attention, implementation=how, **call)

    def loss(sink: Any) -> Any:
        out, lse = function(q, keys, value, sink=sink)
        return jnp.sum(out), lse

    def want(sink: Any) -> Any:
        scores = jnp.einsum("btnh,bsnh->bnts", *(np.float64(x) for x in (q, keys))) * 2.0**12
        column = jnp.broadcast_to(jnp.reshape(sink, (2, 1, 1)), (1, 2, 4, 1))
        weights = jax.nn.softmax(jnp.concatenate([scores, column], -1), -1)[..., :-1]
        return jnp.sum(jnp.einsum("bnts,bsnv->btnv", weights, np.float64(value))), weights

    sink = jnp.asarray([2.0**27, 2.0**27 - 16], jnp.float32)
    (total, lse), gradient = jax.value_and_grad(loss, has_aux=True)(sink)
    (right, weights), right_gradient = jax.value_and_grad(want, has_aux=True)(np.float64(sink))
    np.testing.assert_allclose(total, right, rtol=1e-5)
    np.testing.assert_allclose(gradient, right_gradient, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(lse, np.float32(2**27))
    if how == "reference":
        got = jattn.attention_weights(q, keys, sink=sink, scale=2.0**12)
        np.testing.assert_allclose(got, weights, rtol=1e-6)


def test_a_number_keeps_its_digits_in_float64():
    out, lse = jattn.attention(Q, KEY, VALUE, return_lse=True)
    wanted = jattn.with_sink(out, lse, np.full(N, 0.1))
    results = jattn.attention(Q, KEY, VALUE, sink=0.1, return_lse=True)
    assert_trees_close(jattn.with_sink(out, lse, 0.1), wanted, rtol=1e-14)
    assert_trees_close(results, wanted, rtol=1e-13)


def test_dropout_acts_on_the_weights_beside_the_sink():
    dropout: Any = {"dropout_rate": 0.4, "dropout_key": jax.random.key(3)}
    weights = jattn.attention_weights(Q, KEY, mask=MASK, sink=SINK, **dropout)
    out = jattn.attention(Q, KEY, VALUE, mask=MASK, sink=SINK, **dropout)
    v = jnp.repeat(VALUE, N // K, axis=2)
    np.testing.assert_allclose(out, jnp.einsum("bnts,bsnv->btnv", weights, v), atol=1e-6)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "cache",
    [
        DenseCache.create(B, 9, K, H, 3, jnp.float64),
        PagedCache.create(B, 9, K, H, 3, jnp.float64, page_size=4),
        RollingCache.create(B, 8, K, H, 3, jnp.float64, chunk=4),
    ],
    ids=lambda x: type(x).__name__,
)
def test_through_caches(cache: Cache):
    rules: Any = {"mask": masks.Causal(), "sink": SINK}
    want = jattn.attention(Q, KEY, VALUE, **rules, return_lse=True)
    results, new_cache = jattn.cached_attention(Q, KEY, VALUE, cache, **rules, return_lse=True)
    assert_trees_close(results, want, atol=1e-12)
    last = jattn.attention(Q[:, -1:], new_cache, **rules)
    np.testing.assert_allclose(last, want[0][:, -1:], atol=1e-12)
    cached = jattn.attention_weights(Q[:, -1:], new_cache, **rules)
    whole = jattn.attention_weights(Q, KEY, **rules)
    np.testing.assert_allclose(cached.sum(-1), whole[:, :, -1:].sum(-1), atol=1e-6)


@pytest.mark.slow
def test_over_several_devices():
    mesh = mesh_of(t=2, n=2)
    axes: Any = {"axis_name": "t", "head_axis": "n", "mask": masks.Causal()}
    options: Any = {"mesh": mesh, "sink": SINK, **axes}
    want = jattn.attention(Q, KEY, VALUE, mask=masks.Causal(), sink=SINK, return_lse=True)
    attend = quick_jit(functools.partial(parallel.attention, return_lse=True, **options))
    assert_trees_close(attend(Q, KEY, VALUE), want, atol=1e-12)
    shard = lambda q, k, v, sink: parallel.attention_shard(q, k, v, sink=sink, **axes)  # noqa: E731
    tokens = P(None, "t", "n")
    specs: Any = {"in_specs": (tokens,) * 3 + (P("n"),), "out_specs": tokens}
    run = quick_jit(jax.shard_map(shard, mesh=mesh, **specs))
    np.testing.assert_allclose(run(Q, KEY, VALUE, SINK), want[0], atol=1e-12)
    cache = DenseCache.create(B, 8, K, H, 3, jnp.float64)
    result, _ = parallel.cached_attention(Q, KEY, VALUE, cache, **options)
    np.testing.assert_allclose(result, want[0], atol=1e-12)


def test_other_functions_take_it():
    assert jattn.explain(Q, KEY, VALUE, sink=SINK) == jattn.explain(Q, KEY, VALUE, return_lse=True)
    x, w = Q[:, :, 0], jnp.eye(H)
    got = jattn.multiplicative_attention(x, x, x, w, sink=0.5)
    heads = x[:, :, None]
    want = jattn.attention(heads, heads, heads, scale=1.0, sink=jnp.asarray([0.5]))
    np.testing.assert_allclose(got, want[:, :, 0], atol=1e-14)
    attend = lambda q, sink: jattn.attention(q, q, q, sink=sink)  # noqa: E731
    each = jnp.stack([SINK, SINK + 1])
    alone = [attend(Q[row], each[row]) for row in range(B)]
    np.testing.assert_allclose(jax.vmap(attend)(Q, each), alone, atol=1e-12)


def test_a_float64_that_becomes_infinite_is_no_sink():
    with jax.enable_x64(False), pytest.raises(ValueError, match="expected finite logits"):
        jattn.attention(*[jnp.ones((3, 4, 5))] * 3, sink=np.float64(2.0**128 - 2.0**103))


@pytest.mark.parametrize(
    ("sink", "kind", "message"),
    [
        (jnp.ones(N + 1), ValueError, r"sink: expected \[N\] = \[4\] or a scalar, got shape \[5\]"),
        (jnp.ones((1, N)), ValueError, r"got shape \[1, 4\]"),
        (jnp.arange(N), TypeError, "sink: expected a floating-point array"),
        ("large", TypeError, "sink"),
        (True, TypeError, "sink"),
        ([0.0] * N, TypeError, "sink"),
        (np.nan, ValueError, "sink: expected a finite number, got nan"),
        (1e39, ValueError, "sink: expected finite logits or -inf, got 1e"),  # infinite in float32
        (jnp.asarray([0.0, np.inf, 0, 0]), ValueError, "expected finite logits or -inf, got Array"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_what_is_no_sink_is_refused(sink, kind, message):
    for call in (
        lambda: jattn.attention(Q, KEY, VALUE, sink=sink),
        lambda: jattn.attention_weights(Q, KEY, sink=sink),
        lambda: jattn.explain(Q, KEY, VALUE, sink=sink),
        lambda: jattn.cached_attention(Q, KEY, VALUE, DenseCache.create(B, 9, K, H, 3), sink=sink),
    ):
        with pytest.raises(kind, match=message):
            call()
