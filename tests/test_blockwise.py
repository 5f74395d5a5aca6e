"""What only the blockwise implementation promises: memory linear in T and S, and skipped tiles.

That it computes attention is the contract suite's business, which runs it on small tiles.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn import masks
from jattn.kernels import blockwise
from jattn.spec import Tiling


def temporaries(T: int, mask: masks.Mask) -> int:
    """Bytes of temporaries of forward and backward for two heads of 16, T queries and T keys."""

    def loss(q, k, v):
        return jattn.attention(q, k, v, mask=mask, implementation="blockwise").sum()

    shape = jax.ShapeDtypeStruct((1, T, 2, 16), jnp.float32)
    compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(shape, shape, shape).compile()
    analysis: Any = compiled.memory_analysis()
    return analysis.temp_size_in_bytes


@pytest.mark.default_tiles
def test_memory_is_linear_in_the_length():
    short, long = (temporaries(T, masks.Causal()) for T in (8192, 32768))
    assert long <= 4 * short
    assert long < 32768 * 32768 / 8  # a T × T array of anything, even of bits, would not fit


@pytest.mark.parametrize("block_q, block_kv", [(16, 16), (37, 16), (8, 53)])
def test_tilings_agree_with_the_formula(block_q, block_kv):
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(1, n, 2, 3))) for n in (37, 53, 53))
    ids = jnp.asarray(np.sort(rng.integers(0, 4, 53)))
    spec = jattn.spec.make_spec(
        jattn.spec.check_shapes(q, k, v), mask=masks.Segments(ids[:37], ids) | masks.Window(3, 3)
    )
    spec = jattn.spec.prepare(spec, jattn.spec.check_shapes(q, k, v))
    out, lse = jax.jit(blockwise.attend, static_argnames="tiling")(
        spec, q, k, v, tiling=Tiling(block_q, block_kv)
    )
    want, want_lse = jattn.kernels.reference.attend(spec, q, k, v)
    np.testing.assert_allclose(out, want, rtol=0, atol=1e-13)
    np.testing.assert_allclose(lse, want_lse, rtol=0, atol=1e-13)
