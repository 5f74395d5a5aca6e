"""The words of docstrings and comments: sentences, the field's terms, and names that say something.

A failure lists file, line, words, and what to write. `prose: kept` in a line permits its words.
"""

import ast
import functools
import io
import itertools
import re
import tokenize
from pathlib import Path
from typing import Any


ROOT = Path(__file__).parents[1]
FILES = {
    path.relative_to(ROOT): path.read_text(encoding="utf-8")
    for folder in ("jattn", "tests", "experiments")
    for path in sorted((ROOT / folder).rglob("*.py"))
}
FRAGMENT = re.compile(
    "(Of|Those|That|As|What|Which|Where|How|Why|Around|From|With|By|For|In|Like|One that)\\b"
)
IDIOMS = {
    "so many": "the number of",
    "goes? by": "uses, follows",
    "(?:by|in) turns": "alternately",
    "(?:is|are) asked": "is requested, or who calls what",
    "(?:is|are) looked at": "is inspected, is evaluated",
    "(?:is|are) told": "is passed, is known",
    "comes? by": "is streamed",
    "as they are": "unchanged",
    "laid out as others": "the name of the layout",
    "put together": "merged, concatenated",
    "taken one by one": "enumerated",
    "what is left": "the remainder",
    "makes its query NaN": "makes that query's output NaN",
    "where (?:it lies|they lie)": "in place",
    "the first that can": "the first supported one",
    "cut over|(?:is|are) cut along": "sharded over",
    "do(?:es)? not go up evenly": "does not divide evenly",
    "fifth matrix units": "fifth-generation tensor cores",
    "(?:second|third) cache": "L2 cache, L3 cache",
}
VAGUE = (
    "found own kept asked told beside apart held one here near before after now step at where way "
    "grown given more others"
).split()


DOCUMENTED = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef


@functools.cache
def nodes_of(path: Path) -> list[Any]:
    """The nodes of a file that have a docstring or bind a name."""
    kinds = *DOCUMENTED, ast.Name, ast.arg
    return [node for node in ast.walk(ast.parse(FILES[path])) if isinstance(node, kinds)]


def test_docstrings_and_comments_are_plain_english():
    failures = []
    any_idiom = re.compile(rf"\b(?:{'|'.join(IDIOMS)})\b")
    for path, source in FILES.items():
        texts = []
        for node in nodes_of(path):
            if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)):
                line = node.body[0].lineno
                texts.append((line, text))
                if not isinstance(node, ast.Module) and (match := FRAGMENT.match(text)):
                    failures.append(
                        (path, line, match[0], "begin with a verb or the result's noun")
                    )
        if any_idiom.search(source):
            tokens = tokenize.generate_tokens(io.StringIO(source).readline)
            texts += [(x.start[0], x.string) for x in tokens if x.type == tokenize.COMMENT]
            for (line, text), (idiom, better) in itertools.product(texts, IDIOMS.items()):
                for match in re.finditer(rf"\b(?:{idiom})\b", text):
                    row = line + text[: match.start()].count("\n")
                    failures.append((path, row, match[0], better))
    report = [
        f"{path}:{line}: {words!r}: {better}"
        for path, line, words, better in failures
        if "prose: kept" not in FILES[path].split("\n")[line - 1]
    ]
    assert not report, "\n".join(report)


def test_names_say_something():
    """At most 200 variables, arguments and functions have names that say nothing."""
    report = []
    for path in FILES:
        for node in nodes_of(path):
            stored = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
            name = getattr(node, "id" if stored else "arg", None)
            name = node.name if isinstance(node, ast.FunctionDef) else name
            if name in VAGUE and (stored or isinstance(node, ast.arg | ast.FunctionDef)):
                report.append(f"{path}:{node.lineno}: {name!r}: say what it holds or does")
    assert len(report) <= 200, "\n".join([f"{len(report)} names:", *report])
