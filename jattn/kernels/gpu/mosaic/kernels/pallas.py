"""The kernels in Pallas for GPUs under one name, which chooses the kernel for the GPU."""

import math

from jaxtyping import Array

from jattn import tuning
from jattn._types import Tree
from jattn.cache import Cache
from jattn.call import Call
from jattn.kernels.common import few_queries
from jattn.kernels.common.errors import CompilationFailed
from jattn.kernels.common.vjp import AttentionVJP
from jattn.kernels.gpu.mosaic.kernels import ampere, blackwell, hopper
from jattn.kernels.gpu.mosaic.machine import device, versions
from jattn.kernels.protocol import Kernel, Reader
from jattn.softmax import Normalizer
from jattn.spec import Shapes, Spec


def supports(call: Call) -> str | None:
    """Returns why no kernel can compute the call on any GPU; None if one can."""
    reasons = [module.KERNEL.supports(call) for module in (hopper, blackwell, ampere)]
    return None if None in reasons else reasons[0]


def _kernels() -> list[Kernel]:
    """The kernels for the GPU, in the order in which they are tried.

    Raises CompilationFailed for a GPU that has none.
    """
    capability = device.capability()
    if capability is None or capability == hopper.CAPABILITY:
        return [hopper.KERNEL]
    if capability < ampere.LEAST:
        expected, version = (".".join(map(str, x)) for x in (ampere.LEAST, capability))
        raise CompilationFailed(f"expected compute capability {expected} or more, got {version}")
    if not versions.knows_ampere():
        raise CompilationFailed(ampere.OLD)
    is_blackwell = capability[0] == blackwell.CAPABILITY
    return [*([blackwell.KERNEL] if is_blackwell else []), ampere.KERNEL]


def _chosen(call: Call) -> Kernel:
    """Returns the first kernel that supports a call.

    Raises CompilationFailed if none does.
    """
    reason = None
    for kernel in _kernels():
        reason = kernel.supports(call)
        if not reason:
            return kernel
    raise CompilationFailed(reason)


def unselected(shapes: Shapes) -> str | None:
    """Returns why None does not select these kernels on this machine: no GPU but a Hopper has run
    them yet, and in small calls they are no faster than XLA."""
    capability = device.capability()
    if capability != hopper.CAPABILITY:
        found = ".".join(map(str, capability)) if capability else "unknown"
        return f"tested on compute capability 9.0, this machine's is {found}"
    sizes = (shapes.B, shapes.N, shapes.T, shapes.S)
    least = tuning.current().gpu_pairs
    if not all(isinstance(x, int) for x in sizes) or math.prod(sizes) < least:
        return f"expected at least {least:,} pairs of queries and keys over all heads"
    return None


def functions(platform: str) -> AttentionVJP:
    """Returns the functions of the first kernel that supports a call."""

    def of_call(spec: Spec, query: Array, value: Array) -> AttentionVJP:
        return _chosen(Call(spec, Shapes.of(query, value))).functions(platform)

    def forward(spec: Spec, query: Array, key: Array, value: Array) -> Tree:
        return of_call(spec, query, value).forward(spec, query, key, value)

    def backward(spec: Spec, per_query: Tree, key: Array, value: Array, *rest: Array) -> Tree:
        kernel = of_call(spec, per_query.query, value)
        return kernel.backward(spec, per_query, key, value, *rest)

    return AttentionVJP(forward, backward)


def _reader(call: Call) -> Reader:
    """Returns the reader of the kernel that computes the call.

    Raises NotImplementedError if none does.
    """
    try:
        reader = _chosen(call).reader
    except CompilationFailed as reason:
        raise NotImplementedError(f"implementation 'pallas': {reason}") from None
    assert reader is not None
    return reader


def _unreadable(platform: str, call: Call, cache: Cache) -> str | None:
    return _reader(call).unreadable(platform, call, cache)


def _read(platform: str, spec: Spec, query: Array, cache: Cache) -> tuple[Array, Normalizer]:
    call = Call(spec, few_queries.shapes(query, cache))
    return _reader(call).read(platform, spec, query, cache)


KERNEL = Kernel(supports, functions, unselected=unselected, reader=Reader(_unreadable, _read))
