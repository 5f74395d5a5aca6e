"""One case in a process of its own, for as many virtual devices as it asks for: compiled, run as
often as fits into some seconds, and one line of JSON about it.

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
from experiments.scaling.cases import Case


def row(case: Case, seconds: float) -> dict[str, Any]:
    """What the program of a case takes and sends; with `seconds` above 0 also how long it runs."""
    devices = jax.devices()
    if len(devices) < case.devices:
        raise ValueError(f"--devices {case.devices}: there are {len(devices)}")
    program, found = described(case, devices)
    if seconds > 0:
        times = _times(program, case.inputs(devices), seconds)
        found |= {"milliseconds": 1e3 * statistics.median(times), "runs": len(times)}
        found["peak_bytes"] = _peak()
    return found


def described(case: Case, devices: Any) -> tuple[Any, dict[str, Any]]:
    """The program of a case, and what it takes and sends."""
    began = time.perf_counter()
    program = case.compiled(devices)
    compile_seconds = time.perf_counter() - began
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
    """Of runs after a first one, which counts alone where there is no time for another."""
    times: list[float] = []
    end = time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        began = time.perf_counter()
        jax.block_until_ready(program(*inputs))
        times.append(time.perf_counter() - began)
    return times[1:] or times


def _peak() -> int | None:
    """The most memory that this process has held, in bytes; None where the system does not say."""
    if importlib.util.find_spec("resource") is None:
        return None
    resource: Any = importlib.import_module("resource")
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def run(case: Case, seconds: float, platform: str | None) -> dict[str, Any]:
    """`row` in a process of its own; where the platform is "cpu", with virtual devices.

    Raises:
        Failure: the process failed, with the last line that it wrote.
    """
    environment = dict(os.environ)
    if platform is not None:
        environment["JAX_PLATFORMS"] = {"gpu": "cuda"}.get(platform, platform)
    if platform == "cpu":
        flag = f"--xla_force_host_platform_device_count={case.devices}"
        environment["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '')} {flag}".strip()
    described = json.dumps(dataclasses.asdict(case))
    done = subprocess.run(
        [sys.executable, "-m", "experiments.scaling.job", str(seconds), described],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    if done.returncode:
        said = (done.stderr.strip() or f"ended with {done.returncode}").splitlines()[-1]
        raise Failure(f"{case.scheme}, {case.devices} devices, {case.length:,} tokens: {said}")
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    print(json.dumps(row(Case(**json.loads(sys.argv[2])), float(sys.argv[1]))))
