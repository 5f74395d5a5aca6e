"""The target devices, and compilation for them without the device."""

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
    """A kind of device, and what compiling for it needs."""

    name: str
    platform: str  # its name in JAX's topologies
    kind: str  # the device's own name
    implementations: tuple[str, ...]  # jattn's that compile without the device; peers
    usual: tuple[str, ...]  # the default ones, with kernels of their own
    modules: tuple[tuple[str, str], ...]  # required modules, and their packages
    tools: tuple[tuple[str, str], ...]  # required programs, and their packages
    description: str = ""  # a GPU's, in the format of XLA's compiler
    peak: tuple[int, float] | None = None  # 16-bit products per cycle and core; TFLOP/s
    capability: str | None = None  # a GPU's compute capability

    @property
    def is_gpu(self) -> bool:
        return self.platform == "cuda"


# The limits that NVIDIA's GPUs from A100 to B200 share.
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
    own_kernels: tuple[str, ...] = (),
    peers: tuple[str, ...] = (),
    peak: tuple[int, float] | None = None,
    **limits: float,
) -> Target:
    """Builds a GPU target; shared memory is in KiB, of which one block may use all but 1 KiB."""
    shared = limits.pop("shared_memory")
    limits |= {
        "shared_memory_per_core": shared * 1024,
        "shared_memory_per_block_optin": (shared - 1) * 1024,
    }
    description = " ".join(f"{name}: {value}" for name, value in (_LIMITS | limits).items())
    description += f" cuda_compute_capability {{ major: {capability} }}"
    return Target(
        name,
        "cuda",
        kind,
        (*own_kernels, "ampere", "pallas", "blockwise", "reference", *peers),
        (*own_kernels, "ampere"),
        (("jax_plugins.xla_cuda12", "jax[cuda12]"),),
        (("ptxas", "jax[cuda12]"), ("nvdisasm", "nvidia-cuda-nvdisasm")),
        f'gpu_device_info {{ {description} }} {_VERSIONS} device_description_str: "{kind}"',
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
    """Builds a TPU target, whose smallest topology has four TPUs."""
    return Target(
        name,
        "tpu",
        kind,
        ("tpu", "blockwise", "reference", "jax_splash"),
        ("tpu", "blockwise"),
        (("libtpu", "jax[tpu]"),),
        (),
    )


# XLA places buffers that fit into a TPU's VMEM and does not count them as temporaries. With this
# option it counts all.
ALL_TEMPORARIES = {"xla_vf_vmem_memory_space_assignment": "false"}
V5E, V6E = _tpu("v5e", "TPU v5 lite"), _tpu("v6e", "TPU v6 lite")
TARGETS = {target.name: target for target in (H100, A100, B200, V5E, V6E)}


def missing(target: Target) -> str | None:
    """Returns None, or one line that names what is not installed and the command to install it."""
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
    except ModuleNotFoundError:  # not even the parent package exists
        return False


@functools.cache
def _find(program: str) -> Path | None:
    """Finds a program in NVIDIA's packages, which share the folder `nvidia`."""
    package = importlib.util.find_spec("nvidia") if _exists("nvidia") else None
    folders = [] if package is None else package.submodule_search_locations or []
    paths = sorted(path for folder in folders for path in Path(folder).glob(f"*/bin/{program}"))
    return paths[0] if paths else None


def tool(name: str) -> Path:
    """Returns the path of a program that a target needs.

    Raises:
        UserError: the program is not installed.
    """
    path = _find(name)
    if path is None:
        raise UserError(f"no program {name} is installed; pip install -e '.[offline]' brings it")
    return path


@functools.cache
def devices(target: Target) -> Any:
    """Returns eight abstract devices of one machine, to compile for.

    Raises:
        UserError: the compiler is not installed.
    """
    return _described(target, "2x4", 8)


@functools.cache
def device(target: Target) -> Any:
    """Returns an abstract device to compile for.

    Raises:
        UserError: the compiler is not installed.
    """
    return _described(target, "2x2", 1)[0]


def _described(target: Target, tpus: str, gpus: int) -> Any:
    """Returns a machine's abstract devices: `gpus` GPUs, or TPUs in the topology `tpus`."""
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
    """An abstract GPU with a compute capability; without one, Mosaic assumes a Hopper."""

    compute_capability: str | None = None


def compiled(
    target: Target,
    function: Callable[..., Any],
    *arguments: Any,
    donated: tuple[int, ...] = (),
    options: Mapping[str, str] = MappingProxyType({}),
) -> Any:
    """Compiles `function` for a target, with the compiler's `options`.

    `arguments` are trees of arrays or of `jax.ShapeDtypeStruct`, of which only shapes and dtypes
    matter; results may reuse the memory of the `donated` arguments. GPU compilers call ptxas, which
    must be on the PATH.

    Raises:
        UserError: the compiler is not installed.
    """
    sharding = jax.sharding.SingleDeviceSharding(device(target))
    platform = "gpu" if target.platform == "cuda" else target.platform
    fields = {"device_kind": target.kind, "num_cores": None, "platform": platform}
    abstract: Any = jax.sharding.AbstractDevice(**fields)
    if target.is_gpu:
        abstract = _Gpu(**fields, compute_capability=target.capability)
    avals = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments
    )
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=abstract)
    with jax.sharding.use_abstract_mesh(mesh):
        lowered = jax.jit(function, donate_argnums=donated).lower(*avals)
        return lowered.compile(compiler_options=dict(options))
