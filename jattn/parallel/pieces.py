"""The kernels for a piece of a call: a part of the keys, whose normalizer comes from all keys."""

from typing import Any

from jattn._types import Tree
from jattn.call import Call
from jattn.kernels import registry
from jattn.kernels.common import lowering
from jattn.kernels.common.vjp import FunctionName
from jattn.spec import Shapes, Spec


def check_implementation(name: str | None) -> None:
    """Raises NotImplementedError for an implementation that cannot compute a part of the keys."""
    registry.check_name(name)
    if name is not None and name not in _OF_PIECES:
        among = " and ".join(map(repr, _OF_PIECES))
        registry.refuse(name, f"it computes whole rows; {among} compute parts of the keys")


_OF_PIECES = ("native", "blockwise")


def run(
    function: FunctionName,
    like: Tree,
    implementation: str | None,
    spec: Spec,
    *operands: Tree,
    shapes: Shapes,
) -> Tree:
    """Runs a function of the named kernel, or of the first kernel that can compute a piece.

    Raises NotImplementedError if the named kernel cannot.
    """
    functions = registry.functions(Call(spec, shapes, implementation=implementation), _OF_PIECES)
    assert functions is not None, "the reference computes no pieces"

    def on_platform(platform: str, *operands: Any) -> Any:
        return getattr(functions.on(platform), function)(*operands)

    return lowering.platform_dependent(on_platform, like, spec, *operands)
