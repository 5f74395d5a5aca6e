"""Attention under `shard_map`, of arrays that devices share or not, against a loop over them."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jattn
from jattn import masks, mechanisms, scores
from jattn.cache import DenseCache, PagedCache, RollingCache
from tests import test_transforms as transforms
from tests.conftest import assert_trees_close, quick_jit
from tests.devices import mesh_of


DEVICES = 8
MESHES = {"one_axis": {"x": 8}, "two_axes": {"x": 4, "y": 2}}
every_mesh = pytest.mark.parametrize("mesh", MESHES)


class ShardedProblem(NamedTuple):
    """A call, and its arrays `[8, ...]` by name, with an entry for each device."""

    call: Callable[..., Any]
    arrays: dict[str, np.ndarray]


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).standard_normal((DEVICES, *shape))


def attention(implementation: str | None, T: int = 6) -> ShardedProblem:
    """A mask and scores with arrays; the kernel in C++ has no table of relative biases."""

    def call(q: Any, k: Any, v: Any, slopes: Any, ids: Any, table: Any = None, **scale: Any) -> Any:
        score, mask = scores.Alibi(slopes), masks.Segments(ids) & masks.Causal()
        if table is not None:
            score >>= scores.RelativeBias(table, max_distance=7)
        options: Any = {"implementation": implementation, **scale}
        return jattn.attention(q, k, v, mask=mask, score=score, **options)

    ids = np.sort(np.random.default_rng(0).integers(0, 3, (DEVICES, T)))
    arrays = dict.fromkeys("qkv", normal(1, T, 2, 4))
    arrays |= {"slopes": normal(2), "ids": ids, "scale": 1 + normal() ** 2}
    if implementation in ("blockwise", "reference"):
        arrays["table"] = normal(8, 2)
    return ShardedProblem(call, arrays)


def additive(T: int) -> ShardedProblem:
    """Bahdanau's attention, whose weights devices usually share."""

    def call(q: Any, k: Any, v: Any, lengths: Any, **weights: Any) -> Any:
        return mechanisms.additive_attention(q, k, v, **weights, mask=masks.Lengths(kv=lengths))

    lengths = 1 + np.random.default_rng(0).integers(0, T, (DEVICES, 1))
    arrays = {"q": normal(1, T, 3), "k": normal(1, T, 4), "v": normal(1, T, 2), "lengths": lengths}
    weights = {"w_query": normal(3, 5), "w_key": normal(4, 5), "w_score": normal(5)}
    return ShardedProblem(call, arrays | weights)


def cached(kind: Any, implementation: str | None) -> ShardedProblem:
    call = transforms.cached(kind, implementation).call
    return ShardedProblem(call, dict.fromkeys("qkv", normal(1, 4, 2, 4)) | {"slopes": normal(2)})


def with_gradients(call: Any, floats: tuple[str, ...], arrays: Any, cotangent: Any) -> Any:
    rest = {n: x for n, x in arrays.items() if n not in floats}
    out, pull = jax.vjp(lambda x: call(**x, **rest), {n: arrays[n] for n in floats})
    return out, *pull(cotangent)


@functools.lru_cache(maxsize=1)
def on_one_device(call: Any, floats: tuple[str, ...]) -> Any:
    """The program of a single device, which does not depend on what devices share."""
    return quick_jit(functools.partial(with_gradients, call, floats))


def run_check(problem: ShardedProblem, mesh: str, shared: tuple[str, ...]) -> None:
    """Values and gradients, computed within `shard_map` and around it, are those of a loop."""
    arrays = {n: x[0] if n in shared else x for n, x in problem.arrays.items()}
    floats = tuple(n for n, x in arrays.items() if x.dtype == np.float64)
    devices, split = mesh_of(**MESHES[mesh]), P(tuple(MESHES[mesh]))
    specs = {n: P() if n in shared else split for n in arrays}

    def local(arrays: Any) -> Any:  # of one device: what is split has an axis of size 1
        local_arrays = {n: x if n in shared else x[0] for n, x in arrays.items()}
        return problem.call(**local_arrays)[None]

    each = [{n: x if n in shared else x[i] for n, x in arrays.items()} for i in range(DEVICES)]
    shape_of_one = jax.eval_shape(lambda local_arrays: problem.call(**local_arrays), each[0]).shape
    cotangent = np.random.default_rng(1).standard_normal((DEVICES, *shape_of_one))
    single = on_one_device(problem.call, floats)
    every = [single(local_arrays, d) for local_arrays, d in zip(each, cotangent, strict=True)]
    want = np.stack([out for out, _ in every])
    wanted = {
        n: sum(d[n] for _, d in every) if n in shared else np.stack([d[n] for _, d in every])
        for n in floats
    }
    names = {n: specs[n] for n in floats}
    run = functools.partial(with_gradients, lambda **x: local(x), floats)
    io: Any = {"in_specs": (specs, split), "out_specs": (split, names)}
    within = jax.shard_map(run, mesh=devices, **io)
    mapped = jax.shard_map(local, mesh=devices, in_specs=(specs,), out_specs=split)
    around = functools.partial(with_gradients, lambda **x: mapped(x), floats)
    for out, gradients in quick_jit(lambda *x: (within(*x), around(*x)))(arrays, cotangent):
        np.testing.assert_allclose(out, want, rtol=1e-12, atol=1e-13)
        assert_trees_close(gradients, wanted, rtol=1e-11, atol=1e-12)


SHARED = ["k v slopes table scale", "q ids", "k", "q k slopes table ids scale", "slopes", "scale"]


@pytest.mark.one_in(12)
@every_mesh
@pytest.mark.parametrize("implementation", [None, "native", "blockwise", "reference"])
@pytest.mark.parametrize("shared", [x.split() for x in SHARED], ids=SHARED)
def test_some_arrays_are_shared(shared, implementation, mesh):
    run_check(attention(implementation), mesh, tuple(shared))


@pytest.mark.one_in(2)
@pytest.mark.default_tiles
@pytest.mark.parametrize("implementation", [None, "blockwise"])
def test_with_several_tiles(implementation):
    run_check(attention(implementation, T=140), "two_axes", ("k", "slopes", "table"))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("shared", [("w_query", "w_key", "w_score", "k"), ("q", "v", "lengths")])
@pytest.mark.parametrize(("T", "mesh"), [(5, "one_axis"), (140, "two_axes")])
def test_additive_attention(T, mesh, shared):
    run_check(additive(T), mesh, shared)


@pytest.mark.one_in(9, slow=True)
@every_mesh
@pytest.mark.parametrize("implementation", [None, "blockwise", "reference"])
@pytest.mark.parametrize("kind", [DenseCache, RollingCache, PagedCache])
def test_caches(kind, implementation, mesh):
    problem = cached(kind, implementation)
    run_check(problem, mesh, ("k", "v", "slopes"))
    run_check(problem, mesh, ("q",))


def on_devices_eagerly(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return jax.shard_map(function, mesh=mesh_of(c=2), in_specs=P("c"), out_specs=P("c"))


def on_examples(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    alone = lambda x: jax.tree.map(lambda y: y[0], function(x[None]))  # noqa: E731
    return jax.vmap(alone, axis_name="c")


PLACES: dict[str, Callable[..., Any]] = {
    "on_devices": lambda function: jax.jit(on_devices_eagerly(function)),
    "on_devices_eagerly": on_devices_eagerly,
    "on_examples": on_examples,
}
X = jnp.asarray(np.random.default_rng(0).standard_normal((2, 8, 1, 4)), jnp.float32)


def index() -> Any:
    return lax.axis_index("c")


def rules_of(how: str) -> dict[str, Any]:
    if how == "given as operands":
        return {
            "mask": masks.Predicate(lambda b, h, i, j, c: j <= i + c, index()),
            "score": scores.Score(lambda s, b, h, i, j, c: s * (1 + c.astype(s.dtype)), index()),
        }
    c = index()
    ask, shifted = (lambda: c), (lambda i: i + c)
    if how == "asked in functions":
        ask, shifted = index, jax.jit(lambda i: i + index())
    return {
        "mask": lambda b, h, i, j: j <= shifted(i),
        "score": lambda s, b, h, i, j: jnp.where(i >= 0, s * (1.0 + ask().astype(s.dtype)), 0.0),
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
@pytest.mark.parametrize("how", ["asked in functions", "asked before", "given as operands"])
@pytest.mark.parametrize(
    ("implementation", "T"),
    [(None, 8), ("reference", 8), ("blockwise", 8), ("native", 8), (None, 600), ("native", 600)],
)
def test_what_is_asked_of_an_axis_is_right(implementation, T, how, place):
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, T, 1, 4)), jnp.float32)
    attention = lambda x: jattn.attention(x, x, x, implementation=implementation, **rules_of(how))  # noqa: E731
    result = PLACES[place](with_gradient(attention))(x)
    formulas = [with_gradient(functools.partial(formula, index=c)) for c in (0, 1)]
    want = quick_jit(lambda x: [formulas[c](x[c : c + 1]) for c in (0, 1)])(x)
    got = [[y[c : c + 1] for y in result] for c in (0, 1)]
    assert_trees_close(got, want, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("place", ["on_devices", "on_examples"])
def test_collectives_of_what_is_known_before_are_right(place):
    def attention(x: Any) -> Any:
        score = lambda s, b, h, i, j: s + lax.pmean(x.sum(), "c") * jnp.where(j > i, 1, 0)  # noqa: E731
        return jattn.attention(x, x, x, score=score)

    bias = jnp.where(np.arange(8) > np.arange(8)[:, None], X.sum() / 2, 0.0)
    want = jattn.attention(X, X, X, score=scores.Bias(bias[None, None]))
    np.testing.assert_allclose(PLACES[place](attention)(X), want, rtol=1e-4, atol=1e-4)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("place", PLACES)
def test_collectives_of_constants_are_right(place):
    """The kernel in C++ needs derivatives, which contain how the operand of a sum is sharded."""

    def total(x: Any, score: Any) -> Any:
        return jnp.sum(jattn.attention(x, x, x, score=score, implementation="native") ** 2)

    of_devices = lambda s, b, h, i, j: (s + lax.psum(1.0, "c")) * s  # noqa: E731
    want = jax.grad(lambda x: total(x, lambda s, b, h, i, j: (s + 2.0) * s))(X)
    d = PLACES[place](jax.grad(functools.partial(total, score=of_devices)))(X)
    np.testing.assert_allclose(d, want, rtol=1e-4, atol=1e-4)


CALLS: dict[str, Callable[..., Any]] = {
    "attention": jattn.attention,
    "reference": functools.partial(jattn.attention, implementation="reference"),
    "native": functools.partial(jattn.attention, implementation="native"),
    "weights": lambda q, k, v, **named: jattn.attention_weights(q, k, **named),
    "statistics": lambda q, k, v, **named: jattn.statistics(q, k, **named).entropy,
}


@pytest.mark.parametrize("place", ["on_devices", "on_examples"])
@pytest.mark.parametrize("call", CALLS)
def test_collectives_of_scores_and_indices_are_refused(call, place):
    def mean_of_devices(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s + lax.pmean(s, "c")

    def any_device(b: Any, h: Any, i: Any, j: Any) -> Any:
        return lax.psum(j - i, "c") > 0

    for kind, rule in (("score", mean_of_devices), ("mask", any_device)):
        attend = functools.partial(CALLS[call], **{kind: rule})
        message = f"{rule.__name__} calls psum.* over the axis 'c'"
        with pytest.raises(NotImplementedError, match=message):
            PLACES[place](lambda x, attend=attend: attend(x, x, x))(X)


def test_bounds_are_kept_beside_a_function_that_reads_an_axis():
    allowed = lambda b, h, i, j: j < index() * 0 + 8  # noqa: E731
    mask = masks.Predicate(allowed, bounds=lambda tile: (tile.columns.lo < 8, tile.columns.hi < 8))

    def passed(x: Any) -> Any:
        assert mask.traced().bounds_fn is not None
        return x

    on_devices_eagerly(passed)(jnp.zeros(2))
