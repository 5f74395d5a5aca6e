"""The table of cases: attention calls that the tests of every implementation run. Masks and scores
are written twice: as the library's object and as a plain Python rule for the oracle.

CaseSizes are co-prime wherever possible, so that no two axes can be mistaken for each other.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, NamedTuple

import jax.numpy as jnp
import ml_dtypes
import numpy as np

import jattn
from jattn import masks, normalizers, scores
from jattn.kernels import registry
from tests import oracle, row_normalizers
from tests.oracle import At, Modifier, OracleNormalizer


Arrays = Mapping[str, Any]

IMPLEMENTATIONS = registry.NAMES
"""Every row of the library's registry."""

GENERAL = tuple(
    name
    for name in IMPLEMENTATIONS
    if name not in registry.KERNELS or registry.KERNELS[name].platforms is None
)
"""The implementations for every platform, which compute everything: the whole suite runs them."""


@dataclasses.dataclass(frozen=True, eq=False)
class MaskRule:
    """A mask as the library builds it and as a Python rule; both read the arrays in `operands`."""

    build: Callable[[Arrays], Any]
    allowed: Callable[[Arrays, At], bool]
    operands: Arrays = dataclasses.field(default_factory=dict)

    def __and__(self, other: "MaskRule", combine: Any = operator.and_) -> "MaskRule":
        return MaskRule(
            lambda a: combine(self.build(a), other.build(a)),
            lambda a, pair: combine(bool(self.allowed(a, pair)), bool(other.allowed(a, pair))),
            _joined(self.operands, other.operands),
        )

    def __or__(self, other: "MaskRule") -> "MaskRule":
        return self.__and__(other, operator.or_)

    def __invert__(self) -> "MaskRule":
        return MaskRule(
            lambda a: ~self.build(a), lambda a, pair: not self.allowed(a, pair), self.operands
        )


@dataclasses.dataclass(frozen=True, eq=False)
class ScoreRule:
    """A score function as the library builds it and as a rule; `parameters` have gradients."""

    build: Callable[[Arrays], Any]
    modifier: Callable[[Arrays], Modifier]
    parameters: Arrays = dataclasses.field(default_factory=dict)

    def __rshift__(self, other: "ScoreRule") -> "ScoreRule":
        return ScoreRule(
            lambda p: self.build(p) >> other.build(p),
            lambda p: self.modifier(p).then(other.modifier(p)),
            _joined(self.parameters, other.parameters),
        )


@dataclasses.dataclass(frozen=True, eq=False)
class NormalizerRule:
    """A normalizer as the library builds it and as a rule; `parameters` have gradients."""

    build: Callable[[Arrays], Any]
    definition: Callable[[Arrays], OracleNormalizer]
    parameters: Arrays = dataclasses.field(default_factory=dict)


def _joined(first: Arrays, second: Arrays) -> Arrays:
    assert not set(first) & set(second), "two rules of a case name their arrays alike"
    return {**first, **second}


class CaseSizes(NamedTuple):
    """Batch axes, and the size of each axis by its letter."""

    batch: tuple[int, ...] = (2,)
    T: int = 5
    S: int = 7
    N: int = 6
    K: int = 3
    H: int = 10
    V: int = 4


@dataclasses.dataclass(frozen=True, eq=False)
class CallCase:
    """One row of the table."""

    name: str
    sizes: CaseSizes = dataclasses.field(default_factory=CaseSizes)
    mask: MaskRule | None = None
    score: ScoreRule | None = None
    scale: float | None = None
    q_positions: np.ndarray | None = None
    kv_positions: np.ndarray | None = None
    rate: float = 0.0
    normalizer: NormalizerRule | None = None

    @property
    def operands(self) -> Arrays:
        """Integer and boolean arrays of the mask."""
        return {} if self.mask is None else self.mask.operands

    @property
    def parameters(self) -> Arrays:
        """Float arrays of the score functions and of the normalizer, in float64."""
        rules = [x.parameters for x in (self.score, self.normalizer) if x is not None]
        return functools.reduce(_joined, rules, {})

    def problem(
        self, inputs: "CaseInputs", keep: oracle.Keep = lambda pair: True
    ) -> oracle.OracleProblem:
        """Returns what the oracle computes for these inputs, converted to float64."""
        mask, score = self.mask, self.score
        return oracle.OracleProblem(
            *(np.asarray(x, np.float64) for x in (inputs.q, inputs.k, inputs.v)),
            parameters={n: np.asarray(x, np.float64) for n, x in inputs.parameters.items()},
            allowed=lambda pair: mask is None or bool(mask.allowed(inputs.operands, pair)),
            modifier=(lambda p: Modifier()) if score is None else score.modifier,
            normalizer=None if self.normalizer is None else self.normalizer.definition,
            scale=self.scale,
            q_positions=self.q_positions,
            kv_positions=self.kv_positions,
            keep=keep,
            rate=self.rate,
        )

    def rules(self, operands: Arrays, parameters: Arrays) -> dict[str, Any]:
        """The keyword arguments mask, score, scale, positions and normalizer of a call."""
        normalizer = self.normalizer
        named = {} if normalizer is None else {"normalizer": normalizer.build(parameters)}
        return named | {
            "mask": None if self.mask is None else self.mask.build(operands),
            "score": None if self.score is None else self.score.build(parameters),
            "scale": parameters.get("scale", self.scale),
            "q_positions": None if self.q_positions is None else jnp.asarray(self.q_positions),
            "kv_positions": None if self.kv_positions is None else jnp.asarray(self.kv_positions),
        }

    def attend(self, q, k, v, parameters: Arrays, operands: Arrays, **options):
        """Returns `(out, lse)` unless options say otherwise. With a normalizer, lse is 0."""
        options = {"return_lse": True, "dropout_rate": self.rate, **options}
        lse = options["return_lse"]
        if self.normalizer is not None:
            options["return_lse"] = False
        result = jattn.attention(q, k, v, **self.rules(operands, parameters), **options)
        if self.normalizer is None or not lse:
            return result
        dtype = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
        by_head = jnp.swapaxes(result.sum(axis=-1), -1, -2)  # sharded like lse
        return result, jnp.zeros_like(by_head, dtype)


class CaseInputs(NamedTuple):
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


def inputs(case: CallCase, dtype: str = "float64", seed: int = 0) -> CaseInputs:
    """Random inputs whose weights are far from uniform, and values that increase along the keys in
    one channel and decrease in the next, so that their mean is a wrong output."""
    rng = np.random.default_rng([seed, *case.name.encode()])
    kind = DTYPES[dtype]
    wide = np.float64 if dtype == "float64" else np.float32
    batch, T, S, N, K, H, V = case.sizes
    ramp = np.linspace(-1.5, 1.5, S)[:, None, None] * (-1) ** np.arange(V)
    return CaseInputs(
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
    """Returns the entry of `array` for a flat batch index; scalars are shared."""
    return array.reshape(-1)[b] if array.ndim else array


def _row_of(array: Any, b: int) -> Any:
    """Returns the row of ids `[*B, T]`, or `[T]` shared by all, for a flat batch index."""
    return array if array.ndim == 1 else array.reshape(-1, array.shape[-1])[b]


def _clamped(array: Any, *index: Any) -> tuple[Any, ...]:
    """Indices into an array whose axes of size 1 broadcast."""
    return tuple(0 * x if size == 1 else x for x, size in zip(index, array.shape, strict=True))


def _full_rank(array: Any, pair: At, i: Any, j: Any, batch: tuple[int, ...]) -> tuple[Any, ...]:
    """Index of (b, h, i, j) in an array `[*B, N, T, S]` whose axes of size 1 broadcast."""
    rows = np.unravel_index(pair.b, batch) if batch else ()
    return _clamped(array, *rows, pair.h, i, j)


FULL = MaskRule(lambda a: masks.Full(), lambda a, pair: True)
EMPTY = MaskRule(lambda a: masks.Empty(), lambda a, pair: False)
CAUSAL = MaskRule(lambda a: masks.Causal(), lambda a, pair: pair.kv <= pair.q)


def window(left: int | None, right: int | None) -> MaskRule:
    lo, hi = -math.inf if left is None else -left, math.inf if right is None else right
    return MaskRule(
        lambda a: masks.Window(left=left, right=right), lambda a, pair: lo <= pair.kv - pair.q <= hi
    )


def window_of_arrays(left: Any, right: Any) -> MaskRule:
    """A window whose sides are arrays: scalars, or one number for each head."""

    def allowed(a: Arrays, pair: At) -> bool:
        lo, hi = (x if x.ndim == 0 else x[pair.h] for x in (a["left"], a["right"]))
        return -lo <= pair.kv - pair.q <= hi

    return MaskRule(
        lambda a: masks.Window(a["left"], a["right"]),
        allowed,
        {"left": np.array(left, np.int32), "right": np.array(right, np.int32)},
    )


def prefix(length: int) -> MaskRule:
    return MaskRule(lambda a: masks.Prefix(length), lambda a, pair: pair.kv < length)


def prefixes(*lengths: int) -> MaskRule:
    """A prefix for each batch row, as an array."""
    return MaskRule(
        lambda a: masks.Prefix(a["prefix"]),
        lambda a, pair: pair.kv < a["prefix"][pair.b],
        {"prefix": np.array(lengths)},
    )


def lengths(q: Any = None, kv: Any = None) -> MaskRule:
    """Lengths of queries and keys, as arrays."""
    by_name = {"q_lengths": q, "kv_lengths": kv}

    def allowed(a: Arrays, pair: At) -> bool:
        rows = "q_lengths" not in a or pair.i < _of_batch(a["q_lengths"], pair.b)
        columns = "kv_lengths" not in a or pair.j < _of_batch(a["kv_lengths"], pair.b)
        return bool(rows and columns)

    return MaskRule(
        lambda a: masks.Lengths(q=a.get("q_lengths"), kv=a.get("kv_lengths")),
        allowed,
        {name: np.array(value) for name, value in by_name.items() if value is not None},
    )


def segments(q_ids: Any, kv_ids: Any = None) -> MaskRule:
    """Equal ids; without `kv_ids` the keys have the queries' ids."""
    return MaskRule(
        lambda a: masks.Segments(a["q_ids"], a.get("kv_ids")),
        lambda a, pair: bool(
            _row_of(a["q_ids"], pair.b)[pair.i]
            == _row_of(a.get("kv_ids", a["q_ids"]), pair.b)[pair.j]
        ),
        {"q_ids": np.array(q_ids)} | ({} if kv_ids is None else {"kv_ids": np.array(kv_ids)}),
    )


def padding(attention_mask: Any) -> MaskRule:
    return MaskRule(
        lambda a: masks.Padding(a["attention_mask"]),
        lambda a, pair: bool(_row_of(a["attention_mask"], pair.b)[pair.j]),
        {"attention_mask": np.array(attention_mask)},
    )


def tree(parents: Any, start: Any) -> MaskRule:
    """Each query sees all keys before `start`, which is an integer or is by batch row, itself as
    key `start + i`, and its ancestors."""
    by_row = isinstance(start, list)

    def allowed(a: Arrays, pair: At) -> bool:
        begin = a["start"][pair.b] if by_row else start
        row, node = _row_of(a["parents"], pair.b), pair.i
        while node >= 0 and pair.j != begin + node:
            node = row[node]
        return bool(node >= 0 or pair.j < begin)

    operands = {"parents": np.array(parents)} | ({"start": np.array(start)} if by_row else {})
    return MaskRule(lambda a: masks.Tree(a["parents"], a.get("start", start)), allowed, operands)


def dilated(by: int) -> MaskRule:
    return MaskRule(lambda a: masks.Dilated(by), lambda a, pair: (pair.q - pair.kv) % by == 0)


def global_(n: int) -> MaskRule:
    """The first n positions attend to all and are attended to by all."""
    return MaskRule(lambda a: masks.Global(n), lambda a, pair: pair.q < n or pair.kv < n)


def blocks(layout: Any, block: int | tuple[int, int], batch: tuple[int, ...] = (2,)) -> MaskRule:
    high, wide = block if isinstance(block, tuple) else (block, block)

    def allowed(a: Arrays, pair: At) -> bool:
        cells = a["layout"]
        i, j = pair.i // high, pair.j // wide
        index = (i, j) if cells.ndim == 2 else _full_rank(cells, pair, i, j, batch)
        return bool(cells[index])

    return MaskRule(
        lambda a: masks.Blocks(a["layout"], block), allowed, {"layout": np.array(layout, bool)}
    )


def dense(shape: tuple[int, ...], seed: int, *, dead: Any = None, bare: bool = False) -> MaskRule:
    """A random boolean array of full rank, False where `dead` indexes it; not a mask if `bare`."""
    array = np.random.default_rng(seed).random(shape) < 0.6
    if dead is not None:
        array[dead] = False
    batch = (2,) * (len(shape) - 3)  # every batched case with an array has one axis of two rows
    return MaskRule(
        lambda a: a["dense"] if bare else masks.Dense(a["dense"]),
        lambda a, pair: bool(a["dense"][_full_rank(a["dense"], pair, pair.i, pair.j, batch)]),
        {"dense": array},
    )


PREDICATE = MaskRule(
    lambda a: masks.Predicate(
        lambda b, h, q, kv: (abs(q - kv) <= 1) | ((q + 2 * kv + h + b) % 3 == 0)
    ),
    lambda a, pair: abs(pair.q - pair.kv) <= 1 or (pair.q + 2 * pair.kv + pair.h + pair.b) % 3 == 0,
)
PREDICATE_WITH_OPERANDS = MaskRule(
    lambda a: masks.Predicate(
        lambda b, h, q, kv, starts, offset: (kv >= starts[b, h]) & (kv <= q + offset),
        a["starts"],
        a["offset"],
    ),
    lambda a, pair: bool(a["starts"][pair.b, pair.h] <= pair.kv <= pair.q + a["offset"]),
    {
        "starts": np.array([[0, 1, 2, 3, 4, 5], [2, 2, 0, 6, 1, 0]], np.int32),
        "offset": np.array(2, np.int32),
    },
)
PREDICATE_WITH_BOUNDS = MaskRule(
    lambda a: masks.Predicate(
        lambda b, h, q, kv: kv <= q - 3,
        bounds=lambda x: (x.columns.lo <= x.rows.hi - 3, x.columns.hi <= x.rows.lo - 3),
    ),
    lambda a, pair: pair.kv <= pair.q - 3,
)


# --- score functions ----------------------------------------------------------------------------


def _normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def _head_index(array: Any, pair: At) -> tuple[Any, ...]:
    """The index of the pair's entry in an array of one number, or of one for each head."""
    return (pair.h,) if array.ndim else ()


def _by_number(
    name: str, numbers: Any, learned: bool, build: Any, value: Any, by_score: Any, by_number: Any
) -> ScoreRule:
    """A score function of a number, or of one for each head, which are a parameter if `learned`.

    The last three arguments are the function and its derivatives, of the score, number and pair.
    """

    def modifier(p: Arrays) -> Modifier:
        index = lambda pair: _head_index(p[name], pair)  # noqa: E731
        at = lambda pair: p[name][index(pair)] if learned else numbers  # noqa: E731
        slope = lambda s, pair: (index(pair), by_number(s, at(pair), pair))  # noqa: E731
        return Modifier(
            value=lambda s, pair: value(s, at(pair), pair),
            by_score=lambda s, pair: by_score(s, at(pair), pair),
            by_parameter={name: slope} if learned else {},
        )

    parameters = {name: np.array(numbers)} if learned else {}
    return ScoreRule(lambda p: build(p[name] if learned else numbers), modifier, parameters)


def soft_cap(cap: Any, learned: bool = False) -> ScoreRule:
    """cap · tanh(s / cap)."""
    return _by_number(
        *("cap", cap, learned, scores.SoftCap),
        lambda s, cap, pair: cap * np.tanh(s / cap),
        lambda s, cap, pair: 1 / np.cosh(s / cap) ** 2,
        lambda s, cap, pair: np.tanh(s / cap) - s / cap / np.cosh(s / cap) ** 2,
    )


def temperature(t: Any, learned: bool = False) -> ScoreRule:
    """s / t."""
    return _by_number(
        *("t", t, learned, scores.Temperature),
        lambda s, t, pair: s / t,
        lambda s, t, pair: 1 / t,
        lambda s, t, pair: -s / t**2,
    )


def scale_by_head(by: tuple[float, ...]) -> ScoreRule:
    """A scale for each head, passed as `scale`."""
    return _by_number(
        *("scale", by, True, lambda scale: None),
        lambda s, scale, pair: s * scale,
        lambda s, scale, pair: scale,
        lambda s, scale, pair: s,
    )


def alibi(slopes: tuple[float, ...]) -> ScoreRule:
    """A penalty for each head that increases with the distance, with learned slopes."""
    return _by_number(
        *("slopes", slopes, True, scores.Alibi),
        lambda s, slope, pair: s - slope * abs(pair.q - pair.kv),
        lambda s, slope, pair: 1.0,
        lambda s, slope, pair: -abs(pair.q - pair.kv),
    )


def bucket(distance: int, buckets: int, bidirectional: bool, max_distance: int) -> int:
    """T5's bucket of kv − q, in whole numbers: half exact, half logarithmic."""
    if bidirectional:
        start = buckets // 2 if distance > 0 else 0
        return start + bucket(-abs(distance), buckets // 2, False, max_distance)
    distance, exact = max(-distance, 0), buckets // 2
    if distance < exact:
        return distance
    coarse, ratio = buckets - exact, Fraction(distance, exact)
    logarithms = [n for n in range(coarse) if ratio**coarse >= Fraction(max_distance, exact) ** n]
    return exact + max(logarithms)


def relative_bias(buckets: int, N: int, *, bidirectional: bool, max_distance: int) -> ScoreRule:
    """A learned table over buckets of distance."""
    find = np.vectorize(
        lambda distance: bucket(int(distance), buckets, bidirectional, max_distance), otypes=[int]
    )
    options = {"bidirectional": bidirectional, "max_distance": max_distance}
    return ScoreRule(
        lambda p: scores.RelativeBias(p["table"], **options),
        lambda p: Modifier(
            value=lambda s, pair: s + p["table"][find(pair.kv - pair.q), pair.h],
            by_parameter={"table": lambda s, pair: ((find(pair.kv - pair.q), pair.h), 1.0)},
        ),
        {"table": _normal(11, buckets, N)},
    )


def bias(shape: tuple[int, ...], batch: tuple[int, ...] = (2,)) -> ScoreRule:
    """An array of full rank whose axes of size 1 broadcast."""

    index = lambda array, pair: _full_rank(array, pair, pair.i, pair.j, batch)  # noqa: E731
    return ScoreRule(
        lambda p: scores.Bias(p["bias"]),
        lambda p: Modifier(
            value=lambda s, pair: s + p["bias"][index(p["bias"], pair)],
            by_parameter={"bias": lambda s, pair: (index(p["bias"], pair), 1.0)},
        ),
        {"bias": 2 * _normal(12, *shape)},
    )


def _fading(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    as_float = functools.partial(jnp.asarray, dtype=score.dtype)
    return (
        score - 0.125 * score * as_float(kv_idx % 3) - 0.5 * as_float(h == 1) + 0.25 * as_float(b)
    )


FUNCTION = ScoreRule(
    lambda p: scores.Score(_fading),
    lambda p: Modifier(
        value=lambda s, pair: s - s * (pair.kv % 3) / 8 - (pair.h == 1) / 2 + pair.b / 4,
        by_score=lambda s, pair: 1 - (pair.kv % 3) / 8,
    ),
)
FUNCTION_WITH_OPERANDS = ScoreRule(
    lambda p: scores.Score(
        lambda s, b, h, q, kv, gate, x: s * gate[h].astype(s.dtype) + x[b, kv].astype(s.dtype),
        p["gate"],
        p["by_key"],
    ),
    lambda p: Modifier(
        value=lambda s, pair: s * p["gate"][pair.h] + p["by_key"][pair.b, pair.kv],
        by_score=lambda s, pair: p["gate"][pair.h],
        by_parameter={
            "gate": lambda s, pair: ((pair.h,), s),
            "by_key": lambda s, pair: ((pair.b, pair.kv), 1.0),
        },
    ),
    {"gate": 1 + 0.5 * _normal(13, 6), "by_key": _normal(14, 2, 7)},
)


# --- normalizers --------------------------------------------------------------------------------


def _fixed(normalizer: Any, definition: OracleNormalizer) -> NormalizerRule:
    """A normalizer without parameters."""
    return NormalizerRule(lambda p: normalizer, lambda p: definition)


def learned_sigmoid(bias: Any) -> NormalizerRule:
    """A sigmoid with a learned bias: one number, or one for each head."""

    def definition(p: Arrays) -> OracleNormalizer:
        index = functools.partial(_head_index, p["sigmoid_bias"])
        bias = lambda pair: p["sigmoid_bias"][index(pair)]  # noqa: E731
        return row_normalizers.sigmoid(bias, {"sigmoid_bias": index})

    return NormalizerRule(
        lambda p: normalizers.Sigmoid(p["sigmoid_bias"]),
        definition,
        {"sigmoid_bias": np.array(bias)},
    )


MIXED = NormalizerRule(
    lambda p: normalizers.Pointwise(
        lambda s, bend, slope: bend.astype(s.dtype) * jnp.tanh(s) + slope.astype(s.dtype) * s,
        p["bend"],
        p["slope"],
    ),
    lambda p: row_normalizers.pointwise(
        Modifier(
            value=lambda s, pair: p["bend"] * np.tanh(s) + p["slope"] * s,
            by_score=lambda s, pair: p["bend"] / np.cosh(s) ** 2 + p["slope"],
            by_parameter={
                "bend": lambda s, pair: ((), np.tanh(s)),
                "slope": lambda s, pair: ((), s),
            },
        )
    ),
    {"bend": np.array(0.75), "slope": np.array(-0.25)},
)


FORGETTING = NormalizerRule(
    lambda p: normalizers.Running(
        scores.Score(lambda s, b, h, q, kv, x: x[b, h, kv].astype(s.dtype), p["log_gates"])
    ),
    lambda p: row_normalizers.running(
        Modifier(
            value=lambda s, pair: p["log_gates"][pair.b, pair.h, pair.kv] + 0 * s,
            by_score=lambda s, pair: 0.0,
            by_parameter={"log_gates": lambda s, pair: ((pair.b, pair.h, pair.kv), 1.0)},
        ),
        Modifier(),
        row_normalizers.softmax(),
        "add",
    ),
    {"log_gates": -np.abs(_normal(15, 2, 6, 7))},
)


def _first_above_1(left: Any, right: Any) -> Any:
    return jnp.where((abs(left) > 1) | (right == 0), left, right)  # 0: there is no later term


def running(
    combine: str, shape: tuple[int, ...], normalizer: Any, definition: OracleNormalizer
) -> NormalizerRule:
    """Terms of score and bias, which has axes T and S; scores bent by a learned number."""
    operation = (_first_above_1, 0.0) if combine == "first_above_1" else (combine,)
    terms = bias(shape, (2,) * (len(shape) - 3)) >> soft_cap(1.25)
    first = soft_cap(3.0, learned=True)
    return NormalizerRule(
        lambda p: normalizers.Running(terms.build(p), first.build(p), normalizer, *operation),
        lambda p: row_normalizers.running(
            terms.modifier(p), first.modifier(p), definition, combine
        ),
        _joined(terms.parameters, first.parameters),
    )


IDENTITY = _fixed(normalizers.Identity(), row_normalizers.pointwise(Modifier()))
EXP = _fixed(normalizers.Exp(), row_normalizers.exp())
RELU = _fixed(normalizers.Relu(), row_normalizers.relu(1))
SQUARED_RELU = _fixed(normalizers.Relu(2, count_power=1), row_normalizers.relu(2, 7))
SPARSEMAX = _fixed(normalizers.Sparsemax(), row_normalizers.sparsemax())
TOP_3 = _fixed(normalizers.TopK(3), row_normalizers.top_k(3))
HALF_SIGMOID = row_normalizers.sigmoid(lambda pair: 0.5)
STICK_BREAKING = _fixed(normalizers.StickBreaking(), row_normalizers.stick_breaking())


def sigmoid(S: int) -> NormalizerRule:
    """A sigmoid with the default bias."""
    return _fixed(normalizers.Sigmoid(), row_normalizers.sigmoid(lambda pair: -math.log(S)))


def entmax(alpha: float) -> NormalizerRule:
    return _fixed(normalizers.Entmax(alpha), row_normalizers.entmax(alpha))


# --- the table ----------------------------------------------------------------------------------

SLOPES = (0.5, 0.25, 0.125, 0.0625, 0.75, -0.25)
SCALES = (0.5, 0.8, -1.0, 1.5, 2.0, 0.0)
LAST_ROW = np.s_[..., -1, :]
SELF = CaseSizes(T=7, S=7)
LONG = CaseSizes(batch=(), T=37, S=53, N=2, K=1, H=5, V=3)  # several tiles of 16 in both directions
TWO_AXES = CaseSizes(batch=(2, 3), T=2, S=3, N=4, K=2, H=5, V=1)
LONG_IDS = np.repeat([1, 2, 3, 4], [9, 20, 1, 23])
LONG_DENSE = dense((1, 37, 53), 8, dead=np.s_[:, 16:33])
LATER = np.arange(37) + 16
PACKED = [[0, 0, 0, 1, 1, 2, 2], [5, 5, 4, 4, 4, 4, 4]]
IN_DOCUMENTS = np.array([[0, 1, 2, 0, 1, 0, 1], [0, 1, 0, 1, 2, 3, 4]])  # positions

SHAPES = [
    CallCase("plain"),
    CallCase("no_batch", CaseSizes(batch=())),
    CallCase("two_batch_axes", TWO_AXES),
    CallCase("empty_batch", CaseSizes(batch=(0,))),
    CallCase("one_query", CaseSizes(T=1)),
    CallCase("one_key", CaseSizes(S=1)),
    CallCase("no_keys", CaseSizes(S=0)),
    CallCase(
        "no_keys_in_arrays",
        CaseSizes(S=0),
        dense((2, 6, 5, 0), 0) & segments(np.zeros((2, 5), int), np.zeros((2, 0), int)),
        bias((2, 6, 5, 0)) >> alibi(SLOPES),
    ),
    CallCase("no_queries", CaseSizes(T=0)),
    CallCase("more_queries_than_keys", CaseSizes(T=7, S=5)),
    CallCase("one_kv_head", CaseSizes(K=1)),
    CallCase("ungrouped", CaseSizes(N=3, K=3)),
    CallCase("odd_head_size", CaseSizes(H=3)),
    CallCase("head_size_one", CaseSizes(H=1)),
    CallCase("wide_values", CaseSizes(H=4, V=11)),
    CallCase("all_sizes_equal", CaseSizes(batch=(3,), T=3, S=3, N=3, K=3, H=3, V=3), CAUSAL),
    CallCase("given_scale", scale=0.75),
    CallCase("no_scale", CaseSizes(H=2), scale=1.0),
    CallCase("zero_scale", scale=0.0),
]

MASKS = [
    CallCase("full", mask=FULL),
    CallCase("empty", mask=EMPTY),
    CallCase("causal", mask=CAUSAL),
    CallCase("causal_tall", CaseSizes(T=7, S=5), CAUSAL),
    CallCase("window", mask=window(2, 1)),
    CallCase("window_left", mask=window(1, None)),
    CallCase("window_right", mask=window(None, 1)),
    CallCase("window_self", SELF, window(0, 0)),
    CallCase("window_tall", CaseSizes(T=9, S=4), window(1, 1)),
    CallCase("prefix", mask=prefix(3)),
    CallCase("prefix_per_row", mask=prefixes(3, 0)),
    CallCase("lengths_kv", mask=lengths(kv=[3, 0])),
    CallCase("lengths_q", mask=lengths(q=[4, 2])),
    CallCase("lengths_both", mask=lengths(q=[5, 1], kv=[2, 7])),
    CallCase("lengths_shared", mask=lengths(q=3, kv=6)),
    CallCase(
        "lengths_numbers",
        mask=MaskRule(
            lambda a: masks.Lengths(q=4, kv=5), lambda a, pair: pair.i < 4 and pair.j < 5
        ),
    ),
    CallCase("lengths_two_axes", TWO_AXES, lengths(kv=[[3, 1, 0], [2, 2, 3]])),
    CallCase("window_by_head", mask=window_of_arrays([0, 1, 2, 3, 5, 100], [1, 0, 2, 0, 0, 2])),
    CallCase("window_traced", mask=window_of_arrays(2, [0, 1, 1, 0, 6, 2]) | CAUSAL),
    CallCase(
        "segments",
        mask=segments(
            [[1, 1, 2, 2, 9], [1, 2, 2, 3, 3]], [[1, 1, 1, 2, 2, 2, 0], [3, 3, 2, 2, 2, 1, 1]]
        ),
    ),
    CallCase("segments_shared", mask=segments([1, 1, 2, 2, 3], [3, 3, 2, 1, 1, 1, 1])),
    CallCase("segments_self", SELF, segments([[0, 0, 0, 1, 1, 2, 2], [5, 5, 5, 5, 4, 4, 4]])),
    CallCase("padding", mask=padding([[0, 0, 1, 1, 1, 1, 0], [1, 1, 1, 0, 1, 0, 0]])),
    CallCase("dilated", mask=dilated(3)),
    CallCase("global", mask=global_(2)),
    CallCase("tree", mask=tree([[-1, 0, 0, 1, 3], [-1, -1, 1, 0, 2]], [2, 0])),
    CallCase("blocks", CaseSizes(T=6, S=8), blocks([[1, 0, 0, 1], [0, 1, 1, 0], [0, 0, 0, 0]], 2)),
    CallCase(
        "blocks_ragged",
        CaseSizes(T=5, S=7),
        blocks(np.random.default_rng(3).random((2, 6, 2, 4)) < 0.6, (3, 2)),
    ),
    CallCase("dense", mask=dense((2, 6, 5, 7), 0, dead=LAST_ROW)),
    CallCase("dense_bare_array", mask=dense((2, 6, 5, 7), 1, bare=True)),
    CallCase("dense_shared", mask=dense((1, 1, 5, 7), 2, dead=LAST_ROW)),
    CallCase("dense_by_head", mask=dense((1, 6, 1, 7), 3)),
    CallCase("dense_by_row", mask=dense((2, 1, 5, 1), 4)),
    CallCase("dense_no_batch", CaseSizes(batch=()), dense((6, 5, 7), 5, dead=np.s_[3])),
    CallCase("predicate", mask=PREDICATE),
    CallCase("predicate_operands", mask=PREDICATE_WITH_OPERANDS),
    CallCase("predicate_bounds", SELF, PREDICATE_WITH_BOUNDS),
]

COMBINED = [
    CallCase("causal_window", SELF, CAUSAL & window(2, None)),
    CallCase("causal_segments", SELF, CAUSAL & segments(PACKED)),
    CallCase("prefix_lm", SELF, CAUSAL | prefixes(3, 1)),
    CallCase("not_causal", mask=~CAUSAL),
    CallCase("window_or_global", SELF, window(1, 1) | global_(1)),
    CallCase(
        "not_segments_in_lengths", SELF, ~segments([1, 2, 3, 1, 2, 3, 1]) & lengths(kv=[6, 2])
    ),
    CallCase("nested", mask=~(window(1, 2) & dilated(2)) & (lengths(kv=[5, 7]) | CAUSAL)),
    CallCase("dense_and_causal", mask=dense((2, 6, 5, 7), 6, dead=np.s_[0, 2]) & CAUSAL),
    CallCase("predicate_or_blocks", CaseSizes(T=6, S=8), PREDICATE & ~blocks(np.eye(3, 4), 2)),
]

SCORES = [
    CallCase("soft_cap", score=soft_cap(3.0)),
    CallCase("soft_cap_causal", mask=CAUSAL, score=soft_cap(1.0)),
    CallCase("soft_cap_learned", score=soft_cap(2.5, learned=True)),
    CallCase("temperature", score=temperature(1.75)),
    CallCase("temperature_learned", mask=window(2, 1), score=temperature(0.8, learned=True)),
    CallCase(
        "soft_cap_by_head",
        mask=CAUSAL,
        score=soft_cap((1.5, 2.0, 2.5, 3.0, 4.0, 9.0), learned=True),
    ),
    CallCase("scale_by_head", mask=CAUSAL, score=scale_by_head(SCALES), scale=1.0),
    CallCase(
        "temperature_by_head", score=temperature((0.5, 0.8, 1.0, 1.5, 2.0, 4.0), learned=True)
    ),
    CallCase("alibi", score=alibi(SLOPES)),
    CallCase("alibi_causal", mask=CAUSAL, score=alibi(SLOPES)),
    CallCase(
        "relative_bias",
        CaseSizes(batch=(1,), T=11, S=19, N=2, K=1, H=4, V=2),
        score=relative_bias(8, 2, bidirectional=True, max_distance=16),
    ),
    CallCase(
        "relative_bias_causal",
        CaseSizes(batch=(1,), T=19, S=17, N=2, K=2, H=4, V=2),
        CAUSAL,
        relative_bias(6, 2, bidirectional=False, max_distance=12),
    ),
    CallCase("bias", score=bias((2, 6, 5, 7))),
    CallCase("bias_by_head", mask=CAUSAL, score=bias((1, 6, 5, 7))),
    CallCase("bias_by_key", score=bias((2, 1, 1, 7))),
    CallCase("bias_by_row", mask=lengths(kv=[4, 0]), score=bias((1, 6, 5, 1))),
    CallCase("bias_no_batch", CaseSizes(batch=()), score=bias((6, 5, 7), batch=())),
    CallCase(
        "bias_dead_rows", mask=dense((2, 6, 5, 7), 7, dead=LAST_ROW), score=bias((2, 6, 5, 7))
    ),
    CallCase("function", score=FUNCTION),
    CallCase("function_operands", mask=lengths(kv=[7, 5]), score=FUNCTION_WITH_OPERANDS),
    CallCase("cap_then_bias", mask=CAUSAL, score=soft_cap(2.0) >> bias((2, 6, 5, 7))),
    CallCase("bias_then_cap", mask=CAUSAL, score=bias((2, 6, 5, 7)) >> soft_cap(2.0)),
    CallCase(
        "chain",
        mask=lengths(q=[5, 4], kv=[7, 3]),
        score=temperature(1.25, learned=True)
        >> soft_cap(4.0, learned=True)
        >> alibi(SLOPES)
        >> FUNCTION_WITH_OPERANDS,
    ),
]

EDGES = np.array([-(2**31), -(2**31) + 1, 0, 1, 2**31 - 3, 2**31 - 2, 2**31 - 1])
POSITIONS = [
    CallCase("edge_positions", mask=CAUSAL, q_positions=EDGES[[6, 2, 0, 1, 5]], kv_positions=EDGES),
    CallCase(
        "edge_positions_window", SELF, window(2, 1), q_positions=EDGES, kv_positions=EDGES[::-1]
    ),
    CallCase(
        "edge_ids",
        mask=segments(
            [7, 7 + 2**32, 2**31, -(2**31), 2**31 - 1],
            [7, 7, 7 + 2**32, 2**31 - 1, 2**31 - 1, -(2**31), 2**31],
        ),
    ),
    CallCase("decode", CaseSizes(T=1), CAUSAL, q_positions=np.array([6])),
    CallCase("decode_function", CaseSizes(T=1), PREDICATE, FUNCTION, q_positions=np.array([6])),
    CallCase("one_key_function", CaseSizes(S=1), PREDICATE, FUNCTION, kv_positions=np.array([3])),
    CallCase(
        "decode_window", CaseSizes(T=2, S=8), CAUSAL & window(1, None), q_positions=np.array([6, 7])
    ),
    CallCase(
        "decode_per_row",
        CaseSizes(T=2),
        CAUSAL & lengths(kv=[5, 7]),
        alibi(SLOPES),
        q_positions=np.array([[3, 4], [5, 6]]),
    ),
    CallCase("permuted_keys", mask=CAUSAL, kv_positions=np.array([5, 2, 0, 6, 1, 4, 3])),
    CallCase("dead_by_position", CaseSizes(T=5, S=2), CAUSAL, q_positions=np.arange(5) - 3),
    CallCase(
        "far_away",
        mask=window(3, 1) | prefix(100_001),
        q_positions=np.arange(5) + 100_003,
        kv_positions=np.arange(7) + 99_999,
    ),
    CallCase(
        "places_and_positions",
        SELF,
        segments(PACKED) & CAUSAL,
        bias((2, 6, 7, 7)) >> alibi(SLOPES),
        q_positions=IN_DOCUMENTS,
        kv_positions=IN_DOCUMENTS,
    ),
    CallCase(
        "relative_bias_shifted",
        CaseSizes(batch=(1,), T=3, S=19, N=2, K=1, H=4, V=2),
        score=relative_bias(8, 2, bidirectional=True, max_distance=16),
        q_positions=np.arange(3) + 17,
    ),
    CallCase(
        "two_axes_of_positions",
        TWO_AXES._replace(batch=(2, 2)),
        CAUSAL,
        q_positions=np.array([[[0, 1], [1, 2]], [[2, 3], [0, 2]]]),
        kv_positions=np.array([2, 0, 1]),
    ),
    CallCase(
        "global_dilated_shifted",
        mask=global_(2) | dilated(2),
        q_positions=np.arange(5) + 1,
        kv_positions=np.arange(7)[::-1].copy(),
    ),
]

TILES = [
    CallCase("tiles", LONG, CAUSAL & window(21, None), alibi(SLOPES[:2])),
    CallCase("tiles_causal", LONG, CAUSAL),
    CallCase("tiles_band", LONG, window(9, 3)),
    CallCase(
        "tiles_relative_bias", LONG, score=relative_bias(8, 2, bidirectional=True, max_distance=12)
    ),
    CallCase("tiles_segments", LONG, segments(LONG_IDS[:37], LONG_IDS) & ~dilated(5)),
    CallCase("tiles_bias", LONG, lengths(kv=41) | prefix(3), bias((2, 37, 53), batch=())),
    CallCase("tiles_dense", LONG, LONG_DENSE, soft_cap(5.0), q_positions=LATER),
]

DROPOUT = [
    CallCase("dropout", rate=0.2),
    CallCase(
        "dropout_masked", mask=CAUSAL & lengths(kv=[7, 2]), score=bias((1, 6, 5, 7)), rate=0.5
    ),
    CallCase("dropout_shifted", mask=CAUSAL, rate=0.3, q_positions=np.arange(5) + 2),
]

# One case of each normalizer, and then further ones.
NORMALIZERS = [
    CallCase(
        "identity", CaseSizes(batch=()), window(2, 1), soft_cap(3.0), rate=0.2, normalizer=IDENTITY
    ),
    CallCase("sigmoid", mask=lengths(kv=[3, 0]), normalizer=learned_sigmoid(SLOPES)),
    CallCase(
        "relu",
        mask=segments([1, 1, 2, 2, 3], [3, 3, 2, 1, 1, 1, 1]),
        score=bias((1, 6, 5, 1)),
        normalizer=SQUARED_RELU,
    ),
    CallCase("exp", CaseSizes(T=7, S=5), PREDICATE, soft_cap(2.0), normalizer=EXP),
    CallCase("pointwise", mask=dense((2, 6, 5, 7), 9, dead=LAST_ROW), normalizer=MIXED),
    CallCase(
        "softmax", mask=CAUSAL, normalizer=_fixed(normalizers.Softmax(), row_normalizers.softmax())
    ),
    CallCase(
        "softmax_plus_one",
        mask=lengths(kv=[3, 0]),
        score=soft_cap(2.0),
        normalizer=_fixed(normalizers.SoftmaxPlusOne(), row_normalizers.softmax(plus_one=True)),
    ),
    CallCase(
        "sparsemax",
        mask=lengths(q=[5, 1], kv=[2, 7]),
        score=temperature((2.0, 3.0, 4.0, 5.0, 6.0, 8.0), learned=True),
        rate=0.2,
        normalizer=SPARSEMAX,
    ),
    CallCase(
        "entmax",
        mask=dense((2, 6, 5, 7), 10, dead=LAST_ROW),
        score=bias((2, 6, 5, 7)),
        scale=0.1,
        normalizer=entmax(1.5),
    ),
    CallCase(
        "top_k",
        CaseSizes(batch=(2, 3), T=2, S=5, N=4, K=2, H=5, V=3),
        CAUSAL | prefix(4),
        normalizer=TOP_3,
    ),
    CallCase(
        "stick_breaking",
        SELF,
        CAUSAL & segments(PACKED),
        alibi(SLOPES),
        scale=0.2,
        normalizer=STICK_BREAKING,
    ),
    CallCase("forgetting", mask=CAUSAL & lengths(kv=[7, 3]), normalizer=FORGETTING),
    CallCase("sigmoid_shifted", mask=CAUSAL, normalizer=sigmoid(7), q_positions=np.arange(5) + 2),
    CallCase("relu_plain", normalizer=RELU),
    CallCase(
        "sparsemax_decode",
        CaseSizes(T=1),
        CAUSAL,
        q_positions=np.array([6]),
        scale=0.1,
        normalizer=SPARSEMAX,
    ),
    CallCase("entmax_mild", CaseSizes(T=3, S=11), normalizer=entmax(1.2)),
    CallCase("entmax_sharp", mask=PREDICATE_WITH_OPERANDS, scale=0.1, normalizer=entmax(2.5)),
    CallCase("top_k_dropout", mask=lengths(kv=[5, 2]), rate=0.3, normalizer=TOP_3),
    CallCase("stick_breaking_no_mask", CaseSizes(S=3), normalizer=STICK_BREAKING),
    CallCase(
        "running_product",
        mask=lengths(kv=[6, 0]),
        normalizer=running("multiply", (2, 6, 5, 7), normalizers.Sigmoid(0.5), HALF_SIGMOID),
    ),
    CallCase(
        "running_maximum",
        mask=window(3, 2),
        scale=0.1,
        normalizer=running("maximum", (1, 6, 5, 7), normalizers.Exp(), row_normalizers.exp()),
    ),
    CallCase(
        "running_minimum",
        mask=CAUSAL,
        normalizer=running(
            "minimum", (1, 1, 5, 7), normalizers.Sparsemax(), row_normalizers.sparsemax()
        ),
    ),
    CallCase(
        "running_function",
        mask=CAUSAL,
        q_positions=np.arange(5) + 2,
        normalizer=running("first_above_1", (1, 6, 5, 7), normalizers.Sigmoid(0.5), HALF_SIGMOID),
    ),
    CallCase(
        "tiles_sigmoid", LONG, CAUSAL & window(21, None), alibi(SLOPES[:2]), normalizer=sigmoid(53)
    ),
    CallCase(
        "tiles_entmax",
        LONG,
        lengths(kv=41) | prefix(3),
        bias((2, 37, 53), batch=()),
        scale=0.3,
        rate=0.2,
        normalizer=entmax(1.5),
    ),
    CallCase("tiles_top_k", LONG, LONG_DENSE, soft_cap(5.0), q_positions=LATER, normalizer=TOP_3),
    CallCase(
        "tiles_stick_breaking", LONG, window(9, 3), q_positions=LATER, normalizer=STICK_BREAKING
    ),
    CallCase(
        "tiles_running",
        LONG,
        CAUSAL & ~dilated(5),
        scale=0.2,
        normalizer=running("add", (1, 37, 53), normalizers.Softmax(), row_normalizers.softmax()),
    ),
]

_ROWS = [*SHAPES, *MASKS, *COMBINED, *SCORES, *POSITIONS, *TILES, *DROPOUT, *NORMALIZERS]
CASES: dict[str, CallCase] = {case.name: case for case in _ROWS}
assert len(CASES) == len(_ROWS), "two cases of one name"

ONE_OF_EACH_NORMALIZER = tuple(case.name for case in NORMALIZERS[:12])

SOFTMAX_CASES = {name: case for name, case in CASES.items() if case.normalizer is None}
"""The cases of kernels that compute only the softmax."""
