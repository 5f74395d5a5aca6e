"""Compiles one call in a separate process, whose compilers write their output to a folder. If a
compiler aborts, only that process ends.

    python -m experiments.offline.job TARGET CASE IMPLEMENTATION HEAD DTYPE PASS LENGTH FOLDER

The last line of its output is the result, in JSON.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import jax

from experiments.offline import calls, machine_code, targets
from experiments.runs.ending import one_line


COMPILED, UNSUPPORTED, FAILED = "compiled", "unsupported", "failed"
PASSES = ("forward", "gradients")
_LONGEST = 500  # most characters of an error message


class Job(NamedTuple):
    """One program to compile. The pass `gradients` includes the forward kernel; length 0 means the
    case's own length."""

    target: str
    case: str
    implementation: str
    head: int
    dtype: str
    which: str  # of PASSES
    length: int = 0


def run(job: Job, seconds: float) -> dict[str, Any]:
    """Compiles a job and returns a row of the results.

    `status` is compiled, unsupported (the implementation gave a reason) or failed; `message` says
    why; for a GPU, `kernels` has the figures of each kernel.
    """
    with tempfile.TemporaryDirectory(prefix="jattn-offline-") as folder:
        row = _in_a_process(job, Path(folder), seconds)
        if targets.TARGETS[job.target].is_gpu and row["status"] == COMPILED:
            try:
                row["kernels"] = kernels(Path(folder))
            except ValueError as error:
                row |= {"status": FAILED, "message": one_line(error)[:_LONGEST]}
    names = ("target", "case", "implementation", "head", "dtype", "pass", "length")
    job_fields = dict(zip(names if job.length else names[:-1], job, strict=False))
    return job_fields | row


def _in_a_process(job: Job, folder: Path, seconds: float) -> dict[str, Any]:
    command = [sys.executable, "-m", __name__, *map(str, job), str(folder)]
    try:
        process = subprocess.run(
            command,
            env=_environment(job, folder),
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"status": FAILED, "message": f"not ready after {seconds:g} seconds"}
    with contextlib.suppress(IndexError, json.JSONDecodeError):
        row = json.loads(process.stdout.splitlines()[-1])
        if isinstance(row, dict):
            return row
    ended = f"exit status {process.returncode}"
    if process.returncode < 0:
        with contextlib.suppress(ValueError):
            ended = f"killed by {signal.Signals(-process.returncode).name}"
    error_output = " | ".join(process.stderr.strip().splitlines()[-3:])
    return {"status": FAILED, "message": f"{ended}: {error_output[-_LONGEST:]}"}


def _environment(job: Job, folder: Path) -> dict[str, str]:
    """Returns the process's environment: no device is opened, and GPU compilers dump their
    output."""
    inherited = {
        name: value for name, value in os.environ.items() if "COMPILATION_CACHE" not in name
    }
    environment = {**inherited, "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}
    target = targets.TARGETS[job.target]
    if not target.is_gpu:
        return environment
    tools = dict.fromkeys(str(targets.tool(name).parent) for name, _ in target.tools)
    return environment | {
        "PATH": os.pathsep.join([*tools, os.environ.get("PATH", "")]),
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={folder}".strip(),
        "MOSAIC_GPU_DUMP_TO": str(folder),
        "MOSAIC_GPU_DUMP_PTX": "1",
        "MOSAIC_GPU_DUMP_MLIR_PASSES": "1",  # these passes show a launch's shared memory
    }


def is_reason(error: BaseException, implementation: str) -> bool:
    """Returns whether an error is jattn's reason; compilers raise NotImplementedError too."""
    says_who = f"implementation {implementation!r}: "
    return isinstance(error, NotImplementedError) and str(error).startswith(says_who)


def outcome(job: Job) -> dict[str, Any]:
    """Compiles a job in this process and returns its figures, or the error."""
    call, target = calls.CALLS[job.case], targets.TARGETS[job.target]
    call = call.of_length(job.length) if job.length else call
    options = targets.ALL_TEMPORARIES if job.length and not target.is_gpu else {}
    function = (call.gradients if job.which == "gradients" else call.forward)(job.implementation)
    start = time.perf_counter()
    try:
        arrays = call.arrays(job.head, job.dtype)
        program = targets.compiled(target, function, *arrays, options=options)
    except Exception as error:  # the row reports whatever a compiler raises
        if is_reason(error, job.implementation):
            return {"status": UNSUPPORTED, "message": one_line(error)}
        return {
            "status": FAILED,
            "message": f"{type(error).__name__}: {one_line(error)}"[:_LONGEST],
        }
    return {
        "status": COMPILED,
        "message": "",
        "jax": jax.__version__,
        "seconds": round(time.perf_counter() - start, 1),
        **_of_program(program),
    }


def _of_program(program: Any) -> dict[str, Any]:
    """Returns XLA's figures: bytes of temporaries, bytes moved if counted, kernels and loops."""
    memory, cost = program.memory_analysis(), program.cost_analysis()
    try:
        text = program.as_text()
    except jax.errors.JaxRuntimeError:  # JAX 0.10 cannot print some copies for a v6e
        text = None
    return {
        "temporary_bytes": None if memory is None else memory.temp_size_in_bytes,
        "bytes_moved": int(cost["bytes accessed"]) if cost and "bytes accessed" in cost else None,
        "custom_kernels": _count(r'custom_call_target="(?:tpu_custom_call|mosaic)', text),
        "loops": _count(r" while\(", text),
    }


def _count(pattern: str, text: str | None) -> int | None:
    return None if text is None else len(re.findall(pattern, text))


def kernels(folder: Path) -> list[dict[str, Any]]:
    """Returns the figures of each PTX file in a folder that is a kernel of ours or has matrix
    products.

    Raises:
        ValueError: ptxas or nvdisasm rejects a kernel.
    """
    shared = _shared_memory(folder)
    figures = []
    for path in sorted(folder.glob("*.ptx")):
        text = path.read_text(encoding="utf-8")
        name = re.search(r"\.entry (\w+)\(", text)
        if name and re.search(r"jattn|wgmma|mma\.sync", text):
            figures.append(_kernel(path, text, name[1].removesuffix("_mosaic_gpu_kernel"), shared))
    return figures


def _kernel(path: Path, text: str, name: str, shared: dict[str, int]) -> dict[str, Any]:
    threads = re.search(r"\.(?:maxntid|reqntid) (\d+)", text)
    architecture = re.search(r"^\.target (\w+)", text, re.MULTILINE)
    binary = path.with_suffix(".cubin")
    target = architecture[1] if architecture else "sm_90a"
    options = [f"-arch={target}", "-v", *_as_linked(path.with_suffix(".ptxas"))]
    ptxas_output = _said("ptxas", *options, str(path), "-o", str(binary))
    used = machine_code.resources(ptxas_output)
    loops = machine_code.loops(_said("nvdisasm", "-c", str(binary)))
    hot = machine_code.main_loop(loops)
    return {
        "kernel": name,
        "threads": int(threads[1]) if threads else None,
        **used._asdict(),
        "shared_bytes": shared.get(name, 0) + used.shared_bytes,
        "main_loop": None if hot is None else hot._asdict(),
        "loops": [loop._asdict() for loop in loops],
    }


def _as_linked(dump: Path) -> list[str]:
    """Returns the ptxas option that makes linkable code if JAX compiled the kernel by nvJitLink, as
    "info" lines in the dumped output show: such code moves no registers between warpgroups."""
    text = dump.read_text(encoding="utf-8", errors="replace") if dump.exists() else ""
    return ["-c"] if re.search(r"^info ", text, re.MULTILINE) else []


def _said(tool: str, *arguments: str) -> str:
    process = subprocess.run(
        [targets.tool(tool), *arguments], capture_output=True, text=True, check=False
    )
    output = process.stdout + process.stderr
    if process.returncode:
        raise ValueError(f"{tool} ended with {process.returncode}: {output.strip()[-_LONGEST:]}")
    return output


def _shared_memory(folder: Path) -> dict[str, int]:
    """Returns the dynamic shared memory of a block, in bytes, by kernel."""
    sizes = {}
    for path in folder.glob("*.mlir-passes.log"):
        module = size = None
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                module = module or re.search(r"'builtin.module' operation: @(\w+)", line)
                size = re.search(r"dynamic_shared_memory_size %c(\d+)", line)
                if size:
                    break
        if module and size:
            sizes[module[1]] = int(size[1])
    for path in folder.glob("*.thunk_sequence.txt"):
        for name, size in re.findall(
            r"\] (\S+) grid: .*?shared_memory: (\d+)", path.read_text(encoding="utf-8")
        ):
            sizes[name] = int(size)
    return sizes


def main(argv: list[str]) -> int:
    """Compiles a job and prints a line of JSON."""
    target, case, implementation, head, dtype, pass_name, length, _ = argv
    warnings.filterwarnings("ignore")
    job = Job(target, case, implementation, int(head), dtype, pass_name, int(length))
    print(json.dumps(outcome(job)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
