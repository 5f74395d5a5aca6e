"""The options of the command line."""

import argparse
from pathlib import Path
from typing import Any

from experiments.runs import bounds, processes
from experiments.runs.command_line import Parser, utf8
from experiments.translation.data import MOST_UNPACKED
from experiments.translation.decoding import Search
from experiments.translation.presets import PRESETS, SETTINGS


def make_parser(description: str) -> argparse.ArgumentParser:
    """The commands and their options; `command` is the one that was given."""
    parser = Parser(
        prog="python -m experiments.translation",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def command(name: str, text: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=text, description=text)

    demo = command("demo", "train, evaluate, translate and plot (without a subcommand)")
    train = command("train", "train a model, or go on with --resume")
    evaluate = command("evaluate", "evaluate a model on held-out sentences")
    translate = command("translate", "translate sentences, or the lines of stdin")
    plot = command("plot", "draw a model's attention and the loss of its training")
    for added in (demo, train):
        _add_training(added)
    train.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    processes.add_options(train)
    for added in (evaluate, translate, plot):
        added.add_argument("--run", type=Path, required=True, help="the run's directory")
    for added in (demo, train, evaluate, plot):
        _add_data(added)
    for added in (demo, train, evaluate):
        added.add_argument(
            "--json", action="store_true", help="a JSON record per line on stdout; words to stderr"
        )
    _add_beam(evaluate)
    _add_translation(translate)
    _add_search(translate)
    plot.add_argument("--sentence", type=utf8, help="what to translate and draw")
    return parser


def _add_training(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--preset", choices=sorted(PRESETS), help="what to start from (toy)")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="change a field of the preset, such as steps=500 or dropout_rate=0.2: "
        + ", ".join(SETTINGS),
    )
    parser.add_argument("--seed", type=int, help="decides everything that is random")
    parser.add_argument(
        "--mesh",
        metavar="AXIS=SIZE,...",
        help="share the work among all devices: data=4,model=2 cuts batches over four and heads, "
        "feed-forward networks and vocabularies over two, context=2 sentences over two (data, over "
        "all accelerators)",
    )
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
    _add_limit(parser)
    parser.add_argument(
        "--languages", nargs=2, metavar=("SOURCE", "TARGET"), help="suffixes of the files (de en)"
    )


def _add_limit(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--max-unpacked",
        type=bounds.whole(1, 2**50),
        default=MOST_UNPACKED,
        metavar="BYTES",
        help=f"the most that a .gz file may hold ({MOST_UNPACKED})",
    )


def _add_translation(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("sentences", nargs="*", metavar="SENTENCE", type=utf8)
    parser.add_argument("--file", type=Path, metavar="PATH", help="translate the lines of a file")
    _add_limit(parser)
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


def _add_beam(parser: argparse.ArgumentParser) -> Any:
    """Returns the group of options of which one at most can be given."""
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--beam", type=int, metavar="N", help="search with N beams (greedy)")
    parser.add_argument(
        "--length-penalty",
        type=float,
        metavar="A",
        help="for beams: rank by log probability / ((5 + length) / 6)^A (0.6)",
    )
    return kinds


def _add_search(parser: argparse.ArgumentParser) -> None:
    kinds = _add_beam(parser)
    kinds.add_argument("--sample", action="store_true", help="draw tokens by their probability")
    parser.add_argument(
        "--n-best", type=int, default=1, metavar="N", help="the N best of the beams, a line each"
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


_ONLY_WITH = {
    "length_penalty": "beam",
    "temperature": "sample",
    "top_k": "sample",
    "top_p": "sample",
    "seed": "sample",
}


def make_search(options: argparse.Namespace) -> Search:
    """The search that the options of `evaluate` or `translate` ask for.

    Raises:
        ValueError: options that do not go together, or a value that does not fit.
    """
    sample, n_best = getattr(options, "sample", False), getattr(options, "n_best", 1)
    kind = "sample" if sample else "greedy" if options.beam is None else "beam"
    asked = ((name, getattr(options, name, None)) for name in _ONLY_WITH)
    given: dict[str, Any] = {name: value for name, value in asked if value is not None}
    for name in given:
        if _ONLY_WITH[name] != kind:
            option = name.replace("_", "-")
            raise ValueError(f"--{option}: expected --{_ONLY_WITH[name]} with it")
    if options.beam is not None:
        given["beams"] = options.beam
    return Search(kind=kind, n_best=n_best, **given)
