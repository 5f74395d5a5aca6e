"""Linear attention on CPUs by a kernel in C++, `src/linear.cc`, called from XLA.

XLA's loop over chunks of tokens spends its time on small matrix products, which are two to four
times as fast in the kernel.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jattn.kernels.common import lowering
from jattn.kernels.cpu import library
from jattn.kernels.protocol import LinearKernel
from jattn.kernels.xla.linear import Formula, Sums


def _unavailable(operands: Any) -> str | None:
    """Returns why the kernel cannot compute these operands in this program; None if it can."""
    if lowering.exported():
        return "an exported program may run where its library is not"
    if not all(x.size for x in jax.tree.leaves(operands)):
        return "an array is empty"
    return library.unavailable("linear", operands[0].dtype)


def _attend(
    formula: Formula, query: Array, key: Array, value: Array, log_decay: Any, sums: Sums
) -> tuple[Array, Array, Sums]:
    """Computes `xla.linear.attend`; the size of chunks is the kernel's own."""
    dtype = query.dtype
    logs = jnp.zeros((1, 1, 1, 0), dtype) if log_decay is None else log_decay
    like = (*query.shape[:-1], value.shape[-1]), query.shape[:-1], *(x.shape for x in sums)
    call = jax.ffi.ffi_call(
        library.target("linear", dtype),
        [jax.ShapeDtypeStruct(shape, dtype) for shape in like],
        vmap_method="broadcast_all",
    )
    rules = {"maps": formula.maps, "divides": formula.divides, "strict": formula.strict}
    out, denominator, by_value, by_key = call(query, key, value, logs, *sums, **rules)
    return out, denominator, (by_value, by_key)


KERNEL = LinearKernel(_unavailable, _attend)
