"""The data of a viewer's page, as JSON and blocks of bytes.

A head's weights are stored in bytes: T scales in float32, then T × S numbers from 0 to 255. A
weight is its number times the scale of its row, which is the row's greatest weight divided by 255.
So the error of a weight is at most 1/510 of the greatest weight in its row, also in rows with
thousands of small weights. Queries and keys are stored likewise, T × H numbers of two bytes. Blocks
are compressed, and the page decompresses a block when it first shows it.
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
from jattn.viz.head_numbers import clearest_head, head_numbers
from jattn.viz.inputs import checked_title, checked_tokens, checked_values, visible


__all__ = ["Sentence"]


_THUMBNAIL = 48  # cells along an axis of a head's thumbnail


@dataclass(frozen=True)
class Sentence:
    """A sentence in a viewer: its attention weights and tokens.

    For several attentions, each field but `name` can be a mapping from the names of the attentions,
    such as `"encoder"`, `"decoder"` and `"cross"`, to their values.

    Attributes:
        weights: `[L, N, T, S]`, or `[N, T, S]` or `[T, S]`, finite and at least 0.
        tokens: T strings, the queries; None: numbers from 1.
        kv_tokens: S strings, the keys; None: the same as the queries, or numbers where these are.
        mask: the mask to draw over the weights: a mask of `jattn.masks` with batch axes of size 1
            at most, or a boolean array `[N, T, S]`, or `[T, S]` for weights `[T, S]`.
        other: weights of a second model, of the same shapes, to show the difference.
        name: the sentence's label; by default its first words.
        query: `[L, T, N, H]`, or `[T, N, H]` or `[T, H]` for weights with fewer axes: the queries
            from which the weights were computed, to show their products with the keys.
        key: `[L, S, K, H]`, or `[S, K, H]` or `[S, H]`: the keys, where K divides N.

    >>> sentence = jattn.viz.Sentence(jnp.eye(2), ["good", "day"], ["guten", "Tag"])
    >>> page = jattn.viz.viewer([sentence])
    """

    weights: Any
    tokens: Any = None
    kv_tokens: Any = None
    mask: Any = None
    other: Any = None
    name: str | None = None
    query: Any = None
    key: Any = None


@dataclass(frozen=True)
class Attention:
    """The checked weights and tokens of one attention of a sentence."""

    name: str
    models: tuple[np.ndarray, ...]  # weights `[L, N, T, S]` of one model, or of two
    rows: list[str]  # the tokens of the queries
    columns: list[str]  # the tokens of the keys
    mask: Mask | None
    vectors: tuple[np.ndarray, np.ndarray] | None  # `[L, T, N, H]` and `[L, S, K, H]`


class Blocks(list[str]):
    """Blocks of bytes, compressed and in base64; the page refers to a block by its index."""

    def add(self, content: bytes) -> int:
        """Appends a block, and returns its index."""
        self.append(base64.b64encode(zlib.compress(content, 6)).decode("ascii"))
        return len(self) - 1


def quantised(array: np.ndarray, dtype: str) -> bytes:
    """Returns an array `[T, S]` as scales `[T]` in float32 and numbers `[T, S]` of an integer type;
    a value is its number times the scale of its row."""
    limits = np.iinfo(dtype)
    scales = (abs(array).max(axis=1) / limits.max).astype("<f4")
    numbers = np.rint(array / np.where(scales > 0, scales, 1)[:, None])
    return scales.tobytes() + np.clip(numbers, limits.min, limits.max).astype(dtype).tobytes()


def attentions(sentence: Sentence) -> list[Attention]:
    """Returns the checked attentions of a sentence, in the order of `sentence.weights`."""
    if not isinstance(sentence.weights, Mapping):
        return [_attention("", sentence, {})]
    if not sentence.weights:
        raise ValueError("weights: expected at least one attention, got an empty mapping")
    for field in ("tokens", "kv_tokens", "mask", "other", "query", "key"):
        value = getattr(sentence, field)
        names = value if isinstance(value, Mapping) else ()
        unknown = [x for x in names if x not in sentence.weights]
        if unknown:
            raise ValueError(
                f"{field}: expected names of weights, {list(sentence.weights)}, got {unknown[0]!r}"
            )
    return [_attention(name, sentence, {"name": name}) for name in sentence.weights]


def _attention(name: Any, sentence: Sentence, named: dict[str, Any]) -> Attention:
    """Returns the checked attention called `name`, or the only one if `named` is empty."""
    if not isinstance(name, str):
        raise TypeError(f"weights: expected strings as names, got {shown(name)}")
    suffix = f"[{name!r}]" if named else ""

    def field_value(field: str) -> Any:
        value = getattr(sentence, field)
        return value.get(name) if isinstance(value, Mapping) else value

    weights = _checked_weights(f"weights{suffix}", field_value("weights"))
    models = [weights]
    if sentence.other is not None:
        if field_value("other") is None:
            raise ValueError(f"other: expected weights of {name!r} too, got none")
        models.append(_checked_weights(f"other{suffix}", field_value("other")))
        if models[1].shape != weights.shape:
            raise ValueError(
                f"other{suffix}: expected the shape of weights, {list(weights.shape)}, "
                f"got {list(models[1].shape)}"
            )
    T, S = weights.shape[-2:]
    rows = checked_tokens(f"tokens{suffix}", field_value("tokens"), T, "T")
    columns = checked_tokens(f"kv_tokens{suffix}", field_value("kv_tokens"), S, "S")
    if columns is None and rows is not None and T != S:
        raise ValueError(f"kv_tokens{suffix}: expected S = {S} tokens, as T is {T}, got None")
    numbers = [str(number + 1) for number in range(max(T, S))]
    columns = columns or rows or numbers[:S]
    mask, ndim = field_value("mask"), field_value("weights").ndim
    if mask is not None:
        mask = _checked_mask(f"mask{suffix}", mask, ndim)
    vectors = _checked_vectors(suffix, field_value("query"), field_value("key"), weights, ndim)
    return Attention(name, tuple(models), rows or numbers[:T], columns, mask, vectors)


def _checked_vectors(
    suffix: str, query: Any, key: Any, weights: np.ndarray, ndim: int
) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns queries `[L, T, N, H]` and keys `[L, S, K, H]` for weights `[L, N, T, S]` that were
    passed with `ndim` axes, or None if neither is given."""
    L, N, T, S = weights.shape
    names, letters = (f"query{suffix}", f"key{suffix}"), ("[L, T, N, H]", "[L, S, K, H]")
    arrays: list[np.ndarray] = []
    for name, value, axes in zip(names, (query, key), letters, strict=True):
        if value is None:
            if query is key:
                return None
            raise ValueError(f"{name}: expected {axes} too, as the other is given, got None")
        array = checked_values(name, value, f"{axes}, like the axes of weights,", (ndim,))
        shape = {2: (1, *array.shape[:1], 1, *array.shape[1:]), 3: (1, *array.shape)}
        arrays.append(array.reshape(shape.get(ndim, array.shape)))
    q, k = arrays
    if q.shape[:3] != (L, T, N):
        raise ValueError(f"{names[0]}: expected L, T, N = {L}, {T}, {N}, got {list(q.shape)}")
    if k.shape[:2] != (L, S) or N % k.shape[2] or k.shape[3] != q.shape[3]:
        raise ValueError(
            f"{names[1]}: expected L, S, H = {L}, {S}, {q.shape[3]} and K heads that divide "
            f"N = {N}, got {list(k.shape)}"
        )
    return q, k


def _checked_weights(name: str, value: Any) -> np.ndarray:
    """Returns checked weights as float32 `[L, N, T, S]`."""
    letters = "[L, N, T, S], [N, T, S] or [T, S]"
    array = checked_values(name, value, letters, (2, 3, 4)).astype(np.float32)
    if array.min() < 0:
        raise ValueError(
            f"{name}: expected numbers >= 0, got {array.min()}; for a difference give the second "
            f"model's weights as `other`"
        )
    return array.reshape((1,) * (4 - array.ndim) + array.shape)


def _checked_mask(name: str, value: Any, ndim: int) -> Mask:
    """Returns the mask for weights with `ndim` axes."""
    if hasattr(value, "dtype"):
        value = value[None] if ndim == getattr(value, "ndim", None) == 2 else value
        check_array(name, value, "[N, T, S]", "boolean", ndim=3)
    mask = as_mask(value)
    batch, _ = leading(mask)
    if math.prod(batch) > 1:
        raise ValueError(f"{name}: expected the mask of one row, got one of batch {list(batch)}")
    return mask


def described(sentences: Sequence[Sentence], block: Any, blocks: Blocks) -> list[dict[str, Any]]:
    """Describes the sentences for the page's JSON, and adds their weights to `blocks`."""
    descriptions = []
    for index, sentence in enumerate(sentences):
        name = checked_title("name", sentence.name)
        checked = attentions(sentence)
        descriptions.append(
            {
                "name": name or f"{index + 1}: {_beginning(checked[0].rows)}",
                "attentions": [_described(attention, block, blocks) for attention in checked],
            }
        )
    return descriptions


def _beginning(tokens: list[str]) -> str:
    text = visible("".join(tokens[:12]) if any(" " in x for x in tokens) else " ".join(tokens[:12]))
    return text if len(text) <= 48 and len(tokens) <= 12 else f"{text[:47]}…"


def _described(attention: Attention, block: Any, blocks: Blocks) -> dict[str, Any]:
    T, S = attention.models[0].shape[-2:]
    return {
        "name": visible(attention.name) if attention.name else "attention",
        "rows": list(map(visible, attention.rows)),
        "columns": list(map(visible, attention.columns)),
        "sizes": list(attention.models[0].shape),
        "causal": T == S and not any(np.triu(model, 1).any() for model in attention.models),
        "cross": attention.rows != attention.columns,
        "clearest": clearest_head(attention.models[0]),
        "heads": [_stored(model, "u1", blocks) for model in attention.models],
        "vectors": attention.vectors
        and [_stored(x.swapaxes(1, 2), "<i2", blocks) for x in attention.vectors],
        "thumbnails": _thumbnails(attention.models, blocks),
        "numbers": [_numbers(model, attention) for model in attention.models],
        "mask": None if attention.mask is None else _mask(attention, block, blocks),
    }


def _stored(heads: np.ndarray, dtype: str, blocks: Blocks) -> list[list[int]]:
    """Adds each head of `[L, N, ...]` to `blocks`, and returns the indices of the blocks."""
    return [[blocks.add(quantised(head, dtype)) for head in layer] for layer in heads]


def _numbers(model: np.ndarray, attention: Attention) -> dict[str, list[Any]]:
    """Computes the statistics of each head; `previous` only if both axes have the same tokens."""
    statistics = head_numbers(model)
    if attention.rows != attention.columns:
        del statistics["previous"]
    return {
        name: [
            [x if math.isfinite(x) else None for x in row] for row in np.round(values, 6).tolist()
        ]
        for name, values in statistics.items()
    }


def pooled(weights: np.ndarray, most: int) -> np.ndarray:
    """Pools `[T, S]` to at most `most` cells along an axis, each the value furthest from 0."""
    cuts = [np.linspace(0, size, min(size, most) + 1).astype(int)[:-1] for size in weights.shape]

    def extreme(function: Any) -> np.ndarray:
        return function.reduceat(function.reduceat(weights, cuts[0], axis=0), cuts[1], axis=1)

    greatest, least = extreme(np.maximum), extreme(np.minimum)
    return np.where(-least > greatest, least, greatest)


def _thumbnails(models: tuple[np.ndarray, ...], blocks: Blocks) -> dict[str, Any]:
    """Makes thumbnails of all heads, for each model and for the difference of two models: numbers
    from −127 to 127, and a scale for each head."""
    matrices = [*models, models[0] - models[1]] if len(models) == 2 else list(models)
    small = np.stack(
        [[[pooled(head, _THUMBNAIL) for head in layer] for layer in model] for model in matrices]
    )
    scales = abs(small).max(axis=(-1, -2)) / 127
    numbers = np.rint(small / np.where(scales > 0, scales, 1)[..., None, None]).astype(np.int8)
    return {
        "block": blocks.add(numbers.tobytes()),
        "sizes": list(small.shape[-2:]),
        "scales": np.round(scales, 7).tolist(),
    }


def _mask(attention: Attention, block: Any, blocks: Blocks) -> dict[str, Any]:
    """Describes the mask of each head, or of all heads, by pairs and by tiles."""
    assert attention.mask is not None
    _, N, T, S = attention.models[0].shape
    tile = checked_block("block", block, T, S)
    _, heads = leading(attention.mask)
    if heads not in (0, N):
        raise ValueError(f"mask: expected N = {N} heads as in weights, got {heads}")
    masks = []
    for h in range(max(1, heads)):
        kinds = np.asarray(tile_map(attention.mask, T, S, *tile, h=h))
        allowed = dense_mask(attention.mask, T, S, 0, h)
        masks.append(
            {
                "allowed": blocks.add(np.packbits(allowed, axis=1).tobytes()),
                "kinds": blocks.add(kinds.astype(np.uint8).tobytes()),
                "tiles": list(kinds.shape),
                "counts": [int((kinds == kind).sum()) for kind in (EMPTY, MIXED, FULL)],
            }
        )
    return {"block": list(tile), "heads": masks}
