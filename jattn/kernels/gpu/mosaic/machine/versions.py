"""Pallas's module for Mosaic GPU, and what its versions have."""

import functools
import importlib
from typing import Any


@functools.cache
def mosaic() -> Any:
    # Not with the library: this takes longer to import than all of it.
    return importlib.import_module("jax.experimental.pallas.mosaic_gpu")


def knows_ampere() -> bool:
    """Whether this version of JAX has products of single warps; older ones have not."""
    return hasattr(mosaic(), "mma")


def few() -> bool:
    """Whether the threads of three warpgroups have 168 registers each, as none can be moved to
    those that compute: JAX since 0.12 has nvJitLink compile kernels, which ignores `setmaxnreg`."""
    return knows_ampere()


def interpreter() -> Any:
    """Parameters of the interpreter, which older versions do not export."""
    name = "jax._src.pallas.mosaic_gpu.interpret.params"
    home = mosaic() if hasattr(mosaic(), "InterpretGPUParams") else importlib.import_module(name)
    return home.InterpretGPUParams()
