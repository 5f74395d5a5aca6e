"""Integers of users mean what Python's integers do, at and beyond the edges of 32 bits: the answer
is the oracle's, which counts with Python's integers, or an error or NaN."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn import cache, masks, nn, positions, scores
from tests import oracle
from tests.cases import GENERAL, IMPLEMENTATIONS
from tests.conftest import expect
from tests.test_masks import true_kinds


pytestmark = pytest.mark.usefixtures("unchecked")  # NumPy's arrays too, where users have them

MOST = 2**31 - 1
LEAST = -(2**31)
EDGES = np.array([LEAST, LEAST + 1, -1, 0, 1, MOST - 1, MOST])
OURS = ("reference", "blockwise", "native")
T = S = len(EDGES)
B, N, H = 2, 1, 16

with_and_without_64_bits = pytest.mark.parametrize("bits", [32, 64])


def arrays(T: int = T, S: int = S) -> Any:
    rng = np.random.default_rng(T)
    shapes = ((B, T, N, H), (B, S, N, H), (B, S, N, H))
    return tuple(rng.standard_normal(shape).astype(np.float32) for shape in shapes)


def meant(allowed: Any, qkv: Any) -> np.ndarray:
    """Returns the oracle's output for the mask `allowed(pair)`."""
    query, key, value = (np.asarray(x, np.float64) for x in qkv)
    return oracle.attend(oracle.OracleProblem(query, key, value, allowed=allowed)).out


def attend(implementation: str, mask: Any, qkv: Any, **options: Any) -> Any:
    """Returns the library's output, or skips the test if the implementation refuses the call."""
    try:
        return jattn.attention(*qkv, mask=mask, implementation=implementation, **options)
    except NotImplementedError as reason:
        assert implementation not in GENERAL, reason
        pytest.skip(str(reason))


def assert_close(got: np.ndarray, want: np.ndarray) -> None:
    """Equal to a few roundings of float32; a wrong key would make a difference."""
    np.testing.assert_allclose(got, want, atol=2e-5)


ID_DTYPES = [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64]


@pytest.mark.one_in(8)
@with_and_without_64_bits
@pytest.mark.parametrize("dtype", ID_DTYPES)
@pytest.mark.parametrize("implementation", OURS)
def test_segments_distinguish_ids_of_every_dtype(implementation, dtype, bits):
    """Ids at the edges of a dtype and of smaller ones, some of them equal."""
    limits, kinds = np.iinfo(dtype), (np.int8, np.int32, np.uint32, dtype)
    edges = [x for kind in kinds for x in (np.iinfo(kind).min, np.iinfo(kind).max)]
    inside = [x for x in (*edges, 7, 7 + 2**32, 7 + 2**8) if limits.min <= x <= limits.max]
    numbers = (inside + inside[::-1])[:14]  # Python's
    ids, qkv = np.array(numbers, dtype), arrays(len(numbers), len(numbers))
    want = meant(lambda pair: numbers[pair.i] == numbers[pair.j], qkv)
    with jax.enable_x64(bits == 64):
        assert_close(attend(implementation, masks.Segments(ids), qkv), want)
    traced = jax.jit(lambda ids: attend(implementation, masks.Segments(ids), qkv))
    assert_close(traced(jnp.asarray(ids)), want)


LENGTHS = (0, 3, MOST, MOST + 1, 2**40, 10**30, -1, LEAST - 1)


@pytest.mark.one_in(8)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("implementation", OURS)
def test_lengths_of_any_size_are_numbers(implementation, length):
    qkv, rule = arrays(), lambda pair: pair.j < length
    for mask in (masks.Lengths(kv=length), masks.Prefix(length)):
        assert_close(attend(implementation, mask, qkv), meant(rule, qkv))


@pytest.mark.one_in(8)
@with_and_without_64_bits
@pytest.mark.parametrize("dtype", [np.uint8, np.int64, np.uint32, np.uint64])
@pytest.mark.parametrize("implementation", OURS)
def test_lengths_of_rows_are_of_any_dtype(implementation, dtype, bits):
    qkv, lengths = arrays(), np.array([3, np.iinfo(dtype).max], dtype)
    rule = lambda pair: pair.j < int(lengths[pair.b])  # noqa: E731
    with jax.enable_x64(bits == 64):
        for make in (lambda x: masks.Lengths(kv=x), masks.Prefix):
            traced = jax.jit(lambda x, make=make: attend(implementation, make(x), qkv))
            assert_close(attend(implementation, make(lengths), qkv), meant(rule, qkv))
            if bits == 64 or lengths.itemsize <= 4:  # or else JAX itself narrows the argument
                assert_close(traced(lengths), meant(rule, qkv))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.int64, np.uint32, np.uint64])
def test_sides_of_windows_may_be_traced_in_any_dtype(dtype, side):
    distance = EDGES[:, None].astype(object) - EDGES[None, :]
    places: Any = {"q_positions": EDGES, "kv_positions": EDGES}

    @jax.jit
    def maps(size: Any) -> Any:
        mask = masks.Window(**{side: size})
        return mask.dense(T, S, **places), masks.tile_map(mask, T, S, 1, 1, **places)

    sizes = (0, 1, 255, MOST, MOST + 1, 2**32 - 2, 2**32 - 1, 2**40)
    for size in (x for x in sizes if x <= np.iinfo(dtype).max):
        allowed, kinds = maps(dtype(size))
        want = (distance if side == "left" else -distance) <= size
        np.testing.assert_array_equal(allowed, want)
        np.testing.assert_array_equal(kinds, np.where(want, masks.FULL, masks.EMPTY))


POSITIONED = {
    "causal": (masks.Causal, lambda pair: pair.kv <= pair.q),
    "prefix": (lambda: masks.Prefix(MOST), lambda pair: pair.kv < MOST),
    "prefix of all": (lambda: masks.Prefix(MOST + 1), lambda pair: True),
    "prefix of more": (lambda: masks.Prefix(2**70), lambda pair: True),
    "prefix of none": (lambda: masks.Prefix(LEAST), lambda pair: False),
    "prefixes": (
        lambda: masks.Prefix(np.array([MOST, 2**40])),
        lambda pair: pair.kv < (MOST, 2**40)[pair.b],
    ),
    "global": (lambda: masks.Global(MOST), lambda pair: pair.q < MOST or pair.kv < MOST),
    "global of all": (lambda: masks.Global(2**70), lambda pair: True),
    "function": (
        lambda: masks.Predicate(lambda b, h, q, kv: (q <= -1) | (kv == 2**31 - 1)),
        lambda pair: pair.q <= -1 or pair.kv == MOST,
    ),
}


@pytest.mark.one_in(16)
@pytest.mark.parametrize("name", POSITIONED)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_positions_at_the_edges_of_32_bits(implementation, name):
    build, rule = POSITIONED[name]
    qkv, kv = arrays(), EDGES[::-1]
    want = meant(lambda pair: rule(pair._replace(q=int(EDGES[pair.i]), kv=int(kv[pair.j]))), qkv)
    places = {"q_positions": EDGES, "kv_positions": kv}
    assert_close(attend(implementation, build(), qkv, **places), want)
    traced = jax.jit(
        lambda q, kv: attend(implementation, build(), qkv, q_positions=q, kv_positions=kv)
    )
    assert_close(traced(EDGES, kv), want)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("implementation", OURS)
@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint32, np.uint64])
def test_positions_of_any_dtype_count_alike(implementation, dtype):
    """kv − q has more bits than the positions."""
    q, qkv = np.array([0, 1, 2, 100, 126, 127, 3], dtype), arrays()
    rule = lambda pair: int(q[pair.j]) >= int(q[pair.i]) - 100  # noqa: E731
    got = attend(implementation, masks.Window(left=100), qkv, q_positions=q, kv_positions=q)
    assert_close(got, meant(rule, qkv))


@pytest.mark.parametrize("name", ["q_positions", "kv_positions"])
@pytest.mark.parametrize("value", [MOST + 1, LEAST - 1, 2**40])
@with_and_without_64_bits
def test_known_positions_beyond_32_bits_are_refused(name, value, bits):
    positions = np.arange(T)
    positions[2] = value
    with jax.enable_x64(bits == 64), pytest.raises(ValueError, match=f"{name}: .*{value}"):
        jattn.attention(*arrays(), **{name: positions})


def test_traced_positions_beyond_32_bits_give_nan():
    qkv, places = arrays(), np.arange(T)

    @jax.jit
    def is_nan(q: Any) -> Any:
        out, lse = jattn.attention(*qkv, q_positions=q, return_lse=True)
        weights = jattn.attention_weights(*qkv[:2], q_positions=q)
        return [jnp.isnan(x).all() for x in (out, lse, weights)]

    for places[2] in (MOST, MOST + 1, LEAST - 1, 2**40):
        assert is_nan(places) == [not LEAST <= places[2] <= MOST] * 3


WIDE = np.array([-(2**63), -(2**40), -1, 0, 5, 2**31, 2**32 - 1, 2**32, 2**33, 2**40, 2**63 - 1])


NARROW = np.array([LEAST, LEAST + 1, LEAST + 5, -7, -1, 0, 3, 2**30, MOST - 4, MOST], np.int32)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("size", [5, MOST, MOST + 1, 2**32 - 2, 2**32 - 1, 2**32, 2**70])
@pytest.mark.parametrize(
    ("positions", "traced"),
    [(NARROW, False), (NARROW, True), (WIDE, True)],
    ids=["known", "traced", "traced in 64 bits"],
)
def test_distances_of_far_positions(positions, traced, size):
    """Traced positions may have 64 bits."""
    by_place, n = positions.astype(object), len(positions)
    distance = by_place[:, None] - by_place
    windows, blocks = {"left": distance, "right": -distance}, [(1, 1), (2, 3), (3, 1), (3, 3)]

    def maps(x: Any, some_masks: Any) -> Any:
        """The dense array and the tile maps of each mask."""
        places = {"q_positions": x, "kv_positions": x}
        return [
            (m.dense(n, n, **places), [masks.tile_map(m, n, n, *k, **places) for k in blocks])
            for m in some_masks
        ]

    known = [masks.Window(**{side: size}) for side in windows]
    known += [masks.Window(size, 4), masks.Dilated(size), masks.Dilated(3), masks.Causal()]
    known += [masks.Prefix(size), masks.Global(size)]
    known += [masks.Predicate(lambda b, h, q, kv: kv == q)]
    of_windows = [x <= min(size, 2**63 - 1) for x in windows.values()]
    early = by_place < size
    rules = [*of_windows, of_windows[0] & (distance >= -4), distance % size == 0]
    rules += [distance % 3 == 0, distance >= 0, np.broadcast_to(early, (n, n))]
    rules += [early[:, None] | early, distance == 0]
    call = lambda x: maps(x, known)  # noqa: E731
    results = jax.jit(call)(positions) if traced else call(positions)
    of_sizes = jax.jit(lambda x, sizes: maps(x, [masks.Window(**{y: sizes[y]}) for y in windows]))
    for dtype in (np.int64, np.uint64) if traced else ():
        traced_size = dtype(min(size, np.iinfo(dtype).max))
        results += of_sizes(positions, dict.fromkeys(windows, traced_size))
        rules += of_windows
    for (dense, all_kinds), want in zip(results, rules, strict=True):
        np.testing.assert_array_equal(dense, want)
        for block, kinds in zip(blocks, all_kinds, strict=True):
            true = true_kinds(np.asarray(want, bool), *block)
            assert ((kinds == true) | (kinds == masks.MIXED)).all()


@pytest.mark.parametrize("lengths", [np.array([], np.int64), np.array([LEAST, MOST])])
def test_lengths_that_fit_become_int32(lengths):
    for build in (masks.Lengths, masks.Prefix):
        with jax.enable_x64(False):
            (result,) = jax.tree.leaves(build(lengths))
        assert result.dtype == np.int32


def test_operands_of_functions_are_not_narrowed():
    with jax.enable_x64(False):
        for build in (masks.Predicate, scores.Score):
            for wide in (np.array([1, 2**40]), 2**40, np.array([1, 2**32 + 1], np.uint64)):
                says = "operand [0]: expected integers that fit 32"
                expect(ValueError, says, build, lambda *_: True, wide)
            build(lambda *_: True, np.array([1, 2]), 3, np.uint32(2**32 - 1))


def test_rows_and_heads_out_of_range_are_refused():
    mask = masks.Lengths(kv=np.array([1, 2])) & masks.Dense(np.ones((2, 3, 4, 4), bool))
    for b, h, name in ((2, 0, "b"), (-1, 0, "b"), (0, 3, "h")):
        says = f"{name}: expected 0 <= {name}"
        expect(ValueError, says, mask, b, h, np.arange(4), np.arange(4))
        expect(ValueError, says, masks.tile_map, mask, 4, 4, 2, 2, b=b, h=h)
    with pytest.raises(ValueError, match=r"kv: expected|array: expected|mask.*expected T = 5"):
        mask.dense(5, 4)


CACHES = (cache.DenseCache, cache.RollingCache, cache.PagedCache)


def filled(kind: Any) -> Any:
    keys = jnp.arange(2 * 3 * 4, dtype=jnp.float32).reshape(2, 3, 1, 4)
    return kind.create(2, 8, 1, 4).append(keys, keys)


@pytest.mark.one_in(8)
@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("rows", [[5, -1], [0, 2], [-1, 0], [2**32, 0]])
@with_and_without_64_bits
def test_rows_of_a_cache_out_of_range_are_refused(kind, rows, bits):
    with jax.enable_x64(bits == 64):
        says = "indices: expected 0 <= indices < B = 2"
        expect(ValueError, says, filled(kind).reorder, np.array(rows))


@pytest.mark.parametrize("kind", CACHES)
def test_traced_rows_of_a_cache_out_of_range_give_nan(kind):
    picked = jax.jit(kind.reorder)(filled(kind), np.array([1, 5, -1]))
    assert picked.overflowed.tolist() == [False, True, True]
    out = np.asarray(jattn.attention(jnp.ones((3, 1, 1, 4)), picked))
    assert np.isnan(out[1:]).all() and np.isfinite(out[0]).all()


def test_lengths_of_a_memory_are_of_what_it_holds():
    keys = np.ones((2, 3, 1, 4), np.float32)
    for wrong in ([4, 1], [1, -1], [2**32 + 1, 1]):
        says = "lengths: expected 0 <= lengths <= S = 3"
        expect(ValueError, says, cache.DenseCache.of, keys, keys, np.array(wrong))
    made = jax.jit(lambda x: cache.DenseCache.of(keys, keys, x))(np.array([2**32 + 1, 3]))
    assert made.overflowed.tolist() == [True, False]


def test_rows_of_a_recurrent_state_out_of_range():
    state = nn.RecurrentState(jnp.ones((2, 4)), jnp.ones((2, 3, 5)), jnp.ones((2, 3, 6)), None)
    expect(ValueError, "indices", state.reorder, jnp.array([0, 2]))
    picked = jax.jit(lambda rows: state.reorder(rows).hidden)(np.array([1, 2]))
    assert np.isfinite(picked[0]).all() and np.isnan(picked[1]).all()


@with_and_without_64_bits
def test_positions_of_tables_and_angles_are_not_narrowed(bits):
    table: Any = np.arange(8, dtype=np.float32).reshape(4, 2)
    with jax.enable_x64(bits == 64):
        rows = np.asarray(positions.learned(table, np.array([1, 2**32 + 1, -1, 3])))
        angles = positions.sinusoidal(np.array([2**33]), 2, base=1.0)
    np.testing.assert_array_equal(rows, [[2, 3], [np.nan] * 2, [np.nan] * 2, [6, 7]])
    np.testing.assert_allclose(angles, [[np.sin(2.0**33), np.cos(2.0**33)]], atol=1e-2)
