"""Sizes that measured fastest, by kind of device.

The rows are made by `python -m experiments.benchmark tune`, which measures on the machine it runs
on and prints its row.
"""

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import jax


class Sizes(NamedTuple):
    """How the blockwise implementation cuts a head of T queries and S keys.

    A head of at most `whole` pairs is one piece. Others are cut into blocks of `small` where one
    block of queries visits at most `narrow` keys on average, of `largest` where it surely visits
    `wide` or more, else of `large`. Heads in one piece are taken together, as many batch rows at a
    time as hold about `together` numbers.
    """

    whole: int = 256 * 256
    together: int = 2**28
    narrow: int = 1024
    small: int = 128
    large: int = 512
    wide: int = 2048
    largest: int = 512


DEFAULT = Sizes()

TABLE: dict[str, Sizes] = {
    "cpu": Sizes(
        whole=256 * 256,
        together=3_200_000,
        narrow=1024,
        small=128,
        large=512,
        wide=2048,
        largest=1024,
    ),
}
"""By device kind as JAX spells it ("NVIDIA H200", "TPU v5 lite", "cpu"); `DEFAULT` for others."""

MANY_KEYS = 512
"""From how many keys on a few queries go to the kernel on CPUs that is for them, whose time is that
of reading the keys."""

_tried: list[Sizes] = []


def device_kind(platform: str) -> str:
    """The kind of the devices of a platform; the platform itself where this process has none."""
    try:
        return jax.local_devices(backend=platform)[0].device_kind
    except RuntimeError:
        return platform


def sizes(platform: str) -> Sizes:
    """The row for the devices of a platform that a program is lowered for."""
    return _tried[-1] if _tried else TABLE.get(device_kind(platform), DEFAULT)


@contextlib.contextmanager
def trying(row: Sizes) -> Iterator[None]:
    """A context in which programs are lowered with the sizes of this row; for measuring it."""
    _tried.append(row)
    try:
        yield
    finally:
        _tried.pop()
