"""The contract for our own TPU kernel, interpreted on a CPU: as for the kernels for GPUs."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn import masks, scores, tuning
from tests import test_contract as contract
from tests.cases import CASES, inputs
from tests.conftest import quick_jit
from tests.kernels import assert_accurate, largest
from tests.test_contract import everything, on_device


@pytest.mark.one_in(47)
@pytest.mark.parametrize("name", CASES)
def test_contract(name):
    """Values and gradients; the same again with masked places poisoned."""
    x = inputs(CASES[name], "float32")
    run = quick_jit(functools.partial(everything, "tpu", CASES[name]))
    results = jax.tree.map(np.asarray, run(on_device(x)))
    assert_accurate(name, "float32", results)
    rows, columns = contract.dead_places(name)
    assert not results.out[rows].any()
    assert np.all(np.swapaxes(results.lse, -1, -2)[rows] == -np.inf)
    for poison in contract.POISONS if rows.any() or columns.any() else ():
        q, k, v = x.q.copy(), x.k.copy(), x.v.copy()
        q[rows], k[columns], v[columns] = poison, poison, poison
        contract.assert_same(run(on_device(x._replace(q=q, k=k, v=v))), results)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["chain", "places_and_positions", "dropout_masked"])
def test_16_bits(name):
    run = quick_jit(functools.partial(everything, "tpu", CASES[name]))
    results = run(on_device(inputs(CASES[name], "bfloat16")))
    assert_accurate(name, "bfloat16", jax.tree.map(np.asarray, results))


def test_several_tiles():
    """Empty, full and mixed ones, also for a group of heads; with dropout, and a last tile that is
    not whole."""
    T, rng = 300, np.random.default_rng(0)
    q, k, v, d_out = (
        jnp.asarray(rng.normal(size=(2, T, n, 16)), jnp.float32) for n in (4, 2, 2, 4)
    )
    ids = jnp.asarray(np.sort(rng.integers(0, 3, (2, T)), axis=1), jnp.int32)
    rules: Any = {
        "mask": masks.Causal() & masks.Segments(ids),
        "score": scores.Alibi(scores.alibi_slopes(4)),
        "dropout_rate": 0.2,
        "dropout_key": jax.random.key(0),
    }

    def both(implementation: str) -> Any:
        def call(q: Any, k: Any, v: Any) -> Any:
            return jattn.attention(q, k, v, implementation=implementation, **rules)

        out, pull = jax.vjp(call, q, k, v)
        return out, *pull(d_out)

    with tuning.using(tpu_tile=(128, 128)):
        got = quick_jit(functools.partial(both, "tpu"))()
    for x, y in zip(got, quick_jit(functools.partial(both, "reference"))(), strict=True):
        np.testing.assert_allclose(x, y, atol=2e-5 * np.abs(y).max())


@pytest.mark.one_in(2)
@pytest.mark.parametrize("lead", [(1, 2), (2, 1)])
def test_the_gradient_of_a_bias_in_several_tiles(lead):
    """Batch rows or heads that share a bias are added up, and tiles without pairs are 0."""
    T, S, rng = 150, 280, np.random.default_rng(0)
    q, k, v, d_out = (
        jnp.asarray(rng.normal(size=(2, n, 2, 16)), jnp.float32) for n in (T, S, S, T)
    )
    bias = jnp.asarray(rng.normal(size=(*lead, T, S)), jnp.float32)

    def gradient(implementation: str) -> Any:
        def call(bias: Any) -> Any:
            rules: Any = {"mask": masks.Window(70, 3), "score": scores.Bias(bias)}
            return jattn.attention(q, k, v, implementation=implementation, **rules)

        return jax.vjp(call, bias)[1](d_out)[0]

    with tuning.using(tpu_tile=(128, 128)):
        got = quick_jit(functools.partial(gradient, "tpu"))()
    want = quick_jit(functools.partial(gradient, "reference"))()
    np.testing.assert_allclose(got, want, atol=2e-5 * np.abs(want).max())
    assert not got[..., 200:].any()


def test_the_tile_map_decides():
    """A map that lies: what it calls empty is not visited, what it calls full is not masked."""

    def lie(tile: Any) -> Any:
        first = np.asarray(tile.columns.start) < 128
        rows = np.ones_like(np.asarray(tile.rows.start), bool)
        return rows & first, rows & first

    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(1, 256, 1, 16)), jnp.float32) for _ in range(3))

    def grouped(mask: masks.Mask) -> Any:
        call = functools.partial(jattn.attention, mask=mask, implementation="tpu")
        out, pull = jax.vjp(call, q, k, v)
        return out, *pull(v)

    with tuning.using(tpu_tile=(128, 128)):
        lied = grouped(masks.Predicate(lambda b, h, i, j: i < 0, bounds=lie))
        contract.assert_same(lied, grouped(masks.Lengths(kv=128)))


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
            {"score": scores.Score(_of_key, jnp.ones((1, 500), jnp.float32))},
            "one of 500 entries for each pair",
        ),
        (
            {"score": scores.Score(_of_all, jnp.ones(500, jnp.float32))},
            "needs reduce_sum",
        ),
        ({"mask": lambda b, h, i, j: jnp.sort(jnp.stack([i, j]))[0] == i}, "needs "),
        ({"mask": lambda b, h, i, j: jnp.cumsum(jnp.stack([i, j]))[1] > 9}, "needs "),
        ({"mask": lambda b, h, i, j: jnp.piecewise(i - j, [i < j], [1, 0]) > 0}, "needs argmax"),
        ({"precision": "high"}, "expected the default precision or the highest"),
    ],
)
def test_reasons(rules, reason):
    q, k, v = (jnp.ones((1, 500, 1, 16), jnp.float32) for _ in range(3))
    with pytest.raises(NotImplementedError, match=reason):
        jattn.attention(q, k, v, implementation="tpu", **rules)
