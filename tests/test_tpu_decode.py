"""The kernel for TPUs that reads caches in place, interpreted on a CPU.

Its results are compared with the oracle's formula over each row's tokens, which has no slots and
pages. Slots that hold no token of any row are poisoned.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jattn
from experiments.offline import targets
from jattn import masks, scores, tuning
from jattn.cache import Cache, DenseCache, PagedCache, Quantized, RollingCache
from jattn.cache.quantized import LARGEST, converted
from jattn.call import make
from jattn.kernels import registry
from jattn.kernels.tpu import decode
from tests import cases, oracle
from tests.arrays import assert_equal
from tests.conftest import assert_trees_close, quick_jit
from tests.devices import mesh_of, place
from tests.kernels import lying_mask
from tests.oracle import At, Modifier


B, K, H, V = 3, 2, 16, 24
LENGTHS = (290, 0, 77)
SPAN = 320  # positions that arrays along keys cover
WINDOW = 60  # of the rolling cache, which wraps around

CACHES: dict[str, Callable[[], Any]] = {
    "dense": lambda: DenseCache.create(B, 304, K, H, V),  # the last block is not whole
    # Slots lie along the lanes, and blocks are cut from a row.
    "dense_long": lambda: DenseCache.create(B, 512, K, H, V),
    "rolling": lambda: RollingCache.create(B, WINDOW, K, H, V, chunk=100),
    "paged": lambda: PagedCache.create(B, 320, K, H, V, page_size=16, num_pages=67),
    "paged_long": lambda: PagedCache.create(B, 384, K, H, V, page_size=128, num_pages=11),
}
QUANTISED_CACHES: dict[str, Callable[[Any], Any]] = {
    "dense": lambda dtype: DenseCache.create(B, 320, K, H, V, dtype=dtype),
    "dense_long": lambda dtype: DenseCache.create(B, 512, K, H, V, dtype=dtype),
    "rolling": lambda dtype: RollingCache.create(B, WINDOW, K, H, V, chunk=100, dtype=dtype),
    "paged": lambda dtype: PagedCache.create(
        B, 320, K, H, V, dtype=dtype, page_size=32, num_pages=34
    ),
    "paged_long": lambda dtype: PagedCache.create(
        B, 384, K, H, V, dtype=dtype, page_size=128, num_pages=11
    ),
}
every_cache = pytest.mark.parametrize("kind", CACHES)
every_quantised_dtype = pytest.mark.parametrize("dtype", LARGEST, ids=lambda x: x.name)


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


class FilledCache(NamedTuple):
    """A cache, and the tokens of its rows: keys `[B, L, K, H]`, values, and how many are real."""

    cache: Any
    keys: np.ndarray
    values: np.ndarray
    lengths: np.ndarray


@functools.cache
def filled(kind: str, dtype: Any = None, size: float = 1.0) -> FilledCache:
    """Rows of different lengths, with values of a `size`. Pages of a pool are in random order, and
    two rows share some."""
    cache, lengths = QUANTISED_CACHES[kind](dtype) if dtype else CACHES[kind](), np.array(LENGTHS)
    keys, values = normal(1, B, 300, K, H) * 1.5, normal(2, B, 300, K, V) * np.float32(size)
    for start in range(0, 300, 100):
        piece = slice(start, start + 100)
        valid = np.arange(start, start + 100)[None, :] < lengths[:, None]
        cache = cache.append(keys[:, piece], values[:, piece], jnp.asarray(valid))
    if isinstance(cache, PagedCache):
        rows = np.array([0, 1, 0])
        cache, keys, values = cache.reorder(jnp.asarray(rows)), keys[rows], values[rows]
        lengths = lengths[rows]
        new = normal(3, B, 5, K, H), normal(4, B, 5, K, V)
        cache = shuffled(cache.append(*new, jnp.asarray([[True] * 5, [False] * 5, [True] * 5])))
        for b in (0, 2):
            places = slice(lengths[b], lengths[b] + 5)
            keys[b, places], values[b, places] = new[0][b], new[1][b]
        lengths = lengths + np.array([5, 0, 5])
    if dtype:
        keys, values = (np.asarray(converted(x, dtype).dequantized()) for x in (keys, values))
    return FilledCache(poisoned(cache, np.nan), keys, values, lengths)


def shuffled(cache: PagedCache) -> PagedCache:
    """The same cache with its pages in another order."""
    to = np.random.default_rng(5).permutation(cache.num_pages)
    table = np.append(to, cache.num_pages)[np.asarray(cache.table)]
    keys, values = jax.tree.map(lambda x: x[np.argsort(to)], (cache.keys, cache.values))
    return dataclasses.replace(cache, keys=keys, values=values, table=jnp.asarray(table, jnp.int32))


def poisoned(cache: Any, poison: float) -> Any:
    """The same cache with this number in all slots that hold no token of any row: in its floats,
    which of a quantised cache include the scales."""
    pool, _, table = cache.pages()
    is_used, table = np.zeros((pool.shape[0], pool.shape[2]), bool), np.asarray(table)
    for pages, length in zip(table, np.asarray(cache.lengths), strict=True):
        for slot in range(min(int(length), len(pages) * is_used.shape[1])):
            is_used[pages[slot // is_used.shape[1]], slot % is_used.shape[1]] = True
    assert not is_used.all()

    def put(x: Any) -> Any:
        number = poison if jnp.issubdtype(x.dtype, jnp.floating) else 101
        used = is_used[:, None, :, None] if x.ndim == 4 else is_used[:, None]
        return jnp.where(used, x, jnp.asarray(number, x.dtype))

    keys, values = jax.tree.map(put, (cache.keys, cache.values))
    return dataclasses.replace(cache, keys=keys, values=values)


class CacheRule(NamedTuple):
    """Arguments of a call and what they mean to the oracle.

    `build(along, q, N)` makes the arguments for queries at positions `q [B, T]` and N heads, where
    `along(x)` gathers `x [..., positions]` into the order of the cache's slots.
    """

    build: Callable[[Any, np.ndarray, int], dict[str, Any]]
    allowed: Callable[[At], Any] = lambda at: True
    modifier: Callable[[int], Modifier] = lambda N: Modifier()


IDS = np.arange(SPAN) // 37 % 3
PAIRS = normal(6, B, 8, 4, SPAN) > 0
BIAS = 2 * normal(7, B, 8, 4, SPAN)
SLOPES = (0.5, 0.25, 0.0625, 0.03125, 0.1, 0.2, 0.3, 0.4)
BY_HEAD = (0.5, 0.8, -1.0, 1.5, 2.0, 0.0, 0.3, 1.0)


def _mask(build: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    return lambda along, q, N: {"mask": build(along, q, N)}


def _score(build: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    return lambda along, q, N: {"score": build(along, q, N)}


def _window_by_head(b: Any, h: Any, i: Any, j: Any) -> Any:
    return (i - j <= 40 * h) & ((i + 3 * j + h) % 4 != 0)


def _scored(make: Callable[[int], cases.ScoreRule]) -> CacheRule:
    def build(along: Any, q: Any, N: int) -> dict[str, Any]:
        rule = make(N)
        parameters = {name: jnp.asarray(x, jnp.float32) for name, x in rule.parameters.items()}
        scale = {"scale": parameters["scale"]} if "scale" in parameters else {}
        return {"mask": masks.Causal(), "score": rule.build(parameters), **scale}

    def modifier(N: int) -> Modifier:
        oracle_rule = make(N).modifier(make(N).parameters)
        return dataclasses.replace(oracle_rule, by_parameter={})

    return CacheRule(build, lambda at: at.kv <= at.q, modifier)


def _segments(along: Any, q: np.ndarray, N: int) -> Any:
    ids = jnp.asarray(IDS[np.clip(q, 0, None)], jnp.int32)
    return masks.Segments(ids, along(np.broadcast_to(IDS, (B, SPAN))).astype(jnp.int32))


RULES = {
    "none": CacheRule(lambda along, q, N: {}),
    "window": CacheRule(
        _mask(lambda along, q, N: masks.Causal() & masks.Window(left=40)),
        lambda at: at.q - 40 <= at.kv <= at.q,
    ),
    "segments": CacheRule(_mask(_segments), lambda at: IDS[max(at.q, 0)] == IDS[at.kv]),
    "dense": CacheRule(
        _mask(lambda along, q, N: masks.Dense(along(PAIRS[:, :N, : q.shape[1]]))),
        lambda at: PAIRS[at.b, at.h, at.i, at.kv],
    ),
    "predicate": CacheRule(
        _mask(lambda along, q, N: masks.Predicate(_window_by_head)),
        lambda at: _window_by_head(at.b, at.h, at.q, at.kv),
    ),
    "alibi": _scored(lambda N: cases.alibi(SLOPES[:N])),
    "soft_cap_then_alibi": _scored(lambda N: cases.soft_cap(3.0) >> cases.alibi(SLOPES[:N])),
    "relative_bias": _scored(
        lambda N: cases.relative_bias(8, N, bidirectional=False, max_distance=40)
    ),
    "scale_by_head": _scored(lambda N: cases.scale_by_head(BY_HEAD[:N])),
    "bias": CacheRule(
        _score(lambda along, q, N: scores.Bias(along(BIAS[:, :N, : q.shape[1]]))),
        modifier=lambda N: Modifier(value=lambda s, at: s + BIAS[at.b, at.h, at.i, at.kv]),
    ),
    "bias_by_key": CacheRule(
        _score(lambda along, q, N: scores.Bias(along(BIAS[:, :1, :1]))),
        modifier=lambda N: Modifier(value=lambda s, at: s + BIAS[at.b, 0, 0, at.kv]),
    ),
}


def arguments(rule: CacheRule, cache: Any, T: int, N: int) -> dict[str, Any]:
    """The arguments of a call with the rule, whose arrays along keys are in the order of slots."""
    positions = cache.kv_positions
    if positions is None:
        positions = np.broadcast_to(np.arange(cache.capacity), (B, cache.capacity))
    positions = np.clip(np.asarray(positions), 0, SPAN - 1)

    def along(x: np.ndarray) -> Any:
        index = positions.reshape(B, *[1] * (x.ndim - 2), -1)
        index = np.broadcast_to(index, (*x.shape[:-1], positions.shape[1]))
        return jnp.asarray(np.take_along_axis(x, index, -1))

    return rule.build(along, np.asarray(cache.last_positions(T)), N)


def truth(rows: FilledCache, rule: CacheRule, query: np.ndarray) -> oracle.OracleForward:
    """The oracle's result, in float64."""
    T, N = query.shape[1:3]
    window = getattr(rows.cache, "window", None)

    def allowed(at: At) -> bool:
        inside = at.j < rows.lengths[at.b] and (window is None or at.q - window <= at.kv)
        return bool(inside and rule.allowed(at))

    problem = oracle.OracleProblem(
        query,
        rows.keys,
        rows.values,
        allowed=allowed,
        modifier=lambda parameters: rule.modifier(N),
        scale=1.0 if rule is RULES["scale_by_head"] else None,
        q_positions=rows.lengths[:, None] + np.arange(-T, 0),
    )
    zeros = np.zeros((*query.shape[:3], V)), np.zeros((B, N, T))
    with np.errstate(all="ignore"):
        return oracle.plain(problem, *zeros, np.float64)[0]


@pytest.fixture(autouse=True)
def small_blocks():
    with tuning.using(tpu_decode_block=128):
        yield


def attend(query: Any, cache: Any, implementation: str = "tpu", **rules: Any) -> Any:
    """`(out, lse)`, in a program of its own."""

    def call(query: Any, cache: Any, rules: Any) -> Any:
        return jattn.attention(
            query, cache, implementation=implementation, return_lse=True, **rules
        )

    return quick_jit(call)(jnp.asarray(query), cache, rules)


@pytest.mark.one_in(32)
@every_cache
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize(("T", "G"), [(1, 4), (4, 1), (4, 4), (1, 1)])
def test_values(kind, name, T, G):
    rows, rule, N = filled(kind), RULES[name], K * G
    query = normal(8, B, T, N, H)
    out, lse = attend(query, rows.cache, **arguments(rule, rows.cache, T, N))
    want = truth(rows, rule, query)
    assert out.dtype == lse.dtype == jnp.float32
    assert oracle.error(out, want.out) < 4e-6
    assert oracle.error(lse, want.lse) < 4e-6
    assert not np.any(out[1]) and np.all(lse[1] == -np.inf)


@pytest.mark.one_in(15)
@every_quantised_dtype
@pytest.mark.parametrize("kind", QUANTISED_CACHES)
@pytest.mark.parametrize(("name", "T", "G"), [
    ("none", 1, 1),
    ("soft_cap_then_alibi", 4, 2),
    ("predicate", 1, 4),
    ("segments", 4, 1),
    ("bias", 4, 4),
    ("relative_bias", 1, 4),
])  # fmt: skip
def test_quantised_values(kind, name, T, G, dtype):
    rows, rule, N = filled(kind, dtype), RULES[name], K * G
    query = normal(8, B, T, N, H)
    assert reason(jnp.asarray(query), rows.cache) is None
    assert np.isnan(rows.cache.keys.scales).any() and np.isnan(rows.cache.values.scales).any()
    out, lse = attend(query, rows.cache, **arguments(rule, rows.cache, T, N))
    want = truth(rows, rule, query)
    assert oracle.error(out, want.out) < 4e-6
    assert oracle.error(lse, want.lse) < 4e-6
    assert not np.any(out[1]) and np.all(lse[1] == -np.inf)


@pytest.mark.one_in(3)
@every_quantised_dtype
@pytest.mark.parametrize("size", [1e-29, 1e35])
def test_quantised_values_of_any_size(dtype, size):
    rows, query = filled("dense", dtype, size), normal(8, B, 1, 4, H)
    out, _ = attend(query, rows.cache)
    want = truth(rows, RULES["none"], query).out
    # Small weights times small scales are below the smallest number.
    assert oracle.error(np.float64(out) / size, want / size) < (4e-6 if size > 1 else 1e-3)


@pytest.mark.one_in(6)
@every_quantised_dtype
@pytest.mark.parametrize("kind", ["dense", "paged_long"])
@pytest.mark.parametrize("field", ["keys", "values"])
def test_what_is_quantised_and_not_finite_reaches_those_who_attend_to_it(kind, dtype, field):
    """A token that only the last query attends to, and one outside of every window."""
    cache, query = filled(kind, dtype).cache, normal(8, B, 4, 4, H)
    stored, page = getattr(cache, field), cache.pages()[2][0]
    last, bad = int(cache.lengths[0]) - 1, stored
    for token in (last, last - 50):
        slot = page[token // stored.shape[2]], slice(None), token % stored.shape[2]
        bad = Quantized(bad.numbers, bad.scales.at[slot].set(jnp.nan))
    mask = masks.Causal() & masks.Window(left=40)
    broken = dataclasses.replace(cache, **{field: bad})
    (out, lse), (want, lse_want) = (attend(query, x, mask=mask) for x in (broken, cache))
    np.testing.assert_array_equal(out[0, :3], want[0, :3])
    np.testing.assert_array_equal(lse[0, :, :3], lse_want[0, :, :3])
    assert np.isnan(out[0, 3]).all() and np.isnan(lse[0, :, 3]).all()


@every_quantised_dtype
def test_quantised_caches_and_queries_of_16_bits(dtype):
    cache, query = filled("paged", dtype).cache, jnp.asarray(normal(8, B, 1, 4, H), jnp.bfloat16)
    (got, lse), (want, lse_want) = (
        attend(query, cache, x, mask=masks.Causal()) for x in ("tpu", "reference")
    )
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(*(x.astype(jnp.float32) for x in (got, want)), atol=0.02)
    np.testing.assert_allclose(lse, lse_want, atol=0.02)


@pytest.mark.one_in(5)
@every_quantised_dtype
@pytest.mark.parametrize("kind", QUANTISED_CACHES)
def test_reading_of_quantised_caches_lowers_for_a_tpu(kind, dtype):
    cache, query = filled(kind, dtype).cache, jnp.asarray(normal(8, B, 1, 4, H), jnp.bfloat16)
    call = functools.partial(jattn.attention, mask=masks.Causal(), implementation="tpu")
    with jax.enable_x64(False):
        lowered = jax.jit(call).trace(query, cache).lower(lowering_platforms=("tpu",))
    assert lowered.as_text().count("tpu_custom_call") == 1


@pytest.mark.one_in(8, slow=True)
@pytest.mark.parametrize("poison", [np.inf, -1e38])
@pytest.mark.parametrize("kind", ["dense", "paged"])
def test_what_no_row_holds_does_not_exist(kind, poison):
    cache, query = filled(kind).cache, normal(8, B, 4, 8, H)
    rules: Any = {"mask": masks.Causal(), "score": scores.SoftCap(5.0)}
    want = attend(query, cache, **rules)
    assert_equal(attend(query, poisoned(cache, poison), **rules), want)


@pytest.mark.one_in(10, slow=True)
@every_cache
def test_what_is_not_finite_reaches_those_who_attend_to_it(kind):
    """A value that only the last query attends to, and a key outside of every window."""
    cache, query = filled(kind).cache, normal(8, B, 4, 4, H)
    pool, values, table = map(np.asarray, cache.pages())
    keys, values, page = pool.copy(), values.copy(), pool.shape[2]

    def slot_of(token: int) -> tuple[int, Any, int]:
        slot = token % cache.capacity
        return table[0, slot // page], slice(None), slot % page

    last = int(cache.lengths[0]) - 1
    values[slot_of(last)][..., 3] = np.inf
    keys[slot_of(last - 50)], values[slot_of(last - 50)] = np.nan, np.nan
    bad = dataclasses.replace(cache, keys=jnp.asarray(keys), values=jnp.asarray(values))
    mask = masks.Causal() & masks.Window(left=40)
    (out, lse), (want, lse_want) = (attend(query, x, mask=mask) for x in (bad, cache))
    np.testing.assert_array_equal(out[0, :3], want[0, :3])
    np.testing.assert_array_equal(lse[0, :, :3], lse_want[0, :, :3])
    assert np.isnan(out[0, 3]).all() and np.isnan(lse[0, :, 3]).all()
    if not isinstance(cache, PagedCache):  # rows 0 and 2 share pages there
        np.testing.assert_array_equal(out[1:], want[1:])


@pytest.mark.one_in(6, slow=True)
@pytest.mark.parametrize("kind", ["dense_long", "paged", "paged_long"])
def test_the_tile_map_decides(kind):
    """A tile that a map wrongly calls empty is not visited, and one it calls full is not masked."""
    cache, query = filled(kind).cache, normal(8, B, 1, 4, H)
    lied, want = (attend(query, cache, mask=x) for x in (lying_mask(128), masks.Lengths(kv=128)))
    assert_equal([x[0] for x in lied], [x[0] for x in want])  # other rows are shorter than a block


def test_a_mean_is_finite_where_the_sum_is_not():
    values = jnp.full((1, 256, 1, 8), 3e38, jnp.float32)
    cache = DenseCache.of(jnp.zeros((1, 256, 1, 16), jnp.float32), values)
    out, lse = attend(jnp.ones((1, 1, 2, 16), jnp.float32), cache)
    np.testing.assert_allclose(out, 3e38, rtol=1e-5)
    np.testing.assert_allclose(lse, np.log(256), rtol=1e-6)


@pytest.mark.one_in(12, slow=True)
@pytest.mark.parametrize("page_size", [16, 32, 256])
@pytest.mark.parametrize("V", [128, 24])
def test_16_bits(page_size, V):
    """A cache in bfloat16, whose registers hold 16 rows. With long pages and head sizes of whole
    registers, slots of keys and of values are along different axes."""
    key, value = normal(1, 2, 200, 2, 128), normal(2, 2, 200, 2, V)
    query = normal(3, 2, 1, 4, 128)
    cache = PagedCache.create(2, 208, 2, 128, V, dtype=jnp.bfloat16, page_size=page_size)
    valid = jnp.arange(200)[None, :] < jnp.asarray([200, 33])[:, None]
    cache = cache.append(key, value, valid)
    got, lse = attend(query.astype(jnp.bfloat16), cache, mask=masks.Causal())
    want, lse_want = attend(query.astype(jnp.bfloat16), cache, "reference", mask=masks.Causal())
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(*(x.astype(jnp.float32) for x in (got, want)), atol=0.01)
    np.testing.assert_allclose(lse, lse_want, atol=0.02)


@pytest.mark.slow
def test_blocks_that_need_no_mask_and_blocks_that_do_in_the_default_size():
    rows, query = filled("dense_long"), normal(8, B, 4, 8, H)
    rule = RULES["window"]
    with tuning.using(tpu_decode_block=1024):
        out, _ = attend(query, rows.cache, **arguments(rule, rows.cache, 4, 8))
    assert oracle.error(out, truth(rows, rule, query).out) < 4e-6


@pytest.mark.one_in(8, slow=True)
@pytest.mark.parametrize("kind", ["dense", "paged"])
@pytest.mark.parametrize("mapped", ["all", "query"])
def test_mapped(kind, mapped):
    cache, query = filled(kind).cache, jnp.asarray(normal(8, 2, B, 1, 4, H))
    axis = 0 if mapped == "all" else None
    other = jax.tree.map(lambda x: x[::-1] if x.ndim < 3 else x, cache)
    if kind == "dense":
        other = jax.tree.map(lambda x: x[::-1], cache)
    caches = jax.tree.map(lambda *x: jnp.stack(x), cache, other) if mapped == "all" else cache
    call = functools.partial(jattn.attention, mask=masks.Causal(), implementation="tpu")
    got = quick_jit(jax.vmap(call, (0, axis)))(query, caches)
    for result, x, y in zip(got, query, (cache, other if mapped == "all" else cache), strict=True):
        np.testing.assert_allclose(result, attend(x, y, mask=masks.Causal())[0], atol=1e-6)


@pytest.mark.slow
def test_on_several_devices():
    mesh, rows, heads = mesh_of(data=3, model=2), P("data"), P("data", "model")
    cache, query = filled("dense").cache, jnp.asarray(normal(8, B, 1, 4, H))
    want = attend(query, cache, mask=masks.Causal())[0]
    specs = DenseCache(heads, heads, rows, rows)
    sharded = jax.tree.map(lambda x, spec: place(mesh, x, spec), cache, specs)
    got = attend(place(mesh, query, P("data", None, "model")), sharded, mask=masks.Causal())[0]
    np.testing.assert_allclose(got, want, atol=1e-6)
    call = functools.partial(jattn.attention, mask=masks.Causal(), implementation="tpu")
    by_row = jax.shard_map(call, mesh=mesh, in_specs=(rows, rows), out_specs=rows)
    np.testing.assert_allclose(quick_jit(by_row)(query, cache), want, atol=1e-6)


@pytest.mark.parametrize("kind", [pytest.param("dense", marks=pytest.mark.slow), "paged"])
def test_gradients(kind):
    cache, query = poisoned(filled(kind).cache, 0.0), jnp.asarray(normal(8, B, 1, 4, H))

    def gradients(implementation: str) -> Any:
        def total(query: Any, keys: Any, values: Any, bias: Any) -> Any:
            changed = dataclasses.replace(cache, keys=keys, values=values)
            rules: Any = {"mask": masks.Causal(), "score": scores.Alibi(bias)}
            return jnp.sum(
                jattn.attention(query, changed, implementation=implementation, **rules) ** 2
            )

        operands = query, cache.keys, cache.values, jnp.asarray(SLOPES[:4], jnp.float32)
        return quick_jit(jax.grad(total, (0, 1, 2, 3)))(*operands)

    for x, y in zip(gradients("tpu"), gradients("reference"), strict=True):
        np.testing.assert_allclose(x, y, atol=2e-5 * float(np.abs(y).max()))


def reason(query: Any, cache: Cache, **meaning: Any) -> str | None:
    return decode.unreadable("cpu", make(query, cache, **meaning).prepared(), cache)


def test_reasons():
    cache = DenseCache.create(2, 64, 2, 16)
    few, many = (jnp.ones((2, T, 4, 16), jnp.float32) for T in (1, 9))
    assert reason(few, cache) is None
    assert reason(few, DenseCache.create(2, 60, 2, 16)) == (
        "pages of 60 keys of float32 are no whole registers"
    )
    assert reason(few, PagedCache.create(2, 64, 2, 16, page_size=4)) == (
        "pages of 4 keys of float32 are no whole registers"
    )
    assert "expected a cache of float32 or a quantised one, got bfloat16 and bfloat16" == reason(
        few, DenseCache.create(2, 64, 2, 16, dtype=jnp.bfloat16)
    )
    assert reason(few, DenseCache.create(2, 48, 2, 16, dtype=jnp.int8)) == (
        "pages of 48 keys of int8 are no whole registers"
    )
    assert "expected at most 8 queries" in str(reason(many, cache))
    long = jax.eval_shape(lambda: PagedCache.create(64, 2**17, 2, 16, page_size=16))
    query = jax.ShapeDtypeStruct((64, 1, 4, 16), jnp.float32)
    reasons: list[Any] = []
    jax.eval_shape(lambda q, c: reasons.append(reason(q, c)), query, long)
    assert "do not fit into scalar memory" in reasons[0]
    wide = jax.eval_shape(lambda: DenseCache.create(1, 256, 256, 256))
    query = jax.ShapeDtypeStruct((1, 8, 256, 256), jnp.float32)
    jax.eval_shape(lambda q, c: reasons.append(reason(q, c)), query, wide)
    assert "8 queries of 256 heads do not fit into a core's memory" in reasons[1]


@pytest.mark.parametrize("make", [
    lambda: DenseCache.create(2, 60, 2, 16),
    lambda: DenseCache.create(2, 64, 2, 16, dtype=jnp.bfloat16),
])  # fmt: skip
def test_caches_that_are_read_as_arrays(make):
    """The kernel for arrays runs if the kernel for caches cannot read a cache in place."""
    cache = make().append(normal(1, 2, 40, 2, 16), normal(2, 2, 40, 2, 16))
    query = normal(3, 2, 1, 4, 16)
    got, want = (attend(query, cache, x, mask=masks.Causal()) for x in ("tpu", "reference"))
    assert_trees_close(got, want, atol=2e-6)


def test_another_platform_raises():
    cache, query = filled("dense").cache, jnp.asarray(normal(8, B, 1, 4, H))
    call = jax.jit(functools.partial(jattn.attention, implementation="tpu"))
    with pytest.raises(NotImplementedError, match=r"'tpu': is for tpu, .* for cuda"):
        call.trace(query, cache).lower(lowering_platforms=("cuda",))


def test_none_does_not_take_it():
    cache, query = filled("dense").cache, jnp.asarray(normal(8, B, 1, 4, H))

    def reader(name: str | None) -> Any:
        return registry.reader(make(query, cache, implementation=name).prepared(), cache)

    assert reader(None).args == reader("decode").args == (registry.read_cache,)
    assert reader("blockwise") is None
    assert reader("tpu") is not None


def decode_token(implementation: str | None, cache: Any, token: Any) -> tuple[Any, Any]:
    """A step of decoding: the cache with one more token, and that token's output."""
    query, key, value = token
    cache = cache.append(key, value)
    rules: Any = {"mask": masks.Causal(), "score": scores.Alibi(scores.alibi_slopes(32))}
    return cache, jattn.attention(query, cache, implementation=implementation, **rules)


@pytest.mark.one_in(14, slow=True)
@pytest.mark.parametrize("target", [targets.V5E, targets.V6E], ids=["v5e", "v6e"])
@pytest.mark.parametrize(("dtype", "page_size", "size"), [
    (jnp.bfloat16, None, 128),
    (jnp.bfloat16, None, 64),
    (jnp.bfloat16, 16, 128),
    (jnp.bfloat16, 128, 128),
    (jnp.int8, None, 128),
    (jnp.float8_e4m3fn, 128, 128),
    (jnp.int4, None, 256),
])  # fmt: skip
@pytest.mark.parametrize("steps", [None, 4])
def test_no_copy_of_the_cache(monkeypatch, target, dtype, page_size, size, steps):
    """The cache is copied neither to be read nor to be written, also in a loop."""
    if targets.missing(target):
        pytest.skip("what compiles for it is not installed")
    monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # other tests' processes compile too

    def operands() -> Any:
        sizes: Any = (32, 4096, 8, size)
        options: dict[str, Any] = {"dtype": dtype}
        if page_size is None:
            cache = DenseCache.create(*sizes, **options)
        else:
            cache = PagedCache.create(*sizes, **options, page_size=page_size)
        several = () if steps is None else (steps,)
        token = (jnp.zeros((*several, 32, 1, n, size), jnp.bfloat16) for n in (32, 8, 8))
        return cache, tuple(token)

    def program(cache: Any, tokens: Any) -> Any:
        decode = functools.partial(decode_token, "tpu")
        if steps is not None:
            return jax.lax.scan(decode, cache, tokens)
        return decode(cache, tokens)

    with jax.enable_x64(False), tuning.using(tpu_decode_block=1024):
        compiled = targets.compiled(target, program, *jax.eval_shape(operands), donated=(0,))
    memory = compiled.memory_analysis()
    assert memory.argument_size_in_bytes > size * 2**20
    assert memory.temp_size_in_bytes < 2**21
    assert compiled.as_text().count('custom_call_target="tpu_custom_call"') == 1
