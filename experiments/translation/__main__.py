"""German to English, or any language to any other, with the attention of jattn.

    python -m experiments.translation                     the demonstration, about three minutes
    python -m experiments.translation train --preset multi30k --data DIR
    python -m experiments.translation evaluate --run runs/toy --beam 4
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
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.runs import processes, stopping
from experiments.runs.console import (
    Console,
    listening,
    progress,
    speak_utf8,
    visible_controls,
)
from experiments.runs.ending import Failure, UserError, exit_status, interruptible, one_line
from experiments.runs.files import Unwritten, replace
from experiments.runs.locking import locked
from experiments.runs.memory import check_fits, keep_freed_memory
from experiments.translation import checkpoints, pictures, reporting
from experiments.translation.batches import Epochs
from experiments.translation.checkpoints import Run, TextOrigin, fingerprint
from experiments.translation.command_line import make_parser, make_search
from experiments.translation.corpus import Pair
from experiments.translation.data import LANGUAGES, clean, lines_of, read_lines
from experiments.translation.decoding import (
    GREEDY,
    Search,
    Translation,
    alignments,
    translated,
    translations,
)
from experiments.translation.evaluation import Evaluation, Evaluator, read_tests, table
from experiments.translation.meshes import Placement, check_mesh, parse_mesh, usual_mesh
from experiments.translation.model import Model, Params
from experiments.translation.presets import PRESETS, Config
from experiments.translation.text import encode_pairs
from experiments.translation.training import (
    Loop,
    NonFiniteLoss,
    State,
    Texts,
    check_batch,
    init_state,
    make_batches,
    make_optimiser,
    make_step,
    read_texts,
    total_steps,
)
from experiments.translation.vocabulary import BOS, PAD, learn_vocabularies


@contextlib.contextmanager
def _users_part() -> Iterator[None]:
    """Around what can only fail because of what the user gave."""
    try:
        yield
    except Unwritten:
        raise
    except (ValueError, OSError) as error:
        raise UserError(one_line(error)) from error


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or (given[0].startswith("-") and given[0] not in ("-h", "--help")):
        given.insert(0, "demo")
    speak_utf8()

    with visible_controls():
        options = make_parser(__doc__ or "").parse_args(given)
        status = exit_status(lambda: _checked(options))
    if status:
        return status

    def command() -> None:
        with _alone_or_joined(options) as leads:
            with listening(leads and getattr(options, "json", False)) as console:
                _COMMANDS[options.command](options, console)

    with processes.watched(options), visible_controls():
        status = exit_status(command)
        if status and processes.are_several(options):
            processes.leave(status)
        return status


def _checked(options: argparse.Namespace) -> None:
    with _users_part():
        processes.check_options(options)


@contextlib.contextmanager
def _alone_or_joined(options: argparse.Namespace) -> Iterator[bool]:
    """As `processes.joined`, with its errors as the user's."""
    with contextlib.ExitStack() as held:
        with _users_part():
            leads = held.enter_context(processes.joined(options))
        yield leads


# --------------------------------------------------------------------------------------- commands


def _demo(options: argparse.Namespace, console: Console) -> None:
    began = time.perf_counter()
    options.resume = False
    with _trained(options, console) as trained:
        tests = _tests(options, trained.run)
        evaluations = _evaluated(trained, tests, GREEDY, console)
        print("translations:")
        for pair, translation in _shown(evaluations):
            _print_beside_reference(trained.run, pair, translation)
        shown = [pair.source for pair, _ in _shown(evaluations)]
        files = _drawn(trained, [_sentence_to_draw(tests), *shown])
    print("pictures:", *files, sep="\n  ")
    console.emit("pictures", files=list(map(str, files)))
    for name, result in evaluations.items():
        scores = result.scores
        print(f"{name}: {scores.exact_match:.1%} of {scores.sentences:,} sentences exactly right")
    print(f"all in {time.perf_counter() - began:.0f} s")
    _advise(trained.run)


def _train(options: argparse.Namespace, console: Console) -> None:
    with _trained(options, console) as trained:
        _advise(trained.run)


def _evaluate(options: argparse.Namespace, console: Console) -> None:
    with _users_part():
        search = make_search(options)
    trained = _opened(options)
    _evaluated(trained, _tests(options, trained.run), search, console)


def _translate(options: argparse.Namespace, _: Console) -> None:
    with _users_part():
        search = make_search(options)
        _check_output(options)
        place, sentences = _sentences(options)
    trained = _opened(options)
    if sentences is None:
        print("a sentence per line; Ctrl-D ends", file=sys.stderr)
        for line in interruptible(sys.stdin):
            lines, refused = _translated_lines(trained, [clean(line)], search, options)
            if refused:
                print(f"error: {refused[1]}", file=sys.stderr)
            else:
                _write(lines, options)
        return
    lines, refused = _translated_lines(trained, list(map(clean, sentences)), search, options)
    _write(lines, options)
    if refused:
        first, *others = refused
        also = f", and those of {', '.join(map(str, others))}" if others else ""
        raise UserError(f"{place}:{first}: {refused[first]}; its lines are empty{also}")


def _plot(options: argparse.Namespace, _: Console) -> None:
    trained = _opened(options)
    sentence = options.sentence
    if sentence is None:
        sentence = _sentence_to_draw(_tests(options, trained.run))
    elif not _has_words(trained.run, clean(sentence)):
        raise UserError("--sentence: expected words, got none")
    print(*_drawn(trained, [sentence]), *reporting.draw_curves(trained.run), sep="\n")


_COMMANDS = {
    "demo": _demo,
    "train": _train,
    "evaluate": _evaluate,
    "translate": _translate,
    "plot": _plot,
}


# --------------------------------------------------------------------------------------- training


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What training needs, all of it read and checked."""

    run: Run
    texts: Texts
    batches: Epochs
    model: Model
    placement: Placement


@dataclasses.dataclass(frozen=True)
class _Trained:
    """A run with its model, the parameters it has come to, and the steps after which they were
    saved."""

    run: Run
    model: Model
    params: Params
    steps: list[int]


@contextlib.contextmanager
def _trained(options: argparse.Namespace, console: Console) -> Iterator[_Trained]:
    """Trains as the options say, from the beginning or from the last checkpoint. While it lasts, no
    other process trains in the run's directory."""
    keep_freed_memory()
    with contextlib.ExitStack() as held:
        with _users_part():
            saved = _to_resume(options, held) if options.resume else None
            plan = _planned(options, saved, console)
            processes.check_alike(_shared(plan))
            if saved:
                saved.check_same(plan.run)
            else:
                _begin(plan.run, held, overwrite=options.overwrite)
        yield _fitted(plan, console, resume=saved is not None)


def _shared(plan: _Plan) -> dict[str, Any]:
    """What all processes of a run must have alike."""
    return {
        "the configuration": plan.run.config,
        "the training text": plan.run.origin.fingerprint,
        "the mesh": plan.placement.mesh and dict(plan.placement.mesh.shape),
        "the version of JAX": jax.__version__,
    }


def _to_resume(options: argparse.Namespace, held: contextlib.ExitStack) -> Run:
    if options.run is None or options.overwrite:
        raise ValueError("--resume: expected --run DIR with it, and no --overwrite")
    checkpoints.check_is_run(options.run)
    if processes.leads():
        held.enter_context(locked(options.run))
    return Run.open(options.run)


def _begin(run: Run, held: contextlib.ExitStack, *, overwrite: bool) -> None:
    """Makes the run's directory, or clears that of the run to overwrite."""
    if not processes.leads():
        return
    held.enter_context(locked(run.directory))
    if overwrite and not checkpoints.is_vacant(run.directory):
        checkpoints.remove(run.directory)
    run.create()


def _config(options: argparse.Namespace, saved: Run | None) -> Config:
    config = saved.config if saved and not options.preset else PRESETS[options.preset or "toy"]
    settings = [] if options.seed is None else [f"seed={options.seed}"]
    return config.changed([*settings, *options.set])


def _new_directory(options: argparse.Namespace) -> Path:
    usual = Path("runs") / (options.preset or "toy")
    if options.run is None and not options.overwrite and processes.leads():
        return checkpoints.free_directory(usual)
    directory = options.run or usual
    if processes.leads() and not checkpoints.is_vacant(directory):
        if not options.overwrite:
            raise FileExistsError(
                f"{directory} exists already: expected another --run, --resume or --overwrite"
            )
        checkpoints.check_removable(directory)
    return directory


def _planned(options: argparse.Namespace, saved: Run | None, console: Console) -> _Plan:
    config = _config(options, saved)
    mesh = usual_mesh() if options.mesh is None else parse_mesh(options.mesh)
    check_mesh(mesh, config)
    directory = saved.directory if saved else _new_directory(options)
    path = options.data or (saved.origin.path if saved else None)
    first, second = options.languages or (saved.origin.languages if saved else LANGUAGES)
    languages = (first, second)
    texts = read_texts(config, path, languages, most_unpacked=options.max_unpacked)
    source, target = learn_vocabularies(config, texts.train)
    pairs, report = encode_pairs(texts.train, source, target, max_length=config.max_length)
    reporting.tell_of_text(console, texts.reports, report)
    origin = TextOrigin(path and str(Path(path).resolve()), languages, fingerprint(pairs))
    batches = make_batches(config, pairs)
    run = Run(directory, config, source, target, origin)
    model = Model(config, len(source), len(target))
    check_fits(model.size)
    placement = Placement.of(mesh, model)
    placement.check_shapes(batches.shapes)
    return _Plan(run, texts, batches, model, placement)


def _fitted(plan: _Plan, console: Console, *, resume: bool) -> _Trained:
    run, model, config, placement = plan.run, plan.model, plan.run.config, plan.placement
    evaluator = Evaluator(model, plan.texts.validation, run.source, run.target)
    optimiser = make_optimiser(config, total_steps(config, plan.batches))
    loop = Loop(
        config,
        plan.batches,
        step=make_step(model, optimiser, config, placement),
        check=lambda batch: check_batch(batch, model),
        report=reporting.keep(console, run) if processes.leads() else lambda record: None,
        validate=lambda params: reporting.validated(run, evaluator, placement.whole(params)),
        save=lambda state: _save(run, placement.host(state)),
        put_on_devices=lambda batch: placement.batch(batch, config.accumulation_steps),
        stops=lambda: _has_stopped(run),
    )
    state = init_state(model, optimiser, config.seed)
    if resume:
        with _users_part():
            state = _resumed(run, state, loop.total_steps)
    reporting.announce(console, run, model, loop)
    if evaluator.cut:
        print(f"{evaluator.cut} validation sides are cut to {config.max_length} tokens")
    processes.advise(_how_to_go_on(run))
    with _told_what_remains(run), processes.noticing_losses():
        loop.run(placement.state(state))
    if not processes.leads():
        return _Trained(run, model, {}, [])
    params, steps = run.parameters(model.shapes)
    reporting.sum_up(console, run, steps)
    return _Trained(run, model, params, steps)


def _save(run: Run, state: State) -> None:
    """Writes a checkpoint of a state that every process has."""
    if processes.leads():
        run.save(state, int(state.step))


def _has_stopped(run: Run) -> bool:
    """Whether training ends early; the process that writes the metrics says so to all."""
    patience = run.config.patience
    return bool(
        processes.agreed(processes.leads() and stopping.has_stopped(run.metrics(), patience))
    )


@contextlib.contextmanager
def _told_what_remains(run: Run) -> Iterator[None]:
    """Around training: what ends it early says where it can go on."""
    try:
        yield
    except NonFiniteLoss as error:
        step = run.last_whole_step()
        kept = "none" if step is None else f"that after step {step}"
        raise NonFiniteLoss(f"{error}; the last checkpoint is {kept}") from None
    except Failure as error:
        step = run.last_whole_step()
        kept = "there is no checkpoint yet" if step is None else f"checkpoint {step} is whole"
        raise Failure(f"{error}; {kept}; {_how_to_go_on(run)}") from None
    except BrokenPipeError:
        raise
    except OSError as error:
        step = run.last_whole_step()
        kept = "there is no checkpoint yet" if step is None else f"checkpoint {step} is whole"
        raise Unwritten(f"{error}; {kept}; {_how_to_go_on(run)}") from error
    except KeyboardInterrupt as end:
        raise type(end)(_how_to_go_on(run)) from None


def _how_to_go_on(run: Run) -> str:
    return f"training goes on with: train --run {run.directory} --resume"


def _resumed(run: Run, state: State, total: int) -> State:
    step = 0
    if run.has_checkpoint():
        state, step = run.restore(state)
    if step >= total:
        raise ValueError(f"{run.directory} has made all its {total} steps already")
    if processes.leads():
        run.forget_metrics_after(step)
    if _has_stopped(run):
        raise ValueError(f"{run.directory} has stopped early after step {step} already")
    if step:
        print(f"goes on from the checkpoint after step {step}")
    else:
        print("begins anew: there is no checkpoint yet")
    return state


def _opened(options: argparse.Namespace) -> _Trained:
    """The run that the options name, as far as it has come."""
    with _users_part():
        run = Run.open(options.run)
        model = Model(run.config, len(run.source), len(run.target))
        params, steps = run.parameters(model.shapes)
    return _Trained(run, model, params, steps)


# ------------------------------------------------------------------------------------ translating


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


def _sentences(options: argparse.Namespace) -> tuple[str, list[str] | None]:
    """Where the sentences come from, and what to translate, a sentence per line; None where
    somebody is typing it."""
    if options.file is not None:
        if options.sentences:
            raise ValueError("--file: expected no SENTENCE with it")
        return str(options.file), read_lines(options.file, most_unpacked=options.max_unpacked)
    if options.sentences:
        return "SENTENCE", options.sentences
    if sys.stdin.isatty() and options.output is None:
        return "stdin", None
    return "stdin", lines_of(sys.stdin.buffer, "stdin")


def _translated_lines(
    trained: _Trained, sentences: Sequence[str], search: Search, options: argparse.Namespace
) -> tuple[list[str], dict[int, str]]:
    """`search.n_best` lines for each sentence, empty for one without words or too long; and what
    is wrong with those that are too long, by their numbers from 1 on."""
    run = trained.run
    encoded: list[list[int]] = []  # empty where there is nothing to translate
    refused: dict[int, str] = {}
    for number, sentence in enumerate(sentences, start=1):
        encoded.append([])
        try:
            if _has_words(run, sentence):
                encoded[-1] = _encoded(run, sentence)
        except UserError as error:
            refused[number] = str(error)
    rows = [row for row in encoded if row]
    for sentence in sentences:
        if unknown := run.source.unknown(sentence):
            unit = run.source.unit
            print(f"unknown {unit}: {', '.join(unknown)}", file=sys.stderr)
    with progress(len(rows), unit="sentence") as bar:
        found = translations(trained.model, trained.params, rows, search, report=bar.update)
    shown = _with_fields(trained, rows, found, options)
    lines: list[str] = []
    for row in encoded:
        found = next(shown) if row else []
        lines += found + [""] * (search.n_best - len(found))
    return lines, refused


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
        targets = [translation.ids.tolist() for best in found for translation in best]
        links = iter(alignments(trained.model, trained.params, sources, targets))
    for best in found:
        lines = []
        for translation in best:
            fields = (
                [f"{translation.score:.4f}", f"{translation.log_prob:.4f}"]
                if options.scores
                else []
            )
            fields.append(trained.run.target.decode(translation.ids))
            if links is not None:
                fields.append(" ".join(f"{source}-{target}" for source, target in next(links)))
            lines.append("\t".join(fields))
        yield lines


def _write(lines: Sequence[str], options: argparse.Namespace) -> None:
    text = "".join(line + "\n" for line in lines)
    if options.output is None:
        print(text, end="", flush=True)
        return
    with _users_part():
        _check_output(options)  # once more: to translate takes its time
    replace(options.output, text)


# ------------------------------------------------------------------------------------ evaluating


def _tests(options: argparse.Namespace, run: Run) -> dict[str, list[Pair]]:
    """The pairs that the options name to evaluate on, or else those held out for the run."""
    most = options.max_unpacked
    with _users_part():
        if options.data is not None and str(options.data.resolve()) != run.origin.path:
            languages = options.languages or run.origin.languages
            return read_tests(options.data, languages, most_unpacked=most)
        path, languages = run.origin.path, run.origin.languages
        return read_texts(run.config, path, languages, training=False, most_unpacked=most).tests


def _evaluated(
    trained: _Trained, tests: Mapping[str, list[Pair]], search: Search, console: Console
) -> dict[str, Evaluation]:
    """The results on each set of pairs, printed and written to the run's directory."""
    run, results, figures = trained.run, {}, {}
    print(f"{run.directory}: {reporting.used(trained.steps)}; {search}")
    for name, pairs in tests.items():
        evaluator = Evaluator(trained.model, pairs, run.source, run.target, search)
        with progress(len(pairs), unit="sentence") as bar:
            results[name] = evaluator(trained.params, report=bar.update)
        print(table(name, results[name].scores), flush=True)
        if evaluator.cut:
            print(f"  {evaluator.cut} sides were cut to max_length={run.config.max_length} tokens")
        how = {"search": search.to_json(), "steps": trained.steps, "cut": evaluator.cut}
        figures[name] = how | results[name].scores.to_json()
        console.emit("evaluation", set=name, **figures[name])
    text = json.dumps(figures, indent=2, allow_nan=False) + "\n"
    run.write("evaluation.json", text)
    return results


def _shown(evaluations: Mapping[str, Evaluation]) -> list[tuple[Pair, str]]:
    """Five pairs with their translations: the longest of those that come first in their
    construction, one of them from the last set; or where there are no constructions, the first."""
    first, *others = [_firsts(result) for result in evaluations.values()]
    return [*first[:4], others[-1][0]] if others else first[:5]


def _firsts(result: Evaluation) -> list[tuple[Pair, str]]:
    examples = list(zip(result.pairs, result.translations, strict=True))
    firsts = {pair.construction: (pair, text) for pair, text in reversed(examples)}
    if len(firsts) == 1:
        return examples
    return sorted(firsts.values(), key=lambda example: -len(example[0].source))


def _print_beside_reference(run: Run, pair: Pair, translation: str) -> None:
    reference = run.target.normalize(pair.target)
    print(f"  {run.source.normalize(pair.source)}")
    print(f"  -> {translation}")
    if translation != reference:
        print(f"     (expected: {reference})")


def _has_words(run: Run, sentence: str) -> bool:
    """Whether anything of a sentence is left to translate."""
    return bool(run.source.split_words(sentence))


def _encoded(run: Run, sentence: str) -> list[int]:
    with _users_part():
        return run.source.encode(clean(sentence), max_length=run.config.max_length)


def _drawn(trained: _Trained, sentences: Sequence[str]) -> list[Path]:
    """Draws the attention on the first sentence and its translation, writes a page with that on
    all of them, and returns the files."""
    directory = trained.run.path("pictures")
    seen = _seen(trained, list(dict.fromkeys(sentences)))
    files = pictures.draw_sentence(seen[0], directory)
    page = directory / "attention.html"
    pictures.write_viewer(seen, f"Attention of {trained.run.directory.name}", page)
    return [*files, page]


def _seen(trained: _Trained, sentences: Sequence[str]) -> list[pictures.Seen]:
    """What the heads look at in each sentence and its translation, computed as one batch."""
    run = trained.run
    sources = [_encoded(run, sentence) for sentence in sentences]
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
