"""A run's directory, with its settings, alphabet, metrics and last checkpoint. It may come from
somebody else, so links, pipes and devices in it, which would lead elsewhere, are rejected.

config.json      the settings, the alphabet, and the text's path and fingerprint
metrics.jsonl    a line for each report while training
checkpoints/N    the state after N steps, written by orbax
loss.png         the losses over the steps
lock             the process that trains, or trained last (`experiments.runs.locking`)
"""

import contextlib
import dataclasses
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
from matplotlib.figure import Figure

from experiments.language.settings import LanguageSettings
from experiments.language.text import Characters, fingerprint
from experiments.runs.checkpoints import without_tracebacks
from experiments.runs.files import check_plain, inside, parsed, reason, replace, writing
from experiments.runs.folder import Folder
from experiments.runs.locking import is_vacant


_FORMAT = "jattn-language-run"


@dataclass(frozen=True)
class LanguageRun(Folder):
    """A run in `directory`.

    Attributes:
        settings: the settings.
        characters: the vocabulary.
        text: the path of the training text, or None for generated sentences.
        fingerprint: the digest of the training text; None in runs of earlier versions.
    """

    settings: LanguageSettings
    characters: Characters
    text: str | None
    fingerprint: str | None = None

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
                **others,
            } if isinstance(digest := others.get("fingerprint"), str | None):
                checked = LanguageSettings.from_json(settings)
                return cls(directory, checked, Characters(alphabet), text, digest)
        raise ValueError(f"{path}: expected what training writes there")

    def check_vacant(self) -> None:
        """Checks that the directory is free for a new run.

        Raises:
            FileExistsError: the directory exists and contains more than a lock.
        """
        if not is_vacant(self.directory):
            raise FileExistsError(f"run: {self.directory} exists already and is not empty")

    def check_same_text(self, content: str) -> None:
        """Checks that this run was started with a text.

        Raises:
            ValueError: the run was started with another text.
        """
        if self.fingerprint not in (None, fingerprint(content)):
            raise ValueError(f"{self.directory} was started differently: the training text")

    def create(self) -> None:
        """Makes the directory and writes the file that `open` reads.

        Raises:
            FileExistsError: for the same reason as `check_vacant`.
        """
        self.check_vacant()
        content = {
            "format": _FORMAT,
            "settings": dataclasses.asdict(self.settings),
            "alphabet": self.characters.alphabet,
            "text": self.text,
            "fingerprint": self.fingerprint,
        }
        self.write("config.json", json.dumps(content, indent=2) + "\n")

    def save(self, state: Any, step: int) -> None:
        """Writes a checkpoint and removes the previous one."""
        with writing(f"{self.directory}: checkpoint {step}"), self._manager() as manager:
            manager.save(step, args=ocp.args.StandardSave(state))

    def last_step(self) -> int | None:
        """Returns the step of the checkpoint to resume from, or None if there is none yet."""
        if not self.path("checkpoints").is_dir():
            return None
        with self._manager() as manager:
            return manager.latest_step()

    def restore(self, like: Any) -> tuple[Any, int]:
        """Returns the last checkpoint as a tree with the structure of `like`, and its step.

        Raises:
            FileNotFoundError: there is no checkpoint.
            ValueError: the checkpoint is damaged or of another model.
        """
        step = self.last_step()
        if step is None:
            raise FileNotFoundError(f"{self.directory}: no checkpoint yet")
        with self._manager() as manager:
            try:
                return manager.restore(step, args=ocp.args.StandardRestore(like)), step
            except (
                Exception
            ) as error:  # orbax raises many kinds of errors for unreadable checkpoints
                raise ValueError(
                    f"{self.directory}: checkpoint {step} is damaged or of another model: "
                    f"{reason(error)}"
                ) from error

    @contextlib.contextmanager
    def _manager(self) -> Iterator[ocp.CheckpointManager]:
        options = ocp.CheckpointManagerOptions(max_to_keep=1, enable_async_checkpointing=False)
        directory = self.path("checkpoints").resolve()
        with without_tracebacks(), ocp.CheckpointManager(directory, options=options) as manager:
            yield manager

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
