"""Captures the attention weights of a call of a model."""

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
    """The identity function of attention weights, at which they can be captured.

    It is open inside `nnx.capture(..., AttentionWeights)`, and so inside `capture_weights`.

    >>> out, captured = nnx.capture(nn.WeightsTap(), nn.AttentionWeights)(jnp.eye(2))
    >>> [x.tolist() for x in captured["weights"]]
    [[[1.0, 0.0], [0.0, 1.0]]]
    """

    @property
    def is_open(self) -> bool:
        """Whether the weights of this call are captured."""
        captures = getattr(self, "__captures__", ())
        return any(type(capture) is AttentionWeights for capture in captures)

    def __call__(self, weights: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        if self.is_open:
            self.sow(AttentionWeights, "weights", weights)
        return weights


def capture_weights(
    model: Callable[_Arguments, Any], *args: _Arguments.args, **kwargs: _Arguments.kwargs
) -> dict[str, Weights]:
    """Returns the weights of every attention in one call of a module or of its method.

    The keys are the paths of the attention modules; a second call of the same module adds `[1]` to
    its path, and so on. The values `[*B, N, T, S]` are the weights after the softmax and before
    dropout. They are computed in addition; the model's own output is computed as usual. Under a
    transformation, call it inside, with the model as an argument of the transformed function.

    >>> encoder = nn.Encoder(1, 8, 2, 16, rngs=nnx.Rngs(0))
    >>> weights = nn.capture_weights(encoder, jnp.ones((2, 5, 8)), deterministic=True)
    >>> {name: x.shape for name, x in weights.items()}
    {'layers/0/self_attention': (2, 2, 5, 5)}
    """
    module = model if isinstance(model, nnx.Module) else getattr(model, "__self__", None)
    if not isinstance(module, nnx.Module):
        raise TypeError(f"model: expected an nnx.Module or a method of one, got {model!r}")
    try:
        _, captured = nnx.capture(model, AttentionWeights)(*args, **kwargs)
    finally:
        # nnx.capture leaves its attribute on the modules if the call raises.
        for _, part in nnx.iter_modules(module):
            if hasattr(part, "__captures__"):
                delattr(part, "__captures__")
    weights = {}
    for path, variable in nnx.to_flat_state(captured):
        name = "/".join(map(str, path[:-2]))
        for call, value in enumerate(variable.get_value()):
            weights[f"{name}[{call}]" if call else name] = value
    return weights
