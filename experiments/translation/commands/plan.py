"""Plans training: `make_plan` reads and checks all inputs before anything is written."""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from experiments.runs import processes
from experiments.runs.console import Console
from experiments.runs.folder import free_directory
from experiments.runs.memory import check_fits
from experiments.translation import reporting
from experiments.translation.batches import Epochs
from experiments.translation.data import LANGUAGES
from experiments.translation.meshes import Placement, check_mesh, parse_mesh, usual_mesh
from experiments.translation.model import Model
from experiments.translation.presets import PRESETS
from experiments.translation.runs import (
    TextOrigin,
    TranslationRun,
    check_removable,
    fingerprint,
    is_vacant,
)
from experiments.translation.text import encode_pairs
from experiments.translation.training import TrainingTexts, make_batches, read_texts
from experiments.translation.vocabulary import learn_vocabularies


@dataclass(frozen=True)
class TrainingPlan:
    """The inputs of training, all read and checked."""

    run: TranslationRun
    texts: TrainingTexts
    batches: Epochs
    model: Model
    placement: Placement

    def shared(self) -> dict[str, Any]:
        """Returns the values that must be equal in all processes of a run, by name."""
        return {
            "the configuration": self.run.config,
            "the training text": self.run.origin.fingerprint,
            "the mesh": self.placement.mesh and dict(self.placement.mesh.shape),
            "the version of JAX": jax.__version__,
        }


def make_plan(
    options: argparse.Namespace, saved: TranslationRun | None, console: Console
) -> TrainingPlan:
    """Reads and checks the inputs that the options name, for a new run or for a saved one.

    Raises:
        ValueError, OSError: an input is invalid or cannot be read.
    """
    config = saved.config if saved and not options.preset else PRESETS[options.preset or "toy"]
    seed = [] if options.seed is None else [f"seed={options.seed}"]
    config = config.changed([*seed, *options.set])
    mesh = usual_mesh() if options.mesh is None else parse_mesh(options.mesh)
    check_mesh(mesh, config)
    directory = saved.directory if saved else new_directory(options)
    path = options.data or (saved.origin.path if saved else None)
    first, second = options.languages or (saved.origin.languages if saved else LANGUAGES)
    languages = (first, second)
    texts = read_texts(config, path, languages, most_unpacked=options.max_unpacked)
    source, target = learn_vocabularies(config, texts.train)
    pairs, report = encode_pairs(texts.train, source, target, max_length=config.max_length)
    reporting.tell_of_text(console, texts.reports, report)
    origin = TextOrigin(path and str(Path(path).resolve()), languages, fingerprint(pairs))
    batches = make_batches(config, pairs)
    run = TranslationRun(directory, config, source, target, origin)
    model = Model(config, len(source), len(target))
    check_fits(model.size)
    placement = Placement.of(mesh, model)
    placement.check_shapes(batches.shapes)
    return TrainingPlan(run, texts, batches, model, placement)


def new_directory(options: argparse.Namespace) -> Path:
    """Returns the directory for a new run, which is vacant or may be overwritten.

    Raises:
        FileExistsError: the directory is not vacant, and `--overwrite` is not given.
        ValueError: the directory holds something else than a run.
    """
    usual = Path("runs") / (options.preset or "toy")
    if options.run is None and not options.overwrite and processes.leads():
        return free_directory(usual)
    directory = options.run or usual
    if processes.leads() and not is_vacant(directory):
        if not options.overwrite:
            raise FileExistsError(
                f"{directory} exists already: expected another --run, --resume or --overwrite"
            )
        check_removable(directory)
    return directory
