"""Positions: sinusoids by their formula, and rotary embeddings by loops and by their purpose."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn import masks, positions, scores
from tests.cases import bucket
from tests.conftest import expect


STYLES = ["half", "interleaved"]
RNG = np.random.default_rng(0)


def sinusoid(position: int, width: int, base: float = 10000.0) -> list[float]:
    """Vaswani et al. 2017, section 3.5, channel by channel."""
    channels = []
    for channel in range(width):
        angle = position / base ** (2 * (channel // 2) / width)
        channels.append(math.sin(angle) if channel % 2 == 0 else math.cos(angle))
    return channels


@pytest.mark.parametrize("width, base", [(2, 10000.0), (6, 10000.0), (10, 100.0), (512, 10000.0)])
def test_sinusoidal_by_the_formula(width, base):
    places = np.array([[0, 1, 5], [17, 1000, 99]])
    options = {"base": base, "dtype": jnp.float64}
    got = jax.jit(lambda places: positions.sinusoidal(places, width, **options))(places)
    want = [[sinusoid(int(p), width, base) for p in row] for row in places]
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-12, strict=True)


def test_sinusoidal_is_float32_by_default_and_takes_a_dtype():
    small = np.array([3, 700])
    rows = (small, "float32", 1e-4), (small, "float16", 1e-3), (small, "bfloat16", 4e-3)
    for places, dtype, error in (*rows, (FAR, "bfloat16", 1e-2)):
        got = positions.sinusoidal(jnp.asarray(places), 8, dtype=jnp.dtype(dtype))
        assert got.dtype == dtype
        got = np.asarray(got, np.float64)
        close(got, [sinusoid(int(p), 8) for p in places], atol=error)
        assert len({row.tobytes() for row in got}) == len(places)
    assert positions.sinusoidal(jnp.arange(2), 8).dtype == jnp.float32


def turned(x: Any, places: Any, style: str, base: float = 10000.0, size: int = 0) -> np.ndarray:
    """Su et al. 2021, section 3.2.2, pair by pair of the first `size` channels; 0 means all."""
    size = size or x.shape[-1]
    result = np.array(x)
    for *place, head in np.ndindex(x.shape[:-1]):
        vector = (*place, head)
        for pair in range(size // 2):
            first, step = (pair, size // 2) if style == "half" else (2 * pair, 1)
            second = first + step
            angle = int(places[tuple(place)]) * base ** (-2 * pair / size)
            a, b = x[(*vector, first)], x[(*vector, second)]
            result[(*vector, first)] = a * math.cos(angle) - b * math.sin(angle)
            result[(*vector, second)] = b * math.cos(angle) + a * math.sin(angle)
    return result


OPTIONS = ("style", "base", "rotary_dim", "scaling")
compiled = jax.jit(positions.rotary, static_argnames=OPTIONS)


def rotary(x: Any, places: Any, *options: Any, **named: Any) -> np.ndarray:
    return np.asarray(compiled(jnp.asarray(x), jnp.asarray(places), *options, **named))


close = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-13)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("size", [None, 2, 6])
@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
def test_rotary_by_the_formula(style, size, batch):
    x = RNG.normal(size=(*batch, 5, 3, 10))
    by_row = RNG.integers(0, 60, (*batch, 5))
    for places, base in ((by_row, 10000.0), (np.array([3, 0, 41, 7, 7]), 5e5)):
        got = rotary(x, places, style, base, rotary_dim=size)
        close(got, turned(x, np.broadcast_to(places, x.shape[:-2]), style, base, size or 0))


FAR = np.array([255, 256, 257, 4095, 32767])


def first_channels(count: int, style: str) -> np.ndarray:
    """Vectors `[count, 1, 8]` whose rotation is cosines and sines: 1 and 0 in each pair."""
    x = np.zeros((count, 1, 8))
    x[..., slice(4) if style == "half" else slice(0, None, 2)] = 1
    return x


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("style", STYLES)
def test_far_positions_in_low_precision(dtype, style):
    x = first_channels(5, style)
    got = rotary(jnp.asarray(x, dtype), FAR, style)
    assert got.dtype == rotary(jnp.asarray(x, dtype), FAR, style, rotary_dim=4).dtype == dtype
    close(np.float64(got), turned(x, FAR, style), atol=1e-2)
    assert len({row.tobytes() for row in got}) == len(FAR)
    # Rounded in bfloat16, these positions would be 255, 256, 256 (or 258), 4096, 32768.
    rounded = np.asarray(jnp.asarray(FAR, jnp.bfloat16), np.int64)
    assert np.abs(turned(x, rounded, style) - turned(x, FAR, style)).max() > 0.5


@pytest.mark.parametrize("style", STYLES)
def test_documented_limit_of_float32_angles(style):
    x, places = first_channels(1, style), np.array([100_000])
    for dtype, limit in (("float32", 1e-2), ("float64", 1e-10)):
        got = rotary(x.astype(dtype), places, style)
        assert got.dtype == dtype
        close(got, turned(x, places, style), atol=limit)


@pytest.mark.parametrize("style", STYLES)
def test_gradients_turn_back_by_the_formula(style):
    """The rotation is orthogonal."""
    d_out, places = RNG.normal(size=(4, 2, 6)), np.array([0, 3, 9, 100])
    run = lambda x: positions.rotary(x, jnp.asarray(places), style)  # noqa: E731
    gradient = jax.jit(lambda x, d_out: jax.vjp(run, x)[1](d_out)[0])
    close(gradient(jnp.ones((4, 2, 6)), jnp.asarray(d_out)), turned(d_out, -places, style))


def frequencies(size: int, scaling: Any, base: float = 10000.0) -> tuple[np.ndarray, np.ndarray]:
    """The angle by which position 1 rotates each pair, and the factor of the pair's length."""
    x = np.tile(np.array([1.0, 0.0]), size // 2)[None, None]
    got = rotary(x, [1], "interleaved", base, scaling=scaling)
    z = got[0, 0, 0::2] + 1j * got[0, 0, 1::2]
    return np.angle(z), np.abs(z)


def test_linear_scaling_is_that_of_positions():
    x, places = RNG.normal(size=(5, 3, 10)), np.array([0, 4, 8, 20, 400])
    close(rotary(x, places, scaling=positions.Linear(4.0)), turned(x, places // 4, "half"))


def test_ntk_scaling_divides_the_lowest_frequency_only():
    plain, scaled = frequencies(12, None)[0], frequencies(12, positions.NTK(8.0))[0]
    np.testing.assert_allclose(scaled[0], plain[0], rtol=1e-14)
    np.testing.assert_allclose(scaled[-1], plain[-1] / 8, rtol=1e-12)
    np.testing.assert_allclose(scaled, (10000.0 * 8 ** (12 / 10)) ** (-np.arange(6) / 6))
    says = "NTK expects a rotary size of at least 4, got 2"
    expect(ValueError, says, frequencies, 2, positions.NTK(8.0))


def test_yarn_by_the_paper():
    """Peng et al. 2023, sections 3.2 and 3.4, one pair at a time."""
    s, length = 16.0, 4096
    got, amplitude = frequencies(128, positions.Yarn(s, length))
    kinds = set()
    for pair, plain in enumerate(frequencies(128, None)[0]):
        turns = length / (2 * math.pi / plain)
        share = 0.0 if turns < 1 else 1.0 if turns > 32 else (turns - 1) / 31
        kinds.add(0 if share == 0 else 1 if share == 1 else 0.5)
        np.testing.assert_allclose(got[pair], (1 - share) * plain / s + share * plain, rtol=1e-12)
    assert kinds == {0, 0.5, 1}
    np.testing.assert_allclose(amplitude, 0.1 * math.log(16) + 1, rtol=1e-12)


def test_yarn_by_pairs():
    """4096 positions rotate pair 20.94 of 64 by 32 turns and pair 45.03 by one, for base 10000."""
    got, amplitude = frequencies(128, positions.Yarn(16.0, 4096, ramp="pair", amplitude=1.0))
    plain = frequencies(128, None)[0]
    ramp = np.clip((np.arange(64) - 20) / (46 - 20), 0, 1)
    np.testing.assert_allclose(got, plain * (1 - ramp) + plain / 16 * ramp, rtol=1e-12)
    np.testing.assert_allclose(amplitude, 1, rtol=1e-12)


def test_axial_rotary_turns_each_part_by_its_coordinate():
    x, places = RNG.normal(size=(2, 6, 3, 8)), RNG.integers(0, 40, (2, 6, 2))
    options = "interleaved", 100.0
    run = jax.jit(lambda x, p: positions.axial_rotary(x, p, *options))
    parts = [turned(x[..., 4 * i :][..., :4], places[..., i], *options) for i in range(2)]
    close(run(jnp.asarray(x), jnp.asarray(places)), np.concatenate(parts, axis=-1))


def test_learned_takes_rows_and_gives_nan_outside_of_the_table():
    table = jnp.asarray(RNG.normal(size=(6, 3)))
    places = np.array([[5, 6, 7, -1], [-6, 1000, 0, 2]])
    inside = (places >= 0) & (places < 6)
    for lookup in (positions.learned, jax.jit(positions.learned)):
        got = np.asarray(lookup(table, jnp.asarray(places)))
        np.testing.assert_array_equal(got[inside], table[places[inside]])
        assert np.isnan(got[~inside]).all()
    gradient = jax.grad(lambda table: positions.learned(table, jnp.array([1, 4, 1])).sum())(table)
    np.testing.assert_array_equal(gradient[:, 0], [0, 2, 0, 0, 1, 0])


@pytest.mark.parametrize(("T", "S"), [(3, 7), (7, 3), (4, 4), (1, 9), (0, 3)])
def test_queries_aligned_to_the_end(T, S):
    places = positions.aligned_to_end(T, S)
    assert places.dtype == jnp.int32
    np.testing.assert_array_equal(places, np.arange(T) + S - T)
    np.testing.assert_array_equal(
        masks.Causal().dense(T, S, q_positions=places), np.tril(np.ones((T, S), bool), S - T)
    )
    by_row = positions.aligned_to_end(T, np.array([[S, 2]]))
    assert by_row.shape == (1, 2, T)
    np.testing.assert_array_equal(by_row[0, 0], places)
    np.testing.assert_array_equal(by_row[0, 1], np.arange(T) + 2 - T)
    traced = jax.jit(positions.aligned_to_end, static_argnums=0)(T, jnp.array([S, 2]))
    np.testing.assert_array_equal(traced, by_row[0])


LEAST, GREATEST = -(2**31), 2**31 - 1
EXTREMES = np.array([LEAST, LEAST + 1, LEAST + 5, -7, -1, 0, 3, 2**30, GREATEST - 4, GREATEST])
Q, KV = EXTREMES[:, None], EXTREMES[None, :]  # int64: nothing overflows here

AT_EXTREMES = {x: jnp.asarray(EXTREMES, "int32") for x in ("q_positions", "kv_positions")}


def scores_at_extremes(score: Any) -> Any:
    q = jnp.zeros((1, len(EXTREMES), 1, 1))
    return jattn.attention_scores(q, q, score=score, **AT_EXTREMES)[0, 0]


def test_alibi_knows_distances_of_33_bits():
    got = scores_at_extremes(scores.Alibi(jnp.asarray([2.0**-31])))
    np.testing.assert_array_equal(got, -np.abs(Q - KV) * 2.0**-31)


@pytest.mark.parametrize("bidirectional", [True, False])
def test_relative_bias_knows_who_is_before_whom(bidirectional):
    rules: Any = {"bidirectional": bidirectional, "max_distance": 12}
    got = scores_at_extremes(scores.RelativeBias(jnp.arange(8.0)[:, None], **rules))
    find = np.vectorize(lambda d: bucket(int(np.clip(d, -100, 100)), 8, bidirectional, 12))
    np.testing.assert_array_equal(got, find(KV - Q))
