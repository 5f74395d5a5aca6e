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

from jattn.attention import IMPLEMENTATIONS
from jattn.checks import check_choice
from jattn.compat.jax_attention import computed, dot_product_attention, rules_of
from jattn.explanation import explain


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
_xla: list[str | None] = [None]  # what runs calls that ask for "xla"
_ran: dict[Any, tuple[int, str]] = {}


@functools.wraps(dot_product_attention)
def _recorded(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: Any = None,
    return_residual: bool = False,
    **named: Any,
) -> Any:
    rules = rules_of(query, key, value, bias, mask, **named)
    if named.get("implementation") == "xla":
        rules["implementation"] = _xla[0]
    result = computed(rules, np.shape(query), scale=scale, return_residual=return_residual)
    given = {"bias": bias, "mask": mask, "scale": scale, "return_residual": return_residual}
    about = tuple(
        f"{name}={x}" if isinstance(x, int | str | tuple) else name
        for name, x in {**given, **named}.items()
        if x is not None and x is not False
    )
    dtype = str(rules["query"].dtype)
    kind = (np.shape(query), np.shape(key), dtype, about, rules["implementation"])
    if kind not in _ran:
        # Where its arrays lie or, while tracing, where JAX puts them.
        _ran[kind] = 0, rules["implementation"] or explain(**rules).runs
    calls, implementation = _ran[kind]
    _ran[kind] = calls + 1, implementation
    return result


def install(*, xla: str | None = None) -> None:
    """Puts `dot_product_attention` in place of `jax.nn.dot_product_attention`, and begins a new
    report. Where it stands there already, only `xla` changes.

    `xla` is the implementation that runs calls with `implementation="xla"`, as Keras makes them;
    by default the first that can.

    Raises ValueError for an implementation that there is not.
    """
    check_choice("xla", xla, (None, *IMPLEMENTATIONS))
    _xla[0] = xla
    if not _original:
        _ran.clear()
        _original.append(jax.nn.dot_product_attention)
        jax.nn.dot_product_attention = _recorded


def uninstall() -> None:
    """Puts JAX's function back. What is compiled by then keeps ours."""
    if _original:
        jax.nn.dot_product_attention = _original.pop()


@contextlib.contextmanager
def installed(*, xla: str | None = None) -> Iterator[None]:
    """A context in which `jax.nn.dot_product_attention` is ours; `xla` as in `install`."""
    was_installed, former_xla = bool(_original), _xla[0]
    install(xla=xla)
    try:
        yield
    finally:
        _xla[0] = former_xla
        if not was_installed:
            uninstall()


def report() -> list[Ran]:
    """What ran in place of jax.nn's function since it was last installed, by kind of call.

    A call within a `jit` that is compiled counts once, when it is traced.
    """
    rows = _ran.items()
    return [Ran(calls, q, k, dtype, about, name) for (q, k, dtype, about, _), (calls, name) in rows]
