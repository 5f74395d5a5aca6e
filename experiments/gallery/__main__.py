"""Known variants of attention: checks, times and draws them, and writes a page that explains them.

    python -m experiments.gallery                     all; writes runs/gallery/index.html
    python -m experiments.gallery alibi swin          these variants, on a page of their own
    python -m experiments.gallery forgetting --train  trains a character model with a variant, and
                                                      draws its loss beside that of softmax

Each variant is a file of `experiments/gallery/variants`. It is compared, with all gradients, with
its formula in plain `jax.numpy`, and both are timed.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from experiments.gallery import page, training
from experiments.gallery.measuring import Measurement, measure
from experiments.gallery.variant import Language, Variant
from experiments.gallery.variants import GROUPS, NAMES, load
from experiments.runs import bounds
from experiments.runs.command_line import Parser, nearest
from experiments.runs.console import speak_utf8
from experiments.runs.ending import Failure, UserError, exit_status, interruptible
from experiments.runs.files import make_folder, replace
from experiments.runs.folder import free_directory


LENGTHS = 1024, 4096


def _parser() -> Parser:
    groups = "\n".join(f"  {group}: {names}" for group, names in GROUPS.items())
    parser = Parser(
        prog="python -m experiments.gallery",
        description=__doc__,
        epilog=f"variants:\n{groups}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("variants", nargs="*", metavar="NAME", help="default: all variants")
    parser.add_argument("--train", action="store_true", help="train a language model with NAME")
    parser.add_argument(
        "--minutes", type=bounds.real(0.001, 1e4), default=2.0, help="to train (default: 2)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/gallery"), help="folder (default: %(default)s)"
    )
    return parser


def chosen(names: Sequence[str]) -> list[str]:
    """Returns the names in the order of the page; all of them if there are none.

    Raises:
        UserError: a name is unknown.
    """
    for name in names:
        if name not in NAMES:
            hint = nearest(name, NAMES) or f"; there are {', '.join(NAMES)}"
            raise UserError(f"there is no variant {name!r}{hint}")
    return [name for name in NAMES if name in names or not names]


def run_all(names: Sequence[str], out: Path) -> None:
    """Checks and measures variants, prints a line for each, and writes the page.

    Raises:
        Failure: results differ from those of dense formulas; the page has the other variants.
    """
    make_folder(out)
    start, measurements, wrong = time.perf_counter(), {}, []
    columns = "".join(f"{f'{T:,}':>9}" for T in LENGTHS)
    print(
        f"times as fast as the plain formula, at {' and '.join(f'{T:,}' for T in LENGTHS)} tokens"
    )
    print(f"{'variant':<20}{'error':>9}{'skipped':>9}{columns}{'gradients':>11}", flush=True)
    for name in interruptible(tqdm(names, disable=None, leave=False)):
        try:
            measurements[name] = measure(load(name), LENGTHS)
        except Failure as error:
            wrong.append(name)
            tqdm.write(f"{name:<20}FAILED: {error}")
            continue
        tqdm.write(line(name, measurements[name]))
    if measurements:
        path = out / ("index.html" if len(names) == len(NAMES) else f"{'-'.join(names)}.html")
        replace(path, page.written(measurements))
        print(f"{len(measurements)} variants in {time.perf_counter() - start:.0f} s. Open {path}")
    if wrong:
        raise Failure(f"these differ from their dense formulas: {', '.join(wrong)}")


def line(name: str, x: Measurement) -> str:
    """Formats a line of the printed table."""
    ratios = "".join(f"{page.ratio(times):>9}" for times in x.forward.values())
    return f"{name:<20}{x.error:>9.0e}{x.skipped:>9.0%}{ratios}{page.ratio(x.backward):>11}"


def trainable(names: Sequence[str]) -> tuple[str, Variant]:
    """Returns the name of the variant to train, and the variant.

    Raises:
        UserError: there is not exactly one name, or the variant is no causal language model.
    """
    if len(names) != 1:
        raise UserError(f"--train: expected one variant, got {len(names)}")
    (name,) = chosen(names)
    variant = load(name)
    if not isinstance(variant.language, Language):
        raise UserError(f"--train: {name} is no causal language model: {variant.language}")
    return name, variant


def command(options: argparse.Namespace) -> None:
    """Runs what the command line asks for."""
    if not options.train:
        run_all(chosen(options.variants), options.out)
        return
    name, variant = trainable(options.variants)
    make_folder(options.out)
    directory = free_directory(options.out / f"{name}-training")
    print(f"losses drawn in {training.compare(name, variant, directory, options.minutes)}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    speak_utf8()
    options = _parser().parse_args(arguments)
    return exit_status(lambda: command(options))


if __name__ == "__main__":
    sys.exit(main())
