"""Training: the optimiser, the step and the training loop.

The order of the text and dropout depend only on the seed and the step number, so a run resumed from
a checkpoint ends bit for bit where an uninterrupted run does.
"""

import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array

from experiments.language import model as models
from experiments.language.runs import LanguageRun
from experiments.language.settings import LanguageSettings
from experiments.language.text import LanguageTexts, batch, in_order
from experiments.runs.console import progress
from experiments.runs.ending import Diverged, interruptible


_VALIDATION_ROWS = 64
Report = Callable[[dict[str, Any]], None]


class LanguageState(NamedTuple):
    """The state of training that a step updates."""

    variables: Any
    opt_state: Any


def optimiser(settings: LanguageSettings) -> optax.GradientTransformation:
    """Builds AdamW (Loshchilov and Hutter 2019) with warm-up, cosine decay and gradient
    clipping."""
    warmup, steps = min(settings.warmup, settings.steps - 1), settings.steps
    peak = settings.learning_rate
    rate = optax.warmup_cosine_decay_schedule(peak / 10, peak, warmup, steps, peak / 10)
    decay = settings.weight_decay
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, weight_decay=decay))


def init_state(run: LanguageRun, **options: Any) -> tuple[Any, LanguageState]:
    """Returns the definition of a model with `options`, and the state before the first step."""
    model = models.make(run.settings, len(run.characters.alphabet), **options)
    definition, variables = nnx.split(model)
    params = nnx.filter_state(variables, nnx.Param)
    return definition, LanguageState(variables, optimiser(run.settings).init(params))


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def _step(
    settings: LanguageSettings, definition: Any, state: LanguageState, rows: Array, number: Array
) -> tuple[LanguageState, Array]:
    """Makes one update; returns the new state, and the loss before the update."""
    params, rest = nnx.split_state(state.variables, nnx.Param, ...)
    key = jax.random.fold_in(jax.random.key(settings.seed), number)

    def loss(params: Any) -> Array:
        model = nnx.merge(definition, params, rest)
        return models.loss(model, rows, key if settings.dropout_rate else None)

    value, gradients = jax.value_and_grad(loss)(params)
    updates, opt_state = optimiser(settings).update(gradients, state.opt_state, params)
    params: Any = optax.apply_updates(params, updates)
    return LanguageState(nnx.merge_state(params, rest), opt_state), value


def resumed(run: LanguageRun, state: LanguageState) -> tuple[LanguageState, int]:
    """Returns the state and step of the last checkpoint, or the given state and 0 if there is none.
    Removes the metrics of later steps.

    Raises:
        ValueError: the checkpoint is damaged or of another model.
    """
    step = 0
    if run.last_step() is not None:
        state, step = run.restore(state)
    run.forget_metrics_after(step)
    return state, step


def train(
    run: LanguageRun,
    texts: LanguageTexts,
    tell: Report,
    definition: Any,
    state: LanguageState,
    first: int = 0,
) -> None:
    """Trains from the state after `first` steps to the end, with reports and checkpoints in the
    run's directory.

    Raises:
        Diverged: a loss or a parameter is not finite. The checkpoint is older than that.
    """
    settings = run.settings
    held_out = in_order(texts.validation, settings.length, _VALIDATION_ROWS)
    losses, start = [], time.perf_counter()
    with progress(settings.steps, unit="step", initial=first) as bar:
        for number in interruptible(range(first + 1, settings.steps + 1)):
            rows = batch(texts.train, settings.rows, settings.length, (settings.seed, number))
            state, value = _step(settings, definition, state, rows, jnp.uint32(number))
            losses.append(value)
            if len(losses) > 1:
                losses[-2].block_until_ready()  # at most one step is queued, so the bar is accurate
            bar.update()
            if number % settings.report_every and number < settings.steps:
                continue
            record = _record(number, losses, time.perf_counter() - start, settings)
            record["validation_loss"] = float(
                models.mean_loss(definition, state.variables, held_out)
            )
            _check_finite(number, record["validation_loss"], state)
            bar.set_postfix(loss=f"{record['loss']:.3f}")
            run.report(record)
            run.save(state, number)
            bar.clear()
            tell(record)
            losses, start = [], time.perf_counter()


def _record(
    number: int, losses: list[Array], seconds: float, settings: LanguageSettings
) -> dict[str, Any]:
    """Summarizes the steps since the last report: mean loss, time and speed."""
    loss = float(np.mean(jax.device_get(losses)))
    if not np.isfinite(loss):
        raise Diverged(f"step {number}: the loss is {loss:g}; training stopped")
    characters = len(losses) * settings.rows * settings.length
    speed = characters / seconds
    return {"step": number, "loss": loss, "seconds": seconds, "characters_per_second": speed}


def _check_finite(number: int, validation_loss: float, state: LanguageState) -> None:
    """Raises Diverged if the held-out loss or a parameter is not finite."""
    if not np.isfinite(validation_loss):
        raise Diverged(f"step {number}: the held-out loss is {validation_loss:g}; training stopped")
    params = nnx.filter_state(state.variables, nnx.Param)
    if not all(np.all(np.isfinite(array)) for array in jax.tree.leaves(params)):
        raise Diverged(f"step {number}: the parameters are not finite; training stopped")
