"""The subcommand `translate`: translates arguments, the lines of a file, or stdin."""

import argparse
import sys
from collections.abc import Iterator, Sequence

from experiments.runs.console import Console, progress
from experiments.runs.ending import UserError, interruptible, users_part
from experiments.runs.files import replace
from experiments.translation.command_line import make_search
from experiments.translation.commands.trained_run import TrainedRun, encode, has_words, open_run
from experiments.translation.data import clean, lines_of, read_lines
from experiments.translation.decoding import Search, Translation, alignments, translations


def translate(options: argparse.Namespace, _: Console) -> None:
    """Translates the sentences, and prints or writes the translations."""
    with users_part():
        search = make_search(options)
        _check_output(options)
        origin, sentences = _sentences(options)
    trained = open_run(options)
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
        first, *rest = refused
        also = f", and those of {', '.join(map(str, rest))}" if rest else ""
        raise UserError(f"{origin}:{first}: {refused[first]}; its lines are empty{also}")


def _check_output(options: argparse.Namespace) -> None:
    """Checks, before anything is computed, that the output can be written."""
    path = options.output
    if path is None:
        if options.overwrite:
            raise ValueError("--overwrite: expected --output PATH with it")
    elif path.exists() and not (options.overwrite and path.is_file()):
        raise FileExistsError(f"{path} exists already: expected another --output or --overwrite")
    elif not path.parent.is_dir():
        raise FileNotFoundError(f"--output: no directory {path.parent}")


def _sentences(options: argparse.Namespace) -> tuple[str, list[str] | None]:
    """Returns the name of the sentences' origin, and the sentences, or None if they are typed
    interactively."""
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
    trained: TrainedRun, sentences: Sequence[str], search: Search, options: argparse.Namespace
) -> tuple[list[str], dict[int, str]]:
    """Translates sentences to lines of output.

    Returns:
        `search.n_best` lines for each sentence, empty if it has no words or is too long; and an
        error message for each sentence that is too long, by its number from 1.
    """
    run = trained.run
    encoded: list[list[int]] = []  # empty for a sentence with nothing to translate
    refused: dict[int, str] = {}
    for number, sentence in enumerate(sentences, start=1):
        encoded.append([])
        try:
            if has_words(run, sentence):
                encoded[-1] = encode(run, sentence)
        except UserError as error:
            refused[number] = str(error)
    rows = [row for row in encoded if row]
    for sentence in sentences:
        if unknown := run.source.unknown(sentence):
            print(f"unknown {run.source.unit}: {', '.join(unknown)}", file=sys.stderr)
    with progress(len(rows), unit="sentence") as bar:
        results = translations(trained.model, trained.params, rows, search, report=bar.update)
    formatted = _formatted(trained, rows, results, options)
    lines: list[str] = []
    for row in encoded:
        row_lines = next(formatted) if row else []
        lines += row_lines + [""] * (search.n_best - len(row_lines))
    return lines, refused


def _formatted(
    trained: TrainedRun,
    rows: Sequence[Sequence[int]],
    results: Sequence[Sequence[Translation]],
    options: argparse.Namespace,
) -> Iterator[list[str]]:
    """Yields for each row of source ids one line per translation, with the fields requested."""
    links = None
    if options.alignments:
        sources = [row for row, best in zip(rows, results, strict=True) for _ in best]
        targets = [translation.ids.tolist() for best in results for translation in best]
        links = iter(alignments(trained.model, trained.params, sources, targets))
    for best in results:
        lines = []
        for translation in best:
            numbers = (translation.score, translation.log_prob) if options.scores else ()
            fields = [f"{number:.4f}" for number in numbers]
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
    with users_part():
        _check_output(options)  # again, because translating takes a while
    replace(options.output, text)
