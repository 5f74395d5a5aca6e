"""Measures masks and score functions of FlexAttention's users in jattn and in FlexAttention.

    python -m experiments.benchmark --gym
    python -m experiments.benchmark --gym --only tree swin --lengths 2048 4096

One sequence, 8 heads of 64, float32. For each rule of `rules.py` the table has: the share of 128 ×
128 tiles skipped by jattn and by FlexAttention's block mask; jattn's time forward and with all
gradients, including those of operands; jattn's time per tile divided by its time per tile for
`masks.Causal()`; and the time of FlexAttention's compiled forward pass divided by ours, without and
with the time to build its block mask.
"""

import argparse
import importlib
import importlib.util
from typing import Any, NamedTuple

import jax.numpy as jnp
from tqdm import tqdm

import jattn
from experiments.benchmark import peers, timing
from experiments.benchmark.cases import BenchmarkCase
from experiments.benchmark.rules import HEADS, RULES, BenchmarkRule
from experiments.runs.ending import UserError, interruptible
from experiments.runs.files import ResultsFile
from jattn import masks, scores


class GymRow(NamedTuple):
    """The measurements of a rule: milliseconds, shares and ratios; None if FlexAttention cannot
    run it."""

    name: str
    T: int
    runs: str  # the implementation
    skipped: float
    flex_skipped: float | None
    forward: float
    both: float
    over_causal: float  # forward time per tile, divided by that of a causal mask
    both_over_forward: float
    causal_both_over_forward: float
    flex: float | None  # its time divided by ours
    flex_with_mask: float | None
    rounds: int


def inputs_of(rule: BenchmarkRule, T: int) -> BenchmarkCase:
    """Returns the case that has a rule's sizes."""
    return BenchmarkCase(rule.name, 1, HEADS, T, 64)


def in_jattn(rule: BenchmarkRule, T: int) -> Any:
    """Returns a function from operands to the mask and score arguments of `jattn.attention`."""
    function = rule.make(jnp, T)
    if not rule.is_score:
        mask = masks.Predicate(function)
        return lambda *operands: {"mask": mask}
    mask = masks.Causal() if rule.causal else None
    return lambda *operands: {"mask": mask, "score": scores.Score(function, *operands)}


def ours(case: BenchmarkCase, rules: Any, operands: list[Any], backward: bool) -> peers.Runnable:
    """Builds `jattn.attention` with the arguments `rules(*operands)`; jattn chooses the kernel."""

    def attend(q: Any, k: Any, v: Any, *operands: Any) -> Any:
        return jattn.attention(q, k, v, **rules(*operands))

    arguments = [*map(jnp.asarray, case.inputs()), *operands]
    if not backward:
        return peers.compiled(attend, *arguments)
    return peers.with_gradients(case, attend, arguments, tuple(range(len(arguments))))


def measure(rule: BenchmarkRule, T: int, with_torch: bool, seconds: float) -> GymRow:
    """Measures a rule at a length, for about `seconds` in each of two passes."""
    case, rules = inputs_of(rule, T), in_jattn(rule, T)
    operands = [jnp.asarray(x) for x in rule.operands(T)]
    flex: Any = None
    if with_torch:
        flex = importlib.import_module("experiments.benchmark.torch_peers").flex_with(rule, case)

    def competitors(backward: bool) -> dict[str, peers.Runnable]:
        plain = ours(case, lambda: {"mask": masks.Causal()}, [], backward)
        return {"jattn": ours(case, rules, operands, backward), "causal": plain}

    peer = {"flex": flex.runnable} if flex and flex.runnable else {}
    forward, rounds = timing.in_turn(competitors(False) | peer, seconds)
    both, _ = timing.in_turn(competitors(True), seconds)
    explained = jattn.explain(*map(jnp.asarray, case.inputs()), **rules(*operands))
    tiles: Any = explained.tiles  # not None: the mask is known here
    blocks = -(-T // tiles.block)
    visited, causal = (1 - tiles.empty) * blocks**2, blocks * (blocks + 1) / 2
    return GymRow(
        name=rule.name,
        T=T,
        runs=explained.runs,
        skipped=tiles.empty,
        flex_skipped=flex and flex.skipped,
        forward=forward["jattn"],
        both=both["jattn"],
        over_causal=forward["jattn"] / forward["causal"] * causal / visited,
        both_over_forward=both["jattn"] / forward["jattn"],
        causal_both_over_forward=both["causal"] / forward["causal"],
        flex=forward["flex"] / forward["jattn"] if peer else None,
        flex_with_mask=(forward["flex"] + flex.block_mask_milliseconds) / forward["jattn"]
        if peer
        else None,
        rounds=rounds,
    )


_TITLES = (
    f"{'rule':<17} {'T':>5} {'skipped':>7} {'flex':>5} {'ms':>8} {'+ grad':>8} {'/causal':>7} "
    f"{'grad/fwd':>8} {'flex':>6} {'+ mask':>7}"
)


def line(row: GymRow) -> str:
    """Formats a row of the printed table."""
    formatted = lambda x, text: "-" if x is None else format(x, text)  # noqa: E731
    runs = "" if row.runs == "native" else f"  {row.runs}"
    return (
        f"{row.name:<17} {row.T:>5} {row.skipped:>7.1%} {formatted(row.flex_skipped, '.0%'):>5} "
        f"{row.forward:>8.2f} {row.both:>8.2f} {row.over_causal:>7.2f} "
        f"{row.both_over_forward:>8.2f} {formatted(row.flex, '.1f'):>6} "
        f"{formatted(row.flex_with_mask, '.0f'):>7}{runs}"
    )


def _chosen(arguments: argparse.Namespace) -> list[tuple[BenchmarkRule, int]]:
    """Returns the rules to measure, each with a length.

    Raises:
        UserError: no rule has one of the lengths.
    """
    rules = [rule for rule in RULES if not arguments.only or rule.name in arguments.only]
    work = [(rule, T) for rule in rules for T in rule.lengths if T in arguments.lengths]
    if not work:
        lengths = sorted({T for rule in rules for T in rule.lengths})
        raise UserError(f"nothing to measure: the rules have lengths of {str(lengths)[1:-1]}")
    return work


def measure_all(arguments: argparse.Namespace) -> None:
    """Runs the measurements, prints a table and writes JSON lines."""
    with_torch = arguments.peers is None or "torch flex" in arguments.peers
    with_torch = with_torch and importlib.util.find_spec("torch") is not None
    work = _chosen(arguments)
    results = ResultsFile(arguments.out / "gym.jsonl")
    print(_TITLES, flush=True)
    for rule, T in interruptible(tqdm(work, disable=None, leave=False)):
        row = measure(rule, T, with_torch, arguments.seconds)
        results.add(row._asdict())
        tqdm.write(line(row))
    print(f"results: {results.path}")
