"""The devices that programs are compiled for, and compiling for one that is not here."""

import dataclasses
import functools
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies

from experiments.runs.ending import UserError


class Target(NamedTuple):
    """One kind of device."""

    name: str
    platform: str  # as JAX's topologies call it
    kind: str  # as the device calls itself
    implementations: tuple[str, ...]  # those of jattn that can run there and need no device; peers
    usual: tuple[str, ...]  # those with kernels of their own, which are compiled unless told
    modules: tuple[tuple[str, str], ...]  # what is needed, and the package it comes in
    tools: tuple[tuple[str, str], ...]  # programs that are needed, likewise
    description: str = ""  # of a GPU, as XLA's compiler wants it
    peak: tuple[int, float] | None = None  # products of 16-bit numbers a cycle and core; TFLOP/s
    capability: str | None = None  # of a GPU

    @property
    def is_gpu(self) -> bool:
        return self.platform == "cuda"


# What NVIDIA's GPUs from A100 to B200 have in common.
_LIMITS = {
    "threads_per_block_limit": 1024,
    "threads_per_warp": 32,
    "shared_memory_per_block": 48 * 1024,
    "threads_per_core_limit": 2048,
    "block_dim_limit_x": 2**31 - 1,
    "block_dim_limit_y": 2**16 - 1,
    "block_dim_limit_z": 2**16 - 1,
    "registers_per_core_limit": 2**16,
    "registers_per_block_limit": 2**16,
}
_VERSIONS = """
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
runtime_version { major: 12 minor: 9 }
"""


def _gpu(
    name: str,
    kind: str,
    capability: int,
    own: tuple[str, ...] = (),
    peers: tuple[str, ...] = (),
    peak: tuple[int, float] | None = None,
    **limits: float,
) -> Target:
    """A GPU; shared memory in KiB, of which one block may have all but one."""
    shared = limits.pop("shared_memory")
    limits |= {
        "shared_memory_per_core": shared * 1024,
        "shared_memory_per_block_optin": (shared - 1) * 1024,
    }
    described = " ".join(f"{name}: {value}" for name, value in (_LIMITS | limits).items())
    described += f" cuda_compute_capability {{ major: {capability} }}"
    return Target(
        name,
        "cuda",
        kind,
        (*own, "ampere", "pallas", "blockwise", "reference", *peers),
        (*own, "ampere"),
        (("jax_plugins.xla_cuda12", "jax[cuda12]"),),
        (("ptxas", "jax[cuda12]"), ("nvdisasm", "nvidia-cuda-nvdisasm")),
        f'gpu_device_info {{ {described} }} {_VERSIONS} device_description_str: "{kind}"',
        peak,
        f"{capability}.0",
    )


H100 = _gpu(
    "h100",
    "NVIDIA H100",
    9,
    ("hopper",),
    ("jax_mgpu",),
    peak=(2048, 989.4),
    shared_memory=228,
    core_count=132,
    fpus_per_core=128,
    memory_bandwidth=3_352_320_000_000,
    l2_cache_size=50 * 2**20,
    clock_rate_ghz=1.98,
    device_memory_size=84_929_347_584,
)
A100 = _gpu(
    "a100",
    "NVIDIA A100",
    8,
    peak=(1024, 312.0),
    shared_memory=164,
    core_count=108,
    fpus_per_core=64,
    memory_bandwidth=2_039_000_000_000,
    l2_cache_size=40 * 2**20,
    clock_rate_ghz=1.41,
    device_memory_size=80 * 2**30,
)
B200 = _gpu(
    "b200",
    "NVIDIA B200",
    10,
    ("blackwell",),
    shared_memory=228,
    core_count=148,
    fpus_per_core=128,
    memory_bandwidth=8_000_000_000_000,
    l2_cache_size=126 * 2**20,
    clock_rate_ghz=1.965,
    device_memory_size=178 * 2**30,
)


def _tpu(name: str, kind: str) -> Target:
    """A kind of TPU, of which there are four in a topology."""
    return Target(
        name,
        "tpu",
        kind,
        ("tpu", "blockwise", "reference", "jax_splash"),
        ("tpu", "blockwise"),
        (("libtpu", "jax[tpu]"),),
        (),
    )


# XLA places what fits into a TPU's VMEM and does not count it among temporaries, but without it.
ALL_TEMPORARIES = {"xla_vf_vmem_memory_space_assignment": "false"}
V5E, V6E = _tpu("v5e", "TPU v5 lite"), _tpu("v6e", "TPU v6 lite")
TARGETS = {target.name: target for target in (H100, A100, B200, V5E, V6E)}


def missing(target: Target) -> str | None:
    """None, or in one line what is not installed and the command that installs it."""
    for module, package in target.modules:
        if not _exists(module):
            return _advice(target, f"no module {module} (package {package})")
    for program, package in target.tools:
        if _find(program) is None:
            return _advice(target, f"no program {program} (package {package})")
    return None


def _advice(target: Target, what: str) -> str:
    return (
        f"compiling for {target.name} needs what is not installed here: {what}; "
        'pip install -e ".[offline]" brings it, several GB'
    )


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package that it lies in
        return False


@functools.cache
def _find(program: str) -> Path | None:
    """A program of NVIDIA's packages, which lie beside one another in `nvidia`."""
    package = importlib.util.find_spec("nvidia") if _exists("nvidia") else None
    folders = [] if package is None else package.submodule_search_locations or []
    found = sorted(path for folder in folders for path in Path(folder).glob(f"*/bin/{program}"))
    return found[0] if found else None


def tool(name: str) -> Path:
    """Where a program of a target lies.

    Raises:
        UserError: it is not installed.
    """
    found = _find(name)
    if found is None:
        raise UserError(f"no program {name} is installed; pip install -e '.[offline]' brings it")
    return found


@functools.cache
def devices(target: Target) -> Any:
    """Eight devices of one machine to compile for, of which there is only the description.

    Raises:
        UserError: what compiles for them is not installed.
    """
    return _described(target, "2x4", 8)


@functools.cache
def device(target: Target) -> Any:
    """A device to compile for, of which there is only the description.

    Raises:
        UserError: what compiles for it is not installed.
    """
    return _described(target, "2x2", 1)[0]


def _described(target: Target, tpus: str, gpus: int) -> Any:
    """A machine's devices: so many GPUs, or TPUs in that order."""
    reason = missing(target)
    if reason:
        raise UserError(reason)
    if target.platform == "tpu":
        return topologies.get_topology_desc(f"{target.name}:{tpus}", platform="tpu").devices
    return topologies.get_topology_desc(
        target.name, "cuda", target_config=target.description, topology=f"1x1x{gpus}"
    ).devices


@dataclasses.dataclass(frozen=True)
class _Gpu(jax.sharding.AbstractDevice):
    """One whose kind Mosaic knows: it takes others for a Hopper."""

    compute_capability: str | None = None


def compiled(
    target: Target,
    function: Callable[..., Any],
    *arguments: Any,
    donated: tuple[int, ...] = (),
    options: Mapping[str, str] = MappingProxyType({}),
) -> Any:
    """`function` as a program for a target; `options` are for its compiler.

    `arguments` are trees of arrays or of `jax.ShapeDtypeStruct`, of which only shapes and dtypes
    count; the memory of those that are `donated` may hold results. GPU compilers call ptxas: it
    must be found through PATH.

    Raises:
        UserError: what compiles for it is not installed.
    """
    here = jax.sharding.SingleDeviceSharding(device(target))
    platform = "gpu" if target.platform == "cuda" else target.platform
    described = {"device_kind": target.kind, "num_cores": None, "platform": platform}
    kind: Any = jax.sharding.AbstractDevice(**described)
    if target.is_gpu:
        kind = _Gpu(**described, compute_capability=target.capability)
    avals = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), arguments)
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=kind)
    with jax.sharding.use_abstract_mesh(mesh):
        lowered = jax.jit(function, donate_argnums=donated).lower(*avals)
        return lowered.compile(compiler_options=dict(options))
