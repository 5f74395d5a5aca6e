"""Errors about arguments that a function does not have, with the line to write instead.

`advised` checks the names of arguments before a call. It is visible neither in the signature of a
function nor in a traceback.
"""

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, is_typeddict

from jattn._advice import ADVICE, CACHE_ADVICE, WEIGHTS
from jattn._debugging import hide_caller
from jattn.cache import Cache
from jattn.options import parameters_of


_F = TypeVar("_F", bound=Callable[..., Any])


def advised_by(advice: Mapping[str, str], options: Any = None) -> Callable[[_F], _F]:
    """Returns a decorator with advice from a table; `options` are as in `advised`."""
    return functools.partial(_advised, advice, options=options)


def advised(options: Any = None) -> Callable[[_F], _F]:
    """Returns a decorator for functions of attention that explains unknown arguments.

    The TypeError about an argument that such a function does not have says what to write instead,
    in arguments that the function has. `options` is the class of `jattn.options` whose fields the
    function takes as `**options`.
    """

    def decorate(function: _F) -> _F:
        taken = _parameters(function, options)
        table = dict(ADVICE)
        if "return_weights" in taken:
            table["need_weights"] = "return_weights=True"
        needed = {name: line.partition("=")[0] for name, line in table.items()}
        needed |= {name: "return_lse" for name, line in table.items() if line == WEIGHTS}
        fits = [name for name, x in needed.items() if x in taken or not x.isidentifier()]
        return _advised({name: table[name] for name in fits}, function, options)

    return decorate


def _parameters(function: Callable[..., Any], options: Any) -> dict[str, inspect.Parameter]:
    """Returns a function's parameters, with the fields of `options` in place of `**options`."""
    parameters = dict(inspect.signature(function).parameters)
    if options is None:
        return parameters
    parameters.popitem()
    if not is_typeddict(options):
        return {**parameters, **{**inspect.signature(options).parameters, **parameters}}
    required = {
        name: x
        for name, x in parameters.items()
        if x.kind is not x.KEYWORD_ONLY or x.default is x.empty
    }
    return {**required, **parameters_of(options), **parameters}  # mask and score come first


def _advised(advice: Mapping[str, str], function: _F, options: Any = None) -> _F:
    parameters = _parameters(function, options)
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    places = [name for name, x in parameters.items() if x.kind in kinds]
    of_object = int(places[:1] == ["self"])

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        try:
            if unknown := named.keys() - parameters.keys():
                passed = {**dict(zip(places, arguments, strict=False)), **named}
                table = {**advice, **_advice_on_a_cache(passed, parameters)}
                name = min(unknown, key=lambda name: (name not in table, name))
                raise TypeError(
                    f"{_name(function, arguments[:of_object])}: no argument {name!r}; "
                    f"{_instead(name, [*parameters][of_object:], table)}"
                )
            if len(arguments) > len(places):
                raise TypeError(
                    f"{_name(function, arguments[:of_object])}: expected "
                    f"{', '.join(places[of_object:])} by place, got "
                    f"{len(arguments) - of_object} arguments; name the others, as in mask=mask"
                )
            return function(*arguments, **named)
        except BaseException as error:
            hide_caller(error)
            raise

    if options is not None:
        signature = inspect.signature(function)
        vars(call)["__signature__"] = signature.replace(parameters=[*parameters.values()])
    return call  # pyright: ignore[reportReturnType]


def _advice_on_a_cache(passed: Mapping[str, Any], parameters: Mapping[str, Any]) -> dict[str, str]:
    """Returns the advice about padding if a cache is among the arguments of a call."""
    if "valid" in parameters:
        cached = any(passed.get(name) is not None for name in ("cache", "caches"))
        return CACHE_ADVICE if cached else {}
    if not any(isinstance(x, Cache) for name, x in passed.items() if name in parameters):
        return {}
    return {name: f"cache.append(key, value, ...) with {x}" for name, x in CACHE_ADVICE.items()}


def _name(function: Callable[..., Any], of_object: tuple[Any, ...]) -> str:
    """Returns the name of a function, or of a method with its object's class."""
    if not of_object:
        return function.__qualname__
    return f"{type(of_object[0]).__name__}.{function.__name__}"


def _instead(name: str, parameters: list[str], advice: Mapping[str, str]) -> str:
    """Returns the advice about an argument: the text to write in its place."""
    if name in advice:
        return f"write {advice[name]}"
    candidates = [] if name in ADVICE else [*parameters, *advice]  # a known name is not misspelt
    longer = [x for x in candidates if x.startswith(f"{name}_")]
    close = longer or difflib.get_close_matches(name, candidates, n=1, cutoff=0.72)
    if close and close[0] in parameters:
        return f"did you mean {close[0]!r}?"
    if close:
        return f"for {close[0]!r} write {advice[close[0]]}"
    return f"there are {', '.join(parameters)}"
