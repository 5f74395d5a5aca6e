"""The devices that programs are compiled for, and compiling for one that is not here."""

import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies

from experiments.ending import UserError


class Target(NamedTuple):
    """One kind of device."""

    name: str
    platform: str  # as JAX's topologies call it
    kind: str  # as the device calls itself
    implementations: tuple[str, ...]  # those of jattn that can run there and need no device
    usual: tuple[str, ...]  # those with kernels of their own, which are compiled unless told
    modules: tuple[tuple[str, str], ...]  # what is needed, and the package it comes in
    tools: tuple[tuple[str, str], ...]  # programs that are needed, likewise


H100 = Target(
    "h100",
    "cuda",
    "NVIDIA H100",
    ("hopper", "pallas", "blockwise", "reference"),
    ("hopper", "pallas"),
    (("jax_plugins.xla_cuda12", "jax[cuda12]"),),
    (("ptxas", "jax[cuda12]"), ("nvdisasm", "nvidia-cuda-nvdisasm")),
)


def _tpu(name: str, kind: str) -> Target:
    """A kind of TPU, of which there are four in a topology."""
    return Target(
        name,
        "tpu",
        kind,
        ("splash", "tpu", "blockwise", "reference"),
        ("splash", "tpu", "blockwise"),
        (("libtpu", "jax[tpu]"),),
        (),
    )


V5E, V6E = _tpu("v5e", "TPU v5 lite"), _tpu("v6e", "TPU v6 lite")
TARGETS = {target.name: target for target in (H100, V5E, V6E)}

# An H100 SXM as XLA's GPU compiler wants it described.
_H100_LIMITS = {
    "threads_per_block_limit": 1024,
    "threads_per_warp": 32,
    "shared_memory_per_block": 48 * 1024,
    "shared_memory_per_core": 228 * 1024,
    "shared_memory_per_block_optin": 227 * 1024,
    "threads_per_core_limit": 2048,
    "core_count": 132,
    "fpus_per_core": 128,
    "block_dim_limit_x": 2**31 - 1,
    "block_dim_limit_y": 2**16 - 1,
    "block_dim_limit_z": 2**16 - 1,
    "registers_per_core_limit": 2**16,
    "registers_per_block_limit": 2**16,
    "memory_bandwidth": 3_352_320_000_000,
    "l2_cache_size": 50 * 2**20,
    "clock_rate_ghz": 1.98,
    "device_memory_size": 84_929_347_584,
}
_H100_VERSIONS = """
platform_name: "CUDA"
device_description_str: "NVIDIA H100 80GB HBM3"
dnn_version_info { major: 9 minor: 10 }
runtime_version { major: 12 minor: 9 }
"""


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
    reason = missing(target)
    if reason:
        raise UserError(reason)
    if target is V5E:
        return topologies.get_topology_desc("v5e:2x4", platform="tpu").devices
    return _h100(8)


@functools.cache
def device(target: Target) -> Any:
    """A device to compile for, of which there is only the description.

    Raises:
        UserError: what compiles for it is not installed.
    """
    reason = missing(target)
    if reason:
        raise UserError(reason)
    if target is V5E:
        return topologies.get_topology_desc("v5e:2x2", platform="tpu").devices[0]
    return _h100(1)[0]


def _h100(count: int) -> Any:
    limits = " ".join(f"{name}: {value}" for name, value in _H100_LIMITS.items())
    described = f"gpu_device_info {{ {limits} cuda_compute_capability {{ major: 9 }} }}"
    return topologies.get_topology_desc(
        "h100", "cuda", target_config=described + _H100_VERSIONS, topology=f"1x1x{count}"
    ).devices


def compiled(target: Target, function: Callable[..., Any], *arguments: Any) -> Any:
    """`function` as a program for a target.

    `arguments` are trees of arrays or of `jax.ShapeDtypeStruct`, of which only shapes and dtypes
    count. GPU compilers call ptxas: it must be found through PATH.

    Raises:
        UserError: what compiles for it is not installed.
    """
    here = jax.sharding.SingleDeviceSharding(device(target))
    platform = "gpu" if target.platform == "cuda" else target.platform
    kind = jax.sharding.AbstractDevice(target.kind, num_cores=None, platform=platform)
    avals = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), arguments)
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=kind)
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.jit(function).lower(*avals).compile()
