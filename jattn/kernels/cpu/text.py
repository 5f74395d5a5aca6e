"""The core of a rule as text of C++: straight-line vector code, see `src/rule.h`.

Each node becomes a variable of the loop over pairs. Floats have the type `Vector`, integers `Ints`,
and booleans `Ints` whose bits are all set or all clear.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jattn.functions.dependence import KEY, QUERY, SCORE
from jattn.functions.nodes import Node, in_order


# Integers that lanes of int32 hold, and those that need lanes of int64.
_NARROW = frozenset(map(np.dtype, ("int8", "uint8", "int16", "uint16", "int32")))
_WIDE = {np.dtype(np.int64): "l", np.dtype(np.uint32): "u"}

# Numbers of inputs; operands have the numbers from FIRST on.
FIRST = KEY + 1
COTANGENT = -1


def is_narrow(dtype: Any) -> bool:
    """Returns whether a dtype has floats of less than 32 bits."""
    return jnp.issubdtype(dtype, jnp.floating) and np.dtype(dtype).itemsize < 4


def kind(dtype: Any, working: Any) -> str:
    """Returns "f" for floats of the kernel's dtype and of less than 32 bits, "i" for integers that
    its lanes hold, "b" for booleans, "d" for the other one of float32 and float64, "l" and "u" for
    int64 and uint32 in lanes of int64. Raises NotImplementedError for other dtypes."""
    if dtype == np.bool_:
        return "b"
    if dtype in _NARROW or (dtype in _WIDE and working == np.float64):
        return "i"
    if dtype in _WIDE:
        return _WIDE[dtype]
    if is_narrow(dtype) or dtype == working:
        return "f"
    if dtype in (np.float32, np.float64):
        return "d"
    raise NotImplementedError(f"functions of pairs do not compute in {dtype}")


class _Words(NamedTuple):
    """The C++ names for a kind: the types of a vector and of one number, and the functions that
    repeat one number in a vector, read a vector, and read entries of a table."""

    vector: str
    element: str
    all: str
    load: str
    gather: str


_KINDS = {
    "f": _Words("Vector", "T", "all", "load", "gather"),
    "i": _Words("Ints", "Int", "whole", "load<Ints>", "gather"),
    "b": _Words("Ints", "Int", "truth", "load_truth", "gather_truth"),
    "d": _Words("Other", "Far", "other", "load_other", "gather_other"),
    "l": _Words("Long", "int64_t", "longs", "load_long", "gather_long"),
    "u": _Words("Long", "uint32_t", "longs", "load_word", "gather_long"),
}


_ARITHMETIC = {"add": "+", "sub": "-", "mul": "*"}
_BITS = {"and": "&", "or": "|", "xor": "^"}
_COMPARED = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
# Functions that are called for each lane: of floats, those of the C++ library.
_OF_ONE_FLOAT = """acos acosh asin asinh atan atanh cbrt ceil cos cosh erf erfc exp2 floor sin sinh
    sqrt tan""".split()
_OF_TWO_FLOATS = {"atan2": "std::atan2", "pow": "std::pow", "rem": "std::fmod"}
_OF_TWO_INTEGERS = {
    "div": "divided",
    "rem": "rest",
    "floor_divide": "floor_divided",
    "remainder": "remaining",
    "shift_left": "shifted_left<{bits}>",
    "shift_right_arithmetic": "shifted_right<{bits}>",
    "shift_right_logical": "shifted_right_as_bits<{bits}>",
}


def _of_two(functions: dict[str, str]) -> dict[str, str]:
    """Returns the text of operations that call a function of two numbers for each lane."""
    text = "each({{0}}, {{1}}, [](auto x, auto y) {{{{ return {}(x, y); }}}})"
    return {op: text.format(function) for op, function in functions.items()}


_OF_NUMBERS = {
    "abs": "abs_of({0})",
    "sign": "sign_of({0})",
    "neg": "-{0}",
    "square": "{0} * {0}",
    "max": "greatest({0}, {1})",
    "min": "least({0}, {1})",
    "clamp": "least(greatest({1}, {0}), {2})",
    "integer_pow": "power<{param}>({0})",
    **{op: f"{{0}} {sign} {{1}}" for op, sign in (_ARITHMETIC | _COMPARED).items()},
}
_OF_BITS = {"not": "~{0}", **{op: f"{{0}} {sign} {{1}}" for op, sign in _BITS.items()}}

_OF_FLOATS = {
    **_OF_NUMBERS,
    **{op: f"{op}_of({{0}})" for op in "exp expm1 log log1p logistic tanh".split()},
    **{op: f"each({{0}}, [](auto x) {{{{ return std::{op}(x); }}}})" for op in _OF_ONE_FLOAT},
    **_of_two(_OF_TWO_FLOATS),
    "div": "{0} / {1}",
    "rsqrt": "1 / each({0}, [](auto x) {{ return std::sqrt(x); }})",
    "is_finite": "({0} - {0}) == ({0} - {0})",
    "round": "rounded<{param}>({0})",
}
_OF_INTEGERS = _OF_NUMBERS | _OF_BITS | _of_two(_OF_TWO_INTEGERS)

# The text of each operation, by the kind of its arguments.
_WRITTEN: dict[str, dict[str, str]] = {
    "f": _OF_FLOATS,
    "d": _OF_FLOATS,
    "i": _OF_INTEGERS,
    "l": _OF_INTEGERS,
    "u": _OF_INTEGERS,
    "b": {
        **_OF_BITS,
        "add": "{0} | {1}",
        "max": "{0} | {1}",
        "mul": "{0} & {1}",
        "min": "{0} & {1}",
        "eq": "{0} == {1}",
        "ne": "{0} != {1}",
    },
}
# Operations whose results may be outside their dtype, in lanes with more bits.
_WRAPPED = frozenset(
    """add sub mul neg not square integer_pow abs div floor_divide shift_left shift_right_arithmetic
    shift_right_logical""".split()
)


def _constant(node: Node, what: str) -> str:
    value: Any = node.param
    if what == "b":
        return "truth(true)" if value else "truth(false)"
    words = _KINDS[what]
    if what in "ilu":
        return f"{words.all}({int(value)}ll)" if value > -(2**63) else f"{words.all}(INT64_MIN)"
    if math.isnan(value):
        return f"{words.all}(kNaN)"
    if math.isinf(value):
        return f"{words.all}(kInfinity)" if value > 0 else f"{words.all}(-kInfinity)"
    return f"{words.all}({words.element}({float(value).hex()}))"


class _Writer:
    """Writes each node as the definition of a variable."""

    def __init__(self, working: Any):
        self.working = working
        self.lines: list[str] = []
        self.names: dict[int, str] = {}

    def kind(self, node: Node) -> str:
        return kind(node.dtype, self.working)

    def write(self, roots: Sequence[Node], tables: set[int]) -> None:
        """Writes the nodes of `roots`, except the inputs that are `tables`."""
        for node in in_order(roots):
            if node.op == "input" and node.param in tables:
                continue
            text = self.text(node)
            name = self.names[id(node)] = f"v{len(self.names)}"
            self.lines.append(f"const {_KINDS[self.kind(node)].vector} {name} = {text};")

    def places(self, nodes: Sequence[Node], shape: Any) -> str:
        """Returns the index of an entry in the flattened table."""
        wide = lambda x: self.kind(x) in "lu"  # noqa: E731
        names = [f"as_i({self.names[id(x)]})" if wide(x) else self.names[id(x)] for x in nodes]
        index = names[0]
        for name, size in zip(names[1:], shape[1:], strict=True):
            index = f"({index}) * Int({size}) + {name}"
        return index

    def text(self, node: Node) -> str:
        what, op = self.kind(node), node.op
        if op == "const":
            return _constant(node, what)
        if op == "input":
            number: Any = node.param
            names = {SCORE: "x", QUERY: "query", KEY: "key", COTANGENT: "d_x"}
            return f"in{number - FIRST}" if number >= FIRST else names[number]
        if op == "entry":
            table = node.args[0].param - FIRST  # pyright: ignore
            return f"{_KINDS[what].gather}(o{table}, {self.places(node.args[1:], node.param)})"
        if op == "scatter":
            return self.names[id(node.args[0])]
        text = self.operation(node, what, [self.names[id(x)] for x in node.args])
        return _rounded(node, text) if is_narrow(node.dtype) else text

    def operation(self, node: Node, what: str, args: list[str]) -> str:
        """Returns the text of an operation on arguments."""
        op, of = node.op, self.kind(node.args[0]) if args else what
        if op == "select_n":
            return _selected(of, *args)
        if op == "div" and what == "f" and _has_inverse(node.args[1]):
            return f"quotient({args[0]}, {args[1]}, T(1) / {args[1]})"
        if op == "convert_element_type":
            return _converted(node, what, of, args[0])
        if op == "integer_pow" and abs(node.param) >= 2**63:  # pyright: ignore
            raise NotImplementedError("functions of pairs have no powers from 2**63 on")
        is_odd = op == "shift_right_arithmetic" and np.issubdtype(node.dtype, np.unsignedinteger)
        if op not in _WRITTEN[of] or is_odd:  # JAX shifts unsigned integers as if they had a sign
            raise NotImplementedError(f"functions of pairs have no {node.name} of {node.dtype}")
        bits = 8 * np.dtype(node.dtype).itemsize
        text = _WRITTEN[of][op].format(*args, param=node.param, bits=bits)
        wraps = op in _WRAPPED and what in "iu" and node.dtype != np.int64
        return f"wrapped<{node.dtype}_t>({text})" if wraps else text


def _has_inverse(node: Node) -> bool:
    """Returns whether a node is a constant whose inverse is a normal number."""
    value: Any = node.param
    return node.op == "const" and 1e-9 < abs(value) < 1e9


def _converted(node: Node, what: str, of: str, text: str) -> str:
    if of == "b" and what in "if":
        return f"{text} & 1" if what == "i" else f"pick({text}, all(1), Vector{{}})"
    if what == "b" and of != "b":
        return f"{text} != {_KINDS[of].all}(0)"
    if what != of:
        wide = "_long" if what == "i" and node.dtype in _WIDE else ""
        text = f"as_{what}{wide}({text}{' & 1' * (of == 'b')})"
    if what != "i" or node.dtype == np.int64:
        return text
    return f"{'clamped' if of in 'fd' else 'wrapped'}<{node.dtype}_t>({text})"


def _rounded(node: Node, text: str) -> str:
    """Returns the text of a result in a dtype of less than 32 bits, which lanes hold in more."""
    if node.op == "select_n":
        return text
    if node.dtype.name not in ("bfloat16", "float16"):
        raise NotImplementedError(f"functions of pairs do not compute in {node.dtype}")
    return f"rounded_to_{node.dtype}({text})"


def _selected(of: str, which: str, *cases: str) -> str:
    """Returns the choice among cases by a boolean or by an integer."""
    if of == "b":
        return f"pick({which}, {cases[1]}, {cases[0]})"
    text = cases[-1]
    for i in reversed(range(len(cases) - 1)):
        text = f"pick({which} <= {i}, {cases[i]}, {text})"
    return text


_LOADS = {
    "head": ("pointers", "{all}(o{n}[0])"),
    "query": ("by_query", "{load}(o{n} + at.first + i)"),
    "key": ("by_key", "{all}(o{n}[j])"),
    "distance": ("by_key", "{load}(o{n} + at.first + i - j + at.S - 1)"),
}

# The parts of `_FORWARD`, and then of `_BACKWARD` alone, with the indentation of their lines.
_INDENTS = {"pointers": 2, "by_query": 4, "by_key": 6, "core": 6}
_INDENTS |= {"declared": 2, "per_query": 4, "per_pair": 6, "after_queries": 4, "after_all": 2}

# The lines that sum the gradient of operand n, by its kind and by the part of `_BACKWARD`.
_SUMS = {
    "query": {
        "per_query": "Vector sum{n} = Vector{{}};",
        "per_pair": "sum{n} += {live};",
        "after_queries": "add_to(g{n} + at.first + i, sum{n});",
    },
    "key": {
        "declared": "std::vector<Vector> sum{n}(at.keys);",
        "per_pair": "sum{n}[s] += {live};",
        "after_all": "for (Index s = 0; s < at.keys; ++s) g{n}[at.j + s] += total(sum{n}[s]);",
    },
    "distance": {
        "declared": "std::vector<T> sum{n}(at.width + at.keys);",
        "per_pair": "add_to(sum{n}.data() + i - s + at.keys - 1, {live});",
        "after_all": "for (Index n = 0; n < at.count + at.keys - 1; ++n)"
        " g{n}[at.first - (at.j + at.keys - 1) + at.S - 1 + n] += sum{n}[n];",
    },
    "head": {
        "declared": "Vector sum{n} = Vector{{}};",
        "per_pair": "sum{n} += {live};",
        "after_all": "g{n}[0] += total(sum{n});",
    },
    "table": {"per_pair": "scatter(g{n}, {places}, {live}, at.count - i);"},
}


def function_of(
    results: Sequence[Node],
    operands: Sequence[Any],
    working: Any,
    gradients: Sequence[tuple[int, Any]] | None = None,
) -> str:
    """Returns the forward function of `[modified score, allowed]`, or the backward function of the
    cotangents of the score and of the operands in `gradients`."""
    writer = _Writer(working)
    writer.write(results, {FIRST + n for n, x in enumerate(operands) if x.kind == "table"})
    used = {x.param for x in in_order(results) if x.op == "input"}
    lines = {part: [] for part in _INDENTS} | {"core": writer.lines}
    for n, operand in enumerate(operands):
        if FIRST + n not in used:
            continue
        words = _KINDS[kind(operand.dtype, working)]
        element = f"const {words.element}*"
        lines["pointers"].append(f"{element} o{n} = static_cast<{element}>(at.operands[{n}]);")
        if operand.kind != "table":
            part, load = _LOADS[operand.kind]
            text = load.format(n=n, all=words.all, load=words.load)
            lines[part].append(f"const {words.vector} in{n} = {text};")
    score, *names = (writer.names[id(x)] for x in results)
    if gradients is not None:
        for name, node, (n, operand) in zip(names, results[1:], gradients, strict=True):
            pointer = f"T* g{n} = static_cast<T*>(at.gradients[{n}]);"
            if pointer not in lines["declared"]:
                lines["declared"].append(pointer)
            live = f"pick(live, {name}, Vector{{}})"
            places = writer.places(node.args[1:], node.param) if operand.kind == "table" else ""
            for part, line in _SUMS[operand.kind].items():
                lines[part].append(line.format(n=n, live=live, places=places))
    joined = {part: f"\n{' ' * _INDENTS[part]}".join(x) for part, x in lines.items()}
    body = _FORWARD if gradients is None else _BACKWARD
    return body.format(score=score, allowed=names and names[0], **joined)


_FORWARD = """
template <bool kMasked>
void forward(const Place& given, T* scores) {{
  const Place at = given;  // no score that is written is a part of it
  {pointers}
  for (Index i = 0; i < at.width; i += kLanes) {{
    const Ints query = queries(at, i);
    {by_query}
    for (Index s = 0; s < at.keys; ++s) {{
      const Index j = at.j + s;
      const Ints key = whole(j);
      T* here = scores + s * at.width + i;
      const Vector x = load(here);
      {by_key}
      {core}
      store(here, kMasked ? pick({allowed}, {score}, all(-kInfinity)) : {score});
    }}
  }}
}}
extern "C" void jattn_rule_forward(const Place& at, T* scores, bool masked) {{
  masked ? forward<true>(at, scores) : forward<false>(at, scores);
}}
"""

_BACKWARD = """
extern "C" void jattn_rule_backward(const Place& given, const T* before, T* d_scores) {{
  const Place at = given;
  {pointers}
  {declared}
  for (Index i = 0; i < at.width; i += kLanes) {{
    const Ints query = queries(at, i);
    const Ints exists = lanes() < whole(at.count - i);
    {by_query}
    {per_query}
    for (Index s = 0; s < at.keys; ++s) {{
      const Index j = at.j + s;
      const Ints key = whole(j);
      T* here = d_scores + s * at.width + i;
      const Vector x = before ? load(before + s * at.width + i) : Vector{{}};
      const Vector d_x = load(here);
      const Ints live = exists & (d_x != all(T(0)));
      {by_key}
      {core}
      {per_pair}
      store(here, pick(live, {score}, Vector{{}}));
    }}
    {after_queries}
  }}
  {after_all}
}}
"""
