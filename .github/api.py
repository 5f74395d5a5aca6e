"""Writes pages of all public functions by pdoc: `python .github/api.py runs/api`.

pdoc's own command omits functions that have the same name as their file, calls of modules, and
arguments that a decorator or a private base class adds, and writes each type with its module.
"""

import inspect
import re
import sys
from functools import cached_property
from pathlib import Path
from types import ModuleType, UnionType
from typing import Any, Union, Unpack, get_args, get_origin, get_overloads

import flax.typing
import pdoc
from pdoc.doc import Class, Function, Module, Variable, _PrettySignature
from pdoc.render import configure

import jattn
from jattn import masks, scores


UNIONS = {
    "MaskLike": masks.MaskLike,
    "ScoreLike": scores.ScoreLike,
    "Dtype": flax.typing.Dtype,
    "Initializer": flax.typing.Initializer,
}


class Code:
    """A text in place of an annotation or of a default."""

    def __init__(self, text: str):
        self.text = text

    def __repr__(self) -> str:
        return self.text


def written(kind: Any) -> str:
    """Returns a type as it is written in the source, without the modules that define it."""
    if isinstance(kind, str):
        return kind
    if get_origin(kind) is Unpack:
        return written(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        types, names = [*get_args(kind)], []
        for name, union in UNIONS.items():
            if {*get_args(union)} <= {*types}:
                names.append(name)
                types = [x for x in types if x not in get_args(union)]
        return " | ".join(dict.fromkeys([*names, *map(written, types)]))
    text = re.sub(r"~|\b(?:[A-Za-z_]\w*\.)+(?=\w)", "", inspect.formatannotation(kind))
    return text.replace("ndarray", "Array").replace("NoneType", "None").replace("'", '"')


def default(value: Any) -> Any:
    """Returns a default as it is written in the source."""
    if value is inspect.Parameter.empty or not callable(value):
        return Code(f'"{value}"') if isinstance(value, str) else value
    name = getattr(getattr(value, "func", value), "__qualname__", "...")
    return Code(re.sub(r"\.<locals>.*", "(...)", name))


def signature(function: Function) -> inspect.Signature:
    """Returns the signature that `inspect` finds, which has the arguments of decorators."""
    target: Any = getattr(function.wrapped, "__func__", function.wrapped)
    if function.name == "__init__":
        target = getattr(sys.modules[function.modulename], function.qualname.split(".")[0])
    shown = inspect.signature(target)
    returned = shown.return_annotation
    if overloads := get_overloads(inspect.unwrap(target)) if inspect.isroutine(target) else ():
        returned = Union[tuple(inspect.signature(x).return_annotation for x in overloads)]  # noqa: UP007
    coded = [
        x.replace(
            annotation=x.annotation if x.annotation is x.empty else Code(written(x.annotation)),
            default=default(x.default),
        )
        for x in shown.parameters.values()
    ]
    if function.name == "__init__":  # pdoc omits the first parameter
        coded.insert(0, inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY))
        returned = shown.empty
    returned = returned if returned is shown.empty else Code(written(returned))
    return _PrettySignature(coded, return_annotation=returned)


def annotation(variable: Variable) -> str:
    """Returns the type of a field, after a colon."""
    is_known = variable.annotation is not inspect.Parameter.empty
    return f": {written(variable.annotation)}" if is_known else ""


def docstring(function: Function, plain: Any = Function.docstring.func) -> str:
    """Marks calls and constructors with arguments as public, for which pdoc needs a docstring."""
    calls = function.name in ("__call__", "__init__") and len(function.signature.parameters) > 1
    return plain(function) + ("\n\n@public" if calls else "")


def taken_from(
    owner: Class, name: str, value: Any, plain: Any = Class._taken_from
) -> tuple[str, str]:
    """Returns the module and class that define a member, and for private ones the owner's."""
    place = plain(owner, name, value)
    is_private = place[0].startswith("jattn") and place[1].startswith("_")
    return (owner.modulename, f"{owner.qualname}.{name}") if is_private else place


def bases(owner: Class, plain: Any = Class.bases.func) -> list[tuple[str, str, str]]:
    """Returns the base classes that are not private, without their modules."""
    return [(*place, text.split(".")[-1]) for *place, text in plain(owner) if place[1][0] != "_"]


def submodules(module: Module, plain: Any = Module.submodules.func) -> list[Module]:
    """Returns the files of a package except for those with the name of a function."""
    return [x for x in plain(module) if isinstance(getattr(module.obj, x.name), ModuleType)]


def main(folder: Path) -> None:
    """Writes the pages into a folder."""
    public = [getattr(jattn, name) for name in jattn.__all__]
    modules = [jattn, *(x for x in public if isinstance(x, ModuleType))]
    files = []
    for module, name in [(x, name) for x in modules for name in x.__all__]:
        value = getattr(module, name)
        files += [] if isinstance(value, ModuleType) else [f"!{module.__name__}.{name}"]
        for field in getattr(value, "_fields", ()):  # without "Alias for field number 0"
            getattr(value, field).__doc__ = value.__new__.__doc__ = ""
    for owner, name, function in (
        (Module, "submodules", submodules),
        (Class, "bases", bases),
        (Function, "signature", signature),
        (Function, "docstring", docstring),
        (Variable, "annotation_str", annotation),
    ):
        setattr(owner, name, cached_property(function))
        getattr(owner, name).__set_name__(owner, name)
    Function.decorators = Class.decorators = []
    Class._taken_from = taken_from
    configure(docformat="google", include_undocumented=False)
    pdoc.pdoc("jattn", *files, output_directory=folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
