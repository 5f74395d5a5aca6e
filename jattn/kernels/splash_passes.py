"""Forward and backward of attention on TPUs by JAX's own kernel, "splash attention".

The kernel asks for a mask tile by tile when it is made: `_Tiles` answers from the mask's bounds and
evaluates only what those leave open. It takes sizes that are whole multiples of 128, which inputs
are padded to, and float32: in half precision it would round weights and results from which it then
computes gradients.

Its backward pass takes delta = rowsum(d_out · out) as an argument only inside, where its own
derivative rule calls two functions; these are called here, because − d_lse belongs to delta, and
because out and lse are there already.

It multiplies masked values with 0. So programs with a mask also hold the blockwise passes, for
inputs in which something masked is not finite.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as lazy
from jaxtyping import Array, Float, Int

from jattn import integers, masks
from jattn._types import number
from jattn.kernels import blockwise
from jattn.kernels.lowering import default_settings
from jattn.kernels.passes import Passes, guarded
from jattn.kernels.splash_masks import Fed, as_splash
from jattn.masks import Mask
from jattn.scores import SoftCap
from jattn.softmax import Normalizer
from jattn.spec import Spec


_LANES = 128  # sizes are whole multiples of it
_BLOCK = 512  # queries and keys of a tile at most
_DEAD = 0.5 * kernel.DEFAULT_MASK_VALUE  # the lse of a query without keys is below


class _Tiles(lazy.Mask):
    """A static mask `[T, S]` as the kernel asks for it, a tile at a time."""

    def __init__(self, mask: Mask, T: int, S: int):
        self._mask, self._shape = mask, (T, S)

    @property
    def shape(self) -> tuple[int, int]:
        return self._shape

    def __getitem__(self, place: tuple[slice, slice]) -> np.ndarray:
        runs = [
            np.arange(*x.indices(size), dtype=np.int32)
            for x, size in zip(place, self._shape, strict=True)
        ]
        shape = (len(runs[0]), len(runs[1]))
        tile = masks.Tile.grid(*(masks.Extent(x[:1], x[-1:], x[:1], len(x)) for x in runs))
        kind = int(masks.kinds(self._mask, tile)[0, 0])
        if kind != masks.MIXED:
            return np.full(shape, kind == masks.FULL)
        with jax.ensure_compile_time_eval():
            rows, columns = (masks.as_span(x) for x in runs)
            allowed = self._mask.evaluate(np.int32(0), np.int32(0), rows, columns)
            return np.array(np.broadcast_to(np.asarray(allowed), shape))


def _ids(fed: Fed, T: int, S: int) -> tuple[Array, Array] | None:
    """Ids `[B or 1, T]`, `[B or 1, S]` that are equal where segments and lengths allow."""
    if fed.segments is None and not fed.lengths:
        return None
    q_ids, kv_ids = jnp.zeros((1, T), jnp.int32), jnp.zeros((1, S), jnp.int32)
    if fed.segments is not None:
        q_ids, kv_ids = (
            jnp.atleast_2d(x).astype(jnp.int32) for x in (fed.segments.q_ids, fed.segments.kv_ids)
        )
        if fed.lengths:  # so that there are two that no token has
            q_ids, kv_ids = integers.numbered(q_ids, kv_ids)
    unused = T + S
    for one in fed.lengths:
        q_ids = _outside(q_ids, one.q, unused)
        kv_ids = _outside(kv_ids, one.kv, unused + 1)
    return q_ids, kv_ids


def _outside(ids: Int[Array, "_ t"], length: Any, other: int) -> Int[Array, "_ t"]:
    """The ids, with another one from `length` on (a number or one for each row)."""
    if length is None:
        return ids
    length = jnp.reshape(jnp.asarray(integers.clamped(number(length))), (-1, 1))
    return jnp.where(jnp.arange(ids.shape[1], dtype=jnp.int32)[None, :] < length, ids, other)


def _whole(size: int) -> int:
    return -(-size // _LANES) * _LANES


def _block(size: int) -> int:
    """The largest block that divides a padded length."""
    return math.gcd(size, _BLOCK)


class _Call(NamedTuple):
    """A call in the kernel's terms: sizes padded, queries scaled, heads before tokens."""

    spec: Spec
    fed: Fed
    T: int
    S: int
    N: int
    interpret: bool

    @classmethod
    def of(cls, interpret: bool, spec: Spec, query: Array, key: Array) -> "_Call":
        (_, T, N, _), S = query.shape, key.shape[1]
        return cls(spec, as_splash(spec.mask), T, S, N, interpret)

    def scaled(self, query: Array) -> Array:
        """Queries as the kernel takes them, times the scale."""
        return _padded(query) * jnp.float32(number(self.spec.scale))

    @property
    def ids(self) -> Any:
        """Padded ids `[B or 1, ·]` of queries and keys, or None."""
        found = _ids(self.fed, self.T, self.S)
        if found is None:
            return None
        sizes = (_whole(x.shape[1]) - x.shape[1] for x in found)
        padded = (jnp.pad(x, ((0, 0), (0, n))) for x, n in zip(found, sizes, strict=True))
        return kernel.SegmentIds(*padded)

    def made(self, backward: bool) -> kernel.SplashAttentionKernel:
        """JAX's kernel for this mask; with `backward` it knows the tiles of both passes."""
        T, S = _whole(self.T), _whole(self.S)
        static = self.fed.static
        if self.S < S:
            static = static & masks.Lengths(kv=self.S)
        q, kv, score = _block(T), _block(S), self.spec.score
        blocks = kernel.BlockSizes(q, kv)
        if backward:
            blocks = kernel.BlockSizes(q, kv, kv, q, kv, kv, q, kv)
        return kernel.make_splash_mha(
            lazy.MultiHeadMask([_Tiles(static, T, S)] * self.N),
            block_sizes=blocks,
            save_residuals=True,
            head_shards=1,
            q_seq_shards=1,
            attn_logits_soft_cap=float(score.cap) if isinstance(score, SoftCap) else None,
            interpret=self.interpret,
        )

    def over_rows(self, function: Any, *arrays: Array) -> Any:
        """Maps `function(ids, *arrays)` over batch rows; ids of one row are for all."""
        axes = jax.tree.map(lambda x: 0 if x.shape[0] > 1 else None, self.ids)
        ids = jax.tree.map(lambda x: x if x.shape[0] > 1 else x[0], self.ids)
        return jax.vmap(function, (axes, *[0] * len(arrays)))(ids, *arrays)


def _padded(x: Array) -> Array:
    """`[B, T, N, ...]` as float32 `[B, N, T, ...]`, filled up with zeros behind the heads."""
    x = jnp.moveaxis(x, 2, 1).astype(jnp.float32)
    return jnp.pad(x, [(0, 0), (0, 0)] + [(0, _whole(size) - size) for size in x.shape[2:]])


def _cut(x: Array, *sizes: int) -> Array:
    """The inverse."""
    return jnp.moveaxis(x[(slice(None), slice(None), *map(slice, sizes))], 1, 2)


def _forward(
    interpret: bool, spec: Spec, query: Array, key: Array, value: Array
) -> tuple[Array, Normalizer, Array]:
    call = _Call.of(interpret, spec, query, key)
    operands = (call.scaled(query), _padded(key), _padded(value))
    with default_settings():
        one = functools.partial(_values, call.made(backward=False))
        out, (lse,) = call.over_rows(one, *operands)
    out, lse = _cut(out, call.T, value.shape[-1]), _cut(lse, call.T)
    dead = lse < _DEAD
    out, lse = jnp.where(dead[..., None], 0, out), jnp.where(dead, -jnp.inf, lse)
    # The kernel keeps no maximum apart.
    return out, Normalizer(lse, jnp.zeros_like(lse)), jnp.ones((), bool)


def _backward(
    interpret: bool, spec: Spec, per_query: Any, key: Array, value: Array, _: Array
) -> tuple[Any, Array, Array, Array]:
    query, d_out, lse, _, delta = per_query
    call = _Call.of(interpret, spec, query, key)
    operands = (call.scaled(query), _padded(key), _padded(value))
    operands = (*operands, _padded(lse), _padded(d_out), _padded(delta))
    with default_settings():
        one = functools.partial(_gradients, call.made(backward=True))
        found = call.over_rows(one, *operands)
    d_query, d_key, d_value = (
        _cut(d, x.shape[1], x.shape[3]) for d, x in zip(found, (query, key, value), strict=True)
    )
    return [], d_query * number(spec.scale), d_key, d_value


def _values(made: kernel.SplashAttentionKernel, ids: Any, *qkv: Array) -> Any:
    """`(out [N, T, V], (lse [N, T],))` of one batch row."""
    return made(*qkv, ids)


def _gradients(
    made: kernel.SplashAttentionKernel,
    ids: Any,
    q: Float[Array, "N T H"],
    k: Float[Array, "K S H"],
    v: Float[Array, "K S V"],
    lse: Float[Array, "N T"],
    d_out: Float[Array, "N T V"],
    delta: Float[Array, "N T"],
) -> tuple[Array, Array, Array]:
    """Those of q, k and v of one batch row."""
    sizes, names = made.kwargs["block_sizes"], ("is_mqa", "mask_value", "mask_function")
    common = {name: made.kwargs[name] for name in (*names, "attn_logits_soft_cap", "interpret")}
    common |= {name: getattr(sizes, name) for name in ("q_layout", "k_layout", "v_layout")}
    operands = (q, k, v, ids, None, lse, d_out, delta)
    by_key: Any = kernel._splash_attention_bwd_dkv
    _, d_k, d_v = by_key(
        *operands,
        bq=sizes.block_q_dkv,
        bkv=sizes.block_kv_dkv,
        bkv_compute=sizes.block_kv_dkv_compute,
        mask_info=made.dkv_mask_info,
        use_fused_bwd_kernel=False,  # which holds a part of d_q for each block of keys
        **common,
    )
    by_query: Any = kernel._splash_attention_bwd_dq
    d_q = by_query(
        *operands,
        bq=sizes.block_q_dq,
        bkv=sizes.block_kv_dq,
        mask_info=made.dq_mask_info,
        **common,
    )
    return d_q, d_k, d_v


def passes(platform: str, interpret: bool) -> Passes:
    """Those of the kernel; the blockwise ones where something masked is not finite."""
    forward, backward = (functools.partial(f, interpret) for f in (_forward, _backward))
    return guarded(Passes(forward, backward), blockwise.passes(platform))
