"""Small models with random weights in the layouts of the Hugging Face hub, and their logits.

`python -m tests.pretrained` writes `tests/golden/pretrained/*.npz` by the transformers library: the
config, the shapes of the tensors, tokens and logits. Their tensors come from NumPy, by name.
"""

import dataclasses
import importlib
import json
import math
import shutil
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np


GOLDEN = Path(__file__).parent / "golden" / "pretrained"
V, D, N, K, H, T, S = 37, 24, 4, 2, 8, 13, 7
WINDOW = 4
SOURCE_LENGTHS = (7, 4)

_TOKENS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2}
_SIZES = {"vocab_size": V, "hidden_size": D, "num_attention_heads": N, "num_key_value_heads": K}
_SIZES |= {"head_dim": H, "intermediate_size": 20, "num_hidden_layers": 2}
_SIZES |= {"max_position_embeddings": 256, "pad_token_id": 0, **_TOKENS}
_SIDES = {"layers": 2, "attention_heads": N, "ffn_dim": 20}
_MARIAN = {f"{side}_{x}": n for side in ("encoder", "decoder") for x, n in _SIDES.items()}
_MARIAN |= {"vocab_size": V, "d_model": D, "max_position_embeddings": 16, "pad_token_id": 0}
_MARIAN |= {"decoder_start_token_id": 0, "activation_function": "swish"}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64, "rope_theta": 100.0}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
_YARN |= {"rope_theta": 100.0, "beta_fast": 8.0}
_LINEAR = {"rope_type": "linear", "factor": 2.5, "rope_theta": 100.0}
_GEMMA_ROTARY = {"full_attention": _LINEAR, "sliding_attention": {"rope_theta": 50.0}}
_GEMMA_ROTARY["sliding_attention"]["rope_type"] = "default"
_DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0}


@dataclasses.dataclass(frozen=True)
class PretrainedCase:
    """A model of the transformers library.

    prefix: the beginning of its class names.
    config: the options that differ from those of all cases of the prefix.
    windows: whether every layer has a window.
    length: the argument of `from_safetensors`.
    sinks: whether the attention has sinks, by the formula of gpt-oss.
    """

    prefix: str
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    windows: bool = False
    length: int | None = None
    sinks: bool = False

    @property
    def options(self) -> dict[str, Any]:
        if self.prefix == "GPT2":
            sizes = {"vocab_size": V, "n_embd": D, "n_head": N, "n_layer": 2, "n_positions": T}
            return sizes | _TOKENS | self.config
        return (_MARIAN if self.prefix == "Marian" else _SIZES) | self.config


CASES: dict[str, PretrainedCase] = {
    "llama": PretrainedCase("Llama", {"rope_parameters": {**LLAMA3}}),
    "llama_biases": PretrainedCase(
        "Llama",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
        | {"hidden_act": "gelu", "rms_norm_eps": 0.1, "rope_parameters": {**_YARN}},
    ),
    "llama_dynamic": PretrainedCase(
        "Llama", {"rope_parameters": {**_DYNAMIC}, "max_position_embeddings": 8}, length=T
    ),
    "llama_sinks": PretrainedCase(
        "Llama",
        {"rope_parameters": {**_YARN, "truncate": False, "attention_factor": 1.5}},
        sinks=True,
    ),
    "mistral": PretrainedCase("Mistral", {"sliding_window": WINDOW}, windows=True),
    "mistral_full": PretrainedCase("Mistral", {"sliding_window": None}),
    "qwen2": PretrainedCase(
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
        | {"num_hidden_layers": 3, "tie_word_embeddings": True, "head_dim": D // N},
    ),
    "qwen3": PretrainedCase("Qwen3", {"rms_norm_eps": 0.05, "rope_parameters": {**_YARN}}),
    "gemma": PretrainedCase("Gemma", {"num_key_value_heads": 1, "rms_norm_eps": 0.05}),
    "gemma2": PretrainedCase(
        "Gemma2",
        {"sliding_window": WINDOW, "query_pre_attn_scalar": 5, "attn_logit_softcapping": 3.0}
        | {"final_logit_softcapping": 2.0, "rms_norm_eps": 0.05},
    ),
    "gemma3": PretrainedCase(
        "Gemma3",
        {"sliding_window": WINDOW, "query_pre_attn_scalar": 5, "num_hidden_layers": 3}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
        | {"rope_parameters": _GEMMA_ROTARY, "rms_norm_eps": 0.05},
    ),
    "gpt2": PretrainedCase("GPT2", {"scale_attn_by_inverse_layer_idx": True}),
    "gpt2_untied": PretrainedCase(
        "GPT2", {"tie_word_embeddings": False, "n_inner": 20, "scale_attn_weights": False}
    ),
    "marian": PretrainedCase("Marian", {"scale_embedding": True}),
    "marian_separate": PretrainedCase(
        "Marian",
        {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": V + 4}
        | {"activation_function": "gelu"},
    ),
}


def random_tensor(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """A float32 tensor that depends on its name and shape only."""
    x = np.random.default_rng(zlib.crc32(name.encode())).normal(size=shape)
    if len(shape) == 1:
        x = 0.3 * x + name.endswith("weight")
    else:
        is_embedding = any(word in name for word in ("embed", "shared", "wte"))
        x = x * (0.4 if is_embedding else 1.5 / math.sqrt(max(shape)))
    return x.astype(np.float32)


def tokens(case: PretrainedCase) -> dict[str, np.ndarray]:
    """Token ids `[2, T]`, and those of the source of an encoder-decoder."""
    rng = np.random.default_rng(5)
    ids = {"tokens": rng.integers(3, V, (2, T))}
    return ids | ({"source": rng.integers(3, V, (2, S))} if case.prefix == "Marian" else {})


def imported(*names: str) -> list[Any]:
    """Modules of libraries that the quick tests do without."""
    return [importlib.import_module(name) for name in names]


def transformers_model(case: PretrainedCase) -> Any:
    """The model of the transformers library, with tensors of `random_tensor`."""
    torch, transformers = imported("torch", "transformers")
    text = "Text" if case.prefix == "Gemma3" else ""
    head = {"Marian": "MTModel", "GPT2": "LMHeadModel"}.get(case.prefix, "ForCausalLM")
    config = getattr(transformers, f"{case.prefix}{text}Config")(**case.options)
    config._attn_implementation = "eager"
    model = getattr(transformers, case.prefix + head)(config).eval()
    if case.sinks:
        for layer in model.model.layers:
            layer.self_attn.sinks = torch.nn.Parameter(torch.zeros(N))
    with torch.no_grad():
        tensors = {**dict(model.named_buffers()), **dict(model.named_parameters())}
        for name in tensors.keys() & model.state_dict().keys():  # tied ones under one name
            if "embed_positions" not in name:
                shape = tuple(tensors[name].shape)
                tensors[name].copy_(torch.from_numpy(random_tensor(name, shape)))
    return model


def transformers_logits(case: PretrainedCase, model: Any) -> np.ndarray:
    """The logits of whole sequences `[2, T, vocabulary]`."""
    names = (f"transformers.models.{x}.modeling_{x}" for x in ("gpt_oss", "llama"))
    torch, modeling_gpt_oss, modeling_llama = imported("torch", *names)
    ids = {name: torch.from_numpy(x) for name, x in tokens(case).items()}
    arguments = {"input_ids": ids["tokens"]}
    if "source" in ids:
        padding = torch.arange(S)[None] < torch.tensor(SOURCE_LENGTHS)[:, None]
        arguments = {"input_ids": ids["source"], "decoder_input_ids": ids["tokens"]}
        arguments["attention_mask"] = padding.long()
    usual = modeling_llama.eager_attention_forward
    if case.sinks:
        modeling_llama.eager_attention_forward = modeling_gpt_oss.eager_attention_forward
    try:
        with torch.no_grad():
            return model(**arguments).logits.numpy()
    finally:
        modeling_llama.eager_attention_forward = usual


def golden(name: str) -> tuple[dict[str, Any], dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The config, the tensors, and the tokens and logits of a golden file."""
    with np.load(GOLDEN / f"{name}.npz") as file:
        arrays = dict(file)
    config, shapes = (json.loads(str(arrays.pop(x))) for x in ("config", "shapes"))
    return config, {x: random_tensor(x, tuple(y)) for x, y in shapes.items()}, arrays


def write_golden(name: str, folder: Path) -> None:
    """Writes a golden file; `folder` is for temporary files."""
    (safetensors,) = imported("safetensors.numpy")
    case = CASES[name]
    model = transformers_model(case)
    model.save_pretrained(folder)
    saved = safetensors.load_file(folder / "model.safetensors")
    shapes = {x: y.shape for x, y in saved.items()}
    assert all(np.array_equal(y, random_tensor(x, y.shape)) for x, y in saved.items())
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    texts = {"config": json.dumps(config), "shapes": json.dumps(shapes)}
    logits = transformers_logits(case, model)
    arrays: dict[str, Any] = {**texts, **tokens(case), "logits": logits}
    np.savez_compressed(GOLDEN / f"{name}.npz", **arrays)


if __name__ == "__main__":
    for case_name in CASES:
        temporary = Path(tempfile.mkdtemp())
        write_golden(case_name, temporary)
        shutil.rmtree(temporary)
