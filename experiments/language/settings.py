"""What a run is made with: the sizes of the model and how it is trained."""

from pydantic.dataclasses import dataclass

from experiments.runs.settings import (
    CHECKED,
    Count,
    Layers,
    Length,
    Limit,
    Rate,
    Seed,
    Share,
    Whole,
    Width,
)
from experiments.runs.settings import Settings as Base


@dataclass(frozen=True, config=CHECKED)
class Settings(Base):
    """The settings of a run; by default three minutes on two cores.

    Attributes:
        features: the width of the model.
        layers: how many.
        heads: of the attention.
        kv_heads: of its keys and values.
        feed_forward: the inner width of the gated network.
        length: how many characters a training row has, and how far back the attention looks.
        rows: of a batch.
        steps: of the training.
        learning_rate: the highest, to which it rises over `warmup` steps, to fall as a cosine.
        warmup: those steps.
        weight_decay: of AdamW.
        dropout_rate: see `jattn.nn.LayerOptions`.
        report_every: steps between two reports with the validation loss and a checkpoint.
        seed: of the parameters, the order of the text and dropout.
    """

    features: Width = 128
    layers: Layers = 4
    heads: Width = 4
    kv_heads: Width = 2
    feed_forward: Width = 344
    length: Length = 128
    rows: Count = 32
    steps: Count = 600
    learning_rate: Rate = 3e-3
    warmup: Whole = 50
    weight_decay: Limit = 0.1
    dropout_rate: Share = 0.0
    report_every: Count = 100
    seed: Seed = 0
