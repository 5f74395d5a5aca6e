"""Readers of bounded numbers from the command line, for argparse's `type`."""

import argparse
from collections.abc import Callable
from typing import TypeVar


_Number = TypeVar("_Number", int, float)

_INT32_MAX = 2**31 - 1
_FLOAT32_MAX = 3e38


def whole(least: int, most: int = _INT32_MAX) -> Callable[[str], int]:
    """Returns a reader of whole numbers in `least`..`most`."""
    return _reader(int, "an integer", least, most)


def real(least: float, most: float = _FLOAT32_MAX) -> Callable[[str], float]:
    """Returns a reader of numbers in `least`..`most`."""
    return _reader(float, "a number", least, most)


def _reader(
    kind: Callable[[str], _Number], expected: str, least: _Number, most: _Number
) -> Callable[[str], _Number]:
    def read(text: str) -> _Number:
        try:
            number = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r:.40}") from None
        if not least <= number:  # also NaN
            raise argparse.ArgumentTypeError(f"expected at least {least}, got {number!s:.40}")
        if not number <= most:
            raise argparse.ArgumentTypeError(f"expected at most {most}, got {number!s:.40}")
        return number

    return read


count = whole(1)
seed = whole(0, 2**32 - 1)
seconds = real(0, 1e6)
positive = real(1e-30)
