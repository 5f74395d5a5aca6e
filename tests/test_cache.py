"""Caches: token by token, in chunks and at once are the same, and nothing is lost silently.

The expected result is attention by the formula over each row's whole sequence.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jattn
import jattn.nn
from jattn import masks, positions, scores
from jattn.cache import Cache, DenseCache, PagedCache, RollingCache
from tests import oracle
from tests.conftest import assert_trees_close, normal_arrays, quick_jit


B, T, N, K, H, V = 3, 13, 6, 3, 4, 5
W = 4  # of the window
LENGTHS = np.array([13, 7, 1])

CACHES = {
    "dense": lambda chunk: DenseCache.create(B, T + 3, K, H, V),
    "rolling": lambda chunk: RollingCache.create(B, W, K, H, V, chunk=chunk),
    "paged": lambda chunk: PagedCache.create(B, T + 3, K, H, V, page_size=4),
}
every_cache = pytest.mark.parametrize("kind", CACHES)


def tokens(seed: int = 0, T: int = T) -> list[jax.Array]:
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


def encoded(encoding: str, x: Any, places: Any) -> Any:
    if "learned" in encoding:
        rows = LEARNED[jnp.clip(places, 0, T - 1)]
        x = x + jnp.broadcast_to(rows, (B, *rows.shape[-2:]))[:, :, None]
    return positions.rotary(x, places) if "rotary" in encoding else x


def score_of(encoding: str) -> Any:
    return scores.Alibi(scores.alibi_slopes(N)) if "alibi" in encoding else None


@functools.cache
def formula(mask: str, encoding: str, kind: str) -> np.ndarray:
    """Attention over whole sequences; a rolling cache sees its window."""
    query, key, value = tokens()
    query, key = (encoded(encoding, x, jnp.arange(T)) for x in (query, key))
    seen = MASKS[mask](IDS, IDS)
    seen = seen & masks.Window(left=W) if kind == "rolling" else seen
    options = {"mask": seen, "score": score_of(encoding), "implementation": "reference"}
    return np.asarray(jattn.attention(query, key, value, **options))


@functools.partial(quick_jit, static_argnames=("mask", "encoding"))
def decode_chunk(cache: Cache, mask: str, encoding: str, valid: Any, *qkv: Any) -> Any:
    query, key, value = qkv
    places = cache.next_positions(query.shape[1], valid)
    query, key = (encoded(encoding, x, places) for x in (query, key))
    slots = cache.append(key, value, valid).kv_positions  # of the cache that will be read
    slots = jnp.arange(cache.capacity)[None] if slots is None else slots
    ids = (
        IDS[jnp.clip(x, 0, T - 1)] for x in (places, jnp.broadcast_to(slots, (B, cache.capacity)))
    )
    options = {"mask": MASKS[mask](*ids), "score": score_of(encoding)}
    return jattn.cached_attention(query, key, value, cache, valid=valid, **options)


def decoded(cache: Cache, mask: str, encoding: str, size: int) -> Any:
    """Returns the output of each real token, `[B, T, N, V]` with NaN elsewhere, and the cache. It
    gets the tokens in chunks of one size."""
    out = np.full((B, T, N, V), np.nan, np.float32)
    for start in range(0, T, size):
        places = np.arange(start, start + size)
        valid = places < LENGTHS[:, None]
        # Padding is nothing.
        chunk = [np.asarray(x)[:, np.minimum(places, T - 1)] for x in tokens()]
        chunk = [np.where(valid[..., None, None], x, np.nan) for x in chunk]
        got, cache = decode_chunk(cache, mask, encoding, valid, *chunk)
        for b, t in np.argwhere(valid):
            out[b, places[t]] = got[b, t]
    return out, cache


@quick_jit
def attended(cache: Cache, query: Any, key: Any, value: Any) -> Any:
    return jattn.cached_attention(query, key, value, cache, mask=masks.Causal())


SIZES = (1, W + 1, T)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kind", CACHES)
def test_in_any_chunks_it_is_attention_to_the_whole(kind, mask):
    encoding = "rotary, alibi, learned"
    want = formula(mask, encoding, kind)
    real = np.arange(T) < LENGTHS[:, None]
    for size in SIZES if mask == "causal" else (2, T):
        got, cache = decoded(CACHES[kind](size), mask, encoding, size)
        np.testing.assert_allclose(got[real], want[real], rtol=0, atol=2e-6, err_msg=f"{size}")
        np.testing.assert_array_equal(cache.lengths, LENGTHS)
        assert not cache.overflowed.any()


@pytest.mark.one_in(3)
@every_cache
def test_more_than_a_chunk_goes_in_pieces(kind):
    """A rolling cache takes 3 of the 13 tokens at a time; the mask is an array."""
    query, key, value = tokens()
    rows = jnp.asarray(np.random.default_rng(4).random((B, 1, T, 1)) < 0.7)
    window = masks.Window(left=W) if kind == "rolling" else masks.Full()
    want = jattn.attention(
        query, key, value, mask=masks.Causal() & window & rows, implementation="reference"
    )
    cache = CACHES[kind](3)
    got, cache = jattn.cached_attention(
        query, key, value, cache, mask=masks.Causal() & masks.Dense(rows)
    )
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-6)
    np.testing.assert_array_equal(cache.lengths, [T] * B)


@pytest.mark.parametrize("lengths", [5, jnp.array([0, 7, 5]), np.array([4, 250, 0], np.uint8)])
def test_places_of_queries_go_on_from_piece_to_piece(lengths):
    """Pieces have 3 tokens; place 5 lies within the second."""
    query, key, value = tokens()
    mask = masks.Causal() & ~(masks.Lengths(q=lengths) & masks.Window(left=1))
    want = jattn.attention(query, key, value, mask=mask & masks.Window(left=W))
    got, _ = jattn.cached_attention(query, key, value, CACHES["rolling"](3), mask=mask)
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-6)


def test_blocks_of_places_do_not_go_in_pieces():
    query, key, value = tokens()
    mask = masks.Blocks(jnp.ones((T, W + 3), bool), 1)
    with pytest.raises(NotImplementedError, match=r"mask: .*no more tokens than the cache's chunk"):
        jattn.cached_attention(query, key, value, CACHES["rolling"](3), mask=mask)


@pytest.mark.parametrize(
    "kind", ["dense", "rolling", pytest.param("paged", marks=pytest.mark.slow)]
)
def test_weights_are_by_slot(kind):
    """A rolling cache takes the 13 tokens 3 at a time; key p lies in slot p mod S."""
    query, key, value = tokens()
    cache, pieces = poisoned(CACHES[kind](3), np.nan), []
    for t in range(0, T, 3):
        q, k, v = (x[:, t : t + 3] for x in (query, key, value))
        (out, lse), cache = jattn.cached_attention(
            q, k, v, cache, mask=masks.Causal(), return_lse=True
        )
        weights = jattn.attention_weights(q, cache, mask=masks.Causal())
        pieces.append((out, *(jnp.swapaxes(x, 1, 2) for x in (lse, weights))))
    if kind == "rolling":
        assert cache.keys.shape == (B, K, W + 3, H)
        np.testing.assert_array_equal(np.sort(cache.kv_positions[0]), np.arange(T - W - 3, T))
    out, lse, weights = (jnp.concatenate(x, axis=1) for x in zip(*pieces, strict=True))
    lse, weights = (jnp.swapaxes(x, 1, 2) for x in (lse, weights))
    past = W if kind == "rolling" else T
    arrays: Any = (np.asarray(x, np.float64) for x in (query, key, value))
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
    weights = jattn.attention_weights(query, lost, **dropout)
    assert weights.shape == (B, N, T, T)
    assert np.isnan(weights[1]).all()
    assert 0.3 < np.mean(weights[np.array([0, 2])] == 0) < 0.7
    for b in (0, 2):
        heads = np.repeat(value[b], N // K, axis=1)
        want = np.einsum("nts,snv->tnv", weights[b], heads)
        np.testing.assert_allclose(out[b], want, rtol=0, atol=2e-6)


def poisoned(cache: Any, poison: float) -> Any:
    full = {name: jnp.full_like(getattr(cache, name), poison) for name in ("keys", "values")}
    return dataclasses.replace(cache, **full)


@pytest.mark.one_in(3)
@every_cache
@pytest.mark.parametrize("poison", [np.nan, np.inf, 1e38])
@pytest.mark.parametrize("size", [1, 3, T])
def test_what_lies_beyond_the_length_changes_nothing(kind, poison, size):
    clean, _ = decoded(CACHES[kind](size), "causal", "none", size)
    dirty, _ = decoded(poisoned(CACHES[kind](size), poison), "causal", "none", size)
    np.testing.assert_allclose(dirty, clean, rtol=0, atol=1e-6)


def filled(kind: str, lengths: np.ndarray) -> Any:
    """A cache with the first tokens of each row."""
    valid = np.arange(T) < lengths[:, None]
    return CACHES[kind](T).append(*tokens()[1:], valid)


@pytest.mark.parametrize("kind", ["dense", "paged"])
def test_a_write_past_the_end_raises_where_lengths_are_known(kind):
    cache = filled(kind, LENGTHS)
    _, key, value = tokens(1)
    cache = cache.append(key[:, :3], value[:, :3])
    with pytest.raises(
        ValueError, match="capacity = 16 tokens in each batch row, got 17 in batch row 0"
    ):
        cache.append(key[:, :1], value[:, :1])
    only_others = np.array([[False], [True], [True]])
    assert cache.append(key[:, :1], value[:, :1], only_others).lengths.tolist() == [16, 11, 5]


def test_a_rolling_cache_takes_no_more_than_its_chunk():
    cache = RollingCache.create(B, W, K, H, V, chunk=2)
    _, key, value = tokens()
    with pytest.raises(ValueError, match=r"chunk = 2 .* got 3"):
        cache.append(key[:, :3], value[:, :3])


@pytest.mark.slow
def test_pages_are_shared_until_they_are_written_to():
    page = 4
    single = PagedCache.create(1, 16, K, H, V, page_size=page, num_pages=8)
    _, key, value = tokens()
    single = single.append(key[:1, :6], value[:1, :6])  # a full page and half of another
    assert int((single.pages_held() > 0).sum()) == 2
    beams = single.reorder(jnp.zeros(B, int))
    assert beams.keys is single.keys
    assert sorted(np.asarray(beams.pages_held())) == [0, 0, 0, 0, 0, 0, 3, 3]
    longer = jax.jit(lambda c, k, v: c.append(k, v))(beams, key[:, 6:7], value[:, 6:7])
    # The first page stays shared; each row has its own copy of the other.
    assert sorted(np.asarray(longer.pages_held())) == [0, 0, 0, 0, 1, 1, 1, 3]
    for b in range(B):
        assert_keys(longer, b, key[0, :6], key[b, 6:7])
    alone = longer.reorder(jnp.array([1, 1, 1]))
    assert int((alone.pages_held() > 0).sum()) == 2


def assert_keys(cache: PagedCache, b: int, *wanted: Any) -> None:
    keys = np.swapaxes(np.asarray(cache.read()[0]), 1, 2)
    want = np.concatenate(wanted)
    np.testing.assert_array_equal(keys[b, : len(want)], want)


@pytest.mark.slow
def test_no_free_page_is_an_overflow():
    cache = PagedCache.create(2, 8, K, H, V, page_size=4, num_pages=3)
    _, key, value = (x[:2] for x in tokens())
    cache = cache.append(key[:, :4], value[:, :4])
    with pytest.raises(
        ValueError, match="no free page for batch row 1, all num_pages = 3 are in use"
    ):
        cache.append(key[:, 4:5], value[:, 4:5])
    longer = jax.jit(lambda c, k, v: c.append(k, v))(cache, key[:, 4:5], value[:, 4:5])
    assert longer.overflowed.tolist() == [False, True]
    assert_keys(longer, 0, key[0, :5])
    assert_keys(longer, 1, key[1, :4])


@pytest.mark.one_in(3)
@every_cache
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_cache_may_have_a_dtype_of_its_own(kind, dtype):
    narrow: Any = jax.tree.map(
        lambda x: x.astype(dtype) if x.dtype == jnp.float32 else x, CACHES[kind](T)
    )
    query, key, value = tokens()
    out, longer = attended(narrow, query, key, value)
    assert longer.keys.dtype == longer.values.dtype == jnp.dtype(dtype)
    assert out.dtype == jnp.float32
    key, value = (x.astype(dtype).astype(jnp.float32) for x in (key, value))
    want, _ = attended(CACHES[kind](T), query, key, value)
    np.testing.assert_allclose(out, want, rtol=0, atol=1e-6)


@every_cache
def test_steps_are_traced_once(kind):
    traces = 0

    @jax.jit
    def run(cache, query, key, value):
        nonlocal traces
        traces += 1
        return jattn.cached_attention(query, key, value, cache, mask=masks.Causal())

    cache = CACHES[kind](1)
    for t in range(9):
        _, cache = run(cache, *(x[:, t : t + 1] for x in tokens()))
    assert traces == 1


@every_cache
def test_inside_scan(kind):
    qkv = tuple(jnp.moveaxis(x[:, :, None], 1, 0) for x in tokens())
    call: Any = functools.partial(jattn.cached_attention, mask=masks.Causal())
    _, out = jax.lax.scan(lambda cache, x: call(*x, cache)[::-1], CACHES[kind](1), qkv)
    got = jnp.moveaxis(out[:, :, 0], 0, 1)
    np.testing.assert_allclose(got, formula("causal", "none", kind), rtol=0, atol=2e-6)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("implementation", ["decode", "blockwise"])
@pytest.mark.parametrize("kind", CACHES)
def test_implementations_agree_on_a_cache(implementation, kind):
    cache = filled(kind, np.array([9, 7, 2]))
    query = tokens(1)[0][:, :2]
    bias = scores.Bias(jnp.asarray(np.random.default_rng(2).normal(size=(B, N, 2, cache.capacity))))

    def call(query: Any, keys: Any, values: Any, score: Any, implementation: str) -> Any:
        replaced = dataclasses.replace(cache, keys=keys, values=values)
        return jattn.attention(
            query, replaced, score=score, implementation=implementation, return_lse=True
        )

    @functools.partial(quick_jit, static_argnums=0)
    def everything(implementation: str, *operands: Any) -> Any:
        result, pull = jax.vjp(functools.partial(call, implementation=implementation), *operands)
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
    options = {"page_size": 64} if kind == "paged" else {}
    cls: Any = {"dense": DenseCache, "paged": PagedCache}[kind]
    cache = poisoned(cls.create(rows, S, 1, 4, **options), np.nan)
    shapes = (rows, S, 1, 4), (rows, S, 1, 4), (rows, 1, 2, 4)
    key, value, query = normal_arrays(*shapes, dtype=jnp.float32)
    cache = cache.append(key, value, np.arange(S) < np.array(lengths)[:, None])
    mask = masks.Causal() & masks.Window(left=1000)
    got = quick_jit(lambda query, cache: jattn.attention(query, cache, mask=mask))(query, cache)
    for b, length in enumerate(lengths):
        part = slice(max(0, length - 1001), length)
        want = jattn.attention(
            query[b : b + 1],
            key[b : b + 1, part],
            value[b : b + 1, part],
            implementation="reference",
        )
        np.testing.assert_allclose(got[b : b + 1], want, rtol=0, atol=1e-6)


def test_wrong_arguments_are_named():
    cache = DenseCache.create(B, 8, K, H, V)
    query, key, value = (x[:, :2] for x in tokens())
    for wrong, text in (
        ((key[:2], value[:2]), r"key \[B, T, K, H\] = \[3, T, 3, 4\], got \[2, 2, 3, 4\]"),
        ((key, value[..., :4]), r"value \[B, T, K, V\] = \[3, T, 3, 5\], got \[3, 2, 3, 4\]"),
        ((key, value, np.ones((B, 3), bool)), r"valid \[B, T\] = \[3, 2\], got \[3, 3\]"),
    ):
        with pytest.raises(ValueError, match=text):
            cache.append(*wrong)
    with pytest.raises(ValueError, match="value: expected None in a call on a cache"):
        jattn.attention(query, cache, value)
    with pytest.raises(ValueError, match="kv_positions: expected None in a call on a cache"):
        jattn.attention(query, cache, kv_positions=jnp.arange(8))
    with pytest.raises(TypeError, match="value: expected an array"):
        jattn.attention(query, key)
    with pytest.raises(NotImplementedError, match="'decode': expected at most 8 queries"):
        jattn.attention(jnp.ones((B, 9, N, H)), cache, implementation="decode")
    rolling = RollingCache.create(B, W, K, H, V, chunk=1)
    with pytest.raises(NotImplementedError, match=r"dropout_rate: expected 0 .* chunk of 1 tokens"):
        options = {"dropout_rate": 0.5, "dropout_key": jax.random.key(0)}
        jattn.cached_attention(query, key, value, rolling, **options)
    with pytest.raises(ValueError, match="length: expected length >= 1, got 0"):
        DenseCache.create(B, 0, K, H)


def test_explain_knows_caches():
    cache = DenseCache.create(B, 8, K, H, V)
    few, many = (jnp.ones((B, n, N, H), jnp.float32) for n in (1, 9))
    explained = jattn.explain(few, cache)
    assert next(iter(explained)) == "decode"
    assert explained["decode"] is explained["blockwise"] is explained["reference"] is None
    assert explained.runs == "decode" and not explained.by_name, (
        "None takes native where decode cannot"
    )
    assert "float32" in str(explained["cudnn"])
    assert "at most 8" in str(jattn.explain(many, cache)["decode"])


@pytest.mark.slow
@every_cache
def test_a_module_token_by_token_is_the_module_at_once(kind):
    """The module has everything that depends on positions: rotation, a learned bias, a mask."""
    table = jnp.asarray(np.random.default_rng(5).normal(size=(8, 4)), jnp.float32)
    options: Any = {"num_kv_heads": 2, "rotary": True, "normalize_qk": "rms"}
    options["mask"] = masks.Causal() & masks.Window(left=W)
    options["score"] = jattn.nn.LearnedScore(scores.RelativeBias(table, max_distance=16))
    layer = jattn.nn.MultiHeadAttention(4, 16, rngs=nnx.Rngs(0), **options)
    x = jnp.asarray(np.random.default_rng(6).normal(size=(2, T, 16)), jnp.float32)
    classes: Any = {"dense": DenseCache, "rolling": RollingCache, "paged": PagedCache}
    cache = layer.empty_cache(2, W if kind == "rolling" else T, classes[kind])
    graph, state = nnx.split(layer)

    @quick_jit
    def run(x: Any, cache: Any, valid: Any) -> Any:
        return nnx.merge(graph, state)(x, cache=cache, valid=valid)

    left = np.array([[True, True, True], [False, True, True]])  # a prompt, padded on the left
    rows = x.at[1].set(jnp.roll(x[1], 1, axis=0))  # the second row after its padding
    out, cache = run(rows[:, :3], cache, left)
    parts = [out]
    for t in range(3, T):
        out, cache = run(rows[:, t : t + 1], cache, None)
        parts.append(out)
    got, want = jnp.concatenate(parts, axis=1), layer(x)
    np.testing.assert_allclose(got[0], want[0], rtol=0, atol=2e-6)
    np.testing.assert_allclose(got[1, 1:], want[1, :-1], rtol=0, atol=2e-6)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "places, norm", [("learned", "post"), ("sinusoidal", "pre"), (None, "post")]
)
def test_the_transformer_step_by_step_is_the_transformer_at_once(places, norm):
    widths: Any = {"features": 16, "num_heads": 4, "feed_forward": 32, "max_length": 20}
    widths |= {"encoder_layers": 1, "decoder_layers": 2, "dropout_rate": 0.1}
    model = jattn.nn.Transformer(11, 12, positions=places, norm=norm, rngs=nnx.Rngs(0), **widths)
    rng = np.random.default_rng(7)
    source, target = (jnp.asarray(rng.integers(0, 11, (3, n))) for n in (6, 9))
    lengths = jnp.array([6, 2, 4])
    padding = masks.Lengths(kv=lengths)
    options = {"source_mask": padding, "cross_mask": padding, "deterministic": True}
    graph, state = nnx.split(model)
    want = quick_jit(lambda state: nnx.merge(graph, state)(source, target, **options))(state)

    @quick_jit
    def begin(state):
        model = nnx.merge(graph, state)
        memory = model.encode(source, mask=padding, deterministic=True)
        return model.decoder.start(memory, 9, memory_lengths=lengths)

    @quick_jit
    def run(state, ids, caches):
        return nnx.merge(graph, state).step(ids, caches, deterministic=True)

    for sizes in ([1] * 9, [4, 1, 3, 1]):
        caches = begin(state)
        parts, begun = [], 0
        for size in sizes:
            logits, caches = run(state, target[:, begun : begun + size], caches)
            parts.append(logits)
            begun += size
        np.testing.assert_allclose(jnp.concatenate(parts, axis=1), want, rtol=0, atol=5e-6)
    swapped = jnp.array([2, 0, 0])
    _, caches = run(state, target[:, :4], begin(state))
    for t in range(4, 8):
        _, caches = run(state, target[:, t : t + 1], caches)
    picked = [cache.reorder(swapped) for cache in caches]
    logits, _ = run(state, target[swapped, 8:], picked)
    np.testing.assert_allclose(logits[:, 0], want[swapped, 8], rtol=0, atol=5e-6)


def test_modules_refuse_what_does_not_go_with_a_cache():
    layer = jattn.nn.MultiHeadAttention(2, 8, rngs=nnx.Rngs(0))
    x, cache = jnp.ones((1, 2, 8)), layer.empty_cache(1, 4)
    assert cache.keys.dtype == jnp.float32
    places = jnp.arange(2)
    wrong: dict[str, Any] = {"inputs_k": x, "kv_positions": places}
    for name, array in wrong.items():
        with pytest.raises(ValueError, match=f"{name}: expected None in a call with a cache"):
            layer(x, cache=cache, **{name: array})
    with pytest.raises(ValueError, match="valid: expected None in a call without a cache"):
        layer(x, valid=np.ones((1, 2), bool))  # pyright: ignore[reportArgumentType]
    with pytest.raises(NotImplementedError, match="captured"):
        jattn.nn.capture_weights(layer, x, cache=cache)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("chunk", [None, 1, 3])
def test_a_window_of_nothing_shows_each_token_itself(chunk):
    cache = RollingCache.create(2, 0, 1, 4, chunk=chunk)
    for T in (1, 2, 4):
        key = jax.random.normal(jax.random.key(T), (2, T, 1, 4), jnp.float32)
        out, cache = jattn.cached_attention(key, key, key, cache, mask=masks.Causal())
        np.testing.assert_array_equal(out, key)
    assert not cache.overflowed.any()
    with pytest.raises(ValueError, match="window: expected window >= 0, got -1"):
        RollingCache.create(2, -1, 1, 4)
