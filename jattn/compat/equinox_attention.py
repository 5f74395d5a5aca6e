"""Attention for Equinox's modules: replaces the attention layers of a model."""

import functools
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from jattn import masks
from jattn.attention import attention
from jattn.compat.dropout import attention_of_kept


_M = TypeVar("_M")


def equinox_attention(model: _M) -> _M:
    """Returns the model with its `equinox.nn.MultiheadAttention` layers using `jattn.attention`.

    The parameters and their tree stay unchanged, so optimisers, checkpoints and `equinox.tree_at`
    keep working. A layer takes the same arguments and applies the same dropout decisions as before;
    its `mask` may also be a mask of `jattn.masks`, which needs no T × S array. Layers of subclasses
    of Equinox's class are not replaced.

    A query whose keys are all masked gets 0, where Equinox returns the mean of all values.

    Raises ImportError if Equinox is not installed.

    >>> import equinox
    >>> layer = equinox.nn.MultiheadAttention(2, 8, key=jax.random.key(0))
    >>> jattn.compat.equinox_attention(layer)(*jnp.ones((3, 5, 8)), mask=masks.Causal()).shape
    (5, 8)
    """
    import equinox  # noqa: PLC0415  an optional dependency

    layer_class = equinox.nn.MultiheadAttention

    def is_layer(x: Any) -> bool:
        return type(x) is layer_class

    def replace(x: Any) -> Any:
        if not is_layer(x):
            return x
        copy = object.__new__(_layer(layer_class))
        for name in x.__dataclass_fields__:
            object.__setattr__(copy, name, getattr(x, name))
        return copy

    return jax.tree.map(replace, model, is_leaf=is_layer)


@functools.cache
def _layer(theirs: Any) -> Any:
    """Returns the subclass of Equinox's layer that uses `jattn.attention`."""

    class MultiheadAttention(theirs):
        def __call__(
            self,
            query: Any,
            key_: Any,
            value: Any,
            mask: Any = None,
            *,
            key: Array | None = None,
            inference: bool | None = None,
            deterministic: bool | None = None,
            process_heads: Any = None,
        ) -> Array:
            projections = (self.query_proj, query), (self.key_proj, key_), (self.value_proj, value)
            q, k, v = (
                jax.vmap(proj)(x).reshape(len(x), self.num_heads, -1) for proj, x in projections
            )
            if process_heads is not None:
                q, k, v = process_heads(q, k, v)
            inference = inference if deterministic is None else deterministic
            out = _heads(q, k, v, mask, self.dropout, key, inference)
            return jax.vmap(self.output_proj)(out.reshape(len(query), -1))

    return MultiheadAttention


def _heads(
    query: Any, key: Any, value: Any, mask: Any, dropout: Any, rng: Any, inference: Any
) -> Array:
    """Computes attention `[T, N, V]`; dropout uses a key for each head, as Equinox does."""
    T, S, N = len(query), len(key), query.shape[1]
    if mask is not None and not isinstance(mask, masks.Mask):
        mask = jnp.asarray(mask)
        if mask.shape not in ((T, S), (N, T, S)):
            wanted = f"[T, S] or [N, T, S] = {[N, T, S]}"
            raise ValueError(f"mask: expected {wanted}, got {[*mask.shape]}")
        mask = masks.Dense(mask.reshape(-1, T, S))
    inference = dropout.inference if inference is None else inference
    if inference or (isinstance(dropout.p, int | float) and dropout.p == 0):
        return attention(query, key, value, mask=mask)
    if rng is None:
        raise RuntimeError("key: needed for dropout, got None")
    keys = jax.random.split(rng, N)
    keep = jax.vmap(lambda key: jax.random.bernoulli(key, 1 - dropout.p, (T, S)))(keys)
    return attention_of_kept(query, key, value, {"mask": mask}, keep, dropout.p)
