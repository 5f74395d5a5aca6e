"""Influences on a run from outside: other processes, a full disk, signals."""

import contextlib
import dataclasses
import errno
import io
import json
import os
import platform
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from experiments.runs import checkpoints, ending, files, locking
from experiments.runs.files import Unwritten
from experiments.translation import __main__ as cli
from experiments.translation import runs
from experiments.translation.runs import TranslationRun
from tests.commands import full_after, run_python, start_python
from tests.conftest import expect, plain_jax
from tests.test_checkpoints import _watching, left_by_kills
from tests.test_translation import assert_refused, assert_same_run, saved_run, small_tree


assert _watching
pytestmark = pytest.mark.usefixtures("as_users_run_it")


def contents(directory: Path) -> dict[str, bytes]:
    files = [path for path in directory.rglob("*") if path.is_file()]
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


HOLDS_A_LOCK = """
import pathlib, sys, time
from experiments.runs.locking import locked
with locked(pathlib.Path(sys.argv[1])):
    print("locked", flush=True)
    time.sleep(600)
"""


@contextlib.contextmanager
def held_elsewhere(directory: Path) -> Iterator[int]:
    """A context in which another process has the lock. SIGKILL ends that process."""
    with start_python("-c", HOLDS_A_LOCK, directory, stderr=None) as holder:
        try:
            assert holder.stdout is not None and holder.stdout.readline() == "locked\n"
            yield holder.pid
        finally:
            holder.kill()


def test_a_second_process_in_a_run_is_refused_in_one_line_and_changes_nothing(tmp_path, capsys):
    run = saved_run(tmp_path / "run", 1)
    run.report({"step": 1})
    vacant = tmp_path / "vacant"
    with held_elsewhere(run.directory) as pid, held_elsewhere(vacant):
        unchanged = contents(run.directory)
        for directory, *options in (
            (run.directory, "--resume"),
            (run.directory, "--overwrite", "--preset", "tiny"),
            (vacant, "--preset", "tiny"),
        ):
            assert cli.main(["train", "--run", str(directory), *options]) == 2
            error = capsys.readouterr().err
            assert error.startswith(f"error: {directory} is in use: process ")
            assert error.count("\n") == 1
            assert (f"process {pid} on " in error) == (directory == run.directory)
        assert contents(run.directory) == unchanged
        assert [path.name for path in vacant.iterdir()] == ["lock"]
    for _ in range(2):  # the locks of killed processes block nobody
        with locking.locked(vacant):
            expect(BlockingIOError, f"process {os.getpid()}", locking.locked(vacant).__enter__)


def test_what_is_no_run_is_given_no_lock(tmp_path, capsys):
    for option in ("--resume", "--overwrite"):
        (tmp_path / "thesis.txt").touch()
        assert_refused(["train", "--run", tmp_path, "--preset", "tiny", option], "error: ", capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_run_is_deleted_under_its_lock(tmp_path):
    """After a kill in between it can be deleted again; other folders are left alone."""
    run = saved_run(tmp_path / "run", 1)
    expect(ValueError, "is not a run's directory", runs.remove, tmp_path)
    with locking.locked(run.directory):
        left = left_by_kills(run, lambda: runs.remove(run.directory), tmp_path)
        assert runs.is_vacant(run.directory)
        with pytest.raises(BlockingIOError), locking.locked(run.directory):
            pass
        run.create()
    assert TranslationRun.open(run.directory) == run
    assert len(left) > 10
    for each in left:
        runs.remove(each.directory)
        each.create()
        assert TranslationRun.open(each.directory) == each


def test_a_checkpoint_that_cannot_be_written_leaves_those_before(tmp_path, capfd):
    run = saved_run(tmp_path / "run", 1, 2, 3)
    saved = contents(run.directory)
    sizes = sorted({len(content) for content in saved.values()})
    assert len(sizes) > 5
    messages = []
    for size in (0, *sizes):
        left = dataclasses.replace(run, directory=tmp_path / str(size))
        shutil.copytree(run.directory, left.directory)
        try:
            with full_after(size):
                left.save(small_tree(4), 4)
        except Unwritten as error:
            messages.append(str(error).removeprefix(str(left.directory)))
            # Other threads may still delete what they began.
            assert saved == {name: (left.directory / name).read_bytes() for name in saved}
            assert left.last_whole_step() == 3
    assert len(messages) >= 4
    assert {*messages} == {": checkpoint 4 could not be written: File too large"}
    assert capfd.readouterr().err == ""


SAVES_MUCH = """
import pathlib, resource, sys, time
import numpy as np
from experiments.runs.ending import exit_status
from experiments.translation.runs import TranslationRun
run = TranslationRun.open(sys.argv[1])
state = {str(n): np.random.default_rng(n).random(5000) for n in range(200)}
for size in (200_000, 20_000):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size,) * 2)
    status = exit_status(lambda: run.save(state, 2))
    print(status, run.last_whole_step(), flush=True)
    time.sleep(0.5)
sys.exit(status)
"""


@pytest.mark.slow
def test_many_arrays_that_cannot_be_written_are_one_line(tmp_path):
    """Other threads report failures too, some of them after the command has ended."""
    run = saved_run(tmp_path / "run", 1)
    result = run_python("-c", SAVES_MUCH, run.directory)
    line = f"error: {run.directory}: checkpoint 2 could not be written: File too large\n"
    assert (result.stdout, result.stderr) == ("1 1\n" * 2, line * 2)
    assert result.returncode == 1 and run.last_whole_step() == 1


def test_a_file_that_cannot_be_written_is_as_it_was(tmp_path):
    path = tmp_path / "file.json"
    files.replace(path, "before")
    path.chmod(0o640)
    (tmp_path / "link").symlink_to(path)
    with full_after(100), pytest.raises(Unwritten, match=f"{path} could not be written: File too"):
        files.replace(path, "x" * 101)
    assert contents(tmp_path) == {"file.json": b"before", "link": b"before"}
    files.replace(tmp_path / "link", "größer")
    assert path.read_text("utf-8") == "größer" and path.stat().st_mode & 0o777 == 0o640
    assert (tmp_path / "link").is_symlink() and len(list(tmp_path.iterdir())) == 2
    with pytest.raises(Unwritten, match="inside could not be written: File exists"):
        files.replace(path / "inside", "")


def test_a_reason_comes_without_the_details_of_tensorstore():
    reason = 'NOT_FOUND: Failed to rename "run/a.b" to "run/b"'
    spec = 'tensorstore_spec=\'{"driver":"zarr"}\''
    for details in ("", f" [{spec}]", f" [source locations='x.cc:1'] [{spec}]", f". See {spec}"):
        with pytest.raises(Unwritten) as error, files.writing("run"):
            raise ValueError(reason + details)
        assert str(error.value) == f"run could not be written: {reason}"


def test_old_results_stay_until_there_is_a_first_row(tmp_path):
    path = tmp_path / "new" / "results.jsonl"
    results = files.ResultsFile(path)
    assert contents(tmp_path) == {} and path.parent.is_dir()
    results.add({"x": 1})
    results.add({"x": "é"})
    written = b'{"x": 1}\n{"x": "\\u00e9"}\n'
    assert path.read_bytes() == written
    results = files.ResultsFile(path)
    with pytest.raises(ValueError, match="JSON compliant"):
        results.add({"x": float("nan")})
    assert contents(tmp_path) == {"new/results.jsonl": written}
    results.add({"x": 2})
    assert path.read_bytes() == b'{"x": 2}\n'
    with pytest.raises(Unwritten, match=r"results.jsonl could not be written: File exists"):
        files.ResultsFile(path / "results.jsonl")


@pytest.fixture
def events(monkeypatch) -> list[Any]:
    """The files and folders that are synced, and "renamed" when a file is."""
    events: list[Any] = []
    sync, rename = os.fsync, Path.replace

    def fsync(handle: int) -> None:
        events.append(Path(f"/proc/self/fd/{handle}").readlink())
        sync(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", lambda *a: (events.append("renamed"), rename(*a)))
    return events


def test_a_file_and_its_folder_are_on_the_disk_when_the_name_is_given(tmp_path, events):
    """The content is synced before the file has its name, the name before `replace` returns."""
    files.replace(tmp_path / "a", "text")
    assert events[0].suffix == ".draft" and events[1:] == ["renamed", tmp_path]
    events.clear()
    files.append(tmp_path / "a", "more")
    assert events == [tmp_path / "a"]
    assert (tmp_path / "a").read_text() == "textmore\n"


def test_a_checkpoint_is_on_the_disk_before_its_digests(tmp_path, events, monkeypatch):
    run = saved_run(tmp_path / "run")
    folder = run.directory / "checkpoints"

    def replace(path: Path, content: str) -> None:
        if path.parent.name == "digests":
            assert {folder, *(folder / "1" / name for name in json.loads(content))} <= {*events}
        files.replace(path, content)

    monkeypatch.setattr(checkpoints, "replace", replace)
    run.save(small_tree(1), 1)
    assert run.last_whole_step() == 1


@pytest.fixture
def whole(demonstration) -> TranslationRun:
    """A tiny run that nothing happened to."""
    return TranslationRun.open(demonstration[0])


def trained(directory: Path, *arguments: str, status: int = 0) -> TranslationRun:
    with plain_jax(), contextlib.redirect_stdout(io.StringIO()):
        assert cli.main(["train", "--run", str(directory), *arguments]) == status
    return TranslationRun.open(directory)


@pytest.mark.slow
@pytest.mark.default_tiles
def test_a_run_that_is_terminated_and_out_of_space_ends_like_the_uninterrupted_one(
    whole, tmp_path, capsys, monkeypatch
):
    """It is terminated after the checkpoint at step 6, and out of space in the metrics of step 8,
    half of which are written. Each ends with one line."""
    directory = tmp_path / "run"
    command = f"python -m experiments.translation train --run {directory} --resume"
    how = f"training goes on with: {command}\n"
    save, report = TranslationRun.save, TranslationRun.report

    def terminated(run: TranslationRun, state: Any, step: int) -> None:
        save(run, state, step)
        os.kill(os.getpid(), signal.SIGTERM)

    def torn(run: TranslationRun, record: dict[str, Any]) -> None:
        size = (run.directory / "metrics.jsonl").stat().st_size
        with full_after(size + 20 if record["step"] == 8 else 2**30):
            report(run, record)

    def run_with(name: str, instead: Callable[..., None], status: int, *arguments: str) -> str:
        with monkeypatch.context() as patch:
            patch.setattr(TranslationRun, name, instead)
            trained(directory, *arguments, status=status)
        return capsys.readouterr().err

    assert run_with("save", terminated, 143, "--preset", "tiny") == f"interrupted; {how}"
    unwritten = f"could not be written: File too large; checkpoint 6 is whole; {how}"
    error = run_with("report", torn, 1, "--resume")
    assert error == f"error: {directory}/metrics.jsonl {unwritten}"
    assert not (directory / "metrics.jsonl").read_text().endswith("\n")
    assert_same_run(whole, trained(directory, "--resume"))
    reports = [(record["step"], "validation_loss" in record) for record in whole.metrics()]
    assert len(set(reports)) == len(reports)


def test_a_vocabulary_that_cannot_be_written_is_one_line_and_can_be_tried_again(tmp_path, capsys):
    directory = tmp_path / "run"
    with full_after(100), plain_jax():
        assert cli.main(["train", "--preset", "tiny", "--run", str(directory)]) == 1
    error = capsys.readouterr().err
    assert error == f"error: {directory}/source.json could not be written: File too large\n"
    assert runs.is_vacant(directory)


@pytest.mark.slow
def test_an_evaluation_and_pictures_that_cannot_be_written_are_one_line(
    whole, tmp_path, capsys, monkeypatch
):
    shutil.copytree(whole.directory, tmp_path / "run")
    unchanged = contents(tmp_path / "run")
    run = ["--run", str(tmp_path / "run")]
    sync = os.fsync

    def refuse(handle: int) -> None:
        if Path(f"/proc/self/fd/{handle}").readlink().suffix == ".draft":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(handle)

    monkeypatch.setattr(os, "fsync", refuse)
    for arguments, name in (
        (["evaluate", *run], "evaluation.json"),
        (["plot", *run, "--sentence", "der hund schläft ."], "pictures/.*.png"),
        (["translate", *run, "der hund schläft .", "--output", str(tmp_path / "out")], "out"),
    ):
        with contextlib.redirect_stdout(io.StringIO()):
            assert cli.main(arguments) == 1
        error = capsys.readouterr().err
        message = rf"error: \S*/{name} could not be written: No space left on device\n"
        assert re.fullmatch(message, error)
    assert contents(tmp_path / "run") == unchanged and not (tmp_path / "out").exists()


def test_reading_a_checkpoint_writes_nothing(tmp_path):
    run = saved_run(tmp_path / "run", 1)
    assert not left_by_kills(run, lambda: run.restore(small_tree()), tmp_path)


@pytest.mark.parametrize(
    ("number", "handler", "status"),
    [
        (signal.SIGINT, signal.default_int_handler, 130),
        (signal.SIGTERM, signal.SIG_DFL, 143),
        (signal.SIGTERM, signal.SIG_IGN, 0),  # an ignored signal is still ignored
    ],
)
def test_signals_end_a_command_alike(number, handler, status, capsys):
    def interrupted() -> None:
        os.kill(os.getpid(), number)
        time.sleep(60 if status else 0)

    original = signal.signal(number, handler)
    try:
        assert ending.exit_status(interrupted) == status
        assert capsys.readouterr().err == ("interrupted\n" if status else "")
        assert signal.getsignal(number) is handler
    finally:
        signal.signal(number, original)


PRINTS = """
import sys
from experiments.runs.ending import exit_status
sys.exit(exit_status(lambda: [print("x" * 100) for _ in range(2000)]))
"""


def test_output_that_nobody_takes_ends_a_command_without_a_traceback():
    with Path("/dev/full").open("w") as full:
        process = start_python("-c", PRINTS, stdout=full)
        assert process.communicate()[1] == "error: [Errno 28] No space left on device\n"
        assert process.returncode == 1
    read_end, write_end = os.pipe()
    os.close(read_end)
    process = start_python("-c", PRINTS, stdout=write_end)
    os.close(write_end)
    assert process.communicate()[1] == "" and process.returncode == 141


FOREIGN_NAMES = "lock config.json metrics.jsonl digests/1.json checkpoints/1/more".split()
FOREIGN_FOLDERS = ["digests", "checkpoints/1"]


def foreign_run(directory: Path) -> Path:
    """A run with files in its folders."""
    saved_run(directory).report({"step": 2})
    for name in FOREIGN_NAMES:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).touch()
    return directory


def linked(path: Path, there: Path) -> None:
    """Moves a file or folder elsewhere, and leaves a symbolic link in its place."""
    path.replace(there)
    path.symlink_to(there)


def a_pipe(path: Path, _: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("command", ["train --resume", "evaluate", "translate a", "plot"])
@pytest.mark.parametrize(
    ("name", "change", "kind"),
    [(name, linked, "symbolic link") for name in FOREIGN_NAMES + FOREIGN_FOLDERS]
    + [(name, a_pipe, "pipe") for name in FOREIGN_NAMES],
)
def test_nothing_in_a_run_leads_elsewhere(command, name, change, kind, tmp_path, capsys):
    directory = foreign_run(tmp_path / "run")
    change(directory / name, tmp_path / "elsewhere")
    unchanged = contents(tmp_path)
    first, *arguments = command.split()
    message = f"{directory / name}: expected a file or a folder, got a {kind}"
    assert_refused([first, "--run", directory, *arguments], message, capsys)
    assert contents(tmp_path) == unchanged


def test_a_file_with_another_name_is_not_written_in_place(tmp_path):
    run = TranslationRun.open(foreign_run(tmp_path / "run"))
    for name in ("lock", "metrics.jsonl"):
        (tmp_path / name).hardlink_to(run.directory / name)
    unchanged = contents(tmp_path)
    message = r"{} could not be written: .* got a file with hard"
    with pytest.raises(Unwritten, match=message.format("lock")), locking.locked(run.directory):
        pass
    with pytest.raises(Unwritten, match=message.format("metrics.jsonl")):
        run.report({"step": 3})
    assert contents(tmp_path) == unchanged
    run.forget_metrics_after(1)  # writes a new file
    assert (tmp_path / "metrics.jsonl").read_bytes() == unchanged["metrics.jsonl"]


@pytest.mark.parametrize("name", ["lock", "source.json", "target.json"])
@pytest.mark.parametrize("change", [linked, a_pipe])
def test_a_run_begins_in_no_folder_that_leads_elsewhere(name, change, tmp_path):
    (tmp_path / "run").mkdir()
    for each in ("lock", name):
        (tmp_path / "run" / each).touch()
    change(tmp_path / "run" / name, tmp_path / "elsewhere")
    unchanged = contents(tmp_path)
    with pytest.raises(ValueError, match=f"{name}: expected a file or a folder, got a "):
        with locking.locked(tmp_path / "run"):
            saved_run(tmp_path / "run")
    assert (tmp_path / "elsewhere").exists() == ("elsewhere" in unchanged)
    assert contents(tmp_path).get("elsewhere") == unchanged.get("elsewhere")


def test_a_draft_follows_no_link(tmp_path):
    (tmp_path / "victim").write_text("before")
    (tmp_path / f".a.{os.getpid()}.draft").symlink_to(tmp_path / "victim")
    files.replace(tmp_path / "a", "text")
    assert contents(tmp_path) == {"victim": b"before", "a": b"text"}


LOST = """
import os, signal, sys, weakref
from experiments.runs.ending import exit_status, interruptible
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
class Thing: pass
def command():
    thing = Thing()
    reference = weakref.ref(thing, lambda _: os.kill(os.getpid(), signal.{name}))
    for number in interruptible(range({steps})):
        print(number, flush=True)
        if number == 3:
            del thing
sys.exit(exit_status(command))
"""


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("name", "status"), [("SIGINT", 130), ("SIGTERM", 143)])
@pytest.mark.parametrize("steps", [10, 4])  # the fourth is the one in which it is lost
def test_a_signal_whose_exception_is_lost_ends_the_next_step(name, status, steps):
    result = run_python("-c", LOST.format(name=name, steps=steps))
    assert result.returncode == status and result.stdout == "0\n1\n2\n3\n"
    assert "Exception ignored" in result.stderr and result.stderr.endswith("\ninterrupted\n")


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("RESOURCE_EXHAUSTED: 1 TB")])
def test_too_little_memory_is_one_clear_line(error, capsys):
    raises = mock.Mock(side_effect=[error, RuntimeError("another")])
    assert ending.exit_status(raises) == 1
    error_line = capsys.readouterr().err
    assert error_line.startswith("error: not enough memory: ") and error_line.count("\n") == 1
    expect(RuntimeError, "another", ending.exit_status, raises)


_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")

_PROGRAM = """
import ctypes, re, resource
from experiments.runs.memory import keep_freed_memory

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

assert keep_freed_memory()
for _ in range(2):
    before = faults()
    block = ctypes.create_string_buffer(b"x" * 2**27)
    taken = faults() - before
    large = re.search(r"AnonHugePages: *(\\d+)", open("/proc/self/smaps_rollup").read())[1]
    del block
print(taken, int(large) * 1024)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is glibc's memory")
def test_freed_memory_is_kept_in_large_pages():
    taken, large = map(int, run_python("-c", _PROGRAM, check=True).stdout.split())
    assert taken < 1000  # the second block is where the first was; 2**27 bytes are 32,768 pages
    if _SETTING.exists() and "[never]" not in _SETTING.read_text():
        assert large > 0
