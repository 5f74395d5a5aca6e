"""`compat.dot_product_attention` compared with `jax.nn.dot_product_attention`: signature, values,
gradients, errors; and its installation in place of it."""

import functools
import inspect
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn import compat
from tests.conftest import assert_trees_close, quick_jit


pytestmark = pytest.mark.usefixtures("standard_promotion")

B, T, S, N, H = 2, 11, 13, 4, 6


@functools.cache
def numbers(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def truths(*shape: int) -> np.ndarray:
    """Random booleans, about two thirds True; the first key is True for all queries."""
    allowed = np.random.default_rng(9).random(shape) < 0.65
    allowed[..., 0] = True
    return allowed


# Each argument's values; None leaves it out. No combination leaves a query without keys.
AXES: dict[str, dict[str, Any]] = {
    "bias": {
        "none": None,
        "full": numbers(3, B, N, T, S),
        "by head": numbers(4, 1, N, 1, S),
        "two axes": numbers(5, T, S),
    },
    "mask": {
        "none": None,
        "full": truths(B, N, T, S),
        "by row": truths(B, 1, T, S),
        "padding": truths(B, 1, 1, S),
    },
    "is_causal": {"no": False, "yes": True},
    "local_window_size": {"none": None, "one": 20, "two": (12, 3), "left": (11, 0)},
    "query_seq_lengths": {"none": None, "given": np.array([7, 11], np.int32)},
    "key_value_seq_lengths": {"none": None, "given": np.array([13, 5], np.int32)},
    "scale": {"none": None, "given": 0.7},
    "return_residual": {"no": False, "yes": True},
    "K": {"four": 4, "two": 2, "one": 1},
    "dtype": {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16},
}


def pairwise() -> list[dict[str, str]]:
    """Returns calls in which every pair of values of every two arguments occurs."""
    pairs = itertools.combinations(AXES, 2)
    wanted = {((a, x), (b, y)) for a, b in pairs for x in AXES[a] for y in AXES[b]}
    rng, calls = np.random.default_rng(0), []
    while wanted:
        drawn = [{a: str(rng.choice([*AXES[a]])) for a in AXES} for _ in range(40)]
        new = [set(itertools.combinations(row.items(), 2)) & wanted for row in drawn]
        best = max(range(40), key=lambda i: len(new[i]))
        calls.append(drawn[best])
        wanted -= new[best]
    return calls


CALLS = pairwise()


@pytest.mark.one_in(10)
@pytest.mark.parametrize("place", range(len(CALLS)))
def test_values_and_gradients_are_those_of_jax(place):
    names = CALLS[place]
    options = {a: AXES[a][names[a]] for a in AXES}
    K, dtype = options.pop("K"), options.pop("dtype")
    bias, mask, with_residual = options.pop("bias"), options.pop("mask"), options["return_residual"]
    arrays = [numbers(0, B, T, N, H), numbers(1, B, S, K, H), numbers(2, B, S, K, H)]
    arrays = [jnp.asarray(x, dtype) for x in arrays]
    biases = [] if bias is None else [jnp.asarray(bias)]
    lengths = options["query_seq_lengths"]
    alive = np.arange(T) < np.broadcast_to(T if lengths is None else lengths, B)[:, None]

    def loss(function: Any, *arrays: Any) -> Any:
        q, k, v, *rest = arrays
        result = function(q, k, v, *(rest or [None]), mask, **options)
        out, residual = result if with_residual else (result, jnp.zeros(()))
        out = out.astype(jnp.float32)
        return jnp.sum(out * jnp.asarray(numbers(7, B, T, N, H))), (out, residual)

    every = tuple(range(3 + len(biases)))
    results = []
    for function in (compat.dot_product_attention, jax.nn.dot_product_attention):
        run = quick_jit(jax.grad(functools.partial(loss, function), every, has_aux=True))
        # JAX's function has no gradients for float16 on CPUs.
        wide = dtype == jnp.float16 and function is jax.nn.dot_product_attention
        results.append(run(*(x.astype(jnp.float32) if wide else x for x in arrays), *biases))
    (ours, (out, residual)), (theirs, (their_out, their_residual)) = results
    tolerance = {jnp.float32: 2e-5, jnp.bfloat16: 0.06, jnp.float16: 8e-3}[dtype]
    close: Any = functools.partial(np.testing.assert_allclose, atol=tolerance, rtol=tolerance)
    close(out, their_out)
    assert residual.dtype == dtype or not with_residual
    if with_residual:
        close(*(np.asarray(x, np.float32)[alive] for x in (residual, their_residual)))
    for got, want in zip(ours, theirs, strict=True):
        assert got.dtype == want.dtype or dtype == jnp.float16
        assert got.shape == want.shape
        size = max(1.0, float(np.abs(np.asarray(want, np.float32)).max()))
        close(np.asarray(got, np.float32) / size, np.asarray(want, np.float32) / size)


def test_the_signature_is_that_of_jax():
    ours, theirs = (
        [(x.name, x.kind, x.default) for x in inspect.signature(f).parameters.values()]
        for f in (compat.dot_product_attention, jax.nn.dot_product_attention)
    )
    assert ours == theirs


def qkv(*batch: int) -> list[jax.Array]:
    return [jnp.asarray(numbers(i, *batch, n, N, H)) for i, n in enumerate((T, S, S))]


@pytest.mark.slow
def test_arrays_of_three_axes_and_windows_without_an_end():
    bias, lengths = numbers(4, N, T, S), np.array([5], np.int32)
    call = {"bias": bias, "key_value_seq_lengths": lengths, "return_residual": True}
    for arrays, options in ((qkv(), call), (qkv(B), {"local_window_size": (-1, 2)})):
        functions = compat.dot_product_attention, jax.nn.dot_product_attention
        got, want = (jax.jit(functools.partial(f, **options))(*arrays) for f in functions)
        assert jax.tree.map(jnp.shape, got) == jax.tree.map(jnp.shape, want)
        assert_trees_close(got, want, rtol=1e-7, atol=1e-5)


@pytest.mark.slow
def test_differences_are_those_that_are_listed():
    q, k, v = qkv(B)
    mask = truths(B, 1, T, S)
    mask[0, 0, 3] = False
    out, residual = compat.dot_product_attention(q, k, v, mask=mask, return_residual=True)
    assert not np.any(out[0, 3]) and np.all(residual[0, 3] == -np.inf)
    poisoned = v.at[:, 5].set(jnp.nan)
    masked = np.ones((1, 1, 1, S), bool)
    masked[..., 5] = False
    out = compat.dot_product_attention(q, k, poisoned, mask=masked)
    assert np.isfinite(out).all()


WRONG = {
    "dtype of mask": ({"mask": numbers(0, B, N, T, S)}, "mask"),
    "shape of mask": ({"mask": truths(B, N, T, 5)}, "mask"),
    "shape of bias": ({"bias": numbers(0, B, 3, T, S)}, "score"),
    "lengths": ({"query_seq_lengths": np.array([1, 2, 3], np.int32)}, "query_seq_lengths"),
    "dtype of lengths": ({"key_value_seq_lengths": np.ones(B)}, "key_value_seq_lengths"),
    "padding without its axes": ({"mask": np.ones((B, S), bool)}, r"\[:, None, None, :\]"),
    "implementation": ({"implementation": "flash"}, "implementation"),
    "value": ({"value": numbers(1, B, S, N, H + 1)}, "value"),
    "dtype of key": ({"key": jnp.ones((B, S, N, H), jnp.bfloat16)}, "dtype"),
}


@pytest.mark.parametrize("name", WRONG)
def test_mistakes_raise_as_in_jax(name):
    changes, message = WRONG[name]
    call = dict(zip(("query", "key", "value"), qkv(B), strict=True)) | changes
    with pytest.raises((ValueError, TypeError, AssertionError)):
        jax.nn.dot_product_attention(**call)
    with pytest.raises(ValueError, match=message):
        compat.dot_product_attention(**call)


def test_installed_and_reported():
    theirs, (q, k, v) = jax.nn.dot_product_attention, qkv(B)
    with compat.installed():
        assert jax.nn.dot_product_attention is not theirs
        with compat.installed():
            out = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        jax.nn.dot_product_attention(q, k, v, is_causal=True)
        jax.eval_shape(lambda q: jax.nn.dot_product_attention(q, k, v, None, truths(B, N, T, S)), q)
        jax.nn.dot_product_attention(q, k, v, implementation="xla")
    assert jax.nn.dot_product_attention is theirs
    np.testing.assert_array_equal(out, compat.dot_product_attention(q, k, v, is_causal=True))
    first, second, third = compat.report()
    assert (first.calls, first.query, first.arguments) == (2, (B, T, N, H), ("is_causal=True",))
    assert first.implementation == jattn.explain(q, k, v, mask=jattn.masks.Causal()).runs
    assert (second.calls, second.arguments) == (1, ("mask",))
    assert third.implementation == jattn.explain(q, k, v).runs
    assert str(first).startswith("2 × ")
    compat.install()
    compat.install()
    compat.uninstall()
    assert jax.nn.dot_product_attention is theirs
    assert compat.report() == []


def test_contexts_of_threads_may_overlap():
    theirs, (q, k, v) = jax.nn.dot_product_attention, qkv(B)
    first, second = compat.installed(), compat.installed(xla="blockwise")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    jax.nn.dot_product_attention(q, k, v, implementation="xla")
    assert compat.report()[0].implementation == "blockwise"
    compat.install()
    second.__exit__(None, None, None)
    assert jax.nn.dot_product_attention is not theirs  # until `uninstall`
    compat.uninstall()
    assert jax.nn.dot_product_attention is theirs


def test_xla_is_no_kernel_of_ours():
    """`jax.nn` calls the fallback on all platforms xla: Keras always passes it."""
    q, k, v = qkv(B)
    named, default = (
        jax.jit(functools.partial(compat.dot_product_attention, implementation=name))
        for name in ("xla", None)
    )
    assert named.lower(q, k, v).as_text() == default.lower(q, k, v).as_text()
    with compat.installed(xla="blockwise"):
        named = jax.nn.dot_product_attention(q, k, v, implementation="xla")
        jax.nn.dot_product_attention(q, k, v)
        with compat.installed():
            jax.nn.dot_product_attention(q, k, v, implementation="xla")
        jax.nn.dot_product_attention(q, k, v, implementation="xla")
    want = jattn.attention(q, k, v, implementation="blockwise")
    np.testing.assert_array_equal(named, want)
    default = jattn.explain(q, k, v).runs
    reported = [(x.calls, x.implementation) for x in compat.report()]
    assert reported == [(2, "blockwise"), (1, default), (1, default)]
    with pytest.raises(ValueError, match="xla: expected None"):
        compat.install(xla="flash")
    with compat.installed():
        jax.nn.dot_product_attention(q, k, v, implementation="xla")
    assert compat.report()[0].implementation == default
