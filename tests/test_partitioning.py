"""Under `jit`, attention of arrays that are sharded over batch and heads is sharded likewise:
nothing is gathered, and results, gradients, functions of batch row and head, and dropout are those
of one device."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jattn
from jattn import masks, tuning
from tests.conftest import assert_trees_close, quick_jit
from tests.devices import collectives, is_placed, mesh_of, place, placed
from tests.test_parallel import RULES, B, H, N, T, operands_of, random, with_gradients


TOKENS = P("data", None, "model")
SPECS = {"ids": P("data"), "lengths": P("data"), "slopes": P("model")}


def run_sharded(run: Any, arrays: Any, sharded: Any, atol: float = 1e-12) -> Any:
    """Results of a program on sharded arrays, which are those of one device. It exchanges nothing
    but the gradients of arrays that devices share."""
    want = quick_jit(run)(*arrays)
    compiled = quick_jit(run).lower(*sharded).compile()
    assert collectives(compiled) <= {"all-reduce"}
    results = compiled(*sharded)
    assert_trees_close(results, want, rtol=10 * atol, atol=atol)
    return results


@pytest.mark.one_in(3)
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


@pytest.mark.one_in(4)
@pytest.mark.parametrize("generated", [True, False], ids=["native", "tiles"])
@pytest.mark.parametrize("name", ["causal", "segments", "pasted"])
def test_statistics_stay_sharded(name, generated):
    mesh, rule = mesh_of(data=2, model=2), RULES[name]
    integers, floats, _ = operands_of(rule)

    def run(integers: Any, floats: Any) -> Any:
        def call(floats: Any) -> Any:
            on = masks.Predicate(lambda b, h, q_idx, kv_idx: (q_idx + kv_idx + b + h) % 3 == 0)
            options = rule.of({**integers, **floats})
            result = jattn.statistics(floats["q"], floats["k"], keys=on, threshold=0.2, **options)
            weighed: Any = (result.entropy, result.greatest, result.distance, result.on_keys)
            ranks = jnp.arange(1.0, result.entropy.size + 1).reshape(result.entropy.shape)
            return sum(jnp.sum(x * ranks) for x in weighed), result

        (_, result), gradients = jax.value_and_grad(call, has_aux=True)(floats)
        options = rule.of({**integers, **floats})
        return result, gradients, jattn.top_weights(floats["q"], floats["k"], 3, **options)

    specs = {"q": TOKENS, "k": TOKENS} | SPECS
    sharded = [placed(mesh, x, specs) for x in (integers, floats)]
    with tuning.using(generated_pairs=0 if generated else 10**9):
        result, gradients, _ = run_sharded(run, (integers, floats), sharded, atol=1e-11)
    assert is_placed(result.entropy, mesh, P("data", "model"))
    assert is_placed(gradients["k"], mesh, TOKENS)
