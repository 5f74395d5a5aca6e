"""Error messages for functions that were pasted with `jnp` in place of `torch`, or that return
wrong values."""

import functools
import math
import re
import traceback
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn import _torch_names, masks, scores


Q = jnp.ones((1, 8, 2, 4), jnp.float32)
TABLE = jnp.arange(8.0, dtype=jnp.float32)
LENGTHS = np.arange(8)
theirs: Any = jnp  # what stands in place of torch


def score_of(change: Callable[..., Any]) -> Callable[..., Any]:
    def pasted(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + change(q_idx, kv_idx)

    return pasted


PASTED: dict[str, tuple[Callable[[Any, Any], Any], type, str]] = {
    "clamp": (lambda q, k: (q - k).clamp(0, 3), AttributeError, "jnp.clip(x, min, max)"),
    "clamp_": (lambda q, k: (q - k).clamp_(0, 3), AttributeError, "x = jnp.clip(x, min, max)"),
    "clamp_min": (lambda q, k: (q - k).clamp_min(0), AttributeError, "jnp.maximum(x, min)"),
    "float": (lambda q, k: (q - k).float(), AttributeError, "x.astype(jnp.float32)"),
    "bool": (lambda q, k: (q - k).bool(), AttributeError, "x.astype(bool)"),
    "int": (lambda q, k: (q - k).int(), AttributeError, "x.astype(jnp.int32)"),
    "to": (lambda q, k: (q - k).to(jnp.float32), AttributeError, "x.astype(dtype)"),
    "abs": (lambda q, k: (q - k).abs(), AttributeError, "jnp.abs(x, ...)"),
    "abs_": (lambda q, k: (q - k).abs_(), AttributeError, "x = jnp.abs(x, ...)"),
    "sigmoid": (lambda q, k: theirs.asarray(q).sigmoid(), AttributeError, "jax.nn.sigmoid(x, ...)"),
    "masked_fill": (
        lambda q, k: theirs.asarray(q).masked_fill(q < k, 0),
        AttributeError,
        "jnp.where(mask, value, x)",
    ),
    "array": (lambda q, k: TABLE.long()[q], AttributeError, "x.astype(jnp.int32)"),  # pyright: ignore[reportAttributeAccessIssue]
    "of NumPy": (lambda q, k: LENGTHS.float(), AttributeError, "x.astype(jnp.float32)"),  # pyright: ignore[reportAttributeAccessIssue]
    "jnp.clamp": (lambda q, k: theirs.clamp(q - k, 0, 3), AttributeError, "jnp.clip("),
    "jnp.repeat": (
        lambda q, k: theirs.repeat_interleave(TABLE, 2)[q],
        AttributeError,
        "jnp.repeat(x, repeats)",
    ),
    "jnp.and_masks": (lambda q, k: theirs.and_masks(q, k)(q), AttributeError, "& g(b, h"),
    "jnp.long": (lambda q, k: q.astype(theirs.long), AttributeError, "write jnp.int32"),
    "jnp.erf": (lambda q, k: theirs.erf(TABLE[q]), AttributeError, "jax.lax.erf(x, ...)"),
    "torch": (lambda q, k: torch.where(q > k, 0, 1), NameError, "jnp in its place"),  # noqa: F821 # pyright: ignore[reportUndefinedVariable]
    "and_masks": (lambda q, k: and_masks(q, k)(q), NameError, "& g(b, h"),  # noqa: F821 # pyright: ignore[reportUndefinedVariable]
    "size": (lambda q, k: TABLE.size(0), TypeError, "x.shape[axis]"),  # pyright: ignore[reportCallIssue]
    "int()": (lambda q, k: int(q), TypeError, "int(), float(), .item()"),
    "item": (lambda q, k: q.item(), TypeError, "int(), float(), .item()"),
    "math": (lambda q, k: math.exp(q), TypeError, "the functions of jax.numpy"),
}


@pytest.mark.parametrize("name", PASTED)
def test_what_torch_has_and_jax_has_not(name):
    change, kind, advice = PASTED[name]
    for run in (attend, in_jit, with_gradients):
        with pytest.raises(kind) as raised:
            run(score=score_of(change))
        said = [str(raised.value), *getattr(raised.value, "__notes__", [])]
        notes = [x for x in said if x.startswith("score: ")]
        assert len(notes) == 1
        assert advice in notes[0]
        assert "pasted" in notes[0]


def attend(**rules: Any) -> Any:
    return jattn.attention(Q, Q, Q, **rules)


def in_jit(**rules: Any) -> Any:
    return jax.jit(lambda q: jattn.attention(q, q, q, **rules))(Q)


def with_gradients(**rules: Any) -> Any:
    return jax.grad(lambda q: jattn.attention(q, q, q, **rules).sum())(Q)


def test_masks_say_it_too():
    def pasted(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx - kv_idx).clamp(0, 3) > 1

    for run in (
        lambda: attend(mask=pasted),
        lambda: attend(mask=masks.Causal() & pasted),
        lambda: masks.Predicate(pasted).dense(8, 8),
        lambda: masks.tile_map(masks.Predicate(pasted), 8, 8, 4, 4),
        lambda: jattn.explain(Q, Q, Q, mask=pasted).tiles,
    ):
        with pytest.raises(AttributeError) as raised:
            run()
        assert any("mask: in pasted, write jnp.clip" in x for x in raised.value.__notes__)


def test_other_errors_are_the_user_s():
    def missing(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return {}["slope"]

    def misspelt(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score.astyp(jnp.float32)

    for function, kind in ((missing, KeyError), (misspelt, AttributeError)):
        with pytest.raises(kind) as raised:
            attend(score=function)
        frames = traceback.extract_tb(raised.value.__traceback__)
        assert function.__name__ in [frame.name for frame in frames]
        assert not any("write" in x for x in getattr(raised.value, "__notes__", []))


def test_what_is_advised_exists():
    for line in [*_torch_names._WRITE.values(), *_torch_names._DTYPES.values()]:
        for path in re.findall(r"\b((?:jnp|jax)(?:\.\w+)+)", line):
            place: Any = {"jnp": jnp, "jax": jax}[path.split(".")[0]]
            assert functools.reduce(getattr, path.split(".")[1:], place) is not None
    for name in _torch_names._WRITE.keys() - {"dim", "size"}:
        assert not hasattr(Q, name), name


RETURNED: dict[str, tuple[Any, str, str]] = {
    "nothing": (None, "got None; end the function", "got None; end the function"),
    "a tuple": ((1.0, 2.0), "got tuple", "got tuple"),
    "a list": ([True], "got list", "got list"),
    "a string": ("score", "got str", "got str"),
    "a function": (len, "got builtin_function_or_method", "got builtin_function_or_method"),
    "a mask": (masks.Causal(), "got Causal", "got Causal"),
    "a row": (TABLE, r"got float32 \[8\]; index arrays", r"got float32 \[8\]; index arrays"),
    "truth": (True, "got bool .*as mask=", ""),
    "a float": (1.5, "", "got float.*as score="),
    "an integer": (1, "got int.*astype", "got int.*!= 0"),
    "a complex number": (1j, "got complex", "got complex"),
}


@pytest.mark.parametrize("name", RETURNED)
def test_what_functions_return(name):
    value, of_score, of_mask = RETURNED[name]

    def alibi(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return value

    def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return value

    for rules, message in (
        ({"score": alibi}, of_score and f"alibi must return a float scalar, {of_score}"),
        ({"score": functools.partial(alibi)}, of_score and "alibi must return"),
        ({"score": scores.SoftCap(2.0) >> alibi}, of_score and "alibi must return"),
        ({"mask": causal}, of_mask and f"causal must return a boolean scalar, .*{of_mask}"),
        ({"mask": ~masks.Predicate(causal)}, of_mask and "causal must return"),
    ):
        if not message:
            attend(**rules)
            continue
        with pytest.raises(TypeError, match=message):
            attend(**rules)
