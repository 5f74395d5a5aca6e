"""Masks: every mask of the table against its rule, the laws of logic, and the kinds of tiles.

Random expression trees carry a rule of their own along with the mask.
"""

import dataclasses
import functools
import re
import time
import tracemalloc
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jattn
from jattn import masks, scores
from jattn._pytree import pytree_dataclass, select_head
from jattn.masks import Extent, Span, Tile
from tests import cases
from tests.oracle import OracleProblem, allowed_everywhere


T, S = 5, 7
Q_IDS = np.array([1, 0, 1, 2, 2])
KV_IDS = np.array([2, 1, 0, 0, 1, 2, 5])
ARRAY = np.random.default_rng(0).random((T, S)) < 0.5
LAYOUT = np.array([[1, 0, 0, 1], [0, 1, 1, 0], [1, 0, 1, 1]], bool)  # blocks of 2
MASKS = {case.name: case for case in cases.MASKS}

every_mask = pytest.mark.parametrize("name", MASKS)


def built(name: str) -> Any:
    """The mask of a case."""
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
        dense = built(name).dense(T, S, batch=batch, heads=N, **positions)
        assert dense.shape == (*batch, N, T, S)
        assert dense.dtype == jnp.bool_
        np.testing.assert_array_equal(dense, np.reshape(allowed_everywhere(at), dense.shape))


def test_predicate_sees_flat_batch_index_and_head():
    def one_only(b, h, q_idx, kv_idx, chosen):
        return (b == chosen) & (h == 1) & (q_idx > kv_idx)

    dense = masks.Predicate(one_only, jnp.asarray(4)).dense(T, S, batch=(2, 3), heads=2)
    want = np.zeros((2, 3, 2, T, S), bool)
    want[1, 1, 1] = np.tril(np.ones((T, S), bool), -1)
    np.testing.assert_array_equal(dense, want)


def test_predicate_gets_int32_scalars_everywhere():
    seen = set()

    def spy(b, h, q_idx, kv_idx):
        seen.add(tuple((x.shape, str(x.dtype)) for x in (b, h, q_idx, kv_idx)))
        return b + h + q_idx < kv_idx

    mask = masks.Predicate(spy)
    mask.dense(T, S, batch=(2,), heads=3)
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


@pytest.mark.parametrize("kind", ["numpy", "jax"])
def test_boolean_arrays_stand_for_dense_masks(kind):
    array = ARRAY[None] if kind == "numpy" else jnp.asarray(ARRAY[None])
    causal = np.tril(np.ones((T, S), bool))
    for mask, want in (
        (masks.Causal() & array, causal & ARRAY),
        (masks.Causal() | array, causal | ARRAY),
        (array & masks.Causal(), causal & ARRAY),
        (array | masks.Causal(), causal | ARRAY),
        (masks.as_mask(array), ARRAY),
        (~masks.as_mask(array), ~ARRAY),
    ):
        assert isinstance(mask, masks.Mask)
        np.testing.assert_array_equal(mask.dense(T, S), want)


def test_none_stands_for_everything():
    assert isinstance(masks.as_mask(None), masks.Full)
    np.testing.assert_array_equal((masks.Causal() & None).dense(T, S), masks.Causal().dense(T, S))
    assert all(mask.dense(T, S).all() for mask in (masks.Window(), masks.Lengths()))


def test_dense_has_batch_and_head_axes_only_where_they_matter():
    lengths = jnp.array([[1, 2, 3], [4, 5, 6]])
    by_head = jnp.asarray(np.stack([LAYOUT, ~LAYOUT]))
    shapes = {
        (T, S): [
            masks.Causal(),
            masks.Lengths(kv=jnp.int32(3)),
            masks.Dense(jnp.asarray(ARRAY[None])),
            masks.Blocks(jnp.asarray(LAYOUT), 2),
            masks.Segments(jnp.asarray(Q_IDS), jnp.asarray(KV_IDS)) | masks.Full(),
        ],
        (2, 1, T, S): [
            masks.Lengths(kv=lengths[:, 0]),
            masks.Prefix(lengths[:, 1]) & masks.Causal(),
            masks.Segments(jnp.asarray([Q_IDS, Q_IDS]), jnp.asarray([KV_IDS, KV_IDS])),
            masks.Dense(jnp.asarray([ARRAY[None], ~ARRAY[None]])),
        ],
        (2, 3, 1, T, S): [masks.Lengths(kv=lengths), ~masks.Prefix(lengths)],
        (2, T, S): [masks.Blocks(by_head, 2), masks.Dense(jnp.asarray([ARRAY, ~ARRAY]))],
        (2, 2, T, S): [masks.Blocks(by_head, 2) & masks.Lengths(kv=lengths[:, 0])],
    }
    for shape, group in shapes.items():
        for mask in group:
            assert jax.eval_shape(lambda m: m.dense(T, S), mask).shape == shape, mask
    for mask, options, shape in (
        (masks.Causal(), {"batch": (2, 3)}, (2, 3, 1, T, S)),
        (masks.Causal(), {"heads": 4}, (4, T, S)),
        (masks.Lengths(kv=lengths), {"heads": 4}, (2, 3, 4, T, S)),
    ):
        assert jax.eval_shape(lambda m, o=options: m.dense(T, S, **o), mask).shape == shape


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


TREE_T, TREE_S, TREE_B, TREE_N = 11, 13, 2, 3

Truth = Callable[..., Any]  # (b, h, i [t, 1], j [1, s], q [t, 1], kv [1, s]) -> bool [t, s]


@pytree_dataclass
class WhereConsecutive(masks.Mask):
    """Allows every pair if the positions of queries and of keys are the default ones."""

    def evaluate(self, b, h, rows, columns):
        shape = len(rows.positions), len(columns.positions)
        return jnp.full(shape, rows.has_default_positions and columns.has_default_positions)


def test_positions_of_a_block_are_not_taken_for_consecutive_ones():
    block = WhereConsecutive()(0, 0, jnp.array([5, 0, 9]), jnp.arange(3))
    assert not block.any() and WhereConsecutive().dense(2, 3).all()


class Ruled(NamedTuple):
    """A mask and what it means."""

    mask: Any
    truth: Truth


def _weighted_sum(b, h, q_idx, kv_idx, modulus):
    return (q_idx * 7 + kv_idx * 3 + b + 2 * h) % modulus == 0


def _sum_below(limit: int):
    def rule(b, h, q_idx, kv_idx):
        return q_idx + kv_idx < limit

    def bounds(tile):
        rows, columns = tile
        return rows.lo + columns.lo < limit, rows.hi + columns.hi < limit

    return rule, bounds


def _bools(draw: Any, *shape: int) -> np.ndarray:
    """Booleans with runs in them, so that whole tiles come out empty and full."""
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    coarse = rng.random([-(-n // 3) for n in shape]) < draw(st.sampled_from([0.2, 0.5, 0.8]))
    for axis in range(len(shape)):
        coarse = np.repeat(coarse, 3, axis=axis)
    return coarse[tuple(slice(n) for n in shape)]


def _draw_window(draw):
    distance = st.none() | st.integers(0, 9)
    left, right = draw(distance), draw(distance)

    def truth(b, h, i, j, q, kv):
        ahead = kv - q
        return (left is None or ahead >= -left) & (right is None or ahead <= right)

    return Ruled(masks.Window(left, right), truth)


def _draw_length(draw, size):
    """A length as a number, an array, or an array by batch row; and what it is in row b."""
    form = draw(st.sampled_from(["number", "array", "batch"]))
    drawn = [draw(st.integers(-1, size + 2)) for _ in range(TREE_B)]
    if form == "batch":
        return jnp.asarray(drawn), lambda b: drawn[b]
    return (drawn[0] if form == "number" else jnp.asarray(drawn[0])), lambda b: drawn[0]


def _draw_prefix(draw):
    length, of = _draw_length(draw, TREE_S)
    return Ruled(masks.Prefix(length), lambda b, h, i, j, q, kv: kv < of(b))


def _draw_lengths(draw):
    (q_length, q_of), (kv_length, kv_of) = _draw_length(draw, TREE_T), _draw_length(draw, TREE_S)
    form = draw(st.sampled_from(["q", "kv", "both"]))
    if form == "q":
        return Ruled(masks.Lengths(q=q_length), lambda b, h, i, j, q, kv: i < q_of(b))
    if form == "kv":
        return Ruled(masks.Lengths(kv=kv_length), lambda b, h, i, j, q, kv: j < kv_of(b))
    both = lambda b, h, i, j, q, kv: (i < q_of(b)) & (j < kv_of(b))  # noqa: E731
    return Ruled(masks.Lengths(q_length, kv_length), both)


def _draw_ids(draw, most, *sizes):
    """Arrays of ids of these sizes, for all batch rows or for each, perhaps sorted; and as
    `[TREE_B, size]`."""
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    lead = draw(st.sampled_from([(), (TREE_B,)]))
    ids = [rng.integers(0, most, (*lead, size)) for size in sizes]
    ids = [np.sort(x) for x in ids] if draw(st.booleans()) else ids
    return ids, [np.broadcast_to(x, (TREE_B, x.shape[-1])) for x in ids]


def _draw_segments(draw):
    ids, (q_ids, kv_ids) = _draw_ids(draw, 4, TREE_T, TREE_S)
    same = lambda b, h, i, j, q, kv: q_ids[b][i] == kv_ids[b][j]  # noqa: E731
    return Ruled(masks.Segments(*map(jnp.asarray, ids)), same)


def _draw_padding(draw):
    (tokens,), (by_row,) = _draw_ids(draw, 2, TREE_S)
    direction = draw(st.sampled_from([1, -1]))
    kind = draw(st.sampled_from([bool, int]))
    attention_mask = jnp.asarray(tokens[..., ::direction].astype(kind))
    real = by_row[:, ::direction] == 1
    return Ruled(masks.Padding(attention_mask), lambda b, h, i, j, q, kv: real[b][j])


def _draw_tree(draw):
    lead = draw(st.sampled_from([(), (TREE_B,)]))
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    parents = rng.integers(-1, np.arange(TREE_T), (*lead, TREE_T))
    start = rng.integers(0, TREE_S, lead)

    def truth(b, h, i, j, q, kv):
        row, begin = (x[b] if lead else x for x in (parents, start))
        seen = np.zeros((TREE_T, TREE_S), bool)
        for node in range(TREE_T):
            if row[node] >= 0:
                seen[node] = seen[row[node]]
            seen[node, begin + node : begin + node + 1] = True
        return seen[i, j] | (j < begin)

    operands = draw(st.sampled_from([np.asarray, jnp.asarray]))
    begins = start if lead else int(start) if draw(st.booleans()) else jnp.asarray(start)
    return Ruled(masks.Tree(operands(parents), begins), truth)


def _draw_dilated(draw):
    stride = draw(st.integers(1, 5))
    return Ruled(masks.Dilated(stride), lambda b, h, i, j, q, kv: (q - kv) % stride == 0)


def _draw_global(draw):
    n = draw(st.integers(0, 6))
    return Ruled(masks.Global(n), lambda b, h, i, j, q, kv: (q < n) | (kv < n))


def _draw_blocks(draw):
    layouts = [((3, 3), ()), ((4, 5), (TREE_B, TREE_N)), ((1, 2), (1, TREE_N))]
    block, lead = draw(st.sampled_from(layouts))
    cells = -(-TREE_T // block[0]), -(-TREE_S // block[1])
    layout = _bools(draw, *lead, *cells)

    def truth(b, h, i, j, q, kv):
        head_layout = layout[b % layout.shape[0], h] if lead else layout
        return head_layout[i // block[0], j // block[1]]

    given_block = block[0] if block[0] == block[1] else block
    return Ruled(masks.Blocks(jnp.asarray(layout), given_block), truth)


def _draw_dense(draw):
    shapes = [(TREE_N, TREE_T, 1), (TREE_B, 1, TREE_T, TREE_S), (TREE_B, TREE_N, 1, TREE_S)]
    array = _bools(draw, *draw(st.sampled_from(shapes)))
    whole = np.broadcast_to(array, (TREE_B, TREE_N, TREE_T, TREE_S))
    return Ruled(masks.Dense(jnp.asarray(array)), lambda b, h, i, j, q, kv: whole[b, h][i, j])


def _draw_predicate(draw):
    if draw(st.booleans()):
        limit = draw(st.integers(-2, 30))
        rule, bounds = _sum_below(limit)
        return Ruled(masks.Predicate(rule, bounds=bounds), lambda b, h, i, j, q, kv: q + kv < limit)
    modulus = draw(st.integers(1, 4))
    truth = lambda b, h, i, j, q, kv: (q * 7 + kv * 3 + b + 2 * h) % modulus == 0  # noqa: E731
    return Ruled(masks.Predicate(_weighted_sum, jnp.int32(modulus)), truth)


DRAWN: dict[type, Callable[[Any], Ruled]] = {
    masks.Full: lambda draw: Ruled(masks.Full(), lambda b, h, i, j, q, kv: True),
    masks.Empty: lambda draw: Ruled(masks.Empty(), lambda b, h, i, j, q, kv: False),
    masks.Causal: lambda draw: Ruled(masks.Causal(), lambda b, h, i, j, q, kv: kv <= q),
    masks.Window: _draw_window,
    masks.Prefix: _draw_prefix,
    masks.Lengths: _draw_lengths,
    masks.Segments: _draw_segments,
    masks.Padding: _draw_padding,
    masks.Tree: _draw_tree,
    masks.Dilated: _draw_dilated,
    masks.Global: _draw_global,
    masks.Blocks: _draw_blocks,
    masks.Dense: _draw_dense,
    masks.Predicate: _draw_predicate,
}


@st.composite
def trees(draw: Any, depth: int = 4) -> Ruled:
    """Expressions over all leaves, of at most this depth."""
    node = draw(st.sampled_from(["leaf", "and", "or", "not"])) if depth else "leaf"
    if node == "leaf":
        return DRAWN[draw(st.sampled_from(list(DRAWN)))](draw)
    left = draw(trees(depth - 1))
    if node == "not":
        return Ruled(~left.mask, lambda *at: np.logical_not(left.truth(*at)))
    right = draw(trees(depth - 1))
    join = np.logical_and if node == "and" else np.logical_or
    mask = left.mask & right.mask if node == "and" else left.mask | right.mask
    return Ruled(mask, lambda *at: join(left.truth(*at), right.truth(*at)))


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


def points(
    truth: Truth, b: int, h: int, places: tuple[Any, Any], positions: tuple[Any, Any]
) -> np.ndarray:
    """The rule evaluated at these places, whose positions are `positions[place]`."""
    i, j = places
    shape = len(i), len(j)
    q, kv = positions[0][i][:, None], positions[1][j][None, :]
    return np.broadcast_to(truth(b, h, i[:, None], j[None, :], q, kv), shape)


def assert_sound(maybe_any: Any, surely_all: Any, allowed: np.ndarray) -> None:
    """The bounds of a tile hold for every point in it."""
    assert bool(np.all(maybe_any)) or not allowed.any()
    assert not bool(np.all(surely_all)) or allowed.all()


def true_kinds(dense: np.ndarray, block_q: int, block_kv: int) -> np.ndarray:
    """The kind of each tile, from its points."""
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


@given(st.data())
def test_bounds_never_lie_of_random_trees_that_mean_what_their_rules_say(data):
    ruled = data.draw(trees())
    positions = data.draw(axes(TREE_T)), data.draw(axes(TREE_S))
    b, h = data.draw(st.integers(0, TREE_B - 1)), data.draw(st.integers(0, TREE_N - 1))
    block_q, block_kv = data.draw(st.sampled_from([(3, 4), (16, 16)]))

    picked = select_head(ruled.mask, b, h)
    for sizes in ((1, 1), (3, 4)):
        i, rows = data.draw(boxes(positions[0], sizes[0]))
        j, columns = data.draw(boxes(positions[1], sizes[1]))
        maybe_any, surely_all = picked.bounds(Tile(rows, columns))
        assert_sound(maybe_any, surely_all, points(ruled.truth, b, h, (i, j), positions))

    q, kv = (None if np.array_equal(x, np.arange(len(x))) else x for x in positions)
    kinds = masks.tile_map(
        ruled.mask, TREE_T, TREE_S, block_q, block_kv, b=b, h=h, q_positions=q, kv_positions=kv
    )
    every = np.arange(TREE_T), np.arange(TREE_S)
    allowed = points(ruled.truth, b, h, every, positions)
    rows, columns = masks.span(TREE_T, positions[0]), masks.span(TREE_S, positions[1])
    np.testing.assert_array_equal(ruled.mask(b, h, rows, columns), allowed)
    true = true_kinds(allowed, block_q, block_kv)
    assert kinds.shape == true.shape and kinds.dtype == np.int8
    for kind in (masks.EMPTY, masks.FULL):
        assert not np.any((kinds == kind) & (true != kind))


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


def assert_empty_tiles_are_known(kinds: Any, want: np.ndarray) -> None:
    """Exactly the empty tiles are called empty; no tile is wrongly called full."""
    np.testing.assert_array_equal(kinds == masks.EMPTY, want == masks.EMPTY)
    assert not np.any((kinds == masks.FULL) & (want != masks.FULL))


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", SHARP)
@pytest.mark.parametrize("blocks", [(4, 3), (1, 1), (5, 7)])
def test_tile_map_is_exact_for_plain_leaves(name, blocks):
    """Full tiles at the end may count as mixed where blocks do not divide the length."""
    mask = SHARP[name]()
    kinds = np.asarray(masks.tile_map(mask, 24, 24, *blocks))
    want = true_kinds(np.asarray(mask.dense(24, 24)), *blocks)
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
    """Ids of queries and keys, as xformers and TransformerEngine lay documents out; no document has
    the id of the padding."""
    names = np.arange(17)[np.arange(17) != padding][:16]
    gaps = _with_gaps(LENGTHS, padding, names)
    at_row_ends = np.repeat(names, LENGTHS // 2)
    at_row_ends = np.pad(at_row_ends, (0, 3000 - len(at_row_ends)), constant_values=padding)
    shuffled = _with_gaps(LENGTHS, padding, names[ORDER])
    return {
        "padded keys": (np.repeat(names, SHORT), gaps),
        "padded queries": (gaps, np.repeat(names, LENGTHS)),
        "padding attends to padding": (gaps, gaps),
        "padding attends to nothing": (gaps, np.where(gaps == padding, -1000, gaps)),
        "padding at the end of a row": (at_row_ends, at_row_ends),
        "documents in any order": (shuffled, shuffled),
    }


@pytest.mark.one_in(3)
@pytest.mark.parametrize("padding", [-1, 0, 7, 99, 2**31 - 1])
@pytest.mark.parametrize("traced", [False, True])
def test_padding_between_documents_hides_no_empty_tile(padding, traced):
    for ids in _layouts(padding).values():
        T, S = map(len, ids)
        build = lambda q, kv: masks.tile_map(masks.Segments(q, kv), T, S, 64, 64)  # noqa: B023,E731
        kinds = np.asarray(jax.jit(build)(*ids) if traced else build(*ids))
        assert_empty_tiles_are_known(kinds, true_kinds(ids[0][:, None] == ids[1], 64, 64))


def test_few_ids_of_a_tile_are_known_in_any_order():
    pages = np.random.default_rng(1).permutation(np.repeat(np.arange(40), 8))
    q, kv = np.repeat(pages, 16), np.repeat(np.arange(40), 16)
    kinds = np.asarray(masks.tile_map(masks.Segments(q, kv), len(q), len(kv), 64, 64))
    assert_empty_tiles_are_known(kinds, true_kinds(q[:, None] == kv, 64, 64))


def test_tile_map_at_decode_and_ring_positions():
    ring = np.concatenate([np.arange(8, 16), np.arange(8)])  # the second shard's keys come first
    kinds = masks.tile_map(masks.Causal(), 8, 16, 4, 4, q_positions=np.arange(8), kv_positions=ring)
    np.testing.assert_array_equal(kinds, [[0, 0, 1, 0], [0, 0, 2, 1]])
    last = masks.tile_map(masks.Causal() & masks.Window(5), 1, 16, 1, 4, q_positions=np.array([11]))
    np.testing.assert_array_equal(last, [[0, 1, 2, 0]])


def test_empty_axes():
    for mask in (
        masks.Causal(),
        masks.Segments(jnp.zeros(0, int), jnp.zeros(3, int)),
        masks.Lengths(kv=jnp.int32(2)),
    ):
        assert mask.dense(0, 3).shape == (0, 3)
        assert masks.tile_map(mask, 0, 3, 2, 2).shape == (0, 2)
    assert masks.Causal().dense(3, 0).shape == (3, 0)
    assert masks.tile_map(masks.Causal(), 3, 0, 2, 2).shape == (2, 0)


TRACED: dict[str, Callable[[], Any]] = {
    "segments": lambda: masks.Segments(jnp.asarray(SORTED)),
    "lengths": lambda: masks.Lengths(q=jnp.asarray(20), kv=jnp.asarray(9)),
    "prefix": lambda: masks.Prefix(jnp.asarray(7)) | masks.Causal(),
    "blocks": lambda: masks.Blocks(jnp.asarray(COARSE), (4, 3)) & masks.Window(9),
    "dense": lambda: masks.Dense(jnp.asarray(np.kron(COARSE, np.ones((4, 3), bool))[None])),
    "together": lambda: (
        masks.Causal()
        & masks.Window(6)
        & ~(masks.Segments(jnp.asarray(SORTED)) | masks.Lengths(kv=jnp.asarray(9)))
    ),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", TRACED)
def test_traced_masks_give_the_same_map(name):
    mask = TRACED[name]()
    build = functools.partial(masks.tile_map, T=24, S=24, block_q=5, block_kv=4)
    inside, outside = jax.jit(build)(mask), build(mask)
    assert len(np.unique(outside)) > 1
    np.testing.assert_array_equal(inside, outside)
    assert inside.dtype == outside.dtype == np.int8


def test_static_maps_are_known_while_tracing():
    mask = (masks.Causal() & masks.Window(6)) | ~masks.Prefix(20) | masks.Global(1)

    @jax.jit
    def traced(x):
        kinds = masks.tile_map(mask, 24, 24, 4, 3)
        assert isinstance(kinds, np.ndarray)
        return x * kinds.sum()

    assert traced(1) == masks.tile_map(mask, 24, 24, 4, 3).sum() > 0


MILLION = 1_000_000


@pytest.mark.parametrize("block", [1024, 1000])
def test_a_million_by_a_million_costs_the_number_of_tiles(block):
    mask = masks.Causal() & masks.Window(4096)
    kinds, seconds = np.zeros((1, 1)), []
    for _ in range(3):
        start = time.perf_counter()
        kinds = masks.tile_map(mask, MILLION, MILLION, block, block)
        seconds.append(time.perf_counter() - start)
    # About 0.02 ms per thousand tiles; asking tile after tile takes above 20.
    assert min(seconds) / (kinds.size / 1000) < 2e-3

    tracemalloc.start()
    masks.tile_map(mask, MILLION, MILLION, block, block)
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
    def temporaries(size):
        def build(lengths, ids):
            by_token = (
                masks.Segments(ids) if name == "segments" else masks.Lengths(lengths, lengths)
            )
            return masks.tile_map(masks.Causal() & by_token, size, size, 512, 512)

        arrays = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((size,), jnp.int32)
        analysis: Any = jax.jit(build).lower(*arrays).compile().memory_analysis()
        return analysis.temp_size_in_bytes

    for size in (2**15, 2**17):
        assert temporaries(size) <= 64 * (size + (size // 512) ** 2)


@pytest.mark.one_in(4)
@every_mask
def test_masks_are_frozen_pytrees_that_take_any_leaf(name):
    mask, (_, T, S, *_) = built(name), MASKS[name].sizes
    flat, structure = jax.tree.flatten(mask)
    again = jax.tree.unflatten(structure, flat)
    assert type(again) is type(mask)
    np.testing.assert_array_equal(again.dense(T, S), mask.dense(T, S))
    for stand_in in (None, object(), 0, "T S", jax.ShapeDtypeStruct((), int)):
        mapped = jax.tree.map(lambda _, x=stand_in: x, mask)
        assert type(mapped) is type(mask)
        if stand_in is not None:
            assert jax.tree.structure(mapped) == structure
            assert jax.tree.leaves(mapped) == [stand_in] * len(flat)
    for field in [field.name for field in dataclasses.fields(mask)] or ["anything"]:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(mask, field, 1)


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
        with pytest.raises(TypeError, match=r"write mask=mask.dense\(T, S\)\[None, None\]"):
            use(masks.Causal())
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


@pytest.mark.parametrize("rule", [masks.Causal(), ~masks.Full(), scores.SoftCap(2.0)])
def test_rules_are_neither_true_nor_false(rule):
    for write in (lambda: rule and rule, lambda: rule or rule, lambda: not rule):
        with pytest.raises(TypeError, match="is None"):
            write()


def later(b, h, q, kv):
    return kv > q + 200


def test_bounds_that_lie_are_found():
    lying = masks.Predicate(later, bounds=lambda t: (t.columns.hi < 0, t.columns.hi < 0))
    with pytest.raises(ValueError, match="bounds"):
        masks.check_bounds(lying, 300, 300)


@pytest.mark.parametrize(
    ("bounds", "kind"),
    [
        (lambda t: t.columns.hi > 0, TypeError),
        (lambda t: (t.columns.hi, t.columns.hi), TypeError),
        (lambda t: (np.ones(7, bool), np.ones(7, bool)), ValueError),
    ],
)
def test_what_bounds_return_is_checked(bounds, kind):
    with pytest.raises(kind, match="bounds must return"):
        masks.tile_map(masks.Predicate(later, bounds=bounds), 300, 300, 100, 100)
