"""JAX's own kernels, for comparison with ours. They support few cases."""

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


_CAUSAL = {"full": False, "causal": True, "ungrouped": True}


def attend(name: str, case: str) -> Callable[..., Any]:
    """Returns a function from a call's arrays to the output. It raises NotImplementedError if the
    kernel does not support the case, as implementations do."""

    def run(q: Any, k: Any, v: Any, *rest: Any) -> Any:
        if case not in _CAUSAL:
            raise NotImplementedError(
                f"implementation {name!r}: it is only called for {[*_CAUSAL]}"
            )
        return PEERS[name](q, k, v, _CAUSAL[case])

    return run


def _splash(q: Any, k: Any, v: Any, causal: bool) -> Any:
    """Calls splash attention with its own masks, on heads before tokens; it takes no scale."""
    package = "jax.experimental.pallas.ops.tpu.splash_attention"
    kernel = importlib.import_module(f"{package}.splash_attention_kernel")
    lazy = importlib.import_module(f"{package}.splash_attention_mask")
    shape, size = (q.shape[1], k.shape[1]), min(512, q.shape[1])
    mask = (lazy.CausalMask if causal else lazy.FullMask)(shape)
    call = kernel.make_splash_mha(
        lazy.MultiHeadMask([mask] * q.shape[2]),
        head_shards=1,
        q_seq_shards=1,
        block_sizes=kernel.BlockSizes(*[size] * 8),
    )
    heads_first = (jnp.swapaxes(x, 1, 2) for x in (q * q.shape[-1] ** -0.5, k, v))
    return jnp.swapaxes(jax.vmap(call)(*heads_first), 1, 2)


def _mgpu(q: Any, k: Any, v: Any, causal: bool) -> Any:
    """Calls FlashAttention-3 in Mosaic, in float16, with tiles as wide as ours. It takes no scale,
    and with the compilers of CUDA 12.8 and 12.9 no causal mask."""
    if causal:
        raise NotImplementedError("implementation 'jax_mgpu': no causal mask with these compilers")
    config = mgpu_config(q.shape[-1], causal)
    config = dataclasses.replace(config, block_kv=min(128, config.block_kv))
    half = (x.astype(jnp.float16) for x in (q, k, v))
    return mgpu().attention(*half, config).astype(q.dtype)


def mgpu() -> Any:
    """Returns the module of JAX's FlashAttention-3: `attention(query, key, value, config)`."""
    return importlib.import_module("jax.experimental.pallas.ops.gpu.attention_mgpu")


def mgpu_config(head: int, causal: bool) -> Any:
    """Returns the largest tile sizes of JAX's FlashAttention-3 that fit."""
    wide = {64: 256, 128: 128, 256: 64}.get(head)
    if wide is None:
        raise NotImplementedError(f"implementation 'jax_mgpu': no sizes for heads of {head}")
    return mgpu().TuningConfig(
        64,
        wide,
        2,
        causal=causal,
        compute_wgs_bwd=2 if head < 256 else 1,
        block_q_dkv=64,
        block_kv_dkv=64,
        block_q_dq=64,
        block_kv_dq=64,
    )


PEERS = {"jax_splash": _splash, "jax_mgpu": _mgpu}
"""The kernels by name; the names are used like those of implementations."""
