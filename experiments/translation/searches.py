"""Searches for likely sequences under a model: `greedy`, `sample` and `beam`.

A search calls the model as `step(state, tokens [R])`, with the next token of each of R rows,
starting with `<bos>`. The step returns the logits `[R, V]` of the tokens that follow, and the state
for the next call. The search does not look into the state, which also keeps track of positions.

Every search is one loop over the whole batch and traces the step once, whatever the length. After
its `<eos>` a row is unchanged and ends in `<pad>`; the loop ends when all rows are done. `<pad>`
and `<bos>` are never generated: log probabilities (natural, float32) are normalized over the other
tokens. Of equally likely tokens the one with the lower id comes first.

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
_MOST_PENALTY = 8  # the greatest exponent for which powers of lengths up to 2^16 fit float32
_ABSENT = -jnp.inf  # the log probability and the score of a beam or hypothesis that is absent


class Sequences(NamedTuple):
    """One sequence for each sentence.

    Attributes:
        ids: the ids up to the first `<eos>`, then `<pad>`, int32 `[B, length]`.
        log_probs: the log probabilities, summed over the tokens, float32 `[B]`.
    """

    ids: Array
    log_probs: Array


class Hypotheses(NamedTuple):
    """N sequences for each sentence, best first.

    Attributes:
        ids: the ids up to the first `<eos>`, then `<pad>`, int32 `[B, N, length]`.
        scores: log probabilities divided by the length penalty, in falling order, -inf for an
            absent hypothesis, float32 `[B, N]`.
        log_probs: the log probabilities, float32 `[B, N]`.
    """

    ids: Array
    scores: Array
    log_probs: Array


# ------------------------------------------------------------------------------ token after token


def greedy(
    step: Step, state: Any, active: Array, length: int, *, limits: Array | None = None
) -> Sequences:
    """Generates the likeliest token at each position.

    Args:
        step: the model; see the head of this module.
        state: the state for the first call of `step`, with B rows.
        active: bool `[B]`, true for rows with a sentence; the others stay `<pad>`.
        length: the greatest number of tokens of a sequence, `<eos>` counted.
        limits: the greatest number of tokens of each row, int32 `[B]`, at most `length`; by
            default `length`.

    Raises:
        ValueError: `length` is below 1.
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
    """Samples each token from the model's distribution, modified by temperature, top k and top p,
    in this order.

    The log probabilities returned are the model's, whatever the options.

    Args:
        step, state, active, length: see `greedy`.
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
        return greedy(step, state, active, length, limits=limits)
    rows = jnp.arange(active.shape[0])
    keys = key if key.ndim else jax.vmap(jax.random.fold_in, (None, 0))(key, rows)

    def draw(logits: Array, position: Array) -> Array:
        position_keys = jax.vmap(jax.random.fold_in, (0, None))(keys, position)
        return sample_tokens(position_keys, logits, temperature, top_k, top_p)

    return _each_token(step, state, active, length, draw, limits)


def check_sampling(temperature: float, top_k: int | None, top_p: float | None) -> None:
    """Raises ValueError if an option of `sample` is out of its range."""
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
    """Generates at each position the tokens that `choose` selects from the logits `[B, V]`."""
    _check_counts(length=length)
    rows = active.shape[0]
    limits = _row_limits(limits, rows, length)

    def unfinished(carry: tuple[Any, ...]) -> Array:
        return jnp.any(carry[2])

    def advance(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        position, tokens, active, generated, state = carry
        logits, state = step(state, tokens)
        logits = _allowed_logits(logits)
        chosen = choose(logits, position).astype(jnp.int32)
        log_probs = jnp.take_along_axis(jax.nn.log_softmax(logits), chosen[:, None], axis=-1)
        tokens = jnp.where(active, chosen, PAD)
        generated = Sequences(
            generated.ids.at[:, position].set(tokens),
            generated.log_probs + jnp.where(active, log_probs[:, 0], 0),
        )
        active = active & (tokens != EOS) & (position + 1 < limits)
        return position + 1, tokens, active, generated, state

    empty = Sequences(jnp.full((rows, length), PAD, jnp.int32), jnp.zeros((rows,), jnp.float32))
    first = jnp.full((rows,), BOS, jnp.int32)
    start = (jnp.zeros((), jnp.int32), first, active, empty, state)
    return jax.lax.while_loop(unfinished, advance, start)[3]


def _allowed_logits(logits: Array) -> Array:
    """Returns the logits `[R, V]` in float32, with -inf for `<pad>` and `<bos>`."""
    return logits.astype(jnp.float32).at[:, jnp.asarray([PAD, BOS])].set(-jnp.inf)


# ------------------------------------------------------------------------------------------- beam


class _Beams(NamedTuple):
    """Unfinished hypotheses, likeliest first.

    Attributes:
        ids: the ids, int32 `[B, K, length]`.
        log_probs: the log probabilities, -inf for an absent beam, float32 `[B, K]`.
        tokens: the last id of each beam, int32 `[B, K]`.
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
    """Returns the best hypotheses of a beam search, by log probability divided by a length penalty.

    Each position takes the 2·K likeliest continuations of the K beams. Those that end join the pool
    of finished hypotheses, which keeps the best; the K likeliest others are the next beams, so that
    the beam is never narrower than K. A sentence is done when no beam can become better than the
    worst hypothesis of its pool; the best hypothesis therefore does not depend on `n_best`. Beams
    left at a sentence's length limit count as hypotheses without `<eos>`.

    With one beam the search is greedy: it ends at the first `<eos>` and finds one hypothesis.

    Args:
        step, active, length, limits: as in `greedy`.
        state: the state for the first call of `step`, with B·K rows, grouped by sentence.
        beams: K.
        n_best: N, the number of hypotheses returned.
        length_penalty: α of `_penalties`; 0 for none.
        reorder: `reorder(state, rows [B·K])` returns the state of these rows.
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
        chosen, alive = _next_beams(longer, beams)
        state = reorder(state, (first_rows + _gathered(parents, chosen)).reshape(-1))
        at_limit = position + 1 >= limits
        finished = _best(pool, finished, _cut(at_limit, alive, penalties[limits]))
        # Log probabilities only fall, so this is an upper bound of the likeliest beam's score.
        reachable = alive.log_probs[:, :1] / jnp.maximum(penalties[limits], penalties[position + 2])
        alive = _still_open(~at_limit & (reachable > finished.scores[:, -1:]), alive)
        return position + 1, alive, finished, state

    nothing = _no_hypotheses(sentences, pool, length)
    start = (jnp.zeros((), jnp.int32), _first_beams(active, beams, length), nothing, state)
    return _best(n_best, jax.lax.while_loop(_unfinished, advance, start)[2])


def _unfinished(carry: tuple[Any, ...]) -> Array:
    return jnp.any(carry[1].log_probs > _ABSENT)


def check_beam(beams: int, n_best: int, length_penalty: float) -> None:
    """Raises ValueError if an option of `beam` is out of its range."""
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
    """Returns the length penalties ((5 + length) / 6)^α of lengths 0..`most`, float32 `[most + 1]`
    (Wu et al. 2016, equation 14).

    NumPy computes them, because the last digit of XLA's powers depends on the array's size, so that
    a sentence's score would depend on the other sentences.
    """
    return jnp.asarray(((5 + np.arange(most + 1)) / 6) ** alpha, jnp.float32)


def _first_beams(active: Array, beams: int, length: int) -> _Beams:
    """Returns one empty beam for each sentence; further empty beams would only repeat it."""
    sentences = active.shape[0]
    present = active[:, None] & (jnp.arange(beams) == 0)[None]
    return _Beams(
        jnp.full((sentences, beams, length), PAD, jnp.int32),
        jnp.where(present, jnp.float32(0), _ABSENT),
        jnp.full((sentences, beams), BOS, jnp.int32),
    )


def _expanded(alive: _Beams, logits: Array, position: Array) -> tuple[Array, _Beams]:
    """Returns the number of the beam that each continuation extends, `[B, 2K]`, and the 2·K
    likeliest continuations at a position."""
    sentences, beams = alive.log_probs.shape
    log_probs = jax.nn.log_softmax(_allowed_logits(logits))
    vocabulary = log_probs.shape[-1]
    totals = alive.log_probs[:, :, None] + log_probs.reshape(sentences, beams, vocabulary)
    # Absent beams stay absent, whatever logits the step returned for them, NaN included.
    totals = jnp.where(alive.log_probs[:, :, None] > _ABSENT, totals, _ABSENT)
    totals, chosen = jax.lax.top_k(totals.reshape(sentences, beams * vocabulary), 2 * beams)
    parents, tokens = chosen // vocabulary, chosen % vocabulary
    ids = _gathered(alive.ids, parents).at[:, :, position].set(tokens)
    return parents, _Beams(ids, totals, tokens)


def _finished(longer: _Beams, divisor: Array) -> Hypotheses:
    """Returns the continuations `[B, 2K]` as hypotheses; those without `<eos>` are absent."""
    log_probs = jnp.where(longer.tokens == EOS, longer.log_probs, _ABSENT)
    return Hypotheses(longer.ids, log_probs / divisor, log_probs)


def _cut(at_limit: Array, alive: _Beams, divisor: Array) -> Hypotheses:
    """Returns the beams of sentences at their limit `[B, 1]` as hypotheses; others are absent."""
    log_probs = jnp.where(at_limit, alive.log_probs, _ABSENT)
    return Hypotheses(alive.ids, log_probs / divisor, log_probs)


def _next_beams(longer: _Beams, beams: int) -> tuple[Array, _Beams]:
    """Returns the indices `[B, K]` of the likeliest continuations that do not end, and these as
    beams."""
    log_probs = jnp.where(longer.tokens == EOS, _ABSENT, longer.log_probs)
    _, chosen = jax.lax.top_k(log_probs, beams)
    longer = longer._replace(log_probs=log_probs)
    return chosen, jax.tree.map(lambda array: _gathered(array, chosen), longer)


def _still_open(going_on: Array, alive: _Beams) -> _Beams:
    """Removes the beams of sentences that are done, i.e. not in `going_on` `[B, 1]`; absent beams
    have the token `<pad>`."""
    present = going_on & (alive.log_probs > _ABSENT)
    return alive._replace(
        log_probs=jnp.where(present, alive.log_probs, _ABSENT),
        tokens=jnp.where(present, alive.tokens, PAD),
    )


def _best(count: int, *pools: Hypotheses) -> Hypotheses:
    """Returns the hypotheses with the highest scores of all pools; ties go to the earlier one."""
    merged = jax.tree.map(lambda *arrays: jnp.concatenate(arrays, axis=1), *pools)
    chosen = jax.lax.top_k(merged.scores, count)[1]
    return jax.tree.map(lambda array: _gathered(array, chosen), merged)


def _gathered(array: Array, indices: Array) -> Array:
    """Gathers the entries of an array `[B, N, ...]` at the indices `[B, M]` of each sentence."""
    return jax.vmap(lambda entries, chosen: entries[chosen])(array, indices)


def _scored(generated: Sequences, active: Array, alpha: float) -> Hypotheses:
    """Returns one hypothesis for each active sentence."""
    log_probs = jnp.where(active, generated.log_probs, _ABSENT)
    penalties = _penalties(generated.ids.shape[1], alpha)
    scores = log_probs / penalties[jnp.sum(generated.ids != PAD, axis=-1)]
    return Hypotheses(generated.ids[:, None], scores[:, None], log_probs[:, None])


def _no_hypotheses(sentences: int, count: int, length: int) -> Hypotheses:
    absent = jnp.full((sentences, count), _ABSENT, jnp.float32)
    return Hypotheses(jnp.full((sentences, count, length), PAD, jnp.int32), absent, absent)


def _row_limits(limits: Array | None, rows: int, length: int) -> Array:
    """Returns the greatest number of tokens of each row, int32 `[rows]`; by default `length`."""
    if limits is None:
        return jnp.full(rows, length, jnp.int32)
    return jnp.minimum(jnp.asarray(limits, jnp.int32), length)


def _check_counts(**counts: int) -> None:
    for name, count in counts.items():
        if not isinstance(count, int) or count < 1:
            raise ValueError(f"{name}: expected a whole number of at least 1, got {count!r}")
