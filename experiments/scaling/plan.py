"""What a case would take on devices that are not here, on paper.

Memory counts what a device holds at once; bytes sent are those of `jattn.parallel.exchanges`, the
seconds those of the products and of the bytes at the rates that are given. A ring computes while it
sends, so that the longer of both counts; the other schemes send first and last.
"""

import dataclasses
import math
from typing import NamedTuple

from experiments.scaling.cases import SCHEMES, Case


class Device(NamedTuple):
    """Bytes of memory, operations a second that attention reaches, and bytes a second that a device
    can send while it receives as many."""

    memory: float
    flops: float
    link: float


class Plan(NamedTuple):
    """What one scheme would take of each device, and in which time all are done; `reason` says why
    it cannot be used, if so."""

    scheme: str
    memory: float
    sent: int
    compute_seconds: float
    send_seconds: float
    seconds: float
    reason: str | None

    @property
    def impossible(self) -> bool:
        """Whether there are no figures."""
        return math.isnan(self.memory)


class _Sizes(NamedTuple):
    """Bytes of a device's share of the queries, and of keys and values together, in the dtype of
    the inputs and in that of sums; and whether zig-zag order costs a copy."""

    q: float
    kv: float
    q_sums: float
    kv_sums: float
    copies: float

    @classmethod
    def of(cls, case: Case) -> "_Sizes":
        narrow, wide = 4 if case.dtype == "float32" else 2, 4
        share = case.length * case.head_size / case.devices
        q, kv = share * case.heads, 2 * share * case.key_heads
        copies = 0.5 if case.order == "zigzag" else 0.0
        return cls(narrow * q, narrow * kv, wide * q, wide * kv, copies)


def memory(case: Case) -> float:
    """Bytes on each device: inputs, the gradient that comes in, results, and what is held on the
    way. What XLA puts into the place of something else is counted once."""
    sizes = _Sizes.of(case)
    held = {"ring": _ring, "all_to_all": _all_to_all, "gather": _gather}[case.scheme](case, sizes)
    q, kv, q_sums, kv_sums, _ = sizes
    results = q + kv if case.backward else q
    apart = (q_sums + kv_sums if case.backward else q_sums) if q < q_sums else 0.0
    return q + kv + (q if case.backward else 0.0) + results + apart + held


def _ring(case: Case, sizes: _Sizes) -> float:
    """The shard that is read and the one under way (of two devices, one is the input), the output
    so far, and backward the gradients that are under way. Of a few heads or keys, where these go
    round by themselves; of heads with copies of their queries and gradients."""
    if case.devices == 1:
        return 0.0
    rounds, chunks = max(((x.rounds, x.chunks) for x in case.exchanges()), default=(1, 1))
    held = sizes.kv * (min(2, case.devices - 1) if chunks == 1 else 2)
    held += sizes.kv_sums if case.backward else 0.0
    # XLA holds a shard's sums beside the last: of two devices, or where chunks are added up.
    apart = case.devices == 2 or (case.backward and chunks > 1)
    held = held / chunks + sizes.q_sums * (2 if apart else 1)
    if rounds == 1:
        return held
    copies = sizes.q + (0.0 if apart else sizes.q_sums)
    copies += sizes.q + sizes.kv_sums / chunks if case.backward else 0.0
    return (held + copies) / rounds


def _all_to_all(case: Case, sizes: _Sizes) -> float:
    """Whole sequences of some heads: query, output and their gradients, keys, values and theirs."""
    repeated = math.lcm(case.key_heads, case.devices) / case.key_heads
    kv, kv_sums = sizes.kv * repeated, sizes.kv_sums * repeated
    if case.backward:
        return 2 * sizes.q + 2 * sizes.q_sums + kv + kv_sums
    return sizes.q_sums + kv * (1 + sizes.copies)


def _gather(case: Case, sizes: _Sizes) -> float:
    """Keys and values of all devices, and backward their gradients."""
    held = case.devices * (1 + sizes.copies)
    return held * (sizes.kv + (sizes.kv_sums if case.backward else 0.0))


def plan(case: Case, device: Device) -> Plan:
    """What a case would take."""
    reason = impossible(case)
    if reason:
        return Plan(case.scheme, math.nan, 0, math.nan, math.nan, math.nan, reason)
    sent = sum(x.bytes * x.times for x in case.exchanges())
    balanced = case.order == "zigzag" or case.window is not None or case.devices == 1
    busiest = 1.0 if balanced or case.scheme == "all_to_all" else 2 - 1 / case.devices
    compute = case.flops / case.devices * busiest / device.flops
    send = sent / device.link
    seconds = max(compute, send) if case.scheme == "ring" else compute + send
    taken = memory(case)
    reason = "does not fit" if taken > device.memory else None
    return Plan(case.scheme, taken, sent, compute, send, seconds, reason)


def padded(length: int, devices: int, order: str) -> int:
    """The least length from this one on that the devices can share evenly."""
    pieces = devices * (2 if order == "zigzag" else 1)
    return -(-length // pieces) * pieces


def impossible(case: Case) -> str | None:
    """Why a case cannot be run at all, if so."""
    length = padded(case.length, case.devices, case.order)
    if length != case.length:
        return f"{case.devices} devices cannot share {case.length} tokens, but {length}"
    if case.scheme == "all_to_all" and case.heads % case.devices:
        return f"{case.devices} devices cannot share {case.heads} heads"
    return None


def plans(case: Case, device: Device) -> list[Plan]:
    """All schemes, the quickest that fits first."""
    found = [plan(dataclasses.replace(case, scheme=scheme), device) for scheme in SCHEMES]
    return sorted(found, key=lambda x: (x.reason is not None, x.seconds))
