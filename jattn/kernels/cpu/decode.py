"""A few queries against many keys on CPUs by a kernel in C++, `src/decode.cc`, called from XLA.

It reads every key and value once, as fast as the memory gives them, whether heads lie before tokens
as in a cache or tokens before heads as in arrays. What a mask allows, and what a score function
adds, it is handed as arrays `[B, N, T, S]`, computed by XLA: next to the keys they are small.
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
from jattn._types import Tree, accumulation
from jattn.cache import Cache
from jattn.call import Call
from jattn.kernels.common import few_queries, lowering, slicing, tile_schedule
from jattn.kernels.cpu import library
from jattn.kernels.protocol import Reader
from jattn.softmax import Normalizer
from jattn.spec import Shapes, Spec, has_mask


def unsupported(spec: Spec, shapes: Shapes) -> str | None:
    """Why it cannot compute a call: it takes few queries, score functions that add, no dropout."""
    if reason := few_queries.unsupported(spec, shapes):
        return reason
    if not is_static(spec.scale):
        return "the scale is an array, expected a number"
    kinds = (scores.Alibi, scores.RelativeBias, scores.Bias)
    unknown = [x for x in scores.in_order(spec.score) if not isinstance(x, kinds)]
    return f"it has no {type(unknown[0]).__name__}" if unknown else None


def pays(spec: Spec, shapes: Shapes) -> bool:
    """Whether plain arrays go faster by it than by `attention.cc`, and its library is there."""
    if shapes.S < tuning.current().many_keys or unsupported(spec, shapes):
        return False
    return unavailable(shapes.dtype) is None


def unavailable(dtype: DTypeLike) -> str | None:
    """Why it cannot run here now, for queries of a dtype."""
    return library.unavailable("decode", accumulation(dtype))


class PagedKV(NamedTuple):
    """Keys and values in pages, `[P, K, page, H]`, or `[P, page, K, H]` if `by_token`.

    `table` lists the pages of each batch row. Without a table, row b has page b alone.
    """

    keys: Float[Array, "P _ _ H"]
    values: Float[Array, "P _ _ V"]
    table: Int[Array, "B M"] | None = None
    by_token: bool = False


def _functions(tree: Tree, kind: Any) -> bool:
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kind))
    return any(isinstance(x, kind) for x in leaves)


def _over_all(
    spec: Spec, shapes: Shapes, kind: Any, one: Callable[[slicing.HeadTile], Array]
) -> Array:
    """`one` of all heads, `[1 or B, 1 or N, T, S]`: of one where all are alike."""
    _, T, S, N, *_ = shapes
    batch, heads = leading(spec)
    by_any = _functions(spec.mask, masks.Predicate)
    B = shapes.B if by_any or math.prod(batch) > 1 else 1
    N = N if by_any or heads > 1 or spec.score is not None else 1

    def head(spec: Spec, b: Array, h: Array, _: Array) -> Array:
        here = slicing.HeadTile.at(spec, b, h, 0, T, tile_schedule.TileRun(0, S, True))
        return jnp.broadcast_to(one(here), (T, S))

    return tile.over_heads(head, spec, (jnp.zeros((B, T, N, 1), kind),), (), out_axes=0)


def _allowed(spec: Spec, shapes: Shapes) -> Bool[Array, "b n T S"]:
    """What the mask allows; of size 0 if everything."""
    if not has_mask(spec):
        return jnp.zeros((1, 1, 1, 0), bool)

    def one(here: slicing.HeadTile) -> Array:
        return jnp.asarray(here.spec.mask.evaluate(here.b, here.h, here.rows, here.columns))

    return _over_all(dataclasses.replace(spec, score=None), shapes, bool, one)


def _added(spec: Spec, shapes: Shapes, dtype: DTypeLike) -> Float[Array, "b n T S"]:
    """What the score function adds; of size 0 if nothing."""
    if spec.score is None:
        return jnp.zeros((1, 1, 1, 0), dtype)
    zeros = jnp.zeros((shapes.T, shapes.S), dtype)
    spec = dataclasses.replace(spec, mask=masks.Full())
    return _over_all(spec, shapes, dtype, lambda here: here.modify(zeros, False))


def attend(
    spec: Spec, query: Float[Array, "B T N H"], paged: PagedKV
) -> tuple[Float[Array, "B T N V"], Normalizer]:
    """The output in the dtype of sums, and the normalizers `[B, T, N]`."""
    (B, T, N, _), dtype = query.shape, accumulation(query.dtype)
    table = jnp.zeros((B, 0), jnp.int32) if paged.table is None else paged.table
    page = paged.keys.shape[1 if paged.by_token else 2]
    S, K = page * max(1, table.shape[1]), paged.keys.shape[2 if paged.by_token else 1]
    H, V = paged.keys.shape[-1], paged.values.shape[-1]
    shapes = Shapes((B,), T, S, N, K, H, V, query.dtype)
    rows = jax.ShapeDtypeStruct((B, T, N), dtype)
    like = [jax.ShapeDtypeStruct((B, T, N, V), dtype), rows, rows]
    name = library.target("decode", dtype)
    run = jax.ffi.ffi_call(name, like, vmap_method="broadcast_all")
    out, maximum, log_total = run(
        query.astype(dtype),
        paged.keys,
        paged.values,
        table,
        _allowed(spec, shapes),
        _added(spec, shapes, dtype),
        scale=float(number(spec.scale)),
        by_token=paged.by_token,
    )
    return out, Normalizer(maximum, log_total)


def as_paged(key: Float[Array, "B S K H"], value: Float[Array, "B S K V"]) -> PagedKV:
    """Arrays of keys and values, as `attention` takes them: each batch row is one page."""
    if not readable(key.dtype, key.dtype):
        key, value = (x.astype(accumulation(x.dtype)) for x in (key, value))
    return PagedKV(key, value, by_token=True)


def readable(dtype: DTypeLike, query_dtype: DTypeLike) -> bool:
    """Whether it reads keys of a dtype: that of sums, or bfloat16 for sums in float32."""
    sums = accumulation(query_dtype)
    return dtype == sums or (dtype == jnp.bfloat16 and sums == jnp.float32)


def _unreadable(_: str, call: Call, cache: Cache) -> str | None:
    """Why it cannot read a cache where it lies for a call in this program."""
    if lowering.exported():
        return "an exported program may run where its library is not"
    kinds = cache.keys.dtype, cache.values.dtype
    if kinds[0] != kinds[1] or not readable(kinds[0], call.shapes.dtype):
        return f"it reads no keys of {kinds[0]} and values of {kinds[1]}"
    return unsupported(call.spec, call.shapes) or unavailable(call.shapes.dtype)


def _read(_: str, spec: Spec, query: Array, cache: Cache) -> tuple[Array, Normalizer]:
    return attend(spec, query, PagedKV(*cache.pages()))


READER = Reader(_unreadable, _read)
