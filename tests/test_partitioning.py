"""Under `jit`, attention of arrays that are sharded over batch and heads is sharded likewise:
nothing is gathered, and results, gradients, functions of batch row and head, and dropout are those
of one device."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jattn
from jattn import masks, scores, tuning
from tests.conftest import assert_trees_close, out_and_gradients, quick_jit
from tests.devices import collectives, is_placed, mesh_of, place, placed
from tests.test_parallel import learned, pasted, random


B, T, N, K, H = 4, 12, 8, 4, 4
TOKENS = P("data", None, "model")

# Options of a call, made from arrays by name; further arrays; and how these are sharded.
RULES: dict[str, tuple[Callable[..., dict[str, Any]], dict[str, Any], dict[str, P]]] = {
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
    "dropout": (lambda a: {"dropout_rate": 0.4, "dropout_key": jax.random.key(3)}, {}, {}),
}


def run_sharded(run: Any, arrays: Any, sharded: Any, atol: float = 1e-12) -> Any:
    """Results of a program on sharded arrays, which are those of one device. It exchanges nothing
    but the gradients of arrays that devices share."""
    want = quick_jit(run)(*arrays)
    compiled = quick_jit(run).lower(*sharded).compile()
    assert collectives(compiled) <= {"all-reduce"}
    results = compiled(*sharded)
    assert_trees_close(results, want, rtol=10 * atol, atol=atol)
    return results


@pytest.mark.one_in(2)
@pytest.mark.parametrize("implementation", ["native", "blockwise"])
@pytest.mark.parametrize("name", RULES)
def test_what_is_cut_stays_cut(name, implementation):
    rule, extra, cuts = RULES[name]
    arrays = {"q": random(B, T, N, H), "k": random(B, T, K, H), "v": random(B, T, K, H), **extra}
    mesh = mesh_of(data=2, model=2)

    def run(arrays: Any, *cotangents: Any) -> Any:
        floats = {n: x for n, x in arrays.items() if x.dtype == np.float64}

        def call(floats: Any) -> Any:
            a = {**arrays, **floats}
            options = {"implementation": implementation, "return_lse": True}
            return jattn.attention(a["q"], a["k"], a["v"], **rule(a), **options)

        return out_and_gradients(call, (floats,), *cotangents)

    arrays_of_one = (arrays, random(B, T, N, H), random(B, N, T))
    # Dropout and functions need to know where a device's rows and heads begin.
    sharded = (
        placed(mesh, arrays, dict.fromkeys("qkv", TOKENS) | cuts),
        place(mesh, arrays_of_one[1], TOKENS),
        place(mesh, arrays_of_one[2], P("data", "model")),
    )
    with tuning.using(generated_pairs=0):
        out, _, gradients = run_sharded(run, arrays_of_one, sharded)
    assert is_placed(out, mesh, TOKENS) and is_placed(gradients["k"], mesh, TOKENS)


def test_mapped_calls_and_few_key_heads():
    """The axis that `vmap` maps is sharded, and so are query heads that share one key head."""
    mesh = mesh_of(data=2, model=2)
    q, k = random(B, T, N, H), random(B, T, 1, H)
    call = lambda q, k: jattn.attention(q, k, k, mask=masks.Causal())  # noqa: E731
    squared = lambda q, k: jnp.sum(jax.vmap(call)(q, k) ** 2)  # noqa: E731
    sharded = place(mesh, q, TOKENS), place(mesh, k, P("data"))
    run_sharded(jax.value_and_grad(squared, (0, 1)), (q, k), sharded)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("generated", [True, False], ids=["native", "tiles"])
@pytest.mark.parametrize("name", ["causal", "parameters", "functions"])
def test_statistics_stay_cut(name, generated):
    """Numbers about weights, their gradients, and the greatest weights."""
    rule, extra, cuts = RULES[name]
    arrays = {"q": random(B, T, N, H), "k": random(B, T, K, H), **extra}
    mesh = mesh_of(data=2, model=2)

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

    sharded = placed(mesh, arrays, {"q": TOKENS, "k": TOKENS, **cuts})
    with tuning.using(generated_pairs=0 if generated else 10**9):
        result, gradients, _ = run_sharded(run, (arrays,), (sharded,), atol=1e-11)
    assert is_placed(result.entropy, mesh, P("data", "model"))
    assert is_placed(gradients["k"], mesh, TOKENS)
