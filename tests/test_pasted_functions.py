"""Errors of functions pasted with `jnp` in place of `torch`, or that return wrong values."""

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


PASTED: dict[type, dict[str, Callable[[Any, Any], Any]]] = {  # by the error and the advice
    AttributeError: {
        "jnp.clip(x, min, max)": lambda q, k: (q - k).clamp(0, 3),
        "x = jnp.clip(x, min, max)": lambda q, k: (q - k).clamp_(0, 3),
        "x.astype(jnp.float32)": lambda q, k: (q - k).float(),
        "x.astype(dtype)": lambda q, k: (q - k).to(jnp.float32),
        "jnp.abs(x, ...)": lambda q, k: (q - k).abs(),
        "x = jnp.abs(x, ...)": lambda q, k: (q - k).abs_(),
        "jax.nn.sigmoid(x, ...)": lambda q, k: theirs.asarray(q).sigmoid(),
        "jnp.where(mask, value, x)": lambda q, k: theirs.asarray(q).masked_fill(q < k, 0),
        "x.astype(jnp.int32": lambda q, k: TABLE.long()[q],  # pyright: ignore[reportAttributeAccessIssue]
        "x.astype(jnp.float32": lambda q, k: LENGTHS.float(),  # pyright: ignore[reportAttributeAccessIssue]
        "jnp.clip(": lambda q, k: theirs.clamp(q - k, 0, 3),
        "jnp.repeat(x, repeats)": lambda q, k: theirs.repeat_interleave(TABLE, 2)[q],
        "& g(b, h": lambda q, k: theirs.and_masks(q, k)(q),
        "write jnp.int32": lambda q, k: q.astype(theirs.long),
        "jax.lax.erf(x, ...)": lambda q, k: theirs.erf(TABLE[q]),
    },
    NameError: {
        "jnp in its place": lambda q, k: torch.where(q > k, 0, 1),  # noqa: F821 # pyright: ignore[reportUndefinedVariable]
        "& g(b, h": lambda q, k: and_masks(q, k)(q),  # noqa: F821 # pyright: ignore[reportUndefinedVariable]
    },
    TypeError: {
        "x.shape[axis]": lambda q, k: TABLE.size(0),  # pyright: ignore[reportCallIssue]
        "int(), float(), .item()": lambda q, k: int(q),
        "int(), float(), .item(": lambda q, k: q.item(),
        "the functions of jax.numpy": lambda q, k: math.exp(q),
    },
}


@pytest.mark.parametrize(
    ("kind", "advice"), [(kind, advice) for kind in PASTED for advice in PASTED[kind]]
)
def test_what_torch_has_and_jax_has_not(kind, advice):
    for run in (attend, in_jit, with_gradients):
        with pytest.raises(kind) as raised:
            run(score=score_of(PASTED[kind][advice]))
        said = [str(raised.value), *getattr(raised.value, "__notes__", [])]
        (note,) = (x for x in said if x.startswith("score: "))
        assert advice in note and "pasted" in note


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


RETURNED: list[tuple[Any, str, str]] = [
    *(
        (value, message, message)
        for value, message in (
            (None, "got None; end the function"),
            ((1.0, 2.0), "got tuple"),
            ([True], "got list"),
            ("score", "got str"),
            (len, "got builtin_function_or_method"),
            (masks.Causal(), "got Causal"),
            (TABLE, r"got float32 \[8\]; index arrays"),
            (1j, "got complex"),
        )
    ),
    (True, "got bool .*as mask=", ""),
    (1.5, "", "got float.*as score="),
    (1, "got int.*astype", "got int.*!= 0"),
]


@pytest.mark.parametrize(("value", "of_score", "of_mask"), RETURNED)
def test_what_functions_return(value, of_score, of_mask):
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
