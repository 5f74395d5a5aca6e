"""Functions of masks and scores are what they are when they are called, whatever they read.

Each row of `HOLDERS` is a way to hold a number that a function reads. It is changed between two
calls, and the second has to equal the formula with the number that is held then.
"""

import collections
import dataclasses
import enum
import functools
import gc
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jattn
from jattn import cache, masks, nn, scores
from jattn._functions import frozen
from jattn.masks import Predicate
from jattn.scores import Score


Use = Callable[..., Any]
Holder = Callable[[Use, Any], tuple[Any, Callable[[Any], None]]]
HOLDERS: dict[str, Holder] = {}

module = types.ModuleType("settings")  # as a user's module of settings
GLOBAL = 0
GLOBAL_LIST = [0]
GLOBAL_ARRAY = np.zeros(3, np.int32)


def held(holder: Holder) -> Holder:
    """Registers a row: of a formula `use(number, *arguments)` and a first number, the function and
    what changes the number that it reads."""
    HOLDERS[holder.__name__] = holder
    return holder


def in_container(name: str, make: Callable[[Any], Any], read: Any, write: Any) -> None:
    """Registers a row whose function closes over an object, reads a number of it by `read` and has
    another written to it by `write`."""

    def holder(use: Use, number: Any) -> Any:
        box = make(number)
        return lambda *x: use(read(box), *x), lambda new: write(box, new)

    HOLDERS[name] = holder


class Plain:
    """An object with attributes."""

    def __init__(self, number: Any):
        self.number = number


class Slots:
    """An object with slots."""

    __slots__ = ("number",)

    def __init__(self, number: Any):
        self.number = number


class Property(Plain):
    """An object with a property that reads another object."""

    inner: Any = None

    @property
    def value(self) -> Any:
        return self.inner.number


@dataclasses.dataclass
class Data:
    """A dataclass, which has no hash, that can be called."""

    number: Any
    use: Use

    def __call__(self, *x: Any) -> Any:
        return self.use(self.number, *x)


class Hidden:
    """An object that computes its attributes."""

    def __init__(self, number: Any):
        self.__dict__["held"] = {"number": number}

    def __getattr__(self, name: str) -> Any:
        return self.__dict__["held"][name]


class Pair(NamedTuple):
    """A named tuple of something that may change."""

    numbers: list[Any]


class Level(enum.Enum):
    """Members with a value that may change."""

    ONE = [0]  # noqa: RUF012


def an_array(number: Any) -> np.ndarray:
    return np.array([5, number, 7], np.int32)


def set_item(key: Any) -> Callable[[Any, Any], None]:
    return lambda box, new: box.__setitem__(key, new)


def set_number(box: Any, new: Any) -> None:
    box.number = new


def structured(number: Any) -> np.ndarray:
    return np.array([(number, 1.5)], dtype=[("number", np.int32), ("other", np.float64)])


def random_access(number: Any) -> np.ndarray:
    return np.array([None, number], object)


def refill(box: Any, new: Any) -> None:
    box.clear()
    box.add(new)


one = lambda box: box[1]  # noqa: E731
in_container("list", lambda x: [0, x], one, set_item(1))
in_container(
    "nested list", lambda x: [0, [[x]]], lambda x: x[1][0][0], lambda x, y: set_item(0)(x[1][0], y)
)
in_container("dict", lambda x: {1: x}, one, set_item(1))
in_container("ordered dict", lambda x: collections.OrderedDict({1: x}), one, set_item(1))
in_container("default dict", lambda x: collections.defaultdict(int, {1: x}), one, set_item(1))
in_container("deque", lambda x: collections.deque([0, x]), one, set_item(1))
in_container("set", lambda x: {x}, max, refill)
in_container("bytearray", lambda x: bytearray([0, x]), one, set_item(1))
in_container("memoryview", lambda x: memoryview(bytearray([0, x])), one, set_item(1))
in_container(
    "tuple of a list", lambda x: (0, [x]), lambda x: x[1][0], lambda x, y: set_item(0)(x[1], y)
)
in_container(
    "named tuple",
    lambda x: Pair([x]),
    lambda x: x.numbers[0],
    lambda x, y: set_item(0)(x.numbers, y),
)
in_container("attribute", Plain, lambda x: x.number, set_number)
in_container("slots", Slots, lambda x: x.number, set_number)
in_container("namespace", lambda x: types.SimpleNamespace(number=x), lambda x: x.number, set_number)
in_container("computed attribute", Hidden, lambda x: x.number, lambda x, y: x.held.update(number=y))
in_container("numpy", an_array, lambda x: int(x[1]), set_item(1))
in_container("numpy in jnp", an_array, lambda x: jnp.asarray(x)[1], set_item(1))
in_container("numpy as it is", lambda x: np.array(x, np.int32), lambda x: x, set_item(()))
in_container(
    "numpy of 64 bits",
    lambda x: np.array([0, x]),
    lambda x: jnp.asarray(x)[1].astype(np.int32),
    set_item(1),
)
in_container(
    "nested arrays",
    lambda x: {"a": [an_array(x)]},
    lambda x: jnp.asarray(x["a"][0])[1],
    lambda x, y: set_item(1)(x["a"][0], y),
)
in_container(
    "structured array",
    structured,
    lambda x: int(x["number"][0]),
    lambda x, y: set_item("number")(x, y),
)
in_container("object array", random_access, one, set_item(1))
in_container("masked array", lambda x: np.ma.array([0, x]), lambda x: int(x[1]), set_item(1))
in_container("function's attribute", lambda x: Data(x, int), lambda x: x.number, set_number)


@held
def view(use: Use, number: Any) -> Any:
    whole = np.full(6, number, np.int32)
    part = whole[::2]

    def change(new: Any) -> None:
        whole[...] = new

    return lambda *x: use(jnp.asarray(part)[1], *x), change


@held
def frozen_view(use: Use, number: Any) -> Any:
    """A view that cannot be written to, of memory that can."""
    whole = np.full(3, number, np.int32)
    part = whole[:]
    part.flags.writeable = False
    return lambda *x: use(jnp.asarray(part)[1], *x), lambda new: set_item(slice(None))(whole, new)


@held
def global_number(use: Use, number: Any) -> Any:
    def change(new: Any) -> None:
        global GLOBAL  # noqa: PLW0603
        GLOBAL = new

    change(number)
    return lambda *x: use(GLOBAL, *x), change


@held
def global_list(use: Use, number: Any) -> Any:
    GLOBAL_LIST[0] = number
    return lambda *x: use(GLOBAL_LIST[0], *x), lambda new: set_item(0)(GLOBAL_LIST, new)


@held
def global_array(use: Use, number: Any) -> Any:
    GLOBAL_ARRAY[1] = number
    return lambda *x: use(jnp.asarray(GLOBAL_ARRAY)[1], *x), functools.partial(
        set_item(1), GLOBAL_ARRAY
    )


@held
def array_replaced(use: Use, number: Any) -> Any:
    array = an_array(number)

    def change(new: Any) -> None:
        nonlocal array
        array = an_array(new)

    return lambda *x: use(jnp.asarray(array)[1], *x), change


@held
def module_attribute(use: Use, number: Any) -> Any:
    module.number = number  # pyright: ignore[reportAttributeAccessIssue]
    return lambda *x: use(module.number, *x), lambda new: setattr(module, "number", new)


@held
def imported_inside(use: Use, number: Any) -> Any:
    import tests.test_changing_functions as itself  # noqa: PLC0415, PLW0406

    def function(*x: Any) -> Any:
        import tests.test_changing_functions  # noqa: PLC0415, PLW0406

        return use(tests.test_changing_functions.GLOBAL, *x)

    itself.GLOBAL = number
    return function, lambda new: setattr(itself, "GLOBAL", new)


@held
def default_list(use: Use, number: Any) -> Any:
    box = [number]
    return lambda *x, box=box: use(box[0], *x), lambda new: set_item(0)(box, new)


@held
def defaults_replaced(use: Use, number: Any) -> Any:
    def function(*x: Any, value: Any = number) -> Any:
        return use(value, *x)

    return function, lambda new: function.__kwdefaults__.update(value=new)


@held
def function_attribute(use: Use, number: Any) -> Any:
    def function(*x: Any) -> Any:
        return use(function.number, *x)  # pyright: ignore[reportFunctionMemberAccess]

    function.number = number  # pyright: ignore[reportFunctionMemberAccess]
    return function, lambda new: setattr(function, "number", new)


@held
def nested_closure(use: Use, number: Any) -> Any:
    def change(new: Any) -> None:
        nonlocal number
        number = new

    def outer() -> Any:
        return lambda: number

    return lambda *x: use(outer()(), *x), change


@held
def nested_box(use: Use, number: Any) -> Any:
    box = {"number": number}

    def inner() -> Any:
        return box["number"]

    return lambda *x: use(inner(), *x), lambda new: box.update(number=new)


@held
def helper_replaced(use: Use, number: Any) -> Any:
    helper = lambda: number  # noqa: E731

    def change(new: Any) -> None:
        nonlocal helper
        helper = lambda: new  # noqa: E731

    return lambda *x: use(helper(), *x), change


@held
def decorated(use: Use, number: Any) -> Any:
    box = [number]

    @functools.wraps(lambda *x: use(number, *x))
    def wrapper(*x: Any) -> Any:
        return use(box[0], *x)

    return wrapper, lambda new: set_item(0)(box, new)


@held
def partial(use: Use, number: Any) -> Any:
    box = [number]
    return functools.partial(lambda box, *x: use(box[0], *x), box), lambda new: set_item(0)(
        box, new
    )


@held
def partial_of_array(use: Use, number: Any) -> Any:
    array = an_array(number)
    function = functools.partial(lambda *x, table: use(jnp.asarray(table)[1], *x), table=array)
    return function, lambda new: set_item(1)(array, new)


@held
def bound_method(use: Use, number: Any) -> Any:
    class Rule(Plain):
        def ask(self, *x: Any) -> Any:
            return use(self.number, *x)

    rule = Rule(number)
    return rule.ask, lambda new: set_number(rule, new)


@held
def callable_object(use: Use, number: Any) -> Any:
    data = Data(number, use)
    return data, lambda new: set_number(data, new)


@held
def class_attribute(use: Use, number: Any) -> Any:
    class Settings:
        value = number

    return lambda *x: use(Settings.value, *x), lambda new: setattr(Settings, "value", new)


@held
def static_method(use: Use, number: Any) -> Any:
    class Settings:
        value = number

        @classmethod
        def ask(cls, *x: Any) -> Any:
            return use(cls.value, *x)

    return Settings.ask, lambda new: setattr(Settings, "value", new)


@held
def property_of_another(use: Use, number: Any) -> Any:
    thing, inner = Property(None), Plain(number)
    thing.inner = inner
    return lambda *x: use(thing.value, *x), lambda new: set_number(inner, new)


@held
def enum_value(use: Use, number: Any) -> Any:
    Level.ONE.value[0] = number
    return lambda *x: use(Level.ONE.value[0], *x), lambda new: set_item(0)(Level.ONE.value, new)


@held
def numpy_scalar(use: Use, number: Any) -> Any:
    value = np.int32(number)

    def change(new: Any) -> None:
        nonlocal value
        value = np.int32(new)

    return lambda *x: use(value, *x), change


@held
def jax_array(use: Use, number: Any) -> Any:
    value = jnp.int32(number)

    def change(new: Any) -> None:
        nonlocal value
        value = jnp.int32(new)

    return lambda *x: use(value, *x), change


@held
def iterator(use: Use, number: Any) -> Any:
    """Something else at each reading, that cannot be copied."""
    numbers = [number] * 50
    source = iter(numbers)

    def change(new: Any) -> None:
        numbers[:] = [new] * 50

    return lambda *x: use(next(source), *x), change


@held
def vectorized(use: Use, number: Any) -> Any:
    """NumPy's object for a user's function."""
    box = [number]
    read = np.vectorize(lambda _: box[0])
    return lambda *x: use(int(read(0)), *x), lambda new: set_item(0)(box, new)


@held
def lru_cached(use: Use, number: Any) -> Any:
    box = [number]
    read = functools.lru_cache(lambda: box[0])

    def change(new: Any) -> None:
        box[0] = new
        read.cache_clear()

    return lambda *x: use(read(), *x), change


@held
def inside_lax(use: Use, number: Any) -> Any:
    """In a program within the program."""
    box = np.array(number, np.int32)

    def function(*x: Any) -> Any:
        return jax.lax.cond(x[-1] >= 0, lambda: use(box, *x), lambda: use(box, *x))

    return function, lambda new: set_item(())(box, new)


def memory_mapped(path: Any, number: Any) -> tuple[np.ndarray, np.ndarray]:
    """An array of a file twice: as it is read, and as it is written to."""
    np.save(path, an_array(number))
    return np.load(path, mmap_mode="r"), np.load(path, mmap_mode="r+")


def in_window(width: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (kv <= q) & (q - kv < width)


def sloped(slope: Any, s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return s - 0.25 * jnp.asarray(slope * (q - kv)).astype(s.dtype)


def arrays(T: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    rng = np.random.default_rng(T)
    q, k, v = (jnp.asarray(rng.standard_normal((1, T, 1, 8))) for _ in range(3))
    return q, k, v


def options(kind: str, function: Any) -> dict[str, Any]:
    """As an argument of `attention`; an object that is called has to be wrapped."""
    return {"mask": Predicate(function)} if kind == "mask" else {"score": Score(function)}


def plain(kind: str, number: Any, q: Any, k: Any, v: Any) -> Any:
    """The formula, with a number that is known."""
    logits = jnp.einsum("bqnh,bknh->bnqk", q, k) * q.shape[-1] ** -0.5
    i, j = jnp.arange(q.shape[1])[None, None, :, None], jnp.arange(k.shape[1])[None, None, None, :]
    if kind == "mask":
        logits = jnp.where(in_window(number, 0, 0, i, j), logits, -jnp.inf)
    else:
        logits = sloped(number, logits, 0, 0, i, j)
    return jnp.einsum("bnqk,bknh->bqnh", jax.nn.softmax(logits, axis=-1), v)


USES = {"mask": in_window, "score": sloped}


def check(kind: str, holder: Holder, T: int, implementation: str | None, numbers: Any) -> None:
    """Each call is the formula with the number that is held then, and so are its gradients."""
    x = arrays(T)
    function, change = holder(USES[kind], numbers[0])

    def loss(compute: Any, *x: Any) -> Any:
        return jnp.vdot(compute(*x), x[0])

    for number in numbers:
        change(number)
        rule = options(kind, function)
        call = functools.partial(jattn.attention, implementation=implementation, **rule)
        want = functools.partial(plain, kind, number)
        np.testing.assert_allclose(call(*x), want(*x), atol=1e-12)
        if T < 100 and implementation != "reference":
            continue
        got = jax.grad(functools.partial(loss, call), (0, 1, 2))(*x)
        exact = jax.grad(functools.partial(loss, want), (0, 1, 2))(*x)
        for one, other in zip(got, exact, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-11)


@pytest.mark.parametrize("kind", USES)
@pytest.mark.parametrize("name", HOLDERS)
def test_a_function_reads_what_is_held_when_it_is_called(name, kind):
    check(kind, HOLDERS[name], 7, "reference", (2, 5))


@pytest.mark.parametrize("kind", USES)
@pytest.mark.parametrize("T", [9, 1024])
@pytest.mark.parametrize("implementation", [None, "native", "blockwise"])
@pytest.mark.parametrize("name", ["list", "numpy in jnp", "bound_method"])
def test_in_every_implementation(name, implementation, T, kind):
    check(kind, HOLDERS[name], T, implementation, (2, 5))
