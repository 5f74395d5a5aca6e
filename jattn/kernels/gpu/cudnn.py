"""Attention on NVIDIA GPUs by cuDNN, through `jax.nn.dot_product_attention`.

It is fast if cuDNN has a flag for the mask, and supports no other masks. `as_cudnn`, an open
function, converts a mask to flags: register a class of your own to have it run here.

    @as_cudnn.register
    def _(mask: MyMask) -> Flags: ...

`supports` gives a reason for everything that cuDNN would refuse while compiling, and for everything
that it computes with another meaning. It cannot know how arrays are sharded later: cuDNN requires
that query, key and value are sharded alike, and neither tokens nor head sizes are.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap
from jaxtyping import Array, Bool, Int

from jattn import masks, scores
from jattn._pytree import is_static, number
from jattn._types import Tree
from jattn.call import Call
from jattn.functions import integers
from jattn.kernels.common.derivatives import PerQuery
from jattn.kernels.common.lowering import default_settings
from jattn.kernels.common.vjp import AttentionVJP, fallback_if_nonfinite
from jattn.kernels.gpu.mosaic.machine import device
from jattn.kernels.protocol import Kernel
from jattn.kernels.xla import blockwise
from jattn.softmax import Normalizer
from jattn.spec import Shapes, Spec, parameters


class Flags(NamedTuple):
    """A mask in cuDNN's terms: all parts must allow.

    `left` is the window's, in which cuDNN sees no key after the query; lengths are numbers or
    integer arrays, scalar or one for each batch row.
    """

    causal: bool = False
    left: int | None = None
    q_lengths: tuple[Any, ...] = ()
    kv_lengths: tuple[Any, ...] = ()


@functools.singledispatch
def as_cudnn(mask: Tree) -> Flags:
    """cuDNN's flags for a mask; raises NotImplementedError with the reason."""
    raise NotImplementedError(f"cuDNN has no flag for {type(mask).__name__}")


@as_cudnn.register
def _(mask: masks.Full) -> Flags:
    return Flags()


@as_cudnn.register
def _(mask: masks.Causal) -> Flags:
    return Flags(causal=True)


@as_cudnn.register
def _(mask: masks.Window) -> Flags:
    left, right = number(mask.left), number(mask.right)
    if not all(x is None or isinstance(x, int) for x in (left, right)):
        raise NotImplementedError("cuDNN has no windows whose sides are arrays")
    if right:
        raise NotImplementedError(f"cuDNN has no window to the right, got right={right}")
    return Flags(causal=right == 0, left=left)


@as_cudnn.register
def _(mask: masks.Lengths) -> Flags:
    q, kv = (() if x is None else (x,) for x in (mask.q, mask.kv))
    return Flags(q_lengths=q, kv_lengths=kv)


@as_cudnn.register
def _(mask: masks.And) -> Flags:
    a, b = as_cudnn(mask.left), as_cudnn(mask.right)
    left = min((x for x in (a.left, b.left) if x is not None), default=None)
    return Flags(a.causal or b.causal, left, a.q_lengths + b.q_lengths, a.kv_lengths + b.kv_lengths)


def supports(call: Call) -> str | None:
    """Returns why cuDNN cannot compute a call with jattn's result; None if it can."""
    spec, shapes = call.spec, call.shapes
    return (
        _shapes_reason(shapes)
        or _call_reason(call)
        or _mask_reason(spec, shapes)
        or _score_reason(call)
        or _device_reason(shapes)
        or _refusal(shapes)
    )


def _shapes_reason(shapes: Shapes) -> str | None:
    if shapes.dtype not in (jnp.bfloat16, jnp.float16):
        return f"expected bfloat16 or float16, got {shapes.dtype}"
    if shapes.H % 8 or shapes.H > 256:
        return f"expected a head size H that is a multiple of 8, at most 256, got {shapes.H}"
    if shapes.T == 1:
        return "of one query with strongly negative logits it gives NaN on some GPUs"
    if shapes.V != shapes.H:
        return f"expected values of the size of keys, got H = {shapes.H}, V = {shapes.V}"
    return None


def _call_reason(call: Call) -> str | None:
    spec = call.spec
    if call.needs_lse:
        return "its log-sum-exp comes rounded to the query's dtype, and without a derivative"
    if spec.dropout_rate:
        return "its dropout decides by a random generator of its own"
    if spec.precision is not None:
        return "it takes no precision"
    if not is_static(spec.scale):
        return "the scale is an array, expected a number"
    if spec.q_positions is not None or spec.kv_positions is not None:
        return "positions are given, cuDNN counts from 0"
    return None


def _mask_reason(spec: Spec, shapes: Shapes) -> str | None:
    try:
        flags = as_cudnn(spec.mask)
    except NotImplementedError as reason:
        return str(reason)
    if flags.left is None:
        return None
    if not flags.causal:
        return "cuDNN has windows only with Causal"
    if flags.q_lengths or flags.kv_lengths or shapes.T > shapes.S + flags.left:
        return "the window may leave queries without keys"
    return None


def _score_reason(call: Call) -> str | None:
    spec, shapes = call.spec, call.shapes
    if spec.score is None:
        return None
    if not isinstance(spec.score, scores.Bias):
        name = type(spec.score).__name__
        return f"of score functions it has Bias only, got {name}; JAX keeps score_mod to itself"
    array = spec.score.array
    batch, shape = array.shape[:-3], list(array.shape[-3:])
    if any(size != 1 for size in batch) or shape != [shapes.N, shapes.T, shapes.S]:
        expected = [1, shapes.N, shapes.T, shapes.S]
        return f"expected a Bias [1, N, T, S] = {expected}, got {list(array.shape)}"
    (dtype,) = call.parameter_dtypes or (array.dtype,)
    if dtype != shapes.dtype:
        return f"a Bias in {dtype} would be rounded to {shapes.dtype}"
    return _reason_with_bias(shapes)


def _reason_with_bias(shapes: Shapes) -> str | None:
    if shapes.T % 2 or shapes.S % 2:
        return f"with a Bias expected even T and S, got {shapes.T} and {shapes.S}"
    if shapes.T % 128 == 64:
        return f"with a Bias and T % 128 = 64 its gradient of queries may be NaN, got {shapes.T}"
    return None


def _device_reason(shapes: Shapes) -> str | None:
    gpu = device.device()
    if gpu is None:
        return (
            "runs on a machine with a GPU: JAX asks the device for its version of cuDNN, and this "
            "process has none"
        )
    capability = device.capability_of(gpu)
    if capability < (8, 0):
        return f"expected a compute capability of 8.0 or more, got {gpu.compute_capability}"
    if shapes.H > 128 and capability < (9, 0):
        return f"head size {shapes.H} > 128 needs compute capability 9.0 or more"
    return None


@functools.lru_cache(maxsize=1024)
def _refusal(shapes: Shapes) -> str | None:
    """Returns JAX's own reason, for example a version of cuDNN; it takes a trace."""
    query, key = (
        jax.ShapeDtypeStruct((1, *size, shapes.H), shapes.dtype)
        for size in ((shapes.T, shapes.N), (shapes.S, shapes.K))
    )
    all_finite = Spec(masks.Full(), None, 1.0, None, None)
    try:
        with default_settings():
            jax.eval_shape(
                jax.grad(lambda *qkv: _attend(all_finite, [], *qkv).sum()), query, key, key
            )
    except (NotImplementedError, RuntimeError, ValueError) as reason:
        return str(reason)
    return None


def _within(
    lengths: tuple[Any, ...], B: int, size: int
) -> tuple[Int[Array, " B"], Bool[Array, "B t"]]:
    """Returns the smallest of the lengths of each row, and which places are within it."""
    rows = [
        jnp.broadcast_to(jnp.asarray(integers.clamped(number(x)), jnp.int32), (B,)) for x in lengths
    ]
    length = functools.reduce(jnp.minimum, rows, jnp.full((B,), size, jnp.int32))
    return length, jnp.arange(size, dtype=jnp.int32)[None, :] < length[:, None]


def _alive(
    spec: Spec, query: Array, key: Array
) -> tuple[Bool[Array, "B T 1 1"], Bool[Array, "B S 1 1"]]:
    """Returns which queries have keys, and which keys are within their lengths."""
    flags, B = as_cudnn(spec.mask), len(query)
    length, columns = _within(flags.kv_lengths, B, key.shape[1])
    _, rows = _within(flags.q_lengths, B, query.shape[1])
    return (rows & (length > 0)[:, None])[..., None, None], columns[..., None, None]


def _attend(spec: Spec, params: list[Array], query: Array, key: Array, value: Array) -> Array:
    """Computes `out [B, T, N, V]` by cuDNN, which is right for rows that have keys."""
    flags, B = as_cudnn(spec.mask), len(query)
    options: dict[str, Any] = {}
    if flags.left is not None:
        options["local_window_size"] = (min(flags.left, 2**31 - 1), 0)
    if flags.q_lengths or flags.kv_lengths:
        # cuDNN does not define rows without keys: they keep one, and are emptied afterwards.
        for name, lengths, size in (
            ("query_seq_lengths", flags.q_lengths, query.shape[1]),
            ("key_value_seq_lengths", flags.kv_lengths, key.shape[1]),
        ):
            options[name] = jnp.clip(_within(lengths, B, size)[0], 1)
    return jax.nn.dot_product_attention(
        query,
        key,
        value,
        *(bias.astype(query.dtype) for bias in params),
        scale=float(number(spec.scale)),
        is_causal=flags.causal,
        implementation="cudnn",
        **options,
    )


@sequential_vmap
def _forward(spec: Spec, query: Array, key: Array, value: Array) -> tuple[Array, Normalizer, Array]:
    """Computes the output; the normalizer is not used.

    The forward pass is that of a derivative even if none is taken, so that XLA recognizes it in the
    backward pass and computes it once.
    """
    with default_settings():
        out, _ = jax.vjp(functools.partial(_attend, spec), parameters(spec), query, key, value)
    alive, _ = _alive(spec, query, key)
    rows = jnp.full(out.shape[:3], jnp.nan, jnp.float32)
    out = jnp.where(alive, out, 0).astype(jnp.float32)
    return out, Normalizer(rows, rows), jnp.ones((), bool)


@sequential_vmap
def _backward(
    spec: Spec, per_query: Any, key: Array, value: Array, all_finite: Array
) -> tuple[list[Array], Array, Array, Array]:
    query, d_out, *_ = per_query
    rows, columns = _alive(spec, query, key)
    d_out = jnp.where(rows, d_out, 0).astype(query.dtype)
    with default_settings():
        _, pull = jax.vjp(functools.partial(_attend, spec), parameters(spec), query, key, value)
        d_params, *gradients = pull(d_out)
    d_query, d_key, d_value = (
        jnp.where(alive, d, 0).astype(jnp.float32)
        for alive, d in zip((rows, columns, columns), gradients, strict=True)
    )
    return d_params, d_query, d_key, d_value


def _again(platform: str) -> AttentionVJP:
    """Returns the functions of blockwise; the backward one computes the normalizer again."""
    kernel = blockwise.functions(platform)

    def backward_from_inputs(spec: Spec, per_query: Any, key: Array, value: Array, _: Array) -> Any:
        query, d_out, _, _, delta = per_query
        _, normalizer, all_finite = kernel.forward(spec, query, key, value)
        per_query = PerQuery.of(query, d_out, normalizer, delta)
        return kernel.backward(spec, per_query, key, value, all_finite)

    return AttentionVJP(kernel.forward, backward_from_inputs)


def functions(platform: str) -> AttentionVJP:
    """Returns cuDNN's functions, followed by those of blockwise if a masked value is not finite."""
    return fallback_if_nonfinite(AttentionVJP(_forward, _backward), _again(platform))


KERNEL = Kernel(supports, functions)
