"""Trains a model: reads the text, builds the batches, the loss, the optimiser and the training
step, and runs the training loop (`TrainingLoop`).

The order of the data and the dropout masks depend only on the configuration's seed and the step
number. A checkpoint therefore needs only parameters, optimiser state and step number, and a run
resumed from it ends with the same bits as an uninterrupted run.
"""

import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from tqdm import tqdm

from experiments.runs.console import progress
from experiments.runs.ending import Diverged, interruptible
from experiments.translation import corpus, data
from experiments.translation.batches import (
    AnyBatch,
    Batches,
    Epochs,
    PackedBatches,
    loss_mask,
)
from experiments.translation.corpus import Pair
from experiments.translation.losses import cross_entropies
from experiments.translation.meshes import ONE_DEVICE, Placement
from experiments.translation.model import Model, Params
from experiments.translation.presets import Config
from experiments.translation.text import EncodedPairs
from experiments.translation.vocabulary import check_ids


_MOST_STEPS = 2**31 - 1  # steps are counted in int32

# ------------------------------------------------------------------------------------------- text


@dataclass(frozen=True)
class TrainingTexts:
    """Sentence pairs for training, for validation during training, and for evaluation afterwards.

    Attributes:
        train: training pairs.
        validation: held-out pairs for the figures printed after each epoch.
        tests: named sets of held-out pairs; the first is the main one.
        reports: one report for each file that was read.
    """

    train: list[Pair]
    validation: list[Pair]
    tests: dict[str, list[Pair]]
    reports: list[data.ReadReport] = field(default_factory=list)


def read_texts(
    config: Config,
    path: str | Path | None,
    languages: Sequence[str] = data.LANGUAGES,
    *,
    training: bool = True,
    most_unpacked: int = data.MOST_UNPACKED,
) -> TrainingTexts:
    """Reads the text of a folder or file, or generates the built-in corpus if `path` is None.

    Without `training`, the corpus has no training pairs and is generated faster; its held-out
    pairs are the same.

    Raises:
        FileNotFoundError, ValueError: for the same reasons as `data.read_dataset`.
    """
    if path is None:
        held_out = config.held_out
        parts = corpus.splits(
            train=config.sentences if training else 0,
            validation=held_out,
            test=held_out,
            deeper=held_out,
            seed=config.seed,
        )
        return TrainingTexts(
            parts.train, parts.validation, {"test": parts.test, "deeper": parts.deeper}
        )
    dataset = data.read_dataset(path, languages=languages, most_unpacked=most_unpacked)
    tests = {"test": dataset.test} if dataset.test else {"validation": dataset.validation}
    return TrainingTexts(dataset.train, dataset.validation, tests, list(dataset.reports.values()))


def make_batches(config: Config, pairs: EncodedPairs) -> Epochs:
    """Builds the training batches for a configuration.

    Raises:
        ValueError: the sizes contradict each other; the message names them.
    """
    sizes: dict[str, Any] = {
        "tokens_per_batch": config.tokens_per_batch or None,
        "rows_per_batch": config.rows_per_batch or None,
        "row_multiple": config.accumulation_steps,
        "seed": config.seed,
    }
    batches: Epochs
    if config.packed_width:
        batches = PackedBatches(pairs, width=config.packed_width, **sizes)
    else:
        batches = Batches(pairs, max_shapes=config.max_shapes, **sizes)
    if (steps := total_steps(config, batches)) > _MOST_STEPS:
        raise ValueError(f"epochs: expected at most {_MOST_STEPS} steps in all, got {steps}")
    return batches


# ------------------------------------------------------------------------------------------- loss


def total_loss(model: Model, params: Params, batch: AnyBatch, **options: Any) -> Array:
    """Returns the first of `total_losses`, the sum with label smoothing."""
    return total_losses(model, params, batch, **options)[0]


def total_losses(
    model: Model,
    params: Params,
    batch: AnyBatch,
    *,
    smoothing: float = 0.0,
    dropout_key: Array | None = None,
    num_shards: tuple[int, int] = (1, 1),
) -> Array:
    """Returns the sum of the losses of a batch's target tokens with and without label smoothing,
    `[2]`.

    `num_shards` gives the numbers of device shards of rows and of positions.
    """
    features, projection = model.features(params, batch, dropout_key=dropout_key)
    mask = loss_mask(batch)
    options = {"smoothing": smoothing, "num_shards": num_shards}
    return cross_entropies(features, projection, batch.target_out, mask, **options)


def check_batch(batch: AnyBatch, model: Model) -> None:
    """Checks that all ids of a batch are in the vocabularies; a device would not report bad ids.

    Raises:
        ValueError: an id is outside its vocabulary.
    """
    check_ids(batch.source, model.source_size, name="source ids")
    check_ids(batch.target_in, model.target_size, name="target ids")
    check_ids(batch.target_out, model.target_size, name="target labels")


# -------------------------------------------------------------------------------------- optimiser


def learning_rate(config: Config, total_steps: int) -> Callable[[Any], Any]:
    """Returns the schedule from steps 0, 1, ... to learning rates; the rate at step 0 is not 0."""
    warmup, peak = config.warmup_steps, config.learning_rate
    decays: dict[str, optax.Schedule] = {
        "constant": optax.constant_schedule(peak),
        "cosine": optax.cosine_decay_schedule(peak, max(total_steps + 1 - warmup, 1)),
        "inverse_sqrt": lambda count: peak * jnp.sqrt(warmup / (warmup + count)),
    }
    rise = optax.linear_schedule(peak / warmup, peak, warmup - 1)
    rate = optax.join_schedules([rise, decays[config.schedule]], [warmup - 1])
    return lambda count: rate(jnp.asarray(count, jnp.float32))


def make_optimiser(config: Config, total_steps: int) -> optax.GradientTransformation:
    """Builds the optimiser: Adam (Kingma and Ba 2014) with global-norm gradient clipping."""
    adam = optax.adam(learning_rate(config, total_steps), b2=config.beta2, eps=config.epsilon)
    if config.clip_norm == 0:
        return adam
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), adam)


# ------------------------------------------------------------------------------------------- step


class TrainingState(NamedTuple):
    """The training state, which each step updates.

    Attributes:
        params: the model's parameters by name.
        opt_state: the state of the optimiser.
        step: the number of steps completed, int32 `[]`.
    """

    params: Params
    opt_state: Any
    step: Array


class StepMetrics(NamedTuple):
    """The metrics of one step.

    Attributes:
        loss: the sum of the losses of the target tokens, `[]`, which the step minimises.
        unsmoothed_loss: the same without label smoothing, like the validation loss.
        gradient_norm: the norm of the gradient over all parameters, `[]`.
    """

    loss: Array
    unsmoothed_loss: Array
    gradient_norm: Array


Step = Callable[[TrainingState, AnyBatch], tuple[TrainingState, StepMetrics]]


def init_state(model: Model, optimiser: optax.GradientTransformation, seed: int) -> TrainingState:
    """Creates the state before the first step."""
    params = model.init(seed)
    return TrainingState(params, optimiser.init(params), jnp.zeros((), jnp.int32))


def make_step(
    model: Model,
    optimiser: optax.GradientTransformation,
    config: Config,
    placement: Placement = ONE_DEVICE,
) -> Step:
    """Builds the compiled training step, which donates the buffers of the state passed to it.

    The loss is the mean over the target tokens of the batch. Padding is not counted. A batch
    without tokens has loss 0 and gradients 0.

    With `config.accumulation_steps` above 1 the batch is split into micro-batches, which run one
    after another. Each loss is divided by the number of tokens of the whole batch, so that the
    gradients of the micro-batches add up to the gradient of the whole batch.

    The devices of `placement` hold state and batch.
    """
    num_shards = placement.num_shards
    model = placement.model(model)

    def gradient(params: Params, batch: AnyBatch, key: Array, tokens: Array) -> Any:
        """Returns the gradient of the mean loss, and the losses `[2]` of `total_losses`."""
        dropout_key = key if config.dropout_rate > 0 else None

        def loss_fn(params: Params) -> tuple[Array, Array]:
            options = {"smoothing": config.label_smoothing, "dropout_key": dropout_key}
            totals = total_losses(model, params, batch, num_shards=num_shards, **options)
            return totals[0] / tokens.astype(totals.dtype), totals

        return jax.grad(loss_fn, has_aux=True)(params)

    @functools.partial(jax.jit, donate_argnums=0)
    def train_step(state: TrainingState, batch: AnyBatch) -> tuple[TrainingState, StepMetrics]:
        key = jax.random.fold_in(jax.random.key(config.seed), state.step)
        tokens = jnp.maximum(jnp.sum(loss_mask(batch)), 1)
        if config.accumulation_steps == 1:
            grads, totals = gradient(state.params, batch, key, tokens)
        else:
            micro_batches = placement.micro_batches(batch, config.accumulation_steps)
            grads, totals = _accumulated(gradient, state.params, micro_batches, key, tokens)
        updates, opt_state = optimiser.update(grads, state.opt_state, state.params)
        params: Any = optax.apply_updates(state.params, updates)
        metrics = StepMetrics(totals[0], totals[1], _global_norm(grads))
        new_state = TrainingState(params, opt_state, state.step + 1)
        return placement.constrained(new_state), metrics

    return train_step


def _accumulated(
    gradient: Callable[..., Any],
    params: Params,
    micro_batches: AnyBatch,
    key: Array,
    tokens: Array,
) -> Any:
    """Returns the gradients and the losses, each summed over the micro-batches.

    A scan computes one micro-batch at a time, so that only one is in memory.
    """

    def add(sums: Any, micro_batch: Any) -> tuple[Any, None]:
        batch, key = micro_batch
        return jax.tree.map(jnp.add, sums, gradient(params, batch, key, tokens)), None

    first = jax.tree.map(lambda x: x[0], micro_batches)
    zeros = jax.eval_shape(gradient, params, first, key, tokens)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), zeros)
    keys = jax.random.split(key, len(micro_batches.source))
    return jax.lax.scan(add, zeros, (micro_batches, keys))[0]


def _global_norm(grads: Params) -> Array:
    """Returns the Euclidean norm of all gradients, concatenated."""
    return jnp.sqrt(sum(jnp.sum(jnp.square(array)) for array in grads.values()))


# ------------------------------------------------------------------------------------------- loop


@dataclass
class TrainingLoop:
    """A training loop, which runs the steps and at intervals reports, validates and saves.

    Attributes:
        config: the run's configuration.
        batches: the training batches.
        step: the compiled training step.
        check: called with each batch before it goes to the devices.
        report: called with each record of metrics.
        validate: called with the parameters after each epoch and at the end of training; returns
            the figures to report.
        save: called with the state at intervals, at the end, and with early stopping after each
            validation. All losses and gradients up to that state were finite.
        put_on_devices: puts a checked batch on the devices.
        stops: returns whether to stop training early. Called after each validation, once the
            figures have been reported and the state has been saved.
    """

    config: Config
    batches: Epochs
    step: Step
    check: Callable[[AnyBatch], None]
    report: Callable[[dict[str, Any]], None]
    validate: Callable[[Params], dict[str, Any]]
    save: Callable[[TrainingState], None]
    put_on_devices: Callable[[AnyBatch], AnyBatch] = lambda batch: batch
    stops: Callable[[], bool] = lambda: False

    @property
    def total_steps(self) -> int:
        """The number of steps of the whole training."""
        return total_steps(self.config, self.batches)

    @property
    def epochs(self) -> float:
        """The number of passes over the training text."""
        return self.total_steps / len(self.batches)

    @property
    def shapes(self) -> Sequence[tuple[int, int, int]]:
        """The shapes (rows, source width, target width) for which a step is compiled."""
        return self.batches.shapes

    def run(self, state: TrainingState) -> TrainingState:
        """Trains from a state to the last step, or until `stops` returns true.

        Raises:
            Diverged: training has diverged. The checkpoints are older than that.
        """
        first, last = int(state.step), self.total_steps
        rate = learning_rate(self.config, last)
        with progress(last, unit="step", initial=first) as bar:
            window = _Window(first)
            for number, batch in interruptible(self._batches(first, last)):
                self.check(batch)
                state, metrics = self.step(state, self.put_on_devices(batch))
                window.add(batch, metrics)
                bar.update()
                if self._due(number):
                    record = window.close(rate(number - 1))
                    bar.set_postfix(_brief(record))
                    self.report(record)
                    self._pause(number, state, bar)
                    if self._ends_epoch(number) and self.stops():
                        break
                    window = _Window(number)
        return state

    def _batches(self, first: int, last: int) -> Iterator[tuple[int, AnyBatch]]:
        """Yields the number of completed steps after each batch, with the batch."""
        batches = itertools.islice(self.batches.from_step(first), last - first)
        return enumerate(batches, start=first + 1)

    def _ends_epoch(self, number: int) -> bool:
        return number % len(self.batches) == 0 or number == self.total_steps

    def _saves(self, number: int) -> bool:
        validated = self.config.patience > 0 and self._ends_epoch(number)
        every = self.config.checkpoint_every
        return validated or number % every == 0 or number == self.total_steps

    def _due(self, number: int) -> bool:
        reports = number % self.config.report_every == 0
        return reports or self._saves(number) or self._ends_epoch(number)

    def _pause(self, number: int, state: TrainingState, bar: tqdm) -> None:
        if self._ends_epoch(number):
            bar.clear()
            progress_fields = {"step": number, "epoch": number / len(self.batches)}
            self.report({**progress_fields, **self.validate(state.params)})
            bar.unpause()
        if self._saves(number):
            self.save(state)


def total_steps(config: Config, batches: Epochs) -> int:
    """Returns the number of training steps of a configuration with these batches."""
    return config.steps or config.epochs * len(batches)


class _Window:
    """The steps since the last report; their losses stay on the device until `close`."""

    def __init__(self, first: int) -> None:
        self._first = first
        self._began = time.perf_counter()
        self._tokens: list[int] = []
        self._metrics: list[StepMetrics] = []

    def add(self, batch: AnyBatch, metrics: StepMetrics) -> None:
        self._tokens.append(int(np.sum(loss_mask(batch))))
        self._metrics.append(metrics)
        # Waiting for the step before the last keeps one step queued: the bar shows finished steps.
        if len(self._metrics) > 1:
            self._metrics[-2].loss.block_until_ready()

    def close(self, rate: Any) -> dict[str, Any]:
        """Returns the record of these steps, with the loss per token and the tokens per second.

        Raises:
            Diverged: a loss or the norm of a gradient is not finite.
        """
        losses, unsmoothed_losses, norms = np.asarray(jax.device_get(self._metrics), np.float64).T
        invalid = ~(np.isfinite(losses) & np.isfinite(norms))
        if invalid.any():
            first_bad = int(invalid.argmax())
            raise Diverged(
                f"step {self._first + first_bad + 1}: the loss is {losses[first_bad]:g} and the "
                f"norm of its gradient {norms[first_bad]:g}; training stopped"
            )
        tokens = sum(self._tokens)
        seconds = time.perf_counter() - self._began
        return {
            "step": self._first + len(losses),
            "loss": losses.sum() / max(tokens, 1),
            "unsmoothed_loss": unsmoothed_losses.sum() / max(tokens, 1),
            "gradient_norm": float(norms.mean()),
            "learning_rate": float(rate),
            "tokens": tokens,
            "seconds": seconds,
            "tokens_per_second": tokens / seconds,
        }


def _brief(record: dict[str, Any]) -> dict[str, str]:
    speed = f"{record['tokens_per_second']:,.0f}"
    return {"loss": f"{record['loss']:.3f}", "tokens/s": speed}
