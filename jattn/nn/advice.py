"""What to write for arguments that the Transformers of other libraries have: the tables.

Each is for the call, or the making, of the modules that its name says; see `jattn._advice`.
"""

from jattn._advice import ADVICE, RUN_ADVICE


_CAUSAL_ALREADY = "nothing: self-attention is causal in any case"
_CAUSAL_NAMES = ("is_causal", "causal", "use_causal_mask", "tgt_is_causal")
_MASKS = {name: x for name, x in ADVICE.items() if x.startswith("mask=") and "score=" not in x}
_MADE = "self_attention=functools.partial(nn.MultiHeadAttention, {}) where the layers are made"


def _array(mask: str, name: str) -> str:
    """For a mask of PyTorch's layers."""
    return f"{mask}=~{name} if it is boolean: here True attends; of full rank [*B, N, T, S]"


def _padding(name: str, *masks: str) -> str:
    """For a padding mask of PyTorch's layers."""
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
"""In calls of encoders and their layers."""

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
"""In calls of decoders and their layers."""

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
"""In calls of the Transformer."""

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
"""In calls of the model that is a decoder alone."""

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
"""In calls of additive attention."""

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
"""In making layers, stacks and models."""
