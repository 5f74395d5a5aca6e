"""What only the blockwise implementation promises: memory linear in T and S, and skipped tiles.

That it computes attention is the contract suite's business, which runs it on small tiles.
"""

import functools
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn import masks, scores, tuning
from jattn.call import make
from jattn.kernels.xla import blockwise, reference, single_tile, tangents
from jattn.spec import Shapes, Spec, Tiling


def compiled(T: int, mask: masks.Mask, N: int = 8) -> Any:
    """Forward and backward for N heads of 64, T queries and T keys, compiled but not run."""

    def loss(q, k, v):
        return jattn.attention(q, k, v, mask=mask, implementation="blockwise").sum()

    shape = jax.ShapeDtypeStruct((1, T, N, 64), jnp.float32)
    return jax.jit(jax.grad(loss, (0, 1, 2))).lower(shape, shape, shape).compile()


@pytest.mark.default_tiles
def test_memory_is_linear_in_the_length():
    short, long = (
        compiled(T, masks.Causal()).memory_analysis().temp_size_in_bytes for T in (8192, 32768)
    )
    assert short <= 96 * 2**20  # the scores of all heads would take 2 GiB
    assert long <= 4 * short


MASKS = {
    "none": lambda ids: None,
    "causal": lambda ids: masks.Causal(),
    "segments": masks.Segments,
}


@pytest.mark.one_in(4)
@pytest.mark.default_tiles
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("backward", [False, True])
def test_memory_is_linear_where_heads_run_at_once(name, backward):
    """As on GPUs and TPUs, whatever is masked; here as the compiler for CPUs sees it."""
    row = tuning.TABLE["cpu"]._replace(in_turn=False)

    def memory(T: int) -> int:
        def loss(q, k, v, ids):
            mask = MASKS[name](ids)
            return jattn.attention(q, k, v, mask=mask, implementation="blockwise").sum()

        shape = jax.ShapeDtypeStruct((1, T, 2, 8), jnp.float32)
        ids = jax.ShapeDtypeStruct((1, T), jnp.int32)
        call = jax.grad(loss, (0, 1, 2)) if backward else loss
        with tuning.using(row=row, scores_together=2**20):  # a block of one head
            program: Any = jax.jit(call).lower(shape, shape, shape, ids).compile()
        return program.memory_analysis().temp_size_in_bytes

    short, long = memory(4096), memory(16_384)
    assert long <= 4 * short
    assert long <= 64 * 2**20  # all scores would take 2 GiB


@pytest.mark.default_tiles
def test_a_long_sequence_under_a_window_fits():
    program = compiled(131_072, masks.Causal() & masks.Window(left=1024), N=1)
    assert program.memory_analysis().temp_size_in_bytes < 2e9


@pytest.mark.one_in(2)
@pytest.mark.default_tiles
@pytest.mark.parametrize("mask", [masks.Causal(), masks.Causal() & masks.Window(left=256)])
def test_the_program_does_not_grow_with_the_length(mask):
    short, long = (len(compiled(T, mask).as_text().splitlines()) for T in (16_384, 131_072))
    assert long <= 1.1 * short


@pytest.mark.one_in(2)
@pytest.mark.default_tiles
@pytest.mark.parametrize("B", [128, 97])  # in even groups, and with a row left over
def test_short_sequences_do_not_take_memory_for_all_scores(B):
    def loss(q, k, v):
        return jattn.attention(q, k, v, mask=masks.Causal(), implementation="blockwise").sum()

    shape = jax.ShapeDtypeStruct((B, 128, 8, 64), jnp.float32)
    program: Any = jax.jit(jax.grad(loss, (0, 1, 2))).lower(shape, shape, shape).compile()
    # Out and its cotangent stay; the scores of all rows would be as large, several times over.
    assert program.memory_analysis().temp_size_in_bytes < 5 * shape.size * 4


@pytest.mark.parametrize(
    "B, together, rows",
    [(8, 48, 8), (8, 47, 2), (8, 36, 2), (7, 36, 3), (7, 24, 2), (31, 60, 5), (6, 1, 1)],
)
def test_groups_of_batch_rows(B, together, rows):
    """A row here is 12 numbers. All at once up to twice `together`; else groups that are even, if
    that does not make them less than half as large."""
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
        (masks.Lengths(jnp.array([5000])), 8192, 512),  # what it empties is not known yet
    ],
)
def test_tiles_grow_with_the_keys_that_are_visited(mask, T, size):
    spec = Spec(mask=mask, score=None, scale=1.0, q_positions=None, kv_positions=None)
    tiling = blockwise.choose_tiling(spec, T, T, tuning.TABLE["cpu"])
    assert tiling == Tiling(size, size)


@pytest.mark.default_tiles
@pytest.mark.parametrize("S, exponentials", [(64, 1), (65, 2)])
def test_weights_no_larger_than_the_queries_are_kept_for_the_gradients(S, exponentials):
    def loss(q, k, v):
        return jattn.attention(q, k, v, implementation="blockwise").sum()

    q, k = (jax.ShapeDtypeStruct((2, n, 2, 64), jnp.float32) for n in (32, S))
    program = jax.jit(jax.grad(loss, (0, 1, 2))).lower(q, k, k)
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


WAYS: dict[str, dict[str, Any]] = {
    "loop": {},
    "vmap": {"row": tuning.TABLE["cpu"]._replace(in_turn=False)},
    "block after block": {
        "row": tuning.TABLE["cpu"]._replace(in_turn=False),
        "scores_together": 1,
    },
}


@pytest.mark.one_in(12)
@pytest.mark.default_tiles
@pytest.mark.parametrize("name", LONG)
@pytest.mark.parametrize("way", WAYS)
def test_long_sequences_agree_with_the_formula(name, way):
    rng = np.random.default_rng(1)
    ids = jnp.asarray(np.sort(rng.integers(0, 5, (2, 1700)), axis=1))
    mask, T, S = LONG[name](ids)
    q, k, v, d_out = (jnp.asarray(rng.normal(size=(2, n, 2, 5))) for n in (T, S, S, T))

    @functools.partial(jax.jit, static_argnums=0)
    def everything(implementation, q, k, v):
        def call(q, k, v):
            return jattn.attention(q, k, v, mask=mask, implementation=implementation)

        out, pull = jax.vjp(call, q, k, v)
        return out, *pull(d_out)

    with tuning.using(**WAYS[way]):
        got = everything("blockwise", q, k, v)
    for x, y in zip(got, everything("reference", q, k, v), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-12)


@pytest.mark.one_in(2)
@pytest.mark.default_tiles
@pytest.mark.parametrize("B", [6, 7])  # in even groups, and with a row left over
def test_groups_of_batch_rows_are_all_rows(B):
    rng = np.random.default_rng(1)
    q, k, v, d_out = (jnp.asarray(rng.normal(size=(B, 5, 2, 3))) for _ in range(4))
    slopes = jnp.asarray([0.3, 0.7])
    numbers = 2 * (5 * 5 + 10 * 6)  # of a row
    row = tuning.TABLE["cpu"]._replace(together=4 * numbers)
    assert 1 < single_tile._rows(Shapes.of(q, v), 2 * numbers) < B

    def everything(implementation):
        def call(q, k, v, slopes):
            given = {"score": scores.Alibi(slopes), "implementation": implementation}
            return jattn.attention(q, k, v, mask=masks.Lengths(kv=jnp.arange(B)), **given)

        out, pull = jax.vjp(call, q, k, v, slopes)
        return out, *pull(d_out)

    with tuning.using(row=row):
        got = everything("blockwise")
    for x, y in zip(got, everything("reference"), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-13)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("block_q, block_kv", [(16, 16), (37, 16), (8, 53)])
def test_tilings_agree_with_the_formula(monkeypatch, block_q, block_kv):
    choose = mock.Mock(return_value=Tiling(block_q, block_kv))
    monkeypatch.setattr(blockwise, "choose_tiling", choose)
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(1, n, 2, 3))) for n in (37, 53, 53))
    ids = jnp.asarray(np.sort(rng.integers(0, 4, 53)))
    mask = masks.Segments(ids[:37], ids) | masks.Window(3, 3)
    spec = make(q, k, v, mask=mask).prepared().spec
    out, lse = jax.jit(functools.partial(tangents.attend))(spec, q, k, v)
    assert choose.called
    want, want_lse = reference.attend(spec, q, k, v)
    np.testing.assert_allclose(out, want, rtol=0, atol=1e-13)
    np.testing.assert_allclose(lse, want_lse, rtol=0, atol=1e-13)
