"""Functions of users in the kernel for CPUs: generated code computes them and derivatives."""

import ctypes
import functools
import itertools
import subprocess
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from jax import lax
from jax.sharding import PartitionSpec as P

import jattn
from jattn import masks, scores, tuning
from jattn.kernels.cpu import compiler, generator, library
from jattn.masks import Predicate
from jattn.scores import Score
from jattn.spec import Shapes
from tests.arrays import assert_equal
from tests.conftest import (
    assert_trees_close,
    attention_arrays,
    normal_arrays,
    out_and_gradients,
    quick_jit,
    users_jit,
)
from tests.kernels import made
from tests.test_bounds import RULES, expressions_of
from tests.test_users_functions import cast


pytestmark = pytest.mark.skipif(
    library.unavailable("forward", np.float32, wait=True) is not None, reason="no compiler"
)


B, T, S, N, K, H = 2, 150, 170, 4, 2, 24
RNG = np.random.default_rng(0)
DOCS = jnp.asarray(np.sort(RNG.integers(0, 5, (B, 200)), axis=1), jnp.int32)
SMALL, SLOPES = DOCS.astype(jnp.int8), jnp.asarray(RNG.normal(size=N), jnp.float32)
TABLE = jnp.asarray(RNG.normal(size=(N, 64)), jnp.float32)
BIAS = jnp.asarray(RNG.normal(size=(1, N, T, S)), jnp.float32)
CAUSAL, TRI = Predicate(lambda b, h, q, kv: q >= kv), masks.Causal()

ENDS = jnp.asarray(np.sort(RNG.integers(0, 150, (B, 6)), axis=1), jnp.int32)


def document(ends: Any, position: Any) -> Any:
    """Returns the number of the document that holds a position."""
    return jnp.searchsorted(ends, position, side="right")


CALLS: dict[str, tuple[Any, Any]] = {
    "by primitives without a node": (
        Predicate(
            lambda b, h, q, kv, e: (q >= kv) & (document(e[b], q) == document(e[b], kv)), ENDS
        ),
        Score(
            lambda s, b, h, q, kv, t: (
                s * jnp.argsort(t[:, :3], axis=0)[h, q % 3]
                + jnp.interp((q - kv).astype(t.dtype), jnp.arange(64.0, dtype=t.dtype), t[h])
                + jnp.sort(jnp.stack([t[h, kv % 64], t[0, kv % 5], t[h, 2]]))[1]
            ),
            TABLE,
        ),
    ),
    "causal": (CAUSAL, None),
    **{
        name: (Predicate(RULES[name]), None)
        for name in ("documents of rows", "neighbourhood", "a window for each head")
    },
    "documents given": (Predicate(lambda b, h, q, kv, d: d[b, q] == d[b, kv], DOCS), None),
    "nothing left": (Predicate(lambda b, h, q, kv: (q > 70) & (kv < 20)), None),
    "slopes": (CAUSAL, Score(lambda s, b, h, q, kv, m: s + m[h] * (kv - q), SLOPES)),
    "cap": (masks.Causal(), Score(lambda s, b, h, q, kv: 5 * jnp.tanh(s / 5))),
    "table by distance": (TRI, Score(lambda s, b, h, q, kv, t: s + t[h, abs(q - kv) % 64], TABLE)),
    "two entries of a table": (
        None,
        Score(lambda s, b, h, q, kv, t: s + t[h, (q + kv) % 64] * t[h, (q * kv) % 64], TABLE),
    ),
    "table by place in a picture": (
        None,
        Score(
            lambda s, b, h, q, kv, t: s + t[h, q // 32 - kv // 32 + 5, q % 32 - kv % 32 + 31],
            jnp.asarray(RNG.normal(size=(N, 10, 63)), jnp.float32),
        ),
    ),
    "by key": (TRI, Score(lambda s, b, h, q, kv, t: s * t[h, kv % 64] + jnp.exp(-s * s), TABLE)),
    "by query": (None, Score(lambda s, b, h, q, kv, t: s + t[h, q % 64] ** 2, TABLE)),
    "made of a table": (
        Predicate(lambda b, h, q, kv, t: jnp.sort(t)[h, q % 64] >= jnp.cumsum(t)[kv % 64], TABLE),
        Score(
            lambda s, b, h, q, kv, t: (
                s
                + jax.nn.softmax(t @ t.T)[h, kv % N]
                + jax.random.normal(jax.random.key(1), (64,), s.dtype)[kv % 64]
                + jax.lax.scan(lambda c, x: (c + x, c), t[:, 0], t.T)[1][q % 64, h]
            ),
            TABLE,
        ),
    ),
    "documents in small integers": (
        Predicate(lambda b, h, q, kv, d: (d[b, q] == d[b, kv]) & (d[b, q] * 100 != 44), SMALL),
        None,
    ),
    "classes": (
        (masks.Causal() | masks.Dilated(3)) & masks.Global(4),
        scores.SoftCap(3.0) >> scores.Alibi(SLOPES),
    ),
    "segments or causal": (masks.Segments(DOCS[:, :T], DOCS[:, :S]) | TRI, scores.SoftCap(4.0)),
    "buckets": (masks.Dilated(2), scores.RelativeBias(TABLE[:, :16].T)),
    "array": (masks.Dilated(2) | masks.Causal(), scores.Bias(BIAS)),
}


def drawn(dtype: Any) -> list[Any]:
    return attention_arrays((B, T, S, N, K, H, H), dtype, seed=1)


def everything(mask: Any, score: Any, implementation: str, arrays: Any, **options: Any) -> Any:
    *qkv, d_out = arrays
    options |= {"mask": mask, "implementation": implementation, "return_lse": True}
    attend = lambda q, k, v, score: jattn.attention(q, k, v, score=score, **options)  # noqa: E731
    cotangents = d_out, jnp.swapaxes(d_out[..., 0], 1, 2)
    jit = quick_jit if implementation == "reference" else users_jit
    run = jit(lambda *arguments: out_and_gradients(attend, arguments, *cotangents))
    leaves = jax.tree.leaves(run(*qkv, score))
    return [np.asarray(x) for x in leaves if x.dtype != jax.dtypes.float0]


def assert_like_reference(mask: Any, score: Any, arrays: Any, rtol: float, **options: Any) -> Any:
    with jax.numpy_dtype_promotion("standard"):
        got = everything(mask, score, "native", arrays, **options)
        want = everything(mask, score, "reference", arrays, **options)
    assert_close(got, want, rtol)
    return got


def assert_close(got: Any, want: Any, rtol: float) -> None:
    for x, y in zip(got, want, strict=True):
        finite = np.isfinite(y)
        np.testing.assert_array_equal(x[~finite], y[~finite])
        size = np.abs(y[finite]).max(initial=1e-3)
        np.testing.assert_allclose(x[finite], y[finite], rtol=0, atol=rtol * size)


@pytest.mark.one_in(24)
@pytest.mark.parametrize(("dtype", "name"), [*itertools.product(["float32", "float64"], CALLS)])
@pytest.mark.default_tiles
def test_the_kernel_computes_what_the_function_says(name, dtype):
    mask, score = CALLS[name]
    rtol = 1e-12 if dtype == "float64" else 2e-5
    assert_like_reference(mask, cast(score, dtype), drawn(dtype), rtol)


@pytest.mark.slow
@pytest.mark.default_tiles
def test_numbers_of_another_width_than_the_scores():
    words = jnp.asarray(RNG.integers(-(2**60), 2**60, 64), jnp.int64)
    mask = Predicate(lambda b, h, q, kv: (words[q * kv % 64] // 3 + words[q % 64] > kv) | (q == 3))

    def bend(s: Any, b: Any, h: Any, q: Any, kv: Any, slopes: Any, table: Any) -> Any:
        wide = jnp.tanh(s.astype(jnp.float64) * slopes[h]) * slopes[kv % N]
        return s + wide + table[h, (q * 5 + kv) % 64] / 3 * (q % 7) + 0.001 * (q * kv % 11)

    score = Score(bend, *(x.astype(jnp.float64) for x in (SLOPES, TABLE)))
    got = assert_like_reference(mask, score, drawn("float32"), 2e-5)
    assert [x.dtype for x in got[-2:]] == [jnp.float64] * 2


@pytest.mark.default_tiles
def test_masked_poison_reaches_nobody():
    mask = Predicate(lambda b, h, q, kv: (q >= kv) & (kv != 7) & (q != 9))
    score = Score(lambda s, b, h, q, kv: 5 * jnp.tanh(s / 5))
    q, k, v, d_out = drawn("float32")
    run = functools.partial(everything, mask, score, "native")
    want = run((q, k, v, d_out))
    for poison in (np.nan, np.inf):
        bad = q.at[:, 9].set(poison), k.at[:, 7].set(poison), v.at[:, 7].set(poison)
        assert_equal(run((*bad, d_out)), want)


@pytest.mark.slow
@pytest.mark.default_tiles
def test_dropout_positions_and_maps():
    mask, score = CALLS["documents given"][0] & CAUSAL, CALLS["slopes"][1]
    options: dict[str, Any] = {"dropout_rate": 0.3, "dropout_key": jax.random.key(3)}
    options["q_positions"] = jnp.arange(T, dtype=jnp.int32)[::-1]
    options["kv_positions"] = (jnp.arange(S, dtype=jnp.int32) * 7) % 190
    assert_like_reference(mask, score, arrays := drawn("float32"), 2e-5, **options)

    def run(name: str) -> Any:
        def single(q: Any, k: Any, v: Any, slopes: Any) -> Any:
            rules: Any = {"mask": mask, "score": Score(score.fn, slopes)}
            return jattn.attention(q, k, v, implementation=name, **rules)

        stacked = (jnp.stack([x, 2 * x]) for x in (*arrays[:3], SLOPES))
        return np.asarray(quick_jit(jax.vmap(single))(*stacked))

    with jax.numpy_dtype_promotion("standard"):
        np.testing.assert_allclose(run("native"), run("reference"), atol=2e-5)


@pytest.mark.one_in(3, slow=True)
@pytest.mark.default_tiles
@pytest.mark.parametrize("shared", ["none", "keys", "queries"])
def test_under_shard_map(shared):
    mesh = jax.make_mesh((4, 2), ("rows", "spare"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    rows = [2 if name == shared else 8 for name in ("queries", "keys", "keys")]
    *qkv, d_out = normal_arrays(*((n, 90, N, 16) for n in (*rows, 8)), dtype="float32", seed=2)
    specs = *(P() if n == 2 else P("rows") for n in rows), P()

    def gradients(implementation: str) -> Any:
        def local(q: Any, k: Any, v: Any, slopes: Any) -> Any:
            bent = Score(lambda s, b, h, q, kv, m: s + m[h] * (kv - q) + jnp.tanh(s * m[0]), slopes)
            mask = Predicate(lambda b, h, q, kv: (q >= kv) & (q - kv < 40))
            return jattn.attention(q, k, v, mask=mask, score=bent, implementation=implementation)

        mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P("rows"))
        loss = lambda *arrays: (mapped(*arrays) * d_out).sum()  # noqa: E731
        d = users_jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(*qkv, SLOPES)
        return [np.asarray(x) for x in d]

    with jax.numpy_dtype_promotion("standard"):
        assert_close(gradients("native"), gradients("blockwise"), 2e-5)


@pytest.mark.default_tiles
def test_long_sequences_skip_what_is_empty():
    qkv = normal_arrays(*[(1, 2300, 2, 16)] * 3, dtype="float32")
    mask = Predicate(lambda b, h, q, kv: (q >= kv) & (q - kv < 200))
    call = functools.partial(jattn.attention, *qkv, implementation="native")
    whole = call(mask=masks.Causal() & masks.Window(left=199))
    np.testing.assert_allclose(call(mask=mask), whole, atol=2e-6)
    assert jattn.explain(*qkv, mask=mask)["native"] is None


def test_unsupported_functions_have_a_reason():
    q = jnp.ones((1, 1200, 1, 8))
    loop = Predicate(
        lambda b, h, q, kv: jax.lax.while_loop(lambda x: x > 3, lambda x: x - 4, q * kv) == kv
    )
    assert "while" in str(jattn.explain(q, q, q, mask=loop)["native"])
    long = lambda s, *at: functools.reduce(lambda x, n: x * 0.5 + n, range(200), s)  # noqa: E731
    assert "200 operations in a row" in str(jattn.explain(q, q, q, score=long)["native"])
    assert "too few" in str(jattn.explain(*[q[:, :32]] * 3, mask=CAUSAL)["native"])
    for n in (2**63, -(2**63), 2**70):
        power = lambda s, *at, n=n: jax.lax.integer_pow(s, n)  # noqa: E731
        assert "no powers from 2**63 on" in str(jattn.explain(q, q, q, score=power)["native"])


def few_queries() -> Any:
    return jnp.asarray(RNG.normal(size=(1, 40, 2, 8)), jnp.float32)


def with_gradient(mask: Any, implementation: str | None) -> Any:
    attend = functools.partial(jattn.attention, mask=mask, implementation=implementation)
    return quick_jit(jax.value_and_grad(lambda q: (attend(q, q, q) ** 2).sum()))


def test_a_rule_that_cannot_be_compiled_leaves_the_call_to_the_next(monkeypatch):
    """Forward and backward; the reason is shown; a named kernel raises it; it is tried once."""
    tries = []

    def failing(text: str, dtype: str) -> Any:
        tries.append(text)
        raise compiler.BuildError("the compiler is on strike")

    monkeypatch.setattr(compiler, "load_rule", failing)
    q, mask = few_queries(), Predicate(lambda b, h, q, kv: (q >= kv) & ((q + kv) % 11 != 5))
    with tuning.using(generated_pairs=0):
        assert jattn.explain(q, q, q, mask=mask)["native"] is None
        assert_equal(*(with_gradient(mask, name)(q) for name in (None, "blockwise")))
        assert jattn.explain(q, q, q, mask=mask)["native"] == "the compiler is on strike"
        with pytest.raises(NotImplementedError, match="'native': the compiler is on strike"):
            with_gradient(mask, "native")(q)
    assert len(tries) == 1


@pytest.mark.parametrize(
    ("text", "modifies"),
    [("", False), ("", True), ('extern "C" void jattn_rule_forward() {}\n', True)],
)
def test_a_rule_without_its_functions_is_a_reason(monkeypatch, tmp_path, text, modifies):
    (source := tmp_path / "x.cc").write_text(text)
    command = [*compiler.compiler(), "-shared", "-fPIC", str(source), "-o", str(tmp_path / "x.so")]
    subprocess.run(command, check=True)
    empty = ctypes.CDLL(str(tmp_path / "x.so"))
    monkeypatch.setattr(compiler, "load_rule", lambda *_: empty)
    name = f"{text} {modifies} {tmp_path}"
    for _ in range(2):
        with pytest.raises(library.CompilationFailed, match="jattn_rule_"):
            library.add_rule(name, np.float32, modifies, False)
    assert "jattn_rule_" in str(library.rule_unavailable(name, np.float32))


@pytest.mark.slow
def test_a_process_loads_only_so_many_rules(monkeypatch):
    monkeypatch.setattr(library, "_rules", {})
    monkeypatch.setattr(library, "MOST_RULES", 2)
    q = few_queries()
    mask = lambda n: Predicate(lambda b, h, q, kv: (q >= kv) & ((q + kv) % 13 != n))  # noqa: E731
    with tuning.using(generated_pairs=0):
        early = with_gradient(mask(0), "native")
        first = early(q)
        with_gradient(mask(1), "native")(q)
        assert_equal(*(with_gradient(mask(2), name)(q) for name in (None, "blockwise")))
        reason = jattn.explain(q, q, q, mask=mask(2))["native"]
        assert "compiled functions 2 times, as often as it can" in str(reason)
        with pytest.raises(NotImplementedError, match="should be operands"):
            with_gradient(mask(2), "native")(q)
        with_gradient(mask(1), "native")(q)
        assert_equal(early(q), first)
    assert len(library._rules) == 2


def test_a_program_whose_rule_a_process_does_not_have_is_an_error(monkeypatch):
    monkeypatch.setattr(library, "add_rule", lambda *_: 12345)
    mask = Predicate(lambda b, h, q, kv: (q >= kv) & ((q + kv) % 17 != 3))
    with tuning.using(generated_pairs=0):
        with pytest.raises(jax.errors.JaxRuntimeError, match="has not compiled the functions"):
            jax.block_until_ready(with_gradient(mask, "native")(few_queries()))


class _Place(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_ssize_t) for name in ("first", "count", "width", "j", "keys", "T", "S")),
        ("operands", ctypes.POINTER(ctypes.c_void_p)),
        ("gradients", ctypes.POINTER(ctypes.c_void_p)),
    ]


SIDE = 21


class CompiledScores:
    """Score functions of T queries and S keys, compiled together; not all of them may compile."""

    def __init__(self, functions: list[Any], T: int, S: int, dtype: str):
        self.T, self.S, self.dtype = T, S, np.dtype(dtype)
        shapes, texts = Shapes((1,), T, S, 1, 1, 4, 4, jnp.dtype(dtype)), []
        self.rules: dict[int, Any] = {}
        self.operands: dict[int, list[np.ndarray]] = {}
        for n, function in enumerate(functions):
            spec = made(shapes, score=Score(function)).spec
            try:
                rule: Any = generator.generate(spec, self.dtype, gradients=False)
            except NotImplementedError:
                continue
            arrays = generator.arrays(spec, shapes, self.dtype)
            self.rules[n], self.operands[n] = rule, [np.asarray(x) for x in arrays]
            text = rule.text.replace("jattn_rule", f"rule_{n}")
            texts.append(f"namespace rule{n} {{\n{text}}}\n")
        self.library = compiler.load_rule("\n".join(texts), dtype)

    def __call__(self, n: int, *arrays: Any) -> np.ndarray:
        """The scores of function n or, for scores and cotangents, the cotangents of its argument.

        The function gets copies in multiples of eight numbers, and writes into the last.
        """
        name, flags = ("backward", ()) if len(arrays) == 2 else ("forward", (ctypes.c_bool(False),))
        lanes = [np.zeros((self.S, -(-self.T // 8) * 8), self.dtype) for _ in arrays]
        for copy, array in zip(lanes, arrays, strict=True):
            copy[:, : self.T] = array
        pointers = (ctypes.c_void_p * 40)(*(x.ctypes.data for x in self.operands[n]))
        place = _Place(0, self.T, lanes[0].shape[1], 0, self.S, self.T, self.S, pointers, pointers)
        addresses = (ctypes.c_void_p(x.ctypes.data) for x in lanes)
        self.library[f"rule_{n}_{name}"](ctypes.byref(place), *addresses, *flags)
        return lanes[-1][:, : self.T]


@pytest.mark.parametrize("count", [10, pytest.param(2000, marks=pytest.mark.exhaustive)])
def test_random_score_functions(count):
    functions: list[Any] = []

    @settings(max_examples=count, phases=[Phase.generate])
    @given(expressions_of("float", 4, True))
    def collect(function: Any) -> None:
        functions.append(function)

    collect()
    score, cotangent = np.random.default_rng(0).normal(size=(2, SIDE, SIDE)) * [[[3]], [[1]]]
    places = jnp.arange(SIDE, dtype=jnp.int32)
    for some in (functions[start : start + 200] for start in range(0, count, 200)):
        with jax.numpy_dtype_promotion("standard"):
            scorers = [lambda s, b, h, q, kv, f=f: f(q, kv, s) + 0 * s for f in some]
            compiled = CompiledScores(scorers, SIDE, SIDE, "float64")
            assert len(compiled.rules) > 0.9 * len(some)
            of_score = [lambda s, f=f: f(places[:, None], places[None], s) + 0 * s for f in some]
            run = quick_jit(lambda s, c, of=of_score: [out_and_gradients(f, [s], c) for f in of])
            wants = run(score, cotangent)
        for n, rule in compiled.rules.items():
            want, d_score = wants[n]
            assert_alike(compiled(n, score.T).T, want, rule.text)
            if rule.modifies:
                assert_alike(compiled(n, score.T, cotangent.T).T, d_score, rule.text)


def assert_alike(got: np.ndarray, want: Any, text: str) -> None:
    usual = np.abs(want) < 1e100
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want), err_msg=text)
    np.testing.assert_allclose(got[usual], want[usual], rtol=1e-9, atol=1e-9, err_msg=text)


SAME_NAME = "exp log log1p expm1 tanh sqrt abs sign floor ceil square exp2 sin"
FUNCTIONS = {name: (getattr(jnp, name), getattr(np, name)) for name in SAME_NAME.split()} | {
    "logistic": (jax.nn.sigmoid, lambda x: 1 / (1 + np.exp(-x))),
    "rsqrt": (jax.lax.rsqrt, lambda x: 1 / np.sqrt(x)),
    "cube": (lambda x: x**3, lambda x: x**3),
}
EXPONENTS = [*range(-3, 6), 31, -64, 2**31 - 1, -(2**31), 2**40 + 1, 2**62 + 3, -(2**62)]


@pytest.mark.one_in(8)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("of", ["scores", "floats of the other width", "int32", "int64"])
def test_powers_are_those_of_jax(dtype, of):
    """Derivatives too, for infinities, NaN and zeros, and where integers wrap around."""
    whole = of.startswith("int")
    inner = of if whole else {"float32": "float64", "float64": "float32"}[dtype]
    inner = dtype if of == "scores" else inner

    def power(s: Any, n: int) -> Any:
        x = jnp.clip(s * 5, -2000, 2000) if whole else s
        return jax.lax.integer_pow(x.astype(inner), n).astype(dtype)

    rng = np.random.default_rng(0)
    spread = np.concatenate([np.full(20, 3e-9), 10.0 ** rng.uniform(-9, 3, 20)])
    x = (1 + rng.normal(size=(40, 48)) * spread[:, None]) * rng.choice([-1, 1], (40, 48))
    if not whole:
        x[0, :8] = [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, 1e30]
    x, cotangent = x.astype(dtype), rng.normal(size=x.shape).astype(dtype)
    eps = max(float(jnp.finfo(y).eps) for y in (dtype, dtype if whole else inner))
    exponents = [n for n in EXPONENTS if n >= 0 or not whole]
    scorers = [lambda s, b, h, q, kv, n=n: power(s, n) for n in exponents]
    compiled = CompiledScores(scorers, 48, 40, dtype)
    powers = [lambda x, n=n: power(x, n) for n in exponents]
    wants = quick_jit(lambda x: [out_and_gradients(f, [x], cotangent) for f in powers])(x)
    for number, (n, want) in enumerate(zip(exponents, wants, strict=True)):
        got = compiled(number, x), compiled(number, x, cotangent)
        # XLA has no denormal numbers.
        assert_trees_close(got, want, rtol=8 * eps, atol=1e-37, err_msg=f"{n}")


INTEGERS = {
    "sums": lambda x, y: x * y - x + -y,
    "quotients": lambda x, y: jax.lax.div(x, y) + jax.lax.rem(x, y),
    "floor": lambda x, y: x // y + x % y,
    "shifts": lambda x, y: (x << (abs(y) % 70)) + (x >> 5) + jax.lax.shift_right_logical(x, y % 9),
    "bits": lambda x, y: (x & y) ^ (~x | y),
    "chosen": lambda x, y: jnp.where(x < y, jnp.maximum(x, -y), jnp.clip(y, -(2**40), 2**40)),
    "signs": lambda x, y: abs(x) * jnp.sign(y) + (x.astype(jnp.float32) * 3e10).astype(jnp.int64),
}


def assert_functions_are(
    functions: dict[str, Any],
    of_places: Any,
    dtype: str,
    tolerances: dict[str, float] | None = None,
) -> None:
    """Compares the scores `of_places(function, q, kv)` of each function with JAX's, digit for digit
    or with a relative tolerance."""
    with jax.numpy_dtype_promotion("standard"):
        scorers = [lambda s, b, h, q, kv, f=f: s + of_places(f, q, kv) for f in functions.values()]
        compiled = CompiledScores(scorers, 32, 40, dtype)
        assert len(compiled.rules) == len(functions)
        q, kv = jnp.arange(32, dtype=jnp.int32), jnp.arange(40, dtype=jnp.int32)
        for n, (name, f) in enumerate(functions.items()):
            want = of_places(f, q[None, :], kv[:, None])
            got = compiled(n, np.zeros((40, 32)))
            rtol = (tolerances or {}).get(name, 0)
            np.testing.assert_allclose(got, want, rtol=rtol, err_msg=name)


OF_OTHER_DTYPES = INTEGERS | {
    "shifts": lambda x, y: (x << (y & 15)) + (x >> 3) + lax.shift_right_logical(x, y & 7),
    "chosen": lambda x, y: jnp.where(x < y, jnp.maximum(x, -y), jnp.clip(y, 3, 90)) - ~x,
    "signs": lambda x, y: jnp.sign(y) * x + (x * y == 7).astype(x.dtype) - x // (y & 1),
    "floats": lambda x, y: (x.astype("float32") * 3.7).astype(x.dtype) + (x / y).astype(y.dtype),
    "widths": lambda x, y: (x.astype("int64") * 70001).astype(x.dtype) ^ y.astype("int32"),
    "powers": lambda x, y: x**3 + y**2,
}


@pytest.mark.one_in(7)
@pytest.mark.parametrize(
    ("dtype", "of"),
    [*itertools.product(["float64", "float32"], ["int64", "int8", "uint8", "uint16", "uint32"])],
)
def test_integers_of_other_dtypes(of, dtype):
    """They wrap around and saturate as in JAX."""
    rng = np.random.default_rng(0)
    words = jnp.asarray(rng.integers(-(2**62), 2**62, 64).astype(of))
    functions = INTEGERS if of == "int64" else OF_OTHER_DTYPES

    def of_places(f: Any, q: Any, kv: Any) -> Any:
        of_pair = words[q] - kv.astype(of) * 3, words[kv] + (q * kv).astype(of)
        return f(*of_pair).astype(dtype)

    assert_functions_are(functions, of_places, dtype)


OF_16_BITS = {
    "arithmetic": lambda x, y: (x + y) * (x - y * 3),
    "choices": lambda x, y: jnp.where(x < y, jnp.maximum(x, -y), jnp.clip(y, -0.5, 0.9)) - abs(x),
    "signs": lambda x, y: jnp.sign(y) * x + (x * y == x).astype(x.dtype) - jnp.square(y),
    "small": lambda x, y: x * y * 1e-6 + x * 6e-8 - y * 3e-5,
    "large": lambda x, y: x * 5e4 + y * 7e3,
    "other numbers": lambda x, y: (x.astype("float32") * 3.7 + y).astype(x.dtype) * y,
    "integers": lambda x, y: (x * 99).astype("int32").astype(x.dtype) * 3 - y,
    "functions": lambda x, y: jnp.exp(x) * jnp.tanh(y) * jnp.sqrt(abs(x)) / (y + 7),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("of", ["bfloat16", "float16"])
def test_floats_of_16_bits(of, dtype):
    """Every operation rounds, as in JAX."""
    numbers = np.random.default_rng(0).normal(size=64)
    numbers[:4] = [0.0, -0.0, np.inf, np.nan]
    words = jnp.asarray(numbers, of)
    of_places = lambda f, q, kv: f(words[q], words[kv]).astype(dtype)  # noqa: E731
    assert_functions_are(OF_16_BITS, of_places, dtype, {"functions": 2.0**-7})


@pytest.mark.default_tiles
@pytest.mark.parametrize("of", ["bfloat16", "float16"])
def test_gradients_of_arrays_of_16_bits(of):
    """The products are exact, so that it does not matter which of them a compiler rounds."""
    draw = lambda *shape: jnp.asarray(RNG.integers(-15, 16, shape) / 8, of)  # noqa: E731
    mask = Predicate(lambda b, h, q, kv, x: x[q % 64] + x[kv % 64] > x[3], draw(64))

    def bend(s: Any, b: Any, h: Any, q: Any, kv: Any, x: Any, table: Any) -> Any:
        pairs = table[h, (q * 5 + kv) % 64]
        return s + x[q % 64] * x[kv % 64] + jnp.where(q < kv, pairs, pairs * 2)

    score = Score(bend, draw(64), draw(N, 64))
    got = assert_like_reference(mask, score, drawn("float32"), 2e-2)
    assert [x.dtype for x in got[-2:]] == [of] * 2


def test_functions_of_float32():
    """Accurate to a few roundings, for numbers of every size, 0, infinities and NaN."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 48)) * 10.0 ** rng.uniform(-9, 4, (40, 48))
    x[0, :8] = [0.0, -0.0, np.inf, -np.inf, np.nan, 88.6, -103.0, 1.0]
    x = x.astype(np.float32)
    scorers = [lambda s, b, h, q, kv, f=f: f(s) for f, _ in FUNCTIONS.values()]
    compiled = CompiledScores(scorers, 48, 40, "float32")
    for n, (name, (_, true)) in enumerate(FUNCTIONS.items()):
        with np.errstate(all="ignore"):
            want = true(x.astype(np.float64)).astype(np.float32)
        got, tiny = compiled(n, x), np.abs(want) <= 1e-37
        np.testing.assert_allclose(got[~tiny], want[~tiny], rtol=2e-6, err_msg=name)
        np.testing.assert_allclose(got[tiny], want[tiny], atol=1e-37, err_msg=name)
