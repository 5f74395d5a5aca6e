"""Products of tiles in shared memory and registers, by a warpgroup or by its warps."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array

from jattn._types import Tree
from jattn.kernels.gpu.mosaic.machine.registers import WIDTH, Unit
from jattn.kernels.gpu.mosaic.machine.versions import lowering, mosaic


def multiply(
    unit: Unit,
    pairs: Any,
    transposed: bool = False,
    onto: Any = None,
    on_started: Callable[[], None] = lambda: None,
) -> list[Array]:
    """Computes a · b or a · bᵀ of all pairs together, and adds them to the arrays in `onto`.

    a is in shared memory or registers, b in shared memory. Without `onto`, `on_started()` runs
    before the wait for the products.
    """
    if unit.interpreted:
        on_started()
        pairs = [(a[...], b[...].T if transposed else b[...]) for a, b in pairs]
        products = [jnp.dot(a, b, preferred_element_type=jnp.float32) for a, b in pairs]
        return products if onto is None else [x + y for x, y in zip(onto, products, strict=True)]
    pairs = [(a, b.transpose((1, 0)) if transposed else b) for a, b in pairs]
    if unit.by_warp:
        onto = [None for _ in pairs] if onto is None else onto
        return [_by_warp(unit, a, b, x) for (a, b), x in zip(pairs, onto, strict=True)]

    def add_to(totals: Tree) -> None:
        for total, pair in zip(totals, pairs, strict=True):
            mosaic().wgmma(total, *pair)

    if onto is not None:
        return pl.run_state(add_to)([mosaic().ACC.init(x) for x in onto])

    def fresh(*totals: Any) -> list[Array]:
        add_to(totals)
        on_started()
        return [total[...] for total in totals]

    shapes = [(a.shape[0], b.shape[1]) for a, b in pairs]
    return pl.run_scoped(fresh, *[mosaic().ACC(shape, jnp.float32) for shape in shapes])


def _by_warp(unit: Unit, a: Any, b: Any, onto: Array | None) -> Array:
    total = unit.zeros(a.shape[0], b.shape[1]) if onto is None else onto
    runs = [pl.ds(start, WIDTH) for start in range(0, a.shape[1], WIDTH)]
    # Arrays in memory are loaded to registers by parts.
    pairs = [(a, b)] if isinstance(a, jax.Array) else [(a.at[:, x], b.at[x]) for x in runs]
    for left, other in pairs:
        right = mosaic().load(other, layout=mosaic().Layout.MMA_RHS(other.dtype))
        total = mosaic().mma(total, _as_left(left), right)
    return total


def _as_left(x: Any) -> Array:
    """Loads a left side from shared memory, or renames the registers of a product."""
    layout = mosaic().Layout.MMA_LHS(x.dtype)
    if not isinstance(x, jax.Array):
        return mosaic().load(x, layout=layout)
    result = mosaic().ShapeDtypeStruct(x.shape, x.dtype, layout=layout)

    @mosaic().inline_mgpu(arg_types=(mosaic().Layout.WGMMA,), return_type=result)
    def renamed(_: Any, x: Any) -> Any:
        to = layout.to_mgpu()
        registers = renamed_registers(x.registers, to, x.shape)
        return lowering().FragmentedArray(_registers=registers, _layout=to, _is_signed=None)

    return renamed(x)


def renamed_registers(registers: Any, to: Any, shape: tuple[int, ...]) -> Any:
    """Returns the registers of a sum as those of the left side of a product, in layout `to`.

    Both layouts order registers by groups of eight columns, then by halves of the rows.
    """
    return registers.reshape(to.registers_shape(shape))
