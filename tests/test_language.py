"""The language experiment: its text, its loss, and its commands."""

import contextlib
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments.language import __main__ as cli
from experiments.language import model as models
from experiments.language import text, training
from experiments.language.runs import LanguageRun
from experiments.language.settings import LanguageSettings
from experiments.runs.locking import locked
from tests.arrays import assert_equal
from tests.commands import full_after
from tests.conftest import expect
from tests.test_translation import assert_refused, set_words


pytestmark = pytest.mark.usefixtures("as_users_run_it")
TINY = ["features=12", "layers=1", "heads=2", "kv_heads=1", "feed_forward=10", "length=8"]
TINY += ["rows=3", "steps=6", "report_every=3", "warmup=2", "dropout_rate=0.2"]
SET = set_words(*TINY)
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
    expect(ValueError, "the model does not know: 'X é'", characters.encode, "dog éX")


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
    expect(ValueError, "expected at least 20 characters, got 19", text.split, tokens[:19], 9)


def test_loss_by_the_formula():
    model = models.make(LanguageSettings().changed(TINY), 7)
    rows = np.random.default_rng(0).integers(0, 7, (3, 9)).astype(np.int32)
    logits = nnx.jit(lambda model, x: model(x, deterministic=True))(model, rows[:, :-1])
    log_p = jax.nn.log_softmax(logits)
    expected = -np.take_along_axis(np.asarray(log_p), rows[:, 1:, None], axis=-1).mean()
    got = jax.jit(models.mean_loss, static_argnums=0)(*nnx.split(model), jnp.asarray(rows))
    np.testing.assert_allclose(got, expected, rtol=1e-5)


def run_command(*arguments: object) -> int:
    return cli.main(list(map(str, arguments)))


def results_of(directory):
    """The last state of a run and its losses."""
    run = LanguageRun.open(directory)
    _, state = training.init_state(run)
    return run.restore(state)[0], [record["loss"] for record in run.metrics()]


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
    command = f"python -m experiments.language train --run {parts} --resume"
    assert f"goes on with: {command}" in capsys.readouterr().err
    with (parts / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 4, "lo')  # cut short
    assert run_command("train", "--run", parts, "--resume") == 0
    assert_equal(*map(results_of, (whole, parts)))

    capsys.readouterr()
    write = ("write", "--run", whole, "--prompt", "der hund schl", "--characters", 20)
    assert run_command(*write) == 0
    written = capsys.readouterr().out
    assert written.startswith("der hund schl") and len(written) == 13 + 20 + 1
    assert set(written) <= set(TEXT)
    assert_refused((*write[:4], "é"), "the model does not know: 'é'", capsys, cli.main)
    assert run_command("train", "--text", file, "--run", whole) == 2
    assert run_command("write", "--run", tmp_path / "none") == 2


def test_impossible_sizes_and_numbers_are_one_clear_line(file, tmp_path, capsys):
    for settings, message in (
        ("features=4294967296", "features: expected less than or equal to 262144"),
        ("layers=100000", "layers: expected less than or equal to 256"),
        ("seed=4294967296", "seed: expected less than 4294967296"),
        ("heads=5", "num_heads"),
        ("features=262144 feed_forward=262144", "parameters takes at least"),
    ):
        command = ("train", "--text", file, "--run", tmp_path / "run", *SET)
        assert_refused((*command, *set_words(*settings.split())), message, capsys, cli.main)
        assert not (tmp_path / "run").exists()
    for name, wrong in (("characters", (0, 10**11)), ("seed", (-1, 2**32))):
        for value in wrong:
            message = f"argument --{name}: expected at "
            assert_refused(("write", f"--{name}", value), message, capsys, cli.main)


def a_run(directory, file) -> LanguageRun:
    content = file.read_text("utf-8")
    settings, characters = LanguageSettings().changed(TINY), text.Characters.of(content)
    run = LanguageRun(directory, settings, characters, str(file), text.fingerprint(content))
    run.create()
    return run


def test_training_interrupted_early_resumes(file, tmp_path, capsys, monkeypatch):
    """There is no checkpoint yet."""
    monkeypatch.setattr(training, "_step", interrupt)
    directory = tmp_path / "run"
    assert run_command("train", "--text", file, "--run", directory, *SET) == 130
    command = f"python -m experiments.language train --run {directory} --resume"
    assert f"goes on with: {command}" in capsys.readouterr().err
    assert run_command("train", "--run", directory, "--resume") == 130
    assert "begins anew: no checkpoint yet" in capsys.readouterr().out


def test_one_process_at_a_time_trains_in_a_run(file, tmp_path, capsys, monkeypatch):
    run, vacant = a_run(tmp_path / "run", file), tmp_path / "vacant"

    def check_locked(*_: object) -> None:
        for directory in (run.directory, vacant):
            expect(BlockingIOError, "is in use", locked(directory).__enter__)
        raise KeyboardInterrupt

    resume = ("train", "--run", run.directory, "--resume")
    begin = ("train", "--text", file, "--run", vacant, *SET)
    with locked(run.directory), locked(vacant):
        assert_refused(resume, f"{run.directory} is in use: process ", capsys, cli.main)
        assert_refused(begin, f"{vacant} is in use: process ", capsys, cli.main)
        assert [path.name for path in vacant.iterdir()] == ["lock"]
    monkeypatch.setattr(training, "_step", check_locked)
    with locked(vacant):
        assert run_command(*resume) == 130
    with locked(run.directory):
        assert run_command(*begin) == 130


def test_what_is_no_run_gets_no_lock(file, tmp_path, capsys):
    for options in (("--resume",), ("--text", file, *SET)):
        assert_refused(("train", "--run", tmp_path, *options), "error: run: ", capsys, cli.main)
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


@pytest.mark.parametrize("name", ["held-out loss is nan", "parameters are not finite"])
def test_a_diverged_state_is_not_saved(name, file, tmp_path, capsys, monkeypatch):
    def diverge(settings, definition, state, rows, number):
        factor = np.float32(np.nan if number == 2 else 1)
        variables = jax.tree.map(lambda x: x * factor, state.variables)
        return state._replace(variables=variables), jnp.float32(1)

    monkeypatch.setattr(training, "_step", diverge)
    if "parameters" in name:
        monkeypatch.setattr(models, "mean_loss", lambda *_: 1.0)
    directory = tmp_path / "run"
    options = set_words(*TINY, "report_every=1")
    assert run_command("train", "--text", file, "--run", directory, *options) == 1
    message = "training stopped; the last checkpoint is that after step 1\n"
    assert capsys.readouterr().err.endswith(f"error: step 2: the {name}; {message}")
    run = LanguageRun.open(directory)
    assert run.last_step() == 1 and [record["step"] for record in run.metrics()] == [1]


def unchanged(settings, definition, state, rows, number):
    return state, jnp.float32(1)


def test_a_checkpoint_that_cannot_be_written_is_one_line(
    file, tmp_path, capfd, caplog, monkeypatch
):
    write = LanguageRun.save

    def save(run: LanguageRun, state: object, step: int) -> None:
        with full_after(1000) if step == 6 else contextlib.nullcontext():
            write(run, state, step)

    monkeypatch.setattr(training, "_step", unchanged)
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(LanguageRun, "save", save)
        assert run_command("train", "--text", file, "--run", run, *SET) == 1
    reason = "checkpoint 6 could not be written: File too large; checkpoint 3 is whole"
    advice = f"training goes on with: python -m experiments.language train --run {run} --resume"
    assert capfd.readouterr().err == f"error: {run}: {reason}; {advice}\n"
    assert "exception" not in caplog.text
    assert run_command("train", "--run", run, "--resume") == 0
    assert "goes on after step 3" in capfd.readouterr().out


def test_training_is_not_resumed_on_another_text(file, tmp_path, capsys, monkeypatch):
    run = a_run(tmp_path / "run", file)
    resume = ("train", "--run", run.directory, "--resume")
    file.write_text(TEXT[::-1], "utf-8")
    message = f"{run.directory} was started differently: the training text"
    assert_refused(resume, message, capsys, cli.main)
    file.write_text("quite different characters\n" * 20, "utf-8")
    assert_refused(resume, message, capsys, cli.main)

    file.write_text(TEXT[::-1], "utf-8")  # runs of earlier versions have no fingerprint
    monkeypatch.setattr(training, "_step", interrupt)
    content = json.loads((run.directory / "config.json").read_text("utf-8"))
    assert content.pop("fingerprint")
    (run.directory / "config.json").write_text(json.dumps(content), "utf-8")
    assert run_command(*resume) == 130


def test_a_text_that_is_empty_or_no_file_is_one_clear_line(tmp_path, capsys):
    empty = tmp_path / "empty.txt"
    empty.touch()
    reader, writer = os.pipe()
    with os.fdopen(reader), os.fdopen(writer, "w") as pipe:
        pipe.write(TEXT)
        for path, message in (
            (empty, f"{empty}: expected text, got an empty file"),
            (f"/dev/fd/{reader}", f"--text: expected a regular file, got /dev/fd/{reader}"),
            (tmp_path, f"--text: expected a regular file, got {tmp_path}"),
            (tmp_path / "none", "No such file"),
        ):
            command = ("train", "--text", path, "--run", tmp_path / "run", *SET)
            assert_refused(command, message, capsys, cli.main)
    assert not (tmp_path / "run").exists()


def test_nothing_in_a_run_leads_elsewhere(file, tmp_path, capsys):
    run = a_run(tmp_path / "run", file)
    (run.directory / "metrics.jsonl").symlink_to(tmp_path / "elsewhere")
    message = "metrics.jsonl: expected a file or a folder, got a symbolic link"
    for command in (("train", "--resume"), ("write",)):
        assert_refused((*command, "--run", run.directory), message, capsys, cli.main)
    assert not (tmp_path / "elsewhere").exists()


def test_a_configuration_that_is_something_else_is_one_clear_line(file, tmp_path, capsys):
    run = a_run(tmp_path / "run", file)
    for content in ("[" * 200_000, '{"a":' * 200_000, "{", "3"):
        (run.directory / "config.json").write_text(content)
        assert_refused(("write", "--run", run.directory), "error: ", capsys, cli.main)


def test_a_model_that_gives_no_probabilities_writes_nothing(file, tmp_path, capsys):
    run = a_run(tmp_path / "run", file)
    _, state = training.init_state(run)
    variables = jax.tree.map(lambda x: x * np.float32(np.nan), state.variables)
    run.save(state._replace(variables=variables), 1)
    assert run_command("write", "--run", run.directory, "--prompt", "hund") == 1
    assert "the model gives no probabilities (NaN)" in capsys.readouterr().err
    expect(ValueError, "tokens: expected 0..", run.characters.decode, np.array([-1]))


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.slow
def test_learns_to_continue_a_text(file, tmp_path, capsys):
    settings = ["steps=150", "report_every=50", "dropout_rate=0.0", "length=24"]
    options = set_words(*TINY, *settings, "features=32", "rows=8", "learning_rate=0.01")
    run = tmp_path / "run"
    assert run_command("train", "--text", file, "--run", run, *options) == 0
    assert LanguageRun.open(run).metrics()[-1]["validation_loss"] < 0.2
    capsys.readouterr()
    options = ("--prompt", "der hund", "--characters", 60, "--temperature", 0)
    for cache in ((), ("--cache-dtype", "int8"), ("--cache-dtype", "float8_e4m3fn")):
        assert run_command("write", "--run", run, *options, *cache) == 0
        assert capsys.readouterr().out == TEXT[:68] + "\n"
