"""The subcommand `plot`: draws the attention of a run's model and the losses of its training."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from experiments.runs.console import Console
from experiments.runs.ending import UserError
from experiments.translation import pictures, reporting
from experiments.translation.commands.evaluate import tests_of
from experiments.translation.commands.trained_run import TrainedRun, encode, has_words, open_run
from experiments.translation.corpus import Pair
from experiments.translation.data import clean
from experiments.translation.decoding import translated
from experiments.translation.vocabulary import BOS, PAD


def plot(options: argparse.Namespace, _: Console) -> None:
    """Draws the pictures, and prints the names of their files."""
    trained = open_run(options)
    sentence = options.sentence
    if sentence is None:
        sentence = sentence_to_draw(tests_of(options, trained.run))
    elif not has_words(trained.run, clean(sentence)):
        raise UserError("--sentence: expected words, got none")
    print(*draw(trained, [sentence]), *reporting.draw_curves(trained.run), sep="\n")


def draw(trained: TrainedRun, sentences: Sequence[str]) -> list[Path]:
    """Draws the attention on the first sentence and its translation, writes a page with the
    attention on all sentences, and returns the files."""
    directory = trained.run.path("pictures")
    seen = _seen(trained, list(dict.fromkeys(sentences)))
    files = pictures.draw_sentence(seen[0], directory)
    page = directory / "attention.html"
    pictures.write_viewer(seen, f"Attention of {trained.run.directory.name}", page)
    return [*files, page]


def _seen(trained: TrainedRun, sentences: Sequence[str]) -> list[pictures.Seen]:
    """Translates the sentences and returns the attention weights of each, computed in one batch."""
    run = trained.run
    sources = [encode(run, sentence) for sentence in sentences]
    targets = [row.tolist() for row in translated(trained.model, trained.params, sources)]
    inputs = [[BOS, *row[:-1]] for row in targets]
    lengths = np.array([len(row) for row in sources])
    weights = trained.model.weights(trained.params, _padded(sources), lengths, _padded(inputs))
    arrays = {name: np.asarray(array) for name, array in weights.items()}
    return [
        pictures.Seen(
            {name: array[index] for name, array in arrays.items()},
            source=run.source.tokens(sources[index]),
            target_in=run.target.tokens(inputs[index]),
            target_out=run.target.tokens(targets[index]),
        )
        for index in range(len(sentences))
    ]


def _padded(rows: Sequence[Sequence[int]]) -> np.ndarray:
    """Returns rows of ids as one array, padded to the longest row."""
    width = max(map(len, rows))
    return np.array([[*row, *[PAD] * (width - len(row))] for row in rows], np.int32)


def sentence_to_draw(tests: Mapping[str, Sequence[Pair]]) -> str:
    """Returns the first sentence of the first set that has 9 to 12 words, so that its picture is
    readable, or else the first sentence."""
    pairs = next(iter(tests.values()))
    candidates = (pair.source for pair in pairs if 9 <= len(pair.source.split()) <= 12)
    return next(candidates, pairs[0].source)
