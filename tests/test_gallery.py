"""The gallery: each variant against its dense formula, the page, the command, and training."""

import dataclasses
import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments.gallery import __main__ as cli
from experiments.gallery import measuring, neighbours, page, training, variants
from experiments.gallery.measuring import Measurement, Times
from experiments.gallery.variant import Language
from experiments.gallery.variants import GROUPS, NAMES, load
from experiments.language.settings import LanguageSettings
from experiments.runs.ending import Failure
from jattn import masks, nn
from tests.test_translation import assert_refused
from tests.test_walkthrough import Reader


pytestmark = [pytest.mark.usefixtures("as_users_run_it"), pytest.mark.default_tiles]
FOLDER = Path(variants.__file__).parent
T = 64
SPARSE = {"squared_relu", "sparsemax", "entmax", "top_k"}  # with weights of 0 for allowed pairs
TRAINABLE = [name for name in NAMES if isinstance(load(name).language, Language)]


@functools.cache
def inputs_of(name):
    return load(name).inputs(jax.random.key(0), T)


def check(variant, inputs):
    """Compares output and gradients with those of the dense formula, and returns these."""
    cotangent = measuring.cotangent_for(variant, inputs)
    both = (variant.attention, variant.dense)
    got, dense = (measuring.results(function, inputs, cotangent) for function in both)
    assert measuring.largest_error(got, dense) < 2e-5
    return dense


@pytest.mark.one_in(9)
@pytest.mark.parametrize("name", NAMES)
def test_a_variant_is_its_dense_formula(name):
    inputs = inputs_of(name)
    dense = check(load(name), inputs)
    floats = {name for name, x in inputs.items() if jnp.issubdtype(x.dtype, jnp.floating)}
    assert dense.keys() == {"out", *floats}
    assert all(float(jnp.max(jnp.abs(x))) > 1e-3 for x in dense.values()), "no input is idle"


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", NAMES)
def test_weights_are_those_of_allowed_pairs(name):
    variant, inputs = load(name), inputs_of(name)
    weights = np.asarray(variant.drawn_weights(inputs))
    assert weights.shape[1] == T and np.isfinite(weights).all()
    weights = weights[:, :, :T]  # without learned keys
    if variant.mask is not None:
        allowed = np.broadcast_to(variant.mask(T).dense(T, T), weights.shape)
        assert 0 < allowed.mean() < 1
        assert not weights[~allowed].any()
        if name not in SPARSE:
            assert (np.abs(weights) > 0)[allowed].mean() > 0.9


def test_every_file_has_its_place_is_short_and_names_formula_and_paper():
    files = {path.stem: path.read_text("utf-8") for path in FOLDER.glob("*.py")}
    assert files.keys() - {"__init__"} == set(NAMES) and len(NAMES) == len(set(NAMES))
    for name in NAMES:
        assert sum(map(bool, files[name].splitlines())) <= 40, name
        variant = load(name)
        assert variant.title and variant.blocks, name
        assert re.search(r"arXiv:|doi:|www\.", variant.paper), name
        assert re.search("201[6-9]|202[0-6]", variant.paper), name


def test_a_wrong_variant_is_noticed():
    inputs = inputs_of("alibi")

    def wrong_gradient(q, **others):
        return load("alibi").attention(2 * q - jax.lax.stop_gradient(q), **others)

    with pytest.raises(Failure, match="the gradient of q differs"):
        check(dataclasses.replace(load("alibi"), attention=wrong_gradient), inputs)
    nan = {name: jnp.full_like(x, jnp.nan) for name, x in inputs.items()}
    with pytest.raises(Failure):
        check(load("alibi"), nan)


def test_neighbourhoods_are_natten_s():
    """Also by hand for window 3 and stride 2 over 5 tokens: leaders are 1, 3 and 4."""
    for window, stride, dilation in ((3, 1, 1), (4, 3, 1), (3, 2, 2), (5, 5, 2)):
        options = {"window": window, "stride": stride, "dilation": dilation}
        allowed = neighbours.allowed((11, 13), **options)
        assert (allowed.sum(axis=1) == window**2).all()
        assert np.array_equal(neighbours.mask((11, 13), **options).dense(11 * 13, 11 * 13), allowed)
    by_hand = [[1, 1, 1, 0, 0]] * 2 + [[0, 0, 1, 1, 1]] * 3
    assert neighbours.allowed((5,), window=3, stride=2).tolist() == by_hand


TIMES = Times(jattn=2.0, dense=5.0, jattn_bytes=30_000, dense_bytes=1_000_000)
MEASURED = Measurement(1e-6, 0.25, {64: TIMES, 128: TIMES}, TIMES)


def test_the_page():
    ratios = {0.0412: "0.041", 2.0: "2.0", 9.96: "10", 12.3: "12", 124: "124"}
    assert {x: page.ratio(Times(1.0, x, 0, 0)) for x in ratios} == ratios
    text = page.written(dict.fromkeys(("alibi", "swin", "latent"), MEASURED))
    read = Reader(text)
    assert not read.open and not set(read.tags) & {"script", "iframe", "object", "link"}
    assert read.names == ["alibi", "swin", "latent"]
    assert read.tags.count("img") == 3
    words = " ".join(read.text.split())
    for shown in ("Scores", "25%", "2.5", "0.03", "scores.Alibi", "arXiv:2103.14030", "def dense"):
        assert shown in words
    assert "Masks" not in words  # none of these is in that group
    assert "<mfrac>" in text


@pytest.mark.slow
def test_the_page_fits_the_window(window, tmp_path):
    path = tmp_path / "index.html"
    path.write_text(page.written({"differential": MEASURED}), encoding="utf-8")
    for width, dark in ((390, True), (1280, False)):
        window.show(width, 900, dark=dark, phone=width < 500)
        window.open(path, ready="true")
        wide = "[...document.querySelectorAll('.table, .formula')].some"
        assert not window.evaluate(f"{wide}(x => x.scrollWidth > x.clientWidth)"), width
        window.assert_fits_and_loads_only(path)


@pytest.mark.slow
def test_the_command_checks_times_and_writes(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(cli, "LENGTHS", (64, 256))
    assert cli.main(["sliding_window", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    (row,) = (line for line in said.splitlines() if line.startswith("sliding_window"))
    assert row.split()[2] == "25%"  # of 2 × 2 tiles of 128 × 128, the upper right one
    assert "<h2>" in (tmp_path / "sliding_window.html").read_text("utf-8")


def test_the_command_reports_differences(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(cli, "LENGTHS", (64,))
    wrong = dataclasses.replace(load("alibi"), attention=load("soft_cap").attention)
    monkeypatch.setattr(cli, "load", lambda name: wrong)
    assert cli.main(["alibi", "--out", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert "FAILED: the output differs from the dense formula by " in said.out + said.err
    assert "these differ from their dense formulas: alibi" in said.err
    assert not list(tmp_path.iterdir())


def test_the_command_says_what_is_wrong_and_which_variants_there_are(capsys):
    for words, message in (
        ("alibbi", "no variant 'alibbi'; nearest: alibi"),
        ("xyz", "no variant 'xyz'; there are alibi, t5"),
        ("--trian", "nearest: --train"),
        ("--train", "expected one variant, got 0"),
        ("swin --train", "swin is no causal language model: pixels attend to later ones"),
        ("alibi --minutes 0", "expected at least 0.001, got 0"),
    ):
        assert_refused(words.split(), message, capsys, cli.main)
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    said = capsys.readouterr().out
    assert all(name in said.split() for name in NAMES)
    assert all(group in said for group in GROUPS)


@pytest.mark.parametrize("options", [[], ["--train"]])
def test_the_command_creates_its_folder_before_it_computes(options, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(cli, "measure", None)
    monkeypatch.setattr(training, "compare", None)
    (tmp_path / "file").touch()
    assert cli.main(["alibi", *options, "--out", str(tmp_path / "file")]) == 1
    said = capsys.readouterr()
    assert not said.out and said.err.endswith("/file could not be written: File exists\n")


@pytest.mark.one_in(16)
@pytest.mark.parametrize("name", ["softmax", *TRAINABLE])
def test_layers_are_causal_and_train(name):
    """Changes of later tokens leave earlier outputs unchanged; all parameters have gradients."""
    variant = training.SOFTMAX if name == "softmax" else load(name)
    layer = training.VariantAttention(2, 16, variant=variant, use_bias=False, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (2, 12, 16))
    out, changed = layer(x), layer(x.at[:, 8:].add(1.0))
    np.testing.assert_allclose(changed[:, :8], out[:, :8], atol=1e-6)
    assert float(jnp.max(jnp.abs((changed - out)[:, 8:]))) > 1e-2
    gradients = nnx.grad(lambda layer: jnp.sum(layer(x) ** 2))(layer)
    assert all(float(jnp.max(jnp.abs(leaf))) > 0 for leaf in jax.tree.leaves(gradients))
    np.testing.assert_allclose(layer(x[1:])[0], out[1], atol=1e-5)


def test_the_softmax_layer_is_multi_head_attention():
    options = {"use_bias": False, "rngs": nnx.Rngs(0)}
    layer = training.VariantAttention(2, 16, variant=training.SOFTMAX, **options)
    usual = nn.MultiHeadAttention(2, 16, mask=masks.Causal(), rotary=True, **options)
    for part in ("query", "key", "value", "out"):
        setattr(usual, part, getattr(layer, part))
    x = jax.random.normal(jax.random.key(0), (2, 5, 16))
    np.testing.assert_allclose(layer(x), usual(x), atol=1e-6)


@pytest.mark.slow
def test_training_draws_both_losses(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(training, "_TRIAL_STEPS", 2)
    monkeypatch.setattr(training.text, "read", lambda path: "the dog sleeps .\n" * 40)
    sizes = {"features": 16, "layers": 1, "heads": 2, "feed_forward": 10, "length": 16, "rows": 3}
    settings = LanguageSettings(kv_heads=1, warmup=2, **sizes)
    path = training.compare("forgetting", load("forgetting"), tmp_path, 1e-6, settings)
    assert path.read_bytes().startswith(b"\x89PNG")
    said = capsys.readouterr().out
    assert "2 steps with forgetting" in said and "2 steps with softmax" in said
    assert (tmp_path / "softmax" / "metrics.jsonl").exists()
