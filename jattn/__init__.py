"""Attention for JAX: any mask, any score function, differentiable, exact.

`attention` is the function; `masks` and `scores` are the values it takes.
"""

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jattn import cache, masks, scores
from jattn.attention import (
    attention,
    attention_scores,
    attention_weights,
    cached_attention,
    explain,
)
from jattn.mechanisms import (
    additive_attention,
    additive_keys,
    causal_interaction,
    interaction,
    multiplicative,
    multiplicative_attention,
    normalised_interaction,
    renormalised_causal,
    self_attention,
    simple_self_attention,
)
from jattn.softmax import merge, with_sink
from jattn.statistics import statistics, top_weights


if TYPE_CHECKING:
    from jattn import compat, nn, parallel, positions, viz
    from jattn.generation import generate

__all__ = [
    "additive_attention",
    "additive_keys",
    "attention",
    "attention_scores",
    "attention_weights",
    "cache",
    "cached_attention",
    "causal_interaction",
    "compat",
    "explain",
    "generate",
    "interaction",
    "masks",
    "merge",
    "multiplicative",
    "multiplicative_attention",
    "nn",
    "normalised_interaction",
    "parallel",
    "positions",
    "renormalised_causal",
    "scores",
    "self_attention",
    "simple_self_attention",
    "statistics",
    "top_weights",
    "viz",
    "with_sink",
]
__version__ = "0.1.0"


def __dir__() -> list[str]:
    return __all__


if not TYPE_CHECKING:  # for a type checker there are the names above and no others
    generate: Callable[..., Any]  # that of jattn.generation

    def __getattr__(name: str) -> Any:
        """Modules that the functions above do without are imported when they are first used."""
        if name == "generate":
            return importlib.import_module("jattn.generation").generate
        if name in ("compat", "nn", "parallel", "positions", "viz"):
            return importlib.import_module(f"jattn.{name}")
        raise AttributeError(f"module 'jattn' has no attribute {name!r}")
