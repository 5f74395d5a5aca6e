"""What a client sends: JSON, checked by pydantic, and read as a request of the engine."""

import re
from typing import Annotated, Any

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from experiments.language.serving.engine import GenerationRequest
from experiments.language.text import Characters
from experiments.runs import settings
from experiments.runs.command_line import nearest


@dataclass(frozen=True, config=settings.CHECKED)
class RequestBody:
    """The fields of the JSON object that a client sends; the sampling is that of
    `jattn.generate`.

    Attributes:
        prompt: the text to continue.
        max_tokens: the largest number of characters to generate; by default 100, or as many as fit
            if these are fewer.
        temperature: 0 is greedy.
        top_k: draw from this many characters.
        top_p: draw from the nucleus of this probability.
        seed: the seed of the draws.
        stop: characters that end the text; the last one is part of it.
        stream: whether the characters are sent as they come, each in a line of JSON.
    """

    prompt: Annotated[str, Field(min_length=1)]
    max_tokens: settings.Count | None = None
    temperature: settings.Limit = 0.7
    top_k: settings.Count | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: settings.Seed = 0
    stop: Annotated[list[str], Field(max_length=64)] = Field(default_factory=list)
    stream: bool = False


_BODY = TypeAdapter(RequestBody)
_MAX_TOKENS = 100


def read_body(content: bytes) -> RequestBody:
    """Reads a JSON object.

    Raises:
        ValueError: it is not one, or a field is missing, unknown or invalid; the message names the
            field and is one line.
    """
    try:
        return _BODY.validate_json(content)
    except ValidationError as error:
        raise ValueError(_described(error.errors()[0])) from None


def _described(details: Any) -> str:
    fields = list(RequestBody.__annotations__)
    name = f"{'.'.join(map(str, details['loc'])):.80}"
    match details["type"]:
        case "json_invalid":
            return f"body: not valid JSON: {details['ctx']['error']}"
        case "unexpected_keyword_argument":
            known = f"{name}: expected one of the fields {', '.join(fields)}"
            return known + nearest(name, fields)
        case "missing_argument" | "missing":
            return f"{name}: expected with every request, got none"
        case "list_type" if name == "stop":
            return f"stop: expected a list of characters, got {details['input']!r:.80}"
    expected = re.sub("^.* should (be|have) ", "", details["msg"])
    return f"{name or 'body'}: expected {expected}, got {details['input']!r:.80}"


def generation_request(body: RequestBody, characters: Characters, length: int) -> GenerationRequest:
    """Encodes the texts of a body, for an engine of requests of at most `length` tokens.

    Raises:
        ValueError: they have characters that the model does not know, or a stop is not one
            character.
    """
    for text in body.stop:
        if len(text) != 1:
            raise ValueError(f"stop: expected texts of one character, got {text!r:.80}")
    prompt = _encoded("prompt", body.prompt, characters).tolist()
    fits = max(length - len(prompt), 1)  # the engine refuses a prompt that leaves no room
    return GenerationRequest(
        tuple(prompt),
        min(_MAX_TOKENS, fits) if body.max_tokens is None else body.max_tokens,
        body.temperature,
        body.top_k,
        body.top_p,
        body.seed,
        frozenset(_encoded("stop", "".join(body.stop), characters).tolist()),
    )


def _encoded(name: str, text: str, characters: Characters) -> np.ndarray:
    try:
        return characters.encode(text)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
