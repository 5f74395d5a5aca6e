"""German to English, or any language to any other, with the attention of jattn.

    python -m experiments.translation                     the demonstration, about three minutes
    python -m experiments.translation train --preset multi30k --data DIR
    python -m experiments.translation evaluate --run runs/toy
    python -m experiments.translation translate --run runs/toy "der hund schläft ."
    python -m experiments.translation translate --run runs/toy --beam 4 --n-best 2 --scores
    python -m experiments.translation plot --run runs/toy --sentence "der hund schläft ."

Without a subcommand: trains the preset `toy` on the built-in corpus, translates 1,000 held-out
sentences and 1,000 with clauses nested deeper than any it was trained on, prints five translations
and draws what the attention looks at. At least 95 % of the held-out sentences come out exactly
right; of the deeper ones far fewer do.
"""

import argparse
import contextlib
import dataclasses
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from tqdm import tqdm

from experiments.translation import checkpoints, pictures
from experiments.translation.batches import Batches
from experiments.translation.checkpoints import Run, TextOrigin, fingerprint
from experiments.translation.corpus import Pair
from experiments.translation.data import LANGUAGES, read_lines
from experiments.translation.decoding import (
    Search,
    Translation,
    alignments,
    translated,
    translations,
)
from experiments.translation.evaluation import Examined, Examiner, read_tests, table
from experiments.translation.model import Model, Params
from experiments.translation.presets import PRESETS, Config
from experiments.translation.text import BOS, encode_pairs, learn_vocabularies
from experiments.translation.training import (
    Loop,
    NonFiniteLoss,
    State,
    Texts,
    check_batch,
    first_state,
    make_optimiser,
    make_step,
    read_texts,
    total_steps,
)


# ----------------------------------------------------------------------------------- command line


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m experiments.translation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def command(name: str, function: Any, text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text)
        added.set_defaults(function=function)
        return added

    demo = command("demo", _demo, "train, evaluate, translate and plot (without a subcommand)")
    train = command("train", _train, "train a model, or go on with --resume")
    evaluate = command("evaluate", _evaluate, "examine a model on held-out sentences")
    translate = command("translate", _translate, "translate sentences, or the lines of stdin")
    plot = command("plot", _plot, "draw a model's attention and the loss of its training")
    for added in (demo, train):
        _add_training(added)
    train.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    for added in (evaluate, translate, plot):
        added.add_argument("--run", type=Path, required=True, help="the run's directory")
    for added in (demo, train, evaluate, plot):
        _add_data(added)
    _add_translation(translate)
    _add_search(translate)
    plot.add_argument("--sentence", help="what to translate and draw")
    return parser


def _add_training(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--preset", choices=sorted(PRESETS), help="what to start from (toy)")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="change a field of the preset, such as steps=500 or dropout_rate=0.2",
    )
    parser.add_argument("--seed", type=int, help="decides everything that is random")
    parser.add_argument(
        "--run", type=Path, help="a new directory (runs/PRESET, runs/PRESET-2, ...)"
    )
    parser.add_argument("--overwrite", action="store_true", help="delete the run that is there")


def _add_data(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data",
        type=Path,
        help="a folder with train and val (and test) as .de and .en or .tsv, each plain or .gz, "
        "or one TSV file; without it the built-in corpus",
    )
    parser.add_argument(
        "--languages", nargs=2, metavar=("SOURCE", "TARGET"), help="suffixes of the files (de en)"
    )


def _add_translation(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("sentences", nargs="*", metavar="SENTENCE")
    parser.add_argument("--file", type=Path, metavar="PATH", help="translate the lines of a file")
    parser.add_argument("--output", type=Path, metavar="PATH", help="a new file (stdout)")
    parser.add_argument("--overwrite", action="store_true", help="replace the output that is there")
    parser.add_argument(
        "--scores",
        action="store_true",
        help="before each translation its score and log probability, separated by tabs",
    )
    parser.add_argument(
        "--alignments",
        action="store_true",
        help="after each translation and a tab, links SOURCE-TARGET of its tokens, counted from 0: "
        "what each looks at most in the mean of the last cross-attention's heads",
    )


def _add_search(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--beam", type=int, metavar="N", help="search with N beams (greedy)")
    kinds.add_argument("--sample", action="store_true", help="draw tokens by their probability")
    parser.add_argument(
        "--n-best", type=int, default=1, metavar="N", help="the N best of the beams, a line each"
    )
    parser.add_argument(
        "--length-penalty",
        type=float,
        metavar="A",
        help="for beams: rank by log probability / ((5 + length) / 6)^A (0.6)",
    )
    parser.add_argument("--temperature", type=float, metavar="T", help="for samples: 0 is greedy")
    parser.add_argument("--top-k", type=int, metavar="K", help="for samples: of the K likeliest")
    parser.add_argument(
        "--top-p",
        type=float,
        metavar="P",
        help="for samples: of the likeliest that together have the probability P",
    )
    parser.add_argument("--seed", type=int, help="for samples: decides what is drawn (0)")


class UserError(Exception):
    """What the user can put right; its message is shown in one line."""


@contextlib.contextmanager
def _users_part() -> Iterator[None]:
    """Around what can only fail because of what the user gave."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise UserError(" ".join(str(error).split())) from error


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or (given[0].startswith("-") and given[0] not in ("-h", "--help")):
        given.insert(0, "demo")
    options = _parser().parse_args(given)
    try:
        options.function(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except NonFiniteLoss as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; training goes on with: train --run DIR --resume", file=sys.stderr)
        return 130
    return 0


# --------------------------------------------------------------------------------------- commands


def _demo(options: argparse.Namespace) -> None:
    began = time.perf_counter()
    options.resume = False
    trained = _trained(options)
    tests = _tests(options, trained.run)
    examined = _examined(trained, tests)
    print("translations:")
    for pair, translation in _shown(examined):
        _print_beside_reference(trained.run, pair, translation)
    print("pictures:")
    for file in _drawn(trained, _sentence_to_draw(tests)):
        print(f"  {file}")
    for name, result in examined.items():
        scores = result.scores
        print(f"{name}: {scores.exact_match:.1%} of {scores.sentences:,} sentences exactly right")
    print(f"all in {time.perf_counter() - began:.0f} s")
    _advise(trained.run)


def _train(options: argparse.Namespace) -> None:
    _advise(_trained(options).run)


def _evaluate(options: argparse.Namespace) -> None:
    trained = _opened(options)
    _examined(trained, _tests(options, trained.run))


def _translate(options: argparse.Namespace) -> None:
    with _users_part():
        search = _search(options)
        _check_output(options)
        sentences = _sentences(options)
    trained = _opened(options)
    if sentences is None:
        print("a sentence per line; Ctrl-D ends", file=sys.stderr)
        for line in sys.stdin:
            try:
                _write(_translated_lines(trained, [line], search, options), options)
            except UserError as error:
                print(f"error: {error}", file=sys.stderr)
        return
    lines = _translated_lines(trained, sentences, search, options)
    with _users_part():
        _write(lines, options)


def _plot(options: argparse.Namespace) -> None:
    trained = _opened(options)
    sentence = options.sentence or _sentence_to_draw(_tests(options, trained.run))
    for file in _drawn(trained, sentence):
        print(file)


# --------------------------------------------------------------------------------------- training


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What training needs, all of it read and checked."""

    run: Run
    texts: Texts
    batches: Batches
    model: Model


@dataclasses.dataclass(frozen=True)
class _Trained:
    """A run with its model and the parameters it has come to."""

    run: Run
    model: Model
    params: Params


def _trained(options: argparse.Namespace) -> _Trained:
    """Trains as the options say, from the beginning or from the last checkpoint."""
    with _users_part():
        saved = _to_resume(options) if options.resume else None
        plan = _planned(options, saved)
        if saved:
            saved.check_same(plan.run)
        else:
            if options.overwrite and plan.run.directory.exists():
                checkpoints.remove(plan.run.directory)
            plan.run.create()
    return _fitted(plan, resume=saved is not None)


def _to_resume(options: argparse.Namespace) -> Run:
    if options.run is None or options.overwrite:
        raise ValueError("--resume: expected --run DIR with it, and no --overwrite")
    return Run.open(options.run)


def _config(options: argparse.Namespace, saved: Run | None) -> Config:
    config = saved.config if saved and not options.preset else PRESETS[options.preset or "toy"]
    settings = [] if options.seed is None else [f"seed={options.seed}"]
    return config.changed([*settings, *options.set])


def _new_directory(options: argparse.Namespace) -> Path:
    usual = Path("runs") / (options.preset or "toy")
    if options.run is None and not options.overwrite:
        return checkpoints.free_directory(usual)
    directory = options.run or usual
    if directory.is_dir() and any(directory.iterdir()) and not options.overwrite:
        raise FileExistsError(
            f"{directory} exists already: expected another --run, --resume or --overwrite"
        )
    return directory


def _planned(options: argparse.Namespace, saved: Run | None) -> _Plan:
    config = _config(options, saved)
    directory = saved.directory if saved else _new_directory(options)
    path = options.data or (saved.origin.path if saved else None)
    first, second = options.languages or (saved.origin.languages if saved else LANGUAGES)
    languages = (first, second)
    texts = read_texts(config, path, languages)
    source, target = learn_vocabularies(config, texts.train)
    pairs, report = encode_pairs(texts.train, source, target, max_length=config.max_length)
    for line in (*texts.reports, report):
        print(line)
    origin = TextOrigin(path and str(Path(path).resolve()), languages, fingerprint(pairs))
    batches = Batches(
        pairs,
        tokens_per_batch=config.tokens_per_batch or None,
        rows_per_batch=config.rows_per_batch or None,
        max_shapes=config.max_shapes,
        seed=config.seed,
    )
    run = Run(directory, config, source, target, origin)
    return _Plan(run, texts, batches, Model(config, len(source), len(target)))


def _fitted(plan: _Plan, *, resume: bool) -> _Trained:
    run, model, config = plan.run, plan.model, plan.run.config
    examiner = Examiner(model, plan.texts.validation, run.source, run.target)
    optimiser = make_optimiser(config, total_steps(config, plan.batches))
    loop = Loop(
        config,
        plan.batches,
        step=make_step(model, optimiser, config),
        check=lambda batch: check_batch(batch, model),
        report=run.report,
        validate=lambda params: _validated(examiner, params),
        save=lambda state: run.save(state, int(state.step)),
    )
    state = first_state(model, optimiser, config.seed)
    if resume:
        with _users_part():
            state = _resumed(run, state, loop.total_steps)
    _announce(run, model, loop)
    if examiner.cut:
        print(f"{examiner.cut} validation sides are cut to {config.max_length} tokens")
    try:
        state = loop.run(state)
    except NonFiniteLoss as error:
        kept = f"that after step {run.steps()[-1]}" if run.steps() else "none"
        raise NonFiniteLoss(f"{error}; the last checkpoint is {kept}") from None
    _sum_up(run)
    return _Trained(run, model, state.params)


def _resumed(run: Run, state: State, total: int) -> State:
    state, step = run.restore(state)
    if step >= total:
        raise ValueError(f"{run.directory} has made all its {total} steps already")
    run.forget_metrics_after(step)
    print(f"goes on from the checkpoint after step {step}")
    return state


def _announce(run: Run, model: Model, loop: Loop) -> None:
    parameters = sum(math.prod(shape.shape) for shape in model.shapes.values())
    shapes = ", ".join(f"{rows} x ({source}, {target})" for rows, source, target in loop.shapes)
    print(
        f"{run.directory}: vocabularies of {model.source_size:,} and {model.target_size:,} tokens, "
        f"{parameters:,} parameters, {loop.total_steps:,} steps, {loop.epochs:.1f} epochs, "
        f"batches of {shapes} places",
        flush=True,
    )


def _sum_up(run: Run) -> None:
    records = [record for record in run.metrics() if "tokens" in record]
    seconds = sum(record["seconds"] for record in records)
    speed = statistics.median(record["tokens_per_second"] for record in records)
    print(
        f"trained for {seconds:.0f} s at about {speed:,.0f} target tokens a second; "
        f"checkpoint in {run.directory}"
    )


def _validated(examiner: Examiner, params: Params) -> dict[str, Any]:
    scores = examiner(params).scores
    print(f"validation: {scores}", flush=True)
    figures = scores.to_json()
    del figures["constructions"]
    return {f"validation_{name}": value for name, value in figures.items()}


def _opened(options: argparse.Namespace) -> _Trained:
    """The run that the options name, with the parameters of its last checkpoint."""
    with _users_part():
        run = Run.open(options.run)
        model = Model(run.config, len(run.source), len(run.target))
        params, _ = run.restore(model.shapes, prefix="params/")
    return _Trained(run, model, params)


# ------------------------------------------------------------------------------------ translating


_ONLY_WITH = {
    "length_penalty": "beam",
    "temperature": "sample",
    "top_k": "sample",
    "top_p": "sample",
    "seed": "sample",
}


def _search(options: argparse.Namespace) -> Search:
    kind = "sample" if options.sample else "greedy" if options.beam is None else "beam"
    given = {name: value for name in _ONLY_WITH if (value := getattr(options, name)) is not None}
    for name in given:
        if _ONLY_WITH[name] != kind:
            option = name.replace("_", "-")
            raise ValueError(f"--{option}: expected --{_ONLY_WITH[name]} with it")
    if options.beam is not None:
        given["beams"] = options.beam
    return Search(kind=kind, n_best=options.n_best, **given)


def _check_output(options: argparse.Namespace) -> None:
    """Makes sure, before anything is computed, that there will be a place for it."""
    path = options.output
    if path is None:
        if options.overwrite:
            raise ValueError("--overwrite: expected --output PATH with it")
    elif path.exists() and not (options.overwrite and path.is_file()):
        raise FileExistsError(f"{path} exists already: expected another --output or --overwrite")
    elif not path.parent.is_dir():
        raise FileNotFoundError(f"--output: no directory {path.parent}")


def _sentences(options: argparse.Namespace) -> list[str] | None:
    """What to translate, a sentence per line; None where somebody is typing it."""
    if options.file is not None:
        if options.sentences:
            raise ValueError("--file: expected no SENTENCE with it")
        return read_lines(options.file)
    if options.sentences:
        return options.sentences
    if sys.stdin.isatty() and options.output is None:
        return None
    text = sys.stdin.read()
    return text.removesuffix("\n").split("\n") if text else []


def _translated_lines(
    trained: _Trained, sentences: Sequence[str], search: Search, options: argparse.Namespace
) -> list[str]:
    """`search.n_best` lines for each sentence, empty for one without words."""
    run = trained.run
    rows = [_encoded(run, sentence) for sentence in sentences if sentence.strip()]
    for sentence in sentences:
        if unknown := run.source.unknown(sentence):
            unit = run.source.tokenizer.unit
            print(f"unknown {unit}: {', '.join(unknown)}", file=sys.stderr)
    with tqdm(
        total=len(rows), unit="sentence", dynamic_ncols=True, leave=False, disable=None
    ) as bar:
        found = translations(trained.model, trained.params, rows, search, report=bar.update)
    shown = _with_fields(trained, rows, found, options)
    lines: list[str] = []
    for sentence in sentences:
        said = next(shown) if sentence.strip() else []
        lines += said + [""] * (search.n_best - len(said))
    return lines


def _with_fields(
    trained: _Trained,
    rows: Sequence[Sequence[int]],
    found: Sequence[Sequence[Translation]],
    options: argparse.Namespace,
) -> Iterator[list[str]]:
    """For each row of source ids a line per translation, with the fields that were asked for."""
    links = None
    if options.alignments:
        sources = [row for row, best in zip(rows, found, strict=True) for _ in best]
        targets = [said.ids.tolist() for best in found for said in best]
        links = iter(alignments(trained.model, trained.params, sources, targets))
    for best in found:
        lines = []
        for said in best:
            fields = [f"{said.score:.4f}", f"{said.log_prob:.4f}"] if options.scores else []
            fields.append(trained.run.target.decode(said.ids))
            if links is not None:
                fields.append(" ".join(f"{source}-{target}" for source, target in next(links)))
            lines.append("\t".join(fields))
        yield lines


def _write(lines: Sequence[str], options: argparse.Namespace) -> None:
    text = "".join(line + "\n" for line in lines)
    if options.output is None:
        print(text, end="", flush=True)
        return
    with options.output.open("w" if options.overwrite else "x", encoding="utf-8") as file:
        file.write(text)


# ------------------------------------------------------------------------------------ examining


def _tests(options: argparse.Namespace, run: Run) -> dict[str, list[Pair]]:
    """The pairs that the options name to examine on, or else those held out for the run."""
    with _users_part():
        if options.data is not None and str(options.data.resolve()) != run.origin.path:
            return read_tests(options.data, options.languages or run.origin.languages)
        return read_texts(run.config, run.origin.path, run.origin.languages, training=False).tests


def _examined(trained: _Trained, tests: Mapping[str, list[Pair]]) -> dict[str, Examined]:
    """The results on each set of pairs, printed and written to the run's directory."""
    run, results = trained.run, {}
    for name, pairs in tests.items():
        examiner = Examiner(trained.model, pairs, run.source, run.target)
        results[name] = examiner(trained.params)
        print(table(name, results[name].scores), flush=True)
        if examiner.cut:
            print(f"  {examiner.cut} sides were cut to max_length={run.config.max_length} tokens")
    figures = {name: result.scores.to_json() for name, result in results.items()}
    (run.directory / "evaluation.json").write_text(json.dumps(figures, indent=2) + "\n", "utf-8")
    return results


def _shown(examined: Mapping[str, Examined]) -> list[tuple[Pair, str]]:
    """Five pairs with their translations: the longest of those that come first in their
    construction, one of them from the last set; or where there are no constructions, the first."""
    first, *others = [_firsts(result) for result in examined.values()]
    return [*first[:4], others[-1][0]] if others else first[:5]


def _firsts(result: Examined) -> list[tuple[Pair, str]]:
    examples = list(zip(result.pairs, result.translations, strict=True))
    firsts = {pair.construction: (pair, said) for pair, said in reversed(examples)}
    if len(firsts) == 1:
        return examples
    return sorted(firsts.values(), key=lambda example: -len(example[0].source))


def _print_beside_reference(run: Run, pair: Pair, translation: str) -> None:
    reference = run.target.normalize(pair.target)
    print(f"  {run.source.normalize(pair.source)}")
    print(f"  -> {translation}")
    if translation != reference:
        print(f"     (expected: {reference})")


def _encoded(run: Run, sentence: str) -> list[int]:
    with _users_part():
        return run.source.encode(sentence, max_length=run.config.max_length)


def _drawn(trained: _Trained, sentence: str) -> list[Path]:
    """Draws the attention on a sentence and its translation, and the loss; returns the files."""
    run = trained.run
    source = _encoded(run, sentence)
    said = translated(trained.model, trained.params, [source])[0]
    read = np.concatenate([[BOS], said[:-1]])
    weights = trained.model.weights(
        trained.params, np.array([source]), np.array([len(source)]), read[None]
    )
    folder = run.directory / "pictures"
    files = pictures.draw_sentence(
        {name: np.asarray(array[0]) for name, array in weights.items()},
        source=run.source.tokens(source),
        target_in=run.target.tokens(read),
        target_out=run.target.tokens(said),
        directory=folder,
    )
    pictures.draw_losses(run.metrics(), folder / "loss.png")
    return [*files, folder / "loss.png"]


def _sentence_to_draw(tests: Mapping[str, Sequence[Pair]]) -> str:
    """The first sentence whose picture is neither empty nor crowded."""
    pairs = next(iter(tests.values()))
    fitting = (pair.source for pair in pairs if 9 <= len(pair.source.split()) <= 12)
    return next(fitting, pairs[0].source)


def _advise(run: Run) -> None:
    print("now try:")
    for command in ("evaluate", "translate", "plot"):
        print(f"  python -m experiments.translation {command} --run {run.directory}")


if __name__ == "__main__":
    sys.exit(main())
