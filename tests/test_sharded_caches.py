"""Decoding with a cache sharded over rows and heads under `jit`, and over places by
`parallel.cached_attention`: results are those of one device, and no cache is gathered."""

import dataclasses
import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jattn
from jattn import masks, parallel, scores, tuning
from jattn.cache import DenseCache, PagedCache, RollingCache
from tests.conftest import assert_trees_close, expect, normal_arrays, quick_jit
from tests.devices import mesh_of, place
from tests.test_parallel import learned


B, N, K, H, V, S, PAGE = 4, 8, 4, 4, 3, 16, 4
PROMPT = np.array([[1, 1, 1, 1, 1], [0, 0, 0, 1, 1], [0, 1, 1, 1, 1], [0, 0, 0, 0, 0]], bool)

CACHES = {
    "dense": lambda **options: DenseCache.create(B, S, K, H, V, **options),
    "rolling": lambda: RollingCache.create(B, 6, K, H, V),
    "paged": lambda: PagedCache.create(B, S, K, H, V, page_size=PAGE),
    "dense int8": lambda: DenseCache.create(B, S, K, H, V, jnp.int8),
    "paged int8": lambda: PagedCache.create(B, S, K, H, V, jnp.int8, page_size=PAGE),
}


def cuts(kind: str) -> dict[str, P]:
    """The sharding of each array of a cache; the pages of a pool belong to all rows."""
    paged = "paged" in kind
    by_head = P(None, "model") if paged else P("data", "model")
    names = ("lengths", "overflowed", *(("table",) if paged else ()))
    return {"keys": by_head, "values": by_head} | {name: P("data") for name in names}


def tokens(T: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """float32 `query [B, T, N, H]`, `key [B, T, K, H]`, `value [B, T, K, V]`."""
    shapes = ((B, T, N, H), (B, T, K, H), (B, T, K, V))
    query, key, value = normal_arrays(*shapes, seed=T, dtype=jnp.float32)
    return 2 * query, key, value


RULES: dict[str, dict[str, Any]] = {
    "alibi": {"mask": masks.Causal(), "score": scores.Alibi(scores.alibi_slopes(N))},
    "function": {  # a causal mask that differs between rows and between heads
        "mask": masks.Predicate(lambda b, h, q, kv: (kv <= q) & ((kv + b + h) % 3 > 0)),
        "score": scores.SoftCap(3.0),
    },
}


def filled(kind: str, **options: Any) -> Any:
    """A cache with prompts of different lengths."""
    _, key, value = tokens(5)
    return CACHES[kind](**options).append(key, value, PROMPT)


def sizes_of(kinds: str, compiled: Any) -> list[int]:
    """The size of the result of each exchange of these kinds in a compiled program."""
    lines = re.findall(rf"= (.*?) (?:{kinds})(?:-start)?\(", compiled.as_text())
    shapes = re.findall(r"\w+\[([\d,]*)\]", "\n".join(lines))
    return [math.prod(map(int, filter(None, x.split(",")))) for x in shapes]


gathered = functools.partial(sizes_of, "all-gather|all-to-all|collective-permute")


def assert_sharded_alike(stored: Any, like: Any) -> None:
    for x, y in zip(jax.tree.leaves(stored), jax.tree.leaves(like), strict=True):
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim)


agree = functools.partial(assert_trees_close, rtol=2e-5, atol=2e-6)


def by_rows_and_heads(kind: str, T: int, decode: Any) -> tuple[Any, Any, Any, list[int]]:
    """Runs `decode(cache, q, k, v)` with operands sharded over rows and heads, as on one device.

    Returns the compiled program's text, its results, the cache, and the sizes of what it gathers.
    """
    mesh, cache = mesh_of(data=2, model=4), filled(kind)
    want = quick_jit(decode)(cache, *tokens(T))
    fields = {
        name: jax.tree.map(lambda x, cut=cut: place(mesh, x, cut), getattr(cache, name))
        for name, cut in cuts(kind).items()
    }
    sharded = dataclasses.replace(cache, **fields)
    new = [place(mesh, x, P("data", None, "model")) for x in tokens(T)]
    compiled = quick_jit(decode).lower(sharded, *new).compile()
    results = compiled(sharded, *new)
    agree(results, want)
    return compiled.as_text(), results, sharded, gathered(compiled)


@pytest.mark.one_in(8)
@pytest.mark.parametrize(
    ("kind", "T", "rule"),
    [
        ("dense", 1, "alibi"),
        ("dense", 4, "function"),
        ("rolling", 4, "alibi"),
        ("paged", 1, "function"),
        ("dense int8", 1, "function"),
        ("paged int8", 4, "alibi"),
    ],
)
def test_a_cache_cut_by_rows_and_heads_stays_cut(kind, T, rule):
    def decode(cache: Any, q: Any, k: Any, v: Any) -> Any:
        options: Any = {**RULES[rule], "return_lse": True}
        return jattn.cached_attention(q, k, v, cache, **options)

    text, (_, cache), sharded, sizes = by_rows_and_heads(kind, T, decode)
    # Each row may copy the page of the shared pool that it goes on writing to.
    assert max(sizes, default=0) <= (B * PAGE * H if "paged" in kind else 0)
    assert rule != "alibi" or "jattn_decode" in text
    assert_sharded_alike(cache.keys, sharded.keys)


@pytest.mark.one_in(2, slow=True)
@pytest.mark.parametrize("kind", ["rolling", "dense"])
def test_gradients_through_a_cache_stay_cut(kind):
    def gradients(cache: Any, *qkv: Any) -> Any:
        def loss(keys: Any, q: Any, k: Any, v: Any) -> Any:
            changed = dataclasses.replace(cache, keys=keys)
            return jnp.sum(jattn.cached_attention(q, k, v, changed, **RULES["alibi"])[0] ** 2)

        return jax.grad(loss, (0, 1, 2, 3))(cache.keys, *qkv)

    _, (d_keys, *_), sharded, sizes = by_rows_and_heads(kind, 4, gradients)
    assert sizes == []
    assert d_keys.sharding.is_equivalent_to(sharded.keys.sharding, 4)


PLACES: dict[str, dict[str, Any]] = {
    "positions": {**RULES["alibi"], "positions": np.array([9, 7, 8, 9])},
    "none": {},
    "causal": {"mask": masks.Causal(), "score": scores.Score(learned, np.arange(N, dtype="f"))},
    "window": {"mask": masks.Causal() & masks.Window(left=3)},
    "alibi": RULES["alibi"],
    "arrays": {
        "mask": masks.Causal() & masks.Padding(np.arange(S) % 5 > 0),
        "score": scores.Bias(np.random.default_rng(1).normal(size=(1, N, 1, S)).astype("f")),
    },
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("kind", "rule", "T"),
    [
        ("dense", "none", 1),
        ("dense", "causal", 4),
        ("dense", "window", 1),
        ("dense", "alibi", 4),
        ("dense", "arrays", 1),
        ("dense", "window", 9),
        ("dense int8", "causal", 4),
        ("dense", "positions", 4),
    ],
)
def test_a_cache_cut_by_places_stays_cut(kind, rule, T):
    """Rows hold 5, 2, 4 and 0 tokens, devices 4 slots: new tokens go to two devices."""
    position_options = {"positions": True} if rule == "positions" else {}
    mesh, cache = mesh_of(data=2, context=4), filled(kind, **position_options)
    by_place, rows = P("data", None, "context"), P("data")
    options: Any = {**PLACES[rule], "return_lse": True}

    def decode(cache: DenseCache, q: Any, k: Any, v: Any) -> Any:
        cut: Any = {"mesh": mesh, "axis_name": "context", "batch_axis": "data"}
        return parallel.cached_attention(q, k, v, cache, **options, **cut)

    want = quick_jit(lambda cache, q, k, v: jattn.cached_attention(q, k, v, cache, **options))
    along = P("data", "context") if position_options else None
    cuts = jax.tree.broadcast(DenseCache(by_place, by_place, rows, rows, along), cache)
    sharded = jax.tree.map(lambda x, cut: place(mesh, x, cut), cache, cuts)
    new = [place(mesh, x, rows) for x in tokens(T)]
    with tuning.using(decode_block=2):  # a device's slots are read in two blocks
        compiled = quick_jit(decode).lower(sharded, *new).compile()
    assert gathered(compiled) == []
    assert max(sizes_of("all-reduce", compiled)) <= B // 2 * T * N * V
    results = compiled(sharded, *new)
    agree(results, want(cache, *tokens(T)))
    assert_sharded_alike(results[1].keys, sharded.keys)


def test_a_cache_on_one_device_goes_to_a_mesh_whose_axes_are_part_of_types():
    """`jax.make_mesh` makes such a mesh by default."""
    mesh, cache = jax.make_mesh((2, 4), ("data", "context")), filled("dense")
    options: Any = {**PLACES["arrays"], "return_lse": True}
    cut: Any = {"mesh": mesh, "axis_name": "context", "batch_axis": "data"}
    decode = lambda q, k, v, cache: parallel.cached_attention(q, k, v, cache, **options, **cut)  # noqa: E731
    want = quick_jit(lambda q, k, v, cache: jattn.cached_attention(q, k, v, cache, **options))
    agree(quick_jit(decode)(*tokens(3), cache), want(*tokens(3), cache))


def test_parts_of_equal_greatest_scores_count_by_their_tokens():
    """At scores of 4e8 a log of a number of tokens is lost in lse, and the mean must not be."""
    mesh, cache = mesh_of(context=8), DenseCache.create(1, S, 1, 4, 1)
    big, value = jnp.full((1, 11, 1, 4), 1e4), jnp.arange(11.0).reshape(1, 11, 1, 1)
    options: Any = {"mesh": mesh, "axis_name": "context", "scale": 1.0}
    out, _ = parallel.cached_attention(big, big, value, cache, **options)
    np.testing.assert_allclose(out, np.full((1, 11, 1, 1), 5.0), rtol=1e-6)


def test_what_is_not_cut_by_places_is_named():
    new, options = tokens(1), {"mesh": mesh_of(context=8), "axis_name": "context"}
    attend: Any = functools.partial(parallel.cached_attention, **options)
    for kind in ("rolling", "paged"):
        says = "Cache cannot be sharded along its tokens"
        expect(NotImplementedError, says, attend, *new, CACHES[kind]())
    total = lambda q: jnp.sum(attend(q, *new[1:], DenseCache.create(B, S, K, H, V))[0])  # noqa: E731
    expect(NotImplementedError, "no derivatives; use parallel.attention", jax.grad(total), new[0])
    twelve = DenseCache.create(B, 12, K, H, V)
    expect(ValueError, "a multiple of 8 slots | got S = 12", attend, *new, twelve)
