"""The kernels in Mosaic, interpreted on a CPU, and lowered for a Hopper GPU. On a GPU they are
compiled. Products and register layouts are lowered here, not run."""

import dataclasses
import functools
import heapq
import importlib.metadata
import re
import threading
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.core import eval_jaxpr
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jattn
from jattn import dropout, masks, scores, softmax, tuning
from jattn.kernels.common import block_mask
from jattn.kernels.gpu.mosaic.kernels import ampere, blackwell, hopper
from jattn.kernels.gpu.mosaic.kernels.launch import Order
from jattn.kernels.gpu.mosaic.machine import matrix_units, registers, streams, versions, votes
from jattn.kernels.gpu.mosaic.tile import mosaic_interpreter, online_softmax
from jattn.kernels.gpu.mosaic.tile import problem as gpu_problem
from jattn.kernels.gpu.mosaic.tile.mosaic_interpreter import IntegerRun, RegisterLayout, Table
from jattn.kernels.gpu.mosaic.tile.problem import GPUProblem
from jattn.masks import Span
from jattn.spec import Origin, Shapes, Spec, Tiling
from tests import test_contract as contract
from tests.cases import CASES, SOFTMAX_CASES, inputs
from tests.conftest import ON_CPU, attention_arrays, normal_arrays, out_and_gradients, quick_jit
from tests.devices import pretend_gpu
from tests.kernels import assert_accurate, assert_parts, lying_mask, made, prepared
from tests.oracle import error
from tests.test_contract import assert_same


@pytest.fixture(autouse=True)
def _compiled_once(monkeypatch):
    """Compiles a kernel once: JAX's interpreter would for each warpgroup of each program."""
    compiled: dict[int, Any] = {}
    lock = threading.Lock()

    def run(program: Any, consts: Any, *operands: Any) -> None:
        with lock:
            if id(program) not in compiled:
                function = quick_jit(functools.partial(eval_jaxpr, program))
                compiled[id(program)] = function.lower(consts, *operands).compile()
        compiled[id(program)](consts, *operands)

    home = importlib.import_module("jax._src.pallas.mosaic.interpret.thread_map")
    monkeypatch.setattr(home, "_run_jaxpr", run)


each_kernel = pytest.mark.parametrize("implementation", ["hopper", "ampere", "blackwell"])


class KernelCall(NamedTuple):
    """Keyword arguments, sizes B, T, S, N, H and V, a dtype, and the indices that exist."""

    rules: dict[str, Any]
    sizes: tuple[int, ...] = (2, 70, 100, 2, 64, 64)
    dtype: Any = jnp.float16
    alive: tuple[Any, Any] = (slice(None), slice(None))

    def rules_in(self, dtype: Any) -> dict[str, Any]:
        floating = lambda x: isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.floating)  # noqa: E731
        cast = lambda x: x.astype(self.dtype).astype(dtype) if floating(x) else x  # noqa: E731
        return jax.tree.map(cast, self.rules)


RNG = np.random.default_rng(0)
LONG = np.arange(200) // 70
DOCUMENTS = np.sort(RNG.integers(0, 4, (2, 100)), axis=1)
SEEN = RNG.random((1, 2, 70, 100)) < 0.5
# Most distances are at most 60, as those of buckets, and some exceed 32 bits.
FAR = np.random.default_rng(1).integers(0, 60, 170).astype(np.int32)
FAR[::9], FAR[::11] = -(2**31) + 3, 2**31 - 5


def normal(*shape: int) -> Any:
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape), jnp.float16)


def _relative(score: Any, b: Any, h: Any, q: Any, kv: Any, *operands: Any) -> Any:
    slopes, table = operands
    entry = jnp.clip(q - kv, -5, 5) + 5
    change = table[h, entry] * slopes[1 - h].astype(table.dtype)
    return score * slopes[h].astype(score.dtype) + change.astype(score.dtype)


def _of_all_kinds(score: Any, b: Any, h: Any, q: Any, kv: Any, *operands: Any) -> Any:
    """Entries by head, by query, by key (the last before the first), by distance, twice of one
    operand, and by pairs."""
    gate, by_query, by_key, table, pairs, _ = (x.astype(score.dtype) for x in operands)
    steps = table[h, jnp.clip(q - kv, -5, 5) + 5] * table[1 - h, jnp.where(q > kv, 3, 4)]
    along = by_query[b, (q * 7) % 70] + by_key[h, b, kv - 1] + gate[h] * gate[h]
    return score * gate[1 - h] + along + steps + pairs[(q + 3 * kv) % 7]


def _hoistable(score: Any, b: Any, h: Any, q: Any, kv: Any, *operands: Any) -> Any:
    """Entries by head, by key and by distance alone, as in FlexAttention."""
    gate, by_key, table = (x.astype(score.dtype) for x in operands)
    return score * gate[h] + by_key[b, kv] + table[h, jnp.clip(q - kv, -5, 5) + 5]


SLOPES, TEMPERATURES = jnp.float16([0.5, 0.25]), jnp.float16([0.75, 1.5])
LOOK_UPS = (normal(*shape) for shape in ((2, 70), (2, 2, 100), (2, 11), (7,), (3,)))
LOOKED_UP = scores.Score(_of_all_kinds, SLOPES, *LOOK_UPS)


def lengths(q: int, kv: int) -> masks.Lengths:
    return masks.Lengths(q=jnp.array([q, q]), kv=jnp.array([kv, kv]))


def dropped(seed: int) -> dict[str, Any]:
    return {"dropout_rate": 0.3, "dropout_key": jax.random.key(seed)}


CALLS = {
    "distances": KernelCall(
        {
            "mask": masks.Causal() | masks.Lengths(kv=jnp.array([130, 20])),
            "score": scores.RelativeBias(normal(32, 2), max_distance=64) >> scores.SoftCap(5.0),
        }
        | dropped(3),
        (2, 70, 130, 2, 64, 64),
    ),
    "full": KernelCall({}, (1, 128, 384, 1, 64, 64), jnp.bfloat16),
    "causal_segments_alibi": KernelCall(
        {
            "mask": masks.Causal() & masks.Segments(jnp.asarray(LONG)[None]),
            "score": scores.Alibi(SLOPES),
        },
        (1, 200, 200, 2, 64, 64),
    ),
    "lengths_soft_cap": KernelCall(
        {"mask": lengths(60, 140), "score": scores.SoftCap(3.0)},
        (2, 70, 150, 1, 40, 24),
        jnp.bfloat16,
        (slice(60), slice(140)),
    ),
    "window_positions_dropout": KernelCall(
        {"mask": masks.Window(left=30, right=10), "q_positions": jnp.arange(100)[None] + 120}
        | dropped(1),
        (1, 100, 260, 1, 64, 64),
        jnp.bfloat16,
    ),
    "tables": KernelCall(
        {
            "mask": masks.Predicate(
                lambda b, h, q, kv, ids, first: (ids[b, q] == ids[b, kv - 1]) & (kv >= first[h]),
                jnp.asarray(DOCUMENTS),
                jnp.int32([0, 7]),
            )
            & masks.Predicate(lambda b, h, q, kv, seen: seen[0, h, q, kv], jnp.asarray(SEEN)),
            "score": scores.Score(_relative, SLOPES, normal(2, 11))
            >> scores.RelativeBias(normal(32, 2)),
        },
        (2, 70, 100, 2, 128, 128),
    ),
    "look_ups": KernelCall(
        {"mask": lengths(60, 90), "score": LOOKED_UP}, alive=(slice(60), slice(90))
    ),
    "look_ups_at_positions": KernelCall(
        {
            "q_positions": jnp.arange(70)[None] + jnp.asarray([[30], [40]]),
            "kv_positions": jnp.arange(100)[::-1],
            "score": LOOKED_UP,
        }
    ),
    "hoistable": KernelCall(
        {
            "mask": masks.Causal(),
            "score": scores.Score(_hoistable, SLOPES, normal(2, 100), normal(2, 11))
            >> scores.Temperature(TEMPERATURES),
        }
    ),
    "distances_of_positions": KernelCall(
        {
            "q_positions": jnp.asarray(FAR[:70]),
            "kv_positions": jnp.asarray(FAR[70:]),
            "score": scores.RelativeBias(normal(24, 2), bidirectional=False, max_distance=50),
        }
    ),
    "wide_heads": KernelCall(
        {"mask": masks.Window(left=50, right=0), "score": scores.Temperature(TEMPERATURES)},
        (1, 70, 100, 2, 200, 136),
    ),
    "biases": KernelCall(
        {
            "mask": masks.Dense(jnp.asarray(SEEN)),
            "score": scores.Bias(normal(1, 1, 70, 100))
            >> scores.Bias(normal(2, 1, 70, 1))
            >> scores.Temperature(TEMPERATURES)
            >> scores.Bias(normal(1, 2, 1, 100)),
        }
        | dropped(2),
        (2, 70, 100, 2, 40, 24),
        jnp.bfloat16,
    ),
}


def plain_call(*sizes: int, dtype: Any = jnp.bfloat16, **rules: Any) -> KernelCall:
    """A call of heads of 64, for sizes B, T, S and N."""
    return KernelCall(rules, (*sizes, 64, 64), jnp.dtype(dtype))


def operands(call: KernelCall) -> list[Any]:
    """Query, key, value and the cotangents of out and lse."""
    B, T, S, N, H, V = call.sizes
    (d_lse,) = normal_arrays((B, N, T), dtype="float32", seed=1)
    return [*attention_arrays((B, T, S, N, 1, H, V), call.dtype), d_lse]


def wide(arrays: Any) -> list[Any]:
    return [x.astype(jnp.float64) for x in arrays]


def everything(call: KernelCall, implementation: str, q: Any, k: Any, v: Any, *d: Any) -> Any:
    """Returns out, lse and the gradients of query, key, value and float arrays of the score."""
    rules = call.rules_in(q.dtype)
    score = rules.pop("score", None)
    attend = functools.partial(
        jattn.attention, return_lse=True, implementation=implementation, **rules
    )
    function = lambda *x: attend(*x[:3], score=x[3])  # noqa: E731
    return tuple(jax.tree.leaves(out_and_gradients(function, (q, k, v, score), *d)))


# Errors of out, lse and gradients: bfloat16 rounds weights and results to 2⁻⁹, lse is in float32.
LIMITS = (1e-2, 2e-6, 2e-2)


def assert_within(got: Any, want: Any) -> None:
    """Checks that out, lse and any number of gradients are within `LIMITS`."""
    for x, y, limit in zip(got, want, [*LIMITS, *LIMITS[2:] * len(got)][: len(got)], strict=True):
        assert error(x, y) <= limit


@pytest.mark.one_in(20, slow=True)
@each_kernel
@pytest.mark.parametrize("name", CALLS)
def test_values_and_gradients(name, implementation):
    """Repeated with NaN in what does not exist, the results are the same bit for bit."""
    call = CALLS[name]
    arrays = operands(call)
    run = quick_jit(functools.partial(everything, call, implementation))
    got = run(*arrays)
    assert got[0].dtype == call.dtype
    assert got[1].dtype == jnp.float32
    assert_within(got, quick_jit(functools.partial(everything, call, "reference"))(*wide(arrays)))
    (rows, columns), (q, k, v, *cotangents) = call.alive, arrays
    if columns != slice(None):  # not all exist
        hide = lambda x, alive: jnp.full_like(x, jnp.nan).at[:, alive].set(x[:, alive])  # noqa: E731
        assert_same(run(hide(q, rows), hide(k, columns), hide(v, columns), *cotangents), got)


OFTEN = "lengths_both", "soft_cap_learned", "places_and_positions", "decode_function"
NAMED = [
    pytest.param(x, y, marks=() if x in OFTEN else pytest.mark.exhaustive)
    for x in sorted(SOFTMAX_CASES, key=lambda x: x not in OFTEN)
    for y in ("hopper", "ampere", "blackwell")
]


@pytest.mark.one_in(12)
@pytest.mark.parametrize(("name", "implementation"), NAMED)
def test_contract(name, implementation):
    case = CASES[name]
    run = quick_jit(functools.partial(contract.everything, implementation, case))
    got = run(contract.on_device(inputs(case, "bfloat16")))
    assert_accurate(name, "bfloat16", jax.tree.map(np.asarray, got))


def forward_program(call: KernelCall, implementation: str, **rules: Any) -> Any:
    attend = functools.partial(jattn.attention, implementation=implementation, return_lse=True)
    return quick_jit(functools.partial(attend, **call.rules, **rules))


def forward(call: KernelCall, implementation: str, arrays: Any, **rules: Any) -> Any:
    return forward_program(call, implementation, **rules)(*arrays[:3])


def assert_forward(call: KernelCall, implementation: str, arrays: Any, **rules: Any) -> Any:
    """Compares out and lse with the formula; returns out."""
    got = forward(call, implementation, arrays, **rules)
    assert_within(got, forward(call, "reference", wide(arrays), **rules))
    return got[0]


@pytest.mark.slow
@each_kernel
def test_the_tile_map_decides(implementation):
    """Tiles that the map calls empty are not visited, tiles that it calls full are not masked."""
    call = CALLS["full"]
    q, k, v, *_ = operands(call)
    lied = forward(call, implementation, (q, k, v), mask=lying_mask(128))
    assert_within(lied, forward(call, implementation, (q, k[:, :128], v[:, :128])))


@pytest.mark.one_in(6, slow=True)
@each_kernel
@pytest.mark.parametrize("scale", [1.0, 1.1])  # maxima are numbers of float32, and are not
def test_weights_of_the_backward_pass_sum_to_one_at_large_logits(scale, implementation):
    """Logits of a million differ by a few units: one number for maximum and log of the total has an
    error of 4 %, and so have sums of several tiles that are not relative to the rounded maximum."""
    q = jnp.ones((1, 256, 1, 64), jnp.bfloat16)
    steps = RNG.integers(-2, 3, (1, 256, 1, 64))
    steps[..., 0] = 2**20
    k = jnp.asarray(steps, jnp.bfloat16)

    def total(v: Any) -> Any:
        out = jattn.attention(
            q, k, v, implementation=implementation, mask=masks.Causal(), scale=scale
        )
        return jnp.sum(out, dtype=jnp.float32)

    d_value = quick_jit(jax.grad(total))(jnp.ones((1, 256, 1, 64), jnp.bfloat16))
    np.testing.assert_allclose(np.sum(d_value.astype(np.float32), axis=1), 256, rtol=4e-3)


@pytest.mark.one_in(3)
@each_kernel
def test_nan_reaches_who_attends_to_it(implementation):
    call = CALLS["full"]
    q, k, v, *_ = operands(call)
    out, _ = forward(call, implementation, (q, k, v.at[:, 100].set(jnp.inf)), mask=masks.Causal())
    assert np.isnan(out[:, 100:]).all()
    assert np.isfinite(out[:, :100].astype(jnp.float32)).all()


@pytest.mark.one_in(6, slow=True)
@each_kernel
def test_what_a_score_function_hides_is_hidden_from_a_row_that_is_nan(implementation):
    """Masks may be written as scores of −inf."""
    q, k, v = normal(96, 1, 64), normal(100, 1, 64), normal(100, 1, 64)

    def attend(v: Any) -> Any:
        score = lambda s, b, h, i, j: jnp.where((j > i) | (j == 5), -jnp.inf, jnp.tanh(s))  # noqa: E731
        broken = q.at[50].set(jnp.nan)
        return jattn.attention(broken, k, v, score=score, implementation=implementation)

    out, d_value = quick_jit(lambda v: out_and_gradients(attend, (v,), jnp.ones_like(q)))(v)
    assert [*jnp.flatnonzero(jnp.isnan(out).any((1, 2)))] == [50]
    assert [*jnp.flatnonzero(jnp.isnan(d_value).any((1, 2)))] == [x for x in range(51) if x != 5]


@pytest.mark.one_in(6, slow=True)
@each_kernel
def test_sums_of_large_values_do_not_overflow_and_small_values_keep_their_digits(implementation):
    q, k, v, *_ = operands(CALLS["full"])
    run = forward_program(CALLS["full"], implementation, mask=masks.Causal())
    large, small = jnp.bfloat16(3e38), jnp.bfloat16(2.0**-90)
    np.testing.assert_allclose(np.asarray(run(q, k, v * 0 + large)[0], np.float64), large, 4e-3)
    assert error(run(q, k, v * small)[0] / small, run(q, k, v)[0]) <= 1e-6


HUGE: dict[str, Any] = {
    "scale": {"scale": jnp.float32(1e11)},
    "temperature": {"score": scores.Temperature(jnp.array([1e-12, 2e-11]))},
    "function": {"score": lambda s, b, h, i, j: s * jnp.float32(1e10)},
    "lowest": {"score": lambda s, b, h, i, j: jnp.where(i > 3, jnp.finfo(jnp.float32).min, s)},
}


@pytest.mark.one_in(6, slow=True)
@each_kernel
@pytest.mark.parametrize("name", HUGE)
def test_weights_sum_to_one_where_score_functions_make_huge_logits(name, implementation):
    """So do gradients of values. Products are integers, so that both passes have the same."""
    q, k = jnp.round(normal(70, 2, 16)), jnp.round(normal(140, 2, 16) * 2)

    def total(v: Any) -> Any:
        out = jattn.attention(q, k, v, implementation=implementation, **HUGE[name])
        return jnp.sum(out, dtype=jnp.float32), out

    run = quick_jit(jax.value_and_grad(total, has_aux=True))
    (_, out), d_value = run(jnp.ones((140, 2, 16), jnp.float16))
    np.testing.assert_allclose(np.asarray(out, np.float64), 1, atol=4e-3)
    np.testing.assert_allclose(np.sum(np.asarray(d_value, np.float64), axis=0), 70, rtol=4e-3)


@pytest.mark.one_in(6, slow=True)
@each_kernel
def test_many_keys_for_few_queries_go_in_parts(monkeypatch, implementation):
    """Parts are merged in float32: the error is that of one rounding to bfloat16."""
    long = implementation == "hopper" and not versions.has_few_registers()
    parts = 2 if long else 4  # of tiles of 128 keys, others of 64
    with tuning.using(gpu_tiles_each=1):
        assert_parts(monkeypatch, implementation, jnp.bfloat16, parts, 2**-8)


WITHOUT_PARAMETERS = "full lengths_soft_cap window_positions_dropout distances_of_positions".split()
# XLA computes the gradients of entries that are looked up by pairs of queries and keys.
WITH_PAIRS = "look_ups", "look_ups_at_positions", "distances_of_positions"
H100 = jax.sharding.AbstractDevice("NVIDIA H100", num_cores=None, platform="gpu")


def translated(function: Any, arguments: Any) -> set[str]:
    """Returns the names of kernels in a program for a Hopper GPU; `XLA_PRODUCT` if it has one."""
    checks = [jax.export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")]
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=H100)):
        export = jax.export.export(jax.jit(function), platforms=["cuda"], disabled_checks=checks)
        program = export(*arguments).mlir_module()
    products = {XLA_PRODUCT} if XLA_PRODUCT in program else set()
    return set(re.findall(r"jattn_\w+", program)) & KERNELS | products


XLA_PRODUCT = "stablehlo.dot_general"
HOPPER = {f"jattn_hopper_{x}" for x in ("forward", "d_queries", "d_keys")}
KERNELS = HOPPER | {"jattn_mosaic_d_parameter", "jattn_mosaic_decode"}


@pytest.mark.one_in(12)
@pytest.mark.parametrize("name", CALLS)
def test_it_is_translated_for_cuda(name):
    call = CALLS[name]
    parameters = set() if name in WITHOUT_PARAMETERS else {"jattn_mosaic_d_parameter"}
    parameters |= {XLA_PRODUCT} if name in WITH_PAIRS else set()
    translations = translated(functools.partial(everything, call, "hopper"), operands(call))
    assert translations == HOPPER | parameters


def test_it_is_translated_for_cuda_under_shard_map():
    call = plain_call(4, 128, 128, 1)
    split = jax.shard_map(
        functools.partial(everything, call, "hopper"),
        mesh=jax.sharding.AbstractMesh((4,), ("x",), (AxisType.Auto,), abstract_device=H100),
        in_specs=(P("x"),) * 5,
        out_specs=(P("x"),) * 5,
    )
    assert translated(split, operands(call)) == HOPPER


def reason(dtype: Any = jnp.bfloat16, H: int = 8, **rules: Any) -> str | None:
    """Returns what `explain` says of a small call."""
    q, k = (jnp.ones((1, size, 1, H), dtype) for size in (5, 7))
    return jattn.explain(q, k, k, **rules)["hopper"]


TABLE = jnp.arange(7, dtype=jnp.float32)


product: Any = jax.custom_vjp(lambda x, y: x * y)  # has no forward mode
product.defvjp(lambda x, y: (x * y, (x, y)), lambda saved, d: (d * saved[1], d * saved[0]))


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"dtype": jnp.float32}, "got float32"),
        ({"H": 257}, "up to 256, got 257"),
        ({"score": lambda s, b, h, q, kv: s + TABLE[(q + kv) % 7]}, "a captured array"),
        (
            {"score": scores.Score(lambda s, b, h, q, kv, t: jnp.sort(t)[(q + kv) % 7] + s, TABLE)},
            "needs sort",
        ),
        ({"score": scores.Score(lambda s, b, h, q, kv: jnp.arctan(s))}, "needs atan"),
        (
            {"score": scores.Score(lambda s, b, h, q, kv, x: product(s, x), jnp.float32(1))},
            "`custom_vjp` does not have",
        ),
    ],
    ids=["float32", "head size", "captured", "sliced", "arctan", "reverse mode"],
)
def test_reasons(arguments, words):
    assert words in str(reason(**arguments))


NVCC, NVJITLINK = "nvidia-cuda-nvcc-cu12", "nvidia-nvjitlink-cu12"


@pytest.mark.parametrize(
    ("runtime", "compilers", "refused"),
    [
        (12071, {}, ""),
        (12080, {NVCC: "12.8.61", NVJITLINK: "12.8.61"}, f"{NVCC} 12.8.61 and {NVJITLINK} 12.8.61"),
        (12090, {NVCC: "12.9.41"}, f"{NVCC} 12.9.41"),  # CUDA 12.9.0
        (12090, {NVCC: "12.9.86", NVJITLINK: "12.9.41"}, f"{NVCC} 12.9.86 and {NVJITLINK} 12.9.41"),
        (12090, {NVCC: "12.9.86", NVJITLINK: "12.9.86"}, ""),  # CUDA 12.9.1
        (12090, {}, "neither"),
        (13000, {}, ""),
    ],
)
def test_a_compiler_that_breaks_masks_is_refused(monkeypatch, runtime, compilers, refused):
    pretend_gpu(monkeypatch, "9.0", runtime)

    def version(name: str) -> str:
        if name not in compilers:
            raise importlib.metadata.PackageNotFoundError(name)
        return compilers[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    words = (
        "CUDA 12.8.0 to 12.9.0 miscompiles masks; expected the compilers of CUDA 12.9.1 or later, "
        f"packages {NVCC} and {NVJITLINK} 12.9.86 or later, got {refused}"
    )
    assert reason(mask=masks.Causal()) == (words if refused else None)


SMALL = Shapes((1,), 128, 128, 1, 1, 64, 64, jnp.dtype("bfloat16"))


def example(score: Any, **rules: Any) -> Any:
    """Returns the factors of a small call, and whether and how many instructions approximate."""
    spec = prepared(Spec(masks.Full(), score, 0.125, None, None, **rules), SMALL)
    problem = GPUProblem.of(spec, SMALL, Tiling(128, 128), registers.Unit(True))
    return problem.factors[:4], problem.approximate, problem.special


def test_functions_of_scores_may_be_approximate():
    """Functions of positions are exact. The scale multiplies products before score functions, or
    else scores in the softmax."""
    dropout = {"dropout_rate": 0.75, "dropout_key": jax.random.key(0)}
    assert example(None, **dropout)[0] == (1.0, 0.125, False, 4.0)
    assert example(None)[::2] == ((1.0, 0.125, False, 1.0), 0)
    assert example(scores.Alibi([0.5])) == ((0.125, 1.0, True, 1.0), True, 0)
    assert example(scores.SoftCap(30.0))[1:] == (True, 1)
    sine = scores.Score(lambda s, b, h, i, j: s + jnp.sin(jnp.asarray(i - j, s.dtype)))
    assert not example(sine)[1]


def test_powers_of_two_by_products():
    """The precision is float32's, and 2⁰ is 1: a sum is multiplied with it again for each tile."""
    x = np.concatenate([-np.linspace(0, 126, 100_001), [-0.0]]).astype(np.float32)
    got = np.asarray(quick_jit(online_softmax.exp2_by_products)(jnp.asarray(x)), np.float64)
    np.testing.assert_allclose(got, np.exp2(x.astype(np.float64)), rtol=3e-7)
    assert got[0] == got[-1] == 1
    least = online_softmax.exp2_by_products(jnp.array([-127.0, -1e38, -jnp.inf], jnp.float32))
    np.testing.assert_array_equal(least, np.full(3, 2.0**-126, np.float32))


def order_of(mask: Any, shapes: Shapes, by_key: bool) -> tuple[Order, np.ndarray]:
    """Returns the order of a launch, and the number of tiles that each index (b, h, i) visits."""
    spec = prepared(Spec(mask, None, 0.125, None, None), shapes)
    tiling = Tiling(64, 128) if by_key else Tiling(128, 128)
    problem = GPUProblem.of(spec, shapes, tiling, registers.Unit(True, by_key))
    visits = block_mask.of(problem.kinds(spec), by_key=by_key)
    heads = shapes.K if by_key else shapes.N
    group, visited = shapes.N // heads, np.asarray(visits.ends[..., 1])
    visited = np.broadcast_to(visited, (shapes.B, shapes.N, visited.shape[-1]))
    visited = visited.reshape(shapes.B, heads, group, -1).sum(axis=2)
    return Order.of(problem, visits, heads), visited


def programs(mask: Any, shapes: Shapes, by_key: bool) -> tuple[list[tuple[int, ...]], np.ndarray]:
    """Returns the programs (b, h, i) of a launch as they start, and the number of tiles of each."""
    order, visited = order_of(mask, shapes, by_key)
    started = np.indices(order.grid, np.int32).reshape(3, -1)
    longest = None if order.longest_first is None else jnp.asarray(order.longest_first)
    _, *indices = jax.vmap(lambda *index: order.place(index, longest))(*started)
    indices = np.stack(np.broadcast_arrays(*indices), axis=-1)
    return [tuple(x) for x in indices.tolist()], visited


def lost(started: list[tuple[int, ...]], visited: np.ndarray, cores: int = 132) -> float:
    """The share of all cores' time that is idle if each takes the next program that starts."""
    free = [0] * cores
    for place in started:
        heapq.heapreplace(free, free[0] + int(visited[place]) + 1)
    return 1 - sum(free) / (cores * max(free))


LAUNCH = Shapes((2,), 4096, 4096, 16, 8, 128, 128, jnp.dtype("bfloat16"))
IDS = jnp.asarray(np.sort(np.random.default_rng(0).integers(0, 9, (2, 4096)), axis=1), jnp.int32)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("by_key", [False, True])
@pytest.mark.parametrize(
    ("mask", "idle"),
    [(masks.Causal(), 0.1), (masks.Causal() & masks.Segments(IDS), 0.05), (masks.Full(), None)],
    ids=["causal", "documents", "full"],
)
def test_the_longest_programs_start_first(mask, idle, by_key):
    """Each starts once; if their lengths differ, less time is idle than in the order of indices."""
    started, visited = programs(mask, LAUNCH, by_key)
    numbered = [*np.ndindex(visited.shape)]
    assert sorted(started) == numbered
    if idle is None:
        assert started == numbered
        return
    assert lost(started, visited) < 0.05
    assert lost(numbered, visited) > idle


@pytest.mark.parametrize("mask", [masks.Causal(), masks.Window(300, 0) | masks.Global(4)])
@pytest.mark.parametrize("count", [132, 114])
def test_programs_of_several_places_lose_no_more_than_programs_of_one(mask, count):
    order, visited = order_of(mask, LAUNCH, False)
    places = order.rounds(count)
    assert places.shape[0] == count
    assert sorted(places[places >= 0]) == [*range(2 * 16 * 32)]  # blocks of 128 queries
    index = np.unravel_index(np.maximum(places, 0), order.grid)
    _, *program = order.place(index, order.longest_first)
    busy = np.sum((np.asarray(visited)[tuple(program)] + 1) * (places >= 0), axis=1)
    assert 1 - busy.mean() / busy.max() <= lost(programs(mask, LAUNCH, False)[0], visited, count)


@pytest.mark.slow
def test_rounds_are_for_programs_known_to_take_longer():
    documents = masks.Causal() & masks.Segments(IDS)
    for mask, count in ((masks.Full(), 132), (documents, 132), (masks.Causal(), 2 * 16 * 32)):
        assert order_of(mask, LAUNCH, False)[0].rounds(count) is None


@pytest.mark.parametrize("stride", [1, 4])
@pytest.mark.parametrize("shared", [False, True])
def test_which_tiles_visit_a_diagonal(stride, shared):
    rng, (B, N, n, m) = np.random.default_rng(stride), (2, 3, 3, 4)
    kinds = rng.integers(0, 3, (B, 1 if shared else N, n, m))
    visits = block_mask.of_diagonals(kinds, stride, B)
    assert visits.ends.shape == (1, kinds.shape[1], m + (n - 1) * stride, 2)
    for h, d in np.ndindex(*visits.ends.shape[1:3]):
        full, count = visits.ends[0, h, d]
        listed = np.arange(count) if visits.order is None else visits.order[0, h, d, :count]
        wanted = {
            b * n + i
            for b, i, j in np.ndindex(B, n, m)
            if j == d + (i - (n - 1)) * stride and kinds[b, h, i, j]
        }
        assert full == 0
        assert set(listed.tolist()) == wanted


@pytest.mark.parametrize(
    ("mask", "by_key", "in_turn"),
    [
        (masks.Full(), False, True),
        (masks.Causal(), False, True),
        (masks.Causal(), True, False),
        (masks.Window(left=64), False, False),
    ],
)
def test_an_order_that_is_known_is_not_read(mask, by_key, in_turn):
    spec = Spec(mask, None, 0.125, None, None)
    visits = block_mask.of(block_mask.kinds(spec, 512, 512, Tiling(64, 128)), by_key=by_key)
    assert (visits.compact().order is None) is in_turn


@pytest.mark.one_in(8)
@pytest.mark.parametrize("xp", [np, jnp], ids=["known", "traced"])
@pytest.mark.parametrize("sizes", [(2, 3), (2, 1), (1, 3), (1, 1)])
@pytest.mark.parametrize("map_sizes", [(2, 3), (2, 1), (1, 3), (1, 1)])
def test_which_heads_visit_a_tile(xp, sizes, map_sizes):
    """Two batch rows with three heads each share maps and lists of tiles, or have their own."""
    kinds = RNG.integers(0, 3, (*sizes, 2, 4))
    rows, heads = 2 // map_sizes[0], 3 // map_sizes[1]
    visits = block_mask.of_heads(xp.asarray(kinds), map_sizes, (rows, heads))
    assert visits.kinds == (masks.MIXED,)
    visited_tiles = np.zeros((2, 3, 2, 4), bool)
    for b, h, tile in np.ndindex(*map_sizes, 8):
        full, visited = visits.ends[(*block_mask.clamped(visits.ends, b, h), tile)]
        assert full == 0
        order = range(6)
        if visits.order is not None:
            order = visits.order[(*block_mask.clamped(visits.order, b, h), tile)]
        for x in map(int, order[:visited]):
            index = b + x // heads, h + x % heads, *divmod(tile, 4)
            assert not visited_tiles[index]
            visited_tiles[index] = True
    np.testing.assert_array_equal(
        visited_tiles, np.broadcast_to(kinds, visited_tiles.shape) != masks.EMPTY
    )


@pytest.mark.parametrize("transposed", [False, True])
def test_arrays_in_registers_lack_axes_of_size_one(transposed):
    def function(row: Any, column: Any, tile: Any, number: Any) -> Any:
        close = jnp.abs(row[:, None] - column[None, :]) <= 2 + number
        chosen = jnp.where(close, tile * row[:, None], -column[None, :])
        return chosen / (2 + number[0, 0]), jnp.max(chosen, axis=-1), jnp.sum(chosen, axis=0)

    row, column = jnp.arange(4.0), jnp.arange(6.0)
    tile, number = jnp.asarray(RNG.normal(size=(4, 6))), jnp.ones((1, 1))
    shapes = jax.tree.map(jax.typeof, (row, column, tile, number))
    lying = tile.T if transposed else tile
    got = mosaic_interpreter.run(
        function, row, column, lying, number.reshape(()), shapes=shapes, transposed=transposed
    )
    chosen, *sums = function(row, column, tile, number)
    for x, y in zip(got, (chosen.T if transposed else chosen, *sums), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-12)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("q_first", "kv_first"), [(640, 128), (0, 2**23), (2**30, 5)])
def test_distances_of_places_are_those_of_integers(transposed, q_first, kv_first):
    def function(q: Any, kv: Any) -> Any:
        q, kv = q[:, None], kv[None, :]
        distance = (q - kv).astype(jnp.float32)
        return distance, jnp.abs(distance), *(x.astype(jnp.float32) for x in (abs(kv - q), kv - q))

    q, kv = q_first + jnp.arange(16, dtype=jnp.int32), kv_first + jnp.arange(24, dtype=jnp.int32)
    runs = IntegerRun(jnp.int32(q_first), q), IntegerRun(kv_first, kv)
    program = jax.make_jaxpr(
        lambda *at: mosaic_interpreter.run(
            function,
            *at,
            transposed=transposed,
            runs=tuple(x._replace(values=y) for x, y in zip(runs, at, strict=True)),
        )
    )(q, kv)
    got = eval_jaxpr(program.jaxpr, program.consts, q, kv)
    far = max(q_first, kv_first) > 2**24
    for x, y in zip(got, function(q, kv), strict=True):
        np.testing.assert_allclose(x.T if transposed else x, y, rtol=2**-23 if far else 0)
    used = {id(x) for equation in program.eqns for x in equation.invars}
    used |= set(map(id, program.jaxpr.outvars))
    converted = [
        x.outvars[0]
        for x in program.eqns
        if x.primitive.name == "convert_element_type" and id(x.outvars[0]) in used
    ]
    assert max(x.aval.ndim for x in converted) < 2  # no tile of integers is converted


@pytest.mark.parametrize("transposed", [False, True])
def test_numbers_are_spread_to_tiles_and_powers_are_products(transposed):
    """Rows of one number have no layout of their own, and the square is Mosaic's only power."""

    def function(row: Any, tile: Any) -> Any:
        return [tile * jnp.ones_like(row), *[tile**x for x in (-2, -1, 0, 3, 4, 7)]]

    tile = jnp.asarray(RNG.uniform(0.5, 2.0, (4, 3)), jnp.float32)
    row = tile[:, :1]
    expected = function(row, tile)
    turn = (lambda x: x.T) if transposed else (lambda x: x)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (row, tile)]
    run = functools.partial(mosaic_interpreter.run, function, shapes=shapes, transposed=transposed)
    arguments = row[:, 0], turn(tile)
    for x, y in zip(run(*arguments), expected, strict=True):
        np.testing.assert_allclose(turn(x), y, rtol=1e-6)
    program = jax.make_jaxpr(run)(*arguments)
    spread = [x for x in program.eqns if x.primitive.name == "broadcast_in_dim"]
    assert all(x.invars[0].aval.ndim != 1 for x in spread)
    assert "integer_pow" not in {x.primitive.name for x in program.eqns}


def test_integers_of_8_bits_are_compared_wider():
    """Mosaic compiles hardly any other operation of theirs."""
    tile = jnp.asarray(RNG.integers(-128, 128, (4, 3)), jnp.int8)

    run = lambda function: functools.partial(mosaic_interpreter.run, function)  # noqa: E731
    compared = run(lambda x: (x > 3) | (x == -1))
    np.testing.assert_array_equal(compared(tile), (tile > 3) | (tile == -1))
    operands = [
        x.aval.dtype
        for equation in jax.make_jaxpr(compared)(tile).eqns
        if equation.primitive.name in ("gt", "eq")
        for x in equation.invars
    ]
    assert operands == [jnp.dtype("int32")] * 4
    with pytest.raises(NotImplementedError, match="add of 8-bit integers"):
        run(lambda x: x + x)(tile)


@jax.jit
def remainder(x: Any, y: Any) -> Any:
    return x * y


DIVISIONS: dict[str, tuple[Any, bool]] = {
    "remainder": (lambda b, q, kv: (q + kv + b) % 7, True),
    "quotient": (lambda b, q, kv: (q + 2 * kv) // 8, True),
    "by a number": (lambda b, q, kv: (q + kv) // (b + 1), True),
    "of a number": (lambda b, q, kv: 170 // (q + kv + 1) + 7 % (kv + 2), True),
    "of a row": (lambda b, q, kv: q // 3 * 100 + kv % 5, True),
    "of rows alike": (lambda b, q, kv: jnp.full_like(q, 17) // 5 + kv, True),
    "twice": (lambda b, q, kv: (q // 4 * 9 + abs(q - kv)) // 8 % 3, True),
    "truncated": (lambda b, q, kv: lax.rem(lax.div(q + kv, np.int32(3)), np.int32(4)), True),
    "may be negative": (lambda b, q, kv: (q - kv) % 7, False),
    "may be negative, quotient": (lambda b, q, kv: (q - kv) // 4, False),
    "by what may be 0": (lambda b, q, kv: (q + kv + 1) // (kv % 2 + b), False),
    "of another meaning": (lambda b, q, kv: remainder(q, 5) + kv, False),
    "overflows": (lambda b, q, kv: (q * 2**29 + kv) % 7, False),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", DIVISIONS)
def test_integers_that_are_never_negative_are_divided_as_unsigned_ones(name, transposed):
    function, expected = DIVISIONS[name]
    b, q, kv = jnp.int32(1), jnp.arange(12, dtype=jnp.int32), jnp.arange(10, dtype=jnp.int32)

    whole = lambda b, q, kv: function(b, q[:, None], kv[None, :])  # noqa: E731

    def run(*at: Any) -> Any:
        below = [*zip(at, (2, 12, 10), strict=True)]
        return mosaic_interpreter.run(whole, *at, below=below, transposed=transposed)

    result = run(b, q, kv)
    np.testing.assert_array_equal(result.T if transposed else result, whole(b, q, kv))
    program = jax.make_jaxpr(run)(b, q, kv)
    divided = [
        str(x.invars[0].aval.dtype) for x in program.eqns if x.primitive.name in ("div", "rem")
    ]
    assert ({*divided} == {"uint32"}) is expected


@pytest.mark.parametrize(
    ("function", "count"), [(lambda x: x * 2, 1), (lambda x: x + 2, 0)], ids=["product", "sum"]
)
def test_selections_that_keep_the_rounding_of_scores_are_replaced(function, count):
    """A product takes one instruction, a sum none; selections of users stay."""
    kept: list[Any] = []
    rounded = lambda x: kept.append(x) or x  # noqa: E731

    def score(x: Any) -> Any:
        y = softmax.keep_rounding(function(x))
        return jnp.where(jnp.isnan(y), 7.0, y)

    def with_derivative(x: Any) -> Any:
        y, pull = jax.vjp(score, x)
        return y, *pull(jnp.ones_like(y))

    x = jnp.arange(6.0).reshape(2, 3).at[0, 1].set(jnp.nan)
    y, d = mosaic_interpreter.run(with_derivative, x, layout=RegisterLayout(rounded=rounded))
    assert_same(y, jnp.where(jnp.isnan(x), 7, function(x)))
    assert_same(d, jnp.where(jnp.isnan(x), 0, function(x + 1) - function(x)))
    assert len(kept) == count


@pytest.mark.parametrize("transposed", [False, True])
def test_entries_are_looked_up_along_the_axes_of_their_places(transposed):
    """One for all equal indices; rows and columns are distinguished although both are 4."""
    table = jnp.arange(20, dtype=jnp.float32) * 10
    lookups: list[Any] = []
    entries = lambda at, axes: lookups.append((jnp.ndim(at), axes)) or table[at]  # noqa: E731

    def function(table: Any, row: Any, column: Any, number: Any) -> Any:
        seen = table[number]
        per_key = jax.vmap(
            lambda i, j: (seen[i - 1], seen[j], seen[i + j], seen[number]), (None, 0)
        )
        return jax.vmap(per_key, (0, None))(row, column)

    rows, columns, number = jnp.arange(4, dtype=jnp.int32), jnp.array([3, 1, 0, 1]), jnp.int32(2)
    arguments = Table((4, 5), jnp.float32, entries), rows, columns.astype(jnp.int32), number
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arguments]
    results = mosaic_interpreter.run(function, *arguments, shapes=shapes, transposed=transposed)
    i, j = np.meshgrid(rows, columns, indexing="ij")
    row = np.asarray(table).reshape(4, 5)[2]
    wanted = row[i - 1], row[j], row[np.minimum(i + j, 4)], np.full((4, 4), row[2])
    for x, y in zip(results, wanted, strict=True):
        np.testing.assert_array_equal(x.T if transposed else x, y)
    assert sorted(lookups) == [(0, ""), (1, "s"), (1, "t"), (2, "ts")]


def test_a_table_may_be_larger_than_the_tile():
    """Sums along the tile are sums along its axes, not along those of the table."""

    function = lambda table, tile: jnp.max(tile + table[1, 3], axis=1)  # noqa: E731
    table = Table((8, 40), jnp.float32, lambda places, axes: jnp.float32(places))
    shapes = [jax.ShapeDtypeStruct(x, jnp.float32) for x in ((8, 40), (4, 6))]
    got = mosaic_interpreter.run(function, table, jnp.ones((4, 6), jnp.float32), shapes=shapes)
    np.testing.assert_array_equal(got, np.full(4, 44))


@pytest.mark.parametrize(
    ("capability", "interpreted", "expected"),
    [("8.6", False, False), ("9.0", False, True), ("10.0", False, True), ("8.0", True, True)],
)
def test_who_copies_tiles(monkeypatch, capability, interpreted, expected):
    pretend_gpu(monkeypatch, capability)
    assert streams._copies_by_unit(registers.Unit(interpreted)) == expected


@pytest.mark.parametrize(
    ("kernel", "capability", "expected"),
    [
        (hopper, "8.6", "expected compute capability 9.0, got 8.6"),
        (hopper, "9.0", None),
        (ampere, "7.5", "expected compute capability 8.0 or more, got 7.5"),
        (blackwell, "9.0", "expected compute capability 10.x, got 9.0"),
        (blackwell, "12.0", "expected compute capability 10.x, got 12.0"),
        (blackwell, "10.3", None if versions.knows_ampere() else ampere.OLD),
    ],
)
def test_kernels_refuse_other_gpus(monkeypatch, kernel, capability, expected):
    pretend_gpu(monkeypatch, capability)
    call = made(SMALL, score=scores.SoftCap(2.0), mask=masks.Causal() | masks.Global(2))
    assert kernel.supports(call) == expected


def growing(growth: float, tiles: int, dtype: Any) -> list[Any]:
    """Query, key and value whose scores increase with the tile of 128 keys by `growth`, by half of
    it or not at all, or decrease by it, depending on the row."""
    rng = np.random.default_rng(7)
    query, key = (0.25 * rng.normal(size=(1, n, 1, 64)) for n in (128, 128 * tiles))
    query[0, :, 0, 0] = np.resize([1, 0.5, 0, -1], 128)
    key[0, :, 0, 0] = np.repeat(np.arange(tiles) * growth, 128)
    value = rng.normal(size=(1, 128 * tiles, 1, 64))
    return [jnp.asarray(x, dtype) for x in (query, key, value)]


ANSWERS: list[bool] = []  # global, so that programs that are traced already write to it too
_ANY_ABOVE = votes.any_above


def noted(*arguments: Any) -> Any:
    far = _ANY_ABOVE(*arguments)
    jax.debug.callback(lambda x: ANSWERS.append(bool(x)), far)
    return far


def moves(query: Any, key: Any, columns: int) -> list[bool]:
    """Returns after which tiles of `columns` keys the sums of the rows are rescaled: if a maximum,
    to the base 2, is more than 8 above the sum's reference."""
    q, k = (np.asarray(x, np.float64)[0, :, 0] for x in (query, key))
    highest = (q @ k.T * np.log2(np.e)).reshape(len(q), -1, columns).max(axis=2)
    highest = np.maximum.accumulate(highest, axis=1).T
    relative, moved = np.full(len(q), -np.inf), []
    for maxima in highest:
        moved.append(bool((maxima - relative > 8).any()))
        relative = maxima if moved[-1] else relative
    return moved


# The rows that interpreted kernels rescale together, and the keys of a tile.
TOGETHER = {"hopper": (64, 128), "ampere": (64, 64), "blackwell": (128, 128)}


@pytest.mark.one_in(16, slow=True)
@pytest.mark.skipif(not ON_CPU, reason="compiled kernels have no callbacks")
@each_kernel
@pytest.mark.parametrize(
    ("growth", "dtype", "expected"),
    [(0.0, "bfloat16", 1), (1.0, "float16", 2), (128.0, "bfloat16", 8), (2048.0, "bfloat16", 8)],
)
def test_sums_are_rescaled_only_where_maxima_move_far(
    monkeypatch, implementation, growth, dtype, expected
):
    """If scores increase by 1, exponents increase by 1.44 with each of 8 tiles."""
    monkeypatch.setattr(votes, "any_above", noted)
    ANSWERS.clear()
    arrays = growing(growth, 8, dtype)
    call = plain_call(1, 128, 1024, 1, dtype=dtype, scale=1.0)
    with tuning.using(gpu_tiles_each=40):  # in one part
        assert_forward(call, implementation, arrays)
    jax.effects_barrier()
    rows, columns = TOGETHER[implementation]
    groups = [arrays[0][:, i : i + rows] for i in range(0, 128, rows)]
    wanted = [y for x in groups for y in moves(x, arrays[1], columns)]
    assert sorted(ANSWERS) == sorted(wanted)  # groups answer in any order
    assert sum(ANSWERS) == expected * len(groups)


@pytest.mark.one_in(6, slow=True)
@each_kernel
def test_a_row_that_sees_keys_late_starts_there(implementation):
    """Its maximum is the lowest number until then, while those of other rows move or do not."""
    mask = masks.Predicate(lambda b, h, q, kv: (kv >= 16 * (q % 64)) & (q != 5))
    call = plain_call(1, 128, 1024, 1, scale=1.0)
    out = assert_forward(call, implementation, growing(2.5, 8, "bfloat16"), mask=mask)
    assert not np.asarray(out[:, 5], np.float32).any()


@pytest.mark.one_in(6, slow=True)
@each_kernel
def test_weights_that_dropout_keeps_have_room_to_grow(implementation):
    """Float16 ends at 65,504: the dropout factor 512 is multiplied at the end. Weights of the
    second tile are 2^7.5 times those of the first, for which sums are not rescaled."""
    query, key, value = growing(5.2, 2, "float16")
    dropout = {"dropout_rate": 1 - 2**-9, "dropout_key": jax.random.key(8)}
    call = plain_call(1, 128, 256, 1, dtype="float16", scale=1.0, **dropout)
    arrays = [query.at[..., 1:].set(0), key, value]
    got, want = (
        forward(call, *x)[0] for x in ((implementation, arrays), ("reference", wide(arrays)))
    )
    assert jnp.abs(want).max() > 2
    assert error(got, want) <= LIMITS[0]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("first", [None, 5])  # a part of a larger call may start anywhere
def test_kernels_know_which_queries_share_a_hash(rows, first):
    """Queries at a distance of eight share one, unless positions give them other hashes."""
    shapes = Shapes((2,), 64, 64, 3, 1, 64, 64, jnp.dtype("bfloat16"))
    rule = {"dropout_rate": 0.5, "dropout_key": dropout.key_words(jax.random.key(3))}
    spec = Spec(masks.Full(), None, 1.0, None, None, **rule)
    if first is not None:
        origin = Origin(0, 0, q=first + jnp.arange(64, dtype=jnp.int32))
        spec = dataclasses.replace(spec, origin=origin)
    hashes = dropout.hashed(spec, shapes, rows=rows).dropout_key
    parts = hashes.rows, hashes.seeds, hashes.columns, hashes.places
    head = [x if x is None or x.ndim == 1 else x[1, 2] for x in parts]
    shared: list[Any] = []
    record = lambda x: shared.append(np.asarray(x)) or x  # noqa: E731

    def keeps(head: Any, places: Any) -> Any:
        hashed = dropout.Hashes(*head, dropped=None)
        local = dataclasses.replace(spec, origin=None, dropout_key=hashed)
        return dropout.keeps(local, 1, 2, Span(places, places), Span(places, places))

    places = jnp.arange(64, dtype=jnp.int32)
    decisions = mosaic_interpreter.run(keeps, head, places, layout=RegisterLayout(shared=record))
    queries = places if first is None else first + places
    wanted = dropout.keep(spec.dropout_key, 0.5, 1, 2, queries, places)
    assert np.array_equal(decisions, wanted)
    assert len(shared) == (first is None)
    for x in shared:
        pairs = x.reshape(4, 2, 8)
        assert np.array_equal(pairs[:, 0], pairs[:, 1])
        assert len(np.unique(x)) == 32


def registers_of(layout: Any, values: np.ndarray) -> Any:
    """Yields what the registers of a layout hold, one thread and register index after the other."""
    for sizes in layout.tiling.tiles:
        leading, tiled = values.shape[: -len(sizes)], values.shape[-len(sizes) :]
        pairs = [size for x, y in zip(tiled, sizes, strict=True) for size in (x // y, y)]
        n = len(leading)
        order = [*range(n), *range(n, n + 2 * len(sizes), 2), *range(n + 1, n + 2 * len(sizes), 2)]
        values = values.reshape(*leading, *pairs).transpose(order)
    of_threads = [x for x in (*layout.warp_dims, *layout.lane_dims) if isinstance(x, int)]
    of_threads = [x % values.ndim for x in (*of_threads, layout.vector_dim)]
    for place in np.ndindex(*(values.shape[x] for x in of_threads)):
        index: list[Any] = [slice(None)] * values.ndim
        for axis, x in zip(of_threads, place, strict=True):
            index[axis] = slice(x, x + 1)
        yield values[tuple(index)]


def test_sums_are_left_sides_of_products_without_a_move():
    """Queries of a tile beyond the first eight, and keys beyond the first eight, are in order."""
    if not versions.knows_ampere():
        pytest.skip(ampere.OLD)
    values = np.arange(64 * 96).reshape(64, 96)
    layouts = versions.mosaic().Layout
    sums, left = layouts.WGMMA.to_mgpu(), layouts.MMA_LHS(jnp.bfloat16).to_mgpu()
    of_threads = (registers_of(x, values) for x in (sums, left))
    for of_sums, wanted in zip(*of_threads, strict=True):
        assert np.array_equal(matrix_units.renamed_registers(of_sums, left, values.shape), wanted)


@pytest.mark.parametrize("by_key", [False, True])
@pytest.mark.parametrize("by", registers.Products)
def test_registers_that_are_named_alike_hold_the_same(by, by_key):
    if by is registers.Products.TENSOR_MEMORY:
        unit = registers.Unit(False, by_key, by, splits_rows=True)
        alone = jnp.arange(3.0)
        assert gpu_problem.register_layout(unit._replace(splits_rows=False)).shared(alone) is alone
    else:
        unit = registers.Unit(False, by_key, by)
    rows, columns = unit.rows, 96
    queries = columns if by_key else rows
    pairs = {
        "t": (gpu_problem._share_rows, np.arange(queries) & ~dropout.SHARED),
        "ts": (gpu_problem._share_diagonals, np.arange(rows)[:, None] - np.arange(columns)),
    }
    for axes, (change, values) in pairs.items():
        layout = unit.layout(axes).to_mgpu()
        distinct = []
        for contents in registers_of(layout, values):
            assert contents.shape == layout.registers_shape(values.shape)
            named, numbers = contents.copy(), np.arange(contents.size).reshape(contents.shape)
            change(named)
            change(numbers)
            assert np.array_equal(named, contents)
            distinct.append(len(np.unique(numbers)) / contents.size)
        assert max(distinct) <= 0.6


@pytest.mark.parametrize(
    ("rules", "apart"),
    [
        ({"mask": masks.Causal()}, False),
        ({"mask": masks.Segments(jnp.asarray(LONG)[None])}, True),
        ({"score": scores.Bias(jnp.ones((1, 1, 1, 200), jnp.bfloat16))}, True),
        ({"score": scores.Alibi(jnp.ones(1, jnp.bfloat16))}, False),
        ({"score": scores.RelativeBias(jnp.ones((32, 1), jnp.bfloat16))}, True),
    ],
    ids=["causal", "segments", "bias by key", "alibi", "table"],
)
def test_threads_share_rows_where_a_tile_reads_numbers_of_its_keys(rules, apart):
    """Otherwise each thread would hold the numbers of all its keys."""
    shapes = Shapes((1,), 200, 200, 1, 1, 64, 64, jnp.dtype("bfloat16"))
    mask, score = rules.get("mask", masks.Full()), rules.get("score")
    spec = prepared(Spec(mask, score, 0.125, None, None), shapes)
    unit = registers.Unit(True, by=registers.Products.TENSOR_MEMORY)
    assert GPUProblem.of(spec, shapes, Tiling(256, 128), unit).unit.splits_rows is apart
