"""The command-line options of the subcommands."""

import argparse
from pathlib import Path
from typing import Any

from experiments.runs import bounds, processes
from experiments.runs.command_line import Parser, add_cache_dtype, utf8
from experiments.translation.data import MOST_UNPACKED
from experiments.translation.decoding import Search
from experiments.translation.presets import PRESETS, SETTINGS


def make_parser(description: str) -> argparse.ArgumentParser:
    """Creates the parser of all commands; its option `command` is the name of the one chosen."""
    parser = Parser(
        prog="python -m experiments.translation",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def add_command(name: str, text: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=text, description=text)

    demo = add_command("demo", "train, evaluate, translate and plot (without a subcommand)")
    train = add_command("train", "train a model, or continue a run with --resume")
    evaluate = add_command("evaluate", "evaluate a model on held-out sentences")
    translate = add_command("translate", "translate sentences, or the lines of stdin")
    plot = add_command("plot", "draw a model's attention and the loss of its training")
    for command in (demo, train):
        _add_training(command)
    train.add_argument("--resume", action="store_true", help="continue from the last checkpoint")
    processes.add_options(train)
    for command in (evaluate, translate, plot):
        command.add_argument("--run", type=Path, required=True, help="the run's directory")
    for command in (demo, train, evaluate, plot):
        _add_data(command)
    for command in (demo, train, evaluate):
        command.add_argument(
            "--json", action="store_true", help="one JSON record per line on stdout; text to stderr"
        )
    _add_beam(evaluate)
    _add_translation(translate)
    _add_search(translate)
    for command in (evaluate, translate):
        add_cache_dtype(command)
    plot.add_argument("--sentence", type=utf8, help="the sentence to translate and draw")
    return parser


def _add_training(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--preset", choices=sorted(PRESETS), help="the preset to use (default: toy)"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="change a field of the preset, such as steps=500 or dropout_rate=0.2: "
        + ", ".join(SETTINGS),
    )
    parser.add_argument("--seed", type=int, help="the seed of all random numbers")
    parser.add_argument(
        "--mesh",
        metavar="AXIS=SIZE,...",
        help="the device mesh: data=4,model=2 shards batches over four devices and heads, "
        "feed-forward networks and vocabularies over two, context=2 shards sentences over two "
        "(default: batches over all accelerators)",
    )
    parser.add_argument(
        "--run", type=Path, help="a new directory (default: runs/PRESET, runs/PRESET-2, ...)"
    )
    parser.add_argument("--overwrite", action="store_true", help="delete an existing run")


def _add_data(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data",
        type=Path,
        help="a folder with train and val (and test) as .de and .en or .tsv, each plain or .gz, "
        "or one TSV file (default: the built-in corpus)",
    )
    _add_limit(parser)
    parser.add_argument(
        "--languages",
        nargs=2,
        metavar=("SOURCE", "TARGET"),
        help="suffixes of the files (default: de en)",
    )


def _add_limit(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--max-unpacked",
        type=bounds.whole(1, 2**50),
        default=MOST_UNPACKED,
        metavar="BYTES",
        help=f"the greatest size of an unpacked .gz file (default: {MOST_UNPACKED})",
    )


def _add_translation(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("sentences", nargs="*", metavar="SENTENCE", type=utf8)
    parser.add_argument("--file", type=Path, metavar="PATH", help="translate the lines of a file")
    _add_limit(parser)
    parser.add_argument("--output", type=Path, metavar="PATH", help="a new file (default: stdout)")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing output")
    parser.add_argument(
        "--scores",
        action="store_true",
        help="print score and log probability before each translation, separated by tabs",
    )
    parser.add_argument(
        "--alignments",
        action="store_true",
        help="print links SOURCE-TARGET after each translation and a tab: for each target token, "
        "counted from 0, the source token of greatest weight in the last cross-attention",
    )


def _add_beam(parser: argparse.ArgumentParser) -> Any:
    """Adds the options of a beam search, and returns the group of mutually exclusive searches."""
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument(
        "--beam", type=int, metavar="N", help="search with N beams (default: greedy)"
    )
    parser.add_argument(
        "--length-penalty",
        type=float,
        metavar="A",
        help="with --beam: rank by log probability / ((5 + length) / 6)^A (default: 0.6)",
    )
    return kinds


def _add_search(parser: argparse.ArgumentParser) -> None:
    kinds = _add_beam(parser)
    kinds.add_argument("--sample", action="store_true", help="sample tokens by their probability")
    parser.add_argument(
        "--n-best", type=int, default=1, metavar="N", help="print the N best beams, one per line"
    )
    parser.add_argument("--temperature", type=float, metavar="T", help="with --sample: 0 is greedy")
    parser.add_argument(
        "--top-k", type=int, metavar="K", help="with --sample: sample from the K likeliest tokens"
    )
    parser.add_argument(
        "--top-p",
        type=float,
        metavar="P",
        help="with --sample: sample from the likeliest tokens whose probabilities sum to P",
    )
    parser.add_argument("--seed", type=int, help="with --sample: the seed (default: 0)")


_ONLY_WITH = {
    "length_penalty": "beam",
    "temperature": "sample",
    "top_k": "sample",
    "top_p": "sample",
    "seed": "sample",
}


def make_search(options: argparse.Namespace) -> Search:
    """Creates the search from the options of `evaluate` or `translate`.

    Raises:
        ValueError: the options contradict each other, or a value is out of its range.
    """
    sample, n_best = getattr(options, "sample", False), getattr(options, "n_best", 1)
    kind = "sample" if sample else "greedy" if options.beam is None else "beam"
    values = ((name, getattr(options, name, None)) for name in _ONLY_WITH)
    fields: dict[str, Any] = {name: value for name, value in values if value is not None}
    for name in fields:
        if _ONLY_WITH[name] != kind:
            option = name.replace("_", "-")
            raise ValueError(f"--{option}: expected --{_ONLY_WITH[name]} with it")
    if options.beam is not None:
        fields["beams"] = options.beam
    return Search(kind=kind, n_best=n_best, cache_dtype=options.cache_dtype, **fields)
