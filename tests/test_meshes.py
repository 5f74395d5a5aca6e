"""Training on a mesh of devices: the same numbers as on one, and errors of one line."""

import dataclasses
import itertools
import shutil

import jax
import numpy as np
import pytest

from experiments.translation import __main__ as cli
from experiments.translation import meshes, training
from experiments.translation.meshes import Placement
from experiments.translation.runs import TranslationRun
from tests.test_translation import TINY, Bench, make_bench, set_words


pytestmark = pytest.mark.usefixtures("as_users_run_it")


def losses(
    bench: Bench, mesh: str | None, steps: int = 3
) -> tuple[list[float], training.TrainingState]:
    """The losses of the first steps, and the state after them, which is sharded as at first."""
    placement = Placement.of(meshes.parse_mesh(mesh or "data=1"), bench.model)
    train_step = training.make_step(bench.model, bench.optimiser, bench.config, placement)
    state = placement.state(bench.init_state())
    shardings = jax.tree.map(lambda array: array.sharding, state)
    losses_of_steps = []
    for batch in itertools.islice(bench.batches.from_step(0), steps):
        placed = placement.batch(batch, bench.config.accumulation_steps)
        state, metrics = train_step(state, placed)
        losses_of_steps.append(float(metrics.loss))
    if mesh:
        same = jax.tree.map(lambda x, y: x.sharding.is_equivalent_to(y, x.ndim), state, shardings)
        assert jax.tree.all(same)
    return losses_of_steps, placement.host(state)


# The model has dropout, and rows are not divisible by the number of devices. Tests of the same
# settings and mesh share compiled programs.
SETTINGS = {"tokens_per_batch": 9 * 32, "steps": 8, "checkpoint_every": 4}
MESHES = ["data=2,model=2,context=2", "data=4,model=2"]


@pytest.mark.one_in(2, slow=True)
@pytest.mark.default_tiles
@pytest.mark.parametrize("mesh", MESHES)
def test_a_mesh_changes_no_number_but_by_rounding(mesh):
    small_bench = make_bench(dataclasses.replace(TINY, **SETTINGS))
    alone, state = losses(small_bench, None)
    cut, sharded_state = losses(small_bench, mesh)
    np.testing.assert_allclose(cut, alone, rtol=2e-5)
    (_, (expected, *_)), (_, (gradients, *_)) = state.opt_state, sharded_state.opt_state
    for name, mean in expected.mu.items():
        np.testing.assert_allclose(gradients.mu[name], mean, atol=2e-6, err_msg=name)


@pytest.mark.slow
@pytest.mark.default_tiles
def test_a_run_goes_on_without_its_mesh(tmp_path):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    small = ("--preset", "tiny", *set_words(*(f"{name}={x}" for name, x in SETTINGS.items())))
    assert cli.main(["train", "--run", str(whole), *small, "--mesh", MESHES[0]]) == 0
    shutil.copytree(whole, resumed)
    TranslationRun.open(resumed)._drop([8])
    assert cli.main(["train", "--run", str(resumed), "--resume"]) == 0
    expected, record = (TranslationRun.open(run).metrics()[-2] for run in (whole, resumed))
    assert expected["step"] == record["step"] == 8
    np.testing.assert_allclose(record["loss"], expected["loss"], rtol=1e-5)
