"""Attention over several devices equals the formula: values, gradients, what is sent."""

import functools
import itertools
import re
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jattn
from jattn import masks, parallel, scores, tuning
from tests.conftest import assert_trees_close, expect, out_and_gradients, quick_jit
from tests.devices import mesh_of


B, T, N, K, H, V = 2, 32, 8, 2, 4, 3
SCHEMES = ("ring", "all_to_all", "gather")
ORDERS = ("contiguous", "zigzag")


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).standard_normal(shape)


class ArrayRule(NamedTuple):
    """A mask and a score function that are made from arrays by name.

    Attributes:
        of: returns the options of a call.
        arrays: the arrays.
        along: the axes of each array that run along tokens.
        masked_keys: the number of keys at the end that are masked, and therefore hold NaN here.
    """

    of: Callable[[dict[str, Any]], dict[str, Any]]
    arrays: dict[str, Any] = {}  # noqa: RUF012
    along: dict[str, tuple[int, ...]] = {}  # noqa: RUF012
    masked_keys: int = 0


def pasted(b: Any, h: Any, q: Any, kv: Any, table: Any) -> Any:
    return (q >= kv) & (table[kv] != h + b)


def learned(score: Any, b: Any, h: Any, q: Any, kv: Any, gain: Any) -> Any:
    row, distance = (jnp.asarray(x, score.dtype) for x in (b, q - kv))
    return score * gain[h] + 0.1 * row - 0.01 * distance


IDS = np.sort(np.random.default_rng(0).integers(0, 3, (B, T)))
LENGTHS = np.array([11, 24])
CAUSAL, DROPPED = masks.Causal(), {"dropout_rate": 0.3, "dropout_key": jax.random.key(1)}
LAYOUT = np.random.default_rng(1).random((8, 8)) > 0.4

RULES: dict[str, ArrayRule] = {
    "none": ArrayRule(lambda a: {}),
    "causal": ArrayRule(lambda a: {"mask": masks.Causal(), "score": scores.SoftCap(2.0)}),
    "window": ArrayRule(lambda a: {"mask": masks.Window(left=5, right=3)}),
    "segments": ArrayRule(
        lambda a: {"mask": CAUSAL & masks.Segments(a["ids"]), "score": scores.Alibi(a["slopes"])},
        {"ids": IDS, "slopes": random(N)},
        {"ids": (1,)},
    ),
    "lengths": ArrayRule(
        lambda a: {"mask": masks.Lengths(q=a["lengths"], kv=24), "scale": a["scale"]},
        {"lengths": LENGTHS, "scale": 1 + random(N) ** 2},
        masked_keys=8,
    ),
    "first_shard_masked": ArrayRule(lambda a: {"mask": masks.Causal() & ~masks.Prefix(16)}),
    "prefix": ArrayRule(
        lambda a: {
            "mask": masks.Causal() | masks.Prefix(a["lengths"]),
            "score": scores.RelativeBias(a["table"], max_distance=9),
        },
        {"lengths": LENGTHS, "table": random(8, N)},
    ),
    "pasted": ArrayRule(
        lambda a: {
            "mask": masks.Predicate(pasted, a["table"]),
            "score": scores.Score(learned, a["gain"]),
        },
        {"table": np.random.default_rng(2).integers(0, 9, T, np.int32), "gain": random(N)},
    ),
    "arrays": ArrayRule(
        lambda a: {"mask": masks.Dense(a["dense"]), "score": scores.Bias(a["bias"])},
        {"dense": np.random.default_rng(3).random((B, 1, T, T)) > 0.3, "bias": random(1, N, T, T)},
        {"dense": (2, 3), "bias": (2, 3)},
    ),
    "blocks": ArrayRule(lambda a: {"mask": masks.Blocks(LAYOUT, 4) & masks.Dilated(3)}),
    "dropout": ArrayRule(lambda a: {"mask": CAUSAL, **DROPPED}),
    # In contiguous order the next device needs the last three tokens of a shard.
    "part": ArrayRule(
        lambda a: {
            "mask": masks.Causal() & masks.Window(left=3) & masks.Segments(a["ids"]),
            "score": scores.Bias(a["by_key"]) >> scores.Bias(a["by_pair"]),
            "dropout_rate": 0.2,
            "dropout_key": jax.random.key(5),
        },
        {"ids": IDS, "by_key": random(1, N, 1, T), "by_pair": random(1, 1, T, T)},
        {"ids": (1,), "by_key": (3,), "by_pair": (2, 3)},
    ),
}


def operands_of(rule: ArrayRule) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """The integers of a rule, its floats with query, key and value, and both cotangents."""
    floats = {"q": random(B, T, N, H), "k": random(B, T, K, H), "v": random(B, T, K, V)}
    floats |= {n: x for n, x in rule.arrays.items() if x.dtype == np.float64}
    integers = {n: x for n, x in rule.arrays.items() if n not in floats}
    return integers, floats, (random(B, T, N, V), random(B, N, T))


def with_gradients(attend: Any, rule: ArrayRule, arrays: Any, floats: Any, cotangents: Any) -> Any:
    def call(floats: Any) -> Any:
        options = rule.of({**arrays, **floats})
        return attend(floats["q"], floats["k"], floats["v"], return_lse=True, **options)

    return out_and_gradients(call, (floats,), *cotangents)


_truths: dict[Any, Any] = {}  # of each rule and number of key heads, which several tests compare to


def truth(rule: ArrayRule, *operands: Any) -> Any:
    if (rule.of, K) not in _truths:
        reference = functools.partial(jattn.attention, implementation="reference")
        run = functools.partial(with_gradients, reference, rule)
        _truths[rule.of, K] = quick_jit(run)(*operands)
    return _truths[rule.of, K]


def check(rule: ArrayRule, devices: int, order: str, attend: Any) -> None:
    """`attend` of placed tokens gives what the formula gives of tokens in sequence."""

    def place(x: Any, axes: tuple[int, ...], move: Any = parallel.shard_tokens) -> Any:
        return functools.reduce(lambda x, a: move(x, devices, axis=a, order=order), axes, x)

    back = functools.partial(place, move=parallel.unshard_tokens)
    along = {"q": (1,), "k": (1,), "v": (1,), **rule.along}
    rest, floats, (d_out, d_lse) = operands_of(rule)
    if rule.masked_keys:
        floats["k"][:, -rule.masked_keys :], floats["v"][:, -rule.masked_keys :] = np.nan, np.inf
    want_out, want_lse, want = truth(rule, rest, floats, (d_out, d_lse))
    placed = [{n: place(x, along.get(n, ())) for n, x in tree.items()} for tree in (rest, floats)]
    run = functools.partial(with_gradients, attend, rule)
    cotangents = (place(d_out, (1,)), place(d_lse, (2,)))
    out, lse, gradients = quick_jit(run)(*placed, cotangents)
    results = back(out, (1,)), back(lse, (2,))
    assert_trees_close(results, (want_out, want_lse), rtol=1e-12, atol=1e-13)
    gradients = {name: back(d, along.get(name, ())) for name, d in gradients.items()}
    assert_trees_close(gradients, want, rtol=1e-11, atol=1e-12)


def over(devices: int, **options: Any) -> Any:
    return functools.partial(parallel.attention, mesh=mesh_of(x=devices), axis_name="x", **options)


@pytest.mark.one_in(61)
@pytest.mark.parametrize(
    ("devices", "order", "scheme"), [*itertools.product((1, 2, 8, 4), ORDERS, SCHEMES)]
)
@pytest.mark.parametrize("name", RULES)
def test_equals_one_device(name, scheme, order, devices):
    check(RULES[name], devices, order, over(devices, scheme=scheme, order=order))


def in_rounds() -> Any:
    """A context in which key heads go round one by one, in two halves of a shard's keys."""
    row = tuning.sizes("cpu")._replace(ring_queries=1, ring_keys=1)
    return tuning.using(row=row, ring_rounds=1, ring_chunks=2)


@pytest.mark.one_in(8)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", ["part", "pasted", "segments", "arrays"])
def test_equals_one_device_where_heads_and_keys_go_round_in_turn(name, order):
    like = [jax.ShapeDtypeStruct((B, T, heads, H), jnp.float64) for heads in (N, K, K)]
    with in_rounds():
        check(RULES[name], 4, order, over(4, order=order))
        sent = {x.times for x in parallel.exchanges(*like, devices=4) if x.array == "key"}
    assert sent == {3 * K * 2}


AXES: Any = {"axis_name": "context", "batch_axis": "data", "head_axis": "model"}


def check_on_three_axes(rule: ArrayRule, scheme: Any, mesh: Any = None) -> None:
    """Batch rows, tokens in zig-zag order, and heads are sharded over two devices each."""
    mesh = mesh or mesh_of(data=2, context=2, model=2)
    options = {"mesh": mesh, "scheme": scheme, "order": "zigzag", **AXES}
    check(rule, 2, "zigzag", functools.partial(parallel.attention, **options))


# Its functions and its dropout depend on the batch rows and heads of the whole.
PASTED_AND_DROPPED = RULES["pasted"]._replace(of=lambda a: RULES["pasted"].of(a) | DROPPED)


@pytest.mark.slow
def test_heads_go_round_in_turn_where_they_are_sharded_too(monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "K", 4)
    with in_rounds():
        check_on_three_axes(PASTED_AND_DROPPED, "ring")


@pytest.mark.slow
def test_batch_and_heads_are_sharded_too_and_heads_run_at_once():
    """On GPUs and TPUs `blockwise` computes all heads at once."""
    check_on_three_axes(PASTED_AND_DROPPED, "all_to_all")  # a ring above, where heads stay
    with tuning.using(row=tuning.sizes("cpu")._replace(in_turn=False)):
        check(RULES["segments"], 2, "zigzag", over(2, order="zigzag", implementation="blockwise"))


@pytest.mark.one_in(2, slow=True)
@pytest.mark.parametrize("explicit", [("data", "context", "model"), ("context",)])
def test_a_mesh_whose_axes_are_part_of_types_takes_arrays_as_they_are(explicit):
    """`jax.make_mesh` makes such meshes; the first arrays of a new user are on one device."""
    names, kinds = ("data", "context", "model"), jax.sharding.AxisType
    types = tuple(kinds.Explicit if name in explicit else kinds.Auto for name in names)
    mesh = jax.make_mesh((2, 2, 2), names, axis_types=types)
    for name, scheme in (("segments", "ring"), ("arrays", "gather"), ("prefix", "all_to_all")):
        check_on_three_axes(RULES[name], scheme, mesh)


@pytest.mark.one_in(4, slow=True)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_within_shard_map_under_scan_remat_and_vmap(scheme):
    """Two layers, one set of weights each, a batch that is mapped; `check_vma` is on by default."""
    weights, x, ids = random(2, H, H), random(3, B, T, N, H), IDS

    def layers(attend: Any, weights: Any, x: Any, ids: Any) -> Any:
        @jax.checkpoint
        def layer(x: Any, weight: Any) -> Any:
            mask = masks.Causal() & masks.Segments(ids)
            return x + attend(x @ weight, x, x, mask=mask), None

        return jax.lax.scan(layer, x, weights)[0]

    def loss(attend: Any, weights: Any, x: Any, ids: Any) -> Any:
        return jnp.sum(jax.vmap(lambda x: layers(attend, weights, x, ids))(x) ** 2)

    want = quick_jit(jax.grad(functools.partial(loss, jattn.attention), (0, 1)))(weights, x, ids)
    options: Any = {"axis_name": "x", "scheme": scheme, "order": "zigzag"}
    attend = functools.partial(parallel.attention_shard, **options)
    local = lambda *operands: jax.lax.psum(loss(attend, *operands), "x")  # noqa: E731
    specs = (P(), P(None, None, "x"), P(None, "x"))
    run = jax.shard_map(local, mesh=mesh_of(x=4), in_specs=specs, out_specs=P())
    place = functools.partial(parallel.shard_tokens, devices=4, order="zigzag")
    gradients = quick_jit(jax.grad(run, (0, 1)))(weights, place(x, axis=2), place(ids))
    np.testing.assert_allclose(gradients[0], want[0], rtol=1e-11)
    back = parallel.unshard_tokens(gradients[1], 4, axis=2, order="zigzag")
    np.testing.assert_allclose(back, want[1], rtol=1e-10, atol=1e-11)


def test_any_permutation_given_as_positions():
    places = np.random.default_rng(5).permutation(T)
    q, k, v = map(jnp.asarray, (random(B, T, N, H), random(B, T, K, H), random(B, T, K, V)))
    mask = masks.Causal() & masks.Window(left=7)
    attend = over(4, mask=mask, q_positions=places, kv_positions=places)
    result = attend(*(x[:, places] for x in (q, k, v)))
    want = jattn.attention(q, k, v, mask=mask)
    np.testing.assert_allclose(result[:, np.argsort(places)], want, rtol=1e-12, atol=1e-13)


PADDED: dict[str, Any] = {
    "causal": lambda a: {"mask": masks.Causal()},
    "arrays": lambda a: {
        "mask": masks.Segments(*a["ids"]) | ~masks.Window(left=5),
        "score": scores.Bias(a["bias"]),
        **DROPPED,
    },
}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("rule", PADDED)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_cannot_be_shared_is_padded_on_request(scheme, rule):
    queries, keys, ids = 29, 31, (IDS[:, :29], IDS[:, 1:])
    floats = {"q": random(B, queries, N, H), "k": random(B, keys, K, H), "v": random(B, keys, K, V)}
    floats["bias"] = random(1, N, queries, keys)
    rules = ArrayRule(lambda a: PADDED[rule]({**a, "ids": ids}))
    cotangents = random(B, queries, N, V), random(B, N, queries)
    reference = functools.partial(jattn.attention, implementation="reference")
    want = quick_jit(functools.partial(with_gradients, reference, rules))({}, floats, cotangents)
    attend = over(4, scheme=scheme, pad=True)
    result = quick_jit(functools.partial(with_gradients, attend, rules))({}, floats, cotangents)
    assert_trees_close(result, want, rtol=1e-11, atol=1e-12)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_second_derivatives_are_those_of_one_device_or_refused(scheme):
    q = random(1, 8, 2, H)
    attend = over(2, scheme=scheme, mask=masks.Causal())

    def slope(attend: Any) -> Any:
        first = jax.grad(lambda q: jnp.sum(attend(q, q, q) ** 2))
        return jax.grad(lambda q: jnp.sum(first(q) ** 2))(q)

    if scheme == "ring":
        expect(NotImplementedError, "first derivatives in reverse mode only", slope, attend)
        return
    want = slope(functools.partial(jattn.attention, mask=masks.Causal()))
    np.testing.assert_allclose(slope(attend), want, rtol=1e-11, atol=1e-12)


def sent(compiled: Any) -> list[tuple[int, list[tuple[int, int]]]]:
    """The bytes and the pairs of devices of each collective permute in a compiled program."""
    sends = []
    pattern = r"= \(?\w(\d+)\[([\d,]*)\].*collective-permute(?:-start)?\(.*pairs=\{(.*?)\}\}"
    for bits, sizes, pairs in re.findall(pattern, compiled.as_text()):
        size = int(np.prod([int(x) for x in sizes.split(",") if x])) * int(bits) // 8
        sends.append((size, [tuple(map(int, x)) for x in re.findall(r"(\d+),(\d+)", pairs)]))
    return sends


def compiled(T: int, mask: Any, gradients: bool = False) -> Any:
    """A program for 8 devices; q, k and v are float32 `[1, T, 4, 8]`, `[1, T, 2, 8]` twice."""
    shapes = [jax.ShapeDtypeStruct((1, T, heads, 8), jnp.float32) for heads in (4, 2, 2)]
    attend = over(8, mask=mask)
    run = jax.grad(lambda *qkv: jnp.sum(attend(*qkv)), (0, 1, 2)) if gradients else attend
    sharding = jax.NamedSharding(mesh_of(x=8), P(None, "x"))
    return jax.jit(run, in_shardings=(sharding,) * 3).lower(*shapes).compile()


def test_a_window_sends_to_the_neighbour_only():
    T, part = 65_536, 4096 * 2 * 8 * 4  # bytes of the keys that others see, half of a shard
    mask = masks.Causal() & masks.Window(left=4096)
    neighbours = [(i, i + 1) for i in range(7)]
    assert sorted(sent(compiled(T, mask))) == [(part, neighbours)] * 2
    both = sent(compiled(T, mask, gradients=True))
    ring = [(i, (i + 1) % 8) for i in range(8)]
    back = [(i, (i + 7) % 8) for i in range(8)]
    # Keys and values in each pass, which some versions of XLA make one on CPUs; their gradients
    # there and back.
    once, gradients = [neighbours] * 2, [ring] * 2 + [back] * 2
    of = lambda every: sorted((part, sorted(pairs)) for pairs in every)  # noqa: E731
    assert sorted(both) in (of(once + gradients), of(once * 2 + gradients))


@pytest.mark.parametrize(("order", "least", "most"), [("zigzag", 1.0, 1.1), ("contiguous", 1.8, 2)])
def test_causal_work_is_balanced(order, least, most):
    T, devices = 4096, 8
    q = np.asarray(parallel.token_positions(T, devices, order)).reshape(devices, -1)
    sizes = (T // devices, T, 64, 64)
    kinds = functools.partial(masks.tile_map, masks.Causal(), *sizes, kv_positions=q.ravel())
    tiles = [np.count_nonzero(kinds(q_positions=positions)) for positions in q]
    assert least <= max(tiles) / np.mean(tiles) <= most


def test_tokens_come_back():
    x = {"ids": np.arange(2 * 24).reshape(2, 24), "positions": jnp.arange(24)}
    for order in ORDERS:
        placed = parallel.shard_tokens(x, 4, order=order)
        back = parallel.unshard_tokens(placed, 4, order=order)
        assert jax.tree.all(jax.tree.map(np.array_equal, back, x))
        np.testing.assert_array_equal(placed["positions"], parallel.token_positions(24, 4, order))
    assert parallel.token_positions(8, 2, "zigzag").tolist() == [0, 1, 6, 7, 2, 3, 4, 5]


@pytest.mark.usefixtures("unchecked")
def test_what_cannot_be_shared_is_refused_with_both_numbers():
    q: Any = random(1, 30, 6, H)
    k: Any = random(1, 32, 3, H)
    call = functools.partial(parallel.attention, axis_name="x")
    expect(ValueError, "query: expected a multiple of 4 | got 30", over(4), q, q, q)
    with pytest.raises(ValueError, match=r"multiple of 8 tokens for 4 devices in zigzag .* got 12"):
        over(4, order="zigzag")(q[:, :12], k, k)
    with pytest.raises(ValueError, match="pad: expected False in zigzag order, got True"):
        over(4, order="zigzag", pad=True)(q, k, k)
    with pytest.raises(ValueError, match=r"4 devices share evenly .* got N = 6"):
        over(4, scheme="all_to_all")(q[:, :28], k, k)
    with pytest.raises(ValueError, match=r"axis 'y' has 2 devices, which cannot share K = 3"):
        call(q[:, :4], k, k, mesh=mesh_of(x=4, y=2), head_axis="y")
    expect(ValueError, "mesh: expected an axis 'x'", call, q, q, q, mesh=mesh_of(y=2))
    with pytest.raises(ValueError, match=r"of the enclosing jax\.shard_map, got 'x'"):
        parallel.attention_shard(q, q, q, axis_name="x")
    with pytest.raises(ValueError, match="x: expected a multiple of 4 tokens for 4 devices"):
        parallel.shard_tokens(q, 4, axis=1)
    with pytest.raises(NotImplementedError, match="'reference': it needs all keys at once"):
        over(4, implementation="reference")(q[:, :4], k, k)
