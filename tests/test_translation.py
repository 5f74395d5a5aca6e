"""The translation experiment: loss, optimiser, loop, checkpoints, decoding, scores, commands."""

import contextlib
import dataclasses
import functools
import io
import itertools
import json
import math
import re
import shutil
import signal
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
from experiments.runs.folder import free_directory
from experiments.translation import __main__ as cli
from experiments.translation import decoding, evaluation, pictures, training
from experiments.translation.batches import Batch, Batches, PackedBatches, loss_mask
from experiments.translation.command_line import make_parser
from experiments.translation.commands.plan import new_directory
from experiments.translation.corpus import Pair
from experiments.translation.losses import Projection
from experiments.translation.model import Model
from experiments.translation.presets import PRESETS, Config, differences
from experiments.translation.runs import TextOrigin, TranslationRun, fingerprint, remove
from experiments.translation.text import encode_pairs
from experiments.translation.training import TrainingState
from experiments.translation.vocabulary import BOS, EOS, PAD, Vocabulary, learn_vocabularies
from tests.arrays import assert_equal
from tests.commands import environment, run_python
from tests.conftest import plain_jax


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

    def init_state(self) -> TrainingState:
        return training.init_state(self.model, self.optimiser, self.config.seed)

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

    def run(self, directory: Path, config: Config | None = None) -> TranslationRun:
        origin = TextOrigin(None, ("de", "en"), fingerprint(self.batches.pairs))
        return TranslationRun(directory, config or self.config, self.source, self.target, origin)


def make_bench(config: Config = TINY) -> Bench:
    texts = training.read_texts(config, None)
    source = Vocabulary.build(pair.source for pair in texts.train)
    target = Vocabulary.build(pair.target for pair in texts.train)
    pairs, _ = encode_pairs(texts.train, source, target)
    batches = Batches(pairs, tokens_per_batch=config.tokens_per_batch, max_shapes=1)
    model = Model(config, len(source), len(target))
    optimiser = training.make_optimiser(config, config.steps)
    train_step = training.make_step(model, optimiser, config)
    return Bench(config, texts, source, target, batches, model, optimiser, train_step)


@functools.cache
def bench() -> Bench:
    return make_bench()


def first_batch() -> Batch:
    return next(iter(bench().batches.epoch(0)))


def a_batch(rows: int = 4) -> Batch:
    return Batch(*(array[:rows] for array in first_batch()))


def widened(batch: Batch, places: int) -> Batch:
    """The batch with more columns of padding on both sides."""
    wider = {
        name: np.pad(getattr(batch, name), ((0, 0), (0, places)), constant_values=PAD)
        for name in ("source", "target_in", "target_out")
    }
    return batch._replace(**wider)


@pytest.mark.exhaustive
def test_packed_rows_have_the_loss_and_the_gradients_of_padded_ones():
    """They are those of the same sentences, but not if the arrays that separate the pairs are
    left out."""
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
    for name in gradients:
        np.testing.assert_allclose(grads[name], gradients[name], rtol=1e-4, atol=2e-5)
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


def in_parts(
    model: Any, parts: int, *, dropout_rate: float = 0.0
) -> tuple[TrainingState, training.Step]:
    config = dataclasses.replace(TINY, accumulation_steps=parts, dropout_rate=dropout_rate)
    optimiser = training.make_optimiser(config, config.steps)
    state = training.init_state(model, optimiser, 0)
    return state, training.make_step(model, optimiser, config)


def uneven_batch() -> Batch:
    """Eight rows, most of whose tokens are in the first half."""
    batch = a_batch(8)
    lengths = batch.target_lengths.copy()
    lengths[4:] = 1
    return batch._replace(target_lengths=lengths)


def test_a_batch_accumulated_gives_the_update_of_the_whole():
    updates = []
    for parts in (1, 4):
        state, train_step = in_parts(TwoTables(), parts)
        new_state, measured = jax.device_get(train_step(state, uneven_batch()))
        updates.append((new_state.opt_state[1][0].mu, measured.gradient_norm))
    for whole, accumulated in zip(*map(jax.tree.leaves, updates), strict=True):
        np.testing.assert_allclose(accumulated, whole, rtol=1e-4, atol=1e-7)
    assert max(np.abs(moment).max() for moment in updates[0][0].values()) > 1e-3


def test_every_part_of_every_batch_draws_its_own_dropout():
    model = TwoTables()
    state, train_step = in_parts(model, 4, dropout_rate=0.5)
    for _ in range(2):
        state, _ = train_step(state, uneven_batch())
    jax.effects_barrier()
    assert len(model.dropped) == len(set(model.dropped)) == 8


def test_rows_of_batches_accumulated_are_divisible():
    config = dataclasses.replace(TINY, accumulation_steps=3)
    made = training.make_batches(config, bench().batches.pairs)
    assert all(shape.rows % 3 == 0 for shape in made.shapes)


def test_a_step_takes_the_mean_over_tokens_and_drops_by_seed_and_step():
    batch, state = first_batch(), bench().init_state()
    key = jax.random.fold_in(jax.random.key(TINY.seed), 0)

    @jax.jit
    def total(params, batch):
        options = {"smoothing": 0.1, "dropout_key": key}
        both = training.total_losses(bench().model, params, batch, **options)
        return both[0], both[1]

    gradient_of = jax.jit(jax.value_and_grad(total, has_aux=True))
    (loss, unsmoothed), gradient = gradient_of(state.params, batch)
    norm = math.sqrt(sum(float(jnp.sum(array**2)) for array in gradient.values()))
    _, measured = bench().step(state, batch)
    assert float(measured.loss) == pytest.approx(float(loss), rel=1e-5)
    assert float(measured.unsmoothed_loss) == pytest.approx(float(unsmoothed), rel=1e-5)
    tokens = int(batch.target_lengths.sum())
    assert tokens < batch.target_out.size
    assert float(measured.gradient_norm) == pytest.approx(norm / tokens, rel=1e-3)


def test_a_batch_of_padding_alone_changes_no_parameter():
    empty = Batch(*(np.zeros_like(array) for array in first_batch()))
    state = bench().init_state()
    params = jax.device_get(state.params)
    new_state, measured = bench().step(state, empty)
    assert float(measured.loss) == 0 and float(measured.gradient_norm) == 0
    assert_equal(new_state.params, params)


def test_ids_that_the_model_has_not_got_are_refused_before_the_device():
    batch = a_batch()
    for name, words, wrong in (
        ("target_out", "target labels", -1),
        ("target_out", "target labels", bench().model.target_size),
        ("target_in", "target ids", bench().model.target_size),
        ("source", "source ids", bench().model.source_size),
    ):
        ids = getattr(batch, name).copy()
        ids[0, 0] = wrong
        with pytest.raises(ValueError, match=f"{words} must be in .* got {wrong}"):
            training.check_batch(batch._replace(**{name: ids}), bench().model)
    training.check_batch(batch, bench().model)


@pytest.mark.parametrize("wrong", [-1, 10**6])
def test_ids_to_translate_that_the_model_has_not_got_are_refused(wrong):
    parts = bench()
    with pytest.raises(ValueError, match=f"source ids must be in .* got {wrong}"):
        decoding.translated(parts.model, {}, [[4, wrong, EOS]])
    with pytest.raises(ValueError, match=f"target ids must be in .* got {wrong}"):
        decoding.alignments(parts.model, {}, [[4, EOS]], [[wrong, EOS]])


def test_a_vocabulary_larger_than_the_models_is_noticed():
    parts = bench()
    larger = Vocabulary((*parts.source.words, "ufo"))
    pairs = [Pair("ufo", "the", "")]
    evaluator = evaluation.Evaluator(parts.model, pairs, larger, parts.target)
    with pytest.raises(ValueError, match="source ids must be in"):
        evaluator.token_loss({})


def test_the_decoder_sees_no_later_word():
    batch, model = a_batch(1), bench().model
    params, compute = model.init(3), jax.jit(model.logits)
    logits = compute(params, batch)
    for place in range(1, int(batch.target_lengths[0])):
        other = batch.target_in.copy()
        other[0, place] = 4 + (other[0, place] + 1) % (model.target_size - 4)
        changed = compute(params, batch._replace(target_in=other))
        np.testing.assert_array_equal(changed[0, :place], logits[0, :place])
        assert float(jnp.abs(changed[0, place] - logits[0, place]).max()) > 1e-3


def test_learning_rate_of_every_schedule():
    config = dataclasses.replace(TINY, learning_rate=0.5, warmup_steps=4, steps=12)

    def rates(schedule):
        rate = training.learning_rate(dataclasses.replace(config, schedule=schedule), 12)
        return [float(rate(step)) for step in range(12)]

    for schedule in ("constant", "cosine", "inverse_sqrt"):
        np.testing.assert_allclose(rates(schedule)[:4], [0.125, 0.25, 0.375, 0.5], rtol=1e-6)
    np.testing.assert_allclose(rates("constant")[4:], [0.5] * 8)
    half = [0.25 * (1 + math.cos(math.pi * place / 9)) for place in range(1, 9)]
    np.testing.assert_allclose(rates("cosine")[4:], half, rtol=1e-5)
    assert rates("cosine")[-1] > 0
    paper = [min((step + 1) ** -0.5, (step + 1) * 4**-1.5) for step in range(12)]
    np.testing.assert_allclose(rates("inverse_sqrt"), np.array(paper) * 0.5 * 2, rtol=1e-5)


def test_the_first_step_moves_every_parameter_that_it_should():
    state = bench().init_state()
    params = jax.device_get(state.params)
    new_state, _ = bench().step(state, first_batch())
    still = [name for name in params if np.array_equal(params[name], new_state.params[name])]
    # Moving all keys by one vector moves no weight of a softmax.
    assert all(name.endswith("/key/bias") for name in still)


def timeless(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Records of metrics without the measured times."""
    clock = ("seconds", "tokens_per_second")
    return [{k: v for k, v in record.items() if k not in clock} for record in records]


def trained(bench: Bench, first: TrainingState | None = None, **changes):
    """The state at the end and the records."""
    records = []
    loop = bench.loop(report=records.append, **changes)
    state = loop.run(bench.init_state() if first is None else first)
    return state, timeless(records)


def test_loss_falls_and_the_same_seed_gives_the_same_numbers():
    state, records = trained(bench())
    again, same = trained(bench())
    assert_equal(state, again)
    assert records == same
    losses = [record["loss"] for record in records if "loss" in record]
    assert losses[0] > losses[-1] + 0.2
    assert int(state.step) == TINY.steps


def test_what_a_record_says():
    _, records = trained(bench())
    reported = [record for record in records if "loss" in record]
    batches = list(itertools.islice(bench().batches.from_step(0), TINY.steps))
    assert sum(record["tokens"] for record in reported) == sum(
        int(batch.target_lengths.sum()) for batch in batches
    )
    assert [record["step"] for record in reported][-1] == TINY.steps
    assert TINY.label_smoothing > 0
    assert all(0 < record["unsmoothed_loss"] < record["loss"] for record in reported[-1:])
    rate = training.learning_rate(TINY, TINY.steps)
    assert reported[0]["learning_rate"] == pytest.approx(float(rate(reported[0]["step"] - 1)))


def test_validation_at_the_end_of_each_epoch_and_of_training():
    _, records = trained(bench(), validate=lambda params: {"validation_loss": 1.0})
    validated = [record["step"] for record in records if "validation_loss" in record]
    per_epoch = len(bench().batches)
    ends = {*range(per_epoch, TINY.steps + 1, per_epoch), TINY.steps}
    assert validated == sorted(ends)


class Killed(Exception):
    """Ends a training as suddenly as a power cut would."""


def saved_halfway(directory: Path) -> TranslationRun:
    """A run killed after its first checkpoint."""
    run = bench().run(directory)
    run.create()

    def report(record):
        run.report(record)
        if record["step"] > TINY.checkpoint_every:
            raise Killed

    save = lambda state: run.save(state, int(state.step))  # noqa: E731
    with pytest.raises(Killed):
        bench().loop(report=report, save=save).run(bench().init_state())
    return run


def test_resumed_is_bit_for_bit_the_uninterrupted_run(tmp_path):
    expected, records = trained(bench())
    run = saved_halfway(tmp_path / "run")
    opened = TranslationRun.open(tmp_path / "run")
    assert opened == run
    saved, step = opened.restore(jax.eval_shape(bench().init_state))
    assert step == TINY.checkpoint_every < TINY.steps
    resumed, rest = trained(bench(), jax.tree.map(jnp.asarray, saved))
    assert_equal(resumed, expected)
    assert rest == [record for record in records if record["step"] > step]
    opened.forget_metrics_after(step)
    assert max(record["step"] for record in opened.metrics()) <= step


def test_a_loss_that_is_no_number_stops_training_and_keeps_the_last_checkpoint(tmp_path):
    run = bench().run(tmp_path / "run")
    run.create()
    poisoned_at = TINY.checkpoint_every + 2

    def poisoned_step(state, batch):
        number = int(state.step) + 1
        state, measured = bench().step(state, batch)
        if number == poisoned_at:
            params = {name: array * jnp.nan for name, array in state.params.items()}
            return state._replace(params=params), measured._replace(loss=measured.loss * jnp.nan)
        return state, measured

    loop = bench().loop(step=poisoned_step, save=lambda state: run.save(state, int(state.step)))
    with pytest.raises(training.NonFiniteLoss, match=f"step {poisoned_at}: .* nan"):
        loop.run(bench().init_state())
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
    run = bench().run(directory, dataclasses.replace(TINY, **changes))
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


def test_the_arrays_of_another_model_are_refused_by_name(tmp_path):
    run = saved_run(tmp_path / "run", 1)
    wider = small_tree()._replace(params={"a/kernel": jnp.ones((2, 4)), "c": jnp.ones(4)})
    with pytest.raises(ValueError) as error:
        run.restore(wider)
    differs = "a/kernel: float32[2, 3], not float32[2, 4]", "b: bfloat16[4], not nothing"
    for message in (*differs, "c: nothing, not float32[4]"):
        assert f"params/{message}" in str(error.value)


def test_a_run_begun_differently_is_refused_naming_what_differs(tmp_path):
    run = saved_run(tmp_path / "run")
    other = dataclasses.replace(TINY, features=32, seed=5)
    with pytest.raises(ValueError, match="features: 16, not 32") as error:
        run.check_same(dataclasses.replace(run, config=other))
    assert "seed: 0, not 5" in str(error.value)
    fewer = dataclasses.replace(run, source=Vocabulary(run.source.words[1:]))
    with pytest.raises(ValueError, match="the vocabularies"):
        run.check_same(fewer)
    elsewhere = dataclasses.replace(run.origin, fingerprint="0")
    with pytest.raises(ValueError, match="the training text"):
        run.check_same(dataclasses.replace(run, origin=elsewhere))
    run.check_same(TranslationRun.open(run.directory))


def test_an_existing_directory_is_neither_written_into_nor_deleted(tmp_path):
    run = saved_run(tmp_path / "run")
    with pytest.raises(FileExistsError, match="exists already"):
        run.create()
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.txt").write_text("words")
    with pytest.raises(ValueError, match="is not a run's directory"):
        remove(tmp_path / "precious")
    assert (tmp_path / "precious" / "thesis.txt").exists()
    assert free_directory(tmp_path / "run") == tmp_path / "run-2"
    remove(tmp_path / "run")
    assert not list((tmp_path / "run").iterdir())
    (tmp_path / "run").rmdir()
    assert free_directory(tmp_path / "run") == tmp_path / "run"


def test_metrics_are_lines_of_valid_json(tmp_path):
    run = saved_run(tmp_path / "run")
    run.report({"step": 1, "loss": float("nan"), "norm": float("inf"), "name": "\u2028"})
    run.report({"step": 2, "loss": 0.5})
    lines = (run.directory / "metrics.jsonl").read_text("utf-8").split("\n")
    assert json.loads(lines[0], parse_constant=pytest.fail)["loss"] is None
    assert len(lines) == 3 and run.metrics()[1] == {"step": 2, "loss": 0.5}


@pytest.mark.parametrize("content", ["[]", '{"format": "jattn-translation-run"}', "{"])
def test_a_run_directory_with_other_content_is_refused(tmp_path, content):
    run = saved_run(tmp_path / "run")
    (run.directory / "config.json").write_text(content)
    with pytest.raises((ValueError, FileNotFoundError), match="expected"):
        TranslationRun.open(run.directory)


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
    ):
        with pytest.raises(ValueError, match=message) as error:
            TINY.changed(setting.split())
        assert "\n" not in str(error.value)


def test_a_recurrent_state_takes_no_packed_rows():
    with pytest.raises(ValueError, match="packed_width: expected 0 with architecture='rnnsearch'"):
        dataclasses.replace(TINY, architecture="rnnsearch", packed_width=64)


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


def test_the_tutorial_preset_has_the_published_number_of_parameters():
    shapes = Model(PRESETS["multi30k"], 7853, 5893).shapes
    assert sum(math.prod(shape.shape) for shape in shapes.values()) == 9_038_341


def test_every_preset_describes_a_model():
    for config in PRESETS.values():
        shallow = dataclasses.replace(config, encoder_layers=1, decoder_layers=1)
        embedding = Model(shallow, 50, 60).shapes["target_tokens/embedding"]
        assert embedding.shape == (60, config.features)


@functools.cache
def decided_params():
    """Random parameters, so large that the translation depends much on the source."""
    return {name: 3 * array for name, array in bench().model.init(4).items()}


def padded(rows, width: int) -> np.ndarray:
    return np.array([[*row, *[PAD] * (width - len(row))] for row in rows], np.int32)


def batch_of(sources, targets, width: int) -> Batch:
    """A batch of rows of ids, with targets padded to the width."""
    read, labels = padded([[BOS, *row[:-1]] for row in targets], width), padded(targets, width)
    lengths = np.array([len(row) for row in sources], np.int32)
    return Batch(padded(sources, 24), lengths, read, labels, (labels != PAD).sum(1))


def test_translations_are_what_the_model_finds_likeliest_after_each_prefix():
    parts, params = bench(), decided_params()
    rows = [parts.source.encode(pair.source) for pair in parts.texts.validation[:6]]
    generated = decoding.translated(parts.model, params, rows)
    batch = batch_of(rows, generated, TINY.max_length)
    logits = np.array(jax.jit(parts.model.logits)(params, batch))
    logits[..., [PAD, BOS]] = -np.inf
    for row, scores in zip(generated, logits, strict=True):
        np.testing.assert_array_equal(scores.argmax(-1)[: len(row)], row)
        assert len(row) == TINY.max_length or row[-1] == EOS
        assert list(row).count(EOS) == (row[-1] == EOS)
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


def test_all_steps_together_fit_the_counter():
    config = TINY.changed(["steps=0", "epochs=2147483647"])
    with pytest.raises(ValueError, match="epochs: expected at most 2147483647 steps in all, got"):
        training.make_batches(config, bench().batches.pairs)


def test_a_model_that_no_memory_holds_is_refused_before_it_is_made(tmp_path, capsys):
    large = ("features=262144", "feed_forward=262144", "sentences=100")
    changes = [part for text in large for part in ("--set", text)]
    run = tmp_path / "run"
    assert cli.main(["train", "--preset", "tiny", "--run", str(run), *changes]) == 2
    message = (
        r"a model of [\d,]+ parameters takes at least [\d,]+ GB to train, and there are [\d,]+ GB"
    )
    assert re.fullmatch(f"error: {message}\n", capsys.readouterr().err)
    assert not run.exists()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", ["greedy", "beam", "sample"])
def test_a_model_that_gives_no_probabilities_translates_nothing(kind):
    parts, params = bench(), dict(decided_params())
    name = next(name for name in params if "decoder" in name and "kernel" in name)
    params[name] = params[name] * np.nan
    rows = [parts.source.encode(pair.source) for pair in parts.texts.validation[:2]]
    with pytest.raises(Failure, match=r"sentence [12]: the model gives no probabilities \(NaN\)"):
        decoding.translations(parts.model, params, rows, decoding.Search(kind=kind, beams=2))
    evaluator = evaluation.Evaluator(
        parts.model, parts.texts.validation[:2], parts.source, parts.target
    )
    with pytest.raises(Failure, match="the loss is NaN"):
        evaluator.token_loss(params)


@pytest.mark.parametrize("score", ["bleu", "chrf", "word_bleu"])
def test_scores_want_a_reference_for_each_translation(score):
    function = getattr(evaluation, score)
    options = {} if score == "word_bleu" else {"lower": True}
    text = ["a", "b"] if score == "word_bleu" else "a b"
    for translations, references in (([text], [text, text]), ([text, text], [text]), ([text], [])):
        expected = f"references: expected {len(translations)}, .* got {len(references)}"
        with pytest.raises(ValueError, match=expected):
            function(translations, references, **options)
    with pytest.raises(ValueError, match="translations: expected at least one, got none"):
        function([], [], **options)
    for arguments in (("a b", [text] * 3), ([text], "a")):
        with pytest.raises(TypeError, match="expected several texts, got the text 'a"):
            function(*arguments, **options)


def test_scores_of_identical_and_of_other_text():
    words = ["the man sees the old dog .", "a woman reads this book today ."]
    assert evaluation.bleu(words, words, lower=False) == pytest.approx(100)
    assert evaluation.chrf(words, words, lower=False) == pytest.approx(100)
    shouted = [text.upper() for text in words]
    assert evaluation.bleu(words, shouted, lower=True) == pytest.approx(100)
    assert evaluation.bleu(words, shouted, lower=False) < 20
    other = ["the man saw an old dog .", "a woman reads this book ."]
    expected = sacrebleu.corpus_bleu(other, [words]).score
    assert evaluation.bleu(other, words, lower=False) == expected < 90
    assert evaluation.chrf(other, words, lower=False) == sacrebleu.corpus_chrf(other, [words]).score


def test_bleu_of_words_neither_cuts_nor_smooths_nor_lowers_them():
    random = np.random.default_rng(0)
    wanted = [[f"w{n}" for n in random.integers(0, 5, length)] for length in (9, 7, 12, 5, 3)]
    generated = [[*words[:-2], "it's", "10,0"] for words in wanted]
    texts = [[" ".join(words) for words in side] for side in (generated, wanted)]
    options = {"tokenize": "none", "smooth_method": "none", "force": True}
    expected = sacrebleu.corpus_bleu(texts[0], [texts[1]], **options).score
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
def test_loss_weighs_every_token_alike_and_perplexity_is_its_exponential():
    parts, params = bench(), decided_params()
    evaluator = evaluation.Evaluator(
        parts.model, parts.texts.validation, parts.source, parts.target
    )
    sources = [parts.source.encode(pair.source) for pair in parts.texts.validation]
    targets = [parts.target.encode(pair.target) for pair in parts.texts.validation]
    batch, labels = batch_of(sources, targets, 24), padded(targets, 24)
    logits = jax.jit(parts.model.logits)(params, batch)
    log_probs = scipy.special.log_softmax(np.asarray(logits, np.float64), axis=-1)
    loss = -np.take_along_axis(log_probs, labels[..., None], -1)[labels != PAD].mean()
    result = evaluator(params)
    assert result.scores.loss == pytest.approx(loss, rel=1e-5)
    assert result.scores.perplexity == pytest.approx(math.exp(loss), rel=1e-4)
    assert result.scores.sentences == len(result.translations) == len(parts.texts.validation)


def test_exact_match_is_counted_by_construction():
    pairs = [Pair("a", "The dog sleeps .", "x"), Pair("b", "a cat", "y")]
    pairs.append(Pair("c", "the dog sleeps.", "x"))
    parts = bench()
    evaluator = evaluation.Evaluator(parts.model, pairs, parts.source, parts.target)
    generated = ["the dog sleeps.", "a dog", "the dog sleeps."]
    scores = evaluator.score(generated, [text.split() for text in generated], loss=1.0)
    assert scores.exact_match == pytest.approx(2 / 3)
    assert scores.constructions == {"x": (2, 2), "y": (0, 1)}
    assert "x" in evaluation.table("test", scores) and "66.7%" in evaluation.table("test", scores)


@pytest.mark.slow
def test_pictures_of_attention_have_a_panel_per_head(tmp_path):
    rng = np.random.default_rng(0)
    tokens = ["$a$", "<eos>", "_b^", "größe", "<unk>"]
    layers = [f"encoder/layers/{n}/self_attention" for n in (0, 1)]
    weights = {name: rng.dirichlet(np.ones(7), (4, 9)) for name in layers}
    layers = [f"decoder/layers/{n}/cross_attention" for n in (1, 0)]
    weights |= {name: rng.dirichlet(np.ones(7), (4, 8)) for name in layers}
    seen = pictures.Seen(weights, tokens, tokens[:3], tokens[:4])
    attentions = seen.attentions()
    shapes = {"encoder self-attention": (2, 4, 5, 5), "cross-attention": (2, 4, 4, 5)}
    assert {name: array.shape for name, array in attentions.items()} == shapes
    layer = weights["decoder/layers/1/cross_attention"]
    np.testing.assert_array_equal(attentions["cross-attention"][1], layer[:, :4, :5])
    files = pictures.draw_sentence(seen, tmp_path)
    names = ["attention", "encoder-self-attention", "cross-attention"]
    assert [file.stem for file in files] == names
    for file in files:
        image = imread(file)
        assert np.unique(image.reshape(-1, image.shape[-1]), axis=0).shape[0] > 20
    # At the width of a README the picture of one head is not made smaller.
    assert imread(files[0]).shape[1] < 830


def test_the_head_in_the_picture_is_sharp_and_leaves_no_key_out():
    weights = np.full((2, 3, 3, 3), 1 / 3)
    weights[0, 2] = np.eye(3)[0]  # sharp, but of one key
    weights[1, 1] = 0.8 * np.eye(3)[::-1] + 0.2 / 3
    assert pictures.clearest_head(weights) == (1, 1)


@pytest.fixture
def figures(monkeypatch) -> list[Any]:
    """Figures that are drawn, instead of files."""
    figures = []
    monkeypatch.setattr(pictures, "_save", lambda figure, path: figures.append(figure))
    return figures


def test_pictures_say_what_each_word_reads(tmp_path, figures):
    weights = {
        "encoder/layers/0/self_attention": np.full((1, 2, 2), 0.5),
        "decoder/layers/0/self_attention": np.tril(np.full((1, 3, 3), 0.3)),
        "decoder/layers/0/cross_attention": np.full((1, 3, 2), 0.5),
    }
    seen = pictures.Seen(weights, ["a", "b"], ["<bos>", "c", "d"], ["c", "d", "<eos>"])
    pictures.draw_sentence(seen, tmp_path)
    titles = [figure.get_suptitle() for figure in figures]
    assert figures[0].axes[0].get_title() == "cross-attention, layer 1, head 1"
    assert "decoder self-attention: each word attends to itself and the words before it" in titles


def test_losses_on_the_axis_are_round_numbers(tmp_path, figures):
    records = [
        {"step": 1, "loss": 3.5, "unsmoothed_loss": 3.0},
        {"step": 2, "loss": 1.2, "unsmoothed_loss": 0.17, "validation_loss": 0.2},
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


def test_the_axis_of_bleu_begins_at_0(tmp_path, figures):
    records = [{"step": step, "validation_bleu": 30.0 + step} for step in (1, 2, 3)]
    pictures.draw_bleu(records, tmp_path / "x.png")
    (axes,) = figures[0].axes
    assert axes.get_ylim()[0] == 0
    assert all(x == int(x) for x in axes.get_xticks())


@pytest.fixture(scope="module")
def demonstration(tmp_path_factory):
    """The whole demonstration with the tiny preset: its directory and what it printed."""
    directory = tmp_path_factory.mktemp("runs") / "demo"
    printed = io.StringIO()
    jax.clear_caches()  # of programs with the smaller tiles that single tests have
    with plain_jax(), contextlib.redirect_stdout(printed):
        assert cli.main(["--preset", "tiny", "--run", str(directory)]) == 0
    jax.clear_caches()
    return directory, printed.getvalue()


def png_files(directory: Path) -> list[Path]:
    return sorted((directory / "pictures").glob("*.png"))


@pytest.mark.slow
def test_the_demonstration_writes_and_prints_what_it_promises(demonstration):
    directory, printed = demonstration
    files = "config.json source.json target.json metrics.jsonl evaluation.json lock"
    folders = "checkpoints digests pictures"
    assert {path.name for path in directory.iterdir()} == {*files.split(), *folders.split()}
    assert TranslationRun.open(directory).steps() == [6, 12]
    names = "attention bleu cross-attention decoder-self-attention encoder-self-attention loss"
    assert [file.stem for file in png_files(directory)] == names.split()
    page = directory / "pictures" / "attention.html"
    assert str(page) in printed
    (about,) = re.findall(r'id="about">([^<]*)<', page.read_text(encoding="utf-8"))
    sentences = json.loads(about)["sentences"]
    assert 2 <= len(sentences) <= 6
    for sentence in sentences:
        names = [part["name"] for part in sentence["attentions"]]
        assert names == ["encoder self-attention", "decoder self-attention", "cross-attention"]
        encoder, decoder, cross = sentence["attentions"]
        assert cross["columns"] == encoder["rows"] and cross["rows"][:-1] == decoder["rows"][1:]
        assert decoder["mask"] and not encoder["mask"]
    for file in png_files(directory):
        height, width = imread(file).shape[:2]
        assert 200 < height < 3000 and 300 < width < 3000
    assert printed.split("\ntranslations:\n")[1].count("  -> ") == 5
    *_, summary, deeper, _, _, _, _, _, advice, path, _ = printed.split("\n")
    assert re.fullmatch(r"held-out sentences, test: [\d.]+% of 20 exactly right", summary)
    expected = (
        r"clauses nested deeper than .*: [\d.]+% of 20 exactly right \(BLEU .*\), which is hard"
    )
    assert re.match(expected, deeper)
    assert (advice, path) == ("to see what each word attends to, open", f"  {page}")
    assert "test: 20 sentences" in printed and "deeper: 20 sentences" in printed
    assert "validation: loss" in printed and str(directory) in printed
    scores = json.loads((directory / "evaluation.json").read_text("utf-8"))
    assert set(scores) == {"test", "deeper"} and scores["test"]["sentences"] == 20


@pytest.mark.slow
def test_evaluate_and_plot_read_the_run(demonstration, capsys):
    directory, _ = demonstration
    scores = json.loads((directory / "evaluation.json").read_text("utf-8"))
    assert cli.main(["evaluate", "--run", str(directory)]) == 0
    assert json.loads((directory / "evaluation.json").read_text("utf-8")) == scores
    for file in png_files(directory):
        file.unlink()
    assert cli.main(["plot", "--run", str(directory), "--sentence", "der hund schläft ."]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert len(png_files(directory)) == 6
    assert str(directory / "pictures" / "attention.html") in printed
    blank = ["plot", "--run", str(directory), "--sentence", " \u200b"]
    assert_refused(blank, "--sentence: expected words, got none", capsys)
    assert all(str(file) in printed for file in png_files(directory))


@pytest.mark.slow
def test_evaluate_with_beams_says_so(demonstration, tmp_path, capsys):
    directory, _ = demonstration
    shutil.copytree(directory, tmp_path / "run")
    run = ["evaluate", "--run", str(tmp_path / "run")]
    assert cli.main([*run, "--beam", "3", "--length-penalty", "1"]) == 0
    printed = capsys.readouterr().out
    assert "the parameters after step 12; beam search, beams 3, length penalty 1.0" in printed
    assert "word BLEU" in printed
    beam = json.loads((tmp_path / "run" / "evaluation.json").read_text("utf-8"))
    greedy = json.loads((directory / "evaluation.json").read_text("utf-8"))
    assert greedy["test"]["search"] == {"kind": "greedy"} and greedy["test"]["steps"] == [12]
    assert beam["test"]["search"] == {"kind": "beam", "beams": 3, "length_penalty": 1.0}
    assert beam["test"].keys() == greedy["test"].keys() >= {"bleu", "word_bleu", "constructions"}
    assert beam["test"]["loss"] == greedy["test"]["loss"]
    without_beam = [*run, "--length-penalty", "1"]
    assert_refused(without_beam, "--length-penalty: expected --beam with it", capsys)


@pytest.mark.slow
def test_beams_are_what_is_scored():
    parts, params = bench(), decided_params()
    pairs = parts.texts.validation[:6]
    search = decoding.Search(kind="beam", beams=3, length_penalty=1.0)
    evaluator = evaluation.Evaluator(parts.model, pairs, parts.source, parts.target, search)
    rows = [parts.source.encode(pair.source) for pair in pairs]
    generated = decoding.translated(parts.model, params, rows, search)
    id_rows = generated, decoding.translated(parts.model, params, rows)
    by_beam, greedy = ([*map(parts.target.decode, ids)] for ids in id_rows)
    counts = []
    assert evaluator(params, report=counts.append).translations == by_beam != greedy
    assert sum(counts) == len(pairs)


@pytest.mark.slow
def test_translate_takes_arguments_or_lines(demonstration, capsys, monkeypatch):
    directory, _ = demonstration
    run = ["translate", "--run", str(directory)]
    assert cli.main([*run, "der hund schläft .", "ein quux schläft ."]) == 0
    output = capsys.readouterr()
    assert len(output.out.splitlines()) == 2 and output.err == "unknown words: quux\n"
    lines = "der hund schläft .\n\nein quux schläft .\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines.encode())))
    assert cli.main(run) == 0
    first, empty, last = capsys.readouterr().out.split("\n")[:3]
    assert [first, last] == output.out.splitlines() and empty == ""


@pytest.mark.slow
def test_real_pairs_are_trained_on_and_resumed(tmp_path, capsys):
    parts = bench()
    for name, pairs in (("train", parts.texts.train), ("val", parts.texts.validation)):
        for side, suffix in enumerate(("de", "en")):
            text = "".join(pair[side] + "\n" for pair in pairs)
            (tmp_path / f"{name}.{suffix}").write_text(text, "utf-8")
    run = str(tmp_path / "run")
    data = ["--data", str(tmp_path)]
    assert cli.main(["train", "--preset", "tiny", *data, "--run", run, "--set", "steps=2"]) == 0
    printed = capsys.readouterr().out
    assert "read 300 pairs, kept 300" in printed and "validation: loss" in printed
    resume = ["train", "--run", run, "--resume"]
    assert_refused(resume, "has already run all its 2 steps", capsys)
    message = "was started differently: features: 16, not 32"
    assert_refused([*resume, "--set", "features=32"], message, capsys)
    with (tmp_path / "train.de").open("a", encoding="utf-8") as file:
        file.write("der hund schläft .\n")
    assert_refused(resume, "same number of lines", capsys)


def assert_same_run(expected: TranslationRun, other: TranslationRun) -> None:
    like = jax.eval_shape(bench().init_state)
    (state, step), (also, last) = expected.restore(like), other.restore(like)
    assert step == last == TINY.steps
    assert_equal(state, also)
    assert timeless(expected.metrics()) == timeless(other.metrics())


@pytest.mark.exhaustive
@pytest.mark.default_tiles  # as in the demonstration
def test_a_run_killed_in_its_first_save_begins_anew(demonstration, tmp_path, capsys):
    """Its digests were not written yet. A difference of one bit at the end would be noticed."""
    directory, _ = demonstration
    shutil.copytree(directory, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "12")
    shutil.rmtree(tmp_path / "run" / "digests")
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "lo')
    assert cli.main(["train", "--run", str(tmp_path / "run"), "--resume"]) == 0
    assert "starting from the beginning: there is no checkpoint yet" in capsys.readouterr().out
    whole, again = TranslationRun.open(directory), TranslationRun.open(tmp_path / "run")
    assert_same_run(whole, again)
    state, step = again.restore(jax.eval_shape(bench().init_state))
    rate = state.opt_state[1][0].nu["output/kernel"]
    rate.flat[-1] = np.nextafter(rate.flat[-1], np.float32(9))
    again.save(state, step)
    with pytest.raises(AssertionError, match="not equal"):
        assert_same_run(whole, again)


KILLED_WHILE_SAVING = """
import os, signal, sys
from experiments.translation.__main__ import main

def kill(event, arguments):
    if event == "os.rename" and str(arguments[1]).endswith("/killed/checkpoints/12"):
        os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(kill)
main(["train", "--preset", "tiny", "--run", "killed"])
"""


@pytest.mark.slow
@pytest.mark.default_tiles  # as in the demonstration
def test_a_run_killed_while_saving_is_resumed_bit_for_bit(demonstration, tmp_path, capsys):
    """Another process resumes it, and it ends like a run that was never interrupted."""
    variables = environment(JAX_DISABLE_MOST_OPTIMIZATIONS="1")
    killed = run_python("-c", KILLED_WHILE_SAVING, cwd=tmp_path, env=variables)
    assert killed.returncode == -signal.SIGKILL
    assert TranslationRun.open(tmp_path / "killed").steps() == [6]
    assert cli.main(["train", "--run", str(tmp_path / "killed"), "--resume"]) == 0
    assert "resuming from the checkpoint after step 6" in capsys.readouterr().out
    assert_same_run(TranslationRun.open(demonstration[0]), TranslationRun.open(tmp_path / "killed"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "huge"], "argument --preset: invalid choice: 'huge'"),
        (["train", "--data", "nowhere"], "found nothing at nowhere"),
        (["train", "--preset", "tiny", "--set", "steps=x"], "steps: expected a valid integer"),
        (["train", "--resume"], "--resume: expected --run DIR"),
        (["dance"], "invalid choice: 'dance'"),
        (["trian"], "invalid choice: 'trian'"),
        (["trian"], "; nearest: train"),
        (["--preset", "toi"], "; nearest: toy"),
        (
            ["train", "--preset", "tiny", "--ste", "steps=3"],
            "--ste steps=3; nearest: --set, --seed",
        ),
        (["evaluate", "--run", "x", "--bema=3"], "--bema=3; nearest: --beam"),
        (["train", "--preset", "tiny", "--set", "step=3"], "'step'; nearest: steps"),
        (["train", "--set", "quux=3"], "setting 'quux'; `train --help` lists them"),
        (["evaluate"], "required: --run"),
        (["evaluate", "--run", "nowhere"], "expected a run's directory, found none at nowhere"),
        (["translate", "--run", "nowhere", "hallo"], "found none at nowhere"),
    ],
)
def test_errors_are_one_clear_line(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert_refused(arguments, message, capsys)
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
    directory = saved_run(tmp_path / "demo").directory
    written = (directory / "config.json").stat().st_mtime_ns
    message = "exists already: expected another --run, --resume or --overwrite"
    assert_refused(["--preset", "tiny", "--run", str(directory)], message, capsys)
    arguments = ["train", "--overwrite", "--run", str(directory), "--data", "nowhere"]
    assert_refused(arguments, "found nothing at nowhere", capsys)
    assert (directory / "config.json").stat().st_mtime_ns == written
    (other := tmp_path / "other").mkdir()
    (other / "file").touch()
    arguments = ["--preset", "tiny", "--run", str(other), "--overwrite"]
    assert_refused(arguments, "is not a run's directory", capsys)
    assert (other / "file").exists()
    monkeypatch.chdir(tmp_path)
    options = make_parser("").parse_args(["demo", "--preset", "tiny"])
    assert new_directory(options) == Path("runs/tiny")
    Path("runs/tiny").mkdir(parents=True)
    assert new_directory(options) == Path("runs/tiny-2")


@pytest.mark.slow
def test_training_that_diverges_ends_with_one_line(tmp_path, capsys):
    run = str(tmp_path / "run")
    settings = ["--set", "learning_rate=1e30", "--set", "report_every=1", "--set", "norm=post"]
    assert cli.main(["train", "--preset", "tiny", "--run", run, *settings]) == 1
    error = capsys.readouterr().err
    assert "training stopped" in error and "error: step" in error and error.count("\n") == 1
