"""Trains a small character-level language model on a text file, and generates text with it.

    python -m experiments.language train --text FILE      a few minutes on two cores
    python -m experiments.language write --prompt "the "
    python -m experiments.language serve                  answers requests over HTTP

Without --text it trains on English sentences from the grammar of `experiments.translation` and
learns their spelling and grammar: the held-out loss reaches 0.56 nats per character. A run's
directory contains its metrics, its checkpoint and a plot of its losses.
"""

import argparse
import contextlib
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

import jattn
from experiments.language import model as models
from experiments.language import text, training
from experiments.language.runs import LanguageRun
from experiments.language.serving.engine import PAGE_SIZE, Engine
from experiments.language.serving.server import LanguageServer
from experiments.language.settings import LanguageSettings
from experiments.runs import bounds
from experiments.runs.command_line import Parser, add_cache_dtype
from experiments.runs.console import speak_utf8, visible_controls
from experiments.runs.ending import (
    Failure,
    advising_to_resume,
    exit_status,
    raise_if_asked_to_end,
    users_part,
)
from experiments.runs.folder import free_directory
from experiments.runs.locking import locked
from experiments.runs.memory import check_fits, keep_freed_memory
from jattn.nn import DecoderOnly


_USUAL = Path("runs") / "language"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status."""
    speak_utf8()
    with visible_controls():
        options = _parser().parse_args(arguments)
        return exit_status(lambda: options.command(options))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m experiments.language",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    train = commands.add_parser("train", help="train a model, or go on with --resume")
    train.set_defaults(command=_train)
    train.add_argument("--text", type=Path, help="a file in UTF-8 (default: generated sentences)")
    train.add_argument("--run", type=Path, help="the run's directory (default: a new one in runs/)")
    train.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    train.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help=_named())

    write = commands.add_parser("write", help="write text with a trained model")
    write.set_defaults(command=_write)
    _add_trained_run(write)
    add_cache_dtype(write)
    write.add_argument("--prompt", default="\n", help="the text to continue (default: a new line)")
    write.add_argument(
        "--characters",
        type=bounds.whole(1, 10**7),
        default=500,
        help="the number of characters (default: 500)",
    )
    write.add_argument("--temperature", type=float, default=0.7, help="0 is greedy (default: 0.7)")
    write.add_argument("--top-k", type=int, help="draw from this many characters")
    write.add_argument("--top-p", type=float, help="draw from the nucleus of this probability")
    write.add_argument(
        "--seed", type=bounds.seed, default=0, help="the seed of the draws (default: 0)"
    )
    serve = commands.add_parser("serve", help="answer requests over HTTP, many at once")
    serve.set_defaults(command=_serve)
    _add_trained_run(serve)
    add_cache_dtype(serve)
    serve.add_argument("--host", default="127.0.0.1", help="the address (default: 127.0.0.1)")
    serve.add_argument(
        "--port", type=bounds.whole(0, 65535), default=8000, help="0 is any (default: 8000)"
    )
    for name, default, meaning, least in (
        ("--rows", 16, "the requests at once", 1),
        ("--length", 512, "the most characters of a request, with its prompt", 2),
        ("--waiting", 64, "the requests that wait before others are refused", 1),
    ):
        number = bounds.whole(least, 2**16)
        text = f"{meaning} (default: {default})"
        serve.add_argument(name, type=number, default=default, metavar="N", help=text)
    serve.add_argument(
        "--pages",
        type=bounds.count,
        metavar="N",
        help=f"pages of {PAGE_SIZE} characters for all requests (default: enough for the longest)",
    )
    return parser


def _add_trained_run(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--run", type=Path, help="the run's directory (default: the newest in runs/)"
    )


def _named() -> str:
    return "a setting: " + ", ".join(vars(LanguageSettings()))


def _train(options: argparse.Namespace) -> None:
    keep_freed_memory()
    start = time.perf_counter()
    with contextlib.ExitStack() as locks:
        with users_part():
            run, texts = _prepared(options, locks)
        _fit(run, texts, resume=options.resume)
        seconds = time.perf_counter() - start
        print(f"trained in {seconds:.0f} s; losses drawn in {run.draw_losses()}")
    print(f"now try:\n  python -m experiments.language write --run {run.directory} --prompt TEXT")


def _fit(run: LanguageRun, texts: text.LanguageTexts, *, resume: bool) -> None:
    """Trains from the start or from the last checkpoint."""
    definition, state = training.init_state(run)
    print(
        f"{run.directory}: {len(texts.train):,} characters to train on, "
        f"{len(run.characters.alphabet)} different ones, "
        f"{models.size(run.settings, len(run.characters.alphabet)):,} parameters, "
        f"{run.settings.steps:,} steps",
        flush=True,
    )
    first = 0
    if resume:
        with users_part():
            state, first = training.resumed(run, state)
        print(f"goes on after step {first:,}" if first else "begins anew: no checkpoint yet")
    command = f"python -m experiments.language train --run {run.directory} --resume"
    with advising_to_resume(f"training goes on with: {command}", run.last_step):
        training.train(run, texts, _tell, definition, state, first)


def _prepared(
    options: argparse.Namespace, locks: contextlib.ExitStack
) -> tuple[LanguageRun, text.LanguageTexts]:
    """Creates the run, or opens it to resume, and returns it with its text. Until `locks` closes,
    no other process can train in the run's directory."""
    run, content = _to_resume(options, locks) if options.resume else _new(options)
    check_fits(models.size(run.settings, len(run.characters.alphabet)))
    texts = text.split(run.characters.encode(content), run.settings.length)
    if not options.resume:
        run.check_vacant()  # only runs and vacant directories get a lock
        locks.enter_context(locked(run.directory))
        run.create()
    return run, texts


def _to_resume(options: argparse.Namespace, locks: contextlib.ExitStack) -> tuple[LanguageRun, str]:
    """Locks and opens the run to resume, and reads its text."""
    if options.run is None:
        raise ValueError("--resume: expected --run DIR with it")
    run = LanguageRun.open(options.run)
    if options.set or options.text:
        raise ValueError("--resume: expected no --set and no --text with it")
    locks.enter_context(locked(run.directory))
    content = text.read(_checked_text(run))
    run.check_same_text(content)
    return run, content


def _new(options: argparse.Namespace) -> tuple[LanguageRun, str]:
    """Returns a new run, which is not created yet, and its text."""
    path = options.text
    if path is not None and path.exists() and not path.is_file():  # as resuming reads it again
        raise ValueError(f"--text: expected a regular file, got {path}")
    content = text.read(path)
    settings = LanguageSettings().changed(options.set)
    directory = options.run or free_directory(_USUAL)
    characters, digest = text.Characters.of(content), text.fingerprint(content)
    saved_path = None if path is None else str(path.resolve())
    return LanguageRun(directory, settings, characters, saved_path, digest), content


def _checked_text(run: LanguageRun) -> Path | None:
    """Returns the path of a run's text, which must be a file: a foreign run may name any path."""
    if run.text is not None and not Path(run.text).is_file():
        raise ValueError(f"{run.directory}: expected its text in a file, found none at {run.text}")
    return None if run.text is None else Path(run.text)


def _tell(record: dict[str, Any]) -> None:
    print(
        f"step {record['step']:,}: loss {record['loss']:.3f}, held out "
        f"{record['validation_loss']:.3f}, {record['characters_per_second']:,.0f} characters/s",
        flush=True,
    )


def _write(options: argparse.Namespace) -> None:
    with users_part():
        run = LanguageRun.open(options.run or _newest())
        if not options.prompt:
            raise ValueError("--prompt: expected at least one character")
        prompt = run.characters.encode(options.prompt)
        model = _trained(run)

    def show(tokens: np.ndarray) -> None:
        raise_if_asked_to_end()
        if tokens[0] < 0:
            raise Failure(
                f"{run.directory}: the model gives no probabilities (NaN); its training has "
                "diverged, or its parameters are damaged"
            )
        print(run.characters.decode(tokens), end="", flush=True)

    print(options.prompt.lstrip("\n"), end="", flush=True)
    with users_part():
        jattn.generate(
            model,
            prompt[None],
            max_tokens=options.characters,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            key=jax.random.key(options.seed),
            caches=models.start(model, run.settings, options.cache_dtype),
            callback=show,
        )
    print()


def _serve(options: argparse.Namespace) -> None:
    with users_part():
        run = LanguageRun.open(options.run or _newest())
        names = ("rows", "length", "pages", "waiting", "cache_dtype")
        engine = Engine(_trained(run), **{name: getattr(options, name) for name in names})
        family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
        listener = socket.create_server((options.host, options.port), family=family)
    with listener:
        engine.start()
        host, port = listener.getsockname()[:2]
        host = f"[{host}]" if ":" in host else host
        print(f"serving {run.directory} at http://{host}:{port}; Ctrl-C ends", flush=True)
        LanguageServer(engine, run.characters, _tell_request).run(sockets=[listener])
    if engine.failure is not None:
        raise Failure(engine.failure)


def _tell_request(line: str) -> None:
    with contextlib.suppress(OSError):  # requests go on without a reader of these lines
        print(line, flush=True)


def _trained(run: LanguageRun) -> DecoderOnly:
    """Returns the model of a run's last checkpoint."""
    definition, state = training.init_state(run)
    state, _ = run.restore(state)
    return nnx.merge(definition, state.variables)


def _newest() -> Path:
    """Returns the run with a default name that was created last."""
    runs = [path.parent for path in _USUAL.parent.glob(f"{_USUAL.name}*/config.json")]
    return max(runs, key=lambda path: (path / "config.json").stat().st_mtime, default=_USUAL)


if __name__ == "__main__":
    sys.exit(main())
