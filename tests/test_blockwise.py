"""Promises of the blockwise implementation alone: linear memory, and skipped tiles."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn import masks, scores, tuning
from jattn.kernels.xla import blockwise, single_tile
from jattn.spec import Shapes, Spec, Tiling
from tests.conftest import assert_trees_close, attention_arrays, out_and_gradients


def summed(mask: Any = None) -> Any:
    call = functools.partial(jattn.attention, mask=mask, implementation="blockwise")
    return lambda q, k, v: call(q, k, v).sum()


def compiled(T: int, mask: masks.Mask | None, B: int = 1) -> Any:
    """Compiles the gradients for 8 heads of 64, T queries and T keys, without running them."""
    shape = jax.ShapeDtypeStruct((B, T, 8, 64), jnp.float32)
    return jax.jit(jax.grad(summed(mask), (0, 1, 2))).lower(shape, shape, shape).compile()


def temporaries(program: Any) -> int:
    return program.memory_analysis().temp_size_in_bytes


MASKS = {"none": lambda ids: None, "causal": lambda ids: masks.Causal(), "segments": masks.Segments}


@pytest.mark.one_in(4)
@pytest.mark.default_tiles
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("backward", [False, True])
def test_memory_is_linear_where_heads_run_at_once(name, backward):
    """Heads run at once on GPUs and TPUs; the compiler for CPUs measures the memory."""
    row = tuning.TABLE["cpu"]._replace(in_turn=False)

    def memory(T: int) -> int:
        loss = lambda q, k, v, ids: summed(MASKS[name](ids))(q, k, v)  # noqa: E731
        shape = jax.ShapeDtypeStruct((1, T, 2, 8), jnp.float32)
        ids = jax.ShapeDtypeStruct((1, T), jnp.int32)
        call = jax.grad(loss, (0, 1, 2)) if backward else loss
        with tuning.using(row=row, scores_together=2**20):  # a block of one head
            return temporaries(jax.jit(call).lower(shape, shape, shape, ids).compile())

    short, long = memory(4096), memory(16_384)
    assert long <= 4 * short
    assert long <= 64 * 2**20  # all scores would take 2 GiB


@pytest.mark.one_in(2)
@pytest.mark.default_tiles
@pytest.mark.parametrize("mask", [masks.Causal(), masks.Causal() & masks.Window(left=256)])
def test_memory_is_linear_in_the_length_and_the_program_does_not_grow_with_it(mask):
    short, long = (compiled(T, mask) for T in (8192, 32_768))
    assert len(long.as_text().splitlines()) <= 1.1 * len(short.as_text().splitlines())
    assert temporaries(short) <= 96 * 2**20  # the scores of all heads would take 2 GiB
    assert temporaries(long) <= 4 * temporaries(short)


@pytest.mark.one_in(2)
@pytest.mark.default_tiles
@pytest.mark.parametrize("B", [128, 97])  # in equal groups, and with a row left over
def test_short_sequences_do_not_take_memory_for_all_scores(B):
    # Out and its cotangent stay; the scores of all rows would be as large, several times over.
    assert temporaries(compiled(128, masks.Causal(), B=B)) < 5 * B * 128 * 8 * 64 * 4


@pytest.mark.parametrize(
    "B, together, rows",
    [(8, 48, 8), (8, 47, 2), (8, 36, 2), (7, 36, 3), (7, 24, 2), (31, 60, 5), (6, 1, 1)],
)
def test_groups_of_batch_rows(B, together, rows):
    """Rows of 12 numbers: all up to twice `together`, else equal groups of at least half."""
    shapes = Shapes((B,), T=2, S=2, N=1, K=1, H=1, V=1, dtype=jnp.float32)
    assert single_tile._rows(shapes, together) == rows


@pytest.mark.default_tiles
@pytest.mark.parametrize(
    "mask, T, size",
    [
        (masks.Causal() & masks.Window(left=256), 8192, 128),
        (masks.Causal(), 2048, 512),
        (masks.Causal(), 4096, 1024),
        (masks.Full(), 2048, 1024),
        (masks.Lengths(jnp.array([5000])), 8192, 512),  # the empty tiles are not known yet
    ],
)
def test_tiles_grow_with_the_keys_that_are_visited(mask, T, size):
    spec = Spec(mask=mask, score=None, scale=1.0, q_positions=None, kv_positions=None)
    assert blockwise.choose_tiling(spec, T, T, tuning.TABLE["cpu"]) == Tiling(size, size)


@pytest.mark.default_tiles
@pytest.mark.parametrize("S, exponentials", [(64, 1), (65, 2)])
def test_weights_no_larger_than_the_queries_are_kept_for_the_gradients(S, exponentials):
    q, k = (jax.ShapeDtypeStruct((2, n, 2, 64), jnp.float32) for n in (32, S))
    program = jax.jit(jax.grad(summed(), (0, 1, 2))).lower(q, k, k)
    assert program.as_text().count("stablehlo.exponential") == exponentials


# Under the tiles that users get: written out, looped over with wide tiles, in a band, dynamic.
LONG = {
    "full": lambda ids: (None, 1100, 700),
    "causal": lambda ids: (masks.Causal(), 900, 900),
    "causal, looped": lambda ids: (masks.Causal(), 3100, 3100),
    "window": lambda ids: (masks.Causal() & masks.Window(left=100), 1300, 1300),
    "documents": lambda ids: (masks.Causal() & masks.Segments(ids), 1700, 1700),
    "lengths": lambda ids: (masks.Lengths(q=jnp.array([650, 0]), kv=jnp.array([3, 600])), 700, 610),
}


STRATEGIES: dict[str, dict[str, Any]] = {
    "loop": {},
    "vmap": {"row": tuning.TABLE["cpu"]._replace(in_turn=False)},
    "block after block": {"row": tuning.TABLE["cpu"]._replace(in_turn=False), "scores_together": 1},
}


def everything(implementation: str, arrays: Any, d_out: Any, **rules: Any) -> Any:
    call = functools.partial(jattn.attention, implementation=implementation, **rules)
    return jax.jit(lambda *qkv: out_and_gradients(call, qkv, d_out))(*arrays)


@pytest.mark.one_in(12)
@pytest.mark.default_tiles
@pytest.mark.parametrize("name", LONG)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_long_sequences_agree_with_the_formula(name, strategy):
    ids = jnp.asarray(np.sort(np.random.default_rng(1).integers(0, 5, (2, 1700)), axis=1))
    mask, T, S = LONG[name](ids)
    *qkv, d_out = attention_arrays((2, T, S, 2, 2, 5, 5), seed=1)
    with tuning.using(**STRATEGIES[strategy]):
        got = everything("blockwise", qkv, d_out, mask=mask)
    assert_trees_close(got, everything("reference", qkv, d_out, mask=mask), rtol=0, atol=1e-12)


@pytest.mark.one_in(2)
@pytest.mark.default_tiles
@pytest.mark.parametrize("B", [6, 7])  # in equal groups, and with a row left over
def test_groups_of_batch_rows_are_all_rows(B):
    q, k, v, d_out = attention_arrays((B, 5, 5, 2, 2, 3, 3), seed=1)
    numbers = 2 * (5 * 5 + 10 * 6)  # of a row
    row = tuning.TABLE["cpu"]._replace(together=4 * numbers)
    assert 1 < single_tile._rows(Shapes.of(q, v), 2 * numbers) < B

    def run(implementation):
        rules = {"mask": masks.Lengths(kv=jnp.arange(B)), "implementation": implementation}
        call = lambda q, k, v, m: jattn.attention(q, k, v, score=scores.Alibi(m), **rules)  # noqa: E731
        return out_and_gradients(call, (q, k, v, jnp.asarray([0.3, 0.7])), d_out)

    with tuning.using(row=row):
        got = run("blockwise")
    assert_trees_close(got, run("reference"), rtol=0, atol=1e-13)
