"""How the next token is chosen: processors change the logits, and a token is drawn from them."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jattn.checks import check_operands, check_rule, explained, function_name
from jattn.functions.programs import TracedFunction, program_of
from jattn.generation.searches import Ending


Processor = Callable[[Array, Array, Array], Array]


def sample_tokens(
    keys: Array,
    logits: Float[Array, "B V"],
    temperature: Float[Array, ""] | float = 1.0,
    top_k: int | None = None,
    top_p: Float[Array, ""] | float | None = None,
) -> Int[Array, " B"]:
    """Draws a token for each row of logits.

    Temperature, `top_k` and `top_p` are applied in this order and mean the same as in `generate`.

    Args:
        keys: JAX random keys, one for each row.
        logits: float32.
        temperature: above 0.

    >>> logits = jnp.array([[0.0, 9.0, 1.0], [9.0, 0.0, 1.0]])
    >>> keys = jax.random.split(jax.random.key(0))
    >>> jattn.generation.sample_tokens(keys, logits, top_p=0.5).tolist()
    [1, 0]
    """
    # Subtracts the maximum first: at low temperatures, large logits would overflow.
    logits = (logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature
    if top_k is None and top_p is None:
        return jax.vmap(jax.random.categorical)(keys, logits)
    top, tokens = jax.lax.top_k(logits, min(top_k or logits.shape[-1], logits.shape[-1]))
    if top_p is not None:
        probabilities = jax.nn.softmax(top)
        likelier = jnp.cumsum(probabilities, axis=-1) - probabilities
        top = jnp.where((likelier < top_p) | (top_p >= 1), top, -jnp.inf)
    places = jax.vmap(jax.random.categorical)(keys, top)
    return jnp.take_along_axis(tokens, places[:, None], axis=-1)[:, 0]


def penalize_repetition(
    logits: Float[Array, "R V"], text: Int[Array, "R n"], lengths: Int[Array, " R"], penalty: Array
) -> Float[Array, "R V"]:
    """Divides the logits of tokens that are in the text by the penalty if they are positive, and
    multiplies them by it if not (Keskar et al. 2019, CTRL)."""
    R, V = logits.shape
    places = jnp.arange(text.shape[1], dtype=lengths.dtype)[None, :]
    in_text = (places < lengths[:, None]) & (text >= 0)
    tokens = jnp.where(in_text, text, V)  # V is out of range, and dropped
    seen = jnp.zeros((R, V), bool).at[jnp.arange(R)[:, None], tokens].set(True, mode="drop")
    penalized = jnp.where(logits > 0, logits / penalty, logits * penalty)
    return jnp.where(seen, penalized, logits)


def forbid_stop(logits: Float[Array, "R V"], ending: Ending, forbidden: Array) -> Array:
    """Sets the logits of stop tokens to -inf if `forbidden` is true."""
    is_stop = ending.is_stop(jnp.arange(logits.shape[-1], dtype=jnp.int32))
    return jnp.where(is_stop[None, :] & forbidden, -jnp.inf, logits)


def check_processors(processors: Any) -> tuple[Processor, ...]:
    """Returns the processors as a tuple. Raises TypeError for other things than functions of three
    arguments."""
    if not isinstance(processors, Sequence):
        got = function_name(processors) if callable(processors) else type(processors).__name__
        raise TypeError(f"processors: expected a list or tuple of functions, got {got}")
    for processor in processors:
        check_rule("processors", processor, ("logits", "tokens", "lengths"), ())
        _, operands = _parts(processor)
        check_operands("processors", operands)
    return tuple(processors)


def traced_processors(
    processors: Sequence[Processor], shape: tuple[int, int], length: int
) -> tuple[tuple[TracedFunction, ...], tuple[Any, ...]]:
    """Returns processors traced in their current state, which may be static arguments of `jax.jit`,
    and the arrays that each of them reads.

    `shape` is that of the logits `[R, V]`, `length` that of the text `[R, length]`.
    """
    logits = jax.ShapeDtypeStruct(shape, jnp.float32)
    text = jax.ShapeDtypeStruct((shape[0], length), jnp.int32)
    lengths = jax.ShapeDtypeStruct(shape[:1], jnp.int32)
    programs = []
    for processor in processors:
        function, operands = _parts(processor)
        name, call = function_name(function), functools.partial(_called, function)
        programs.append(program_of(name, function, call, operands, logits, text, lengths))
    return tuple(program for program, _ in programs), tuple(arrays for _, arrays in programs)


def _parts(processor: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns a processor's function, and its positional and keyword operands: the arguments of a
    `jax.tree_util.Partial` are arrays that a program takes, not constants."""
    if type(processor) is not jax.tree_util.Partial:
        return processor, ((), {})
    arguments = processor.args, processor.keywords
    return processor.func, jax.tree.map(
        lambda x: x if hasattr(x, "dtype") else jnp.array(x), arguments
    )


def _called(
    function: Any, logits: Array, text: Array, lengths: Array, args: Any, named: Any
) -> Array:
    with explained("processors", function):
        result = function(*args, logits, text, lengths, **named)
    is_float = jnp.issubdtype(getattr(result, "dtype", object), jnp.floating)
    if not is_float or result.shape != logits.shape:
        got = f"{result.dtype} {list(result.shape)}" if hasattr(result, "shape") else repr(result)
        raise TypeError(
            f"processors: {function_name(function)} must return float logits [B, vocabulary] = "
            f"{list(logits.shape)}, got {got}"
        )
    return result.astype(jnp.float32)
