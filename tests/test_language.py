"""The language experiment: its text, its loss, and its commands."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments.language import __main__ as cli
from experiments.language import model as models
from experiments.language import text, training
from experiments.language.runs import Run
from experiments.language.settings import Settings
from tests.test_translation import as_users_run_it


__all__ = ["as_users_run_it"]  # a fixture

TINY = ["features=12", "layers=1", "heads=2", "kv_heads=1", "feed_forward=10", "length=8"]
TINY += ["rows=3", "steps=6", "report_every=3", "warmup=2", "dropout_rate=0.2"]
SET = [word for setting in TINY for word in ("--set", setting)]
TEXT = "der hund schläft .\nthe dog sleeps .\n" * 20


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT, "utf-8")
    return path


def test_characters():
    characters = text.Characters.of(TEXT)
    assert len(characters.alphabet) == len(set(TEXT))
    assert characters.decode(characters.encode("schläft\n")) == "schläft\n"
    with pytest.raises(ValueError, match="the model does not know: 'X é'"):
        characters.encode("dog éX")


def test_split_and_batches():
    tokens = np.arange(1000, dtype=np.int32)
    train, validation = text.split(tokens, 9).train, text.split(tokens, 9).validation
    assert [*train, *validation] == [*tokens] and len(validation) == 50
    rows = text.batch(train, 500, 9, (0, 1))
    assert rows.shape == (500, 10) and np.all(np.diff(rows, axis=1) == 1)
    assert 0 <= rows.min() < 20 and 930 < rows.max() <= 949  # from anywhere
    assert np.array_equal(rows, text.batch(train, 500, 9, (0, 1)))
    assert not np.array_equal(rows, text.batch(train, 500, 9, (0, 2)))
    labels = text.in_order(validation, 9, 99)[:, 1:]
    assert labels.ravel().tolist() == validation[1:46].tolist()  # each but the last once
    assert len(text.split(tokens[:20], 9).train) == 10
    with pytest.raises(ValueError, match="expected at least 20 characters, got 19"):
        text.split(tokens[:19], 9)


def test_loss_by_the_formula():
    settings = Settings().changed(TINY)
    model = models.make(settings, 7)
    rows = np.random.default_rng(0).integers(0, 7, (3, 9)).astype(np.int32)
    logits = nnx.jit(lambda model, x: model(x, deterministic=True))(model, rows[:, :-1])
    log_p = jax.nn.log_softmax(logits)
    expected = -np.take_along_axis(np.asarray(log_p), rows[:, 1:, None], axis=-1).mean()
    got = models.mean_loss(*nnx.split(model), jnp.asarray(rows))
    np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_settings():
    assert Settings().changed(["steps=7", "learning_rate=1"]).learning_rate == 1.0
    for given, message in (
        ("step=7", "unknown setting 'step'; nearest: steps"),
        ("steps", "expected NAME=VALUE, got 'steps'"),
        ("steps=many", "steps: expected a valid integer, .*, got 'many'"),
        ("rows=0", "rows: expected greater than or equal to 1, got '0'"),
    ):
        with pytest.raises(ValueError, match=message):
            Settings().changed([given])


def run_command(*arguments: object) -> int:
    return cli.main(list(map(str, arguments)))


def variables_of(directory):
    run = Run.open(directory)
    _, state = training.init_state(run)
    return jax.tree.leaves(run.restore(state)[0])


@pytest.mark.slow
def test_train_interrupted_and_resumed_then_write(file, tmp_path, capsys, monkeypatch):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert run_command("train", "--text", file, "--run", whole, *SET) == 0
    assert "684 characters to train on, 18 different ones" in capsys.readouterr().out
    records = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [3, 6]
    assert all(record["validation_loss"] > 0 for record in records)
    assert (whole / "loss.png").stat().st_size > 1000

    with monkeypatch.context() as patch:
        patch.setattr(cli, "_tell", interrupt)
        assert run_command("train", "--text", file, "--run", parts, *SET) == 130
    assert f"goes on with: train --run {parts} --resume" in capsys.readouterr().err
    with (parts / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 4, "lo')  # cut short
    assert run_command("train", "--run", parts, "--resume") == 0
    for a, b in zip(variables_of(whole), variables_of(parts), strict=True):
        np.testing.assert_array_equal(a, b)
    losses = [[r["loss"] for r in Run.open(d).metrics()] for d in (whole, parts)]
    assert losses[0] == losses[1]

    capsys.readouterr()
    write = ("write", "--run", whole, "--prompt", "der hund schl", "--characters", 20)
    assert run_command(*write) == 0
    written = capsys.readouterr().out
    assert written.startswith("der hund schl") and len(written) == 13 + 20 + 1
    assert set(written) <= set(TEXT)
    assert run_command(*write[:4], "é") == 2
    assert "the model does not know: 'é'" in capsys.readouterr().err
    assert run_command("train", "--text", file, "--run", whole) == 2
    assert run_command("write", "--run", tmp_path / "none") == 2


def interrupt(record: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.slow
def test_learns_to_continue_a_text(file, tmp_path, capsys):
    learning = [
        "--set",
        "steps=150",
        "--set",
        "report_every=50",
        "--set",
        "dropout_rate=0.0",
        "--set",
        "length=24",
    ]
    wider = ["--set", "features=32", "--set", "rows=8", "--set", "learning_rate=0.01"]
    run = tmp_path / "run"
    assert run_command("train", "--text", file, "--run", run, *SET, *learning, *wider) == 0
    assert Run.open(run).metrics()[-1]["validation_loss"] < 0.2
    capsys.readouterr()
    given = ("--prompt", "der hund", "--characters", 60, "--temperature", 0)
    assert run_command("write", "--run", run, *given) == 0
    assert capsys.readouterr().out == TEXT[:68] + "\n"
