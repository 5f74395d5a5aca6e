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


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_mistakes_in_torch_transformers_raise():
    state = state_of(torch_transformer())
    without = {name: x for name, x in state.items() if name != "encoder.layers.0.linear1.weight"}
    for wrong, says in (
        (without, "state: expected encoder.layers.0.linear1.weight"),
        ({**state, "encoder.extra": np.ones(1)}, "state: encoder.extra has no counterpart"),
        ({"weight": np.ones(1)}, "state: expected names that begin with encoder. or"),
    ):
        expect(ValueError, says, compat.transformer_from_torch, wrong, N)


def test_mistakes_raise():
    make = compat.attention_from_torch
    expect(ValueError, "state: expected out_proj.weight", make, {}, 2)
    state = {"out_proj.weight": np.ones((D, D)), "in_proj_weight": np.ones((3 * D, D))}
    expect(ValueError, "num_heads: expected a divisor of D = 12, got 5", make, state, 5)
    expect(ValueError, "bias_k", make, {**state, "bias_k": np.ones(1)}, 2)
