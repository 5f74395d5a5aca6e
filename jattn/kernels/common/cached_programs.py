"""Names that let JAX's compilation cache on disk hold programs sharded over devices.

JAX calls a function of ours to partition a call, and names it in the program by its address in
memory. No other process would find such a program in the cache. This file renames it to a digest
of everything that the call computes.
"""

import hashlib
from collections.abc import Callable
from typing import Any

import jax
from jax._src.custom_partitioning import _sharding_callbacks as functions_by_name
from jax.interpreters import mlir

from jattn._types import Tree


def digest(run: Callable[..., Any], platform: str, operands: Tree, *settings: Any) -> str | None:
    """Returns a digest of the program of `run(*operands)` on one device, and of the reprs of
    `settings`; None if nothing is cached. `operands` have types and shapes."""
    if not getattr(jax.config, "jax_compilation_cache_dir", None) or platform == "other":
        return None
    like = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
    program = jax.jit(run).trace(*like).lower(lowering_platforms=(platform,))
    text = "\0".join((program.as_text(), *map(repr, settings)))
    return hashlib.sha256(text.encode()).hexdigest()


def rename(context: Any, results: Tree, digest: str) -> None:
    """Renames the call with these results to a name that is the same in other processes."""
    call = results[0].owner
    if call.name != "stablehlo.custom_call" or "backend_config" not in call.attributes:
        return
    name = mlir.ir.StringAttr(call.attributes["backend_config"]).value
    function = functions_by_name.get(name.encode())
    if function is None:
        return
    # Programs that are lowered at the same time may share the first program's function.
    function = functions_by_name.setdefault(f"jattn-{digest}".encode(), function)
    context.module_context.add_keepalive(function)
    call.attributes["backend_config"] = mlir.ir.StringAttr.get(f"jattn-{digest}")
