"""Parameters of `torch.nn.Transformer` as those of `jattn.nn.Transformer`, and back.

Arrays go in and out as NumPy's; torch is not imported.

    state = {name: x.numpy() for name, x in theirs.state_dict().items()}
    model = nn.Transformer(8000, 6000, final_norm=True, norm_epsilon=1e-5, rngs=rngs)
    nnx.update(model, jattn.compat.transformer_from_torch(state, num_heads=8))
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jattn.compat.weights import attention_from_torch, attention_to_torch


# Sublayers in the order in which PyTorch numbers their normalisations.
_SUBLAYERS = {
    "encoder": ("self_attention", "feed_forward"),
    "decoder": ("self_attention", "cross_attention", "feed_forward"),
}
_ATTENTION = {"self_attention": "self_attn", "cross_attention": "multihead_attn"}
_LINEAR = {"hidden": "linear1", "out": "linear2"}


def transformer_from_torch(state: Mapping[str, Any], num_heads: int) -> dict[str, Any]:
    """The parameters of `torch.nn.Transformer`, by our names.

    `state` is its `state_dict()`, of tensors or arrays. Without the names that begin with
    `encoder.` or those that begin with `decoder.` only the other stack is given.

    Returns `encoder` and `decoder`, for `nnx.update` of a `jattn.nn.Transformer` with as many
    layers of the same widths, and with `final_norm=True`, `norm_epsilon=1e-5`, and `norm="pre"`
    where theirs is `norm_first=True`. Embeddings and the output projection, which PyTorch's does
    not have, stay as they are.

    Raises ValueError for parameters that are missing or that ours does not have, and where
    num_heads does not divide the width.
    """
    rest = {name: np.asarray(x) for name, x in state.items()}
    found: dict[str, Any] = {}
    for stack, sublayers in _SUBLAYERS.items():
        if not any(name.startswith(f"{stack}.") for name in rest):
            continue
        own: dict[str, Any] = {"layers": {}}
        if f"{stack}.norm.weight" in rest:
            own["norm"] = _norm(rest, f"{stack}.norm")
        n = 0
        while any(name.startswith(f"{stack}.layers.{n}.") for name in rest):
            own["layers"][n] = _layer(rest, f"{stack}.layers.{n}.", sublayers, num_heads)
            n += 1
        found[stack] = own
    if not found:
        raise ValueError("state: expected names that begin with encoder. or decoder., got none")
    if rest:
        raise ValueError(f"state: {min(rest)} has no counterpart in jattn.nn")
    return found


def transformer_to_torch(parameters: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The way back: what `load_state_dict` of a `torch.nn.Transformer` takes, as arrays.

    `parameters` are those of a `jattn.nn.Transformer`, `nnx.to_pure_dict(nnx.state(model,
    nnx.Param))`, of which `encoder` and `decoder` are read.
    """
    found: dict[str, np.ndarray] = {}
    for stack in _SUBLAYERS.keys() & parameters.keys():
        given = parameters[stack]
        if "norm" in given:
            found |= _norm_to_torch(given["norm"], f"{stack}.norm")
        for n, layer in given["layers"].items():
            found |= _layer_to_torch(layer, f"{stack}.layers.{n}.", _SUBLAYERS[stack])
    return found


def _layer(
    rest: dict[str, np.ndarray], prefix: str, sublayers: tuple[str, ...], num_heads: int
) -> dict[str, Any]:
    """One layer's parameters, taken out of `rest`."""
    found: dict[str, Any] = {}
    for n, name in enumerate(sublayers, 1):
        found[f"{name}_residual"] = {"norm": _norm(rest, f"{prefix}norm{n}")}
        if name in _ATTENTION:
            own = f"{prefix}{_ATTENTION[name]}."
            taken = [x for x in rest if x.startswith(own)]
            parts = {x.removeprefix(own): rest.pop(x) for x in taken}
            found[name] = attention_from_torch(parts, num_heads)
        else:
            found[name] = {
                ours: _linear(rest, f"{prefix}{theirs}") for ours, theirs in _LINEAR.items()
            }
    return found


def _layer_to_torch(
    layer: Mapping[str, Any], prefix: str, sublayers: tuple[str, ...]
) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    for n, name in enumerate(sublayers, 1):
        found |= _norm_to_torch(layer[f"{name}_residual"]["norm"], f"{prefix}norm{n}")
        if name in _ATTENTION:
            parts = attention_to_torch(layer[name])
            found |= {f"{prefix}{_ATTENTION[name]}.{part}": x for part, x in parts.items()}
        else:
            for ours, theirs in _LINEAR.items():
                found |= _linear_to_torch(layer[name][ours], f"{prefix}{theirs}")
    return found


def _norm(rest: dict[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    return {"scale": _taken(rest, f"{name}.weight"), **_bias(rest, name)}


def _norm_to_torch(norm: Mapping[str, Any], name: str) -> dict[str, np.ndarray]:
    return {f"{name}.weight": np.asarray(norm["scale"]), **_bias_to_torch(norm, name)}


def _linear(rest: dict[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    return {"kernel": _taken(rest, f"{name}.weight").T, **_bias(rest, name)}


def _linear_to_torch(linear: Mapping[str, Any], name: str) -> dict[str, np.ndarray]:
    return {f"{name}.weight": np.asarray(linear["kernel"]).T, **_bias_to_torch(linear, name)}


def _bias(rest: dict[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    return {"bias": rest.pop(f"{name}.bias")} if f"{name}.bias" in rest else {}


def _bias_to_torch(parameters: Mapping[str, Any], name: str) -> dict[str, np.ndarray]:
    return {f"{name}.bias": np.asarray(parameters["bias"])} if "bias" in parameters else {}


def _taken(rest: dict[str, np.ndarray], name: str) -> np.ndarray:
    if name not in rest:
        raise ValueError(f"state: expected {name}, got {', '.join(rest)[:200]}")
    return rest.pop(name)
