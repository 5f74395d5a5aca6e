"""The contract for our own TPU kernel, interpreted on a CPU, as for the kernels for GPUs."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn import masks, scores, tuning
from tests import test_contract as contract
from tests.cases import CASES, SOFTMAX_CASES, inputs
from tests.conftest import normal_arrays, out_and_gradients, quick_jit
from tests.kernels import (
    assert_accurate,
    assert_dead_rows_are_empty,
    largest,
    lying_mask,
    poisoned,
    poisons_of,
)
from tests.test_contract import everything, on_device


@pytest.mark.one_in(90)
@pytest.mark.parametrize("name", SOFTMAX_CASES)
def test_contract(name):
    x = inputs(CASES[name], "float32")
    run = quick_jit(functools.partial(everything, "tpu", CASES[name]))
    results = jax.tree.map(np.asarray, run(on_device(x)))
    assert_accurate(name, "float32", results)
    assert_dead_rows_are_empty(name, results)
    for poison in poisons_of(name):
        contract.assert_same(run(on_device(poisoned(name, x, poison))), results)


@pytest.mark.one_in(6, slow=True)
@pytest.mark.parametrize("name", ["chain", "places_and_positions", "dropout_masked"])
def test_16_bits(name):
    run = quick_jit(functools.partial(everything, "tpu", CASES[name]))
    results = run(on_device(inputs(CASES[name], "bfloat16")))
    assert_accurate(name, "bfloat16", jax.tree.map(np.asarray, results))


def assert_like_reference(run: Callable[[str], Any]) -> Any:
    """`run` gives the same with the TPU kernel, in tiles of 128, as with the reference. Returns
    what the kernel gives."""
    with tuning.using(tpu_tile=(128, 128)):
        got = quick_jit(functools.partial(run, "tpu"))()
    for x, y in zip(got, quick_jit(functools.partial(run, "reference"))(), strict=True):
        np.testing.assert_allclose(x, y, atol=2e-5 * np.abs(y).max())
    return got


@pytest.mark.one_in(4, slow=True)
@pytest.mark.parametrize("lead", [(1, 2), (2, 1)])
def test_several_tiles(lead):
    """Empty, full and mixed tiles, the last of which are not whole, for a group of heads. Gradients
    of batch rows or heads that share a bias are summed, and are 0 in tiles without pairs."""
    T, S = 150, 280
    shapes = [(2, T, 2, 16), (2, S, 1, 16), (2, S, 1, 16), (2, T, 2, 16), (*lead, T, S)]
    *qkv, d_out, bias = normal_arrays(*shapes, dtype=jnp.float32)
    rules: Any = {"mask": masks.Window(130, 130) & masks.Lengths(kv=200)}
    rules |= {"dropout_rate": 0.2, "dropout_key": jax.random.key(0)}

    def both(implementation: str) -> Any:
        call = functools.partial(jattn.attention, implementation=implementation, **rules)
        attend = lambda q, k, v, bias: call(q, k, v, score=scores.Bias(bias))  # noqa: E731
        return out_and_gradients(attend, (*qkv, bias), d_out)

    *_, got = assert_like_reference(both)
    assert not got[..., 200:].any()


def test_the_tile_map_decides():
    """A tile that a map wrongly calls empty is not visited, and one it calls full is not masked."""
    qkv = normal_arrays(*[(1, 256, 1, 16)] * 3, dtype=jnp.float32)

    def grouped(mask: masks.Mask) -> Any:
        call = functools.partial(jattn.attention, mask=mask, implementation="tpu")
        return out_and_gradients(call, qkv, qkv[2])

    with tuning.using(tpu_tile=(128, 128)):
        contract.assert_same(grouped(lying_mask(128)), grouped(masks.Lengths(kv=128)))


def test_nothing_grows_with_the_square_of_the_length_where_the_mask_is_traced():
    T = 8192

    def call(q: Any, k: Any, v: Any, ids: Any) -> Any:
        mask = masks.Causal() & masks.Segments(ids)
        return jattn.attention(q, k, v, mask=mask, implementation="tpu").sum()

    shape = jax.ShapeDtypeStruct((1, T, 2, 64), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((1, T), jnp.int32)
    program = jax.make_jaxpr(jax.grad(call, (0, 1, 2)))(shape, shape, shape, ids)
    assert largest(program.jaxpr) <= 2 * T * 2 * 64


def _of_key(score: Any, b: Any, h: Any, i: Any, j: Any, *operands: Any) -> Any:
    return score + operands[0][b, j]


def _of_all(score: Any, b: Any, h: Any, i: Any, j: Any, *operands: Any) -> Any:
    return score + operands[0].sum()


@pytest.mark.parametrize(
    ("rules", "reason"),
    [
        (
            {"score": scores.Score(_of_key, jnp.ones((1, 500), "f4"))},
            "one of 500 entries for each pair",
        ),
        ({"score": scores.Score(_of_all, jnp.ones(500, "f4"))}, "needs reduce_sum"),
        ({"mask": lambda b, h, i, j: jnp.cumsum(jnp.stack([i, j]))[1] > 9}, "needs "),
        ({"mask": lambda b, h, i, j: jnp.piecewise(i - j, [i < j], [1, 0]) > 0}, "needs argmax"),
        ({"precision": "high"}, "expected the default precision or the highest"),
    ],
)
def test_reasons(rules, reason):
    q, k, v = (jnp.ones((1, 500, 1, 16), jnp.float32) for _ in range(3))
    with pytest.raises(NotImplementedError, match=reason):
        jattn.attention(q, k, v, implementation="tpu", **rules)
