"""OpenVINO and ONNX Runtime as competitors, and the table beside them and PyTorch.

    python -m experiments.benchmark --peers
    python -m experiments.benchmark --peers --cases page decode --dtype bfloat16 --pass forward

Each engine gets all cores, its best layout, and inputs in memory of its own. For bfloat16, ONNX
Runtime computes in float16: it has no attention in bfloat16. The table has jattn's time, the time
of each engine divided by it, and the least of these ratios.
"""

import argparse
import dataclasses
import importlib
import importlib.util
import itertools
import math
import os
import sys
from typing import Any

import numpy as np
from tqdm import tqdm

from experiments.benchmark import cases, peers, timing
from experiments.benchmark.cases import BenchmarkCase
from experiments.benchmark.peers import Runnable
from experiments.runs.ending import Failure, interruptible, one_line
from experiments.runs.files import ResultsFile


DTYPES = "float32", "bfloat16"
_CORES = os.cpu_count() or 1
# The greatest difference of a correct result from jattn's, relative to its greatest number.
_TOLERANCES = {"float32": 1e-4, "bfloat16": 2e-2}
# OpenVINO's cache grows by a token in each call, and is set again after this number of calls. The
# call that sets it is slow, but too rare to change a median.
_TOKENS = 32


def _supported(case: BenchmarkCase, backward: bool) -> bool:
    same_heads = case.key_heads == case.N
    return not backward and same_heads and not case.modifier and case.pattern in ("full", "causal")


def _heads_first(case: BenchmarkCase) -> list[np.ndarray]:
    return [np.ascontiguousarray(x.swapaxes(1, 2)) for x in case.inputs()]


def openvino(case: BenchmarkCase, backward: bool) -> Runnable | None:
    """Builds OpenVINO's `ScaledDotProductAttention`; decoding uses a cache."""
    if not _supported(case, backward):
        return None
    # Otherwise importing OpenVINO forks this process to report its use over the network.
    sys.modules.setdefault("openvino_telemetry", None)  # pyright: ignore[reportArgumentType]
    ov: Any = importlib.import_module("openvino")
    types = {"float32": ov.Type.f32, "bfloat16": ov.Type.bf16, "int32": ov.Type.i32}
    element = types[case.dtype]

    def tensor(array: np.ndarray) -> Any:
        result = ov.Tensor(types[array.dtype.name], ov.Shape(array.shape))
        result.data.view(array.dtype)[...] = array
        return result

    query, key, value = _heads_first(case)
    cached = case.S is not None and not case.plain
    inputs, past = [query, key, value], {}
    if cached:
        inputs = [query, key[:, :, -1:], value[:, :, -1:], np.arange(case.B, dtype=np.int32)]
        past = {"key": tensor(key[:, :, :-1]), "value": tensor(value[:, :, :-1])}
    options = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": _CORES,
        "ENABLE_HYPER_THREADING": True,
        "INFERENCE_PRECISION_HINT": element,
        "KV_CACHE_PRECISION": element,
    }
    model = (_model_with_cache if cached else _model)(case, element)
    request = ov.Core().compile_model(model, "CPU", options).create_infer_request()
    for number, array in enumerate(inputs):
        request.set_input_tensor(number, tensor(array))
    calls = itertools.count()

    def run() -> None:
        if past and next(calls) % _TOKENS == 0:
            for state in request.query_state():
                state.state = past[state.name]
        request.infer(share_outputs=True)

    def arrays(_: None) -> list[np.ndarray]:
        output = request.get_output_tensor(0).data.view(query.dtype)
        return [output.swapaxes(1, 2).astype(np.float32)]

    return Runnable(run, arrays=arrays)


def _model(case: BenchmarkCase, element: Any) -> Any:
    ov: Any = importlib.import_module("openvino")
    ops: Any = importlib.import_module("openvino.opset13")
    lengths = case.T, case.S or case.T, case.S or case.T
    inputs = [ops.parameter([case.B, case.N, length, case.H], element) for length in lengths]
    causal = case.pattern == "causal"
    return ov.Model([ops.scaled_dot_product_attention(*inputs, causal=causal)], inputs, "attention")


def _model_with_cache(case: BenchmarkCase, element: Any) -> Any:
    """Returns a model that appends a token to its state. OpenVINO uses its kernel for few queries
    only in models like this, which reorder the sequences of the state as in a beam search."""
    ov: Any = importlib.import_module("openvino")
    ops: Any = importlib.import_module("openvino.opset13")
    shape = [case.B, case.N, case.T, case.H]
    inputs = [ops.parameter(shape, element) for _ in range(3)]
    order = ops.parameter([case.B], ov.Type.i32)
    empty = ops.convert(ops.constant(np.zeros((case.B, case.N, 0, case.H), np.float32)), element)
    every, appended = [], []
    for name, new in zip(("key", "value"), inputs[1:], strict=True):
        state_shape = ov.PartialShape([case.B, case.N, -1, case.H])
        past = ops.read_value(empty, name, element, state_shape)
        past = ops.gather(past, order, ops.constant(np.array(0)))
        every.append(ops.concat([past, new], axis=2))
        appended.append(ops.assign(every[-1], name))
    output = ops.scaled_dot_product_attention(inputs[0], *every, causal=False)
    return ov.Model([ops.result(output)], appended, [*inputs, order], "attention")


def onnxruntime(case: BenchmarkCase, backward: bool) -> Runnable | None:
    """Builds the operator of ONNX Runtime that is the fastest for the case."""
    if not _supported(case, backward):
        return None
    operators = ["Attention", "MultiHeadAttention"]
    if case.pattern == "causal":
        operators.append("GroupQueryAttention")
    candidates = {name: _operator(case, name) for name in operators}
    medians, _ = timing.in_turn(candidates, 0)
    return candidates[min(medians, key=lambda name: medians[name])]


def _operator(case: BenchmarkCase, operator: str) -> Runnable:
    runtime: Any = importlib.import_module("onnxruntime")
    dtype = np.dtype(np.float32 if case.dtype == "float32" else np.float16)
    heads_first, causal = operator == "Attention", int(case.pattern == "causal")
    values = _heads_first(case) if heads_first else [_joined(x) for x in case.inputs()]
    names = ["query", "key", "value"]
    inputs: dict[str, np.ndarray] = {}
    inputs |= {name: x.astype(dtype) for name, x in zip(names, values, strict=True)}
    outputs = {"output": inputs["query"].shape}
    attributes = {"is_causal": causal}
    if operator == "MultiHeadAttention":
        attributes = {"num_heads": case.N, "unidirectional": causal}
    elif operator == "GroupQueryAttention":
        attributes = {"num_heads": case.N, "kv_num_heads": case.N}
        names += ["", "", "last", "length"]  # no past keys and values
        inputs["last"] = np.full(case.B, case.T - 1, np.int32)
        inputs["length"] = np.array([case.T], np.int32)
        outputs["all_keys"] = outputs["all_values"] = (case.B, case.N, case.T, case.H)
    model = _onnx(operator, names, inputs, outputs, dtype, attributes)
    options = runtime.SessionOptions()
    options.intra_op_num_threads = _CORES
    # Its threads would otherwise spin into the next competitor's turn.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    session = runtime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    binding, value = session.io_binding(), runtime.OrtValue
    for name, array in inputs.items():
        binding.bind_ortvalue_input(name, value.ortvalue_from_numpy(array))
    for name, shape in outputs.items():
        binding.bind_ortvalue_output(name, value.ortvalue_from_shape_and_type(shape, dtype))

    def arrays(_: None) -> list[np.ndarray]:
        output = binding.get_outputs()[0].numpy().astype(np.float32)
        if heads_first:
            return [output.swapaxes(1, 2)]
        return [output.reshape(case.B, case.T, case.N, case.H)]

    return Runnable(lambda: session.run_with_iobinding(binding), arrays=arrays)


def _joined(array: np.ndarray) -> np.ndarray:
    return array.reshape(*array.shape[:2], -1)


def _onnx(
    operator: str,
    names: list[str],
    inputs: dict[str, np.ndarray],
    outputs: dict[str, tuple[int, ...]],
    dtype: np.dtype,
    attributes: dict[str, int],
) -> bytes:
    """Returns a model of one operator, which is ONNX's or an extension of ONNX Runtime."""
    helper: Any = importlib.import_module("onnx.helper")
    domain = "" if operator == "Attention" else "com.microsoft"

    def declared(name: str, dtype: np.dtype, shape: tuple[int, ...]) -> Any:
        element = helper.np_dtype_to_tensor_dtype(dtype)
        return helper.make_tensor_value_info(name, element, shape)

    graph = helper.make_graph(
        [helper.make_node(operator, names, list(outputs), domain=domain, **attributes)],
        "attention",
        [declared(name, x.dtype, x.shape) for name, x in inputs.items()],
        [declared(name, dtype, shape) for name, shape in outputs.items()],
    )
    versions = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
    # The runtime often reads only older models than `onnx` writes by default.
    model = helper.make_model(graph, opset_imports=versions, ir_version=10)
    return model.SerializeToString()


def torch(case: BenchmarkCase, backward: bool) -> Runnable | None:
    """Builds PyTorch's attention, with as many threads as the other engines."""
    importlib.import_module("torch").set_num_threads(_CORES)
    return importlib.import_module("experiments.benchmark.torch_peers").sdpa(case, backward)


ENGINES: dict[str, tuple[peers.Peer, tuple[str, ...]]] = {  # and the packages that they need
    "torch": (torch, ("torch",)),
    "openvino": (openvino, ("openvino",)),
    "onnxruntime": (onnxruntime, ("onnxruntime", "onnx")),
}


def _available() -> dict[str, peers.Peer]:
    """Returns jattn and the installed engines by name, and prints the names of the others."""
    available: dict[str, peers.Peer] = {"jattn": peers.ours}
    for name, (engine, packages) in ENGINES.items():
        if all(importlib.util.find_spec(package) for package in packages):
            available[name] = engine
        else:
            print(f'{name} is not installed; pip install -e ".[peers]"', file=sys.stderr)
    return available


def _built(
    case: BenchmarkCase, backward: bool, engines: dict[str, peers.Peer]
) -> tuple[dict[str, Runnable], dict[str, str]]:
    """Builds the engines that run a case, and returns the errors of those whose results differ."""
    built: dict[str, Runnable] = {}
    errors: dict[str, str] = {}
    expected: list[np.ndarray] = []
    for name, engine in engines.items():
        try:
            runnable = engine(case, backward)
            if runnable is None:
                continue
            results = runnable.arrays(runnable.run())
        except Exception as error:  # engines raise errors of many kinds
            if name == "jattn":
                raise
            print(f"{name} does not run {case.name}: {one_line(error)}", file=sys.stderr)
            continue
        built[name], expected = runnable, expected or results
        pairs = zip(results, expected, strict=True)
        error = np.max([np.max(np.abs(x - y)) / np.max(np.abs(y)) for x, y in pairs])
        if not error <= _TOLERANCES[case.dtype]:  # also if it is NaN
            errors[name] = f"{error:.2g}"
    return built, errors


def measure(
    case: BenchmarkCase, backward: bool, engines: dict[str, peers.Peer], seconds: float
) -> dict[str, Any]:
    """Measures one row: median milliseconds of jattn and of each engine that runs the case."""
    built, errors = _built(case, backward, engines)
    medians, rounds = timing.in_turn(built, seconds)
    ratio = {name: x / medians["jattn"] for name, x in medians.items() if name != "jattn"}
    return {
        "case": case.name,
        "sizes": case.sizes(),
        "dtype": case.dtype,
        "pass": "forward+backward" if backward else "forward",
        "milliseconds": medians,
        "ratio": ratio,
        "best": min(ratio.values(), default=None),
        "errors": errors,
        "rounds": rounds,
    }


def _label(row: dict[str, Any]) -> str:
    return row["sizes"] + (" ∇" if row["pass"] != "forward" else "")


def _line(row: dict[str, Any], names: list[str]) -> str:
    ratios = [*map(row["ratio"].get, names), row["best"]]
    cells = " ".join(f"{'-' if x is None else f'{x:.2f}':>11}" for x in ratios)
    return f"{_label(row):<34} {row['milliseconds']['jattn']:>9.2f} {cells}"


def _summary(rows: list[dict[str, Any]]) -> str:
    compared = [row for row in rows if row["best"] is not None]
    if not compared:
        return "no engine is installed that runs these cases"
    mean = math.exp(sum(math.log(row["best"]) for row in compared) / len(compared))
    least = min(compared, key=lambda row: row["best"])
    return f"best: geometric mean {mean:.2f}, least {least['best']:.2f} ({_label(least)})"


def measure_all(arguments: argparse.Namespace) -> None:
    """Runs the measurements, prints a table for each dtype and writes JSON lines."""
    chosen = cases.named(arguments.cases, cases.ENGINE_CASES)
    work = cases.with_passes(chosen, arguments.which)
    results = ResultsFile(arguments.out / "engines.jsonl")
    engines = _available()
    names = [name for name in engines if name != "jattn"]
    wrong = 0
    for dtype in [arguments.dtype] if arguments.dtype else DTYPES:
        titles = " ".join(f"{name:>11}" for name in [*names, "best"])
        print(f"{f'B, N, T, S, H in {dtype}':<34} {'jattn ms':>9} {titles}", flush=True)
        rows = []
        for case, backward in interruptible(tqdm(work, disable=None, leave=False)):
            in_dtype = dataclasses.replace(case, dtype=dtype)
            row = measure(in_dtype, backward, engines, arguments.seconds)
            results.add(row)
            rows.append(row)
            tqdm.write(_line(row, names))
            for name, error in row["errors"].items():
                tqdm.write(f"  FAILED: {name} differs from jattn by {error} of the maximum")
            wrong += len(row["errors"])
        print(_summary(rows))
    print(f"results: {results.path}")
    if wrong:
        raise Failure(f"results that differ from jattn's: {wrong}")
