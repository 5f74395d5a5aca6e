"""Masks and scores that depend on the index of a device or of a mapped example."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jattn
from jattn import masks, scores
from tests.conftest import quick_jit
from tests.devices import mesh_of


def on_devices_eagerly(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return jax.shard_map(function, mesh=mesh_of(c=2), in_specs=P("c"), out_specs=P("c"))


def on_devices(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return jax.jit(on_devices_eagerly(function))


def on_examples(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def alone(x: Any) -> Any:
        return jax.tree.map(lambda y: y[0], function(x[None]))

    return jax.vmap(alone, axis_name="c")


PLACES = {f.__name__: f for f in (on_devices, on_devices_eagerly, on_examples)}


def index() -> Any:
    return lax.axis_index("c")


def asked_in_functions() -> dict[str, Any]:
    @jax.jit
    def shifted(i: Any) -> Any:
        return i + index()

    return {
        "mask": lambda b, h, i, j: j <= shifted(i),
        "score": lambda s, b, h, i, j: jnp.where(i >= 0, s * (1.0 + index().astype(s.dtype)), 0.0),
    }


def asked_before() -> dict[str, Any]:
    c = index()
    return {
        "mask": lambda b, h, i, j: j <= i + c,
        "score": lambda s, b, h, i, j: jnp.where(i >= 0, s * (1.0 + c.astype(s.dtype)), 0.0),
    }


def given_as_operands() -> dict[str, Any]:
    return {
        "mask": masks.Predicate(lambda b, h, i, j, c: j <= i + c, index()),
        "score": scores.Score(lambda s, b, h, i, j, c: s * (1.0 + c.astype(s.dtype)), index()),
    }


def formula(x: Any, index: int) -> Any:
    T = x.shape[1]
    i, j = np.arange(T)[:, None], np.arange(T)
    score = jnp.einsum("btnh,bsnh->bnts", x, x) / 2.0 * (1.0 + index)
    weights = jax.nn.softmax(jnp.where(j <= i + index, score, -jnp.inf), axis=-1)
    return jnp.einsum("bnts,bsnh->btnh", weights, x)


def with_gradient(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: (function(x), jax.grad(lambda x: jnp.sum(function(x) ** 2))(x))


@pytest.mark.one_in(9)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("how", [asked_in_functions, asked_before, given_as_operands])
@pytest.mark.parametrize(
    ("implementation", "T"),
    [(None, 8), ("reference", 8), ("blockwise", 8), ("native", 8), (None, 600), ("native", 600)],
)
def test_what_is_asked_of_an_axis_is_right(implementation, T, how, place):
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, T, 1, 4)), jnp.float32)

    def attention(x: Any) -> Any:
        return jattn.attention(x, x, x, implementation=implementation, **how())

    result = PLACES[place](with_gradient(attention))(x)
    formulas = [with_gradient(functools.partial(formula, index=c)) for c in (0, 1)]
    wants = quick_jit(lambda x: [formulas[c](x[c : c + 1]) for c in (0, 1)])(x)
    for c, want in enumerate(wants):
        for got, expected in zip(result, want, strict=True):
            np.testing.assert_allclose(got[c : c + 1], expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("place", ["on_devices", "on_examples"])
def test_collectives_of_what_is_known_before_are_right(place):
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 8, 1, 4)), jnp.float32)

    def attention(x: Any) -> Any:
        score = lambda s, b, h, i, j: s + lax.pmean(x.sum(), "c") * jnp.where(j > i, 1, 0)  # noqa: E731
        return jattn.attention(x, x, x, score=score)

    def expected(x: Any, mean: Any) -> Any:
        bias = jnp.where(np.arange(8) > np.arange(8)[:, None], mean, 0.0)
        return jattn.attention(x, x, x, score=scores.Bias(bias[None, None]))

    want = expected(x, x.sum() / 2)
    np.testing.assert_allclose(PLACES[place](attention)(x), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("place", PLACES)
def test_collectives_of_constants_are_right(place):
    """The kernel in C++ needs derivatives of the function; in `shard_map` that of a sum contains
    how its operand is sharded."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 8, 1, 4)), jnp.float32)

    def total(x: Any, score: Any) -> Any:
        return jnp.sum(jattn.attention(x, x, x, score=score, implementation="native") ** 2)

    def of_devices(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return (s + lax.psum(1.0, "c")) * s

    want = jax.grad(lambda x: total(x, lambda s, b, h, i, j: (s + 2.0) * s))(x)
    d = PLACES[place](jax.grad(functools.partial(total, score=of_devices)))(x)
    np.testing.assert_allclose(d, want, rtol=1e-4, atol=1e-4)


CALLS: dict[str, Callable[..., Any]] = {
    "attention": jattn.attention,
    "reference": lambda *x, **named: jattn.attention(*x, implementation="reference", **named),
    "native": lambda *x, **named: jattn.attention(*x, implementation="native", **named),
    "weights": lambda q, k, v, **named: jattn.attention_weights(q, k, **named),
    "statistics": lambda q, k, v, **named: jattn.statistics(q, k, **named).entropy,
}


@pytest.mark.parametrize("place", ["on_devices", "on_examples"])
@pytest.mark.parametrize("call", CALLS)
def test_collectives_of_scores_and_indices_are_refused(call, place):
    x = jnp.ones((2, 8, 1, 4))

    def mean_of_devices(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s + lax.pmean(s, "c")

    def any_device(b: Any, h: Any, i: Any, j: Any) -> Any:
        return lax.psum(j - i, "c") > 0

    for options in ({"score": mean_of_devices}, {"mask": any_device}):
        name = next(iter(options.values())).__name__
        with pytest.raises(NotImplementedError, match=f"{name} calls psum.* over the axis 'c'"):
            PLACES[place](lambda x, o=options: CALLS[call](x, x, x, **o))(x)


def test_bounds_are_kept_beside_a_function_that_reads_an_axis():
    def allowed(b: Any, h: Any, i: Any, j: Any) -> Any:
        return j < lax.axis_index("t") * 0 + 8

    def bounds(tile: Any) -> Any:
        return tile.columns.lo < 8, tile.columns.hi < 8

    def passed(x: Any) -> Any:
        traced = masks.Predicate(allowed, bounds=bounds).traced()
        assert traced.bounds_fn is not None
        return x

    jax.shard_map(passed, mesh=mesh_of(t=2), in_specs=P("t"), out_specs=P("t"))(jnp.zeros(2))
