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

from experiments.ending import Failure
from experiments.translation import corpus, data
from experiments.translation.batches import (
    AnyBatch,
    Batches,
    Epochs,
    PackedBatches,
    loss_mask,
)
from experiments.translation.console import progress
from experiments.translation.corpus import Pair
from experiments.translation.losses import cross_entropy
from experiments.translation.meshes import ONE_DEVICE, Placement
from experiments.translation.model import Model, Params
from experiments.translation.presets import Config
from experiments.translation.text import EncodedPairs
from experiments.translation.vocabulary import check_ids


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
    if config.packed_width:
        return PackedBatches(pairs, width=config.packed_width, **sizes)
    return Batches(pairs, max_shapes=config.max_shapes, **sizes)


# ------------------------------------------------------------------------------------------- loss


def total_loss(
    model: Model,
    params: Params,
    batch: AnyBatch,
    *,
    smoothing: float = 0.0,
    dropout_key: Array | None = None,
    shares: tuple[int, int] = (1, 1),
) -> Array:
    """The losses of a batch's target tokens, summed; rows and places may be in shares on devices,
    as many as `shares` says."""
    features, projection = model.features(params, batch, dropout_key=dropout_key)
    mask = loss_mask(batch)
    options = {"smoothing": smoothing, "shares": shares}
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
    """What a step is known by: its loss, summed over tokens, and the norm of its gradient."""

    loss: Array
    gradient_norm: Array


Step = Callable[[State, AnyBatch], tuple[State, StepMetrics]]


def first_state(model: Model, optimiser: optax.GradientTransformation, seed: int) -> State:
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

    The loss is the mean over the tokens of the batch, so that each token weighs the same in a batch
    however the padding lies; a batch without tokens has loss 0 and gradients 0. A batch that is
    taken in parts gives the gradient of the whole, as each part's share is by the whole's tokens.
    State and batch lie where `placement` puts them.
    """
    shares = placement.shares
    model = placement.model(model)

    def gradient(params: Params, batch: AnyBatch, key: Array, tokens: Array) -> Any:
        """Of the mean loss, and the loss summed."""
        dropout_key = key if config.dropout_rate > 0 else None

        def share(params: Params) -> tuple[Array, Array]:
            options = {"smoothing": config.label_smoothing, "dropout_key": dropout_key}
            total = total_loss(model, params, batch, shares=shares, **options)
            return total / tokens.astype(total.dtype), total

        return jax.grad(share, has_aux=True)(params)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: State, batch: AnyBatch) -> tuple[State, StepMetrics]:
        key = jax.random.fold_in(jax.random.key(config.seed), state.step)
        tokens = jnp.maximum(jnp.sum(loss_mask(batch)), 1)
        if config.accumulation_steps == 1:
            grads, total = gradient(state.params, batch, key, tokens)
        else:
            parts = placement.parts(batch, config.accumulation_steps)
            grads, total = _accumulated(gradient, state.params, parts, key, tokens)
        updates, opt_state = optimiser.update(grads, state.opt_state, state.params)
        params: Any = optax.apply_updates(state.params, updates)
        metrics = StepMetrics(total, _norm(grads))
        after = State(params, opt_state, state.step + 1)
        return placement.held(after), metrics

    return step


def _accumulated(
    gradient: Callable[..., Any],
    params: Params,
    parts: AnyBatch,
    key: Array,
    tokens: Array,
) -> Any:
    """The sum of the gradients of a batch's equal parts, of which one at a time is in memory."""

    def add(sums: Any, part: Any) -> tuple[Any, None]:
        batch, key = part
        return jax.tree.map(jnp.add, sums, gradient(params, batch, key, tokens)), None

    zeros = jax.eval_shape(gradient, params, jax.tree.map(lambda x: x[0], parts), key, tokens)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), zeros)
    keys = jax.random.split(key, len(parts.source))
    return jax.lax.scan(add, zeros, (parts, keys))[0]


def _norm(grads: Params) -> Array:
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
        save: takes the state at intervals and at the end, and with early stopping after each
            validation. What it is given is known to be good.
        place: puts a checked batch on the devices.
        stops: asked after each validation, and what it goes by has been reported and saved,
            whether training ends here.
    """

    config: Config
    batches: Epochs
    step: Step
    check: Callable[[AnyBatch], None]
    report: Callable[[dict[str, Any]], None]
    validate: Callable[[Params], dict[str, Any]]
    save: Callable[[State], None]
    place: Callable[[AnyBatch], AnyBatch] = lambda batch: batch
    stops: Callable[[], bool] = lambda: False

    @property
    def total_steps(self) -> int:
        """How many steps training has in all."""
        return total_steps(self.config, self.batches)

    @property
    def epochs(self) -> float:
        """How many passes over the text that is."""
        return self.total_steps / len(self.batches)

    @property
    def shapes(self) -> Sequence[tuple[int, int, int]]:
        """Rows, source places and target places of the batches: what is compiled."""
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
            for number, batch in self._batches(first, last):
                self.check(batch)
                state, metrics = self.step(state, self.place(batch))
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
            place = {"step": number, "epoch": number / len(self.batches)}
            self.report({**place, **self.validate(state.params)})
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
        # One step waits in the queue, not fifty: the bar tells the truth.
        if len(self._metrics) > 1:
            self._metrics[-2].loss.block_until_ready()

    def close(self, rate: Any) -> dict[str, Any]:
        """The record of these steps: losses per token, and real target tokens per second."""
        losses, norms = np.asarray(jax.device_get(self._metrics), np.float64).T
        bad = ~(np.isfinite(losses) & np.isfinite(norms))
        if bad.any():
            place = int(bad.argmax())
            raise NonFiniteLoss(
                f"step {self._first + place + 1}: the loss is {losses[place]:g} and the norm of "
                f"its gradient {norms[place]:g}; training stopped"
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
