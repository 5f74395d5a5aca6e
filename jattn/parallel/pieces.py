"""The kernel of a piece: what computes a part of the keys, whose normalizer comes from all."""

import functools
from typing import Any

from jattn._types import Tree
from jattn.kernels import registry
from jattn.kernels.common import lowering, vjp
from jattn.spec import Shapes, Spec


def check_implementation(name: str | None) -> None:
    """Raises NotImplementedError for what cannot compute a part of the keys."""
    registry.check_name(name)
    if name is not None and name not in _OF_PIECES:
        among = " and ".join(map(repr, _OF_PIECES))
        registry.refuse(name, f"it computes whole rows; {among} compute parts of the keys")


_OF_PIECES = ("native", "blockwise")


def run(
    which: str, like: Tree, implementation: str | None, spec: Spec, *operands: Tree, shapes: Shapes
) -> Tree:
    """One of the functions of `AttentionVJP`, by name, of the first kernel that can compute a
    piece, or of the one that is named.

    Raises NotImplementedError where that cannot.
    """
    names = [implementation] if implementation else []
    for name in names:
        registry.check_supported(name, spec, shapes)
    names = names or [x for x in registry.candidates(spec, shapes) if x in _OF_PIECES]
    functions: Any = registry.functions(names, shapes, named=implementation is not None)[0]
    found = functools.partial(vjp.run_on, functions, which)
    return lowering.platform_dependent(found, like, spec, *operands)
