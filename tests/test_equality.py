"""Equality of masks, scores and functions: as keys, static arguments and compiled programs."""

import dataclasses
import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jattn
from jattn import call, masks, nn, normalizers, scores
from jattn.cache import DenseCache
from jattn.functions.snapshots import frozen
from tests.conftest import normal_arrays


def rule(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return kv <= q


def different() -> list[Any]:
    return [
        masks.Causal(),
        masks.Window(3, 1),
        masks.Window(3, 2),
        ~(masks.Causal() & masks.Window(left=2)) | masks.Global(1),
        masks.Prefix(3),
        masks.Prefix(4),
        masks.Lengths(kv=4),
        masks.Dilated(2),
        masks.Predicate(rule),
        masks.Full(),
        scores.SoftCap(3.0),
        scores.SoftCap(2.0),
        scores.SoftCap(2.0) >> scores.Temperature(1.5),
        "Causal()",
    ]


def test_equal_ones_are_equal_and_hash_alike_and_others_differ():
    for (i, left), (j, other) in itertools.product(enumerate(different()), enumerate(different())):
        assert (left == other) == (i == j)
        assert i != j or hash(left) == hash(other)
    assert masks.Prefix(1) != scores.SoftCap(1.0)


def test_arrays_are_equal_to_themselves_alone():
    ids = jnp.array([1, 2], jnp.int32)
    assert masks.Segments(ids) & masks.Causal() == masks.Segments(ids) & masks.Causal()
    assert hash(masks.Segments(ids)) == hash(masks.Segments(ids))
    assert masks.Segments(ids) != masks.Segments(jnp.array([1, 2], jnp.int32))
    cache = DenseCache.create(1, 2, 1, 1)
    assert cache == cache  # noqa: PLR0124
    assert cache != DenseCache.create(1, 2, 1, 1)


def written_again(source: str, **names: Any) -> Any:
    space = {"jnp": jnp, "functools": functools, "masks": masks, **names}
    exec(source, space)
    return space["f"]


SOURCE = "f = lambda b, h, q, kv: (kv <= q) & (q - kv < width)"
table = jnp.arange(4.0)


def test_a_function_written_again_is_the_same():
    for source, names in (
        (SOURCE, {"width": 3}),
        (SOURCE, {"width": np.int32(3)}),
        ("f = lambda b, h, q, kv, n=2: jnp.where(kv < n, True, kv <= q)", {}),
        ("def g(x): return jnp.abs(x)\ndef f(b, h, q, kv): return g(q - kv) < 2", {}),
        ("def make(n):\n return lambda b, h, q, kv: q - kv < n\nf = make(2)", {}),
        ("def g(n, b, h, q, kv): return q - kv < n\nf = functools.partial(g, 3)", {}),
        ("f = lambda s, b, h, q, kv: s + table[kv]", {"table": table}),
        ("f = lambda b, h, q, kv: kv < x[0]", {"x": np.arange(3)}),
    ):
        left, other = written_again(source, **names), written_again("\n\n" + source, **names)
        assert left is not other
        assert frozen(left) is frozen(other), source


def test_functions_that_differ_are_not_the_same():
    for source, first, second in (
        ("f = lambda b, h, q, kv: kv {} q", "<=", "<"),
        ("f = lambda s, b, h, q, kv: s * {}", "1", "1.0"),
        ("f = lambda s, b, h, q, kv: s * {}", "0.0", "-0.0"),
        ("f = lambda s, b, h, q, kv: s * {}", "1", "True"),
        ("w = {}\nf = lambda b, h, q, kv: q - kv < w", "2", "3"),
        ("f = lambda b, h, q, kv, n={}: q < n", "2", "3"),
        ("f = lambda b, h, q, kv, *, n={}: q < n", "2", "3"),
        ("g = lambda x: x + {}\nf = lambda s, b, h, q, kv: g(s)", "1", "2"),
        ("f = lambda s, b, h, q, kv: (lambda x: x + {})(s)", "1", "2"),
        ("t = {}\nf = lambda s, b, h, q, kv: s + t[kv]", "jnp.zeros(3)", "jnp.zeros(3)"),
    ):
        left, other = (frozen(written_again(source.format(x))) for x in (first, second))
        assert left is not other, source


def test_functions_of_what_may_change_are_not_frozen():
    for x in ([1], {}, np.array([{}]), np.ma.array([1]), object(), masks.Causal()):
        for source in ("f = lambda b, h, q, kv: kv <= q + len(x)", "f = lambda b, h, q, kv: x"):
            function = written_again(source, x=x)
            assert frozen(function) is function, type(x)


def test_functions_with_effects_are_not_frozen():
    for source in (
        "f = lambda b, h, q, kv: print(q)",
        "f = lambda b, h, q, kv: globals()['w']",
        "def f(b, h, q, kv):\n global w\n w = 1\n return q",
        "def f(b, h, q, kv):\n import math\n return math.pi",
        "def f(b, h, q, kv):\n x[0] = 1\n return q\nx = jnp.ones(1)",
        "def make(n):\n def f(*x):\n  nonlocal n\n  n += 1\n  return n\n return f\nf = make(1)",
        "f = lambda s, b, h, q, kv: s + np.random.rand()",
        "f = lambda s, b, h, q, kv: s + rand()",
        "f = lambda s, b, h, q, kv: s + wrapped(q)",
    ):
        names = {"np": np, "rand": np.random.rand, "wrapped": np.vectorize(len)}
        function = written_again(source, **names)
        assert frozen(function) is function
    recursive = written_again("def f(n): return n and f(n - 1)")
    assert frozen(recursive) is recursive
    bound = table.__getitem__
    assert frozen(bound) is bound


def test_a_frozen_function_does_not_change():
    function = written_again("w = 2\nf = lambda b, h, q, kv: q - kv < w")
    two = frozen(function)
    function.__globals__["w"] = 3
    three = frozen(function)
    assert (two(0, 0, 2, 0), three(0, 0, 2, 0)) == (False, True)
    function.__globals__["w"] = 2
    assert frozen(function) is two


def test_a_predicate_written_again_runs_what_is_compiled():
    (q,) = normal_arrays((1, 40, 2, 8))
    call = lambda f, impl: jattn.attention(q, q, q, mask=masks.Predicate(f), implementation=impl)  # noqa: E731
    want = jattn.attention(q, q, q, mask=masks.Causal() & masks.Window(left=6))
    for implementation in ("blockwise", "reference"):
        first = call(written_again(SOURCE, width=3), implementation)
        with jax.log_compiles(False), jax.no_tracing():
            again = call(written_again(SOURCE, width=3), implementation)
        np.testing.assert_array_equal(first, again)
        other = call(written_again(SOURCE, width=7), implementation)
        np.testing.assert_allclose(other, want, atol=1e-13)


@pytest.mark.slow
def test_tracers_are_operands_wherever_a_function_holds_them():
    class Threshold(NamedTuple):
        x: Any

        def allows(self, b: Any, h: Any, q: Any, kv: Any) -> Any:
            return kv < self.x

    (q,) = normal_arrays((1, 40, 2, 8))

    def holders(x: Any) -> list[Any]:
        outs = {"x": [x]}
        return [
            lambda b, h, q, kv: kv < x,
            lambda b, h, q, kv, n=x: kv < n,
            functools.partial(lambda x, b, h, q, kv: kv < x, x),
            lambda b, h, q, kv: kv < outs["x"][0],
            Threshold(x).allows,
            jax.jit(lambda b, h, q, kv: kv < x),
        ]

    def attend(x: Any) -> Any:
        lasting = [masks.Predicate(f).traced() for f in holders(x)]
        assert all(len(x.operands) == 1 for x in lasting)
        bounds = lambda tile: tuple(jnp.asarray(end) < x for end in tile.columns[:2])  # noqa: E731
        mask = masks.Predicate(holders(x)[-1], bounds=bounds)
        return jattn.attention(q, q, q, mask=mask, implementation="blockwise")

    with jax.checking_leaks():
        out = jax.jit(attend)(jnp.int32(4))
    dense = jax.jit(lambda x: [masks.Predicate(f).dense(9, 9) for f in holders(x)])
    for allowed in dense(jnp.int32(4)):
        np.testing.assert_array_equal(allowed, np.broadcast_to(np.arange(9) < 4, (9, 9)))
    np.testing.assert_allclose(out, jattn.attention(q, q, q, mask=masks.Prefix(4)), atol=1e-13)


@pytest.mark.parametrize(
    ("name", "base", "method"),
    [
        ("score", scores.ScoreFunction, "evaluate"),
        ("normalizer", normalizers.NormalizerFunction, "weights"),
        ("normalizer", normalizers.PointwiseNormalizer, "evaluate"),
    ],
)
def test_users_classes_with_equal_fields_are_told_apart(name, base, method):
    """JAX says that structures are equal if such classes are all that differs."""
    array, q = jnp.ones(()), normal_arrays((1, 5, 2, 8))[0]

    def instance(factor: float) -> Any:
        scaled = lambda self, score, *_: factor * self.p * jax.nn.relu(score)  # noqa: E731
        parts: Any = {"frozen": True, "bases": (base,), "namespace": {method: scaled}}
        made = dataclasses.make_dataclass("Own", ["p"], **parts)
        return jax.tree_util.register_dataclass(made)(array)

    one, other = instance(1.0), instance(2.0)
    assert jax.tree.structure(one) == jax.tree.structure(other)
    calls = [call.make(q, q, q, **{name: x}) for x in (one, other)]
    assert jax.tree.structure(calls[0]) != jax.tree.structure(calls[1])
    layers = [nn.MultiHeadAttention(2, 8, rngs=nnx.Rngs(0), **{name: x}) for x in (one, other)]
    assert nnx.graphdef(layers[0]) != nnx.graphdef(layers[1])
    if name == "score":
        assert one >> scores.SoftCap(2.0) != other >> scores.SoftCap(2.0)
        assert one >> scores.SoftCap(2.0) == one >> scores.SoftCap(2.0)
