"""The benchmarks of engines and of GPUs, on a CPU with tiny sizes: results, floors, predictions."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import pytest

from experiments.benchmark import __main__ as benchmark
from experiments.benchmark import cases, device, engines, gym, peers, timing
from experiments.benchmark.cases import BenchmarkCase
from experiments.benchmark.device_peers import CUDNN, DENSE, FLEX, PEERS
from experiments.benchmark.options import use_device
from experiments.benchmark.predictions import predicted
from experiments.runs.ending import UserError
from tests.commands import run_python
from tests.test_translation import assert_refused


@pytest.mark.usefixtures("standard_promotion")
def test_the_table_of_engines_says_which_are_wrong_or_absent(tmp_path, monkeypatch, capsys):
    full, causal = (BenchmarkCase("", 1, 2, 16, 8, pattern=x) for x in ("full", "causal"))
    wrong = lambda _, backward: peers.jax_nn(full, backward)  # noqa: E731
    known = {"right": (peers.jax_nn, ["jax"]), "wrong": (wrong, []), "none": (wrong, ["absent"])}
    monkeypatch.setattr(engines, "ENGINES", known)
    monkeypatch.setattr(cases, "ENGINE_CASES", [causal])
    options = ["--dtype", "bfloat16", "--seconds", "0", "--out", str(tmp_path)]
    assert benchmark.main(["--peers", *options]) == 1
    rows = [json.loads(line) for line in (tmp_path / "engines.jsonl").read_text().splitlines()]
    assert [row["pass"] for row in rows] == ["forward", "forward+backward"]
    for row in rows:
        assert {*row["errors"]} == {"wrong"} and row["best"] == min(row["ratio"].values())
    out, err = capsys.readouterr()
    assert out.count("FAILED: wrong differs from jattn") == 2
    assert "none is not installed" in err and "results that differ from jattn's: 2" in err


@pytest.mark.slow
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="competitors there are others")
@pytest.mark.filterwarnings("ignore:.*torch.*")
@pytest.mark.usefixtures("standard_promotion")
def test_the_command_measures_who_runs_and_says_why_others_do_not(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(timing, "TURN", 0.001)
    sizes = ["--tokens", "128", "--width", "32", "--lengths", "64", "--heads", "16"]
    names = ["--implementations", "native", "blockwise", "hopper", "cudnn"]
    options = ["--patterns", "documents", "--seconds", "0", "--out", str(tmp_path)]
    with jax.enable_x64(False):
        assert benchmark.main(["device", *names, *sizes, *options]) == 0
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [row["pass"] for row in rows] == ["forward", "backward"]
    ours, gpus = {"native", "blockwise"}, {"hopper", "cudnn", *PEERS} - {"jax.nn"}
    for row in rows:
        assert {*row["milliseconds"]} == ours | {"jax.nn"}
        assert {*row["left_out"]} == gpus
        assert (row["B"], row["N"], row["ours"]) == (2, 2, "native")
        assert row["device"] == jax.devices()[0].device_kind
        assert row["versions"]["jax"] == jax.__version__
        assert row["ratio"]["native"] == 1
    out = capsys.readouterr().out
    assert "hopper is left out: a CPU would only interpret it" in out
    assert out.count("not measured") == len(device.FLOORS)


@pytest.mark.usefixtures("standard_promotion")
def test_caches_are_compared(monkeypatch, capsys):
    monkeypatch.setattr(timing, "TURN", 0.001)
    assert benchmark.main(["caches", "--tokens", "40", "--seconds", "0"]) == 0
    _, _, *rows = (line.split() for line in capsys.readouterr().out.splitlines())
    assert [row[:2] for row in rows] == [
        ["float32", "4,096"],
        ["bfloat16", "2,048"],
        ["int8", "1,088"],
        ["float8_e4m3fn", "1,088"],
        ["int4", "576"],
    ]
    errors = {row[0]: float(row[3]) for row in rows}
    assert errors["float32"] == 0 < errors["bfloat16"] < errors["int8"] < errors["int4"] < 1
    with pytest.raises(SystemExit):
        benchmark.main(["caches", "--heads", "9"])
    assert "--heads: expected a multiple of 8, got 9" in capsys.readouterr().err


def test_unknown_names_are_refused(capsys):
    assert benchmark.main(["device", "--implementations", "flash"]) == 2
    assert "unknown implementations ['flash']; there are cudnn" in capsys.readouterr().err


@pytest.fixture
def old(tmp_path, monkeypatch) -> Iterator[Path]:
    """A folder with results, which have to stay; every measurement is interrupted."""
    for module in (benchmark, engines, gym, device):
        monkeypatch.setattr(module, "measure", mock.Mock(side_effect=KeyboardInterrupt))
    for name in ("matrix_peak", "copy_bandwidth"):
        monkeypatch.setattr(benchmark, name, lambda: 1.0)
    files = [tmp_path / name for name in ("results.jsonl", "engines.jsonl", "gym.jsonl")]
    for path in files:
        path.write_text("old\n")
    yield tmp_path
    assert [path.read_text() for path in files] == ["old\n"] * 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--only causal", "--only goes with --gym"),
        ("--lengths 64 --growing --gym", "--growing does not go with --gym"),
        ("--lengths 64", "--lengths goes with --growing or --gym"),
        ("--lengths 64 --peers", "--lengths goes with --growing or --gym"),
        (
            "--dtype bfloat16 --peers jax.nn",
            "--dtype goes with --peers without a name, and not with",
        ),
        ("--dtype bfloat16 --peers --growing", "--dtype goes with --peers without a name, and"),
        ("--growing --cases short", "--cases goes with neither --growing nor --gym"),
        ("--gym --cases short", "--cases goes with neither --growing nor --gym"),
        ("--gym --pass forward", "--pass does not go with --gym"),
        ("--cases decode --pass backward", "nothing to measure: cases of decoding"),
        ("--peers --cases decode --pass backward", "nothing to measure: cases of decoding"),
        ("--gym --lengths 64", "nothing to measure: the rules have lengths of 2048, "),
        (
            "--gym --only tree --lengths 64",
            "nothing to measure: the rules have lengths of 2048, 8192",
        ),
    ],
)
def test_options_without_effect_or_without_rows_are_refused(options, message, old, capsys):
    assert_refused([*options.split(), "--out", old], message, capsys, benchmark.main)


@pytest.mark.parametrize(
    "options", ["--growing", "--peers", "--gym --peers", "device --lengths 64 --tokens 64"]
)
def test_an_interrupt_before_the_first_row_leaves_old_results(options, old):
    assert benchmark.main([*options.split(), "--out", str(old)]) == 130


@pytest.mark.usefixtures("standard_promotion")
def test_only_measured_passes_are_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr(timing, "TURN", 0.001)
    for name in ("matrix_peak", "copy_bandwidth"):
        monkeypatch.setattr(benchmark, name, lambda: 1.0)
    options = "--growing --lengths 16 --pass forward --seconds 0 --peers jax.nn --out".split()
    assert benchmark.main([*options, str(tmp_path)]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"forward.png", "results.jsonl"}


@pytest.mark.parametrize("options", ["--cases short --out", "tune"])
def test_an_absent_device_is_one_clear_line(options, tmp_path):
    command = [*options.split(), *([tmp_path] if options != "tune" else []), "--device", "gpux"]
    done = run_python("-m", "experiments.benchmark", *command)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: --device gpux is not available: ")
    assert done.stderr.count("\n") == 1 and not list(tmp_path.iterdir())


def test_jax_that_finds_no_device_is_one_clear_line(monkeypatch):
    """JAX fails with an assertion without text if a backend's plugin is not installed."""
    update = mock.Mock()
    monkeypatch.setattr(jax.config, "update", update)
    monkeypatch.setattr(jax, "devices", mock.Mock(side_effect=AssertionError))
    with pytest.raises(UserError, match="--device gpu is not available: JAX has no such backend"):
        use_device("gpu")
    update.assert_called_once_with("jax_platforms", "cuda")


def row(pattern: str, which: str, teraflops: float, **ratio: float) -> dict[str, Any]:
    """A row of results for heads of 128 at 16,384 tokens on an H200."""
    sizes = {"T": 16384, "H": 128, "device": "NVIDIA H200", "ours": "hopper", "ratio": ratio}
    case = {"case": f"{pattern}-16384-128", "pattern": pattern, "pass": which}
    return sizes | case | {"teraflops": {"hopper": teraflops}}


def test_the_least_figure_decides_on_a_floor():
    rows = [
        row("full", "forward", 640, **{CUDNN: 0.95}),
        row("causal", "forward", 610, **{CUDNN: 0.85}),
        row("causal", "backward", 500, **{CUDNN: 0.86}),
        row("window", "forward", 300, **{DENSE: 12.0, FLEX: 1.1}),
    ]
    lines = device.floor_lines(rows)
    assert lines[0] == (
        "not reached   forward, full and causal: at least 0.9 × cudnn flags: "
        "0.85 in causal-16384-128, the least of 2"
    )
    expected = [*["reached"] * 3, "not measured", "not reached", "not measured"]
    assert [line.split("  ")[0] for line in lines[1:]] == expected
    assert "600 TFLOP/s at T = 16384 for heads of 128 on an H200: 610.00" in lines[1]


def test_calls_are_repeated_until_launching_them_does_not_count(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(device, "_MOST_CALLS", 5)
    started, waited = [], []
    calls = device.Calls(lambda: started.append(0) or len(started), waited.append)
    turn, count = device._repeated(calls)
    assert count == 5
    turn.run()
    assert (len(started), waited) == (7, [1, 2, 7])


@pytest.mark.parametrize("head", [64, 128, 256])
@pytest.mark.parametrize("backward", [False, True])
def test_predictions_are_those_of_the_measured_kernels(head, backward):
    def of(kernel: str, device: str, pattern: str = "full", head: int = head) -> Any:
        case = BenchmarkCase("", 1, 1, 8, head, pattern=pattern)
        return predicted(kernel, device, case, backward)

    for pattern in ("full", "causal", "documents"):
        least, most = of("hopper", "NVIDIA H200", pattern)
        assert 300 < least < most < 990
        assert not backward or most < 5 / 7 * 990  # 2 products are computed twice
    assert of("hopper", "cpu") is of("ampere", "NVIDIA H200") is None
    assert of("hopper", "NVIDIA H200", head=48) is None
