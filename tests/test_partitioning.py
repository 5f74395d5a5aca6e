"""Under `jit`, attention of arrays that are cut over batch and heads is cut likewise: nothing is
gathered, and results, gradients, functions of batch row and head, and dropout are those of one
device."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jattn
from jattn import masks, scores, tuning
from tests.conftest import quick_jit
from tests.test_parallel import learned, mesh_of, pasted, random


B, T, N, K, H = 4, 12, 8, 4, 4
TOKENS = P("data", None, "model")

Rule = tuple[Callable[..., dict[str, Any]], dict[str, Any], dict[str, P]]

RULES: dict[str, Rule] = {
    "causal": (lambda a: {"mask": masks.Causal()}, {}, {}),
    "parameters": (
        lambda a: {
            "mask": masks.Causal() & masks.Lengths(kv=a["lengths"]),
            "score": scores.Alibi(a["slopes"]),
            "scale": a["scale"],
        },
        {"lengths": np.array([3, 12, 7, 0], np.int32), "slopes": random(N), "scale": np.ones(())},
        {"lengths": P("data"), "slopes": P("model")},
    ),
    "functions": (
        lambda a: {
            "mask": masks.Predicate(pasted, a["table"]),
            "score": scores.Score(learned, a["gain"]) >> scores.Bias(a["bias"]),
        },
        {
            "table": np.random.default_rng(2).integers(0, 9, T, np.int32),
            "gain": random(N),
            "bias": random(1, N, T, T),
        },
        {},
    ),
    "dropout": (
        lambda a: {"dropout_rate": 0.4, "dropout_key": jax.random.key(3)},
        {},
        {},
    ),
}


def collectives(compiled: Any) -> set[str]:
    """The kinds of exchange in a compiled program."""
    kinds = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    return set(re.findall(rf"({kinds})(?:-start)?\(", compiled.as_text()))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("implementation", ["native", "blockwise"])
@pytest.mark.parametrize("name", RULES)
def test_what_is_cut_stays_cut(name, implementation):
    rule, extra, cuts = RULES[name]
    arrays = {"q": random(B, T, N, H), "k": random(B, T, K, H), "v": random(B, T, K, H), **extra}
    mesh = mesh_of(data=2, model=2)
    specs = dict.fromkeys("qkv", TOKENS) | cuts

    def run(arrays: Any, d_out: Any, d_lse: Any) -> Any:
        floats = {n: x for n, x in arrays.items() if x.dtype == np.float64}

        def call(floats: Any) -> Any:
            a = {**arrays, **floats}
            options = {"implementation": implementation, "return_lse": True}
            return jattn.attention(a["q"], a["k"], a["v"], **rule(a), **options)

        results, pull = jax.vjp(call, floats)
        return *results, *pull((d_out, d_lse))

    cotangents = random(B, T, N, H), random(B, N, T)
    with tuning.using(generated_pairs=0):
        want = quick_jit(run)(arrays, *cotangents)
        # Dropout and functions are told where a device's rows and heads begin.
        placed = {
            n: jax.device_put(x, NamedSharding(mesh, specs.get(n, P()))) for n, x in arrays.items()
        }
        cut = [P("data", None, "model"), P("data", "model")]
        d = [
            jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(cotangents, cut, strict=True)
        ]
        compiled = quick_jit(run).lower(placed, *d).compile()
        assert collectives(compiled) <= {"all-reduce"}  # of parameters' gradients
        found = compiled(placed, *d)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-11, atol=1e-12)
    assert found[0].sharding.is_equivalent_to(NamedSharding(mesh, TOKENS), 4)
    assert found[2]["k"].sharding.is_equivalent_to(NamedSharding(mesh, TOKENS), 4)


def test_mapped_calls_and_few_key_heads():
    """The axis that `vmap` maps is cut, and query heads are that share one key head."""
    mesh = mesh_of(data=2, model=2)
    q, k = random(B, T, N, H), random(B, T, 1, H)

    def run(q: Any, k: Any) -> Any:
        call = lambda q, k: jattn.attention(q, k, k, mask=masks.Causal())  # noqa: E731
        return jax.vmap(call)(q, k)

    placed = [
        jax.device_put(x, NamedSharding(mesh, s))
        for x, s in ((q, P("data", None, "model")), (k, P("data")))
    ]

    def squared(q: Any, k: Any) -> Any:
        return jnp.sum(run(q, k) ** 2)

    want = quick_jit(jax.value_and_grad(squared, (0, 1)))(q, k)
    compiled = quick_jit(jax.value_and_grad(squared, (0, 1))).lower(*placed).compile()
    assert collectives(compiled) == {"all-reduce"}
    for x, y in zip(jax.tree.leaves(compiled(*placed)), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-11, atol=1e-12)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("generated", [True, False], ids=["native", "tiles"])
@pytest.mark.parametrize("name", ["causal", "parameters", "functions"])
def test_statistics_stay_cut(name, generated):
    """Numbers about weights, their gradients, and the greatest weights."""
    rule, extra, cuts = RULES[name]
    arrays = {"q": random(B, T, N, H), "k": random(B, T, K, H), **extra}
    mesh = mesh_of(data=2, model=2)
    specs = {"q": TOKENS, "k": TOKENS, **cuts}

    def run(arrays: Any) -> Any:
        floats = {n: x for n, x in arrays.items() if x.dtype == np.float64}

        def call(floats: Any) -> Any:
            a = {**arrays, **floats}
            on = masks.Predicate(lambda b, h, q_idx, kv_idx: (q_idx + kv_idx + b + h) % 3 == 0)
            result = jattn.statistics(a["q"], a["k"], keys=on, threshold=0.2, **rule(a))
            weighed: Any = (result.entropy, result.greatest, result.distance, result.on_keys)
            ranks = jnp.arange(1.0, result.entropy.size + 1).reshape(result.entropy.shape)
            return sum(jnp.sum(x * ranks) for x in weighed), result

        (_, result), gradients = jax.value_and_grad(call, has_aux=True)(floats)
        q, k = arrays["q"], arrays["k"]
        return result, gradients, jattn.top_weights(q, k, 3, **rule(arrays))

    with tuning.using(generated_pairs=0 if generated else 10**9):
        want = quick_jit(run)(arrays)
        placed = {
            n: jax.device_put(x, NamedSharding(mesh, specs.get(n, P()))) for n, x in arrays.items()
        }
        compiled = quick_jit(run).lower(placed).compile()
        assert collectives(compiled) <= {"all-reduce"}  # of parameters' gradients
        result = compiled(placed)
    for x, y in zip(jax.tree.leaves(result), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-11)
    by_head = NamedSharding(mesh, P("data", "model"))
    assert result[0].entropy.sharding.is_equivalent_to(by_head, 3)
    assert result[1]["k"].sharding.is_equivalent_to(NamedSharding(mesh, TOKENS), 4)
