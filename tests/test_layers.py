"""The structure of the project: imports of each room, the cost of importing, the top-level
files."""

import ast
import fnmatch
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jattn.functions import interval_rules, operations
from jattn.kernels.cpu import text
from jattn.kernels.gpu.mosaic.tile import mosaic_interpreter
from jattn.kernels.tpu import operands


ROOT = Path(__file__).resolve().parent.parent
TOP_LEVEL = {"pyproject.toml", "README.md", "LICENSE", "jattn", "tests", "experiments"}

# A room is a folder or a file, and imports only from rooms earlier in this list. Files of a folder
# may import one another without cycles. New files are added here.
ROOMS = (
    ("_explicit", "_debugging"),
    ("_types", "_svg", "_advice", "_torch_names", "tuning"),
    ("functions",),
    ("_pytree",),
    ("checks",),
    ("_named_axes",),
    ("softmax", "masks", "scores", "positions"),
    ("options", "cache"),
    ("spec", "_advised"),
    ("call", "tile", "dropout"),
    ("kernels.common",),
    ("kernels.protocol",),
    ("kernels.xla",),
    ("kernels.gpu.mosaic.machine",),
    ("kernels.gpu.mosaic.tile",),
    ("kernels.cpu", "kernels.gpu", "kernels.tpu"),  # what they cannot do is left to XLA
    ("kernels.registry",),
    ("attention",),
    ("decoding", "explanation"),
    ("mechanisms", "build"),
    ("parallel", "statistics"),
    ("nn",),
    ("generation", "viz", "compat"),
    ("",),
)
PLACE = {room: place for place, rooms in enumerate(ROOMS) for room in rooms}


def room_of(module: str) -> str:
    """Returns the room of a module: itself, or the innermost folder that is one."""
    while module not in PLACE and "." in module:
        module = module.rpartition(".")[0]
    return module


def modules(package: str) -> dict[str, Path]:
    """The files of a package by module name, relative to it."""
    folder = ROOT / package
    return {
        ".".join(path.relative_to(folder).with_suffix("").parts)
        .removesuffix("__init__")
        .strip("."): path
        for path in sorted(folder.rglob("*.py"))
    }


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imported(path: Path, name: str, is_package: bool) -> Iterator[str]:
    """Yields the full names of all modules and members that a file imports, anywhere in it."""
    parts = name.split(".")
    for statement in ast.walk(parsed(path)):
        if isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom):
            base = statement.module or ""
            if statement.level:
                up = statement.level - (1 if is_package else 0)
                base = ".".join([*parts[: len(parts) - up], *filter(None, [base])])
            yield from (f"{base}.{alias.name}" for alias in statement.names)


def imported_modules(package: str, module: str, path: Path, known: set[str]) -> Iterator[str]:
    """Yields the modules of `package` that one of its modules imports, relative to the package."""
    full = f"{package}.{module}" if module else package
    for name in imported(path, full, path.name == "__init__.py"):
        if name != package and not name.startswith(package + "."):
            continue
        parts = name.split(".")[1:]
        while ".".join(parts) not in known:
            parts.pop()  # a member: its module is what is imported
        yield ".".join(parts)


def test_every_file_is_in_a_room():
    empty = {"kernels"}  # a package of packages
    assert {room_of(module) for module in modules("jattn")} - empty <= set(PLACE)


@pytest.mark.parametrize("module", modules("jattn"))
def test_imports_go_down(module):
    files = modules("jattn")
    for other in imported_modules("jattn", module, files[module], set(files)):
        room, there = room_of(module), room_of(other)
        if there not in (room, "kernels"):
            assert PLACE[there] < PLACE[room], f"jattn.{module} imports jattn.{other}"


def test_no_file_imports_itself_through_others():
    files = modules("jattn")
    waiting = {
        module: set(imported_modules("jattn", module, path, set(files))) - {module}
        for module, path in files.items()
    }
    while free := {module for module, targets in waiting.items() if not targets & set(waiting)}:
        waiting = {module: targets for module, targets in waiting.items() if module not in free}
    assert not waiting


def test_the_library_does_not_know_the_experiments():
    for module, path in modules("jattn").items():
        for name in imported(path, f"jattn.{module}", path.name == "__init__.py"):
            assert name.split(".")[0] not in ("experiments", "tests"), module


_MODULES = "tuning masks scores positions cache parallel viz compat nn generation"
PUBLIC = {"", *_MODULES.split()}


def test_experiments_use_public_names_only():
    known = set(modules("jattn"))
    for module, path in modules("experiments").items():
        for name in imported(path, f"experiments.{module}", path.name == "__init__.py"):
            if name.split(".")[0] == "jattn":
                assert not any(part.startswith("_") for part in name.split(".")), (module, name)
                used = name.split(".")[1:]
                while ".".join(used) not in known:
                    used.pop()
                assert ".".join(used) in PUBLIC, (module, name)


def test_the_room_of_all_runs_imports_no_experiment():
    files = modules("experiments")
    room = [module for module in files if module.split(".")[0] == "runs"]
    assert len(room) > 10
    for module in room:
        for other in imported_modules("experiments", module, files[module], set(files)):
            assert other.split(".")[0] == "runs", f"experiments.{module} imports {other}"


FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}


@pytest.mark.parametrize("package", ["jattn", "experiments"])  # tests make hostile files
def test_nobody_unpickles_or_evaluates_text(package):
    for module, path in modules(package).items():
        for name in imported(path, f"{package}.{module}", path.name == "__init__.py"):
            assert name.split(".")[0] not in FORBIDDEN_MODULES, (module, name)
        for call in ast.walk(parsed(path)):
            if not isinstance(call, ast.Call):
                continue
            if isinstance(call.func, ast.Name):
                assert call.func.id not in ("eval", "exec", "__import__"), (module, call.lineno)
            for keyword in call.keywords:
                allowed = keyword.arg != "allow_pickle" or not getattr(keyword.value, "value", 1)
                assert allowed, (module, call.lineno)


def test_types_are_not_postponed():
    # jaxtyping's checks need the annotations themselves.
    for module, path in modules("jattn").items():
        names = set(imported(path, f"jattn.{module}", path.name == "__init__.py"))
        assert "__future__.annotations" not in names, module


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a fresh interpreter in the root of the project."""
    clean = {k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**clean, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("name", ["jattn", "jattn.nn"])
def test_import_starts_no_backend(name):
    # With a platform that does not exist, whatever touches a device fails.
    result = python(f"import {name}", JAX_PLATFORMS="nowhere")
    assert result.returncode == 0, result.stderr
    control = python(f"import {name}, jax; jax.numpy.ones(1)", JAX_PLATFORMS="nowhere")
    assert control.returncode != 0
    assert "nowhere" in control.stderr


def test_import_is_light():
    def loaded(code: str) -> set[str]:
        names = "print(*{name.split('.')[0] for name in sys.modules})"
        return set(python(f"import sys; {code}; {names}").stdout.split())

    assert not loaded("import jattn") & {"jaxtyping", "flax"}
    packages = loaded("import jattn; jattn.attention")
    assert {"jax", "jattn", "jaxtyping"} <= packages
    assert not packages & {"matplotlib", "optax", "orbax", "experiments", "beartype", "torch"}
    assert not loaded("import jattn.nn") & {"matplotlib", "experiments", "torch"}


def test_kernels_of_other_machines_are_imported_on_demand():
    names = "print(*(x for x in sys.modules if x.startswith('jattn.kernels.')))"
    code = f"import sys, jattn; jattn.attention; {names}"
    loaded = {name.split(".")[2] for name in python(code).stdout.split()}
    assert loaded == {"common", "cpu", "protocol", "registry", "xla"}


def test_import_takes_little_time():
    code = (
        "import time, jax, flax; start = time.perf_counter(); import jattn; "
        "print(time.perf_counter() - start)"
    )
    seconds = []
    while not seconds or (min(seconds) > 0.16 and len(seconds) < 5):
        seconds.append(float(python(code, JAX_PLATFORMS="cpu").stdout))
    assert min(seconds) <= 0.16


def tracked() -> set[str]:
    """The names in the root that git tracks or, without git, that are not ignored."""
    if (ROOT / ".git").exists():
        listing = subprocess.run(
            ["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True, check=True
        )
        names = {name.split("/")[0] for name in listing.stdout.split("\0") if name}
        if names:
            return names
    lines = (ROOT / ".gitignore").read_text(encoding="utf-8").split("\n")
    ignored = [line.strip().strip("/") for line in lines if line.strip()]
    return {
        path.name
        for path in ROOT.iterdir()
        if not any(fnmatch.fnmatch(path.name, pattern) for pattern in ignored)
    }


def test_the_top_level_has_no_other_files():
    names = {name for name in tracked() if not name.startswith(".")}
    assert names == TOP_LEVEL
    assert (ROOT / "jattn" / "py.typed").exists()


def test_there_is_no_drawer_for_odds_and_ends():
    for package in ("jattn", "experiments", "tests"):
        for module in modules(package):
            assert module.split(".")[-1] not in ("utils", "util", "helpers", "misc")


def test_kernels_know_no_operation_that_nobody_else_does():
    known = {*operations.ELEMENTWISE, "floor_divide", "remainder", "custom"}
    tables = mosaic_interpreter._OPERATIONS, operands._OPERATIONS, interval_rules.RULES
    assert all(known >= set(table) for table in (*tables, *text._WRITTEN.values()))
