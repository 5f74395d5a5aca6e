"""Relative biases of T5 as score functions whose values kernels look up by distance.

T5's bias computes a logarithm for each pair of a query and a key. Without positions, a distance is
the difference of two indices: the biases for all T + S − 1 distances are computed before the
kernel. With positions, the buckets are computed before it, for all distances up to the one from
which on there is only the last bucket.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np

from jattn import scores
from jattn._pytree import array_field, pytree_dataclass, static_field
from jattn.kernels.gpu.mosaic.tile.spec_refs import entries_of
from jattn.spec import Shapes


@pytree_dataclass
class ByDistance(scores.ScoreFunction):
    """The score function score + values[h, kv − q + zero], for distances kv − q ≥ −zero."""

    values: Any = array_field("#N distances")
    zero: int = static_field()

    def evaluate(self, score, b, h, rows, columns):
        index = (columns.positions + self.zero)[None, :] - rows.positions[:, None]
        return score + entries_of(self.values, index).astype(score.dtype)

    def per(self, unit):
        return ByDistance(self.values.astype(jnp.float32) / unit, self.zero)


@pytree_dataclass
class ByBucket(scores.ScoreFunction):
    """The score function score + table[buckets[kv − q + far], h], with kv − q clamped to ±far."""

    table: Any = array_field("buckets N")
    buckets: Any = array_field("distances")
    far: int = static_field()

    def evaluate(self, score, b, h, rows, columns):
        q, kv = rows.positions[:, None], columns.positions[None, :]
        # kv − q may overflow int32, but its absolute value fits uint32.
        distance = (jnp.maximum(q, kv) - jnp.minimum(q, kv)).astype(jnp.uint32)
        clamped = jnp.minimum(distance, np.uint32(self.far)).astype(jnp.int32)
        index = self.far + jnp.where(kv > q, clamped, -clamped)
        bucket = entries_of(self.buckets, index)
        return score + entries_of(self.table, bucket).astype(score.dtype)


def of_places(score: scores.RelativeBias, shapes: Shapes) -> ByDistance:
    """Returns the score function of a call without positions."""
    zero = shapes.T - 1
    distance = jnp.arange(zero + shapes.S, dtype=jnp.int32) - zero
    return ByDistance(score.table[score.bucket(distance)].T, zero)


_MAX_DISTANCE = 2**16  # the greatest distance for which buckets are computed in advance


def of_positions(score: scores.RelativeBias) -> scores.ScoreFunction:
    """Returns the score function for any positions, unchanged if its buckets differ beyond
    `_MAX_DISTANCE`."""
    far = score.max_distance
    if far > _MAX_DISTANCE:
        return score
    distance = jnp.arange(2 * far + 1, dtype=jnp.int32) - far
    return ByBucket(score.table, score.bucket(distance), far)
