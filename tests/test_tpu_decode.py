"""The kernel for TPUs that reads caches in place, interpreted on a CPU, against the formula, in
float64, for the tokens in each row. Slots that hold no token of any row are poisoned."""

import dataclasses
import functools
import itertools
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
from jattn.cache import Cache, DenseCache, PagedCache, RollingCache
from jattn.cache.quantized import LARGEST, converted
from jattn.call import make
from jattn.kernels import registry
from jattn.kernels.tpu import decode
from tests.arrays import assert_accurate, assert_equal
from tests.conftest import assert_trees_close, quick_jit
from tests.devices import mesh_of, place
from tests.kernels import appended, lying_mask, of_tokens
from tests.oracle import error


B, K, H, V = 3, 2, 16, 24
LENGTHS = (290, 0, 77)
SPAN = 320  # positions that arrays along keys cover
WINDOW = 60  # of the rolling cache, which wraps around

CACHES: dict[str, Callable[[Any], Any]] = {
    "dense": lambda dtype: DenseCache.create(B, 320, K, H, V, dtype),  # the last block is not whole
    # Slots lie along the lanes, and blocks are cut from a row.
    "dense_long": lambda dtype: DenseCache.create(B, 512, K, H, V, dtype),
    "rolling": lambda dtype: RollingCache.create(B, WINDOW, K, H, V, dtype, chunk=100),
    "paged": lambda dtype: PagedCache.create(
        B, 320, K, H, V, dtype, page_size=32 if dtype in LARGEST else 16, num_pages=67
    ),
    "paged_long": lambda dtype: PagedCache.create(
        B, 384, K, H, V, dtype, page_size=128, num_pages=11
    ),
}
FLOAT32 = jnp.dtype("float32")
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
def filled(kind: str, dtype: Any = FLOAT32, sizes: tuple[float, float] = (1, 1)) -> FilledCache:
    """Rows of different lengths, with values of a size by head. Pages of a pool are in random
    order, and two rows share some."""
    cache, lengths = CACHES[kind](dtype), np.array(LENGTHS)
    keys = normal(1, B, 300, K, H) * 1.5
    values = normal(2, B, 300, K, V) * np.asarray(sizes, np.float32)[:, None]
    for start in range(0, 300, 100):
        piece = slice(start, start + 100)
        valid = np.arange(start, start + 100)[None, :] < lengths[:, None]
        cache = appended(cache, keys[:, piece], values[:, piece], valid)
    if isinstance(cache, PagedCache):
        rows = np.array([0, 1, 0])
        cache, keys, values = cache.reorder(jnp.asarray(rows)), keys[rows], values[rows]
        lengths = lengths[rows]
        new = normal(3, B, 5, K, H), normal(4, B, 5, K, V)
        cache = appended(cache, *new, np.array([[True] * 5, [False] * 5, [True] * 5]))
        to = np.random.default_rng(5).permutation(cache.num_pages)
        table = jnp.asarray(np.append(to, cache.num_pages)[np.asarray(cache.table)], jnp.int32)
        pools = jax.tree.map(lambda x: x[np.argsort(to)], (cache.keys, cache.values))
        cache = dataclasses.replace(cache, keys=pools[0], values=pools[1], table=table)
        for b in (0, 2):
            places = slice(lengths[b], lengths[b] + 5)
            keys[b, places], values[b, places] = new[0][b], new[1][b]
        lengths = lengths + np.array([5, 0, 5])
    if dtype in LARGEST:
        keys, values = (np.asarray(converted(x, dtype).dequantized()) for x in (keys, values))
    return FilledCache(poisoned(cache, np.nan), keys, values, lengths)


def poisoned(cache: Any, poison: float) -> Any:
    """The same cache with this number, or scale, in all slots that hold no token of any row."""
    pool, _, table = cache.pages()
    is_used, table = np.zeros((pool.shape[0], pool.shape[2]), bool), np.asarray(table)
    for pages, length in zip(table, np.asarray(cache.lengths), strict=True):
        for slot in range(min(int(length), len(pages) * is_used.shape[1])):
            is_used[pages[slot // is_used.shape[1]], slot % is_used.shape[1]] = True
    assert not is_used.all()

    def put(x: Any) -> Any:
        quantised = x.dtype in LARGEST or not jnp.issubdtype(x.dtype, jnp.floating)
        number = 101 if quantised else poison
        used = is_used[:, None, :, None] if x.ndim == 4 else is_used[:, None]
        return jnp.where(used, x, jnp.asarray(number, x.dtype))

    keys, values = jax.tree.map(put, (cache.keys, cache.values))
    return dataclasses.replace(cache, keys=keys, values=values)


CacheRule = Callable[[Callable[[np.ndarray], Any], np.ndarray, int], dict[str, Any]]
"""The arguments of a call for queries at positions `q [B, T]` and N heads. The first argument of a
rule, `along(x)`, gathers `x [..., positions]` into the order of the keys."""

IDS = np.arange(SPAN, dtype=np.int32) // 37 % 3
PAIRS = normal(6, B, 8, 4, SPAN) > 0
BIAS = 2 * normal(7, B, 8, 4, SPAN)
TABLE = normal(11, 8, 8)
SLOPES = np.array([0.5, 0.25, 0.0625, 0.03125, 0.1, 0.2, 0.3, 0.4], np.float32)
BY_HEAD = np.array([0.5, 0.8, -1.0, 1.5, 2.0, 0.0, 0.3, 1.0], np.float32)


def _scored(score: Callable[[int], Any]) -> CacheRule:
    return lambda along, q, N: {"mask": masks.Causal(), "score": score(N)}


RULES: dict[str, CacheRule] = {
    "none": lambda along, q, N: {},
    "window": lambda along, q, N: {"mask": masks.Causal() & masks.Window(left=40)},
    "segments": lambda along, q, N: {
        "mask": masks.Segments(IDS[np.clip(q, 0, None)], along(np.broadcast_to(IDS, (B, SPAN))))
    },
    "dense": lambda along, q, N: {"mask": masks.Dense(along(PAIRS[:, :N, : q.shape[1]]))},
    "predicate": lambda along, q, N: {
        "mask": masks.Predicate(lambda b, h, i, j: (i - j <= 40 * h) & ((i + 3 * j + h) % 4 != 0))
    },
    "alibi": _scored(lambda N: scores.Alibi(SLOPES[:N])),
    "soft_cap_then_alibi": _scored(lambda N: scores.SoftCap(3.0) >> scores.Alibi(SLOPES[:N])),
    "relative_bias": _scored(
        lambda N: scores.RelativeBias(TABLE[:, :N], bidirectional=False, max_distance=40)
    ),
    "scale_by_head": lambda along, q, N: {"mask": masks.Causal(), "scale": BY_HEAD[:N]},
    "bias": lambda along, q, N: {"score": scores.Bias(along(BIAS[:, :N, : q.shape[1]]))},
    "bias_by_key": lambda along, q, N: {"score": scores.Bias(along(BIAS[:, :1, :1]))},
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

    return rule(along, np.asarray(cache.last_positions(T)), N)


def truth(rows: FilledCache, rule: CacheRule, query: np.ndarray) -> Any:
    """Out and lse by the formula in float64, for the tokens of each row."""
    tokens, T = rows.keys.shape[1], query.shape[1]
    positions = rows.lengths[:, None] + np.arange(-T, 0)
    rules = rule(lambda x: jnp.asarray(x[..., :tokens]), positions, query.shape[2])
    window = getattr(rows.cache, "window", None)
    return of_tokens(query, rows.keys, rows.values, rows.lengths, rules, window)


@pytest.fixture(autouse=True)
def small_blocks():
    with tuning.using(tpu_decode_block=128):
        yield


@functools.cache
def compiled(implementation: str, block: int) -> Any:
    """The program of a call, with blocks of this size."""

    attend = functools.partial(jattn.attention, implementation=implementation, return_lse=True)
    return quick_jit(lambda query, cache, rules: attend(query, cache, **rules))


def attend(query: Any, cache: Any, implementation: str = "tpu", **rules: Any) -> Any:
    """`(out, lse)`; calls of the same shapes share a program."""
    run = compiled(implementation, tuning.current().tpu_decode_block)
    return run(jnp.asarray(query), cache, rules)


def assert_right(kind: str, dtype: Any, name: str, T: int, G: int) -> None:
    """The kernel reads this cache in place, and gives what the formula gives for a rule."""
    rows, rule, N = filled(kind, dtype), RULES[name], K * G
    query = normal(8, B, T, N, H)
    assert reason(jnp.asarray(query), rows.cache) is None
    out, lse = attend(query, rows.cache, **arguments(rule, rows.cache, T, N))
    assert out.dtype == lse.dtype == jnp.float32
    assert_accurate((out, lse), truth(rows, rule, query), 4e-6)
    assert not np.any(out[1]) and np.all(lse[1] == -np.inf)


@pytest.mark.one_in(32)
@every_cache
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize(("T", "G"), [(1, 4), (4, 1), (4, 4), (1, 1)])
def test_values(kind, name, T, G):
    assert_right(kind, FLOAT32, name, T, G)


@pytest.mark.one_in(15)
@every_quantised_dtype
@every_cache
@pytest.mark.parametrize(("name", "T", "G"), [
    ("none", 1, 1),
    ("soft_cap_then_alibi", 4, 2),
    ("predicate", 1, 4),
    ("segments", 4, 1),
    ("bias", 4, 4),
    ("relative_bias", 1, 4),
])  # fmt: skip
def test_quantised_values(kind, name, T, G, dtype):
    assert_right(kind, dtype, name, T, G)


@pytest.mark.one_in(3)
@every_quantised_dtype
def test_quantised_values_of_any_size(dtype):
    rows, query = filled("dense", dtype, (1e-29, 1e35)), normal(8, B, 1, 4, H)
    out = np.asarray(attend(query, rows.cache)[0], np.float64)
    want, _ = truth(rows, RULES["none"], query)
    assert error(out[:, :, 2:] / 1e35, want[:, :, 2:] / 1e35) < 4e-6
    # Small weights times small scales are below the smallest number.
    assert error(out[:, :, :2] / 1e-29, want[:, :, :2] / 1e-29) < 1e-3


@pytest.mark.one_in(40)
@pytest.mark.parametrize(
    ("kind", "field", "dtype"),
    [*itertools.product(CACHES, ("keys", "values"), (FLOAT32, *LARGEST))],
    ids=str,
)
def test_what_is_not_finite_reaches_those_who_attend_to_it(kind, dtype, field):
    """A token that only the last query attends to, and one outside of every window."""
    cache, query = filled(kind, dtype).cache, normal(8, B, 4, 4, H)
    bad, page, size = getattr(cache, field), cache.pages()[2][0], getattr(cache, field).shape[2]
    last, poison = int(cache.lengths[0]) - 1, np.nan if field == "keys" else np.inf
    for slot in (last % cache.capacity, (last - 50) % cache.capacity):
        place = page[slot // size], slice(None), slot % size
        put = lambda x: x.at[place].set(poison) if x.dtype == FLOAT32 else x  # noqa: B023, E731
        bad = jax.tree.map(put, bad)
    mask = masks.Causal() & masks.Window(left=40)
    broken = dataclasses.replace(cache, **{field: bad})
    (out, lse), (want, lse_want) = (attend(query, x, mask=mask) for x in (broken, cache))
    np.testing.assert_array_equal(out[0, :3], want[0, :3])
    np.testing.assert_array_equal(lse[0, :, :3], lse_want[0, :, :3])
    assert np.isnan(out[0, 3]).all() and np.isnan(lse[0, :, 3]).all()
    if not isinstance(cache, PagedCache):  # rows 0 and 2 share pages there
        np.testing.assert_array_equal(out[1:], want[1:])


def assert_like_reference(query: Any, cache: Any, limit: float) -> None:
    """Queries of 16 bits have the output and lse of the reference."""
    query = jnp.asarray(query, jnp.bfloat16)
    (got, lse), (want, lse_want) = (
        attend(query, cache, x, mask=masks.Causal()) for x in ("tpu", "reference")
    )
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(*(x.astype(jnp.float32) for x in (got, want)), atol=limit)
    np.testing.assert_allclose(lse, lse_want, atol=0.02)


@pytest.mark.one_in(3)
@every_quantised_dtype
def test_quantised_caches_and_queries_of_16_bits(dtype):
    assert_like_reference(normal(8, B, 1, 4, H), filled("paged", dtype).cache, 0.02)


@pytest.mark.one_in(7)
@every_quantised_dtype
@every_cache
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
    assert_equal(attend(query, poisoned(cache, poison), **rules), attend(query, cache, **rules))


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
    cache = PagedCache.create(2, 208, 2, 128, V, dtype=jnp.bfloat16, page_size=page_size)
    valid = jnp.arange(200)[None, :] < jnp.asarray([200, 33])[:, None]
    assert_like_reference(normal(3, 2, 1, 4, 128), cache.append(key, value, valid), 0.01)


@pytest.mark.slow
def test_blocks_that_need_no_mask_and_blocks_that_do_in_the_default_size():
    with tuning.using(tpu_decode_block=1024):
        assert_right("dense_long", FLOAT32, "window", 4, 4)


@pytest.mark.one_in(8, slow=True)
@pytest.mark.parametrize("kind", ["dense", "paged"])
@pytest.mark.parametrize("mapped", ["all", "query"])
def test_mapped(kind, mapped):
    cache, query = filled(kind).cache, jnp.asarray(normal(8, 2, B, 1, 4, H))
    turned = jax.tree.map(lambda x: x[::-1] if kind == "dense" or x.ndim < 3 else x, cache)
    stacked = jax.tree.map(lambda *x: jnp.stack(x), cache, turned)  # pages stay in their pool
    axis, caches, other = (0, stacked, turned) if mapped == "all" else (None, cache, cache)
    call = functools.partial(jattn.attention, mask=masks.Causal(), implementation="tpu")
    got = quick_jit(jax.vmap(call, (0, axis)))(query, caches)
    for result, x, y in zip(got, query, (cache, other), strict=True):
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


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param("dense", marks=pytest.mark.exhaustive), "paged"])
def test_gradients(kind):
    cache, query = poisoned(filled(kind).cache, 0.0), jnp.asarray(normal(8, B, 1, 4, H))

    def gradients(implementation: str) -> Any:
        def total(query: Any, keys: Any, values: Any, bias: Any) -> Any:
            changed = dataclasses.replace(cache, keys=keys, values=values)
            rules: Any = {"mask": masks.Causal(), "score": scores.Alibi(bias)}
            out = jattn.attention(query, changed, implementation=implementation, **rules)
            return jnp.sum(out**2)

        operands = query, cache.keys, cache.values, jnp.asarray(SLOPES[:4])
        return quick_jit(jax.grad(total, (0, 1, 2, 3)))(*operands)

    for x, y in zip(gradients("tpu"), gradients("reference"), strict=True):
        np.testing.assert_allclose(x, y, atol=2e-5 * float(np.abs(y).max()))


def reason(query: Any, cache: Cache, **meaning: Any) -> str | None:
    return decode.unreadable("cpu", make(query, cache, **meaning).prepared(), cache)


def no_registers(size: int, dtype: str) -> str:
    return f"pages of {size} keys of {dtype} are no whole registers"


@pytest.mark.parametrize(("create", "shape", "words"), [
    (lambda: DenseCache.create(2, 64, 2, 16), (2, 1, 4, 16), None),
    (lambda: DenseCache.create(2, 60, 2, 16), (2, 1, 4, 16), no_registers(60, "float32")),
    (lambda: PagedCache.create(2, 64, 2, 16, page_size=4), (2, 1, 4, 16),
     no_registers(4, "float32")),
    (lambda: DenseCache.create(2, 64, 2, 16, dtype=jnp.bfloat16), (2, 1, 4, 16),
     "expected a cache of float32 or a quantised one, got bfloat16 and bfloat16"),
    (lambda: DenseCache.create(2, 48, 2, 16, dtype=jnp.int8), (2, 1, 4, 16),
     no_registers(48, "int8")),
    (lambda: DenseCache.create(2, 64, 2, 16), (2, 9, 4, 16), "expected at most 8 queries"),
    (lambda: PagedCache.create(64, 2**17, 2, 16, page_size=16), (64, 1, 4, 16),
     "do not fit into scalar memory"),
    (lambda: DenseCache.create(1, 256, 256, 256), (1, 8, 256, 256),
     "8 queries of 256 heads do not fit into a core's memory"),
])  # fmt: skip
def test_reasons(create, shape, words):
    reasons: list[Any] = []
    jax.eval_shape(lambda q: reasons.append(reason(q, create())), jnp.ones(shape, "float32"))
    assert words in str(reasons[0]) if words else reasons == [None]


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
        pages: dict[str, Any] = {} if page_size is None else {"page_size": page_size}
        kind = DenseCache if page_size is None else PagedCache
        cache = kind.create(32, 4096, 8, size, dtype=dtype, **pages)
        several = () if steps is None else (steps,)
        token = (jnp.zeros((*several, 32, 1, n, size), jnp.bfloat16) for n in (32, 8, 8))
        return cache, tuple(token)

    def decode_token(cache: Any, token: Any) -> Any:
        query, key, value = token
        cache = cache.append(key, value)
        rules: Any = {"mask": masks.Causal(), "score": scores.Alibi(scores.alibi_slopes(32))}
        return cache, jattn.attention(query, cache, implementation="tpu", **rules)

    def program(cache: Any, tokens: Any) -> Any:
        scan = functools.partial(jax.lax.scan, decode_token)
        return (decode_token if steps is None else scan)(cache, tokens)

    with jax.enable_x64(False), tuning.using(tpu_decode_block=1024):
        compiled = targets.compiled(target, program, *jax.eval_shape(operands), donated=(0,))
    memory = compiled.memory_analysis()
    assert memory.argument_size_in_bytes > size * 2**20
    assert memory.temp_size_in_bytes < 2**21
    assert compiled.as_text().count('custom_call_target="tpu_custom_call"') == 1
