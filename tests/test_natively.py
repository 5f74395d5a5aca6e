"""The contract by the kernels for the device of this machine, not interpreted: on a CPU for a few
cases, because its kernel has test files of its own; on a GPU for all cases.

On a GPU, cases that an implementation refuses are skipped with its reason
(`conftest.pytest_pyfunc_call`).
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn.kernels import registry
from tests import test_contract as contract
from tests.cases import CASES, SOFTMAX_CASES, inputs
from tests.conftest import ON_CPU, out_and_gradients, quick_jit
from tests.kernels import (
    CEILINGS,
    assert_accurate,
    assert_dead_rows_are_empty,
    poisoned,
    poisons_of,
)
from tests.oracle import error


PLATFORM = "cpu" if ON_CPU else {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())
KERNELS = [name for name, row in registry.KERNELS.items() if PLATFORM in (row.platforms or ())]
NAMES = ("chain", "lengths_both") if ON_CPU else tuple(SOFTMAX_CASES)
DTYPES = ("float32", "bfloat16", "float16")

pytestmark = pytest.mark.default_tiles


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("implementation", [x for x in KERNELS if x != "cudnn"])
def test_contract(implementation, dtype, name):
    """Values and gradients, a second run that is equal bit for bit, and poisoned masked places."""
    x = inputs(CASES[name], dtype)
    program = quick_jit(functools.partial(contract.everything, implementation, CASES[name]))

    def run(x: Any) -> Any:
        return jax.tree.map(np.asarray, program(contract.on_device(x)))

    results = run(x)
    assert_accurate(name, dtype, results)
    contract.assert_same(run(x), results)
    assert_dead_rows_are_empty(name, results)
    rows, columns = contract.dead_places(name)
    for poison in poisons_of(name)[:2]:
        got = run(poisoned(name, x, poison))
        assert_accurate(name, dtype, got)
        for label, places in (("q", rows), ("k", columns), ("v", columns)):
            assert not got.gradients[label][places].any()


@pytest.mark.skipif("cudnn" not in KERNELS, reason="cuDNN is for CUDA")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_cudnn(dtype, name):
    """Heads of a size that cuDNN supports, without lse, which it rounds."""
    case = CASES[name]
    case = dataclasses.replace(case, sizes=case.sizes._replace(H=16, V=16))
    x = inputs(case, dtype)
    x = x._replace(d_lse=np.zeros_like(x.d_lse))

    @quick_jit
    def run(x: Any) -> Any:
        def call(q: Any, k: Any, v: Any, parameters: Any) -> Any:
            replaced = x._replace(q=q, k=k, v=v, parameters=parameters)
            return contract.attend("cudnn", case, replaced, return_lse=False)

        out, dq, dk, dv, d_parameters = out_and_gradients(
            call, (x.q, x.k, x.v, x.parameters), x.d_out
        )
        return out, {"q": dq, "k": dk, "v": dv, **d_parameters}

    out, gradients = run(contract.on_device(x))
    want = contract.truth(case, x)
    assert out.dtype == jnp.dtype(dtype)
    assert error(out, want.out) <= contract.CEILINGS[dtype]
    for label, gradient in gradients.items():
        assert error(gradient, want.gradients[label]) <= CEILINGS[dtype], label
