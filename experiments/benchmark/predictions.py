"""Predicts the speed of kernels compiled for an H100, by the model of `experiments.offline`."""

import functools
from typing import Any

from experiments.benchmark.cases import BenchmarkCase
from experiments.offline import kept, machine_code, targets
from experiments.offline.job import Job


_CASES = {"full": "full", "causal": "causal", "documents": "segments"}
_LIKE_H100 = "H100", "H200", "GH200"  # devices with the same multiprocessors
_THREADS, _EACH = 128, 8  # threads of a warpgroup; cycles of a power of two in each warp


def predicted(
    implementation: str, kind: str, case: BenchmarkCase, backward: bool
) -> list[float] | None:
    """Returns the least and the greatest TFLOP/s of a pass's necessary products, on tiles without a
    mask; None if there is no prediction for this kernel on this kind of device."""
    if not any(name in kind for name in _LIKE_H100):
        return None
    rows = _rows()
    for name in (_CASES.get(case.pattern), "causal" if case.pattern == "documents" else None):
        row = rows.get(Job("h100", str(name), implementation, case.H, "bfloat16", "gradients"))
        if row and row["status"] == "compiled":
            return _of_row(row, case.H, backward)
    return None


@functools.cache
def _rows() -> dict[Job, dict[str, Any]]:
    return kept.read(kept.path("h100"), "h100")


def _of_row(row: dict[str, Any], head: int, backward: bool) -> list[float]:
    """Predicts a pass from its kernels, which recompute products; 2 are needed forward, 5
    backward."""
    loops = [
        machine_code.MachineLoop(**kernel["main_loop"])
        for kernel in row["kernels"]
        if kernel["kernel"].endswith("_forward") is not backward
    ]
    per_cycle, teraflops = targets.H100.peak or (1, 0.0)
    bounds = []
    for bound in (0, 1):
        cycles = sum(_products(x, head) / x.products_per_cycle[bound] for x in loops)
        bounds.append(round((5 if backward else 2) / cycles * teraflops / per_cycle, 1))
    return bounds


def _products(loop: machine_code.MachineLoop, head: int) -> int:
    """Returns the products of a loop for each query-key pair; a pair takes one power of two."""
    pairs = loop.special_cycles / _EACH * _THREADS
    return round(loop.products / (pairs * head))
