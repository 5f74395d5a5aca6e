"""Helpers for tests of kernels."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxprs_in_params

import jattn
from jattn import masks
from jattn.call import Call, of_shapes
from jattn.kernels.common import block_mask
from jattn.spec import Shapes, Spec
from tests import test_contract as contract
from tests.cases import SOFTMAX_CASES
from tests.conftest import normal_arrays, quick_jit
from tests.oracle import error


# Worst errors of gradients measured over all cases: 1.6e-2, 1.7e-3.
CEILINGS = contract.CEILINGS | {"bfloat16": 2e-2, "float16": 2.5e-3}
poisoned = contract.poisoned


def made(shapes: Shapes, **options: Any) -> Call:
    """Returns a prepared call of these sizes."""
    return of_shapes(shapes, **options).prepared()


def prepared(spec: Spec, shapes: Shapes) -> Spec:
    """Returns a spec as kernels take it."""
    return Call(spec, shapes).prepared().spec


@quick_jit
def appended(cache: Any, *new: Any) -> Any:
    """A cache with new tokens, by one program instead of one for each operation."""
    return cache.append(*new)


def exact_results(mask: Any, score: Any, *arrays: Any) -> Any:
    """Out, lse and the gradients of the score's arrays, query, key and value, by the formula in
    float64. The last of `arrays` is the cotangent of out."""
    *qkv, d_out = (x.astype(jnp.float64) for x in arrays)
    attend = functools.partial(
        jattn.attention, mask=mask, return_lse=True, implementation="reference"
    )
    (out, lse), pull = jax.vjp(lambda x, *qkv: attend(*qkv, score=x), score, *qkv)
    return out, lse, *jax.tree.leaves(pull((d_out, jnp.zeros_like(lse))))


def of_tokens(
    query: Any,
    keys: Any,
    values: Any,
    lengths: np.ndarray,
    rules: dict[str, Any],
    window: int | None = None,
    dtype: Any = jnp.float64,
) -> Any:
    """Out and lse, by the formula in a dtype, of the queries of the last tokens of each row, which
    has as many tokens as `lengths` says."""

    def cast(x: Any) -> Any:
        is_float = isinstance(x, jax.Array | np.ndarray) and jnp.issubdtype(x.dtype, jnp.floating)
        return jnp.asarray(x, dtype) if is_float else x

    *qkv, options = jax.tree.map(cast, (query, keys, values, rules))
    options["mask"] = options.get("mask", masks.Full()) & masks.Lengths(kv=lengths)
    options["mask"] &= masks.Window(left=window)
    options["q_positions"] = lengths[:, None] + np.arange(-query.shape[1], 0)
    options |= {"implementation": "reference", "return_lse": True}
    return quick_jit(functools.partial(jattn.attention, **options))(*qkv)


def assert_accurate(name: str, dtype: str, got: Any) -> None:
    """Checks errors; in 16 bits against a formula that rounds as tensor cores do."""
    contract.assert_accurate(name, dtype, got, CEILINGS, matrix_units=dtype != "float32")


def poisons_of(name: str) -> tuple[float, ...]:
    """Numbers to poison a case with; none where every query and every key is needed."""
    return contract.POISONS if any(x.any() for x in contract.dead_places(name)) else ()


def assert_dead_rows_are_empty(name: str, results: contract.CaseResults) -> None:
    """Queries without keys have an output of 0 and, with a softmax, an lse of -inf."""
    rows, _ = contract.dead_places(name)
    assert not results.out[rows].any()
    assert name not in SOFTMAX_CASES or np.all(np.swapaxes(results.lse, -1, -2)[rows] == -np.inf)


def lying_mask(keys: int) -> masks.Predicate:
    """A mask without pairs, whose bounds call tiles before this key full, and others empty.

    Kernels that follow the tile map attend to the keys before it.
    """

    def lie(tile: masks.Tile) -> tuple[Any, Any]:
        first = np.asarray(tile.columns.start) < keys
        rows = np.ones_like(np.asarray(tile.rows.start), bool)
        return rows & first, rows & first

    return masks.Predicate(lambda b, h, i, j: i < 0, bounds=lie)


def assert_parts(monkeypatch, implementation: str, dtype, expected: int, most: float) -> None:
    """Checks that an implementation splits many keys for few queries into `expected` parts.

    Some parts have no key that may be attended to. The error is at most `most`.
    """
    counted, parts = [], block_mask.parts
    monkeypatch.setattr(block_mask, "parts", lambda *x: counted.append(parts(*x)) or counted[-1])
    q, k, v = normal_arrays(*((2, n, 2, 8) for n in (2, 230, 230)), dtype=dtype)
    mask = masks.Lengths(kv=jnp.array([230, 17])) & masks.Window(left=200)
    call = functools.partial(
        jattn.attention, mask=mask, q_positions=jnp.array([200, 3]), return_lse=True
    )
    exact = (x.astype(jnp.float32) for x in (q, k, v))
    got = quick_jit(functools.partial(call, implementation=implementation))(q, k, v)
    want = quick_jit(functools.partial(call, implementation="reference"))(*exact)
    assert counted == [expected]
    for x, y in zip(got, want, strict=True):
        assert error(x, y) <= most


def largest(jaxpr: Any) -> int:
    """Returns the size of the largest array in a traced program."""
    sizes = [0]
    for equation in jaxpr.eqns:
        sizes += [getattr(x.aval, "size", 0) for x in equation.outvars]
        sizes += [largest(inner) for inner in jaxprs_in_params(equation.params)]
    return max(sizes)
