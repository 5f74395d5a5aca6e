"""The tables of kernels, and the choice of the kernel that runs.

This file decides which kernels support a call, which of these runs on the platform for which a
program is lowered, whether a cache is read in place, which kernel sums weights, and which computes
linear attention.
"""

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
from jaxtyping import Array

from jattn.cache import Cache, LatentCache
from jattn.call import Call
from jattn.checks import check_choice
from jattn.kernels.common import few_queries
from jattn.kernels.common.errors import CompilationFailed
from jattn.kernels.common.vjp import AttentionVJP, Functions
from jattn.kernels.protocol import (
    CacheResults,
    Kernel,
    LinearKernel,
    Reader,
    StatisticsRequest,
    WeightSums,
)
from jattn.kernels.xla import decode
from jattn.kernels.xla.linear import Formula
from jattn.spec import Shapes, Spec


class Row(NamedTuple):
    """A kernel in a table: its file, its platforms, and when it is traced.

    module: the file below `jattn.kernels`, imported on first use.
    platforms: the platforms for which the kernel can be compiled; None stands for all.
    interpreted: further platforms, on which JAX's interpreter can run it. This is slow, so it is
        done only in calls that name the kernel.
    tracing: when the kernel's functions are traced, and for which platform.
        "lowered": when the program is lowered, for the platform for which it is lowered.
        "all_platforms": when the program is traced, once for each of `platforms`; lowering keeps
        one. cuDNN needs this, because JAX has to find its calls in the traced program.
        "default_platform": when the program is traced, for JAX's default platform alone. Kernels
        that JAX interprets need this, see `_default_platform`. A call has to name them.
    asked_when_lowered: whether calls that name no kernel import this one, and test whether it
        supports them, only when the program is lowered for one of `platforms`: it imports slowly.
    """

    module: str
    platforms: tuple[str, ...] | None = None
    interpreted: tuple[str, ...] = ()
    tracing: Literal["lowered", "all_platforms", "default_platform"] = "lowered"
    asked_when_lowered: bool = False

    @property
    def kernel(self) -> Kernel:
        """The kernel, if this is a row of `KERNELS`."""
        return self.load("KERNEL")

    def load(self, name: str) -> Any:
        """Returns the object with this name in the kernel's file."""
        return getattr(importlib.import_module(f"jattn.kernels.{self.module}"), name)


KERNELS: dict[str, Row] = {
    "cudnn": Row("gpu.cudnn", ("cuda",), tracing="all_platforms"),
    "native": Row("cpu.native", ("cpu",)),
    "pallas": Row("gpu.mosaic.kernels.pallas", ("cuda",), asked_when_lowered=True),
    "blockwise": Row("xla.blockwise"),
    "tpu": Row("tpu.tiled", ("tpu",), interpreted=("cpu",)),
    "ampere": Row("gpu.mosaic.kernels.ampere", ("cuda",), ("cpu",), "default_platform"),
    "hopper": Row("gpu.mosaic.kernels.hopper", ("cuda",), ("cpu",), "default_platform"),
    "blackwell": Row("gpu.mosaic.kernels.blackwell", ("cuda",), ("cpu",), "default_platform"),
}
"""The kernels by name, in the order in which `implementation=None` tries them on their platforms.

Blockwise supports every call, so None never selects a kernel after it. On CUDA, None selects cuDNN
if it supports the call and else, on a Hopper, the kernel in Pallas. The forward pass of cuDNN is
deterministic. Its gradients, like XLA's scatters, are deterministic only if `XLA_FLAGS` contains
`--xla_gpu_deterministic_ops=true`.
"""

FEW_QUERIES = "decode"
"""The name of the implementation for a few queries, which reads a cache by one of `READERS`."""

READERS = (Row("cpu.decode", ("cpu",)), Row("xla.decode"))
"""Files with a `READER` of caches for a few queries; the first that supports a call reads."""

SUMS = (Row("cpu.statistics", ("cpu",)), Row("xla.statistics"))
"""Files with `SUMS`, a kernel that sums weights; the first that supports a request runs."""

LINEAR = (Row("cpu.linear", ("cpu",)), Row("xla.linear"))
"""Files with a `KERNEL` of linear attention; the first that is available runs."""

NAMES: tuple[str, ...] = (*KERNELS, "reference")
"""Names accepted as `implementation`.

The reference is the formula in JAX, and supports every call. It is not a kernel: it runs if a call
names it, or if a call that names nothing has symbolic T or S, which no kernel supports."""


def check_name(implementation: str | None, *, cached: bool = False) -> None:
    """Raises ValueError for an unknown name; calls on a cache may also name `FEW_QUERIES`."""
    cache_names = (FEW_QUERIES,) if cached else ()
    is_xla = isinstance(implementation, str) and implementation == "xla"
    advice = '; the implementation in XLA is "blockwise"' if is_xla else ""
    check_choice("implementation", implementation, (None, *cache_names, *NAMES), advice)


def refuse(name: str, reason: str | None) -> None:
    """Raises NotImplementedError if there is a reason why the implementation cannot run."""
    if reason:
        raise NotImplementedError(f"implementation {name!r}: {reason}")


def _unsupported(row: Row, call: Call) -> str | None:
    """Returns why a kernel does not support a call; None if it does."""
    shapes = call.shapes
    if not shapes.has_static_lengths:
        return (
            f"expected integers T and S, got the symbols T = {shapes.T}, S = {shapes.S} of an "
            'exported program; write implementation=None or "reference"'
        )
    return row.kernel.normalizers(call) or row.kernel.supports(call)


def reasons(call: Call, platform: str) -> dict[str, str | None]:
    """Returns, for each of `NAMES`, why it cannot run the call on a platform; None if it can."""
    results = dict[str, str | None]()

    def collect(call: Call) -> None:
        call = call.prepared()
        for name, row in KERNELS.items():
            results[name] = (
                _unsupported(row, call)
                or _wrong_platform(row, platform, named=True)
                or _traced_for_another(row, platform)
                or row.kernel.too_small(call)
                or row.kernel.unavailable(call.shapes, False)
                or row.kernel.compilation_failure(call)
            )

    jax.eval_shape(collect, call)  # only traced, so that `prepared` computes no arrays
    return {**results, "reference": None}


def selected(reasons: Mapping[str, str | None], shapes: Shapes) -> str:
    """Returns the implementation that None selects among those that have no reason not to run."""
    for name, reason in reasons.items():
        if reason is None and not (name in KERNELS and KERNELS[name].kernel.unselected(shapes)):
            return name
    raise AssertionError("the reference can run every call")


def is_for(name: str, platform: str) -> bool:
    """Returns whether a kernel is made for this platform, rather than for all platforms."""
    return name in KERNELS and platform in (KERNELS[name].platforms or ())


def _candidates(call: Call) -> Iterator[str]:
    """Yields the names of kernels that support a call, in the order of `KERNELS`, up to the first
    kernel for all platforms, after which no other is needed."""
    for name, row in KERNELS.items():
        if row.asked_when_lowered or not (row.kernel.too_small(call) or _unsupported(row, call)):
            yield name
            if row.platforms is None:
                return


def functions(call: Call, among: Sequence[str] = tuple(KERNELS)) -> Functions | None:
    """Returns the functions that compute a prepared call; None stands for the reference.

    They are the functions of the kernel that the call names. If it names none, they are the
    functions of the first kernel in `among` that can run the call on the program's platform.

    Raises NotImplementedError if the named kernel does not support the call.
    """
    name = call.implementation
    if name == "reference" or (name is None and not call.shapes.has_static_lengths):
        return None
    if name is not None:
        refuse(name, _unsupported(KERNELS[name], call))
    names = [name] if name else [x for x in _candidates(call) if x in among]
    row = KERNELS[names[0]]
    if row.tracing == "default_platform":
        return Functions(row.kernel.functions(_default_platform()))
    platforms = (row.platforms or ()) if row.tracing == "all_platforms" else ()
    choose = functools.partial(_first_available, tuple(names), call.shapes, name is not None)
    return Functions(choose, {platform: row.kernel.functions(platform) for platform in platforms})


def _first_available(
    names: Sequence[str],
    shapes: Shapes,
    named: bool,
    platform: str,
    device_call: Call | None = None,
) -> AttentionVJP:
    """Returns the functions of the first kernel in `names` that can run on this platform and
    machine.

    `device_call` is the part of the call that one device computes, if the call is sharded: the
    kernel then has to support this part too. `named` is true if the user named the kernel, which
    then runs or raises NotImplementedError.
    """
    for i, name in enumerate(names):
        row = KERNELS[name]
        reason = _wrong_platform(row, platform, named=named)
        reason = reason or row.kernel.unavailable(shapes, named)
        reason = reason or (_unsupported(row, device_call) if device_call else None)
        reason = reason or (None if named else row.kernel.unselected(shapes))
        if named:
            refuse(name, reason)
        if not reason:
            remaining = () if named else names[i + 1 :]
            otherwise = functools.partial(_after_failure, name, remaining, shapes, platform)
            on_device = functools.partial(_first_available, names, shapes, named, platform)
            return row.kernel.functions(platform).or_else(otherwise, on_device)
    raise NotImplementedError(f"none of {', '.join(names)} can run on {platform}")


def _after_failure(
    name: str, remaining: Sequence[str], shapes: Shapes, platform: str, reason: CompilationFailed
) -> AttentionVJP:
    """Returns the functions of the next available kernel after kernel `name` failed to compile.

    Without remaining kernels, which is so if the user named this one, it raises the reason.
    """
    if not remaining:
        refuse(name, str(reason))
    return _first_available(remaining, shapes, False, platform)


def reader(call: Call, cache: Cache) -> Callable[[Spec, Array, Cache], CacheResults] | None:
    """Returns the function that computes a prepared call from its cache in place; None if the
    cache has to be copied into arrays of keys and values.

    Raises NotImplementedError if the call names an implementation that does not support it.
    """
    name, reason = call.implementation, few_queries.unsupported(call.spec, call.shapes)
    if name == FEW_QUERIES:
        refuse(name, reason)
    if name == FEW_QUERIES or (name is None and not reason):
        return functools.partial(decode.attend_part, read_cache)
    if name not in KERNELS:
        return None
    row, platform = KERNELS[name], _default_platform()
    refuse(name, _unsupported(row, call))
    cache_reader = row.kernel.reader
    if cache_reader is None or isinstance(cache, LatentCache):  # none takes values from keys
        return None
    if cache_reader.unreadable(platform, call, cache):
        return None
    if row.tracing == "default_platform":
        return functools.partial(cache_reader.read, platform)

    def read_when_lowered(platform: str, *operands: Any) -> CacheResults:
        refuse(name, _wrong_platform(row, platform, named=True))
        return cache_reader.read(platform, *operands)

    return functools.partial(decode.attend_part, read_when_lowered)


def read_cache(platform: str, spec: Spec, query: Array, cache: Cache) -> CacheResults:
    """Computes attention of a few queries to a cache by the first of `READERS` that supports it."""
    call = Call(spec, few_queries.shapes(query, cache))
    for row in READERS:
        cache_reader: Reader = row.load("READER")
        if _wrong_platform(row, platform) or cache_reader.unreadable(platform, call, cache):
            continue
        return cache_reader.read(platform, spec, query, cache)
    raise AssertionError("the last of READERS reads every cache")


def sum_weights(
    platform: str, request: StatisticsRequest, query: Array, key: Array
) -> tuple[Any, Array]:
    """Computes the requested sums of weights by the first of `SUMS` that supports the request."""
    for row in SUMS:
        sums: WeightSums = row.load("SUMS")
        if _wrong_platform(row, platform) or sums.unsupported(request, Shapes.of(query, key)):
            continue
        with contextlib.suppress(CompilationFailed):
            return sums.run(request, query, key)
    raise AssertionError("the last of SUMS supports every request")


def linear(platform: str, formula: Formula, *operands: Any) -> Any:
    """Computes linear attention over earlier tokens by the first of `LINEAR` that is available."""
    for row in LINEAR:
        kernel: LinearKernel = row.load("KERNEL")
        if not (_wrong_platform(row, platform) or kernel.unavailable(operands)):
            return kernel.run(formula, *operands)
    raise AssertionError("the last of LINEAR is always available")


def _wrong_platform(row: Row, platform: str, *, named: bool = False) -> str | None:
    """Returns why a kernel cannot run on a platform, or None. It is interpreted only if named."""
    if row.platforms and platform not in (*row.platforms, *(row.interpreted if named else ())):
        return f"is for {' and '.join(row.platforms)}, the program is for {platform}"
    return None


def _traced_for_another(row: Row, platform: str) -> str | None:
    """Returns why a kernel traced in this process cannot run on a platform; None if it can."""
    if row.tracing != "default_platform" or platform == (traced_for := _default_platform()):
        return None
    return (
        f"is traced for {traced_for}, JAX's default platform here, the program is for {platform}; "
        "write implementation='pallas', which chooses it when the program is lowered"
    )


def _default_platform() -> str:
    """Returns "cpu" if JAX traces for CPUs, which interpret kernels for GPUs, and else "cuda".

    JAX traces for the platform of the mesh's abstract device, or else of the default backend. The
    kernels that ask are for CUDA alone, so that "cuda" also stands for the platforms on which they
    cannot run. They have to know already at tracing whether they will be interpreted, because JAX's
    interpreter has effects, which lowering cannot add to a program.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    backend = jax.default_backend() if device is None else device.platform
    return "cpu" if backend == "cpu" else "cuda"
