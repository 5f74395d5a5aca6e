"""What a viewer's page holds, as JSON and blocks of bytes.

A head's weights are bytes: T scales in float32, then T × S numbers from 0 to 255. A weight is its
number times the scale of its row, the row's greatest weight divided by 255. So no weight is off by
more than 1/510 of the greatest in its row, also where a row has thousands of small ones. Blocks are
compressed, and a page opens one when it first shows it.
"""

import base64
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jattn._pytree import leading
from jattn.checks import check_array, shown
from jattn.masks import EMPTY, FULL, MIXED, Mask, as_mask, tile_map
from jattn.viz.figures import checked_block, dense_mask
from jattn.viz.head_numbers import head_numbers
from jattn.viz.inputs import checked_title, checked_tokens, checked_values, visible


__all__ = ["Sentence"]


def __dir__() -> list[str]:
    return __all__


_THUMBNAIL = 48  # cells along an axis of the small picture of a head


@dataclass(frozen=True)
class Sentence:
    """A sentence in a viewer: its attentions, and the tokens that they are between.

    What is for one attention here can be a mapping from names to attentions, such as `"encoder"`,
    `"decoder"` and `"cross"`.

    Attributes:
        weights: `[L, N, T, S]`, or `[N, T, S]` or `[T, S]`, finite and at least 0.
        tokens: T strings, the queries.
        kv_tokens: S strings, the keys; None: the same as the queries.
        mask: a mask of `jattn.masks` or a boolean array `[N, T, S]`, or `[T, S]` where weights are
            `[T, S]`, without batch axes or with those of one row, to lay over the weights.
        other: weights of a second model, of the same shapes, to see the difference.
        name: what the sentence is called; by default the first words of it.
    """

    weights: Any
    tokens: Any
    kv_tokens: Any = None
    mask: Any = None
    other: Any = None
    name: str | None = None


@dataclass(frozen=True)
class Attention:
    """One attention of a sentence, checked.

    Attributes:
        name: what it is called.
        models: weights `[L, N, T, S]` of one model, or of two.
        rows: the tokens of the queries.
        columns: the tokens of the keys.
        mask: which pairs are allowed, or None.
    """

    name: str
    models: tuple[np.ndarray, ...]
    rows: list[str]
    columns: list[str]
    mask: Mask | None


class Blocks:
    """Blocks of bytes, each once, by the number that the page knows them by."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def add(self, content: bytes) -> int:
        """Keeps a block, compressed and in letters, and returns its number."""
        self.texts.append(base64.b64encode(zlib.compress(content, 6)).decode("ascii"))
        return len(self.texts) - 1


def quantised(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scales `[T]` in float32 and numbers `[T, S]` in uint8 of weights `[T, S]`."""
    scales = (weights.max(axis=1) / 255).astype(np.float32)
    divisors = np.where(scales > 0, scales, 1)[:, None]
    return scales, np.clip(np.rint(weights / divisors), 0, 255).astype(np.uint8)


def attentions(sentence: Sentence) -> list[Attention]:
    """The attentions of a sentence, in the order they were given.

    Raises TypeError and ValueError for what does not fit.
    """
    if not isinstance(sentence.weights, Mapping):
        return [_attention("", sentence, {})]
    if not sentence.weights:
        raise ValueError("weights: expected at least one attention, got an empty mapping")
    for field in ("tokens", "kv_tokens", "mask", "other"):
        value = getattr(sentence, field)
        unknown = [x for x in value if x not in sentence.weights] if _by_name(value) else []
        if unknown:
            raise ValueError(
                f"{field}: expected names of weights, {list(sentence.weights)}, got {unknown[0]!r}"
            )
    return [_attention(name, sentence, {"name": name}) for name in sentence.weights]


def _by_name(value: Any) -> bool:
    return isinstance(value, Mapping)


def _attention(name: Any, sentence: Sentence, named: dict[str, Any]) -> Attention:
    """The attention of a name, or the only one."""
    if not isinstance(name, str):
        raise TypeError(f"weights: expected strings as names, got {shown(name)}")
    where = f"[{name!r}]" if named else ""

    def of(field: str) -> Any:
        value = getattr(sentence, field)
        return value.get(name) if _by_name(value) else value

    first = _checked_weights(f"weights{where}", of("weights"))
    models = [first]
    if sentence.other is not None:
        if of("other") is None:
            raise ValueError(f"other: expected weights of {name!r} too, got none")
        models.append(_checked_weights(f"other{where}", of("other")))
        if models[1].shape != first.shape:
            raise ValueError(
                f"other{where}: expected the shape of weights, {list(first.shape)}, "
                f"got {list(models[1].shape)}"
            )
    T, S = first.shape[-2:]
    rows = checked_tokens(f"tokens{where}", of("tokens"), T, "T")
    if rows is None:
        raise TypeError(f"tokens{where}: expected a sequence of T strings, got None")
    columns = of("kv_tokens")
    if columns is None and T == S:
        columns = rows
    columns = checked_tokens(f"kv_tokens{where}", columns, S, "S")
    if columns is None:
        raise ValueError(f"kv_tokens{where}: expected S = {S} tokens, as T is {T}, got None")
    mask = of("mask")
    if mask is not None:
        mask = _checked_mask(f"mask{where}", mask, of("weights").ndim)
    return Attention(name, tuple(models), rows, columns, mask)


def _checked_weights(name: str, value: Any) -> np.ndarray:
    """`[L, N, T, S]`."""
    letters = "[L, N, T, S], [N, T, S] or [T, S]"
    array = checked_values(name, value, letters, (2, 3, 4)).astype(np.float32)
    if array.min() < 0:
        raise ValueError(
            f"{name}: expected numbers >= 0, got {array.min()}; for a difference give the second "
            f"model's weights as `other`"
        )
    return array.reshape((1,) * (4 - array.ndim) + array.shape)


def _checked_mask(name: str, value: Any, ndim: int) -> Mask:
    """The mask of weights with so many axes."""
    if hasattr(value, "dtype"):
        value = value[None] if ndim == getattr(value, "ndim", None) == 2 else value
        check_array(name, value, "[N, T, S]", "boolean", ndim=3)
    mask = as_mask(value)
    batch, _ = leading(mask)
    if math.prod(batch) > 1:
        raise ValueError(f"{name}: expected the mask of one row, got one of batch {list(batch)}")
    return mask


def described(sentences: Sequence[Sentence], block: Any, blocks: Blocks) -> list[dict[str, Any]]:
    """What the page knows of the sentences; the weights themselves go into the blocks."""
    found = []
    for place, sentence in enumerate(sentences):
        name = checked_title("name", sentence.name)
        parts = attentions(sentence)
        found.append(
            {
                "name": name or f"{place + 1}: {_beginning(parts[0].rows)}",
                "attentions": [_described(part, block, blocks) for part in parts],
            }
        )
    return found


def _beginning(tokens: list[str]) -> str:
    text = visible("".join(tokens[:12]) if any(" " in x for x in tokens) else " ".join(tokens[:12]))
    return text if len(text) <= 48 and len(tokens) <= 12 else f"{text[:47]}…"


def _described(attention: Attention, block: Any, blocks: Blocks) -> dict[str, Any]:
    L, N, T, S = attention.models[0].shape
    return {
        "name": visible(attention.name) if attention.name else "attention",
        "rows": list(map(visible, attention.rows)),
        "columns": list(map(visible, attention.columns)),
        "sizes": [L, N, T, S],
        "causal": T == S and not any(np.triu(model, 1).any() for model in attention.models),
        "heads": [
            [[_head(model[layer, n], blocks) for n in range(N)] for layer in range(L)]
            for model in attention.models
        ],
        "thumbnails": _thumbnails(attention.models, blocks),
        "numbers": [_numbers(model, attention) for model in attention.models],
        "mask": None if attention.mask is None else _mask(attention, block, blocks),
    }


def _head(weights: np.ndarray, blocks: Blocks) -> int:
    scales, numbers = quantised(weights)
    return blocks.add(scales.astype("<f4").tobytes() + numbers.tobytes())


def _numbers(model: np.ndarray, attention: Attention) -> dict[str, list[Any]]:
    """Of each head `[L, N]`; the key before the query only where both axes are the same tokens."""
    found = head_numbers(model)
    if attention.rows != attention.columns:
        del found["previous"]
    return {name: _rounded(values) for name, values in found.items()}


def _rounded(values: np.ndarray) -> list[Any]:
    """Numbers of heads `[L, N]` for JSON, None for NaN."""
    rows = np.where(np.isfinite(values), np.round(values, 6), np.nan).tolist()
    return [[None if math.isnan(x) else x for x in row] for row in rows]


def pooled(weights: np.ndarray, most: int) -> np.ndarray:
    """`[t, s]` with at most so many cells along an axis: of the weights in each the one furthest
    from 0."""
    cuts = [np.linspace(0, size, min(size, most) + 1).astype(int)[:-1] for size in weights.shape]

    def extreme(function: Any) -> np.ndarray:
        return function.reduceat(function.reduceat(weights, cuts[0], axis=0), cuts[1], axis=1)

    greatest, least = extreme(np.maximum), extreme(np.minimum)
    return np.where(-least > greatest, least, greatest)


def _thumbnails(models: tuple[np.ndarray, ...], blocks: Blocks) -> dict[str, Any]:
    """Small pictures of all heads, of each model and of their difference: signed numbers from −127
    to 127, with a scale each."""
    shown = [*models, models[0] - models[1]] if len(models) == 2 else list(models)
    small = np.stack(
        [[[pooled(head, _THUMBNAIL) for head in layer] for layer in model] for model in shown]
    )
    scales = abs(small).max(axis=(-1, -2)) / 127
    numbers = np.rint(small / np.where(scales > 0, scales, 1)[..., None, None]).astype(np.int8)
    return {
        "block": blocks.add(numbers.tobytes()),
        "sizes": list(small.shape[-2:]),
        "scales": np.round(scales, 7).tolist(),
    }


def _mask(attention: Attention, block: Any, blocks: Blocks) -> dict[str, Any]:
    """The mask of each head, or of all, pair by pair and tile by tile."""
    assert attention.mask is not None
    _, N, T, S = attention.models[0].shape
    pair = checked_block("block", block, T, S)
    _, heads = leading(attention.mask)
    if heads not in (0, N):
        raise ValueError(f"mask: expected N = {N} heads as in weights, got {heads}")
    found = []
    for h in range(max(1, heads)):
        kinds = np.asarray(tile_map(attention.mask, T, S, *pair, h=h))
        allowed = dense_mask(attention.mask, T, S, 0, h)
        found.append(
            {
                "allowed": blocks.add(np.packbits(allowed, axis=1).tobytes()),
                "kinds": blocks.add(kinds.astype(np.uint8).tobytes()),
                "tiles": list(kinds.shape),
                "counts": [int((kinds == kind).sum()) for kind in (EMPTY, MIXED, FULL)],
            }
        )
    return {"block": list(pair), "heads": found}
