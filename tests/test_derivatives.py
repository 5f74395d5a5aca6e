"""Forward mode and second derivatives of the default path: the reference's, in linear memory.

The tests compare a scalar function of both results, so that each has a part in second derivatives,
along a random direction, so that no term can be mistaken for another.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jattn
from jattn import masks, normalizers, scores
from tests.arrays import assert_accurate, temporaries
from tests.cases import CASES, CallCase, inputs
from tests.conftest import normal_arrays, quick_jit, users_jit
from tests.devices import mesh_of
from tests.oracle import error
from tests.test_contract import attend, on_device
from tests.test_many_tiles import enlarged


def modes(total: Callable[[Any], Any]) -> dict[str, Callable[[Any, Any], Any]]:
    """Functions for first and second derivatives of `total(arguments)` along a direction."""
    slope = lambda x, t: jax.jvp(total, (x,), (t,))[1]  # noqa: E731

    def product(x: Any, t: Any) -> Any:
        leaves = zip(jax.tree.leaves(jax.grad(total)(x)), jax.tree.leaves(t), strict=True)
        return sum(jnp.vdot(a, b) for a, b in leaves)

    return {
        "jvp": slope,
        "linearize": lambda x, t: jax.linearize(total, x)[1](t),
        "jvp of grad": lambda x, t: jax.jvp(jax.grad(total), (x,), (t,))[1],
        "grad of grad": jax.grad(product),
        "grad of jvp": jax.grad(slope),
        "vmap of jvp of grad": lambda x, t: jax.vmap(
            lambda size: jax.jvp(jax.grad(total), (x,), (jax.tree.map(lambda y: size * y, t),))[1]
        )(jnp.array([1.0, -2.0])),
        "jvp of jvp": lambda x, t: jax.jvp(lambda x: slope(x, t), (x,), (t,))[1],
    }


def along(arguments: Any, seed: int = 5) -> Any:
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype), arguments)


assert_equal = functools.partial(assert_accurate, limit=1e-11)


def check(case: CallCase, *which: str) -> None:
    """Compares modes, all if none is named, for a scalar of both results, with the reference."""
    x = on_device(inputs(case))

    def totals(implementation: Any) -> Callable[[Any], Any]:
        def total(arguments: Any) -> Any:
            q, k, v, parameters = arguments
            replaced = x._replace(q=q, k=k, v=v, parameters=parameters)
            out, lse = attend(implementation, case, replaced)
            lse = jnp.where(jnp.isfinite(lse), lse, 0)
            return jnp.sum(jnp.sin(out) * x.d_out) + jnp.sum(jnp.cos(lse) * x.d_lse)

        return total

    assert_same_derivatives(totals, (x.q, x.k, x.v, x.parameters), *which, general=None)


@pytest.mark.one_in(140, slow=True)
@pytest.mark.parametrize(
    "name",
    sorted(
        (n for n, case in CASES.items() if 0 not in case.sizes.batch), key="bias_dead_rows".__ne__
    ),
)
def test_every_mode_is_that_of_the_reference(name):
    check(CASES[name])


@pytest.mark.one_in(4, slow=True)
@pytest.mark.default_tiles
@pytest.mark.parametrize("name", ["tiles_band", "lengths_both", "chain", "dense_and_causal"])
def test_over_the_tiles_that_users_get(name):
    check(enlarged(CASES[name]), "jvp", "jvp of grad", "grad of grad")


def small(implementation: Any, q: Any, k: Any, v: Any, slopes: Any, ids: Any) -> Any:
    """Returns the output for one batch row, in tiles of 16."""
    rules: Any = {"mask": masks.Causal() & masks.Segments(ids), "score": scores.Alibi(slopes)}
    qkv = (x[None] for x in (q, k, v))
    return jattn.attention(*qkv, implementation=implementation, **rules)[0]


def problem(lead: tuple[int, ...] = ()) -> tuple[tuple[Any, ...], Any]:
    ids = np.sort(np.random.default_rng(0).integers(0, 3, (*lead, 20)))
    return tuple(normal_arrays(*[(*lead, 20, 2, 3)] * 3, (2,))), jnp.asarray(ids)


def assert_same_derivatives(
    totals: Callable[[Any], Callable[[Any], Any]], x: Any, *which: str, general: Any = "blockwise"
) -> None:
    """Compares modes, all if none is named; `totals` makes the function of an implementation."""

    @quick_jit
    def run(x: Any) -> Any:
        results = []
        for name in (general, "reference"):
            all_modes, t = modes(totals(name)), along(x)
            results.append({mode: all_modes[mode](x, t) for mode in which or all_modes})
        return results

    assert_equal(*run(x))


@pytest.mark.one_in(8, slow=True)
@pytest.mark.parametrize("mode", ["grad of grad", "jvp of grad"])
@pytest.mark.parametrize("wrap", ["scan", "checkpoint", "jit", "vmap"])
def test_within_a_transform_of_the_call(wrap, mode):
    def scan(call: Any) -> Any:
        return lambda q, *rest: jax.lax.scan(lambda q, _: (call(q, *rest), None), q, None, 2)[0]

    def mapped(call: Any) -> Any:
        twice, over = lambda x: jnp.stack([x, 2 * x]), (0, None, 0, None, None)
        return lambda q, k, v, *rest: jax.vmap(call, over)(twice(q), k, twice(v), *rest)

    wraps: Any = {"checkpoint": jax.checkpoint, "jit": jax.jit, "scan": scan, "vmap": mapped}
    arguments, ids = problem()

    def total(name: str) -> Callable[[Any], Any]:
        call = wraps[wrap](functools.partial(small, name))
        return lambda arguments: jnp.sum(jnp.sin(call(*arguments, ids)))

    assert_same_derivatives(total, arguments, mode)


@pytest.mark.one_in(2, slow=True)
@pytest.mark.parametrize("shared", [("k", "slopes"), ("q", "v", "ids")])
def test_within_shard_map(shared):
    arguments, ids = problem(lead=(2,))
    names = ("q", "k", "v", "slopes", "ids")
    arrays = dict(zip(names, (*arguments[:3], *normal_arrays((2, 2)), ids), strict=True))
    arrays = {n: x[0] if n in shared else x for n, x in arrays.items()}
    specs = {n: P() if n in shared else P("x") for n in names}
    ids_alone = {"ids": arrays.pop("ids")}

    def local(arrays: Any) -> Any:
        shard = {n: x if n in shared else x[0] for n, x in arrays.items()}
        out = small("blockwise", *(shard[n] for n in names))
        return jax.lax.psum(jnp.sum(jnp.sin(out)), "x")

    def looped(arrays: Any) -> Any:
        each = [{n: x if n in shared else x[i] for n, x in arrays.items()} for i in range(2)]
        outs = [small("reference", *(shard[n] for n in names)) for shard in each]
        return sum(jnp.sum(jnp.sin(out)) for out in outs)

    sharded = jax.shard_map(local, mesh=mesh_of(x=2), in_specs=(specs,), out_specs=P())
    calls = {"blockwise": sharded, "reference": looped}
    total = lambda name: lambda x: calls[name](x | ids_alone)  # noqa: E731
    assert_same_derivatives(total, arrays, "jvp", "jvp of grad")


def test_poison_behind_a_mask_reaches_no_derivative():
    (q, k, v, slopes), _ = problem()
    mask = masks.Lengths(kv=13)

    def total(arguments: Any) -> Any:
        q, k, v = (x[None] for x in arguments)
        return jnp.sum(jnp.sin(jattn.attention(q, k, v, mask=mask, score=scores.Alibi(slopes))))

    @quick_jit
    def everything(arguments: Any) -> Any:
        t, all_modes = along(arguments), modes(total)
        which = "linearize", "jvp of grad", "grad of grad"
        return {mode: all_modes[mode](arguments, t) for mode in which}

    want = everything((q, k, v))
    for poison in (np.nan, np.inf, 1e300):
        assert_equal(everything((q, k.at[13:].set(poison), v.at[13:].set(poison))), want)


@pytest.mark.default_tiles
def test_tangents_of_bfloat16_are_those_of_float32():
    q, t = normal_arrays(*[(1, 64, 4, 64)] * 2, dtype="bfloat16")

    def slope(x: Any, t: Any) -> Any:
        call = functools.partial(jattn.attention, mask=masks.Causal())
        return jax.jvp(lambda x: call(x, x, x), (x,), (t,))[1]

    got = users_jit(slope)(q, t)
    want = quick_jit(slope)(q.astype(jnp.float32), t.astype(jnp.float32))
    assert got.dtype == jnp.bfloat16
    assert error(got, want) <= 1e-2


def _aligned(array: np.ndarray) -> np.ndarray:
    """A copy at an address that JAX uses in place."""
    memory = np.zeros(array.nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


CHANGED: dict[str, tuple[Callable[[Any], dict[str, Any]], np.ndarray]] = {
    "lengths": (lambda x: {"mask": masks.Lengths(kv=x)}, np.array([2, 5], np.int32)),
    "alibi": (lambda x: {"score": scores.Alibi(x)}, np.array([1.0, 2.0], np.float32)),
    "scale": (lambda x: {"scale": x}, np.array([1.0, 2.0], np.float32)),
    "key": (lambda x: {"dropout_rate": 0.5, "dropout_key": x}, np.array([1, 2], np.uint32)),
    "normalizer": (lambda x: {"normalizer": normalizers.Sigmoid(x)}, np.array([1, 2], np.float32)),
}


@pytest.mark.parametrize("name", CHANGED)
def test_gradients_are_of_the_arrays_of_the_call(name):
    """A program may write into NumPy arrays between the forward and the backward pass."""
    options, values = CHANGED[name]
    q, k, v = normal_arrays(*[(2, 6, 2, 8)] * 3, dtype="float32")
    array = _aligned(values)
    out, pull = jax.vjp(lambda q: jattn.attention(q, k, v, **options(array)), q)
    out.block_until_ready()
    array[...] = 0
    _, want = jax.vjp(lambda q: jattn.attention(q, k, v, **options(values)), q)
    np.testing.assert_array_equal(pull(out)[0], want(out)[0])


@pytest.mark.parametrize("implementation", ["native", "blockwise"])
def test_tangents_of_large_logits(implementation):
    """Each query attends to one key, in any tile, and the tangents of its scores are 1e6.

    Lengths in an array make a loop over tiles, not a band."""
    rng = np.random.default_rng(0)
    key, (value, d_value) = rng.permutation(400) + 1, rng.standard_normal((2, 400, 3))
    query = rng.choice([-1, 1], 90)
    q, k, v, dv = (
        jnp.asarray(x, jnp.float32)[None, :, None]
        for x in (query[:, None], key[:, None], value, d_value)
    )
    options: Any = {"scale": 1e4, "implementation": implementation, "return_lse": True}
    mask = masks.Lengths(kv=jnp.array([400]))
    attend = functools.partial(jattn.attention, mask=mask, **options)
    _, (d_out, d_lse) = jax.jvp(attend, (q, k, v), (1.7 * q, 0 * k, dv))
    chosen = np.where(query > 0, np.argmax(key), np.argmin(key))
    np.testing.assert_allclose(d_out[0, :, 0], d_value[chosen], rtol=1e-6)
    np.testing.assert_allclose(d_lse[0, 0], 1.7e4 * query * key[chosen], rtol=1e-6)


def test_third_derivatives_name_the_implementation_that_has_them():
    (x,) = normal_arrays((1, 4, 1, 3))
    total = lambda x: jnp.sum(jattn.attention(x, x, x) ** 2)  # noqa: E731
    slope = lambda f: lambda x: jax.jvp(f, (x,), (x,))[1]  # noqa: E731
    for third in (slope(slope(slope(total))), slope(slope(jax.grad(total)))):
        with pytest.raises(NotImplementedError, match="implementation='reference'"):
            third(x)


@pytest.mark.slow
def test_memory_grows_with_the_sequence_and_not_with_its_square():
    mask = masks.Causal() & masks.Window(left=32)
    total = lambda x: jnp.sum(jattn.attention(x, x, x, mask=mask) ** 2)  # noqa: E731
    for function in (total, jax.grad(total)):
        tangents = lambda x, f=function: jax.jvp(f, (x,), (x,))  # noqa: E731
        short, long = (temporaries(tangents, (1, T, 1, 8)) for T in (512, 2048))
        assert long < 6 * short
        assert long < 2048 * 2048
