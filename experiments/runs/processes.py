"""Several processes that train one model together, each with devices of its own.

Every process makes the same steps, and JAX moves what they have to exchange. Process 0 leads: it
alone shows how training goes and writes into the run's directory, which all of them read.
"""

import argparse
import collections
import contextlib
import hashlib
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np
from jax.experimental import multihost_utils

from experiments.runs.ending import Failure, interrupted, users_part
from experiments.runs.watching import ADVICE, start_watching


_HEARTBEAT = 60  # seconds without a sign of life after which a process counts as lost
_PATIENCE = 300  # seconds that processes wait for each other at the beginning and at the end
_GRACE = 2  # seconds that Python has to act on a signal
_MOST_PROCESSES = 2**16
_LAST_PORT = 2**16 - 1

_advice = ""  # what to tell people should this process end early

# What JAX says where another process is gone while they exchange something.
_SIGNS = ("gloo", "nccl", "unavailable", "connection", "deadline", "aborted", "peer")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that say how processes find each other."""
    parser.add_argument(
        "--distributed",
        action="store_true",
        help="train with the other processes that Slurm, Open MPI, Kubernetes or a TPU pod has "
        "started with this one",
    )
    parser.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help="or with --processes others like it, of which process 0 listens there",
    )
    parser.add_argument("--processes", type=int, metavar="N", help="how many there are")
    parser.add_argument("--process", type=int, metavar="I", help="which of them this is, from 0")


@users_part()
def check_options(options: argparse.Namespace) -> None:
    """Makes sure that the options say how processes find each other, or that there is one.

    Raises:
        UserError: some are missing, or a number that does not fit.
    """
    given = {name: getattr(options, name, None) for name in ("coordinator", "processes", "process")}
    missing = [f"--{name}" for name, value in given.items() if value is None]
    if getattr(options, "distributed", False):
        if len(missing) < len(given):
            raise ValueError("--distributed: expected neither --coordinator nor its companions")
        return
    if len(missing) == len(given):
        return
    if missing:
        raise ValueError(f"expected --coordinator, --processes and --process, not {missing[0]}")
    host, _, port = options.coordinator.rpartition(":")
    if not host or not (port.isascii() and port.isdecimal()):
        raise ValueError(f"--coordinator: expected HOST:PORT, got {options.coordinator!r}")
    if not 0 < int(port[:6]) <= _LAST_PORT:
        raise ValueError(f"--coordinator: expected a port in 1..{_LAST_PORT}, got {port:.20}")
    if not 0 < options.processes <= _MOST_PROCESSES:
        raise ValueError(f"--processes: expected 1..{_MOST_PROCESSES}, got {options.processes}")
    if not 0 <= options.process < options.processes:
        raise ValueError(
            f"--process: expected 0 <= it < {options.processes}, the number of processes, "
            f"got {options.process}"
        )


def are_several(options: argparse.Namespace) -> bool:
    """Whether the options ask for several processes."""
    by_environment = getattr(options, "distributed", False)
    return by_environment or getattr(options, "coordinator", None) is not None


@contextlib.contextmanager
def watched(options: argparse.Namespace) -> Iterator[None]:
    """Around a process that may be one of several: what libraries in C++ write to stdout and stderr
    goes to a process that watches it; what Python writes stays where it was."""
    if not are_several(options):
        yield
        return
    with contextlib.ExitStack() as held:
        pipe = start_watching()
        for number, redirect in ((1, contextlib.redirect_stdout), (2, contextlib.redirect_stderr)):
            own = os.fdopen(os.dup(number), "w", buffering=1, encoding="utf-8", errors="replace")
            held.enter_context(redirect(own))
            os.dup2(pipe.fileno(), number)
            held.callback(os.dup2, own.fileno(), number)
        held.callback(pipe.close)
        held.enter_context(_ended_by_signals())
        yield


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """While it lasts, SIGINT and SIGTERM end the process also where their handlers cannot run,
    because the main thread waits for other processes in C++."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def watch() -> None:
        with os.fdopen(reader, "rb", buffering=0) as numbers:
            while number := numbers.read(1):
                if number[0] in (signal.SIGINT, signal.SIGTERM):
                    time.sleep(_GRACE)
                    print(interrupted(_advice), file=sys.stderr, flush=True)
                    leave(128 + number[0])

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writer)


def advise(text: str) -> None:
    """Says what to tell people should this process end because of a signal, or because another one
    is lost."""
    global _advice  # noqa: PLW0603
    _advice = text
    if jax.process_count() > 1:
        os.write(2, ADVICE + text.encode() + b"\n")


@contextlib.contextmanager
def joined(options: argparse.Namespace) -> Iterator[bool]:
    """Joins the other processes that the options name, if any, and gives whether this one leads.

    Raises:
        UserError: they do not find each other, or have different numbers of devices.
    """
    if not are_several(options):
        yield True
        return
    _find_others(options)
    with contextlib.nullcontext() if leads() else _unheard():
        yield leads()
    jax.distributed.shutdown()


@users_part()
def _find_others(options: argparse.Namespace) -> None:
    where = {}
    if not options.distributed:
        where = {
            "coordinator_address": options.coordinator,
            "num_processes": options.processes,
            "process_id": options.process,
            "cluster_detection_method": "deactivate",
        }
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # SIGTERM ends the run
    try:
        jax.distributed.initialize(
            **where,
            initialization_timeout=_PATIENCE,
            heartbeat_timeout_seconds=_HEARTBEAT,
            shutdown_timeout_seconds=_PATIENCE,
        )
        counts = collections.Counter(device.process_index for device in jax.devices())
    except (RuntimeError, ValueError) as error:
        if options.distributed and "coordinator_address" in str(error):
            error = "Slurm, Open MPI, Kubernetes or a TPU pod is expected to tell of them"
        raise ValueError(f"the processes did not find each other: {error}") from None
    if len(set(counts.values())) > 1:
        numbers = ", ".join(str(counts[number]) for number in sorted(counts))
        raise ValueError(f"expected equally many devices in every process, got {numbers}")


def leads() -> bool:
    """Whether this process is the one that shows and writes."""
    return jax.process_index() == 0


def agreed(value: int) -> int:
    """The number that the leading process has; all have to ask."""
    if jax.process_count() == 1:
        return value
    return int(multihost_utils.broadcast_one_to_all(np.int32(value)))


def check_alike(what: Mapping[str, Any]) -> None:
    """Makes sure that all processes were given the same; all have to ask.

    Args:
        what: things by their names, whose `repr` says all.

    Raises:
        ValueError: they differ; the message names the first process that does, and in what.
    """
    if jax.process_count() == 1:
        return
    digests = [hashlib.sha256(repr(thing).encode()).digest()[:8] for thing in what.values()]
    own = np.frombuffer(b"".join(digests), np.uint32).reshape(len(digests), 2)
    found = multihost_utils.process_allgather(own)
    for number, digest in enumerate(found):
        names = [n for n, same in zip(what, (digest == found[0]).all(axis=1), strict=True) if ~same]
        if names:
            raise ValueError(f"process {number} differs from process 0: {', '.join(names)}")


@contextlib.contextmanager
def noticing_losses() -> Iterator[None]:
    """Around training: an error that another process's end has caused becomes a `Failure`."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        told = str(error)
        if jax.process_count() == 1 or not any(sign in told.lower() for sign in _SIGNS):
            raise
        raise Failure(f"another process of the run was lost ({told.splitlines()[0]})") from None


def leave(status: int) -> NoReturn:
    """Ends a process that has failed, without waiting for others."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


class _NoTerminal(io.TextIOBase):
    """A stream that is said to be no terminal, so that nothing is drawn on it."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write(text)

    def flush(self) -> None:
        self._stream.flush()


@contextlib.contextmanager
def _unheard() -> Iterator[None]:
    """While it lasts, nothing of what is printed is shown but on stderr, and no bar is drawn."""
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        with (
            contextlib.redirect_stdout(nowhere),
            contextlib.redirect_stderr(_NoTerminal(sys.stderr)),
        ):
            yield
