"""Sparse attention by content: choices of blocks, and attention through them, against loops."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jattn
from jattn import masks
from tests import oracle
from tests.arrays import assert_accurate
from tests.conftest import attention_arrays, out_and_gradients, quick_jit
from tests.devices import place


B, T, S, N, K, H, V = 2, 13, 11, 6, 3, 5, 4
G = N // K
SIZES = (B, T, S, N, K, H, V)


def choice(
    q: Any, k: Any, block: Any, count: int, causal: Any = False, **arrays: Any
) -> np.ndarray:
    """The layout `[B, N, T/block, S/block]`; `arrays` are `valid` and `positions`."""
    q, k, (q_block, kv_block) = np.float64(q), np.float64(k), block
    (rows, queries, heads, _), (_, keys, kv_heads, _) = q.shape, k.shape
    valid = arrays.get("valid", np.ones((rows, keys), bool))
    positions = np.broadcast_to(arrays.get("positions", np.arange(queries)), (rows, queries))
    n, m = math.ceil(queries / q_block), math.ceil(keys / kv_block)
    layout = np.zeros((rows, heads, n, m), bool)
    for b, h, i in np.ndindex(rows, heads, n):
        members = slice(i * q_block, (i + 1) * q_block)
        own_blocks = {int(p) // kv_block for p in positions[b, members]}
        row = q[b, members, h][0] if causal else q[b, members, h].mean(axis=0)
        rated = []
        for j in range(m):
            tokens = [s for s in range(keys) if s // kv_block == j and valid[b, s]]
            if tokens and not (causal and j >= min(own_blocks)):
                rated.append((float(row @ k[b, tokens, h // (heads // kv_heads)].mean(axis=0)), j))
        first_choices = [j for j in own_blocks if j < m] if causal else []
        best = [j for _, j in sorted(rated, reverse=True)]
        for j in first_choices + best[: max(0, count - len(first_choices))]:
            layout[b, h, i, j] = True
    return layout


@pytest.mark.one_in(3)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("count", "dtype"), [(1, "float64"), (3, "float32"), (99, "float64")])
@pytest.mark.parametrize("block", [(1, 3), (3, 3), (50, 4), (3, 50), (2, 2)])
def test_the_best_blocks_are_chosen(block, count, dtype, causal):
    """Grouped heads choose by their own keys."""
    for narrow in (dtype, "bfloat16") if block == (2, 2) else (dtype,):
        q, k, *_ = attention_arrays(SIZES, narrow)
        mask = jattn.chosen_blocks(q, k, block, count, causal=causal)
        assert mask.sizes == block
        np.testing.assert_array_equal(mask.layout, choice(q, k, block, count, causal))


def test_padding_is_neither_averaged_nor_chosen():
    q, k, *_ = attention_arrays(SIZES)
    valid = np.arange(S) < np.array([[4], [9]])
    poisoned = jnp.where(valid[..., None, None], k, jnp.nan)
    for causal in (False, True):
        want = choice(q, k, (1, 3), 2, causal, valid=valid)
        got = jattn.chosen_blocks(q, poisoned, (1, 3), 2, causal=causal, valid=valid)
        np.testing.assert_array_equal(got.layout, want)
    assert not jattn.chosen_blocks(q, k, 3, 2, valid=np.zeros((B, S), bool)).layout.any()


@pytest.mark.parametrize("positions", [np.array([7, 8, 10]), np.array([[2, 3, 4], [8, 9, 10]])])
def test_decoding_chooses_as_whole_sequences_do(positions):
    q, k, *_ = attention_arrays((B, 3, S, N, K, H, V))
    for block in ((1, 2), (2, 4)):
        choose = functools.partial(jattn.chosen_blocks, block=block, count=2, causal=True)
        got = quick_jit(choose)(q, k, q_positions=jnp.asarray(positions, jnp.int8))
        np.testing.assert_array_equal(got.layout, choice(q, k, block, 2, True, positions=positions))
    far = [quick_jit(choose)(q, k, q_positions=jnp.asarray(positions + x)) for x in (32, 2**32)]
    np.testing.assert_array_equal(far[1].layout, far[0].layout)


def test_batch_axes():
    q, k, *_ = attention_arrays(SIZES)
    choose = functools.partial(jattn.chosen_blocks, block=(1, 3), count=2, causal=True)
    want = choose(q, k).layout
    np.testing.assert_array_equal(choose(q[0], k[0]).layout, want[0])
    np.testing.assert_array_equal(choose(q[None], k[None]).layout, want[None])
    np.testing.assert_array_equal(jax.vmap(choose)(q, k).layout, want)
    by_row = np.arange(T) + np.array([[2], [0]])
    got = choose(q[None], k[None], q_positions=by_row[None]).layout
    np.testing.assert_array_equal(got[0], choice(q, k, (1, 3), 2, True, positions=by_row))


@pytest.mark.parametrize(("queries", "keys"), [(0, S), (T, 0), (0, 0)])
def test_no_queries_and_no_keys(queries, keys):
    q, k, v, _ = attention_arrays((B, queries, keys, N, K, H, V))
    for causal in (False, True):
        out = jattn.attention(q, k, v, mask=jattn.chosen_blocks(q, k, (2, 3), 2, causal=causal))
        assert out.shape == (B, queries, N, V) and not out.any()


def problem(q: Any, k: Any, v: Any, layout: np.ndarray, block: tuple[int, int]) -> Any:
    def allowed(pair: oracle.At) -> bool:
        chosen = layout[pair.b, pair.h, pair.i // block[0], pair.j // block[1]]
        return bool(chosen) and pair.j <= pair.i

    return oracle.OracleProblem(np.asarray(q), np.asarray(k), np.asarray(v), allowed=allowed)


@pytest.mark.one_in(9)
@pytest.mark.parametrize("implementation", [None, "blockwise", "reference"])
@pytest.mark.parametrize(("block", "count"), [((1, 3), 2), ((4, 4), 1), ((2, 3), 99)])
def test_gradients_flow_through_the_chosen_blocks_only(block, count, implementation):
    q, k, v, d_out = attention_arrays(SIZES)

    def attend(q: Any, k: Any, v: Any) -> Any:
        mask = masks.Causal() & jattn.chosen_blocks(q, k, block, count, causal=True)
        return jattn.attention(q, k, v, mask=mask, implementation=implementation)

    truth = problem(q, k, v, layout=choice(q, k, block, count, True), block=block)
    want = oracle.attend(truth).out
    remembered = jax.checkpoint(attend)
    out, *got = quick_jit(lambda *x: out_and_gradients(remembered, x[:3], x[3]))(q, k, v, d_out)
    assert oracle.error(out, want) < 1e-14
    slopes = oracle.gradients(truth, np.asarray(d_out), np.zeros((B, N, T)))
    assert_accurate(got, [slopes.q, slopes.k, slopes.v], 1e-13)
    _, tangent = quick_jit(lambda q, t: jax.jvp(lambda q: attend(q, k, v), (q,), (t,)))(q, q)
    np.testing.assert_allclose((tangent * d_out).sum(), (slopes.q * np.asarray(q)).sum())


# --- NSA ----------------------------------------------------------------------------------------


def branches(q: Any, k: Any, v: Any, block: Any, count: int, window: int) -> list[Any]:
    """The compressed attention of NSA, that to chosen blocks, and that in a window."""
    q_block, size = block
    q, k, v = map(np.asarray, (q, k, v))
    starts = range(0, S - size + 1, size)
    short_k, short_v = (
        np.stack([x[:, j : j + size].mean(axis=1) for j in starts], 1) for x in (k, v)
    )
    ends = np.arange(len(starts)) * size + size - 1
    causal = lambda pair: pair.kv <= pair.q  # noqa: E731
    near = lambda pair: pair.i - window < pair.j <= pair.i  # noqa: E731
    compressed = oracle.OracleProblem(q, short_k, short_v, allowed=causal, kv_positions=ends)
    weights = oracle.attend(compressed).weights
    layout = np.zeros((B, N, math.ceil(T / q_block), math.ceil(S / size)), bool)
    for b, h, i in np.ndindex(*layout.shape[:3]):
        group = range(h // G * G, h // G * G + G)
        first, last = i * q_block, min((i + 1) * q_block, T) - 1
        own_blocks = set(range(first // size, last // size + 1))
        rated = {j: float(weights[b, group, first, j].sum()) for j in range(len(ends))}
        rated[S // size] = 0.0  # the last block is partial
        rated |= {0: math.inf, min(own_blocks) - 1: math.inf}
        own_blocks &= set(range(layout.shape[3]))
        best = [j for j in rated if 0 <= j < min(layout.shape[3], first // size)]
        best.sort(key=lambda j: -rated[j])
        for j in [*own_blocks, *best[: max(0, count - len(own_blocks))]]:
            layout[b, h, i, j] = True
    chosen = problem(q, k, v, layout=layout, block=block)
    return [compressed, chosen, oracle.OracleProblem(q, k, v, allowed=near)]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("block", "count", "window"), [((1, 2), 4, 3), ((3, 3), 3, 1), ((1, 1), 2, 3)]
)
def test_native_sparse_attention(block, count, window):
    q, k, v, d_out = attention_arrays(SIZES)
    gates = jnp.asarray(np.random.default_rng(3).uniform(size=(B, T, N, 3)))
    options: Any = {"block": block, "count": count, "window": window}
    attend = functools.partial(jattn.native_sparse_attention, **options)
    truth = branches(q, k, v, block, count, window)
    results = [oracle.attend(x).out for x in truth]
    shares = np.moveaxis(np.asarray(gates)[..., None], -2, 0)
    want = sum(share * out for share, out in zip(shares, results, strict=True))
    out, *got = quick_jit(lambda *x: out_and_gradients(attend, x[:4], x[4]))(q, k, v, gates, d_out)
    assert oracle.error(out, want) < 1e-14
    slopes = [
        oracle.gradients(x, np.asarray(d_out) * share, np.zeros((B, N, T)))
        for x, share in zip(truth, shares, strict=True)
    ]
    size = block[1]
    for name in "kv":  # the gradient of a mean is the same for all of its tokens
        of_tokens = np.repeat(getattr(slopes[0], name), size, axis=1) / size
        rest = [(0, 0), (0, S - of_tokens.shape[1]), (0, 0), (0, 0)]
        slopes[0] = slopes[0]._replace(**{name: np.pad(of_tokens, rest)})
    for name, x in zip("qkv", got, strict=False):
        assert oracle.error(x, sum(getattr(slope, name) for slope in slopes)) < 1e-13
    d_gates = np.stack([(np.asarray(d_out) * x).sum(-1) for x in results], -1)
    assert oracle.error(got[3], d_gates) < 1e-13


@pytest.mark.slow
def test_native_sparse_attention_with_learned_compression():
    q, k, v, _ = attention_arrays(SIZES)
    gates = jnp.zeros((B, T, N, 3)).at[..., 0].set(1)
    _, key, value, _ = attention_arrays((B, T, S // 2, N, K, H, V), seed=5)
    attend = functools.partial(jattn.native_sparse_attention, block=2, count=3, window=2)
    ends = jnp.arange(S // 2) * 2 + 1
    want = jattn.attention(q, key, value, mask=masks.Causal(), kv_positions=ends)
    got = quick_jit(attend)(q, k, v, gates, compressed=(key, value))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-14)
    assert not got[:, 0].any()  # no block is complete yet
    narrow = jax.eval_shape(attend, *(x.astype(jnp.bfloat16)[0] for x in (q, k, v, gates)))
    assert (narrow.dtype, narrow.shape) == (jnp.bfloat16, (T, N, V))


def test_errors_name_what_was_expected(unchecked):
    q, k, v, _ = attention_arrays(SIZES)
    choice: Any = functools.partial(jattn.chosen_blocks, q)
    for changes, kind, message in (
        ({"key": jnp.ones((B, S, 4, H))}, ValueError, r"key: expected .* with .* got \[2, 11, 4"),
        ({"key": k.astype("f")}, TypeError, "key: .* the query's dtype float64, got float32"),
        ({"block": (2, 0)}, ValueError, "block must be an integer >= 1 or a pair"),
        ({"count": 0}, ValueError, "count: expected count >= 1, got 0"),
        ({"valid": np.ones((B, T), bool)}, ValueError, r"valid: .* = \[2, 11\], got \[2, 13\]"),
        (
            {"q_positions": np.arange(S), "causal": True},
            *(ValueError, r"q_positions: expected \[T\] or .* = \[2, 13\], got"),
        ),
        ({"q_positions": np.arange(T)}, ValueError, "q_positions: expected None without causal="),
        (
            {"q_positions": np.arange(T) + 2**31, "causal": True},
            *(ValueError, "q_positions: expected positions that fit int32, got 2147483660"),
        ),
    ):
        with pytest.raises(kind, match=message):
            choice(**{"key": k, "block": 2, "count": 2} | changes)
    sparse: Any = functools.partial(jattn.native_sparse_attention, block=2, count=2, window=2)
    gates, halves = jnp.ones((B, T, N, 3)), (k[:, :5].astype(jnp.float16), v[:, :5])
    for changes, kind, message in (
        ({"gates": gates[..., :2]}, ValueError, r"gates: .*\[\*B, T, N, 3\] = \[2, 13, 6, 3\]"),
        ({"compressed": (k,)}, TypeError, "compressed: expected a pair of keys and values, got"),
        ({"compressed": (k, v)}, ValueError, r"compressed\[0\]: .*\[\*B, C, K, H\] = \[2, 5,"),
        ({"compressed": halves}, TypeError, r"compressed\[0\]: .* the query's dtype float64"),
        ({"mask": masks.Causal()}, TypeError, "mask"),
    ):
        with pytest.raises(kind, match=message):
            sparse(q, k, v, **{"gates": gates} | changes)


@pytest.mark.one_in(2, slow=True)
@pytest.mark.parametrize("causal", [False, True])
def test_meshes_with_explicit_axes(causal):
    q, k, v, _ = attention_arrays((2, 8, 8, 4, 2, H, V))
    gates = jnp.linspace(0.1, 0.9, 2 * 8 * 4 * 3).reshape(2, 8, 4, 3)
    mesh = jax.make_mesh((2, 2), ("rows", "heads"), axis_types=(AxisType.Explicit,) * 2)
    cut = [place(mesh, x, P("rows", None, "heads")) for x in (q, k, v, gates)]
    choose = functools.partial(jattn.chosen_blocks, block=2, count=2, causal=causal)
    layout = choose(*cut[:2]).layout
    assert jax.typeof(layout).sharding.spec == P("rows", "heads", None, None)
    np.testing.assert_array_equal(layout, choose(q, k).layout)
    nsa = functools.partial(jattn.native_sparse_attention, block=2, count=2, window=2)
    out = quick_jit(nsa)(*cut)
    assert jax.typeof(out).sharding.spec == P("rows", None, "heads", None)
    np.testing.assert_allclose(out, quick_jit(nsa)(q, k, v, gates), rtol=1e-12, atol=1e-13)
