"""Under a mesh whose axes are part of types, as `jax.make_mesh` makes it by default, results have
the types that their operands give them, and numbers are those of one device."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jattn
from jattn import masks, scores, tuning
from jattn.cache import DenseCache, PagedCache, RollingCache
from tests.conftest import quick_jit
from tests.test_parallel import random


B, T, S, N, K, H = 4, 8, 16, 4, 2, 8
TOKENS = ("rows", "tokens", "heads")
SLOPES = np.array([0.5, 0.25, 0.125, 0.0625])


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return jax.make_mesh((2, 2, 2), TOKENS, axis_types=(AxisType.Explicit,) * 3)


def setting(mesh: Mesh, in_context: bool) -> Any:
    """The mesh is set, or only arrays have it."""
    return jax.set_mesh(mesh) if in_context else contextlib.nullcontext()


def place(mesh: Mesh, x: Any, *cut: Any) -> jax.Array:
    return jax.device_put(x, NamedSharding(mesh, P(*cut)))


def whole(x: jax.Array) -> jax.Array:
    """Of all tokens, none of them cut."""
    sharding = jax.typeof(x).sharding
    if sharding.mesh.empty:
        return x
    rows, _, *rest = sharding.spec
    return jax.sharding.reshard(x, NamedSharding(sharding.mesh, P(rows, None, *rest)))


def shown(x: Any) -> tuple[Any, ...]:
    """The axes by which an array is cut, by its type."""
    spec = jax.typeof(x).sharding.spec
    return tuple(y[0] if isinstance(y, tuple) and len(y) == 1 else y for y in spec)


OPTIONS: dict[str, Any] = {
    "mask": masks.Causal() & masks.Lengths(kv=np.array([3, 8, 5, 0])),
    "score": scores.Alibi(SLOPES),
}


def closed_over(q: Any, k: Any, v: Any, **options: Any) -> Any:
    """Functions that close over arrays, one of them traced."""
    slopes, gain = jnp.asarray(SLOPES), jnp.mean(q)
    return jattn.attention(
        q,
        k,
        v,
        mask=lambda b, h, i, j: (i + j + b) % 3 > 0,
        score=lambda s, b, h, i, j: s * slopes[h] + gain,
        **options,
    )


def cached(kind: Any, q: Any, k: Any, v: Any) -> Any:
    cache = kind.create(B, S, K, H, dtype=q.dtype)
    out, cache = jattn.cached_attention(q, k, v, cache)
    new_q, new_k, new_v = (whole(x)[:, :1] for x in (q, k, v))
    (last, lse), cache = jattn.cached_attention(new_q, new_k, new_v, cache, return_lse=True)
    picked = cache.reorder(jnp.array([1, 0, 2, 2]))
    again = jattn.attention(new_q, picked, implementation="blockwise")
    return out, last, lse, again


OUT, LSE, MATRIX = TOKENS, ("rows", "heads", "tokens"), ("rows", "heads", "tokens", None)
LAST = ("rows", None, "heads", None)
CALLS: dict[str, tuple[Callable[..., Any], Any]] = {
    "attention": (
        lambda q, k, v: jattn.attention(q, k, v, return_lse=True, **OPTIONS),
        [(*OUT, None), LSE],
    ),
    **{
        name: (
            functools.partial(
                lambda q, k, v, name: jattn.attention(q, k, v, implementation=name, **OPTIONS),
                name=name,
            ),
            [(*OUT, None)],
        )
        for name in ("native", "blockwise", "reference")
    },
    "dropout": (
        lambda q, k, v: jattn.attention(
            q, k, v, dropout_rate=0.3, dropout_key=jax.random.key(1), mask=masks.Causal()
        ),
        [(*OUT, None)],
    ),
    "functions": (closed_over, [(*OUT, None)]),
    "weights": (lambda q, k, v: jattn.attention_weights(q, k, **OPTIONS), [MATRIX]),
    "scores": (
        lambda q, k, v: jattn.attention_scores(q, k, score=scores.SoftCap(3.0)),
        [MATRIX],
    ),
    "statistics": (
        lambda q, k, v: jattn.statistics(q, k, keys=np.arange(T) < 2, threshold=0.1, **OPTIONS),
        [LSE] * 7,
    ),
    "top_weights": (lambda q, k, v: jattn.top_weights(q, k, 2, **OPTIONS), [MATRIX, MATRIX]),
    "merge": (
        lambda q, k, v: jattn.merge(
            *(
                jattn.attention(q, k, v, mask=mask, return_lse=True)
                for mask in (masks.Causal(), ~masks.Causal())
            )
        ),
        [(*OUT, None), LSE],
    ),
    "with_sink": (
        lambda q, k, v: jattn.with_sink(*jattn.attention(q, k, v, return_lse=True), jnp.ones(N)),
        [(*OUT, None), LSE],
    ),
    "added": (
        lambda q, k, v: jax.vmap(jnp.add)(q, jattn.attention(q, k, v)),
        [(*OUT, None)],
    ),
    "mapped": (
        jax.vmap(lambda q, k, v: jattn.attention(q, k, v, mask=masks.Causal())),
        [(*OUT, None)],
    ),
    "repeated": (
        lambda q, k, v: jax.lax.fori_loop(0, 2, lambda _, x: jattn.attention(x, k, v), q),
        [(*OUT, None)],
    ),
    **{
        kind.__name__: (
            functools.partial(cached, kind),
            [(*OUT, None), LAST, ("rows", "heads", None), LAST],
        )
        for kind in (DenseCache, RollingCache, PagedCache)
    },
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("jit", "in_context"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("name", CALLS)
def test_results_and_gradients_have_types(name, jit, in_context, mesh):
    function, types = CALLS[name]
    arrays = random(B, T, N, H), random(B, T, K, H), random(B, T, K, H)

    def squared(*qkv: Any) -> Any:
        found = [x for x in jax.tree.leaves(function(*qkv)) if x.dtype == np.float64]
        return sum(jnp.sum(jnp.where(jnp.isfinite(x), x, 0) ** 2) for x in found)

    compiled = quick_jit if jit else lambda function: function
    gradient = jax.grad(squared, (0, 1, 2))
    with tuning.using(generated_pairs=0):
        want, wanted = (quick_jit(f)(*map(jnp.asarray, arrays)) for f in (function, gradient))
        with setting(mesh, in_context):
            placed = [place(mesh, x, *TOKENS) for x in arrays]
            found, d = compiled(function)(*placed), compiled(gradient)(*placed)
    for x, y in zip(jax.tree.leaves((found, d)), jax.tree.leaves((want, wanted)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-11)
    leaves = jax.tree.leaves(found)
    assert [shown(x)[: len(t)] for x, t in zip(leaves, types, strict=True)] == types
    assert [jax.typeof(x) for x in d] == [jax.typeof(x) for x in placed]
