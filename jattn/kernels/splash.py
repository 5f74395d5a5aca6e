"""What of attention JAX's own kernel for TPUs, "splash attention", can do, and what it is fed.

It skips tiles by a mask that is known while tracing, and takes arrays along T and S as ids of
segments. What a mask becomes is said by `as_splash`, an open function: register a class of your own
to have it run here.

    @as_splash.register
    def _(mask: MyMask) -> Fed: ...

The passes stand in `jattn.kernels.splash_passes`, which imports the kernel and with it much of
JAX's compiler for TPUs; so that is done when a program is lowered for one.
"""

import functools
import importlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jattn import masks, scores
from jattn._types import LogSumExp, Output, is_static
from jattn.kernels.passes import Passes, attention
from jattn.masks import Mask
from jattn.spec import Shapes, Spec


INTERPRET = False  # runs the kernel step by step on any platform, for tests


class Fed(NamedTuple):
    """A mask in the kernel's terms: all parts must allow.

    `static` is the same for all rows and heads and holds no arrays; ids are equal where a query
    may attend, lengths as in `masks.Lengths`.
    """

    static: Mask = masks.Full()
    segments: masks.Segments | None = None
    lengths: tuple[masks.Lengths, ...] = ()


@functools.singledispatch
def as_splash(mask: Any) -> Fed:
    """What splash attention is fed for a mask; raises NotImplementedError with the reason."""
    raise NotImplementedError(f"{type(mask).__name__} may differ between batch rows and heads")


@as_splash.register(masks.Full)
@as_splash.register(masks.Empty)
@as_splash.register(masks.Causal)
@as_splash.register(masks.Window)
@as_splash.register(masks.Dilated)
@as_splash.register(masks.Global)
@as_splash.register(masks.Prefix)
def _static(mask: Mask) -> Fed:
    if jax.tree.leaves(mask):
        raise NotImplementedError(f"the array of {type(mask).__name__} is not known while tracing")
    return Fed(mask)


@as_splash.register
def _(mask: masks.Lengths) -> Fed:
    return Fed(lengths=(mask,)) if jax.tree.leaves(mask) else Fed(mask)


@as_splash.register
def _(mask: masks.Segments) -> Fed:
    return Fed(segments=mask)


@as_splash.register
def _(mask: masks.And) -> Fed:
    left, right = as_splash(mask.left), as_splash(mask.right)
    if left.segments is not None and right.segments is not None:
        raise NotImplementedError("it takes one Segments, not two")
    segments = right.segments if left.segments is None else left.segments
    return Fed(left.static & right.static, segments, left.lengths + right.lengths)


@as_splash.register(masks.Or)
@as_splash.register(masks.Not)
def _known(mask: masks.Or | masks.Not) -> Fed:
    parts = [mask.inner] if isinstance(mask, masks.Not) else [mask.left, mask.right]
    if any(fed.segments is not None or fed.lengths for fed in map(as_splash, parts)):
        raise NotImplementedError(f"arrays within {type(mask).__name__}: it only intersects them")
    return Fed(mask)


def supports(spec: Spec, shapes: Shapes) -> str | None:
    """Masks and scores that the kernel knows, in the dtypes that TPUs compute with."""
    return _spec_reason(spec, shapes) or _score_reason(spec) or _mask_reason(spec, shapes)


def _spec_reason(spec: Spec, shapes: Shapes) -> str | None:
    if shapes.dtype not in (jnp.float32, jnp.bfloat16):
        return f"expected float32 or bfloat16, got {shapes.dtype}"
    if spec.q_positions is not None or spec.kv_positions is not None:
        return "positions are given, which are not known while tracing"
    if spec.dropout_rate:
        return "it has no dropout"
    return None if spec.precision is None else "it takes no precision"


def _score_reason(spec: Spec) -> str | None:
    if spec.score is None:
        return None
    if not isinstance(spec.score, scores.SoftCap):
        return f"of score functions it has SoftCap only, got {type(spec.score).__name__}"
    return None if is_static(spec.score.cap) else "the cap is an array, not known while tracing"


def _mask_reason(spec: Spec, shapes: Shapes) -> str | None:
    try:
        static = as_splash(spec.mask).static
    except NotImplementedError as reason:
        return str(reason)
    size = max(512, shapes.T // 64, shapes.S // 64)
    tile = masks.Tile(masks.extents(shapes.T, size), masks.extents(shapes.S, size))
    return None if np.any(masks.kinds(static, tile)) else "the mask leaves nothing"


def passes(platform: str) -> Passes:
    """Those of the kernel; the blockwise ones where something masked is not finite."""
    return importlib.import_module("jattn.kernels.splash_passes").passes(platform, INTERPRET)


def attend(spec: Spec, query: Array, key: Array, value: Array) -> tuple[Output, LogSumExp]:
    """`(out [B, T, N, V], lse [B, N, T])` for one flat batch axis."""
    return attention(passes, spec, query, key, value)
