"""Interval arithmetic: the interval of each operation's result, given intervals of its operands.

Intervals are never too narrow, whatever the arithmetic does: integers that may overflow may be
anything, ends of floats are moved outwards by the possible rounding errors, and results that may be
NaN are marked. `RULES` has a rule for each operation of `nodes.Node` with a known interval.

Ends are arrays with an entry for each of several tiles, in NumPy if everything is known while
tracing.
"""

import functools
import itertools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jattn.functions import operations
from jattn.functions.nodes import Node


class Interval(NamedTuple):
    """The numbers `lo..hi`, both inclusive; with `nan` possibly NaN as well.

    For booleans `lo` is true if the value is certainly true, `hi` if it may be true.
    """

    lo: Any
    hi: Any
    nan: Any = False


def is_static(*values: Any) -> bool:
    """Returns whether no value is an array of JAX."""
    return not any(isinstance(x, jax.Array) for x in jax.tree.leaves(values))


def numpy_of(*values: Any) -> Any:
    """Returns the module to compute with these values: numpy if they are static, or jax.numpy."""
    return np if is_static(*values) else jnp


def kind_of(dtype: Any) -> str:
    """Returns "b" for booleans, "i" for integers, "f" for floats."""
    for letter, kind in (("b", np.bool_), ("i", jnp.integer), ("f", jnp.floating)):
        if jnp.issubdtype(dtype, kind):
            return letter
    return "?"


def anything(dtype: Any) -> Interval:
    """Returns the interval of all numbers of a dtype."""
    kind = kind_of(dtype)
    if kind == "b":
        return Interval(np.False_, np.True_)
    if kind == "i":
        limits = jnp.iinfo(dtype)
        return Interval(np.asarray(limits.min, dtype), np.asarray(limits.max, dtype))
    return Interval(np.asarray(-np.inf, np.float32), np.asarray(np.inf, np.float32), np.True_)


def where(condition: Any, x: Any, y: Any) -> Any:
    """Computes `where` by NumPy if all operands are static, else by JAX."""
    return numpy_of(condition, x, y).where(condition, x, y)


def either(condition: Any, x: Interval, y: Interval) -> Interval:
    """Returns the interval x where the condition holds, else y."""
    return Interval(*(where(condition, a, b) for a, b in zip(x, y, strict=True)))


def checked(x: Interval, dtype: Any) -> Interval:
    """Casts the ends to the dtype. An end that is NaN becomes infinite, and an end next to 0
    becomes 0, because small numbers may be flushed to 0."""
    xp = numpy_of(x)
    lo = xp.asarray(x.lo).astype(dtype)
    hi = lo if x.hi is x.lo else xp.asarray(x.hi).astype(dtype)
    if kind_of(dtype) != "f":
        return Interval(lo, hi)
    tiny = jnp.finfo(dtype).tiny
    lo, hi = where((lo > 0) & (lo < tiny), 0, lo), where((hi < 0) & (hi > -tiny), 0, hi)
    unknown = xp.isnan(lo) | xp.isnan(hi) | x.nan
    lo, hi = where(unknown, -np.inf, lo), where(unknown, np.inf, hi)
    return Interval(lo.astype(dtype), hi.astype(dtype), unknown)


_Rule = Callable[..., Interval]
RULES: dict[str, _Rule] = {}
"""The rule of each operation, `rule(node, *intervals of its operands)`."""


def _rule(*names: str) -> Callable[[_Rule], _Rule]:
    def register(rule: _Rule) -> _Rule:
        RULES.update(dict.fromkeys(names, rule))
        return rule

    return register


def _of_booleans(operation: Callable[..., Any], rule: _Rule) -> _Rule:
    """Returns a rule that applies an increasing operation to booleans, and `rule` to numbers."""

    def of_dtype(node: Node, x: Interval, y: Interval) -> Interval:
        if kind_of(node.dtype) == "b":
            return Interval(operation(x.lo, y.lo), operation(x.hi, y.hi))
        return rule(node, x, y)

    return of_dtype


def _as_wide(x: Any) -> Any:
    """Converts x to a wide float, which does not overflow."""
    wide = np.float64 if is_static(x) else jnp.zeros(0).dtype  # the widest float that is enabled
    return numpy_of(x).asarray(x).astype(wide)


def _moved_out(x: Interval, dtype: Any, roundings: int = 2, absolute: float = 0.0) -> Interval:
    """Widens an interval by the difference that other orders of rounding may make."""
    limits = jnp.finfo(dtype)
    relative, absolute = roundings * float(limits.eps), max(float(limits.tiny), absolute)

    def moved(end: Any, sign: int) -> Any:
        return where(abs(end) == np.inf, end, end + sign * (abs(end) * relative + absolute))

    return Interval(moved(x.lo, -1), moved(x.hi, 1), x.nan)


def _extremes(xp: Any, values: list[Any]) -> tuple[Any, Any]:
    return functools.reduce(xp.minimum, values), functools.reduce(xp.maximum, values)


def _at_corners(node: Node, exact: Callable[..., Any], *args: Interval) -> Interval:
    """Returns the interval of an operation that is monotonic in each of its operands."""
    corners = list(itertools.product(*(x[:2] for x in args)))
    nan = functools.reduce(lambda a, b: a | _truth(b), [x.nan for x in args])
    lo, hi = _extremes(numpy_of(args), [exact(*corner) for corner in corners])
    if kind_of(node.dtype) == "f":
        return _moved_out(Interval(lo, hi, nan), node.dtype)
    estimates = [exact(*map(_as_wide, corner)) for corner in corners]
    limits = jnp.iinfo(node.dtype)
    margin = 4.0 * float(jnp.finfo(estimates[0].dtype).eps) * max(abs(limits.min), limits.max)
    fits = np.True_
    for estimate in estimates:
        fits = fits & (estimate >= limits.min + margin) & (estimate <= limits.max - margin)
    return either(fits, Interval(lo, hi), anything(node.dtype))


def _corners(exact: Callable[..., Any]) -> _Rule:
    return lambda node, *args: _at_corners(node, exact, *args)


RULES["add"] = _of_booleans(operator.or_, _corners(operator.add))
RULES["sub"] = _corners(operator.sub)
# 0 times an infinite end is NaN, which stands for anything.
RULES["mul"] = _of_booleans(operator.and_, _corners(operator.mul))
RULES["neg"] = _corners(operator.neg)
RULES["square"] = lambda node, x: _power(node, x, 2)


@_rule("integer_pow")
def _(node: Node, x: Interval) -> Interval:
    exponent: Any = node.param
    return _power(node, x, exponent) if exponent > 0 else anything(node.dtype)


def _power(node: Node, x: Interval, exponent: int) -> Interval:
    def power(a: Any) -> Any:
        product, bits = None, exponent
        while bits:
            if bits % 2:
                product = a if product is None else product * a
            a, bits = a * a, bits // 2
        return product

    result = _at_corners(node, power, x)
    if kind_of(node.dtype) == "f":
        result = _moved_out(result, node.dtype, 2 * exponent)
    if exponent % 2:
        return result
    through_0 = (x.lo <= 0) & (x.hi >= 0)
    return result._replace(lo=where(through_0, numpy_of(x).minimum(result.lo, 0), result.lo))


@_rule("abs")
def _(node: Node, x: Interval) -> Interval:
    xp, is_float = numpy_of(x), kind_of(node.dtype) == "f"
    if not is_float:
        x = either(x.lo > jnp.iinfo(node.dtype).min, x, anything(node.dtype))
    ends = abs(x.lo), abs(x.hi)
    through_0 = (x.lo <= 0) & (x.hi >= 0)
    result = Interval(where(through_0, 0, xp.minimum(*ends)), xp.maximum(*ends), x.nan)
    if is_float:
        return result
    return either(x.lo > jnp.iinfo(node.dtype).min, result, anything(node.dtype))


@_rule("sign")
def _(node: Node, x: Interval) -> Interval:
    return Interval(numpy_of(x).sign(x.lo), numpy_of(x).sign(x.hi), x.nan)


def _choice(name: str, x: Interval, y: Interval) -> Interval:
    choose = getattr(numpy_of(x, y), name)
    return Interval(choose(x.lo, y.lo), choose(x.hi, y.hi), x.nan | _truth(y.nan))


RULES["max"] = lambda node, x, y: _choice("maximum", x, y)
RULES["min"] = lambda node, x, y: _choice("minimum", x, y)
RULES["clamp"] = lambda node, low, x, high: _choice("minimum", _choice("maximum", x, low), high)


@_rule("div")
def _(node: Node, x: Interval, y: Interval) -> Interval:
    if kind_of(node.dtype) != "f":
        return _quotient(node, x, y, _truncated)
    not_0 = (y.lo > 0) | (y.hi < 0)
    return either(not_0, _at_corners(node, operator.truediv, x, y), anything(node.dtype))


@_rule("floor_divide")
def _(node: Node, x: Interval, y: Interval) -> Interval:
    return _quotient(node, x, y, operator.floordiv)


def _truncated(a: Any, b: Any) -> Any:
    quotient = abs(a) // abs(b)
    return where((a < 0) != (b < 0), -quotient, quotient)


def _quotient(node: Node, x: Interval, y: Interval, divide: Any) -> Interval:
    least = jnp.iinfo(node.dtype).min
    usual = ((y.lo > 0) | (y.hi < 0)) & (x.lo > least) & (y.lo > least)
    safe = [either(usual, z, Interval(*[np.asarray(1, node.dtype)] * 2)) for z in (x, y)]
    ends = [divide(a, b) for a in safe[0][:2] for b in safe[1][:2]]
    return either(usual, Interval(*_extremes(numpy_of(safe), ends)), anything(node.dtype))


@_rule("remainder")
def _(node: Node, x: Interval, y: Interval) -> Interval:
    """Exact within one period, else a whole period."""
    limits = jnp.iinfo(node.dtype)
    usual = y.lo > 0
    low, high = (where(usual, end, 1) for end in y[:2])
    in_one_period = usual & (low == high) & (x.lo // low == x.hi // low)
    period = Interval(where(usual, 0, limits.min), where(usual, high - 1, limits.max))
    return either(in_one_period, Interval(x.lo % low, x.hi % low), period)


@_rule("rem")
def _(node: Node, x: Interval, y: Interval) -> Interval:
    """The remainder has the sign of x, as in C++."""
    if kind_of(node.dtype) == "f":
        return anything(node.dtype)
    return either(x.lo >= 0, RULES["remainder"](node, x, y), anything(node.dtype))


def _bits_of_points(x: Interval, y: Interval, operation: Any, other: Interval) -> Any:
    """Returns the exact result for two single numbers, else the interval `other`."""
    are_points = (x.lo == x.hi) & (y.lo == y.hi)
    point = operation(x.lo, y.lo)
    return either(are_points, Interval(point, point), other)


def _and(node: Node, x: Interval, y: Interval) -> Interval:
    xp, limits = numpy_of(x, y), jnp.iinfo(node.dtype)
    most = xp.minimum(where(x.lo >= 0, x.hi, limits.max), where(y.lo >= 0, y.hi, limits.max))
    result = Interval(where((x.lo >= 0) | (y.lo >= 0), 0, limits.min), most)
    for mask, z in ((x, y), (y, x)):
        is_point = mask.lo == mask.hi
        # The last bits of a number are its remainder.
        last = is_point & (mask.lo >= 0) & (mask.lo < limits.max) & (mask.lo & (mask.lo + 1) == 0)
        period = where(last, mask.lo, 0) + np.asarray(1, node.dtype)
        remainder = RULES["remainder"](node, z, Interval(period, period))
        result = either(last, remainder, result)
        # A number without its last bits increases with the number.
        first = is_point & (mask.lo < 0) & (~mask.lo & (~mask.lo + 1) == 0)
        result = either(first, Interval(z.lo & mask.lo, z.hi & mask.lo), result)
    return _bits_of_points(x, y, operator.and_, result)


def _or(node: Node, x: Interval, y: Interval) -> Interval:
    return _bits_of_points(x, y, operator.or_, anything(node.dtype))


RULES["and"] = _of_booleans(operator.and_, _and)
RULES["or"] = _of_booleans(operator.or_, _or)


@_rule("xor")
def _(node: Node, x: Interval, y: Interval) -> Interval:
    if kind_of(node.dtype) == "b":
        known = (x.lo == x.hi) & (y.lo == y.hi)
        return Interval(known & (x.lo ^ y.lo), ~known | (x.lo ^ y.lo))
    return _bits_of_points(x, y, operator.xor, anything(node.dtype))


@_rule("not")
def _(node: Node, x: Interval) -> Interval:
    return Interval(~x.hi, ~x.lo)


@_rule("shift_right_arithmetic", "shift_right_logical")
def _(node: Node, x: Interval, y: Interval) -> Interval:
    usual = (y.lo == y.hi) & (y.lo >= 0) & (y.lo < jnp.iinfo(node.dtype).bits)
    if node.op == "shift_right_logical":
        usual = usual & (x.lo >= 0)
    distance = where(usual, y.lo, 0).astype(node.dtype)
    return either(usual, Interval(x.lo >> distance, x.hi >> distance), anything(node.dtype))


@_rule("shift_left")
def _(node: Node, x: Interval, y: Interval) -> Interval:
    usual = (y.lo == y.hi) & (y.lo >= 0) & (y.lo < jnp.iinfo(node.dtype).bits - 1)
    factor = np.asarray(1, node.dtype) << where(usual, y.lo, 0).astype(node.dtype)
    product = RULES["mul"](node, x, Interval(factor, factor))
    return either(usual, product, anything(node.dtype))


def _truth(x: Any) -> Any:
    """Returns a boolean as an array, which may be traced: `~True` is an integer."""
    return x if hasattr(x, "dtype") else np.asarray(x)


def _as_numbers(x: Interval) -> tuple[Any, Any]:
    """Returns the ends of an interval, booleans as integers."""
    if x.lo.dtype == np.bool_:
        return x.lo.astype(np.int8), x.hi.astype(np.int8)
    return x.lo, x.hi


def _less(x: Interval, y: Interval, compare: Any) -> Interval:
    (x_lo, x_hi), (y_lo, y_hi) = _as_numbers(x), _as_numbers(y)
    return Interval(compare(x_hi, y_lo) & ~(x.nan | _truth(y.nan)), compare(x_lo, y_hi))


RULES["lt"] = lambda node, x, y: _less(x, y, operator.lt)
RULES["le"] = lambda node, x, y: _less(x, y, operator.le)
RULES["gt"] = lambda node, x, y: _less(y, x, operator.lt)
RULES["ge"] = lambda node, x, y: _less(y, x, operator.le)


@_rule("eq")
def _(node: Node, x: Interval, y: Interval) -> Interval:
    (x_lo, x_hi), (y_lo, y_hi) = _as_numbers(x), _as_numbers(y)
    point = (x_lo == x_hi) & (y_lo == y_hi) & (x_lo == y_lo) & ~(x.nan | _truth(y.nan))
    return Interval(point, (x_lo <= y_hi) & (y_lo <= x_hi))


@_rule("ne")
def _(node: Node, x: Interval, y: Interval) -> Interval:
    same = RULES["eq"](node, x, y)
    return Interval(~same.hi, ~same.lo)


def _union(x: Interval, y: Interval) -> Interval:
    xp = numpy_of(x, y)
    return Interval(xp.minimum(x.lo, y.lo), xp.maximum(x.hi, y.hi), x.nan | _truth(y.nan))


@_rule("select_n")
def _(node: Node, which: Interval, *cases: Interval) -> Interval:
    any_case = functools.reduce(_union, cases)
    if which.lo.dtype != np.bool_:
        return any_case
    return either(which.lo, cases[1], either(~which.hi, cases[0], any_case))


@_rule("convert_element_type")
def _(node: Node, x: Interval) -> Interval:
    source, target = kind_of(x.lo.dtype), kind_of(node.dtype)
    if target == "b":
        return RULES["ne"](node, x, Interval(*[np.asarray(0, x.lo.dtype)] * 2))
    if source == "b" or target == "f":
        return x
    xp, limits = numpy_of(x), jnp.iinfo(node.dtype)
    if source == "f":
        margin = 4 * float(jnp.finfo(x.lo.dtype).eps) * limits.max
        fits = (x.lo >= min(limits.min + margin, 0)) & (x.hi <= limits.max - margin) & ~x.nan
    else:
        wide = jnp.iinfo(x.lo.dtype)
        fits = (x.lo >= max(limits.min, wide.min)) & (x.hi <= min(limits.max, wide.max))
    ends = (where(fits, end, 0) for end in x[:2])
    safe = (xp.trunc(end) if source == "f" else end for end in ends)
    return either(fits, Interval(*(end.astype(node.dtype) for end in safe)), anything(node.dtype))


def _increasing(roundings: int, absolute: float, function: Callable[..., Any]) -> _Rule:
    """Returns the rule of an increasing function, `function(xp, x)`.

    XLA's relative error is at most `roundings`, its absolute error `absolute`, in units in the last
    place of 1.
    """

    def rule(node: Node, x: Interval) -> Interval:
        xp, eps = numpy_of(x), float(jnp.finfo(node.dtype).eps)
        result = Interval(function(xp, x.lo), function(xp, x.hi), x.nan)
        return _moved_out(result, node.dtype, roundings, absolute * eps) if roundings else result

    return rule


for _name, _roundings, _absolute in (
    ("floor", 0, 0.0),
    ("ceil", 0, 0.0),
    ("sqrt", 4, 0.0),
    ("exp", 32, 0.0),
    ("exp2", 32, 0.0),
    ("expm1", 32, 32.0),
    ("log", 32, 32.0),
    ("log1p", 32, 32.0),
    ("tanh", 32, 32.0),
):
    RULES[_name] = _increasing(
        _roundings, _absolute, lambda xp, x, name=_name: getattr(xp, name)(x)
    )
RULES["logistic"] = _increasing(32, 32.0, lambda xp, x: 1 / (1 + xp.exp(-x)))


@_rule("round")
def _(node: Node, x: Interval) -> Interval:
    """Halves may be rounded up or down."""
    return Interval(numpy_of(x).ceil(x.lo - 0.5), numpy_of(x).floor(x.hi + 0.5), x.nan)


@_rule("reduce_precision")
def _(node: Node, x: Interval) -> Interval:
    """Exact, because rounding to fewer bits is non-decreasing."""
    if not is_static(x):
        lo, hi = (operations.apply(node, [end]) for end in x[:2])
        return Interval(lo, hi, x.nan)
    with jax.ensure_compile_time_eval():
        lo, hi = (np.asarray(operations.apply(node, [end])) for end in x[:2])
    return Interval(lo, hi, x.nan)


@_rule("custom")
def _(node: Node, value: Interval, *inputs: Interval) -> Interval:
    return value


@_rule("rsqrt")
def _(node: Node, x: Interval) -> Interval:
    lo, hi = (1 / numpy_of(x).sqrt(end) for end in (x.hi, x.lo))
    return _moved_out(Interval(lo, hi, x.nan), node.dtype, 8)


@_rule("sin", "cos")
def _(node: Node, x: Interval) -> Interval:
    unknown = (abs(x.lo) == np.inf) | (abs(x.hi) == np.inf)
    return Interval(np.float32(-1.001), np.float32(1.001), x.nan | unknown)


@_rule("is_finite")
def _(node: Node, x: Interval) -> Interval:
    known = (abs(x.lo) < np.inf) & (abs(x.hi) < np.inf) & ~_truth(x.nan)
    return Interval(known, np.True_)
