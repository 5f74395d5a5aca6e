"""One call, compiled in a process of its own: what compilers write goes to a folder, and a compiler
that aborts takes nobody with it.

    python -m experiments.offline.job TARGET CASE IMPLEMENTATION HEAD DTYPE PASS LENGTH FOLDER

The last line of its output is what came out, in JSON.
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
_LONGEST = 500  # characters of an error


class Job(NamedTuple):
    """What is compiled. `gradients` holds the forward kernel too; length 0 is that of the case."""

    target: str
    case: str
    implementation: str
    head: int
    dtype: str
    which: str  # of PASSES
    length: int = 0


def run(job: Job, seconds: float) -> dict[str, Any]:
    """What came out of a job: a row of the results.

    `status` is compiled, unsupported (the implementation gave its reason) or failed; `message` says
    why; for a GPU `kernels` holds each one's figures.
    """
    with tempfile.TemporaryDirectory(prefix="jattn-offline-") as folder:
        row = _in_a_process(job, Path(folder), seconds)
        if targets.TARGETS[job.target].is_gpu and row["status"] == COMPILED:
            try:
                row["kernels"] = kernels(Path(folder))
            except ValueError as error:
                row |= {"status": FAILED, "message": one_line(error)[:_LONGEST]}
    names = ("target", "case", "implementation", "head", "dtype", "pass", "length")
    asked = dict(zip(names if job.length else names[:-1], job, strict=False))
    return asked | row


def _in_a_process(job: Job, folder: Path, seconds: float) -> dict[str, Any]:
    command = [sys.executable, "-m", __name__, *map(str, job), str(folder)]
    try:
        done = subprocess.run(
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
        row = json.loads(done.stdout.splitlines()[-1])
        if isinstance(row, dict):
            return row
    ended = f"exit status {done.returncode}"
    if done.returncode < 0:
        with contextlib.suppress(ValueError):
            ended = f"killed by {signal.Signals(-done.returncode).name}"
    said = " | ".join(done.stderr.strip().splitlines()[-3:])
    return {"status": FAILED, "message": f"{ended}: {said[-_LONGEST:]}"}


def _environment(job: Job, folder: Path) -> dict[str, str]:
    """No device is looked for, and the GPU's compilers write down what they make."""
    kept = {name: value for name, value in os.environ.items() if "COMPILATION_CACHE" not in name}
    environment = {**kept, "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}
    target = targets.TARGETS[job.target]
    if not target.is_gpu:
        return environment
    tools = dict.fromkeys(str(targets.tool(name).parent) for name, _ in target.tools)
    return environment | {
        "PATH": os.pathsep.join([*tools, os.environ.get("PATH", "")]),
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={folder}".strip(),
        "MOSAIC_GPU_DUMP_TO": str(folder),
        "MOSAIC_GPU_DUMP_PTX": "1",
        "MOSAIC_GPU_DUMP_MLIR_PASSES": "1",  # where the shared memory of a launch stands
    }


def is_reason(error: BaseException, implementation: str) -> bool:
    """Whether jattn says why the implementation cannot; compilers raise NotImplementedError too."""
    says_who = f"implementation {implementation!r}: "
    return isinstance(error, NotImplementedError) and str(error).startswith(says_who)


def outcome(job: Job) -> dict[str, Any]:
    """Compiles, here and now."""
    call, target = calls.CALLS[job.case], targets.TARGETS[job.target]
    call = call.of_length(job.length) if job.length else call
    options = targets.ALL_TEMPORARIES if job.length and not target.is_gpu else {}
    function = (call.gradients if job.which == "gradients" else call.forward)(job.implementation)
    start = time.perf_counter()
    try:
        arrays = call.arrays(job.head, job.dtype)
        program = targets.compiled(target, function, *arrays, options=options)
    except Exception as error:  # whatever a compiler raises is what this is here to tell
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
    """What XLA says: bytes of temporaries, bytes moved where it counts them, kernels, loops."""
    memory, cost = program.memory_analysis(), program.cost_analysis()
    try:
        text = program.as_text()
    except jax.errors.JaxRuntimeError:  # JAX 0.10's does not write down all copies for a v6e
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
    """The figures of each kernel of ours, or with matrix products, whose PTX lies in a folder.

    Raises:
        ValueError: ptxas or nvdisasm refuses one.
    """
    shared = _shared_memory(folder)
    found = []
    for path in sorted(folder.glob("*.ptx")):
        text = path.read_text(encoding="utf-8")
        name = re.search(r"\.entry (\w+)\(", text)
        if name and re.search(r"jattn|wgmma|mma\.sync", text):
            found.append(_kernel(path, text, name[1].removesuffix("_mosaic_gpu_kernel"), shared))
    return found


def _kernel(path: Path, text: str, name: str, shared: dict[str, int]) -> dict[str, Any]:
    threads = re.search(r"\.(?:maxntid|reqntid) (\d+)", text)
    architecture = re.search(r"^\.target (\w+)", text, re.MULTILINE)
    binary = path.with_suffix(".cubin")
    target = architecture[1] if architecture else "sm_90a"
    options = [f"-arch={target}", "-v", *_as_linked(path.with_suffix(".ptxas"))]
    said = _said("ptxas", *options, str(path), "-o", str(binary))
    used = machine_code.resources(said)
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


def _as_linked(said: Path) -> list[str]:
    """What ptxas is told for the same code where JAX has nvJitLink compile a kernel, which adds
    lines of its own to what it says: code to be linked moves no registers between warpgroups."""
    text = said.read_text(encoding="utf-8", errors="replace") if said.exists() else ""
    return ["-c"] if re.search(r"^info ", text, re.MULTILINE) else []


def _said(tool: str, *arguments: str) -> str:
    done = subprocess.run(
        [targets.tool(tool), *arguments], capture_output=True, text=True, check=False
    )
    said = done.stdout + done.stderr
    if done.returncode:
        raise ValueError(f"{tool} ended with {done.returncode}: {said.strip()[-_LONGEST:]}")
    return said


def _shared_memory(folder: Path) -> dict[str, int]:
    """Bytes of shared memory that a block asks for at launch, , by kernel."""
    found = {}
    for path in folder.glob("*.mlir-passes.log"):
        module = size = None
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                module = module or re.search(r"'builtin.module' operation: @(\w+)", line)
                size = re.search(r"dynamic_shared_memory_size %c(\d+)", line)
                if size:
                    break
        if module and size:
            found[module[1]] = int(size[1])
    for path in folder.glob("*.thunk_sequence.txt"):
        for name, size in re.findall(
            r"\] (\S+) grid: .*?shared_memory: (\d+)", path.read_text(encoding="utf-8")
        ):
            found[name] = int(size)
    return found


def main(argv: list[str]) -> int:
    """Compiles and prints a line of JSON."""
    target, case, implementation, head, dtype, which, length, _ = argv
    warnings.filterwarnings("ignore")
    job = Job(target, case, implementation, int(head), dtype, which, int(length))
    print(json.dumps(outcome(job)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
