"""Converts parameters between `torch.nn` and `jattn.nn`: of attention, and of the Transformer.

All arrays are NumPy's, in dictionaries; torch is not imported.

    state = {name: x.numpy() for name, x in theirs.state_dict().items()}
    nnx.update(layer, jattn.compat.attention_from_torch(state, num_heads=8))

    model = nn.Transformer(8000, 6000, final_norm=True, norm_epsilon=1e-5, rngs=rngs)
    nnx.update(model, jattn.compat.transformer_from_torch(state, num_heads=8))

Flax's `MultiHeadAttention` (NNX and Linen) has the names and shapes of our parameters: its state
needs no conversion.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np


_PARTS = ("query", "key", "value")


def attention_from_torch(
    state: Mapping[str, Any], num_heads: int
) -> dict[str, dict[str, np.ndarray]]:
    """Converts the parameters of a `torch.nn.MultiheadAttention` to our names and shapes.

    `state` is the module's `state_dict()`, of tensors or arrays: `in_proj_weight [3 D, D]`, or
    `q_proj_weight [D, D]`, `k_proj_weight [D, Dk]` and `v_proj_weight [D, Dv]`, with
    `out_proj.weight [D, D]` and, if it has biases, `in_proj_bias [3 D]` and `out_proj.bias [D]`.

    Returns `query`, `key`, `value` with `kernel [D, N, H]` and `bias [N, H]`, and `out` with
    `kernel [N, H, D]` and `bias [D]`.

    Raises ValueError for missing parameters, for parameters without a counterpart (`bias_k`,
    `bias_v`), and if N does not divide D.

    >>> state = {"in_proj_weight": jnp.ones((24, 8)), "out_proj.weight": jnp.ones((8, 8))}
    >>> jattn.compat.attention_from_torch(state, num_heads=2)["query"]["kernel"].shape
    (8, 2, 4)
    """
    arrays = {name: np.asarray(x) for name, x in state.items()}
    if "bias_k" in arrays or "bias_v" in arrays:
        raise ValueError("state: bias_k and bias_v have no counterpart in jattn.nn")
    out = _parameter(arrays, "out_proj.weight")
    width = out.shape[0]
    if num_heads < 1 or width % num_heads:
        raise ValueError(f"num_heads: expected a divisor of D = {width}, got {num_heads}")
    heads = (num_heads, width // num_heads)
    if "in_proj_weight" in arrays:
        kernels = np.split(arrays["in_proj_weight"], 3)
    else:
        kernels = [_parameter(arrays, f"{name[0]}_proj_weight") for name in _PARTS]
    parameters: dict[str, dict[str, np.ndarray]] = {
        name: {"kernel": kernel.T.reshape(-1, *heads)}
        for name, kernel in zip(_PARTS, kernels, strict=True)
    }
    parameters["out"] = {"kernel": out.T.reshape(*heads, width)}
    if "in_proj_bias" in arrays:
        for name, bias in zip(_PARTS, np.split(arrays["in_proj_bias"], 3), strict=True):
            parameters[name]["bias"] = bias.reshape(heads)
        parameters["out"]["bias"] = _parameter(arrays, "out_proj.bias")
    return parameters


def attention_to_torch(parameters: Mapping[str, Mapping[str, Any]]) -> dict[str, np.ndarray]:
    """Converts parameters to arrays for `load_state_dict` of a `torch.nn.MultiheadAttention`.

    If keys and values have the queries' width, the three projections are one `in_proj_weight`.

    >>> layer = nn.MultiHeadAttention(2, 8, rngs=nnx.Rngs(0))
    >>> sorted(jattn.compat.attention_to_torch(nnx.to_pure_dict(nnx.state(layer, nnx.Param))))
    ['in_proj_bias', 'in_proj_weight', 'out_proj.bias', 'out_proj.weight']
    """
    arrays = {
        name: {part: np.asarray(x) for part, x in parameters[name].items()}
        for name in (*_PARTS, "out")
    }
    kernels = [arrays[name]["kernel"] for name in _PARTS]
    flat = [x.reshape(x.shape[0], -1).T for x in kernels]
    out = arrays["out"]["kernel"]
    state = {"out_proj.weight": out.reshape(-1, out.shape[-1]).T}
    if len({x.shape for x in flat}) == 1:
        state["in_proj_weight"] = np.concatenate(flat)
    else:
        state |= {f"{name[0]}_proj_weight": x for name, x in zip(_PARTS, flat, strict=True)}
    if "bias" in arrays["out"]:
        state["in_proj_bias"] = np.concatenate([arrays[x]["bias"].reshape(-1) for x in _PARTS])
        state["out_proj.bias"] = arrays["out"]["bias"]
    return state


def _parameter(arrays: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    """Returns a parameter; raises ValueError if it is missing."""
    if name not in arrays:
        raise ValueError(f"state: expected {name}, got {', '.join(arrays)[:200]}")
    return arrays[name]


# The sublayers in the order in which PyTorch numbers their layer norms.
_SUBLAYERS = {
    "encoder": ("self_attention", "feed_forward"),
    "decoder": ("self_attention", "cross_attention", "feed_forward"),
}
_ATTENTION = {"self_attention": "self_attn", "cross_attention": "multihead_attn"}
_LINEAR = {"hidden": "linear1", "out": "linear2"}


def transformer_from_torch(state: Mapping[str, Any], num_heads: int) -> dict[str, Any]:
    """Converts the parameters of a `torch.nn.Transformer` to the names of `jattn.nn.Transformer`.

    `state` is the module's `state_dict()`, of tensors or arrays. If it has only names that begin
    with `encoder.` or only names that begin with `decoder.`, only that stack is returned.

    Returns `encoder` and `decoder`, for `nnx.update` of a `jattn.nn.Transformer` with the same
    number of layers and the same widths, `final_norm=True`, `norm_epsilon=1e-5`, and `norm="pre"`
    if PyTorch's has `norm_first=True`. `nnx.update` leaves embeddings and the output projection
    unchanged, as PyTorch's module has none.

    Raises ValueError for missing parameters, for parameters without a counterpart, and if
    num_heads does not divide the width.

    >>> state = {"encoder.norm.weight": np.ones(8), "encoder.norm.bias": np.zeros(8)}
    >>> [*jattn.compat.transformer_from_torch(state, num_heads=2)["encoder"]["norm"]]
    ['scale', 'bias']
    """
    rest = {name: np.asarray(x) for name, x in state.items()}
    parameters: dict[str, Any] = {}
    for stack, sublayers in _SUBLAYERS.items():
        if not any(name.startswith(f"{stack}.") for name in rest):
            continue
        converted: dict[str, Any] = {"layers": {}}
        if f"{stack}.norm.weight" in rest:
            converted["norm"] = _module(rest, f"{stack}.norm", "scale")
        n = 0
        while any(name.startswith(f"{stack}.layers.{n}.") for name in rest):
            converted["layers"][n] = _layer(rest, f"{stack}.layers.{n}.", sublayers, num_heads)
            n += 1
        parameters[stack] = converted
    if not parameters:
        raise ValueError("state: expected names that begin with encoder. or decoder., got none")
    if rest:
        raise ValueError(f"state: {min(rest)} has no counterpart in jattn.nn")
    return parameters


def transformer_to_torch(parameters: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Converts parameters to arrays for `load_state_dict` of a `torch.nn.Transformer`.

    `parameters` is `nnx.to_pure_dict(nnx.state(model, nnx.Param))` of a `jattn.nn.Transformer`;
    only its `encoder` and `decoder` are used.

    >>> encoder = nn.Encoder(1, 8, 2, 16, final_norm=True, rngs=nnx.Rngs(0))
    >>> parameters = {"encoder": nnx.to_pure_dict(nnx.state(encoder, nnx.Param))}
    >>> "encoder.norm.weight" in jattn.compat.transformer_to_torch(parameters)
    True
    """
    state: dict[str, np.ndarray] = {}
    for stack in _SUBLAYERS.keys() & parameters.keys():
        stack_parameters = parameters[stack]
        if "norm" in stack_parameters:
            state |= _module_to_torch(stack_parameters["norm"], f"{stack}.norm")
        for n, layer in stack_parameters["layers"].items():
            state |= _layer_to_torch(layer, f"{stack}.layers.{n}.", _SUBLAYERS[stack])
    return state


def _layer(
    rest: dict[str, np.ndarray], prefix: str, sublayers: tuple[str, ...], num_heads: int
) -> dict[str, Any]:
    """Removes one layer's parameters from `rest` and returns them under our names."""
    parameters: dict[str, Any] = {}
    for n, name in enumerate(sublayers, 1):
        parameters[f"{name}_residual"] = {"norm": _module(rest, f"{prefix}norm{n}", "scale")}
        if name in _ATTENTION:
            attention_prefix = f"{prefix}{_ATTENTION[name]}."
            names = [x for x in rest if x.startswith(attention_prefix)]
            parts = {x.removeprefix(attention_prefix): rest.pop(x) for x in names}
            parameters[name] = attention_from_torch(parts, num_heads)
        else:
            parameters[name] = {
                ours: _module(rest, f"{prefix}{theirs}", "kernel")
                for ours, theirs in _LINEAR.items()
            }
    return parameters


def _layer_to_torch(
    layer: Mapping[str, Any], prefix: str, sublayers: tuple[str, ...]
) -> dict[str, np.ndarray]:
    state: dict[str, np.ndarray] = {}
    for n, name in enumerate(sublayers, 1):
        state |= _module_to_torch(layer[f"{name}_residual"]["norm"], f"{prefix}norm{n}")
        if name in _ATTENTION:
            parts = attention_to_torch(layer[name])
            state |= {f"{prefix}{_ATTENTION[name]}.{part}": x for part, x in parts.items()}
        else:
            for ours, theirs in _LINEAR.items():
                state |= _module_to_torch(layer[name][ours], f"{prefix}{theirs}")
    return state


def _module(rest: dict[str, np.ndarray], name: str, weight: str) -> dict[str, np.ndarray]:
    """Removes the parameters of a norm or linear map from `rest`; we call its weight `weight`."""
    parameters = {weight: _parameter(rest, f"{name}.weight").T}
    del rest[f"{name}.weight"]
    if f"{name}.bias" in rest:
        parameters["bias"] = rest.pop(f"{name}.bias")
    return parameters


def _module_to_torch(parameters: Mapping[str, Any], name: str) -> dict[str, np.ndarray]:
    names = {"scale": "weight", "kernel": "weight", "bias": "bias"}
    return {f"{name}.{names[ours]}": np.asarray(x).T for ours, x in parameters.items()}
