"""Kernels for Hopper and Blackwell run without races on a model of their barriers and units
(`tests.barriers`), and mistakes in their order are races."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

from jattn import masks, scores, tuning
from jattn.kernels.common import block_mask
from jattn.kernels.gpu.mosaic.kernels import blackwell, hopper
from jattn.kernels.gpu.mosaic.machine import device
from jattn.spec import Shapes, Spec, Tiling
from tests import barriers
from tests.arrays import assert_equal
from tests.barriers import Machine
from tests.conftest import attention_arrays
from tests.copies import Race, gradients
from tests.kernels import exact_results, prepared
from tests.test_hopper import assert_within


T, S = 260, 460
IMPLEMENTATIONS: dict[str, Any] = {"hopper": hopper, "blackwell": blackwell}
RNG = np.random.default_rng(0)
# Documents and biases of keys are streamed with tiles of keys, and documents with queries.
IDS = jnp.asarray(np.arange(S) // 100)[None]
MASK = masks.Lengths(kv=450) & ~masks.Segments(IDS[:, :T], IDS + 1)
SCORE = scores.Bias(jnp.asarray(RNG.normal(size=(1, 1, 1, S)), jnp.float32))


class KernelCase(NamedTuple):
    """The kernels of an implementation, for heads of a size."""

    implementation: str
    head: int

    @property
    def functions(self) -> Any:
        return IMPLEMENTATIONS[self.implementation].functions("cpu")

    @property
    def passes(self) -> tuple[str, ...]:
        """The names of the kernels. Blackwell has one for gradients of values of wide heads."""
        separate = self.implementation == "blackwell" and self.head > 128
        names = "forward", "d_queries", "d_keys", *(["d_values"] if separate else [])
        return tuple(f"jattn_{self.implementation}_{x}" for x in names)


PARAMETER = "jattn_mosaic_d_parameter"
CASES = [KernelCase(x, head) for x in IMPLEMENTATIONS for head in (64, 160)]


def case_of(case: KernelCase, *kernel: str, is_slow: bool) -> Any:
    marks = pytest.mark.slow if is_slow else pytest.mark.exhaustive
    label = kernel[0].removeprefix("jattn_") if kernel else case.implementation
    return pytest.param(case, *kernel, marks=marks, id=f"{label}-{case.head}")


each_case = pytest.mark.parametrize("case", [case_of(x, is_slow=x.head == 64) for x in CASES])
each_kernel = pytest.mark.parametrize(
    ("case", "kernel"),
    [case_of(x, kernel, is_slow=x == CASES[0]) for x in CASES for kernel in (*x.passes, PARAMETER)],
)


@functools.cache
def operands_of(head: int) -> Any:
    """Query, key, value and the cotangent of the output, and a spec."""
    query, key, value, d_out = attention_arrays((1, T, S, 1, 1, head, head), "bfloat16")
    spec = prepared(Spec(MASK, SCORE, head**-0.5, None, None), Shapes.of(query, value))
    return query, key, value, d_out, spec


def forward(case: KernelCase) -> Any:
    """Output, normalizer, and whether all are finite; all keys in one part."""
    *qkv, _, spec = operands_of(case.head)
    with tuning.using(gpu_tiles_each=S):
        return case.functions.forward(spec, *qkv)


def backward(case: KernelCase, results: Any) -> Any:
    """The gradients of the bias, query, key and value, from the results of the forward pass."""
    *operands, spec = operands_of(case.head)
    return gradients(case.functions, spec, operands, results)


class FaultlessRun(NamedTuple):
    """The results of the forward pass, gradients, and the machine that computed them."""

    forward: Any
    gradients: Any
    machine: Machine


@functools.cache
def right(case: KernelCase) -> FaultlessRun:
    machine = Machine()
    with barriers.on(machine):
        forward_results = forward(case)
        return FaultlessRun(forward_results, backward(case, forward_results), machine)


@each_case
def test_kernels_have_no_races(case):
    """They compute right results for tiles of all kinds, and fill each buffer more than once."""
    (out, normalizer, _), gradients, machine = right(case)
    assert {*machine.did} == {*case.passes, PARAMETER}
    got = out, normalizer.lse.swapaxes(1, 2), *gradients
    assert_within(got, exact_results(MASK, SCORE, *operands_of(case.head)[:4]))
    kinds = block_mask.kinds(operands_of(case.head)[-1], 384, 512, Tiling(128, 64))
    assert {*np.unique(kinds)} == {masks.EMPTY, masks.MIXED, masks.FULL}
    for kernel in case.passes:
        passes = machine.passes[kernel]
        assert min(x.most for name, x in passes.items() if name.endswith(".free")) > 1


class Mistaken(Machine):
    """A machine that runs one kernel with a mistake: an operation is omitted, or a barrier expects
    more or fewer arrivals. Other kernels return zeros."""

    def __init__(self, kernel: str, omits: str = "", barrier: str = "", extra_arrivals: int = 0):
        super().__init__()
        self.mistaken, self.omits = kernel, omits
        self.barrier, self.extra_arrivals = barrier, extra_arrivals

    def does(self, what: str) -> bool:
        return what != self.omits

    def arrivals(self, barrier: str, count: int) -> int:
        return count + self.extra_arrivals if barrier == self.barrier else count

    def kernel(self, body: Any, **how: Any) -> Callable[..., list[Any]]:
        if how["kernel_name"] == self.mistaken:
            return super().kernel(body, **how)
        return lambda *operands: [jnp.zeros(x.shape, x.dtype) for x in how["out_type"]]


def race(case: KernelCase, machine: Mistaken) -> str | None:
    """The race that the mistake causes; None if it causes none."""
    results = right(case).forward
    try:
        with barriers.on(machine):
            _ = forward(case) if machine.mistaken.endswith("forward") else backward(case, results)
    except Race as error:
        return str(error)
    return None


@each_kernel
def test_whatever_is_left_out_is_a_race(case, kernel):
    """Each wait for a barrier, each arrival, and all other waits and fences are needed."""
    did = right(case).machine.did[kernel]
    waits = {"commit_smem"} | ({"wait_smem_to_gmem"} if kernel != PARAMETER else set())
    assert waits < did
    assert [x for x in sorted(did) if race(case, Mistaken(kernel, omits=x)) is None] == []


@each_kernel
def test_as_many_as_arrive_pass_a_barrier(case, kernel):
    passes = right(case).machine.passes[kernel]
    mistakes = [
        Mistaken(kernel, barrier=name, extra_arrivals=extra)
        for name, (arrivals, most) in passes.items()
        for extra in (-1, 1)
        if most and arrivals + extra
    ]
    assert mistakes
    assert [(x.barrier, x.extra_arrivals) for x in mistakes if race(case, x) is None] == []


def of_several_places(machine: Machine) -> Any:
    """The forward pass in one program, which computes three blocks of queries."""
    *qkv, _, _ = operands_of(64)
    spec = prepared(Spec(masks.Causal(), None, 0.125, None, None), Shapes.of(qkv[0], qkv[2]))
    with barriers.on(machine), tuning.using(gpu_tiles_each=S):
        return hopper.functions("cpu").forward(spec, *qkv)[:2]


@pytest.mark.slow
def test_programs_of_several_places_have_no_races(monkeypatch):
    alone, several = Machine(), Machine()
    want = of_several_places(alone)
    monkeypatch.setattr(device, "multiprocessors", lambda: 1)
    got = of_several_places(several)
    assert_equal(got, want)
    (kernel,) = several.did
    (passes,), (single,) = several.passes.values(), alone.passes.values()
    assert all(passes[name].most > single[name].most for name in passes if single[name].most)
    for omitted in sorted(several.did[kernel]):
        with pytest.raises(Race):
            of_several_places(Mistaken(kernel, omits=omitted))
