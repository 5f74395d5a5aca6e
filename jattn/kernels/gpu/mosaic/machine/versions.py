"""Modules of Mosaic GPU, and the features of its versions."""

import functools
import importlib
import inspect
from typing import Any


@functools.cache
def mosaic() -> Any:
    """Pallas's module for Mosaic GPU. It takes longer to import than all of jattn."""
    return importlib.import_module("jax.experimental.pallas.mosaic_gpu")


def load(memory: Any, **options: Any) -> Any:
    """Loads an array from memory to registers; `options` are those of Pallas's `load`."""
    idx = inspect.signature(mosaic().load).parameters.get("idx")  # required in JAX 0.10
    older = [()] if idx is not None and idx.default is inspect.Parameter.empty else []
    return mosaic().load(memory, *older, **options)


def lowering() -> Any:
    """The module to which kernels are lowered; its arrays are the registers of threads."""
    return importlib.import_module("jax.experimental.mosaic.gpu")


def mlir(name: str) -> Any:
    """A module of MLIR: `ir`, or a dialect."""
    return importlib.import_module(f"jaxlib.mlir.{name if name == 'ir' else f'dialects.{name}'}")


def knows_ampere() -> bool:
    """Returns whether this version of JAX has products of single warps: since JAX 0.11."""
    return hasattr(mosaic(), "mma")


def has_few_registers() -> bool:
    """Returns whether the threads of three warpgroups have 168 registers each, as none can be moved
    to those that compute: JAX since 0.11 has nvJitLink compile kernels, which ignores `setmaxnreg`.
    """
    return knows_ampere()


def interpreter() -> Any:
    """The parameters of the interpreter, which older versions do not export."""
    name = "jax._src.pallas.mosaic_gpu.interpret.params"
    home = mosaic() if hasattr(mosaic(), "InterpretGPUParams") else importlib.import_module(name)
    return home.InterpretGPUParams()
