"""The GPU that a program is for."""

from collections.abc import Callable
from typing import Any

import jax


def device() -> Any:
    """One that runs CUDA, or None."""
    try:
        return jax.local_devices(backend="cuda")[0]
    except RuntimeError:
        return None


def multiprocessors() -> int:
    """Of the device that runs CUDA; those of an H100 or H200 if there is none."""
    return getattr(device(), "core_count", 132)


def capability_of(device: Any) -> tuple[int, ...]:
    return tuple(map(int, device.compute_capability.split(".")))


def unfit(fits: Callable[[tuple[int, ...]], bool], expected: str) -> str | None:
    """Why this machine's device is not one of such a compute capability; None if it is, or if there
    is none, and the program is for another machine."""
    found = device()
    if found is None or fits(capability_of(found)):
        return None
    return f"expected compute capability {expected}, got {found.compute_capability}"


def capability() -> tuple[int, ...] | None:
    """That of the device that a program is for; None if nobody says, and JAX takes it for a
    Hopper."""
    target = jax.sharding.get_abstract_mesh().abstract_device or device()
    return capability_of(target) if hasattr(target, "compute_capability") else None
