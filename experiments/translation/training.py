"""Training: the text, the loss, the optimiser, the step and the loop around it.

Everything random is a function of the configuration's seed and the number of the step: the order of
the data, and what dropout leaves out. So parameters, optimiser state and step number are all there
is to save, and a run that goes on from them ends where the uninterrupted one does, bit for bit.
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
from experiments.runs.ending import Failure, interruptible
from experiments.translation import corpus, data
from experiments.translation.batches import (
    AnyBatch,
    Batches,
    Epochs,
    PackedBatches,
    loss_mask,
)
from experiments.translation.corpus import Pair
from experiments.translation.losses import cross_entropy
from experiments.translation.meshes import ONE_DEVICE, Placement
from experiments.translation.model import Model, Params
from experiments.translation.presets import Config
from experiments.translation.text import EncodedPairs
from experiments.translation.vocabulary import check_ids


_MOST_STEPS = 2**31 - 1  # they are counted in int32

# ------------------------------------------------------------------------------------------- text


@dataclass(frozen=True)
class Texts:
    """Sentence pairs to train on, to watch while training, and to be evaluated on afterwards.

    Attributes:
        train: training pairs.
        validation: held-out pairs for the figures printed after each epoch.
        tests: held-out pairs by name; the first is the one that counts.
        reports: what reading the files met.
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
) -> Texts:
    """The text in a folder or file, or where `path` is None the built-in corpus.

    The corpus without its `training` part has the same other parts, sooner.

    Raises:
        FileNotFoundError, ValueError: as `data.read_dataset`.
    """
    if path is None:
        held_out = config.held_out
        made = corpus.splits(
            train=config.sentences if training else 0,
            validation=held_out,
            test=held_out,
            deeper=held_out,
            seed=config.seed,
        )
        return Texts(made.train, made.validation, {"test": made.test, "deeper": made.deeper})
    read = data.read_dataset(path, languages=languages, most_unpacked=most_unpacked)
    tests = {"test": read.test} if read.test else {"validation": read.validation}
    return Texts(read.train, read.validation, tests, list(read.reports.values()))


def make_batches(config: Config, pairs: EncodedPairs) -> Epochs:
    """The training batches that a configuration asks for.

    Raises:
        ValueError: sizes that do not go together; the message names them.
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


def total_loss(
    model: Model,
    params: Params,
    batch: AnyBatch,
    *,
    smoothing: float = 0.0,
    dropout_key: Array | None = None,
    num_shards: tuple[int, int] = (1, 1),
) -> Array:
    """The sum of the losses of a batch's target tokens.

    `num_shards` are the numbers of shards into which rows and positions are cut over devices.
    """
    features, projection = model.features(params, batch, dropout_key=dropout_key)
    mask = loss_mask(batch)
    options = {"smoothing": smoothing, "num_shards": num_shards}
    return cross_entropy(features, projection, batch.target_out, mask, **options)


def check_batch(batch: AnyBatch, model: Model) -> None:
    """Makes sure that the model has all the ids of a batch; on a device nobody would notice.

    Raises:
        ValueError: an id outside its vocabulary.
    """
    check_ids(batch.source, model.source_size, name="source ids")
    check_ids(batch.target_in, model.target_size, name="target ids")
    check_ids(batch.target_out, model.target_size, name="target labels")


# -------------------------------------------------------------------------------------- optimiser


def learning_rate(config: Config, total_steps: int) -> Callable[[Any], Any]:
    """The learning rate of each step 0, 1, ...: never 0 at the first."""
    warmup, peak = config.warmup_steps, config.learning_rate
    falling: dict[str, optax.Schedule] = {
        "constant": optax.constant_schedule(peak),
        "cosine": optax.cosine_decay_schedule(peak, max(total_steps + 1 - warmup, 1)),
        "inverse_sqrt": lambda step: peak * jnp.sqrt(warmup / (warmup + step)),
    }
    rising = optax.linear_schedule(peak / warmup, peak, warmup - 1)
    rate = optax.join_schedules([rising, falling[config.schedule]], [warmup - 1])
    return lambda step: rate(jnp.asarray(step, jnp.float32))


def make_optimiser(config: Config, total_steps: int) -> optax.GradientTransformation:
    """Adam (Kingma and Ba 2014) on gradients whose norm is limited."""
    adam = optax.adam(learning_rate(config, total_steps), b2=config.beta2, eps=config.epsilon)
    if config.clip_norm == 0:
        return adam
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), adam)


# ------------------------------------------------------------------------------------------- step


class State(NamedTuple):
    """All that a step changes.

    Attributes:
        params: the model's parameters by name.
        opt_state: what the optimiser remembers.
        step: how many steps have been made, int32 `[]`.
    """

    params: Params
    opt_state: Any
    step: Array


class StepMetrics(NamedTuple):
    """What a step reports.

    Attributes:
        loss: the sum of the losses of its target tokens, `[]`.
        gradient_norm: the norm of its gradient over all parameters, `[]`.
    """

    loss: Array
    gradient_norm: Array


Step = Callable[[State, AnyBatch], tuple[State, StepMetrics]]


def init_state(model: Model, optimiser: optax.GradientTransformation, seed: int) -> State:
    """The state before the first step."""
    params = model.init(seed)
    return State(params, optimiser.init(params), jnp.zeros((), jnp.int32))


def make_step(
    model: Model,
    optimiser: optax.GradientTransformation,
    config: Config,
    placement: Placement = ONE_DEVICE,
) -> Step:
    """One update as a compiled function, which takes over the buffers of the state it is given.

    The loss is the mean over the target tokens of the batch. Padding is not counted. A batch
    without tokens has loss 0 and gradients 0.

    With `config.accumulation_steps` above 1 the batch is cut into micro-batches, one after another.
    The loss of each is divided by the number of tokens of the whole batch, so that the gradients of
    the micro-batches add up to the gradient of the whole batch.

    State and batch lie where `placement` puts them.
    """
    num_shards = placement.num_shards
    model = placement.model(model)

    def gradient(params: Params, batch: AnyBatch, key: Array, tokens: Array) -> Any:
        """The gradient of the mean loss, and the sum of the losses."""
        dropout_key = key if config.dropout_rate > 0 else None

        def loss_fn(params: Params) -> tuple[Array, Array]:
            options = {"smoothing": config.label_smoothing, "dropout_key": dropout_key}
            total = total_loss(model, params, batch, num_shards=num_shards, **options)
            return total / tokens.astype(total.dtype), total

        return jax.grad(loss_fn, has_aux=True)(params)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: State, batch: AnyBatch) -> tuple[State, StepMetrics]:
        key = jax.random.fold_in(jax.random.key(config.seed), state.step)
        tokens = jnp.maximum(jnp.sum(loss_mask(batch)), 1)
        if config.accumulation_steps == 1:
            grads, total = gradient(state.params, batch, key, tokens)
        else:
            micro_batches = placement.micro_batches(batch, config.accumulation_steps)
            grads, total = _accumulated(gradient, state.params, micro_batches, key, tokens)
        updates, opt_state = optimiser.update(grads, state.opt_state, state.params)
        params: Any = optax.apply_updates(state.params, updates)
        metrics = StepMetrics(total, _global_norm(grads))
        after = State(params, opt_state, state.step + 1)
        return placement.constrained(after), metrics

    return step


def _accumulated(
    gradient: Callable[..., Any],
    params: Params,
    micro_batches: AnyBatch,
    key: Array,
    tokens: Array,
) -> Any:
    """The sum of what `gradient` gives for each micro-batch: gradients, and losses.

    They are computed one after another, so that the memory is that of one micro-batch.
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
    """The norm of all gradients together, as of one vector."""
    return jnp.sqrt(sum(jnp.sum(jnp.square(array)) for array in grads.values()))


# ------------------------------------------------------------------------------------------- loop


class NonFiniteLoss(Failure):
    """The loss or its gradient is not a number any more; the message names the step."""


@dataclass
class Loop:
    """Runs steps, and at intervals reports, validates and saves.

    Attributes:
        config: the run's configuration.
        batches: the training batches.
        step: the compiled step.
        check: called with each batch before the device sees it.
        report: takes a record of metrics.
        validate: takes the parameters at the end of each epoch and of training, and returns the
            figures to report.
        save: takes the state at intervals, at the end, and with early stopping after each
            validation. All losses and gradients up to that state were finite.
        put_on_devices: puts a checked batch on the devices.
        stops: says whether training ends here. It is asked after each validation, when the
            validation's figures have been reported and the state has been saved.
    """

    config: Config
    batches: Epochs
    step: Step
    check: Callable[[AnyBatch], None]
    report: Callable[[dict[str, Any]], None]
    validate: Callable[[Params], dict[str, Any]]
    save: Callable[[State], None]
    put_on_devices: Callable[[AnyBatch], AnyBatch] = lambda batch: batch
    stops: Callable[[], bool] = lambda: False

    @property
    def total_steps(self) -> int:
        """How many steps training has in all."""
        return total_steps(self.config, self.batches)

    @property
    def epochs(self) -> float:
        """How many passes over the text the steps make."""
        return self.total_steps / len(self.batches)

    @property
    def shapes(self) -> Sequence[tuple[int, int, int]]:
        """The rows, source width and target width of the batches: a step is compiled for each."""
        return self.batches.shapes

    def run(self, state: State) -> State:
        """Trains from a state to the end of training, or to where it `stops`.

        Raises:
            NonFiniteLoss: training has diverged. Checkpoints are from before that.
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
        """Each batch with the number that its step brings the count to."""
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

    def _pause(self, number: int, state: State, bar: tqdm) -> None:
        if self._ends_epoch(number):
            bar.clear()
            progress_fields = {"step": number, "epoch": number / len(self.batches)}
            self.report({**progress_fields, **self.validate(state.params)})
            bar.unpause()
        if self._saves(number):
            self.save(state)


def total_steps(config: Config, batches: Epochs) -> int:
    """How many steps a configuration makes with these batches."""
    return config.steps or config.epochs * len(batches)


class _Window:
    """The steps since the last report. Their losses stay on the device until it is closed."""

    def __init__(self, first: int) -> None:
        self._first = first
        self._began = time.perf_counter()
        self._tokens: list[int] = []
        self._metrics: list[StepMetrics] = []

    def add(self, batch: AnyBatch, metrics: StepMetrics) -> None:
        self._tokens.append(int(np.sum(loss_mask(batch))))
        self._metrics.append(metrics)
        # Waiting here keeps one step queued, so that the progress bar shows steps that are done.
        if len(self._metrics) > 1:
            self._metrics[-2].loss.block_until_ready()

    def close(self, rate: Any) -> dict[str, Any]:
        """The record of these steps: losses per token, and real target tokens per second."""
        losses, norms = np.asarray(jax.device_get(self._metrics), np.float64).T
        bad = ~(np.isfinite(losses) & np.isfinite(norms))
        if bad.any():
            first_bad = int(bad.argmax())
            raise NonFiniteLoss(
                f"step {self._first + first_bad + 1}: the loss is {losses[first_bad]:g} and the "
                f"norm of its gradient {norms[first_bad]:g}; training stopped"
            )
        tokens = sum(self._tokens)
        seconds = time.perf_counter() - self._began
        return {
            "step": self._first + len(losses),
            "loss": losses.sum() / max(tokens, 1),
            "gradient_norm": float(norms.mean()),
            "learning_rate": float(rate),
            "tokens": tokens,
            "seconds": seconds,
            "tokens_per_second": tokens / seconds,
        }


def _brief(record: dict[str, Any]) -> dict[str, str]:
    speed = f"{record['tokens_per_second']:,.0f}"
    return {"loss": f"{record['loss']:.3f}", "tokens/s": speed}
