"""The subcommand `train`: trains a model from the start or from the last checkpoint."""

import argparse
import contextlib
from collections.abc import Iterator

from experiments.runs import processes, stopping
from experiments.runs.console import Console
from experiments.runs.ending import advising_to_resume, users_part
from experiments.runs.locking import locked
from experiments.runs.memory import keep_freed_memory
from experiments.translation import reporting, training
from experiments.translation.commands.plan import TrainingPlan, make_plan
from experiments.translation.commands.trained_run import TrainedRun
from experiments.translation.evaluation import Evaluator
from experiments.translation.runs import TranslationRun, check_is_run, is_vacant, remove


def train(options: argparse.Namespace, console: Console) -> None:
    """Trains a model, and prints commands to try on it."""
    with train_run(options, console) as trained:
        advise(trained.run)


@contextlib.contextmanager
def train_run(options: argparse.Namespace, console: Console) -> Iterator[TrainedRun]:
    """Trains a run from the start or from the last checkpoint, and yields it. Until the context
    exits, no other process can train in the run's directory."""
    keep_freed_memory()
    with contextlib.ExitStack() as locks:
        with users_part():
            saved = _to_resume(options, locks) if options.resume else None
            plan = make_plan(options, saved, console)
            processes.check_alike(plan.shared())
            if saved:
                saved.check_same(plan.run)
            else:
                _begin(plan.run, locks, overwrite=options.overwrite)
        yield _fit(plan, console, resume=saved is not None)


def _to_resume(options: argparse.Namespace, locks: contextlib.ExitStack) -> TranslationRun:
    if options.run is None or options.overwrite:
        raise ValueError("--resume: expected --run DIR with it, and no --overwrite")
    check_is_run(options.run)
    if processes.leads():
        locks.enter_context(locked(options.run))
    return TranslationRun.open(options.run)


def _begin(run: TranslationRun, locks: contextlib.ExitStack, *, overwrite: bool) -> None:
    """Creates the run's directory, after deleting the run to overwrite."""
    if not processes.leads():
        return
    locks.enter_context(locked(run.directory))
    if overwrite and not is_vacant(run.directory):
        remove(run.directory)
    run.create()


def _fit(plan: TrainingPlan, console: Console, *, resume: bool) -> TrainedRun:
    run, model, config, placement = plan.run, plan.model, plan.run.config, plan.placement
    evaluator = Evaluator(model, plan.texts.validation, run.source, run.target)
    optimiser = training.make_optimiser(config, training.total_steps(config, plan.batches))
    loop = training.TrainingLoop(
        config,
        plan.batches,
        step=training.make_step(model, optimiser, config, placement),
        check=lambda batch: training.check_batch(batch, model),
        report=reporting.keep(console, run) if processes.leads() else lambda record: None,
        validate=lambda params: reporting.validated(run, evaluator, placement.whole(params)),
        save=lambda state: _save(run, placement.host(state)),
        put_on_devices=lambda batch: placement.batch(batch, config.accumulation_steps),
        stops=lambda: _has_stopped(run),
    )
    state = training.init_state(model, optimiser, config.seed)
    if resume:
        with users_part():
            state = _resumed(run, state, loop.total_steps)
    reporting.announce(console, run, model, loop)
    if evaluator.cut:
        print(f"{evaluator.cut} validation sides are truncated to {config.max_length} tokens")
    processes.advise(_how_to_go_on(run))
    resumable = advising_to_resume(_how_to_go_on(run), run.last_whole_step)
    with resumable, processes.noticing_losses():
        loop.run(placement.state(state))
    if not processes.leads():
        return TrainedRun(run, model, {}, [])
    params, steps = run.parameters(model.shapes)
    reporting.sum_up(console, run, steps)
    return TrainedRun(run, model, params, steps)


def _save(run: TranslationRun, state: training.TrainingState) -> None:
    """Writes a checkpoint in the leading process; every process has the whole state."""
    if processes.leads():
        run.save(state, int(state.step))


def _has_stopped(run: TranslationRun) -> bool:
    """Returns whether training ends early; the leading process reads the metrics and tells all."""
    stopped = processes.leads() and stopping.has_stopped(run.metrics(), run.config.patience)
    return bool(processes.agreed(stopped))


def _how_to_go_on(run: TranslationRun) -> str:
    command = f"python -m experiments.translation train --run {run.directory} --resume"
    return f"training goes on with: {command}"


def _resumed(
    run: TranslationRun, state: training.TrainingState, total: int
) -> training.TrainingState:
    saved_step = 0
    if run.has_checkpoint():
        state, saved_step = run.restore(state)
    if saved_step >= total:
        raise ValueError(f"{run.directory} has already run all its {total} steps")
    if processes.leads():
        run.forget_metrics_after(saved_step)
    if _has_stopped(run):
        raise ValueError(f"{run.directory} has already stopped early, after step {saved_step}")
    if saved_step:
        print(f"resuming from the checkpoint after step {saved_step}")
    else:
        print("starting from the beginning: there is no checkpoint yet")
    return state


def advise(run: TranslationRun) -> None:
    """Prints commands to try on a run."""
    print("now try:")
    for command in ("evaluate", "translate", "plot"):
        print(f"  python -m experiments.translation {command} --run {run.directory}")
