"""Every mistake of a caller raises one clear error before anything is compiled; the message names
the argument, and has the expected shape in letters and in numbers, and the argument's."""

import functools
import inspect
import re
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jattn
from jattn import masks, nn, normalizers, parallel, positions, scores
from jattn._advice import ADVICE
from jattn.cache import DenseCache
from jattn.options import Options, parameters_of
from tests.conftest import expect, normal_arrays, quick_jit


pytestmark = pytest.mark.usefixtures("unchecked")

B, T, S, N, K, H, V = 2, 5, 7, 6, 3, 4, 9


def array(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.ones(shape, dtype)


def arguments(**changes: Any) -> dict[str, Any]:
    """The arguments of a correct call, with changes."""
    right = {"query": array(B, T, N, H), "key": array(B, S, K, H), "value": array(B, S, K, V)}
    return right | changes


Table = dict[str, Callable[[], Any]]
"""The wrong arguments, mask or score by what the message has, separated by " | "."""


def _key_and_value(*axes: int) -> dict[str, Any]:
    return {"key": array(*axes, H), "value": array(*axes, V)}


def _ambiguous(b: int, t: int, **changes: Any) -> dict[str, Any]:
    """A call whose batch or length equals another axis, so that guessing would be possible."""
    return {"query": array(b, t, N, H)} | _key_and_value(b, S, K) | changes


def _trues(*shape: int) -> jax.Array:
    return array(*shape, dtype=jnp.bool_)


def _in_window(b: Any, h: Any, q: Any, kv: Any, size: Any) -> Any:
    return q - kv < size


def _raw_key(*shape: int) -> dict[str, Any]:
    return {"dropout_rate": 0.1, "dropout_key": array(*shape, dtype=jnp.uint32)}


VALUE_ERRORS: Table = {
    "query | [*B, T, N, H] | [6, 4]": lambda: {"query": array(N, H)},
    "key | [*B, S, K, H] | [3, 4]": lambda: {"key": array(K, H)},
    "value | [*B, S, K, V] | [3, 9]": lambda: {"value": array(K, V)},
    "key | [*B, S, K, H] | [7, 3, 4]": lambda: _key_and_value(S, K),
    "key | K | N | 6 | 4": lambda: _key_and_value(B, S, 4),
    "key | K | 0": lambda: _key_and_value(B, S, 0),
    "value | [*B, S, K, V] | [2, 7, 3] | [2, 8, 3, 9]": lambda: {"value": array(B, 8, K, V)},
    "key | H | 4 | [2, 7, 3, 5]": lambda: {"key": array(B, S, K, 5)},
    "key | *B | [2] | [1, 7, 3, 4]": lambda: _key_and_value(1, S, K),
    "mask | [*B, N, T, S] | [6, 6, 5, 7] | [6, 5, 7] | array[None] or array[:, None]": (
        lambda: _ambiguous(N, T, mask=_trues(N, T, S))
    ),
    "mask | [*B, N, T, S] | [2, 7] | mask[None, None] if it is [T, S]": (
        lambda: _ambiguous(B, B, mask=_trues(B, S))
    ),
    "score | [*B, N, T, S] | [6, 6, 5, 7] | [6, 5, 7]": (
        lambda: _ambiguous(N, T, score=scores.Bias(array(N, T, S)))
    ),
    "score | [*B, N, T, S] | [2, 6, 2, 7] | [2, 7] | write array[None, None] or": (
        lambda: _ambiguous(B, B, score=scores.Bias(array(B, S)))
    ),
    "dropout_rate | -0.5": lambda: {"dropout_rate": -0.5, "dropout_key": jax.random.key(0)},
    "dropout_rate | 1.0": lambda: {"dropout_rate": 1.0, "dropout_key": jax.random.key(0)},
    "dropout_key | None": lambda: {"dropout_rate": 0.1},
    "dropout_key | [3]": (
        lambda: {"dropout_rate": 0.1, "dropout_key": jax.random.split(jax.random.key(0), 3)}
    ),
    "dropout_key | one key, uint32 [2], got uint32 [1]": lambda: _raw_key(1),
    "dropout_key | one key, uint32 [2], got uint32 []": _raw_key,
    "dropout_key | one key, uint32 [2], got uint32 [4, 2]": lambda: _raw_key(4, 2),
    "implementation | 'flash' | 'reference'": lambda: {"implementation": "flash"},
    'implementation | in XLA is "blockwise"': lambda: {"implementation": "xla"},
    "kv_positions | [*B, S] | [7] | [5]": lambda: {"kv_positions": jnp.arange(T)},
    "q_positions | [*B, T] | [2, 5] | [3, 5]": lambda: {"q_positions": jnp.ones((3, T), int)},
    "q_positions | [*B, T] | []": lambda: {"q_positions": jnp.int32(3)},
    "scale | [N] | [3]": lambda: {"scale": array(K)},
    "scale | [2, 6]": lambda: {"scale": array(2, N)},
}
MASK_VALUE_ERRORS: Table = {
    "mask.right.array | got [6, 5, 7]; write array[None]": lambda: masks.Causal() & _trues(N, T, S),
    "mask | write array[:, None]": lambda: _trues(B, T, S),
    "Padding | attention_mask | 1 for tokens | 5": lambda: masks.Padding(np.array([[5, 0, 1]])),
    "mask.attention_mask | [*B, S] | [2, 7] | [2, 5]": lambda: masks.Padding(_trues(B, T)),
    "mask | [1, 2, 6, 5, 7]": lambda: _trues(1, B, N, T, S),
    "mask | [*B, N, T, S] | [3, 1, 5, 7]": lambda: _trues(3, 1, T, S),
    "mask | [*B, N, T, S] | [2, 6, 5, 8]": lambda: (
        masks.Causal() & ~masks.Dense(_trues(B, N, T, 8))
    ),
    "mask | kv | *B | [2] | [3]": lambda: masks.Lengths(kv=jnp.array([1, 2, 3])),
    "mask | *B | [3]": lambda: masks.Prefix(jnp.array([1, 2, 3])),
    "mask | q_ids | T | [2, 5] | [2, 7]": lambda: masks.Segments(
        jnp.ones((B, S), int), jnp.ones((B, S), int)
    ),
    "mask | kv_ids | S | [2, 7] | [2, 5]": lambda: masks.Segments(jnp.ones((B, T), int)),
    "layout | [3, 4] | [2, 4]": lambda: masks.Blocks(_trues(2, 4), 2),
    "left | -2": lambda: masks.Window(left=np.array([3, -2])),
    "right | [2, 6]": lambda: masks.Window(right=np.ones((2, N), int)),
    f"right | {2**40}": lambda: masks.Window(right=np.array([2**40])),
    "mask.left | [N] = [6]": lambda: masks.Window(left=jnp.arange(K)),
    "Window | right | 1.5": lambda: masks.Window(right=1.5),  # pyright: ignore[reportArgumentType]
}
SCORE_VALUE_ERRORS: Table = {
    "score.second.array | got [5, 7]; write array[None, None]": lambda: (
        scores.SoftCap(2.0) >> scores.Bias(array(T, S))
    ),
    "score | [*B, N, T, S] | [2, 6, 5, 7] | [2, 6, 7, 5]": lambda: (
        scores.SoftCap(2.0) >> scores.Bias(array(B, N, S, T))
    ),
    "score | slopes | N | [6] | [3]": lambda: scores.Alibi(array(K)),
    "score | table | N | [32, 3]": lambda: scores.RelativeBias(array(32, K)),
    "RelativeBias | [32]": lambda: scores.RelativeBias(array(32)),
    "cap | [N] | [2, 6]": lambda: scores.SoftCap(array(2, N)),
    "cap | [N] | [0]": lambda: scores.SoftCap(array(0)),
    "3 buckets": lambda: scores.RelativeBias(array(3, N)),
    "max_distance 8": lambda: scores.RelativeBias(array(32, N), max_distance=8),
}
TYPE_ERRORS: Table = {
    "key | int32": lambda: {"key": array(B, S, K, H, dtype=jnp.int32)},
    "value | bool": lambda: {"value": array(B, S, K, V, dtype=jnp.bool_)},
    "key | float32 | bfloat16": lambda: {"key": array(B, S, K, H, dtype=jnp.bfloat16)},
    "dropout_key | int": lambda: {"dropout_rate": 0.1, "dropout_key": 3},
    "q_positions | integer | float32": lambda: {"q_positions": jnp.arange(T, dtype=jnp.float32)},
    "q_positions | integer array | int": lambda: {"q_positions": 3},
    "scale | number | float32": lambda: {"scale": jnp.float32},
}
MASK_TYPE_ERRORS: Table = {
    "mask | bool | float32": lambda: array(B, N, T, S),
    "Dense | bool | float32": lambda: masks.Dense(array(B, N, T, S)),
    "mask | str | write masks.Causal()": lambda: "causal",
    "mask | PjitFunction | write masks.Predicate(": lambda: jax.jit(lambda b, h, q, kv: q >= kv),
    "mask | 'padded'": lambda: "padded",
    "mask | write masks.Causal(...)": lambda: masks.Causal,
    "Lengths | kv | float": lambda: masks.Lengths(kv=jnp.array([1.0, 2.0])),
    "Lengths | q | float": lambda: masks.Lengths(q=2.5),
    "mask | boolean scalar | int32": lambda: masks.Predicate(lambda b, h, q, kv: q - kv),
    "mask | (b, h, q_idx, kv_idx) | <lambda>(b, q, kv)": lambda: lambda b, q, kv: q >= kv,
    "mask | 2 operands | _in_window(b, h, q, kv, size)": lambda: masks.Predicate(_in_window, 3, 4),
    "mask | <lambda> | `and` | &": lambda: lambda b, h, q, kv: q >= kv and q - kv < 3,
    "mask | <lambda> | jnp.asarray(table)[index]": lambda: lambda b, h, q, kv: [True, False][kv],
    "mask | str": lambda: masks.Causal() & "padding",
    "Dense | got int;": lambda: masks.Dense(1),
}
SCORE_TYPE_ERRORS: Table = {
    "score | (score, b, h, q_idx, kv_idx) | <lambda>(s)": lambda: lambda s: s,
    "score | <lambda> | `if` | jnp.where": lambda: lambda s, b, h, q, kv: s if q > kv else 2 * s,
    "score | <lambda> | jax.numpy": lambda: lambda s, b, h, q, kv: np.tanh(s),
    "score | write scores.SoftCap(...)": lambda: scores.SoftCap,
    "score | Bias": lambda: array(B, N, T, S),
    "Bias | float | bool": lambda: scores.Bias(_trues(B, N, T, S)),
    "Alibi | slopes | int": lambda: scores.Alibi(jnp.arange(N)),
    "[N], got int; write scores.Alibi(scores.alibi_slopes(6))": lambda: scores.Alibi(N),
    "Bias | got float": lambda: scores.Bias(0.5),
    "score | float scalar | bool": lambda: scores.Score(lambda s, b, h, q, kv: s > 0),
}

MISTAKES = {
    says: (kind, wrong if name is None else lambda name=name, wrong=wrong: {name: wrong()})
    for kind, name, rows in (
        (ValueError, None, VALUE_ERRORS),
        (ValueError, "mask", MASK_VALUE_ERRORS),
        (ValueError, "score", SCORE_VALUE_ERRORS),
        (TypeError, None, TYPE_ERRORS),
        (TypeError, "mask", MASK_TYPE_ERRORS),
        (TypeError, "score", SCORE_TYPE_ERRORS),
    )
    for says, wrong in rows.items()
}


def test_the_call_is_right_without_a_mistake():
    assert jattn.attention(**arguments()).shape == (B, T, N, V)
    everything = _ambiguous(N, T, mask=_trues(N, 1, T, S), score=scores.Bias(array(1, N, 1, S)))
    assert jattn.attention(**everything).shape == (N, T, N, V)


@pytest.mark.parametrize("says", MISTAKES)
def test_a_mistake_raises_also_while_tracing(says):
    kind, wrong = MISTAKES[says]
    call = lambda: jattn.attention(**arguments(**wrong()))  # noqa: E731
    expect(kind, says, call)
    expect(kind, says, jax.eval_shape, call)


@pytest.mark.parametrize(
    "says",
    [
        "key | K | N | 6 | 4",
        "key | H | 4 | [2, 7, 3, 5]",
        "key | int32",
        "mask | [*B, N, T, S] | [6, 6, 5, 7] | [6, 5, 7] | array[None] or array[:, None]",
        "score | [*B, N, T, S] | [2, 6, 2, 7] | [2, 7] | write array[None, None] or",
    ],
)
def test_weights_scores_and_explain_check_alike(says):
    kind, wrong = MISTAKES[says]
    all_arguments = arguments(**wrong())
    expect(kind, says, jattn.explain, **all_arguments)
    del all_arguments["value"]
    for function in (jattn.attention_weights, jattn.attention_scores):
        expect(kind, says, function, **all_arguments)


@pytest.mark.parametrize("function", [jattn.statistics, functools.partial(jattn.top_weights, n=2)])
def test_statistics_of_a_cache_raise(function):
    says = "key: expected | [*B, S, K, H] | DenseCache"
    expect(TypeError, says, function, array(B, T, N, H), DenseCache.create(B, 8, K, H, V))


def test_weights_and_scores_without_heads():
    for function in (jattn.attention_weights, jattn.attention_scores):
        assert function(array(B, T, 0, H), array(B, S, K, H)).shape == (B, 0, T, S)


ADVISED = {
    "is_causal": "mask=masks.Causal()",
    "attn_mask": "score=scores.Bias(array)",
    "key_padding_mask": "masks.Padding(~key_padding_mask)",
    "atn_mask": "for 'attn_mask' write mask=array",
    "maks": "did you mean 'mask'?",
    "kv": "did you mean 'kv_positions'?",
    "cache": "cached_attention(query, key, value, cache, ...)",
    "zzz": "there are query, key, value, mask",
}


@pytest.mark.parametrize("name", ADVISED)
def test_arguments_of_other_libraries_are_answered(name):
    says = f"attention | no argument {name!r} | {ADVISED[name]}"
    expect(TypeError, says, jattn.attention, **arguments(**{name: True}))


def test_arguments_of_other_libraries_are_answered_everywhere():
    functions = (
        *(jattn.explain, jattn.attention_weights, jattn.attention_scores, jattn.cached_attention),
        *(jattn.statistics, jattn.top_weights),
        *(jattn.multiplicative_attention, jattn.additive_attention),
    )
    for function in functions:
        says = f"{function.__name__} | mask=masks.Causal()"
        expect(TypeError, says, function, **arguments(is_causal=True))
    for function, name in (
        (jattn.attention_scores, "dropout_p"),
        (jattn.additive_attention, "softmax_scale"),
        (jattn.multiplicative_attention, "need_weights"),
    ):  # these functions do not have the advised argument either
        says = f"no argument '{name}'; there are query, key"
        expect(TypeError, says, function, **arguments(**{name: True}))
    q, k, v = arguments().values()
    by_place = "query, key, value by place | mask=mask"
    expect(TypeError, by_place, jattn.attention, q, k, v, masks.Causal())
    expect(TypeError, "attention | 'key'", jattn.attention, q)


def _on_a_cache(**changes: Any) -> dict[str, Any]:
    return arguments(cache=DenseCache.create(B, 16, K, H, V), **_key_and_value(B, T, K), **changes)


@pytest.mark.parametrize("name", ["lengths", "attention_mask", "padding_mask", "key_padding_mask"])
def test_padding_of_calls_on_a_cache_is_answered_by_valid(name):
    """A mask of the new tokens would leave their padding in the cache."""
    wrong, x = {name: array(B, T)}, array(B, T, N * H)
    says = f"no argument {name!r} | valid=attention_mask.astype(bool)"
    new = _on_a_cache(**wrong)
    expect(TypeError, f"cached_attention | {says}", jattn.cached_attention, **new)
    layer: Any = nn.MultiHeadAttention(N, N * H, rngs=nnx.Rngs(0))
    cached = {"cache": layer.empty_cache(B, 16), **wrong}
    expect(TypeError, f"MultiHeadAttention | {says}", layer, x, **cached)
    says = "attention | cache.append(key, value, ...) | valid=attention_mask.astype(bool)"
    expect(TypeError, says, jattn.attention, new["query"], new["cache"], **wrong)


@pytest.mark.parametrize(
    ("mask", "path"),
    [
        (masks.Padding(_trues(B, T)), "mask.attention_mask: expected [*B, S] = [2, 16]"),
        (masks.Causal() & masks.Padding(_trues(B, T)), "mask.right.attention_mask: expected"),
        (_trues(B, 1, T, T), "mask.array: expected [*B, N, T, S] = [2, 6, 5, 16]"),
    ],
)
def test_masks_of_the_new_tokens_are_refused_in_calls_on_a_cache(mask, path):
    says = f"{path} | got [2,  | valid=attention_mask.astype(bool)"
    expect(ValueError, says, jattn.cached_attention, **_on_a_cache(mask=mask))
    with pytest.raises(ValueError, match=r"mask\.attention_mask: ") as raised:
        jattn.cached_attention(**_on_a_cache(mask=masks.Padding(_trues(3, 16))))
    assert "valid" not in str(raised.value)


def test_options_are_those_of_attention():
    """Each option is declared once; functions that pass options on have them in their signature."""
    declared = dict(inspect.signature(jattn.attention).parameters)
    written = inspect.getfullargspec(inspect.unwrap(jattn.attention)).kwonlyargs
    assert {*written} == {*Options.__annotations__, "return_lse"}
    for name in ("query", "key", "value", "return_lse"):
        del declared[name]
    shown, wanted = (
        {name: x.default for name, x in options.items()}
        for options in (declared, parameters_of(Options))
    )
    assert shown == wanted
    for function in (jattn.explain, jattn.multiplicative_attention, parallel.attention):
        taken = inspect.signature(function).parameters
        assert {*declared} <= {*taken} and not any(x.kind is x.VAR_KEYWORD for x in taken.values())


def test_a_traceback_shows_what_was_called_alone():
    """Decorators that check arguments and debugging flags are in no traceback."""
    q = arguments()["query"]
    calls: list[Callable[[], Any]] = [
        lambda: jattn.attention(q, q, q, mask=3),  # pyright: ignore[reportArgumentType]
        lambda: jattn.attention(q, q, q, is_causal=True),  # pyright: ignore[reportCallIssue]
        lambda: jattn.attention_scores(q, q, scale="x"),  # pyright: ignore[reportArgumentType]
    ]
    for call, inner in zip(calls, ("attention", None, "attention_scores"), strict=True):
        with pytest.raises(TypeError) as raised:
            call()
        assert [entry.name for entry in raised.traceback][1] == "<lambda>"
        written = [entry.name for entry in raised.traceback if "jaxtyping" not in str(entry.path)]
        assert written[2:3] == ([inner] if inner else [])


def test_advice_names_what_there_is():
    taken = inspect.signature(jattn.attention).parameters
    for name, line in ADVICE.items():
        assert name not in taken
        assert set(re.findall(r"(\w+)=", line)) <= {*taken, "left", "right", "q", "kv"}, name
        for room, member in re.findall(r"(masks|normalizers|scores)\.(\w+)", line):
            assert hasattr(getattr(jattn, room), member), name


def test_functions_are_masks_and_scores():
    close = lambda b, h, q, kv: abs(q - kv) <= 1 + h  # noqa: E731

    gain = lambda score, b, h, q, kv: score + jnp.where(kv > q + h, 1.0, 2.0).astype(score.dtype)  # noqa: E731
    query, value = normal_arrays((B, T, N, H), (B, S, K, V), dtype="float32")
    cap, wrapped = scores.SoftCap(3.0), scores.Score(gain)
    method = types.MethodType(lambda self, b, h, q, kv: close(b, h, q, kv), cap)
    as_functions = close, functools.partial(close), method, masks.Full() & close

    @quick_jit
    def outs(query: Any, value: Any) -> Any:
        call = functools.partial(jattn.attention, **arguments(query=query, value=value))
        return (
            call(mask=masks.Predicate(close), score=wrapped),
            [call(mask=mask, score=gain) for mask in as_functions],
            [call(mask=close, score=x) for x in (cap >> gain, cap >> wrapped)],
            [call(mask=close, score=x) for x in (gain >> cap, wrapped >> cap)],
        )

    want, same, *pairs = outs(query, value)
    for one, other in (*((x, want) for x in same), *pairs):
        np.testing.assert_array_equal(one, other)
    assert np.abs(pairs[0][0] - pairs[1][0]).max() > 1e-3


def test_a_traced_rate_is_refused():
    dropout = {"dropout_key": jax.random.key(0)}
    traced = jax.jit(lambda rate: jattn.attention(**arguments(dropout_rate=rate, **dropout)))
    expect(TypeError, "dropout_rate", traced, 0.1)


def test_arrays_of_another_call_are_refused_under_vmap():
    """Mapped arrays lose an axis; one that was not mapped has one too many."""
    mapped = jax.vmap(lambda q, k, v: jattn.attention(q, k, v, mask=_trues(B, N, T, S)))
    says = "mask | [*B, N, T, S] | [6, 5, 7] | [2, 6, 5, 7]"
    expect(ValueError, says, mapped, *arguments().values())


def _rotary(H: int, **options: Any) -> Callable[[], Any]:
    return lambda: positions.rotary(array(T, N, H), jnp.arange(T), **options)


OTHER_FUNCTIONS = {
    "even | 5": _rotary(5),
    "even | 3": _rotary(8, rotary_dim=3),
    "H = 8 | 10": _rotary(8, rotary_dim=10),
    "style | 'half' | 'interleaved' | 'neox'": _rotary(8, style="neox"),
    "positions | [*B, T] | [2, 5] | [6]": (
        lambda: positions.rotary(array(B, T, N, 8), np.arange(6))
    ),
    "sinusoidal | even | 5": lambda: positions.sinusoidal(jnp.arange(T), 5),
    "multiple of 2 A = 4 | H = 6": (
        lambda: positions.axial_rotary(array(3, 2, 6), jnp.ones((3, 2), int))
    ),
    "S: expected 0 <= S": lambda: positions.aligned_to_end(3, np.array([4, -2])),
    "table | [max, D] | [5]": lambda: positions.learned(array(T), jnp.arange(T)),
    "merge | at least one": jattn.merge,
    "key | one key, uint32 [2], got uint32 [3]": (
        lambda: jattn.RandomFeatures.create(array(3, dtype=jnp.uint32), 4, H)
    ),
    "Sigmoid: bias | cache | depends on the number of keys: pass a number, as in Sigmoid(-4.0)": (
        lambda: jattn.attention(
            array(B, T, K, H), DenseCache.create(B, S, K, H), normalizer=normalizers.Sigmoid()
        )
    ),
    "merge | part 0 | [*B, N, T] | [5, 6]": lambda: jattn.merge((array(T, N, V), array(T, N))),
    "merge | part 1 | [5, 6, 4] | [5, 6, 9]": (
        lambda: jattn.merge((array(T, N, V), array(N, T)), (array(T, N, 4), array(N, T)))
    ),
    "with_sink | sink | [N] | [6] | [3]": (
        lambda: jattn.with_sink(array(T, N, V), array(N, T), array(K))
    ),
}


@pytest.mark.parametrize("says", OTHER_FUNCTIONS)
def test_positions_and_merged_parts_are_checked(says):
    expect(ValueError, says, OTHER_FUNCTIONS[says])


def test_integers_of_numpy_are_numbers():
    mask = masks.Window(left=np.int64(2)) & masks.Prefix(np.int32(3))  # pyright: ignore[reportArgumentType]
    want = masks.Window(left=2) & masks.Prefix(3)
    np.testing.assert_array_equal(mask.dense(T, S), want.dense(T, S))
    assert jattn.attention(**arguments(mask=mask)).shape == (B, T, N, V)
