"""Score functions of the distance of two places or positions, whose values kernels look up.

T5's relative bias takes a logarithm for each pair. Of places its values for all T + S − 1 distances
are computed before; of positions that are given its buckets, for all distances that have not the
first or last one.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np

from jattn import scores
from jattn._pytree import array_field, pytree_dataclass, static_field
from jattn.spec import Shapes


@pytree_dataclass
class ByDistance(scores.ScoreFunction):
    """score + values[h, kv − q + before]."""

    values: Any = array_field("#N distances")  # a `GatherRef` in kernels
    before: int = static_field()

    def evaluate(self, score, b, h, rows, columns):
        place = (columns.positions + self.before)[None, :] - rows.positions[:, None]
        return score + self.values.inside(place).astype(score.dtype)

    def per(self, unit):
        return ByDistance(self.values.astype(jnp.float32) / unit, self.before)


@pytree_dataclass
class ByBucket(scores.ScoreFunction):
    """score + table[buckets[kv − q + far], h], where distances are held within ±far."""

    table: Any = array_field("buckets N")  # both `GatherRef`s in kernels
    buckets: Any = array_field("distances")
    far: int = static_field()

    def evaluate(self, score, b, h, rows, columns):
        q, kv = rows.positions[:, None], columns.positions[None, :]
        apart = (jnp.maximum(q, kv) - jnp.minimum(q, kv)).astype(jnp.uint32)  # 32 bits suffice
        near = jnp.minimum(apart, np.uint32(self.far)).astype(jnp.int32)
        place = self.far + jnp.where(kv > q, near, -near)
        return score + self.table.inside(self.buckets.inside(place)).astype(score.dtype)


def of_places(score: scores.RelativeBias, shapes: Shapes) -> ByDistance:
    """The function of a call, where positions are places."""
    before = shapes.T - 1
    distance = jnp.arange(before + shapes.S, dtype=jnp.int32) - before
    return ByDistance(score.table[score.bucket(distance)].T, before)


_FARTHEST = 2**16  # of tables of buckets


def of_positions(score: scores.RelativeBias) -> scores.ScoreFunction:
    """The function for any positions; as it is where buckets are for greater distances."""
    far = score.max_distance
    if far > _FARTHEST:
        return score
    distance = jnp.arange(2 * far + 1, dtype=jnp.int32) - far
    return ByBucket(score.table, score.bucket(distance), far)
