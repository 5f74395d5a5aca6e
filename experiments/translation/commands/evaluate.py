"""The subcommand `evaluate`: scores a run's model on held-out sentences."""

import argparse
import json
from collections.abc import Mapping

from experiments.runs.console import Console, progress
from experiments.runs.ending import users_part
from experiments.translation import reporting
from experiments.translation.command_line import make_search
from experiments.translation.commands.trained_run import TrainedRun, open_run
from experiments.translation.corpus import Pair
from experiments.translation.decoding import Search
from experiments.translation.evaluation import Evaluation, Evaluator, read_tests, table
from experiments.translation.runs import TranslationRun
from experiments.translation.training import read_texts


def evaluate(options: argparse.Namespace, console: Console) -> None:
    """Evaluates a run's model, and prints and writes the results."""
    with users_part():
        search = make_search(options)
    trained = open_run(options)
    evaluate_on(trained, tests_of(options, trained.run), search, console)


@users_part()
def tests_of(options: argparse.Namespace, run: TranslationRun) -> dict[str, list[Pair]]:
    """Reads the pairs to evaluate on: those that the options name, or else the run's held-out
    pairs."""
    max_unpacked = options.max_unpacked
    if options.data is not None and str(options.data.resolve()) != run.origin.path:
        languages = options.languages or run.origin.languages
        return read_tests(options.data, languages, most_unpacked=max_unpacked)
    path, languages = run.origin.path, run.origin.languages
    return read_texts(run.config, path, languages, training=False, most_unpacked=max_unpacked).tests


def evaluate_on(
    trained: TrainedRun, tests: Mapping[str, list[Pair]], search: Search, console: Console
) -> dict[str, Evaluation]:
    """Evaluates on each set of pairs, and prints the results and writes them to the run."""
    run, results, figures = trained.run, {}, {}
    print(f"{run.directory}: {reporting.used(trained.steps)}; {search}")
    for name, pairs in tests.items():
        evaluator = Evaluator(trained.model, pairs, run.source, run.target, search)
        with progress(len(pairs), unit="sentence") as bar:
            results[name] = evaluator(trained.params, report=bar.update)
        print(table(name, results[name].scores), flush=True)
        if evaluator.cut:
            limit = run.config.max_length
            print(f"  {evaluator.cut} sides were truncated to max_length={limit} tokens")
        settings = {"search": search.to_json(), "steps": trained.steps, "cut": evaluator.cut}
        figures[name] = settings | results[name].scores.to_json()
        console.emit("evaluation", set=name, **figures[name])
    run.write("evaluation.json", json.dumps(figures, indent=2, allow_nan=False) + "\n")
    return results
