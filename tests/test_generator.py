"""Masks and score functions of any kind in the kernel for CPUs: the generated code computes the
functions, and their derivatives."""

import ctypes
import functools
import subprocess
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from jax.sharding import PartitionSpec as P

import jattn
from jattn import masks, scores, tuning
from jattn.kernels.cpu import compiler, generator, library
from jattn.masks import Predicate
from jattn.scores import Score
from jattn.spec import Shapes
from tests.conftest import (
    assert_trees_close,
    attention_arrays,
    normal_arrays,
    out_and_gradients,
    quick_jit,
    users_jit,
)
from tests.kernels import made
from tests.test_bounds import expressions_of, neighbourhood


pytestmark = pytest.mark.skipif(
    library.unavailable("forward", np.float32, wait=True) is not None, reason="no compiler"
)


B, T, S, N, K, H = 2, 150, 170, 4, 2, 24
RNG = np.random.default_rng(0)
DOCS = jnp.asarray(np.sort(RNG.integers(0, 5, (B, 200)), axis=1), jnp.int32)
SLOPES = jnp.asarray(RNG.normal(size=N), jnp.float32)
TABLE = jnp.asarray(RNG.normal(size=(N, 64)), jnp.float32)
BIAS = jnp.asarray(RNG.normal(size=(1, N, T, S)), jnp.float32)
CAUSAL = Predicate(lambda b, h, q, kv: q >= kv)

CALLS: dict[str, tuple[Any, Any]] = {
    "causal": (CAUSAL, None),
    "documents": (Predicate(lambda b, h, q, kv: (DOCS[b, q] == DOCS[b, kv]) & (q >= kv)), None),
    "documents given": (Predicate(lambda b, h, q, kv, d: d[b, q] == d[b, kv], DOCS), None),
    "neighbourhood": (Predicate(neighbourhood), None),
    "a window for each head": (Predicate(lambda b, h, q, kv: abs(q - kv) < (h + 1) * 20), None),
    "nothing left": (Predicate(lambda b, h, q, kv: (q > 70) & (kv < 20)), None),
    "slopes": (CAUSAL, Score(lambda s, b, h, q, kv, m: s + m[h] * (kv - q), SLOPES)),
    "cap": (masks.Causal(), Score(lambda s, b, h, q, kv: 5 * jnp.tanh(s / 5))),
    "temperature of heads": (None, Score(lambda s, b, h, q, kv, t: s / t[h], 1 + SLOPES**2)),
    "table by distance": (
        masks.Causal(),
        Score(lambda s, b, h, q, kv, t: s + t[h, abs(q - kv) % 64], TABLE),
    ),
    "table by pair": (None, Score(lambda s, b, h, q, kv, t: s + t[h, (q % 8) * 8 + kv % 8], TABLE)),
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
    "bias": (masks.Causal(), Score(lambda s, b, h, q, kv, t: s + t[0, h, q, kv], BIAS)),
    "by key": (
        masks.Causal(),
        Score(lambda s, b, h, q, kv, t: s * t[h, kv % 64] + jnp.exp(-s * s), TABLE),
    ),
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
    "stick-breaking": (masks.Causal(), Score(lambda s, b, h, q, kv: -jax.nn.softplus(-s))),
    "classes": (
        (masks.Causal() | masks.Dilated(3)) & masks.Global(4),
        scores.SoftCap(3.0) >> scores.Alibi(SLOPES),
    ),
    "segments or causal": (
        masks.Segments(DOCS[:, :T], DOCS[:, :S]) | masks.Causal(),
        scores.SoftCap(4.0),
    ),
    "buckets": (masks.Dilated(2), scores.RelativeBias(TABLE[:, :16].T)),
    "array": (masks.Dilated(2) | masks.Causal(), scores.Bias(BIAS)),
}


def drawn(dtype: Any) -> list[Any]:
    return attention_arrays((B, T, S, N, K, H, H), dtype, seed=1)


def everything(mask: Any, score: Any, implementation: str, arrays: Any, **options: Any) -> Any:
    q, k, v, d_out = arrays
    options |= {"mask": mask, "implementation": implementation, "return_lse": True}

    def loss(q: Any, k: Any, v: Any, score: Any) -> Any:
        out, lse = jattn.attention(q, k, v, score=score, **options)
        return (out * d_out).sum() + jnp.where(jnp.isfinite(lse), lse, 0).sum(), (out, lse)

    jit = quick_jit if implementation == "reference" else users_jit
    run = jit(jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True, allow_int=True))
    gradients, (out, lse) = run(q, k, v, score)
    floats = [x for x in jax.tree.leaves(gradients) if x.dtype != jax.dtypes.float0]
    return [np.asarray(x) for x in (out, lse, *floats)]


def cast(tree: Any, dtype: Any) -> Any:
    return jax.tree.map(
        lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
    )


def assert_close(got: Any, want: Any, rtol: float) -> None:
    for x, y in zip(got, want, strict=True):
        finite = np.isfinite(y)
        np.testing.assert_array_equal(x[~finite], y[~finite])
        size = np.abs(y[finite]).max(initial=1e-3)
        np.testing.assert_allclose(x[finite], y[finite], rtol=0, atol=rtol * size)


@pytest.mark.one_in(24)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.default_tiles
def test_the_kernel_computes_what_the_function_says(name, dtype):
    mask, score = CALLS[name]
    arrays, score = drawn(dtype), cast(score, dtype)
    with jax.numpy_dtype_promotion("standard"):
        got, want = (everything(mask, score, name, arrays) for name in ("native", "reference"))
    assert_close(got, want, 1e-12 if dtype == "float64" else 2e-5)


@pytest.mark.default_tiles
@pytest.mark.one_in(2, slow=True)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_numbers_of_another_width_than_the_scores(dtype):
    other = jnp.float64 if dtype == "float32" else jnp.float32
    words = jnp.asarray(RNG.integers(-(2**60), 2**60, 64), jnp.int64)
    mask = Predicate(
        lambda b, h, q, kv: (words[(q * kv) % 64] // 3 + words[q % 64] > kv) | (q == 3)
    )

    def bend(s: Any, b: Any, h: Any, q: Any, kv: Any, slopes: Any, table: Any) -> Any:
        wide = jnp.tanh(s.astype(other) * slopes[h]) * slopes[kv % N]
        return s + wide + table[h, (q * 5 + kv) % 64] / 3 * (q % 7) + 0.001 * (q * kv % 11)

    score = Score(bend, SLOPES.astype(other), TABLE.astype(other))
    arrays = drawn(dtype)
    with jax.numpy_dtype_promotion("standard"):
        got, want = (everything(mask, score, name, arrays) for name in ("native", "reference"))
    assert [x.dtype for x in got[-2:]] == [other] * 2
    assert_close(got, want, 2e-5)


@pytest.mark.default_tiles
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_masked_poison_reaches_nobody(poison):
    mask = Predicate(lambda b, h, q, kv: (q >= kv) & (kv != 7) & (q != 9))
    score = Score(lambda s, b, h, q, kv: 5 * jnp.tanh(s / 5))
    q, k, v, d_out = drawn("float32")
    clean = everything(mask, score, "native", (q, k, v, d_out))
    bad = (q.at[:, 9].set(poison), k.at[:, 7].set(poison), v.at[:, 7].set(poison), d_out)
    for x, y in zip(everything(mask, score, "native", bad), clean, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.slow
@pytest.mark.default_tiles
def test_dropout_positions_and_maps():
    mask, score = CALLS["documents given"][0] & CAUSAL, CALLS["slopes"][1]
    q, k, v, d_out = drawn("float32")
    options: dict[str, Any] = {"dropout_rate": 0.3, "dropout_key": jax.random.key(3)}
    options["q_positions"] = jnp.arange(T, dtype=jnp.int32)[::-1]
    options["kv_positions"] = (jnp.arange(S, dtype=jnp.int32) * 7) % 190
    with jax.numpy_dtype_promotion("standard"):
        got, want = (
            everything(mask, score, name, (q, k, v, d_out), **options)
            for name in ("native", "reference")
        )
        assert_close(got, want, 2e-5)

        def run(name: str) -> Any:
            single = lambda q, k, v, m: jattn.attention(  # noqa: E731
                q, k, v, mask=mask, score=Score(score.fn, m), implementation=name
            )
            stacked = (jnp.stack([x, 2 * x]) for x in (q, k, v, SLOPES))
            return np.asarray(users_jit(jax.vmap(single))(*stacked))

        np.testing.assert_allclose(run("native"), run("reference"), atol=2e-5)


@pytest.mark.one_in(3, slow=True)
@pytest.mark.default_tiles
@pytest.mark.parametrize("shared", ["none", "keys", "queries"])
def test_under_shard_map(shared):
    mesh = jax.make_mesh((4, 2), ("rows", "spare"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    size = {"q": 2 if shared == "queries" else 8, "k": 2 if shared == "keys" else 8}
    shapes = [(n, 90, N, 16) for n in (size["q"], size["k"], size["k"], 8)]
    q, k, v, d_out = normal_arrays(*shapes, dtype="float32", seed=2)
    over = {n: P() if n == 2 else P("rows") for n in (2, 8)}
    specs = over[size["q"]], over[size["k"]], over[size["k"]], P()

    def gradients(implementation: str) -> Any:
        def local(q: Any, k: Any, v: Any, slopes: Any) -> Any:
            bent = Score(lambda s, b, h, q, kv, m: s + m[h] * (kv - q) + jnp.tanh(s * m[0]), slopes)
            mask = Predicate(lambda b, h, q, kv: (q >= kv) & (q - kv < 40))
            return jattn.attention(q, k, v, mask=mask, score=bent, implementation=implementation)

        mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P("rows"))
        loss = lambda *arrays: (mapped(*arrays) * d_out).sum()  # noqa: E731
        d = users_jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(q, k, v, SLOPES)
        return [np.asarray(x) for x in d]

    with jax.numpy_dtype_promotion("standard"):
        assert_close(gradients("native"), gradients("blockwise"), 2e-5)


@pytest.mark.default_tiles
def test_long_sequences_skip_what_is_empty():
    q, k, v = (jnp.asarray(RNG.normal(size=(1, 2300, 2, 16)), jnp.float32) for _ in range(3))
    mask = Predicate(lambda b, h, q, kv: (q >= kv) & (q - kv < 200))
    whole = masks.Causal() & masks.Window(left=199)
    run = lambda mask: users_jit(  # noqa: E731
        lambda q, k, v: jattn.attention(q, k, v, mask=mask, implementation="native")
    )(q, k, v)
    np.testing.assert_allclose(run(mask), run(whole), atol=2e-6)
    assert jattn.explain(q, k, v, mask=mask)["native"] is None


def test_unsupported_functions_have_a_reason():
    q = jnp.ones((1, 1200, 1, 8))
    loop = Predicate(
        lambda b, h, q, kv: jax.lax.while_loop(lambda x: x > 3, lambda x: x - 4, q) == kv
    )
    assert "while" in str(jattn.explain(q, q, q, mask=loop)["native"])
    long = lambda s, *at: functools.reduce(lambda x, n: x * 0.5 + n, range(200), s)  # noqa: E731
    assert "200 operations in a row" in str(jattn.explain(q, q, q, score=long)["native"])
    few = jattn.explain(q[:, :32], q[:, :32], q[:, :32], mask=CAUSAL)["native"]
    assert few is not None and "too few" in few


def test_a_rule_that_cannot_be_compiled_leaves_the_call_to_the_next(monkeypatch):
    """Forward and backward; the reason is shown; a named kernel raises it; it is tried once."""
    tries = []

    def failing(text: str, dtype: str) -> Any:
        tries.append(text)
        raise compiler.BuildError("the compiler is on strike")

    monkeypatch.setattr(compiler, "load_rule", failing)
    q = jnp.asarray(RNG.normal(size=(1, 40, 2, 8)), jnp.float32)
    mask = Predicate(lambda b, h, q, kv: (q >= kv) & ((q + kv) % 11 != 5))

    def loss(implementation: str | None) -> Any:
        attend = functools.partial(jattn.attention, mask=mask, implementation=implementation)
        return quick_jit(jax.value_and_grad(lambda q: (attend(q, q, q) ** 2).sum()))(q)

    with tuning.using(generated_pairs=0):
        assert jattn.explain(q, q, q, mask=mask)["native"] is None
        got, want = loss(None), loss("blockwise")
        jax.tree.map(np.testing.assert_array_equal, got, want)
        assert jattn.explain(q, q, q, mask=mask)["native"] == "the compiler is on strike"
        with pytest.raises(NotImplementedError, match="'native': the compiler is on strike"):
            loss("native")
    assert len(tries) == 1


def library_of(text: str, tmp_path: Path) -> ctypes.CDLL:
    (source := tmp_path / "x.cc").write_text(text)
    command = [*compiler.compiler(), "-shared", "-fPIC", str(source), "-o", str(tmp_path / "x.so")]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(tmp_path / "x.so"))


FORWARD = 'extern "C" void jattn_rule_forward() {}\n'


@pytest.mark.parametrize(("text", "modifies"), [("", False), ("", True), (FORWARD, True)])
def test_a_rule_without_its_functions_is_a_reason(monkeypatch, tmp_path, text, modifies):
    empty = library_of(text, tmp_path)
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
    q = jnp.asarray(RNG.normal(size=(1, 40, 2, 8)), jnp.float32)

    def program(n: int, implementation: str | None) -> Any:
        mask = Predicate(lambda b, h, q, kv: (q >= kv) & ((q + kv) % 13 != n))
        attend = functools.partial(jattn.attention, mask=mask, implementation=implementation)
        return quick_jit(jax.value_and_grad(lambda q: (attend(q, q, q) ** 2).sum())), mask

    with tuning.using(generated_pairs=0):
        early, _ = program(0, "native")
        first = early(q)
        program(1, "native")[0](q)
        run, mask = program(2, None)
        got, want = run(q), program(2, "blockwise")[0](q)
        jax.tree.map(np.testing.assert_array_equal, got, want)
        reason = jattn.explain(q, q, q, mask=mask)["native"]
        assert "compiled functions 2 times, as often as it can" in str(reason)
        with pytest.raises(NotImplementedError, match="should be operands"):
            program(2, "native")[0](q)
        program(1, "native")[0](q)
        jax.tree.map(np.testing.assert_array_equal, early(q), first)
    assert len(library._rules) == 2


def test_a_program_whose_rule_a_process_does_not_have_is_an_error(monkeypatch):
    monkeypatch.setattr(library, "add_rule", lambda *_: 12345)
    q = jnp.asarray(RNG.normal(size=(1, 40, 2, 8)), jnp.float32)
    mask = Predicate(lambda b, h, q, kv: (q >= kv) & ((q + kv) % 17 != 3))
    with tuning.using(generated_pairs=0):
        run = jax.jit(lambda q: jattn.attention(q, q, q, mask=mask, implementation="native"))
        with pytest.raises(jax.errors.JaxRuntimeError, match="has not compiled the functions"):
            jax.block_until_ready(run(q))


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
        self.rules: list[Any] = []
        self.operands: list[list[np.ndarray]] = []
        for n, function in enumerate(functions):
            spec = made(shapes, score=Score(function)).spec
            try:
                rule: Any = generator.generate(spec, self.dtype, gradients=False)
            except NotImplementedError:
                self.rules.append(None)
                self.operands.append([])
                continue
            self.rules.append(rule)
            arrays = generator.arrays(spec, shapes, self.dtype)
            self.operands.append([np.asarray(x) for x in arrays])
            text = rule.text.replace("jattn_rule_forward", f"forward_{n}")
            text = text.replace("jattn_rule_backward", f"backward_{n}")
            texts.append(f"namespace rule{n} {{\n{text}}}\n")
        self.library = compiler.load_rule("\n".join(texts), dtype)

    def _lanes(self, array: Any) -> tuple[np.ndarray, Any]:
        """A copy `[S, T]` whose rows are multiples of eight numbers, and its address."""
        lanes = np.zeros((self.S, -(-self.T // 8) * 8), self.dtype)
        lanes[:, : self.T] = array
        return lanes, ctypes.c_void_p(lanes.ctypes.data)

    def _place(self, n: int, width: int) -> Any:
        pointers = (ctypes.c_void_p * 40)(*(x.ctypes.data for x in self.operands[n]))
        place = _Place(0, self.T, width, 0, self.S, self.T, self.S, pointers, pointers)
        return ctypes.byref(place)

    def forward(self, n: int, scores: Any) -> np.ndarray:
        """Returns the new scores `[S, T]` of function n."""
        lanes, address = self._lanes(scores)
        place = self._place(n, lanes.shape[1])
        getattr(self.library, f"forward_{n}")(place, address, ctypes.c_bool(False))
        return lanes[:, : self.T]

    def backward(self, n: int, scores: Any, cotangent: Any) -> np.ndarray:
        """Returns the cotangents `[S, T]` of the scores of function n."""
        (lanes, scores_at), (back, back_at) = self._lanes(scores), self._lanes(cotangent)
        getattr(self.library, f"backward_{n}")(self._place(n, lanes.shape[1]), scores_at, back_at)
        return back[:, : self.T]


@pytest.mark.parametrize("count", [20, pytest.param(2000, marks=pytest.mark.exhaustive)])
def test_random_score_functions(count):
    functions: list[Any] = []

    @settings(max_examples=count, phases=[Phase.generate])
    @given(expressions_of("float", 4, True))
    def collect(function: Any) -> None:
        functions.append(function)

    collect()
    for start in range(0, count, 200):
        check_functions(functions[start : start + 200])


def check_functions(functions: list[Any]) -> None:
    score, cotangent = np.random.default_rng(0).normal(size=(2, SIDE, SIDE)) * [[[3]], [[1]]]
    places = jnp.arange(SIDE, dtype=jnp.int32)
    with jax.numpy_dtype_promotion("standard"):
        scorers = [lambda s, b, h, q, kv, f=f: f(q, kv, s) + 0 * s for f in functions]
        compiled = CompiledScores(scorers, SIDE, SIDE, "float64")
        rules = [(n, rule) for n, rule in enumerate(compiled.rules) if rule is not None]
        assert len(rules) > 0.9 * len(functions)
        for n, rule in rules:
            function = lambda s, n=n: functions[n](places[:, None], places[None], s) + 0 * s  # noqa: E731
            want, d_score = out_and_gradients(
                function, [jnp.asarray(score)], jnp.asarray(cotangent)
            )
            assert_alike(compiled.forward(n, score.T).T, want, rule.text)
            if rule.modifies:
                assert_alike(compiled.backward(n, score.T, cotangent.T).T, d_score, rule.text)


def assert_alike(got: np.ndarray, want: Any, text: str) -> None:
    usual = np.abs(want) < 1e100
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want), err_msg=text)
    np.testing.assert_allclose(got[usual], want[usual], rtol=1e-9, atol=1e-9, err_msg=text)


FUNCTIONS = {
    "exp": (jnp.exp, np.exp),
    "log": (jnp.log, np.log),
    "log1p": (jnp.log1p, np.log1p),
    "expm1": (jnp.expm1, np.expm1),
    "tanh": (jnp.tanh, np.tanh),
    "logistic": (jax.nn.sigmoid, lambda x: 1 / (1 + np.exp(-x))),
    "sqrt": (jnp.sqrt, np.sqrt),
    "rsqrt": (jax.lax.rsqrt, lambda x: 1 / np.sqrt(x)),
    "abs": (jnp.abs, np.abs),
    "sign": (jnp.sign, np.sign),
    "floor": (jnp.floor, np.floor),
    "ceil": (jnp.ceil, np.ceil),
    "square": (jnp.square, np.square),
    "cube": (lambda x: x**3, lambda x: x**3),
    "exp2": (jnp.exp2, np.exp2),
    "sin": (jnp.sin, np.sin),
}


EXPONENTS = [*range(-5, 8), 31, -64, 2**31 - 1, -(2**31), 2**40 + 1, 2**62 + 3, -(2**62)]


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
        got = compiled.forward(number, x), compiled.backward(number, x, cotangent)
        # XLA has no denormal numbers.
        assert_trees_close(got, want, rtol=8 * eps, atol=1e-37, err_msg=f"{n}")


def test_powers_beyond_all_bounds_are_a_reason():
    q = jnp.ones((1, 1200, 1, 8))
    for n in (2**63, -(2**63), 2**70):
        score = lambda s, *at, n=n: jax.lax.integer_pow(s, n)  # noqa: E731
        assert "no powers from 2**63 on" in str(jattn.explain(q, q, q, score=score)["native"])


INTEGERS = {
    "sums": lambda x, y: x * y - x + -y,
    "quotients": lambda x, y: jax.lax.div(x, y) + jax.lax.rem(x, y),
    "floor": lambda x, y: x // y + x % y,
    "shifts": lambda x, y: (x << (abs(y) % 70)) + (x >> 5) + jax.lax.shift_right_logical(x, y % 9),
    "bits": lambda x, y: (x & y) ^ (~x | y),
    "chosen": lambda x, y: jnp.where(x < y, jnp.maximum(x, -y), jnp.clip(y, -(2**40), 2**40)),
    "signs": lambda x, y: abs(x) * jnp.sign(y) + (x.astype(jnp.float32) * 3e10).astype(jnp.int64),
}


@pytest.mark.one_in(2, slow=True)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_integers_of_64_bits(dtype):
    def of_places(f: Any, q: Any, kv: Any) -> Any:
        wide = q.astype(jnp.int64), kv.astype(jnp.int64)
        x, y = wide[0] * 123456789012 - wide[1], wide[1] * 98765432101 - wide[0] * 2**36
        return (f(x, y) % 100003).astype(dtype)

    scorers = [lambda s, b, h, q, kv, f=f: s + of_places(f, q, kv) for f in INTEGERS.values()]
    compiled = CompiledScores(scorers, 32, 40, dtype)
    q, kv = jnp.arange(32, dtype=jnp.int32), jnp.arange(40, dtype=jnp.int32)
    for n, (name, f) in enumerate(INTEGERS.items()):
        want = of_places(f, q[None, :], kv[:, None])
        np.testing.assert_array_equal(compiled.forward(n, np.zeros((40, 32))), want, err_msg=name)


def test_functions_of_float32():
    """Accurate to a few roundings, for numbers of every size, 0, infinities and NaN."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 48)) * 10.0 ** rng.uniform(-9, 4, (40, 48))
    x[0, :8] = [0.0, -0.0, np.inf, -np.inf, np.nan, 88.6, -103.0, 1.0]
    x = x.astype(np.float32)
    scorers = [lambda s, b, h, q, kv, f=f: f(s) for f, _ in FUNCTIONS.values()]
    compiled = CompiledScores(scorers, 48, 40, "float32")
    for n, (name, (_, true)) in enumerate(FUNCTIONS.items()):
        got = compiled.forward(n, x)
        with np.errstate(all="ignore"):
            want = true(x.astype(np.float64)).astype(np.float32)
        usual, inf = np.isfinite(want) & (np.abs(want) > 1e-37), np.isinf(want)
        tiny = ~usual & ~inf
        np.testing.assert_array_equal(np.isnan(got), np.isnan(want), err_msg=name)
        np.testing.assert_array_equal(got[inf], want[inf], err_msg=name)
        np.testing.assert_allclose(got[usual], want[usual], rtol=2e-6, err_msg=name)
        np.testing.assert_allclose(got[tiny], want[tiny], atol=1e-37, err_msg=name)
