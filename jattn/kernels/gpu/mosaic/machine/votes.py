"""What threads decide together, and do the same then."""

import functools
import importlib
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from jattn.kernels.gpu.mosaic.machine.registers import TENSOR_ROWS, Products, Unit
from jattn.kernels.gpu.mosaic.machine.versions import mosaic


def any_above(unit: Unit, rows: Array, limit: float) -> Array:
    """Whether a number of any row of a warp is above the limit; where products leave to tensor
    memory, of a warpgroup, whose threads wait for one another when they read or write that."""
    if unit.interpreted:
        return jnp.any(rows > limit)
    lower, arith, vector = (
        importlib.import_module(x)
        for x in (
            "jax.experimental.mosaic.gpu",
            "jaxlib.mlir.dialects.arith",
            "jaxlib.mlir.dialects.vector",
        )
    )
    result = mosaic().ShapeDtypeStruct((), jnp.dtype(bool), layout=mosaic().Layout.WG_SPLAT)
    vote = _of_warpgroup if unit.by is Products.TENSOR_MEMORY else _of_warp

    @mosaic().inline_mgpu(arg_types=(unit.layout("t"),), return_type=result)
    def ask(_: Any, rows: Any) -> Any:
        above = (rows > limit).registers.flat
        own = [vector.extract(x, [], [i]) for x in above for i in range(x.type.shape[0])]
        found = vote(functools.reduce(arith.ori, own))
        return lower.FragmentedArray.splat(found, (), is_signed=False)

    return ask(rows)


def _of_warp(own: Any) -> Any:
    arith, nvvm, ir = map(
        importlib.import_module,
        ("jaxlib.mlir.dialects.arith", "jaxlib.mlir.dialects.nvvm", "jaxlib.mlir.ir"),
    )
    all_threads = arith.constant(ir.IntegerType.get_signless(32), -1)
    return nvvm.vote_sync(all_threads, own, nvvm.VoteSyncKind.any)


def _of_warpgroup(own: Any) -> Any:
    utils, ir = map(
        importlib.import_module, ("jax.experimental.mosaic.gpu.utils", "jaxlib.mlir.ir")
    )
    return utils.inline_ptx(
        f"bar.red.or.pred $0, $1, {TENSOR_ROWS}, $2;",
        utils.warpgroup_barrier_idx(sync=False),
        own,
        result_types=ir.IntegerType.get_signless(1),
        has_side_effects=True,
        convergent=True,
    )
