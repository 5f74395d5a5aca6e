"""Checks of the arguments of `generate`, and its numbers as arrays."""

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
    is_model = hasattr(model, "start") and hasattr(model, "step")
    if not isinstance(model, nnx.Module) or not is_model:
        got = type(model).__name__
        raise TypeError(f"model: expected an nnx.Module with methods start and step, got {got}")
    check_array("prompt", prompt, "[B, T]", "integer")
    if len(prompt.shape) != 2 or prompt.shape[1] == 0:
        raise ValueError(f"prompt: expected [B, T] with T >= 1, got {list(prompt.shape)}")


def rows_per_prompt(samples: Any, beams: Any, is_drawn: bool) -> int:
    """Returns the number of rows of each prompt."""
    check_size("samples", samples)
    check_size("beams", beams)
    if samples > 1 and not is_drawn:
        raise ValueError(
            f"samples: {samples} samples at temperature 0 would all be equal; pass temperature > 0 "
            "and a key"
        )
    if beams > 1 and is_drawn:
        raise ValueError(
            f"beams: a search with {beams} beams draws no tokens; pass temperature=0 and samples=1"
        )
    return int(samples * beams)


def logit_changes(repetition_penalty: Any, min_tokens: Any, max_tokens: int) -> Any:
    """Returns the numbers of processors as arrays, None for those that change no logits."""
    _check_python_number("repetition_penalty", repetition_penalty, positive=True)
    check_size("min_tokens", min_tokens, 0)
    if min_tokens > max_tokens:
        raise ValueError(f"min_tokens: expected at most max_tokens={max_tokens}, got {min_tokens}")
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
    if temperature < np.finfo(np.float32).tiny:
        return None
    if key is None:
        raise ValueError(f"key: needed for temperature = {temperature}, got None")
    share = None if top_p is None else jnp.float32(top_p)
    return Sampling(key, jnp.float32(temperature), share)


def _check_python_number(name: str, value: Any, *, positive: bool = False) -> None:
    if hasattr(value, "shape"):
        raise TypeError(f"{name}: expected a Python number, got an array")
    check_number(name, value, positive=positive)


def stop_tokens(stop: Any) -> tuple[int, ...]:
    """Returns the tokens that end a row as Python integers."""
    if integers.is_integer(stop):
        stop = (stop,)
    if not hasattr(stop, "__iter__"):
        raise TypeError(f"stop: expected a token or several, got {shown(stop)}")
    for token in stop:
        check_size("stop", token, 0)
    return tuple(map(int, stop))


def check_room(caches: Tree, tokens: int) -> None:
    """Raises TypeError for caches with other leaves than arrays, ValueError if they lack room."""
    if not all(hasattr(x, "dtype") for x in jax.tree.leaves(caches)):
        raise TypeError(f"caches: expected what model.step gives, got {shown(caches)}")
    for cache in jax.tree.leaves(caches, is_leaf=lambda x: isinstance(x, Cache)):
        if not isinstance(cache, Cache) or hasattr(cache, "window"):
            continue
        _, most = integers.known_range(cache.lengths) or (0, 0)
        if most + tokens > cache.capacity:
            raise ValueError(
                f"caches: expected room for {most + tokens} tokens, got {cache.capacity}"
            )
