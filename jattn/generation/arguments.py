"""Checks of the arguments of `generate`, and conversion of its numbers to arrays."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from jattn._types import Tree
from jattn.cache import Cache
from jattn.checks import check_array, check_key, check_number, check_size, shown
from jattn.functions import integers


TINY = float(np.finfo(np.float32).tiny)


class Sampling(NamedTuple):
    """The parameters of drawing tokens."""

    key: Array
    temperature: Array
    top_p: Array | None


class Numbers(NamedTuple):
    """The numbers that may change without a new program; None for what is not used."""

    length_penalties: Array | None
    repetition_penalty: Array | None
    min_tokens: Array | None
    sampling: Sampling | None


def check_model(model: Any, prompt: Any) -> None:
    """Checks for a model that `generate` accepts, and a prompt `[B, T]` that is not empty."""
    missing = [name for name in ("start", "step") if not hasattr(model, name)]
    if not isinstance(model, nnx.Module) or missing:
        got = type(model).__name__ + (f" without {' and '.join(missing)}" if missing else "")
        raise TypeError(f"model: expected an nnx.Module with methods start and step, got {got}")
    check_array("prompt", prompt, "[B, T]", "integer")
    if len(prompt.shape) != 2 or 0 in prompt.shape:
        raise ValueError(f"prompt: expected [B, T] with B, T >= 1, got {list(prompt.shape)}")


def rows_per_prompt(samples: Any, beams: Any, is_drawn: bool) -> int:
    """Returns the number of rows of each prompt."""
    check_size("samples", samples)
    check_size("beams", beams)
    if samples > 1 and beams > 1:
        raise ValueError(f"samples: expected 1 with beams > 1, got samples={samples}")
    if samples > 1 and not is_drawn:
        raise ValueError(
            f"samples: {samples} samples at temperature 0 would all be equal; pass temperature > 0 "
            "and a key"
        )
    if beams > 1 and is_drawn:
        raise ValueError(f"beams: a search with {beams} beams draws no tokens; pass temperature=0")
    return int(samples * beams)


def logit_changes(repetition_penalty: Any, min_tokens: Any, max_tokens: int) -> Any:
    """Returns both numbers as arrays, or None for one that changes no logits."""
    _check_python_number("repetition_penalty", repetition_penalty, positive=True)
    check_size("min_tokens", min_tokens, 0)
    if min_tokens > max_tokens:
        raise ValueError(f"min_tokens: expected at most max_tokens={max_tokens}, got {min_tokens}")
    if not TINY <= repetition_penalty <= 1 / TINY:
        raise ValueError(
            f"repetition_penalty: expected a number that fits float32, got {repetition_penalty}"
        )
    penalty = None if repetition_penalty == 1 else jnp.float32(repetition_penalty)
    return penalty, jnp.int32(min_tokens) if min_tokens else None


def checked_sampling(temperature: Any, top_k: Any, top_p: Any, key: Any) -> Sampling | None:
    """Returns the parameters of drawing tokens, or None if the likeliest token is chosen."""
    _check_python_number("temperature", temperature)
    if temperature < 0:
        raise ValueError(f"temperature: expected temperature >= 0, got {shown(temperature)}")
    if top_k is not None:
        check_size("top_k", top_k)
    if top_p is not None:
        _check_python_number("top_p", top_p, positive=True)
        if top_p > 1:
            raise ValueError(f"top_p: expected 0 < top_p <= 1, got {shown(top_p)}")
    if key is not None:
        check_key("key", key)
    if temperature > 1 / TINY:
        raise ValueError(f"temperature: expected a number that fits float32, got {temperature}")
    if temperature < TINY:
        for name, value in (("top_k", top_k), ("top_p", top_p)):
            if value is not None:
                raise ValueError(
                    f"{name}: expected None at temperature 0, which draws no tokens, got {value}; "
                    "pass temperature > 0"
                )
        return None
    if key is None:
        raise ValueError(f"key: needed for temperature = {temperature}, got None")
    share = None if top_p is None else jnp.float32(top_p)
    return Sampling(key, jnp.float32(temperature), share)


def _check_python_number(name: str, value: Any, *, positive: bool = False) -> None:
    if isinstance(value, np.ndarray | jax.Array):
        raise TypeError(f"{name}: expected a Python number, got an array")
    check_number(name, value, positive=positive)


def stop_tokens(stop: Any) -> tuple[int, ...]:
    """Returns the tokens that end a row as Python integers."""
    if integers.is_known(stop):
        stop = np.ravel(np.asarray(stop))
    elif integers.is_integer(stop):
        stop = (stop,)
    if isinstance(stop, str) or not hasattr(stop, "__iter__"):
        raise TypeError(f"stop: expected a token or several, got {shown(stop)}")
    stop = tuple(stop)
    for token in stop:
        check_size("stop", token, 0)
    return tuple(map(int, stop))


def check_vocabulary(model: Any, prompt: Any, valid: Any, stop: tuple[int, ...]) -> None:
    """Raises ValueError for concrete tokens outside the vocabulary, if the model tells its size."""
    size = getattr(model, "vocabulary", None)
    if not isinstance(size, int):
        return
    if stop and max(stop) >= size:
        raise ValueError(f"stop: expected tokens 0..{size - 1} of the vocabulary, got {max(stop)}")
    if not integers.is_known(prompt):
        return
    outside = (np.asarray(prompt) < 0) | (np.asarray(prompt) >= size)
    if valid is not None:
        outside &= np.asarray(valid) if integers.is_known(valid) else False
    if np.any(outside):
        token = np.asarray(prompt)[outside][0]
        raise ValueError(f"prompt: expected tokens 0..{size - 1} of the vocabulary, got {token}")


def check_caches(
    caches: Tree, prompt: Any, valid: Any, max_tokens: int, samples: int, beams: int
) -> None:
    """Raises TypeError for leaves of caches that are not arrays, and ValueError if their number of
    rows is not the prompt's or concrete lengths leave too little room."""
    if not all(isinstance(x, jax.Array | np.ndarray) for x in jax.tree.leaves(caches)):
        raise TypeError(f"caches: expected what model.step gives, got {shown(caches)}")
    B, T = prompt.shape
    counts = np.full(B, T) if not integers.is_known(valid) else np.asarray(valid).sum(axis=1)
    for cache in jax.tree.leaves(caches, is_leaf=lambda x: isinstance(x, Cache)):
        if not isinstance(cache, Cache):
            continue
        if len(cache.lengths) != B:
            got = len(cache.lengths)
            raise ValueError(f"caches: expected B = {B} batch rows as in the prompt, got {got}")
        if hasattr(cache, "window") or not integers.is_known(cache.lengths):
            continue
        num_read = np.asarray(cache.lengths) + counts - 1  # all but the last token of the prompt
        if np.any(num_read + max_tokens > cache.capacity):
            most = int(np.max(num_read)) + max_tokens
            raise ValueError(f"caches: expected room for {most} tokens, got {cache.capacity}")
        if hasattr(cache, "page_size"):
            _check_pages(cache, num_read, max_tokens, samples, beams)


def _check_pages(cache: Any, num_read: Any, max_tokens: int, samples: int, beams: int) -> None:
    """Raises ValueError if a pool has fewer pages than the last step needs at least. Samples share
    the full pages of the `num_read` tokens; beams share at best all of their pages but the last."""
    size, held = cache.page_size, np.sum(np.asarray(cache.pages_held()) > 0)
    at_start, at_end = -(-np.asarray(cache.lengths) // size), -(-(num_read + max_tokens) // size)
    shared = at_end - 1 if beams > 1 else num_read // size
    needed = held + np.sum(shared - at_start + samples * beams * (at_end - shared))
    if needed > cache.num_pages:
        name = f"{beams} beams" if beams > 1 else f"{samples} samples"
        raise ValueError(
            f"caches: expected num_pages >= {needed} for {name} of each prompt, got "
            f"num_pages={cache.num_pages}"
        )
