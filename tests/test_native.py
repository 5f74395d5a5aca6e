"""The contract for the kernel in C++ with tiny tiles, and its behaviour with the usual ones."""

import functools
import itertools
import re
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn import masks, scores, tuning
from jattn._pytree import flatten_batch
from jattn.cache import DenseCache, PagedCache
from jattn.call import make
from jattn.kernels import registry
from jattn.kernels.cpu import built_in
from tests import test_contract as contract
from tests.arrays import assert_accurate, temporaries
from tests.cases import CASES, DTYPES, CaseInputs, inputs
from tests.conftest import normal_arrays, out_and_gradients, quick_jit
from tests.kernels import assert_dead_rows_are_empty, poisoned, poisons_of
from tests.test_contract import attend, on_device


@functools.cache
def refusal(name: str) -> str | None:
    """The kernel's reason to refuse a case in any dtype. Without normalizers there is one."""
    case = CASES[name]
    if case.normalizer is None:
        return "no pairs of queries and keys" if name == "no_keys_in_arrays" else None
    x = on_device(inputs(case, "float32"))
    call = make(x.q, x.k, x.v, **case.rules(x.operands, x.parameters))
    return registry.KERNELS["native"].kernel.normalizers(call)


def refused(name: str, dtype: str = "float32") -> bool:
    """Returns whether the kernel refuses a case, and if so checks that it raises its reason."""
    reason = refusal(name)
    if reason is None:
        return False
    with pytest.raises(NotImplementedError, match=f"'native'.*{re.escape(reason)}"):
        attend("native", CASES[name], on_device(inputs(CASES[name], dtype)))
    return True


@pytest.fixture(autouse=True)
def _tiny_tiles(request):
    """Tiles of 16 queries and 8 keys, sums over runs of 16."""
    default = request.node.get_closest_marker("default_tiles")
    with nullcontext() if default else tuning.using(cpu_tiles="16, 8, 16", generated_pairs=0):
        yield


def run(name: str, x: CaseInputs) -> contract.CaseResults:
    return jax.tree.map(np.asarray, contract.compiled("native", name)(on_device(x)))


_SELDOM = pytest.mark.slow, pytest.mark.exhaustive
TYPED = [
    pytest.param(*typed, marks=_SELDOM[place % 25 != 3] if place % 91 else ())
    for place, typed in enumerate(itertools.product(CASES, DTYPES))
]


@pytest.mark.parametrize(("name", "dtype"), TYPED)
def test_contract(name, dtype):
    """Further runs, also with masked places poisoned, are equal bit for bit."""
    if refused(name, dtype):
        return
    x = inputs(CASES[name], dtype)
    got = run(name, x)
    contract.assert_same(run(name, x), got)
    contract.assert_accurate(name, dtype, got)
    assert_dead_rows_are_empty(name, got)
    for poison in poisons_of(name) if dtype == "float32" else ():
        contract.assert_same(run(name, poisoned(name, x, poison)), got)


@pytest.mark.one_in(40)
@pytest.mark.parametrize("name", contract.WITH_HIDDEN_KEYS)
def test_poison_reaches_only_who_attends_to_it(name):
    if not refused(name):
        contract.check_reach_of_poison(run, name)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", ["lengths_both", "alibi_causal", "dropout", "causal_segments"])
def test_vmap_is_a_loop(name):
    parts = ("q",), ("k", "v"), ("operands", "d_out"), ("parameters", "d_lse")
    for fields in (CaseInputs._fields, *parts):
        contract.assert_vmap_is_a_loop("native", name, fields)


def _with_gaps(tokens: int, length: int, padding: int) -> np.ndarray:
    """Ids of documents that begin at every hundredth token, with padding after each."""
    places = np.arange(tokens)
    return np.where(places % 100 < length, places // 100, padding)


RULES: dict[str, Any] = {
    "full": {},
    "causal": {"mask": masks.Causal()},
    "window": {"mask": masks.Causal() & masks.Window(left=150)},
    "prefix": {"mask": masks.Causal() | masks.Prefix(70)},
    "segments": {"mask": masks.Segments(np.repeat(np.arange(7), 100), np.arange(600) // 100)},
    "gaps": {"mask": masks.Segments(_with_gaps(700, 60, -1), _with_gaps(600, 70, -1))},
    "gaps of keys": {"mask": masks.Segments(_with_gaps(700, 100, 0), _with_gaps(600, 30, 99))},
    "short segments": {"mask": masks.Segments(np.arange(700) // 5, np.arange(600) // 5)},
    "soft cap": {"mask": masks.Causal(), "score": scores.SoftCap(2.0)},
    "alibi": {"mask": masks.Causal(), "score": scores.Alibi(np.linspace(0.01, 0.5, 6))},
}


BUILT_IN: dict[str, Any] = {
    "full": masks.Full(),
    "empty": masks.Empty(),
    "causal": masks.Causal(),
    "window": masks.Window(left=3),
    "window of both sides": masks.Window(left=2, right=1),
    "window to the right": masks.Window(right=2),
    "widest window": masks.Window(left=2**31 - 1, right=2**31 - 1),
    "prefix": masks.Prefix(np.array([3, 12])),
    "lengths": masks.Lengths(kv=np.array([9, 0])),
    "both lengths": masks.Lengths(q=np.array([4, 6]), kv=np.array([9, 2])),
    "segments": masks.Segments(np.arange(7) // 3, np.arange(11) // 4),
    "padding": masks.Padding(np.arange(22).reshape(2, 11) % 3 > 0),
    "causal window": masks.Causal() & masks.Window(left=3) & masks.Lengths(kv=8),
    "causal segments": masks.Causal() & masks.Segments(np.arange(7) // 3, np.arange(11) // 4),
    "causal prefix": masks.Causal() | masks.Prefix(4),
}


@pytest.mark.parametrize("first", [4, -3, 2**31 - 9, -(2**31)])
@pytest.mark.parametrize("label", BUILT_IN)
def test_runs_of_keys_are_those_of_the_mask(label, first):
    """Queries have consecutive positions, also at both ends of int32."""
    mask, positions, places = BUILT_IN[label], first + np.arange(7), np.arange(11)
    block = built_in.QueryBlock(jnp.asarray(positions, jnp.int32)[None], 11)
    start, stop, ids = built_in.as_key_ranges(flatten_batch(mask, (2,)), block)
    got = (places >= np.asarray(start)[..., None]) & (places < np.asarray(stop)[..., None])
    if ids is not None:
        got = got & (np.asarray(ids[0])[:, :, None] == np.asarray(ids[1])[:, None, :])
    want = np.asarray(mask.dense(7, 11, batch=(2,), q_positions=positions))[:, 0]
    np.testing.assert_array_equal(np.broadcast_to(got, want.shape), want)


def assert_like_reference(sizes: Any, heads: int, mask: Any, parameters: dict[str, Any]) -> None:
    """Values and all gradients for sizes T, S, N, H and V are those of the reference."""
    T, S, N, H, V = sizes
    shapes = (1, T, N, H), (1, S, heads, H), (1, S, heads, V), (1, T, N, V)
    *qkv, d_out = normal_arrays(*shapes, seed=1)

    def both(implementation: str) -> Any:
        call = functools.partial(jattn.attention, implementation=implementation, mask=mask)
        attend = lambda q, k, v, parameters: call(q, k, v, **parameters)  # noqa: E731
        return out_and_gradients(attend, (*qkv, parameters), d_out)

    assert_accurate(both("native"), both("reference"), 2e-14)


@pytest.mark.one_in(12)
@pytest.mark.default_tiles
@pytest.mark.parametrize("label", RULES)
@pytest.mark.parametrize("heads", [1, 2, 6])
def test_several_tiles_by_several_threads(label, heads):
    """Threads share one key head or have several; head sizes are whole vectors or not."""
    parameters = {name: x for name, x in RULES[label].items() if name == "score"}
    assert_like_reference((700, 600, 6, 40, 32), heads, RULES[label].get("mask"), parameters)


@pytest.mark.one_in(12, slow=True)
@pytest.mark.parametrize("label", ["causal", "window", "full"])
@pytest.mark.parametrize("heads", [4, 1, 6, 12])
def test_keys_of_few_heads_are_shared_out(label, heads):
    """Parts of nine runs of keys are summed separately; some queries attend to none of a part."""
    window = masks.Window(left=30 if label != "full" else 150)
    mask = RULES[label].get("mask", masks.Full()) & window
    assert_like_reference((170, 133, 12, 5, 3), heads, mask, {})


@pytest.mark.default_tiles
@pytest.mark.parametrize(("T", "V"), [(96, 64), (32, 20)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_blocks_are_cut_and_outputs_rounded(dtype, T, V):
    """Blocks of two and four vectors, cut at the diagonal; several documents; denormal results."""
    shapes = (2, T, 4, 48), (2, T, 4, 48), (2, T, 4, V)
    q, k, v = normal_arrays(*shapes, dtype=dtype, seed=2)
    scale = np.array([1, 1e-6, 1e4, 1e-3])[:, None]
    v = jnp.asarray(np.float64(v) * scale, dtype)
    mask = masks.Causal() & masks.Segments(np.arange(T) // 24 if T > 32 else np.zeros(T, int))
    call = functools.partial(jattn.attention, mask=mask)
    out = call(q, k, v, implementation="native")
    wide, _ = call(q, k, v, implementation="native", return_lse=True)
    exact = [jnp.asarray(x, jnp.float64) for x in (q, k, v)]
    want = np.asarray(call(*exact, implementation="reference").astype(dtype), np.float64)
    limit = 8 * float(jnp.finfo(dtype).eps) * scale + 1e-7
    assert (abs(np.float64(out) - want) <= limit).all()
    if dtype != "bfloat16":  # whose weights are rounded too, without lse
        np.testing.assert_array_equal(out, wide)


@pytest.mark.default_tiles
def test_xla_rounds_outputs_to_8_bits():
    """The kernel, which writes 16 bits or more, would write past the end of an array of 8."""
    q, k, v = (x.astype(jnp.float8_e5m2) for x in normal_arrays(*[(2, 40, 4, 8)] * 3))
    call = functools.partial(jattn.attention, q, k, v, mask=masks.Causal())
    assert "xf8" not in str(re.findall(r"custom_call.*", jax.jit(call).lower().as_text()))
    out, want = (np.float64(call(implementation=x)) for x in ("native", "reference"))
    np.testing.assert_allclose(out, want, rtol=float(jnp.finfo(q.dtype).eps), atol=1e-4)


@pytest.mark.slow
def test_nothing_of_an_earlier_call_is_left():
    """Threads keep their memory: after a call with NaN, rows whose keys are all masked are 0."""
    (key,) = normal_arrays((4, 20, 3, 8), dtype="float32")
    call = functools.partial(jattn.attention, implementation="native", return_lse=True)
    assert np.isnan(call(key * np.nan, key, key)[0]).all()
    for dead in (masks.Empty(), masks.Lengths(kv=jnp.zeros(4, jnp.int32))):
        out, lse = call(key, key, key, mask=dead)
        assert not np.any(out) and np.all(lse == -np.inf)


@pytest.mark.default_tiles
def test_the_default_on_a_cpu():
    x = on_device(inputs(CASES["causal"]))
    implementations: Any = (None, "native")
    assert "jattn_forward" in jax.jit(jattn.attention).lower(x.q, x.k, x.v).as_text()
    assert next(n for n, why in jattn.explain(x.q, x.k, x.v).items() if not why) == "native"
    contract.assert_same(*(attend(name, CASES["causal"], x) for name in implementations))


@pytest.mark.default_tiles
def test_memory_is_that_of_the_results():
    """1,8,8192,8192,64 causal, forward and backward: nothing that grows with T × S."""

    def both(q: Any, k: Any, v: Any, d: Any) -> Any:
        call = functools.partial(jattn.attention, mask=masks.Causal(), implementation="native")
        return jax.vjp(call, q, k, v)[1](d)

    assert temporaries(both, *[(1, 8192, 8, 64)] * 4) <= 24 * 2**20


def cached(kind: str, K: int, H: int, V: int, dtype: Any) -> tuple[Any, Any]:
    """Queries `[3, 2, 6, H]` and a cache with three rows of different lengths."""
    q, k, v = normal_arrays((3, 2, 6, H), (3, 90, K, H), (3, 90, K, V), seed=7, dtype=dtype)
    valid = jnp.arange(90)[None, :] < jnp.asarray([[90], [3], [41]])
    create = PagedCache.create if kind == "paged" else DenseCache.create
    return q, create(3, 100, K, H, V, dtype).append(k, v, valid)


DECODED: dict[str, Any] = {
    "full": {},
    "window": {"mask": masks.Causal() & masks.Window(left=20)},
    "by head": {"mask": masks.Predicate(lambda b, h, q, kv: (kv + h) % 3 > 0)},
    "nothing": {"mask": masks.Lengths(kv=0)},
    "alibi": {"score": scores.Alibi(jnp.linspace(0.1, 0.6, 6)) >> scores.Alibi(jnp.ones(6))},
}


@pytest.mark.one_in(4, slow=True)
@pytest.mark.parametrize(
    ("K", "H", "V", "dtype"),
    [(6, 16, 16, "float32"), (1, 16, 32, "float32"), (3, 5, 7, "float64"), (1, 8, 3, "float32")],
)
@pytest.mark.parametrize("kind", ["dense", "paged"])
def test_decoding_is_what_it_is_without_the_library(monkeypatch, kind, K, H, V, dtype):
    q, cache = cached(kind, K, H, V, dtype)

    def every(q: Any, cache: Any) -> Any:
        call = functools.partial(jattn.attention, q, cache, return_lse=True)
        return {label: call(**rules) for label, rules in DECODED.items()}

    lowered = quick_jit(every).lower(q, cache)
    assert lowered.as_text().count('@"jattn_decode') == len(DECODED)
    got = lowered.compile()(q, cache)
    monkeypatch.setattr(registry, "READERS", registry.READERS[1:])
    jax.clear_caches()
    without = quick_jit(every).lower(q, cache)
    assert "jattn_decode" not in without.as_text()
    assert_accurate(got, without.compile()(q, cache), 8 * float(jnp.finfo(dtype).eps))


def test_a_cache_of_float16_goes_without_the_library():
    q, cache = cached("dense", 2, 16, 16, jnp.float16)
    assert "jattn_decode" not in jax.jit(jattn.attention).lower(q, cache).as_text()
