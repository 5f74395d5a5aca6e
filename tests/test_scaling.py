"""What attention over several devices sends: the formula is what stands in compiled programs."""

import collections
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from experiments.scaling import programs
from jattn import masks, parallel, scores
from tests.conftest import quick_jit
from tests.test_parallel import mesh_of


DEVICES, T, N, K, H, V = 4, 64, 8, 2, 6, 3
TOKENS = P(None, "x")
QKV = [
    jax.ShapeDtypeStruct((2, T, heads, size), jnp.float32)
    for heads, size in ((N, H), (K, H), (K, V))
]


def compiled(given: dict[str, Any], ids: Any, backward: bool) -> Any:
    """A program of attention within a window, and within segments if there are `ids`."""
    mesh = mesh_of(x=DEVICES)

    def run(query: Any, key: Any, value: Any, *rest: Any) -> Any:
        return parallel.attention(
            query, key, value, mesh=mesh, axis_name="x", **rules(given, *rest)
        )

    arguments, specs = [*QKV], [TOKENS] * 3
    if ids is not None:
        arguments += [ids, ids + 1, jnp.zeros((1, N, T, T))]
        specs += [TOKENS, TOKENS, P()]
    learned = tuple(n for n in range(len(arguments)) if n not in (3, 4))
    function = jax.grad(lambda *x: jnp.sum(run(*x) ** 2), learned) if backward else run
    shardings = tuple(jax.NamedSharding(mesh, x) for x in specs)
    return quick_jit(function, in_shardings=shardings).lower(*arguments).compile()


def rules(given: dict[str, Any], *arrays: Any) -> dict[str, Any]:
    window = masks.Causal() & masks.Window(left=20)
    if not arrays:
        return {"mask": window, **given}
    *ids, bias = arrays
    return {"mask": window & masks.Segments(*ids), "score": scores.Bias(bias), **given}


WAYS = [
    ("ring", "contiguous"),
    ("all_to_all", "zigzag"),
    ("gather", "zigzag"),
    ("ring", "zigzag"),
    ("all_to_all", "contiguous"),
    ("gather", "contiguous"),
]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("with_arrays", [False, True])
@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.parametrize(("scheme", "order"), WAYS)
def test_the_formula_is_what_a_program_sends(scheme, order, backward, with_arrays):
    given = {"scheme": scheme, "order": order}
    ids = np.zeros((2, T), np.int32) if with_arrays else None
    arrays = (ids, ids, jnp.zeros((1, N, T, T))) if with_arrays else ()
    text = compiled(given, ids, backward).as_text()
    found = programs.total(x for x in programs.exchanges(text) if x.kind != "all-reduce")
    expected = collections.Counter()
    for each in parallel.exchanges(*QKV, devices=DEVICES, **rules(given, *arrays)):
        if backward or not each.backward:
            expected[each.kind, each.bytes] += each.times
    assert found == expected
