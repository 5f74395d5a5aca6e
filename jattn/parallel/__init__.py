"""Attention of one sequence that several devices share, under JAX's own partitioner.

`attention` takes whole arrays and a mesh; `attention_shard` is for within your own `jax.shard_map`.
`cached_attention` decodes with a cache whose tokens the devices share.
`shard_tokens` places tokens so that causal work is balanced.
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


def __dir__() -> list[str]:
    return __all__
