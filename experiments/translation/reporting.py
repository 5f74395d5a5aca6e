"""Reports on a run during and after training: as text, as JSON and as pictures."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from experiments.runs import stopping
from experiments.runs.console import Console
from experiments.translation import pictures
from experiments.translation.data import ReadReport
from experiments.translation.evaluation import Evaluator, Scores
from experiments.translation.model import Model, Params
from experiments.translation.runs import TranslationRun
from experiments.translation.text import EncodeReport
from experiments.translation.training import TrainingLoop


_SAMPLES = 3  # sentences translated at each validation, always the same ones


def tell_of_text(console: Console, read: Sequence[ReadReport], encoded: EncodeReport) -> None:
    """Reports on each file that was read, and on the encoding of the training pairs."""
    for report in read:
        print(report)
        console.emit("read", **asdict(report))
    if not read:
        print("built-in corpus, as there is no --data")
    print(encoded)
    console.emit("encoded", **asdict(encoded))


def announce(console: Console, run: TranslationRun, model: Model, loop: TrainingLoop) -> None:
    """Reports the model to be trained and the length of the training."""
    parameters = model.size
    shapes = ", ".join(f"{rows} x ({source}, {target})" for rows, source, target in loop.shapes)
    print(
        f"{run.directory}: vocabularies of {model.source_size:,} and {model.target_size:,} tokens, "
        f"{parameters:,} parameters, {loop.total_steps:,} steps, {loop.epochs:.1f} epochs, "
        f"batches of {shapes} places",
        flush=True,
    )
    console.emit(
        "start",
        run=str(run.directory),
        source_size=model.source_size,
        target_size=model.target_size,
        parameters=parameters,
        steps=loop.total_steps,
        epochs=loop.epochs,
    )


def keep(console: Console, run: TranslationRun) -> Callable[[dict[str, Any]], None]:
    """Returns a function that adds records of training to the run's metrics and emits them; it
    prints the scores and translations of validations."""

    def report(record: dict[str, Any]) -> None:
        run.report(record)
        if "validation_loss" not in record:
            return console.emit("progress", **record)
        print(f"validation after step {record['step']:,}: {Scores.from_record(record)}")
        for sample in record["validation_samples"]:
            print(f"  {sample['source']}\n  -> {sample['translation']}", flush=True)
        return console.emit("validation", **record)

    return report


def validated(run: TranslationRun, evaluator: Evaluator, params: Params) -> dict[str, Any]:
    """Evaluates on the validation pairs, and returns the scores and some translations as a
    record."""
    result = evaluator(params)
    samples = [
        {
            "source": run.source.normalize(pair.source),
            "translation": translation,
            "reference": run.target.normalize(pair.target),
        }
        for pair, translation in zip(
            result.pairs[:_SAMPLES], result.translations[:_SAMPLES], strict=True
        )
    ]
    figures = result.scores.to_json() | {"samples": samples}
    del figures["constructions"]
    return {f"validation_{name}": value for name, value in figures.items()}


def sum_up(console: Console, run: TranslationRun, steps: Sequence[int]) -> None:
    """Reports how training went and where its results are.

    Args:
        console: emits the records for programs.
        run: the run that was trained.
        steps: the steps after which the parameters in use were saved.
    """
    records = run.metrics()
    seconds = sum(record["seconds"] for record in records if "tokens" in record)
    speeds = [record["tokens_per_second"] for record in records if "tokens" in record]
    completed, best = records[-1]["step"], stopping.best(records)
    stopped = stopping.has_stopped(records, run.config.patience)
    speed = statistics.median(speeds)
    print(
        f"trained {completed:,} steps in {seconds:.0f} s "
        f"at about {speed:,.0f} target tokens a second"
    )
    if stopped:
        print(f"stopped early: {run.config.patience} epochs without a lower validation loss")
    if best is not None:
        print(f"best validation, after step {best['step']:,}: {Scores.from_record(best)}")
    files = draw_curves(run)
    names = ", ".join("/".join(file.parts[-2:]) for file in files)
    print(f"in {run.directory}: {used(steps)}; metrics.jsonl, {names}")
    console.emit(
        "end",
        run=str(run.directory),
        steps=completed,
        stopped_early=stopped,
        seconds=seconds,
        tokens_per_second=speed,
        used=list(steps),
        best=best,
        pictures=list(map(str, files)),
    )


def used(steps: Sequence[int]) -> str:
    """Describes in words the checkpoints whose parameters are used."""
    if len(steps) == 1:
        return f"the parameters after step {steps[0]:,}"
    return f"the mean of the parameters after steps {', '.join(map(str, steps))}"


def draw_curves(run: TranslationRun) -> list[Path]:
    """Draws loss and BLEU of a run over its steps, and returns the files."""
    folder = run.path("pictures")
    files = [folder / "loss.png", folder / "bleu.png"]
    pictures.draw_losses(run.metrics(), files[0])
    pictures.draw_bleu(run.metrics(), files[1])
    return files
