"""Several processes that train together: flags, what each prints, and the end if one is lost."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from experiments.runs.watching import watch
from experiments.translation.runs import TranslationRun
from tests.commands import environment, start_python
from tests.test_translation import TINY, bench, make_bench, set_words


pytestmark = pytest.mark.usefixtures("as_users_run_it")


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
    variables = environment(XLA_FLAGS=flags, JAX_DISABLE_MOST_OPTIMIZATIONS="1")
    return start_python("-m", "experiments.translation", "train", *arguments, env=variables)


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


@pytest.mark.slow
@pytest.mark.minutes
def test_two_processes_train_like_one_and_a_lost_one_ends_the_other(tmp_path):
    """The first process ends within a step if the second stops, and with an error if it is lost.
    Then two processes go on from the checkpoint and end like a run of one process."""
    halves = tmp_path / "halves"
    settings = ("schedule=constant", "report_every=2", "checkpoint_every=2")
    tiny = ("--preset", "tiny", *set_words(*settings, "steps=5000"), "--run", str(halves))
    resume = ("--run", str(halves), "--resume")
    on_a_mesh = ("--mesh", "data=2,model=2")
    command = f"python -m experiments.translation train --run {halves} --resume"
    how = f"training goes on with: {command}\n"

    stopped = two(*tiny, *on_a_mesh)
    wait_until((halves / "digests" / "2.json").exists, "a checkpoint")
    stopped[1].send_signal(signal.SIGSTOP)
    time.sleep(1)
    stopped[0].send_signal(signal.SIGTERM)
    began = time.monotonic()
    assert ended(stopped[0])[0][::2] == (143, f"interrupted; {how}")
    assert time.monotonic() - began < 10
    stopped[1].kill()
    ended(stopped[1])

    run = TranslationRun.open(halves)
    steps_before = run.last_whole_step() or 0
    lost = two(*resume, *on_a_mesh)
    wait_until(lambda: (run.last_whole_step() or 0) > steps_before, "another checkpoint")
    lost[1].send_signal(signal.SIGKILL)
    (status, _, error), _ = ended(*lost)
    assert status not in (0, 2)
    assert error.startswith("error: another process of the run was lost")
    assert error.endswith(how) and error.count("\n") == 1

    last_step = run.last_whole_step()
    assert last_step is not None and last_step > steps_before
    text = (halves / "config.json").read_text()
    steps = last_step + 2
    (halves / "config.json").write_text(text.replace('"steps": 5000', f'"steps": {steps}'))
    (first, *texts), (second, *silence) = ended(*two(*resume, *on_a_mesh))
    assert (first, second) == (0, 0) and texts[1] == "" and silence == ["", ""]
    assert f"resuming from the checkpoint after step {last_step}" in texts[0]
    assert f"trained {steps} steps" in texts[0]
    parts, alone = make_bench(TINY.changed([*settings, f"steps={steps}"])), list[Any]()
    loss = parts.evaluator(parts.texts.validation).token_loss
    validate = lambda params: {"validation_loss": loss(params)}  # noqa: E731
    parts.loop(report=alone.append, validate=validate).run(parts.init_state())
    # The losses of training and of validation.
    got, want = (
        [x["loss"] if "loss" in x else x["validation_loss"] for x in records]
        for records in (run.metrics(), alone)
    )
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert run.parameters(bench().model.shapes)[1] == [steps]


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
    code = f"""
from experiments.runs import processes
from experiments.translation import __main__ as cli
processes._PATIENCE = 2
cli.main("train --run {run[1]} --coordinator localhost:1 --processes 2 --process 1".split())
"""
    unknown, late = ended(started(1, *run, "--distributed"), start_python("-c", code))
    expected = "--distributed needs Slurm, Open MPI, Kubernetes or a TPU pod\n"
    assert unknown[::2] == (2, f"error: the processes did not find each other: {expected}")
    assert late[2] == "error: the processes did not find each other in time\n"


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
