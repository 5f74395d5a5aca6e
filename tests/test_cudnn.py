"""The flags that cuDNN gets, in programs lowered for a GPU, and every reason not to call it."""

import functools
import json
import re
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn import masks, scores
from jattn._pytree import array_field, pytree_dataclass
from jattn.call import make
from jattn.kernels.common import lowering, vjp
from jattn.kernels.gpu import cudnn
from jattn.kernels.xla import blockwise, tangents
from tests.conftest import attention_arrays, out_and_gradients, quick_jit
from tests.devices import pretend_gpu


CAUSAL, FULL = masks.Causal(), masks.Full()
LENGTHS = masks.Lengths(kv=jnp.array([5, 0]))


@pytest.mark.parametrize(
    "mask, flags",
    [
        (FULL, cudnn.Flags()),
        (CAUSAL, cudnn.Flags(causal=True)),
        (masks.Window(), cudnn.Flags()),
        (masks.Window(left=3), cudnn.Flags(left=3)),
        (masks.Window(left=3, right=0), cudnn.Flags(causal=True, left=3)),
        (masks.Window(right=0), cudnn.Flags(causal=True)),
        (masks.Window(left=5) & CAUSAL & masks.Window(left=3), cudnn.Flags(True, 3)),
        (masks.Lengths(q=4), cudnn.Flags(q_lengths=(4,))),
        (masks.Lengths(q=4, kv=5) & masks.Lengths(kv=2), cudnn.Flags(False, None, (4,), (5, 2))),
        (CAUSAL & FULL, cudnn.Flags(causal=True)),
    ],
)
def test_masks_that_cudnn_has_flags_for(mask, flags):
    assert cudnn.as_cudnn(mask) == flags


@pytest.mark.parametrize(
    "mask, says",
    [
        (masks.Window(right=2), "window to the right, got right=2"),
        (CAUSAL | masks.Prefix(3), "no flag for Or"),
        (CAUSAL & masks.Segments(jnp.zeros(7, int)), "no flag for Segments"),
    ],
)
def test_masks_that_it_has_none_for(mask, says):
    with pytest.raises(NotImplementedError, match=says):
        cudnn.as_cudnn(mask)


def test_other_masks_may_be_registered():
    @pytree_dataclass
    class UpTo(masks.Mask):
        length: Any = array_field("*B")

    mask = CAUSAL & UpTo(jnp.array([3, 4]))
    with pytest.raises(NotImplementedError, match="UpTo"):
        cudnn.as_cudnn(mask)
    cudnn.as_cudnn.register(UpTo, lambda mask: cudnn.Flags(kv_lengths=(mask.length,)))
    assert len(cudnn.as_cudnn(mask).kv_lengths) == 1


def reason(
    T: int = 6, S: int = 8, N: int = 4, K: int = 2, H: int = 16, V: int = 16, **rules: Any
) -> str | None:
    """Returns what `supports` says of a call, by default in bfloat16."""
    dtype = rules.pop("dtype", jnp.bfloat16)
    arrays = (
        jax.ShapeDtypeStruct(shape, dtype) for shape in ((2, T, N, H), (2, S, K, H), (2, S, K, V))
    )
    return cudnn.supports(make(*arrays, **rules).prepared())


def bias(*shape: int, dtype: Any = jnp.bfloat16) -> scores.Bias:
    return scores.Bias(jnp.ones(shape, dtype))


REASONS = {
    "float32": ({"dtype": jnp.float32}, "expected bfloat16 or float16, got float32"),
    "head_size_12": ({"H": 12, "V": 12}, "multiple of 8, at most 256, got 12"),
    "head_size_264": ({"H": 264, "V": 264}, "multiple of 8, at most 256, got 264"),
    "other_values": ({"V": 8}, "values of the size of keys, got H = 16, V = 8"),
    "lse": ({"lse": True}, "log-sum-exp"),
    "dropout": (
        {"dropout_rate": 0.1, "dropout_key": jax.random.key(0)},
        "random generator of its own",
    ),
    "precision": ({"precision": "highest"}, "no precision"),
    "traced_scale": ({"scale": jnp.bfloat16(0.3)}, "scale is an array"),
    "q_positions": ({"q_positions": jnp.arange(6)}, "positions are given"),
    "kv_positions": ({"kv_positions": jnp.arange(8)}, "positions are given"),
    "mask": ({"mask": masks.Prefix(3)}, "no flag for Prefix"),
    "window_alone": ({"mask": masks.Window(left=3)}, "windows only with Causal"),
    "window_and_lengths": ({"mask": CAUSAL & masks.Window(left=3) & LENGTHS}, "without keys"),
    "window_past_the_keys": ({"mask": CAUSAL & masks.Window(left=1), "T": 10}, "without keys"),
    "soft_cap": ({"score": scores.SoftCap(2.0)}, "has Bias only, got SoftCap"),
    "chain": ({"score": bias(1, 4, 6, 8) >> bias(1, 4, 6, 8)}, "has Bias only, got Then"),
    "bias_by_row": ({"score": bias(2, 4, 6, 8)}, "[1, N, T, S] = [1, 4, 6, 8], got [2, 4, 6, 8]"),
    "bias_by_key": ({"score": bias(1, 4, 1, 8)}, "got [1, 4, 1, 8]"),
    "bias_in_float32": (
        {"score": bias(1, 4, 6, 8, dtype=jnp.float32)},
        "Bias in float32 would be rounded to bfloat16",
    ),
    "one_query": ({"T": 1}, "one query with strongly negative logits"),
    "half_a_tile": ({"T": 192, "score": bias(1, 4, 192, 8)}, "may be NaN, got 192"),
    "odd_queries": ({"T": 5, "score": bias(1, 4, 5, 8)}, "even T and S, got 5 and 8"),
    "odd_keys": ({"S": 7, "score": bias(1, 4, 6, 7)}, "even T and S, got 6 and 7"),
}


@pytest.mark.parametrize("name", REASONS)
def test_every_limit_is_a_reason(name):
    rules, says = REASONS[name]
    assert says in str(reason(**rules))


CONFIGURED = {
    "plain": ({}, "NO_MASK", 0),
    "causal": ({"mask": CAUSAL}, "CAUSAL", 0),
    "window": ({"mask": CAUSAL & masks.Window(left=3)}, "CAUSAL", 4),
    "window_of_its_own": ({"mask": masks.Window(left=3, right=0)}, "CAUSAL", 4),
    "lengths": ({"mask": LENGTHS}, "PADDING", 0),
    "lengths_causal": ({"mask": CAUSAL & LENGTHS & masks.Lengths(q=3)}, "PADDING_CAUSAL", 0),
    "bias": ({"score": bias(1, 4, 6, 8)}, "NO_MASK", 0),
}
SUPPORTED = {name: rules for name, (rules, *_) in CONFIGURED.items()} | {
    "float16": {"dtype": jnp.float16},
    "odd_sizes": {"T": 5, "S": 7},
    "given_scale": {"scale": 0.3},
}


@pytest.mark.parametrize("name", SUPPORTED)
def test_without_a_gpu_that_is_the_reason(name):
    assert str(reason(**SUPPORTED[name])).startswith("runs on a machine with a GPU: ")


def on(monkeypatch, capability: str) -> None:
    """Pretends that there is a GPU, also to JAX's own checks."""
    cudnn._refusal.cache_clear()
    pretend_gpu(monkeypatch, capability)
    monkeypatch.delenv("XLA_FLAGS", raising=False)  # none is needed
    checks = "jax._src.cudnn.fused_attention_stablehlo"
    monkeypatch.setattr(f"{checks}.check_cudnn_version", lambda: 91900)
    monkeypatch.setattr(
        f"{checks}.check_compute_capability", lambda wanted: float(wanted) <= float(capability)
    )


def test_gpus_differ(monkeypatch):
    on(monkeypatch, "7.5")
    assert reason() == "expected a compute capability of 8.0 or more, got 7.5"
    on(monkeypatch, "8.0")
    assert reason() is None
    assert reason(H=256, V=256) == "head size 256 > 128 needs compute capability 9.0 or more"
    on(monkeypatch, "9.0")
    assert reason(H=256, V=256) is None


def test_what_jax_itself_refuses_is_a_reason(monkeypatch):
    on(monkeypatch, "9.0")
    refuse = mock.Mock(side_effect=RuntimeError("cuDNN is not detected."))
    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", refuse)
    assert reason() == "cuDNN is not detected."


def program(call: Any, *arguments: Any) -> str:
    return jax.jit(call).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def inputs(B: int = 2, T: int = 6, S: int = 8) -> tuple[jax.Array, ...]:
    """bfloat16 queries `[B, T, 4, 16]`, keys and values `[B, S, 2, 16]`."""
    shapes = ((B, T, 4, 16), (B, S, 2, 16), (B, S, 2, 16))
    return tuple(jnp.ones(shape, jnp.bfloat16) for shape in shapes)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", CONFIGURED)
def test_cudnn_gets_the_flags(monkeypatch, name):
    on(monkeypatch, "9.0")
    rules, mask_type, window = CONFIGURED[name]

    loss = lambda q, k, v: jattn.attention(q, k, v, scale=0.3, **rules).astype(jnp.float32).sum()  # noqa: E731
    text = program(jax.grad(loss, (0, 1, 2)), *inputs())
    kind = "ScaleBiasSoftmax" if "score" in rules else "Softmax"
    for target in (f"__cudnn$fmha{kind}", f"__cudnn$fmha{kind}Backward"):
        matches = re.findall(rf'@{re.escape(target)}\(.*?backend_config = "(.*?)"[,}}]', text)
        config = json.loads(matches[-1].replace("\\22", '"'))["cudnn_fmha_backend_config"]
        assert config["mask_type"] == mask_type
        assert config["sliding_window_length"] == window
        assert config["fmha_scale"] == pytest.approx(0.3)


def test_cudnn_runs_supported_calls_on_a_gpu(monkeypatch):
    on(monkeypatch, "9.0")
    call = functools.partial(jattn.attention, mask=CAUSAL)
    assert "cudnn$fmha" in program(call, *inputs())
    assert "cudnn$fmha" not in program(functools.partial(call, return_lse=True), *inputs())
    assert "cudnn$fmha" not in jax.jit(call).lower(*inputs()).as_text()


def test_it_lowers_under_the_transformations(monkeypatch):
    on(monkeypatch, "9.0")
    call = functools.partial(jattn.attention, mask=CAUSAL, implementation="cudnn")

    loss = lambda q, k, v: jax.checkpoint(call)(q, k, v).astype(jnp.float32).sum()  # noqa: E731
    q, k, v = inputs()
    several = jax.vmap(jax.grad(loss, (0, 1, 2)), (-1, None, 0))
    text = program(several, jnp.stack([q, q], axis=-1), k, jnp.stack([v, v]))
    assert "cudnn$fmhaSoftmaxBackward" in text


def formula(query: Any, key: Any, value: Any, bias: Any = None, **options: Any) -> Any:
    """`jax.nn` by its formula, with NaN in rows past the lengths, which cuDNN leaves undefined."""
    assert options.pop("implementation") == "cudnn"
    out = original(query, key, value, bias, **options)
    if "query_seq_lengths" in options:
        rows = jnp.arange(query.shape[1])[None] < options["query_seq_lengths"][:, None]
        out = jnp.where(rows[..., None, None], out, jnp.nan)
    return out


original = jax.nn.dot_product_attention


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", ["odd_sizes", "window", "lengths", "lengths_causal", "bias"])
def test_around_it_the_contract_holds(monkeypatch, name):
    """A formula replaces cuDNN for rows without keys and poison behind masks."""
    monkeypatch.setattr(jax.nn, "dot_product_attention", formula)
    rules = {"T": 6, "S": 8, "dtype": jnp.bfloat16} | SUPPORTED[name]
    dtype, T, S = rules.pop("dtype"), rules.pop("T"), rules.pop("S")
    q, k, v, d_out = attention_arrays((2, T, S, 4, 2, 16, 16), dtype)
    spec = make(q, k, v, **rules).prepared().spec

    def everything(kernel: Any) -> Any:
        functions = vjp.Functions(kernel.functions), tangents.functions()
        call = lambda *qkv: vjp.attention(*functions, spec, *qkv)[0]  # noqa: E731
        return quick_jit(lambda *qkv: out_and_gradients(call, qkv, d_out))

    programs = [everything(kernel) for kernel in (cudnn, blockwise)]
    hidden = np.asarray(~spec.mask.dense(T, S, batch=(2,), heads=1).any(axis=(1, 2)))
    for poison in (0.0, np.nan, np.inf):
        bad_k, bad_v = (x.at[hidden].set(poison) if poison else x for x in (k, v))
        with lowering.default_settings():  # for the formula of `jax.nn`
            got, want = (run(q, bad_k, bad_v) for run in programs)
        for x, y in zip(got, want, strict=True):
            x, y = (np.asarray(a, np.float32) for a in (x, y))  # noqa: PLW2901
            assert np.all(np.isfinite(x))
            np.testing.assert_allclose(x, y, atol=0.04)
