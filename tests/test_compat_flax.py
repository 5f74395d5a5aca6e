"""`compat.flax_attention_fn` in Flax's own modules, compared with their own results."""

import functools
import inspect
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from jattn import compat, masks
from tests.conftest import expect


pytestmark = pytest.mark.usefixtures("standard_promotion")

B, T, N, D = 2, 7, 4, 12
BOTH = compat.flax_attention_fn, None
X: Any = np.random.default_rng(0).normal(size=(B, T, D)).astype(np.float32)
PADDING = np.array([[1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 1]])
MASKS = {
    "none": None,
    "causal": np.tril(np.ones((1, 1, T, T), bool)),
    "float": (PADDING[:, None, None, :] * 1.0).astype(np.float32),
    "by row": np.tril(np.ones((T, T), bool))[None, None] & (PADDING[:, None, None, :] > 0),
}


def linen_layer(attention_fn: Any, **options: Any) -> Any:
    options["attention_fn"] = attention_fn or linen.dot_product_attention
    return linen.MultiHeadDotProductAttention(N, qkv_features=D, **options)


def nnx_layer(attention_fn: Any, **options: Any) -> Any:
    options = {"attention_fn": attention_fn or nnx.dot_product_attention, "decode": False} | options
    return nnx.MultiHeadAttention(N, D, rngs=nnx.Rngs(0), **options)


@functools.cache
def variables() -> Any:
    return jax.jit(linen_layer(None).init)(jax.random.key(0), X)


def close(ours: Any, theirs: Any, tolerance: float = 2e-6) -> None:
    for got, want in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert got.dtype == want.dtype
        both = (np.asarray(x, np.float32) for x in (got, want))
        np.testing.assert_allclose(*both, atol=tolerance, rtol=tolerance)


@pytest.mark.one_in(2, slow=True)
@pytest.mark.parametrize(
    ("name", "rate"), [*((name, None) for name in MASKS), ("by row", 0.4), ("by row", 0.0)]
)
def test_linen_with_gradients_and_dropout(name, rate):
    options = {} if rate is None else {"dropout_rate": rate, "deterministic": False}
    rngs = {"dropout": jax.random.key(3)}

    def loss(fn: Any, params: Any) -> Any:
        out = linen_layer(fn, **options).apply(params, X, mask=MASKS[name], rngs=rngs)
        return jnp.sum(jnp.sin(out)), out

    derive = lambda fn: jax.jit(jax.grad(functools.partial(loss, fn), has_aux=True))(variables())  # noqa: E731
    close(*map(derive, BOTH), tolerance=3e-5)


@pytest.mark.slow
def test_dropout_of_all_keys_and_of_each_weight():
    ones = jnp.ones((40, 9, 2, 3), jnp.float32)

    @jax.jit
    def outs(query: Any) -> Any:
        call = functools.partial(compat.flax_attention_fn, key=ones, value=ones)
        call = functools.partial(call, dropout_rng=jax.random.key(0))
        out, pull = jax.vjp(lambda query: call(query, dropout_rate=0.97), query)
        each = call(query, dropout_rate=0.5, broadcast_dropout=False)
        return out, *pull(ones), each, call(query, dropout_rate=0.5, deterministic=True)

    out, d_query, each, deterministic = outs(ones)  # some queries lose all keys
    assert np.isfinite(out).all() and np.isfinite(d_query).all() and np.any(out == 0)
    assert np.all(out == out[:1, :, :1])  # the same in all rows and heads
    assert np.unique(np.asarray(each[..., 0])).size > 5
    assert abs(float(each.mean()) - 1) < 0.05
    np.testing.assert_array_equal(deterministic, ones)


def linen_weights(layer: Any) -> jax.Array:
    options: Any = {"mask": MASKS["by row"], "sow_weights": True, "mutable": ["intermediates"]}
    _, state = jax.jit(functools.partial(layer.apply, **options))(variables(), X)
    return state["intermediates"]["attention_weights"][0]


@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
def test_weights_are_sown():
    sown = []
    for fn in BOTH:
        layer = nnx_layer(fn)
        out = nnx.jit(lambda layer: layer(X, mask=MASKS["by row"], sow_weights=True))(layer)
        sown += [linen_weights(linen_layer(fn)), layer.attention_weights.get_value()[0], out]
    assert [x.shape for x in sown] == [(B, N, T, T), (B, N, T, T), (B, T, D)] * 2
    close(sown[:3], sown[3:])
    options: Any = {"dtype": jnp.bfloat16, "force_fp32_for_softmax": True}
    weights = linen_weights(linen_layer(compat.flax_attention_fn, **options))
    assert weights.dtype == jnp.float32
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-5)


def test_decoding():
    outs = []
    for fn in BOTH:
        layer, run = nnx_layer(fn, decode=True), nnx.jit(lambda layer, x: layer(x))
        layer.init_cache((B, T, D))
        outs.append(jnp.concatenate([run(layer, X[:, [i]]) for i in range(T)], axis=1))
    close(*outs)


def test_complex_numbers_as_in_linen():
    parts = np.random.default_rng(5).normal(size=(2, 3, 2, T, N, 4)).astype(np.float32)
    arrays: Any = [jnp.asarray(a + 1j * b) for a, b in zip(*parts, strict=True)]
    ours = compat.flax_attention_fn(*arrays, mask=MASKS["by row"])
    close(ours.imag, linen.dot_product_attention(*arrays, mask=MASKS["by row"]).imag)
    expect(NotImplementedError, "is_causal", compat.flax_attention_fn, *arrays, is_causal=True)


def test_rope_at_given_positions():
    """Positions `[T]` and `[*B, T]`, compared with rotating each row."""

    def rope(x: Any, positions: Any = None) -> Any:
        places = jnp.arange(x.shape[-2]) if positions is None else positions
        angle = places[:, None] * jnp.asarray([1.0, 0.3], x.dtype)
        a, b = jnp.split(x, 2, axis=-1)
        turned = a * jnp.cos(angle) - b * jnp.sin(angle), a * jnp.sin(angle) + b * jnp.cos(angle)
        return jnp.concatenate(turned, axis=-1)

    rng = np.random.default_rng(6)
    q, k, v = (jnp.asarray(rng.normal(size=(B, T, N, 4)), jnp.float32) for _ in range(3))
    places = jnp.asarray(rng.integers(0, 30, (B, T)))
    rows = jax.vmap(jax.vmap(rope, (-2, None), -2))
    rotated = compat.flax_attention_fn(rows(q, places), rows(k, places), v)
    close(compat.flax_attention_fn(q, k, v, rope=rope, input_positions=places), rotated)
    first = compat.flax_attention_fn(q[:1], k[:1], v[:1], rope=rope, input_positions=places[0])
    close(first, rotated[:1])
    says, attend = "input_positions: expected rope", compat.flax_attention_fn
    expect(ValueError, says, attend, q, k, v, input_positions=places)


@pytest.mark.parametrize("options", [{}, {"force_fp32_for_softmax": True}], ids=str)
def test_bfloat16_and_float32_softmax(options):
    layers = (linen_layer(fn, dtype=jnp.bfloat16, **options) for fn in BOTH)
    close(*(jax.jit(layer.apply)(variables(), X) for layer in layers), tolerance=0.03)
    x = jnp.ones((1, 3, 2, 4), jnp.bfloat16)
    functions = compat.flax_attention_fn, linen.dot_product_attention
    close(*(jax.jit(functools.partial(f, **options))(x, x, x) for f in functions))


def test_later_arguments_of_nnx():
    """Causal masks, bias, batch axes, grouped heads, RoPE, if this version of Flax has them."""
    rng = np.random.default_rng(1)
    q, k, v = (jnp.asarray(rng.normal(size=(2, 3, T, N, 6)), jnp.float32) for _ in range(3))
    bias = jnp.asarray(rng.normal(size=(2, 3, N, T, T)), jnp.float32)
    theirs: Any = nnx.dot_product_attention
    known = inspect.signature(theirs).parameters
    calls: list[Any] = [(theirs, (q, k, v), {"bias": bias})]
    if "is_causal" in known:
        calls += [(theirs, (q, k, v), {"is_causal": True})]
        calls += [(theirs, (q[0], k[0, :, :, :2], v[0, :, :, :2]), {"is_causal": True})]
    later: Any = nnx
    if hasattr(later, "RoPE"):
        calls += [(later.dot_product_attention_with_rope, (q, k, v), {"rope": later.RoPE()})]
    for their_function, arrays, options in calls:
        functions = compat.flax_attention_fn, their_function
        close(*(jax.jit(functools.partial(f, **options))(*arrays) for f in functions))


def test_unsupported_arguments_and_invalid_rates_raise():
    q = jnp.ones((T, N, 4), jnp.float32)
    names = ("qk_attn_weights_einsum", "attn_weights_value_einsum")
    both: Any = dict.fromkeys(names, jnp.einsum)
    attend: Any = functools.partial(compat.flax_attention_fn, q, q, q)
    expect(NotImplementedError, "products", attend, einsum_dot_general=jax.lax.dot_general)
    expect(NotImplementedError, "products", attend, **both)
    precision = jax.lax.Precision.DEFAULT
    expect(ValueError, "neither precision", attend, **both, precision=precision)
    expect(ValueError, "both or neither", attend, **{names[0]: jnp.einsum})
    expect(ValueError, "dropout_rng: needed", attend, dropout_rate=0.5)
    says = "dropout_rate: expected 0 <= rate < 1"
    for rate, broadcast in itertools.product((-0.5, 1.0, math.nan, math.inf), (True, False)):
        options = {"dropout_rng": jax.random.key(0), "broadcast_dropout": broadcast}
        expect(ValueError, says, attend, dropout_rate=rate, **options)


@pytest.mark.parametrize("attention_fn", BOTH)
def test_masks_of_jattn_in_layers_of_flax_get_advice(attention_fn):
    ids = jnp.zeros((B, T), jnp.int32)
    for mask, write in (
        (masks.Causal(), r"mask.dense\(T, S\)\[None, None\]"),
        (masks.Causal() & masks.Segments(ids), r"mask.dense\(T, S\)(?!\[)"),
    ):
        layer = linen_layer(attention_fn)
        with pytest.raises(TypeError, match=write):
            layer.init(jax.random.key(0), X, X, mask=mask)
        with pytest.raises((TypeError, AttributeError), match=write):
            nnx_layer(attention_fn)(X, mask=mask)
        dense = jnp.broadcast_to(mask.dense(T, T), (B, 1, T, T))
        init = functools.partial(layer.init, jax.random.key(0), X)
        jax.eval_shape(lambda dense, init=init: init(mask=dense), dense)
    with pytest.raises(AttributeError, match="write mask=mask"):
        linen.combine_masks(masks.Causal(), jnp.ones((1, 1, T, T), bool))
    ours: Any = masks.Causal()
    with pytest.raises(TypeError, match="write mask=mask"):
        compat.dot_product_attention(*[jnp.ones((B, T, N, D))] * 3, mask=ours)
