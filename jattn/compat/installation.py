"""Replaces `jax.nn.dot_product_attention`, for code that cannot be edited, and reports its calls.

`install` sets the attribute `jax.nn.dot_product_attention`. Code that calls it by that name, such
as Flax's modules, gets ours; code that imported the function itself earlier keeps JAX's.
"""

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from jattn.attention import IMPLEMENTATIONS
from jattn.checks import check_choice
from jattn.compat.jax_attention import computed, dot_product_attention, rules_of
from jattn.explanation import explain


class Ran(NamedTuple):
    """The number of calls of one kind since `install`, and the implementation that runs them."""

    calls: int
    query: tuple[int, ...]
    key: tuple[int, ...]
    dtype: str
    arguments: tuple[str, ...]
    implementation: str

    def __str__(self) -> str:
        arguments = ", ".join(self.arguments) or "no mask"
        sizes = f"query {list(self.query)}, key {list(self.key)}, {self.dtype}"
        return f"{self.calls} × {self.implementation}: {sizes}; {arguments}"


_lock = threading.RLock()
_original: list[Any] = []  # jax.nn's function while ours replaces it
# The implementation for calls that name "xla", by context, and by None for `install`. The last
# entry counts.
_xla: dict[Any, str | None] = {}
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
        rules["implementation"] = [None, *_xla.values()][-1]
    result = computed(rules, np.shape(query), scale=scale, return_residual=return_residual)
    explicit = {"bias": bias, "mask": mask, "scale": scale, "return_residual": return_residual}
    arguments = tuple(
        f"{name}={x}" if isinstance(x, int | str | tuple) else name
        for name, x in {**explicit, **named}.items()
        if x is not None and x is not False
    )
    dtype = str(rules["query"].dtype)
    kind = (np.shape(query), np.shape(key), dtype, arguments, rules["implementation"])
    ran = _ran.get(kind)
    # `explain` answers for the device of the arrays or, in a trace, for JAX's default device.
    implementation = ran[1] if ran else rules["implementation"] or explain(**rules).runs
    with _lock:
        calls, _ = _ran.get(kind, (0, ""))
        _ran[kind] = calls + 1, implementation
    return result


def install(*, xla: str | None = None) -> None:
    """Replaces `jax.nn.dot_product_attention` by ours and starts a new report. If it is replaced
    already, only `xla` changes.

    Code that imported the function itself before this call keeps JAX's, as do jitted functions that
    were called before with arguments of the same shapes.

    `xla` is the implementation that runs calls with `implementation="xla"`, as Keras makes them;
    by default the first supported one.

    Raises ValueError for an unknown implementation.

    >>> jattn.compat.install()
    >>> jax.nn.dot_product_attention(q, k, v).shape
    (2, 5, 4, 8)
    >>> jattn.compat.uninstall()
    """
    _replace(None, xla)


def _replace(key: Any, xla: str | None) -> None:
    """Replaces JAX's function until the key is removed from `_xla`."""
    check_choice("xla", xla, (None, *IMPLEMENTATIONS))
    with _lock:
        if not _original:
            _ran.clear()
            _original.append(jax.nn.dot_product_attention)
            jax.nn.dot_product_attention = _recorded
        _xla.pop(key, None)
        _xla[key] = xla


def uninstall() -> None:
    """Restores JAX's function. Functions compiled before keep ours.

    >>> jattn.compat.install()
    >>> jattn.compat.uninstall()
    """
    with _lock:
        _xla.clear()
        if _original:
            jax.nn.dot_product_attention = _original.pop()


@contextlib.contextmanager
def installed(*, xla: str | None = None) -> Iterator[None]:
    """Replaces `jax.nn.dot_product_attention` by ours within a context, for all threads; `install`
    says what `xla` means, and whose calls stay JAX's. Contexts of several threads may overlap.

    >>> with jattn.compat.installed():
    ...     out = jax.nn.dot_product_attention(q, k, v)
    """
    key = object()
    _replace(key, xla)
    try:
        yield
    finally:
        with _lock:
            _xla.pop(key, None)
            if not _xla:
                uninstall()


def report() -> list[Ran]:
    """Returns the calls that ran in place of jax.nn's since the last `install`, by kind of call.

    A call inside a `jit` counts once, when it is traced.

    >>> with jattn.compat.installed():
    ...     out = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    >>> print(jattn.compat.report()[0])
    1 × ...: query [2, 5, 4, 8], key [2, 7, 2, 8], float32; is_causal=True
    """
    rows = _ran.items()
    return [Ran(calls, q, k, dtype, about, name) for (q, k, dtype, about, _), (calls, name) in rows]
