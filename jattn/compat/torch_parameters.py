"""Converts parameters between `torch.nn` and `jattn.nn`: of attention, and of the Transformer.

The results are NumPy arrays, in dictionaries; torch is not imported.

    nnx.update(layer, jattn.compat.attention_from_torch(theirs.state_dict(), num_heads=8))

    model = nn.Transformer(8000, 6000, final_norm=True, norm_epsilon=1e-5, rngs=rngs)
    nnx.update(model, jattn.compat.transformer_from_torch(theirs.state_dict(), num_heads=8))

Flax's `MultiHeadAttention` (NNX and Linen) has the names and shapes of our parameters: its state
needs no conversion.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np


_PARTS = ("query", "key", "value")


@dataclasses.dataclass(frozen=True)
class _Parameters:
    """The parameters that are not yet converted, by name.

    argument: the name of the argument that has them, for messages.
    target: the library to which they are converted, for messages.
    arrays: the parameters; each is removed when it is converted.
    """

    argument: str
    target: str
    arrays: dict[str, np.ndarray]

    def has(self, prefix: str, suffix: str = "") -> bool:
        """Returns whether a name begins with `prefix` and ends with `suffix`."""
        return any(x.startswith(prefix) and x.endswith(suffix) for x in self.arrays)

    def remove(self, name: str, axes: str, *sizes: int | str, reason: str = "") -> np.ndarray:
        """Removes a parameter and returns it; raises ValueError if it is missing, and as
        `_check_shape`."""
        if name not in self.arrays:
            names = ", ".join(self.arrays)[:200] or "none"
            raise ValueError(f"{self.argument}: expected {name}, got {names}")
        _check_shape(name, self.arrays[name], axes, *sizes, reason=reason)
        return self.arrays.pop(name)

    def check_empty(self) -> None:
        """Raises ValueError if parameters are left."""
        if self.arrays:
            name = min(self.arrays)
            raise ValueError(f"{self.argument}: {name} has no counterpart in {self.target}")


def _check_shape(
    name: str, array: np.ndarray, axes: str, *sizes: int | str, reason: str = ""
) -> None:
    """Raises ValueError unless an array has these sizes; a string stands for any size."""
    fits = len(sizes) == array.ndim and all(
        isinstance(size, str) or size == n for size, n in zip(sizes, array.shape, strict=True)
    )
    if not fits:
        shape = ", ".join(map(str, sizes))
        equals = "" if shape == axes else f" = [{shape}]"
        raise ValueError(f"{name}: expected [{axes}]{equals}{reason}, got {[*array.shape]}")


def _from_torch(state: Mapping[str, Any]) -> _Parameters:
    """Returns the parameters of a module of torch, which are to be converted."""
    return _Parameters("state", "jattn.nn", {name: _as_array(x) for name, x in state.items()})


def _as_array(x: Any) -> np.ndarray:
    """Converts a tensor, which may require a gradient, or an array to a NumPy array."""
    if not hasattr(x, "detach"):
        return np.asarray(x)
    x = x.detach().cpu()
    if str(x.dtype) == "torch.bfloat16":  # which NumPy lacks
        return x.float().numpy().astype(jnp.bfloat16)
    return x.numpy()


def _to_torch(parameters: Mapping[str, Any]) -> _Parameters:
    """Returns our parameters, which are to be converted."""
    return _Parameters("parameters", "torch", _by_name(parameters))


def _by_name(parameters: Mapping[str, Any], prefix: str = "") -> dict[str, np.ndarray]:
    """Returns the arrays of nested dictionaries by their names, such as `query.kernel`."""
    arrays: dict[str, np.ndarray] = {}
    for name, x in parameters.items():
        is_array = not isinstance(x, Mapping)
        full_name = f"{prefix}{name}"
        arrays |= {full_name: np.asarray(x)} if is_array else _by_name(x, f"{full_name}.")
    return arrays


def attention_from_torch(
    state: Mapping[str, Any], num_heads: int
) -> dict[str, dict[str, np.ndarray]]:
    """Converts the parameters of a `torch.nn.MultiheadAttention` to our names and shapes.

    `state` is the module's `state_dict()`, of tensors or arrays: `in_proj_weight [3 D, D]`, or
    `q_proj_weight [D, D]`, `k_proj_weight [D, E]` and `v_proj_weight [D, E]`, with
    `out_proj.weight [D, D]` and, if it has biases, `in_proj_bias [3 D]` and `out_proj.bias [D]`.

    Returns `query`, `key`, `value` with `kernel [D or E, N, H]` and `bias [N, H]`, and `out` with
    `kernel [N, H, D]` and `bias [D]`.

    Raises ValueError for missing parameters, for parameters without a counterpart (`bias_k`,
    `bias_v`), for wrong shapes, if `kdim` and `vdim` differ, as `jattn.nn.MultiHeadAttention` has
    one `in_kv_features` for both, and if N does not divide D.

    >>> state = {"in_proj_weight": jnp.ones((24, 8)), "out_proj.weight": jnp.ones((8, 8))}
    >>> jattn.compat.attention_from_torch(state, num_heads=2)["query"]["kernel"].shape
    (8, 2, 4)
    """
    rest = _from_torch(state)
    parameters = _attention(rest, "", num_heads, rest.has("", "bias"))
    rest.check_empty()
    return parameters


def _attention(
    rest: _Parameters, prefix: str, num_heads: int, has_bias: bool, width: int | str = "D"
) -> dict[str, dict[str, np.ndarray]]:
    """Removes the parameters of attention from `rest` and returns them under our names."""
    out = rest.remove(f"{prefix}out_proj.weight", "D, D", width, width)
    D = out.shape[0]
    _check_shape(f"{prefix}out_proj.weight", out, "D, D", D, D)
    if num_heads < 1 or D % num_heads:
        raise ValueError(f"num_heads: expected a divisor of D = {D}, got {num_heads}")
    heads = (num_heads, D // num_heads)
    if f"{prefix}in_proj_weight" in rest.arrays:
        kernels = np.split(rest.remove(f"{prefix}in_proj_weight", "3 D, D", 3 * D, D), 3)
    else:
        query = rest.remove(f"{prefix}q_proj_weight", "D, D", D, D)
        key = rest.remove(f"{prefix}k_proj_weight", "D, E", D, "E")
        reason = ", as jattn.nn.MultiHeadAttention has one in_kv_features for kdim and vdim"
        E = key.shape[1]
        value = rest.remove(f"{prefix}v_proj_weight", "D, E", D, E, reason=reason)
        kernels = [query, key, value]
    parameters: dict[str, dict[str, np.ndarray]] = {
        name: {"kernel": kernel.T.reshape(-1, *heads)}
        for name, kernel in zip(_PARTS, kernels, strict=True)
    }
    parameters["out"] = {"kernel": out.T.reshape(*heads, D)}
    if has_bias:
        biases = np.split(rest.remove(f"{prefix}in_proj_bias", "3 D", 3 * D), 3)
        for name, bias in zip(_PARTS, biases, strict=True):
            parameters[name]["bias"] = bias.reshape(heads)
        parameters["out"]["bias"] = rest.remove(f"{prefix}out_proj.bias", "D", D)
    return parameters


def attention_to_torch(parameters: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Converts parameters to arrays for `load_state_dict` of a `torch.nn.MultiheadAttention`.

    If keys and values have the queries' width, the three projections are one `in_proj_weight`.
    Without a bias of the output (`use_bias="qkv"`), `out_proj.bias` is 0.

    Raises ValueError for missing parameters, and for parameters and shapes that torch lacks: of
    `sinks`, `normalize_qk`, `num_kv_heads`, `value_dim`, and of heads that are not D / N wide.

    >>> layer = nn.MultiHeadAttention(2, 8, rngs=nnx.Rngs(0))
    >>> sorted(jattn.compat.attention_to_torch(nnx.to_pure_dict(nnx.state(layer, nnx.Param))))
    ['in_proj_bias', 'in_proj_weight', 'out_proj.bias', 'out_proj.weight']
    """
    rest = _to_torch(parameters)
    state = _attention_to_torch(rest, "")
    rest.check_empty()
    return state


def _attention_to_torch(rest: _Parameters, prefix: str) -> dict[str, np.ndarray]:
    """Removes the parameters of attention from `rest` and returns them under torch's names."""
    has_bias = any(f"{prefix}{name}.bias" in rest.arrays for name in (*_PARTS, "out"))
    query = rest.remove(f"{prefix}query.kernel", "D, N, H", "D", "N", "H")
    N, H = query.shape[1:]
    D = N * H
    _check_shape(f"{prefix}query.kernel", query, "N H, N, H", D, N, H)
    reason = ", as torch has neither num_kv_heads nor value_dim"
    key, value = (
        rest.remove(f"{prefix}{name}.kernel", "E, N, H", "E", N, H, reason=reason)
        for name in ("key", "value")
    )
    flat = [x.reshape(-1, D).T for x in (query, key, value)]
    out = rest.remove(f"{prefix}out.kernel", "N, H, D", N, H, D)
    state: dict[str, np.ndarray] = {"out_proj.weight": out.reshape(D, D).T}
    if len({x.shape for x in flat}) == 1:
        state["in_proj_weight"] = np.concatenate(flat)
    else:
        state |= {f"{name[0]}_proj_weight": x for name, x in zip(_PARTS, flat, strict=True)}
    if has_bias:
        biases = [rest.remove(f"{prefix}{name}.bias", "N, H", N, H) for name in _PARTS]
        state["in_proj_bias"] = np.concatenate(biases).reshape(-1)
        has_out_bias = f"{prefix}out.bias" in rest.arrays
        zeros = np.zeros(D, biases[0].dtype)
        state["out_proj.bias"] = rest.remove(f"{prefix}out.bias", "D", D) if has_out_bias else zeros
    return state


# The sublayers in the order in which PyTorch numbers their layer norms.
_SUBLAYERS = {
    "encoder": ("self_attention", "feed_forward"),
    "decoder": ("self_attention", "cross_attention", "feed_forward"),
}
_ATTENTION = {"self_attention": "self_attn", "cross_attention": "multihead_attn"}


def transformer_from_torch(state: Mapping[str, Any], num_heads: int) -> dict[str, Any]:
    """Converts the parameters of a `torch.nn.Transformer` to the names of `jattn.nn.Transformer`.

    `state` is the module's `state_dict()`, of tensors or arrays. If it has only names that begin
    with `encoder.` or only names that begin with `decoder.`, only that stack is returned.

    Returns `encoder` and `decoder`, for `nnx.update` of a `jattn.nn.Transformer` with the same
    number of layers and the same widths, `final_norm=True`, `norm_epsilon=1e-5`, and `norm="pre"`
    if PyTorch's has `norm_first=True`. `nnx.update` leaves embeddings and the output projection
    unchanged, as PyTorch's module has none.

    Raises ValueError for missing parameters, for parameters without a counterpart, for wrong
    shapes, and if num_heads does not divide the width.

    >>> state = {"encoder.norm.weight": np.ones(8), "encoder.norm.bias": np.zeros(8)}
    >>> [*jattn.compat.transformer_from_torch(state, num_heads=2)["encoder"]["norm"]]
    ['scale', 'bias']
    """
    rest = _from_torch(state)
    if not any(rest.has(f"{stack}.") for stack in _SUBLAYERS):
        raise ValueError(
            "state: expected names that begin with encoder. or decoder., got "
            f"{next(iter(rest.arrays), 'none')}{_prefix_advice(rest)}"
        )
    parameters: dict[str, Any] = {}
    for stack, sublayers in _SUBLAYERS.items():
        if not rest.has(f"{stack}."):
            continue
        converted: dict[str, Any] = {"layers": {}}
        if f"{stack}.norm.weight" in rest.arrays:
            has_bias = f"{stack}.norm.bias" in rest.arrays
            converted["norm"] = _module(rest, f"{stack}.norm", "scale", has_bias, "D", "D")
        n = 0
        while rest.has(f"{stack}.layers.{n}."):
            converted["layers"][n] = _layer(rest, f"{stack}.layers.{n}.", sublayers, num_heads)
            n += 1
        parameters[stack] = converted
    rest.check_empty()
    return parameters


def _prefix_advice(rest: _Parameters) -> str:
    """Returns what to do with the state of a `torch.nn.TransformerEncoder` or `-Decoder` alone."""
    if not rest.has("layers."):
        return ""
    stack = "decoder" if rest.has("layers.0.multihead_attn.") else "encoder"
    renamed = f'{{f"{stack}.{{name}}": x for name, x in state.items()}}'
    return f"; for the state of a torch.nn.Transformer{stack.title()} pass {renamed}"


def transformer_to_torch(parameters: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Converts parameters to arrays for `load_state_dict` of a `torch.nn.Transformer`.

    `parameters` is `nnx.to_pure_dict(nnx.state(model, nnx.Param))` of a `jattn.nn.Transformer`
    with `normalization="layer"`; only its `encoder` and `decoder` are used.

    Raises ValueError if both are missing, for missing parameters in them, and for parameters and
    shapes that torch lacks, such as those of `gated=True` and `norm="sandwich"`; see also
    `attention_to_torch`.

    >>> encoder = nn.Encoder(1, 8, 2, 16, final_norm=True, rngs=nnx.Rngs(0))
    >>> parameters = {"encoder": nnx.to_pure_dict(nnx.state(encoder, nnx.Param))}
    >>> "encoder.norm.weight" in jattn.compat.transformer_to_torch(parameters)
    True
    """
    stacks = {stack: parameters[stack] for stack in _SUBLAYERS if stack in parameters}
    if not stacks:
        names = ", ".join(map(str, parameters))[:200] or "none"
        raise ValueError(f"parameters: expected encoder or decoder, got {names}")
    rest = _to_torch(stacks)
    state: dict[str, np.ndarray] = {}
    for stack in stacks:
        if rest.has(f"{stack}.norm."):
            state |= _module_to_torch(rest, f"{stack}.norm", f"{stack}.norm", "scale", "D")
        n = 0
        while rest.has(f"{stack}.layers.{n}."):
            state |= _layer_to_torch(rest, f"{stack}.layers.{n}.", _SUBLAYERS[stack])
            n += 1
    rest.check_empty()
    return state


def _layer(
    rest: _Parameters, prefix: str, sublayers: tuple[str, ...], num_heads: int
) -> dict[str, Any]:
    """Removes one layer's parameters from `rest` and returns them under our names."""
    has_bias = rest.has(prefix, "bias")
    width: int | str = "D"
    parameters: dict[str, Any] = {}
    for n, name in enumerate(sublayers, 1):
        if name in _ATTENTION:
            attention_prefix = f"{prefix}{_ATTENTION[name]}."
            parameters[name] = _attention(rest, attention_prefix, num_heads, has_bias, width)
            width = parameters[name]["out"]["kernel"].shape[-1]
        else:
            hidden = _module(rest, f"{prefix}linear1", "kernel", has_bias, "F, D", "F", width)
            sizes = width, hidden["kernel"].shape[1]
            out = _module(rest, f"{prefix}linear2", "kernel", has_bias, "D, F", *sizes)
            parameters[name] = {"hidden": hidden, "out": out}
        norm = _module(rest, f"{prefix}norm{n}", "scale", has_bias, "D", width)
        parameters[f"{name}_residual"] = {"norm": norm}
    return parameters


def _layer_to_torch(
    rest: _Parameters, prefix: str, sublayers: tuple[str, ...]
) -> dict[str, np.ndarray]:
    """Removes one layer's parameters from `rest` and returns them under torch's names."""
    state: dict[str, np.ndarray] = {}
    for n, name in enumerate(sublayers, 1):
        norm = f"{prefix}{name}_residual.norm"
        state |= _module_to_torch(rest, norm, f"{prefix}norm{n}", "scale", "D")
        if name in _ATTENTION:
            arrays = _attention_to_torch(rest, f"{prefix}{name}.")
            state |= {f"{prefix}{_ATTENTION[name]}.{part}": x for part, x in arrays.items()}
        else:
            for ours, theirs, axes in (("hidden", "linear1", "D, F"), ("out", "linear2", "F, D")):
                names = f"{prefix}{name}.{ours}", f"{prefix}{theirs}"
                state |= _module_to_torch(rest, *names, "kernel", axes)
    return state


def _module(
    rest: _Parameters, name: str, weight: str, has_bias: bool, axes: str, *sizes: int | str
) -> dict[str, np.ndarray]:
    """Removes the parameters of a norm or linear map from `rest`; we call its weight `weight`."""
    kernel = rest.remove(f"{name}.weight", axes, *sizes)
    parameters = {weight: kernel.T}
    if has_bias:
        parameters["bias"] = rest.remove(f"{name}.bias", axes[0], len(kernel))
    return parameters


def _module_to_torch(
    rest: _Parameters, ours: str, theirs: str, weight: str, axes: str
) -> dict[str, np.ndarray]:
    """Removes the parameters of a norm or linear map from `rest`; we call its weight `weight`."""
    kernel = rest.remove(f"{ours}.{weight}", axes, *axes.split(", ")).T
    state = {f"{theirs}.weight": kernel}
    if f"{ours}.bias" in rest.arrays:
        state[f"{theirs}.bias"] = rest.remove(f"{ours}.bias", axes[-1], len(kernel))
    return state
