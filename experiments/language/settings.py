"""The settings of a run: the sizes of the model and the parameters of training."""

from pydantic.dataclasses import dataclass

from experiments.runs import settings


@dataclass(frozen=True, config=settings.CHECKED)
class LanguageSettings(settings.RunSettings):
    """The settings of a run; the defaults take a few minutes on two cores.

    Attributes:
        features: the width of the model.
        layers: the number of layers.
        heads: the number of query heads.
        kv_heads: the number of key and value heads.
        feed_forward: the inner width of the gated feed-forward network.
        length: the characters of a training row, and the attention's window.
        rows: the rows of a batch.
        steps: the training steps.
        learning_rate: the peak, reached after `warmup` steps; a cosine decay follows.
        warmup: the steps in which the learning rate rises.
        weight_decay: AdamW's weight decay.
        dropout_rate: see `jattn.nn.LayerOptions`.
        report_every: steps between two reports with the validation loss and a checkpoint.
        seed: the seed of the parameters, the order of the text and dropout.
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
