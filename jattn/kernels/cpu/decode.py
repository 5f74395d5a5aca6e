"""A few queries against many keys on CPUs by a kernel in C++, `src/decode.cc`, called from XLA.

The kernel reads every key and value once, at the speed of the memory, both in caches (heads before
tokens) and in arrays (tokens before heads). XLA computes what the mask allows and what the score
function adds as arrays `[B, N, T, S]`, which are small beside the keys.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jattn import masks, scores, tile, tuning
from jattn._pytree import is_static, leading, number
from jattn._types import accumulation
from jattn.cache import Cache, Quantized
from jattn.cache.quantized import LARGEST
from jattn.cache.storage import Stored
from jattn.call import Call
from jattn.kernels.common import few_queries, lowering, slicing, tile_schedule
from jattn.kernels.cpu import library
from jattn.kernels.protocol import Reader
from jattn.softmax import Normalizer
from jattn.spec import Shapes, Spec, has_mask


def unsupported(spec: Spec, shapes: Shapes) -> str | None:
    """Returns why the kernel cannot compute a call; None if it can.

    It takes few queries and score functions that add a term, without dropout.
    """
    if reason := few_queries.unsupported(spec, shapes):
        return reason
    if not is_static(spec.scale):
        return "the scale is an array, expected a number"
    kinds = (scores.Alibi, scores.RelativeBias, scores.Bias)
    unknown = [x for x in scores.in_order(spec.score) if not isinstance(x, kinds)]
    return f"it has no {type(unknown[0]).__name__}" if unknown else None


def pays(spec: Spec, shapes: Shapes) -> bool:
    """Returns whether this kernel is available and faster on plain arrays than `attention.cc`."""
    if shapes.S < tuning.current().many_keys or unsupported(spec, shapes):
        return False
    return unavailable(shapes.dtype) is None


def unavailable(dtype: DTypeLike) -> str | None:
    """Returns why the kernel cannot run on this machine, for queries of a dtype, or None."""
    return library.unavailable("decode", accumulation(dtype))


class PagedKV(NamedTuple):
    """Keys and values in pages, `[P, K, page, H]`, or `[P, page, K, H]` if `by_token`.

    `table` lists the pages of each batch row. Without a table, row b has page b alone. If
    `value_size` is V, values are the first V numbers of each row of `values`, which may be `keys`.
    Quantised numbers are not `by_token`.
    """

    keys: Stored
    values: Stored
    table: Int[Array, "B M"] | None = None
    by_token: bool = False
    value_size: int | None = None


def _over_heads(
    spec: Spec, shapes: Shapes, dtype: Any, function: Callable[[slicing.HeadTile], Array]
) -> Array:
    """Computes `function` for all heads, `[B, N, T, S]`; B or N is 1 if all results are equal."""
    _, T, S, N, *_ = shapes
    batch, heads = leading(spec)
    is_predicate = lambda x: isinstance(x, masks.Predicate)  # noqa: E731
    varies = any(map(is_predicate, jax.tree.leaves(spec.mask, is_leaf=is_predicate)))
    B = shapes.B if varies or math.prod(batch) > 1 else 1
    N = N if varies or heads > 1 or spec.score is not None else 1

    def one_head(spec: Spec, b: Array, h: Array, _: Array) -> Array:
        whole = slicing.HeadTile.at(spec, b, h, 0, T, tile_schedule.TileRun(0, S, True))
        return jnp.broadcast_to(function(whole), (T, S))

    return tile.over_heads(one_head, spec, (jnp.zeros((B, T, N, 1), dtype),), (), out_axes=0)


def _allowed(spec: Spec, shapes: Shapes) -> Bool[Array, "b n T S"]:
    """The pairs that the mask allows; of size 0 if it allows all."""
    if not has_mask(spec):
        return jnp.zeros((1, 1, 1, 0), bool)

    def evaluate(head: slicing.HeadTile) -> Array:
        return jnp.asarray(head.spec.mask.evaluate(head.b, head.h, head.rows, head.columns))

    return _over_heads(dataclasses.replace(spec, score=None), shapes, bool, evaluate)


def _bias(spec: Spec, shapes: Shapes, dtype: DTypeLike) -> Float[Array, "b n T S"]:
    """The terms that the score function adds; of size 0 if it adds none."""
    if spec.score is None:
        return jnp.zeros((1, 1, 1, 0), dtype)
    zeros = jnp.zeros((shapes.T, shapes.S), dtype)
    spec = dataclasses.replace(spec, mask=masks.Full())
    return _over_heads(spec, shapes, dtype, lambda head: head.modify(zeros, False))


def attend(
    spec: Spec, query: Float[Array, "B T N H"], paged: PagedKV
) -> tuple[Float[Array, "B T N V"], Normalizer]:
    """Computes the output in the dtype of sums, and the normalizers `[B, T, N]`."""
    (B, T, N, _), dtype = query.shape, accumulation(query.dtype)
    table = jnp.zeros((B, 0), jnp.int32) if paged.table is None else paged.table
    page = paged.keys.shape[1 if paged.by_token else 2]
    S, K = page * max(1, table.shape[1]), paged.keys.shape[2 if paged.by_token else 1]
    H = paged.keys.shape[-1]
    V = paged.values.shape[-1] if paged.value_size is None else paged.value_size
    shapes = Shapes((B,), T, S, N, K, H, V, query.dtype)
    rows = jax.ShapeDtypeStruct((B, T, N), dtype)
    like = [jax.ShapeDtypeStruct((B, T, N, V), dtype), rows, rows]
    name = library.target("decode", dtype)
    (keys, key_scales), (values, value_scales) = map(_numbers_and_scales, paged[:2])
    out, maximum, log_total = jax.ffi.ffi_call(name, like, vmap_method="broadcast_all")(
        query.astype(dtype),
        keys,
        values,
        key_scales,
        value_scales,
        table,
        _allowed(spec, shapes),
        _bias(spec, shapes, dtype),
        scale=float(number(spec.scale)),
        by_token=paged.by_token,
    )
    return out, Normalizer(maximum, log_total)


def _numbers_and_scales(stored: Stored) -> tuple[Array, Array]:
    """Returns stored numbers and their scales `[P, K, page]`, of size 0 if they have none."""
    if isinstance(stored, Quantized):
        return stored.numbers, stored.scales
    return stored, jnp.zeros((1, 1, 0), jnp.float32)


def as_paged(key: Float[Array, "B S K H"], value: Float[Array, "B S K V"]) -> PagedKV:
    """Returns arrays of keys and values as pages: each batch row is one page. Floats of 8 bits are
    converted, as the kernel would read them as quantised numbers, which have scales."""
    if key.dtype in LARGEST or not readable(key.dtype, key.dtype):
        key, value = (x.astype(accumulation(x.dtype)) for x in (key, value))
    return PagedKV(key, value, by_token=True)


def readable(dtype: DTypeLike, query_dtype: DTypeLike) -> bool:
    """Returns whether the kernel reads keys of a dtype: that of sums or, if that is float32, also
    bfloat16 and quantised numbers."""
    sums = accumulation(query_dtype)
    return dtype == sums or (sums == jnp.float32 and (dtype == jnp.bfloat16 or dtype in LARGEST))


def _unreadable(_: str, call: Call, cache: Cache) -> str | None:
    """Returns why the kernel cannot read a cache in place for a call in this program, or None."""
    if lowering.exported():
        return "an exported program may run where its library is not"
    kinds = cache.keys.dtype, cache.values.dtype
    if kinds[0] != kinds[1] or not readable(kinds[0], call.shapes.dtype):
        return f"it cannot read keys of {kinds[0]} and values of {kinds[1]}"
    return unsupported(call.spec, call.shapes) or unavailable(call.shapes.dtype)


def _read(_: str, spec: Spec, query: Array, cache: Cache) -> tuple[Array, Normalizer]:
    return attend(spec, query, PagedKV(*cache.pages(), value_size=cache.value_size))


READER = Reader(_unreadable, _read)
