"""The decoder-only Transformer: by the formula, and token by token."""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jattn import masks, nn
from jattn.cache import PagedCache
from tests.conftest import expect
from tests.test_nn import arrays, call, close, layer_norm, made, multi_head, normal, rms_norm


pytestmark = pytest.mark.usefixtures("quick_compilation")

D, N, V, T = 12, 3, 11, 7
SIZES: dict[str, Any] = {"features": D, "num_heads": N, "feed_forward": 10, "dropout_rate": 0.0}
LATENT = functools.partial(nn.MultiHeadLatentAttention, kv_rank=6, query_rank=5)
KINDS: dict[str, dict[str, Any]] = {
    "gpt": {"num_layers": 1, "positions": "learned", "max_length": 9}
    | {"activation": nnx.gelu, "scale_embeddings": False},
    "llama": {"num_layers": 2, "num_kv_heads": 1, "head_dim": 6, "normalization": "rms"}
    | {"activation": nnx.silu, "gated": True, "use_bias": False, "tie_embeddings": False},
    "2017": {"num_layers": 1, "positions": "sinusoidal", "norm": "post"},
    "latent": {"num_layers": 1, "self_attention": LATENT},
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
    llama, post = kind == "llama", kind == "2017"
    x = p["tokens/embedding"][tokens] * (1 if kind == "gpt" else np.sqrt(D))
    if kind == "gpt":
        x = x + p["positions/embedding"][: len(tokens)]
    if post:
        angles = np.arange(T)[:, None] / 10000 ** (np.arange(0, D, 2) / D)
        x = x + np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(T, D)

    def norm(path: str, x: np.ndarray) -> np.ndarray:
        scale = p[f"{path}/scale"]
        return rms_norm(x, scale) if llama else layer_norm(x, scale, p[f"{path}/bias"])

    def matrix(path: str, x: np.ndarray) -> np.ndarray:
        return x @ p[f"{path}/kernel"] + p.get(f"{path}/bias", 0.0)

    def attend(path: str, x: np.ndarray) -> np.ndarray:
        attention = {name.removeprefix(f"{path}/"): y for name, y in p.items()}
        causal, places = np.tril(np.ones((T, T), bool)), np.arange(T) if llama else None
        return multi_head(attention, x, x, causal, positions=places)

    def feed_forward(path: str, x: np.ndarray) -> np.ndarray:
        hidden = matrix(f"{path}/hidden", x)
        if llama:
            gate = matrix(f"{path}/gate", x)
            return matrix(f"{path}/out", gate / (1 + np.exp(-gate)) * hidden)
        return matrix(f"{path}/out", np.maximum(hidden, 0) if post else gelu(hidden))

    for layer in range(KINDS[kind]["num_layers"]):
        for name, sublayer in (("self_attention", attend), ("feed_forward", feed_forward)):
            path = f"layers/{layer}/{name}"
            around = functools.partial(norm, f"{path}_residual/norm")
            x = around(x + sublayer(path, x)) if post else x + sublayer(path, around(x))
    x = x if post else norm("norm", x)
    return x @ p["output/kernel" if llama else "tokens/embedding"].T


@pytest.mark.parametrize("kind", ["gpt", "llama", "2017"])
def test_logits_by_the_formula(kind):
    module = model(kind, param_dtype=jnp.float64)
    expected = [by_the_formula(arrays(module), tokens, kind) for tokens in TOKENS]
    close(call(module, jnp.asarray(TOKENS)), np.stack(expected), 1e-11)


@nnx.jit
def stepped(module, tokens, caches, valid=None):
    return module.step(tokens, caches, valid=valid)


SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("2017", "latent")]


@pytest.mark.parametrize("kind", ["gpt", "llama", *SLOW])
def test_steps_equal_the_call(kind):
    """Prompts of two lengths, padded on the left, then the rest token by token."""
    module, tokens = model(kind), jnp.asarray(TOKENS)
    whole = np.asarray(call(module, tokens))
    valid = jnp.asarray([[True, True, True], [False, True, True]])
    prompt = jnp.stack([tokens[0, :3], jnp.array([0, *TOKENS[1, :2]], jnp.int32)])
    pages: Any = (PagedCache,) if kind == "latent" else ()
    logits, caches = stepped(module, prompt, module.start(2, T, *pages), valid)
    close(logits[0], whole[0, :3], 1e-4)
    close(logits[1, 1:], whole[1, :2], 1e-4)
    for n in range(4):
        places = np.arange(2), np.array([3 + n, 2 + n])
        logits, caches = stepped(module, tokens[places][:, None], caches)
        close(logits[:, 0], whole[places], 1e-4)


def test_masks_and_positions():
    module, tokens = model("llama"), jnp.asarray(TOKENS)
    ids = jnp.array([[0, 0, 0, 0, 1, 1, 1]] * 2, jnp.int32)
    places = jnp.array([0, 1, 2, 3, 0, 1, 2], jnp.int32)
    segments = masks.Segments(ids)
    out = call(module, tokens, mask=segments, positions=places)
    close(out[:, 4:], call(module, tokens[:, 4:]), 1e-4)
    steps = nnx.jit(lambda m, t, c: m.step(t, c, mask=segments))(module, tokens, module.start(2, T))
    close(steps[0], call(module, tokens, mask=segments), 1e-4)


def test_projection_makes_the_logits():
    for kind in ("gpt", "llama"):
        module, x = model(kind), normal(1, 2, 3, D)
        kernel, bias = module.projection
        close(module.logits(x), x @ kernel.T, 1e-5)
        assert bias is None


def test_errors(unchecked):
    gpt, ids = model("gpt"), jnp.ones((2, 5), int)
    expect(ValueError, "length: expected length <= max_length=9, got 10", gpt.start, 2, 10)
    says = "tokens: | B = 3 as in the caches, got [2, 5]"
    expect(ValueError, says, gpt.step, ids, gpt.start(3, 5))
    expect(ValueError, "caches: expected one for each of 1 layers, got 0", gpt.step, ids, [])
    options: Any = {"positions": "alibi", "rngs": nnx.Rngs(0)}
    expect(ValueError, "positions: expected | got 'alibi'", nn.DecoderOnly, V, **options)
