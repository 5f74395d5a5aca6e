"""The explanation of a call, besides reasons: tiles, operations, advice, and how it is shown."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn import masks, scores
from jattn.cache import DenseCache
from jattn.explanation import Explanation
from jattn.kernels.gpu import cudnn
from jattn.masks import Predicate
from tests.conftest import attention_arrays, quick_jit


T, N, H = 512, 4, 64
X = jnp.zeros((2, T, N, H), jnp.bfloat16)


def explained(mask: Any, **options: Any) -> Explanation:
    return jattn.explain(X, X, X, mask=mask, **options)


def test_tiles_are_counted():
    explanation = explained(masks.Causal())
    assert explanation.tiles == (128, 6 / 16, 4 / 16, 6 / 16)
    assert explanation.flops == 2 * 2 * N * T * T * (H + H) * 10 / 16
    assert explained(None).tiles == (128, 0, 0, 1)
    assert explained(masks.Segments(np.arange(T) // 128)).tiles == (128, 12 / 16, 0, 4 / 16)
    assert explained(masks.Causal(), q_positions=jnp.arange(T) + T).tiles == (128, 0, 0, 1)


def test_flops_are_those_that_the_compiler_counts():
    """The softmax of the formula's program adds a few for each pair."""
    qkv = attention_arrays((2, 96, 160, 4, 2, 24, 40))[:3]
    call = functools.partial(jattn.attention, implementation="reference")
    counted = quick_jit(call).lower(*qkv).compile().cost_analysis()["flops"]
    assert 1 <= counted / jattn.explain(*qkv).flops < 1.2


def test_bytes_are_those_of_all_arrays():
    """Each array counts once: grouped keys, another value size, a bias, and lse in float32."""
    q, k, v, _ = attention_arrays((2, 6, 7, 4, 2, 8, 5), "bfloat16")
    arrays = 2 * (2 * 6 * 4 * 8 + 2 * 7 * 2 * 8 + 2 * 7 * 2 * 5 + 2 * 6 * 4 * 5)
    assert jattn.explain(q, k, v).bytes == arrays
    assert jattn.explain(q, k, v, return_lse=True).bytes == arrays + 4 * 2 * 4 * 6
    bias = scores.Bias(jnp.zeros((1, 4, 6, 7), jnp.float32))
    assert jattn.explain(q, k, v, score=bias).bytes == arrays + 4 * 4 * 6 * 7


@pytest.mark.default_tiles
def test_temporaries_are_those_of_the_program():
    q = jnp.ones((1, 256, 2, 16))
    explanation = jattn.explain(q, q, q, mask=masks.Causal(), return_lse=True)
    call = functools.partial(jattn.attention, mask=masks.Causal(), return_lse=True)
    want: Any = jax.jit(call).lower(q, q, q).compile().memory_analysis()
    assert explanation.temporaries == want.temp_size_in_bytes > 0
    assert f"temporaries  {want.temp_size_in_bytes / 1e6:.3g} MB forward" in str(explanation)
    cache = DenseCache.create(1, 4096, 2, 16).append(q[:, :9], q[:, :9])
    want = jax.jit(jattn.attention).lower(q[:, :1], cache).compile().memory_analysis()
    assert jattn.explain(q[:, :1], cache).temporaries == want.temp_size_in_bytes
    elsewhere = jattn.explain(q, q, q, platform="tpu")
    assert elsewhere.temporaries is None and "temporaries" not in str(elsewhere)


def test_heads_that_differ_are_averaged():
    """Two heads see all keys, one its own block and the one before, one its own block alone."""
    sides = np.array([T, T, 1, 0])
    explanation = explained(masks.Window(sides, np.array([T, T, 0, 0])))
    empty = (0, 0, 16 - 7, 16 - 4)
    assert explanation.tiles is not None and explanation.tiles.empty == sum(empty) / 64
    by_head = Predicate(lambda b, h, q, kv: (h > 1) | (kv <= q))
    assert explained(by_head).tiles == (128, 3 / 16, 2 / 16, 11 / 16)


def test_an_explanation_leaves_out_what_only_the_program_knows():
    def look(lengths: jax.Array) -> jax.Array:
        explanation = explained(masks.Lengths(kv=lengths))
        assert explanation.tiles is explanation.advice is explanation.temporaries is None
        assert "tiles" not in str(explanation) and "temporaries" not in str(explanation)
        return lengths

    jax.eval_shape(look, jnp.array([3, 4]))
    explanation = jattn.explain(*[jnp.zeros((0, T, N, H))] * 3)
    assert explanation.tiles is None and explanation.flops == 0


SAME = {
    "Causal()": lambda b, h, q, kv: q >= kv,
    "Causal() & Window(left=99)": lambda b, h, q, kv: (q >= kv) & (q - kv < 100),
    "Full()": lambda b, h, q, kv: kv >= 0,
}


@pytest.mark.parametrize("shown", SAME)
def test_a_function_is_recognised_by_its_pairs(monkeypatch, shown):
    """cuDNN takes no functions, even on a machine with a GPU for it."""
    monkeypatch.setattr(cudnn, "_device_reason", lambda _: None)
    monkeypatch.setattr(cudnn, "_refusal", lambda _: None)
    explanation = explained(Predicate(SAME[shown]), platform="cuda")
    assert explanation["cudnn"] is not None
    assert explanation.advice == f"{shown} allows the same pairs, and cudnn can run it"


def test_functions_unlike_named_masks_have_no_advice():
    for fn in (
        lambda b, h, q, kv: (q >= kv) & ((q - kv) % 3 == 0),
        lambda b, h, q, kv: (q >= kv) | (h == N - 1),
        lambda b, h, q, kv: (q >= kv) & (q - kv <= q // 2),
    ):
        assert explained(Predicate(fn), platform="tpu").advice is None


def test_fewer_tiles_are_an_advantage():
    hidden = lambda q: jax.lax.while_loop(lambda x: x < 0, lambda x: x + 1, q)  # noqa: E731
    explanation = explained(Predicate(lambda b, h, q, kv: hidden(q + 0 * kv) >= kv), platform="tpu")
    assert explanation.tiles == (128, 0, 1, 0)
    gains = "it leaves 1.6 × fewer tiles, and tpu can run it"
    assert explanation.advice == f"Causal() allows the same pairs, and {gains}"


def test_it_is_a_dictionary_and_a_table():
    explanation = explained(masks.Causal(), platform="tpu")
    assert explanation == dict(explanation) and explanation.runs == "blockwise"
    lines = str(explanation).splitlines()
    assert explanation.by_name == ("tpu",)
    assert any(line.split() == "runs blockwise; tpu has to be named".split() for line in lines)
    assert {line.split()[0] for line in lines} > set(explanation)
    assert str(explanation["cudnn"]) in str(explanation)
    explanation["cudnn"] = "a < b"
    assert "a &lt; b" in explanation._repr_html_() and "a < b" not in explanation._repr_html_()


def test_a_function_may_print():
    """Nothing is known of a primitive without results, but the rest of the function is read."""

    def causal(b: Any, h: Any, q: Any, kv: Any) -> Any:
        jax.debug.print("{}", kv, ordered=False)
        return q >= kv

    assert explained(Predicate(causal)).tiles == (128, 6 / 16, 4 / 16, 6 / 16)


def test_gpu_is_cuda():
    q = jnp.ones((1, 8, 2, 16), jnp.bfloat16)
    gpu, cuda = (jattn.explain(q, q, q, platform=name) for name in ("gpu", "cuda"))
    assert gpu == cuda
    assert str(gpu) == str(cuda)
