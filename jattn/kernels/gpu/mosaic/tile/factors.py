"""The numbers that kernels take out of their loops over tiles."""

import dataclasses
import math
from typing import NamedTuple

from jattn._pytree import is_static, number
from jattn.spec import Spec


class Factors(NamedTuple):
    """Numbers out of the way of the loops over tiles, of a scale that is known and positive, and of
    dropout. Score functions take products times `before`. The softmax takes scores times `after`,
    in the same operation in which it subtracts the maximum. One of the two is 1: `before`, where
    score functions can count in units of products. Sums are multiplied with `kept` at the end
    instead of the weights that dropout keeps."""

    before: float = 1.0
    after: float = 1.0
    kept: float = 1.0

    @classmethod
    def of(cls, spec: Spec) -> tuple["Factors", Spec]:
        """The factors, and the spec without its scale."""
        scale, found = number(spec.scale), cls(kept=1 / (1 - spec.dropout_rate))
        if not is_static(spec.scale) or not 0 < scale < math.inf:
            return found, spec
        spec = dataclasses.replace(spec, scale=1.0)
        if spec.score is None:
            return found._replace(after=scale), spec
        score = spec.score.per(scale)
        if score is None:
            return found._replace(before=scale), spec
        return found._replace(after=scale), dataclasses.replace(spec, score=score)

    @property
    def gradient(self) -> float:
        """What sums of the scores' cotangents still lack."""
        return self.before * self.after * self.kept


def is_unmodified(spec: Spec) -> bool:
    """Whether scores are products of queries and keys, but for the mask."""
    return spec.score is None and is_static(spec.scale) and spec.scale == 1
