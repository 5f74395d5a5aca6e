"""Greedy decoding: the likeliest next token, one at a time, for a whole batch, compiled.

A search knows the model only as a step: `step(cache, tokens [B], place)` takes the tokens that
stand at a place and gives logits `[B, V]` for the next one, and the cache for the next call. What
the cache is, is the step's own affair. `prefix_step` keeps the tokens so far and runs the decoder
over all of them each time.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from experiments.translation.batches import Batches
from experiments.translation.model import Model, Params
from experiments.translation.text import BOS, EOS, PAD, EncodedPairs, Ragged


Step = Callable[[Any, Array, Array], tuple[Array, Any]]

_ROWS = 128  # sentences decoded together


def greedy(step: Step, cache: Any, active: Array, length: int) -> Array:
    """The likeliest token after each other one, from `<bos>` to the first `<eos>`.

    A sentence stays as it is after its `<eos>`, with `<pad>` behind, and decoding ends with the
    last one. Of equally likely tokens the first is taken; `<pad>` and `<bos>` never are.

    Args:
        step: the model; see the head of this module.
        cache: what `step` is first called with.
        active: which rows have a sentence to translate, bool `[B]`; the others stay `<pad>`.
        length: the most tokens of a translation, `<eos>` counted.

    Returns:
        ids, int32 `[B, length]`.
    """
    rows = active.shape[0]

    def unfinished(carry: tuple[Array, ...]) -> Array:
        place, _, active, *_ = carry
        return (place < length) & jnp.any(active)

    def advance(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        place, tokens, active, ids, cache = carry
        logits, cache = step(cache, tokens, place)
        logits = logits.at[:, jnp.asarray([PAD, BOS])].set(-jnp.inf)
        likeliest = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        tokens = jnp.where(active, likeliest, PAD)
        ids = jax.lax.dynamic_update_slice_in_dim(ids, tokens[:, None], place, axis=1)
        return place + 1, tokens, active & (tokens != EOS), ids, cache

    start = jnp.zeros((), jnp.int32)
    first = jnp.full((rows,), BOS, jnp.int32)
    empty = jnp.full((rows, length), PAD, jnp.int32)
    return jax.lax.while_loop(unfinished, advance, (start, first, active, empty, cache))[3]


class Prefix(NamedTuple):
    """The cache of `prefix_step`: the source as the decoder reads it, and the tokens so far."""

    memory: Array
    source_lengths: Array
    target: Array


def prefix_step(
    model: Model, params: Params, cache: Prefix, tokens: Array, place: Array
) -> tuple[Array, Prefix]:
    """A step that runs the decoder over all tokens so far; places behind them are not seen."""
    target = jax.lax.dynamic_update_slice_in_dim(cache.target, tokens[:, None], place, axis=1)
    logits = model.decode(params, cache.memory, cache.source_lengths, target)
    here = jax.lax.dynamic_index_in_dim(logits, place, axis=1, keepdims=False)
    return here, cache._replace(target=target)


@functools.partial(jax.jit, static_argnames=("model", "length"))
def greedy_batch(
    model: Model, params: Params, source: Array, source_lengths: Array, *, length: int
) -> Array:
    """Translations `[B, length]` of source ids `[B, S]` of these lengths `[B]`, compiled."""
    memory = model.encode(params, source, source_lengths)
    empty = jnp.full((source.shape[0], length), PAD, jnp.int32)
    step = functools.partial(prefix_step, model, params)
    return greedy(step, Prefix(memory, source_lengths, empty), source_lengths > 0, length)


def translated(model: Model, params: Params, sources: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """The ids of a translation of each row of source ids, up to its `<eos>`."""
    if not sources:
        return []
    results = [np.empty(0, np.int32)] * len(sources)
    batches = Batches(
        _alone(model, sources), rows_per_batch=_ROWS, max_shapes=model.config.max_shapes
    )
    for batch, places in batches.in_order():
        length = min(model.config.max_length, longest_translation(batch.source.shape[1]))
        ids = greedy_batch(model, params, batch.source, batch.source_lengths, length=length)
        for row, place in zip(np.asarray(ids), places, strict=True):
            if place >= 0:
                results[place] = row[: _end(row)]
    return results


def _alone(model: Model, sources: Sequence[Sequence[int]]) -> EncodedPairs:
    """The sources as pairs whose targets are empty."""
    nothing = Ragged.of([[EOS]] * len(sources))
    places = np.arange(len(sources))
    return EncodedPairs(Ragged.of(sources), nothing, places, model.source_size, model.target_size)


def longest_translation(source_width: int) -> int:
    """How many tokens a translation may have, by the width of its batch: half as many again as the
    source, and some to spare."""
    return source_width + source_width // 2 + 8


def _end(row: np.ndarray) -> int:
    """How many ids there are up to and with the first `<eos>`, or else before the padding."""
    ends = np.flatnonzero(row == EOS)
    return int(ends[0]) + 1 if len(ends) else int((row != PAD).sum())
