"""Weights of trained models: the logits of the transformers library, in golden files, for calls and
for steps. `tests/pretrained.py` describes the models."""

import functools
import importlib
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jattn import masks, nn
from jattn.cache import DenseCache, RollingCache
from tests import pretrained
from tests.conftest import expect
from tests.devices import mesh_of
from tests.pretrained import CASES, WINDOW, PretrainedCase, T


pytest.importorskip("safetensors")
safetensors: Any = importlib.import_module("safetensors.numpy")
pytestmark = pytest.mark.usefixtures("quick_compilation")
TOLERANCE: Any = {"rtol": 0, "atol": 1e-4}
PADDING = masks.Lengths(kv=np.array(pretrained.SOURCE_LENGTHS))


def some_slow(names: Any, slow: str) -> list[Any]:
    """Marks some parameters of a test as slow."""
    return [pytest.param(x, marks=pytest.mark.slow if x in slow.split() else ()) for x in names]


def saved(folder: Path, config: Any, tensors: dict[str, np.ndarray]) -> Path:
    """Writes a folder of a model."""
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    safetensors.save_file(tensors, folder / "model.safetensors")
    return folder


def golden_folder(folder: Path, name: str, **config: Any) -> Path:
    """Writes the folder of a golden file, with other options in its config."""
    options, tensors, _ = pretrained.golden(name)
    return saved(folder, options | config, tensors)


def loaded(folder: Path, case: PretrainedCase, **options: Any) -> Any:
    if case.prefix == "Marian":
        return nn.Transformer.from_safetensors(folder, **options)
    return nn.DecoderOnly.from_safetensors(folder, length=case.length, **options)


@nnx.jit
def logits(model: Any, ids: dict[str, Any]) -> Any:
    run: Any = {"deterministic": True}
    if "source" in ids:
        run |= {"source_mask": PADDING, "cross_mask": PADDING}
        return model(ids["source"], ids["tokens"], **run)
    return model(ids["tokens"], **run)


def ids_of(arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    return {name: jnp.asarray(x) for name, x in arrays.items() if name != "logits"}


STEPS = ((0, 6), (6, 9), *((n, n + 1) for n in range(9, T)))


@functools.partial(nnx.jit, static_argnums=1)
def begun(model: Any, kind: Any, source: Any) -> list[Any]:
    """Caches for steps of at most 6 tokens; rolling ones for the layers with windows."""
    if source is not None:
        memory = model.encode(source, mask=PADDING, deterministic=True)
        return model.decoder.start(memory, T, memory_lengths=jnp.array(pretrained.SOURCE_LENGTHS))
    if kind is DenseCache:
        return model.start(2, T)
    attentions = [layer.self_attention for layer in model.layers]
    return [
        x.empty_cache(2, T) if x.mask is None else x.empty_cache(2, WINDOW - 1, kind, chunk=6)
        for x in attentions
    ]


def assert_steps_equal(model: Any, kind: Any, ids: dict[str, Any], expected: np.ndarray) -> None:
    """A prompt of 6 tokens, then 3 tokens, then single ones, far past the window."""
    caches = begun(model, kind, ids.get("source"))
    run_step = nnx.jit(lambda m, x, c: m.step(x, c, deterministic=True))
    for begin, end in STEPS:
        out, caches = run_step(model, ids["tokens"][:, begin:end], caches)
        np.testing.assert_allclose(out, expected[:, begin:end], **TOLERANCE)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", some_slow(CASES, "llama gpt2_untied"))
def test_logits_of_golden_files(name, tmp_path):
    _, _, arrays = pretrained.golden(name)
    model = loaded(golden_folder(tmp_path, name), CASES[name])
    assert np.std(arrays["logits"]) > 1
    np.testing.assert_allclose(logits(model, ids_of(arrays)), arrays["logits"], **TOLERANCE)
    if name == "marian":
        assert_steps_equal(model, None, ids_of(arrays), arrays["logits"])


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("mistral", RollingCache),
        ("gemma3", DenseCache),
        pytest.param("llama_sinks", DenseCache, marks=pytest.mark.slow),
        pytest.param("gemma2", RollingCache, marks=pytest.mark.slow),
    ],
)
def test_steps_past_windows(name, kind, tmp_path):
    _, _, arrays = pretrained.golden(name)
    model = loaded(golden_folder(tmp_path, name), CASES[name])
    assert_steps_equal(model, kind, ids_of(arrays), arrays["logits"])


OLDER: dict[str, tuple[str, dict[str, Any]]] = {
    "rope_scaling": (
        "llama",
        {"rope_parameters": None, "rope_theta": 100.0, "torch_dtype": "float32"}
        | {"rope_scaling": {k: v for k, v in pretrained.LLAMA3.items() if k != "rope_theta"}},
    ),
    "type": (
        "llama_biases",
        {"rope_parameters": None, "rope_theta": 100.0}
        | {"rope_scaling": {"type": "yarn", "factor": 4.0, "beta_fast": 8.0}}
        | {"max_position_embeddings": 64},
    ),
    "gemma 1": ("gemma", {"hidden_act": "gelu"}),
    "gemma 2": ("gemma2", {"layer_types": None, "rope_parameters": None, "rope_theta": 10000.0}),
    "gemma 3": (
        "gemma3",
        {"layer_types": None, "sliding_window_pattern": 2, "rope_parameters": None}
        | {"rope_theta": 100.0, "rope_scaling": {"rope_type": "linear", "factor": 2.5}}
        | {"rope_local_base_freq": 50.0},
    ),
    "qwen 2": ("qwen2", {"layer_types": None}),
}


def structure(model: Any) -> Any:
    """The parts of a model that a config decides and no tensor shows."""
    layers = [(x.self_attention.rotary, x.self_attention.mask) for x in model.layers]
    activations = [layer.feed_forward.activation for layer in model.layers]
    return [(rotary, mask and mask()) for rotary, mask in layers], activations


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", some_slow(OLDER, "rope_scaling"))
def test_older_configs(name, tmp_path):
    """The options of earlier versions of the transformers library."""
    case, options = OLDER[name]
    newer = loaded(golden_folder(tmp_path, case), CASES[case])
    older = loaded(golden_folder(tmp_path, case, **options), CASES[case])
    assert structure(older) == structure(newer)


def test_other_files_with_the_same_tensors(tmp_path):
    """Several files, tensors of old files, a tied matrix of its own, names without a prefix."""
    config, tensors, _ = pretrained.golden("gpt2")
    expected = nnx.state(nn.DecoderOnly.from_safetensors(saved(tmp_path, config, tensors)))
    (tmp_path / "model.safetensors").unlink()
    bare = {name.removeprefix("transformer."): x for name, x in tensors.items()}
    bare["h.0.attn.bias"] = np.ones((1, 1, T, T), np.float32)
    bare["lm_head.weight"] = bare["wte.weight"]
    names = sorted(bare)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        safetensors.save_file({name: bare[name] for name in part}, tmp_path / file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
    times = {x: x.stat().st_mtime_ns for x in tmp_path.iterdir()}
    model = nn.DecoderOnly.from_safetensors(str(tmp_path))
    assert times == {x: x.stat().st_mtime_ns for x in tmp_path.iterdir()}
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model), expected)
    (tmp_path / "b.safetensors").unlink()
    refused(FileNotFoundError, "b.safetensors: this file of the index", tmp_path)
    in_a = dict.fromkeys([*parts["a.safetensors"], "x"], "a.safetensors")
    index.write_text(json.dumps({"weight_map": in_a}))
    refused(ValueError, "x are not in their files", tmp_path)


def test_half_precision(tmp_path):
    config, tensors, arrays = pretrained.golden("gemma2")
    saved(tmp_path, config, {name: x.astype(jnp.float16) for name, x in tensors.items()})
    model = nn.DecoderOnly.from_safetensors(tmp_path)
    assert {x.dtype.name for x in jax.tree.leaves(nnx.state(model))} == {"float16"}
    out = logits(model, ids_of(arrays))
    assert out.dtype.name == "float16"
    assert np.abs(np.asarray(out, np.float32) - arrays["logits"]).max() < 0.06
    wide = nn.DecoderOnly.from_safetensors(tmp_path, dtype="float32")
    assert {x.dtype.name for x in jax.tree.leaves(nnx.state(wide))} == {"float32"}


def rope(kind: str, **options: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, **options}}


def test_parameters_on_a_mesh(tmp_path):
    """Parameters have their logical axes, and go to a mesh by them."""
    golden_folder(tmp_path, "qwen2")
    mesh = mesh_of(model=2)
    rules = {name: None for name in nn.LOGICAL_AXES} | {"heads": "model", "mlp": "model"}
    with nnx.logical_axis_rules(list(rules.items())):
        model = nn.DecoderOnly.from_safetensors(tmp_path, mesh=mesh)
    attention: Any = model.layers[0].self_attention
    kernel = attention.query.kernel
    assert kernel.get_metadata()["out_sharding"] == ("embed", "heads", "head_size")
    assert kernel[...].sharding.spec == jax.P(None, "model", None)
    refused(ValueError, "mesh: | nnx.logical_axis_rules", tmp_path, mesh=mesh)


YARN: dict[str, Any] = rope("yarn", factor=4.0) | {"max_position_embeddings": None}
BOTH_ROPES = {"rope_scaling": {"type": "linear", "factor": 2.0}, **rope("default", rope_theta=1e4)}


WRONG_CONFIGS = [
    ({"model_type": "marian"}, r"is an nn\.Transformer; call nn\.Transformer"),
    ({"vocab_size": None}, "expected the option vocab_size"),
    (rope("linear"), "expected the rotary option factor"),
    (rope("dynamic", factor=2), "^length:"),
    (YARN, "expected the option max_position_embeddings"),
    ({"hidden_size": "16"}, "config.json: hidden_size: expected an integer >= 1, got str"),
    ({"num_attention_heads": 0}, "config.json: num_attention_heads: expected .* >= 1, got 0"),
    ({"num_hidden_layers": -1}, "config.json: num_hidden_layers: expected .* >= 1, got -1"),
    ({"rms_norm_eps": "1e-5"}, "config.json: rms_norm_eps: expected a number .* got '1e-5'"),
    ({"rope_parameters": "a"}, "an option has a wrong value"),
    ({"rope_parameters": None, "rope_theta": "a"}, "config.json: rope_theta: .* got 'a'"),
    (rope("default", rope_theta="a"), "config.json: rope_theta: expected a number .* got 'a'"),
    (rope("linear", factor=-1), "config.json: factor: expected a finite number > 0, got -1"),
    (rope("yarn", factor=4.0, attention_factor="a"), "attention_factor: expected .* got 'a'"),
    ({"model_type": "mistral", "sliding_window": 0}, "config.json: sliding_window: .* got 0"),
    (BOTH_ROPES, "expected one of rope_parameters and rope_scaling, got both"),
    ({"attention_bias": True}, r"missing model\.layers\.0\.self_attn\.k_pro"),
    ({"num_hidden_layers": 1}, r"unexpected model\.layers\.1\.input_la"),
    ({"intermediate_size": 21}, r"layers.0.mlp.\w+.weight: expected shape \[2"),
    ({"tie_word_embeddings": True}, r"missing none; unexpected lm_head\.weight"),
]
WRONG_KINDS = (["full_attention"], ["full_attention"] * 9, "full_attention")
UNSUPPORTED = [
    ("llama", {"model_type": "gpt_oss"}, r"model_type 'gpt_oss' is not .* llama"),
    ("llama", {"model_type": []}, r"model_type \[\] is not supported"),
    ("llama", {"gate_scale": 2}, r"\{'gate_scale': 2\} .*ignored=\['gate_sc"),
    ("llama", {"partial_rotary_factor": 0.5}, r"ignored=\['partial_rotary_factor'\]"),
    ("llama", rope("default", partial_rotary_factor=0.5), r"\{'partial_rotary_factor': 0.5\}"),
    ("llama", {"hidden_act": "xielu"}, "'xielu'} is not supported"),
    ("llama", rope("longrope"), "rotary scaling 'longrope' is not supported"),
    ("llama", rope("linear", factor=2.0, mrope_section=[1]), "{'mrope_section': .* are not"),
    ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention=True is not supported"),
    ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
    ("gemma3", {"attn_logit_softcapping": 5.0}, "attn_logit_softcapping=5.0 is not supported"),
    ("qwen2", {"layer_types": ["chunked_attention"] * 3}, "'chunked_attention' are not"),
    ("qwen2", {"use_sliding_window": False}, "layer_types=.* is not supported"),
    ("marian", {"decoder_ffn_dim": 7}, "decoder_ffn_dim=7 is not supported, only 20"),
    ("marian", {"normalize_embedding": True}, "normalize_embedding=True is not supported"),
]


def refused(error: type[Exception], says: str, folder: Any, **options: Any) -> None:
    expect(error, says, nn.DecoderOnly.from_safetensors, folder, **options)


def test_configs_that_do_not_fit_or_are_not_supported(tmp_path):
    for error, name, options, message in (
        *((ValueError, "llama", *row) for row in WRONG_CONFIGS),
        *((ValueError, "gemma3", {"layer_types": x}, "layer_types with") for x in WRONG_KINDS),
        *((NotImplementedError, *row) for row in UNSUPPORTED),
    ):
        with pytest.raises(error, match=message):
            loaded(golden_folder(tmp_path, name, **options), CASES[name])


def test_options_can_be_ignored(tmp_path):
    golden_folder(tmp_path, "llama", note="a name", other=None)
    refused(NotImplementedError, "note", tmp_path)
    nn.DecoderOnly.from_safetensors(tmp_path, ignored=["note"])
    says = "ignored: expected a list of names, got 'note'"
    refused(TypeError, says, tmp_path, ignored="note")


def test_no_window_where_its_size_is_null(tmp_path):
    folder = golden_folder(tmp_path, "qwen2", layer_types=None, sliding_window=None)
    model = nn.DecoderOnly.from_safetensors(folder)
    assert not any(layer.self_attention.mask for layer in model.layers)


def test_an_index_names_files_of_its_folder(tmp_path):
    folder = golden_folder(tmp_path, "llama")
    (folder / "model.safetensors").unlink()
    index = folder / "model.safetensors.index.json"
    for weights in (None, [], {"x": 3}, {"x": "../x.safetensors"}, {"x": ""}):
        index.write_text(json.dumps({"weight_map": weights}))
        refused(ValueError, "index.json: expected weight_map with names of files", folder)


def test_numbers_that_do_not_fit_are_refused(tmp_path):
    folder, (config, tensors, _) = golden_folder(tmp_path, "llama"), pretrained.golden("llama")
    norm = tensors["model.norm.weight"].astype(np.float32)
    extra = {"model.embeddings.position_ids": np.arange(3)[None]}  # a constant of old files
    saved(folder, config, tensors | extra | {"model.norm.weight": norm * 1e6})
    nn.DecoderOnly.from_safetensors(folder)
    refused(ValueError, "model.norm.weight: | fit float16", folder, dtype=jnp.float16)


def test_damaged_files(tmp_path):
    refused(FileNotFoundError, "expected a folder, found none at meta/llama", "meta/llama")
    folder = golden_folder(tmp_path, "gpt2")
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for damaged in (b"", whole[:5], whole[:-1], b"\xff" * 64):
        file.write_bytes(damaged)
        refused(ValueError, "model.safetensors: not a whole safetensors file", folder)
    file.write_text("version https://git-lfs.github.com/spec/v1\n")
    refused(ValueError, "it is a pointer of Git LFS", folder)
    config, tensors, _ = pretrained.golden("gpt2")
    saved(folder, config, tensors | {"transformer.ln_f.bias": np.zeros(24, np.int8)})
    refused(NotImplementedError, "ln_f.bias: expected a dtype of | got I8", folder)
    file.rename(folder / "pytorch_model.bin")
    refused(FileNotFoundError, "expected model.safetensors or | pytorch_model", folder)
    for text, says in (("{", "not valid JSON"), ("[]", "expected a JSON obje")):
        (folder / "config.json").write_text(text)
        refused(ValueError, f"config.json: {says}", folder)


def test_wrong_options_of_layers(unchecked):
    sizes = {"features": 4, "num_heads": 1, "feed_forward": 4, "num_layers": 2}
    make: Any = functools.partial(nn.DecoderOnly, 5, **sizes, rngs=nnx.Rngs(0))
    says, layers = "one function for each of 2 layers, got 1", [nn.MultiHeadAttention]
    expect(ValueError, says, make, self_attention=layers)
    expect(ValueError, "normalization: expected", make, normalization="batch")
    expect(ValueError, "logit_cap: expected", make, logit_cap=0.0)
    expect(ValueError, "norm: expected", make, norm="both")


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", CASES)
def test_logits_of_the_transformers_library(name, tmp_path):
    """Folders that the library writes, in several files; and the golden file is what it gives."""
    transformers: Any = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    case, theirs = CASES[name], pretrained.transformers_model(CASES[name])
    expected = pretrained.transformers_logits(case, theirs)
    theirs.save_pretrained(tmp_path, max_shard_size="9KB")
    assert not (tmp_path / "model.safetensors").exists()
    np.testing.assert_allclose(pretrained.golden(name)[2]["logits"], expected, **TOLERANCE)
    ours = loaded(tmp_path, case)
    ids = ids_of(pretrained.tokens(case))
    np.testing.assert_allclose(logits(ours, ids), expected, **TOLERANCE)
    assert_steps_equal(ours, DenseCache, ids, expected)
