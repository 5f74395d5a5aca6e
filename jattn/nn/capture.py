"""Captures the attention weights of calls of a model."""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, ParamSpec, overload

from flax import nnx
from flax.errors import TraceContextError
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


@overload
def capture_weights(
    model: Callable[_Arguments, Any], *args: _Arguments.args, **kwargs: _Arguments.kwargs
) -> dict[str, Weights]: ...
@overload
def capture_weights(model: Callable[..., Any]) -> AbstractContextManager[dict[str, Weights]]: ...
def capture_weights(
    model: Callable[_Arguments, Any], *args: _Arguments.args, **kwargs: _Arguments.kwargs
) -> Any:
    """Returns the weights of every attention in one call of a module or of its method.

    The keys are the paths of the attention modules; a second call of the same module adds `[1]` to
    its path, and so on. The values `[*B, N, T, S]` are the weights after the softmax and before
    dropout. They are computed in addition; the model's own output is computed as usual. Under a
    transformation, call it inside, with the model as an argument of the transformed function.

    Without arguments of a call, it is a context manager: the dict is filled when its block ends,
    with the weights of all calls of the model in the block. So the model's output can be used too.

    Raises TypeError if `model` is neither a module nor a method of one, and ValueError if its
    weights are being captured already, or if it comes from outside a transformed function.

    >>> encoder = nn.Encoder(1, 8, 2, 16, rngs=nnx.Rngs(0))
    >>> with nn.capture_weights(encoder) as weights:
    ...     out = encoder(jnp.ones((2, 5, 8)), deterministic=True)
    >>> {name: x.shape for name, x in weights.items()}
    {'layers/0/self_attention': (2, 2, 5, 5)}
    """
    module = model if isinstance(model, nnx.Module) else getattr(model, "__self__", None)
    if not isinstance(module, nnx.Module):
        raise TypeError(f"model: expected an nnx.Module or a method of one, got {model!r}")
    if not args and not kwargs:
        return _capturing(module)
    with _capturing(module) as weights:
        model(*args, **kwargs)
    return weights


@contextlib.contextmanager
def _capturing(module: nnx.Module) -> Iterator[dict[str, Weights]]:
    """A context in which the taps of a module are open; it fills the dict at its end."""
    taps: dict[Any, Any] = {
        path: x for path, x in nnx.iter_modules(module) if isinstance(x, WeightsTap)
    }
    if any(tap.is_open for tap in taps.values()):
        raise ValueError("model: expected weights that are not being captured already")
    weights: dict[str, Weights] = {}
    try:
        for tap in taps.values():  # as `nnx.capture` does
            tap.__captures__ = nnx.data((AttentionWeights({}),))
    except TraceContextError as error:
        raise ValueError(
            "model: expected an argument of the transformed function, got a module from outside; "
            "or pass nnx.clone(model)"
        ) from error
    try:
        yield weights
        for path, tap in taps.items():
            name = "/".join(map(str, path[:-1]))
            (captured,) = tap.__captures__
            for call, value in enumerate(captured.get_value().get("weights", ())):
                weights[f"{name}[{call}]" if call else name] = value
    finally:
        for tap in taps.values():
            del tap.__captures__
