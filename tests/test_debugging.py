"""JAX's flags for finding NaN and infinities, and `checkify`."""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

import jattn
from jattn import masks, parallel
from tests.cases import CASES, inputs
from tests.conftest import assert_trees_close
from tests.devices import mesh_of
from tests.test_contract import assert_close, everything, on_device
from tests.test_generation import TABLE, Bigram
from tests.test_transforms import PROBLEMS, TransformedCall


T = 6
X = jnp.asarray(np.random.default_rng(0).standard_normal((1, T, 2, 8)), jnp.float32)
WITH_NAN = X.at[:, 1].set(jnp.nan)
KEYS = masks.Dense(np.broadcast_to(np.arange(T) != 1, (1, 1, T, T)))  # key 1 is masked
DEAD = masks.Dense(np.broadcast_to(np.arange(T)[:, None] != 2, (1, 1, T, T)))  # query 2 has no keys

ON_CPU = (None, "reference", "blockwise", "native", "tpu")


def attention(implementation: str | None, **options: Any) -> Callable[[Any], Any]:
    return lambda x: jattn.attention(X, x, x, implementation=implementation, **options)


def total(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: jnp.sum(function(x))


TRANSFORMS: dict[str, Callable[[Any], Callable[[Any], Any]]] = {
    "eager": lambda function: function,
    "jit": jax.jit,
    "grad": lambda function: jax.value_and_grad(total(function)),
    "jit_of_grad": lambda function: jax.jit(jax.value_and_grad(total(function))),
    "grad_of_jit": lambda function: jax.value_and_grad(jax.jit(total(function))),
    "vmap": lambda function: lambda x: jax.vmap(function)(x[None]),
    "checkpoint": lambda function: jax.value_and_grad(jax.checkpoint(total(function))),
    "scan": lambda function: jax.value_and_grad(
        lambda x: jnp.sum(jax.lax.scan(lambda c, _: (function(c), None), x, length=2)[0])
    ),
}

UNDER_EACH = [(None, name) for name in (*TRANSFORMS,)[:6]]
UNDER_TWO = [*itertools.product(ON_CPU[1:], ("eager", "jit_of_grad"))]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("implementation", "transform"), UNDER_EACH + UNDER_TWO)
def test_a_nan_that_reaches_attention_is_found(implementation, transform):
    function = TRANSFORMS[transform](attention(implementation))
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="invalid value"):
        function(WITH_NAN)
    checked = checkify.checkify(function, checkify.nan_checks)
    assert "nan" in str(checked(WITH_NAN)[0].get())
    assert checked(X)[0].get() is None


@pytest.mark.parametrize("implementation", [None, "reference", "native", "blockwise"])
def test_debug_nans_leaves_alone_what_is_masked(implementation):
    function = attention(implementation, mask=KEYS)
    with jax.debug_nans(True):
        function(WITH_NAN)
        TRANSFORMS["grad"](function)(WITH_NAN)


@pytest.mark.parametrize("implementation", ["reference", "native"])
def test_debug_flags_without_jit(implementation):
    with jax.disable_jit(), jax.debug_nans(True), jax.debug_infs(True):
        TRANSFORMS["grad"](attention(implementation, mask=KEYS & DEAD))(WITH_NAN)
        with pytest.raises(FloatingPointError, match="nan"):
            TRANSFORMS["grad"](attention(implementation, mask=DEAD))(WITH_NAN)


def test_debug_nans_names_statistics_and_weights():
    for function in (jattn.attention_weights, jattn.statistics):
        with jax.debug_nans(True), pytest.raises(FloatingPointError):
            function(WITH_NAN, X)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("implementation", "transform"),
    [*itertools.product(["blockwise", "native"], TRANSFORMS), ("reference", "scan")],
)
def test_debug_infs_accepts_queries_without_keys(implementation, transform):
    with jax.debug_infs(True):
        TRANSFORMS[transform](attention(implementation, mask=DEAD))(X)


@pytest.mark.parametrize("implementation", [None, "reference", "native"])
def test_debug_infs_accepts_the_minus_infinity_of_results(implementation):
    function = attention(implementation, mask=DEAD, return_lse=True)
    with jax.debug_infs(True):
        out, lse = function(X)
        assert np.array_equal(np.isneginf(np.asarray(lse))[0, 0], np.arange(T) == 2)
        jattn.merge((out, lse), (out, lse))
        jattn.with_sink(out, lse, jnp.zeros(2))
        jax.value_and_grad(lambda x: jnp.sum(function(x)[0]))(X)
        jattn.attention_scores(X, X, mask=DEAD)
        jattn.attention_weights(X, X, mask=DEAD)
        jattn.statistics(X, X, mask=DEAD)
        jattn.normalised_interaction(X[0, 0] @ X[0, 0].T, masks.Causal())
        jattn.compat.dot_product_attention(X, X, X, mask=DEAD.array, return_residual=True)


def test_both_flags_stay_on_after_a_call():
    with jax.debug_nans(True), jax.debug_infs(True):
        jattn.attention(X, X, X, mask=DEAD, return_lse=True)
        with pytest.raises(FloatingPointError, match="inf"):
            jnp.exp(jnp.float32(1e4))
        with pytest.raises(FloatingPointError, match="inf"):
            jax.jit(lambda x: jattn.attention(x, x, x, mask=DEAD) + jnp.exp(1e4 + x))(X)
        with pytest.raises(FloatingPointError, match="nan"):
            jattn.attention(X, X, WITH_NAN, mask=DEAD, return_lse=True)


def test_debug_infs_finds_infinite_scores():
    with jax.debug_infs(True), pytest.raises(FloatingPointError):
        jattn.attention_scores(X, X, score=lambda s, b, h, i, j: jnp.exp(1e4 + s))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("transform", ["eager", "grad"])
@pytest.mark.parametrize("implementation", [None, "native", "blockwise", "reference"])
def test_checkify_sees_no_nan_that_is_masked(implementation, transform):
    function = TRANSFORMS[transform](attention(implementation, mask=KEYS & DEAD))
    error, _ = checkify.checkify(function, checkify.float_checks)(WITH_NAN)
    assert error.get() is None


FLAGS: dict[str, tuple[Callable[[], Any], ...]] = {
    "checks": (
        jax.checking_leaks,
        lambda: jax.enable_checks(True),
        lambda: jax.enable_custom_prng(True),
    ),
    "debugging": (lambda: jax.debug_nans(True), lambda: jax.debug_infs(True)),
    "not_compiled": (jax.disable_jit, lambda: jax.debug_nans(True), lambda: jax.debug_infs(True)),
}


@contextlib.contextmanager
def under(flags: str) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for flag in FLAGS[flags]:
            stack.enter_context(flag())
        yield


def assert_same_under(flags: str, run: Any, arrays: Any, assert_same: Any) -> None:
    """The results of `run` are the same under these flags."""
    with under(flags):
        if flags == "checks":  # leaks show while a program is traced and lowered
            jax.jit(run).lower(*arrays)
            return
        results = run(*arrays)
    assert_same(results, run(*arrays))


OFTEN_CASES = (
    ("checks", None, "chain"),
    ("debugging", "native", "lengths_both"),
    ("not_compiled", "reference", "dense"),
)


@pytest.mark.parametrize(
    ("flags", "implementation", "name"),
    [
        pytest.param(*row, marks=() if row in OFTEN_CASES else pytest.mark.exhaustive)
        for row in itertools.product(FLAGS, (None, "native", "blockwise", "reference"), CASES)
    ],
)
def test_cases_under_flags(flags, implementation, name):
    """Results and gradients of a case are the same under these flags."""
    run = functools.partial(everything, implementation, CASES[name])
    arrays = [on_device(inputs(CASES[name], "float32"))]
    try:
        assert_same_under(flags, run, arrays, functools.partial(assert_close, tolerance=1e-6))
    except NotImplementedError as reason:
        assert "'native'" in str(reason)


def tokens(x: Any) -> Any:
    return x.reshape(1, T, -1)


def parts(x: Any) -> tuple[Any, Any]:
    return jattn.attention(x, x, x, mask=DEAD, return_lse=True)


WEIGHTS = jnp.asarray(np.random.default_rng(1).standard_normal((16, 16)), jnp.float32)
FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "weights": lambda x: jattn.attention_weights(x, x, mask=DEAD, sink=jnp.zeros(2)),
    "scores": lambda x: jattn.attention_scores(x, x, mask=DEAD),
    "statistics": lambda x: jattn.statistics(x, x, mask=DEAD).entropy,
    "merge": lambda x: jattn.merge(parts(x), parts(2 * x))[0],
    "with_sink": lambda x: jattn.with_sink(*parts(x), jnp.zeros(2))[0],
    "sink": lambda x: jattn.attention(x, x, x, mask=DEAD, sink=jnp.zeros(2)),
    "self": lambda x: jattn.self_attention(tokens(x), *[WEIGHTS] * 3, mask=DEAD),
    "normalised": lambda x: jattn.normalised_interaction(tokens(x), masks.Causal()),
    "additive": lambda x: jattn.additive_attention(
        tokens(x), tokens(x), tokens(x), WEIGHTS, WEIGHTS, WEIGHTS[0], mask=DEAD
    ),
    "ring": lambda x: parallel.attention(
        x, x, x, mesh=mesh_of(data=2), axis_name="data", mask=masks.Causal() & ~KEYS
    ),
    "generate": lambda x: jattn.generate(
        *(Bigram(TABLE), jnp.ones((2, 1), jnp.int32)),
        **{"max_tokens": 2, "temperature": 0.5, "top_k": 4, "top_p": 0.7},
        key=jax.random.key(0),
    ),
}

OFTEN = dict.fromkeys(
    [
        *itertools.product(["checks"], ["module", "closures"]),
        *itertools.product(["debugging"], ["ring", "native_264", "DenseCache_None"]),
    ],
    pytest.mark.slow,
)
OFTEN |= {("debugging", "weights"): (), ("not_compiled", "normalised"): ()}
OFTEN[("not_compiled", "None_6")] = ()


@pytest.mark.default_tiles
@pytest.mark.parametrize(
    ("flags", "name"),
    [
        pytest.param(*row, marks=OFTEN.get(row, pytest.mark.exhaustive))
        for row in itertools.product(FLAGS, [*FUNCTIONS, *PROBLEMS])
        # Without jit JAX checks each operation: sampling gives −inf to tokens that it leaves out.
        if row not in (("not_compiled", "ring"), ("not_compiled", "generate"))
    ],
)
def test_public_functions_under_flags(flags, name):
    problem = PROBLEMS[name]() if name in PROBLEMS else TransformedCall(FUNCTIONS[name], (X,))

    def run(*arrays: Any) -> Any:
        if name == "generate":
            return problem.call(*arrays)
        out, pull = jax.vjp(problem.call, *arrays)
        return out, pull(out if name in PROBLEMS else jnp.ones_like(out))

    limit = 1e-11 if name in PROBLEMS else 1e-5  # of 64 and of 32 bits
    assert_same = functools.partial(assert_trees_close, rtol=limit, atol=limit)
    assert_same_under(flags, run, problem.arrays, assert_same)
