"""Finds where each name in the page's code comes from: an import, its step, or an earlier step."""

import ast
import builtins
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from experiments.walkthrough.step import Code, Step


OWN = ("experiments", "jattn")


def given(step: Step) -> set[str]:
    """Returns the names of the functions, classes and data shown above a step's own lines."""
    return {
        name
        for code in _above(step)
        for line in ast.parse(code.text).body
        for name in _bound(line, inside=False)
    }


def asked(step: Step) -> set[str]:
    """Returns the names that a step's code reads without defining them."""
    own = "\n".join(code.text for code in step.code if code.label in ("the step", "drawing"))
    pieces = [*(code.text for code in _above(step)), own]
    found = set()
    for tree in map(ast.parse, pieces):
        inside = {name for node in ast.walk(tree) for name in _bound(node, inside=True)}
        read = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        found |= read - inside
    return found - given(step) - set(dir(builtins))


def borrowed(steps: Sequence[Step], place: int) -> dict[int, list[str]]:
    """Maps the index of each earlier step that the step at `place` uses to the names that it
    uses."""
    found: dict[int, list[str]] = {}
    for name in sorted(asked(steps[place]), key=str.lower):
        for earlier in reversed(range(place)):
            if name in given(steps[earlier]):
                found.setdefault(earlier, []).append(name)
                break
    return dict(sorted(found.items()))


def imports(steps: Sequence[Step]) -> str:
    """Returns the import statements that the steps need, as the walkthrough's modules write
    them."""
    needed = set[str]()
    for place, step in enumerate(steps):
        needed |= asked(step).difference(*borrowed(steps, place).values())
    modules: set[str] = set()
    members: dict[str, set[str]] = {}
    for node, alias in _imported():
        if (alias.asname or alias.name.split(".")[0]) in needed:
            if isinstance(node, ast.Import):
                modules.add(ast.unparse(alias))
            else:
                members.setdefault(node.module or "", set()).add(ast.unparse(alias))
    lines = [f"import {name}" for name in modules]
    lines += [f"from {name} import {', '.join(sorted(found))}" for name, found in members.items()]
    groups: tuple[list[str], ...] = ([], [], [])
    for line in sorted(lines, key=lambda line: (line.startswith("from"), line)):
        package = line.split()[1].split(".")[0]
        known = package in sys.stdlib_module_names
        groups[0 if known else 2 if package in OWN else 1].append(line)
    return "\n\n".join("\n".join(group) for group in groups if group)


def _above(step: Step) -> list[Code]:
    return [
        code
        for code in step.code
        if code.language == "python" and code.label not in ("the step", "drawing")
    ]


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


def _imported() -> Iterator[tuple[ast.Import | ast.ImportFrom, ast.alias]]:
    """Yields every import of the walkthrough's modules."""
    for path in sorted(Path(__file__).parent.glob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                yield from ((node, alias) for alias in node.names)
