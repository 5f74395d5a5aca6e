"""Finds where each name in the page's code comes from: an import, its step, or an earlier step."""

import ast
import builtins
import functools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from experiments.walkthrough.step import Code, Step


OWN = ("experiments", "jattn")

BITS = (
    "# JAX computes in 32 bits unless it is told to use 64. One of the texts prints eight digits.\n"
    'jax.config.update("jax_enable_x64", True)\n'
)


@functools.cache
def defined_names(step: Step) -> frozenset[str]:
    """Returns the names of the functions, classes and data shown before a step's own lines."""
    return frozenset(
        name
        for code in _python_helpers(step)
        for statement in ast.parse(code.text).body
        for name in _bound(statement, inside=False)
    )


@functools.cache
def undefined_names(step: Step) -> frozenset[str]:
    """Returns the names that a step's code reads without defining them."""
    pieces = [*(code.text for code in _python_helpers(step)), step.lines.text + step.drawing.text]
    names = set()
    for tree in map(ast.parse, pieces):
        inside = {name for node in ast.walk(tree) for name in _bound(node, inside=True)}
        read = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        names |= read - inside
    return frozenset(names - defined_names(step) - set(dir(builtins)))


def borrowed(steps: Sequence[Step], place: int) -> dict[int, list[str]]:
    """Maps the index of each earlier step that the step at `place` uses to the names that it
    uses."""
    names_of: dict[int, list[str]] = {}
    for name in sorted(undefined_names(steps[place]), key=str.lower):
        for earlier in reversed(range(place)):
            if name in defined_names(steps[earlier]):
                names_of.setdefault(earlier, []).append(name)
                break
    return dict(sorted(names_of.items()))


def preparation(step: Step) -> Code:
    """Returns the lines that precede a step's own: imports, 64 bits, and helpers. Together with the
    step's own lines they run in a new session."""
    helpers = (code.text.rstrip("\n") for code in _python_helpers(step))
    text = "\n\n\n".join((f"{imports(step)}\n\n{BITS.rstrip()}", *helpers))
    return Code("imports and helpers", "python", text + "\n")


def imports(step: Step) -> str:
    """Returns the import statements that a step's code needs, as the walkthrough's modules write
    them; functions and data of earlier steps are imported too."""
    modules: set[str] = set()
    members: dict[str, set[str]] = {}
    for name in undefined_names(step) | {"jax"}:
        module, written = _imported().get(name, (step.body.__module__, name))
        if module:
            members.setdefault(module, set()).add(written)
        else:
            modules.add(written)
    lines = [f"import {name}" for name in modules]
    lines += [f"from {name} import {', '.join(sorted(used))}" for name, used in members.items()]
    groups: tuple[list[str], ...] = ([], [], [])
    for line in sorted(lines, key=lambda line: (line.startswith("from"), line)):
        package = line.split()[1].split(".")[0]
        known = package in sys.stdlib_module_names
        groups[0 if known else 2 if package in OWN else 1].append(line)
    return "\n\n".join("\n".join(group) for group in groups if group)


def _python_helpers(step: Step) -> list[Code]:
    return [code for code in step.helpers if code.language == "python"]


def _bound(node: ast.AST, *, inside: bool) -> Iterator[str]:
    """Yields the names that a statement binds: inside its own scope, or in the scope around it."""
    match node:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.Assign(targets=targets) if not inside:
            yield from (target.id for target in targets if isinstance(target, ast.Name))
        case ast.Name(id=name, ctx=ast.Store()) if inside:
            yield name
        case ast.arg(arg=name) if inside:
            yield name


@functools.cache
def _imported() -> dict[str, tuple[str, str]]:
    """Maps each name that the walkthrough's modules import to its module, "" for the name of a
    module itself, and to the name as the import statement writes it."""
    sources: dict[str, tuple[str, str]] = {}
    for path in sorted(Path(__file__).parent.glob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                module = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
                for alias in node.names:
                    name = alias.asname or alias.name.split(".")[0]
                    sources[name] = module, ast.unparse(alias)
    return sources
