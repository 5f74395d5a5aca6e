"""Checkpoints: a kill at any moment, damage, hostile files."""

import contextlib
import dataclasses
import itertools
import json
import os
import pickle
import shutil
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.runs import checkpoints
from experiments.runs.ending import Failure
from experiments.translation import runs, training
from experiments.translation.presets import PRESETS
from experiments.translation.runs import TextOrigin, TranslationRun
from experiments.translation.vocabulary import Vocabulary
from tests.test_translation import (
    as_users_run_it,
    assert_equal,
    cut_short,
    one_bit_flipped,
    small_tree,
)


assert as_users_run_it


def tree_of(steps: int) -> training.TrainingState:
    return small_tree(float(steps))


def a_run(directory: Path, *steps: int) -> TranslationRun:
    words = Vocabulary(("a",))
    run = TranslationRun(
        directory, PRESETS["tiny"], words, words, TextOrigin(None, ("de", "en"), "0")
    )
    run.create()
    for step in steps:
        run.save(tree_of(step), step)
    return run


def test_resuming_after_a_killed_save_prints_nothing(tmp_path, capfd, recwarn):
    run = a_run(tmp_path / "run", 1)
    left = run.directory / "checkpoints" / "2.orbax-checkpoint-tmp"
    left.mkdir()
    (left / "part").write_text("half")
    run.restore(tree_of(0))
    run.save(tree_of(2), 2)
    assert run.steps() == [1, 2] and not left.exists()
    assert capfd.readouterr() == ("", "") and not recwarn.list


_watchers: list[Callable[[], None]] = []
_CHANGES = ("os.mkdir", "os.remove", "os.rename", "os.rmdir")


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if _watchers and (
        event in _CHANGES or (event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR))
    ):
        _watchers[-1]()


@pytest.fixture(scope="module", autouse=True)
def _watching():
    sys.addaudithook(_watch)


def left_by_kills(
    run: TranslationRun, action: Callable[[], Any], folder: Path
) -> list[TranslationRun]:
    """Returns the runs that a kill during the action leaves: copies before each change to files."""
    copies: list[TranslationRun] = []
    busy = threading.Lock()

    def copy() -> None:
        if not busy.acquire(blocking=False):
            return
        try:
            copies.append(dataclasses.replace(run, directory=folder / str(len(copies))))
            if run.directory.exists():
                shutil.copytree(run.directory, copies[-1].directory)
        finally:
            busy.release()

    _watchers.append(copy)
    try:
        action()
    finally:
        _watchers.pop()
    return copies


@pytest.mark.parametrize("name", ["²", "٣", "01", "1_0", " 3", "pipes"])
def test_a_folder_that_is_named_like_no_step_is_no_checkpoint(name, tmp_path):
    run = a_run(tmp_path / "run", 1, 2)
    shutil.copytree(run.directory / "checkpoints" / "2", run.directory / "checkpoints" / name)
    run = TranslationRun.open(run.directory)
    assert run.steps() == [1, 2] and run.restore(tree_of(0))[1] == 2
    run.save(tree_of(3), 3)
    assert run.steps() == [1, 2, 3] and (run.directory / "checkpoints" / name).is_dir()


def test_a_checkpoint_with_a_pipe_in_it_is_not_whole(tmp_path):
    run = a_run(tmp_path / "run", 1, 2)
    os.mkfifo(run.directory / "checkpoints" / "2" / "pipe")
    with pytest.warns(UserWarning, match="checkpoint 2 is incomplete or damaged"):
        assert run.restore(tree_of(0))[1] == 1


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_parameters_that_are_no_numbers_are_not_used(value, tmp_path):
    run = a_run(tmp_path / "run", 1)
    tree = tree_of(2)
    tree.params["b"] = tree.params["b"] * value
    run.save(tree, 2)
    with pytest.raises(Failure, match=r"parameters are not finite, such as b$"):
        run.parameters(tree_of(0).params)


@contextlib.contextmanager
def unwarned() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def check_kills_in_saving(
    run: TranslationRun, step: int, folder: Path, good: set[int | None]
) -> None:
    """After a kill at any moment, the last checkpoint but one or the last is whole, and saving
    works and deletes what the kill left."""
    restored, unfinished = set(), 0
    for left in left_by_kills(run, lambda: run.save(tree_of(step), step), folder):
        with unwarned():
            opened = TranslationRun.open(left.directory)
            if opened.has_checkpoint():
                tree, last = opened.restore(small_tree())
                assert_equal(tree, tree_of(last))
                restored.add(last)
            else:
                restored.add(None)
            folder = opened.directory / "checkpoints"
            unfinished += len([*folder.glob("*tmp*")])
            opened.save(tree_of(step), step)
            assert opened.restore(small_tree())[1] == step
            assert all(path.name.isdecimal() for path in folder.iterdir())
    assert restored == good and unfinished


@pytest.mark.slow
def test_a_kill_while_saving_leaves_the_checkpoint_before(tmp_path):
    run = a_run(tmp_path / "run", 1, 2, 3)
    check_kills_in_saving(run, 4, tmp_path, {3, 4})
    assert run.steps() == [2, 3, 4]


def test_a_kill_while_saving_for_the_first_time_leaves_no_checkpoint(tmp_path):
    check_kills_in_saving(a_run(tmp_path / "run"), 1, tmp_path, {None})


@pytest.mark.slow
def test_a_kill_while_saving_anew_leaves_the_checkpoint_before(tmp_path):
    run = a_run(tmp_path / "run", 1, 2)
    (run.directory / "digests" / "2.json").unlink()
    check_kills_in_saving(run, 2, tmp_path, {1})


def test_checkpoints_without_digests_are_damaged_and_not_unfinished(tmp_path):
    run = a_run(tmp_path / "run", 1, 2)
    shutil.rmtree(run.directory / "digests")
    assert run.has_checkpoint()
    with unwarned(), pytest.raises(ValueError, match="damaged"):
        run.restore(small_tree())


def test_a_kill_while_forgetting_metrics_leaves_all_or_the_rest(tmp_path):
    run = a_run(tmp_path / "run")
    for step in range(1, 5):
        run.report({"step": step})
    left = left_by_kills(run, lambda: run.forget_metrics_after(2), tmp_path)
    steps = [[record["step"] for record in each.metrics()] for each in (*left, run)]
    assert steps[0] == [1, 2, 3, 4] and steps[-1] == [1, 2]
    assert all(each in (steps[0], steps[-1]) for each in steps)


def test_a_kill_while_beginning_leaves_no_run_or_a_whole_one(tmp_path):
    run = dataclasses.replace(a_run(tmp_path / "other"), directory=tmp_path / "run")
    left = [*left_by_kills(run, run.create, tmp_path), run]
    whole = [each for each in left if runs.is_run(each.directory)]
    assert [TranslationRun.open(each.directory) for each in whole] == whole
    assert len(left) > 3 and run in whole


def files_of(run: TranslationRun, step: int) -> list[Path]:
    files = (run.directory / "checkpoints" / str(step)).rglob("*")
    return [file for file in files if file.is_file()]


def test_any_damage_to_any_file_is_noticed_and_the_checkpoint_before_is_taken(tmp_path):
    run = a_run(tmp_path / "run", 1, 2)
    digest = run.directory / "digests" / "2.json"
    files = [*files_of(run, 2), digest]
    assert len(files) > 5
    for file, damage in itertools.product(files, (one_bit_flipped, cut_short, Path.unlink)):
        content = file.read_bytes()
        damage(file)
        with pytest.warns(UserWarning, match="checkpoint 2 is incomplete or damaged"):
            tree, step = run.restore(small_tree())
        assert step == 1
        assert_equal(tree, tree_of(1))
        file.write_bytes(content)
    assert run.restore(small_tree())[1] == 2
    for step in (1, 2):
        cut_short(files_of(run, step)[0])
    with unwarned(), pytest.raises(ValueError, match="every checkpoint is damaged"):
        run.restore(small_tree())


class Hostile:
    """An object that makes a directory when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


def test_of_a_hostile_file_nothing_is_run_and_nothing_wrong_is_taken(tmp_path):
    run = a_run(tmp_path / "run", 1)
    run.report({"step": 1})
    marker = tmp_path / "was run"
    hostile = [
        pickle.dumps(Hostile(marker), protocol=0),
        f"__import__('os').mkdir({str(marker)!r})".encode(),
        b"[" * 100_000,
        b'{"__class__": "os.system", "item_handlers": 3, "tree_metadata": 3}',
        b"{}",
    ]
    saved = [file for file in files_of(run, 1) if file.name.endswith("METADATA")]
    named = [file for file in run.directory.rglob("*") if file.suffix in (".json", ".jsonl")]
    assert len(saved) == 2 and len(named) == 5
    for file, content in itertools.product([*saved, *named], hostile):
        original = file.read_bytes()
        file.write_bytes(content + b"\n")
        refused = False
        try:
            with unwarned(), resigned(run, 1) if file in saved else contextlib.nullcontext():
                opened = TranslationRun.open(run.directory)
                assert opened.metrics() == [{"step": 1}]
                assert_equal(opened.restore(small_tree())[0], tree_of(1))
        except (ValueError, OSError):
            refused = True
        assert not marker.exists()
        assert refused or file in saved
        file.write_bytes(original)


@contextlib.contextmanager
def resigned(run: TranslationRun, step: int) -> Iterator[None]:
    """Replaces the digests by those of the current files."""
    path = run.directory / "digests" / f"{step}.json"
    original = path.read_text()
    path.write_text(json.dumps(checkpoints._digests(run.directory / "checkpoints" / str(step))))
    yield
    path.write_text(original)


@pytest.mark.parametrize(
    "change", [{"path": 3}, {"languages": "de"}, {"languages": ["de", 3]}, {"fingerprint": None}]
)
def test_the_text_of_a_run_is_checked(tmp_path, change):
    run = a_run(tmp_path / "run")
    about = json.loads((run.directory / "config.json").read_text())
    about["text"] |= change
    (run.directory / "config.json").write_text(json.dumps(about))
    with pytest.raises(ValueError, match="expected path, languages and fingerprint"):
        TranslationRun.open(run.directory)
