"""The families of models whose weights `jattn.nn.pretrained` reads.

A family is a row of `FAMILIES`: how a config becomes arguments of a constructor, and which tensor
is which parameter. A config with an option that is neither used nor known not to change the logits
is rejected.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Container, Mapping, Set
from typing import Any

from flax import nnx

from jattn.checks import check_number, check_size
from jattn.masks import Window
from jattn.nn.attention import MultiHeadAttention
from jattn.nn.embedding import Rotary, SinusoidalPositions
from jattn.nn.layers import RMSNorm, relu
from jattn.positions import NTK, Linear, Yarn
from jattn.scores import SoftCap


# Options that do not change the logits: of training, of text generation, of other tasks, of files.
_HARMLESS = frozenset(
    """_attn_implementation _name_or_path _num_labels _sliding_window_pattern activation_dropout
    architectures attention_dropout attn_pdrop bad_words_ids bos_token_id cache_implementation
    decoder_layerdrop decoder_start_token_id diversity_penalty do_sample dropout dtype
    early_stopping embd_pdrop encoder_layerdrop encoder_no_repeat_ngram_size eos_token_id
    exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id
    gradient_checkpointing id2label init_std initializer_range is_encoder_decoder label2id
    length_penalty max_length min_length model_type n_ctx no_repeat_ngram_size num_beam_groups
    num_beams num_hidden_layers num_return_sequences output_attentions output_hidden_states
    output_scores pad_token_id pretraining_tp problem_type remove_invalid_values
    reorder_and_upcast_attn repetition_penalty resid_pdrop return_dict return_dict_in_generate
    summary_activation summary_first_dropout summary_proj_to_labels summary_type
    summary_use_proj suppress_tokens task_specific_params temperature tokenizer_class top_k
    top_p torch_dtype transformers_version typical_p use_cache""".split()
)
_ACTIVATIONS: dict[str, Callable[..., Any]] = {
    "silu": nnx.silu,
    "swish": nnx.silu,
    "relu": relu,
    "gelu": functools.partial(nnx.gelu, approximate=False),
    "gelu_new": nnx.gelu,
    "gelu_pytorch_tanh": nnx.gelu,
}
# Options that must be integers from 1, and those that must be positive numbers.
_SIZES = frozenset(
    """d_model decoder_attention_heads decoder_ffn_dim decoder_layers decoder_vocab_size
    encoder_attention_heads encoder_ffn_dim encoder_layers head_dim hidden_size intermediate_size
    n_embd n_head n_inner n_layer n_positions num_attention_heads num_hidden_layers
    num_key_value_heads sliding_window sliding_window_pattern vocab_size""".split()
)
_POSITIVE_NUMBERS = frozenset(
    """attention_factor attn_logit_softcapping beta_fast beta_slow factor final_logit_softcapping
    high_freq_factor layer_norm_epsilon low_freq_factor query_pre_attn_scalar rms_norm_eps
    rope_local_base_freq rope_theta""".split()
)
_REQUIRED: Any = object()


def _check_option(name: str, value: Any) -> None:
    """Raises ValueError for an option in `_SIZES` or `_POSITIVE_NUMBERS` that is neither null nor
    such a number."""
    try:
        if name in _SIZES and value is not None:
            check_size(name, value)
        if name in _POSITIVE_NUMBERS and value is not None:
            check_number(name, value, positive=True)
    except (TypeError, ValueError) as error:
        raise ValueError(f"config.json: {error}") from error


@dataclasses.dataclass
class Config:
    """The options of a config.json, which remembers those that were used.

    `tensors` are the names of the folder's tensors; `length` and `ignored` are the arguments of
    `from_safetensors`.
    """

    options: dict[str, Any]
    tensors: Container[str]
    length: int | None
    ignored: Set[str]
    used: set[str] = dataclasses.field(default_factory=set)

    def __call__(self, name: str, default: Any = _REQUIRED) -> Any:
        """Returns an option, or the default if it is absent or null."""
        self.used.add(name)
        value = self.options.get(name)
        _check_option(name, value)
        if value is None and default is _REQUIRED:
            raise ValueError(f"config.json: expected the option {name}, which is missing")
        return default if value is None else value

    def nullable(self, name: str, default: Any) -> Any:
        """Returns an option, None if it is null, or the default if it is absent."""
        self.used.add(name)
        _check_option(name, self.options.get(name))
        return self.options.get(name, default)

    def expect(self, **values: Any) -> None:
        """Raises NotImplementedError unless each option is absent, null or has the value."""
        for name, value in values.items():
            if (option := self(name, value)) != value:
                raise NotImplementedError(
                    f"config.json: {name}={option!r} is not supported, only {value!r}"
                )

    def activation(self, default: str, *names: str, gelu: str = "gelu") -> Callable[..., Any]:
        """Returns the activation function that the options name; `gelu` is what `hidden_act` calls
        "gelu"."""
        kinds = {name: kind for name in names if (kind := self(name, None)) is not None}
        if kinds.get("hidden_act") == "gelu":
            kinds["hidden_act"] = gelu
        different = {*kinds.values()} or {default}
        if len(different) > 1 or not different <= _ACTIVATIONS.keys():
            raise NotImplementedError(
                f"config.json: {kinds} is not supported, only one of {', '.join(_ACTIVATIONS)}"
            )
        return _ACTIVATIONS[different.pop()]

    def check_all_used(self) -> None:
        """Raises NotImplementedError for options that are not used and not known as harmless."""
        known = self.used | _HARMLESS
        self.reject({x: y for x, y in self.options.items() if x not in known and y is not None})

    def reject(self, options: dict[str, Any]) -> None:
        """Raises NotImplementedError if there are options, but for those in `ignored`."""
        if unknown := {x: y for x, y in options.items() if x not in self.ignored}:
            raise NotImplementedError(
                f"config.json: the options {unknown} are not supported for model_type "
                f"{self.options['model_type']!r}; if they do not change the logits, pass "
                f"ignored={[*unknown]}"
            )


def _rotary(
    config: Config, kind: str, base: float = 10000.0, base_name: str = "rope_theta"
) -> Rotary:
    """Returns the rotary embedding of the layers of a kind, "full_attention" or else.

    Configs that lack `rope_parameters` have the base under `base_name`, or it is `base`; their
    `rope_scaling` is for layers with `rope_theta`. These families rotate whole heads.
    """
    base, scaling = config(base_name, base), config("rope_scaling", {})
    options = config("rope_parameters", scaling if base_name == "rope_theta" else {})
    if scaling and config("rope_parameters", scaling) != scaling:
        raise ValueError("config.json: expected one of rope_parameters and rope_scaling, got both")
    if options.keys() & {"full_attention", "sliding_attention"}:
        options = options.get(kind) or {}
    options = dict(options)
    base = _number(options, "rope_theta", base)
    scaling = _scaling(config, options)
    share = options.pop("partial_rotary_factor", config("partial_rotary_factor", 1.0))
    config.reject(options | ({} if share == 1 else {"partial_rotary_factor": share}))
    return Rotary(base=base, scaling=scaling)


def _scaling(config: Config, options: dict[str, Any]) -> Linear | NTK | Yarn | None:
    """Removes the options of a rotary scaling from `options`, and returns the scaling."""
    kind = options.pop("type", "default")
    kind = options.pop("rope_type", kind)
    config("max_position_embeddings", None)  # not needed by the first two
    if kind == "default":
        return None
    if kind == "linear":
        return Linear(_number(options, "factor"))
    longest = config("max_position_embeddings")
    if kind == "dynamic":
        if config.length is None:
            raise ValueError(
                "length: expected the number of tokens, by which dynamic rotary scaling "
                f"chooses frequencies (none are scaled up to {longest}), got None"
            )
        factor = _number(options, "factor")
        stretch = factor * max(config.length, longest) / longest - (factor - 1)
        return None if stretch == 1 else NTK(stretch)
    if kind not in ("llama3", "yarn"):
        raise NotImplementedError(
            f"config.json: rotary scaling {kind!r} is not supported, only default, linear, "
            "dynamic, llama3 and yarn"
        )
    original = options.pop("original_max_position_embeddings", longest)
    factor = _number(options, "factor", longest / original)
    if kind == "llama3":
        slow, fast = (_number(options, f"{x}_freq_factor") for x in ("low", "high"))
        return Yarn(factor, original, slow, fast, amplitude=1.0)
    slow, fast = _number(options, "beta_slow", 1.0), _number(options, "beta_fast", 32.0)
    return Yarn(
        factor,
        original,
        slow,
        fast,
        ramp="pair",
        amplitude=_yarn_amplitude(options, factor),
        truncate=options.pop("truncate", True),
    )


def _number(options: dict[str, Any], name: str, default: float | None = None) -> float:
    """Removes an option that is a number, and returns it."""
    value = options.pop(name, None)
    value = default if value is None else value
    if value is None:
        raise ValueError(f"config.json: expected the rotary option {name}, got {options}")
    _check_option(name, value)
    return float(value)


def _yarn_amplitude(options: dict[str, Any], factor: float) -> float:
    """Removes YaRN's options of the amplitude from `options`, and returns the amplitude."""
    amplitude = options.pop("attention_factor", None)
    _check_option("attention_factor", amplitude)
    scales = options.pop("mscale", None), options.pop("mscale_all_dim", None)
    if amplitude is not None:
        return float(amplitude)
    growth = 0.1 * math.log(factor) if factor > 1 else 0.0
    if all(scales):
        return (growth * scales[0] + 1) / (growth * scales[1] + 1)
    return growth + 1


def _attention(**fixed: Any) -> Callable[..., MultiHeadAttention]:
    """Returns a function that makes attention modules, with options that the model's do not
    override."""

    def make(num_heads: int, features: int, **options: Any) -> MultiHeadAttention:
        return MultiHeadAttention(num_heads, features, **(options | fixed))

    return make


def _llama(
    config: Config,
    *,
    window: Callable[[Config, int], int | None] = lambda config, layer: None,
    rotary: Callable[[Config, str], Rotary] = _rotary,
    zero_centered: bool = False,
    normalize_qk: bool = False,
    **attention: Any,
) -> dict[str, Any]:
    """Returns the arguments of `DecoderOnly` for Llama, and for most of its successors.

    `window(config, layer)` is the number of tokens in a layer's window, with the query's own, or
    None; `rotary(config, kind)` the rotary embedding. `attention` are options of the attention.
    """
    D, N, L = (config(x) for x in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    H, epsilon = config("head_dim", D // N), config("rms_norm_eps", 1e-6)
    norm = functools.partial(RMSNorm, zero_centered=zero_centered)
    if normalize_qk:
        attention["normalize_qk"] = functools.partial(norm, epsilon=epsilon)
    has_bias = config("attention_bias", False)
    attention.setdefault("use_bias", has_bias)
    layers = []
    for layer in range(L):
        tokens = window(config, layer)
        kind = "full_attention" if tokens is None else "sliding_attention"
        layer_options = {
            "rotary": rotary(config, kind),
            "mask": None if tokens is None else Window(left=tokens - 1),
            "sinks": f"model.layers.{layer}.self_attn.sinks" in config.tensors,
        }
        layers.append(_attention(**attention, **layer_options))
    return {
        "vocabulary": config("vocab_size"),
        "features": D,
        "num_heads": N,
        "num_kv_heads": config("num_key_value_heads", N),
        "head_dim": H,
        "feed_forward": config("intermediate_size"),
        "num_layers": L,
        "positions": None,
        "self_attention": layers,
        "normalization": norm,
        "norm_epsilon": epsilon,
        "activation": config.activation("silu", "hidden_act"),
        "gated": True,
        "use_bias": config("mlp_bias", False),
        "logits_bias": False,
        "tie_embeddings": config("tie_word_embeddings", False),
        "scale_embeddings": False,
    }


def _gemma(config: Config, **options: Any) -> dict[str, Any]:
    """Returns the arguments of `DecoderOnly` for the first Gemma; `options` are those of
    `_llama`."""
    config.expect(use_bidirectional_attention=False)
    tanh = "gelu_pytorch_tanh"  # which the first files call "gelu"
    return _llama(config, zero_centered=True, **options) | {
        "activation": config.activation(tanh, "hidden_act", "hidden_activation", gelu=tanh),
        "tie_embeddings": config("tie_word_embeddings", True),
        "scale_embeddings": True,
    }


def _gemma2(config: Config, cap: float | None = 30.0, **options: Any) -> dict[str, Any]:
    """Returns the arguments for Gemma 2; `cap` is the default soft cap of logits."""
    scale = config("query_pre_attn_scalar", 256) ** -0.5
    cap = config.nullable("final_logit_softcapping", cap)
    return _gemma(config, scale=scale, **options) | {"norm": "sandwich", "logit_cap": cap}


def _capped_gemma2(config: Config) -> dict[str, Any]:
    cap = config.nullable("attn_logit_softcapping", 50.0)
    return _gemma2(config, window=_gemma2_window, score=None if cap is None else SoftCap(cap))


def _gemma3(config: Config) -> dict[str, Any]:
    """Returns the arguments for Gemma 3, of its text model."""
    config.expect(attn_logit_softcapping=None)
    options: Any = {"window": _gemma3_window, "rotary": _gemma3_rotary, "normalize_qk": True}
    return _gemma2(config, cap=None, **options)


def _gemma3_rotary(config: Config, kind: str) -> Rotary:
    full = _rotary(config, "full_attention", 1e6)
    local = _rotary(config, "sliding_attention", base_name="rope_local_base_freq")
    return full if kind == "full_attention" else local


def _window_by_kind(config: Config, layer: int, is_sliding: bool) -> int | None:
    """Returns the window of a layer, whose kind is in `layer_types` or else `is_sliding`."""
    names = {True: "sliding_attention", False: "full_attention"}
    kinds, window = config("layer_types", None), config.nullable("sliding_window", 4096)
    L = config("num_hidden_layers")
    if kinds is not None and not (isinstance(kinds, list) and len(kinds) == L):
        raise ValueError(f"config.json: expected layer_types with {L} kinds, got {kinds!r}")
    kind = names[is_sliding] if kinds is None else kinds[layer]
    if kind not in names.values():
        raise NotImplementedError(f"config.json: layer_types with {kind!r} are not supported")
    return window if kind == "sliding_attention" else None


def _qwen_window(config: Config, layer: int) -> int | None:
    begin = config("max_window_layers", 28)
    if not config("use_sliding_window", False):
        config.used.add("sliding_window")
        config.expect(layer_types=["full_attention"] * config("num_hidden_layers"))
        return None
    return _window_by_kind(config, layer, layer >= begin)


def _gemma3_window(config: Config, layer: int) -> int | None:
    pattern = config("sliding_window_pattern", 6)
    return _window_by_kind(config, layer, (layer + 1) % pattern > 0)


def _mistral_window(config: Config, layer: int) -> int | None:
    return config.nullable("sliding_window", 4096)


def _gemma2_window(config: Config, layer: int) -> int | None:
    return _window_by_kind(config, layer, layer % 2 == 0)


def _gpt2(config: Config) -> dict[str, Any]:
    """Returns the arguments of `DecoderOnly` for GPT-2."""
    D, N, L = (config(x) for x in ("n_embd", "n_head", "n_layer"))
    config.expect(add_cross_attention=False)
    scale = (D // N) ** -0.5 if config("scale_attn_weights", True) else 1.0
    by_depth = config("scale_attn_by_inverse_layer_idx", False)
    return {
        "vocabulary": config("vocab_size"),
        "features": D,
        "num_heads": N,
        "feed_forward": config("n_inner", 4 * D),
        "num_layers": L,
        "max_length": config("n_positions"),
        "positions": "learned",
        "self_attention": [
            _attention(scale=scale / (layer + 1 if by_depth else 1)) for layer in range(L)
        ],
        "norm_epsilon": config("layer_norm_epsilon", 1e-5),
        "activation": config.activation("gelu_new", "activation_function"),
        "logits_bias": False,
        "tie_embeddings": config("tie_word_embeddings", True),
        "scale_embeddings": False,
    }


def _marian(config: Config) -> dict[str, Any]:
    """Returns the arguments of `Transformer` for Marian."""
    config.expect(
        decoder_attention_heads=config("encoder_attention_heads"),
        decoder_ffn_dim=config("encoder_ffn_dim"),
        static_position_embeddings=True,
        normalize_before=False,
        normalize_embedding=False,
        add_final_layer_norm=False,
        add_bias_logits=False,
        is_decoder=False,
        tie_word_embeddings=True,
    )
    vocabulary, D = config("vocab_size"), config("d_model")
    config("max_position_embeddings", None)  # sinusoids have no greatest position
    return {
        "source_vocabulary": vocabulary,
        "target_vocabulary": config("decoder_vocab_size", vocabulary),
        "features": D,
        "num_heads": config("encoder_attention_heads"),
        "feed_forward": config("encoder_ffn_dim"),
        "encoder_layers": config("encoder_layers"),
        "decoder_layers": config("decoder_layers"),
        "positions": SinusoidalPositions(D, style="half"),
        "tie_embeddings": "all" if config("share_encoder_decoder_embeddings", True) else True,
        "scale_embeddings": config("scale_embedding", False),
        "logits_bias": True,
        "norm_epsilon": 1e-5,
        "activation": config.activation("gelu", "activation_function"),
    }


_PROJECTIONS = {"query": "q_proj", "key": "k_proj", "value": "v_proj"}


def _in_layers(ours: str, theirs: str, names: Mapping[str, str]) -> dict[str, str]:
    """Returns the names of the modules of layers."""
    return {f"{ours}/*/{name}": f"{theirs}.*.{module}" for name, module in names.items()}


def _attention_names(ours: str, theirs: str, out: str) -> dict[str, str]:
    """Returns the names of the projections of an attention module."""
    projections = _PROJECTIONS | {"out": out}
    return {f"{ours}/{name}": f"{theirs}.{module}" for name, module in projections.items()}


_LLAMA_LAYER = {
    "self_attention": "self_attn",
    **_attention_names("self_attention", "self_attn", "o_proj"),
    "self_attention/query_ln": "self_attn.q_norm",
    "self_attention/key_ln": "self_attn.k_norm",
    "self_attention_residual/norm": "input_layernorm",
    "feed_forward/gate": "mlp.gate_proj",
    "feed_forward/hidden": "mlp.up_proj",
    "feed_forward/out": "mlp.down_proj",
    "feed_forward_residual/norm": "post_attention_layernorm",
}
_LLAMA_NAMES = {
    "tokens": "model.embed_tokens",
    "norm": "model.norm",
    "output": "lm_head",
    **_in_layers("layers", "model.layers", _LLAMA_LAYER),
}
_GEMMA2_LAYER = {
    "self_attention_residual/output_norm": "post_attention_layernorm",
    "feed_forward_residual/norm": "pre_feedforward_layernorm",
    "feed_forward_residual/output_norm": "post_feedforward_layernorm",
}
_GEMMA2_NAMES = _LLAMA_NAMES | _in_layers("layers", "model.layers", _GEMMA2_LAYER)
# `name#i` is part i of the three parts of a tensor: of queries, of keys and of values.
_GPT2_LAYER = {
    **{f"self_attention/{name}": f"attn.c_attn#{i}" for i, name in enumerate(_PROJECTIONS)},
    "self_attention/out": "attn.c_proj",
    "self_attention_residual/norm": "ln_1",
    "feed_forward/hidden": "mlp.c_fc",
    "feed_forward/out": "mlp.c_proj",
    "feed_forward_residual/norm": "ln_2",
}
_GPT2_NAMES = {
    "tokens": "transformer.wte",
    "positions": "transformer.wpe",
    "norm": "transformer.ln_f",
    "output": "lm_head",
    **_in_layers("layers", "transformer.h", _GPT2_LAYER),
}


def _marian_names(stack: str, sublayers: Mapping[str, str]) -> dict[str, str]:
    names = {"feed_forward/hidden": "fc1", "feed_forward/out": "fc2"}
    names["feed_forward_residual/norm"] = "final_layer_norm"
    for ours, theirs in sublayers.items():
        names |= _attention_names(ours, theirs, "out_proj")
        names[f"{ours}_residual/norm"] = f"{theirs}_layer_norm"
    return _in_layers(f"{stack}/layers", f"model.{stack}.layers", names)


_MARIAN_NAMES = {
    "source_tokens": "model.encoder.embed_tokens|model.shared",
    "target_tokens": "model.decoder.embed_tokens|model.shared",
    "target_tokens/bias": "final_logits_bias",
    **_marian_names("encoder", {"self_attention": "self_attn"}),
    **_marian_names("decoder", {"self_attention": "self_attn", "cross_attention": "encoder_attn"}),
}


@dataclasses.dataclass(frozen=True)
class Family:
    """A family of models.

    model: the name of the class of jattn.nn.
    arguments: returns the arguments of the class's constructor.
    names: the modules of tensors by those of parameters, with `*` for the number of a layer.
    prefix: the beginning of all names of tensors but the output projection's.
    transposed: whether matrices are `[out, in]`, as in PyTorch's linear layers.
    """

    model: str
    arguments: Callable[[Config], dict[str, Any]]
    names: Mapping[str, str]
    prefix: str = "model."
    transposed: bool = True


def _llama_family(**options: Any) -> Family:
    return Family("DecoderOnly", functools.partial(_llama, **options), _LLAMA_NAMES)


FAMILIES: dict[str, Family] = {
    "llama": _llama_family(),
    "mistral": _llama_family(window=_mistral_window),
    "qwen2": _llama_family(use_bias="qkv", window=_qwen_window),
    "qwen3": _llama_family(normalize_qk=True, window=_qwen_window),
    "gemma": Family("DecoderOnly", _gemma, _LLAMA_NAMES),
    "gemma2": Family("DecoderOnly", _capped_gemma2, _GEMMA2_NAMES),
    "gemma3_text": Family("DecoderOnly", _gemma3, _GEMMA2_NAMES),
    "gpt2": Family("DecoderOnly", _gpt2, _GPT2_NAMES, "transformer.", transposed=False),
    "marian": Family("Transformer", _marian, _MARIAN_NAMES),
}
"""The families by the `model_type` of a config."""
