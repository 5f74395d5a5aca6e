"""The structure of the project: imports, the cost of importing, the top-level files."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

from jattn.functions import interval_rules, operations
from jattn.kernels.cpu import text
from jattn.kernels.gpu.mosaic.tile import mosaic_interpreter
from jattn.kernels.tpu import operands
from tests import commands
from tests.commands import ROOT


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
    ("normalizers",),
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
    ("mechanisms", "linear", "sparse", "talking_heads"),
    ("parallel", "statistics", "build"),
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


@functools.cache
def modules(package: str) -> dict[str, Path]:
    """The files of a package by module name, relative to it."""
    folder = ROOT / package
    return {
        ".".join(path.relative_to(folder).with_suffix("").parts)
        .removesuffix("__init__")
        .strip("."): path
        for path in sorted(folder.rglob("*.py"))
    }


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@functools.cache
def imported(package: str, module: str) -> list[str]:
    """The full names of all modules and members that a file imports, anywhere in it."""
    path, parts = modules(package)[module], f"{package}.{module}".strip(".").split(".")
    names: list[str] = []
    for statement in ast.walk(parsed(path)):
        if isinstance(statement, ast.Import):
            names += [alias.name for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom):
            base = statement.module or ""
            if statement.level:
                up = statement.level - (path.name == "__init__.py")
                base = ".".join([*parts[: len(parts) - up], *filter(None, [base])])
            names += [f"{base}.{alias.name}" for alias in statement.names]
    return names


def module_of(package: str, name: str) -> str:
    """The module of a package, relative to it, that a full name is or is a member of."""
    parts = name.split(".")[1:]
    while ".".join(parts) not in modules(package):
        parts.pop()
    return ".".join(parts)


def imported_modules(package: str, module: str) -> Iterator[str]:
    """Yields the modules of `package` that one of its modules imports, relative to the package."""
    for name in imported(package, module):
        if name == package or name.startswith(package + "."):
            yield module_of(package, name)


def test_every_file_is_in_a_room_and_imports_go_down():
    empty = "kernels"  # a package of packages
    for module in modules("jattn"):
        room = room_of(module)
        assert room in {*PLACE, empty}
        for other in imported_modules("jattn", module):
            there = room_of(other)
            if there not in (room, empty):
                assert PLACE[there] < PLACE[room], f"jattn.{module} imports jattn.{other}"


def test_no_file_imports_itself_through_others():
    waiting = {
        module: set(imported_modules("jattn", module)) - {module} for module in modules("jattn")
    }
    while free := {module for module, targets in waiting.items() if not targets & set(waiting)}:
        waiting = {module: targets for module, targets in waiting.items() if module not in free}
    assert not waiting


def test_the_library_does_not_know_the_experiments_and_postpones_no_types():
    """Checks by jaxtyping need the annotations themselves."""
    for module in modules("jattn"):
        packages = {name.split(".")[0] for name in imported("jattn", module)}
        assert not packages & {"experiments", "tests", "__future__"}, module


_MODULES = "tuning masks scores normalizers positions cache parallel viz compat nn generation"
PUBLIC = {"", *_MODULES.split()}


def test_experiments_use_public_names_and_the_room_of_all_runs_no_experiment():
    room = [module for module in modules("experiments") if module.split(".")[0] == "runs"]
    assert len(room) > 10
    for module in room:
        for other in imported_modules("experiments", module):
            assert other.split(".")[0] == "runs", f"experiments.{module} imports {other}"
    for module in modules("experiments"):
        for name in imported("experiments", module):
            if name.split(".")[0] == "jattn":
                assert not any(part.startswith("_") for part in name.split(".")), (module, name)
                assert module_of("jattn", name) in PUBLIC, (module, name)


FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
FORBIDDEN_CALLS = {"eval", "exec", "__import__"}
# Runs are read from folders of others, so there nothing unpacks to anywhere or starts a process.
IN_RUNS = {"yaml", "subprocess", "importlib", "tarfile", "zipfile", "compile", "system", "popen"}


@pytest.mark.parametrize("package", ["jattn", "experiments"])  # tests make hostile files
def test_nobody_unpickles_or_evaluates_text(package):
    for module, path in modules(package).items():
        reads_runs = package == "experiments" and module.split(".")[0] in ("translation", "runs")
        # The module that starts itself again to watch opens no file.
        more = IN_RUNS if reads_runs and module != "runs.watching" else set()
        for name in imported(package, module):
            assert name.split(".")[0] not in FORBIDDEN_MODULES | more, (module, name)
        for call in ast.walk(parsed(path)):
            if not isinstance(call, ast.Call):
                continue
            if isinstance(call.func, ast.Name):
                assert call.func.id not in FORBIDDEN_CALLS | more, (module, call.lineno)
            if isinstance(call.func, ast.Attribute):
                assert call.func.attr not in more & {"system", "popen"}, (module, call.lineno)
            for keyword in call.keywords:
                allowed = keyword.arg != "allow_pickle" or not getattr(keyword.value, "value", 1)
                assert allowed, (module, call.lineno)


IMPORTS = """
import sys, time
loaded = lambda: print(*sys.modules)
begin = time.process_time()
import jax, jax.numpy
middle = time.process_time()
import jattn
print((time.process_time() - middle) / (middle - begin)); loaded()
jattn.attention; loaded()
import jattn.nn; loaded()
import experiments.language.__main__, experiments.translation.__main__
import jattn.attention, jattn.statistics
from jattn import attention as f
print(callable(f), callable(jattn.statistics), jattn.attention is f)
jax.numpy.ones(1)
"""


def test_imports_are_light_hide_no_function_and_start_no_backend():
    """A sixth of the time of JAX is about 80 ms. Processes must find each other before a backend
    starts: on a platform that does not exist, whatever touches a device fails, as the last line
    does."""
    result = commands.run_python("-c", IMPORTS, env=commands.environment(JAX_PLATFORMS="nowhere"))
    assert result.returncode == 1 and "nowhere" in result.stderr
    share, *loaded, names = result.stdout.splitlines()
    assert float(share) < 1 / 6
    assert names == "True True True"  # a file has the name of a function
    bare, function, modules = ({*line.split()} for line in loaded)
    assert {"jax", "jattn", "jaxtyping"} <= function
    assert not bare & {"jaxtyping", "flax", "matplotlib"}
    assert len([x for x in bare if x.startswith("jattn.")]) < 8
    assert not function & {"matplotlib", "optax", "orbax", "experiments", "beartype", "torch"}
    assert not modules & {"matplotlib", "experiments", "torch"}
    kernels = {name.split(".")[2] for name in function if name.startswith("jattn.kernels.")}
    assert kernels == {"common", "cpu", "protocol", "registry", "xla"}


def test_the_top_level_has_no_other_files():
    listing = commands.run("git", "-C", ROOT, "ls-files", "-z").stdout
    names = {name.split("/")[0] for name in listing.split("\0")} - {""}  # none without git
    assert {name for name in names if not name.startswith(".")} in (TOP_LEVEL, set())
    assert (ROOT / "jattn" / "py.typed").exists()


def test_kernels_know_no_operation_that_nobody_else_does():
    known = {*operations.ELEMENTWISE, "floor_divide", "remainder", "custom"}
    tables = mosaic_interpreter._OPERATIONS, operands._OPERATIONS, interval_rules.RULES
    assert all(known >= set(table) for table in (*tables, *text._WRITTEN.values()))


def test_there_is_no_drawer_for_odds_and_ends():
    for package in ("jattn", "experiments", "tests"):
        for module in modules(package):
            assert module.split(".")[-1] not in ("utils", "util", "helpers", "misc")
