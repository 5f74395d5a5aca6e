"""One latent vector for keys and values: the cache, and multi-head latent attention, against
formulas with keys and values of every head written out."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jattn
from jattn import masks, nn, scores
from jattn.cache import Cache, DenseCache, LatentCache, PagedCache, RollingCache
from jattn.positions import Yarn
from tests import oracle
from tests.conftest import assert_trees_close, expect, normal_arrays, out_and_gradients, quick_jit


B, T, N, C, R = 3, 11, 5, 6, 3
W = 4  # of the window
LENGTHS = np.array([11, 7, 0])
KINDS: dict[str, tuple[Any, int, dict[str, int]]] = {
    "dense": (DenseCache, T + 2, {}),
    "rolling": (RollingCache, W, {"chunk": 3}),
    "paged": (PagedCache, T + 1, {"page_size": 4}),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def empty(kind: str, make: Any = None, **options: Any) -> LatentCache:
    cls, length, kind_options = KINDS[kind]
    make = make or functools.partial(LatentCache.create, latent_size=C, rotary_size=R)
    return make(B, length, kind=cls, **kind_options, **options)


def tokens(dtype: Any = "float32") -> list[jax.Array]:
    """Queries `[B, T, N, C + R]` and keys `[B, T, 1, C + R]`, whose scores spread."""
    query, key = normal_arrays((B, T, N, C + R), (B, T, 1, C + R), dtype=dtype)
    return [3 * query, key]


@functools.cache
def formula(kind: str, dtype: str = "float32") -> oracle.OracleForward:
    query, key = (np.asarray(x, np.float64) for x in tokens(dtype))
    past = W if kind == "rolling" else T
    seen = lambda pair: 0 <= pair.q - pair.kv <= past  # noqa: E731
    return oracle.attend(oracle.OracleProblem(query, key, key[..., :C], allowed=seen))


@functools.partial(quick_jit, static_argnames="implementation")
def extended(cache: Any, query: Any, key: Any, valid: Any = None, implementation: Any = None):
    return jattn.cached_attention(
        query, key, None, cache, mask=masks.Causal(), valid=valid, implementation=implementation
    )


@pytest.mark.one_in(2)
@every_kind
@pytest.mark.parametrize("implementation", ["decode", "blockwise"])
def test_steps_are_attention_to_the_whole(kind, implementation):
    """Rows end early, padding and unused slots hold NaN, and a row without tokens gives 0. The
    rolling cache takes 3 of the 4 tokens of a step at a time."""
    cache, want = empty(kind), formula(kind)
    cache = jax.tree.map(
        lambda x: jnp.full_like(x, jnp.nan) if jnp.issubdtype(x.dtype, jnp.floating) else x, cache
    )
    for start in range(0, T, 4):
        places = np.arange(start, min(start + 4, T))
        valid = places < LENGTHS[:, None]
        query, key = (np.where(valid[..., None, None], x[:, places], np.nan) for x in tokens())
        out, cache = extended(cache, query, key, valid, implementation)
        np.testing.assert_allclose(out[valid], want.out[:, places][valid], rtol=0, atol=3e-6)
    np.testing.assert_array_equal(cache.lengths, LENGTHS)
    dead = jattn.attention(tokens()[0][:, :1], cache, implementation=implementation)
    np.testing.assert_array_equal(dead[2], 0)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_the_kernel_reads_many_query_heads(dtype):
    """Sizes of a model, whose products are computed for blocks of heads and of keys."""
    S, C, R = 700, 48, 16
    limit = {"bfloat16": 8e-3, "float32": 3e-6, "float64": 1e-14}[dtype]
    key = normal_arrays((2, S + 9, 1, C + R), dtype=dtype)[0].at[:, S:].set(jnp.nan)
    valid = np.arange(S + 9) < np.array([S, 130])[:, None]
    cache = LatentCache.create(2, S + 9, C, R, dtype).append(key, None, valid)
    for N in (1, 4, 20, 33):
        query = 2 * normal_arrays((2, 1, N, C + R), dtype=dtype, seed=1)[0]
        lowered = jax.jit(jattn.attention).lower(query, cache)
        assert "jattn_decode" in lowered.as_text()
        out = lowered.compile()(query, cache)
        for b, length in enumerate((S, 130)):
            q, k = (np.asarray(x[b], np.float64) for x in (query, key))
            score = q[0] @ k[:length, 0].T / np.sqrt(C + R)
            weights = np.exp(score - score.max(-1, keepdims=True))
            want = weights / weights.sum(-1, keepdims=True) @ k[:length, 0, :C]
            assert oracle.error(out[b, 0], want) <= limit


@every_kind
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_token_takes_as_many_bytes_as_in_the_paper(kind, dtype):
    cache = empty(kind, dtype=dtype)
    slots = B * -(-cache.capacity // 4) * 4 if kind == "paged" else B * cache.capacity
    stored = [x for x in jax.tree.leaves(cache) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert sum(x.nbytes for x in stored) == slots * (C + R) * jnp.dtype(dtype).itemsize
    keys, values = cache.read()
    assert (keys.shape[-1], values.shape[-1]) == (C + R, C) == (C + R, cache.value_size)
    assert empty(kind, dtype=jnp.int8).bytes_per_token == C + R + 4  # one scale


@pytest.mark.one_in(3)
@every_kind
def test_gradients_reach_the_stored_vectors(kind):
    query, key = tokens("float64")
    _, cache = extended(empty(kind, dtype="float64"), query, key)

    def loss(query: Any, keys: Any, implementation: str) -> Any:
        changed = jax.tree.map(lambda x: keys if x is cache.keys else x, cache)
        return jnp.sum(jnp.sin(jattn.attention(query, changed, implementation=implementation)))

    gradient = jax.grad(loss, argnums=(0, 1))
    got, want = (gradient(query[:, -1:], cache.keys, x) for x in ("decode", "reference"))
    assert_trees_close(got, want, rtol=0, atol=1e-13)
    assert float(jnp.abs(want[1]).max()) > 0.01


def test_wrong_arguments_are_named():
    cache, (_, key) = empty("dense"), tokens()
    expect(
        ValueError, "value: expected None: | first 6 numbers of its keys", cache.append, key, key
    )
    expect(ValueError, "key | 9] | got", cache.append, key[..., 1:])
    for kind in (dict, LatentCache, Cache):
        with pytest.raises(TypeError, match="kind: expected DenseCache, RollingCache or Paged"):
            LatentCache.create(B, T, C, R, kind=kind)  # pyright: ignore[reportArgumentType]
    for dtype in (jnp.int4, "int4"):
        says = "dtype: | int8 or float8_e4m3fn, got int4"
        expect(ValueError, says, LatentCache.create, B, T, C, R, dtype=dtype)
    expect(ValueError, "latent_size:", LatentCache.create, B, T, 0, R)


# --- multi-head latent attention ------------------------------------------------------------------

D, H, V = 10, 4, 7
OPTIONS: dict[str, dict[str, Any]] = {
    "paper": {"query_rank": 8, "use_bias": False},
    "no query rank": {"rotary": nn.Rotary("interleaved", 100.0), "sinks": True},
    "yarn": {"rotary": nn.Rotary(scaling=Yarn(4.0, 16)), "scale": 0.4, "query_rank": 3},
    "alibi": {"rotary_dim": 0, "score": scores.Alibi(scores.alibi_slopes(N))},
}


def latent_attention(name: str, dtype: Any = jnp.float64) -> nn.MultiHeadLatentAttention:
    """A layer with spread scores."""
    sizes = {"kv_rank": C, "head_dim": H, "rotary_dim": 2, "value_dim": V}
    options = {**sizes, "mask": masks.Causal(), "param_dtype": dtype, **OPTIONS[name]}
    make = functools.partial(nn.MultiHeadLatentAttention, N, D, 3, **options)
    layer = nnx.jit(lambda: make(rngs=nnx.Rngs(0)))()
    for i, (_, x) in enumerate(nnx.to_flat_state(nnx.state(layer, nnx.Param))):
        noise = np.random.default_rng(i).normal(size=x.shape)
        x.set_value(jnp.asarray(1.5 * np.asarray(x[...]) + 0.3 * noise, dtype))
    return layer


def by_the_formula(layer: Any, params: Any, x: Any) -> Any:
    """Equations 37 to 47 of the paper (appendix C) in jnp, for `[B, T, D]`, with the biases."""
    p = {"/".join(map(str, path)): y[...] for path, y in nnx.to_flat_state(params)}
    rank, R = layer.kv_rank, layer.rotary_dim

    def down(name: str, x: Any) -> Any:
        y = jnp.einsum("btd,dc->btc", x, p[f"{name}/kernel"])
        return y + p[f"{name}/bias"][None, None] if f"{name}/bias" in p else y

    def norm(name: str, x: Any) -> Any:
        return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * p[f"{name}/scale"][None, None]

    def turned(x: Any) -> Any:
        if not R:
            return x
        return jnp.concatenate([x[..., :-R], layer.rotary(x[..., -R:], jnp.arange(x.shape[1]))], -1)

    c = norm("query_ln", down("query_down", x)) if layer.query_rank else x
    q = turned(jnp.einsum("btd,dnh->btnh", c, p["query/kernel"]))
    latent, shared = jnp.split(down("latent", x), [rank], axis=-1)
    latent, shared = norm("latent_ln", latent), turned(shared[:, :, None])
    key = jnp.einsum("bsc,cnh->bsnh", latent, p["key/kernel"])
    value = jnp.einsum("bsc,cnv->bsnv", latent, p["value/kernel"])
    score = jnp.einsum("btnh,bsnh->bnts", q[..., : layer.head_dim], key)
    score += jnp.einsum("btnr,bsr->bnts", q[..., layer.head_dim :], shared[:, :, 0])
    score *= layer.scale
    size = x.shape[1]
    distance = jnp.arange(size)[:, None] - jnp.arange(size)[None]
    if layer.score is not None:
        slopes = scores.alibi_slopes(N).astype(score.dtype)[None, :, None, None]
        score -= slopes * abs(distance)[None, None].astype(score.dtype)
    score = jnp.where((distance >= 0)[None, None], score, -jnp.inf)
    weights = jnp.exp(score)
    sink = jnp.exp(p["sinks"])[None, :, None, None] if "sinks" in p else 0.0
    weights /= weights.sum(-1, keepdims=True) + sink
    out = jnp.einsum("bnts,bsnv,nvd->btd", weights, value, p["out/kernel"])
    return out + p["out/bias"][None, None] if "out/bias" in p else out


def inputs(dtype: Any = "float64") -> jax.Array:
    return 2 * normal_arrays((B, T, D), dtype=dtype)[0]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", OPTIONS)
def test_values_and_gradients_by_the_formula(name):
    layer, x = latent_attention(name), inputs()
    graph, params, rest = nnx.split(layer, nnx.Param, ...)
    cotangent = normal_arrays((B, T, 3), seed=4)[0]
    call = lambda params, x: nnx.merge(graph, params, rest)(x)  # noqa: E731
    got, want = (
        jax.jit(functools.partial(out_and_gradients, function))((params, x), cotangent)
        for function in (call, functools.partial(by_the_formula, layer))
    )
    assert_trees_close(got, want, rtol=1e-11, atol=1e-11)


@nnx.jit
def stepped(layer: Any, x: Any, cache: Any, valid: Any = None) -> Any:
    return layer(x, cache=cache, valid=valid)


@pytest.mark.one_in(8)
@pytest.mark.parametrize(
    ("name", "kind", "dtype"),
    [
        *[(name, "dense", "float64") for name in OPTIONS],
        ("paper", "paged", "float64"),
        ("paper", "rolling", "float64"),
        ("paper", "dense", "float32"),
    ],
)
def test_the_absorbed_form_equals_the_expanded_form(name, kind, dtype):
    """Prompts of three lengths padded on the left, then token by token."""
    layer, x = latent_attention(name, dtype), inputs(dtype)
    mask = masks.Window(left=W) if kind == "rolling" else None
    want = np.asarray(nnx.jit(lambda layer, x: layer(x, mask=mask))(layer, x))
    limit = 1e-12 if dtype == "float64" else 1e-5
    cache = empty(kind, layer.empty_cache)
    counts = np.array([3, 1, 2])
    padded = jnp.stack([jnp.roll(x[b, :3], 3 - n, axis=0) for b, n in enumerate(counts)])
    out, cache = stepped(layer, padded, cache, np.arange(3) >= 3 - counts[:, None])
    for b, n in enumerate(counts):
        np.testing.assert_allclose(out[b, 3 - n :], want[b, :n], rtol=0, atol=limit)
    for place in range(8):
        rows = np.arange(B), counts + place
        out, cache = stepped(layer, x[rows][:, None], cache)
        np.testing.assert_allclose(out[:, 0], want[rows], rtol=0, atol=limit)
    assert isinstance(cache, LatentCache)


@nnx.jit
def in_other_forms(layer: Any, single: Any, x: Any) -> Any:
    memory, weights = layer.project_memory(x), nn.capture_weights(layer, x)[""]
    return weights, memory, layer(x), (layer.attend_memory(x, memory), single(x))


@pytest.mark.slow
def test_weights_memories_and_single_heads():
    layer, x = latent_attention("paper"), inputs()
    weights, memory, want, other_forms = in_other_forms(layer, nn.SingleHeads(layer), x)
    assert weights.shape == (B, N, T, T)
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=0, atol=1e-12)
    assert_trees_close(other_forms, (want, want), rtol=0, atol=1e-12)
    expect(TypeError, "cache: expected a LatentCache, | got a DenseCache", layer, x, cache=memory)
    expect(ValueError, "inputs_v: expected None", layer, x, x, x)
    make: Any = functools.partial(nn.MultiHeadLatentAttention, 2, 8, rngs=nnx.Rngs(0))
    default = nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0)))
    assert (default.kv_rank, default.rotary_dim, default.scale) == (16, 2, 6**-0.5)
    expect(ValueError, "rotary_dim: expected an even number", make, rotary_dim=3)
    expect(ValueError, "kv_rank: ", make, kv_rank=0)
    expect(ValueError, "query_rank: ", make, query_rank=-1)
    expect(TypeError, "no argument 'num_kv_heads'", make, num_kv_heads=1)
