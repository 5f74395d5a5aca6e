"""`dot_product_attention` in place of `jax.nn`'s, for code that cannot be edited, and what ran.

Replaced is the attribute `jax.nn.dot_product_attention`: code that calls it by that name gets ours,
also Flax's modules; code that has imported the function itself before keeps JAX's.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from jattn.attention import explain
from jattn.compat.jax_attention import dot_product_attention, rules_of


class Ran(NamedTuple):
    """Calls of one kind since `install`: how many were traced or run, and what runs them."""

    calls: int
    query: tuple[int, ...]
    key: tuple[int, ...]
    dtype: str
    arguments: tuple[str, ...]
    implementation: str

    def __str__(self) -> str:
        given = ", ".join(self.arguments) or "no mask"
        sizes = f"query {list(self.query)}, key {list(self.key)}, {self.dtype}"
        return f"{self.calls} × {self.implementation}: {sizes}; {given}"


_original: list[Any] = []  # jax.nn's function while ours stands in its place
_ran: dict[Any, tuple[int, str]] = {}


@functools.wraps(dot_product_attention)
def _recorded(query: Any, key: Any, value: Any, bias: Any = None, mask: Any = None, **named: Any):
    found = dot_product_attention(query, key, value, bias, mask, **named)
    given = {"bias": bias, "mask": mask, **named}
    about = tuple(
        f"{name}={x}" if isinstance(x, int | str | tuple) else name
        for name, x in given.items()
        if x is not None and x is not False
    )
    kind = (
        np.shape(query),
        np.shape(key),
        str(found[0].dtype if isinstance(found, tuple) else found.dtype),
        about,
    )
    if kind not in _ran:
        _ran[kind] = 0, _implementation(query, key, value, bias, mask, **named)
    calls, implementation = _ran[kind]
    _ran[kind] = calls + 1, implementation
    return found


def _implementation(query: Any, key: Any, value: Any, bias: Any, mask: Any, **named: Any) -> str:
    """The kernel that runs a call where its arrays lie or, while tracing, where JAX puts them."""
    own = ("is_causal", "query_seq_lengths", "key_value_seq_lengths", "local_window_size")
    options = {name: named.get(name) for name in (*own, "implementation")}
    rules = rules_of(
        query, key, value, bias, mask, **{**options, "is_causal": bool(options["is_causal"])}
    )
    return rules["implementation"] or explain(**rules).runs


def install() -> None:
    """Puts `dot_product_attention` in place of `jax.nn.dot_product_attention`, and begins a new
    report. Does nothing where it stands there already."""
    if not _original:
        _ran.clear()
        _original.append(jax.nn.dot_product_attention)
        jax.nn.dot_product_attention = _recorded


def uninstall() -> None:
    """Puts JAX's function back. What is compiled by then keeps ours."""
    if _original:
        jax.nn.dot_product_attention = _original.pop()


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """A context in which `jax.nn.dot_product_attention` is ours."""
    before = bool(_original)
    install()
    try:
        yield
    finally:
        if not before:
            uninstall()


def report() -> list[Ran]:
    """What ran in place of jax.nn's function since it was last installed, by kind of call.

    A call within a `jit` that is compiled counts once, when it is traced.
    """
    rows = _ran.items()
    return [Ran(calls, q, k, dtype, about, name) for (q, k, dtype, about), (calls, name) in rows]
