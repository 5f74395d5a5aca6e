"""The core of a rule as text of C++: straight-line vector code, see `src/rule.h`.

Each node becomes a variable of the loop over pairs. Types are `Vector` for floats, `Ints` for
integers, and for truths `Ints` whose bits are all set or none.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jattn.functions.dependence import KEY, QUERY, SCORE
from jattn.functions.nodes import Node, in_order


# Numbers of inputs: operands come from FIRST on.
FIRST = KEY + 1
COTANGENT = -1


def kind(dtype: Any, working: Any) -> str:
    """ "f" for floats of the kernel's type, "i" for integers, "b" for truths; and where they are of
    another width than the kernel's, "d" for floats and "l" for integers.

    Raises NotImplementedError for others.
    """
    if dtype == np.bool_:
        return "b"
    if dtype == np.int32 or (dtype == np.int64 and working == np.float64):
        return "i"
    if dtype == np.int64:
        return "l"
    if dtype in (np.float32, np.float64):
        return "f" if dtype == working else "d"
    raise NotImplementedError(
        f"functions of pairs compute in float32, float64, int32 and int64, not in {dtype}"
    )


class _Words(NamedTuple):
    """What a kind is in C++: a vector of it, one number, a vector of one number, how vectors are
    read, and entries of a table."""

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
}


_BINARY = {"add": "+", "sub": "-", "mul": "*"}
_BITS = {"and": "&", "or": "|", "xor": "^"}
_COMPARED = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
_CALLED = {
    "f": """abs ceil cos div erf exp exp2 expm1 floor log log1p logistic pow rem rsqrt sign sin sqrt
        tan tanh atan atan2 asin acos sinh cosh asinh acosh atanh cbrt erfc""".split(),
    "i": "abs div floor_divide rem remainder sign".split(),
}
_OF_NUMBERS = {
    "neg": "-{0}",
    "square": "{0} * {0}",
    "max": "greatest({0}, {1})",
    "min": "least({0}, {1})",
    "clamp": "least(greatest({1}, {0}), {2})",
    "integer_pow": "power<{param}>({0})",
    **{op: f"{{0}} {sign} {{1}}" for op, sign in (_BINARY | _COMPARED).items()},
}
_OF_BITS = {"not": "~{0}", **{op: f"{{0}} {sign} {{1}}" for op, sign in _BITS.items()}}
_SHIFTS = ("shift_left", "shift_right_arithmetic", "shift_right_logical")

_OF_FLOATS = {
    **_OF_NUMBERS,
    **{op: f"{op}_of({{all}})" for op in _CALLED["f"]},
    "is_finite": "({0} - {0}) == ({0} - {0})",
    "round": "rounded<{param}>({0})",
}
_OF_INTEGERS = {
    **_OF_NUMBERS,
    **_OF_BITS,
    **{op: f"{op}_of({{all}})" for op in _CALLED["i"]},
    **{op: f"{op}<{{bits}}>({{all}})" for op in _SHIFTS},
}

# How operations on floats, integers and truths are written.
_WRITTEN: dict[str, dict[str, str]] = {
    "f": _OF_FLOATS,
    "d": _OF_FLOATS,
    "i": _OF_INTEGERS,
    "l": _OF_INTEGERS,
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
# In lanes of 64 bits, what 32 would not hold.
_WRAPPED = (*_BINARY, "neg", "square", "integer_pow", "abs", "div", "floor_divide", *_SHIFTS)


def _constant(node: Node, what: str) -> str:
    value: Any = node.param
    if what == "b":
        return "truth(true)" if value else "truth(false)"
    words = _KINDS[what]
    if what in "il":
        return f"{words.all}({int(value)}ll)" if value > -(2**63) else f"{words.all}(INT64_MIN)"
    if math.isnan(value):
        return f"{words.all}(kNaN)"
    if math.isinf(value):
        return f"{words.all}(kInfinity)" if value > 0 else f"{words.all}(-kInfinity)"
    return f"{words.all}({words.element}({float(value).hex()}))"


class _Writer:
    """Names nodes and writes them down."""

    def __init__(self, working: Any):
        self.working = working
        self.lines: list[str] = []
        self.names: dict[int, str] = {}

    def kind(self, node: Node) -> str:
        return kind(node.dtype, self.working)

    def write(self, roots: Sequence[Node], tables: dict[int, int]) -> None:
        """`tables` has the size of each operand that is one."""
        for node in in_order(roots):
            if node.op == "input" and node.param in tables:
                continue
            text = self.text(node)
            name = self.names[id(node)] = f"v{len(self.names)}"
            self.lines.append(f"const {_KINDS[self.kind(node)].vector} {name} = {text};")

    def places(self, nodes: Sequence[Node], shape: Any) -> str:
        """The number of an entry of a table."""
        names = [self.names[id(x)] for x in nodes]
        pairs = zip(nodes, names, strict=True)
        names = [f"as_i(from_l({name}))" if self.kind(x) == "l" else name for x, name in pairs]
        found = names[0]
        for name, size in zip(names[1:], shape[1:], strict=True):
            found = f"({found}) * Int({size}) + {name}"
        return found

    def text(self, node: Node) -> str:
        what, op = self.kind(node), node.op
        if op == "const":
            return _constant(node, what)
        if op == "input":
            return _input(node)
        if op == "entry":
            table = node.args[0].param - FIRST  # pyright: ignore
            return f"{_KINDS[what].gather}(o{table}, {self.places(node.args[1:], node.param)})"
        if op == "scatter":
            return self.names[id(node.args[0])]
        args = [self.names[id(x)] for x in node.args]
        return self.operation(node, what, self.kind(node.args[0]) if args else what, args)

    def operation(self, node: Node, what: str, of: str, args: list[str]) -> str:
        """An operation on arguments of kind `of`."""
        if node.op == "select_n":
            return _selected(of, *args)
        if node.op == "div" and what == "f" and _has_inverse(node.args[1]):
            return f"quotient({args[0]}, {args[1]}, T(1) / {args[1]})"
        if node.op == "convert_element_type":
            return _converted(node, what, of, args[0])
        if node.op == "integer_pow" and abs(node.param) >= 2**63:  # pyright: ignore
            raise NotImplementedError("functions of pairs have no powers from 2**63 on")
        written = _WRITTEN[of].get(node.op)
        if written is None:
            name = node.param if node.op == "unknown" else node.op
            raise NotImplementedError(f"functions of pairs have no {name} of {node.dtype}")
        bits = 8 * np.dtype(node.dtype).itemsize
        found = written.format(*args, all=", ".join(args), param=node.param, bits=bits)
        wraps = node.op in _WRAPPED and what == "i" and node.dtype == np.int32
        return f"wrap({found})" if wraps else found


def _has_inverse(node: Node) -> bool:
    """Whether it is a constant neither large nor small, so that nothing is lost in its inverse."""
    value: Any = node.param
    return node.op == "const" and 1e-9 < abs(value) < 1e9


def _converted(node: Node, what: str, of: str, given: str) -> str:
    if what != of:
        wide = "_long" if what == "i" and node.dtype == np.int64 else ""
        return f"as_{what}{wide}(from_{of}({given}))"
    narrows = what == "i" and node.dtype == np.int32 and node.args[0].dtype == np.int64
    return f"wrap({given})" if narrows else given


def _selected(of: str, which: str, *cases: str) -> str:
    """One of several, by a truth or by number."""
    if of == "b":
        return f"pick({which}, {cases[1]}, {cases[0]})"
    found = cases[-1]
    for place in range(len(cases) - 2, -1, -1):
        found = f"pick({which} <= {place}, {cases[place]}, {found})"
    return found


def _input(node: Node) -> str:
    number: Any = node.param
    if number >= FIRST:
        return f"in{number - FIRST}"
    return {SCORE: "x", QUERY: "query", KEY: "key", COTANGENT: "d_x"}[number]


_LOADS = {
    "head": ("once", "{all}(o{n}[0])"),
    "query": ("by query", "{load}(o{n} + at.first + i)"),
    "key": ("by key", "{all}(o{n}[j])"),
    "distance": ("by key", "{load}(o{n} + at.first + i - j + at.S - 1)"),
}


def function_of(
    results: Sequence[Node],
    operands: Sequence[Any],
    working: Any,
    gradients: Sequence[tuple[int, Any]] | None = None,
) -> str:
    """The forward function of `[modified score, allowed]`, or the backward one of the cotangents of
    the score and of those operands that `gradients` names."""
    writer = _Writer(working)
    tables = {FIRST + n: 0 for n, x in enumerate(operands) if x.kind == "table"}
    writer.write(results, tables)
    used = {x.param for x in in_order(results) if x.op == "input"}
    pointers, before = [], {"once": [], "by query": [], "by key": []}
    for n, operand in enumerate(operands):
        if FIRST + n not in used:
            continue
        words = _KINDS[kind(operand.dtype, working)]
        element = f"const {words.element}*"
        pointers.append(f"{element} o{n} = static_cast<{element}>(at.operands[{n}]);")
        if operand.kind != "table":
            where, load = _LOADS[operand.kind]
            text = load.format(n=n, all=words.all, load=words.load)
            before[where].append(f"const {words.vector} in{n} = {text};")
    names = [writer.names[id(x)] for x in results]
    body = (
        _forward_body(names)
        if gradients is None
        else _backward_body(names, results, gradients, writer)
    )
    return body.format(
        pointers="\n  ".join(pointers + before["once"]),
        by_query="\n    ".join(before["by query"]),
        by_key="\n      ".join(before["by key"]),
        core="\n      ".join(writer.lines),
    )


def _forward_body(names: list[str]) -> str:
    score, allowed = names
    return f"""
template <bool kMasked>
void forward(const Place& given, T* scores) {{{{
  const Place at = given;  // no score that is written is a part of it
  {{pointers}}
  for (Index i = 0; i < at.width; i += kLanes) {{{{
    const Ints query = queries(at, i);
    {{by_query}}
    for (Index s = 0; s < at.keys; ++s) {{{{
      const Index j = at.j + s;
      const Ints key = whole(j);
      T* here = scores + s * at.width + i;
      const Vector x = load(here);
      {{by_key}}
      {{core}}
      store(here, kMasked ? pick({allowed}, {score}, all(-kInfinity)) : {score});
    }}}}
  }}}}
}}}}
extern "C" void jattn_rule_forward(const Place& at, T* scores, bool masked) {{{{
  masked ? forward<true>(at, scores) : forward<false>(at, scores);
}}}}
"""


def _backward_body(
    names: list[str], results: Sequence[Node], gradients: Sequence[tuple[int, Any]], writer: Any
) -> str:
    declared, per_query, per_pair, after_queries, after_all = [], [], [], [], []
    for name, node, (n, operand) in zip(names[1:], results[1:], gradients, strict=True):
        pointer = f"T* g{n} = static_cast<T*>(at.gradients[{n}]);"
        if pointer not in declared:
            declared.append(pointer)
        live = f"pick(live, {name}, Vector{{{{}}}})"
        if operand.kind == "query":
            per_query.append(f"Vector sum{n} = Vector{{{{}}}};")
            per_pair.append(f"sum{n} += {live};")
            after_queries.append(f"add_to(g{n} + at.first + i, sum{n});")
        elif operand.kind == "key":
            declared.append(f"std::vector<Vector> sum{n}(at.keys);")
            per_pair.append(f"sum{n}[s] += {live};")
            after_all.append(
                f"for (Index s = 0; s < at.keys; ++s) g{n}[at.j + s] += total(sum{n}[s]);"
            )
        elif operand.kind == "distance":
            declared.append(f"std::vector<T> sum{n}(at.width + at.keys);")
            per_pair.append(f"add_to(sum{n}.data() + i - s + at.keys - 1, {live});")
            after_all.append(
                f"for (Index n = 0; n < at.count + at.keys - 1; ++n)"
                f" g{n}[at.first - (at.j + at.keys - 1) + at.S - 1 + n] += sum{n}[n];"
            )
        elif operand.kind == "head":
            declared.append(f"Vector sum{n} = Vector{{{{}}}};")
            per_pair.append(f"sum{n} += {live};")
            after_all.append(f"g{n}[0] += total(sum{n});")
        else:
            places = writer.places(node.args[1:], node.param)
            per_pair.append(f"scatter(g{n}, {places}, {live}, at.count - i);")
    parts = declared, per_query, per_pair, after_queries, after_all
    return _backward_text(names[0], *parts)


def _backward_text(
    d_product: str,
    declared: list[str],
    per_query: list[str],
    per_pair: list[str],
    after_queries: list[str],
    after_all: list[str],
) -> str:
    """The backward function, with lines that sum gradients of operands in their places."""
    join = lambda lines, space: f"\n{space}".join(lines)  # noqa: E731
    return f"""
extern "C" void jattn_rule_backward(const Place& given, const T* before, T* d_scores) {{{{
  const Place at = given;
  {{pointers}}
  {join(declared, "  ")}
  for (Index i = 0; i < at.width; i += kLanes) {{{{
    const Ints query = queries(at, i);
    const Ints exists = lanes() < whole(at.count - i);
    {{by_query}}
    {join(per_query, "    ")}
    for (Index s = 0; s < at.keys; ++s) {{{{
      const Index j = at.j + s;
      const Ints key = whole(j);
      T* here = d_scores + s * at.width + i;
      const Vector x = before ? load(before + s * at.width + i) : Vector{{{{}}}};
      const Vector d_x = load(here);
      const Ints live = exists & (d_x != all(T(0)));
      {{by_key}}
      {{core}}
      {join(per_pair, "      ")}
      store(here, pick(live, {d_product}, Vector{{{{}}}}));
    }}}}
    {join(after_queries, "    ")}
  }}}}
  {join(after_all, "  ")}
}}}}
"""
