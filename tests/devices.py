"""Meshes of several devices, arrays that are sharded over them, and what a program exchanges."""

import importlib
import re
import types
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


def mesh_of(**shape: int) -> Mesh:
    """A mesh of the first devices, with axes of these names and sizes."""
    size = int(np.prod(list(shape.values())))
    return Mesh(np.array(jax.devices()[:size]).reshape(*shape.values()), tuple(shape))


def place(mesh: Mesh, x: Any, spec: P) -> Any:
    """The array sharded over the mesh."""
    return jax.device_put(x, NamedSharding(mesh, spec))


def is_placed(x: Any, mesh: Mesh, spec: P) -> bool:
    """Returns whether the array is sharded over the mesh as the spec says."""
    return x.sharding.is_equivalent_to(NamedSharding(mesh, spec), x.ndim)


def collectives(compiled: Any) -> set[str]:
    """The kinds of exchange in a compiled program."""
    kinds = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    return set(re.findall(rf"({kinds})(?:-start)?\(", compiled.as_text()))


def placed(mesh: Mesh, arrays: dict[str, Any], specs: dict[str, P]) -> dict[str, Any]:
    """Arrays by name sharded over the mesh; those that `specs` does not name are replicated."""
    return {name: place(mesh, x, specs.get(name, P())) for name, x in arrays.items()}


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, capability: str, cuda: int = 13000) -> None:
    """Pretends that there is a GPU of this capability, and a CUDA runtime of this version."""
    ours: Any = jax.local_devices
    gpu = types.SimpleNamespace(device_kind="GPU", compute_capability=capability)
    versions = types.SimpleNamespace(cuda_runtime_get_version=lambda: cuda)
    monkeypatch.setattr(importlib.import_module("jax._src.lib"), "cuda_versions", versions)

    def local_devices(*, backend: str | None = None, **options: Any) -> Any:
        return [gpu] if backend == "cuda" else ours(backend=backend, **options)

    monkeypatch.setattr(jax, "local_devices", local_devices)
