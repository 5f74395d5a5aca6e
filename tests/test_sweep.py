"""Each argument of every public function replaced by wrong values: an error names it."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jattn
from jattn import cache, masks, nn, normalizers, parallel, positions, scores


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

# The values that each kind of argument accepts; it raises for all others. The first accept nothing.
NOTHING = "array integers size layers rate name function dtype rngs thing cache index devices slow"
NONE = "array? integers? size? mask score normalizer share? precision name? function? dtype?"
NONE += " rngs? thing?"
TAKES: dict[str, set[str]] = {
    **{kind: set() for kind in (*NOTHING.split(), "tokens_of_devices")},
    **{kind: {"None"} for kind in NONE.split()},
    **{kind: {"None", "integers"} for kind in ("tokens?", "positions?")},
    "any array": {"of nine axes", "empty"},
    "any mask": {"None", "truths"},
    "any rows": {"of nine axes"},
    "any real": {"of nine axes", "nan array", "integers", "empty"},
    "ignored": set(BAD),
    "tokens": {"integers"},  # where [B, T] of ones is right
    "number": {"2**40"},  # any finite one
    "positive": {"2**40"},
    "positive?": {"None", "2**40"},
    "tokens to stop at": {"list", "integers", "empty"},
    "token": {"minus one"},
    "number?": {"None", "minus one", "2**40"},
    "logit": {"minus one", "2**40"},
    "logit?": {"None", "minus one", "2**40"},
    "key?": {"None"},  # looked at where something is dropped only
    "flag": {"True"},
    "flag?": {"None", "True"},
    "length": {"integers", "minus one", "2**40", "10**400"},
    "length?": {"None", "integers", "minus one", "2**40", "10**400"},
    "distance?": {"None", "2**40", "10**400"},
    "count": {"2**40", "10**400"},
    "counts": {"integers", "2**40", "10**400"},
    "step": {"2**40", "10**400"},
    "tokens or truths": {"integers", "truths"},
    "only none": {"None"},
    "dense": {"truths"},
    "block": {"2**40", "10**400"},
    "operand": set(BAD) - {"text", "object", "10**400"},
    "batch?": {"None", "list"},
    "slopes": {"list", "of nine axes", "empty"},
    "axis": {"minus one"},
    "tree": {"integers", "truths", "complex", "empty"},
}


class Argument(NamedTuple):
    """The kind of an argument, and a right value for it."""

    kind: str
    right: Any


class Later(NamedTuple):
    """A value that a test makes, rather than the import of this file."""

    make: Callable[[], Any]


class SweptCall(NamedTuple):
    """A public function with right arguments, by name.

    Attributes:
        instance: what the function is a method of, if it is one.
        kinds: the kind of each argument.
        names: what messages call an argument, where that is not its name.
    """

    function: Callable[..., Any]
    instance: Later | None
    right: dict[str, Any]
    kinds: dict[str, str]
    names: dict[str, str]

    def made(self) -> "SweptCall":
        """The same call, with everything made that is made later."""
        right = {k: x.make() if isinstance(x, Later) else x for k, x in self.right.items()}
        instances = () if self.instance is None else (self.instance.make(),)
        function = functools.partial(self.function, *instances)
        return self._replace(function=function, instance=None, right=right)


def array(*shape: int) -> np.ndarray:
    return np.linspace(-1, 1, max(1, int(np.prod(shape)))).reshape(shape).astype(np.float32)


def ints(*shape: int) -> np.ndarray:
    """Ones, which are right as tokens, positions and lengths."""
    return np.ones(shape, np.int32)


def new(kind: Any) -> Callable[[], cache.Cache]:
    """Makes a cache with room for the tokens that are appended in this file."""
    return lambda: kind.create(B, L, K, H, V)


def names_in_signature(function: Callable[..., Any]) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    return [x.name for x in parameters if x.kind not in (x.VAR_POSITIONAL, x.VAR_KEYWORD)]


def call(function: Any, arguments: str = "", /, *, named: Any = None, **changes: Any) -> SweptCall:
    """A row for some arguments or the whole signature, by `ARGUMENTS` except for the changes."""
    right, kinds = {}, {}
    for name in arguments.split() or names_in_signature(function):
        change = changes.pop(name, ARGUMENTS.get(name))
        if not isinstance(change, Argument):
            change = Argument(ARGUMENTS[name].kind, change)
        kinds[name], right[name] = change
    assert not changes
    return SweptCall(function, None, right, kinds, named or {})


def method(function: Callable[..., Any], make: Callable[[], Any], **changes: Any) -> SweptCall:
    """A row for a method of the instance that `make` makes."""
    _, *names = names_in_signature(function)
    return call(function, " ".join(names), **changes)._replace(instance=Later(make))


def layer(kind: Any, *sizes: Any, made: Any = None, **changes: Any) -> SweptCall:
    """A row for the call of a layer of these sizes, which is made with other arguments too."""
    arguments = {"rngs": nnx.Rngs(0)} if made is None else made
    return method(kind.__call__, lambda: kind(*sizes, **arguments), **changes)


FRESH = object()  # in place of random numbers, which each call makes
MESH = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))
INIT = nnx.initializers.ones
X, MEMORY = array(B, T, D), array(B, S, D)
TOKENS = Argument("tokens", ints(B, T))
SIZE_OR_NONE, DTYPE_OR_NONE = Argument("size?", None), Argument("dtype?", None)
NO_POSITIONS, THING_OR_NONE = Argument("integers?", None), Argument("thing?", None)
RNGS, RANDOM_KEY = Argument("rngs", FRESH), Argument("thing", jax.random.key(0))

ARGUMENTS = {
    name: Argument(kind, right)
    for kind, names in {
        "array": {
            "query": array(B, T, N, H),
            "key": array(B, S, K, H),
            "value": array(B, S, K, V),
            "out": array(B, T, N, H),
            "lse": array(B, N, T),
            "x": X,
            "memory": MEMORY,
            "inputs_q": X,
            "inputs_k": MEMORY,
            "w_query": array(E, 4),
            "w_key": array(E, A),
            "w_value": array(E, V),
            "w_score": array(A),
            "weight": array(4, E),
            "table": array(8, N),
            "state": array(B, T, 6),
            "token": X,
            "context": array(B, T, E),
            "gates": array(B, T, N, 3),
        }
        | dict.fromkeys(("mix_logits", "mix_weights"), array(N, N)),
        "array?": {"keys": None, "valid": None, "inputs_v": MEMORY},
        "mask": dict.fromkeys(("mask", "source_mask", "target_mask", "cross_mask")),
        "score": {"score": None},
        "normalizer": {"normalizer": None},
        "number?": {"scale": None},
        "positions?": dict.fromkeys(("q_positions", "positions", "target_positions")),
        "integers?": dict.fromkeys(("kv_positions", "source_positions", "memory_positions"))
        | dict.fromkeys(("lengths", "source_lengths", "memory_lengths"), ints(B)),
        "precision": {"precision": None},
        "logit?": {"sink": None},
        "rate": {"dropout_rate": 0.0, "rate": 0.5},
        "key?": {"dropout_key": None},
        "share?": {"threshold": 0.5, "top_p": 0.5},
        "name": {"axis_name": "x", "scheme": "ring", "order": "contiguous", "style": "half"}
        | {"ramp": "pair", "norm": "pre", "normalization": "rms"},
        "name?": dict.fromkeys(("implementation", "platform", "batch_axis", "head_axis")),
        "flag": {"return_lse": False, "return_weights": False, "pad": False, "reverse": False}
        | {"bidirectional": True, "normalize_qk": False, "rotary": False, "sinks": False}
        | {"truncate": True, "gated": True, "use_bias": False}
        | {"tie_embeddings": False, "scale_embeddings": False, "causal": False}
        | {"normalize": True, "return_state": False},
        "flag?": {"deterministic": None, "final_norm": True, "logits_bias": False},
        "rngs?": {"rngs": None},
        "dtype": {"dtype": jnp.float32, "param_dtype": jnp.float32},
        "positive": {"base": 100.0, "factor": 2.0, "fast": 4.0, "cap": 2.0, "t": 2.0}
        | {"temperature": 0.5, "norm_epsilon": 1e-5, "repetition_penalty": 1.0},
        "positive?": {"amplitude": None, "logit_cap": None},
        "slow": {"slow": 1.0},
        "function": {"activation": nnx.relu}
        | dict.fromkeys(("kernel_init", "bias_init", "recurrent_init", "embedding_init"), INIT)
        | dict.fromkeys(("self_attention", "cross_attention"), nn.MultiHeadAttention),
        "layers": dict.fromkeys(("num_layers", "encoder_layers", "decoder_layers"), 1),
        "cache": {"cache": Later(new(cache.DenseCache))},
        "integers": {"indices": np.array([1, 0])},
        "thing": {"mesh": MESH, "kind": cache.DenseCache, "processors": ()},
        "thing?": dict.fromkeys(("scaling", "segments", "compressed", "caches", "callback")),
        "block": {"block": 2},
        "token": {"length_penalty": 0.6},
        "operand": {"operand": 1},
        "devices": {"devices": 1},
        "axis": {"axis": 0},
        "index": {"b": 0, "h": 0},
        "tokens": {"ids": ints(B, T), "tokens": ints(B, T)}
        | {"source_ids": ints(B, S), "target_ids": ints(B, T)},
        "size": {"T": T, "S": S, "D": D, "n": 2, "block_q": 2, "block_kv": 2, "batch": B}
        | {"num_kv_heads": K, "head_size": H, "length": L, "page_size": 4, "window": 3}
        | {"original_length": L, "max_distance": 9, "buckets": 8, "max_tokens": 2, "width": 3}
        | dict.fromkeys(("features", "num_features", "in_features", "query_features"), D)
        | {"token_features": D, "key_features": E, "context_features": E, "memory_features": E}
        | {"alignment_features": A, "state_features": 6, "num_heads": 2, "feed_forward": 5}
        | {"hidden": 5, "max_length": L, "count": 2, "latent_size": V, "rotary_size": 2}
        | {"min_tokens": 0, "samples": 1, "beams": 1}
        | dict.fromkeys(("vocabulary", "source_vocabulary", "target_vocabulary"), 9),
        "size?": dict.fromkeys(("value_size", "chunk", "num_pages", "rotary_dim", "heads"))
        | dict.fromkeys(("head_dim", "value_dim", "qkv_features", "out_features"))
        | dict.fromkeys(("in_kv_features", "maxout_features", "top_k", "prefill_chunk"))
        | dict.fromkeys(("kv_rank", "query_rank")),
    }.items()
    for name, right in names.items()
}

APPENDED = {"key": array(B, T, K, H), "value": array(B, T, K, V)}
WIDTHS = {"query": array(B, T, 4), "key": array(B, S, E), "value": array(B, S, V)}
CACHES = (cache.DenseCache, cache.RollingCache, cache.PagedCache)
AXES = dict.fromkeys(("axis_name", "batch_axis", "head_axis"), "axis")
TRUTHS, PART = np.ones((B, N, T, S), bool), Argument("thing", (array(B, T, N, H), array(B, N, T)))
ROWS = Argument("any rows", array(B, T, S))
IGNORED, ANY_MASK = Argument("ignored", None), Argument("any mask", None)


FUNCTIONS: dict[str, SweptCall] = {
    **{
        function.__name__: call(function)
        for function in (
            *(jattn.attention, jattn.attention_scores, jattn.attention_weights),
            *(jattn.statistics, jattn.top_weights, jattn.causal_interaction),
            *(scores.SoftCap, scores.Temperature, scores.alibi_slopes),
            *(positions.Linear, positions.NTK, positions.Yarn),
        )
    },
    "explain": call(jattn.explain, implementation=IGNORED),
    "cached_attention": call(
        jattn.cached_attention, "query key value cache valid mask score return_lse", **APPENDED
    ),
    "merge": call(lambda out, lse: jattn.merge((out, lse), (out, lse))),
    "merge_part": call(lambda part: jattn.merge(part, part), part=PART),
    "with_sink": call(jattn.with_sink, sink=Argument("logit", array(N))),
    "additive_attention": call(
        jattn.additive_attention,
        named={"w_key": "key", "w_score": "A]"},  # what does not fit may be the other's fault
        w_query=array(4, A),
        **WIDTHS,
    ),
    "additive_keys": call(jattn.additive_keys, key=array(B, S, E)),
    "interaction": call(
        jattn.interaction,
        x=array(B, S, E),
        left=Argument("array?", array(T, S)),
        right=Argument("array?", array(E, V)),
    ),
    "multiplicative": call(jattn.multiplicative, named={"query": "Dq"}, query=array(B, T, 4)),
    "multiplicative_attention": call(
        jattn.multiplicative_attention,
        "query key value weight scale",
        named={"query": "D", "key": "D"},  # in the shape expected of the weight
        **WIDTHS,
    ),
    "normalised_interaction": call(jattn.normalised_interaction, left=ROWS),
    "native_sparse_attention": call(
        jattn.native_sparse_attention,
        "query key value gates block count window compressed scale precision implementation",
        named={"query": "key"},
    ),
    "chosen_blocks": call(jattn.chosen_blocks, named={"query": "key"}, q_positions=NO_POSITIONS),
    "linear_attention": call(
        jattn.linear_attention,
        "query key value causal normalize segments valid return_state",
        named={"query": "key"},
        causal=Argument("thing", False),  # the sizes T and S differ
    ),
    "LinearState.create": call(
        jattn.LinearState.create,
        "num_kv_heads num_features value_size",
        value_size=Argument("size", V),
    ),
    "RandomFeatures.create": call(
        jattn.RandomFeatures.create, "key num_features head_size", key=RANDOM_KEY
    ),
    "renormalised_causal": call(jattn.renormalised_causal, weights=ROWS),
    "talking_heads_attention": call(
        jattn.talking_heads_attention,
        "query key value mix_logits mix_weights mask score scale precision",
    ),
    "self_attention": call(
        jattn.self_attention,
        "x w_query w_key w_value mask scale dropout_rate dropout_key",
        x=array(B, T, E),
        w_key=array(E, 4),
    ),
    "simple_self_attention": call(jattn.simple_self_attention, x=Argument("any rows", MEMORY)),
    "Window": call(masks.Window, left=Argument("distance?", 1), right=Argument("distance?", 2)),
    "Prefix": call(masks.Prefix, length=Argument("length", 2)),
    "Lengths": call(masks.Lengths, q=Argument("length?", 2), kv=Argument("length?", 2)),
    "Tree": call(masks.Tree, parents=Argument("integers", -ints(T)), start=Argument("counts", 2)),
    "Dilated": call(masks.Dilated, step=Argument("step", 2)),
    "Global": call(masks.Global, n=Argument("count", 2)),
    "Segments": call(masks.Segments, q_ids=TOKENS, kv_ids=Argument("tokens?", ints(B, S))),
    "Padding": call(masks.Padding, attention_mask=Argument("tokens or truths", ints(B, S))),
    "Dense": call(masks.Dense, named={"array": "mask"}, array=Argument("dense", TRUTHS)),
    "Blocks": call(masks.Blocks, layout=Argument("dense", np.ones((2, 3), bool))),
    "Predicate": call(
        lambda fn, operand, bounds: masks.Predicate(fn, operand, bounds=bounds),
        named={"fn": "mask"},
        fn=Argument("function", lambda b, h, q, kv, x: kv <= q + x),
        bounds=Argument("function?", lambda t: (t.columns.lo <= t.rows.hi, np.bool_(False))),
    ),
    "as_mask": call(masks.as_mask, named={"value": "mask"}, value=Argument("any mask", TRUTHS)),
    "and": call(lambda mask: masks.Causal() & mask, mask=Argument("any mask", masks.Window(1))),
    "or": call(lambda mask: masks.Causal() | mask, mask=Argument("any mask", masks.Window(left=1))),
    "dense": call(
        masks.Causal().dense,
        "T S batch heads q_positions kv_positions",
        batch=Argument("batch?", (B,)),
        heads=N,
        q_positions=NO_POSITIONS,
    ),
    **{
        function.__name__: call(
            function,
            f"mask T S block_q block_kv q_positions kv_positions{heads}",
            mask=masks.Causal(),
            q_positions=NO_POSITIONS,
        )
        for function, heads in ((masks.tile_map, " b h"), (masks.check_bounds, ""))
    },
    "Alibi": call(scores.Alibi, slopes=Argument("slopes", array(N))),
    "relative_bucket": call(scores.relative_bucket, distance=Argument("tokens", ints(T))),
    "RelativeBias": call(scores.RelativeBias, named={"table": "RelativeBias"}),
    "Bias": call(scores.Bias, array=Argument("any array", array(B, N, T, S))),
    "Score": call(
        lambda operand, fn: scores.Score(fn, operand),
        named={"fn": "score"},
        fn=Argument("function", lambda s, b, h, q, kv, x: s + x),
        operand=1.0,
    ),
    "aligned_to_end": call(positions.aligned_to_end, S=Argument("tokens", S)),
    "sinusoidal": call(positions.sinusoidal, positions=Argument("any real", ints(B, T))),
    "rotary": call(positions.rotary, x=array(B, T, N, H), positions=TOKENS),
    "axial_rotary": call(
        positions.axial_rotary,
        named={"positions": "coordinates"},
        x=array(B, T, N, 8),
        positions=Argument("array", ints(B, T, 2)),
    ),
    "learned": call(positions.learned, table=array(4, D), positions=TOKENS),
    **{
        f"{kind.__name__}.create": call(
            kind.create, positions=Argument("flag" if kind.slots_in_order else "thing", False)
        )
        for kind in CACHES
    },
    "DenseCache.of": call(cache.DenseCache.of, positions=NO_POSITIONS, dtype=DTYPE_OR_NONE),
    "LatentCache.create": call(cache.LatentCache.create),
    "LatentCache.append": method(
        cache.LatentCache.append,
        lambda: cache.LatentCache.create(B, L, H, 2),
        key=array(B, T, 1, H + 2),
        value=Argument("only none", None),
        positions=NO_POSITIONS,
    ),
    **{
        f"{kind.__name__}.append": method(
            kind.append, new(kind), positions=NO_POSITIONS, **APPENDED
        )
        for kind in CACHES
    },
    **{f"{kind.__name__}.reorder": method(kind.reorder, new(kind)) for kind in CACHES},
    "next_positions": method(
        cache.DenseCache.next_positions, new(cache.DenseCache), positions=NO_POSITIONS
    ),
    "last_positions": method(cache.DenseCache.last_positions, new(cache.DenseCache)),
    "parallel.attention": call(parallel.attention, named=AXES),
    "parallel.attention_shard": call(
        lambda **arguments: jax.shard_map(
            lambda: parallel.attention_shard(**arguments),
            mesh=MESH,
            in_specs=(),
            out_specs=jax.sharding.PartitionSpec(None, "x"),
        )(),
        " ".join(names_in_signature(parallel.attention_shard)),
    ),
    "parallel.cached_attention": call(
        parallel.cached_attention,
        "query key value cache valid mask score scale precision return_lse mesh axis_name "
        "batch_axis head_axis",
        named=AXES,
        **APPENDED,
    ),
    "parallel.exchanges": call(
        parallel.exchanges,
        "query key value mask score q_positions kv_positions return_lse devices scheme order",
    ),
    **{
        f"parallel.{function.__name__}": call(
            function, x=Argument("tree", array(4, 2)), order="zigzag"
        )
        for function in (parallel.shard_tokens, parallel.unshard_tokens)
    },
    "parallel.token_positions": call(
        parallel.token_positions, T=Argument("tokens_of_devices", 8), devices=2, order="zigzag"
    ),
}


def module(function: Callable[..., Any], **changes: Any) -> SweptCall:
    return call(function, dtype=DTYPE_OR_NONE, rngs=RNGS, **changes)


KV_HEADS = {"num_kv_heads": SIZE_OR_NONE}
LEARNED = {"positions": Argument("name?", "learned")}
IDS = dict.fromkeys(("source_ids", "target_ids"), "ids")
NO_DROPOUT = {"dropout_rate": 0.0, "rngs": nnx.Rngs(0)}

SMALL: Any = {"features": D, "num_heads": 2, "feed_forward": 5, "dropout_rate": 0.0}
SMALL |= {"positions": "learned"}


@functools.cache
def attend() -> nn.MultiHeadAttention:
    return nn.MultiHeadAttention(2, D, rngs=nnx.Rngs(0))


@functools.cache
def model() -> nn.Transformer:
    return nn.Transformer(9, 9, encoder_layers=1, decoder_layers=1, rngs=nnx.Rngs(0), **SMALL)


@functools.cache
def language_model() -> nn.DecoderOnly:
    return nn.DecoderOnly(9, num_layers=1, rngs=nnx.Rngs(0), **SMALL)


ATTEND = Argument("thing", Later(attend))
PROJECTED = Argument("cache", Later(lambda: attend().project_memory(jnp.asarray(MEMORY))))
STARTED = Argument("thing", Later(lambda: language_model().start(B, L)))

FUNCTIONS |= {
    "generate": call(
        jattn.generate,
        named={"max_tokens": "length"},
        model=Argument("thing", Later(language_model)),
        prompt=TOKENS,
        key=RANDOM_KEY,
        pad=Argument("token", 0),
        stop=Argument("tokens to stop at", [2]),
    ),
    "nn.MultiHeadAttention": module(nn.MultiHeadAttention, mask=ANY_MASK, **KV_HEADS),
    "nn.MultiHeadLatentAttention": module(
        nn.MultiHeadLatentAttention,
        mask=ANY_MASK,
        head_dim=6,
        rotary_dim=Argument("size", 2),
        rotary=True,
    ),
    "nn.MultiHeadAttention()": method(
        nn.MultiHeadAttention.__call__, attend, valid=THING_OR_NONE, cache=THING_OR_NONE
    ),
    **{
        f"nn.{row.function.__qualname__}": row
        for row in (
            method(nn.MultiHeadAttention.empty_cache, attend, dtype=DTYPE_OR_NONE),
            method(
                nn.MultiHeadAttention.project_memory,
                attend,
                positions=NO_POSITIONS,
                dtype=DTYPE_OR_NONE,
            ),
            method(nn.MultiHeadAttention.attend_memory, attend, memory=PROJECTED),
            method(nn.TokenEmbedding.attend, lambda: nn.TokenEmbedding(9, D, rngs=nnx.Rngs(0))),
            method(nn.DecoderOnly.start, language_model, dtype=DTYPE_OR_NONE),
            method(
                nn.DecoderOnly.step,
                language_model,
                named={"tokens": "T"},
                caches=STARTED,
                positions=NO_POSITIONS,
            ),
        )
    },
    "nn.AdditiveAttention()": layer(
        nn.AdditiveAttention,
        *(D, E, A),
        query=X,
        key=array(B, S, E),
        value=Argument("array?", None),
    ),
    "nn.SingleHeads": call(nn.SingleHeads, packed=ATTEND),
    "nn.LearnedScore": call(nn.LearnedScore, score=Argument("thing", scores.Bias(array(N, 1, S)))),
    "nn.LearnedNormalizer": call(
        nn.LearnedNormalizer, normalizer=Argument("thing", normalizers.Sigmoid(array(N)))
    ),
    "nn.capture_weights": call(lambda model: nn.capture_weights(model, X), model=ATTEND),
    "nn.Dropout": call(nn.Dropout, named={"rate": "dropout_rate"}, rngs=RNGS),
    "nn.Dropout()": layer(
        nn.Dropout,
        0.5,
        made={"rngs": nnx.Rngs(params=0)},
        inputs=Argument("any array", X),
        rngs=RNGS,
    ),
    "nn.LayerNorm": call(nn.LayerNorm, "num_features rngs", rngs=RNGS),
    "nn.RMSNorm": call(nn.RMSNorm, "num_features rngs", rngs=RNGS),
    "nn.Rotary()": layer(nn.Rotary, made={}, x=array(B, T, N, H), positions=TOKENS),
    "nn.AxialRotary": call(nn.AxialRotary, "width"),
    "nn.AxialRotary()": layer(nn.AxialRotary, 3, made={}, x=array(B, T, N, 8), positions=TOKENS),
    "nn.TokenEmbedding()": layer(nn.TokenEmbedding, 9, D),
    "nn.OutputProjection()": layer(nn.OutputProjection, D, 9),
    "nn.LearnedPositions()": layer(nn.LearnedPositions, L, D, positions=TOKENS),
    "nn.SinusoidalPositions": call(nn.SinusoidalPositions),
    "nn.SinusoidalPositions()": layer(
        nn.SinusoidalPositions, D, made={}, positions=Argument("any real", ints(B, T))
    ),
    "nn.FeedForward()": layer(nn.FeedForward, D, 5),
    **{
        f"nn.{layer.__name__}": module(layer)
        for layer in (
            *(nn.AdditiveAttention, nn.TokenEmbedding, nn.OutputProjection, nn.LearnedPositions),
            *(nn.FeedForward, nn.GRU, nn.RecurrentEncoder, nn.Maxout, nn.Encoder, nn.Decoder),
            *(nn.EncoderLayer, nn.DecoderLayer, nn.DecoderOnlyLayer),
        )
    },
    "nn.Encoder()": layer(nn.Encoder, *(1, D, 2, 5), made=NO_DROPOUT),
    "nn.Decoder()": layer(
        nn.Decoder,
        *(1, D, 2, 5),
        made=NO_DROPOUT,
        named={"cross_mask": "mask", "memory_positions": "positions"},
    ),
    "nn.Transformer": module(nn.Transformer, **LEARNED),
    "nn.Transformer()": method(
        nn.Transformer.__call__,
        model,
        named=IDS
        | dict.fromkeys(("source_mask", "target_mask", "cross_mask"), "mask")
        | dict.fromkeys(("source_positions", "target_positions"), "positions"),
    ),
    "nn.DecoderOnly": module(nn.DecoderOnly, **LEARNED, **KV_HEADS),
    "nn.DecoderOnly()": method(nn.DecoderOnly.__call__, language_model, named={"tokens": "ids"}),
    "nn.GRU()": layer(nn.GRU, D, 6),
    "nn.RecurrentEncoder()": layer(nn.RecurrentEncoder, D, 6),
    "nn.Maxout()": layer(nn.Maxout, *(6, D, E, 5)),
    "nn.RecurrentDecoder": module(nn.RecurrentDecoder, out_features=Argument("size", 5)),
    "nn.RecurrentDecoder()": layer(nn.RecurrentDecoder, *(D, 6, E, A, 5), memory=array(B, S, E)),
    "nn.RNNsearch": module(nn.RNNsearch, alignment_features=SIZE_OR_NONE),
    "nn.RNNsearch()": method(
        nn.RNNsearch.__call__,
        lambda: nn.RNNsearch(9, 9, features=D, hidden=6, rngs=nnx.Rngs(0)),
        named=IDS,
    ),
}

SWEPT = [(name, argument) for name, call in FUNCTIONS.items() for argument in call.kinds]


@pytest.mark.one_in(16)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_each_call_is_right_as_it_stands(name):
    called(FUNCTIONS[name].made())


@pytest.mark.one_in(24)
@pytest.mark.parametrize(("name", "argument"), SWEPT)
def test_what_is_no_argument_raises_and_is_named(name, argument):
    check_argument(name, argument)


OF_ATTENTION = "attention cached_attention explain attention_weights attention_scores statistics"


@pytest.mark.parametrize("name", [*OF_ATTENTION.split(), "top_weights"])
def test_what_is_no_array_of_floats_is_named_everywhere(name):
    for argument in {"query", "key", "value"} & FUNCTIONS[name].kinds.keys():
        check_argument(name, argument)


def check_argument(name: str, argument: str) -> None:
    """Each wrong value raises an error that names the argument, unless its kind takes the value."""
    swept = FUNCTIONS[name].made()
    named = swept.names.get(argument, argument)
    wrong = []
    for label, bad in BAD.items():
        try:
            # `eval_shape` cannot return every type.
            jax.eval_shape(lambda bad=bad: (called(swept, **{argument: bad}), None)[1])
            outcome = "taken"
        except (TypeError, ValueError, NotImplementedError) as error:
            is_named = argument in str(error) or str(named) in str(error)
            outcome = "refused" if is_named else f"does not name {named}: {error}"
        except Exception as error:
            outcome = f"{type(error).__name__}: {error}"
        if outcome != ("taken" if label in TAKES[swept.kinds[argument]] else "refused"):
            wrong.append((label, outcome[:200]))
    assert not wrong


def called(row: SweptCall, **changes: Any) -> Any:
    arguments = {**row.right, **changes}
    rngs = {name: nnx.Rngs(params=0, dropout=1) for name, x in arguments.items() if x is FRESH}
    return row.function(**(arguments | rngs))


def test_every_public_function_is_swept():
    public = set()
    rooms = (("", jattn), ("nn.", nn), ("parallel.", parallel))
    for prefix, room in (*rooms, ("", masks), ("", scores), ("", positions)):
        public |= {prefix + name for name in room.__all__ if callable(getattr(room, name))}
    swept = {name.split(".create")[0].split("()")[0] for name in FUNCTIONS}
    assert public - swept - NOT_SWEPT == set()


# Bases, and types that users only read.
NOT_SWEPT = {"Mask", "Span", "Extent", "Tile", "Full", "Empty", "Causal", "And", "Or", "Not"}
NOT_SWEPT |= {"Then", "ScoreFunction", "parallel.Exchange"}
NOT_SWEPT |= {f"nn.{x}" for x in ("AttentionWeights", "LayerCache", "LayerOptions", "Residual")}
NOT_SWEPT |= {f"nn.{x}" for x in ("DecoderOnlyOptions", "RecurrentOptions", "RecurrentState")}
NOT_SWEPT |= {"nn.WeightsTap"}
