"""Caches: token by token, in chunks and at once are the same, and nothing is lost silently."""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jattn
import jattn.nn
from jattn import masks, normalizers, positions, scores
from jattn.cache import Cache, DenseCache, LatentCache, PagedCache, RollingCache
from tests import oracle
from tests.conftest import assert_trees_close, expect, normal_arrays, quick_jit
from tests.kernels import appended


B, T, N, K, H, V = 3, 13, 6, 3, 4, 5
W = 4  # of the window
LENGTHS = np.array([13, 7, 1])

CACHES = {
    "dense": lambda chunk: DenseCache.create(B, T + 3, K, H, V),
    "rolling": lambda chunk: RollingCache.create(B, W, K, H, V, chunk=chunk),
    "paged": lambda chunk: PagedCache.create(B, T + 3, K, H, V, page_size=4),
}
every_cache = pytest.mark.parametrize("kind", CACHES)


def tokens(seed: int = 0, T: int = T) -> Any:
    """float32 `query [B, T, N, H]`, `key [B, T, K, H]`, `value [B, T, K, V]`."""
    shapes = ((B, T, N, H), (B, T, K, H), (B, T, K, V))
    return normal_arrays(*shapes, dtype=jnp.float32, seed=seed)


IDS = jnp.array([0, 0, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3])  # by position
LEARNED = jnp.asarray(np.random.default_rng(9).normal(size=(T, H)), jnp.float32)
MASKS = {
    "causal": lambda q_ids, kv_ids: masks.Causal(),
    "window": lambda q_ids, kv_ids: masks.Causal() & masks.Window(left=2),
    "prefix": lambda q_ids, kv_ids: masks.Causal() | masks.Prefix(1),
    "segments": lambda q_ids, kv_ids: masks.Causal() & masks.Segments(q_ids, kv_ids),
}


cached: Any = jattn.cached_attention
ALIBI = scores.Alibi(scores.alibi_slopes(N))


def encoded(x: Any, places: Any) -> Any:
    rows = LEARNED[jnp.clip(places, 0, T - 1)]
    x = x + jnp.broadcast_to(rows, (B, *rows.shape[-2:]))[:, :, None]
    return positions.rotary(x, places)


def whole(kind: str, mask: Any, *qkv: Any, score: Any = None) -> Any:
    """Attention over whole sequences; a rolling cache sees its window."""
    seen = mask & masks.Window(left=W) if kind == "rolling" else mask
    return jattn.attention(*qkv, mask=seen, score=score, implementation="reference")


@functools.partial(quick_jit, static_argnames="mask")
def decode_chunk(cache: Cache, mask: str, valid: Any, query: Any, key: Any, value: Any) -> Any:
    places = cache.next_positions(query.shape[1], valid)
    query, key = (encoded(x, places) for x in (query, key))
    slots = cache.append(key, value, valid).kv_positions  # of the cache that will be read
    slots = jnp.arange(cache.capacity)[None] if slots is None else slots
    slots = jnp.broadcast_to(slots, (B, cache.capacity))
    rules: Any = {"mask": MASKS[mask](*(IDS[jnp.clip(x, 0, T - 1)] for x in (places, slots)))}
    return jattn.cached_attention(query, key, value, cache, valid=valid, score=ALIBI, **rules)


def decoded(cache: Cache, mask: str, size: int) -> Any:
    """The output of tokens in chunks, `[B, T, N, V]` with NaN for padding, and the cache."""
    out = np.full((B, T, N, V), np.nan, np.float32)
    for start in range(0, T, size):
        places = np.arange(start, start + size)
        valid = places < LENGTHS[:, None]
        # Padding is nothing.
        chunk = [np.asarray(x)[:, np.minimum(places, T - 1)] for x in tokens()]
        chunk = [np.where(valid[..., None, None], x, np.nan) for x in chunk]
        got, cache = decode_chunk(cache, mask, valid, *chunk)
        for b, t in np.argwhere(valid):
            out[b, places[t]] = got[b, t]
    return out, cache


@quick_jit
def attended(cache: Cache, query: Any, key: Any, value: Any) -> Any:
    return jattn.cached_attention(query, key, value, cache, mask=masks.Causal())


@pytest.mark.one_in(6)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kind", CACHES)
def test_in_any_chunks_it_is_attention_to_the_whole(kind, mask):
    """It does not matter what the unused slots hold."""
    query, key, value = tokens()
    query, key = (encoded(x, jnp.arange(T)) for x in (query, key))
    want = whole(kind, MASKS[mask](IDS, IDS), query, key, value, score=ALIBI)
    real = np.arange(T) < LENGTHS[:, None]
    for size, poison in (1, np.nan), (W + 1 if mask == "window" else T, np.inf):
        got, cache = decoded(poisoned(CACHES[kind](size), poison), mask, size)
        np.testing.assert_allclose(got[real], want[real], rtol=0, atol=2e-6, err_msg=f"{size}")
        np.testing.assert_array_equal(cache.lengths, LENGTHS)
        assert not cache.overflowed.any()


@pytest.mark.parametrize("lengths", [5, jnp.array([0, 7, 5]), np.array([4, 250, 0], np.uint8)])
def test_more_than_a_chunk_goes_in_pieces(lengths):
    """A rolling cache takes 3 of the 13 tokens at a time. Arrays of masks are cut, and places of
    queries go on from piece to piece: place 5 lies within the second."""
    rows = jnp.asarray(np.random.default_rng(4).random((B, 1, T, 1)) < 0.7)
    mask = masks.Causal() & masks.Dense(rows)
    mask &= ~(masks.Lengths(q=lengths) & masks.Window(left=1))
    got, cache = cached(*tokens(), CACHES["rolling"](3), mask=mask)
    close(got, whole("rolling", mask, *tokens()))
    np.testing.assert_array_equal(cache.lengths, [T] * B)


@pytest.mark.parametrize(
    "kind", ["dense", "rolling", pytest.param("paged", marks=pytest.mark.slow)]
)
def test_weights_are_by_slot(kind):
    """A rolling cache takes the 13 tokens 3 at a time; key p lies in slot p mod S."""
    poison = 1e38 if kind == "dense" else np.nan
    mask, cache, pieces = masks.Causal(), poisoned(CACHES[kind](3), poison), []

    @quick_jit
    def extended(cache: Any, query: Any, key: Any, value: Any) -> Any:
        rules: Any = {"mask": mask, "return_lse": True}
        (out, lse), longer = jattn.cached_attention(query, key, value, cache, **rules)
        return (out, lse, jattn.attention_weights(query, longer, mask=mask)), longer

    for t in range(0, T, 3):
        (out, *by_head), cache = extended(cache, *(x[:, t : t + 3] for x in tokens()))
        pieces.append((out, *(jnp.swapaxes(x, 1, 2) for x in by_head)))
    if kind == "rolling":
        assert cache.keys.shape == (B, K, W + 3, H)
        np.testing.assert_array_equal(np.sort(cache.kv_positions[0]), np.arange(T - W - 3, T))
    out, lse, weights = (jnp.concatenate(x, axis=1) for x in zip(*pieces, strict=True))
    lse, weights = (jnp.swapaxes(x, 1, 2) for x in (lse, weights))
    past = W if kind == "rolling" else T
    arrays: Any = (np.asarray(x, np.float64) for x in tokens())
    seen = lambda pair: 0 <= pair.q - pair.kv <= past  # noqa: E731
    want = oracle.attend(oracle.OracleProblem(*arrays, allowed=seen))
    by_slot = want.weights @ (np.arange(T)[:, None] % cache.capacity == np.arange(cache.capacity))
    assert_trees_close((out, lse), (want.out, want.lse), rtol=0, atol=2e-6)
    np.testing.assert_allclose(weights, by_slot, rtol=0, atol=1e-6)


def test_weights_of_a_cache_after_dropout_and_of_lost_rows():
    query, key, value = tokens()
    cache = DenseCache.of(key, value)
    lost = dataclasses.replace(cache, overflowed=jnp.array([False, True, False]))
    dropout: Any = {"dropout_rate": 0.5, "dropout_key": jax.random.key(3)}
    out = jattn.attention(query, lost, **dropout)
    weights = np.asarray(jattn.attention_weights(query, lost, **dropout))
    assert weights.shape == (B, N, T, T) and np.isnan(weights[1]).all()
    assert 0.3 < np.mean(weights[::2] == 0) < 0.7
    want = np.einsum("bnts,bsnv->btnv", weights[::2], np.repeat(value[::2], N // K, axis=2))
    close(out[::2], want)


def poisoned(cache: Any, poison: float) -> Any:
    full = {name: jnp.full_like(getattr(cache, name), poison) for name in ("keys", "values")}
    return dataclasses.replace(cache, **full)


close = functools.partial(np.testing.assert_allclose, rtol=0, atol=2e-6)


def filled(kind: str, lengths: np.ndarray) -> Any:
    return appended(CACHES[kind](T), *tokens()[1:], np.arange(T) < lengths[:, None])


@pytest.mark.parametrize("kind", ["dense", "paged"])
def test_a_write_past_the_end_raises_where_lengths_are_known(kind):
    _, key, value = tokens(1)
    cache = appended(filled(kind, LENGTHS), key[:, :3], value[:, :3])
    says = "capacity = 16 tokens in each batch row, got 17 in batch row 0"
    expect(ValueError, says, cache.append, key[:, :1], value[:, :1])
    only_others = np.array([[False], [True], [True]])
    assert cache.append(key[:, :1], value[:, :1], only_others).lengths.tolist() == [16, 11, 5]


@pytest.mark.one_in(3)
@every_cache
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_cache_may_have_a_dtype_of_its_own(kind, dtype):
    cast = lambda x: x.astype(dtype) if x.dtype == jnp.float32 else x  # noqa: E731
    narrow: Any = jax.tree.map(cast, CACHES[kind](T))
    query, key, value = tokens()
    out, longer = attended(narrow, query, key, value)
    assert longer.keys.dtype == longer.values.dtype == jnp.dtype(dtype)
    assert out.dtype == jnp.float32
    key, value = (x.astype(dtype).astype(jnp.float32) for x in (key, value))
    want, _ = attended(CACHES[kind](T), query, key, value)
    np.testing.assert_allclose(out, want, rtol=0, atol=1e-6)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("implementation", ["decode", "blockwise"])
@pytest.mark.parametrize("kind", CACHES)
def test_implementations_agree_on_a_cache(implementation, kind):
    cache = filled(kind, np.array([9, 7, 2]))
    query = tokens(1)[0][:, :2]
    bias = scores.Bias(jnp.asarray(np.random.default_rng(2).normal(size=(B, N, 2, cache.capacity))))

    @functools.partial(quick_jit, static_argnums=0)
    def everything(implementation: str, *operands: Any) -> Any:
        def call(query: Any, keys: Any, values: Any, score: Any) -> Any:
            replaced = dataclasses.replace(cache, keys=keys, values=values)
            options: Any = {"implementation": implementation, "return_lse": True}
            return jattn.attention(query, replaced, score=score, **options)

        result, pull = jax.vjp(call, *operands)
        return result, pull((jnp.ones_like(result[0]), jnp.cos(result[1])))

    operands = (query, cache.keys, cache.values, bias)
    got, want = (everything(name, *operands) for name in (implementation, "reference"))
    assert_trees_close(got, want, rtol=0, atol=1e-5)


@pytest.mark.one_in(2, slow=True)
@pytest.mark.default_tiles
@pytest.mark.parametrize("kind", ["dense", "paged"])
@pytest.mark.parametrize("lengths", [(1, 2), (900, 40), (2048, 2047)])
def test_long_caches_are_read_in_blocks(kind, lengths):
    """Few of the blocks, half of them, or all; the other slots are poisoned."""
    S, rows = 2048, 2
    paged = functools.partial(PagedCache.create, page_size=64)
    create = paged if kind == "paged" else DenseCache.create
    shapes = (rows, S, 1, 4), (rows, S, 1, 4), (rows, 1, 2, 4)
    key, value, query = normal_arrays(*shapes, dtype=jnp.float32)
    cache = poisoned(create(rows, S, 1, 4), np.nan)
    cache = appended(cache, key, value, np.arange(S) < np.array(lengths)[:, None])
    mask = masks.Causal() & masks.Window(left=1000)
    got = quick_jit(lambda query, cache: jattn.attention(query, cache, mask=mask))(query, cache)
    for b, length in enumerate(lengths):
        part = b, slice(max(0, length - 1001), length)
        want = jattn.attention(query[b], key[part], value[part], implementation="reference")
        np.testing.assert_allclose(got[b], want, rtol=0, atol=1e-6)


def test_wrong_arguments_are_named():
    cache, attend = DenseCache.create(B, 8, K, H, V), jattn.attention
    query, key, value = (x[:, :2] for x in tokens())
    for wrong, says in (
        ((key[:2], value[:2]), "key [B, T, K, H] = [3, T, 3, 4], got [2, 2, 3, 4]"),
        ((key, value[..., :4]), "value [B, T, K, V] = [3, T, 3, 5], got [3, 2, 3, 4]"),
        ((key, value, np.ones((B, 3), bool)), "valid [B, T] = [3, 2], got [3, 3]"),
    ):
        expect(ValueError, says, cache.append, *wrong)
    on_a_cache = "expected None in a call on a cache"
    expect(ValueError, f"value: {on_a_cache}", attend, query, cache, value)
    places = {"kv_positions": jnp.arange(8)}
    expect(ValueError, f"kv_positions: {on_a_cache}", attend, query, cache, **places)
    expect(TypeError, "value: expected an array", attend, query, key)
    nine, says = jnp.ones((B, 9, N, H)), "'decode': expected at most 8 queries"
    expect(NotImplementedError, says, attend, nine, cache, implementation="decode")
    rolling = RollingCache.create(B, W, K, H, V, chunk=1)
    expect(ValueError, "chunk = 1 | got 2", rolling.append, key, value)
    blocks = masks.Blocks(jnp.ones((2, W + 1), bool), 1)
    says = "mask: | no more tokens than the cache's chunk"
    expect(NotImplementedError, says, cached, query, key, value, rolling, mask=blocks)
    says = "dropout_rate: expected 0 | chunk of 1 tokens"
    dropout = {"dropout_rate": 0.5, "dropout_key": jax.random.key(0)}
    expect(NotImplementedError, says, cached, query, key, value, rolling, **dropout)
    expect(ValueError, "length: expected length >= 1, got 0", DenseCache.create, B, 0, K, H)


def test_rules_that_need_tokens_in_order_refuse_slots_that_are_used_again():
    rolling = RollingCache.create(B, W, 1, H, 0)
    stored = LatentCache.create(B, W, H - 1, 1, kind=RollingCache)
    for cache, name in ((rolling, "RollingCache"), (stored, "LatentCache")):
        says = f"needs slots in the order of tokens, unlike those of a {name}"
        query, running = jnp.ones((B, 1, N, H)), normalizers.Running(scores.SoftCap(1.0))
        for rule in (normalizers.StickBreaking(), running):
            named = f"normalizer: {type(rule).__name__} {says}"
            expect(NotImplementedError, named, jattn.attention, query, cache, normalizer=rule)
        tree = masks.Causal() & masks.Tree(jnp.array([-1]), cache.lengths)
        expect(
            NotImplementedError,
            f"mask: masks.Tree {says}",
            jattn.attention,
            query,
            cache,
            mask=tree,
        )
        keep, places = cache.keep, jnp.zeros((B, 1), int)
        expect(NotImplementedError, "slots in the order", keep, cache.lengths, places)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "places, norm", [("learned", "post"), ("sinusoidal", "pre"), (None, "post")]
)
def test_the_transformer_step_by_step_is_the_transformer_at_once(places, norm):
    widths: Any = {"features": 16, "num_heads": 4, "feed_forward": 32, "max_length": 20}
    widths |= {"encoder_layers": 1, "decoder_layers": 1, "dropout_rate": 0.1}
    model = jattn.nn.Transformer(11, 12, positions=places, norm=norm, rngs=nnx.Rngs(0), **widths)
    rng = np.random.default_rng(7)
    source, target = (jnp.asarray(rng.integers(0, 11, (3, n))) for n in (6, 9))
    lengths = jnp.array([6, 2, 4])
    padding = masks.Lengths(kv=lengths)
    options = {"source_mask": padding, "cross_mask": padding, "deterministic": True}
    want = nnx.jit(lambda model: model(source, target, **options))(model)
    run = nnx.jit(lambda model, ids, caches: model.step(ids, caches, deterministic=True))

    @nnx.jit
    def begin(model):
        memory = model.encode(source, mask=padding, deterministic=True)
        return model.decoder.start(memory, 9, memory_lengths=lengths)

    caches, swapped, rows = begin(model), jnp.array([2, 0, 0]), jnp.arange(3)
    for begun, end in itertools.pairwise((0, 1, 5, 6, 7, 8, 9)):
        if end == 6:
            caches, rows = [cache.reorder(swapped) for cache in caches], swapped
        logits, caches = run(model, target[rows, begun:end], caches)
        np.testing.assert_allclose(logits, want[rows, begun:end], rtol=0, atol=5e-6)


def test_modules_refuse_what_does_not_go_with_a_cache():
    layer = jattn.nn.MultiHeadAttention(2, 8, rngs=nnx.Rngs(0))
    x, cache = jnp.ones((1, 2, 8)), layer.empty_cache(1, 4)
    assert cache.keys.dtype == jnp.float32
    for name, value in {"inputs_k": x, "kv_positions": jnp.arange(2)}.items():
        says = f"{name}: expected None in a call with a cache"
        expect(ValueError, says, layer, x, cache=cache, **{name: value})
    says = "valid: expected None in a call without a cache"
    expect(ValueError, says, layer, x, valid=np.ones((1, 2), bool))
    for wrong in (x[0], jnp.ones((2, 2, 8))):
        says = f"inputs_q: expected [B, T, D] with B = 1 as in the cache, got {list(wrong.shape)}"
        expect(ValueError, says, layer, wrong, cache=cache)
    expect(NotImplementedError, "captured", jattn.nn.capture_weights, layer, x, cache=cache)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("chunk", [None, 1, 3])
def test_a_window_of_nothing_shows_each_token_itself(chunk):
    cache = RollingCache.create(2, 0, 1, 4, chunk=chunk)
    for T in (1, 2, 4):
        (key,) = normal_arrays((2, T, 1, 4), dtype=jnp.float32, seed=T)
        out, cache = attended(cache, key, key, key)
        np.testing.assert_array_equal(out, key)
    assert not cache.overflowed.any()
    says = "window: expected window >= 0, got -1"
    expect(ValueError, says, RollingCache.create, 2, -1, 1, 4)
