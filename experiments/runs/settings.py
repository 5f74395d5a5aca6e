"""Settings of a run: frozen dataclasses whose fields pydantic checks, read from texts and JSON."""

import dataclasses
from collections.abc import Iterable
from typing import Annotated, Any, Self

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from experiments.runs.command_line import nearest


CHECKED = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

# Every number has both bounds: counts fit int32, other numbers float32, seeds uint32; of widths and
# layers there are as many as the largest models have, and some to spare.
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


class Settings:
    """What pydantic's dataclasses with `config=CHECKED` inherit from."""

    def changed(self, texts: Iterable[str]) -> Self:
        """These settings with some changed, each by a text `NAME=VALUE`.

        Raises:
            ValueError: an unknown name, or a value that does not fit, in one line.
        """
        fields: Any = self
        given = {name: str(value) for name, value in dataclasses.asdict(fields).items()}
        for text in texts:
            name, separator, value = text.partition("=")
            if not separator:
                raise ValueError(f"expected NAME=VALUE, got {text!r}")
            if name not in given:
                near = nearest(name, given) or "; `train --help` lists them"
                raise ValueError(f"unknown setting {name!r}{near}")
            given[name] = value
        try:
            return TypeAdapter(type(self)).validate_strings(given)
        except ValidationError as error:
            raise ValueError(_line(error)) from None

    @classmethod
    def from_json(cls, fields: Any) -> Self:
        """Reads what `dataclasses.asdict` gave.

        Raises:
            ValueError: not exactly these fields, or a value that does not fit, in one line.
        """
        own: Any = cls
        names = {field.name for field in dataclasses.fields(own)}
        if wrong := names ^ (set(fields) if isinstance(fields, dict) else set()):
            raise ValueError(f"configuration: missing or unknown fields {sorted(map(str, wrong))}")
        try:
            return cls(**fields)
        except ValidationError as error:
            raise ValueError(_line(error)) from None


def _line(error: ValidationError) -> str:
    """What is wrong first."""
    found: Any = error.errors()[0]
    if found["type"] == "value_error":
        return str(found["ctx"]["error"])
    expected = found["msg"].removeprefix("Input should be ")
    return f"{found['loc'][0]}: expected {expected}, got {found['input']!r:.80}"
