"""What commands print: JSON lines for programs, words for people, no controls in files."""

import contextlib
import importlib
import io
import json
import os
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import pytest

from experiments.runs.console import Console, listening, progress, visible_controls
from experiments.translation import __main__ as cli
from experiments.translation import training
from experiments.translation.runs import TranslationRun
from tests.commands import environment, run_python
from tests.conftest import plain_jax
from tests.test_translation import assert_refused, bench, set_words


pytestmark = pytest.mark.usefixtures("as_users_run_it")


class Said(NamedTuple):
    directory: Path
    out: str
    err: str

    @property
    def records(self) -> list[dict[str, Any]]:
        """The lines on stdout, every one of which is a JSON object."""
        return [json.loads(line, parse_constant=pytest.fail) for line in self.out.splitlines()]

    def of(self, event: str) -> list[dict[str, Any]]:
        return [record for record in self.records if record["event"] == event]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def run(directory: Path, command: str, *arguments: Any, stdin: str = "") -> Said:
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, plain_jax():
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode()), newline=""))
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            assert cli.main([command, "--run", str(directory), *map(str, arguments)]) == 0
    return Said(directory, out.getvalue(), err.getvalue())


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Said:
    """A short training with byte-pair encoding on files, whose output a program reads."""
    folder = tmp_path_factory.mktemp("data")
    texts = {"train": [*bench().texts.train, ("", "nothing")]}
    texts["val"] = [*bench().texts.validation, ("☃", "☃")]
    for name, pairs in texts.items():
        for side, suffix in enumerate(("de", "en")):
            lines = "".join(pair[side] + "\n" for pair in pairs)
            (folder / f"{name}.{suffix}").write_text(lines, "utf-8")
    changes = set_words("tokenizer=bpe", "vocabulary_size=150", "steps=4", "report_every=2")
    arguments = ["--preset", "tiny", "--data", folder, *changes]
    return run(folder / "run", "train", "--json", *arguments)


@pytest.mark.slow
def test_training_tells_programs_everything_in_order(trained):
    events = "read read encoded start progress progress validation end".split()
    assert [record["event"] for record in trained.records] == events
    train, validation = trained.of("read")
    assert (train["read"], train["kept"], train["empty"]) == (301, 300, 1)
    assert validation["kept"] == 21
    assert trained.of("encoded")[0]["source_unknown"] == 0
    (start,) = trained.of("start")
    assert start["steps"] == 4 and start["source_size"] == start["target_size"] == 150
    progress = trained.of("progress")
    assert [record["step"] for record in progress] == [2, 4]
    assert all(record["loss"] > 0 and record["tokens_per_second"] > 0 for record in progress)
    (end,) = trained.of("end")
    assert end["steps"] == 4 and end["used"] == [4] and not end["stopped_early"]
    assert end["run"] == str(trained.directory) and end["seconds"] > 0
    (validated,) = trained.of("validation")
    assert end["best"] == {name: validated[name] for name in validated if name != "event"}
    assert all(Path(file).stat().st_size > 5000 for file in end["pictures"])
    emitted = [*trained.of("progress"), *trained.of("validation")]
    without = [{k: v for k, v in record.items() if k != "event"} for record in emitted]
    opened = TranslationRun.open(trained.directory)
    assert without == opened.metrics()
    # The vocabularies are learned from the training text alone.
    assert opened.source.unknown("☃") == opened.target.unknown("☃") == ["☃"]


@pytest.mark.slow
def test_people_get_the_same_in_words_on_stderr(trained):
    """They also get translations of held-out sentences; nothing moves without a terminal."""
    for words in (
        "read 301 pairs, kept 300, dropped 1 with an empty side",
        "vocabularies of 150 and 150 tokens",
        "validation after step 4: loss",
        "trained 4 steps in",
        "best validation, after step 4: loss",
        "the parameters after step 4; metrics.jsonl, pictures/loss.png, pictures/bleu.png",
    ):
        assert trained.err.count(words) == 1
    (validated,) = trained.of("validation")
    samples, pairs = validated["validation_samples"], bench().texts.validation[:3]
    for sample, pair in zip(samples, pairs, strict=True):
        assert (sample["source"], sample["reference"]) == (pair.source, pair.target)
        assert f"  {sample['source']}\n  -> {sample['translation']}\n" in trained.err
    for text in (trained.out, trained.err):
        assert not any(ord(character) < 32 and character != "\n" for character in text)


@pytest.mark.slow
def test_a_terminal_gets_a_bar_with_loss_speed_and_remaining_time(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    measured = training.StepMetrics(*jnp.ones(3))
    step = lambda state, _: (state._replace(step=state.step + 1), measured)  # noqa: E731
    bench().loop(step=step).run(bench().init_state())
    drawn = sys.stderr.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    for part in ("loss=", "tokens/s=", " left", "step/s", "12/12"):
        assert part in drawn


@pytest.mark.slow
def test_programs_get_the_evaluation(trained):
    said = run(trained.directory, "evaluate", "--json", "--beam", 2, "--length-penalty", 1)
    (emitted,) = said.records
    written = json.loads((trained.directory / "evaluation.json").read_text("utf-8"))
    assert emitted == {"event": "evaluation", "set": "validation", **written["validation"]}
    assert emitted["search"] == {"kind": "beam", "beams": 2, "length_penalty": 1}
    assert emitted["steps"] == [4] and emitted.keys() >= {"bleu", "word_bleu", "constructions"}
    (validated,) = trained.of("validation")
    assert emitted["loss"] == pytest.approx(validated["validation_loss"])
    parameters = "the parameters after step 4; beam search, beams 2, length penalty 1.0"
    assert all(x in said.err for x in ("validation: 21 sentences", "word BLEU", parameters))


@pytest.mark.slow
def test_a_run_is_resumed_with_the_same_settings_and_text_alone(trained, capsys):
    resume = ["train", "--run", trained.directory, "--resume"]
    assert_refused(resume, "has already run all its 4 steps", capsys)
    message = "was started differently: features: 16, not 32"
    assert_refused([*resume, "--set", "features=32"], message, capsys)
    path = trained.directory.parent / "train.de"
    text = path.read_text("utf-8")
    path.write_text(text + "der hund schläft .\n", "utf-8")
    assert_refused(resume, "same number of lines", capsys)
    path.write_text(text, "utf-8")


@pytest.mark.slow
def test_stdin_is_read_as_files_are(trained):
    def translated(text: str) -> str:
        return run(trained.directory, "translate", stdin=text).out

    sentence, other = (pair.source for pair in bench().texts.train[:2])
    single = "der\rhund\u2028\x0bschläft\x85\n"
    of_lines = translated(f"{sentence}\n{other}\n{single}")
    assert translated(f"\ufeff{sentence}\r\n \u3000{other} \r\n{single}") == of_lines
    assert of_lines.count("\n") == 3


@pytest.mark.parametrize("wrong", [b"gut\nsch\xf6n\n", b"gut\nsch\0n\n"])
def test_input_that_is_no_text_is_one_clear_line(wrong, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(wrong)))
    command = ["translate", "--run", "nowhere"]
    assert_refused(command, "error: stdin:2: expected UTF-8 text, got", capsys)
    assert_refused([*command, os.fsdecode(b"sch\xf6n")], "expected UTF-8 text, got", capsys)


def test_words_are_utf8_whatever_the_platform_says():
    code = (
        "import sys; from experiments.runs.console import speak_utf8;"
        r"speak_utf8(); print('\xfc \u2603'); print('\xe9', file=sys.stderr)"
    )
    changes = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = run_python("-c", code, env=environment(**changes), encoding="utf-8", check=True)
    assert (done.stdout, done.stderr) == ("ü ☃\n", "é\n")


@pytest.mark.parametrize("name", ["benchmark", "gallery", "scaling", "walkthrough"])
def test_experiments_print_utf8_whatever_the_platform_says(name, monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    with pytest.raises(SystemExit):
        importlib.import_module(f"experiments.{name}.__main__").main(["--help"])
    assert stream.encoding == "utf-8"


HOSTILE = "a\tb\x1b]0;title\x07\r\x9b2J\x7f\u202eesrever\u2066\u2028größe ☃\n"
SHOWN = "a\tb" + r"\x1b]0;title\x07\x0d\x9b2J\x7f\u202eesrever\u2066\u2028größe ☃" + "\n"


@pytest.mark.parametrize("kind", [Terminal, io.StringIO])
@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_only_a_terminal_is_shown_control_characters_and_obeys_none(name, kind, monkeypatch):
    stream = kind()
    monkeypatch.setattr(sys, name, stream)
    with visible_controls():
        print(HOSTILE, end="", file=getattr(sys, name))
        getattr(sys, name).writelines([HOSTILE])
    assert stream.getvalue() == 2 * (SHOWN if kind is Terminal else HOSTILE)
    assert getattr(sys, name) is stream


def test_the_bar_still_moves_the_cursor(monkeypatch):
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    with visible_controls(), progress(3, unit="step") as bar:
        bar.update(3)
        bar.refresh()
    assert "\r" in stream.getvalue() and "\\x0d" not in stream.getvalue()


@pytest.mark.slow
def test_a_sentence_cannot_command_the_terminal(trained):
    out, err = Terminal(), Terminal()
    arguments = ["translate", "--run", str(trained.directory), "ein \x1b[2J\x07 bellt"]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        assert cli.main(arguments) == 0
        with pytest.raises(SystemExit):
            cli.main([*arguments, "--\x1b[2J"])
    assert r"unknown characters: \x1b, [, 2, \x07" in err.getvalue()
    assert r"unrecognized arguments: --\x1b[2J" in err.getvalue()
    assert "\x1b" not in err.getvalue() + out.getvalue() and len(out.getvalue()) > 1


@pytest.mark.parametrize("columns", [48, 120])
def test_a_bar_is_not_cut_off(columns):
    terminal = Terminal()
    with contextlib.redirect_stderr(terminal), progress(1200, unit="step", initial=540) as bar:
        bar.dynamic_ncols = lambda _: (columns, 24)  # pyright: ignore[reportAttributeAccessIssue]
        bar.set_postfix({"loss": "0.123", "tokens/s": "15,056"})
        line = str(bar)
    assert len(line) <= columns
    percentage, drawn, text = re.fullmatch(r"( *\d+%\|)(.*)(\|.*)", line).groups()  # pyright: ignore[reportOptionalMemberAccess]
    assert percentage == " 45%|" and len(drawn.rstrip()) >= 8
    assert "loss=0.123" in text and " left" in text
    assert ("tokens/s=15,056" in text and "540/1200" in text) == (columns > 80)


def test_while_a_program_listens_only_json_is_on_stdout(capsys):
    with listening(True) as console:
        print("words")
        console.emit("told", number=float("nan"), text="\u2028")
    print("after")
    Console().emit("unheard")
    output = capsys.readouterr()
    assert output.err == "words\n"
    first, second = output.out.split("\n")[:2]
    assert json.loads(first) == {"event": "told", "number": None, "text": "\u2028"}
    assert second == "after"
