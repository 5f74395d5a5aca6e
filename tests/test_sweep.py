"""Every public function, with each of its arguments replaced in turn by each of a list of things
that callers hand over by mistake.

What is meant comes back, or an error that names the argument: a TypeError, a ValueError, or a
NotImplementedError. Never an error from further below, and never an answer to another question.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jattn
from jattn import cache, masks, nn, parallel, positions, scores


pytestmark = pytest.mark.usefixtures("unchecked")

B, T, S, N, K, H, V = 2, 3, 5, 4, 2, 6, 7
D, E, A, L = 8, 9, 11, 12  # widths of modules, of memories and of alignments, and a length

BAD: dict[str, Any] = {
    "None": None,
    "text": "yes",
    "object": object(),
    "list": [1],
    "of nine axes": np.ones((1,) * 9, np.float32),
    "integers": np.ones((B, T), np.int32),
    "truths": np.ones((B, T, N, H), bool),
    "complex": np.ones((B, T, N, H), np.complex64),
    "nan": float("nan"),
    "nan array": np.float32("nan"),
    "minus one": -1,
    "2**40": 2**40,
    "10**400": 10**400,
    "True": True,
    "empty": np.ones((0,), np.float32),
}

# What each kind of argument takes of these; it raises for all others.
TAKES: dict[str, set[str]] = {
    "array": set(),
    "array?": {"None"},
    "any array": {"of nine axes", "empty"},
    "any mask": {"None", "truths"},
    "any rows": {"of nine axes"},
    "any real": {"of nine axes", "nan array", "integers", "empty"},
    "ignored": set(BAD),
    "integers": set(),
    "integers?": {"None"},
    "tokens": {"integers"},  # where [B, T] of ones is right
    "size": set(),
    "size?": {"None"},
    "layers": set(),
    "mask": {"None"},
    "score": {"None"},
    "number": {"2**40"},  # any finite one
    "positive": {"2**40"},
    "positive?": {"None", "2**40"},
    "slow": set(),  # less than fast
    "share?": {"None"},
    "tokens to stop at": {"list", "empty"},
    "token": {"minus one"},
    "number?": {"None", "minus one", "2**40"},
    "logit": {"minus one", "2**40"},
    "logit?": {"None", "minus one", "2**40"},
    "rate": set(),
    "key?": {"None"},  # looked at where something is dropped only
    "precision": {"None"},
    "name?": {"None"},
    "name": set(),
    "flag": {"True"},
    "flag?": {"None", "True"},
    "length": {"integers", "minus one", "2**40", "10**400"},
    "length?": {"None", "integers", "minus one", "2**40", "10**400"},
    "distance?": {"None", "2**40", "10**400"},
    "count": {"2**40", "10**400"},
    "step": {"2**40", "10**400"},
    "function": set(),
    "function?": {"None"},
    "dtype": set(),
    "dtype?": {"None"},
    "rngs": set(),
    "rngs?": {"None"},
    "thing": set(),
    "thing?": {"None"},
    "cache": set(),
}


class Call(NamedTuple):
    """A public function, a call of it that is right, and of which kind each argument is."""

    function: Callable[..., Any]
    right: dict[str, Any]
    kinds: dict[str, str]
    names: Any = {}  # noqa: RUF012  what messages call an argument


def array(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    """Numbers of a shape, all different."""
    return np.linspace(-1, 1, max(1, int(np.prod(shape)))).reshape(shape).astype(dtype)


def ints(*shape: int) -> np.ndarray:
    """Ones, which are right as tokens, positions and lengths."""
    return np.ones(shape, np.int32)


def rngs() -> nnx.Rngs:
    """Random numbers for parameters and dropout."""
    return nnx.Rngs(params=0, dropout=1)


FRESH = object()  # in place of random numbers, which each call makes

QUERY, KEY, VALUE = array(B, T, N, H), array(B, S, K, H), array(B, S, K, V)
RULES = {"mask": "mask", "score": "score", "scale": "number?"}
PLACED = {**RULES, "q_positions": "positions?", "kv_positions": "integers?"}
PLACED |= {"precision": "precision"}
DROPPED = {"dropout_rate": "rate", "dropout_key": "key?"}
SUNK = {"sink": "logit?"}
NAMED = {"implementation": "name?", "return_lse": "flag"}
RIGHT = dict.fromkeys([*PLACED, "dropout_key", "implementation"])  # None, as by default
RIGHT |= {"dropout_rate": 0.0, "return_lse": False}
IN_FULL = {"query": "array", "key": "array", "value": "array", **PLACED}
IN_FULL |= {**SUNK, **DROPPED, **NAMED}


def right(kinds: dict[str, str], **given: Any) -> dict[str, Any]:
    """The call that is right: what is given, or else the defaults of `attention`."""
    return {name: given.get(name, RIGHT.get(name)) for name in kinds}


def new_cache() -> cache.DenseCache:
    """A cache with room for all that is appended here."""
    return cache.DenseCache.create(B, L, K, H, V)


NEW = {"key": array(B, T, K, H), "value": array(B, T, K, V)}
SIZES = {"batch": "size", "num_kv_heads": "size", "head_size": "size", "value_size": "size?"}
CREATED = {"batch": B, "num_kv_heads": K, "head_size": H, "value_size": None, "dtype": jnp.float32}

FUNCTIONS: dict[str, Call] = {
    "attention": Call(jattn.attention, right(IN_FULL, query=QUERY, key=KEY, value=VALUE), IN_FULL),
    "explain": Call(
        jattn.explain,
        right(IN_FULL, query=QUERY, key=KEY, value=VALUE)
        | {"implementation": None, "platform": None},
        {**IN_FULL, "value": "array?", "platform": "name?"} | {"implementation": "ignored"},
    ),
    "attention_scores": Call(
        jattn.attention_scores,
        right({"query": "", "key": "", **PLACED}, query=QUERY, key=KEY),
        {"query": "array", "key": "array", **PLACED},
    ),
    "attention_weights": Call(
        jattn.attention_weights,
        right({"query": "", "key": "", **PLACED, **SUNK, **DROPPED}, query=QUERY, key=KEY),
        {"query": "array", "key": "array", **PLACED, **SUNK, **DROPPED},
    ),
    "statistics": Call(
        jattn.statistics,
        right({"query": "", "key": "", **PLACED}, query=QUERY, key=KEY)
        | {"keys": None, "threshold": 0.5},
        {"query": "array", "key": "array", **PLACED, "keys": "array?", "threshold": "share?"},
    ),
    "top_weights": Call(
        jattn.top_weights,
        right({"query": "", "key": "", **PLACED}, query=QUERY, key=KEY) | {"n": 2},
        {"query": "array", "key": "array", **PLACED, "n": "size"},
    ),
    "cached_attention": Call(
        jattn.cached_attention,
        {"query": QUERY, **NEW, "cache": new_cache(), "valid": None, "mask": None, "score": None}
        | {"return_lse": False},
        {"query": "array", "key": "array", "value": "array", "cache": "cache", "valid": "array?"}
        | {"mask": "mask", "score": "score", "return_lse": "flag"},
    ),
    "merge": Call(
        lambda out, lse: jattn.merge((out, lse), (out, lse)),
        {"out": QUERY, "lse": array(B, N, T)},
        {"out": "array", "lse": "array"},
    ),
    "merge_part": Call(
        lambda part: jattn.merge(part, part), {"part": (QUERY, array(B, N, T))}, {"part": "thing"}
    ),
    "with_sink": Call(
        jattn.with_sink,
        {"out": QUERY, "lse": array(B, N, T), "sink": array(N)},
        {"out": "array", "lse": "array", "sink": "logit"},
    ),
    "additive_attention": Call(
        jattn.additive_attention,
        {
            "query": array(B, T, 4),
            "key": array(B, S, E),
            "value": array(B, S, V),
            "w_query": array(4, A),
            "w_key": array(E, A),
            "w_score": array(A),
            "mask": None,
            "score": None,
            "dropout_rate": 0.0,
            "dropout_key": None,
            "return_weights": False,
        },
        dict.fromkeys(("query", "key", "value", "w_query", "w_score"), "array")
        | {"w_key": "array", "mask": "mask", "score": "score", "return_weights": "flag"}
        | DROPPED,
        {"w_key": "key", "w_score": "A]"},  # what does not fit together may be the other's fault
    ),
    "additive_keys": Call(
        jattn.additive_keys,
        {"key": array(B, S, E), "w_key": array(E, A)},
        {"key": "array", "w_key": "array"},
    ),
    "causal_interaction": Call(
        jattn.causal_interaction, {"T": T, "dtype": jnp.float32}, {"T": "size", "dtype": "dtype"}
    ),
    "interaction": Call(
        jattn.interaction,
        {"x": array(B, S, E), "left": array(T, S), "right": array(E, V)},
        {"x": "array", "left": "array?", "right": "array?"},
    ),
    "multiplicative": Call(
        jattn.multiplicative,
        {"query": array(B, T, 4), "weight": array(4, E)},
        {"query": "array", "weight": "array"},
        {"query": "Dq"},
    ),
    "multiplicative_attention": Call(
        jattn.multiplicative_attention,
        {
            "query": array(B, T, 4),
            "key": array(B, S, E),
            "value": array(B, S, V),
            "weight": array(4, E),
            "scale": 1.0,
        },
        dict.fromkeys(("query", "key", "value", "weight"), "array") | {"scale": "number?"},
        dict.fromkeys(("query", "key"), "D"),  # in the shape expected of the weight
    ),
    "normalised_interaction": Call(
        jattn.normalised_interaction,
        {"left": array(B, T, S), "mask": None},
        {"left": "any rows", "mask": "mask"},
    ),
    "renormalised_causal": Call(
        jattn.renormalised_causal, {"weights": array(B, T, S)}, {"weights": "any rows"}
    ),
    "self_attention": Call(
        jattn.self_attention,
        {
            "x": array(B, T, E),
            "w_query": array(E, 4),
            "w_key": array(E, 4),
            "w_value": array(E, V),
            "mask": None,
            "scale": None,
            "dropout_rate": 0.0,
            "dropout_key": None,
        },
        dict.fromkeys(("x", "w_query", "w_key", "w_value"), "array")
        | {"mask": "mask", "scale": "number?", **DROPPED},
    ),
    "simple_self_attention": Call(
        jattn.simple_self_attention,
        {"x": array(B, T, E), "mask": None},
        {"x": "any rows", "mask": "mask"},
    ),
}


def _rule(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return kv <= q


def _bounds(tile: Any) -> Any:
    return tile.columns.lo <= tile.rows.hi, tile.columns.hi <= tile.rows.lo


def _doubled(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return 2 * score


def truths(*shape: int) -> np.ndarray:
    """A boolean array."""
    return np.ones(shape, bool)


GIVEN = {"q_positions": None, "kv_positions": None}
PLACES = dict.fromkeys(GIVEN, "integers?")

FUNCTIONS |= {
    "Window": Call(
        masks.Window, {"left": 1, "right": 2}, {"left": "distance?", "right": "distance?"}
    ),
    "Prefix": Call(masks.Prefix, {"length": 2}, {"length": "length"}),
    "Lengths": Call(masks.Lengths, {"q": 2, "kv": 2}, {"q": "length?", "kv": "length?"}),
    "Dilated": Call(masks.Dilated, {"step": 2}, {"step": "step"}),
    "Global": Call(masks.Global, {"n": 2}, {"n": "count"}),
    "Segments": Call(
        masks.Segments,
        {"q_ids": ints(B, T), "kv_ids": ints(B, S)},
        {"q_ids": "tokens", "kv_ids": "tokens?"},
    ),
    "Padding": Call(
        masks.Padding,
        {"attention_mask": ints(B, S)},
        {"attention_mask": "tokens or truths"},
    ),
    "Dense": Call(
        masks.Dense, {"array": truths(B, N, T, S)}, {"array": "dense"}, {"array": "mask"}
    ),
    "Blocks": Call(
        masks.Blocks,
        {"layout": truths(2, 3), "block": 2},
        {"layout": "dense", "block": "block"},
    ),
    "Predicate": Call(
        lambda fn, operand, bounds: masks.Predicate(fn, operand, bounds=bounds),
        {"fn": lambda b, h, q, kv, x: kv <= q + x, "operand": 1, "bounds": _bounds},
        {"fn": "function", "operand": "operand", "bounds": "function?"},
    ),
    "as_mask": Call(
        masks.as_mask, {"value": truths(B, N, T, S)}, {"value": "any mask"}, {"value": "mask"}
    ),
    "and": Call(
        lambda mask: masks.Causal() & mask, {"mask": masks.Window(left=1)}, {"mask": "any mask"}
    ),
    "or": Call(
        lambda mask: masks.Causal() | mask, {"mask": masks.Window(left=1)}, {"mask": "any mask"}
    ),
    "dense": Call(
        masks.Causal().dense,
        {"T": T, "S": S, "batch": (B,), "heads": N, **GIVEN},
        {"T": "size", "S": "size", "batch": "batch?", "heads": "size?", **PLACES},
    ),
    "tile_map": Call(
        masks.tile_map,
        {"mask": masks.Causal(), "T": T, "S": S, "block_q": 2, "block_kv": 2, **GIVEN}
        | {"b": 0, "h": 0},
        {"mask": "mask", "T": "size", "S": "size", "block_q": "size", "block_kv": "size", **PLACES}
        | {"b": "index", "h": "index"},
    ),
    "check_bounds": Call(
        masks.check_bounds,
        {"mask": masks.Causal(), "T": T, "S": S, "block_q": 2, "block_kv": 2, **GIVEN},
        {"mask": "mask", "T": "size", "S": "size", "block_q": "size", "block_kv": "size", **PLACES},
    ),
    "SoftCap": Call(scores.SoftCap, {"cap": 2.0}, {"cap": "positive"}),
    "Temperature": Call(scores.Temperature, {"t": 2.0}, {"t": "positive"}),
    "alibi_slopes": Call(scores.alibi_slopes, {"num_heads": N}, {"num_heads": "size"}),
    "Alibi": Call(scores.Alibi, {"slopes": array(N)}, {"slopes": "slopes"}),
    "relative_bucket": Call(
        scores.relative_bucket,
        {"distance": ints(T), "buckets": 8, "bidirectional": True, "max_distance": 9},
        {"distance": "tokens", "buckets": "size", "bidirectional": "flag", "max_distance": "size"},
    ),
    "RelativeBias": Call(
        scores.RelativeBias,
        {"table": array(8, N), "bidirectional": True, "max_distance": 9},
        {"table": "array", "bidirectional": "flag", "max_distance": "size"},
        {"table": "RelativeBias", "max_distance": "max_distance"},
    ),
    "Bias": Call(scores.Bias, {"array": array(B, N, T, S)}, {"array": "any array"}),
    "Score": Call(
        lambda operand, fn: scores.Score(fn, operand),
        {"fn": lambda s, b, h, q, kv, x: s + x, "operand": 1.0},
        {"fn": "function", "operand": "operand"},
    ),
    "aligned_to_end": Call(
        positions.aligned_to_end, {"T": T, "S": S}, {"T": "size", "S": "tokens"}
    ),
    "sinusoidal": Call(
        positions.sinusoidal,
        {"positions": ints(B, T), "D": D, "base": 100.0, "dtype": jnp.float32},
        {"positions": "any real", "D": "size", "base": "positive", "dtype": "dtype"},
    ),
    "rotary": Call(
        positions.rotary,
        {"x": QUERY, "positions": ints(B, T), "style": "half", "base": 100.0, "rotary_dim": None}
        | {"scaling": None},
        {"x": "array", "positions": "tokens", "style": "name", "base": "positive"}
        | {"rotary_dim": "size?", "scaling": "thing?"},
    ),
    "axial_rotary": Call(
        positions.axial_rotary,
        {"x": array(B, T, N, 8), "positions": ints(B, T, 2), "style": "half", "base": 100.0},
        {"x": "array", "positions": "array", "style": "name", "base": "positive"},
        {"positions": "rotary"},
    ),
    "Linear": Call(positions.Linear, {"factor": 2.0}, {"factor": "positive"}),
    "NTK": Call(positions.NTK, {"factor": 2.0}, {"factor": "positive"}),
    "Yarn": Call(
        positions.Yarn,
        {"factor": 2.0, "original_length": L, "slow": 1.0, "fast": 4.0, "ramp": "pair"}
        | {"amplitude": None},
        {"factor": "positive", "original_length": "size", "slow": "slow", "fast": "positive"}
        | {"ramp": "name", "amplitude": "positive?"},
    ),
    "learned": Call(
        positions.learned,
        {"table": array(4, D), "positions": ints(B, T)},
        {"table": "array", "positions": "tokens"},
    ),
    "DenseCache.create": Call(
        cache.DenseCache.create,
        {**CREATED, "length": L},
        {**SIZES, "length": "size", "dtype": "dtype"},
    ),
    "RollingCache.create": Call(
        cache.RollingCache.create,
        {**CREATED, "window": 3, "chunk": None},
        {**SIZES, "window": "size", "chunk": "size?", "dtype": "dtype"},
    ),
    "PagedCache.create": Call(
        cache.PagedCache.create,
        {**CREATED, "length": L, "page_size": 4, "num_pages": None},
        {**SIZES, "length": "size", "page_size": "size", "num_pages": "size?", "dtype": "dtype"},
    ),
    "DenseCache.of": Call(
        cache.DenseCache.of,
        {"key": KEY, "value": VALUE, "lengths": ints(B)},
        {"key": "array", "value": "array", "lengths": "integers?"},
    ),
    **{
        f"{kind.__name__}.append": Call(
            kind.create(B, L, K, H, V).append,
            {**NEW, "valid": None},
            {"key": "array", "value": "array", "valid": "array?"},
        )
        for kind in (cache.DenseCache, cache.RollingCache, cache.PagedCache)
    },
    **{
        f"{kind.__name__}.reorder": Call(
            kind.create(B, L, K, H, V).reorder,
            {"indices": np.array([1, 0])},
            {"indices": "integers"},
        )
        for kind in (cache.DenseCache, cache.RollingCache, cache.PagedCache)
    },
    "next_positions": Call(
        new_cache().next_positions, {"T": T, "valid": None}, {"T": "size", "valid": "array?"}
    ),
    "last_positions": Call(new_cache().last_positions, {"T": T}, {"T": "size"}),
}

TAKES |= {
    "tokens?": {"None", "integers"},
    "tokens or truths": {"integers", "truths"},
    "dense": {"truths"},
    "block": {"2**40", "10**400"},
    "operand": set(BAD) - {"text", "object", "10**400"},
    "batch?": {"None", "list"},
    "index": set(),
    "slopes": {"list", "of nine axes", "empty"},
    "any rows": {"of nine axes"},
}

SHARED = IN_FULL
CUT = {"axis_name": "x", "scheme": "ring", "order": "contiguous"}
CUT |= {"batch_axis": None, "head_axis": None}
CUT_KINDS = dict.fromkeys(CUT, "name") | dict.fromkeys(("batch_axis", "head_axis"), "name?")
MESH = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))
PLACED_TOKENS = {"devices": 1, "axis": 0, "order": "zigzag"}
PLACED_KINDS = {"devices": "devices", "axis": "axis", "order": "name"}

SENT_NAMES = ("query", "key", "value", "mask", "score", "q_positions", "kv_positions", "return_lse")
SENT = {name: SHARED[name] for name in SENT_NAMES}
SENT_CUT = {"devices": 1, "scheme": "ring", "order": "contiguous"}

FUNCTIONS |= {
    "parallel.attention": Call(
        parallel.attention,
        {**right(SHARED, query=QUERY, key=KEY, value=VALUE), **CUT, "mesh": MESH, "pad": False},
        {**SHARED, **CUT_KINDS, "mesh": "thing", "pad": "flag"},
        dict.fromkeys(("axis_name", "batch_axis", "head_axis"), "axis"),
    ),
    "parallel.attention_shard": Call(
        lambda **given: jax.shard_map(
            lambda: parallel.attention_shard(**given),
            mesh=MESH,
            in_specs=(),
            out_specs=jax.sharding.PartitionSpec(None, "x"),
        )(),
        {**right(SHARED, query=QUERY, key=KEY, value=VALUE), **CUT},
        {**SHARED, **CUT_KINDS},
    ),
    "parallel.cached_attention": Call(
        parallel.cached_attention,
        {"query": QUERY, **NEW, "cache": new_cache(), "valid": None, "mask": None, "score": None}
        | {"scale": None, "precision": None, "return_lse": False, "mesh": MESH, "axis_name": "x"}
        | {"batch_axis": None, "head_axis": None},
        {"query": "array", "key": "array", "value": "array", "cache": "cache", "valid": "array?"}
        | {name: SHARED[name] for name in ("mask", "score", "scale", "precision", "return_lse")}
        | {"mesh": "thing", "axis_name": "name", "batch_axis": "name?", "head_axis": "name?"},
        dict.fromkeys(("axis_name", "batch_axis", "head_axis"), "axis"),
    ),
    "parallel.exchanges": Call(
        parallel.exchanges,
        {**right(SENT, query=QUERY, key=KEY, value=VALUE), **SENT_CUT},
        {**SENT, "devices": "devices", "scheme": "name", "order": "name"},
    ),
    **{
        f"parallel.{function.__name__}": Call(
            function,
            {"x": array(4, 2), **PLACED_TOKENS},
            {"x": "tree", **PLACED_KINDS},
        )
        for function in (parallel.shard_tokens, parallel.unshard_tokens)
    },
    "parallel.token_positions": Call(
        parallel.token_positions,
        {"T": 8, "devices": 2, "order": "zigzag"},
        {"T": "tokens_of_devices", "devices": "devices", "order": "name"},
    ),
}
TAKES |= {"devices": set(), "tokens_of_devices": set(), "axis": {"minus one"}}
TAKES |= {"tree": {"integers", "truths", "complex", "empty"}}

# --- modules ---------------------------------------------------------------------------------

DTYPES = {"dtype": None, "param_dtype": jnp.float32}
DTYPE_KINDS = {"dtype": "dtype?", "param_dtype": "dtype"}
INIT = nnx.initializers.ones
RUN = {"deterministic": None, "rngs": None}
RUN_KINDS = {"deterministic": "flag?", "rngs": "rngs?"}


def module(function: Callable[..., Any], sizes: Any, others: Any, **kinds: str) -> Call:
    """A module's constructor, with the arguments that most have."""
    return Call(
        function,
        {**sizes, **others, **DTYPES, "rngs": FRESH},
        {**dict.fromkeys(sizes, "size"), **kinds, **DTYPE_KINDS, "rngs": "rngs"},
    )


OPTIONS = {"dropout_rate": 0.1, "norm": "pre", "activation": nnx.relu, "kernel_init": INIT}
OPTIONS |= {"self_attention": nn.MultiHeadAttention, "cross_attention": nn.MultiHeadAttention}
OPTIONS |= {"normalization": "rms", "gated": True, "use_bias": False}
OPTIONS |= {"final_norm": True, "norm_epsilon": 1e-5}
OPTION_KINDS = {"dropout_rate": "rate", "norm": "name", "normalization": "name"}
OPTION_KINDS |= {"gated": "flag", "use_bias": "flag"}
OPTION_KINDS |= {"final_norm": "flag?", "norm_epsilon": "positive"}
OPTION_KINDS |= dict.fromkeys(
    ("activation", "kernel_init", "self_attention", "cross_attention"), "function"
)
LAYER = {"features": D, "num_heads": 2, "feed_forward": 5}
CELL = dict.fromkeys(("kernel_init", "recurrent_init", "bias_init"), INIT)
CELL_KINDS = dict.fromkeys(CELL, "function")
X, MEMORY = array(B, T, D), array(B, S, D)
HEADS = {"num_heads": 2, "in_features": D}
ATTEND = nn.MultiHeadAttention(2, D, rngs=nnx.Rngs(0))
DECODER = nn.Decoder(1, D, 2, 5, dropout_rate=0.0, rngs=nnx.Rngs(0))
MODEL = nn.Transformer(
    9,
    9,
    features=D,
    num_heads=2,
    feed_forward=5,
    encoder_layers=1,
    decoder_layers=1,
    dropout_rate=0.0,
    positions="learned",
    rngs=nnx.Rngs(0),
)
LANGUAGE_MODEL = nn.DecoderOnly(
    9,
    features=D,
    num_heads=2,
    feed_forward=5,
    num_layers=1,
    dropout_rate=0.0,
    positions="learned",
    rngs=nnx.Rngs(0),
)
RECURRENT = nn.RNNsearch(9, 9, features=D, hidden=6, rngs=nnx.Rngs(0))
ADDITIVE = nn.AdditiveAttention(D, E, A, rngs=nnx.Rngs(0))
CALLED = {"mask": None, "positions": None, **RUN}
CALLED_KINDS = {"mask": "mask", "positions": "positions?", **RUN_KINDS}

FUNCTIONS |= {
    "generate": Call(
        jattn.generate,
        {"model": LANGUAGE_MODEL, "prompt": ints(B, T), "max_tokens": 2, "temperature": 0.5}
        | {"top_k": None, "top_p": 0.5, "key": jax.random.key(0), "stop": [2], "pad": 0}
        | {"valid": None, "caches": None, "callback": None},
        {"model": "thing", "prompt": "tokens", "max_tokens": "size", "temperature": "positive"}
        | {"top_k": "size?", "top_p": "share?", "key": "thing", "stop": "tokens to stop at"}
        | {"pad": "token", "valid": "array?", "caches": "thing?", "callback": "thing?"},
        {"max_tokens": "length"},
    ),
    "nn.MultiHeadAttention": module(
        nn.MultiHeadAttention,
        HEADS,
        {"qkv_features": None, "out_features": None, "num_kv_heads": None, "in_kv_features": None}
        | {"dropout_rate": 0.1, "use_bias": True, "precision": None, "kernel_init": INIT}
        | {"bias_init": INIT, "normalize_qk": False, "rotary": False, "mask": None, "score": None}
        | {"implementation": None, "head_dim": None, "value_dim": None, "scale": None}
        | {"sinks": False},
        **dict.fromkeys(
            ("qkv_features", "out_features", "num_kv_heads", "in_kv_features"), "size?"
        ),
        **{"head_dim": "size?", "value_dim": "size?", "scale": "number?", "sinks": "flag"},
        **{"dropout_rate": "rate", "use_bias": "flag", "precision": "precision"},
        **{"kernel_init": "function", "bias_init": "function", "normalize_qk": "flag"},
        **{"rotary": "flag", "mask": "any mask", "score": "score", "implementation": "name?"},
    ),
    "nn.MultiHeadAttention()": Call(
        ATTEND,
        {"inputs_q": X, "inputs_k": MEMORY, "inputs_v": MEMORY, "kv_positions": None, "score": None}
        | {"valid": None, "cache": None, **CALLED},
        {"inputs_q": "array", "inputs_k": "array", "inputs_v": "array?", "score": "score"}
        | {"valid": "thing?", "cache": "thing?", "kv_positions": "integers?", **CALLED_KINDS},
        {"inputs_k": "inputs_k", "positions": "positions"},
    ),
    "nn.MultiHeadAttention.empty_cache": Call(
        ATTEND.empty_cache,
        {"batch": B, "length": L, "kind": cache.DenseCache, "dtype": None},
        {"batch": "size", "length": "size", "kind": "thing", "dtype": "dtype?"},
    ),
    "nn.MultiHeadAttention.project_memory": Call(
        ATTEND.project_memory,
        {"inputs_k": MEMORY, "lengths": ints(B), "positions": None},
        {"inputs_k": "array", "lengths": "integers?", "positions": "ignored"},
    ),
    "nn.MultiHeadAttention.attend_memory": Call(
        ATTEND.attend_memory,
        {
            "inputs_q": X,
            "memory": ATTEND.project_memory(jnp.asarray(MEMORY)),
            "score": None,
            **CALLED,
        },
        {"inputs_q": "array", "memory": "cache", "score": "score", **CALLED_KINDS},
    ),
    "nn.AdditiveAttention": module(
        nn.AdditiveAttention,
        {"query_features": D, "key_features": E, "alignment_features": A},
        {"kernel_init": INIT},
        kernel_init="function",
    ),
    "nn.AdditiveAttention()": Call(
        ADDITIVE,
        {"query": X, "key": array(B, S, E), "value": None, "mask": None},
        {"query": "array", "key": "array", "value": "array?", "mask": "mask"},
    ),
    "nn.SingleHeads": Call(nn.SingleHeads, {"packed": ATTEND}, {"packed": "thing"}),
    "nn.LearnedScore": Call(
        nn.LearnedScore, {"score": scores.Bias(array(1, N, 1, S))}, {"score": "thing"}
    ),
    "nn.capture_weights": Call(
        lambda model: nn.capture_weights(model, jnp.asarray(X)),
        {"model": ATTEND},
        {"model": "thing"},
    ),
    "nn.Dropout": Call(
        nn.Dropout,
        {"rate": 0.5, "rngs": FRESH},
        {"rate": "rate", "rngs": "rngs"},
        {"rate": "dropout_rate"},
    ),
    "nn.Dropout()": Call(
        nn.Dropout(0.5, rngs=nnx.Rngs(params=0)),
        {"inputs": X, "deterministic": None, "rngs": FRESH},
        {"inputs": "any array", "deterministic": "flag?", "rngs": "rngs"},
    ),
    "nn.LayerNorm": Call(
        nn.LayerNorm,
        {"num_features": D, "rngs": FRESH},
        {"num_features": "size", "rngs": "rngs"},
    ),
    "nn.RMSNorm": Call(
        nn.RMSNorm, {"num_features": D, "rngs": FRESH}, {"num_features": "size", "rngs": "rngs"}
    ),
    "nn.Rotary()": Call(
        nn.Rotary(),
        {"x": QUERY, "positions": ints(B, T)},
        {"x": "array", "positions": "tokens"},
    ),
    "nn.AxialRotary": Call(nn.AxialRotary, {"width": 3}, {"width": "size"}),
    "nn.AxialRotary()": Call(
        nn.AxialRotary(3),
        {"x": array(B, T, N, 8), "positions": ints(B, T)},
        {"x": "array", "positions": "tokens"},
    ),
    "nn.TokenEmbedding": module(
        nn.TokenEmbedding,
        {"vocabulary": 9, "features": D},
        {"embedding_init": INIT, "scale_embeddings": False},
        embedding_init="function",
        scale_embeddings="flag",
    ),
    "nn.TokenEmbedding()": Call(
        nn.TokenEmbedding(9, D, rngs=nnx.Rngs(0)), {"ids": ints(B, T)}, {"ids": "tokens"}
    ),
    "nn.TokenEmbedding.attend": Call(
        nn.TokenEmbedding(9, D, rngs=nnx.Rngs(0)).attend, {"x": X}, {"x": "array"}
    ),
    "nn.OutputProjection": module(
        nn.OutputProjection,
        {"features": D, "vocabulary": 9},
        {"use_bias": True, "kernel_init": INIT},
        use_bias="flag",
        kernel_init="function",
    ),
    "nn.OutputProjection()": Call(
        nn.OutputProjection(D, 9, rngs=nnx.Rngs(0)), {"x": X}, {"x": "array"}
    ),
    "nn.LearnedPositions": module(
        nn.LearnedPositions,
        {"max_length": L, "features": D},
        {"embedding_init": INIT},
        embedding_init="function",
    ),
    "nn.LearnedPositions()": Call(
        nn.LearnedPositions(L, D, rngs=nnx.Rngs(0)),
        {"positions": ints(B, T)},
        {"positions": "tokens"},
    ),
    "nn.SinusoidalPositions": Call(
        nn.SinusoidalPositions,
        {"features": D, "base": 10.0, "dtype": jnp.float32},
        {"features": "size", "base": "positive", "dtype": "dtype"},
    ),
    "nn.SinusoidalPositions()": Call(
        nn.SinusoidalPositions(D), {"positions": ints(B, T)}, {"positions": "any real"}
    ),
    "nn.FeedForward": module(
        nn.FeedForward,
        {"features": D, "hidden": 5},
        {"activation": nnx.relu, "gated": False, "use_bias": True}
        | {"dropout_rate": 0.1, "kernel_init": INIT},
        activation="function",
        gated="flag",
        use_bias="flag",
        dropout_rate="rate",
        kernel_init="function",
    ),
    "nn.FeedForward()": Call(
        nn.FeedForward(D, 5, rngs=nnx.Rngs(0)), {"x": X, **RUN}, {"x": "array", **RUN_KINDS}
    ),
    **{
        f"nn.{layer.__name__}": module(layer, LAYER, OPTIONS, **OPTION_KINDS)
        for layer in (nn.EncoderLayer, nn.DecoderLayer, nn.DecoderOnlyLayer)
    },
    **{
        f"nn.{stack.__name__}": module(
            stack, LAYER, {"num_layers": 1, **OPTIONS}, num_layers="layers", **OPTION_KINDS
        )
        for stack in (nn.Encoder, nn.Decoder)
    },
    "nn.Encoder()": Call(
        nn.Encoder(1, D, 2, 5, dropout_rate=0.0, rngs=nnx.Rngs(0)),
        {"x": X, **CALLED},
        {"x": "array", **CALLED_KINDS},
    ),
    "nn.Decoder()": Call(
        DECODER,
        {"x": X, "memory": MEMORY, "cross_mask": None, "memory_positions": None, **CALLED},
        {"x": "array", "memory": "array", "cross_mask": "mask", **CALLED_KINDS}
        | {"memory_positions": "integers?"},
        {"cross_mask": "mask", "memory_positions": "positions"},
    ),
    "nn.Transformer": module(
        nn.Transformer,
        {"source_vocabulary": 9, "target_vocabulary": 9, "max_length": L, **LAYER},
        {"encoder_layers": 1, "decoder_layers": 1, "positions": "learned", "tie_embeddings": False}
        | {"embedding_init": INIT, **OPTIONS},
        encoder_layers="layers",
        decoder_layers="layers",
        positions="name?",
        tie_embeddings="flag",
        embedding_init="function",
        **OPTION_KINDS,
    ),
    "nn.Transformer()": Call(
        MODEL,
        {"source_ids": ints(B, S), "target_ids": ints(B, T), "source_mask": None}
        | {"target_mask": None, "cross_mask": None, "source_positions": None}
        | {"target_positions": None, **RUN},
        {"source_ids": "tokens", "target_ids": "tokens", "source_mask": "mask"}
        | {"target_mask": "mask", "cross_mask": "mask", "source_positions": "integers?"}
        | {"target_positions": "positions?", **RUN_KINDS},
        dict.fromkeys(("source_ids", "target_ids"), "ids")
        | dict.fromkeys(("source_mask", "target_mask", "cross_mask"), "mask")
        | dict.fromkeys(("source_positions", "target_positions"), "positions"),
    ),
    "nn.DecoderOnly": module(
        nn.DecoderOnly,
        {"vocabulary": 9, "max_length": L, "num_layers": 1, **LAYER},
        {"num_kv_heads": None, "head_dim": None, "positions": "learned", "tie_embeddings": False}
        | {"scale_embeddings": False, "embedding_init": INIT, **OPTIONS},
        num_kv_heads="size?",
        head_dim="size?",
        positions="name?",
        tie_embeddings="flag",
        scale_embeddings="flag",
        embedding_init="function",
        **OPTION_KINDS,
    ),
    "nn.DecoderOnly()": Call(
        LANGUAGE_MODEL,
        {"tokens": ints(B, T), **CALLED},
        {"tokens": "tokens", **CALLED_KINDS},
        {"tokens": "ids"},
    ),
    "nn.DecoderOnly.start": Call(
        LANGUAGE_MODEL.start,
        {"batch": B, "length": L, "kind": cache.DenseCache, "dtype": None},
        {"batch": "size", "length": "size", "kind": "thing", "dtype": "dtype?"},
    ),
    "nn.DecoderOnly.step": Call(
        LANGUAGE_MODEL.step,
        {"tokens": ints(B, T), "caches": LANGUAGE_MODEL.start(B, L), "mask": None, "valid": None}
        | RUN,
        {"tokens": "tokens", "caches": "thing", "mask": "mask", "valid": "array?", **RUN_KINDS},
        {"tokens": "T"},
    ),
    "nn.GRU": module(nn.GRU, {"in_features": D, "features": 6}, CELL, **CELL_KINDS),
    "nn.GRU()": Call(
        nn.GRU(D, 6, rngs=nnx.Rngs(0)),
        {"x": X, "lengths": ints(B), "reverse": False},
        {"x": "array", "lengths": "integers?", "reverse": "flag"},
    ),
    "nn.RecurrentEncoder": module(
        nn.RecurrentEncoder, {"in_features": D, "features": 6}, CELL, **CELL_KINDS
    ),
    "nn.RecurrentEncoder()": Call(
        nn.RecurrentEncoder(D, 6, rngs=nnx.Rngs(0)),
        {"x": X, "lengths": ints(B)},
        {"x": "array", "lengths": "integers?"},
    ),
    "nn.Maxout": module(
        nn.Maxout,
        {"state_features": 6, "token_features": D, "context_features": E, "features": 5},
        CELL,
        **CELL_KINDS,
    ),
    "nn.Maxout()": Call(
        nn.Maxout(6, D, E, 5, rngs=nnx.Rngs(0)),
        {"state": array(B, T, 6), "token": X, "context": array(B, T, E)},
        {"state": "array", "token": "array", "context": "array"},
    ),
    "nn.RecurrentDecoder": module(
        nn.RecurrentDecoder,
        {"in_features": D, "features": 6, "memory_features": E, "alignment_features": A}
        | {"out_features": 5},
        CELL,
        **CELL_KINDS,
    ),
    "nn.RecurrentDecoder()": Call(
        nn.RecurrentDecoder(D, 6, E, A, 5, rngs=nnx.Rngs(0)),
        {"x": X, "memory": array(B, S, E), "memory_lengths": ints(B)},
        {"x": "array", "memory": "array", "memory_lengths": "integers?"},
    ),
    "nn.RNNsearch": module(
        nn.RNNsearch,
        {"source_vocabulary": 9, "target_vocabulary": 9, "features": D, "hidden": 6},
        {"alignment_features": None, "maxout_features": None, "dropout_rate": 0.1}
        | {"embedding_init": INIT, **CELL},
        alignment_features="size?",
        maxout_features="size?",
        dropout_rate="rate",
        embedding_init="function",
        **CELL_KINDS,
    ),
    "nn.RNNsearch()": Call(
        RECURRENT,
        {"source_ids": ints(B, S), "target_ids": ints(B, T), "source_lengths": ints(B), **RUN},
        {"source_ids": "tokens", "target_ids": "tokens", "source_lengths": "integers?"} | RUN_KINDS,
        dict.fromkeys(("source_ids", "target_ids"), "ids"),
    ),
}
TAKES |= {"positions?": {"None", "integers"}}

ARGUMENTS = [(name, argument) for name, call in FUNCTIONS.items() for argument in call.kinds]


@pytest.mark.one_in(8)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_each_call_is_right_as_it_stands(name):
    call = FUNCTIONS[name]
    called(call)
    assert set(call.kinds) <= set(call.right) | set(call.names)


@pytest.mark.one_in(8)
@pytest.mark.parametrize(("name", "argument"), ARGUMENTS)
def test_what_is_no_argument_raises_and_is_named(name, argument):
    call = FUNCTIONS[name]
    named = call.names.get(argument, argument)
    wrong = []
    for label, bad in BAD.items():
        try:
            jax.eval_shape(lambda bad=bad: _nothing(called(call, **{argument: bad})))
            outcome = "taken"
        except (TypeError, ValueError, NotImplementedError) as error:
            is_named = argument in str(error) or str(named) in str(error)
            outcome = "refused" if is_named else f"does not name {named}: {error}"
        except Exception as error:
            outcome = f"{type(error).__name__}: {error}"
        if outcome != ("taken" if label in TAKES[call.kinds[argument]] else "refused"):
            wrong.append((label, outcome[:200]))
    assert not wrong


def called(call: Call, **changes: Any) -> Any:
    """The call with some arguments changed, and random numbers of its own."""
    arguments = {**call.right, **changes}
    return call.function(
        **{name: rngs() if value is FRESH else value for name, value in arguments.items()}
    )


def _nothing(_: Any) -> None:
    """So that results of any kind may leave."""


def test_every_public_function_is_swept():
    public = set()
    rooms = (("", jattn), ("nn.", nn), ("parallel.", parallel))
    for prefix, room in (*rooms, ("", masks), ("", scores), ("", positions)):
        public |= {prefix + name for name in room.__all__ if callable(getattr(room, name))}
    swept = {name.split(".create")[0].split("()")[0] for name in FUNCTIONS}
    assert public - swept - NOT_SWEPT == set()


# Bases, and types that users only read.
NOT_SWEPT = {"Mask", "Span", "Extent", "Tile", "Full", "Empty", "Causal", "And", "Or", "Not"}
NOT_SWEPT |= {"Then", "ScoreFunction", "nn.AttentionWeights", "nn.LayerCache", "nn.LayerOptions"}
NOT_SWEPT |= {
    "nn.DecoderOnlyOptions",
    "nn.RecurrentOptions",
    "nn.RecurrentState",
    "nn.Residual",
    "nn.WeightsTap",
    "parallel.Exchange",
}
