"""The library as users install it: built, in an environment, with the lowest versions."""

import re
import shutil
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

import jattn
from tests import test_readme
from tests.commands import ROOT, clean_environment, run, run_python, script


DECLARED: Any = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT, BACKEND = DECLARED["project"], DECLARED["build-system"]["requires"]
EXTRAS = ("viz", "experiments", "dev")
ON_PYTHON_OF_BOUNDS = sys.version_info[:2] == (3, 11)
BUILD = "from hatchling import build; build.build_sdist('dist')"
SAMPLE = """
import jax
import numpy as np
from flax import nnx

import jattn
from jattn import masks, scores


def loss(q: jax.Array, k: jax.Array, v: jax.Array, slopes: jax.Array) -> jax.Array:
    mask = masks.Causal() & (masks.Window(left=256) | masks.Global(4))
    score = scores.SoftCap(30.0) >> scores.Alibi(slopes)
    out, lse = jattn.attention(q, k, v, mask=mask, score=score, return_lse=True)
    plain = jattn.attention(q, k, v, mask=lambda b, h, q, kv: q >= kv)
    other = jattn.attention(q, k, v, score=lambda s, b, h, q, kv: s + 0.1 * (q - kv))
    found = jattn.statistics(q, k, mask=mask, keys=np.arange(k.shape[-3]) == 0)
    return (out - plain + other).sum() + lse.sum() + found.entropy.sum()


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.attention = jattn.nn.MultiHeadAttention(8, 32, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.attention(x, mask=masks.Causal(), deterministic=True)


model = jattn.nn.DecoderOnly(100, features=32, num_heads=2, num_layers=1, rngs=nnx.Rngs(0))
written = jattn.generate(model, np.ones((1, 3), np.int32), max_tokens=4)
tokens: jax.Array = written.tokens
"""


def do(*command: Any, folder: Path, **env: str) -> str:
    """Returns what a command prints. A command that fails is an error with its output."""
    ran = run(*command, cwd=folder, env=clean_environment(**env))
    assert ran.returncode == 0, f"{command}: {ran.stdout[-5000:]} {ran.stderr[-5000:]}"
    return ran.stdout


def pip(python: Path, *arguments: Any) -> None:
    command = (sys.executable, "-m", "pip", "--python", python, *arguments)
    do(*command, folder=python.parent, PIP_NO_COMPILE="1", PIP_QUIET="1")


def environment(folder: Path, *packages: str) -> Path:
    do(sys.executable, "-m", "venv", "--without-pip", folder, folder=folder.parent)
    python = folder / "bin" / "python"
    pip(python, "install", *packages)
    return python


def copy_project(folder: Path) -> None:
    shutil.copytree(ROOT / "jattn", folder / "jattn", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)


def lowest() -> list[str]:
    """Each package that the library, its experiments and its tests need, at its lower bound."""
    extras = PROJECT["optional-dependencies"]
    named = [*PROJECT["dependencies"], *(x for name in EXTRAS for x in extras[name])]
    return [x.replace(">=", "==") for x in named if re.fullmatch(r"[\w-]+>=[\d.]+", x)]


@pytest.fixture(scope="module")
def built(tmp_path_factory: Any) -> tuple[Path, Path]:
    """A wheel built from a source distribution, and a Python with it at its lower bounds."""
    folder = tmp_path_factory.mktemp("packaging")
    source, dist = folder / "source", folder / "source" / "dist"
    copy_project(source)
    python = environment(folder / "environment", *BACKEND)
    do(python, "-c", BUILD, folder=source)
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        inside = {"/".join(x.split("/")[1:]) for x in archive.getnames()}
    assert {"LICENSE", "README.md", "pyproject.toml"} <= inside
    pip(python, "wheel", "--no-deps", "--no-build-isolation", "-w", dist, sdist)
    (wheel,) = dist.glob("*.whl")
    bounds = folder / "bounds.txt"
    bounds.write_text("\n".join(lowest() if ON_PYTHON_OF_BOUNDS else ()), encoding="utf-8")
    pip(python, "install", "-c", bounds, f"{wheel}[viz]")
    return wheel, python


@pytest.mark.slow
def test_the_wheel_holds_the_library_and_nothing_else(built):
    wheel, _ = built
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
    tracked = do("git", "ls-files", "jattn", folder=ROOT).split()
    pages = {name for name in tracked if name.endswith(".md")}  # for who reads the source
    assert {x for x in inside if ".dist-info/" not in x} == set(tracked) - pages
    assert f"jattn-{jattn.__version__}.dist-info/METADATA" in inside


@pytest.mark.slow
def test_a_clone_is_importable_from_the_folder_that_holds_it(tmp_path):
    """A folder with the package's name and without an `__init__.py` does not hide the package."""
    copy_project(clone := tmp_path / "jattn")
    python = environment(tmp_path / "environment", *BACKEND, "editables")
    pip(python, "install", "--no-deps", "--no-build-isolation", "-e", clone)
    find = "import importlib.util as x; print(x.find_spec('jattn').origin)"
    assert Path(do(python, "-c", find, folder=tmp_path).strip()) == clone / "jattn" / "__init__.py"


@pytest.mark.slow
def test_the_examples_run_in_a_clean_environment(built, tmp_path, monkeypatch):
    _, python = built
    compiler = script(tmp_path / "c++", 'exec c++ "$@" -O0')  # the installed sources are compiled
    monkeypatch.setenv("CXX", compiler)
    pip(python, "check")
    imported_from = do(python, "-c", "import jattn; print(jattn.__file__)", folder=tmp_path)
    assert Path(imported_from.strip()).is_relative_to(python.parent.parent)
    page = {"README.md": test_readme.TEXT}
    result = test_readme.run(page, tmp_path, str(python), installed=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_a_users_file_is_strictly_typed(built, tmp_path):
    _, python = built
    pyright = shutil.which("pyright", path=str(Path(sys.executable).parent))
    if pyright is None:
        pytest.skip("no pyright here")
    # The types of NumPy's arrays have parameters without defaults in its older versions.
    pip(python, "install", "--no-deps", "--target", tmp_path / "newest", "numpy")
    (tmp_path / "pyrightconfig.json").write_text('{"extraPaths": ["newest"]}', encoding="utf-8")
    (tmp_path / "sample.py").write_text(f"# pyright: strict\n{SAMPLE}", encoding="utf-8")
    said = do(pyright, "--pythonpath", python, "sample.py", folder=tmp_path)
    assert said.strip().startswith("0 errors, 0 warnings"), said


def test_every_package_has_a_lower_bound():
    free = [x for x in PROJECT["dependencies"] if not re.fullmatch(r"[\w-]+>=[\d.]+", x)]
    assert not free and len(lowest()) >= 15


@pytest.mark.exhaustive  # after the tests of what is installed without these further packages
@pytest.mark.skipif(not ON_PYTHON_OF_BOUNDS, reason="lower bounds are those of Python 3.11")
def test_the_lower_bounds_work(built):
    """The README's examples run at the lower bounds too, in the environment before this one."""
    _, python = built
    pip(python, "install", *lowest())
    pip(python, "check")
    files = [f"tests/test_{name}.py" for name in ("readme", "bpe", "checkpoints", "nn", "viz")]
    # Old packages warn of what newer ones beside them have renamed.
    how = ("-n0", "-W", "default", "-p", "no:cacheprovider")
    chosen = "(examples_run_in and parallel) or pinned or damage or (nn and gradient) or heatmap"
    said = do(python, "-m", "pytest", *how, *files, "-k", chosen, folder=ROOT, PYTHONPATH=str(ROOT))
    assert " passed" in said


def test_experiments_say_what_to_install():
    """Every package of their extra, `orbax-checkpoint` as the module `orbax`."""
    extras = PROJECT["optional-dependencies"]
    names = re.findall(r"^[a-z]+", "\n".join(extras["viz"] + extras["experiments"]), re.MULTILINE)
    hidden = f"import sys; sys.modules.update(dict.fromkeys({names})); import experiments.language"
    error = run_python("-c", hidden).stderr.splitlines()[-1]
    assert re.findall(r"\w+", error.split(";")[0])[4:] == sorted({*names} - {"jattn"})
    assert error.endswith('pip install -e ".[experiments]"')


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
    wanted = "values_and_gradients and (stripes or gain) and (float32 or float64) or has_every"
    arguments = ["-m", "pytest", "-n0", "-m", "", "-p", "no:cacheprovider"]
    command = (sys.executable, *arguments, "tests/test_contract.py", "-k", wanted)
    done = run(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(re.findall(r"(\d+) passed", done.stdout)[0]) >= 9
