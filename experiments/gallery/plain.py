"""Softmax attention in plain `jax.numpy`, from which variants build their dense formulas."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key


Queries = Float[Array, "T N H"]
Keys = Float[Array, "S N H"]
Values = Float[Array, "S N V"]
Output = Float[Array, "T N V"]
Scores = Float[Array, "N T S"]
Allowed = Bool[Array | np.ndarray, "*N T S"]
PerToken = Float[Array, "T N"]
PerHead = Float[Array, " N"]

HEADS, SIZE = 2, 64


def heads(
    key: Key[Array, ""],
    T: int,
    N: int = HEADS,
    H: int = SIZE,
    V: int = SIZE,
    **shapes: tuple[int, ...],
) -> dict[str, Array]:
    """Draws query and key `[T, N, H]` and value `[T, N, V]` from normal distributions, and further
    arrays by name and shape. The scores of a query have a standard deviation of 3."""
    all_shapes = {"q": (T, N, H), "k": (T, N, H), "v": (T, N, V), **shapes}
    keys = jax.random.split(key, len(all_shapes))
    drawn = {
        name: jax.random.normal(x, shape)
        for x, (name, shape) in zip(keys, all_shapes.items(), strict=True)
    }
    return {**drawn, "q": 3 * drawn["q"]}


def scores(q: Queries, k: Keys) -> Scores:
    """Computes the scaled products of all queries and keys."""
    return jnp.einsum("tnh,snh->nts", q, k) / np.float32(np.sqrt(q.shape[-1]))


def softmax(scores: Scores, allowed: Allowed | bool = True) -> Scores:
    """Computes the weights of the allowed pairs; each query has at least one."""
    return jax.nn.softmax(jnp.where(allowed, scores, -jnp.inf), axis=-1)


def mean(weights: Scores, v: Values) -> Output:
    """Computes the mean of the values for each query."""
    return jnp.einsum("nts,snv->tnv", weights, v)


def causal(T: int) -> Bool[np.ndarray, "T T"]:
    """Returns the matrix of pairs whose key is not after the query."""
    return np.tril(np.ones((T, T), bool))


def distance(T: int) -> Float[np.ndarray, "T T"]:
    """Returns the matrix of query position − key position."""
    return np.subtract.outer(np.arange(T), np.arange(T)).astype(np.float32)


def rotated(x: Queries, positions: Int[np.ndarray, " T"], base: float = 10000.0) -> Queries:
    """Rotates channels i and i + H/2, as one complex number, by position × base^(−2i/H)."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * base ** (-np.arange(half) / half)
    turned = jax.lax.complex(x[..., :half], x[..., half:]) * np.exp(1j * angles)[:, None]
    return jnp.concatenate([turned.real, turned.imag], axis=-1).astype(x.dtype)
