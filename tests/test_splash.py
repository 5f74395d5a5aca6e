"""JAX's TPU kernel on the cases of the contract, in interpret mode, and every reason against it."""

import functools
import importlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import jattn
from jattn import masks, scores, tuning
from jattn._pytree import array_field, pytree_dataclass, static_field
from jattn.kernels import registry
from jattn.kernels.tpu import splash, splash_masks
from jattn.spec import check_shapes, make_spec
from tests import test_contract as contract
from tests import test_large_numbers as large
from tests.cases import CASES, inputs


ON_TPUS = registry.KERNELS["splash"]
splash_vjp: Any = importlib.import_module("jattn.kernels.tpu.splash_vjp")

CAUSAL = masks.Causal()
IDS = jnp.array([[0, 0, 1, 1, 1], [3, 2, 2, 2, 3]])


# --- masks --------------------------------------------------------------------------------------


STATIC = {
    "full": masks.Full(),
    "causal": CAUSAL,
    "window": masks.Window(3, 1),
    "prefix": masks.Prefix(4),
    "dilated": masks.Dilated(3),
    "global": masks.Global(2),
    "lengths": masks.Lengths(3, 5),
    "expression": ~(CAUSAL & masks.Window(left=2)) | masks.Prefix(1) & ~masks.Dilated(2),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", STATIC)
def test_static_masks_are_fed_as_they_are(name):
    given = splash_masks.as_splash(STATIC[name])
    assert given.segments is None
    assert given.lengths == ()
    tiles = splash_vjp._Tiles(given.static, 40, 48)
    got = [[tiles[i : i + 8, j : j + 16] for j in range(0, 48, 16)] for i in range(0, 40, 8)]
    np.testing.assert_array_equal(np.block(got), STATIC[name].dense(40, 48))


def test_only_mixed_tiles_are_evaluated(monkeypatch):
    evaluated = []
    original = masks.Causal.evaluate

    def evaluate(self: Any, *arguments: Any) -> Any:
        evaluated.append(arguments)
        return original(self, *arguments)

    monkeypatch.setattr(masks.Causal, "evaluate", evaluate)
    q = jax.ShapeDtypeStruct((1, 1024, 2, 8), jnp.float32)
    spec = make_spec(check_shapes(q, q, q), mask=CAUSAL)
    with tuning.using(splash_block=128):
        jax.eval_shape(functools.partial(splash_vjp._forward, True, spec), q, q, q)
    assert len(evaluated) == 2 * 8  # of 64; the kernel asks twice


def test_arrays_become_ids():
    mask = CAUSAL & masks.Segments(IDS) & masks.Lengths(q=4, kv=jnp.array([5, 2]))
    given = splash_masks.as_splash(mask)
    q_ids, kv_ids = splash_vjp._ids(given, 5, 5)
    allowed = (q_ids[:, :, None] == kv_ids[:, None, :]) & given.static.dense(5, 5)[None]
    np.testing.assert_array_equal(allowed, mask.dense(5, 5, batch=(2,))[:, 0])


@pytest.mark.parametrize(
    "mask, says",
    [
        (masks.Segments(IDS) & masks.Segments(IDS), "one Segments, not two"),
        (CAUSAL | masks.Segments(IDS), "arrays within Or"),
        (~masks.Segments(IDS), "arrays within Not"),
        (~masks.Lengths(kv=jnp.array([1, 2])), "arrays within Not"),
        (masks.Prefix(jnp.array([1, 2])), "array of Prefix"),
        (masks.Dense(jnp.ones((1, 1, 5, 5), bool)), "Dense may differ"),
        (masks.Blocks(jnp.ones((3, 3), bool), 2), "Blocks may differ"),
        (masks.Predicate(lambda b, h, q, kv: q > kv), "Predicate may differ"),
    ],
)
def test_masks_that_it_cannot_be_fed(mask, says):
    with pytest.raises(NotImplementedError, match=says):
        splash_masks.as_splash(mask)


def test_other_masks_may_be_registered():
    @pytree_dataclass
    class Odd(masks.Mask):
        which: int = static_field(default=1)
        unused: Any = array_field("*B", default=None)

        def evaluate(self, b, h, rows, columns):
            return (columns.positions[None, :] + rows.positions[:, None]) % 2 == self.which

        def bounds(self, tile):
            return np.True_, np.False_

    with pytest.raises(NotImplementedError, match="Odd may differ"):
        splash_masks.as_splash(Odd())
    splash_masks.as_splash.register(Odd, splash_masks.KernelMask)
    assert isinstance(splash_masks.as_splash(Odd() & CAUSAL).static, masks.And)


# --- reasons ------------------------------------------------------------------------------------


def reason(dtype: Any = jnp.float32, **rules: Any) -> str | None:
    """What `supports` says of a call of 5 queries and keys."""
    q, k = (jax.ShapeDtypeStruct((2, 5, heads, 4), dtype) for heads in (4, 2))
    shapes = check_shapes(q, k, k)
    return splash.supports(make_spec(shapes, **rules), shapes)


REASONS = {
    "float64": ({"dtype": jnp.float64}, "expected float32 or bfloat16, got float64"),
    "float16": ({"dtype": jnp.float16}, "expected float32 or bfloat16, got float16"),
    "positions": ({"q_positions": jnp.arange(5)}, "positions are given"),
    "dropout": ({"dropout_rate": 0.1, "dropout_key": jax.random.key(0)}, "no dropout"),
    "precision": ({"precision": "highest"}, "no precision"),
    "alibi": ({"score": scores.Alibi(jnp.ones(4))}, "has SoftCap only, got Alibi"),
    "tiny_cap": ({"score": scores.SoftCap(1e-50)}, "cap 1e-50 is no number of float32"),
    "huge_cap": ({"score": scores.SoftCap(1e50)}, "cap 1e+50 is no number of float32"),
    "learned_cap": ({"score": scores.SoftCap(jnp.float32(2.0))}, "cap is an array"),
    "mask": ({"mask": masks.Prefix(jnp.array([1, 2]))}, "array of Prefix"),
    "empty": ({"mask": masks.Empty()}, "leaves nothing"),
    "nothing_left": ({"mask": masks.Lengths(kv=0)}, "leaves nothing"),
}


@pytest.mark.parametrize("name", REASONS)
def test_every_limit_is_a_reason(name):
    rules, says = REASONS[name]
    assert says in (reason(**rules) or "")


# --- the contract -------------------------------------------------------------------------------


def takes(name: str) -> bool:
    """Whether it runs a case, in float32 and bfloat16 alike."""
    case, x = CASES[name], contract.on_device(inputs(CASES[name], "float32"))
    rules = case.rules(x.operands, x.parameters) | {
        "dropout_rate": case.rate,
        "dropout_key": contract.random_key() if case.rate else None,
    }
    return jattn.explain(x.q, x.k, x.v, platform="tpu", **rules)["splash"] is None


def check(name: str, dtype: str) -> None:
    """Values and gradients as exact as the contract wants them, with a rounding more: the queries
    are scaled before the product."""
    case, x = CASES[name], inputs(CASES[name], dtype)
    measured = contract.errors(contract.run("splash", name, x), contract.truth(case, x))
    for what, plain in contract.plain_errors(name, dtype).items():
        ceiling = contract.CEILINGS["float32" if what == "lse" else dtype]
        limit = min(2.5 * plain + 4 * float(jnp.finfo(jnp.float32).eps), ceiling)
        assert measured[what] <= limit, (what, measured, plain)


@pytest.mark.one_in(20)
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name):
    if takes(name):
        check(name, "float32")
    else:
        with pytest.raises(NotImplementedError, match="'splash'"):
            contract.run("splash", name, inputs(CASES[name], "float32"))


HALF = ["wide_values", "given_scale", "lengths_both", "soft_cap_causal", "one_kv_head", "segments"]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", HALF)
def test_values_and_gradients_in_half_precision(name):
    check(name, "bfloat16")


@pytest.mark.one_in(4)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["lengths_both", "window_tall", "soft_cap_causal"])
def test_poison_in_what_is_masked_changes_nothing(name, dtype):
    case, x = CASES[name], inputs(CASES[name], dtype)
    rows, columns = contract.dead_places(name)
    program = contract.quick_jit(functools.partial(contract.everything, "splash", case))
    clean = jax.tree.map(np.asarray, program(contract.on_device(x)))
    for poison in (np.nan, np.inf, 1e38):
        q, k, v = x.q.copy(), x.k.copy(), x.v.copy()
        q[rows], k[columns], v[columns] = poison, poison, poison
        got = program(contract.on_device(x._replace(q=q, k=k, v=v)))
        jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, got), clean)
        for letter, dead in (("q", rows), ("k", columns), ("v", columns)):
            assert not np.asarray(got.gradients[letter])[dead].any()
    assert not clean.out[rows].any()
    assert np.all(np.swapaxes(clean.lse, -1, -2)[rows] == -np.inf)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("mask", [None, CAUSAL], ids=["full", "causal"])
@pytest.mark.parametrize("what", large.KEYS)
def test_one_meaning_of_scores_beyond_all_numbers(what, mask):
    large.test_one_meaning_of_scores_beyond_all_numbers("splash", what, mask)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("poison", [np.inf, -np.inf, np.nan])
def test_who_attends_to_a_value_that_is_not_finite_is_nan(poison):
    large.test_who_attends_to_a_value_that_is_not_finite_is_nan("splash", poison, 20, 40)


def test_a_cotangent_that_is_nan_reaches_no_key_that_is_masked():
    """That of a row that is NaN, in a loss that is not linear."""
    q, k, v = large.drawn(T=20)
    v = v.at[:, large.KEY].set(jnp.nan)

    def total(*qkv: Any) -> Any:
        return jnp.sum(jattn.attention(*qkv, mask=CAUSAL, implementation="splash") ** 2)

    d_query, *others = contract.quick_jit(jax.grad(total, (0, 1, 2)))(q, k, v)
    assert np.all(np.isfinite(d_query[:, : large.KEY]))
    for found in others:
        assert not np.any(np.asarray(found[:, 20:]))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("mask", [None, CAUSAL], ids=["full", "causal"])
@pytest.mark.parametrize("T", [3, 128])
def test_a_row_whose_scores_are_all_minus_infinity_is_zero(T, mask, lse):
    q, k = jnp.full((1, T, 1, 4), 1e30), jnp.full((1, T, 1, 4), -1e30)
    q, k = q.astype(jnp.bfloat16), k.astype(jnp.bfloat16)
    got = jattn.attention(q, k, q * 0 + 1, mask=mask, implementation="splash", return_lse=lse)
    out, sums = got if lse else (got, -np.inf)
    assert np.all(np.asarray(out) == 0)
    assert np.all(np.asarray(sums) == -np.inf)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("V", [4, 130, 260])
def test_half_precision_rounds_out_only_at_the_end(V):
    """Gradients of rows with one key are 0 for q and k: out there is the value, whose digits they
    need; and lse has those of float32."""
    rng = np.random.default_rng(0)
    q, k, v, weights = (
        jnp.asarray(4 * rng.normal(size=(1, 7, 2, n)), jnp.bfloat16) for n in (8, 8, V, V)
    )

    def total(q: Any, k: Any, v: Any) -> Any:
        window = masks.Window(left=1, right=0)
        out, lse = jattn.attention(q, k, v, mask=window, implementation="splash", return_lse=True)
        return jnp.sum((out * weights).astype(jnp.float32)), lse

    found, lse = contract.quick_jit(jax.grad(total, (0, 1), has_aux=True))(q, k, v)
    exact = (np.asarray(x, np.float64) for x in (q, k, v, weights))
    d_q, d_k, sums = two_keys(*exact)
    np.testing.assert_allclose(lse, sums, rtol=2e-6)
    for got, want in ((found[0], d_q), (found[1], d_k)):
        error = np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want)
        assert error < 5e-3


@pytest.mark.parametrize(("V", "lost"), [(64, 2**-23), (128, 2**-23), (256, 2**-15)])
def test_what_is_stored_beside_out_is_read_again(V, lost):
    """lse by the bit, and out with 15 digits or more; what is not finite stays."""
    rng = np.random.default_rng(0)
    out = jnp.asarray(rng.normal(size=(8, V)), jnp.float32)
    out = out.at[1, 3].set(jnp.inf).at[2, V - 1].set(-jnp.inf).at[3, 0].set(jnp.nan)
    sums = jnp.asarray([*rng.normal(size=5), -np.inf, np.inf, 1e38], jnp.float32)
    rounded, words = splash_vjp._split(out, jnp.broadcast_to(sums[:, None], (8, 128)))
    again, lse = splash_vjp._joined(rounded[None, None], words[None, None])
    np.testing.assert_array_equal(lse[0, 0], sums)
    np.testing.assert_allclose(again[0, 0], out, rtol=lost)
    stored, expected = (x.astype(jnp.float32) for x in (rounded, out.astype(jnp.bfloat16)))
    np.testing.assert_array_equal(stored, expected)


def two_keys(q: Any, k: Any, v: Any, weights: Any) -> Any:
    """d_q, d_k and lse where a query sees its own key and the one before, in float64."""
    scores = np.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(q.shape[-1])
    near = np.subtract.outer(np.arange(7), np.arange(7))
    scores = np.where((near == 0) | (near == 1), scores, -np.inf)
    lse = np.log(np.exp(scores).sum(-1))
    p = np.exp(scores - lse[..., None])
    dp = np.einsum("btnv,bsnv->bnts", weights, v)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) / np.sqrt(q.shape[-1])
    return np.einsum("bnts,bsnh->btnh", ds, k), np.einsum("bnts,btnh->bsnh", ds, q), lse


# --- the program --------------------------------------------------------------------------------


def program_for_tpus(dtype: str, gradients: bool = False, **rules: Any) -> str:
    x = jax.ShapeDtypeStruct((2, 256, 2, 128), dtype)

    def call(q: Any, k: Any, v: Any) -> Any:
        return jattn.attention(q, k, v, implementation="splash", **rules)

    total = lambda *qkv: call(*qkv).astype(jnp.float32).sum()  # noqa: E731
    function = jax.grad(total, (0, 1, 2)) if gradients else call
    return export.export(jax.jit(function), platforms=["tpu"])(x, x, x).mlir_module()


def test_half_registers():
    """A head size of 64 is not padded in 16 bits; lse then lies beside no out of its width."""
    rng = np.random.default_rng(0)
    q, k, v, d_out = (
        jnp.asarray(rng.normal(size=(2, 130, n, 64)), jnp.bfloat16) for n in (2, 1, 1, 2)
    )
    mask = CAUSAL & masks.Lengths(kv=jnp.array([130, 70]))

    def both(implementation: str, *qkv: Any) -> Any:
        call = functools.partial(
            jattn.attention, mask=mask, implementation=implementation, return_lse=True
        )
        (out, lse), pull = jax.vjp(call, *qkv)
        return out, lse, *pull((d_out.astype(out.dtype), jnp.ones_like(lse)))

    got = jax.jit(functools.partial(both, "splash"))(q, k, v)
    want = both("reference", *(x.astype(jnp.float32) for x in (q, k, v)))
    for x, y in zip(got, want, strict=True):
        assert np.abs(np.asarray(x, np.float32) - y).max() <= 1e-2 * np.abs(y).max()
    assert np.abs(np.asarray(got[1]) - want[1]).max() <= 1e-5 * np.abs(want[1]).max()


@pytest.fixture
def compiled_kernels(monkeypatch):
    monkeypatch.setitem(registry.KERNELS, "splash", ON_TPUS)


@pytest.mark.usefixtures("compiled_kernels")
@pytest.mark.parametrize("mask", [None, CAUSAL], ids=["full", "causal"])
@pytest.mark.parametrize("gradients", [False, True])
def test_the_program_is_the_kernels_and_holds_no_other(mask, gradients):
    program = program_for_tpus("bfloat16", gradients, mask=mask)
    calls = [x for x in program.splitlines() if "@tpu_custom_call" in x]
    assert len(calls) == (3 if gradients else 1)
    for one in calls:  # q, k and v as they are
        types = one.rsplit(" : ", 1)[1].split("->")[0]
        assert types.count("2x2x256x128xbf16") == (3 if "fwd" in one else 4)
        assert "2x2x256x128xf32" not in types
    for other in ("stablehlo.while", "stablehlo.case", "stablehlo.if"):
        assert other not in program


@pytest.mark.usefixtures("compiled_kernels")
def test_the_log_of_the_sum_is_stored_where_it_is_used():
    def stored(**rules: Any) -> bool:
        return not re.search(r"fwd\w*_no_residuals", program_for_tpus("float32", **rules))

    assert not stored(mask=CAUSAL)
    assert not stored(mask=masks.Window(left=200, right=0))
    assert stored(mask=CAUSAL, gradients=True)
    # Queries without keys are found by it.
    assert stored(mask=CAUSAL & ~masks.Dilated(1) | CAUSAL & masks.Lengths(q=200))
    assert stored(mask=masks.Lengths(kv=jnp.array([0, 3])))


# --- transformations ----------------------------------------------------------------------------


def test_under_the_transformations():
    """vmap, checkpoint, scan and shard_map at once, against the plain formula."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(2, 3, 2, 5, 2, 4)), jnp.float32) for _ in range(3))

    def loss(q: Any, k: Any, v: Any, implementation: str) -> Any:
        call = functools.partial(jattn.attention, mask=CAUSAL, implementation=implementation)
        _, out = jax.lax.scan(lambda _, qkv: (None, jax.checkpoint(call)(*qkv)), None, (q, k, v))
        return jnp.sum(out**2, axis=(2, 3, 4))

    def gradients(implementation: str) -> Any:
        one = jax.grad(lambda *qkv: loss(*qkv, implementation=implementation).sum(), (0, 1, 2))
        rows = jax.sharding.PartitionSpec("x")
        mesh = jax.make_mesh((2,), ("x",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
        split = jax.shard_map(
            jax.vmap(one), mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False
        )
        return contract.quick_jit(split)(q, k, v)

    for x, y in zip(gradients("splash"), gradients("reference"), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)
