"""The kernels that compute attention to a part of the keys, for results that are merged later."""

from typing import Any

import jax

from jattn._types import Tree
from jattn.call import Call
from jattn.kernels import registry
from jattn.kernels.common import lowering
from jattn.kernels.common.vjp import FunctionName
from jattn.spec import Shapes, Spec


def check_implementation(name: str | None) -> None:
    """Raises NotImplementedError for an implementation that cannot compute a part of the keys."""
    registry.check_name(name)
    if name is not None and name not in _PARTIAL_KERNELS:
        possible = " and ".join(map(repr, _PARTIAL_KERNELS))
        registry.refuse(name, f"it computes whole rows; {possible} compute parts of the keys")


_PARTIAL_KERNELS = ("native", "blockwise")


def run(
    function: FunctionName,
    like: Tree,
    implementation: str | None,
    spec: Spec,
    *operands: Tree,
    shapes: Shapes,
) -> Tree:
    """Runs a function of the named kernel, or of the first for this spec; results are as `like`."""
    call = Call(spec, shapes, implementation=implementation)
    functions = registry.functions(call, _PARTIAL_KERNELS)
    assert functions is not None, "the reference cannot compute a part of the keys"

    def on_platform(platform: str, *operands: Any) -> Any:
        return getattr(functions.on(platform), function)(*operands)

    result_types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), like)
    return lowering.platform_dependent(on_platform, result_types, spec, *operands)
