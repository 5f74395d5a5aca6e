"""Formulas for memory and exchanges of attention over several devices, and compiled programs."""

import functools
import json
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from experiments.offline import targets
from experiments.runs.ending import Failure
from experiments.scaling import __main__ as scaling
from experiments.scaling import plan, programs
from experiments.scaling.cases import SCHEMES, ScalingCase
from jattn import masks, parallel, scores, tuning
from tests.commands import environment, run_python
from tests.conftest import quick_jit
from tests.devices import mesh_of
from tests.test_translation import assert_refused


DEVICES, T, N, K, H, V = 4, 64, 8, 2, 6, 3
TOKENS = P(None, "x")
QKV = [jax.ShapeDtypeStruct((2, T, *x), jnp.float32) for x in ((N, H), (K, H), (K, V))]


def compiled(options: dict[str, Any], arguments: Any, backward: bool = False) -> str:
    """A program of attention within a window, and with the segments and bias after the values."""
    mesh, specs = mesh_of(x=DEVICES), (*[TOKENS] * 5, P())[: len(arguments)]

    def run(query: Any, key: Any, value: Any, *rest: Any) -> Any:
        options_of_call = rules(options, *rest)
        return parallel.attention(query, key, value, mesh=mesh, axis_name="x", **options_of_call)

    learned = tuple(n for n in range(len(arguments)) if n not in (3, 4))
    function = jax.grad(lambda *x: jnp.sum(run(*x) ** 2), learned) if backward else run
    shardings = tuple(jax.NamedSharding(mesh, x) for x in specs)
    return quick_jit(function, in_shardings=shardings).lower(*arguments).compile().as_text()


def rules(options: dict[str, Any], *arrays: Any) -> dict[str, Any]:
    window = masks.Causal() & masks.Window(left=20)
    if not arrays:
        return {"mask": window, **options}
    *ids, bias = arrays
    return {"mask": window & masks.Segments(*ids), "score": scores.Bias(bias), **options}


# Neighbours differ in both, so that every fourth combination has each scheme and each order.
WAYS = [("ring", "contiguous"), ("all_to_all", "zigzag"), ("gather", "zigzag"), ("ring", "zigzag")]
WAYS += [("all_to_all", "contiguous"), ("gather", "contiguous")]


@pytest.mark.one_in(8)
@pytest.mark.parametrize("with_arrays", [False, True])
@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.parametrize(("scheme", "order"), WAYS)
def test_the_formula_is_what_a_program_sends(scheme, order, backward, with_arrays):
    """Each key head goes round by itself in zig-zag order, in quarters of a shard's keys."""
    least = 1 if order == "zigzag" else 2**14
    row = tuning.sizes("cpu")._replace(ring_queries=least, ring_keys=least)
    ids, options = np.zeros((2, T), np.int32), {"scheme": scheme, "order": order}
    arrays = (ids, ids + 1, jnp.zeros((1, N, T, T))) if with_arrays else ()
    with tuning.using(row=row, ring_rounds=1):
        text = compiled(options, (*QKV, *arrays), backward)
        planned: Any = parallel.exchanges(*QKV, devices=DEVICES, **rules(options, *arrays))
    sent = programs.total(x for x in programs.exchanges(text) if x.kind != "all-reduce")
    forward = [x for x in planned if not x.backward]
    expected = programs.total(planned if backward else forward)
    # Outside of loops both passes send the same arrays, and all rounds send the arrays that heads
    # share; some XLA versions merge equal exchanges on CPUs.
    merged = [x._replace(times=x.times if x.times <= 2 else 1) for x in forward]
    shared = programs.total(merged if backward and scheme == "ring" else ())
    assert sent.keys() == expected.keys()
    for each, times in expected.items():
        assert sent[each] in (times, times - shared[each]), each


def test_numbers_of_16_bits_go_round_as_such():
    arrays = [jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for x in QKV]
    planned: Any = parallel.exchanges(*arrays, devices=DEVICES, **rules({}))
    expected = programs.total(x for x in planned if not x.backward)
    assert programs.total(programs.exchanges(compiled({}, arrays))) == expected


def test_loops_count_as_often_as_they_run():
    """Programs as XLA prints them, with loops, asynchronous exchanges, and groups of a mesh."""
    text = """HloModule m
%inside (x: bf16[8]) -> bf16[8] {
  %s.1 = (bf16[8]{0}, bf16[8]{0}, u32[], u32[]) collective-permute-start(%x), pairs={{0,1},{1,0}}
  %f = bf16[8]{0} fusion(%x), kind=kLoop, calls=%fused
  ROOT %d = bf16[8]{0} collective-permute-done(%s.1)
}
%below (x: s32[]) -> pred[] {
  %c.4 = s32[]{:T(128)} constant(5)
  ROOT %lt = pred[]{:T(512)} compare(%x, %c.4), direction=LT
}
%waiting (x: f16[8]) -> f16[8] {
  %s.2 = ((f16[8]{0}), f16[8]{0}) collective-permute-start(%x), pairs={{0,1},{1,0}}
  ROOT %d = f16[8]{0} collective-permute-done(%s.2)
}
ENTRY %main (a: bf16[8]) -> bf16[8] {
  %w = bf16[8] while(%a), condition=%c, body=%inside, config={"known_trip_count":{"n":"7"}}
  %v = f16[8] while(%a), condition=%below, body=%waiting
  %g = f32[4,6]{1,0} all-gather(%a), replica_groups=[1,4]<=[4], dimensions={0}
  %h = f32[4,6]{1,0} all-gather(%a), replica_groups=mesh['x'=1,'y'=4] {'y'}, dimensions={0}
  %r = f32[6]{0} reduce-scatter(%a), replica_groups={{0,1,2,3}}, to_apply=%add
}
"""
    exchanges = programs.exchanges(text)
    permute = functools.partial(programs.CompiledExchange, "collective-permute", 16)
    assert exchanges[:2] == [permute(7, True), permute(5, False)]
    expected = {("collective-permute", 16): 12, ("all-gather", 72): 2, ("reduce-scatter", 72): 1}
    assert programs.total(exchanges) == expected


@pytest.mark.one_in(6)
@pytest.mark.default_tiles
@pytest.mark.parametrize("key_heads", [8, 2])
@pytest.mark.parametrize("devices", [8, 2])
@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_planned_memory_is_that_of_programs(scheme, backward, devices, key_heads):
    case = ScalingCase(scheme, devices, 16_384, key_heads=key_heads, backward=backward)
    memory = case.compiled(jax.devices()).memory_analysis()
    sizes = memory.temp_size_in_bytes, memory.argument_size_in_bytes, memory.output_size_in_bytes
    np.testing.assert_allclose(plan.memory(case), sum(sizes), rtol=0.2)


def test_ten_million_tokens_on_a_thousand_devices(capsys):
    options = "--length 10000000 --devices 1024 --memory 80 --teraflops 400 --link 50 --heads 64"
    options += " --key-heads 8 --head-size 128 --dtype bfloat16 --window 4096 --order contiguous"
    assert scaling.main(["plan", *options.split()]) == 0
    first_line, titles, *rows = capsys.readouterr().out.splitlines()
    assert first_line.startswith("10,000,384 tokens") and titles.startswith("scheme")
    assert [row.split()[0] for row in rows] == ["ring", "all_to_all", "gather"]
    assert rows[0].endswith("fits") and rows[1].endswith("cannot share 64 heads")
    # To the neighbour, and gradients there and back: 9,766 tokens of eight heads.
    case = ScalingCase("ring", 1024, 10_000_384, 64, 8, 128, 4096, None, "contiguous", "bfloat16")
    planned = plan.plan(case, plan.DeviceRates(80e9, 400e12, 50e9))
    assert planned.sent == 9766 * 8 * 128 * 2 * (2 + 2 + 2 * 2 + 2)
    pairs = 4096 * 4097 // 2 + (10_000_384 - 4096) * 4096
    assert planned.compute_seconds == pytest.approx(pairs * 64 * 128 * 14 / 1024 / 400e12)
    assert planned.seconds == max(planned.compute_seconds, planned.send_seconds)


def test_old_results_stay_if_no_case_can_run(tmp_path, capsys, monkeypatch):
    results = tmp_path / "results.jsonl"
    results.write_text("old\n")
    options = ["measure", "--lengths", "64", "--out", str(tmp_path), "--devices"]
    message = "no case is possible: 3 devices cannot share 64 tokens, but 66"
    assert_refused([*options, "3", "3"], message, capsys, scaling.main)
    monkeypatch.setattr(scaling.job, "run", mock.Mock(side_effect=Failure("no such platform")))
    assert scaling.main([*options, "1", "--platform", "tpu"]) == 1
    assert "no such platform" in capsys.readouterr().err
    assert results.read_text() == "old\n"


@pytest.mark.slow
def test_rows_and_plot(tmp_path, capsys):
    sizes = "--lengths 64 --devices 2 3 --schemes all_to_all --head-size 8".split()
    run_options = "--documents 20 --seconds 0.01".split()
    assert scaling.main(["measure", *sizes, *run_options, "--out", str(tmp_path)]) == 0
    assert "3 devices cannot share 64 tokens, but 66" in capsys.readouterr().out
    (row,) = map(json.loads, (tmp_path / "results.jsonl").read_text().splitlines())
    assert row["devices"] == 2 and row["milliseconds"] > 0 and row["sent_bytes"] > 0
    # Ids of queries and keys are one array, which is gathered once.
    assert row["formula_bytes"] - row["sent_bytes"] in (0, 32 * 4)
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")
    assert scaling.main(["measure", *sizes, "--key-heads", "3"]) == 2
    capsys.readouterr()
    with pytest.raises(SystemExit):
        scaling.main(["mesure"])
    assert capsys.readouterr().err.endswith("; nearest: measure\n")


@pytest.mark.exhaustive
@pytest.mark.parametrize("scheme", ["ring", "all_to_all"])
@pytest.mark.parametrize("target", targets.TARGETS)
def test_devices_that_are_not_here_send_what_the_formula_says(target, scheme):
    """Keys and values travel in a ring while devices compute with others."""
    if targets.missing(targets.TARGETS[target]):
        pytest.skip(str(targets.missing(targets.TARGETS[target])))
    options = ["--target", target, "--scheme", scheme, "--length", "16384", "--head-size", "128"]
    # Before Hopper XLA overlaps exchanges with computation only if this flag is set.
    flags = "--xla_gpu_enable_latency_hiding_scheduler=true" if target == "a100" else ""
    command = ("-m", "experiments.scaling", "ahead", *options, "--dtype", "bfloat16")
    said = run_python(*command, env=environment(XLA_FLAGS=flags), check=True)
    row = json.loads(said.stdout.splitlines()[-1])
    assert row["sent_bytes"] == row["formula_bytes"] > 0
    if scheme == "ring":
        assert row["overlapped_bytes"] > 0.9 * row["sent_bytes"]
