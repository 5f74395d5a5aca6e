"""The table of cases at sizes with several of the tiles that users get, under `vmap`.

Arrays of a case are repeated along their axes of queries and keys. The results of an implementation
must be those of the reference, which has no tiles, for one example after another.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn import masks, tuning
from jattn.kernels.common import block_mask
from tests.cases import CASES, CallCase, CaseInputs, inputs
from tests.conftest import out_and_gradients, quick_jit
from tests.test_contract import CaseResults, assert_close, attend, everything, on_device, random_key


# Heads of more than 65,536 pairs are not one piece, and 128 is the smallest tile.
SIZES, SQUARE = (260, 272), (264, 264)
COUNTS = ("prefix", "q_lengths", "kv_lengths")  # arrays that hold numbers of tokens
EXAMPLES = 2


def enlarged(case: CallCase) -> CallCase:
    """The case with many queries and keys, if it has more than one."""
    old = case.sizes
    T, S = SQUARE if old.T == old.S else SIZES
    sizes = old._replace(T=T if old.T > 1 else old.T, S=S if old.S > 1 else old.S)
    along = {old.T: sizes.T, old.S: sizes.S}

    def repeated(array: Any, axis: int, size: Any) -> Any:
        return np.take(array, np.arange(size) % array.shape[axis], axis=axis)

    def enlarged_array(name: str, array: Any) -> Any:
        if name in COUNTS:
            return array * (sizes.S // max(1, old.S))
        if name == "layout":
            for axis, (few, many) in ((-2, (old.T, sizes.T)), (-1, (old.S, sizes.S))):
                block = -(-few // array.shape[axis])
                array = repeated(array, axis, -(-many // block))
            return array
        lead = len(old.batch) if array.shape[: len(old.batch)] == old.batch else 0
        for axis in range(lead, array.ndim):
            array = repeated(array, axis, along.get(array.shape[axis], array.shape[axis]))
        return array

    def all_of(arrays: Any) -> Any:
        return {name: enlarged_array(name, np.asarray(x)) for name, x in arrays.items()}

    mask, score, q, kv = case.mask, case.score, case.q_positions, case.kv_positions
    return dataclasses.replace(
        case,
        sizes=sizes,
        mask=mask if mask is None else dataclasses.replace(mask, operands=all_of(mask.operands)),
        score=score and dataclasses.replace(score, parameters=all_of(score.parameters)),
        q_positions=None if q is None else repeated(q, -1, sizes.T),
        kv_positions=None if kv is None else repeated(kv, -1, sizes.S),
    )


def gradient_of_vmap(implementation: str, case: CallCase, x: CaseInputs) -> CaseResults:
    """Values and gradients of the mapped call; `x` holds examples along a new first axis."""

    def call(q: Any, k: Any, v: Any, parameters: Any) -> Any:
        attend_example = lambda x: attend(implementation, case, x)  # noqa: E731
        return jax.vmap(attend_example)(x._replace(q=q, k=k, v=v, parameters=parameters))

    inputs = (x.q, x.k, x.v, x.parameters)
    out, lse, dq, dk, dv, d_parameters = out_and_gradients(call, inputs, x.d_out, x.d_lse)
    return CaseResults(out, lse, {"q": dq, "k": dk, "v": dv, **d_parameters})


def check(implementation: str, name: str) -> None:
    """`vmap` and its gradient are a loop over the reference."""
    case = enlarged(CASES[name])
    several = [on_device(inputs(case, seed=seed)) for seed in range(EXAMPLES)]
    rules = case.rules(several[0].operands, several[0].parameters)
    rules |= {"dropout_rate": case.rate, "dropout_key": random_key() if case.rate else None}
    with tuning.using(generated_pairs=0):  # few pairs do not keep a named one from running
        reason = jattn.explain(*several[0][:3], **rules)[implementation]
    if reason is not None:
        with pytest.raises(NotImplementedError, match=implementation):
            attend(implementation, case, several[0])
        return
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *several)
    results = quick_jit(functools.partial(gradient_of_vmap, implementation, case))(stacked)
    single = quick_jit(functools.partial(everything, "reference", case))
    for place, x in enumerate(several):
        got = jax.tree.map(lambda a, place=place: np.asarray(a[place]), results)
        assert_close(got, jax.tree.map(np.asarray, single(x)), 1e-12)


# Functions, lists of tiles, and lengths.
SELECTED = ("predicate", "dilated", "dropout_masked")


def _marks(implementation: str, name: str) -> Any:
    often = [*zip(("blockwise", "native", "native"), SELECTED, strict=True)]
    return pytest.mark.slow if (implementation, name) in often else pytest.mark.exhaustive


@pytest.mark.default_tiles
@pytest.mark.parametrize(
    ("implementation", "name"),
    [
        pytest.param(implementation, name, marks=_marks(implementation, name))
        for implementation in ("blockwise", "native")
        for name, case in CASES.items()
        if 0 not in case.sizes.batch
    ],
)
def test_vmap_over_several_tiles(implementation, name):
    check(implementation, name)


@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize("by_key", [False, True])
def test_a_walk_visits_what_is_not_empty_and_full_tiles_first(static, by_key):
    kinds = np.random.default_rng(0).integers(0, 3, (2, 1, 5, 4)).astype(np.int8)
    visits = block_mask.of(kinds if static else jnp.asarray(kinds), by_key=by_key)
    order, ends = map(np.asarray, visits.arrays)
    kinds = kinds.swapaxes(-1, -2) if by_key else kinds
    for b, i in np.ndindex(2, kinds.shape[2]):
        full, visited = ends[b, 0, i]
        row = order[b, 0, i]
        assert sorted(row[:full]) == np.flatnonzero(kinds[b, 0, i] == masks.FULL).tolist()
        assert sorted(row[full:visited]) == np.flatnonzero(kinds[b, 0, i] == masks.MIXED).tolist()
