"""Opens a trained run to use its model, and encodes sentences for it."""

import argparse
from dataclasses import dataclass

from experiments.runs.ending import users_part
from experiments.translation.data import clean
from experiments.translation.model import Model, Params
from experiments.translation.runs import TranslationRun


@dataclass(frozen=True)
class TrainedRun:
    """A run with its model, its parameters, and the steps after which these were saved."""

    run: TranslationRun
    model: Model
    params: Params
    steps: list[int]


@users_part()
def open_run(options: argparse.Namespace) -> TrainedRun:
    """Opens the run that the options name, with the parameters trained so far."""
    run = TranslationRun.open(options.run)
    model = Model(run.config, len(run.source), len(run.target))
    model.check_cache_dtype(getattr(options, "cache_dtype", None))
    params, steps = run.parameters(model.shapes)
    return TrainedRun(run, model, params, steps)


def has_words(run: TranslationRun, sentence: str) -> bool:
    """Returns whether a sentence has any words to translate."""
    return bool(run.source.split_words(sentence))


@users_part()
def encode(run: TranslationRun, sentence: str) -> list[int]:
    """Returns the ids of a sentence; a sentence that is too long for the model is a `UserError`."""
    return run.source.encode(clean(sentence), max_length=run.config.max_length)
