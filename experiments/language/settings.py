"""What a run is made with: the sizes of the model and how it is trained."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from experiments.translation.names import nearest


@dataclasses.dataclass(frozen=True)
class Settings:
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

    features: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    feed_forward: int = 344
    length: int = 128
    rows: int = 32
    steps: int = 600
    learning_rate: float = 3e-3
    warmup: int = 50
    weight_decay: float = 0.1
    dropout_rate: float = 0.0
    report_every: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        for name, kind in _KINDS.items():
            value = getattr(self, name)
            if type(value) is not kind:
                raise ValueError(f"{name}: expected {kind.__name__}, got {value!r}")
            least = 0 if name in ("seed", "weight_decay", "dropout_rate", "warmup") else 1
            if not (value >= least or (kind is float and value > 0)):
                raise ValueError(f"{name}: expected at least {least}, got {value!r}")

    def changed(self, given: Iterable[str]) -> "Settings":
        """These settings with some changed, each by a text `NAME=VALUE`.

        Raises:
            ValueError: an unknown name, or a value that does not fit.
        """
        changes: dict[str, Any] = {}
        for text in given:
            name, separator, value = text.partition("=")
            if not separator:
                raise ValueError(f"--set: expected NAME=VALUE, got {text!r}")
            if name not in _KINDS:
                raise ValueError(f"--set: no setting {name!r}{nearest(name, _KINDS)}")
            try:
                changes[name] = _KINDS[name](value)
            except ValueError:
                wanted = _KINDS[name].__name__
                raise ValueError(f"{name}: expected {wanted}, got {value!r}") from None
        return dataclasses.replace(self, **changes)

    @classmethod
    def from_json(cls, fields: Any) -> "Settings":
        """Reads what `dataclasses.asdict` gave.

        Raises:
            ValueError: not exactly these fields, or a value that does not fit.
        """
        if not isinstance(fields, dict) or fields.keys() != _KINDS.keys():
            raise ValueError("settings: expected the fields that training writes")
        return cls(**fields)


_KINDS = {field.name: type(field.default) for field in dataclasses.fields(Settings)}
