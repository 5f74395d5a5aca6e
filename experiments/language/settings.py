"""What a run is made with: the sizes of the model and how it is trained."""

from pydantic.dataclasses import dataclass

from experiments.runs import settings


@dataclass(frozen=True, config=settings.CHECKED)
class Settings(settings.Settings):
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

    features: settings.Width = 128
    layers: settings.Layers = 4
    heads: settings.Width = 4
    kv_heads: settings.Width = 2
    feed_forward: settings.Width = 344
    length: settings.Length = 128
    rows: settings.Count = 32
    steps: settings.Count = 600
    learning_rate: settings.Rate = 3e-3
    warmup: settings.Whole = 50
    weight_decay: settings.Limit = 0.1
    dropout_rate: settings.Share = 0.0
    report_every: settings.Count = 100
    seed: settings.Seed = 0
