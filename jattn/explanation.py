"""`explain`: which implementation runs a call and why others do not, how many tiles of scores it
skips, how much memory it needs, and what would make it faster.

The shares of tiles come from the mask's tile map. For a mask that is a function, the allowed pairs
of some queries are compared with those of `Causal`, `Window` and `Prefix`: these masks may skip
more tiles, and more kernels support them.
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

_BLOCK = 128  # the number of queries, and of keys, in a tile
_MAX_MAPS = 64  # the most heads whose tile maps are computed
_MAX_QUERIES = 64  # the most queries whose allowed keys are compared


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
    """A dictionary from the name of each implementation to the reason why it cannot run a call, or
    None if it can.

    runs: the implementation that `implementation=None` selects.
    by_name: further kernels made for the platform that can run the call, but only if a call names
        them, because `runs` comes first or such a device has not run them yet.
    tiles: the `Tiles` of the mask; None if there are no pairs, or if the mask is traced.
    flops: floating-point operations of the two matrix products of the forward pass, without those
        of empty tiles.
    bytes: the bytes of all arguments and results.
    temporaries: the bytes that the forward pass, compiled for one device, needs in addition; None
        for a platform other than the query's, and for traced masks and scores. The kernel in C++
        also needs a few tiles for each thread, which are not counted.
    tokens: how devices share the tokens, if query, key and value are sharded along them.
    advice: a mask that would skip more tiles or allow more kernels; None if none is known.

    It is shown as a table, by `print` and in notebooks. `tiles`, `flops`, `temporaries` and
    `advice` are computed on first access; `temporaries` compiles the program.
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

        `operands` are query, key and value, or query and cache. `lower` returns the lowered program
        of the call and the operands; None if it cannot be lowered here. `cache_reasons`, of
        implementations for caches alone, come first, because these are tried first.
        """
        reasons = registry.reasons(call, platform)
        super().__init__({**cache_reasons, **reasons})
        self.runs = registry.selected(self, call.shapes)
        selected = registry.selected(reasons, call.shapes)  # where a cache cannot be read in place
        others = [x for x, reason in reasons.items() if reason is None and x != selected]
        self.by_name = tuple(x for x in others if registry.is_for(x, platform))
        is_traced = any(isinstance(x, Tracer) for x in jax.tree.leaves(call))
        self._call = None if is_traced else call  # an attribute must not hold tracers
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
        share = 1 - self.tiles.empty if self.tiles else 1.0
        return 2.0 * B * N * T * S * (self._shapes.H + self._shapes.V) * share

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
        yield "arrays", f"{self.bytes / 1e6:.3g} MB of arguments and results"
        if isinstance(cache := self._operands[-1], Cache):
            yield "cache", f"{cache.bytes_per_token:,} bytes of {cache.keys.dtype} per token"
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
    lse_bytes = jnp.dtype(accumulation(shapes.dtype)).itemsize if call.needs_lse else 0
    out_bytes = shapes.V * shapes.dtype.itemsize
    return inputs + shapes.B * shapes.T * shapes.N * (out_bytes + lse_bytes)


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

    The result maps each name to the reason why it cannot run the call, or to None if it can;
    `implementation=None` selects the first that supports the call. Printed, the result also shows
    how many tiles the mask leaves, the number of operations, the memory, and what would be faster;
    see `jattn.explanation.Explanation`.

    `platform` is the platform for which the program would be lowered: "cpu", "cuda" or "gpu",
    "rocm", or "tpu"; by default that of the query or, while tracing, JAX's default. The other
    arguments are those of `attention`; `implementation` has no effect.

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
    """Returns the platform of an array's device; of other values, JAX's default device's."""
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


def tiles_of(call: Call) -> Tiles | None:
    """Returns the shares of tiles, over a sample of the heads if heads differ; None if there are no
    tiles or the batch size is symbolic."""
    spec, shapes = call.spec, call.shapes
    if not isinstance(shapes.B, int) or 0 in (shapes.B, shapes.T, shapes.S):
        return None
    with jax.ensure_compile_time_eval():
        samples = [_count_tiles(spec, shapes, b, h) for b, h in _sampled_heads(spec, shapes)]
        counts = np.sum(samples, axis=0)
    empty, mixed, full = (float(x) for x in counts / counts.sum())
    return Tiles(_BLOCK, empty, mixed, full)


def _sampled_heads(spec: Spec, shapes: Shapes) -> list[tuple[int, int]]:
    """Returns at most `_MAX_MAPS` pairs (batch row, head); one if the mask is the same for all."""
    rows, heads = leading(spec)
    has_function = _has_function(spec.mask)  # it may depend on b and h
    B = shapes.B if has_function or math.prod(rows) > 1 else 1
    N = shapes.N if has_function or heads > 1 else 1
    stride = -(-B * N // _MAX_MAPS)
    return [divmod(i, N) for i in range(0, B * N, stride)]


def _count_tiles(spec: Spec, shapes: Shapes, b: int, h: int) -> np.ndarray:
    """Returns the numbers of empty, mixed and full tiles of head h of batch row b, `[3]`."""
    q, kv = (
        None if x is None else np.asarray(x).reshape(-1, x.shape[-1])[min(b, x.size // n - 1)]
        for x, n in ((spec.q_positions, shapes.T), (spec.kv_positions, shapes.S))
    )
    mask = flatten_batch(spec.mask, shapes.batch)
    kinds = masks.tile_map(
        mask, shapes.T, shapes.S, _BLOCK, _BLOCK, b=b, h=h, q_positions=q, kv_positions=kv
    )
    return np.bincount(np.asarray(kinds).ravel(), minlength=3)


def _has_function(mask: Mask) -> bool:
    leaves = jax.tree.leaves(mask, is_leaf=lambda x: isinstance(x, Predicate))
    return any(isinstance(x, Predicate) for x in leaves)


def _advice(
    call: Call, platform: str, tiles: Tiles, old_reasons: dict[str, str | None]
) -> str | None:
    """Returns the mask of `jattn.masks` to write in place of a function and its gain, or None."""
    spec, shapes = call.spec, call.shapes
    positions = (spec.q_positions, spec.kv_positions)
    if jax.tree.leaves((spec.mask, positions)) or not _has_function(spec.mask):
        return None
    with jax.ensure_compile_time_eval():
        recognised = _recognised(spec.mask, shapes)
    if recognised is None:
        return None
    text, mask = recognised
    new_call = dataclasses.replace(call, spec=dataclasses.replace(spec, mask=mask))
    new_tiles, new_reasons = tiles_of(new_call), registry.reasons(new_call, platform)
    more_kernels = [x for x, old in old_reasons.items() if old and not new_reasons.get(x, old)]
    gains = []
    if new_tiles and new_tiles.empty > tiles.empty + 0.005:  # half a percent: worth a change
        ratio = (1 - tiles.empty) / max(1 - new_tiles.empty, 1e-9)
        gains.append(f"it leaves {ratio:.3g} × fewer tiles")
    if more_kernels:
        gains.append(f"{', '.join(more_kernels)} can run it")
    return f"{text} allows the same pairs, and {', and '.join(gains)}" if gains else None


def _recognised(mask: Mask, shapes: Shapes) -> tuple[str, Mask] | None:
    """Returns the first candidate, with its text, that allows sampled queries the same keys."""
    T, S = shapes.T, shapes.S
    queries = np.unique(np.linspace(0, T - 1, min(T, _MAX_QUERIES)).astype(np.int32))
    keys = np.arange(S, dtype=np.int32)
    allowed = _allowed_keys(mask, 0, 0, queries, keys)
    if shapes.B * shapes.N > 1:
        in_last_head = _allowed_keys(mask, shapes.B - 1, shapes.N - 1, queries, keys)
        if not np.array_equal(allowed, in_last_head):
            return None
    for text, candidate in _candidates(queries, allowed):
        if np.array_equal(_allowed_keys(candidate, 0, 0, queries, keys), allowed):
            return text, candidate
    return None


def _allowed_keys(mask: Mask, b: int, h: int, queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Returns which of S keys the mask allows to n queries, both at arange positions: `[n, S]`."""
    rows = Span(jnp.asarray(queries), jnp.asarray(queries))
    return np.asarray(mask(b, h, rows, jnp.asarray(keys)))


def _candidates(queries: np.ndarray, allowed: np.ndarray) -> Iterator[tuple[str, Mask]]:
    """Yields masks, simplest first, that may allow the keys `allowed [n, S]` to `queries [n]`."""
    S = allowed.shape[1]
    first_key = allowed.argmax(axis=1)
    last_key = S - 1 - allowed[:, ::-1].argmax(axis=1)
    yield "Full()", masks.Full()
    yield "Causal()", masks.Causal()
    # Queries that attend to key 0 say nothing about how far a window reaches to the left, and
    # queries that attend to the last key nothing about how far it reaches to the right.
    left = int((queries - first_key)[first_key > 0].max(initial=0))
    right = int((last_key - queries)[last_key < S - 1].max(initial=0))
    yield f"Causal() & Window(left={left})", masks.Causal() & masks.Window(left=left)
    yield f"Window(left={left}, right={right})", masks.Window(left=left, right=right)
    prefix = int(last_key[0]) + 1  # query 0 attends to the prefix alone
    yield f"Causal() | Prefix({prefix})", masks.Causal() | masks.Prefix(prefix)
