"""Text generation by a language model, one token at a time, on a cache.

`generate` continues prompts. `each_token` and `beam_search` are the loops that it uses, for any
model that maps tokens to logits; `sample_tokens` draws tokens from logits.
"""

from jattn.generation.choosing import sample_tokens
from jattn.generation.searches import (
    Ending,
    Generated,
    Hypotheses,
    beam_search,
    check_length_penalty,
    each_token,
    length_penalties,
)
from jattn.generation.text import LanguageModel, generate


__all__ = [
    "Ending",
    "Generated",
    "Hypotheses",
    "LanguageModel",
    "beam_search",
    "check_length_penalty",
    "each_token",
    "generate",
    "length_penalties",
    "sample_tokens",
]
__dir__ = __all__.copy
