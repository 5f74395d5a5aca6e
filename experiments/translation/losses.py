"""The loss: cross-entropy over the vocabulary, one chunk of positions at a time.

The logits `[positions, V]` would be by far the largest array of a training step, so they are never
stored whole. For each chunk of positions the loss computes the logits and, while these are in the
cache, their losses and the gradients of the features and of the projection. Masked positions are
sorted to the end, and chunks of masked positions alone are skipped.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax


# Logits in a chunk: enough for fast products, and on a CPU few enough to stay in its cache.
_CHUNK = {"cpu": 2**21}
_CHUNK_ELSEWHERE = 2**27
_MULTIPLE = 64  # the number of positions in a chunk is a multiple of this


class Projection(NamedTuple):
    """A linear projection from D features to logits over V tokens.

    Attributes:
        kernel: `[V, D]`.
        bias: `[V]`, or None.
    """

    kernel: Array
    bias: Array | None

    def logits(self, features: Array) -> Array:
        """Returns `features @ kernel.T + bias`, `[..., V]`, in float32 or a wider dtype."""
        wide = jnp.promote_types(features.dtype, jnp.float32)
        kernel = self.kernel.astype(features.dtype)
        product = jnp.einsum("...d,vd->...v", features, kernel, preferred_element_type=wide)
        return product if self.bias is None else product + self.bias.astype(wide)


def cross_entropy(
    features: Array, projection: Projection, labels: Any, mask: Any, **options: Any
) -> Array:
    """Returns the first of `cross_entropies`, the loss with label smoothing."""
    return cross_entropies(features, projection, labels, mask, **options)[0]


def cross_entropies(
    features: Array,
    projection: Projection,
    labels: Any,
    mask: Any,
    *,
    smoothing: float = 0.0,
    num_shards: tuple[int, int] = (1, 1),
) -> Array:
    """Returns the sum of the cross-entropies at the positions in the mask, in nats: with label
    smoothing, and without it. Only the first is differentiable.

    The target distribution has `smoothing` spread evenly over all V tokens and the rest on the
    label (Szegedy et al. 2015). Values at the other positions, NaN included, have no influence and
    gradient 0; a loss over no position at all is 0 with gradient 0.

    Args:
        features: the inputs of the projection, `[..., D]`.
        projection: the projection to logits over V tokens.
        labels: int32 `[...]`, in 0..V-1.
        mask: bool `[...]`, true at the positions that count.
        smoothing: the weight of the uniform distribution, in [0, 1).
        num_shards: the numbers of equal device shards of the first two axes. Each device computes
            the loss of its shard alone.

    Returns:
        The losses, `[2]`, float32 or a wider dtype.
    """

    def shard_loss(features: Array, labels: Array, mask: Array) -> Array:
        features = features.reshape(-1, features.shape[-1])
        return _total(smoothing, features, projection, labels.reshape(-1), mask.reshape(-1))

    positions = features, jnp.asarray(labels), jnp.asarray(mask)
    if num_shards == (1, 1):
        return shard_loss(*positions)
    return jnp.sum(jax.vmap(shard_loss)(*(_in_shards(x, num_shards) for x in positions)), axis=0)


def _in_shards(x: Array, num_shards: tuple[int, int]) -> Array:
    """Reshapes `[B, T, ...]` to `[shards, positions, ...]`."""
    rows, columns = num_shards
    x = x.reshape(rows, x.shape[0] // rows, columns, x.shape[1] // columns, *x.shape[2:])
    return jnp.swapaxes(x, 1, 2).reshape(rows * columns, -1, *x.shape[4:])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _total(smoothing: float, features: Array, projection: Projection, *positions: Array) -> Array:
    rows, chunks = _sorted(features, projection, *positions)

    def add(number: Array, total: Array) -> Array:
        losses, _ = _chunk_losses(smoothing, projection, rows.chunk(number))
        return total + jnp.sum(losses, axis=1)

    return lax.fori_loop(0, chunks, add, jnp.zeros(2, _wide(features)))


class _Rows(NamedTuple):
    """The positions in whole chunks, unmasked positions first."""

    features: Array  # [chunks, C, D]; 0 at masked positions
    labels: Array  # [chunks, C]
    mask: Array  # [chunks, C]
    order: Array  # [positions]: the original index of each position

    def chunk(self, number: Array) -> tuple[Array, Array, Array]:
        return self.features[number], self.labels[number], self.mask[number]


def _sorted(
    features: Array, projection: Projection, labels: Array, mask: Array
) -> tuple[_Rows, Array]:
    """Returns the sorted rows, and the number of chunks that hold unmasked positions."""
    max_rows = _CHUNK.get(jax.default_backend(), _CHUNK_ELSEWHERE) // len(projection.kernel)
    size = max(1, min(max(max_rows // _MULTIPLE, 1) * _MULTIPLE, len(labels)))
    order = jnp.argsort(~mask, stable=True)

    def chunked(x: Array) -> Array:
        padding = ((0, -len(x) % size), *((0, 0),) * (x.ndim - 1))
        return jnp.pad(x[order], padding).reshape(-1, size, *x.shape[1:])

    # Zeroed before the products, where a NaN in the padding would reach every gradient.
    features = jnp.where(mask[:, None], features, 0)
    rows = _Rows(chunked(features), chunked(labels), chunked(mask), order)
    return rows, -(-jnp.sum(mask, dtype=jnp.int32) // size)


def _chunk_losses(
    smoothing: float, projection: Projection, chunk: tuple[Array, Array, Array]
) -> tuple[Array, Array]:
    """Returns the losses `[2, C]` of a chunk, with and without label smoothing, and the gradients
    `[C, V]` of the first by the logits."""
    features, labels, mask = chunk
    logits = projection.logits(features)
    highest = jnp.max(logits, axis=-1, keepdims=True)
    exponentials = jnp.exp(logits - highest)
    total = jnp.sum(exponentials, axis=-1, keepdims=True)
    share = smoothing / logits.shape[-1]
    label_logits = jnp.take_along_axis(logits, labels[:, None], axis=-1, mode="clip")
    normalizers = highest + jnp.log(total)
    losses = (normalizers - (1 - smoothing) * label_logits)[:, 0]
    if smoothing:
        losses -= share * jnp.sum(logits, axis=-1)
    both = jnp.stack([losses, (normalizers - label_logits)[:, 0]])
    # XLA fuses the target distribution into the gradient, so that it is never stored.
    columns = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    target = jnp.where(columns == labels[:, None], 1 - smoothing + share, share)
    gradient = exponentials * (1 / total) - target
    return jnp.where(mask, both, 0), jnp.where(mask[:, None], gradient, 0)


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
        d_chunk = jnp.einsum("cv,vd->cd", narrow, kernel.astype(dtype), preferred_element_type=wide)
        d_product = jnp.einsum("cv,cd->vd", narrow, chunk[0], preferred_element_type=wide)
        return (
            total + jnp.sum(losses, axis=1),
            lax.dynamic_update_index_in_dim(d_features, d_chunk.astype(dtype), number, 0),
            d_kernel + d_product,
            d_bias + jnp.sum(d_logits, axis=0),
        )

    zeros = (jnp.zeros(2, wide), jnp.zeros_like(rows.features))
    zeros += (jnp.zeros(kernel.shape, wide), jnp.zeros(len(kernel), wide))
    total, d_features, d_kernel, d_bias = lax.fori_loop(0, chunks, add, zeros)
    d_features = d_features.reshape(-1, features.shape[1])[: len(features)]
    gradients = (
        jnp.zeros_like(features).at[rows.order].set(d_features, unique_indices=True),
        d_kernel.astype(kernel.dtype),
        None if bias is None else d_bias.astype(bias.dtype),
    )
    return total, gradients


def _total_backward(smoothing: float, gradients: Any, cotangent: Array) -> tuple[Any, ...]:
    scaled = jax.tree.map(lambda x: (x * cotangent[0]).astype(x.dtype), gradients)
    return scaled[0], Projection(*scaled[1:]), None, None


_total.defvjp(_total_forward, _total_backward)


def _wide(features: Array) -> Any:
    return jnp.promote_types(features.dtype, jnp.float32)
