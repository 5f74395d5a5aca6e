"""Which of many combinations run before every commit."""

import itertools
from collections.abc import Iterable
from typing import Any

import pytest


def one_in(n: int, **axes: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrises a test with all combinations, of which one in n is quick and the rest slow.

    They are chosen along diagonals. If an axis has n values, each pair of values of the others is
    quick just once, and if each of three axes has at least n, every pair of values is.
    """
    values = {name: tuple(given) for name, given in axes.items()}
    places = itertools.product(*(range(len(x)) for x in values.values()))
    return pytest.mark.parametrize(
        tuple(values),
        [
            pytest.param(
                *(x[i] for x, i in zip(values.values(), place, strict=True)),
                marks=() if sum(place) % n == 0 else pytest.mark.slow,
            )
            for place in places
        ],
    )
