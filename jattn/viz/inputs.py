"""Checks of what users pass to the figures and the viewer: arrays of weights, and tokens.

The checks raise TypeError for a wrong type and ValueError for a wrong value or shape. Messages name
the argument, what was expected and what was passed.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jattn.checks import check_array, shown


_LONGEST_LABEL = 40  # characters

# C0 and C1 controls, line separators, characters that change the direction of text, and surrogates,
# which stand for bytes that are not text.
_CONTROLS = {
    code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
    for code in (
        *range(0x20),
        *range(0x7F, 0xA0),
        *(0x061C, 0x200E, 0x200F, 0x2028, 0x2029, 0xFEFF),
        *range(0x202A, 0x202F),
        *range(0x2066, 0x206A),
        *range(0xD800, 0xE000),
    )
} | {0x09: "\u21e5", 0x0A: "\u21b5"}


def visible(token: str) -> str:
    """Returns a token as a label: control characters as escapes, outer spaces as low blocks."""
    text = token.translate(_CONTROLS)
    inner = text.strip(" ")
    if not inner:
        return "\u2581" * len(text) or "\u2205"
    leading, _, trailing = text.partition(inner)
    return "\u2581" * len(leading) + inner + "\u2581" * len(trailing)


def label(token: str) -> str:
    """Returns a token as a label in a figure, cut after 40 characters: a long token would fill
    the figure and take minutes to draw."""
    text = visible(token[:_LONGEST_LABEL])
    return f"{text}…" if len(token) > _LONGEST_LABEL else text


def checked_tokens(name: str, value: Any, size: int, letter: str) -> list[str] | None:
    """Returns the `size` tokens as strings, or None if `value` is None."""
    if value is None:
        return None
    if isinstance(value, str | bytes) or not isinstance(value, Sequence | np.ndarray):
        raise TypeError(f"{name}: expected a sequence of {letter} strings, got {shown(value)}")
    tokens = list(value)
    for token in tokens:
        if not isinstance(token, str):
            raise TypeError(f"{name}: expected strings, got {shown(token)}")
    if len(tokens) != size:
        raise ValueError(f"{name}: expected {letter} = {size} tokens, got {len(tokens)}")
    return [str(token) for token in tokens]


def checked_values(
    name: str, value: Any, letters: str, ndims: tuple[int, ...], *, masked: bool = False
) -> np.ndarray:
    """Returns a finite array as float32 or float64; with `masked`, −inf is allowed too."""
    check_array(name, value, letters, "real")
    if value.ndim not in ndims or 0 in value.shape:
        raise ValueError(f"{name}: expected {letters} without empty axes, got {list(value.shape)}")
    wide = value.dtype.itemsize > 4
    array = np.asarray(value, np.float64 if wide else np.float32)
    wrong = ~np.isfinite(array) & ~(masked & (array == -np.inf))
    if wrong.any():
        place = np.argwhere(wrong)[0].tolist()
        also = " or -inf" if masked else ""
        raise ValueError(
            f"{name}: expected finite numbers{also}, got {array[tuple(place)]} at {place}"
        )
    return array


def checked_title(name: str, value: Any) -> str | None:
    """Returns a title as a visible label, or None."""
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{name}: expected a string or None, got {shown(value)}")
    return value if value is None else visible(value)
