"""The loss of the translation experiment, against the formula in float64."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.translation import losses
from experiments.translation.losses import Projection, cross_entropy
from tests.conftest import assert_trees_close


pytestmark = pytest.mark.usefixtures("as_users_run_it")
PLACES, D, V = 13, 5, 7


def by_hand(features, kernel, bias, labels, mask, smoothing):
    """Returns the loss, with the smoothed target written out, and its gradients, by
    float64 loops."""
    features, kernel, bias = (np.asarray(x, np.float64) for x in (features, kernel, bias))
    total = 0.0
    gradients = [np.zeros_like(x) for x in (features, kernel, bias)]
    for place in range(len(labels)):
        if not mask[place]:
            continue
        target = np.full(len(kernel), smoothing / len(kernel))
        target[labels[place]] += 1 - smoothing
        logits = np.array([row @ features[place] for row in kernel]) + bias
        highest = max(logits)
        logs = logits - highest - math.log(sum(math.exp(x - highest) for x in logits))
        total -= sum(t * log for t, log in zip(target, logs, strict=True))
        wrong = np.exp(logs) - target
        gradients[0][place] = wrong @ kernel
        gradients[1] += np.outer(wrong, features[place])
        gradients[2] += wrong
    return total, gradients


def case(places=PLACES, vocabulary=V, spread=3.0):
    random = np.random.default_rng(1)
    features = spread * random.standard_normal((places, D)).astype(np.float32)
    kernel = random.standard_normal((vocabulary, D)).astype(np.float32)
    bias = random.standard_normal(vocabulary).astype(np.float32)
    labels = random.integers(0, vocabulary, places).astype(np.int32)
    mask = np.arange(places) % 5 % 3 != 0
    return features, kernel, bias, labels, mask


def loss_and_gradients(features, kernel, bias, labels, mask, smoothing=0.0) -> Any:
    def run(x, w, b):
        return cross_entropy(x, Projection(w, b), labels, mask, smoothing=smoothing)

    arrays = map(jnp.asarray, (features, kernel, bias))
    return jax.jit(jax.value_and_grad(run, (0, 1, 2)))(*arrays)


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    chunks_of(4, monkeypatch)


def chunks_of(places, monkeypatch):
    monkeypatch.setattr(losses, "_MULTIPLE", 1)
    monkeypatch.setattr(losses, "_CHUNK", {"cpu": places * V})


@pytest.mark.parametrize(("smoothing", "places"), [(0.0, 4), (0.6, 1), (0.1, 1000)])
def test_the_loss_is_that_of_the_formula(smoothing, places, monkeypatch):
    chunks_of(places, monkeypatch)
    arguments = case()
    total, gradients = by_hand(*arguments, smoothing)
    loss, grads = loss_and_gradients(*arguments, smoothing)
    assert loss.dtype == jnp.float32 and float(loss) == pytest.approx(total, rel=2e-6)
    assert_trees_close(grads, gradients, rtol=2e-5, atol=2e-5)
    features, *matrices = map(jnp.asarray, arguments[:3])
    call = functools.partial(losses.cross_entropies, smoothing=smoothing)
    both = jax.jit(call)(features, Projection(*matrices), *arguments[3:])
    assert both.tolist() == pytest.approx([total, by_hand(*arguments, 0.0)[0]], rel=2e-6)


def test_large_logits_overflow_nowhere():
    arguments = case(spread=200.0)
    total, _ = by_hand(*arguments, 0.1)
    loss, grads = loss_and_gradients(*arguments, 0.1)
    assert float(loss) == pytest.approx(total, rel=1e-5)
    assert all(np.isfinite(slope).all() for slope in grads)


def test_narrow_features_are_accumulated_wide():
    features, kernel, bias, labels, mask = case(places=400)
    narrow = jnp.asarray(features, jnp.bfloat16)
    kernel = np.asarray(jnp.asarray(kernel, jnp.bfloat16), np.float32)
    total, gradients = by_hand(np.asarray(narrow, np.float32), kernel, bias, labels, mask, 0.1)
    loss, grads = loss_and_gradients(narrow, kernel, bias, labels, mask, 0.1)
    assert loss.dtype == jnp.float32 and float(loss) == pytest.approx(total, rel=1e-5)
    assert [slope.dtype.name for slope in grads] == ["bfloat16", "float32", "float32"]
    for slope, gradient in zip(grads, gradients, strict=True):
        worst = np.abs(np.asarray(slope, np.float64) - gradient).max() / np.abs(gradient).max()
        assert worst < 2**-7


def test_places_outside_the_mask_have_no_effect():
    features, kernel, bias, labels, mask = case()
    clean = loss_and_gradients(features, kernel, bias, labels, mask, 0.1)
    poisoned = np.where(mask[:, None], features, np.nan)
    dirty = loss_and_gradients(poisoned, kernel, bias, labels, mask, 0.1)
    jax.tree.map(np.testing.assert_array_equal, dirty, clean)
    assert not np.any(np.asarray(clean[1][0])[~mask])
    assert np.abs(np.asarray(clean[1][0])[mask]).min(axis=1).all()
    nothing = loss_and_gradients(poisoned, kernel, bias, labels, np.zeros_like(mask), 0.1)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(nothing))


def test_a_projection_without_bias_and_batch_axes():
    features, kernel, bias, labels, mask = case(places=12)
    shaped = (x.reshape(3, 4, *x.shape[1:]) for x in (features, labels, mask))
    x, *places = map(jnp.asarray, shaped)
    total, gradients = by_hand(features, kernel, 0 * bias, labels, mask, 0.1)
    projection = Projection(jnp.asarray(kernel), None)
    call = lambda x: cross_entropy(x, projection, *places, smoothing=0.1)  # noqa: E731
    loss, slope = jax.jit(jax.value_and_grad(call))(x)
    assert float(loss) == pytest.approx(total, rel=2e-6)
    np.testing.assert_allclose(slope.reshape(12, D), gradients[0], rtol=2e-5, atol=2e-5)


def test_logits_are_never_whole():
    """Temporaries of loss and gradients are copies of the arguments, and hardly any logits."""
    places, vocabulary = 4096, 1000

    def run(x, w, b, labels, mask):
        return cross_entropy(x, Projection(w, b), labels, mask)

    function = jax.jit(jax.value_and_grad(run, (0, 1, 2)))
    memory: Any = function.lower(*case(places, vocabulary)).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 4 * places * vocabulary / 8


def test_chunks_of_padding_are_not_computed():
    features, kernel, bias, labels, mask = map(jnp.asarray, (*case()[:4], np.arange(PLACES) == 3))
    rows, chunks = losses._sorted(features, Projection(kernel, bias), labels, mask)
    assert int(chunks) == 1 and int(rows.labels[0, 0]) == labels[3]
    assert len(rows.labels) == 4
