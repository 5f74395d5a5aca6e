"""Masks: those of the table and random trees against their rules, kinds of tiles, errors."""

import dataclasses
import functools
import operator
import re
import timeit
import tracemalloc
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jattn
from jattn import masks, scores
from jattn._pytree import pytree_dataclass, select_head
from jattn.masks import Extent, Span, Tile
from tests import cases
from tests.cases import MaskRule
from tests.conftest import expect, quick_jit
from tests.oracle import At, OracleProblem, allowed_everywhere


T, S = 5, 7
ARRAY = np.random.default_rng(0).random((T, S)) < 0.5
MASKS = {case.name: case for case in cases.MASKS}

every_mask = pytest.mark.parametrize("name", MASKS)


def built(name: str) -> Any:
    rule: Any = MASKS[name].mask
    return masks.as_mask(rule.build(jax.tree.map(jnp.asarray, dict(rule.operands))))


def shuffled(problem: OracleProblem) -> OracleProblem:
    """The problem at positions that differ from places."""
    _, T, S, *_ = problem.sizes
    rng = np.random.default_rng(T)
    positions = {"q_positions": rng.permutation(T) + 2, "kv_positions": rng.permutation(S) * 2}
    return dataclasses.replace(problem, **positions)


@every_mask
def test_a_mask_follows_its_rule(name):
    case = MASKS[name]
    batch, T, S, N, *_ = case.sizes
    problem = case.problem(cases.inputs(case))
    for at in (problem, shuffled(problem)):
        positions = {"q_positions": at.q_positions, "kv_positions": at.kv_positions}
        dense = quick_jit(lambda: built(name).dense(T, S, batch=batch, heads=N, **positions))()  # noqa: B023
        assert dense.shape == (*batch, N, T, S)
        assert dense.dtype == jnp.bool_
        np.testing.assert_array_equal(dense, np.reshape(allowed_everywhere(at), dense.shape))


def test_predicate_gets_int32_scalars_and_the_flat_batch_index():
    seen = set()

    def spy(b, h, q_idx, kv_idx):
        seen.add(tuple((x.shape, str(x.dtype)) for x in (b, h, q_idx, kv_idx)))
        return (b == 4) & (h == 1) & (q_idx > kv_idx)

    mask, want = masks.Predicate(spy), np.zeros((2, 3, 2, T, S), bool)
    want[1, 1, 1] = np.tril(np.ones((T, S), bool), -1)
    np.testing.assert_array_equal(mask.dense(T, S, batch=(2, 3), heads=2), want)
    mask(0, 0, jnp.arange(3), jnp.arange(4))
    q = jnp.ones((1, 3, 2, 4))
    jattn.attention(q, q, q, mask=mask)
    assert seen == {(((), "int32"),) * 4}


def test_predicate_bounds_may_be_plain_truths():
    never = masks.Predicate(lambda b, h, q, kv: q < -1, bounds=lambda tile: (False, False))
    always = masks.Predicate(lambda b, h, q, kv: q > -1, bounds=lambda tile: (True, True))
    for mask, kind in ((never, masks.EMPTY), (always, masks.FULL)):
        assert (masks.tile_map(mask, T, S, 2, 3) == kind).all()
        assert (masks.tile_map(~mask, T, S, 2, 3) == masks.FULL - kind).all()
        assert (masks.tile_map(mask & masks.Full(), T, S, 2, 3) == kind).all()


@pytest.mark.parametrize("array", [ARRAY[None], jnp.asarray(ARRAY[None])], ids=["numpy", "jax"])
def test_boolean_arrays_stand_for_dense_masks_and_none_for_everything(array):
    causal = np.tril(np.ones((T, S), bool))
    for mask, want in (
        (masks.Causal() & array, causal & ARRAY),
        (masks.Causal() | array, causal | ARRAY),
        (array & masks.Causal(), causal & ARRAY),
        (array | masks.Causal(), causal | ARRAY),
        (masks.as_mask(array), ARRAY),
        (~masks.as_mask(array), ~ARRAY),
        (masks.Causal() & None, causal),
        *((mask, True) for mask in (masks.as_mask(None), masks.Window(), masks.Lengths())),
    ):
        assert isinstance(mask, masks.Mask)
        np.testing.assert_array_equal(mask.dense(T, S), np.broadcast_to(want, (T, S)))


def test_dense_has_batch_and_head_axes_only_where_they_matter():
    lengths, array = jnp.array([[1, 2, 3], [4, 5, 6]]), np.stack([ARRAY, ~ARRAY])
    ids = np.array([[1, 0, 1, 2, 2], [2, 1, 0, 0, 1]])
    layout = np.random.default_rng(1).random((2, 3, 4)) < 0.5  # blocks of 2
    by_row, by_head = masks.Lengths(kv=lengths[:, 0]), masks.Blocks(layout, 2)
    for mask, options, axes in (
        (masks.Causal(), {}, ()),
        (masks.Lengths(kv=jnp.int32(3)), {}, ()),
        (masks.Dense(ARRAY[None]), {}, ()),
        (masks.Blocks(layout[0], 2), {}, ()),
        (masks.Segments(ids[0], np.arange(S)) | masks.Full(), {}, ()),
        (by_row, {}, (2, 1)),
        (masks.Prefix(lengths[:, 1]) & masks.Causal(), {}, (2, 1)),
        (masks.Segments(ids, np.stack([np.arange(S)] * 2)), {}, (2, 1)),
        (masks.Dense(array[:, None]), {}, (2, 1)),
        (masks.Lengths(kv=lengths), {}, (2, 3, 1)),
        (~masks.Prefix(lengths), {}, (2, 3, 1)),
        (by_head, {}, (2,)),
        (masks.Dense(array), {}, (2,)),
        (by_head & by_row, {}, (2, 2)),
        (masks.Causal(), {"batch": (2, 3)}, (2, 3, 1)),
        (masks.Causal(), {"heads": 4}, (4,)),
        (masks.Lengths(kv=lengths), {"heads": 4}, (2, 3, 4)),
    ):
        dense = jax.eval_shape(lambda m, o=options: m.dense(T, S, **o), mask)
        assert dense.shape == (*axes, T, S), mask


@pytest.mark.one_in(3)
@every_mask
def test_a_block_with_positions_of_its_own(name):
    problem: Any = shuffled(MASKS[name].problem(cases.inputs(MASKS[name])))
    allowed, rng = allowed_everywhere(problem), np.random.default_rng(1)
    i, j = (rng.permutation(n)[:4] for n in allowed.shape[2:])
    pairs = (problem.q_positions, i), (problem.kv_positions, j)
    rows, columns = (Span(*(jnp.asarray(y, jnp.int32) for y in (x[at], at))) for x, at in pairs)
    b, h = (n - 1 for n in allowed.shape[:2])
    block = np.broadcast_to(built(name)(b, h, rows, columns), (len(i), len(j)))
    np.testing.assert_array_equal(block, allowed[b, h][np.ix_(i, j)])


def test_positions_of_a_block_are_not_taken_for_consecutive_ones():
    @pytree_dataclass
    class WhereConsecutive(masks.Mask):
        def evaluate(self, b, h, rows, columns):
            are_default = rows.has_default_positions and columns.has_default_positions
            return jnp.full((len(rows.positions), len(columns.positions)), are_default)

    block = WhereConsecutive()(0, 0, jnp.array([5, 0, 9]), jnp.arange(3))
    assert not block.any() and WhereConsecutive().dense(2, 3).all()


def ruled(mask: Any, allowed: Callable[[At], Any]) -> MaskRule:
    return MaskRule(lambda a: mask, lambda a, pair: allowed(pair))


# The leaves of random trees: masks of the table, and masks of two random numbers.
SMALL = [name for name, case in MASKS.items() if case.sizes == cases.CaseSizes()]


def _of_arrays(m: int, n: int) -> list[MaskRule]:
    """A function with bounds, segments, and blocks, by two numbers."""
    rng = np.random.default_rng((m, n))
    ids, layout = rng.integers(0, 4, (2, S)), rng.random((2, 6, 2, 4)) < 0.1 * n
    ids = np.sort(ids) if m % 2 else ids

    def bounds(tile: Tile) -> Any:
        rows, columns = tile
        return rows.lo + columns.lo < m + n, rows.hi + columns.hi < m + n

    below = masks.Predicate(lambda b, h, q, kv: q + kv < m + n, bounds=bounds)
    return [
        ruled(below, lambda x: x.q + x.kv < m + n),
        ruled(masks.Segments(ids[:, :T], ids), lambda x: ids[x.b, x.i] == ids[x.b, x.j]),
        ruled(masks.Blocks(layout, (3, 2)), lambda x: layout[x.b, x.h, x.i // 3, x.j // 2]),
    ]


RANDOM: list[Callable[[int, int], MaskRule]] = [
    lambda m, n: ruled(masks.Window(m, n), lambda pair: -m <= pair.kv - pair.q <= n),
    lambda m, n: ruled(masks.Window(right=m), lambda pair: pair.kv - pair.q <= m),
    lambda m, n: ruled(masks.Prefix(m - 1), lambda pair: pair.kv < m - 1),
    lambda m, n: ruled(masks.Lengths(q=m - 1, kv=n), lambda pair: pair.i < m - 1 and pair.j < n),
    lambda m, n: ruled(masks.Dilated(m + 1), lambda pair: (pair.q - pair.kv) % (m + 1) == 0),
    lambda m, n: ruled(masks.Global(m), lambda pair: pair.q < m or pair.kv < m),
    *(lambda m, n, place=place: _of_arrays(m, n)[place] for place in range(3)),
]


@st.composite
def trees(draw: Any, depth: int = 3) -> MaskRule:
    node = draw(st.sampled_from(["leaf", "and", "or", "not"])) if depth else "leaf"
    if node == "leaf":
        leaf: Any = draw(st.sampled_from([*SMALL, *RANDOM]))
        if not isinstance(leaf, str):
            return leaf(draw(st.integers(0, 9)), draw(st.integers(0, 9)))
        rule: Any = MASKS[leaf].mask
        return ruled(built(leaf), functools.partial(rule.allowed, rule.operands))
    left = draw(trees(depth - 1))
    if node == "not":
        return ~left
    right = draw(trees(depth - 1))
    return left & right if node == "and" else left | right


@st.composite
def axes(draw: Any, size: int) -> np.ndarray:
    """Positions of an axis: as places, shifted for decoding, or shuffled for a ring."""
    form = draw(st.sampled_from(["places", "shifted", "shuffled", "spread"]))
    if form == "places":
        return np.arange(size)
    positions = np.arange(size) + draw(st.integers(-4, 8))
    if form == "shifted":
        return positions
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    return rng.permutation(positions if form == "shuffled" else 3 * positions)


def true_kinds(dense: np.ndarray, block_q: int, block_kv: int) -> np.ndarray:
    kinds = np.zeros((-(-dense.shape[0] // block_q), -(-dense.shape[1] // block_kv)), np.int8)
    for n, m in np.ndindex(kinds.shape):
        tile = dense[n * block_q : (n + 1) * block_q, m * block_kv : (m + 1) * block_kv]
        kinds[n, m] = int(tile.any()) + int(tile.all())
    return kinds


@st.composite
def boxes(draw: Any, positions: np.ndarray, size: int) -> tuple[np.ndarray, Extent]:
    """Some neighbouring places, possibly past the end, and an extent no smaller than they are."""
    start = draw(st.integers(0, len(positions) - 1))
    places = np.arange(start, min(start + size, len(positions)))
    slack = draw(st.sampled_from([0, 0, 2]))
    lo, hi = positions[places].min() - slack, positions[places].max() + slack
    return places, Extent(int(lo), int(hi), start, size)


@settings(max_examples=settings().max_examples // 3)
@given(st.data())
def test_bounds_never_lie_of_random_trees_that_mean_what_their_rules_say(data):
    rule = data.draw(trees())
    mask, q, kv = rule.build({}), data.draw(axes(T)), data.draw(axes(S))
    b, h = data.draw(st.integers(0, 1)), data.draw(st.integers(0, 5))
    blocks = data.draw(st.sampled_from([(2, 3), (16, 16)]))
    allowed = np.zeros((T, S), bool)
    for i, j in np.ndindex(T, S):
        allowed[i, j] = rule.allowed({}, At(b, h, i, j, int(q[i]), int(kv[j])))

    picked = select_head(mask, b, h)
    for sizes in ((1, 1), (3, 4)):
        i, rows = data.draw(boxes(q, sizes[0]))
        j, columns = data.draw(boxes(kv, sizes[1]))
        maybe_any, surely_all = map(np.all, picked.bounds(Tile(rows, columns)))
        tile = allowed[np.ix_(i, j)]
        assert (maybe_any or not tile.any()) and (not surely_all or tile.all())

    np.testing.assert_array_equal(mask(b, h, masks.span(T, q), masks.span(S, kv)), allowed)
    positions: Any = {"q_positions": q, "kv_positions": kv}
    positions = {k: x for k, x in positions.items() if not np.array_equal(x, np.arange(len(x)))}
    kinds = masks.tile_map(mask, T, S, *blocks, b=b, h=h, **positions)
    true = true_kinds(allowed, *blocks)
    assert kinds.shape == true.shape and kinds.dtype == np.int8
    assert np.all((kinds == true) | (kinds == masks.MIXED))


SORTED = np.sort(np.random.default_rng(5).integers(0, 6, 24))
COARSE = np.random.default_rng(6).random((6, 8)) < 0.4

SHARP: dict[str, Callable[[], Any]] = {
    "full": masks.Full,
    "empty": masks.Empty,
    "causal": masks.Causal,
    "window": lambda: masks.Window(5, 3),
    "window back": lambda: masks.Window(left=4),
    "causal window": lambda: masks.Causal() & masks.Window(6),
    "lengths": lambda: masks.Lengths(q=13, kv=9),
    "lengths array": lambda: masks.Lengths(kv=jnp.asarray(17)),
    "segments": lambda: masks.Segments(jnp.asarray(SORTED)),
    "prefix": lambda: masks.Prefix(7),
    "prefix array": lambda: masks.Prefix(jnp.asarray(16)),
    "blocks": lambda: masks.Blocks(jnp.asarray(COARSE), (4, 3)),
    "dense": lambda: masks.Dense(jnp.asarray(np.kron(COARSE, np.ones((4, 3), bool))[None])),
    "dilated": lambda: masks.Dilated(7),
    "global": lambda: masks.Global(5),
    "not causal": lambda: ~masks.Causal(),
}
COMBINED: dict[str, Callable[[], Any]] = {
    "prefix or causal": lambda: masks.Prefix(jnp.asarray(7)) | masks.Causal(),
    "blocks and window": lambda: SHARP["blocks"]() & masks.Window(9),
    "three": lambda: (masks.Causal() & masks.Window(6)) | ~masks.Prefix(20) | masks.Global(1),
    "together": lambda: (
        SHARP["causal window"]() & ~(SHARP["segments"]() | SHARP["lengths array"]())
    ),
}


def assert_empty_tiles_are_known(kinds: Any, want: np.ndarray) -> None:
    """Exactly the empty tiles are called empty; no tile is wrongly called full."""
    np.testing.assert_array_equal(kinds == masks.EMPTY, want == masks.EMPTY)
    assert not np.any((kinds == masks.FULL) & (want != masks.FULL))


@pytest.mark.one_in(9)
@pytest.mark.parametrize("name", [*SHARP, *COMBINED])
@pytest.mark.parametrize("blocks", [(4, 3), (1, 1), (5, 7)])
def test_tile_map_is_exact_for_plain_leaves_and_the_same_while_tracing(name, blocks):
    """Full tiles at the end may count as mixed where blocks do not divide the length."""

    def build(mask: Any) -> Any:
        kinds = masks.tile_map(mask, 24, 24, *blocks)
        assert isinstance(kinds, np.ndarray) or jax.tree.leaves(mask)
        return kinds

    mask = (SHARP | COMBINED)[name]()
    kinds, inside = np.asarray(build(mask)), jax.jit(build)(mask)
    np.testing.assert_array_equal(inside, kinds)
    assert inside.dtype == kinds.dtype == np.int8
    want = true_kinds(np.asarray(mask.dense(24, 24)), *blocks)
    if name in COMBINED:
        assert np.all((kinds == want) | (kinds == masks.MIXED)) and len(np.unique(kinds)) > 1
        return
    assert_empty_tiles_are_known(kinds, want)
    whole = (slice(24 // blocks[0]), slice(24 // blocks[1]))
    np.testing.assert_array_equal(kinds[whole], want[whole])


LENGTHS = np.random.default_rng(7).integers(20, 320, 16)
SHORT = np.random.default_rng(8).integers(1, 60, 16)
ORDER = np.random.default_rng(9).permutation(16)


def _with_gaps(lengths: Any, padding: int, names: Any, room: int = 320) -> np.ndarray:
    """Documents in rows of `room` tokens, with padding after each."""
    rows = np.full((len(lengths), room), padding)
    for row, length, name in zip(rows, lengths, names, strict=True):
        row[:length] = name
    return rows.reshape(-1)


def _layouts(padding: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Ids of queries and keys as other libraries lay documents out, none with that of padding."""
    names = np.arange(17)[np.arange(17) != padding][:16]
    gaps = _with_gaps(LENGTHS, padding, names)
    at_row_ends = np.repeat(names, LENGTHS // 2)
    at_row_ends = np.pad(at_row_ends, (0, 3000 - len(at_row_ends)), constant_values=padding)
    shuffled = _with_gaps(LENGTHS, padding, names[ORDER])
    pages = np.random.default_rng(1).permutation(np.repeat(np.arange(40), 8))
    return {
        "padded keys": (np.repeat(names, SHORT), gaps),
        "padded queries": (gaps, np.repeat(names, LENGTHS)),
        "padding attends to padding": (gaps, gaps),
        "padding attends to nothing": (gaps, np.where(gaps == padding, -1000, gaps)),
        "padding at the end of a row": (at_row_ends, at_row_ends),
        "documents in any order": (shuffled, shuffled),
        "pages of few tokens": (np.repeat(pages, 16), np.repeat(np.arange(40), 16)),
    }


@pytest.mark.one_in(5)
@pytest.mark.parametrize("padding", [-1, 0, 7, 99, 2**31 - 1])
@pytest.mark.parametrize("traced", [False, True])
def test_padding_between_documents_hides_no_empty_tile(padding, traced):
    for ids in _layouts(padding).values():
        T, S = map(len, ids)
        build = lambda q, kv: masks.tile_map(masks.Segments(q, kv), T, S, 64, 64)  # noqa: B023,E731
        kinds = np.asarray(jax.jit(build)(*ids) if traced else build(*ids))
        assert_empty_tiles_are_known(kinds, true_kinds(ids[0][:, None] == ids[1], 64, 64))


def test_tile_map_at_decode_and_ring_positions():
    ring = np.concatenate([np.arange(8, 16), np.arange(8)])  # the second shard's keys come first
    kinds = masks.tile_map(masks.Causal(), 8, 16, 4, 4, q_positions=np.arange(8), kv_positions=ring)
    np.testing.assert_array_equal(kinds, [[0, 0, 1, 0], [0, 0, 2, 1]])
    last = masks.tile_map(masks.Causal() & masks.Window(5), 1, 16, 1, 4, q_positions=np.array([11]))
    np.testing.assert_array_equal(last, [[0, 1, 2, 0]])


def test_empty_axes():
    segments = masks.Segments(jnp.zeros(0, int), jnp.zeros(3, int))
    for mask in (masks.Causal(), segments, masks.Lengths(kv=jnp.int32(2))):
        assert mask.dense(0, 3).shape == (0, 3)
        assert masks.tile_map(mask, 0, 3, 2, 2).shape == (0, 2)
    assert masks.Causal().dense(3, 0).shape == (3, 0)
    assert masks.tile_map(masks.Causal(), 3, 0, 2, 2).shape == (2, 0)


MILLION = 1_000_000


def test_a_million_by_a_million_costs_the_number_of_tiles():
    mask, block = masks.Causal() & masks.Window(4096), 1024
    build = functools.partial(masks.tile_map, mask, MILLION, MILLION, block, block)
    kinds: Any = build()
    # About 0.02 ms per thousand tiles; asking tile after tile takes above 20.
    assert min(timeit.repeat(build, number=1, repeat=2)) / (kinds.size / 1000) < 2e-3

    tracemalloc.start()
    build()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert isinstance(kinds, np.ndarray)  # whose memory tracemalloc sees
    assert peak < 100 * kinds.size

    first = np.arange(0, MILLION, block)
    last = np.minimum(first + block, MILLION) - 1
    nearest, farthest = first[:, None] - last[None, :], last[:, None] - first[None, :]  # q − kv
    some = (farthest >= 0) & (nearest <= 4096)
    every = (nearest >= 0) & (farthest <= 4096)
    np.testing.assert_array_equal(kinds, some.astype(np.int8) + every)
    assert kinds.any(axis=1).all()
    assert (kinds == masks.FULL).sum() > kinds.shape[0]


@pytest.mark.parametrize("name", ["segments", "lengths"])
def test_a_traced_map_never_holds_all_points(name):
    for size in (2**15, 2**17):

        def build(lengths, ids, size=size):
            traced = {"segments": masks.Segments(ids), "lengths": masks.Lengths(lengths, lengths)}
            return masks.tile_map(masks.Causal() & traced[name], size, size, 512, 512)

        arrays = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((), (size,)))
        analysis: Any = jax.jit(build).lower(*arrays).compile().memory_analysis()
        assert analysis.temp_size_in_bytes <= 64 * (size + (size // 512) ** 2)


@pytest.mark.one_in(4)
@every_mask
def test_masks_are_frozen_pytrees_that_take_any_leaf(name):
    mask, (_, T, S, *_) = built(name), MASKS[name].sizes
    again = jax.tree.map(lambda leaf: leaf, mask)
    np.testing.assert_array_equal(again.dense(T, S), mask.dense(T, S))
    assert_frozen_pytree(mask)


def assert_frozen_pytree(rule: Any) -> None:
    """A mask or a score function cannot be changed, and takes any object as a leaf."""
    flat, structure = jax.tree.flatten(rule)
    assert type(jax.tree.map(lambda _: None, rule)) is type(rule)
    for stand_in in (object(), 0, "T S", jax.ShapeDtypeStruct((), int)):
        mapped = jax.tree.map(lambda _, x=stand_in: x, rule)
        assert jax.tree.structure(mapped) == structure
        assert jax.tree.leaves(mapped) == [stand_in] * len(flat)
    for field in [field.name for field in dataclasses.fields(rule)] or ["anything"]:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(rule, field, 1)


def test_python_numbers_are_structure_and_arrays_are_leaves():
    assert jax.tree.leaves(masks.Lengths(q=2, kv=3) & masks.Prefix(1) & masks.Window(4, 5)) == []
    assert len(jax.tree.leaves(masks.Lengths(q=jnp.int32(2), kv=3))) == 1
    structure = jax.tree.structure
    assert structure(masks.Prefix(1)) == structure(masks.Prefix(1))
    assert structure(masks.Prefix(1)) != structure(masks.Prefix(2))
    assert structure(masks.Window(1)) != structure(masks.Window(right=1))


def test_masks_are_no_arrays_but_combine_with_them():
    array = jnp.ones((1, 1, 4, 4), bool)
    for x in (array, np.asarray(array)):
        assert isinstance(x & masks.Causal(), masks.And)
        assert isinstance(x | masks.Causal(), masks.Or)
    assert jax.jit(lambda x: (x & masks.Causal()).dense(4, 4))(array).shape == (1, 1, 4, 4)
    uses: tuple[Any, ...] = (jnp.asarray, np.asarray, lambda x: jnp.where(x, 1, 0))
    for use in uses:
        expect(TypeError, "write mask=mask.dense(T, S)[None, None]", use, masks.Causal())
    with pytest.raises(AttributeError, match=r"Causal has no attribute 'left'$"):
        getattr(masks.Causal(), "left")  # noqa: B009


@pytest.mark.parametrize(
    ("shape", "advice"),
    [
        ((), "mask[None, None, None, None]"),
        ((S,), "mask[None, None, None] if it is [S]"),
        ((T,), "mask[None, None, :, None] if it is [T]"),
        ((T, S), "mask[None, None] if it is [T, S]"),
    ],
)
def test_arrays_of_less_than_full_rank_are_advised(shape, advice):
    q, k = jnp.ones((1, T, 2, 4)), jnp.ones((1, S, 2, 4))
    mask = jnp.ones(shape, bool)
    for array in (mask, np.asarray(mask), mask[()]):
        with pytest.raises(ValueError, match=re.escape(advice)):
            jattn.attention(q, k, k, mask=array)
    index = re.search(r"\[.*?\]", advice)
    assert index
    full = eval(f"mask{index[0]}", {"mask": mask})  # what is advised works
    jax.eval_shape(lambda mask: jattn.attention(q, k, k, mask=mask), full)


@pytest.mark.parametrize("kind", ["And", "Or"])
@pytest.mark.parametrize("flip", [False, True])
def test_a_loop_may_combine_hundreds_of_masks(kind, flip):
    """The tree keeps their order, and Python and JAX can traverse its depth."""
    combine = {"And": operator.and_, "Or": operator.or_}[kind]
    parts = [masks.Window(n % 3, n) for n in range(500)]
    mask = functools.reduce(lambda x, y: combine(y, x) if flip else combine(x, y), parts)
    assert "Window(left=2, right=2)" in repr(mask)
    is_part = lambda x: isinstance(x, masks.Window)  # noqa: E731
    assert jax.tree.leaves(mask, is_leaf=is_part) == parts[:: -1 if flip else 1]
    (want,) = {"And": [parts[0]], "Or": [parts[-1] | masks.Window(2, 0)]}[kind]
    np.testing.assert_array_equal(mask.dense(5, 5), want.dense(5, 5))
    q = jnp.ones((1, 5, 1, 4))
    assert jattn.explain(q, q, q, mask=mask)["blockwise"] is None


@pytest.mark.parametrize("rule", [masks.Causal(), ~masks.Full(), scores.SoftCap(2.0)])
def test_rules_are_neither_true_nor_false(rule):
    for write in (lambda: rule and rule, lambda: rule or rule, lambda: not rule):
        expect(TypeError, "is None", write)


@pytest.mark.parametrize(
    ("bounds", "kind", "message"),
    [
        (lambda t: (t.columns.hi < 0, t.columns.hi < 0), ValueError, "bounds: they say"),
        (lambda t: t.columns.hi > 0, TypeError, "bounds must return"),
        (lambda t: (t.columns.hi, t.columns.hi), TypeError, "bounds must return"),
        (lambda t: (np.ones(7, bool), np.ones(7, bool)), ValueError, "bounds must return"),
    ],
)
def test_what_bounds_return_is_checked(bounds, kind, message):
    mask = masks.Predicate(lambda b, h, q, kv: kv > q + 200, bounds=bounds)
    with pytest.raises(kind, match=message):
        masks.check_bounds(mask, 300, 300)
