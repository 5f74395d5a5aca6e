"""The GPU that a program is for."""

from collections.abc import Callable
from typing import Any

import jax


def device() -> Any:
    """Returns a device that runs CUDA, or None."""
    try:
        return jax.local_devices(backend="cuda")[0]
    except RuntimeError:
        return None


def multiprocessors() -> int:
    """The number of multiprocessors of the CUDA device; 132, as in an H100, without one."""
    return getattr(device(), "core_count", 132)


def capability_of(device: Any) -> tuple[int, ...]:
    return tuple(map(int, device.compute_capability.split(".")))


def unfit(fits: Callable[[tuple[int, ...]], bool], expected: str) -> str | None:
    """Returns why the compute capability of this machine's GPU is wrong; None if it fits,
    or if there is no GPU, because the program is then for another machine."""
    gpu = device()
    if gpu is None or fits(capability_of(gpu)):
        return None
    return f"expected compute capability {expected}, got {gpu.compute_capability}"


def capability() -> tuple[int, ...] | None:
    """The compute capability of the device that a program is for; None if it is not known: JAX then
    compiles for a Hopper."""
    target = jax.sharding.get_abstract_mesh().abstract_device or device()
    return capability_of(target) if hasattr(target, "compute_capability") else None
