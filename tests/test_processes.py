"""Several processes that train together: flags, what each prints, and the end if one is lost."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from experiments.runs.watching import watch
from experiments.translation import __main__ as cli
from experiments.translation.runs import TranslationRun
from tests.commands import environment
from tests.test_runs import PIPES, python


pytestmark = pytest.mark.usefixtures("as_users_run_it")
ALL_THREE = "expected --coordinator, --processes and --process, not"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--processes 2", f"{ALL_THREE} --coordinator"),
        ("--coordinator a:1 --process 0", f"{ALL_THREE} --processes"),
        ("a --processes 2 --process 0", "--coordinator: expected HOST:PORT, got 'a'"),
        ("a:1 --processes 2 --process 2", "expected 0 <= it < 2, the number of processes, got 2"),
        *(
            (f"a:{port} --processes 2 --process 0", f"a port in 1..65535, got {port:.20}")
            for port in ("0", "65536", "99999", "9" * 5000)
        ),
        ("a:² --processes 2 --process 0", "expected HOST:PORT, got 'a:²'"),
        ("a:٣ --processes 2 --process 0", "expected HOST:PORT, got 'a:٣'"),
        ("a:1 --processes 0 --process 0", "--processes: expected 1..65536, got 0"),
        ("a:1 --processes 99999999999 --process 0", "expected 1..65536, got 99999999999"),
        ("--distributed --process 0", "expected neither --coordinator nor its companions"),
    ],
)
def test_processes_that_could_not_find_each_other_are_one_clear_line(options, message, capsys):
    coordinator = () if options.startswith("--") else ("--coordinator",)
    assert cli.main(["train", *coordinator, *options.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.endswith(f"{message}\n")
    assert error.count("\n") == 1


LOSS = (
    b"E1123 coordination_service_agent.cc:289] Polled an error from coordination service\n",
    b"F1123 client.h:80] Terminating process because the JAX distributed service detected fatal "
    b"errors. This most likely indicates that another task died\n",
    b"*** Check failure stack trace: ***\n",
)


def seen(*lines: bytes) -> bytes:
    shown: list[bytes] = []
    watch(lines, shown.append)
    return b"".join(shown)


def test_a_loss_is_told_in_one_line_and_nothing_else_is_kept_back():
    rank, rest = b"[Gloo] Rank 0", b" is connected to 1 peer ranks. "
    rest += b"Expected number of connected peer ranks is : 1\n"
    assert seen(rank + rest, b"warning\n", b"\n", b"12\n") == b"warning\n\n12\n"
    assert seen(b"[Gloo] Rank " + rank + b"0" + rest, rest, b"1\n", b"\n", b"more\n") == b"more\n"
    message = b"error: another process of the run was lost"
    assert seen(b"warning\n", *LOSS) == b"warning\n" + message + b"\n"
    assert seen(*LOSS[1:]) == message + b"\n"
    assert seen(b"\0first\n", b"\0go on with: this\n", *LOSS) == message + b"; go on with: this\n"
    assert seen(LOSS[0], b"bye\n") == LOSS[0] + b"bye\n"
    late = b"error: the processes did not find each other in time\n"
    assert seen(LOSS[1], b"RPC: /CoordinationService/RegisterTask\n", LOSS[2]) == late


def started(devices: int, *arguments: str) -> subprocess.Popen[str]:
    flags = re.sub(r"device_count=\d+", f"device_count={devices}", os.environ["XLA_FLAGS"])
    command = [sys.executable, "-m", "experiments.translation", "train", *arguments]
    variables = environment(XLA_FLAGS=flags, JAX_DISABLE_MOST_OPTIMIZATIONS="1")
    return subprocess.Popen(command, env=variables, text=True, **PIPES)


def together() -> tuple[str, ...]:
    """Options of two processes; the number of a process follows."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    return "--coordinator", address, "--processes", "2", "--process"


def two(*arguments: str, second: Sequence[str] = ()) -> list[subprocess.Popen[str]]:
    """Starts two processes with two devices each; the second may have further options."""
    common = together()
    return [
        started(2, *arguments, *options, *common, str(number))
        for number, options in enumerate(((), second))
    ]


def ended(*processes: subprocess.Popen[str]) -> list[tuple[int, str, str]]:
    """Waits for processes and returns the status, stdout and stderr of each."""
    outputs = [process.communicate(timeout=400) for process in processes]
    return [(p.returncode, *texts) for p, texts in zip(processes, outputs, strict=True)]


def losses(directory: Path) -> list[float]:
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [record["loss"] for record in map(json.loads, lines) if "loss" in record]


@pytest.mark.slow
@pytest.mark.minutes
def test_two_processes_train_like_one_and_a_lost_one_ends_the_other(tmp_path, capsys):
    """Afterwards the run goes on from its checkpoint, in one process on another mesh."""
    whole, halves, killed = (tmp_path / name for name in ("whole", "halves", "killed"))
    tiny = ("--preset", "tiny", "--mesh", "data=2,model=2", "--run")
    ((status, _, error),) = ended(started(4, *tiny, str(whole)))
    assert (status, error) == (0, "")
    (first, *texts), (second, *silence) = ended(*two(*tiny, str(halves)))
    assert (first, second) == (0, 0) and texts[1] == "" and silence == ["", ""]
    assert "trained 12 steps" in texts[0]
    np.testing.assert_allclose(losses(halves), losses(whole), rtol=1e-5)

    pair = two(*tiny, str(killed), "--set", "steps=5000")
    wait_until((killed / "digests" / "6.json").exists, "a checkpoint")
    pair[1].send_signal(signal.SIGKILL)
    (status, _, error), _ = ended(*pair)
    assert status not in (0, 2)
    assert error.startswith("error: another process of the run was lost")
    assert error.endswith(f"training goes on with: train --run {killed} --resume\n")
    assert error.count("\n") == 1
    run = TranslationRun.open(killed)
    last_step = run.last_whole_step()
    assert last_step is not None and last_step >= 6

    text = (killed / "config.json").read_text()
    (killed / "config.json").write_text(text.replace('"steps": 5000', f'"steps": {last_step + 6}'))
    assert cli.main(["train", "--run", str(killed), "--resume", "--mesh", "data=8"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert f"resuming from the checkpoint after step {last_step}" in printed.out
    assert run.last_whole_step() == last_step + 6


@pytest.mark.slow
def test_processes_that_were_given_different_things_say_so(tmp_path):
    arguments = ("--preset", "tiny", "--run", str(tmp_path / "run"))
    for status, _, error in ended(*two(*arguments, second=("--set", "steps=13"))):
        assert status == 2
        assert error == "error: process 1 differs from process 0: the configuration\n"


def wait_until(happened: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + 300
    while not happened():
        assert time.monotonic() < until, f"{what} did not come"
        time.sleep(0.1)


@pytest.mark.slow
def test_processes_that_nobody_tells_of_are_one_clear_line(tmp_path):
    """There is no environment of a cluster, or no other process in time."""
    run = ("--run", str(tmp_path / "run"))
    ((status, _, error),) = ended(started(1, *run, "--distributed"))
    assert status == 2 and error.count("\n") == 1
    expected = "--distributed needs Slurm, Open MPI, Kubernetes or a TPU pod\n"
    assert error == f"error: the processes did not find each other: {expected}"
    code = f"""
from experiments.runs import processes
from experiments.translation import __main__ as cli
processes._PATIENCE = 2
cli.main("train --run {run[1]} --coordinator localhost:1 --processes 2 --process 1".split())
"""
    with python(code) as late:
        told = late.communicate()[1]
    assert told == "error: the processes did not find each other in time\n"


@pytest.mark.one_in(4, slow=True)
@pytest.mark.parametrize("process", ["0", "1"])
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_process_that_waits_for_others(process, number, status, tmp_path):
    run = ("--preset", "tiny", "--run", str(tmp_path / "run"))
    common = together()
    host, port = common[1].split(":")
    with socket.socket() as other:
        other.settimeout(0.1)
        if process == "1":
            other.bind((host, int(port)))
            other.listen()

        def is_reached() -> bool:
            if process == "0":
                return other.connect_ex((host, int(port))) == 0
            with contextlib.suppress(TimeoutError):
                other.accept()[0].close()
                return True
            return False

        waits = started(1, *run, *common, process)
        wait_until(is_reached, "a connection")
    time.sleep(1)  # the first process listens, or the second has connected, and then they wait
    assert waits.poll() is None
    waits.send_signal(number)
    began = time.monotonic()
    assert ended(waits) == [(status, "", "interrupted\n")]
    assert time.monotonic() - began < 10


@pytest.mark.slow
def test_a_signal_ends_a_process_that_waits_for_another_within_a_step(tmp_path):
    run = tmp_path / "run"
    pair = two(
        "--preset", "tiny", "--mesh", "data=2,model=2", "--run", str(run), "--set", "steps=5000"
    )
    wait_until((run / "digests" / "6.json").exists, "a checkpoint")
    pair[1].send_signal(signal.SIGSTOP)
    time.sleep(3)
    pair[0].send_signal(signal.SIGTERM)
    began = time.monotonic()
    ((status, _, error),) = ended(pair[0])
    assert (status, time.monotonic() - began < 10) == (143, True)
    assert error == f"interrupted; training goes on with: train --run {run} --resume\n"
    pair[1].kill()
    ended(pair[1])
