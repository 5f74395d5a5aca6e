"""Attention for JAX: any mask, any score function, any normalizer, differentiable, exact.

The main function is `attention`; `masks`, `scores` and `normalizers` define the values of its
options.
All examples in the documentation begin with these lines, with queries `[B, T, N, H]` and with keys
and values `[B, S, K, H]`:

>>> import jax, jax.numpy as jnp, numpy as np, jattn
>>> from flax import nnx
>>> from jattn import masks, nn, normalizers, scores
>>> q = jax.random.normal(jax.random.key(0), (2, 5, 4, 8))
>>> k, v = jax.random.normal(jax.random.key(1), (2, 2, 7, 2, 8))
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from jattn import cache, compat, masks, nn, normalizers, parallel, positions, scores, viz
    from jattn.attention import attention, attention_scores, attention_weights
    from jattn.decoding import cached_attention
    from jattn.explanation import explain
    from jattn.generation import generate
    from jattn.linear import LinearState, RandomFeatures, linear_attention
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
    from jattn.sparse import chosen_blocks, native_sparse_attention
    from jattn.statistics import statistics, top_weights
    from jattn.talking_heads import talking_heads_attention

__all__ = [
    "LinearState",
    "RandomFeatures",
    "additive_attention",
    "additive_keys",
    "attention",
    "attention_scores",
    "attention_weights",
    "cache",
    "cached_attention",
    "causal_interaction",
    "chosen_blocks",
    "compat",
    "explain",
    "generate",
    "interaction",
    "linear_attention",
    "masks",
    "merge",
    "multiplicative",
    "multiplicative_attention",
    "native_sparse_attention",
    "nn",
    "normalised_interaction",
    "normalizers",
    "parallel",
    "positions",
    "renormalised_causal",
    "scores",
    "self_attention",
    "simple_self_attention",
    "statistics",
    "talking_heads_attention",
    "top_weights",
    "viz",
    "with_sink",
]
__version__ = "0.1.0"


def __dir__() -> list[str]:
    return __all__


if not TYPE_CHECKING:  # a type checker sees the names above only
    _FILES = {
        "attention": "attention attention_scores attention_weights",
        "decoding": "cached_attention",
        "explanation": "explain",
        "generation": "generate",
        "linear": "LinearState RandomFeatures linear_attention",
        "mechanisms": "additive_attention additive_keys causal_interaction interaction "
        "multiplicative multiplicative_attention normalised_interaction renormalised_causal "
        "self_attention simple_self_attention",
        "softmax": "merge with_sink",
        "sparse": "chosen_blocks native_sparse_attention",
        "statistics": "statistics top_weights",
        "talking_heads": "talking_heads_attention",
    }
    _FILE_OF = {name: file for file, names in _FILES.items() for name in names.split()}

    def __getattr__(name: str) -> Any:
        """Imports a file when one of its names is first used, so that unused parts cost no time."""
        try:
            module = importlib.import_module(f"jattn.{_FILE_OF.get(name, name)}")
        except ModuleNotFoundError as error:
            if error.name != f"jattn.{name}":
                raise
            raise AttributeError(f"module 'jattn' has no attribute {name!r}") from None
        globals()[name] = getattr(module, name) if name in _FILE_OF else module
        return globals()[name]

    class _Function:
        """A function of the package that has the same name as its file.

        When the file is imported, Python sets the package's attribute to the module; this
        descriptor keeps the function.
        """

        def __init__(self, name: str):
            self.name = name

        def __get__(self, package: ModuleType, kind: Any = None) -> Any:
            try:
                return vars(package)[self.name]
            except KeyError:
                return __getattr__(self.name)

        def __set__(self, package: ModuleType, value: Any) -> None:
            if not isinstance(value, ModuleType):
                vars(package)[self.name] = value

    class _Package(ModuleType):
        attention = _Function("attention")
        statistics = _Function("statistics")

    sys.modules[__name__].__class__ = _Package

    importlib.import_module("jattn.kernels.cpu.library").load_cached()
