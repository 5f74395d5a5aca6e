"""Attention for JAX: any mask, any score function, differentiable, exact.

`attention` is the function; `masks` and `scores` are the values it takes.
"""

import importlib
from typing import TYPE_CHECKING, Any

from jattn import cache as cache
from jattn import masks as masks
from jattn import positions as positions
from jattn import scores as scores
from jattn.attention import attention as attention
from jattn.attention import attention_scores as attention_scores
from jattn.attention import attention_weights as attention_weights
from jattn.attention import cached_attention as cached_attention
from jattn.attention import explain as explain
from jattn.mechanisms import additive_attention as additive_attention
from jattn.mechanisms import additive_keys as additive_keys
from jattn.mechanisms import causal_interaction as causal_interaction
from jattn.mechanisms import interaction as interaction
from jattn.mechanisms import multiplicative as multiplicative
from jattn.mechanisms import multiplicative_attention as multiplicative_attention
from jattn.mechanisms import normalised_interaction as normalised_interaction
from jattn.mechanisms import renormalised_causal as renormalised_causal
from jattn.mechanisms import self_attention as self_attention
from jattn.mechanisms import simple_self_attention as simple_self_attention
from jattn.softmax import merge as merge
from jattn.softmax import with_sink as with_sink


if TYPE_CHECKING:
    from jattn import nn as nn

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`jattn.nn` is imported when it is first used: the functions alone do not need Flax."""
    if name == "nn":
        return importlib.import_module("jattn.nn")
    raise AttributeError(f"module 'jattn' has no attribute {name!r}")
