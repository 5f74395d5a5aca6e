"""Decisions that threads take together, so that all of them do the same."""

import functools
import importlib
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from jattn.kernels.gpu.mosaic.machine.registers import TENSOR_ROWS, Products, Unit
from jattn.kernels.gpu.mosaic.machine.versions import lowering, mlir, mosaic


def any_above(unit: Unit, rows: Array, limit: float) -> Array:
    """Returns whether a number of any row of a warp is above the limit.

    If products go to tensor memory, all rows of the warpgroup count, because its threads wait for
    one another whenever they read or write that memory.
    """
    if unit.interpreted:
        return jnp.any(rows > limit)
    result = mosaic().ShapeDtypeStruct((), jnp.dtype(bool), layout=mosaic().Layout.WG_SPLAT)
    vote = _of_warpgroup if unit.by is Products.TENSOR_MEMORY else _of_warp

    @mosaic().inline_mgpu(arg_types=(unit.layout("t"),), return_type=result)
    def any_row(_: Any, rows: Any) -> Any:
        above = (rows > limit).registers.flat
        extract = mlir("vector").extract
        of_thread = [extract(x, [], [i]) for x in above for i in range(x.type.shape[0])]
        answer = vote(functools.reduce(mlir("arith").ori, of_thread))
        return lowering().FragmentedArray.splat(answer, (), is_signed=False)

    return any_row(rows)


def _of_warp(answer: Any) -> Any:
    nvvm = mlir("nvvm")
    all_threads = mlir("arith").constant(mlir("ir").IntegerType.get_signless(32), -1)
    return nvvm.vote_sync(all_threads, answer, nvvm.VoteSyncKind.any)


def _of_warpgroup(answer: Any) -> Any:
    utils = importlib.import_module("jax.experimental.mosaic.gpu.utils")
    return utils.inline_ptx(
        f"bar.red.or.pred $0, $1, {TENSOR_ROWS}, $2;",
        utils.warpgroup_barrier_idx(sync=False),
        answer,
        result_types=mlir("ir").IntegerType.get_signless(1),
        has_side_effects=True,
        convergent=True,
    )
