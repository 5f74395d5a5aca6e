"""Measures one case in a separate process: compiles it, runs it repeatedly for a number of seconds
and prints one line of JSON. On CPUs, the process has as many virtual devices as the case needs.

    python -m experiments.scaling.job SECONDS '{"scheme": "ring", "devices": 8, ...}'
"""

import dataclasses
import importlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import jax

from experiments.runs.ending import Failure
from experiments.scaling import programs
from experiments.scaling.cases import ScalingCase


def row(case: ScalingCase, seconds: float) -> dict[str, Any]:
    """Measures the memory and exchanges of a case's program and, if `seconds` > 0, its time."""
    devices = jax.devices()
    if len(devices) < case.devices:
        raise ValueError(f"--devices {case.devices}: there are {len(devices)}")
    program, figures = described(case, devices)
    if seconds > 0:
        times = _times(program, case.inputs(devices), seconds)
        figures |= {"milliseconds": 1e3 * statistics.median(times), "runs": len(times)}
        figures["peak_bytes"] = _peak()
    return figures


def described(case: ScalingCase, devices: Any) -> tuple[Any, dict[str, Any]]:
    """Compiles a case; returns the program, and its memory and exchanges."""
    start = time.perf_counter()
    program = case.compiled(devices)
    compile_seconds = time.perf_counter() - start
    memory = program.memory_analysis()
    sent = programs.exchanges(program.as_text())
    return program, {
        **dataclasses.asdict(case),
        "device": devices[0].device_kind,
        "compile_seconds": compile_seconds,
        "temporary_bytes": memory.temp_size_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "sent_bytes": sum(x.bytes * x.times for x in sent),
        "overlapped_bytes": sum(x.bytes * x.times for x in sent if x.overlapped),
        "formula_bytes": sum(x.bytes * x.times for x in case.exchanges()),
    }


def _times(program: Any, inputs: list[Any], seconds: float) -> list[float]:
    """Returns the seconds of each run after the first, or of the first if there was no other."""
    times: list[float] = []
    end = time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        start = time.perf_counter()
        jax.block_until_ready(program(*inputs))
        times.append(time.perf_counter() - start)
    return times[1:] or times


def _peak() -> int | None:
    """Returns the process's peak memory in bytes; None if the system does not report it."""
    if importlib.util.find_spec("resource") is None:
        return None
    resource: Any = importlib.import_module("resource")
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def run(case: ScalingCase, seconds: float, platform: str | None) -> dict[str, Any]:
    """Runs `row` in a separate process; on the platform "cpu", with virtual devices.

    Raises:
        Failure: the process failed; the message has the last line of its error output.
    """
    environment = dict(os.environ)
    if platform is not None:
        environment["JAX_PLATFORMS"] = {"gpu": "cuda"}.get(platform, platform)
    if platform == "cpu":
        flag = f"--xla_force_host_platform_device_count={case.devices}"
        environment["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '')} {flag}".strip()
    case_json = json.dumps(dataclasses.asdict(case))
    process = subprocess.run(
        [sys.executable, "-m", "experiments.scaling.job", str(seconds), case_json],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    if process.returncode:
        message = (process.stderr.strip() or f"ended with {process.returncode}").splitlines()[-1]
        raise Failure(f"{case.scheme}, {case.devices} devices, {case.length:,} tokens: {message}")
    return json.loads(process.stdout.splitlines()[-1])


if __name__ == "__main__":
    print(json.dumps(row(ScalingCase(**json.loads(sys.argv[2])), float(sys.argv[1]))))
