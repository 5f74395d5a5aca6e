"""Searches for good sequences under a model: greedy, by sampling, and with a beam.

A search knows the model only as a step: `step(state, tokens [R])` takes the token that comes next
in each of R rows, `<bos>` first, and gives the logits `[R, V]` of what follows it, and the state
for the next call. What the state is, and how it knows its position, is the step's own affair.

Every search is one loop over the whole batch, in which the step is traced once, whatever the
length. A row stays as it is after its `<eos>`, with `<pad>` behind, and the loop ends with its last
row. `<pad>` and `<bos>` are never generated: log probabilities (natural, float32) are those of the
other tokens among themselves. Of equally likely tokens the one of lower id comes first.

Letters: B sentences, K beams, R rows of the state (B, or B·K with a beam), V tokens.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from experiments.translation.vocabulary import BOS, EOS, PAD
from jattn.generation import sample_tokens


Step = Callable[[Any, Array], tuple[Array, Any]]
Reorder = Callable[[Any, Array], Any]

_MOST_BEAMS = 1000
_MOST_PENALTY = 8  # the greatest whose powers of lengths up to 2^16 fit float32
_ABSENT = -jnp.inf  # the log probability and the score of what there is not


class Sequences(NamedTuple):
    """A sequence for each sentence.

    Attributes:
        ids: up to the first `<eos>`, `<pad>` behind it, int32 `[B, length]`.
        log_probs: the sum over their tokens, float32 `[B]`.
    """

    ids: Array
    log_probs: Array


class Hypotheses(NamedTuple):
    """N sequences for each sentence, best first.

    Attributes:
        ids: up to the first `<eos>`, `<pad>` behind it, int32 `[B, N, length]`.
        scores: log probability by length penalty, falling, -inf where there is no sequence,
            float32 `[B, N]`.
        log_probs: float32 `[B, N]`.
    """

    ids: Array
    scores: Array
    log_probs: Array


# ------------------------------------------------------------------------------ token after token


def greedy(
    step: Step, state: Any, active: Array, length: int, *, limits: Array | None = None
) -> Sequences:
    """The likeliest token after each other one.

    Args:
        step: the model; see the head of this module.
        state: what `step` is first called with; it has B rows.
        active: which rows have a sentence, bool `[B]`; the others stay `<pad>`.
        length: the most tokens of a sequence, `<eos>` counted.
        limits: the most tokens of each row's sequence, int32 `[B]`, at most `length`; by default
            `length`.

    Raises:
        ValueError: `length` below 1.
    """

    def likeliest(logits: Array, _: Array) -> Array:
        return jnp.argmax(logits, axis=-1)

    return _each_token(step, state, active, length, likeliest, limits)


def sample(
    step: Step,
    state: Any,
    active: Array,
    length: int,
    key: Array,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    limits: Array | None = None,
) -> Sequences:
    """Draws each token by its probability, which the options sharpen in this order.

    The log probabilities that come back are the model's own, whatever the options.

    Args:
        step, state, active, length: as in `greedy`.
        key: of the batch, from which each row has its own by its number; or the keys of the rows,
            `[B]`. Either way no row's tokens depend on how many others there are.
        temperature: what the logits are divided by; at 0 the search is greedy.
        top_k: draw from this many of the likeliest tokens.
        top_p: draw from the nucleus: as few of the likeliest tokens as together have at least
            this probability (Holtzman et al. 2020).
        limits: as in `greedy`.

    Raises:
        ValueError: an option out of its range, or `length` below 1.
    """
    check_sampling(temperature, top_k, top_p)
    if temperature < np.finfo(np.float32).tiny:
        return greedy(step, state, active, length, limits=limits)
    rows = jnp.arange(active.shape[0])
    keys = key if key.ndim else jax.vmap(jax.random.fold_in, (None, 0))(key, rows)

    def drawn(logits: Array, position: Array) -> Array:
        here = jax.vmap(jax.random.fold_in, (0, None))(keys, position)
        return sample_tokens(here, logits, temperature, top_k, top_p)

    return _each_token(step, state, active, length, drawn, limits)


def check_sampling(temperature: float, top_k: int | None, top_p: float | None) -> None:
    """Raises ValueError for an option that `sample` does not take."""
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature: expected a number not below 0, got {temperature!r}")
    if top_k is not None:
        _check_counts(top_k=top_k)
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p: expected 0 < top_p <= 1, got {top_p!r}")


def _each_token(
    step: Step,
    state: Any,
    active: Array,
    length: int,
    choose: Callable[[Array, Array], Array],
    limits: Array | None,
) -> Sequences:
    """Generates what `choose` takes from the logits `[B, V]` of each position, a token per row."""
    _check_counts(length=length)
    rows = active.shape[0]
    limits = _row_limits(limits, rows, length)

    def unfinished(carry: tuple[Any, ...]) -> Array:
        return jnp.any(carry[2])

    def advance(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        position, tokens, active, generated, state = carry
        logits, state = step(state, tokens)
        logits = _of_allowed_tokens(logits)
        chosen = choose(logits, position).astype(jnp.int32)
        log_probs = jnp.take_along_axis(jax.nn.log_softmax(logits), chosen[:, None], axis=-1)
        tokens = jnp.where(active, chosen, PAD)
        generated = Sequences(
            generated.ids.at[:, position].set(tokens),
            generated.log_probs + jnp.where(active, log_probs[:, 0], 0),
        )
        active = active & (tokens != EOS) & (position + 1 < limits)
        return position + 1, tokens, active, generated, state

    nothing = Sequences(jnp.full((rows, length), PAD, jnp.int32), jnp.zeros((rows,), jnp.float32))
    first = jnp.full((rows,), BOS, jnp.int32)
    start = (jnp.zeros((), jnp.int32), first, active, nothing, state)
    return jax.lax.while_loop(unfinished, advance, start)[3]


def _of_allowed_tokens(logits: Array) -> Array:
    """The logits `[R, V]` in float32, without those of `<pad>` and `<bos>`."""
    return logits.astype(jnp.float32).at[:, jnp.asarray([PAD, BOS])].set(-jnp.inf)


# ------------------------------------------------------------------------------------------- beam


class _Beams(NamedTuple):
    """Hypotheses that may go on, likeliest first: -inf where there is none.

    Attributes:
        ids: int32 `[B, K, length]`.
        log_probs: float32 `[B, K]`.
        tokens: the last of the ids, int32 `[B, K]`.
    """

    ids: Array
    log_probs: Array
    tokens: Array


def beam(
    step: Step,
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
    """The best hypotheses that a beam meets, by log probability over a penalty of their length.

    At each position, of the 2·K likeliest continuations of the K beams, those that end go to the
    finished hypotheses, of which the best are kept, and the first K others are the next beams; so
    the beam is never narrower than K. A sentence is done when none of its beams could still become
    better than the worst hypothesis kept; what the best is does therefore not depend on `n_best`.
    Beams that are there after a sentence's last position count as hypotheses without `<eos>`.

    One beam is the greedy search, which ends at the first `<eos>`, and finds one hypothesis.

    Args:
        step, active, length, limits: as in `greedy`.
        state: what `step` is first called with; it has B·K rows, the K of a sentence together.
        beams: K.
        n_best: N, the number of hypotheses that come back.
        length_penalty: α of `_penalties`; 0 for none.
        reorder: `reorder(state, rows [B·K])` gives the state of these rows.
    """
    check_beam(beams, n_best, length_penalty)
    _check_counts(length=length)
    sentences = active.shape[0]
    if beams == 1:
        generated = greedy(step, state, active, length, limits=limits)
        generated = _scored(generated, active, length_penalty)
        return _best(n_best, generated, _no_hypotheses(sentences, n_best, length))
    penalties = _penalties(length + 1, length_penalty)
    pool = max(beams, n_best)
    limits = _row_limits(limits, sentences, length)[:, None]
    first_rows = beams * jnp.arange(sentences, dtype=jnp.int32)[:, None]

    def advance(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        position, alive, finished, state = carry
        logits, state = step(state, alive.tokens.reshape(-1))
        parents, longer = _expanded(alive, logits, position)
        finished = _best(pool, finished, _finished(longer, penalties[position + 1]))
        kept, alive = _next_beams(longer, beams)
        state = reorder(state, (first_rows + _gathered(parents, kept)).reshape(-1))
        at_limit = position + 1 >= limits
        finished = _best(pool, finished, _cut(at_limit, alive, penalties[limits]))
        # A log probability only falls, so this is the most that the likeliest beam can come to.
        reachable = alive.log_probs[:, :1] / jnp.maximum(penalties[limits], penalties[position + 2])
        alive = _still_open(~at_limit & (reachable > finished.scores[:, -1:]), alive)
        return position + 1, alive, finished, state

    nothing = _no_hypotheses(sentences, pool, length)
    start = (jnp.zeros((), jnp.int32), _first_beams(active, beams, length), nothing, state)
    return _best(n_best, jax.lax.while_loop(_unfinished, advance, start)[2])


def _unfinished(carry: tuple[Any, ...]) -> Array:
    return jnp.any(carry[1].log_probs > _ABSENT)


def check_beam(beams: int, n_best: int, length_penalty: float) -> None:
    """Raises ValueError for an option that `beam` does not take."""
    _check_counts(beams=beams, n_best=n_best)
    if beams > _MOST_BEAMS:
        raise ValueError(f"beams: expected at most {_MOST_BEAMS}, got {beams}")
    if not math.isfinite(length_penalty):
        raise ValueError(f"length_penalty: expected a finite number, got {length_penalty!r}")
    if abs(length_penalty) > _MOST_PENALTY:
        raise ValueError(
            f"length_penalty: expected -{_MOST_PENALTY}..{_MOST_PENALTY}, got {length_penalty!r}"
        )


def _penalties(most: int, alpha: float) -> Array:
    """What the log probability of 0..`most` tokens is divided by: ((5 + length) / 6)^α, float32
    `[most + 1]` (Wu et al. 2016, equation 14).

    NumPy computes them, because the last digit of XLA's powers depends on how many there are, and
    so a sentence's score would depend on the others.
    """
    return jnp.asarray(((5 + np.arange(most + 1)) / 6) ** alpha, jnp.float32)


def _first_beams(active: Array, beams: int, length: int) -> _Beams:
    """One empty beam for each sentence: were there more, all would find the same."""
    sentences = active.shape[0]
    there = active[:, None] & (jnp.arange(beams) == 0)[None]
    return _Beams(
        jnp.full((sentences, beams, length), PAD, jnp.int32),
        jnp.where(there, jnp.float32(0), _ABSENT),
        jnp.full((sentences, beams), BOS, jnp.int32),
    )


def _expanded(alive: _Beams, logits: Array, position: Array) -> tuple[Array, _Beams]:
    """The 2·K likeliest continuations at a position, and the number of the beam of each,
    `[B, 2K]`."""
    sentences, beams = alive.log_probs.shape
    log_probs = jax.nn.log_softmax(_of_allowed_tokens(logits))
    vocabulary = log_probs.shape[-1]
    totals = alive.log_probs[:, :, None] + log_probs.reshape(sentences, beams, vocabulary)
    # Whatever the step made of beams that are not there, such as NaN, is not there.
    totals = jnp.where(alive.log_probs[:, :, None] > _ABSENT, totals, _ABSENT)
    totals, chosen = jax.lax.top_k(totals.reshape(sentences, beams * vocabulary), 2 * beams)
    parents, tokens = chosen // vocabulary, chosen % vocabulary
    ids = _gathered(alive.ids, parents).at[:, :, position].set(tokens)
    return parents, _Beams(ids, totals, tokens)


def _finished(longer: _Beams, divisor: Array) -> Hypotheses:
    """Those continuations `[B, 2K]` that end, by their score; the others are not there."""
    log_probs = jnp.where(longer.tokens == EOS, longer.log_probs, _ABSENT)
    return Hypotheses(longer.ids, log_probs / divisor, log_probs)


def _cut(at_limit: Array, alive: _Beams, divisor: Array) -> Hypotheses:
    """The beams of sentences at their limit `[B, 1]` as hypotheses; the others are not there."""
    log_probs = jnp.where(at_limit, alive.log_probs, _ABSENT)
    return Hypotheses(alive.ids, log_probs / divisor, log_probs)


def _next_beams(longer: _Beams, beams: int) -> tuple[Array, _Beams]:
    """The likeliest continuations that do not end, and their indices among all `[B, K]`."""
    log_probs = jnp.where(longer.tokens == EOS, _ABSENT, longer.log_probs)
    _, kept = jax.lax.top_k(log_probs, beams)
    longer = longer._replace(log_probs=log_probs)
    return kept, jax.tree.map(lambda array: _gathered(array, kept), longer)


def _still_open(going_on: Array, alive: _Beams) -> _Beams:
    """No beams, and tokens `<pad>`, where a sentence does not go on, `[B, 1]`, or has no beam."""
    there = going_on & (alive.log_probs > _ABSENT)
    return alive._replace(
        log_probs=jnp.where(there, alive.log_probs, _ABSENT),
        tokens=jnp.where(there, alive.tokens, PAD),
    )


def _best(count: int, *pools: Hypotheses) -> Hypotheses:
    """The hypotheses of highest score in all pools; of equal ones those that come first."""
    together = jax.tree.map(lambda *arrays: jnp.concatenate(arrays, axis=1), *pools)
    chosen = jax.lax.top_k(together.scores, count)[1]
    return jax.tree.map(lambda array: _gathered(array, chosen), together)


def _gathered(array: Array, indices: Array) -> Array:
    """Of each sentence the entries of an array `[B, N, ...]` at its indices `[B, M]`."""
    return jax.vmap(lambda entries, chosen: entries[chosen])(array, indices)


def _scored(generated: Sequences, active: Array, alpha: float) -> Hypotheses:
    """One hypothesis for each sentence that there is."""
    log_probs = jnp.where(active, generated.log_probs, _ABSENT)
    penalties = _penalties(generated.ids.shape[1], alpha)
    scores = log_probs / penalties[jnp.sum(generated.ids != PAD, axis=-1)]
    return Hypotheses(generated.ids[:, None], scores[:, None], log_probs[:, None])


def _no_hypotheses(sentences: int, count: int, length: int) -> Hypotheses:
    absent = jnp.full((sentences, count), _ABSENT, jnp.float32)
    return Hypotheses(jnp.full((sentences, count, length), PAD, jnp.int32), absent, absent)


def _row_limits(limits: Array | None, rows: int, length: int) -> Array:
    """The most tokens of each row, int32 `[rows]`; `length` where no limits are given."""
    if limits is None:
        return jnp.full(rows, length, jnp.int32)
    return jnp.minimum(jnp.asarray(limits, jnp.int32), length)


def _check_counts(**counts: int) -> None:
    for name, count in counts.items():
        if not isinstance(count, int) or count < 1:
            raise ValueError(f"{name}: expected a whole number of at least 1, got {count!r}")
