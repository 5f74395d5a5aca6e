"""A viewer for attention: one HTML file that works without a network.

The page joins the HTML, CSS and JavaScript files in `page/` with the payload. Its content security
policy forbids every connection, and every script and style whose hash it does not list. Tokens
enter as JSON in which no character can close the script element, and are shown as text.
"""

import base64
import hashlib
import html
import importlib.resources
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jattn.checks import shown
from jattn.viz.inputs import checked_title
from jattn.viz.payload import Blocks, Sentence, described


__all__ = ["Sentence", "Viewer", "stack_layers", "viewer"]


_SCRIPTS = (
    "data.js",
    "page.js",
    "colours.js",
    "heads.js",
    "model.js",
    "matrix.js",
    "neurons.js",
    "numbers.js",
    "main.js",
)


@dataclass(frozen=True)
class Viewer:
    """A page made by `viewer`. A notebook displays it in a frame.

    Attributes:
        html: the whole page.

    >>> jattn.viz.viewer(jnp.eye(2), ["good", "day"]).html[:15]
    '<!doctype html>'
    """

    html: str

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes the page to a file, whose folder must exist, and returns the path.

        Raises TypeError if `path` is not a path, and OSError if it cannot be written.
        """
        if not isinstance(path, str | os.PathLike):
            raise TypeError(f"path: expected a path, got {shown(path)}")
        Path(path).write_text(self.html, encoding="utf-8")
        return Path(path)

    def __repr__(self) -> str:
        return f"Viewer({len(self.html):,} characters of HTML; .save(path) writes them)"

    def _repr_html_(self) -> str:
        content = html.escape(self.html, quote=True)
        return (
            f'<iframe srcdoc="{content}" sandbox="allow-scripts" title="attention" '
            f'style="width: 100%; height: 680px; border: 0"></iframe>'
        )


def viewer(
    weights: Any,
    tokens: Any = None,
    kv_tokens: Any = None,
    *,
    mask: Any = None,
    other: Any = None,
    title: str = "Attention",
    models: Sequence[str] = ("first", "second"),
    block: int | tuple[int, int] | None = None,
    query: Any = None,
    key: Any = None,
) -> Viewer:
    """Makes a page that shows attention: lines between tokens, all heads of all layers, matrices
    with the value of each pair, and statistics of each head.

        viz.viewer(weights).save("attention.html")
        viz.viewer(weights, tokens).save("attention.html")
        viz.viewer({"encoder": e, "cross": c}, {"encoder": source, "cross": target},
                   {"cross": source})
        viz.viewer([viz.Sentence(w1, tokens1), viz.Sentence(w2, tokens2)])

    The page opens with the first cross-attention, if there is one, and a single head: the one whose
    weights are clearest. A slider moves through the queries in the order of decoding. The page
    stores a weight in one byte, accurate to 1/510 of the greatest weight in its row, and says so
    beside each value. Its size is about T × S bytes for each head before compression.

    Args:
        weights: `[L, N, T, S]`, `[N, T, S]` or `[T, S]`, finite and at least 0, or a mapping from
            names to such arrays (see `Sentence`); or a list of sentences, which hold all other
            arguments but `title`, `models` and `block`.
        tokens: T strings, the queries, or a mapping with the same names; None: numbers from 1.
        kv_tokens: S strings, the keys, or a mapping; by default the same as the queries.
        mask: the mask to draw over the weights: a mask of `jattn.masks` or a boolean array
            `[N, T, S]`, or `[T, S]` for weights `[T, S]`; or a mapping.
        other: the weights of a second model, to show the difference.
        title: the page's title.
        models: the names of the two models.
        block: the size of the mask's tiles, an integer or a pair (queries, keys); None: about eight
            tiles along an axis.
        query: the queries `[L, T, N, H]`, or `[T, N, H]` or `[T, H]` for weights with fewer axes;
            or a mapping. With `key` they add a view of the products of their elements.
        key: the keys `[L, S, K, H]`, or `[S, K, H]` or `[S, H]`; or a mapping.

    Raises:
        TypeError, ValueError: for invalid arguments.

    >>> page = jattn.viz.viewer(jattn.attention_weights(q, q)[0], ["a", "b", "c", "d", "e"])
    """
    fields = {"tokens": tokens, "kv_tokens": kv_tokens, "mask": mask, "other": other}
    sentences = _sentences(weights, fields | {"query": query, "key": key})
    if checked_title("title", title) is None:
        raise TypeError("title: expected a string, got None")
    blocks = Blocks()
    description = {
        "title": title,
        "models": _checked_models(models),
        "sentences": described(sentences, block, blocks),
    }
    return Viewer(_page(description, blocks))


def _sentences(weights: Any, fields: Mapping[str, Any]) -> list[Sentence]:
    sentences = [weights] if isinstance(weights, Sentence) else weights
    if not isinstance(sentences, list | tuple):
        return [Sentence(weights, **fields)]
    if not sentences or not all(isinstance(x, Sentence) for x in sentences):
        raise TypeError(
            f"weights: expected an array [L, N, T, S], a mapping to such, or sentences, "
            f"got {shown(weights)}"
        )
    for name, value in fields.items():
        if value is not None:
            raise ValueError(
                f"{name}: sentences bring their own, expected None, got {shown(value)}"
            )
    return list(sentences)


def _checked_models(models: Any) -> list[str]:
    names = [] if isinstance(models, str | bytes) else list(models)
    if len(names) != 2 or not all(isinstance(x, str) for x in names):
        raise TypeError(f"models: expected two strings, got {shown(models)}")
    return [checked_title("models", x) or "" for x in names]


def stack_layers(weights: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Stacks the layers in the weights by module that `jattn.nn.capture_weights` returns.

    Names that differ only in a number between slashes are one attention: `"decoder/0/attention"`
    and `"decoder/1/attention"` become `"decoder/attention"`.

    Args:
        weights: arrays of any shape; all layers of one attention have the same shape.

    Returns:
        An array `[L, ...]` for each attention, in the order of the numbers.

    Raises:
        TypeError, ValueError: for any other input.

    >>> weights = {f"layers/{i}/attention": jnp.ones((4, 5, 7)) for i in range(2)}
    >>> {name: x.shape for name, x in jattn.viz.stack_layers(weights).items()}
    {'layers/attention': (2, 4, 5, 7)}
    """
    if not isinstance(weights, Mapping):
        raise TypeError(f"weights: expected a mapping from names to arrays, got {shown(weights)}")
    groups: dict[str, list[tuple[list[int], Any]]] = {}
    for name, value in weights.items():
        if not isinstance(name, str) or not hasattr(value, "shape"):
            raise TypeError(
                f"weights: expected names and arrays, got {shown(name)} and {type(value).__name__}"
            )
        parts = name.split("/")
        number = [int(x) for x in parts if x.isdecimal()]
        group = "/".join(x for x in parts if not x.isdecimal())
        groups.setdefault(group, []).append((number, value))
    stacked = {}
    for group, layers in groups.items():
        arrays = [np.asarray(value) for _, value in sorted(layers, key=lambda layer: layer[0])]
        shapes = {array.shape for array in arrays}
        if len(shapes) > 1:
            raise ValueError(f"weights: expected one shape for {group!r}, got {sorted(shapes)}")
        stacked[group] = np.stack(arrays)
    return stacked


def as_script_data(value: Any) -> str:
    """Returns JSON that is safe in a script element: ASCII, without the characters of markup."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _page(about: dict[str, Any], blocks: list[str]) -> str:
    style, files = _file("viewer.css"), "\n".join(map(_file, _SCRIPTS))
    script = f'(() => {{\n"use strict";\n{files}}})();\n'
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        f"base-uri 'none'; form-action 'none'"
    )
    data = [f'<script type="application/json" id="about">{as_script_data(about)}</script>']
    data += [
        f'<script type="text/plain" id="block-{index}">{text}</script>'
        for index, text in enumerate(blocks)
    ]
    parts = {"POLICY": policy, "STYLE": style, "DATA": "\n".join(data), "SCRIPT": script}
    return re.sub(r"%([A-Z]+)%", lambda match: parts[match[1]], _file("viewer.html"))


def _file(name: str) -> str:
    folder = importlib.resources.files("jattn.viz") / "page"
    return (folder / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"sha256-{base64.b64encode(digest).decode('ascii')}"
