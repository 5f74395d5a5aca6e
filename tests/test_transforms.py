"""Attention under JAX's transformations, with functions as users write them."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jattn
from jattn import masks, mechanisms, nn, scores
from jattn.cache import DenseCache, PagedCache, RollingCache
from tests.conftest import assert_trees_close, normal_arrays


B = 4


def normal(*shape: int) -> jax.Array:
    return normal_arrays(shape)[0]


def squared(function: Callable[..., Any], *arguments: int) -> Callable[..., Any]:
    """The gradients of the sum of squares, which depend on the values."""

    total = lambda *arrays: sum(jnp.sum(x**2) for x in jax.tree.leaves(function(*arrays)))  # noqa: E731
    return jax.grad(total, arguments or (0, 1, 2))


class TransformedCall(NamedTuple):
    """A function of float arrays, some of which have a leading batch axis."""

    call: Callable[..., Any]
    batched: tuple[Any, ...]
    shared: tuple[Any, ...] = ()

    @property
    def arrays(self) -> tuple[Any, ...]:
        return (*self.batched, *self.shared)

    def gradients(self, *arrays: Any) -> Any:
        return squared(self.call, *range(len(arrays)))(*arrays)

    def both(self, *arrays: Any) -> Any:
        return self.call(*arrays), self.gradients(*arrays)


def attention(implementation: str | None, T: int) -> TransformedCall:
    """Attention in which one row has no keys."""

    def call(q: Any, k: Any, v: Any, slopes: Any) -> Any:
        rows = jnp.arange(q.shape[0], dtype=jnp.int32)
        mask = masks.Causal() & masks.Lengths(q=T - 1, kv=T - 2 - rows % 2)
        score = scores.Alibi(slopes)
        return jattn.attention(q, k, v, mask=mask, score=score, implementation=implementation)

    return TransformedCall(call, tuple(normal_arrays(*[(B, T, 2, 8)] * 3)), (normal(2),))


def additive(T: int) -> TransformedCall:
    call = functools.partial(mechanisms.additive_attention, mask=masks.Causal())
    batched = normal_arrays((B, T, 3), (B, T, 4), (B, T, 2))
    return TransformedCall(call, tuple(batched), tuple(normal_arrays((3, 5), (4, 5), (5,))))


def cached(kind: Any, implementation: str | None) -> TransformedCall:
    def call(q: Any, k: Any, v: Any, slopes: Any) -> Any:
        cache = kind.create(q.shape[0], 16, 2, 4, dtype=q.dtype)
        options: Any = {"mask": masks.Causal(), "score": scores.Alibi(slopes)}
        options["implementation"] = implementation
        first, cache = jattn.cached_attention(q, k, v, cache, **options)
        last, _ = jattn.cached_attention(q[:, :1], k[:, :1], v[:, :1], cache, **options)
        return jnp.concatenate([first, last], axis=1)

    return TransformedCall(call, tuple(normal_arrays(*[(B, 4, 2, 4)] * 3)), (normal(2),))


def closures() -> TransformedCall:
    """Both functions close over traced arrays, NumPy's, and Python's numbers."""

    def call(x: Any, table: Any, gate: Any) -> Any:
        margin, steps = 1, np.arange(x.shape[1], dtype=np.int32)
        near = lambda q, kv: table[kv] <= table[q] + margin  # noqa: E731
        allowed = lambda b, h, q, kv: (jnp.asarray(steps)[kv] <= q) & near(q, kv)  # noqa: E731
        score = lambda s, b, h, q, kv: s * gate + table[kv]  # noqa: E731
        return jattn.attention(x, 2 * x, 3 * x, mask=allowed, score=score)

    return TransformedCall(call, (normal(2, 6, 2, 4),), (normal(6), normal()))


def module() -> TransformedCall:
    layer = nn.MultiHeadAttention(
        num_heads=2, in_features=8, mask=masks.Causal(), rngs=nnx.Rngs(0), param_dtype=jnp.float64
    )
    graph, state = nnx.split(layer)
    leaves, structure = jax.tree.flatten(state)

    call = lambda x, *leaves: nnx.merge(graph, jax.tree.unflatten(structure, leaves))(x)  # noqa: E731
    return TransformedCall(call, (normal(B, 5, 8),), tuple(leaves))


PROBLEMS: dict[str, Callable[[], TransformedCall]] = {
    **{
        f"{name}_{T}": functools.partial(attention, name, T)
        for name in (None, "native", "blockwise", "reference")
        for T in (6, 264)
    },
    "additive": functools.partial(additive, 5),
    "additive_tiles": functools.partial(additive, 140),
    **{
        f"{kind.__name__}_{name}": functools.partial(cached, kind, name)
        for kind in (DenseCache, RollingCache, PagedCache)
        for name in (None, "blockwise")
    },
    "module": module,
    "closures": closures,
}

assert_same = functools.partial(assert_trees_close, rtol=1e-11, atol=1e-11)

# Most are exhaustive; kernels in C++ are not exported.
OFTEN = {"reference_6": (), "blockwise_264": pytest.mark.slow}
EXPORTED = [
    pytest.param(x, marks=OFTEN.get(x, pytest.mark.exhaustive))
    for x in PROBLEMS
    if not x.startswith("native")
]


@pytest.mark.default_tiles
@pytest.mark.parametrize("name", EXPORTED)
def test_exported(name):
    """Exported for any batch size."""
    problem, (b,) = PROBLEMS[name](), jax.export.symbolic_shape("b")
    shapes = [(b, *x.shape[1:]) for x in problem.batched] + [x.shape for x in problem.shared]
    like = [jax.ShapeDtypeStruct(shape, problem.arrays[0].dtype) for shape in shapes]
    exported = jax.export.export(jax.jit(problem.both))(*like)
    assert_same(exported.call(*problem.arrays), jax.jit(problem.both)(*problem.arrays))


FOR_ANY_LENGTH: dict[str, Callable[..., Any]] = {
    "plain": jattn.attention,
    "causal": functools.partial(jattn.attention, mask=masks.Causal(), return_lse=True),
    "window": functools.partial(jattn.attention, mask=masks.Window(left=2, right=1)),
    "alibi": functools.partial(jattn.attention, score=scores.Alibi(jnp.array([0.1, 0.2]))),
    "functions": functools.partial(
        jattn.attention,
        mask=lambda b, h, i, j: (i - j) % 3 != 1,
        score=lambda s, b, h, i, j: jnp.tanh(s),
        implementation="reference",
    ),
    "dropout": functools.partial(jattn.attention, dropout_rate=0.3, dropout_key=jax.random.key(0)),
    "gradients": squared(functools.partial(jattn.attention, mask=masks.Causal())),
    "weights": lambda q, k, v: jattn.attention_weights(q, k, mask=masks.Causal()),
    "cache": lambda q, k, v: jattn.attention(
        q, DenseCache.of(k, v), mask=masks.Window(left=2, right=1)
    ),
}


def assert_exported(function: Callable[..., Any], axes: str) -> None:
    """A function exported for any of the sizes in `axes`, of b, t and s, is right at several."""
    symbols = dict(zip(axes.split(","), jax.export.symbolic_shape(axes), strict=True))

    def shapes(**sizes: Any) -> list[tuple[Any, ...]]:
        sizes = {"b": 2, "t": 4, "s": 5} | {x: n for x, n in sizes.items() if x in symbols}
        return [(sizes["b"], sizes[x], 2, 8) for x in "tss"]

    like = [jax.ShapeDtypeStruct(x, jnp.float32) for x in shapes(**symbols)]
    exported = jax.export.export(jax.jit(function))(*like)
    for b, t, s in ((1, 1, 3), (3, 70, 300)):
        arrays = normal_arrays(*shapes(b=b, t=t, s=s), dtype="float32")
        assert_trees_close(exported.call(*arrays), jax.jit(function)(*arrays), rtol=1e-4, atol=1e-4)


@pytest.mark.one_in(8)
@pytest.mark.parametrize("axes", ["t", "s", "b,t,s"])
@pytest.mark.parametrize("name", FOR_ANY_LENGTH)
def test_exported_for_any_length(name, axes):
    assert_exported(FOR_ANY_LENGTH[name], axes)


def test_exported_for_any_length_in_place_of_jax():
    options: Any = {"is_causal": True, "local_window_size": 2}
    with jattn.compat.installed():
        assert_exported(lambda *x: jax.nn.dot_product_attention(*x, **options), "b,t,s")
        assert jattn.compat.report()[0].implementation == "reference"


def test_what_needs_lengths_says_so():
    like = [jax.ShapeDtypeStruct((1, jax.export.symbolic_shape("t")[0], 2, 8), jnp.float32)] * 3
    for name in ("blockwise", "native", "tpu"):
        function = functools.partial(jattn.attention, implementation=name)
        with pytest.raises(NotImplementedError, match="T = t, S = t of an exported"):
            jax.export.export(jax.jit(function))(*like)
    for call in (jattn.statistics, functools.partial(jattn.top_weights, n=1)):
        with pytest.raises(NotImplementedError, match="write attention_weights"):
            jax.export.export(jax.jit(lambda q, k, call=call: call(q, k)))(*like[:2])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("implementation", ["blockwise", "reference"])
def test_functions_written_in_a_loop_over_traced_layers(implementation):
    def stack(x: Any, tables: Any) -> Any:
        for table in tables:
            score = scores.Score(lambda s, b, h, q, kv: s + table[kv])  # noqa: B023
            x = x + jattn.attention(x, x, x, score=score, implementation=implementation)
        return x

    def formula(x: Any, tables: Any) -> Any:
        for table in tables:
            logits = jnp.einsum("btnh,bsnh->bnts", x, x) / 2 + table[None, None, None, :]
            x = x + jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(logits, axis=-1), x)
        return x

    arrays = normal(2, 6, 2, 4), normal(3, 6)
    got, want = (jax.jit(TransformedCall(f, arrays).both)(*arrays) for f in (stack, formula))
    assert_same(got, want)


def test_a_backward_pass_after_64_bit_types_are_off_is_that_of_float64():
    """The kernel would read arrays of 32 bits as arrays of 64, past their ends."""
    q, k, v, d_out = normal_arrays(*[(2, 20, 2, 8)] * 4)
    for implementation in (None, "native", "blockwise", "reference"):
        attend = functools.partial(attention(implementation, 20).call, slopes=normal(2))
        _, pull = jax.vjp(attend, q, k, v)
        want = pull(d_out)
        _, pull = jax.vjp(attend, q, k, v)
        with jax.enable_x64(False):
            got = pull(d_out)
        assert_trees_close(got, want, rtol=0, atol=1e-14)


def test_float64_while_64_bit_types_are_off(standard_promotion):
    q, k, v = normal_arrays(*[(1, 6, 2, 8)] * 3)
    cache = DenseCache.create(1, 6, 2, 8, dtype=jnp.float64).append(k, v)
    calls: list[tuple[str, Any, tuple[Any, ...]]] = [
        ("query", jattn.attention, (q, k, v)),
        ("query", jattn.attention_weights, (q, k)),
        ("key", jattn.statistics, (q, k)),
        ("query", jattn.linear_attention, (q, k, v)),
        ("x", jattn.positions.rotary, (q, jnp.arange(6))),
    ]
    with jax.enable_x64(False):
        for name, function, arrays in [*calls, ("query", jattn.attention, (q, cache))]:
            with pytest.raises(TypeError, match=f"{name}: expected at most 32 bits .* got float64"):
                function(*arrays)
        for _, function, arrays in calls:  # NumPy arrays are converted, without a warning
            in_numpy: list[Any] = [np.asarray(x) for x in arrays]
            want = function(*map(jnp.asarray, in_numpy))
            assert_trees_close(function(*in_numpy), want, rtol=0, atol=0)
        query, *pair = (np.asarray(x) for x in (q, k, v))
        total: Any = lambda q, *pair: jattn.attention(q, *pair).sum()  # noqa: E731
        got = jax.grad(total)(jnp.asarray(query), *pair)
        np.testing.assert_array_equal(got, jax.grad(total)(*map(jnp.asarray, (query, *pair))))
