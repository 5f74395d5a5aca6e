"""The decoder-only Transformer: by the formula, and token by token."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jattn import masks, nn
from jattn.cache import RollingCache
from tests.test_nn import arrays, call, layer_norm, made, multi_head, normal, rms_norm


pytestmark = pytest.mark.usefixtures("quick_compilation")

D, N, V, T = 12, 3, 11, 7
SIZES: dict[str, Any] = {"features": D, "num_heads": N, "feed_forward": 10, "dropout_rate": 0.0}
KINDS: dict[str, dict[str, Any]] = {
    "gpt": {
        "num_layers": 1,
        "positions": "learned",
        "max_length": 9,
        "activation": nnx.gelu,
        "scale_embeddings": False,
    },
    "llama": {
        "num_layers": 2,
        "num_kv_heads": 1,
        "head_dim": 6,
        "normalization": "rms",
        "activation": nnx.silu,
        "gated": True,
        "use_bias": False,
        "tie_embeddings": False,
    },
    "2017": {"num_layers": 1, "positions": "sinusoidal", "norm": "post"},
}
TOKENS = np.random.default_rng(3).integers(0, V, (2, T)).astype(np.int32)


def model(kind: str, *, spread: float = 1.0, seed: int = 0, **options: Any) -> Any:
    arguments = SIZES | KINDS[kind] | options
    return made(nn.DecoderOnly, V, spread=spread, seed=seed, **arguments)


def gelu(x: np.ndarray) -> np.ndarray:
    """GELU with tanh, Flax's default (Hendrycks and Gimpel 2016)."""
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def by_the_formula(p: dict[str, np.ndarray], tokens: np.ndarray, kind: str) -> np.ndarray:
    """Returns logits [T, V] of tokens [T], from parameters by path."""
    llama = kind == "llama"
    x = p["tokens/embedding"][tokens] * (np.sqrt(D) if llama else 1)
    if not llama:
        x = x + p["positions/embedding"][: len(tokens)]

    def norm(path: str, x: np.ndarray) -> np.ndarray:
        scale = p[f"{path}/scale"]
        return rms_norm(x, scale) if llama else layer_norm(x, scale, p[f"{path}/bias"])

    def matrix(path: str, x: np.ndarray) -> np.ndarray:
        return x @ p[f"{path}/kernel"] + p.get(f"{path}/bias", 0.0)

    for layer in range(KINDS[kind]["num_layers"]):
        block = f"layers/{layer}"
        own_parameters = {
            path.removeprefix(f"{block}/self_attention/"): value
            for path, value in p.items()
            if path.startswith(f"{block}/self_attention/")
        }
        y = norm(f"{block}/self_attention_residual/norm", x)
        causal, places = np.tril(np.ones((T, T), bool)), np.arange(T) if llama else None
        x = x + multi_head(own_parameters, y, y, causal, positions=places)
        y = norm(f"{block}/feed_forward_residual/norm", x)
        hidden = matrix(f"{block}/feed_forward/hidden", y)
        if llama:
            gate = matrix(f"{block}/feed_forward/gate", y)
            hidden = gate / (1 + np.exp(-gate)) * hidden
        else:
            hidden = gelu(hidden)
        x = x + matrix(f"{block}/feed_forward/out", hidden)
    return norm("norm", x) @ p["output/kernel" if llama else "tokens/embedding"].T


@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_logits_by_the_formula(kind):
    module = model(kind, param_dtype=jnp.float64)
    out = call(module, jnp.asarray(TOKENS))
    for row, tokens in zip(out, TOKENS, strict=True):
        expected = by_the_formula(arrays(module), tokens, kind)
        np.testing.assert_allclose(row, expected, rtol=0, atol=1e-11)


@nnx.jit
def stepped(module, tokens, caches, valid=None):
    return module.step(tokens, caches, valid=valid)


@pytest.mark.parametrize("kind", ["gpt", "llama", pytest.param("2017", marks=pytest.mark.slow)])
def test_steps_equal_the_call(kind):
    """Prompts of two lengths, padded on the left, then the rest token by token."""
    module, tokens = model(kind), jnp.asarray(TOKENS)
    whole = np.asarray(call(module, tokens))
    valid = jnp.asarray([[True, True, True], [False, True, True]])
    prompt = jnp.stack([tokens[0, :3], jnp.array([0, *TOKENS[1, :2]], jnp.int32)])
    logits, caches = stepped(module, prompt, module.start(2, T), valid)
    np.testing.assert_allclose(logits[0], whole[0, :3], rtol=0, atol=1e-4)
    np.testing.assert_allclose(logits[1, 1:], whole[1, :2], rtol=0, atol=1e-4)
    for n in range(4):
        ids = jnp.stack([tokens[0, 3 + n], tokens[1, 2 + n]])[:, None]
        logits, caches = stepped(module, ids, caches)
        want = np.stack([whole[0, 3 + n], whole[1, 2 + n]])
        np.testing.assert_allclose(logits[:, 0], want, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_masks_positions_and_other_caches():
    module, tokens = model("llama"), jnp.asarray(TOKENS)
    ids = jnp.array([[0, 0, 0, 0, 1, 1, 1]] * 2, jnp.int32)
    places = jnp.array([0, 1, 2, 3, 0, 1, 2], jnp.int32)
    out = call(module, tokens, mask=masks.Segments(ids), positions=places)
    np.testing.assert_allclose(out[:, 4:], call(module, tokens[:, 4:]), rtol=0, atol=1e-4)
    window = masks.Window(left=2)
    caches = module.start(2, 2, RollingCache, chunk=T)
    steps = nnx.jit(lambda m, t, c: m.step(t, c, mask=window))(module, tokens, caches)[0]
    np.testing.assert_allclose(steps, call(module, tokens, mask=window), rtol=0, atol=1e-4)


def test_projection_makes_the_logits():
    for kind in ("gpt", "llama"):
        module, x = model(kind), normal(1, 2, 3, D)
        kernel, bias = module.projection
        np.testing.assert_allclose(module.logits(x), x @ kernel.T, rtol=0, atol=1e-5)
        assert bias is None


@pytest.mark.usefixtures("unchecked")
def test_errors():
    gpt = model("gpt")
    with pytest.raises(ValueError, match="length: expected length <= max_length=9, got 10"):
        gpt.start(2, 10)
    with pytest.raises(ValueError, match=r"tokens: .* B = 3 as in the caches, got \[2, 5\]"):
        gpt.step(jnp.ones((2, 5), int), gpt.start(3, 5))
    with pytest.raises(ValueError, match="caches: expected one for each of 1 layers, got 0"):
        gpt.step(jnp.asarray(TOKENS), [])
    with pytest.raises(ValueError, match=r"positions: expected .* got 'alibi'"):
        nn.DecoderOnly(V, positions="alibi", rngs=nnx.Rngs(0))  # pyright: ignore[reportArgumentType]
