"""Settings of a run: frozen dataclasses checked by pydantic and read from text or JSON."""

import dataclasses
from collections.abc import Iterable
from typing import Annotated, Any, Self

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from experiments.runs.command_line import nearest


CHECKED = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

# Every number has two bounds: counts fit int32, other numbers float32, seeds uint32; widths and
# numbers of layers are bounded well above those of the largest models.
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
Whole = Annotated[int, Field(ge=0, le=2**31 - 1)]
Few = Annotated[int, Field(ge=1, le=1000)]
Layers = Annotated[int, Field(ge=1, le=256)]
Width = Annotated[int, Field(ge=1, le=2**18)]
Length = Annotated[int, Field(ge=1, le=2**16)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
Rate = Annotated[float, Field(gt=0, le=1e30)]
Limit = Annotated[float, Field(ge=0, le=1e30)]
Share = Annotated[float, Field(ge=0, lt=1)]


class RunSettings:
    """The base class of settings, for pydantic dataclasses with `config=CHECKED`."""

    def changed(self, texts: Iterable[str]) -> Self:
        """Returns these settings with changes, each a text `NAME=VALUE`.

        Raises:
            ValueError: a name is unknown or a value is invalid; the message is one line.
        """
        fields: Any = self
        values = {name: str(value) for name, value in dataclasses.asdict(fields).items()}
        for text in texts:
            name, separator, value = text.partition("=")
            if not separator:
                raise ValueError(f"expected NAME=VALUE, got {text!r}")
            if name not in values:
                hint = nearest(name, values) or "; `train --help` lists them"
                raise ValueError(f"unknown setting {name!r}{hint}")
            values[name] = value
        try:
            return TypeAdapter(type(self)).validate_strings(values)
        except ValidationError as error:
            raise ValueError(_line(error)) from None

    @classmethod
    def from_json(cls, fields: Any) -> Self:
        """Creates settings from the output of `dataclasses.asdict`.

        Raises:
            ValueError: a field is missing or unknown, or a value is invalid; the message is one
                line.
        """
        dataclass: Any = cls
        names = {field.name for field in dataclasses.fields(dataclass)}
        if wrong := names ^ (set(fields) if isinstance(fields, dict) else set()):
            raise ValueError(f"configuration: missing or unknown fields {sorted(map(str, wrong))}")
        try:
            return cls(**fields)
        except ValidationError as error:
            raise ValueError(_line(error)) from None


def _line(error: ValidationError) -> str:
    """Returns the message of the first error, in one line."""
    details: Any = error.errors()[0]
    if details["type"] == "value_error":
        return str(details["ctx"]["error"])
    expected = details["msg"].removeprefix("Input should be ")
    return f"{details['loc'][0]}: expected {expected}, got {details['input']!r:.80}"
