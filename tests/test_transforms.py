"""Under every transformation of JAX, with functions as users write them."""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jattn
from jattn import _functions, masks, mechanisms, scores
from jattn.cache import DenseCache, PagedCache, RollingCache
from tests import oracle
from tests.cases import CASES, Case, Inputs, Sizes, inputs
from tests.conftest import quick_jit
from tests.oracle import error
from tests.test_contract import (
    assert_close,
    attend,
    everything,
    named,
    on_device,
    problem_of,
    random_key,
    truth,
)


IMPLEMENTATIONS = (None, "native", "blockwise", "reference")
every_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def runs(implementation: str | None, case: Case, x: Inputs) -> bool:
    """Whether an implementation takes a case."""
    rules = case.rules(x.operands, x.parameters)
    rules |= {"dropout_rate": case.rate, "dropout_key": random_key() if case.rate else None}
    return implementation is None or jattn.explain(x.q, x.k, x.v, **rules)[implementation] is None


# --- masks and scores as keys -------------------------------------------------------------------


def rule(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return kv <= q


SAME = {
    "Causal": lambda: masks.Causal(),
    "Window": lambda: masks.Window(3, 1),
    "nested": lambda: ~(masks.Causal() & masks.Window(left=2)) | masks.Global(1),
    "Prefix": lambda: masks.Prefix(3),
    "Lengths": lambda: masks.Lengths(kv=4),
    "Blocks": lambda: masks.Dilated(2),
    "Predicate": lambda: masks.Predicate(rule),
    "SoftCap": lambda: scores.SoftCap(2.0),
    "chain": lambda: scores.SoftCap(2.0) >> scores.Temperature(1.5),
}


@pytest.mark.parametrize("name", SAME)
def test_equal_ones_are_equal_and_hash_alike(name):
    one, other = SAME[name](), SAME[name]()
    assert one == other
    assert hash(one) == hash(other)
    assert {one: 1}[other] == 1


def test_different_ones_are_different():
    different = [make() for make in SAME.values()]
    different += [masks.Window(3, 2), masks.Prefix(4), scores.SoftCap(3.0), masks.Full()]
    for one, other in itertools.combinations(different, 2):
        assert one != other
    assert masks.Prefix(1) != scores.SoftCap(1.0)
    assert masks.Causal() != "Causal()"


def test_arrays_are_equal_to_themselves_alone():
    ids = jnp.array([1, 2])
    assert masks.Segments(ids) & masks.Causal() == masks.Segments(ids) & masks.Causal()
    assert hash(masks.Segments(ids)) == hash(masks.Segments(ids))
    assert masks.Segments(ids) != masks.Segments(jnp.array([1, 2]))
    cache = DenseCache.create(1, 2, 1, 1)
    assert cache == cache  # noqa: PLR0124
    assert cache != DenseCache.create(1, 2, 1, 1)


def test_a_mask_as_a_static_argument_is_traced_once():
    traced = []

    @functools.partial(jax.jit, static_argnames=("mask", "score"))
    def call(q: Any, mask: Any, score: Any) -> Any:
        traced.append(mask)
        return jattn.attention(q, q, q, mask=mask, score=score)

    q = jnp.ones((2, 3, 1, 4))
    for _ in range(3):
        call(q, masks.Causal() & masks.Window(left=2), scores.SoftCap(2.0))
    call(q, masks.Causal() & masks.Window(left=1), scores.SoftCap(2.0))
    assert len(traced) == 2
