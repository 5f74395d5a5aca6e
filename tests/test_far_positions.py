"""Positions are any integers of 32 bits; their differences have one bit more."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn import masks, scores
from tests.cases import bucket


LEAST, GREATEST = -(2**31), 2**31 - 1
FAR = np.array([LEAST, LEAST + 1, LEAST + 5, -7, -1, 0, 3, 2**30, GREATEST - 4, GREATEST])
Q, KV = FAR[:, None], FAR[None, :]  # int64: nothing overflows here

RULES = {
    "causal": (masks.Causal(), KV <= Q),
    "window": (masks.Window(left=5, right=4), (Q - 5 <= KV) & (KV <= Q + 4)),
    "window_left": (masks.Window(left=GREATEST), Q - GREATEST <= KV),
    "window_33_bits": (
        masks.Window(left=2**32 - 2, right=2**31),
        (Q - (2**32 - 2) <= KV) & (KV <= Q + 2**31),
    ),
    "window_all": (masks.Window(left=2**32 - 1, right=2**40), KV == KV + 0 * Q),
    "dilated": (masks.Dilated(3), (Q - KV) % 3 == 0),
    "dilated_far": (masks.Dilated(GREATEST), (Q - KV) % GREATEST == 0),
    "dilated_33_bits": (masks.Dilated(2**32 - 1), (Q - KV) % (2**32 - 1) == 0),
    "dilated_never": (masks.Dilated(2**40), Q == KV),
    "global": (masks.Global(4), (Q < 4) | (KV < 4)),
    "prefix": (masks.Prefix(4), KV < 4 + 0 * Q),
}
every_rule = pytest.mark.parametrize("rule", RULES)


def positions(kind: str) -> dict[str, jax.Array]:
    return {name: jnp.asarray(FAR, kind) for name in ("q_positions", "kv_positions")}


@every_rule
def test_masks_are_right_at_all_positions(rule):
    mask, want = RULES[rule]
    got = mask.dense(len(FAR), len(FAR), **positions("int32"))
    np.testing.assert_array_equal(np.broadcast_to(got, want.shape), want)


@pytest.mark.one_in(4)
@every_rule
@pytest.mark.parametrize("known", [True, False], ids=["static", "traced"])
def test_bounds_never_lie_at_any_position(rule, known):
    mask, allowed = RULES[rule]
    for rows, columns in itertools.product([1, 2, 3], repeat=2):
        places: Any = [FAR.astype(np.int32)] * 2
        kinds: Any = lambda q, kv, r=rows, c=columns: masks.tile_map(  # noqa: E731
            mask, len(FAR), len(FAR), r, c, q_positions=q, kv_positions=kv
        )
        tiles = np.asarray(kinds(*places) if known else jax.jit(kinds)(*places))
        for i, j in np.ndindex(*tiles.shape):
            tile = allowed[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
            assert tiles[i, j] != masks.EMPTY or not tile.any(), (rows, columns, i, j)
            assert tiles[i, j] != masks.FULL or tile.all(), (rows, columns, i, j)


def test_alibi_knows_distances_of_33_bits():
    q = jnp.zeros((1, len(FAR), 1, 1))
    slopes = jnp.asarray([2.0**-31])
    got = jattn.attention_scores(q, q, score=scores.Alibi(slopes), **positions("int32"))
    want = -np.abs(Q - KV) * 2.0**-31
    np.testing.assert_array_equal(got[0, 0], want)


@pytest.mark.parametrize("bidirectional", [True, False])
def test_relative_bias_knows_who_is_before_whom(bidirectional):
    q = jnp.zeros((1, len(FAR), 1, 1))
    table = jnp.arange(8.0)[:, None]
    score = scores.RelativeBias(table, bidirectional=bidirectional, max_distance=12)
    got = jattn.attention_scores(q, q, score=score, **positions("int32"))
    find = np.vectorize(lambda d: bucket(int(np.clip(d, -100, 100)), 8, bidirectional, 12))
    np.testing.assert_array_equal(got[0, 0], find(KV - Q))
