"""Score functions of the distance of two places, whose values kernels look up.

T5's relative bias takes a logarithm for each pair of places. Its values for all T + S − 1 distances
are computed before.
"""

from typing import Any

import jax.numpy as jnp

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


def of(score: scores.RelativeBias, shapes: Shapes) -> ByDistance:
    """The function of a call, where positions are places."""
    before = shapes.T - 1
    bucket = scores.relative_bucket(
        jnp.arange(before + shapes.S, dtype=jnp.int32) - before,
        score.table.shape[0],
        bidirectional=score.bidirectional,
        max_distance=score.max_distance,
    )
    return ByDistance(score.table[bucket].T, before)
