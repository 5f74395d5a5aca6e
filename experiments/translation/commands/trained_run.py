"""A run whose model can be used, and sentences as its model reads them."""

import argparse
from dataclasses import dataclass

from experiments.runs.ending import users_part
from experiments.translation.data import clean
from experiments.translation.model import Model, Params
from experiments.translation.runs import Run


@dataclass(frozen=True)
class TrainedRun:
    """A run with its model, the parameters it has come to, and the steps after which they were
    saved."""

    run: Run
    model: Model
    params: Params
    steps: list[int]


@users_part()
def open_run(options: argparse.Namespace) -> TrainedRun:
    """The run that the options name, as far as it has come."""
    run = Run.open(options.run)
    model = Model(run.config, len(run.source), len(run.target))
    params, steps = run.parameters(model.shapes)
    return TrainedRun(run, model, params, steps)


def has_words(run: Run, sentence: str) -> bool:
    """Whether anything of a sentence is left to translate."""
    return bool(run.source.split_words(sentence))


@users_part()
def encode(run: Run, sentence: str) -> list[int]:
    """The ids of a sentence, if the run's model can read it."""
    return run.source.encode(clean(sentence), max_length=run.config.max_length)
