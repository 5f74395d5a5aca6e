"""Support for several processes that train one model together, each with its own devices.

Every process runs the same steps, and JAX exchanges data between them. Process 0 leads: it alone
shows the progress and writes to the run's directory, which all of them read.
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


_HEARTBEAT = 60  # seconds without a heartbeat after which a process counts as lost
_PATIENCE = 300  # seconds that processes wait for each other at the beginning and at the end
_GRACE = 2  # seconds for Python to handle a signal
_MOST_PROCESSES = 2**16
_LAST_PORT = 2**16 - 1

_advice = ""  # shown if this process ends early

# Words in JAX's messages if another process ends while they exchange data.
_SIGNS = ("gloo", "nccl", "unavailable", "connection", "deadline", "aborted", "peer")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options with which processes find each other."""
    parser.add_argument(
        "--distributed",
        action="store_true",
        help="train with the other processes that Slurm, Open MPI, Kubernetes or a TPU pod has "
        "started",
    )
    parser.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help="or train with --processes processes, of which process 0 listens at this address",
    )
    parser.add_argument("--processes", type=int, metavar="N", help="the number of processes")
    parser.add_argument(
        "--process", type=int, metavar="I", help="the number of this process, from 0"
    )


@users_part()
def check_options(options: argparse.Namespace) -> None:
    """Checks the options with which processes find each other; none is needed for one process.

    Raises:
        UserError: an option is missing, or a number is out of its range.
    """
    names = ("coordinator", "processes", "process")
    missing = [f"--{name}" for name in names if getattr(options, name, None) is None]
    if getattr(options, "distributed", False):
        if len(missing) < len(names):
            raise ValueError("--distributed: expected neither --coordinator nor its companions")
        return
    if len(missing) == len(names):
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
    """Returns whether the options request several processes."""
    by_environment = getattr(options, "distributed", False)
    return by_environment or getattr(options, "coordinator", None) is not None


@contextlib.contextmanager
def watched(options: argparse.Namespace) -> Iterator[None]:
    """Redirects, if there are several processes, the output of C++ libraries to a watcher process;
    Python's own output stays on stdout and stderr."""
    if not are_several(options):
        yield
        return
    with contextlib.ExitStack() as stack:
        pipe = start_watching()
        for number, redirect in ((1, contextlib.redirect_stdout), (2, contextlib.redirect_stderr)):
            copy = os.fdopen(os.dup(number), "w", buffering=1, encoding="utf-8", errors="replace")
            stack.enter_context(redirect(copy))
            os.dup2(pipe.fileno(), number)
            stack.callback(os.dup2, copy.fileno(), number)
        stack.callback(pipe.close)
        stack.enter_context(_ended_by_signals())
        yield


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Lets SIGINT and SIGTERM end the process within the context even if their handlers cannot run,
    because the main thread waits for other processes in C++."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    previous = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def leave_after_signal() -> None:
        with os.fdopen(reader, "rb", buffering=0) as numbers:
            while number := numbers.read(1):
                if number[0] in (signal.SIGINT, signal.SIGTERM):
                    time.sleep(_GRACE)
                    print(interrupted(_advice), file=sys.stderr, flush=True)
                    leave(128 + number[0])

    threading.Thread(target=leave_after_signal, daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(previous)
        os.close(writer)


def advise(text: str) -> None:
    """Sets the advice to show if this process ends because of a signal or the loss of another."""
    global _advice  # noqa: PLW0603
    _advice = text
    if jax.process_count() > 1:
        os.write(2, ADVICE + text.encode() + b"\n")


@contextlib.contextmanager
def joined(options: argparse.Namespace) -> Iterator[bool]:
    """Joins the other processes that the options name, if any, and yields whether this one leads.

    Raises:
        UserError: the processes do not find each other, or have different numbers of devices.
    """
    if not are_several(options):
        yield True
        return
    _find_others(options)
    with contextlib.nullcontext() if leads() else _silenced():
        yield leads()
    jax.distributed.shutdown()


@users_part()
def _find_others(options: argparse.Namespace) -> None:
    addresses = {}
    if not options.distributed:
        addresses = {
            "coordinator_address": options.coordinator,
            "num_processes": options.processes,
            "process_id": options.process,
            "cluster_detection_method": "deactivate",
        }
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # SIGTERM ends the run
    try:
        jax.distributed.initialize(
            **addresses,
            initialization_timeout=_PATIENCE,
            heartbeat_timeout_seconds=_HEARTBEAT,
            shutdown_timeout_seconds=_PATIENCE,
        )
        counts = collections.Counter(device.process_index for device in jax.devices())
    except (RuntimeError, ValueError) as error:
        if options.distributed and "coordinator_address" in str(error):
            error = "--distributed needs Slurm, Open MPI, Kubernetes or a TPU pod"
        raise ValueError(f"the processes did not find each other: {error}") from None
    if len(set(counts.values())) > 1:
        numbers = ", ".join(str(counts[number]) for number in sorted(counts))
        raise ValueError(f"expected equally many devices in every process, got {numbers}")


def leads() -> bool:
    """Returns whether this process is the one that shows the progress and writes."""
    return jax.process_index() == 0


def agreed(value: int) -> int:
    """Returns the value of the leading process; all processes must call this."""
    if jax.process_count() == 1:
        return value
    return int(multihost_utils.broadcast_one_to_all(np.int32(value)))


def check_alike(what: Mapping[str, Any]) -> None:
    """Checks that these values are equal in all processes; all processes must call this.

    Args:
        what: the values by name, compared by their `repr`.

    Raises:
        ValueError: some differ; the message names the first process that differs, and the values.
    """
    if jax.process_count() == 1:
        return
    digests = [hashlib.sha256(repr(value).encode()).digest()[:8] for value in what.values()]
    local = np.frombuffer(b"".join(digests), np.uint32).reshape(len(digests), 2)
    gathered = multihost_utils.process_allgather(local)
    for number, digest in enumerate(gathered):
        equal = (digest == gathered[0]).all(axis=1)
        names = [name for name, same in zip(what, equal, strict=True) if not same]
        if names:
            raise ValueError(f"process {number} differs from process 0: {', '.join(names)}")


@contextlib.contextmanager
def noticing_losses() -> Iterator[None]:
    """Raises errors within the context that the end of another process has caused as `Failure`."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        message = str(error)
        if jax.process_count() == 1 or not any(sign in message.lower() for sign in _SIGNS):
            raise
        raise Failure(f"another process of the run was lost ({message.splitlines()[0]})") from None


def leave(status: int) -> NoReturn:
    """Ends a failed process at once, without waiting for the others."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


class _NoTerminal(io.TextIOBase):
    """A stream that claims not to be a terminal, so that no progress bar is drawn on it."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write(text)

    def flush(self) -> None:
        self._stream.flush()


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    """Discards stdout within the context; stderr is shown, but without progress bars."""
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        with (
            contextlib.redirect_stdout(nowhere),
            contextlib.redirect_stderr(_NoTerminal(sys.stderr)),
        ):
            yield
