"""The translation experiment: loss, optimiser, loop, checkpoints, decoding, scores, commands."""

import dataclasses
import functools
import io
import itertools
import json
import math
import re
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sacrebleu
import scipy.special
from matplotlib.image import imread
from pydantic import TypeAdapter

from experiments.language.settings import LanguageSettings
from experiments.runs.ending import Failure
from experiments.translation import __main__ as cli
from experiments.translation import decoding, evaluation, pictures, training
from experiments.translation.batches import Batch, Batches, PackedBatches, loss_mask
from experiments.translation.command_line import make_parser
from experiments.translation.commands.plan import new_directory
from experiments.translation.corpus import Pair
from experiments.translation.losses import Projection
from experiments.translation.model import Model
from experiments.translation.presets import PRESETS, Config, differences
from experiments.translation.runs import TextOrigin, TranslationRun, fingerprint
from experiments.translation.text import encode_pairs
from experiments.translation.training import TrainingState
from experiments.translation.vocabulary import BOS, EOS, PAD, Vocabulary, learn_vocabularies
from jattn import viz
from tests.arrays import assert_equal
from tests.conftest import assert_trees_close, expect


pytestmark = pytest.mark.usefixtures("as_users_run_it")
TINY = PRESETS["tiny"]


@dataclasses.dataclass(frozen=True)
class Bench:
    """A tiny model with its text, and one compiled step that the tests share."""

    config: Config
    texts: training.TrainingTexts
    source: Vocabulary
    target: Vocabulary
    batches: Batches
    model: Model
    optimiser: Any
    step: training.Step

    @functools.cached_property
    def first_state(self) -> TrainingState:
        """The state before training, in arrays of NumPy, which no step deletes."""
        state = training.init_state(self.model, self.optimiser, self.config.seed)
        return jax.device_get(state)

    def init_state(self) -> TrainingState:
        return jax.tree.map(jnp.array, self.first_state)

    def loop(self, **changes) -> training.TrainingLoop:
        parts = {
            "config": self.config,
            "batches": self.batches,
            "step": self.step,
            "check": lambda batch: training.check_batch(batch, self.model),
            "report": lambda record: None,
            "validate": lambda params: {},
            "save": lambda state: None,
        }
        return training.TrainingLoop(**(parts | changes))

    def sources(self, count: int) -> list[list[int]]:
        """The tokens of the first sentences that are held out for validation."""
        return [self.source.encode(pair.source) for pair in self.texts.validation[:count]]

    def evaluator(self, pairs: list[Pair], *search: decoding.Search) -> evaluation.Evaluator:
        return evaluation.Evaluator(self.model, pairs, self.source, self.target, *search)

    def run(self, directory: Path, config: Config | None = None) -> TranslationRun:
        origin = TextOrigin(None, ("de", "en"), fingerprint(self.batches.pairs))
        return TranslationRun(directory, config or self.config, self.source, self.target, origin)


def make_bench(config: Config = TINY) -> Bench:
    texts = training.read_texts(config, None)
    source = Vocabulary.build(pair.source for pair in texts.train)
    target = Vocabulary.build(pair.target for pair in texts.train)
    pairs, _ = encode_pairs(texts.train, source, target)
    batches: Any = training.make_batches(config, pairs)
    model = Model(config, len(source), len(target))
    optimiser = training.make_optimiser(config, training.total_steps(config, batches))
    train_step = training.make_step(model, optimiser, config)
    return Bench(config, texts, source, target, batches, model, optimiser, train_step)


@functools.cache
def bench() -> Bench:
    return make_bench()


def first_batch(rows: int | None = None) -> Batch:
    return Batch(*(array[:rows] for array in next(iter(bench().batches.epoch(0)))))


@pytest.mark.exhaustive
def test_packed_rows_have_the_loss_and_the_gradients_of_padded_ones():
    config = dataclasses.replace(TINY, positions="learned", rotary=True, dropout_rate=0.0)
    part = bench()
    model = Model(config, part.model.source_size, part.model.target_size)
    params = model.init(3)
    some = [pair for pair in part.texts.train if len(pair.source) < 60][:8]
    pairs, _ = encode_pairs(some, part.source, part.target)
    padded = next(Batches(pairs, rows_per_batch=8, max_shapes=1).epoch(0))
    packed = next(PackedBatches(pairs, width=48, rows_per_batch=4).epoch(0))
    assert packed.target_segment_ids.max() > 0
    assert loss_mask(packed).sum() == loss_mask(padded).sum()
    total_loss = functools.partial(training.total_loss, model, smoothing=0.1)
    run = jax.jit(jax.value_and_grad(total_loss))

    expected, gradients = run(params, padded)
    packed_loss, grads = run(params, packed)
    np.testing.assert_allclose(packed_loss, expected, rtol=1e-6)
    assert_trees_close(grads, gradients, rtol=1e-4, atol=2e-5)
    positions_of_row = np.arange(48, dtype=np.int32) % 31
    for name, changed in (
        ("target_segment_ids", np.minimum(packed.target_segment_ids, 0)),
        ("source_segment_ids", np.minimum(packed.source_segment_ids, 0)),
        ("target_positions", np.broadcast_to(positions_of_row, packed.target_positions.shape)),
    ):
        loss, _ = run(params, packed._replace(**{name: changed}))
        assert abs(float(loss) / float(expected) - 1) > 1e-5, name


class TwoTables:
    """The smallest model that a training step accepts. It records which features it drops."""

    def __init__(self) -> None:
        self.dropped: list[bytes] = []

    def init(self, seed: int) -> dict[str, jax.Array]:
        keys = jax.random.split(jax.random.key(seed), 2)
        size = (bench().model.target_size, 8)
        names = ("embedding", "output")
        return {name: jax.random.normal(key, size) for name, key in zip(names, keys, strict=True)}

    def features(self, params, batch, *, dropout_key=None):
        features = params["embedding"][batch.target_in]
        if dropout_key is not None:
            keep = jax.random.bernoulli(dropout_key, 0.5, features.shape)
            jax.debug.callback(lambda keep: self.dropped.append(np.asarray(keep).tobytes()), keep)
            features = jnp.where(keep, features * 2, 0)
        return features, Projection(params["output"], None)


def in_parts(model: Any, parts: int, dropout_rate=0.0) -> tuple[TrainingState, training.Step]:
    config = dataclasses.replace(TINY, accumulation_steps=parts, dropout_rate=dropout_rate)
    optimiser = training.make_optimiser(config, config.steps)
    return training.init_state(model, optimiser, 0), training.make_step(model, optimiser, config)


def uneven_batch() -> Batch:
    """Eight rows, most of whose tokens are in the first half."""
    batch = first_batch(8)
    return batch._replace(target_lengths=np.where(np.arange(8) < 4, batch.target_lengths, 1))


def test_a_batch_accumulated_gives_the_update_of_the_whole():
    def update(parts: int) -> tuple[Any, Any]:
        state, train_step = in_parts(TwoTables(), parts)
        new_state, measured = jax.device_get(train_step(state, uneven_batch()))
        return new_state.opt_state[1][0].mu, measured.gradient_norm

    whole = update(1)
    assert_trees_close(update(4), whole, rtol=1e-4, atol=1e-7)
    assert max(np.abs(moment).max() for moment in whole[0].values()) > 1e-3


def test_every_part_of_every_batch_draws_its_own_dropout():
    model = TwoTables()
    state, train_step = in_parts(model, 4, dropout_rate=0.5)
    for _ in range(2):
        state, _ = train_step(state, uneven_batch())
    jax.effects_barrier()
    assert len(model.dropped) == len(set(model.dropped)) == 8


def test_a_step_takes_the_mean_over_tokens_and_drops_by_seed_and_step():
    batch = uneven_batch()
    model: Any = TwoTables()
    state, train_step = in_parts(model, 1, dropout_rate=0.5)

    @jax.jit
    @functools.partial(jax.grad, has_aux=True)
    def gradient_of(params, key):
        losses = training.total_losses(model, params, batch, smoothing=0.1, dropout_key=key)
        return losses[0], losses

    tokens = int(batch.target_lengths.sum())
    assert tokens < batch.target_out.size
    for step in range(2):
        key = jax.random.fold_in(jax.random.key(TINY.seed), step)
        gradient, losses = gradient_of(state.params, key)
        norm = math.sqrt(sum(float(jnp.sum(array**2)) for array in gradient.values()))
        state, measured = train_step(state, batch)
        assert measured == pytest.approx((*losses.tolist(), norm / tokens), rel=1e-4)


def test_ids_that_the_model_has_not_got_are_refused_before_the_device():
    batch, parts = first_batch(), bench()
    model = parts.model
    for name, words, wrong in (
        ("target_out", "target labels", -1),
        ("target_out", "target labels", model.target_size),
        ("target_in", "target ids", model.target_size),
        ("source", "source ids", model.source_size),
    ):
        ids = getattr(batch, name).copy()
        ids[0, 0] = wrong
        with pytest.raises(ValueError, match=f"{words} must be in .* got {wrong}"):
            training.check_batch(batch._replace(**{name: ids}), model)
    training.check_batch(batch, model)
    for wrong in (-1, 10**6):
        with pytest.raises(ValueError, match=f"source ids must be in .* got {wrong}"):
            decoding.translated(model, {}, [[4, wrong, EOS]])
        with pytest.raises(ValueError, match=f"target ids must be in .* got {wrong}"):
            decoding.alignments(model, {}, [[4, EOS]], [[wrong, EOS]])
    larger = Vocabulary((*parts.source.words, "ufo"))
    evaluator = evaluation.Evaluator(model, [Pair("ufo", "the", "")], larger, parts.target)
    expect(ValueError, "source ids must be in", evaluator.token_loss, {})


def test_learning_rate_of_every_schedule():
    half = [0.25 * (1 + math.cos(math.pi * place / 9)) for place in range(1, 9)]
    assert half[-1] > 0
    paper = [min((step + 1) ** -0.5, (step + 1) * 4**-1.5) for step in range(12)]
    rates = {"constant": [0.5] * 8, "cosine": half, "inverse_sqrt": paper[4:]}
    for schedule, later in rates.items():
        changes = [f"schedule={schedule}", "learning_rate=0.5", "warmup_steps=4"]
        rate = training.learning_rate(TINY.changed(changes), 12)
        expected = [0.125, 0.25, 0.375, 0.5, *later]
        np.testing.assert_allclose([rate(step) for step in range(12)], expected, rtol=1e-5)


def test_the_first_step_moves_every_parameter_that_it_should_and_none_for_padding_alone():
    params = bench().first_state.params
    moved, _ = bench().step(bench().init_state(), first_batch())
    still = [name for name in params if np.array_equal(params[name], moved.params[name])]
    # Moving all keys by one vector moves no weight of a softmax.
    assert all(name.endswith("/key/bias") for name in still)
    empty = Batch(*map(np.zeros_like, first_batch()))
    unmoved, measured = bench().step(bench().init_state(), empty)
    assert float(measured.loss) == 0 and float(measured.gradient_norm) == 0
    assert_equal(unmoved.params, params)


def timeless(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Records of metrics without the measured times."""
    clock = ("seconds", "tokens_per_second")
    return [{k: v for k, v in record.items() if k not in clock} for record in records]


def trained(bench: Bench, first: TrainingState | None = None, **changes):
    records = []
    loop = bench.loop(report=records.append, **changes)
    return loop.run(bench.init_state() if first is None else first), timeless(records)


VALIDATE = lambda params: {"validation_loss": 1.0}  # noqa: E731


@functools.cache
def whole_training() -> tuple[TrainingState, list[dict[str, Any]]]:
    return trained(bench(), validate=VALIDATE)


def test_the_loss_falls_and_records_say_how():
    state, records = whole_training()
    reported = [record for record in records if "loss" in record]
    batches = itertools.islice(bench().batches.from_step(0), TINY.steps)
    tokens = sum(int(batch.target_lengths.sum()) for batch in batches)
    assert sum(record["tokens"] for record in reported) == tokens
    first, last = reported[0], reported[-1]
    assert last["step"] == int(state.step) == TINY.steps
    assert first["loss"] > last["loss"] + 0.2
    assert 0 < last["unsmoothed_loss"] < last["loss"] and TINY.label_smoothing > 0
    rate = training.learning_rate(TINY, TINY.steps)
    assert first["learning_rate"] == pytest.approx(float(rate(first["step"] - 1)))
    # The model is validated at the end of each epoch and of training.
    validated = [record["step"] for record in records if "validation_loss" in record]
    per_epoch = len(bench().batches)
    assert validated == sorted({*range(per_epoch, TINY.steps + 1, per_epoch), TINY.steps})


class Killed(Exception):
    """Ends a training as suddenly as a power cut would."""


def test_resumed_is_bit_for_bit_the_uninterrupted_run(tmp_path):
    expected, records = whole_training()
    run = bench().run(tmp_path / "run")
    run.create()

    def report(record):
        run.report(record)
        if record["step"] > TINY.checkpoint_every:
            raise Killed

    save = lambda state: run.save(state, int(state.step))  # noqa: E731
    with pytest.raises(Killed):
        bench().loop(report=report, save=save).run(bench().init_state())
    opened = TranslationRun.open(tmp_path / "run")
    assert opened == run
    saved, step = opened.restore(bench().first_state)
    assert step == TINY.checkpoint_every < TINY.steps
    resumed, rest = trained(bench(), jax.tree.map(jnp.asarray, saved), validate=VALIDATE)
    assert_equal(resumed, expected)
    assert rest == [record for record in records if record["step"] > step]
    opened.forget_metrics_after(step)
    assert max(record["step"] for record in opened.metrics()) <= step


def test_a_loss_that_is_no_number_stops_training_and_keeps_the_last_checkpoint(tmp_path):
    run = bench().run(tmp_path / "run")
    run.create()
    poisoned_at = TINY.checkpoint_every + 2

    def poisoned_step(state, batch):
        state, measured = bench().step(state, batch)
        factor = jnp.nan if int(state.step) == poisoned_at else 1.0
        params = {name: array * factor for name, array in state.params.items()}
        return state._replace(params=params), measured._replace(loss=measured.loss * factor)

    loop = bench().loop(step=poisoned_step, save=lambda state: run.save(state, int(state.step)))
    expect(training.Diverged, f"step {poisoned_at}: | nan", loop.run, bench().init_state())
    assert run.steps() == [TINY.checkpoint_every]
    params, _ = run.restore(bench().model.shapes, prefix="params/")
    assert all(np.isfinite(array).all() for array in params.values())


def small_tree(scale=1.0):
    return TrainingState(
        params={"a/kernel": jnp.full((2, 3), float(scale)), "b": jnp.ones((4,), jnp.bfloat16)},
        opt_state=({"count": jnp.zeros((), jnp.int32)},),
        step=jnp.asarray(7, jnp.int32),
    )


def saved_run(directory: Path, *scales: float, **changes: Any) -> TranslationRun:
    """A run with a checkpoint of `small_tree` for each scale, after steps 1, 2 and so on."""
    words, origin = Vocabulary(("a",)), TextOrigin(None, ("de", "en"), "0")
    run = TranslationRun(directory, dataclasses.replace(TINY, **changes), words, words, origin)
    run.create()
    for step, scale in enumerate(scales, start=1):
        run.save(small_tree(scale), step)
    return run


def test_a_checkpoint_gives_back_every_array_and_its_dtype(tmp_path):
    run = saved_run(tmp_path / "run", 1)
    tree, step = run.restore(small_tree())
    assert step == 1
    assert_equal(tree, small_tree(1.0))
    assert tree.params["b"].dtype == jnp.bfloat16
    part, _ = run.restore({"a/kernel": jnp.zeros((2, 3)), "b": tree.params["b"]}, prefix="params/")
    assert_equal(part, small_tree(1.0).params)
    state, _ = run.restore(small_tree().opt_state, prefix="opt_state/")
    assert_equal(state, small_tree().opt_state)


def one_bit_flipped(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))


def cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def test_arrays_of_another_model_are_refused_by_name_before_they_are_read(tmp_path, monkeypatch):
    run = saved_run(tmp_path / "run", 1)
    params = {"a/kernel": jax.ShapeDtypeStruct((10**6, 10**6), jnp.float32), "c": jnp.ones(4)}
    monkeypatch.setattr("orbax.checkpoint.CheckpointManager.restore", pytest.fail)
    messages = "a/kernel: float32[2, 3], not float32[1000000, 1000000]", "c: nothing, not float32"
    for like in (small_tree()._replace(params=params), params):
        with pytest.raises(ValueError) as error:
            run.restore(like, prefix="params/" if like is params else "")
        for message in (*messages, "b: bfloat16[4], not nothing"):
            assert f"params/{message}" in str(error.value)


def test_a_run_begun_differently_is_refused_naming_what_differs(tmp_path):
    run = saved_run(tmp_path / "run")
    for change, message in (
        ({"config": dataclasses.replace(TINY, features=32)}, "features: 16, not 32"),
        ({"config": dataclasses.replace(TINY, features=32, seed=5)}, "seed: 0, not 5"),
        ({"source": Vocabulary(run.source.words[1:])}, "the vocabularies"),
        ({"origin": dataclasses.replace(run.origin, fingerprint="1")}, "the training text"),
    ):
        with pytest.raises(ValueError, match=message):
            run.check_same(dataclasses.replace(run, **change))
    run.check_same(TranslationRun.open(run.directory))


def test_metrics_are_lines_of_valid_json(tmp_path):
    run = saved_run(tmp_path / "run")
    run.report({"step": 1, "loss": float("nan"), "norm": float("inf"), "name": "\u2028"})
    run.report({"step": 2, "loss": 0.5})
    first, *rest = (run.directory / "metrics.jsonl").read_text("utf-8").split("\n")
    assert json.loads(first, parse_constant=pytest.fail)["loss"] is None
    assert len(rest) == 2 and run.metrics()[1] == {"step": 2, "loss": 0.5}


def test_settings_are_read_by_type_and_checked():
    config = TINY.changed(["steps=7", "learning_rate=1e-3", "norm=post", "tie_embeddings=true"])
    assert (config.steps, config.learning_rate, config.norm) == (7, 1e-3, "post")
    assert config.tie_embeddings is True
    assert differences(TINY, config)[0] == "norm: pre, not post"
    for setting, message in (
        ("steps", "expected NAME=VALUE"),
        ("stepz=1", "^unknown setting 'stepz'; nearest: steps$"),
        ("steps=1.5", "^steps: expected a valid integer, .*, got '1.5'$"),
        ("tie_embeddings=so", "tie_embeddings: expected a valid boolean, .*, got 'so'"),
        ("dropout_rate=1", "dropout_rate: expected less than 1, got '1'"),
        ("dropout_rate=nan", "dropout_rate: expected a finite number, got 'nan'"),
        ("learning_rate=inf", "learning_rate: expected a finite number"),
        ("learning_rate=0", "learning_rate: expected greater than 0"),
        ("features=0", "features: expected greater than or equal to 1"),
        ("vocabulary_size=4", "vocabulary_size: expected greater than 4"),
        ("seed=-1", "seed: expected greater than or equal to 0"),
        ("architecture=gru", "architecture: expected 'transformer' or 'rnnsearch', got 'gru'"),
        ("hidden=0", "hidden: expected greater than or equal to 1, got '0'"),
        ("packed_width=-1", "packed_width: expected greater than or equal to 0"),
        ("accumulation_steps=0", "accumulation_steps: expected greater than or equal to 1"),
        ("seed=4294967296", "^seed: expected less than 4294967296, got '4294967296'$"),
        ("steps=2147483648", "steps: expected less than or equal to 2147483647"),
        ("warmup_steps=2147483648", "warmup_steps: expected less than or equal to 2147483647"),
        ("encoder_layers=100000", "encoder_layers: expected less than or equal to 256"),
        ("sentences=100000000000", "sentences: expected less than or equal to 1000000"),
        ("learning_rate=1e31", "learning_rate: expected less than or equal to 10{30}, got"),
        (f"features={'9' * 5000}", r"features: expected .*, got '9{70,80}$"),
        ("norm=batch", "norm: expected 'pre' or 'post'"),
        ("num_heads=3", "num_heads: expected a divisor of features=16, got 3"),
        ("epochs=1", "exactly one of epochs and steps"),
        ("tokens_per_batch=0", "exactly one of tokens_per_batch and rows_per_batch"),
        ("averaged_checkpoints=0", "averaged_checkpoints: expected greater than or equal to 1"),
        ("patience=-1", "patience: expected greater than or equal to 0"),
        ("patience=2 averaged_checkpoints=2", "at most one of patience above 0 and averaged"),
        ("architecture=rnnsearch packed_width=64", "packed_width: expected 0 with architecture='r"),
    ):
        with pytest.raises(ValueError, match=message) as error:
            TINY.changed(setting.split())
        assert "\n" not in str(error.value)


def test_configurations_survive_json_and_nothing_else_is_read():
    for config in PRESETS.values():
        assert Config.from_json(json.loads(json.dumps(dataclasses.asdict(config)))) == config
    fields = dataclasses.asdict(TINY)
    changes = ({"__class__": "os.system"}, {"seed": "0"}, {"features": True})
    without_seed = {name: value for name, value in fields.items() if name != "seed"}
    for wrong in ([], without_seed, *(fields | x for x in (*changes, {"dropout_rate": None}))):
        with pytest.raises(ValueError, match=r"configuration|expected") as error:
            Config.from_json(wrong)
        assert "\n" not in str(error.value)


def test_every_preset_describes_a_model():
    for config in (PRESETS[name] for name in PRESETS.keys() - {"tiny", "multi30k"}):
        shallow = dataclasses.replace(config, encoder_layers=1, decoder_layers=1)
        embedding = Model(shallow, 50, 60).shapes["target_tokens/embedding"]
        assert embedding.shape == (60, config.features)
    shapes = Model(PRESETS["multi30k"], 7853, 5893).shapes
    assert sum(math.prod(x.shape) for x in shapes.values()) == 9_038_341  # as published


@functools.cache
def decided_params():
    """Random parameters, so large that the translation depends much on the source."""
    return {name: 3 * array for name, array in bench().model.init(4).items()}


def padded(rows, width: int) -> np.ndarray:
    return np.array([[*row, *[PAD] * (width - len(row))] for row in rows], np.int32)


def batch_of(sources, targets, width: int) -> Batch:
    read, labels = padded([[BOS, *row[:-1]] for row in targets], width), padded(targets, width)
    lengths = np.array([len(row) for row in sources], np.int32)
    return Batch(padded(sources, 24), lengths, read, labels, (labels != PAD).sum(1))


def test_translations_are_what_the_model_finds_likeliest_after_each_prefix():
    parts, params = bench(), decided_params()
    rows = parts.sources(6)
    generated = decoding.translated(parts.model, params, rows)
    batch = batch_of(rows, generated, TINY.max_length)
    logits = np.array(jax.jit(parts.model.logits)(params, batch))
    logits[..., [PAD, BOS]] = -np.inf
    for row, scores in zip(generated, logits, strict=True):
        np.testing.assert_array_equal(scores.argmax(-1)[: len(row)], row)
        assert len(row) == TINY.max_length or row[-1] == EOS
        assert EOS not in row[:-1]
    assert len(set(map(tuple, generated))) > 3


@pytest.mark.one_in(6)
@pytest.mark.parametrize("architecture", ["transformer", "rnnsearch"])
@pytest.mark.parametrize("kind", ["greedy", "beam", "sample"])
def test_what_stands_beside_a_sentence_in_the_list_changes_nothing(architecture, kind):
    config = TINY.changed([f"architecture={architecture}", "hidden=16", "max_length=64"])
    model = Model(config, 40, 40)
    params = {name: 3 * array for name, array in model.init(1).items()}
    random = np.random.default_rng(0)
    rows = [[*random.integers(4, 40, n).tolist(), EOS] for n in (2, 3, 5, 1, 4, 25, 30)]
    search = decoding.Search(kind=kind, beams=2)

    def translated(rows: list[list[int]]) -> list[list[int]]:
        return [ids.tolist() for ids in decoding.translated(model, params, rows, search)]

    short = translated(rows[:5])
    together = translated(rows)
    assert short == together[:5]
    assert kind == "sample" or translated(rows[::-1]) == together[::-1]
    limits = [decoding.longest_translation(len(row)) for row in rows]
    assert all(len(ids) <= limit for ids, limit in zip(together, limits, strict=True))
    assert any(len(ids) == limit for ids, limit in zip(short, limits, strict=False))


@pytest.mark.parametrize("settings", [Config, LanguageSettings])
def test_every_number_of_the_settings_has_two_bounds(settings):
    """The bounds fit the 32 bits in which a device counts and computes."""
    schema: Any = TypeAdapter(settings).core_schema
    fields = {field["name"]: field["schema"]["schema"] for field in schema["schema"]["fields"]}
    numbers = {name: each for name, each in fields.items() if each["type"] in ("int", "float")}
    assert len(numbers) > 10
    for name, each in numbers.items():
        assert {"ge", "gt"} & each.keys(), name
        most = each.get("le", each.get("lt"))
        assert most is not None and most <= (2**32 if each["type"] == "int" else 1e30), name


def test_rows_are_divisible_into_the_accumulated_parts_and_all_steps_fit_the_counter():
    made = training.make_batches(TINY.changed(["accumulation_steps=3"]), bench().batches.pairs)
    assert all(shape.rows % 3 == 0 for shape in made.shapes)
    config = TINY.changed(["steps=0", "epochs=2147483647"])
    with pytest.raises(ValueError, match="epochs: expected at most 2147483647 steps in all, got"):
        training.make_batches(config, bench().batches.pairs)


def test_a_model_that_no_memory_holds_is_refused_before_it_is_made(tmp_path, capsys):
    changes = set_words("features=262144", "feed_forward=262144", "sentences=100")
    run = tmp_path / "run"
    assert cli.main(["train", "--preset", "tiny", "--run", str(run), *changes]) == 2
    gigabytes = r"parameters takes at least [\d,]+ GB to train, and there are [\d,]+ GB\n"
    assert re.fullmatch(rf"error: a model of [\d,]+ {gigabytes}", capsys.readouterr().err)
    assert not run.exists()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", ["greedy", "beam", "sample"])
def test_a_model_that_gives_no_probabilities_translates_nothing(kind):
    parts, params = bench(), dict(decided_params())
    name = next(name for name in params if "decoder" in name and "kernel" in name)
    params[name] = params[name] * np.nan
    search = decoding.Search(kind=kind, beams=2)
    with pytest.raises(Failure, match=r"sentence [12]: the model gives no probabilities \(NaN\)"):
        decoding.translations(parts.model, params, parts.sources(2), search)
    with pytest.raises(Failure, match="the loss is NaN"):
        parts.evaluator(parts.texts.validation[:2]).token_loss(params)


@pytest.mark.parametrize("score", ["bleu", "chrf", "word_bleu"])
def test_scores_want_a_reference_for_each_translation(score):
    options = {} if score == "word_bleu" else {"lower": True}
    function = functools.partial(getattr(evaluation, score), **options)
    text = ["a", "b"] if score == "word_bleu" else "a b"
    for count, references in ((1, 2), (2, 1), (1, 0)):
        with pytest.raises(ValueError, match=f"references: expected {count}, .* got {references}"):
            function([text] * count, [text] * references)
    expect(ValueError, "translations: expected at least one, got none", function, [], [])
    for arguments in (("a b", [text] * 3), ([text], "a")):
        expect(TypeError, "expected several texts, got the text 'a", function, *arguments)


def test_scores_of_identical_and_of_other_text():
    words = ["the man sees the old dog .", "a woman reads this book today ."]
    other = ["the man saw an old dog .", "a woman reads this book ."]
    shouted = [text.upper() for text in words]
    for name in ("bleu", "chrf"):
        score = getattr(evaluation, name)
        assert score(words, words, lower=False) == pytest.approx(100)
        assert score(words, shouted, lower=True) == pytest.approx(100)
        assert score(words, shouted, lower=False) < 20
        expected = getattr(sacrebleu, f"corpus_{name}")(other, [words]).score
        assert score(other, words, lower=False) == expected < 90


def test_bleu_of_words_neither_cuts_nor_smooths_nor_lowers_them():
    random = np.random.default_rng(0)
    wanted = [[f"w{n}" for n in random.integers(0, 5, length)] for length in (9, 7, 12, 5, 3)]
    generated = [[*words[:-2], "it's", "10,0"] for words in wanted]
    texts, references = ([" ".join(words) for words in side] for side in (generated, wanted))
    options = {"tokenize": "none", "smooth_method": "none", "force": True}
    expected = sacrebleu.corpus_bleu(texts, [references], **options).score
    assert 20 < expected < 90
    assert evaluation.word_bleu(generated, wanted) == pytest.approx(expected)
    assert evaluation.word_bleu(wanted, wanted) == pytest.approx(100)
    assert evaluation.word_bleu([["w1", "w2", "w3"]], [["w1", "w2", "w3"]]) == 0  # not smoothed
    assert evaluation.word_bleu([["A", "b", "c", "d"]], [["a", "b", "c", "d"]]) == 0  # not lowered


@pytest.mark.parametrize("kind", ["words", "bpe"])
def test_bleu_of_words_is_counted_on_words_with_every_tokeniser(kind):
    config = dataclasses.replace(TINY, tokenizer=kind, vocabulary_size=200)
    pairs = [Pair("ja .", "The dog doesn't sleep, and it's old.", ""), Pair("nein", "No!", "")]
    source, target = learn_vocabularies(config, pairs)
    words = [target.decode_words(target.encode(pair.target)) for pair in pairs]
    text = ["the dog does n't sleep , and it 's old .".split(), ["no", "!"]]
    assert words == text == [target.split_words(pair.target) for pair in pairs]
    evaluator = evaluation.Evaluator(Model(config, len(source), len(target)), pairs, source, target)
    generated = [target.normalize(pair.target) for pair in pairs]
    scores = evaluator.score(generated, words, loss=1.0)
    assert scores.word_bleu == pytest.approx(100) and scores.exact_match == 1
    generated[0], words[0] = "the dog does so .", ["the", "dog", "does", "so", "."]
    scores = evaluator.score(generated, words, loss=1.0)
    assert scores.word_bleu == 0 < scores.bleu


@pytest.mark.slow
def test_beams_are_what_is_scored_and_the_loss_weighs_every_token_alike():
    """Perplexity is the exponential of the loss."""
    parts, params, counts = bench(), decided_params(), []
    pairs = parts.texts.validation
    targets = [parts.target.encode(pair.target) for pair in pairs]
    rows = parts.sources(len(pairs))
    batch = batch_of(rows, targets, 24)
    logits = jax.jit(parts.model.logits)(params, batch)
    log_probs = scipy.special.log_softmax(np.asarray(logits, np.float64), axis=-1)
    labels = batch.target_out
    loss = -np.take_along_axis(log_probs, labels[..., None], -1)[labels != PAD].mean()
    search = decoding.Search(kind="beam", beams=3, length_penalty=1.0)
    by_beam, greedy = (
        [*map(parts.target.decode, decoding.translated(parts.model, params, rows, *options))]
        for options in ((search,), ())
    )
    result = parts.evaluator(pairs, search)(params, report=counts.append)
    assert result.translations == by_beam != greedy
    assert result.scores.loss == pytest.approx(loss, rel=1e-5)
    assert result.scores.perplexity == pytest.approx(math.exp(loss), rel=1e-4)
    assert result.scores.sentences == len(result.translations) == sum(counts) == len(pairs)


def test_exact_match_is_counted_by_construction():
    pairs = [Pair("a", "The dog sleeps .", "x"), Pair("b", "a cat", "y")]
    pairs.append(Pair("c", "the dog sleeps.", "x"))
    generated = ["the dog sleeps.", "a dog", "the dog sleeps."]
    words = [text.split() for text in generated]
    scores = bench().evaluator(pairs).score(generated, words, loss=1.0)
    assert scores.exact_match == pytest.approx(2 / 3)
    assert scores.constructions == {"x": (2, 2), "y": (0, 1)}
    assert "x" in evaluation.table("test", scores) and "66.7%" in evaluation.table("test", scores)


@pytest.fixture
def figures(monkeypatch) -> list[Any]:
    figures = []
    monkeypatch.setattr(pictures, "_save", lambda figure, path: figures.append(figure))
    return figures


def test_pictures_have_a_panel_per_head_and_say_what_each_word_reads(tmp_path, figures):
    rng, tokens = np.random.default_rng(0), ["$a$", "<eos>", "_b^", "größe", "<unk>"]
    layers = {f"encoder/layers/{n}/self_attention": 9 for n in (0, 1)}
    layers |= {f"decoder/layers/{n}/cross_attention": 8 for n in (1, 0)}
    layers["decoder/layers/0/self_attention"] = 8
    weights = {name: rng.dirichlet(np.ones(8), (3, rows)) for name, rows in layers.items()}
    seen = pictures.Seen(weights, tokens, tokens[:3], tokens[:4])
    attentions = seen.attentions()
    shapes = {"encoder self-attention": (2, 3, 5, 5), "decoder self-attention": (1, 3, 3, 3)}
    shapes["cross-attention"] = (2, 3, 4, 5)
    assert {name: array.shape for name, array in attentions.items()} == shapes
    layer = weights["decoder/layers/1/cross_attention"]
    np.testing.assert_array_equal(attentions["cross-attention"][1], layer[:, :4, :5])
    files = pictures.draw_sentence(seen, tmp_path)
    assert [file.stem for file in files[1:]] == [name.replace(" ", "-") for name in attentions]
    layer, head = viz.clearest_head(attentions["cross-attention"])
    title = f"cross-attention, layer {layer + 1}, head {head + 1}"
    assert figures[0].axes[0].get_title() == title
    titles = [figure.get_suptitle() for figure in figures]
    assert "decoder self-attention: each word attends to itself and the words before it" in titles
    assert [len(figure.axes) for figure in figures[1:]] == [7, 4, 7]  # the last is the scale


def test_numbers_on_the_axes_are_round(tmp_path, figures):
    records = [
        {"step": 1, "loss": 3.5, "unsmoothed_loss": 3.0, "validation_bleu": 31.0},
        {"step": 2, "loss": 1.2, "unsmoothed_loss": 0.17, "validation_loss": 0.2},
        {"step": 3, "validation_bleu": 33.0},
    ]
    pictures.draw_losses(records, tmp_path / "x.png")
    figures[0].draw_without_rendering()
    (axes,) = figures[0].axes
    low, high = axes.get_ylim()
    shown = [*axes.yaxis.get_major_ticks(), *axes.yaxis.get_minor_ticks()]
    names = {tick.label1.get_text() for tick in shown if low <= tick.get_loc() <= high}
    assert names == {"0.2", "0.3", "0.5", "1", "2", "3"}
    curves = {line.get_label(): line.get_ydata().tolist() for line in axes.get_lines()}
    assert curves == {"training": [3.0, 0.17], "validation": [0.2]}
    assert axes.get_ylabel() == "nats per token, without label smoothing"
    pictures.draw_bleu(records, tmp_path / "x.png")
    (axes,) = figures[1].axes
    assert axes.get_ylim()[0] == 0 and all(x == int(x) for x in axes.get_xticks())


def png_files(directory: Path) -> list[Path]:
    return sorted((directory / "pictures").glob("*.png"))


def set_words(*settings: str) -> list[str]:
    """The options of the command line for settings such as "steps=2"."""
    return [word for setting in settings for word in ("--set", setting)]


@pytest.mark.slow
def test_the_demonstration_writes_and_prints_what_it_promises(demonstration):
    directory, printed = demonstration
    files = "config.json source.json target.json metrics.jsonl evaluation.json lock"
    folders = "checkpoints digests pictures"
    assert {path.name for path in directory.iterdir()} == {*files.split(), *folders.split()}
    assert TranslationRun.open(directory).steps() == [6, 12]
    names = "attention bleu cross-attention decoder-self-attention encoder-self-attention loss"
    assert [file.stem for file in png_files(directory)] == names.split()
    images = {file.stem: imread(file) for file in png_files(directory)}
    for image in images.values():
        assert 200 < len(image) < 3000 and 300 < len(image[0]) < 3000
        assert len(np.unique(image.reshape(-1, image.shape[-1]), axis=0)) > 20
    # At the width of a README the picture of one head is not made smaller.
    assert len(images["attention"][0]) < 830
    page = directory / "pictures" / "attention.html"
    (about,) = re.findall(r'id="about">([^<]*)<', page.read_text(encoding="utf-8"))
    sentences = json.loads(about)["sentences"]
    assert 2 <= len(sentences) <= 6
    for sentence in sentences:
        names = [part["name"] for part in sentence["attentions"]]
        assert names == ["encoder self-attention", "decoder self-attention", "cross-attention"]
        encoder, decoder, cross = sentence["attentions"]
        assert cross["columns"] == encoder["rows"] and cross["rows"][:-1] == decoder["rows"][1:]
        assert decoder["mask"] and not encoder["mask"]
    assert printed.split("\ntranslations:\n")[1].count("  -> ") == 5
    *_, summary, deeper, _, _, _, _, _, advice, path, _ = printed.split("\n")
    assert re.fullmatch(r"held-out sentences, test: [\d.]+% of 20 exactly right", summary)
    hard = r"[\d.]+% of 20 exactly right \(BLEU .*\), which is hard"
    assert re.match(f"clauses nested deeper than .*: {hard}", deeper)
    assert (advice, path) == ("to see what each word attends to, open", f"  {page}")
    assert "test: 20 sentences" in printed and "deeper: 20 sentences" in printed
    assert "validation after step 12: loss" in printed and str(directory) in printed
    assert "built-in corpus" in printed
    scores = json.loads((directory / "evaluation.json").read_text("utf-8"))
    assert set(scores) == {"test", "deeper"}
    expected = {"sentences": 20, "search": {"kind": "greedy"}, "steps": [12]}
    assert scores["test"].items() >= expected.items()


@pytest.mark.slow
def test_evaluate_plot_and_translate_read_the_run(demonstration, capsys, monkeypatch):
    """The sentences to translate are arguments or lines of stdin."""
    directory, _ = demonstration
    run = ["--run", str(directory)]
    scores = (directory / "evaluation.json").read_text("utf-8")
    assert cli.main(["evaluate", *run]) == 0
    assert json.loads((directory / "evaluation.json").read_text("utf-8")) == json.loads(scores)
    for file in png_files(directory):
        file.unlink()
    assert cli.main(["plot", *run, "--sentence", "der hund schläft ."]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert len(png_files(directory)) == 6
    assert {*map(str, png_files(directory)), f"{directory}/pictures/attention.html"} <= {*printed}
    blank = ["plot", *run, "--sentence", " \u200b"]
    assert_refused(blank, "--sentence: expected words, got none", capsys)

    assert cli.main(["translate", *run, "der hund schläft .", "ein quux schläft ."]) == 0
    output = capsys.readouterr()
    assert len(output.out.splitlines()) == 2 and output.err == "unknown words: quux\n"
    lines = "der hund schläft .\n\nein quux schläft .\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines.encode())))
    assert cli.main(["translate", *run]) == 0
    first, empty, last = capsys.readouterr().out.split("\n")[:3]
    assert [first, last] == output.out.splitlines() and empty == ""


def assert_same_run(expected: TranslationRun, other: TranslationRun) -> None:
    (state, step), (also, last) = (run.restore(bench().first_state) for run in (expected, other))
    assert step == last == TINY.steps
    assert_equal(state, also)
    assert timeless(expected.metrics()) == timeless(other.metrics())


@pytest.mark.exhaustive
@pytest.mark.default_tiles  # as in the demonstration
def test_a_run_killed_in_its_first_save_begins_anew(demonstration, tmp_path, capsys):
    """Its digests were not written yet."""
    directory, _ = demonstration
    shutil.copytree(directory, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "12")
    shutil.rmtree(tmp_path / "run" / "digests")
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "lo')
    assert cli.main(["train", "--run", str(tmp_path / "run"), "--resume"]) == 0
    assert "starting from the beginning: there is no checkpoint yet" in capsys.readouterr().out
    assert_same_run(TranslationRun.open(directory), TranslationRun.open(tmp_path / "run"))


ALL_THREE = "expected --coordinator, --processes and --process, not"
TRAIN_ON = "train --preset tiny --run run --mesh"
MISTAKES: dict[str, list[tuple[str, str]]] = {
    "": [
        ("--preset huge", "argument --preset: invalid choice: 'huge'"),
        ("train --data nowhere", "found nothing at nowhere"),
        ("train --preset tiny --set steps=x", "steps: expected a valid integer"),
        ("train --resume", "--resume: expected --run DIR"),
        ("dance", "invalid choice: 'dance'"),
        ("trian", "; nearest: train"),
        ("--preset toi", "; nearest: toy"),
        ("train --ste steps=3", "--ste steps=3; nearest: --set, --seed"),
        ("evaluate --run x --bema=3", "--bema=3; nearest: --beam"),
        ("train --preset tiny --set step=3", "'step'; nearest: steps"),
        ("train --set quux=3", "setting 'quux'; `train --help` lists them"),
        ("evaluate", "required: --run"),
        ("evaluate --run nowhere", "expected a run's directory, found none at nowhere"),
        ("translate --run nowhere hallo", "found none at nowhere"),
    ],
    "translate --run nowhere": [
        ("--sample --beam 2", "argument --beam: not allowed with argument --sample"),
        ("--n-best 2", "n_best: expected at most 1 with kind='greedy', got 2"),
        ("--beam 2 --n-best 3", "n_best: expected at most 2 with 2 beams, got 3"),
        ("--sample --seed -1", "seed: expected 0 <= seed < 2^32, got -1"),
        ("--beam 0", "beams: expected a whole number of at least 1, got 0"),
        ("--beam 1001", "beams: expected at most 1000, got 1001"),
        ("--beam 2 --length-penalty 9", "length_penalty: expected -8..8, got 9"),
        ("--max-unpacked -1", "--max-unpacked: expected at least 1, got -1"),
        (f"--max-unpacked {'9' * 30}", "--max-unpacked: expected at most"),
        ("--length-penalty 1", "--length-penalty: expected --beam with it"),
        ("--top-k 3", "--top-k: expected --sample with it"),
        ("--beam 2 --seed 3", "--seed: expected --sample with it"),
        ("--sample --top-p 2", "top_p: expected 0 < top_p <= 1, got 2.0"),
        ("--sample --top-k 0", "top_k: expected a whole number of at least 1, got 0"),
        ("--sample --temperature -1", "temperature: expected a number not below 0, got -1"),
        ("--file nowhere", "no file nowhere"),
        ("--file nowhere hallo", "--file: expected no SENTENCE with it"),
        ("--overwrite", "--overwrite: expected --output PATH with it"),
        ("--output no/where", "--output: no directory no"),
        ("--output .", ". exists already: expected another --output or --overwrite"),
    ],
    TRAIN_ON: [
        ("data=4,modle=2", "expected axes of data, model, context, got 'modle'; nearest: model"),
        ("data=4,data=2", "axis 'data' is given twice in 'data=4,data=2'"),
        ("4x2", "expected AXIS=SIZE,... such as data=4,model=2, got '4x2'"),
        ("data=0,model=8", "expected AXIS=SIZE,... such as data=4,model=2, got 'data=0,model=8'"),
        ("data=4", "data=4,model=1,context=1 takes 4 devices, but there are 8"),
        ("context=16,model=2", "data=1,model=2,context=16 takes 32 devices, but there are 8"),
        ("data=2,model=4", "expected a divisor of num_heads=2 for model, got 4"),
    ],
    "train": [
        ("--processes 2", f"{ALL_THREE} --coordinator\n"),
        ("--coordinator a:1 --process 0", f"{ALL_THREE} --processes\n"),
        ("--distributed --process 0", "expected neither --coordinator nor its companions\n"),
    ],
    "train --process 0 --processes 2 --coordinator": [
        ("a", "--coordinator: expected HOST:PORT, got 'a'\n"),
        *((f"a:{x}", f"a port in 1..65535, got {x:.20}\n") for x in ("0", "65536", "99999")),
        (f"a:{'9' * 5000}", f"a port in 1..65535, got {'9' * 20}\n"),
        ("a:²", "expected HOST:PORT, got 'a:²'\n"),
        ("a:٣", "expected HOST:PORT, got 'a:٣'\n"),
        ("a:1 --process 2", "expected 0 <= it < 2, the number of processes, got 2\n"),
        ("a:1 --processes 0", "--processes: expected 1..65536, got 0\n"),
        ("a:1 --processes 99999999999", "expected 1..65536, got 99999999999\n"),
    ],
}
MISTAKES[TRAIN_ON] = [(mesh, f"error: --mesh: {line}\n") for mesh, line in MISTAKES[TRAIN_ON]]


@pytest.mark.parametrize("command", MISTAKES)
def test_mistakes_in_a_command_are_one_clear_line(command, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for options, message in MISTAKES[command]:
        assert_refused(f"{command} {options}".split(), message, capsys)
        assert not list(tmp_path.iterdir())


def assert_refused(arguments: Any, message: str, capsys: Any, main: Any = cli.main) -> None:
    """The command ends with status 2 and one line that contains the message."""
    try:
        status = main(list(map(str, arguments)))
    except SystemExit as end:
        status = end.code
    error = capsys.readouterr().err
    assert status == 2
    assert message in error and error.count("\n") == 1 and error.endswith("\n")


def test_an_existing_run_is_not_overwritten_unless_asked(tmp_path, capsys, monkeypatch):
    run = saved_run(tmp_path / "demo")
    directory = run.directory
    expect(FileExistsError, "exists already", run.create)
    written = (directory / "config.json").stat().st_mtime_ns
    message = "exists already: expected another --run, --resume or --overwrite"
    assert_refused(["--preset", "tiny", "--run", directory], message, capsys)
    arguments = ["train", "--overwrite", "--run", directory, "--data", "nowhere"]
    assert_refused(arguments, "found nothing at nowhere", capsys)
    assert (directory / "config.json").stat().st_mtime_ns == written
    arguments = ["--preset", "tiny", "--run", tmp_path, "--overwrite"]
    assert_refused(arguments, "is not a run's directory", capsys)
    assert directory.exists()
    monkeypatch.chdir(tmp_path)
    options = make_parser("").parse_args(["demo", "--preset", "tiny"])
    assert new_directory(options) == Path("runs/tiny")
    Path("runs/tiny").mkdir(parents=True)
    assert new_directory(options) == Path("runs/tiny-2")


def test_training_that_diverges_ends_with_one_line(tmp_path, capsys, monkeypatch):
    diverged = training.StepMetrics(*jnp.full(3, jnp.nan))
    monkeypatch.setattr(training, "make_step", lambda *_: lambda state, _: (state, diverged))
    assert cli.main(["train", "--preset", "tiny", "--run", str(tmp_path / "run")]) == 1
    error = capsys.readouterr().err
    assert "training stopped" in error and "error: step" in error and error.count("\n") == 1
