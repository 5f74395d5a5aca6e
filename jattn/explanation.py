"""`explain`: which kernel runs a call and why not the others, which scores it computes and skips,
its memory, and what would make it faster.

The share of tiles comes from the mask's own tile map. A function that allows the same pairs as
`Causal`, `Window` or `Prefix` is recognised by comparing pairs, because kernels without support for
functions can run these masks.
"""

import dataclasses
import functools
import html
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jattn import masks
from jattn._advised import advised
from jattn._pytree import flatten_batch, leading
from jattn._types import Keys, Queries, Size, Values, accumulation
from jattn.attention import attend, attend_cache
from jattn.cache import Cache
from jattn.call import Call, make
from jattn.checks import check_choice
from jattn.kernels import registry
from jattn.kernels.common import few_queries, lowering, partition
from jattn.masks import Mask, Predicate, Span
from jattn.options import Options
from jattn.spec import Shapes, Spec


__all__ = ["Explanation", "Tiles", "explain"]

_BLOCK = 128  # queries and keys of a tile
_MAPS = 64  # the most heads whose tile maps are computed
_ROWS = 64  # the most queries whose keys are compared


class Tiles(NamedTuple):
    """The shares of tiles of `block` × `block` that are empty, mixed and full; they sum to 1."""

    block: int
    empty: float
    mixed: float
    full: float

    def __str__(self) -> str:
        shares = f"{self.empty:.1%} empty and skipped, {self.full:.1%} full, {self.mixed:.1%} mixed"
        return f"{shares} (tiles of {self.block} × {self.block})"


class Explanation(dict[str, str | None]):
    """A dictionary of all implementations: None if it can run a call, else its reason.

    runs: the implementation that `implementation=None` takes.
    by_name: kernels for the platform that can run the call, but only if named: no device has run
        them yet.
    tiles: the `Tiles` of its mask; None if there are no pairs, or the mask is traced.
    flops: floating-point operations of the forward pass's two products, without empty tiles.
    bytes: the bytes of all arguments and results of the call.
    temporaries: further bytes that the forward pass, compiled for one device, takes; None for
        another platform than that of the query, and for traced masks and scores. The kernel in C++
        takes in addition a few tiles for each thread, which the compiler does not count.
    tokens: how devices share the tokens of query, key and value, if these are sharded along tokens.
    advice: a change that would skip more or allow more implementations; None if none is known.

    Printed, or shown by a notebook, it is a table. Tiles are counted, and the program is compiled,
    on first access.
    """

    def __init__(
        self,
        call: Call,
        platform: str,
        operands: tuple[Any, ...],
        lower: Callable[..., Any] | None,
        cache_reasons: dict[str, str | None],
    ):
        """Explains a call on a platform.

        Args:
            operands: query, key and value, or query and cache.
            lower: returns the lowered program of the call and the operands; None if it cannot be
                lowered.
            cache_reasons: the reasons of implementations for caches alone, which come first.
        """
        reasons = registry.reasons(call, platform)
        super().__init__({**cache_reasons, **reasons})
        self.runs = next(name for name, reason in self.items() if reason is None)
        _, *later = (name for name, reason in reasons.items() if reason is None)
        self.by_name = tuple(x for x in later if registry.is_for(x, platform))
        self._call = None if _is_traced(call) else call  # an attribute must not hold tracers
        self._shapes, self._platform = call.shapes, platform
        self.tokens = partition.shared_tokens(*operands) if len(operands) == 3 else None
        self._operands = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), operands)
        self._lower = lower
        self.bytes = _bytes(call, self._operands)

    @functools.cached_property
    def tiles(self) -> Tiles | None:
        return self._call and tiles_of(self._call)

    @functools.cached_property
    def flops(self) -> float:
        B, N, T, S = self._shapes.B, self._shapes.N, self._shapes.T, self._shapes.S
        visited = 1 - self.tiles.empty if self.tiles else 1.0
        return 2.0 * B * N * T * S * (self._shapes.H + self._shapes.V) * visited

    @functools.cached_property
    def temporaries(self) -> int | None:
        if self._call is None or self._lower is None:
            return None
        analysis = self._lower(self._call, *self._operands).compile().memory_analysis()
        return None if analysis is None else analysis.temp_size_in_bytes

    @functools.cached_property
    def advice(self) -> str | None:
        if not self._call or not self.tiles:
            return None
        return _advice(self._call, self._platform, self.tiles, self)

    def _lines(self) -> Iterator[tuple[str, str]]:
        x = self._shapes
        sizes = f"B {x.B}, T {x.T}, S {x.S}, N {x.N}, K {x.K}, H {x.H}, V {x.V}"
        yield "call", f"{sizes}, {x.dtype}, on {self._platform}"
        named = f"; {' or '.join(self.by_name)} has to be named" if self.by_name else ""
        yield "runs", self.runs + named
        if self.tiles:
            yield "tiles", str(self.tiles)
        yield "products", f"{self.flops / 1e9:.3g} GFLOP forward"
        yield "arrays", f"{self.bytes / 1e6:.3g} MB given and returned"
        if self.temporaries is not None:
            yield "temporaries", f"{self.temporaries / 1e6:.3g} MB forward"
        if self.tokens:
            yield "tokens", self.tokens
        for name, reason in self.items():
            yield name, reason or "can run it"
        if self.advice:
            yield "advice", self.advice

    def __str__(self) -> str:
        width = max(len(name) for name, _ in self._lines())
        return "\n".join(f"{name:{width}}  {text}" for name, text in self._lines())

    def _repr_html_(self) -> str:
        rows = (
            f"<tr><th style='text-align:left'>{html.escape(name)}</th>"
            f"<td style='text-align:left'>{html.escape(text)}</td></tr>"
            for name, text in self._lines()
        )
        return f"<table>{''.join(rows)}</table>"


def _bytes(call: Call, operands: Any) -> Size:
    """Returns the bytes of the operands, of the arrays of mask and score, and of the results."""
    shapes = call.shapes
    inputs = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((call.spec, operands)))
    rows = shapes.B * shapes.T * shapes.N
    lse = jnp.dtype(accumulation(shapes.dtype)).itemsize if call.needs_lse else 0
    return inputs + rows * (shapes.V * shapes.dtype.itemsize + lse)


@advised(Options)
def explain(
    query: Queries,
    key: Keys | Cache,
    value: Values | None = None,
    *,
    platform: str | None = None,
    return_lse: bool = False,
    **options: Unpack[Options],
) -> Explanation:
    """Returns which implementations can run `attention` with these arguments on a platform.

    Maps each name to None if it can run the call, else to the reason why not; `implementation=None`
    takes the first without a reason. Printed, it also lists the kinds of tiles that the mask
    leaves, operations, bytes, temporaries of the compiled program, and what would be faster, see
    `jattn.explanation`. `platform` is "cpu", "cuda" or "gpu", "rocm" or "tpu", for which the
    program is lowered; the default is the platform of the query or, while tracing, JAX's default.
    The other arguments are those of `attention`; `implementation` changes nothing.

    >>> jattn.explain(q, k, v, score=scores.SoftCap(30.0), platform="cuda")["cudnn"]
    'expected bfloat16 or float16, got float32'
    """
    options.pop("implementation", None)
    check_choice("platform", platform, (None, "gpu", *lowering.PLATFORMS))
    platform = "cuda" if platform == "gpu" else platform or _platform_of(query)
    call = make(query, key, value, lse=return_lse, **options)
    if isinstance(key, Cache):
        reasons = {registry.FEW_QUERIES: few_queries.unsupported(call.spec, call.shapes)}
        program, operands = attend_cache, (query, key)
    else:
        program, operands, reasons = attend, (query, key, value), {}
    is_local = platform == _platform_of(query)
    return Explanation(call, platform, operands, program.lower if is_local else None, reasons)


def _platform_of(x: Any) -> str:
    """Returns the platform of an array's device, or of the device where JAX would put it."""
    if isinstance(x, jax.Array) and not isinstance(x, Tracer):
        device = next(iter(x.devices()))
    else:
        device = getattr(jax.config, "jax_default_device", None) or jax.devices()[0]
    platform = device if isinstance(device, str) else device.platform
    if platform != "gpu":
        return platform
    from jax.extend.backend import get_backend  # noqa: PLC0415  it imports all of Pallas

    version = get_backend(platform).platform_version
    return "rocm" if "rocm" in version else "cuda"


# --- tiles --------------------------------------------------------------------------------------


def _is_traced(call: Call) -> bool:
    return any(isinstance(x, Tracer) for x in jax.tree.leaves(call))


def tiles_of(call: Call) -> Tiles | None:
    """Returns the shares of tiles, over a sample of the heads if they differ; None if unknown."""
    spec, shapes = call.spec, call.shapes
    if not isinstance(shapes.B, int) or 0 in (shapes.B, shapes.T, shapes.S):
        return None
    with jax.ensure_compile_time_eval():
        counts = np.sum([_counts(spec, shapes, b, h) for b, h in _some_heads(spec, shapes)], axis=0)
    empty, mixed, full = (float(x) for x in counts / counts.sum())
    return Tiles(_BLOCK, empty, mixed, full)


def _some_heads(spec: Spec, shapes: Shapes) -> list[tuple[int, int]]:
    """Returns batch rows and heads, `_MAPS` at most and evenly spread, that represent all."""
    rows, heads = leading(spec)
    functions = _has_function(spec.mask)
    B = shapes.B if functions or math.prod(rows) > 1 else 1
    N = shapes.N if functions or heads > 1 else 1
    stride = -(-B * N // _MAPS)
    return [divmod(place, N) for place in range(0, B * N, stride)]


def _counts(spec: Spec, shapes: Shapes, b: int, h: int) -> np.ndarray:
    """Returns the numbers of empty, mixed and full tiles of a head."""
    q, kv = (
        None if x is None else np.asarray(x).reshape(-1, x.shape[-1])[min(b, x.size // n - 1)]
        for x, n in ((spec.q_positions, shapes.T), (spec.kv_positions, shapes.S))
    )
    flat = flatten_batch(spec.mask, shapes.batch)
    kinds = masks.tile_map(
        flat, shapes.T, shapes.S, _BLOCK, _BLOCK, b=b, h=h, q_positions=q, kv_positions=kv
    )
    return np.bincount(np.asarray(kinds).ravel(), minlength=3)


# --- advice -------------------------------------------------------------------------------------


def _has_function(mask: Mask) -> bool:
    leaves = jax.tree.leaves(mask, is_leaf=lambda x: isinstance(x, Predicate))
    return any(isinstance(x, Predicate) for x in leaves)


def _advice(call: Call, platform: str, tiles: Tiles, known: dict[str, str | None]) -> str | None:
    """Returns the gain from a named mask in place of a function, as text."""
    spec, shapes = call.spec, call.shapes
    positions = (spec.q_positions, spec.kv_positions)
    if jax.tree.leaves((spec.mask, positions)) or not _has_function(spec.mask):
        return None
    with jax.ensure_compile_time_eval():
        same = _recognised(spec.mask, shapes)
    if same is None:
        return None
    shown, mask = same
    renamed = dataclasses.replace(call, spec=dataclasses.replace(spec, mask=mask))
    left, reasons = tiles_of(renamed), registry.reasons(renamed, platform)
    gained = [name for name, reason in known.items() if reason and not reasons.get(name, reason)]
    gains = []
    if left and left.empty > tiles.empty + 0.005:
        times = (1 - tiles.empty) / max(1 - left.empty, 1e-9)
        gains.append(f"it leaves {times:.3g} × fewer tiles")
    if gained:
        gains.append(f"{', '.join(gained)} can run it")
    return f"{shown} allows the same pairs, and {', and '.join(gains)}" if gains else None


def _recognised(mask: Mask, shapes: Shapes) -> tuple[str, Mask] | None:
    """Returns a named mask that allows the same keys to all sampled queries, and its text."""
    T, S = shapes.T, shapes.S
    rows = np.unique(np.linspace(0, T - 1, min(T, _ROWS)).astype(np.int32))
    columns = np.arange(S, dtype=np.int32)
    allowed = _rows_of(mask, 0, 0, rows, columns)
    if shapes.B * shapes.N > 1:
        last_head = _rows_of(mask, shapes.B - 1, shapes.N - 1, rows, columns)
        if not np.array_equal(allowed, last_head):
            return None
    for shown, candidate in _candidates(rows, allowed):
        if np.array_equal(_rows_of(candidate, 0, 0, rows, columns), allowed):
            return shown, candidate
    return None


def _rows_of(mask: Mask, b: int, h: int, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    return np.asarray(mask(b, h, Span(jnp.asarray(rows), jnp.asarray(rows)), jnp.asarray(columns)))


def _candidates(rows: np.ndarray, allowed: np.ndarray) -> Iterator[tuple[str, Mask]]:
    """Yields masks suggested by the allowed keys `[n, S]` of some queries, simplest first."""
    S = allowed.shape[1]
    first = allowed.argmax(axis=1)
    last = S - 1 - allowed[:, ::-1].argmax(axis=1)
    yield "Full()", masks.Full()
    yield "Causal()", masks.Causal()
    left = int((rows - first)[first > 0].max(initial=0))
    right = int((last - rows)[last < S - 1].max(initial=0))
    yield f"Causal() & Window(left={left})", masks.Causal() & masks.Window(left=left)
    yield f"Window(left={left}, right={right})", masks.Window(left=left, right=right)
    prefix = int(last[0]) + 1
    yield f"Causal() | Prefix({prefix})", masks.Causal() | masks.Prefix(prefix)
