"""Parameters of other libraries' attention in ours: equal outputs, and back."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jattn import compat, nn
from tests.arrays import assert_equal
from tests.conftest import expect


B, T, S, N, D = 2, 5, 7, 3, 12
RNG = np.random.default_rng(0)
X, Y, Z = (RNG.normal(size=(B, n, d)).astype(np.float32) for n, d in ((T, D), (S, D), (S, 8)))


def state_of(theirs: Any) -> dict[str, np.ndarray]:
    return {name: x.numpy() for name, x in theirs.state_dict().items()}


@pytest.mark.parametrize(("bias", "other_width"), [(True, False), (False, True)])
def test_torch_attention_there_and_back(bias, other_width):
    torch: Any = pytest.importorskip("torch")
    torch.manual_seed(0)
    memory = Z if other_width else Y
    width = memory.shape[-1]
    theirs = torch.nn.MultiheadAttention(D, N, bias=bias, kdim=width, vdim=width, batch_first=True)
    for parameter in theirs.parameters():  # its biases begin at 0
        torch.nn.init.normal_(parameter, std=0.5)
    with torch.no_grad():
        tensors = [torch.from_numpy(x) for x in (X, memory, memory)]
        want = theirs(*tensors, need_weights=False)[0].numpy()
    state = state_of(theirs)
    params = compat.attention_from_torch(state, N)
    ours = nn.MultiHeadAttention(N, D, in_kv_features=width, use_bias=bias, rngs=nnx.Rngs(0))
    nnx.update(ours, params)
    np.testing.assert_allclose(ours(jnp.asarray(X), jnp.asarray(memory)), want, atol=1e-5)
    assert_equal(compat.attention_to_torch(params), state)


def torch_transformer(**options: Any) -> Any:
    """A small Transformer of PyTorch, none of whose parameters are 0 or 1."""
    torch: Any = pytest.importorskip("torch")
    torch.manual_seed(0)
    layers = {"num_encoder_layers": 2, "num_decoder_layers": 1}
    theirs = torch.nn.Transformer(D, N, **layers, dim_feedforward=17, batch_first=True, **options)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return theirs.eval()


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize(("norm", "bias"), [("post", True), ("pre", True), ("post", False)])
def test_torch_transformer_there_and_back(norm, bias):
    theirs = torch_transformer(norm_first=norm == "pre", bias=bias)
    torch: Any = pytest.importorskip("torch")
    later = torch.nn.Transformer.generate_square_subsequent_mask(T)
    with torch.no_grad():
        want = theirs(torch.from_numpy(Y), torch.from_numpy(X), tgt_mask=later, tgt_is_causal=True)
    state = state_of(theirs)
    params = compat.transformer_from_torch(state, N)
    options: Any = {"norm": norm, "final_norm": True, "norm_epsilon": 1e-5, "use_bias": bias}
    sizes: Any = {"features": D, "num_heads": N, "feed_forward": 17}
    depth: Any = {"encoder_layers": 2, "decoder_layers": 1}
    ours = nn.Transformer(5, 5, **sizes, **depth, **options, rngs=nnx.Rngs(0))
    nnx.update(ours, params)
    run: Any = {"deterministic": True}
    memory = ours.encoder(jnp.asarray(Y), **run)
    np.testing.assert_allclose(ours.decoder(jnp.asarray(X), memory, **run), want, atol=2e-5)
    back = compat.transformer_to_torch(nnx.to_pure_dict(nnx.state(ours, nnx.Param)))
    assert_equal(back, state)
    theirs.load_state_dict({name: torch.from_numpy(x.copy()) for name, x in back.items()})


SELF = "encoder.layers.0.self_attn"


def bare_stack(state: dict[str, np.ndarray], stack: str) -> dict[str, np.ndarray]:
    prefix = f"{stack}."
    return {x.removeprefix(prefix): y for x, y in state.items() if x.startswith(prefix)}


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_mistakes_in_torch_transformers_raise():
    state = state_of(torch_transformer())
    without = {name: x for name, x in state.items() if name != "encoder.layers.0.linear1.weight"}
    for wrong, says in (
        (without, "state: expected encoder.layers.0.linear1.weight"),
        ({**state, "encoder.extra": np.ones(1)}, "state: encoder.extra has no counterpart"),
        ({"weight": np.ones(1)}, "state: expected names that begin with encoder. or"),
        ({}, "begin with encoder. or decoder., got none"),
        (bare_stack(state, "encoder"), 'pass {f"encoder.{name}": x for name, x in state.items()}'),
        (bare_stack(state, "decoder"), "torch.nn.TransformerDecoder pass | decoder.{name}"),
        ({**state, f"{SELF}.qkv.scale": np.ones(1)}, f"state: {SELF}.qkv.scale has no counterpart"),
        ({x: y for x, y in state.items() if x != f"{SELF}.in_proj_bias"}, f"{SELF}.in_proj_bias"),
        ({x: y for x, y in state.items() if not x.endswith("1.bias")}, "expected encoder.layers."),
        ({**state, f"{SELF}.in_proj_bias": np.ones(35)}, f"{SELF}.in_proj_bias: expected [3 D]"),
        ({**state, "decoder.layers.0.linear2.weight": np.ones((D, 16))}, "[D, F] = [12, 17], got"),
        ({**state, "decoder.layers.0.norm3.weight": np.ones(1)}, "expected [D] = [12], got [1]"),
    ):
        expect(ValueError, says, compat.transformer_from_torch, wrong, N)


def test_mistakes_raise():
    make = compat.attention_from_torch
    expect(ValueError, "state: expected out_proj.weight, got none", make, {}, 2)
    out = {"out_proj.weight": np.ones((D, D))}
    state = out | {"in_proj_weight": np.ones((3 * D, D))}
    expect(ValueError, "num_heads: expected a divisor of D = 12, got 5", make, state, 5)
    parts = out | {f"{x}_proj_weight": np.ones((D, n)) for x, n in (("q", D), ("k", 8), ("v", 9))}
    for wrong, says in (
        ({**state, "bias_k": np.ones(1)}, "bias_k"),
        ({**state, "qkv.scale": np.ones(1)}, "state: qkv.scale has no counterpart in jattn.nn"),
        ({**state, "out_proj.bias": np.ones(D)}, "state: expected in_proj_bias"),
        ({**state, "in_proj_bias": np.ones(3 * D)}, "state: expected out_proj.bias"),
        (
            {**state, "in_proj_weight": np.ones((24, D))},
            "in_proj_weight: expected [3 D, D] = [36, 12], got [24, 12]",
        ),
        ({**state, "out_proj.weight": np.ones((D, 8))}, "[D, D] = [12, 12], got [12, 8]"),
        ({**state, "out_proj.weight": np.ones(D)}, "expected [D, D], got [12]"),
        (parts, "v_proj_weight: expected [D, E] = [12, 8], as | kdim and vdim, got [12, 9]"),
        ({**parts, "q_proj_weight": np.ones((D, 8))}, "q_proj_weight: expected [D, D]"),
    ):
        expect(ValueError, says, make, wrong, 2)


def parameters_of(module: nnx.Module) -> dict[str, Any]:
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))


def test_attention_that_torch_lacks_raises():
    cases: list[tuple[dict[str, Any], str]] = [
        ({"sinks": True}, "parameters: sinks has no counterpart in torch"),
        ({"normalize_qk": True}, "parameters: key_ln.scale has no counterpart in torch"),
        ({"num_kv_heads": 1}, "key.kernel: expected [E, N, H] = [E, 3, 4], as torch has neither"),
        ({"value_dim": 2}, "value.kernel: | value_dim, got [12, 3, 2]"),
        ({"head_dim": 2}, "query.kernel: expected [N H, N, H] = [6, 3, 2], got [12, 3, 2]"),
        ({"out_features": 8}, "out.kernel: expected [N, H, D] = [3, 4, 12], got [3, 4, 8]"),
    ]
    for options, says in cases:
        layer = nn.MultiHeadAttention(N, D, rngs=nnx.Rngs(0), **options)
        expect(ValueError, says, compat.attention_to_torch, parameters_of(layer))
    expect(ValueError, "parameters: expected query.kernel", compat.attention_to_torch, {})


def test_layers_that_torch_lacks_raise():
    cases: list[tuple[dict[str, Any], str]] = [
        ({"gated": True}, "parameters: encoder.layers.0.feed_forward.gate.bias has no counterpart"),
        ({"norm": "sandwich"}, "feed_forward_residual.output_norm.bias has no counterpart"),
    ]
    no_stack = "parameters: expected encoder or decoder, got layers"
    for options, says in cases:
        encoder = nn.Encoder(1, D, N, 17, rngs=nnx.Rngs(0), **options)
        parameters = parameters_of(encoder)
        expect(ValueError, says, compat.transformer_to_torch, {"encoder": parameters})
        expect(ValueError, no_stack, compat.transformer_to_torch, parameters)


def test_no_bias_of_the_output_is_zero_in_torch():
    layer = nn.MultiHeadAttention(
        N, D, use_bias="qkv", bias_init=nnx.initializers.ones, rngs=nnx.Rngs(0)
    )
    state = compat.attention_to_torch(parameters_of(layer))
    np.testing.assert_array_equal(state["in_proj_bias"], np.ones(3 * D, np.float32))
    np.testing.assert_array_equal(state["out_proj.bias"], np.zeros(D, np.float32))


def test_bfloat16_parameters_of_torch_that_require_gradients():
    torch: Any = pytest.importorskip("torch")
    theirs = torch.nn.MultiheadAttention(D, N, dtype=torch.bfloat16)
    kernel = compat.attention_from_torch(dict(theirs.named_parameters()), N)["out"]["kernel"]
    assert kernel.dtype == jnp.bfloat16
    weight = theirs.out_proj.weight.detach().float().numpy()
    np.testing.assert_array_equal(kernel.reshape(D, D).T.astype(np.float32), weight)
