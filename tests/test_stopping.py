"""Early stopping, averaging, checkpoints: a run that was killed ends like an uninterrupted run."""

import dataclasses
import functools
import hashlib
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.runs import stopping
from experiments.translation import __main__ as cli
from experiments.translation import evaluation, training
from experiments.translation.batches import Batches
from experiments.translation.presets import PRESETS
from experiments.translation.runs import TranslationRun
from experiments.translation.text import encode_pairs
from tests.test_translation import (
    Bench,
    Killed,
    as_users_run_it,
    assert_equal,
    bench,
    cut_short,
    one_bit_flipped,
    plain_jax,
    saved_run,
    small_tree,
    timeless,
)


assert as_users_run_it
TINY = PRESETS["tiny"]


def records(*losses: float | None) -> list[dict[str, Any]]:
    """Metrics of a run with these validation losses every three steps, and two other reports."""
    validations = [
        {"step": 3 * n, "validation_loss": loss} for n, loss in enumerate(losses, start=1)
    ]
    return [{"step": 1, "loss": 9.0}, *validations, {"step": 100, "loss": 1.0}]


@pytest.mark.parametrize(
    ("losses", "best", "waited"),
    [
        ([], None, 0),
        ([2.0], 3, 0),
        ([2.0, 1.0, 3.0], 6, 1),
        ([2.0, 1.0, 1.0, 1.0], 6, 2),  # as good is not better
        ([None, None], None, 2),  # a loss that is no number
        ([None, 2.0, None, None], 6, 2),
        ([0.0, 1.0], 3, 1),
    ],
)
def test_what_is_best_and_how_long_ago(losses, best, waited):
    best_record = stopping.best(records(*losses))
    assert (best_record and best_record["step"]) == best
    assert stopping.waited(records(*losses)) == waited
    assert not stopping.has_stopped(records(*losses), 0)
    assert stopping.has_stopped(records(*losses), 2) == (waited >= 2)


PATIENCE = 3
LOSSES = [5.0, 3.0, 2.0, 4.0, 2.0, 3.0, 1.0]  # training stops before the last; the third is best
STOPS_AT = 6


@functools.cache
def small_bench() -> Bench:
    """A bench with three batches in an epoch, and checkpoints also within epochs."""
    parts = bench()
    pairs, _ = encode_pairs(parts.texts.train[:40], parts.source, parts.target)
    batches = Batches(pairs, rows_per_batch=16, max_shapes=1)
    changes = ("steps=0", f"epochs={len(LOSSES)}", f"patience={PATIENCE}", "schedule=constant")
    config = TINY.changed([*changes, "checkpoint_every=4", "report_every=2"])
    optimiser = training.make_optimiser(config, 3 * len(LOSSES))
    train_step = training.make_step(parts.model, optimiser, config)
    return dataclasses.replace(
        parts, config=config, batches=batches, optimiser=optimiser, step=train_step
    )


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
    state = parts.init_state()
    if run.steps():
        saved, last_step = run.restore(jax.eval_shape(parts.init_state))
        state = jax.tree.map(jnp.asarray, saved)
        run.forget_metrics_after(last_step)
    else:
        run.forget_metrics_after(0)
    count = 0

    def killed_at(function: Any) -> Any:
        def call(*arguments: Any) -> None:
            nonlocal count
            count += 1
            if count == calls:
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
    per_epoch = len(small_bench().batches)
    assert per_epoch == 3
    steps = [record["step"] for record in uninterrupted.metrics() if "validation_loss" in record]
    assert steps == [per_epoch * n for n in range(1, STOPS_AT + 1)]
    params, used = uninterrupted.parameters(bench().model.shapes)
    assert used == [3 * per_epoch]
    assert losses_of_params()[digest(params)] == 2.0
    assert uninterrupted.steps() == [9, 15, 16, 18]  # the best, and the last three


@pytest.mark.one_in(5, slow=True)
@pytest.mark.parametrize("calls", [1, 9, 14, 15, 22])
def test_a_run_killed_anywhere_ends_like_the_uninterrupted_one(uninterrupted, tmp_path, calls):
    run = begun(tmp_path / "run")
    with pytest.raises(Killed):
        train(run, calls=calls)
    train(run)
    assert timeless(run.metrics()) == timeless(uninterrupted.metrics())
    assert run.steps() == uninterrupted.steps()
    for part in (small_bench().init_state, lambda: small_bench().init_state().params):
        like = jax.eval_shape(part)
        prefix = "" if isinstance(like, training.TrainingState) else "params/"
        assert_equal(run.restore(like, prefix=prefix), uninterrupted.restore(like, prefix=prefix))
    assert_equal(
        run.parameters(bench().model.shapes), uninterrupted.parameters(bench().model.shapes)
    )


@pytest.mark.slow
def test_a_run_whose_last_checkpoint_is_damaged_ends_the_same(uninterrupted, tmp_path):
    shutil.copytree(uninterrupted.directory, tmp_path / "run")
    run = TranslationRun.open(tmp_path / "run")
    like = jax.eval_shape(small_bench().init_state)
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


@pytest.mark.slow
def test_where_the_best_checkpoint_is_damaged_the_last_is_taken(uninterrupted, tmp_path):
    shutil.copytree(uninterrupted.directory, tmp_path / "run")
    run = TranslationRun.open(tmp_path / "run")
    one_bit_flipped(next((run.directory / "checkpoints" / "9").rglob("d/*")))
    with pytest.warns(UserWarning, match="checkpoint 9 is incomplete or damaged"):
        assert run.parameters(bench().model.shapes)[1] == [18]


def test_without_patience_the_latest_checkpoints_are_kept(tmp_path):
    run = saved_run(tmp_path / "run")
    for step in range(1, 6):
        run.report({"step": step, "validation_loss": float(step)})
        run.save(small_tree(float(step)), step)
    assert run.steps() == [3, 4, 5]
    assert float(run.restore(small_tree())[0].params["a/kernel"][0, 0]) == 5


def averaged(directory: Path, average: int, *scales: float) -> TranslationRun:
    run = bench().run(directory, dataclasses.replace(TINY, averaged_checkpoints=average))
    run.create()
    for step, scale in enumerate(scales, start=1):
        run.save(small_tree(scale), step)
    return run


def test_the_mean_is_taken_in_float64_of_the_last_checkpoints(tmp_path):
    scales = (7.0, 1e8, 1.0, -1e8, 3.0)  # which float32 would add up to 3 and not to 4
    run = averaged(tmp_path / "run", 4, *scales)
    assert run.steps() == [2, 3, 4, 5]
    params, steps = run.parameters(small_tree().params)
    assert steps == [2, 3, 4, 5]
    assert params["a/kernel"].dtype == np.float32 and params["b"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(params["a/kernel"], np.ones((2, 3)))
    np.testing.assert_array_equal(params["b"].astype(np.float32), np.ones(4))


def test_there_may_be_fewer_checkpoints_than_are_averaged(tmp_path):
    params, steps = averaged(tmp_path / "run", 4, 1.0, 2.0).parameters(small_tree().params)
    assert steps == [1, 2] and float(params["a/kernel"][0, 0]) == 1.5


@pytest.mark.parametrize("damage", [one_bit_flipped, cut_short, Path.unlink])
def test_a_damaged_checkpoint_is_left_out_of_the_mean(tmp_path, damage):
    run = averaged(tmp_path / "run", 3, 1.0, 2.0, 4.0)
    damage(next((run.directory / "checkpoints" / "2").rglob("d/*")))
    with pytest.warns(UserWarning, match="checkpoint 2 is incomplete or damaged"):
        params, steps = run.parameters(small_tree().params)
    assert steps == [1, 3] and float(params["a/kernel"][0, 0]) == 2.5


def test_a_run_that_went_back_behind_a_damaged_checkpoint_writes_it_anew(tmp_path):
    run = saved_run(tmp_path / "run", 1, 2)
    one_bit_flipped(next((run.directory / "checkpoints" / "2").rglob("d/*")))
    with pytest.warns(UserWarning, match="checkpoint 2"):
        assert run.restore(small_tree())[1] == 1
    run.save(small_tree(20.0), 2)
    tree, step = run.restore(small_tree())
    assert step == 2 and float(tree.params["a/kernel"][0, 0]) == 20


def test_arrays_of_another_shape_are_refused_before_they_are_read(tmp_path, monkeypatch):
    run = saved_run(tmp_path / "run", 1)
    wrong = small_tree().params | {"a/kernel": jax.ShapeDtypeStruct((10**6, 10**6), jnp.float32)}
    monkeypatch.setattr("orbax.checkpoint.CheckpointManager.restore", pytest.fail)
    with pytest.raises(ValueError, match=r"float32\[2, 3\], not float32\[1000000, 1000000\]"):
        run.restore(wrong, prefix="params/")


@pytest.mark.parametrize("line", ["{", "3", "[]", '{"loss": 1}', '{"step": "1"}', ""])
def test_damaged_metrics_are_named(tmp_path, line):
    run = saved_run(tmp_path / "run")
    run.report({"step": 1})
    with (run.directory / "metrics.jsonl").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2: expected a record of metrics, got"):
        run.metrics()


@pytest.mark.slow
def test_early_stopping_from_the_command_line(tmp_path, capsys, monkeypatch):
    losses = iter([3.0, 2.0, 2.5, 2.25])
    monkeypatch.setattr(evaluation.Evaluator, "token_loss", lambda *_: next(losses))
    run = str(tmp_path / "run")
    settings = ("steps=0", "epochs=9", "patience=2", "sentences=40", "rows_per_batch=16")
    changes = [part for text in (*settings, "tokens_per_batch=0") for part in ("--set", text)]
    assert cli.main(["train", "--preset", "tiny", "--run", run, *changes]) == 0
    printed = capsys.readouterr().out
    assert "stopped early: 2 epochs without a lower validation loss" in printed
    assert "best validation, after step 6: loss 2.0000" in printed
    assert "the parameters after step 6;" in printed
    assert cli.main(["train", "--run", run, "--resume"]) == 2
    assert "has already stopped early, after step 12" in capsys.readouterr().err
