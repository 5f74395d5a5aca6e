"""The subcommand `demo`: trains, evaluates, translates and draws."""

import argparse
import time
from collections.abc import Mapping

from experiments.runs.console import Console
from experiments.translation.commands.evaluate import evaluate_on, tests_of
from experiments.translation.commands.plot import draw, sentence_to_draw
from experiments.translation.commands.train import advise, train_run
from experiments.translation.corpus import Pair
from experiments.translation.decoding import GREEDY
from experiments.translation.evaluation import Evaluation, Scores
from experiments.translation.runs import TranslationRun


def demo(options: argparse.Namespace, console: Console) -> None:
    """Trains, evaluates on the held-out sentences, translates five of them and draws."""
    began = time.perf_counter()
    options.resume = False
    with train_run(options, console) as trained:
        tests = tests_of(options, trained.run)
        evaluations = evaluate_on(trained, tests, GREEDY, console)
        print("translations:")
        for pair, translation in _shown(evaluations):
            _print_beside_reference(trained.run, pair, translation)
        shown = [pair.source for pair, _ in _shown(evaluations)]
        files = draw(trained, [sentence_to_draw(tests), *shown])
    print("pictures:", *files[:-1], sep="\n  ")
    console.emit("pictures", files=list(map(str, files)))
    for name, result in evaluations.items():
        print(_in_words(name, result.scores))
    print(f"finished in {time.perf_counter() - began:.0f} s")
    advise(trained.run)
    print(f"to see what each word attends to, open\n  {files[-1]}")


def _in_words(name: str, scores: Scores) -> str:
    """Describes the share of right translations of a set of sentences."""
    right = f"{scores.exact_match:.1%} of {scores.sentences:,} exactly right"
    if name == "deeper":
        bleu = f"(BLEU {scores.bleu:.1f})"
        return (
            f"clauses nested deeper than any in training: {right} {bleu}, which is hard by design"
        )
    return f"held-out sentences, {name}: {right}"


def _shown(evaluations: Mapping[str, Evaluation]) -> list[tuple[Pair, str]]:
    """Returns five pairs with their translations: four from the first set and one from the last, or
    all from the only set."""
    first, *rest = [_examples(result) for result in evaluations.values()]
    return [*first[:4], rest[-1][0]] if rest else first[:5]


def _examples(result: Evaluation) -> list[tuple[Pair, str]]:
    """Returns the first pair of each construction, longest first; all pairs if there is only one
    construction."""
    examples = list(zip(result.pairs, result.translations, strict=True))
    firsts = {pair.construction: (pair, text) for pair, text in reversed(examples)}
    if len(firsts) == 1:
        return examples
    return sorted(firsts.values(), key=lambda example: -len(example[0].source))


def _print_beside_reference(run: TranslationRun, pair: Pair, translation: str) -> None:
    reference = run.target.normalize(pair.target)
    print(f"  {run.source.normalize(pair.source)}")
    print(f"  -> {translation}")
    if translation != reference:
        print(f"     (expected: {reference})")
