"""What is certain about an expression whose scalars lie in intervals: interval arithmetic.

Masks ask it about tiles: their queries and keys are intervals of positions, and a rule that is
certainly false in a tile empties it. Intervals are never too narrow, whatever the arithmetic does:
integers that may overflow may be anything, ends of floats are moved outwards by what rounding may
change, and what may be NaN is said to be. An operation that is not known may give anything.

Ends are arrays, one entry for each of several tiles at once, NumPy's where all is known while
tracing. In a table the least and greatest of a run of entries are found in memory linear in it.
What depends on one of the scalars alone is not left to intervals where its run of integers is known
while tracing: it is found for each of them, so that `clip(x // 8, 2, 5) * 8 + x % 8` is exact.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jattn import expressions
from jattn.expressions import Expression, Node


class Interval(NamedTuple):
    """Numbers of `lo..hi`, both inclusive; `nan`: possibly NaN as well. Of booleans `lo` says
    whether it is certainly true, `hi` whether it may be."""

    lo: Any
    hi: Any
    nan: Any = False


def of(expression: Expression, scalars: Sequence[Interval]) -> Interval:
    """The interval of an expression of one result whose scalars lie in these."""
    found: dict[int, Interval] = {}
    with np.errstate(all="ignore"), jax.numpy_dtype_promotion("standard"):
        alone = _OneScalar(expression, scalars)
        for node in expression.nodes:
            if id(node) in alone:
                found[id(node)] = alone.over_runs(node)
            else:
                args = [found[id(x)] for x in node.args]
                found[id(node)] = _of_node(node, args, scalars, expression.tables)
    (result,) = expression.results
    return found[id(result)]


def of_operation(op: str, dtype: Any, args: Sequence[Interval], param: Any = None) -> Interval:
    """The interval of one operation of `expressions.Node`, whose operands lie in these."""
    operands = tuple(Node("input", (), x.lo.dtype) for x in args)
    with np.errstate(all="ignore"), jax.numpy_dtype_promotion("standard"):
        return _of_node(Node(op, operands, np.dtype(dtype), param), [*args], (), [])


_MOST_NUMBERS = 2**20  # of the runs of a scalar, that are taken one by one
_TRACED = -1  # in place of a scalar: a table that only the program knows


class _OneScalar:
    """The nodes that depend on one scalar of which each number is known, and on nothing else that
    varies: intervals of single numbers are as good as the numbers."""

    def __init__(self, expression: Expression, scalars: Sequence[Interval]):
        self.tables = expression.tables
        self.points = [_numbers(x) for x in scalars]
        self.fixed = [_is_static_point(x) for x in scalars]
        self.scalars = scalars
        self.of: dict[int, set[int]] = {}
        self.found: dict[int, Interval] = {}
        for node in expression.nodes:
            self.of[id(node)] = set().union(*(self.of[id(x)] for x in node.args))
            number: Any = node.param
            if node.op == "input" and not self.fixed[number]:
                self.of[id(node)] = {number}
            if node.op == "look_up" and isinstance(self.tables[number], Tracer):
                self.of[id(node)] |= {_TRACED}

    def __contains__(self, node: int) -> bool:
        on = self.of[node]
        return len(on) == 1 and on != {_TRACED} and self.points[min(on)] is not None

    def over_runs(self, node: Node) -> Interval:
        """The least and greatest over each run."""
        lo, hi, nan = self.at_points(node)
        shape = np.shape(self.points[min(self.of[id(node)])])  # pyright: ignore
        lo, hi = (np.broadcast_to(x, shape) for x in (lo, hi))
        return Interval(lo.min(axis=-1), hi.max(axis=-1), np.broadcast_to(nan, shape).any(axis=-1))

    def at_points(self, node: Node) -> Interval:
        """The interval for each number of the runs, `[..., numbers]`."""
        if id(node) not in self.found:
            args = [self.at_points(x) for x in node.args]
            self.found[id(node)] = _of_node(node, args, self._inputs(), self.tables)
        return self.found[id(node)]

    def _inputs(self) -> list[Interval]:
        pairs = zip(self.points, self.scalars, strict=True)
        return [x if points is None else Interval(points, points) for points, x in pairs]


def _numbers(x: Interval) -> np.ndarray | None:
    """Each number of runs of integers, `[..., numbers]`; the last are repeated. None where they are
    not known, or many."""
    if not _static(x) or _kind(np.asarray(x.lo).dtype) != "i" or _is_static_point(x):
        return None
    lo, hi = np.broadcast_arrays(x.lo, x.hi)
    widths = hi.astype(np.float64) - lo + 1
    if not lo.size or lo.size * widths.max() > _MOST_NUMBERS or widths.min() < 1:
        return None
    offsets = np.arange(int(widths.max()), dtype=lo.dtype)
    return lo[..., None] + np.minimum(offsets, (hi - lo)[..., None])


def _is_static_point(x: Interval) -> bool:
    """Whether it is one number, the same for all tiles."""
    return _static(x) and not np.shape(x.lo) and bool(np.all(x.lo == x.hi))


def _of_node(node: Node, args: list[Interval], scalars: Any, tables: list[Any]) -> Interval:
    if node.op == "input":
        return scalars[node.param]
    if node.op == "const":
        value = np.asarray(node.param, node.dtype)
        return _checked(Interval(value, value), node.dtype)
    if node.op == "look_up":
        return _checked(_looked_up(tables[node.param], args), node.dtype)  # pyright: ignore
    rule = _RULES.get(node.op)
    if (
        rule is None
        or not _is_number(node.dtype)
        or not all(_is_number(x.dtype) for x in node.args)
    ):
        return anything(node.dtype)
    if args and not _static(args) and _kind(node.dtype) in "bi" and all(x.lo is x.hi for x in args):
        exact = expressions.apply(node, [x.lo for x in args])  # a batch row or a head
        return Interval(exact, exact)
    return _checked(rule(node, *args), node.dtype)


def _is_number(dtype: Any) -> bool:
    return isinstance(dtype, np.dtype)


def _static(*values: Any) -> bool:
    return not any(isinstance(x, jax.Array) for x in jax.tree.leaves(values))


def _xp(*values: Any) -> Any:
    return np if _static(*values) else jnp


def _kind(dtype: Any) -> str:
    """ "b" for booleans, "i" for integers, "f" for floats."""
    for letter, kind in (("b", np.bool_), ("i", jnp.integer), ("f", jnp.floating)):
        if jnp.issubdtype(dtype, kind):
            return letter
    return "?"


def anything(dtype: Any) -> Interval:
    kind = _kind(dtype)
    if kind == "b":
        return Interval(np.False_, np.True_)
    if kind == "i":
        limits = jnp.iinfo(dtype)
        return Interval(np.asarray(limits.min, dtype), np.asarray(limits.max, dtype))
    return Interval(np.asarray(-np.inf, np.float32), np.asarray(np.inf, np.float32), np.True_)


def _where(condition: Any, x: Any, y: Any) -> Any:
    if _static(condition, x, y):
        return np.where(condition, x, y)
    return jnp.where(condition, x, y)


def _either(condition: Any, x: Interval, y: Interval) -> Interval:
    return Interval(*(_where(condition, a, b) for a, b in zip(x, y, strict=True)))


def _union(x: Interval, y: Interval) -> Interval:
    xp = _xp(x, y)
    return Interval(xp.minimum(x.lo, y.lo), xp.maximum(x.hi, y.hi), x.nan | _truth(y.nan))


def _checked(x: Interval, dtype: Any) -> Interval:
    """Ends in the dtype; those that are NaN say nothing, and numbers next to 0 may count as 0."""
    xp = _xp(x)
    lo = xp.asarray(x.lo).astype(dtype)
    hi = lo if x.hi is x.lo else xp.asarray(x.hi).astype(dtype)
    if _kind(dtype) != "f":
        return Interval(lo, hi)
    tiny = jnp.finfo(dtype).tiny
    lo, hi = _where((lo > 0) & (lo < tiny), 0, lo), _where((hi < 0) & (hi > -tiny), 0, hi)
    unknown = xp.isnan(lo) | xp.isnan(hi) | x.nan
    lo, hi = _where(unknown, -np.inf, lo), _where(unknown, np.inf, hi)
    return Interval(lo.astype(dtype), hi.astype(dtype), unknown)


# --- entries of tables --------------------------------------------------------------------------


def _looked_up(table: Any, places: list[Interval]) -> Interval:
    """The least and greatest entry whose places lie in these intervals."""
    if isinstance(table, jax.Array) and not isinstance(table, Tracer):
        with jax.ensure_compile_time_eval():
            table = np.asarray(table)
    if jnp.issubdtype(table.dtype, jnp.bool_):
        table = table.astype(np.int8)
    while places and not np.shape(places[0].lo) and _is_point(places[0]):
        place, places = places[0].lo, places[1:]
        table = (table if _static(place) else jnp.asarray(table))[place]
    if not places:
        return Interval(table, table)
    if _static(table, places) and all(_is_point(x) for x in places):
        sizes = zip(places, table.shape, strict=True)
        entries = table[tuple(np.clip(x.lo, 0, n - 1) for x, n in sizes)]
        return Interval(entries, entries)
    least = most = table
    shapes = [np.broadcast_shapes(np.shape(x.lo), np.shape(x.hi)) for x in places]
    if len(places) == 1:
        return Interval(*(x.reshape(shapes[0]) for x in _extremes(least, most, places[0])))
    rows = _side_of_rows(shapes)
    if len(places) > 2 or rows is None:
        xp = _xp(table)
        return Interval(xp.min(table), xp.max(table))
    if rows == 1:
        least = most = table.T
        places = places[::-1]
    least, most = (x.T for x in _extremes(least, most, places[0]))  # [S, n]
    least, most = (x.T for x in _extremes(least, most, places[1]))  # [n, m]
    return Interval(least, most)


def _side_of_rows(shapes: list[Any]) -> int | None:
    """Which of two intervals runs along the rows of tiles, if the other runs along the columns."""
    sides = [
        {n for n, size in enumerate((1,) * (2 - len(shape)) + shape) if size > 1}
        for shape in shapes
    ]
    for rows in (0, 1):
        if len(sides) == 2 and sides[rows] <= {0} and sides[1 - rows] <= {1}:
            return rows
    return None


def _is_point(x: Interval) -> bool:
    return x.lo is x.hi or (_static(x) and bool(np.all(x.lo == x.hi)))


def _extremes(least: Any, most: Any, places: Interval) -> tuple[Any, Any]:
    """The least of `least` and the greatest of `most`, `[n, ...]`, in each of p runs of places:
    `[p, ...]`. Of runs of a power of two they are found by doubling; two of these cover any run."""
    n = least.shape[0]
    shape = np.broadcast_shapes(np.shape(places.lo), np.shape(places.hi))
    xp = _xp(least, most, places)
    least, most = xp.asarray(least), xp.asarray(most)
    lo, hi = (xp.clip(xp.broadcast_to(x, shape).reshape(-1), 0, n - 1) for x in places[:2])
    lo, hi = lo.astype(np.int32), hi.astype(np.int32)
    level = _floor_log2(xp, hi - lo + 1)
    levels = int(level.max(initial=0)) + 1 if xp is np else (n - 1).bit_length() + 1

    def step(k: Any, state: Any) -> Any:
        least, most, *found = state
        width = xp.asarray(1 << k, np.int32)
        here = (level == k).reshape(-1, *[1] * (least.ndim - 1))
        ends = lo, xp.maximum(hi - width + 1, 0)
        now = xp.minimum(*(least[x] for x in ends)), xp.maximum(*(most[x] for x in ends))
        found = [_where(here, x, y) for x, y in zip(now, found, strict=True)]
        next_one = xp.minimum(xp.arange(n, dtype=np.int32) + width, n - 1)
        return xp.minimum(least, least[next_one]), xp.maximum(most, most[next_one]), *found

    state = least, most, least[lo], most[lo]
    if xp is np:
        for k in range(levels):
            state = step(k, state)
    else:
        state = jax.lax.fori_loop(np.int32(0), np.int32(levels), step, state)
    return state[2], state[3]


def _floor_log2(xp: Any, x: Any) -> Any:
    return 31 - jax.lax.clz(x) if xp is jnp else np.frexp(x.astype(np.float64))[1] - 1


# --- operations ---------------------------------------------------------------------------------

_Rule = Callable[..., Interval]
_RULES: dict[str, _Rule] = {}


def _rule(*names: str) -> Callable[[_Rule], _Rule]:
    def register(rule: _Rule) -> _Rule:
        _RULES.update(dict.fromkeys(names, rule))
        return rule

    return register


def _wide(x: Any) -> Any:
    """About the same number, which does not overflow."""
    wide = np.float64 if _static(x) else jnp.zeros(0).dtype  # of which there is the widest
    return _xp(x).asarray(x).astype(wide)


def _moved_out(x: Interval, dtype: Any, roundings: int = 2, absolute: float = 0.0) -> Interval:
    """As wide as other orders of rounding may make it."""
    limits = jnp.finfo(dtype)
    relative, absolute = roundings * float(limits.eps), max(float(limits.tiny), absolute)

    def moved(end: Any, sign: int) -> Any:
        return _where(abs(end) == np.inf, end, end + sign * (abs(end) * relative + absolute))

    return Interval(moved(x.lo, -1), moved(x.hi, 1), x.nan)


def _at_corners(node: Node, exact: Callable[..., Any], *args: Interval) -> Interval:
    """Of an operation that, with all operands but one fixed, rises or falls throughout."""
    xp = _xp(args)
    ends = [()]
    for x in args:
        ends = [(*before, end) for before in ends for end in (x.lo, x.hi)]
    nan = args[0].nan
    for x in args[1:]:
        nan = nan | _truth(x.nan)
    found = [exact(*end) for end in ends]
    lo, hi = found[0], found[0]
    for one in found[1:]:
        lo, hi = xp.minimum(lo, one), xp.maximum(hi, one)
    if _kind(node.dtype) == "f":
        return _moved_out(Interval(lo, hi, nan), node.dtype)
    estimates = [exact(*map(_wide, end)) for end in ends]
    limits = jnp.iinfo(node.dtype)
    margin = 4.0 * float(jnp.finfo(estimates[0].dtype).eps) * max(abs(limits.min), limits.max)
    fits = np.True_
    for one in estimates:
        fits = fits & (one >= limits.min + margin) & (one <= limits.max - margin)
    return _either(fits, Interval(lo, hi), anything(node.dtype))


@_rule("add")
def _(node: Node, x: Interval, y: Interval) -> Interval:
    if _kind(node.dtype) == "b":
        return Interval(x.lo | y.lo, x.hi | y.hi)
    return _at_corners(node, lambda a, b: a + b, x, y)


@_rule("sub")
def _(node: Node, x: Interval, y: Interval) -> Interval:
    return _at_corners(node, lambda a, b: a - b, x, y)


@_rule("mul")
def _(node: Node, x: Interval, y: Interval) -> Interval:
    if _kind(node.dtype) == "b":
        return Interval(x.lo & y.lo, x.hi & y.hi)
    # 0 times an end that stands for infinitely many: NaN, and so anything.
    return _at_corners(node, lambda a, b: a * b, x, y)


@_rule("neg")
def _(node: Node, x: Interval) -> Interval:
    return _at_corners(node, lambda a: -a, x)


@_rule("square")
def _(node: Node, x: Interval) -> Interval:
    return _power(node, x, 2)


@_rule("integer_pow")
def _(node: Node, x: Interval) -> Interval:
    exponent: Any = node.param
    return _power(node, x, exponent) if exponent > 0 else anything(node.dtype)


def _power(node: Node, x: Interval, exponent: int) -> Interval:
    def power(a: Any) -> Any:
        product, left = None, exponent
        while left:
            if left % 2:
                product = a if product is None else product * a
            a, left = a * a, left // 2
        return product

    found = _at_corners(node, power, x)
    roundings = _moved_out(found, node.dtype, 2 * exponent) if _kind(node.dtype) == "f" else found
    if exponent % 2:
        return roundings
    through = (x.lo <= 0) & (x.hi >= 0)
    return roundings._replace(lo=_where(through, _xp(x).minimum(roundings.lo, 0), roundings.lo))


@_rule("abs")
def _(node: Node, x: Interval) -> Interval:
    xp = _xp(x)
    if _kind(node.dtype) == "f":
        ends = abs(x.lo), abs(x.hi)
    else:
        least = jnp.iinfo(node.dtype).min
        x = _either(x.lo > least, x, anything(node.dtype))
        ends = xp.abs(x.lo), xp.abs(x.hi)
    through = (x.lo <= 0) & (x.hi >= 0)
    found = Interval(_where(through, 0, xp.minimum(*ends)), xp.maximum(*ends), x.nan)
    if _kind(node.dtype) == "f":
        return found
    return _either(x.lo > jnp.iinfo(node.dtype).min, found, anything(node.dtype))


@_rule("sign")
def _(node: Node, x: Interval) -> Interval:
    return Interval(_xp(x).sign(x.lo), _xp(x).sign(x.hi), x.nan)


@_rule("max")
def _(node: Node, x: Interval, y: Interval) -> Interval:
    xp = _xp(x, y)
    return Interval(xp.maximum(x.lo, y.lo), xp.maximum(x.hi, y.hi), x.nan | _truth(y.nan))


@_rule("min")
def _(node: Node, x: Interval, y: Interval) -> Interval:
    xp = _xp(x, y)
    return Interval(xp.minimum(x.lo, y.lo), xp.minimum(x.hi, y.hi), x.nan | _truth(y.nan))


@_rule("clamp")
def _(node: Node, low: Interval, x: Interval, high: Interval) -> Interval:
    return _RULES["min"](node, _RULES["max"](node, x, low), high)


@_rule("div")
def _(node: Node, x: Interval, y: Interval) -> Interval:
    if _kind(node.dtype) == "f":
        apart = (y.lo > 0) | (y.hi < 0)
        return _either(apart, _at_corners(node, lambda a, b: a / b, x, y), anything(node.dtype))
    return _quotient(node, x, y, _truncated)


@_rule("floor_divide")
def _(node: Node, x: Interval, y: Interval) -> Interval:
    return _quotient(node, x, y, lambda a, b: a // b)


def _truncated(a: Any, b: Any) -> Any:
    quotient = abs(a) // abs(b)
    return _where((a < 0) != (b < 0), -quotient, quotient)


def _quotient(node: Node, x: Interval, y: Interval, divide: Any) -> Interval:
    limits = jnp.iinfo(node.dtype)
    usual = ((y.lo > 0) | (y.hi < 0)) & (x.lo > limits.min) & (y.lo > limits.min)
    safe = [_either(usual, given, Interval(*[np.asarray(1, node.dtype)] * 2)) for given in (x, y)]
    xp = _xp(safe)
    ends = [divide(a, b) for a in safe[0][:2] for b in safe[1][:2]]
    lo = xp.minimum(xp.minimum(ends[0], ends[1]), xp.minimum(ends[2], ends[3]))
    hi = xp.maximum(xp.maximum(ends[0], ends[1]), xp.maximum(ends[2], ends[3]))
    return _either(usual, Interval(lo, hi), anything(node.dtype))


@_rule("remainder")
def _(node: Node, x: Interval, y: Interval) -> Interval:
    """Within one period exact, else all of it."""
    limits = jnp.iinfo(node.dtype)
    usual = y.lo > 0
    low, high = (_where(usual, end, 1) for end in y[:2])
    alone = usual & (low == high) & (x.lo // low == x.hi // low)
    period = Interval(_where(usual, 0, limits.min), _where(usual, high - 1, limits.max))
    return _either(alone, Interval(x.lo % low, x.hi % low), period)


@_rule("rem")
def _(node: Node, x: Interval, y: Interval) -> Interval:
    """As C++ has it: with the sign of x."""
    if _kind(node.dtype) == "f":
        return anything(node.dtype)
    found = _RULES["remainder"](node, x, y)
    return _either(x.lo >= 0, found, anything(node.dtype))


@_rule("and")
def _(node: Node, x: Interval, y: Interval) -> Interval:
    if _kind(node.dtype) == "b":
        return Interval(x.lo & y.lo, x.hi & y.hi)
    xp = _xp(x, y)
    alone = (x.lo == x.hi) & (y.lo == y.hi)
    limits = jnp.iinfo(node.dtype)
    most = xp.minimum(_where(x.lo >= 0, x.hi, limits.max), _where(y.lo >= 0, y.hi, limits.max))
    held = (x.lo >= 0) | (y.lo >= 0)
    found = Interval(_where(held, 0, limits.min), most)
    for one, other in ((x, y), (y, x)):  # the last bits of a number are its remainder
        bits = (
            (one.lo == one.hi)
            & (one.lo >= 0)
            & (one.lo < limits.max)
            & (one.lo & (one.lo + 1) == 0)
        )
        period = _where(bits, one.lo, 0) + np.asarray(1, node.dtype)
        inside = _RULES["remainder"](node, other, Interval(period, period))
        found = _either(bits, inside, found)
        # Without its last bits a number rises when it does.
        first = (one.lo == one.hi) & (one.lo < 0) & (~one.lo & (~one.lo + 1) == 0)
        found = _either(first, Interval(other.lo & one.lo, other.hi & one.lo), found)
    return _either(alone, Interval(x.lo & y.lo, x.lo & y.lo), found)


@_rule("or")
def _(node: Node, x: Interval, y: Interval) -> Interval:
    if _kind(node.dtype) == "b":
        return Interval(x.lo | y.lo, x.hi | y.hi)
    return _bits(node, x, y, lambda a, b: a | b)


@_rule("xor")
def _(node: Node, x: Interval, y: Interval) -> Interval:
    if _kind(node.dtype) == "b":
        known = (x.lo == x.hi) & (y.lo == y.hi)
        return Interval(known & (x.lo ^ y.lo), ~known | (x.lo ^ y.lo))
    return _bits(node, x, y, lambda a, b: a ^ b)


def _bits(node: Node, x: Interval, y: Interval, operation: Any) -> Interval:
    alone = (x.lo == x.hi) & (y.lo == y.hi)
    point = operation(x.lo, y.lo)
    return _either(alone, Interval(point, point), anything(node.dtype))


@_rule("not")
def _(node: Node, x: Interval) -> Interval:
    return Interval(~x.hi, ~x.lo)


@_rule("shift_right_arithmetic", "shift_right_logical")
def _(node: Node, x: Interval, y: Interval) -> Interval:
    usual = (y.lo == y.hi) & (y.lo >= 0) & (y.lo < jnp.iinfo(node.dtype).bits)
    if node.op == "shift_right_logical":
        usual = usual & (x.lo >= 0)
    by = _where(usual, y.lo, 0).astype(node.dtype)
    return _either(usual, Interval(x.lo >> by, x.hi >> by), anything(node.dtype))


@_rule("shift_left")
def _(node: Node, x: Interval, y: Interval) -> Interval:
    bits = jnp.iinfo(node.dtype).bits - 1
    usual = (y.lo == y.hi) & (y.lo >= 0) & (y.lo < bits)
    factor = np.asarray(1, node.dtype) << _where(usual, y.lo, 0).astype(node.dtype)
    found = _RULES["mul"](node, x, Interval(factor, factor))
    return _either(usual, found, anything(node.dtype))


def _truth(x: Any) -> Any:
    """A boolean as an array, which may be traced: `~True` is an integer."""
    return x if hasattr(x, "dtype") else np.asarray(x)


def _comparable(x: Interval) -> tuple[Any, Any]:
    """Its ends, booleans as numbers."""
    if x.lo.dtype == np.bool_:
        return x.lo.astype(np.int8), x.hi.astype(np.int8)
    return x.lo, x.hi


def _less(x: Interval, y: Interval, compare: Any) -> Interval:
    (x_lo, x_hi), (y_lo, y_hi) = _comparable(x), _comparable(y)
    return Interval(compare(x_hi, y_lo) & ~(x.nan | _truth(y.nan)), compare(x_lo, y_hi))


@_rule("lt")
def _(node: Node, x: Interval, y: Interval) -> Interval:
    return _less(x, y, lambda a, b: a < b)


@_rule("le")
def _(node: Node, x: Interval, y: Interval) -> Interval:
    return _less(x, y, lambda a, b: a <= b)


@_rule("gt")
def _(node: Node, x: Interval, y: Interval) -> Interval:
    return _less(y, x, lambda a, b: a < b)


@_rule("ge")
def _(node: Node, x: Interval, y: Interval) -> Interval:
    return _less(y, x, lambda a, b: a <= b)


@_rule("eq")
def _(node: Node, x: Interval, y: Interval) -> Interval:
    (x_lo, x_hi), (y_lo, y_hi) = _comparable(x), _comparable(y)
    point = (x_lo == x_hi) & (y_lo == y_hi) & (x_lo == y_lo) & ~(x.nan | _truth(y.nan))
    return Interval(point, (x_lo <= y_hi) & (y_lo <= x_hi))


@_rule("ne")
def _(node: Node, x: Interval, y: Interval) -> Interval:
    same = _RULES["eq"](node, x, y)
    return Interval(~same.hi, ~same.lo)


@_rule("select_n")
def _(node: Node, which: Interval, *cases: Interval) -> Interval:
    either = cases[0]
    for case in cases[1:]:
        either = _union(either, case)
    if which.lo.dtype != np.bool_:
        return either
    return _either(which.lo, cases[1], _either(~which.hi, cases[0], either))


@_rule("convert_element_type")
def _(node: Node, x: Interval) -> Interval:
    before, after = _kind(x.lo.dtype), _kind(node.dtype)
    if after == "b":
        zero = Interval(*[np.asarray(0, x.lo.dtype)] * 2)
        return _RULES["ne"](node, x, zero)
    if before == "b" or after == "f":
        return x
    limits = jnp.iinfo(node.dtype)
    if before == "f":
        xp, margin = _xp(x), 4 * float(jnp.finfo(x.lo.dtype).eps) * limits.max
        fits = (x.lo >= min(limits.min + margin, 0)) & (x.hi <= limits.max - margin) & ~x.nan
        safe = (xp.trunc(_where(fits, end, 0)) for end in x[:2])
        return _either(
            fits, Interval(*(end.astype(node.dtype) for end in safe)), anything(node.dtype)
        )
    own = jnp.iinfo(x.lo.dtype)
    fits = (x.lo >= max(limits.min, own.min)) & (x.hi <= min(limits.max, own.max))
    safe = (_where(fits, end, 0).astype(node.dtype) for end in x[:2])
    return _either(fits, Interval(*safe), anything(node.dtype))


def _rising(name: str, roundings: int, absolute: float, function: Callable[..., Any]) -> None:
    """Registers a function of floats that rises, computed by XLA to so many roundings."""

    def rule(node: Node, x: Interval) -> Interval:
        found = Interval(function(_xp(x), x.lo), function(_xp(x), x.hi), x.nan)
        eps = float(jnp.finfo(node.dtype).eps)
        return _moved_out(found, node.dtype, roundings, absolute * eps) if roundings else found

    _RULES[name] = rule


_rising("floor", 0, 0.0, lambda xp, x: xp.floor(x))
_rising("ceil", 0, 0.0, lambda xp, x: xp.ceil(x))
_rising("sqrt", 4, 0.0, lambda xp, x: xp.sqrt(x))
_rising("exp", 32, 0.0, lambda xp, x: xp.exp(x))
_rising("exp2", 32, 0.0, lambda xp, x: xp.exp2(x))
_rising("expm1", 32, 32.0, lambda xp, x: xp.expm1(x))
_rising("log", 32, 32.0, lambda xp, x: xp.log(x))
_rising("log1p", 32, 32.0, lambda xp, x: xp.log1p(x))
_rising("tanh", 32, 32.0, lambda xp, x: xp.tanh(x))
_rising("logistic", 32, 32.0, lambda xp, x: 1 / (1 + xp.exp(-x)))


@_rule("round")
def _(node: Node, x: Interval) -> Interval:
    """Halves go up or down."""
    return Interval(_xp(x).ceil(x.lo - 0.5), _xp(x).floor(x.hi + 0.5), x.nan)


@_rule("reduce_precision")
def _(node: Node, x: Interval) -> Interval:
    """Exact: to round to fewer bits never falls."""
    if not _static(x):
        lo, hi = (expressions.apply(node, [end]) for end in x[:2])
        return Interval(lo, hi, x.nan)
    with jax.ensure_compile_time_eval():
        lo, hi = (np.asarray(expressions.apply(node, [end])) for end in x[:2])
    return Interval(lo, hi, x.nan)


@_rule("custom")
def _(node: Node, value: Interval, *inputs: Interval) -> Interval:
    return value


@_rule("rsqrt")
def _(node: Node, x: Interval) -> Interval:
    lo, hi = (1 / _xp(x).sqrt(end) for end in (x.hi, x.lo))
    return _moved_out(Interval(lo, hi, x.nan), node.dtype, 8)


@_rule("sin", "cos")
def _(node: Node, x: Interval) -> Interval:
    unknown = (abs(x.lo) == np.inf) | (abs(x.hi) == np.inf)
    return Interval(np.float32(-1.001), np.float32(1.001), x.nan | unknown)


@_rule("is_finite")
def _(node: Node, x: Interval) -> Interval:
    known = (abs(x.lo) < np.inf) & (abs(x.hi) < np.inf) & ~_truth(x.nan)
    return Interval(known, np.True_)
