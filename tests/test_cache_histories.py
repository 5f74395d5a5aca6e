"""Random histories of caches against lists of tokens, and attention in float64."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jattn
from jattn import masks, nn, scores
from jattn.cache import Cache, DenseCache, LatentCache, PagedCache, RollingCache
from tests.conftest import expect, quick_jit
from tests.devices import place


B, T, N, K, H, V = 4, 5, 4, 2, 3, 2
S, W, PAGE = 15, 4, 3
SLOPES = scores.alibi_slopes(N)


def latent(batch: int, length: int, _: int, head_size: int, value_size: int, **options: Any):
    """A cache of one head whose values are the first numbers of its keys."""
    return LatentCache.create(batch, length, value_size, head_size - value_size, **options)


CACHES: dict[str, Any] = {
    "dense": DenseCache.create,
    "rolling": functools.partial(RollingCache.create, chunk=T),
    "paged": functools.partial(PagedCache.create, page_size=PAGE),
    "dense with positions": functools.partial(DenseCache.create, positions=True),
    "latent": latent,
    "latent rolling": functools.partial(latent, kind=RollingCache, chunk=T),
    "latent paged with positions": functools.partial(
        latent, kind=PagedCache, page_size=PAGE, positions=True
    ),
    "paged with positions": functools.partial(PagedCache.create, page_size=PAGE, positions=True),
}
every_cache = pytest.mark.parametrize("kind", CACHES)


@dataclasses.dataclass
class Row:
    """Tokens: a key `[K, H]`, a value `[K, V]`, a position; those of a rolling cache by slot."""

    tokens: list[Any] = dataclasses.field(default_factory=list)
    lost: bool = False
    slots: dict[int, Any] = dataclasses.field(default_factory=dict)

    def copy(self) -> "Row":
        return Row([*self.tokens], self.lost, dict(self.slots))

    def append(self, tokens: list[Any], rolling: bool) -> None:
        for token in tokens:
            if len(self.tokens) == S and not rolling:
                self.lost = True
            else:
                self.slots[len(self.tokens) % (W + T)] = token
                self.tokens.append(token)

    def truncate(self, length: int, rolling: bool) -> None:
        clamped = min(max(length, 0), len(self.tokens))
        self.tokens = self.tokens[:clamped]
        needed = range(max(clamped - W, 0), clamped)
        was_overwritten = any(self.slots[p % (W + T)] is not self.tokens[p] for p in needed)
        self.lost = self.lost or clamped != length or (rolling and was_overwritten)

    def attention(self, query: Any, position: int, rolling: bool) -> np.ndarray:
        """The output of a query `[N, H]` at this position, `[N, V]`."""
        if self.lost:
            return np.full((N, V), np.nan)
        past = W if rolling else position
        seen = [token for token in self.tokens if 0 <= position - token[2] <= past]
        out = np.zeros((N, V))
        if seen:
            keys, values, positions = (np.stack(x) for x in zip(*seen, strict=True))
            for h in range(N):
                bias = float(SLOPES[h]) * (positions - position)
                k = h * keys.shape[1] // N
                score = keys[:, k] @ query[h] / np.sqrt(H) + bias
                weights = np.exp(score - score.max())
                out[h] = weights @ values[:, k] / weights.sum()
        return out


@quick_jit
def attend(cache: Cache, query: Any, positions: Any) -> Any:
    options: Any = {"mask": masks.Causal(), "score": scores.Alibi(SLOPES)}
    return jattn.attention(query, cache, q_positions=positions[:, None], **options)


def compiled(name: str) -> Any:
    sizes = (B,) if name == "fork" else ()
    return quick_jit(lambda cache, *operands: getattr(cache, name)(*operands, *sizes))


RUN = {x: compiled(x) for x in "append truncate reset reorder fork keep admit".split()}


def create(kind: str, batch: int = B) -> Any:
    return CACHES[kind](batch, W if "rolling" in kind else S, K, H, V)


def ragged(rng: Any, batch: int) -> np.ndarray:
    """Random `valid` `[batch, T]`: each row has no token, one, some or all, on either side."""
    valid = np.arange(T) < rng.choice([0, 1, T, rng.integers(T + 1)], batch)[:, None]
    return np.where(rng.random((batch, 1)) < 0.5, valid, valid[:, ::-1])


def apply_randomly(rng: Any, cache: Any, rows: list[Row], name: str, kind: str) -> Any:
    rolling = "rolling" in kind
    match name:
        case "append":
            arguments = new_tokens(rng, rows, kind)
        case "truncate":
            lengths = np.array([len(row.tokens) for row in rows])
            back = np.where(rng.random(B) < 0.8, rng.integers(0, 4, B), rng.integers(-1, S, B))
            wanted = (lengths - back).astype(rng.choice(["int32", "int64"]))
            for row, length in zip(rows, wanted, strict=True):
                row.truncate(int(length), rolling)
            arguments = (wanted,)
        case "keep":
            arguments = kept_paths(rng, rows, kind)
        case "reset":
            is_chosen = rng.random(B) < 0.4
            rows[:] = [Row() if x else row for x, row in zip(is_chosen, rows, strict=True)]
            indices = np.where(is_chosen, np.arange(B), B).astype(np.uint8)  # B is no row
            arguments = (is_chosen if rng.random() < 0.5 else indices,)
        case "reorder":
            indices = rng.integers(0, B, B)
            rows[:] = [rows[i].copy() for i in indices]
            arguments = (indices,)
        case "admit":
            other, other_rows = create(kind, 2), [Row(), Row()]
            for _ in range(2):
                other = apply_randomly(rng, other, other_rows, "append", kind)
            indices = rng.choice(B + 2, 2, replace=False)
            for index, row in zip(indices, other_rows, strict=True):
                if index < B:
                    rows[index] = row
            arguments = indices, other
        case _:
            index = rng.integers(B)
            rows[:] = [rows[index].copy() for _ in range(B)]
            arguments = (index,)
    return RUN[name](cache, *arguments)


def new_tokens(rng: Any, rows: list[Row], kind: str) -> tuple[Any, ...]:
    """Random tokens as arguments of `append`, appended to the lists."""
    valid = ragged(rng, len(rows))
    is_latent = "latent" in kind
    shape = (len(rows), T, 1 if is_latent else K)
    key, value = (3 * rng.normal(size=(*shape, n)).astype("f") for n in (H, V))
    value = key[..., :V] if is_latent else value
    positions = rng.integers(0, 2 * S, (len(rows), T))
    for b, row in enumerate(rows):
        if "positions" not in kind:
            positions[b, valid[b]] = len(row.tokens) + np.arange(valid[b].sum())
        token = (x[b, valid[b]].astype(float) for x in (key, value, positions))
        row.append([*zip(*token, strict=True)], "rolling" in kind)
    key[~valid] = value[~valid] = np.nan
    return key, None if is_latent else value, valid, positions if "positions" in kind else None


def kept_paths(rng: Any, rows: list[Row], kind: str) -> tuple[Any, ...]:
    """Random paths among the last tokens as arguments of `keep`, applied to the lists."""
    lengths = np.array([len(row.tokens) for row in rows])
    start = np.maximum(lengths - rng.integers(0, T + 1, B), 0)
    counts = np.minimum(rng.integers(0, 4, B), lengths - start)
    places = rng.integers(0, np.maximum(lengths - start, 1), (3, B)).T.copy()
    outside = (rng.random(B) < 0.1) & (counts > 0)
    for b, row in enumerate(rows):
        path = [row.tokens[start[b] + i] for i in places[b, : counts[b]]]
        if "positions" not in kind:
            path = [(k, v, start[b] + i) for i, (k, v, _) in enumerate(path)]
        row.tokens[start[b] :] = path
        row.lost = row.lost or bool(outside[b])
    places[outside, 0] = (lengths - start)[outside]
    return start, places, counts


def check_history(kind: str, seed: int, placed: Any = lambda cache: cache) -> None:
    rng, rolling = np.random.default_rng([seed, *kind.encode()]), "rolling" in kind
    cache, rows = placed(create(kind)), [Row() for _ in range(B)]
    operations = [name for name in RUN if not (rolling and name == "keep")]
    names, types = ["append"], jax.tree.map(jax.typeof, cache)
    for _ in range(12):
        names.append(str(rng.choice(["append"] * 5 + ["truncate"] + operations)))
        cache = apply_randomly(rng, cache, rows, names[-1], kind)
        assert jax.tree.map(jax.typeof, cache) == types, names
        np.testing.assert_array_equal(cache.lengths, [len(row.tokens) for row in rows])
        np.testing.assert_array_equal(cache.overflowed, [row.lost for row in rows])
        query = 2 * rng.normal(size=(B, 1, N, H)).astype("f")
        positions = np.array([len(row.tokens) for row in rows])
        if "positions" in kind:
            positions = rng.integers(0, 2 * S, B)
        got = np.asarray(attend(cache, query, positions))[:, 0]
        queries = zip(rows, query[:, 0], positions, strict=True)
        want = [row.attention(x, int(position), rolling) for row, x, position in queries]
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-5, err_msg=f"{seed}: {names}")


@pytest.mark.one_in(7, slow=True)
@every_cache
@pytest.mark.parametrize("axes", [("rows", "heads"), ("rows",), (None, "heads")])
def test_rows_are_lists_of_tokens_on_a_mesh_whose_axes_are_part_of_types(kind, axes):
    mesh = jax.make_mesh((2, 2), ("rows", "heads"), axis_types=(AxisType.Explicit,) * 2)
    by_head: Any = P(None, *axes[1:]) if "paged" in kind else P(*axes)
    cut: dict[str, P] = {"keys": by_head, "values": by_head}
    if "paged" in kind:
        cut["positions"] = P()

    def placed(cache: Any) -> Any:
        fields = {x.name: getattr(cache, x.name) for x in dataclasses.fields(cache)}
        arrays = {name: x for name, x in fields.items() if isinstance(x, jax.Array)}
        on_mesh = {name: place(mesh, x, cut.get(name, P(*axes[:1]))) for name, x in arrays.items()}
        return dataclasses.replace(cache, **on_mesh)

    for seed in range(2):
        check_history(kind, seed, placed)


@every_cache
@pytest.mark.parametrize(
    "seeds", [range(4), pytest.param(range(100, 300), marks=pytest.mark.exhaustive)]
)
def test_rows_are_lists_of_tokens_after_any_history(kind, seeds):
    for seed in seeds:
        check_history(kind, seed)


def ones(kind: str, batch: int) -> list[Any]:
    heads, sizes = (1, (H,)) if "latent" in kind else (K, (H, V))
    return [*(np.ones((batch, T, heads, n), np.float32) for n in sizes), None][:2]


def filled(kind: str, *counts: int) -> Any:
    cache = create(kind, len(counts))
    for first in range(0, max(counts), T):
        valid = first + np.arange(T) < np.array(counts)[:, None]
        cache = RUN["append"](cache, *ones(kind, len(counts)), valid)
    return cache


KEEP = "(%s|keep: .* got a RollingCache; for drafts in sequence use truncate)"
WRONG: dict[str, tuple[Any, str]] = {
    "longer": (lambda c: c.truncate(np.array([9, 6])), r"lengths: .* 5 in batch row 1, got 6"),
    "negative": (lambda c: c.truncate(-1), "lengths: expected lengths >= 0, got -1"),
    "shape": (lambda c: c.truncate(np.array([1])), r"lengths: expected \[B\] = \[2\], got \[1\]"),
    "floats": (lambda c: c.truncate(np.ones(2)), r"lengths: expected an integer array \[B\]"),
    "row": (lambda c: c.fork(2, 3), "row: expected 0 <= row < B = 2, got 2"),
    "rows of a fork": (lambda c: c.fork(np.arange(2), 3), r"row: expected \[\], got \[2\]"),
    "no rows": (lambda c: c.fork(0, 0), "n: expected n >= 1, got 0"),
    "reset": (lambda c: c.reset(np.array([-1, 0])), "rows: expected 0 <= rows < B = 2, got -1"),
    "booleans": (lambda c: c.reset(np.ones(3, bool)), r"rows: expected \[B\] = \[2\], got \[3\]"),
    "twice": (lambda c: c.admit(np.array([1, 1]), c), "rows: expected different rows"),
    "too few": (lambda c: c.admit(1, c), "rows: expected one for each of .* 2 batch rows, got 1"),
    "start": (lambda c: c.keep(np.array([10, 0]), np.zeros((2, 1), int)), KEEP % "start: .* 10"),
    "path": (
        lambda c: c.keep(np.array([7, 3]), np.array([[0, 1], [0, 2]])),
        KEEP % r"places: .* the 2 tokens from start on in batch row 1, got \[0, 2\]",
    ),
    "counts": (
        lambda c: c.keep(np.array([7, 3]), np.zeros((2, 1), int), np.array([0, 2])),
        KEEP % "counts: expected 0 <= counts <= A = 1, got 2",
    ),
    "places": (lambda c: c.keep(0, np.zeros((1, 2), int)), KEEP % r"places: expected \[B, A\]"),
    "no cache": (lambda c: c.admit(1, c.lengths), "other: expected a cache of jattn.cache"),
    "positions": (
        lambda c: c.append(*(jnp.ones((2, 1, K, n)) for n in (H, V)), positions=np.arange(1)),
        r"positions: expected None, as this cache numbers .* positions=True keeps",
    ),
    "dtype": (
        lambda c: admit_other(c, dtype=jnp.bfloat16),
        "other: expected dtype float32 as in the cache, got bfloat16",
    ),
    "no positions": (
        lambda c: admit_other(c, positions=True),
        "(other: expected positions=False as in the cache|positions: expected False for a Roll)",
    ),
    "heads": (lambda c: admit_other(c, K + 1), "other: expected a cache of the same class, dtype"),
}


def admit_other(cache: Any, heads: int = K, **options: Any) -> None:
    cache.admit(0, type(cache).create(1, 4, heads, H, V, **options))


@pytest.mark.parametrize("kind", ["dense", "rolling", "paged"])
def test_wrong_rows_and_lengths_are_named(kind):
    cache = filled(kind, 9, 5)
    for run, message in WRONG.values():
        with pytest.raises((TypeError, ValueError, NotImplementedError), match=message):
            run(cache)


def test_what_was_overwritten_or_does_not_fit_is_named():
    cache = filled("rolling", 12, 3)  # 9 slots: of the first row the tokens 3 to 11 are left
    assert cache.truncate(np.array([7, 0])).lengths.tolist() == [7, 0]
    with pytest.raises(ValueError, match=r"lengths: expected at least 7 in batch row 0.* got 6"):
        cache.truncate(np.array([6, 3]))
    assert cache.truncate(0).oldest.tolist() == [0, 0]
    with pytest.raises(ValueError, match="other: expected chunk = 5 as in the cache, got 2"):
        cache.admit(0, RollingCache.create(1, W, K, H, V, chunk=2))
    with pytest.raises(ValueError, match="other: expected page_size = 3 as in the cache, got 2"):
        filled("paged", 1).admit(0, PagedCache.create(1, 4, K, H, V, page_size=2))
    with pytest.raises(ValueError, match=r"admit: expected at most capacity = 15 .* got 16"):
        filled("dense", 1).admit(0, DenseCache.of(*(jnp.ones((1, 16, K, n), "f") for n in (H, V))))


def test_pages_are_free_as_soon_as_no_row_covers_them():
    cache, new = PagedCache.create(3, S, K, H, V, page_size=PAGE, num_pages=6), ones("paged", 3)
    cache = RUN["append"](cache, *new, np.arange(T) < np.array([[5], [4], [0]]))
    for changed, free in (
        (cache, 2),
        (RUN["truncate"](cache, np.array([5, 3, 0])), 3),
        (RUN["reset"](cache, np.array([0])), 4),
        (RUN["fork"](cache, 1), 4),
        (RUN["truncate"](RUN["reorder"](cache, np.zeros(3, int)), np.array([3, 1, 0])), 5),
    ):
        assert int(changed.num_free_pages) == free
    full = RUN["append"](cache, *new, np.arange(T) < np.array([[0], [0], [T]]))
    two: Any = (*(x[:, :2] for x in new), np.array([[True] * 2, [False] * 2, [False] * 2]))
    expect(ValueError, "no free page for batch row 0, all num_pages = 6 are in", full.append, *two)
    assert RUN["append"](full, *two).overflowed.tolist() == [True, False, False]
    prompt = PagedCache.create(1, 7, K, H, V, page_size=PAGE)
    prompt = RUN["append"](prompt, *(x[:1] for x in new))
    admitted = RUN["admit"](cache, np.array([2]), prompt)
    assert admitted.lengths.tolist() == [5, 4, 5] and int(admitted.num_free_pages) == 0
    longer = RUN["append"](prompt, *(x[:1, :2] for x in new))
    expect(ValueError, "admit: no free page for batch row 2", cache.admit, 2, longer)
    assert RUN["admit"](cache, np.array([2]), longer).overflowed.tolist() == [False, False, True]
    assert RUN["admit"](cache, np.array([1]), longer).overflowed.tolist() == [False] * 3


@pytest.mark.parametrize("kind", ["dense", "rolling", "paged"])
def test_a_life_of_a_server_compiles_each_step_once(kind):
    """Rows begin and end while others go on: one has all of T tokens, others one or none."""
    traces: list[str] = []
    counted = lambda name, run: quick_jit(lambda *operands: traces.append(name) or run(*operands))  # noqa: E731
    serve = {name: counted(name, run) for name, run in RUN.items()}
    rng, cache, prompt = np.random.default_rng(0), create(kind), filled(kind, 3)
    for _ in range(9):
        cache = serve["append"](cache, *ones(kind, B), ragged(rng, B))
        cache = serve["reset"](cache, np.asarray(cache.lengths) > S - T)
        cache = serve["truncate"](cache, np.maximum(np.asarray(cache.lengths) - 1, 0))
        cache = serve["admit"](cache, rng.integers(B, size=1), prompt)
        cache = serve["reorder"](cache, rng.permutation(B))
    assert sorted(traces) == ["admit", "append", "reorder", "reset", "truncate"]
    assert not cache.overflowed.any()


def test_positions_that_are_wrong_are_named_or_seen():
    cache, new = create("dense with positions"), [jnp.ones((B, 2, K, n), "f") for n in (H, V)]
    for wrong, message in (
        (np.arange(3), r"positions: expected \[B, T\] = \[4, 2\] or \[T\], got \[3\]"),
        (np.ones((B, 2)), r"positions: expected an integer array \[B, T\] or \[T\], got float64"),
        (np.array([0, 2**31]), "positions: expected positions that fit int32, got 2147483648"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            cache.append(*new, positions=wrong)
    with pytest.raises(ValueError, match="positions: expected False for a RollingCache"):
        RollingCache.create(B, W, K, H, positions=True)
    append = quick_jit(lambda positions: cache.append(*new, positions=positions).overflowed)
    assert not append(np.array([0, 2**31 - 1])).any() and append(np.array([0, 2**31])).all()
    last = cache.append(*new, positions=np.array([7, 3])).last_positions(3)
    np.testing.assert_array_equal(last, [[-1, 7, 3]] * B)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", ["paged with positions", "dense with positions"])
def test_trees_of_drafts_decode_what_greedy_search_decodes(kind):
    """Rows accept different paths of different trees, with rotation and a learned bias by depth."""
    bias = jnp.asarray(np.random.default_rng(3).normal(size=(8, 2)), jnp.float32)
    attention: Any = functools.partial(
        nn.MultiHeadAttention, score=scores.RelativeBias(bias), mask=masks.Window(left=12)
    )
    sizes: Any = {"features": 16, "num_heads": 2, "feed_forward": 32, "num_layers": 1}
    sizes |= {"dropout_rate": 0.0, "tie_embeddings": False, "self_attention": attention}
    model = nn.DecoderOnly(17, rngs=nnx.Rngs(0), **sizes)
    rng = np.random.default_rng(5)
    prompt = jnp.asarray(rng.integers(0, 17, (2, T)))
    greedy = np.asarray(jattn.generate(model, prompt, max_tokens=16).tokens)
    options: Any = {"page_size": 4} if "paged" in kind else {}
    cache_class = PagedCache if "paged" in kind else DenseCache
    caches = model.start(2, 40, cache_class, positions=True, **options)

    @nnx.jit
    def verify(model: Any, drafts: Any, parents: Any, caches: Any) -> Any:
        tree = masks.Tree(parents, caches[0].lengths)
        rules = {"mask": tree, "positions": caches[0].lengths[:, None] + tree.depths}
        logits, caches = model.step(drafts, caches, **rules)
        return jnp.argmax(logits, axis=-1), caches

    keep = quick_jit(lambda caches, *path: [cache.keep(*path) for cache in caches])
    best, caches = verify(model, prompt, np.tile(np.arange(-1, T - 1), (2, 1)), caches)
    texts, accepted = [[int(x)] for x in best[:, -1]], []
    while min(map(len, texts)) < 12:
        parents = np.array([[-1, *(rng.integers(0, t) for t in range(1, T))] for _ in range(2)])
        drafts = rng.integers(0, 17, (2, T))
        for b, row in enumerate(texts):
            drafts[b, 0] = row[-1]
            depths = np.asarray(masks.Tree(parents[b]).depths)
            right = rng.random(T) < 0.8
            later = greedy[b][np.minimum(len(row) - 1 + depths, 15)]
            drafts[b, 1:] = np.where(right, later, drafts[b])[1:]
        start = caches[0].lengths
        best, caches = verify(model, drafts, parents, caches)
        places, counts = np.zeros((2, T), int), np.ones(2, int)
        for b, row in enumerate(texts):
            node = 0
            while node is not None:
                places[b, counts[b] - 1] = node
                row.append(int(best[b, node]))
                fits = (parents[b] == node) & (drafts[b] == row[-1])
                node = int(np.argmax(fits)) if fits.any() else None
                counts[b] += node is not None
        caches = keep(caches, start, places, counts)
        accepted.extend(counts)
    for b, row in enumerate(texts):
        np.testing.assert_array_equal(row[:12], greedy[b, :12])
    assert len(set(accepted)) > 2 and not caches[0].overflowed.any()
