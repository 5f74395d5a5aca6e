"""Functions as users write them, compared with the plain formula: values and every gradient.
Queries and keys are multiples of 1/4, so that products are exact in float32 too."""

import contextlib
import functools
import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

import jattn
from jattn import masks, scores
from jattn.cache import RollingCache
from tests.conftest import normal_arrays, out_and_gradients, quick_jit, users_jit


pytestmark = [pytest.mark.default_tiles, pytest.mark.usefixtures("standard_promotion")]

B, N, H = 2, 2, 16
LARGE = 1024  # large enough that None selects the generated kernel
IMPLEMENTATIONS = (None, "blockwise", "native")

straight_through: Any = jax.custom_jvp(lambda x: jnp.round(x))  # noqa: PLW0108
straight_through.defjvp(lambda primals, tangents: (straight_through(*primals), tangents[0]))

clipped_gradient: Any = jax.custom_vjp(lambda x: x)
clipped_gradient.defvjp(
    lambda x: (x, x), lambda x, cotangent: (jnp.clip(cotangent, -0.01, 0.01) * (1 + x * x),)
)

scaled_gradients: Any = jax.custom_vjp(lambda x, y: x + y)
scaled_gradients.defvjp(
    lambda x, y: (x + y, (x, y)),
    lambda residuals, c: ((3 * c).astype(residuals[0].dtype), (5 * c).astype(residuals[1].dtype)),
)


rule_with_a_number: Any = jax.custom_jvp(
    lambda factor, x: jax.nn.relu(x) * factor, nondiff_argnums=(0,)
)
rule_with_a_number.defjvp(
    lambda factor, x, t: (rule_with_a_number(factor, *x), jax.nn.relu6(x[0]) * t[0])
)

two_results: Any = jax.custom_jvp(lambda x, y: (x * y, x + y))
two_results.defjvp(lambda x, t: (two_results(*x), (2 * t[0], 3 * t[1])))

own_look_up: Any = jax.custom_vjp(lambda x, table, place: x + table[place])
own_look_up.defvjp(
    lambda x, table, place: (x + table[place], (table, place)),
    lambda rest, c: (2 * c, jnp.zeros_like(rest[0]).at[rest[1]].add(5 * c), None),
)


BYTES = np.arange(1100) * 7 % 250
SETTINGS = types.SimpleNamespace(slope=0.25, steps=[3, 5], table=np.linspace(-1, 1, 300))


def table(size: int = 64) -> Any:
    return jnp.arange(size) / 64 - 0.25


class UserScore(NamedTuple):
    """A score function with its operands, a factor of the queries, and whether the generated kernel
    may give a reason instead of running."""

    function: Callable[..., Any]
    operands: tuple[Any, ...] = ()
    query: float = 1.0
    refuses: bool = False


def together(s: Any, b: Any, h: Any, i: Any, j: Any, t: Any) -> Any:
    s = clipped_gradient(jax.nn.relu(s)) + SETTINGS.steps[0]
    s = jnp.where(s > SETTINGS.steps[0], straight_through(s), 2 * s)
    s = lax.cond(j > 3 * i, lambda x: -x, jax.nn.relu, jnp.clip(s, -4, 4))
    s = jnp.max(jnp.stack([s, 0 * s, 1 + 0 * s])) + lax.stop_gradient(jnp.floor(s))
    s = scaled_gradients(s, t[i * j % 20]) + jnp.asarray(SETTINGS.table)[_bytes(np.uint8)[j]]
    s = jax.nn.silu(jnp.tanh(s) + t[h]) * jnp.exp(0.1 * t[j % 7])
    return s - 0.01 * abs(i - j) + jax.nn.relu(t[lax.clamp(jnp.int32(-5), i - j, jnp.int32(19))])


SCORES = {
    "together": UserScore(together, (table(20),), refuses=True),
    "relu at 0": UserScore(lambda s, b, h, i, j: jax.nn.relu(s), query=0.0),
    "relu": UserScore(lambda s, b, h, i, j: jax.nn.relu(s) + 0.5 * jax.nn.relu6(2 * s)),
    "activations": UserScore(
        lambda s, b, h, i, j: jax.nn.silu(s) + jax.nn.log_sigmoid(s) + jnp.logaddexp(s, 0.0)
    ),
    "round, straight through": UserScore(lambda s, b, h, i, j: straight_through(s)),
    "by stop_gradient": UserScore(lambda s, b, h, i, j: s + lax.stop_gradient(jnp.round(s) - s)),
    "clipped gradient": UserScore(lambda s, b, h, i, j: clipped_gradient(s)),
    "gradients of operands": UserScore(
        lambda s, b, h, i, j, t: scaled_gradients(s, t[h]), (jnp.array([0.5, 1.0]),)
    ),
    "of entries": UserScore(
        lambda s, b, h, i, j, t: scaled_gradients(s, t[i * j % 64]), (table(),)
    ),
    "of what a query reads": UserScore(
        lambda s, b, h, i, j, t: s * scaled_gradients(t[i % 64], 0.5 * t[b]), (table(),)
    ),
    "of a table": UserScore(lambda s, b, h, i, j, t: s + jax.nn.relu(t)[i * j % 64], (table(),)),
    "a rule with a number": UserScore(lambda s, b, h, i, j: rule_with_a_number(2.0, s)),
    "two results": UserScore(lambda s, b, h, i, j, t: sum(two_results(s, t[i % 8])), (table(8),)),
    "a look-up with a rule": UserScore(
        lambda s, b, h, i, j, t: own_look_up(s, t, i % 8), (table(8),), refuses=True
    ),
    "a long look-up with a rule": UserScore(
        lambda s, b, h, i, j, t: own_look_up(s, t, i % 90), (table(90),), refuses=True
    ),
    "within jit and checkpoint": UserScore(
        lambda s, b, h, i, j: jax.jit(jax.checkpoint(jax.nn.hard_swish))(s)
    ),
    "within cond": UserScore(
        lambda s, b, h, i, j: lax.cond(i > j, jax.nn.relu, lambda x: 2 * x, s)
    ),
    "greatest of equals": UserScore(
        lambda s, b, h, i, j: jnp.max(jnp.stack([s, 0 * s, 0 * s])), query=0.0
    ),
    "least and product": UserScore(
        lambda s, b, h, i, j: (
            jnp.min(jnp.array([s, 0.25 * s, 0.0])) + 0.1 * jnp.prod(jnp.stack([s, s + 1, s]))
        )
    ),
    "fewer bits": UserScore(lambda s, b, h, i, j: lax.reduce_precision(s, 8, 2), refuses=True),
    "all bits": UserScore(lambda s, b, h, i, j: lax.reduce_precision(s, 11, 52)),
    "a clamp by an array": UserScore(
        lambda s, b, h, i, j, low, t: (
            s + jnp.take(t, lax.clamp(low, i - j, jnp.int32(63)), mode="clip")
        ),
        (jnp.int32(-5), table()),
    ),
    "a clamp by arrays": UserScore(
        lambda s, b, h, i, j, ends, t: s + t[jnp.clip(i - j, ends[0], ends[1])],
        (jnp.array([-7, 900]), table()),
    ),
    "bytes": UserScore(lambda s, b, h, i, j: s + jnp.asarray(SETTINGS.table)[_bytes(np.uint8)[j]]),
    "signed bytes": UserScore(lambda s, b, h, i, j, t: s + t[_bytes(np.int8)[i]], (table(300),)),
    # The table is no operand, as JAX 0.10.2 clips the indices of its gradient to 299 % 256 = 43.
    "bytes as starts": UserScore(
        lambda s, b, h, i, j: s + lax.dynamic_slice(table(300), (_bytes(np.uint8)[j],), (1,))[0]
    ),
    "two bytes": UserScore(lambda s, b, h, i, j: s + table(300)[_bytes(np.int16)[j] - np.int16(9)]),
    "attributes and lists": UserScore(
        lambda s, b, h, i, j: s - SETTINGS.slope * abs(i - j) / SETTINGS.steps[1]
    ),
    "a loop": UserScore(
        lambda s, b, h, i, j: lax.fori_loop(0, 3, lambda n, x: x * 0.5 + n * (i > j), s),
        refuses=True,
    ),
}


def _bytes(dtype: Any) -> Any:
    return jnp.asarray((BYTES % (np.iinfo(dtype).max + 1)).astype(dtype))


MASKS = {
    # The equation of `lax.reduce` contains a program, as calls do, which combines two entries.
    "a reduction": lambda b, h, i, j: (
        lax.reduce(jnp.stack([i, j, jnp.int32(3)]), np.int32(0), lambda x, y: (x + y) % 7, (0,)) > 2
    ),
    "rounded positions": lambda b, h, i, j: lax.reduce_precision(1.0 * i, 8, 4) >= j,
    "out of range": lambda b, h, i, j: lax.reduce_precision(1.0 * j, 4, 3) <= 3.0 * i,
    "bytes": lambda b, h, i, j: (jnp.arange(300) % 3 == 0)[_bytes(np.uint8)[j]] | (i > j),
    "bytes of both": lambda b, h, i, j: _bytes(np.uint8)[i] // 50 == _bytes(np.uint8)[j] // 50,
    "wrapping bytes": lambda b, h, i, j: (i.astype(jnp.int8) + j.astype(jnp.int8)) > 0,
    "a clamp by an array": lambda b, h, i, j: (
        jnp.arange(64)[lax.clamp(jnp.int32(SETTINGS.steps[0] - 8) + 0 * b, i - j, jnp.int32(63))]
        < 9
    ),
    "a rule": lambda b, h, i, j: straight_through(i / 16) >= j / 16,
    "a great power": lambda b, h, i, j: (j / 64) ** 2**30 <= 2 + i,
}


def drawn(T: int, S: int) -> tuple[Any, ...]:
    rng = np.random.default_rng(2)
    shapes = ((B, T, N, H), (B, S, N, H), (B, S, N, H), (B, T, N, H))
    return tuple(jnp.asarray(rng.integers(-6, 7, shape) / 4, jnp.float64) for shape in shapes)


def plain(score: Any, mask: Any, q: Any, k: Any, v: Any, operands: Any) -> Any:
    """The formula on T × S scores."""
    places = np.indices((q.shape[0], *q.shape[2:0:-1], k.shape[1]), np.int32, sparse=True)
    logits = jnp.einsum("btnh,bsnh->bnts", q, k) * q.shape[-1] ** -0.5
    logits = jnp.vectorize(lambda s, *at: score(s, *at, *operands))(logits, *places)
    if mask is not None:
        logits = jnp.where(jnp.vectorize(mask)(*places), logits, -jnp.inf)
    greatest = lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    weights = jnp.exp(logits - jnp.where(jnp.isfinite(greatest), greatest, 0))
    total = weights.sum(axis=-1, keepdims=True)
    return jnp.einsum("bnts,bsnv->btnv", weights / jnp.where(total > 0, total, 1), v)


def ours(implementation: Any, score: Any, mask: Any, q: Any, k: Any, v: Any, operands: Any) -> Any:
    options: Any = {"mask": mask, "implementation": implementation}
    return jattn.attention(q, k, v, score=scores.Score(score, *operands), **options)


def everything(
    jit: Any, attention: Any, q: Any, k: Any, v: Any, d_out: Any, operands: Any
) -> list[Any]:
    run = jit(lambda *arguments: out_and_gradients(attention, arguments, d_out))
    leaves = jax.tree.leaves(run(q, k, v, operands))
    return [np.asarray(x, np.float64) for x in leaves if x.dtype != jax.dtypes.float0]


def cast(tree: Any, dtype: Any) -> Any:
    floats = lambda x: jnp.issubdtype(x.dtype, jnp.floating)  # noqa: E731
    return jax.tree.map(lambda x: x.astype(dtype) if floats(x) else x, tree)


def assert_like_plain(
    implementation: Any,
    row: UserScore,
    mask: Any = None,
    dtype: str = "float64",
    sizes: tuple[int, int] = (70, 90),
) -> None:
    q, k, v, d_out = drawn(*sizes)
    arguments = q * row.query, k, v, d_out, row.operands
    formula = functools.partial(plain, row.function, mask)
    want = everything(quick_jit, formula, *cast(arguments, "float64"))
    call = functools.partial(ours, implementation, row.function, mask)
    got = everything(users_jit, call, *cast(arguments, dtype))
    rtol = 1e-10 if dtype == "float64" else 5e-5
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=rtol * max(1.0, np.abs(y).max(initial=0)))


def or_refuse(implementation: Any, row: UserScore, **options: Any) -> None:
    """Calls `assert_like_plain`, but the generated kernel may refuse where the row allows it."""
    try:
        assert_like_plain(implementation, row, **options)
    except NotImplementedError as reason:
        assert row.refuses and implementation == "native", reason


@pytest.mark.one_in(48)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", SCORES)
def test_a_score_function_and_its_gradients(name, implementation, dtype):
    or_refuse(implementation, SCORES[name], dtype=dtype)


UNCHANGED = UserScore(lambda s, b, h, i, j: s, refuses=True)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("implementation", [None, "native", "blockwise"])
@pytest.mark.parametrize("name", MASKS)
def test_a_mask_and_the_tiles_that_it_empties(name, implementation):
    or_refuse(implementation, UNCHANGED, mask=MASKS[name], dtype="float32", sizes=(200, 330))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ["relu at 0", "round, straight through", "a clamp by an array"])
def test_where_none_generates_a_kernel(name):
    assert_like_plain(None, SCORES[name], dtype="float32", sizes=(LARGE, LARGE))


def primitive_named(name: str, function: Callable[[Any], Any]) -> Primitive:
    """A user's primitive, linear, with the name of one of JAX's."""
    primitive = Primitive(name)
    primitive.def_impl(function)
    primitive.def_abstract_eval(lambda x: ShapedArray(x.shape, x.dtype))
    mlir.register_lowering(primitive, mlir.lower_fun(function, multiple_results=False))
    batching.defvectorized(primitive)
    ad.deflinear2(primitive, lambda cotangent, x: [function(cotangent)])
    return primitive


DOUBLED = {name: primitive_named(name, lambda x: 2 * x) for name in ("cos", "copy", "jit", "abs")}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", DOUBLED)
def test_a_users_primitive_is_not_known_by_its_name(name, implementation):
    double: Any = DOUBLED[name].bind
    row = UserScore(lambda s, b, h, i, j: double(s), refuses=True)
    mask = lambda b, h, i, j: double(1.0 * j) <= i + 64  # noqa: E731
    or_refuse(implementation, row, mask=mask)
    with pytest.raises(NotImplementedError, match=f"{name!r} .not a primitive of JAX"):
        q, k, v, _ = drawn(4, 4)
        ours("native", row.function, None, q, k, v, ())


def test_what_has_effects_is_not_generated():
    seen: list[Any] = []
    printing = lambda s, b, h, i, j: jax.debug.callback(seen.append, s) or s  # noqa: E731
    q, k, v, _ = drawn(3, 4)
    with pytest.raises(NotImplementedError, match="debug_callback"):
        ours("native", printing, None, q, k, v, ())
    ours(None, printing, None, q, k, v, ())
    jax.effects_barrier()
    assert len(seen) == B * N * 3 * 4


def without_derivative(x: Any) -> Any:
    return jax.pure_callback(np.sin, x, x, vmap_method="expand_dims")


def test_values_need_no_derivatives():
    q, k, v, _ = drawn(70, 90)
    score = lambda s, b, h, i, j: without_derivative(s) + 0.01 * j  # noqa: E731
    want = plain(score, None, q, k, v, ())
    for implementation in (None, "blockwise", "reference"):
        call: Any = functools.partial(ours, implementation, score, None)
        np.testing.assert_allclose(call(q, k, v, ()), want, rtol=0, atol=1e-10)
        with pytest.raises(ValueError, match="callbacks do not support JVP"):
            jax.jvp(lambda q: call(q, k, v, ()), (q,), (q,))  # noqa: B023
    rows = jattn.statistics(q, k, score=score)
    weights = jattn.attention_weights(q, k, score=score)
    np.testing.assert_allclose(rows.entropy, -(weights * jnp.log(weights)).sum(-1), atol=1e-10)


# --- how often they are called --------------------------------------------------------------------


@pytest.mark.one_in(2)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("snapshots", [True, False])
def test_functions_are_called_once_for_values_and_gradients(implementation, snapshots):
    """This holds also for functions that read something mutable, such as a list."""
    number = 300 + 2 * IMPLEMENTATIONS.index(implementation) + snapshots  # another in each case
    numbers = [number]
    mask = lambda b, h, i, j: (j <= i) & (i - j < number)  # noqa: E731
    reads = lambda s, b, h, i, j: s / numbers[0]  # noqa: E731
    score = (lambda s, b, h, i, j: s / number) if snapshots else reads
    x = jnp.ones((1, LARGE if implementation is None else 160, 1, 8))

    def loss(x: Any) -> Any:
        options: Any = {"mask": mask, "score": score, "implementation": implementation}
        return jattn.attention(x, x, x, **options).sum()

    codes, calls = (mask.__code__, score.__code__), []  # copies of a function have its code

    def count(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code in codes:
            calls.append(codes.index(frame.f_code))

    profiler = sys.getprofile()
    sys.setprofile(count)
    try:
        jax.value_and_grad(loss)(x)
    finally:
        sys.setprofile(profiler)
    assert sorted(calls) == [0, 1]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("is_operand", [True, False])
@pytest.mark.parametrize("implementation", [*IMPLEMENTATIONS, "reference"])
def test_a_rule_on_what_all_pairs_share_gets_the_sum_of_all(implementation, is_operand):
    """The rule clips, so that the sum of its results for several tiles differs."""
    q, k, v, weight = normal_arrays(*[(1, 700, 1, 8)] * 4, dtype="float32")
    scale = np.linspace(0.5, 1.5, 16, dtype=np.float32)  # a constant beside the operand

    def function(s: Any, i: Any, j: Any, table: Any) -> Any:
        return s + jax.jit(clipped_gradient)(table * scale * jnp.arange(1, 17))[(i - j) % 16]

    def loss(table: Any) -> Any:
        score: Any = lambda s, b, h, i, j: function(s, i, j, table)  # noqa: E731
        if is_operand:
            score = scores.Score(lambda s, b, h, i, j, x: function(s, i, j, x), table)
        out = jattn.attention(q, k, v, score=score, implementation=implementation)
        return jnp.sum(out * weight)

    def formula(table: Any) -> Any:
        s = jnp.einsum("bth,bsh->ts", q[:, :, 0], k[:, :, 0]) / np.sqrt(8)
        i, j = jnp.arange(700)[:, None], jnp.arange(700)[None, :]
        p = jax.nn.softmax(function(s, i, j, table), axis=-1)
        return jnp.sum(jnp.einsum("ts,bsnv->btnv", p, v) * weight)

    table = jnp.linspace(-0.1, 0.2, 16, dtype=jnp.float32)
    got, want = (jax.jit(jax.grad(x))(table) for x in (loss, formula))
    np.testing.assert_allclose(got, want, rtol=1e-4)


HALF: Any = jax.custom_vjp(lambda x: x)  # its gradients are at most a half
HALF.defvjp(lambda x: (x, None), lambda _, cotangent: (jnp.clip(cotangent, -0.5, 0.5),))

KEY = jax.random.key(0)
ON_OPERANDS: dict[str, Callable[..., Any]] = {
    "alone": lambda s, b, h, i, j, x: s + HALF(x)[j],
    "a jitted function": jax.jit(lambda s, b, h, i, j, x: s + HALF(x)[j]),
    "jitted beside an index": lambda s, b, h, i, j, x: s + jax.jit(lambda j, x: HALF(x)[j])(j, x),
    "checkpointed": jax.checkpoint(lambda s, b, h, i, j, x: s + HALF(x)[j]),
    "in a branch": lambda s, b, h, i, j, x: s + lax.cond(x[0] > -9, HALF, jnp.sin, x)[j],
    "beside a random key": lambda s, b, h, i, j, x: (
        s + HALF(x)[j] + jax.random.uniform(jax.random.fold_in(KEY, j))
    ),
}


def total_lse(x: Any, function: Callable[..., Any], implementation: Any = None) -> Any:
    """The sum of lse in a call whose score function has the operand `x`, `[6]`."""
    q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 6, 2, 8), jnp.float32)
    options: Any = {"score": scores.Score(function, x), "implementation": implementation}
    return jattn.attention(q, k, v, return_lse=True, **options)[1].sum()


@pytest.mark.parametrize("name", ON_OPERANDS)
def test_a_rule_on_operands_wherever_it_stands(name):
    loss = lambda x: 3 * total_lse(x, ON_OPERANDS[name])  # noqa: E731
    np.testing.assert_array_equal(jax.grad(loss)(jnp.linspace(-1, 1, 6)), 0.5)


SCALED_GRADIENT: Any = jax.custom_vjp(lambda x: x)
SCALED_GRADIENT.defvjp(lambda x: (x, x), lambda x, cotangent: (2 * cotangent * jnp.cos(x),))
ON_PARTS: dict[str, tuple[Callable[..., Any], bool]] = {  # and whether the gradient is refused
    "head": (lambda s, b, h, i, j, x: s + HALF(x[h]), True),
    "distance": (lambda s, b, h, i, j, x: s + jnp.sin(HALF(2 * x[abs(i - j)])), True),
    "branch": (lambda s, b, h, i, j, x: s + lax.cond(i > j, HALF, jnp.sin, x[j]), True),
    "jitted": (lambda s, b, h, i, j, x: jax.jit(lambda s, y: s * HALF(y))(s, x[h]), True),
    "constant": (lambda s, b, h, i, j, x: s + HALF(jnp.asarray(SETTINGS.table)[h]) * x[j], False),
    "linear": (lambda s, b, h, i, j, x: s + SCALED_GRADIENT(x[h]), False),
    "score": (lambda s, b, h, i, j, x: HALF(s + x[j]), False),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("implementation", [None, "native", "blockwise", "reference"])
@pytest.mark.parametrize("name", ON_PARTS)
def test_a_rule_on_parts_of_an_operand_is_linear_or_refused(name, implementation):
    function, is_refused = ON_PARTS[name]
    loss = functools.partial(total_lse, function=function, implementation=implementation)
    x = jnp.linspace(-1, 1, 6)
    assert np.isfinite(loss(x))
    refusal = pytest.raises(NotImplementedError, match=r"clip\(table\[h\]\)")
    with refusal if is_refused else contextlib.nullcontext():
        assert np.isfinite(jax.grad(loss)(x)).all()


def test_a_rule_on_operands_gets_the_sum_over_all_chunks_of_a_cache():
    q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 4, 2, 8), jnp.float32)
    cache = RollingCache.create(2, 8, 2, 8, chunk=2)
    options: Any = {"mask": masks.Causal(), "return_lse": True}

    def loss(x: Any) -> Any:
        score = scores.Score(ON_OPERANDS["alone"], x) >> scores.SoftCap(50.0)
        (_, lse), _ = jattn.cached_attention(q, k, v, cache, score=score, **options)
        return 3 * lse.sum()

    np.testing.assert_array_equal(jax.grad(loss)(jnp.linspace(-1, 1, 16))[:4], 0.5)
