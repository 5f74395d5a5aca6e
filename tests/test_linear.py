"""Linear attention against float64 loops over pairs, with all gradients, and its running state."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import jattn
from jattn.kernels.cpu import library
from tests.arrays import assert_accurate, assert_equal, temporaries
from tests.conftest import ON_CPU, expect, normal_arrays, quick_jit
from tests.devices import collectives, is_placed, mesh_of, placed
from tests.test_errors import array
from tests.test_mechanisms import assert_values_and_gradients, on_device


B, S, N, K, H, V = 2, 7, 4, 2, 3, 5
CHUNK = 4
IDS = np.array([[7, 7, 2, 5, 2, 9, 7], [1, 1, 1, 1, 1, 3, 8]])  # of padding too
VALID = np.array([[0, 1, 1, 0, 1, 1, 1], [1, 1, 0, 1, 1, 1, 0]], bool)
DECAYS = ("none", "head", "token", "feature")
linear = quick_jit(
    jattn.linear_attention,
    static_argnames=("feature_map", "causal", "normalize", "return_state", "chunk"),
)


elu_plus_one: Any = lambda x: np.where(x.real > 0, x + 1, np.exp(x))  # noqa: E731
identity: Any = lambda x: x  # noqa: E731


def decay_shape(decay: str, T: int = S, F: int = H) -> tuple[int, ...]:
    return {"none": (), "head": (K,), "token": (B, T, K), "feature": (B, T, K, F)}[decay]


def by_feature(log_decay: Any, key: Any) -> Any:
    """Log decays of any kind in the shape of the keys, `[B, S, K, F]`."""
    logs = np.asarray(0.0 if log_decay is None else log_decay)
    return np.broadcast_to(logs[..., None] if logs.ndim in (1, 3) else logs, key.shape)


def documents(ids: Any, valid: Any) -> np.ndarray:
    """Numbers the documents of each row; a document begins where the id of a valid token differs
    from that of the valid token before it."""
    numbers = np.zeros(valid.shape, int)
    for b, row in enumerate(valid):
        document, latest = 0, None
        for i in np.flatnonzero(row):
            document += latest is not None and ids[b, i] != latest
            latest, numbers[b, i] = ids[b, i], document
    return numbers


def loops(
    query, key, value, log_decay=None, *, phi=elu_plus_one, causal=True, normalize=True,
    ids=None, valid=None, by_token=True,
):  # fmt: skip
    """[B, T, N, V], pair by pair."""
    rows, T, heads, _ = query.shape
    keys, group = key.shape[1], heads // key.shape[2]
    logs = by_feature(log_decay, key)
    valid = np.ones((rows, keys), bool) if valid is None else valid
    document = documents(np.zeros_like(valid) if ids is None else ids, valid)
    out = np.zeros((rows, T, heads, value.shape[-1]), np.result_type(query, key, value, logs))
    for b, i, n in np.ndindex(rows, T, heads):
        total = 0
        if by_token and not valid[b, i]:
            continue
        for j in np.flatnonzero(valid[b]):
            if (causal and j > i) or (ids is not None and document[b, i] != document[b, j]):
                continue
            between = [
                logs[b, x, n // group] for x in range(j + 1, i + 1) if valid[b, x] and causal
            ]
            decay = np.exp(np.sum(between, axis=0))
            weight = np.sum(phi(query[b, i, n]) * phi(key[b, j, n // group]) * decay)
            out[b, i, n] += weight * value[b, j, n // group]
            total += weight
        if normalize and total != 0:
            out[b, i, n] /= total
    return out


def numbers(decay: str = "none", T: int = S) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    shapes = {"query": (B, T, N, H), "key": (B, S, K, H), "value": (B, S, K, V)}
    inputs = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    if decay != "none":
        inputs["log_decay"] = -rng.exponential(size=decay_shape(decay))
    return inputs


@pytest.mark.one_in(8)
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("decay", DECAYS)
def test_values_and_gradients(decay, normalize):
    phi, feature_map = (elu_plus_one, None) if normalize else (identity, identity)
    rules: Any = {"feature_map": feature_map, "normalize": normalize, "chunk": CHUNK}
    call = functools.partial(jattn.linear_attention, **rules)
    oracle = functools.partial(loops, phi=phi, normalize=normalize)
    assert_values_and_gradients(call, oracle, numbers(decay))


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("decay", "causal"), [("none", True), ("none", False), ("head", True), ("feature", True)]
)
def test_documents_and_padding(decay, causal):
    rules: dict[str, Any] = {"valid": VALID, "causal": causal}
    call = functools.partial(jattn.linear_attention, segments=IDS, chunk=CHUNK, **rules)
    assert_values_and_gradients(call, functools.partial(loops, ids=IDS, **rules), numbers(decay))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("segments", [None, IDS])
@pytest.mark.parametrize("decay", ["none", "feature"])
def test_padding_has_no_influence(decay, segments):
    inputs = on_device(numbers(decay))
    poisoned = {name: x.at[~VALID].set(jnp.nan) for name, x in inputs.items()}

    @quick_jit
    def results(inputs: Any) -> Any:
        def total(inputs: Any) -> Any:
            out, state = jattn.linear_attention(
                **inputs, segments=segments, valid=VALID, return_state=True, chunk=CHUNK
            )
            return jnp.sum(jnp.sin(out)) + jnp.sum(state.values), (out, state)

        return jax.value_and_grad(total, has_aux=True)(inputs)

    (_, clean), gradients = results(inputs)
    (_, got), poisoned_gradients = results(poisoned)
    assert_equal((got, poisoned_gradients), (clean, gradients))
    assert not np.any(got[0][~VALID])
    for gradient in gradients.values():
        assert not np.any(gradient[~VALID])
        assert np.all(np.isfinite(gradient))


@pytest.mark.one_in(2, slow=True)
@pytest.mark.parametrize("valid", [None, VALID])
def test_other_queries_than_keys(valid):
    call = functools.partial(jattn.linear_attention, causal=False, valid=valid)
    oracle = functools.partial(loops, causal=False, valid=valid, by_token=False)
    assert_values_and_gradients(call, oracle, numbers(T=6))


@pytest.mark.parametrize("causal", [True, False])
def test_no_tokens(causal):
    query, key, value = normal_arrays((B, 0 if causal else 3, N, H), (B, 0, K, H), (B, 0, K, V))
    attend = functools.partial(jattn.linear_attention, causal=causal)
    assert attend(query[:, :0], key, value, segments=np.zeros((B, 0), int)).shape == (B, 0, N, V)
    (out, state), pull = jax.vjp(functools.partial(attend, return_state=True), query, key, value)
    assert_equal(out, np.zeros((*query.shape[:-1], V)))
    assert_equal(state, jattn.LinearState.create(K, H, V, batch=(B,), dtype=jnp.float64))
    cotangent = lambda x: np.ones(x.shape, x.dtype if x.dtype.kind == "f" else jax.dtypes.float0)  # noqa: E731
    for gradient in pull((jnp.ones_like(out), jax.tree.map(cotangent, state))):
        assert not np.any(gradient)


def test_no_weight_has_no_gradient():
    """Also none of the state before the first token, whose sums are 0."""
    inputs = on_device(numbers())
    state = jattn.LinearState.create(K, H, V, batch=(B,), dtype=jnp.float64)

    def total(values: Any, inputs: Any) -> Any:
        earlier = jattn.LinearState(values, state.keys, state.segment)
        valid = np.zeros((B, S), bool)
        return jnp.sum(jattn.linear_attention(**inputs, state=earlier, valid=valid, causal=False))

    value, gradients = jax.value_and_grad(total, argnums=(0, 1))(state.values, inputs)
    assert value == 0
    for gradient in jax.tree.leaves(gradients):
        assert not np.any(gradient)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("decay", DECAYS[::-1])
def test_parts_in_order_equal_the_whole(decay):
    rng = np.random.default_rng(len(decay))
    inputs = on_device(numbers(decay))
    whole, last = linear(**inputs, segments=IDS, valid=VALID, return_state=True, chunk=CHUNK)
    for _ in range(3):
        cuts = np.sort(rng.choice(S + 1, 3))  # parts may be empty
        state, outs = None, []
        for start, end in zip([0, *cuts], [*cuts, S], strict=True):
            part = {name: x if x.ndim == 1 else x[:, start:end] for name, x in inputs.items()}
            rules = {"segments": IDS[:, start:end], "valid": VALID[:, start:end]}
            out, state = linear(**part, **rules, state=state, return_state=True, chunk=CHUNK)
            outs.append(out)
        assert_accurate((jnp.concatenate(outs, 1), state), (whole, last), 1e-13)


def recurrence(query: Any, key: Any, value: Any, logs: Any, state: Any) -> Any:
    """Outputs and sums by one step for each token, in float64; `logs` are those of `by_feature`."""
    values, keys = (np.asarray(x, "float64") for x in (state.values, state.keys))
    rows, T, heads, _ = query.shape
    grouped = query.reshape(rows, T, keys.shape[1], -1, query.shape[-1])
    outs = []
    for i in range(T):
        decay = np.exp(logs[:, i])
        values = values * decay[..., None] + key[:, i, :, :, None] * value[:, i, :, None]
        keys = keys * decay + key[:, i]
        numerator = np.einsum("bkgf,bkfv->bkgv", grouped[:, i], values)
        outs.append(numerator / np.einsum("bkgf,bkf->bkg", grouped[:, i], keys)[..., None])
    return np.stack(outs, 1).reshape(rows, T, heads, -1), values, keys


def many_tokens(decay: str, T: int = 70, F: int = 20) -> dict[str, Any]:
    """Tokens of several chunks, and sizes that are no whole vectors, with logs of all sizes. A sum
    over a chunk with logs of −5,000 has no digits left for a log of −0.1."""
    rng = np.random.default_rng(T)
    shapes = {"query": (B, T, N, F), "key": (B, T, K, F), "value": (B, T, K, V)}
    inputs = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    if sizes := decay_shape(decay, T, F):
        chances = [0.02, 0.02, 0.06, 0.3, 0.3, 0.3]
        inputs["log_decay"] = rng.choice([-np.inf, -5e3, -3.0, -0.1, -1e-4, 0.0], sizes, p=chances)
    return {name: np.float64(np.float32(x)) for name, x in inputs.items()}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("decay", DECAYS)
def test_many_chunks(decay, dtype):
    inputs = many_tokens(decay)
    rng = np.random.default_rng(1)
    empty = jattn.LinearState.create(K, 20, V, batch=(B,), dtype=dtype)
    state: Any = jax.tree.map(
        lambda x: x if x.ndim == 1 else jnp.asarray(rng.uniform(0.5, 2, x.shape), dtype), empty
    )
    arrays = {**on_device(inputs, dtype), "state": state}
    logs = by_feature(inputs.get("log_decay"), inputs["key"])
    features = elu_plus_one(inputs["query"]), elu_plus_one(inputs["key"])
    want = recurrence(*features, inputs["value"], logs, state)
    lowered = quick_jit(functools.partial(jattn.linear_attention, return_state=True)).lower
    has_kernel = ON_CPU and library.unavailable("linear", dtype, wait=True) is None
    assert ("jattn_linear" in lowered(**arrays).as_text()) == has_kernel
    out, after = linear(**arrays, return_state=True)
    limit = 2e-6 if dtype == "float32" else 1e-13
    assert_accurate((out, after.values, after.keys), want, limit)
    chunked, _ = linear(**arrays, return_state=True, chunk=16)
    assert_accurate(chunked, want[0], limit)
    total = lambda x: jnp.sum(jnp.sin(jattn.linear_attention(**x, state=state, chunk=16)))  # noqa: E731
    gradients = quick_jit(jax.grad(total))(on_device(inputs, dtype))
    assert all(np.all(np.isfinite(x)) for x in gradients.values())


def test_denominators_and_features_at_the_ends_of_float32():
    key = np.zeros((1, 20, 1, 1), np.float32)
    ones = np.ones_like(key)
    key[:, 0] = 1e38
    assert_equal(linear(ones, key, ones, feature_map=identity), ones)
    key[:] = -87.2  # e^x is a normal number
    assert_accurate(linear(ones, key, ones), ones, 1e-6)


@pytest.mark.parametrize("chunk", [None, 16])
def test_gradients_of_small_denominators(chunk):
    """Only the first of 64 keys has a feature above 0; its weights decay to 4e-28."""

    def gradients(dtype: Any) -> Any:
        query = jnp.ones((1, 64, 1, 1), dtype)
        operands = (
            query,
            query.at[:, 1:].set(-1),
            jnp.arange(1, 65, dtype=dtype)[None, :, None, None],
        )

        def total(operands: Any, log_decay: Any) -> Any:
            options: Any = {"feature_map": jax.nn.relu, "log_decay": log_decay, "chunk": chunk}
            return jnp.sum(jattn.linear_attention(*operands, **options))

        return jax.grad(total, (0, 1))(operands, jnp.full((1,), -1, dtype))

    assert_accurate(gradients(jnp.float32), gradients(jnp.float64), 1e-6)


def test_any_number_of_tokens_is_exported():
    attend = lambda x: jattn.linear_attention(x, x, x)  # noqa: E731
    (tokens,) = export.symbolic_shape("tokens")
    call = export.export(jax.jit(attend))(jax.ShapeDtypeStruct((1, tokens, K, H), jnp.float32)).call
    for T in (1, 70):
        (x,) = normal_arrays((1, T, K, H), dtype="float32")
        assert_accurate(call(x), attend(x), 1e-6)


@pytest.mark.parametrize("normalize", [True, False])
def test_many_chunks_of_documents_in_both_directions(normalize):
    inputs = on_device(many_tokens("none"))
    ids = np.random.default_rng(2).choice([1, 2, 3], (B, 70), p=[0.9, 0.05, 0.05])
    rules = {"segments": ids, "causal": False, "normalize": normalize}
    assert_accurate(linear(**inputs, **rules), linear(**inputs, **rules, chunk=4), 1e-13)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("heads", ["heads", None])  # None: one key head, of all query heads
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_devices_share_rows_and_heads(kind, heads):
    mesh = jax.make_mesh((2, 2), ("rows", "heads"), axis_types=(kind,) * 2)
    inputs = on_device(many_tokens("token"))
    inputs |= {name: x[:, :, :1] for name, x in inputs.items() if name != "query" and not heads}
    want = linear(**inputs, return_state=True)
    specs = dict.fromkeys(inputs, P("rows", None, heads)) | {"query": P("rows", None, "heads")}
    sharded = placed(mesh, inputs, specs)
    with jax.set_mesh(mesh):
        attend = functools.partial(jattn.linear_attention, return_state=True)
        compiled = quick_jit(attend).lower(**sharded).compile()
        got = compiled(**sharded)
    assert not collectives(compiled)
    assert is_placed(got[0], mesh, P("rows", None, "heads"))
    assert is_placed(got[1].values, mesh, P("rows", heads))
    assert_accurate(got, want, 1e-13)


def test_a_state_of_keys_for_all_queries():
    query, key, value = on_device(numbers()).values()
    attend = functools.partial(jattn.linear_attention, query, causal=False)
    _, state = attend(key[:, :4], value[:, :4], return_state=True)
    got = attend(key[:, 4:], value[:, 4:], state=state)
    assert_accurate(got, loops(**numbers(), causal=False), 1e-13)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("decay", DECAYS)
def test_sums_of_narrow_numbers_are_wide(decay, dtype):
    arrays = on_device(numbers(decay), dtype)
    inputs: Any = {name: np.asarray(x, "float64") for name, x in arrays.items()}
    out, state = linear(**arrays, return_state=True)
    assert out.dtype == dtype
    assert state.values.dtype == state.keys.dtype == jnp.float32
    assert_accurate(out, loops(**inputs), {"bfloat16": 4e-3, "float16": 5e-4}.get(dtype, 1e-6))


@pytest.mark.parametrize(
    ("batch", "causal"), [((), True), ((2, 3), True), ((0,), True), ((0,), False)]
)
def test_any_batch(batch, causal):
    key, value = normal_arrays((*batch, S, K, H), (*batch, S, K, V))
    ids = np.broadcast_to(IDS[0], (*batch, S))
    attend = functools.partial(jattn.linear_attention, causal=causal)
    out, state = attend(key, key, value, segments=ids, return_state=True)
    assert (out.shape, state.values.shape) == (value.shape, (*batch, K, H, V))
    for place in np.ndindex(batch):
        row = (x[place][None] for x in (key, key, value))
        assert_accurate(out[place], attend(*row, segments=IDS[:1])[0], 1e-14)


@pytest.mark.one_in(8, slow=True)
@pytest.mark.parametrize("decay", DECAYS)
def test_transformations(decay):
    inputs = on_device(numbers(decay))
    shared = {name: x for name, x in inputs.items() if x.ndim == 1}
    rows = {name: x[:, None] for name, x in inputs.items() if x.ndim > 1}
    attend = functools.partial(jattn.linear_attention, chunk=CHUNK)
    want = loops(**numbers(decay))
    by_row = quick_jit(jax.vmap(lambda rows: attend(**rows, **shared)))(rows)
    assert_accurate(by_row[:, 0], want, 1e-13)
    assert_accurate(jax.checkpoint(lambda x: attend(**x))(inputs), want, 1e-13)
    total = quick_jit(lambda x: jnp.sum(jnp.sin(attend(**x))))
    check_grads(total, (inputs,), order=2, modes=("fwd", "rev"), atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_memory_of_gradients_is_linear():
    loss = lambda q, k, v, g: jnp.sum(jattn.linear_attention(q, k, v, log_decay=g) ** 2)  # noqa: E731
    gradient = jax.grad(loss, argnums=(0, 1, 2, 3))
    few, many = (temporaries(gradient, *[(1, T, 2, 16)] * 4) for T in (1024, 4096))
    assert many < 4.5 * few
    assert many < 30 * 4096 * 2 * 16 * 4  # a few arrays of the inputs' size, not T states


def test_the_feature_map_is_what_it_is_now():
    inputs, factor = on_device(numbers()), [1.0]

    @jax.custom_vjp
    def tripled(x: Any) -> Any:
        return x**2 * factor[0] + 1

    tripled.defvjp(lambda x: (tripled(x), x), lambda x, ct: (3 * ct * x,))
    phi = lambda x: x**2 * factor[0] + 1  # noqa: E731
    for factor[0] in (1.0, 3.0):
        got = jattn.linear_attention(**inputs, feature_map=tripled)
        assert_accurate(got, loops(**numbers(), phi=phi), 1e-13)
    factor[0] = 1.0

    def gradient(feature_map: Any) -> Any:
        attend = functools.partial(jattn.linear_attention, feature_map=feature_map)
        total = lambda query: jnp.sum(jnp.sin(attend(**{**inputs, "query": query})))  # noqa: E731
        return jax.grad(total)(inputs["query"])

    assert_accurate(gradient(tripled), 1.5 * gradient(phi), 1e-13)


def test_parameters_of_a_feature_map_have_gradients():
    inputs, (weight,) = on_device(numbers()), normal_arrays((7, H))

    def total(weight: Any) -> Any:
        features = lambda x: jnp.exp(jnp.einsum("...h,fh->...f", x, weight))  # noqa: E731
        return jnp.sum(jnp.sin(jattn.linear_attention(**inputs, feature_map=features)))

    check_grads(total, (weight,), order=1, modes=("rev",), atol=1e-6, rtol=1e-6)


def test_random_features_are_unbiased_and_orthogonal():
    q, k = normal_arrays((H,), (H,), seed=3)
    keys = jax.random.split(jax.random.key(0), 4000)

    def estimate(key: Any) -> Any:
        features = jattn.RandomFeatures.create(key, 5, H, dtype=jnp.float64)
        return jnp.sum(features(q) * features(k))

    estimates = np.asarray(quick_jit(jax.vmap(estimate))(keys))
    error = estimates.mean() - np.exp(np.sum(np.asarray(q * k)) / np.sqrt(H))
    assert abs(error) < 4 * estimates.std() / np.sqrt(len(keys))
    rows = jattn.RandomFeatures.create(keys[0], 2 * H, H, dtype=jnp.float64).projection
    products = np.asarray(rows[:H] @ rows[:H].T)
    assert_accurate(products, np.diag(np.diag(products)), 1e-13)
    assert np.ptp(np.diag(products)) > 0.1  # the lengths are random


def state_of(*batch: int, F: int = H, dtype: Any = jnp.float32) -> jattn.LinearState:
    return jattn.LinearState.create(K, F, V, batch=batch, dtype=dtype)


WRONG_VALUES: dict[str, dict[str, Any]] = {
    "query | [*B, T, N, H] | [4, 3]": {"query": array(N, H)},
    "key | H = 3 | [2, 7, 2, 4]": {"key": array(B, S, K, 4)},
    "value | S = 7 | [2, 9, 2, 5]": {"value": array(B, 9, K, V)},
    "feature_map | as many features of queries as of keys | 4 and 2": {
        "feature_map": lambda x: x[..., :1].repeat(x.shape[-2], axis=-1)
    },
    "key | *B = [2] | [3, 7, 2, 3]": {"key": array(3, S, K, H)},
    "query | H >= 1 | 0": {"query": array(B, S, N, 0), "key": array(B, S, K, 0)},
    "key | N = 4 | K = 3": {"key": array(B, S, 3, H), "value": array(B, S, 3, V)},
    "key | S = T = 6 | causal | S = 7": {"query": array(B, 6, N, H)},
    "key | S = T = 6 | segments": {"query": array(B, 6, N, H), "causal": False, "segments": IDS},
    "segments | [*B, S] = [2, 7] | [7]": {"segments": IDS[0]},
    "log_decay | [*B, S, K, F] | [2, 7]": {"log_decay": -array(B, S)},
    "log_decay | at most 0 | 1.0": {"log_decay": array(K)},
    "log_decay | causal=False": {"log_decay": -array(K), "causal": False},
    "state.values | [2, 2, 3, 5] | [2, 2, 7, 5]": {"state": state_of(B, F=7)},
    "chunk | power of two | 12": {"chunk": 12},
    "feature_map | [2, 7, 4, 'F'] | [2, 7, 4]": {"feature_map": lambda x: x.sum(-1)[:, :, :]},
}
WRONG_TYPES: dict[str, dict[str, Any]] = {
    "key | int32": {"key": array(B, S, K, H, dtype=jnp.int32)},
    "value | float32 | bfloat16": {"value": array(B, S, K, V, dtype=jnp.bfloat16)},
    "segments | integer | float32": {"segments": array(B, S)},
    "valid | boolean | int": {"valid": IDS},
    "state | LinearState | tuple": {"state": ()},
    "state.values | float32 | float64": {"state": state_of(B, dtype=jnp.float64)},
    "chunk | integer": {"chunk": 2.0},
    "causal | True or False": {"causal": 1},
    "feature_map | function": {"feature_map": "elu"},
    "feature_map(query) | floating-point | int32": {"feature_map": lambda x: x.astype(jnp.int32)},
    "no argument 'mask'": {"mask": None},
}


@pytest.mark.slow
@pytest.mark.parametrize("segments", [[], [IDS]])
def test_within_shard_map(segments):
    operands = [*on_device(numbers()).values(), *map(jnp.asarray, segments)]
    tokens, mesh = P("rows", None, "heads"), mesh_of(rows=2, heads=2)

    def attend(q: Any, k: Any, v: Any, segments: Any = None) -> Any:
        return jattn.linear_attention(q, k, v, segments=segments, return_state=True)

    in_specs = (*[tokens] * 3, P("rows"))[: len(operands)]
    state: Any = jattn.LinearState(P("rows", "heads"), P("rows", "heads"), P("rows"))  # pyright: ignore
    sharded = jax.shard_map(attend, mesh=mesh, in_specs=in_specs, out_specs=(tokens, state))
    assert_accurate(quick_jit(sharded)(*operands), attend(*operands), 1e-13)


@pytest.mark.parametrize("says", WRONG_VALUES | WRONG_TYPES)
def test_mistakes(says, unchecked):
    right = {"query": array(B, S, N, H), "key": array(B, S, K, H), "value": array(B, S, K, V)}
    kind = TypeError if says in WRONG_TYPES else ValueError
    wrong = (WRONG_VALUES | WRONG_TYPES)[says]
    expect(kind, says, jattn.linear_attention, **right | wrong)


def test_mistakes_about_random_features(unchecked):
    create, key = jattn.RandomFeatures.create, jax.random.key(0)
    expect(TypeError, "key: expected a JAX random key", create, jnp.float32(0), 4, H)
    expect(ValueError, "num_features: expected num_features >= 1, got 0", create, key, 0, H)
    expect(ValueError, "x: expected [..., H = 3], got [2, 4]", create(key, 4, H), jnp.ones((2, 4)))
