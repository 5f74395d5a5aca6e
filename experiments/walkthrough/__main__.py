"""From dot products to a Transformer: runs, checks and draws every step, and makes a page of them.

    python -m experiments.walkthrough                 all steps; writes runs/walkthrough/index.html
    python -m experiments.walkthrough --list          their names
    python -m experiments.walkthrough scaling causal  these steps alone, with their pictures

The page contains text, code, output and pictures, and works without a network.
"""

import argparse
import shutil
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from experiments.runs.console import speak_utf8
from experiments.runs.ending import Failure, UserError, exit_status, interruptible
from experiments.runs.files import make_folder, replace
from experiments.walkthrough import page
from experiments.walkthrough.formulas import Formula
from experiments.walkthrough.running import Result, run
from experiments.walkthrough.step import ClaimFailed, Step
from experiments.walkthrough.steps import STEPS


# Lines longer than this are hard to read, however wide the terminal is.
WIDEST = 100


def parser() -> argparse.ArgumentParser:
    """Builds the parser of the command line."""
    about, _, details = (__doc__ or "").partition("\n\n")
    arguments = argparse.ArgumentParser(
        prog="python -m experiments.walkthrough",
        description=about,
        epilog=details,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    arguments.add_argument("steps", nargs="*", metavar="STEP", help="run these alone; default: all")
    arguments.add_argument("--list", action="store_true", help="name the steps and end")
    arguments.add_argument(
        "--out", type=Path, default=Path("runs/walkthrough"), help="folder (%(default)s)"
    )
    return arguments


def chosen(names: Sequence[str]) -> list[Step]:
    """Returns the steps with these names, or all steps if there are no names.

    Raises:
        UserError: a name is unknown.
    """
    known = {step.name: step for step in STEPS}
    for name in names:
        if name not in known:
            raise UserError(f"there is no step {name!r}; there are {', '.join(known)}")
    return [known[name] for name in names] if names else list(STEPS)


def run_aloud(step: Step, number: int) -> Result:
    """Prints a step's text, then runs the step and prints its output as it is written."""
    width = min(shutil.get_terminal_size().columns, WIDEST)
    print(f"\n{textwrap.fill(f'{number}. {step.title}', width)}\n")
    sources = f"{step.relation} {'; '.join(map(str, step.follows))}."
    for block in (*step.paragraphs, *step.misprints, sources):
        wrapped = (
            block.plain(width)
            if isinstance(block, Formula)
            else textwrap.fill(block.replace("`", ""), width)
        )
        print(wrapped, end="\n\n")
    try:
        return run(step, sys.stdout)
    except ClaimFailed as error:
        raise Failure(f"{step.name}: this did not hold: {error}") from error


def save_pictures(result: Result, folder: Path) -> None:
    """Saves the diagram and the pictures of a step, and prints their paths."""
    step = result.step
    contents = {f"{step.name}-diagram.svg": step.diagram.svg.encode()} if step.diagram else {}
    for number, picture in enumerate(result.pictures, 1):
        contents[f"{step.name}-{number}.png"] = picture
    for name, content in contents.items():
        replace(folder / name, content)
        print(f"picture: {folder / name}")


def command(options: argparse.Namespace) -> None:
    """Lists or runs the steps that the command line names."""
    if options.list:
        for number, step in enumerate(STEPS, 1):
            print(f"{number:2}  {step.name:24}{step.title}")
        return
    steps = chosen(options.steps)
    make_folder(options.out)
    results = [run_aloud(step, STEPS.index(step) + 1) for step in interruptible(steps)]
    if not options.steps:
        path = options.out / "index.html"
        replace(path, page.written(results))
        seconds = sum(result.seconds for result in results)
        print(f"\n{len(results)} steps in {seconds:.0f} s. Open {path}")
        return
    for result in results:
        save_pictures(result, options.out)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    speak_utf8()
    options = parser().parse_args(arguments)
    return exit_status(lambda: command(options))


if __name__ == "__main__":
    sys.exit(main())
