"""Attention weights of a model's call: the tap that they pass through, and what reads it."""

from collections.abc import Callable
from typing import Any, ParamSpec

from flax import nnx
from jaxtyping import Array, Float

from jattn._types import Weights
from jattn.nn.module import Module


_Arguments = ParamSpec("_Arguments")


class AttentionWeights(nnx.Intermediate):
    """The variable type under which attention weights are captured."""


class WeightsTap(Module):
    """Identity, through which attention weights pass while somebody captures them.

    Open inside `nnx.capture(..., AttentionWeights)`, and so inside `capture_weights`.
    """

    @property
    def is_open(self) -> bool:
        """Whether somebody captures the weights of this call."""
        captures = getattr(self, "__captures__", ())
        return any(type(capture) is AttentionWeights for capture in captures)

    def __call__(self, weights: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        self.sow(AttentionWeights, "weights", weights)
        return weights


def capture_weights(
    model: Callable[_Arguments, Any], *args: _Arguments.args, **kwargs: _Arguments.kwargs
) -> dict[str, Weights]:
    """Every attention's weights in one call of a module or of a module's method.

        weights = capture_weights(model, source, target, cross_mask=padding)
        weights["decoder/layers/0/cross_attention"]  # [*B, N, T, S]

    Weights are those after the softmax and before dropout, by the path of the module that made
    them; a second call of the same module adds `[1]` to its path, and so on. They are computed
    for this purpose (T×S each), the output that the model goes on with is the usual one. Under
    a transformation call it inside, with the model an argument of the transformed function.
    """
    module = model if isinstance(model, nnx.Module) else getattr(model, "__self__", None)
    if not isinstance(module, nnx.Module):
        raise TypeError(f"model: expected an nnx.Module or a method of one, got {model!r}")
    try:
        _, captured = nnx.capture(model, AttentionWeights)(*args, **kwargs)
    finally:
        # nnx.capture leaves its mark on the modules when the call raises.
        for _, part in nnx.iter_modules(module):
            if hasattr(part, "__captures__"):
                delattr(part, "__captures__")
    weights = {}
    for path, variable in nnx.to_flat_state(captured):
        name = "/".join(map(str, path[:-2]))
        for call, value in enumerate(variable.get_value()):
            weights[f"{name}[{call}]" if call else name] = value
    return weights
