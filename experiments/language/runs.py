"""A run's directory, with its settings, alphabet, metrics and last checkpoint. It may come from
somebody else, so links, pipes and devices in it, which would lead elsewhere, are rejected.

config.json      the settings, the alphabet and the text's path
metrics.jsonl    a line for each report while training
checkpoints/N    the state after N steps, written by orbax
loss.png         the losses over the steps
"""

import dataclasses
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
from matplotlib.figure import Figure

from experiments.language.settings import LanguageSettings
from experiments.language.text import Characters
from experiments.runs.files import check_plain, inside, parsed, replace, writing
from experiments.runs.folder import Folder


_FORMAT = "jattn-language-run"


@dataclass(frozen=True)
class LanguageRun(Folder):
    """A run in `directory`; `text` is the path of its training text, or None for generated
    sentences."""

    settings: LanguageSettings
    characters: Characters
    text: str | None

    @classmethod
    def open(cls, directory: Path) -> "LanguageRun":
        """Reads a run's directory.

        Raises:
            FileNotFoundError: there is no run in the directory.
            ValueError: its file does not have the format that `create` writes, or the directory
                contains links, pipes or devices.
        """
        path = inside(directory, "config.json")
        if not path.exists():
            raise FileNotFoundError(f"run: expected a run's directory, found none at {directory}")
        check_plain(directory)
        content = parsed(path.read_text("utf-8"))
        match content:
            case {
                "format": "jattn-language-run",
                "settings": dict() as settings,
                "alphabet": str(alphabet),
                "text": (str() | None) as text,
            }:
                return cls(
                    directory, LanguageSettings.from_json(settings), Characters(alphabet), text
                )
        raise ValueError(f"{path}: expected what training writes there")

    def create(self) -> None:
        """Makes the directory and writes the file that `open` reads.

        Raises:
            FileExistsError: the directory exists and is not empty.
        """
        if self.directory.exists() and any(self.directory.iterdir()):
            raise FileExistsError(f"run: {self.directory} exists already and is not empty")
        content = {
            "format": _FORMAT,
            "settings": dataclasses.asdict(self.settings),
            "alphabet": self.characters.alphabet,
            "text": self.text,
        }
        self.write("config.json", json.dumps(content, indent=2) + "\n")

    def save(self, state: Any, step: int) -> None:
        """Writes a checkpoint and removes the previous one."""
        with writing(f"{self.directory}: checkpoint {step}"), self._manager() as manager:
            manager.save(step, args=ocp.args.StandardSave(state))

    def has_checkpoint(self) -> bool:
        """Returns whether there is a checkpoint to resume from."""
        if not self.path("checkpoints").is_dir():
            return False
        with self._manager() as manager:
            return manager.latest_step() is not None

    def restore(self, like: Any) -> tuple[Any, int]:
        """Returns the last checkpoint as a tree with the structure of `like`, and its step.

        Raises:
            FileNotFoundError: there is no checkpoint.
            ValueError: the checkpoint is damaged or of another model.
        """
        if not self.has_checkpoint():
            raise FileNotFoundError(f"{self.directory}: no checkpoint yet")
        with self._manager() as manager:
            step = manager.latest_step()
            try:
                return manager.restore(step, args=ocp.args.StandardRestore(like)), step
            except (
                Exception
            ) as error:  # orbax raises many kinds of errors for unreadable checkpoints
                raise ValueError(
                    f"{self.directory}: checkpoint {step} is damaged or of another model: {error}"
                ) from error

    def _manager(self) -> ocp.CheckpointManager:
        options = ocp.CheckpointManagerOptions(max_to_keep=1, enable_async_checkpointing=False)
        return ocp.CheckpointManager(self.path("checkpoints").resolve(), options=options)

    def draw_losses(self) -> Path:
        """Plots the losses over the steps, and returns the file's path."""
        path = self.path("loss.png")
        replace(path, _drawn(self.metrics()))
        return path


def _drawn(records: Sequence[Mapping[str, Any]]) -> bytes:
    """Plots the losses over the steps as a PNG file."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    steps = [record["step"] for record in records]
    for name, label, style in (("loss", "training", "-"), ("validation_loss", "held out", "o-")):
        axes.plot(steps, [record[name] for record in records], style, label=label, markersize=4)
    axes.set_xlabel("step")
    axes.set_ylabel("nats per character")
    axes.grid(alpha=0.3)
    axes.legend()
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=150)
    return content.getvalue()
