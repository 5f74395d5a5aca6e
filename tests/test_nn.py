"""The Flax modules, compared with Flax, with formulas in NumPy, and with one another."""

import functools
import inspect
import itertools
import json
import math
import pickle
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import jattn
from jattn import _advice as advice
from jattn import masks, nn, normalizers, positions, scores
from jattn.nn.variables import Constant
from tests.arrays import assert_equal
from tests.conftest import assert_trees_close, expect
from tests.devices import mesh_of, place
from tests.test_positions import turned


GOLDEN = Path(__file__).parent / "golden"


pytestmark = pytest.mark.usefixtures("quick_compilation")


@nnx.jit
def call(module, *args, **kwargs):
    return module(*args, **kwargs)


@nnx.jit
def evaluate(module, *args, **kwargs):
    return module(*args, deterministic=True, **kwargs)


def normal(seed, *shape, dtype: Any = np.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def shaken(module, seed=0, spread=1.0):
    """The module with random numbers in every parameter, so that no bias is 0 and no scale is 1."""
    rng = np.random.default_rng(seed)
    for path, parameter in nnx.to_flat_state(nnx.state(module, nnx.Param)):
        fan_in = math.prod(parameter.shape[:-1]) if path[-1] == "kernel" else 4
        value = spread * rng.standard_normal(parameter.shape) / math.sqrt(fan_in)
        parameter.set_value(jnp.asarray(value.astype(parameter.dtype)))
    return module


def made(make, *args, seed=0, spread=2.0, **options):
    """A module with random parameters and no other state, built without its initialisers."""
    module = nnx.eval_shape(lambda: make(*args, rngs=nnx.Rngs(params=0), **options))
    return shaken(module, seed, spread)


def close(got, want, atol, **options):
    np.testing.assert_allclose(got, want, rtol=0, atol=atol, **options)


def arrays(module):
    """Parameters, or gradients of them, as float64 NumPy arrays by path."""
    flat = nnx.to_flat_state(nnx.state(module, nnx.Param))
    return {"/".join(map(str, path)): np.asarray(leaf[...], np.float64) for path, leaf in flat}


def layer_norm(x, scale, bias: Any = 0.0, epsilon=1e-6):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + epsilon) * scale + bias


def rms_norm(x, scale, epsilon=1e-6):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * scale


def multi_head(p, x_q, x_kv, allowed, *, norm=None, positions=None, scale: Any = None):
    """[T, D] and [S, E] to [T, out], head by head, from parameters by path."""
    total = np.zeros((x_q.shape[0], p["out/kernel"].shape[-1])) + p.get("out/bias", 0.0)
    heads = p["query/kernel"].shape[1]
    group = heads // p["key/kernel"].shape[1]
    for n in range(heads):
        sides = ("query", x_q, n), ("key", x_kv, n // group), ("value", x_kv, n // group)
        q, k, v = (
            row @ p[f"{name}/kernel"][:, h] + p.get(f"{name}/bias", np.zeros((heads, 1)))[h]
            for name, row, h in sides
        )
        if norm:
            q, k = norm(q, p["query_ln/scale"]), norm(k, p["key_ln/scale"])
        if positions is not None:
            q, k = (turned(x[:, None], positions, "half")[:, 0] for x in (q, k))
        score = np.where(allowed, q @ k.T * (scale or 1 / math.sqrt(q.shape[-1])), -np.inf)
        weights = np.exp(score)
        sink = np.exp(p["sinks"][n]) if "sinks" in p else 0.0
        total += weights / (weights.sum(-1, keepdims=True) + sink) @ v @ p["out/kernel"][n]
    return total


def flax_twin(module):
    names = ("num_heads", "in_features", "qkv_features", "out_features")
    names += ("num_kv_heads", "in_kv_features", "param_dtype", "use_bias")
    # With dropout in it, Flax computes the formula; without, jax.nn's function, which knows no
    # more than float32.
    options = {"dropout_rate": 0.5, "deterministic": True, "keep_rngs": False, "decode": False}
    options |= {name: getattr(module, name) for name in names}
    twin = nnx.eval_shape(lambda: nnx.MultiHeadAttention(**options, rngs=nnx.Rngs(0)))
    nnx.update(twin, nnx.state(module, nnx.Param))
    return twin


LENGTHS = np.array([3, 7])
PADDED = np.broadcast_to(np.arange(7) < LENGTHS[:, None, None, None], (2, 1, 7, 7))
TRIANGLE = np.tril(np.ones((1, 1, 7, 7), bool))
SELF_MASKS = {
    "full": (None, None),
    "causal": (masks.Causal(), TRIANGLE),
    "padded": (masks.Lengths(kv=jnp.asarray(LENGTHS, jnp.int32)), PADDED),
    "array": (jnp.asarray(PADDED & TRIANGLE), PADDED & TRIANGLE),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "kv_heads, dtype, tolerance", [(6, jnp.float32, 1e-6), (3, jnp.float64, 1e-14)]
)
@pytest.mark.parametrize("mask", SELF_MASKS)
def test_values_and_gradients_as_flax(mask, kv_heads, dtype, tolerance):
    ours, theirs = SELF_MASKS[mask]
    module = made(nn.MultiHeadAttention, 6, 10, 30, 11, kv_heads, param_dtype=dtype)
    x, weight = normal(1, 2, 7, 10, dtype=dtype), normal(2, 2, 7, 11, dtype=dtype)

    @nnx.jit
    @functools.partial(nnx.grad, argnums=(0, 1), has_aux=True)
    def gradients_and_out(module, x, mask):
        out = module(x, mask=mask)
        return (out * weight).sum(), out

    (gradient, dx), out = gradients_and_out(module, x, ours)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        theirs = None if theirs is None else jnp.asarray(theirs)
        (their_gradient, their_dx), expected = gradients_and_out(flax_twin(module), x, theirs)
    assert out.dtype == dtype and out.shape == (2, 7, 11)
    close(out, expected, 2 * tolerance * np.abs(expected).max())
    got, want = arrays(gradient) | {"x": dx}, arrays(their_gradient) | {"x": their_dx}
    assert got.keys() == want.keys()
    scale = max(np.abs(x).max() for x in want.values())
    for path, x in want.items():
        close(got[path], x, tolerance * scale, err_msg=path)


def test_same_seed_same_parameters_as_flax():
    options: Any = {"in_kv_features": 4, "normalize_qk": True}
    ours = nn.MultiHeadAttention(3, 5, 12, 7, rngs=nnx.Rngs(params=3), **options)
    options |= {"decode": False, "rngs": nnx.Rngs(params=3)}
    assert_equal(arrays(ours), arrays(nnx.MultiHeadAttention(3, 5, 12, 7, **options)))


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "norm, rotary", [(False, False), (False, True), (True, False), ("layer", True), ("rms", True)]
)
def test_formula(norm, rotary):
    options = {"num_kv_heads": 1, "normalize_qk": norm, "rotary": rotary}
    module = made(nn.MultiHeadAttention, 3, 5, 12, 7, param_dtype=jnp.float64, **options)
    x = normal(1, 2, 6, 5, dtype=np.float64)
    positions = np.array([[0, 1, 2, 0, 1, 2], [4, 9, 11, 30, 31, 33]])
    out = call(module, x, mask=masks.Causal(), positions=jnp.asarray(positions, jnp.int32))
    formula = {False: None, True: layer_norm, "layer": layer_norm, "rms": rms_norm}[norm]
    for row, got, places in zip(np.asarray(x), out, positions, strict=True):
        turns, allowed = places if rotary else None, places[:, None] >= places
        expected = multi_head(arrays(module), row, row, allowed, norm=formula, positions=turns)
        close(got, expected, 1e-12)


OF_OTHER_SIZES = {"head_dim": 6, "value_dim": 7, "scale": 0.3, "sinks": True, "num_kv_heads": 2}


def test_sizes_scale_and_sinks_by_the_formula():
    module = made(nn.MultiHeadAttention, 4, 5, param_dtype=jnp.float64, **OF_OTHER_SIZES)
    x = normal(1, 2, 6, 5, dtype=np.float64)

    @nnx.jit
    def outs(module, x, cache):
        weights = nn.capture_weights(module, x, mask=masks.Causal())[""]
        first, cache = module(x[:, :4], cache=cache, mask=masks.Causal())
        last, _ = module(x[:, 4:], cache=cache, mask=masks.Causal())
        return weights, jnp.concatenate([first, last], axis=1), module(x, mask=masks.Causal())

    weights, cached, out = outs(module, x, module.empty_cache(2, 6))
    p = arrays(module)
    assert p["query/kernel"].shape == (5, 4, 6) and p["out/kernel"].shape == (4, 7, 5)
    values = np.einsum("bse,ekv->bskv", x, p["value/kernel"]) + p["value/bias"]
    read = np.einsum("bnts,bsnv->btnv", weights, np.repeat(values, 2, axis=2))
    read = np.einsum("btnv,nvd->btd", read, p["out/kernel"]) + p["out/bias"]
    causal = np.tril(np.ones((6, 6), bool))
    expected = [multi_head(p, row, row, causal, scale=0.3) for row in np.asarray(x)]
    for got in (out, cached, read):
        close(got, expected, 1e-12)


def test_sinks_through_a_cache_in_pieces_and_a_memory():
    module = made(nn.MultiHeadAttention, 4, 5, **OF_OTHER_SIZES)
    x, mask = normal(1, 2, 10, 5), masks.Causal() & masks.Window(left=3)
    cache = module.empty_cache(2, 3, jattn.cache.RollingCache, chunk=4)
    out, _ = call(module, x, cache=cache, mask=mask)
    close(out, call(module, x, mask=mask), 1e-5)
    memory = normal(2, 2, 7, 5)
    got = nnx.jit(lambda m: m.attend_memory(x, m.project_memory(memory)))(module)
    close(got, call(module, x, memory), 1e-5)


@pytest.mark.parametrize("shape", [(7,), (2, 7)])
def test_mask_and_score_see_the_positions_of_a_memory(shape):
    module = made(nn.MultiHeadAttention, 4, 5, **OF_OTHER_SIZES)
    x, memory = normal(1, 2, 3, 5), normal(2, 2, 7, 5)
    places = 2 + jnp.broadcast_to(jnp.arange(7, dtype=jnp.int32), shape)
    options = {"mask": masks.Causal(), "score": scores.Alibi(scores.alibi_slopes(4))}
    options["positions"] = jnp.arange(3, 6, dtype=jnp.int32)

    @nnx.jit
    def attend(module: Any) -> Any:
        stored = module.project_memory(memory, positions=places)
        return module.attend_memory(x, stored, **options)

    expected = call(module, x, memory, kv_positions=places, **options)
    close(attend(module), expected, 1e-5)


def test_axial_rotary_is_by_row_and_column():
    """The patches of an image of width 3 equal the same patches within an image of width 5."""
    make = functools.partial(made, nn.MultiHeadAttention, 2, 5, head_dim=8)
    module, wider = (make(rotary=nn.AxialRotary(width)) for width in (3, 5))
    x = normal(1, 1, 6, 5)
    places = jnp.array([6, 7, 8, 11, 12, 13], jnp.int32)  # rows 1 and 2, columns 1 to 3
    out = call(module, x)
    close(call(wider, x, positions=places), out, 1e-5)
    assert np.abs(np.asarray(call(wider, x) - out)).max() > 1e-3


def test_rotary_options_reach_the_rotation():
    x = normal(1, 2, 7, 5)
    options: list[Any] = [{"style": "interleaved"}, {"base": 50.0}, {"size": 2}]
    options.append({"scaling": positions.Linear(2.0)})
    make = functools.partial(made, nn.MultiHeadAttention, 3, 5, 12)
    models = [make(rotary=x) for x in (False, True, *(nn.Rotary(**o) for o in options))]
    outs = [np.asarray(call(model, x)) for model in models]
    assert all(np.abs(a - b).max() > 1e-3 for a, b in itertools.combinations(outs, 2))
    close(call(models[1], x, positions=jnp.arange(7, dtype=jnp.int32) + 5), outs[1], 1e-5)


def test_cross_attention_with_other_widths():
    module = made(nn.MultiHeadAttention, 3, 5, 12, 7, in_kv_features=4, param_dtype=jnp.float64)
    x, memory = normal(1, 2, 6, 5, dtype=np.float64), normal(2, 2, 8, 4, dtype=np.float64)
    lengths = np.array([5, 8], np.int32)
    out = call(module, x, memory, mask=masks.Lengths(kv=jnp.asarray(lengths)))
    assert out.shape == (2, 6, 7)
    rows = zip(np.asarray(x), np.asarray(memory), lengths, strict=True)
    expected = [multi_head(arrays(module), a, b, np.arange(8) < n) for a, b, n in rows]
    close(out, expected, 1e-12)
    np.testing.assert_array_equal(call(module, x, memory), call(module, x, memory, memory))
    assert np.abs(call(module, x, memory, -memory) - call(module, x, memory)).max() > 0.1


@pytest.mark.parametrize("batch", [(), (2,), (3, 2)])
def test_any_number_of_batch_axes(batch):
    module = made(nn.MultiHeadAttention, 3, 5, 12)
    x = normal(1, *batch, 7, 5)
    out = call(module, x, mask=masks.Causal())
    last_row = call(module, x.reshape(-1, 7, 5)[-1], mask=masks.Causal())
    close(out.reshape(-1, 7, 5)[-1], last_row, 1e-6)


def test_masks_and_scores_of_module_and_call_combine():
    x = normal(1, 2, 7, 5)
    make = functools.partial(nn.MultiHeadAttention, 3, 5, 12)
    plain = made(make, spread=3.0)
    padding, causal = masks.Lengths(kv=jnp.array([4, 6], jnp.int32)), masks.Causal()
    f, g = scores.SoftCap(2.0), scores.Temperature(0.3)
    configured = shaken(make(mask=padding, score=f, rngs=nnx.Rngs(params=0)), spread=3.0)

    @nnx.jit
    def outs(configured, plain):
        same = [configured(x, mask=mask, score=g) for mask in (causal, jnp.asarray(TRIANGLE))]
        alone = configured(x), plain(x, mask=padding, score=f)
        rules = ((padding & causal, f >> g), (causal, f >> g), (padding, f >> g))
        rules += ((padding & causal, g >> f), (padding & causal, g))
        return same, alone, [plain(x, mask=mask, score=score) for mask, score in rules]

    same, alone, (expected, *other) = outs(configured, plain)
    close(same, [expected] * 2, 1e-6)
    close(*alone, 1e-6)
    assert all(np.abs(out - expected).max() > 1e-2 for out in other)


def test_rules_can_be_replaced():
    layer, x = nn.MultiHeadAttention(2, 8, rngs=nnx.Rngs(0)), normal(1, 2, 5, 8)
    rules = [
        {"mask": masks.Segments(jnp.arange(5) // 2)},
        {"mask": jnp.eye(5, dtype=bool)[None, None]},
        {"mask": lambda b, h, q, kv: q >= kv, "score": scores.Alibi(jnp.ones(2))},
        {"score": nn.LearnedScore(scores.Alibi(jnp.ones(2)))},
        {"normalizer": normalizers.Sigmoid(-1.0)},
        {"normalizer": normalizers.Softmax()},
    ]
    call = nnx.jit(lambda layer, x: layer(x))
    for options in rules:
        for name in ("mask", "score", "normalizer"):
            setattr(layer, name, options.get(name))
        made_with_them = nn.MultiHeadAttention(2, 8, **options, rngs=nnx.Rngs(0))
        assert_equal(call(layer, x), call(made_with_them, x))
    held = layer.mask = nn.MultiHeadAttention(2, 8, mask=masks.Causal(), rngs=nnx.Rngs(0)).mask
    call(layer, x)
    assert layer.mask is held
    with pytest.raises(TypeError, match=r"write masks\.Causal"):
        layer.mask = "causal"


def test_score_arrays_are_constant_unless_learned():
    alibi = scores.Alibi(scores.alibi_slopes(3))
    make = lambda score: nn.MultiHeadAttention(3, 5, 12, score=score, rngs=nnx.Rngs(params=0))  # noqa: E731
    fixed, learned = make(alibi), make(nn.LearnedScore(alibi))
    assert not any(path[0] == "score" for path, _ in nnx.to_flat_state(nnx.state(fixed, nnx.Param)))
    assert len(jax.tree.leaves(nnx.state(fixed, Constant))) == 1
    x = normal(1, 2, 7, 5)
    np.testing.assert_array_equal(call(fixed, x), call(learned, x))
    gradient = nnx.jit(nnx.grad(lambda module: (module(x) ** 2).sum()))(learned)
    (slope, *rest) = [g for path, g in nnx.to_flat_state(gradient) if path[0] == "score"]
    assert not rest and slope[...].shape == (3,) and np.abs(slope[...]).min() > 0


MAKES: Any = {"normalize_qk": True, "rotary": True, "mask": masks.Window(3, 2), "head_dim": 4}


@pytest.mark.parametrize("options", [MAKES, OF_OTHER_SIZES])
def test_list_of_heads_equals_packed(options):
    packed = made(nn.MultiHeadAttention, 4, 5, **{"num_kv_heads": 2} | options, in_kv_features=4)
    single = nn.SingleHeads(packed)
    assert len(single.heads) == 4
    x, memory = normal(1, 2, 6, 5), normal(2, 2, 8, 4)
    expected = call(packed, x, memory)
    close(call(single, x, memory), expected, 1e-5)
    assert_equal(single.heads[3].key.kernel[...], packed.key.kernel[:, 1, None])
    single.heads[0].value.kernel[...] += 1.0
    assert np.abs(call(single, x, memory) - expected).max() > 1e-3


THREE = np.linspace(0.1, 2.0, 3, dtype=np.float32)
HEADWISE: Any = {
    "functions": {
        "mask": lambda b, h, q, kv: q - kv <= h,
        "score": lambda score, b, h, q, kv: jnp.where(h % 2 == 0, score, -score),
    },
    "arrays": {"mask": masks.Dense(np.arange(147).reshape(1, 3, 7, 7) % 4 > 0)},
    "slopes": {"score": scores.Alibi(THREE)},
    "parameters": {"score": nn.LearnedScore(scores.Alibi(THREE))},
    "normalizer": {"normalizer": normalizers.Sigmoid(THREE)},
}


@pytest.mark.parametrize("name", HEADWISE)
def test_list_of_heads_equals_packed_where_heads_differ(name):
    options, x = HEADWISE[name], normal(1, 2, 7, 5)
    make = functools.partial(nn.MultiHeadAttention, 3, 5, head_dim=4)
    packed, plain = (make(**rules, rngs=nnx.Rngs(0)) for rules in (options, {}))

    @nnx.jit
    def outs(packed, single, plain):
        of_the_call = name in ("functions", "arrays", "slopes")
        return packed(x), [single(x), *([plain(x, **options)] if of_the_call else [])]

    want, same = outs(packed, nn.SingleHeads(packed), nn.SingleHeads(plain))
    close(same, [want] * len(same), 1e-5)


def test_arrays_of_other_heads_are_refused_by_a_list_of_heads():
    make = functools.partial(nn.MultiHeadAttention, 4, 6, 8, score=scores.Temperature(THREE[:1]))
    outs = lambda: nn.SingleHeads(make(rngs=nnx.Rngs(0)))(normal(1, 2, 7, 6))  # noqa: E731
    expect(ValueError, "score.t: expected N = 4, got shape [1]", nnx.eval_shape, outs)


def test_layers_can_be_pickled():
    layer, x = made(nn.EncoderLayer, 6, 3, 7, dropout_rate=0.0), normal(1, 2, 7, 6)
    assert_equal(call(pickle.loads(pickle.dumps(layer)), x), call(layer, x))


def attention_with_dropout(rate=0.5, **streams):
    make = functools.partial(nn.MultiHeadAttention, 3, 5, 12, dropout_rate=rate)
    return shaken(nnx.jit(lambda: make(rngs=nnx.Rngs(params=0, **streams)))(), spread=2.0)


def test_dropout_needs_random_numbers():
    x, module = normal(1, 2, 7, 5), attention_with_dropout()
    expect(ValueError, "rngs: | got none", module, x)
    expect(ValueError, "rngs: | got streams ['params']", module, x, rngs=nnx.Rngs(params=0))
    expect(ValueError, "rngs", nn.FeedForward(5, 7, dropout_rate=0.1, rngs=nnx.Rngs(0)), x)


def test_deterministic_is_rate_0():
    x, module = normal(1, 2, 7, 5), attention_with_dropout()
    expected = call(attention_with_dropout(rate=0.0), x)
    np.testing.assert_array_equal(evaluate(module, x), expected)
    module.eval()
    np.testing.assert_array_equal(call(module, x), expected)
    module.train()
    dropped, same, other = (call(module, x, rngs=nnx.Rngs(dropout=n)) for n in (1, 1, 2))
    module, again = (attention_with_dropout(dropout=1) for _ in range(2))
    assert_equal((same, call(again, x)), (dropped, first := call(module, x)))
    for a, b in ((dropped, expected), (dropped, other), (call(module, x), first)):
        assert np.abs(a - b).max() > 0.1


def test_dropout_is_that_of_the_function():
    x, module = normal(1, 2, 7, 5), attention_with_dropout(rate=0.25)

    @nnx.jit
    def by_the_function(module, key):
        arrays = module.project_queries(x), *module.project_keys_values(x)
        return module.out(jattn.attention(*arrays, dropout_rate=0.25, dropout_key=key))

    expected = by_the_function(module, nnx.Rngs(dropout=7).dropout())
    close(call(module, x, rngs=nnx.Rngs(dropout=7)), expected, 1e-5)


def test_layers_and_heads_of_a_list_drop_independently():
    packed = nn.MultiHeadAttention(2, 5, 8, dropout_rate=0.5, rngs=nnx.Rngs(params=0, dropout=1))
    encoder, rngs = made(nn.Encoder, 2, 6, 3, 7, dropout_rate=0.5), nnx.Rngs(dropout=1)
    for model, stream, number in ((nn.SingleHeads(packed), None, 2), (encoder, rngs, 2 * 4)):
        dropouts = [x for _, x in nnx.iter_modules(model) if isinstance(x, nn.Dropout)]
        keys = {tuple(jax.random.key_data(x.key(None, stream)).tolist()) for x in dropouts}
        assert len(dropouts) == len(keys) == number


def test_capture_of_a_call_or_a_context_leaves_nothing_behind(small):
    model, source, target = small
    capture: Any = nnx.jit(nn.capture_weights)
    want = capture(model, source, target)
    with nn.capture_weights(model) as weights:
        out = nnx.jit(lambda model, *ids: model(*ids))(model, source, target)
        assert not weights
    assert_trees_close((weights, out), (want, call(model, source, target)), rtol=0, atol=1e-6)
    by_method = nnx.eval_shape(lambda model: nn.capture_weights(model.encode, source), model)
    with nn.capture_weights(model.encode) as weights:
        nnx.jit(lambda model: model.encode(source))(model)
    assert weights.keys() == by_method.keys() == {"encoder/layers/0/self_attention"}
    with nn.capture_weights(model), pytest.raises(ValueError, match="being captured already"):
        nn.capture_weights(model, source, target)
    with pytest.raises(KeyError), nn.capture_weights(model) as weights:
        raise KeyError
    with pytest.raises(TypeError):
        nn.capture_weights(model, source, target, no_such_argument=1)
    says = "model: expected an nnx.Module or a method of one"
    expect(TypeError, says, nn.capture_weights, lambda: None)
    from_outside = jax.jit(lambda ids: nn.capture_weights(model.encode, ids))
    expect(ValueError, "model: expected an argument of the transformed", from_outside, source)
    for _, module in nnx.iter_modules(model):
        assert not (isinstance(module, nn.WeightsTap) and module.is_open)
        assert not hasattr(module, "__captures__")
    with nn.capture_weights(model) as weights:
        pass
    assert weights == {}


def test_outputs_of_heads_can_be_edited(small):
    """The README of the translation experiment removes and replaces heads like this."""
    unchanged, source, target = small

    def logits(edit: Any, source: Any, change: Any = lambda attention: None) -> Any:
        model: Any = nnx.clone(unchanged)
        attention = model.decoder.layers[0].cross_attention
        change(attention)
        attend = attention.attend
        attention.attend = lambda *arrays, **options: edit(attend(*arrays, **options))
        return model(source, target)

    def without_first_head(attention: Any) -> None:
        attention.out.kernel[...] = attention.out.kernel[...].at[0].set(0)

    @jax.jit
    def outs(source: Any) -> Any:
        heads: list[Any] = []
        recorded = logits(lambda x: heads.append(x) or x, source)
        ablated = logits(lambda x: x.at[:, :, 0].set(0), source)
        # The source reaches the only decoder layer by these heads alone.
        patched = logits(lambda _: heads[0], jnp.flip(source, 1))
        return recorded, patched, ablated, logits(lambda x: x, source, without_first_head)

    recorded, patched, ablated, headless = outs(source)
    close([recorded, patched], [call(unchanged, source, target)] * 2, 1e-6)
    close(ablated, headless, 1e-6)
    assert np.abs(ablated - recorded).max() > 1e-3


def test_second_call_of_a_module_is_numbered():
    class Twice(nnx.Module):
        def __init__(self):
            self.attention = made(nn.MultiHeadAttention, 1, 4)

        def __call__(self, x):
            return self.attention(self.attention(x)[:, :2])

    module, x = Twice(), normal(1, 2, 3, 4)
    capture: Any = nnx.jit(nn.capture_weights)
    want = capture(module, x)
    with nn.capture_weights(module) as weights:
        nnx.jit(lambda module: module(x))(module)
    assert {name: w.shape[-1] for name, w in want.items()} == {"attention": 3, "attention[1]": 2}
    assert_trees_close(weights, want, rtol=0, atol=1e-6)


def test_no_weights_are_computed_when_nobody_captures(monkeypatch):
    monkeypatch.setattr("jattn.nn.attention.attention_weights", lambda *_, **__: 1 / 0)
    module, x = made(nn.MultiHeadAttention, 1, 4), normal(1, 2, 3, 4)
    nnx.eval_shape(lambda module: module(x), module)
    nnx.eval_shape(lambda module: nnx.capture(module, nnx.Intermediate)(x)[0], module)
    with pytest.raises(ZeroDivisionError):
        nnx.eval_shape(lambda module: nn.capture_weights(module, x), module)


def test_additive_attention():
    module = made(nn.AdditiveAttention, 5, 4, 6, param_dtype=jnp.float64, spread=3.0)
    query, key = normal(1, 2, 3, 5, dtype=np.float64), normal(2, 2, 7, 4, dtype=np.float64)
    value = normal(3, 2, 7, 8, dtype=np.float64)
    mask = masks.Lengths(kv=jnp.array([4, 7], jnp.int32))
    out = call(module, query, key, value, mask=mask)
    p = arrays(module)
    hidden = np.tanh((query @ p["query"])[:, :, None] + (key @ p["key"])[:, None])
    score = np.where(np.arange(7) < np.array([4, 7])[:, None, None], hidden @ p["score"], -np.inf)
    weights = np.exp(score - score.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    close(out, weights @ np.asarray(value), 1e-12)
    reused = nnx.jit(lambda m: m.attend(query, m.project_keys(key), value, mask=mask))
    np.testing.assert_array_equal(reused(module), out)
    capture: Any = nnx.jit(nn.capture_weights)
    captured = capture(module, query, key, value, mask=mask)
    assert captured.keys() == {""}
    close(captured[""], weights[:, None], 1e-12)
    np.testing.assert_array_equal(call(module, query, key), call(module, query, key, key))


@pytest.mark.parametrize(("norm", "layers"), [("post", 2), ("pre", 1)])
def test_decoder_is_its_sublayers_in_order(norm, layers):
    decoder = made(nn.Decoder, layers, 6, 3, 7, norm=norm, dropout_rate=0.0)
    x, memory = normal(1, 2, 5, 6), normal(2, 2, 4, 6)
    mask, cross_mask = masks.Window(left=2), masks.Lengths(kv=jnp.array([2, 4], jnp.int32))

    @nnx.jit
    def outs(decoder, x):
        out = decoder(x, memory, mask=mask, cross_mask=cross_mask)
        for layer in decoder.layers:
            sublayers = {
                "self_attention": lambda y, f: f(y, mask=masks.Causal() & mask),
                "cross_attention": lambda y, f: f(y, memory, mask=cross_mask),
                "feed_forward": lambda y, f: f(y),
            }
            for name, run in sublayers.items():
                sublayer = functools.partial(run, f=getattr(layer, name))
                normalise = getattr(layer, f"{name}_residual").norm
                x = normalise(x + sublayer(x)) if norm == "post" else x + sublayer(normalise(x))
        return out, x if norm == "post" else decoder.norm(x)

    close(*outs(decoder, x), 1e-5)
    assert (decoder.norm is None) == (norm == "post")


def test_attention_of_another_make():
    grouped = functools.partial(nn.MultiHeadAttention, num_kv_heads=1, rotary=True)
    layer = made(nn.Decoder, 1, 6, 3, 7, self_attention=grouped).layers[0]
    both = ((x.num_kv_heads, x.rotary) for x in (layer.self_attention, layer.cross_attention))
    assert [*both] == [(1, nn.Rotary()), (3, None)]


def test_default_embedding_has_variance_one_over_d():
    table = nn.TokenEmbedding(400, 16, rngs=nnx.Rngs(params=0))
    assert abs(float(jnp.std(table.embedding[...])) * 4 - 1) < 0.05


def test_ids_outside_the_vocabulary():
    table, ids = made(nn.TokenEmbedding, 11, 9), jnp.array([[3, -1], [3, 11]], jnp.int32)
    for row in ids:
        says = f"ids: expected 0 <= ids < vocabulary=11, got | {row[1]}"
        expect(ValueError, says, table, row)
    out = call(table, ids)
    assert np.isfinite(out[:, 0]).all() and np.isnan(out[:, 1]).all()


def test_positions():
    learned = made(nn.LearnedPositions, 8, 6)
    places = jnp.array([[0, 1], [7, 3]], jnp.int32)
    np.testing.assert_array_equal(call(learned, places), learned.embedding[...][places])
    expect(ValueError, "positions: expected 0 <= positions < max_length=8", learned, places + 1)
    close(call(nn.SinusoidalPositions(6), places), positions.sinusoidal(places, 6), 1e-6)


SIZES: dict[str, Any] = {"features": 12, "num_heads": 3, "feed_forward": 10, "max_length": 16}
SIZES |= {"encoder_layers": 1, "decoder_layers": 1}


def transformer(**options):
    arguments = {"dropout_rate": 0.0, "rngs": nnx.Rngs(params=0)} | SIZES | options
    return nn.Transformer(13, 11, **arguments)


@pytest.fixture(scope="module")
def small():
    rng = np.random.default_rng(0)
    source = jnp.asarray(rng.integers(0, 13, (2, 7)), jnp.int32)
    target = jnp.asarray(rng.integers(0, 11, (2, 5)), jnp.int32)
    return made(transformer, spread=1.0), source, target


def test_tied_embeddings(small):
    _, source, target = small
    tied, free = (made(transformer, tie_embeddings=x, spread=1.0) for x in (True, False))
    nnx.update(free, nnx.state(tied, nnx.Param))
    free.output.kernel[...] = tied.target_tokens.embedding[...]
    free.output.bias[...] = jnp.zeros(11, jnp.float32)
    np.testing.assert_array_equal(call(tied, source, target), call(free, source, target))
    shared = made(nn.Transformer, 11, 11, tie_embeddings="all", spread=1.0, **SIZES)
    tables = [path for path in arrays(shared) if path.endswith("embedding")]
    assert tables == ["target_tokens/embedding"] and shared.output is None
    reads = nnx.jit(lambda model: model.encode(source % 11, deterministic=True))
    memory = reads(shared)
    shared.target_tokens.embedding[...] *= 2
    assert np.abs(memory - reads(shared)).max() > 1e-2
    expect(ValueError, "'all' expects | got 13 and 11", transformer, tie_embeddings="all")


@pytest.mark.parametrize("positions", ["sinusoidal", None])
def test_word_order_matters_with_positions(small, positions):
    model, (_, source, target) = made(transformer, positions=positions, spread=1.0), small
    moved = np.abs(call(model, source, target) - call(model, source[:, ::-1], target)).max()
    assert moved > 1e-3 if positions else moved < 1e-5


def test_each_side_has_its_own_positions(small):
    model, (_, source, target) = made(transformer, positions="learned", spread=1.0), small

    @nnx.jit
    def both(model):
        memory = model.encode(source)
        return memory, model.decode(target, jnp.ones_like(memory))

    memory, logits = both(model)
    model.target_positions.embedding[...] *= 2
    same, moved = both(model)
    np.testing.assert_array_equal(same, memory)
    assert np.abs(moved - logits).max() > 1e-2


def test_call_is_encode_then_decode_and_padding_changes_nothing(small):
    model, source, target = small
    lengths = jnp.array([4, 7], jnp.int32)
    mask = masks.Lengths(kv=lengths)
    rubbish = jnp.asarray(np.random.default_rng(5).integers(0, 13, (2, 10)), jnp.int32)
    is_real = jnp.arange(10, dtype=jnp.int32)[None, :] < lengths[:, None]
    longer = jnp.where(is_real, jnp.pad(source, ((0, 0), (0, 3))), rubbish)

    @nnx.jit
    def outs(model):
        logits = model(source, target, source_mask=mask, cross_mask=mask)
        memory = model.encode(source, mask=mask)
        decoded = model.decode(target, memory, cross_mask=mask)
        padded = model(longer, target, source_mask=mask, cross_mask=mask)
        alone = model(source[:1, :4], target[:1])
        return memory, logits, decoded, padded, alone, model(longer, target, source_mask=mask)

    memory, logits, decoded, padded, alone, open_cross = outs(model)
    assert logits.shape == (2, 5, 11) and memory.shape == (2, 7, 12)
    for same in (decoded, padded, np.concatenate([alone, logits[1:]])):
        close(same, logits, 1e-5)
    assert np.abs(open_cross - logits).max() > 1e-3


def test_packed_rows_equal_separate_ones(small):
    _, source, target = small
    rotary = functools.partial(nn.MultiHeadAttention, rotary=True)
    model = made(transformer, positions="learned", cross_attention=rotary, spread=1.0)
    rows, places = jnp.indices((2, 7), dtype=jnp.int32)
    source_ids, target_ids = rows.reshape(1, 14), rows[:, :5].reshape(1, 10)
    options = {
        "source_mask": masks.Segments(source_ids),
        "target_mask": masks.Segments(target_ids),
        "cross_mask": masks.Segments(target_ids, source_ids),
        "source_positions": places.reshape(1, 14),
        "target_positions": places[:, :5].reshape(1, 10),
    }
    packed = call(model, source.reshape(1, 14), target.reshape(1, 10), **options)
    close(packed.reshape(2, 5, 11), call(model, source, target), 1e-5)


def check_half_precision(exact, model, ids):
    """A model in bfloat16 is close to that in float32, with parameters and gradients in float32."""
    logits, expected = call(model, *ids), call(exact, *ids)
    assert logits.dtype == jnp.bfloat16
    assert np.abs(logits.astype(jnp.float32) - expected).max() < 0.1 * np.abs(expected).max()
    loss = lambda model: model(*ids).astype(jnp.float32).sum()  # noqa: E731
    for state in (nnx.eval_shape(nnx.grad(loss), model), nnx.state(model, nnx.Param)):
        assert {leaf.dtype for leaf in jax.tree.leaves(state)} == {jnp.dtype("float32")}


def test_half_precision(small):
    exact, *ids = small
    check_half_precision(exact, made(transformer, dtype=jnp.bfloat16, spread=1.0), ids)


def test_dtype_of_a_single_layer():
    for dtype, inputs in itertools.product((jnp.bfloat16, jnp.float32), repeat=2):
        layer = made(nn.EncoderLayer, 6, 3, 7, dropout_rate=0.0, dtype=dtype)
        assert nnx.eval_shape(call, layer, normal(1, 2, 5, 6, dtype=inputs)).dtype == dtype


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float64])
@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
def test_dtype_is_that_of_the_parameters(positions, dtype):
    """Whatever it was when the model was made."""
    sizes: Any = {"features": 6, "num_heads": 3, "feed_forward": 7}
    ids = jnp.zeros((2, 5), jnp.int32)
    models = (
        (made(nn.DecoderOnly, 11, num_layers=1, positions=positions, **sizes), ids),
        (made(transformer, positions=positions), ids, ids),
        (made(nn.RNNsearch, 13, 11, features=6), ids, ids),
    )
    for model, *inputs in models:
        nnx.update(model, jax.tree.map(lambda x: x.astype(dtype), nnx.state(model, nnx.Param)))
        assert nnx.eval_shape(evaluate, model, *inputs).dtype == dtype
    cache = models[0][0].start(2, 5)[0]
    assert cache.keys.dtype == dtype


def check_graph_and_tree_mode(model, ids, graph, weights_shapes):
    """A model, its copy and its captured weights are the same in either mode of NNX."""
    expected = call(model, *ids)
    with nnx.set_graph_mode(graph), nnx.set_graph_updates(graph):
        run = nnx.jit(lambda model, *ids: model(*ids))
        for module in (model, nnx.merge(*nnx.split(model))):
            close(run(module, *ids), expected, 1e-6)
        weights = nnx.eval_shape(nn.capture_weights, model, *ids)
        assert {name: x.shape for name, x in weights.items()} == weights_shapes


WEIGHTS_SHAPES = {
    "encoder/layers/0/self_attention": (2, 3, 7, 7),
    "decoder/layers/0/self_attention": (2, 3, 5, 5),
    "decoder/layers/0/cross_attention": (2, 3, 5, 7),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("graph", [True, False], ids=["graph", "tree"])
def test_graph_and_tree_mode(small, graph):
    model, *ids = small
    check_graph_and_tree_mode(model, ids, graph, WEIGHTS_SHAPES)
    with nnx.set_graph_mode(graph), nnx.set_graph_updates(graph):
        trained = made(nn.EncoderLayer, 6, 3, 7, dropout_rate=0.3, spread=1.0)
        x, traces = normal(1, 2, 5, 6), []

        @nnx.jit
        def train_step(layer, key):
            traces.append(None)
            loss = lambda layer: ((layer(x, rngs=nnx.Rngs(dropout=key)) - x) ** 2).mean()  # noqa: E731
            value, gradient = nnx.value_and_grad(loss)(layer)
            state = nnx.state(layer, nnx.Param)
            nnx.update(layer, jax.tree.map(lambda p, g: p - 0.1 * g, state, nnx.state(gradient)))
            return value

        losses = [float(train_step(trained, jax.random.key(i))) for i in range(5)]
        assert losses[-1] < losses[0] and len(set(losses)) == 5 and len(traces) == 1


def test_flax_tabulates_masks_scores_and_normalizers():
    options: Any = {"score": scores.SoftCap(3.0), "normalizer": normalizers.Entmax(1.5)}
    layer = nn.MultiHeadAttention(2, 8, mask=masks.Causal(), **options, rngs=nnx.Rngs(0))
    x, width = jnp.ones((1, 5, 8)), {"width": 500}
    table = nnx.tabulate(layer, x, mask=~masks.Dilated(2), console_kwargs=width)
    for part in ("Not(inner=Dilated(step=2))", "Causal()", "SoftCap(cap=3.0)", "Entmax(alpha=1.5)"):
        assert part in table


def test_to_linen(small):
    model, *ids = small
    in_linen = nnx.bridge.to_linen(nn.Transformer, 13, 11, dropout_rate=0.5, **SIZES)
    init = functools.partial(in_linen.init, deterministic=True)
    shapes = linen.meta.unbox(jax.eval_shape(init, {"params": jax.random.key(0)}, *ids))["params"]
    parameters = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    assert jax.tree.map(jnp.shape, parameters) == jax.tree.map(lambda x: x.shape, shapes)
    apply = jax.jit(functools.partial(in_linen.apply, deterministic=True))
    close(apply({"params": parameters}, *ids), call(model, *ids), 1e-5)


def test_dropout_in_linen():
    twin = attention_with_dropout(dropout=1)
    module = nnx.bridge.to_linen(nn.MultiHeadAttention, 3, 5, 12, dropout_rate=0.5)
    variables = {"params": nnx.to_pure_dict(nnx.state(twin, nnx.Param))}
    x, apply = normal(1, 2, 7, 5), jax.jit(module.apply)
    keys = [{"dropout": jax.random.key(i)} for i in (1, 1, 2)]
    first, same, other = (apply(variables, x, rngs=key) for key in keys)
    np.testing.assert_array_equal(first, same)
    assert np.abs(first - other).max() > 1e-2
    expect(ValueError, "rngs: dropout", module.apply, variables, x)


LATENT: Any = {"kv_rank": 6, "query_rank": 5, "head_dim": 4, "value_dim": 9}
PRE_TIED: Any = {"norm": "pre", "tie_embeddings": True, "encoder_layers": 2}
RNNSEARCH: Any = {"features": 3, "hidden": 11, "alignment_features": 13, "maxout_features": 17}
DECODER_ONLY: Any = {"features": 12, "num_heads": 3, "head_dim": 6, "num_kv_heads": 1}
DECODER_ONLY |= {"feed_forward": 10, "normalization": "rms", "gated": True, "use_bias": False}
DECODER_ONLY |= {"num_layers": 1, "tie_embeddings": False}
DECODER_ONLY["self_attention"] = functools.partial(nn.MultiHeadAttention, sinks=True, value_dim=5)
GOLDEN_MODULES: dict[str, tuple[Any, tuple[int, ...], dict[str, Any]]] = {
    "multi_head_attention": (nn.MultiHeadAttention, (6, 10, 30, 11, 3, 7), {"normalize_qk": True}),
    "latent_attention": (nn.MultiHeadLatentAttention, (3, 10, 11, 7), LATENT),
    "additive_attention": (nn.AdditiveAttention, (5, 4, 6), {}),
    "transformer": (transformer, (), {"positions": "learned"}),
    "transformer_pre_tied": (transformer, (), PRE_TIED | {"param_dtype": jnp.bfloat16}),
    "rnnsearch": (nn.RNNsearch, (19, 23), RNNSEARCH),
    "decoder_only": (nn.DecoderOnly, (11,), DECODER_ONLY),
}


def parameter_tree(make):
    return {
        "/".join(map(str, path)): {
            "shape": list(leaf.shape),
            "dtype": str(leaf.dtype),
            "sharding": list(leaf.get_metadata()["out_sharding"]),
        }
        for path, leaf in nnx.to_flat_state(nnx.state(nnx.eval_shape(make), nnx.Param))
    }


@pytest.mark.parametrize("name", GOLDEN_MODULES)
def test_golden_parameter_tree(name):
    make, sizes, options = GOLDEN_MODULES[name]
    tree = parameter_tree(lambda: make(*sizes, **options, rngs=nnx.Rngs(params=0)))
    file = GOLDEN / f"{name}.json"
    expected = json.loads(file.read_text()) if file.exists() else None
    lines = ",\n".join(f"  {json.dumps(path)}: {json.dumps(leaf)}" for path, leaf in tree.items())
    assert tree == expected, f"{file} should be\n{{\n{lines}\n}}"
    for path, leaf in tree.items():
        split = [axis for axis in leaf["sharding"] if axis]
        assert set(split) <= set(nn.LOGICAL_AXES) and len(split) == len(set(split)), path


def test_parameters_on_a_mesh(small):
    _, source, target = small
    mesh = mesh_of(data=2, model=2)
    rules = {"mlp": "model", "vocabulary": "model", "embed": "data"}
    rules = dict.fromkeys(nn.LOGICAL_AXES) | rules
    definition, state = nnx.split(made(transformer, tie_embeddings=True, spread=1.0))
    with nnx.logical_axis_rules(list(rules.items())):
        specs = nnx.get_partition_spec(state)
    for path, spec in nnx.to_flat_state(specs):
        if path[-1] == "embedding":
            spec.set_value(jax.P(None, "data"))  # 11 and 13 rows do not divide
    placed = jax.tree.map(lambda array, spec: place(mesh, array, spec), state, specs)
    sharded = nnx.merge(definition, placed)
    kernel = sharded.encoder.layers[0].feed_forward.hidden.kernel[...]
    assert kernel.sharding.spec == jax.P("data", "model")
    assert kernel.addressable_shards[0].data.shape == (6, 5)
    expected = call(nnx.merge(definition, state), source, target)
    close(call(sharded, source, target), expected, 1e-5)


def test_kernels_gradients_are_products_of_matrices():
    """XLA would transpose a factor before a product that sums over several axes of rows."""
    module = jattn.nn.EncoderLayer(8, 2, 16, dropout_rate=0.0, rngs=nnx.Rngs(0))
    graph, params = nnx.split(module)
    loss = lambda params, x: nnx.merge(graph, params)(x, deterministic=True).sum()  # noqa: E731
    text = jax.jit(jax.grad(loss)).lower(params, normal(0, 3, 5, 8)).as_text()
    sums = re.findall(r"dot_general.*contracting_dims = \[([\d, ]+)\] x", text)
    assert sums.count("0") >= 6  # four of attention, two of the feed-forward network
    assert all("," not in axes for axes in sums)


def test_wrong_arguments_are_named(unchecked):
    for sizes, options, says in (
        ((4, 10), {}, "num_heads: expected a positive divisor of qkv_features=10, got 4"),
        ((0, 10), {}, "num_heads: expected a positive divisor of qkv_features=10, got 0"),
        ((6, 12), {"num_kv_heads": 4}, "num_kv_heads: | positive divisor of num_heads=6, got 4"),
        ((2, 10), {"dropout_rate": 1.0}, "dropout_rate: expected 0 <= rate < 1, got 1.0"),
        ((2, 10), {"dropout_rate": -0.5}, "dropout_rate: expected 0 <= rate < 1, got -0.5"),
        ((2, 10), {"dropout_rate": math.nan}, "dropout_rate: | got nan"),
        ((2, 10), {"normalize_qk": "l2"}, "normalize_qk: expected | got 'l2'"),
        ((2, 10, 12), {"head_dim": 5}, "head_dim: expected | = 10, got 12"),
        ((2, 10), {"value_dim": 0}, "value_dim: expected value_dim >= 1, got 0"),
        ((2, 10), {"scale": math.inf}, "scale: expected a finite number, got inf"),
    ):
        make = functools.partial(nn.MultiHeadAttention, *sizes, rngs=nnx.Rngs(params=0))
        expect(ValueError, says, make, **options)
    module = made(nn.MultiHeadAttention, 2, 10, in_kv_features=6)
    x, memory = normal(1, 2, 5, 10), normal(2, 2, 7, 6)
    embedding, additive = made(nn.TokenEmbedding, 11, 9), made(nn.AdditiveAttention, 3, 4, 5)
    for kind, says, call, *arrays in (
        (ValueError, "inputs_q: | with in_features=10", module, normal(1, 2, 5, 9), memory),
        (ValueError, "inputs_k: expected [*B, S, E] | =6, got (2, 5, 10)", module, x, x),
        (ValueError, "inputs_k: | with in_kv_features=6, got (2, 5, 10)", module, x),
        (ValueError, "inputs_v: expected | got (2, 5, 10)", module, x, memory, x),
        (ValueError, "inputs_k: | got None", module, x, None, memory),
        (TypeError, "inputs_k: | got Full(); write mask=Full()", module, x, masks.Full()),
        (ValueError, "inputs_q: expected [*B, T, D] | got (10,)", module, x[0, 0], memory),
        (TypeError, "inputs_q, inputs_k, inputs_v | got 4", module, x, memory, memory, None),
        (ValueError, "query: | [*B, T, D] with query_features=3", additive, *[x[..., :4]] * 2),
        (TypeError, "ids: expected integers, got float", embedding, jnp.zeros((2, 3))),
    ):
        expect(kind, says, call, *arrays)
    expect(ValueError, "norm: expected | or 'sandwich', got 'both'", transformer, norm="both")
    says = "positions: expected | got 'relative'"
    expect(ValueError, says, transformer, positions="relative")
    expect(TypeError, "no_such_option", transformer, no_such_option=1)


LAYERS: dict[str, tuple[tuple[int, ...], dict[str, str]]] = {
    "MultiHeadAttention": ((2, 8), {}),
    "EncoderLayer": ((6, 2, 5), advice.ENCODER_ADVICE),
    "Encoder": ((1, 6, 2, 5), advice.ENCODER_ADVICE),
    "DecoderLayer": ((6, 2, 5), advice.DECODER_ADVICE),
    "Decoder": ((1, 6, 2, 5), advice.DECODER_ADVICE),
    "Transformer": ((5, 5), advice.TRANSFORMER_ADVICE),
    "DecoderOnly": ((5,), advice.DECODER_ONLY_ADVICE),
    "AdditiveAttention": ((5, 4, 6), advice.ADDITIVE_ADVICE),
}
ANSWERS: dict[str, dict[str, str]] = {
    "MultiHeadAttention": {
        "attn_mask": "write mask=array for a boolean array",
        "decode": "write cache=layer.empty_cache",
        "query": "write inputs_q=query",
        "positionz": "did you mean 'positions'",
    },
    "EncoderLayer": {
        "src_key_padding_mask": "write mask=masks.Padding(~src_key_padding_mask)",
        "score": "self_attention=functools.partial(nn.MultiHeadAttention, score=...)",
        "training": "write deterministic=not training",
    },
    "Encoder": {"attn_mask": "write mask=array, boolean"},
    "DecoderLayer": {"tgt_is_causal": "always causal", "memory_mask": "cross_mask=~memory_mask"},
    "Decoder": {"memory_key_padding_mask": "cross_mask=masks.Padding(~memory_key_padding_mask)"},
    "Transformer": {"mask": "write source_mask=..., target_mask=...", "tgt": "target_ids=tgt"},
    "DecoderOnly": {"causal": "always causal", "past_key_values": "model.step(tokens, caches)"},
    "AdditiveAttention": {"causal": "mask=masks.Causal()", "need_weights": "nn.capture_weights"},
}


@pytest.mark.parametrize("name", LAYERS)
def test_arguments_of_other_libraries_are_answered_with_the_line_to_write(name):
    sizes, table = LAYERS[name]
    options = {"Transformer": SIZES, "DecoderOnly": DECODER_ONLY}.get(name, {})
    layer: Any = nnx.eval_shape(lambda: getattr(nn, name)(*sizes, **options, rngs=nnx.Rngs(0)))
    for argument, line in ANSWERS[name].items():
        says = f"{name}.__call__: no argument '{argument}'; | {line}"
        expect(TypeError, says, layer, None, **{argument: None})
    taken = inspect.signature(layer).parameters
    elsewhere = {"left", "right", "q", "kv", "dropout_rate", "dropout", "rngs", "deterministic"}
    for other, line in table.items():
        if "in the constructor" in line:
            continue
        assert set(re.findall(r"(\w+)=", line)) <= {*taken, *elsewhere}, other
        assert other not in taken or line.startswith("nothing"), other


def test_making_layers_and_models_is_answered_with_the_line_to_write():
    for name, argument, says in (
        ("MultiHeadAttention", "embed_dim", "no argument 'embed_dim'; write in_features="),
        ("Decoder", "norm_first", "write norm="),
        ("Decoder", "dropout_rat", "did you mean 'dropout_rate'?"),
        ("Transformer", "num_layers", "write encoder_layers=num_layers, decoder_layers="),
        ("DecoderOnly", "vocab_size", "write vocabulary=vocab_size"),
        ("DecoderOnly", "score", "write self_attention=functools.partial("),
        ("MultiHeadAttention", "decode", "write cache=layer.empty_cache(batch, length)"),
        ("MultiHeadAttention", "deterministic", "write deterministic=True in the call"),
    ):
        options: Any = {argument: 1, "rngs": nnx.Rngs(0)}
        expect(TypeError, f"{name}.__init__: | {says}", getattr(nn, name), **options)
    for line in advice.MODEL_CONSTRUCTOR_ADVICE.values():
        classes = (nn.Encoder, nn.Transformer, nn.DecoderOnly)
        taken = {name for made in classes for name in inspect.signature(made).parameters}
        assert set(re.findall(r"(\w+)=", line)) <= {*taken, "mask", "score", "normalizer"}, line


def test_what_a_layer_keeps_stands_for_its_mask_and_score():
    ids = jnp.array([0, 0, 1, 1, 1])
    mask, score = masks.Causal() & masks.Segments(ids), scores.Alibi([0.1, 0.2])
    make = lambda **rules: nn.MultiHeadAttention(2, 8, rngs=nnx.Rngs(0), **rules)  # noqa: E731
    q, x = normal(0, 1, 5, 2, 4), normal(1, 1, 5, 8)
    window = masks.Window(left=1)
    want, alone = (jattn.attention(q, q, q, mask=x, score=score) for x in (mask & window, mask))
    weights = jattn.attention_weights(q, q, mask=mask)
    for layer in (make(mask=mask, score=x) for x in (score, nn.LearnedScore(score))):
        kept = layer.mask
        for rule, expected in ((kept & window, want), (window & kept, want), (kept, alone)):
            close(jattn.attention(q, q, q, mask=rule, score=layer.score), expected, 1e-6)
        jitted: Any = nnx.jit(lambda layer, q: jattn.attention_weights(q, q, mask=layer.mask))
        for got in (jattn.attention_weights(q, q, mask=kept), jitted(layer, q)):
            np.testing.assert_array_equal(got, weights)
        for same in (make(mask=kept, score=score)(x), layer(x, mask=kept)):
            close(same, layer(x), 1e-6)
