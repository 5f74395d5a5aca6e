"""The constant factors that kernels apply outside of their loops over tiles."""

import dataclasses
import math
from typing import NamedTuple

from jattn._pytree import is_static, number
from jattn.spec import Spec


class Factors(NamedTuple):
    """The constant factors that replace a static positive scale and the scale of dropout.

    product_factor: multiplies products before score functions. It is the scale if the score
        function cannot be applied to unscaled products (see `ScoreFunction.per`), else 1.
    score_factor: multiplies scores in the softmax, in the operation that subtracts the maximum. It
        is the scale in all other cases, else 1.
    dropout_scale: 1 / (1 − dropout rate). It multiplies sums of weighted values once at the end,
        instead of each weight that dropout keeps.
    """

    product_factor: float = 1.0
    score_factor: float = 1.0
    dropout_scale: float = 1.0

    @classmethod
    def of(cls, spec: Spec) -> tuple["Factors", Spec]:
        """Returns the factors, and the spec without its scale."""
        scale, factors = number(spec.scale), cls(dropout_scale=1 / (1 - spec.dropout_rate))
        if not is_static(spec.scale) or not 0 < scale < math.inf:
            return factors, spec
        spec = dataclasses.replace(spec, scale=1.0)
        if spec.score is None:
            return factors._replace(score_factor=scale), spec
        score = spec.score.in_units(scale)
        if score is None:
            return factors._replace(product_factor=scale), spec
        return factors._replace(score_factor=scale), dataclasses.replace(spec, score=score)

    @property
    def gradient(self) -> float:
        """The factor by which the gradients of queries and keys are multiplied at the end."""
        return self.product_factor * self.score_factor * self.dropout_scale


def is_unmodified(spec: Spec) -> bool:
    """Returns whether scores are products of queries and keys, except for the mask."""
    return spec.score is None and is_static(spec.scale) and spec.scale == 1
