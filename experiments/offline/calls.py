"""The calls that are compiled: the benchmark's cases, and every mask and score function once.

No array has values here: arrays are shapes and dtypes, and arguments of the program.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

import jattn
from experiments.benchmark import cases
from experiments.offline import peers
from jattn import masks, scores
from jattn.cache import Cache, DenseCache, PagedCache, RollingCache


Shape = tuple[int, ...]
Arrays = Mapping[str, Any]

B, T, N, K = 2, 2048, 8, 2
_BLOCK = 128


def _nothing(arrays: Arrays) -> dict[str, Any]:
    return {}


@dataclasses.dataclass(frozen=True)
class OfflineCall:
    """One call of `jattn.attention`, by default self-attention of grouped heads.

    `operands` are shapes and dtypes of integer and boolean arrays; `parameters` are shapes of float
    arrays in the query's dtype, whose gradients are computed. `rules` turns both into keyword
    arguments, and `cache` turns keys, values and operands into a cache to attend to.
    """

    name: str
    rules: Callable[[Arrays], dict[str, Any]] = _nothing
    operands: Mapping[str, tuple[Shape, str]] = dataclasses.field(default_factory=dict)
    parameters: Mapping[str, Shape] = dataclasses.field(default_factory=dict)
    query: Shape = (B, T, N)
    kv: Shape = (B, T, K)  # of keys and of values
    cache: Callable[[Any, Any, Arrays], Cache] | None = None

    def arrays(self, head: int, dtype: str) -> tuple[Any, ...]:
        """Returns the shapes of query, key, value, parameters, operands and the output's
        gradient."""
        aval = jax.ShapeDtypeStruct
        query, kv = (aval((*shape, head), dtype) for shape in (self.query, self.kv))
        parameters = {name: aval(shape, dtype) for name, shape in self.parameters.items()}
        operands = {name: aval(*described) for name, described in self.operands.items()}
        return query, kv, kv, parameters, operands, query

    @property
    def has_any_length(self) -> bool:
        """Whether the call can have any length: no array of its rules has the tokens' length."""
        return not self.operands and not self.parameters and self.cache is None

    def of_length(self, T: int) -> "OfflineCall":
        """Returns the same call for one batch row of T queries and keys."""
        return dataclasses.replace(self, query=(1, T, self.query[2]), kv=(1, T, self.kv[2]))

    def forward(self, implementation: str | None) -> Callable[..., Any]:
        """Returns a function of `arrays` that computes the output."""
        if implementation in peers.PEERS:
            return peers.attend(implementation, self.name)

        def attend(q: Any, k: Any, v: Any, parameters: Arrays, operands: Arrays, _: Any) -> Any:
            rules = self.rules({**parameters, **operands})
            pair: Any = (k, v) if self.cache is None else (self.cache(k, v, operands),)
            return jattn.attention(q, *pair, implementation=implementation, **rules)

        return attend

    def gradients(self, implementation: str | None) -> Callable[..., Any]:
        """Returns a function of `arrays` that computes the output and all float arrays'
        gradients."""
        attend = self.forward(implementation)

        def output_and_gradients(
            q: Any, k: Any, v: Any, parameters: Arrays, operands: Arrays, d_out: Any
        ) -> Any:
            def of_floats(q: Any, k: Any, v: Any, parameters: Arrays) -> Any:
                return attend(q, k, v, parameters, operands, d_out)

            out, pull = jax.vjp(of_floats, q, k, v, parameters)
            if isinstance(out, tuple):  # with lse
                return out, pull((d_out, jnp.ones_like(out[1])))
            return out, pull(d_out)

        return output_and_gradients


def _of_benchmark(case: cases.BenchmarkCase) -> OfflineCall:
    """Converts a case of the benchmark; a step of decoding attends to arrays, without a cache."""
    parameter = case.parameter()

    def rules(arrays: Arrays) -> dict[str, Any]:
        return {
            "mask": case.mask(arrays.get("ids")),
            "score": case.score(arrays.get("parameter")),
        }

    return OfflineCall(
        case.name,
        rules,
        {"ids": ((case.B, case.T), "int32")} if case.pattern == "documents" else {},
        {} if parameter is None else {"parameter": parameter.shape},
        (case.B, case.T, case.N),
        (case.B, case.S or case.T, case.key_heads),
    )


def _near(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (abs(q - kv) <= 64) | ((q + kv + h) % 7 == 0)


def _after_start(b: Any, h: Any, q: Any, kv: Any, *operands: Any) -> Any:
    (starts,) = operands
    return kv >= starts[b, h]


def _fading(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return score - 0.125 * score * jnp.asarray(kv % 3, score.dtype)


def _gated(score: Any, b: Any, h: Any, q: Any, kv: Any, *operands: Any) -> Any:
    gate, by_key = operands
    return score * gate[h].astype(score.dtype) + by_key[b, kv].astype(score.dtype)


def _capped(score: Any, b: Any, h: Any, q: Any, kv: Any, *operands: Any) -> Any:
    cap, slope = (x[h].astype(score.dtype) for x in operands)
    return cap * jnp.tanh(score / cap) - slope * jnp.abs(q - kv).astype(score.dtype)


def _four(arrays: Arrays) -> scores.ScoreFunction:
    learned = scores.Temperature(arrays["t"]) >> scores.SoftCap(arrays["cap"])
    return learned >> scores.Alibi(arrays["slopes"]) >> scores.Score(_fading)


def _dropout(arrays: Arrays) -> dict[str, Any]:
    key = jax.random.wrap_key_data(arrays["key"], impl="threefry2x32")
    return {"mask": masks.Causal(), "dropout_rate": 0.1, "dropout_key": key}


def _dropout_in_documents(arrays: Arrays) -> dict[str, Any]:
    mask = masks.Causal() & masks.Segments(arrays["ids"])
    return _dropout(arrays) | {"mask": mask, "score": scores.Alibi(arrays["slopes"])}


def _dropout_of_pairs(arrays: Arrays) -> dict[str, Any]:
    return _dropout(arrays) | {"mask": masks.Dense(arrays["pairs"])}


def _dropout_by_positions(arrays: Arrays) -> dict[str, Any]:
    score = {"score": scores.RelativeBias(arrays["table"]), "kv_positions": arrays["positions"]}
    return _dropout(arrays) | {"mask": masks.Full()} | score


def _masked(build: Callable[[Arrays], Any]) -> Callable[[Arrays], dict[str, Any]]:
    return lambda arrays: {"mask": build(arrays)}


def _scored(build: Callable[[Arrays], Any]) -> Callable[[Arrays], dict[str, Any]]:
    return lambda arrays: {"score": build(arrays)}


_IDS = {"ids": ((B, T), "int32")}
_LENGTHS = {"lengths": ((B,), "int32")}
_TOKENS = {"tokens": ((B, T), "bool")}
_STARTS = {"starts": ((B, N), "int32")}
_KEY = {"key": ((2,), "uint32")}
_POSITIONS = {"positions": ((B, T), "int32")}
_CELLS = {"layout": ((T // _BLOCK, T // _BLOCK), "bool")}
_PAIRS = {"pairs": ((B, 1, T, T), "bool")}

MASKS = (
    OfflineCall("full", _masked(lambda a: masks.Full())),
    OfflineCall("causal", _masked(lambda a: masks.Causal())),
    OfflineCall("window", _masked(lambda a: masks.Window(left=256, right=0))),
    OfflineCall("prefix", _masked(lambda a: masks.Causal() | masks.Prefix(a["lengths"])), _LENGTHS),
    OfflineCall("segments", _masked(lambda a: masks.Causal() & masks.Segments(a["ids"])), _IDS),
    OfflineCall("lengths", _masked(lambda a: masks.Lengths(kv=a["lengths"])), _LENGTHS),
    OfflineCall("padding", _masked(lambda a: masks.Padding(a["tokens"])), _TOKENS),
    OfflineCall("dilated", _masked(lambda a: masks.Causal() & masks.Dilated(4))),
    OfflineCall("global", _masked(lambda a: masks.Window(128, 128) | masks.Global(64))),
    OfflineCall("blocks", _masked(lambda a: masks.Blocks(a["layout"], _BLOCK)), _CELLS),
    OfflineCall("dense", _masked(lambda a: masks.Dense(a["pairs"])), _PAIRS),
    OfflineCall("complement", _masked(lambda a: ~masks.Segments(a["ids"]) & masks.Causal()), _IDS),
    OfflineCall("predicate", _masked(lambda a: masks.Predicate(_near))),
    OfflineCall(
        "predicate-operands", _masked(lambda a: masks.Predicate(_after_start, a["starts"])), _STARTS
    ),
    OfflineCall(
        "positions",
        lambda a: {
            "mask": masks.Causal(),
            "q_positions": a["positions"],
            "kv_positions": a["positions"],
        },
        _POSITIONS,
    ),
    OfflineCall(
        "documents-biased",  # with the most arrays that a tile may need
        lambda a: {
            "mask": masks.Causal() & masks.Segments(a["ids"]),
            "score": scores.Bias(a["bias"]) >> scores.Alibi(a["slopes"]),
            "q_positions": a["positions"],
            "kv_positions": a["positions"],
        },
        _IDS | _POSITIONS,
        {"bias": (B, N, T, T), "slopes": (N,)},
    ),
)

_GATES = {"gate": (N,), "by_key": (B, T)}
_CAPS = {"cap": (N,), "slope": (N,)}
SCORES = (
    OfflineCall("soft-cap", _scored(lambda a: scores.SoftCap(30.0))),
    OfflineCall("soft-cap-learned", _scored(lambda a: scores.SoftCap(a["cap"])), {}, {"cap": ()}),
    OfflineCall("temperature", _scored(lambda a: scores.Temperature(a["t"])), {}, {"t": ()}),
    OfflineCall(
        "alibi-learned", _scored(lambda a: scores.Alibi(a["slopes"])), {}, {"slopes": (N,)}
    ),
    OfflineCall(
        "t5-table", _scored(lambda a: scores.RelativeBias(a["table"])), {}, {"table": (32, N)}
    ),
    OfflineCall(
        "t5-positions",
        lambda a: {"score": scores.RelativeBias(a["table"]), "kv_positions": a["positions"]},
        _POSITIONS,
        {"table": (32, N)},
    ),
    OfflineCall("bias", _scored(lambda a: scores.Bias(a["bias"])), {}, {"bias": (B, N, T, T)}),
    OfflineCall(
        "bias-by-head", _scored(lambda a: scores.Bias(a["bias"])), {}, {"bias": (1, N, T, T)}
    ),
    OfflineCall(
        "bias-by-key", _scored(lambda a: scores.Bias(a["bias"])), {}, {"bias": (B, 1, 1, T)}
    ),
    OfflineCall("function", _scored(lambda a: scores.Score(_fading))),
    OfflineCall(
        "function-operands",
        _scored(lambda a: scores.Score(_gated, a["gate"], a["by_key"])),
        {},
        _GATES,
    ),
    OfflineCall(
        "function-capped",
        _scored(lambda a: scores.Score(_capped, a["cap"], a["slope"])),
        {},
        _CAPS,
    ),
    OfflineCall("chain", _scored(_four), {}, {"t": (), "cap": (), "slopes": (N,)}),
    OfflineCall(
        "cap-then-bias",
        _scored(lambda a: scores.SoftCap(30.0) >> scores.Bias(a["bias"])),
        {},
        {"bias": (1, N, T, T)},
    ),
)

OTHERS = (
    OfflineCall("lse", lambda a: {"mask": masks.Causal(), "return_lse": True}),
    OfflineCall("dropout", _dropout, _KEY),
    OfflineCall("dropout-documents", _dropout_in_documents, _KEY | _IDS, {"slopes": (N,)}),
    OfflineCall("dropout-dense", _dropout_of_pairs, _KEY | _PAIRS),
    OfflineCall("dropout-t5", _dropout_by_positions, _KEY | _POSITIONS, {"table": (32, N)}),
    OfflineCall("ungrouped", _masked(lambda a: masks.Causal()), kv=(B, T, N)),
    OfflineCall("ragged", _masked(lambda a: masks.Causal()), query=(B, 1000, N), kv=(B, 1999, K)),
)


def _no_overflow(operands: Arrays) -> Any:
    return jnp.zeros(operands["lengths"].shape, bool)


def _dense(k: Any, v: Any, operands: Arrays) -> Cache:
    return DenseCache(k, v, operands["lengths"], _no_overflow(operands))


def _rolling(k: Any, v: Any, operands: Arrays) -> Cache:
    lengths = operands["lengths"]
    oldest = jnp.maximum(lengths - k.shape[2], 0)
    return RollingCache(k, v, lengths, _no_overflow(operands), oldest, window=1024)


def _paged(k: Any, v: Any, operands: Arrays) -> Cache:
    return PagedCache(k, v, operands["table"], operands["lengths"], _no_overflow(operands))


def _decode(name: str, cache: Callable[..., Cache], kv: Shape, **operands: Any) -> OfflineCall:
    """Builds a step of decoding: one query for each of 32 rows, with 32 heads on 8 key heads."""
    operands["lengths"] = ((32,), "int32")
    mask = _masked(lambda a: masks.Causal())
    return OfflineCall(name, mask, operands, query=(32, 1, 32), kv=kv, cache=cache)


CACHES = (
    _decode("dense-cache", _dense, (32, 8, 4096)),
    _decode("rolling-cache", _rolling, (32, 8, 1088)),
    # up to 4,096 tokens in pages of 16
    _decode("paged-cache", _paged, (32 * 256, 8, 16), table=((32, 256), "int32")),
)

_EVERY = (*MASKS, *SCORES, *OTHERS, *CACHES, *map(_of_benchmark, cases.CASES))
CALLS = {call.name: call for call in _EVERY}
assert len(CALLS) == len(_EVERY), "two cases of one name"
