"""Normalizers in everything that is built on attention: statistics, layers, caches, several
devices, exported programs, pictures and errors.

The truth are weights `[T, S]` of one head that NumPy computes in float64 by definition.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import export
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jattn
from jattn import masks, nn, normalizers, parallel, scores, viz
from jattn.cache import DenseCache, PagedCache, RollingCache
from tests import row_normalizers
from tests.conftest import assert_trees_close, expect, normal_arrays, quick_jit
from tests.devices import mesh_of, place
from tests.oracle import At, OracleNormalizer
from tests.test_statistics import by_definition


B, T, S, N, K, H = 2, 5, 7, 4, 2, 8
Q, KEY, VALUE = normal_arrays((B, T, N, H), (B, S, K, H), (B, S, K, 3), seed=0, dtype=jnp.float64)
Q = 3 * Q
KEY_LENGTHS = np.array([6, 4])
BIAS = np.array([-1.0, 0.5, 0.0, 2.0])
OPTIONS: Any = {"mask": masks.Causal() & masks.Lengths(q=np.array([5, 3]), kv=KEY_LENGTHS)}
ALLOWED = np.array(
    [
        [[j <= i < rows and j < keys for j in range(S)] for i in range(T)]
        for rows, keys in zip((5, 3), KEY_LENGTHS, strict=True)
    ]
)


# A normalizer and its definition.
NORMALIZERS: dict[str, tuple[Any, OracleNormalizer]] = {
    "sigmoid": (normalizers.Sigmoid(BIAS), row_normalizers.sigmoid(lambda pair: BIAS[pair.h])),
    "relu": (normalizers.Relu(2, count_power=1), row_normalizers.relu(2, S)),
    "plus_one": (normalizers.SoftmaxPlusOne(), row_normalizers.softmax(plus_one=True)),
    "sparsemax": (normalizers.Sparsemax(), row_normalizers.sparsemax()),
    "top_2": (normalizers.TopK(2), row_normalizers.top_k(2)),
    "stick_breaking": (normalizers.StickBreaking(), row_normalizers.stick_breaking()),
}


def weights_of(name: str, q: Any = Q, k: Any = KEY) -> np.ndarray:
    """The weights `[B, N, T, S]` with `OPTIONS`."""
    q, k = np.asarray(q), np.asarray(k)
    weights = np.zeros((B, N, T, S))
    for b, h, i in np.ndindex(B, N, T):
        allowed = ALLOWED[b, i]
        if allowed.any():
            score = k[b, allowed, h * K // N] @ q[b, i, h] / np.sqrt(H)
            pairs = [At(b, h, i, j, i, j) for j in map(int, np.flatnonzero(allowed))]
            weights[b, h, i, allowed] = NORMALIZERS[name][1].weights(score, pairs)
    return weights


def numbers(weights: np.ndarray) -> dict[str, np.ndarray]:
    return by_definition(weights, ALLOWED[:, None], np.arange(S) % 2 == 0, 0.3)


SUMS = normalizers.Running(lambda s, b, h, q, kv: -0.1 * abs(s), normalizer=normalizers.Sigmoid(-1))


@pytest.mark.parametrize("name", [*NORMALIZERS, "sums"])
def test_a_score_of_minus_infinity_leaves_a_pair_out(name):
    normalizer = SUMS if name == "sums" else NORMALIZERS[name][0]

    def hidden(score: Any, b: Any, h: Any, q: Any, kv: Any, allowed: Any) -> Any:
        return jnp.where(allowed[b, q, kv], score, -jnp.inf)

    score = scores.Score(hidden, jnp.asarray(ALLOWED))
    got = jattn.attention_weights(Q, KEY, score=score, normalizer=normalizer)
    want = jattn.attention_weights(Q, KEY, normalizer=normalizer, **OPTIONS)
    np.testing.assert_allclose(got, want, atol=1e-12)


@pytest.mark.parametrize("implementation", ["reference", "blockwise", "native"])
def test_minus_infinity_is_no_weight(implementation):
    def loss(q: Any, **rules: Any) -> Any:
        options: Any = {"normalizer": normalizers.Identity(), "implementation": implementation}
        return (jattn.attention(q, KEY, VALUE, **options, **rules) ** 2).sum()

    masked = functools.partial(loss, mask=lambda b, h, q, kv: q >= kv)
    scored = functools.partial(loss, score=lambda s, b, h, q, kv: jnp.where(q >= kv, s, -jnp.inf))
    assert_trees_close(jax.value_and_grad(scored)(Q), jax.value_and_grad(masked)(Q), rtol=1e-12)


# --- statistics and pictures --------------------------------------------------------------------


def statistics(name: str, q: Any, k: Any) -> Any:
    requested: Any = {"keys": jnp.arange(S) % 2 == 0, "threshold": 0.3, **OPTIONS}
    return jattn.statistics(q, k, normalizer=NORMALIZERS[name][0], **requested)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", NORMALIZERS)
def test_statistics_and_greatest_weights_are_those_of_the_weights(name):
    got, weights = statistics(name, Q, KEY)._asdict(), weights_of(name)
    want = numbers(weights)
    assert got.keys() == want.keys()
    for statistic, value in got.items():
        np.testing.assert_allclose(value, want[statistic], atol=1e-12, err_msg=statistic)
    options: Any = {"normalizer": NORMALIZERS[name][0], **OPTIONS}
    greatest, places = jattn.top_weights(Q, KEY, 3, **options)
    np.testing.assert_allclose(greatest, np.sort(weights)[..., :-4:-1], atol=1e-12)
    there = np.take_along_axis(weights, np.maximum(places, 0), axis=-1)
    np.testing.assert_allclose(greatest, np.where(places < 0, 0, there), atol=1e-12)
    counts = np.minimum(3, ALLOWED.sum(-1))[:, None]
    np.testing.assert_array_equal((np.asarray(places) >= 0).sum(-1), np.tile(counts, (1, N, 1)))
    selected = viz.weights_at(Q, KEY, rows=[4, 1], heads=[3, 0], **options)
    np.testing.assert_allclose(selected, weights[:, [3, 0]][:, :, [4, 1]], atol=1e-12)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", NORMALIZERS)
def test_gradients_of_statistics_are_differences(name):
    rng, names = np.random.default_rng(1), ("entropy", "greatest", "distance", "on_keys")
    factors = {x: rng.standard_normal((B, N, T)) for x in names}
    direction = [rng.standard_normal(x.shape) for x in (Q, KEY)]

    def total(values: Any) -> Any:
        return sum((factor * values[x]).sum() for x, factor in factors.items())

    def along(step: float) -> Any:
        operands = (np.asarray(x) + step * d for x, d in zip((Q, KEY), direction, strict=True))
        return total(numbers(weights_of(name, *operands)))

    loss = lambda q, k: total(statistics(name, q, k)._asdict())  # noqa: E731
    gradients = jax.grad(loss, (0, 1))(Q, KEY)
    got = sum((g * d).sum() for g, d in zip(gradients, direction, strict=True))
    np.testing.assert_allclose(got, (along(1e-6) - along(-1e-6)) / 2e-6, rtol=1e-6)


def test_statistics_have_gradients_of_parameters():
    def total(bias: Any) -> Any:
        normalizer = normalizers.Sigmoid(bias)
        return jattn.statistics(Q, KEY, normalizer=normalizer, **OPTIONS).greatest.sum()

    sigmoid = weights_of("sigmoid").max(-1)
    want = (sigmoid * (1 - sigmoid)).sum((0, 2))
    np.testing.assert_allclose(jax.grad(total)(jnp.asarray(BIAS)), want, rtol=1e-12)


def test_greatest_weight_may_be_negative():
    q, k = jnp.ones((1, 1, 1, 4)), -jnp.ones((1, 3, 1, 4))
    options: Any = {"mask": masks.Lengths(kv=2), "normalizer": normalizers.Identity()}
    got = jattn.statistics(q, k, **options)
    assert got.greatest.item() == -2.0 and got.place.item() == 0
    assert jattn.top_weights(q, k, 3, **options)[1].tolist() == [[[[0, 1, -1]]]]


# --- layers and caches --------------------------------------------------------------------------


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", NORMALIZERS)
def test_a_layer_has_a_normalizer(name):
    normalizer = NORMALIZERS[name][0]
    layer = nn.MultiHeadAttention(N, 8, normalizer=normalizer, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (B, T, 8), jnp.float32)
    q, (k, v) = layer.project_queries(x), layer.project_keys_values(x)
    heads = jattn.attention(q, k, v, mask=masks.Causal(), normalizer=normalizer)
    np.testing.assert_allclose(layer(x, mask=masks.Causal()), layer.out(heads), atol=1e-6)
    captured = nn.capture_weights(layer, x, mask=masks.Causal())
    want = jattn.attention_weights(q, k, mask=masks.Causal(), normalizer=layer.normalizer)
    assert_trees_close(jax.tree.leaves(captured), [want], atol=1e-6)
    if name != "relu":  # it needs the number of keys
        cached, _ = layer(x, mask=masks.Causal(), cache=layer.empty_cache(B, T))
        np.testing.assert_allclose(cached, layer(x, mask=masks.Causal()), atol=1e-6)


def test_arrays_of_a_normalizer_are_trained_only_if_learned():
    bias = jnp.asarray(BIAS, jnp.float32)
    learned = nn.LearnedNormalizer(normalizers.Sigmoid(bias))
    layers = [
        nn.MultiHeadAttention(N, 8, normalizer=x, rngs=nnx.Rngs(0))
        for x in (learned, normalizers.Sigmoid(bias))
    ]
    x = jnp.ones((B, T, 8))
    gradients = [nnx.grad(lambda layer: layer(x).sum())(layer) for layer in layers]
    assert abs(gradients[0]["normalizer"]["arrays"][0][...]).min() > 0
    assert "normalizer" not in gradients[1]
    assert_trees_close(layers[0](x), layers[1](x), atol=1e-6)
    with pytest.raises(TypeError, match="normalizer: expected a normalizer other than the softmax"):
        nn.LearnedNormalizer(None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="sinks: expected False with a normalizer"):
        nn.MultiHeadAttention(N, 8, normalizer=learned, sinks=True, rngs=nnx.Rngs(0))


CACHES = {
    "dense": lambda: DenseCache.create(B, 16, K, H, 3, dtype=jnp.float64),
    "rolling": lambda: RollingCache.create(B, 4, K, H, 3, chunk=3, dtype=jnp.float64),
    "paged": lambda: PagedCache.create(B, 16, K, H, 3, page_size=4, dtype=jnp.float64),
}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("name", ["sigmoid", "sparsemax", "stick_breaking"])
def test_calls_on_caches_equal_whole_sequences(name, kind):
    mask = masks.Causal() & masks.Window(left=3) if kind == "rolling" else masks.Causal()
    options: Any = {"mask": mask, "normalizer": NORMALIZERS[name][0]}
    q, k, v = normal_arrays((B, 6, N, H), (B, 6, K, H), (B, 6, K, 3), seed=4, dtype=jnp.float64)
    if (name, kind) == ("stick_breaking", "rolling"):
        with pytest.raises(NotImplementedError, match="StickBreaking needs slots in the order of"):
            jattn.cached_attention(q[:, :5], k[:, :5], v[:, :5], CACHES[kind](), **options)
        return
    first, cache = jattn.cached_attention(q[:, :5], k[:, :5], v[:, :5], CACHES[kind](), **options)
    last, cache = jattn.cached_attention(q[:, 5:], k[:, 5:], v[:, 5:], cache, **options)
    got = jnp.concatenate([first, last], axis=1)
    np.testing.assert_allclose(got, jattn.attention(q, k, v, **options), atol=1e-12)


@pytest.mark.parametrize(
    ("normalizer", "message"),
    [
        (normalizers.Sigmoid(), "Sigmoid: bias: expected a bias in a call on a cache"),
        (normalizers.Relu(count_power=1), "Relu: count_power: expected count_power 0 in a call on"),
        (normalizers.Running(scores.SoftCap(1.0), None, normalizers.Sigmoid()), "Sigmoid: bias"),
    ],
)
def test_calls_on_a_cache_need_numbers_that_do_not_depend_on_its_size(normalizer, message):
    with pytest.raises(ValueError, match=message):
        jattn.attention(Q, CACHES["dense"](), normalizer=normalizer)
    with pytest.raises(ValueError, match=message):
        step = (Q, KEY[:, :T], VALUE[:, :T], CACHES["paged"]())
        jattn.cached_attention(*step, normalizer=normalizer)


# --- several devices ----------------------------------------------------------------------------

TOKENS = 16
GATES = np.random.default_rng(5).standard_normal((2, 4, TOKENS))


def gated(score: Any, b: Any, h: Any, q: Any, kv: Any, gates: Any) -> Any:
    return gates[b, h, kv] - 0.01 * jnp.asarray(q - kv, score.dtype)


SHARDED: dict[str, Any] = {
    "sigmoid": lambda gates: normalizers.Sigmoid(gates[0, :, 0]),
    "by_count": lambda gates: normalizers.Relu(2, count_power=1),
    "function": lambda gates: normalizers.Pointwise(lambda s, x: jnp.sinh(s * x), gates[0, 0, 0]),
    "sparsemax": lambda gates: normalizers.Sparsemax(),
    "running": lambda gates: normalizers.Running(scores.Score(gated, gates)),
}


def sharded_case(name: str, attend: Any = jattn.attention, **options: Any) -> Any:
    """Returns a function from q, k, v and gates to the output and its gradients."""

    segments = masks.Segments(np.sort(np.arange(2 * TOKENS).reshape(2, -1) % 3))
    dropout = {"dropout_rate": 0.2, "dropout_key": jax.random.key(0)}
    rules: Any = {"mask": masks.Causal() & segments, **dropout, **options}

    def loss(q: Any, k: Any, v: Any, gates: Any) -> Any:
        out = attend(q, k, v, normalizer=SHARDED[name](gates), **rules)
        return jnp.sum(jnp.sin(out)), out

    return jax.grad(loss, (0, 1, 2, 3), has_aux=True)


@functools.cache
def whole(name: str) -> Any:
    return quick_jit(sharded_case(name))(*operands())


def operands() -> list[Any]:
    shapes = ((2, TOKENS, 4, 8), (2, TOKENS, 4, 8), (2, TOKENS, 4, 3))
    return [*normal_arrays(*shapes, seed=6, dtype=jnp.float64), jnp.asarray(GATES)]


SCHEMES = [
    *(("ring", name) for name in ("sigmoid", "by_count", "function")),
    *(("all_to_all", name) for name in ("by_count", "sparsemax", "running")),
    ("gather", "running"),
]


@pytest.mark.one_in(12, slow=True)
@pytest.mark.parametrize(("scheme", "name"), SCHEMES)
def test_several_devices_equal_one(scheme, name):
    options: Any = {"mesh": mesh_of(t=4), "axis_name": "t", "scheme": scheme}
    got = quick_jit(sharded_case(name, parallel.attention, **options))(*operands())
    assert_trees_close(got, whole(name), rtol=1e-11, atol=1e-12)


def test_zigzag_order():
    q, k, v, _ = operands()
    settings: Any = {"mask": masks.Causal(), "normalizer": jnp.sinh}
    sharded = functools.partial(parallel.shard_tokens, devices=2, axis=1, order="zigzag")
    options: Any = {"mesh": mesh_of(t=2), "axis_name": "t", "order": "zigzag"}
    got = parallel.attention(*map(sharded, (q, k, v)), **options, **settings)
    want = sharded(jattn.attention(q, k, v, **settings))
    np.testing.assert_allclose(got, want, rtol=1e-11, atol=1e-12)


def test_a_shard_counts_the_keys_of_all_devices():
    """The default bias of a sigmoid is −log S for all S keys."""
    mesh, tokens, normalizer = mesh_of(t=4), P(None, "t"), normalizers.Sigmoid()
    attend = functools.partial(parallel.attention_shard, axis_name="t", normalizer=normalizer)
    sharded = jax.shard_map(attend, mesh=mesh, in_specs=tokens, out_specs=tokens)
    q, k, v, _ = operands()
    want = jattn.attention(q, k, v, normalizer=normalizer)
    np.testing.assert_allclose(quick_jit(sharded)(q, k, v), want, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", ["sparsemax", "running"])
def test_a_ring_has_no_normalizers_of_whole_rows(name):
    options: Any = {"mesh": mesh_of(t=4), "axis_name": "t", "normalizer": SHARDED[name](GATES)}
    with pytest.raises(NotImplementedError, match=r'needs all keys .* write scheme="all_to_all"'):
        parallel.attention(*operands()[:3], **options)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["sigmoid", "running"])
def test_tokens_cut_under_jit(name):
    q, k, v, gates = operands()
    cut = (place(mesh_of(t=4), x, P(None, "t")) for x in (q, k, v))
    got = quick_jit(sharded_case(name))(*cut, gates)
    assert_trees_close(got, whole(name), rtol=1e-11, atol=1e-12)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["sigmoid", "sparsemax"])
def test_meshes_with_explicit_axes(name):
    mesh = jax.make_mesh((2, 2), ("rows", "tokens"), axis_types=(AxisType.Explicit,) * 2)
    *qkv, gates = operands()
    cut = [place(mesh, x, P("rows", "tokens")) for x in qkv]
    rules: Any = {"mask": masks.Causal(), "normalizer": SHARDED[name](gates)}
    attend = quick_jit(functools.partial(jattn.attention, **rules), out_shardings=None)
    out = attend(*cut)
    assert jax.typeof(out).sharding.spec == P("rows", "tokens", None, None)
    np.testing.assert_allclose(out, attend(*qkv), rtol=1e-11, atol=1e-12)


def test_statistics_of_sharded_arrays():
    """A device has one block of queries, a whole array has two."""
    mesh, (q, k, *_) = mesh_of(t=4), operands()
    rules: Any = {"mask": masks.Causal(), "normalizer": normalizers.TopK(3)}

    def run(q: Any, k: Any) -> Any:
        def total(q: Any) -> Any:
            result = jattn.statistics(q, k, **rules)
            return result.entropy.sum(), result

        return jax.grad(total, has_aux=True)(q), jattn.top_weights(q, k, 4, **rules)

    sharded = quick_jit(run)(*(place(mesh, x, P(None, "t")) for x in (q, k)))
    assert_trees_close(sharded, quick_jit(run)(q, k), rtol=1e-11, atol=1e-12)


def test_decoding_on_a_sharded_cache():
    cache = DenseCache.create(B, 16, K, H, 3, dtype=jnp.float64)
    step: Any = (Q, KEY[:, :T], VALUE[:, :T], cache)
    options: Any = {"mesh": mesh_of(t=4), "axis_name": "t", "mask": masks.Causal()}
    sigmoid = normalizers.Sigmoid(BIAS)
    got, _ = parallel.cached_attention(*step, normalizer=sigmoid, **options)
    want, _ = jattn.cached_attention(*step, normalizer=sigmoid, mask=masks.Causal())
    np.testing.assert_allclose(got, want, rtol=1e-11, atol=1e-12)
    with pytest.raises(NotImplementedError, match=r"write jattn\.cached_attention"):
        parallel.cached_attention(*step, normalizer=normalizers.TopK(2), **options)


# --- what only a softmax has --------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["native", "blockwise", "reference"])
def test_a_score_that_overflows_makes_the_row_nan(implementation):
    """Checks that no implementation takes the whole stick at a score of +inf."""
    keys = jnp.array([1.0, 10.0, 1e-38, -1e-38], jnp.float32)[:, None, None]
    query = jnp.array([3e38, 1.0], jnp.float32)[:, None, None]
    options: Any = {"normalizer": normalizers.StickBreaking(), "implementation": implementation}
    out = jattn.attention(query, keys, keys, scale=1.0, **options)
    np.testing.assert_array_equal(jnp.isnan(out)[:, 0, 0], [True, False])
    assert jnp.isfinite(out[1]).all()


@pytest.mark.parametrize(
    "function",
    [
        lambda x: jnp.exp(x) / jnp.exp(x).sum(),
        lambda x: jnp.exp(x - jax.nn.logsumexp(x)),
        lambda x: jnp.where(jnp.argmax(x) == 0, x, 0),
        jax.jit(lambda x: jax.nn.relu(x / jnp.linalg.norm(x))),
        lambda x: jnp.where(x >= jnp.median(x), x, 0),
    ],
    ids=["sum", "logsumexp", "argmax", "jitted norm", "median"],
)
def test_functions_that_reduce_the_score_are_refused(function, unchecked):
    with pytest.raises(TypeError, match=r"normalizer: .* reduces the score \(.*NormalizerFunction"):
        jattn.attention(Q, KEY, VALUE, normalizer=function)
    score: Any = lambda x, b, h, q_idx, kv_idx: function(x)  # noqa: E731
    says = "score: <lambda> reduces the score | one score, a scalar"
    expect(TypeError, says, jattn.attention, Q, KEY, VALUE, score=score)
    weight = jnp.exp(jnp.stack([Q[0, 0, 0, 0], 0.0])).sum()  # sums of other values are allowed
    jattn.attention(
        Q, KEY, VALUE, normalizer=lambda x: x * jnp.stack([x, weight]).sum() * weight.sum()
    )


def test_functions_of_all_scores_are_refused(unchecked):
    attend = functools.partial(jattn.attention, Q, KEY, VALUE)
    with pytest.raises(ValueError, match="axis") as raised:
        attend(normalizer=jax.nn.softmax)
    assert any("gets one score, a scalar" in x for x in raised.value.__notes__)
    message = (
        r"normalizer: <lambda> must return a float scalar, got float64 \[2\]; the function gets"
    )
    with pytest.raises(TypeError, match=message):
        attend(normalizer=lambda score: jnp.stack([score, score]))
    with pytest.raises(TypeError, match="Relu: power: expected a number, got an array"):
        normalizers.Relu(jnp.float32(2))
    with pytest.raises(TypeError, match=r"Running: term: expected a jattn score .* got float;"):
        normalizers.Running(3.0)


def test_only_a_softmax_has_lse_and_sinks():
    normalizer = normalizers.Sparsemax()
    with pytest.raises(ValueError, match="return_lse: expected no return_lse with the normalizer"):
        jattn.attention(Q, KEY, VALUE, normalizer=normalizer, return_lse=True)
    with pytest.raises(ValueError, match="sink: expected no sink with the normalizer"):
        jattn.attention(Q, KEY, VALUE, normalizer=normalizer, sink=0.0)
    with pytest.raises(ValueError, match="lse: expected None with the normalizer"):
        viz.weights_at(Q, KEY, jnp.zeros((B, N, T)), rows=0, normalizer=normalizer)


def test_explain_gives_reasons():
    options: Any = {"normalizer": normalizers.Sparsemax()}
    reasons = jattn.explain(Q, KEY, VALUE, **options, platform="cuda")
    assert "normalizer: has only the softmax" in str(reasons["cudnn"])
    assert reasons["blockwise"] is None and reasons["reference"] is None
    with pytest.raises(NotImplementedError, match=r"cudnn.*has only the softmax"):
        jattn.attention(Q, KEY, VALUE, **options, implementation="cudnn")


def test_advice_about_other_names():
    with pytest.raises(TypeError, match=r"top_k.* normalizer=normalizers\.TopK\(k\)"):
        jattn.attention(Q, KEY, VALUE, top_k=3)  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError, match=r"normalizer.*functools\.partial\(nn\.MultiHeadAttention"):
        nn.Encoder(1, 8, 2, 8, rngs=nnx.Rngs(0))(jnp.ones((1, 2, 8)), normalizer=None)  # pyright: ignore[reportCallIssue]


# --- programs -----------------------------------------------------------------------------------


def test_exported_programs_have_symbolic_lengths():
    t, s = export.symbolic_shape("t, s")
    sizes = ((B, t, N, H), (B, s, K, H), (B, s, K, 3))
    types = [jax.ShapeDtypeStruct(x, jnp.float64) for x in sizes]

    def exported(normalizer: Any) -> Any:
        run = functools.partial(jattn.attention, mask=masks.Causal(), normalizer=normalizer)
        return export.export(jax.jit(run))(*types).call(Q, KEY, VALUE)

    sparsemax = normalizers.Sparsemax()
    want = jattn.attention(Q, KEY, VALUE, mask=masks.Causal(), normalizer=sparsemax)
    np.testing.assert_allclose(exported(sparsemax), want, rtol=1e-12, atol=1e-13)
    with pytest.raises(ValueError, match="bias: expected a bias in a call with symbolic S"):
        exported(normalizers.Sigmoid())
    with pytest.raises(ValueError, match="TopK: expected an integer S, got the symbol s"):
        exported(normalizers.TopK(2))


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", ["relu", "sparsemax", "stick_breaking"])
def test_debugging_flags_find_nothing_in_masked_pairs(name):
    bad = KEY.at[:, 6].set(jnp.nan).at[1, 4:].set(jnp.inf)
    values = VALUE.at[:, 6].set(jnp.nan)
    options: Any = {"normalizer": NORMALIZERS[name][0], **OPTIONS}
    gradient = jax.grad(lambda *qkv: jattn.attention(*qkv, **options).sum(), (0, 1, 2))
    want = gradient(Q, KEY, VALUE)
    with jax.debug_nans(True), jax.debug_infs(True):
        got = gradient(Q, bad, values)
        jattn.statistics(Q, bad, **options)
    assert_trees_close(got, want, rtol=1e-12, atol=1e-13)


def test_functions_are_what_they_are_now():
    settings, table, exponents = [0.0], np.array([2.0]), {"power": 1}

    def weight(score: Any) -> Any:
        return settings[0] * jnp.tanh(score * table[0]) ** exponents["power"]

    values = np.repeat(np.asarray(VALUE), N // K, axis=2)
    score = np.asarray(jattn.attention_scores(Q, KEY))
    holders: list[Any] = [(settings, 0, 1.0), (settings, 0, 3.0), (table, 0, 0.5)]
    for holder, name, number in [*holders, (exponents, "power", 2)]:
        holder[name] = number
        got = jattn.attention_weights(Q, KEY, normalizer=weight)
        want = settings[0] * np.tanh(score * table[0]) ** exponents["power"]
        np.testing.assert_allclose(got, want, rtol=1e-12)
        out = jattn.attention(Q, KEY, VALUE, normalizer=weight)
        np.testing.assert_allclose(out, np.einsum("bnts,bsnv->btnv", want, values), rtol=1e-11)


def test_numbers_of_heads_are_of_weights_divided_by_their_sum():
    weights = weights_of("sigmoid")[0]
    got, scaled = viz.head_numbers(weights), viz.head_numbers(4 * weights)
    for name in ("entropy", "distance", "monotonicity"):
        np.testing.assert_allclose(scaled[name], got[name], rtol=1e-12)
    want = numbers(weights_of("sigmoid"))["entropy"][0].mean(-1)
    np.testing.assert_allclose(got["entropy"], want, rtol=1e-12)


def test_pictures_show_weights_above_1():
    weights = 4 * weights_of("sigmoid")[0]
    figure = viz.grid(weights)
    limits: Any = [image.norm.vmax for axes in figure.axes for image in axes.images]
    assert max(limits) == pytest.approx(weights.max())
    assert "<html" in viz.viewer(weights, list("abcde"), list("abcdefg")).html
