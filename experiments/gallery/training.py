"""Trains the character model of `experiments.language` with a variant, and with softmax."""

import dataclasses
import functools
import io
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from matplotlib.figure import Figure

from experiments.gallery import plain
from experiments.gallery.variant import Language, Variant, causal, masked
from experiments.language import text
from experiments.language.runs import LanguageRun
from experiments.language.settings import LanguageSettings
from experiments.language.training import init_state, train
from experiments.runs.files import replace
from jattn import positions
from jattn.nn import MultiHeadAttention


SOFTMAX = masked("Softmax attention.", causal, plain.causal, Language())
_REPORTS = 10
_TRIAL_STEPS = 20  # after as many steps again, the speed is known


class VariantAttention(MultiHeadAttention):
    """Multi-head attention whose heads compute a variant, which must be causal.

    Further inputs of the variant are parameters, or linear functions of the layer's input.
    """

    def __init__(self, *model_sizes: int, variant: Variant, **options: Any):
        super().__init__(*model_sizes, **options)
        self.variant = variant
        N, D = self.num_heads, self.in_features
        language = self.language
        sizes = N, self.head_dim // language.q_heads
        first, rngs = language.initial(*sizes), options["rngs"]
        self.learned = nnx.Dict({name: nnx.Param(jnp.array(x)) for name, x in first.items()})
        shapes = language.per_token(*sizes)
        self.per_token = nnx.Dict(
            {name: nnx.LinearGeneral(D, shape, rngs=rngs) for name, shape in shapes.items()}
        )

    @property
    def language(self) -> Language:
        """The variant's needs to be a language model."""
        assert isinstance(self.variant.language, Language)
        return self.variant.language

    def __call__(self, inputs_q: Array, **options: Any) -> Array:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Attends from `inputs_q` `[B, T, D]` to itself; options have no effect."""
        key, value = self.project_keys_values(inputs_q)
        query = self.project_queries(inputs_q)
        if self.language.q_heads > 1:
            heads = self.num_heads * self.language.q_heads
            query, key = (x.reshape(*x.shape[:2], heads, -1) for x in (query, key))
        if self.language.is_rotary:
            places = jnp.arange(inputs_q.shape[1])
            query, key = (
                positions.rotary(x, jnp.broadcast_to(places, x.shape[:2])) for x in (query, key)
            )
        by_row = {name: layer(inputs_q) for name, layer in self.per_token.items()}
        learned = {name: x[...] for name, x in self.learned.items()}

        def attend(by_row: dict[str, Array]) -> Array:
            return self.variant.attention(**by_row, **learned)

        return self.out(jax.vmap(attend)({"q": query, "k": key, "v": value, **by_row}))


def model_options(variant: Variant) -> dict[str, Any]:
    """Returns the options of the character model that make it use a variant."""
    attention = functools.partial(VariantAttention, variant=variant)
    return {"self_attention": attention, "positions": None}


def _trained(directory: Path, variant: Variant, settings: LanguageSettings) -> list[dict[str, Any]]:
    """Trains a new run in `directory`, prints its losses, and returns its records."""
    content = text.read(None)
    run = LanguageRun(directory, settings, text.Characters.of(content), None)
    run.create()
    texts = text.split(run.characters.encode(content), settings.length)
    train(run, texts, _tell, *init_state(run, **model_options(variant)))
    return run.metrics()


def _tell(record: dict[str, Any]) -> None:
    losses = f"loss {record['loss']:.3f}, held out {record['validation_loss']:.3f}"
    print(f"  step {record['step']:,}: {losses}, {record['seconds']:.0f} s", flush=True)


def compare(
    name: str,
    variant: Variant,
    directory: Path,
    minutes: float,
    settings: LanguageSettings | None = None,
) -> Path:
    """Trains the variant for about some minutes, and softmax attention for as many steps; returns
    the path of a plot of both losses. The runs are written below `directory`."""
    settings = settings or LanguageSettings()
    settings = dataclasses.replace(settings, kv_heads=settings.heads)
    print(f"measuring the speed with {name}", flush=True)
    trial = {"steps": 2 * _TRIAL_STEPS, "report_every": _TRIAL_STEPS}
    records = _trained(directory / "trial", variant, dataclasses.replace(settings, **trial))
    per_second = _TRIAL_STEPS / records[-1]["seconds"]
    steps = max(2, round(60 * minutes * per_second))
    sizes = {"steps": steps, "report_every": max(1, steps // _REPORTS)}
    settings, losses = dataclasses.replace(settings, **sizes), {}
    for label, candidate in {name: variant, "softmax": SOFTMAX}.items():
        print(f"{steps:,} steps with {label}", flush=True)
        losses[label] = _trained(directory / label, candidate, settings)
    path = directory / "loss.png"
    replace(path, _drawn(losses))
    return path


def _drawn(losses: dict[str, list[dict[str, Any]]]) -> bytes:
    """Plots the held-out losses over the steps as a PNG file."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for label, records in losses.items():
        loss = [record["validation_loss"] for record in records]
        axes.plot([record["step"] for record in records], loss, "o-", label=label, markersize=4)
    axes.set_xlabel("step")
    axes.set_ylabel("held-out loss, nats per character")
    axes.grid(alpha=0.3)
    axes.legend()
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=150)
    return content.getvalue()
