"""`compat.equinox_attention` in Equinox's own modules, compared with their own results."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn import compat, masks
from tests.conftest import assert_trees_close


equinox: Any = pytest.importorskip("equinox")
pytestmark = pytest.mark.usefixtures("standard_promotion")

T, S, N, D = 7, 9, 3, 12
RNG = np.random.default_rng(0)
X, Y = (RNG.normal(size=(n, D)).astype(np.float32) for n in (T, S))
MASKS: dict[str, Any] = {
    "none": None,
    "two axes": RNG.random((T, S)) < 0.7,
    "by head": RNG.random((N, T, S)) < 0.7,
}
for _mask in MASKS.values():
    if _mask is not None:
        _mask[..., 0] = True


def layer(**options: Any) -> Any:
    """Equinox's layer, with biases and values of another size."""
    options = {"use_query_bias": True, "use_output_bias": True, "vo_size": 5, **options}
    return equinox.nn.MultiheadAttention(N, D, key=jax.random.key(0), **options)


close = functools.partial(assert_trees_close, atol=2e-5, rtol=2e-5)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("name", "rate"), [("none", 0.0), ("two axes", 0.4), ("by head", 0.0), ("by head", 0.4)]
)
def test_values_and_gradients_with_dropout(name, rate):
    key = jax.random.key(3)

    def loss(layer: Any, x: Any) -> Any:
        out = layer(x, Y, Y, MASKS[name], key=key, process_heads=lambda q, k, v: (2 * q, k, v))
        return jnp.sum(jnp.sin(out)), out

    theirs = layer(dropout_p=rate)
    run = equinox.filter_jit(equinox.filter_grad(loss, has_aux=True))
    close(*(run(x, jnp.asarray(X)) for x in (compat.equinox_attention(theirs), theirs)))


def test_the_tree_stays_the_same():
    theirs = {"a": layer(dropout_p=0.5), "b": [equinox.nn.Linear(2, 2, key=jax.random.key(1)), 3]}
    ours = compat.equinox_attention(theirs)
    got, want = ([place for place, _ in jax.tree.leaves_with_path(x)] for x in (ours, theirs))
    assert got == want
    assert all(a is b for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True))
    assert isinstance(ours["a"], equinox.nn.MultiheadAttention)
    assert jax.tree.structure(compat.equinox_attention(ours)) == jax.tree.structure(ours)


@pytest.mark.slow
def test_inference_masks_of_ours_and_mistakes():
    theirs = layer(dropout_p=0.5)
    ours = compat.equinox_attention(theirs)
    both, causal = (ours, theirs), np.tril(np.ones((T, T), bool))
    close(ours(X, X, X, masks.Causal(), inference=True), theirs(X, X, X, causal, inference=True))
    rows = jnp.stack([X, 2 * X])
    close(*(jax.vmap(lambda x, f=f: f(x, x, x, causal, inference=True))(rows) for f in both))
    with pytest.raises(RuntimeError, match="key: needed for dropout"):
        ours(X, X, X)
    with pytest.raises(ValueError, match=r"mask: expected \[T, S\] or \[N, T, S\] = \[3, 7, 9\]"):
        ours(X, Y, Y, causal, inference=True)
    out = ours(X, X, X, np.zeros((T, T), bool), inference=True)
    np.testing.assert_allclose(out, jnp.broadcast_to(theirs.output_proj.bias, out.shape))
