"""The tables of kernels, and the choice of the kernel that runs.

This file decides which kernels can compute a call, which of them a program contains when it is
lowered for a platform, how a cache is read, and which kernel sums weights.
"""

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
from jaxtyping import Array

from jattn.cache import Cache
from jattn.call import Call
from jattn.checks import check_choice
from jattn.kernels.common import few_queries
from jattn.kernels.common.errors import CompilationFailed
from jattn.kernels.common.vjp import AttentionVJP, Functions
from jattn.kernels.protocol import CacheResults, Kernel, Reader, StatisticsRequest, WeightSums
from jattn.kernels.xla import decode
from jattn.spec import Shapes, Spec


class Row(NamedTuple):
    """A kernel's entry in a table: its file, its platforms, and the time at which it is traced.

    module: its file, imported on first use: most programs need only one of them.
    platforms: the platforms that the kernel is for; None stands for all.
    interpreted: the platforms on which JAX's interpreter can run it. That is slow, and happens only
        in calls that name the kernel.
    when: when the kernel's functions are traced, and for which platform.
        "lowered": when the program is lowered, for the platform that it is lowered for.
        "traced": together with the program, for each of the kernel's platforms, as a branch of the
        program for that platform. JAX has to see calls of cuDNN in the traced program.
        "default_platform": together with the program, for JAX's default platform. A call has to
        name such a kernel.
    """

    module: str
    platforms: tuple[str, ...] | None = None
    interpreted: tuple[str, ...] = ()
    when: Literal["lowered", "traced", "default_platform"] = "lowered"

    @property
    def kernel(self) -> Kernel:
        """The kernel, for a row of `KERNELS`."""
        return self.load("KERNEL")

    def load(self, name: str) -> Any:
        """Returns the object with this name in the kernel's file."""
        return getattr(importlib.import_module(f"jattn.kernels.{self.module}"), name)


KERNELS: dict[str, Row] = {
    "cudnn": Row("gpu.cudnn", ("cuda",), when="traced"),
    "native": Row("cpu.native", ("cpu",)),
    "blockwise": Row("xla.blockwise"),
    "pallas": Row("gpu.mosaic.kernels.pallas", ("cuda",)),
    "tpu": Row("tpu.tiled", ("tpu",), interpreted=("cpu",)),
    "ampere": Row("gpu.mosaic.kernels.ampere", ("cuda",), ("cpu",), "default_platform"),
    "hopper": Row("gpu.mosaic.kernels.hopper", ("cuda",), ("cpu",), "default_platform"),
    "blackwell": Row("gpu.mosaic.kernels.blackwell", ("cuda",), ("cpu",), "default_platform"),
}
"""The kernels by name, in the order in which `implementation=None` tries them on their platforms.

Blockwise can compute every call, so a call has to name the kernels after it. On CUDA, None selects
cuDNN if cuDNN supports the call. Its forward pass is deterministic; its gradients are deterministic
if, as for XLA's scatters, `XLA_FLAGS` contains `--xla_gpu_deterministic_ops=true`.
"""

FEW_QUERIES = "decode"
"""The implementation that reads a cache for a few queries, by the first supported of `READERS`."""

READERS = (Row("cpu.decode", ("cpu",)), Row("xla.decode"))
"""The files whose `READER` reads a cache for a few queries, in the order of trial."""

SUMS = (Row("cpu.statistics", ("cpu",)), Row("xla.statistics"))
"""The files whose `SUMS` sums weights, in the order of trial."""

NAMES: tuple[str, ...] = (*KERNELS, "reference")
"""Names accepted as `implementation`.

The reference is the formula, differentiated by JAX: it is not a kernel, computes every call, and
runs only if it is named."""


def check_name(implementation: str | None, *, cached: bool = False) -> None:
    """Raises ValueError for an unknown name; `cached` calls, on a cache, have one more name."""
    of_cache = (FEW_QUERIES,) if cached else ()
    check_choice("implementation", implementation, (None, *of_cache, *NAMES))


def refuse(name: str, reason: str | None) -> None:
    """Raises NotImplementedError if there is a reason."""
    if reason:
        raise NotImplementedError(f"implementation {name!r}: {reason}")


def _unsupported(row: Row, call: Call) -> str | None:
    """Returns why a kernel cannot compute a call or an exported program; None if it can."""
    shapes = call.shapes
    if not shapes.has_static_lengths:
        return (
            "it cuts queries and keys into tiles, which needs numbers, and the program is exported "
            f"for any T = {shapes.T}, S = {shapes.S}; reference and None need none"
        )
    return row.kernel.supports(call)


def reasons(call: Call, platform: str) -> dict[str, str | None]:
    """Returns for each name None, or why it cannot run the call on a platform."""
    answers = dict[str, str | None]()

    def collect(call: Call) -> None:
        call = call.prepared()
        for name, row in KERNELS.items():
            answers[name] = (
                _unsupported(row, call)
                or _elsewhere(row, platform, named=True)
                or _traced_elsewhere(row, platform)
                or row.kernel.too_small(call)
                or row.kernel.unavailable(call.shapes, False)
                or row.kernel.compilation_failure(call)
            )

    jax.eval_shape(collect, call)
    return {**answers, "reference": None}


def is_for(name: str, platform: str) -> bool:
    """Returns whether a kernel is for a platform in particular, not for all."""
    return name in KERNELS and platform in (KERNELS[name].platforms or ())


def _candidates(call: Call) -> Iterator[str]:
    """Yields the kernels that can compute a call, in order, up to one that is for every platform.

    A call has to name the kernels after that.
    """
    for name, row in KERNELS.items():
        if not row.kernel.too_small(call) and not row.kernel.supports(call):
            yield name
            if row.platforms is None:
                return


def functions(call: Call, among: Sequence[str] = tuple(KERNELS)) -> Functions | None:
    """Returns the functions of the named kernel, or of the first kernel that can run a prepared
    call on a platform; None stands for the reference. A call without a name gets one of `among`.

    Raises NotImplementedError if the named kernel does not support the call.
    """
    name = call.implementation
    if name == "reference" or (name is None and not call.shapes.has_static_lengths):
        return None
    if name is not None:
        refuse(name, _unsupported(KERNELS[name], call))
    names = [name] if name else [x for x in _candidates(call) if x in among]
    row = KERNELS[names[0]]
    if row.when == "default_platform":
        return Functions(row.kernel.functions(_default_platform()))
    traced = (row.platforms or ()) if row.when == "traced" else ()
    choose = functools.partial(_first_supported, tuple(names), call.shapes, name is not None)
    return Functions(choose, {platform: row.kernel.functions(platform) for platform in traced})


def _first_supported(
    names: Sequence[str],
    shapes: Shapes,
    named: bool,
    platform: str,
    piece: Call | None = None,
) -> AttentionVJP:
    """Returns the functions of the first kernel that can run on this platform and machine, and
    compute `piece` of the call if there is one."""
    for i, name in enumerate(names):
        row = KERNELS[name]
        reason = _elsewhere(row, platform, named=named) or row.kernel.unavailable(shapes, named)
        reason = reason or (row.kernel.supports(piece) if piece else None)
        if named:
            refuse(name, reason)
        if not reason:
            remaining = () if named else names[i + 1 :]
            otherwise = functools.partial(_otherwise, name, remaining, shapes, platform)
            of_piece = functools.partial(_first_supported, names, shapes, named, platform)
            return row.kernel.functions(platform).or_else(otherwise, of_piece)
    raise NotImplementedError(f"none of {', '.join(names)} is for {platform}")


def _otherwise(
    name: str, remaining: Sequence[str], shapes: Shapes, platform: str, reason: CompilationFailed
) -> AttentionVJP:
    """Returns the functions of another kernel, after this kernel's could not be compiled."""
    if not remaining:
        refuse(name, str(reason))
    return _first_supported(remaining, shapes, False, platform)


def reader(call: Call, cache: Cache) -> Callable[[Spec, Array, Cache], CacheResults] | None:
    """Returns the function that reads a prepared call's cache in place; None to read a copy.

    Raises NotImplementedError if `FEW_QUERIES` is named and does not support the call.
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
    if cache_reader is None or cache_reader.unreadable(platform, call, cache):
        return None
    if row.when == "default_platform":
        return functools.partial(cache_reader.read, platform)

    def when_lowered(platform: str, *operands: Any) -> CacheResults:
        refuse(name, _elsewhere(row, platform, named=True))
        return cache_reader.read(platform, *operands)

    return functools.partial(decode.attend_part, when_lowered)


def read_cache(platform: str, spec: Spec, query: Array, cache: Cache) -> CacheResults:
    """Computes attention of a few queries to a cache by the first supported of `READERS`."""
    call = Call(spec, few_queries.shapes(query, cache))
    for row in READERS:
        cache_reader: Reader = row.load("READER")
        if not _elsewhere(row, platform) and not cache_reader.unreadable(platform, call, cache):
            return cache_reader.read(platform, spec, query, cache)
    raise AssertionError("the last of them reads every cache")


def sum_weights(
    platform: str, question: StatisticsRequest, query: Array, key: Array
) -> tuple[Any, Array]:
    """Answers a question about weights by the first supported of `SUMS`."""
    for row in SUMS:
        sums: WeightSums = row.load("SUMS")
        if _elsewhere(row, platform) or sums.unsupported(question, Shapes.of(query, key)):
            continue
        with contextlib.suppress(CompilationFailed):
            return sums.run(question, query, key)
    raise AssertionError("the last of them can answer every question")


def _elsewhere(row: Row, platform: str, *, named: bool = False) -> str | None:
    """Returns why a kernel is not for a platform, or None. Only named kernels are interpreted."""
    if row.platforms and platform not in (*row.platforms, *(row.interpreted if named else ())):
        return f"is for {' and '.join(row.platforms)}, the program is for {platform}"
    return None


def _traced_elsewhere(row: Row, platform: str) -> str | None:
    """Returns why a program traced here cannot use a kernel on a platform; None if it can."""
    if row.when != "default_platform" or platform == (traced_for := _default_platform()):
        return None
    return (
        f"is traced for {traced_for}, on which JAX runs here; 'pallas', which stands for it, is "
        "chosen when a program is lowered"
    )


def _default_platform() -> str:
    """Returns the platform of the mesh's abstract device, or else of JAX's default backend.

    JAX's interpreter has effects, which cannot be added to a program when it is lowered.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    backend = jax.default_backend() if device is None else device.platform
    return "cpu" if backend == "cpu" else "cuda"
