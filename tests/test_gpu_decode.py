"""The kernel in Mosaic that decodes from caches, interpreted on a CPU and lowered for a Hopper,
against the formula, in float64, for the tokens in each row of the cache."""

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn import masks, scores, tuning
from jattn.cache import Cache, DenseCache, PagedCache, Quantized, RollingCache
from jattn.cache.quantized import LARGEST, converted
from jattn.kernels.gpu.mosaic.kernels import ampere, decode, hopper
from jattn.spec import Shapes
from tests.arrays import assert_accurate
from tests.conftest import quick_jit
from tests.devices import pretend_gpu
from tests.kernels import appended, lying_mask, made, of_tokens
from tests.oracle import error
from tests.test_hopper import (
    _compiled_once,  # noqa: F401
    assert_within,
    each_kernel,
    translated,
)
from tests.test_tpu_decode import poisoned


B, N, K, H, V = 3, 4, 2, 64, 128
LENGTHS = np.array([130, 75, 0])  # the middle one ends within a tile
TOKENS = 130


def normal(*shape: int) -> Any:
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape), jnp.bfloat16)


CACHES: dict[str, Any] = {
    "dense": lambda dtype: DenseCache.create(B, 192, K, H, V, dtype),
    "dense_odd": lambda dtype: DenseCache.create(B, 136, K, H, V, dtype),
    "rolling": lambda dtype: RollingCache.create(B, 50, K, H, V, dtype, chunk=30),
    "paged": lambda dtype: PagedCache.create(B, 144, K, H, V, dtype),
    "paged_wide": lambda dtype: PagedCache.create(B, 256, K, H, V, dtype, page_size=128),
}
KEYS, VALUES = normal(B, TOKENS, K, H), normal(B, TOKENS, K, V)


def filled(
    kind: str, unwritten: float | None = None, dtype: Any = jnp.bfloat16, values: Any = VALUES
) -> Cache:
    """A cache to which each row was appended in pieces, so that pages alternate. Slots without a
    token hold `unwritten` or, if the cache is quantised, have that scale."""
    cache = CACHES[kind](dtype)
    for start in range(0, TOKENS, 26):
        piece = slice(start, start + 26)
        valid = np.arange(start, start + 26) < LENGTHS[:, None]
        cache = appended(cache, KEYS[:, piece], values[:, piece], valid)
    return cache if unwritten is None else poisoned(cache, unwritten)


def stored(x: Any, dtype: Any) -> Any:
    """Tokens as a cache of this dtype stores them, in float64."""
    x = converted(x, jnp.dtype(dtype))
    return (x.dequantized if isinstance(x, Quantized) else x.astype)(jnp.float64)


def functions(T: int, S: int) -> Any:
    """A mask and scores of heads, batch rows and positions: looked up, and along heads."""
    by_row = jnp.asarray([2, 0, 1], jnp.int32)
    return {
        "mask": masks.Causal()
        & masks.Predicate(lambda b, h, q, kv, x: (q + kv + h + x[b]) % 3 != 0, by_row),
        "score": scores.Alibi(jnp.bfloat16([0.5, 0.25, 0.125, 0.0625]))
        >> scores.SoftCap(5.0)
        >> scores.Score(
            lambda s, b, h, q, kv, x: s * x[h].astype(s.dtype) + (q % 7).astype(s.dtype),
            jnp.bfloat16([0.5, 1.0, 1.5, 2.0]),
        )
        >> scores.RelativeBias(normal(32, N))
        >> scores.Temperature(jnp.bfloat16([1.0, 2.0, 0.5, 1.5])),
    }


def arrays(T: int, S: int) -> Any:
    """Arrays along all axes, and along some of them."""
    rng = np.random.default_rng(1)
    seen, by_query = rng.random((1, N, 1, 256)) < 0.7, rng.random((B, 1, T, 256)) < 0.9
    return {
        "mask": masks.Dense(jnp.asarray(seen[..., :S]))
        & masks.Dense(jnp.asarray(by_query[..., :S]))
        & masks.Lengths(q=jnp.asarray([T, T - 1, T])),
        "score": scores.Bias(normal(B, N, T, 256)[..., :S])
        >> scores.Bias(normal(1, 1, T, 1))
        >> scores.Bias(normal(1, N, 1, 256)[..., :S]),
    }


def full_for_some(T: int, S: int) -> Any:
    """A mask of which the first head sees all keys: its tiles need no mask, its group's do."""
    seen = np.random.default_rng(2).random((1, N, 1, 256)) < 0.7
    seen[:, 0] = True
    return {"mask": masks.Dense(jnp.asarray(seen[..., :S]))}


def causal(T: int, S: int) -> Any:
    return {"mask": masks.Causal(), "scale": 0.3}


class DecodeCall(NamedTuple):
    """A kind of cache, T queries, and the keyword arguments of a call for T queries and S keys."""

    kind: str
    T: int
    rules: Any


CALLS = [
    DecodeCall("dense", 1, causal),
    DecodeCall("dense", 1, full_for_some),
    DecodeCall("dense", 3, functions),
    DecodeCall("dense_odd", 2, arrays),
    DecodeCall("dense", 40, functions),  # one head at a time
    DecodeCall("rolling", 1, functions),
    DecodeCall("paged", 1, functions),
    DecodeCall("paged", 3, arrays),
    DecodeCall("paged_wide", 1, causal),
]


def program(call: DecodeCall, capacity: int, implementation: str, **options: Any) -> Any:
    """A compiled function from a cache to out and lse of the queries of the last tokens."""
    rules = call.rules(call.T, capacity) | options
    attend = functools.partial(jattn.attention, implementation=implementation, return_lse=True)
    return quick_jit(functools.partial(attend, normal(B, call.T, N, H), **rules))


def decoded(call: DecodeCall, cache: Cache, implementation: str, **options: Any) -> Any:
    return program(call, cache.capacity, implementation, **options)(cache)


def formula(
    call: DecodeCall, dtype: Any = jnp.bfloat16, values: Any = VALUES, computed: Any = jnp.float64
) -> Any:
    """Returns out and lse by the formula in float64 for the tokens in a cache of this dtype."""
    tokens = stored(KEYS, dtype), stored(values, dtype)
    rules, window = call.rules(call.T, TOKENS), 50 if call.kind == "rolling" else None
    return of_tokens(normal(B, call.T, N, H), *tokens, LENGTHS, rules, window, computed)


@pytest.fixture
def read_in_place(monkeypatch):
    """Counts the runs of the kernel."""
    counted: list[Any] = []
    ours = decode._launch
    monkeypatch.setattr(decode, "_launch", lambda *x: counted.append(x) or ours(*x))
    return counted


@pytest.mark.one_in(12)
@each_kernel
@pytest.mark.parametrize("call", CALLS, ids=lambda x: f"{x.kind}-{x.T}-{x.rules.__name__}")
def test_values(call, implementation, read_in_place):
    got = decoded(call, filled(call.kind), implementation)
    assert len(read_in_place) == 1
    assert_within(got, formula(call))


QUANTISED = tuple(LARGEST)
DTYPES = jnp.dtype(jnp.bfloat16), *QUANTISED
each_quantised_dtype = pytest.mark.parametrize("dtype", QUANTISED, ids=lambda x: x.name)


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    ("kind", "dtype"), [(x, y) for x in ("dense", "paged") for y in DTYPES], ids=str
)
def test_slots_never_written_have_no_effect(kind, dtype):
    """NaN or scales of NaN after the last token, and in pages that no row holds."""
    call, cache = DecodeCall(kind, 2, causal), filled(kind, np.nan, dtype)
    for x in (cache.keys, cache.values):
        assert np.isnan(np.asarray(x.scales if dtype in LARGEST else x, np.float32)).any()
    assert_within(decoded(call, cache, "hopper"), formula(call, dtype))


@pytest.mark.one_in(20)
@pytest.mark.parametrize(
    ("call", "dtype"),
    [(CALLS[i], x) for i in (2, 3, 5, 7, 8) for x in QUANTISED],
    ids=lambda x: getattr(x, "kind", str(x)) if isinstance(x, DecodeCall) else x.name,
)
def test_quantised_caches_are_read_in_place(call, dtype, read_in_place):
    """The error is at most twice that of the formula in bfloat16."""
    got = decoded(call, filled(call.kind, dtype=dtype), "hopper")
    assert len(read_in_place) == 1
    want, plain = formula(call, dtype), formula(call, dtype, computed=jnp.bfloat16)
    assert_within(got, want)
    assert error(got[0], want[0]) <= 2 * error(plain[0], want[0])


@pytest.mark.slow
def test_a_quantised_value_that_is_not_finite_makes_only_those_nan_that_see_it():
    """Also where its weight is 0."""
    far = masks.Causal() & masks.Window(left=60)
    call = DecodeCall("dense", 1, lambda *x: causal(*x) | {"mask": far, "scale": 1e3})
    hidden, seen = (VALUES.at[0, t, 0, 3].set(np.nan) for t in (5, 100))
    run = program(call, 192, "hopper")
    caches = (filled("dense", dtype=jnp.int8, values=x) for x in (VALUES, hidden, seen))
    want, clean, dirty = (run(x)[0] for x in caches)
    np.testing.assert_array_equal(clean, want)
    assert jnp.isnan(dirty[0, :, :2]).all()
    assert error(dirty[1:], want[1:]) <= 1e-2 and error(dirty[0, :, 2:], want[0, :, 2:]) <= 1e-2


@pytest.mark.one_in(6, slow=True)
@each_quantised_dtype
@pytest.mark.parametrize("size", [1e-29, 1e35, 5e37])
def test_quantised_values_of_any_size_keep_their_digits(dtype, size):
    values, call = VALUES.astype(jnp.float32) * size, DecodeCall("dense", 1, causal)
    got, _ = decoded(call, filled("dense", dtype=dtype, values=values), "hopper")
    want, _ = formula(call, dtype, values)
    assert error(got.astype(jnp.float64) / size, want / size) <= 1e-2


@pytest.mark.one_in(6, slow=True)
@each_kernel
def test_tiles_that_the_mask_empties_are_not_read(implementation, read_in_place):
    """Tiles that the map calls empty are not visited, tiles that it calls full are not masked."""
    keys, values = (x[:, :128].at[:, 64:].set(jnp.nan) for x in (KEYS, VALUES))
    everything = masks.Predicate(lambda b, h, i, j: i >= 0)
    # Each mask replaces the call's causal mask.
    cases = (
        (DenseCache.of(keys, values), lying_mask(64)),
        (DenseCache.of(keys[:, :64], values[:, :64]), everything),
    )
    call = DecodeCall("dense", 1, causal)
    lied, wanted = (decoded(call, cache, implementation, mask=mask) for cache, mask in cases)
    assert_accurate(lied, wanted, 1e-6)
    assert len(read_in_place) == 2


@pytest.mark.one_in(3, slow=True)
@pytest.mark.parametrize(
    ("implementation", "kind", "dtype"),
    [("hopper", "dense", DTYPES[0]), *(("hopper", "paged", x) for x in QUANTISED)]
    + [(x, "dense", DTYPES[0]) for x in ("ampere", "blackwell")],
    ids=str,
)
def test_long_rows_go_in_parts(monkeypatch, implementation, kind, dtype, read_in_place):
    monkeypatch.setattr(decode, "_TILES_EACH", 1)
    with tuning.using(gpu_tiles_each=1):
        call = DecodeCall(kind, 1, causal)
        got = decoded(call, filled(kind, dtype=dtype), implementation)
    assert [x[2] for x in read_in_place] == [3]
    assert_within(got, formula(call, dtype))


@pytest.mark.slow
def test_vmap_is_more_programs(read_in_place):
    call, cache = DecodeCall("paged", 1, causal), filled("paged")
    queries = jnp.stack([normal(B, 1, N, H), -normal(B, 1, N, H)])
    attend = functools.partial(jattn.attention, implementation="hopper", mask=masks.Causal())
    mapped = quick_jit(jax.vmap(attend, (0, None)))(queries, cache)
    single = decoded(call, cache, "hopper", scale=None)[0]
    np.testing.assert_array_equal(mapped[0], single)
    assert error(mapped[1], single) > 0.1


@pytest.mark.slow
def test_it_is_translated_for_cuda():
    kinds = itertools.cycle((("dense_odd", 3), ("paged", 1)))
    for number, ((kind, T), dtype) in enumerate(zip(kinds, DTYPES, strict=False)):
        rule = functions if number < 2 else causal
        query, cache = normal(B, T, N, H), CACHES[kind](dtype)
        attend = functools.partial(
            jattn.attention, implementation="hopper", **rule(T, cache.capacity)
        )
        assert "jattn_mosaic_decode" in translated(attend, (query, cache))


@pytest.mark.parametrize(
    ("kernel", "capability", "changes", "words"),
    [
        (hopper, None, {}, None),
        (hopper, None, {"T": 65}, "1 to 64 queries, got 65"),
        (hopper, None, {"dtype": jnp.float32}, "a cache of bfloat16, got float32"),
        (hopper, None, {"dtype": jnp.int8}, None),
        (hopper, None, {"dtype": jnp.int4, "size": 64}, None),
        (hopper, None, {"dtype": jnp.int8, "query": jnp.float16}, "a cache of int8, got float16"),
        (hopper, None, {"dtype": jnp.int8, "size": 192}, "up to 128 for a cache of int8, got 192"),
        (hopper, None, {"size": 80}, "multiples of 64, got 64 and 80"),
        (hopper, None, {"page_size": 12}, "pages of a multiple of 8 tokens, got 12"),
        (hopper, None, {"score": lambda s, b, h, q, kv: jnp.arctan(s)}, "needs atan"),
        (ampere, "8.0", {}, "pages of a multiple of 32 tokens, got 16"),  # which threads copy
        (ampere, "9.0", {}, None),
        (ampere, None, {"dtype": jnp.int8}, "of bfloat16, as this kernel does not convert int8"),
    ],
    ids=lambda x: getattr(x, "__name__", "").rpartition(".")[2] or None,
)
def test_reasons_not_to_read_a_cache_in_place(monkeypatch, kernel, capability, changes, words):
    if capability:
        pretend_gpu(monkeypatch, capability)
    defaults = {"T": 1, "size": V, "dtype": jnp.bfloat16, "query": jnp.bfloat16, "page_size": 16}
    T, size, dtype, query, page = (changes.get(*x) for x in defaults.items())
    cache = PagedCache.create(B, 192, K, H, size, dtype=dtype, page_size=page)
    shapes = Shapes((B,), T, cache.capacity, N, K, H, size, jnp.dtype(query))
    call = made(shapes, mask=cache.mask(), score=changes.get("score"))
    reason = kernel.READER.unreadable("cuda" if capability else "cpu", call, cache)
    assert (words in str(reason)) if words else reason is None
