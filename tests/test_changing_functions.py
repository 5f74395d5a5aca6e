"""Functions of masks and scores mean what they mean when they are called: each row of `HOLDERS` is
a way to hold a number, which is changed between two calls."""

import dataclasses
import enum
import functools
import gc
import types
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jattn
from jattn import cache, call, masks, nn
from jattn.functions import snapshots
from jattn.functions.programs import TracedFunction
from jattn.masks import Predicate
from jattn.scores import Score
from tests.conftest import assert_trees_close, normal_arrays, out_and_gradients, quick_jit
from tests.test_users_functions import plain as formula


Use = Callable[..., Any]
Change = Callable[[Any], Any]
Holder = Callable[[Use], tuple[Any, Change]]
"""From a formula `use(number, *arguments)` it makes a function, and what changes the number that
the function reads."""

module = types.ModuleType("settings")  # as a user's module of settings
GLOBAL = 0
GLOBAL_LIST = [0]
GLOBAL_ARRAY = np.zeros(3, np.int32)


def holds(make: Callable[[], Any], read: Any, write: Any) -> Holder:
    """The function closes over an object and reads its number; `write` writes another to it."""

    def holder(use: Use) -> Any:
        box = make()
        return lambda *x: use(read(box), *x), functools.partial(write, box)

    return holder


def boxed(function: Callable[[Use, Any], Any], box: Any = None, write: Any = None) -> Holder:
    """The function is made of the formula and an object, by default a list; `write` writes the
    number, by default as the first item."""

    def holder(use: Use) -> Any:
        items = [0] if box is None else box
        return function(use, items), functools.partial(write or set_item(0), items)

    return holder


def replaced(make: Callable[[Any], Any], read: Any = lambda x: x) -> Holder:
    """The function closes over a variable that gets another value."""

    def holder(use: Use) -> Any:
        value: Any = None

        def change(number: Any) -> None:
            nonlocal value
            value = make(number)

        return lambda *x: use(read(value), *x), change

    return holder


class Plain:
    number: Any = 0


class Slots:
    __slots__ = ("number",)


@dataclasses.dataclass
class Data:
    """A dataclass, which has no hash, that can be called."""

    number: Any
    use: Use

    def __call__(self, *x: Any) -> Any:
        return self.use(self.number, *x)


class Level(enum.Enum):
    ONE = [0]  # noqa: RUF012


def own_attribute(use: Use) -> tuple[Any, Change]:
    def function(*x: Any) -> Any:
        return use(function.number, *x)  # pyright: ignore[reportFunctionMemberAccess]

    return function, functools.partial(set_number, function)


def calling(use: Use, helper: Callable[..., Any], *arguments: Any) -> Callable[..., Any]:
    return lambda *x: use(helper(*arguments), *x)


def of_data(function: Callable[[Data], Any]) -> Holder:
    return lambda use: (function(data := Data(0, use)), functools.partial(set_number, data))


def an_array(number: Any = 0) -> np.ndarray:
    return np.array([5, number, 7], np.int32)


def set_item(key: Any) -> Callable[[Any, Any], None]:
    return lambda box, new: box.__setitem__(key, new)


def set_number(box: Any, new: Any) -> None:
    box.number = new


def global_number(use: Use) -> Any:
    return lambda *x: use(GLOBAL, *x), functools.partial(globals().__setitem__, "GLOBAL")


def imported_inside(use: Use) -> Any:
    import tests.test_changing_functions as itself  # noqa: PLC0415

    def function(*x: Any) -> Any:
        import tests.test_changing_functions  # noqa: PLC0415

        return use(tests.test_changing_functions.GLOBAL, *x)

    return function, lambda new: setattr(itself, "GLOBAL", new)


def nested_closure(use: Use) -> Any:
    number: Any = None

    def change(new: Any) -> None:
        nonlocal number
        number = new

    outer = lambda: lambda: number  # noqa: E731
    return lambda *x: use(outer()(), *x), change


def defaults_replaced(use: Use) -> Any:
    def function(*x: Any, value: Any = 0) -> Any:
        return use(value, *x)

    return function, lambda new: setattr(function, "__kwdefaults__", {"value": new})


def lru_cached(use: Use) -> Any:
    box = [0]
    read = functools.lru_cache(lambda: box[0])
    return lambda *x: use(read(), *x), lambda new: (set_item(0)(box, new), read.cache_clear())


def inside_lax(use: Use, box: Any) -> Any:
    """Reads within an inner program."""
    return lambda *x: jax.lax.cond(x[-1] >= 0, lambda: use(box, *x), lambda: use(box, *x))


second = lambda box: box[1]  # noqa: E731
number_of = lambda box: box.number  # noqa: E731
second_in_jnp = lambda box: jnp.asarray(box)[1]  # noqa: E731

HOLDERS: dict[str, Holder] = {
    "jax arrays in a list": holds(
        lambda: [jnp.int32(0), jnp.arange(9, dtype=jnp.int32)],
        lambda x: x[1][x[0]],
        lambda x, y: set_item(0)(x, jnp.int32(y)),
    ),
    "list": holds(lambda: [0, 0], second, set_item(1)),
    "dict": holds(dict, second, set_item(1)),
    "set": holds(set, max, lambda box, new: (box.clear(), box.add(new))),
    "bytearray": holds(lambda: bytearray(2), second, set_item(1)),
    "memoryview": holds(lambda: memoryview(bytearray(2)), second, set_item(1)),
    "tuple of a list": holds(
        lambda: (0, [0]), lambda x: x[1][0], lambda x, y: set_item(0)(x[1], y)
    ),
    "attribute": holds(Plain, number_of, set_number),
    "slots": holds(Slots, number_of, set_number),
    "numpy": holds(an_array, lambda x: int(x[1]), set_item(1)),
    "numpy in jnp": holds(an_array, second_in_jnp, set_item(1)),
    "numpy as it is": holds(lambda: np.zeros((), np.int32), lambda x: x, set_item(())),
    "numpy of 64 bits": holds(
        lambda: np.zeros(2, int), lambda x: jnp.asarray(x)[1].astype(np.int32), set_item(1)
    ),
    "structured array": holds(
        lambda: np.array([(0, 1.5)], dtype=[("number", np.int32), ("other", np.float64)]),
        lambda x: int(x["number"][0]),
        set_item("number"),
    ),
    "object array": holds(lambda: np.array([None, 0], object), second, set_item(1)),
    "masked array": holds(lambda: np.ma.array([0, 0]), lambda x: int(x[1]), set_item(1)),
    "class attribute": holds(lambda: type("A", (Plain,), {}), number_of, set_number),
    "function's attribute": holds(lambda: Data(0, int), number_of, set_number),
    "view": boxed(lambda use, x: calling(use, second_in_jnp, x[::2]), an_array(), np.ndarray.fill),
    "frozen view": boxed(  # a view that is read-only, of memory that is not
        lambda use, x: calling(use, second_in_jnp, np.broadcast_to(x, 3)),
        an_array(),
        np.ndarray.fill,
    ),
    "global number": global_number,
    "numpy array replaced": replaced(an_array, second_in_jnp),
    "numpy scalar": replaced(np.int32),
    "jax array": replaced(jnp.int32),
    "imported inside": imported_inside,
    "global list": boxed(lambda use, _: lambda *x: use(GLOBAL_LIST[0], *x), GLOBAL_LIST),
    "global array": boxed(
        lambda use, _: lambda *x: use(jnp.asarray(GLOBAL_ARRAY)[0], *x), GLOBAL_ARRAY
    ),
    "enum": boxed(lambda use, _: lambda *x: use(Level.ONE.value[0], *x), Level.ONE.value),
    "default list": boxed(lambda use, box: lambda *x, box=box: use(box[0], *x)),
    "decorated": boxed(
        lambda use, box: functools.wraps(lambda *x: use(0, *x))(lambda *x: use(box[0], *x))
    ),
    "partial": boxed(lambda use, box: functools.partial(lambda box, *x: use(box[0], *x), box)),
    "partial of an array": boxed(
        lambda use, box: functools.partial(lambda *x, box: use(jnp.asarray(box)[0], *x), box=box),
        np.zeros(3, np.int32),
    ),
    "helper replaced": replaced(lambda x: lambda: x, lambda helper: helper()),
    "list in a helper": boxed(lambda use, box: calling(use, lambda: box[0])),
    "vectorized": boxed(  # NumPy's object for a user's function
        lambda use, box: calling(use, np.vectorize(lambda _: box[0], otypes=[np.int32]), 0)
    ),
    "module": boxed(lambda use, _: lambda *x: use(module.number, *x), module, set_number),
    "callable object": of_data(lambda data: data),
    "bound_method": of_data(lambda data: data.__call__),
    "class method": boxed(
        lambda use, cls: types.MethodType(lambda cls, *x: use(cls.number, *x), cls),
        type("Owner", (Plain,), {}),
        set_number,
    ),
    "own attribute": own_attribute,
    "nested_closure": nested_closure,
    "defaults_replaced": defaults_replaced,
    "lru_cached": lru_cached,
    "inside_lax": boxed(inside_lax, np.zeros((), np.int32), set_item(())),
}


def in_window(width: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (kv <= q) & (q - kv < width)


def sloped(slope: Any, s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return s - 0.25 * jnp.asarray(slope * (q - kv)).astype(s.dtype)


def arrays(T: int) -> list[jax.Array]:
    return normal_arrays(*[(1, T, 1, 8)] * 3, seed=T)


def options(kind: str, function: Any) -> dict[str, Any]:
    """Returns the function as an argument of `attention`, wrapped, as an object has to be."""
    return {"mask": Predicate(function)} if kind == "mask" else {"score": Score(function)}


USES = {"mask": in_window, "score": sloped}


def plain(kind: str, number: Any, q: Any, k: Any, v: Any) -> Any:
    """Returns attention by the formula, with a number that is known."""
    rule: Any = functools.partial(USES[kind], number)
    score, mask = (lambda s, *_: s, rule) if kind == "mask" else (rule, None)
    return formula(score, mask, q, k, v, ())


@functools.cache
def exact(kind: str, number: int, T: int) -> tuple[Any, ...]:
    """The formula's output and gradients."""
    x = arrays(T)
    call = functools.partial(plain, kind, number)
    return quick_jit(lambda x: out_and_gradients(call, x, x[0]))(x)


def check(kind: str, make: Holder, T: int, implementation: str | None) -> None:
    """Each call and its gradients equal the formula with the number that is held at that time."""
    x = arrays(T)
    function, change = make(USES[kind])
    for number in (2, 5):
        change(number)
        rule = options(kind, function)
        call = functools.partial(jattn.attention, implementation=implementation, **rule)
        has_gradients = T >= 100 or implementation == "reference"
        got = out_and_gradients(call, x, x[0]) if has_gradients else (call(*x),)
        assert_trees_close(got, exact(kind, number, T)[: len(got)], atol=1e-12)


@pytest.mark.one_in(8)
@pytest.mark.parametrize("kind", USES)
@pytest.mark.parametrize("name", HOLDERS)
def test_a_function_reads_what_is_held_when_it_is_called(name, kind):
    check(kind, HOLDERS[name], 7, "reference")


@pytest.mark.one_in(8)
@pytest.mark.parametrize("kind", USES)
@pytest.mark.parametrize("T", [9, 1024])
@pytest.mark.parametrize("implementation", [None, "native", "blockwise"])
@pytest.mark.parametrize("name", ["list", "numpy in jnp", "bound_method"])
def test_in_every_implementation(name, implementation, T, kind):
    check(kind, HOLDERS[name], T, implementation)


def changing(kind: str) -> tuple[dict[str, Any], list[Any]]:
    """Returns a function that reads a list, as an argument, and the list."""
    box, use = [2], USES[kind]
    return options(kind, lambda *x: use(box[0], *x)), box


def constant(kind: str, number: Any) -> dict[str, Any]:
    """Returns a function of a number that is known, as an argument."""
    return options(kind, functools.partial(USES[kind], number))


CALLS: dict[str, Callable[..., Any]] = {
    "attention": lambda q, k, v, **rule: jattn.attention(q, k, v, **rule, return_lse=True),
    "weights": lambda q, k, v, **rule: jattn.attention_weights(q, k, **rule),
    "scores": lambda q, k, v, **rule: jattn.attention_scores(q, k, **rule),
    "statistics": lambda q, k, v, **rule: jattn.statistics(q, k, **rule),
    "keys of statistics": lambda q, k, v, mask=None, score=None: jattn.statistics(
        q, k, keys=mask, score=score
    ),
    "top_weights": lambda q, k, v, **rule: jattn.top_weights(q, k, 2, **rule),
    "weights_at": lambda q, k, v, **rule: jattn.viz.weights_at(q, k, rows=[3, 6], **rule),
    "on a cache": lambda q, k, v, **rule: jattn.cached_attention(
        q, k, v, cache.DenseCache.create(1, 16, 1, 8, dtype=q.dtype), **rule
    )[0],
    "in pieces": lambda q, k, v, **rule: jattn.cached_attention(
        q, k, v, cache.RollingCache.create(1, 16, 1, 8, dtype=q.dtype, chunk=4), **rule
    )[0],
    "additive": lambda q, k, v, **rule: jattn.additive_attention(
        q[:, :, 0], k[:, :, 0], v[:, :, 0], jnp.eye(8), jnp.eye(8), jnp.ones(8), **rule
    ),
    "vjp": lambda q, k, v, **rule: jax.vjp(lambda *x: jattn.attention(*x, **rule), q, k, v)[1](q),
    "jvp": lambda q, k, v, **rule: jax.jvp(
        lambda *x: jattn.attention(*x, **rule), (q, k, v), (k, v, q)
    ),
    "vmap": lambda *x, **rule: jax.vmap(lambda *x: jattn.attention(*x, **rule))(*x),
}


@pytest.mark.one_in(16)
@pytest.mark.parametrize("kind", USES)
@pytest.mark.parametrize("name", CALLS)
def test_every_call_reads_its_functions_again(name, kind):
    x, (rule, box) = arrays(9), changing(kind)
    for box[0] in (2, 5, 2):
        got, want = CALLS[name](*x, **rule), CALLS[name](*x, **constant(kind, box[0]))
        assert_trees_close(got, want, atol=1e-12)


def test_an_explanation_is_about_the_call():
    rule, box = changing("mask")
    x = arrays(512)
    two, box[0] = jattn.explain(*x, **rule), 512
    all_past = jattn.explain(*x, **rule)
    assert two.tiles == jattn.explain(*x, **constant("mask", 2)).tiles
    assert all_past.tiles == jattn.explain(*x, mask=masks.Causal()).tiles
    assert two.tiles != all_past.tiles


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kind", USES)
@pytest.mark.parametrize("T", [9, 1024])
def test_a_gradient_that_is_taken_later_is_of_the_call(T, kind):
    x, array = arrays(T), np.array([0, 2], np.int32)
    box = [array]
    for read in (lambda: jnp.asarray(array)[1], lambda: jnp.asarray(box[0])[1]):
        array[1] = 2
        rule = options(kind, lambda *x, read=read: USES[kind](read(), *x))
        _, pull = jax.vjp(functools.partial(jattn.attention, **rule), *x)
        array[1] = 5
        _, exact = jax.vjp(functools.partial(plain, kind, 2), *x)
        assert_trees_close(pull(x[0]), exact(x[0]), atol=1e-11)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("in_module", [True, False], ids=["module", "call"])
def test_a_module_reads_its_function_again(in_module):
    rule, box = changing("mask")
    (x,) = normal_arrays((1, 9, 8))

    def attended(mask: Any) -> Any:
        kinds: Any = {"param_dtype": jnp.float64, "dtype": jnp.float64, "rngs": nnx.Rngs(0)}
        module = nn.MultiHeadAttention(2, 8, mask=mask if in_module else None, **kinds)
        return lambda: module(x, mask=None if in_module else mask)

    call = attended(rule["mask"])
    for box[0] in (2, 5):
        np.testing.assert_allclose(call(), attended(constant("mask", box[0])["mask"])(), atol=1e-12)


class Echo(nnx.Module):
    """A language model of one attention, whose next token depends on the output of attention."""

    def __init__(self, mask: Any):
        kinds = {"param_dtype": jnp.float64, "dtype": jnp.float64, "rngs": nnx.Rngs(0)}
        self.attention = nn.MultiHeadAttention(1, 8, mask=mask, **kinds)

    def start(self, batch: int, length: int) -> Any:
        return cache.DenseCache.create(batch, length, 1, 8, dtype=jnp.float64)

    def step(self, tokens: Any, caches: Any, *, valid: Any = None, **_: Any) -> Any:
        x = jax.nn.one_hot(tokens, 8, dtype=jnp.float64)
        out, caches = self.attention(x, cache=caches, valid=valid)
        return jnp.sin(1e4 * out), caches


@pytest.mark.one_in(2, slow=True)
@pytest.mark.parametrize("callback", [None, len])
def test_a_generating_model_reads_its_function_again(callback):
    rule, box = changing("mask")
    prompt = jnp.asarray([[1, 5, 2, 7, 3, 3, 6, 0]])
    model, written = Echo(rule["mask"]), []
    for box[0] in (1, 8):
        written.append(jattn.generate(model, prompt, max_tokens=6, callback=callback).tokens)
    fresh = jattn.generate(Echo(constant("mask", 8)["mask"]), prompt, max_tokens=6)
    np.testing.assert_array_equal(written[1], fresh.tokens)
    assert not np.array_equal(*written)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("read", ["list", "array", "attribute"])
def test_bounds_that_may_change_are_not_used(read):
    x, array, box = arrays(512), np.array([100]), [100]
    settings = types.SimpleNamespace(width=100)
    width = {"list": lambda: box[0], "array": lambda: array[0], "attribute": lambda: settings.width}

    def bounds(tile: Any) -> Any:
        (q_lo, q_hi, *_), (kv_lo, kv_hi, *_) = tile.rows, tile.columns
        n = width[read]()
        any_of_it = (kv_lo <= q_hi) & (q_lo - kv_hi < n)
        return any_of_it, (kv_hi <= q_lo) & (q_hi - kv_lo < n)

    rule = lambda b, h, q, kv: in_window(jnp.int32(width[read]()), b, h, q, kv)  # noqa: E731
    for number in (100, 400):
        box[0] = settings.width = array[0] = number
        got = jattn.attention(*x, mask=Predicate(rule, bounds=bounds), implementation="blockwise")
        np.testing.assert_allclose(got, plain("mask", number, *x), atol=1e-12)


@pytest.mark.parametrize("load", [np.load, jnp.load])
def test_files_are_read_in_each_call(load, tmp_path):
    x, path = arrays(9), str(tmp_path / "width.npy")
    for number in (3, 5):
        np.save(path, np.int32(number))
        got = jattn.attention(*x, mask=lambda *at: in_window(load(path), *at))
        np.testing.assert_allclose(got, plain("mask", number, *x), atol=1e-12)


def test_a_reference_is_refused():
    reference = jax.new_ref(jnp.int32(3))
    mask = lambda b, h, q, kv: kv <= reference[...]  # noqa: E731
    with pytest.raises(TypeError, match=r"expected no jax\.Ref; pass its value"):
        jattn.attention(*arrays(9), mask=mask)


def test_many_snapshots_of_the_same_code_are_transient(monkeypatch):
    monkeypatch.setattr(snapshots, "MOST_LASTING", 2)
    functions = [functools.partial(lambda n, x: n + x, n) for n in range(4)]
    frozen = [snapshots.frozen(x) for x in functions]
    assert [snapshots.is_transient(x) for x in frozen] == [False, False, True, True]
    assert snapshots.frozen(functools.partial(functions[0].func, 0)) is frozen[0]


def test_what_changes_in_each_reading_is_read_in_each_call():
    x, random, again = arrays(9), *(np.random.default_rng(0) for _ in range(2))
    rule = Predicate(lambda b, h, i, j: j < int(random.integers(1, 9)))
    for _ in range(3):
        want = jattn.attention(*x, mask=masks.Prefix(int(again.integers(1, 9))))
        np.testing.assert_allclose(jattn.attention(*x, mask=rule), want, atol=1e-12)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", ["list", "numpy in jnp", "bound_method", "inside_lax"])
def test_an_unchanged_function_runs_what_is_compiled(name, caplog):
    x = arrays(9)
    function, change = HOLDERS[name](in_window)
    for number in (3, 4):
        change(number)
        jattn.attention(*x, mask=Predicate(function))
    for number in (3, 4):
        change(number)
        with jax.log_compiles(), caplog.at_level("WARNING"):
            caplog.clear()
            jattn.attention(*x, mask=Predicate(function))
        assert not [x for x in caplog.messages if x.startswith("Compiling")]


def with_rule(slopes: list[float]) -> Callable[..., Any]:
    """Returns s², whose own rule gives `slopes[0] * s`, and the second derivative `slopes[1]`."""

    @jax.custom_jvp
    def slope(s):
        return slopes[0] * s

    @slope.defjvp
    def _(primals, tangents):
        return slope(*primals), slopes[1] * tangents[0]

    @jax.custom_jvp
    def square(s):
        return s * s

    @square.defjvp
    def _(primals, tangents):
        return square(*primals), slope(*primals) * tangents[0]

    return square


@pytest.mark.one_in(2)
@pytest.mark.parametrize("order", [1, 2])
def test_rules_of_derivatives_are_read_again_and_compiled_once(order, caplog):
    """Only what derivative rules read changes, and each call defines the function anew."""
    q = 0.3 * arrays(9)[0]
    slopes = [2.0, 2.0]

    def by_query(q):
        rule = with_rule(slopes)
        return jnp.sum(jattn.attention(q, q, q, score=lambda s, b, h, i, j: rule(s)) ** 2)

    def derivative(q):
        if order == 1:
            return jax.grad(by_query)(q)
        return jax.jvp(jax.grad(by_query), (q,), (jnp.cos(q),))[1]

    first = derivative(q)
    slopes[order - 1] = 3.0
    second = derivative(q)
    assert np.max(np.abs(first - second)) > 1e-3
    for slopes[order - 1], want in ((2.0, first), (3.0, second)):
        with jax.log_compiles(), caplog.at_level("WARNING"):
            caplog.clear()
            got = derivative(q)
        assert not [x for x in caplog.messages if x.startswith("Compiling") and "attend" in x]
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("library", [np, jnp])
def test_an_unchanged_array_is_not_traced_again(library):
    x, table = arrays(9), library.arange(2**17)
    rule = Predicate(lambda b, h, q, kv: jnp.asarray(table)[kv] <= q.astype(table.dtype))
    first = jattn.attention(*x, mask=rule, implementation="reference")
    with jax.no_tracing():
        again = jattn.attention(*x, mask=rule, implementation="reference")
    np.testing.assert_array_equal(first, again)


@pytest.mark.one_in(3, slow=True)
@pytest.mark.parametrize("name", ["list", "numpy in jnp", "jax array", None])
def test_functions_of_the_past_are_forgotten(name, monkeypatch):
    """Without a holder, a new function closes over each number."""
    monkeypatch.setattr(snapshots, "_frozen", WeakValueDictionary())
    monkeypatch.setattr(snapshots, "MOST_LASTING", 0)
    q, k, _ = arrays(2)
    function, change = HOLDERS[name or "list"](in_window)
    for number in range(call._MOST_TRANSIENT + 20):
        change(number)
        function = function if name else functools.partial(in_window, number)
        jax.eval_shape(functools.partial(jattn.attention_scores, mask=Predicate(function)), q, k)
    gc.collect()
    programs = [x for x in snapshots._frozen.values() if isinstance(x, TracedFunction)]
    assert len(programs) <= call._MOST_TRANSIENT + 1
    assert len(snapshots._frozen) <= 2 * len(programs)  # with the snapshots of functions


def test_results_of_operations_with_several_results_are_told_apart():
    """Programs that differ only in the result that they return are two programs."""
    q = jnp.ones((1, 8, 1, 4))
    v = jnp.broadcast_to(jnp.arange(8.0)[None, :, None, None], q.shape)
    read, both = [0, 1], jax.jit(lambda i, j: (i - j, j))

    def rule(b: Any, h: Any, i: Any, j: Any) -> Any:
        difference, key = both(i, j)
        zero = difference * read[0]
        return (key if read[1] else zero) >= 4

    out = jattn.attention(q, q, v, mask=rule)
    np.testing.assert_allclose(out, 5.5, rtol=1e-6)  # the last four keys
    read[1] = 0
    np.testing.assert_array_equal(jattn.attention(q, q, v, mask=rule), 0)  # no key
