"""JAX's own kernel for TPUs, "splash attention", for the masks of the algebra: what it can do.

What it is given for a mask is said in `splash_masks`. The forward and backward functions stand in
`splash_vjp`, which imports the kernel and with it much of JAX's compiler for TPUs; so that is done
when a program is lowered for one.
"""

import importlib

import jax
import jax.numpy as jnp
import numpy as np

from jattn import masks, scores
from jattn._pytree import is_static
from jattn.kernels.common.vjp import AttentionVJP
from jattn.kernels.tpu.splash_masks import as_splash
from jattn.spec import Shapes, Spec


_KNOWN = ("0.10.2", "0.12.0", "0.12.0.1")


def supports(spec: Spec, shapes: Shapes) -> str | None:
    """Masks and scores that the kernel knows, in the dtypes that TPUs compute with."""
    return (
        _version_reason()
        or _spec_reason(spec, shapes)
        or _score_reason(spec)
        or _mask_reason(spec, shapes)
    )


def _version_reason() -> str | None:
    """`splash_vjp` edits the kernel, whose inside another version of JAX may order otherwise."""
    if jax.__version__ in _KNOWN:
        return None
    return f"its kernel is known as in JAX {' and '.join(_KNOWN)}, this is {jax.__version__}"


def _spec_reason(spec: Spec, shapes: Shapes) -> str | None:
    if spec.partial:
        return "the softmax runs over more keys, it has no normalizer of its own for them"
    if shapes.dtype not in (jnp.float32, jnp.bfloat16):
        return f"expected float32 or bfloat16, got {shapes.dtype}"
    if spec.q_positions is not None or spec.kv_positions is not None:
        return "positions are given, which are not known while tracing"
    if not is_static(spec.scale):
        return "the scale is an array, not known while tracing"
    if spec.dropout_rate:
        return "it has no dropout"
    return None if spec.precision is None else "it takes no precision"


def _score_reason(spec: Spec) -> str | None:
    if spec.score is None:
        return None
    if not isinstance(spec.score, scores.SoftCap):
        return f"of score functions it has SoftCap only, got {type(spec.score).__name__}"
    if not is_static(spec.score.cap):
        return "the cap is an array, not known while tracing"
    with np.errstate(over="ignore", under="ignore"):
        cap = np.float32(spec.score.cap)
    return None if 0 < cap < np.inf else f"the cap {spec.score.cap} is no number of float32"


def _mask_reason(spec: Spec, shapes: Shapes) -> str | None:
    try:
        static = as_splash(spec.mask).static
    except NotImplementedError as reason:
        return str(reason)
    size = max(512, shapes.T // 64, shapes.S // 64)
    tile = masks.Tile.grid(masks.extents(shapes.T, size), masks.extents(shapes.S, size))
    return None if np.any(masks.kinds(static, tile)) else "the mask leaves nothing"


def functions(platform: str) -> AttentionVJP:
    """Forward and backward; interpreted where there is no TPU."""
    splash_vjp = importlib.import_module("jattn.kernels.tpu.splash_vjp")
    return splash_vjp.functions(interpret=platform != "tpu")
