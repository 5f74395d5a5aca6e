"""Names that were probably meant."""

import difflib
from collections.abc import Iterable


def nearest(name: str, names: Iterable[str]) -> str:
    """Of these names up to three that are spelled much like one, in words; or nothing."""
    found = difflib.get_close_matches(name, list(names), n=3)
    return f"; nearest: {', '.join(found)}" if found else ""
