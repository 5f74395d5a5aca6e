"""The one table of cases that the contract suite, the benchmark and the tuner read.

A case is a shape with a mask and a score function, each written twice: as the library's object and
as a plain Python rule for the oracle (with derivatives for scores). Sizes are co-prime wherever
they may be, so that no two axes can be mistaken for each other.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import ml_dtypes
import numpy as np

import jattn
from jattn import masks, scores
from jattn.kernels import registry
from tests import oracle
from tests.oracle import At, Modifier


Arrays = Mapping[str, Any]

IMPLEMENTATIONS = registry.NAMES
"""A new implementation is a row in the library's own table."""

GENERAL = tuple(
    name
    for name in IMPLEMENTATIONS
    if name not in registry.KERNELS or registry.KERNELS[name].platforms is None
)
"""Those for every platform, which compute everything; the whole suite runs through them."""


@dataclasses.dataclass(frozen=True, eq=False)
class MaskRule:
    """A mask, as the library builds it and in words. `operands` are the arrays that both read."""

    build: Callable[[Arrays], Any]
    allowed: Callable[[Arrays, At], bool]
    operands: Arrays = dataclasses.field(default_factory=dict)

    def __and__(self, other: "MaskRule") -> "MaskRule":
        return MaskRule(
            lambda a: self.build(a) & other.build(a),
            lambda a, at: self.allowed(a, at) and other.allowed(a, at),
            _joined(self.operands, other.operands),
        )

    def __or__(self, other: "MaskRule") -> "MaskRule":
        return MaskRule(
            lambda a: self.build(a) | other.build(a),
            lambda a, at: self.allowed(a, at) or other.allowed(a, at),
            _joined(self.operands, other.operands),
        )

    def __invert__(self) -> "MaskRule":
        return MaskRule(
            lambda a: ~self.build(a), lambda a, at: not self.allowed(a, at), self.operands
        )


@dataclasses.dataclass(frozen=True, eq=False)
class ScoreRule:
    """A score function, as the library builds it and in words. `parameters` are differentiable."""

    build: Callable[[Arrays], Any]
    modifier: Callable[[Arrays], Modifier]
    parameters: Arrays = dataclasses.field(default_factory=dict)

    def __rshift__(self, other: "ScoreRule") -> "ScoreRule":
        return ScoreRule(
            lambda p: self.build(p) >> other.build(p),
            lambda p: self.modifier(p).then(other.modifier(p)),
            _joined(self.parameters, other.parameters),
        )


def _joined(first: Arrays, second: Arrays) -> Arrays:
    assert not set(first) & set(second), "two rules of a case name their arrays alike"
    return {**first, **second}


class Sizes(NamedTuple):
    """Leading axes and the letters."""

    batch: tuple[int, ...] = (2,)
    T: int = 5
    S: int = 7
    N: int = 6
    K: int = 3
    H: int = 10
    V: int = 4


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """One row of the table."""

    name: str
    sizes: Sizes = dataclasses.field(default_factory=Sizes)
    mask: MaskRule | None = None
    score: ScoreRule | None = None
    scale: float | None = None
    q_positions: np.ndarray | None = None
    kv_positions: np.ndarray | None = None
    rate: float = 0.0

    @property
    def operands(self) -> Arrays:
        """Integer and boolean arrays of the mask."""
        return {} if self.mask is None else self.mask.operands

    @property
    def parameters(self) -> Arrays:
        """Float arrays of the score functions, in float64."""
        return {} if self.score is None else self.score.parameters

    def problem(self, inputs: "Inputs", keep: oracle.Keep = lambda at: True) -> oracle.Problem:
        """What the oracle computes for these inputs; values as they are, in float64."""
        mask, score = self.mask, self.score
        return oracle.Problem(
            *(np.asarray(x, np.float64) for x in (inputs.q, inputs.k, inputs.v)),
            parameters={n: np.asarray(x, np.float64) for n, x in inputs.parameters.items()},
            allowed=(lambda at: True)
            if mask is None
            else lambda at: bool(mask.allowed(inputs.operands, at)),
            modifier=(lambda p: Modifier()) if score is None else score.modifier,
            scale=self.scale,
            q_positions=self.q_positions,
            kv_positions=self.kv_positions,
            keep=keep,
            rate=self.rate,
        )

    def rules(self, operands: Arrays, parameters: Arrays) -> dict[str, Any]:
        """The keyword arguments that say which pairs attend and how: mask, score, positions."""
        return {
            "mask": None if self.mask is None else self.mask.build(operands),
            "score": None if self.score is None else self.score.build(parameters),
            "scale": parameters.get("scale", self.scale),
            "q_positions": None if self.q_positions is None else jnp.asarray(self.q_positions),
            "kv_positions": None if self.kv_positions is None else jnp.asarray(self.kv_positions),
        }

    def attend(
        self, q: Any, k: Any, v: Any, parameters: Arrays, operands: Arrays, **options: Any
    ) -> Any:
        """`jattn.attention` on this case: `(out, lse)` unless options say otherwise."""
        options = {"return_lse": True, "dropout_rate": self.rate, **options}
        return jattn.attention(q, k, v, **self.rules(operands, parameters), **options)


class Inputs(NamedTuple):
    """Arrays of a case in one dtype, NumPy's or JAX's: arguments, and cotangents of out and lse."""

    q: Any
    k: Any
    v: Any
    parameters: dict[str, Any]
    operands: dict[str, Any]
    d_out: Any
    d_lse: Any


DTYPES: dict[str, Any] = {
    "float64": np.float64,
    "float32": np.float32,
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
}


def inputs(case: Case, dtype: str = "float64", seed: int = 0) -> Inputs:
    """Random inputs whose logits spread over several units, so that weights are far from even.

    Values rise along the keys in one channel and fall in the next, so that their mean is no answer.
    """
    rng = np.random.default_rng([seed, *case.name.encode()])
    kind = DTYPES[dtype]
    wide = np.float64 if dtype == "float64" else np.float32
    batch, T, S, N, K, H, V = case.sizes
    ramp = np.linspace(-1.5, 1.5, S)[:, None, None] * (-1) ** np.arange(V)
    return Inputs(
        q=(2 * rng.standard_normal((*batch, T, N, H))).astype(kind),
        k=(2 * rng.standard_normal((*batch, S, K, H))).astype(kind),
        v=(rng.standard_normal((*batch, S, K, V)) + ramp).astype(kind),
        parameters={name: np.asarray(x).astype(kind) for name, x in case.parameters.items()},
        operands={name: np.asarray(x) for name, x in case.operands.items()},
        d_out=rng.standard_normal((*batch, T, N, V)).astype(kind),
        d_lse=rng.standard_normal((*batch, N, T)).astype(wide),
    )


# --- masks --------------------------------------------------------------------------------------


def _of_batch(array: Any, b: int) -> Any:
    """The entry of an array with leading batch axes for a flat batch index; scalars are shared."""
    return array.reshape(-1)[b] if array.ndim else array


def _row_of(array: Any, b: int) -> Any:
    """The row of ids `[*B, T]`, or `[T]` shared by all, for a flat batch index."""
    return array if array.ndim == 1 else array.reshape(-1, array.shape[-1])[b]


def _clamped(array: Any, *index: Any) -> tuple[Any, ...]:
    """Indices into an array whose axes of size 1 broadcast."""
    return tuple(0 * x if size == 1 else x for x, size in zip(index, array.shape, strict=True))


def _full_rank(array: Any, at: At, i: Any, j: Any, batch: tuple[int, ...]) -> tuple[Any, ...]:
    """Index of (b, h, i, j) in an array `[*B, N, T, S]` whose axes of size 1 broadcast."""
    rows = np.unravel_index(at.b, batch) if batch else ()
    return _clamped(array, *rows, at.h, i, j)


FULL = MaskRule(lambda a: masks.Full(), lambda a, at: True)
EMPTY = MaskRule(lambda a: masks.Empty(), lambda a, at: False)
CAUSAL = MaskRule(lambda a: masks.Causal(), lambda a, at: at.kv <= at.q)


def window(left: int | None, right: int | None) -> MaskRule:
    """`q - left <= kv <= q + right`."""
    lo, hi = -math.inf if left is None else -left, math.inf if right is None else right
    return MaskRule(
        lambda a: masks.Window(left=left, right=right), lambda a, at: lo <= at.kv - at.q <= hi
    )


def window_of_arrays(left: Any, right: Any) -> MaskRule:
    """The same with sides that are arrays, scalars or one for each head."""

    def allowed(a: Arrays, at: At) -> bool:
        lo, hi = (x if x.ndim == 0 else x[at.h] for x in (a["left"], a["right"]))
        return -lo <= at.kv - at.q <= hi

    return MaskRule(
        lambda a: masks.Window(a["left"], a["right"]),
        allowed,
        {"left": np.array(left, np.int32), "right": np.array(right, np.int32)},
    )


def prefix(length: int) -> MaskRule:
    """A prefix known beforehand."""
    return MaskRule(lambda a: masks.Prefix(length), lambda a, at: at.kv < length)


def prefixes(lengths: Any) -> MaskRule:
    """A prefix for each batch row, as an array."""
    return MaskRule(
        lambda a: masks.Prefix(a["prefix"]),
        lambda a, at: at.kv < _of_batch(a["prefix"], at.b),
        {"prefix": np.array(lengths)},
    )


def lengths(q: Any = None, kv: Any = None) -> MaskRule:
    """Lengths by place, as arrays."""
    given = {"q_lengths": q, "kv_lengths": kv}

    def allowed(a: Arrays, at: At) -> bool:
        rows = "q_lengths" not in a or at.i < _of_batch(a["q_lengths"], at.b)
        columns = "kv_lengths" not in a or at.j < _of_batch(a["kv_lengths"], at.b)
        return bool(rows and columns)

    return MaskRule(
        lambda a: masks.Lengths(q=a.get("q_lengths"), kv=a.get("kv_lengths")),
        allowed,
        {name: np.array(value) for name, value in given.items() if value is not None},
    )


def fixed_lengths(q: int | None, kv: int | None) -> MaskRule:
    """Lengths as Python numbers."""
    return MaskRule(
        lambda a: masks.Lengths(q=q, kv=kv),
        lambda a, at: (q is None or at.i < q) and (kv is None or at.j < kv),
    )


def segments(q_ids: Any, kv_ids: Any = None) -> MaskRule:
    """Equal ids by place; without `kv_ids` the keys have the queries' ids."""
    given = {"q_ids": np.array(q_ids)}
    given |= {} if kv_ids is None else {"kv_ids": np.array(kv_ids)}
    return MaskRule(
        lambda a: masks.Segments(a["q_ids"], a.get("kv_ids")),
        lambda a, at: bool(
            _row_of(a["q_ids"], at.b)[at.i] == _row_of(a.get("kv_ids", a["q_ids"]), at.b)[at.j]
        ),
        given,
    )


def padding(attention_mask: Any) -> MaskRule:
    """Tokens among the keys, by place."""
    return MaskRule(
        lambda a: masks.Padding(a["attention_mask"]),
        lambda a, at: bool(_row_of(a["attention_mask"], at.b)[at.j]),
        {"attention_mask": np.array(attention_mask)},
    )


def dilated(step: int) -> MaskRule:
    """Distances that are multiples of `step`."""
    return MaskRule(lambda a: masks.Dilated(step), lambda a, at: (at.q - at.kv) % step == 0)


def global_(n: int) -> MaskRule:
    """The first n attend to all and are attended by all."""
    return MaskRule(lambda a: masks.Global(n), lambda a, at: at.q < n or at.kv < n)


def blocks(layout: Any, block: int | tuple[int, int], batch: tuple[int, ...] = (2,)) -> MaskRule:
    """A coarse layout, shared or of full rank."""
    high, wide = block if isinstance(block, tuple) else (block, block)

    def allowed(a: Arrays, at: At) -> bool:
        cells = a["layout"]
        i, j = at.i // high, at.j // wide
        index = (i, j) if cells.ndim == 2 else _full_rank(cells, at, i, j, batch)
        return bool(cells[index])

    return MaskRule(
        lambda a: masks.Blocks(a["layout"], block), allowed, {"layout": np.array(layout, bool)}
    )


def dense(shape: tuple[int, ...], seed: int, *, dead: Any = None, bare: bool = False) -> MaskRule:
    """A random boolean array of full rank; `dead` indexes what is switched off.

    `bare` hands the array itself to `attention`, which takes it for a `Dense` mask.
    """
    array = np.random.default_rng(seed).random(shape) < 0.6
    if dead is not None:
        array[dead] = False
    batch = (2,) * (len(shape) - 3)  # every batched case with an array has one axis of two rows
    return MaskRule(
        lambda a: a["dense"] if bare else masks.Dense(a["dense"]),
        lambda a, at: bool(a["dense"][_full_rank(a["dense"], at, at.i, at.j, batch)]),
        {"dense": array},
    )


def _near_or_even(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (abs(q - kv) <= 1) | ((q + 2 * kv + h + b) % 3 == 0)


def _later_than(b: Any, h: Any, q: Any, kv: Any, *operands: Any) -> Any:
    starts, offset = operands
    return (kv >= starts[b, h]) & (kv <= q + offset)


def _upper_half_of_tile(tile: Any) -> tuple[Any, Any]:
    """For `_three_back`: certain where the whole tile is below or above the line."""
    return tile.columns.lo <= tile.rows.hi - 3, tile.columns.hi <= tile.rows.lo - 3


def _three_back(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return kv <= q - 3


PREDICATE = MaskRule(
    lambda a: masks.Predicate(_near_or_even),
    lambda a, at: abs(at.q - at.kv) <= 1 or (at.q + 2 * at.kv + at.h + at.b) % 3 == 0,
)
PREDICATE_WITH_OPERANDS = MaskRule(
    lambda a: masks.Predicate(_later_than, a["starts"], a["offset"]),
    lambda a, at: bool(a["starts"][at.b, at.h] <= at.kv <= at.q + a["offset"]),
    {
        "starts": np.array([[0, 1, 2, 3, 4, 5], [2, 2, 0, 6, 1, 0]], np.int32),
        "offset": np.array(2, np.int32),
    },
)
PREDICATE_WITH_BOUNDS = MaskRule(
    lambda a: masks.Predicate(_three_back, bounds=_upper_half_of_tile),
    lambda a, at: at.kv <= at.q - 3,
)


# --- score functions ----------------------------------------------------------------------------


def _normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def soft_cap(cap: float) -> ScoreRule:
    """cap · tanh(s / cap), a constant cap."""
    return ScoreRule(
        lambda p: scores.SoftCap(cap),
        lambda p: Modifier(
            value=lambda s, at: cap * np.tanh(s / cap),
            by_score=lambda s, at: 1 / np.cosh(s / cap) ** 2,
        ),
    )


def learned_soft_cap(cap: float) -> ScoreRule:
    """The same with the cap as a parameter."""

    def modifier(p: Arrays) -> Modifier:
        c = p["cap"]
        return Modifier(
            value=lambda s, at: c * np.tanh(s / c),
            by_score=lambda s, at: 1 / np.cosh(s / c) ** 2,
            by_parameter={"cap": lambda s, at: ((), np.tanh(s / c) - s / c / np.cosh(s / c) ** 2)},
        )

    return ScoreRule(lambda p: scores.SoftCap(p["cap"]), modifier, {"cap": np.array(cap)})


def temperature(t: float) -> ScoreRule:
    """s / t, a constant t."""
    return ScoreRule(
        lambda p: scores.Temperature(t),
        lambda p: Modifier(value=lambda s, at: s / t, by_score=lambda s, at: 1 / t),
    )


def learned_temperature(t: float) -> ScoreRule:
    """The same with t as a parameter."""
    return ScoreRule(
        lambda p: scores.Temperature(p["temperature"]),
        lambda p: Modifier(
            value=lambda s, at: s / p["temperature"],
            by_score=lambda s, at: 1 / p["temperature"],
            by_parameter={"temperature": lambda s, at: ((), -s / p["temperature"] ** 2)},
        ),
        {"temperature": np.array(t)},
    )


def soft_cap_by_head(caps: tuple[float, ...]) -> ScoreRule:
    """A cap for each head."""

    def modifier(p: Arrays) -> Modifier:
        c = lambda at: p["cap"][at.h]  # noqa: E731
        bend = lambda s, at: s / c(at) / np.cosh(s / c(at)) ** 2  # noqa: E731
        return Modifier(
            value=lambda s, at: c(at) * np.tanh(s / c(at)),
            by_score=lambda s, at: 1 / np.cosh(s / c(at)) ** 2,
            by_parameter={"cap": lambda s, at: ((at.h,), np.tanh(s / c(at)) - bend(s, at))},
        )

    return ScoreRule(lambda p: scores.SoftCap(p["cap"]), modifier, {"cap": np.array(caps)})


def scale_by_head(by: tuple[float, ...]) -> ScoreRule:
    """A scale for each head, given as the argument of that name."""
    return ScoreRule(
        lambda p: None,
        lambda p: Modifier(
            value=lambda s, at: s * p["scale"][at.h],
            by_score=lambda s, at: p["scale"][at.h],
            by_parameter={"scale": lambda s, at: ((at.h,), s)},
        ),
        {"scale": np.array(by)},
    )


def temperature_by_head(ts: tuple[float, ...]) -> ScoreRule:
    """A temperature for each head."""
    return ScoreRule(
        lambda p: scores.Temperature(p["t"]),
        lambda p: Modifier(
            value=lambda s, at: s / p["t"][at.h],
            by_score=lambda s, at: 1 / p["t"][at.h],
            by_parameter={"t": lambda s, at: ((at.h,), -s / p["t"][at.h] ** 2)},
        ),
        {"t": np.array(ts)},
    )


def alibi(slopes: tuple[float, ...]) -> ScoreRule:
    """A penalty per head that grows with the distance, slopes as an array and so learned."""
    return ScoreRule(
        lambda p: scores.Alibi(p["slopes"]),
        lambda p: Modifier(
            value=lambda s, at: s - p["slopes"][at.h] * abs(at.q - at.kv),
            by_parameter={"slopes": lambda s, at: ((at.h,), -abs(at.q - at.kv))},
        ),
        {"slopes": np.array(slopes)},
    )


def bucket(distance: int, buckets: int, bidirectional: bool, max_distance: int) -> int:
    """T5's bucket of kv − q, in whole numbers: half exact, half logarithmic."""
    start = 0
    if bidirectional:
        buckets //= 2
        start = buckets if distance > 0 else 0
        distance = abs(distance)
    else:
        distance = max(-distance, 0)
    exact = buckets // 2
    if distance < exact:
        return start + distance
    steps = buckets - exact
    step = 0  # greatest step with (distance / exact) ^ steps >= (max_distance / exact) ^ step
    while (
        step < steps - 1
        and distance**steps * exact ** (step + 1) >= max_distance ** (step + 1) * exact**steps
    ):
        step += 1
    return start + exact + step


def relative_bias(buckets: int, N: int, *, bidirectional: bool, max_distance: int) -> ScoreRule:
    """A learned table over buckets of distance."""
    find = np.vectorize(
        lambda distance: bucket(int(distance), buckets, bidirectional, max_distance), otypes=[int]
    )
    options = {"bidirectional": bidirectional, "max_distance": max_distance}
    return ScoreRule(
        lambda p: scores.RelativeBias(p["table"], **options),
        lambda p: Modifier(
            value=lambda s, at: s + p["table"][find(at.kv - at.q), at.h],
            by_parameter={"table": lambda s, at: ((find(at.kv - at.q), at.h), 1.0)},
        ),
        {"table": _normal(11, buckets, N)},
    )


def bias(shape: tuple[int, ...], batch: tuple[int, ...] = (2,)) -> ScoreRule:
    """An array of full rank, by place; axes of size 1 broadcast."""

    def index(array: Any, at: At) -> tuple[Any, ...]:
        return _full_rank(array, at, at.i, at.j, batch)

    return ScoreRule(
        lambda p: scores.Bias(p["bias"]),
        lambda p: Modifier(
            value=lambda s, at: s + p["bias"][index(p["bias"], at)],
            by_parameter={"bias": lambda s, at: (index(p["bias"], at), 1.0)},
        ),
        {"bias": 2 * _normal(12, *shape)},
    )


def _fading(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    as_float = functools.partial(jnp.asarray, dtype=score.dtype)
    return (
        score - 0.125 * score * as_float(kv_idx % 3) - 0.5 * as_float(h == 1) + 0.25 * as_float(b)
    )


def _gated(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, *operands: Any) -> Any:
    gate, by_key = (operand.astype(score.dtype) for operand in operands)
    return score * gate[h] + by_key[b, kv_idx]


FUNCTION = ScoreRule(
    lambda p: scores.Score(_fading),
    lambda p: Modifier(
        value=lambda s, at: s - s * (at.kv % 3) / 8 - (at.h == 1) / 2 + at.b / 4,
        by_score=lambda s, at: 1 - (at.kv % 3) / 8,
    ),
)
FUNCTION_WITH_OPERANDS = ScoreRule(
    lambda p: scores.Score(_gated, p["gate"], p["by_key"]),
    lambda p: Modifier(
        value=lambda s, at: s * p["gate"][at.h] + p["by_key"][at.b, at.kv],
        by_score=lambda s, at: p["gate"][at.h],
        by_parameter={
            "gate": lambda s, at: ((at.h,), s),
            "by_key": lambda s, at: ((at.b, at.kv), 1.0),
        },
    ),
    {"gate": 1 + 0.5 * _normal(13, 6), "by_key": _normal(14, 2, 7)},
)


# --- the table ----------------------------------------------------------------------------------

SLOPES = (0.5, 0.25, 0.125, 0.0625, 0.75, -0.25)
LAST_ROW = np.s_[..., -1, :]
SELF = Sizes(T=7, S=7)
LONG = Sizes(batch=(), T=37, S=53, N=2, K=1, H=5, V=3)  # several tiles of 16 in both directions
LONG_IDS = np.repeat([1, 2, 3, 4], [9, 20, 1, 23])

SHAPES = [
    Case("plain"),
    Case("no_batch", Sizes(batch=())),
    Case("two_batch_axes", Sizes(batch=(2, 3), T=2, S=3, N=4, K=2, H=5, V=1)),
    Case("empty_batch", Sizes(batch=(0,))),
    Case("one_query", Sizes(T=1)),
    Case("one_key", Sizes(S=1)),
    Case("no_keys", Sizes(S=0)),
    Case(
        "no_keys_in_arrays",
        Sizes(S=0),
        dense((2, 6, 5, 0), 0) & segments(np.zeros((2, 5), int), np.zeros((2, 0), int)),
        bias((2, 6, 5, 0)) >> alibi(SLOPES),
    ),
    Case("no_queries", Sizes(T=0)),
    Case("more_queries_than_keys", Sizes(T=7, S=5)),
    Case("one_kv_head", Sizes(K=1)),
    Case("ungrouped", Sizes(N=3, K=3)),
    Case("odd_head_size", Sizes(H=3)),
    Case("head_size_one", Sizes(H=1)),
    Case("wide_values", Sizes(H=4, V=11)),
    Case("all_sizes_equal", Sizes(batch=(3,), T=3, S=3, N=3, K=3, H=3, V=3), CAUSAL),
    Case("given_scale", scale=0.75),
    Case("no_scale", Sizes(H=2), scale=1.0),
    Case("zero_scale", scale=0.0),
]

MASKS = [
    Case("full", mask=FULL),
    Case("empty", mask=EMPTY),
    Case("causal", mask=CAUSAL),
    Case("causal_tall", Sizes(T=7, S=5), CAUSAL),
    Case("window", mask=window(2, 1)),
    Case("window_left", mask=window(1, None)),
    Case("window_right", mask=window(None, 1)),
    Case("window_self", SELF, window(0, 0)),
    Case("window_tall", Sizes(T=9, S=4), window(1, 1)),
    Case("prefix", mask=prefix(3)),
    Case("prefix_per_row", mask=prefixes([3, 0])),
    Case("lengths_kv", mask=lengths(kv=[3, 0])),
    Case("lengths_q", mask=lengths(q=[4, 2])),
    Case("lengths_both", mask=lengths(q=[5, 1], kv=[2, 7])),
    Case("lengths_shared", mask=lengths(q=3, kv=6)),
    Case("lengths_numbers", mask=fixed_lengths(4, 5)),
    Case(
        "lengths_two_axes",
        Sizes(batch=(2, 3), T=2, S=3, N=4, K=2, H=5, V=1),
        lengths(kv=[[3, 1, 0], [2, 2, 3]]),
    ),
    Case("window_by_head", mask=window_of_arrays([0, 1, 2, 3, 5, 100], [1, 0, 2, 0, 0, 2])),
    Case("window_traced", mask=window_of_arrays(2, [0, 1, 1, 0, 6, 2]) | CAUSAL),
    Case(
        "segments",
        mask=segments(
            [[1, 1, 2, 2, 9], [1, 2, 2, 3, 3]], [[1, 1, 1, 2, 2, 2, 0], [3, 3, 2, 2, 2, 1, 1]]
        ),
    ),
    Case("segments_shared", mask=segments([1, 1, 2, 2, 3], [3, 3, 2, 1, 1, 1, 1])),
    Case("segments_self", SELF, segments([[0, 0, 0, 1, 1, 2, 2], [5, 5, 5, 5, 4, 4, 4]])),
    Case("padding", mask=padding([[0, 0, 1, 1, 1, 1, 0], [1, 1, 1, 0, 1, 0, 0]])),
    Case("dilated", mask=dilated(3)),
    Case("global", mask=global_(2)),
    Case("blocks", Sizes(T=6, S=8), blocks([[1, 0, 0, 1], [0, 1, 1, 0], [0, 0, 0, 0]], 2)),
    Case(
        "blocks_ragged",
        Sizes(T=5, S=7),
        blocks(np.random.default_rng(3).random((2, 6, 2, 4)) < 0.6, (3, 2)),
    ),
    Case("dense", mask=dense((2, 6, 5, 7), 0, dead=LAST_ROW)),
    Case("dense_bare_array", mask=dense((2, 6, 5, 7), 1, bare=True)),
    Case("dense_shared", mask=dense((1, 1, 5, 7), 2, dead=LAST_ROW)),
    Case("dense_by_head", mask=dense((1, 6, 1, 7), 3)),
    Case("dense_by_row", mask=dense((2, 1, 5, 1), 4)),
    Case("dense_no_batch", Sizes(batch=()), dense((6, 5, 7), 5, dead=np.s_[3])),
    Case("predicate", mask=PREDICATE),
    Case("predicate_operands", mask=PREDICATE_WITH_OPERANDS),
    Case("predicate_bounds", SELF, PREDICATE_WITH_BOUNDS),
]

COMBINED = [
    Case("causal_window", SELF, CAUSAL & window(2, None)),
    Case(
        "causal_segments", SELF, CAUSAL & segments([[0, 0, 0, 1, 1, 2, 2], [5, 5, 4, 4, 4, 4, 4]])
    ),
    Case("prefix_lm", SELF, CAUSAL | prefixes([3, 1])),
    Case("not_causal", mask=~CAUSAL),
    Case("window_or_global", SELF, window(1, 1) | global_(1)),
    Case("not_segments_in_lengths", SELF, ~segments([1, 2, 3, 1, 2, 3, 1]) & lengths(kv=[6, 2])),
    Case("nested", mask=~(window(1, 2) & dilated(2)) & (lengths(kv=[5, 7]) | CAUSAL)),
    Case("dense_and_causal", mask=dense((2, 6, 5, 7), 6, dead=np.s_[0, 2]) & CAUSAL),
    Case("predicate_or_blocks", Sizes(T=6, S=8), PREDICATE & ~blocks(np.eye(3, 4), 2)),
]

SCORES = [
    Case("soft_cap", score=soft_cap(3.0)),
    Case("soft_cap_causal", mask=CAUSAL, score=soft_cap(1.0)),
    Case("soft_cap_learned", score=learned_soft_cap(2.5)),
    Case("temperature", score=temperature(1.75)),
    Case("temperature_learned", mask=window(2, 1), score=learned_temperature(0.8)),
    Case("soft_cap_by_head", mask=CAUSAL, score=soft_cap_by_head((1.5, 2.0, 2.5, 3.0, 4.0, 9.0))),
    Case(
        "scale_by_head",
        mask=CAUSAL,
        score=scale_by_head((0.5, 0.8, -1.0, 1.5, 2.0, 0.0)),
        scale=1.0,
    ),
    Case("temperature_by_head", score=temperature_by_head((0.5, 0.8, 1.0, 1.5, 2.0, 4.0))),
    Case("alibi", score=alibi(SLOPES)),
    Case("alibi_causal", mask=CAUSAL, score=alibi(SLOPES)),
    Case(
        "relative_bias",
        Sizes(batch=(1,), T=11, S=19, N=2, K=1, H=4, V=2),
        score=relative_bias(8, 2, bidirectional=True, max_distance=16),
    ),
    Case(
        "relative_bias_causal",
        Sizes(batch=(1,), T=19, S=17, N=2, K=2, H=4, V=2),
        CAUSAL,
        relative_bias(6, 2, bidirectional=False, max_distance=12),
    ),
    Case("bias", score=bias((2, 6, 5, 7))),
    Case("bias_by_head", mask=CAUSAL, score=bias((1, 6, 5, 7))),
    Case("bias_by_key", score=bias((2, 1, 1, 7))),
    Case("bias_by_row", mask=lengths(kv=[4, 0]), score=bias((1, 6, 5, 1))),
    Case("bias_no_batch", Sizes(batch=()), score=bias((6, 5, 7), batch=())),
    Case("bias_dead_rows", mask=dense((2, 6, 5, 7), 7, dead=LAST_ROW), score=bias((2, 6, 5, 7))),
    Case("function", score=FUNCTION),
    Case("function_operands", mask=lengths(kv=[7, 5]), score=FUNCTION_WITH_OPERANDS),
    Case("cap_then_bias", mask=CAUSAL, score=soft_cap(2.0) >> bias((2, 6, 5, 7))),
    Case("bias_then_cap", mask=CAUSAL, score=bias((2, 6, 5, 7)) >> soft_cap(2.0)),
    Case(
        "chain",
        mask=lengths(q=[5, 4], kv=[7, 3]),
        score=learned_temperature(1.25)
        >> learned_soft_cap(4.0)
        >> alibi(SLOPES)
        >> FUNCTION_WITH_OPERANDS,
    ),
]

EDGES = np.array([-(2**31), -(2**31) + 1, 0, 1, 2**31 - 3, 2**31 - 2, 2**31 - 1])
POSITIONS = [
    Case("edge_positions", mask=CAUSAL, q_positions=EDGES[[6, 2, 0, 1, 5]], kv_positions=EDGES),
    Case("edge_positions_window", SELF, window(2, 1), q_positions=EDGES, kv_positions=EDGES[::-1]),
    Case(
        "edge_ids",
        mask=segments(
            [7, 7 + 2**32, 2**31, -(2**31), 2**31 - 1],
            [7, 7, 7 + 2**32, 2**31 - 1, 2**31 - 1, -(2**31), 2**31],
        ),
    ),
    Case("decode", Sizes(T=1), CAUSAL, q_positions=np.array([6])),
    Case("decode_function", Sizes(T=1), PREDICATE, FUNCTION, q_positions=np.array([6])),
    Case("one_key_function", Sizes(S=1), PREDICATE, FUNCTION, kv_positions=np.array([3])),
    Case("decode_window", Sizes(T=2, S=8), CAUSAL & window(1, None), q_positions=np.array([6, 7])),
    Case(
        "decode_per_row",
        Sizes(T=2),
        CAUSAL & lengths(kv=[5, 7]),
        alibi(SLOPES),
        q_positions=np.array([[3, 4], [5, 6]]),
    ),
    Case("permuted_keys", mask=CAUSAL, kv_positions=np.array([5, 2, 0, 6, 1, 4, 3])),
    Case("dead_by_position", Sizes(T=5, S=2), CAUSAL, q_positions=np.arange(5) - 3),
    Case(
        "far_away",
        mask=window(3, 1) | prefix(100_001),
        q_positions=np.arange(5) + 100_003,
        kv_positions=np.arange(7) + 99_999,
    ),
    Case(
        "places_and_positions",
        SELF,
        segments([[0, 0, 0, 1, 1, 2, 2], [5, 5, 4, 4, 4, 4, 4]]) & CAUSAL,
        bias((2, 6, 7, 7)) >> alibi(SLOPES),
        q_positions=np.array([[0, 1, 2, 0, 1, 0, 1], [0, 1, 0, 1, 2, 3, 4]]),
        kv_positions=np.array([[0, 1, 2, 0, 1, 0, 1], [0, 1, 0, 1, 2, 3, 4]]),
    ),
    Case(
        "relative_bias_shifted",
        Sizes(batch=(1,), T=3, S=19, N=2, K=1, H=4, V=2),
        score=relative_bias(8, 2, bidirectional=True, max_distance=16),
        q_positions=np.arange(3) + 17,
    ),
    Case(
        "two_axes_of_positions",
        Sizes(batch=(2, 2), T=2, S=3, N=4, K=2, H=5, V=1),
        CAUSAL,
        q_positions=np.array([[[0, 1], [1, 2]], [[2, 3], [0, 2]]]),
        kv_positions=np.array([2, 0, 1]),
    ),
    Case(
        "global_dilated_shifted",
        mask=global_(2) | dilated(2),
        q_positions=np.arange(5) + 1,
        kv_positions=np.arange(7)[::-1].copy(),
    ),
]

TILES = [
    Case("tiles", LONG, CAUSAL & window(21, None), alibi(SLOPES[:2])),
    Case("tiles_causal", LONG, CAUSAL),
    Case("tiles_band", LONG, window(9, 3)),
    Case(
        "tiles_relative_bias",
        LONG,
        score=relative_bias(8, 2, bidirectional=True, max_distance=12),
    ),
    Case("tiles_segments", LONG, segments(LONG_IDS[:37], LONG_IDS) & ~dilated(5)),
    Case("tiles_bias", LONG, lengths(kv=41) | prefix(3), bias((2, 37, 53), batch=())),
    Case(
        "tiles_dense",
        LONG,
        dense((1, 37, 53), 8, dead=np.s_[:, 16:33]),
        soft_cap(5.0),
        q_positions=np.arange(37) + 16,
    ),
]

DROPOUT = [
    Case("dropout", rate=0.2),
    Case("dropout_masked", mask=CAUSAL & lengths(kv=[7, 2]), score=bias((1, 6, 5, 7)), rate=0.5),
    Case("dropout_shifted", mask=CAUSAL, rate=0.3, q_positions=np.arange(5) + 2),
]

CASES: dict[str, Case] = {
    case.name: case for case in [*SHAPES, *MASKS, *COMBINED, *SCORES, *POSITIONS, *TILES, *DROPOUT]
}
assert len(CASES) == sum(map(len, (SHAPES, MASKS, COMBINED, SCORES, POSITIONS, TILES, DROPOUT))), (
    "two cases of one name"
)
