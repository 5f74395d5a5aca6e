"""The contract for the GPU kernels, interpreted on a CPU: each case once, forward and gradients.

Interpreting is slow to compile, so that all that can be asked of one compiled case is asked of it
at once. What is translated for a GPU is read here, and run where there is one.
"""

import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jax.extend.mlir import ir
from jax.sharding import PartitionSpec as P

import jattn
from jattn import masks, scores, tuning
from jattn.kernels.common import block_mask
from tests import test_contract as contract
from tests.cases import CASES, Inputs, inputs
from tests.conftest import quick_jit
from tests.oracle import error
from tests.test_contract import attend, everything, on_device
from tests.test_derivatives import along, total_of


IN_16_BITS = {
    "bfloat16": ("chain", "places_and_positions", "tiles_bias"),
    "float16": ("causal", "dropout_masked"),
}

# Worst errors of gradients measured over all cases: 1.6e-2, 1.7e-3.
CEILINGS = contract.CEILINGS | {"bfloat16": 2e-2, "float16": 2.5e-3}


def assert_accurate(name: str, dtype: str, got: Any) -> None:
    """As in the contract; in 16 bits, compared with a formula that rounds as matrix units do."""
    x = inputs(CASES[name], dtype)
    measured = contract.errors(got, contract.truth(CASES[name], x))
    for what, plain in contract.plain_errors(name, dtype, dtype != "float32").items():
        limit = 2 * plain + 4 * float(jnp.finfo(np.float32).eps)
        ceiling = CEILINGS["float32" if what == "lse" else dtype]
        assert measured[what] <= min(limit, ceiling), (what, measured, plain)
    assert got.out.dtype == x.q.dtype
    assert got.lse.dtype == np.float32
    for label, gradient in got.gradients.items():
        assert gradient.dtype == (x._asdict() | x.parameters)[label].dtype, label


@pytest.mark.one_in(23)
@pytest.mark.parametrize("name", CASES)
def test_contract(name):
    """Values and gradients; the same again, bit for bit; masked places poisoned, the same again."""
    x = inputs(CASES[name], "float32")
    run = quick_jit(functools.partial(everything, "triton", CASES[name]))
    results = jax.tree.map(np.asarray, run(on_device(x)))
    assert_accurate(name, "float32", results)
    contract.assert_same(run(on_device(x)), results)

    rows, columns = contract.dead_places(name)
    assert not results.out[rows].any()
    assert np.all(np.swapaxes(results.lse, -1, -2)[rows] == -np.inf)
    for poison in contract.POISONS if rows.any() or columns.any() else ():
        q, k, v = x.q.copy(), x.k.copy(), x.v.copy()
        q[rows], k[columns], v[columns] = poison, poison, poison
        got = run(on_device(x._replace(q=q, k=k, v=v)))
        contract.assert_same(got, results)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("dtype, name", [(x, name) for x in IN_16_BITS for name in IN_16_BITS[x]])
def test_16_bits(dtype, name):
    run = quick_jit(functools.partial(everything, "triton", CASES[name]))
    results = run(on_device(inputs(CASES[name], dtype)))
    assert_accurate(name, dtype, jax.tree.map(np.asarray, results))


@pytest.mark.parametrize("name", ["causal", "tiles_segments"])
def test_poison_reaches_only_who_attends_to_it(name):
    x = inputs(CASES[name], "float32")
    run = quick_jit(functools.partial(everything, "triton", CASES[name]))
    clean = jax.tree.map(np.asarray, run(on_device(x)))
    j = int(np.flatnonzero(contract.seen_by_some(name))[-1])
    untouched = np.swapaxes(~contract.allowed_in(name)[..., j], 1, 2).reshape(clean.out.shape[:-1])
    assert untouched.any()
    for poison in (np.nan, np.inf):
        k, v = x.k.copy(), x.v.copy()
        k[..., j, :, :], v[..., j, :, :] = poison, poison
        got = jax.tree.map(np.asarray, run(on_device(x._replace(k=k, v=v))))
        np.testing.assert_array_equal(got.out[untouched], clean.out[untouched])
        np.testing.assert_array_equal(
            got.gradients["q"][untouched], clean.gradients["q"][untouched]
        )
        assert np.isnan(got.out[~untouched]).all()


# --- tiles --------------------------------------------------------------------------------------


def test_the_tile_map_decides():
    """A map that lies: what it calls empty is not visited, what it calls full is not masked."""

    def lie(tile: Any) -> Any:
        first = np.asarray(tile.columns.start) < 16
        rows = np.ones_like(np.asarray(tile.rows.start), bool)
        return rows & first, rows & first

    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(1, 32, 1, 16)), jnp.float32) for _ in range(3))

    def grouped(mask: masks.Mask) -> Any:
        call = functools.partial(jattn.attention, mask=mask, implementation="triton")
        out, pull = jax.vjp(call, q, k, v)
        return out, *pull(v)

    lied = grouped(masks.Predicate(lambda b, h, i, j: i < 0, bounds=lie))
    contract.assert_same(lied, grouped(masks.Lengths(kv=16)))


@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize("by_key", [False, True])
def test_a_walk_visits_what_is_not_empty_and_full_tiles_first(static, by_key):
    kinds = np.random.default_rng(0).integers(0, 3, (2, 1, 5, 4)).astype(np.int8)
    visits = block_mask.of(kinds if static else jnp.asarray(kinds), by_key=by_key)
    order, ends = map(np.asarray, visits.arrays)
    kinds = kinds.swapaxes(-1, -2) if by_key else kinds
    for b, i in np.ndindex(2, kinds.shape[2]):
        full, visited = ends[b, 0, i]
        row = order[b, 0, i]
        assert sorted(row[:full]) == np.flatnonzero(kinds[b, 0, i] == masks.FULL).tolist()
        assert sorted(row[full:visited]) == np.flatnonzero(kinds[b, 0, i] == masks.MIXED).tolist()


@pytest.mark.slow
def test_tiles_need_not_be_square():
    case = CASES["tiles_bias"]
    x = on_device(inputs(case, "float32"))
    with tuning.using(gpu_tile=(32, 16)):
        got = quick_jit(functools.partial(everything, "triton", case))(x)
    assert_accurate("tiles_bias", "float32", jax.tree.map(np.asarray, got))


@pytest.mark.slow
def test_parameters_with_many_entries():
    """These gradients are summed by XLA."""
    case = CASES["function_operands"]
    with tuning.using(gpu_gathered_entries=1):
        got = quick_jit(functools.partial(everything, "triton", case))(
            on_device(inputs(case, "float32"))
        )
    assert_accurate("function_operands", "float32", jax.tree.map(np.asarray, got))


def test_many_keys_for_few_queries_go_in_parts(monkeypatch):
    assert_parts(monkeypatch, "triton", jnp.float32, 3, 1e-6)


def assert_parts(
    monkeypatch: Any, implementation: str, dtype: Any, expected: int, most: float
) -> None:
    """Few queries and many keys: the implementation splits the keys into so many parts, of which
    some have none that may be attended to, and its error is at most so large."""
    counted, parts = [], block_mask.parts
    monkeypatch.setattr(block_mask, "parts", lambda *x: counted.append(parts(*x)) or counted[-1])
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(2, n, 2, 8)), dtype) for n in (2, 230, 230))
    mask = masks.Lengths(kv=jnp.array([230, 17])) & masks.Window(left=200)
    call = functools.partial(
        jattn.attention, mask=mask, q_positions=jnp.array([200, 3]), return_lse=True
    )
    exact = (x.astype(jnp.float32) for x in (q, k, v))
    got = quick_jit(functools.partial(call, implementation=implementation))(q, k, v)
    want = quick_jit(functools.partial(call, implementation="reference"))(*exact)
    assert counted == [expected]
    for x, y in zip(got, want, strict=True):
        assert error(x, y) <= most


@pytest.mark.default_tiles
def test_nothing_grows_with_the_square_of_the_length():
    """But the tile map, by the square of the number of tiles."""
    T = 8192
    ids = jnp.zeros((1, T), jnp.int32)
    slopes = jnp.ones(2, jnp.float32)

    def call(q, k, v, ids, slopes):
        return jattn.attention(
            q,
            k,
            v,
            mask=masks.Causal() & masks.Segments(ids),
            score=scores.Alibi(slopes),
            implementation="triton",
        ).sum()

    shape = jax.ShapeDtypeStruct((1, T, 2, 64), jnp.bfloat16)
    program = jax.make_jaxpr(jax.grad(call, (0, 1, 2, 4)))(shape, shape, shape, ids, slopes)
    assert largest(program.jaxpr) <= 2 * T * 2 * 64


def largest(jaxpr: Any) -> int:
    """The size of the largest array in a traced program."""
    sizes = [0]
    for equation in jaxpr.eqns:
        sizes += [getattr(x.aval, "size", 0) for x in equation.outvars]
        sizes += [largest(inner) for inner in jaxprs_in_params(equation.params)]
    return max(sizes)


# --- under the transformations ------------------------------------------------------------------


@pytest.mark.slow
def test_vmap_is_a_loop():
    case = CASES["places_and_positions"]
    x, axes = contract.stacked(case, Inputs._fields, size=2, dtype="float32")
    one = functools.partial(everything, "triton", case)
    mapped, single = quick_jit(jax.vmap(one, (axes,)))(x), quick_jit(one)
    for place in range(2):
        pick = functools.partial(jax.tree.map, lambda a, place=place: a[place])
        contract.assert_close(pick(mapped), single(pick(x)), 1e-6)


def sharded(x: Inputs, spec: Any, **options: Any) -> Any:
    """Forward and gradients of a case with inputs spread over devices, and in one piece."""

    def local(q: Any, k: Any, v: Any, d_out: Any) -> Any:
        here = lambda *a: x._replace(q=a[0], k=a[1], v=a[2])  # noqa: E731
        call = lambda *a: attend("triton", contract.SHARDED, here(*a))[0]  # noqa: E731
        out, pull = jax.vjp(call, q, k, v)
        return out, *pull(d_out)

    options.setdefault("mesh", contract.mesh(*(name for name in spec if name)))
    split = jax.shard_map(local, in_specs=(spec,) * 4, out_specs=(spec,) * 4, **options)
    return split, local


@pytest.mark.slow
def test_under_shard_map():
    x = on_device(inputs(contract.SHARDED, "float32"))
    operands = (x.q, x.k, x.v, x.d_out)
    # Pallas's interpreter does not know which values vary over a mesh.
    split, whole = sharded(x, P("x", None, "y"), check_vma=False)
    for got, want in zip(quick_jit(split)(*operands), quick_jit(whole)(*operands), strict=True):
        assert error(got, want) <= 1e-6


def test_inside_scan_and_checkpoint():
    case = CASES["lengths_both"]
    x, _ = contract.stacked(case, ("q",), size=2, dtype="float32")

    def one(q: Any, k: Any) -> Any:
        out, _ = attend("triton", case, x._replace(q=q, k=k))
        return jnp.sum(out * x.d_out)

    def total(k: Any) -> Any:
        step = lambda carry, q: (carry + jax.checkpoint(one)(q, k), None)  # noqa: E731
        return jax.lax.scan(step, jnp.zeros((), jnp.float32), x.q)[0]

    got = quick_jit(jax.value_and_grad(total))(x.k)
    want = quick_jit(jax.value_and_grad(lambda k: one(x.q[0], k) + one(x.q[1], k)))(x.k)
    for scanned, looped in zip(got, want, strict=True):
        assert error(scanned, looped) <= 1e-6


def test_forward_mode_and_second_order():
    """By the passes of `blockwise`, from what the kernel's forward pass has found."""
    case = CASES["soft_cap_learned"]
    x = on_device(inputs(case, "float32"))

    @quick_jit
    def both(x: Any) -> Any:
        found = []
        for name in ("triton", "reference"):
            total, arguments = total_of(name, case, x)
            t = along(arguments)
            slope = jax.jvp(total, (arguments,), (t,))[1]
            found.append((slope, jax.jvp(jax.grad(total), (arguments,), (t,))[1]))
        return found

    got, want = map(jax.tree.leaves, both(x))
    for a, b in zip(got, want, strict=True):
        assert error(a, b) <= 1e-5


def test_precision_reaches_the_products():
    x = on_device(inputs(CASES["plain"], "float32"))

    def highest(**options: Any) -> int:
        call = functools.partial(attend, "triton", CASES["plain"], return_lse=False, **options)
        return jax.jit(call).lower(x).as_text().count("HIGHEST")

    assert highest(precision="highest") >= 2
    with jax.default_matmul_precision(None):
        assert highest() == 0


# --- what it cannot do --------------------------------------------------------------------------


TABLE = jnp.arange(7, dtype=jnp.float32)


def _captures(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return score + TABLE[kv]


def _sums(score: Any, b: Any, h: Any, q: Any, kv: Any, table: Any) -> Any:
    return score + jnp.sum(table)


def _needs_erf(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return jax.scipy.special.erf(score)


def reason(dtype: Any = jnp.float32, H: int = 8, **rules: Any) -> str | None:
    """What `explain` says of a small call."""
    q, k = (jnp.ones((1, size, 1, H), dtype) for size in (5, 7))
    return jattn.explain(q, k, k, **rules)["triton"]


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"dtype": jnp.float64}, "got float64"),
        ({"H": 257}, "up to 256, got 257"),
        ({"score": scores.Score(_captures)}, "captures no array"),
        ({"score": scores.Score(_sums, TABLE)}, "only index its operands"),
        ({"score": scores.Score(_needs_erf)}, "needs erf"),
    ],
    ids=["float64", "head size", "captured", "summed", "erf"],
)
def test_reasons(arguments, words):
    assert words in str(reason(**arguments))


def test_no_reason():
    assert reason(H=256) is None
    assert reason(dtype=jnp.bfloat16, score=scores.Score(lambda s, b, h, q, kv: s * 2)) is None


def test_a_wrong_function_is_the_callers_error():
    with pytest.raises(TypeError, match="must return a boolean scalar"):
        reason(mask=masks.Predicate(lambda b, h, q, kv: q))


# --- for a GPU ----------------------------------------------------------------------------------


def gpus(**axes: int) -> Any:
    """A mesh of GPUs that nobody has; newer versions ask for their kind."""
    device = jax.sharding.AbstractDevice("NVIDIA H100", num_cores=None, platform="gpu")
    types = (jax.sharding.AxisType.Auto,) * len(axes)
    sizes, names = tuple(axes.values()), tuple(axes)
    return jax.sharding.AbstractMesh(sizes, names, types, abstract_device=device)


def translated(call: Any, operands: Any, *platforms: str) -> str:
    """A program for these platforms."""
    check = jax.export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")
    with jax.sharding.use_abstract_mesh(gpus()):
        exported = jax.export.export(jax.jit(call), platforms=platforms, disabled_checks=[check])
        return exported(*operands).mlir_module()


for_a_gpu = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")


@pytest.mark.one_in(2)
@for_a_gpu
@pytest.mark.parametrize(
    "name", ["plain", "chain", "places_and_positions", "tiles_bias", "tiles_relative_bias"]
)
def test_it_is_translated_for_cuda(name):
    case = CASES[name]
    x = on_device(inputs(case, "bfloat16"))
    program = translated(functools.partial(everything, "triton", case), (x,), "cuda")
    for kernel in ("jattn_forward", "jattn_d_queries", "jattn_d_keys"):
        assert f'name = "{kernel}"' in program
    assert ('name = "jattn_d_parameter"' in program) is bool(case.parameters)
    assert "stablehlo.dot_general" not in program


@for_a_gpu
def test_it_is_translated_for_cuda_under_shard_map():
    x = on_device(inputs(contract.SHARDED, "float32"))
    split, _ = sharded(x, P("x"), mesh=gpus(x=2))
    assert 'name = "jattn_d_keys"' in translated(split, (x.q, x.k, x.v, x.d_out), "cuda")


def kernels_of(program: str) -> dict[str, str]:
    """The kernels of a translated program by name, as text; raises for those that are not valid.

    Reading them is the first step of the compiler that comes after Pallas.
    """
    found: dict[str, str] = {}
    context: Any = importlib.import_module("jax._src.interpreters.mlir").make_ir_context()
    importlib.import_module("jaxlib.triton.dialect").register_dialect(context)

    def visit(operation: Any) -> None:
        if "call_target_name" in operation.attributes:
            config = operation.attributes["mhlo.backend_config"]
            module = ir.Module.parse(ir.StringAttr(config["ir"]).value_bytes)
            found[ir.StringAttr(config["name"]).value] = str(module)
        for region in operation.regions:
            for block in region.blocks:
                for inner in block.operations:
                    visit(inner.operation)

    with context:
        visit(ir.Module.parse(program).operation)
    return found


@pytest.mark.one_in(3)
@for_a_gpu
@pytest.mark.parametrize("name", ["bias", "bias_by_head", "bias_by_key", "chain", "tiles_bias"])
@pytest.mark.parametrize("bits", [32, 64])
def test_translated_kernels_are_valid(name, bits):
    """With and without 64-bit types, which decide what numbers in kernels are."""
    case = CASES[name]
    with jax.enable_x64(bits == 64):
        x = on_device(inputs(case, "bfloat16"))
        call = functools.partial(everything, "triton", case)
        assert "jattn_d_parameter" in kernels_of(translated(call, (x,), "cuda"))


def test_on_a_cpu_it_is_interpreted():
    case = CASES["causal"]
    x = on_device(inputs(case, "float32"))
    program = translated(functools.partial(attend, "triton", case), (x,), "cpu")
    assert "xla.gpu.triton" not in program
    assert "stablehlo.dot_general" in program
