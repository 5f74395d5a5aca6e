"""The kernels in Pallas for GPUs under one name: that for the GPU of the program is chosen."""

from types import ModuleType
from typing import NoReturn

from jaxtyping import Array

from jattn._types import Tree
from jattn.cache import Cache
from jattn.kernels.common import few_queries
from jattn.kernels.common.vjp import AttentionVJP
from jattn.kernels.gpu.mosaic.kernels import ampere, blackwell, hopper
from jattn.kernels.gpu.mosaic.machine import device, versions
from jattn.softmax import Normalizer
from jattn.spec import Shapes, Spec


def supports(spec: Spec, shapes: Shapes) -> str | None:
    """None, or why no kernel can compute the call on any GPU."""
    reasons = [kernel.supports(spec, shapes) for kernel in (hopper, blackwell, ampere)]
    return None if None in reasons else reasons[0]


def _kernels() -> list[ModuleType]:
    """The kernels for the GPU, in the order in which they are tried.

    Raises NotImplementedError for a GPU that has none.
    """
    capability = device.capability()
    if capability is None or capability == hopper.CAPABILITY:
        return [hopper]
    if capability < ampere.LEAST:
        expected, found = (".".join(map(str, x)) for x in (ampere.LEAST, capability))
        _refuse(f"expected compute capability {expected} or more, got {found}")
    if not versions.knows_ampere():
        _refuse(ampere.OLD)
    return [blackwell, ampere] if capability[0] == blackwell.CAPABILITY else [ampere]


def _refuse(reason: str | None) -> NoReturn:
    raise NotImplementedError(f"implementation 'pallas': {reason}")


def _chosen(spec: Spec, shapes: Shapes) -> ModuleType:
    reason = None
    for kernel in _kernels():
        reason = kernel.supports(spec, shapes)
        if not reason:
            return kernel
    _refuse(reason)


def functions(platform: str) -> AttentionVJP:
    """Forward and backward of the first that supports a call."""

    def of_call(spec: Spec, query: Array, value: Array) -> AttentionVJP:
        return _chosen(spec, Shapes.of(query, value)).functions(platform)

    def forward(spec: Spec, query: Array, key: Array, value: Array) -> Tree:
        return of_call(spec, query, value).forward(spec, query, key, value)

    def backward(spec: Spec, per_query: Tree, key: Array, value: Array, *rest: Array) -> Tree:
        kernel = of_call(spec, per_query.query, value)
        return kernel.backward(spec, per_query, key, value, *rest)

    return AttentionVJP(forward, backward)


def unreadable(platform: str, spec: Spec, shapes: Shapes, cache: Cache) -> str | None:
    """Returns why a cache cannot be read in place, or None."""
    return _reading(spec, shapes).unreadable(platform, spec, shapes, cache)


def _reading(spec: Spec, shapes: Shapes) -> ModuleType:
    """Returns the kernel that reads a cache: Ampere's on Blackwell, where reading sets the pace."""
    kernel = _chosen(spec, shapes)
    return ampere if kernel is blackwell else kernel


def decode(platform: str, spec: Spec, query: Array, cache: Cache) -> tuple[Array, Normalizer]:
    """Attends to a cache as `gpu.decode.attend` does, if `unreadable` gives no reason."""
    kernel = _reading(spec, few_queries.shapes(query, cache))
    return kernel.decode(platform, spec, query, cache)
