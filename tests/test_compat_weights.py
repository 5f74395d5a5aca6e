"""Parameters of other libraries' attention in ours: equal outputs, and the way back."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jattn import compat, nn


B, T, S, N, D = 2, 5, 7, 3, 12
RNG = np.random.default_rng(0)
X, Y, Z = (RNG.normal(size=(B, n, d)).astype(np.float32) for n, d in ((T, D), (S, D), (S, 8)))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("other_width", [False, True])
def test_torch_attention_there_and_back(bias, other_width):
    torch: Any = pytest.importorskip("torch")
    torch.manual_seed(0)
    memory = Z if other_width else Y
    width = memory.shape[-1]
    theirs = torch.nn.MultiheadAttention(D, N, bias=bias, kdim=width, vdim=width, batch_first=True)
    for parameter in theirs.parameters():  # its biases begin at 0
        torch.nn.init.normal_(parameter, std=0.5)
    with torch.no_grad():
        given = [torch.from_numpy(x) for x in (X, memory, memory)]
        want = theirs(*given, need_weights=False)[0].numpy()
    state = {name: x.numpy() for name, x in theirs.state_dict().items()}
    found = compat.attention_from_torch(state, N)
    ours = nn.MultiHeadAttention(N, D, in_kv_features=width, use_bias=bias, rngs=nnx.Rngs(0))
    nnx.update(ours, found)
    np.testing.assert_allclose(ours(jnp.asarray(X), jnp.asarray(memory)), want, atol=1e-5)
    back = compat.attention_to_torch(found)
    assert set(back) == set(state)
    for name, x in back.items():
        np.testing.assert_array_equal(x, state[name])


def test_flax_attention_is_taken_as_it_stands():
    theirs = nnx.MultiHeadAttention(N, D, decode=False, rngs=nnx.Rngs(1))
    ours = nn.MultiHeadAttention(N, D, rngs=nnx.Rngs(0))
    nnx.update(ours, nnx.to_pure_dict(nnx.state(theirs, nnx.Param)))
    np.testing.assert_allclose(ours(jnp.asarray(X)), theirs(jnp.asarray(X)), atol=1e-5)


def test_mistakes_raise():
    with pytest.raises(ValueError, match=r"state: expected out_proj\.weight"):
        compat.attention_from_torch({}, 2)
    state = {"out_proj.weight": np.ones((D, D)), "in_proj_weight": np.ones((3 * D, D))}
    with pytest.raises(ValueError, match="num_heads: expected a divisor of D = 12, got 5"):
        compat.attention_from_torch(state, 5)
    with pytest.raises(ValueError, match="bias_k"):
        compat.attention_from_torch({**state, "bias_k": np.ones(1)}, 2)
