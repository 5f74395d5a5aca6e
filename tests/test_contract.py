"""The contract: every implementation, on every case, in every dtype.

Errors against the float64 oracle on the same inputs may be at most twice those of the plain formula
in the same working precision, plus four units of rounding, under a ceiling that was measured once.
"""

import dataclasses
import functools
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn import masks, normalizers, scores, tuning
from jattn.normalizers import NormalizerFunction, PointwiseNormalizer
from jattn.scores import ScoreFunction
from tests import oracle
from tests.cases import (
    CASES,
    DTYPES,
    GENERAL,
    IMPLEMENTATIONS,
    ONE_OF_EACH_NORMALIZER,
    CallCase,
    CaseInputs,
    inputs,
)
from tests.conftest import out_and_gradients, quick_jit, users_jit
from tests.oracle import error
from tests.test_dropout import decisions


# Worst errors measured over all cases: 2.2e-15, 1.1e-6, 3.6e-3, 4.7e-4 (see `error`).
CEILINGS = {"float64": 1e-14, "float32": 2e-6, "bfloat16": 5e-3, "float16": 7e-4}

# Together these have every kind of array that a call can take.
VARIED = ("chain", "places_and_positions", "lengths_both", "predicate_operands", "dropout_masked")

# Compiled with all optimisations, which takes six times as long.
OPTIMISED = (*VARIED, "plain", "causal", "bias_dead_rows", "tiles")

every_implementation = pytest.mark.parametrize("implementation", GENERAL)
every_case = pytest.mark.parametrize("name", CASES)


class CaseResults(NamedTuple):
    """The results of a call: values, and gradients by the name of their input."""

    out: Any
    lse: Any
    gradients: dict[str, Any]


def random_key() -> jax.Array:
    return jax.random.key(20170612)


@functools.cache
def dropout_decisions(name: str) -> np.ndarray:
    """The library's decisions on dropout in a case, bool `[B, N, T, S]`, for the oracle."""
    batch, T, S, N, *_ = CASES[name].sizes
    return decisions(CASES[name].rate, math.prod(batch), N, T, S, random_key())


def problem_of(case: CallCase, x: CaseInputs) -> oracle.OracleProblem:
    """The oracle's view of a case, dropout included."""
    return case.problem(
        x, lambda pair: bool(dropout_decisions(case.name)[pair.b, pair.h, pair.i, pair.j])
    )


def on_device(x: CaseInputs) -> CaseInputs:
    return jax.device_put(x)


def attend(implementation: str, case: CallCase, x: CaseInputs, **options: Any) -> Any:
    options = {"dropout_key": random_key() if case.rate else None, **options}
    options["implementation"] = implementation
    return case.attend(x.q, x.k, x.v, x.parameters, x.operands, **options)


def everything(implementation: str, case: CallCase, x: CaseInputs, wrap=lambda f: f) -> CaseResults:
    """Returns values and all gradients, for cotangents of both results; `wrap` wraps the call."""

    def call(q: Any, k: Any, v: Any, parameters: Any) -> Any:
        return attend(implementation, case, x._replace(q=q, k=k, v=v, parameters=parameters))

    (out, lse), pull = jax.vjp(wrap(call), x.q, x.k, x.v, x.parameters)
    dq, dk, dv, d_parameters = pull((x.d_out, x.d_lse))
    return CaseResults(out, lse, {"q": dq, "k": dk, "v": dv, **d_parameters})


@functools.cache
def compiled(implementation: str, name: str, how: str = "quick") -> Any:
    """Compiles `everything` for one case, once for all tests."""
    function = functools.partial(everything, implementation, CASES[name])
    return quick_jit(function) if how == "quick" else users_jit(function)


def run(implementation: str, name: str, x: CaseInputs) -> CaseResults:
    """Returns NumPy arrays; some cases in float32 are compiled with all optimisations."""
    how = "full" if name in OPTIMISED and x.q.dtype == np.float32 else "quick"
    return jax.tree.map(np.asarray, compiled(implementation, name, how)(on_device(x)))


def named(backward: oracle.OracleGradients) -> dict[str, np.ndarray]:
    return {"q": backward.q, "k": backward.k, "v": backward.v, **backward.parameters}


def truth(case: CallCase, x: CaseInputs) -> CaseResults:
    problem = problem_of(case, x)
    d_out, d_lse = np.asarray(x.d_out, np.float64), np.asarray(x.d_lse, np.float64)
    forward, backward = oracle.attend(problem), oracle.gradients(problem, d_out, d_lse)
    return CaseResults(forward.out, forward.lse, named(backward))


@functools.cache
def exact_results(name: str, dtype: str, seed: int = 0) -> CaseResults:
    """The truth for the inputs of a case."""
    return truth(CASES[name], inputs(CASES[name], dtype, seed))


@functools.cache
def plain_errors(name: str, dtype: str, matrix_units: bool = False) -> dict[str, float]:
    """The worst errors of the plain formula, rounded to the dtype, over a few draws of inputs and
    both ways of writing gradients. With `matrix_units`, operands of products are rounded too."""
    case = CASES[name]
    working = np.float64 if dtype == "float64" else np.float32
    kind = DTYPES[dtype]
    measured = []
    for seed in range(4):
        x, exact = inputs(case, dtype, seed), exact_results(name, dtype, seed)
        products = kind if matrix_units else None
        forward, backwards = oracle.plain(problem_of(case, x), x.d_out, x.d_lse, working, products)
        for backward in backwards:
            gradients = {n: g.astype(kind) for n, g in named(backward).items()}
            measured.append(
                errors(CaseResults(forward.out.astype(kind), forward.lse, gradients), exact)
            )
    return {what: max(draw[what] for draw in measured) for what in measured[0]}


def errors(got: CaseResults, want: CaseResults) -> dict[str, float]:
    """The errors of out, of lse and the worst error of the gradients."""
    assert got.gradients.keys() == want.gradients.keys()
    return {
        "out": error(got.out, want.out),
        "lse": error(got.lse, want.lse),
        "gradients": max(error(got.gradients[name], x) for name, x in want.gradients.items()),
    }


def assert_close(got: CaseResults, want: CaseResults, tolerance: float) -> None:
    measured = errors(got, want)
    assert max(measured.values()) <= tolerance, measured


def assert_same(got: Any, want: Any) -> None:
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.mark.one_in(12)
@every_case
def test_the_oracles_gradients_agree_with_a_complex_step(name):
    case = CASES[name]
    x = inputs(case)
    problem = problem_of(case, x)
    _, along = directions(x, seed=1)
    by_formula = named(oracle.gradients(problem, x.d_out, x.d_lse))
    by_name = {n: along[n] for n in "qkv"} | along["parameters"]
    assert sum(np.sum(by_name[n] * by_formula[n]) for n in by_formula) == pytest.approx(
        oracle.slope(problem, along, x.d_out, x.d_lse), rel=1e-12, abs=1e-12
    )


def wrong_answers(case: CallCase, x: CaseInputs) -> dict[str, np.ndarray]:
    """Outputs of mistakes that attention libraries have made, where they make a difference."""
    problem = problem_of(case, x)
    _, _, S, N, K, H, _ = case.sizes
    changes: dict[str, dict[str, Any]] = {}
    if S > 1:
        changes["scale by the model width"] = {"scale": 1 / np.sqrt(N * H)}
    if S > 1 and 1 < K < N:
        order = [h % K for h in range(N)]  # every query head its own key head, dealt out in turn
        changes["tiled heads"] = {name: getattr(problem, name)[..., order, :] for name in "kv"}
    if case.mask is not None:
        changes["no mask"] = {"allowed": lambda pair: True}
    if "window" in case.name:
        shifted = lambda by: lambda pair: problem.allowed(pair._replace(kv=pair.kv + by))  # noqa: E731
        changes["window one to the left"] = {"allowed": shifted(1)}
        changes["window one to the right"] = {"allowed": shifted(-1)}
    changed = {label: dataclasses.replace(problem, **x) for label, x in changes.items()}
    return {label: oracle.attend(x).out for label, x in changed.items()}


# Mistakes that make no difference by the meaning of the case.
HARMLESS = {
    ("full", "no mask"),
    ("decode", "no mask"),
    ("sparsemax_decode", "no mask"),
    ("tiles_entmax", "scale by the model width"),  # 0.316, and 0.3 is right
    ("window_self", "scale by the model width"),
}
# The right answer is nothing, or zero.
NOTHING_TO_GET_WRONG = ("empty_batch", "no_keys", "no_keys_in_arrays", "no_queries", "empty")


@pytest.mark.one_in(8)
@pytest.mark.parametrize("name", [name for name in CASES if name not in NOTHING_TO_GET_WRONG])
def test_the_inputs_tell_wrong_answers_from_the_right_one(name):
    """Also in bfloat16, whose ceiling is the highest: errors are at least 20 times that."""
    case, x = CASES[name], inputs(CASES[name], "bfloat16")
    right = oracle.attend(problem_of(case, x)).out
    for label, wrong in wrong_answers(case, x).items():
        noticed = error(wrong, right) > 20 * CEILINGS["bfloat16"]
        assert noticed is ((name, label) not in HARMLESS), label


BASES = masks.Mask, ScoreFunction, NormalizerFunction


def leaves_of(value: Any) -> set[type]:
    """The classes of the masks, score functions or normalizers in an expression."""
    if not isinstance(value, BASES):
        return set()
    return {type(value)}.union(*map(leaves_of, vars(value).values()))


def public_rules(*modules: Any) -> set[type]:
    """The classes of the masks, score functions and normalizers that these modules define."""
    values = [value for module in modules for value in vars(module).values()]
    rules = {x for x in values if isinstance(x, type) and issubclass(x, BASES)}
    return rules - {*BASES, PointwiseNormalizer}


def test_the_table_has_every_mask_every_score_function_and_every_normalizer():
    used: set[type] = {masks.Dense}
    for case in CASES.values():
        used = used.union(*map(leaves_of, case.rules(case.operands, case.parameters).values()))
    assert public_rules(masks, scores, normalizers) <= used


def _marks(implementation: str, name: str, dtype: str) -> Any:
    """A fifth of the cases runs before a commit, half in float64, where mistakes show most, and one
    case of each normalizer; a fourteenth is slow. One in twelve runs by the formula, which has no
    code for single masks and scores."""
    place = list(CASES).index(name)
    narrow = ("float32", "bfloat16", "float16")[place // 4 % 3]
    usual = dtype == ("float64" if place // 2 % 2 else narrow)
    optimised = dtype == "float32" and name in OPTIMISED
    if implementation == "reference":
        return () if usual and place % 12 == 0 else pytest.mark.exhaustive
    chosen = place % 5 == 0 or name in (*ONE_OF_EACH_NORMALIZER, "running_function")
    quick = (usual and chosen) or (optimised and name in VARIED)
    often = optimised or (usual and place % 14 == 3)
    return () if quick else pytest.mark.slow if often else pytest.mark.exhaustive


TYPED = [
    pytest.param(*call, marks=_marks(*call), id="-".join(call))
    for call in itertools.product(GENERAL, CASES, DTYPES)
]


def assert_accurate(
    name: str, dtype: str, got: CaseResults, ceilings: Any = CEILINGS, matrix_units: bool = False
) -> None:
    """Errors are at most twice those of the plain formula, and dtypes are those of the inputs."""
    x = inputs(CASES[name], dtype)
    measured = errors(got, exact_results(name, dtype))
    plain = plain_errors(name, dtype, matrix_units)
    working = "float64" if dtype == "float64" else "float32"
    for what, plain_error in plain.items():
        limit = 2 * plain_error + 4 * float(jnp.finfo(working).eps)
        ceiling = ceilings[working if what == "lse" else dtype]
        assert measured[what] <= min(limit, ceiling), (what, measured, plain)
    assert (got.out.dtype, got.lse.dtype) == (x.q.dtype, working)
    for label, gradient in got.gradients.items():
        assert gradient.dtype == (x._asdict() | x.parameters)[label].dtype, label


@pytest.mark.parametrize(("implementation", "name", "dtype"), TYPED)
def test_values_and_gradients(implementation, name, dtype):
    results = run(implementation, name, inputs(CASES[name], dtype))
    assert_accurate(name, dtype, results)
    rows, _ = dead_places(name)  # their lse is compared with -inf
    assert not results.out[rows].any() and not results.gradients["q"][rows].any()


@pytest.mark.one_in(12)
@pytest.mark.parametrize("name", CASES)
def test_weights_and_scores(name):
    case = CASES[name]
    x = inputs(case)
    want = oracle.attend(dataclasses.replace(problem_of(case, x), rate=0.0))

    @quick_jit
    def both(x: CaseInputs) -> Any:
        rules = case.rules(x.operands, x.parameters)
        weights = jattn.attention_weights(x.q, x.k, **rules)
        rules.pop("normalizer", None)
        return weights, jattn.attention_scores(x.q, x.k, **rules)

    weights, logits = both(on_device(x))
    assert error(weights, want.weights) <= 1e-14
    assert error(logits, want.scores) <= 1e-14
    assert not np.any(np.asarray(weights)[~np.isfinite(want.scores)])


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("dtype", "parameter_dtype"),
    [("float32", "bfloat16"), ("bfloat16", "float32"), ("float16", "float64")],
)
@pytest.mark.parametrize("implementation", GENERAL)
def test_parameters_may_have_another_dtype(implementation, dtype, parameter_dtype):
    case = CASES["bias_by_head"]
    x = inputs(case, dtype)
    mixed = x._replace(parameters=inputs(case, parameter_dtype).parameters)
    got = jax.tree.map(np.asarray, compiled(implementation, case.name, "quick")(on_device(mixed)))
    exact = truth(case, mixed)
    assert got.out.dtype == x.q.dtype
    assert got.lse.dtype == (jnp.float64 if dtype == "float64" else jnp.float32)
    assert got.gradients["bias"].dtype == DTYPES[parameter_dtype]
    assert max(errors(got, exact).values()) <= max(CEILINGS[dtype], CEILINGS[parameter_dtype])


@every_implementation
def test_precision_reaches_the_products(implementation):
    x = on_device(inputs(CASES["plain"], "float32"))

    def highest(**options: Any) -> int:
        options["return_lse"] = False
        call = functools.partial(attend, implementation, CASES["plain"], **options)
        return jax.jit(call).lower(x).as_text().count("HIGHEST")

    for precision in ("highest", jax.lax.Precision.HIGHEST):
        assert highest(precision=precision) >= 2
    with jax.default_matmul_precision(None):
        assert highest() == 0
    with jax.default_matmul_precision("highest"):
        assert highest() >= 2


POISONS = (np.nan, np.inf, -np.inf, 1e38)


@functools.cache
def allowed_in(name: str) -> np.ndarray:
    return oracle.allowed_everywhere(problem_of(CASES[name], inputs(CASES[name])))


@functools.cache
def dead_places(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Queries without keys `[*B, T, N]` and keys without queries `[*B, S, K]`."""
    batch, T, S, N, K, _, _ = CASES[name].sizes
    allowed = allowed_in(name)
    rows = ~allowed.any(axis=-1)
    columns = ~allowed.reshape(math.prod(batch), K, N // K, T, S).any(axis=(2, 3))
    return (
        np.swapaxes(rows, 1, 2).reshape(*batch, T, N),
        np.swapaxes(columns, 1, 2).reshape(*batch, S, K),
    )


def poisoned(name: str, x: CaseInputs, poison: float) -> CaseInputs:
    """The case's inputs with this number in the queries and keys that no pair needs."""
    rows, columns = dead_places(name)
    q, k, v = x.q.copy(), x.k.copy(), x.v.copy()
    q[rows], k[columns], v[columns] = poison, poison, poison
    return x._replace(q=q, k=k, v=v)


def seen_by_some(name: str) -> np.ndarray:
    """Keys `[S]` that some queries attend to and others do not."""
    allowed = allowed_in(name)
    return np.asarray(allowed.any(axis=(0, 1, 2)) & ~allowed.all(axis=(0, 1, 2)))


OFTEN_FIRST = sorted(CASES, key=lambda name: name not in OPTIMISED)  # of which programs are shared
WITH_DEAD_PLACES = [name for name in OFTEN_FIRST if any(x.any() for x in dead_places(name))]
ROUNDS_APART = ("blockwise",)
"""These round a single tile differently if it has numbers that are not finite, with JAX 0.12 and on
processors without AVX-512."""
ROUNDING = 8 * float(np.finfo(np.float32).eps)
WITH_HIDDEN_KEYS = [name for name in OFTEN_FIRST if seen_by_some(name).any()]


@pytest.mark.one_in(48)
@pytest.mark.parametrize("name", WITH_DEAD_PLACES)
@pytest.mark.parametrize("implementation", GENERAL)
def test_poison_in_what_is_masked_changes_nothing(implementation, name):
    """Not a bit, compiled with all optimisations; at most rounding for `ROUNDS_APART`."""
    program = compiled(implementation, name, "full")

    run = lambda x: jax.tree.map(np.asarray, program(on_device(x)))  # noqa: E731
    x = inputs(CASES[name], "float32")
    clean = run(x)
    rows, columns = dead_places(name)
    for poison in POISONS:
        got = run(poisoned(name, x, poison))
        if implementation in ROUNDS_APART:
            assert_close(got, jax.tree.map(np.float64, clean), ROUNDING)
        else:
            assert_same(got, clean)
        assert not got.gradients["q"][rows].any()
        assert not got.gradients["k"][columns].any()
        assert not got.gradients["v"][columns].any()


@pytest.mark.one_in(48)
@pytest.mark.parametrize("name", WITH_HIDDEN_KEYS)
@pytest.mark.parametrize("implementation", GENERAL)
def test_poison_reaches_only_who_attends_to_it(implementation, name):
    check_reach_of_poison(
        functools.partial(run, implementation), name, implementation not in ROUNDS_APART
    )


def check_reach_of_poison(run: Any, name: str, exact: bool = True) -> None:
    """Poison in a key changes only the results of queries that attend to it."""
    x = inputs(CASES[name], "float32")
    clean = run(name, x)
    j = int(np.flatnonzero(seen_by_some(name))[-1])
    untouched = ~allowed_in(name)[..., j]  # [B, N, T]
    by_head = untouched.reshape(clean.lse.shape)
    by_query = np.swapaxes(untouched, 1, 2).reshape(clean.out.shape[:-1])
    parts = lambda x: (x.out[by_query], x.lse[by_head], x.gradients["q"][by_query])  # noqa: E731
    for poison in POISONS:
        k, v = x.k.copy(), x.v.copy()
        k[..., j, :, :], v[..., j, :, :] = poison, poison
        got = run(name, x._replace(k=k, v=v))
        if np.isnan(poison) or poison == np.inf:
            assert np.isnan(got.out[~by_query]).all()
        for result, wanted in zip(parts(got), parts(clean), strict=True):
            if exact:
                np.testing.assert_array_equal(result, wanted)
            else:
                assert error(result, wanted.astype(np.float64)) <= ROUNDING


@pytest.mark.one_in(2)
@every_implementation
@pytest.mark.parametrize("name", ["bias_dead_rows", "cap_then_bias", "bias_then_cap"])
def test_poison_in_a_bias_where_it_is_masked(implementation, name):
    x = inputs(CASES[name], "float32")
    clean = run(implementation, name, x)
    hidden = ~allowed_in(name)
    for poison in (*POISONS, float(np.finfo(np.float32).min)):
        bias = np.where(hidden, np.float32(poison), x.parameters["bias"])
        got = run(implementation, name, x._replace(parameters={"bias": bias}))
        assert_same(got, clean)
        assert not got.gradients["bias"][hidden].any()


@pytest.mark.one_in(2)
@every_implementation
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sums_over_many_keys_do_not_stall(implementation, dtype):
    """A sum of ones in bfloat16 stops at 256."""
    kind, keys = DTYPES[dtype], 4096
    ones = jnp.ones((1, keys, 1, 1), kind)
    for T, S in ((8, keys), (keys, 4)):
        q, k = ones[:, :T], ones[:, :S]
        call = functools.partial(jattn.attention, q, k, implementation=implementation)
        out, dv = (np.asarray(x, np.float64) for x in out_and_gradients(call, [k], q))
        np.testing.assert_array_equal(out, np.ones((1, T, 1, 1)))
        np.testing.assert_array_equal(dv, T / S)


@every_implementation
def test_weights_keep_their_digits(implementation):
    """If weights were rounded to 16 bits, most would be 0.4 % less, and so the mean of ones."""
    q, k = jnp.zeros((1, 20, 1, 4), jnp.bfloat16), jnp.zeros((1, 60, 1, 4), jnp.bfloat16)
    bias = jnp.full((1, 1, 1, 60), math.log(0.5 * 1.0038), jnp.float32).at[..., ::5].set(0)
    run = functools.partial(jattn.attention, implementation=implementation)
    out = run(q, k, k + 1, score=jattn.scores.Bias(bias))
    np.testing.assert_array_equal(np.asarray(out, np.float32), 1)


@pytest.mark.one_in(16)
@pytest.mark.parametrize("name", [*VARIED, "sigmoid", "sparsemax", "forgetting"])
@pytest.mark.parametrize("how", ["eager", "checkpoint"])
@pytest.mark.parametrize("implementation", GENERAL)
def test_eager_and_checkpoint_change_nothing(implementation, how, name):
    x = inputs(CASES[name])
    call = functools.partial(everything, implementation, CASES[name])
    changed = call if how == "eager" else quick_jit(functools.partial(call, wrap=jax.checkpoint))
    assert_close(changed(on_device(x)), run(implementation, name, x), 1e-14)


MAPPED = [
    CaseInputs._fields,
    *map(str.split, ["q", "k v", "parameters", "operands", "q operands d_lse"]),
]


@pytest.mark.one_in(16)
@pytest.mark.parametrize(
    "name", ["chain", "places_and_positions", "dropout_masked", "sigmoid", "entmax", "forgetting"]
)
@pytest.mark.parametrize("fields", MAPPED)
@pytest.mark.parametrize("implementation", GENERAL)
def test_vmap_is_a_loop(implementation, name, fields):
    assert_vmap_is_a_loop(implementation, name, tuple(fields))


def assert_vmap_is_a_loop(implementation: str, name: str, fields: tuple[str, ...]) -> None:
    """Checks that a case mapped over these fields of the inputs is the case for each alone."""
    several = [on_device(inputs(CASES[name], seed=seed)) for seed in range(3)]
    turn = lambda by: {n: jnp.roll(a, by, axis=-1) for n, a in several[0].operands.items()}  # noqa: E731
    several = [x._replace(operands=turn(seed)) for seed, x in enumerate(several)]
    several = [several[0]._replace(**{n: getattr(x, n) for n in fields}) for x in several]
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *several)
    shared = several[0]._replace(**{n: getattr(stacked, n) for n in fields})
    axes = CaseInputs._make(0 if n in fields else None for n in CaseInputs._fields)
    single = functools.partial(everything, implementation, CASES[name])
    mapped = quick_jit(jax.vmap(single, (axes,)))(shared)
    for place, x in enumerate(several):
        got = jax.tree.map(lambda a, place=place: a[place], mapped)
        assert_close(got, compiled(implementation, name)(x), 1e-14)


@pytest.mark.one_in(2)
@every_implementation
def test_nested_vmap_is_a_loop_in_a_loop(implementation):
    case = CASES["lengths_both"]
    x = on_device(inputs(case))
    q = jnp.stack([x.q, x.q[::-1]])
    k, v = (jnp.stack([a, 2 * a, -a], axis=-1) for a in (x.k, x.v))
    lengths = jnp.array([[1, 2], [7, 0], [3, 3]])

    def call(q: Any, k: Any, v: Any, kv_lengths: Any) -> Any:
        operands = {**x.operands, "kv_lengths": kv_lengths}
        return attend(implementation, case, x._replace(q=q, k=k, v=v, operands=operands))

    inner = jax.vmap(call, (None, -1, -1, 0), out_axes=1)
    mapped = quick_jit(jax.vmap(inner, (0, None, None, None)))(q, k, v, lengths)
    single = quick_jit(call)
    for i, j in np.ndindex(2, 3):
        want = single(q[i], k[..., j], v[..., j], lengths[j])
        for got, expected in zip(mapped, want, strict=True):
            assert error(got[i, :, j], expected) <= 1e-14


@every_implementation
def test_vmap_over_keys_of_dropout_is_a_loop(implementation):
    case = CASES["dropout"]
    x = on_device(inputs(case))
    keys = jax.random.split(random_key(), 3)
    call = lambda key: attend(implementation, case, x, dropout_key=key)[0]  # noqa: E731
    mapped, single = quick_jit(jax.vmap(call))(keys), quick_jit(call)
    for out, key in zip(mapped, keys, strict=True):
        assert error(out, single(key)) <= 1e-14
    assert error(mapped[0], mapped[1]) > 0.01


@every_implementation
def test_traced_once(implementation, monkeypatch):
    traces = []

    rule = lambda b, h, q, kv, offset: kv <= q + offset  # noqa: E731
    shift = lambda score, b, h, q, kv, table: score + table[kv]  # noqa: E731

    def options(seed: int) -> dict[str, Any]:
        x = on_device(inputs(CASES["plain"], seed=seed))
        mask = masks.Predicate(rule, jnp.int32(seed)) & (
            masks.Window(left=3) | ~masks.Lengths(kv=jnp.array([seed, 3]))
        )
        score = scores.Score(shift, x.v[0, :, 0, 0]) >> scores.SoftCap(3.0)
        return {"key": x.k, "value": x.v, "mask": mask, "score": score, "scale": 0.5}

    call = functools.partial(jattn.attention, implementation=implementation)
    gradient = jax.grad(lambda q, options: jnp.sum(call(q, **options)))
    q = on_device(inputs(CASES["plain"])).q
    for kind in (masks.Predicate, scores.Score):
        ask = kind._scalar
        monkeypatch.setattr(kind, "_scalar", lambda *x, ask=ask: traces.append(x) or ask(*x))
    for function in (lambda q, options: call(q, **options), gradient):
        first = function(q, options(0))
        compiled_once = len(traces)
        assert compiled_once > 0
        assert error(function(q, options(1)), first) > 0.01
        function(q, options(2))
        assert len(traces) == compiled_once


def directions(x: CaseInputs, seed: int = 5) -> tuple[Any, dict[str, Any]]:
    """A random direction, for JAX and for the oracle."""
    rng = np.random.default_rng(seed)
    along: dict[str, Any] = {n: rng.standard_normal(getattr(x, n).shape) for n in "qkv"}
    along["parameters"] = {n: rng.standard_normal(p.shape) for n, p in x.parameters.items()}
    return tuple(jax.tree.map(jnp.asarray, along[n]) for n in (*"qkv", "parameters")), along


@pytest.mark.one_in(6)
@every_implementation
@pytest.mark.parametrize(
    "name",
    [
        *("chain", "bias_dead_rows", "relative_bias", "dropout_masked"),
        *("sigmoid", "entmax", "top_k_dropout", "stick_breaking", "forgetting"),
    ],
)
def test_forward_mode_and_second_order(implementation, name):
    case = CASES[name]
    x = inputs(case)
    device = on_device(x)
    tangents, along = directions(x)

    def total(q: Any, k: Any, v: Any, parameters: Any) -> Any:
        replaced = device._replace(q=q, k=k, v=v, parameters=parameters)
        out, lse = attend(implementation, case, replaced)
        lse = jnp.where(jnp.isfinite(lse), lse, 0)
        return jnp.sum(out * device.d_out) + jnp.sum(lse * device.d_lse)

    @quick_jit
    def both(arguments: Any) -> Any:
        _, forward = jax.jvp(total, arguments, tangents)
        _, second = jax.jvp(jax.grad(total, (0, 1, 2, 3)), arguments, tangents)
        return forward, second

    arguments = (device.q, device.k, device.v, device.parameters)
    forward, (d2q, d2k, d2v, d2_parameters) = both(arguments)
    problem = problem_of(case, x)
    assert float(forward) == pytest.approx(
        oracle.slope(problem, along, x.d_out, x.d_lse), rel=1e-12
    )

    def moved(by: float) -> dict[str, np.ndarray]:
        parameters = {n: p + by * along["parameters"][n] for n, p in problem.parameters.items()}
        arrays: Any = {n: getattr(problem, n) + by * along[n] for n in "qkv"}
        changed = dataclasses.replace(problem, parameters=parameters, **arrays)
        return named(oracle.gradients(changed, x.d_out, x.d_lse))

    plus, minus = moved(1e-5), moved(-1e-5)
    for label, got in {"q": d2q, "k": d2k, "v": d2v, **d2_parameters}.items():
        assert error(got, (plus[label] - minus[label]) / 2e-5) <= 1e-7, label


@pytest.mark.one_in(8)
@every_case
def test_runs_or_gives_its_reason(name):
    case = CASES[name]
    x = on_device(inputs(case, "float32"))
    rules = case.rules(x.operands, x.parameters)
    rules |= {"dropout_rate": case.rate, "dropout_key": random_key() if case.rate else None}
    with tuning.using(generated_pairs=0):  # few pairs do not keep a named one from running
        reasons = jattn.explain(x.q, x.k, x.v, **rules)
    assert set(reasons) == set(IMPLEMENTATIONS)
    assert reasons["reference"] is None
    for implementation, reason in reasons.items():
        rules["implementation"] = implementation
        call = functools.partial(jattn.attention, x.q, x.k, x.v, **rules)
        if reason is None:
            assert jax.eval_shape(call).shape == x.d_out.shape
        else:
            with pytest.raises(NotImplementedError, match=implementation) as raised:
                call()
            assert str(reason) in str(raised.value)
