"""Under `jit`, sharded queries stay sharded, and results are those of one device."""

import functools
import re
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jattn
from jattn import masks, tuning
from jattn.cache import DenseCache
from tests.conftest import assert_trees_close, quick_jit
from tests.devices import collectives, is_placed, mesh_of, place, placed
from tests.test_parallel import RULES, B, H, K, N, T, operands_of, random, with_gradients


CUTS = {
    "tokens": (P(None, "c"), P(None, "c")),
    "queries": (P(None, "c"), P()),
    "rows_heads_tokens": (P("a", "c", "b"), P("a", "c", "b")),
    "two_axes": (P("a", ("b", "c")), P("a", ("c", "b"))),
    "keys": (P("a"), P("a", "c")),
    "crossed": (P(None, "a", "c"), P(None, ("a", "c"))),
}


def specs_of_results(cuts: str) -> tuple[dict[str, P], P]:
    """The sharding of queries, keys and values, and the sharding of lse that follows from it."""
    of_queries, of_keys = CUTS[cuts]
    rows, tokens, heads = (*of_queries, None, None, None)[:3]
    return {"q": of_queries, "k": of_keys, "v": of_keys}, P(rows, heads, tokens)


@pytest.mark.one_in(36)
@pytest.mark.parametrize("implementation", [None, "blockwise", "native", "reference"])
@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("name", RULES)
def test_values_gradients_and_how_they_are_cut(name, cuts, implementation):
    rule, mesh, (specs, of_lse) = RULES[name], mesh_of(a=2, b=2, c=2), specs_of_results(cuts)
    integers, floats, cotangents = operands_of(rule)
    attend = functools.partial(jattn.attention, implementation=implementation)
    run = functools.partial(with_gradients, attend, rule)
    with tuning.using(generated_pairs=0), warnings.catch_warnings():
        if implementation == "native" and "dropout_rate" in rule.of({**integers, **floats}):
            warnings.filterwarnings("ignore", "tokens are cut along .* dropout of a piece")
        *want, want_gradients = quick_jit(run)(integers, floats, cotangents)
        out, lse, gradients = quick_jit(run)(integers, placed(mesh, floats, specs), cotangents)
    assert_trees_close((out, lse), want, rtol=1e-12, atol=1e-13)
    assert_trees_close(gradients, want_gradients, rtol=1e-11, atol=1e-12)
    assert is_placed(out, mesh, specs["q"]) and is_placed(lse, mesh, of_lse)
    if implementation != "reference" or cuts != "crossed":  # which XLA then gathers
        assert is_placed(gradients["q"], mesh, specs["q"])
    if implementation != "reference" and cuts != "crossed":
        assert all(is_placed(gradients[n], mesh, specs[n]) for n in "kv")


@pytest.mark.parametrize("implementation", [None, "blockwise", "native"])
def test_only_keys_are_gathered(implementation):
    """Gradients of keys are summed on the devices that need them."""
    mesh, cut = mesh_of(c=4), P(None, "c")
    attend = functools.partial(jattn.attention, mask=masks.Causal(), implementation=implementation)
    run = lambda q, k: jnp.sum(attend(q, k, k) ** 2)  # noqa: E731
    sharded = [place(mesh, random(B, T, heads, H), cut) for heads in (N, K)]
    compiled = quick_jit(jax.grad(run, (0, 1)), out_shardings=None).lower(*sharded).compile()
    kinds = {"all-gather", "all-to-all", "collective-permute"} & collectives(compiled)
    assert kinds == {"all-gather"}
    assert not any(f"[{B},{T},{N},{H}]" in x for x in gathered(compiled))
    assert all(is_placed(d, mesh, cut) for d in compiled(*sharded))


def gathered(compiled: Any) -> list[str]:
    """The results of the gathers of a program, as XLA prints them."""
    lines = compiled.as_text().splitlines()
    return [x.split(" all-gather(")[0] for x in lines if " all-gather(" in x]


def in_every_mode(rule: Any, integers: Any, floats: Any, tangents: Any, cotangents: Any) -> Any:
    """The tangents of the results, the tangents of these tangents, and those of the gradients."""

    def call(floats: Any) -> Any:
        options = rule.of({**integers, **floats})
        return jattn.attention(floats["q"], floats["k"], floats["v"], return_lse=True, **options)

    jvp = lambda floats: jax.jvp(call, (floats,), (tangents,))[1]  # noqa: E731
    vjp = lambda floats: jax.vjp(call, floats)[1](cotangents)  # noqa: E731
    return jvp(floats), *(jax.jvp(f, (floats,), (tangents,))[1] for f in (jvp, vjp))


@pytest.mark.one_in(36, slow=True)
@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("name", RULES)
def test_tangents_and_second_derivatives_are_cut_likewise(name, cuts):
    rule, mesh, (specs, of_lse) = RULES[name], mesh_of(a=2, b=2, c=2), specs_of_results(cuts)
    integers, floats, cotangents = operands_of(rule)
    tangents = {n: np.cos(x) for n, x in floats.items()}
    run = functools.partial(in_every_mode, rule)
    with tuning.using(generated_pairs=0):
        want = quick_jit(run)(integers, floats, tangents, cotangents)
        sharded = (placed(mesh, x, specs) for x in (floats, tangents))
        operands = (integers, *sharded, cotangents)
        compiled = quick_jit(run).lower(*operands).compile()
    (out, lse), (second, _), (gradients,) = results = compiled(*operands)
    assert_trees_close(results, want, rtol=1e-10, atol=1e-11)
    assert all(is_placed(x, mesh, specs["q"]) for x in (out, second, gradients["q"]))
    assert is_placed(lse, mesh, of_lse)
    if cuts == "tokens":
        assert not any(f"[{B},{T},{N}," in x for x in gathered(compiled))
        # Ids of segments are integers, which are no part of the operation yet.
        assert not re.search(r" = f64\[.* collective-permute\(", compiled.as_text())


def statistics_and_gradients(rule: Any, integers: Any, floats: Any) -> Any:
    def call(floats: Any) -> Any:
        q, k, options = floats["q"], floats["k"], rule.of({**integers, **floats})
        on = masks.Predicate(lambda b, h, q_idx, kv_idx: (q_idx + kv_idx + b + h) % 3 == 0)
        result = jattn.statistics(q, k, keys=on, threshold=0.2, **options)
        weighed: Any = (result.entropy, result.greatest, result.distance, result.on_keys)
        ranks = jnp.arange(1.0, result.entropy.size + 1).reshape(result.entropy.shape)
        top = jattn.top_weights(q, k, 3, **options)
        return sum(jnp.sum(x * ranks) for x in weighed), (result, top)

    gradients, (result, top) = jax.grad(call, has_aux=True)(floats)
    return result, gradients, top


@pytest.mark.slow
def test_statistics_stay_cut_along_queries():
    mesh, cut, rule = mesh_of(a=2, c=4), P("a", "c"), RULES["segments"]
    integers, floats, _ = operands_of(rule)
    run = quick_jit(functools.partial(statistics_and_gradients, rule))
    sharded = placed(mesh, floats, {"q": cut, "k": cut})
    statistics, gradients, (top, _) = result = run(integers, sharded)
    assert_trees_close(result, run(integers, floats), rtol=1e-10, atol=1e-11)
    by_head = (statistics.entropy, top, statistics.received)
    assert all(is_placed(x, mesh, P("a", None, "c")) for x in by_head)
    assert all(is_placed(gradients[name], mesh, cut) for name in "qk")


def test_heads_that_do_not_fit_an_axis_are_cut_as_far_as_key_heads_are():
    """Two key heads over four devices: XLA cuts them along a part of the axis."""
    mesh = mesh_of(a=2, c=4)
    q, k = random(B, T, N, H), random(B, T, 2, H)
    call = quick_jit(lambda q, k: jattn.attention(q, k, k, mask=masks.Causal()))
    out = call(place(mesh, q, P(None, "a", "c")), place(mesh, k, P(None, "a")))
    np.testing.assert_allclose(out, call(q, k), rtol=1e-12, atol=1e-13)
    assert is_placed(out, mesh, P(None, "a", "c"))


@pytest.fixture
def newly_compiled():
    """Switches the compilation cache off, because warnings are given during compilation."""
    folder = getattr(jax.config, "jax_compilation_cache_dir", None)
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    jax.config.update("jax_compilation_cache_dir", folder)


def test_tokens_that_devices_cannot_share_are_warned_about_once(newly_compiled):
    mesh, k = mesh_of(c=4), random(B, T, N, H)
    q = place(mesh, random(B, T, N, H), P(None, "c"))
    grad = jax.grad(lambda q, k: jnp.sum(jattn.attention(q, k, k) ** 2), (0, 1))
    cut = lambda q, k: grad(q[:, : T - 1], k)  # noqa: E731
    with pytest.warns(UserWarning, match=r"cut along 'c' .* jattn\.parallel\.attention") as record:
        gradients = quick_jit(cut)(q, place(mesh, k, P(None, "c")))
    assert len(record) == 1
    want = quick_jit(grad)(np.asarray(q)[:, : T - 1], k)
    assert_trees_close(gradients, want, rtol=1e-11, atol=1e-12)


def test_an_explanation_says_how_tokens_are_shared():
    q, k = jnp.asarray(random(B, T, N, H)), jnp.asarray(random(B, T, K, H))
    advice: Any = lambda q, k: jattn.explain(q, k, k, mask=masks.Causal()).tokens  # noqa: E731
    for kind in AxisType.Auto, AxisType.Explicit:
        mesh = jax.make_mesh((4,), ("c",), axis_types=(kind,))
        whole, heads, by_query, keys = (
            place(mesh, x, cut)
            for x, cut in ((q, P()), (q, P(None, None, "c")), (q, P(None, "c")), (k, P(None, "c")))
        )
        assert advice(whole, k) is advice(heads, place(mesh, k, P())) is advice(q, k) is None
        assert "'c' of the mesh: each device computes its own queries" in advice(by_query, k)
        assert advice(by_query, keys) == advice(whole, keys) == advice(by_query, k)
        assert advice(by_query, k) in str(jattn.explain(by_query, k, k))
        assert "cannot share these queries evenly; jattn.parallel" in advice(q[:, : T - 1], keys)
    traced = []
    quick_jit(lambda x: traced.append(advice(x, x)) or x)(by_query)
    assert traced == [advice(by_query, by_query)]


def test_an_implementation_that_cannot_compute_a_piece_is_warned_about(newly_compiled):
    q, dropout = random(B, T, N, H), {"dropout_rate": 0.3, "dropout_key": jax.random.key(1)}
    attend: Any = functools.partial(jattn.attention, implementation="native", **dropout)
    call = quick_jit(lambda q: attend(q, q, q))
    with pytest.warns(UserWarning, match=r"'native': dropout of a piece .* jattn\.parallel"):
        out = call(place(mesh_of(c=4), q, P(None, "c")))
    np.testing.assert_allclose(out, call(q), rtol=1e-12, atol=1e-13)


def test_a_cache_cut_along_tokens_is_warned_about(newly_compiled):
    cache, q = DenseCache.create(B, T, K, H, dtype=jnp.float64), random(B, 1, N, H)
    cache = cache.append(random(B, 5, K, H), random(B, 5, K, H))
    sharded_keys = place(mesh_of(c=4), cache.keys, P(None, None, "c"))
    call = quick_jit(jattn.attention)
    with pytest.warns(UserWarning, match=r"jattn\.parallel\.cached_attention for a cache"):
        out = call(q, DenseCache(sharded_keys, cache.values, cache.lengths, cache.overflowed))
    np.testing.assert_allclose(out, call(q, cache), rtol=1e-12, atol=1e-13)


TOKENS = P("data", None, "model")
SPECS = {"ids": P("data"), "lengths": P("data"), "slopes": P("model")}


def run_sharded(run: Any, arrays: Any, sharded: Any, atol: float = 1e-12) -> Any:
    """The results of one device, for an exchange of gradients of shared arrays alone."""
    want = quick_jit(run)(*arrays)
    compiled = quick_jit(run).lower(*sharded).compile()
    assert collectives(compiled) <= {"all-reduce"}
    results = compiled(*sharded)
    assert_trees_close(results, want, rtol=10 * atol, atol=atol)
    return results


@pytest.mark.one_in(6)
@pytest.mark.parametrize("implementation", ["native", "blockwise"])
@pytest.mark.parametrize("name", ["arrays", "segments", "prefix", "pasted", "causal", "dropout"])
def test_what_is_sharded_stays_sharded(name, implementation):
    """Dropout and functions need to know where a device's rows and heads begin."""
    mesh, operands = mesh_of(data=2, model=2), operands_of(RULES[name])
    attend = functools.partial(jattn.attention, implementation=implementation)
    run = functools.partial(with_gradients, attend, RULES[name])
    integers, floats, (d_out, d_lse) = operands
    specs = dict.fromkeys("qkv", TOKENS) | SPECS
    d = place(mesh, d_out, TOKENS), place(mesh, d_lse, P("data", "model"))
    sharded = placed(mesh, integers, specs), placed(mesh, floats, specs), d
    with tuning.using(generated_pairs=0):
        out, _, gradients = run_sharded(run, operands, sharded)
    assert is_placed(out, mesh, TOKENS) and is_placed(gradients["k"], mesh, TOKENS)


def test_mapped_calls_and_few_key_heads():
    """The axis that `vmap` maps is sharded, and so are query heads that share one key head."""
    mesh = mesh_of(data=2, model=2)
    q, k = random(B, T, N, H), random(B, T, 1, H)
    call = lambda q, k: jattn.attention(q, k, k, mask=masks.Causal())  # noqa: E731
    squared = lambda q, k: jnp.sum(jax.vmap(call)(q, k) ** 2)  # noqa: E731
    sharded = place(mesh, q, TOKENS), place(mesh, k, P("data"))
    run_sharded(jax.value_and_grad(squared, (0, 1)), (q, k), sharded)


@pytest.mark.one_in(4, slow=True)
@pytest.mark.parametrize("generated", [True, False], ids=["native", "tiles"])
@pytest.mark.parametrize("name", ["causal", "segments", "pasted"])
def test_statistics_stay_sharded(name, generated):
    mesh, rule = mesh_of(data=2, model=2), RULES[name]
    integers, floats, _ = operands_of(rule)
    run = functools.partial(statistics_and_gradients, rule)
    specs = {"q": TOKENS, "k": TOKENS} | SPECS
    sharded = [placed(mesh, x, specs) for x in (integers, floats)]
    with tuning.using(generated_pairs=0 if generated else 10**9):
        result, gradients, _ = run_sharded(run, (integers, floats), sharded, atol=1e-11)
    assert is_placed(result.entropy, mesh, P("data", "model"))
    assert is_placed(gradients["k"], mesh, TOKENS)
