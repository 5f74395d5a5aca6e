"""The tables of kernels, and which of them runs.

Everything about a call is decided here: which kernels can compute it, which of them a program gets
when it is lowered for a platform, how a cache is read, and who sums weights.
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
from jattn.kernels.common.questions import Question
from jattn.kernels.common.unbuilt import Unbuilt
from jattn.kernels.common.vjp import AttentionVJP, Functions
from jattn.kernels.protocol import CacheResults, Kernel, Reader, WeightSums
from jattn.kernels.xla import decode
from jattn.spec import Shapes, Spec


class Row(NamedTuple):
    """Where a kernel is, where it runs, and when it is traced.

    module: its file, which is imported when it is first asked: most programs need one of them.
    platforms: the platforms that it is for; None stands for all.
    interpreted: the platforms on which JAX's interpreter can run it. That is slow, and happens only
        in calls that name the kernel.
    when: when the kernel's functions are traced, and for which platform.
        "lowered": when the program is lowered, for the platform that it is lowered for.
        "traced": together with the program, for each of its platforms, as a branch of the program
        for that platform. JAX has to see calls of cuDNN in the traced program.
        "default_platform": together with the program, for the platform that JAX runs on by default.
        A call has to name such a kernel.
    """

    module: str
    platforms: tuple[str, ...] | None = None
    interpreted: tuple[str, ...] = ()
    when: Literal["lowered", "traced", "default_platform"] = "lowered"

    @property
    def kernel(self) -> Kernel:
        """The kernel, of a row of `KERNELS`."""
        return self.load("KERNEL")

    def load(self, name: str) -> Any:
        """What the file calls by this name."""
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
"""By name, in the order in which `implementation=None` tries them on their platforms.

Blockwise can compute every call, so a call has to name the kernels behind it. On CUDA, None gives
cuDNN where cuDNN supports the call. Its forward pass is deterministic; its gradients are, as XLA's
scatters are, if `XLA_FLAGS` holds `--xla_gpu_deterministic_ops=true`.
"""

FEW_QUERIES = "decode"
"""The name under which the first of `READERS` that can reads a cache for a few queries."""

READERS = (Row("cpu.decode", ("cpu",)), Row("xla.decode"))
"""What reads a cache for a few queries: `READER` of a file each, in the order of trying."""

SUMS = (Row("cpu.statistics", ("cpu",)), Row("xla.statistics"))
"""What sums weights: `SUMS` of a file each, in the order of trying."""

NAMES: tuple[str, ...] = (*KERNELS, "reference")
"""What `implementation` may name. The reference is the formula, which JAX itself differentiates: it
is no kernel, computes everything, and runs only where it is named."""


def check_name(implementation: str | None, *, cached: bool = False) -> None:
    """Raises ValueError for a name that `implementation` may not be, of a call on a cache if
    `cached`."""
    more = (FEW_QUERIES,) if cached else ()
    check_choice("implementation", implementation, (None, *more, *NAMES))


def refuse(name: str, reason: str | None) -> None:
    """Raises NotImplementedError if there is a reason."""
    if reason:
        raise NotImplementedError(f"implementation {name!r}: {reason}")


def _unsupported(row: Row, call: Call) -> str | None:
    """Why a kernel cannot compute a call, or a program for sizes that are not known yet."""
    shapes = call.shapes
    if not shapes.cuttable:
        return (
            "it cuts queries and keys into tiles, which needs numbers, and the program is exported "
            f"for any T = {shapes.T}, S = {shapes.S}; reference and None need none"
        )
    return row.kernel.supports(call)


def reasons(call: Call, platform: str) -> dict[str, str | None]:
    """For each name None, or why it cannot run the call on a platform."""
    answers = dict[str, str | None]()

    def ask(call: Call) -> None:
        call = call.prepared()
        for name, row in KERNELS.items():
            answers[name] = (
                _unsupported(row, call)
                or _elsewhere(row, platform, named=True)
                or _traced_elsewhere(row, platform)
                or row.kernel.too_small(call)
                or row.kernel.unavailable(call.shapes, False)
                or row.kernel.unbuilt(call)
            )

    jax.eval_shape(ask, call)
    return {**answers, "reference": None}


def is_for(name: str, platform: str) -> bool:
    """Whether a kernel was written for a platform, and not for all."""
    return name in KERNELS and platform in (KERNELS[name].platforms or ())


def _candidates(call: Call) -> Iterator[str]:
    """The kernels that can compute a call, in order, up to one that is for every platform. A call
    has to name those behind it."""
    for name, row in KERNELS.items():
        if not row.kernel.too_small(call) and not row.kernel.supports(call):
            yield name
            if row.platforms is None:
                return


def functions(call: Call, among: Sequence[str] = tuple(KERNELS)) -> Functions | None:
    """The functions of the first kernel that can run a prepared call on a platform, or of the one
    that it names; None stands for the reference. A call that names none gets one of `among`.

    Raises NotImplementedError if the named kernel does not support the call.
    """
    name = call.implementation
    if name == "reference" or (name is None and not call.shapes.cuttable):
        return None
    if name is not None:
        refuse(name, _unsupported(KERNELS[name], call))
    names = [name] if name else [x for x in _candidates(call) if x in among]
    row = KERNELS[names[0]]
    if row.when == "default_platform":
        return Functions(row.kernel.functions(_default_platform()))
    traced = (row.platforms or ()) if row.when == "traced" else ()
    choose = functools.partial(_first_that_can, tuple(names), call.shapes, name is not None)
    return Functions(choose, {platform: row.kernel.functions(platform) for platform in traced})


def _first_that_can(
    names: Sequence[str],
    shapes: Shapes,
    named: bool,
    platform: str,
    piece: Call | None = None,
) -> AttentionVJP:
    """The functions of the first kernel that can run on this platform and machine, and compute a
    piece of the call if there is one."""
    for place, name in enumerate(names):
        row = KERNELS[name]
        reason = _elsewhere(row, platform, named=named) or row.kernel.unavailable(shapes, named)
        reason = reason or (row.kernel.supports(piece) if piece else None)
        if named:
            refuse(name, reason)
        if not reason:
            others = () if named else names[place + 1 :]
            otherwise = functools.partial(_otherwise, name, others, shapes, platform)
            of_piece = functools.partial(_first_that_can, names, shapes, named, platform)
            return row.kernel.functions(platform).or_else(otherwise, of_piece)
    raise NotImplementedError(f"none of {', '.join(names)} is for {platform}")


def _otherwise(
    name: str, others: Sequence[str], shapes: Shapes, platform: str, reason: Unbuilt
) -> AttentionVJP:
    """The functions of another kernel, where what those of this one need cannot be built."""
    if not others:
        refuse(name, str(reason))
    return _first_that_can(others, shapes, False, platform)


def reader(call: Call, cache: Cache) -> Callable[[Spec, Array, Cache], CacheResults] | None:
    """How the cache of a prepared call is read where it lies; None where a kernel is given arrays.

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
    own = row.kernel.reader
    if own is None or own.unreadable(platform, call, cache):
        return None
    if row.when == "default_platform":
        return functools.partial(own.read, platform)

    def when_lowered(platform: str, *operands: Any) -> CacheResults:
        refuse(name, _elsewhere(row, platform, named=True))
        return own.read(platform, *operands)

    return functools.partial(decode.attend_part, when_lowered)


def read_cache(platform: str, spec: Spec, query: Array, cache: Cache) -> CacheResults:
    """Attention of a few queries to a cache by the first of `READERS` that can, on a platform."""
    call = Call(spec, few_queries.shapes(query, cache))
    for row in READERS:
        own: Reader = row.load("READER")
        if not _elsewhere(row, platform) and not own.unreadable(platform, call, cache):
            return own.read(platform, spec, query, cache)
    raise AssertionError("the last of them reads every cache")


def sum_weights(platform: str, asked: Question, query: Array, key: Array) -> tuple[Any, Array]:
    """The answers to a question about weights by the first of `SUMS` that can, on a platform."""
    for row in SUMS:
        own: WeightSums = row.load("SUMS")
        if _elsewhere(row, platform) or own.unsupported(asked, Shapes.of(query, key)):
            continue
        with contextlib.suppress(Unbuilt):
            return own.run(asked, query, key)
    raise AssertionError("the last of them can answer every question")


def _elsewhere(row: Row, platform: str, *, named: bool = False) -> str | None:
    """Why a kernel is not for a platform; None if it is. It is interpreted only if named."""
    if row.platforms and platform not in (*row.platforms, *(row.interpreted if named else ())):
        return f"is for {' and '.join(row.platforms)}, the program is for {platform}"
    return None


def _traced_elsewhere(row: Row, platform: str) -> str | None:
    """Why a program that is traced here cannot be lowered with a kernel for a platform."""
    if row.when != "default_platform" or platform == (here := _default_platform()):
        return None
    return (
        f"is traced for {here}, on which JAX runs here; 'pallas', which stands for it, is chosen "
        "when a program is lowered"
    )


def _default_platform() -> str:
    """The platform of an abstract device in the mesh, else of JAX's default backend: JAX's
    interpreter has effects, which a program cannot take on when it is lowered."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    backend = jax.default_backend() if device is None else device.platform
    return "cpu" if backend == "cpu" else "cuda"
