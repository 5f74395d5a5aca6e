"""The table of kernels, and which of them runs."""

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
from jaxtyping import Array

from jattn.cache import Cache
from jattn.checks import check_choice
from jattn.kernels.common.vjp import AttentionVJP, Unbuilt
from jattn.kernels.protocol import Kernel
from jattn.kernels.xla import blockwise, decode
from jattn.softmax import Normalizer
from jattn.spec import Shapes, Spec


CacheResults = tuple[Array, Normalizer]
"""`out [B, T, N, V]` in the dtype of sums, and normalizers `[B, T, N]`."""


class Later(NamedTuple):
    """A kernel whose file is imported when it is first asked: most programs need one of them.

    Its methods are the functions of that file. Those that `Kernel` lacks are explained in `Row`;
    only some files have them.
    """

    module: str

    def supports(self, spec: Spec, shapes: Shapes) -> str | None:
        return self._kernel().supports(spec, shapes)

    def functions(self, platform: str) -> AttentionVJP:
        return self._kernel().functions(platform)

    def too_small(self, spec: Spec, shapes: Shapes) -> str | None:
        return self._kernel().too_small(spec, shapes)

    def unavailable(self, shapes: Shapes, wait: bool) -> str | None:
        return self._kernel().unavailable(shapes, wait)

    def unbuilt(self, spec: Spec, shapes: Shapes) -> str | None:
        return self._kernel().unbuilt(spec, shapes)

    def unreadable(self, platform: str, spec: Spec, shapes: Shapes, cache: Cache) -> str | None:
        return self._kernel().unreadable(platform, spec, shapes, cache)

    def decode(self, platform: str, spec: Spec, query: Array, cache: Cache) -> CacheResults:
        return self._kernel().decode(platform, spec, query, cache)

    def _kernel(self) -> Any:
        return importlib.import_module(self.module)


class Row(NamedTuple):
    """A kernel, where it runs, and when it is traced.

    platforms: the platforms that it is for; None stands for all.
    interpreted: the platforms on which JAX's interpreter can run it. That is slow, and happens only
        in calls that name the kernel.
    when: when the kernel's functions are traced, and for which platform.
        "lowered": when the program is lowered, for the platform that it is lowered for.
        "traced": together with the program, for each of its platforms, as a branch of the program
        for that platform. JAX has to see calls of cuDNN in the traced program.
        "default_platform": together with the program, for the platform that JAX runs on by default.
        A call has to name such a kernel.
    too_small: says why a call is too small for the kernel. A call that names no kernel then takes
        another one.
    unavailable: says why the kernel cannot run on this machine or in this program. It is asked when
        a program is lowered. It may wait for what the kernel needs if its second argument is True.
    unbuilt: says why the code that has to be compiled for such a call could not be, if that was
        tried. The kernel's functions raise `Unbuilt` then, and a call that names no kernel takes
        the next one.
    reader: a file whose `decode(platform, spec, query, cache)` reads a cache where its keys and
        values lie. Without it, and where its `unreadable(platform, spec, shapes, cache)` says why
        it cannot, the kernel is given them as arrays.
    """

    kernel: Kernel
    platforms: tuple[str, ...] | None = None
    interpreted: tuple[str, ...] = ()
    when: Literal["lowered", "traced", "default_platform"] = "lowered"
    too_small: Callable[[Spec, Shapes], str | None] = lambda spec, shapes: None
    unavailable: Callable[[Shapes, bool], str | None] = lambda shapes, wait: None
    unbuilt: Callable[[Spec, Shapes], str | None] = lambda spec, shapes: None
    reader: Later | None = None


_NATIVE = Later("jattn.kernels.cpu.native")
_AMPERE = Later("jattn.kernels.gpu.mosaic.kernels.ampere")
_HOPPER = Later("jattn.kernels.gpu.mosaic.kernels.hopper")
_PALLAS = Later("jattn.kernels.gpu.mosaic.kernels.pallas")
_TPU_DECODE = Later("jattn.kernels.tpu.decode")

KERNELS: dict[str, Row] = {
    "cudnn": Row(Later("jattn.kernels.gpu.cudnn"), ("cuda",), when="traced"),
    "native": Row(
        _NATIVE,
        ("cpu",),
        too_small=_NATIVE.too_small,
        unavailable=_NATIVE.unavailable,
        unbuilt=_NATIVE.unbuilt,
    ),
    "blockwise": Row(blockwise),
    "pallas": Row(_PALLAS, ("cuda",), reader=_PALLAS),
    "tpu": Row(
        Later("jattn.kernels.tpu.tiled"),
        ("tpu",),
        interpreted=("cpu",),
        reader=_TPU_DECODE,
    ),
    "ampere": Row(
        _AMPERE,
        ("cuda",),
        interpreted=("cpu",),
        when="default_platform",
        reader=_AMPERE,
    ),
    "hopper": Row(
        _HOPPER,
        ("cuda",),
        interpreted=("cpu",),
        when="default_platform",
        reader=_HOPPER,
    ),
    "blackwell": Row(
        Later("jattn.kernels.gpu.mosaic.kernels.blackwell"),
        ("cuda",),
        interpreted=("cpu",),
        when="default_platform",
        reader=_AMPERE,  # reading is all that counts
    ),
}
"""By name, in the order in which `implementation=None` tries them on their platforms.

Blockwise can compute every call, so a call has to name the kernels behind it. On CUDA, None gives
cuDNN where cuDNN supports the call. Its forward pass is deterministic; its gradients are, as XLA's
scatters are, if `XLA_FLAGS` holds `--xla_gpu_deterministic_ops=true`.
"""

NAMES: tuple[str, ...] = (*KERNELS, "reference")
"""What `implementation` may name. The reference is the formula, which JAX itself differentiates: it
is no kernel, computes everything, and runs only where it is named."""


def check_name(implementation: str | None, *others: str) -> None:
    """Raises ValueError for a name that is neither in `NAMES` nor one of the `others`."""
    check_choice("implementation", implementation, (None, *others, *NAMES))


def refuse(name: str, reason: str | None) -> None:
    """Raises NotImplementedError if there is a reason."""
    if reason:
        raise NotImplementedError(f"implementation {name!r}: {reason}")


def check_supported(name: str, spec: Spec, shapes: Shapes) -> None:
    """Raises NotImplementedError if the implementation does not support the call."""
    if name in KERNELS:
        refuse(name, _unsupported(KERNELS[name], spec, shapes))


def _unsupported(row: Row, spec: Spec, shapes: Shapes) -> str | None:
    """Why a kernel cannot compute a call, or a program for sizes that are not known yet."""
    if not shapes.cuttable:
        return (
            "it cuts queries and keys into tiles, which needs numbers, and the program is exported "
            f"for any T = {shapes.T}, S = {shapes.S}; reference and None need none"
        )
    return row.kernel.supports(spec, shapes)


def reasons(spec: Spec, shapes: Shapes, platform: str) -> dict[str, str | None]:
    """For each name None, or why it cannot run the call on a platform."""
    found = {
        name: _unsupported(row, spec, shapes)
        or _elsewhere(row, platform, named=True)
        or _traced_elsewhere(row, platform)
        or row.too_small(spec, shapes)
        or row.unavailable(shapes, False)
        or row.unbuilt(spec, shapes)
        for name, row in KERNELS.items()
    }
    return {**found, "reference": None}


def is_for(name: str, platform: str) -> bool:
    """Whether a kernel was written for a platform, and not for all."""
    return name in KERNELS and platform in (KERNELS[name].platforms or ())


def candidates(spec: Spec, shapes: Shapes) -> list[str]:
    """The kernels that can compute a call, in order, up to one that is for every platform. A call
    has to name those behind it. The reference where T or S is a symbol."""
    if not shapes.cuttable:
        return ["reference"]
    found: list[str] = []
    for name, row in KERNELS.items():
        if not row.too_small(spec, shapes) and not row.kernel.supports(spec, shapes):
            found.append(name)
            if row.platforms is None:
                break
    return found


def functions(
    names: Sequence[str], shapes: Shapes, *, named: bool
) -> tuple[AttentionVJP | Callable[[str], AttentionVJP], dict[str, AttentionVJP]]:
    """What `vjp.attention` takes: the functions of the first of these kernels that can run on a
    platform, and by platform those that are traced with the program."""
    row = KERNELS[names[0]]
    if row.when == "default_platform":
        return row.kernel.functions(_default_platform()), {}
    traced = (row.platforms or ()) if row.when == "traced" else ()
    choose = functools.partial(_first_that_can, tuple(names), shapes, named)
    return choose, {platform: row.kernel.functions(platform) for platform in traced}


def decoder(
    name: str | None, spec: Spec, shapes: Shapes, cache: Cache
) -> Callable[[Spec, Array, Cache], CacheResults] | None:
    """How a kernel reads a cache where it lies; None where it is to be given arrays."""
    if name not in KERNELS:
        return None
    row, platform = KERNELS[name], _default_platform()
    reader = row.reader
    if reader is None or reader.unreadable(platform, spec, shapes, cache):
        return None
    if row.when == "default_platform":
        return functools.partial(reader.decode, platform)

    def when_lowered(platform: str, *operands: Any) -> CacheResults:
        refuse(name, _elsewhere(row, platform, named=True))
        return reader.decode(platform, *operands)

    return functools.partial(decode.attend_part, forward=when_lowered)


def _first_that_can(
    names: Sequence[str],
    shapes: Shapes,
    named: bool,
    platform: str,
    piece: tuple[Spec, Shapes] | None = None,
) -> AttentionVJP:
    """The functions of the first kernel that can run on this platform and machine, and compute a
    piece of the call if there is one."""
    for place, name in enumerate(names):
        row = KERNELS[name]
        reason = _elsewhere(row, platform, named=named) or row.unavailable(shapes, named)
        reason = reason or (row.kernel.supports(*piece) if piece else None)
        if named:
            refuse(name, reason)
        if not reason:
            others = () if named else names[place + 1 :]
            otherwise = functools.partial(_otherwise, name, others, shapes, platform)
            functions = row.kernel.functions(platform).or_else(otherwise)
            return functions._replace(
                of_piece=lambda *piece: _first_that_can(names, shapes, named, platform, piece)
            )
    raise NotImplementedError(f"none of {', '.join(names)} is for {platform}")


def _otherwise(
    name: str, others: Sequence[str], shapes: Shapes, platform: str, reason: Unbuilt
) -> AttentionVJP:
    """The functions of another kernel, where what those of this one need cannot be built."""
    if not others:
        refuse(name, str(reason))
    return _first_that_can(others, shapes, False, platform)


def _elsewhere(row: Row, platform: str, *, named: bool) -> str | None:
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
