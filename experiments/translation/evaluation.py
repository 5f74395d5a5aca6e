"""Evaluates a model: loss, perplexity, exact match, BLEU and chrF on held-out pairs."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from experiments.runs.ending import Failure, interruptible
from experiments.translation import data
from experiments.translation.batches import Batches
from experiments.translation.corpus import Pair
from experiments.translation.decoding import GREEDY, Search, translated
from experiments.translation.model import Model, Params
from experiments.translation.text import encode_pairs
from experiments.translation.training import check_batch, total_loss
from experiments.translation.vocabulary import Vocabulary


_ROWS = 128  # sentences in a batch

_total_loss = jax.jit(total_loss, static_argnames="model")


def read_tests(
    path: str | Path, languages: Sequence[str], *, most_unpacked: int = data.MOST_UNPACKED
) -> dict[str, list[Pair]]:
    """Reads pairs to evaluate a model on: a folder's `test` or else `val`, or a TSV file's rows.

    Raises:
        FileNotFoundError, ValueError: the files are missing or break a rule of `data`.
    """
    path = Path(path)
    if not path.is_dir():
        return {path.name: data.read_tsv(path, most_unpacked=most_unpacked)[0]}
    options = {"languages": languages, "most_unpacked": most_unpacked}
    try:
        return {"test": data.read_split(path, "test", **options)[0]}
    except FileNotFoundError:
        return {"validation": data.read_split(path, "val", **options)[0]}


@dataclass(frozen=True)
class Scores:
    """The scores of a model on a set of held-out pairs.

    Attributes:
        sentences: the number of pairs.
        loss: nats per target token, `<eos>` counted, without label smoothing.
        perplexity: exp(loss).
        exact_match: the share of translations that equal the reference, token for token.
        bleu: corpus BLEU of sacrebleu with its default tokeniser.
        word_bleu: corpus BLEU on the words of the model's tokeniser, without smoothing, as the
            tutorials that train on Multi30k compute it.
        chrf: corpus chrF of sacrebleu.
        constructions: for each construction the number of exact matches and of pairs.
    """

    sentences: int
    loss: float
    perplexity: float
    exact_match: float
    bleu: float
    word_bleu: float
    chrf: float
    constructions: dict[str, tuple[int, int]]

    def to_json(self) -> dict[str, Any]:
        """Returns the figures as JSON data, with None for figures that are not finite."""
        figures = dataclasses.asdict(self)
        return {
            name: None if isinstance(figure, float) and not math.isfinite(figure) else figure
            for name, figure in figures.items()
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "Scores":
        """Returns the scores in a record of validation, which does not list constructions."""
        names = [field.name for field in dataclasses.fields(cls) if field.name != "constructions"]
        figures = {name: record[f"validation_{name}"] for name in names}
        finite: dict[str, Any]
        finite = {name: math.inf if value is None else value for name, value in figures.items()}
        return cls(**finite, constructions={})

    def __str__(self) -> str:
        return (
            f"loss {self.loss:.4f}, perplexity {self.perplexity:.3f}, "
            f"exact match {self.exact_match:.1%}, BLEU {self.bleu:.2f}, "
            f"word BLEU {self.word_bleu:.2f}, chrF {self.chrf:.2f}"
        )


class Evaluation(NamedTuple):
    """The pairs of an evaluation, the translations of their sources, and the scores."""

    pairs: Sequence[Pair]
    translations: list[str]
    scores: Scores


class Evaluator:
    """An evaluator of a model on one set of pairs, which can be called any number of times.

    Sides longer than the model's maximum are truncated for the model, but never in the references
    that translations are compared with.

    Attributes:
        pairs: the pairs to evaluate on.
        cut: the number of their sides that are too long for the model.
    """

    def __init__(
        self,
        model: Model,
        pairs: Sequence[Pair],
        source: Vocabulary,
        target: Vocabulary,
        search: Search = GREEDY,
    ) -> None:
        self.pairs = pairs
        self._model = model
        self._search = search
        self._target = target
        self._encoded, report = encode_pairs(
            pairs, source, target, max_length=model.config.max_length, too_long="truncate"
        )
        self.cut = report.truncated_source + report.truncated_target

    def __call__(
        self, params: Params, *, report: Callable[[int], object] = lambda count: None
    ) -> Evaluation:
        """Translates and scores the pairs; calls `report` with the number of pairs of each batch
        that is done."""
        translations = self._translate(params, report)
        texts = [self._target.decode(ids) for ids in translations]
        words = [self._target.decode_words(ids) for ids in translations]
        return Evaluation(self.pairs, texts, self.score(texts, words, self.token_loss(params)))

    def score(
        self, translations: Sequence[str], words: Sequence[Sequence[str]], loss: float
    ) -> Scores:
        """Computes the scores of these translations, given their words and the loss per token."""
        references = [pair.target for pair in self.pairs]
        lower = self._target.lower
        exact = [
            translation == self._target.normalize(reference)
            for translation, reference in zip(translations, references, strict=True)
        ]
        return Scores(
            sentences=len(self.pairs),
            loss=loss,
            perplexity=math.exp(loss) if loss < 700 else math.inf,
            exact_match=sum(exact) / len(exact),
            bleu=bleu(translations, references, lower=lower),
            word_bleu=word_bleu(words, [self._target.split_words(text) for text in references]),
            chrf=chrf(translations, references, lower=lower),
            constructions=self._by_construction(exact),
        )

    def token_loss(self, params: Params) -> float:
        """Computes the loss in nats per target token.

        Raises:
            Failure: the loss is NaN.
        """
        total, tokens = 0.0, 0
        shapes = self._model.config.max_shapes
        batches = Batches(self._encoded, rows_per_batch=_ROWS, max_shapes=shapes)
        for batch, _ in interruptible(batches.in_order()):
            check_batch(batch, self._model)
            total += float(_total_loss(self._model, params, batch))
            tokens += int(batch.target_lengths.sum())
        if math.isnan(total):
            raise Failure("the loss is NaN; the model's training has diverged")
        return total / tokens

    def _translate(self, params: Params, report: Callable[[int], object]) -> list[np.ndarray]:
        sources = self._encoded.source
        rows = [sources[row].tolist() for row in range(len(sources))]
        return translated(self._model, params, rows, self._search, report=report)

    def _by_construction(self, exact: Sequence[bool]) -> dict[str, tuple[int, int]]:
        counts: dict[str, tuple[int, int]] = {}
        for pair, right in zip(self.pairs, exact, strict=True):
            if pair.construction:
                matches, pairs = counts.get(pair.construction, (0, 0))
                counts[pair.construction] = (matches + right, pairs + 1)
        return counts


def bleu(translations: Sequence[str], references: Sequence[str], *, lower: bool) -> float:
    """Computes corpus BLEU (Papineni et al. 2002, Post 2018), 0 to 100; `lower` ignores case.

    Raises:
        TypeError: an argument is one text instead of several.
        ValueError: unequal numbers of translations and references, or none.
    """
    _check_aligned(translations, references)
    return BLEU(lowercase=lower).corpus_score(list(translations), [list(references)]).score


def word_bleu(translations: Sequence[Sequence[str]], references: Sequence[Sequence[str]]) -> float:
    """Computes corpus BLEU on words, without smoothing: 0 if no four words in a row are right.

    Raises TypeError and ValueError for the same reasons as `bleu`.
    """
    _check_aligned(translations, references)
    metric = BLEU(tokenize="none", smooth_method="none", force=True)
    hypotheses, references = (
        [" ".join(words) for words in side] for side in (translations, references)
    )
    return metric.corpus_score(hypotheses, [references]).score


def chrf(translations: Sequence[str], references: Sequence[str], *, lower: bool) -> float:
    """Computes corpus chrF2 (Popovic 2015), 0 to 100; `lower` ignores case.

    Raises TypeError and ValueError for the same reasons as `bleu`.
    """
    _check_aligned(translations, references)
    return CHRF(lowercase=lower).corpus_score(list(translations), [list(references)]).score


def _check_aligned(translations: Sequence[Any], references: Sequence[Any]) -> None:
    """Checks that there is a reference for each translation, and at least one of them."""
    for name, texts in (("translations", translations), ("references", references)):
        if isinstance(texts, str):
            raise TypeError(f"{name}: expected several texts, got the text {texts!r:.40}")
    if len(translations) != len(references):
        raise ValueError(
            f"references: expected {len(translations)}, one for each translation, "
            f"got {len(references)}"
        )
    if not translations:
        raise ValueError("translations: expected at least one, got none")


def table(name: str, scores: Scores) -> str:
    """Formats the scores as text, with a line for each construction."""
    lines = [f"{name}: {scores.sentences} sentences, {scores}"]
    for construction, (matches, pairs) in sorted(scores.constructions.items()):
        lines.append(f"  {construction:<28}{matches:>5} of {pairs:<5}{matches / pairs:>7.1%}")
    return "\n".join(lines)
