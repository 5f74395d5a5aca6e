"""The pages' examples of adding a mask and a score function, in a copy of the project."""

import re
import shutil
import sys

import pytest

from tests.commands import ROOT, run


def snippets(page: str, section: str) -> list[str]:
    """Returns the blocks of a page's section: a class and its row."""
    text = (ROOT / page).read_text(encoding="utf-8")
    section = text[text.index(section) :].split("\n## ")[0]
    return re.findall(r"^```py\n(.*?)^```", section, re.MULTILINE | re.DOTALL)


@pytest.mark.slow
def test_a_mask_and_a_score_are_a_class_and_a_row(tmp_path):
    mask, mask_row = snippets(".github/CONTRIBUTING.md", "## Adding a mask, a score, a kernel")
    score, score_row = snippets("tests/README.md", "## A row for a score function")
    for name in ("jattn", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for file, code in (("masks.py", mask), ("scores.py", score)):
        with (tmp_path / "jattn" / file).open("a", encoding="utf-8") as text:
            text.write("\n\n" + code)
    table = tmp_path / "tests" / "cases.py"
    head, tail = table.read_text(encoding="utf-8").split("DROPOUT = [\n")
    table.write_text(f"{head}DROPOUT = [\n{mask_row}{score_row}{tail}", encoding="utf-8")
    wanted = "(values_and_gradients or has_every or poison) and (stripes or gain or has_every)"
    arguments = ["-m", "pytest", "-n0", "-m", "", "-p", "no:cacheprovider"]
    command = (sys.executable, *arguments, "tests/test_contract.py", "-k", wanted)
    done = run(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(re.findall(r"(\d+) passed", done.stdout)[0]) >= 13
