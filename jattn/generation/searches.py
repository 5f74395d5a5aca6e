"""Searches for likely sequences: `each_token` chooses one token at a time, `beam_search` keeps
several hypotheses.

A search calls the model as `next_logits(state, tokens [R])`, with the next token of each of R rows.
The result is the logits `[R, V]` of the tokens that follow, and the state for the next call. The
search does not look into the state.

Every search is one loop over the whole batch and traces the model once, whatever the length. After
its stop token a row is unchanged and filled with `pad`; the loop ends when all rows have ended. Of
equally likely tokens the one with the lower number comes first.

Letters: B sequences, K beams, R rows of the state (B, or B·K with beams), V tokens.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jattn.checks import check_number, check_size, check_sizes, shown


Step = Callable[[Any, Array], tuple[Array, Any]]
Choose = Callable[[Array, Array], Array]
Reorder = Callable[[Any, Array], Any]

_MOST_PENALTY = 8  # the greatest exponent for which powers of lengths up to 2^16 fit float32
_ABSENT = -jnp.inf  # the log probability and the score of a beam or hypothesis that is absent


class Ending(NamedTuple):
    """The rules of where sequences end.

    Attributes:
        length: the greatest number of tokens of a sequence, including its stop token.
        stop: the tokens that end a sequence.
        pad: the token that fills a row after the end of its sequence.
        limits: the greatest number of tokens of each sequence, int32 `[B]`, at most `length`, which
            is the default.

    >>> ending = jattn.generation.Ending(length=8, stop=(3, 5))
    >>> ending.is_stop(jnp.arange(2, 6)).tolist(), ending.row_limits(2).tolist()
    ([False, True, False, True], [8, 8])
    """

    length: int
    stop: tuple[int, ...] = ()
    pad: int = 0
    limits: Array | None = None

    def row_limits(self, rows: Any) -> Int[Array, " B"]:
        """Returns the greatest number of tokens of each sequence."""
        if self.limits is None:
            return jnp.full(rows, self.length, jnp.int32)
        return jnp.minimum(jnp.asarray(self.limits, jnp.int32), self.length)

    def is_stop(self, tokens: Int[Array, "..."]) -> Bool[Array, "..."]:
        """Returns which tokens end a sequence."""
        return jnp.isin(tokens, jnp.asarray(self.stop, jnp.int32))


class Generated(NamedTuple):
    """Generated tokens, one sequence in each row.

    Attributes:
        tokens: int32 `[B, length]`, up to and including the row's first stop token, then `pad`.
        lengths: int32 `[B]`, the number of tokens generated in each row, including the stop token.
        log_probs: float32 `[B]`, the sum of the tokens' natural log probabilities.
    """

    tokens: Int[Array, "B n"]
    lengths: Int[Array, " B"]
    log_probs: Float[Array, " B"]


class Hypotheses(NamedTuple):
    """N sequences for each of B prompts, best first.

    Attributes:
        tokens, lengths, log_probs: as in `Generated`, `[B, N, length]`, `[B, N]` and `[B, N]`.
        scores: log probabilities divided by the length penalty, in falling order, -inf for an
            absent hypothesis, float32 `[B, N]`.
    """

    tokens: Int[Array, "B N n"]
    lengths: Int[Array, "B N"]
    log_probs: Float[Array, "B N"]
    scores: Float[Array, "B N"]


# ------------------------------------------------------------------------------ token after token


class Progress(NamedTuple):
    """The state of `each_token` between two tokens."""

    place: Array  # [], the number of tokens generated
    last: Array  # [R], the model's next input
    active: Array  # [R], True for rows that have not ended
    generated: Generated
    state: Any


def each_token(
    next_logits: Step,
    state: Any,
    first: Int[Array, " B"],
    choose: Choose,
    ending: Ending,
    active: Bool[Array, " B"] | None = None,
) -> Generated:
    """Generates at each place the tokens that `choose` selects.

    Args:
        next_logits: the model; see the head of this module.
        state: the state for the first call of `next_logits`, with B rows.
        first: the tokens for the first call of `next_logits`.
        choose: `choose(logits [B, V], place)` returns a token for each row; `place` is the number
            of tokens before it.
        ending: where sequences end.
        active: False for rows to leave empty.

    Raises TypeError and ValueError for a length that is not a positive integer.

    >>> next_logits = lambda state, tokens: (jax.nn.one_hot(tokens + 1, 9), state)
    >>> likeliest = lambda logits, place: jnp.argmax(logits, axis=-1)
    >>> jattn.generation.each_token(
    ...     next_logits, (), jnp.array([0, 5]), likeliest, jattn.generation.Ending(4, stop=(3,))
    ... ).tokens.tolist()
    [[1, 2, 3, 0], [6, 7, 8, 0]]
    """
    start = begin(state, first, ending, active)
    advance_once = lambda progress: advance(next_logits, progress, choose, ending)  # noqa: E731
    return jax.lax.while_loop(lambda x: jnp.any(x.active), advance_once, start).generated


def begin(state: Any, first: Array, ending: Ending, active: Array | None = None) -> Progress:
    """Returns the progress of `each_token` before its first token."""
    check_size("length", ending.length)
    rows = len(first)
    tokens = jnp.full((rows, ending.length), ending.pad, jnp.int32)
    generated = Generated(tokens, jnp.zeros(rows, jnp.int32), jnp.zeros(rows, jnp.float32))
    active = _with_room(active, ending, rows)
    return Progress(jnp.zeros((), jnp.int32), first.astype(jnp.int32), active, generated, state)


def _with_room(active: Array | None, ending: Ending, rows: int) -> Array:
    """Returns which rows are active, by default all, and may have a token."""
    may_have_one = ending.row_limits(rows) > 0
    return may_have_one if active is None else active & may_have_one


def advance(next_logits: Step, progress: Progress, choose: Choose, ending: Ending) -> Progress:
    """Appends one token to each row that has not ended."""
    place, last, active, generated, state = progress
    logits, state = next_logits(state, last)
    chosen = choose(logits, place).astype(jnp.int32)
    log_probs = jnp.take_along_axis(log_softmax(logits), chosen[:, None], axis=-1)[:, 0]
    tokens = jnp.where(active, chosen, ending.pad)
    generated = Generated(
        generated.tokens.at[:, place].set(tokens),
        generated.lengths + active.astype(jnp.int32),
        generated.log_probs + jnp.where(active, log_probs, 0),
    )
    active = active & ~ending.is_stop(tokens) & (place + 1 < ending.row_limits(len(tokens)))
    return Progress(place + 1, tokens, active, generated, state)


def log_softmax(logits: Float[Array, "R V"]) -> Float[Array, "R V"]:
    """Returns log probabilities in float32, -inf for logits of -inf, also if all of them are."""
    logits = logits.astype(jnp.float32)
    return jnp.where(logits == -jnp.inf, -jnp.inf, jax.nn.log_softmax(logits))


# ------------------------------------------------------------------------------------------- beam


class _Beams(NamedTuple):
    """Unfinished hypotheses, likeliest first.

    Attributes:
        tokens: int32 `[B, K, length]`.
        log_probs: the log probabilities, -inf for an absent beam, float32 `[B, K]`.
        last: the last token of each beam, int32 `[B, K]`.
    """

    tokens: Array
    log_probs: Array
    last: Array


def beam_search(
    next_logits: Step,
    state: Any,
    first: Int[Array, " B"],
    ending: Ending,
    *,
    beams: int,
    penalties: Float[Array, " length+1"],
    reorder: Reorder,
    n_best: int = 1,
    active: Bool[Array, " B"] | None = None,
) -> Hypotheses:
    """Returns the best hypotheses of a beam search, by log probability divided by a length penalty
    (Sutskever et al. 2014; Wu et al. 2016).

    Each step takes the (1 + s)·K likeliest continuations of the K beams, for s stop tokens. Those
    that end join the finished hypotheses, of which the best `n_best` are kept; the K likeliest
    others are the next beams, so that there are always K. A prompt is done when no beam can become
    better than the worst of its finished hypotheses. Beams left at a sequence's limit count as
    hypotheses without a stop token.

    With one beam the search is greedy: it ends at the first stop token and finds one hypothesis.

    If the logits of a beam contain NaN or +∞, as after a cache has overflowed, all hypotheses of
    its prompt have the log probability NaN.

    Args:
        next_logits, first, ending, active: as in `each_token`.
        state: the state for the first call of `next_logits`, with B·K rows, grouped by prompt.
        beams: K.
        penalties: the divisors of the log probabilities of sequences of 0..length tokens,
            monotonic; see `length_penalties`.
        reorder: `reorder(state, rows [B·K])` returns the state of these rows.
        n_best: N, the number of hypotheses returned.

    Raises TypeError and ValueError for sizes that are not positive integers.

    >>> table = jnp.log(jnp.array([[0.1, 0.5, 0.4], [0.1, 0.5, 0.4], [0.9, 0.05, 0.05]]))
    >>> best = jattn.generation.beam_search(
    ...     lambda state, tokens: (table[tokens], state),
    ...     state=(),
    ...     first=jnp.array([1]),
    ...     ending=jattn.generation.Ending(length=2, stop=(0,)),
    ...     beams=2,
    ...     penalties=jattn.generation.length_penalties(2, 0.0),
    ...     reorder=lambda state, rows: state,
    ... )
    >>> best.tokens.tolist(), f"{jnp.exp(best.log_probs[0, 0]):.2f}"
    ([[[2, 0]]], '0.36')
    """
    check_sizes(beams=beams, n_best=n_best, length=ending.length)
    B = len(first)
    active = _with_room(active, ending, B)
    nothing = _no_hypotheses(B, n_best, ending)
    if beams == 1:
        choose = lambda logits, _: jnp.argmax(logits, axis=-1)  # noqa: E731
        sequences = each_token(next_logits, state, first, choose, ending, active)
        return _best(n_best, _scored(sequences, active, penalties), nothing)
    limits = ending.row_limits(B)[:, None]
    first_rows = beams * jnp.arange(B, dtype=jnp.int32)[:, None]

    def advance_beams(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        place, alive, finished, state = carry
        logits, state = next_logits(state, alive.last.reshape(-1))
        parents, longer, is_nan = _expanded(alive, logits, place, 1 + len(ending.stop))
        stops = ending.is_stop(longer.last)
        new = _hypotheses(stops, longer, place + 1, penalties[place + 1])
        finished = _best(n_best, finished, new)
        chosen, alive = _next_beams(stops, longer, beams)
        state = reorder(state, (first_rows + _gathered(parents, chosen)).reshape(-1))
        at_limit = place + 1 >= limits
        finished = _best(n_best, finished, _hypotheses(at_limit, alive, limits, penalties[limits]))
        finished = _nan_where(is_nan, finished)
        # Log probabilities only fall, so this is an upper bound of the likeliest beam's score.
        next_penalty = penalties[jnp.minimum(place + 2, ending.length)]
        reachable = alive.log_probs[:, :1] / jnp.maximum(penalties[limits], next_penalty)
        alive = _still_open(~at_limit & (reachable > finished.scores[:, -1:]), alive, ending.pad)
        return place + 1, alive, finished, state

    start = jnp.zeros((), jnp.int32), _first_beams(active, first, beams, ending), nothing, state
    is_any_open = lambda carry: jnp.any(carry[1].log_probs > _ABSENT)  # noqa: E731
    return jax.lax.while_loop(is_any_open, advance_beams, start)[2]


def check_length_penalty(alpha: float) -> None:
    """Raises TypeError and ValueError for an exponent of `length_penalties` that is not a number in
    -8..8; computes nothing.

    >>> jattn.generation.check_length_penalty(0.6)
    """
    check_number("length_penalty", alpha)
    if abs(alpha) > _MOST_PENALTY:
        raise ValueError(
            f"length_penalty: expected -{_MOST_PENALTY}..{_MOST_PENALTY}, got {shown(alpha)}"
        )


def length_penalties(length: int, alpha: float) -> Float[Array, " length+1"]:
    """Returns the length penalties ((5 + n) / 6)^α of sequences of n = 0..`length` tokens, float32
    (Wu et al. 2016, equation 14); α = 0 is no penalty, a greater one favours longer sequences.

    Raises TypeError and ValueError for an `alpha` that is not a number in -8..8.

    >>> jattn.generation.length_penalties(7, 1.0)[jnp.array([1, 7])].tolist()
    [1.0, 2.0]
    """
    check_length_penalty(alpha)
    # NumPy computes them, because the last digit of XLA's powers depends on the array's size, so
    # that a sequence's score would depend on the other sequences.
    return jnp.asarray(((5 + np.arange(length + 1)) / 6) ** alpha, jnp.float32)


def _first_beams(active: Array, first: Array, beams: int, ending: Ending) -> _Beams:
    """Returns one empty beam for each prompt; further empty beams would only repeat it."""
    present = active[:, None] & (jnp.arange(beams) == 0)[None]
    return _Beams(
        jnp.full((len(first), beams, ending.length), ending.pad, jnp.int32),
        jnp.where(present, jnp.float32(0), _ABSENT),
        jnp.broadcast_to(first.astype(jnp.int32)[:, None], present.shape),
    )


def _expanded(
    alive: _Beams, logits: Array, place: Array, per_beam: int
) -> tuple[Array, _Beams, Array]:
    """Returns the number of the beam that each continuation extends, `[B, C]`, the likeliest C
    continuations at a place, and whether a prompt's log probabilities contain NaN, `[B, 1]`. C is K
    times `per_beam`, or all continuations if there are fewer."""
    B, K = alive.log_probs.shape
    V = logits.shape[-1]
    totals = alive.log_probs[:, :, None] + log_softmax(logits).reshape(B, K, V)
    # Absent beams stay absent, whatever logits the model returned for them, NaN included.
    totals = jnp.where(alive.log_probs[:, :, None] > _ABSENT, totals, _ABSENT).reshape(B, K * V)
    is_nan = jnp.any(jnp.isnan(totals), axis=1, keepdims=True)
    totals, chosen = jax.lax.top_k(totals, K * min(per_beam, V))
    parents, last = chosen // V, chosen % V
    tokens = _gathered(alive.tokens, parents).at[:, :, place].set(last)
    return parents, _Beams(tokens, totals, last), is_nan


def _hypotheses(present: Array, beams: _Beams, lengths: Array, penalty: Array) -> Hypotheses:
    """Returns the beams of these lengths as hypotheses; those not in `present` are absent."""
    log_probs = jnp.where(present, beams.log_probs, _ABSENT)
    lengths = jnp.broadcast_to(lengths, log_probs.shape)
    return Hypotheses(beams.tokens, lengths, log_probs, log_probs / penalty)


def _next_beams(stops: Array, longer: _Beams, beams: int) -> tuple[Array, _Beams]:
    """Returns the indices `[B, K]` of the likeliest continuations that do not end, and these as
    beams."""
    longer = longer._replace(log_probs=jnp.where(stops, _ABSENT, longer.log_probs))
    _, chosen = jax.lax.top_k(longer.log_probs, beams)
    return chosen, jax.tree.map(lambda array: _gathered(array, chosen), longer)


def _still_open(going_on: Array, alive: _Beams, pad: int) -> _Beams:
    """Removes the beams of prompts that are done, i.e. not in `going_on` `[B, 1]`; the model gets
    `pad` for absent beams."""
    present = going_on & (alive.log_probs > _ABSENT)
    return alive._replace(
        log_probs=jnp.where(present, alive.log_probs, _ABSENT),
        last=jnp.where(present, alive.last, pad),
    )


def _best(count: int, *pools: Hypotheses) -> Hypotheses:
    """Returns the hypotheses with the highest scores of all pools; ties go to the earlier one."""
    merged = jax.tree.map(lambda *arrays: jnp.concatenate(arrays, axis=1), *pools)
    chosen = jax.lax.top_k(merged.scores, count)[1]
    return jax.tree.map(lambda array: _gathered(array, chosen), merged)


def _nan_where(is_nan: Array, hypotheses: Hypotheses) -> Hypotheses:
    """Returns the hypotheses, those of the prompts in `is_nan [B, 1]` with NaN as probability."""
    log_probs, scores = (jnp.where(is_nan, jnp.nan, x) for x in hypotheses[2:])
    return hypotheses._replace(log_probs=log_probs, scores=scores)


def _gathered(array: Array, indices: Array) -> Array:
    """Gathers the entries of an array `[B, N, ...]` at the indices `[B, M]` of each prompt."""
    return jax.vmap(lambda entries, chosen: entries[chosen])(array, indices)


def _scored(sequences: Generated, active: Array, penalties: Array) -> Hypotheses:
    """Returns one hypothesis for each active row."""
    log_probs = jnp.where(active, sequences.log_probs, _ABSENT)
    pool = sequences.tokens, sequences.lengths, log_probs, log_probs / penalties[sequences.lengths]
    return Hypotheses(*(x[:, None] for x in pool))


def _no_hypotheses(rows: Any, count: int, ending: Ending) -> Hypotheses:
    absent = jnp.full((rows, count), _ABSENT, jnp.float32)
    tokens = jnp.full((rows, count, ending.length), ending.pad, jnp.int32)
    return Hypotheses(tokens, jnp.zeros((rows, count), jnp.int32), absent, absent)
