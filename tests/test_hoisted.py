"""Look-ups of score functions that are made before kernels in Mosaic run: which they are, and that
the arrays hold the entries that the function finds."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jattn import masks, scores
from jattn._pytree import select_head
from jattn.kernels.gpu.mosaic.tile import hoisted
from jattn.spec import Shapes, Spec
from tests.kernels import prepared
from tests.test_hopper import example, reason


RNG = np.random.default_rng(0)
SHAPES = Shapes((2,), 5, 7, 3, 1, 64, 64, jnp.dtype("bfloat16"))
T, S, N = SHAPES.T, SHAPES.S, SHAPES.N
TABLE = RNG.normal(size=(2, 3, 11)).astype(np.float32)
IDS = np.asarray([3, 1, 4, 1, 5, 9, 2], np.int32)
Q_POSITIONS = np.asarray([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]], np.int32)
KV_POSITIONS = np.asarray([[2, 7, 1, 8, 2, 8, 1], [6, 1, 8, 0, 3, 3, 9]], np.int32)


def spec_of(place: Any, **positions: Any) -> Spec:
    """A spec whose score adds the entries at `place(score, b, h, q, kv, ids)` of a table."""
    function = lambda s, b, h, q, kv, table, ids: s + table[place(s, b, h, q, kv, ids)]  # noqa: E731
    score = scores.Score(function, jnp.asarray(TABLE), jnp.asarray(IDS))
    return dataclasses.replace(scored(score), **positions)


def scored(score: scores.ScoreFunction) -> Spec:
    return prepared(Spec(masks.Full(), score, 1.0, None, None), SHAPES)


def ones(size: int) -> Any:
    return jnp.ones((size,), jnp.float32)


def clipped(distance: Any) -> Any:
    return jnp.clip(distance, -5, 5) + 5


def searched(ids: Any, x: Any) -> Any:
    return jnp.searchsorted(jnp.sort(ids), x)


PLACES: dict[str, tuple[Any, str | None]] = {
    "nothing": (lambda s, b, h, q, kv, ids: (1, 2, -3), "by_head"),
    "head": (lambda s, b, h, q, kv, ids: (0, h, 4), "by_head"),
    "row and head": (lambda s, b, h, q, kv, ids: (b, h, b + h), "by_head"),
    "query": (lambda s, b, h, q, kv, ids: (0, 1, q - 2), "by_query"),
    "row, head and query": (lambda s, b, h, q, kv, ids: (b, h, ids[q] % 7), "by_query"),
    "key": (lambda s, b, h, q, kv, ids: (b, 1 - h, ids[kv]), "by_key"),
    "key by a search": (lambda s, b, h, q, kv, ids: (b, h, searched(ids, kv)), "by_key"),
    "pair by a search": (lambda s, b, h, q, kv, ids: (b, h, searched(ids, q * kv)), None),
    "distance": (lambda s, b, h, q, kv, ids: (1, h, clipped(q - kv)), "by_distance"),
    "distance the other way": (lambda s, b, h, q, kv, ids: (1, 2, clipped(kv - q)), "by_distance"),
    "moved distance": (lambda s, b, h, q, kv, ids: (1, 2, 3 + q - kv), "by_distance"),
    "which is first": (lambda s, b, h, q, kv, ids: (0, 0, jnp.where(q < kv, 1, 2)), "by_distance"),
    "row and distance": (lambda s, b, h, q, kv, ids: (b, h, clipped(q - kv)), None),
    "sum": (lambda s, b, h, q, kv, ids: (0, h, (q + kv) % 11), None),
    "twice the key": (lambda s, b, h, q, kv, ids: (0, h, clipped(q - kv - kv)), None),
    "moved earlier": (lambda s, b, h, q, kv, ids: (0, h, jnp.where(q + 2**30 > kv, 1, 2)), None),
    "remainders": (lambda s, b, h, q, kv, ids: (0, h, q % 3 - kv % 3 + 3), None),
    "score": (lambda s, b, h, q, kv, ids: (0, h, jnp.int32(s)), None),
}


def values(place: Any, field: str, q: np.ndarray, kv: np.ndarray) -> np.ndarray:
    """The entries that the function finds, by loops: `[B, N]`, then T, S or all distances."""

    def entry(b: int, h: int, q: int, kv: int) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            index = place(0.0, *map(jnp.int32, (b, h, q, kv)), jnp.asarray(IDS))
        bounded = (min(int(x), n - 1) for x, n in zip(index, TABLE.shape, strict=True))
        return TABLE[tuple(bounded)]

    behind = {
        "by_head": lambda b: [(0, 0)],
        "by_query": lambda b: [(x, 0) for x in q[b]],
        "by_key": lambda b: [(0, x) for x in kv[b]],
        "by_distance": lambda b: [(max(-d, 0), max(d, 0)) for d in range(1 - T, S)],
    }[field]
    return np.asarray([[[entry(b, h, *x) for x in behind(b)] for h in range(N)] for b in range(2)])


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize("shifted", [False, True])
def test_which_look_ups_are_made_before(name, shifted):
    """If the user passes positions, no array by distance is known."""
    (place, field), positions = PLACES[name], {}
    q, kv = (np.tile(np.arange(size), (2, 1)) for size in (T, S))
    if shifted:
        q, kv = Q_POSITIONS, KV_POSITIONS
        positions = {"q_positions": jnp.asarray(q), "kv_positions": jnp.asarray(kv)}
    spec = spec_of(place, **positions)
    replacement: Any = hoisted.replaced(spec, SHAPES).score
    if field is None or (shifted and field == "by_distance"):
        assert replacement is spec.score
        return
    assert replacement.sites == ((field.removeprefix("by_"), 0),)
    assert not replacement.tables
    (got,) = getattr(replacement, field)
    want = values(place, field, q, kv)
    if field == "by_head":
        want = want[..., 0]
    if field == "by_distance":
        want = want[0]
    np.testing.assert_array_equal(np.broadcast_to(got, want.shape), want)
    for axis, (size, other) in enumerate(zip(got.shape, want.shape, strict=True)):
        assert size == (1 if (want == want.take([0], axis)).all() and other in (2, N) else other)


def test_a_search_that_stays_reads_its_own_array():
    def function(score: Any, b: Any, h: Any, q: Any, kv: Any, table: Any, ids: Any) -> Any:
        return score + table[0, h, kv] + searched(ids, q * kv).astype(score.dtype)

    spec = scored(scores.Score(function, jnp.asarray(TABLE), jnp.asarray(IDS)))
    replacement: Any = hoisted.replaced(spec, SHAPES).score
    assert replacement.sites == (("key", 0),) and len(replacement.tables) == 1
    places = (jnp.arange(size, dtype=jnp.int32) for size in (T, S))
    rows, columns = (masks.Span(x, x) for x in places)
    tile = select_head(replacement, 0, 1)
    got = tile.evaluate(jnp.zeros((T, S), jnp.float32), 0, 1, rows, columns)
    q, kv = np.ogrid[:T, :S]
    np.testing.assert_allclose(got, TABLE[0, 1, kv] + np.searchsorted(np.sort(IDS), q * kv))


@pytest.mark.parametrize(("farthest", "known"), [(20, True), (2**16, True), (2**16 + 1, False)])
def test_the_buckets_of_positions_are_known_before(farthest, known):
    """XLA computes the gradient of their table, which stays the same array."""
    spec = scored(scores.RelativeBias(jnp.ones((12, N)), max_distance=farthest))
    spec: Any = dataclasses.replace(spec, kv_positions=jnp.asarray(KV_POSITIONS))
    replacement: Any = hoisted.replaced(spec, SHAPES).score
    assert isinstance(replacement, hoisted.ByBucket if known else scores.RelativeBias)
    assert replacement.table is spec.score.table


def test_an_operand_with_another_look_up_or_operation_stays():
    """Another operand that is looked up twice has one array."""
    twice = lambda s, b, h, q, kv, gate, pairs, unused: (  # noqa: E731
        s * gate[h] * gate[h] + gate[q] + pairs[h] + pairs[q + kv]
    )
    spec: Any = scored(scores.Score(twice, ones(3), ones(12), ones(4)))
    replacement: Any = hoisted.replaced(spec, SHAPES).score
    assert replacement.tables == (spec.score.operands[1],)
    assert replacement.sites == (("head", 0), ("query", 0))
    made = scored(scores.Score(lambda s, b, h, q, kv, t: s + jnp.sort(t)[(q + kv) % 4], ones(4)))
    assert hoisted.replaced(made, SHAPES).score is made.score


TWO = jnp.arange(2, dtype=jnp.int32)


@pytest.mark.parametrize(
    ("function", "count"),
    [
        (lambda s, b, h, q, kv, t: lax.cond(q > kv, lambda: s + t[h], lambda: s), 1),
        (lambda s, b, h, q, kv, t: s + t[h + TWO].sum(), 2),
        (lambda s, b, h, q, kv, t: s + jax.vmap(lambda x: t[x])(h + TWO).sum(), 2),
    ],
)
def test_each_entry_that_is_looked_up_has_an_array(function, count):
    spec = scored(scores.Score(function, ones(4)))
    replacement: Any = hoisted.replaced(spec, SHAPES).score
    assert replacement.sites == tuple(("head", n) for n in range(count))


def test_kernels_need_not_compute_what_makes_an_index():
    """Kernels need neither the operations they lack nor exact instructions for the index."""
    far = lambda q, kv: jnp.log1p(abs(q - kv).astype(jnp.float32))  # noqa: E731
    spec = spec_of(lambda s, b, h, q, kv, ids: (0, 0, jnp.int32(jnp.arctan(far(q, kv)) * 4)))
    assert reason(score=spec.score) is None
    assert example(hoisted.replaced(spec, SHAPES).score)[1]
    assert "needs log1p" in str(reason(score=spec.score, q_positions=jnp.arange(5)[None]))
