"""Estimates the memory and time of a case from the device's figures, without running it.

Memory is the peak of a device. Bytes sent are those of `jattn.parallel.exchanges`. Seconds are
those of the products and of the exchanges, at the device's rates. A ring computes while it sends,
so its time is the longer of the two; the other schemes send before and after they compute, so their
time is the sum.
"""

import dataclasses
import math
from typing import NamedTuple

from experiments.scaling.cases import SCHEMES, ScalingCase


class DeviceRates(NamedTuple):
    """A device: its bytes of memory, the operations per second that attention reaches, and the
    bytes per second that it can send while it receives as many."""

    memory: float
    flops: float
    link: float


class ScalingPlan(NamedTuple):
    """The estimated cost of one scheme: memory and bytes sent of each device, and the seconds until
    all devices are done; `reason` says why the scheme cannot be used, or is None."""

    scheme: str
    memory: float
    sent: int
    compute_seconds: float
    send_seconds: float
    seconds: float
    reason: str | None

    @property
    def impossible(self) -> bool:
        """Whether the scheme cannot run this case at all, so that there are no figures."""
        return math.isnan(self.memory)


class _ScalingSizes(NamedTuple):
    """Bytes of a device's shard of the queries, and of keys and values together, in the inputs'
    dtype and in float32 for sums; `copies` is the extra share that zig-zag order copies."""

    q: float
    kv: float
    q_sums: float
    kv_sums: float
    copies: float

    @classmethod
    def of(cls, case: ScalingCase) -> "_ScalingSizes":
        narrow, wide = 4 if case.dtype == "float32" else 2, 4
        share = case.length * case.head_size / case.devices
        q, kv = share * case.heads, 2 * share * case.key_heads
        copies = 0.5 if case.order == "zigzag" else 0.0
        return cls(narrow * q, narrow * kv, wide * q, wide * kv, copies)


def memory(case: ScalingCase) -> float:
    """Returns the bytes on each device: inputs, the output's gradient, results and temporaries.
    Buffers that XLA reuses are counted once."""
    sizes = _ScalingSizes.of(case)
    temporaries = {"ring": _ring, "all_to_all": _all_to_all, "gather": _gather}[case.scheme](
        case, sizes
    )
    q, kv, q_sums, kv_sums, _ = sizes
    results = q + kv if case.backward else q
    float32_results = (q_sums + kv_sums if case.backward else q_sums) if q < q_sums else 0.0
    return q + kv + (q if case.backward else 0.0) + results + float32_results + temporaries


def _ring(case: ScalingCase, sizes: _ScalingSizes) -> float:
    """Returns the ring's temporaries: the shard of keys and values that is read and the one in
    transit (with two devices, one of them is the input), the output so far and, backward, the
    gradients in transit. Rounds take some of the heads, with copies of their queries and gradients;
    chunks take some of the keys."""
    if case.devices == 1:
        return 0.0
    rounds, chunks = max(((x.rounds, x.chunks) for x in case.exchanges()), default=(1, 1))
    bytes_held = sizes.kv * (min(2, case.devices - 1) if chunks == 1 else 2)
    bytes_held += sizes.kv_sums if case.backward else 0.0
    # XLA keeps a shard's sums besides the previous ones with two devices, or if chunks are summed.
    separate_sums = case.devices == 2 or (case.backward and chunks > 1)
    bytes_held = bytes_held / chunks + sizes.q_sums * (2 if separate_sums else 1)
    if rounds == 1:
        return bytes_held
    copies = sizes.q + (0.0 if separate_sums else sizes.q_sums)
    copies += sizes.q + sizes.kv_sums / chunks if case.backward else 0.0
    return (bytes_held + copies) / rounds


def _all_to_all(case: ScalingCase, sizes: _ScalingSizes) -> float:
    """Returns the temporaries of all-to-all: whole sequences of some heads, for query, output,
    keys, values and their gradients."""
    repeated = math.lcm(case.key_heads, case.devices) / case.key_heads
    kv, kv_sums = sizes.kv * repeated, sizes.kv_sums * repeated
    if case.backward:
        return 2 * sizes.q + 2 * sizes.q_sums + kv + kv_sums
    return sizes.q_sums + kv * (1 + sizes.copies)


def _gather(case: ScalingCase, sizes: _ScalingSizes) -> float:
    """Returns the temporaries of gather: all devices' keys and values and, backward, their
    gradients."""
    shards = case.devices * (1 + sizes.copies)
    return shards * (sizes.kv + (sizes.kv_sums if case.backward else 0.0))


def plan(case: ScalingCase, device: DeviceRates) -> ScalingPlan:
    """Estimates the cost of a case on a device."""
    reason = impossible(case)
    if reason:
        return ScalingPlan(case.scheme, math.nan, 0, math.nan, math.nan, math.nan, reason)
    sent = sum(x.bytes * x.times for x in case.exchanges())
    balanced = case.order == "zigzag" or case.window is not None or case.devices == 1
    busiest = 1.0 if balanced or case.scheme == "all_to_all" else 2 - 1 / case.devices
    compute = case.flops / case.devices * busiest / device.flops
    send = sent / device.link
    seconds = max(compute, send) if case.scheme == "ring" else compute + send
    needed = memory(case)
    reason = "does not fit" if needed > device.memory else None
    return ScalingPlan(case.scheme, needed, sent, compute, send, seconds, reason)


def padded(length: int, devices: int, order: str) -> int:
    """Rounds a length up to the next one that the devices can share evenly."""
    pieces = devices * (2 if order == "zigzag" else 1)
    return -(-length // pieces) * pieces


def impossible(case: ScalingCase) -> str | None:
    """Returns the reason why a case cannot run at all, or None."""
    length = padded(case.length, case.devices, case.order)
    if length != case.length:
        return f"{case.devices} devices cannot share {case.length} tokens, but {length}"
    if case.scheme == "all_to_all" and case.heads % case.devices:
        return f"{case.devices} devices cannot share {case.heads} heads"
    return None


def plans(case: ScalingCase, device: DeviceRates) -> list[ScalingPlan]:
    """Returns the plans of all schemes, with the fastest that fits first."""
    all_plans = [plan(dataclasses.replace(case, scheme=scheme), device) for scheme in SCHEMES]
    return sorted(all_plans, key=lambda x: (x.reason is not None, x.seconds))
