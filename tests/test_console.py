"""What commands print: JSON lines for programs, words for people, no control characters in
files."""

import contextlib
import io
import json
import os
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from experiments.runs.console import Console, listening, progress, visible_controls
from experiments.translation import __main__ as cli
from experiments.translation.runs import TranslationRun
from tests.commands import environment, run_python
from tests.conftest import plain_jax
from tests.test_translation import assert_refused, bench


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


def run(directory: Path, *arguments: Any, stdin: str = "") -> Said:
    with pytest.MonkeyPatch.context() as patch, plain_jax():
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode()), newline=""))
        patch.setattr(sys, "stdout", io.StringIO())
        patch.setattr(sys, "stderr", io.StringIO())
        assert cli.main(list(map(str, arguments))) == 0
        written: Any = (sys.stdout, sys.stderr)
        return Said(directory, *(stream.getvalue() for stream in written))


def settings(**changes: Any) -> list[str]:
    return [part for name, value in changes.items() for part in ("--set", f"{name}={value}")]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Said:
    """A short training with byte-pair encoding on files, whose output a program reads."""
    folder = tmp_path_factory.mktemp("data")
    for name, pairs in (("train", bench().texts.train), ("val", bench().texts.validation)):
        for side, suffix in enumerate(("de", "en")):
            lines = "".join(pair[side] + "\n" for pair in pairs)
            (folder / f"{name}.{suffix}").write_text(lines, "utf-8")
    for name, line in (("train.de", ""), ("train.en", "nothing"), ("val.de", "☃"), ("val.en", "☃")):
        with (folder / name).open("a", encoding="utf-8") as file:
            file.write(line + "\n")
    directory = folder / "run"
    changes = settings(tokenizer="bpe", vocabulary_size=150, steps=4, report_every=2)
    arguments = ["--preset", "tiny", "--data", folder, "--run", directory, *changes]
    return run(directory, "train", "--json", *arguments)


@pytest.mark.slow
def test_training_tells_programs_everything_in_order(trained):
    events = [record["event"] for record in trained.records]
    assert events == [
        *("read", "read", "encoded", "start"),
        *("progress", "progress", "validation", "end"),
    ]
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
    assert without == TranslationRun.open(trained.directory).metrics()


@pytest.mark.slow
def test_people_get_the_same_in_words_on_stderr(trained):
    """They also get the translations of some held-out sentences at each validation, and nothing
    moves, because there is no terminal."""
    for words in (
        "read 301 pairs, kept 300, dropped 1 with an empty side",
        "vocabularies of 150 and 150 tokens",
        "validation: loss",
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
    bench().loop().run(bench().init_state())
    drawn = sys.stderr.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    for part in ("loss=", "tokens/s=", " left", "step/s", "12/12"):
        assert part in drawn


@pytest.mark.slow
def test_programs_get_the_evaluation(trained):
    said = run(trained.directory, "evaluate", "--run", trained.directory, "--json", "--beam", 2)
    (emitted,) = said.records
    written = json.loads((trained.directory / "evaluation.json").read_text("utf-8"))
    assert emitted == {"event": "evaluation", "set": "validation", **written["validation"]}
    assert emitted["search"] == {"kind": "beam", "beams": 2, "length_penalty": 0.6}
    assert "validation: 21 sentences" in said.err


@pytest.mark.exhaustive
def test_every_command_knows_pieces_of_words(trained):
    said = run(trained.directory, "plot", "--run", trained.directory)
    assert len(said.out.splitlines()) == 7
    sentence = bench().texts.train[0].source
    arguments = ["--run", trained.directory, "--alignments", "--scores", "--beam", 2]
    said = run(trained.directory, "translate", *arguments, stdin=f"{sentence}\nein ☃ bellt\n")
    assert said.err == "unknown characters: ☃\n"
    pieces = len(TranslationRun.open(trained.directory).source.encode(sentence)) - 1
    links = said.out.split("\n")[0].split("\t")[-1].split()
    assert all(int(link.split("-")[0]) < pieces for link in links)
    assert pieces > len(sentence.split())


@pytest.mark.slow
def test_vocabularies_are_learned_from_training_text_alone(trained):
    opened = TranslationRun.open(trained.directory)
    assert opened.source.unknown("☃") == opened.target.unknown("☃") == ["☃"]


@pytest.mark.slow
def test_stdin_is_read_as_files_are(trained):
    sentence, other = (pair.source for pair in bench().texts.train[:2])
    run_ = ["--run", trained.directory]
    plain = run(trained.directory, "translate", *run_, stdin=f"{sentence}\n{other}\n").out
    odd = f"\ufeff{sentence}\r\n \u3000{other} \r\n"
    assert run(trained.directory, "translate", *run_, stdin=odd).out == plain
    one_line = "der\rhund\u2028\x0bschläft\x85"
    assert run(trained.directory, "translate", *run_, stdin=one_line).out.count("\n") == 1


@pytest.mark.parametrize("wrong", [b"gut\nsch\xf6n\n", b"gut\nsch\0n\n"])
def test_stdin_that_is_no_text_is_one_clear_line(wrong, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(wrong)))
    assert cli.main(["translate", "--run", "nowhere"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: stdin:2: expected UTF-8 text, got") and error.count("\n") == 1


def test_an_argument_that_is_no_text_is_one_clear_line(capsys):
    arguments = ["translate", "--run", "nowhere", os.fsdecode(b"sch\xf6n")]
    assert_refused(arguments, "expected UTF-8 text, got", capsys)


def test_words_are_utf8_whatever_the_platform_says():
    code = (
        "import sys; from experiments.runs.console import speak_utf8;"
        r"speak_utf8(); print('\xfc \u2603'); print('\xe9', file=sys.stderr)"
    )
    changes = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = run_python("-c", code, env=environment(**changes), encoding="utf-8", check=True)
    assert (done.stdout, done.stderr) == ("ü ☃\n", "é\n")


HOSTILE = "a\tb\x1b]0;title\x07\r\x9b2J\x7f\u202eesrever\u2066\u2028größe ☃\n"
SHOWN = "a\tb" + r"\x1b]0;title\x07\x0d\x9b2J\x7f\u202eesrever\u2066\u2028größe ☃" + "\n"


def test_a_terminal_is_shown_control_characters_and_obeys_none(monkeypatch):
    for name in ("stdout", "stderr"):
        stream = Terminal()
        monkeypatch.setattr(sys, name, stream)
        with visible_controls():
            print(HOSTILE, end="", file=getattr(sys, name))
            getattr(sys, name).writelines([HOSTILE])
        assert stream.getvalue() == 2 * SHOWN
        assert getattr(sys, name) is stream


def test_a_file_gets_the_text_unchanged(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    with visible_controls():
        print(HOSTILE, end="")
    assert sys.stdout.getvalue() == HOSTILE  # pyright: ignore[reportAttributeAccessIssue]


def test_the_bar_still_moves_the_cursor(monkeypatch):
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    with visible_controls(), progress(3, unit="step") as bar:
        bar.update(3)
        bar.refresh()
    assert "\r" in stream.getvalue() and "\\x0d" not in stream.getvalue()


@pytest.mark.slow
def test_a_sentence_cannot_command_the_terminal(trained, monkeypatch):
    out, err = Terminal(), Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    arguments = ["translate", "--run", str(trained.directory), "ein \x1b[2J\x07 bellt"]
    with plain_jax():
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
