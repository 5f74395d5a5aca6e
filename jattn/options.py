"""The options of a call of attention, declared once; `attention` explains them.

A function that passes options on takes `**options: Unpack[Options]`, or another class of this file
if some options do not apply to it.
"""

import inspect
from typing import Any, TypedDict

from jaxtyping import Array, Float

from jattn._types import AnyArray, Positions
from jattn.masks import MaskLike
from jattn.normalizers import NormalizerLike
from jattn.scores import ScoreLike


class Rules(TypedDict, total=False):
    """The options that turn products of queries and keys into scores, except for positions."""

    mask: MaskLike
    score: ScoreLike
    scale: float | Array | None
    precision: Any


class ScoreOptions(Rules, Positions, total=False):
    """The options of `attention_scores`."""


class StatisticsOptions(ScoreOptions, total=False):
    """The options of `statistics` and `top_weights`."""

    normalizer: NormalizerLike


class RulesAndSink(Rules, total=False):
    """The options of `parallel.cached_attention`."""

    normalizer: NormalizerLike
    sink: float | Float[AnyArray, "..."] | None


class DropoutOptions(TypedDict, total=False):
    """The options of dropout."""

    dropout_rate: float
    dropout_key: Array | None


class WeightOptions(RulesAndSink, Positions, DropoutOptions, total=False):
    """The options of `attention_weights`."""


class CachedOptions(RulesAndSink, DropoutOptions, total=False):
    """The options of `cached_attention`: the cache knows the positions."""

    implementation: str | None


class Options(CachedOptions, Positions, total=False):
    """All options of `attention` except `return_lse`."""


def parameters_of(options: Any) -> dict[str, inspect.Parameter]:
    """Returns the keyword arguments that one of these classes declares, with their defaults."""
    return {
        name: inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=0.0 if name == "dropout_rate" else None,
            annotation=annotation,
        )
        for name, annotation in options.__annotations__.items()
    }
