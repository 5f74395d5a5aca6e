"""What pictures are made of, checked: arrays of weights, and the tokens beside them.

Raises TypeError for the wrong kind of thing and ValueError for a wrong value or shape, with the
argument's name, what was expected and what came.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jattn.checks import check_array, shown


_LONGEST_LABEL = 40  # letters

# C0 and C1 controls, separators of lines, and characters that turn the direction of text.
_CONTROLS = {
    code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
    for code in (
        *range(0x20),
        *range(0x7F, 0xA0),
        *(0x061C, 0x200E, 0x200F, 0x2028, 0x2029, 0xFEFF),
        *range(0x202A, 0x202F),
        *range(0x2066, 0x206A),
    )
} | {0x09: "\u21e5", 0x0A: "\u21b5"}


def visible(token: str) -> str:
    """A token as a label: control characters spelled out, spaces at its ends as low blocks."""
    text = token.translate(_CONTROLS)
    inner = text.strip(" ")
    if not inner:
        return "\u2581" * len(text) or "\u2205"
    before, _, after = text.partition(inner)
    return "\u2581" * len(before) + inner + "\u2581" * len(after)


def label(token: str) -> str:
    """A token as a label in a picture, of which no more than the beginning is drawn: a long one
    would take the whole picture, and minutes to draw."""
    text = visible(token[:_LONGEST_LABEL])
    return f"{text}…" if len(token) > _LONGEST_LABEL else text


def checked_tokens(name: str, value: Any, size: int, letter: str) -> list[str] | None:
    """`size` tokens, or None where none are given."""
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
    """The finite numbers of an array as float32 or float64; if `masked`, also −inf."""
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
    """A line of text, or None."""
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{name}: expected a string or None, got {shown(value)}")
    return value if value is None else visible(value)
