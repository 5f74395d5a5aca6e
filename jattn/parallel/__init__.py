"""Attention to a sequence that is sharded over several devices, with `jax.shard_map`.

`attention` takes whole arrays and a mesh; `attention_shard` is for use within your own
`jax.shard_map`. `cached_attention` decodes with a cache that is sharded along its tokens.
`shard_tokens` reorders tokens so that causal work is balanced.
"""

from jattn.parallel.attend import attention, attention_shard
from jattn.parallel.cached import cached_attention
from jattn.parallel.placement import shard_tokens, token_positions, unshard_tokens
from jattn.parallel.traffic import Exchange, exchanges


__all__ = [
    "Exchange",
    "attention",
    "attention_shard",
    "cached_attention",
    "exchanges",
    "shard_tokens",
    "token_positions",
    "unshard_tokens",
]
__dir__ = __all__.copy
