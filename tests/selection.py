"""Which of a test's cases run before every commit: `@pytest.mark.one_in(n)` over `parametrize`."""

import math
from typing import Any

import pytest


_ParameterSet = type(pytest.param())


def thin(items: list[Any]) -> None:
    """Keeps one in n of the cases of tests marked `one_in(n)` in the quick suite.

    Of the others one in 20 becomes slow (one in 60 for n >= 4, 100 for n >= 8, 160 for n >= 20), if
    there are at least 12 cases, and the rest exhaustive. `one_in(n, slow=True)` makes one in n slow
    and the others exhaustive. Cases that are exhaustive already stay so.

    Cases are chosen along diagonals: the indices of a case's values on their axes sum to a
    multiple of n. If an axis has n values, each pair of values of the others is chosen just once,
    and if each of three axes has at least n, every pair of values is. The first case is always
    chosen.
    """
    places = _Places()
    for item in items:
        mark = item.get_closest_marker("one_in")
        if mark is None or item.get_closest_marker("exhaustive"):
            continue
        (n,) = mark.args
        place = sum(places(item))
        rest = place % n
        if mark.kwargs.get("slow"):
            item.add_marker(pytest.mark.exhaustive if rest else pytest.mark.slow)
        elif rest:
            others_before = place - place // n - 1
            every = 160 if n >= 20 else 100 if n >= 8 else 60 if n >= 4 else 20
            cases = math.prod(len(x.args[1]) for x in item.iter_markers("parametrize"))
            often = cases >= 12 and others_before % every == 0
            item.add_marker(pytest.mark.slow if often else pytest.mark.exhaustive)


class _Places:
    """The index of a case's values on each axis; what is parametrised together is one axis."""

    def __init__(self):
        self.of_rows: dict[int, dict[tuple[int, ...], int]] = {}  # by the identity of a mark

    def __call__(self, item: Any) -> list[int]:
        places = []
        for mark in item.iter_markers("parametrize"):
            names, rows = mark.args
            names = [x.strip() for x in names.split(",")] if isinstance(names, str) else names
            if id(mark) not in self.of_rows:
                self.of_rows[id(mark)] = _places_of_rows(rows, len(names))
            values = (id(item.callspec.params[name]) for name in names)
            places.append(self.of_rows[id(mark)][*values])
        return places


def _places_of_rows(rows: Any, columns: int) -> dict[tuple[int, ...], int]:
    """Returns the first index of each row, by the identities of its values."""
    places: dict[tuple[int, ...], int] = {}
    for n, row in enumerate(rows):
        if isinstance(row, _ParameterSet):
            values = row.values
        else:
            values = (row,) if columns == 1 else row
        places.setdefault(tuple(map(id, values)), n)
    return places
