"""The mutants of `python -m tests.mutants` are mistakes in the code as it stands."""

import shutil

import pytest

from tests import mutants


@pytest.mark.parametrize("name", mutants.MUTANTS)
def test_a_mutant_is_python_and_no_test_is_missing(name, tmp_path):
    mutant = mutants.MUTANTS[name]
    for change in mutant.changes:
        (tmp_path / change.file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(mutants.ROOT / change.file, tmp_path / change.file)
    mutants.apply(name, tmp_path)
    for change in mutant.changes:
        if change.file.endswith(".py"):
            compile((tmp_path / change.file).read_text(encoding="utf-8"), change.file, "exec")
    assert mutant.noticed_by
    for tests in mutant.noticed_by:
        assert (mutants.ROOT / "tests" / f"test_{tests}.py").exists()


def test_a_mutant_that_does_not_apply_says_so(tmp_path, monkeypatch):
    monkeypatch.setitem(mutants.MUTANTS, "stale", mutants.mutant("a.py", "⟦old⇒new⟧", "masks"))
    (tmp_path / "a.py").write_text("old old")
    with pytest.raises(ValueError, match="stands 2 times"):
        mutants.apply("stale", tmp_path)


def test_an_unknown_mutant_is_named(capsys):
    with pytest.raises(SystemExit):
        mutants.main(["nobody"])
    assert "no mutant 'nobody'" in capsys.readouterr().err
