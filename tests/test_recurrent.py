"""RNNsearch: against the paper's formulas in NumPy loops, and against its own laws."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy.special import expit

from jattn import nn
from tests.arrays import assert_equal
from tests.conftest import expect
from tests.test_nn import RNNSEARCH as SIZES
from tests.test_nn import (
    arrays,
    call,
    check_graph_and_tree_mode,
    check_half_precision,
    close,
    evaluate,
    made,
    normal,
    parameter_tree,
)


B, S, T = 2, 7, 5
SOURCE, TARGET = 19, 23
LENGTHS = np.array([4, 7], np.int32)


pytestmark = pytest.mark.usefixtures("quick_compilation")


def rnnsearch(**options):
    arguments: dict[str, Any] = {"rngs": nnx.Rngs(params=0), **SIZES, **options}
    return nn.RNNsearch(SOURCE, TARGET, **arguments)


def ids(seed: int, vocabulary: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(0, vocabulary, shape), jnp.int32)


SOURCE_IDS, TARGET_IDS = BOTH_IDS = ids(1, SOURCE, B, S), ids(2, TARGET, B, T)


@functools.cache
def exact() -> nn.RNNsearch:
    return made(rnnsearch, param_dtype=jnp.float64, spread=1.5)


def gru_step(p, unit, x, state):
    """x [3, H]: W e + b + C c of update gate, reset gate and candidate."""
    update, reset = (expit(x[i] + state @ p[f"{unit}/gates"][:, i]) for i in (0, 1))
    candidate = np.tanh(x[2] + (reset * state) @ p[f"{unit}/candidate"])
    return (1 - update) * state + update * candidate


def gru_states(p, unit, x, reverse):
    states = np.zeros((len(x), p[f"{unit}/candidate"].shape[0]))
    state = np.zeros(states.shape[1])
    inputs = np.einsum("te,egh->tgh", x, p[f"{unit}/inputs/kernel"]) + p[f"{unit}/inputs/bias"]
    for j in reversed(range(len(x))) if reverse else range(len(x)):
        states[j] = state = gru_step(p, unit, inputs[j], state)
    return states


def embedded(p, side, tokens):
    table = p[f"{side}_tokens/embedding"]
    return table[np.asarray(tokens)] * math.sqrt(table.shape[1])


def one_row(p, source, target):
    """Logits [T, target vocabulary] and weights [T, S] of a source without padding."""
    x = embedded(p, "source", source)
    sides = ("forward", False), ("backward", True)
    both = [gru_states(p, f"encoder/{unit}", x, reverse) for unit, reverse in sides]
    memory = np.concatenate(both, axis=-1)
    H = p["decoder/unit/candidate"].shape[0]
    last = memory[0, H:] if len(memory) else np.zeros(H)
    state = np.tanh(last @ p["decoder/first/kernel"] + p["decoder/first/bias"])
    query, key, score = (p[f"decoder/attention/{name}"] for name in ("query", "key", "score"))
    logits, weights = [], []
    for token in embedded(p, "target", target):
        scores = np.array([np.tanh(state @ query + h @ key) @ score for h in memory])
        weight = np.exp(scores - scores.max(initial=0.0))
        weight /= max(weight.sum(), 1e-300)
        weights.append(weight)
        context, pairs = weight @ memory, p["decoder/output/token/bias"]
        for kind, x in (("state", state), ("token", token), ("context", context)):
            pairs = pairs + np.einsum("i,ijd->jd", x, p[f"decoder/output/{kind}/kernel"])
        logits.append(pairs.max(axis=0) @ p["output/kernel"].T + p["output/bias"])
        inputs = np.einsum("e,egh->gh", token, p["decoder/unit/inputs/kernel"])
        inputs += np.einsum("c,cgh->gh", context, p["decoder/context/kernel"])
        state = gru_step(p, "decoder/unit", inputs + p["decoder/unit/inputs/bias"], state)
    return np.array(logits), np.array(weights)


def formula(p, source: Any = SOURCE_IDS, target: Any = TARGET_IDS, lengths: Any = LENGTHS):
    """Logits [B, T, target vocabulary] and, for each row, weights [T, its length]."""
    rows = [one_row(p, s[:n], t) for s, t, n in zip(source, target, lengths, strict=True)]
    return np.stack([logits for logits, _ in rows]), [weights for _, weights in rows]


@nnx.jit
def logits_and_weights(model, source, target, lengths: Any = None):
    captured = nn.capture_weights(model, source, target, source_lengths=lengths)
    return model(source, target, source_lengths=lengths), captured


@pytest.mark.parametrize(
    ("batch", "lengths"),
    [
        *(((B,), lengths) for lengths in (None, [4, 7], [0, 7])),
        pytest.param((), 5, marks=pytest.mark.slow),
        pytest.param((3, 2), [[1, 7], [4, 2], [7, 3]], marks=pytest.mark.exhaustive),
    ],
)
def test_logits_and_weights_are_those_of_the_formula(batch, lengths):
    source, target = ids(1, SOURCE, *batch, S), ids(2, TARGET, *batch, T)
    source_lengths = None if lengths is None else jnp.asarray(lengths, jnp.int32)
    out, captured = logits_and_weights(exact(), source, target, source_lengths)
    rows = source.reshape(-1, S), target.reshape(-1, T)
    row_lengths = np.ravel([S] * B if lengths is None else lengths)
    expected, weights = formula(arrays(exact()), *rows, row_lengths)
    close(out.reshape(-1, T, TARGET), expected, 1e-12)
    assert np.abs(expected).max() > 1 and captured.keys() == {"decoder/attention"}
    padded = [np.pad(x, ((0, 0), (0, S - x.shape[1]))) for x in weights]
    close(captured["decoder/attention"], np.reshape(padded, (*batch, 1, T, S)), 1e-12)
    assert np.abs(np.diff(padded[-1], axis=0)).max() > 1e-2


def test_gradients_are_the_differences_of_the_formula():
    model, weight = exact(), np.random.default_rng(3).standard_normal((B, T, TARGET))

    @nnx.jit
    @nnx.grad
    def gradient(model):
        return (model(*BOTH_IDS, source_lengths=jnp.asarray(LENGTHS)) * weight).sum()

    slopes, p = arrays(gradient(model)), arrays(model)
    assert slopes.keys() == p.keys()
    rng, epsilon = np.random.default_rng(4), 1e-5
    for name in p:
        direction = rng.standard_normal(p[name].shape)
        ahead, behind = (
            (formula({**p, name: p[name] + sign * epsilon * direction})[0] * weight).sum()
            for sign in (1, -1)
        )
        slope = (slopes[name] * direction).sum()
        assert slope == pytest.approx((ahead - behind) / (2 * epsilon), rel=1e-6, abs=1e-6), name
        assert np.abs(slopes[name]).max() > 1e-3, name


@pytest.mark.slow
def test_empty_rows_are_finite_and_teach_nothing():
    @nnx.jit
    @nnx.grad
    def gradient(model):
        return (model(*BOTH_IDS, source_lengths=jnp.array([0, 7], jnp.int32))[0] ** 2).sum()

    read_only = ("source_tokens", "encoder", "decoder/attention", "decoder/context")
    for name, array in arrays(gradient(exact())).items():
        assert np.isfinite(array).all(), name
        assert name.startswith(read_only) == (np.abs(array).max() == 0) or name in (
            "decoder/first/kernel",  # of a memory that is 0
            "decoder/output/context/kernel",
        ), name


def test_without_places_on_either_side():
    none = call(exact(), SOURCE_IDS[:, :0], TARGET_IDS)
    close(none, formula(arrays(exact()), lengths=[0, 0])[0], 1e-12)
    assert call(exact(), SOURCE_IDS, TARGET_IDS[:, :0]).shape == (B, 0, TARGET)


@nnx.jit
def started(model, source, lengths):
    return model.decoder.start(model.encode(source, source_lengths=lengths), memory_lengths=lengths)


@nnx.jit
def stepped(model, target, state):
    return model.step(target, state)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("parts", [(1, 1, 1, 1, 1), (2, 3), (4, 0, 1)])
def test_step_by_step_is_at_once(parts):
    model, lengths = exact(), jnp.asarray(LENGTHS)
    state, start, logits = started(model, SOURCE_IDS, lengths), 0, []
    for count in parts:
        out, state = stepped(model, TARGET_IDS[:, start : start + count], state)
        logits.append(out)
        start += count
    expected, _ = formula(arrays(model))
    close(jnp.concatenate(logits, 1), expected, 1e-12)


@pytest.mark.slow
def test_rows_are_reordered_with_all_that_belongs_to_them():
    model, rows = exact(), jnp.array([1, 1, 0], jnp.int32)
    _, state = stepped(model, TARGET_IDS[:, :2], started(model, SOURCE_IDS, jnp.asarray(LENGTHS)))
    tokens = ids(9, TARGET, 3, 1)
    reordered, _ = stepped(model, tokens, state.reorder(rows))
    for row, token, logits in zip(rows, tokens, reordered, strict=True):
        alone = jax.tree.map(lambda array, row=row: array[row][None], state)
        np.testing.assert_allclose(logits, stepped(model, token[None], alone)[0][0], atol=1e-12)
    swapped = jnp.array([1, 0], jnp.int32)
    moved = state.reorder(swapped, memory=False)
    np.testing.assert_array_equal(moved.hidden, state.hidden[swapped])
    assert_equal(moved[1:], state[1:])
    open_ended = started(model, SOURCE_IDS, None).reorder(rows)
    assert open_ended.lengths is None and open_ended.keys.shape == (3, S, 13)


@pytest.mark.parametrize("dtype", ["dtype", "param_dtype"])
def test_a_state_keeps_its_types_in_a_loop(dtype):
    model = nnx.eval_shape(lambda: rnnsearch(**{dtype: jnp.bfloat16}))
    state = nnx.eval_shape(started, model, SOURCE_IDS, jnp.asarray(LENGTHS))
    _, next_state = nnx.eval_shape(stepped, model, TARGET_IDS[:, :1], state)
    old, new = (jax.tree.map(lambda x: (x.shape, x.dtype), x) for x in (state, next_state))
    assert old == new


@pytest.mark.parametrize("reverse", [False, True])
def test_a_gated_unit_stands_still_where_there_is_padding(reverse):
    unit = made(nn.GRU, 3, 11, param_dtype=jnp.float64)
    x = np.array(normal(1, 3, S, 3, dtype=np.float64))
    lengths = np.array([0, 4, 7], np.int32)
    p = {f"unit/{name}": array for name, array in arrays(unit).items()}
    x[np.arange(S) >= lengths[:, None]] = np.nan

    @nnx.jit
    @functools.partial(nnx.grad, argnums=(0, 1), has_aux=True)
    def slopes(unit, x):
        states = unit(x, lengths=jnp.asarray(lengths), reverse=reverse)
        return (states**2).sum(), states

    (of_unit, of_x), out = slopes(unit, jnp.asarray(x))
    for b, length in enumerate(lengths):
        expected = gru_states(p, "unit", x[b, :length], reverse)
        last_state = expected[-1] if length and not reverse else np.zeros(11)
        close(out[b], np.stack([*expected, *[last_state] * (S - length)]), 1e-12)
    assert all(np.isfinite(array).all() for array in arrays(of_unit).values())
    np.testing.assert_array_equal(np.asarray(of_x) == 0, np.isnan(x))


def test_recurrent_matrices_are_orthogonal_each():
    unit = nn.GRU(3, 11, rngs=nnx.Rngs(params=0))
    squares = np.stack([*jnp.moveaxis(unit.gates[...], 1, 0), unit.candidate[...]])
    close(squares @ squares.transpose(0, 2, 1), [np.eye(11)] * 3, 1e-5)
    assert (np.abs(squares[0] - squares[1:]).max((1, 2)) > 0.1).all()


def test_initialisers_reach_every_parameter_that_they_are_for():
    value = {"kernel": 1.0, "recurrent": 2.0, "bias": 3.0, "embedding": 4.0}
    options = {f"{x}_init": nnx.initializers.constant(number) for x, number in value.items()}
    for name, array in arrays(rnnsearch(**options)).items():
        last = name.split("/")[-1]
        kind = {"gates": "recurrent", "candidate": "recurrent"}.get(last, last)
        if not name.startswith("output/"):
            assert (array == value.get(kind, value["kernel"])).all(), name


def test_sizes_of_the_paper():
    model = nnx.eval_shape(lambda: nn.RNNsearch(30_000, 30_000, rngs=nnx.Rngs(params=0)))
    sizes = {name: leaf["shape"] for name, leaf in parameter_tree(lambda: model).items()}
    assert sizes["source_tokens/embedding"] == [30_000, 620]
    assert sizes["encoder/backward/candidate"] == [1000, 1000]
    assert sizes["decoder/attention/key"] == [2000, 1000]
    assert sizes["decoder/output/context/kernel"] == [2000, 2, 500]
    assert sizes["output/kernel"] == [30_000, 500]


@pytest.mark.slow
def test_no_array_of_all_pairs_and_the_alignment_network():
    queries, keys, width = 48, 64, 256
    decoder = nnx.eval_shape(lambda: nn.RecurrentDecoder(3, 5, 10, width, 7, rngs=nnx.Rngs(0)))
    definition, parameters = nnx.split(decoder)

    def loss(parameters, x, memory, lengths):
        return nnx.merge(definition, parameters)(x, memory, memory_lengths=lengths).sum()

    shapes = [jax.ShapeDtypeStruct(x, "float32") for x in ((B, queries, 3), (B, keys, 10))]
    shapes.append(jax.ShapeDtypeStruct((B,), jnp.int32))
    gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
    analysis: Any = gradient.lower(parameters, *shapes).compile().memory_analysis()
    pairs = 4 * B * queries * keys
    # The hidden layers of one step at a time, and some numbers for each pair.
    assert analysis.temp_size_in_bytes < 12 * 4 * B * keys * width + 8 * pairs < pairs * width / 2


@pytest.mark.slow
def test_half_precision():
    check_half_precision(made(rnnsearch), made(rnnsearch, dtype=jnp.bfloat16), BOTH_IDS)


@pytest.mark.slow
def test_dropout():
    model = made(rnnsearch, dropout_rate=0.5)
    ids = SOURCE_IDS, TARGET_IDS
    np.testing.assert_array_equal(evaluate(model, *ids), call(made(rnnsearch), *ids))
    with pytest.raises(ValueError, match=r"rngs: dropout at rate 0\.5"):
        model(*ids)
    keys: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        key = nn.Dropout.key
        patch.setattr(nn.Dropout, "key", lambda *given: keys.append(key(*given)) or keys[-1])
        nnx.eval_shape(lambda model: model(*ids, rngs=nnx.Rngs(dropout=1)), model)
    assert len(keys) == 3  # source tokens, target tokens, before the output projection


@pytest.mark.one_in(2)
@pytest.mark.parametrize("graph", [False, True], ids=["tree", "graph"])
def test_graph_and_tree_mode(graph):
    check_graph_and_tree_mode(made(rnnsearch), BOTH_IDS, graph, {"decoder/attention": (B, 1, T, S)})


def test_wrong_arguments_are_named(unchecked):
    model, decoder = exact(), exact().decoder
    memory = normal(1, B, S, 22, dtype=np.float64)
    x, odd = normal(2, B, T, 3, dtype=np.float64), jnp.ones((3,), jnp.int32)
    run = functools.partial(model, *BOTH_IDS)
    decode = functools.partial(model.decode, TARGET_IDS)
    expect(ValueError, "source_lengths: expected [*B] = [2]", run, source_lengths=odd)
    says = "source_lengths: | integers, got float64"
    expect(TypeError, says, run, source_lengths=jnp.ones((B,)))
    expect(ValueError, "memory_lengths: | = [2], got [3]", decode, memory, memory_lengths=odd)
    says = "memory: | with memory_features=22, got (2, 7, 21)"
    expect(ValueError, says, decode, memory[..., :21])
    with pytest.raises(ValueError, match=r"^lengths: expected \[\*B\] = \[2\]"):
        decoder.unit(x, lengths=odd)
    says = "x: expected | in_features=3"
    expect(ValueError, says, decoder.step, x[..., :2], decoder.start(memory))
    expect(ValueError, "x: | with in_features=3, got (2, 5, 2)", model.encoder, x[..., :2])
    expect(ValueError, "dropout_rate: expected 0 <= rate < 1", rnnsearch, dropout_rate=1.0)
    expect(TypeError, "hiden", rnnsearch, hiden=3)
    expect(ValueError, "hidden: expected a width above 0, got 0", rnnsearch, hidden=0)
    expect(ValueError, "ids: expected | vocabulary=19", model, SOURCE_IDS + 19, TARGET_IDS)
