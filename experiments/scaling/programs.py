"""Reads the exchanges of a compiled program from its HLO text: their sizes and how often they run.

A loop counts with the number of iterations that XLA states.
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


class CompiledExchange(NamedTuple):
    """One collective operation: its kind, the bytes that a device sends each time, how often it
    runs, and whether it overlaps other operations, that is, whether it is asynchronous and some
    stand between its start and its end."""

    kind: str
    bytes: int
    times: int
    overlapped: bool


def exchanges(text: str) -> list[CompiledExchange]:
    """Returns the exchanges of a program from the text of `compiled.as_text()`."""
    computations, entry = _computations(text)
    times: dict[str, int] = collections.defaultdict(int)

    def visit(name: str, runs: int) -> None:
        times[name] += runs
        for line in computations.get(name, ()):
            inner = runs * _trips(line, computations) if " while(" in line else runs
            called = _CALLED.findall(line)
            for branches in _BRANCHES.findall(line):
                called += [x.strip().lstrip("%") for x in branches.split(",")]
            for callee in called:
                visit(callee, inner)

    visit(entry, 1)
    return [
        exchange
        for name, lines in computations.items()
        for index, line in enumerate(lines)
        if times[name]
        and (exchange := _exchange(line, lines[index + 1 :], times[name])) is not None
    ]


def total(exchanges: Iterable[CompiledExchange]) -> dict[tuple[str, int], int]:
    """Counts the runs of each kind and size of exchange; exchanges of 0 bytes do not count."""
    counts: dict[tuple[str, int], int] = collections.Counter()
    for exchange in exchanges:
        if exchange.bytes:
            counts[exchange.kind, exchange.bytes] += exchange.times
    return counts


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    computations: dict[str, list[str]] = {}
    entry = name = ""
    for line in text.splitlines():
        header = _HEADER.match(line)
        if header and not line.startswith(" "):
            name = header[2]
            computations[name] = []
            entry = name if header[1] else entry
        elif line.startswith(" ") and name:
            computations[name].append(line)
    return computations, entry


def _trips(line: str, computations: dict[str, list[str]]) -> int:
    """Returns the number of iterations of a loop; 1 if the text does not state it."""
    known = _TRIPS.search(line)
    condition = re.search(r"condition=%?([\w.\-]+)", line)
    if known or condition is None:
        return int(known[1]) if known else 1
    lines = "\n".join(computations.get(condition[1], ()))
    limit = re.search(r"ROOT .* compare\(%?[\w.\-]+, %?([\w.\-]+)\), direction=LT", lines)
    value = limit and re.search(rf"%?{re.escape(limit[1])} = s32\[\]\S* constant\((\d+)\)", lines)
    return int(value[1]) if value else 1


def _overlapped(line: str, following: list[str]) -> bool:
    name = line.partition(" = ")[0].strip()
    for operation in following:
        if f"-done({name})" in operation:
            return False
        if re.search(r" (while|fusion|custom-call|conditional|call)\(", operation):
            return True
    return False


def _exchange(line: str, following: list[str], times: int) -> CompiledExchange | None:
    match = _EXCHANGE.search(line)
    if match is None:
        return None
    result, kind, start = match.groups()
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
    return CompiledExchange(kind, sent, times, bool(start) and _overlapped(line, following))


def _bytes(result: str) -> int:
    """Returns the bytes of the arrays in a result type, without the u32 scalars that identify
    asynchronous operations."""
    total_bytes = 0
    for kind, sizes in _ARRAY.findall(result):
        if not (kind == "u32" and not sizes):
            bits = 8 if kind == "pred" else int(re.sub(r"\D", "", kind))
            total_bytes += math.prod(int(x) for x in sizes.split(",") if x) * bits // 8
    return total_bytes


def _devices(line: str) -> int:
    """Returns the number of devices in a group that exchange with one another."""
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
