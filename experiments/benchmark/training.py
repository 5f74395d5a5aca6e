"""Measures a training step of the translation experiment on this machine, and PyTorch's.

    python -m experiments.benchmark training

A step of the published tutorial's Transformer (width 256, 3 + 3 layers, 8 heads, feed-forward 512,
dropout 0.1) on 128 sentence pairs, each padded from 18 to 24 source and target tokens, with
vocabularies of 8,000: loss, gradients, clipping and Adam. `packed` has the same pairs, four in a
row without padding. Competitors run alternately; figures are medians.
"""

import argparse
import dataclasses
import importlib
import importlib.util
import json
import multiprocessing
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.runs import bounds
from experiments.runs.command_line import Parser
from experiments.runs.ending import interruptible
from experiments.runs.files import make_folder, replace
from experiments.runs.memory import keep_freed_memory
from experiments.translation.batches import (
    AnyBatch,
    Batch,
    Batches,
    Packed,
    PackedBatches,
    loss_mask,
)
from experiments.translation.model import Model
from experiments.translation.presets import PRESETS, Config
from experiments.translation.text import EncodedPairs, Ragged
from experiments.translation.training import init_state, make_optimiser, make_step
from experiments.translation.vocabulary import EOS


VOCABULARY = 8000
PAIRS, PLACES, REAL, PER_ROW = 128, 24, 18, 4
SETTLE = 0.3  # seconds for idle threads of the previous competitor to stop spinning


class Trainer(NamedTuple):
    """A competitor: `run_step()` makes a step and returns when it is done; `tokens` is the number
    of target tokens in a step, without padding."""

    run_step: Callable[[], Any]
    tokens: int


def sentence_pairs(seed: int = 0) -> EncodedPairs:
    """Draws random pairs of sentences of `REAL` tokens."""
    rng = np.random.default_rng(seed)
    sides = rng.integers(EOS + 1, VOCABULARY, (2, PAIRS, REAL), np.int32)
    sides[:, :, -1] = EOS
    source, target = (Ragged.of(side.tolist()) for side in sides)
    return EncodedPairs(source, target, np.arange(PAIRS), VOCABULARY, VOCABULARY)


def padded_batch() -> Batch:
    """Returns the pairs as a padded batch, one in a row."""
    return next(Batches(sentence_pairs(), rows_per_batch=PAIRS, multiple=PLACES).epoch(0))


def packed_batch() -> Packed:
    """Returns the pairs as a packed batch, `PER_ROW` in a row without padding."""
    width, rows = PER_ROW * REAL, PAIRS // PER_ROW
    return next(PackedBatches(sentence_pairs(), width=width, rows_per_batch=rows).epoch(0))


def ours(config: Config, batch: AnyBatch) -> Trainer:
    """Builds the step that the experiment's `train` command runs."""
    model = Model(config, VOCABULARY, VOCABULARY)
    optimiser = make_optimiser(config, total_steps=1000)
    train_step = make_step(model, optimiser, config)
    state = init_state(model, optimiser, seed=0)

    def run() -> None:
        nonlocal state
        state, metrics = train_step(state, batch)
        jax.block_until_ready((state, metrics))

    return Trainer(run, int(np.sum(loss_mask(batch))))


def competitors() -> dict[str, Trainer]:
    """Returns the competitors by name; torch only if it is installed."""
    config = dataclasses.replace(PRESETS["multi30k"], label_smoothing=0.0)
    trainers = {
        "jattn": ours(config, padded_batch()),
        "jattn packed": ours(config, packed_batch()),
    }
    if importlib.util.find_spec("torch"):
        trainers["torch"] = _in_subprocess(config, padded_batch())
    return trainers


def _in_subprocess(config: Config, batch: Batch) -> Trainer:
    """Builds PyTorch's trainer in a separate process, with its own memory settings."""
    parent, child = multiprocessing.Pipe()
    peer = importlib.import_module("experiments.benchmark.torch_training")
    arguments = child, config, VOCABULARY, batch
    context = multiprocessing.get_context("spawn")
    context.Process(target=peer.serve, args=arguments, daemon=True).start()

    def run() -> None:
        parent.send(None)
        parent.recv()

    return Trainer(run, int(np.sum(loss_mask(batch))))


def main(argv: list[str] | None = None) -> int:
    """Measures and prints milliseconds per step, target tokens per second, and the ratios."""
    parser = Parser(
        prog="python -m experiments.benchmark training",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=bounds.count, default=7, help="turns of each competitor")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/benchmark"))
    arguments = parser.parse_args(argv)
    make_folder(arguments.out)
    keep_freed_memory()  # as the `train` command does
    trainers = competitors()
    seconds = _in_turn(trainers, arguments.rounds)
    rows = [_row(name, trainers[name], seconds) for name in trainers]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    replace(arguments.out / "training.jsonl", lines)
    for row in rows:
        print(_line(row))
    return 0


def _in_turn(trainers: dict[str, Trainer], rounds: int) -> dict[str, float]:
    """Returns the median seconds of a step, by competitor. The first step of a turn does not count:
    the previous competitor has left caches and memory in another state."""
    times: dict[str, list[float]] = {name: [] for name in trainers}
    for trainer in trainers.values():
        trainer.run_step()
    for _ in interruptible(range(rounds)):
        for name, trainer in trainers.items():
            time.sleep(SETTLE)
            trainer.run_step()
            for _ in range(2):
                start = time.perf_counter()
                trainer.run_step()
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(taken) for name, taken in times.items()}


def _row(name: str, trainer: Trainer, seconds: dict[str, float]) -> dict[str, Any]:
    row = {
        "name": name,
        "seconds_per_step": seconds[name],
        "tokens_per_second": trainer.tokens / seconds[name],
    }
    if "torch" in seconds:
        row["torch_ratio"] = seconds["torch"] / seconds[name]
    return row


def _line(row: dict[str, Any]) -> str:
    ratio = f", {row['torch_ratio']:.2f} times torch" if "torch_ratio" in row else ""
    return (
        f"{row['name']:<14} {1e3 * row['seconds_per_step']:>7.0f} ms a step, "
        f"{row['tokens_per_second']:>7.0f} real target tokens/s{ratio}"
    )
