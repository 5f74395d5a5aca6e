"""The call of the kernels in Mosaic, `hopper`, `ampere` and `blackwell`: arrays in the sizes that
tensor cores need, and the backward pass.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jattn import softmax, tile
from jattn._types import Tree
from jattn.call import Call
from jattn.kernels.common import entries, slicing
from jattn.kernels.common.vjp import AttentionVJP, cast_cotangent
from jattn.kernels.gpu.mosaic.kernels import parameter_gradients
from jattn.kernels.gpu.mosaic.machine.registers import ROWS, WIDTH, Products, Unit
from jattn.kernels.gpu.mosaic.tile import hoisted
from jattn.kernels.gpu.mosaic.tile.gradients import Parameter, with_slope
from jattn.kernels.gpu.mosaic.tile.problem import GPUProblem
from jattn.kernels.gpu.mosaic.tile.spec_refs import SpecRefs
from jattn.spec import Shapes, Spec, Tiling, has_mask, parameters


_MAX_HEAD_SIZE = 256


class ForwardKernel(NamedTuple):
    """The forward kernel of one kind of GPU.

    tiling: returns queries of a program and keys of a tile, for a spec and shapes.
    products: the threads or units that multiply.
    run: computes output `[B, T, N, V]` and the normalizer `[B, T, N]` from `(problem, spec, query,
        key, value)`.
    """

    tiling: Callable[[Spec, Shapes], Tiling]
    products: Products
    run: Callable[..., Any]


class GradientKernels(NamedTuple):
    """The kernels of one kind of GPU for gradients.

    rows: returns queries, or keys, of a program, for a head size.
    streamed: returns, for a spec and a head size, the number of keys in a tile, for gradients of
        queries, and the number of queries in a tile, for gradients of keys.
    products: the threads or units that multiply.
    run: computes gradients from `(problem, spec, per_query, key, value, which)`: of the queries or,
        with `problem.by_key`, those of keys and values that `which` lists.
    max_joint_head_size: the largest head size for which registers hold gradients of keys and of
        values beside a tile; for wider heads each has a kernel of its own.
    columns: returns the columns of a tile that a warpgroup computes at once, for a spec and by keys
        or not; None: all.
    of_parameters: the kernels whose tiles and products the gradients of parameters use; None:
        these.
    """

    rows: Callable[[int], int]
    streamed: Callable[[Spec, int], tuple[int, int]]
    products: Products
    run: Callable[..., list[Array]]
    max_joint_head_size: int = 128
    columns: Callable[[Spec, bool], int | None] = lambda *_: None
    of_parameters: "GradientKernels | None" = None


def unsupported(kernel: ForwardKernel, call: Call) -> str | None:
    """Returns why a kernel cannot compute a prepared call on any machine; None if it can."""
    spec, shapes = call.spec, call.shapes
    if shapes.dtype not in (jnp.bfloat16, jnp.float16):
        return f"expected bfloat16 or float16, got {shapes.dtype}"
    width = max(shapes.H, shapes.V)
    if width > _MAX_HEAD_SIZE:  # registers hold no wider ones
        return f"expected head sizes up to {_MAX_HEAD_SIZE}, got {width}"
    if 0 in (shapes.B, shapes.T, shapes.S):
        return None
    spec = dataclasses.replace(spec, dropout_key=None, dropout_rate=0.0)
    return entries.unsupported(_one_tile, shapes, kernel.tiling(call.spec, shapes), spec=spec)


def _one_tile(shapes: Shapes, tiling: Tiling, spec: Spec) -> Tree:
    """Computes scores and all their derivatives for one tile of zeros."""
    T, S = slicing.round_up(shapes.T, shapes.S, tiling)
    spec = slicing.pad_spec(spec, shapes.T, shapes.S, T, S)
    spec = hoisted.replaced(spec, shapes._replace(T=T, S=S))
    refs = SpecRefs(spec, Tiling(ROWS, tiling.block_kv))
    modify, operands = refs.example()

    def scores_and_slopes(*operands: Tree) -> Tree:
        *parts, products = operands
        tile = refs.tile(*parts)
        kinds = [Parameter.of(spec, x) for x in range(len(parameters(spec)))]
        summed = [x.which for x in kinds if x.by_distance or not x.looked_up]
        return modify(*operands), [with_slope(tile, x, products, True) for x in summed]

    return refs.run_example(scores_and_slopes, operands)


def _width(H: int, V: int) -> int:
    """Returns the head size in kernels, the same for keys and values."""
    return -(-max(H, V) // WIDTH) * WIDTH


def _unpadded(x: Array, shape: tuple[int, ...]) -> Array:
    return slicing.unpadded(x, shape).astype(jnp.float32)


def _forward_pass(
    kernel: ForwardKernel, platform: str, spec: Spec, query: Array, key: Array, value: Array
) -> tuple[Array, softmax.Normalizer, Array]:
    tiling = kernel.tiling(spec, Shapes.of(query, value))
    width = _width(key.shape[3], value.shape[3])
    padded = slicing.PaddedCall.of(tiling, lambda _: width, spec, (query,), key, value)
    spec, shapes, (q,), k, v = padded
    if has_mask(spec):
        # What is masked does not exist: NaN reaches the queries that attend to it through scores.
        marks = jax.vmap(jax.vmap(tile.nan_where_nonfinite))(v)[..., None]
        k, v = k + marks.astype(k.dtype), tile.finite(v)
    unit = Unit(platform == "cpu", by=kernel.products)
    problem = GPUProblem.of(hoisted.replaced(spec, shapes), shapes, tiling, unit)
    out, normalizer = kernel.run(problem, spec, q, k, v)
    rows = query.shape[:3]
    normalizer = jax.tree.map(lambda x: _unpadded(x, rows), normalizer)
    return _unpadded(out, (*rows, value.shape[3])), normalizer, jnp.zeros((), bool)


def _backward_pass(
    kernels: GradientKernels,
    platform: str,
    spec: Spec,
    per_query: Tree,
    key: Array,
    value: Array,
    _: Array,
) -> tuple[list[Array], Array, Array, Array]:
    width = _width(key.shape[3], value.shape[3])
    wide = kernels.rows(width)
    rows = cast_cotangent(per_query)
    call = slicing.PaddedCall.of(Tiling(wide, wide), lambda _: width, spec, rows, key, value)
    (query, d_out, *rows), keys = call.rows, (call.key, call.value)
    if has_mask(spec):
        # RowStatistics with NaN in them reach those that attend to them through maximum and delta.
        query, d_out, *keys = map(tile.finite, (query, d_out, *keys))
    operands = (query, d_out, *rows), *keys
    hoisted_spec = hoisted.replaced(call.spec, call.shapes)

    def problem(kernels: GradientKernels, rows: int, by_key: bool) -> GPUProblem:
        keys_streamed, queries_streamed = kernels.streamed(spec, width)
        tiling = Tiling(queries_streamed, rows) if by_key else Tiling(rows, keys_streamed)
        unit = Unit(platform == "cpu", by_key, kernels.products)
        columns = kernels.columns(spec, by_key)
        return GPUProblem.of(hoisted_spec, call.shapes, tiling, unit, columns=columns)

    d_params = []
    if parameters(spec):
        of_parameters = kernels.of_parameters or kernels
        problems = problem(of_parameters, ROWS, False), problem(of_parameters, ROWS, True)
        d_params = parameter_gradients.of(*problems, call.spec, *operands)
    (d_query,) = kernels.run(problem(kernels, wide, False), call.spec, *operands, (0,))
    together = [(0, 1)] if width <= kernels.max_joint_head_size else [(0,), (1,)]
    by_key = problem(kernels, wide, True)
    d_keys = (kernels.run(by_key, call.spec, *operands, x) for x in together)
    d_key, d_value = itertools.chain.from_iterable(d_keys)
    pairs = (d_query, per_query[0]), (d_key, key), (d_value, value)
    d_query, d_key, d_value = (_unpadded(d, x.shape) for d, x in pairs)
    return slicing.unpadded_parameters(d_params, spec), d_query, d_key, d_value


def functions(forward: ForwardKernel, backward: GradientKernels, platform: str) -> AttentionVJP:
    """Returns the forward and backward functions; they are interpreted on a CPU."""
    return AttentionVJP(
        functools.partial(_forward_pass, forward, platform),
        functools.partial(_backward_pass, backward, platform),
    )
