"""Numbers of the command line, for argparse's `type`: each has two bounds."""

import argparse
from collections.abc import Callable


_INT32_MAX = 2**31 - 1
_FLOAT32_MAX = 3e38


def whole(least: int, most: int = _INT32_MAX) -> Callable[[str], int]:
    """Returns what reads a whole number in `least`..`most`."""

    def integer(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected an integer, got {text!r:.40}") from None
        _check(number, least, most)
        return number

    return integer


def real(least: float, most: float = _FLOAT32_MAX) -> Callable[[str], float]:
    """Returns what reads a number in `least`..`most`."""

    def decimal(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected a number, got {text!r:.40}") from None
        _check(number, least, most)
        return number

    return decimal


def _check(number: float, least: float, most: float) -> None:
    if not least <= number:  # NaN is neither
        raise argparse.ArgumentTypeError(f"expected at least {least}, got {number!s:.40}")
    if not number <= most:
        raise argparse.ArgumentTypeError(f"expected at most {most}, got {number!s:.40}")


count = whole(1)
seed = whole(0, 2**32 - 1)
seconds = real(0, 1e6)
positive = real(1e-30)
