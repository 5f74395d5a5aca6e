"""Tiles whose kind bounds leave undecided, and whose pairs are therefore evaluated."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jattn
from jattn import masks, tuning
from jattn.functions import undecided
from jattn.masks import Predicate
from tests.devices import mesh_of
from tests.oracle import error


T = 96
EXACT = {"min_exact_pairs": 0, "max_exact_pairs": 2**20}


def hidden(x: Any) -> Any:
    return lax.while_loop(lambda x: x < 0, lambda x: x + 1, x)


def causal(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return hidden(q) >= kv


def tile_map(mask: masks.Mask, **options: Any) -> np.ndarray:
    kinds = masks.tile_map(mask, T, T - 10, 16, 32, **options)
    assert isinstance(kinds, np.ndarray)
    return kinds


def test_undecided_tiles_have_the_kinds_of_their_pairs():
    want = tile_map(masks.Causal())
    assert np.unique(tile_map(Predicate(causal))).tolist() == [masks.MIXED]
    with tuning.using(**EXACT):
        assert np.array_equal(tile_map(Predicate(causal)), want)
        assert np.array_equal(tile_map(~Predicate(causal)), 2 - want)
        both = Predicate(causal) & masks.Window(left=20)
        assert np.array_equal(tile_map(both), tile_map(masks.Causal() & masks.Window(left=20)))


@pytest.mark.parametrize("read", ["number", "list"])
def test_pairs_are_evaluated_once(read):
    box = [0]
    rules = {"number": causal, "list": lambda b, h, q, kv: causal(b, h, q, kv + box[0])}
    mask = Predicate(rules[read])
    undecided._evaluated.cache_clear()
    with tuning.using(**EXACT):
        for _ in range(3):
            tile_map(mask)
        assert undecided._evaluated.cache_info().misses == 1
        box[0] = 16
        shift = 16 if read == "list" else 0
        want = tile_map(Predicate(lambda b, h, q, kv: q >= kv + shift))
        assert np.array_equal(tile_map(mask), want)


def test_pairs_are_not_evaluated_where_they_are_many_or_few():
    for least, most in ((0, T * T // 2), (2 * T * T, 2**20)):
        with tuning.using(min_exact_pairs=least, max_exact_pairs=most):
            assert np.unique(tile_map(Predicate(causal))).tolist() == [masks.MIXED]


def test_tiles_of_one_head_and_of_any_head_differ():
    mask = Predicate(lambda b, h, q, kv: causal(b, h, q, kv) | (hidden(h) == 1))
    grid = masks.extents(T, 16), masks.extents(T, 16)
    with tuning.using(**EXACT):
        of_any = masks.kinds(mask, masks.Tile.grid(*grid))
        assert np.unique(of_any).tolist() == [masks.MIXED]
        assert np.array_equal(tile_map(mask, h=0), tile_map(masks.Causal()))
        assert np.array_equal(tile_map(mask, h=1), tile_map(masks.Full()))
        assert np.unique(jax.jit(lambda h: masks.kinds(mask, masks.Tile.grid(*grid, 0, h)))(0)) == 1


@pytest.mark.parametrize("other", [masks.Full(), masks.Lengths(kv=50, q=40), masks.Window(9, 9)])
def test_positions_in_any_order(other):
    rng = np.random.default_rng(0)
    positions: dict[str, Any] = {
        "q_positions": rng.permutation(T),
        "kv_positions": rng.permutation(T) * 3 - 99,
    }
    mask = Predicate(lambda b, h, q, kv: hidden(q) % 64 >= kv) & other
    with tuning.using(**EXACT):
        masks.check_bounds(mask, T, T, block_q=16, block_kv=32, heads=1, **positions)
        masks.check_bounds(mask, T, T, block_q=16, block_kv=32, heads=1)


def test_pairs_are_not_evaluated_with_traced_tables():
    def kinds_of(table: Any) -> Any:
        mask = Predicate(lambda b, h, q, kv: hidden(table[q]) >= kv)
        return masks.tile_map(mask, T, T, 16, 16)

    with tuning.using(**EXACT):
        assert np.unique(jax.jit(kinds_of)(jnp.arange(T, dtype=jnp.int32))).tolist() == [
            masks.MIXED
        ]
        want = masks.tile_map(masks.Causal(), T, T, 16, 16)
        assert np.array_equal(kinds_of(jnp.arange(T, dtype=jnp.int32)), want)


def _within(width: int, rows: int, columns: int) -> tuple[Any, Any]:
    """The rules of rows and of columns of a causal window over an image of this width."""

    def of_rows(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (kv // width <= q // width) & (q // width - kv // width < rows)

    def of_columns(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (kv % width <= q % width) & (q % width - kv % width < columns)

    return of_rows, of_columns


@pytest.mark.one_in(3)
@pytest.mark.parametrize("blocks", [(64, 64), (32, 128), (48, 16)])
@pytest.mark.parametrize("image", [(48, 17, 24, 16), (20, 20, 3, 20), (9, 31, 9, 5)])
def test_windows_over_images_are_cut_at_their_rows(image, blocks):
    """The calls are small, so that no pair is evaluated."""
    height, width, rows, columns = image
    of_rows, of_columns = _within(width, rows, columns)
    both = Predicate(lambda *x: of_rows(*x) & of_columns(*x))
    size = height * width
    places = np.arange(size)
    want = (
        of_rows(0, 0, places[:, None], places) & of_columns(0, 0, places[:, None], places)
    ).astype(bool)
    n, m = (-(-size // block) for block in blocks)
    padded = np.zeros((n * blocks[0], m * blocks[1]), bool)
    padded[:size, :size] = want
    some = padded.reshape(n, blocks[0], m, blocks[1]).any(axis=(1, 3))
    for mask in (both, Predicate(of_rows) & Predicate(of_columns), ~~both):
        got = masks.tile_map(mask, size, size, *blocks)
        np.testing.assert_array_equal(np.asarray(got) == masks.EMPTY, ~some)
        masks.check_bounds(mask, size, size, block_q=blocks[0], block_kv=blocks[1], heads=1)


def test_a_user_s_bounds_are_not_asked_about_parts():
    shapes = []

    def bounds(tile: masks.Tile) -> Any:
        shapes.append((np.shape(tile.rows.lo), np.shape(tile.columns.lo)))
        return np.True_, np.False_

    tile_map(Predicate(causal, bounds=bounds))
    assert shapes == [((6, 1), (1, 3))]


@pytest.mark.default_tiles
@pytest.mark.one_in(2)
@pytest.mark.parametrize("implementation", ["native", "blockwise"])
def test_attention_is_the_same(implementation):
    rng = np.random.default_rng(1)
    q, k, v = (jnp.asarray(rng.normal(size=(2, 600, 2, 8)) * 3, jnp.float32) for _ in range(3))

    def loss(mask: masks.Mask, x: Any) -> Any:
        return (jattn.attention(*x, mask=mask, implementation=implementation) ** 2).sum()

    # The kernel has no loops, and bounds of a power are not known either.
    rule = causal if implementation == "blockwise" else lambda b, h, q, kv: (q - kv) ** 3 >= 0

    def undecided_loss(x: Any) -> Any:
        return jax.value_and_grad(lambda x: loss(Predicate(rule), x))(x)

    want = jax.value_and_grad(lambda x: loss(masks.Causal(), x))((q, k, v))
    each = jax.tree.map(lambda x: x[:, None], (q, k, v))
    gradients = lambda x: undecided_loss(x)[1]  # noqa: E731
    sharded = jax.shard_map(gradients, mesh=mesh_of(x=2), in_specs=P("x"), out_specs=P("x"))
    with tuning.using(**EXACT):
        for got in (jax.jit(undecided_loss)((q, k, v)), jax.vmap(undecided_loss)(each)):
            np.testing.assert_allclose(np.sum(got[0]), want[0], rtol=1e-5)
            for x, y in zip(got[1], want[1], strict=True):
                assert error(x.reshape(y.shape), np.asarray(y, np.float64)) < 1e-4
        for x, y in zip(jax.jit(sharded)((q, k, v)), want[1], strict=True):
            assert error(x, np.asarray(y, np.float64)) < 1e-4
