"""The options of a command: errors in one line, with what was probably meant."""

import argparse
import difflib
import os
from collections.abc import Iterable
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, with what was probably meant."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, args: Iterable[str] | None = None, namespace: Any = None
    ) -> Any:
        namespace, rest = super().parse_known_args(args, namespace)
        unknown = next((text for text in rest if text.startswith("-")), None)
        if unknown is not None:
            near = nearest(unknown.partition("=")[0], self._option_string_actions)
            self.error(f"unrecognized arguments: {' '.join(rest)}{near}")
        return namespace, rest

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            near = nearest(str(value), map(str, action.choices or ()))
            raise argparse.ArgumentError(action, error.message + near) from None


def nearest(name: str, names: Iterable[str]) -> str:
    """Returns up to three of the names that are spelled much like `name`, in words; or nothing."""
    found = difflib.get_close_matches(name, list(names), n=3)
    return f"; nearest: {', '.join(found)}" if found else ""


def utf8(argument: str) -> str:
    """An argument as text, in UTF-8 whatever the platform's default is."""
    try:
        return os.fsencode(argument).decode("utf-8")
    except UnicodeDecodeError:
        raise argparse.ArgumentTypeError(f"expected UTF-8 text, got {argument!r}") from None
