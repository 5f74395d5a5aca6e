"""Searches for likely translations under a model: `greedy`, `sample` and `beam`.

The loops are those of `jattn.generation`. A search calls the model as `next_logits(state, tokens)`,
starting with `<bos>` in all R rows, and a sequence ends after `<eos>`. `<pad>` and `<bos>` are
never generated: log probabilities (natural, float32) are normalized over the other tokens.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from experiments.translation.vocabulary import BOS, EOS, PAD
from jattn.generation import (
    Ending,
    Generated,
    Hypotheses,
    beam_search,
    check_length_penalty,
    each_token,
    length_penalties,
    sample_tokens,
)


Step = Callable[[Any, Array], tuple[Array, Any]]
Reorder = Callable[[Any, Array], Any]

_MOST_BEAMS = 1000


def greedy(
    next_logits: Step, state: Any, active: Array, length: int, *, limits: Array | None = None
) -> Generated:
    """Generates the likeliest token at each position.

    Args:
        next_logits: the model; see the head of this module.
        state: the state for the first call of `next_logits`, with B rows.
        active: bool `[B]`, true for rows with a sentence; the others stay `<pad>`.
        length: the greatest number of tokens of a sequence, `<eos>` counted.
        limits: the greatest number of tokens of each row, int32 `[B]`, at most `length`; by
            default `length`.

    Raises:
        ValueError: `length` is below 1.
    """

    def likeliest(logits: Array, _: Array) -> Array:
        return jnp.argmax(logits, axis=-1)

    return _each_token(next_logits, state, active, length, likeliest, limits)


def sample(
    next_logits: Step,
    state: Any,
    active: Array,
    length: int,
    key: Array,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    limits: Array | None = None,
) -> Generated:
    """Samples each token from the model's distribution, modified by temperature, top k and top p,
    in this order.

    The log probabilities returned are the model's, whatever the options.

    Args:
        next_logits, state, active, length: see `greedy`.
        key: the key of the batch, from which the key of each row is derived by its number; or the
            keys of the rows, `[B]`. In both cases a row's tokens do not depend on the number of
            rows.
        temperature: the divisor of the logits; at 0 the search is greedy.
        top_k: samples from this number of likeliest tokens.
        top_p: samples from the nucleus: the fewest likeliest tokens whose probabilities sum to
            this number at least (Holtzman et al. 2020).
        limits: see `greedy`.

    Raises:
        ValueError: an option is out of its range, or `length` is below 1.
    """
    check_sampling(temperature, top_k, top_p)
    if temperature < np.finfo(np.float32).tiny:
        return greedy(next_logits, state, active, length, limits=limits)
    rows = jnp.arange(active.shape[0])
    keys = key if key.ndim else jax.vmap(jax.random.fold_in, (None, 0))(key, rows)

    def draw(logits: Array, position: Array) -> Array:
        position_keys = jax.vmap(jax.random.fold_in, (0, None))(keys, position)
        return sample_tokens(position_keys, logits, temperature, top_k, top_p)

    return _each_token(next_logits, state, active, length, draw, limits)


def beam(
    next_logits: Step,
    state: Any,
    active: Array,
    length: int,
    *,
    beams: int,
    n_best: int = 1,
    length_penalty: float = 0.6,
    reorder: Reorder,
    limits: Array | None = None,
) -> Hypotheses:
    """Returns the best hypotheses of a beam search, see `jattn.generation.beam_search`.

    Args:
        next_logits, active, length, limits: as in `greedy`.
        state: the state for the first call of `next_logits`, with B·K rows, grouped by sentence.
        beams: K.
        n_best: N, the number of hypotheses returned.
        length_penalty: α of `jattn.generation.length_penalties`; 0 for none.
        reorder: `reorder(state, rows [B·K])` returns the state of these rows.
    """
    check_beam(beams, n_best, length_penalty)
    _check_counts(length=length)
    return beam_search(
        _with_allowed_logits(next_logits),
        state,
        _first_tokens(active),
        Ending(length, (EOS,), PAD, limits),
        beams=beams,
        penalties=length_penalties(length, length_penalty),
        reorder=reorder,
        n_best=n_best,
        active=active,
    )


def check_sampling(temperature: float, top_k: int | None, top_p: float | None) -> None:
    """Raises ValueError if an option of `sample` is out of its range."""
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature: expected a number not below 0, got {temperature!r}")
    if top_k is not None:
        _check_counts(top_k=top_k)
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p: expected 0 < top_p <= 1, got {top_p!r}")


def check_beam(beams: int, n_best: int, length_penalty: float) -> None:
    """Raises ValueError if an option of `beam` is out of its range."""
    _check_counts(beams=beams, n_best=n_best)
    if beams > _MOST_BEAMS:
        raise ValueError(f"beams: expected at most {_MOST_BEAMS}, got {beams}")
    check_length_penalty(length_penalty)


def _each_token(
    next_logits: Step,
    state: Any,
    active: Array,
    length: int,
    choose: Callable[[Array, Array], Array],
    limits: Array | None,
) -> Generated:
    _check_counts(length=length)
    ending = Ending(length, (EOS,), PAD, limits)
    next_logits = _with_allowed_logits(next_logits)
    return each_token(next_logits, state, _first_tokens(active), choose, ending, active)


def _first_tokens(active: Array) -> Array:
    return jnp.full(active.shape, BOS, jnp.int32)


def _with_allowed_logits(next_logits: Step) -> Step:
    """Returns `next_logits` with float32 logits `[R, V]`, -inf for `<pad>` and `<bos>`."""

    def allowed(state: Any, tokens: Array) -> tuple[Array, Any]:
        logits, state = next_logits(state, tokens)
        forbidden = jnp.asarray([PAD, BOS])
        return logits.astype(jnp.float32).at[:, forbidden].set(-jnp.inf), state

    return allowed


def _check_counts(**counts: int) -> None:
    for name, count in counts.items():
        if not isinstance(count, int) or count < 1:
            raise ValueError(f"{name}: expected a whole number of at least 1, got {count!r}")
