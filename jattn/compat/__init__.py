"""Attention with the signatures and semantics of other libraries, computed by `jattn.attention`.

from jattn.compat import dot_product_attention       # replaces jax.nn's
with jattn.compat.installed(): ...                   # for code that cannot be edited
nnx.MultiHeadAttention(..., attention_fn=jattn.compat.flax_attention_fn)
model = jattn.compat.equinox_attention(model)        # every layer of an Equinox model
"""

from jattn.compat.equinox_attention import equinox_attention
from jattn.compat.flax_attention import flax_attention_fn
from jattn.compat.installation import Ran, install, installed, report, uninstall
from jattn.compat.jax_attention import dot_product_attention
from jattn.compat.torch_parameters import (
    attention_from_torch,
    attention_to_torch,
    transformer_from_torch,
    transformer_to_torch,
)


__all__ = [
    "Ran",
    "attention_from_torch",
    "attention_to_torch",
    "dot_product_attention",
    "equinox_attention",
    "flax_attention_fn",
    "install",
    "installed",
    "report",
    "transformer_from_torch",
    "transformer_to_torch",
    "uninstall",
]
__dir__ = __all__.copy
