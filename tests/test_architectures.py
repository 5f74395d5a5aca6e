"""Every architecture of the translation experiment; other tests use that of `tiny`."""

import dataclasses
import functools
import io
import json
import math

import jax
import numpy as np
import pytest

import jattn.nn
from experiments.translation import __main__ as cli
from experiments.translation import decoding, training
from experiments.translation.architectures import ARCHITECTURES
from experiments.translation.decoding import Search
from experiments.translation.model import Model
from experiments.translation.presets import PRESETS, Config
from experiments.translation.runs import TranslationRun
from experiments.translation.vocabulary import BOS, EOS, PAD
from tests.arrays import assert_equal
from tests.test_translation import TINY, Batch, Bench, batch_of, make_bench, trained


pytestmark = pytest.mark.usefixtures("as_users_run_it")
MODULES = {"transformer": jattn.nn.Transformer, "rnnsearch": jattn.nn.RNNsearch}
OTHERS = [name for name in ARCHITECTURES if name != TINY.architecture]


@pytest.fixture(params=OTHERS)
def parts(request) -> Bench:
    return bench_of(request.param)


every_architecture = pytest.mark.parametrize("parts", ARCHITECTURES, indirect=True)


@functools.cache
def bench_of(architecture: str) -> Bench:
    return make_bench(dataclasses.replace(TINY, architecture=architecture, hidden=24))


@functools.cache
def decided(architecture: str) -> dict[str, jax.Array]:
    """Random parameters, so large that the generated tokens depend strongly on the source."""
    params = {name: 3 * array for name, array in bench_of(architecture).model.init(4).items()}
    # The outputs of a maxout have a positive mean, which would always favour the same words.
    output = params["output/kernel"]
    return params | {"output/kernel": output - output.mean(axis=-1, keepdims=True)}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_configuration_decides_the_module(name):
    config = dataclasses.replace(TINY, architecture=name, hidden=7, features=10)
    assert Config.from_json(json.loads(json.dumps(dataclasses.asdict(config)))) == config
    model = Model(config, 900, 900)
    params = model.init(0)
    assert set(ARCHITECTURES) == set(MODULES) and type(model.module(params)) is MODULES[name]
    sizes = {size for array in params.values() for size in array.shape}
    assert (7 in sizes) == (name == "rnnsearch") and 10 in sizes
    glorot = Model(dataclasses.replace(config, embedding_init="glorot"), 900, 900).init(0)
    for side in ("source", "target"):
        table = f"{side}_tokens/embedding"
        assert np.std(params[table]) == pytest.approx(math.sqrt(1 / 10), rel=0.05)
        assert np.std(glorot[table]) == pytest.approx(math.sqrt(2 / 910), rel=0.05)


def loss_and_gradients(model: Model, params: dict[str, jax.Array], batch: Batch):
    loss = jax.value_and_grad(lambda params, batch: training.total_loss(model, params, batch))
    return jax.jit(loss)(params, batch)


def three_rows(parts: Bench) -> Batch:
    return Batch(*(array[:3] for array in next(iter(parts.batches.epoch(0)))))


@pytest.mark.exhaustive
@every_architecture
def test_more_padding_and_empty_rows_change_neither_loss_nor_gradients(parts):
    params, batch = parts.model.init(3), three_rows(parts)
    emptier = Batch(*(np.pad(array, ((0, 2), (0, 7))[: array.ndim]) for array in batch))
    loss, gradient = loss_and_gradients(parts.model, params, batch)
    other_loss, other = loss_and_gradients(parts.model, params, emptier)
    np.testing.assert_allclose(other_loss, loss, rtol=1e-6)
    for name in gradient:
        np.testing.assert_allclose(other[name], gradient[name], rtol=1e-4, atol=2e-5, err_msg=name)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_half_the_bits_give_nearly_the_loss_and_gradients_of_all(name):
    config = dataclasses.replace(TINY, architecture=name, hidden=24, dropout_rate=0.0)
    part, results = bench_of(name), {}
    batch, sizes = three_rows(part), (part.model.source_size, part.model.target_size)
    for dtype in ("float32", "bfloat16"):
        model = Model(dataclasses.replace(config, dtype=dtype), *sizes)
        params = model.init(3)
        assert {array.dtype.name for array in params.values()} == {"float32"}
        assert jax.eval_shape(model.features, params, batch)[0].dtype.name == dtype
        results[dtype] = loss_and_gradients(model, params, batch)
    (loss, gradients), (narrow, rounded) = results["float32"], results["bfloat16"]
    assert narrow.dtype.name == "float32" and 1e-6 < abs(narrow / loss - 1) < 1e-2
    for parameter, gradient in gradients.items():
        assert rounded[parameter].dtype.name == "float32"
        wrong, size = (np.linalg.norm(x) for x in (rounded[parameter] - gradient, gradient))
        assert wrong < 0.1 * max(size, 0.1), parameter


@pytest.mark.slow
def test_training_lowers_the_loss_and_leaves_no_parameter_where_it_was(parts):
    state, records = trained(parts)
    losses = [record["loss"] for record in records if "loss" in record]
    assert losses[0] > losses[-1] + 0.2
    initial = parts.first_state.params
    assert not [name for name in initial if np.array_equal(initial[name], state.params[name])]
    empty = Batch(*map(np.zeros_like, next(iter(parts.batches.epoch(0)))))
    updated, measured = parts.step(parts.init_state(), empty)
    assert float(measured.loss) == 0 and float(measured.gradient_norm) == 0
    assert_equal(updated.params, initial)


@pytest.mark.exhaustive
@every_architecture
@pytest.mark.parametrize(
    "search",
    [Search(), Search(kind="sample", temperature=0.5), Search(kind="beam", beams=3, n_best=3)],
    ids=lambda search: search.kind,
)
def test_searches_find_what_the_model_gives_that_probability(parts, search):
    rows, params = parts.sources(5), decided(parts.config.architecture)
    best_of_rows = decoding.translations(parts.model, params, rows, search)
    pairs = [(row, x) for row, best in zip(rows, best_of_rows, strict=True) for x in best]
    assert len(pairs) == 5 * search.n_best
    assert len({tuple(generated.ids) for _, generated in pairs}) > len(pairs) / 2
    tokens = [list(generated.ids) for _, generated in pairs]
    batch = batch_of([row for row, _ in pairs], tokens, parts.config.max_length)
    logits = np.array(jax.jit(parts.model.logits)(params, batch), np.float64)
    logits[..., [PAD, BOS]] = -np.inf
    log_probs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    for (_, generated), each in zip(pairs, log_probs, strict=True):
        expected = sum(each[place, token] for place, token in enumerate(generated.ids))
        assert generated.log_prob == pytest.approx(expected, rel=1e-4)
        size = ((5 + len(generated.ids)) / 6) ** (0.6 if search.kind == "beam" else 0)
        assert generated.score == pytest.approx(generated.log_prob / size, rel=1e-6)


@pytest.mark.slow
def test_alignments_are_the_attention_of_the_decoder_to_the_source():
    parts, params = bench_of("transformer"), decided("transformer")
    rows = parts.sources(5)
    generated = [ids.tolist() for ids in decoding.translated(parts.model, params, rows)]
    links = decoding.alignments(parts.model, params, rows, generated)
    batch = batch_of(rows, generated, 32)
    captured = parts.model.weights(params, *batch[:3])
    weights = np.asarray(captured[parts.model.alignment])
    assert weights.shape[2:] == (32, 24)
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-5)
    for source, target, heads, row_links in zip(rows, generated, weights, links, strict=True):
        assert not heads[..., len(source) :].any()
        most = heads.mean(axis=0).argmax(axis=-1)
        expected = [
            (most[place], place)
            for place, token in enumerate(target)
            if token != EOS and source[most[place]] != EOS
        ]
        assert row_links == expected
    assert len({most for row_links in links for most, _ in row_links}) > 2


def test_the_last_layer_aligns():
    deep = dataclasses.replace(TINY, decoder_layers=3)
    assert Model(deep, 5, 5).alignment == "decoder/layers/2/cross_attention"


@pytest.mark.slow
def test_the_commands_work_on_its_runs(parts, tmp_path, capsys, monkeypatch):
    """The model of the run has learned nothing, but generates different sentences."""
    run_directory = tmp_path / parts.config.architecture
    new_run = parts.run(run_directory)
    new_run.create()
    new_run.save({"params": decided(parts.config.architecture)}, 1)
    new_run.report({"step": 1, "loss": 1.0})
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("der hund schläft .".encode())))
    run = ["--run", str(run_directory)]
    search = ["--beam", "2", "--n-best", "2", "--scores", "--alignments"]
    assert cli.main(["translate", *run, *search]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and all(line.count("\t") == 3 for line in lines)
    assert any("-" in line.split("\t")[3] for line in lines)
    assert cli.main(["plot", *run, "--sentence", "der hund schläft ."]) == 0
    names = sorted(file.name for file in run_directory.rglob("*.png"))
    assert names == ["attention.png", "bleu.png", "cross-attention.png", "loss.png"]
    assert TranslationRun.open(run_directory).config.architecture == run_directory.name


def test_a_cache_dtype_without_caches_is_refused():
    with pytest.raises(ValueError, match="rnnsearch, which has no caches, got int8"):
        bench_of("rnnsearch").model.check_cache_dtype("int8")


def test_the_preset_is_an_rnnsearch_of_the_tutorials_sizes():
    shapes = Model(PRESETS["rnnsearch"], 50, 60).shapes
    assert shapes["encoder/backward/candidate"].shape == (512, 512)
    assert shapes["source_tokens/embedding"].shape == (50, 256)
    assert shapes["decoder/attention/key"].shape == (1024, 512)
    assert shapes["output/kernel"].shape == (60, 256)
