"""What to write in place of arguments that other libraries have.

Each table is for one kind of callable, and maps the name of such an argument to the text to write.
`jattn._advised` uses the tables in errors about unknown arguments. The tables for functions come
first, then those for modules.
"""


def _renamed(**other_names: str) -> dict[str, str]:
    """Returns advice for arguments that differ in name alone, as `ours="theirs others_too"`."""
    return {
        other: f"{ours}={other}" for ours, others in other_names.items() for other in others.split()
    }


def _alike(names: str, advice: str) -> dict[str, str]:
    """Returns a table with the same advice for several names, separated by spaces."""
    return dict.fromkeys(names.split(), advice)


_CAUSAL = "mask=masks.Causal()"
_WINDOW = _alike(
    "window_size sliding_window",
    "mask=masks.Window(left=..., right=...), both inclusive, or masks.Causal() & ...",
)
_NORMALIZER = "normalizer=..., a normalizer of jattn.normalizers or a function of a score"
_CAP = "score=scores.SoftCap(cap)"
WEIGHTS = "attention_weights(query, key, ...), which returns the weights"

ADVICE: dict[str, str] = {
    **_renamed(
        query="q",
        key="k",
        value="v",
        scale="softmax_scale sm_scale scale_factor",
        sink="sinks s_aux learnable_sink",
    ),
    **_alike("is_causal causal use_causal_mask", _CAUSAL),
    "attn_mask": "mask=array for a boolean array in which True attends, score=scores.Bias(array) "
    "for an array that is added to scores; with all axes [*B, N, T, S]",
    **_alike(
        "attention_mask padding_mask",
        "mask=masks.Padding(attention_mask), an array [*B, S] in which 1 or True is a token",
    ),
    "key_padding_mask": "mask=masks.Padding(~key_padding_mask), in which True is a token",
    "mask_mod": "mask=mask_mod, the function",
    "block_mask": "mask=mask_mod, the function from which the block mask was made",
    "score_mod": "score=score_mod, the function",
    "bias": "score=scores.Bias(bias), with all axes [*B, N, T, S]",
    "attn_bias": "score=scores.Bias(attn_bias), with all axes [*B, N, T, S]",
    "alibi_slopes": "score=scores.Alibi(alibi_slopes)",
    **_alike("softcap logit_cap logits_soft_cap attn_logits_soft_cap", _CAP),
    **_alike("softmax_fn normalize_fn normaliser normalize activation", _NORMALIZER),
    **_alike("topk top_k", "normalizer=normalizers.TopK(k)"),
    **_alike("add_zero_attn softmax1 softmax_one", "normalizer=normalizers.SoftmaxPlusOne()"),
    **_WINDOW,
    "local_window_size": _WINDOW["window_size"],
    "segment_ids": "mask=masks.Segments(segment_ids)",
    "lengths": "mask=masks.Lengths(q=..., kv=...)",
    "query_seq_lengths": "mask=masks.Lengths(q=query_seq_lengths)",
    "key_value_seq_lengths": "mask=masks.Lengths(kv=key_value_seq_lengths)",
    **_alike("dropout dropout_p dropout_rng", "dropout_rate=..., dropout_key=jax.random.key(...)"),
    "deterministic": "dropout_rate=0.0, which is the default",
    **_alike("return_residual return_softmax_lse", "return_lse=True"),
    **_alike("need_weights return_weights", WEIGHTS),
    "enable_gqa": "nothing: query heads share key heads if the key has fewer heads",
    "positions": "q_positions=..., kv_positions=...",
    **_alike("impl backend", "implementation=..."),
    "cache": "cached_attention(query, key, value, cache, ...), which appends key and value",
    "valid": "mask=masks.Padding(valid), or cached_attention with a cache",
}

_VALID = "valid=attention_mask.astype(bool), an array [B, T], False for padding"

CACHE_ADVICE: dict[str, str] = {
    **_alike("attention_mask padding_mask", _VALID),
    "key_padding_mask": f"valid=~key_padding_mask, or {_VALID}",
    "lengths": f"{_VALID}: jnp.arange(T) < lengths[:, None] if padding is on the right",
}
"""Advice that replaces the above in calls on a cache: a mask would leave padding in the cache."""

RUN_ADVICE: dict[str, str] = {
    "dropout_rng": "rngs=nnx.Rngs(dropout=dropout_rng)",
    **_alike(
        "dropout dropout_p dropout_rate",
        "dropout_rate=... in the layer's constructor, and deterministic=True to switch it off",
    ),
    "training": "deterministic=not training",
    "train": "deterministic=not train",
    "inference": "deterministic=inference",
    **_alike(
        "sow_weights need_weights return_weights output_attentions",
        "nn.capture_weights(layer, x), which calls the layer",
    ),
}
"""Advice about training and inspection, for calls of all modules."""

LAYER_ADVICE: dict[str, str] = {
    **{name: x for name, x in ADVICE.items() if name not in ("cache", "valid")},
    **RUN_ADVICE,
    **_renamed(inputs_q="query q", inputs_k="inputs_kv key k", inputs_v="value v"),
    "q_positions": "positions=q_positions",
    "decode": "cache=layer.empty_cache(batch, length): a call with it returns (out, cache)",
}

_ALL_CONSTRUCTORS = {
    **_renamed(num_heads="heads nhead n_heads", dropout_rate="dropout", use_bias="bias"),
    "batch_first": "nothing: inputs are [*B, T, D]",
    **_alike("key seed", "rngs=nnx.Rngs(0)"),
}

CONSTRUCTOR_ADVICE: dict[str, str] = {
    **_ALL_CONSTRUCTORS,
    **_renamed(
        in_features="embed_dim hidden_size d_model features",
        in_kv_features="kdim",
        num_kv_heads="num_key_value_heads",
        dropout_rate="dropout_p",
    ),
    **_alike("is_causal causal", _CAUSAL),
    "vdim": "in_kv_features=vdim, for keys and values together",
    "attention_fn": "implementation=..., the name of a kernel, or nothing",
    "decode": "cache=layer.empty_cache(batch, length) in the call",
    "deterministic": "deterministic=True in the call, or layer.eval() before it",
    **_WINDOW,
    "rope": "rotary=True",
    "softcap": _CAP,
    **{name: x for name, x in ADVICE.items() if x.startswith("normalizer=")},
}
"""Advice for the constructors of attention layers."""

_CAUSAL_ALREADY = _alike(
    "is_causal causal use_causal_mask tgt_is_causal", "nothing: self-attention is always causal"
)
_MASKS = {name: x for name, x in ADVICE.items() if x.startswith("mask=") and "score=" not in x}
_IN_CONSTRUCTOR = "self_attention=functools.partial(nn.MultiHeadAttention, {}) in the constructor"


def _mask_array(mask: str, name: str) -> str:
    """Returns the advice for a mask array `name` of PyTorch's layers, which we call `mask`."""
    return f"{mask}=~{name} if it is boolean: here True attends; with all axes [*B, N, T, S]"


def _padding(name: str, *masks: str) -> str:
    """Returns the advice for a padding mask `name` of PyTorch's layers, for our `masks`."""
    return f"{', '.join(f'{mask}=masks.Padding(~{name})' for mask in masks)}: True is a token"


_LAYERS_WITH_ATTENTION = {
    **RUN_ADVICE,
    **_alike("score bias attn_bias position_bias", _IN_CONSTRUCTOR.format("score=...")),
    "scale": _IN_CONSTRUCTOR.format("scale=..."),
    "normalizer": _IN_CONSTRUCTOR.format("normalizer=..."),
}
_SELF_ATTENTION = {
    **_LAYERS_WITH_ATTENTION,
    **_MASKS,
    "attn_mask": "mask=array, boolean, in which True attends, with all axes [*B, N, T, S]",
}

ENCODER_ADVICE = {
    **_SELF_ATTENTION,
    "src_mask": _mask_array("mask", "src_mask"),
    "src_key_padding_mask": _padding("src_key_padding_mask", "mask"),
    **_renamed(x="src inputs hidden_states"),
}

DECODER_ADVICE = {
    **ENCODER_ADVICE,
    **_CAUSAL_ALREADY,
    "tgt_mask": _mask_array("mask", "tgt_mask"),
    "tgt_key_padding_mask": _padding("tgt_key_padding_mask", "mask"),
    "memory_mask": _mask_array("cross_mask", "memory_mask"),
    "memory_key_padding_mask": _padding("memory_key_padding_mask", "cross_mask"),
    "encoder_attention_mask": "cross_mask=masks.Padding(encoder_attention_mask): True is a token",
    **_renamed(memory="encoder_hidden_states", x="tgt"),
    "cache": "decoder.step(x, cache), which returns x and the cache with T more tokens",
}

TRANSFORMER_ADVICE = {
    **_LAYERS_WITH_ATTENTION,
    **_CAUSAL_ALREADY,
    "mask": "source_mask=..., target_mask=... or cross_mask=..., one for each attention",
    "src_mask": _mask_array("source_mask", "src_mask"),
    "tgt_mask": _mask_array("target_mask", "tgt_mask"),
    "memory_mask": _mask_array("cross_mask", "memory_mask"),
    "src_key_padding_mask": _padding("src_key_padding_mask", "source_mask", "cross_mask"),
    "tgt_key_padding_mask": _padding("tgt_key_padding_mask", "target_mask"),
    "memory_key_padding_mask": _padding("memory_key_padding_mask", "cross_mask"),
    "key_padding_mask": _padding("key_padding_mask", "source_mask", "cross_mask"),
    "attention_mask": "source_mask=padding, cross_mask=padding, where padding is "
    "masks.Padding(attention_mask)",
    "decoder_attention_mask": "target_mask=masks.Padding(decoder_attention_mask)",
    "positions": "source_positions=..., target_positions=...",
    **_renamed(source_ids="src input_ids", target_ids="tgt decoder_input_ids"),
    "cache": "model.step(target_ids, caches), which returns logits and caches",
}

DECODER_ONLY_ADVICE = {
    **_SELF_ATTENTION,
    **_CAUSAL_ALREADY,
    **_renamed(tokens="input_ids ids x", positions="position_ids"),
    **_alike(
        "cache caches past_key_values use_cache",
        "model.step(tokens, caches), which returns logits and caches",
    ),
}

ADDITIVE_ADVICE = {
    **_MASKS,
    **{name: x for name, x in RUN_ADVICE.items() if "capture_weights" in x},
    "attn_mask": "mask=array, boolean, in which True attends, with all axes [*B, 1, T, S]",
    **_renamed(query="inputs_q", key="inputs_k memory", value="inputs_v"),
    "use_scale": "nothing: the score has learned parameters, which include a scale",
}

MODEL_CONSTRUCTOR_ADVICE = {
    **_ALL_CONSTRUCTORS,
    **_renamed(
        features="d_model embed_dim hidden_size in_features",
        feed_forward="dim_feedforward intermediate_size mlp_dim d_ff",
        norm_epsilon="layer_norm_eps",
        encoder_layers="num_encoder_layers",
        decoder_layers="num_decoder_layers",
        num_layers="n_layers depth",
        vocabulary="vocab_size",
    ),
    "num_layers": "encoder_layers=num_layers, decoder_layers=num_layers",
    "norm_first": 'norm="pre" if norm_first else "post"',
    **_alike(
        "causal is_causal",
        "nothing for a decoder, which is always causal, and mask=masks.Causal() in the call of an "
        "encoder",
    ),
    **{
        name: f"self_attention=functools.partial(nn.MultiHeadAttention, {name}=...)"
        for name in ("mask", "score", "normalizer")
    },
}
"""Advice for the constructors of layers, stacks and models."""
