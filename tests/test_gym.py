"""FlexAttention's masks and scores, as its users write them, in jattn."""

import dataclasses
import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from experiments.benchmark import __main__ as benchmark
from experiments.benchmark import gym
from experiments.benchmark.rules import HEADS, RULES, BenchmarkRule
from jattn import masks, tuning
from jattn.masks import Predicate
from jattn.scores import Score
from tests.conftest import quick_jit, users_jit
from tests.test_masks import true_kinds


BY_NAME = {rule.name: rule for rule in RULES}
MASKS = [rule.name for rule in RULES if not rule.is_score]
T = 400  # 20 × 20


def in_numpy(rule: BenchmarkRule, T: int, h: int = 0, score: Any = None) -> np.ndarray:
    """Evaluates a rule for each pair by NumPy, `[T, T]`."""
    q, kv = np.arange(T, dtype=np.int32)[:, None], np.arange(T, dtype=np.int32)[None, :]
    scores = () if score is None else (score,)
    operands = rule.operands(T) if rule.is_score else ()
    result = rule.make(np, T)(*scores, 0, h, q, kv, *operands)
    return np.broadcast_to(result, (T, T))


def in_jattn(rule: BenchmarkRule, T: int, *operands: Any) -> dict[str, Any]:
    function = rule.make(jnp, T)
    if not rule.is_score:
        return {"mask": Predicate(function)}
    return {"score": Score(function, *operands), "mask": masks.Causal() if rule.causal else None}


@pytest.mark.parametrize("name", BY_NAME)
def test_rules_mean_the_same_in_jax(name):
    rule = BY_NAME[name]
    score = np.random.default_rng(0).normal(size=(T, T)).astype(np.float32) * 4
    scores = (score,) if rule.is_score else ()
    function = rule.make(jnp, T)

    q, kv = np.ix_(*[np.arange(T, dtype=np.int32)] * 2)
    every = quick_jit(lambda *operands: function(*scores, 0, 1, q, kv, *operands))
    want = in_numpy(rule, T, 1, *scores)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        got = jnp.broadcast_to(every(*map(jnp.asarray, rule.operands(T))), (T, T))
    assert got.dtype == (np.float32 if rule.is_score else np.bool_)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    assert rule.is_score or 0 < np.mean(want) < 1


@pytest.mark.parametrize("block", [64, 100])
@pytest.mark.parametrize("name", MASKS)
def test_tiles_are_as_exact_as_if_each_pair_were_evaluated(name, block):
    rule = BY_NAME[name]
    with tuning.using(min_exact_pairs=0, max_exact_pairs=2**26):
        tiles = masks.tile_map(in_jattn(rule, T)["mask"], T, T, block, block)
    np.testing.assert_array_equal(tiles, true_kinds(in_numpy(rule, T), block, block))


@pytest.mark.parametrize("name", MASKS)
def test_as_many_tiles_are_skipped_as_by_a_block_mask(name):
    """The sizes are those of users. Bounds alone skip as many, except where sequences meet."""
    rule, size, block = BY_NAME[name], 1024, 64
    mask = in_jattn(rule, size)["mask"]
    empty = true_kinds(in_numpy(rule, size), block, block) == masks.EMPTY
    assert np.mean(empty) > 0.4
    tiles = masks.tile_map(mask, size, size, block, block)
    np.testing.assert_array_equal(tiles == masks.EMPTY, empty)
    with tuning.using(min_exact_pairs=2**62, max_exact_pairs=0):
        by_bounds = masks.tile_map(mask, size, size, block, block) == masks.EMPTY
    assert np.array_equal(by_bounds, empty) or (name == "jagged" and not np.any(by_bounds & ~empty))


def formula(q: Any, k: Any, v: Any, rule: BenchmarkRule) -> np.ndarray:
    heads = []
    for h in range(q.shape[1]):
        score = q[:, h] @ k[:, h].T / math.sqrt(q.shape[2])
        if rule.is_score:
            score = in_numpy(rule, len(q), h, score)
        allowed = in_numpy(BY_NAME["causal"] if rule.is_score else rule, len(q))
        if not rule.is_score or rule.causal:
            score = np.where(allowed, score, -np.inf)
        weights = np.exp(score - score.max(axis=1, keepdims=True))
        heads.append(weights / weights.sum(axis=1, keepdims=True) @ v[:, h])
    return np.stack(heads, axis=1)


@pytest.mark.one_in(12)
@pytest.mark.parametrize("name", BY_NAME)
def test_attention_is_the_formula(name):
    rule = BY_NAME[name]
    q, k, v = 2 * np.random.default_rng(0).normal(size=(3, T, HEADS, 8))

    def attend(*operands: Any) -> Any:
        rules = in_jattn(rule, T, *operands)
        arrays = (jnp.asarray(x, jnp.float32)[None] for x in (q, k, v))
        return jattn.attention(*arrays, **rules)[0]

    with jax.numpy_dtype_promotion("standard"):
        got = users_jit(attend)(*map(jnp.asarray, rule.operands(T)))
    np.testing.assert_allclose(got, formula(q, k, v, rule), atol=2e-4)


@pytest.mark.slow
def test_the_command_writes_what_it_measured(tmp_path, monkeypatch, capsys):
    rule = BY_NAME["tree"]
    short = dataclasses.replace(rule, lengths=(256, 512))
    monkeypatch.setattr(gym, "RULES", (BY_NAME["causal"], short))
    options = ["--only", "tree", "--lengths", "256", "--seconds", "0", "--out", str(tmp_path)]
    assert benchmark.main(["--gym", "--peers", *options]) == 0
    (row,) = map(json.loads, (tmp_path / "gym.jsonl").read_text().splitlines())
    assert (row["name"], row["T"], row["flex"]) == ("tree", 256, None)
    assert row["skipped"] == np.mean(true_kinds(in_numpy(rule, 256), 128, 128) == masks.EMPTY)
    assert row["both_over_forward"] == pytest.approx(row["both"] / row["forward"])
    assert capsys.readouterr().out.splitlines()[1].split()[:2] == ["tree", "256"]
