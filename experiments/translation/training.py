"""Training: the text, the loss, the optimiser, the step and the loop around it.

Everything random is a function of the configuration's seed and the number of the step: the order of
the data, and what dropout leaves out. So parameters, optimiser state and step number are all there
is to save, and a run that goes on from them ends where the uninterrupted one does, bit for bit.
"""

import functools
import itertools
import math
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

from experiments.translation import corpus, data
from experiments.translation.batches import Batch, Batches
from experiments.translation.console import progress
from experiments.translation.corpus import Pair
from experiments.translation.model import Ids, Model, Params
from experiments.translation.presets import Config
from experiments.translation.text import check_ids


# ------------------------------------------------------------------------------------------- text


@dataclass(frozen=True)
class Texts:
    """Sentence pairs to train on, to watch while training, and to be examined on afterwards.

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
    read = data.read_dataset(path, languages=languages)
    tests = {"test": read.test} if read.test else {"validation": read.validation}
    return Texts(read.train, read.validation, tests, list(read.reports.values()))


# ------------------------------------------------------------------------------------------- loss


def token_losses(logits: Array, labels: Ids, counted: Ids, smoothing: float) -> Array:
    """The cross-entropy of each counted place `[B, T]` in nats, and 0 at the others.

    The target distribution is `smoothing` spread over all V tokens in equal shares, and the rest on
    the label (Szegedy et al. 2015); it sums to 1. What stands at places that are not counted does
    not exist: its gradient is 0, and so is that of a loss over no place at all.

    The derivative is written out so that no array of the logits' size is kept but the logits:
    neither probabilities nor one-hot labels.

    Args:
        logits: `[B, T, V]`.
        labels: `[B, T]`, in 0..V-1 (`check_batch` makes sure).
        counted: bool `[B, T]`.
        smoothing: in [0, 1).
    """
    return _token_losses(smoothing, logits, jnp.asarray(labels), jnp.asarray(counted))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _token_losses(smoothing: float, logits: Array, labels: Array, counted: Array) -> Array:
    return _token_losses_forward(smoothing, logits, labels, counted)[0]


def _token_losses_forward(
    smoothing: float, logits: Array, labels: Array, counted: Array
) -> tuple[Array, tuple[Array, ...]]:
    wide = _accumulated(logits)
    highest = jnp.max(wide, axis=-1)
    log_total = highest + jnp.log(jnp.sum(jnp.exp(wide - highest[..., None]), axis=-1))
    at_label = jnp.sum(jnp.where(_is_label(labels, wide), wide, 0), axis=-1)
    losses = log_total - (1 - smoothing) * at_label - smoothing * jnp.mean(wide, axis=-1)
    return jnp.where(counted, losses, 0), (logits, labels, counted, log_total)


def _token_losses_backward(
    smoothing: float, saved: tuple[Array, ...], cotangent: Array
) -> tuple[Array, None, None]:
    logits, labels, counted, log_total = saved
    wide = _accumulated(logits)
    probability = jnp.exp(wide - log_total[..., None])
    target = jnp.where(_is_label(labels, wide), 1 - smoothing, 0) + smoothing / wide.shape[-1]
    gradient = cotangent[..., None] * (probability - target.astype(wide.dtype))
    return jnp.where(counted[..., None], gradient, 0).astype(logits.dtype), None, None


_token_losses.defvjp(_token_losses_forward, _token_losses_backward)


def _accumulated(logits: Array) -> Array:
    return logits.astype(jnp.promote_types(logits.dtype, jnp.float32))


def _is_label(labels: Array, logits: Array) -> Array:
    columns = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    return columns == labels[..., None]


def counted_places(batch: Batch) -> Array:
    """Which target places are tokens and not padding, bool `[B, T]`."""
    places = jax.lax.broadcasted_iota(jnp.int32, batch.target_out.shape, 1)
    return places < batch.target_lengths[:, None]


def total_loss(
    model: Model,
    params: Params,
    batch: Batch,
    *,
    smoothing: float = 0.0,
    dropout_key: Array | None = None,
) -> Array:
    """The losses of a batch's target tokens, summed."""
    logits = model.logits(
        params, batch.source, batch.source_lengths, batch.target_in, dropout_key=dropout_key
    )
    return jnp.sum(token_losses(logits, batch.target_out, counted_places(batch), smoothing))


def check_batch(batch: Batch, model: Model) -> None:
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

    def rate(step: Any) -> Any:
        number = jnp.asarray(step, jnp.float32) + 1
        rising = jnp.minimum(number / warmup, 1)
        match config.schedule:
            case "cosine":
                done = jnp.clip((number - warmup) / max(total_steps + 1 - warmup, 1), 0, 1)
                return peak * rising * (1 + jnp.cos(math.pi * done)) / 2
            case "inverse_sqrt":
                return peak * jnp.minimum(rising, jnp.sqrt(warmup / number))
            case _:
                return peak * rising

    return rate


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
        optimiser: what the optimiser remembers.
        step: how many steps have been made, int32 `[]`.
    """

    params: Params
    optimiser: Any
    step: Array


class Measured(NamedTuple):
    """What a step is known by: its loss, summed over tokens, and the norm of its gradient."""

    loss: Array
    gradient_norm: Array


Step = Callable[[State, Batch], tuple[State, Measured]]


def first_state(model: Model, optimiser: optax.GradientTransformation, seed: int) -> State:
    """The state before the first step."""
    params = model.init(seed)
    return State(params, optimiser.init(params), jnp.zeros((), jnp.int32))


def make_step(model: Model, optimiser: optax.GradientTransformation, config: Config) -> Step:
    """One update as a compiled function, which takes over the buffers of the state it is given.

    The loss is the mean over the tokens of the batch, so that each token weighs the same in a batch
    however the padding lies; a batch without tokens has loss 0 and gradients 0.
    """

    def mean_loss(params: Params, batch: Batch, key: Array | None) -> tuple[Array, Array]:
        total = total_loss(model, params, batch, smoothing=config.label_smoothing, dropout_key=key)
        tokens = jnp.maximum(jnp.sum(batch.target_lengths), 1)
        return total / tokens.astype(total.dtype), total

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: State, batch: Batch) -> tuple[State, Measured]:
        key = jax.random.fold_in(jax.random.key(config.seed), state.step)
        given = key if config.dropout_rate > 0 else None
        gradient = jax.grad(mean_loss, has_aux=True)
        slopes, total = gradient(state.params, batch, given)
        updates, memory = optimiser.update(slopes, state.optimiser, state.params)
        params: Any = optax.apply_updates(state.params, updates)
        measured = Measured(total, _norm(slopes))
        return State(params, memory, state.step + 1), measured

    return step


def _norm(slopes: Params) -> Array:
    return jnp.sqrt(sum(jnp.sum(jnp.square(array)) for array in slopes.values()))


# ------------------------------------------------------------------------------------------- loop


class NonFiniteLoss(Exception):
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
        stops: asked after each validation, and what it was measured by has been reported and saved,
            whether training ends here.
    """

    config: Config
    batches: Batches
    step: Step
    check: Callable[[Batch], None]
    report: Callable[[dict[str, Any]], None]
    validate: Callable[[Params], dict[str, Any]]
    save: Callable[[State], None]
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
                state, measured = self.step(state, batch)
                window.add(batch, measured)
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

    def _batches(self, first: int, last: int) -> Iterator[tuple[int, Batch]]:
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


def total_steps(config: Config, batches: Batches) -> int:
    """How many steps a configuration makes with these batches."""
    return config.steps or config.epochs * len(batches)


class _Window:
    """The steps since the last report. Their losses stay on the device until it is closed."""

    def __init__(self, first: int) -> None:
        self._first = first
        self._began = time.perf_counter()
        self._tokens: list[int] = []
        self._measured: list[Measured] = []

    def add(self, batch: Batch, measured: Measured) -> None:
        self._tokens.append(int(batch.target_lengths.sum()))
        self._measured.append(measured)
        if (
            len(self._measured) > 1
        ):  # one step waits in the queue, not fifty: the bar tells the truth
            self._measured[-2].loss.block_until_ready()

    def close(self, rate: Any) -> dict[str, Any]:
        """The record of these steps: losses per token, and real target tokens per second."""
        losses, norms = np.asarray(jax.device_get(self._measured), np.float64).T
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
