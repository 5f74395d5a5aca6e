"""Decodes lists of sentences with the searches of `searches`, one compiled batch at a time.

The searches call the model through `Model.step` alone; its state belongs to the architecture.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from experiments.runs.ending import Failure, interruptible
from experiments.translation import searches
from experiments.translation.batches import MULTIPLE, Batches
from experiments.translation.model import Model, Params
from experiments.translation.text import EncodedPairs, Ragged
from experiments.translation.vocabulary import EOS, PAD
from jattn.generation import Hypotheses


Kind = Literal["greedy", "sample", "beam"]

_ROWS = 128  # rows decoded together: sentences, or their beams


@dataclass(frozen=True, kw_only=True)
class Search:
    """The settings of a search for translations; the functions of `searches` define them.

    Attributes:
        kind: "greedy", "sample" or "beam".
        beams: the number of beams of a beam search.
        n_best: the number of translations of a sentence, at most `beams`; 1 without a beam.
        length_penalty: the length penalty of a beam search.
        temperature: the temperature of sampling.
        top_k: the number of likeliest tokens to sample from.
        top_p: the least probability of the nucleus to sample from.
        seed: the seed of sampling; with a sentence's index in the list it decides the sample.
        cache_dtype: the dtype in which caches store keys and values, such as "int8"; by default
            that in which the model computes.

    Raises:
        ValueError: a value is out of its range; the message names it.
    """

    kind: Kind = "greedy"
    beams: int = 4
    n_best: int = 1
    length_penalty: float = 0.6
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    cache_dtype: str | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"kind: expected one of {get_args(Kind)}, got {self.kind!r}")
        searches.check_beam(self.beams, self.n_best, self.length_penalty)
        searches.check_sampling(self.temperature, self.top_k, self.top_p)
        if self.n_best > self.rows:
            setting = f"{self.beams} beams" if self.kind == "beam" else f"kind={self.kind!r}"
            raise ValueError(
                f"n_best: expected at most {self.rows} with {setting}, got {self.n_best}"
            )
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed: expected 0 <= seed < 2^32, got {self.seed}")

    @property
    def rows(self) -> int:
        """The number of rows that each sentence has in the decoding state."""
        return self.beams if self.kind == "beam" else 1

    def to_json(self) -> dict[str, Any]:
        """Returns the kind and the fields that it uses, as JSON data."""
        names = (*_READ_BY[self.kind], *(["cache_dtype"] if self.cache_dtype else ()))
        return {"kind": self.kind} | {name: getattr(self, name) for name in names}

    def __str__(self) -> str:
        kind, *fields = self.to_json().items()
        named = (f"{name.replace('_', ' ')} {value}" for name, value in fields)
        return ", ".join((f"{kind[1]} search", *named))


_READ_BY = {
    "greedy": (),
    "sample": ("temperature", "top_k", "top_p", "seed"),
    "beam": ("beams", "length_penalty"),
}

GREEDY = Search()


class Translation(NamedTuple):
    """A translation of a sentence.

    Attributes:
        ids: the ids up to `<eos>`; without `<eos>` if truncated at the greatest length.
        score: in a beam search the log probability divided by the length penalty; otherwise the log
            probability.
        log_prob: the log probability under the model, in nats.
    """

    ids: np.ndarray
    score: float
    log_prob: float


_EMPTY = Translation(np.array([EOS], np.int32), 0.0, 0.0)  # for sentences without words


# ------------------------------------------------------------------------------------ translation


@functools.partial(jax.jit, static_argnames=("model", "length", "search"))
def search_batch(
    model: Model,
    params: Params,
    source: Array,
    source_lengths: Array,
    keys: Array | None = None,
    *,
    length: int,
    search: Search = GREEDY,
) -> Hypotheses:
    """Translates a batch of source ids `[B, S]` of these lengths `[B]`; compiled.

    Args:
        model, params: the model.
        source, source_lengths: the batch; rows of length 0 are empty.
        keys: the random keys of the rows, `[B]`, needed by sampling only.
        length: the greatest number of tokens of a translation; short sentences have a lower limit,
            see `longest_translation`.
        search: the settings of the search, except its seed.
    """
    state = model.start(
        params, source, source_lengths, length, search.rows, cache_dtype=search.cache_dtype
    )
    decode_step = functools.partial(model.step, params)
    arguments = decode_step, state, source_lengths > 0, length
    limits = longest_translation(source_lengths)
    if search.kind == "beam":
        return searches.beam(
            *arguments,
            beams=search.beams,
            n_best=search.n_best,
            length_penalty=search.length_penalty,
            reorder=model.reorder,
            limits=limits,
        )
    if search.kind == "sample":
        assert keys is not None
        options = {name: getattr(search, name) for name in ("temperature", "top_k", "top_p")}
        generated = searches.sample(*arguments, keys, **options, limits=limits)
    else:
        generated = searches.greedy(*arguments, limits=limits)
    return Hypotheses(*(x[:, None] for x in (*generated, generated.log_probs)))


def translated(
    model: Model,
    params: Params,
    sources: Sequence[Sequence[int]],
    search: Search = GREEDY,
    *,
    report: Callable[[int], object] = lambda count: None,
) -> list[np.ndarray]:
    """Returns the ids of the best translation of each row of source ids, up to `<eos>`."""
    results = translations(model, params, sources, search, report=report)
    return [row[0].ids if row else np.empty(0, np.int32) for row in results]


def translations(
    model: Model,
    params: Params,
    sources: Sequence[Sequence[int]],
    search: Search = GREEDY,
    *,
    report: Callable[[int], object] = lambda count: None,
) -> list[list[Translation]]:
    """Returns the `search.n_best` best translations of each row of source ids, best first.

    There are fewer if fewer sequences have a nonzero probability, and a row without words has one
    translation without words. `report` is called after each batch with its number of rows.

    Raises:
        Failure: the model's probabilities are NaN.
    """
    if not sources:
        return []
    results: list[list[Translation]] = [[] for _ in sources]
    pairs = _pairs(model, sources, [[EOS]] * len(sources))
    rows = max(_ROWS // search.rows, 1)
    batches = Batches(pairs, rows_per_batch=rows, max_shapes=model.config.max_shapes)
    unseeded = dataclasses.replace(search, seed=0)  # so that all seeds share compiled functions
    for batch, indices in interruptible(batches.in_order()):
        length = min(model.config.max_length, longest_translation(batch.source.shape[1]))
        keys = _keys(search.seed, indices) if search.kind == "sample" else None
        hypotheses = search_batch(
            model, params, batch.source, batch.source_lengths, keys, length=length, search=unseeded
        )
        for index, *row in zip(indices, *map(np.asarray, hypotheses), strict=True):
            if index >= 0:
                has_words = list(sources[index]) != [EOS]
                results[index] = _translations(*row) if has_words else [_EMPTY]
                _check_finite(results[index], index)
        report(int((indices >= 0).sum()))
    return results


def longest_translation(source_length: Any) -> Any:
    """Returns the greatest length of a translation, 1.5 n + 8, where n is the length of its source,
    rounded up to a multiple of 8. A sentence has the same limit in every batch."""
    rounded = -(-source_length // MULTIPLE) * MULTIPLE
    return rounded + rounded // 2 + 8


def _pairs(
    model: Model, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]
) -> EncodedPairs:
    indices = np.arange(len(sources))
    sizes = model.source_size, model.target_size
    return EncodedPairs(Ragged.of(sources), Ragged.of(targets), indices, *sizes)


def _keys(seed: int, indices: np.ndarray) -> Array:
    """Returns a random key for each sentence that depends on its index in the list, not on the
    batch."""
    numbers = np.maximum(indices, 0).astype(np.uint32)
    return jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), numbers)


def _translations(*hypotheses: np.ndarray) -> list[Translation]:
    """Converts the arrays of `Hypotheses` of a sentence, `[N, ...]`, to translations, without those
    of score -inf."""
    return [
        Translation(tokens[:length], float(score), float(log_prob))
        for tokens, length, log_prob, score in zip(*hypotheses, strict=True)
        if score != -np.inf
    ]


def _check_finite(results: list[Translation], index: int) -> None:
    """Raises Failure if the model's probabilities for a sentence are NaN."""
    if not results or any(np.isnan(translation.log_prob) for translation in results):
        raise Failure(
            f"sentence {index + 1}: the model gives no probabilities (NaN); its training has "
            "diverged, or its parameters are damaged"
        )


# ------------------------------------------------------------------------------------- alignments


def alignments(
    model: Model,
    params: Params,
    sources: Sequence[Sequence[int]],
    targets: Sequence[Sequence[int]],
) -> list[list[tuple[int, int]]]:
    """Returns the links (source token, target token) of cross-attention for each pair of rows.

    A target token is linked to the source token with the greatest weight when it is generated, in
    the mean over the heads (of a Transformer's last layer). `<eos>` has no links, and neither have
    target tokens with the greatest weight on `<eos>`.
    """
    if not sources:
        return []
    links: list[list[tuple[int, int]]] = [[] for _ in sources]
    name = model.alignment
    pairs = _pairs(model, sources, targets)
    batches = Batches(pairs, rows_per_batch=_ROWS, max_shapes=model.config.max_shapes)
    for batch, indices in batches.in_order():
        weights = model.weights(params, batch.source, batch.source_lengths, batch.target_in)[name]
        strongest = np.asarray(jnp.argmax(jnp.mean(weights, axis=1), axis=-1))
        for row, index in enumerate(indices):
            if index >= 0:
                links[index] = _links(strongest[row], batch.source[row], batch.target_out[row])
    return links


def _links(strongest: np.ndarray, source: np.ndarray, target: np.ndarray) -> list[tuple[int, int]]:
    """Returns the links of a sentence; target position i has its greatest weight on source position
    `strongest[i]`."""
    linked = np.flatnonzero((target != EOS) & (target != PAD) & (source[strongest] != EOS))
    return [(int(strongest[index]), int(index)) for index in linked]
