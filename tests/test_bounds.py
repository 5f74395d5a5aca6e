"""The results of interval arithmetic on a function hold for every pair in every tile."""

import functools
import operator
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from jax import lax
from jax.sharding import PartitionSpec as P

import jattn
from jattn import masks, tuning
from jattn.functions import intervals, undecided
from jattn.functions.interval_rules import Interval
from jattn.functions.read import read
from jattn.masks import EMPTY, Predicate
from tests.arrays import assert_accurate
from tests.conftest import quick_jit
from tests.devices import mesh_of
from tests.test_masks import true_kinds


T = 96
WIDTH, HEIGHT = 16, 6
DOCUMENTS = np.sort(np.random.default_rng(0).integers(0, 5, (2, T)), axis=1)
SLOPES = np.array([0.1, 2.0, 30.0], np.float32)


def neighbourhood(b, h, q, kv):
    """A square around each query of an image, moved inwards at its edges (NATTEN)."""
    (q_row, q_column), (row, column) = ((x // WIDTH, x % WIDTH) for x in (q, kv))
    middle = jnp.clip(q_row, 1, HEIGHT - 2), jnp.clip(q_column, 2, WIDTH - 3)
    return (abs(middle[0] - row) <= 1) & (abs(middle[1] - column) <= 2)


def jagged(b, h, q, kv):
    offsets = jnp.asarray(np.array([20, 50, 51, 80], np.int32))
    return (jnp.sum(offsets <= q) == jnp.sum(offsets <= kv)) & (q >= kv)


DOCS = jnp.asarray(DOCUMENTS)
ENDS = jnp.asarray([7, 20, 20, 50], jnp.int32)
PICTURE = jnp.asarray(DOCUMENTS[0].reshape(HEIGHT, WIDTH))
BY_DISTANCE = jnp.asarray(np.random.default_rng(4).integers(0, 2, (32, 3)), jnp.int32)
RULES: dict[str, Callable[..., Any]] = {
    "causal": lambda b, h, q, kv: q >= kv,
    "window": lambda b, h, q, kv: (q >= kv) & (q - kv <= 20),
    "both sides": lambda b, h, q, kv: jnp.abs(q - kv) < 17,
    "prefix": lambda b, h, q, kv: (kv < 30) | (q >= kv),
    "documents": lambda b, h, q, kv: DOCS[0][q] == DOCS[0][kv],
    "causal documents": lambda b, h, q, kv: (DOCS[1, q] == DOCS[1, kv]) & (kv <= q),
    "documents of rows": lambda b, h, q, kv: DOCS[b, q] == DOCS[b, kv],
    "taken": lambda b, h, q, kv: jnp.take(DOCS[0], q) == jnp.take(DOCS[0], kv, mode="clip"),
    "neighbourhood": neighbourhood,
    "dilated window": lambda b, h, q, kv: (q >= kv) & (q - kv < 40) & ((q - kv) % 4 == 0),
    "global": lambda b, h, q, kv: (q < 16) | (kv < 16) | (abs(q - kv) < 10),
    "blocks": lambda b, h, q, kv: (q & ~15) == (kv & ~15),
    "shifted": lambda b, h, q, kv: (q >> 4) == (kv >> 4),
    "a window for each head": lambda b, h, q, kv: q - kv < (h + 1) * 10,
    "far by slope": lambda b, h, q, kv: jnp.asarray(SLOPES)[h] * (q - kv).astype(jnp.float32) < 25,
    "a choice": lambda b, h, q, kv: jnp.where(q < 40, kv < 8, kv > 80),
    "jagged": jagged,
    "a power": lambda b, h, q, kv: (q - kv) ** 2 < 300,
    "a huge power": lambda b, h, q, kv: (
        (((q - kv).astype(jnp.float32) / 16) ** (2**31 - 1) <= 1) & ((q - kv) ** (2**40 + 1) != 0)
    ),
    "reversed": lambda b, h, q, kv: (T - 1 - q) <= kv,
    "recombined": lambda b, h, q, kv: q // 10 * 10 + q % 10 >= (kv ^ 3) - kv % 2,
    "regions": lambda b, h, q, kv: (
        PICTURE[q // WIDTH, q % WIDTH] == PICTURE[kv // WIDTH, kv % WIDTH]
    ),
    "documents by their ends": lambda b, h, q, kv: (
        jnp.searchsorted(ENDS, q, side="right") == jnp.searchsorted(ENDS, kv, side="right")
    ),
    "the first power of two": lambda b, h, q, kv: (
        lax.while_loop(lambda x: x <= q, lambda x: 2 * x, jnp.int32(1)) > kv
    ),
    "documents in small integers": lambda b, h, q, kv: (
        (DOCS[0].astype(jnp.int8)[q] == DOCS[0].astype(jnp.int8)[kv]) & (kv <= q)
    ),
    "a table by distance": lambda b, h, q, kv: BY_DISTANCE[jnp.clip(q - kv, 0, 31), h] > 0,
    "a branch": lambda b, h, q, kv: jax.lax.cond(q < 32, lambda x: x < 5, lambda x: x > 60, kv),
}


def dense(rule: Callable[..., Any], b: int, h: int, q: Any, kv: Any) -> np.ndarray:
    every = quick_jit(jax.vmap(jax.vmap(rule, (None, None, None, 0)), (None, None, 0, None)))
    q, kv = (jnp.asarray(x, jnp.int32) for x in (q, kv))
    return np.asarray(every(jnp.int32(b), jnp.int32(h), q, kv))


@pytest.mark.parametrize("name", RULES)
def test_tiles_of_a_pasted_function_are_known(name):
    allowed = dense(RULES[name], 1, 2, np.arange(T), np.arange(T))
    kinds = masks.tile_map(Predicate(RULES[name]), T, T, 16, 16, b=1, h=2)
    assert isinstance(kinds, np.ndarray)  # known while tracing
    np.testing.assert_array_equal(kinds, true_kinds(allowed, 16, 16))


@pytest.mark.parametrize("name", ["documents of rows", "neighbourhood"])
def test_tiles_are_known_in_a_program_too(name):
    def rule(b, h, q, kv, docs):
        return RULES[name](b, h, q, kv) if name == "neighbourhood" else docs[b, q] == docs[b, kv]

    @jax.jit
    def kinds(docs, positions):
        places = {"q_positions": positions, "kv_positions": positions}
        return masks.tile_map(Predicate(rule, docs), T, T, 16, 16, b=1, **places)

    positions = np.arange(T, dtype=np.int32)[::-1].copy()
    want = true_kinds(dense(RULES[name], 1, 0, positions, positions), 16, 16)
    np.testing.assert_array_equal(kinds(DOCS, jnp.asarray(positions)), want)


def test_results_of_primitives_are_known_in_a_program():
    """Here the ends of documents, and the row whose documents they are, are known there alone."""
    ends = jnp.stack([ENDS + 9, ENDS])
    number = lambda ends, b, x: jnp.searchsorted(ends[b], x, side="right")  # noqa: E731
    rule = lambda b, h, q, kv, ends: number(ends, b, q) == number(ends, b, kv)  # noqa: E731
    kinds = jax.jit(lambda ends, b: masks.tile_map(Predicate(rule, ends), T, T, 16, 16, b=b))
    places = np.arange(T)
    for b in range(2):
        want = dense(lambda b, h, q, kv: rule(b, h, q, kv, ends), b, 0, places, places)
        np.testing.assert_array_equal(kinds(ends, b), true_kinds(want, 16, 16))


def test_jax_shifts_unsigned_numbers_as_if_they_had_a_sign():
    def rule(b, h, q, kv):
        number = (q + kv).astype(jnp.uint32) | jnp.uint32(2**31)
        return lax.shift_right_arithmetic(number, jnp.uint32(1)) >= jnp.uint32(2**31)

    assert Predicate(rule).dense(T, T).all()
    masks.check_bounds(Predicate(rule), T, T, block_q=16, block_kv=16)


@pytest.mark.parametrize("implementation", ["native", "blockwise"])
@pytest.mark.default_tiles
def test_rows_and_heads_may_index_a_table_after_positions(implementation):
    """Bounds treat the tiles as a list here, as most of them are undecided."""
    table = jnp.asarray(np.random.default_rng(4).integers(0, 3, (8, 2, 3)), jnp.int32)

    def by_row_and_head(b, h, q, kv):
        return (table[q & 7, b, 0] > 0) | (table[3, b, h] == kv % 3)

    x = jnp.asarray(np.random.default_rng(5).normal(size=(2, 300, 3, 8)), jnp.float32)
    for rule in (RULES["a table by distance"], by_row_and_head):
        run = functools.partial(jattn.attention, x, x, x, mask=rule)
        got, want = run(implementation=implementation), run(implementation="reference")
        np.testing.assert_allclose(got, want, atol=1e-5)


def test_tiles_without_keys_are_skipped():
    x = jnp.ones((1, 2048, 1, 8))

    def flops(mask: Any) -> float:
        call = functools.partial(jattn.attention, mask=mask, implementation="blockwise")
        costs: Any = jax.jit(call).lower(x, x, x).compile().cost_analysis()
        return costs["flops"]

    assert flops(Predicate(lambda b, h, q, kv: kv < 128)) < flops(None) / 8


S, BLOCK = 24, 6
EDGES = (0, -7, 2**31 - S, -(2**31), 2**30 - 9)


# The tables in which expressions look numbers up.
RNG = np.random.default_rng(1)
FLOATS = RNG.normal(size=S).astype(np.float32) * 8
FLOATS[[3, 7]] = np.nan, np.inf
IDS = jnp.asarray(RNG.integers(-3, 40, S), jnp.int32)
SQUARE = jnp.asarray(RNG.integers(-9, 9, (5, S)), jnp.int32)
TRUTHS = jnp.asarray(RNG.random(S) < 0.3)
Function = Callable[..., Any]  # of arrays that broadcast: q, kv and maybe a score


def _binary(operation: Callable[..., Any]) -> Callable[[Function, Function], Function]:
    return lambda f, g: lambda *arrays: operation(f(*arrays), g(*arrays))


def _unary(operation: Callable[..., Any]) -> Callable[[Function], Function]:
    return lambda f: lambda *arrays: operation(f(*arrays))


def _constant(value: Any) -> Function:
    return lambda *arrays: value + arrays[0] * 0


NUMBERS = st.integers(-40, 40) | st.sampled_from([1, 2, 8, 2**30, -(2**31), 2**31 - 1])
INT_OPERATIONS = [
    jnp.add, jnp.subtract, jnp.multiply, jnp.minimum, jnp.maximum, jnp.bitwise_and,
    jnp.bitwise_or, jnp.bitwise_xor, jnp.floor_divide, jnp.remainder, jax.lax.div, jax.lax.rem,
]  # fmt: skip
INT_UNARY = [
    jnp.abs, jnp.negative, jnp.sign, jnp.invert, lambda x: x >> 3, lambda x: x << 2, jnp.square,
    lambda x: x % 7, lambda x: x // 5, lambda x: x // -3, lambda x: x % 8, lambda x: x & 15,
    lambda x: x & ~7, lambda x: jnp.clip(x, -5, 11), lambda x: x**3,
    lambda x: IDS[x], lambda x: jnp.take(IDS, x, mode="clip"),
    lambda x: IDS.at[x].get(mode="fill", fill_value=3), lambda x: TRUTHS[x].astype(jnp.int32),
    lambda x: x.astype(jnp.int8).astype(jnp.int32),
]  # fmt: skip
FLOAT_OPERATIONS = [jnp.add, jnp.subtract, jnp.multiply, jnp.divide, jnp.minimum, jnp.maximum]
FLOAT_UNARY = [
    jnp.abs, jnp.negative, jnp.tanh, jnp.exp, jnp.log, jnp.sqrt, jnp.floor, jnp.ceil, jnp.round,
    jnp.square, lambda x: x**3, jax.nn.sigmoid, jnp.sign, jax.lax.rsqrt, jnp.sin, jnp.expm1,
    lambda x: jnp.where(jnp.isfinite(x), x, 1), lambda x: x * 0.37,
]  # fmt: skip
SMOOTH_UNARY = [
    jnp.abs, jnp.negative, jnp.tanh, lambda x: jnp.exp(-jnp.abs(x)), lambda x: jnp.log1p(x * x),
    lambda x: jnp.sqrt(x * x + 1), jax.nn.sigmoid, jnp.sin, lambda x: x * 0.37, jax.nn.softplus,
    lambda x: jnp.tanh(x / 9) ** 3, lambda x: 1 / (1 + x * x), jnp.square,
]  # fmt: skip
COMPARISONS = [operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne]


# Scores have finite numbers in float64.
_FINITE = jnp.asarray(np.nan_to_num(np.asarray(FLOATS, np.float64), posinf=3))


@st.composite
def expressions_of(draw: Any, kind: str, depth: int, score: bool = False) -> Function:
    """A random function of positions, and of a score if `score`: integers, floats or truths."""
    down = lambda kind: draw(expressions_of(kind, depth - 1, score))  # noqa: E731
    return {"int": _integer, "float": _float, "truth": _truth}[kind](draw, down, depth, score)


def _integer(draw: Any, down: Any, depth: int, score: bool) -> Function:
    if depth <= 0 or draw(st.integers(0, 5)) == 0:
        which = draw(st.integers(0, 2))
        if which == 2:
            return _constant(draw(NUMBERS))
        return lambda *arrays: arrays[which] + 0 * arrays[1 - which]
    choice = draw(st.integers(0, 4))
    if choice == 0:
        return _unary(draw(st.sampled_from(INT_UNARY)))(down("int"))
    if choice == 1:
        f, g, h = down("truth"), down("int"), down("int")
        return lambda *arrays: jnp.where(f(*arrays), g(*arrays), h(*arrays))
    if choice == 2:
        f, g = down("int"), down("int")
        return lambda *arrays: SQUARE[f(*arrays), g(*arrays)]
    return _binary(draw(st.sampled_from(INT_OPERATIONS)))(down("int"), down("int"))


def _float(draw: Any, down: Any, depth: int, score: bool) -> Function:
    choice = draw(st.integers(0, 5)) if depth > 0 else 0
    if score and (choice == 5 or depth <= 0):
        return lambda *arrays: arrays[2]
    if choice == 0:
        f = down("int")
        return lambda *arrays: f(*arrays).astype(arrays[2].dtype if score else jnp.float32)
    if choice == 1:
        operations = SMOOTH_UNARY if score else FLOAT_UNARY
        return _unary(draw(st.sampled_from(operations)))(down("float"))
    if choice == 2:
        f = down("int")
        return lambda *arrays: (_FINITE if score else jnp.asarray(FLOATS))[f(*arrays)]
    return _binary(draw(st.sampled_from(FLOAT_OPERATIONS)))(down("float"), down("float"))


def _truth(draw: Any, down: Any, depth: int, score: bool) -> Function:
    choice = draw(st.integers(0, 5))
    if depth > 0 and choice == 0:
        logic = draw(st.sampled_from([jnp.logical_and, jnp.logical_or, jnp.logical_xor]))
        return _binary(logic)(down("truth"), down("truth"))
    if depth > 0 and choice == 1:
        return _unary(jnp.logical_not)(down("truth"))
    of = "float" if choice in (2, 3) else "int"
    return _binary(draw(st.sampled_from(COMPARISONS)))(down(of), down(of))


@pytest.mark.parametrize("count", [8, pytest.param(2000, marks=pytest.mark.exhaustive)])
def test_bounds_of_random_functions_never_lie(count):
    edges = st.sampled_from(EDGES)
    seldom = st.sampled_from([False, False, False, True])
    example = given(expressions_of("truth", 4), edges, edges, seldom)
    settings(max_examples=count)(example(check_bounds_of))()


INFINITE = jnp.asarray([np.inf, *np.ones(S - 1)], jnp.float32)
ZEROS = jnp.asarray([-0.0, *np.zeros(S - 1)], jnp.float32)
WITHIN_TILES: dict[str, Function] = {  # infinity times a 0 between the ends; the inverse of -0
    "clip": lambda q, kv: jnp.clip(INFINITE[q] * (kv - 3), -1, 1) >= -1,
    "factors in the other order": lambda q, kv: jnp.tanh((q - 3.0) * INFINITE[kv]) <= 2,
    "minus infinity": lambda q, kv: jnp.clip(-INFINITE[q] * (kv - 3), -1, 1) <= 1,
    "minus 0": lambda q, kv: jax.lax.rsqrt(ZEROS[q]) > kv - 1.0,
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", "exp exp2 expm1 log log1p logistic sqrt rsqrt tanh".split())
def test_bounds_are_as_rough_as_xla(name, dtype):
    """Its log1p in float64 has an error of 120 units in the last place near -0.414."""
    rng, most = np.random.default_rng(0), {"exp": 80, "expm1": 80, "exp2": 120}.get(name, 1000)
    x = np.concatenate([np.linspace(-0.99, 2, 30001), rng.uniform(-most, most, 10001)])
    x = x[x > (0 if name in ("log", "sqrt", "rsqrt") else -0.999 if name == "log1p" else -most)]
    x = x.astype(dtype)
    got = np.asarray(jax.jit(getattr(lax, name))(x))
    bounds = intervals.of_operation(name, dtype, [Interval(x, x)])
    assert np.all((bounds.lo <= got) & (got <= bounds.hi))
    assert np.all(bounds.hi - bounds.lo <= 1e3 * np.finfo(dtype).eps * (1 + abs(got)))


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("name", WITHIN_TILES)
def test_bounds_of_special_numbers_within_a_tile(name, traced):
    check_bounds_of(WITHIN_TILES[name], 0, 0, traced)


def check_bounds_of(function: Function, q_first: int, kv_first: int, traced: bool) -> None:
    q, kv = ((first + np.arange(S)).astype(np.int32) for first in (q_first, kv_first))
    with jax.numpy_dtype_promotion("standard"):
        true = np.asarray(quick_jit(function)(q[:, None], kv[None, :]))
        expression = read(function, (np.int32, np.int32))
        lo, hi = (x.reshape(-1, BLOCK) for x in (q, kv))
        rows = Interval(lo.min(axis=1)[:, None], lo.max(axis=1)[:, None])
        columns = Interval(hi.min(axis=1)[None, :], hi.max(axis=1)[None, :])
        if traced:
            rows, columns = jax.tree.map(jnp.asarray, (rows, columns))
        result = intervals.of(expression, (rows, columns))
    true = np.broadcast_to(true, (S, S)).reshape(S // BLOCK, BLOCK, S // BLOCK, BLOCK)
    assert not np.any(true.any(axis=(1, 3)) & ~np.asarray(result.hi))
    assert not np.any(np.asarray(result.lo) & ~true.all(axis=(1, 3)))


PROGRAMS: dict[str, Callable[[Any], Any]] = {
    "sort": jnp.sort,
    "cumsum": jnp.cumsum,
    "softmax": jax.nn.softmax,
    "matmul": lambda t: jnp.outer(t, t) @ t,
    "norm": lambda t: t / jnp.linalg.norm(t),
    "one hot": lambda t: jax.nn.one_hot(jnp.argsort(t), len(t), dtype=t.dtype) @ t,
    "scan": lambda t: jax.lax.scan(lambda c, x: (c + x, c * x), t[0], t)[1],
    "map": lambda t: jax.lax.map(lambda x: x * x - 1, t),
    "vmap": jax.vmap(lambda x: jax.lax.cond(x > 0, jnp.sin, jnp.cos, x)),
    "custom derivative": lambda t: jax.nn.relu(t) + jax.nn.silu(t),
    "counts": lambda t: jnp.bincount((t > 0).astype(jnp.int32), length=len(t)),
    "random": lambda t: t + jax.random.normal(jax.random.key(1), t.shape, t.dtype),
    "own key": lambda t: t + jax.random.normal(KEY, t.shape, t.dtype),
    "own array": lambda t: jnp.roll(t, 2) - jnp.flip(jnp.asarray(SLOPES, t.dtype)).sum(),
}
KEY = jax.random.key(2)
EXACT = ("sort", "cumsum", "matmul", "scan", "map", "counts")  # the others are bounded by entries


@pytest.mark.one_in(4)
@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_a_program_makes_of_its_operands_alone_is_known(name, traced):
    table = jnp.asarray(np.random.default_rng(3).normal(size=7), jnp.float32)
    places = np.arange(7, dtype=np.int32)

    def looked_up(table):
        bounds = read(lambda q, t: PROGRAMS[name](t)[q], (np.int32,), (table,))
        interval = intervals.of(bounds, (Interval(places, places),))
        return interval.lo, interval.hi

    with jax.numpy_dtype_promotion("standard"):
        bounds = jax.jit(looked_up)(table) if traced else looked_up(table)
        want = np.asarray(PROGRAMS[name](table))
    bounds = [np.asarray(edge) for edge in bounds]
    assert np.all(bounds[0] <= want + 1e-6) and np.all(bounds[1] >= want - 1e-6)
    if name in EXACT:
        np.testing.assert_allclose(bounds, [want, want], rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_functions_may_draw_by_a_key():
    drawn = lambda key: jax.random.bernoulli(key, 0.5, (T,))  # noqa: E731
    rule = Predicate(lambda b, h, q, kv, key: drawn(key)[kv] | (q == kv), KEY)
    x = jnp.asarray(np.random.default_rng(4).normal(size=(1, T, 2, 8)), jnp.float32)
    dense = drawn(KEY)[None] | jnp.eye(T, dtype=bool)
    want = jattn.attention(x, x, x, mask=dense[None, None])
    np.testing.assert_allclose(jattn.attention(x, x, x, mask=rule), want, atol=1e-6)
    assert jattn.explain(x, x, x, mask=rule).tiles == (128, 0, 1, 0)


@pytest.mark.parametrize("shape", [(), (1, 1)])
def test_a_value_used_twice_is_read_once(shape):
    """Each line uses the one before three times: the program has 3^60 paths."""

    def folded(x):
        x = jnp.broadcast_to(x, shape)
        for _ in range(60):
            x = x * 0.5 + jnp.where(x > 1, x * 0.25, 1)
        return x.reshape(())

    expression = read(folded, (np.float32,))
    assert 240 < len(expression.nodes) < 330
    got = intervals.of(expression, (Interval(np.float32(3), np.float32(3)),)).lo
    np.testing.assert_allclose(got, quick_jit(folded)(np.float32(3)), rtol=1e-5)


def test_bounds_of_tables_of_floats_that_only_the_program_knows():
    table = np.random.default_rng(3).normal(size=(T,)).astype(np.float32)

    def kinds(table: Any) -> Any:
        rule = Predicate(lambda b, h, q, kv, table: (table[q] <= table[kv]) & (q >= kv), table)
        return masks.tile_map(rule, T, T, 16, 16)

    np.testing.assert_array_equal(jax.jit(kinds)(table), kinds(table))


EVALUATED = {"min_exact_pairs": 0, "max_exact_pairs": 2**20}


def hidden(x: Any, kv: Any) -> Any:
    """Returns x, which must not be negative, by a loop that reads x and `kv`."""
    return lax.while_loop(lambda x: x < 0, lambda x: x + 1, x + 0 * kv)


def causal(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return hidden(q, kv) >= kv


def tile_map(mask: masks.Mask, **options: Any) -> np.ndarray:
    kinds = masks.tile_map(mask, T, T - 10, 16, 32, **options)
    assert isinstance(kinds, np.ndarray)
    return kinds


def test_undecided_tiles_have_the_kinds_of_their_pairs():
    want = tile_map(masks.Causal())
    assert np.unique(tile_map(Predicate(causal))).tolist() == [masks.MIXED]
    both = tile_map(Predicate(causal) & masks.Causal())
    assert np.array_equal(both == EMPTY, want == EMPTY)
    with tuning.using(**EVALUATED):
        assert np.array_equal(tile_map(Predicate(causal)), want)
        assert np.array_equal(tile_map(~Predicate(causal)), 2 - want)
        both = Predicate(causal) & masks.Window(left=20)
        assert np.array_equal(tile_map(both), tile_map(masks.Causal() & masks.Window(left=20)))


def test_bounds_leave_complex_numbers_undecided():
    turns = jnp.asarray(np.exp(1j * np.pi / 6 * (np.arange(T) // 8)), jnp.complex64)
    rule = lambda b, h, q, kv: (  # noqa: E731
        ((q.astype(jnp.complex64) * -1j).imag <= -kv.astype(jnp.float32))
        & (abs(turns[q] - turns[kv]) < 0.3)
    )
    assert np.unique(tile_map(Predicate(rule))).tolist() == [masks.MIXED]
    with tuning.using(**EVALUATED):
        want = true_kinds(dense(rule, 0, 0, np.arange(T), np.arange(T - 10)), 16, 32)
        assert np.array_equal(tile_map(Predicate(rule)), want)


@pytest.mark.parametrize("shift", [0, 16])
def test_pairs_are_evaluated_once(shift):
    """Unless a list that the function reads changes."""
    box = [0]
    reads = lambda b, h, q, kv: causal(b, h, q, kv + box[0])  # noqa: E731
    mask = Predicate(reads if shift else causal)
    undecided._evaluated.cache_clear()
    with tuning.using(**EVALUATED):
        for _ in range(3):
            tile_map(mask)
        assert undecided._evaluated.cache_info().misses == 1
        box[0] = shift
        want = tile_map(Predicate(lambda b, h, q, kv: q >= kv + shift))
        assert np.array_equal(tile_map(mask), want)


def test_pairs_are_not_evaluated_where_they_are_many_or_few():
    for least, most in ((0, T * T // 2), (2 * T * T, 2**20)):
        with tuning.using(min_exact_pairs=least, max_exact_pairs=most):
            assert np.unique(tile_map(Predicate(causal))).tolist() == [masks.MIXED]


def test_tiles_of_one_head_and_of_any_head_differ():
    mask = Predicate(lambda b, h, q, kv: causal(b, h, q, kv) | (hidden(h, kv) == 1))
    grid = masks.extents(T, 16), masks.extents(T, 16)
    with tuning.using(**EVALUATED):
        assert np.unique(masks.kinds(mask, masks.Tile.grid(*grid))).tolist() == [masks.MIXED]
        assert np.array_equal(tile_map(mask, h=0), tile_map(masks.Causal()))
        assert np.array_equal(tile_map(mask, h=1), tile_map(masks.Full()))
        assert np.unique(jax.jit(lambda h: masks.kinds(mask, masks.Tile.grid(*grid, 0, h)))(0)) == 1


@pytest.mark.parametrize("other", [masks.Lengths(kv=50, q=40), masks.Window(9, 9)])
def test_positions_in_any_order(other):
    q, kv = (np.random.default_rng(n).permutation(T) for n in range(2))
    mask = Predicate(lambda b, h, q, kv: hidden(q, kv) % 64 >= kv) & other
    check = functools.partial(masks.check_bounds, mask, T, T, block_q=16, block_kv=32, heads=1)
    with tuning.using(**EVALUATED):
        check(q_positions=q, kv_positions=kv * 3 - 99)
        check()


def test_pairs_are_not_evaluated_with_traced_tables():
    causal = lambda table: Predicate(lambda b, h, q, kv: hidden(table[q], kv) >= kv)  # noqa: E731
    kinds_of = lambda table: masks.tile_map(causal(table), T, T, 16, 16)  # noqa: E731
    table = jnp.arange(T, dtype=jnp.int32)
    with tuning.using(**EVALUATED):
        assert np.unique(jax.jit(kinds_of)(table)).tolist() == [masks.MIXED]
        assert np.array_equal(kinds_of(table), masks.tile_map(masks.Causal(), T, T, 16, 16))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("blocks", [(64, 64), (32, 128), (48, 16)])
@pytest.mark.parametrize("image", [(48, 17, 24, 16), (20, 20, 3, 20), (9, 31, 9, 5)])
def test_windows_over_images_are_cut_at_their_rows(image, blocks):
    """The windows are causal. The calls are small, so that no pair is evaluated."""
    height, width, rows, columns = image
    of_rows = lambda b, h, q, kv: (kv // width <= q // width) & (q // width - kv // width < rows)  # noqa: E731
    of_columns = lambda b, h, q, kv: (kv % width <= q % width) & (q % width - kv % width < columns)  # noqa: E731
    both = Predicate(lambda *x: of_rows(*x) & of_columns(*x))
    size = height * width
    pairs = 0, 0, np.arange(size)[:, None], np.arange(size)
    true = true_kinds(of_rows(*pairs) & of_columns(*pairs), *blocks)
    for mask in (both, Predicate(of_rows) & Predicate(of_columns), ~~both):
        got = np.asarray(masks.tile_map(mask, size, size, *blocks))
        np.testing.assert_array_equal(got == masks.EMPTY, true == masks.EMPTY)
        assert not np.any((got == masks.FULL) & (true != masks.FULL))


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
    qkv = tuple(jnp.asarray(rng.normal(size=(2, 600, 2, 8)) * 3, jnp.float32) for _ in range(3))
    # The kernel has no loops, and bounds of a power are not known either.
    rule = causal if implementation == "blockwise" else lambda b, h, q, kv: (q - kv) ** 3 >= 0

    def both(x: Any, mask: masks.Mask) -> Any:
        loss = lambda x: (jattn.attention(*x, mask=mask, implementation=implementation) ** 2).sum()  # noqa: E731
        return jax.value_and_grad(loss)(x)

    undecided_loss = functools.partial(both, mask=Predicate(rule))
    want = both(qkv, masks.Causal())
    each = jax.tree.map(lambda x: x[:, None], qkv)
    gradients = lambda x: undecided_loss(x)[1]  # noqa: E731
    sharded = jax.shard_map(gradients, mesh=mesh_of(x=2), in_specs=P("x"), out_specs=P("x"))
    with tuning.using(**EVALUATED):
        for got in (jax.jit(undecided_loss)(qkv), jax.vmap(undecided_loss)(each)):
            np.testing.assert_allclose(np.sum(got[0]), want[0], rtol=1e-5)
            assert_accurate([x.reshape(want[1][0].shape) for x in got[1]], want[1], 1e-4)
        assert_accurate(jax.jit(sharded)(qkv), want[1], 1e-4)
