"""The subcommand `plot`: what a run's model looks at, and the losses of its training."""

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
    """Draws, and prints the names of the files."""
    trained = open_run(options)
    sentence = options.sentence
    if sentence is None:
        sentence = sentence_to_draw(tests_of(options, trained.run))
    elif not has_words(trained.run, clean(sentence)):
        raise UserError("--sentence: expected words, got none")
    print(*draw(trained, [sentence]), *reporting.draw_curves(trained.run), sep="\n")


def draw(trained: TrainedRun, sentences: Sequence[str]) -> list[Path]:
    """Draws the attention on the first sentence and its translation, writes a page with that on
    all of them, and returns the files."""
    directory = trained.run.path("pictures")
    seen = _seen(trained, list(dict.fromkeys(sentences)))
    files = pictures.draw_sentence(seen[0], directory)
    page = directory / "attention.html"
    pictures.write_viewer(seen, f"Attention of {trained.run.directory.name}", page)
    return [*files, page]


def _seen(trained: TrainedRun, sentences: Sequence[str]) -> list[pictures.Seen]:
    """What the heads look at in each sentence and its translation, computed as one batch."""
    run = trained.run
    sources = [encode(run, sentence) for sentence in sentences]
    targets = [row.tolist() for row in translated(trained.model, trained.params, sources)]
    read = [[BOS, *row[:-1]] for row in targets]
    lengths = np.array([len(row) for row in sources])
    found = trained.model.weights(trained.params, _padded(sources), lengths, _padded(read))
    arrays = {name: np.asarray(weights) for name, weights in found.items()}
    return [
        pictures.Seen(
            {name: weights[place] for name, weights in arrays.items()},
            source=run.source.tokens(sources[place]),
            target_in=run.target.tokens(read[place]),
            target_out=run.target.tokens(targets[place]),
        )
        for place in range(len(sentences))
    ]


def _padded(rows: Sequence[Sequence[int]]) -> np.ndarray:
    """Rows of ids as one array, as long as the longest."""
    width = max(map(len, rows))
    return np.array([[*row, *[PAD] * (width - len(row))] for row in rows], np.int32)


def sentence_to_draw(tests: Mapping[str, Sequence[Pair]]) -> str:
    """The first sentence whose picture is neither empty nor crowded."""
    pairs = next(iter(tests.values()))
    fitting = (pair.source for pair in pairs if 9 <= len(pair.source.split()) <= 12)
    return next(fitting, pairs[0].source)
