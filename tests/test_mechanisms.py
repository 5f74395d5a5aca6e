"""The first mechanisms: each against the oracle, with gradients by complex steps."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn import dropout, masks, scores, tuning
from tests import oracle
from tests.arrays import temporaries
from tests.conftest import assert_trees_close, normal_arrays, out_and_gradients, quick_jit
from tests.oracle import error


B, T, S = 2, 3, 5
RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def _numbers_of_each_test_are_the_same():
    RNG.bit_generator.state = np.random.default_rng(0).bit_generator.state


def attend(query: Any, key: Any, value: Any, allowed: np.ndarray, scale: float = 1.0) -> np.ndarray:
    """One head by the oracle, `[B, T, V]`; `allowed` is `[B or 1, T, S]`."""
    heads = (x[:, :, None] for x in (query, key, value))
    seen: Any = lambda pair: allowed[pair.b % len(allowed), pair.i, pair.j]  # noqa: E731
    return oracle.attend(oracle.OracleProblem(*heads, allowed=seen, scale=scale)).out[:, :, 0]


def assert_values_and_gradients(
    function: Callable[..., Any], definition: Callable[..., Any], inputs: dict[str, Any]
) -> None:
    """`function(**inputs)` equals the definition to float64 rounding, and so does each gradient
    along a random direction, which complex steps give for the definition."""
    want, rng = definition(**inputs), np.random.default_rng(1)
    d_out = rng.normal(size=want.shape)
    both = jax.jit(lambda *x: out_and_gradients(lambda arrays: function(**arrays), *x))
    got, gradients = both((on_device(inputs),), jnp.asarray(d_out))
    assert got.dtype == jnp.float64
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-13)
    for name, array in inputs.items():
        direction = rng.normal(size=array.shape)
        moved = definition(**{**inputs, name: array + 1e-100j * direction})
        slope = np.sum(d_out * moved.imag) / 1e-100
        along = np.sum(direction * gradients[name])
        np.testing.assert_allclose(along, slope, rtol=0, atol=2e-13, err_msg=name)
        assert abs(slope) > 1e-4, name


def numbers(**shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    return {name: RNG.normal(size=shape) for name, shape in shapes.items()}


def on_device(inputs: dict[str, Any], dtype: Any = None) -> dict[str, Any]:
    return {name: jnp.asarray(x, dtype) for name, x in inputs.items()}


MASKS = ("full", "causal", "lengths", "dead rows", "array")


def built(name: str, queries: int, keys: int) -> tuple[Any, np.ndarray]:
    """A mask, and as an array `[B or 1, T, S]`."""
    lengths = jnp.array([keys // 3, keys - 1])
    mask = {
        "full": None,
        "causal": masks.Causal(),
        "lengths": masks.Lengths(kv=lengths),
        "dead rows": masks.Window(9, 2) & masks.Lengths(q=queries - 1, kv=lengths),
        "array": jnp.asarray((np.outer(np.arange(queries), np.arange(keys)) % 3 > 0)[None, None]),
    }[name]
    return mask, np.reshape(masks.as_mask(mask).dense(queries, keys), (-1, queries, keys))


@pytest.mark.parametrize("name", ["causal", "dead rows"])
def test_simple_self_attention(name):
    mask, allowed = built(name, T, T)
    call = functools.partial(jattn.simple_self_attention, mask=mask)
    loops = lambda x: attend(x, x, x, allowed)  # noqa: E731
    assert_values_and_gradients(call, loops, numbers(x=(B, T, 4)))


def self_attention_loops(x, w_query, w_key, w_value, allowed, scale):
    return attend(x @ w_query, x @ w_key, x @ w_value, allowed, scale)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("scale", [None, 0.6])
def test_self_attention_of_three_sizes(name, scale):
    E, H1, H2 = 4, 6, 7
    mask, allowed = built(name, T, T)
    inputs = numbers(x=(B, T, E), w_query=(E, H2), w_key=(E, H2), w_value=(E, H1))
    factor = 1 / math.sqrt(H2) if scale is None else scale
    call = functools.partial(jattn.self_attention, mask=mask, scale=scale)
    loops = functools.partial(self_attention_loops, allowed=allowed, scale=factor)
    assert_values_and_gradients(call, loops, inputs)


@pytest.mark.parametrize("batch", [(), (2, 3)])
def test_any_batch(batch):
    x, *weights = normal_arrays((*batch, T, 4), (4, 7), (4, 7), (4, 6))
    got = jattn.self_attention(x, *weights)
    arrays = map(np.asarray, (x.reshape(-1, T, 4), *weights))
    want = self_attention_loops(*arrays, allowed=np.ones((1, T, T), bool), scale=7**-0.5)
    np.testing.assert_allclose(got, want.reshape(*batch, T, 6), rtol=0, atol=1e-13)
    inputs = on_device(additive_inputs(batch))
    got = additive(**inputs)
    assert got.shape == (*batch, T, 3)
    np.testing.assert_allclose(got, quick_jit(additive_formula)(inputs), rtol=0, atol=1e-13)


def test_self_attention_drops_weights():
    x, *weights = normal_arrays((B, T, 4), (4, 7), (4, 7), (4, 6))
    rules: Any = {"dropout_rate": 0.4, "dropout_key": jax.random.key(3)}
    got = jattn.self_attention(x, *weights, **rules)
    heads = (jnp.einsum("bte,eh->bth", x, w)[:, :, None] for w in weights)
    np.testing.assert_allclose(got, jattn.attention(*heads, **rules)[:, :, 0], rtol=0, atol=1e-13)
    assert np.abs(got - jattn.self_attention(x, *weights)).max() > 0.1


def test_renormalising_equals_masking_by_infinity_and_rows_without_weight_are_zero():
    for shape in ((2, 4, 7), (2, 3, 7, 4)):
        raw = 3 * RNG.normal(size=shape)
        weights = jax.nn.softmax(jnp.asarray(raw), axis=-1)
        exponential = np.tril(np.exp(raw))
        want = exponential / exponential.sum(axis=-1, keepdims=True)
        got = jattn.renormalised_causal(weights)
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-14)
        assert np.abs(got - weights).max() > 0.1
    weights = jnp.array([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [0.25, 0.25, 0.5]])
    got = jattn.renormalised_causal(weights)
    np.testing.assert_array_equal(got, [[0, 0, 0], [0, 0, 0], [0.25, 0.25, 0.5]])
    assert np.isfinite(jax.grad(lambda w: (jattn.renormalised_causal(w) ** 2).sum())(weights)).all()
    weights = jnp.array([[1e-25, 1.0], [0.5, 0.5]], jnp.float32)
    d_weights = jax.grad(lambda w: (jattn.renormalised_causal(w) * w).sum())(weights)
    np.testing.assert_allclose(d_weights, [[1, 0], [0.5, 0.5]], rtol=1e-6)


def test_interaction_is_left_times_x_times_right():
    x, right = RNG.normal(size=(B, S, 4)), RNG.normal(size=(4, 6))
    left, shared = RNG.normal(size=(B, T, S)), RNG.normal(size=(T, S))
    wants: Any = [
        ((x, left, right), np.stack([left[b] @ x[b] @ right for b in range(B)])),
        ((x, shared, right), np.stack([shared @ a @ right for a in x])),
        ((x, shared), np.stack([shared @ a for a in x])),
        ((x, None, right), np.stack([a @ right for a in x])),
        ((x,), x),
        ((x[0], shared, right), shared @ x[0] @ right),
    ]
    for arguments, want in wants:
        got = jattn.interaction(*jax.tree.map(jnp.asarray, arguments))
        assert got.shape == want.shape
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    ("shape", "mask"),
    [((4, 4), None), ((3, 5), masks.Causal()), ((2, 5, 3), masks.Window(1, 1))],
)
def test_normalised_interaction(shape, mask):
    left = 3 * RNG.normal(size=shape)
    allowed = np.ones(shape[-2:], bool) if mask is None else np.asarray(mask.dense(*shape[-2:]))
    exponential = np.where(allowed, np.exp(left), 0)
    total = exponential.sum(axis=-1, keepdims=True)
    got = np.asarray(jattn.normalised_interaction(jnp.asarray(left), mask))
    np.testing.assert_allclose(got, exponential / np.where(total == 0, 1, total), atol=1e-14)
    np.testing.assert_allclose(got.sum(axis=-1), total[..., 0] > 0, rtol=0, atol=1e-14)
    np.testing.assert_array_equal(got > 0, np.broadcast_to(allowed, shape))


def test_normalised_interaction_of_entries_that_are_large_or_forbidden():
    left = jnp.array([[1e4, 1e4 - 1, -1e4], [jnp.nan, 0.0, jnp.inf], [0.0, 0.0, 0.0]])
    mask = masks.Dense(jnp.array([[[1, 1, 1], [0, 1, 0], [0, 0, 0]]], bool))
    got = np.asarray(jattn.normalised_interaction(left, mask))
    share = 1 / (1 + math.exp(-1))
    np.testing.assert_allclose(got, [[share, 1 - share, 0], [0, 1, 0], [0, 0, 0]], atol=1e-12)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", MASKS)
def test_multiplicative_attention(name):
    mask, allowed = built(name, T, S)
    loops = lambda query, key, value, weight: attend(query @ weight, key, value, allowed)  # noqa: E731
    call = functools.partial(jattn.multiplicative_attention, mask=mask)
    inputs = numbers(query=(B, T, 4), key=(B, S, 6), value=(B, S, 3), weight=(4, 6))
    assert_values_and_gradients(call, loops, inputs)


def test_multiplicative_folds_the_weight_into_the_query():
    query, key, value, weight = normal_arrays((B, T, 4), (B, S, 6), (B, S, 3), (4, 6))
    folded = jattn.multiplicative(query, weight)
    np.testing.assert_allclose(folded, np.asarray(query) @ weight, rtol=0, atol=1e-13)
    got = jattn.attention(*(x[:, :, None] for x in (folded, key, value)), scale=0.5)[:, :, 0]
    whole = jattn.multiplicative_attention(query, key, value, weight, scale=0.5)
    np.testing.assert_array_equal(got, whole)


additive = jax.jit(jattn.additive_attention, static_argnames=("dropout_rate",))


def additive_inputs(batch: Any = (B,), queries: int = T, keys: int = S) -> dict[str, Any]:
    """Sizes that are all different: Dq 4, Dk 6, A 7, V 3."""
    tokens = {"query": (*batch, queries, 4), "key": (*batch, keys, 6), "value": (*batch, keys, 3)}
    inputs = numbers(**tokens, w_query=(4, 7), w_key=(6, 7), w_score=(7,))
    return inputs | {name: 2 * inputs[name] for name in ("query", "key", "w_score")}


def test_additive_attention_without_keys_is_zero():
    results = _pulled(on_device(additive_inputs(keys=0)), None, jnp.ones((B, T, 3)))
    assert results["out"].shape == (B, T, 3)
    assert not any(np.any(x) for x in results.values())


def test_additive_keys_are_projected_once_and_reused():
    inputs = on_device(additive_inputs())
    projected = jattn.additive_keys(inputs["key"], inputs["w_key"])
    assert projected.shape == (B, S, 7)
    reused = {**inputs, "key": projected, "w_key": None}
    whole = additive(**inputs)
    np.testing.assert_array_equal(additive(**reused), whole)
    last = additive(**{**reused, "query": inputs["query"][:, -1:]})  # as in decoding
    np.testing.assert_allclose(last, whole[:, -1:], rtol=0, atol=1e-14)


def test_weights_of_additive_attention_by_the_formula():
    inputs, mask = additive_inputs(), masks.Lengths(kv=jnp.array([S, 2]))
    arrays, dropout = on_device(inputs), {"dropout_rate": 0.3, "dropout_key": jax.random.key(5)}
    out, weights = jattn.additive_attention(**arrays, mask=mask, return_weights=True)
    seen = np.arange(S) < np.array([S, 2])[:, None, None]
    want = np.asarray(quick_jit(additive_weights)(arrays, seen))
    np.testing.assert_allclose(weights, want, rtol=0, atol=1e-14)
    np.testing.assert_allclose(out, want @ inputs["value"], rtol=0, atol=1e-13)
    with tuning.using(additive_tile=4):  # the output is computed in tiles
        out, dropped = jattn.additive_attention(**arrays, mask=mask, **dropout, return_weights=True)
    survives = np.asarray(dropped) != 0
    assert 0 < np.mean(survives[seen & (want > 0)]) < 1
    np.testing.assert_allclose(dropped, want * survives / 0.7, rtol=0, atol=1e-14)
    np.testing.assert_allclose(out, dropped @ inputs["value"], rtol=0, atol=1e-13)


def test_additive_attention_keeps_the_dtype():
    inputs = on_device(additive_inputs(), jnp.bfloat16)
    results = _pulled(inputs, None, jnp.ones((B, T, 3), jnp.bfloat16))
    assert {x.dtype for x in results.values()} == {jnp.dtype(jnp.bfloat16)}
    want = quick_jit(additive_formula)(on_device(inputs, np.float64))
    got = np.asarray(results["out"], np.float64)
    assert np.abs(got - want).max() < 5e-2 * np.abs(want).max()


@quick_jit
def _pulled(arrays: dict[str, Any], mask: Any, d_out: Any) -> dict[str, Any]:
    call = functools.partial(jattn.additive_attention, mask=mask)
    out, gradients = out_and_gradients(lambda arrays: call(**arrays), (arrays,), d_out)
    return {"out": out, **gradients}


def additive_weights(
    arrays: dict[str, Any], allowed: Any = True, modify: Callable[[Any], Any] = lambda score: score
) -> Any:
    """Bahdanau et al. 2015: softmax of w · tanh(q W_q + k W_k); `allowed` is `[B, T, S]`."""
    query, key = arrays["query"] @ arrays["w_query"], arrays["key"] @ arrays["w_key"]
    raw = jnp.tanh(query[..., :, None, :] + key[..., None, :, :]) @ arrays["w_score"]
    score = jnp.where(allowed, modify(raw), -1e30)
    return jnp.where(allowed, jax.nn.softmax(score, axis=-1), 0)


def additive_formula(arrays: dict[str, Any], *rules: Any, dropout_scale: Any = 1.0) -> Any:
    return (additive_weights(arrays, *rules) * dropout_scale) @ arrays["value"]


# T, S, the tile, and whether batch rows go one after another as on a CPU, or all at once.
LONG = [(150, 190, 128, True), (40, 70, 16, True), (44, 72, 24, False)]


def in_tiles(block: int, in_turn: bool = True) -> Any:
    """A context with tiles of about `block`, batch rows one after another or all at once."""
    return tuning.using(additive_tile=block, row=tuning.TABLE["cpu"]._replace(in_turn=in_turn))


@pytest.fixture
def tiles_of_16():
    with in_tiles(16):
        yield


@pytest.mark.one_in(10)
@pytest.mark.parametrize(
    "queries, keys, block, in_turn, mask",
    [
        (*LONG[0], "causal"),
        (*LONG[0], "lengths"),
        *((*LONG[1], mask) for mask in ("lengths", "dead rows", "array", "full")),
        pytest.param(*LONG[2], "causal", marks=pytest.mark.slow),
        (*LONG[2], "lengths"),
        (1, 70, 16, True, "lengths"),
        (40, 3, 16, True, "full"),
        (3, 5, 128, True, "dead rows"),
    ],
)
def test_additive_attention_over_tiles(queries, keys, block, in_turn, mask):
    rule, allowed = built(mask, queries, keys)
    arrays = on_device(additive_inputs(queries=queries, keys=keys))
    (d_out,) = normal_arrays((B, queries, 3), seed=8)
    with in_tiles(block, in_turn):
        results = _pulled(arrays, rule, d_out)
    formula = lambda arrays: additive_formula(arrays, allowed)  # noqa: E731
    want, wanted = quick_jit(lambda *x: out_and_gradients(formula, *x))((arrays,), d_out)
    assert_trees_close(results, {"out": want, **wanted}, rtol=0, atol=1e-12)
    dead = ~np.broadcast_to(allowed, (B, queries, keys)).any(axis=2)
    assert not any(np.any(np.asarray(results[name])[dead]) for name in ("out", "query"))


@pytest.mark.one_in(3, slow=True)
@pytest.mark.parametrize("queries, keys, block, in_turn", LONG)
def test_additive_attention_over_tiles_with_dropout_and_scores(queries, keys, block, in_turn):
    mask, allowed = built("lengths", queries, keys)
    shapes = (1, 1, queries, keys), (B, 1, 1, keys), (B, queries, 3)
    bias, by_row, d_out = normal_arrays(*shapes, seed=9)
    learned = (jnp.asarray(0.7), bias, by_row)
    key = jax.random.key(5)
    places = jnp.arange(queries), jnp.arange(keys)
    keep = jnp.stack([dropout.keep(key, 0.3, b, 0, *places) for b in range(B)])
    arrays = on_device(additive_inputs(queries=queries, keys=keys))

    def attend(arrays, learned):
        t, bias, by_row = learned
        score = scores.Temperature(t) >> scores.Bias(bias) >> scores.Bias(by_row)
        options = {"score": score, "dropout_rate": 0.3, "dropout_key": key}
        return jattn.additive_attention(**arrays, mask=mask, **options)

    def formula(arrays, learned):
        t, bias, by_row = learned
        modify = lambda score: score / t + bias[0] + by_row[:, 0]  # noqa: E731
        return additive_formula(arrays, allowed, modify, dropout_scale=jnp.where(keep, 1 / 0.7, 0))

    both = quick_jit(lambda f: out_and_gradients(f, (arrays, learned), d_out), static_argnums=0)
    with in_tiles(block, in_turn):
        got, want = both(attend), both(formula)
    assert_trees_close(got, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("poison", [np.nan, np.inf, 1e38])
def test_what_is_masked_does_not_exist_in_any_tile(tiles_of_16, poison):
    clean = additive_inputs(queries=40, keys=70)
    mask = masks.Lengths(q=jnp.array([20, 33]), kv=jnp.array([35, 64]))
    masked = {"query": np.arange(40) >= [[20], [33]]}
    masked |= dict.fromkeys(("key", "value"), np.arange(70) >= [[35], [64]])
    poisoned = {name: np.where(x[..., None], poison, clean[name]) for name, x in masked.items()}
    (d_out,) = normal_arrays((B, 40, 3), seed=8)
    got, want = (_pulled(on_device(x), mask, d_out) for x in (clean | poisoned, clean))
    assert_trees_close(got, want, rtol=0, atol=1e-13)
    for name, places in masked.items():
        assert not np.any(np.asarray(got[name])[places])


@pytest.mark.parametrize("poisoned", ["query", "key", "value"])
def test_nan_reaches_those_who_attend_to_it_in_any_tile(tiles_of_16, poisoned):
    clean = on_device(additive_inputs(queries=40, keys=40))
    dirty = clean | {poisoned: clean[poisoned].at[:, 20].set(jnp.nan)}
    causal, token = np.tri(40, dtype=bool), np.arange(40) == 20
    isolated = np.where(token[:, None], token, causal & ~token)  # the token with NaN is for itself
    (d_out,) = normal_arrays((B, 40, 3), seed=8)
    for allowed, lost, names in (
        (isolated, token, ("out", "query", "key", "value")),
        (causal, token if poisoned == "query" else np.arange(40) >= 20, ("out", "query")),
    ):
        mask = masks.Dense(jnp.asarray(allowed)[None, None])
        got, want = (_pulled(x, mask, d_out) for x in (dirty, clean))
        assert np.isnan(got["out"][:, lost]).all()
        seen = ({name: x[name][:, ~lost] for name in names} for x in (got, want))
        assert_trees_close(*seen, rtol=0, atol=1e-13)


@pytest.mark.slow
def test_additive_attention_over_tiles_is_mapped_and_differentiated(tiles_of_16):
    arrays = on_device(additive_inputs(queries=24, keys=20))
    qkv = tuple(arrays.pop(name) for name in ("query", "key", "value"))
    lengths = jnp.array([11, 18])

    def loss(query, key, value, kv=lengths):
        mask = masks.Causal() & masks.Lengths(kv=kv)
        return jnp.sum(jattn.additive_attention(query, key, value, **arrays, mask=mask) ** 2)

    @quick_jit
    def results(*qkv):
        gradient = jax.grad(loss, argnums=(0, 1, 2))
        return jax.vmap(gradient)(*qkv, lengths), gradient(*qkv), jax.jvp(loss, qkv, qkv)[1]

    mapped, whole, slope = results(*qkv)
    assert_trees_close(mapped, whole, rtol=0, atol=1e-13)
    assert error(slope, sum(np.vdot(x, d) for x, d in zip(qkv, whole, strict=True))) <= 1e-12


@pytest.mark.default_tiles
@pytest.mark.one_in(2, slow=True)
@pytest.mark.parametrize("mask", [None, masks.Causal()])
def test_additive_attention_takes_memory_linear_in_queries_and_keys(mask):
    attend = lambda *x: jnp.sum(jattn.additive_attention(*x, mask=mask))  # noqa: E731
    gradient = jax.grad(attend, (0, 1, 2, 3, 4, 5))
    weights = (4, 16), (6, 16), (16,)
    memory = lambda T: temporaries(gradient, (T, 4), (T, 6), (T, 8), *weights)  # noqa: E731
    small, large = map(memory, (1024, 4096))
    assert large < 4.5 * small
    assert large < 4 * 4096 * 4096 / 4  # a quarter of one array [T, S]


MISFITS = [
    ("self_attention", [(T, 4), (5, 7), (4, 7), (4, 6)], r"w_query: expected \[E, H2\] = \[4, 7\]"),
    ("self_attention", [(T, 4), (4, 7), (4, 7), (5, 6)], r"w_value: expected \[E, H1\] = \[4, 6\]"),
    ("self_attention", [(T, 4), (4, 7), (4, 8), (4, 6)], r"w_key: .* = \[4, 7\], got \[4, 8\]"),
    ("interaction", [(S, 4), None, (5, 6)], r"right: expected \[E, H1\] = \[4, 6\], got \[5, 6\]"),
    ("interaction", [(S, 4), (T, T)], r"left: expected \[T, S = 5\].*got \[3, 3\]"),
    ("interaction", [(B, S, 4), (3, T, S)], r"left: .*got \[3, 3, 5\]"),
    ("multiplicative_attention", [(T, 4), (S, 6), (S, 3), (6, 4)], r"weight: .*\[4, 6\], got \[6"),
    ("multiplicative_attention", [(T, 4), (S, 6), (6, 3), (4, 6)], r"value: .*got \[6, 1, 3\]"),
]


ADDITIVE_MISFITS = [
    ({"w_query": jnp.ones((4, 8))}, r"w_query: expected \[Dq, A\] = \[4, 7\], got \[4, 8\]"),
    ({"w_key": jnp.ones((4, 7))}, r"w_key: expected \[Dk, A\] = \[6, 7\], got \[4, 7\]"),
    ({"w_key": None}, r"key: expected \[\*B, S, A = 7\], got \[2, 5, 6\]"),
    ({"value": jnp.ones((B, S + 1, 3))}, "key|value"),
    ({"query": jnp.ones((3, T, 4))}, r"key: .* \*B = \[3\] as in query, got \[2, 5, 7\]"),
    ({"mask": jnp.ones((T, S), bool)}, r"mask.*\[\*B, N, T, S\].* got \[3, 5\]"),
    ({"mask": jnp.ones((B, 4, T, S), bool)}, r"mask.*\[2, 1, 3, 5\].* got \[2, 4, 3, 5\]"),
    ({"key": jnp.ones((B, S, 6), jnp.float32)}, "key: .*float64.* got float32"),
]


def test_arrays_that_do_not_fit_raise(unchecked):
    for function, shapes, message in MISFITS:
        arrays = (None if shape is None else jnp.ones(shape) for shape in shapes)
        with pytest.raises(ValueError, match=message):
            getattr(jattn, function)(*arrays)
    for changed, message in ADDITIVE_MISFITS:
        with pytest.raises((ValueError, TypeError), match=message):
            jattn.additive_attention(**on_device(additive_inputs()) | changed)
