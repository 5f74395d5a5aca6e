"""Interval arithmetic: the interval of an operation's result, given intervals of its operands.

An interval always contains every value that the operation may give on a device: if integers may
overflow, it has all values of the dtype; the ends of intervals of floats are moved outwards by the
possible rounding errors; and results that may be NaN are marked. `RULES` holds the rule of each
operation. An operation without a rule may give any value.

The ends `lo` and `hi` are arrays with an entry for each of several tiles: arrays of NumPy if they
are static, else of JAX.
"""

import contextlib
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
    """The numbers from `lo` to `hi`, both inclusive. `nan` is true if NaN is possible as well.

    For booleans, `lo` is true if the value is certainly true, and `hi` if it may be true.
    """

    lo: Any
    hi: Any
    nan: Any = False


def is_static(*values: Any) -> bool:
    """Returns whether no array in the values is an array of JAX."""
    return not any(isinstance(x, jax.Array) for x in jax.tree.leaves(values))


def numpy_of(*values: Any) -> Any:
    """Returns numpy if all values are static, else jax.numpy."""
    return np if is_static(*values) else jnp


def kind_of(dtype: Any) -> str:
    """Returns "b" for booleans, "i" for integers, "f" for floats, "?" for other dtypes."""
    for letter, kind in (("b", np.bool_), ("i", jnp.integer), ("f", jnp.floating)):
        if jnp.issubdtype(dtype, kind):
            return letter
    return "?"


def anything(dtype: Any) -> Interval:
    """Returns the interval of all values of a dtype, with NaN for floats."""
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
    """Casts the ends to the dtype. If an end is NaN, the value may be anything. An end between 0
    and the least normal number is moved to 0, as devices may flush subnormal numbers to 0."""
    xp = numpy_of(x)
    lo = xp.asarray(x.lo).astype(dtype)
    hi = lo if x.hi is x.lo else xp.asarray(x.hi).astype(dtype)
    if kind_of(dtype) != "f":
        return Interval(lo, hi)
    tiny = jnp.finfo(dtype).tiny
    lo, hi = where((lo > 0) & (lo < tiny), 0, lo), where((hi < 0) & (hi > -tiny), 0, hi)
    may_be_nan = xp.isnan(lo) | xp.isnan(hi) | x.nan
    lo, hi = where(may_be_nan, -np.inf, lo), where(may_be_nan, np.inf, hi)
    return Interval(lo.astype(dtype), hi.astype(dtype), may_be_nan)


_Rule = Callable[..., Interval]
RULES: dict[str, _Rule] = {}
"""The rule of each operation: `rule(node, *operands)`, where each operand is an `Interval`."""


def _rule(*names: str) -> Callable[[_Rule], _Rule]:
    """Returns a decorator that registers the rule of the operations with these names."""

    def register(rule: _Rule) -> _Rule:
        RULES.update(dict.fromkeys(names, rule))
        return rule

    return register


def _of_booleans(operation: Callable[..., Any], rule: _Rule) -> _Rule:
    """Returns a rule that applies an increasing operation to booleans, and `rule` to numbers."""

    def rule_by_dtype(node: Node, x: Interval, y: Interval) -> Interval:
        if kind_of(node.dtype) == "b":
            return Interval(operation(x.lo, y.lo), operation(x.hi, y.hi))
        return rule(node, x, y)

    return rule_by_dtype


def _as_float(x: Any) -> Any:
    """Converts integers to the widest float dtype, in which sums and products do not overflow."""
    dtype = np.float64 if is_static(x) else jnp.zeros(0).dtype  # JAX may have only float32 enabled
    return numpy_of(x).asarray(x).astype(dtype)


def _moved_out(x: Interval, dtype: Any, roundings: Any = 2, absolute: float = 0.0) -> Interval:
    """Moves the ends outwards by roundings, each relative to the end, and an absolute error."""
    limits = jnp.finfo(dtype)
    relative, absolute = roundings * float(limits.eps), max(float(limits.tiny), absolute)

    def moved(end: Any, sign: int) -> Any:
        return where(abs(end) == np.inf, end, end + sign * (abs(end) * relative + absolute))

    return Interval(moved(x.lo, -1), moved(x.hi, 1), x.nan)


def _extremes(xp: Any, values: list[Any]) -> tuple[Any, Any]:
    return functools.reduce(xp.minimum, values), functools.reduce(xp.maximum, values)


def _at_corners(node: Node, exact: Callable[..., Any], *args: Interval) -> Interval:
    """Returns the interval of an operation, monotonic in each operand, from the operands' ends."""
    corners = list(itertools.product(*(x[:2] for x in args)))
    nan = functools.reduce(lambda a, b: a | _truth(b), [x.nan for x in args])
    lo, hi = _extremes(numpy_of(args), [exact(*corner) for corner in corners])
    if kind_of(node.dtype) == "f":
        return _moved_out(Interval(lo, hi, nan), node.dtype)
    # If a result in floats is in the range of the dtype, the integers did not overflow.
    estimates = [exact(*map(_as_float, corner)) for corner in corners]
    limits = jnp.iinfo(node.dtype)
    margin = 4.0 * float(jnp.finfo(estimates[0].dtype).eps) * max(abs(limits.min), limits.max)
    least, most = _extremes(numpy_of(*estimates), estimates)
    fits = (least >= limits.min + margin) & (most <= limits.max - margin)
    return either(fits, Interval(lo, hi), anything(node.dtype))


def _corners(exact: Callable[..., Any]) -> _Rule:
    return lambda node, *args: _at_corners(node, exact, *args)


RULES["add"] = _of_booleans(operator.or_, _corners(operator.add))
RULES["sub"] = _corners(operator.sub)
RULES["neg"] = _corners(operator.neg)
RULES["square"] = lambda node, x: _power(node, x, 2)
RULES["integer_pow"] = lambda node, x: _power(node, x, node.param)


def _product(node: Node, x: Interval, y: Interval) -> Interval:
    """Returns the interval of `x * y` of numbers, where infinity times 0 is NaN, also if the 0 is
    not an end of its interval."""
    result = _at_corners(node, operator.mul, x, y)
    if kind_of(node.dtype) != "f":
        return result
    for a, b in ((x, y), (y, x)):
        is_infinite = (abs(a.lo) == np.inf) | (abs(a.hi) == np.inf)
        nan = result.nan | (is_infinite & (b.lo <= 0) & (b.hi >= 0))
        result = result._replace(nan=nan)
    return result


RULES["mul"] = _of_booleans(operator.and_, _product)


def _power(node: Node, x: Interval, exponent: Any) -> Interval:
    if exponent <= 0:
        return anything(node.dtype)

    def power(a: Any) -> Any:
        """Computes a**exponent by squaring."""
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
    contains_0 = (x.lo <= 0) & (x.hi >= 0)
    return result._replace(lo=where(contains_0, numpy_of(x).minimum(result.lo, 0), result.lo))


@_rule("abs")
def _(node: Node, x: Interval) -> Interval:
    xp, is_float = numpy_of(x), kind_of(node.dtype) == "f"
    if not is_float:
        x = either(x.lo > jnp.iinfo(node.dtype).min, x, anything(node.dtype))
    ends = abs(x.lo), abs(x.hi)
    contains_0 = (x.lo <= 0) & (x.hi >= 0)
    result = Interval(where(contains_0, 0, xp.minimum(*ends)), xp.maximum(*ends), x.nan)
    if is_float:
        return result
    return either(x.lo > jnp.iinfo(node.dtype).min, result, anything(node.dtype))


def _extreme(name: str, x: Interval, y: Interval) -> Interval:
    """Returns the interval of "maximum" or "minimum"."""
    extreme = getattr(numpy_of(x, y), name)
    return Interval(extreme(x.lo, y.lo), extreme(x.hi, y.hi), x.nan | _truth(y.nan))


RULES["max"] = lambda node, x, y: _extreme("maximum", x, y)
RULES["min"] = lambda node, x, y: _extreme("minimum", x, y)
RULES["clamp"] = lambda node, low, x, high: _extreme("minimum", _extreme("maximum", x, low), high)


@_rule("div")
def _(node: Node, x: Interval, y: Interval) -> Interval:
    if kind_of(node.dtype) != "f":
        return _integer_division(node, x, y, _truncating_division)
    not_0 = (y.lo > 0) | (y.hi < 0)
    return either(not_0, _at_corners(node, operator.truediv, x, y), anything(node.dtype))


RULES["floor_divide"] = lambda node, x, y: _integer_division(node, x, y, operator.floordiv)


def _truncating_division(a: Any, b: Any) -> Any:
    quotient = abs(a) // abs(b)
    return where((a < 0) != (b < 0), -quotient, quotient)


def _integer_division(node: Node, x: Interval, y: Interval, divide: Any) -> Interval:
    """Returns the interval of `divide(x, y)`: any number if y may be 0, or if an operand may be the
    least integer, whose absolute value overflows."""
    least = jnp.iinfo(node.dtype).min
    is_valid = ((y.lo > 0) | (y.hi < 0)) & (x.lo > least) & (y.lo > least)
    one = Interval(*[np.asarray(1, node.dtype)] * 2)
    x, y = (either(is_valid, z, one) for z in (x, y))  # NumPy must not divide by 0
    corners = [divide(a, b) for a in x[:2] for b in y[:2]]
    return either(is_valid, Interval(*_extremes(numpy_of(x, y), corners)), anything(node.dtype))


@_rule("remainder")
def _(node: Node, x: Interval, y: Interval) -> Interval:
    """Exact if y is one number and x stays between two multiples of it; else 0..y − 1 for y > 0."""
    limits = jnp.iinfo(node.dtype)
    is_positive = y.lo > 0
    low, high = (where(is_positive, end, 1) for end in y[:2])
    is_exact = is_positive & (low == high) & (x.lo // low == x.hi // low)
    period = Interval(where(is_positive, 0, limits.min), where(is_positive, high - 1, limits.max))
    return either(is_exact, Interval(x.lo % low, x.hi % low), period)


@_rule("rem")
def _(node: Node, x: Interval, y: Interval) -> Interval:
    """`lax.rem`, whose result has the sign of x; for x ≥ 0 it equals the remainder."""
    if kind_of(node.dtype) == "f":
        return anything(node.dtype)
    return either(x.lo >= 0, RULES["remainder"](node, x, y), anything(node.dtype))


def _exact_at_points(x: Interval, y: Interval, operation: Any, other: Interval) -> Any:
    """Returns `operation(x, y)` if each interval is a single number, else the interval `other`."""
    are_points = (x.lo == x.hi) & (y.lo == y.hi)
    point = operation(x.lo, y.lo)
    return either(are_points, Interval(point, point), other)


def _and(node: Node, x: Interval, y: Interval) -> Interval:
    """Returns the interval of `x & y` of integers, which is narrow if one of them is a constant of
    the form 2**n − 1 (the last bits) or −2**n (all bits but the last)."""
    xp, limits = numpy_of(x, y), jnp.iinfo(node.dtype)
    most = xp.minimum(where(x.lo >= 0, x.hi, limits.max), where(y.lo >= 0, y.hi, limits.max))
    result = Interval(where((x.lo >= 0) | (y.lo >= 0), 0, limits.min), most)
    for mask, z in ((x, y), (y, x)):
        is_point = mask.lo == mask.hi
        is_below_max = (mask.lo >= 0) & (mask.lo < limits.max)
        is_last_bits = is_point & is_below_max & (mask.lo & (mask.lo + 1) == 0)
        period = where(is_last_bits, mask.lo, 0) + np.asarray(1, node.dtype)
        # The last bits of z are its remainder by 2**n.
        remainder = RULES["remainder"](node, z, Interval(period, period))
        result = either(is_last_bits, remainder, result)
        is_first_bits = is_point & (mask.lo < 0) & (~mask.lo & (~mask.lo + 1) == 0)
        # z without its last bits is non-decreasing in z.
        result = either(is_first_bits, Interval(z.lo & mask.lo, z.hi & mask.lo), result)
    return _exact_at_points(x, y, operator.and_, result)


RULES["and"] = _of_booleans(operator.and_, _and)
RULES["or"] = _of_booleans(
    operator.or_,
    lambda node, x, y: _exact_at_points(x, y, operator.or_, anything(node.dtype)),
)
RULES["not"] = lambda node, x: Interval(~x.hi, ~x.lo)
RULES["custom"] = lambda node, value, *inputs: value


@_rule("xor")
def _(node: Node, x: Interval, y: Interval) -> Interval:
    if kind_of(node.dtype) == "b":
        is_certain = (x.lo == x.hi) & (y.lo == y.hi)
        return Interval(is_certain & (x.lo ^ y.lo), ~is_certain | (x.lo ^ y.lo))
    return _exact_at_points(x, y, operator.xor, anything(node.dtype))


@_rule("shift_right_arithmetic", "shift_right_logical")
def _(node: Node, x: Interval, y: Interval) -> Interval:
    is_valid = (y.lo == y.hi) & (y.lo >= 0) & (y.lo < jnp.iinfo(node.dtype).bits)
    if node.op == "shift_right_logical":
        is_valid = is_valid & (x.lo >= 0)
    elif jnp.issubdtype(node.dtype, jnp.unsignedinteger):  # shifted as if it had a sign
        is_valid = is_valid & (x.hi <= jnp.iinfo(node.dtype).max // 2)
    distance = where(is_valid, y.lo, 0).astype(node.dtype)
    return either(is_valid, Interval(x.lo >> distance, x.hi >> distance), anything(node.dtype))


@_rule("shift_left")
def _(node: Node, x: Interval, y: Interval) -> Interval:
    is_valid = (y.lo == y.hi) & (y.lo >= 0) & (y.lo < jnp.iinfo(node.dtype).bits - 1)
    factor = np.asarray(1, node.dtype) << where(is_valid, y.lo, 0).astype(node.dtype)
    product = RULES["mul"](node, x, Interval(factor, factor))
    return either(is_valid, product, anything(node.dtype))


def _truth(x: Any) -> Any:
    """Returns a boolean as an array, so that `~` negates it: `~True` is the integer −2."""
    return x if hasattr(x, "dtype") else np.asarray(x)


def _as_numbers(x: Interval) -> tuple[Any, Any]:
    """Returns the ends of an interval, with booleans as integers, which can be compared."""
    if x.lo.dtype == np.bool_:
        return x.lo.astype(np.int8), x.hi.astype(np.int8)
    return x.lo, x.hi


def _less(x: Interval, y: Interval, compare: Any) -> Interval:
    """Returns the interval of `x < y` or `x <= y`, which is false for NaN."""
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
    equal = RULES["eq"](node, x, y)
    return Interval(~equal.hi, ~equal.lo)


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
        source_limits = jnp.iinfo(x.lo.dtype)
        least, most = max(limits.min, source_limits.min), min(limits.max, source_limits.max)
        fits = (x.lo >= least) & (x.hi <= most)
    ends = (where(fits, end, 0) for end in x[:2])
    safe = (xp.trunc(end) if source == "f" else end for end in ends)
    return either(fits, Interval(*(end.astype(node.dtype) for end in safe)), anything(node.dtype))


def _increasing(roundings: int, absolute: float, function: Callable[..., Any]) -> _Rule:
    """Returns the rule of an increasing function, which `function(xp, x)` computes with numpy or
    jax.numpy as `xp`.

    The error of XLA's result is at most `roundings` times the result's magnitude plus `absolute`,
    both in units of the dtype's epsilon.
    """

    def rule(node: Node, x: Interval) -> Interval:
        xp = numpy_of(x)
        result = Interval(function(xp, x.lo), function(xp, x.hi), x.nan)
        if not roundings:  # `sign` may have integers, which have no epsilon
            return result
        eps = float(jnp.finfo(node.dtype).eps)
        return _moved_out(result, node.dtype, roundings, absolute * eps)

    return rule


for _name, _roundings, _absolute in (
    ("sign", 0, 0.0),
    ("floor", 0, 0.0),
    ("ceil", 0, 0.0),
    ("sqrt", 4, 0.0),
    ("exp", 32, 0.0),
    ("expm1", 32, 32.0),
    ("log", 32, 32.0),
    ("log1p", 128, 32.0),
    ("tanh", 32, 32.0),
):
    RULES[_name] = _increasing(
        _roundings, _absolute, lambda xp, x, name=_name: getattr(xp, name)(x)
    )


@_rule("exp2")
def _(node: Node, x: Interval) -> Interval:
    """XLA computes exp(x log 2), and the rounding of the product grows with x."""
    xp = numpy_of(x)
    roundings = 4 + xp.minimum(xp.maximum(abs(x.lo), abs(x.hi)), 1100)
    return _moved_out(Interval(xp.exp2(x.lo), xp.exp2(x.hi), x.nan), node.dtype, roundings)


RULES["logistic"] = _increasing(32, 32.0, lambda xp, x: 1 / (1 + xp.exp(-x)))
RULES["round"] = lambda node, x: Interval(  # contains both roundings of halves, up and down
    numpy_of(x).ceil(x.lo - 0.5), numpy_of(x).floor(x.hi + 0.5), x.nan
)


@_rule("reduce_precision")
def _(node: Node, x: Interval) -> Interval:
    """Exact, because rounding to fewer bits is non-decreasing."""
    xp = numpy_of(x)
    with jax.ensure_compile_time_eval() if xp is np else contextlib.nullcontext():
        lo, hi = (xp.asarray(operations.apply(node, [end])) for end in x[:2])
    return Interval(lo, hi, x.nan)


@_rule("rsqrt")
def _(node: Node, x: Interval) -> Interval:
    lo, hi = (1 / numpy_of(x).sqrt(end) for end in (x.hi, x.lo))
    contains_0 = (x.lo <= 0) & (x.hi >= 0)  # 1 / sqrt(-0) is -infinity
    lo, hi = where(contains_0, -np.inf, lo), where(contains_0, np.inf, hi)
    return _moved_out(Interval(lo, hi, x.nan), node.dtype, 8)


@_rule("sin", "cos")
def _(node: Node, x: Interval) -> Interval:
    may_be_infinite = (abs(x.lo) == np.inf) | (abs(x.hi) == np.inf)
    return Interval(np.float32(-1.001), np.float32(1.001), x.nan | may_be_infinite)


@_rule("is_finite")
def _(node: Node, x: Interval) -> Interval:
    is_certain = (abs(x.lo) < np.inf) & (abs(x.hi) < np.inf) & ~_truth(x.nan)
    return Interval(is_certain, np.True_)
