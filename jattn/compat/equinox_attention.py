"""Attention for Equinox's own modules: the same model, in which ours attends."""

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
    """The same model, whose `equinox.nn.MultiheadAttention` layers attend by `jattn.attention`.

        model = jattn.compat.equinox_attention(model)

    Parameters stay where they are and as they are, so that optimisers, checkpoints and
    `equinox.tree_at` see the same tree. A layer takes the arguments that it took, and drops what it
    dropped; its `mask` may also be one of `jattn.masks`, which is no array of T × S. Layers of
    classes derived from Equinox's are left alone.

    A query whose keys are all masked gets 0, there the mean of all values.

    Raises ImportError where Equinox is not installed.
    """
    import equinox  # noqa: PLC0415  others do without it

    theirs = equinox.nn.MultiheadAttention

    def is_theirs(x: Any) -> bool:
        return type(x) is theirs

    def ours(x: Any) -> Any:
        return _copied(x, _layer(theirs)) if is_theirs(x) else x

    return jax.tree.map(ours, model, is_leaf=is_theirs)


@functools.cache
def _layer(theirs: Any) -> Any:
    """The class of layers that attend by ours."""

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
            given = (self.query_proj, query), (self.key_proj, key_), (self.value_proj, value)
            q, k, v = (jax.vmap(proj)(x).reshape(len(x), self.num_heads, -1) for proj, x in given)
            if process_heads is not None:
                q, k, v = process_heads(q, k, v)
            inference = inference if deterministic is None else deterministic
            out = _heads(q, k, v, mask, self.dropout, key, inference)
            return jax.vmap(self.output_proj)(out.reshape(len(query), -1))

    return MultiheadAttention


def _copied(layer: Any, of: Any) -> Any:
    """With its fields, as an object of this class derived from its own."""
    new = object.__new__(of)
    for name in layer.__dataclass_fields__:
        object.__setattr__(new, name, getattr(layer, name))
    return new


def _heads(
    query: Any,
    key: Any,
    value: Any,
    mask: Any,
    dropout: Any,
    rng: Any,
    inference: Any,
) -> Array:
    """`[T, N, V]`, with what Equinox drops: of each head by its own key."""
    T, S, N = len(query), len(key), query.shape[1]
    if mask is not None and not isinstance(mask, masks.Mask):
        mask = jnp.asarray(mask)
        if mask.shape not in ((T, S), (N, T, S)):
            raise ValueError(
                f"mask: expected [T, S] or [N, T, S] = {[N, T, S]}, got {[*mask.shape]}"
            )
        mask = masks.Dense(mask.reshape(-1, T, S))
    rules: dict[str, Any] = {"mask": mask}
    inference = dropout.inference if inference is None else inference
    if inference or (isinstance(dropout.p, int | float) and dropout.p == 0):
        return attention(query, key, value, **rules)
    if rng is None:
        raise RuntimeError("key: needed for dropout, got None")
    keys = jax.random.split(rng, N)
    kept = jax.vmap(lambda key: jax.random.bernoulli(key, 1 - dropout.p, (T, S)))(keys)
    return attention_of_kept(query, key, value, rules, kept, dropout.p)
