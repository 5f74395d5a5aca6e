"""Advice for functions ported from PyTorch by writing `jnp` in place of `torch`, where that fails.

`advice_for` inspects an error that a user's function raises. JAX's arrays lack many methods of
tensors, and `jax.numpy` many functions of `torch`; most have a counterpart elsewhere in JAX.
"""

import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


_DTYPES = {
    "double": "jnp.float64",
    "float": "jnp.float32",
    "half": "jnp.float16",
    "int": "jnp.int32",
    "long": "jnp.int32",
    "short": "jnp.int16",
}
_OPERATORS = "add + sub - mul * div / eq == ne != ge >= gt > le <= lt <".split()
_WRITE = {
    **{name: f"x {sign} y" for name, sign in zip(_OPERATORS[::2], _OPERATORS[1::2], strict=True)},
    **{name: f"x.astype({dtype})" for name, dtype in _DTYPES.items()},
    **dict.fromkeys(("contiguous", "cpu", "cuda"), "x"),
    **dict.fromkeys(("as_tensor", "from_numpy", "tensor"), "jnp.asarray(values)"),
    **dict.fromkeys(("to", "type"), "x.astype(dtype)"),
    "and_masks": "f(b, h, q_idx, kv_idx) & g(b, h, q_idx, kv_idx), or masks.Predicate(f) & g",
    "bfloat16": "x.astype(jnp.bfloat16)",
    "bool": "x.astype(bool)",
    "bucketize": "jnp.searchsorted(boundaries, x)",
    "cat": "jnp.concatenate(arrays, axis)",
    "clamp": "jnp.clip(x, min, max)",
    "clamp_max": "jnp.minimum(x, max)",
    "clamp_min": "jnp.maximum(x, min)",
    "detach": "jax.lax.stop_gradient(x)",
    "dim": "x.ndim",
    "expand": "jnp.broadcast_to(x, shape)",
    "gather": "jnp.take_along_axis(x, index, axis)",
    "index_select": "jnp.take(x, index, axis)",
    "masked_fill": "jnp.where(mask, value, x)",
    "neg": "-x",
    "numel": "x.size",
    "or_masks": "f(b, h, q_idx, kv_idx) | g(b, h, q_idx, kv_idx), or masks.Predicate(f) | g",
    "permute": "jnp.transpose(x, axes)",
    "repeat_interleave": "jnp.repeat(x, repeats)",
    "rsqrt": "jax.lax.rsqrt(x)",
    "Tensor": "jax.Array",
    "type_as": "x.astype(y.dtype)",
    "unsqueeze": "jnp.expand_dims(x, axis)",
}
_ELSEWHERE = {"jnp": jnp, "jax.nn": jax.nn, "jax.lax": jax.lax}


def advice_for(error: Exception) -> str | None:
    """Returns what to write in place of the code that raised an error; None if not known."""
    match error:
        case AttributeError():
            return _of_attribute(error.obj, error.name or "")
        case NameError():
            if error.name in ("and_masks", "or_masks"):
                return f"write {_WRITE[error.name]}"
            return "write jnp in its place" if error.name == "torch" else None
        case TypeError() if "must be Tensor" in str(error):
            return "functions of torch take no arrays of JAX; write those of jax.numpy"
        case TypeError() if str(error) == "'int' object is not callable":
            return "x.size and x.ndim are numbers; write x.shape[axis] for x.size(axis)"
    return None


def _of_attribute(owner: Any, name: str) -> str | None:
    """Returns the advice for a method or a function that does not exist."""
    is_module = isinstance(owner, types.ModuleType)
    if is_module and owner.__name__.partition(".")[0] not in ("jax", "numpy", "jattn"):
        return None
    if not is_module and not isinstance(owner, jax.Array | np.ndarray | np.generic):
        return None
    plain = name.rstrip("_") if not name.startswith("_") else name
    if is_module and plain in _DTYPES:
        return f"write {_DTYPES[plain]}"
    written = _WRITE.get(plain) or next(
        (f"{to}.{plain}(x, ...)" for to, module in _ELSEWHERE.items() if hasattr(module, plain)),
        None,
    )
    if written is None:
        return None
    return f"write {'x = ' * (name != plain)}{written}"
