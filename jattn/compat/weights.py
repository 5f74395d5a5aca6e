"""Converts parameters between `torch.nn.MultiheadAttention` and `jattn.nn.MultiHeadAttention`.

All arrays are NumPy's, in dictionaries; torch is not imported.

    import numpy as np
    state = {name: x.numpy() for name, x in torch_layer.state_dict().items()}
    nnx.update(layer, jattn.compat.attention_from_torch(state, num_heads=8))

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
    out = parameter(arrays, "out_proj.weight")
    width = out.shape[0]
    if num_heads < 1 or width % num_heads:
        raise ValueError(f"num_heads: expected a divisor of D = {width}, got {num_heads}")
    heads = (num_heads, width // num_heads)
    if "in_proj_weight" in arrays:
        kernels = np.split(arrays["in_proj_weight"], 3)
    else:
        kernels = [parameter(arrays, f"{name[0]}_proj_weight") for name in _PARTS]
    parameters: dict[str, dict[str, np.ndarray]] = {
        name: {"kernel": kernel.T.reshape(-1, *heads)}
        for name, kernel in zip(_PARTS, kernels, strict=True)
    }
    parameters["out"] = {"kernel": out.T.reshape(*heads, width)}
    if "in_proj_bias" in arrays:
        for name, bias in zip(_PARTS, np.split(arrays["in_proj_bias"], 3), strict=True):
            parameters[name]["bias"] = bias.reshape(heads)
        parameters["out"]["bias"] = parameter(arrays, "out_proj.bias")
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


def parameter(arrays: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    """Returns a parameter; raises ValueError if it is missing."""
    if name not in arrays:
        raise ValueError(f"state: expected {name}, got {', '.join(arrays)[:200]}")
    return arrays[name]
