"""Arguments that other libraries have, answered with the line to write.

`advised` looks at the names of a call before it is made. Signatures stay those of the functions.
"""

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar


_F = TypeVar("_F", bound=Callable[..., Any])

_CAUSAL = "mask=masks.Causal()"
_WINDOW = "mask=masks.Window(left=..., right=...), both inclusive, or masks.Causal() & ..."
_PADDING = "mask=masks.Padding(attention_mask), an array [*B, S] in which 1 or True is a token"
_DROPOUT = "dropout_rate=..., dropout_key=jax.random.key(...)"
_LSE = "return_lse=True"
_CAP = "score=scores.SoftCap(cap)"
_LENGTHS = "mask=masks.Lengths(q=..., kv=...)"
_WEIGHTS = "return_weights=True"

ADVICE: dict[str, str] = {
    "is_causal": _CAUSAL,
    "causal": _CAUSAL,
    "use_causal_mask": _CAUSAL,
    "attn_mask": "mask=array if it is boolean and True attends, score=scores.Bias(array) if it is "
    "added; of full rank [*B, N, T, S]",
    "attention_mask": _PADDING,
    "padding_mask": _PADDING,
    "key_padding_mask": "mask=masks.Padding(~key_padding_mask): in it True is a token",
    "mask_mod": "mask=mask_mod, the function",
    "block_mask": "mask=mask_mod, the function that the block mask was made of",
    "score_mod": "score=score_mod, the function",
    "bias": "score=scores.Bias(bias), of full rank [*B, N, T, S]",
    "attn_bias": "score=scores.Bias(attn_bias), of full rank [*B, N, T, S]",
    "alibi_slopes": "score=scores.Alibi(alibi_slopes)",
    "softcap": _CAP,
    "logit_cap": _CAP,
    "logits_soft_cap": _CAP,
    "attn_logits_soft_cap": _CAP,
    "softmax_scale": "scale=softmax_scale",
    "sinks": "sink=sinks",
    "s_aux": "sink=s_aux",
    "learnable_sink": "sink=learnable_sink",
    "sm_scale": "scale=sm_scale",
    "scale_factor": "scale=scale_factor",
    "window_size": _WINDOW,
    "sliding_window": _WINDOW,
    "local_window_size": _WINDOW,
    "segment_ids": "mask=masks.Segments(segment_ids)",
    "lengths": _LENGTHS,
    "query_seq_lengths": "mask=masks.Lengths(q=query_seq_lengths)",
    "key_value_seq_lengths": "mask=masks.Lengths(kv=key_value_seq_lengths)",
    "dropout": _DROPOUT,
    "dropout_p": _DROPOUT,
    "dropout_rng": _DROPOUT,
    "deterministic": "dropout_rate=0.0, which is the default",
    "return_residual": _LSE,
    "return_softmax_lse": _LSE,
    "need_weights": _WEIGHTS,
    "enable_gqa": "nothing: K divides N, and heads are shared",
    "positions": "q_positions=..., kv_positions=...",
    "q": "query=q",
    "k": "key=k",
    "v": "value=v",
    "impl": "implementation=...",
    "backend": "implementation=...",
}


_MADE = "dropout_rate=... where the layer is made, and deterministic=True to switch it off"
_RNGS = "rngs=nnx.Rngs(0)"

RUN_ADVICE: dict[str, str] = {
    "dropout_rng": "rngs=nnx.Rngs(dropout=dropout_rng)",
    **dict.fromkeys(("dropout", "dropout_p", "dropout_rate"), _MADE),
    "training": "deterministic=not training",
    "train": "deterministic=not train",
    "inference": "deterministic=inference",
    **dict.fromkeys(
        ("sow_weights", "need_weights", "return_weights", "output_attentions"),
        "nn.capture_weights(layer, x), which calls it",
    ),
}
"""In calls of modules: what has to do with training and looking."""

LAYER_ADVICE: dict[str, str] = {
    **ADVICE,
    **RUN_ADVICE,
    "inputs_kv": "inputs_k=inputs_kv",
    "query": "inputs_q=query",
    "key": "inputs_k=key",
    "value": "inputs_v=value",
    "q": "inputs_q=q",
    "k": "inputs_k=k",
    "v": "inputs_v=v",
    "q_positions": "positions=q_positions",
    "decode": "cache=layer.empty_cache(batch, length): a call with it returns (out, cache)",
}
"""In calls of attention layers."""

CONSTRUCTOR_ADVICE: dict[str, str] = {
    "is_causal": _CAUSAL,
    "causal": _CAUSAL,
    "embed_dim": "in_features=embed_dim",
    "hidden_size": "in_features=hidden_size",
    "d_model": "in_features=d_model",
    "features": "in_features=features",
    "kdim": "in_kv_features=kdim",
    "vdim": "in_kv_features=vdim, of keys and values alike",
    "heads": "num_heads=heads",
    "nhead": "num_heads=nhead",
    "n_heads": "num_heads=n_heads",
    "num_key_value_heads": "num_kv_heads=num_key_value_heads",
    "dropout": "dropout_rate=dropout",
    "dropout_p": "dropout_rate=dropout_p",
    "bias": "use_bias=bias",
    "batch_first": "nothing: inputs are [*B, T, D]",
    "attention_fn": "implementation=..., the name of a kernel, or nothing",
    "window_size": _WINDOW,
    "sliding_window": _WINDOW,
    "rope": "rotary=True",
    "softcap": _CAP,
    "key": _RNGS,
    "seed": _RNGS,
}
"""In making attention layers."""


def advised_by(
    advice: Mapping[str, str], options: Callable[..., Any] | None = None
) -> Callable[[_F], _F]:
    """A decorator for functions and methods, by this table; see `advised`.

    `options` takes what the function takes as `**options`.
    """
    return functools.partial(_advised, advice, options=options)


def _advised(
    advice: Mapping[str, str], function: _F, options: Callable[..., Any] | None = None
) -> _F:
    parameters = dict(inspect.signature(function).parameters)
    if options is not None:
        parameters.popitem()
        parameters |= inspect.signature(options).parameters
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    places = [name for name, x in parameters.items() if x.kind in kinds]
    of_object = int(places[:1] == ["self"])

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        unknown = named.keys() - parameters.keys()
        if unknown:
            name = min(unknown, key=lambda name: (name not in advice, name))
            raise TypeError(
                f"{_name(function, arguments[:of_object])}: no argument {name!r}; "
                f"{_instead(name, [*parameters][of_object:], advice)}"
            )
        if len(arguments) > len(places):
            raise TypeError(
                f"{_name(function, arguments[:of_object])}: expected "
                f"{', '.join(places[of_object:])} by place, got "
                f"{len(arguments) - of_object} arguments; name the others, as in mask=mask"
            )
        return function(*arguments, **named)

    return call  # pyright: ignore[reportReturnType]


def _name(function: Callable[..., Any], of_object: tuple[Any, ...]) -> str:
    """With that of the object's class, which may inherit the method."""
    if not of_object:
        return function.__qualname__
    return f"{type(of_object[0]).__name__}.{function.__name__}"


def advised(function: _F) -> _F:
    """The same function, whose TypeError about an argument that it has not says what to write,
    in arguments that it has."""
    taken = inspect.signature(function).parameters
    written = {name: line.partition("=")[0] for name, line in ADVICE.items()}
    fits = [name for name, x in written.items() if x in taken or not x.isidentifier()]
    return _advised({name: ADVICE[name] for name in fits}, function)


def _instead(name: str, parameters: list[str], advice: Mapping[str, str]) -> str:
    """What to write in its place."""
    if name in advice:
        return f"write {advice[name]}"
    candidates = [] if name in ADVICE else [*parameters, *advice]  # what is known is no misspelling
    near = difflib.get_close_matches(name, candidates, n=1)
    if near and near[0] in parameters:
        return f"did you mean {near[0]!r}?"
    if near:
        return f"for {near[0]!r} write {advice[near[0]]}"
    return f"there are {', '.join(parameters)}"
