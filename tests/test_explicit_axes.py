"""Under a mesh with explicit axes results have their operands' types, and right numbers."""

import contextlib
import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax._src.core import ShardingTypeError
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jattn
from jattn import masks, nn, scores, tuning
from jattn.cache import DenseCache, PagedCache, RollingCache
from tests.cases import CASES, CallCase, inputs
from tests.conftest import assert_trees_close, quick_jit
from tests.devices import place
from tests.test_contract import CEILINGS, errors, everything, truth
from tests.test_native import refusal
from tests.test_parallel import random


B, T, S, N, K, H = 4, 8, 16, 4, 2, 8
TOKENS = ("rows", "tokens", "heads")
SLOPES = np.array([0.5, 0.25, 0.125, 0.0625])


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return jax.make_mesh((2, 2, 2), TOKENS, axis_types=(AxisType.Explicit,) * 3)


def whole(x: jax.Array) -> jax.Array:
    """Gathers an array that is sharded over tokens."""
    sharding = jax.typeof(x).sharding
    if sharding.mesh.empty:
        return x
    rows, _, *rest = sharding.spec
    return jax.sharding.reshard(x, NamedSharding(sharding.mesh, P(rows, None, *rest)))


def shown(x: Any) -> tuple[Any, ...]:
    spec = jax.typeof(x).sharding.spec
    return tuple(y[0] if isinstance(y, tuple) and len(y) == 1 else y for y in spec)


OPTIONS: dict[str, Any] = {
    "mask": masks.Causal() & masks.Lengths(kv=np.array([3, 8, 5, 0])),
    "score": scores.Alibi(SLOPES),
}


def closed_over(q: Any, k: Any, v: Any, **options: Any) -> Any:
    """Attention with functions that close over arrays, one of them traced."""
    slopes, gain = jnp.asarray(SLOPES), jnp.mean(q)
    mask = lambda b, h, i, j: (i + j + b) % 3 > 0  # noqa: E731
    score = lambda s, b, h, i, j: s * slopes[h] + gain  # noqa: E731
    return jattn.attention(q, k, v, mask=mask, score=score, **options)


def cached(kind: Any, q: Any, k: Any, v: Any) -> Any:
    cache = kind.create(B, S, K, H, dtype=q.dtype)
    out, cache = jattn.cached_attention(q, k, v, cache)
    new_q, new_k, new_v = (whole(x)[:, :1] for x in (q, k, v))
    (last, lse), cache = jattn.cached_attention(new_q, new_k, new_v, cache, return_lse=True)
    picked = cache.reorder(jnp.array([1, 0, 2, 2]))
    return out, last, lse, jattn.attention(new_q, picked, implementation="blockwise")


OUT, LSE, MATRIX = (*TOKENS, None), ("rows", "heads", "tokens"), ("rows", "heads", "tokens", None)
LAST = ("rows", None, "heads", None)
WITH_LSE = functools.partial(jattn.attention, return_lse=True)
CALLS: dict[str, tuple[Callable[..., Any], Any]] = {
    "attention": (functools.partial(WITH_LSE, **OPTIONS), [OUT, LSE]),
    "weights": (lambda q, k, v: jattn.attention_weights(q, k, **OPTIONS), [MATRIX]),
    "scores": (lambda q, k, v: jattn.attention_scores(q, k, score=scores.SoftCap(3.0)), [MATRIX]),
    "statistics": (
        lambda q, k, v: jattn.statistics(q, k, keys=np.arange(T) < 2, threshold=0.1, **OPTIONS),
        [LSE] * 7,
    ),
    "top_weights": (lambda q, k, v: jattn.top_weights(q, k, 2, **OPTIONS), [MATRIX, MATRIX]),
    "merge": (
        lambda *x: jattn.merge(*(WITH_LSE(*x, mask=m) for m in (masks.Causal(), ~masks.Causal()))),
        [OUT, LSE],
    ),
    "with_sink": (lambda *x: jattn.with_sink(*WITH_LSE(*x), jnp.ones(N)), [OUT, LSE]),
    "sink": (lambda q, k, v: WITH_LSE(q, k, v, sink=jnp.mean(q, (0, 1, 3))), [OUT, LSE]),
    **{
        kind.__name__: (functools.partial(cached, kind), [OUT, LAST, ("rows", "heads", None), LAST])
        for kind in (DenseCache, RollingCache, PagedCache)
    },
}
DROPOUT: Any = {"dropout_rate": 0.3, "dropout_key": jax.random.key(1), "mask": masks.Causal()}
OF_THE_TYPE_OF_QUERIES = {
    **{
        name: functools.partial(jattn.attention, implementation=name, **OPTIONS)
        for name in ("native", "blockwise", "reference")
    },
    "dropout": functools.partial(jattn.attention, **DROPOUT),
    "functions": closed_over,
    "added": lambda q, k, v: jax.vmap(jnp.add)(q, jattn.attention(q, k, v)),
    "mapped": jax.vmap(functools.partial(jattn.attention, mask=masks.Causal())),
    "repeated": lambda q, k, v: jax.lax.fori_loop(0, 2, lambda _, x: jattn.attention(x, k, v), q),
}
CALLS |= {name: (call, [OUT]) for name, call in OF_THE_TYPE_OF_QUERIES.items()}


def with_results(function: Any, gradient: Any) -> Any:
    """A function for the results of both, which are computed in one program."""
    return lambda *arguments: (function(*arguments), gradient(*arguments))


@pytest.mark.one_in(32)
@pytest.mark.parametrize(("jit", "in_context"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("name", CALLS)
def test_results_and_gradients_have_types(name, jit, in_context, mesh):
    function, types = CALLS[name]
    arrays = random(B, T, N, H), random(B, T, K, H), random(B, T, K, H)

    def squared(*qkv: Any) -> Any:
        floats = [x for x in jax.tree.leaves(function(*qkv)) if x.dtype == np.float64]
        return sum(jnp.sum(jnp.where(jnp.isfinite(x), x, 0) ** 2) for x in floats)

    run = with_results(function, jax.grad(squared, (0, 1, 2)))
    with tuning.using(generated_pairs=0):
        want = quick_jit(run)(*map(jnp.asarray, arrays))
        with jax.set_mesh(mesh) if in_context else contextlib.nullcontext():
            placed = [place(mesh, x, P(*TOKENS)) for x in arrays]
            results, d = (quick_jit(run) if jit else run)(*placed)
    assert_trees_close((results, d), want, rtol=1e-10, atol=1e-11)
    assert [shown(x) for x in jax.tree.leaves(results)] == types
    assert [jax.typeof(x) for x in d] == [jax.typeof(x) for x in placed]


BRANCHES: dict[str, Callable[..., Any]] = {
    "cond": lambda t, s, i, j: s + jax.lax.cond(t[0] > 0, jnp.sin, jnp.cos, t)[j],
    "rule": lambda t, s, i, j: s + jax.lax.cond(i > j, lambda: jax.nn.relu(t)[j], lambda: t[0]),
    "scan": lambda t, s, i, j: jax.lax.scan(lambda c, x: (c + 0.1 * x * c, None), s, t)[0],
    "loop": lambda t, s, i, j: s * jax.lax.fori_loop(0, 3, lambda n, c: c + t[j] + t[n], t[0]),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", BRANCHES)
def test_programs_within_a_function_may_close_over_a_sharded_array(name, mesh):
    q, k, v = (jnp.asarray(random(2, 3, N, H)) for _ in range(3))

    def loss(table: Any) -> Any:
        score = lambda s, b, h, i, j: BRANCHES[name](table, s, i, j)  # noqa: E731
        return jnp.sum(jattn.attention(q, k, v, score=score) ** 2)

    run, table = jax.value_and_grad(loss), jnp.array([0.5, -1.0, 0.25])
    want = quick_jit(run)(table)
    with jax.set_mesh(mesh):
        assert_trees_close(quick_jit(run)(place(mesh, table, P())), want, rtol=1e-10)


def test_functions_of_arrays_of_sharded_heads_say_what_to_write(mesh):
    q, by_head = jnp.asarray(random(2, 3, N, H)), jnp.asarray(SLOPES)
    score = lambda s, b, h, i, j, x: s * x[h]  # noqa: E731
    want = jattn.attention(q, q, q, score=scores.Score(score, by_head))
    with jax.set_mesh(mesh):
        x = place(mesh, by_head, P("heads"))
        functions = {
            "score": lambda s, b, h, i, j: score(s, b, h, i, j, x),
            "mask": lambda b, h, i, j: x[h] > (i - j).astype(x.dtype),
        }
        for name, function in functions.items():
            options: Any = {name: function}
            try:  # JAX 0.12 can index some sharded arrays
                result = jattn.attention(q, q, q, **options)
                if name == "score":
                    np.testing.assert_allclose(result, want, rtol=1e-12)
            except ShardingTypeError as error:
                notes = getattr(error, "__notes__", [])
                assert any(f"{name}: in <lambda>, an array" in note for note in notes)
        result = jattn.attention(q, q, q, score=scores.Score(score, x))
    np.testing.assert_allclose(result, want, rtol=1e-12)


@pytest.mark.one_in(9)
@pytest.mark.parametrize("cut", [(), (None, "tokens"), (None, None, "heads")], ids=str)
@pytest.mark.parametrize("sink_cut", [None, "tokens", "heads"])
def test_eager_gradients_of_a_sink(cut, sink_cut, mesh):
    arrays = random(B, T, N, H), random(N)
    key, value = random(B, T, K, H), random(B, T, K, H)

    def squared(query: Any, sink: Any) -> Any:
        return jnp.sum(jattn.attention(query, jnp.asarray(key), jnp.asarray(value), sink=sink) ** 2)

    want = jax.grad(squared, (0, 1))(*map(jnp.asarray, arrays))
    with jax.set_mesh(mesh):
        placed = place(mesh, arrays[0], P(*cut)), place(mesh, arrays[1], P(sink_cut))
        got = jax.grad(squared, (0, 1))(*placed)
    assert_trees_close(got, want, rtol=1e-10, atol=1e-11)
    assert [jax.typeof(x) for x in got] == [jax.typeof(x) for x in placed]


def cuts_of_case(case: CallCase) -> dict[str, tuple[Any, ...]]:
    """The mesh axes of a case's arrays by name, for sizes that two devices can share."""
    batch, T, _, N, K, _, _ = case.sizes
    half = lambda name, size: None if size % 2 else name  # noqa: E731
    rows = [half("rows", size) if place == 0 else None for place, size in enumerate(batch)]
    tokens, heads = half("tokens", T), half("heads", N)
    keys, queries = (*rows, None, half("heads", K)), (*rows, tokens, heads)
    by_head = (*rows, heads, tokens)
    return {"q": queries, "k": keys, "v": keys, "d_out": queries, "d_lse": by_head}


@pytest.mark.one_in(240)
@pytest.mark.parametrize("implementation", [None, "native", "blockwise", "reference"])
@pytest.mark.parametrize("name", CASES)
def test_every_case(name, implementation, mesh):
    case = CASES[name]
    x = inputs(case)
    run: Any = functools.partial(everything, implementation, case)
    with jax.set_mesh(mesh):
        cuts = cuts_of_case(case).items()
        cut = {label: place(mesh, getattr(x, label), P(*axes)) for label, axes in cuts}
        placed = jax.tree.map(lambda x: place(mesh, x, P()), x)._replace(**cut)
        reason = refusal(name) if implementation == "native" else None
        if reason is not None:
            with pytest.raises(NotImplementedError, match=re.escape(reason)):
                run(placed)
            return
        results = quick_jit(run)(placed)
    arguments = {label: getattr(placed, label) for label in "qkv"} | placed.parameters
    types = {label: jax.typeof(d) for label, d in results.gradients.items()}
    assert types == {label: jax.typeof(x) for label, x in arguments.items()}
    assert jax.typeof(results.out) == jax.typeof(placed.d_out)
    assert jax.typeof(results.lse) == jax.typeof(placed.d_lse)
    measured = errors(jax.tree.map(np.asarray, results), truth(case, x))
    assert max(measured.values()) <= CEILINGS["float64"], measured


WIDTH, IDS, LENGTHS = 6, np.arange(B * T).reshape(B, T) % 8, np.array([3, 8, 0, 5])
MODULES: dict[str, tuple[Any, Callable[..., Any], tuple[Any, ...], tuple[Any, ...]]] = {
    "additive": (
        functools.partial(nn.AdditiveAttention, WIDTH, WIDTH, 4),
        lambda attention, x: attention(x, x, mask=masks.Causal()),
        (random(B, T, WIDTH),),
        ("rows", "tokens", None),
    ),
    "latent": (
        functools.partial(nn.MultiHeadLatentAttention, 4, WIDTH, head_dim=4, kv_rank=8),
        lambda attention, x: attention(x, mask=masks.Causal()),
        (random(B, T, WIDTH),),
        ("rows", "tokens", None),
    ),
    "gru": (
        functools.partial(nn.GRU, WIDTH, 4),
        lambda unit, x, lengths: unit(x, lengths=lengths, reverse=True),
        (random(B, T, WIDTH), LENGTHS),
        ("rows", None, "heads"),
    ),
    "rnnsearch": (
        functools.partial(nn.RNNsearch, 8, 10, features=WIDTH, hidden=4),
        lambda model, ids, lengths: model(ids, ids, source_lengths=lengths),
        (IDS, LENGTHS),
        ("rows", None, "heads"),
    ),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("name", "split"),
    [
        *(("latent", True), ("latent", False), ("gru", False), ("gru", True)),
        *(("additive", True), ("additive", False)),
        *(("rnnsearch", False), pytest.param("rnnsearch", True, marks=pytest.mark.slow)),
    ],
)
def test_modules(name, split, mesh):
    make, call, arrays, out_cut = MODULES[name]
    definition, state = nnx.split(make(rngs=nnx.Rngs(0), param_dtype=np.float64))
    run = lambda state, *arrays: call(nnx.merge(definition, state), *arrays)  # noqa: E731
    loss = lambda *arrays: jnp.sum(run(*arrays) ** 2)  # noqa: E731
    cut_axes = ("alignment", "state", "vocabulary", "heads")
    names = dict.fromkeys(cut_axes, "heads") if split else {}
    placed = lambda x, axes: place(mesh, x, P(*(names.get(axis) for axis in axes)))  # noqa: E731
    both = with_results(run, jax.grad(loss))
    want = quick_jit(both)(state, *arrays)
    with jax.set_mesh(mesh):
        cut = jax.tree.map(placed, state, nnx.get_partition_spec(state))
        placed_arrays = [place(mesh, x, P(*out_cut[: min(x.ndim, 2)])) for x in arrays]
        results, d = quick_jit(both)(cut, *placed_arrays)
        if name == "additive":  # eagerly
            assert jax.typeof(run(cut, *placed_arrays)) == jax.typeof(results)
    assert_trees_close((results, d), want, rtol=1e-10, atol=1e-11)
    if split or name in ("additive", "latent"):
        assert shown(results) == out_cut
    types = [jax.typeof(x) for x in jax.tree.leaves(cut)]
    assert [jax.typeof(x) for x in jax.tree.leaves(d)] == types


@pytest.mark.parametrize("in_context", [False, True])
def test_a_mesh_is_set_or_parameters_are_placed(in_context, mesh):
    """The embedding is tied: its gradient is a sum over two operations."""
    sizes: Any = {"features": WIDTH, "num_heads": 1, "feed_forward": 4, "num_layers": 1}
    model = nn.DecoderOnly(8, **sizes, param_dtype=np.float64, rngs=nnx.Rngs(0))
    definition, state = nnx.split(model)
    run = lambda state, ids: nnx.merge(definition, state)(ids, deterministic=True)  # noqa: E731
    both = with_results(run, jax.grad(lambda *arguments: jnp.sum(run(*arguments) ** 2)))
    want = quick_jit(both)(state, IDS)
    with jax.set_mesh(mesh) if in_context else contextlib.nullcontext():
        ids = place(mesh, IDS, P("rows"))
        state = state if in_context else jax.tree.map(lambda x: place(mesh, x, P()), state)
        results = quick_jit(both)(state, ids)
        assert_trees_close(results, want, rtol=1e-10, atol=1e-11)
        assert_trees_close(run(state, ids), want[0], rtol=1e-10, atol=1e-11)


def test_rows_that_are_cut_are_normalised(mesh):
    left = random(B, T, T)
    normalised = lambda x: jattn.normalised_interaction(x, masks.Causal())  # noqa: E731
    want = quick_jit(normalised)(left)
    for cut in (("rows", "tokens", None), (None, "tokens", None)):
        result = quick_jit(normalised)(place(mesh, left, P(*cut)))
        np.testing.assert_allclose(result, want, rtol=1e-12)
        assert shown(result) == cut


def test_padding_is_removed_from_tokens_that_devices_cannot_share():
    mesh = jax.make_mesh((4,), ("tokens",))
    q: Any = random(2, 7, 4, 8)
    options: Any = {"mesh": mesh, "axis_name": "tokens", "pad": True, "return_lse": True}
    attend = functools.partial(jattn.parallel.attention, **options)
    want = jattn.attention(q, q, q, mask=masks.Causal(), return_lse=True)
    for run in (attend, quick_jit(attend)):
        got = run(q, q, q, mask=masks.Causal())
        assert_trees_close(jax.tree.map(np.asarray, got), want, rtol=0, atol=1e-14)


def test_gradients_through_the_zigzag_order():
    mesh = jax.make_mesh((4,), ("tokens",))
    q: Any = random(2, 8, 4, 8)
    order: Any = {"axis": 1, "order": "zigzag"}

    def attend(q: Any) -> Any:
        z = jattn.parallel.shard_tokens(q, 4, **order)
        options: Any = {"mesh": mesh, "axis_name": "tokens", "order": "zigzag"}
        out = jattn.parallel.attention(z, z, z, mask=masks.Causal(), **options)
        return jattn.parallel.unshard_tokens(out, 4, **order)

    _, pull = jax.vjp(lambda q: jattn.attention(q, q, q, mask=masks.Causal()), q)
    (want,) = pull(jnp.sin(q))
    with jax.set_mesh(mesh):
        for run in (attend, jax.jit(attend)):
            out, pull = jax.vjp(run, place(mesh, q, P(None, "tokens")))
            (got,) = pull(place(mesh, jnp.sin(q), jax.typeof(out).sharding.spec))
            np.testing.assert_allclose(np.asarray(got), want, rtol=0, atol=1e-13)
