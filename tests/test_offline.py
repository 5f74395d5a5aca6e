"""Kernels compiled for absent devices: their machine code, the table, and kept results."""

import dataclasses
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest

from experiments.benchmark import __main__ as benchmark
from experiments.offline import calls, command, job, kept, machine_code, targets
from experiments.offline.job import Job
from experiments.offline.machine_code import Instruction
from experiments.runs.ending import Failure, UserError
from jattn import masks, scores
from jattn.kernels.gpu.mosaic.machine import versions
from tests.cases import CASES, SOFTMAX_CASES, CaseInputs, inputs
from tests.commands import ROOT
from tests.conftest import out_and_gradients
from tests.test_contract import leaves_of, public_rules
from tests.test_translation import assert_refused


SAID = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'a_kernel' for 'sm_90a'
ptxas info    : Function properties for a_kernel
    136 bytes stack frame, 120 bytes spill stores, 148 bytes spill loads
ptxas warning : the first of two
ptxas info    : Used 168 registers, used 16 barriers, 136 bytes cumulative stack size, 32 bytes smem
ptxas warning : the first of two
ptxas warning : the second
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized
"""


def test_resources_of_kernels():
    loss = "(C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized"
    said = ("the first of two", "the second", loss)
    assert machine_code.resources(SAID) == machine_code.Resources(168, 136, 120, 32, said)
    neither = "  0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\nUsed 32 registers"
    assert machine_code.resources(neither) == machine_code.Resources(32, 0, 0, 0, ())
    # A failure of ptxas is no kernel without registers.
    with pytest.raises(ValueError, match=r"expected 'Used … registers' .* got 'ptxas fatal"):
        machine_code.resources("ptxas fatal   : nothing there\n")


# An outer loop, in it two inner ones with products and one without; a jump forward.
SASS = """\
	.section	.text.a_kernel,"ax",@progbits
a_kernel:
.text.a_kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
.L_x_0:
        /*0010*/               @P0 BRA `(.L_x_9) ;
.L_x_1:
        /*0020*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR32], RZ, !UPT ;
        /*0030*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR16], R24 ;
        /*0040*/              @!P1 MUFU.EX2 R14, R29 ;
        /*0050*/                   FFMA R3, R4, R5, R6 ;
        /*0060*/                   BRA.U UP0, `(.L_x_1) ;
.L_x_2:
.L_x_3:
        /*0070*/                   LDS R3, [R4] ;
        /*0080*/               @P2 BRA `(.L_x_2) ;
.L_x_4:
        /*0090*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR32], RZ, !UPT ;
        /*00a0*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR16], R24 ;
        /*00b0*/                   STL [R1], R3 ;
        /*00c0*/                   FADD R3, R4, R5 ;
        /*00d0*/                   ISETP.GE.AND P1, PT, R3, R4, PT ;
        /*00e0*/               @P1 BRA `(.L_x_4) ;
        /*00f0*/               @P3 BRA `(.L_x_0) ;
.L_x_9:
        /*0100*/                   EXIT ;
"""


def test_only_innermost_loops_with_products_count():
    first, second = machine_code.loops(SASS)
    cycles = 64 + 32, 8, (128 + 64) * 16 * 2 // 128 + (64 + 64) * 16 * 2 // 128
    kinds = {"matrix": 2, "special": 1, "float": 1, "jump": 1}
    assert first == machine_code.MachineLoop(5, *cycles, 64 * (128 + 64) * 16, kinds)
    assert first.products_per_cycle == (2048 * 96 / (96 + 8), 2048)
    assert first._replace(special_cycles=192).products_per_cycle == (2048 / 3, 1024)
    assert first._replace(shared_cycles=384).products_per_cycle == (512, 512)
    assert second.instructions == 6
    assert second.by_kind == {"matrix": 2, "local": 1, "float": 1, "integer": 1, "jump": 1}
    assert second.special_cycles == 0
    # The main loop has the most products, in the fewest instructions.
    larger = second._replace(matrix_cycles=1000)
    assert machine_code.main_loop([first, second]) == first
    assert machine_code.main_loop([first, second, larger]) == larger
    assert machine_code.main_loop([]) is None


# A vote decides whether sums are rescaled; a branch has two sides; a wait jumps out and back.
BRANCHES = """\
.L_x_1:
        /*0000*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR16], R24 ;
        /*0010*/              @!P0 BRA `(.L_x_9) ;
.L_x_2:
        /*0020*/                   VOTE.ANY P1, P1 ;
        /*0028*/                   FSEL R88, R88, R83, P1 ;
        /*0030*/              @!P1 BRA `(.L_x_3) ;
        /*0040*/                   FMUL R88, R88, R83 ;
        /*0050*/                   FMUL R89, R89, R83 ;
.L_x_3:
        /*0058*/                   ISETP.GE.AND P2, PT, R3, R4, PT ;
        /*0060*/              @!P2 BRA `(.L_x_4) ;
        /*0070*/                   FADD R3, R4, R5 ;
        /*0080*/                   BRA `(.L_x_5) ;
.L_x_4:
        /*0090*/                   MUFU.EX2 R3, R4 ;
        /*00a0*/                   MUFU.EX2 R4, R4 ;
        /*00b0*/                   MUFU.EX2 R5, R4 ;
.L_x_5:
        /*00c0*/                   BRA.U UP0, `(.L_x_1) ;
        /*00d0*/                   EXIT ;
.L_x_9:
        /*00e0*/                   NANOSLEEP R3 ;
        /*00f0*/                   BRA `(.L_x_2) ;
"""


def test_instructions_that_a_vote_skips_are_counted_separately():
    (loop,) = machine_code.loops(BRANCHES)
    assert (loop.instructions, loop.sometimes) == (13, 2)
    kinds = {"jump": 5, "special": 3, "float": 2, "matrix": 1, "shuffle": 1, "integer": 1}
    assert loop.by_kind == kinds
    # Threads of a warpgroup vote at a barrier.
    at_barrier = BRANCHES.replace("VOTE.ANY P1, P1", "B2R.RESULT RZ, P1")
    other = BRANCHES.replace("FSEL R88, R88, R83, P1", "PLOP3.LUT P1, PT, PT, PT, UP1, 0x80, 0x0")
    for code, sometimes in ((at_barrier, 2), (other, 0)):
        assert [x.sometimes for x in machine_code.loops(code)] == [sometimes]


@pytest.mark.parametrize(
    ("name", "operands", "matrix", "shared"),
    [
        ("HGMMA.64x128x16.F32.BF16", "R24, gdesc[UR32], RZ ;", 64 * 128 * 16 / 2048, 192 * 16 / 64),
        ("HGMMA.64x128x16.F32.BF16", "R24, R4, gdesc[UR8] ;", 64 * 128 * 16 / 2048, 128 * 16 / 64),
        ("HGMMA.64x128x8.F32.TF32", "R24, R4, gdesc[UR8] ;", 64 * 128 * 8 / 1024, 128 * 8 / 32),
        ("QGMMA.64x256x32.F32.E4M3.E4M3", "R24, R4, gdesc[UR8] ;", 64 * 256 * 32 / 4096, None),
        ("LDS.128", "R4, [R8] ;", 0, 4 * 32 * 16 / 128),
        ("STS", "[R8], R4 ;", 0, 4 * 32 * 4 / 128),
        ("LDSM.16.M88.4", "R4, [R8] ;", 0, 4 * 32 * 16 / 128),
        ("HMMA.16816.F32", "R4, R8, R12, R4 ;", 4 * 16 * 8 * 16 / 1024, 0),
        ("HMMA.1688.F32.TF32", "R4, R8, R12, R4 ;", 4 * 16 * 8 * 8 / 512, 0),
        ("HMMA.SOMETHING", "", 0, 0),
        ("FFMA", "R3, R4, R5, R6 ;", 0, 0),
    ],
)
def test_cycles_of_matrix_units_and_of_shared_memory(name, operands, matrix, shared):
    instruction = Instruction(name, operands)
    assert machine_code.matrix_cycles(instruction) == matrix
    assert shared is None or machine_code.shared_cycles(instruction) == shared


def test_kinds_of_instructions():
    kinds = [machine_code.kind(Instruction(x, "")) for x in ("LDL.64", "IMAD.MOV.U32", "NEWOP")]
    assert kinds == ["local", "integer", "other"]


PTX = """\
.version 8.6
.target sm_90a
.visible .entry jattn_forward_mosaic_gpu_kernel(
.maxntid 384, 1, 1
"""


def test_kernels_of_a_folder(tmp_path, monkeypatch):
    (tmp_path / "a.ptx").write_text(PTX)
    (tmp_path / "b.ptx").write_text(".visible .entry loop_fusion(")
    (tmp_path / "jattn_forward.mlir-passes.log").write_text(
        "// ('builtin.module' operation: @jattn_forward)\n  dynamic_shared_memory_size %c1000_i32 {"
    )
    said, calls = {"ptxas": SAID, "nvdisasm": SASS}, []
    monkeypatch.setattr(job, "_said", lambda *command: calls.append(command) or said[command[0]])
    (kernel,) = job.kernels(tmp_path)
    of_files = [kernel[x] for x in ("kernel", "threads", "spill_bytes", "shared_bytes")]
    assert of_files == ["jattn_forward", 384, 120, 1000 + 32]
    assert kernel["main_loop"]["instructions"] == 5
    assert len(kernel["loops"]) == 2
    assert calls[0][:3] == ("ptxas", "-arch=sm_90a", "-v")
    assert json.loads(json.dumps(kernel)) == json.loads(json.dumps(kernel, allow_nan=False))
    (tmp_path / "a.ptx").write_text(".entry jattn_forward(\n.reqntid 128, 1, 1\n")
    line = "005: kCustomKernel [prev=004] jattn_forward grid: [1, 1, 1] threads: [128, 1, 1]  "
    (tmp_path / "m.thunk_sequence.txt").write_text(f"{line}shared_memory: 40960 bytes\n")
    said.update(ptxas="Used 9 registers", nvdisasm="")
    (tmp_path / "jattn_forward.mlir-passes.log").unlink()
    (kernel,) = job.kernels(tmp_path)
    assert (kernel["threads"], kernel["shared_bytes"], kernel["main_loop"]) == (128, 40960, None)


def test_a_tool_that_fails_fails_the_job(monkeypatch):
    def refusing(command: list[Any], **_: Any) -> Any:
        if command[0] == sys.executable:
            (Path(command[-1]) / "a.ptx").write_text(PTX)
            return subprocess.CompletedProcess(command, 0, '{"status": "compiled"}', "")
        return subprocess.CompletedProcess(command, 255, "", "ptxas fatal: no such thing")

    monkeypatch.setattr(targets, "_find", Path)
    monkeypatch.setattr(subprocess, "run", refusing)
    row = job.run(JOB, 1.0)
    expected = "failed", "ptxas ended with 255: ptxas fatal: no such thing"
    assert (row["status"], row["message"]) == expected


JOB = Job("h100", "causal", "hopper", 64, "bfloat16", "forward")


def test_only_a_reason_of_jattn_is_no_failure(monkeypatch):
    reason = "implementation 'hopper': expected bfloat16"
    for error, status, message in (
        (NotImplementedError(reason.replace("d b", "d\n b")), "unsupported", reason),
        (NotImplementedError("sin in a kernel"), "failed", "NotImplementedError: sin in a kernel"),
        (RuntimeError("a\nb"), "failed", "RuntimeError: a b"),
    ):
        monkeypatch.setattr(targets, "compiled", mock.Mock(side_effect=error))
        assert job.outcome(JOB) == {"status": status, "message": message}


def ended(returncode: int, stdout: str = "", stderr: str = "") -> Any:
    return subprocess.CompletedProcess([], returncode, stdout, stderr)


@pytest.mark.parametrize(
    ("result", "status", "message"),
    [
        (ended(-6, "", "one\ntwo\nthree\nfour"), "failed", "killed by SIGABRT: two | three | four"),
        (ended(3, "no JSON", "why"), "failed", "exit status 3: why"),
        (ended(3, "[1]", "why"), "failed", "exit status 3: why"),
        (ended(1), "failed", "exit status 1: "),
        (subprocess.TimeoutExpired("python", 2.5), "failed", "not ready after 2.5 seconds"),
        (ended(0, 'noise\n{"status": "compiled", "message": ""}\n'), "compiled", ""),
    ],
)
def test_the_row_of_a_process(monkeypatch, result, status, message):
    monkeypatch.setattr(subprocess, "run", mock.Mock(side_effect=[result]))
    expected = row(status, message) | {"target": "v5e", "implementation": "tpu"}
    assert job.run(JOB._replace(target="v5e", implementation="tpu"), 2.5) == expected


def parsed(*arguments: str, target: str = "h100") -> Any:
    return command.arguments(["--target", target, *arguments])


def test_jobs_are_the_product_of_the_arguments():
    options = parsed("--cases", "full", "bias", "--head", "64", "128", "--implementation", "ampere")
    jobs = command.chosen(options, targets.H100)
    assert len(jobs) == len(set(jobs)) == 2 * 2 * 2
    assert jobs[0] == Job("h100", "full", "ampere", 64, "bfloat16", "forward")
    assert {x.which for x in jobs} == {"forward", "gradients"}
    # The usual ones are every case by the kernels for the target.
    usual = command.chosen(parsed("--pass", "gradients", target="v5e"), targets.V5E)
    pairs = {(x.implementation, x.case) for x in usual}
    assert pairs == {*itertools.product(("tpu", "blockwise"), calls.CALLS)}


def test_lengths_are_for_cases_without_arrays():
    jobs = command.chosen(parsed("--lengths", "4096", "8192", "--head", "64"), targets.H100)
    assert jobs[1] == Job("h100", "full", "blockwise", 64, "bfloat16", "forward", 8192)
    assert len(jobs) == len(set(jobs)) == 2 * 2 * 2
    query, key, *_ = calls.CALLS["causal"].of_length(8192).arrays(64, "bfloat16")
    assert (query.shape, key.shape) == ((1, 8192, 8, 64), (1, 8192, 2, 64))
    with pytest.raises(UserError, match="--lengths: the case segments has arrays of one length"):
        command.chosen(parsed("--lengths", "4096", "--cases", "segments"), targets.H100)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("offline", "python -m experiments.benchmark offline: error: "),
        ("offline --target h200", "benchmark offline: error: "),
        ("offline --target h100 --cases nothing", "benchmark offline: error: "),
        ("offline --target h100 --head 0", "benchmark offline: error: "),
        ("offline --target h100 --dtype int8", "benchmark offline: error: "),
        ("trainng", "error: unknown command 'trainng'; nearest: training\n"),
        (
            "offline --target v5e --implementation hopper",
            "error: no implementation 'hopper' for v5e; there are tpu",
        ),
    ],
)
def test_wrong_usage_is_one_clear_line(arguments, message, capsys):
    assert_refused(arguments.split(), message, capsys, benchmark.main)


@pytest.mark.parametrize("target", targets.TARGETS.values(), ids=list(targets.TARGETS))
def test_what_is_not_installed_is_said_in_one_line(monkeypatch, capsys, tmp_path, target):
    monkeypatch.setattr(targets, "_exists", lambda _: False)
    monkeypatch.setattr(targets, "_find", lambda _: None)
    out, (module, package) = tmp_path / "rows.jsonl", target.modules[0]
    command = ("offline", "--target", target.name, "--out", out)
    said = f"no module {module} (package {package})"
    assert_refused(command, said, capsys, benchmark.main)
    assert_refused(command, 'pip install -e ".[offline]"', capsys, benchmark.main)
    assert not out.exists()
    with pytest.raises(UserError, match=f"no module {module}"):
        targets.device.__wrapped__(target)


def test_a_program_that_is_not_installed(monkeypatch):
    monkeypatch.setattr(targets, "_exists", lambda _: True)
    monkeypatch.setattr(targets, "_find", lambda name: None if name == "nvdisasm" else Path(name))
    said = str(targets.missing(targets.H100))
    assert "no program nvdisasm (package nvidia-cuda-nvdisasm)" in said
    assert targets.missing(targets.V5E) is None
    with pytest.raises(UserError, match="no program nvdisasm"):
        targets.tool("nvdisasm")


LOOP = machine_code.MachineLoop(519, 1024, 528, 640, 1024 * 2048, {}, 64)._asdict()
KERNEL = {
    "kernel": "jattn_forward",
    "registers": 168,
    "spill_bytes": 24,
    "shared_bytes": 168033,
    "warnings": ["be careful"],
    "main_loop": LOOP,
}


def row(status: str, message: str = "", **more: Any) -> dict[str, Any]:
    names = ("target", "case", "implementation", "head", "dtype", "pass")
    return {**dict(zip(names, JOB[:-1], strict=True)), "status": status, "message": message, **more}


def test_the_table_of_a_gpu():
    first, second = command.lines(row("compiled", kernels=[KERNEL, {**KERNEL, "main_loop": None}]))
    numbers = "jattn_forward 168 24 168033"
    counts = "519 64 1024 528 640 653-989 warning: be careful"
    assert " ".join(first.split()).endswith(f"forward {numbers} {counts}")
    assert " ".join(second.split()).endswith(f"{numbers} - - - - - - warning: be careful")
    (none,) = command.lines(row("compiled", kernels=[]))
    assert none.endswith("no kernel of its own")
    (why,) = command.lines(row("unsupported", "no reason"))
    assert why.endswith("UNSUPPORTED no reason")
    assert len(command.titles(targets.H100)) == len(first.split(" warning")[0])


def test_the_table_of_a_tpu():
    facts = {"temporary_bytes": 2**20, "bytes_moved": None, "custom_kernels": 3, "loops": 0}
    compiled = row("compiled", **facts)
    (line,) = command.lines({**compiled, "target": "v5e"})
    assert " ".join(line.split()).endswith("forward 1.0 - 3 0")
    assert len(command.titles(targets.V5E)) == len(line)
    (line,) = command.lines({**compiled, "length": 4096})
    assert line.startswith("causal 4096 ")
    assert len(command.titles(targets.H100, True)) == len(line)


def test_the_status_is_1_where_something_does_not_compile(monkeypatch, tmp_path, capsys):
    rows = {
        "full": row("compiled", kernels=[KERNEL]),
        "bias": row("unsupported", "a reason"),
        "dropout": row("failed", "RuntimeError: boom"),
    }
    monkeypatch.setattr(targets, "missing", lambda _: None)
    monkeypatch.setattr(job, "run", lambda each, seconds: rows[each.case])
    out = tmp_path / "new" / "rows.jsonl"
    options = ["--target", "h100", "--pass", "forward", "--implementation", "hopper"]
    options += ["--out", str(out), "--cases"]
    assert benchmark.main(["offline", *options, "full", "bias"]) == 0
    assert "2 programs: 0 failed, 1 not supported, 1 with spills" in capsys.readouterr().out
    assert benchmark.main(["offline", *options, *rows]) == 1
    assert "FAILED RuntimeError: boom" in capsys.readouterr().out
    assert [json.loads(line) for line in out.read_text().splitlines()] == list(rows.values())
    with pytest.raises(Failure, match="1 of 1 programs do not compile for h100"):
        command.main([*options, "dropout"])


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", calls.CALLS)
def test_each_case_is_a_call_with_gradients(name):
    call = calls.CALLS[name]
    arrays = call.arrays(64, "float32")
    out, gradients = jax.eval_shape(call.gradients("reference"), *arrays)
    assert jax.tree.leaves(out)[0].shape == arrays[0].shape
    assert jax.tree.map(np.shape, gradients) == jax.tree.map(np.shape, tuple(arrays[:4]))


def test_every_mask_and_every_score_function_is_there():
    seen: set[type] = set()
    for call in calls.CALLS.values():
        *_, parameters, operands, _ = call.arrays(64, "float32")

        def note(arrays: Any, call: calls.OfflineCall = call) -> None:
            seen.update(*map(leaves_of, call.rules(arrays).values()))

        jax.eval_shape(note, {**parameters, **operands})
    assert public_rules(masks, scores) - seen <= {masks.Empty, masks.Tree}  # drafts are few


HEADS = (64, 128, 256, 80, 96)
DTYPES = ("bfloat16", "float16", "float32")
GPUS = {"ampere": targets.A100, "hopper": targets.H100, "blackwell": targets.B200}
COMPILED = [(target, name, DTYPES[:2]) for name, target in GPUS.items()]
COMPILED += [(x, y, DTYPES) for x in (targets.V5E, targets.V6E) for y in ("tpu", "blockwise")]


@pytest.fixture
def compilers(request, monkeypatch) -> Iterator[None]:
    """Skips a test whose target cannot be compiled for, and sets the compilers up."""
    target = request.getfixturevalue("target")
    reason = targets.missing(target)
    if reason:
        pytest.skip(reason)
    for name, _ in target.tools:
        folder = str(targets.tool(name).parent)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # other tests' processes compile too
    # Programs for other devices can be written to the cache, but not read from it.
    least = jax.config.values["jax_persistent_cache_min_compile_time_secs"]
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1e9)
    with jax.enable_x64(False):
        yield
    jax.config.update("jax_persistent_cache_min_compile_time_secs", least)


@pytest.mark.exhaustive
@pytest.mark.default_tiles
@pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache entry")
@pytest.mark.usefixtures("compilers")
@pytest.mark.parametrize(
    ("target", "implementation", "dtypes"), COMPILED, ids=[f"{x[0].name}-{x[1]}" for x in COMPILED]
)
@pytest.mark.parametrize("name", SOFTMAX_CASES)
def test_every_case_of_the_table_compiles(target, implementation, dtypes, name):
    place, kinds = list(CASES).index(name), {"int64": "int32", "float64": "float32"}
    head, dtype = HEADS[(place // 3 + place) % len(HEADS)], dtypes[place % len(dtypes)]
    sizes = CASES[name].sizes._replace(H=head, V=head if place % 2 else 64)
    case = dataclasses.replace(CASES[name], sizes=sizes)

    def run(x: CaseInputs, key: Any) -> Any:
        options = {"implementation": implementation} | ({"dropout_key": key} if case.rate else {})
        attend = lambda q, k, v, p: case.attend(q, k, v, p, x.operands, **options)  # noqa: E731
        return out_and_gradients(attend, (x.q, x.k, x.v, x.parameters), x.d_out, x.d_lse)

    in_32_bits = lambda x: jax.ShapeDtypeStruct(x.shape, kinds.get(x.dtype.name, x.dtype))  # noqa: E731
    avals = jax.tree.map(in_32_bits, inputs(case, dtype))
    try:
        targets.compiled(target, run, avals, jax.eval_shape(lambda: jax.random.key(0)))
    except NotImplementedError as error:
        if not job.is_reason(error, implementation):
            raise


# Rules with arrays along T and S, learned numbers, and functions that look up entries as well.
LEARNED = (
    *("alibi-learned", "bias", "bias-by-key", "cap-then-bias", "documents-biased"),
    *("function-operands", "function-capped", "chain", "t5-table"),
)
# With most to compute in registers; the last one's table has gradients of XLA's.
OTHERS = "positions", "predicate", "long-window", "softcap", "t5-positions"
SIMPLE = "full", "causal", "segments", "dropout", "alibi", "soft-cap"
SPILLS = *SIMPLE, *OTHERS, *LEARNED
IN_MOSAIC = [(target, name, x) for name, target in GPUS.items() for x in SPILLS]
IN_MOSAIC.append((targets.B200, "blackwell", "decode"))  # few queries, and parts of keys


# The shared memory of a block: an A100 has more, other GPUs since Ampere do not.
MOST_SHARED = {"ampere": 99 * 1024, "hopper": 227 * 1024, "blackwell": 227 * 1024}


def compiled_row(implementation: str, name: str, head: int, which: str) -> dict[str, Any]:
    """The row of a job in bfloat16, which compiles for any version of JAX that has the kernel."""
    target = GPUS[implementation].name
    row = job.run(Job(target, name, implementation, head, "bfloat16", which), 600.0)
    if implementation != "hopper" and not versions.knows_ampere():
        assert "expected JAX 0.11" in row["message"]
        pytest.skip(row["message"])
    assert row["status"] == "compiled", row["message"]
    return row


def our_kernels(implementation: str, row: dict[str, Any]) -> dict[str, Any]:
    """Kernels by name, none of which spills, or uses more shared memory than there is."""
    kernels = {x["kernel"]: x for x in row["kernels"] if x["kernel"].startswith("jattn_")}
    for name, kernel in kernels.items():
        assert (kernel["spill_bytes"], kernel["warnings"]) == (0, ()), name
        assert kernel["shared_bytes"] <= MOST_SHARED[implementation], name
    return kernels


@pytest.mark.exhaustive
@pytest.mark.parametrize("head", [64, 128, 256])
@pytest.mark.parametrize(("target", "implementation", "name"), IN_MOSAIC, ids=str)
@pytest.mark.usefixtures("compilers")
def test_kernels_in_mosaic_spill_nothing(target, implementation, name, head):
    kernels = our_kernels(implementation, compiled_row(implementation, name, head, "gradients"))
    ours = {x for x in kernels if x.startswith(f"jattn_{implementation}_")}
    passes = ["forward", "d_queries", "d_keys"]
    passes += ["d_values"] if implementation == "blackwell" and head > 128 else []
    assert ours == {f"jattn_{implementation}_{x}" for x in passes}
    learned = {"jattn_mosaic_d_parameter"} if name in LEARNED else set()
    assert implementation == "blackwell" or kernels.keys() - ours == learned


@pytest.mark.exhaustive
@pytest.mark.parametrize("head", [64, 128, 256])
@pytest.mark.parametrize("name", [x.name for x in calls.CACHES])
@pytest.mark.parametrize(("target", "implementation"), [(GPUS[x], x) for x in ("ampere", "hopper")])
@pytest.mark.usefixtures("compilers")
def test_caches_are_read_in_place(target, implementation, name, head):
    """Temporaries hold blocks of a few hundred keys, for results that are not finite."""
    row = compiled_row(implementation, name, head, "forward")
    (kernel,) = our_kernels(implementation, row)
    if (implementation, name, head) == ("ampere", "paged-cache", 64):  # pages too small to copy
        assert kernel == "jattn_ampere_forward"
        return
    assert kernel == "jattn_mosaic_decode"
    cache = calls.CALLS[name].arrays(head, "bfloat16")[1:3]
    assert row["temporary_bytes"] < 0.5 * sum(x.size * x.dtype.itemsize for x in cache)


def test_what_is_worse_than_it_was():
    kernel = {"kernel": "a", "spill_bytes": 0, "main_loop": LOOP, "warnings": []}
    longer = LOOP | {"instructions": 600}
    baseline = row("compiled", temporary_bytes=10 * 2**20, bytes_moved=None, kernels=[kernel])
    assert not [*kept.worse(baseline, baseline)]
    assert not [*kept.worse(row("failed"), baseline)]
    worse = {**baseline, "temporary_bytes": 13 * 2**20, "kernels": []}
    warned = {**kernel, "spill_bytes": 8, "main_loop": longer, "warnings": ["serialized"]}
    worse["kernels"] = [warned, kernel | {"kernel": "new"}, warned | {"kernel": "newer"}]
    assert [*kept.worse(baseline, worse)] == [
        f"temporary_bytes {10 * 2**20}, now {13 * 2**20}",
        "a spills 0, now 8 bytes",
        "a has a new warning: serialized",
        "a has a loop of 519, now 600 instructions",
        "newer spills 0, now 8 bytes",
        "newer has a new warning: serialized",
    ]
    assert not [*kept.worse(worse, worse)]
    two = {**baseline, "kernels": [kernel, kernel | {"main_loop": longer}]}
    assert [*kept.worse(two, {**two, "kernels": two["kernels"][::-1]})] == [
        "a has a loop of 519, now 600 instructions"
    ]
    (said,) = kept.worse(baseline, row("failed"))
    assert said.startswith("compiled before, now failed")


def test_rows_to_compare_with(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row("compiled")) + "\n")
    (read_job,) = kept.read(path, "h100")
    assert read_job == JOB
    for target, text in (("v5e", path.read_text()), ("h100", "{}"), ("h100", "no json")):
        path.write_text(text)
        with pytest.raises(UserError, match="--against: expected"):
            kept.read(path, target)


KEPT = sorted((ROOT / "experiments" / "offline" / "kept").glob("jax-*/*.jsonl"))
each_kept = pytest.mark.parametrize("path", KEPT, ids=[f"{x.parent.name}-{x.stem}" for x in KEPT])


@pytest.mark.slow
@each_kept
def test_nothing_is_worse_than_what_was_kept(tmp_path, path):
    version = f"jax-{'.'.join(jax.__version__.split('.')[:2])}"
    if path.parent.name != version:
        pytest.skip(f"compiled with {path.parent.name}, this is {version}")
    if targets.missing(targets.TARGETS[path.stem]):
        pytest.skip("what compiles for it is not installed")
    options = ["--target", path.stem, "--against", str(path), "--out", str(tmp_path / "rows.jsonl")]
    command.main(options)


def rows_kept(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@each_kept
def test_all_that_was_kept_compiles_and_spills_nothing(path):
    for stored in rows_kept(path):
        if stored["status"] != "compiled":
            assert stored["message"].startswith(f"implementation {stored['implementation']!r}: ")
            continue
        assert stored["jax"].startswith(path.parent.name.removeprefix("jax-"))
        for kernel in stored.get("kernels", ()):
            if kernel["kernel"].startswith("jattn_"):
                assert (kernel["spill_bytes"], kernel["warnings"]) == (0, []), stored["case"]


# The order of kernels: output, gradients of queries, gradients of keys and values. JAX's kernels
# for gradients have one name.
PASSES = tuple(f"jattn_hopper_{x}" for x in ("forward", "d_queries", "d_keys"))
PASSES += "entry", "anonymous"


def loops_kept(path: Path, implementation: str) -> dict[tuple[str, int], list[dict[str, int]]]:
    """Instructions and cycles of loops without masks by case and head size, for each gradient."""
    loops = {}
    for stored in rows_kept(path):
        if stored["implementation"] != implementation or stored["pass"] != "gradients":
            continue
        kernels = [x for x in stored["kernels"] if x["kernel"] in PASSES]
        kernels.sort(key=lambda x: (PASSES.index(x["kernel"]), x["main_loop"]["matrix_cycles"]))
        names = "instructions", "matrix_cycles"
        counts = [{name: x["main_loop"][name] for name in names} for x in kernels]
        both = {name: sum(x[name] for x in counts[2:]) for name in names}
        if implementation == "jax_mgpu" or stored["dtype"] == "bfloat16":
            loops[stored["case"], stored["head"]] = [*counts[:2], both]
    return loops


HOPPER = [path for path in KEPT if path.stem == "h100"]
LONGER = {"full": 1.05, "causal": 1.3, "segments": 1.3, "alibi": 1.5}


@pytest.mark.parametrize("path", HOPPER, ids=[path.parent.name for path in HOPPER])
def test_loops_are_about_as_short_as_those_of_jax_or_as_the_matrix_units_take(path):
    ours, theirs = (loops_kept(path, name) for name in ("hopper", "jax_mgpu"))
    for (name, limit), head in itertools.product(LONGER.items(), (64, 128, 256)):
        for our_loop, their_loop in zip(ours[name, head], theirs["full", head], strict=True):
            assert our_loop["instructions"] <= limit * their_loop["instructions"], (name, head)
    for name, limit in (("dropout", 1.01), ("soft-cap", 1.15)):
        for loop in ours[name, 128]:
            assert loop["instructions"] <= limit * loop["matrix_cycles"], name
