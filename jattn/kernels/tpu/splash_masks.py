"""What JAX's own kernel for TPUs, "splash attention", is given for a mask.

It skips tiles by a mask that is known while tracing, and takes arrays along T and S as ids of
segments. `as_splash` is an open function: register a class of your own to have it run there.

    @as_splash.register
    def _(mask: MyMask) -> KernelMask: ...
"""

import functools
from typing import Any, NamedTuple

import jax

from jattn import masks
from jattn.masks import Mask


class KernelMask(NamedTuple):
    """A mask in the kernel's terms: all parts must allow.

    `static` is the same for all rows and heads and holds no arrays; ids are equal where a query
    may attend, lengths as in `masks.Lengths`.
    """

    static: Mask = masks.Full()
    segments: masks.Segments | None = None
    lengths: tuple[masks.Lengths, ...] = ()


@functools.singledispatch
def as_splash(mask: Any) -> KernelMask:
    """What splash attention is given for a mask; raises NotImplementedError with the reason."""
    raise NotImplementedError(f"{type(mask).__name__} may differ between batch rows and heads")


@as_splash.register(masks.Full)
@as_splash.register(masks.Empty)
@as_splash.register(masks.Causal)
@as_splash.register(masks.Window)
@as_splash.register(masks.Dilated)
@as_splash.register(masks.Global)
@as_splash.register(masks.Prefix)
def _static(mask: Mask) -> KernelMask:
    if jax.tree.leaves(mask):
        raise NotImplementedError(f"the array of {type(mask).__name__} is not known while tracing")
    return KernelMask(mask)


@as_splash.register
def _(mask: masks.Lengths) -> KernelMask:
    return KernelMask(lengths=(mask,)) if jax.tree.leaves(mask) else KernelMask(mask)


@as_splash.register
def _(mask: masks.Segments) -> KernelMask:
    return KernelMask(segments=mask)


@as_splash.register
def _(mask: masks.And) -> KernelMask:
    left, right = as_splash(mask.left), as_splash(mask.right)
    if left.segments is not None and right.segments is not None:
        raise NotImplementedError("it takes one Segments, not two")
    segments = right.segments if left.segments is None else left.segments
    return KernelMask(left.static & right.static, segments, left.lengths + right.lengths)


@as_splash.register(masks.Or)
@as_splash.register(masks.Not)
def _known(mask: masks.Or | masks.Not) -> KernelMask:
    parts = [mask.inner] if isinstance(mask, masks.Not) else [mask.left, mask.right]
    if any(x.segments is not None or x.lengths for x in map(as_splash, parts)):
        raise NotImplementedError(f"arrays within {type(mask).__name__}: it only intersects them")
    return KernelMask(mask)
