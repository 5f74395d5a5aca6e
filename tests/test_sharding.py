"""Attention under `shard_map` with its default checks, of arrays that devices share or not.

The truth is a loop over the devices, without any mesh. The gradient of an array that all devices
share is the sum of their gradients.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jattn
from jattn import masks, mechanisms, scores
from jattn.cache import DenseCache, PagedCache, RollingCache
from tests.conftest import quick_jit
from tests.devices import mesh_of


DEVICES = 8
IMPLEMENTATIONS = (None, "native", "blockwise", "reference")
every_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
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
    arrays = {name: normal(1, T, 2, 4) for name in "qkv"}
    arrays |= {"slopes": normal(2), "ids": ids, "scale": 1 + normal() ** 2}
    if implementation in ("blockwise", "reference"):
        arrays["table"] = normal(8, 2)
    return ShardedProblem(call, arrays)


def additive(T: int) -> ShardedProblem:
    """Bahdanau's attention, whose weights devices usually share."""

    def call(q: Any, k: Any, v: Any, w_query: Any, w_key: Any, w_score: Any, lengths: Any) -> Any:
        mask = masks.Lengths(kv=lengths)
        return mechanisms.additive_attention(q, k, v, w_query, w_key, w_score, mask=mask)

    lengths = 1 + np.random.default_rng(0).integers(0, T, (DEVICES, 1))
    arrays = {"q": normal(1, T, 3), "k": normal(1, T, 4), "v": normal(1, T, 2)}
    weights = {"w_query": normal(3, 5), "w_key": normal(4, 5), "w_score": normal(5)}
    return ShardedProblem(call, arrays | weights | {"lengths": lengths})


def cached(kind: Any, implementation: str | None) -> ShardedProblem:
    """Two steps on a cache."""

    def call(q: Any, k: Any, v: Any, slopes: Any) -> Any:
        cache = kind.create(1, 12, 2, 4, dtype=q.dtype)
        options: Any = {"mask": masks.Causal(), "score": scores.Alibi(slopes)}
        options["implementation"] = implementation
        first, cache = jattn.cached_attention(q, k, v, cache, **options)
        last, _ = jattn.cached_attention(q[:, :1], k[:, :1], v[:, :1], cache, **options)
        return jnp.concatenate([first, last], axis=1)

    return ShardedProblem(
        call, {**{name: normal(1, 4, 2, 4) for name in "qkv"}, "slopes": normal(2)}
    )


ONE_HEAD = {
    "self_attention": ShardedProblem(
        lambda x, q, k, v: mechanisms.self_attention(x, q, k, v, mask=masks.Causal()),
        {"x": normal(1, 5, 3), **{name: normal(3, 3) for name in "qkv"}},
    ),
    "multiplicative": ShardedProblem(
        lambda q, k, v, w: mechanisms.multiplicative_attention(q, k, v, w),  # noqa: PLW0108
        {**{name: normal(1, 5, 3) for name in "qkv"}, "w": normal(3, 3)},
    ),
}


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
    both = quick_jit(lambda *x: (within(*x), around(*x)))(arrays, cotangent)
    for out, gradients in both:
        np.testing.assert_allclose(out, want, rtol=1e-12, atol=1e-13)
        for name, d in gradients.items():
            np.testing.assert_allclose(d, wanted[name], rtol=1e-11, atol=1e-12, err_msg=name)


@pytest.mark.one_in(4)
@every_mesh
@every_implementation
def test_keys_values_and_parameters_are_shared(implementation, mesh):
    problem = attention(implementation)
    run_check(problem, mesh, ("k", "v", "slopes", "table", "scale"))
    run_check(problem, mesh, ("q", "ids"))


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", ["q", "k", "v", "slopes", "ids", "scale"])
@pytest.mark.parametrize("implementation", ["native", "blockwise"])
def test_one_array_is_shared_or_all_others_are(implementation, name):
    problem = attention(implementation)
    run_check(problem, "one_axis", (name,))
    run_check(problem, "one_axis", tuple(x for x in problem.arrays if x != name))


@pytest.mark.one_in(2)
@pytest.mark.default_tiles
@pytest.mark.parametrize("implementation", [None, "blockwise"])
def test_with_several_tiles(implementation):
    run_check(attention(implementation, T=272), "two_axes", ("k", "slopes", "table"))


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("T", "mesh"), [(5, "one_axis"), (140, "two_axes")])
def test_additive_attention(T, mesh):
    problem = additive(T)
    run_check(problem, mesh, ("w_query", "w_key", "w_score"))
    run_check(problem, mesh, ("k", "v"))
    run_check(problem, mesh, ("q", "lengths"))


@pytest.mark.one_in(9, slow=True)
@every_mesh
@pytest.mark.parametrize("implementation", [None, "blockwise", "reference"])
@pytest.mark.parametrize("kind", [DenseCache, RollingCache, PagedCache])
def test_caches(kind, implementation, mesh):
    problem = cached(kind, implementation)
    run_check(problem, mesh, ("k", "v", "slopes"))
    run_check(problem, mesh, ("q",))


@pytest.mark.parametrize("name", ONE_HEAD)
def test_mechanisms(name):
    *_, last = ONE_HEAD[name].arrays
    run_check(ONE_HEAD[name], "two_axes", (last,))
