"""Tables of what to write in place of the arguments of other libraries, by the callable.

`jattn._advised` looks names up here. The first part is for functions, the second for modules.
"""

_CAUSAL = "mask=masks.Causal()"
_WINDOW = "mask=masks.Window(left=..., right=...), both inclusive, or masks.Causal() & ..."
_PADDING = "mask=masks.Padding(attention_mask), an array [*B, S] in which 1 or True is a token"
_DROPOUT = "dropout_rate=..., dropout_key=jax.random.key(...)"
_LSE = "return_lse=True"
_CAP = "score=scores.SoftCap(cap)"
_LENGTHS = "mask=masks.Lengths(q=..., kv=...)"
WEIGHTS = "attention_weights(query, key, ...), a function of its own"

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
    "need_weights": WEIGHTS,
    "return_weights": WEIGHTS,
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
"""Advice for arguments about training and inspection, in calls of modules."""

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
"""Advice for calls of attention layers."""

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
"""Advice for the constructors of attention layers."""


# --- modules: layers, stacks and models -----------------------------------------------------------

_CAUSAL_ALREADY = "nothing: self-attention is causal in any case"
_CAUSAL_NAMES = ("is_causal", "causal", "use_causal_mask", "tgt_is_causal")
_MASKS = {name: x for name, x in ADVICE.items() if x.startswith("mask=") and "score=" not in x}
_MADE = "self_attention=functools.partial(nn.MultiHeadAttention, {}) where the layers are made"


def _array(mask: str, name: str) -> str:
    """Returns the advice for a mask array of PyTorch's layers."""
    return f"{mask}=~{name} if it is boolean: here True attends; of full rank [*B, N, T, S]"


def _padding(name: str, *masks: str) -> str:
    """Returns the advice for a padding mask of PyTorch's layers."""
    return f"{', '.join(f'{mask}=masks.Padding(~{name})' for mask in masks)}: True is a token"


_INSIDE = {
    **RUN_ADVICE,
    **dict.fromkeys(("score", "bias", "attn_bias", "position_bias"), _MADE.format("score=...")),
    "scale": _MADE.format("scale=..."),
}
_SELF = {
    **_INSIDE,
    **_MASKS,
    "attn_mask": "mask=array, boolean, in which True attends, of full rank [*B, N, T, S]",
}

ENCODER_ADVICE = {
    **_SELF,
    "src_mask": _array("mask", "src_mask"),
    "src_key_padding_mask": _padding("src_key_padding_mask", "mask"),
    "src": "x=src",
    "inputs": "x=inputs",
    "hidden_states": "x=hidden_states",
}
"""Advice for calls of encoders and their layers."""

DECODER_ADVICE = {
    **ENCODER_ADVICE,
    **dict.fromkeys(_CAUSAL_NAMES, _CAUSAL_ALREADY),
    "tgt_mask": _array("mask", "tgt_mask"),
    "tgt_key_padding_mask": _padding("tgt_key_padding_mask", "mask"),
    "memory_mask": _array("cross_mask", "memory_mask"),
    "memory_key_padding_mask": _padding("memory_key_padding_mask", "cross_mask"),
    "encoder_attention_mask": "cross_mask=masks.Padding(encoder_attention_mask): True is a token",
    "encoder_hidden_states": "memory=encoder_hidden_states",
    "tgt": "x=tgt",
    "cache": "decoder.step(x, cache), which returns x and the cache with T more tokens",
}
"""Advice for calls of decoders and their layers."""

TRANSFORMER_ADVICE = {
    **_INSIDE,
    **dict.fromkeys(_CAUSAL_NAMES, _CAUSAL_ALREADY),
    "mask": "source_mask=..., target_mask=... or cross_mask=..., for each attention its own",
    "src_mask": _array("source_mask", "src_mask"),
    "tgt_mask": _array("target_mask", "tgt_mask"),
    "memory_mask": _array("cross_mask", "memory_mask"),
    "src_key_padding_mask": _padding("src_key_padding_mask", "source_mask", "cross_mask"),
    "tgt_key_padding_mask": _padding("tgt_key_padding_mask", "target_mask"),
    "memory_key_padding_mask": _padding("memory_key_padding_mask", "cross_mask"),
    "key_padding_mask": _padding("key_padding_mask", "source_mask", "cross_mask"),
    "attention_mask": "source_mask=padding, cross_mask=padding, where padding is "
    "masks.Padding(attention_mask)",
    "decoder_attention_mask": "target_mask=masks.Padding(decoder_attention_mask)",
    "positions": "source_positions=..., target_positions=...",
    "src": "source_ids=src",
    "tgt": "target_ids=tgt",
    "input_ids": "source_ids=input_ids",
    "decoder_input_ids": "target_ids=decoder_input_ids",
    "cache": "model.step(target_ids, caches), which returns logits and caches",
}
"""Advice for calls of the Transformer."""

DECODER_ONLY_ADVICE = {
    **_SELF,
    **dict.fromkeys(_CAUSAL_NAMES, _CAUSAL_ALREADY),
    "input_ids": "tokens=input_ids",
    "ids": "tokens=ids",
    "x": "tokens=x",
    "position_ids": "positions=position_ids",
    **dict.fromkeys(
        ("cache", "caches", "past_key_values", "use_cache"),
        "model.step(tokens, caches), which returns logits and caches",
    ),
}
"""Advice for calls of the decoder-only model."""

ADDITIVE_ADVICE = {
    **_MASKS,
    **{name: x for name, x in RUN_ADVICE.items() if "capture_weights" in x},
    "attn_mask": "mask=array, boolean, in which True attends, of full rank [*B, 1, T, S]",
    "inputs_q": "query=inputs_q",
    "inputs_k": "key=inputs_k",
    "inputs_v": "value=inputs_v",
    "memory": "key=memory",
    "use_scale": "nothing: the score is a product with parameters",
}
"""Advice for calls of additive attention."""

MODEL_CONSTRUCTOR_ADVICE = {
    "d_model": "features=d_model",
    "embed_dim": "features=embed_dim",
    "hidden_size": "features=hidden_size",
    "in_features": "features=in_features",
    "nhead": "num_heads=nhead",
    "n_heads": "num_heads=n_heads",
    "heads": "num_heads=heads",
    "dim_feedforward": "feed_forward=dim_feedforward",
    "intermediate_size": "feed_forward=intermediate_size",
    "mlp_dim": "feed_forward=mlp_dim",
    "d_ff": "feed_forward=d_ff",
    "dropout": "dropout_rate=dropout",
    "layer_norm_eps": "norm_epsilon=layer_norm_eps",
    "norm_first": 'norm="pre" if norm_first else "post"',
    "bias": "use_bias=bias",
    "batch_first": "nothing: inputs are [*B, T, D]",
    "num_encoder_layers": "encoder_layers=num_encoder_layers",
    "num_decoder_layers": "decoder_layers=num_decoder_layers",
    "n_layers": "num_layers=n_layers",
    "depth": "num_layers=depth",
    "vocab_size": "vocabulary=vocab_size",
    **dict.fromkeys(("causal", "is_causal"), "mask=masks.Causal() in the call of an encoder"),
    "key": "rngs=nnx.Rngs(0)",
    "seed": "rngs=nnx.Rngs(0)",
}
"""Advice for the constructors of layers, stacks and models."""
