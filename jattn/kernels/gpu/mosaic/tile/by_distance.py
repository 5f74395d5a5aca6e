"""Score functions of the distance of two places or positions, whose values kernels look up.

T5's relative bias takes a logarithm for each pair. For places, its values for all T + S − 1
distances are computed in advance. For given positions, its buckets are, for all distances but those
that have the first or last one.
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
    """score + values[h, kv − q + zero]."""

    values: Any = array_field("#N distances")
    zero: int = static_field()

    def evaluate(self, score, b, h, rows, columns):
        place = (columns.positions + self.zero)[None, :] - rows.positions[:, None]
        return score + entries_of(self.values, place).astype(score.dtype)

    def per(self, unit):
        return ByDistance(self.values.astype(jnp.float32) / unit, self.zero)


@pytree_dataclass
class ByBucket(scores.ScoreFunction):
    """score + table[buckets[kv − q + far], h], where distances are clamped to ±far."""

    table: Any = array_field("buckets N")
    buckets: Any = array_field("distances")
    far: int = static_field()

    def evaluate(self, score, b, h, rows, columns):
        q, kv = rows.positions[:, None], columns.positions[None, :]
        distance = (jnp.maximum(q, kv) - jnp.minimum(q, kv)).astype(jnp.uint32)  # fits 32 bits
        clamped = jnp.minimum(distance, np.uint32(self.far)).astype(jnp.int32)
        place = self.far + jnp.where(kv > q, clamped, -clamped)
        bucket = entries_of(self.buckets, place)
        return score + entries_of(self.table, bucket).astype(score.dtype)


def of_places(score: scores.RelativeBias, shapes: Shapes) -> ByDistance:
    """Returns the function of a call whose positions are places."""
    zero = shapes.T - 1
    distance = jnp.arange(zero + shapes.S, dtype=jnp.int32) - zero
    return ByDistance(score.table[score.bucket(distance)].T, zero)


_MAX_DISTANCE = 2**16  # of tables of buckets


def of_positions(score: scores.RelativeBias) -> scores.ScoreFunction:
    """Returns the function for any positions, unchanged if it has buckets for greater distances."""
    far = score.max_distance
    if far > _MAX_DISTANCE:
        return score
    distance = jnp.arange(2 * far + 1, dtype=jnp.int32) - far
    return ByBucket(score.table, score.bucket(distance), far)
