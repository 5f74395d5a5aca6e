"""What the README says of adding a mask and a score function, done in a copy of the project."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


ROOT = Path(__file__).resolve().parent.parent
SECTION = "## Adding a mask, a score, a kernel"


def snippets() -> list[str]:
    """The blocks of the README's section: a mask, a score function, their rows."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    section = text[text.index(SECTION) :].split("\n## ")[0]
    return re.findall(r"^```py\n(.*?)^```", section, re.MULTILINE | re.DOTALL)


@pytest.mark.slow
def test_a_mask_and_a_score_are_a_class_and_a_row(tmp_path):
    mask, score, rows = snippets()
    for name in ("jattn", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for file, code in (("masks.py", mask), ("scores.py", score)):
        with (tmp_path / "jattn" / file).open("a", encoding="utf-8") as text:
            text.write("\n\n" + code)
    table = tmp_path / "tests" / "cases.py"
    before, after = table.read_text(encoding="utf-8").split("DROPOUT = [\n")
    table.write_text(f"{before}DROPOUT = [\n{rows}{after}", encoding="utf-8")
    wanted = "(values_and_gradients or has_every or poison) and (stripes or gain or has_every)"
    arguments = ["-m", "pytest", "-n0", "-m", "", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, *arguments, "tests/test_contract.py", "-k", wanted],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(re.findall(r"(\d+) passed", done.stdout)[0]) >= 13
