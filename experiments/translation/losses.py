"""The loss: cross-entropy over the vocabulary, a chunk of positions at a time.

The logits `[positions, V]` are by far the largest array of a training step. Only the loss and its
gradients are wanted of them, so they are never whole. A chunk of positions is projected, and its
loss and the gradients by its features and the projection are computed while its logits are in the
cache. Positions that do not count are put last, and chunks that hold no others are not computed.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax


# Logits at a time: enough for fast products, and on a CPU few enough to stay in its cache.
_CHUNK = {"cpu": 2**21}
_CHUNK_ELSEWHERE = 2**27
_MULTIPLE = 64  # of positions


class Projection(NamedTuple):
    """What makes logits over V tokens of D features.

    Attributes:
        kernel: `[V, D]`.
        bias: `[V]`, or None.
    """

    kernel: Array
    bias: Array | None

    def logits(self, features: Array) -> Array:
        """`features @ kernel.T + bias`, `[..., V]`, accumulated in float32 at least."""
        wide = jnp.promote_types(features.dtype, jnp.float32)
        kernel = self.kernel.astype(features.dtype)
        product = jnp.einsum("...d,vd->...v", features, kernel, preferred_element_type=wide)
        return product if self.bias is None else product + self.bias.astype(wide)


def cross_entropy(
    features: Array,
    projection: Projection,
    labels: Any,
    mask: Any,
    *,
    smoothing: float = 0.0,
    num_shards: tuple[int, int] = (1, 1),
) -> Array:
    """The cross-entropy of the positions in the mask, in nats, summed: `[]`, float32 at least.

    The target distribution is `smoothing` spread over all V tokens in equal shares, and the rest on
    the label (Szegedy et al. 2015); it sums to 1. What stands at the other positions
    does not exist: its gradient is 0, and so is that of a loss over no position at all.

    Args:
        features: `[..., D]`, what is projected.
        projection: to logits over V tokens.
        labels: int32 `[...]`, in 0..V-1.
        mask: which positions count, bool `[...]`.
        smoothing: in [0, 1).
        num_shards: into how many equal shards the first two axes are cut over devices. Each device
            computes its own shard and needs no other.
    """

    def of_shard(features: Array, labels: Array, mask: Array) -> Array:
        features = features.reshape(-1, features.shape[-1])
        return _total(smoothing, features, projection, labels.reshape(-1), mask.reshape(-1))

    positions = features, jnp.asarray(labels), jnp.asarray(mask)
    if num_shards == (1, 1):
        return of_shard(*positions)
    return jnp.sum(jax.vmap(of_shard)(*(_in_shards(x, num_shards) for x in positions)))


def _in_shards(x: Array, num_shards: tuple[int, int]) -> Array:
    """`[B, T, ...]` as `[shards, positions, ...]`."""
    rows, columns = num_shards
    x = x.reshape(rows, x.shape[0] // rows, columns, x.shape[1] // columns, *x.shape[2:])
    return jnp.swapaxes(x, 1, 2).reshape(rows * columns, -1, *x.shape[4:])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _total(smoothing: float, features: Array, projection: Projection, *positions: Array) -> Array:
    rows, chunks = _sorted(features, projection, *positions)

    def add(number: Array, total: Array) -> Array:
        losses, _ = _chunk_losses(smoothing, projection, rows.chunk(number))
        return total + jnp.sum(losses)

    return lax.fori_loop(0, chunks, add, jnp.zeros((), _wide(features)))


class _Rows(NamedTuple):
    """Positions in whole chunks, those that count first."""

    features: Array  # [chunks, C, D]; 0 where nothing counts
    labels: Array  # [chunks, C]
    mask: Array  # [chunks, C]
    order: Array  # [positions]: where each came from

    def chunk(self, number: Array) -> tuple[Array, Array, Array]:
        return self.features[number], self.labels[number], self.mask[number]


def _sorted(
    features: Array, projection: Projection, labels: Array, mask: Array
) -> tuple[_Rows, Array]:
    """The rows, and how many of their chunks hold something that counts."""
    most = _CHUNK.get(jax.default_backend(), _CHUNK_ELSEWHERE) // len(projection.kernel)
    size = max(1, min(max(most // _MULTIPLE, 1) * _MULTIPLE, len(labels)))
    order = jnp.argsort(~mask, stable=True)

    def chunked(x: Array) -> Array:
        padding = ((0, -len(x) % size), *((0, 0),) * (x.ndim - 1))
        return jnp.pad(x[order], padding).reshape(-1, size, *x.shape[1:])

    # Selected before the products, in which a NaN of padding would reach every gradient.
    features = jnp.where(mask[:, None], features, 0)
    rows = _Rows(chunked(features), chunked(labels), chunked(mask), order)
    return rows, -(-jnp.sum(mask, dtype=jnp.int32) // size)


def _chunk_losses(
    smoothing: float, projection: Projection, chunk: tuple[Array, Array, Array]
) -> tuple[Array, Array]:
    """The losses `[C]` of a chunk and their gradient by its logits, `[C, V]`."""
    features, labels, mask = chunk
    logits = projection.logits(features)
    highest = jnp.max(logits, axis=-1, keepdims=True)
    exponentials = jnp.exp(logits - highest)
    total = jnp.sum(exponentials, axis=-1, keepdims=True)
    share = smoothing / logits.shape[-1]
    own = jnp.take_along_axis(logits, labels[:, None], axis=-1, mode="clip")
    losses = (highest + jnp.log(total) - (1 - smoothing) * own)[:, 0]
    if smoothing:
        losses -= share * jnp.sum(logits, axis=-1)
    # The target is not an array of its own: it is compared where the gradient is written.
    columns = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    target = jnp.where(columns == labels[:, None], 1 - smoothing + share, share)
    gradient = exponentials * (1 / total) - target
    return jnp.where(mask, losses, 0), jnp.where(mask[:, None], gradient, 0)


def _total_forward(
    smoothing: float, features: Array, projection: Projection, *positions: Array
) -> tuple[Array, Any]:
    rows, chunks = _sorted(features, projection, *positions)
    kernel, bias = projection.kernel, projection.bias
    dtype, wide = features.dtype, _wide(features)

    def add(number: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        total, d_features, d_kernel, d_bias = carry
        chunk = rows.chunk(number)
        losses, d_logits = _chunk_losses(smoothing, projection, chunk)
        narrow = d_logits.astype(dtype)
        back = jnp.einsum("cv,vd->cd", narrow, kernel.astype(dtype), preferred_element_type=wide)
        more = jnp.einsum("cv,cd->vd", narrow, chunk[0], preferred_element_type=wide)
        return (
            total + jnp.sum(losses),
            lax.dynamic_update_index_in_dim(d_features, back.astype(dtype), number, 0),
            d_kernel + more,
            d_bias + jnp.sum(d_logits, axis=0),
        )

    none = (jnp.zeros((), wide), jnp.zeros_like(rows.features))
    none += (jnp.zeros(kernel.shape, wide), jnp.zeros(len(kernel), wide))
    total, d_features, d_kernel, d_bias = lax.fori_loop(0, chunks, add, none)
    d_features = d_features.reshape(-1, features.shape[1])[: len(features)]
    gradients = (
        jnp.zeros_like(features).at[rows.order].set(d_features, unique_indices=True),
        d_kernel.astype(kernel.dtype),
        None if bias is None else d_bias.astype(bias.dtype),
    )
    return total, gradients


def _total_backward(smoothing: float, gradients: Any, cotangent: Array) -> tuple[Any, ...]:
    scaled = jax.tree.map(lambda x: (x * cotangent).astype(x.dtype), gradients)
    return scaled[0], Projection(*scaled[1:]), None, None


_total.defvjp(_total_forward, _total_backward)


def _wide(features: Array) -> Any:
    return jnp.promote_types(features.dtype, jnp.float32)
