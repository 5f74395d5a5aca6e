"""Checkpoints: a kill at any moment, damage, hostile files. Early stopping and averaging."""

import contextlib
import dataclasses
import functools
import hashlib
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

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.runs import checkpoints, stopping
from experiments.runs.ending import Failure
from experiments.translation import __main__ as cli
from experiments.translation import evaluation, runs
from experiments.translation.runs import TranslationRun
from tests.arrays import assert_equal
from tests.conftest import plain_jax
from tests.test_translation import (
    TINY,
    Bench,
    Killed,
    cut_short,
    make_bench,
    one_bit_flipped,
    saved_run,
    set_words,
    small_tree,
    timeless,
)


pytestmark = pytest.mark.usefixtures("as_users_run_it")


def test_resuming_after_a_killed_save_prints_nothing(tmp_path, capfd, recwarn):
    run = saved_run(tmp_path / "run", 1)
    left = run.directory / "checkpoints" / "2.orbax-checkpoint-tmp"
    left.mkdir()
    (left / "part").write_text("half")
    run.restore(small_tree(0))
    run.save(small_tree(2), 2)
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
        if busy.acquire(blocking=False):
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


def test_a_folder_that_is_named_like_no_step_is_no_checkpoint(tmp_path):
    run = saved_run(tmp_path / "run", 1, 2)
    folder = run.directory / "checkpoints"
    names = {"²", "٣", "01", "1_0", " 3", "pipes"}
    for name in names:
        shutil.copytree(folder / "2", folder / name)
        assert TranslationRun.open(run.directory).steps() == [1, 2]
    run = TranslationRun.open(run.directory)
    assert run.restore(small_tree(0))[1] == 2
    run.save(small_tree(3), 3)
    assert {path.name for path in folder.iterdir()} == names | {"1", "2", "3"}


def test_parameters_that_are_no_numbers_are_not_used(tmp_path):
    run = saved_run(tmp_path / "run", 1)
    for step, value in ((2, np.nan), (3, np.inf)):
        tree = small_tree(2)
        tree.params["b"] = tree.params["b"] * value
        run.save(tree, step)
        with pytest.raises(Failure, match=r"parameters are not finite, such as b$"):
            run.parameters(small_tree(0).params)


def unwarned() -> warnings.catch_warnings:
    return warnings.catch_warnings(action="ignore", category=UserWarning)


@pytest.mark.parametrize(
    ("saved", "step", "good"),
    [
        pytest.param((1, 2, 3), 4, {3, 4}, marks=pytest.mark.slow),
        ((), 1, {None}),
        # The second has no digests, as it was not finished.
        pytest.param((1, 2), 2, {1}, marks=pytest.mark.exhaustive),
    ],
)
def test_a_kill_while_saving_leaves_the_checkpoint_before(tmp_path, saved, step, good):
    """After a kill at any moment, the last checkpoint but one or the last is whole, and saving
    works and deletes what the kill left."""
    run = saved_run(tmp_path / "run", *saved)
    if step in saved:
        (run.directory / "digests" / f"{step}.json").unlink()
    restored, unfinished = set(), 0
    for left in left_by_kills(run, lambda: run.save(small_tree(step), step), tmp_path):
        with unwarned():
            opened, last = TranslationRun.open(left.directory), None
            if opened.has_checkpoint():
                tree, last = opened.restore(small_tree())
                assert_equal(tree, small_tree(last))
            restored.add(last)
            folder = opened.directory / "checkpoints"
            unfinished += len([*folder.glob("*tmp*")])
            opened.save(small_tree(step), step)
            assert opened.restore(small_tree())[1] == step
            assert all(path.name.isdecimal() for path in folder.iterdir())
    assert restored == good and unfinished
    assert run.steps() == sorted({*saved, step})[-3:]


def test_a_kill_while_forgetting_metrics_leaves_all_or_the_rest(tmp_path):
    run = saved_run(tmp_path / "run")
    for step in range(1, 5):
        run.report({"step": step})
    whole = run.metrics()
    left = left_by_kills(run, lambda: run.forget_metrics_after(2), tmp_path)
    assert left[0].metrics() == whole and run.metrics() == whole[:2]
    assert all(each.metrics() in (whole, whole[:2]) for each in left)


def test_a_kill_while_beginning_leaves_no_run_or_a_whole_one(tmp_path):
    run = dataclasses.replace(saved_run(tmp_path / "other"), directory=tmp_path / "run")
    left = [*left_by_kills(run, run.create, tmp_path), run]
    whole = [each for each in left if runs.is_run(each.directory)]
    assert [TranslationRun.open(each.directory) for each in whole] == whole
    assert len(left) > 3 and run in whole


def files_of(run: TranslationRun, step: int, pattern: str = "*") -> list[Path]:
    files = (run.directory / "checkpoints" / str(step)).rglob(pattern)
    return [file for file in files if file.is_file()]


def flip_a_bit_of(run: TranslationRun, step: int) -> None:
    one_bit_flipped(files_of(run, step, "d/*")[0])


def test_any_damage_to_any_file_is_noticed_and_the_checkpoint_before_is_taken(tmp_path):
    run = saved_run(tmp_path / "run", 1, 2)
    digests, pipe = run.directory / "digests", run.directory / "checkpoints" / "2" / "pipe"
    files = [*files_of(run, 2), digests / "2.json"]
    os.mkfifo(pipe)
    with pytest.warns(UserWarning, match="checkpoint 2 is incomplete or damaged"):
        assert run.restore(small_tree())[1] == 1
    pipe.unlink()
    digests.rename(run.directory / "moved")
    assert run.has_checkpoint()  # a damaged one
    with unwarned(), pytest.raises(ValueError, match="damaged"):
        run.restore(small_tree())
    (run.directory / "moved").rename(digests)
    assert len(files) > 5
    for file, damage in itertools.product(files, (one_bit_flipped, cut_short, Path.unlink)):
        content = file.read_bytes()
        damage(file)
        with pytest.warns(UserWarning, match="checkpoint 2 is incomplete or damaged"):
            tree, step = run.restore(small_tree())
        assert step == 1
        assert_equal(tree, small_tree(1))
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
    run = saved_run(tmp_path / "run", 1)
    run.report({"step": 1})
    marker = tmp_path / "was run"
    hostile = [pickle.dumps(Hostile(marker), protocol=0), b"[" * 100_000, b"{}"]
    hostile.append(f"__import__('os').mkdir({str(marker)!r})".encode())
    hostile.append(b'{"__class__": "os.system", "item_handlers": 3, "tree_metadata": 3}')
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
                assert_equal(opened.restore(small_tree())[0], small_tree(1))
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


def test_other_content_in_a_file_of_a_run_is_refused(tmp_path):
    run = saved_run(tmp_path / "run")
    for line in ("{", "3", "[]", '{"loss": 1}', '{"step": "1"}', ""):
        (run.directory / "metrics.jsonl").write_text(f'{{"step": 1}}\n{line}\n')
        with pytest.raises(ValueError, match=":2: expected a record of metrics, got"):
            TranslationRun.open(run.directory).metrics()
    config = run.directory / "config.json"
    about = json.loads(config.read_text())
    languages = ({"languages": "de"}, {"languages": ["de", 3]})
    for change in ({"path": 3}, {"fingerprint": None}, *languages):
        config.write_text(json.dumps(about | {"text": about["text"] | change}))
        with pytest.raises(ValueError, match="expected path, languages and fingerprint"):
            TranslationRun.open(run.directory)
    for content in ("[]", '{"format": "jattn-translation-run"}', "{"):
        config.write_text(content)
        with pytest.raises((ValueError, FileNotFoundError), match="expected"):
            TranslationRun.open(run.directory)


def test_what_is_best_and_how_long_ago():
    for losses, best, waited in (
        ([], None, 0),
        ([2.0], 3, 0),
        ([2.0, 1.0, 3.0], 6, 1),
        ([2.0, 1.0, 1.0, 1.0], 6, 2),  # as good is not better
        ([None, None], None, 2),  # a loss that is no number
        ([None, 2.0, None, None], 6, 2),
        ([0.0, 1.0], 3, 1),
    ):
        records = [{"step": 3 * n, "validation_loss": x} for n, x in enumerate(losses, start=1)]
        records = [{"step": 1, "loss": 9.0}, *records, {"step": 100, "loss": 1.0}]
        best_record = stopping.best(records)
        assert (best_record and best_record["step"]) == best
        assert stopping.waited(records) == waited
        assert not stopping.has_stopped(records, 0)
        assert stopping.has_stopped(records, 2) == (waited >= 2)


PATIENCE = 2
LOSSES = [5.0, 2.0, 3.0, 2.0, 1.0]  # training stops before the last; the second is best


@functools.cache
def small_bench() -> Bench:
    """A bench with three batches in an epoch, and checkpoints also within epochs."""
    changes = ["steps=0", f"epochs={len(LOSSES)}", f"patience={PATIENCE}", "schedule=constant"]
    changes += ["checkpoint_every=4", "report_every=2", "sentences=40", "rows_per_batch=16"]
    return make_bench(TINY.changed([*changes, "tokens_per_batch=0"]))


def digest(params: Any) -> str:
    arrays = [np.asarray(params[name]).tobytes() for name in sorted(params)]
    return hashlib.sha256(b"".join(arrays)).hexdigest()


@functools.cache
def losses_of_params() -> dict[str, float]:
    """The validation loss of the parameters at the end of each epoch, by their digests."""
    parts, seen = small_bench(), []
    parts.loop(validate=lambda params: seen.append(digest(params)) or {}).run(parts.init_state())
    assert len(set(seen)) == len(LOSSES)
    return dict(zip(seen, LOSSES, strict=True))


def train(run: TranslationRun, *, calls: int | None = None) -> None:
    """Trains as the command does, from the last checkpoint. With `calls`, the training is killed
    at that call to save or report."""
    parts = small_bench()
    state, last_step = parts.init_state(), 0
    if run.steps():
        saved, last_step = run.restore(parts.first_state)
        state = jax.tree.map(jnp.asarray, saved)
    run.forget_metrics_after(last_step)
    counter = itertools.count(1)

    def killed_at(function: Any) -> Any:
        def call(*arguments: Any) -> None:
            if next(counter) == calls:
                raise Killed
            function(*arguments)

        return call

    loop = parts.loop(
        report=killed_at(run.report),
        save=killed_at(lambda state: run.save(state, int(state.step))),
        validate=lambda params: {"validation_loss": losses_of_params()[digest(params)]},
        stops=lambda: stopping.has_stopped(run.metrics(), PATIENCE),
    )
    loop.run(state)


def begun(directory: Path) -> TranslationRun:
    parts = small_bench()
    run = parts.run(directory, parts.config)
    run.create()
    return run


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> TranslationRun:
    with plain_jax():
        run = begun(tmp_path_factory.mktemp("runs") / "whole")
        train(run)
    return run


@pytest.mark.slow
def test_training_stops_when_it_has_waited_and_the_best_parameters_count(uninterrupted):
    steps = [record["step"] for record in uninterrupted.metrics() if "validation_loss" in record]
    assert steps == [3, 6, 9, 12]
    params, used = uninterrupted.parameters(small_bench().model.shapes)
    assert used == [6]
    assert losses_of_params()[digest(params)] == 2.0
    assert uninterrupted.steps() == [6, 8, 9, 12]  # the best, and the last three


@pytest.mark.one_in(5, slow=True)
@pytest.mark.parametrize("calls", [9, 1, 8, 12, 15])
def test_a_run_killed_anywhere_ends_like_the_uninterrupted_one(uninterrupted, tmp_path, calls):
    run = begun(tmp_path / "run")
    with pytest.raises(Killed):
        train(run, calls=calls)
    train(run)
    assert timeless(run.metrics()) == timeless(uninterrupted.metrics())
    assert run.steps() == uninterrupted.steps()
    like, shapes = small_bench().first_state, small_bench().model.shapes
    assert_equal(run.restore(like), uninterrupted.restore(like))
    assert_equal(run.parameters(shapes), uninterrupted.parameters(shapes))


@pytest.mark.slow
def test_a_run_whose_last_checkpoint_is_damaged_ends_the_same(uninterrupted, tmp_path):
    """If the best checkpoint is damaged, the last one is used."""
    shutil.copytree(uninterrupted.directory, tmp_path / "run")
    run = TranslationRun.open(tmp_path / "run")
    like = small_bench().first_state
    state, step = run.restore(like)
    digests = run.directory / "digests" / f"{step}.json"
    original = digests.read_text()
    for array in state.params.values():
        array.flat[0] += 1
    run.save(state, step)
    digests.write_text(original)
    with pytest.warns(UserWarning, match=f"checkpoint {step} is incomplete or damaged"):
        train(run)
    assert timeless(run.metrics()) == timeless(uninterrupted.metrics())
    assert_equal(run.restore(like), uninterrupted.restore(like))
    flip_a_bit_of(run, 6)
    with pytest.warns(UserWarning, match="checkpoint 6 is incomplete or damaged"):
        assert run.parameters(small_bench().model.shapes)[1] == [12]


def test_without_patience_the_latest_checkpoints_are_kept(tmp_path):
    run = saved_run(tmp_path / "run")
    for step in range(1, 6):
        run.report({"step": step, "validation_loss": float(step)})
        run.save(small_tree(step), step)
    assert run.steps() == [3, 4, 5]
    assert float(run.restore(small_tree())[0].params["a/kernel"][0, 0]) == 5


def test_the_mean_is_taken_in_float64_of_the_last_checkpoints(tmp_path):
    run = saved_run(tmp_path / "run", 7.0, 1e8, averaged_checkpoints=4)
    params, steps = run.parameters(small_tree().params)
    assert steps == [1, 2] and float(params["a/kernel"][0, 0]) == np.float32((7 + 1e8) / 2)
    for step, scale in ((3, 1.0), (4, -1e8), (5, 3.0)):  # float32 would add to 3 and not to 4
        run.save(small_tree(scale), step)
    assert run.steps() == [2, 3, 4, 5]
    params, steps = run.parameters(small_tree().params)
    assert steps == [2, 3, 4, 5]
    assert params["a/kernel"].dtype == np.float32 and params["b"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(params["a/kernel"], np.ones((2, 3)))
    np.testing.assert_array_equal(params["b"].astype(np.float32), np.ones(4))


def test_a_damaged_checkpoint_is_left_out_of_the_mean_and_written_anew(tmp_path):
    run = saved_run(tmp_path / "run", 1.0, 2.0, 4.0, averaged_checkpoints=3)
    flip_a_bit_of(run, 2)
    with pytest.warns(UserWarning, match="checkpoint 2 is incomplete or damaged"):
        params, steps = run.parameters(small_tree().params)
    assert steps == [1, 3] and float(params["a/kernel"][0, 0]) == 2.5
    flip_a_bit_of(run, 3)
    with pytest.warns(UserWarning, match="checkpoint [23] is incomplete or damaged"):
        assert run.restore(small_tree())[1] == 1
    run.save(small_tree(20.0), 2)
    tree, step = run.restore(small_tree())
    assert step == 2 and float(tree.params["a/kernel"][0, 0]) == 20


@pytest.mark.exhaustive
def test_early_stopping_from_the_command_line(tmp_path, capsys, monkeypatch):
    losses = iter([3.0, 2.0, 2.5, 2.25])
    monkeypatch.setattr(evaluation.Evaluator, "token_loss", lambda *_: next(losses))
    run = str(tmp_path / "run")
    changes = ("steps=0", "epochs=9", "patience=2", "sentences=40", "rows_per_batch=16")
    options = set_words(*changes, "tokens_per_batch=0")
    assert cli.main(["train", "--preset", "tiny", "--run", run, *options]) == 0
    printed = capsys.readouterr().out
    assert "stopped early: 2 epochs without a lower validation loss" in printed
    assert "best validation, after step 6: loss 2.0000" in printed
    assert "the parameters after step 6;" in printed
    assert cli.main(["train", "--run", run, "--resume"]) == 2
    assert "has already stopped early, after step 12" in capsys.readouterr().err
