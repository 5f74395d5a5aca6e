"""Trains translators from German to English, or between other languages, with jattn's attention.

    python -m experiments.translation                     the demonstration, a few minutes
    python -m experiments.translation train --preset multi30k --data DIR
    python -m experiments.translation evaluate --run runs/toy --beam 4
    python -m experiments.translation translate --run runs/toy "der hund schläft ."
    python -m experiments.translation translate --run runs/toy --beam 4 --n-best 2 --scores
    python -m experiments.translation plot --run runs/toy --sentence "der hund schläft ."

Without a subcommand: trains the preset `toy` on the built-in corpus, translates 1,000 held-out
sentences and 1,000 with clauses nested deeper than in training, prints five translations and draws
the attention. At least 95 % of the held-out translations are exactly right, and far fewer of the
deeper ones.
"""

import sys
from collections.abc import Sequence

from experiments.runs import processes
from experiments.runs.console import listening, speak_utf8, visible_controls
from experiments.runs.ending import exit_status
from experiments.translation.command_line import make_parser
from experiments.translation.commands.demo import demo
from experiments.translation.commands.evaluate import evaluate
from experiments.translation.commands.plot import plot
from experiments.translation.commands.train import train
from experiments.translation.commands.translate import translate


_COMMANDS = {command.__name__: command for command in (demo, train, evaluate, translate, plot)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or (words[0].startswith("-") and words[0] not in ("-h", "--help")):
        words.insert(0, "demo")
    speak_utf8()

    with visible_controls():
        options = make_parser(__doc__ or "").parse_args(words)
        status = exit_status(lambda: processes.check_options(options))
    if status:
        return status

    def run_command() -> None:
        with processes.joined(options) as leads:
            with listening(leads and getattr(options, "json", False)) as console:
                _COMMANDS[options.command](options, console)

    with processes.watched(options), visible_controls():
        status = exit_status(run_command)
        if status and processes.are_several(options):
            processes.leave(status)
        return status


if __name__ == "__main__":
    sys.exit(main())
