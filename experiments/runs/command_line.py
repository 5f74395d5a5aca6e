"""Argument parsing with one-line errors that suggest the nearest valid names."""

import argparse
import difflib
import os
from collections.abc import Iterable
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line and suggest the nearest valid names."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, args: Iterable[str] | None = None, namespace: Any = None
    ) -> Any:
        namespace, rest = super().parse_known_args(args, namespace)
        unknown = next((text for text in rest if text.startswith("-")), None)
        if unknown is not None:
            hint = nearest(unknown.partition("=")[0], self._option_string_actions)
            self.error(f"unrecognized arguments: {' '.join(rest)}{hint}")
        return namespace, rest

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            hint = nearest(str(value), map(str, action.choices or ()))
            raise argparse.ArgumentError(action, error.message + hint) from None


def nearest(name: str, names: Iterable[str]) -> str:
    """Returns a hint with up to three names spelled much like `name`, or an empty string."""
    matches = difflib.get_close_matches(name, list(names), n=3)
    return f"; nearest: {', '.join(matches)}" if matches else ""


def add_cache_dtype(parser: argparse.ArgumentParser) -> None:
    """Adds the option `--cache-dtype`, the dtype in which caches store keys and values."""
    parser.add_argument(
        "--cache-dtype",
        choices=("float32", "bfloat16", "float16", "int8", "float8_e4m3fn", "int4"),
        help="how caches store keys and values; in int8 they take about a quarter of the memory of "
        "float32 (default: as the model computes)",
    )


def utf8(argument: str) -> str:
    """Decodes a command-line argument as UTF-8, whatever the platform's default is."""
    try:
        return os.fsencode(argument).decode("utf-8")
    except UnicodeDecodeError:
        raise argparse.ArgumentTypeError(f"expected UTF-8 text, got {argument!r}") from None
