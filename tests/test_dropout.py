"""Dropout by a hash. Bounds of statistical tests are five standard deviations; keys fixed."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn import dropout
from tests.cases import GENERAL
from tests.conftest import quick_jit


every_implementation = pytest.mark.parametrize("implementation", GENERAL)
KEY = jax.random.key(7)


@functools.cache
def keeper(rate: float, batch: int, heads: int) -> Any:
    """Returns a function `key -> bool [batch, heads, T, S]` for the given rows and columns."""

    def every(key: Any, rows: Any, columns: Any) -> Any:
        head = lambda b, h: dropout.keep(key, rate, b, h, rows, columns)  # noqa: E731
        return jax.vmap(jax.vmap(head, (None, 0)), (0, None))(jnp.arange(batch), jnp.arange(heads))

    return every


def decisions(rate: float, batch: int, heads: int, T: int, S: int, key: Any = KEY) -> np.ndarray:
    """Returns the weights that dropout keeps, bool `[batch, heads, T, S]`."""
    return np.asarray(quick_jit(keeper(rate, batch, heads))(key, jnp.arange(T), jnp.arange(S)))


def over_keys(keys: Any, rate: float, *sizes: int) -> np.ndarray:
    """Returns decisions for many keys, along a new leading axis."""
    batch, heads, T, S = sizes
    every = quick_jit(jax.vmap(keeper(rate, batch, heads), (0, None, None)))
    return np.asarray(every(keys, jnp.arange(T), jnp.arange(S)))


@every_implementation
def test_rate_zero_is_no_dropout_and_needs_no_key(implementation):
    q, k, v = (jax.random.normal(key, (2, 5, 4, 3)) for key in jax.random.split(KEY, 3))
    call = functools.partial(jattn.attention, q, k, v, implementation=implementation)
    np.testing.assert_array_equal(call(), call(dropout_rate=0.0))
    np.testing.assert_array_equal(call(), call(dropout_rate=0.0, dropout_key=KEY))
    assert not np.array_equal(call(), call(dropout_rate=0.5, dropout_key=KEY))


@every_implementation
def test_two_batch_axes_count_row_major(implementation):
    """Queries of zero have weights of 1 / S, and one-hot values show each of them."""
    v = jnp.broadcast_to(jnp.eye(7)[:, None, :], (6, 7, 2, 7))
    qkv = jnp.zeros((6, 5, 4, 3)), jnp.ones((6, 7, 2, 3)), v
    rules = {"dropout_rate": 0.4, "dropout_key": KEY, "implementation": implementation}
    call = quick_jit(functools.partial(jattn.attention, **rules))
    flat = call(*qkv)
    square = call(*(x.reshape(2, 3, *x.shape[1:]) for x in qkv))
    np.testing.assert_array_equal(square.reshape(flat.shape), flat)


def test_parts_of_the_decisions_are_decided_alike():
    whole = decisions(0.3, 2, 3, 33, 47)
    rows, columns = jnp.arange(16, 33), jnp.arange(5, 21)
    keep = quick_jit(keeper(0.3, 2, 3))
    np.testing.assert_array_equal(keep(KEY, rows, columns), whole[:, :, 16:33, 5:21])
    order = np.random.default_rng(0).permutation(33)
    np.testing.assert_array_equal(keep(KEY, jnp.asarray(order), jnp.arange(47)), whole[:, :, order])
    for b, h, i, j in ((0, 0, 0, 0), (1, 2, 32, 46), (1, 0, 17, 3)):
        single = dropout.keep(KEY, 0.3, b, h, jnp.array([i]), jnp.array([j]))
        assert bool(single[0, 0]) == whole[b, h, i, j]
    narrow = jnp.arange(5, dtype=jnp.int32), np.arange(7)
    narrow = dropout.keep(KEY, 0.3, np.int32(1), np.uint8(2), *narrow)
    np.testing.assert_array_equal(narrow, whole[1, 2, :5, :7])


def test_every_word_of_a_key_of_any_kind_counts():
    typed, raw = (decisions(0.5, 2, 3, 5, 7, x(3)) for x in (jax.random.key, jax.random.PRNGKey))
    np.testing.assert_array_equal(typed, raw)
    words = jnp.array([[11, 22], [10, 22], [11, 23]], jnp.uint32)
    for keys in (words, [jax.random.key(3, impl=x) for x in ("rbg", "threefry2x32")]):
        first, *others = (decisions(0.5, 1, 2, 32, 32, key) for key in keys)
        assert abs(first.mean() - 0.5) < 5 * 0.5 / np.sqrt(first.size)
        for other in others:
            assert abs((other != first).mean() - 0.5) < 5 * 0.5 / np.sqrt(first.size)


def test_raw_keys_have_the_words_of_the_default_implementation():
    q = jnp.ones((1, 3, 1, 8))
    call = lambda key: jattn.attention(q, q, q, dropout_rate=0.5, dropout_key=key)  # noqa: E731
    with jax.default_prng_impl("rbg"):
        call(jax.random.PRNGKey(0))
        with pytest.raises(ValueError, match=r"dropout_key: .*uint32 \[4\], got uint32 \[2\]"):
            call(jnp.zeros(2, jnp.uint32))


def mixed(x: int, last: int) -> int:
    """Two rounds of Wellons's hash, of which the second multiplies with `last`; all bits of 32."""
    x = (x ^ x >> 16) * 0x7FEB352D % 2**32
    return (x ^ x >> 15) * last % 2**32


@pytest.mark.parametrize("rate", [1e-9, 0.1, 0.5, 0.999])
def test_decisions_are_those_of_the_hash(rate):
    whole = lambda x: mixed(x, 0x846CA68B) ^ mixed(x, 0x846CA68B) >> 16  # noqa: E731
    last = 0x846CA68B, 0x846CA68B * 2891336453 % 2**32
    seed = int(dropout.seed(KEY, 1, 2))
    expected = [
        [
            mixed((whole(seed ^ whole(i & ~8)) + whole(j + 0x85EBCA6B)) % 2**32, last[i >> 3 & 1])
            >= dropout.threshold(rate)
            for j in range(30)
        ]
        for i in range(40)
    ]
    got = dropout.keep(KEY, rate, 1, 2, jnp.arange(40), jnp.arange(30))
    np.testing.assert_array_equal(got, expected)


def test_the_decisions_are_pinned():
    bits = decisions(0.5, 2, 2, 4, 8, jnp.array([0, 42], jnp.uint32))
    assert np.packbits(bits).tobytes().hex() == "0662f8d7374ac6688a6ed4f2eb0beab1"


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_each_place_is_kept_with_the_right_probability(rate):
    decided = over_keys(jax.random.split(jax.random.key(0), 4000), rate, 2, 3, 5, 7)
    deviation = np.sqrt(rate * (1 - rate) / len(decided))
    by_place = (decided.mean(axis=0) - (1 - rate)) / deviation
    assert np.abs(by_place).max() < 5
    assert abs(by_place.mean()) < 5 / np.sqrt(by_place.size)
    assert 0.8 < by_place.std() < 1.2  # not more even than chance either


def signs(decided: np.ndarray, rate: float) -> np.ndarray:
    """Scales decisions to mean 0 and variance 1."""
    return (decided - (1 - rate)) / np.sqrt(rate * (1 - rate))


@pytest.mark.parametrize("axis", ["batch", "heads", "queries", "keys"])
def test_neighbours_are_independent(axis):
    """Distances of four and sixteen find generators that make several numbers at once."""
    values = signs(decisions(0.4, 20, 20, 20, 20), 0.4)
    place = ["batch", "heads", "queries", "keys"].index(axis)
    aligned = np.moveaxis(values, place, 0)
    for distance in (1, 2, 3, 4, 8, 16):
        pairs = aligned[distance:] * aligned[:-distance]
        assert abs(pairs.mean()) * np.sqrt(pairs.size) < 5, distance


@pytest.mark.parametrize("rate", [0.002, 0.5, 0.998])
def test_queries_that_share_a_hash_are_independent(rate):
    """Both are dropped as often as chance has it, even if one query rarely is."""
    decided = decisions(rate, 1, 2, 512, 2048).reshape(2, 32, 2, 8, 2048)
    first, second = ~decided[:, :, 0], ~decided[:, :, 1]
    for shift in (0, 1, 3):
        both = first & np.roll(second, shift, axis=-1)
        assert abs(both.mean() - rate**2) < 5 * np.sqrt(rate**2 * (1 - rate**2) / both.size)


def test_rectangles_are_independent():
    """A hash that only mixes a word of the row with a word of the column fails here."""
    values = signs(decisions(0.5, 2, 2, 64, 64), 0.5)
    for di, dj in ((1, 1), (2, 3), (4, 4), (8, 1), (8, 8), (17, 5), (32, 32)):
        corners = values[:, :, di:, dj:] * values[:, :, :-di, :-dj]
        corners = corners * values[:, :, di:, :-dj] * values[:, :, :-di, dj:]
        assert abs(corners.mean()) * np.sqrt(corners.size) < 5, (di, dj)


def assert_uncorrelated(values: np.ndarray) -> None:
    """Checks that no two rows of signs are correlated."""
    rows = values.reshape(len(values), -1)
    products = rows @ rows.T / rows.shape[1]
    np.fill_diagonal(products, 0)
    assert np.abs(products).max() < 5.5 / np.sqrt(rows.shape[1])


@pytest.mark.parametrize(
    "keys",
    [
        lambda: jax.vmap(jax.random.key)(jnp.arange(64)),
        lambda: jax.random.split(KEY, 64),
        lambda: jax.vmap(jax.random.fold_in, (None, 0))(KEY, jnp.arange(64)),
    ],
    ids=["consecutive seeds", "split", "fold_in"],
)
def test_keys_are_independent(keys):
    assert_uncorrelated(signs(over_keys(keys(), 0.5, 1, 1, 32, 32), 0.5))
