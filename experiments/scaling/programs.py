"""What a compiled program sends: its exchanges, how large each is and how often it runs.

Text in, numbers out. Loops count as often as XLA says that they run.
"""

import collections
import math
import re
from collections.abc import Iterable
from typing import NamedTuple


KINDS = ("collective-permute", "all-to-all", "all-gather", "reduce-scatter", "all-reduce")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)"
)
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_EXCHANGE = re.compile(rf" = (.*?) ({'|'.join(KINDS)})(-start)?\(")
_ARRAY = re.compile(r"\b(pred|bf16|[fsu]\d+)\[([\d,]*)\]")


class Exchange(NamedTuple):
    """One operation: what a device sends each time, and whether it is asynchronous."""

    kind: str
    bytes: int
    times: int
    asynchronous: bool


def exchanges(text: str) -> list[Exchange]:
    """Those of a program as `compiled.as_text()` shows it."""
    computations, entry = _computations(text)
    times: dict[str, int] = collections.defaultdict(int)

    def visit(name: str, runs: int) -> None:
        times[name] += runs
        for line in computations.get(name, ()):
            trips = _TRIPS.search(line)
            inner = runs * int(trips[1]) if trips and " while(" in line else runs
            called = _CALLED.findall(line)
            for branches in _BRANCHES.findall(line):
                called += [x.strip().lstrip("%") for x in branches.split(",")]
            for each in called:
                visit(each, inner)

    visit(entry, 1)
    return [
        found
        for name, lines in computations.items()
        for line in lines
        if times[name] and (found := _exchange(line, times[name])) is not None
    ]


def total(found: Iterable[Exchange]) -> dict[tuple[str, int], int]:
    """How often each kind of exchange of each size runs; an exchange of nothing is none."""
    counted: dict[tuple[str, int], int] = collections.Counter()
    for each in found:
        if each.bytes:
            counted[each.kind, each.bytes] += each.times
    return counted


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    found: dict[str, list[str]] = {}
    entry = name = ""
    for line in text.splitlines():
        header = _HEADER.match(line)
        if header and not line.startswith(" "):
            name = header[2]
            found[name] = []
            entry = name if header[1] else entry
        elif line.startswith(" ") and name:
            found[name].append(line)
    return found, entry


def _exchange(line: str, times: int) -> Exchange | None:
    found = _EXCHANGE.search(line)
    if found is None:
        return None
    result, kind, start = found.groups()
    devices, size = _devices(line), _bytes(result)
    if kind == "collective-permute":
        sent = size // 2 if start else size
    elif kind == "all-gather":
        sent = size * (devices - 1) // (devices + 1 if start else devices)
    elif kind == "reduce-scatter":
        sent = size * (devices - 1) // (devices + 1 if start else 1)
    elif kind == "all-reduce":
        sent = 2 * size * (devices - 1) // devices
    else:
        sent = (size // 2 if start else size) * (devices - 1) // devices
    return Exchange(kind, sent, times, bool(start))


def _bytes(result: str) -> int:
    """Of the arrays of a type; the numbers by which asynchronous operations are told apart are
    none."""
    found = 0
    for kind, sizes in _ARRAY.findall(result):
        if not (kind == "u32" and not sizes):
            bits = 8 if kind == "pred" else int(re.sub(r"\D", "", kind))
            found += math.prod(int(x) for x in sizes.split(",") if x) * bits // 8
    return found


def _devices(line: str) -> int:
    """How many devices exchange with one another."""
    listed = re.search(r"replica_groups=\{\{([\d,]*)\}", line)
    if listed:
        return len(listed[1].split(","))
    counted = re.search(r"replica_groups=\[\d+,(\d+)\]", line)
    if counted:
        return int(counted[1])
    of_mesh = re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", line)
    if of_mesh is None:
        return 1
    sizes = dict(re.findall(r"('\w+')=(\d+)", of_mesh[1]))
    return math.prod(int(sizes[x]) for x in re.findall(r"'\w+'", of_mesh[2]))
